/* SPDX-License-Identifier: Apache-2.0 */
/*
 * socket.h - TCP sockets of IPv4 and IPv6 that never block: interfaces, listeners, connections.
 *
 * All descriptors are non-blocking, closed by exec and above the standard streams.
 */
#ifndef EP_TCP_SOCKET_H
#define EP_TCP_SOCKET_H

#include "tcp/address.h"

#include <sys/uio.h>

/* The local end of a connection; family 0 if it is unknown. */
struct tcp_address tcp_local_address(int fd);

/*
 * Addresses of this host's interfaces that are up. `wanted`: prefixes of names separated by commas ("eth0,ens"),
 * "=eth0" for an exact name, "^ib,wlan" for all but these, one numeric address, or NULL: all. Without names to include,
 * loopback and container bridges are last. `first`, if not NULL and on a wanted interface, is first: of several
 * interfaces, not all may reach the other hosts. EP_E_ARG if no interface matches, or the address is not one of this
 * host.
 */
ep_status tcp_find_interfaces(const char *wanted, const struct tcp_address *first, struct tcp_address *ret_addresses,
                              int *ret_n);

/* Tested by bind(). false: it is an address of this host, or that is not known. */
bool tcp_is_of_other_host(const struct tcp_address *address);
/* The local address from which packets to `to` are sent, by the routes of this host. false: there is none. */
bool tcp_find_route(const struct tcp_address *to, struct tcp_address *ret_local);

/* Listens on `address`, NULL: on all, IPv4 and IPv6. Port 0: any; *ret_port is the actual port. */
ep_status tcp_listen(const struct tcp_address *address, uint16_t port, int *ret_fd, uint16_t *ret_port);

/*
 * Starts to connect, from `from` if that is not NULL and has the family of `to`. EP_OK also while the connection is in
 * progress. On failure sets errno.
 */
ep_status tcp_connect(const struct tcp_address *to, const struct tcp_address *from, int *ret_fd);
/* True if this host lacks descriptors or memory, which says nothing about the peer. */
bool tcp_is_exhausted(int error_number);
/* For a socket that poll() reports as writable: 0, or the errno of the failed connection. */
int tcp_connect_error(int fd);

/* Accepts one connection; -1 with errno: none. */
int tcp_accept(int listener, struct tcp_address *ret_from);

/*
 * Receives the rest of a message, of which `used` bytes are there. 1: it is complete, 0: not yet, -1: the connection
 * has failed (errno), or the peer has closed it (0). Reads nothing beyond it.
 */
int tcp_receive(int fd, void *message, size_t bytes, size_t *used);
/* Sends the pieces, which advance by what the socket accepts. 1: all are sent, 0: not yet, -1: failed (errno). */
int tcp_send(int fd, struct iovec *pieces, int n);

/* For a text from a peer: terminates it in its `bytes`, and replaces all that is not printable ASCII by '?'. */
void tcp_make_printable(char *text, size_t bytes);

/*
 * Options of all connections: small messages are sent at once, and keepalive probes end a connection to a host that was
 * switched off within 28 to 50 seconds, also while nothing is sent. timeout_ms > 0: TCP_USER_TIMEOUT.
 */
void tcp_set_options(int fd, int timeout_ms);

#endif
