/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cache.h - inside machine/source: the cache of a source.
 *
 * The cache has one JSON object for each kind of query, with an entry for each query. A live source and a folder make
 * an entry on the first query; an overlay and a snapshot provide entries. Every query is answered from its entry, so a
 * snapshot answers as the machine did.
 *
 * An entry whose state is not SOURCE_OK is an object {"state": "absent|denied|failed", "why": "..."}. Otherwise it is
 *
 *     files     "text"
 *     folders   ["name", ...]
 *     links     "/path/that/it/resolves/to"
 *     stats     {"kind": "file|folder|char|other", "bytes": 0, "access": "rw-"}
 *     lines     "line\nline\n"; the key is the path, a tab and the needle
 *     elf       an object without "state" (elf.c)
 *     answers   {"value": anything}; the key is the name of the query
 *     facts     {"value": anything}; the key is the path of the file, a tab and the name of the fact
 *
 * Keys are paths as cache_plain_path() makes them. Strings and keys may hold any bytes (json_stringn_nocheck()); in a
 * snapshot, those that are not UTF-8 are '?'.
 */
#ifndef EP_MACHINE_SOURCE_CACHE_H
#define EP_MACHINE_SOURCE_CACHE_H

#include "source.h"

#include <limits.h>

/* The environment of the process is a fact: an object of values by name. */
#define CACHE_ENVIRONMENT "/proc/self/environ"
#define CACHE_ENVIRONMENT_FACT "environment"

enum cache_kind {
    CACHE_FILES,
    CACHE_FOLDERS,
    CACHE_LINKS,
    CACHE_STATS,
    CACHE_LINES,
    CACHE_ELF,
    CACHE_ANSWERS,
    CACHE_FACTS,
    CACHE_KINDS
};

/* Names of the kinds in a snapshot: "files", ... */
extern const char *const cache_kind_names[CACHE_KINDS];

/*
 * The plain form of a path: without doubled slashes, "." and a trailing slash; ".." stays. Returns NULL, or why it is
 * not valid ("not an absolute path"): then a query is SOURCE_FAILED and nothing is cached.
 */
const char *cache_plain_path(const char *path, char ret_path[PATH_MAX]);

/* --- entries --- */

/*
 * The entry of a query, borrowed. NULL: the caller reads the live side and calls cache_put(). A source without a live
 * side, or with a full cache, gives an entry that says so.
 */
const json_t *cache_get(struct source *source, enum cache_kind kind, const char *key);

/* Stores `entry` (consumed). Returns the entry to answer from: `entry`, or one that says why not. Borrowed. */
const json_t *cache_put(struct source *source, enum cache_kind kind, const char *key, json_t *entry);

/* A new entry that is not SOURCE_OK. */
json_t *cache_failure(enum source_state state, const char *why);

/* The state for an error number of open() or read(), as an entry. */
json_t *cache_failure_errno(int error_number);

/* The state of an entry; *ret_why is "" or the reason, borrowed from the entry. */
enum source_state cache_state(const json_t *entry, const char **ret_why);

/* --- values derived from entries, in memory of source_alloc() --- */

/* A memo of what an entry was converted into (arrays of pointers, ...); NULL if nothing was set. */
void *cache_memo(struct source *source, enum cache_kind kind, const char *key);
void cache_set_memo(struct source *source, enum cache_kind kind, const char *key, void *memo);

/* --- live side --- */

/*
 * Opens a regular file of the source for reading. Never blocks; FIFOs, sockets and devices are not opened. Returns a
 * descriptor, or -1 with *ret_failure, a new entry that says why. *ret_bytes is its size, 0 in /proc and /sys.
 */
int live_open_file(struct source *source, const char *path, int64_t *ret_bytes, json_t **ret_failure);

/* Ends the reading that live_open_file() began, for source_current_path(). */
void live_done(struct source *source);

#endif
