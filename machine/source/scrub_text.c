/* SPDX-License-Identifier: Apache-2.0 */
/*
 * scrub_text.c - the general pass: finds identifiers in any text and writes their replacements. This file has users,
 * hosts, secrets and paths; addresses are in scrub_address.c.
 */
#include "common/text.h"
#include "scrub_scan.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define HEX_RUN 16   /* from this many hexadecimal digits on, a run is an identifier */
#define DIGIT_RUN 12 /* the same for decimal digits; serial numbers of GPUs have 13 */
#define TOKEN_RUN 20 /* the same for letters of both cases and digits: a token */

size_t scan_run(const struct scan *scan, size_t at, const char *others)
{
    size_t n = 0;

    while (at + n < scan->bytes && scan->text[at + n] &&
           (is_alnum(scan->text[at + n]) || strchr(others, scan->text[at + n])))
        n++;
    return n;
}

void scan_copy_lower(const struct scan *scan, size_t at, size_t n, char ret_name[SCAN_NAME_BYTES])
{
    if (n >= SCAN_NAME_BYTES)
        n = SCAN_NAME_BYTES - 1;
    for (size_t i = 0; i < n; i++)
        ret_name[i] = (char)tolower((unsigned char)scan->text[at + i]);
    ret_name[n] = '\0';
}

