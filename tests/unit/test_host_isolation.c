/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Over a network of sockets a rank maps no memory of a rank of another node: after each kind of operation the shared
 * mappings of ranks of different nodes have no file in common, and their tables hold no peer of another node. Ranks of
 * one node do share memory, and over the network "emulated" ranks of different nodes, too: the check sees both.
 */
#include "backend/host/host.h"

#include "ranks.h"

enum { RANKS = 4, NODE = 2, TOKENS = 16, HIDDEN = 512, TOPK = 2, EXPERTS = 8, LOCAL = EXPERTS / RANKS };
enum { ROWS = LOCAL * RANKS * TOKENS, FILES = 120, TIMEOUT_MS = 60000 };

struct files {
    int n;
    uint64_t inode[FILES];
};

struct scenario {
    const char *network;
    struct files files[RANKS]; /* mapped by each rank since it started */
    int mapped_peers[RANKS];   /* of other nodes */
    char complaint[RANKS][EP_ERROR_TEXT_BYTES];
};

static bool has(const struct files *files, uint64_t inode)
{
    for (int i = 0; i < files->n; i++)
        if (files->inode[i] == inode)
            return true;
    return false;
}

/* The files of all mappings that can be shared with another process, but those of `except`. */
static bool list_files(const struct files *except, struct files *ret_files)
{
    FILE *maps = fopen("/proc/self/maps", "re");
    char line[512], permissions[8];
    unsigned long inode;

    ret_files->n = 0;
    while (maps && fgets(line, sizeof(line), maps)) {
        if (sscanf(line, "%*s %7s %*s %*s %lu", permissions, &inode) != 2 || permissions[3] != 's' ||
            has(ret_files, inode) || (except && has(except, inode)))
            continue;
        if (ret_files->n == FILES)
            break;
        ret_files->inode[ret_files->n++] = inode;
    }
    if (maps)
        fclose(maps);
    return maps && ret_files->n < FILES;
}

static ep_status use_plan(ep_comm *comm, const int32_t *index, const uint16_t *x, uint16_t *out)
{
    ep_plan_args routing = args_plan(index, EP_I32, TOKENS, TOPK, EXPERTS);
    ep_dispatch_args dispatch;
    ep_combine_args combine;
    ep_plan_info info = EP_PLAN_INFO_INIT;
    void *rows;
    ep_plan *plan;

    EP_TRY(ep_plan_new(comm, &routing, &plan));
    EP_TRY(ep_plan_get_info(plan, &info));
    EP_TRY(ep_alloc(comm, (size_t)(info.out_rows + 1) * HIDDEN * 2, &rows));
    dispatch = args_dispatch(EP_BF16, HIDDEN, x, rows, info.out_rows);
    combine = args_combine(HIDDEN, rows, out);
    EP_TRY(ep_dispatch_sync(plan, &dispatch));
    EP_TRY(ep_combine_sync(plan, &combine));
    ep_plan_free(plan);
    return EP_OK; /* what was allocated stays mapped */
}

/* *ret_ll stays, so that its memory is mapped. */
static ep_status use_low_latency(ep_comm *comm, const int32_t *index, const uint16_t *x, uint16_t *out, ep_ll **ret_ll)
{
    static uint16_t rows[ROWS * HIDDEN];
    float weights[TOKENS * TOPK];
    int32_t count[LOCAL];
    ep_ll_config config;
    ep_ll_dispatch_args dispatch;
    ep_ll_combine_args combine;

    for (int i = 0; i < TOKENS * TOPK; i++)
        weights[i] = 1;
    config = args_ll(TOKENS, HIDDEN, EXPERTS, TOPK);
    EP_TRY(ep_ll_new(comm, &config, ret_ll));
    dispatch = args_ll_dispatch(x, index, EP_I32, TOKENS);
    combine = args_ll_combine(rows, index, EP_I32, TOKENS, weights, out);
    dispatch.out_dtype = EP_BF16;
    dispatch.recv_x = rows;
    dispatch.recv_count = count;
    EP_TRY(ep_ll_dispatch_sync(*ret_ll, &dispatch));
    return ep_ll_combine_sync(*ret_ll, &combine);
}

