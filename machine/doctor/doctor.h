/* SPDX-License-Identifier: Apache-2.0 */
/*
 * doctor.h - the checks for faults of a machine, one for each failure mode.
 *
 * A check is a pure function from a machine (source, topology, software) to at most one finding. It prints nothing,
 * changes nothing and loads nothing. It has one of four outcomes: fine, found, not applicable, unknown; the last two
 * have a reason.
 */
#ifndef EP_DOCTOR_DOCTOR_H
#define EP_DOCTOR_DOCTOR_H

#include "machine/hardware/map.h"
#include "machine/hardware/topo.h"
#include "machine/software/advice.h"
#include "machine/software/software.h"
#include "machine/source/source.h"

/* Everything that checks may read. Created once, then read-only. */
struct doctor_machine {
    struct source *source;
    struct topo *topo;
    struct software *software;
    struct map *map;   /* the best one */
    struct map *ibgda; /* the best one for NVSHMEM and DeepEP */
    struct advice *advice;
    struct audit *audit;         /* of the inspected environment */
    struct stack_result *stacks; /* by row of the table of stacks; filled when first asked */
};

/* Reads a machine. Takes ownership of `source`. */
struct doctor_machine *doctor_machine_read(struct source *source);
void doctor_machine_free(struct doctor_machine *machine);

enum doctor_severity {
    DOCTOR_WARNING, /* slower or less reliable than possible */
    DOCTOR_ERROR    /* does not work, or is several times slower */
};

enum doctor_outcome { DOCTOR_FINE, DOCTOR_FOUND, DOCTOR_NOT_APPLICABLE, DOCTOR_UNKNOWN };

/* The side effects of a command, which the user must know before running it. */
enum doctor_fix_class {
    DOCTOR_FIX_NONE,    /* there is no command */
    DOCTOR_FIX_SAFE,    /* no effect on programs, services or devices, and reversible */
    DOCTOR_FIX_RESTART, /* restarts programs, services or the machine */
    DOCTOR_FIX_CUTS_OFF /* may disconnect a network or a device until it is restored manually */
};

/* What was missing for a check to complete. */
enum doctor_missing {
    DOCTOR_MISSING_FILE,    /* a file or a device could not be read; the text says why */
    DOCTOR_MISSING_DRIVER,  /* the driver did not answer */
    DOCTOR_MISSING_LIBRARY, /* the same, in a container without libnvidia-ml */
    DOCTOR_MISSING_GPUS,    /* this process was given no GPUs */
    /* These leave the verdict as it is: such a user, container or file never shows it. */
    DOCTOR_MISSING_ROOT, /* root privileges */
    DOCTOR_MISSING_NODE, /* a view from outside of the container */
    DOCTOR_MISSING_RUN   /* a run of the program: its files do not say it, and are not at fault */
};

struct doctor_evidence {
    const char *where, *what; /* a file, variable or device, and its content */
};

/* The result of a check. Strings belong to the source of the machine. */
struct doctor_result {
    const struct doctor_machine *machine;
    const struct doctor_check *check;
    enum doctor_outcome outcome;
    enum doctor_severity severity;
    const char *text; /* found: one sentence that names the object. Otherwise the reason, "" for DOCTOR_FINE */
    int n_evidence, n_evidence_left_out;
    struct doctor_evidence evidence[8];
    const char *fix;    /* found: commands to paste, one per line; "" if commands are not sufficient */
    const char *advice; /* found: what to do, in words; "" if `fix` is sufficient */
    bool fix_is_safe;   /* --fix may run `fix`: all of its changes are reverted by a reboot or by an undo command */
    enum doctor_fix_class fix_class; /* DOCTOR_FIX_NONE if `fix` is "" */
    const char *fix_cost;            /* its side effects, a sentence; "" if it is safe */
    enum doctor_missing missing;     /* DOCTOR_UNKNOWN only */
};

/* What a check needs: if it does not hold, doctor_run() reports "not applicable", if that is not known "unknown". */
enum doctor_needs {
    NEEDS_GPUS = 1,
    NEEDS_DRIVER = 2,      /* GPUs, and the NVIDIA driver is loaded */
    NEEDS_NVML = 4,        /* the driver, and NVML answers */
    NEEDS_DATA_NICS = 8,   /* an RDMA data NIC */
    NEEDS_ENVIRONMENT = 16 /* the environment can be read */
};

/* The members but `group`, `needs` and `run` are a row of docs/failure-modes.md. */
struct doctor_check {
    const char *id;    /* "one-nic" */
    const char *group; /* "driver", "nic", "verbs", "nvshmem", "nccl", "deepep", "limits", "topology", "job" */
    int mode;          /* number of the failure mode in docs/failure-modes.md */
    const char *title; /* the correct state: "each process has a NIC of its own" */
    /* For --explain; full sentences. */
    const char *symptom, *cause, *remedy;
    unsigned needs;           /* of enum doctor_needs */
    const char *const *links; /* related variables and files; ends with NULL */
    void (*run)(const struct doctor_machine *machine, struct doctor_result *result);
};

