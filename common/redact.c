/* SPDX-License-Identifier: Apache-2.0 */
#include "redact.h"

#include "text.h"

#include <arpa/inet.h>
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
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

/* --- secrets --- */

/* The bytes of letters, digits and `others` from a position. */
static size_t run(const struct scan *scan, size_t at, const char *others)
{
    size_t n = 0;

    while (is_alnum(byte_at(scan, at + n)) || is_one_of(byte_at(scan, at + n), others))
        n++;
    return n;
}

/*
 * Tokens whose beginning says what they are for, as their issuers document them: '?' in it is any letter; then at least
 * `least` letters, digits and `others`.
 */
static const struct {
    const char *beginning, *others;
    size_t least;
} tokens[] = {
    {"hf_", "", 20},        {"api_org_", "", 20},     {"sk-", "_-", 20},
    {"gh?_", "_.-", 20},    {"github_pat_", "_", 20}, {"AKIA", "", 16},
    {"ASIA", "", 16},       {"eyJ", "_.-+/=", 17},    {"xox?-", ".-%", 10},
    {"xox?.", ".-%", 10},   {"xapp-", "-", 10},       {"glpat-", "_.-", 16},
    {"gldt-", "_.-", 16},   {"glrt-", "_.-", 16},     {"glcbt-", "_.-", 16},
    {"glptt-", "_.-", 16},  {"gloas-", "_.-", 16},    {"AIza", "_-", 30},
    {"ya29.", "_.-", 20},   {"GOCSPX-", "_-", 20},    {"npm_", "", 30},
    {"pypi-AgE", "_-", 16}, {"nvapi-", "_-", 20},     {"dckr_?at_", "_-", 20},
    {"do?_v1_", "", 32},    {"sk_live_", "", 16},     {"sk_test_", "", 16},
    {"rk_live_", "", 16},   {"rk_test_", "", 16},     {"whsec_", "+/=", 20},
    {"SG.", "_.-", 40},     {"hv?.", "_-", 20},       {"lin_api_", "", 20},
    {"glsa_", "_", 20},     {"NRAK-", "", 20},        {"shp??_", "", 30},
    {"gsk_", "", 30},       {"r8_", "", 30},          {"pplx-", "", 30},
    {"xai-", "", 30},       {"PMAK-", "-", 30},       {"sbp_", "", 30},
    {"rubygems_", "", 30},  {"ATATT3", "_-=", 20},    {"figd_", "_-", 20},
    {"ntn_", "", 30},       {"dp.pt.", "", 30},       {"pul-", "", 40},
    {"pscale_", "_.-", 30}, {"sntry?_", "_+/=", 30},  {"AGE-SECRET-KEY-1", "", 30},
    {"lsv2_", "_", 30},     {"dapi", "-", 32},        {"wandb_v1_", "_", 20},
    {"tskey-", "-", 20},
};

static bool begins_as(const struct scan *scan, size_t at, const char *beginning)
{
    for (; *beginning; beginning++, at++)
        if (*beginning == '?' ? !isalpha((unsigned char)byte_at(scan, at)) : byte_at(scan, at) != *beginning)
            return false;
    return true;
}

static size_t match_token(const struct scan *scan, size_t at, size_t *ret_before)
{
    (void)ret_before;
    if (!begins_word(scan, at, "_"))
        return 0;
    for (size_t i = 0; i < COUNT(tokens); i++) {
        size_t head = strlen(tokens[i].beginning), n, digits = 0;

        if (!begins_as(scan, at, tokens[i].beginning))
            continue;
        n = run(scan, at + head, tokens[i].others);
        while (n > 0 && is_one_of(scan->text[at + head + n - 1], ".,"))
            n--;
        for (size_t k = at + head; k < at + head + n; k++)
            digits += is_digit(scan->text[k]);
        /* Words may begin like the short ones; of random letters and digits, one in six is a digit. */
        if (n >= tokens[i].least && (head > 3 || digits > 0))
            return head + n;
    }
    return 0;
}

/* A secret access key: 40 bytes of base64, of letters in both cases. Digests are in one. */
static size_t match_access_key(const struct scan *scan, size_t at, size_t *ret_before)
{
    size_t upper = 0, lower = 0, digits = 0;

    (void)ret_before;
    if (!begins_word(scan, at, "_+/.-") || run(scan, at, "+/") != 40 || is_one_of(byte_at(scan, at + 40), "=_-."))
        return 0;
    for (size_t i = at; i < at + 40; i++) {
        upper += isupper((unsigned char)scan->text[i]) != 0;
        lower += islower((unsigned char)scan->text[i]) != 0;
        digits += is_digit(scan->text[i]);
    }
    return upper > 4 && lower > 4 && digits > 0 ? 40 : 0;
}

