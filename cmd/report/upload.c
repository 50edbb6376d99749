/* SPDX-License-Identifier: Apache-2.0 */
/* upload.c - copies the files of a run to a destination; reads each back and compares it. */
#include "report.h"

#include "common/capture.h"
#include "common/dir.h"
#include "common/file.h"
#include "common/progress.h"
#include "common/temporary.h"
#include "common/text.h"
#include "common/write.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define BLOCK (256 << 10)
#define CLIENT_MS 1800000

/* --- files --- */

/* Of two files from their beginning; EILSEQ: they differ. */
static int compare_files(int a, int b)
{
    char *blocks = malloc(2 * BLOCK);
    int result = blocks ? 0 : ENOMEM;
    off_t at = 0;
    ssize_t n = 1, m;

    while (result == 0 && n > 0) {
        n = pread(a, blocks, BLOCK, at);
        m = n < 0 ? -1 : 0;
        for (ssize_t got = 1; m >= 0 && m < n && got > 0; m += got > 0 ? got : 0)
            got = pread(b, blocks + BLOCK + m, (size_t)(n - m), at + m);
        if (n < 0)
            result = errno;
        else if (n != m || memcmp(blocks, blocks + BLOCK, (size_t)n) != 0 || (n == 0 && pread(b, blocks, 1, at) != 0))
            result = EILSEQ;
        at += n;
    }
    free(blocks);
    return result;
}

static int copy_bytes(int from, const struct temporary *to)
{
    char *block = malloc(BLOCK);
    int error = block ? 0 : ENOMEM;
    ssize_t n;

    while (!error && (n = read(from, block, BLOCK)) != 0) {
        if (n < 0 && errno != EINTR)
            error = errno;
        if (n > 0)
            error = temporary_write(to, block, (size_t)n);
        /* A file may be large and the destination slow: a signal aborts the copy. */
        if (!error && temporary_is_interrupted())
            error = EINTR;
    }
    free(block);
    return error;
}

/* Copies to a temporary name first: a reader of the destination never sees a partial file. */
static int copy_file(int from, int folder, const char *name)
{
    struct temporary to;
    sigset_t before;
    int error;

    temporary_hold_signals(&before);
    error = temporary_file(folder, name, &to);
    if (!error)
        error = copy_bytes(from, &to);
    /* Mounted buckets do not support modes, and some not fsync(). */
    if (!error)
        (void)!fchmod(to.fd, dir_usual_mode());
    if (!error && fsync(to.fd) != 0 && errno != EINVAL && errno != ENOSYS)
        error = errno;
    if (!error)
        error = temporary_rename(&to, name);
    temporary_remove(&to);
    temporary_release_signals(&before);
    return error;
}

