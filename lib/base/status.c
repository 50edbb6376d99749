/* SPDX-License-Identifier: Apache-2.0 */
#include "base/error.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* The header redefines them for the analyzer. */
#undef ep_fail
#undef ep_fail_errno
#undef ep_fail_prefix

struct status_row {
    ep_status status;
    const char *name, *text, *hint;
};

static const struct status_row status_rows[] = {
#define STATUS_ROW(name, number, text, hint) {name, #name, text, hint},
    EP_STATUS_TABLE(STATUS_ROW)
#undef STATUS_ROW
};

static const struct status_row *find_row(ep_status status)
{
    static const struct status_row unknown = {EP_OK, "EP_E_?", "unknown status", "the number is not one of epkit's"};

    for (size_t i = 0; i < sizeof(status_rows) / sizeof(status_rows[0]); i++)
        if (status_rows[i].status == status)
            return &status_rows[i];
    return &unknown;
}

const char *ep_status_name(ep_status status)
{
    return find_row(status)->name;
}

const char *ep_status_text(ep_status status)
{
    return find_row(status)->text;
}

const char *ep_status_hint(ep_status status)
{
    return find_row(status)->hint;
}

static _Thread_local char last_error[EP_ERROR_TEXT_BYTES];

const char *ep_last_error(void)
{
    return last_error;
}

void ep_set_last_error(const char *reason)
{
    ep_fail(EP_OK, "%s", reason ? reason : "");
}

ep_status ep_fail(ep_status status, const char *format, ...)
{
    /* An argument may be the old text itself, so format into a copy. */
    char text[EP_ERROR_TEXT_BYTES];
    va_list args;

    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    /* Values of variables, names of files and hosts may have sequences for terminals. */
    for (char *c = text; *c; c++)
        *c = ((unsigned char)*c < ' ' && *c != '\n') || *c == 0x7f ? '?' : *c;
    memcpy(last_error, text, sizeof(text));
    return status;
}

/* The setting to change, which strerror() does not name. */
static const char *name_limit(int error_number)
{
    return error_number == EMFILE ? ", RLIMIT_NOFILE (ulimit -n)" : error_number == ENFILE ? ", fs.file-max" : "";
}

ep_status ep_fail_errno(ep_status status, int error_number, const char *format, ...)
{
    char text[EP_ERROR_TEXT_BYTES], reason[128];
    va_list args;

    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    return ep_fail(status, "%s: %s (errno %d%s)", text, strerror_r(error_number, reason, sizeof(reason)), error_number,
                   name_limit(error_number));
}

ep_status ep_fail_prefix(ep_status status, const char *format, ...)
{
    char text[EP_ERROR_TEXT_BYTES];
    va_list args;

    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    return ep_fail(status, "%s%s", text, last_error);
}