/* To the line that ends it, or to the end of the text. */
static size_t match_private_key(const struct scan *scan, size_t at, size_t *ret_before)
{
    const char *text = scan->text + at, *end, *head;

    (void)ret_before;
    if (*text != '-' || !has_text(scan, at, "-----BEGIN "))
        return 0;
    head = memmem(text + 11, scan->bytes - at - 11, "-----", 5);
    if (!head || !memmem(text, (size_t)(head - text), "PRIVATE KEY", 11))
        return 0;
    end = memmem(head + 5, scan->bytes - at - (size_t)(head + 5 - text), "-----END ", 9);
    end = end ? memmem(end + 9, scan->bytes - at - (size_t)(end + 9 - text), "-----", 5) : NULL;
    return end ? (size_t)(end + 5 - text) : scan->bytes - at;
}

/* User and password of a URL. */
static size_t match_user(const struct scan *scan, size_t at, size_t *ret_before)
{
    size_t n = 0, colon = 0, sign = 0;

    if (byte_at(scan, at) != ':' || !has_text(scan, at, "://"))
        return 0;
    for (; at + 3 + n < scan->bytes && !is_one_of(scan->text[at + 3 + n], "/?# \t\r\n\"'<>`)"); n++) {
        char c = scan->text[at + 3 + n];

        colon = c == ':' && colon == 0 ? n + 1 : colon;
        sign = c == '@' ? n : sign;
    }
    *ret_before = sign ? 3 : 0;
    return colon && colon < sign ? sign : 0;
}

/* "Bearer x" of a header. */
static size_t match_bearer(const struct scan *scan, size_t at, size_t *ret_before)
{
    size_t n;

    if (!has_text(scan, at, "bearer ") || is_alnum(byte_before(scan, at)))
        return 0;
    n = run(scan, at + 7, "_.~+/=-");
    *ret_before = n >= 12 ? 7 : 0;
    return n >= 12 ? n : 0;
}

/* The name of a value, as that of a variable. */
static void copy_name(const char *word, size_t n, char ret_name[128])
{
    size_t i;

    for (i = 0; i < n && i < 127; i++)
        ret_name[i] = word[i] == '-' ? '_' : word[i];
    ret_name[i] = '\0';
}

/* Is the value of this name a secret? Some only switch something or count, or were replaced before. */
static bool is_secret_value(const char *name, const char *value, size_t n)
{
    static const char *const words[] = {"true", "false", "yes", "no", "on", "off", "none", "null", "auto", REDACTED};
    size_t digits = 0;

    while (digits < n && is_digit(value[digits]))
        digits++;
    for (size_t i = 0; i < COUNT(words); i++)
        if (n == strlen(words[i]) && strncasecmp(value, words[i], n) == 0)
            return false;
    return n > 1 && !(digits == n && n < 8 && strcasestr(name, "TOKEN")) && identifier_is_secret_name(name);
}

/* Before a ':' stands a key of YAML or JSON or a header; other words may stand in front of a text. */
static bool is_key(const char *name)
{
    static const char *const ends[] = {"password", "passwd",     "passphrase",  "secret",        "token",
                                       "apikey",   "api_key",    "access_key",  "private_key",   "secretkey",
                                       "cookie",   "credential", "credentials", "authorization", "auth_key"};

    for (size_t i = 0; i < COUNT(ends); i++)
        if (strlen(name) >= strlen(ends[i]) && strcasecmp(name + strlen(name) - strlen(ends[i]), ends[i]) == 0)
            return true;
    return false;
}

/* "password=x", "--password x", "Authorization: Basic x", "\"token\": \"x\"": the value has no form of its own. */
static size_t match_value(const struct scan *scan, size_t at, size_t *ret_before)
{
    static const char *const schemes[] = {"Basic ", "Bearer ", "Token ", "Digest ", "Negotiate ", "ApiKey "};
    char name[128], around, quote;
    size_t n, start, length = 0, dashes = 0, letters;

    if (!begins_word(scan, at, "_"))
        return 0;
    n = run(scan, at, "_-");
    start = at + n;
    copy_name(scan->text + at, n, name);
    while (dashes < at && scan->text[at - dashes - 1] == '-')
        dashes++;
    around = dashes < at ? scan->text[at - dashes - 1] : '\0';
    if (is_one_of(around, "\"'") && byte_at(scan, start) == around && dashes == 0)
        start++;
    /* The blank is in front of the value of an option. */
    if (byte_at(scan, start) != '=' && !(byte_at(scan, start) == ':' && is_key(name)) &&
        !(byte_at(scan, start) == ' ' && dashes && byte_at(scan, start + 1) != '-'))
        return 0;
    /* In 'NAME=a b' the quote ends the value. */
    quote = is_one_of(around, "\"'") && start == at + n && byte_at(scan, start) == '=' ? around : '\0';
    for (start++; byte_at(scan, start) == ' ';)
        start++;
    for (size_t i = 0; i < COUNT(schemes); i++)
        start += has_text(scan, start, schemes[i]) ? strlen(schemes[i]) : 0;
    if (is_one_of(byte_at(scan, start), "\"'") && byte_at(scan, start) != quote)
        quote = scan->text[start++];
    while (start + length < scan->bytes &&
           (quote ? scan->text[start + length] != quote : !is_one_of(scan->text[start + length], " \t\r\n<>")))
        length++;
    if (scan->bytes - start >= strlen(REDACTED) && has_text(scan, start, REDACTED))
        length = strlen(REDACTED);
    for (letters = 0; letters < length && isalpha((unsigned char)scan->text[start + letters]);)
        letters++;
    /* "token: see the manual" */
    if (!quote && letters == length && byte_at(scan, at + n) == ':' && strcasecmp(name, "authorization") != 0)
        return 0;
    if (!is_secret_value(name, scan->text + start, length))
        return 0;
    *ret_before = start - at;
    return length;
}

