/* SPDX-License-Identifier: Apache-2.0 */
/* scrub_address.c - the general pass: UUIDs, hardware and network addresses. */
#include "scrub_scan.h"

#include <arpa/inet.h>
#include <string.h>

#define UUID_BYTES 36

/* --- IPv4 addresses --- */

uint32_t scrub_ipv4(struct scrub *scrub, uint32_t address)
{
    static const uint32_t nets[] = {0xc0000200, 0xc6336400, 0xcb007100}; /* RFC 5737 */
    char key[16];
    uint32_t number;

    snprintf(key, sizeof(key), "%08x", address);
    number = (uint32_t)scrub_number(scrub, SCRUB_IPV4, key);
    if (number <= 3 * 254)
        return nets[(number - 1) / 254] + (number - 1) % 254 + 1;
    return 0xc6120000 + (number & 0x1ffff); /* RFC 2544 */
}

/* --- UUIDs --- */

bool scan_is_uuid(const char *text, size_t bytes)
{
    if (bytes < UUID_BYTES)
        return false;
    for (int i = 0; i < UUID_BYTES; i++) {
        bool dash = i == 8 || i == 13 || i == 18 || i == 23;

        if (dash ? text[i] != '-' && text[i] != '_' : !is_hex(text[i]))
            return false;
    }
    return true;
}

void scrub_learn_uuids(struct scrub *scrub, const char *text, size_t bytes)
{
    char uuid[UUID_BYTES + 1];

    for (size_t at = 8; at + UUID_BYTES - 8 <= bytes; at++) {
        if (text[at] != '-' || !scan_is_uuid(text + at - 8, bytes - at + 8))
            continue;
        for (int i = 0; i < UUID_BYTES; i++)
            uuid[i] = (char)tolower((unsigned char)text[at - 8 + (size_t)i]);
        uuid[UUID_BYTES] = '\0';
        if (json_object_set_nocheck(scrub->uuids, uuid, json_true()) < 0)
            scrub->failed = true;
    }
}

static void write_uuid(struct scan *scan, const char *uuid, char dash)
{
    int number = scrub_number(scan->scrub, SCRUB_UUID, uuid);

    fprintf(scan->out, "00000000%c0000%c0000%c0000%c%012x", dash, dash, dash, dash, number);
}

size_t scan_match_uuid(struct scan *scan, size_t at)
{
    char uuid[SCAN_NAME_BYTES];

    if (!is_hex(scan_at(scan, at)) || !scan_is_uuid(scan->text + at, scan->bytes - at))
        return 0;
    scan_copy_lower(scan, at, UUID_BYTES, uuid);
    for (size_t i = 0; i < UUID_BYTES; i++)
        uuid[i] = uuid[i] == '_' ? '-' : uuid[i];
    write_uuid(scan, uuid, scan_at(scan, at + 8));
    return UUID_BYTES;
}

/* "GPU-8932f937", a short form of a UUID, is written in full. */
size_t scan_match_short_uuid(struct scan *scan, size_t at)
{
    char given[SCAN_NAME_BYTES];
    const char *key, *found = NULL;
    int n_found = 0;
    size_t n = 4;
    json_t *value;

    if (scan_at(scan, at) != 'G' || scan->bytes - at < 6 || strncmp(scan->text + at, "GPU-", 4) != 0 ||
        is_alnum(scan_before(scan, at)))
        return 0;
    /* An address after "GPU-" is not part of a UUID, and is replaced as a whole. */
    while (is_hex(scan_at(scan, at + n)) || (scan_at(scan, at + n) && strchr("-:.", scan_at(scan, at + n))))
        n++;
    while (n > 4 && strchr(":.", scan_at(scan, at + n - 1)))
        n--;
    if (n < 6 || scan_is_uuid(scan->text + at + 4, scan->bytes - at - 4) || is_alnum(scan_at(scan, at + n)))
        return 0;
    scan_copy_lower(scan, at + 4, n - 4, given);
    json_object_foreach(scan->scrub->uuids, key, value)
    {
        if (strncmp(key, given, strlen(given)) == 0) {
            found = key;
            n_found++;
        }
    }
    fputs("GPU-", scan->out);
    write_uuid(scan, n_found == 1 ? found : given, '-');
    return n;
}

