/* SPDX-License-Identifier: Apache-2.0 */
/* state.h - inside machine/source: what a source is made of. elf.c needs cache.h alone. */
#ifndef EP_MACHINE_SOURCE_STATE_H
#define EP_MACHINE_SOURCE_STATE_H

#include "base/error.h"
#include "source/cache.h"

#include <stdatomic.h>

struct source_block; /* of memory, see keep.c */

struct source {
    char *name;
    bool is_live;
    int fd;           /* O_PATH of the folder; -1: no live side */
    bool has_openat2; /* else live.c walks by itself, or for "/" lets the kernel follow links */
    pid_t process;    /* whose /proc/self/ is; 0: this one */
    bool has_read;    /* something was asked */

    json_t *cached[CACHE_KINDS];
    json_t *overlay_files;       /* paths of files that came from an overlay: they stay as they are */
    json_t *memos[CACHE_KINDS];  /* addresses as numbers */
    json_t *lines;               /* first lines of files by path */
    json_t *names;               /* strings that stay at their address, as keys */
    json_t *not_recorded, *full; /* entries */
    json_t *refused;             /* entries by reason: of paths that are none */
    size_t cached_bytes;
    bool is_full;
    struct source_block *blocks;

    _Atomic(const char *) current_path; /* being read; never NULL */
    struct source_environment environment;
    bool environment_known;
};

/* A source without anything kept and without a live side. */
ep_status source_new(const char *name, struct source **ret_source);

/* A copy of `text` at an address that does not change; the same text has the same. "" for lack of memory. */
const char *cache_intern(struct source *source, const char *text);

/*
 * The entry of a question about the path that `format` and `args` make, in ret_path: the one that is kept, else a new
 * one by `make` from the live side.
 */
typedef json_t *cache_maker(struct source *source, const char *path);
const json_t *cache_query(struct source *source, enum cache_kind kind, cache_maker *make, char ret_path[PATH_MAX],
                          const char *format, va_list args);

/* What cache_path() does, for a path that is complete. */
const char *cache_plain_path(const char *path, char ret_path[PATH_MAX]);

/* An entry that is a text, or a state. */
struct source_text cache_text(const json_t *entry);

/* The text of a file of the live side as an entry that is not kept; NULL for lack of memory. */
json_t *cache_file(struct source *source, const char *path);

/* The lines of a log of the live side that contain `needle`, as an entry that is not kept (lines.c). */
json_t *cache_log(struct source *source, const char *path, const char *needle);

/* For source_current_path(). */
void source_set_current_path(struct source *source, const char *path);

/* --- live.c --- */

/* Looks whether the kernel has openat2() and lets this process use it. */
void live_probe(struct source *source);

/*
 * open() below the source: `flags` as for open(); links are followed unless O_NOFOLLOW is among them. A descriptor, or
 * -1 with errno. Devices and FIFOs are not kept away here: O_PATH first.
 */
int live_open(struct source *source, const char *path, int flags);

/* As live_open() with O_PATH, and the path that it was, without links; ret_path has PATH_MAX bytes. */
int live_resolve(struct source *source, const char *path, char *ret_path);

/* The same by own steps, one a component; with O_NOFOLLOW in `flags` a link at the end is not followed. */
int live_walk(struct source *source, const char *path, int flags, char *ret_path);

/*
 * What `path` is called on the live side: below /proc/self of the process that is looked at. And back, in place: what a
 * link in /proc leads to.
 */
const char *live_own_path(const struct source *source, const char *path, char own[PATH_MAX]);
void live_self_path(const struct source *source, char path[PATH_MAX]);

/* Everything from where `fd` is to its end, at most SOURCE_FILE_MAX bytes, as an entry of files. */
json_t *live_read(int fd);

/* As live_read(), but of more than that the first SOURCE_FILE_MAX bytes. */
json_t *live_read_part(int fd);

/* --- snapshot.c --- */

/* Takes the entries of a snapshot's text; those that are kept already are replaced. `what` names it in errors. */
ep_status snapshot_load(struct source *source, const char *what, const char *text, size_t bytes);

/* A source that holds what the text of a snapshot says. */
ep_status source_from_json(const char *name, const char *text, size_t bytes, struct source **ret_source);

/* The document that source_save() writes, as text for free(). */
ep_status snapshot_text(struct source *source, char **ret_text, size_t *ret_bytes);

/* A new copy in which everything can be written as JSON, and the way back. NULL for lack of memory. */
json_t *snapshot_encode(const json_t *value);
json_t *snapshot_decode(const json_t *value);

/* Is the text, taken as JSON, one that will not take a multiple of its size in memory? */
bool snapshot_is_bounded(const char *text, size_t bytes);

#endif
