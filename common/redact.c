/* SPDX-License-Identifier: Apache-2.0 */
#include "redact.h"

#include "text.h"

#include <arpa/inet.h>
#include <ctype.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#define UUID_BYTES 36

/* The text that is searched. */
struct scan {
    const char *text;
    size_t bytes;
    bool has_versions;
};

/* The recogniser of a row: the bytes of an identifier at a position, 0 without one. Sets *ret_before if there are any.
 */
typedef size_t recogniser(const struct scan *scan, size_t at, size_t *ret_before);

/* The byte at a position, NUL outside of the text. */
static char byte_at(const struct scan *scan, size_t at)
{
    return at < scan->bytes ? scan->text[at] : '\0';
}

static char byte_before(const struct scan *scan, size_t at)
{
    return at > 0 ? scan->text[at - 1] : '\0';
}

static bool is_alnum(char c)
{
    return isalnum((unsigned char)c) != 0;
}

static bool is_hex(char c)
{
    return isxdigit((unsigned char)c) != 0;
}

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

static bool is_one_of(char c, const char *bytes)
{
    return c && strchr(bytes, c);
}

/* Does a word begin at this position? `others` belong to words as well. */
static bool begins_word(const struct scan *scan, size_t at, const char *others)
{
    char c = byte_before(scan, at);

    return is_alnum(byte_at(scan, at)) && !is_alnum(c) && !is_one_of(c, others);
}

static bool has_text(const struct scan *scan, size_t at, const char *text)
{
    size_t n = strlen(text);

    return n <= scan->bytes - at && strncasecmp(scan->text + at, text, n) == 0;
}

static size_t run_of_hex(const struct scan *scan, size_t at)
{
    size_t n = 0;

    while (is_hex(byte_at(scan, at + n)))
        n++;
    return n;
}

/* All zeros or all ones identify nothing: "00:00:00:00:00:00". */
static bool is_uniform(const struct scan *scan, size_t at, size_t bytes)
{
    size_t zeros = 0, ones = 0, others = 0;

    for (size_t i = at; i < at + bytes; i++) {
        char c = (char)tolower((unsigned char)scan->text[i]);

        *(c == '0' ? &zeros : c == 'f' ? &ones : &others) += is_alnum(c);
    }
    return others == 0 && (zeros == 0 || ones == 0);
}

/* --- UUIDs --- */

bool identifier_is_uuid(const char *text, size_t bytes)
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

static size_t match_uuid(const struct scan *scan, size_t at, size_t *ret_before)
{
    (void)ret_before;
    return identifier_is_uuid(scan->text + at, scan->bytes - at) ? UUID_BYTES : 0;
}

/* "GPU-8932f937", a short form. An address after "GPU-" is replaced as a whole too. */
static size_t match_uuid_part(const struct scan *scan, size_t at, size_t *ret_before)
{
    size_t n = 4;

    if (byte_at(scan, at) != 'G' || !has_text(scan, at, "GPU-") || is_alnum(byte_before(scan, at)))
        return 0;
    while (is_hex(byte_at(scan, at + n)) || is_one_of(byte_at(scan, at + n), "-:."))
        n++;
    while (n > 4 && is_one_of(byte_at(scan, at + n - 1), ":."))
        n--;
    if (n < 6 || identifier_is_uuid(scan->text + at + 4, scan->bytes - at - 4) || is_alnum(byte_at(scan, at + n)))
        return 0;
    *ret_before = 4;
    return n - 4;
}

/* --- addresses --- */

/* Does `at` continue an address? In "addr:fe80::1" it does not: "addr" is not a group. */
static bool is_inside(const struct scan *scan, size_t at)
{
    char before = at > 1 ? scan->text[at - 2] : '\0';

    return byte_before(scan, at) == ':' && (is_hex(before) || before == ':' || before == '\0');
}

/* The length of groups of `digits` hexadecimal digits with one separator between them; 0 if a group has others. */
static size_t groups_at(const struct scan *scan, size_t at, char separator, size_t digits, int *ret_n)
{
    size_t n = 0;

    for (*ret_n = 1;; ++*ret_n) {
        if (run_of_hex(scan, at + n) != digits)
            return 0;
        n += digits;
        if (byte_at(scan, at + n) != separator || !is_hex(byte_at(scan, at + n + 1)))
            return n;
        n++;
    }
}

