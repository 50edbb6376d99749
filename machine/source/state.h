/* SPDX-License-Identifier: Apache-2.0 */
/* state.h - inside machine/source: the members of a source. elf.c needs only cache.h. */
#ifndef EP_MACHINE_SOURCE_STATE_H
#define EP_MACHINE_SOURCE_STATE_H

#include "base/error.h"
#include "cache.h"
#include "common/dir.h"

#include <stdatomic.h>

struct source_block; /* see cache.c */

struct source {
    char *name;
    bool is_live;
    int fd;           /* O_PATH of the root directory; -1: no live side */
    bool has_openat2; /* else it is "/", and the kernel may follow links */
    pid_t process;    /* whose files are below /proc/self/; 0: this one */
    bool has_read;    /* a query was made */

    json_t *cached[CACHE_KINDS];
    json_t *overlay_files;       /* paths of files that the overlay provides: they are never read again */
    json_t *memos[CACHE_KINDS];  /* pointers as integers */
    json_t *names;               /* interned strings, as keys */
    json_t *not_recorded, *full; /* entries */
    json_t *refused;             /* entries for paths that are not valid, by reason */
    char path[PATH_MAX];         /* of the query, in its plain form */
    const char *path_why;        /* why it is not valid; NULL */
    size_t cached_bytes;
    bool is_full;
    struct source_block *blocks;

    _Atomic(const char *) current_path; /* never NULL */
    struct source_environment environment;
    bool environment_known;
    const json_t *variables; /* of the environment, by name */
};

/* A source with an empty cache and without a live side. */
struct source *source_new(const char *name);

/* The entry of a query about source->path: cached, or made by `make`. */
typedef json_t *cache_maker(struct source *source, const char *path);
const json_t *cache_query(struct source *source, enum cache_kind kind, cache_maker *make);

/* The value of an entry that is a text, or its state. */
struct source_text cache_text(const json_t *entry);

/* Reads a file of the live side into an entry that is not cached. */
json_t *cache_file(struct source *source, const char *path);

/* The lines of a log of the live side that contain `needle`, as an entry that is not cached (lines.c). */
json_t *cache_log(struct source *source, const char *path, const char *needle);

/* For source_current_path(). */
void source_set_current_path(struct source *source, const char *path);

/* --- live.c --- */

/* Checks whether the kernel has openat2() and lets this process use it. */
void live_probe(struct source *source);

/*
 * open() within the root directory: `flags` as for open(); links are followed unless O_NOFOLLOW is among them. A
 * descriptor, or -1 with errno. It opens devices and FIFOs as well: check with O_PATH first.
 */
int live_open(struct source *source, const char *path, int flags);

/* The path without links that `path` leads to within the root directory; it has PATH_MAX bytes. -1 with errno. */
int live_resolve(const struct source *source, const char *path, char *ret_real);

/* The name of `path` on the live side, with /proc/self of the inspected process. And the reverse, in place. */
const char *live_own_path(const struct source *source, const char *path, char own[PATH_MAX]);
void live_self_path(const struct source *source, char path[PATH_MAX]);

/* Reads from the current offset of `fd`, at most `most` bytes, for free() in any case; their number, or -1 with errno.
 */
ssize_t live_text(int fd, size_t most, char **ret_text);

/* The same as an entry of files; more than SOURCE_FILE_MAX bytes are refused. */
json_t *live_read(int fd, size_t most);

/* --- snapshot.c --- */

/* Adds the entries of a snapshot's text, replacing cached ones. `what` names it in errors. */
ep_status snapshot_load(struct source *source, const char *what, const char *text, size_t bytes);

/* The document that source_save() writes, as text for free(). */
char *snapshot_text(struct source *source);

/* Does parsing the text as JSON take bounded memory? A small text could take a multiple of its size. */
bool snapshot_is_bounded(const char *text, size_t bytes);

#endif
