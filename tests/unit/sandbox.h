/* SPDX-License-Identifier: Apache-2.0 */
/* sandbox.h - what a machine may forbid a process, for tests: a child is put into it and tells how it went. */
#ifndef EP_TESTS_UNIT_SANDBOX_H
#define EP_TESTS_UNIT_SANDBOX_H

#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define SANDBOX_SKIP 77 /* this machine does not let a test make the sandbox */

/* Runs in a child; its result, or the signal that ended it negated. */
static inline int sandbox_run(int (*run)(void *argument), void *argument)
{
    pid_t pid = fork();
    int how = 0;

    if (pid == 0) {
        alarm(100);
        _exit(run(argument));
    }
    if (pid < 0 || waitpid(pid, &how, 0) != pid)
        return -1;
    return WIFSIGNALED(how) ? -WTERMSIG(how) : WEXITSTATUS(how);
}

/* Needs cmocka.h. */
#define sandbox_expect(result)                                                                                         \
    do {                                                                                                               \
        if ((result) == SANDBOX_SKIP) {                                                                                \
            print_message("SKIP: this machine does not let a test make the sandbox (not root?)\n");                    \
            skip();                                                                                                    \
        }                                                                                                              \
        assert_int_equal((result), 0);                                                                                 \
    } while (0)

/* As kernels before 5.3 and many container runtimes: the calls on pidfds fail with `error`. */
static inline bool sandbox_forbid_pidfd(int error)
{
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_pidfd_open, 2, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_pidfd_send_signal, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (unsigned)error),
    };
    struct sock_fprog program = {.len = sizeof(filter) / sizeof(filter[0]), .filter = filter};

    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

static inline bool sandbox_private_mounts(void)
{
    return unshare(CLONE_NEWNS) == 0 && mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0;
}

/* /proc that shows no processes of other users. */
static inline bool sandbox_hide_proc(void)
{
    return sandbox_private_mounts() && mount("proc", "/proc", "proc", 0, "hidepid=2") == 0;
}

/* No /proc at all. */
static inline bool sandbox_cover_proc(void)
{
    return sandbox_private_mounts() && mount("none", "/proc", "tmpfs", 0, "size=4k") == 0;
}

#endif
