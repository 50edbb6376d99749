/* SPDX-License-Identifier: Apache-2.0 */
/* A log with more matching lines than fit, and the format of kernel records. It compiles its own copy of lines.c. */
#include "machine/source/lines.c"
#include "temp.h"
#include "unit.h"

#define LINE_BYTES 40
#define LINES ((int)(SOURCE_LOG_MAX / LINE_BYTES * 5 / 2)) /* more than twice what fits */

TEST(of_many_lines_the_last_stay)
{
    struct found found = {.text = malloc(SOURCE_LOG_MAX)};
    char line[LINE_BYTES + 1];
    long first, last = -1;

    assert_non_null(found.text);
    for (int i = 0; i < LINES; i++) {
        snprintf(line, sizeof(line), "%0*d", LINE_BYTES, i);
        add_line(&found, line, LINE_BYTES);
    }
    assert_in_range(found.used, SOURCE_LOG_MAX / 2 - 2 * LINE_BYTES, SOURCE_LOG_MAX);
    assert_int_equal(found.used % (LINE_BYTES + 1), 0);
    first = strtol(found.text, NULL, 10);
    for (size_t at = 0; at < found.used; at += LINE_BYTES + 1) {
        last = strtol(found.text + at, NULL, 10);
        assert_int_equal(last, first + (long)(at / (LINE_BYTES + 1)));
    }
    assert_int_equal(last, LINES - 1);
    free(found.text);
}

TEST(a_line_may_be_too_long)
{
    struct found found = {.text = malloc(SOURCE_LOG_MAX)};
    char *line = calloc(1, SOURCE_LOG_MAX);

    assert_non_null(line);
    assert_non_null(found.text);
    add_line(&found, "short", 5);
    add_line(&found, line, SOURCE_LOG_MAX);
    assert_int_equal(found.used, 6);
    add_line(&found, line, SOURCE_LOG_MAX - 1);
    assert_int_equal(found.used, SOURCE_LOG_MAX);
    free(line);
    free(found.text);
}

TEST(records_lose_their_prefix)
{
    static const struct {
        const char *record, *wanted;
    } cases[] = {{"4,1,2,-;NVRM: Xid 1\n SUBSYSTEM=pci\n DEVICE=+pci:x Xid\n", "NVRM: Xid 1\n"},
                 {"4,1,2,-;a;b Xid", "a;b Xid\n"},
                 {"4,1,2,-;nothing\n Xid=1\n", ""},
                 {"Xid without a prefix", ""},
                 {";", ""},
                 {"", ""}};

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct found found = {.text = malloc(SOURCE_LOG_MAX)};

        assert_non_null(found.text);
        search_record(&found, cases[i].record, strlen(cases[i].record), "Xid");
        assert_int_equal(found.used, strlen(cases[i].wanted));
        assert_memory_equal(found.text, cases[i].wanted, found.used);
        free(found.text);
    }
}
