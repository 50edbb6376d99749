/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Low latency between nodes: its sending halves need no call of the receivers, masks that are taken back, sizes. Its
 * bits over every network are compared with the reference in tests/property/sequence_host. Ranks are threads.
 */
#include "ranks.h"

#include "backend/host/host.h"
#include "group/peers.h"
#include "group/wait.h"
#include "net/emulation.h"

#include <fcntl.h>
#include <sys/stat.h>

enum { RANKS = 4, TOKENS = 24, HIDDEN = 512, EXPERTS = 8, LOCAL = EXPERTS / RANKS, TOPK = 4, ROWS = RANKS * TOKENS };

static const ep_net_emulation bad_network = {
    .seed = 5, .delay_us = 300, .ring_bytes = 512, .split_bytes = 200, .reorder = 1};

static const struct shape {
    const char *network;
    int ranks_per_node;
    const ep_net_emulation *emulation;
} shapes[] = {
    {NULL, RANKS, NULL}, {"emulated", 2, &bad_network}, {"emulated", 1, NULL}, {"tcp", 2, NULL}, {"tcp", 1, NULL},
};
enum { SHAPES = sizeof(shapes) / sizeof(shapes[0]) };

struct scenario {
    const struct shape *shape;
    char complaint[RANKS][EP_ERROR_TEXT_BYTES];
};

static uint32_t draw(uint32_t *state)
{
    return *state = *state * 1664525u + 1013904223u;
}

static ep_status new_comm(const ep_boot *boot, const struct shape *shape, ep_comm **ret_comm)
{
    ep_net_emulate(shape->emulation);
    return unit_comm_new(boot, shape->network, shape->ranks_per_node, 60000, ret_comm);
}

static ep_status clear_one_by_one(ep_ll *ll, int me)
{
    for (int rank = 0; rank < RANKS; rank++)
        if (rank != me)
            EP_TRY(ep_ll_set_mask(ll, rank, 0, NULL));
    return EP_OK;
}

static ep_status new_ll(ep_comm *comm, int max_tokens, uint32_t flags, ep_ll **ret_ll)
{
    ep_ll_config config = args_ll(max_tokens, HIDDEN, EXPERTS, TOPK);

    config.flags = flags;
    return ep_ll_new(comm, &config, ret_ll);
}

/*
 * A dispatch in two halves and its combines, which exclude some choices; some tokens have fewer experts. Each expert
 * returns 1. `topk` 0: that of the ep_ll; `whole`: no rank is masked.
 */
static ep_status use(ep_ll *ll, int rank, int topk, bool whole)
{
    static _Thread_local alignas(16) uint16_t x[TOKENS * HIDDEN], rows[LOCAL * ROWS * HIDDEN], out[TOKENS * HIDDEN];
    int32_t index[TOKENS * TOPK], given[TOKENS * TOPK], count[LOCAL];
    int width = topk ? topk : TOPK;
    float weights[TOKENS * TOPK];
    ep_ll_dispatch_args dispatch;
    ep_ll_combine_args combine;
    uint32_t state = 9u + (uint32_t)rank;

    for (int i = 0; i < TOKENS * TOPK; i++) {
        index[i] = (draw(&state) >> 16) % 8 ? (i * 3 + rank) % EXPERTS : -1;
        given[i] = (draw(&state) >> 16) % 8 ? index[i] : -1;
        weights[i] = 1;
    }
    for (int i = 0; i < TOKENS * HIDDEN; i++)
        x[i] = 0x3f80;
    dispatch = args_ll_dispatch(x, index, EP_I32, TOKENS - rank);
    dispatch.topk = topk;
    dispatch.out_dtype = EP_BF16;
    dispatch.recv_x = rows;
    dispatch.recv_count = count;
    dispatch.flags = EP_LL_RECV_HOOK;
    EP_TRY(ep_ll_dispatch_sync(ll, &dispatch));
    EP_TRY(ep_ll_finish_sync(ll, 0));
    combine = args_ll_combine(rows, given, EP_I32, TOKENS - rank, weights, out);
    combine.topk = topk;
    for (int once = 0; once < 2; once++) {
        combine.flags = once ? EP_LL_NO_PARTIAL_REDUCE : 0;
        EP_TRY(ep_ll_combine_sync(ll, &combine));
        for (int t = 0; whole && t < TOKENS - rank; t++) {
            int n = 0;

            for (int k = 0; k < width; k++)
                n += given[t * width + k] >= 0;
            if (ep_bf16_to_f32(out[t * HIDDEN]) != (float)n)
                return ep_fail(EP_E_VALUE, "token %d is not the sum of %d rows", t, n);
        }
    }
    return ep_ll_barrier(ll, NULL);
}

