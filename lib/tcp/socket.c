/* SPDX-License-Identifier: Apache-2.0 */
#include "tcp/socket.h"

#include "base/clock.h"
#include "base/fd.h"
#include "base/futex.h"
#include "base/thread.h"

#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* All ranks of a large job connect at the same time. The kernel limits it to net.core.somaxconn. */
#define BACKLOG 4096

/* --- addresses --- */

void tcp_address_print(const struct tcp_address *address, char ret_text[TCP_ADDRESS_TEXT])
{
    char host[INET6_ADDRSTRLEN] = "";

    if (address->family != AF_INET && address->family != AF_INET6) {
        snprintf(ret_text, TCP_ADDRESS_TEXT, "an unknown address");
        return;
    }
    inet_ntop(address->family, address->bytes, host, sizeof(host));
    snprintf(ret_text, TCP_ADDRESS_TEXT, address->family == AF_INET ? "%s:%u" : "[%s]:%u", host, address->port);
}

static socklen_t to_socket(const struct tcp_address *address, struct sockaddr_storage *ret_socket)
{
    struct sockaddr_in v4 = {.sin_family = AF_INET, .sin_port = htons(address->port)};
    struct sockaddr_in6 v6 = {
        .sin6_family = AF_INET6, .sin6_port = htons(address->port), .sin6_scope_id = address->scope};

    memset(ret_socket, 0, sizeof(*ret_socket));
    if (address->family == AF_INET) {
        memcpy(&v4.sin_addr, address->bytes, sizeof(v4.sin_addr));
        memcpy(ret_socket, &v4, sizeof(v4));
        return sizeof(v4);
    }
    memcpy(&v6.sin6_addr, address->bytes, sizeof(v6.sin6_addr));
    memcpy(ret_socket, &v6, sizeof(v6));
    return sizeof(v6);
}

/* An IPv4-mapped IPv6 address, as from a dual-stack socket, is converted to IPv4. false: neither IPv4 nor IPv6. */
static bool from_socket(const void *socket_address, struct tcp_address *ret_address)
{
    struct tcp_address address = {0};
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;

    memcpy(&address.family, (const char *)socket_address + offsetof(struct sockaddr, sa_family),
           sizeof(address.family));
    if (address.family == AF_INET) {
        memcpy(&v4, socket_address, sizeof(v4));
        address.port = ntohs(v4.sin_port);
        memcpy(address.bytes, &v4.sin_addr, sizeof(v4.sin_addr));
    } else if (address.family == AF_INET6) {
        memcpy(&v6, socket_address, sizeof(v6));
        address.port = ntohs(v6.sin6_port);
        address.scope = v6.sin6_scope_id;
        if (IN6_IS_ADDR_V4MAPPED(&v6.sin6_addr)) {
            address.family = AF_INET;
            memcpy(address.bytes, &v6.sin6_addr.s6_addr[12], 4);
        } else {
            memcpy(address.bytes, &v6.sin6_addr, sizeof(v6.sin6_addr));
        }
    } else {
        return false;
    }
    *ret_address = address;
    return true;
}

bool tcp_address_is_loopback(const struct tcp_address *address)
{
    static const unsigned char v6[16] = {[15] = 1};

    return address->family == AF_INET ? address->bytes[0] == 127 : memcmp(address->bytes, v6, sizeof(v6)) == 0;
}

bool tcp_address_same_host(const struct tcp_address *a, const struct tcp_address *b)
{
    return a->family == b->family && memcmp(a->bytes, b->bytes, sizeof(a->bytes)) == 0;
}

bool tcp_address_is_link_local(const struct tcp_address *address)
{
    return address->family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(address->bytes);
}

struct tcp_address tcp_local_address(int fd)
{
    struct sockaddr_storage storage = {0};
    struct tcp_address address = {0};
    socklen_t bytes = sizeof(storage);

    if (getsockname(fd, (struct sockaddr *)&storage, &bytes) == 0)
        from_socket(&storage, &address);
    return address;
}

