/* SPDX-License-Identifier: Apache-2.0 */
/* Any bytes from the agent of a node: frames lie within what came, whatever the pieces. */
#include "cmd/launch/frame.h"

#include <stdint.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(const struct frame *frame, void *context)
{
    uint64_t *sum = context;

    if (frame->bytes > FRAME_BYTES_MAX || frame->rank < 0 || frame->rank > FRAME_RANKS_MAX)
        abort();
    *sum = *sum * 31 + (uint64_t)frame->kind + (uint64_t)frame->rank;
    for (size_t i = 0; i < frame->bytes; i++)
        *sum = *sum * 31 + (uint8_t)frame->data[i];
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint64_t whole = 0, parts = 0;
    struct frame_reader reader = {0};
    size_t piece = size ? data[0] % 37 + 1 : 1;

    if (frame_read(&reader, (const char *)data, size, check, &whole) != 0)
        abort();
    frame_reader_done(&reader);
    for (size_t at = 0; at < size; at += piece)
        if (frame_read(&reader, (const char *)data + at, size - at < piece ? size - at : piece, check, &parts) != 0)
            abort();
    frame_reader_done(&reader);
    if (whole != parts)
        abort();
    return 0;
}
