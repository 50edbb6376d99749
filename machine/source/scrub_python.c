/* SPDX-License-Identifier: Apache-2.0 */
/*
 * scrub_python.c - what stays of a Python program: the shape that tells a patched DeepEP from another one.
 *
 * A patched program is its owner's. machine/software/parse_python.c looks at indentation, decorators, where functions
 * begin and two of their names, so a line with code becomes one of those or "pass", and texts and comments become
 * nothing. Whether two copies are the same says root_hash(), which is asked before.
 */
#include "source/python.h"
#include "source/scrub.h"

#include <ctype.h>
#include <string.h>

#define VERSION "__version__"

/* `text` stands behind "def": the two names that matter, and whether the first argument is self. */
static void write_function(const char *text, FILE *out)
{
    const char *name = text + strspn(text, PYTHON_BLANK), *behind, *first;
    size_t n = 0;
    bool is_mapping, has_self;

    while (python_is_name_byte(name[n]))
        n++;
    behind = name + n + strspn(name + n, PYTHON_BLANK);
    first = *behind == '(' ? behind + 1 + strspn(behind + 1, PYTHON_BLANK) : "";
    has_self = strncmp(first, "self", 4) == 0 && !python_is_name_byte(first[4]);
    is_mapping = n == strlen(PYTHON_MAPPING) && strncmp(name, PYTHON_MAPPING, n) == 0 && *behind == '(';
    if (n == 8 && strncmp(name, "__init__", n) == 0)
        fputs("def __init__", out);
    else
        fputs(is_mapping ? "def " PYTHON_MAPPING : "def function", out);
    fputs(has_self ? "(self):" : "():", out);
}

/* `line` has no texts and comments any more, and something in it. */
static void write_code(const char *line, FILE *out)
{
    size_t indent = strspn(line, PYTHON_BLANK);
    const char *text = line + indent, *decorator = python_decorator(text), *function = python_function(text);

    fwrite(line, 1, indent, out);
    if (*text == '@') {
        fputs(decorator ? decorator : "@decorator", out);
        return;
    }
    if (function) {
        write_function(function, out);
        if (python_calls_mapping(line))
            fputs(" self." PYTHON_MAPPING "()", out);
    } else if (python_calls_mapping(line)) {
        fputs(*text == ')' ? ") self." PYTHON_MAPPING "()" : "self." PYTHON_MAPPING "()", out);
    } else {
        fputs(*text == ')' ? ")" : "pass", out);
    }
}

/* __version__ = "1.2.1" */
static bool write_version(struct scrub *scrub, const char *line, FILE *out)
{
    static const char allowed[] = "0123456789.+_abcdefghijklmnopqrstuvwxyz-";
    const char *at = line + strlen(VERSION);
    size_t n;

    if (strncmp(line, VERSION, strlen(VERSION)) != 0)
        return false;
    at += strspn(at, PYTHON_BLANK);
    if (*at != '=')
        return false;
    at += 1 + strspn(at + 1, PYTHON_BLANK);
    if (*at != '"' && *at != '\'')
        return false;
    n = strspn(at + 1, allowed);
    if (n == 0 || n > 64 || !isdigit((unsigned char)at[1]) || at[1 + n] != *at)
        return false;
    fputs(VERSION " = \"", out);
    scrub_text(scrub, at + 1, n, SCRUB_VERSIONS | SCRUB_NAME, out);
    fputc('"', out);
    return true;
}

void scrub_python(struct scrub *scrub, const char *text, size_t bytes, FILE *out)
{
    const char *end = text + strnlen(text, bytes), *line;
    char stripped[PYTHON_LINE_BYTES], quote = 0;
    size_t n;

    while (scrub_line(&text, end, &line, &n)) {
        size_t used = n < sizeof(stripped) - 1 ? n : sizeof(stripped) - 1;
        bool is_text = quote != 0;

        memcpy(stripped, line, used);
        stripped[used] = '\0';
        if (is_text || !write_version(scrub, stripped, out)) {
            python_strip(stripped, &quote);
            if (stripped[strspn(stripped, PYTHON_BLANK)])
                write_code(stripped, out);
        }
        fputc('\n', out);
    }
}
