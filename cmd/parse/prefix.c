/* SPDX-License-Identifier: Apache-2.0 */
/*
 * prefix.c - prefixes that launchers and loggers put before a line.
 *
 *     2026-02-03T10:00:00.123456789Z text                kubectl logs --timestamps, journald's short-iso, loggers
 *     2026-02-03T10:00:00.123456789Z stdout F text       files of a container runtime; P: the line goes on
 *     [pod/name/container] text                          kubectl logs --prefix
 *     [1,0]<stdout>:text                                 mpirun --tag-output (Open MPI 4)
 *     [prterun-host-1234@1,0]<stdout>: text              mpirun --output tag (Open MPI 5)
 *     Tue Nov 22 14:05:01 2026<stdout>:text              mpirun --timestamp-output
 *     Nov 22 14:05:01 host program[123]: text            syslog, journald
 *     1732269600.123 text                                seconds since 1970
 *      3: text                                           srun --label
 *     [default0]:text  [rank0]:text                      torchrun
 *
 * Times do not identify the writer and are dropped; the rest becomes the key of the stream.
 */
#include "common/text.h"
#include "parse_internal.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

#define MAX_ROUNDS 8

static size_t digits(const char *at, size_t most)
{
    size_t n = 0;

    while (n < most && isdigit((unsigned char)at[n]))
        n++;
    return n;
}

/* The length of the form, if the text begins with it; else 0. 0 stands for a digit, A for a letter. */
static size_t form(const char *at, const char *form)
{
    size_t n = 0;

    for (; form[n]; n++)
        if (form[n] == '0'   ? !isdigit((unsigned char)at[n])
            : form[n] == 'A' ? !isalpha((unsigned char)at[n])
                             : at[n] != form[n])
            return 0;
    return n;
}

/* hh:mm:ss with an optional fraction; its length, or 0. */
static size_t clock_length(const char *at)
{
    size_t n = form(at, "00:00:00");

    return n && (form(at + n, ".0") || form(at + n, ",0")) ? n + 1 + digits(at + n + 1, 12) : n;
}

static bool is_in(const char *names, const char *at)
{
    while (*names && strncmp(names, at, 3) != 0)
        names += 3;
    return *names;
}

/* "Nov 22 14:05:01.123 " or "1732269600.123 "; its length, or 0. */
static size_t old_time_length(const char *line)
{
    size_t n = form(line, "0000000000.0"), clock;

    if (n) {
        n += digits(line + n, 8);
        return line[n] == ' ' ? n + 1 : 0;
    }
    if (!form(line, "AAA ") || !is_in("JanFebMarAprMayJunJulAugSepOctNovDec", line))
        return 0;
    n = 4 + (line[4] == ' ');
    if (digits(line + n, 2) == 0)
        return 0;
    n += digits(line + n, 2);
    clock = line[n] == ' ' ? clock_length(line + n + 1) : 0;
    n += 1 + clock;
    return clock && line[n] == ' ' ? n + 1 : 0;
}

/* A leading time with the space after it; its length, or 0. */
static size_t time_length(const char *line)
{
    size_t bracket = *line == '[', n = bracket, clock;

    if (old_time_length(line))
        return old_time_length(line);
    for (const char *const *date = TEXTS("0000-00-00T", "0000-00-00 ", "0000/00/00T", "0000/00/00 "); *date; date++)
        n += n == bracket ? form(line + n, *date) : 0;
    clock = clock_length(line + n);
    if (clock == 0)
        return 0;
    n += clock;
    if (line[n] == 'Z')
        n++;
    else if ((line[n] == '+' || line[n] == '-') && digits(line + n + 1, 4) >= 2) {
        n += 1 + digits(line + n + 1, 4);
        if (line[n] == ':')
            n += 1 + digits(line + n + 1, 2);
    }
    if (bracket && line[n++] != ']')
        return 0;
    n += form(line + n, ": ") ? 1 : 0;
    if (line[n] != ' ' && line[n] != '\t' && line[n] != '\0')
        return 0;
    return n + (line[n] != '\0');
}

