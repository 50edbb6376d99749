/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernel_log.h - the errors that the NVIDIA driver writes to the kernel log: Xids of GPUs, SXids of NVSwitches.
 *
 * A log says more than anybody needs to know of a machine. So what was read from it is kept, and not its lines; a
 * snapshot has of each error its number, its device, its time and how often it came.
 */
#ifndef EP_DOCTOR_KERNEL_LOG_H
#define EP_DOCTOR_KERNEL_LOG_H

#include "source/source.h"

#define KERNEL_LOG_FILE "/var/log/kern.log"
#define KERNEL_LOG_KINDS 32

/* nvmlDeviceGpuRecoveryAction_t, which an Xid 154 tells: what the driver wants done. */
enum kernel_recovery {
    KERNEL_RECOVERY_UNKNOWN = -1,
    KERNEL_RECOVERY_NONE,
    KERNEL_RECOVERY_RESET,
    KERNEL_RECOVERY_REBOOT,
    KERNEL_RECOVERY_DRAIN_P2P,
    KERNEL_RECOVERY_DRAIN_AND_RESET,
    KERNEL_RECOVERIES
};

/* In the driver's words; "" where it was not told. */
const char *kernel_recovery_name(enum kernel_recovery recovery);

/* Errors of one number from one device. Strings belong to the source. */
struct kernel_error {
    int number, n;
    const char *address; /* as the log has it: "0000:0f:00" */
    const char *time;    /* of the first; "" where the log does not say it */
    const char *line;    /* the first; in a snapshot what is known of it */
    enum kernel_recovery recovery;
};

struct kernel_log {
    enum source_state state;
    const char *why, *where;
    int n;
    struct kernel_error errors[KERNEL_LOG_KINDS];
};

/*
 * The Xids of this boot, from the first place where a log can be read; not those that programs make, nor those of a GPU
 * that has recovered since.
 */
void kernel_log_read_xids(struct source *source, struct kernel_log *ret_log);

/* The fatal SXids since the driver was loaded, each by itself. */
void kernel_log_read_sxids(struct source *source, struct kernel_log *ret_log);

#endif