/* The first row that matches counts. */
static const struct row {
    enum identifier_kind kind;
    recogniser *match;
} rows[] = {
    {IDENTIFIER_SECRET, match_value},  {IDENTIFIER_SECRET, match_private_key},  {IDENTIFIER_SECRET, match_user},
    {IDENTIFIER_SECRET, match_token},  {IDENTIFIER_SECRET, match_bearer},       {IDENTIFIER_SECRET, match_access_key},
    {IDENTIFIER_UUID, match_uuid},     {IDENTIFIER_UUID_PART, match_uuid_part}, {IDENTIFIER_MAC, match_mac},
    {IDENTIFIER_MAC, match_interface}, {IDENTIFIER_GUID, match_guid},           {IDENTIFIER_IPV6, match_ipv6},
    {IDENTIFIER_IPV4, match_ipv4},
};

/* The rows of secrets alone, or all. */
static bool find_at(const struct scan *scan, size_t at, bool only_secrets, struct identifier *ret_identifier)
{
    for (size_t i = 0; i < COUNT(rows) && !(only_secrets && rows[i].kind != IDENTIFIER_SECRET); i++) {
        size_t before = 0, n = rows[i].match(scan, at, &before);

        if (n == 0)
            continue;
        *ret_identifier = (struct identifier){.kind = rows[i].kind, .before = before, .bytes = n};
        return true;
    }
    return false;
}

bool identifier_at(const char *text, size_t bytes, size_t at, bool has_versions, struct identifier *ret_identifier)
{
    const struct scan scan = {.text = text, .bytes = bytes, .has_versions = has_versions};

    return find_at(&scan, at, false, ret_identifier);
}

/* --- names --- */

/* Does the name have the word? "TOKENS" and "PER_TOKEN" are no secrets here, nor is "AUTHOR". */
static bool has_word(const char *name, const char *word)
{
    static const char *const others[] = {"TOKENS", "TOKENIZ", "AUTHORS", "AUTHOR_"};

    for (const char *at = name; (at = strcasestr(at, word)) != NULL; at++) {
        bool is_other = at - name >= 4 && strncasecmp(at - 4, "PER_TOKEN", 9) == 0;

        for (size_t i = 0; i < COUNT(others); i++)
            is_other |= strncasecmp(at, others[i], strlen(others[i])) == 0;
        is_other |= strcasecmp(at, "AUTHOR") == 0;
        if (!is_other)
            return true;
    }
    return false;
}

bool identifier_is_secret_name(const char *name)
{
    static const char *const words[] = {"TOKEN",      "SECRET",    "PASSW",   "PASSPHRASE", "PASSCODE",   "PGPASS",
                                        "CREDENTIAL", "PRIVATE",   "API_KEY", "APIKEY",     "ACCESS_KEY", "ACCESSKEY",
                                        "ACCOUNTKEY", "SIGNATURE", "AUTH",    "COOKIE",     "_PSK",       "MAGIC"};
    static const char *const ends[] = {"_KEY", "_PWD", "_PAT", "_PASS"};
    size_t length = strlen(name);

    for (size_t i = 0; i < COUNT(words); i++)
        if (has_word(name, words[i]))
            return true;
    for (size_t i = 0; i < COUNT(ends); i++)
        if (length > strlen(ends[i]) && strcasecmp(name + length - strlen(ends[i]), ends[i]) == 0)
            return true;
    return strcasecmp(name, "PASS") == 0 || strcasecmp(name, "SSHPASS") == 0 || strcasecmp(name, "SIG") == 0;
}

/* --- what is written --- */

static bool is_kept(const json_t *kept, const char *name)
{
    const json_t *entry;
    size_t i;

    json_array_foreach (kept, i, entry)
        if (json_is_string(entry) && strcmp(json_string_value(entry), name) == 0)
            return true;
    return false;
}