/* "Tue Nov 22 14:05:01 2026" as ctime() prints it; its length, or 0. */
static size_t ctime_length(const char *at)
{
    size_t n = strnlen(at, 24);

    return n == 24 && is_in("MonTueWedThuFriSatSun", at) && form(at + 3, " ") && form(at + 10, " 00:00:00 0000") &&
                   at[7] == ' '
               ? n
               : 0;
}

/* "<stdout>:" or "<stderr>:"; its length, or 0. */
static size_t channel_length(const char *at)
{
    return text_begins_any(at, TEXTS("<stdout>:", "<stderr>:", "<stddiag>:")) ? strcspn(at, ":") + 1 : 0;
}

/* "[1,0]<stdout>:" or "[name@1,0]<stdout>:"; its length, or 0. *ret_tag: length of the part in brackets. */
static size_t tag_length(const char *at, size_t *ret_tag)
{
    size_t n = 1, channel;

    if (*at != '[')
        return 0;
    while (at[n] && at[n] != ']' && at[n] != '@' && !isdigit((unsigned char)at[n]) && n < 80)
        n++;
    while (at[n] && at[n] != ']' && at[n] != ',' && n < 80)
        n++;
    if (at[n] != ',' || digits(at + n + 1, 9) == 0)
        return 0;
    n += 1 + digits(at + n + 1, 9);
    if (at[n] != ']')
        return 0;
    n++;
    channel = channel_length(at + n);
    *ret_tag = n;
    return channel ? n + channel : 0;
}

static void add_key(char *key, size_t key_bytes, const char *text, size_t n)
{
    size_t used = strlen(key);

    snprintf(key + used, key_bytes - used, "%s%.*s", used ? " " : "", (int)(n < key_bytes ? n : key_bytes), text);
}

/* "stdout F " or "stderr P " of a container runtime, which only follows a time. */
static size_t runtime_length(const char *at, bool *ret_is_partial)
{
    if ((text_begins(at, "stdout ") || text_begins(at, "stderr ")) && (at[7] == 'F' || at[7] == 'P') && at[8] == ' ') {
        *ret_is_partial = at[7] == 'P';
        return 9;
    }
    return 0;
}

/* "[default0]:" and "[rank0]:" of torchrun, " 12: " of srun --label; the length, or 0. */
static size_t label_length(const char *at, size_t *ret_begin, size_t *ret_key)
{
    size_t n = 0, number;

    if (*at == '[') {
        n = text_begins_any(at, TEXTS("[default", "[rank", "[trainer")) ? strcspn(at, "0123456789") : 0;
        number = digits(at + n, 6);
        *ret_begin = 0;
        *ret_key = n + number + 1;
        return number && form(at + n + number, "]:") ? n + number + 2 : 0;
    }
    while (at[n] == ' ' && n < 6)
        n++;
    number = digits(at + n, 6);
    if (number == 0 || at[n + number] != ':' || at[n + number + 1] != ' ')
        return 0;
    *ret_begin = n;
    *ret_key = number;
    return n + number + 2;
}

static size_t read_one(const char *at, bool is_first, struct prefix *prefix)
{
    size_t n, key = 0, begin = 0;

    n = ctime_length(at);
    if (n > 0) {
        size_t channel = channel_length(at + n);

        if (channel || at[n] == '[')
            return n + channel;
        return 0;
    }
    n = tag_length(at, &key);
    if (n > 0) {
        add_key(prefix->key, sizeof(prefix->key), at, key);
        /* Open MPI 5 prints a space after the tag, which is not part of the program's output. */
        return n + (at[n] == ' ' && memchr(at, '@', key) != NULL);
    }
    if (text_begins(at, "[pod/")) {
        const char *end = strchr(at, ']');

        if (end && end - at < 300 && end[1] == ' ') {
            add_key(prefix->key, sizeof(prefix->key), at + 1, (size_t)(end - at) - 1);
            return (size_t)(end - at) + 2;
        }
    }
    n = time_length(at);
    if (n > 0)
        return n + runtime_length(at + n, &prefix->is_partial);
    n = label_length(at, &begin, &key);
    if (n > 0 && (is_first || *at == '[')) {
        add_key(prefix->key, sizeof(prefix->key), at + begin, key);
        return n;
    }
    return 0;
}

