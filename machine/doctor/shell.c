/* SPDX-License-Identifier: Apache-2.0 */
#include "shell.h"

#include "common/shell.h"
#include "common/text.h"

#include <string.h>

const char *shell_word(struct source *source, const char *text)
{
    size_t bytes = 4 * strlen(text) + 8;
    char *word = source_alloc(source, bytes);

    return word ? shell_quote(text, word, bytes) : "''";
}

bool shell_is_name(const char *name)
{
    static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_0123456789";

    return *name && name[strspn(name, letters)] == '\0' && !(*name >= '0' && *name <= '9');
}

/* The length without a comment at the end, which follows a blank and is not in quotes. */
static size_t without_comment(const char *line, size_t n)
{
    char quote = 0;

    for (size_t i = 0; i < n; i++) {
        if (line[i] == '#' && !quote && (i == 0 || line[i - 1] == ' ' || line[i - 1] == '\t'))
            return i;
        if (quote ? line[i] == quote : line[i] == '\'' || line[i] == '"')
            quote = quote ? 0 : line[i];
    }
    return n;
}

bool shell_evaluates_environ(const char *line, size_t n)
{
    static const char *const words[] = {"source ", ". ", "eval ", "export ", "xargs"};

    n = without_comment(line, n);
    if (!memmem(line, n, "/proc/1/environ", 15))
        return false;
    for (size_t i = 0; i < COUNT(words); i++) {
        const char *at = memmem(line, n, words[i], strlen(words[i]));

        if (at && (at == line || strchr(" \t;&|($`", at[-1])))
            return true;
    }
    return false;
}

const char *shell_prepend(struct source *source, const char *name, const char *folders)
{
    return source_printf(source, "export %s=%s${%s:+:$%s}", name, shell_word(source, folders), name, name);
}

const char *shell_leave_out(struct source *source, const char *name, const char *path, const char *folder)
{
    const char *kept = "";

    for (const char *at = path; *at; at += strcspn(at, ":;"), at += *at != '\0') {
        size_t n = strcspn(at, ":;"), bare = n;

        while (bare > 1 && at[bare - 1] == '/')
            bare--;
        if (n > 0 && (bare != strlen(folder) || strncmp(at, folder, bare) != 0))
            kept = source_printf(source, "%s%s%.*s", kept, *kept ? ":" : "", (int)n, at);
    }
    return *kept ? source_printf(source, "export %s=%s", name, shell_word(source, kept))
                 : source_printf(source, "unset %s", name);
}
