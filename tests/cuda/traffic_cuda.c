/* SPDX-License-Identifier: Apache-2.0 */
/*
 * traffic_cuda --ranks N --nodes M [--rounds LAYERS]: where the bytes of a group of several nodes go, by counters that
 * are not the library's. Over TCP on one machine: its loopback interface must send what the ranks say that they have
 * put on the network, and the NVLinks of their GPUs what they say that they have moved within nodes: nothing if each
 * rank is a node. Each rank needs a GPU of its own. Another program that uses the loopback or the links disturbs it.
 * Exit 77 if there is no GPU, or if its driver has no counters.
 */
#include "case.h"

#include <dlfcn.h>
#include <epkit/cuda.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HIDDEN = 7168, TOPK = 8, EXPERTS = 256, TOKENS = 2048, TIMEOUT_MS = 30000 };
#define ROW_BYTES ((size_t)HIDDEN * 2)
/* Of TCP and IP, acknowledgements, heartbeats, words between kernels. */
#define OVERHEAD 0.1
#define OTHER_BYTES 1e6

/* --- counters ---------------------------------------------------------------------------------------------------- */

/* As nvml.h declares them: bytes that all NVLinks of a GPU have sent, in KiB, without the heads of packets. */
enum { FIELD_SENT_KIB = 138, ALL_LINKS = UINT_MAX };
struct field {
    unsigned id, scope;
    long long timestamp, latency_us;
    unsigned type;
    int result;
    union {
        double real;
        unsigned number;
        unsigned long long number64;
    } value;
};

/* Bytes that the links of the GPU have sent; below 0: the driver does not say. */
static double link_bytes(const char *bus_id)
{
    struct field field = {.id = FIELD_SENT_KIB, .scope = ALL_LINKS};
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL), *device;
    int (*init)(void) = NULL, (*by_pci)(const char *, void **) = NULL, (*fields)(void *, int, struct field *) = NULL;

    if (library) {
        *(void **)&init = dlsym(library, "nvmlInit_v2");
        *(void **)&by_pci = dlsym(library, "nvmlDeviceGetHandleByPciBusId_v2");
        *(void **)&fields = dlsym(library, "nvmlDeviceGetFieldValues");
    }
    if (!init || !by_pci || !fields || init() || by_pci(bus_id, &device) || fields(device, 1, &field) || field.result)
        return -1;
    return (double)field.value.number64 * 1024;
}

static double loopback_bytes(void)
{
    FILE *file = fopen("/sys/class/net/lo/statistics/tx_bytes", "r");
    double bytes = -1;

    if (file && fscanf(file, "%lf", &bytes) != 1)
        bytes = -1;
    if (file)
        fclose(file);
    return bytes;
}

/* --- the group --------------------------------------------------------------------------------------------------- */

struct bytes {
    double links, node, forward, net; /* sent by the GPU's links; as the statistics say, this rank's */
};

struct state {
    const struct group *group;
    ep_plan *plan;
    int64_t n_recv;
    void *x, *recv, *out;
    char bus_id[32];
    double loopback;
    struct bytes sum;
};

static int prepare(struct state *s, uint64_t seed)
{
    const struct group *g = s->group;
    struct routing routing = {.n_tokens = TOKENS,
                              .topk = TOPK,
                              .n_experts = EXPERTS / g->nranks * g->nranks,
                              .nranks = g->nranks,
                              .idx_type = EP_I32};
    uint64_t random = seed * 64 + (uint64_t)g->rank;
    int32_t *index = malloc(TOKENS * TOPK * sizeof(*index));
    ep_plan_info info = EP_PLAN_INFO_INIT;
    ep_plan_args args = EP_PLAN_ARGS_INIT;

    EXPECT(index, "no memory for the routing");
    fill_routing(&routing, &random, index);
    args.topk_idx = index;
    args.idx_type = EP_I32;
    args.n_tokens = TOKENS;
    args.topk = TOPK;
    args.n_experts = routing.n_experts;
    CALL(ep_plan_new(g->cuda, &args, &s->plan));
    free(index);
    CALL(ep_plan_get_info(s->plan, &info));
    s->n_recv = info.n_recv;
    CUDA(cudaDeviceGetPCIBusId(s->bus_id, sizeof(s->bus_id), g->device));
    CUDA(cudaMalloc(&s->x, TOKENS * ROW_BYTES));
    CUDA(cudaMemset(s->x, 0x3f, TOKENS * ROW_BYTES));
    CUDA(cudaMalloc(&s->out, TOKENS * ROW_BYTES));
    CALL(ep_alloc(g->cuda, ((size_t)s->n_recv + 1) * ROW_BYTES, &s->recv));
    return 0;
}

