/* SPDX-License-Identifier: Apache-2.0 */
/* Sets of ranks of low latency on GPUs: each rank is one bit of one word, also at the edges of words. */
#include "unit.h"

#include "backend/cuda/ll_segment.h"

TEST(each_rank_has_a_bit_of_its_own)
{
    uint32_t words[CUDA_LL_MASK_WORDS + 1] = {0};

    words[CUDA_LL_MASK_WORDS] = 0xa5a5a5a5;
    for (int rank = 0; rank < CUDA_LL_MAX_RANKS; rank++) {
        int bits = 0;

        ll_mask_add(words, rank);
        ll_mask_add(words, rank);
        for (int other = 0; other < CUDA_LL_MAX_RANKS; other++)
            assert_int_equal(ll_mask_has(words, other), other <= rank);
        for (int word = 0; word < CUDA_LL_MASK_WORDS; word++)
            bits += __builtin_popcount(words[word]);
        assert_int_equal(bits, rank + 1);
    }
    for (int rank = 0; rank < CUDA_LL_MAX_RANKS; rank++) {
        ll_mask_remove(words, rank);
        ll_mask_remove(words, rank);
        for (int other = 0; other < CUDA_LL_MAX_RANKS; other++)
            assert_int_equal(ll_mask_has(words, other), other > rank);
    }
    assert_int_equal(words[CUDA_LL_MASK_WORDS], 0xa5a5a5a5);
}

/* What kernels of up to 32 ranks read as one word is the first one. */
TEST(few_ranks_are_in_the_first_word)
{
    uint32_t words[CUDA_LL_MASK_WORDS] = {0};

    ll_mask_add(words, 0);
    ll_mask_add(words, 31);
    assert_int_equal(words[0], 0x80000001);
    ll_mask_add(words, 32);
    ll_mask_add(words, 63);
    ll_mask_add(words, 64);
    assert_int_equal(words[0], 0x80000001);
    assert_int_equal(words[1], 0x80000001);
    assert_int_equal(words[2], 1);
}
