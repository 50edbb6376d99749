/* SPDX-License-Identifier: Apache-2.0 */
/* tcp_wire.h - the records on a connection of the tcp network: made by the sender, checked by the receiver. */
#ifndef EP_NET_TCP_WIRE_H
#define EP_NET_TCP_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum tcp_wire_kind { TCP_WIRE_PUT = 0x31707574, TCP_WIRE_SIGNAL = 0x31736967, TCP_WIRE_BYE = 0x31627965 };

/* In the byte order of both sides, which the handshake has compared. */
struct tcp_wire_record {
    uint32_t kind;
    uint32_t number; /* low half of the count of records on this connection */
    uint64_t place;  /* put: offset in the region; signal: its index */
    uint64_t amount; /* put: bytes behind the record; signal: what to add */
};

_Static_assert(sizeof(struct tcp_wire_record) == 24, "it is a format");

/* Where a receiver stands. */
struct tcp_wire {
    unsigned char *region;
    size_t region_bytes;
    uint64_t *signals;
    uint32_t n_signals;
    struct tcp_wire_record record;
    size_t head_used;
    size_t left;     /* payload of the record that is still to come */
    size_t place;    /* ... and where it goes */
    uint32_t number; /* of the next record */
    bool bye;        /* nothing comes behind it */
};

/* Room for payload that may be read straight into the region; NULL: a record is next. */
unsigned char *tcp_wire_room(const struct tcp_wire *wire, size_t *ret_bytes);
/* So much of it has been read there. */
void tcp_wire_fill(struct tcp_wire *wire, size_t bytes);

/* Takes bytes in the order in which they came. NULL, or what is wrong with them: then the connection is of no use. */
const char *tcp_wire_take(struct tcp_wire *wire, const unsigned char *bytes, size_t n);

#endif
