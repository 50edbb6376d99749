/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_cuda [--ranks N] [--nodes N [--network NAME]] [--sms A,B,..] [--repeat N] [--tokens N] [--hidden N] [--topk N]
 * [--experts N]: whole operations on the CUDA backend, next to the rows alone (the same kernels on the same rows
 * without synchronisation) and the copy engine, in one run. One process per GPU. Times are of CUDA events around the
 * call, the median of all repetitions, the slowest rank. JSON lines, rank 0.
 */
#include "backend/cuda/module.h"
#include "group.h"

#include <epkit/cuda.h>
#include <epkit/epkit.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST_RANKS 512
#define MAX_REPEAT 1000
#define FLUSH_BYTES ((size_t)256 << 20)

static struct {
    int nodes;
    const char *network;
    int ranks, repeat, tokens, hidden, topk, experts, n_sms, sms[16];
} options = {
    .ranks = 2, .repeat = 60, .tokens = 4096, .hidden = 7168, .topk = 8, .experts = 256, .n_sms = 1, .sms = {16}};

struct bench {
    ep_comm *comm;
    ep_comm_info info;
    cudaStream_t stream;
    cudaEvent_t begin, end;
    int64_t *index;
    unsigned char *x, *scales, *bias, *out, *recv_x, *recv_scales, *recv_index, *recv_weights, *weights, *out_weights;
    unsigned char *ordinary; /* as recv_x, not symmetric */
    unsigned char *flush;
    ep_plan *plan;
    ep_plan_info plan_info;
    char device[64];
    float us[MAX_REPEAT];
};

enum what {
    DISPATCH_BF16,
    DISPATCH_FP8,
    COMBINE,
    DISPATCH_ORDINARY,
    COMBINE_ORDINARY,
    DISPATCH_FULL,
    PLAN_DISPATCH,
    N_WHAT
};
static const char *const what_names[N_WHAT] = {"dispatch bf16",
                                               "dispatch fp8",
                                               "combine bf16",
                                               "dispatch bf16, ordinary output",
                                               "combine bf16, ordinary input",
                                               "dispatch bf16 with indices and weights",
                                               "plan and dispatch bf16"};

static int compare_float(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;

    return (x > y) - (x < y);
}

/* The largest value of all ranks. */
static int slowest(struct bench *b, double mine, double *ret_slowest)
{
    double all[MOST_RANKS];

    CALL(ep_comm_allgather(b->comm, &mine, sizeof(mine), all));
    *ret_slowest = 0;
    for (int rank = 0; rank < b->info.nranks; rank++)
        if (all[rank] > *ret_slowest)
            *ret_slowest = all[rank];
    return 0;
}

static int fill_random(unsigned char *device, size_t bytes, uint64_t seed)
{
    uint64_t *host = malloc(bytes + 8);

    if (!host)
        return 1;
    for (size_t i = 0; i < bytes / 8; i++) {
        /* Finite bf16, so that sums stay ordinary numbers. */
        host[i] = next_random(&seed) & 0xbfffbfffbfffbfffu;
    }
    CUDA(cudaMemcpy(device, host, bytes / 8 * 8, cudaMemcpyHostToDevice));
    free(host);
    return 0;
}

static int make_routing(struct bench *b)
{
    size_t n = (size_t)options.tokens * (size_t)options.topk;
    int64_t *host = malloc(n * sizeof(*host));
    uint64_t random = 77u + (uint64_t)b->info.rank;

    if (!host)
        return 1;
    for (int t = 0; t < options.tokens; t++)
        for (int k = 0; k < options.topk; k++) {
            int64_t *at = host + (size_t)t * (size_t)options.topk;
            bool again = true;

            while (again) {
                at[k] = (int64_t)(next_random(&random) % (uint64_t)options.experts);
                again = false;
                for (int j = 0; j < k; j++)
                    again |= at[j] == at[k];
            }
        }
    CUDA(cudaMalloc((void **)&b->index, n * sizeof(*host)));
    CUDA(cudaMemcpy(b->index, host, n * sizeof(*host), cudaMemcpyHostToDevice));
    free(host);
    return 0;
}

