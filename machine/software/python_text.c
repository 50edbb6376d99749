/* SPDX-License-Identifier: Apache-2.0 */
/*
 * python_text.c - parses DeepEP's buffer.py line by line.
 *
 * Pull request 466 of DeepEP (commit 8a07e7e) adds a method and its call in Buffer.__init__(). A patch script that is
 * in circulation adds only the method, above `def get_dispatch_config` and thus below its @staticmethod: the mapping
 * exists but is never called, and get_dispatch_config() has lost its decorator. This can be detected without Python.
 */
#include "common/text.h"
#include "software_text.h"

#include <string.h>

#define MAPPING "_setup_device_hca_mapping" /* the method of DeepEP's pull request 466 */
#define BLANK " \t\r\f\v"
#define LINE_BYTES 4096 /* longer lines are cut */

/* Is it a decorator for methods without `self`? */
static bool is_decorator(const char *text)
{
    return text_begins_any(text, TEXTS("@staticmethod", "@classmethod", "@property"));
}

static bool is_name_byte(char c)
{
    return c == '_' || (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

/*
 * Blanks out quoted text and cuts the line at a comment. *quote is the quote character of a triple-quoted string that
 * continues on the next line, 0 if there is none; it is 0 before the first line.
 */
static void strip_line(char *line, char *quote)
{
    char single = 0;

    for (char *at = line; *at; at++) {
        char triple[4] = {*quote, *quote, *quote, '\0'};

        if (*quote && strncmp(at, triple, 3) == 0) {
            memset(at, ' ', 3);
            at += 2;
            *quote = 0;
        } else if (*quote || single) {
            if (*at == '\\' && at[1])
                *at++ = ' ';
            else if (*at == single)
                single = 0;
            *at = ' ';
        } else if (strncmp(at, "\"\"\"", 3) == 0 || strncmp(at, "'''", 3) == 0) {
            *quote = *at;
            memset(at, ' ', 3);
            at += 2;
        } else if (*at == '"' || *at == '\'') {
            single = *at;
            *at = ' ';
        } else if (*at == '#') {
            *at = '\0';
            break;
        }
    }
}

/*
 * The text after "def" or "async def" of a stripped line without its indent; NULL if the line does not begin a
 * function.
 */
static const char *after_def(const char *text)
{
    if (strncmp(text, "async", 5) == 0 && text[5] && strchr(BLANK, text[5]))
        text += 5 + strspn(text + 5, BLANK);
    return strncmp(text, "def", 3) == 0 && text[3] && strchr(BLANK, text[3]) ? text + 3 : NULL;
}

/* Does the line contain "self.<MAPPING>(" as a complete name? */
static bool calls_mapping(const char *line)
{
    static const char call[] = "self." MAPPING;

    for (const char *at = strstr(line, call); at; at = strstr(at + 1, call)) {
        const char *after = at + strlen(call);

        if (at > line && (is_name_byte(at[-1]) || at[-1] == '.'))
            continue;
        if (after[strspn(after, BLANK)] == '(')
            return true;
    }
    return false;
}

struct reader {
    struct parse_buffer facts;
    char quote;   /* of a triple-quoted string that continues on the next line; 0: none */
    bool in_init; /* within __init__, whose "def" has this indent */
    size_t init_indent;
    bool below_decorator; /* the previous line, ignoring blank lines and comments, is a decorator for methods without
                             self */
};

/* Records the function that begins at `text`, which starts with "def". */
static void record_function(struct reader *reader, const char *text, size_t indent)
{
    const char *name = text + strspn(text, BLANK), *after;
    size_t n = 0;

    while (is_name_byte(name[n]))
        n++;
    after = name + n + strspn(name + n, BLANK);
    if (n == 8 && strncmp(name, "__init__", n) == 0) {
        reader->in_init = true;
        reader->init_indent = indent;
    } else if (indent <= reader->init_indent) {
        reader->in_init = false; /* a function within __init__ does not end it */
    }
    if (n != strlen(MAPPING) || strncmp(name, MAPPING, n) != 0 || *after != '(')
        return;
    after += 1 + strspn(after + 1, BLANK);
    reader->facts.defines_mapping = true;
    if (reader->below_decorator && strncmp(after, "self", 4) == 0 && !is_name_byte(after[4]))
        reader->facts.decorator_stolen = true;
}

static void read_line(struct reader *reader, const char *line)
{
    size_t indent = strspn(line, BLANK);
    const char *text = line + indent, *function = after_def(text);

    if (!*text)
        return;
    if (is_decorator(text)) {
        reader->below_decorator = true;
        return;
    }
    if (*text == '@')
        return; /* one more decorator does not end the list */
    if (function)
        record_function(reader, function, indent);
    else if (reader->in_init && indent <= reader->init_indent && *text != ')')
        reader->in_init = false;
    if (reader->in_init && calls_mapping(line))
        reader->facts.calls_mapping = true;
    reader->below_decorator = false;
}

struct parse_buffer parse_buffer_py(const char *text)
{
    struct reader reader = {0};
    char line[LINE_BYTES];

    while (*text) {
        size_t n = strcspn(text, "\n");
        size_t used = n < sizeof(line) - 1 ? n : sizeof(line) - 1;

        memcpy(line, text, used);
        line[used] = '\0';
        strip_line(line, &reader.quote);
        read_line(&reader, line);
        text += n + (text[n] == '\n');
    }
    return reader.facts;
}
