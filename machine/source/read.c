/* SPDX-License-Identifier: Apache-2.0 */
/* read.c - queries of files. Each uses the cached entry, or makes one from the live side. */
#include "common/text.h"
#include "state.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#define LINE_BYTES 4096

/* --- whole files --- */

json_t *cache_file(struct source *source, const char *path)
{
    json_t *entry;
    int64_t bytes;
    int fd = live_open_file(source, path, &bytes, &entry);

    if (fd < 0)
        return entry;
    entry = bytes > SOURCE_FILE_MAX ? cache_failure(SOURCE_FAILED, "larger than 8 MiB")
                                    : live_read(fd, SOURCE_FILE_MAX + 1);
    live_done(source);
    close(fd);
    return entry;
}

struct source_text path_read(struct source *source)
{
    return cache_text(cache_query(source, CACHE_FILES, cache_file));
}

/* --- lines and numbers --- */

/* The first line of `text` without surrounding white space; at most `bytes` - 1 of it. */
static void cut_line(const char *text, char *ret_line, size_t bytes)
{
    char raw[LINE_BYTES];
    size_t n;

    text += strspn(text, " \t\r");
    n = strcspn(text, "\n");
    if (n >= sizeof(raw))
        n = sizeof(raw) - 1;
    while (n > 0 && isspace((unsigned char)text[n - 1]))
        n--;
    memcpy(raw, text, n);
    raw[n] = '\0';
    text_clean(raw, ret_line, bytes);
}

struct source_text path_line(struct source *source)
{
    struct source_text text = path_read(source);
    char line[LINE_BYTES], *memo;

    if (text.state != SOURCE_OK)
        return text;
    memo = cache_memo(source, CACHE_FILES, source->path);
    if (!memo) {
        cut_line(text.text, line, sizeof(line));
        memo = source_alloc(source, strlen(line) + 1);
        memcpy(memo, line, strlen(line) + 1);
        cache_set_memo(source, CACHE_FILES, source->path, memo);
    }
    text.text = memo;
    text.bytes = strlen(text.text);
    return text;
}

const char *source_field(struct source *source, const char *text, const char *name)
{
    size_t n = strlen(name);
    char line[LINE_BYTES];

    while (strncmp(text, name, n) != 0 || text[n] != ':') {
        text = strchr(text, '\n');
        if (!text)
            return "";
        text++;
    }
    cut_line(text + n + 1, line, sizeof(line));
    return source_printf(source, "%s", line);
}

/* A counter (`is_signed` is false) uses all 64 bits and is never negative. */
static enum source_state parse_number(const char *line, bool is_signed, uint64_t *ret_value)
{
    const char *digits = line + (is_signed && (line[0] == '-' || line[0] == '+'));
    bool is_hex = digits[0] == '0' && (digits[1] == 'x' || digits[1] == 'X');
    uint64_t value;
    char *end;

    if (!isxdigit((unsigned char)digits[is_hex ? 2 : 0]))
        return SOURCE_FAILED;
    errno = 0;
    value = is_signed ? (uint64_t)strtoll(line, &end, is_hex ? 16 : 10) : strtoull(line, &end, is_hex ? 16 : 10);
    if (end == line || *end || errno)
        return SOURCE_FAILED;
    *ret_value = value;
    return SOURCE_OK;
}

enum source_state path_number(struct source *source, int64_t *ret_value)
{
    struct source_text text = path_line(source);
    uint64_t value;

    if (text.state == SOURCE_OK)
        text.state = parse_number(text.text, true, &value);
    if (text.state == SOURCE_OK)
        *ret_value = (int64_t)value;
    return text.state;
}

enum source_state path_counter(struct source *source, uint64_t *ret_value)
{
    bool is_live = source->fd >= 0 && !source->path_why && !json_object_get(source->overlay_files, source->path);
    json_t *now = is_live ? cache_file(source, source->path) : NULL;
    struct source_text text = now ? cache_text(now) : path_read(source);
    char line[64];

    if (text.state == SOURCE_OK) {
        cut_line(text.text, line, sizeof(line));
        text.state = parse_number(line, false, ret_value);
    }
    json_decref(now);
    return text.state;
}

/* --- folders --- */

/* Runs of digits by value, everything else by byte; equal values by their leading zeros, so the order is total. */
static int compare_names(const void *left, const void *right)
{
    const char *a = *(const char *const *)left, *b = *(const char *const *)right;
    const char *whole_a = a, *whole_b = b;

    while (*a && *b) {
        if (isdigit((unsigned char)*a) && isdigit((unsigned char)*b)) {
            size_t n_a, n_b;
            int order;

            a += strspn(a, "0");
            b += strspn(b, "0");
            n_a = strspn(a, "0123456789");
            n_b = strspn(b, "0123456789");
            if (n_a != n_b)
                return n_a < n_b ? -1 : 1;
            order = memcmp(a, b, n_a);
            if (order)
                return order;
            a += n_a;
            b += n_b;
        } else if (*a != *b) {
            return (unsigned char)*a < (unsigned char)*b ? -1 : 1;
        } else {
            a++;
            b++;
        }
    }
    if (*a || *b)
        return *a ? 1 : -1;
    return strcmp(whole_a, whole_b);
}

