/* SPDX-License-Identifier: Apache-2.0 */
/*
 * advice.h - the environment that is right for a machine, each line with its reason.
 *
 * Only variables that have an effect there, with values that are correct there, and paths that exist there. What
 * belongs to a rank (its NIC) is advised per local rank; what belongs to one program (preloading) is not for the shell.
 */
#ifndef EP_STACK_ADVICE_H
#define EP_STACK_ADVICE_H

#include "stack/stack.h"
#include "topo/map.h"

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
};

struct advice {
    int n;
    struct advice_row *rows;
};

/* For this machine. With neither GPUs nor NICs it is empty. */
ep_status advice_make(const struct topo *topo, const struct stack *stack, const struct map *map,
                      struct advice **ret_advice);
void advice_free(struct advice *advice);

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
    struct audit_row *rows; /* harmful first, then by name */
};

ep_status audit_make(const struct topo *topo, const struct stack *stack, const struct advice *advice,
                     struct audit **ret_audit);
void audit_free(struct audit *audit);

#endif
