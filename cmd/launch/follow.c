/* SPDX-License-Identifier: Apache-2.0 */
#include "follow.h"

#include "base/clock.h"
#include "common/dir.h"
#include "common/text.h"

#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define LOST_S 120 /* an agent sends a heartbeat every five seconds; another agent may take over */
#define POLL_MS 1000
#define PREFIX "epkit-follow-"
#define RANDOM_BYTES 7

struct message {
    int word, code;
};

/*
 * Pods may share the network, and so these addresses, with each other and with users of the host: the name contains the
 * pod's mount namespace, and random characters, so that others cannot take it before.
 */
static socklen_t make_address(const char *random, struct sockaddr_un *ret_address)
{
    char pod[40] = "";

    if (readlink("/proc/self/ns/mnt", pod, sizeof(pod) - 1) < 0)
        pod[0] = '\0';
    *ret_address = (struct sockaddr_un){.sun_family = AF_UNIX};
    snprintf(ret_address->sun_path + 1, sizeof(ret_address->sun_path) - 1, PREFIX "%u-%s-%s", (unsigned)geteuid(), pod,
             random);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(ret_address->sun_path + 1));
}

/* To all addresses of this form that there are: others can only add to them. */
bool follow_send(enum follow_event word, int code)
{
    struct message message = {.word = (int)word, .code = code};
    struct sockaddr_un address, named; /* named: what comes before the random part */
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    FILE *sockets = fd < 0 ? NULL : fopen("/proc/net/unix", "re");
    char line[512], random[RANDOM_BYTES], *at;
    bool is_told = false;
    socklen_t length;

    (void)make_address("", &named);
    while (sockets && fgets(line, sizeof(line), sockets)) {
        at = strstr(line, "@" PREFIX);
        if (!at || !text_begins(at + 1, named.sun_path + 1) ||
            sscanf(at + 1 + strlen(named.sun_path + 1), "%6[a-zA-Z0-9]", random) != 1)
            continue;
        length = make_address(random, &address);
        is_told |= sendto(fd, &message, sizeof(message), MSG_NOSIGNAL, (struct sockaddr *)&address, length) > 0;
    }
    if (sockets)
        fclose(sockets);
    if (fd >= 0)
        close(fd);
    return is_told;
}

/* Accepts only messages of this user: abstract addresses have no permissions. */
static bool receive(int fd, struct message *ret_message)
{
    char space[CMSG_SPACE(sizeof(struct ucred))];
    struct iovec part = {.iov_base = ret_message, .iov_len = sizeof(*ret_message)};
    struct msghdr header = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof(space)};
    struct cmsghdr *control;
    struct ucred peer;

    if (recvmsg(fd, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC) != sizeof(*ret_message))
        return false;
    control = CMSG_FIRSTHDR(&header);
    if (!control || control->cmsg_type != SCM_CREDENTIALS)
        return false;
    memcpy(&peer, CMSG_DATA(control), sizeof(peer));
    return peer.uid == geteuid();
}

static int listen_here(void)
{
    char random[RANDOM_BYTES] = "XXXXXX";
    struct sockaddr_un address;
    socklen_t length;
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0), on = 1;

    dir_random(random);
    length = make_address(random, &address);
    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_PASSCRED, &on, sizeof(on)) != 0 ||
        bind(fd, (struct sockaddr *)&address, length) != 0) {
        int number = errno;

        if (fd >= 0)
            close(fd);
        errno = number;
        return -1;
    }
    return fd;
}

int follow_wait(int64_t begin_s, int64_t deadline_s, char *ret_why, size_t bytes)
{
    uint64_t began_ns = ep_now_ns(), heard_ns = 0;
    struct pollfd ready = {.fd = listen_here(), .events = POLLIN};
    struct message message;

    ret_why[0] = '\0';
    if (ready.fd < 0) {
        snprintf(ret_why, bytes, "waiting for the launch: %s", strerror(errno));
        return 1;
    }
    while (!*ret_why) {
        uint64_t now_ns;

        if (poll(&ready, 1, POLL_MS) > 0 && receive(ready.fd, &message)) {
            heard_ns = ep_now_ns();
            if (message.word == FOLLOW_END) {
                close(ready.fd);
                return message.code;
            }
        }
        now_ns = ep_now_ns();
        if (!heard_ns && now_ns > began_ns + (uint64_t)begin_s * 1000000000u)
            snprintf(ret_why, bytes, "the first pod did not start the launch within %lld s", (long long)begin_s);
        else if (heard_ns && now_ns > heard_ns + LOST_S * UINT64_C(1000000000))
            snprintf(ret_why, bytes, "no message from the launch for %d s", LOST_S);
        else if (deadline_s && now_ns > began_ns + (uint64_t)(begin_s + deadline_s) * 1000000000u)
            snprintf(ret_why, bytes, "the launch did not end within %lld s", (long long)deadline_s);
    }
    close(ready.fd);
    return 1;
}
