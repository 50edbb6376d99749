/* SPDX-License-Identifier: Apache-2.0 */
/* The output of text_clean() for terminals, and that characters are never split. */
#include "unit.h"

#include "common/text.h"

TEST(hidden_characters_are_replaced)
{
    static const struct {
        const char *text, *wanted;
    } cases[] = {
        {"plain text, 100 %", "plain text, 100 %"},
        {"\xc3\xa4 \xe4\xb8\xad \xf0\x9f\x98\x80", "\xc3\xa4 \xe4\xb8\xad \xf0\x9f\x98\x80"},
        {"\033[31m", "?[31m"},
        {"a\nb\tc\rd\x7f", "a?b c?d?"},
        {"\xc2\x9b"
         "1m",
         "?1m"},                                     /* CSI in one character */
        {"\xe2\x80\xae", "?"},                       /* right-to-left override */
        {"\xe2\x81\xa6\xe2\x81\xa9", "??"},          /* isolates */
        {"\xe2\x80\x8b\xef\xbb\xbf\xc2\xad", "???"}, /* zero width, byte order mark, soft hyphen */
        {"\xe2\x80\xa8\xe2\x80\xa9", "??"},          /* separators of lines and paragraphs */
        {"\xf3\xa0\x81\x81\xef\xbf\xbf", "??"},      /* a tag, a noncharacter */
        {"\xff\xfe\xc0\x80", "????"},                /* no UTF-8 */
        {"\xed\xa0\x80", "???"},                     /* a surrogate */
        {"\xe2\x80", "??"},                          /* the beginning of a character */
    };
    char text[64];

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        text_clean(cases[i].text, text, sizeof(text));
        assert_string_equal(text, cases[i].wanted);
    }
}

TEST(all_hidden_characters_are_known)
{
    for (uint32_t code = 0; code < 0xa0; code++)
        assert_int_equal(text_is_printable(code), code >= 0x20 && code < 0x7f);
    for (uint32_t code = 0x200b; code <= 0x200f; code++)
        assert_false(text_is_printable(code));
    for (uint32_t code = 0x202a; code <= 0x202e; code++)
        assert_false(text_is_printable(code));
    for (uint32_t code = 0x2066; code <= 0x2069; code++)
        assert_false(text_is_printable(code));
    assert_false(text_is_printable(0x61c));
    assert_false(text_is_printable(0x1fffe));
    assert_true(text_is_printable(0x2010));
    assert_true(text_is_printable(0x4e2d));
}

TEST(a_cut_text_ends_with_a_whole_character)
{
    static const char whole[] = "a\xc3\xa4\xe2\x82\xac\xf0\x9f\x98\x80z";

    for (size_t bytes = 0; bytes < sizeof(whole); bytes++) {
        char text[sizeof(whole)], clean[sizeof(whole)];

        memcpy(text, whole, bytes);
        text[bytes] = '\0';
        text_cut(text);
        assert_true(strlen(text) <= bytes && bytes - strlen(text) <= 3);
        text_clean(text, clean, sizeof(clean));
        assert_string_equal(text, clean);
        text_clean(whole, clean, bytes + 1);
        assert_null(strchr(clean, '?'));
    }
}
