/* SPDX-License-Identifier: Apache-2.0 */
#include "redact.h"

#include "memory.h"
#include "secrets.h"
#include "text.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>

#define UUID_BYTES 36

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

/* Ethernet, EUI-64, IP over InfiniBand (20 bytes); "1070.fd31.829e" of switches, without a letter a version. */
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
static const struct row {
    enum identifier_kind kind;
    recogniser *match;
} rows[] = {
    {IDENTIFIER_SECRET, match_value},       {IDENTIFIER_SECRET, match_short_option}, {IDENTIFIER_SECRET, match_input},
    {IDENTIFIER_SECRET, match_private_key}, {IDENTIFIER_SECRET, match_user},         {IDENTIFIER_SECRET, match_webhook},
    {IDENTIFIER_SECRET, match_token},       {IDENTIFIER_SECRET, match_login},        {IDENTIFIER_SECRET, match_random},
    {IDENTIFIER_UUID, match_uuid},          {IDENTIFIER_UUID_PART, match_uuid_part}, {IDENTIFIER_MAC, match_mac},
    {IDENTIFIER_MAC, match_interface},      {IDENTIFIER_GUID, match_guid},           {IDENTIFIER_IPV6, match_ipv6},
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

/* --- what is written --- */

static bool is_kept(const json_t *kept, const char *name)
{
    FOR_JSON (entry, kept)
        if (json_is_string(entry) && strcmp(json_string_value(entry), name) == 0)
            return true;
    return false;
}

static char *redact(const char *text, const json_t *kept)
{
    const struct scan scan = {.text = text, .bytes = strlen(text)};
    struct identifier found;
    const char *value;
    char *written, name[NAME_BYTES];
    size_t bytes, at = 0;
    FILE *out;

    /* Nearly all texts have nothing to hide, and need no stream. */
    while (at < scan.bytes && !find_at(&scan, at, true, &found))
        at++;
    if (at == scan.bytes)
        return memory_printf("%s", text);
    out = memory_stream(&written, &bytes);
    fwrite(text, 1, at, out);
    while (at < scan.bytes) {
        if (!find_at(&scan, at, true, &found)) {
            putc_unlocked(text[at++], out);
            continue;
        }
        fwrite(text + at, 1, found.before, out);
        value = memchr(text + at, '=', found.before);
        secret_copy_name(text + at, value ? (size_t)(value - text) - at : found.before, name);
        at += found.before;
        if (found.before > 0 && is_kept(kept, name))
            fwrite(text + at, 1, found.bytes, out);
        else
            fputs(REDACTED, out);
        at += found.bytes;
    }
    memory_close(out);
    return written;
}

char *redact_text(const char *text)
{
    return redact(text, NULL);
}

/* Is it NAME=VALUE or --option=VALUE? The length of the name, or 0. */
static size_t name_of(const char *word, char ret_name[NAME_BYTES])
{
    size_t dashes = strspn(word, "-"), n = strcspn(word + dashes, "=");

    secret_copy_name(word + dashes, n, ret_name);
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
        return memory_printf("%s", value);
    if (secret_is_value(name, value, strlen(value)))
        return memory_printf(REDACTED);
    shown = redact(value, kept);
    if (!*name || strcmp(shown, value) == 0)
        return shown;
    free(shown);
    return memory_printf(REDACTED);
}

/* `program`: the last one in front of this that has an option for a password, or its own index. */
static char *redact_argument(const json_t *words, size_t program, size_t at, const json_t *kept)
{
    const char *word = json_string_value(json_array_get(words, at));
    const char *before = at ? json_string_value(json_array_get(words, at - 1)) : NULL;
    const char *setter = at > 1 ? json_string_value(json_array_get(words, at - 2)) : NULL;
    size_t n, dashes = before ? strspn(before, "-") : 0;
    int head = program < at ? secret_after_option(words, program, at) : -1;
    char name[NAME_BYTES] = "", *value, *result;

    if (head >= 0)
        return memory_printf("%.*s%s", head, word, REDACTED);
    if (dashes || (setter && before && secret_is_setter(setter)))
        secret_copy_name(before + dashes, strlen(before + dashes), name);
    if (*name && (!dashes || secret_is_password(name)))
        return redact_value(name, word, kept);
    if (secret_is_user(name, dashes, word, strlen(word)))
        return memory_printf(REDACTED);
    n = name_of(word, name);
    if (n > 0) {
        if (secret_is_user(name, strspn(word, "-"), word + n + 1, strlen(word + n + 1)))
            value = memory_printf(REDACTED);
        else
            value = redact_value(name, word + n + 1, kept);
        result = memory_printf("%.*s=%s", (int)n, word, value);
        free(value);
        return result;
    }
    name[0] = '\0';
    if (dashes && *word != '-')
        secret_copy_name(before + dashes, strlen(before + dashes), name);
    return redact_value(name, word, kept);
}

/* In capital letters, or what only a secret is called: others are keys of our documents or of Kubernetes. */
static bool is_variable(const char *key)
{
    static const char *const words[] = {"password", "passwd", "token",        "secret",        "api_key",
                                        "apikey",   "auth",   "access_token", "authorization", "environment"};

    return ANY_OF(i, COUNT(words), strcasecmp(key, words[i]) == 0) ||
           key[strspn(key, "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_")] == '\0';
}

static void redact_in(json_t *value, const char *name, const json_t *kept);

static void redact_array(json_t *array, const json_t *kept)
{
    json_t *words = json_copy(array), *member; /* as they were */
    size_t program = SIZE_MAX;

    for (size_t i = 0; (member = json_array_get(words, i)); i++) {
        char *text;

        if (!json_is_string(member)) {
            redact_in(member, "", kept);
            continue;
        }
        text = redact_argument(words, program, i, kept);
        json_array_set_new(array, i, json_string_nocheck(text));
        free(text);
        /* "vault login": the second one is no program. */
        if ((program == SIZE_MAX || program + 1 < i) && secret_has_short_option(json_string_value(member)))
            program = i;
    }
    json_decref(words);
}

/* Replaces the text, which is the value of a variable, or the texts within. */
static void redact_in(json_t *value, const char *name, const json_t *kept)
{
    const char *given = json_string_value(json_object_get(value, "name"));
    char *shown, *entry;

    if (json_is_array(value))
        redact_array(value, kept);
    shown = json_is_string(value) ? redact_value(name, json_string_value(value), kept) : NULL;
    if (shown)
        json_string_set_nocheck(value, shown);
    free(shown);
    entry = given ? memory_printf("%s", given) : NULL; /* the member itself may be replaced */
    FOR_MEMBERS (key, member, value) {
        const char *of = entry && strcmp(key, "value") == 0                     ? entry
                         : strcmp(name, "environment") == 0 || is_variable(key) ? key
                                                                                : "";

        if (member != kept)
            redact_in(member, of, kept);
    }
    free(entry);
}

json_t *redact_document(const json_t *document)
{
    json_t *copy = json_deep_copy(document);

    redact_in(copy, "", json_object_get(copy, "kept_values"));
    return copy;
}
