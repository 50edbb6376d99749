/* SPDX-License-Identifier: Apache-2.0 */
#include "shell.h"

#include "text.h"

#include <string.h>

const char *shell_quote(const char *text, char *ret_word, size_t bytes)
{
    size_t left = strlen(text), used = 1, n;
    /* zsh expands a word that begins with '=', also as a value, to the path of a command. */
    bool is_plain = *text && *text != '=' && text[strspn(text, SHELL_PLAIN)] == '\0' && left < bytes;

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
