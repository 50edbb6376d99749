/* SPDX-License-Identifier: Apache-2.0 */
/*
 * parse_python.c - DeepEP's buffer.py, line by line.
 *
 * Pull request 466 of DeepEP (commit 8a07e7e) adds a method and its call in Buffer.__init__(). A patch script that is
 * passed around adds the method alone, above `def get_dispatch_config` and thus below its @staticmethod: the mapping is
 * there, is never called, and get_dispatch_config() has lost its decorator. No Python is needed to tell them apart.
 */
#include "software/parse.h"
#include "source/python.h"

#include <string.h>

struct reader {
    struct parse_buffer facts;
    char quote;   /* of the text in triple quotes that goes on in the next line; 0 none */
    bool in_init; /* within __init__, whose "def" has this indent */
    size_t init_indent;
    bool below_decorator; /* lines above this one, but for blank ones and comments, are a decorator without self */
};

/* `text` begins with "def": notes which function begins there. */
static void note_function(struct reader *reader, const char *text, size_t indent)
{
    const char *name = text + strspn(text, PYTHON_BLANK), *behind;
    size_t n = 0;

    while (python_is_name_byte(name[n]))
        n++;
    behind = name + n + strspn(name + n, PYTHON_BLANK);
    if (n == 8 && strncmp(name, "__init__", n) == 0) {
        reader->in_init = true;
        reader->init_indent = indent;
    } else if (indent <= reader->init_indent) {
        reader->in_init = false; /* a function within __init__ does not end it */
    }
    if (n != strlen(PYTHON_MAPPING) || strncmp(name, PYTHON_MAPPING, n) != 0 || *behind != '(')
        return;
    behind += 1 + strspn(behind + 1, PYTHON_BLANK);
    reader->facts.defines_mapping = true;
    if (reader->below_decorator && strncmp(behind, "self", 4) == 0 && !python_is_name_byte(behind[4]))
        reader->facts.decorator_stolen = true;
}

static void read_line(struct reader *reader, const char *line)
{
    size_t indent = strspn(line, PYTHON_BLANK);
    const char *text = line + indent, *function = python_function(text);

    if (!*text)
        return;
    if (python_decorator(text)) {
        reader->below_decorator = true;
        return;
    }
    if (*text == '@')
        return; /* one more decorator does not end the list */
    if (function)
        note_function(reader, function, indent);
    else if (reader->in_init && indent <= reader->init_indent && *text != ')')
        reader->in_init = false;
    if (reader->in_init && python_calls_mapping(line))
        reader->facts.calls_mapping = true;
    reader->below_decorator = false;
}

struct parse_buffer parse_buffer_py(const char *text)
{
    struct reader reader = {0};
    char line[PYTHON_LINE_BYTES];

    while (*text) {
        size_t n = strcspn(text, "\n");
        size_t used = n < sizeof(line) - 1 ? n : sizeof(line) - 1;

        memcpy(line, text, used);
        line[used] = '\0';
        python_strip(line, &reader.quote);
        read_line(&reader, line);
        text += n + (text[n] == '\n');
    }
    return reader.facts;
}
