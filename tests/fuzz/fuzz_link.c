/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Any bytes as what comes on a control link: whole messages of their own size are handed over, or the link is refused.
 *
 * The input: in pieces of how many bytes they come (0: all at once), ranks of a node (1 byte), then the bytes.
 */
#include "group/link_wire.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct count {
    int nlocal;
    uint64_t sum;
};

static void read_all(void *context, enum link_kind kind, const void *payload)
{
    struct count *count = context;
    size_t bytes = kind == LINK_HEARTBEAT ? (size_t)count->nlocal * sizeof(struct link_entry)
                   : kind == LINK_FAILURE ? sizeof(struct link_failure)
                   : kind == LINK_SHRUNK  ? sizeof(struct link_shrunk)
                                          : 0;

    if (kind < LINK_HEARTBEAT || kind > LINK_SHRUNK)
        abort();
    for (size_t i = 0; i < bytes; i++)
        count->sum += ((const unsigned char *)payload)[i];
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct link_reader reader = {.nlocal = size > 1 ? 1 + data[1] % 32 : 1};
    struct count count = {.nlocal = reader.nlocal};
    size_t step = size ? data[0] : 0;

    reader.payload = malloc(link_payload_bytes(reader.nlocal));
    if (!reader.payload)
        return 0;
    for (size_t at = 2; at < size;) {
        size_t n = step && step < size - at ? step : size - at;

        if (!link_reader_feed(&reader, data + at, n, read_all, &count))
            break;
        at += n;
    }
    free(reader.payload);
    return 0;
}
