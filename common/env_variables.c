/* SPDX-License-Identifier: Apache-2.0 */
/* env_variables.c - looks up environment variables and validates their values. */
#include "env_variables.h"

#include "common/text.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

const struct variable *variable_find(const char *name)
{
    for (const struct variable *variable = variables; variable->names; variable++)
        for (const char *left = variable->names; *left;)
            if (piece_is(text_take(&left, " "), name))
                return variable;
    return NULL;
}

bool variable_has_known_prefix(const char *name)
{
    return text_begins_any(name, TEXTS("NVSHMEM_", "NCCL_", "DEEP_EP_"));
}

bool variable_is_epkit(const char *name)
{
    return text_begins(name, "EPKIT_") || strcmp(name, "NO_COLOR") == 0;
}

bool variable_nearest(const char *name, char ret_name[VARIABLE_NAME_BYTES])
{
    int least = 3; /* two differences are a typing error, more are another name */

    for (const struct variable *variable = variables; variable->names; variable++) {
        FOR_PIECES (word, variable->effect == VARIABLE_WORKS ? variable->names : "", " ") {
            char known[VARIABLE_NAME_BYTES];
            int slips;

            snprintf(known, sizeof(known), "%.*s", (int)word.n, word.text);
            slips = text_distance(name, known);
            if (slips >= least)
                continue;
            least = slips;
            snprintf(ret_name, VARIABLE_NAME_BYTES, "%s", known);
        }
    }
    return least < 3;
}

bool variable_is_true(const char *value)
{
    return value && !strchr("0nNfF", value[0] ? value[0] : '1');
}

/* --- values --- */

static bool __attribute__((format(printf, 3, 4))) refuse(char *ret_why, size_t bytes, const char *format, ...)
{
    WITH_ARGS(args, format, vsnprintf(ret_why, bytes, format, args));
    return false;
}

static bool accepts_bool(const char *value, char *ret_why, size_t bytes)
{
    static const char *const words[] = {"0", "false", "no", "f", "n", "1", "true", "yes", "on", "t", "y"};
    const char *digit = value;

    if (ANY_OF(i, COUNT(words), strcasecmp(value, words[i]) == 0))
        return true;
    while (*digit >= '0' && *digit <= '9')
        digit++;
    if (*value && *digit == '\0' && *value != '0')
        return true;
    return refuse(ret_why, bytes, "is neither 0 nor 1, and is read as %s",
                  variable_is_true(value) ? "true: only a value that begins with 0, n or f is false" : "false");
}

static bool parse_number(const char *value, long long *ret_number)
{
    char *end;

    if ((*value < '0' || *value > '9') && *value != '-' && *value != '+')
        return false;
    errno = 0;
    *ret_number = strtoll(value, &end, 0);
    return errno == 0 && end != value && *end == '\0';
}

/* `range` is "LOW..HIGH". */
static bool accepts_number(const char *range, bool must_be_power, const char *value, char *ret_why, size_t bytes)
{
    long long low = 0, high = 0, number;

    if (sscanf(range, "%lld..%lld", &low, &high) != 2)
        return true;
    if (!parse_number(value, &number))
        return refuse(ret_why, bytes, "is not a number");
    if (number < low || number > high)
        return refuse(ret_why, bytes, "is not within %lld and %lld", low, high);
    if (must_be_power && (number & (number - 1)) != 0)
        return refuse(ret_why, bytes, "is not a power of two");
    return true;
}

/* Like NVSHMEM: a number, which may have a decimal point, and one letter. */
static bool accepts_size(const char *value, char *ret_why, size_t bytes)
{
    char *end;
    double number;

    if ((*value < '0' || *value > '9') && *value != '.')
        return refuse(ret_why, bytes, "is not a size");
    number = strtod(value, &end);
    if (end == value || !(number >= 0) || (*end && (!strchr("kKmMgGtT", *end) || end[1])))
        return refuse(ret_why, bytes, "is not a size: a number followed by K, M, G or T");
    return true;
}

static bool accepts_alternative(const char *values, const char *value, char *ret_why, size_t bytes)
{
    char text[160] = "";

    FOR_PIECES (word, values, "|") {
        if (word.n == strlen(value) && strncasecmp(word.text, value, word.n) == 0)
            return true;
        text_append(text, sizeof(text), "%s%.*s", *text ? ", " : "", (int)word.n, word.text);
    }
    if (strchr(value, ','))
        return refuse(ret_why, bytes, "is a list, and it takes one word: %s", text);
    return refuse(ret_why, bytes, "is not one of %s", text);
}

bool variable_accepts(const struct variable *variable, const char *value, char *ret_why, size_t bytes)
{
    const char *values = variable->values;

    if (!values || strcmp(values, "list") == 0 || strcmp(values, "text") == 0)
        return true;
    if (strcmp(values, "path") == 0)
        return *value || refuse(ret_why, bytes, "names no file or folder");
    if (strcmp(values, "bool") == 0)
        return accepts_bool(value, ret_why, bytes);
    if (strcmp(values, "size") == 0)
        return accepts_size(value, ret_why, bytes);
    if (strncmp(values, "int ", 4) == 0)
        return accepts_number(values + 4, false, value, ret_why, bytes);
    if (strncmp(values, "power ", 6) == 0)
        return accepts_number(values + 6, true, value, ret_why, bytes);
    return accepts_alternative(values, value, ret_why, bytes);
}
