/* SPDX-License-Identifier: Apache-2.0 */
#include "text.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

bool text_begins(const char *text, const char *beginning)
{
    return strncmp(text, beginning, strlen(beginning)) == 0;
}

bool text_ends(const char *text, const char *end)
{
    size_t n = strlen(text), n_end = strlen(end);

    return n >= n_end && strcmp(text + n - n_end, end) == 0;
}

bool text_is_any(const char *text, const char *const *list)
{
    while (*list && strcmp(text, *list) != 0)
        list++;
    return *list;
}

bool text_begins_any(const char *text, const char *const *list)
{
    while (*list && !text_begins(text, *list))
        list++;
    return *list;
}

const char *text_base(const char *path)
{
    const char *slash = strrchr(path, '/');

    return slash ? slash + 1 : path;
}

int text_order(const void *left, const void *right)
{
    return strcmp(*(const char *const *)left, *(const char *const *)right);
}

int text_distance(const char *a, const char *b)
{
    int rows[3][TEXT_DISTANCE_BYTES];
    int *before = rows[0], *above = rows[1], *row = rows[2];
    size_t n_a = strnlen(a, TEXT_DISTANCE_BYTES - 1), n_b = strnlen(b, TEXT_DISTANCE_BYTES - 1);

    for (size_t j = 0; j <= n_b; j++)
        above[j] = (int)j;
    for (size_t i = 1; i <= n_a; i++) {
        int *spare = before;

        row[0] = (int)i;
        for (size_t j = 1; j <= n_b; j++) {
            int cost = above[j - 1] + (a[i - 1] != b[j - 1]);

            cost = above[j] + 1 < cost ? above[j] + 1 : cost;
            cost = row[j - 1] + 1 < cost ? row[j - 1] + 1 : cost;
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] && before[j - 2] + 1 < cost)
                cost = before[j - 2] + 1;
            row[j] = cost;
        }
        before = above;
        above = row;
        row = spare;
    }
    return above[n_b];
}

bool piece_is(struct piece piece, const char *text)
{
    return piece.n == strlen(text) && strncmp(piece.text, text, piece.n) == 0;
}

const char *piece_find(struct piece piece, const char *text)
{
    return memmem(piece.text, piece.n, text, strlen(text));
}

struct piece text_take(const char **at, const char *separators)
{
    /* Tables of words are searched at each byte of a text: strcspn() prepares more than it searches. */
    size_t n = separators[1] ? strcspn(*at, separators) : (size_t)(strchrnul(*at, *separators) - *at);
    struct piece piece = {*at, n};

    *at += piece.n + (piece.text[piece.n] != '\0');
    return piece;
}

struct text text_in(char *bytes, size_t room)
{
    bytes[0] = '\0';
    return (struct text){bytes, room, 0};
}

void text_add(struct text *text, const char *format, ...)
{
    int n = WITH_ARGS(args, format, vsnprintf(text->bytes + text->n, text->room - text->n, format, args));

    text->n += n > 0 ? (size_t)n : 0;
    if (text->n >= text->room)
        text->n = text->room - 1;
}

void text_append(char *text, size_t room, const char *format, ...)
{
    size_t n = strlen(text);

    WITH_ARGS(args, format, vsnprintf(text + n, room - n, format, args));
}

int text_number(const char *text, size_t n, int most)
{
    int64_t value = 0;

    if (n == 0)
        return -1;
    for (size_t i = 0; i < n; i++) {
        if (text[i] < '0' || text[i] > '9' || value > most)
            return -1;
        value = value * 10 + (text[i] - '0');
    }
    return value <= most ? (int)value : -1;
}

const char *text_time(time_t when, char ret_text[TEXT_TIME_BYTES])
{
    struct tm utc;

    if (!gmtime_r(&when, &utc) || !strftime(ret_text, TEXT_TIME_BYTES, "%Y-%m-%dT%H:%M:%SZ", &utc))
        *ret_text = '\0';
    return ret_text;
}

time_t text_time_of(const char *text)
{
    struct tm utc = {0};

    return strptime(text, "%Y-%m-%dT%H:%M:%S", &utc) ? timegm(&utc) : -1;
}

uint64_t text_hash(const char *text, size_t bytes)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325);

    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ (unsigned char)text[i]) * UINT64_C(0x100000001b3);
    return hash;
}

/* --- safe for terminals and JSON --- */

/* The first byte of a sequence: its length, the bits of the code that it holds, and what the second byte may be. */
static size_t first_byte(unsigned char byte, uint32_t *ret_code, unsigned char *ret_low, unsigned char *ret_high)
{
    *ret_low = 0x80;
    *ret_high = 0xbf;
    if (byte < 0x80) {
        *ret_code = byte;
        return 1;
    }
    if (byte >= 0xc2 && byte <= 0xdf) {
        *ret_code = byte & 0x1f;
        return 2;
    }
    if (byte >= 0xe0 && byte <= 0xef) {
        *ret_low = byte == 0xe0 ? 0xa0 : 0x80;
        *ret_high = byte == 0xed ? 0x9f : 0xbf;
        *ret_code = byte & 0x0f;
        return 3;
    }
    if (byte >= 0xf0 && byte <= 0xf4) {
        *ret_low = byte == 0xf0 ? 0x90 : 0x80;
        *ret_high = byte == 0xf4 ? 0x8f : 0xbf;
        *ret_code = byte & 0x07;
        return 4;
    }
    return 0;
}