/* --- addresses --- */

/* Does `at` continue an address? In "addr:fe80::1" it does not: "addr" is not a group. */
static bool is_inside(const struct scan *scan, size_t at)
{
    char before = at > 1 ? scan->text[at - 2] : '\0';

    return scan_before(scan, at) == ':' && (is_hex(before) || before == ':' || before == '\0');
}

/* Groups of hexadecimal digits with one separator between them. */
struct groups {
    int n;
    size_t bytes, least, most; /* in all; digits of the shortest and the longest group */
};

static struct groups match_groups(const struct scan *scan, size_t at, char separator)
{
    struct groups groups = {.least = SIZE_MAX};

    for (;;) {
        size_t digits = 0;

        while (is_hex(scan_at(scan, at + groups.bytes + digits)))
            digits++;
        if (digits == 0)
            return (struct groups){0};
        groups.n++;
        groups.bytes += digits;
        groups.least = digits < groups.least ? digits : groups.least;
        groups.most = digits > groups.most ? digits : groups.most;
        if (scan_at(scan, at + groups.bytes) != separator || !is_hex(scan_at(scan, at + groups.bytes + 1)))
            return groups;
        groups.bytes++;
    }
}

/* Does the text consist only of `c` and separators? Then it identifies nothing: "00:00:00:00:00:00". */
static bool is_only(const struct scan *scan, size_t at, size_t bytes, char c)
{
    for (size_t i = 0; i < bytes; i++)
        if (is_alnum(scan->text[at + i]) && tolower((unsigned char)scan->text[at + i]) != c)
            return false;
    return true;
}

bool scan_is_uniform(const struct scan *scan, size_t at, size_t bytes)
{
    return is_only(scan, at, bytes, '0') || is_only(scan, at, bytes, 'f');
}

static void write_mac(struct scan *scan, int number, char separator)
{
    char text[18];

    if (number < 256)
        snprintf(text, sizeof(text), "00:00:5e:00:53:%02x", (unsigned)number);
    else
        snprintf(text, sizeof(text), "02:00:00:%02x:%02x:%02x", (unsigned)number >> 16 & 255,
                 (unsigned)number >> 8 & 255, (unsigned)number & 255);
    for (char *c = text; *c; c++)
        if (*c != ':' || separator)
            fputc(*c == ':' ? separator : *c, scan->out);
}

/* "1070.fd31.829e", as switches write Ethernet addresses. Without a letter it is a version or a number. */
static size_t match_dotted_mac(struct scan *scan, size_t at)
{
    struct groups groups;
    size_t letters = 0;

    if (is_alnum(scan_before(scan, at)) || scan_before(scan, at) == '.')
        return 0;
    groups = match_groups(scan, at, '.');
    for (size_t i = 0; i < groups.bytes; i++)
        letters += isalpha((unsigned char)scan->text[at + i]) != 0;
    if (groups.n != 3 || groups.least != 4 || groups.most != 4 || letters == 0)
        return 0;
    write_mac(scan, scan_number(scan, SCRUB_MAC, at, groups.bytes), '\0');
    return groups.bytes;
}

