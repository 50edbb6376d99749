/* SPDX-License-Identifier: Apache-2.0 */
/* software_text.c - parsers for modprobe.d, the kernel command line, dpkg's status, DeepEP's buffer.py and others. */
#include "read_software.h"

#include <stdio.h>
#include <string.h>

#define KEEP_MAX 4096
#define BLANK " \t\r\f\v"

bool piece_begins(struct piece piece, const char *text)
{
    return piece.n >= strlen(text) && strncmp(piece.text, text, strlen(text)) == 0;
}

const char *piece_copy(struct source *source, struct piece piece)
{
    char clean[KEEP_MAX];
    const char *raw = source_printf(source, "%.*s", (int)(piece.n < KEEP_MAX ? piece.n : KEEP_MAX - 1), piece.text);

    text_clean(raw, clean, sizeof(clean));
    return source_printf(source, "%s", clean);
}

static struct piece piece_trim(struct piece piece)
{
    while (piece.n && strchr(BLANK "\n", piece.text[piece.n - 1]))
        piece.n--;
    while (piece.n && strchr(BLANK "\n", *piece.text)) {
        piece.text++;
        piece.n--;
    }
    return piece;
}

static struct piece piece_unquote(struct piece piece)
{
    if (piece.n >= 2 && piece.text[0] == '"' && piece.text[piece.n - 1] == '"')
        return (struct piece){.text = piece.text + 1, .n = piece.n - 2};
    return piece;
}

/* --- modprobe.d --- */

/* A line, including those that a '\' at its end continues. The backslash then counts as white space (is_space()). */
static struct piece next_continued_line(const char **at)
{
    struct piece line = text_take(at, "\n");

    while (line.n && line.text[line.n - 1] == '\\' && **at) {
        struct piece next = text_take(at, "\n");

        line.n = (size_t)(next.text + next.n - line.text);
    }
    return line;
}

static bool is_space(struct piece piece, size_t i)
{
    char c = piece.text[i];

    return (c != '\0' && strchr(BLANK "\n", c)) || (c == '\\' && i + 1 < piece.n && piece.text[i + 1] == '\n');
}

/* The next word of a line; white space inside double quotes does not end it. */
static struct piece next_word(struct piece *line)
{
    struct piece word;
    bool quoted = false;
    size_t i = 0;

    while (i < line->n && is_space(*line, i))
        i++;
    word = (struct piece){.text = line->text + i};
    for (; i < line->n && (quoted || !is_space(*line, i)); i++) {
        if (line->text[i] == '"')
            quoted = !quoted;
        word.n++;
    }
    line->text += i;
    line->n -= i;
    return word;
}

static bool split_option(struct piece word, struct parse_option *ret_option)
{
    const char *equals = memchr(word.text, '=', word.n);

    if (!equals)
        return false;
    ret_option->name = (struct piece){.text = word.text, .n = (size_t)(equals - word.text)};
    ret_option->value =
        piece_unquote((struct piece){.text = equals + 1, .n = word.n - (size_t)(equals - word.text) - 1});
    return true;
}

bool parse_modprobe_next(struct parse_modprobe *state, const char *module, struct parse_option *ret_option)
{
    if (!state->rest.text)
        state->rest.text = "";
    for (;;) {
        struct piece word = next_word(&state->rest);

        if (word.n && split_option(word, ret_option))
            return true;
        if (word.n)
            continue;
        if (!*state->at)
            return false;
        state->rest = next_continued_line(&state->at);
        /* The line is for another module, or is not an options line: skip all of it. */
        if (!piece_is(next_word(&state->rest), "options") || !piece_is(next_word(&state->rest), module))
            state->rest.n = 0;
    }
}

bool parse_cmdline_next(const char **at, const char *module, struct parse_option *ret_option)
{
    struct piece rest = {.text = *at, .n = strlen(*at)};
    size_t n_module = strlen(module);

    for (;;) {
        struct piece word = next_word(&rest);

        *at = rest.text;
        if (word.n == 0)
            return false;
        if (word.n <= n_module || word.text[n_module] != '.' || strncmp(word.text, module, n_module) != 0)
            continue;
        if (split_option((struct piece){.text = word.text + n_module + 1, .n = word.n - n_module - 1}, ret_option))
            return true;
    }
}

/* Removes the next entry, up to ';', from the front. If it contains no '=', `ret_name` is the whole entry. */
static struct piece next_dword(struct piece *dwords, struct piece *ret_name)
{
    const char *end = memchr(dwords->text, ';', dwords->n), *equals;
    struct piece entry = {.text = dwords->text, .n = end ? (size_t)(end - dwords->text) : dwords->n};

