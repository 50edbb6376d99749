/* SPDX-License-Identifier: Apache-2.0 */
/* clean.c - text from a machine, made safe for a terminal and for JSON. */
#include "root/root.h"

/* Bytes of the well-formed UTF-8 sequence at `at` (Unicode 15, table 3-7), 0 if there is none. */
static size_t sequence(const unsigned char *at)
{
    unsigned char low = 0x80, high = 0xbf;
    size_t n;

    if (at[0] >= 0xc2 && at[0] <= 0xdf) {
        n = 2;
    } else if (at[0] >= 0xe0 && at[0] <= 0xef) {
        n = 3;
        low = at[0] == 0xe0 ? 0xa0 : 0x80;
        high = at[0] == 0xed ? 0x9f : 0xbf;
    } else if (at[0] >= 0xf0 && at[0] <= 0xf4) {
        n = 4;
        low = at[0] == 0xf0 ? 0x90 : 0x80;
        high = at[0] == 0xf4 ? 0x8f : 0xbf;
    } else {
        return 0;
    }
    if (at[1] < low || at[1] > high)
        return 0;
    for (size_t i = 2; i < n; i++)
        if (at[i] < 0x80 || at[i] > 0xbf)
            return 0;
    /* U+0080 to U+009F are control characters, which terminals obey. */
    return n == 2 && at[0] == 0xc2 && at[1] < 0xa0 ? 0 : n;
}

void root_clean(const char *text, char *ret_text, size_t bytes)
{
    const unsigned char *at = (const unsigned char *)text;
    size_t used = 0;

    if (bytes == 0)
        return;
    while (*at) {
        size_t n = *at >= 0x20 && *at < 0x7f ? 1 : sequence(at);

        if (used + (n ? n : 1) >= bytes)
            break;
        if (n == 0) {
            ret_text[used++] = '?';
            at++;
        }
        for (size_t i = 0; i < n; i++)
            ret_text[used++] = (char)*at++;
    }
    ret_text[used] = '\0';
}
