/* SPDX-License-Identifier: Apache-2.0 */
#include "regroup.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

enum { NAP_US = 200 };

unsigned regroup_failed(const ep_comm *comm, unsigned members)
{
    int32_t failed[EP_MAX_RANKS] = {0};
    unsigned gone = 0;
    int n = 0;

    if (ep_comm_get_failed(comm, failed) != EP_OK)
        return 0;
    for (int rank = 0; rank < REGROUP_RANKS; rank++)
        if (members >> rank & 1) {
            ep_status status = (ep_status)failed[n++];

            gone |= status == EP_E_PEER_DEAD || status == EP_E_PEER_LEFT || status == EP_E_TIMEOUT ? 1u << rank : 0;
        }
    return gone;
}

unsigned regroup_agree(struct regroup *shared, int number, unsigned wanted)
{
    unsigned decided = 0, mine = wanted & ~atomic_load(&shared->ended);

    return atomic_compare_exchange_strong(&shared->groups[number].members, &decided, mine) ? mine : decided;
}

/* The first failure is that of all: it is not known which all-gather the others are in. */
static ep_status fail(struct regroup_group *group, ep_status status, int rank)
{
    uint64_t first = 0, failure = (uint64_t)status << 32 | (unsigned)rank;
    char text[64];

    if (!atomic_compare_exchange_strong(&group->failure, &first, failure))
        failure = first;
    status = (ep_status)(failure >> 32);
    snprintf(text, sizeof(text), "rank %d %s", (int)(uint32_t)failure,
             status == EP_E_TIMEOUT ? "did not arrive" : "has ended");
    ep_set_last_error(text);
    return status;
}

static uint64_t now_ms(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000u + (uint64_t)now.tv_nsec / 1000000u;
}

/* Waits until that rank has begun this round. `number`: of the rank in the group. */
static ep_status await(const struct regroup_boot *own, int rank, int number, uint64_t end_ms)
{
    struct regroup_group *group = own->group;

    while (atomic_load(&group->rounds[rank]) < own->rounds) {
        if (atomic_load(&group->failure))
            return fail(group, EP_E_STATE, number);
        /* It may have begun just before it ended. */
        if (atomic_load(&own->shared->ended) >> rank & 1 && atomic_load(&group->rounds[rank]) < own->rounds)
            return fail(group, EP_E_PEER_DEAD, number);
        if (now_ms() >= end_ms)
            return fail(group, EP_E_TIMEOUT, number);
        nanosleep(&(struct timespec){.tv_nsec = NAP_US * 1000}, NULL);
    }
    return EP_OK;
}

/* A rank that is two rounds ahead has seen that all have read the blocks that it overwrites. */
static ep_status allgather(void *context, const void *mine, size_t bytes, int timeout_ms, void *ret_all)
{
    struct regroup_boot *own = context;
    unsigned char(*blocks)[REGROUP_BYTES] = own->group->blocks[own->rounds % 2];
    uint64_t end_ms = now_ms() + (uint64_t)timeout_ms;
    int number = 0;

    if (bytes > REGROUP_BYTES)
        return EP_E_CAPACITY;
    memcpy(blocks[own->rank], mine, bytes);
    atomic_store(&own->group->rounds[own->rank], ++own->rounds);
    for (int rank = 0; rank < REGROUP_RANKS; rank++) {
        if (!(own->members >> rank & 1))
            continue;
        ep_status status = await(own, rank, number, end_ms);

        if (status != EP_OK)
            return status;
        memcpy((unsigned char *)ret_all + (size_t)number++ * bytes, blocks[rank], bytes);
    }
    return EP_OK;
}

static int gcd(int a, int b)
{
    return b ? gcd(b, a % b) : a;
}

void regroup_boot(struct regroup *shared, int number, int rank, int per_node, struct regroup_boot *boot)
{
    unsigned members = atomic_load(&shared->groups[number].members);
    int of_nodes = 0;

    for (int first = 0; first < REGROUP_RANKS; first += per_node)
        of_nodes = gcd(of_nodes, __builtin_popcount(members >> first & ((1u << per_node) - 1)));
    *boot = (struct regroup_boot){
        .boot = EP_BOOT_INIT, .shared = shared, .group = &shared->groups[number], .members = members, .rank = rank};
    boot->boot.rank = __builtin_popcount(members & ((1u << rank) - 1));
    boot->boot.nranks = __builtin_popcount(members);
    boot->boot.allgather = allgather;
    boot->boot.context = boot;
    boot->boot.ranks_per_node = of_nodes;
}
