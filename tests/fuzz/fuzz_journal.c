/* SPDX-License-Identifier: Apache-2.0 */
/* Any bytes as a journal: the whole lines in front are events, and reading those again gives the same. */
#include "cmd/install/journal.h"

#include <stdint.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(bool holds)
{
    if (!holds)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct journal journal = {.fd = -1};
    json_t *again;
    size_t whole, whole_again;

    (void)journal_parse((const char *)data, size, &journal.events, &whole);
    check(whole <= size && (whole == 0 || data[whole - 1] == '\n'));
    check(journal_parse((const char *)data, whole, &again, &whole_again));
    check(whole_again == whole && json_array_size(again) == json_array_size(journal.events));
    check(journal_count(&journal, "start", "one") >= 0);
    for (size_t i = 0; i < json_array_size(again); i++)
        check(json_is_string(json_object_get(json_array_get(again, i), "event")));
    (void)journal_last(&journal, "reboot", NULL);
    json_decref(again);
    json_decref(journal.events);
    return 0;
}
