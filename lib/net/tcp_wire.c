/* SPDX-License-Identifier: Apache-2.0 */
#include "net/tcp_wire.h"

#include <string.h>

unsigned char *tcp_wire_room(const struct tcp_wire *wire, size_t *ret_bytes)
{
    *ret_bytes = wire->left;
    return wire->left ? wire->region + wire->place : NULL;
}

void tcp_wire_fill(struct tcp_wire *wire, size_t bytes)
{
    wire->left -= bytes;
    wire->place += bytes;
}

/* A whole record head is there. */
static const char *take_record(struct tcp_wire *wire)
{
    const struct tcp_wire_record *record = &wire->record;

    wire->head_used = 0;
    if (wire->bye)
        return "a record behind the farewell";
    if (record->number != wire->number)
        return "a record out of order";
    wire->number++;
    switch (record->kind) {
    case TCP_WIRE_PUT:
        if (record->place > wire->region_bytes || record->amount > wire->region_bytes - record->place)
            return "a put beyond the end of the region";
        wire->place = (size_t)record->place;
        wire->left = (size_t)record->amount;
        return NULL;
    case TCP_WIRE_SIGNAL:
        if (record->place >= wire->n_signals)
            return "a signal that does not exist";
        wire->signals[record->place] += record->amount;
        return NULL;
    case TCP_WIRE_BYE:
        wire->bye = true;
        return record->place || record->amount ? "a farewell with something behind it" : NULL;
    default:
        return "a record of unknown kind";
    }
}

const char *tcp_wire_take(struct tcp_wire *wire, const unsigned char *bytes, size_t n)
{
    while (n) {
        size_t room, used;
        unsigned char *into = tcp_wire_room(wire, &room);
        const char *wrong;

        if (into) {
            used = room < n ? room : n;
            memcpy(into, bytes, used);
            tcp_wire_fill(wire, used);
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
