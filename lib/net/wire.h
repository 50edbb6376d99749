/* SPDX-License-Identifier: Apache-2.0 */
/*
 * wire.h - the wire of the emulated network: a ring of records in shared memory, one writer, one reader.
 *
 * Head and tail count bytes and never wrap. The writer appends records behind its own tail and then publishes them all
 * at once; the reader works on records at its own head and then gives the room back. Records are padded to 16 bytes and
 * may wrap around the end of the ring at any byte, so that even the smallest ring can be filled completely.
 */
#ifndef EP_NET_WIRE_H
#define EP_NET_WIRE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum wire_kind {
    WIRE_PUT = 0x70757400, /* unlikely as leftover data */
    WIRE_SIGNAL = 0x7369676e
};

struct wire_record {
    uint32_t kind;
    uint32_t bytes;  /* put: payload behind the record; signal: 0 */
    uint64_t place;  /* put: offset in the region; signal: its index */
    uint64_t add;    /* signal */
    uint64_t due_ns; /* may not take effect before; 0: at once */
};

/* In the reader's segment. What each side writes has a cache line of its own. */
struct wire {
    _Alignas(64) _Atomic uint64_t tail; /* published by the writer */
    _Atomic uint32_t writer_waits;      /* set by a writer without room, cleared by the reader, who then wakes it */
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
 * The writer says that it waits and looks once more; the reader makes room and then looks for a waiting writer. All
 * four accesses are sequentially consistent, so at least one of the two sees the other.
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
