/* SPDX-License-Identifier: Apache-2.0 */
#include "tool_report.h"

#include "common/output.h"
#include "common/terminal.h"

#include "common/temporary.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define PATH_BYTES 4096
#define NAME_BYTES 64 /* of a file of the report, with the suffix of a temporary one */

/* The parent of the report's folder; for free(). */
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

/* Creates nothing yet: a process that ends before the report is written leaves nothing behind. */
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

typedef void (*write_fn)(FILE *stream, const json_t *document);

static void write_json(FILE *stream, const json_t *document)
{
    stream_json(stream, document, JSON_INDENT(2) | JSON_REAL_PRECISION(9));
}

/* Writes a file of the report: the complete text first, because plots take time, then a temporary file. */
struct file {
    const char *name;
    write_fn write;
    char *text;
    size_t bytes;
    char path[PATH_BYTES + NAME_BYTES];
    struct temporary temporary;
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

/* Writes the text to the disk. */
static int sync_file(const struct temporary *temporary, const struct file *file)
{
    int number = temporary_write(temporary, file->text, file->bytes);

    if (number == 0 && (fchmod(temporary->fd, temporary_usual_mode()) != 0 || fsync(temporary->fd) != 0))
        number = errno;
    return number;
}

/* Into an existing folder: writes all files under temporary names, then renames them. */
static int replace_files(struct file *files, size_t n, size_t *ret_at)
{
    int number = 0;

    for (*ret_at = 0; *ret_at < n && number == 0; *ret_at += number == 0) {
        number = temporary_file(files[*ret_at].path, &files[*ret_at].temporary);
        if (number == 0)
            number = sync_file(&files[*ret_at].temporary, &files[*ret_at]);
    }
    if (number == 0)
        for (*ret_at = 0; *ret_at < n && number == 0; *ret_at += number == 0)
            number = temporary_rename(&files[*ret_at].temporary, files[*ret_at].path);
    for (size_t i = 0; i < n; i++)
        temporary_remove(&files[i].temporary);
    return number;
}

/* Creates the folder under a temporary name with all files in it, then renames it. */
static int make_folder(const char *folder, const struct file *files, size_t n, size_t *ret_at)
{
    struct temporary place, file;
    char path[PATH_BYTES + NAME_BYTES];
    int number = temporary_folder(folder, &place);

    *ret_at = number ? n : 0;
    for (; *ret_at < n && number == 0; *ret_at += number == 0) {
        if (snprintf(path, sizeof(path), "%s/%s", place.path, files[*ret_at].name) >= (int)sizeof(path))
            number = ENAMETOOLONG;
        file = (struct temporary){.fd = number ? -1 : open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600)};
        if (number == 0 && file.fd < 0)
            number = errno;
        if (number == 0)
            number = sync_file(&file, &files[*ret_at]);
        if (file.fd >= 0 && close(file.fd) != 0 && number == 0)
            number = errno;
    }
    if (number == 0 && chmod(place.path, (temporary_usual_mode() & 0444) >> 2 | temporary_usual_mode() | 0700) != 0)
        number = errno;
    if (number == 0)
        number = temporary_rename(&place, folder);
    temporary_remove(&place);
    return number;
}

static bool write_files(const char *folder, struct file *files, size_t n)
{
    struct stat info;
    size_t at = n;
    int number;

    for (size_t i = 0; i < n; i++) {
        snprintf(files[i].path, sizeof(files[i].path), "%s/%s", folder, files[i].name);
        files[i].temporary.fd = -1;
    }
    number = stat(folder, &info) == 0 ? replace_files(files, n, &at) : make_folder(folder, files, n, &at);
    if (number && at < n)
        out_error("writing %s/%s: %s", folder, files[at].name, out_reason(number));
    else if (number)
        out_error("making %s: %s", folder, out_reason(number));
    return number == 0;
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
        temporary_hold_signals(&before);
        good = write_files(folder, files, n);
        temporary_release_signals(&before);
    }
    for (size_t i = 0; i < n; i++)
        free(files[i].text);
    return good;
}
