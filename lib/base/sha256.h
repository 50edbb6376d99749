/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sha256.h - SHA-256 (FIPS 180-4) and HMAC (RFC 2104), for the proofs of the tcp bootstrap.
 *
 * Own code, because libepkit needs the C library and nothing more: glibc has no digest that programs may call, the
 * kernel's (AF_ALG) is closed by the seccomp filters of most containers, and a crypto library would be a dependency of
 * every engine that links libepkit. Tested with the vectors of NIST and RFC 4231.
 */
#ifndef EP_BASE_SHA256_H
#define EP_BASE_SHA256_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EP_SHA256_BYTES 32

struct ep_sha256 {
    uint32_t state[8];
    uint64_t bytes;
    unsigned char block[64];
};

void ep_sha256_init(struct ep_sha256 *sha);
void ep_sha256_add(struct ep_sha256 *sha, const void *data, size_t bytes);
void ep_sha256_end(struct ep_sha256 *sha, unsigned char ret_digest[EP_SHA256_BYTES]);

/* A part of the message; the parts are concatenated. */
struct ep_sha256_piece {
    const void *data;
    size_t bytes;
};

void ep_hmac_sha256(const void *key, size_t key_bytes, const struct ep_sha256_piece *pieces, size_t n,
                    unsigned char ret_mac[EP_SHA256_BYTES]);

/* In constant time. */
bool ep_digest_equal(const unsigned char a[EP_SHA256_BYTES], const unsigned char b[EP_SHA256_BYTES]);

#endif
