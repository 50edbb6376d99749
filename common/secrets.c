/* SPDX-License-Identifier: Apache-2.0 */
#include "secrets.h"

#include "redact.h"
#include "text.h"

static bool ends_with(const char *name, const char *end)
{
    size_t length = strlen(name), n = strlen(end);

    return length >= n && strcasecmp(name + length - n, end) == 0;
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

    return ends_with(name, end) && (length == n || is_one_of(name[length - n - 1], "_. "));
}

/* A key of these opens something; others sort, map and index. */
static bool is_secret_key(const char *name)
{
    static const char *const kinds[] = {
        "API",     "ACCESS",    "PRIVATE", "ENCRYPTION", "DECRYPTION", "SSH",     "ACCOUNT",  "AUTH",
        "SIGNING", "MASTER",    "LICENSE", "SERVICE",    "DEPLOY",     "STORAGE", "SHARED",   "SUBSCRIPTION",
        "SESSION", "HMAC",      "JWT",     "CRYPT",      "ADMIN",      "TOKEN",   "WEBHOOK",  "WANDB",
        "OPENAI",  "ANTHROPIC", "NGC",     "COMET",      "KAGGLE",     "SENTRY",  "HF",       "RSA",
        "GPG",     "AZURE",     "CLIENT",  "APP",        "MUNGE",      "FERNET",  "UNSEAL",   "APPLICATION",
        "STRIPE",  "SENDGRID",  "GITHUB",  "GROQ",       "NVIDIA",     "MAPS",    "CONSUMER", "CERTIFICATE",
        "GEMINI",  "TOGETHER",  "MISTRAL", "FUNCTIONS",  "RECOVERY",   "LUKS",    "WG",       "PASS",
        "AWS",     "SALT",      "SETUP",   "SDK",        "SSE_C",      "SECRET"};
    char kind[NAME_BYTES];
    size_t length = strlen(name);

    if (length < 5 || length >= sizeof(kind) || !ends_with(name, "KEY"))
        return false;
    length -= is_one_of(name[length - 4], "_. ") ? 4 : 3;
    memcpy(kind, name, length);
    kind[length] = '\0';
    return ANY_OF(i, COUNT(kinds),
                  strlen(kinds[i]) < 4 ? is_one_of(name[length], "_. ") && ends_with_component(kind, kinds[i])
                                       : ends_with(kind, kinds[i])) ||
           ends_with(name, "APIKEY") || ends_with(name, "API_KEY");
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
    static const char *const words[] = {"SECRET", "PASSW",  "PASSPHRASE", "PASSCODE",    "PGPASS",    "CREDENTIAL",
                                        "COOKIE", "SESSID", "SESSIONID",  "STORAGEPASS", "TF_TOKEN_", "PYPI_TOKEN_"};
    /* Where one is, or what it is called */
    static const char *const places[] = {"FILE", "PATH", "DIR", "NAME"};
    static const char *const ends[] = {
        "AUTH",    "OAUTH",       "AUTHORIZATION", "HAUTHORIZATION", "PRIVATE",      "MAGIC",   "PASS",
        "PSK",     "SIGNATURE",   "PASSIN",        "PASSOUT",        "FROM_LITERAL", "SSHPASS", "DBPASS",
        "BEARER",  "REQUIREPASS", "MASTERAUTH",    "CREDS",          "JWT",          "PW",      "USERPWD",
        "ROOTPW",  "ROOTPASS",    "USERPASS",      "ADMINPASS",      "LDAPPASS",     "BMCPASS", "IPMIPASS",
        "KEYPASS", "STOREPASS",   "PASS_PHRASE",   "MYSQLPASS",      "VNCPASS",      "OTP",     "MNEMONIC"};
    char name[NAME_BYTES];
    size_t length;

    secret_copy_name(long_name, strlen(long_name), name);
    /* "API_KEY_2" */
    for (length = strlen(name); length > 0 && (is_digit(name[length - 1]) || name[length - 1] == '_');)
        name[--length] = '\0';
    if (length < 2)
        return false;
    if (ANY_OF(i, COUNT(places), ends_with_component(name, places[i])))
        return false;
    if (ANY_OF(i, COUNT(words), strcasestr(name, words[i])))
        return true;
    return ANY_OF(i, COUNT(ends), ends_with_component(name, ends[i])) || is_secret_token(name) || is_secret_key(name) ||
           ends_with(name, "_PWD") || ends_with(name, "_PAT") ||
           (strcasecmp(name, "pwd") == 0 && strcmp(name, "PWD") != 0) || strcasecmp(name, "SIG") == 0;
}

