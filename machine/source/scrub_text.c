/* SPDX-License-Identifier: Apache-2.0 */
/* scrub_text.c - replaces identifiers, paths, names of users and hosts, and words in a text. */
#include "common/redact.h"
#include "common/text.h"
#include "scrub.h"

#include <arpa/inet.h>
#include <ctype.h>
#include <string.h>
#include <strings.h>

#define NAME_BYTES 256

struct scan {
    struct scrub *scrub;
    const char *text;
    size_t bytes;
    unsigned flags;
    const char *words;
    FILE *out;
};

/* Tried at each position: writes the replacement and returns the length of the match, 0 if there is none. */
typedef size_t matcher(struct scan *scan, size_t at);

static char byte_at(const struct scan *scan, size_t at)
{
    return at < scan->bytes ? scan->text[at] : '\0';
}

static bool is_alnum_at(const struct scan *scan, size_t at)
{
    return isalnum((unsigned char)byte_at(scan, at)) != 0;
}

/* Is the byte before a position part of a word? */
static bool is_within_word(const struct scan *scan, size_t at)
{
    return at > 0 && is_alnum_at(scan, at - 1);
}

static bool has_text(const struct scan *scan, size_t at, const char *text)
{
    return strlen(text) <= scan->bytes - at && strncasecmp(scan->text + at, text, strlen(text)) == 0;
}

/* --- numbers of what is known --- */

int scrub_number(struct scrub *scrub, enum scrub_map map, const char *key)
{
    json_t *known = json_object_get(scrub->maps[map], key);
    int number = (int)json_object_size(scrub->maps[map]) + 1;

    if (known)
        return (int)json_integer_value(known);
    json_object_set_new_nocheck(scrub->maps[map], key, json_integer(number));
    return number;
}

/* The number of a name in any case. Names that are too long are distinguished by a hash and their length. */
static int number_of(struct scrub *scrub, enum scrub_map map, const char *name, size_t n)
{
    char key[NAME_BYTES + 40];
    size_t i;

    for (i = 0; i < n && i < NAME_BYTES - 1; i++)
        key[i] = name[i] == '_' && map == SCRUB_UUID ? '-' : (char)tolower((unsigned char)name[i]);
    key[i] = '\0';
    if (i < n)
        text_append(key, sizeof(key), "%016llx%zu", (unsigned long long)text_hash(name, n), n);
    return scrub_number(scrub, map, key);
}

/* --- addresses --- */

static uint32_t scrub_ipv4(struct scrub *scrub, uint32_t address)
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

static void write_ipv4(struct scan *scan, const char *text, size_t n)
{
    char separator = memchr(text, '-', n) ? '-' : '.';
    uint32_t address;

    identifier_ipv4(text, n, 0, separator, &address);
    address = scrub_ipv4(scan->scrub, address);
    fprintf(scan->out, "%u%c%u%c%u%c%u", address >> 24, separator, address >> 16 & 255, separator, address >> 8 & 255,
            separator, address & 255);
}

static void write_ipv6(struct scan *scan, const char *original, size_t n)
{
    struct in6_addr address, written = {0};
    char text[64];
    static const uint8_t link_local[4] = {0xfe, 0x80}, documentation[4] = {0x20, 0x01, 0x0d, 0xb8};
    uint8_t *to = written.s6_addr;
    uint32_t number;

    snprintf(text, sizeof(text), "%.*s", (int)n, original);
    inet_pton(AF_INET6, text, &address);
    if (IN6_IS_ADDR_V4MAPPED(&address)) {
        memcpy(&number, address.s6_addr + 12, sizeof(number));
        number = scrub_ipv4(scan->scrub, ntohl(number));
        to[10] = to[11] = 0xff;
    } else {
        inet_ntop(AF_INET6, &address, text, sizeof(text));
        number = (uint32_t)scrub_number(scan->scrub, SCRUB_IPV6, text);
        memcpy(to, IN6_IS_ADDR_LINKLOCAL(&address) ? link_local : documentation, 4);
    }
    for (int i = 0; i < 4; i++)
        to[15 - i] = (uint8_t)(number >> 8 * i);
    inet_ntop(AF_INET6, &written, text, sizeof(text));
    /* GIDs are written in full. */
    if (n != 39)
        fputs(text, scan->out);
    for (int i = 0; n == 39 && i < 16; i += 2)
        fprintf(scan->out, "%s%02x%02x", i ? ":" : "", to[i], to[i + 1]);
}

