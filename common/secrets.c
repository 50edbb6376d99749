/* SPDX-License-Identifier: Apache-2.0 */
#include "secrets.h"

#include "redact.h"
#include "text.h"

#include <stdlib.h>

/* How far a token is read before it is one, and a password for the '@' behind it. */
#define DECIDES 96
#define PASSWORD_BYTES 256

/* The bytes of letters, digits and `others` from a position, at most `most`. */
static size_t run(const struct scan *scan, size_t at, const char *others, size_t most)
{
    size_t n = 0;

    while (n < most && (is_alnum(byte_at(scan, at + n)) || is_one_of(byte_at(scan, at + n), others)))
        n++;
    return n;
}

static bool ends_with(const char *name, const char *end)
{
    size_t length = strlen(name), n = strlen(end);

    return length >= n && strcasecmp(name + length - n, end) == 0;
}

/* --- forms --- */

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
    {"tskey-", "-", 20},    {"glimt-", "_.-", 16},    {"glagent-", "_.-", 16},
    {"glft-", "_.-", 16},   {"glsoat-", "_.-", 16},
};

static bool begins_as(const struct scan *scan, size_t at, const char *beginning)
{
    for (; *beginning; beginning++, at++)
        if (*beginning == '?' ? !isalpha((unsigned char)byte_at(scan, at)) : byte_at(scan, at) != *beginning)
            return false;
    return true;
}

/* Of random letters and digits one in six is a digit, and many are capital; words, which begin like a token, have few.
 */
static bool is_random(const struct scan *scan, size_t at, size_t n, size_t head)
{
    size_t digits = 0, upper = 0;

    for (size_t i = at; i < at + n; i++) {
        digits += is_digit(scan->text[i]);
        upper += scan->text[i] >= 'A' && scan->text[i] <= 'Z';
    }
    if (has_text(scan, at - head, "sk-"))
        return digits > 0 && (digits + upper) * 5 >= n;
    return head > 3 || digits > 0;
}

size_t match_token(const struct scan *scan, size_t at, size_t *ret_before)
{
    (void)ret_before;
    if (!begins_word(scan, at, "_"))
        return 0;
    for (size_t i = 0; i < COUNT(tokens); i++) {
        size_t head, n;

        if (!begins_as(scan, at, tokens[i].beginning))
            continue;
        head = strlen(tokens[i].beginning);
        n = run(scan, at + head, tokens[i].others, DECIDES);
        if (n < tokens[i].least || !is_random(scan, at + head, n, head))
            continue;
        n += run(scan, at + head + n, tokens[i].others, n < DECIDES ? 0 : scan->bytes);
        while (n > 0 && is_one_of(scan->text[at + head + n - 1], ".,"))
            n--;
        if (n >= tokens[i].least)
            return head + n;
    }
    return 0;
}

/* Who knows the address may write there. */
size_t match_webhook(const struct scan *scan, size_t at, size_t *ret_before)
{
    static const char *const addresses[] = {"hooks.slack.com/", "discord.com/api/", "discordapp.com/api/"};

    for (size_t i = 0; i < COUNT(addresses); i++) {
        size_t head = strlen(addresses[i]), n;

        if (byte_at(scan, at) != addresses[i][0] || !has_text(scan, at, addresses[i]))
            continue;
        n = run(scan, at + head, "_-/", scan->bytes);
        *ret_before = n >= 20 ? head : 0;
        return n >= 20 ? n : 0;
    }
    return 0;
}

/* A secret access key: 40 bytes of base64, of letters in both cases. Digests are in one. */
size_t match_access_key(const struct scan *scan, size_t at, size_t *ret_before)
{
    size_t upper = 0, lower = 0, digits = 0;

    (void)ret_before;
    if (!begins_word(scan, at, "_+/.-") || run(scan, at, "+/", 41) != 40 || is_one_of(byte_at(scan, at + 40), "=_-."))
        return 0;
    for (size_t i = at; i < at + 40; i++) {
        upper += isupper((unsigned char)scan->text[i]) != 0;
        lower += islower((unsigned char)scan->text[i]) != 0;
        digits += is_digit(scan->text[i]);
    }
    return upper > 4 && lower > 4 && digits > 0 ? 40 : 0;
}

/* To the line that ends it, or to the end of the text. */
size_t match_private_key(const struct scan *scan, size_t at, size_t *ret_before)
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

/* A user without a password that is a token: long, with digits. */
static bool is_token(const struct scan *scan, size_t at, size_t n)
{
    size_t digits = 0;

    for (size_t i = at; i < at + n; i++)
        digits += is_digit(scan->text[i]);
    return n >= 20 && digits > 1 && run(scan, at, "_-", n) == n;
}

