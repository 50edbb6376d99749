/* SPDX-License-Identifier: Apache-2.0 */
/* Lines of a stream: whole, in pieces, longer than allowed, without an end. */
#include "unit.h"

#include "cmd/launch/agent_lines.h"

static char seen[4096];

static void take(void *context, const char *text, size_t bytes)
{
    size_t used = strlen(seen);

    (void)context;
    assert_int_equal(text[bytes], '\0');
    snprintf(seen + used, sizeof(seen) - used, "(%.*s)", (int)bytes, text);
}

/* What comes of `text`, given `piece` at a time. */
static const char *read_all(const char *text, size_t piece, size_t max)
{
    struct line_buffer buffer = {0};
    size_t bytes = strlen(text);

    seen[0] = '\0';
    for (size_t at = 0; at < bytes; at += piece)
        assert_true(line_add(&buffer, max, text + at, bytes - at < piece ? bytes - at : piece, take, NULL));
    line_end(&buffer, take, NULL);
    assert_null(buffer.text);
    return seen;
}

TEST(test_pieces)
{
    for (size_t piece = 1; piece < 20; piece++) {
        assert_string_equal(read_all("one\n\ntwo\r\nrest", piece, 100), "(one)()(two\r)(rest)");
        assert_string_equal(read_all("1234567\n12345\n", piece, 4), "(1234)(567)(1234)(5)");
        assert_string_equal(read_all("", piece, 4), "");
    }
}

TEST(test_long_line)
{
    static char text[3000];

    memset(text, 'x', sizeof(text) - 2);
    text[sizeof(text) - 2] = '\n';
    assert_int_equal(strlen(read_all(text, 7, LINE_OUTPUT_MAX)), sizeof(text));
}