static void write_mac(struct scan *scan, const char *original, size_t n)
{
    char separator = isxdigit((unsigned char)original[2]) ? '\0' : original[2], text[18];
    unsigned number = (unsigned)number_of(scan->scrub, SCRUB_MAC, original, n);

    snprintf(text, sizeof(text), number < 256 ? "00:00:5e:00:53:%02x" : "02:00:00:00:00:%02x", number & 255);
    if (number >= 256)
        snprintf(text, sizeof(text), "02:00:00:%02x:%02x:%02x", number >> 16 & 255, number >> 8 & 255, number & 255);
    for (char *c = text; *c; c++)
        if (*c != ':' || separator)
            fputc(*c == ':' ? separator : *c, scan->out);
}

/* --- UUIDs --- */

void scrub_learn_uuids(struct scrub *scrub, const char *text, size_t bytes)
{
    char uuid[37] = "";

    for (size_t at = 8; at + 28 <= bytes; at++) {
        if (text[at] != '-' || !identifier_is_uuid(text + at - 8, bytes - at + 8))
            continue;
        for (size_t i = 0; i < 36; i++)
            uuid[i] = (char)tolower((unsigned char)text[at - 8 + i]);
        json_object_set_new_nocheck(scrub->maps[SCRUB_UUIDS], uuid, json_true());
    }
}

/* A short form is written in full. */
static void write_uuid(struct scan *scan, const char *text, size_t n)
{
    char dash = n == 36 ? text[8] : '-';
    const char *found = NULL;
    int n_found = 0, number;

    FOR_MEMBERS (key, value, scan->scrub->maps[SCRUB_UUIDS]) {
        if (n < 36 && strncasecmp(key, text, n) == 0) {
            found = key;
            n_found++;
        }
    }
    number = number_of(scan->scrub, SCRUB_UUID, n_found == 1 ? found : text, n_found == 1 ? 36 : n);
    fprintf(scan->out, "00000000%c0000%c0000%c0000%c%012x", dash, dash, dash, dash, number);
}

/* --- users and hosts --- */

/* Names that identify nobody and also occur in paths, packages and devices. */
static const char common_names[] =
    "root ubuntu debian nvidia admin user users test home local lib opt kubernetes nobody slurm docker node host gpu "
    "cpu localhost none cuda python nccl nvshmem data work workspace";

void scrub_learn_name(struct scrub *scrub, enum scrub_map map, const char *name)
{
    char lower[NAME_BYTES];
    size_t n = strlen(name);

    /* Shorter names are too common. */
    if (n < 3 || n >= sizeof(lower) || scrub_is_among(name, n, common_names))
        return;
    for (size_t i = 0; i <= n; i++)
        lower[i] = (char)tolower((unsigned char)name[i]);
    json_object_set_new_nocheck(scrub->maps[SCRUB_NAMES], lower, json_integer(map));
}

static size_t match_name(struct scan *scan, size_t at)
{
    FOR_MEMBERS (name, map, scan->scrub->maps[SCRUB_NAMES]) {
        size_t n = strlen(name);
        bool is_word = !is_within_word(scan, at) && !is_alnum_at(scan, at + n);

        /* A longer name is also replaced within words: "liberika", "erika0". */
        if (!has_text(scan, at, name) || (!is_word && (n < 5 || strspn(name, "0123456789.") == n)))
            continue;
        fprintf(scan->out, "%s%d", json_integer_value(map) == SCRUB_USER ? "user" : "host",
                number_of(scan->scrub, (enum scrub_map)json_integer_value(map), scan->text + at, n));
        return n;
    }
    return 0;
}

