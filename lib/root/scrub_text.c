/* SPDX-License-Identifier: Apache-2.0 */
/*
 * scrub_text.c - the general pass: finds in any text what looks like an identifier, and writes what stands for it.
 *
 * One scan from left to right. At each place the recognisers are tried in their order; the first that knows what it
 * sees writes the replacement and says how many bytes it stands for.
 */
#include "root/scrub.h"

#include <arpa/inet.h>
#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define UUID_BYTES 36
#define HEX_RUN 16   /* hexadecimal digits in a row that are no number of a program any more */
#define DIGIT_RUN 12 /* decimal ones: serial numbers of GPUs have 13 */
#define TOKEN_RUN 20 /* letters of both cases and digits: a token */
#define NAME_BYTES 256

struct scan {
    struct scrub *scrub;
    const char *text;
    size_t bytes;
    unsigned flags;
    FILE *out;
};

typedef size_t recogniser(struct scan *scan, size_t at);

/* The byte at a place, NUL outside of the text. */
static char at_of(const struct scan *scan, size_t at)
{
    return at < scan->bytes ? scan->text[at] : '\0';
}

static char before(const struct scan *scan, size_t at)
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

/* Bytes from `at` on that are alphanumeric or one of `others`. */
static size_t run_of(const struct scan *scan, size_t at, const char *others)
{
    size_t n = 0;

    while (at + n < scan->bytes && scan->text[at + n] &&
           (is_alnum(scan->text[at + n]) || strchr(others, scan->text[at + n])))
        n++;
    return n;
}

/* At most NAME_BYTES - 1 bytes as a string, in lower case. */
static void take(const struct scan *scan, size_t at, size_t n, char ret_name[NAME_BYTES])
{
    if (n >= NAME_BYTES)
        n = NAME_BYTES - 1;
    for (size_t i = 0; i < n; i++)
        ret_name[i] = (char)tolower((unsigned char)scan->text[at + i]);
    ret_name[n] = '\0';
}

/* A number for `n` bytes of any length: a longer one than fits into a name is told apart by a hash and its length. */
static int number_of(const struct scan *scan, enum scrub_map map, size_t at, size_t n)
{
    char key[NAME_BYTES + 40];
    uint64_t hash = 14695981039346656037u;

    take(scan, at, n, key);
    if (n >= NAME_BYTES) {
        for (size_t i = 0; i < n; i++)
            hash = (hash ^ (unsigned char)scan->text[at + i]) * 1099511628211u;
        snprintf(key + strlen(key), 40, "%016llx%zu", (unsigned long long)hash, n);
    }
    return scrub_number(scan->scrub, map, key);
}

/* --- numbers of what is known --- */

int scrub_number(struct scrub *scrub, enum scrub_map map, const char *key)
{
    json_t *known = json_object_get(scrub->maps[map], key);
    int number = (int)json_object_size(scrub->maps[map]) + 1;

    if (known)
        return (int)json_integer_value(known);
    if (json_object_set_new_nocheck(scrub->maps[map], key, json_integer(number)) < 0)
        scrub->failed = true;
    return number;
}

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

static bool is_uuid(const char *text, size_t bytes)
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
        if (text[at] != '-' || !is_uuid(text + at - 8, bytes - at + 8))
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

static size_t see_uuid(struct scan *scan, size_t at)
{
    char uuid[NAME_BYTES];

    if (!is_hex(at_of(scan, at)) || !is_uuid(scan->text + at, scan->bytes - at))
        return 0;
    take(scan, at, UUID_BYTES, uuid);
    for (size_t i = 0; i < UUID_BYTES; i++)
        uuid[i] = uuid[i] == '_' ? '-' : uuid[i];
    write_uuid(scan, uuid, at_of(scan, at + 8));
    return UUID_BYTES;
}

