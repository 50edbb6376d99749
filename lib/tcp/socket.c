/* SPDX-License-Identifier: Apache-2.0 */
#include "tcp/socket.h"

#include "base/clock.h"
#include "base/fd.h"

#include <arpa/inet.h>
#include <epkit/types.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/*
 * All ranks of a large job connect at the same time. The kernel limits it to net.core.somaxconn. Each connection that
 * is not accepted yet may hold a full receive buffer.
 */
#define BACKLOG EP_MAX_RANKS

static int open_socket(int family)
{
    return ep_fd_above_stdio(socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

static int bind_to(int fd, const struct tcp_address *address)
{
    struct sockaddr_storage storage;
    socklen_t bytes = tcp_address_to_socket(address, &storage);

    return bind(fd, (struct sockaddr *)&storage, bytes);
}

struct tcp_address tcp_local_address(int fd)
{
    struct sockaddr_storage storage = {0};
    struct tcp_address address = {0};
    socklen_t bytes = sizeof(storage);

    if (getsockname(fd, (struct sockaddr *)&storage, &bytes) == 0)
        tcp_address_from_socket(&storage, &address);
    return address;
}

/* --- interfaces --- */

/* Does one of the comma-separated words match? "=name" is the exact name, others are prefixes. */
static bool names_interface(const char *words, const char *name)
{
    for (const char *at = words; *at;) {
        size_t n = strcspn(at, ",");
        bool whole = *at == '=';
        const char *word = at + whole;
        size_t bytes = n - whole;

        if (bytes && strncmp(name, word, bytes) == 0 && (!whole || !name[bytes]))
            return true;
        at += n + (at[n] == ',');
    }
    return false;
}

enum { WANTED, SECOND_CHOICE, LINK_LOCAL, UNWANTED };

/* Second choice: container bridges reach this host only. */
static int rank_interface(const struct ifaddrs *entry, const char *wanted, const struct tcp_address *address)
{
    bool all_but = wanted && *wanted == '^', named = wanted && names_interface(wanted + all_but, entry->ifa_name);

    if (!(entry->ifa_flags & IFF_UP) || (wanted && named == all_but))
        return UNWANTED;
    if (tcp_address_is_link_local(address))
        return wanted ? LINK_LOCAL : UNWANTED; /* not unique without its interface */
    if (wanted && !all_but)
        return WANTED;
    return (entry->ifa_flags & IFF_LOOPBACK) || names_interface("docker,virbr,cni,veth", entry->ifa_name)
               ? SECOND_CHOICE
               : WANTED;
}

static bool has_address(const struct ifaddrs *entry, const struct tcp_address *address)
{
    struct tcp_address own;

    return entry->ifa_addr && tcp_address_from_socket(entry->ifa_addr, &own) && tcp_address_same_host(&own, address);
}

static void add_interfaces(const struct ifaddrs *list, const char *wanted, int rank, struct tcp_address *ret_addresses,
                           int *n)
{
    for (; list && *n < TCP_ADDRESSES; list = list->ifa_next) {
        struct tcp_address address;

        if (list->ifa_addr && tcp_address_from_socket(list->ifa_addr, &address) &&
            rank_interface(list, wanted, &address) == rank)
            ret_addresses[(*n)++] = address;
    }
}

/* bind() also accepts addresses of all interfaces and of groups of hosts (0.0.0.0, multicast). */
static bool is_of_one_host(const struct tcp_address *address)
{
    in_addr_t four;

    if (address->family == AF_INET6)
        return !IN6_IS_ADDR_UNSPECIFIED(address->bytes) && !IN6_IS_ADDR_MULTICAST(address->bytes);
    memcpy(&four, address->bytes, sizeof(four));
    four = ntohl(four);
    return four != INADDR_ANY && four != INADDR_BROADCAST && !IN_MULTICAST(four);
}

/* A connection can start only at an address of this host. Tested by bind(): 127.0.0.2 is in no list of interfaces. */
static ep_status check_local(const struct tcp_address *address)
{
    char text[TCP_ADDRESS_TEXT];
    int fd = open_socket(address->family), error = errno;

    if (fd < 0)
        return ep_fail_errno(EP_E_SYSTEM, error, "network tcp: a socket to check the address of an interface");
    error = bind_to(fd, address) == 0 ? 0 : errno;
    close(fd);
    inet_ntop(address->family, address->bytes, text, sizeof(text));
    /* EINVAL: a link-local address, which is complete only with its interface. */
    if (error == EADDRNOTAVAIL || error == EINVAL || (!error && !is_of_one_host(address)))
        return ep_fail(EP_E_ARG,
                       "network tcp: %s, given for the connections between ranks, is not one of this host's addresses "
                       "that are up: name the interface (\"eth0\"), or give each host its own address",
                       text);
    return error ? ep_fail_errno(EP_E_SYSTEM, error, "network tcp: a socket at %s", text) : EP_OK;
}

bool tcp_is_of_other_host(const struct tcp_address *address)
{
    struct tcp_address any_port = *address;
    int fd = open_socket(address->family);
    bool other;

    any_port.port = 0; /* its own may be in use */
    other = fd >= 0 && bind_to(fd, &any_port) != 0 && errno == EADDRNOTAVAIL;
    if (fd >= 0)
        close(fd);
    return other;
}

bool tcp_find_route(const struct tcp_address *to, struct tcp_address *ret_local)
{
    struct sockaddr_storage storage;
    socklen_t bytes = tcp_address_to_socket(to, &storage);
    int fd = ep_fd_above_stdio(socket(to->family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    bool found = fd >= 0 && connect(fd, (struct sockaddr *)&storage, bytes) == 0; /* of datagrams: sends nothing */

    if (found)
        *ret_local = tcp_local_address(fd);
    if (fd >= 0)
        close(fd);
    return found && ret_local->family == to->family;
}

/* Moves or adds it to the front, if it is an address of a wanted interface. */
static void put_first(const struct ifaddrs *list, const char *wanted, const struct tcp_address *first,
                      struct tcp_address *addresses, int *n)
{
    int at = 0;

    while (list && !(has_address(list, first) && rank_interface(list, wanted, first) != UNWANTED))
        list = list->ifa_next;
    if (!list)
        return;
    while (at < *n && !tcp_address_same_host(&addresses[at], first))
        at++;
    if (at == *n)
        at = *n < TCP_ADDRESSES ? (*n)++ : TCP_ADDRESSES - 1;
    memmove(&addresses[1], &addresses[0], (size_t)at * sizeof(*addresses));
    addresses[0] = *first;
    addresses[0].port = 0;
}

static bool is_up_with_address(const struct ifaddrs *entry)
{
    struct tcp_address address;

    return (entry->ifa_flags & IFF_UP) && entry->ifa_addr && tcp_address_from_socket(entry->ifa_addr, &address);
}

/* An interface is in the list once for each of its addresses. */
static bool is_listed_before(const struct ifaddrs *list, const struct ifaddrs *entry)
{
    while (list != entry && !(is_up_with_address(list) && strcmp(list->ifa_name, entry->ifa_name) == 0))
        list = list->ifa_next;
    return list != entry;
}

/* No interface is wanted: names those that could be. Frees the list. */
static ep_status fail_interfaces(struct ifaddrs *list, const char *wanted)
{
    char have[128] = "none";
    size_t used = 0;

    for (const struct ifaddrs *entry = list; entry && used < sizeof(have); entry = entry->ifa_next)
        if (is_up_with_address(entry) && !is_listed_before(list, entry))
            used += (size_t)snprintf(have + used, sizeof(have) - used, "%s%s", used ? ", " : "", entry->ifa_name);
    freeifaddrs(list);
    if (!wanted)
        return ep_fail(EP_E_ARG, "network tcp: no interface that is up and has an address");
    return ep_fail(EP_E_ARG,
                   "network tcp: no interface that is up and has an address is named by \"%.64s\" (interface of "
                   "ep_boot_tcp_args, or EPKIT_TCP_INTERFACE): this host has %s",
                   wanted, have);
}

ep_status tcp_find_interfaces(const char *wanted, const struct tcp_address *first, struct tcp_address *ret_addresses,
                              int *ret_n)
{
    unsigned char number[sizeof(struct in6_addr)];
    struct ifaddrs *list = NULL;
    int n = 0;

    if (wanted && !*wanted)
        wanted = NULL;
    /* Names of interfaces may have dots (eth0.100), so only a valid address is taken as one. */
    if (wanted && (inet_pton(AF_INET, wanted, number) == 1 || inet_pton(AF_INET6, wanted, number) == 1)) {
        EP_TRY(tcp_resolve(wanted, 0, 0, ret_addresses, ret_n));
        return check_local(&ret_addresses[0]);
    }
    if (getifaddrs(&list) != 0)
        return ep_fail_errno(EP_E_SYSTEM, errno, "network tcp: the list of interfaces");
    for (int rank = WANTED; rank <= SECOND_CHOICE; rank++)
        add_interfaces(list, wanted, rank, ret_addresses, &n);
    if (n == 0)
        add_interfaces(list, wanted, LINK_LOCAL, ret_addresses, &n);
    if (wanted && first)
        put_first(list, wanted, first, ret_addresses, &n);
    if (n == 0)
        return fail_interfaces(list, wanted);
    freeifaddrs(list);
    *ret_n = n;
    return EP_OK;
}

/* --- sockets --- */

static int listen_at(const struct tcp_address *address)
{
    int fd = open_socket(address->family), on = 1, off = 0, error;

    if (fd < 0)
        return -1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (address->family == AF_INET6)
        setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
    if (bind_to(fd, address) == 0 && listen(fd, BACKLOG) == 0)
        return fd;
    error = errno;
    close(fd);
    errno = error;
    return -1;
}

ep_status tcp_listen(const struct tcp_address *address, uint16_t port, int *ret_fd, uint16_t *ret_port)
{
    struct tcp_address any = {.family = AF_INET6, .port = port};
    char text[TCP_ADDRESS_TEXT];
    int fd;

    if (address) {
        any = *address;
        any.port = port;
    }
    fd = listen_at(&any);
    if (fd < 0 && !address && errno != EADDRINUSE && errno != EMFILE && errno != ENFILE) {
        any.family = AF_INET; /* a kernel without IPv6 */
        fd = listen_at(&any);
    }
    tcp_address_print(&any, text);
    if (fd < 0)
        return ep_fail_errno(errno == EADDRINUSE || errno == EADDRNOTAVAIL ? EP_E_STATE : EP_E_SYSTEM, errno,
                             "listening at %s", text);
    *ret_port = tcp_local_address(fd).port;
    *ret_fd = fd;
    return EP_OK;
}

ep_status tcp_connect(const struct tcp_address *to, const struct tcp_address *from, int *ret_fd)
{
    struct sockaddr_storage storage;
    char text[TCP_ADDRESS_TEXT], from_text[TCP_ADDRESS_TEXT] = "";
    bool bound = from && from->family == to->family;
    socklen_t bytes = tcp_address_to_socket(to, &storage);
    int fd = open_socket(to->family), error;

    if (fd >= 0 && bound) {
        struct tcp_address local = *from;

        local.port = 0;
        tcp_address_print(&local, from_text);
        (void)bind_to(fd, &local);
    }
    if (fd >= 0 && (connect(fd, (struct sockaddr *)&storage, bytes) == 0 || errno == EINPROGRESS || errno == EINTR)) {
        *ret_fd = fd;
        return EP_OK;
    }
    error = errno;
    if (fd >= 0)
        close(fd);
    tcp_address_print(to, text);
    (void)ep_fail_errno(EP_E_SYSTEM, error, "%s %s%s%s%s", fd < 0 ? "a socket for" : "connecting to", text,
                        *from_text ? " from " : "", from_text,
                        *from_text ? ", the address of the chosen interface" : "");
    errno = error;
    return EP_E_SYSTEM;
}

bool tcp_is_exhausted(int error_number)
{
    return error_number == EMFILE || error_number == ENFILE || error_number == ENOBUFS || error_number == ENOMEM;
}

int tcp_connect_error(int fd)
{
    int error = 0;
    socklen_t bytes = sizeof(error);

    return getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &bytes) == 0 ? error : errno;
}

int tcp_accept(int listener, struct tcp_address *ret_from)
{
    struct sockaddr_storage storage = {0};
    socklen_t bytes = sizeof(storage);
    int fd = accept4(listener, (struct sockaddr *)&storage, &bytes, SOCK_NONBLOCK | SOCK_CLOEXEC);

    if (fd < 0)
        return -1;
    *ret_from = (struct tcp_address){0};
    tcp_address_from_socket(&storage, ret_from);
    return ep_fd_above_stdio(fd);
}

int tcp_receive(int fd, void *message, size_t bytes, size_t *used)
{
    while (*used < bytes) {
        ssize_t n = recv(fd, (char *)message + *used, bytes - *used, MSG_DONTWAIT);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return 0;
        errno = n < 0 ? errno : 0;
        if (n <= 0)
            return -1;
        *used += (size_t)n;
    }
    return 1;
}

int tcp_send(int fd, struct iovec *pieces, int n)
{
    struct msghdr message = {.msg_iov = pieces, .msg_iovlen = (size_t)n};

    for (;;) {
        size_t left = 0;
        ssize_t sent;

        for (int i = 0; i < n; i++)
            left += pieces[i].iov_len;
        if (left == 0)
            return 1;
        sent = sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent < 0)
            return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : -1;
        left = (size_t)sent;
        for (int i = 0; i < n; i++) {
            size_t taken = left < pieces[i].iov_len ? left : pieces[i].iov_len;

            if (taken == 0) /* an empty piece may have no address to count from */
                continue;
            pieces[i].iov_base = (char *)pieces[i].iov_base + taken;
            pieces[i].iov_len -= taken;
            left -= taken;
        }
    }
}

void tcp_make_printable(char *text, size_t bytes)
{
    text[bytes - 1] = '\0';
    for (char *at = text; *at; at++)
        *at = *at < ' ' || *at > '~' ? '?' : *at;
}

/*
 * All ranks connect at the same time and become idle at the same time. With equal keepalive times the probes of a large
 * job are sent in one burst, and again with each repetition: queues on the path overflow, the same connections lose all
 * of their probes, and the kernel ends them although both ranks are alive.
 */
static void spread_probes(int fd, int *ret_idle_s, int *ret_interval_s)
{
    uint64_t random = (ep_now_ns() ^ (uint64_t)(unsigned)fd << 32) * UINT64_C(0x9e3779b97f4a7c15);

    random = (random ^ random >> 32) * UINT64_C(0x9e3779b97f4a7c15);
    *ret_idle_s = 8 + (int)(random >> 61);
    *ret_interval_s = 4 + (int)(random >> 59 & 3);
}

void tcp_set_options(int fd, int timeout_ms)
{
    unsigned limit = (unsigned)timeout_ms;
    int on = 1, idle_s, interval_s, probes = 5;

    spread_probes(fd, &idle_s, &interval_s);

    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
    /* The kernel's default is two hours. */
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof(idle_s));
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof(interval_s));
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof(probes));
    if (timeout_ms > 0)
        setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &limit, sizeof(limit));
}