/* --- identifiers --- */

static void write_identifier(struct scan *scan, enum identifier_kind kind, const char *text, size_t n)
{
    switch (kind) {
    case IDENTIFIER_UUID:
    case IDENTIFIER_UUID_PART:
        write_uuid(scan, text, n);
        break;
    case IDENTIFIER_MAC:
        write_mac(scan, text, n);
        break;
    case IDENTIFIER_GUID:
        fprintf(scan->out, "0000:0000:0000:%04x", number_of(scan->scrub, SCRUB_GUID, text, n) & 0xffff);
        break;
    case IDENTIFIER_IPV4:
        write_ipv4(scan, text, n);
        break;
    case IDENTIFIER_IPV6:
        write_ipv6(scan, text, n);
        break;
    case IDENTIFIER_SECRET:
        fprintf(scan->out, "word%d", number_of(scan->scrub, SCRUB_WORD, text, n));
        break;
    }
}

static size_t match_identifier(struct scan *scan, size_t at)
{
    struct identifier found;

    if (!identifier_at(scan->text, scan->bytes, at, scan->flags & SCRUB_VERSIONS, &found))
        return 0;
    /* Where only known words stay, secrets are unknown words, and the words in front of them have to be known too. */
    if (found.kind == IDENTIFIER_SECRET && scan->words)
        return 0;
    fwrite(scan->text + at, 1, found.before, scan->out);
    write_identifier(scan, found.kind, scan->text + at + found.before, found.bytes);
    return found.before + found.bytes;
}

/* --- paths --- */

/* "fd00::/48", a network. */
static bool is_prefix_length(const struct scan *scan, size_t at)
{
    size_t n = 1;

    while (n < 4 && isdigit((unsigned char)byte_at(scan, at + n)))
        n++;
    return n > 1 && at > 0 && scan->text[at - 1] == ':' && !is_alnum_at(scan, at + n) && byte_at(scan, at + n) != '/';
}

/* "10:70:fd:31:82:9e" or "fe80::1" as a part of a path: a ':' does not end it. Its length, or 0. */
static size_t address_part(const struct scan *scan, size_t at)
{
    size_t n = 0, colons = 0, digits = 0;

    for (; isxdigit((unsigned char)byte_at(scan, at + n)) || byte_at(scan, at + n) == ':'; n++) {
        digits = byte_at(scan, at + n) == ':' ? 0 : digits + 1;
        colons += digits == 0;
        if (digits > 4)
            return 0;
    }
    return colons >= 2 ? n : 0;
}

static size_t match_path(struct scan *scan, size_t at)
{
    size_t n = 0;

    if (scan->text[at] != '/' || (scan->flags & SCRUB_NAME) || is_prefix_length(scan, at) ||
        (at > 0 && !strchr(" \t\r\n\"'=:,;()[]{}<>|`", scan->text[at - 1])))
        return 0;
    while (byte_at(scan, at + n) && !strchr(" \t\r\n\"'=:,;()[]{}<>|`&", scan->text[at + n])) {
        n++;
        if (scan->text[at + n - 1] == '/')
            n += address_part(scan, at + n);
    }
    scrub_path(scan->scrub, scan->text + at, n, scan->out);
    return n;
}

static size_t match_library(struct scan *scan, size_t at)
{
    size_t n = is_within_word(scan, at) ? 0 : scrub_library_bytes(scan->text + at, scan->bytes - at);

    if (n)
        scrub_library(scan->scrub, scan->text + at, n, scan->out);
    return n;
}

/* --- words --- */

bool scrub_is_among(const char *word, size_t bytes, const char *words)
{
    for (size_t i; *words; words += *words == ' ') {
        for (i = 0; *words && !strchr(" *", *words); words++) {
            size_t digits = 0;

            while (*words == '#' && i + digits < bytes && digits < 6 && isdigit((unsigned char)word[i + digits]))
                digits++;
            if (*words == '#' ? digits == 0 : i >= bytes || tolower((unsigned char)word[i]) != tolower(*words))
                break;
            i += *words == '#' ? digits : 1;
        }
        if (*words == '*' || (i == bytes && (!*words || *words == ' ')))
            return true;
        words += strcspn(words, " ");
    }
    return false;
}