static int new_plan(struct bench *b)
{
    ep_plan_args args = args_plan(b->index, EP_I64, options.tokens, options.topk, options.experts);

    CALL(ep_plan_new(b->comm, &args, &b->plan));
    b->plan_info = (ep_plan_info){.size = sizeof(b->plan_info)};
    CALL(ep_plan_get_info(b->plan, &b->plan_info));
    return 0;
}

static int make_buffers(struct bench *b)
{
    size_t row = (size_t)options.hidden * 2, n = (size_t)options.tokens, rows = (size_t)b->plan_info.n_recv + 4096;
    size_t topk = (size_t)options.topk;

    CUDA(cudaMalloc((void **)&b->x, n * row));
    CUDA(cudaMalloc((void **)&b->out, n * row));
    CUDA(cudaMalloc((void **)&b->scales, n * row / 64));
    CUDA(cudaMalloc((void **)&b->weights, n * topk * 4));
    CUDA(cudaMalloc((void **)&b->out_weights, n * topk * 4));
    CUDA(cudaMalloc((void **)&b->ordinary, rows * row));
    CALL(ep_alloc(b->comm, rows * row, (void **)&b->recv_x));
    CALL(ep_alloc(b->comm, rows * row / 64, (void **)&b->recv_scales));
    CALL(ep_alloc(b->comm, rows * topk * 8, (void **)&b->recv_index));
    CALL(ep_alloc(b->comm, rows * topk * 4, (void **)&b->recv_weights));
    return fill_random(b->x, n * row, 5u + (uint64_t)b->info.rank) ||
           fill_random(b->scales, n * row / 64, 6u + (uint64_t)b->info.rank) ||
           fill_random(b->weights, n * topk * 4, 7u + (uint64_t)b->info.rank);
}

static int operate(struct bench *b, enum what what)
{
    ep_dispatch_args args;

    if (what == COMBINE || what == COMBINE_ORDINARY) {
        ep_combine_args sum = args_combine(options.hidden, what == COMBINE ? b->recv_x : b->ordinary, b->out);

        CALL(ep_combine(b->plan, &sum, b->stream));
        return 0;
    }
    if (what == PLAN_DISPATCH) {
        ep_plan_free(b->plan);
        if (new_plan(b))
            return 1;
    }
    args = args_dispatch(what == DISPATCH_FP8 ? EP_F8E4M3 : EP_BF16, options.hidden, b->x,
                         what == DISPATCH_ORDINARY ? b->ordinary : b->recv_x, b->plan_info.n_recv);
    if (what == DISPATCH_FP8) {
        args.scales = b->scales;
        args.scale_type = EP_F32;
        args.recv_scales = b->recv_scales;
    }
    if (what == DISPATCH_FULL) {
        args.topk_weights = (const float *)(const void *)b->weights;
        args.recv_topk_idx = b->recv_index;
        args.recv_topk_weights = (float *)(void *)b->recv_weights;
    }
    CALL(ep_dispatch(b->plan, &args, b->stream));
    return 0;
}

static double logical_bytes(const struct bench *b, enum what what)
{
    double row = what == DISPATCH_FP8 ? options.hidden + options.hidden / 32.0 : 2.0 * options.hidden;

    return row * (double)b->plan_info.n_recv;
}

/* What this rank sent to other nodes in the last operation. */
static double net_bytes(const struct bench *b)
{
    ep_stats stats = {.size = sizeof(stats)};

    return ep_comm_get_stats(b->comm, &stats) == EP_OK ? (double)stats.bytes_net : 0;
}

