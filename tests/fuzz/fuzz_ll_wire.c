/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Any bytes as a low-latency message of a rank of another node: nothing beside the landing segment is written, and what
 * is refused has changed nothing.
 */
#include "net/ll_wire.c"

#include <stdlib.h>

enum { TOKENS = 3, HIDDEN = 128, TOPK = 2, LOCAL = 2, RANKS = 2, SLOT = 128 + 2 * HIDDEN, SOURCE = 1 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct ll_wire wire = {.nranks = RANKS,
                           .segment_tokens = TOKENS,
                           .hidden = HIDDEN,
                           .topk = TOPK,
                           .n_counts = LOCAL + 1,
                           .slot_bytes = SLOT};
    size_t all;
    unsigned char *landing, *before, *message;

    all = ll_wire_lay_out(&wire, sizeof(struct ll_wire_segment), LL_WIRE_MAX_PARTS);
    /* Segments of their own, so that a sanitizer sees an access beside them. */
    landing = wire.landing = calloc(1, all);
    before = calloc(1, all);
    message = aligned_alloc(16, (size + 16) / 16 * 16);
    if (!landing || !before || !message)
        abort();
    memcpy(message, data, size);
    if (!ll_wire_deliver(&wire, SOURCE, message, size, 0) && memcmp(landing, before, all) != 0)
        abort();
    free(landing);
    free(before);
    free(message);
    return 0;
}