static json_t *list_fd(int fd)
{
    json_t *names = json_array();
    DIR *dir = fdopendir(fd);
    struct dirent *one;
    int failed = 0;

    if (!dir)
        close(fd);
    errno = 0;
    while (dir && names && !failed && (one = readdir(dir))) {
        if (strcmp(one->d_name, ".") == 0 || strcmp(one->d_name, "..") == 0)
            continue;
        if (json_array_size(names) == SOURCE_NAMES_MAX)
            failed = E2BIG;
        else
            json_array_append_new(names, json_stringn_nocheck(one->d_name, strlen(one->d_name)));
        errno = 0;
    }
    if (!failed)
        failed = errno;
    if (dir)
        closedir(dir);
    if (!failed)
        return names;
    json_decref(names);
    return failed == E2BIG ? cache_failure(SOURCE_FAILED, "more than 16384 entries") : cache_failure_errno(failed);
}

static json_t *make_folder(struct source *source, const char *path)
{
    json_t *entry;
    int fd;

    source_set_current_path(source, path);
    fd = live_open(source, path, O_RDONLY | O_DIRECTORY | O_NONBLOCK);
    /* A file instead of a folder exists, unlike a path that goes through a file. */
    if (fd < 0 && errno == ENOTDIR) {
        fd = live_open(source, path, O_PATH);
        entry = fd >= 0 ? cache_failure(SOURCE_FAILED, "is not a folder") : cache_failure_errno(ENOTDIR);
        dir_close(fd);
    } else {
        entry = fd < 0 ? cache_failure_errno(errno) : list_fd(fd);
    }
    live_done(source);
    return entry;
}

/* The names of an entry as an array of pointers, computed once. */
static struct source_names *names_of(struct source *source, const json_t *entry)
{
    struct source_names *names = cache_memo(source, CACHE_FOLDERS, source->path);
    size_t n = json_array_size(entry);
    const char **all;

    if (names)
        return names;
    names = source_alloc(source, sizeof(*names));
    all = source_alloc(source, (n + 1) * sizeof(*all));
    for (size_t i = 0; i < n; i++)
        all[i] = json_string_value(json_array_get(entry, i));
    qsort(all, n, sizeof(*all), compare_names);
    names->n = n;
    names->names = all;
    names->why = "";
    cache_set_memo(source, CACHE_FOLDERS, source->path, names);
    return names;
}

struct source_names path_list(struct source *source)
{
    const json_t *entry = cache_query(source, CACHE_FOLDERS, make_folder);
    struct source_names names = {.n = 0};

    names.state = cache_state(entry, &names.why);
    return names.state == SOURCE_OK ? *names_of(source, entry) : names;
}

/* --- links --- */

static json_t *make_link(struct source *source, const char *path)
{
    char real[PATH_MAX], own[PATH_MAX];
    json_t *entry;

    source_set_current_path(source, path);
    if (live_resolve(source, live_own_path(source, path, own), real) < 0) {
        entry = cache_failure_errno(errno);
    } else {
        live_self_path(source, real);
        entry = json_stringn_nocheck(real, strlen(real));
    }
    live_done(source);
    return entry;
}

struct source_text path_resolve(struct source *source)
{
    return cache_text(cache_query(source, CACHE_LINKS, make_link));
}

/* --- what is there --- */

static const char *const kind_names[] = {
    [SOURCE_FILE] = "file", [SOURCE_FOLDER] = "folder", [SOURCE_CHAR_DEVICE] = "char", [SOURCE_OTHER] = "other"};

static bool may(int fd, int mode)
{
    char link[64];

    if (syscall(SYS_faccessat2, fd, "", mode, AT_EMPTY_PATH | AT_EACCESS) == 0)
        return true;
    if (errno != ENOSYS && errno != EPERM)
        return false;
    /* Before Linux 5.8, or under a filter that does not know the call. */
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    return access(link, mode) == 0;
}

static json_t *make_stat(struct source *source, const char *path)
{
    struct stat info;
    enum source_kind kind;
    char access[4];
    json_t *entry;
    int fd;

    source_set_current_path(source, path);
    fd = live_open(source, path, O_PATH);
    if (fd < 0 || fstat(fd, &info) < 0) {
        entry = cache_failure_errno(errno);
    } else {
        kind = S_ISREG(info.st_mode)   ? SOURCE_FILE
               : S_ISDIR(info.st_mode) ? SOURCE_FOLDER
               : S_ISCHR(info.st_mode) ? SOURCE_CHAR_DEVICE
                                       : SOURCE_OTHER;
        access[0] = may(fd, R_OK) ? 'r' : '-';
        access[1] = may(fd, W_OK) ? 'w' : '-';
        access[2] = may(fd, X_OK) ? 'x' : '-';
        access[3] = '\0';
        entry = json_pack("{s:s, s:I, s:s}", "kind", kind_names[kind], "bytes",
                          (json_int_t)(kind == SOURCE_FILE          ? info.st_size
                                       : kind == SOURCE_CHAR_DEVICE ? (off_t)major(info.st_rdev)
                                                                    : 0),
                          "access", access);
    }
    dir_close(fd);
    live_done(source);
    return entry;
}

struct source_stat path_stat(struct source *source)
{
    const json_t *entry = cache_query(source, CACHE_STATS, make_stat);
    const char *kind = json_string_value(json_object_get(entry, "kind"));
    const char *access = json_string_value(json_object_get(entry, "access"));
    struct source_stat stat = {.kind = SOURCE_OTHER};

    stat.state = cache_state(entry, &stat.why);
    if (stat.state != SOURCE_OK)
        return stat;
    for (int i = SOURCE_FILE; i <= SOURCE_OTHER; i++)
        if (strcmp(kind, kind_names[i]) == 0)
            stat.kind = (enum source_kind)i;
    stat.bytes = json_integer_value(json_object_get(entry, "bytes"));
    stat.may_read = strchr(access, 'r');
    stat.may_write = strchr(access, 'w');
    stat.may_execute = strchr(access, 'x');
    return stat;
}
