/* SPDX-License-Identifier: Apache-2.0 */
/*
 * scrub_scan.h - inside of the general pass.
 *
 * One scan from left to right. At each place the recognisers are tried in their order; the first that knows what it
 * sees writes the replacement and says how many bytes it stands for, 0 if none does.
 */
#ifndef EP_MACHINE_SOURCE_SCRUB_SCAN_H
#define EP_MACHINE_SOURCE_SCRUB_SCAN_H

#include "source/scrub.h"

#include <ctype.h>

#define SCAN_NAME_BYTES 256

struct scan {
    struct scrub *scrub;
    const char *text;
    size_t bytes;
    unsigned flags;
    FILE *out;
};

typedef size_t recogniser(struct scan *scan, size_t at);

/* The byte at a place, NUL outside of the text. */
static inline char scan_at(const struct scan *scan, size_t at)
{
    return at < scan->bytes ? scan->text[at] : '\0';
}

static inline char scan_before(const struct scan *scan, size_t at)
{
    return at > 0 ? scan->text[at - 1] : '\0';
}

static inline bool is_alnum(char c)
{
    return isalnum((unsigned char)c) != 0;
}

static inline bool is_hex(char c)
{
    return isxdigit((unsigned char)c) != 0;
}

static inline bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

/* Bytes from `at` on that are alphanumeric or one of `others`. */
size_t scan_run(const struct scan *scan, size_t at, const char *others);

/* At most SCAN_NAME_BYTES - 1 bytes as a string, in lower case. */
void scan_take(const struct scan *scan, size_t at, size_t n, char ret_name[SCAN_NAME_BYTES]);

/* The number that stands for `n` bytes, of any length. */
int scan_number(const struct scan *scan, enum scrub_map map, size_t at, size_t n);

/* Zeros or ones alone: "00:00:00:00:00:00". */
bool scan_says_nothing(const struct scan *scan, size_t at, size_t bytes);

bool scan_is_uuid(const char *text, size_t bytes);

/* An address that is the same everywhere: none, this machine, many, a mask. */
bool scan_is_nobodys(uint32_t address);

/* Four numbers up to 255 with `separator` between them. */
size_t scan_quad(const struct scan *scan, size_t at, char separator, uint32_t *ret_address);
void scan_write_quad(struct scan *scan, uint32_t address, char separator);

/* scrub_address.c */
recogniser scan_see_uuid, scan_see_short_uuid, scan_see_mac, scan_see_interface, scan_see_guid, scan_see_ipv6,
    scan_see_ipv4, scan_see_dashed_ipv4;

#endif
