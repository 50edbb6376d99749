/* SPDX-License-Identifier: Apache-2.0 */
#include "routings.h"

#include "common/memory.h"

#include <epkit/types.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define SPACE " \t\r\n"

bool check_fail(struct check_error *error, const char *format, ...)
{
    if (!error)
        return false;
    WITH_ARGS(args, format, vsnprintf(error->text, sizeof(error->text), format, args));
    return false;
}

struct reader {
    struct routing_file file;
    int line;          /* from 1 */
    int n_rows;        /* of the current table */
    size_t n, n_items; /* items that are read, and for which there is memory */
    struct check_error *error;
};

static void add_item(struct reader *reader, int32_t item)
{
    if (reader->n == reader->n_items) {
        reader->n_items = reader->n_items ? 2 * reader->n_items : 4096;
        reader->file.experts = memory_grow(reader->file.experts, reader->n_items * sizeof(item));
    }
    reader->file.experts[reader->n++] = item;
}

/* Reads the numbers of a line of n bytes and counts them. */
static bool read_numbers(struct reader *reader, const char *line, size_t n, int *ret_count)
{
    const char *at = line + strspn(line, SPACE);

    for (*ret_count = 0; *at; ++*ret_count) {
        char *end;
        long value = strtol(at, &end, 10);

        if (end == at || !strchr(SPACE, *end) || value != (int32_t)value)
            return check_fail(reader->error,
                              "line %d: '%.*s' is not the number of an expert; "
                              "numpy.savetxt(file, indices, fmt=\"%%d\") writes numbers",
                              reader->line, (int)strcspn(at, SPACE) < 24 ? (int)strcspn(at, SPACE) : 24, at);
        if (*ret_count == EP_MAX_TOPK)
            return check_fail(reader->error, "line %d: more than %d selections", reader->line, EP_MAX_TOPK);
        add_item(reader, (int32_t)value);
        at = end + strspn(end, SPACE);
    }
    return at == line + n || check_fail(reader->error, "line %d: contains a zero byte; not a text", reader->line);
}

/* All tables have as many tokens as the first. */
static bool end_table(struct reader *reader)
{
    struct routing_file *file = &reader->file;

    if (reader->n_rows == 0)
        return true;
    if (file->n_tables++ == 0)
        file->n_tokens = reader->n_rows;
    if (reader->n_rows != file->n_tokens)
        return check_fail(reader->error, "line %d: %d tokens of rank %d end here, but rank 0 has %d", reader->line,
                          reader->n_rows, file->n_tables - 1, file->n_tokens);
    reader->n_rows = 0;
    return true;
}

static bool read_line(struct reader *reader, const char *line, size_t n)
{
    int count;

    reader->line++;
    if (!read_numbers(reader, line, n, &count))
        return false;
    if (count == 0)
        return end_table(reader);
    if (reader->file.topk == 0)
        reader->file.topk = count;
    if (count != reader->file.topk)
        return check_fail(reader->error, "line %d: %d selections, but the lines before have %d", reader->line, count,
                          reader->file.topk);
    reader->n_rows++;
    return true;
}

bool routing_file_read(FILE *stream, struct routing_file *ret_file, struct check_error *error)
{
    struct reader reader = {.error = error};
    char *line = NULL;
    size_t bytes = 0;
    ssize_t n;
    bool ok = true;

    while (ok && (n = getline(&line, &bytes, stream)) >= 0)
        ok = read_line(&reader, line, (size_t)n);
    if (ok && !feof(stream))
        ok = check_fail(error, "%s", strerror(errno));
    ok = ok && end_table(&reader);
    if (ok && reader.file.n_tables == 0)
        ok = check_fail(error, "contains no selections");
    free(line);
    if (ok)
        *ret_file = reader.file;
    else
        free(reader.file.experts);
    return ok;
}

bool routing_file_load(const char *path, struct routing_file *ret_file, struct check_error *error)
{
    struct check_error reason = {""};
    /* Does not block, as opening a pipe without a writer would. */
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    FILE *stream = NULL;
    struct stat info;
    bool ok = false;

    if (fd >= 0 && fstat(fd, &info) == 0 && S_ISREG(info.st_mode))
        stream = fdopen(fd, "r");
    else if (fd >= 0)
        errno = EINVAL;
    if (!stream)
        check_fail(&reason, "%s", errno == EINVAL ? "not a regular file" : strerror(errno));
    else
        ok = routing_file_read(stream, ret_file, &reason);
    if (stream)
        fclose(stream);
    else if (fd >= 0)
        close(fd);
    return ok || check_fail(error, "%s: %s", path, reason.text);
}

void routing_file_done(struct routing_file *file)
{
    free(file->experts);
    *file = (struct routing_file){0};
}
