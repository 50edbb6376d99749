/* SPDX-License-Identifier: Apache-2.0 */
#include "fault.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

/* One victim per process: a signal handler has no other way to find it. */
static struct {
    struct table *table;
    enum fault fault;
    ep_comm *comm;
    pthread_t later;
    bool later_started;
    int later_us;
    /* The trap. */
    unsigned char *begin;
    size_t bytes;
    enum fault trap_fault;
} victim;

static void mark(void)
{
    uint64_t none = 0;

    atomic_compare_exchange_strong(&victim.table->injected_ns, &none, now_ns());
}

void inject_init(struct table *table, enum fault fault)
{
    victim.table = table;
    victim.fault = fault;
}

void inject_set_comm(ep_comm *comm)
{
    victim.comm = comm;
}

static void crash(void)
{
    volatile int *nowhere = NULL;

    signal(SIGSEGV, SIG_DFL);
    *nowhere = 1;
}

static void *abort_main(void *argument)
{
    ep_comm_abort(argument);
    return NULL;
}

void inject_now(void)
{
    pthread_t thread;

    mark();
    switch (victim.fault) {
    case FAULT_KILL:
        kill(getpid(), SIGKILL);
        break;
    case FAULT_STOP:
        raise(SIGSTOP);
        break;
    case FAULT_CRASH:
        crash();
        break;
    case FAULT_ABORT:
        if (pthread_create(&thread, NULL, abort_main, victim.comm) == 0)
            pthread_join(thread, NULL);
        break;
    default:
        break;
    }
}

static void *later_main(void *argument)
{
    (void)argument;
    sleep_us(victim.later_us);
    mark();
    switch (victim.fault) {
    case FAULT_KILL:
        kill(getpid(), SIGKILL);
        break;
    case FAULT_STOP:
        kill(getpid(), SIGSTOP);
        break;
    case FAULT_CRASH:
        crash();
        break;
    default:
        ep_comm_abort(victim.comm);
        break;
    }
    return NULL;
}

void inject_later(int us)
{
    victim.later_us = us;
    victim.later_started = pthread_create(&victim.later, NULL, later_main, NULL) == 0;
}

void inject_join(void)
{
    if (victim.later_started)
        pthread_join(victim.later, NULL);
    victim.later_started = false;
}

/*
 * Async-signal-safe calls only. The access is repeated when the handler returns, so the memory must be accessible by
 * then.
 */
static void on_fault(int signal_number, siginfo_t *info, void *context)
{
    unsigned char *at = info->si_addr;
    struct timespec late = {.tv_sec = LATE_MS / 1000, .tv_nsec = LATE_MS % 1000 * 1000000L};

    (void)context;
    if (!victim.begin || at < victim.begin || at >= victim.begin + victim.bytes) {
        signal(signal_number, SIG_DFL);
        return;
    }
    if (victim.trap_fault != FAULT_DELAY)
        mark();
    switch (victim.trap_fault) {
    case FAULT_KILL:
        kill(getpid(), SIGKILL);
        break;
    case FAULT_STOP:
        raise(SIGSTOP);
        break;
    case FAULT_CRASH:
        signal(signal_number, SIG_DFL);
        return;
    case FAULT_ABORT:
        ep_comm_abort(victim.comm);
        break;
    default:
        nanosleep(&late, NULL);
        break;
    }
    mprotect(victim.begin, victim.bytes, PROT_READ | PROT_WRITE);
}

void inject_trap(void *memory, size_t bytes, int percent, enum fault fault)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), from = bytes / 100 * (size_t)percent / page * page;
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};

    victim.begin = (unsigned char *)memory + from;
    victim.bytes = (bytes + page - 1) / page * page - from;
    victim.trap_fault = fault;
    sigemptyset(&action.sa_mask);
    sigaction(SIGSEGV, &action, NULL);
    mprotect(victim.begin, victim.bytes, PROT_NONE);
}

void inject_disarm(void)
{
    if (victim.begin)
        mprotect(victim.begin, victim.bytes, PROT_READ | PROT_WRITE);
    victim.begin = NULL;
}
