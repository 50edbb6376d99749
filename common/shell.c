/* SPDX-License-Identifier: Apache-2.0 */
#include "shell.h"

#include "redact.h"
#include "text.h"

#include <string.h>

#define PLAIN "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./+,:=@%-"

const char *shell_quote(const char *text, char *ret_word, size_t bytes)
{
    size_t left = strlen(text), used = 1, n;
    /* zsh expands a word that begins with '=', also as a value, to the path of a command. */
    bool is_plain = *text && *text != '=' && text[strspn(text, PLAIN)] == '\0' && left < bytes;

    if (is_plain)
        return memcpy(ret_word, text, left + 1);
    snprintf(ret_word, bytes, "'");
    for (; left; left -= n, text += n) {
        const char *shown = "'\\''";
        size_t shown_bytes = 4;

        n = 1;
        if (*text != '\'')
            n = text_printable(text, left, &shown, &shown_bytes);
        if (n == 0 || *text == '\n' || *text == '\t') {
            n = n ? n : left;
            shown = "?";
            shown_bytes = 1;
        }
        if (used + shown_bytes + 2 > bytes) {
            snprintf(ret_word, bytes, "'...'");
            return ret_word;
        }
        memcpy(ret_word + used, shown, shown_bytes);
        used += shown_bytes;
    }
    snprintf(ret_word + used, bytes - used, "'");
    return ret_word;
}

const char *shell_operand(const char *text, char *ret_word, size_t bytes)
{
    if (*text != '-')
        return shell_quote(text, ret_word, bytes);
    snprintf(ret_word, bytes, "-- ");
    shell_quote(text, ret_word + 3, bytes - 3);
    return ret_word;
}

bool shell_is_command(const char *text, const char *program)
{
    const char *shown, *end;
    size_t n, bytes, left = strlen(text);

    for (const char *at = text; *at; at += n, left -= n) {
        n = text_printable(at, left, &shown, &bytes);
        if (n == 0 || shown != at || *at == '\n' || *at == '\t')
            return false;
    }
    n = strlen(program);
    if (strncmp(text, program, n) != 0 || text[n] != ' ')
        return false;
    for (; *text; text += n) {
        n = strspn(text, PLAIN " ");
        if (n == 0 && *text == '\'' && (end = strchr(text + 1, '\'')))
            n = (size_t)(end + 1 - text);
        else if (n == 0)
            n = text_begins(text, REDACTED) ? strlen(REDACTED) : text_begins(text, "\\'") ? 2 : 0;
        if (n == 0)
            return false;
    }
    return true;
}

void shell_write(FILE *stream, const char *text)
{
    fputc('\'', stream);
    for (; *text; text++)
        if (*text == '\'')
            fputs("'\\''", stream);
        else
            fputc(*text, stream);
    fputc('\'', stream);
}
