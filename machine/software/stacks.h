/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stacks.h - libraries for expert parallelism: how each is recognised on a disk, and what it needs. Read from files;
 * nothing is imported or loaded.
 */
#ifndef EP_MACHINE_SOFTWARE_STACKS_H
#define EP_MACHINE_SOFTWARE_STACKS_H

#include "machine/source/source.h"

enum stack_needs {
    STACK_NCCL_WHEEL = 1, /* at its import it looks for the wheel of NCCL or EP_NCCL_ROOT_DIR, and compares it with the
                             NCCL that is loaded */
    STACK_GIN = 2,        /* GPU-initiated networking of NCCL, unless EP_DISABLE_GIN=1 */
    STACK_UCX_DEVICE = 4, /* between nodes, UCX's module for operations that GPUs start */
    STACK_NVLINK = 8,     /* NVLinks between the GPUs of a node or of an NVLink domain */
    STACK_NCCL_EP = 16,   /* the package nccl.ep */
    STACK_IS_PART = 32    /* it comes with a package that is installed for other reasons: what it lacks is no fault */
};

/* A row of the table. Versions are the oldest that suffice, "" if it does not matter which one, NULL without a need. */
struct stack {
    const char *name, *title;   /* as in "--stacks NAME"; as people call it */
    const char *package;        /* that Python imports; of rows with the same package the first that fits counts */
    const char *const *markers; /* files or folders in a folder of Python's path that only it has, each sufficient;
                                  '*' at the end: any file that begins so */
    const char *module;         /* the beginning of the path of its extension there; NULL without one */
    const char *dist;           /* its distribution; pip's name of it */
    const char *since;          /* the oldest version of the distribution that is of this row, of rows with the same one
                                   the first that fits; NULL: it may be without the package, or not of this row */
    const char *install;        /* how it is installed */
    const char *torch, *nccl, *nvcc;
    const char *nvshmem_before, *fixed; /* NVSHMEM of this version and later does not work, until its own version
                                           `fixed`; NULL: any does, in no version */
    const char *const *companions;      /* distributions that its import wants in its own version, if they are there */
    unsigned needs;                     /* of enum stack_needs */
    const char *source;                 /* of what this row says; NULL: its needs are not known */
};

/* All that are known; ends with a row without a name. */
extern const struct stack stacks[];

/* The row with this name, distribution or package; NULL if there is none. */
const struct stack *stack_find(const char *name);

#define STACKS_MAX 16
#define STACK_OWNERS_MAX 4

/* A stack that Python finds. */
struct stack_installed {
    const struct stack *stack;
    const char *folder;       /* of Python's path, which contains it */
    const char *version;      /* "" not known */
    const char *extension;    /* path of its compiled module; "" if there is none */
    enum source_state listed; /* of the folder in which there is none */
    const char *other_torch;  /* if its extensions are for other versions of PyTorch: one of them; otherwise "" */
    bool is_gone;             /* its distribution is registered, and the package is not there */
    int n_owners;             /* distributions in `folder` that contain this package, if there are several */
    const char *owners[STACK_OWNERS_MAX];
};

struct stacks_installed {
    int n;
    struct stack_installed stacks[STACKS_MAX];
    const char *unknown; /* those without needs in the table: "mori, uccl" */
};

#endif
