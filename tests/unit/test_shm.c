/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A segment of a peer is mapped only if accesses cannot fail: it has the size in its name, and its owner cannot
 * truncate it. With both ways to get the descriptor. The names are of this process with another key, so that its own
 * mapping is not used. No call waits for an owner that has ended.
 */
#include "unit.h"

#include "base/shm.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

enum way { BY_PROC, BY_SOCKET, WAYS };

enum { BYTES = 3 * 4096 };

struct route {
    struct ep_shm_address address;
    struct ep_shm_owner owner;
};

/* The segments of a process, for another one. */
struct offer {
    struct ep_shm_name name;
    struct ep_shm_address address;
};

static void open_route(struct route *route, enum way way)
{
    *route = (struct route){.owner = {.timeout_ms = 60000}};
    if (way == BY_PROC) {
        route->owner.pid = (int32_t)getpid();
        return;
    }
    assert_int_equal(ep_shm_serve(&route->address), EP_OK);
    route->owner.address = &route->address;
}

static void close_route(struct route *route)
{
    if (route->owner.address)
        ep_shm_serve_end();
}

TEST(a_longer_name_than_segment_is_refused)
{
    static const uint64_t too_long[] = {BYTES + 1, INT64_MAX, (uint64_t)INT64_MAX + 1, UINT64_MAX};
    struct ep_shm own, seen = {.fd = -1};
    struct ep_shm_name name;

    assert_int_equal(ep_shm_new(BYTES, &own), EP_OK);
    assert_int_equal(ep_shm_get_name(&own, &name), EP_OK);
    strcpy(own.base, "here");
    for (size_t i = 0; i < sizeof(too_long) / sizeof(too_long[0]); i++) {
        struct ep_shm_name bad = name;

        bad.bytes = too_long[i];
        assert_int_equal(ep_shm_attach(&bad, NULL, &seen), EP_E_MISMATCH); /* shares the mapping of this process */
    }
    name.process ^= 1;
    for (int way = 0; way < WAYS; way++) {
        struct route route;

        open_route(&route, (enum way)way);
        for (size_t i = 0; i < sizeof(too_long) / sizeof(too_long[0]); i++) {
            struct ep_shm_name bad = name;

            bad.bytes = too_long[i];
            assert_fails(ep_shm_attach(&bad, &route.owner, &seen), EP_E_MISMATCH, "but its owner says");
        }
        assert_int_equal(ep_shm_attach(&name, &route.owner, &seen), EP_OK);
        assert_ptr_not_equal(seen.base, own.base);
        assert_string_equal(seen.base, "here");
        ep_shm_done(&seen);
        close_route(&route);
    }
    ep_shm_done(&own);
}

TEST(a_segment_that_may_shrink_is_refused)
{
    int fd = memfd_create("epkit", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    struct ep_shm seen = {.fd = -1};
    struct ep_shm_name name = {.process = 1, .pid = (int32_t)getpid(), .fd = fd, .serial = 1, .bytes = BYTES};
    struct stat info;

    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, BYTES), 0);
    assert_int_equal(fstat(fd, &info), 0);
    name.inode = (uint64_t)info.st_ino;
    for (int sealed = 0; sealed < 2; sealed++) {
        assert_int_equal(ep_shm_attach(&name, NULL, &seen), sealed ? EP_OK : EP_E_MISMATCH);
        if (!sealed)
            assert_non_null(strstr(ep_last_error(), "that can be truncated"));
        ep_shm_done(&seen);
        assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
    }
    close(fd);
}

/* Starts the thread for its segment, and stops before it can reply. */
static void start_server_and_stop(struct offer *offer)
{
    struct ep_shm own;

    if (ep_shm_new(BYTES, &own) != EP_OK || ep_shm_get_name(&own, &offer->name) != EP_OK ||
        ep_shm_serve(&offer->address) != EP_OK)
        _exit(1);
    raise(SIGSTOP);
    _exit(0);
}

/* An owner that has offered its segment, and has stopped. */
static pid_t fork_owner(void (*run)(struct offer *offer), struct offer *offer)
{
    pid_t pid = fork();
    int how;

    if (pid == 0)
        run(offer);
    assert_int_equal(waitpid(pid, &how, WUNTRACED), pid);
    assert_true(WIFSTOPPED(how));
    return pid;
}

static void *kill_soon(void *pid)
{
    struct timespec interval = {.tv_nsec = 300000000};

    nanosleep(&interval, NULL);
    kill(*(pid_t *)pid, SIGKILL);
    return NULL;
}

