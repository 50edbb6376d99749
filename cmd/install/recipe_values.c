/* SPDX-License-Identifier: Apache-2.0 */
/* recipe_values.c - the characters that values may contain: none of them can become code in a script. */
#include "recipe.h"

#include <ctype.h>
#include <string.h>

#define VALUE_BYTES_MAX 1024

/* Each byte of `value` is a letter, a digit or one of `others`. */
static bool has_only(const char *value, const char *others)
{
    for (; *value; value++)
        if (!(isascii(*value) && isalnum((unsigned char)*value)) && !strchr(others, *value))
            return false;
    return true;
}

static bool is_hex(const char *value, size_t min, size_t max)
{
    size_t n = strlen(value);

    return n >= min && n <= max && strspn(value, "0123456789abcdef") == n;
}

/* `globs`: characters that the last part may contain as well. */
static const char *path_fault(const char *value, const char *globs)
{
    const char *last = strrchr(value, '/');

    if (value[0] != '/')
        return "a path must begin with /";
    if (strlen(value) < 2)
        return "the root folder cannot be an installation folder";
    if (strcspn(value, "*?") < (size_t)(last - value) && *globs)
        return "only the last part of a path may contain * and ?";
    if (!has_only(value, *globs ? "/._+:-*?" : "/._+:-"))
        return "a path may only contain letters, digits and /._+:-";
    if (strstr(value, "/../") || strstr(value, "//") || strstr(value, "/./"))
        return "a path must not contain '..', '.' or '//'";
    /* Neighbours and parents of a path are found by cutting off the last name. */
    if (!*++last)
        return "a path must not end with /";
    return strcmp(last, ".") == 0 || strcmp(last, "..") == 0 ? "a path must not contain '..', '.' or '//'" : NULL;
}

static const char *text_fault(const char *value)
{
    for (; *value; value++)
        if ((unsigned char)*value < 0x20 && *value != '\n' && *value != '\t')
            return "it contains a control character";
    return NULL;
}

bool recipe_is_line(const char *value)
{
    return !strchr(value, '\n') && !text_fault(value);
}

const char *package_fault(const char *name)
{
    return isalnum((unsigned char)name[0]) && has_only(name, "._+-") ? NULL : "it is not a package name";
}

static const char *url_fault(const char *value)
{
    if (strncmp(value, "https://", 8) != 0 && strncmp(value, "http://", 7) != 0 && strncmp(value, "file:///", 8) != 0)
        return "a URL must begin with https://, http:// or file:///";
    return has_only(value, "._+:/=?&%~@-") ? NULL : "a URL may only contain letters, digits and ._+:/=?&%~@-";
}

const char *value_fault(enum value_shape shape, const char *value)
{
    bool is_text = shape == VALUE_TEXT || shape == VALUE_TEXTS || shape == VALUE_OPTIONS || shape == VALUE_SHELL;

    if (!is_text && !*value)
        return "it is empty";
    if (!is_text && strlen(value) > VALUE_BYTES_MAX)
        return "it is longer than 1024 characters";
    switch (shape) {
    case VALUE_WORD:
        if (value[0] == '-')
            return "a word must not begin with '-'";
        return has_only(value, "._+:,=@%/~-") ? NULL : "a word may only contain letters, digits and ._+:,=@%/~-";
    case VALUE_VERSION:
    case VALUE_PACKAGES:
        if (value[0] == '-')
            return "a version must not begin with '-'";
        return has_only(value, ".+:~*-") ? NULL : "a version may only contain letters, digits and .+:~-*";
    case VALUE_PATH:
    case VALUE_PATHS:
        return path_fault(value, "");
    case VALUE_GLOBS:
        return path_fault(value, "*?");
    case VALUE_FLAG:
        return strcmp(value, "0") == 0 || strcmp(value, "1") == 0 ? NULL : "it must be 0 or 1";
    case VALUE_URL:
        return url_fault(value);
    case VALUE_SHA256:
        return is_hex(value, 64, 64) ? NULL : "it must be 64 hexadecimal digits";
    case VALUE_FINGERPRINT:
        return strlen(value) == 40 && strspn(value, "0123456789ABCDEF") == 40
                   ? NULL
                   : "it must be 40 hexadecimal digits, without spaces, in upper case";
    case VALUE_COMMIT:
        return is_hex(value, 7, 40) ? NULL : "a commit is 7 to 40 hexadecimal digits";
    case VALUE_MODE:
        return strlen(value) == 4 && value[0] == '0' && strspn(value, "01234567") == 4
                   ? NULL
                   : "a mode is four octal digits that begin with 0: \"0644\"";
    case VALUE_BOOL:
        return strcmp(value, "true") == 0 || strcmp(value, "false") == 0 ? NULL : "it must be true or false";
    case VALUE_OPTIONS:
        return strchr(value, '\n') ? "it must be one line" : text_fault(value);
    case VALUE_SHELL:
        return strstr(value, "@{") ? "@{...} is not replaced in text for a shell: write \"$NAME\"" : text_fault(value);
    case VALUE_TEXT:
    case VALUE_TEXTS:
        break;
    }
    return text_fault(value);
}
