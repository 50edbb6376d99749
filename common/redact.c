/* SPDX-License-Identifier: Apache-2.0 */
#include "redact.h"

#include "text.h"

#include <arpa/inet.h>
#include <ctype.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#define UUID_BYTES 36
#define NAME_BYTES 256
#define HEX_RUN 16   /* from this many hexadecimal digits on, a run is an identifier */
#define DIGIT_RUN 12 /* the same for decimal digits; serial numbers of GPUs have 13 */
#define TOKEN_RUN 20 /* the same for letters of both cases and digits: a token */

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

/* Length of the run from `at` of alphanumeric bytes and those in `others`. */
static size_t run(const struct scan *scan, size_t at, const char *others)
{
    size_t n = 0;

    while (is_alnum(byte_at(scan, at + n)) || is_one_of(byte_at(scan, at + n), others))
        n++;
    return n;
}

static size_t run_of_hex(const struct scan *scan, size_t at)
{
    size_t n = 0;

    while (is_hex(byte_at(scan, at + n)))
        n++;
    return n;
}

/* Copies at most NAME_BYTES - 1 bytes in lower case. */
static void copy_lower(const struct scan *scan, size_t at, size_t n, char ret_name[NAME_BYTES])
{
    n = n < NAME_BYTES ? n : NAME_BYTES - 1;
    for (size_t i = 0; i < n; i++)
        ret_name[i] = (char)tolower((unsigned char)scan->text[at + i]);
    ret_name[n] = '\0';
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

/* --- users and hosts --- */

/* "://user:password@" */
static size_t match_user(const struct scan *scan, size_t at, size_t *ret_before)
{
    size_t n = 0, user = 0;

    if (byte_at(scan, at) != ':' || !has_text(scan, at, "://"))
        return 0;
    *ret_before = 3;
    for (; at + 3 + n < scan->bytes && !is_one_of(scan->text[at + 3 + n], "/ \t\r\n\"'<>`)"); n++)
        user = scan->text[at + 3 + n] == '@' ? n : user;
    return user;
}

static size_t match_mail(const struct scan *scan, size_t at, size_t *ret_before)
{
    static const char others[] = "._%+~:-";
    size_t n;

    (void)ret_before;
    if (!begins_word(scan, at, others))
        return 0;
    n = run(scan, at, others);
    if (byte_at(scan, at + n) != '@' || !is_alnum(byte_at(scan, at + n + 1)))
        return 0;
    return n + 1 + run(scan, at + n + 1, ".-_");
}

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

/* Is it the host of a URL: after "://", or after "://user@"? */
static bool is_in_url(const struct scan *scan, size_t at)
{
    if (byte_before(scan, at) == '@')
        while (at > 0 && !is_one_of(scan->text[at - 1], "/ \t\r\n\"'<>`)"))
            at--;
    return at >= 3 && strncmp(scan->text + at - 3, "://", 3) == 0;
}

/* The host of a URL, or a name that ends with a top-level domain. Shorter dotted names are common in programs. */
static size_t match_host(const struct scan *scan, size_t at, size_t *ret_before)
{
    static const char *const ends[] = {
        ".internal", ".local", ".cluster.local", ".amazonaws.com", ".lan", ".corp", ".intra", ".home.arpa", NULL};
    static const char *const nets[] = {".com", ".net", ".org", ".io", ".edu", ".gov", ".cloud", ".dev",     ".ai",
                                       ".de",  ".cn",  ".eu",  ".uk", ".fr",  ".jp",  ".co",    ".example", NULL};
    char host[NAME_BYTES];
    bool is_url = is_in_url(scan, at);
    size_t n;

    (void)ret_before;
    if (!is_url && !begins_word(scan, at, "_.-"))
        return 0;
    n = run(scan, at, is_url ? ".-_" : ".-");
    while (n > 0 && !is_alnum(scan->text[at + n - 1]))
        n--;
    copy_lower(scan, at, n, host);
    if (is_public_host(host) || n >= NAME_BYTES)
        return 0;
    if (is_url || text_ends_any(host, ends) || (!scan->has_versions && text_ends_any(host, nets)))
        return n;
    return 0;
}

/* --- secrets --- */

static size_t match_key_block(const struct scan *scan, size_t at, size_t *ret_before)
{
    (void)ret_before;
    return byte_at(scan, at) == '-' && has_text(scan, at, "-----BEGIN ") ? scan->bytes - at : 0;
}

/* The value after words like password and an equals sign, or after an option: "--password x". */
static size_t match_assignment(const struct scan *scan, size_t at, size_t *ret_before)
{
    static const char *const words[] = {"password",    "passwd",   "passphrase", "secret",      "token",
                                        "apikey",      "api_key",  "access_key", "private_key", "credential",
                                        "credentials", "username", "user",       NULL};
    size_t n, start, length = 0;
    char word[NAME_BYTES];
    bool is_option;

    if (!begins_word(scan, at, "_"))
        return 0;
    n = run(scan, at, "_");
    copy_lower(scan, at, n, word);
    start = at + n;
    is_option = at > 1 && byte_before(scan, at) == '-' && byte_at(scan, start) == ' ';
    if (n > 64 || !text_ends_any(word, words) || !(is_option || is_one_of(byte_at(scan, start), "=:")))
        return 0;
    start++;
    while (is_one_of(byte_at(scan, start), " \"'"))
        start++;
    while (start + length < scan->bytes && !is_one_of(scan->text[start + length], " \t\r\n\"',;&"))
        length++;
    *ret_before = length ? start - at : 0;
    return length;
}

/* "Serial Number: 1654321", "serial=MT42": the value has no form of its own. */
static size_t match_serial(const struct scan *scan, size_t at, size_t *ret_before)
{
    size_t word = 6, start, length = 0, digits = 0;

    if (!has_text(scan, at, "serial") || is_alnum(byte_before(scan, at)))
        return 0;
    word += has_text(scan, at + word, " number") ? 7 : 0;
    for (start = at + word; is_one_of(byte_at(scan, start), " \t:=\"'#");)
        start++;
    for (length = run(scan, start, "_-");
         word < start - at && digits < length && !is_digit(scan->text[start + digits]);)
        digits++;
    if (length < 4 || word == start - at || digits == length)
        return 0;
    *ret_before = start - at;
    return length;
}

/* "_ZN3c10...", a C++ symbol, looks like a token. */
static size_t match_symbol(const struct scan *scan, size_t at, size_t *ret_before)
{
    if (byte_at(scan, at) == '_' && byte_at(scan, at + 1) == 'Z' && !is_alnum(byte_before(scan, at)))
        *ret_before = run(scan, at, "_");
    return 0;
}

/* Tokens whose beginning says what they are for. */
static size_t match_token(const struct scan *scan, size_t at, size_t *ret_before)
{
    static const char *const beginnings[] = {"hf_",         "ghp_",   "gho_",  "ghs_",      "ghu_",  "ghr_",
                                             "github_pat_", "sk-",    "xoxa-", "xoxb-",     "xoxp-", "xoxr-",
                                             "xoxs-",       "AKIA",   "ASIA",  "AIza",      "ya29",  "eyJ",
                                             "glpat-",      "nvapi-", "npm_",  "dckr_pat_", NULL};
    size_t n;

    (void)ret_before;
    if (!begins_word(scan, at, ""))
        return 0;
    n = run(scan, at, byte_at(scan, at) == 'e' ? "_+-." : "_+-");
    return n >= 12 && text_begins_any(scan->text + at, beginnings) ? n : 0;
}

/* Runs of digits, of hexadecimal digits, and of letters of both cases with digits. */
static size_t match_number(const struct scan *scan, size_t at, size_t *ret_before)
{
    size_t n, upper = 0, lower = 0, digits = 0, hex = 0, marks = 0;
    const char *text = scan->text + at;
    bool is_long;

    (void)ret_before;
    if (!begins_word(scan, at, ""))
        return 0;
    n = run(scan, at, "_+-");
    /* A UUID after a word is not part of it. */
    for (size_t i = 0; i < n; i++)
        if (identifier_is_uuid(text + i, scan->bytes - at - i))
            n = i;
    for (size_t i = 0; i < n; i++) {
        upper += isupper((unsigned char)text[i]) != 0;
        lower += islower((unsigned char)text[i]) != 0;
        digits += is_digit(text[i]);
        hex += is_hex(text[i]);
        marks += !is_alnum(text[i]);
    }
    if (n > HEX_RUN + 1 && text[0] == '0' && text[1] == 'x' && hex == n - 1)
        return is_uniform(scan, at + 2, n - 2) ? 0 : n;
    is_long = (digits == n && n >= DIGIT_RUN) || (hex == n && n >= HEX_RUN && digits > 0);
    if ((is_long && !is_uniform(scan, at, n)) || (n >= TOKEN_RUN && upper && lower && digits && marks <= n / 8))
        return n;
    return 0;
}

/* The first row that matches counts. */
static const struct {
    enum identifier_kind kind;
    recogniser *match;
} rows[] = {
    {IDENTIFIER_UUID, match_uuid},     {IDENTIFIER_UUID_PART, match_uuid_part}, {IDENTIFIER_MAC, match_mac},
    {IDENTIFIER_MAC, match_interface}, {IDENTIFIER_GUID, match_guid},           {IDENTIFIER_IPV6, match_ipv6},
    {IDENTIFIER_USER, match_user},     {IDENTIFIER_IPV4, match_ipv4},           {IDENTIFIER_MAIL, match_mail},
    {IDENTIFIER_HOST, match_host},     {IDENTIFIER_SECRET, match_key_block},    {IDENTIFIER_SECRET, match_assignment},
    {IDENTIFIER_NUMBER, match_serial}, {IDENTIFIER_SECRET, match_token},        {IDENTIFIER_NUMBER, match_symbol},
    {IDENTIFIER_NUMBER, match_number},
};

bool identifier_at(const char *text, size_t bytes, size_t at, unsigned kinds, struct identifier *ret_identifier)
{
    const struct scan scan = {.text = text, .bytes = bytes, .has_versions = kinds & IDENTIFIERS_VERSIONS};

    for (size_t i = 0; i < COUNT(rows); i++) {
        size_t before = 0, n = kinds & rows[i].kind ? rows[i].match(&scan, at, &before) : 0;

        if (n + before == 0)
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
    const struct scan scan = {.text = address, .bytes = strlen(address)};

    for (const char *at = address; (at = strstr(at, "://")) != NULL; at += 3) {
        size_t before, n = match_user(&scan, (size_t)(at - address), &before);
        const char *colon = memchr(at + 3, ':', n);

        if (colon && colon + 1 < at + 3 + n)
            return true;
    }
    return false;
}
