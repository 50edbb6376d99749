/* SPDX-License-Identifier: Apache-2.0 */
#include "doctor/shell.h"

#include <string.h>

#define PLAIN "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./+,:=@%-"

const char *shell_word(struct root *root, const char *text)
{
    size_t bytes = strlen(text) + 1;
    char *shown = root_alloc(root, bytes);
    const char *word = "'";

    if (!shown)
        return "''";
    root_clean(text, shown, bytes);
    text = shown;
    if (*text && text[strspn(text, PLAIN)] == '\0')
        return text;
    while (*text) {
        size_t n = strcspn(text, "'");

        word = root_printf(root, "%s%.*s%s", word, (int)n, text, text[n] ? "'\\''" : "");
        text += n + (text[n] != '\0');
    }
    return root_printf(root, "%s'", word);
}

bool shell_is_name(const char *name)
{
    static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_0123456789";

    return *name && name[strspn(name, letters)] == '\0' && !(*name >= '0' && *name <= '9');
}

const char *shell_prepend(struct root *root, const char *name, const char *folders)
{
    return root_printf(root, "export %s=%s${%s:+:$%s}", name, shell_word(root, folders), name, name);
}

const char *shell_leave_out(struct root *root, const char *name, const char *path, const char *folder)
{
    const char *kept = "";

    for (const char *at = path; *at; at += strcspn(at, ":;"), at += *at != '\0') {
        size_t n = strcspn(at, ":;"), bare = n;

        while (bare > 1 && at[bare - 1] == '/')
            bare--;
        if (n > 0 && (bare != strlen(folder) || strncmp(at, folder, bare) != 0))
            kept = root_printf(root, "%s%s%.*s", kept, *kept ? ":" : "", (int)n, at);
    }
    return *kept ? root_printf(root, "export %s=%s", name, shell_word(root, kept))
                 : root_printf(root, "unset %s", name);
}
