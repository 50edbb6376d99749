/* SPDX-License-Identifier: Apache-2.0 */
/*
 * keep.h - inside machine/source: what a root has kept, and its live side.
 *
 * What is kept is the recording: one JSON object for each kind of question, an entry for each question. A live root and
 * a folder make an entry when they are asked for the first time; an overlay and a snapshot bring entries along. Every
 * question is answered from its entry, so a snapshot answers as the machine did.
 *
 * An entry whose state is not ROOT_OK is an object {"state": "absent|denied|failed", "why": "..."}. Otherwise it is
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
 * Keys are paths as keep_path() makes them. Strings and keys may hold any bytes (json_stringn_nocheck()); what is not
 * UTF-8 is turned into {"hex": "..."} in a snapshot, and back.
 */
#ifndef EP_ROOT_KEEP_H
#define EP_ROOT_KEEP_H

#include "source/root.h"

#include <limits.h>
#include <stdarg.h>

/* The fact that is the environment of the process: an object of values by name. */
#define KEEP_ENVIRONMENT "/proc/self/environ"
#define KEEP_ENVIRONMENT_FACT "environment"

enum keep_kind {
    KEEP_FILES,
    KEEP_FOLDERS,
    KEEP_LINKS,
    KEEP_STATS,
    KEEP_LINES,
    KEEP_ELF,
    KEEP_ANSWERS,
    KEEP_FACTS,
    KEEP_KINDS
};

/* Names of the kinds in a snapshot: "files", ... */
extern const char *const keep_kind_names[KEEP_KINDS];

/*
 * Formats a path into ret_path (PATH_MAX bytes), without doubled slashes, "." and a slash at the end; ".." stays. NULL,
 * or why it cannot be one ("not an absolute path"): then the question is ROOT_FAILED and nothing is kept.
 */
const char *keep_path(char ret_path[PATH_MAX], const char *format, va_list args) __attribute__((format(printf, 2, 0)));

/* --- entries --- */

/*
 * The entry to answer a question from, or NULL: it has to be made from the live side, and given to keep_put(). A root
 * that has no live side, or is full, gives an entry that says so. Borrowed.
 */
const json_t *keep_look_up(struct root *root, enum keep_kind kind, const char *key);

/* Keeps an entry, which is taken over. Returns what to answer from: `entry`, or one that says why not. Borrowed. */
const json_t *keep_put(struct root *root, enum keep_kind kind, const char *key, json_t *entry);

/* A new entry that is not ROOT_OK. `why` may hold any text. */
json_t *keep_failure(enum root_state state, const char *why);

/* The state for an error number of open() or read(), as an entry. */
json_t *keep_failure_errno(int error_number);

/* The state of an entry; *ret_why is "" or the reason, borrowed from the entry. */
enum root_state keep_state(const json_t *entry, const char **ret_why);

/* --- what lives as long as the root, in memory of root_alloc() --- */

/* What an entry was turned into (arrays of pointers, ...), so that it is done once; NULL if nothing was set. */
void *keep_derived(struct root *root, enum keep_kind kind, const char *key);
void keep_set_derived(struct root *root, enum keep_kind kind, const char *key, void *derived);

/* --- live side --- */

/*
 * Opens a regular file below the root for reading. Never blocks; neither FIFO, socket nor device is opened. Returns a
 * descriptor, or -1 with *ret_failure, a new entry that says why not. *ret_bytes is its size, 0 in /proc and /sys.
 */
int keep_open(struct root *root, const char *path, int64_t *ret_bytes, json_t **ret_failure);

/* Around work on what keep_open() gave: for root_now_reading(). keep_open() says the path itself; `done` clears it. */
void keep_done(struct root *root);

#endif
