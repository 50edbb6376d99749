/* SPDX-License-Identifier: Apache-2.0 */
#include "report.h"

#include "output.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define JSON_FILE "report.json"
#define HTML_FILE "report.html"

bool report_prepare(const char *folder, bool *ret_created)
{
    struct stat info;

    *ret_created = mkdir(folder, 0777) == 0;
    if (!*ret_created && errno != EEXIST) {
        out_error("creating the folder %s: %s", folder, strerror(errno));
        return false;
    }
    if (stat(folder, &info) != 0 || !S_ISDIR(info.st_mode)) {
        out_error("%s is not a folder", folder);
        return false;
    }
    if (access(folder, W_OK | X_OK) != 0) {
        out_error("the folder %s: %s", folder, strerror(errno));
        return false;
    }
    return true;
}

typedef void (*write_fn)(FILE *stream, const json_t *document);

static void write_json(FILE *stream, const json_t *document)
{
    json_dumpf(document, stream, JSON_INDENT(2) | JSON_REAL_PRECISION(9));
    fputc('\n', stream);
}

/* Writes a file under another name, and gives it its own when all of it is on the disk. */
static bool write_file(const char *folder, const char *name, write_fn write, const json_t *document)
{
    char path[4096], temporary[4096];
    FILE *stream = NULL;
    mode_t mask = umask(0);
    bool good = false;
    int fd = -1;

    umask(mask);
    if (snprintf(path, sizeof(path), "%s/%s", folder, name) >= (int)sizeof(path) ||
        snprintf(temporary, sizeof(temporary), "%s/.%s.XXXXXX", folder, name) >= (int)sizeof(temporary)) {
        out_error("the folder's name is too long: %s", folder);
        return false;
    }
    fd = mkostemp(temporary, O_CLOEXEC);
    if (fd >= 0)
        stream = fdopen(fd, "w");
    if (stream) {
        write(stream, document);
        good = fchmod(fd, 0666 & ~mask) == 0 && fflush(stream) == 0 && !ferror(stream) && fsync(fd) == 0;
        good = fclose(stream) == 0 && good && rename(temporary, path) == 0;
    } else if (fd >= 0) {
        close(fd);
    }
    if (!good) {
        out_error("writing %s: %s", path, strerror(errno));
        if (fd >= 0)
            unlink(temporary);
    }
    return good;
}

bool report_write(const char *folder, const json_t *document)
{
    return write_file(folder, JSON_FILE, write_json, document) && write_file(folder, HTML_FILE, report_html, document);
}
