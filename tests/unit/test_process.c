/* SPDX-License-Identifier: Apache-2.0 */
/* base/process.c: alive, dead or unknown; with and without pidfds, across namespaces, with a hidden /proc. */
#include "base/process.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "sandbox.h"
#include "unit.h"

struct child {
    pid_t pid;
    struct ep_process_id id;
};

static void send_id(int fd)
{
    struct ep_process_id id;

    ep_process_get_self(&id);
    if (write(fd, &id, sizeof(id)) != (ssize_t)sizeof(id))
        _exit(1);
}

/* A process that waits to be killed, and its own identity. `clone_flags`: namespaces that it creates first. */
static struct child start(int clone_flags)
{
    struct child child;
    int fds[2];

    assert_int_equal(pipe(fds), 0);
    child.pid = fork();
    if (child.pid == 0) {
        if (clone_flags && unshare(clone_flags) != 0)
            _exit(1);
        send_id(fds[1]);
        for (;;)
            pause();
    }
    assert_int_equal(read(fds[0], &child.id, sizeof(child.id)), sizeof(child.id));
    close(fds[0]);
    close(fds[1]);
    return child;
}

/* A zombie: ended, but not reaped. */
static void make_zombie(const struct child *child)
{
    siginfo_t info;

    kill(child->pid, SIGKILL);
    assert_int_equal(waitid(P_PID, (id_t)child->pid, &info, WEXITED | WNOWAIT), 0);
}

TEST(alive_zombie_and_dead)
{
    struct child child = start(0);
    struct ep_process process;

    assert_int_equal(ep_process_open(&child.id, &process), EP_OK);
    assert_int_equal(ep_process_probe(&process), EP_PROCESS_ALIVE);
    assert_int_equal(ep_process_probe_once(&child.id), EP_PROCESS_ALIVE);
    make_zombie(&child);
    assert_int_equal(ep_process_probe(&process), EP_PROCESS_DEAD);
    assert_int_equal(ep_process_probe_once(&child.id), EP_PROCESS_DEAD);
    waitpid(child.pid, NULL, 0);
    assert_int_equal(ep_process_probe(&process), EP_PROCESS_DEAD);
    assert_int_equal(ep_process_probe_once(&child.id), EP_PROCESS_DEAD);
    ep_process_close(&process);
    assert_int_equal(process.pidfd, -1);
    assert_int_equal(ep_process_probe(&process), EP_PROCESS_UNKNOWN);
}

/* Without a pidfd the PID is used: a zombie and a reused PID are dead as well. */
TEST(by_number)
{
    struct child child = start(0);
    struct ep_process process = {.pidfd = -1, .pid = child.id.pid, .start = child.id.start};

    assert_true(child.id.start != 0);
    assert_int_equal(ep_process_probe(&process), EP_PROCESS_ALIVE);
    process.start++;
    assert_int_equal(ep_process_probe(&process), EP_PROCESS_DEAD);
    process.start--;
    make_zombie(&child);
    assert_int_equal(ep_process_probe(&process), EP_PROCESS_DEAD);
    waitpid(child.pid, NULL, 0);
    assert_int_equal(ep_process_probe(&process), EP_PROCESS_DEAD);
}

/* A program that closes our pidfd: its number then belongs to a file, which is readable. */
TEST(a_closed_pidfd_is_ignored)
{
    struct child child = start(0);
    struct ep_process process;
    int other;

    assert_int_equal(ep_process_open(&child.id, &process), EP_OK);
    assert_true(process.pidfd > 2);
    close(process.pidfd);
    assert_int_equal(ep_process_probe(&process), EP_PROCESS_ALIVE); /* by its PID */
    other = open("/dev/null", O_RDONLY);
    assert_int_equal(dup2(other, process.pidfd), process.pidfd);
    assert_int_equal(ep_process_probe(&process), EP_PROCESS_ALIVE);
    process.pid = 0;
    assert_int_equal(ep_process_probe(&process), EP_PROCESS_UNKNOWN);
    close(other);
    close(process.pidfd);
    kill(child.pid, SIGKILL);
    waitpid(child.pid, NULL, 0);
}

/* RLIMIT_NOFILE lowered after creation: poll() then fails. */
TEST(the_pidfd_of_another_process_is_no_death)
{
    struct child child = start(0), ended = start(0);
    struct stat ours, theirs;
    struct ep_process process;
    int other = (int)syscall(SYS_pidfd_open, ended.pid, 0);

    assert_int_equal(ep_process_open(&child.id, &process), EP_OK);
    if (other < 0 || process.pidfd < 0 || fstat(other, &theirs) != 0 || fstat(process.pidfd, &ours) != 0 ||
        theirs.st_ino == ours.st_ino) {
        print_message("SKIP: Linux before 6.9 does not tell pidfds apart\n");
        skip();
    }
    make_zombie(&ended);
    assert_int_equal(dup2(other, process.pidfd), process.pidfd);
    assert_int_equal(ep_process_probe(&process), EP_PROCESS_ALIVE);
    kill(child.pid, SIGKILL);
    waitpid(child.pid, NULL, 0);
    waitpid(ended.pid, NULL, 0);
    assert_int_equal(ep_process_probe(&process), EP_PROCESS_DEAD);
    ep_process_close(&process);
    assert_true(fcntl(other, F_GETFD) >= 0);
    close(other);
}

