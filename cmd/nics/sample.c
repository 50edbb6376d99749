/* SPDX-License-Identifier: Apache-2.0 */
/* sample.c - samples the counters periodically and adds up the changes, also while a command runs. */
#include "base/clock.h"
#include "common/child.h"
#include "common/inherited.h"
#include "common/output.h"
#include "common/text.h"
#include "nics.h"

#include <errno.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* A counter of 32 bits wraps around in 0.34 s at 400 Gbit/s; see counter_may_wrap(). */
#define WRAP_SAMPLE_NS 100000000

/* A device without readable traffic counters is not present, or no longer. */
static bool is_there(const struct counter_device *device, const struct counter_sample *sample)
{
    struct counter_rows rows = counter_rows(device->rdma);

    return ANY_OF(i, rows.n,
                  rows.at[i].kind <= COUNTER_RECEIVED_PACKETS && sample->states[i] != SOURCE_ABSENT &&
                      sample->states[i] != SOURCE_NOT_RECORDED);
}

static void add_sample(const struct counter_device *device, const struct counter_sample *sample,
                       struct nics_tally *tally)
{
    struct counter_rows rows = counter_rows(device->rdma);

    for (size_t i = 0; i < rows.n; i++) {
        uint64_t amount;
        bool reset;

        /* A sample of traffic only does not change the other counters. */
        if (sample->states[i] == SOURCE_NOT_RECORDED && tally->last.states[i] != SOURCE_NOT_RECORDED)
            continue;
        tally->last.states[i] = sample->states[i];
        if (counter_moved(device, i, &tally->last, sample, &amount, &reset)) {
            tally->is_counted[i] = true;
            tally->is_reset[i] |= reset;
            if (__builtin_add_overflow(tally->moved[i], amount, &tally->moved[i]))
                tally->moved[i] = UINT64_MAX;
        }
        if (sample->known[i]) {
            tally->last.known[i] = true;
            tally->last.values[i] = sample->values[i];
        }
    }
    tally->last.at_ns = sample->at_ns;
    tally->is_there = is_there(device, sample);
}

void nics_begin(struct nics *nics)
{
    for (size_t i = 0; i < nics->n; i++) {
        struct nics_tally *tally = &nics->tallies[i];

        memset(tally, 0, sizeof(*tally));
        counter_read(nics->source, &nics->devices[i].counter, COUNTER_CONGESTION, &tally->last);
        tally->was_there = tally->is_there = is_there(&nics->devices[i].counter, &tally->last);
    }
    nics->begin_ns = nics->end_ns = (int64_t)ep_now_ns();
}

void nics_sample(struct nics *nics)
{
    for (size_t i = 0; i < nics->n; i++) {
        struct counter_sample sample;

        counter_read(nics->source, &nics->devices[i].counter, COUNTER_CONGESTION, &sample);
        add_sample(&nics->devices[i].counter, &sample, &nics->tallies[i]);
    }
    nics->end_ns = (int64_t)ep_now_ns();
}

/* Samples the traffic of devices whose counters may wrap around before the next full sample. Returns their number. */
static size_t sample_wrapping(struct nics *nics)
{
    size_t n = 0;

    for (size_t i = 0; i < nics->n; i++) {
        const struct counter_device *device = &nics->devices[i].counter;
        struct counter_sample sample;

        if (!counter_may_wrap(device, &nics->tallies[i].last))
            continue;
        counter_read(nics->source, device, COUNTER_RECEIVED_PACKETS, &sample);
        add_sample(device, &sample, &nics->tallies[i]);
        n++;
    }
    return n;
}

int nics_wait(struct nics *nics, int64_t until_ns, const sigset_t *signals, siginfo_t *ret_info)
{
    bool may_wrap = true;

    for (;;) {
        int64_t left = until_ns - (int64_t)ep_now_ns();
        int64_t step = may_wrap && left > WRAP_SAMPLE_NS ? WRAP_SAMPLE_NS : left > 0 ? left : 0;
        struct timespec time = {.tv_sec = step / 1000000000, .tv_nsec = step % 1000000000};
        int signal = sigtimedwait(signals, ret_info, &time);

        if (signal > 0)
            return signal;
        if (left <= 0)
            return 0;
        if (errno == EAGAIN && may_wrap && left > WRAP_SAMPLE_NS)
            may_wrap = sample_wrapping(nics) > 0;
    }
}

