/* SPDX-License-Identifier: Apache-2.0 */
/* exchange.h - all-gathers of small rows, and the head of all messages between nodes. */
#ifndef EP_GROUP_EXCHANGE_H
#define EP_GROUP_EXCHANGE_H

#include "group/group.h"

/* Header of the messages between nodes. */
struct ep_group_message {
    uint32_t kind;   /* EP_GROUP_MESSAGE_* */
    uint32_t detail; /* exchange: bytes; route: tokens in this message; row and partial: check of the shape */
    uint64_t number; /* of the exchange or operation; to detect ranks in different calls */
    uint64_t index;  /* of the first token, in the order of the route */
    uint64_t plan;   /* row and partial: number of the plan; otherwise 0 */
};

_Static_assert(sizeof(struct ep_group_message) % 16 == 0, "rows follow, which are aligned to 16 bytes");

enum {
    EP_GROUP_MESSAGE_EXCHANGE = 1,
    EP_GROUP_MESSAGE_ROUTE,
    EP_GROUP_MESSAGE_ROW,
    EP_GROUP_MESSAGE_PARTIAL_BF16,
    EP_GROUP_MESSAGE_PARTIAL_F32
};

/*
 * All-gather of rows of at most exchange_row_bytes - 16 bytes. start publishes without waiting for peers,
 * unless they are EP_GROUP_EXCHANGES exchanges behind; complete makes all rows readable; release frees them. To be
 * called in order. A row of another size is a mismatch of the field named by `extent`, NULL: of "bytes".
 */
struct ep_group_extent {
    const char *field; /* a row has `fixed` bytes and `each` bytes per unit of the field */
    size_t fixed, each;
};
ep_status ep_group_exchange_start(struct ep_group *group, enum ep_group_phase phase, const void *row, size_t bytes,
                                  uint64_t *ret_number);
ep_status ep_group_exchange_complete(struct ep_group *group, uint64_t number, enum ep_group_phase phase,
                                     const struct ep_group_extent *extent);
/* Copies `bytes` of the row of `rank` in an exchange between complete and release. */
void ep_group_exchange_read(const struct ep_group *group, uint64_t number, int rank, void *ret_row, size_t bytes);
void ep_group_exchange_release(struct ep_group *group, uint64_t number);

#endif