static char *redact(const char *text, const json_t *kept)
{
    const struct scan scan = {.text = text, .bytes = strlen(text)};
    struct identifier found;
    char *written = NULL, name[128];
    size_t bytes, at = 0;
    FILE *out = open_memstream(&written, &bytes);

    if (!out)
        return NULL;
    while (at < scan.bytes) {
        if (!find_at(&scan, at, true, &found)) {
            putc(text[at++], out);
            continue;
        }
        fwrite(text + at, 1, found.before, out);
        copy_name(text + at, strcspn(text + at, "="), name);
        at += found.before;
        if (found.before > 0 && is_kept(kept, name))
            fwrite(text + at, 1, found.bytes, out);
        else
            fputs(REDACTED, out);
        at += found.bytes;
    }
    if (fclose(out) == 0)
        return written;
    free(written);
    return NULL;
}

char *redact_text(const char *text)
{
    return redact(text, NULL);
}

/* Is it NAME=VALUE or --option=VALUE? The length of the name, or 0. */
static size_t name_of(const char *word, char ret_name[128])
{
    size_t dashes = strspn(word, "-"), n = strcspn(word + dashes, "=");

    copy_name(word + dashes, n, ret_name);
    return word[dashes + n] == '=' && ret_name[strspn(ret_name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                                                "0123456789_.")] == '\0'
               ? dashes + n
               : 0;
}

/* The value of a variable or key, which is left out as a whole; with "" as its name, any text. */
static char *redact_value(const char *name, const char *value, const json_t *kept)
{
    char *shown;

    if (is_kept(kept, name))
        return strdup(value);
    if (is_secret_value(name, value, strlen(value)))
        return strdup(REDACTED);
    shown = redact(value, kept);
    if (!*name || !shown || strcmp(shown, value) == 0)
        return shown;
    free(shown);
    return strdup(REDACTED);
}

static char *redact_argument(const char *before, const char *word, const json_t *kept)
{
    size_t n, dashes = before ? strspn(before, "-") : 0;
    char name[128], *value, *result = NULL;

    n = name_of(word, name);
    if (n > 0) {
        value = redact_value(name, word + n + 1, kept);
        if (value && asprintf(&result, "%.*s=%s", (int)n, word, value) < 0)
            result = NULL;
        free(value);
        return result;
    }
    name[0] = '\0';
    if (dashes && *word != '-')
        copy_name(before + dashes, strlen(before + dashes), name);
    return redact_value(name, word, kept);
}

char *redact_word(const char *before, const char *word)
{
    return redact_argument(before, word, NULL);
}

static bool set_text(json_t *value, char *text)
{
    bool good = text && json_string_set_nocheck(value, text) == 0;

    free(text);
    return good;
}

/*
 * A name in capital letters, or one that only a secret has: others are keys of our documents or of Kubernetes. In
 * "environment" all are variables.
 */
static bool is_variable(const char *key)
{
    static const char *const words[] = {"password", "passwd", "token",        "secret",        "api_key",
                                        "apikey",   "auth",   "access_token", "authorization", "environment"};

    for (size_t i = 0; i < COUNT(words); i++)
        if (strcasecmp(key, words[i]) == 0)
            return true;
    return key[strspn(key, "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_")] == '\0';
}

static bool redact_in(json_t *value, const char *name, const json_t *kept);

/* Each word after the one before, as it was. */
static bool redact_array(json_t *array, const json_t *kept)
{
    char *before = NULL;
    bool good = true;
    json_t *member;
    size_t i;

    json_array_foreach (array, i, member) {
        const char *word = json_string_value(member);
        char *copy = word ? strdup(word) : NULL;

        good &= word ? set_text(member, redact_argument(before, word, kept)) : redact_in(member, "", kept);
        free(before);
        before = copy;
    }
    free(before);
    return good;
}

/* Replaces the text, which is the value of a variable, or the texts within. */
static bool redact_in(json_t *value, const char *name, const json_t *kept)
{
    const char *key, *entry = json_string_value(json_object_get(value, "name"));
    json_t *member;
    bool good = true;

    if (json_is_string(value))
        return set_text(value, redact_value(name, json_string_value(value), kept));
    if (json_is_array(value))
        return redact_array(value, kept);
    json_object_foreach (value, key, member) {
        const char *of = entry && strcmp(key, "value") == 0                     ? entry
                         : strcmp(name, "environment") == 0 || is_variable(key) ? key
                                                                                : "";

        good &= member == kept || redact_in(member, of, kept);
    }
    return good;
}

json_t *redact_document(const json_t *document)
{
    json_t *copy = json_deep_copy(document);

    if (copy && redact_in(copy, "", json_object_get(copy, "kept_values")))
        return copy;
    json_decref(copy);
    return NULL;
}
