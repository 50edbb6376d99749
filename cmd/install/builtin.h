/* SPDX-License-Identifier: Apache-2.0 */
/* builtin.h - the recipes and the prelude of the tree, compiled in. */
#ifndef EP_INSTALL_BUILTIN_H
#define EP_INSTALL_BUILTIN_H

#include <stddef.h>

struct builtin_recipe {
    const char *name; /* the table ends with NULL */
    const char *text;
    size_t bytes;
};

extern const char builtin_prelude[]; /* prelude.sh */
extern const size_t builtin_prelude_bytes;

extern const struct builtin_recipe builtin_recipes[];

#endif