/* Well-formed sequences are those of Unicode 15, table 3-7. */
size_t text_decode(const char *text, size_t bytes, uint32_t *ret_code)
{
    const unsigned char *at = (const unsigned char *)text;
    unsigned char low, high;
    uint32_t code;
    size_t n = bytes ? first_byte(at[0], &code, &low, &high) : 0;

    for (size_t i = 1; i < n; i++) {
        if (i == bytes)
            return TEXT_INCOMPLETE;
        if (at[i] < (i == 1 ? low : 0x80) || at[i] > (i == 1 ? high : 0xbf))
            return 0;
        code = code << 6 | (at[i] & 0x3f);
    }
    if (n)
        *ret_code = code;
    return n;
}

/*
 * Characters that control a terminal, change the order or the look of the text around them, or are invisible: Unicode's
 * categories Cc, Cf, Zl and Zp, the filler letters, tags and the variation selectors of plane 14, and noncharacters.
 * Ascending.
 */
static const struct {
    uint32_t first, last;
} hidden[] = {
    {0x0000, 0x001f},   {0x007f, 0x009f},   {0x00ad, 0x00ad},   {0x034f, 0x034f},   {0x0600, 0x0605},
    {0x061c, 0x061c},   {0x06dd, 0x06dd},   {0x070f, 0x070f},   {0x0890, 0x0891},   {0x08e2, 0x08e2},
    {0x115f, 0x1160},   {0x17b4, 0x17b5},   {0x180b, 0x180f},   {0x200b, 0x200f},   {0x2028, 0x202e},
    {0x2060, 0x206f},   {0x3164, 0x3164},   {0xd800, 0xdfff},   {0xfdd0, 0xfdef},   {0xfeff, 0xfeff},
    {0xffa0, 0xffa0},   {0xfff0, 0xfffb},   {0xfffe, 0xffff},   {0x110bd, 0x110bd}, {0x110cd, 0x110cd},
    {0x13430, 0x1345f}, {0x1bca0, 0x1bca3}, {0x1d173, 0x1d17a}, {0xe0000, 0xe0fff},
};

bool text_is_printable(uint32_t code)
{
    for (size_t i = 0; i < sizeof(hidden) / sizeof(hidden[0]) && code >= hidden[i].first; i++)
        if (code <= hidden[i].last)
            return false;
    return (code & 0xfffe) != 0xfffe;
}

size_t text_printable(const char *text, size_t bytes, const char **ret_shown, size_t *ret_shown_bytes)
{
    uint32_t code = 0;
    size_t n = text_decode(text, bytes, &code);

    if (n == TEXT_INCOMPLETE)
        return 0;
    if (n > 0 && (text_is_printable(code) || code == '\n' || code == '\t')) {
        *ret_shown = text;
        *ret_shown_bytes = n;
        return n;
    }
    *ret_shown = "?";
    *ret_shown_bytes = 1;
    return n ? n : 1;
}

void text_clean(const char *text, char *ret_text, size_t bytes)
{
    size_t left = strlen(text), used = 0;

    if (bytes == 0)
        return;
    while (left) {
        uint32_t code = 0;
        size_t n = text_decode(text, left, &code);
        bool is_shown = n > 0 && n != TEXT_INCOMPLETE && text_is_printable(code);

        if (n == 0 || n == TEXT_INCOMPLETE)
            n = 1;
        if (used + (is_shown ? n : 1) >= bytes)
            break;
        if (is_shown)
            memmove(ret_text + used, text, n);
        else
            ret_text[used] = *text == '\t' ? ' ' : '?';
        used += is_shown ? n : 1;
        text += n;
        left -= n;
    }
    ret_text[used] = '\0';
}

void text_cut(char *text)
{
    size_t bytes = strlen(text);

    for (size_t back = 1; back <= 3 && back <= bytes; back++) {
        uint32_t code;

        if (text_decode(text + bytes - back, back, &code) == TEXT_INCOMPLETE) {
            text[bytes - back] = '\0';
            return;
        }
    }
}

bool address_is_loopback(const char *name)
{
    /* The names in /etc/hosts of the distributions. */
    const char *const *names = TEXTS("localhost", "localhost.", "localhost.localdomain", "localhost.localdomain4",
                                     "localhost.localdomain6", "localhost4", "localhost4.localdomain4", "localhost6",
                                     "localhost6.localdomain6", "ip6-localhost", "ip6-loopback");
    struct in6_addr six;
    struct in_addr four;

    for (; *names; names++)
        if (strcasecmp(name, *names) == 0)
            return true;
    /* As getaddrinfo() reads it, which also accepts "127.1". */
    if (inet_aton(name, &four))
        return ntohl(four.s_addr) >> 24 == 127;
    if (inet_pton(AF_INET6, name, &six) != 1)
        return false;
    return IN6_IS_ADDR_LOOPBACK(&six) || (IN6_IS_ADDR_V4MAPPED(&six) && six.s6_addr[12] == 127);
}
