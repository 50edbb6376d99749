/* SPDX-License-Identifier: Apache-2.0 */
/* log_lines.h - the lines of a log with `needle`, as readers of facts get them. */
#ifndef EP_TESTS_LOG_LINES_H
#define EP_TESTS_LOG_LINES_H

#include "machine/source/source.h"

static inline json_t *log_lines_read(struct source_text file)
{
    return json_stringn_nocheck(file.text, file.bytes);
}

static inline struct source_text log_lines(struct source *source, const char *needle, const char *path)
{
    struct source_answer fact = source_log_fact(source, needle, log_lines_read, needle, "%s", path);

    return (struct source_text){fact.state, source_fact_text(fact), json_string_length(fact.value), fact.why};
}

#endif
