/* SPDX-License-Identifier: Apache-2.0 */
#include "folder.h"

#include "common/dir.h"
#include "common/json.h"
#include "common/memory.h"
#include "common/redact.h"
#include "common/shell.h"
#include "common/text.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define LOGS "testbed-logs"
#define SCHEMA_VERSION 1 /* of run.json */
#define MAX_JSON (64 << 20)
#define MAX_FILES 65536
#define UNEVEN 0.6 /* of the mean of the others */

static const char *const endings[] = {".log", ".txt", ".out"};

static void add_file(struct folder *folder, int dir, const char *in, const char *name, const char *ending)
{
    struct folder_file *file;
    size_t skip = text_begins(name, "worker-") ? 7 : 0;

    folder->files = memory_grow(folder->files, (folder->n_files + 1) * sizeof(*file));
    file = &folder->files[folder->n_files++];
    *file = (struct folder_file){.dir = dir, .path = memory_printf("%s/%s", in, name)};
    snprintf(file->host, sizeof(file->host), "%.*s", (int)(strlen(name) - skip - strlen(ending)), name + skip);
}

/* A missing folder counts as empty. */
static void scan(struct folder *folder, int dir, const char *in)
{
    DIR *list = dir_list(dir, ".");
    struct dirent *entry;
    struct stat info;

    while (folder->n_files < MAX_FILES && (entry = dir_next(&list))) {
        for (size_t i = 0; i < COUNT(endings) && *entry->d_name != '.'; i++)
            if (text_ends(entry->d_name, endings[i]) && fstatat(dir, entry->d_name, &info, AT_SYMLINK_NOFOLLOW) == 0 &&
                S_ISREG(info.st_mode))
                add_file(folder, dir, in, entry->d_name, endings[i]);
    }
    if (list)
        closedir(list);
}

static int compare_files(const void *a, const void *b)
{
    const struct folder_file *x = a, *y = b;
    bool x_first = strcmp(x->host, "coordinator") == 0, y_first = strcmp(y->host, "coordinator") == 0;

    if (x_first != y_first)
        return y_first - x_first;
    return strverscmp(x->path, y->path);
}

json_t *runfolder_load_json(int dir, const char *name, char *ret_error, size_t bytes)
{
    int fd = dir_read_in(dir, name);
    struct stat info;
    json_error_t error;
    json_t *value = NULL;
    FILE *file = fd < 0 ? NULL : fdopen(fd, "r"); /* json_loadfd() reads single bytes */

    if (!file || fstat(fd, &info) != 0) {
        snprintf(ret_error, bytes, "%s", errno == EINVAL ? "it is not a file" : write_reason(errno));
    } else if (info.st_size > MAX_JSON) {
        snprintf(ret_error, bytes, "it is not a file of at most 64 MiB");
    } else {
        value = json_loadf(file, 0, &error);
        if (!value)
            snprintf(ret_error, bytes, "line %d: %s", error.line, error.text);
    }
    if (file)
        fclose(file);
    else
        dir_close(fd);
    return value;
}

/* A file without a version may have been written by hand; keys of another version may have another meaning. */
static void check_run(struct folder *folder)
{
    const json_t *version = json_object_get(folder->run, "schema_version");

    if (!json_is_object(folder->run))
        snprintf(folder->run_error, sizeof(folder->run_error), "it is not an object");
    else if (version && json_integer_value(version) != SCHEMA_VERSION)
        snprintf(folder->run_error, sizeof(folder->run_error), "its schema_version is not %d, which this epkit reads",
                 SCHEMA_VERSION);
    else
        return;
    json_decref(folder->run);
    folder->run = NULL;
}

/* Is it a command of this program with words as shell_quote() writes them? Then a shell runs nothing else of it. */
static bool is_command(const char *text, const char *program)
{
    const char *shown, *end;
    size_t n, bytes, left = strlen(text);

    for (const char *at = text; *at; at += n, left -= n) {
        n = text_printable(at, left, &shown, &bytes);
        if (n == 0 || shown != at || *at == '\n' || *at == '\t')
            return false;
    }
    n = strlen(program);
    if (strncmp(text, program, n) != 0 || text[n] != ' ')
        return false;
    for (; *text; text += n) {
        n = strspn(text, SHELL_PLAIN " ");
        if (n == 0 && *text == '\'' && (end = strchr(text + 1, '\'')))
            n = (size_t)(end + 1 - text);
        else if (n == 0)
            n = text_begins(text, REDACTED) ? strlen(REDACTED) : text_begins(text, "\\'") ? 2 : 0;
        if (n == 0)
            return false;
    }
    return true;
}

