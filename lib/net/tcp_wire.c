/* SPDX-License-Identifier: Apache-2.0 */
#include "net/tcp_wire.h"

#include <string.h>

unsigned char *tcp_wire_get_buffer(const struct tcp_wire *wire, size_t *ret_bytes)
{
    *ret_bytes = wire->left;
    return wire->left ? wire->region + wire->offset : NULL;
}

void tcp_wire_advance(struct tcp_wire *wire, size_t bytes)
{
    wire->left -= bytes;
    wire->offset += bytes;
}

/* wire->record is complete. */
static const char *take_record(struct tcp_wire *wire)
{
    const struct tcp_wire_record *record = &wire->record;

    wire->head_used = 0;
    if (wire->bye)
        return "a record after BYE";
    if (record->number != wire->number)
        return "a record out of order";
    wire->number++;
    switch (record->kind) {
    case TCP_WIRE_PUT:
        if (record->target > wire->region_bytes || record->amount > wire->region_bytes - record->target)
            return "a put beyond the end of the region";
        wire->offset = (size_t)record->target;
        wire->left = (size_t)record->amount;
        return NULL;
    case TCP_WIRE_SIGNAL:
        if (record->target >= wire->n_signals)
            return "a signal that does not exist";
        wire->signals[record->target] += record->amount;
        return NULL;
    case TCP_WIRE_BYE:
        wire->bye = true;
        return record->target || record->amount ? "a BYE record with a payload" : NULL;
    default:
        return "a record of unknown kind";
    }
}

const char *tcp_wire_consume(struct tcp_wire *wire, const unsigned char *bytes, size_t n)
{
    while (n) {
        size_t room, used;
        unsigned char *into = tcp_wire_get_buffer(wire, &room);
        const char *wrong;

        if (into) {
            used = room < n ? room : n;
            memcpy(into, bytes, used);
            tcp_wire_advance(wire, used);
        } else {
            room = sizeof(wire->record) - wire->head_used;
            used = room < n ? room : n;
            memcpy((unsigned char *)&wire->record + wire->head_used, bytes, used);
            wire->head_used += used;
            wrong = wire->head_used == sizeof(wire->record) ? take_record(wire) : NULL;
            if (wrong)
                return wrong;
        }
        bytes += used;
        n -= used;
    }
    return NULL;
}