TEST(no_descriptor_is_allowed_any_more)
{
    struct child child = start(0);
    struct ep_process process;
    struct rlimit old, none;
    enum ep_process_state living, dead;

    assert_int_equal(ep_process_open(&child.id, &process), EP_OK);
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &old), 0);
    none = old;
    none.rlim_cur = 0;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &none), 0);
    living = ep_process_probe(&process);
    make_zombie(&child);
    waitpid(child.pid, NULL, 0);
    dead = ep_process_probe(&process);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &old), 0);
    assert_int_not_equal(living, EP_PROCESS_DEAD);
    assert_int_equal(dead, EP_PROCESS_DEAD);
    ep_process_close(&process);
}

static int works_without_pidfd(void *argument)
{
    struct child *child = argument;

    if (!sandbox_forbid_pidfd(ENOSYS))
        return 77;
    if (ep_process_probe_once(&child->id) != EP_PROCESS_ALIVE)
        return 1;
    kill(child->pid, SIGKILL);
    for (int tries = 0; tries < 1000 && ep_process_probe_once(&child->id) == EP_PROCESS_ALIVE; tries++)
        usleep(10000);
    return ep_process_probe_once(&child->id) == EP_PROCESS_DEAD ? 0 : 2;
}

TEST(a_kernel_without_pidfd)
{
    struct child child = start(0);
    int result = sandbox_run(works_without_pidfd, &child);

    kill(child.pid, SIGKILL);
    waitpid(child.pid, NULL, 0);
    sandbox_expect(result);
}

/* Another user with hidepid: /proc has no such process, but it is alive. */
static int pidfd_works_with_hidepid(void *argument)
{
    struct child *child = argument;

    if (!sandbox_hide_proc() || !sandbox_forbid_pidfd(EPERM))
        return 77;
    if (setgid(65534) != 0 || setuid(65534) != 0)
        return 77;
    /* Without pidfd and /proc the state is unknown, not dead. */
    return ep_process_probe_once(&child->id) == EP_PROCESS_UNKNOWN ? 0 : 1;
}

static int unknown_without_proc(void *argument)
{
    struct child *child = argument;

    if (!sandbox_cover_proc())
        return 77;
    return ep_process_probe_once(&child->id) == EP_PROCESS_UNKNOWN ? 0 : 1;
}

TEST(a_hidden_proc_is_no_death)
{
    struct child child = start(0);
    int hidden = sandbox_run(pidfd_works_with_hidepid, &child), covered = sandbox_run(unknown_without_proc, &child);

    kill(child.pid, SIGKILL);
    waitpid(child.pid, NULL, 0);
    sandbox_expect(hidden);
    sandbox_expect(covered);
}

/* In another PID namespace the PID belongs to another process, or to none. */
static int is_invisible(void *argument)
{
    int fds[2];
    struct ep_process_id id;
    pid_t pid;

    (void)argument;
    if (unshare(CLONE_NEWPID) != 0 || pipe(fds) != 0)
        return 77;
    pid = fork();
    if (pid == 0) {
        send_id(fds[1]);
        for (;;)
            pause();
    }
    if (read(fds[0], &id, sizeof(id)) != (ssize_t)sizeof(id))
        return 2;
    if (id.pid != 1 || ep_process_probe_once(&id) != EP_PROCESS_UNKNOWN)
        return 1;
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    return ep_process_probe_once(&id) == EP_PROCESS_UNKNOWN ? 0 : 3;
}

TEST_CALL(another_pid_namespace_is_no_death, sandbox_expect(sandbox_run(is_invisible, NULL)))

static int has_own_number(void *argument)
{
    struct ep_process_id *parent = argument, own;

    ep_process_get_self(&own);
    return own.key != parent->key && ep_process_generation() != 0 ? 0 : 1;
}

TEST(a_child_is_another_process)
{
    uint64_t generation = ep_process_generation();
    struct ep_process_id own, again;
    pid_t pid;
    int how;

    ep_process_get_self(&own);
    ep_process_get_self(&again);
    assert_int_equal(own.key, again.key);
    assert_int_equal(own.pid, getpid());
    assert_int_equal(generation, ep_process_generation());
    assert_int_equal(sandbox_run(has_own_number, &own), 0);
    /* Without the C library's handlers. */
    pid = (pid_t)syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, NULL);
    if (pid == 0)
        _exit(ep_process_generation() == generation ? 1 : 0);
    assert_int_equal(waitpid(pid, &how, 0), pid);
    assert_int_equal(how, 0);
}
