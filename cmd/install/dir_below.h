/* SPDX-License-Identifier: Apache-2.0 */
/* dir_below.h - folders below a root folder, and what is in them. Results as in common/dir.h. */
#ifndef EP_INSTALL_DIR_BELOW_H
#define EP_INSTALL_DIR_BELOW_H

#include "common/dir.h"

/* The absolute path of what was opened, without links. */
int dir_path(int fd, char ret_path[PATH_MAX]);

/*
 * The folder `path` (O_PATH) below the folder `root` (RESOLVE_IN_ROOT: absolute links and ".." stay in it), and its
 * absolute path without links, also if it is missing (ENOENT). With `make`, folders are made, 0755. ENOSYS: Linux
 * before 5.6, or a seccomp filter.
 */
int dir_open_below(const char *root, const char *path, bool make, char ret_path[PATH_MAX]);

/* Is there something of that name, or a link? */
bool dir_has(int dir, const char *path);

#endif
