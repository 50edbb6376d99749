/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_cuda [--threads] [--ranks N] [--rounds N] [--seed N] [--small]: the CUDA backend against the host backend, bit
 * for bit: first shapes at the edges, then random ones. Exit 77 when there is no GPU.
 */
#include <stdbool.h>

#include "case.h"

#include <cuda_runtime_api.h>
#include <epkit/cuda.h>
#include <epkit/launch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_RANKS 32

static struct {
    int mode, ranks, rounds, small;
    uint64_t seed;
} options = {.mode = EP_LAUNCH_FORK, .ranks = 2, .rounds = 20, .seed = 1};

static const struct shape edges[] = {
    {.n_tokens = 128,
     .hidden = 2048,
     .topk = 8,
     .n_experts = 96,
     .dtype = EP_BF16,
     .idx_type = EP_I64,
     .symmetric = true,
     .choice = true},
    {.n_tokens = 128,
     .hidden = 2048,
     .topk = 8,
     .n_experts = 96,
     .dtype = EP_F8E4M3,
     .scale_type = EP_F32,
     .idx_type = EP_I32,
     .choice = true,
     .n_bias = 2},
    {.n_tokens = 100,
     .hidden = 2048,
     .topk = 8,
     .n_experts = 96,
     .dtype = EP_F8E4M3,
     .scale_type = EP_UE8M0,
     .idx_type = EP_I64,
     .symmetric = true,
     .strided = true,
     .n_bias = 1},
    {.n_tokens = 0, .hidden = 512, .topk = 2, .n_experts = 24, .dtype = EP_BF16, .idx_type = EP_I32, .choice = true},
    {.n_tokens = 1,
     .hidden = 8,
     .topk = 1,
     .n_experts = 12,
     .dtype = EP_BF16,
     .idx_type = EP_I32,
     .symmetric = true,
     .choice = true},
    {.n_tokens = 77,
     .hidden = 8192,
     .topk = 8,
     .n_experts = 96,
     .dtype = EP_BF16,
     .idx_type = EP_I64,
     .choice = true,
     .symmetric = true,
     .n_bias = 2},
    {.n_tokens = 33,
     .hidden = 16384,
     .topk = 32,
     .n_experts = 384,
     .dtype = EP_BF16,
     .idx_type = EP_I64,
     .choice = true,
     .symmetric = true,
     .n_bias = 1},
    {.n_tokens = 300,
     .hidden = 1032,
     .topk = 6,
     .n_experts = 96,
     .dtype = EP_BF16,
     .idx_type = EP_I32,
     .choice = true,
     .skewed = true,
     .holes = true},
    {.n_tokens = 300,
     .hidden = 1024,
     .topk = 6,
     .n_experts = 96,
     .alignment = 16,
     .dtype = EP_BF16,
     .idx_type = EP_I64,
     .choice = true,
     .expanded = true,
     .zero_padding = true,
     .symmetric = true,
     .holes = true},
    {.n_tokens = 300,
     .hidden = 1024,
     .topk = 6,
     .n_experts = 96,
     .alignment = 8,
     .dtype = EP_F8E4M3,
     .scale_type = EP_F32,
     .idx_type = EP_I64,
     .choice = true,
     .expanded = true,
     .n_bias = 2},
    {.n_tokens = 300,
     .hidden = 1024,
     .topk = 6,
     .n_experts = 96,
     .dtype = EP_BF16,
     .idx_type = EP_I64,
     .choice = true,
     .worst = true,
     .spare_rows = 9,
     .symmetric = true,
     .async = true},
    {.n_tokens = 64,
     .hidden = 65536,
     .topk = 4,
     .n_experts = 48,
     .dtype = EP_BF16,
     .idx_type = EP_I64,
     .symmetric = true},
    {.n_tokens = 700,
     .hidden = 7168,
     .topk = 8,
     .n_experts = 2040 - 2040 % 96,
     .dtype = EP_BF16,
     .idx_type = EP_I64,
     .symmetric = true,
     .choice = true},
};

#define N_EDGES ((int)(sizeof(edges) / sizeof(edges[0])))

static uint64_t draw(uint64_t *state, uint64_t below)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (*state >> 33) % below;
}

static struct shape random_shape(uint64_t *random, int nranks)
{
    struct shape shape = {.dtype = draw(random, 3) ? EP_BF16 : EP_F8E4M3,
                          .idx_type = draw(random, 2) ? EP_I32 : EP_I64};

    shape.topk = (int)draw(random, 3) ? 1 + (int)draw(random, 9) : 1 + (int)draw(random, 32);
    shape.n_experts = nranks * (32 + (int)draw(random, 8));
    shape.hidden = 8 * (1 + (int)draw(random, draw(random, 3) ? 256 : 2048));
    if (shape.dtype == EP_F8E4M3) {
        shape.hidden = 512 * (1 + shape.hidden / 512);
        shape.scale_type = draw(random, 3) == 0 ? EP_UE8M0 : draw(random, 4) ? EP_F32 : 0;
        shape.strided = draw(random, 2);
    }
    shape.alignment = 1 << draw(random, 6);
    shape.spare_rows = (int)draw(random, 20);
    shape.n_bias = (int)draw(random, 3);
    shape.expanded = draw(random, 4) == 0;
    shape.zero_padding = shape.expanded && draw(random, 2);
    shape.symmetric = draw(random, 2);
    shape.worst = draw(random, 4) == 0;
    shape.choice = draw(random, 4) != 0;
    shape.async = draw(random, 3) == 0;
    shape.after = shape.async && draw(random, 2);
    shape.skewed = draw(random, 6) == 0;
    shape.holes = draw(random, 3) == 0;
    return shape;
}

