/* SPDX-License-Identifier: Apache-2.0 */
#include "base/sha256.h"

#include <string.h>

#define BLOCK_BYTES 64

/* FIPS 180-4, 4.2.2: the first 32 bits of the fractional parts of the cube roots of the first 64 primes. */
static const uint32_t constants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static uint32_t rotate(uint32_t x, int n)
{
    return x >> n | x << (32 - n);
}

static uint32_t read_word(const unsigned char *at)
{
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

static void write_word(unsigned char *at, uint32_t word)
{
    for (int i = 0; i < 4; i++)
        at[i] = (unsigned char)(word >> (24 - 8 * i));
}

static void add_block(struct ep_sha256 *sha, const unsigned char *block)
{
    uint32_t w[64], s[8];

    for (int i = 0; i < 16; i++)
        w[i] = read_word(block + (size_t)4 * (size_t)i);
    for (int i = 16; i < 64; i++) {
        uint32_t a = w[i - 15], b = w[i - 2];

        w[i] =
            w[i - 16] + (rotate(a, 7) ^ rotate(a, 18) ^ a >> 3) + w[i - 7] + (rotate(b, 17) ^ rotate(b, 19) ^ b >> 10);
    }
    memcpy(s, sha->state, sizeof(s));
    for (int i = 0; i < 64; i++) {
        uint32_t t1 = s[7] + (rotate(s[4], 6) ^ rotate(s[4], 11) ^ rotate(s[4], 25)) +
                      ((s[4] & s[5]) ^ (~s[4] & s[6])) + constants[i] + w[i];
        uint32_t t2 =
            (rotate(s[0], 2) ^ rotate(s[0], 13) ^ rotate(s[0], 22)) + ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));

        memmove(&s[1], &s[0], 7 * sizeof(s[0]));
        s[4] += t1;
        s[0] = t1 + t2;
    }
    for (int i = 0; i < 8; i++)
        sha->state[i] += s[i];
}

void ep_sha256_init(struct ep_sha256 *sha)
{
    /* FIPS 180-4, 5.3.3. */
    *sha = (struct ep_sha256){
        .state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19}};
}

void ep_sha256_add(struct ep_sha256 *sha, const void *data, size_t bytes)
{
    const unsigned char *at = data;

    while (bytes) {
        size_t used = sha->bytes % BLOCK_BYTES, n = BLOCK_BYTES - used < bytes ? BLOCK_BYTES - used : bytes;

        memcpy(sha->block + used, at, n);
        sha->bytes += n;
        at += n;
        bytes -= n;
        if (used + n == BLOCK_BYTES)
            add_block(sha, sha->block);
    }
}

void ep_sha256_end(struct ep_sha256 *sha, unsigned char ret_digest[EP_SHA256_BYTES])
{
    static const unsigned char padding[BLOCK_BYTES] = {0x80};
    uint64_t bits = sha->bytes * 8;
    unsigned char length[8];

    write_word(length, (uint32_t)(bits >> 32));
    write_word(length + 4, (uint32_t)bits);
    ep_sha256_add(sha, padding, 1 + (BLOCK_BYTES + 55 - sha->bytes % BLOCK_BYTES) % BLOCK_BYTES);
    ep_sha256_add(sha, length, sizeof(length));
    for (int i = 0; i < 8; i++)
        write_word(ret_digest + (size_t)4 * (size_t)i, sha->state[i]);
}

void ep_hmac_sha256(const void *key, size_t key_bytes, const struct ep_sha256_piece *pieces, size_t n,
                    unsigned char ret_mac[EP_SHA256_BYTES])
{
    unsigned char pad[BLOCK_BYTES] = {0}, inner[EP_SHA256_BYTES];
    struct ep_sha256 sha;

    if (key_bytes > BLOCK_BYTES) {
        ep_sha256_init(&sha);
        ep_sha256_add(&sha, key, key_bytes);
        ep_sha256_end(&sha, pad);
    } else if (key_bytes) {
        memcpy(pad, key, key_bytes);
    }
    for (size_t i = 0; i < sizeof(pad); i++)
        pad[i] ^= 0x36;
    ep_sha256_init(&sha);
    ep_sha256_add(&sha, pad, sizeof(pad));
    for (size_t i = 0; i < n; i++)
        ep_sha256_add(&sha, pieces[i].data, pieces[i].bytes);
    ep_sha256_end(&sha, inner);
    for (size_t i = 0; i < sizeof(pad); i++)
        pad[i] ^= 0x36 ^ 0x5c;
    ep_sha256_init(&sha);
    ep_sha256_add(&sha, pad, sizeof(pad));
    ep_sha256_add(&sha, inner, sizeof(inner));
    ep_sha256_end(&sha, ret_mac);
}

bool ep_digest_equal(const unsigned char a[EP_SHA256_BYTES], const unsigned char b[EP_SHA256_BYTES])
{
    unsigned difference = 0;

    for (size_t i = 0; i < EP_SHA256_BYTES; i++)
        difference |= (unsigned)(a[i] ^ b[i]);
    return difference == 0;
}
