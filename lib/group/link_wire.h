/* SPDX-License-Identifier: Apache-2.0 */
/* link_wire.h - the messages on a control link, and their parser. */
#ifndef EP_GROUP_LINK_WIRE_H
#define EP_GROUP_LINK_WIRE_H

#include "group/group.h"

#define LINK_MAGIC 0x314c5045u /* "EPL1" */

enum link_kind {
    LINK_HEARTBEAT = 1, /* an entry for each rank of the sender's node */
    LINK_FAILURE,
    LINK_LEFT,  /* leave message: the sender has left the group, nothing follows */
    LINK_SHRUNK /* a shrink has succeeded without the ranks in the bitmap that follows */
};

struct link_head {
    uint32_t magic, kind;
    uint64_t bytes; /* of the payload */
};

enum {
    LINK_RANK_LEFT = 1u << 0,
    LINK_RANK_DEAD = 1u << 1,
    LINK_RANK_SHRINKS = 1u << 2, /* it has begun a shrink since its last abort */
    LINK_RANK_CONFIRMATION = 3,  /* first of two bits: enum ep_group_confirm */
};

struct link_entry {
    uint32_t waiting; /* ep_group_state.waiting */
    uint32_t age_ms;  /* since the rank last probed its peers; UINT32_MAX: longer */
    uint32_t flags;
    uint32_t aborts; /* ep_group_state.aborts */
};

struct link_failure {
    uint64_t word; /* ep_group_control.failure */
    char reason[EP_GROUP_REASON_BYTES];
};

struct link_shrunk {
    uint64_t out[EP_MAX_RANKS / 64];
};

/* State of the parser of one link. */
struct link_reader {
    int nlocal; /* ranks of a node: determines the size of a heartbeat */
    struct link_head head;
    size_t head_used, used;
    unsigned char *payload; /* [link_payload_bytes()] */
};

/* Largest payload. */
size_t link_payload_bytes(int nlocal);

typedef void (*link_message_fn)(void *context, enum link_kind kind, const void *payload);

/*
 * Parses bytes in order of arrival, and passes each complete message to on_message. false: an invalid message, after
 * which the link is unusable.
 */
bool link_reader_feed(struct link_reader *reader, const unsigned char *bytes, size_t n, link_message_fn on_message,
                      void *context);

#endif