bool secret_is_reference(const char *value, size_t n)
{
    const struct scan scan = {.text = value, .bytes = n};
    size_t at = 0;

    if (has_text(&scan, 0, "$(") || has_text(&scan, 0, "${"))
        return true;
    if (byte_at(&scan, 0) == '$') {
        while (isupper((unsigned char)byte_at(&scan, at + 1)) || is_one_of(byte_at(&scan, at + 1), "_"))
            at++;
        return at > 1 && (at + 1 == n || is_one_of(value[at + 1], "\"'/,;)"));
    }
    while (at < 2 && is_one_of(byte_at(&scan, at), "~."))
        at++;
    return byte_at(&scan, at) == '/' && run(&scan, at, "_-./@:", n) == n - at && (n != 40 || memchr(value, '.', n));
}

bool secret_is_value(const char *name, const char *value, size_t n)
{
    static const char *const words[] = {"true", "false", "yes", "no", "on", "off", "none", "null", "auto", REDACTED};
    size_t digits = 0, dots = 0;

    for (; digits + dots < n && (is_digit(value[digits + dots]) || value[digits + dots] == '.');)
        ++*(value[digits + dots] == '.' ? &dots : &digits);
    if (ANY_OF(i, COUNT(words), n == strlen(words[i]) && strncasecmp(value, words[i], n) == 0))
        return false;
    /* A count */
    if (digits + dots == n && dots < 2 && n < (dots ? 20 : 8) && strcasestr(name, "TOKEN"))
        return false;
    if (secret_is_reference(value, n) && !secret_is_password(name))
        return false;
    return n > 1 && identifier_is_secret_name(name);
}

bool secret_is_password(const char *name)
{
    static const char *const words[] = {"password", "passwd", "passphrase", "pwd", "epkit_secret"};

    return ANY_OF(i, COUNT(words), strcasecmp(name, words[i]) == 0);
}

bool secret_is_user(const char *name, size_t dashes, const char *value, size_t n)
{
    static const char *const groups[] = {"root",   "nogroup", "nobody", "users", "wheel", "staff",
                                         "docker", "video",   "render", "adm",   "sudo"};
    const char *colon;
    size_t length = strlen(name);

    if (dashes == 0 || !(dashes == 1 ? strcmp(name, "u") == 0 : length >= 4 && ends_with_component(name, "user")))
        return false;
    colon = memchr(value, ':', n);
    if (!colon || colon == value || colon + 1 == value + n || colon[1] == '/')
        return false;
    /* "1000:1000", "me:me": a user and a group */
    n -= (size_t)(colon - value) + 1;
    if (ANY_OF(i, COUNT(groups), n == strlen(groups[i]) && memcmp(colon + 1, groups[i], n) == 0))
        return false;
    if ((size_t)(colon - value) == n && memcmp(value, colon + 1, n) == 0)
        return false;
    return ANY_OF(i, n, !is_digit(colon[1 + i])) || !is_digit(*value);
}

/* --- values --- */

/* Before a ':' stands a key of YAML or JSON or a header; other words may stand in front of a text. */
static bool is_key(const char *name)
{
    static const char *const ends[] = {"password",   "passwd",      "passphrase",    "passcode",  "become_pass",
                                       "sudo_pass",  "ssh_pass",    "secret",        "token",     "cookie",
                                       "credential", "credentials", "authorization", "basic_auth"};

    return ANY_OF(i, COUNT(ends), ends_with(name, ends[i])) || is_secret_key(name);
}

/* A name and what is around it. */
struct name {
    char text[NAME_BYTES];
    size_t dashes;             /* in front of it */
    char around;               /* the byte in front of these */
    char sign;                 /* between name and value: '=', ':' or ' ' */
    bool is_quoted, is_spaced; /* blanks are around the sign */
};

static size_t skip(const struct scan *scan, size_t at, const char *bytes)
{
    while (is_one_of(byte_at(scan, at), bytes))
        at++;
    return at;
}

static const char *const setters[] = {"setenv ",     "set -x ",        "set -gx ", "set -Ux ",
                                      "config set ", "configure set ", "-genv ",   "-env "};

bool secret_is_setter(const char *word)
{
    size_t n = strlen(word);

    return ANY_OF(i, COUNT(setters),
                  n >= 3 && strlen(setters[i]) > n && memcmp(setters[i] + strlen(setters[i]) - n - 1, word, n) == 0);
}

/* Does a word that gives a variable its value stand in front of the word that ends here, "set profile.NAME"? */
static bool is_set(const struct scan *scan, size_t end)
{
    size_t at = end;

    while (at > 0 && end - at < NAME_BYTES && (is_alnum(scan->text[at - 1]) || is_one_of(scan->text[at - 1], "_-./:")))
        at--;
    for (size_t i = 0, n; i < COUNT(setters); i++) {
        n = strlen(setters[i]);
        if (at >= n && has_text(scan, at - n, setters[i]))
            return true;
    }
    return false;
}