static void print_row(const struct bench *b, const char *what, bool queued, int sms, double us, double best,
                      double bytes, int repeat)
{
    if (b->info.rank)
        return;
    printf(
        "{\"what\":\"%s\",\"gpu\":\"%s\",\"ranks\":%d,\"sms\":%d,\"start\":\"%s\",\"us\":%.1f,\"us_best\":%.1f,"
        "\"logical_gbps\":%.1f,\"wire_gbps\":%.1f,\"net_gbps\":%.2f,\"nodes\":%d,\"tokens\":%d,\"hidden\":%d,\"topk\":%d,"
        "\"experts\":%d,\"repeat\":%d}\n",
        what, b->device, b->info.nranks, sms, queued ? "queued" : "idle", us, best, bytes / us / 1e3,
        bytes * (b->info.nranks - 1) / b->info.nranks / us / 1e3, net_bytes(b) / us / 1e3, b->info.nnodes,
        options.tokens, options.hidden, options.topk, options.experts, repeat);
    fflush(stdout);
}

/*
 * One repetition at a time, all ranks in step. `queued`: after a fill of more memory than the cache holds, so that the
 * kernel is queued before it runs, as in a running model; otherwise on an idle device, where the time of the launch
 * counts.
 */
static int measure(struct bench *b, enum what what, bool bare, bool queued, int sms)
{
    char name[80];
    double us, best, bytes;

    for (int i = -10; i < options.repeat; i++) {
        CALL(ep_comm_barrier(b->comm));
        if (queued)
            CUDA(cudaMemsetAsync(b->flush, i & 0xff, FLUSH_BYTES, b->stream));
        CUDA(cudaEventRecord(b->begin, b->stream));
        if (bare)
            CALL(ep_cuda_repeat_bare(b->comm, what == COMBINE, 1));
        else if (operate(b, what))
            return 1;
        CUDA(cudaEventRecord(b->end, b->stream));
        if (!bare)
            CALL(ep_stream_sync(b->comm, b->stream));
        CUDA(cudaEventSynchronize(b->end));
        if (i >= 0)
            CUDA(cudaEventElapsedTime(&b->us[i], b->begin, b->end));
    }
    qsort(b->us, (size_t)options.repeat, sizeof(b->us[0]), compare_float);
    if (slowest(b, b->us[options.repeat / 2] * 1e3, &us) || slowest(b, b->us[0] * 1e3, &best) ||
        slowest(b, logical_bytes(b, what), &bytes))
        return 1;
    snprintf(name, sizeof(name), "%s%s", what_names[what], bare ? ", raw rows" : "");
    print_row(b, name, queued, sms, us, best, bytes, options.repeat);
    return 0;
}

/* measure_stream() repeats the rows without a pause: the limit of the links. */
static int measure_stream(struct bench *b, enum what what, int sms)
{
    char name[80];
    float ms;
    double us, bytes;

    CALL(ep_comm_barrier(b->comm));
    CALL(ep_cuda_repeat_bare(b->comm, what == COMBINE, 3));
    CUDA(cudaEventRecord(b->begin, b->stream));
    CALL(ep_cuda_repeat_bare(b->comm, what == COMBINE, 20));
    CUDA(cudaEventRecord(b->end, b->stream));
    CUDA(cudaEventSynchronize(b->end));
    CUDA(cudaEventElapsedTime(&ms, b->begin, b->end));
    if (slowest(b, ms * 1e3 / 20, &us) || slowest(b, logical_bytes(b, what), &bytes))
        return 1;
    snprintf(name, sizeof(name), "%s, raw rows without a pause", what_names[what]);
    print_row(b, name, true, sms, us, us, bytes, 20);
    CALL(ep_comm_barrier(b->comm));
    return 0;
}

static int measure_all(struct bench *b, int sms)
{
    CALL(ep_cuda_set_sms(b->comm, sms));
    for (int what = 0; what < N_WHAT; what++) {
        if (measure(b, (enum what)what, false, false, sms))
            return 1;
        if (what != PLAN_DISPATCH && measure(b, (enum what)what, false, true, sms))
            return 1;
        /* Kernels between nodes have no such baseline. */
        if (what <= COMBINE && options.nodes < 2 &&
            (measure(b, (enum what)what, true, true, sms) || measure_stream(b, (enum what)what, sms)))
            return 1;
    }
    return 0;
}