/*
 * User and password of a URL. A password may have '/', '?' and '#' in it: then what is in front of them is no port, and
 * a host follows the '@'.
 */
size_t match_user(const struct scan *scan, size_t at, size_t *ret_before)
{
    size_t n = 0, colon = 0, sign = 0, digits = 0;

    if (byte_at(scan, at) != ':' || !has_text(scan, at, "://"))
        return 0;
    at += 3;
    for (; at + n < scan->bytes && !is_one_of(scan->text[at + n], "/?# \t\r\n\"'<>`)"); n++) {
        char c = scan->text[at + n];

        colon = c == ':' && colon == 0 ? n + 1 : colon;
        sign = c == '@' ? n : sign;
    }
    *ret_before = 3;
    if (sign && (colon ? colon < sign : is_token(scan, at, sign)))
        return sign;
    while (colon && is_digit(byte_at(scan, at + colon + digits)))
        digits++;
    if (colon > 1 && sign == 0 && scan->text[at] != '[' && colon + digits < n &&
        is_one_of(byte_at(scan, at + n), "/?#"))
        for (; n < PASSWORD_BYTES && at + n < scan->bytes && !is_one_of(scan->text[at + n], " \t\r\n\"'<>`"); n++)
            sign = scan->text[at + n] == '@' && is_alnum(byte_at(scan, at + n + 1)) ? n : sign;
    else
        sign = 0;
    *ret_before = sign ? 3 : 0;
    return sign;
}

/* "Bearer x" of a header. */
size_t match_bearer(const struct scan *scan, size_t at, size_t *ret_before)
{
    size_t n;

    if (!has_text(scan, at, "bearer ") || is_alnum(byte_before(scan, at)))
        return 0;
    n = run(scan, at + 7, "_.~+/=-", scan->bytes);
    *ret_before = n >= 12 ? 7 : 0;
    return n >= 12 ? n : 0;
}

/* --- names --- */

void secret_copy_name(const char *word, size_t n, char ret_name[NAME_BYTES])
{
    size_t i, skipped = n < NAME_BYTES ? 0 : n - (NAME_BYTES - 1);

    for (i = 0; i < n - skipped; i++)
        ret_name[i] = word[skipped + i] == '-' ? '_' : word[skipped + i];
    ret_name[i] = '\0';
}

/* Is it the last component of the name? */
static bool ends_with_component(const char *name, const char *end)
{
    size_t length = strlen(name), n = strlen(end);

    return ends_with(name, end) && (length == n || is_one_of(name[length - n - 1], "_."));
}

/* A key of these opens something; others sort, map and index. */
static bool is_secret_key(const char *name)
{
    static const char *const kinds[] = {
        "API",    "ACCESS",  "PRIVATE", "ENCRYPTION", "DECRYPTION", "SSH",    "ACCOUNT",      "AUTH",      "SIGNING",
        "MASTER", "LICENSE", "SERVICE", "DEPLOY",     "STORAGE",    "SHARED", "SUBSCRIPTION", "SESSION",   "HMAC",
        "JWT",    "CRYPT",   "ADMIN",   "TOKEN",      "WEBHOOK",    "WANDB",  "OPENAI",       "ANTHROPIC", "NGC",
        "COMET",  "SENTRY",  "HF",      "RSA",        "GPG",        "AZURE",  "CLIENT",       "APP"};
    char kind[NAME_BYTES];
    size_t length = strlen(name);

    if (length < 5 || length >= sizeof(kind) || !ends_with(name, "KEY"))
        return false;
    length -= name[length - 4] == '_' ? 4 : 3;
    memcpy(kind, name, length);
    kind[length] = '\0';
    for (size_t i = 0; i < COUNT(kinds); i++)
        if (strlen(kinds[i]) < 4 ? name[length] == '_' && ends_with_component(kind, kinds[i])
                                 : ends_with(kind, kinds[i]))
            return true;
    return ends_with(name, "APIKEY") || ends_with(name, "API_KEY");
}

/* Tokens of a vocabulary, and of those that are counted, are no secrets; several are one only after what they open. */
static bool is_secret_token(const char *name)
{
    static const char *const others[] = {"PAD",   "EOS", "BOS",  "UNK",  "MASK",   "SEP", "CLS",   "PER",  "IMAGE",
                                         "START", "END", "STOP", "NEXT", "PROMPT", "EOT", "VIDEO", "AUDIO"};
    static const char *const several[] = {"API", "ACCESS", "AUTH", "REFRESH", "BEARER", "HF", "GITHUB", "USER"};
    char before[NAME_BYTES];
    bool is_one = ends_with(name, "TOKEN");
    size_t length = strlen(name);

    if ((!is_one && !ends_with(name, "TOKENS")) || length >= sizeof(before))
        return false;
    length -= is_one ? 5 : 6;
    length -= length > 0 && name[length - 1] == '_';
    memcpy(before, name, length);
    before[length] = '\0';
    for (size_t i = 0; i < COUNT(others) && is_one; i++)
        if (ends_with_component(before, others[i]))
            return false;
    for (size_t i = 0; i < COUNT(several) && !is_one; i++)
        if (ends_with_component(before, several[i]))
            return true;
    return is_one;
}