/* People paste it: what is not written as epkit writes its own is somebody else's. */
static void check_command(json_t *object)
{
    const char *command = json_text(object, "command");

    if (*command && !is_command(command, "epkit"))
        json_object_set_new(object, "command", json_string(REDACTED));
}

static void read_run(struct folder *folder)
{
    struct stat info;

    if (fstatat(folder->dirs[0], "run.json", &info, AT_SYMLINK_NOFOLLOW) != 0)
        return;
    folder->run = runfolder_load_json(folder->dirs[0], "run.json", folder->run_error, sizeof(folder->run_error));
    if (folder->run)
        check_run(folder);
    check_command(folder->run);
    check_command(json_object_get(folder->run, "results"));
}

/* Opens the folders that are there. */
static bool open_dirs(struct folder *folder, char *ret_error, size_t bytes)
{
    int dir = dir_open(folder->path, false), logs;

    folder->dirs[2] = dir;
    if (dir < 0) {
        snprintf(ret_error, bytes, "%s", errno == ENOTDIR ? "it is not a folder" : write_reason(errno));
        return false;
    }
    logs = dir_open_in(dir, LOGS, false);
    if (logs < 0 && errno != ENOENT) {
        snprintf(ret_error, bytes, LOGS " in it is a link, or cannot be opened: %s", strerror(errno));
        return false;
    }
    folder->dirs[0] = logs < 0 ? dir : logs;
    folder->dirs[2] = logs < 0 ? -1 : dir;
    folder->dirs[1] = dir_open_in(folder->dirs[0], "pod-logs", false);
    return true;
}

bool runfolder_open(const char *path, struct folder **ret_folder, char *ret_error, size_t bytes)
{
    struct folder *folder = memory_new(1, sizeof(*folder));
    char *pods;

    *folder = (struct folder){.dirs = {-1, -1, -1}, .path = memory_printf("%s", path)};
    if (!open_dirs(folder, ret_error, bytes)) {
        runfolder_free(folder);
        return false;
    }
    folder->base = memory_printf("%s%s", path, folder->dirs[2] >= 0 ? "/" LOGS : "");
    pods = memory_printf("%s/pod-logs", folder->base);
    scan(folder, folder->dirs[0], folder->base);
    scan(folder, folder->dirs[1], pods);
    scan(folder, folder->dirs[2], path);
    free(pods);
    if (folder->n_files > 0)
        qsort(folder->files, folder->n_files, sizeof(*folder->files), compare_files);
    read_run(folder);
    *ret_folder = folder;
    return true;
}

void runfolder_free(struct folder *folder)
{
    if (!folder)
        return;
    for (size_t i = 0; i < folder->n_files; i++)
        free(folder->files[i].path);
    for (size_t i = 0; i < COUNT(folder->dirs); i++)
        dir_close(folder->dirs[i]);
    free(folder->files);
    free(folder->path);
    free(folder->base);
    json_decref(folder->run);
    free(folder);
}

static double nic_bytes(const json_t *nic)
{
    return json_number(nic, "tx_bytes") + json_number(nic, "rx_bytes");
}

json_t *runfolder_balance(const char *host, const json_t *nics, int *ret_uneven)
{
    json_t *list = json_array();
    double sum = 0;
    size_t n = json_array_size(nics);
    int n_uneven = 0;

    FOR_JSON (nic, nics)
        sum += nic_bytes(nic);
    FOR_JSON (nic, nics) {
        double others = n > 1 ? (sum - nic_bytes(nic)) / (double)(n - 1) : 0;
        double share = others > 0 ? nic_bytes(nic) / others : sum > 0 ? 1 : 0;
        bool uneven = sum > 0 && share < UNEVEN;

        n_uneven += uneven;
        json_array_append_new(list, json_pack("{s:s, s:f, s:f, s:f, s:b}", "device", json_text(nic, "device"),
                                              "tx_bytes", json_number(nic, "tx_bytes"), "rx_bytes",
                                              json_number(nic, "rx_bytes"), "share", share, "uneven", uneven));
    }
    *ret_uneven += n_uneven;
    return json_pack("{s:s, s:f, s:i, s:o}", "host", host, "bytes", sum, "uneven", n_uneven, "nics", list);
}
