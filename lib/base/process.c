/* SPDX-License-Identifier: Apache-2.0 */
#include "base/process.h"

#include "base/fd.h"

#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>

/* --- identity ---------------------------------------------------------------------------------------------------- */

/*
 * One page that the kernel clears in every child, also in one that was created without fork() of the C library and its
 * handlers (_Fork, clone). It holds the key of this process, which is made when it is 0.
 */
static _Atomic(_Atomic uint64_t *) wiped_page;

static _Atomic uint64_t *map_wiped_page(void)
{
    _Atomic uint64_t *made, *none = NULL;
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    void *base = mmap(NULL, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (base == MAP_FAILED)
        return NULL;
    if (madvise(base, page, MADV_WIPEONFORK) != 0) {
        munmap(base, page);
        return NULL;
    }
    made = base;
    if (!atomic_compare_exchange_strong(&wiped_page, &none, made)) {
        munmap(base, page);
        made = none;
    }
    return made;
}

/* Odd, so that it is not 0. */
static uint64_t random_word(void)
{
    struct timespec now;
    uint64_t word = 0;

    if (getrandom(&word, sizeof(word), GRND_NONBLOCK) != (ssize_t)sizeof(word)) {
        clock_gettime(CLOCK_REALTIME, &now);
        word = ((uint64_t)now.tv_sec << 32 ^ (uint64_t)now.tv_nsec << 8 ^ (uint64_t)getpid()) * 0x9e3779b97f4a7c15u;
    }
    return word | 1;
}

uint64_t ep_process_generation(void)
{
    /* Kernels before 4.14: correct unless a child in another PID namespace has the PID of its parent. */
    static _Atomic uint64_t inherited;
    _Atomic uint64_t *at = atomic_load(&wiped_page);
    uint64_t none = 0;

    if (!at)
        at = map_wiped_page();
    if (!at)
        at = &inherited;
    if (atomic_load(at) == 0)
        atomic_compare_exchange_strong(at, &none, random_word());
    return atomic_load(at) ^ (at == &inherited ? (uint64_t)getpid() << 32 : 0);
}

static uint64_t inode_of(const char *path)
{
    struct stat info;

    return stat(path, &info) == 0 ? (uint64_t)info.st_ino : 0;
}

/* State and start time of a process. false: they cannot be read, which proves nothing about the process. */
static bool read_stat(int32_t pid, char *ret_state, uint64_t *ret_start)
{
    char path[40], text[1024], *at;

    snprintf(path, sizeof(path), "/proc/%d/stat", pid);
    if (!ep_fd_read_text(path, text, sizeof(text)))
        return false;
    /* The program name is in parentheses and may contain parentheses. */
    at = strrchr(text, ')');
    if (!at || at[1] != ' ')
        return false;
    *ret_state = at[2];
    at += 2;
    for (int field = 3; field < 22 && at; field++)
        at = strchr(at + 1, ' ');
    if (!at)
        return false;
    *ret_start = strtoull(at, NULL, 10);
    return true;
}

bool ep_process_proc_is_ours(void)
{
    char text[24];
    ssize_t got = readlink("/proc/self", text, sizeof(text) - 1);

    if (got <= 0)
        return false;
    text[got] = '\0';
    return strtol(text, NULL, 10) == (long)getpid();
}

/* Read once, so that it is known also when the process has no descriptors left. */
static void read_host(char host[40])
{
    static _Atomic int state; /* 0: not read, 1: being written, 2: valid */
    static char known[40];
    int unread = 0;

    memset(host, 0, 40);
    if (atomic_load(&state) == 2) {
        memcpy(host, known, sizeof(known));
        return;
    }
    if (!ep_fd_read_text("/proc/sys/kernel/random/boot_id", host, 40))
        return;
    if (atomic_compare_exchange_strong(&state, &unread, 1)) {
        memcpy(known, host, sizeof(known));
        atomic_store(&state, 2);
    }
}

void *ep_process_get_own(_Atomic(struct ep_process_own *) *current, size_t bytes, void (*init)(void *own))
{
    struct ep_process_own *former = atomic_load(current), *fresh;
    uint64_t generation = ep_process_generation();

    if (former && former->generation == generation)
        return former;
    fresh = calloc(1, bytes);
    if (!fresh)
        return NULL;
    fresh->generation = generation;
    fresh->inherited = former;
    pthread_mutex_init(&fresh->lock, NULL);
    if (init)
        init(fresh);
    if (atomic_compare_exchange_strong(current, &former, fresh))
        return fresh;
    pthread_mutex_destroy(&fresh->lock);
    free(fresh);
    return former;
}

void ep_process_get_self(struct ep_process_id *ret_id)
{
    char state;

    memset(ret_id, 0, sizeof(*ret_id));
    read_host(ret_id->host);
    ret_id->key = ep_process_generation();
    ret_id->pid = (int32_t)getpid();
    ret_id->pid_namespace = inode_of("/proc/self/ns/pid");
    ret_id->time_namespace = inode_of("/proc/self/ns/time");
    if (!ep_process_proc_is_ours() || !read_stat(ret_id->pid, &state, &ret_id->start))
        ret_id->start = 0;
}

/* --- liveness ---------------------------------------------------------------------------------------------------- */

static void find_visible(const struct ep_process_id *id, struct ep_process *process)
{
    uint64_t here;
    char host[40];

    *process = (struct ep_process){.pidfd = -1};
    read_host(host);
    if (id->pid <= 0 || !host[0] || memcmp(host, id->host, sizeof(host)) != 0)
        return;
    /* A PID is valid only in its own PID namespace, and without /proc that of this process is unknown. */
    here = inode_of("/proc/self/ns/pid");
    if (!here || here != id->pid_namespace)
        return;
    process->pid = id->pid;
    if (id->time_namespace == inode_of("/proc/self/ns/time"))
        process->start = id->start;
}

/* The PID may have been reused before the pidfd was opened. */
static bool was_reused(const struct ep_process *process)
{
    uint64_t start;
    char state;

    return process->start && ep_process_proc_is_ours() && read_stat(process->pid, &state, &start) &&
           start != process->start;
}

ep_status ep_process_open(const struct ep_process_id *id, struct ep_process *ret_process)
{
    struct ep_process process;
    int error;

    find_visible(id, &process);
    if (process.pid) {
        process.pidfd = ep_fd_above_stdio((int)syscall(SYS_pidfd_open, process.pid, 0));
        error = errno;
        if (process.pidfd < 0 && (error == EMFILE || error == ENFILE || error == ENOMEM))
            return ep_fail_errno(EP_E_SYSTEM, error, "pidfd_open of process %d", process.pid);
        if (process.pidfd >= 0) {
            fcntl(process.pidfd, F_SETFD, FD_CLOEXEC);
            if (was_reused(&process)) {
                close(process.pidfd);
                process.pidfd = -1; /* the start time then shows that it is dead */
            }
        }
    }
    *ret_process = process;
    return EP_OK;
}

void ep_process_close(struct ep_process *process)
{
    if (process->pidfd >= 0)
        ep_fd_close(process->pidfd);
    *process = (struct ep_process){.pidfd = -1};
}

/* Without a pidfd. */
static enum ep_process_state check_pid(const struct ep_process *process)
{
    uint64_t start = 0;
    char state = 0;

    if (!process->pid)
        return EP_PROCESS_UNKNOWN;
    if (kill(process->pid, 0) != 0 && errno == ESRCH)
        return EP_PROCESS_DEAD;
    if (!ep_process_proc_is_ours() || !read_stat(process->pid, &state, &start))
        return EP_PROCESS_UNKNOWN;
    if (state == 'Z' || state == 'X' || (process->start && start != process->start))
        return EP_PROCESS_DEAD;
    return EP_PROCESS_ALIVE;
}

enum ep_process_state ep_process_probe(const struct ep_process *process)
{
    struct pollfd ready = {.fd = process->pidfd, .events = POLLIN};
    int saved = errno;
    enum ep_process_state state = EP_PROCESS_UNKNOWN;

    /* poll() fails even for one descriptor if RLIMIT_NOFILE was lowered to 0. */
    if (ready.fd >= 0 && poll(&ready, 1, 0) >= 0 && !(ready.revents & (POLLNVAL | POLLERR))) {
        if (!ready.revents)
            state = EP_PROCESS_ALIVE;
        /*
         * Readable: it has ended, unless the program has closed our pidfd and its number now belongs to another file
         * (EBADF), or to the pidfd of another process. Any other error is that of a pidfd, such as EINVAL for another
         * PID namespace.
         */
        else if (ep_fd_is_ours(ready.fd) &&
                 (syscall(SYS_pidfd_send_signal, ready.fd, 0, NULL, 0) == 0 || errno != EBADF))
            state = EP_PROCESS_DEAD;
    }
    if (state == EP_PROCESS_UNKNOWN)
        state = check_pid(process);
    errno = saved;
    return state;
}

enum ep_process_state ep_process_probe_once(const struct ep_process_id *id)
{
    struct ep_process process;
    enum ep_process_state state;

    if (ep_process_open(id, &process) != EP_OK)
        find_visible(id, &process);
    state = ep_process_probe(&process);
    ep_process_close(&process);
    return state;
}
