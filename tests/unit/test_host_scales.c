/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Scales of a low-latency dispatch on the host backend, with the strides of DeepEP. Strides of plans:
 * tests/property/sequence_host. Ranks are threads.
 */
#include "ranks.h"

#include <epkit/epkit.h>
#include <stdalign.h>

#define RANKS 3
#define TOKENS 9
#define TOPK 2
#define EXPERTS 6
#define HIDDEN 512
#define UNTOUCHED 0x77777777u

#define LL_LOCAL (EXPERTS / RANKS)
#define LL_ROWS (RANKS * TOKENS)

struct ll_out {
    alignas(16) uint8_t x[LL_LOCAL * LL_ROWS * HIDDEN];
    alignas(16) uint32_t scales[LL_LOCAL * LL_ROWS * HIDDEN / 128];
    int32_t count[LL_LOCAL];
};

/* As in DeepEP: [L, R*M, H/128] with strides (H/128 * R*M, 1, R*M), the same elements as contiguous ones. */
static int transpose(const ep_boot *boot, void *argument)
{
    static struct ll_out outs[RANKS][2];
    static alignas(16) uint16_t inputs[RANKS][TOKENS * HIDDEN];
    struct ll_out *out = outs[boot->rank];
    uint16_t *x = inputs[boot->rank];
    ep_ll_config ll_config;
    ep_ll_dispatch_args args = EP_LL_DISPATCH_ARGS_INIT;
    int32_t index[TOKENS * TOPK];
    ep_comm *comm;
    ep_ll *ll;

    (void)argument;
    SURE(unit_comm_new(boot, NULL, 0, 0, &comm) == EP_OK);
    ll_config = args_ll(TOKENS, HIDDEN, EXPERTS, TOPK);
    SURE(ep_ll_new(comm, &ll_config, &ll) == EP_OK);
    for (int i = 0; i < TOKENS * HIDDEN; i++) {
        int block = i / 128;

        x[i] = ep_bf16_from_f32((float)(1 + block + boot->rank * 100));
    }
    for (int i = 0; i < TOKENS * TOPK; i++)
        index[i] = (i + boot->rank) % EXPERTS;
    for (int packed = 0; packed < 2; packed++) {
        int words = packed ? HIDDEN / 512 : HIDDEN / 128;

        for (int i = 0; i < 2; i++) {
            memset(&out[i], 0x77, sizeof(out[i]));
            args.x = x;
            args.topk_idx = index;
            args.idx_type = EP_I32;
            args.n_tokens = TOKENS;
            args.out_dtype = EP_F8E4M3;
            args.scale_type = packed ? EP_UE8M0 : EP_F32;
            args.recv_x = out[i].x;
            args.recv_scales = out[i].scales;
            args.recv_count = out[i].count;
            args.recv_scale_stride_token = i ? 1 : 0;
            args.recv_scale_stride_block = i ? LL_ROWS : 0;
            SURE(ep_ll_dispatch_sync(ll, &args) == EP_OK);
        }
        SURE(memcmp(out[0].x, out[1].x, sizeof(out[0].x)) == 0);
        for (int expert = 0; expert < LL_LOCAL; expert++)
            for (int row = 0; row < LL_ROWS; row++)
                for (int word = 0; word < words; word++) {
                    uint32_t *from = &out[0].scales[expert * LL_ROWS * words],
                             *to = &out[1].scales[expert * LL_ROWS * words];

                    SURE(from[row * words + word] == to[word * LL_ROWS + row]);
                    SURE((to[word * LL_ROWS + row] == UNTOUCHED) == (row >= out[0].count[expert]));
                }
    }
    ep_ll_free(ll);
    ep_comm_free(comm);
    return 0;
}

TEST_CALL(low_latency_scales_are_transposed, unit_run_threads(RANKS, transpose, NULL))
