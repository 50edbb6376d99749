/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Any bytes as what comes on a connection of the tcp network: they are applied to the region and the signals only, or
 * the connection is refused.
 *
 * The input: in pieces of how many bytes they come (0: all at once), then the bytes.
 */
#include "net/tcp_wire.h"

#include <stdlib.h>
#include <string.h>

enum { REGION = 256, SIGNALS = 4, GUARD = 32 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(bool holds)
{
    if (!holds)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    unsigned char memory[GUARD + REGION + GUARD], guard[GUARD];
    uint64_t signals[SIGNALS + 1] = {[SIGNALS] = 42};
    struct tcp_wire wire = {.region = memory + GUARD, .region_bytes = REGION, .signals = signals, .n_signals = SIGNALS};
    size_t step = size ? data[0] : 0;

    memset(memory, 0xa5, sizeof(memory));
    memset(guard, 0xa5, sizeof(guard));
    for (size_t at = 1; at < size;) {
        size_t n = step && step < size - at ? step : size - at, room;
        unsigned char *into = tcp_wire_get_buffer(&wire, &room);

        check(!into || (into >= wire.region && room <= (size_t)(wire.region + REGION - into)));
        /* Every other piece as the engine reads it: payload straight into its place. */
        if (into && at % 2) {
            n = n < room ? n : room;
            memcpy(into, data + at, n);
            tcp_wire_advance(&wire, n);
        } else if (tcp_wire_consume(&wire, data + at, n)) {
            break;
        }
        at += n;
    }
    check(memcmp(memory, guard, GUARD) == 0 && memcmp(memory + GUARD + REGION, guard, GUARD) == 0);
    check(signals[SIGNALS] == 42);
    return 0;
}
