/* SPDX-License-Identifier: Apache-2.0 */
/*
 * layer_cuda [--ranks N] [--rounds LAYERS] [--seed N]: a loop of layers as in an engine (cached dispatch, some
 * computation, combine, on symmetric and on ordinary memory), with hosts that are late by a random time before each
 * layer. One JSON line for each case: microseconds of a layer, microseconds of the host in its calls, and processors
 * that the rank keeps busy. A measurement without checks. Exit 77 if there is no GPU.
 */
#include "layer.h"

#include <epkit/cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>

enum { TIMEOUT_MS = 20000, WARM_UP = 10 };
#define COMPUTE_BYTES ((size_t)128 << 20) /* of a fill that stands for the experts: some 60 us */

static const int token_steps[] = {512, 4096}, jitter_steps[] = {0, 100, 300};

struct state {
    struct group group;
    uint64_t seed;
    int layers, n_tokens;
    struct layer layer;
    void *scratch;
};

static int call_layer(const struct state *s)
{
    TRY(layer_dispatch(&s->layer, &s->group));
    CUDA(cudaMemsetAsync(s->scratch, 1, COMPUTE_BYTES, s->group.stream));
    return layer_combine(&s->layer, &s->group);
}

static double cpu_ms(void)
{
    struct rusage usage;

    getrusage(RUSAGE_SELF, &usage);
    return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1e3 +
           (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e3;
}

/* Other work of the host: keeps a processor busy. */
static void wait_busy(int jitter_us, uint64_t *random)
{
    double until = now_ms() + (double)(next_random(random) % (uint64_t)(jitter_us + 1)) / 1e3;

    while (now_ms() < until)
        ;
}

static int run_case(struct state *s, int jitter_us)
{
    uint64_t random = s->seed * 977 + (uint64_t)s->group.rank;
    double begin, calls = 0, cpu, wall;

    for (int i = 0; i < WARM_UP; i++)
        TRY(call_layer(s));
    CALL(ep_stream_sync(s->group.cuda, s->group.stream));
    TRY(group_barrier(&s->group));
    cpu = cpu_ms();
    begin = now_ms();
    for (int i = 0; i < s->layers; i++) {
        double call;

        if (jitter_us)
            wait_busy(jitter_us, &random);
        call = now_ms();
        TRY(call_layer(s));
        calls += now_ms() - call;
    }
    CALL(ep_stream_sync(s->group.cuda, s->group.stream));
    wall = now_ms() - begin;
    cpu = cpu_ms() - cpu;
    printf("{\"rank\": %d, \"ranks\": %d, \"tokens\": %d, \"memory\": \"%s\", \"jitter_us\": %d, \"layer_us\": %.1f, "
           "\"calls_us\": %.1f, \"processors\": %.2f}\n",
           s->group.rank, s->group.nranks, s->n_tokens, s->layer.symmetric ? "symmetric" : "ordinary", jitter_us,
           wall * 1e3 / s->layers, calls * 1e3 / s->layers, cpu / wall);
    return 0;
}

static int run_all(struct state *s)
{
    CUDA(cudaMalloc(&s->scratch, COMPUTE_BYTES));
    for (size_t i = 0; i < 2 * sizeof(token_steps) / sizeof(token_steps[0]); i++) {
        s->n_tokens = token_steps[i / 2];
        TRY(layer_open(&s->layer, &s->group, s->n_tokens, i % 2 == 0, s->seed));
        for (size_t j = 0; j < sizeof(jitter_steps) / sizeof(jitter_steps[0]); j++)
            TRY(run_case(s, jitter_steps[j]));
        TRY(group_barrier(&s->group));
        TRY(layer_close(&s->layer, &s->group));
    }
    CUDA(cudaFree(s->scratch));
    return 0;
}

static int run_rank(const struct scenario_run *run, const struct group *group)
{
    struct state s = {.group = *group, .seed = run->seed, .layers = run->rounds};

    return run_all(&s);
}

int main(int argc, char **argv)
{
    struct options options = {.ranks = 2, .rounds = 200, .seed = 1};

    if (!options_read(argc, argv, 1, &options))
        return 2;
    return options_code(&options, run_group_scenario(&options, (struct scenario_run){.program = "layer_cuda",
                                                                                     .name = "layers",
                                                                                     .timeout_ms = TIMEOUT_MS,
                                                                                     .seconds = 120,
                                                                                     .run = run_rank}));
}
