/* SPDX-License-Identifier: Apache-2.0 */
/*
 * journal.h - the journal of an installation: one JSON object per line, appended and synced before anything depends on
 * it.
 *
 *     {"v": 1, "time": "2026-02-03T10:00:00Z", "boot": "<boot id>", "event": "end", "step": "ofed", "attempt": 1, ...}
 *
 * The journal counts attempts and reboots; only the checks decide what is installed. So the loss of a journal loses
 * only the counts. A power cut may leave a last line without a newline: it is dropped. A journal that cannot be read is
 * moved aside, and a new one begins with the event "rebuilt".
 */
#ifndef EP_INSTALL_JOURNAL_H
#define EP_INSTALL_JOURNAL_H

#include <epkit/status.h>
#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>

#define JOURNAL_BYTES_MAX (16u << 20)
#define JOURNAL_VERSION 1

struct journal {
    char *path; /* for messages */
    int fd;     /* -1: read only */
    char boot[64];
    json_t *events;  /* array, in order */
    bool is_rebuilt; /* an existing journal could not be read */
};

/*
 * Parses the lines: complete events go to ret_events; *ret_whole: bytes up to the end of the last complete line. False:
 * a line before the end is not an event.
 */
bool journal_parse(const char *text, size_t bytes, json_t **ret_events, size_t *ret_whole);

/*
 * Opens or creates the journal in the folder `dir`, which `folder` names in messages. With `writable` it is repaired,
 * else only read (a missing one is empty, and so is that of no folder, -1).
 */
ep_status journal_open(int dir, const char *folder, const char *boot, bool writable, struct journal *ret_journal);
void journal_close(struct journal *journal);

/* Appends an event; `more` (may be NULL) is consumed and merged in. Synced when it returns. */
ep_status journal_add(struct journal *journal, const char *event, const char *step, json_t *more);

/* Number of `event` entries since the last "finished", "uninstalled" or "again"; step NULL: of any step. */
int journal_count(const struct journal *journal, const char *event, const char *step);
/* How often the step was begun since the recipe was uninstalled last. */
int journal_attempts(const struct journal *journal, const char *step);

/* The last event of a step with this name, or NULL. Borrowed. */
const json_t *journal_last(const struct journal *journal, const char *event, const char *step);

/* Reads and closes a file, of a larger one the first `max` + 1 bytes; NULL with errno, that of the caller for NULL. */
char *journal_read_file(FILE *file, size_t max, size_t *ret_bytes);

#endif
