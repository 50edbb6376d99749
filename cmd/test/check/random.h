/* SPDX-License-Identifier: Apache-2.0 */
/*
 * random.h - random numbers that any rank can compute.
 *
 * Counter-based: number i of a stream is a pure function of the stream's key and i, so a rank computes any row of any
 * other rank without communication and without computing earlier rows. The function is the output function of
 * splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014), whose state advances by a
 * constant. Integer arithmetic only: the same numbers on every platform.
 */
#ifndef EP_TEST_CHECK_RANDOM_H
#define EP_TEST_CHECK_RANDOM_H

#include <stdint.h>

#define RANDOM_STEP UINT64_C(0x9e3779b97f4a7c15)

static inline uint64_t random_mix(uint64_t z)
{
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

/* Number i of the stream `key`. */
static inline uint64_t random_at(uint64_t key, uint64_t i)
{
    return random_mix(key + (i + 1) * RANDOM_STEP);
}

/* The key of the stream (a, b, c) of `seed`. Keys are mixed twice, so that adjacent streams are unrelated. */
static inline uint64_t random_key(uint64_t seed, uint64_t a, uint64_t b, uint64_t c)
{
    uint64_t key = random_mix(seed + RANDOM_STEP);

    key = random_mix(key ^ random_mix(a + 1 * RANDOM_STEP));
    key = random_mix(key ^ random_mix(b + 2 * RANDOM_STEP));
    return random_mix(key ^ random_mix(c + 3 * RANDOM_STEP));
}

/* A stream read in order. */
struct random {
    uint64_t key, i;
};

static inline uint64_t random_next(struct random *random)
{
    return random_at(random->key, random->i++);
}

/* 0 .. n-1 for 0 < n < 2^32; the bias of at most n / 2^32 does not matter here. */
static inline uint32_t random_below(struct random *random, uint32_t n)
{
    return (uint32_t)(((random_next(random) >> 32) * n) >> 32);
}

#endif
