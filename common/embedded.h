/* SPDX-License-Identifier: Apache-2.0 */
/* embedded.h - files of the tree that are compiled in: a table is made by epkit_embed() in cmake/embed.cmake. */
#ifndef EP_COMMON_EMBEDDED_H
#define EP_COMMON_EMBEDDED_H

#include <stddef.h>

struct embedded {
    const char *name; /* of the file, without folder and suffix; the table ends with NULL */
    const char *text; /* followed by a NUL */
    size_t bytes;
};

#endif