/* Hardware addresses of Ethernet (6 bytes), of EUI-64 (8) and of IP over InfiniBand (20). */
size_t scan_match_mac(struct scan *scan, size_t at)
{
    struct groups groups;
    char separator = scan_at(scan, at + 2);

    if (is_hex(scan_at(scan, at)) && scan_at(scan, at + 4) == '.')
        return match_dotted_mac(scan, at);
    if (!is_hex(scan_at(scan, at)) || (separator != ':' && separator != '-') || is_hex(scan_before(scan, at)) ||
        (separator == ':' ? is_inside(scan, at) : scan_before(scan, at) == separator))
        return 0;
    groups = match_groups(scan, at, separator);
    if (groups.n < 6 || groups.least != 2 || groups.most != 2)
        return 0;
    if (scan_is_uniform(scan, at, groups.bytes))
        fwrite(scan->text + at, 1, groups.bytes, scan->out);
    else
        write_mac(scan, scan_number(scan, SCRUB_MAC, at, groups.bytes), separator);
    return groups.bytes;
}

/* "enx00005e005301", an interface named by its address. */
size_t scan_match_interface(struct scan *scan, size_t at)
{
    if (strncmp(scan->text + at, "enx", scan->bytes - at < 3 ? scan->bytes - at : 3) != 0 || scan->bytes - at < 15 ||
        is_alnum(scan_before(scan, at)))
        return 0;
    for (size_t i = 3; i < 15; i++)
        if (!is_hex(scan_at(scan, at + i)))
            return 0;
    fputs("enx", scan->out);
    write_mac(scan, scan_number(scan, SCRUB_MAC, at + 3, 12), '\0');
    return 15;
}

size_t scan_match_guid(struct scan *scan, size_t at)
{
    struct groups groups;

    if (!is_hex(scan_at(scan, at)) || scan_at(scan, at + 4) != ':' || is_hex(scan_before(scan, at)) ||
        is_inside(scan, at))
        return 0;
    groups = match_groups(scan, at, ':');
    if (groups.n != 4 || groups.least != 4 || groups.most != 4)
        return 0;
    if (scan_is_uniform(scan, at, groups.bytes))
        fwrite(scan->text + at, 1, groups.bytes, scan->out);
    else
        fprintf(scan->out, "0000:0000:0000:%04x", (unsigned)scan_number(scan, SCRUB_GUID, at, groups.bytes) & 0xffff);
    return groups.bytes;
}

static void write_ipv6(struct scan *scan, const struct in6_addr *address, bool in_full)
{
    struct in6_addr written = {0};
    char key[INET6_ADDRSTRLEN], text[INET6_ADDRSTRLEN];
    const uint8_t *from = address->s6_addr;
    uint8_t *to = written.s6_addr;
    uint32_t number;

    if (IN6_IS_ADDR_V4MAPPED(address)) {
        number = scrub_ipv4(scan->scrub,
                            (uint32_t)from[12] << 24 | (uint32_t)from[13] << 16 | (uint32_t)from[14] << 8 | from[15]);
        to[10] = to[11] = 0xff;
    } else {
        inet_ntop(AF_INET6, address, key, sizeof(key));
        number = (uint32_t)scrub_number(scan->scrub, SCRUB_IPV6, key);
        if (IN6_IS_ADDR_LINKLOCAL(address))
            memcpy(to, (const uint8_t[]){0xfe, 0x80}, 2);
        else
            memcpy(to, (const uint8_t[]){0x20, 0x01, 0x0d, 0xb8}, 4);
    }
    for (int i = 0; i < 4; i++)
        to[15 - i] = (uint8_t)(number >> 8 * i);
    inet_ntop(AF_INET6, &written, text, sizeof(text));
    if (!in_full)
        fputs(text, scan->out);
    for (int i = 0; in_full && i < 16; i += 2)
        fprintf(scan->out, "%s%02x%02x", i ? ":" : "", to[i], to[i + 1]);
}

