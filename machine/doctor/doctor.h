/* SPDX-License-Identifier: Apache-2.0 */
/*
 * doctor.h - what can be wrong with a machine, one check for each failure mode.
 *
 * A check is a pure function from a machine (root, topology, stack) to at most one finding. It prints nothing, changes
 * nothing and loads nothing. It ends in one of four ways: fine, found, not applicable here, could not tell; the last
 * two with the reason.
 */
#ifndef EP_DOCTOR_DOCTOR_H
#define EP_DOCTOR_DOCTOR_H

#include "hardware/map.h"
#include "hardware/topo.h"
#include "software/advice.h"
#include "software/software.h"
#include "source/source.h"

/* Everything that checks may look at. Made once, read only. */
struct doctor_machine {
    struct source *source;
    struct topo *topo;
    struct software *software;
    struct map *map; /* the best one */
    struct advice *advice;
    struct audit *audit;               /* of the environment that is looked at */
    struct doctor_inventory *expected; /* of --expect; NULL: nobody said */
};

/*
 * What a machine is to have. Numbers are 0, texts "" where nothing is said. In a file of --expect:
 *
 *     {"gpus": 8, "gpu": "H200", "nics": 8, "nic_gbps": 400, "link_layer": "Ethernet", "driver": "580.126.09",
 *      "firmware": "28.43.2026"}
 *
 * "gpu" is a part of the name that the driver gives; "nics" counts NICs for data; "driver" and "firmware" may be the
 * beginning of a version. Or the file is a snapshot of a machine that is as it should be: then it is counted there.
 */
struct doctor_inventory {
    int gpus, nics;
    double nic_gbps;
    enum topo_link_layer link_layer;
    char gpu[128], driver[64], firmware[64];
    const char *source; /* the file, for people */
};

/* Reads the file of --expect. EP_E_ARG with the reason: no such file, no JSON, a key that does not exist. */
ep_status doctor_expect(struct doctor_machine *machine, const char *file);

/* Takes over `source`, also when it fails. */
ep_status doctor_machine_read(struct source *source, struct doctor_machine **ret_machine);
void doctor_machine_free(struct doctor_machine *machine);

enum doctor_severity {
    DOCTOR_WARNING, /* slower or more fragile than it has to be */
    DOCTOR_ERROR    /* does not work, or several times slower */
};

enum doctor_outcome { DOCTOR_FINE, DOCTOR_FOUND, DOCTOR_NOT_APPLICABLE, DOCTOR_UNKNOWN };

/* What a command costs. Whoever pastes it has to know before. */
enum doctor_fix_class {
    DOCTOR_FIX_NONE,    /* there is no command */
    DOCTOR_FIX_SAFE,    /* no program, service or device notices; what it changes can be changed back */
    DOCTOR_FIX_RESTART, /* programs, services or the machine start anew */
    DOCTOR_FIX_CUTS_OFF /* may take a network or a device away until somebody brings it back */
};

/* What would tell what a check could not. */
enum doctor_missing {
    DOCTOR_MISSING_FILE,    /* a file or a device that could not be read, for whatever reason the text gives */
    DOCTOR_MISSING_DRIVER,  /* an answer of the driver */
    DOCTOR_MISSING_LIBRARY, /* the same, in a container that was not given libnvidia-ml */
    DOCTOR_MISSING_GPUS,    /* a process that was given GPUs */
    /* These leave a verdict as it is: such a user, container or file never shows it, sick or well. */
    DOCTOR_MISSING_ROOT, /* the rights of root */
    DOCTOR_MISSING_NODE, /* to look from outside of the container */
    DOCTOR_MISSING_RUN   /* a run of the program: its files do not say it, and are not at fault for that */
};

struct doctor_evidence {
    const char *where, *what; /* a file, a variable, a device; and what it says */
};

