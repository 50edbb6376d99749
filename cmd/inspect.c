/* SPDX-License-Identifier: Apache-2.0 */
#include "inspect.h"

#include "base/thread.h"
#include "common/output.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

/*
 * The watchdog is a thread, because a thread blocked in a system call cannot end itself. It also receives the signals
 * that end the command: a handler would not run in a thread that waits for a file system whose server is dead.
 */
static struct {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool is_running, is_done;
    struct timespec until;
    int64_t seconds;
    const char *name;            /* of the machine, until root is set */
    const struct source *source; /* set under the lock */
    sigset_t mask;               /* saved mask of the main thread */
} watchdog = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* Uses dprintf(), because the thread that hangs may hold the lock of stderr. */
static void report_timeout(const struct source *source)
{
    static const char hint[] = "check whether that is a file system whose server is down; --timeout S gives more time";
    const char *path = source ? source_current_path(source) : "", *name = source ? source_name(source) : watchdog.name;
    char what[512];

    snprintf(what, sizeof(what), "reading %.200s took longer than %lld s", name, (long long)watchdog.seconds);
    dprintf(STDERR_FILENO, "epkit: error: %s%s%s\n       hint:  %s\n", what, *path ? ", at " : "", path, hint);
    ending_write_late(CMD_FAILED, what, *path ? path : name, "the deadline of --timeout has expired", hint);
}

static void *watch(void *unused)
{
    const struct source *source;
    bool has_timed_out = false;

    (void)unused;
    pthread_mutex_lock(&watchdog.lock);
    while (!watchdog.is_done && !has_timed_out)
        has_timed_out = pthread_cond_timedwait(&watchdog.changed, &watchdog.lock, &watchdog.until) == ETIMEDOUT;
    has_timed_out = has_timed_out && !watchdog.is_done;
    source = watchdog.source;
    pthread_mutex_unlock(&watchdog.lock);
    if (has_timed_out) {
        report_timeout(source);
        _exit(CMD_FAILED);
    }
    return NULL;
}

static void start_watchdog(const char *name, int64_t seconds)
{
    static const int signals[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT};
    sigset_t ending, mask, before;

    pthread_sigmask(SIG_SETMASK, NULL, &before);
    ep_cond_init(&watchdog.changed);
    clock_gettime(CLOCK_MONOTONIC, &watchdog.until);
    watchdog.until.tv_sec += seconds;
    watchdog.seconds = seconds;
    watchdog.name = name;
    watchdog.source = NULL;
    watchdog.is_done = false;
    sigemptyset(&ending);
    sigfillset(&mask);
    for (size_t i = 0; i < sizeof(signals) / sizeof(signals[0]); i++) {
        if (sigismember(&before, signals[i]))
            continue;
        sigaddset(&ending, signals[i]);
        sigdelset(&mask, signals[i]);
    }
    pthread_sigmask(SIG_SETMASK, &mask, NULL);
    watchdog.is_running = pthread_create(&watchdog.thread, NULL, watch, NULL) == 0;
    watchdog.mask = before;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (watchdog.is_running)
        pthread_sigmask(SIG_BLOCK, &ending, NULL);
    if (!watchdog.is_running)
        out_warning("cannot start a thread: --timeout has no effect");
}

void inspect_reading_done(void)
{
    if (!watchdog.is_running)
        return;
    pthread_mutex_lock(&watchdog.lock);
    watchdog.is_done = true;
    pthread_cond_signal(&watchdog.changed);
    pthread_mutex_unlock(&watchdog.lock);
    pthread_join(watchdog.thread, NULL);
    pthread_cond_destroy(&watchdog.changed);
    watchdog.is_running = false;
    pthread_sigmask(SIG_SETMASK, &watchdog.mask, NULL);
}

int inspect_open(const struct cmd *cmd, const struct inspect_options *options, struct source **ret_source)
{
    struct source *source;
    ep_status status;

    if (options->pid && options->from)
        return cmd_usage(cmd, "--pid is a process of this machine, --from is another machine: give only one of them");
    /* Opening a folder may hang like reading below it. */
    start_watchdog(options->from ? options->from : "this machine", options->timeout);
    status = source_open(options->from, &source);
    if (status != EP_OK) {
        inspect_reading_done();
        if (status == EP_E_ARG)
            return cmd_refuse(cmd, "--from", "%s", ep_last_error());
        out_problem("opening the machine to inspect", NULL, ep_last_error(), ep_status_hint(status));
        return CMD_FAILED;
    }
    pthread_mutex_lock(&watchdog.lock);
    watchdog.source = source;
    pthread_mutex_unlock(&watchdog.lock);
    if (options->pid && source_set_process(source, (pid_t)options->pid) != EP_OK) {
        inspect_reading_done();
        source_free(source);
        return cmd_refuse(cmd, "--pid", "%s", ep_last_error());
    }
    *ret_source = source;
    return CMD_FINE;
}

bool inspect_is_empty(const struct topo *topo)
{
    return topo->n_gpus == 0 && topo->n_nics == 0;
}

int inspect_report_empty(const struct topo *topo, json_t *document)
{
    if (!document) {
        out_verdict(OUT_PLAIN, "%s", topo->why_empty);
        return CMD_UNSUPPORTED;
    }
    json_object_set_new(document, "verdict", out_text(topo->why_empty));
    return out_json(document) == 0 ? CMD_UNSUPPORTED : CMD_FAILED;
}