/* The owner ends while the request is in flight: no reply will arrive, and only a repeated request detects it. */
TEST(an_owner_that_ends_is_not_waited_for)
{
    struct offer *offer = mmap(NULL, sizeof(*offer), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    struct ep_shm_owner owner = {.timeout_ms = 90000};
    struct ep_shm seen = {.fd = -1};
    pthread_t killer;
    pid_t pid;
    int how;

    assert_true(offer != MAP_FAILED);
    pid = fork_owner(start_server_and_stop, offer);
    assert_int_equal(pthread_create(&killer, NULL, kill_soon, &pid), 0);
    owner.address = &offer->address;
    assert_fails(ep_shm_attach(&offer->name, &owner, &seen), EP_E_UNSUPPORTED, "it has ended");
    pthread_join(killer, NULL);
    assert_int_equal(waitpid(pid, &how, 0), pid);
    munmap(offer, sizeof(*offer));
}

/* Starts the thread for its segment, and can open no descriptor from then on. */
static void start_server_without_descriptors(struct offer *offer)
{
    struct ep_shm own;

    alarm(100);
    if (ep_shm_new(BYTES, &own) != EP_OK || ep_shm_get_name(&own, &offer->name) != EP_OK ||
        ep_shm_serve(&offer->address) != EP_OK || setrlimit(RLIMIT_NOFILE, &(struct rlimit){0, 0}) != 0)
        _exit(1);
    raise(SIGSTOP);
    for (;;)
        pause();
}

TEST(an_owner_without_descriptors_says_so)
{
    struct offer *offer = mmap(NULL, sizeof(*offer), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    struct ep_shm_owner owner = {.timeout_ms = 60000};
    struct ep_shm seen = {.fd = -1};
    bool at_owner = false;
    pid_t pid;
    int how;

    assert_true(offer != MAP_FAILED);
    pid = fork_owner(start_server_without_descriptors, offer);
    kill(pid, SIGCONT);
    owner.address = &offer->address;
    owner.ret_at_owner = &at_owner;
    assert_fails(ep_shm_attach(&offer->name, &owner, &seen), EP_E_SYSTEM, "RLIMIT_NOFILE");
    assert_true(at_owner);
    kill(pid, SIGKILL);
    assert_int_equal(waitpid(pid, &how, 0), pid);
    munmap(offer, sizeof(*offer));
}

/* --- the thread that sends segments --- */

static socklen_t name_of(const struct ep_shm_address *address, struct sockaddr_un *ret_name)
{
    *ret_name = (struct sockaddr_un){.sun_family = AF_UNIX};
    memcpy(ret_name->sun_path + 1, address->name, sizeof(address->name) - 1);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + sizeof(address->name));
}

/* Any process of the network namespace can send to the socket. */
TEST(invalid_requests_do_not_end_the_server)
{
    static const size_t lengths[] = {0, 1, 31, 33, 4000};
    static const char noise[4000];
    struct ep_shm own, seen = {.fd = -1};
    struct ep_shm_name name;
    struct sockaddr_un to;
    struct route route;
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);

    open_route(&route, BY_SOCKET);
    assert_int_equal(ep_shm_new(BYTES, &own), EP_OK);
    assert_int_equal(ep_shm_get_name(&own, &name), EP_OK);
    name.process ^= 1;
    for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++) {
        socklen_t bytes = name_of(&route.address, &to);

        assert_int_equal(sendto(fd, noise, lengths[i], 0, (struct sockaddr *)&to, bytes), lengths[i]);
        assert_int_equal(ep_shm_attach(&name, &route.owner, &seen), EP_OK);
        ep_shm_done(&seen);
    }
    close(fd);
    ep_shm_done(&own);
    close_route(&route);
}

/* As a program that becomes a daemon with closefrom(3): later calls that free objects must not wait for ever. */
TEST(the_server_ends_without_its_socket)
{
    struct sockaddr_un mine, theirs;
    struct route route;
    bool found = false;
    socklen_t bytes;
    int pidfd;

#if defined(__SANITIZE_THREAD__)
    print_message("SKIP: closing a descriptor that a thread waits on is what the sanitizer reports\n");
    skip();
#endif
    open_route(&route, BY_SOCKET);
    /* The reply has arrived: the thread now waits for the next request, or will soon. */
    assert_int_equal(
        ep_shm_request_pidfd(&(struct ep_shm_owner){.address = &route.address, .timeout_ms = 60000}, &pidfd), EP_OK);
    close(pidfd);
    usleep(100000);
    bytes = name_of(&route.address, &mine);
    for (int fd = 3; fd < 256 && !found; fd++) {
        socklen_t length = sizeof(theirs);

        memset(&theirs, 0, sizeof(theirs));
        found = getsockname(fd, (struct sockaddr *)&theirs, &length) == 0 && memcmp(&theirs, &mine, bytes) == 0;
        if (found)
            close(fd);
    }
    assert_true(found);
    close_route(&route);
    /* It can be started again. */
    open_route(&route, BY_SOCKET);
    close_route(&route);
}