/* "2001:db8::1", or "fe80::1%eth0": the name of the interface is resolved later. */
static bool is_ipv6(const char *begin, const char *end)
{
    const char *scope = memchr(begin, '%', (size_t)(end - begin));
    size_t length = (size_t)((scope ? scope : end) - begin);
    char text[INET6_ADDRSTRLEN];
    struct in6_addr address;

    if (length >= sizeof(text) || (scope && scope + 1 == end))
        return false;
    memcpy(text, begin, length);
    text[length] = '\0';
    return inet_pton(AF_INET6, text, &address) == 1;
}

ep_status tcp_parse_endpoint(const char *text, char *ret_host, size_t host_bytes, uint16_t *port)
{
    const char *colon = strrchr(text, ':'), *begin = text, *end = text + strlen(text);
    char *rest;
    long value;

    if (*text == '[') {
        const char *close = strchr(text, ']');

        if (!close || (close[1] && close[1] != ':'))
            return ep_fail(EP_E_ARG, "address \"%.64s\": an IPv6 address in brackets ends with \"]\" or \"]:PORT\"",
                           text);
        begin = text + 1;
        end = close;
        colon = close[1] ? close + 1 : NULL;
    } else if (colon && strchr(text, ':') != colon) {
        colon = NULL; /* a bare IPv6 address has no port */
    } else if (colon) {
        end = colon;
    }
    if (end == begin || (size_t)(end - begin) >= host_bytes)
        return ep_fail(EP_E_ARG, "address \"%.64s\": the host is missing or too long", text);
    for (const char *at = begin; at < end; at++)
        if (*at <= ' ' || *at == 127)
            return ep_fail(EP_E_ARG, "address \"%.64s\": a host must not contain blanks or line ends", text);
    if (memchr(begin, ':', (size_t)(end - begin)) && !is_ipv6(begin, end))
        return ep_fail(EP_E_ARG,
                       "address \"%.64s\": more than one colon, but not an IPv6 address (with a port: [ADDRESS]:PORT)",
                       text);
    if (colon) {
        errno = 0;
        value = strtol(colon + 1, &rest, 10);
        if (colon[1] < '0' || colon[1] > '9' || *rest || errno || value < 1 || value > UINT16_MAX)
            return ep_fail(EP_E_ARG, "address \"%.64s\": the port is not a number in 1..65535", text);
        *port = (uint16_t)value;
    }
    memcpy(ret_host, begin, (size_t)(end - begin));
    ret_host[end - begin] = '\0';
    return EP_OK;
}

/*
 * A query of the name server, in a thread of its own: getaddrinfo() has no deadline. The last user, the thread or its
 * waiter, frees it. (glibc's getaddrinfo_a() starts threads that ThreadSanitizer cannot follow.)
 */
struct query {
    _Atomic uint32_t done; /* futex word */
    _Atomic int users;
    int code, error; /* of getaddrinfo(), and errno where the code is EAI_SYSTEM */
    struct addrinfo *list;
    struct addrinfo hints;
    char host[256], port[8];
};

static void ask(struct query *query)
{
    query->code = getaddrinfo(query->host, query->port, &query->hints, &query->list);
    query->error = errno;
    query->list = query->code == 0 ? query->list : NULL;
}

static void release(struct query *query)
{
    if (atomic_fetch_sub(&query->users, 1) != 1)
        return;
    if (query->list)
        freeaddrinfo(query->list);
    free(query);
}

static void *run_query(void *argument)
{
    struct query *query = argument;

    ask(query);
    atomic_store(&query->done, 1);
    ep_futex_wake(&query->done);
    release(query);
    return NULL;
}

/* EP_OK: done, with query->code. EP_E_TIMEOUT: the thread goes on. */
static ep_status await_query(struct query *query, uint64_t deadline_ns)
{
    pthread_t thread;
    uint64_t now;
    int error;

    atomic_fetch_add(&query->users, 1);
    error = ep_thread_start(&thread, NULL, run_query, query);
    if (error) {
        atomic_fetch_sub(&query->users, 1);
        return ep_fail_errno(EP_E_SYSTEM, error, "host name \"%.64s\": a thread for the query", query->host);
    }
    while (!atomic_load(&query->done) && (now = ep_now_ns()) < deadline_ns)
        ep_futex_wait(&query->done, 0, deadline_ns - now);
    if (atomic_load(&query->done)) {
        pthread_join(thread, NULL);
        return EP_OK;
    }
    pthread_detach(thread);
    return ep_fail(EP_E_TIMEOUT, "host name \"%.64s\": no answer from the name server in time", query->host);
}

