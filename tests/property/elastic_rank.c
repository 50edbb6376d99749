/* SPDX-License-Identifier: Apache-2.0 */
/* The program of a rank: makes each group with the other members, works in it, and reports how that ended. */
#include "elastic.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

/* The fault of this process: injected by a timer, at any instruction. */
static volatile sig_atomic_t leaves;
static enum fault pending;
static ep_comm *volatile abortable;

static void on_timer(int number)
{
    (void)number;
    if (pending == FAULT_DIE)
        kill(getpid(), SIGKILL);
    else if (pending == FAULT_STOP)
        kill(getpid(), SIGSTOP);
    else if (pending == FAULT_LEAVE)
        leaves = 1;
    else if (abortable)
        ep_comm_abort(abortable);
}

static void start_fault(const struct turn *turn, int slot)
{
    int us = turn->at_us[slot] + 1;
    struct itimerval timer = {.it_value = {us / 1000000, us % 1000000}};

    pending = turn->fault[slot];
    if (pending == FAULT_NONE)
        timer = (struct itimerval){0};
    setitimer(ITIMER_REAL, &timer, NULL);
}

static void report(struct work *work, enum progress progress, ep_status status)
{
    snprintf(work->report->text, TEXT_BYTES, "%s: %s", ep_status_name(status), status == EP_OK ? "" : ep_last_error());
    atomic_store(&work->report->progress, progress);
    atomic_store(&work->report->group, work->group + 1);
}

static ep_status make_group(struct work *work, const ep_boot *boot)
{
    const struct table *table = work->table;
    ep_comm_config config = EP_COMM_CONFIG_INIT;

    if (work->comm)
        return ep_comm_regroup(work->comm, boot);
    config.backend = "host";
    config.network = table->ranks_per_node == table->slots ? NULL : table->tcp ? "tcp" : "emulated";
    config.ranks_per_node = table->ranks_per_node;
    config.timeout_ms = table->timeout_ms;
    config.flags = EP_COMM_DROP_ABSENT;
    config.slots = table->slots;
    config.slot = work->rank;
    return ep_comm_new(boot, &config, &work->comm);
}

/* One group, until its rounds are done or a call fails. */
static void take_turn(struct work *work, struct table *table)
{
    const struct turn *turn = &table->turns[work->group];
    bool fresh = !work->comm;
    struct regroup_boot boot;
    ep_status status;

    work->members = turn->members;
    start_fault(turn, work->rank);
    regroup_boot(&table->regroup, work->group, work->rank, table->ranks_per_node, &boot);
    status = make_group(work, &boot.boot);
    abortable = work->comm;
    if (status == EP_OK)
        status = work_open(work, fresh || !work->x);
    for (work->round = 0; status == EP_OK && work->round < turn->rounds && !leaves; work->round++)
        status = work_round(work);
    start_fault(&(struct turn){0}, 0); /* too late now: the next group is decided from what has happened in this one */
    report(work, status == EP_OK ? PROGRESS_DONE : PROGRESS_FAILED, status);
}

/*
 * A rank that was left out: no call of its works, or changes anything, unless all members of its group were left out.
 */
static void try_to_go_on(struct work *work, int number)
{
    int32_t failed[EP_MAX_RANKS] = {0};
    bool alone = true;
    uint64_t begin = (uint64_t)time(NULL);
    ep_status status = work->comm ? ep_comm_get_failed(work->comm, failed) : EP_E_STATE;

    /* Those of its communicator: the last group that it was to be in may not have been made. */
    for (int rank = 0; status == EP_OK && rank < work->table->slots; rank++)
        alone &= failed[rank] == EP_E_EXCLUDED || !(work->table->turns[number].members >> rank & 1);
    status = work->comm ? ep_comm_barrier(work->comm) : EP_E_STATE;

    if (status == EP_OK && !alone)
        snprintf(work->report->wrong, TEXT_BYTES, "rank %d, which is absent, has passed a barrier", work->rank);
    if ((uint64_t)time(NULL) > begin + 2 * (uint64_t)work->table->timeout_ms / 1000u + 20)
        snprintf(work->report->wrong, TEXT_BYTES, "rank %d, which is absent, waited %d s", work->rank,
                 (int)((uint64_t)time(NULL) - begin));
}

int elastic_rank(struct table *table, int slot, int group)
{
    struct work work = {.table = table, .report = &table->ranks[slot], .rank = slot, .group = group};
    struct sigaction action = {.sa_handler = on_timer, .sa_flags = SA_RESTART};
    int number;

    sigaction(SIGALRM, &action, NULL);
    for (;;) {
        while ((number = atomic_load(&table->number)) >= 0 && number < work.group && !leaves)
            usleep(1000);
        if (number < 0 || leaves)
            break;
        work.group = number;
        work.rank = slot;
        if (!(table->turns[number].members >> slot & 1)) {
            try_to_go_on(&work, number);
            break;
        }
        take_turn(&work, table);
        work.group++;
    }
    abortable = NULL;
    work_close(&work);
    return 0;
}