void prefix_read(const char *line, struct prefix *ret_prefix)
{
    size_t n = 1;

    *ret_prefix = (struct prefix){0};
    for (int round = 0; round < MAX_ROUNDS && n > 0; round++) {
        n = read_one(line + ret_prefix->bytes, round == 0 || ret_prefix->key[0] == '\0', ret_prefix);
        ret_prefix->bytes += n;
    }
}

/* Is the character valid in the name of a host or pod? */
static bool is_name(char c)
{
    return isalnum((unsigned char)c) || c == '-' || c == '_' || c == '.' || c == '/' || c == '@' || c == '|';
}

size_t prefix_guess(const char *line, char *key, size_t key_bytes)
{
    size_t begin = *line == '[', n = begin, end;

    while (is_name(line[n]) && n < 200)
        n++;
    if (n == begin)
        return 0;
    end = n;
    if (begin) {
        if (line[n] != ']')
            return 0;
        n++;
        if (line[n] == ':')
            n++;
    } else if (line[n] == ':' || line[n] == '>') {
        n++;
    } else {
        while (line[n] == ' ' && n < 220)
            n++;
        if (line[n] != '|')
            return 0;
        n++;
    }
    if (line[n] != ' ' && line[n] != '\t')
        return 0;
    add_key(key, key_bytes, line + begin, end - begin);
    return n + 1;
}

size_t prefix_word(const char *line, char *key, size_t key_bytes)
{
    static const char opening[] = "([<", closing[] = ")]>";
    const char *bracket = *line ? strchr(opening, *line) : NULL, *end = NULL;
    size_t n = 0;

    if (*line == '\t')
        return 1;
    if (bracket)
        end = strchr(line, closing[bracket - opening]);
    if (end && end - line < 120)
        n = (size_t)(end - line) + 1;
    while (line[n] >= 'A' && line[n] <= 'Z' && !bracket)
        n++;
    /* "INFO:name:", as Python's logging writes it. */
    if (!bracket && n > 0 && line[n] == ':' && is_name(line[n + 1])) {
        n++;
        while (is_name(line[n]))
            n++;
        if (line[n] == ':') {
            add_key(key, key_bytes, line, n);
            return n + 1;
        }
    }
    while (line[n] && line[n] != ' ' && line[n] != '\t' && n < 120)
        n++;
    if (n == 0 || (line[n] != ' ' && line[n] != '\t'))
        return 0;
    add_key(key, key_bytes, line, n);
    return n + 1;
}

const char *prefix_next_tag(const char *line)
{
    for (const char *at = line; (at = strstr(at, "<std")) != NULL; at++) {
        const char *begin = at;
        size_t key;

        if (channel_length(at) == 0)
            continue;
        if (begin > line && begin[-1] == ']') {
            while (begin > line && *begin != '[' && at - begin < 100)
                begin--;
            if (tag_length(begin, &key) == 0)
                continue;
        }
        /* A time before the tag belongs to it. */
        if (begin - line >= 24 && ctime_length(begin - 24) == 24)
            begin -= 24;
        if (begin > line)
            return begin;
    }
    return NULL;
}

/* UTF-16 has a zero byte in each ASCII character, also within the escape sequences of colours. */
static size_t drop_zeros(char *text, size_t n)
{
    size_t used = 0;

    for (size_t i = 0; i < n; i++)
        if (text[i])
            text[used++] = text[i];
    return used;
}

size_t prefix_clean(char *text, size_t n)
{
    size_t used = 0;

    n = drop_zeros(text, n);
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)text[i];

        if (c == 0x1b && i + 1 < n && text[i + 1] == '[') {
            i += 2;
            while (i < n && !((unsigned char)text[i] >= 0x40 && (unsigned char)text[i] <= 0x7e))
                i++;
        } else if (c == 0x1b && i + 1 < n && text[i + 1] == ']') {
            i += 2;
            while (i < n && text[i] != 0x07 && !(text[i] == 0x1b && i + 1 < n && text[i + 1] == '\\'))
                i++;
            i += i < n && text[i] == 0x1b;
        } else if (c == 0x1b) {
            i++;
        } else if (c == '\t' || (c >= 0x20 && c != 0x7f)) {
            text[used++] = text[i];
        }
    }
    return used;
}
