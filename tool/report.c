/* SPDX-License-Identifier: Apache-2.0 */
#include "report.h"

#include "output.h"
#include "stream.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define PATH_BYTES 4096
#define NAME_BYTES 64 /* of a file of the report, with what makes it a temporary one */

/* The folder that the report's folder is, or would be, made in; for free(). */
static char *parent_of(const char *folder)
{
    size_t n = strlen(folder);

    while (n > 1 && folder[n - 1] == '/')
        n--;
    while (n > 0 && folder[n - 1] != '/')
        n--;
    while (n > 1 && folder[n - 1] == '/')
        n--;
    return n ? strndup(folder, n) : strdup(".");
}

static bool refuse(const char *folder, const char *why)
{
    out_error("the folder of the report, %s: %s", folder, why);
    out_hint("choose another with --output");
    return false;
}

/* Nothing is made yet: whatever ends this process before the report is written leaves nothing behind. */
bool report_check(const char *folder)
{
    struct stat info;
    char *parent;
    bool good;

    if (!*folder)
        return refuse("''", "the name is empty");
    if (strlen(folder) + NAME_BYTES >= PATH_BYTES)
        return refuse(folder, strerror(ENAMETOOLONG));
    if (stat(folder, &info) == 0) {
        if (!S_ISDIR(info.st_mode))
            return refuse(folder, "it is not a folder");
        return access(folder, W_OK | X_OK) == 0 || refuse(folder, strerror(errno));
    }
    if (errno != ENOENT || lstat(folder, &info) == 0)
        return refuse(folder, strerror(errno));
    parent = parent_of(folder);
    if (!parent)
        return refuse(folder, strerror(ENOMEM));
    good = access(parent, W_OK | X_OK) == 0 && stat(parent, &info) == 0;
    /* The working folder may have been removed. */
    if (good && info.st_nlink == 0) {
        errno = ENOENT;
        good = false;
    }
    free(parent);
    return good || refuse(folder, strerror(errno));
}

/* What is written must not be left halfway: signals wait for it, which takes milliseconds. */
static void hold_signals(sigset_t *ret_before)
{
    sigset_t all;

    sigfillset(&all);
    sigprocmask(SIG_BLOCK, &all, ret_before);
}

typedef void (*write_fn)(FILE *stream, const json_t *document);

static void write_json(FILE *stream, const json_t *document)
{
    stream_json(stream, document, JSON_INDENT(2) | JSON_REAL_PRECISION(9));
}

/* A file of the report: all of its text first, because plots take time, then under another name, then its own. */
struct file {
    const char *name;
    write_fn write;
    char *text;
    size_t bytes;
    char path[PATH_BYTES + NAME_BYTES], temporary[PATH_BYTES + NAME_BYTES];
    bool there; /* the temporary one */
};

static bool render(const json_t *document, struct file *file)
{
    FILE *stream = open_memstream(&file->text, &file->bytes);
    bool good;

    if (!stream)
        return false;
    file->write(stream, document);
    good = !ferror(stream);
    return fclose(stream) == 0 && good;
}

static bool write_all(int fd, const char *text, size_t bytes)
{
    while (bytes > 0) {
        ssize_t n = write(fd, text, bytes);

        if (n < 0 && errno != EINTR)
            return false;
        text += n > 0 ? n : 0;
        bytes -= n > 0 ? (size_t)n : 0;
    }
    return true;
}

/* As umask says, but never for others to write, and always for the owner to read and write. */
static mode_t file_mode(void)
{
    mode_t mask = umask(0);

    umask(mask);
    return (0644 & ~mask) | 0600;
}

/* Puts the text under the temporary name, on the disk. */
static bool put(struct file *file)
{
    int fd = mkostemp(file->temporary, O_CLOEXEC);
    bool good;
    int reason;

    if (fd < 0)
        return false;
    file->there = true;
    good = write_all(fd, file->text, file->bytes) && fchmod(fd, file_mode()) == 0 && fsync(fd) == 0;
    reason = errno;
    if (close(fd) != 0 && good)
        return false;
    errno = reason;
    return good;
}

static bool put_all(struct file *files, size_t n, size_t *ret_at)
{
    for (*ret_at = 0; *ret_at < n; ++*ret_at)
        if (!put(&files[*ret_at]))
            return false;
    for (*ret_at = 0; *ret_at < n; ++*ret_at) {
        if (rename(files[*ret_at].temporary, files[*ret_at].path) != 0)
            return false;
        files[*ret_at].there = false;
    }
    return true;
}

/* Where the files go: the folder if it is there, else one beside it that is renamed when it is complete. */
static bool choose_place(const char *folder, char ret_place[PATH_BYTES], bool *ret_is_new)
{
    size_t n = strlen(folder);
    struct stat info;

    *ret_is_new = stat(folder, &info) != 0;
    if (!*ret_is_new) {
        snprintf(ret_place, PATH_BYTES, "%s", folder);
        return true;
    }
    while (n > 1 && folder[n - 1] == '/')
        n--;
    snprintf(ret_place, PATH_BYTES, "%.*s.XXXXXX", (int)n, folder);
    return mkdtemp(ret_place) && chmod(ret_place, (file_mode() & 0444) >> 2 | file_mode() | 0700) == 0;
}

static bool write_files(const char *folder, struct file *files, size_t n)
{
    char place[PATH_BYTES];
    bool is_new = false, good;
    size_t at = n;
    int reason;

    good = choose_place(folder, place, &is_new);
    for (size_t i = 0; good && i < n; i++) {
        snprintf(files[i].path, sizeof(files[i].path), "%s/%s", place, files[i].name);
        snprintf(files[i].temporary, sizeof(files[i].temporary), "%s/.%s.XXXXXX", place, files[i].name);
    }
    good = good && put_all(files, n, &at);
    good = good && (!is_new || rename(place, folder) == 0);
    reason = errno;
    if (!good && at < n)
        out_error("writing %s/%s: %s", folder, files[at].name, out_reason(reason));
    else if (!good)
        out_error("making %s: %s", folder, out_reason(reason));
    for (size_t i = 0; i < n; i++) {
        if (files[i].there)
            unlink(files[i].temporary);
        else if (!good && is_new && *files[i].path)
            unlink(files[i].path);
    }
    if (!good && is_new)
        rmdir(place);
    return good;
}

bool report_write(const char *folder, const json_t *document)
{
    struct file files[] = {{.name = "report.json", .write = write_json}, {.name = "report.html", .write = report_html}};
    const size_t n = sizeof(files) / sizeof(files[0]);
    sigset_t before;
    bool good = true;

    for (size_t i = 0; good && i < n; i++) {
        good = render(document, &files[i]);
        if (!good)
            out_error("making %s of %s: %s", files[i].name, folder, strerror(errno));
    }
    if (good) {
        hold_signals(&before);
        good = write_files(folder, files, n);
        sigprocmask(SIG_SETMASK, &before, NULL);
    }
    for (size_t i = 0; i < n; i++)
        free(files[i].text);
    return good;
}
