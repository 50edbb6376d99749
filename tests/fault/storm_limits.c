/* SPDX-License-Identifier: Apache-2.0 */
/* Limits of containers, hardened hosts and old kernels. */
#include "storm.h"

#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stdio.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef SYS_openat2
#define SYS_openat2 437
#endif

static bool own_mounts(void)
{
    int flags = geteuid() == 0 ? CLONE_NEWNS : CLONE_NEWNS | CLONE_NEWUSER;

    /* Private, otherwise mounts here would propagate. */
    return unshare(flags) == 0 && mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0;
}

bool storm_isolate(void)
{
    return own_mounts() && mount("storm", "/dev/shm", "tmpfs", 0, NULL) == 0;
}

static bool refuse_calls(const int *calls, int n)
{
    struct sock_filter filter[16];
    struct sock_fprog program = {.filter = filter};
    int at = 0;

    filter[at++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    for (int i = 0; i < n; i++) {
        filter[at++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)calls[i], 0, 1);
        filter[at++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS);
    }
    filter[at++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    program.len = (unsigned short)at;
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

bool storm_limit(unsigned limits)
{
    int calls[4], n = 0;

    if (limits & LIMIT_PIDFD) {
        calls[n++] = SYS_pidfd_open;
        calls[n++] = SYS_pidfd_send_signal;
    }
    if (limits & LIMIT_OPENAT2)
        calls[n++] = SYS_openat2;
    return n == 0 || refuse_calls(calls, n);
}

static bool is_possible(unsigned limit)
{
    pid_t pid = fork();
    int how = -1;

    if (pid == 0)
        _exit(!storm_limit(limit));
    return pid > 0 && waitpid(pid, &how, 0) == pid && WIFEXITED(how) && WEXITSTATUS(how) == 0;
}

unsigned storm_possible_limits(void)
{
    unsigned possible = 0;

    for (unsigned limit = LIMIT_PIDFD; limit <= LIMIT_OPENAT2; limit <<= 1)
        possible |= is_possible(limit) ? limit : 0;
    return possible;
}
