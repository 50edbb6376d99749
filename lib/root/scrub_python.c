/* SPDX-License-Identifier: Apache-2.0 */
/*
 * scrub_python.c - what stays of a Python program: the shape that tells a patched DeepEP from another one.
 *
 * A patched program is its owner's. lib/stack/parse_python.c looks at indentation, decorators, where functions begin
 * and two of their names, so a line with code becomes one of those or "pass", and texts and comments become nothing.
 * Whether two copies are the same says root_hash(), which is asked before.
 */
#include "root/scrub.h"

#include <ctype.h>
#include <string.h>

#define MAPPING "_setup_device_hca_mapping"
#define VERSION "__version__"
#define BLANK " \t\r\f\v"
#define LINE_BYTES 4096 /* as long as the lines that the parser looks at */

static bool is_name_byte(char c)
{
    return c == '_' || isalnum((unsigned char)c);
}

/* Blanks out texts and comments; *quote is that of a text in triple quotes which goes on in the next line. */
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

static bool calls_mapping(const char *line)
{
    static const char call[] = "self." MAPPING;

    for (const char *at = strstr(line, call); at; at = strstr(at + 1, call)) {
        const char *behind = at + strlen(call);

        if (at > line && (is_name_byte(at[-1]) || at[-1] == '.'))
            continue;
        if (behind[strspn(behind, BLANK)] == '(')
            return true;
    }
    return false;
}

/* `text` stands behind "def": the two names that matter, and whether the first argument is self. */
static void write_function(const char *text, FILE *out)
{
    const char *name = text + strspn(text, BLANK), *behind, *first;
    size_t n = 0;
    bool is_mapping, has_self;

    while (is_name_byte(name[n]))
        n++;
    behind = name + n + strspn(name + n, BLANK);
    first = *behind == '(' ? behind + 1 + strspn(behind + 1, BLANK) : "";
    has_self = strncmp(first, "self", 4) == 0 && !is_name_byte(first[4]);
    is_mapping = n == strlen(MAPPING) && strncmp(name, MAPPING, n) == 0 && *behind == '(';
    if (n == 8 && strncmp(name, "__init__", n) == 0)
        fputs("def __init__", out);
    else
        fputs(is_mapping ? "def " MAPPING : "def function", out);
    fputs(has_self ? "(self):" : "():", out);
}

/* `line` has no texts and comments any more, and something in it. */
static void write_code(const char *line, FILE *out)
{
    static const char *const decorators[] = {"@staticmethod", "@classmethod", "@property"};
    size_t indent = strspn(line, BLANK);
    const char *text = line + indent;

    fwrite(line, 1, indent, out);
    if (*text == '@') {
        for (size_t i = 0; i < sizeof(decorators) / sizeof(decorators[0]); i++) {
            if (strncmp(text, decorators[i], strlen(decorators[i])) == 0) {
                fputs(decorators[i], out);
                return;
            }
        }
        fputs("@decorator", out);
        return;
    }
    if (strncmp(text, "async", 5) == 0 && text[5] && strchr(BLANK, text[5]))
        text += 5 + strspn(text + 5, BLANK);
    if (strncmp(text, "def", 3) == 0 && text[3] && strchr(BLANK, text[3])) {
        write_function(text + 3, out);
        if (calls_mapping(line))
            fputs(" self." MAPPING "()", out);
    } else if (calls_mapping(line)) {
        fputs(*text == ')' ? ") self." MAPPING "()" : "self." MAPPING "()", out);
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
    at += strspn(at, BLANK);
    if (*at != '=')
        return false;
    at += 1 + strspn(at + 1, BLANK);
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
    char stripped[LINE_BYTES], quote = 0;
    size_t n;

    while (scrub_line(&text, end, &line, &n)) {
        size_t used = n < sizeof(stripped) - 1 ? n : sizeof(stripped) - 1;
        bool is_text = quote != 0;

        memcpy(stripped, line, used);
        stripped[used] = '\0';
        if (is_text || !write_version(scrub, stripped, out)) {
            strip_line(stripped, &quote);
            if (stripped[strspn(stripped, BLANK)])
                write_code(stripped, out);
        }
        fputc('\n', out);
    }
}
