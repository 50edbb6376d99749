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

static void read_all(void *context, const struct link_message *message)
{
    struct count *count = context;

    if (message->magic != LINK_MAGIC || message->nlocal != count->nlocal)
        abort();
    for (size_t i = 0; i < link_message_bytes(count->nlocal); i++)
        count->sum += ((const unsigned char *)message)[i];
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct link_reader reader = {.nlocal = size > 1 ? 1 + data[1] % 32 : 1};
    struct count count = {.nlocal = reader.nlocal};
    size_t step = size ? data[0] : 0;

    reader.message = malloc(link_message_bytes(reader.nlocal));
    if (!reader.message)
        return 0;
    for (size_t at = 2; at < size;) {
        size_t n = step && step < size - at ? step : size - at;

        if (!link_reader_feed(&reader, data + at, n, read_all, &count))
            break;
        at += n;
    }
    free(reader.message);
    return 0;
}
