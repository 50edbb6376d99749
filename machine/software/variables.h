/* SPDX-License-Identifier: Apache-2.0 */
/*
 * variables.h - the environment variables of the stack and of epkit: which there are, what they really do, and which
 * values they take.
 *
 * One table (variables_table.c, which names its sources), sorted by name.
 */
#ifndef EP_STACK_VARIABLES_H
#define EP_STACK_VARIABLES_H

#include "source/root.h"

enum variable_effect {
    VARIABLE_WORKS,      /* read when a program starts */
    VARIABLE_BUILD_ONLY, /* read by a build; does nothing in an environment */
    VARIABLE_VOID        /* nothing reads it */
};

struct variable {
    const char *name; /* the table ends with NULL */
    enum variable_effect effect;
    const char *values;        /* "a|b|c", "int LOW..HIGH", "power LOW..HIGH" (of two), "bool", "path", "list", "text",
                                  "size"; NULL: anything */
    const char *value_default; /* "" not known */
    const char *text;          /* what it does, a phrase */
};

extern const struct variable variables[];

const struct variable *variable_find(const char *name);

/* Would NVSHMEM, NCCL or DeepEP read a variable of this name (a prefix of theirs) if they knew it? */
bool variable_is_theirs(const char *name);

/* Does epkit read it, the command or the library? NO_COLOR is one. */
bool variable_is_own(const char *name);

/* The known name nearest to an unknown one (a typing error), or NULL. */
const char *variable_nearest(const char *name);

/* Is `value` one that the variable takes? Without effect says why not in ret_why ("is not one of ibrc, ucx, ..."). */
bool variable_takes(const struct variable *variable, const char *value, char *ret_why, size_t bytes);

/*
 * As NVSHMEM reads a switch (nvshmemi_getenv_bool): false is what begins with 0, n or f in either case, true is
 * everything else that is set, the empty text and "off" as well. NULL is false.
 */
bool variable_is_true(const char *value);

#endif
