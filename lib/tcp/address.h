/* SPDX-License-Identifier: Apache-2.0 */
/* address.h - addresses of IPv4 and IPv6: their text, and those of a host name. */
#ifndef EP_TCP_ADDRESS_H
#define EP_TCP_ADDRESS_H

#include "base/error.h"

#include <netinet/in.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>

#define TCP_ADDRESS_TEXT 64 /* "[2001:db8::1%eth0]:29500" */
#define TCP_ADDRESSES 4     /* maximum per host name or rank */

/* Plain data: ranks of one job exchange it. */
struct tcp_address {
    uint16_t family; /* AF_INET, AF_INET6; 0: none */
    uint16_t port;   /* host order */
    uint32_t scope;  /* of a link-local address of this host; 0: none */
    unsigned char bytes[16];
};

void tcp_address_print(const struct tcp_address *address, char ret_text[TCP_ADDRESS_TEXT]);
bool tcp_address_is_loopback(const struct tcp_address *address);
bool tcp_address_is_link_local(const struct tcp_address *address);
/* tcp_address_to_socket() converts an address for the calls of sockets; it returns the length. */
socklen_t tcp_address_to_socket(const struct tcp_address *address, struct sockaddr_storage *ret_socket);
/* An IPv4-mapped IPv6 address, as from a dual-stack socket, is converted to IPv4. false: neither IPv4 nor IPv6. */
bool tcp_address_from_socket(const void *socket_address, struct tcp_address *ret_address);
/* Compares without ports and scopes. */
bool tcp_address_same_host(const struct tcp_address *a, const struct tcp_address *b);

/*
 * Splits "host", "host:port", "[v6]:port" or a bare IPv6 address. *port does not change if the text has none.
 * EP_E_ARG: malformed, or longer than ret_host.
 */
ep_status tcp_parse_endpoint(const char *text, char *ret_host, size_t host_bytes, uint16_t *port);

/*
 * Addresses of a host name, at most TCP_ADDRESSES. EP_E_TIMEOUT if the name server does not answer by the deadline.
 * EP_E_ARG if the name does not exist; this may change, because pods start one by one.
 */
ep_status tcp_resolve(const char *host, uint16_t port, uint64_t deadline_ns, struct tcp_address *ret_addresses,
                      int *ret_n);

#endif