/* Ethernet (6 bytes), EUI-64 (8), IP over InfiniBand (20); "1070.fd31.829e" of switches, which without a letter is a
 * version. */
static size_t match_mac(const struct scan *scan, size_t at, size_t *ret_before)
{
    char separator = byte_at(scan, at + 2);
    size_t n, letters = 0;
    int n_groups;

    (void)ret_before;
    if (!is_hex(byte_at(scan, at)))
        return 0;
    if (byte_at(scan, at + 4) == '.' && begins_word(scan, at, ".")) {
        n = groups_at(scan, at, '.', 4, &n_groups);
        for (size_t i = at; i < at + n; i++)
            letters += isalpha((unsigned char)scan->text[i]) != 0;
        return n_groups == 3 && letters ? n : 0;
    }
    if ((separator != ':' && separator != '-') || is_hex(byte_before(scan, at)) ||
        (separator == ':' ? is_inside(scan, at) : byte_before(scan, at) == separator))
        return 0;
    n = groups_at(scan, at, separator, 2, &n_groups);
    return n_groups >= 6 && !is_uniform(scan, at, n) ? n : 0;
}

/* "enx00005e005301", an interface named by its address. */
static size_t match_interface(const struct scan *scan, size_t at, size_t *ret_before)
{
    if (!has_text(scan, at, "enx") || is_alnum(byte_before(scan, at)) || run_of_hex(scan, at + 3) < 12)
        return 0;
    *ret_before = 3;
    return 12;
}

static size_t match_guid(const struct scan *scan, size_t at, size_t *ret_before)
{
    int n_groups;
    size_t n;

    (void)ret_before;
    if (byte_at(scan, at + 4) != ':' || is_hex(byte_before(scan, at)) || is_inside(scan, at))
        return 0;
    n = groups_at(scan, at, ':', 4, &n_groups);
    return n_groups == 4 && !is_uniform(scan, at, n) ? n : 0;
}

static size_t match_ipv6(const struct scan *scan, size_t at, size_t *ret_before)
{
    struct in6_addr address;
    char text[64];
    size_t n = 0, digits = 0;

    (void)ret_before;
    if ((!is_hex(byte_at(scan, at)) && byte_at(scan, at) != ':') || is_alnum(byte_before(scan, at)) ||
        is_inside(scan, at))
        return 0;
    while (n < sizeof(text) - 1 && (is_hex(byte_at(scan, at + n)) || is_one_of(byte_at(scan, at + n), ":.")))
        n++;
    if (is_alnum(byte_at(scan, at + n)))
        return 0;
    while (n > 2 && (scan->text[at + n - 1] == '.' || (scan->text[at + n - 1] == ':' && scan->text[at + n - 2] != ':')))
        n--;
    snprintf(text, sizeof(text), "%.*s", (int)n, scan->text + at);
    for (size_t i = 0; i < n; i++)
        digits += is_hex(text[i]);
    /* Fewer digits identify nothing and occur in programs: a slice 1::2, a list of one-digit numbers. */
    if (n < 6 || inet_pton(AF_INET6, text, &address) != 1 || digits < (strstr(text, "::") ? 4u : 16u))
        return 0;
    return is_uniform(scan, at, n) || IN6_IS_ADDR_MULTICAST(&address) ? 0 : n;
}

size_t identifier_ipv4(const char *text, size_t bytes, size_t at, char separator, uint32_t *ret_address)
{
    const struct scan scan = {.text = text, .bytes = bytes};
    size_t n = 0;

    *ret_address = 0;
    for (int i = 0; i < 4; i++) {
        unsigned value = 0;
        size_t digits = 0;

        if (i > 0 && byte_at(&scan, at + n++) != separator)
            return 0;
        for (; digits < 4 && is_digit(byte_at(&scan, at + n)); digits++)
            value = value * 10 + (unsigned)(text[at + n++] - '0');
        if (digits == 0 || digits > 3 || value > 255)
            return 0;
        *ret_address = *ret_address << 8 | value;
    }
    return is_digit(byte_at(&scan, at + n)) ? 0 : n;
}