/* GIDs are written like IPv6 addresses, in full. */
size_t scan_match_ipv6(struct scan *scan, size_t at)
{
    struct in6_addr address;
    char text[64];
    size_t n = 0, digits = 0;

    if ((!is_hex(scan_at(scan, at)) && scan_at(scan, at) != ':') || is_alnum(scan_before(scan, at)) ||
        is_inside(scan, at))
        return 0;
    while (n < sizeof(text) - 1 &&
           (is_hex(scan_at(scan, at + n)) || scan_at(scan, at + n) == ':' || scan_at(scan, at + n) == '.'))
        n++;
    if (is_alnum(scan_at(scan, at + n)))
        return 0;
    while (n > 2 && (scan->text[at + n - 1] == '.' || (scan->text[at + n - 1] == ':' && scan->text[at + n - 2] != ':')))
        n--;
    memcpy(text, scan->text + at, n);
    text[n] = '\0';
    for (size_t i = 0; i < n; i++)
        digits += is_hex(text[i]);
    /* Fewer digits identify nothing and occur in programs: a slice 1::2, a list of one-digit numbers. */
    if (n < 6 || inet_pton(AF_INET6, text, &address) != 1 || digits < (strstr(text, "::") ? 4u : 16u))
        return 0;
    if (scan_is_uniform(scan, at, n) || IN6_IS_ADDR_MULTICAST(&address))
        fwrite(text, 1, n, scan->out);
    else
        write_ipv6(scan, &address, n == 39);
    return n;
}

/* Four numbers up to 255 with `separator` between them. */
size_t scan_quad(const struct scan *scan, size_t at, char separator, uint32_t *ret_address)
{
    size_t n = 0;

    *ret_address = 0;
    for (int i = 0; i < 4; i++) {
        unsigned value = 0;
        size_t digits = 0;

        if (i > 0 && scan_at(scan, at + n++) != separator)
            return 0;
        for (; digits < 4 && is_digit(scan_at(scan, at + n)); digits++)
            value = value * 10 + (unsigned)(scan->text[at + n++] - '0');
        if (digits == 0 || digits > 3 || value > 255)
            return 0;
        *ret_address = *ret_address << 8 | value;
    }
    return is_digit(scan_at(scan, at + n)) ? 0 : n;
}

void scan_write_quad(struct scan *scan, uint32_t address, char separator)
{
    fprintf(scan->out, "%u%c%u%c%u%c%u", address >> 24, separator, address >> 16 & 255, separator, address >> 8 & 255,
            separator, address & 255);
}

bool scan_is_reserved(uint32_t address)
{
    return address == 0 || address >> 24 == 127 || address >> 24 >= 224;
}

size_t scan_match_ipv4(struct scan *scan, size_t at)
{
    char c = scan_before(scan, at), next;
    uint32_t address;
    size_t n;

    if (!is_digit(scan_at(scan, at)) || is_digit(c) || (c == '.' && at > 1 && is_digit(scan->text[at - 2])))
        return 0;
    n = scan_quad(scan, at, '.', &address);
    next = scan_at(scan, at + n);
    if (n == 0 || (next == '.' && is_digit(scan_at(scan, at + n + 1))))
        return 0;
    /* Before a port or a prefix length it is an address, whatever precedes it. */
    if ((scan->flags & SCRUB_VERSIONS) && !(next && strchr(":/", next) && is_digit(scan_at(scan, at + n + 1))) &&
        ((c && (is_alnum(c) || strchr("-_.+", c))) || (next && strchr("-_+", next))))
        return 0;
    scan_write_quad(scan, scan_is_reserved(address) ? address : scrub_ipv4(scan->scrub, address), '.');
    return n;
}

/* "ip-10-0-0-1", a host named by its address. */
size_t scan_match_dashed_ipv4(struct scan *scan, size_t at)
{
    uint32_t address;
    size_t n;

    if (scan_at(scan, at) != 'i' || scan_at(scan, at + 1) != 'p' || scan_at(scan, at + 2) != '-' ||
        is_alnum(scan_before(scan, at)))
        return 0;
    n = scan_quad(scan, at + 3, '-', &address);
    if (n == 0)
        return 0;
    fputs("ip-", scan->out);
    scan_write_quad(scan, scrub_ipv4(scan->scrub, address), '-');
    return n + 3;
}
