/* SPDX-License-Identifier: Apache-2.0 */
/*
 * wire.c - a rank that compares what the interface of its host has sent with what the library says that it has put on
 * the network: rows for ranks of the same host must not leave it, and rows for others must.
 *
 * wire INTERFACE RANKS_PER_HOST; the rest is in the environment, as ep_boot_tcp_new() reads it. The first rank of each
 * host prints both, and fails if they differ by more than the heads of packets.
 */
#include <epkit/epkit.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TOKENS = 512, HIDDEN = 4096, TOPK = 4, LAYERS = 10, MAX_RANKS = 64, TIMEOUT_MS = 60000 };
#define ROW_BYTES ((size_t)HIDDEN * 2)
/* Of TCP and IP with timestamps in packets of 1448 bytes, and acknowledgements; bootstrap and heartbeats. */
#define MOST_OVERHEAD 0.08
#define OTHER_BYTES 200000

struct layer {
    ep_comm *comm;
    ep_plan *plan;
    int nranks;
    uint16_t *x, *recv, *out;
    int64_t n_recv;
};

#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        ep_status status_ = (call);                                                                                    \
        if (status_ != EP_OK) {                                                                                        \
            printf("%s: %s\n", #call, ep_last_error());                                                                \
            return 1;                                                                                                  \
        }                                                                                                              \
    } while (0)

/* Bytes that the interface has sent, or -1. */
static double sent_bytes(const char *interface)
{
    char path[128];
    double bytes = -1;
    FILE *file;

    snprintf(path, sizeof(path), "/sys/class/net/%s/statistics/tx_bytes", interface);
    file = fopen(path, "r");
    if (!file || fscanf(file, "%lf", &bytes) != 1)
        printf("%s: cannot be read\n", path);
    if (file)
        fclose(file);
    return bytes;
}

/* At least two tokens of three have an expert on the own host. */
static int make_layer(struct layer *l, int rank)
{
    static int32_t index[TOKENS * TOPK];
    ep_plan_args args = EP_PLAN_ARGS_INIT;
    ep_plan_info info = EP_PLAN_INFO_INIT;

    for (int t = 0; t < TOKENS; t++)
        for (int k = 0; k < TOPK; k++)
            index[t * TOPK + k] = ((k == 0 && t % 3 ? rank : t * 7 + k * 5) % l->nranks) * TOPK + k;
    args.topk_idx = index;
    args.idx_type = EP_I32;
    args.n_tokens = TOKENS;
    args.topk = TOPK;
    args.n_experts = l->nranks * TOPK;
    TRY(ep_plan_new(l->comm, &args, &l->plan));
    TRY(ep_plan_get_info(l->plan, &info));
    l->n_recv = info.n_recv;
    TRY(ep_alloc(l->comm, (size_t)(l->n_recv + 1) * ROW_BYTES, (void **)&l->recv));
    l->x = malloc(TOKENS * ROW_BYTES);
    l->out = malloc(TOKENS * ROW_BYTES);
    for (size_t i = 0; l->x && i < TOKENS * ROW_BYTES / 2; i++)
        l->x[i] = (uint16_t)(0x3f80 + (i + (size_t)rank) % 64);
    return l->x && l->out ? 0 : 1;
}

/* A dispatch and a combine; adds what they have put on the network. */
static int run_layer(const struct layer *l, double *net_bytes)
{
    ep_dispatch_args dispatch = EP_DISPATCH_ARGS_INIT;
    ep_combine_args combine = {.size = sizeof(combine), .x = l->recv, .out = l->out};
    ep_stats stats = EP_STATS_INIT;

    dispatch.x = l->x;
    dispatch.recv_x = l->recv;
    dispatch.out_rows = l->n_recv;
    dispatch.dtype = combine.dtype = EP_BF16;
    dispatch.hidden = combine.hidden = HIDDEN;
    TRY(ep_dispatch_sync(l->plan, &dispatch));
    TRY(ep_comm_get_stats(l->comm, &stats));
    *net_bytes += (double)stats.bytes_net;
    TRY(ep_combine_sync(l->plan, &combine));
    TRY(ep_comm_get_stats(l->comm, &stats));
    *net_bytes += (double)stats.bytes_net;
    return 0;
}

/* Of all ranks of this host. */
static int sum_host(const struct layer *l, int rank, int per_host, double *net_bytes)
{
    double all[MAX_RANKS];

    TRY(ep_comm_allgather(l->comm, net_bytes, sizeof(*net_bytes), all));
    *net_bytes = 0;
    for (int i = rank / per_host * per_host; i < (rank / per_host + 1) * per_host; i++)
        *net_bytes += all[i];
    return 0;
}

static int measure(struct layer *l, int rank, const char *interface, int per_host)
{
    double before, sent, net = 0, rows = 0;
    int code = 0;

    TRY(ep_comm_barrier(l->comm));
    before = sent_bytes(interface);
    TRY(ep_comm_barrier(l->comm));
    for (int i = 0; i < LAYERS && !code; i++)
        code = run_layer(l, &net);
    if (code)
        return code;
    TRY(ep_comm_barrier(l->comm));
    sent = sent_bytes(interface) - before;
    if (sum_host(l, rank, per_host, &net))
        return 1;
    rows = 2.0 * LAYERS * TOKENS * per_host * (double)ROW_BYTES;
    code = before < 0 || net < rows / 2 || sent < net || sent > net * (1 + MOST_OVERHEAD) + OTHER_BYTES;
    if (rank % per_host == 0 || code)
        printf("rank %d: %.0f bytes sent by %s, %.0f put on the network\n", rank, sent, interface, net);
    TRY(ep_comm_barrier(l->comm));
    return code;
}

int main(int argc, char **argv)
{
    ep_boot_tcp_args args = EP_BOOT_TCP_ARGS_INIT;
    ep_comm_config config = EP_COMM_CONFIG_INIT;
    ep_comm_info info = EP_COMM_INFO_INIT;
    struct layer layer = {.comm = NULL};
    int per_host = argc == 3 ? atoi(argv[2]) : 0, code;
    ep_boot_tcp *boot;

    if (per_host < 1)
        return 2;
    setvbuf(stdout, NULL, _IOLBF, 0);
    args.timeout_ms = TIMEOUT_MS;
    TRY(ep_boot_tcp_new(&args, &boot));
    config.backend = "host";
    config.network = "tcp";
    config.ranks_per_node = per_host;
    config.timeout_ms = TIMEOUT_MS;
    TRY(ep_comm_new(ep_boot_tcp_get(boot), &config, &layer.comm));
    ep_boot_tcp_free(boot);
    TRY(ep_comm_get_info(layer.comm, &info));
    layer.nranks = info.nranks;
    code = info.nranks > MAX_RANKS ? 2 : make_layer(&layer, info.rank);
    if (!code)
        code = measure(&layer, info.rank, argv[1], per_host);
    ep_plan_free(layer.plan);
    free(layer.x);
    free(layer.out);
    ep_comm_free(layer.comm);
    return code;
}
