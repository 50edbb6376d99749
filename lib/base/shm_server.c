/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Descriptors of segments over a socket, if /proc does not show those of the owner: each process has one thread that
 * replies to requests with a descriptor (SCM_RIGHTS). Datagrams, so that a peer that is stopped
 * between two steps of a request delays no other one. The socket has an abstract name: nothing remains in the file
 * system.
 */
#include "base/clock.h"
#include "base/fd.h"
#include "base/segments.h"
#include "base/thread.h"

#include <poll.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/un.h>

#define SLICE_MS 20
/* A program may close all descriptors, including the socket: the thread checks this often whether it must end. */
#define RECEIVE_SECONDS 1

/* Requests are repeated, because only sendto() detects that the owner has ended. */
#define REPEAT_MS 200

struct request {
    unsigned char secret[16];
    uint64_t nonce;
    uint64_t serial; /* 0: a pidfd of the process itself */
};

struct reply {
    uint64_t nonce;
    int32_t error; /* errno; 0: a descriptor is attached. ENOENT: released */
    int32_t unused;
};

struct server {
    struct ep_process_own own; /* threads do not survive a fork */
    pthread_t thread;
    struct ep_shm_address address;
    int socket, users; /* socket: valid while there are users */
    _Atomic bool is_ending;
};

static _Atomic(struct ep_process_own *) current;

static socklen_t make_name(const char name[24], struct sockaddr_un *ret_address)
{
    memset(ret_address, 0, sizeof(*ret_address));
    ret_address->sun_family = AF_UNIX;
    memcpy(ret_address->sun_path + 1, name, 23);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + 23);
}

/* A message with at most one descriptor. */
union control {
    struct cmsghdr head;
    char bytes[CMSG_SPACE(sizeof(int))];
};

/* --- the thread -------------------------------------------------------------------------------------------------- */

