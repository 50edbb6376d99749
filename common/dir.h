/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dir.h - folders as descriptors: the only way in which the command creates folders and files, with temporary.h, which
 * replaces files.
 *
 * Other users may put links into folders that they may write to. So a path is opened component by component, and a
 * link in it is followed only if it belongs to the caller or to root; what is created in the folder is created there by
 * its descriptor, never through an existing name. Modes never allow the group or others to write, whatever the umask.
 *
 * Functions that return a descriptor return -1 with errno on failure; the others 0, or an errno. write_reason() has
 * the text for it.
 */
#ifndef EP_COMMON_DIR_H
#define EP_COMMON_DIR_H

#include <dirent.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/types.h>

/* The mode of a new file by umask, but never writable by others, and always readable and writable by the owner. */
mode_t dir_usual_mode(void);

/* Closes it, unless it is -1. errno stays. */
void dir_close(int fd);

/* Is it the caller or root? */
bool dir_trusts(uid_t owner);

/* A folder (O_PATH); with `make` it and those above it are made, 0755 by umask. */
int dir_open(const char *path, bool make);

/* The folder of a file, and the file's name within `path`. */
int dir_open_parent(const char *path, bool make, const char **ret_name);

/* A folder in one (O_PATH), which is no link; with `make` it is made. */
int dir_open_in(int dir, const char *name, bool make);

/* One folder, in one that is there; EEXIST: something has that name. */
int dir_make(const char *path, mode_t mode);

/* openat2(2), never through links of /proc: `how_to_resolve` is of RESOLVE_*. ENOSYS: Linux before 5.6, or a filter. */
int dir_resolve(int dir, const char *path, int flags, unsigned how_to_resolve);

/* A file or folder `path` below the folder, without any link in it; ENOENT also if `dir` is -1. */
int dir_open_within(int dir, const char *path, int flags);

/* A new file in the folder, to write to; one of that name is removed before. */
int dir_create(int dir, const char *name, mode_t mode);

/* dir_write() makes a file as dir_create() does, writes `data` to it and closes it. */
int dir_write(int dir, const char *name, const void *data, size_t bytes, mode_t mode);

/*
 * A regular file in the folder, to read: EINVAL for another, such as a pipe, to which no process need write; EMLINK if
 * it has a second name and others could have given it this one. Its path with AT_FDCWD, which trusts the folder.
 */
int dir_read_in(int dir, const char *name);

/* A regular file with only this name, to append to and to read; made with `mode` if it is missing. */
int dir_append_in(int dir, const char *name, mode_t mode);

/* An existing file of any type, to write to; it is truncated. */
int dir_overwrite(const char *path);

/* Renames a file in the folder, and replaces one that has the new name. */
int dir_move_in(int dir, const char *from, const char *to);

/* A link. */
int dir_link(const char *target, const char *path);

/* The folder of that name in the folder, which is no link, to list it; NULL with errno. */
DIR *dir_list(int dir, const char *name);

/* The next entry but "." and ".."; NULL: there is none, and the list is closed. It may be NULL. */
struct dirent *dir_next(DIR **list);

/* Random characters, as of mkostemp(), in place of the last six of the name. */
void dir_random(char *name);

/* 0, or errno. May be called in a signal handler. The descriptor blocks. */
int write_all(int fd, const void *data, size_t bytes);

/* The reason of a failed write, of a file or by dir.h, by errno. */
const char *write_reason(int error_number);

/* --- files named by users --- */

/* Opens a file for reading; waits for the data of a pipe, `<(program)`, up to 60 s. NULL with errno. */
FILE *file_open(const char *path);

/* file_open_regular() opens only regular files, of at most 1 GiB: EINVAL for others, EFBIG for larger ones, at once. */
FILE *file_open_regular(const char *path);

/* file_open_within() is the same for a file below a folder, without any link in its path (dir_open_within()). */
FILE *file_open_within(int dir, const char *path);

/* What errno of these means. */
const char *file_error(int number);

/* Skips a byte order mark, as editors of other systems write it, at the beginning of a text. */
void file_skip_mark(FILE *stream);

#endif