/* Names that are too long are distinguished by a hash and their length. */
int scan_number(const struct scan *scan, enum scrub_map map, size_t at, size_t n)
{
    char key[SCAN_NAME_BYTES + 40];

    scan_copy_lower(scan, at, n, key);
    if (n >= SCAN_NAME_BYTES)
        text_append(key, sizeof(key), "%016llx%zu", (unsigned long long)text_hash(scan->text + at, n), n);
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

/* --- users and hosts --- */

static bool is_public_host(const char *host)
{
    static const char *const hosts[] = {"github.com", "nvidia.com", "pytorch.org", "python.org",
                                        "kernel.org", "gnu.org",    "apache.org",  "llvm.org",
                                        "debian.org", "ubuntu.com", "nvcr.io",     "opensource.org"};

    for (size_t i = 0; i < COUNT(hosts); i++) {
        size_t n = strlen(host), n_public = strlen(hosts[i]);

        if (text_ends(host, hosts[i]) && (n == n_public || host[n - n_public - 1] == '.'))
            return true;
    }
    return false;
}

static void write_host(struct scan *scan, size_t at, size_t n)
{
    char host[SCAN_NAME_BYTES];

    scan_copy_lower(scan, at, n, host);
    if (is_public_host(host))
        fwrite(scan->text + at, 1, n, scan->out);
    else
        fprintf(scan->out, "host%d", scan_number(scan, SCRUB_HOST, at, n));
}

/* Port and path after a host. A path at a public host may be named after a project as well. */
static size_t finish_url(struct scan *scan, size_t at)
{
    size_t port = scan_at(scan, at) == ':' ? 1 : 0, n = 0;

    while (port && is_digit(scan_at(scan, at + port)))
        port++;
    fwrite(scan->text + at, 1, port, scan->out);
    while (at + port + n < scan->bytes && !strchr(" \t\r\n\"'<>`)", scan_at(scan, at + port + n)))
        n++;
    if (scan_at(scan, at + port) != '/')
        return port;
    scrub_path(scan->scrub, scan->text + at + port, n, scan->out);
    return port + n;
}

/* "://user:password@host:port/path" */
static size_t match_url(struct scan *scan, size_t at)
{
    size_t n = 0, host = at + 3, n_host, quad;
    uint32_t address;

    if (scan_at(scan, at) != ':' || scan_at(scan, at + 1) != '/' || scan_at(scan, at + 2) != '/')
        return 0;
    while (at + 3 + n < scan->bytes && !strchr("/ \t\r\n\"'<>`)", scan_at(scan, at + 3 + n)))
        n++;
    for (size_t i = at + 3; i < at + 3 + n; i++)
        if (scan->text[i] == '@')
            host = i + 1;
    fputs(host > at + 3 ? "://user@" : "://", scan->out);
    n_host = scan_run(scan, host, ".-_");
    quad = scan_quad(scan, host, '.', &address);
    if (n_host == 0)
        return host - at;
    if (quad == n_host)
        scan_write_quad(scan, scan_is_reserved(address) ? address : scrub_ipv4(scan->scrub, address), '.');
    else
        write_host(scan, host, n_host);
    host += n_host;
    return host - at + finish_url(scan, host);
}

static size_t match_mail(struct scan *scan, size_t at)
{
    static const char others[] = "._%+~:-";
    size_t n, n_host;
    char c = scan_before(scan, at);

    if (!is_alnum(scan_at(scan, at)) || is_alnum(c) || (c && strchr(others, c)))
        return 0;
    n = scan_run(scan, at, others);
    if (scan_at(scan, at + n) != '@' || !is_alnum(scan_at(scan, at + n + 1)))
        return 0;
    n_host = scan_run(scan, at + n + 1, ".-_");
    fputs("user@host", scan->out);
    return n + 1 + n_host;
}

/* A name with dots that ends with a top-level domain. Shorter dotted names are common in programs. */
static size_t match_host(struct scan *scan, size_t at)
{
    static const char *const ends[] = {
        ".internal", ".local", ".cluster.local", ".amazonaws.com", ".lan", ".corp", ".intra", ".home.arpa", NULL};
    static const char *const nets[] = {".com", ".net", ".org", ".io", ".edu", ".gov", ".cloud", ".dev",     ".ai",
                                       ".de",  ".cn",  ".eu",  ".uk", ".fr",  ".jp",  ".co",    ".example", NULL};
    char host[SCAN_NAME_BYTES];
    int dots = 0;
    bool known;
    size_t n;

    if (!is_alnum(scan_at(scan, at)) || is_alnum(scan_before(scan, at)) || scan_before(scan, at) == '_' ||
        scan_before(scan, at) == '.' || scan_before(scan, at) == '-')
        return 0;
    n = scan_run(scan, at, ".-");
    while (n > 0 && !is_alnum(scan->text[at + n - 1]))
        n--;
    scan_copy_lower(scan, at, n, host);
    for (size_t i = 0; host[i]; i++)
        dots += host[i] == '.';
    known = (dots >= 1 && text_ends_any(host, ends)) || (!(scan->flags & SCRUB_VERSIONS) && text_ends_any(host, nets));
    if (!known || n >= SCAN_NAME_BYTES)
        return 0;
    write_host(scan, at, n);
    return n;
}

void scrub_learn_name(struct scrub *scrub, enum scrub_map map, const char *name)
{
    /* Names that identify nobody and also occur in paths, packages and devices. */
    static const char *const common[] = {
        "root", "ubuntu", "debian",     "nvidia", "admin",   "user",   "users", "test",      "home", "local",
        "lib",  "opt",    "kubernetes", "nobody", "slurm",   "docker", "node",  "host",      "gpu",  "localhost",
        "none", "cuda",   "python",     "nccl",   "nvshmem", "data",   "work",  "workspace", NULL};
    char lower[SCAN_NAME_BYTES];
    size_t n = strlen(name);

    if (n == 0 || n >= sizeof(lower))
        return;
    for (size_t i = 0; i <= n; i++)
        lower[i] = (char)tolower((unsigned char)name[i]);
    if (text_is_any(lower, common))
        return;
    if (json_object_set_new_nocheck(scrub->names, lower, json_integer(map)) < 0)
        scrub->failed = true;
}

/* "acme[001-064,070]-ib,login": finds the brackets and the ends of names. */
void scrub_learn_hosts(struct scrub *scrub, const char *list)
{
    char name[SCAN_NAME_BYTES];

    while (*list) {
        size_t n = strcspn(list, ",[");

        if (n > 0 && n < sizeof(name)) {
            memcpy(name, list, n);
            name[n] = '\0';
            if (list[n] != '[')
                scrub_learn_name(scrub, SCRUB_HOST, name);
            else if (n > 2 && !scrub_is_plain(name, n) &&
                     json_object_set_new_nocheck(scrub->stems, name, json_true()) < 0)
                scrub->failed = true;
        }
        list += n;
        if (*list == '[')
            list += strcspn(list, "]");
        list += *list != '\0';
        if (list[-1] == ']')
            list += strcspn(list, ",");
    }
}

/* A host of a list: the prefix before the brackets, a number, and the suffix. */
static size_t match_stem(struct scan *scan, size_t at)
{
    const char *stem;
    json_t *value;

    if (is_alnum(scan_before(scan, at)))
        return 0;
    json_object_foreach(scan->scrub->stems, stem, value)
    {
        size_t n = strlen(stem), used;

        if (n > scan->bytes - at || strncasecmp(scan->text + at, stem, n) != 0 || !is_digit(scan_at(scan, at + n)))
            continue;
        used = n + scan_run(scan, at + n, "-");
        fprintf(scan->out, "host%d", scan_number(scan, SCRUB_HOST, at, used));
        return used;
    }
    return 0;
}

/* Names of one or two letters are matched only as whole words: elsewhere they are too common. */
static bool is_too_short(const struct scan *scan, size_t at, size_t n)
{
    char before = scan_before(scan, at), behind = scan_at(scan, at + n);

    if (n > 2)
        return false;
    return !(scan->flags & SCRUB_WORDS) || (before && strchr("-_.", before)) || (behind && strchr("-_", behind)) ||
           scrub_is_plain(scan->text + at, n);
}

/* A name that is not a word of software is also replaced within longer words: "liberika", "erika0". */
static bool is_distinct(const char *name, size_t n)
{
    return n >= 5 && !scrub_is_plain(name, n) && strspn(name, "0123456789.") != n;
}

static size_t match_library(struct scan *scan, size_t at)
{
    size_t n;

    if (is_alnum(scan_before(scan, at)))
        return 0;
    n = scrub_library_bytes(scan->text + at, scan->bytes - at);
    if (n)
        scrub_library(scan->scrub, scan->text + at, n, scan->out);
    return n;
}

static size_t match_name(struct scan *scan, size_t at)
{
    const char *name;
    json_t *map;

    json_object_foreach(scan->scrub->names, name, map)
    {
        size_t n = strlen(name);

        if (n > scan->bytes - at || strncasecmp(scan->text + at, name, n) != 0 || is_too_short(scan, at, n))
            continue;
        if (!is_distinct(name, n) && (is_alnum(scan_before(scan, at)) || is_alnum(scan_at(scan, at + n))))
            continue;
        fprintf(scan->out, "%s%d", json_integer_value(map) == SCRUB_USER ? "user" : "host",
                scan_number(scan, (enum scrub_map)json_integer_value(map), at, n));
        return n;
    }
    return 0;
}

/* --- secrets --- */

static size_t match_key_block(struct scan *scan, size_t at)
{
    static const char begin[] = "-----BEGIN ";

    if (scan->bytes - at < sizeof(begin) - 1 || memcmp(scan->text + at, begin, sizeof(begin) - 1) != 0)
        return 0;
    fputs("secret", scan->out);
    return scan->bytes - at;
}

static void write_secret(struct scan *scan, size_t at, size_t n)
{
    fprintf(scan->out, "secret%d", scan_number(scan, SCRUB_SECRET, at, n));
}

/* The value after words like password and an equals sign. */
static size_t match_assignment(struct scan *scan, size_t at)
{
    static const char *const words[] = {"password",    "passwd",   "passphrase", "secret",      "token",
                                        "apikey",      "api_key",  "access_key", "private_key", "credential",
                                        "credentials", "username", "user",       NULL};
    size_t n = scan_run(scan, at, "_"), start, length = 0;
    char word[SCAN_NAME_BYTES];

    if (n == 0 || n > 64 || is_alnum(scan_before(scan, at)) || scan_before(scan, at) == '_')
        return 0;
    scan_copy_lower(scan, at, n, word);
    start = at + n;
    if (!text_ends_any(word, words) || (scan_at(scan, start) != '=' && scan_at(scan, start) != ':'))
        return 0;
    start++;
    while (scan_at(scan, start) == ' ' || scan_at(scan, start) == '"' || scan_at(scan, start) == '\'')
        start++;
    while (start + length < scan->bytes && !strchr(" \t\r\n\"',;&", scan_at(scan, start + length)))
        length++;
    if (length == 0)
        return 0;
    fwrite(scan->text + at, 1, start - at, scan->out);
    write_secret(scan, start, length);
    return start - at + length;
}

/* "Serial Number: 1654321", "serial=MT42": the value has no form of its own. */
static size_t match_serial(struct scan *scan, size_t at)
{
    static const char word[] = "serial", number[] = " number";
    size_t n = sizeof(word) - 1, start, length = 0, digits = 0;

    if (scan->bytes - at < n || strncasecmp(scan->text + at, word, n) != 0 || is_alnum(scan_before(scan, at)))
        return 0;
    start = at + n;
    if (scan->bytes - start > sizeof(number) && strncasecmp(scan->text + start, number, sizeof(number) - 1) == 0)
        start += sizeof(number) - 1;
    n = start;
    while (scan_at(scan, start) && strchr(" \t:=\"'#", scan_at(scan, start)))
        start++;
    while (is_alnum(scan_at(scan, start + length)) || scan_at(scan, start + length) == '_' ||
           scan_at(scan, start + length) == '-')
        digits += is_digit(scan_at(scan, start + length++));
    if (start == n || length < 4 || digits == 0)
        return 0;
    fwrite(scan->text + at, 1, start - at, scan->out);
    write_secret(scan, start, length);
    return start - at + length;
}

static bool begins_as_secret(const char *text, size_t n)
{
    static const char *const beginnings[] = {"hf_",    "ghp_",   "gho_", "ghs_",      "github_pat_", "sk-",
                                             "xoxb-",  "xoxp-",  "AKIA", "ASIA",      "AIza",        "ya29",
                                             "glpat-", "nvapi-", "eyJ",  "dckr_pat_", NULL};

    return n >= 12 && text_begins_any(text, beginnings);
}

/* "_ZN3c10...", a C++ symbol, looks like a token: letters of both cases and digits. */
static size_t match_symbol(struct scan *scan, size_t at)
{
    size_t n;

    if (scan_at(scan, at) != '_' || scan_at(scan, at + 1) != 'Z' || is_alnum(scan_before(scan, at)))
        return 0;
    n = scan_run(scan, at, "_");
    fwrite(scan->text + at, 1, n, scan->out);
    return n;
}

static size_t match_token(struct scan *scan, size_t at)
{
    size_t n, upper = 0, lower = 0, digits = 0, hex = 0, marks = 0;
    const char *text = scan->text + at;

    if (!is_alnum(scan_at(scan, at)) || is_alnum(scan_before(scan, at)))
        return 0;
    n = scan_run(scan, at, "_+-");
    /* A UUID after a word is not part of it. */
    for (size_t i = 0; i < n; i++)
        if (scan_is_uuid(scan->text + at + i, scan->bytes - at - i))
            n = i;
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
    /* A hexadecimal number after 0x. */
    if (n > HEX_RUN + 1 && text[0] == '0' && text[1] == 'x' && hex == n - 1 && !scan_is_uniform(scan, at + 2, n - 2)) {
        write_secret(scan, at, n);
        return n;
    }
    if ((digits == n && n >= DIGIT_RUN && !scan_is_uniform(scan, at, n)) ||
        (hex == n && n >= HEX_RUN && digits > 0 && !scan_is_uniform(scan, at, n)) ||
        (n >= TOKEN_RUN && upper && lower && digits && marks <= n / 8)) {
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

/* "fd00::/48", a network. */
static bool is_prefix_length(const struct scan *scan, size_t at)
{
    size_t n = 1;

    while (n < 4 && is_digit(scan_at(scan, at + n)))
        n++;
    return n > 1 && scan_before(scan, at) == ':' && !is_alnum(scan_at(scan, at + n)) && scan_at(scan, at + n) != '/';
}

/* "10:70:fd:31:82:9e" or "fe80::1" as a part of a path: a ':' does not end it. Its length, or 0. */
static size_t match_address_part(const struct scan *scan, size_t at)
{
    size_t n = 0, colons = 0, digits = 0;

    for (; is_hex(scan_at(scan, at + n)) || scan_at(scan, at + n) == ':'; n++) {
        digits = scan_at(scan, at + n) == ':' ? 0 : digits + 1;
        colons += digits == 0;
        if (digits > 4)
            return 0;
    }
    return colons >= 2 ? n : 0;
}

static size_t match_path(struct scan *scan, size_t at)
{
    size_t n = 0;

    if (scan_at(scan, at) != '/' || (scan->flags & SCRUB_NAME) || !begins_path(scan_before(scan, at)) ||
        is_prefix_length(scan, at))
        return 0;
    while (at + n < scan->bytes && scan->text[at + n] && !strchr(" \t\r\n\"'=:,;()[]{}<>|`&", scan->text[at + n])) {
        n++;
        if (scan->text[at + n - 1] == '/')
            n += match_address_part(scan, at + n);
    }
    scrub_path(scan->scrub, scan->text + at, n, scan->out);
    return n;
}

/* --- words --- */

static size_t match_release(struct scan *scan, size_t at)
{
    const char *release;
    json_t *kept;

    if (!is_digit(scan_at(scan, at)) || is_alnum(scan_before(scan, at)))
        return 0;
    json_object_foreach(scan->scrub->releases, release, kept)
    {
        size_t n = strlen(release);

        if (n > scan->bytes - at || strncmp(scan->text + at, release, n) != 0 || is_alnum(scan_at(scan, at + n)))
            continue;
        fputs(json_string_value(kept), scan->out);
        return n;
    }
    return 0;
}

static bool is_word_byte(char c)
{
    return is_alnum(c) || c == '_' || c == '-' || (unsigned char)c >= 0x80;
}

/* User-chosen words: the last recogniser, for what no other matches. */
static size_t match_word(struct scan *scan, size_t at)
{
    size_t n = 0;
    uint32_t address;

    if (!(scan->flags & SCRUB_WORDS) || !is_word_byte(scan_at(scan, at)))
        return 0;
    /* "GPU-" and "MIG-" precede a UUID, which is not part of the word. */
    while (is_word_byte(scan_at(scan, at + n)) && !scan_is_uuid(scan->text + at + n, scan->bytes - at - n) &&
           (n == 0 || is_alnum(scan_at(scan, at + n - 1)) || !scan_quad(scan, at + n, '.', &address)))
        n++;
    if (scrub_is_known(scan->scrub, scan->text + at, n))
        fwrite(scan->text + at, 1, n, scan->out);
    else
        fprintf(scan->out, "word%d", scan_number(scan, SCRUB_WORD, at, n));
    return n;
}

void scrub_text(struct scrub *scrub, const char *text, size_t bytes, unsigned flags, FILE *out)
{
    static recogniser *const recognisers[] = {scan_match_uuid,  scan_match_short_uuid,
                                              scan_match_mac,   scan_match_interface,
                                              scan_match_guid,  scan_match_ipv6,
                                              match_url,        match_path,
                                              scan_match_ipv4,  scan_match_dashed_ipv4,
                                              match_mail,       match_library,
                                              match_host,       match_key_block,
                                              match_assignment, match_serial,
                                              match_release,    match_stem,
                                              match_name,       match_symbol,
                                              match_token,      match_word};
    struct scan scan = {.scrub = scrub, .text = text, .bytes = bytes, .flags = flags, .out = out};
    size_t at = 0;

    while (at < bytes) {
        size_t n = 0;

        for (size_t i = 0; n == 0 && i < COUNT(recognisers); i++)
            n = recognisers[i](&scan, at);
        if (n == 0)
            fputc((unsigned char)text[at++], out);
        at += n;
    }
}
