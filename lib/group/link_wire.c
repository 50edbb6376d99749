/* SPDX-License-Identifier: Apache-2.0 */
#include "group/link_wire.h"

size_t link_payload_bytes(int nlocal)
{
    size_t heartbeat = (size_t)nlocal * sizeof(struct link_entry);

    return heartbeat > sizeof(struct link_failure) ? heartbeat : sizeof(struct link_failure);
}

static bool is_valid(const struct link_head *head, int nlocal)
{
    if (head->magic != LINK_MAGIC)
        return false;
    switch (head->kind) {
    case LINK_HEARTBEAT:
        return head->bytes == (size_t)nlocal * sizeof(struct link_entry);
    case LINK_FAILURE:
        return head->bytes == sizeof(struct link_failure);
    case LINK_LEFT:
        return head->bytes == 0;
    case LINK_SHRUNK:
        return head->bytes == sizeof(struct link_shrunk);
    default:
        return false;
    }
}

bool link_reader_feed(struct link_reader *reader, const unsigned char *bytes, size_t n, link_message_fn on_message,
                      void *context)
{
    while (n) {
        bool in_head = reader->head_used < sizeof(reader->head);
        unsigned char *into =
            in_head ? (unsigned char *)&reader->head + reader->head_used : reader->payload + reader->used;
        size_t room = in_head ? sizeof(reader->head) - reader->head_used : (size_t)reader->head.bytes - reader->used;
        size_t taken = room < n ? room : n;

        memcpy(into, bytes, taken);
        bytes += taken;
        n -= taken;
        if (in_head) {
            reader->head_used += taken;
            if (reader->head_used < sizeof(reader->head))
                continue;
            reader->used = 0;
            if (!is_valid(&reader->head, reader->nlocal))
                return false;
        } else {
            reader->used += taken;
        }
        if (reader->used < reader->head.bytes)
            continue;
        reader->head_used = 0;
        on_message(context, (enum link_kind)reader->head.kind, reader->payload);
    }
    return true;
}