/* "8", "512M", "0x1f": a number with a unit of at most two letters. Serial numbers and GUIDs are longer. */
static bool is_short_number(const char *word, size_t n)
{
    size_t digits = 0, letters = 0;

    if (n > 2 && n <= 12 && word[0] == '0' && tolower((unsigned char)word[1]) == 'x') {
        while (2 + digits < n && isxdigit((unsigned char)word[2 + digits]))
            digits++;
        return 2 + digits == n;
    }
    while (digits < n && isdigit((unsigned char)word[digits]))
        digits++;
    while (digits + letters < n && isalpha((unsigned char)word[digits + letters]))
        letters++;
    return digits > 0 && digits <= 9 && digits + letters == n && letters <= (digits > 6 ? 0u : 2u);
}

/* "enp12s0f1np1", "rocep145s0", "mlx5": a kind of device, then locations (systemd.net-naming). */
static bool is_device(const char *word, size_t n)
{
    static const char *const kinds[] = {"en",  "eth", "ib",    "roce", "rdma", "bond", "wl",  "ww",   "docker", "lo",
                                        "mlx", "efa", "irdma", "rxe",  "siw",  "hns",  "nic", "rail", "bnxt",   "re"};
    size_t used = 0;

    for (size_t i = 0; i < COUNT(kinds); i++)
        if (n >= strlen(kinds[i]) && strncmp(word, kinds[i], strlen(kinds[i])) == 0 && strlen(kinds[i]) > used)
            used = strlen(kinds[i]);
    while (used > 0 && used < n) {
        size_t letters = 0, digits = 0;

        while (used + letters < n && strchr("Popsfdnvibu", word[used + letters]))
            letters++;
        while (used + letters + digits < n && isdigit((unsigned char)word[used + letters + digits]))
            digits++;
        if (letters > 2 || digits == 0 || digits > 5)
            return false;
        used += letters + digits;
    }
    return used > 0;
}

bool scrub_is_known(const struct scrub *scrub, const char *word, size_t n, const char *words)
{
    static const char replacements[] = "word# host# user# dir#";

    FOR_MEMBERS (device, value, scrub->maps[SCRUB_DEVICES])
        if (n > 1 && n <= strlen(device) && strncmp(device, word, n) == 0)
            return true;
    return n == 1 || is_short_number(word, n) || is_device(word, n) || scrub_is_among(word, n, replacements) ||
           scrub_is_among(word, n, words);
}

/* The last matcher, for what no other matches. */
static size_t match_word(struct scan *scan, size_t at)
{
    size_t n = 0;

    if (!scan->words)
        return 0;
    /* A UUID after a word is not part of it. */
    while ((is_alnum_at(scan, at + n) || (unsigned char)byte_at(scan, at + n) >= 0x80) &&
           !identifier_is_uuid(scan->text + at + n, scan->bytes - at - n))
        n++;
    if (n && scrub_is_known(scan->scrub, scan->text + at, n, scan->words))
        fwrite(scan->text + at, 1, n, scan->out);
    else if (n)
        fprintf(scan->out, "word%d", number_of(scan->scrub, SCRUB_WORD, scan->text + at, n));
    return n;
}

void scrub_text(struct scrub *scrub, const char *text, size_t bytes, unsigned flags, const char *words, FILE *out)
{
    static matcher *const matchers[] = {match_path, match_library, match_identifier, match_name, match_word};
    struct scan scan = {.scrub = scrub, .text = text, .bytes = bytes, .flags = flags, .words = words, .out = out};
    size_t at = 0;

    while (at < bytes) {
        size_t n = 0;

        for (size_t i = 0; n == 0 && i < COUNT(matchers); i++)
            n = matchers[i](&scan, at);
        if (n == 0)
            fputc((unsigned char)text[at++], out);
        at += n;
    }
}