bool identifier_is_secret_name(const char *long_name)
{
    static const char *const words[] = {"SECRET", "PASSW", "PASSPHRASE", "PASSCODE", "PGPASS", "CREDENTIAL", "COOKIE"};
    static const char *const ends[] = {"AUTH", "OAUTH", "AUTHORIZATION", "PRIVATE", "MAGIC",
                                       "PASS", "PSK",   "SIGNATURE",     "SSHPASS"};
    char name[NAME_BYTES];
    size_t length;

    secret_copy_name(long_name, strlen(long_name), name);
    /* "API_KEY_2" */
    for (length = strlen(name); length > 0 && (is_digit(name[length - 1]) || name[length - 1] == '_');)
        name[--length] = '\0';
    if (length < 3)
        return false;
    for (size_t i = 0; i < COUNT(words); i++)
        if (strcasestr(name, words[i]))
            return true;
    for (size_t i = 0; i < COUNT(ends); i++)
        if (ends_with_component(name, ends[i]))
            return true;
    return is_secret_token(name) || is_secret_key(name) || ends_with(name, "_PWD") || ends_with(name, "_PAT") ||
           strcmp(name, "pwd") == 0 || strcasecmp(name, "SIG") == 0;
}

bool secret_is_value(const char *name, const char *value, size_t n)
{
    static const char *const words[] = {"true", "false", "yes", "no", "on", "off", "none", "null", "auto", REDACTED};
    size_t digits = 0, dots = 0;

    for (; digits + dots < n && (is_digit(value[digits + dots]) || value[digits + dots] == '.');)
        ++*(value[digits + dots] == '.' ? &dots : &digits);
    for (size_t i = 0; i < COUNT(words); i++)
        if (n == strlen(words[i]) && strncasecmp(value, words[i], n) == 0)
            return false;
    /* A count */
    if (digits + dots == n && dots < 2 && n < (dots ? 20 : 8) && strcasestr(name, "TOKEN"))
        return false;
    return n > 1 && identifier_is_secret_name(name);
}

bool secret_is_password(const char *name)
{
    static const char *const words[] = {"password", "passwd", "passphrase", "pwd"};

    for (size_t i = 0; i < COUNT(words); i++)
        if (strcasecmp(name, words[i]) == 0)
            return true;
    return false;
}

bool secret_is_user(const char *name, size_t dashes, const char *value, size_t n)
{
    const char *colon;
    size_t length = strlen(name);

    if (dashes == 0 || !(dashes == 1 ? strcmp(name, "u") == 0 : length >= 4 && ends_with_component(name, "user")))
        return false;
    colon = memchr(value, ':', n);
    if (!colon || colon == value || colon + 1 == value + n || colon[1] == '/')
        return false;
    /* "1000:1000", a user and a group */
    for (size_t i = 0; i < n; i++)
        if (!is_digit(value[i]) && value[i] != ':')
            return true;
    return false;
}

/* --- values --- */

/* Before a ':' stands a key of YAML or JSON or a header; other words may stand in front of a text. */
static bool is_key(const char *name)
{
    static const char *const ends[] = {"password", "passwd",     "passphrase",  "secret",        "token",
                                       "apikey",   "api_key",    "access_key",  "private_key",   "secretkey",
                                       "cookie",   "credential", "credentials", "authorization", "auth_key"};

    for (size_t i = 0; i < COUNT(ends); i++)
        if (ends_with(name, ends[i]))
            return true;
    return false;
}

/* A name and what is around it. */
struct name {
    char text[NAME_BYTES];
    size_t end;    /* of the name */
    size_t dashes; /* in front of it */
    char around;   /* the byte in front of these */
    char sign;     /* between name and value: '=', ':' or ' ' */
    bool is_quoted;
};

