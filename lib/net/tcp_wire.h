/* SPDX-License-Identifier: Apache-2.0 */
/* tcp_wire.h - the record format of the tcp network, and its checked decoder. */
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
    uint64_t target; /* put: offset in the region; signal: its index */
    uint64_t amount; /* put: bytes that follow the record; signal: value to add */
};

_Static_assert(sizeof(struct tcp_wire_record) == 24, "it is a wire format");

/* State of the decoder. */
struct tcp_wire {
    unsigned char *region;
    size_t region_bytes;
    uint64_t *signals;
    uint32_t n_signals;
    struct tcp_wire_record record;
    size_t head_used;
    size_t left;     /* payload of the record that was not received yet */
    size_t offset;   /* of that payload in the region */
    uint32_t number; /* of the next record */
    bool bye;        /* BYE was received: no record may follow */
};

/* The part of the region for payload that is to come next; NULL: a record head is next. */
unsigned char *tcp_wire_get_buffer(const struct tcp_wire *wire, size_t *ret_bytes);
/* Accounts for `bytes` read into that buffer. */
void tcp_wire_advance(struct tcp_wire *wire, size_t bytes);

/* Decodes bytes in the order of their arrival. NULL, or the error: then the connection cannot be used any more. */
const char *tcp_wire_consume(struct tcp_wire *wire, const unsigned char *bytes, size_t n);

#endif