static int open_to_compare(int folder, const char *name)
{
    return openat(folder, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
}

/* --- the client of gs:// --- */

/* Runs "gcloud storage cp" or "gsutil cp". false after reporting the error. */
static bool client_copy(const char *from, const char *to)
{
    static char gcloud[] = "gcloud", storage[] = "storage", gsutil[] = "gsutil", cp[] = "cp";
    char *from_copy = strdup(from), *to_copy = strdup(to);
    char *with_gcloud[] = {gcloud, storage, cp, from_copy, to_copy, NULL};
    char *with_gsutil[] = {gsutil, cp, from_copy, to_copy, NULL};
    struct capture capture = {.argv = file_in_path(gcloud) ? with_gcloud : with_gsutil};
    bool good = false;

    if (from_copy && to_copy && capture_run(&capture, 1, 1, CLIENT_MS, NULL, NULL) == 0) {
        good = !capture.start_error && !capture.late && WIFEXITED(capture.status) && WEXITSTATUS(capture.status) == 0;
        if (!good)
            out_error("report: --upload %s: %s %s", to, capture.argv[0],
                      capture.start_error       ? strerror(capture.start_error)
                      : capture.late            ? "did not end within 30 minutes"
                      : capture.error.bytes > 0 ? capture.error.text
                                                : "failed");
        capture_done(&capture);
    }
    free(from_copy);
    free(to_copy);
    return good;
}

/*
 * A name in the folder for the file that was opened, whatever its own name leads to by now. The client takes the type
 * of the data from the extension, and '*' or '[' in a name for a pattern. 0, or an errno.
 */
static int name_opened(const struct temporary *folder, int from, const char *dest, char **ret_path)
{
    const char *extension = strrchr(text_base(dest), '.');
    char target[64];

    snprintf(target, sizeof(target), "/proc/%d/fd/%d", (int)getpid(), from);
    if (asprintf(ret_path, "%s/sent%s", folder->path, extension ? extension : "") < 0) {
        *ret_path = NULL;
        return ENOMEM;
    }
    return dir_link_in(folder->fd, target, text_base(*ret_path));
}

/* A signal may end epkit while the client writes: the next upload removes the remains. */
static int upload_gs(int from, const char *dest)
{
    const char *parent = getenv("TMPDIR");
    struct temporary folder;
    char *back = NULL, *sent = NULL;
    int error = temporary_folder_in(parent && *parent ? parent : "/tmp", "epkit-upload", &folder), result = CMD_FAILED;

    if (!error && asprintf(&back, "%s/back", folder.path) < 0) {
        back = NULL;
        error = ENOMEM;
    }
    if (!error)
        error = name_opened(&folder, from, dest, &sent);
    if (error) {
        out_error("report: --upload: a temporary folder in %s to verify with: %s", parent && *parent ? parent : "/tmp",
                  write_reason(error));
    } else if (client_copy(sent, dest) && client_copy(dest, back)) {
        int to = open_to_compare(folder.fd, "back");

        error = to < 0 ? errno : compare_files(from, to);
        if (to >= 0)
            close(to);
        result = error == 0 ? CMD_FINE : CMD_FAILED;
        if (error)
            out_error("report: --upload %s: %s", dest,
                      error == EILSEQ ? "the uploaded data differs from the data sent" : strerror(error));
    }
    free(back);
    free(sent);
    temporary_remove(&folder);
    return result;
}

static int upload_local(int from, const char *dest)
{
    const char *name;
    int folder = dir_open_parent(dest, true, &name), error = folder < 0 ? errno : copy_file(from, folder, name), to;

    if (!error) {
        to = open_to_compare(folder, name);
        error = to < 0 ? errno : compare_files(from, to);
        if (to >= 0)
            close(to);
    }
    if (folder >= 0)
        close(folder);
    if (!error)
        return CMD_FINE;
    out_error("report: --upload %s: %s", dest,
              error == EILSEQ ? "the data read back differs from the data written" : write_reason(error));
    return CMD_FAILED;
}

/* The name of a file relative to the folder with run.json. */
static const char *name_below(const struct folder *folder, const char *path)
{
    size_t n = strlen(folder->base);

    if (strncmp(path, folder->base, n) == 0 && path[n] == '/')
        return path + n + 1;
    return strrchr(path, '/') ? strrchr(path, '/') + 1 : path;
}

/* The file `name` of `dir`, or `path` itself. */
static int upload_one(int dir, const char *path, const char *dest, const char *below, const char *name, int *ret_n)
{
    int from = openat(dir, dir == AT_FDCWD ? path : text_base(path), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    bool is_gs = strncmp(dest, "gs://", 5) == 0;
    char *target = NULL;
    int result = CMD_FAILED;
    struct stat info;

    if (from < 0 || fstat(from, &info) != 0 || !S_ISREG(info.st_mode)) {
        out_error("report: --upload: %s: %s", path, from < 0 ? strerror(errno) : "it is not a file");
    } else if (is_gs && strpbrk(name, "*?[]{}")) {
        out_error("report: --upload: %s: its name is a pattern for the client of gs://", path);
    } else if (asprintf(&target, "%s/%s%s", dest, below, name) > 0) {
        progress_update((uint64_t)*ret_n, 0, "uploading %s", name);
        result = is_gs ? upload_gs(from, target) : upload_local(from, target);
    }
    *ret_n += result == CMD_FINE;
    free(target);
    if (from >= 0)
        close(from);
    return result;
}

int report_upload(const struct folder *folder, const char *output, const char *dest, int *ret_n)
{
    static const char *const reports[] = {"report.html", "report.json"};
    int result = CMD_FINE;
    char *path = NULL;

    *ret_n = 0;
    if (strncmp(dest, "gs://", 5) == 0 && !file_in_path("gcloud") && !file_in_path("gsutil")) {
        out_error("report: --upload %s: neither gcloud nor gsutil is installed here", dest);
        out_hint("mount the bucket (gcsfuse) and name the folder, or install the Google Cloud CLI");
        return CMD_UNSUPPORTED;
    }
    for (size_t i = 0; i < folder->n_files && result == CMD_FINE; i++)
        result = upload_one(folder->files[i].dir, folder->files[i].path, dest, "testbed-logs/",
                            name_below(folder, folder->files[i].path), ret_n);
    if (result == CMD_FINE && folder->run && asprintf(&path, "%s/run.json", folder->base) > 0)
        result = upload_one(folder->dirs[0], path, dest, "testbed-logs/", "run.json", ret_n);
    free(path);
    for (size_t i = 0; i < 2 && result == CMD_FINE; i++) {
        path = NULL;
        if (asprintf(&path, "%s/%s", output, reports[i]) > 0)
            result = upload_one(AT_FDCWD, path, dest, "", reports[i], ret_n);
        free(path);
    }
    return result;
}