/* Is there a name with a value? Not in the middle of a run of words and dashes: what begins it was asked before. */
static bool read_name(const struct scan *scan, size_t at, struct name *ret_name, size_t *ret_start)
{
    char c = byte_before(scan, at);
    size_t start, n;

    if ((!is_alnum(byte_at(scan, at)) && byte_at(scan, at) != '_') || is_alnum(c) || c == '_')
        return false;
    ret_name->dashes = 0;
    while (ret_name->dashes < at && scan->text[at - ret_name->dashes - 1] == '-')
        ret_name->dashes++;
    ret_name->around = byte_before(scan, at - ret_name->dashes);
    if (ret_name->dashes && (is_alnum(ret_name->around) || ret_name->around == '_'))
        return false;
    n = run(scan, at, "_-", scan->bytes);
    ret_name->end = start = at + n;
    ret_name->is_quoted = false;
    if (is_one_of(ret_name->around, "\"'") && ret_name->dashes == 0) {
        while (byte_at(scan, start) == '\\')
            start++;
        ret_name->is_quoted = byte_at(scan, start) == ret_name->around;
        start = ret_name->is_quoted ? start + 1 : at + n;
    }
    ret_name->sign = byte_at(scan, start) == '\t' ? ' ' : byte_at(scan, start);
    if (!is_one_of(ret_name->sign, ret_name->dashes ? "=: " : "=:"))
        return false;
    secret_copy_name(scan->text + at, n, ret_name->text);
    *ret_start = start + 1;
    return true;
}

/* To the quote that ends a value, in front of which there are at most as many backslashes as at its beginning. */
static size_t quoted_bytes(const struct scan *scan, size_t start, char quote, size_t backslashes)
{
    size_t n = 0, escapes = 0;

    for (; start + n < scan->bytes; n++) {
        char c = scan->text[start + n];

        if (c == quote && (escapes <= backslashes || quote == '\''))
            return n - escapes;
        escapes = c == '\\' ? escapes + 1 : 0;
    }
    return n;
}

/* Does another word follow on the line? "token: see the manual" */
static bool is_sentence(const struct scan *scan, size_t at, size_t length)
{
    for (size_t i = at; i < at + length; i++)
        if (!isalpha((unsigned char)scan->text[i]))
            return false;
    return length < 16 && byte_at(scan, at + length) == ' ' && is_alnum(byte_at(scan, at + length + 1));
}

/* Does a user's name with a ':' begin here? */
static bool is_user_at(const struct scan *scan, size_t at)
{
    size_t n = run(scan, at, "_.@+%-", 64);

    return n > 0 && byte_at(scan, at + n) == ':' && byte_at(scan, at + n + 1) != '/';
}

/* "password=x", "--password x", "Authorization: Basic x", "\"token\": \"x\"": the value has no form of its own. */
size_t match_value(const struct scan *scan, size_t at, size_t *ret_before)
{
    static const char *const schemes[] = {"Basic ", "Bearer ", "Token ", "Digest ", "Negotiate ", "ApiKey "};
    size_t start, length = 0, backslashes = 0;
    struct name name;
    const char *ends;
    char quote;
    bool is_user, is_secret;

    if (!read_name(scan, at, &name, &start))
        return 0;
    is_user = name.dashes && (strcmp(name.text, "u") == 0 || ends_with(name.text, "user"));
    if (!is_user && !identifier_is_secret_name(name.text))
        return 0;
    if ((name.sign == ' ' && byte_at(scan, start) == '-' && !secret_is_password(name.text)) ||
        (name.sign == ':' && !name.is_quoted && !is_key(name.text)))
        return 0;
    /* In 'NAME=a b' the quote ends the value. */
    quote = is_one_of(name.around, "\"'") && !name.is_quoted && name.sign == '=' ? name.around : '\0';
    while (is_one_of(byte_at(scan, start), " \t"))
        start++;
    for (size_t i = 0; i < COUNT(schemes); i++)
        start += has_text(scan, start, schemes[i]) ? strlen(schemes[i]) : 0;
    while (byte_at(scan, start + backslashes) == '\\')
        backslashes++;
    if (is_one_of(byte_at(scan, start + backslashes), "\"'") && byte_at(scan, start + backslashes) != quote) {
        start += backslashes;
        quote = scan->text[start++];
    } else {
        backslashes = 0;
    }
    if (is_user && !is_user_at(scan, start))
        return 0;
    /* All cookies of a header */
    ends = name.sign == ':' && ends_with(name.text, "cookie") ? "\r\n\"'" : " \t\r\n<>";
    if (quote)
        length = quoted_bytes(scan, start, quote, backslashes);
    else
        while (start + length < scan->bytes && !is_one_of(scan->text[start + length], ends))
            length++;
    if (has_text(scan, start, REDACTED))
        length = strlen(REDACTED);
    if (!quote && name.sign == ':' && strcasecmp(name.text, "authorization") != 0 && is_sentence(scan, start, length))
        return 0;
    is_secret = is_user ? secret_is_user(name.text, name.dashes, scan->text + start, length)
                        : secret_is_value(name.text, scan->text + start, length);
    *ret_before = is_secret ? start - at : 0;
    return is_secret ? length : 0;
}
