/* SPDX-License-Identifier: Apache-2.0 */
/*
 * env_variables.h - the environment variables of NVSHMEM, NCCL, DeepEP, their libraries and epkit: names, effects and
 * valid values.
 *
 * One table (env_variables_table.c, which names its sources).
 */
#ifndef EP_COMMON_ENV_VARIABLES_H
#define EP_COMMON_ENV_VARIABLES_H

#include <stdbool.h>
#include <stddef.h>

#define VARIABLE_NAME_BYTES 64

enum variable_effect {
    VARIABLE_WORKS,      /* read when a program starts */
    VARIABLE_BUILD_ONLY, /* read by a build; has no effect in an environment */
    VARIABLE_VOID        /* nothing reads it */
};

struct variable {
    const char *names;  /* one, or several that take the same values, with blanks between; the table ends with NULL */
    const char *values; /* "a|b|c", "int LOW..HIGH", "power LOW..HIGH" (powers of two), "bool", "path", "list", "text",
                           "size"; NULL: anything */
    const char *text;   /* what it does, a phrase, or what a path is; NULL: works, and its makers describe it */
    enum variable_effect effect;
};

extern const struct variable variables[];

const struct variable *variable_find(const char *name);

/* Does the name have a prefix of NVSHMEM, NCCL or DeepEP? */
bool variable_has_known_prefix(const char *name);

/* Does epkit (command or library) read it? NO_COLOR is included. */
bool variable_is_epkit(const char *name);

/* The known name nearest to an unknown one (a likely typing error); false: none is near. */
bool variable_nearest(const char *name, char ret_name[VARIABLE_NAME_BYTES]);

/* Is `value` valid, regardless of the effect? If not, *ret_why says why ("is not one of ibrc, ucx, ..."). */
bool variable_accepts(const struct variable *variable, const char *value, char *ret_why, size_t bytes);

/* As nvshmemi_getenv_bool: false begins with 0, n or f in either case, all else is true, also "". NULL is false. */
bool variable_is_true(const char *value);

#endif
