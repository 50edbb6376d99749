/* SPDX-License-Identifier: Apache-2.0 */
/* lex.c - words and numbers in a line. */
#include "common/text.h"
#include "parse_internal.h"

#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define MAX_NUMBER 48

/* strtod() alone would take hexadecimal numbers, "inf" and "nan", and depend on the locale. */
bool lex_number(const char *text, const char **ret_end, double *ret_number)
{
    char copy[MAX_NUMBER];
    size_t n = 0;
    bool has_digit = false;
    double number;

    while (*text == ' ' || *text == '\t')
        text++;
    while (n < sizeof(copy) - 1 && (isdigit((unsigned char)text[n]) || text[n] == '.')) {
        has_digit |= isdigit((unsigned char)text[n]) != 0;
        n++;
    }
    if (!has_digit)
        return false;
    if ((text[n] == 'e' || text[n] == 'E') && (text[n + 1] == '+' || text[n + 1] == '-') &&
        isdigit((unsigned char)text[n + 2])) {
        n += 2;
        while (n < sizeof(copy) - 1 && isdigit((unsigned char)text[n]))
            n++;
    }
    if (n >= sizeof(copy) - 1)
        return false;
    memcpy(copy, text, n);
    copy[n] = '\0';
    if (strchr(copy, '.') != strrchr(copy, '.'))
        return false;
    number = strtod(copy, NULL);
    if (!isfinite(number))
        return false;
    if (ret_end)
        *ret_end = text + n;
    *ret_number = number;
    return true;
}

bool lex_squeeze(const char *line, char *ret_text, size_t bytes)
{
    size_t n = 0;

    for (; *line && n < bytes - 1; line++) {
        bool is_space = *line == ' ' || *line == '\t';

        if (!is_space || (n > 0 && ret_text[n - 1] != ' '))
            ret_text[n++] = is_space ? ' ' : *line;
    }
    n -= n > 0 && ret_text[n - 1] == ' ';
    ret_text[n] = '\0';
    return n > 0 && *line == '\0';
}

const char *lex_match(const char *text, const char *format, double *ret_numbers)
{
    while (*format) {
        bool can_skip = *format == '*';
        size_t n;

        if (strcmp(format, "$") == 0)
            return *text ? NULL : text;

        if (text_begins(format, "%f")) {
            if (!lex_number(text, &text, ret_numbers++))
                return NULL;
            format += 2;
            continue;
        }
        format += can_skip;
        n = strcspn(format, "%*");
        n -= n > 0 && format[n - 1] == '$' && format[n] == '\0';
        if (can_skip)
            text = memmem(text, strlen(text), format, n);
        else if (strncmp(text, format, n) != 0)
            text = NULL;
        if (!text)
            return NULL;
        text += n;
        format += n;
    }
    return text;
}

bool lex_after(const char *text, const char *label, double *ret_number)
{
    const char *at = strstr(text, label);

    return at && lex_number(at + strlen(label), NULL, ret_number);
}

bool lex_before(const char *text, const char *label, double *ret_number)
{
    const char *at = strstr(text, label), *end;

    while (at && at > text && (isdigit((unsigned char)at[-1]) || at[-1] == '.'))
        at--;
    return at && lex_number(at, &end, ret_number) && text_begins(end, label);
}

int64_t lex_setting(const char *text, const char *label)
{
    double number;

    if (!lex_after(text, label, &number) || number != floor(number) || number > 1e15)
        return -1;
    return (int64_t)number;
}

bool lex_words(const char *line, struct lex_words *ret_words)
{
    char *rest = ret_words->text;

    ret_words->n = 0;
    if (strlen(line) >= sizeof(ret_words->text))
        return false;
    memcpy(ret_words->text, line, strlen(line) + 1);
    for (char *word; ret_words->n < LEX_WORDS && (word = strtok_r(rest, " \t", &rest));)
        ret_words->words[ret_words->n++] = word;
    return true;
}

bool lex_is_number(const char *word, double *ret_number)
{
    const char *end;
    bool is_negative = *word == '-';

    if (!lex_number(word + is_negative, &end, ret_number) || *end != '\0')
        return false;
    if (is_negative)
        *ret_number = -*ret_number;
    return true;
}
