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

#include <locale.h>
#include <regex.h>
#include <stdio.h>
#include <string.h>

#define MAX_ROUNDS 8
#define CTIME_BYTES 24
#define FORM_BYTES 1024 /* no form is as long: names of hosts and pods have at most 253 bytes */

#define DATE "([0-9]{4}-[0-9]{2}-[0-9]{2}[T ]|[0-9]{4}/[0-9]{2}/[0-9]{2}[T ])?"
#define CLOCK "[0-9]{2}:[0-9]{2}:[0-9]{2}([.,][0-9]{1,12})?"
#define ZONE "(Z|[-+][0-9]{2,4}(:[0-9]{0,2})?)?"
#define CHANNEL "<std(out|err|diag)>:"

enum { CTIME, TAG, POD, TIME, TORCHRUN, SRUN, N_FORMS };

/* In the order in which they are tried. The first group, if it has a key, identifies the writer. */
static const struct {
    const char *first; /* the first character is one of these */
    const char *pattern;
    bool has_key;
} forms[N_FORMS] = {
    /* mpirun prints a channel, or another tag, after it. */
    [CTIME] = {"MTWFS", "^[MTWFS][a-z]{2} [A-Z][a-z]{2} [ 0-9][0-9] [0-9]{2}:[0-9]{2}:[0-9]{2} [0-9]{4}(" CHANNEL ")?",
               false},
    [TAG] = {"[", "^(\\[[^],]*,[0-9]{1,9}])" CHANNEL, true},
    [POD] = {"[", "^\\[(pod/[^]]*)] ", true},
    [TIME] = {"[0123456789JFMASOND",
              "^(\\[" DATE CLOCK ZONE "]|" DATE CLOCK ZONE ")(:?[ \t]|$)|^[0-9]{10}\\.[0-9]{1,9} |"
              "^(Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)  ?[0-9]{1,2} " CLOCK " ",
              false},
    [TORCHRUN] = {"[", "^(\\[(default|rank|trainer)[0-9]{1,6}]):", true},
    [SRUN] = {" 0123456789", "^ {0,6}([0-9]{1,6}): ", true},
};

static void add_key(char *key, size_t key_bytes, const char *text, size_t n)
{
    size_t used = strlen(key);

    snprintf(key + used, key_bytes - used, "%s%.*s", used ? " " : "", (int)(n < key_bytes ? n : key_bytes), text);
}

/* For bytes: a pattern compiled for UTF-8 converts each line first, which took most of the time of the command. */
static bool compile(regex_t regexes[N_FORMS])
{
    locale_t bytes = newlocale(LC_ALL_MASK, "C", (locale_t)0), before = bytes ? uselocale(bytes) : (locale_t)0;
    bool good = bytes != (locale_t)0;

    for (int i = 0; i < N_FORMS && good; i++)
        good = regcomp(&regexes[i], forms[i].pattern, REG_EXTENDED) == 0;
    if (bytes) {
        uselocale(before);
        freelocale(bytes);
    }
    return good;
}

/* The length of the form, if the text begins with it; else 0. */
static size_t form_length(int form, const char *at, regmatch_t *ret_key)
{
    static regex_t regexes[N_FORMS];
    static bool is_compiled;
    regmatch_t groups[2] = {{.rm_so = 0}};

    if (!*at || !strchr(forms[form].first, *at))
        return 0;
    /* Up to there: a line may have megabytes, which a pattern that does not match would be tried on. */
    groups[0].rm_eo = (regoff_t)strnlen(at, FORM_BYTES);
    is_compiled = is_compiled || compile(regexes);
    if (!is_compiled || regexec(&regexes[form], at, 2, groups, REG_STARTEND) != 0)
        return 0;
    *ret_key = groups[1];
    return (size_t)groups[0].rm_eo;
}

static size_t read_one(const char *at, bool is_first, struct prefix *prefix)
{
    regmatch_t key;

    for (int form = 0; form < N_FORMS; form++) {
        size_t n = form_length(form, at, &key);

        if (n == 0 || (form == SRUN && !is_first))
            continue;
        if (form == CTIME && n == CTIME_BYTES && at[n] != '[')
            return 0;
        if (form == SRUN)
            add_key(prefix->key, sizeof(prefix->key), "task", 4);
        if (forms[form].has_key)
            add_key(prefix->key, sizeof(prefix->key), at + key.rm_so, (size_t)(key.rm_eo - key.rm_so));
        /* Open MPI 5 prints a space after the tag, which is not part of the program's output. */
        if (form == TAG)
            n += at[n] == ' ' && memchr(at, '@', (size_t)key.rm_eo) != NULL;
        /* Of a container runtime, which only follows a time. */
        if (form == TIME && text_begins_any(at + n, TEXTS("stdout F ", "stderr F ", "stdout P ", "stderr P "))) {
            prefix->is_partial = at[n + 7] == 'P';
            n += 9;
        }
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

/* The characters of names of hosts and pods. */
#define NAME "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_./@|"

size_t prefix_guess(const char *line, char *key, size_t key_bytes)
{
    size_t begin = *line == '[', end = begin + strspn(line + begin, NAME), n = end;

    if (end == begin || end >= 200 || (begin && line[n] != ']'))
        return 0;
    if (!begin && line[n] != ':' && line[n] != '>' && line[n += strspn(line + n, " ")] != '|')
        return 0;
    n += 1 + (begin && line[n + 1] == ':');
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
    if (!bracket && n > 0 && line[n] == ':' && strspn(line + n + 1, NAME) > 0) {
        n += 1 + strspn(line + n + 1, NAME);
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
    regmatch_t key;

    for (const char *at = line; (at = strstr(at, "<std")) != NULL; at++) {
        const char *begin = at;

        if (!text_begins_any(at, TEXTS("<stdout>:", "<stderr>:", "<stddiag>:")))
            continue;
        if (begin > line && begin[-1] == ']') {
            while (begin > line && *begin != '[' && at - begin < 100)
                begin--;
            if (form_length(TAG, begin, &key) == 0)
                continue;
        }
        /* A time before the tag belongs to it. */
        if (begin - line >= CTIME_BYTES && form_length(CTIME, begin - CTIME_BYTES, &key) >= CTIME_BYTES)
            begin -= CTIME_BYTES;
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