/* All checks, by group; ends with NULL. */
extern const struct doctor_check *const doctor_checks[];

const struct doctor_check *doctor_find(const char *id);

/* A result that is DOCTOR_FINE. */
void doctor_result_init(const struct doctor_machine *machine, const struct doctor_check *check,
                        struct doctor_result *ret_result);

/* Runs one check and fills *ret_result; the outcome is DOCTOR_FINE unless the check sets another one. */
void doctor_run(const struct doctor_machine *machine, const struct doctor_check *check,
                struct doctor_result *ret_result);

/* --- for checks --- */

void doctor_found(struct doctor_result *result, enum doctor_severity severity, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* The same, unless something was found before: the other faults of its kind are evidence. */
#define doctor_found_first(result, ...)                                                                                \
    ((result)->outcome == DOCTOR_FOUND ? (void)0 : doctor_found(result, __VA_ARGS__))
/* Call after doctor_found(). Evidence beyond the size of the array is only counted. */
void doctor_evidence(struct doctor_result *result, const char *where, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* An environment variable and its value. */
void doctor_evidence_env(struct doctor_result *result, const char *name);
void doctor_fix(struct doctor_result *result, bool is_safe, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/*
 * Call after doctor_fix(): the command is not safe, for this reason; a reboot has its own. A command that disconnects
 * something, or that resets a device or the machine, is given only if the finding is certain, and names the device by
 * its PCI address.
 */
void doctor_cost(struct doctor_result *result, enum doctor_fix_class class, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
void doctor_advise(struct doctor_result *result, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The advice is the remedy of the check's row in docs/failure-modes.md, as where a finding has no fix and no advice. */
void doctor_advise_remedy(struct doctor_result *result);
/* If `condition` holds, sets outcome and reason. Returns `condition`; arguments are evaluated in any case. */
bool doctor_conclude(struct doctor_result *result, enum doctor_outcome outcome, bool condition, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
#define doctor_not_applicable_if(result, ...) doctor_conclude(result, DOCTOR_NOT_APPLICABLE, __VA_ARGS__)
#define doctor_not_applicable(result, ...) doctor_conclude(result, DOCTOR_NOT_APPLICABLE, true, __VA_ARGS__)
/* `missing` is DOCTOR_MISSING_FILE unless the check sets another value, before or after the call. */
#define doctor_unknown_if(result, ...) doctor_conclude(result, DOCTOR_UNKNOWN, __VA_ARGS__)
#define doctor_unknown(result, ...) doctor_conclude(result, DOCTOR_UNKNOWN, true, __VA_ARGS__)

/* The same for a file or a library, with the reason why it could not be read: machine_reason(). */
bool doctor_unreadable_if(struct doctor_result *result, bool condition, const char *what, enum source_state state,
                          const char *why);

/* What to do about it, a sentence. */
const char *doctor_missing_text(enum doctor_missing missing);

/* Does an unknown result leave open whether the machine is healthy? */
bool doctor_is_inconclusive(const struct doctor_result *result);

/*
 * --- what a library for expert parallelism needs, compared with what this machine has (checks_stacks.c) ---
 *
 * In the order in which the library itself would fail. Each need belongs to one check, which reports it if it is the
 * first that is not met.
 */

/* Compares a need of `installed` with the machine. The result is DOCTOR_FINE before. */
typedef void stack_need(const struct doctor_machine *machine, const struct stack_installed *installed,
                        struct doctor_result *result);

/* The needs of the extension, from its ELF headers (checks_import.c). */
stack_need stack_needs_python, stack_needs_cuda, stack_needs_libraries, stack_needs_symbols;

/* The command that installs it, for the CUDA of PyTorch. */
const char *stack_install(const struct doctor_machine *machine, const struct stack *stack);

/* Of a stack: found, with the first need that is not met; not known; fine. */
struct stack_result {
    bool is_known;
    int need;                                /* index in the list of needs; -1 if all are met */
    const struct stack_installed *installed; /* NULL: what it would lack here, apart from its package */
    struct doctor_result result;
    int own_need; /* the same of those needs that checks report, whatever other checks find */
    struct doctor_result own;
};

const struct stack_result *stack_evaluate(const struct doctor_machine *machine, const struct stack *stack);

/* The run() of a check that owns needs: reports the first stack of which one of these is the first that is not met. */
void stacks_run(const struct doctor_machine *machine, struct doctor_result *result);

#endif