static int run_cases(ep_comm *host, ep_comm *cuda, int rank, int nranks)
{
    uint64_t random = options.seed;
    int failed = 0;

    for (int i = 0; i < N_EDGES + options.rounds; i++) {
        struct shape shape = i < N_EDGES ? edges[i] : random_shape(&random, nranks);
        int mine;

        if (shape.n_experts % nranks)
            shape.n_experts += nranks - shape.n_experts % nranks;
        /* Tokens differ between ranks; some have none. */
        if (i >= N_EDGES) {
            int most = 1 + (int)draw(&random, options.small ? 60 : 700),
                none = (int)draw(&random, 4 * (uint64_t)nranks);

            shape.n_tokens = rank == none ? 0 : most - (most * rank) / (2 * nranks);
        }
        if (options.small && shape.hidden > 2048)
            shape.hidden = 2048;
        shape.seed = options.seed * 1000003u + (uint64_t)i * 64 + (uint64_t)rank + 1;
        mine = case_run(host, cuda, &shape);
        if (mine)
            fprintf(stderr,
                    "rank %d: case %d failed: N %d H %d K %d E %d dtype %d scales %d idx %d align %d bias %d "
                    "expanded %d zero %d symmetric %d worst %d choice %d async %d skewed %d holes %d\n",
                    rank, i, shape.n_tokens, shape.hidden, shape.topk, shape.n_experts, shape.dtype, shape.scale_type,
                    shape.idx_type, shape.alignment, shape.n_bias, shape.expanded, shape.zero_padding, shape.symmetric,
                    shape.worst, shape.choice, shape.async, shape.skewed, shape.holes);
        failed += mine;
        if (ep_comm_async_error(cuda) != EP_OK || failed > 5)
            return 1;
    }
    return failed != 0;
}

static int run_rank(const ep_boot *boot, void *argument)
{
    ep_boot_shm *second = argument;
    ep_comm_config config = EP_COMM_CONFIG_INIT;
    ep_comm *host = NULL, *cuda = NULL;
    ep_boot other;
    int code = 1, device;
    ep_status status;

    config.timeout_ms = 20000;
    config.backend = "host";
    if (ep_boot_shm_join(second, boot->rank, &other) != EP_OK || ep_comm_new(boot, &config, &host) != EP_OK) {
        fprintf(stderr, "rank %d: %s\n", boot->rank, ep_last_error());
        return 1;
    }
    config.backend = "cuda";
    status = ep_comm_new(&other, &config, &cuda);
    if (status == EP_OK && ep_cuda_get_device(cuda, &device, NULL) == EP_OK && cudaSetDevice(device) == cudaSuccess)
        code = run_cases(host, cuda, boot->rank, boot->nranks);
    else
        fprintf(stderr, "rank %d: %s\n", boot->rank, ep_last_error());
    if (status == EP_E_UNSUPPORTED)
        code = 77;
    if (code)
        ep_comm_abort(host);
    if (code && cuda)
        ep_comm_abort(cuda);
    ep_comm_free(cuda);
    ep_comm_free(host);
    return code;
}

int main(int argc, char **argv)
{
    ep_launch_args launch = EP_LAUNCH_ARGS_INIT;
    ep_rank_exit exits[MAX_RANKS];
    ep_boot_shm *second = NULL;
    int code = 0;

    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";

        if (!strcmp(argv[i], "--threads"))
            options.mode = EP_LAUNCH_THREADS;
        else if (!strcmp(argv[i], "--small"))
            options.small = 1;
        else if (!strcmp(argv[i], "--ranks"))
            options.ranks = atoi(value), i++;
        else if (!strcmp(argv[i], "--rounds"))
            options.rounds = atoi(value), i++;
        else if (!strcmp(argv[i], "--seed"))
            options.seed = (uint64_t)atoll(value), i++;
        else
            return fprintf(stderr, "unknown option %s\n", argv[i]), 2;
    }
    if (options.ranks < 1 || options.ranks > MAX_RANKS || ep_boot_shm_new(options.ranks, &second) != EP_OK)
        return 2;
    launch.mode = options.mode;
    launch.nranks = options.ranks;
    launch.run = run_rank;
    launch.argument = second;
    launch.timeout_ms = options.mode == EP_LAUNCH_FORK ? 300000 : 0;
    if (ep_launch(&launch, exits) != EP_OK) {
        fprintf(stderr, "ep_launch: %s\n", ep_last_error());
        return 1;
    }
    for (int rank = 0; rank < options.ranks; rank++)
        code |= exits[rank].code;
    ep_boot_shm_free(second);
    printf("test_cuda: %d ranks (%s), %d cases: %s\n", options.ranks,
           options.mode == EP_LAUNCH_THREADS ? "threads" : "processes", N_EDGES + options.rounds,
           code ? "FAILED" : "passed");
    return code;
}
