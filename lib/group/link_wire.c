/* SPDX-License-Identifier: Apache-2.0 */
#include "group/link_wire.h"

bool link_reader_feed(struct link_reader *reader, const unsigned char *bytes, size_t n, link_message_fn on_message,
                      void *context)
{
    struct link_message *message = reader->message;
    size_t all = link_message_bytes(reader->nlocal);

    while (n) {
        size_t room = all - reader->used, taken = room < n ? room : n;

        memcpy((unsigned char *)message + reader->used, bytes, taken);
        reader->used += taken;
        bytes += taken;
        n -= taken;
        if (reader->used >= offsetof(struct link_message, failure) &&
            (message->magic != LINK_MAGIC || message->nlocal != reader->nlocal))
            return false;
        if (reader->used < all)
            continue;
        reader->used = 0;
        on_message(context, message);
    }
    return true;
}