static int add_stats(const struct state *s, struct bytes *sum)
{
    ep_stats stats = EP_STATS_INIT;

    CALL(ep_comm_get_stats(s->group->cuda, &stats));
    sum->node += (double)stats.bytes_node;
    sum->forward += (double)stats.bytes_forward;
    sum->net += (double)stats.bytes_net;
    return 0;
}

static int call_layer(const struct state *s, struct bytes *sum)
{
    ep_dispatch_args dispatch = EP_DISPATCH_ARGS_INIT;
    ep_combine_args combine = EP_COMBINE_ARGS_INIT;

    dispatch.dtype = combine.dtype = EP_BF16;
    dispatch.hidden = combine.hidden = HIDDEN;
    dispatch.x = s->x;
    dispatch.recv_x = s->recv;
    dispatch.out_rows = s->n_recv;
    combine.x = s->recv;
    combine.out = s->out;
    CALL(ep_dispatch(s->plan, &dispatch, s->group->stream));
    CALL(ep_stream_sync(s->group->cuda, s->group->stream));
    TRY(add_stats(s, sum));
    CALL(ep_combine(s->plan, &combine, s->group->stream));
    CALL(ep_stream_sync(s->group->cuda, s->group->stream));
    return add_stats(s, sum);
}

static int measure(struct state *s, int layers)
{
    struct bytes mine = {.net = 0}, all[MAX_RANKS];
    double links, loopback;

    TRY(call_layer(s, &mine)); /* connections and staging memory */
    mine = (struct bytes){.net = 0};
    TRY(group_barrier(s->group));
    links = link_bytes(s->bus_id);
    loopback = loopback_bytes();
    TRY(group_barrier(s->group));
    for (int i = 0; i < layers; i++)
        TRY(call_layer(s, &mine));
    TRY(group_barrier(s->group));
    mine.links = links < 0 ? -1 : link_bytes(s->bus_id) - links;
    s->loopback = loopback_bytes() - loopback;
    if (links < 0 || loopback < 0) {
        test_report("%s", links < 0 ? "NVML has no counters of NVLinks here" : "lo has no counter");
        return SKIPPED;
    }
    CALL(ep_comm_allgather(s->group->host, &mine, sizeof(mine), all));
    for (int rank = 0; rank < s->group->nranks; rank++) {
        s->sum.links += all[rank].links;
        s->sum.node += all[rank].node;
        s->sum.forward += all[rank].forward;
        s->sum.net += all[rank].net;
    }
    return 0;
}

static int check(const struct state *s)
{
    const struct bytes *sum = &s->sum;

    if (s->group->rank == 0)
        printf(
            "traffic: %.0f bytes put on the network, %.0f sent by lo; %.0f for ranks of the same node, %.0f forwarded "
            "there, %.0f sent by NVLinks\n",
            sum->net, s->loopback, sum->node, sum->forward, sum->links);
    EXPECT(sum->net > 0 && s->loopback >= sum->net && s->loopback <= sum->net * (1 + OVERHEAD) + OTHER_BYTES,
           "lo has sent %.0f bytes, and %.0f were put on the network", s->loopback, sum->net);
    if (group_division.nodes == s->group->nranks)
        EXPECT(sum->node == 0 && sum->links <= sum->net / 100 + OTHER_BYTES,
               "%.0f bytes went through NVLinks, though each rank is a node", sum->links);
    else
        /* Forwarded rows for the GPU that forwards them do not leave it. */
        EXPECT(sum->links >= sum->node * (1 - OVERHEAD) &&
                   sum->links <= (sum->node + sum->forward) * (1 + OVERHEAD) + OTHER_BYTES,
               "NVLinks have sent %.0f bytes, for %.0f and %.0f within nodes", sum->links, sum->node, sum->forward);
    return 0;
}

static int run_rank(const struct scenario_run *run, const struct group *group)
{
    struct state s = {.group = group};

    EXPECT(group->nranks <= MAX_RANKS, "%d ranks", group->nranks);
    TRY(prepare(&s, run->seed));
    TRY(measure(&s, run->rounds));
    TRY(check(&s));
    ep_plan_free(s.plan);
    CALL(ep_free(group->cuda, s.recv));
    CUDA(cudaFree(s.x));
    CUDA(cudaFree(s.out));
    return 0;
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
    } scenarios[] = {{"traffic"}};
    struct options options = {.ranks = 2, .seed = 1, .rounds = 20};

    if (!options_read(argc, argv, 2, &options))
        return 2;
    if (group_division.nodes < 2)
        group_division.nodes = options.ranks;
    group_division.network = "tcp";
    return run_group_scenarios(
        &options,
        (struct scenario_run){.program = "traffic_cuda", .timeout_ms = TIMEOUT_MS, .seconds = 120, .run = run_rank},
        scenarios, 1, sizeof(scenarios[0]));
}
