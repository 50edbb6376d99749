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

/* What would be left behind if this process ended now. */
static struct {
    pid_t owner;
    volatile sig_atomic_t created; /* the folder is new, and empty */
    char folder[PATH_BYTES];
} left;

static const int signals[] = {SIGINT, SIGTERM, SIGHUP};

#define N_SIGNALS (sizeof(signals) / sizeof(signals[0]))

void report_abandon(void)
{
    if (left.created)
        rmdir(left.folder);
    left.created = 0;
}

/*
 * Ends the process by the same signal, which comes again with its default action when this returns. Ranks are forked
 * with this handler and end by it as well, but the folder is not theirs.
 */
static void end_by(int number)
{
    static const char text[] = "epkit: interrupted\n";

    signal(number, SIG_DFL);
    if (getpid() == left.owner) {
        report_abandon();
        if (write(STDERR_FILENO, text, sizeof(text) - 1) < 0)
            signal(number, SIG_DFL);
    }
    raise(number);
}

static void hold_signals(sigset_t *ret_before)
{
    sigset_t held;

    sigemptyset(&held);
    for (size_t i = 0; i < N_SIGNALS; i++)
        sigaddset(&held, signals[i]);
    sigprocmask(SIG_BLOCK, &held, ret_before);
}

static void take_signals(void)
{
    struct sigaction before, action = {.sa_handler = end_by};

    sigemptyset(&action.sa_mask);
    for (size_t i = 0; i < N_SIGNALS; i++)
        sigaddset(&action.sa_mask, signals[i]);
    /* nohup, and the shell of a background job, mean what they say. */
    for (size_t i = 0; i < N_SIGNALS; i++)
        if (sigaction(signals[i], NULL, &before) == 0 && before.sa_handler != SIG_IGN)
            sigaction(signals[i], &action, NULL);
}

static bool refuse(const char *folder, const char *why)
{
    out_error("the folder of the report, %s: %s", folder, why);
    out_hint("choose another with --output");
    report_abandon();
    return false;
}

static bool make_folder(const char *folder)
{
    struct stat info;

    if (snprintf(left.folder, sizeof(left.folder), "%s", folder) >= (int)sizeof(left.folder))
        return refuse(folder, strerror(ENAMETOOLONG));
    left.owner = getpid();
    left.created = mkdir(folder, 0777) == 0;
    if (!left.created && errno != EEXIST)
        return refuse(folder, strerror(errno));
    if (stat(folder, &info) != 0 || !S_ISDIR(info.st_mode))
        return refuse(folder, "it is not a folder");
    if (access(folder, W_OK | X_OK) != 0)
        return refuse(folder, strerror(errno));
    return true;
}

bool report_prepare(const char *folder)
{
    sigset_t before;
    bool good;

    hold_signals(&before);
    take_signals();
    good = make_folder(folder);
    sigprocmask(SIG_SETMASK, &before, NULL);
    return good;
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
    char path[PATH_BYTES], temporary[PATH_BYTES];
    bool there; /* the temporary one */
};

static bool render(const char *folder, const json_t *document, struct file *file)
{
    FILE *stream;

    if (snprintf(file->path, PATH_BYTES, "%s/%s", folder, file->name) >= PATH_BYTES ||
        snprintf(file->temporary, PATH_BYTES, "%s/.%s.XXXXXX", folder, file->name) >= PATH_BYTES) {
        errno = ENAMETOOLONG;
        return false;
    }
    stream = open_memstream(&file->text, &file->bytes);
    if (!stream)
        return false;
    file->write(stream, document);
    return fclose(stream) == 0;
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

/* Puts the text under the temporary name, on the disk. */
static bool put(struct file *file)
{
    mode_t mask = umask(0);
    int fd = mkostemp(file->temporary, O_CLOEXEC);
    bool good;

    umask(mask);
    if (fd < 0)
        return false;
    file->there = true;
    good = write_all(fd, file->text, file->bytes) && fchmod(fd, 0666 & ~mask) == 0 && fsync(fd) == 0;
    return close(fd) == 0 && good;
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
        left.created = 0;
    }
    return true;
}

bool report_write(const char *folder, const json_t *document)
{
    struct file files[] = {{.name = "report.json", .write = write_json}, {.name = "report.html", .write = report_html}};
    const size_t n = sizeof(files) / sizeof(files[0]);
    sigset_t before;
    size_t at = 0;
    bool good = true;

    while (good && at < n) {
        good = render(folder, document, &files[at]);
        at += good;
    }
    if (good) {
        /* Short, and not to be left halfway. */
        hold_signals(&before);
        good = put_all(files, n, &at);
        if (!good)
            out_error("writing %s: %s", files[at].path, strerror(errno));
        for (size_t i = 0; i < n; i++)
            if (files[i].there)
                unlink(files[i].temporary);
        sigprocmask(SIG_SETMASK, &before, NULL);
    } else {
        out_error("making %s of %s: %s", files[at].name, folder, strerror(errno));
    }
    for (size_t i = 0; i < n; i++)
        free(files[i].text);
    return good;
}
