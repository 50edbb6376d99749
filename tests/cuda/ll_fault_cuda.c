/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ll_fault_cuda [--ranks N]: low latency when the last rank is killed or late, with and without masking. With it the
 * others go on without the rank, and a late one learns that it is excluded; without it they get a status that names it.
 */
#include <epkit/cuda.h>
#include <epkit/epkit.h>
#include <epkit/launch.h>
#include <epkit/lowlatency.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define TIMEOUT_MS 1500

enum { TOKENS = 24, HIDDEN = 512, TOPK = 4, PER_RANK = 4 };
enum fault { KILL, LATE, N_FAULTS };
static const char *const fault_names[N_FAULTS] = {"kill", "late"};

struct scene {
    enum fault fault;
    bool masks;
};

struct state {
    ep_comm *comm;
    ep_ll *ll;
    int rank, nranks, victim;
    int64_t index[TOKENS * TOPK];
    void *x, *d_index, *weights, *recv, *count, *out;
};

#define EXPECT(condition)                                                                                              \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "rank %d, line %d: not so: %s (%s)\n", s->rank, __LINE__, #condition, ep_last_error());    \
            return 1;                                                                                                  \
        }                                                                                                              \
    } while (0)
#define CUDA(call) EXPECT((call) == cudaSuccess)

static void sleep_ms(int ms)
{
    struct timespec span = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000L};

    nanosleep(&span, NULL);
}

static int64_t expert_of(const struct state *s, int rank, int i)
{
    return (i * 5 + rank + i / TOPK) % (s->nranks * PER_RANK / TOPK) * TOPK + i % TOPK;
}

static int make(struct state *s, bool masks)
{
    ep_ll_config config = EP_LL_CONFIG_INIT;
    size_t rows = (size_t)s->nranks * PER_RANK * TOKENS * HIDDEN * 2;
    float weights[TOKENS * TOPK];
    uint16_t *ones = malloc(rows);

    EXPECT(ones);
    for (size_t i = 0; i < rows / 2; i++)
        ones[i] = 0x3f80;
    for (int i = 0; i < TOKENS * TOPK; i++) {
        s->index[i] = expert_of(s, s->rank, i);
        weights[i] = 1.0f;
    }
    CUDA(cudaMalloc(&s->x, TOKENS * HIDDEN * 2));
    CUDA(cudaMalloc(&s->d_index, sizeof(s->index)));
    CUDA(cudaMalloc(&s->weights, sizeof(weights)));
    CUDA(cudaMalloc(&s->recv, rows));
    CUDA(cudaMalloc(&s->count, PER_RANK * 4));
    CUDA(cudaMalloc(&s->out, TOKENS * HIDDEN * 2));
    CUDA(cudaMemcpy(s->x, ones, TOKENS * HIDDEN * 2, cudaMemcpyDefault));
    CUDA(cudaMemcpy(s->d_index, s->index, sizeof(s->index), cudaMemcpyDefault));
    CUDA(cudaMemcpy(s->weights, weights, sizeof(weights), cudaMemcpyDefault));
    free(ones);
    config.max_tokens = TOKENS;
    config.hidden = HIDDEN;
    config.n_experts = s->nranks * PER_RANK;
    config.topk = TOPK;
    config.flags = masks ? EP_LL_MASK_DEAD : 0;
    EXPECT(ep_ll_new(s->comm, &config, &s->ll) == EP_OK);
    return 0;
}

static ep_status dispatch(struct state *s)
{
    ep_ll_dispatch_args args = EP_LL_DISPATCH_ARGS_INIT;

    args.x = s->x;
    args.topk_idx = s->d_index;
    args.idx_type = EP_I64;
    args.n_tokens = TOKENS;
    args.out_dtype = EP_BF16;
    args.recv_x = s->recv;
    args.recv_count = s->count;
    return ep_ll_dispatch(s->ll, &args);
}

static ep_status combine(struct state *s)
{
    ep_ll_combine_args args = EP_LL_COMBINE_ARGS_INIT;

    args.x = s->recv;
    args.topk_idx = s->d_index;
    args.idx_type = EP_I64;
    args.n_tokens = TOKENS;
    args.topk_weights = s->weights;
    args.out = s->out;
    return ep_ll_combine(s->ll, &args);
}

