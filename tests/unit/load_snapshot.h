/* SPDX-License-Identifier: Apache-2.0 */
/* load_snapshot.h - a source with the entries of the text of a snapshot, and with nothing else. */
#ifndef EP_TESTS_LOAD_SNAPSHOT_H
#define EP_TESTS_LOAD_SNAPSHOT_H

#include "machine/source/state.h"

static inline ep_status load_snapshot(const char *name, const char *text, size_t bytes, struct source **ret_source)
{
    struct source *source = source_new(name);
    ep_status status = snapshot_load(source, name, text, bytes);

    if (status == EP_OK)
        *ret_source = source;
    else
        source_free(source);
    return status;
}

#endif
