/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gib.c - what the script of the installed gIB sets: values differ from release to release and by type of machine.
 *
 * The script is read, never run: lines `export NAME=VALUE` and `unset NAME` with plain values. A value with an
 * expansion, and a name that is set to several values by cases, are left out: nobody here can say what they come to.
 */
#include "software/read.h"

#include <string.h>

#define SCRIPT "/scripts/set_nccl_env.sh"
#define NAME_LETTERS "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_"
#define VALUE_LETTERS "abcdefghijklmnopqrstuvwxyz" NAME_LETTERS "./,:=^+-"

static bool is_theirs(const char *name, size_t n)
{
    return n > 5 && n < 128 && (strncmp(name, "NCCL_", 5) == 0 || strncmp(name, "TORCH_NCCL_", 11) == 0);
}

static void note(struct stack_nccl *nccl, const char *name, const char *value)
{
    for (int i = 0; i < nccl->n_settings; i++) {
        struct stack_setting *setting = &nccl->settings[i];

        if (strcmp(setting->name, name) != 0)
            continue;
        setting->is_unclear = setting->is_unclear || !value != !setting->value ||
                              (value && setting->value && strcmp(setting->value, value) != 0);
        return;
    }
    if (nccl->n_settings < STACK_MAX_SETTINGS)
        nccl->settings[nccl->n_settings++] = (struct stack_setting){name, value, false};
}

/* One word behind `export` or `unset`; where the next one begins. */
static const char *read_word(struct root *root, struct stack_nccl *nccl, const char *word, bool is_export)
{
    size_t n = strspn(word, NAME_LETTERS), n_value = 0;
    const char *value = word + n + 1, quote = word[n] == '=' && word[n] ? *value : '\0';
    bool is_quoted = quote == '"' || quote == '\'';
    char end;

    if (!is_export || word[n] != '=') {
        if (!is_export && is_theirs(word, n) && strchr(" \t\r\n;", word[n]))
            note(nccl, root_printf(root, "%.*s", (int)n, word), NULL);
        return word + n + strcspn(word + n, " \t\n");
    }
    value += is_quoted;
    n_value = strspn(value, VALUE_LETTERS);
    end = value[n_value];
    if (is_theirs(word, n) && (is_quoted ? end == quote : strchr(" \t\r\n;", end) != NULL))
        note(nccl, root_printf(root, "%.*s", (int)n, word), root_printf(root, "%.*s", (int)n_value, value));
    else if (is_theirs(word, n))
        note(nccl, root_printf(root, "%.*s", (int)n, word), "?");
    return value + n_value + strcspn(value + n_value, " \t\n");
}

void stack_read_gib(struct root *root, struct stack_nccl *nccl)
{
    struct root_text script = root_read(root, "%s" SCRIPT, nccl->gib);
    int n_clear = 0;

    nccl->script = "";
    nccl->n_settings = 0;
    for (const char *at = script.text; *nccl->gib && *at; at += strcspn(at, "\n"), at += *at == '\n') {
        bool is_export;
        const char *word;

        at += strspn(at, " \t");
        is_export = strncmp(at, "export ", 7) == 0;
        if (!is_export && strncmp(at, "unset ", 6) != 0)
            continue;
        for (word = at + (is_export ? 7 : 6); *word && *word != '\n' && *word != '#';) {
            word += strspn(word, " \t");
            if (*word && *word != '\n' && *word != '#')
                word = read_word(root, nccl, word, is_export);
        }
    }
    for (int i = 0; i < nccl->n_settings; i++) {
        struct stack_setting *setting = &nccl->settings[i];

        setting->is_unclear = setting->is_unclear || (setting->value && strcmp(setting->value, "?") == 0);
        n_clear += !setting->is_unclear;
    }
    if (n_clear > 0)
        nccl->script = root_printf(root, "%s" SCRIPT, nccl->gib);
    else
        nccl->n_settings = 0;
}
