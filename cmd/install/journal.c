/* SPDX-License-Identifier: Apache-2.0 */
#include "journal.h"

#include "base/error.h"
#include "common/dir.h"
#include "common/memory.h"
#include "common/redact.h"
#include "common/text.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static bool is_event(const json_t *line)
{
    return json_integer_value(json_object_get(line, "v")) == JOURNAL_VERSION &&
           json_is_string(json_object_get(line, "event")) && json_is_string(json_object_get(line, "boot"));
}

bool journal_parse(const char *text, size_t bytes, json_t **ret_events, size_t *ret_whole)
{
    json_t *events = json_array();
    size_t at = 0;

    *ret_events = events;
    *ret_whole = 0;
    while (at < bytes) {
        const char *end = memchr(text + at, '\n', bytes - at);
        size_t n = end ? (size_t)(end - text) - at : bytes - at;
        json_t *line = end ? json_loadb(text + at, n, JSON_REJECT_DUPLICATES, NULL) : NULL;

        if (!is_event(line)) {
            bool is_last = !end || (size_t)(end - text) + 1 == bytes;

            json_decref(line);
            return is_last;
        }
        json_array_append_new(events, line);
        at += n + 1;
        *ret_whole = at;
    }
    return true;
}

#define NAME "journal.jsonl"

char *journal_read_file(FILE *file, size_t max, size_t *ret_bytes)
{
    char *text;

    if (!file)
        return NULL;
    text = memory_grow(NULL, max + 1);
    *ret_bytes = fread(text, 1, max + 1, file);
    fclose(file);
    return text;
}

/* A power cut loses the name of a new file unless its folder is synced. */
static void sync_folder(int dir)
{
    int fd = openat(dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);

    if (fd >= 0) {
        fsync(fd);
        close(fd);
    }
}

static ep_status open_to_write(struct journal *journal, int dir, bool is_readable, size_t whole, size_t bytes)
{
    if (!is_readable) {
        int number = dir_move_in(dir, NAME, NAME ".unreadable");

        if (number)
            return ep_fail_errno(EP_E_SYSTEM, number, "%s cannot be moved aside", journal->path);
        json_array_clear(journal->events);
        whole = 0;
    }
    journal->fd = dir_append_in(dir, NAME, 0644);
    if (journal->fd < 0)
        return ep_fail_errno(EP_E_SYSTEM, errno, "%s", journal->path);
    if (whole < bytes && is_readable && ftruncate(journal->fd, (off_t)whole) != 0)
        return ep_fail_errno(EP_E_SYSTEM, errno, "%s cannot be truncated to its last complete line", journal->path);
    sync_folder(dir);
    if (!is_readable)
        return journal_add(journal, "rebuilt", NULL, json_pack("{s:s}", "reason", "the journal could not be read"));
    if (whole < bytes)
        return journal_add(journal, "repaired", NULL, json_pack("{s:I}", "dropped_bytes", (json_int_t)(bytes - whole)));
    return EP_OK;
}

ep_status journal_open(int dir, const char *folder, const char *boot, bool writable, struct journal *ret_journal)
{
    struct journal journal = {.fd = -1};
    size_t bytes = 0, whole;
    char *text = journal_read_file(file_open_within(dir, NAME), JOURNAL_BYTES_MAX, &bytes);
    ep_status status = EP_OK;
    bool is_readable;

    if (!text && (errno == EINVAL || errno == ELOOP))
        return ep_fail(EP_E_ARG, "%s/" NAME " is not a journal: not a regular file", folder);
    if (!text && errno != ENOENT)
        return ep_fail_errno(EP_E_SYSTEM, errno, "%s/" NAME, folder);
    if (bytes > JOURNAL_BYTES_MAX) {
        free(text);
        return ep_fail(EP_E_ARG, "%s/" NAME " is not a journal: larger than 16 MiB", folder);
    }
    journal.path = memory_printf("%s/" NAME, folder);
    snprintf(journal.boot, sizeof(journal.boot), "%s", boot);
    is_readable = journal_parse(text, bytes, &journal.events, &whole);
    free(text);
    journal.is_rebuilt = !is_readable;
    if (writable)
        status = open_to_write(&journal, dir, is_readable, whole, bytes);
    if (status != EP_OK) {
        journal_close(&journal);
        return status;
    }
    *ret_journal = journal;
    return EP_OK;
}

void journal_close(struct journal *journal)
{
    dir_close(journal->fd);
    json_decref(journal->events);
    free(journal->path);
    *journal = (struct journal){.fd = -1};
}

ep_status journal_add(struct journal *journal, const char *event, const char *step, json_t *more)
{
    char when[TEXT_TIME_BYTES], *text;
    json_t *line, *shown;
    size_t bytes;
    ssize_t n;

    if (journal->fd < 0) {
        json_decref(more);
        return EP_OK;
    }
    line = json_pack("{s:i,s:s,s:s,s:s,s:s*}", "v", JOURNAL_VERSION, "time", text_time(time(NULL), when), "boot",
                     journal->boot, "event", event, "step", step);
    if (more)
        json_object_update(line, more);
    json_decref(more);
    shown = redact_document(line);
    text = json_dumps(shown, JSON_COMPACT);
    json_decref(shown);
    bytes = strlen(text);
    text[bytes] = '\n'; /* replaces the NUL */
    do
        n = write(journal->fd, text, bytes + 1);
    while (n < 0 && errno == EINTR);
    free(text);
    json_array_append_new(journal->events, line);
    if (n != (ssize_t)bytes + 1 || fsync(journal->fd) != 0)
        return ep_fail_errno(EP_E_SYSTEM, n < 0 ? errno : ENOSPC, "%s cannot be written", journal->path);
    return EP_OK;
}

static bool is_named(const json_t *line, const char *key, const char *value)
{
    const char *text = json_string_value(json_object_get(line, key));

    return text && strcmp(text, value) == 0;
}

/* Events since the last of `ends`. */
static int count(const struct journal *journal, const char *event, const char *step, const char *const *ends)
{
    int n = 0;

    for (size_t i = json_array_size(journal->events); i-- > 0;) {
        const json_t *line = json_array_get(journal->events, i);

        if (text_is_any(json_string_value(json_object_get(line, "event")), ends))
            break;
        n += is_named(line, "event", event) && (!step || is_named(line, "step", step));
    }
    return n;
}

int journal_count(const struct journal *journal, const char *event, const char *step)
{
    return count(journal, event, step, TEXTS("finished", "uninstalled", "again"));
}

int journal_attempts(const struct journal *journal, const char *step)
{
    return count(journal, "start", step, TEXTS("uninstalled"));
}

const json_t *journal_last(const struct journal *journal, const char *event, const char *step)
{
    for (size_t i = json_array_size(journal->events); i-- > 0;) {
        const json_t *line = json_array_get(journal->events, i);

        if (is_named(line, "event", event) && (!step || is_named(line, "step", step)))
            return line;
    }
    return NULL;
}