/* What is between a name and its value, from `at`: '=', ':' or ' ', with blanks around it; 0 if no value follows. */
static char read_sign(const struct scan *scan, size_t at, const struct name *name, size_t *ret_start)
{
    /* In a URL, in a page, in JSON: a quote is a part of the sign. */
    static const char *const signs[] = {"%3D",           "%22%3A%22",      "%22%3A%20%22",
                                        "&quot;:&quot;", "&quot;: &quot;", "\\u0022:\\u0022"};
    size_t next, dots;
    char c;

    /* 'environ["NAME"] = ', "form[NAME]=" */
    at += (name->is_quoted || name->around == '[') && byte_at(scan, at) == ']';
    next = skip(scan, at, " \t");
    c = byte_at(scan, next);
    for (size_t i = 0; i < COUNT(signs); i++) {
        *ret_start = next + strlen(signs[i]);
        if (has_text(scan, next, signs[i]))
            return '=';
    }
    *ret_start = next + 1;
    /* "<password>x</password>" */
    if (c == '>' && name->around == '<')
        return '=';
    if (is_one_of(c, "=:") && byte_at(scan, next + 1) == '=' && next > at)
        return '\0'; /* compared */
    if (is_one_of(c, "=:")) {
        *ret_start += c == '=' && byte_at(scan, next + 1) == '>';
        return c;
    }
    /* '["--password", "x"]' */
    if (name->is_quoted && name->dashes)
        return c == ',' && is_one_of(byte_at(scan, skip(scan, next + 1, " \t\\")), "\"'") ? ' ' : '\0';
    *ret_start = next;
    if (next == at || name->is_quoted)
        return '\0';
    if (name->dashes)
        return ' ';
    /* "setenv NAME VALUE"; "password VALUE" of .netrc, "the password is x", "hf_token ..... x" of a list */
    dots = skip(scan, next, ".") - next;
    *ret_start += has_text(scan, next, "is ") || has_text(scan, next, "is:") ? 3 : dots;
    next = skip(scan, *ret_start, " '");
    return is_set(scan, at) || ((dots > 2 || secret_is_password(name->text)) && secret_looks_random(scan, next)) ? ' '
                                                                                                                 : '\0';
}

/* Is there a name with a value? Not in the middle of a run of words and dashes: what begins it was asked before. */
static bool read_name(const struct scan *scan, size_t at, struct name *ret_name, size_t *ret_start)
{
    static const char *const parents[] = {"secret.", "secrets.", "credentials.", "wandb.", "api ", "secret "};
    char c = byte_before(scan, at);
    size_t start, n, name = at;

    if ((!is_alnum(byte_at(scan, at)) && byte_at(scan, at) != '_') || is_alnum(c) || c == '_')
        return false;
    ret_name->dashes = 0;
    while (ret_name->dashes < at && scan->text[at - ret_name->dashes - 1] == '-')
        ret_name->dashes++;
    ret_name->around = byte_before(scan, at - ret_name->dashes);
    if (ret_name->dashes && (is_alnum(ret_name->around) || ret_name->around == '_'))
        return false;
    n = run(scan, at, "_-", scan->bytes);
    start = at + n;
    ret_name->is_quoted = false;
    if (is_one_of(ret_name->around, "\"'")) {
        while (byte_at(scan, start) == '\\')
            start++;
        ret_name->is_quoted = byte_at(scan, start) == ret_name->around;
        start = ret_name->is_quoted ? start + 1 : at + n;
    }
    /* "secrets.x=", "API key: x": what is in front of the name says what it is. */
    for (size_t i = 0; i < COUNT(parents); i++)
        if (at >= strlen(parents[i]) && has_text(scan, at - strlen(parents[i]), parents[i]))
            name = at - strlen(parents[i]);
    secret_copy_name(scan->text + name, at + n - name, ret_name->text);
    ret_name->is_spaced = is_one_of(byte_at(scan, start), " \t");
    ret_name->sign = read_sign(scan, start, ret_name, ret_start);
    return ret_name->sign != '\0';
}

