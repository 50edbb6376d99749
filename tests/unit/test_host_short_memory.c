/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A group that runs out of memory: in a memory cgroup, and where the kernel does not overcommit (vm.overcommit_memory =
 * 2; on a separate machine, see tests/verbs/short_memory.sh). Each call returns a status, on all ranks if it is
 * collective, and memory that it returns can be touched: no rank is killed by a signal.
 */
#include "cgroup.h"
#include "sandbox.h"
#include "tests/local_ranks.h"
#include "unit.h"

#include <epkit/epkit.h>

#define MIB ((size_t)1 << 20)

enum { NRANKS = 4, PIECES = 512 };

/* Exits the rank with the number of the failing line. */
#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "rank %d: line %d: %s: %s\n", rank, __LINE__, #condition, ep_last_error());                \
            return 1;                                                                                                  \
        }                                                                                                              \
    } while (0)

struct shape {
    const char *network; /* NULL: one node */
    const char *limit;   /* expected in the error text */
};

/* Allocates all available memory, concurrently with the other ranks, and returns a little for other uses. */
static int take_all(ep_comm *comm, const char *limit, void **pieces, int *ret_n)
{
    int rank = -1, n = 0;
    ep_comm_info info = EP_COMM_INFO_INIT;
    ep_status status = EP_OK;

    if (ep_comm_get_info(comm, &info) == EP_OK)
        rank = info.rank;
    while (n < PIECES && (status = ep_alloc(comm, 2 * MIB, &pieces[n])) == EP_OK)
        memset(pieces[n++], rank + 1, 2 * MIB);
    CHECK(status == EP_E_MEMORY);
    CHECK(strstr(ep_last_error(), limit));
    /* All ranks have what they could get: late ones have little. */
    CHECK(ep_comm_barrier(comm) == EP_OK);
    for (int i = 0; i < 2 && n > 0; i++)
        CHECK(ep_free(comm, pieces[--n]) == EP_OK);
    CHECK(ep_comm_barrier(comm) == EP_OK);
    *ret_n = n;
    return 0;
}

static ep_status make_ll(ep_comm *comm, int max_tokens, ep_ll **ret_ll)
{
    ep_ll_config config = {
        .size = sizeof(config), .max_tokens = max_tokens, .hidden = 7168, .n_experts = NRANKS, .topk = 1};

    return ep_ll_new(comm, &config, ret_ll);
}

static int run_short(const ep_boot *boot, void *argument)
{
    const struct shape *shape = argument;
    ep_comm_config config = {.size = sizeof(config), .device = -1, .backend = "host"};
    void *pieces[PIECES], *memory = NULL;
    ep_comm *comm = NULL, *other = NULL;
    int rank = boot->rank, n = 0;
    ep_status status;
    ep_ll *ll = NULL;

    config.timeout_ms = 90000; /* no rank may be late: each gets its status */
    if (shape->network) {
        config.network = shape->network;
        config.ranks_per_node = NRANKS / 2;
    }
    CHECK(ep_comm_new(boot, &config, &comm) == EP_OK);
    if (take_all(comm, shape->limit, pieces, &n) != 0)
        return 1;
    /* Segments of low latency need more than is left: they fail on all ranks, or, if sparse, on none. */
    status = make_ll(comm, 2048, &ll);
    CHECK(status == EP_OK || status == EP_E_MEMORY);
    ep_ll_free(ll);
    /* An allocation that cannot succeed fails before it takes memory from the others. */
    CHECK(ep_alloc(comm, (size_t)1 << 40, &memory) == EP_E_MEMORY);
    /* A second group: it is created on all ranks, or on none. */
    status = ep_comm_new(boot, &config, &other);
    CHECK(status == EP_OK || status == EP_E_MEMORY);
    ep_comm_free(other);
    CHECK(ep_comm_barrier(comm) == EP_OK);
    while (n > 0)
        CHECK(ep_free(comm, pieces[--n]) == EP_OK);
    CHECK(ep_comm_barrier(comm) == EP_OK);
    /* All of it can be allocated again. */
    CHECK(make_ll(comm, 16, &ll) == EP_OK);
    ep_ll_free(ll);
    CHECK(ep_alloc(comm, 4 * MIB, &memory) == EP_OK);
    memset(memory, 1, 4 * MIB);
    CHECK(ep_comm_barrier(comm) == EP_OK);
    ep_comm_free(comm);
    return 0;
}

static int launch(const struct shape *shape)
{
    ep_launch_args args = {.nranks = NRANKS, .run = run_short, .argument = (void *)shape};
    ep_rank_exit exits[NRANKS];
    ep_status status;
    int wrong = 0;

    status = ep_launch(&args, exits);
    if (status != EP_OK && status != EP_E_PEER_DEAD) {
        fprintf(stderr, "ep_launch: %s\n", ep_last_error());
        return 1;
    }
    for (int rank = 0; rank < NRANKS; rank++) {
        if (exits[rank].signal)
            fprintf(stderr, "rank %d ended by signal %d\n", rank, exits[rank].signal);
        wrong |= exits[rank].signal || exits[rank].code;
    }
    return wrong;
}

static const char *const networks[] = {NULL, "emulated", "tcp"};

/* --- a memory cgroup --- */

static struct cgroup cgroup;

static int run_in_cgroup(void *argument)
{
    return cgroup_join(&cgroup) ? launch(argument) : SANDBOX_SKIP;
}

TEST(a_group_in_a_small_cgroup_gets_statuses)
{
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
    print_message("SKIP: the shadow memory of sanitizers counts against the limit, too\n");
    skip();
#endif
    for (size_t i = 0; i < sizeof(networks) / sizeof(networks[0]); i++) {
        struct shape shape = {.network = networks[i]};
        int result;

        if (!cgroup_make(&cgroup, 128 * MIB)) {
            print_message("SKIP: no memory cgroup can be made here\n");
            skip();
        }
        shape.limit = cgroup.limit_file;
        result = sandbox_run(run_in_cgroup, &shape);
        cgroup_remove(&cgroup);
        assert_int_equal(result, 0);
    }
}

/* --- no overcommit --- */

static bool commits_strictly(void)
{
    FILE *file = fopen("/proc/sys/vm/overcommit_memory", "r");
    int policy = 0;

    if (file) {
        if (fscanf(file, "%d", &policy) != 1)
            policy = 0;
        fclose(file);
    }
    return policy == 2;
}

TEST(a_group_without_overcommit_gets_statuses)
{
    if (!commits_strictly()) {
        print_message("SKIP: vm.overcommit_memory is not 2 here\n");
        skip();
    }
    for (size_t i = 0; i < sizeof(networks) / sizeof(networks[0]); i++)
        assert_int_equal(launch(&(struct shape){.network = networks[i], .limit = ""}), 0);
}