static bool send_reply(int socket, const struct sockaddr_un *to, socklen_t to_bytes, struct reply *reply, int fd)
{
    union control control = {.bytes = {0}};
    struct iovec data = {.iov_base = reply, .iov_len = sizeof(*reply)};
    struct msghdr message = {
        .msg_name = (void *)(uintptr_t)to, .msg_namelen = to_bytes, .msg_iov = &data, .msg_iovlen = 1};

    if (fd >= 0) {
        message.msg_control = control.bytes;
        message.msg_controllen = sizeof(control.bytes);
        control.head =
            (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
        memcpy(CMSG_DATA(&control.head), &fd, sizeof(fd));
    }
    return sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0;
}

static void handle_request(const struct server *server, const struct request *request, const struct sockaddr_un *from,
                           socklen_t from_bytes)
{
    struct reply reply = {.nonce = request->nonce};
    int fd;

    if (memcmp(request->secret, server->address.secret, sizeof(request->secret)) != 0)
        return;
    errno = ENOENT;
    fd = request->serial ? ep_segments_dup(request->serial) : (int)syscall(SYS_pidfd_open, getpid(), 0);
    reply.error = fd >= 0 ? 0 : errno;
    if (!send_reply(server->socket, from, from_bytes, &reply, fd) && fd >= 0) {
        /* Too many descriptors in flight (ETOOMANYREFS): send the reason without one. */
        reply.error = errno;
        send_reply(server->socket, from, from_bytes, &reply, -1);
    }
    if (fd >= 0)
        close(fd);
}

/* Transient: the next receive may succeed. */
static bool is_passing(int error)
{
    return error == EINTR || error == EAGAIN || error == ENOMEM || error == ENOBUFS;
}

static void *server_main(void *context)
{
    struct server *server = context;

    for (;;) {
        struct sockaddr_un from;
        socklen_t from_bytes = sizeof(from);
        struct request request;
        ssize_t got;

        if (!ep_fd_is_ours(server->socket))
            return NULL;
        got = recvfrom(server->socket, &request, sizeof(request), 0, (struct sockaddr *)&from, &from_bytes);
        if (atomic_load(&server->is_ending) || (got < 0 && !is_passing(errno)))
            return NULL;
        /* Any process in the network namespace may send other data, or an empty datagram. */
        if (got == (ssize_t)sizeof(request))
            handle_request(server, &request, &from, from_bytes);
    }
}

static ep_status open_socket(struct server *server)
{
    static const struct timeval limit = {.tv_sec = RECEIVE_SECONDS};
    struct sockaddr_un address;
    uint64_t random;
    socklen_t bytes;

    server->socket = -1;
    if (getrandom(server->address.secret, sizeof(server->address.secret), 0) !=
            (ssize_t)sizeof(server->address.secret) ||
        getrandom(&random, sizeof(random), 0) != (ssize_t)sizeof(random))
        return ep_fail_errno(EP_E_SYSTEM, errno, "shared memory: getrandom");
    snprintf(server->address.name, sizeof(server->address.name), "epkit-%016llx", (unsigned long long)random);
    server->socket = ep_fd_above_stdio(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    if (server->socket < 0)
        return ep_fail_errno(EP_E_SYSTEM, errno, "shared memory: a socket for requests of segments");
    bytes = make_name(server->address.name, &address);
    if (bind(server->socket, (struct sockaddr *)&address, bytes) != 0)
        return ep_fail_errno(EP_E_SYSTEM, errno, "shared memory: binding the socket for requests of segments");
    if (setsockopt(server->socket, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)) != 0)
        return ep_fail_errno(EP_E_SYSTEM, errno, "shared memory: SO_RCVTIMEO of the socket for requests of segments");
    return EP_OK;
}

static void stop(struct server *server)
{
    ep_fd_close(server->socket);
    memset(&server->address, 0, sizeof(server->address));
}

ep_status ep_shm_serve(struct ep_shm_address *ret_address)
{
    struct server *server = ep_process_get_own(&current, sizeof(*server), NULL);
    ep_status status = EP_OK;
    int error = 0;

    if (!server)
        return ep_fail(EP_E_MEMORY, "shared memory: no memory for the thread that sends segments");
    pthread_mutex_lock(&server->own.lock);
    if (!server->users) {
        atomic_store(&server->is_ending, false);
        status = open_socket(server);
        if (status == EP_OK && (error = ep_thread_start(&server->thread, server_main, server)) != 0)
            status = ep_fail_errno(EP_E_SYSTEM, error, "shared memory: a thread to send segments");
        if (status != EP_OK)
            stop(server);
    }
    if (status == EP_OK) {
        server->users++;
        *ret_address = server->address;
    }
    pthread_mutex_unlock(&server->own.lock);
    return status;
}

void ep_shm_serve_end(void)
{
    struct server *server = ep_process_get_own(&current, sizeof(*server), NULL);

    if (!server)
        return;
    pthread_mutex_lock(&server->own.lock);
    if (server->users && --server->users == 0) {
        atomic_store(&server->is_ending, true);
        /* Otherwise the thread ends after RECEIVE_SECONDS. */
        if (ep_fd_is_ours(server->socket))
            shutdown(server->socket, SHUT_RDWR);
        pthread_join(server->thread, NULL);
        stop(server);
    }
    pthread_mutex_unlock(&server->own.lock);
}

/* --- requests ---------------------------------------------------------------------------------------------------- */

/* Receives one reply. 0: none yet; -1: out of descriptors here; 1: *ret_reply and *ret_fd (-1: none). */
static int receive_reply(int socket, uint64_t nonce, struct reply *ret_reply, int *ret_fd)
{
    union control control;
    struct iovec data = {.iov_base = ret_reply, .iov_len = sizeof(*ret_reply)};
    /* Without the padding, which has room for a second descriptor that would never be closed. */
    struct msghdr message = {
        .msg_iov = &data, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = CMSG_LEN(sizeof(int))};
    ssize_t got = recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    const struct cmsghdr *head = got >= 0 ? CMSG_FIRSTHDR(&message) : NULL;

    *ret_fd = -1;
    if (head && head->cmsg_type == SCM_RIGHTS && head->cmsg_len >= CMSG_LEN(sizeof(int)))
        memcpy(ret_fd, CMSG_DATA(head), sizeof(*ret_fd));
    if (got != (ssize_t)sizeof(*ret_reply) || ret_reply->nonce != nonce) {
        if (*ret_fd >= 0)
            close(*ret_fd);
        return 0;
    }
    *ret_fd = ep_fd_above_stdio(*ret_fd);
    /* Without a free descriptor the kernel returns no error: it drops the attached one. */
    return ret_reply->error == 0 && *ret_fd < 0 ? -1 : 1;
}

static ep_status fail_unreachable(int error)
{
    return ep_fail_errno(EP_E_UNSUPPORTED, error,
                         "shared memory: the peer's socket cannot be reached: it has ended, or has another network "
                         "namespace; ranks of a node must share the PID or the network namespace");
}

static ep_status send_request(int socket, const struct ep_shm_address *address, uint64_t serial, int timeout_ms,
                              struct reply *ret_reply, int *ret_fd)
{
    struct request request = {.serial = serial};
    uint64_t deadline_ns = ep_deadline_ns(timeout_ms);
    struct sockaddr_un to;
    socklen_t to_bytes = make_name(address->name, &to);
    uint64_t next_ns = 0;

    memcpy(request.secret, address->secret, sizeof(request.secret));
    if (getrandom(&request.nonce, sizeof(request.nonce), GRND_NONBLOCK) < 0)
        request.nonce = deadline_ns;
    do {
        struct pollfd ready = {.fd = socket, .events = POLLIN};
        bool due = ep_now_ns() >= next_ns;
        int got;

        if (due && sendto(socket, &request, sizeof(request), MSG_DONTWAIT | MSG_NOSIGNAL, (struct sockaddr *)&to,
                          to_bytes) == (ssize_t)sizeof(request))
            next_ns = ep_deadline_ns(REPEAT_MS);
        else if (due && errno != EAGAIN && errno != EINTR && errno != ENOBUFS)
            return fail_unreachable(errno);
        poll(&ready, 1, SLICE_MS);
        got = receive_reply(socket, request.nonce, ret_reply, ret_fd);
        if (got < 0)
            return ep_fail_errno(EP_E_SYSTEM, EMFILE, "shared memory of a peer");
        if (got > 0)
            return EP_OK;
    } while (ep_now_ns() < deadline_ns);
    return ep_fail(EP_E_TIMEOUT, "shared memory: the owner did not send its segment within %d ms", timeout_ms);
}

ep_status ep_shm_request(const struct ep_shm_owner *owner, uint64_t serial, int *ret_fd)
{
    const struct ep_shm_address *address = owner->address;
    struct sockaddr_un own = {.sun_family = AF_UNIX};
    static const struct ep_shm_address none;
    struct reply reply = {.nonce = 0};
    ep_status status;
    int fd;

    if (memcmp(address, &none, sizeof(none)) == 0)
        return ep_fail(EP_E_UNSUPPORTED, "shared memory: the owner does not send its segments over a socket");
    fd = ep_fd_above_stdio(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    if (fd < 0)
        return ep_fail_errno(EP_E_SYSTEM, errno, "shared memory: a socket to request a segment of a peer");
    /* Only the family: the kernel assigns a name for the reply. */
    if (bind(fd, (struct sockaddr *)&own, sizeof(own.sun_family)) != 0)
        status = ep_fail_errno(EP_E_SYSTEM, errno, "shared memory: binding a socket to request a segment of a peer");
    else
        status = send_request(fd, address, serial, owner->timeout_ms, &reply, ret_fd);
    close(fd);
    if (owner->ret_at_owner)
        *owner->ret_at_owner = status == EP_OK && reply.error;
    if (status == EP_OK && reply.error == ENOENT)
        return ep_fail(EP_E_STATE, "shared memory: the owner has released the segment");
    /* For a pidfd: an old kernel, or a seccomp filter. */
    if (status == EP_OK && (reply.error == ENOSYS || reply.error == EPERM))
        return ep_fail_errno(EP_E_UNSUPPORTED, reply.error, "shared memory: the owner cannot send a pidfd");
    if (status == EP_OK && reply.error)
        return ep_fail_errno(EP_E_SYSTEM, reply.error, "shared memory: the owner cannot send its segment");
    return status;
}

ep_status ep_shm_request_pidfd(const struct ep_shm_owner *owner, int *ret_fd)
{
    *ret_fd = -1;
    return ep_shm_request(owner, 0, ret_fd);
}
