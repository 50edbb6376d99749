/* SPDX-License-Identifier: Apache-2.0 */
#include "source/python.h"

#include <string.h>

const char *python_decorator(const char *text)
{
    static const char *const decorators[] = {"@staticmethod", "@classmethod", "@property"};

    for (size_t i = 0; i < sizeof(decorators) / sizeof(decorators[0]); i++)
        if (strncmp(text, decorators[i], strlen(decorators[i])) == 0)
            return decorators[i];
    return NULL;
}

bool python_is_name_byte(char c)
{
    return c == '_' || (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

void python_strip(char *line, char *quote)
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

const char *python_function(const char *text)
{
    if (strncmp(text, "async", 5) == 0 && text[5] && strchr(PYTHON_BLANK, text[5]))
        text += 5 + strspn(text + 5, PYTHON_BLANK);
    return strncmp(text, "def", 3) == 0 && text[3] && strchr(PYTHON_BLANK, text[3]) ? text + 3 : NULL;
}

bool python_calls_mapping(const char *line)
{
    static const char call[] = "self." PYTHON_MAPPING;

    for (const char *at = strstr(line, call); at; at = strstr(at + 1, call)) {
        const char *behind = at + strlen(call);

        if (at > line && (python_is_name_byte(at[-1]) || at[-1] == '.'))
            continue;
        if (behind[strspn(behind, PYTHON_BLANK)] == '(')
            return true;
    }
    return false;
}