static int run_bench(struct bench *b)
{
    struct cudaDeviceProp properties;
    int device;

    b->info = (ep_comm_info){.size = sizeof(b->info)};
    CALL(ep_comm_get_info(b->comm, &b->info));
    CALL(ep_cuda_get_device(b->comm, &device, NULL));
    CUDA(cudaSetDevice(device));
    CUDA(cudaGetDeviceProperties(&properties, device));
    snprintf(b->device, sizeof(b->device), "%.60s", properties.name);
    CUDA(cudaStreamCreateWithFlags(&b->stream, cudaStreamNonBlocking));
    CUDA(cudaEventCreate(&b->begin));
    CUDA(cudaEventCreate(&b->end));
    if (make_routing(b) || new_plan(b) || make_buffers(b))
        return 1;
    CUDA(cudaMalloc((void **)&b->flush, FLUSH_BYTES));
    for (int i = 0; i < options.n_sms; i++)
        if (measure_all(b, options.sms[i]))
            return 1;
    if (b->info.rank == 0)
        fprintf(stderr, "library memory of rank 0: %.1f MB\n", (double)b->info.library_bytes / 1e6);
    ep_plan_free(b->plan);
    return 0;
}

static int run_rank(const ep_boot *boot, void *argument)
{
    ep_comm_config config = EP_COMM_CONFIG_INIT;
    static struct bench b;
    int code = 1;

    (void)argument;
    config.backend = "cuda";
    config.timeout_ms = 20000;
    if (options.nodes > 1) {
        config.ranks_per_node = options.ranks / options.nodes;
        config.network = options.network;
    }
    if (ep_comm_new(boot, &config, &b.comm) == EP_OK)
        code = run_bench(&b);
    else
        fprintf(stderr, "rank %d: %s\n", boot->rank, ep_last_error());
    if (code && b.comm)
        ep_comm_abort(b.comm);
    ep_comm_free(b.comm);
    return code;
}

static void read_sms(const char *text)
{
    char *end;

    for (options.n_sms = 0; *text && options.n_sms < 16; text = *end ? end + 1 : end) {
        options.sms[options.n_sms++] = (int)strtol(text, &end, 10);
        if (end == text)
            break;
    }
}

int main(int argc, char **argv)
{
    ep_launch_args launch = EP_LAUNCH_ARGS_INIT;
    ep_rank_exit exits[MOST_RANKS];
    int code = 0;

    for (int i = 1; i + 1 < argc; i += 2) {
        if (!strcmp(argv[i], "--ranks"))
            options.ranks = atoi(argv[i + 1]);
        else if (!strcmp(argv[i], "--repeat"))
            options.repeat = atoi(argv[i + 1]);
        else if (!strcmp(argv[i], "--tokens"))
            options.tokens = atoi(argv[i + 1]);
        else if (!strcmp(argv[i], "--hidden"))
            options.hidden = atoi(argv[i + 1]);
        else if (!strcmp(argv[i], "--topk"))
            options.topk = atoi(argv[i + 1]);
        else if (!strcmp(argv[i], "--experts"))
            options.experts = atoi(argv[i + 1]);
        else if (!strcmp(argv[i], "--nodes"))
            options.nodes = atoi(argv[i + 1]);
        else if (!strcmp(argv[i], "--network"))
            options.network = argv[i + 1];
        else if (!strcmp(argv[i], "--sms"))
            read_sms(argv[i + 1]);
        else
            return fprintf(stderr, "unknown option %s\n", argv[i]), 2;
    }
    if (options.repeat < 1 || options.repeat > MAX_REPEAT || options.ranks < 1 || options.ranks > MOST_RANKS)
        return 2;
    launch.mode = EP_LAUNCH_FORK;
    launch.nranks = options.ranks;
    launch.run = run_rank;
    launch.timeout_ms = 300000;
    if (ep_launch(&launch, exits) != EP_OK) {
        fprintf(stderr, "ep_launch: %s\n", ep_last_error());
        return 1;
    }
    for (int rank = 0; rank < options.ranks; rank++)
        code |= exits[rank].code;
    return code;
}