static size_t match_ipv4(const struct scan *scan, size_t at, size_t *ret_before)
{
    char c = byte_before(scan, at), next;
    uint32_t address;
    size_t n;

    /* "ip-10-0-0-1", a host named by its address. */
    if (byte_at(scan, at) == 'i' && has_text(scan, at, "ip-") && !is_alnum(c)) {
        n = identifier_ipv4(scan->text, scan->bytes, at + 3, '-', &address);
        *ret_before = n ? 3 : 0;
        return n;
    }
    if (!is_digit(byte_at(scan, at)) || is_digit(c) || (c == '.' && at > 1 && is_digit(scan->text[at - 2])))
        return 0;
    n = identifier_ipv4(scan->text, scan->bytes, at, '.', &address);
    next = byte_at(scan, at + n);
    /* Unspecified, loopback, multicast and masks are the same everywhere. */
    if (n == 0 || (next == '.' && is_digit(byte_at(scan, at + n + 1))) || address == 0 || address >> 24 == 127 ||
        address >> 24 >= 224)
        return 0;
    /* Before a port or a prefix length it is an address, whatever precedes it. */
    if (scan->has_versions && !(is_one_of(next, ":/") && is_digit(byte_at(scan, at + n + 1))) &&
        (is_alnum(c) || is_one_of(c, "-_.+") || is_one_of(next, "-_+")))
        return 0;
    return n;
}

/* The first row that matches counts. */
static const struct {
    enum identifier_kind kind;
    recogniser *match;
} rows[] = {
    {IDENTIFIER_UUID, match_uuid},     {IDENTIFIER_UUID_PART, match_uuid_part}, {IDENTIFIER_MAC, match_mac},
    {IDENTIFIER_MAC, match_interface}, {IDENTIFIER_GUID, match_guid},           {IDENTIFIER_IPV6, match_ipv6},
    {IDENTIFIER_IPV4, match_ipv4},
};

bool identifier_at(const char *text, size_t bytes, size_t at, bool has_versions, struct identifier *ret_identifier)
{
    const struct scan scan = {.text = text, .bytes = bytes, .has_versions = has_versions};

    for (size_t i = 0; i < COUNT(rows); i++) {
        size_t before = 0, n = rows[i].match(&scan, at, &before);

        if (n == 0)
            continue;
        *ret_identifier = (struct identifier){.kind = rows[i].kind, .before = before, .bytes = n};
        return true;
    }
    return false;
}

/* --- names and addresses --- */

bool identifier_is_secret_name(const char *name)
{
    static const char *const words[] = {"TOKEN",      "SECRET",     "PASSW",   "PASSPHRASE", "PASSCODE",
                                        "PGPASS",     "CREDENTIAL", "PRIVATE", "API_KEY",    "APIKEY",
                                        "ACCESS_KEY", "AUTH",       "COOKIE",  "_PSK",       "MAGIC"};
    static const char *const ends[] = {"_KEY", "_PWD", "_PAT", "_PASS"};
    size_t length = strlen(name);

    for (size_t i = 0; i < COUNT(words); i++)
        if (strcasestr(name, words[i]))
            return true;
    for (size_t i = 0; i < COUNT(ends); i++)
        if (length > strlen(ends[i]) && strcasecmp(name + length - strlen(ends[i]), ends[i]) == 0)
            return true;
    return strcasecmp(name, "PASS") == 0;
}

bool identifier_has_password(const char *address)
{
    for (const char *at = address; (at = strstr(at, "://")) != NULL;) {
        const char *user = at += 3, *last = user + strcspn(user, "/ \t\r\n\"'<>`)");
        const char *sign = memrchr(user, '@', (size_t)(last - user));
        const char *colon = sign ? memchr(user, ':', (size_t)(sign - user)) : NULL;

        if (colon && colon + 1 < sign)
            return true;
    }
    return false;
}
