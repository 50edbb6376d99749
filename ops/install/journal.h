/* SPDX-License-Identifier: Apache-2.0 */
/*
 * journal.h - what an installation has done: one JSON object a line, appended and synced before anything relies on it.
 *
 *     {"v": 1, "time": "2026-02-03T10:00:00Z", "boot": "<boot id>", "event": "end", "step": "ofed", "attempt": 1, ...}
 *
 * The journal counts attempts and reboots; what is installed is decided by the checks alone. So a journal that is lost
 * costs the counts and nothing else. A last line without an end is what a power cut leaves: it is dropped. A journal
 * that cannot be read is moved aside, and a new one begins with the event "rebuilt". One of another version is refused:
 * the epkit that wrote it counts on what it says.
 */
#ifndef EP_INSTALL_JOURNAL_H
#define EP_INSTALL_JOURNAL_H

#include <epkit/status.h>
#include <jansson.h>
#include <stdbool.h>

#define JOURNAL_BYTES_MAX (16u << 20)
#define JOURNAL_VERSION 1

struct journal {
    char *path;
    int fd; /* -1: read only */
    char boot[64];
    json_t *events;  /* array, in order */
    size_t n_torn;   /* bytes dropped at the end */
    bool is_rebuilt; /* it was there and could not be read */
};

/* Takes the lines apart: what is whole goes to ret_events; *ret_whole: bytes up to the end of the last whole line.
 * False: something before the end is no event. *ret_foreign: number of the first line that is of another version, from
 * 1 on (parsing ends before it), or 0. */
bool journal_parse(const char *text, size_t bytes, json_t **ret_events, size_t *ret_whole, size_t *ret_foreign);

/* Opens or begins the journal at `path`. With `writable` it is repaired, else only read (one that is not there is
 * empty). */
ep_status journal_open(const char *path, const char *boot, bool writable, struct journal *ret_journal);
void journal_close(struct journal *journal);

/* Appends an event; `more` (may be NULL) is consumed and merged in. Synced when it returns. */
ep_status journal_add(struct journal *journal, const char *event, const char *step, json_t *more);

/* How often `event` is there since the last one of "finished", "uninstalled" and "again"; step NULL: of any step. */
int journal_count(const struct journal *journal, const char *event, const char *step);

/* The last event of a step with this name, or NULL. Borrowed. */
const json_t *journal_last(const struct journal *journal, const char *event, const char *step);

#endif