/* "GPU-8932f937", a short form of one UUID: written in full. */
static size_t see_short_uuid(struct scan *scan, size_t at)
{
    char given[NAME_BYTES];
    const char *key, *found = NULL;
    int n_found = 0;
    size_t n = 4;
    json_t *value;

    if (at_of(scan, at) != 'G' || scan->bytes - at < 6 || strncmp(scan->text + at, "GPU-", 4) != 0 ||
        is_alnum(before(scan, at)))
        return 0;
    while (is_hex(at_of(scan, at + n)) || at_of(scan, at + n) == '-')
        n++;
    if (n < 6 || is_uuid(scan->text + at + 4, scan->bytes - at - 4) || is_alnum(at_of(scan, at + n)))
        return 0;
    take(scan, at + 4, n - 4, given);
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

/* Groups of hexadecimal digits with one separator between them. */
struct groups {
    int n;
    size_t bytes, least, most; /* in all; digits of the shortest and the longest group */
};

static struct groups see_groups(const struct scan *scan, size_t at, char separator)
{
    struct groups groups = {.least = SIZE_MAX};

    for (;;) {
        size_t digits = 0;

        while (is_hex(at_of(scan, at + groups.bytes + digits)))
            digits++;
        if (digits == 0)
            return (struct groups){0};
        groups.n++;
        groups.bytes += digits;
        groups.least = digits < groups.least ? digits : groups.least;
        groups.most = digits > groups.most ? digits : groups.most;
        if (at_of(scan, at + groups.bytes) != separator || !is_hex(at_of(scan, at + groups.bytes + 1)))
            return groups;
        groups.bytes++;
    }
}

/* Does the text consist of `c` and separators alone? Then it says nothing: "00:00:00:00:00:00". */
static bool is_only(const struct scan *scan, size_t at, size_t bytes, char c)
{
    for (size_t i = 0; i < bytes; i++)
        if (is_alnum(scan->text[at + i]) && tolower((unsigned char)scan->text[at + i]) != c)
            return false;
    return true;
}

static bool says_nothing(const struct scan *scan, size_t at, size_t bytes)
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

/* Hardware addresses of Ethernet (6 bytes), of EUI-64 (8) and of IP over InfiniBand (20). */
static size_t see_mac(struct scan *scan, size_t at)
{
    struct groups groups;
    char separator = at_of(scan, at + 2);

    if (!is_hex(at_of(scan, at)) || (separator != ':' && separator != '-') || is_hex(before(scan, at)) ||
        before(scan, at) == separator)
        return 0;
    groups = see_groups(scan, at, separator);
    if (groups.n < 6 || groups.least != 2 || groups.most != 2)
        return 0;
    if (says_nothing(scan, at, groups.bytes))
        fwrite(scan->text + at, 1, groups.bytes, scan->out);
    else
        write_mac(scan, number_of(scan, SCRUB_MAC, at, groups.bytes), separator);
    return groups.bytes;
}

/* "enx00005e005301", the name of an interface by its address. */
static size_t see_interface(struct scan *scan, size_t at)
{
    if (strncmp(scan->text + at, "enx", scan->bytes - at < 3 ? scan->bytes - at : 3) != 0 || scan->bytes - at < 15 ||
        is_alnum(before(scan, at)))
        return 0;
    for (size_t i = 3; i < 15; i++)
        if (!is_hex(at_of(scan, at + i)))
            return 0;
    fputs("enx", scan->out);
    write_mac(scan, number_of(scan, SCRUB_MAC, at + 3, 12), '\0');
    return 15;
}

static size_t see_guid(struct scan *scan, size_t at)
{
    struct groups groups;

    if (!is_hex(at_of(scan, at)) || at_of(scan, at + 4) != ':' || is_hex(before(scan, at)) || before(scan, at) == ':')
        return 0;
    groups = see_groups(scan, at, ':');
    if (groups.n != 4 || groups.least != 4 || groups.most != 4)
        return 0;
    if (says_nothing(scan, at, groups.bytes))
        fwrite(scan->text + at, 1, groups.bytes, scan->out);
    else
        fprintf(scan->out, "0000:0000:0000:%04x", (unsigned)number_of(scan, SCRUB_GUID, at, groups.bytes) & 0xffff);
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

/* GIDs are written like it, in full. */
static size_t see_ipv6(struct scan *scan, size_t at)
{
    struct in6_addr address;
    char text[64];
    size_t n = 0, digits = 0;

    if ((!is_hex(at_of(scan, at)) && at_of(scan, at) != ':') || is_alnum(before(scan, at)) || before(scan, at) == ':')
        return 0;
    while (n < sizeof(text) - 1 &&
           (is_hex(at_of(scan, at + n)) || at_of(scan, at + n) == ':' || at_of(scan, at + n) == '.'))
        n++;
    if (is_alnum(at_of(scan, at + n)))
        return 0;
    while (n > 2 && (scan->text[at + n - 1] == '.' || (scan->text[at + n - 1] == ':' && scan->text[at + n - 2] != ':')))
        n--;
    memcpy(text, scan->text + at, n);
    text[n] = '\0';
    for (size_t i = 0; i < n; i++)
        digits += is_hex(text[i]);
    /* Fewer digits identify nobody, and are parts of programs: a slice 1::2, a list of one-digit numbers. */
    if (n < 6 || inet_pton(AF_INET6, text, &address) != 1 || digits < (strstr(text, "::") ? 4u : 16u))
        return 0;
    if (says_nothing(scan, at, n) || IN6_IS_ADDR_MULTICAST(&address))
        fwrite(text, 1, n, scan->out);
    else
        write_ipv6(scan, &address, n == 39);
    return n;
}

/* Four numbers up to 255 with `separator` between them. */
static size_t see_quad(const struct scan *scan, size_t at, char separator, uint32_t *ret_address)
{
    size_t n = 0;

    *ret_address = 0;
    for (int i = 0; i < 4; i++) {
        unsigned value = 0;
        size_t digits = 0;

        if (i > 0 && at_of(scan, at + n++) != separator)
            return 0;
        for (; digits < 4 && is_digit(at_of(scan, at + n)); digits++)
            value = value * 10 + (unsigned)(scan->text[at + n++] - '0');
        if (digits == 0 || digits > 3 || value > 255)
            return 0;
        *ret_address = *ret_address << 8 | value;
    }
    return is_digit(at_of(scan, at + n)) ? 0 : n;
}

static void write_quad(struct scan *scan, uint32_t address, char separator)
{
    fprintf(scan->out, "%u%c%u%c%u%c%u", address >> 24, separator, address >> 16 & 255, separator, address >> 8 & 255,
            separator, address & 255);
}

static bool is_nobodys(uint32_t address)
{
    return address == 0 || address >> 24 == 127 || address >> 24 >= 224;
}

static size_t see_ipv4(struct scan *scan, size_t at)
{
    char c = before(scan, at), next;
    uint32_t address;
    size_t n;

    if (!is_digit(at_of(scan, at)) || is_digit(c) || (c == '.' && at > 1 && is_digit(scan->text[at - 2])))
        return 0;
    n = see_quad(scan, at, '.', &address);
    next = at_of(scan, at + n);
    if (n == 0 || (next == '.' && is_digit(at_of(scan, at + n + 1))))
        return 0;
    if ((scan->flags & SCRUB_VERSIONS) && ((c && (is_alnum(c) || strchr("-_.+", c))) || (next && strchr("-_+", next))))
        return 0;
    write_quad(scan, is_nobodys(address) ? address : scrub_ipv4(scan->scrub, address), '.');
    return n;
}

/* "ip-10-0-0-1", a host that is named by its address. */
static size_t see_dashed_ipv4(struct scan *scan, size_t at)
{
    uint32_t address;
    size_t n;

    if (at_of(scan, at) != 'i' || at_of(scan, at + 1) != 'p' || at_of(scan, at + 2) != '-' ||
        is_alnum(before(scan, at)))
        return 0;
    n = see_quad(scan, at + 3, '-', &address);
    if (n == 0)
        return 0;
    fputs("ip-", scan->out);
    write_quad(scan, scrub_ipv4(scan->scrub, address), '-');
    return n + 3;
}

/* --- users and hosts --- */

static bool ends_with(const char *text, const char *end)
{
    size_t n = strlen(text), n_end = strlen(end);

    return n >= n_end && strcmp(text + n - n_end, end) == 0;
}

/* Places that everybody knows. */
static bool is_public_host(const char *host)
{
    static const char *const hosts[] = {"github.com", "nvidia.com", "pytorch.org", "python.org",
                                        "kernel.org", "gnu.org",    "apache.org",  "llvm.org",
                                        "debian.org", "ubuntu.com", "nvcr.io",     "opensource.org"};

    for (size_t i = 0; i < sizeof(hosts) / sizeof(hosts[0]); i++) {
        size_t n = strlen(host), n_public = strlen(hosts[i]);

        if (ends_with(host, hosts[i]) && (n == n_public || host[n - n_public - 1] == '.'))
            return true;
    }
    return false;
}

static void write_host(struct scan *scan, size_t at, size_t n)
{
    char host[NAME_BYTES];

    take(scan, at, n, host);
    if (is_public_host(host))
        fwrite(scan->text + at, 1, n, scan->out);
    else
        fprintf(scan->out, "host%d", number_of(scan, SCRUB_HOST, at, n));
}

/* "://user:password@host:port" */
static size_t see_url(struct scan *scan, size_t at)
{
    size_t n = 0, host = 0, n_host, quad;
    uint32_t address;

    if (at_of(scan, at) != ':' || at_of(scan, at + 1) != '/' || at_of(scan, at + 2) != '/')
        return 0;
    while (at + 3 + n < scan->bytes && !strchr("/ \t\r\n\"'<>`)", at_of(scan, at + 3 + n)))
        n++;
    for (size_t i = 0; i < n; i++)
        if (scan->text[at + 3 + i] == '@')
            host = i + 1;
    fputs("://", scan->out);
    if (host)
        fputs("user@", scan->out);
    n_host = run_of(scan, at + 3 + host, ".-_");
    if (n_host > n - host)
        n_host = n - host;
    quad = see_quad(scan, at + 3 + host, '.', &address);
    if (n_host == 0)
        return host ? 3 + host : 3;
    if (quad == n_host)
        write_quad(scan, scrub_ipv4(scan->scrub, address), '.');
    else
        write_host(scan, at + 3 + host, n_host);
    return 3 + host + n_host;
}

static size_t see_mail(struct scan *scan, size_t at)
{
    static const char others[] = "._%+~:-";
    size_t n, n_host;
    char c = before(scan, at);

    if (!is_alnum(at_of(scan, at)) || is_alnum(c) || (c && strchr(others, c)))
        return 0;
    n = run_of(scan, at, others);
    if (at_of(scan, at + n) != '@' || !is_alnum(at_of(scan, at + n + 1)))
        return 0;
    n_host = run_of(scan, at + n + 1, ".-_");
    fputs("user@host", scan->out);
    return n + 1 + n_host;
}

/* A name with dots whose last part is one of the net. Programs are full of the shorter ones. */
static size_t see_host(struct scan *scan, size_t at)
{
    static const char *const ends[] = {".internal", ".local", ".cluster.local", ".amazonaws.com",
                                       ".lan",      ".corp",  ".intra",         ".home.arpa"};
    static const char *const nets[] = {".com", ".net", ".org", ".io", ".edu", ".gov", ".cloud", ".dev",    ".ai",
                                       ".de",  ".cn",  ".eu",  ".uk", ".fr",  ".jp",  ".co",    ".example"};
    char host[NAME_BYTES];
    bool known = false;
    int dots = 0;
    size_t n;

    if (!is_alnum(at_of(scan, at)) || is_alnum(before(scan, at)) || before(scan, at) == '_' ||
        before(scan, at) == '.' || before(scan, at) == '-')
        return 0;
    n = run_of(scan, at, ".-");
    while (n > 0 && !is_alnum(scan->text[at + n - 1]))
        n--;
    take(scan, at, n, host);
    for (size_t i = 0; host[i]; i++)
        dots += host[i] == '.';
    for (size_t i = 0; i < sizeof(ends) / sizeof(ends[0]); i++)
        known = known || (ends_with(host, ends[i]) && dots >= (scan->flags & SCRUB_CODE ? 2 : 1));
    for (size_t i = 0; !(scan->flags & (SCRUB_CODE | SCRUB_VERSIONS)) && i < sizeof(nets) / sizeof(nets[0]); i++)
        known = known || ends_with(host, nets[i]);
    if (!known || n >= NAME_BYTES)
        return 0;
    write_host(scan, at, n);
    return n;
}

void scrub_learn_name(struct scrub *scrub, enum scrub_map map, const char *name)
{
    /* Names that say nothing, and that are words of paths, packages and devices as well. */
    static const char *const common[] = {"root",  "ubuntu", "debian", "nvidia",  "admin", "user",       "users",
                                         "test",  "home",   "local",  "lib",     "opt",   "kubernetes", "nobody",
                                         "slurm", "docker", "node",   "host",    "gpu",   "localhost",  "none",
                                         "cuda",  "python", "nccl",   "nvshmem", "data",  "work",       "workspace"};
    char lower[NAME_BYTES];
    size_t n = strlen(name);

    if (n < 3 || n >= sizeof(lower))
        return;
    for (size_t i = 0; i <= n; i++)
        lower[i] = (char)tolower((unsigned char)name[i]);
    for (size_t i = 0; i < sizeof(common) / sizeof(common[0]); i++)
        if (strcmp(lower, common[i]) == 0)
            return;
    if (json_object_set_new_nocheck(scrub->names, lower, json_integer(map)) < 0)
        scrub->failed = true;
}

static size_t see_name(struct scan *scan, size_t at)
{
    const char *name;
    json_t *map;

    if (is_alnum(before(scan, at)))
        return 0;
    json_object_foreach(scan->scrub->names, name, map)
    {
        size_t n = strlen(name);

        if (n > scan->bytes - at || strncasecmp(scan->text + at, name, n) != 0 || is_alnum(at_of(scan, at + n)))
            continue;
        fprintf(scan->out, "%s%d", json_integer_value(map) == SCRUB_USER ? "user" : "host",
                number_of(scan, (enum scrub_map)json_integer_value(map), at, n));
        return n;
    }
    return 0;
}

/* --- secrets --- */

static size_t see_key_block(struct scan *scan, size_t at)
{
    static const char begin[] = "-----BEGIN ";

    if (scan->bytes - at < sizeof(begin) - 1 || memcmp(scan->text + at, begin, sizeof(begin) - 1) != 0)
        return 0;
    fputs("secret", scan->out);
    return scan->bytes - at;
}

static void write_secret(struct scan *scan, size_t at, size_t n)
{
    fprintf(scan->out, "secret%d", number_of(scan, SCRUB_SECRET, at, n));
}

/* What follows words like password and an equals sign. */
static size_t see_assignment(struct scan *scan, size_t at)
{
    static const char *const words[] = {"password",    "passwd",   "passphrase", "secret",      "token",
                                        "apikey",      "api_key",  "access_key", "private_key", "credential",
                                        "credentials", "username", "user"};
    size_t n = run_of(scan, at, "_"), start, length = 0;
    char word[NAME_BYTES];
    bool known = false;

    if (n == 0 || n > 64 || is_alnum(before(scan, at)) || before(scan, at) == '_' || (scan->flags & SCRUB_CODE))
        return 0;
    take(scan, at, n, word);
    for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++)
        known = known || ends_with(word, words[i]);
    start = at + n;
    if (!known || (at_of(scan, start) != '=' && at_of(scan, start) != ':'))
        return 0;
    start++;
    while (at_of(scan, start) == ' ' || at_of(scan, start) == '"' || at_of(scan, start) == '\'')
        start++;
    while (start + length < scan->bytes && !strchr(" \t\r\n\"',;&", at_of(scan, start + length)))
        length++;
    if (length == 0)
        return 0;
    fwrite(scan->text + at, 1, start - at, scan->out);
    write_secret(scan, start, length);
    return start - at + length;
}

static bool begins_as_secret(const char *text, size_t n)
{
    static const char *const beginnings[] = {"hf_",    "ghp_",   "gho_", "ghs_",     "github_pat_", "sk-",
                                             "xoxb-",  "xoxp-",  "AKIA", "ASIA",     "AIza",        "ya29",
                                             "glpat-", "nvapi-", "eyJ",  "dckr_pat_"};

    for (size_t i = 0; i < sizeof(beginnings) / sizeof(beginnings[0]); i++)
        if (n >= 12 && strncmp(text, beginnings[i], strlen(beginnings[i])) == 0)
            return true;
    return false;
}

static size_t see_token(struct scan *scan, size_t at)
{
    size_t n, upper = 0, lower = 0, digits = 0, hex = 0, marks = 0;
    const char *text = scan->text + at;

    if (!is_alnum(at_of(scan, at)) || is_alnum(before(scan, at)))
        return 0;
    n = run_of(scan, at, "_+-");
    for (size_t i = 0; i < n; i++) {
        upper += isupper((unsigned char)text[i]) != 0;
        lower += islower((unsigned char)text[i]) != 0;
        digits += is_digit(text[i]);
        hex += is_hex(text[i]);
        marks += !is_alnum(text[i]);
    }
    if (begins_as_secret(text, n)) {
        write_secret(scan, at, n);
        return n;
    }
    /* A number with 0x in front. */
    if (n > HEX_RUN + 1 && text[0] == '0' && text[1] == 'x' && hex == n - 1 && !says_nothing(scan, at + 2, n - 2)) {
        write_secret(scan, at, n);
        return n;
    }
    if ((digits == n && n >= DIGIT_RUN && !says_nothing(scan, at, n)) ||
        (hex == n && n >= HEX_RUN && digits > 0 && !says_nothing(scan, at, n)) ||
        (n >= TOKEN_RUN && upper && lower && digits && marks <= n / 8 && strncmp(text, "_Z", 2) != 0)) {
        write_secret(scan, at, n);
        return n;
    }
    return 0;
}

/* --- paths --- */

static bool begins_path(char c)
{
    return !c || strchr(" \t\r\n\"'=:,;()[]{}<>|`", c);
}

static size_t see_path(struct scan *scan, size_t at)
{
    size_t n = 0;

    if (at_of(scan, at) != '/' || (scan->flags & SCRUB_NAME) || !begins_path(before(scan, at)))
        return 0;
    while (at + n < scan->bytes && scan->text[at + n] && !strchr(" \t\r\n\"'=:,;()[]{}<>|`&", scan->text[at + n]))
        n++;
    scrub_path(scan->scrub, scan->text + at, n, scan->out);
    return n;
}

void scrub_text(struct scrub *scrub, const char *text, size_t bytes, unsigned flags, FILE *out)
{
    static recogniser *const recognisers[] = {
        see_uuid, see_short_uuid,  see_mac,  see_interface, see_guid,      see_ipv6,       see_url,  see_path,
        see_ipv4, see_dashed_ipv4, see_mail, see_host,      see_key_block, see_assignment, see_name, see_token};
    struct scan scan = {.scrub = scrub, .text = text, .bytes = bytes, .flags = flags, .out = out};
    size_t at = 0;

    while (at < bytes) {
        size_t n = 0;

        for (size_t i = 0; n == 0 && i < sizeof(recognisers) / sizeof(recognisers[0]); i++)
            n = recognisers[i](&scan, at);
        if (n == 0)
            fputc((unsigned char)text[at++], out);
        at += n;
    }
}
