/* SPDX-License-Identifier: Apache-2.0 */
/*
 * variables.h - the environment variables of the stack: which there are, what they really do, and which values they
 * take.
 *
 * One table. Sources of its rows: shared facts about NVSHMEM 3.4 and 3.5, NCCL, gIB, DeepEP, and their documentation,
 * named in variables.c.
 */
#ifndef EP_STACK_VARIABLES_H
#define EP_STACK_VARIABLES_H

#include "root/root.h"

enum variable_effect {
    VARIABLE_WORKS,      /* read when a program starts */
    VARIABLE_BUILD_ONLY, /* read by a build; does nothing in an environment */
    VARIABLE_VOID        /* nothing reads it */
};

struct variable {
    const char *name; /* the table ends with NULL */
    enum variable_effect effect;
    const char *values;        /* "a|b|c", "int LOW..HIGH", "bool", "path", "list", "text", "size"; NULL: anything */
    const char *value_default; /* "" not known */
    const char *text;          /* what it does, a phrase */
};

extern const struct variable variables[];

const struct variable *variable_find(const char *name);

/* Would NVSHMEM, NCCL or DeepEP read a variable of this name (a prefix of theirs) if they knew it? */
bool variable_is_theirs(const char *name);

/* The known name nearest to an unknown one (a typing error), or NULL. */
const char *variable_nearest(const char *name);

/* Is `value` one that the variable takes? Without effect says why not in ret_why ("is none of ibrc, ucx, ..."). */
bool variable_takes(const struct variable *variable, const char *value, char *ret_why, size_t bytes);

/* As NVSHMEM and NCCL read them: 1, true, yes, on (any case) or a number other than 0. */
bool variable_is_true(const char *value);

#endif