/* A program that a rank starts inherits nothing: an inherited socket would hide the death of the rank. */
static ep_status check_inheritance(void)
{
    for (int fd = 3; fd < 1024; fd++) {
        int flags = fcntl(fd, F_GETFD);
        struct stat what;

        if (flags >= 0 && !(flags & FD_CLOEXEC) && fstat(fd, &what) == 0 && S_ISSOCK(what.st_mode))
            return ep_fail(EP_E_STATE, "a socket, descriptor %d, is inherited", fd);
    }
    return EP_OK;
}

static void run_ranks(ep_rank_fn run, int nranks, struct scenario *scenario)
{
    ep_launch_args launch = {.mode = EP_LAUNCH_THREADS, .nranks = nranks, .run = run, .argument = scenario};
    ep_rank_exit exits[RANKS];

    assert_int_equal(ep_launch(&launch, exits), EP_OK);
    for (int rank = 0; rank < nranks; rank++)
        if (exits[rank].code)
            fail_msg("network %s, %d ranks a node, rank %d: %s", scenario->shape->network,
                     scenario->shape->ranks_per_node, rank, scenario->complaint[rank]);
}

/* --- a sending half ------------------------------------------------------------------------------------------------
 */

/* More than the socket buffers hold: the rest is sent while the sender is in no call. */
enum { MANY = 12288 };

static _Atomic int sent, received;

static ep_status send_much(ep_comm *comm, int rank)
{
    size_t rows = 2 * MANY * (EXPERTS / 2);
    uint16_t *x = aligned_alloc(64, (size_t)MANY * HIDDEN * 2), *recv = aligned_alloc(64, rows * HIDDEN * 2);
    int32_t *index = malloc((size_t)MANY * TOPK * sizeof(*index)), count[EXPERTS / 2];
    ep_ll_dispatch_args args;
    ep_ll *ll = NULL;
    ep_status status = x && recv && index ? new_ll(comm, MANY, 0, &ll) : ep_fail(EP_E_MEMORY, "no memory");

    if (status != EP_OK)
        goto done;
    memset(x, 0x3f, (size_t)MANY * HIDDEN * 2);
    for (int i = 0; i < MANY * TOPK; i++)
        index[i] = i % TOPK ? -1 : EXPERTS - 1; /* all of it to rank 1 */
    args = args_ll_dispatch(x, index, EP_I32, rank == 0 ? MANY : 0);
    args.out_dtype = EP_BF16;
    args.recv_x = recv;
    args.recv_count = count;
    args.flags = EP_LL_RECV_HOOK;
    if (rank == 0) {
        /* Returns although rank 1 is in no call, and rank 1 needs no further call of this rank to receive it all. */
        status = ep_ll_dispatch_sync(ll, &args);
        atomic_store(&sent, 1);
        while (!atomic_load(&received))
            unit_sleep_ms(1);
    } else {
        while (!atomic_load(&sent))
            unit_sleep_ms(1);
        status = ep_ll_dispatch_sync(ll, &args);
    }
    if (status == EP_OK)
        status = ep_ll_finish_sync(ll, 0);
    if (rank == 1)
        atomic_store(&received, 1);
    if (status == EP_OK && rank == 1 && (count[EXPERTS / 2 - 1] != MANY || recv[(rows - 1 - MANY) * HIDDEN] != 0x3f3f))
        status = ep_fail(EP_E_VALUE, "%d rows", count[EXPERTS / 2 - 1]);
done:
    ep_ll_free(ll);
    free(x);
    free(recv);
    free(index);
    return status;
}

static int run_send(const ep_boot *boot, void *argument)
{
    struct scenario *scenario = argument;
    ep_comm *comm = NULL;
    ep_status status = new_comm(boot, scenario->shape, &comm);

    if (status == EP_OK)
        status = send_much(comm, boot->rank);
    if (status != EP_OK)
        snprintf(scenario->complaint[boot->rank], sizeof(scenario->complaint[0]), "%s", ep_last_error());
    atomic_store(&sent, 1);
    atomic_store(&received, 1);
    ep_comm_free(comm);
    return status != EP_OK;
}

