/* SPDX-License-Identifier: Apache-2.0 */
/* Frames of the agents: whole, in pieces, behind greetings, and what is none. */
#include "unit.h"

#include "cmd/launch/frame.h"

static char seen[4096];

static void take(const struct frame *frame, void *context)
{
    size_t used = strlen(seen);

    (void)context;
    snprintf(seen + used, sizeof(seen) - used, "%c%d(%.*s)", frame->kind, frame->rank, (int)frame->bytes, frame->data);
}

/* What comes of `bytes`, given `piece` at a time. */
static const char *read_all(const char *data, size_t bytes, size_t piece)
{
    struct frame_reader reader = {0};

    seen[0] = '\0';
    for (size_t at = 0; at < bytes; at += piece)
        assert_int_equal(frame_read(&reader, data + at, bytes - at < piece ? bytes - at : piece, take, NULL), 0);
    frame_reader_done(&reader);
    return seen;
}

TEST(test_pieces)
{
    static const char text[] = "Welcome to \036 this node\n\036epkit J 0 2\n{}\036epkit O 12 7\na\036epkib"
                               "noise\n\036epkit E 3 0\n\036epkit O 1 3\nend";

    for (size_t piece = 1; piece < sizeof(text); piece++)
        assert_string_equal(read_all(text, sizeof(text) - 1, piece), "J0({})O12(a\036epkib)E3()O1(end)");
}

TEST(test_no_frames)
{
    static const char *const texts[] = {
        "\036epkit X 0 2\n{}",        "\036epkit J -1 2\n{}", "\036epkit J 0 99999999999999999999\n{}",
        "\036epkit J 0 4194305\n{}",  "\036epkit J 0\n{}",    "\036epkit J 0 2 \n{}",
        "\036epkit J 99999999 2\n{}", "\036epkitJ 0 2\n{}",   "\036epkit J  0 2\n{}",
    };

    for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++) {
        char text[200];

        /* The next one is found behind it. */
        snprintf(text, sizeof(text), "%s\036epkit O 0 2\nok", texts[i]);
        assert_string_equal(read_all(text, strlen(text), 7), "O0(ok)");
    }
}

TEST(test_heads)
{
    char head[64], text[80];
    size_t length = frame_head('E', FRAME_RANKS_MAX, 3, head);

    assert_int_equal(length, strlen(head));
    snprintf(text, sizeof(text), "%sabc", head);
    assert_string_equal(read_all(text, strlen(text), 100), "E65536(abc)");
}