/* Each row is of ones: a sum is the number of its experts. Without the victim its tokens and experts do not count. */
static int verify(struct state *s, bool without)
{
    int32_t count[PER_RANK], expected[PER_RANK] = {0};
    uint16_t out[TOKENS * HIDDEN];

    CUDA(cudaMemset(s->out, 0xff, sizeof(out)));
    CUDA(cudaMemset(s->count, 0xff, sizeof(count)));
    EXPECT(dispatch(s) == EP_OK);
    EXPECT(combine(s) == EP_OK);
    CUDA(cudaMemcpy(count, s->count, sizeof(count), cudaMemcpyDefault));
    CUDA(cudaMemcpy(out, s->out, sizeof(out), cudaMemcpyDefault));
    for (int rank = 0; rank < s->nranks; rank++)
        for (int i = 0; i < TOKENS * TOPK; i++)
            if (expert_of(s, rank, i) / PER_RANK == s->rank && !(without && rank == s->victim))
                expected[expert_of(s, rank, i) % PER_RANK]++;
    for (int e = 0; e < PER_RANK; e++)
        EXPECT(count[e] == expected[e]);
    for (int t = 0; t < TOKENS; t++) {
        int n = 0;

        for (int k = 0; k < TOPK; k++)
            n += !(without && s->index[t * TOPK + k] / PER_RANK == s->victim);
        for (int i = 0; i < HIDDEN; i++)
            EXPECT(out[t * HIDDEN + i] == ep_bf16_from_f32((float)n));
    }
    return 0;
}

static int meet_fault(struct state *s, const struct scene *scene)
{
    int32_t masked[32];
    char name[32];
    ep_status status;

    if (s->rank == s->victim && scene->fault == KILL)
        kill(getpid(), SIGKILL);
    if (s->rank == s->victim)
        sleep_ms(TIMEOUT_MS * 3);
    if (s->rank == s->victim && scene->masks) {
        status = dispatch(s);
        EXPECT(status == EP_E_EXCLUDED);
        return 0;
    }
    snprintf(name, sizeof(name), "rank %d", s->victim);
    if (!scene->masks) {
        status = dispatch(s);
        EXPECT(status == (scene->fault == KILL ? EP_E_PEER_DEAD : EP_E_TIMEOUT) || s->rank == s->victim);
        EXPECT(status != EP_OK);
        if (s->rank != s->victim)
            EXPECT(strstr(ep_last_error(), name));
        return 0;
    }
    for (int round = 0; round < 4; round++)
        if (verify(s, true))
            return 1;
    EXPECT(ep_ll_get_mask(s->ll, masked) == EP_OK);
    for (int rank = 0; rank < s->nranks; rank++)
        EXPECT(masked[rank] == (rank == s->victim));
    /* Until the excluded one has looked. */
    sleep_ms(scene->fault == LATE ? TIMEOUT_MS * 3 : 0);
    return 0;
}

static int run_rank(const ep_boot *boot, void *argument)
{
    struct state state = {.rank = boot->rank, .nranks = boot->nranks, .victim = boot->nranks - 1}, *s = &state;
    const struct scene *scene = argument;
    ep_comm_config config = EP_COMM_CONFIG_INIT;
    int device, code;

    config.backend = "cuda";
    config.timeout_ms = TIMEOUT_MS;
    EXPECT(ep_comm_new(boot, &config, &s->comm) == EP_OK);
    EXPECT(ep_cuda_get_device(s->comm, &device, NULL) == EP_OK);
    CUDA(cudaSetDevice(device));
    code = make(s, scene->masks) || verify(s, false) || verify(s, false) || meet_fault(s, scene);
    /* The context lives. */
    if (!code)
        CUDA(cudaMemset(s->out, 0, 16));
    if (!code)
        CUDA(cudaDeviceSynchronize());
    ep_ll_free(s->ll);
    ep_comm_free(s->comm);
    return code;
}

int main(int argc, char **argv)
{
    ep_launch_args launch = EP_LAUNCH_ARGS_INIT;
    ep_rank_exit exits[32];
    int ranks = argc > 2 ? atoi(argv[2]) : 2, code = 0;

    for (int i = 0; i < 2 * N_FAULTS; i++) {
        struct scene scene = {.fault = (enum fault)(i / 2), .masks = i % 2};
        int failed = 0;

        launch.nranks = ranks;
        launch.run = run_rank;
        launch.argument = &scene;
        launch.timeout_ms = 60000;
        ep_launch(&launch, exits); /* a killed rank is what we want */
        for (int rank = 0; rank < ranks - (scene.fault == KILL ? 1 : 0); rank++)
            failed |= exits[rank].code != 0;
        printf("ll_fault_cuda: %d ranks, %s, %s: %s\n", ranks, fault_names[scene.fault],
               scene.masks ? "masked" : "not masked", failed ? "FAILED" : "passed");
        fflush(stdout);
        code |= failed;
    }
    return code;
}
