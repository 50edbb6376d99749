/* SPDX-License-Identifier: Apache-2.0 */
/*
 * traffic_cuda --ranks N --nodes M [--rounds LAYERS]: where the bytes of a group of several nodes go, by counters that
 * are not the library's. Over TCP on one machine: its loopback interface must send what the ranks say that they have
 * put on the network, and the NVLinks of their GPUs what they say that they have moved within nodes: nothing if each
 * rank is a node. Each rank needs a GPU of its own. Another program that uses the loopback or the links disturbs it.
 * Exit 77 if there is no GPU, or if its driver has no counters.
 */
#include "layer.h"

#include "backend/cuda/nvml.h"

#include <epkit/cuda.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TOKENS = 2048, TIMEOUT_MS = 30000 };
/* Of TCP and IP, acknowledgements, heartbeats, words between kernels. */
#define OVERHEAD 0.1
#define OTHER_BYTES 1e6

/* --- counters ---------------------------------------------------------------------------------------------------- */

/* NVML field: what all NVLinks of a GPU have sent, in KiB, without the heads of packets. */
enum { FIELD_SENT_KIB = 138, ALL_LINKS = UINT_MAX };

/* Bytes that the links of the GPU have sent; below 0: the driver does not say. */
static double link_bytes(const char *bus_id)
{
    struct cuda_nvml_field field = {.id = FIELD_SENT_KIB, .scope = ALL_LINKS};
    uint64_t kib;

    return cuda_nvml_read(bus_id, &field, 1) && cuda_nvml_number(&field, &kib) ? (double)kib * 1024 : -1;
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
    struct layer layer;
    char bus_id[32];
    double loopback;
    struct bytes sum;
};

static int add_stats(const struct state *s, struct bytes *sum)
{
    ep_stats stats = EP_STATS_INIT;

    CALL(ep_comm_get_stats(s->group->cuda, &stats));
    sum->node += (double)stats.bytes_node;
    sum->forward += (double)stats.bytes_forward;
    sum->net += (double)stats.bytes_net;
    return 0;
}

static int run_layer(const struct state *s, struct bytes *sum)
{
    TRY(layer_dispatch(&s->layer, s->group));
    CALL(ep_stream_sync(s->group->cuda, s->group->stream));
    TRY(add_stats(s, sum));
    TRY(layer_combine(&s->layer, s->group));
    CALL(ep_stream_sync(s->group->cuda, s->group->stream));
    return add_stats(s, sum);
}

static int measure(struct state *s, int layers)
{
    struct bytes mine = {.net = 0}, all[MAX_RANKS];
    double links, loopback;

    TRY(run_layer(s, &mine)); /* connections and staging memory */
    mine = (struct bytes){.net = 0};
    TRY(group_barrier(s->group));
    links = link_bytes(s->bus_id);
    loopback = loopback_bytes();
    TRY(group_barrier(s->group));
    for (int i = 0; i < layers; i++)
        TRY(run_layer(s, &mine));
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
    CUDA(cudaDeviceGetPCIBusId(s.bus_id, sizeof(s.bus_id), group->device));
    TRY(layer_open(&s.layer, group, TOKENS, true, run->seed));
    TRY(measure(&s, run->rounds));
    TRY(check(&s));
    return layer_close(&s.layer, group);
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
