/* SPDX-License-Identifier: Apache-2.0 */
#include "tcp/address.h"

#include "base/clock.h"
#include "base/futex.h"
#include "base/thread.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

socklen_t tcp_address_to_socket(const struct tcp_address *address, struct sockaddr_storage *ret_socket)
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

bool tcp_address_from_socket(const void *socket_address, struct tcp_address *ret_address)
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
    error = ep_thread_start(&thread, run_query, query);
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
            *ret_n += tcp_address_from_socket(at->ai_addr, &ret_addresses[*ret_n]);
        if (*ret_n == 0)
            status = ep_fail(EP_E_ARG, "host name \"%.64s\": no IPv4 or IPv6 address", host);
    }
    release(query);
    return status;
}
