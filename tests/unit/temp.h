/* SPDX-License-Identifier: Apache-2.0 */
/* temp.h - where a test may leave a file for a moment. */
#ifndef EP_TESTS_TEMP_H
#define EP_TESTS_TEMP_H

#include "unit.h"

#include <limits.h>

/* A template for mkstemp() and mkdtemp() in $TMPDIR, which not every machine lets be /tmp. */
static inline void temp_template(const char *name, char ret_path[PATH_MAX])
{
    const char *folder = getenv("TMPDIR");
    int n = snprintf(ret_path, PATH_MAX, "%s/epkit-%s-XXXXXX", folder && *folder ? folder : "/tmp", name);

    assert_in_range(n, 1, PATH_MAX - 1);
}

#endif
