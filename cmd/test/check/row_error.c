/* SPDX-License-Identifier: Apache-2.0 */
#include "row_error.h"

#include <stdarg.h>
#include <stdio.h>

bool check_fail(struct check_error *error, const char *format, ...)
{
    va_list args;

    if (!error)
        return false;
    va_start(args, format);
    vsnprintf(error->text, sizeof(error->text), format, args);
    va_end(args);
    return false;
}
