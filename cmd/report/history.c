/* SPDX-License-Identifier: Apache-2.0 */
/* history.c - the history file: one line of JSON per reported run. */
#include "common/dir.h"
#include "common/memory.h"
#include "common/redact.h"
#include "common/text.h"
#include "report.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#define MAX_ENTRIES 100000
#define LOCK_MS 10000
#define LOCK_POLL_MS 20

void report_copy_members(json_t *into, const json_t *from, const char *const *keys)
{
    for (; *keys; keys++) {
        json_t *value = json_object_get(from, *keys);

        json_object_set_new(into, *keys, value ? json_incref(value) : json_null());
    }
}

json_t *report_history_entry(const json_t *document)
{
    const json_t *host = json_array_get(json_object_get(document, "hosts"), 0);
    json_t *entry = json_pack("{s:i, s:{s:s, s:s, s:s, s:s}}", "schema_version", 1, "versions", "epkit",
                              json_text(document, "launched_by"), "driver", json_text(host, "driver"), "kernel",
                              json_text(host, "kernel"), "gpu", json_text(host, "gpu"));

    report_copy_members(entry, document,
                        TEXTS("date", "job", "hardware", "nodes", "commit", "result", "folder", "figures"));
    return entry;
}

/* Locks with a timeout: others hold the lock briefly, but a stopped process would hold it for ever. 0, or errno. */
static int lock(int fd)
{
    for (int left_ms = LOCK_MS; flock(fd, LOCK_EX | LOCK_NB) != 0; left_ms -= LOCK_POLL_MS) {
        if (errno != EWOULDBLOCK && errno != EINTR)
            return errno;
        if (left_ms <= 0)
            return EBUSY;
        poll(NULL, 0, LOCK_POLL_MS);
    }
    return 0;
}

json_t *report_history_read(const char *path, int *ret_bad)
{
    FILE *file = file_open_regular(path);
    json_t *entries;
    char *line = NULL;
    size_t space = 0;
    ssize_t n;

    *ret_bad = 0;
    if (!file)
        return NULL;
    entries = json_array();
    while ((n = getline(&line, &space, file)) > 0) {
        json_t *entry = json_loadb(line, (size_t)n, 0, NULL);

        if (json_is_object(entry) && json_is_object(json_object_get(entry, "figures")) &&
            json_array_size(entries) < MAX_ENTRIES)
            json_array_append(entries, entry);
        else
            ++*ret_bad;
        json_decref(entry);
    }
    free(line);
    fclose(file);
    return entries;
}

/* An editor may have left the last line without its end. */
static bool ends_within_line(int fd, off_t bytes)
{
    char last;

    return bytes > 0 && pread(fd, &last, 1, bytes - 1) == 1 && last != '\n';
}

static int open_history(const char *path)
{
    const char *name;
    int dir = dir_open_parent(path, false, &name), fd = dir < 0 ? -1 : dir_append_in(dir, name, dir_usual_mode());

    dir_close(dir);
    return fd;
}

/* The lock excludes other writers; a line truncated by a full disk is removed. */
int report_history_add(const char *path, const json_t *entry)
{
    int fd = open_history(path), error = fd < 0 ? errno : lock(fd);
    json_t *shown = redact_document(entry);
    char *text = stream_json_text(shown, JSON_COMPACT | JSON_REAL_PRECISION(9)), *line = NULL;
    off_t before;
    ssize_t n;

    json_decref(shown);
    if (error)
        goto end;
    before = lseek(fd, 0, SEEK_END);
    line = memory_printf("%s%s\n", ends_within_line(fd, before) ? "\n" : "", text);
    n = (ssize_t)strlen(line);
    if (write(fd, line, (size_t)n) != n) {
        error = errno ? errno : ENOSPC;
        if (ftruncate(fd, before) != 0)
            error = errno;
    } else if (fsync(fd) != 0 && errno != EINVAL) {
        error = errno;
    }
end:
    dir_close(fd);
    free(line);
    free(text);
    return error;
}

static bool is_same(const json_t *a, const json_t *b, const char *key)
{
    const json_t *x = json_object_get(a, key), *y = json_object_get(b, key);

    return (!x && !y) || (x && y && json_equal((json_t *)x, (json_t *)y));
}

/* Two reports are of one run if they have the same folder and the same time at which it began. */
static bool is_same_run(const json_t *a, const json_t *b)
{
    return json_is_string(json_object_get(a, "date")) && is_same(a, b, "date") && is_same(a, b, "folder");
}

json_t *report_history_of(const json_t *history, const json_t *document)
{
    json_t *list = json_array();

    FOR_JSON (entry, history) {
        size_t n = json_array_size(list);

        if (!is_same(entry, document, "job") || !is_same(entry, document, "hardware") ||
            !is_same(entry, document, "nodes") || is_same_run(entry, document))
            continue;
        /* Reports of one run usually follow each other; the last one counts. */
        if (n > 0 && is_same_run(entry, json_array_get(list, n - 1)))
            json_array_remove(list, n - 1);
        json_array_append(list, entry);
    }
    return list;
}
