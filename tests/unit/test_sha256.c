/* SPDX-License-Identifier: Apache-2.0 */
#include "unit.h"

#include "base/sha256.h"

static void check_digest(const unsigned char *digest, const char *wanted)
{
    char text[2 * EP_SHA256_BYTES + 1];

    for (int i = 0; i < EP_SHA256_BYTES; i++)
        snprintf(text + (size_t)2 * (size_t)i, 3, "%02x", digest[i]);
    assert_string_equal(text, wanted);
}

/* NIST's examples, each also byte by byte. */
TEST(test_digests)
{
    static const struct {
        const char *text, *digest;
    } rows[] = {
        {"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
        {"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
        {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
         "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
    };

    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        unsigned char digest[EP_SHA256_BYTES];
        struct ep_sha256 sha;

        ep_sha256_init(&sha);
        ep_sha256_add(&sha, rows[i].text, strlen(rows[i].text));
        ep_sha256_end(&sha, digest);
        check_digest(digest, rows[i].digest);
        ep_sha256_init(&sha);
        for (const char *at = rows[i].text; *at; at++)
            ep_sha256_add(&sha, at, 1);
        ep_sha256_end(&sha, digest);
        check_digest(digest, rows[i].digest);
    }
}

/* A million times "a": every position of the end within a block is passed on the way. */
TEST(test_long_message)
{
    unsigned char block[997], digest[EP_SHA256_BYTES];
    struct ep_sha256 sha;

    memset(block, 'a', sizeof(block));
    ep_sha256_init(&sha);
    for (size_t left = 1000000; left;) {
        size_t n = left < sizeof(block) ? left : sizeof(block);

        ep_sha256_add(&sha, block, n);
        left -= n;
    }
    ep_sha256_end(&sha, digest);
    check_digest(digest, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

/* RFC 4231, cases 1, 2 and 6 (a key that is longer than a block); the message in two pieces. */
TEST(test_hmac)
{
    unsigned char key[131], mac[EP_SHA256_BYTES], other[EP_SHA256_BYTES];
    const struct ep_sha256_piece hi[] = {{"Hi", 2}, {" There", 6}};
    const struct ep_sha256_piece what[] = {{"what do ya want ", 16}, {"for nothing?", 12}};
    const struct ep_sha256_piece larger[] = {{"Test Using Larger Than Block-Size Key", 37}, {" - Hash Key First", 17}};

    memset(key, 0x0b, 20);
    ep_hmac_sha256(key, 20, hi, 2, mac);
    check_digest(mac, "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
    ep_hmac_sha256("Jefe", 4, what, 2, other);
    check_digest(other, "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    assert_true(ep_digest_equal(mac, mac));
    for (size_t i = 0; i < sizeof(mac); i++) {
        memcpy(other, mac, sizeof(mac));
        other[i] ^= 1;
        assert_false(ep_digest_equal(mac, other));
    }
    memset(key, 0xaa, sizeof(key));
    ep_hmac_sha256(key, sizeof(key), larger, 2, mac);
    check_digest(mac, "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}
