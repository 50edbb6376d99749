/* SPDX-License-Identifier: Apache-2.0 */
/*
 * link_wire.h - the message on a control link, and its parser. There is one kind: the state of the sender's node, and
 * the failure that it knows. A rank sends it when something has changed, and as a heartbeat.
 */
#ifndef EP_GROUP_LINK_WIRE_H
#define EP_GROUP_LINK_WIRE_H

#include "group/group.h"

#define LINK_MAGIC 0x324c5045u /* "EPL2" */

enum {
    LINK_RANK_LEFT = 1u << 0,
    LINK_RANK_DEAD = 1u << 1,
    LINK_RANK_SHRINKS = 1u << 2,  /* it has begun a shrink since its last abort */
    LINK_RANK_EXCLUDES = 1u << 3, /* a shrink has succeeded there without the receiver */
    LINK_RANK_CONFIRMATION = 4,   /* first of two bits: enum ep_group_confirm */
};

struct link_entry {
    uint32_t waiting; /* ep_group_state.waiting */
    uint32_t age_ms;  /* since the rank last probed its peers; UINT32_MAX: longer */
    uint32_t flags;
    uint32_t aborts; /* ep_group_state.aborts */
};

struct link_message {
    uint32_t magic;
    int32_t nlocal;                     /* ranks of a node */
    uint64_t failure;                   /* ep_group_control.failure, 0: none */
    char reason[EP_GROUP_REASON_BYTES]; /* of the failure; "": unknown */
    struct link_entry entries[];        /* [nlocal] */
};

static inline size_t link_message_bytes(int nlocal)
{
    return sizeof(struct link_message) + (size_t)nlocal * sizeof(struct link_entry);
}

/* State of the parser of one link. */
struct link_reader {
    int nlocal;
    size_t used;
    struct link_message *message; /* [link_message_bytes()] */
};

typedef void (*link_message_fn)(void *context, const struct link_message *message);

/*
 * Parses bytes in order of arrival, and passes each complete message to on_message. false: an invalid message, after
 * which the link is unusable.
 */
bool link_reader_feed(struct link_reader *reader, const unsigned char *bytes, size_t n, link_message_fn on_message,
                      void *context);

#endif
