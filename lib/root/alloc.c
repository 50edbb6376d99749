/* SPDX-License-Identifier: Apache-2.0 */
/* alloc.c - memory of a root for those who use one. */
#include "root/keep.h"

void *root_alloc(struct root *root, size_t bytes)
{
    return keep_alloc(root, bytes);
}
