/* SPDX-License-Identifier: Apache-2.0 */
/*
 * advice.h - the recommended environment of a machine, each variable with its reason.
 *
 * Only variables that have an effect on the machine, with values that are valid on it and paths that exist on it.
 * Values that depend on the rank (its NIC) are given per local rank. Values for a single program (LD_PRELOAD) are not
 * meant for a shell.
 */
#ifndef EP_SOFTWARE_ADVICE_H
#define EP_SOFTWARE_ADVICE_H

#include "machine/hardware/map.h"
#include "software.h"

enum advice_scope {
    ADVICE_NODE,   /* the same for every process of the node */
    ADVICE_RANK,   /* `values` is indexed by the local rank (= GPU index) */
    ADVICE_PROGRAM /* only for the MoE program, not for its launcher, a shell or ssh: LD_PRELOAD */
};

#define ADVICE_MAX 96 /* beyond it the last row is overwritten */

struct advice_row {
    const char *name;
    enum advice_scope scope;
    bool unset;        /* the variable must not be set; `value` is empty */
    bool prepend;      /* prepended to the current value, separated by ':' */
    const char *value; /* ADVICE_NODE, ADVICE_PROGRAM */
    int n_values;      /* ADVICE_RANK */
    const char *const *values;
    const char *reason; /* one sentence */
    /* For LD_LIBRARY_PATH: the reason of each folder of `value`, in the same order. NULL: `reason` applies to all. */
    const char *const *folder_reasons;
};

struct advice {
    int n;
    struct advice_row rows[ADVICE_MAX];
};

/*
 * The advice for this machine, which lives as long as the source; it is empty if the machine has neither GPUs nor NICs.
 * The current environment of the source has two effects: variables in it that do nothing or have an invalid value are
 * advised to be unset, and folders that precede the right ones in a search path are overridden. `map`: map_best();
 * `ibgda`: map_ibgda().
 */
struct advice *advice_make(const struct topo *topo, const struct software *software, const struct map *map,
                           const struct map *ibgda);

/* Returns the row with this name, or NULL. */
const struct advice_row *advice_find(const struct advice *advice, const char *name);

/* `value`, followed by the search path `path` without `value`. The source owns the result. */
const char *advice_prepend(struct source *source, const char *value, const char *path);

/* --- NICs --- */

/* Is `nic` an NVIDIA data NIC? IBGDA, and therefore DeepEP, supports no others. */
bool advice_is_mlx5(const struct topo *topo, int nic);
bool advice_has_mlx5(const struct topo *topo);

/* Is it an NVSHMEM_HCA_LIST with a single NIC, which leaves no choice? False for NULL. */
bool advice_is_single_nic(const char *list);

/* As NVSHMEM matches NVSHMEM_HCA_PREFIX: a substring of the name; in later versions "^" excludes. */
bool advice_prefix_matches(const char *prefix, const char *name);

/* --- ranks --- */

/*
 * The variables of a launcher: the local rank, and the number of ranks on the node. In a batch script Slurm sets
 * SLURM_LOCALID=0 although it has not started a rank, so for Slurm the second variable must be set as well.
 */
struct advice_launcher {
    const char *rank, *size; /* the list ends with `rank` == NULL */
    bool size_is_required;
};

extern const struct advice_launcher advice_launchers[]; /* the innermost launcher first */

typedef const char *advice_getenv(void *context, const char *name);

/* source_env() as an advice_getenv; the context is the source. */
const char *advice_source_env(void *source, const char *name);

/*
 * Returns the GPU whose NIC the process with this environment should use: the GPU of its local rank, mapped through
 * CUDA_VISIBLE_DEVICES if that is set. Returns -1 if the process is not a rank, or is the only rank that its launcher
 * started on this node: such a program may start the other ranks itself, and they would inherit its NIC.
 */
int advice_gpu_of(const struct topo *topo, advice_getenv *get, void *context);

/* What is wrong with an environment, according to the table of variables, the machine and the advice. */
enum audit_kind {
    AUDIT_VOID,    /* does nothing */
    AUDIT_VALUE,   /* not a valid value of the variable */
    AUDIT_HARMFUL, /* causes a fault */
    AUDIT_MISSING, /* advised, but not set */
    AUDIT_DIFFERS, /* works, but differs from the advice */
    AUDIT_PATH,    /* names a file or folder that does not exist */
    AUDIT_UNKNOWN  /* has a known prefix, but is not a known variable: a typing error? */
};

struct audit_row {
    enum audit_kind kind;
    const char *name, *value; /* `value` is "" if the variable is not set */
    const char *advised;      /* "" if it should not be set */
    const char *text;         /* its effect, and what to do about it */
};

#define AUDIT_MAX 256

struct audit {
    int n;
    struct audit_row rows[AUDIT_MAX]; /* AUDIT_HARMFUL first, then by name */
    bool uses_software; /* NVSHMEM, NCCL or DeepEP is in use: a variable of theirs is set, or Python would import DeepEP
                         */
};

struct audit *audit_make(const struct topo *topo, const struct software *software, const struct advice *advice);

#endif
