/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The memory that low latency uses, by the number of ranks, and the part of it that is pinned: all that a rank writes
 * for a rank of another node, and no more than ep_ll_get_sizes() reports. Needs no GPU (no_device.h).
 */
#include "backend/cuda/ll_impl.h"

#include "call.h"
#include "no_device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define RING_BYTES ((size_t)1 << 20) /* per peer */

static const struct shape {
    int ranks, per_node;
    int32_t max_tokens, hidden, experts_of_rank, topk;
} shapes[] = {
    {2, 1, 1, 128, 1, 1},    {4, 2, 7, 384, 3, 5},      {32, 8, 16, 1024, 8, 8}, {33, 11, 16, 1024, 3, 8},
    {64, 8, 128, 512, 4, 8}, {64, 32, 24, 7168, 4, 32}, {320, 8, 16, 128, 1, 8}, {512, 32, 8, 128, 8, 6},
    {512, 1, 3, 256, 1, 2},  {96, 32, 5, 128, 2, 4},
};

struct made {
    struct cuda_comm cuda;
    ep_comm comm;
    ep_ll ll;
    struct cuda_ll device;
    struct ll_wire wire;
    struct cuda_ll_report report;
    struct cuda_ll_segment *segments[CUDA_LL_MAX_RANKS];
};

static void make(const struct shape *shape, int rank, struct made *m)
{
    memset(m, 0, sizeof(*m));
    m->comm.nranks = shape->ranks;
    m->comm.rank = rank;
    m->comm.ranks_per_node = shape->per_node;
    m->comm.impl = &m->cuda;
    memset(m->comm.members, 0xff, sizeof(m->comm.members));
    m->cuda.group.comm = &m->comm;
    m->cuda.group.first = rank / shape->per_node * shape->per_node;
    m->cuda.group.nlocal = shape->per_node;
    m->ll = (ep_ll){.comm = &m->comm, .n_local = shape->experts_of_rank};
    m->ll.config = (ep_ll_config)EP_LL_CONFIG_INIT;
    m->ll.config.max_tokens = shape->max_tokens;
    m->ll.config.hidden = shape->hidden;
    m->ll.config.n_experts = shape->ranks * shape->experts_of_rank;
    m->ll.config.topk = shape->topk;
}

/* The part of another rank's local segment that the kernels of this rank write. */
static int check_segment(const struct made *m, const struct cuda_ll_segment *segment)
{
    const unsigned char *base = (const unsigned char *)segment;
    const struct cuda_ll *d = &m->device;
    int64_t me = m->comm.rank, n = m->comm.nranks, tokens = d->segment_tokens, choices = tokens * d->segment_topk;
    const struct {
        const char *name;
        int64_t at, bytes;
    } parts[] = {
        {"the words at the beginning", 0, (int64_t)sizeof(*segment)},
        {"counts", d->counts_at + me * (d->n_local + 1) * 8, (d->n_local + 1) * 8},
        {"counts of odd dispatches", d->counts_at + (n + me) * (d->n_local + 1) * 8, (d->n_local + 1) * 8},
        {"flags of rows", d->row_flag_at, choices * LL_WIRE_MAX_PARTS * 8},
        {"flags of slots", d->slot_flag_at + me * tokens * 8, tokens * 8},
        {"weights", d->weight_at + me * choices * 8, choices * 8},
        {"slots", d->slots_at + me * tokens * d->slot_bytes, tokens * d->slot_bytes},
        {"rows", d->rows_at, choices * d->hidden * 2},
    };

    EXPECT(segment, "a rank of another node has no segment");
    /* Ranges of one segment may be adjacent, so single bytes are checked. */
    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++)
        for (int64_t at = 0; at < parts[i].bytes; at += 1000)
            EXPECT(no_device_has(base + parts[i].at + at, 1) &&
                       no_device_has(base + parts[i].at + parts[i].bytes - 1, 1),
                   "%s: byte %lld of %lld is not pinned", parts[i].name, (long long)at, (long long)parts[i].bytes);
    return 0;
}

/* The parts of a segment must not overlap, and must be inside it. */
static int check_layout(const struct made *m, size_t bytes)
{
    const struct cuda_ll *d = &m->device;
    int64_t n = m->comm.nranks, tokens = d->segment_tokens, choices = tokens * d->segment_topk;
    const int64_t parts[][2] = {
        {0, (int64_t)sizeof(struct cuda_ll_segment)},
        {d->counts_at, 2 * n * (d->n_local + 1) * 8},
        {d->row_flag_at, choices * LL_WIRE_MAX_PARTS * 8},
        {d->slot_flag_at, n * tokens * 8},
        {d->weight_at, n * choices * 8},
        {d->slots_at, n * tokens * d->slot_bytes},
        {d->rows_at, choices * d->hidden * 2},
        {d->index_at, 2 * choices * 4},
        {d->origin_at, 2 * n * choices * 4},
        {(int64_t)bytes, 0},
    };

    for (size_t i = 0; i + 1 < sizeof(parts) / sizeof(parts[0]); i++)
        EXPECT(parts[i][0] + parts[i][1] <= parts[i + 1][0],
               "part %zu of the segment, at %lld with %lld bytes, overlaps", i, (long long)parts[i][0],
               (long long)parts[i][1]);
    return 0;
}