    dwords->text += entry.n + (end ? 1 : 0);
    dwords->n -= entry.n + (end ? 1 : 0);
    equals = memchr(entry.text, '=', entry.n);
    *ret_name = piece_trim((struct piece){.text = entry.text, .n = equals ? (size_t)(equals - entry.text) : entry.n});
    return equals ? piece_trim((struct piece){.text = equals + 1, .n = entry.n - (size_t)(equals - entry.text) - 1})
                  : (struct piece){.text = NULL};
}

bool parse_dword(struct piece dwords, const char *key, struct piece *ret_value)
{
    bool found = false;

    while (dwords.n) {
        struct piece name, value = next_dword(&dwords, &name);

        /* The driver applies them in order, so the last one with a name wins. */
        if (value.text && piece_is(name, key)) {
            *ret_value = value;
            found = true;
        }
    }
    return found;
}

const char *parse_dwords_with(struct source *source, struct piece dwords, const char *setting)
{
    const char *key = source_printf(source, "%.*s", (int)strcspn(setting, "="), setting);
    char merged[4096];
    size_t used = 0;

    while (dwords.n) {
        struct piece name, value = next_dword(&dwords, &name);

        /* An entry that does not fit cannot be valid: the kernel limits the whole line to 4 KiB. */
        if (value.text && !piece_is(name, key) && name.n + value.n + 2 < sizeof(merged) - used)
            used += (size_t)snprintf(merged + used, sizeof(merged) - used, "%.*s=%.*s;", (int)name.n, name.text,
                                     (int)value.n, value.text);
    }
    return source_printf(source, "%s%s;", piece_copy(source, (struct piece){.text = merged, .n = used}), setting);
}

/* --- dpkg --- */

static bool next_field(struct piece line, const char *name, struct piece *ret_value)
{
    size_t n = strlen(name);

    if (line.n <= n || *line.text != *name || line.text[n] != ':' || strncmp(line.text, name, n) != 0)
        return false;
    *ret_value = piece_trim((struct piece){.text = line.text + n + 1, .n = line.n - n - 1});
    return true;
}

bool parse_package_next(const char **at, struct parse_package *ret_package)
{
    while (**at) {
        struct parse_package package = {.name = {.text = ""}, .version = {.text = ""}, .status = {.text = ""}};
        struct piece line = text_take(at, "\n"), *status = &package.status;

        while (line.n) {
            if (!next_field(line, "Package", &package.name) && !next_field(line, "Version", &package.version))
                next_field(line, "Status", status);
            line = text_take(at, "\n");
        }
        /* "install ok installed", "hold ok installed"; "deinstall ok config-files" is a removed package. */
        package.installed = status->n >= 10 && strncmp(status->text + status->n - 10, " installed", 10) == 0;
        if (package.name.n) {
            *ret_package = package;
            return true;
        }
    }
    return false;
}

/* --- other --- */

struct piece parse_field(const char *text, const char *name, char divider)
{
    size_t n = strlen(name);

    while (*text) {
        struct piece line = piece_trim(text_take(&text, "\n"));
        struct piece rest;

        if (!piece_begins(line, name))
            continue;
        rest = piece_trim((struct piece){.text = line.text + n, .n = line.n - n});
        if (rest.n && *rest.text == divider)
            return piece_trim((struct piece){.text = rest.text + 1, .n = rest.n - 1});
    }
    return (struct piece){.text = ""};
}

struct piece parse_release(const char *text, const char *name)
{
    struct piece value = parse_field(text, name, '=');

    if (value.n >= 2 && strchr("\"'", *value.text) && value.text[value.n - 1] == *value.text)
        value = (struct piece){.text = value.text + 1, .n = value.n - 2};
    return value;
}

struct piece parse_define(const char *text, const char *name)
{
    while (*text) {
        struct piece line = text_take(&text, "\n"), word = next_word(&line);

        if (piece_is(word, "#define") && piece_is(next_word(&line), name)) {
            word = next_word(&line);
            if (word.n && strspn(word.text, "0123456789") >= word.n)
                return word;
        }
    }
    return (struct piece){.text = ""};
}

/* --- buffer.py --- */

#define MAPPING "_setup_device_hca_mapping("

struct parse_buffer parse_buffer_py(const char *text)
{
    struct parse_buffer facts = {0};
    bool is_below_decorator = false; /* for methods without self; empty lines and comments do not count */

    while (*text) {
        struct piece line = piece_trim(text_take(&text, "\n"));

        if (!line.n || *line.text == '#')
            continue;
        if (*line.text == '@') {
            is_below_decorator = is_below_decorator || piece_begins(line, "@staticmethod") ||
                                 piece_begins(line, "@classmethod") || piece_begins(line, "@property");
            continue;
        }
        facts.defines_mapping = facts.defines_mapping || piece_begins(line, "def " MAPPING);
        facts.decorator_stolen =
            facts.decorator_stolen || (is_below_decorator && piece_begins(line, "def " MAPPING "self"));
        facts.calls_mapping = facts.calls_mapping || piece_begins(line, "self." MAPPING);
        is_below_decorator = false;
    }
    return facts;
}