/* How a check ended. Strings belong to the source of the machine. */
struct doctor_result {
    const struct doctor_check *check;
    enum doctor_outcome outcome;
    enum doctor_severity severity;
    const char *text; /* found: one sentence that names the thing. Else the reason, "" for DOCTOR_FINE */
    int n_evidence, n_evidence_left_out;
    struct doctor_evidence evidence[8];
    const char *fix;    /* found: a command to paste, lines divided by '\n'; "" when it takes more than a command */
    const char *advice; /* found: what to do, in words; "" when `fix` says it all */
    bool fix_is_safe; /* `fix` may be run by --fix: it changes nothing that a reboot or its own undo does not bring back
                       */
    enum doctor_fix_class fix_class; /* DOCTOR_FIX_NONE without a `fix` */
    const char *fix_cost;            /* what it costs, a sentence; "" where it is safe */
    enum doctor_missing tells;       /* DOCTOR_UNKNOWN only */
};

/*
 * What has to be there before a check is run. Where it is not, the check "does not apply"; where the machine does not
 * let it be seen, the check "could not tell": doctor_run() says so in the check's place.
 */
enum doctor_needs {
    DOCTOR_NEEDS_GPUS = 1,
    DOCTOR_NEEDS_DRIVER = 2,      /* GPUs, and the NVIDIA driver is loaded */
    DOCTOR_NEEDS_NVML = 4,        /* the driver, and NVML answers */
    DOCTOR_NEEDS_DATA_NICS = 8,   /* an RDMA NIC for data */
    DOCTOR_NEEDS_ENVIRONMENT = 16 /* it can be read */
};

struct doctor_check {
    const char *id;    /* "one-nic" */
    const char *group; /* "driver", "nic", "verbs", "nvshmem", "nccl", "deepep", "limits", "topology", "job" */
    int mode;          /* number of the failure mode in docs/failure-modes.md */
    const char *title; /* what is checked: "each process has a NIC of its own" */
    /* For --explain; full sentences. */
    const char *symptom, *cause, *remedy;
    unsigned needs;           /* of enum doctor_needs */
    const char *const *links; /* variables and files that it is about; ends with NULL */
    void (*run)(const struct doctor_machine *machine, struct doctor_result *result);
};

/* All checks, by group; ends with NULL. */
extern const struct doctor_check *const doctor_checks[];

const struct doctor_check *doctor_find(const char *id);

/* Runs one check: fills *ret_result, outcome DOCTOR_FINE unless the check says otherwise. */
void doctor_run(const struct doctor_machine *machine, const struct doctor_check *check,
                struct doctor_result *ret_result);

/* --- for checks (finding.c) --- */

void doctor_found(const struct doctor_machine *machine, struct doctor_result *result, enum doctor_severity severity,
                  const char *format, ...) __attribute__((format(printf, 4, 5)));
/* After doctor_found(). What does not fit is counted. */
void doctor_evidence(const struct doctor_machine *machine, struct doctor_result *result, const char *where,
                     const char *format, ...) __attribute__((format(printf, 4, 5)));
void doctor_fix(const struct doctor_machine *machine, struct doctor_result *result, bool is_safe, const char *format,
                ...) __attribute__((format(printf, 4, 5)));
/*
 * After doctor_fix(): it is not safe, for this reason. A command that cuts off, or that resets a device or the machine,
 * is given only where the finding is certain, and names the device by its PCI address.
 */
void doctor_cost(const struct doctor_machine *machine, struct doctor_result *result, enum doctor_fix_class class,
                 const char *format, ...) __attribute__((format(printf, 4, 5)));
void doctor_advise(const struct doctor_machine *machine, struct doctor_result *result, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
void doctor_not_applicable(const struct doctor_machine *machine, struct doctor_result *result, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* What would tell is DOCTOR_MISSING_FILE, unless the check then sets result->tells. */
void doctor_unknown(const struct doctor_machine *machine, struct doctor_result *result, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* What would tell, a sentence. */
const char *doctor_missing_text(enum doctor_missing tells);

/* Does what could not be told leave open whether the machine is healthy? */
bool doctor_is_inconclusive(const struct doctor_result *result);

#endif