ep_status tcp_resolve(const char *host, uint16_t port, uint64_t deadline_ns, struct tcp_address *ret_addresses,
                      int *ret_n)
{
    struct query *query = calloc(1, sizeof(*query));
    ep_status status = EP_OK;

    if (!query)
        return ep_fail(EP_E_MEMORY, "host name \"%.64s\": no memory", host);
    query->users = 1;
    query->hints = (struct addrinfo){.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICHOST | AI_NUMERICSERV};
    snprintf(query->host, sizeof(query->host), "%s", host);
    snprintf(query->port, sizeof(query->port), "%u", port);
    ask(query);
    if (query->code != 0) {
        query->hints.ai_flags = AI_NUMERICSERV;
        status = await_query(query, deadline_ns);
    }
    if (status == EP_OK && query->code == EAI_SYSTEM)
        status = ep_fail_errno(EP_E_SYSTEM, query->error, "host name \"%.64s\" cannot be resolved", host);
    else if (status == EP_OK && query->code != 0)
        status = ep_fail(query->code == EAI_MEMORY ? EP_E_MEMORY : EP_E_ARG,
                         "host name \"%.64s\" cannot be resolved: %s", host, gai_strerror(query->code));
    if (status == EP_OK) {
        *ret_n = 0;
        for (const struct addrinfo *at = query->list; at && *ret_n < TCP_ADDRESSES; at = at->ai_next)
            *ret_n += from_socket(at->ai_addr, &ret_addresses[*ret_n]);
        if (*ret_n == 0)
            status = ep_fail(EP_E_ARG, "host name \"%.64s\": no IPv4 or IPv6 address", host);
    }
    release(query);
    return status;
}

static int open_socket(int family)
{
    return ep_fd_above_stdio(socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

static int bind_to(int fd, const struct tcp_address *address)
{
    struct sockaddr_storage storage;
    socklen_t bytes = to_socket(address, &storage);

    return bind(fd, (struct sockaddr *)&storage, bytes);
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

    return entry->ifa_addr && from_socket(entry->ifa_addr, &own) && tcp_address_same_host(&own, address);
}

static void add_interfaces(const struct ifaddrs *list, const char *wanted, int rank, struct tcp_address *ret_addresses,
                           int *n)
{
    for (; list && *n < TCP_ADDRESSES; list = list->ifa_next) {
        struct tcp_address address;

        if (list->ifa_addr && from_socket(list->ifa_addr, &address) && rank_interface(list, wanted, &address) == rank)
            ret_addresses[(*n)++] = address;
    }
}

/* Is it the broadcast address of an interface? One that has none has its own address in that place. */
static bool is_broadcast(const struct tcp_address *address)
{
    struct ifaddrs *list = NULL, *entry;
    struct tcp_address broadcast;
    bool found = false;

    if (getifaddrs(&list) != 0)
        return false;
    for (entry = list; entry && !has_address(entry, address); entry = entry->ifa_next)
        found |= (entry->ifa_flags & IFF_BROADCAST) && entry->ifa_broadaddr &&
                 from_socket(entry->ifa_broadaddr, &broadcast) && tcp_address_same_host(&broadcast, address);
    freeifaddrs(list);
    return found && !entry;
}

/* bind() also accepts addresses of all interfaces and of groups of hosts (0.0.0.0, multicast, broadcast). */
static bool is_of_one_host(const struct tcp_address *address)
{
    in_addr_t four;

    if (address->family == AF_INET6)
        return !IN6_IS_ADDR_UNSPECIFIED(address->bytes) && !IN6_IS_ADDR_MULTICAST(address->bytes);
    memcpy(&four, address->bytes, sizeof(four));
    four = ntohl(four);
    return four != INADDR_ANY && four != INADDR_BROADCAST && !IN_MULTICAST(four) && !is_broadcast(address);
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
    socklen_t bytes = to_socket(to, &storage);
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

    return (entry->ifa_flags & IFF_UP) && entry->ifa_addr && from_socket(entry->ifa_addr, &address);
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
    socklen_t bytes = to_socket(to, &storage);
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
    from_socket(&storage, ret_from);
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