static int count_mapped_peers(const ep_comm *comm)
{
    const struct ep_group *group = ep_group_of(comm);
    int n = 0;

    for (int rank = 0; rank < RANKS; rank++)
        n += rank / NODE != comm->rank / NODE && group->peers[rank].control != NULL;
    return n;
}

static ep_status use_all(ep_comm *comm, const struct files *before, struct scenario *scenario)
{
    static uint16_t x[TOKENS * HIDDEN], out[TOKENS * HIDDEN];
    int32_t index[TOKENS * TOPK];
    ep_ll *ll = NULL;
    ep_status status;

    for (int i = 0; i < TOKENS * TOPK; i++)
        index[i] = (comm->rank + i) % EXPERTS; /* on all ranks */
    status = use_plan(comm, index, x, out);
    if (status == EP_OK)
        status = use_low_latency(comm, index, x, out, &ll);
    scenario->mapped_peers[comm->rank] = count_mapped_peers(comm);
    if (status == EP_OK && !list_files(before, &scenario->files[comm->rank]))
        status = ep_fail(EP_E_SYSTEM, "the mappings of the process cannot be read");
    if (status == EP_OK)
        status = ep_comm_barrier(comm); /* no rank unmaps before the others have listed theirs */
    ep_ll_free(ll);
    return status;
}

static int live(const ep_boot *boot, void *shared)
{
    struct scenario *scenario = shared;
    struct files before; /* the rendezvous of forked ranks and the scenario, mapped by all of them */
    ep_comm *comm = NULL;
    ep_status status = list_files(NULL, &before) ? EP_OK : ep_fail(EP_E_SYSTEM, "no list of mappings");

    if (status == EP_OK)
        status = unit_comm_new(boot, scenario->network, NODE, TIMEOUT_MS, &comm);
    if (status == EP_OK)
        status = use_all(comm, &before, scenario);
    if (status != EP_OK)
        snprintf(scenario->complaint[boot->rank], EP_ERROR_TEXT_BYTES, "%s", ep_last_error());
    ep_comm_free(comm);
    return status != EP_OK;
}

static int count_common(const struct files *a, const struct files *b)
{
    int n = 0;

    for (int i = 0; i < a->n; i++)
        n += has(b, a->inode[i]);
    return n;
}

/* *ret_within, *ret_between: the least files that two ranks of a node share, and the most that ranks of two nodes do.
 */
static void run(const char *network, int *ret_within, int *ret_between, int *ret_mapped_peers)
{
    const struct scenario start = {.network = network};
    struct scenario *scenario = unit_share(&start, sizeof(start));
    ep_rank_exit exits[RANKS];

    *ret_within = FILES;
    *ret_between = *ret_mapped_peers = 0;
    assert_int_equal(unit_fork_ranks(RANKS, live, scenario, RANKS_PATIENT_MS, exits), EP_OK);
    for (int a = 0; a < RANKS; a++) {
        if (exits[a].code || exits[a].signal)
            print_error("rank %d: %s\n", a, scenario->complaint[a]);
        assert_int_equal(exits[a].code, 0);
        *ret_mapped_peers += scenario->mapped_peers[a];
        for (int b = 0; b < a; b++) {
            int common = count_common(&scenario->files[a], &scenario->files[b]);

            if (a / NODE == b / NODE)
                *ret_within = common < *ret_within ? common : *ret_within;
            else
                *ret_between = common > *ret_between ? common : *ret_between;
        }
    }
    munmap(scenario, sizeof(*scenario));
}

TEST(test_sockets_share_no_memory_between_nodes)
{
    int within, between, mapped_peers;

    run("tcp", &within, &between, &mapped_peers);
    print_message("    tcp: two ranks of a node share %d files or more, of two nodes %d\n", within, between);
    assert_true(within > 0);
    assert_int_equal(between, 0);
    assert_int_equal(mapped_peers, 0);
}

TEST(test_the_check_sees_memory_that_nodes_share)
{
    int within, between, mapped_peers;

    run("emulated", &within, &between, &mapped_peers);
    print_message("    emulated: two ranks of a node share %d files or more, of two nodes %d\n", within, between);
    assert_true(within > 0);
    assert_true(between > 0);
    assert_true(mapped_peers > 0);
}