/* "name: HF_TOKEN", then "value: x", 'key="Password" value="x"': the value belongs to that name. */
static void read_entry(const struct scan *scan, struct name *name, size_t *start)
{
    size_t at = skip(scan, *start, " \t\\\"'"), n = run(scan, at, "_-.", NAME_BYTES), value;

    if ((strcasecmp(name->text, "name") != 0 && strcasecmp(name->text, "key") != 0) || name->dashes ||
        name->sign == ' ' || n == 0 || n == NAME_BYTES)
        return;
    value = skip(scan, at + n, " \t\r\n,\\\"'");
    /* In JSON within a text, a line break is "\\n". */
    value += byte_at(scan, value) == 'n' && byte_before(scan, value) == '\\';
    value = skip(scan, value, " ");
    if (!has_text(scan, value, "value"))
        return;
    value = skip(scan, value + 5, "\\\"' ");
    if (!is_one_of(byte_at(scan, value), ":="))
        return;
    secret_copy_name(scan->text + at, n, name->text);
    name->around = '\0';
    name->sign = '=';
    *start = value + 1;
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

/* "|", ">-": of YAML, the value is on the next line. */
static size_t skip_block(const struct scan *scan, size_t at)
{
    size_t end = is_one_of(byte_at(scan, at), "|>") ? skip(scan, at + 1, "+-123456789") : at;

    return end > at && is_one_of(byte_at(scan, end), "\r\n") ? skip(scan, end, " \r\n") : at;
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

/* Does a list or a map, "{name: x}", begin here? */
static bool is_list(const struct scan *scan, size_t at)
{
    return byte_at(scan, at) == '[' || (byte_at(scan, at) == '{' && !isupper((unsigned char)byte_at(scan, at + 1)));
}

static bool skip_scheme(const struct scan *scan, size_t *at)
{
    static const char *const schemes[] = {"Basic ", "Bearer ", "Token ", "Digest ", "Negotiate ", "ApiKey "};
    size_t begin = *at;

    for (size_t i = 0; i < COUNT(schemes); i++)
        *at += has_text(scan, *at, schemes[i]) ? strlen(schemes[i]) : 0;
    return *at > begin;
}

/* "password=x", "--password x", "Authorization: Basic x", "\"token\": \"x\"": the value has no form of its own. */
size_t match_value(const struct scan *scan, size_t at, size_t *ret_before)
{
    size_t start, length = 0, backslashes = 0;
    struct name name;
    const char *ends;
    char quote;
    bool is_user, is_secret, is_known, is_in_quotes = false;

    if (!read_name(scan, at, &name, &start))
        return 0;
    read_entry(scan, &name, &start);
    is_user = name.dashes && (strcmp(name.text, "u") == 0 || ends_with(name.text, "user"));
    if (!is_user && !identifier_is_secret_name(name.text))
        return 0;
    if ((name.sign == ' ' && byte_at(scan, start) == '-' && !secret_is_password(name.text)) ||
        (name.sign == ':' && !name.is_quoted && !is_key(name.text)))
        return 0;
    /* In 'NAME=a b' the quote ends the value. */
    quote = is_one_of(name.around, "\"'") && !name.is_quoted && name.sign == '=' ? name.around : '\0';
    start = skip(scan, start, " \t");
    start = skip_block(scan, start);
    while (byte_at(scan, start + backslashes) == '\\')
        backslashes++;
    if (is_one_of(byte_at(scan, start + backslashes), "\"'") &&
        (byte_at(scan, start + backslashes) != quote || is_alnum(byte_at(scan, start + backslashes + 1)))) {
        start += backslashes;
        quote = scan->text[start++];
        is_in_quotes = true;
    } else {
        backslashes = 0;
    }
    is_known = skip_scheme(scan, &start) || !ends_with(name.text, "authorization");
    if ((is_user && !is_user_at(scan, start)) || (!is_in_quotes && is_list(scan, start)))
        return 0;
    /* All cookies of a header */
    ends = name.sign == ':' && ends_with(name.text, "cookie") ? "\r\n\"'" : " \t\r\n<>";
    if (quote)
        length = quoted_bytes(scan, start, quote, backslashes);
    else
        while (start + length < scan->bytes && !is_one_of(scan->text[start + length], ends))
            length++;
    /* "Authorization: Key x": a scheme of others is left out as well. */
    if (!is_known && !is_in_quotes && byte_at(scan, start + length) == ' ' && run(scan, start, "-", length) == length) {
        size_t rest = run(scan, start + length + 1, "_-.~+/=:", scan->bytes);

        length += rest ? 1 + rest : 0;
    }
    if (has_text(scan, start, REDACTED))
        return 0;
    /* A call or an element of a program: "token = get()" */
    if (!is_in_quotes && name.is_spaced &&
        (memchr(scan->text + start, '(', length) || memchr(scan->text + start, '[', length)))
        return 0;
    while (!quote && length > 1 && is_one_of(scan->text[start + length - 1], ",;)}]"))
        length--;
    if (!quote && name.sign == ':' && strcasecmp(name.text, "authorization") != 0 && is_sentence(scan, start, length))
        return 0;
    is_secret = is_user ? secret_is_user(name.text, name.dashes, scan->text + start, length)
                        : secret_is_value(name.text, scan->text + start, length);
    *ret_before = is_secret ? start - at : 0;
    return is_secret ? length : 0;
}
