/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cache.h - inside machine/source: what a source has kept, and its live side.
 *
 * What is kept is the recording: one JSON object for each kind of question, an entry for each question. A live root and
 * a folder make an entry when they are asked for the first time; an overlay and a snapshot bring entries along. Every
 * question is answered from its entry, so a snapshot answers as the machine did.
 *
 * An entry whose state is not SOURCE_OK is an object {"state": "absent|denied|failed", "why": "..."}. Otherwise it is
 *
 *     files     "text"
 *     folders   ["name", ...]
 *     links     "/path/that/it/leads/to"
 *     stats     {"kind": "file|folder|char|other", "bytes": 0, "access": "rw-"}
 *     lines     "line\nline\n"; the key is the path, a tab and the needle
 *     elf       an object without "state" (elf.c)
 *     answers   {"value": anything}; the key is the name of the question
 *     facts     {"value": anything}; the key is the path of the file, a tab and the name of the fact
 *
 * Keys are paths as cache_path() makes them. Strings and keys may hold any bytes (json_stringn_nocheck()); what is not
 * UTF-8 is turned into {"hex": "..."} in a snapshot, and back.
 */
#ifndef EP_MACHINE_SOURCE_CACHE_H
#define EP_MACHINE_SOURCE_CACHE_H

#include "source/source.h"

#include <limits.h>
#include <stdarg.h>

/* The fact that is the environment of the process: an object of values by name. */
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
 * Formats a path into ret_path (PATH_MAX bytes), without doubled slashes, "." and a slash at the end; ".." stays. NULL,
 * or why it cannot be one ("not an absolute path"): then the question is SOURCE_FAILED and nothing is kept.
 */
const char *cache_path(char ret_path[PATH_MAX], const char *format, va_list args) __attribute__((format(printf, 2, 0)));

/* --- entries --- */

/*
 * The entry to answer a question from, or NULL: it has to be made from the live side, and given to cache_put(). A
 * source that has no live side, or is full, gives an entry that says so. Borrowed.
 */
const json_t *cache_get(struct source *source, enum cache_kind kind, const char *key);

/* Keeps an entry, which is taken over. Returns what to answer from: `entry`, or one that says why not. Borrowed. */
const json_t *cache_put(struct source *source, enum cache_kind kind, const char *key, json_t *entry);

/* A new entry that is not SOURCE_OK. `why` may hold any text. */
json_t *cache_failure(enum source_state state, const char *why);

/* The state for an error number of open() or read(), as an entry. */
json_t *cache_failure_errno(int error_number);

/* The state of an entry; *ret_why is "" or the reason, borrowed from the entry. */
enum source_state cache_state(const json_t *entry, const char **ret_why);

/* --- what lives as long as the source, in memory of source_alloc() --- */

/* What an entry was turned into (arrays of pointers, ...), so that it is done once; NULL if nothing was set. */
void *cache_memo(struct source *source, enum cache_kind kind, const char *key);
void cache_set_memo(struct source *source, enum cache_kind kind, const char *key, void *derived);

/* --- live side --- */

/*
 * Opens a regular file below the source for reading. Never blocks; neither FIFO, socket nor device is opened. Returns a
 * descriptor, or -1 with *ret_failure, a new entry that says why not. *ret_bytes is its size, 0 in /proc and /sys.
 */
int live_open_file(struct source *source, const char *path, int64_t *ret_bytes, json_t **ret_failure);

/* Around work on what live_open_file() gave: for source_current_path(). live_open_file() says the path itself; `done`
 * clears it. */
void live_done(struct source *source);

#endif
