/* SPDX-License-Identifier: Apache-2.0 */
/*
 * temporary.h - files and folders that appear whole or not at all: written beside their place under another name, then
 * renamed.
 *
 * A process that is killed in between leaves the other name, .NAME.epkit-XXXXXX, behind. As long as it lives it holds a
 * lock (flock) on it; the next process that writes NAME removes what nobody holds. Where the file system has no locks
 * such names are left alone.
 */
#ifndef EP_MACHINE_SOURCE_TEMPORARY_H
#define EP_MACHINE_SOURCE_TEMPORARY_H

#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

struct temporary {
    char *path; /* NULL: nothing is there */
    bool is_folder;
    int fd; /* holds the lock; a file is written by it */
};

/* 0 or the errno, all of them. Files and folders are their owner's alone at first. */
int temporary_file(const char *dest, struct temporary *ret_temporary);
int temporary_folder(const char *dest, struct temporary *ret_temporary);

/*
 * A folder for the time of a process, PARENT/NAME-XXXXXX, with files and no folders in it; it is never renamed. `name`
 * is the program's own: what looks like it and has no lock is removed.
 */
int temporary_folder_in(const char *parent, const char *name, struct temporary *ret_temporary);

/* All of the bytes. */
int temporary_write(const struct temporary *temporary, const char *text, size_t bytes);

/* Gives it its name, after which it is complete. A file has to be on the disk before: fsync(). */
int temporary_rename(struct temporary *temporary, const char *dest);

/* Removes it; a folder with the files in it. Also of one that was renamed, or never made: nothing happens. */
void temporary_remove(struct temporary *temporary);

/*
 * Signals wait while something is under another name, which takes milliseconds: whatever ends the process, but SIGKILL,
 * leaves nothing behind. Of this thread; those of the command that run beside it take none.
 */
void temporary_hold_signals(sigset_t *ret_before);
void temporary_release_signals(const sigset_t *before);

/* Has one come meanwhile that ends the command (SIGINT, SIGTERM, SIGHUP, SIGQUIT; not where it is ignored)? */
bool temporary_is_interrupted(void);

/* All of that at once: a file with this text. */
int temporary_save(const char *dest, const char *text, size_t bytes, mode_t mode);

/* The mode of a file as umask says, but never for others to write, and always for the owner to read and write. */
mode_t temporary_usual_mode(void);

#endif
