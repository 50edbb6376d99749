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
    KERNEL_RECOVERY_DRAIN_AND_RESET
};

/* The driver's name for it; "" if not reported. */
const char *kernel_recovery_name(int recovery);

/*
 * `errors` are those with one number from one device: [{"number": 79, "n": 2, "device": "0000:0f:00", "time": of the
 * first, "" if the log does not contain it, "line": the first, "" in a snapshot, "recovery": enum kernel_recovery}].
 */
struct kernel_log {
    enum source_state state;
    const char *why, *where;
    const json_t *errors; /* NULL: none; belongs to the source */
    const char *since;    /* what is older is of an earlier start of the driver; "" if nothing is */
};

/* Did the error, which `word` begins, happen since then? Its line, for which a snapshot has a summary. */
bool kernel_error_is_since(const json_t *error, const char *since);
const char *kernel_error_line(struct source *source, const char *word, const json_t *error);

/* source_log_fact() of the first of the kernel's logs that can be read, and which that is. */
struct source_answer kernel_log_fact(struct source *source, const char *name, source_reader *read, const char *needle,
                                     const char **ret_where);

/* The Xids of this boot, except those that programs cause and those of a GPU that has recovered since. */
struct kernel_log kernel_log_xids(struct source *source);

/* What the driver says before it: a part of the line, a phrase, whether a restart helps, and what helps else. */
struct init_cause {
    const char *line, *text;
    bool reboot;
    const char *advice;
};

/*
 * GPUs that the driver could not initialise since it was loaded ("RmInitAdapter failed"), from the first readable log:
 * {"devices": ["0000:0f:00.0"], ...}; and why, if the log says it.
 */
const json_t *kernel_log_inits(struct source *source, const char **ret_where, const struct init_cause **ret_cause);

/* The fatal SXids since the driver was loaded, one entry for each. */
struct kernel_log kernel_log_sxids(struct source *source);

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
