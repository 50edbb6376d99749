/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gib.c - the settings of the installed gIB's script; values differ by release and machine type.
 *
 * The script is read, never run: lines `export NAME=VALUE` and `unset NAME` with plain values. A value with an
 * expansion, and a name that is set to different values in different cases, are marked unclear.
 */
#include "read_software.h"

#include <stdio.h>
#include <string.h>

#define SCRIPT "/scripts/set_nccl_env.sh"
#define NAME_LETTERS "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_"
#define VALUE_LETTERS "abcdefghijklmnopqrstuvwxyz" NAME_LETTERS "./,:=^+-"

static bool has_known_prefix(const char *name, size_t n)
{
    return n > 5 && n < 128 && (strncmp(name, "NCCL_", 5) == 0 || strncmp(name, "TORCH_NCCL_", 11) == 0);
}

/* What a name is set to: a string; null: the script unsets it; false: not known. Takes `value`. */
static void record_setting(json_t *settings, const char *name, size_t n, json_t *value)
{
    char key[128];
    const json_t *known;

    snprintf(key, sizeof(key), "%.*s", (int)n, name);
    known = json_object_get(settings, key);
    if (known && !json_equal(known, value)) {
        json_decref(value);
        value = json_false();
    }
    if (known || json_object_size(settings) < SOFTWARE_MAX_SETTINGS)
        json_object_set_new_nocheck(settings, key, value);
    else
        json_decref(value);
}

/* Reads one word after `export` or `unset`; returns where the next one begins. */
static const char *read_word(json_t *settings, const char *word, bool is_export)
{
    size_t n = strspn(word, NAME_LETTERS), n_value = 0;
    const char *value = word + n + 1, quote = word[n] == '=' && word[n] ? *value : '\0';
    bool is_quoted = quote == '"' || quote == '\'', is_clear;

    if (!is_export || word[n] != '=') {
        if (!is_export && has_known_prefix(word, n) && strchr(" \t\r\n;", word[n]))
            record_setting(settings, word, n, json_null());
        return word + n + strcspn(word + n, " \t\n");
    }
    value += is_quoted;
    n_value = strspn(value, VALUE_LETTERS);
    is_clear = is_quoted ? value[n_value] == quote : strchr(" \t\r\n;", value[n_value]) != NULL;
    if (has_known_prefix(word, n))
        record_setting(settings, word, n, is_clear ? json_stringn(value, n_value) : json_false());
    return value + n_value + strcspn(value + n_value, " \t\n");
}

static json_t *read_script(struct source_text file)
{
    json_t *settings = json_object();

    for (const char *at = file.text; *at; at += strcspn(at, "\n"), at += *at == '\n') {
        bool is_export;
        const char *word;

        at += strspn(at, " \t");
        is_export = strncmp(at, "export ", 7) == 0;
        if (!is_export && strncmp(at, "unset ", 6) != 0)
            continue;
        for (word = at + (is_export ? 7 : 6); *word && *word != '\n' && *word != '#';) {
            word += strspn(word, " \t");
            if (*word && *word != '\n' && *word != '#')
                word = read_word(settings, word, is_export);
        }
    }
    return settings;
}

void software_read_gib(struct source *source, struct software_nccl *nccl)
{
    struct source_answer script = source_fact(source, "gib-settings", read_script, "%s" SCRIPT, nccl->gib);
    const char *name;
    json_t *value;

    nccl->script = "";
    nccl->n_settings = 0;
    json_object_foreach ((json_t *)(*nccl->gib ? script.value : NULL), name, value) {
        const char *text = json_string_value(value);

        /* A snapshot may come from an untrusted source, and what is set here becomes lines of a shell script. */
        if (!has_known_prefix(name, strlen(name)) || name[strspn(name, NAME_LETTERS)] ||
            (text ? text[strspn(text, VALUE_LETTERS)] != '\0' : !json_is_null(value)))
            continue;
        if (nccl->n_settings < SOFTWARE_MAX_SETTINGS)
            nccl->settings[nccl->n_settings++] = (struct software_setting){name, text};
    }
    if (nccl->n_settings > 0)
        nccl->script = source_printf(source, "%s" SCRIPT, nccl->gib);
}