/* What a rank that is absent from now on has, a rank that comes has again. */
static int check_absent(struct made *m, struct cuda_ll_net *net, int rank)
{
    struct cuda_ll_segment *segments[CUDA_LL_MAX_RANKS] = {NULL};
    unsigned char *bytes = (unsigned char *)m->segments[rank];

    bytes[0] = bytes[sizeof(struct cuda_ll_segment) - 1] = 1;
    cuda_ll_nets_leave(&m->cuda);
    EXPECT(!bytes[0] && !bytes[sizeof(struct cuda_ll_segment) - 1], "what was written for former members is left");
    m->comm.members[rank / 64] &= ~(UINT64_C(1) << rank % 64);
    cuda_ll_net_get_segments(net, segments);
    EXPECT(!segments[rank], "rank %d is absent, and has a segment", rank);
    m->comm.members[rank / 64] |= UINT64_C(1) << rank % 64;
    cuda_ll_net_get_segments(net, segments);
    EXPECT(segments[rank] == m->segments[rank], "the segment for rank %d has moved", rank);
    return 0;
}

static int check_pinned(const struct shape *shape, int rank, struct made *m)
{
    struct cuda_ll_net *net = NULL;
    size_t bytes, before = no_device_registered, expected;
    int code = 0;

    make(shape, rank, m);
    bytes = cuda_ll_lay_out(&m->ll, &m->device, &m->wire);
    TRY(check_layout(m, bytes));
    expected = cuda_ll_net_bytes(&m->ll, &m->device, bytes) - (size_t)(shape->ranks - 1) * RING_BYTES;
    CALL(cuda_ll_net_prepare(&m->ll, &m->device, &m->wire, bytes, &m->report, &net));
    cuda_ll_net_get_segments(net, m->segments);
    for (int other = 0; other < shape->ranks && !code; other++) {
        if (other / shape->per_node != rank / shape->per_node)
            code = check_segment(m, m->segments[other]) || (shape->ranks < 5 && check_absent(m, net, other));
        else if (m->segments[other])
            code = FAILED;
    }
    cuda_ll_net_close(net);
    EXPECT(code || no_device_registered - before == expected, "%zu bytes were pinned, and %zu announced",
           no_device_registered - before, expected);
    return code;
}

/* The example in lowlatency.h, and sizes that are refused. */
static int check_sizes(struct made *m)
{
    static const struct {
        int ranks;
        double gib;
    } documented[] = {{64, 1.2}, {320, 6.3}, {512, 10.2}};
    int64_t bytes, combine;

    for (size_t i = 0; i < sizeof(documented) / sizeof(documented[0]); i++) {
        make(&(struct shape){documented[i].ranks, 8, 128, 7168, 1, 8}, 9, m);
        bytes = cuda_ll_bytes(&m->comm, &m->ll.config, &combine);
        printf("ll_pinned_cuda: %d ranks: %.2f GiB\n", documented[i].ranks, (double)bytes / (1 << 30));
        EXPECT((double)bytes / (1 << 30) < documented[i].gib + 0.05 &&
                   (double)bytes / (1 << 30) > documented[i].gib - 0.05,
               "%d ranks: %.2f GiB, but the header says %.1f", documented[i].ranks, (double)bytes / (1 << 30),
               documented[i].gib);
    }
    make(&(struct shape){CUDA_LL_MAX_RANKS + 1, 27, 8, 128, 1, 2}, 0, m);
    EXPECT(cuda_ll_bytes(&m->comm, &m->ll.config, &combine) == -1 &&
               strstr(ep_last_error(),
                      "ep_ll_get_sizes: the CUDA backend supports low latency on up to 512 ranks, not 513"),
           "513 ranks: %s", ep_last_error());
    return 0;
}

int main(void)
{
    struct made *m = calloc(1, sizeof(*m));
    int code = m ? check_sizes(m) : FAILED;

    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]) && !code; i++) {
        test_set_context("%d ranks, %d on a node", shapes[i].ranks, shapes[i].per_node);
        code = check_pinned(&shapes[i], 0, m);
        code = code ? code : check_pinned(&shapes[i], shapes[i].ranks / 2, m);
        code = code ? code : check_pinned(&shapes[i], shapes[i].ranks - 1, m);
    }
    free(m);
    printf("ll_pinned_cuda: %s\n", code ? "FAILED" : "passed");
    return code;
}
