/* SPDX-License-Identifier: Apache-2.0 */
/* lines.c - matching lines of a log: a file, or the ring buffer of the kernel. */
#include "common/memory.h"
#include "state.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#define KMSG "/dev/kmsg"
#define RECORD_BYTES 8192     /* maximum of the kernel, which refuses to read a record into a smaller buffer */
#define RECORDS_MAX (1 << 17) /* a ring buffer of 16 MiB holds fewer */

/* The lines found so far. Beyond SOURCE_LOG_MAX the oldest are dropped. */
struct found {
    char *text;
    size_t used, room;
};

static void add_line(struct found *found, const char *line, size_t bytes)
{
    if (bytes + 1 > SOURCE_LOG_MAX)
        return;
    while (found->used + bytes + 1 > SOURCE_LOG_MAX) {
        /* Drop half at once, so that a long log is not moved for each of its lines. */
        char *rest = memchr(found->text + found->used / 2, '\n', found->used - found->used / 2);

        found->used -= (size_t)(rest + 1 - found->text);
        memmove(found->text, rest + 1, found->used);
    }
    if (!found->text || found->used + bytes + 1 > found->room)
        found->text = memory_grow(found->text, found->room = 2 * (found->used + bytes + 1));
    memcpy(found->text + found->used, line, bytes);
    found->used += bytes;
    found->text[found->used++] = '\n';
}

static void search_lines(struct found *found, const char *text, size_t bytes, const char *needle)
{
    const char *end = text + bytes;

    while (text < end) {
        const char *newline = memchr(text, '\n', (size_t)(end - text));
        size_t n = (size_t)((newline ? newline : end) - text);

        if (memmem(text, n, needle, strlen(needle)))
            add_line(found, text, n);
        text += n + 1;
    }
}

/* --- files --- */

/* The last SOURCE_LOG_MAX bytes, from the start of a line. */
static json_t *search_file(int fd, int64_t bytes, const char *needle, struct found *found)
{
    bool is_cut = bytes > SOURCE_LOG_MAX;
    json_t *text;
    const char *at;
    size_t n;

    /* One byte less than fits, so that a growing log is not too large. */
    if (is_cut && lseek(fd, bytes - (SOURCE_LOG_MAX - 1), SEEK_SET) < 0)
        return cache_failure_errno(errno);
    text = live_read(fd, SOURCE_FILE_MAX);
    if (!json_is_string(text))
        return text;
    at = json_string_value(text);
    n = json_string_length(text);
    if (is_cut) {
        const char *newline = memchr(at, '\n', n);
        size_t skip = newline ? (size_t)(newline + 1 - at) : n;

        at += skip;
        n -= skip;
    }
    search_lines(found, at, n, needle);
    json_decref(text);
    return NULL;
}

/* --- the kernel's ring buffer --- */

/* A record is "priority,number,time,flags;text\n KEY=value\n": Linux, Documentation/ABI/testing/dev-kmsg. */
static void search_record(struct found *found, const char *record, size_t bytes, const char *needle)
{
    const char *text = memchr(record, ';', bytes), *newline;

    if (!text)
        return;
    text++;
    bytes -= (size_t)(text - record);
    newline = memchr(text, '\n', bytes);
    search_lines(found, text, newline ? (size_t)(newline - text) : bytes, needle);
}

static json_t *search_kmsg(int fd, const char *needle, struct found *found)
{
    char record[RECORD_BYTES];
    json_t *failure = NULL;

    for (int i = 0; i < RECORDS_MAX; i++) {
        ssize_t n = read(fd, record, sizeof(record));

        if (n > 0) {
            search_record(found, record, (size_t)n, needle);
        } else if (n == 0 || errno == EAGAIN) {
            break;
        } else if (errno != EPIPE && errno != EINTR && errno != EINVAL) {
            /* EPIPE: the record was overwritten before it was read. EINVAL: it is larger than any should be. */
            failure = cache_failure_errno(errno);
            break;
        }
    }
    return failure;
}

/* A descriptor of this machine's ring buffer, or -1 if `path` is something else. */
static int open_kmsg(struct source *source, const char *path, json_t **ret_failure)
{
    struct stat info;
    int fd;

    if (!source->is_live || strcmp(path, KMSG) != 0)
        return -1;
    fd = live_open(source, path, O_PATH);
    if (fd < 0 || fstat(fd, &info) < 0 || !S_ISCHR(info.st_mode) || info.st_rdev != makedev(1, 11)) {
        dir_close(fd);
        return -1;
    }
    close(fd);
    fd = live_open(source, path, O_RDONLY | O_NONBLOCK | O_NOCTTY);
    if (fd < 0)
        *ret_failure = cache_failure_errno(errno);
    return fd;
}

json_t *cache_log(struct source *source, const char *path, const char *needle)
{
    struct found found = {0};
    json_t *failure = NULL, *entry;
    int64_t bytes;
    int fd;

    source_set_current_path(source, path);
    fd = open_kmsg(source, path, &failure);
    if (fd >= 0) {
        failure = search_kmsg(fd, needle, &found);
    } else if (!failure) {
        fd = live_open_file(source, path, &bytes, &failure);
        if (fd >= 0)
            failure = search_file(fd, bytes, needle, &found);
    }
    dir_close(fd);
    live_done(source);
    entry = failure ? failure : json_stringn_nocheck(found.used ? found.text : "", found.used);
    free(found.text);
    return entry;
}