uint64_t nics_moved(const struct nics *nics, size_t device, enum counter_kind kind)
{
    const struct nics_tally *tally = &nics->tallies[device];
    struct counter_rows rows = counter_rows(nics->devices[device].counter.rdma);
    uint64_t sum = 0;

    for (size_t i = 0; i < rows.n; i++)
        if (rows.at[i].kind == kind && __builtin_add_overflow(sum, tally->moved[i], &sum))
            return UINT64_MAX;
    return sum;
}

bool nics_total(const struct nics *nics, size_t device, size_t row, double *ret_total)
{
    struct counter_rows rows = counter_rows(nics->devices[device].counter.rdma);

    if (row >= rows.n || !nics->tallies[device].last.known[row])
        return false;
    *ret_total = (double)nics->tallies[device].last.values[row] * rows.at[row].scale;
    return true;
}

double nics_total_of(const struct nics *nics, size_t device, enum counter_kind kind)
{
    struct counter_rows rows = counter_rows(nics->devices[device].counter.rdma);
    double sum = 0, total;

    for (size_t i = 0; i < rows.n; i++)
        if (rows.at[i].kind == kind && nics_total(nics, device, i, &total))
            sum += total;
    return sum;
}

bool nics_counts_bytes(const struct nics *nics, size_t device)
{
    struct counter_rows rows = counter_rows(nics->devices[device].counter.rdma);

    return ANY_OF(i, rows.n, rows.at[i].kind <= COUNTER_RECEIVED && nics->tallies[device].last.known[i]);
}

/* --- a command between two samples --- */

#define POLL_NS 200000000

struct child {
    struct process process;
    sigset_t signals, mask_before;
    struct sigaction children_before;
};

static void block_signals(struct child *child)
{
    struct sigaction normal = {.sa_handler = SIG_DFL};

    child->signals = SIGNALS(SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGCHLD);
    sigprocmask(SIG_BLOCK, &child->signals, &child->mask_before);
    /* If SIGCHLD is ignored, the kernel discards the exit status of a child. */
    sigaction(SIGCHLD, &normal, &child->children_before);
}

static void restore_signals(const struct child *child)
{
    sigaction(SIGCHLD, &child->children_before, NULL);
    sigprocmask(SIG_SETMASK, &child->mask_before, NULL);
}

static void execute(const void *context)
{
    char *const *args = context;

    execvp(args[0], args);
}

/* A terminal signals the whole foreground group; the kernel marks that with process number 0. */
static bool is_for_us_alone(const siginfo_t *info)
{
    return info->si_code == SI_USER || info->si_code == SI_QUEUE || info->si_code == SI_TKILL;
}

static int wait_for(struct nics *nics, const struct child *child)
{
    int status = 0;

    while (process_wait(child->process.pid, WNOHANG, &status) == 0) {
        siginfo_t info;
        /* A thread of a preloaded library may take SIGCHLD: then only polling detects the exit. */
        int signal = nics_wait(nics, (int64_t)ep_now_ns() + POLL_NS, &child->signals, &info);

        if (signal != SIGCHLD && signal > 0 && is_for_us_alone(&info))
            kill(child->process.pid, signal);
    }
    return status;
}

void nics_run_command(struct nics *nics, struct nics_command *command)
{
    struct child child;
    int reason, status = 0;

    nics_begin(nics);
    fflush(NULL);
    block_signals(&child);
    reason = process_fork_in_place(execute, command->args, &child.process);
    if (reason == 0)
        status = wait_for(nics, &child);
    nics_sample(nics);
    restore_signals(&child);
    command->has_started = reason == 0;
    command->signal = 0;
    if (reason) {
        char name[256];

        text_clean(command->args[0], name, sizeof(name));
        out_error("nics: '%s' could not be started: %s", name, strerror(reason));
        command->code = reason == ENOENT ? 127 : 126;
    } else if (WIFSIGNALED(status)) {
        command->signal = WTERMSIG(status);
        command->code = 128 + command->signal;
    } else {
        command->code = WEXITSTATUS(status);
    }
}
