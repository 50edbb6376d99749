/* SPDX-License-Identifier: Apache-2.0 */
/*
 * temporary.h - files that are replaced atomically: written next to the destination under another name, then renamed;
 * folders for the lifetime of a process.
 *
 * A process that is killed in between leaves the temporary name, .NAME.epkit-XXXXXX. A running process holds a lock
 * (flock) on it; the next process that writes NAME removes those without a lock. On file systems without locks they are
 * left alone.
 */
#ifndef EP_COMMON_TEMPORARY_H
#define EP_COMMON_TEMPORARY_H

#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

struct temporary {
    char *name; /* NULL: nothing is there */
    char *path; /* of a folder */
    int parent; /* the folder that it is in (O_PATH) */
    bool is_folder;
    int fd; /* holds the lock; a file is written by it */
};

/* These functions return 0 or an errno (write_reason()). At first only the owner has access. */

/* Next to `name` in the folder `parent`. */
int temporary_file(int parent, const char *name, struct temporary *ret_temporary);

/*
 * A folder for the lifetime of a process, PARENT/NAME-XXXXXX, with files and no folders in it; it is never renamed.
 * `name` belongs to the program: folders of this name without a lock are removed. EPERM: the parent belongs to another
 * user, who could replace it.
 */
int temporary_folder_in(const char *parent, const char *name, struct temporary *ret_temporary);

/* Gives it a name in its folder; call fsync() before. */
int temporary_rename(struct temporary *temporary, const char *name);

/* Removes it, a folder with its files. Does nothing if it was renamed or never created. */
void temporary_remove(struct temporary *temporary);

/*
 * Blocks signals of this thread while a temporary name exists, which takes milliseconds, so that only SIGKILL leaves
 * one behind. The other threads of the command block all signals.
 */
void temporary_hold_signals(sigset_t *ret_before);
void temporary_release_signals(const sigset_t *before);

/* Is a signal pending, as one that is blocked, that ends the command (SIGINT, SIGTERM, SIGHUP, SIGQUIT)? */
bool temporary_is_interrupted(void);

/* All steps for a file with this text. temporary_save() is EINVAL where a device, a folder or a link into /proc is. */
int temporary_save(const char *dest, const char *text, size_t bytes, mode_t mode);
int temporary_save_in(int parent, const char *name, const char *text, size_t bytes, mode_t mode);

#endif
