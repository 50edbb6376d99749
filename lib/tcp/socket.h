/* SPDX-License-Identifier: Apache-2.0 */
/*
 * socket.h - TCP sockets of IPv4 and IPv6 that never block: addresses, listeners, connections, interfaces.
 *
 * All descriptors are non-blocking, closed by exec and above the standard streams.
 */
#ifndef EP_TCP_SOCKET_H
#define EP_TCP_SOCKET_H

#include "base/error.h"

#include <netinet/in.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>

#define TCP_ADDRESS_TEXT 64 /* "[2001:db8::1%eth0]:29500" */
#define TCP_ADDRESSES 4     /* most that one host name or one rank is tried at */

/* Plain data; ranks of one job send it to each other. */
struct tcp_address {
    uint16_t family; /* AF_INET, AF_INET6; 0: none */
    uint16_t port;   /* host order */
    uint32_t scope;  /* of a link-local address of this host; 0: none */
    unsigned char bytes[16];
};

void tcp_address_print(const struct tcp_address *address, char ret_text[TCP_ADDRESS_TEXT]);
socklen_t tcp_address_to_socket(const struct tcp_address *address, struct sockaddr_storage *ret_socket);
bool tcp_address_from_socket(const struct sockaddr_storage *socket_address, struct tcp_address *ret_address);
bool tcp_address_is_loopback(const struct tcp_address *address);
bool tcp_address_is_link_local(const struct tcp_address *address);

/* The local end of a connection; family 0 where it is not known. */
struct tcp_address tcp_local_address(int fd);

/*
 * Splits "host", "host:port", "[v6]:port" or a bare IPv6 address. `port` stays what it is where the text names none.
 * EP_E_ARG: malformed, or longer than ret_host.
 */
ep_status tcp_parse_endpoint(const char *text, char *ret_host, size_t host_bytes, uint16_t *port);

/*
 * Addresses of a host name, at most TCP_ADDRESSES, until the deadline: a name server that does not answer costs no
 * more. EP_E_TIMEOUT; EP_E_ARG for a name that certainly does not exist (which may change: pods come one by one).
 */
ep_status tcp_resolve(const char *host, uint16_t port, uint64_t deadline_ns, struct tcp_address *ret_addresses,
                      int *ret_n);

/*
 * Addresses of this host's interfaces that are up. `wanted`: NULL, or names and prefixes separated by commas ("eth0,
 * ens"), "=eth0" for the exact name, "^ib,wlan" for all but those; or one numeric address. Where it names none to take,
 * loopback and container bridges come last. EP_E_ARG when nothing is left, or the address is not of this host.
 */
ep_status tcp_find_interfaces(const char *wanted, struct tcp_address *ret_addresses, int *ret_n);

/* Listens on `address`, NULL: on all, IPv4 and IPv6. Port 0: any; *ret_port is the one it got. */
ep_status tcp_listen(const struct tcp_address *address, uint16_t port, int *ret_fd, uint16_t *ret_port);

/* Starts to connect, from `from` if not NULL. EP_OK also while it is under way. */
ep_status tcp_connect(const struct tcp_address *to, const struct tcp_address *from, int *ret_fd);
/* Of a socket that poll() calls writable: 0, or why it is not connected (errno). */
int tcp_connect_error(int fd);

/* A connection that has come, -1: none, with errno. */
int tcp_accept(int listener, struct tcp_address *ret_from);

/*
 * What every connection of ours wants: small messages leave at once, and a far end that has gone without a word, as a
 * host that is switched off, is given up, within 28 to 50 seconds also while nothing is sent.
 */
void tcp_set_options(int fd, int timeout_ms);

#endif
