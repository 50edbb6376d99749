/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernel_log.h - errors of the NVIDIA driver in the kernel log: Xids of GPUs, SXids of NVSwitches.
 *
 * A log contains private data. So only what was parsed from it is kept, not its lines; for each error a snapshot
 * contains the number, device, time and count.
 */
#ifndef EP_DOCTOR_KERNEL_LOG_H
#define EP_DOCTOR_KERNEL_LOG_H

#include "machine/source/source.h"

#define KERNEL_LOG_FILE "/var/log/kern.log"
#define KERNEL_LOG_KINDS 32

/* nvmlDeviceGpuRecoveryAction_t as reported by Xid 154: the recovery action that the driver asks for. */
enum kernel_recovery {
    KERNEL_RECOVERY_UNKNOWN = -1,
    KERNEL_RECOVERY_NONE,
    KERNEL_RECOVERY_RESET,
    KERNEL_RECOVERY_REBOOT,
    KERNEL_RECOVERY_DRAIN_P2P,
    KERNEL_RECOVERY_DRAIN_AND_RESET,
    KERNEL_RECOVERIES
};

/* The driver's name for it; "" if not reported. */
const char *kernel_recovery_name(enum kernel_recovery recovery);

/* Errors with the same number from the same device. Strings belong to the source. */
struct kernel_error {
    int number, n;
    const char *address; /* as in the log: "0000:0f:00" */
    const char *time;    /* of the first one; "" if the log does not contain it */
    const char *line;    /* the first one; from a snapshot a summary */
    enum kernel_recovery recovery;
};

struct kernel_log {
    enum source_state state;
    const char *why, *where;
    int n;
    struct kernel_error errors[KERNEL_LOG_KINDS];
};

/* source_log_fact() of the first of the kernel's logs that can be read, and which that is. */
struct source_answer kernel_log_fact(struct source *source, const char *name, source_reader *read, const char *needle,
                                     const char **ret_where);

#define KERNEL_INITS_MAX 16

/* GPUs that the driver could not initialise since it was loaded. */
struct kernel_inits {
    const char *where;
    bool no_power;    /* "GPU does not have the necessary power cables connected" */
    bool no_firmware; /* it has waited in vain for the GPU's own firmware (GFW_BOOT) */
    int n;
    const char *addresses[KERNEL_INITS_MAX]; /* "0000:0f:00.0" */
};

/* The Xids of this boot, except those that programs cause and those of a GPU that has recovered since. */
void kernel_log_read_xids(struct source *source, struct kernel_log *ret_log);

/* "RmInitAdapter failed" of this boot, from the first readable log. */
void kernel_log_read_inits(struct source *source, struct kernel_inits *ret_inits);

/* The fatal SXids since the driver was loaded, one entry for each. */
void kernel_log_read_sxids(struct source *source, struct kernel_log *ret_log);

/* --- Xids --- */

enum xid_action {
    XID_OF_PROGRAM, /* caused by a program, or a note: says nothing about the GPU's health */
    XID_RECOVERED,  /* the driver has recovered; NVML reports what remains to be done */
    XID_RESET,      /* reset the GPU */
    XID_RESTART,    /* restart the node: a reset of the GPU is not sufficient */
    XID_LINK,       /* an NVLink: reset the GPUs at both ends, then inspect the link */
    XID_OTHER       /* not in the table */
};

struct xid {
    int first, last; /* numbers */
    enum xid_action action;
    const char *text; /* a phrase */
};

/* The row of an Xid; for an unknown number, a row that says so. */
const struct xid *xid_find(int number);

/* What to do, a sentence that includes its side effects. */
const char *xid_action_text(enum xid_action action);

#endif
