/* SPDX-License-Identifier: Apache-2.0 */
#include "doctor/shell.h"

#include <string.h>

#define PLAIN "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./+,:=@%-"

const char *shell_word(struct root *root, const char *text)
{
    const char *word = "'";

    if (*text && text[strspn(text, PLAIN)] == '\0')
        return text;
    while (*text) {
        size_t n = strcspn(text, "'");

        word = root_printf(root, "%s%.*s%s", word, (int)n, text, text[n] ? "'\\''" : "");
        text += n + (text[n] != '\0');
    }
    return root_printf(root, "%s'", word);
}
