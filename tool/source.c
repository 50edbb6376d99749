/* SPDX-License-Identifier: Apache-2.0 */
#include "source.h"

#include "base/thread.h"
#include "output.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* The watchdog is a thread, because a system call that does not return cannot be interrupted from inside. */
static struct {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool is_running, is_over;
    struct timespec until;
    int64_t seconds;
    const struct root *root;
} watchdog = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void *watch(void *unused)
{
    bool is_late = false;

    (void)unused;
    pthread_mutex_lock(&watchdog.lock);
    while (!watchdog.is_over && !is_late)
        is_late = pthread_cond_timedwait(&watchdog.changed, &watchdog.lock, &watchdog.until) == ETIMEDOUT;
    is_late = is_late && !watchdog.is_over;
    pthread_mutex_unlock(&watchdog.lock);
    if (is_late) {
        const char *path = root_now_reading(watchdog.root);

        /* Standard error may belong to the thread that hangs: it is written without its lock. */
        dprintf(STDERR_FILENO,
                "epkit: error: reading %s took longer than %lld s%s%s\n"
                "       hint:  is that a file system whose server is gone? --timeout S gives more time\n",
                root_name(watchdog.root), (long long)watchdog.seconds, *path ? ", at " : "", path);
        _exit(CMD_FAILED);
    }
    return NULL;
}

static void start_watchdog(const struct root *root, int64_t seconds)
{
    ep_cond_init(&watchdog.changed);
    clock_gettime(CLOCK_MONOTONIC, &watchdog.until);
    watchdog.until.tv_sec += seconds;
    watchdog.seconds = seconds;
    watchdog.root = root;
    watchdog.is_over = false;
    watchdog.is_running = ep_thread_start(&watchdog.thread, NULL, watch, NULL) == 0;
    if (!watchdog.is_running)
        out_warning("no thread could be started: --timeout has no effect");
}

void source_read(void)
{
    if (!watchdog.is_running)
        return;
    pthread_mutex_lock(&watchdog.lock);
    watchdog.is_over = true;
    pthread_cond_signal(&watchdog.changed);
    pthread_mutex_unlock(&watchdog.lock);
    pthread_join(watchdog.thread, NULL);
    pthread_cond_destroy(&watchdog.changed);
    watchdog.is_running = false;
}

int source_open(const struct cmd *cmd, const struct source_options *options, struct root **ret_root)
{
    struct root *root;

    if (options->pid && options->from)
        return cmd_usage(cmd, "--pid is a process of this machine, --from is another machine: give one of them");
    if (root_open(options->from, &root) != EP_OK)
        return cmd_usage(cmd, "--from: %s", ep_last_error());
    if (options->pid && root_set_process(root, (pid_t)options->pid) != EP_OK) {
        root_free(root);
        return cmd_usage(cmd, "--pid: %s", ep_last_error());
    }
    start_watchdog(root, options->timeout);
    *ret_root = root;
    return CMD_FINE;
}

bool source_is_empty(const struct topo *topo)
{
    return topo->n_gpus == 0 && topo->n_nics == 0;
}

int source_say_empty(const struct topo *topo, json_t *document)
{
    if (!document) {
        out_verdict(OUT_PLAIN, "%s", topo->why_empty);
        return CMD_UNSUPPORTED;
    }
    json_object_set_new(document, "verdict", out_text(topo->why_empty));
    return out_json(document) == 0 ? CMD_UNSUPPORTED : CMD_FAILED;
}
