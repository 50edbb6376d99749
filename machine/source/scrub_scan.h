/* SPDX-License-Identifier: Apache-2.0 */
/*
 * scrub_scan.h - inside the general pass.
 *
 * One scan from left to right. At each position the recognisers are tried in order; the first that matches writes the
 * replacement and returns the length of the match, 0 if none.
 */
#ifndef EP_MACHINE_SOURCE_SCRUB_SCAN_H
#define EP_MACHINE_SOURCE_SCRUB_SCAN_H

#include "scrub.h"

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

/* The byte at a position, NUL outside of the text. */
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

/* Length of the run from `at` of alphanumeric bytes and those in `others`. */
size_t scan_run(const struct scan *scan, size_t at, const char *others);

/* Copies at most SCAN_NAME_BYTES - 1 bytes in lower case. */
void scan_copy_lower(const struct scan *scan, size_t at, size_t n, char ret_name[SCAN_NAME_BYTES]);

/* The replacement number of `n` bytes, of any length. */
int scan_number(const struct scan *scan, enum scrub_map map, size_t at, size_t n);

/* All zeros or all ones: "00:00:00:00:00:00". */
bool scan_is_uniform(const struct scan *scan, size_t at, size_t bytes);

bool scan_is_uuid(const char *text, size_t bytes);

/* A reserved address, the same everywhere: unspecified, loopback, multicast, a mask. */
bool scan_is_reserved(uint32_t address);

/* Four numbers up to 255 with `separator` between them. */
size_t scan_quad(const struct scan *scan, size_t at, char separator, uint32_t *ret_address);
void scan_write_quad(struct scan *scan, uint32_t address, char separator);

/* scrub_address.c */
recogniser scan_match_uuid, scan_match_short_uuid, scan_match_mac, scan_match_interface, scan_match_guid,
    scan_match_ipv6, scan_match_ipv4, scan_match_dashed_ipv4;

#endif
