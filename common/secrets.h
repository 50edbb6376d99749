/* SPDX-License-Identifier: Apache-2.0 */
/*
 * secrets.h - the recognisers of secrets (secret_tokens.c: those that have a form; secrets.c: by the name in front of
 * them; secret_programs.c: by the program), and what those of identifiers share with them; for redact.c.
 */
#ifndef EP_COMMON_SECRETS_H
#define EP_COMMON_SECRETS_H

#include <ctype.h>
#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>
#include <strings.h>

/* The text that is searched. */
struct scan {
    const char *text;
    size_t bytes;
    bool has_versions;
};

/* The byte at a position, NUL outside of the text. */
static inline char byte_at(const struct scan *scan, size_t at)
{
    return at < scan->bytes ? scan->text[at] : '\0';
}

static inline char byte_before(const struct scan *scan, size_t at)
{
    return at > 0 ? scan->text[at - 1] : '\0';
}

static inline bool is_alnum(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
}

static inline bool is_hex(char c)
{
    return isxdigit((unsigned char)c) != 0;
}

static inline bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

static inline bool is_one_of(char c, const char *bytes)
{
    return c && strchr(bytes, c);
}

/* Does a word begin at this position? `others` belong to words as well. */
static inline bool begins_word(const struct scan *scan, size_t at, const char *others)
{
    char c = byte_before(scan, at);

    return is_alnum(byte_at(scan, at)) && !is_alnum(c) && !is_one_of(c, others);
}

static inline bool has_text(const struct scan *scan, size_t at, const char *text)
{
    size_t n;

    /* Nearly all texts begin with another letter. */
    if (((byte_at(scan, at) ^ *text) & ~0x20) != 0)
        return false;
    n = strlen(text);
    return n <= scan->bytes - at && strncasecmp(scan->text + at, text, n) == 0;
}

/* The bytes of letters, digits and `others` from a position, at most `most`. */
static inline size_t run(const struct scan *scan, size_t at, const char *others, size_t most)
{
    size_t n = 0;

    while (n < most && (is_alnum(byte_at(scan, at + n)) || is_one_of(byte_at(scan, at + n), others)))
        n++;
    return n;
}

/* The recogniser of a row: the bytes of an identifier at a position, 0 without one, and of what precedes it. */
typedef size_t recogniser(const struct scan *scan, size_t at, size_t *ret_before);

/*
 * Secrets without a form of their own, after a name or a short option; private keys; users of URLs; addresses that are
 * secrets; tokens; "me:x@host"; what is drawn at random. What each looks at beyond a fixed length it finds once, so
 * that a text takes linear time.
 */
recogniser match_value, match_short_option, match_input, match_private_key, match_user, match_webhook, match_token,
    match_login, match_random;

/* Is it a program with a short option for a password, as "mysql -psecret"? */
bool secret_has_short_option(const char *word);

/* Is a word after that of the program, or what follows the option in it, such a password? The bytes in front, or -1. */
int secret_after_option(const json_t *words, size_t program, size_t at);

/* A path, or a variable of a shell; in base64 a secret may begin so too, but not with these bytes alone. */
bool secret_is_reference(const char *value, size_t n);

/* Letters and digits, and no path: "S3cret" */
bool secret_looks_random(const struct scan *scan, size_t at);

/* Does a name follow this word, and then its value, as in "setenv NAME VALUE"? */
bool secret_is_setter(const char *word);

#define NAME_BYTES 128

/* The name of a value, as that of a variable. Of a long one it is the end, which says what the value is. */
void secret_copy_name(const char *word, size_t n, char ret_name[NAME_BYTES]);

/* Is the value of this name a secret? Some only switch something or count, or were replaced before. */
bool secret_is_value(const char *name, const char *value, size_t n);

/* Is the word after this option a password, whatever it looks like? */
bool secret_is_password(const char *name);

/* Is it the "me:password" of --user or -u? */
bool secret_is_user(const char *name, size_t dashes, const char *value, size_t n);

#endif
