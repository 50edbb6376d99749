/* SPDX-License-Identifier: Apache-2.0 */
/*
 * advice.h - the environment that is right for a machine, each line with its reason.
 *
 * Only variables that have an effect there, with values that are correct there, and paths that exist there. What
 * belongs to a rank (its NIC) is advised per local rank; what belongs to one program (preloading) is not for the shell.
 */
#ifndef EP_STACK_ADVICE_H
#define EP_STACK_ADVICE_H

#include "hardware/map.h"
#include "software/stack.h"

enum advice_scope {
    ADVICE_NODE,   /* the same for every process of the node */
    ADVICE_RANK,   /* `values` by local rank (= GPU index) */
    ADVICE_PROGRAM /* for the MoE program alone, not for its launcher, a shell or ssh: LD_PRELOAD */
};

struct advice_row {
    const char *name;
    enum advice_scope scope;
    bool unset;        /* the variable must not be set; no value */
    bool prepend;      /* in front of what it has, with ':' between */
    const char *value; /* ADVICE_NODE, ADVICE_PROGRAM */
    int n_values;      /* ADVICE_RANK */
    const char *const *values;
    const char *reason; /* one sentence */
    /* Of LD_LIBRARY_PATH: what each folder of `value` is there for, in their order. NULL: all for `reason`. */
    const char *const *folder_reasons;
};

struct advice {
    int n;
    struct advice_row *rows;
};

/*
 * For this machine. With neither GPUs nor NICs it is empty. The environment that the root looks at plays a part in two
 * ways: what it holds that does nothing, or is no value, is advised to be unset; and folders that it puts in front of
 * the right ones are overruled.
 */
ep_status advice_make(const struct topo *topo, const struct stack *stack, const struct map *map,
                      struct advice **ret_advice);
void advice_free(struct advice *advice);

/* The row of this name, or NULL. */
const struct advice_row *advice_find(const struct advice *advice, const char *name);

/*
 * The folder that stands first in a search path when `value` has been put in front of it, once: `value`, then `path`
 * without `value`. The result belongs to the root.
 */
const char *advice_prepend(struct root *root, const char *value, const char *path);

/* --- NICs --- */

/* Is NIC `nic` one for data of NVIDIA's? IBGDA, and with it DeepEP, drives no others. */
bool advice_is_mlx5(const struct topo *topo, int nic);
bool advice_has_mlx5(const struct topo *topo);

/* --- ranks --- */

/*
 * A launcher's variables: the rank's number on its node, and how many ranks it has started there. In a batch script
 * Slurm sets SLURM_LOCALID=0 without having started a rank, so there the second one must be set as well.
 */
struct advice_launcher {
    const char *rank, *size; /* the list ends with rank NULL */
    bool size_is_required;
};

extern const struct advice_launcher advice_launchers[]; /* those that are nearest to the program first */

typedef const char *advice_getenv(void *context, const char *name);

/* root_env() as an advice_getenv, the context being the root. */
const char *advice_root_env(void *root, const char *name);

/*
 * The GPU whose NIC the process with this environment should use: the one of its local rank, through
 * CUDA_VISIBLE_DEVICES if that is set. -1 when the process is no rank, or the only one that its launcher started on
 * this node: such a program may start the other ranks itself, and they would inherit the NIC of this one.
 */
int advice_gpu_of(const struct topo *topo, advice_getenv *get, void *context);

/* What is wrong with an environment, measured by the table of variables, by the machine and by the advice. */
enum audit_kind {
    AUDIT_VOID,    /* does nothing */
    AUDIT_VALUE,   /* a value that the variable does not take */
    AUDIT_HARMFUL, /* causes a fault */
    AUDIT_MISSING, /* advised and not set */
    AUDIT_DIFFERS, /* works, but not as advised */
    AUDIT_PATH,    /* names a file or folder that is not there */
    AUDIT_UNKNOWN  /* has a prefix of theirs, but nobody knows it: a typing error? */
};

struct audit_row {
    enum audit_kind kind;
    const char *name, *value; /* value "" when missing */
    const char *advised;      /* "" when it should not be set */
    const char *text;         /* what it does or does not do, and what to do about it */
};

struct audit {
    int n;
    struct audit_row *rows; /* harmful first, then by name; at most AUDIT_MAX */
    bool uses_stack;        /* the environment sets a variable of NVSHMEM, NCCL or DeepEP, or leads to a DeepEP */
};

#define AUDIT_MAX 256

ep_status audit_make(const struct topo *topo, const struct stack *stack, const struct advice *advice,
                     struct audit **ret_audit);
void audit_free(struct audit *audit);

#endif