TEST(a_sending_half_needs_no_call_of_its_receiver)
{
    static const struct shape over_tcp = {"tcp", 1, NULL}, over_emulated = {"emulated", 1, NULL};
    struct scenario scenario = {.shape = &over_tcp};

    for (int i = 0; i < 2; i++) {
        atomic_store(&sent, 0);
        atomic_store(&received, 0);
        run_ranks(run_send, 2, &scenario);
        scenario.shape = &over_emulated;
    }
}

static int run_sizes(const ep_boot *boot, void *argument)
{
    int64_t bytes[2];

    for (int i = 0; i < 2; i++) {
        const struct shape *shape = &((const struct shape *)argument)[i];
        ep_ll_config config = {
            .size = sizeof(config), .max_tokens = TOKENS, .hidden = HIDDEN, .n_experts = EXPERTS, .topk = TOPK};
        ep_ll_sizes sizes = EP_LL_SIZES_INIT;
        ep_comm_info before = EP_COMM_INFO_INIT, after = EP_COMM_INFO_INIT;
        ep_comm *comm = NULL;
        ep_ll *ll = NULL;

        if (new_comm(boot, shape, &comm) != EP_OK || ep_ll_get_sizes(comm, &config, &sizes) != EP_OK ||
            ep_comm_get_info(comm, &before) != EP_OK || ep_ll_new(comm, &config, &ll) != EP_OK ||
            ep_comm_get_info(comm, &after) != EP_OK)
            return 1;
        bytes[i] = sizes.library_bytes;
        if (after.library_bytes - before.library_bytes != (size_t)bytes[i]) {
            fprintf(stderr, "ep_ll_new took %zu bytes, ep_ll_get_sizes says %lld\n",
                    after.library_bytes - before.library_bytes, (long long)bytes[i]);
            return 1;
        }
        ep_ll_free(ll);
        ep_comm_free(comm);
    }
    /* Two calls, rows of two ranks for the most experts that a token has on one rank. */
    return bytes[1] - bytes[0] < INT64_C(2) * 2 * TOKENS * LOCAL * HIDDEN * 2;
}

/* A rank of another node and some of this one mask each other, call, unmask, and call again. */
static int run_masks(const ep_boot *boot, void *argument)
{
    ep_comm *comm = NULL;
    ep_ll *ll = NULL;
    ep_status status = new_comm(boot, argument, &comm);
    int at = 0;

    if (status == EP_OK)
        status = new_ll(comm, TOKENS, EP_LL_MASK_DEAD, &ll);
    if (status == EP_OK)
        status = check_inheritance();
    for (int round = 0; round < 20 && status == EP_OK; round++) {
        at = round;
        for (int rank = 0; rank < RANKS && status == EP_OK; rank++)
            if (round % 2 == 0 && (rank == RANKS - 1) != (boot->rank == RANKS - 1))
                status = ep_ll_set_mask(ll, rank, 1, NULL);
        if (round % 2 && status == EP_OK)
            status = round % 4 == 1 ? ep_ll_clear_mask(ll, NULL) : clear_one_by_one(ll, boot->rank);
        if (status == EP_OK)
            status = ep_stream_sync(comm, NULL);
        if (status == EP_OK)
            status = ep_comm_barrier(comm);
        if (status == EP_OK)
            status = use(ll, boot->rank, round % 3 ? 0 : TOPK - 1, round % 2);
        /* No rank is masked while it is still in a call. */
        if (status == EP_OK)
            status = ep_stream_sync(comm, NULL);
        if (status == EP_OK)
            status = ep_comm_barrier(comm);
    }
    if (status != EP_OK)
        fprintf(stderr, "rank %d, round %d, %s of %d: %s: %s\n", boot->rank, at,
                ((const struct shape *)argument)->network, ((const struct shape *)argument)->ranks_per_node,
                ep_status_name(status), ep_last_error());
    ep_ll_free(ll);
    ep_comm_free(comm);
    return status != EP_OK;
}

TEST(masks_that_are_taken_back_hold_nobody_off)
{
    for (int i = 1; i < SHAPES; i++)
        unit_run_threads(RANKS, run_masks, (void *)&shapes[i]);
}

/* Slots of ranks of other nodes are in another region than those of the node; rows of combines are additional. */
TEST(sizes_include_the_memory_between_nodes)
{
    static const struct shape sizes[] = {{NULL, RANKS, NULL}, {"emulated", 2, NULL}};

    unit_run_threads(RANKS, run_sizes, (void *)sizes);
}
