/* SPDX-License-Identifier: Apache-2.0 */
/*
 * wire.h - the wire of the emulated network: a single-producer, single-consumer ring of records in shared memory.
 *
 * Head and tail count bytes and never wrap. The writer appends records and then publishes its tail once for all of
 * them; the reader processes records and then publishes its head. Records are padded to 16 bytes and may wrap around
 * the end of the ring at any byte, so that even the smallest ring can be filled completely.
 */
#ifndef EP_NET_WIRE_H
#define EP_NET_WIRE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum wire_kind {
    WIRE_PUT = 0x70757400, /* magic numbers: unlikely in stale data */
    WIRE_SIGNAL = 0x7369676e
};

struct wire_record {
    uint32_t kind;
    uint32_t bytes;  /* put: payload that follows; signal: 0 */
    uint64_t target; /* put: offset in the region; signal: its index */
    uint64_t add;    /* signal */
    uint64_t due_ns; /* earliest time of its effect; 0: now */
};

/* In the reader's segment. Each side writes to a cache line of its own. */
struct wire {
    _Alignas(64) _Atomic uint64_t tail; /* published by the writer */
    _Atomic uint32_t writer_waits;      /* set by a writer without room; the reader clears it and wakes the writer */
    _Alignas(64) _Atomic uint64_t head; /* published by the reader */
    _Alignas(64) unsigned char ring[];
};

static inline size_t wire_padded(size_t bytes)
{
    return (bytes + 15) & ~(size_t)15;
}

static inline void wire_write(struct wire *wire, size_t capacity, uint64_t at, const void *src, size_t bytes)
{
    size_t begin = (size_t)(at % capacity), first = capacity - begin < bytes ? capacity - begin : bytes;

    if (!src || !bytes)
        return; /* a signal has no payload, and src is NULL then */
    memcpy(wire->ring + begin, src, first);
    memcpy(wire->ring, (const unsigned char *)src + first, bytes - first);
}

static inline void wire_read(const struct wire *wire, size_t capacity, uint64_t at, void *ret_data, size_t bytes)
{
    size_t begin = (size_t)(at % capacity), first = capacity - begin < bytes ? capacity - begin : bytes;

    memcpy(ret_data, wire->ring + begin, first);
    memcpy((unsigned char *)ret_data + first, wire->ring, bytes - first);
}

/*
 * The writer sets writer_waits and reads head again; the reader publishes head and then reads writer_waits. All four
 * accesses are sequentially consistent, so at least one side sees the other's store: no wake-up is lost.
 */
static inline uint64_t wire_wait_for_room(struct wire *wire)
{
    atomic_store(&wire->writer_waits, 1);
    return atomic_load(&wire->head);
}

/* true: the writer must be woken. */
static inline bool wire_make_room(struct wire *wire, uint64_t head)
{
    atomic_store(&wire->head, head);
    return atomic_load(&wire->writer_waits) && atomic_exchange(&wire->writer_waits, 0);
}

#endif
