/* SPDX-License-Identifier: Apache-2.0 */
/* Symmetric memory: allocations of a rank and the view of its peer. Two ranks, used by one thread in turn. */
#include "group/memory.h"
#include "host_ranks.h"
#include "unit.h"

static int set_up(void **state)
{
    static ep_comm *comms[2];

    *state = comms;
    return host_ranks_new(2, comms) ? 0 : -1;
}

static int tear_down(void **state)
{
    host_ranks_free(2, *state);
    return 0;
}

TEST_WITH(peers_see_what_is_written, set_up, tear_down)
{
    ep_comm **comms = *state;
    struct ep_group_address where;
    void *memory, *seen;

    assert_int_equal(ep_alloc(comms[0], 10000, &memory), EP_OK);
    assert_int_equal((uintptr_t)memory % 4096, 0);
    strcpy((char *)memory + 4992, "here");
    assert_true(ep_group_find(ep_group_of(comms[0]), (char *)memory + 4992, 5000, &where));
    assert_int_equal(ep_group_map(ep_group_of(comms[1]), 0, &where, 1, &seen), EP_OK);
    assert_string_equal(seen, "here");
    strcpy(seen, "back");
    assert_string_equal((char *)memory + 4992, "back");
    assert_int_equal(ep_group_map(ep_group_of(comms[0]), 0, &where, 1, &seen), EP_OK);
    assert_ptr_equal(seen, (char *)memory + 4992);
}

TEST_WITH(nowhere_is_no_address, set_up, tear_down)
{
    ep_comm **comms = *state;
    struct ep_group_address where = {.slot = EP_GROUP_UNMAPPED};
    void *seen = &where;

    assert_int_equal(ep_group_map(ep_group_of(comms[1]), 0, &where, 0, &seen), EP_OK);
    assert_null(seen);
    assert_int_equal(ep_group_map(ep_group_of(comms[1]), 0, &where, 1, &seen), EP_E_MISMATCH);
    assert_null(seen);
}

TEST_WITH(find_knows_the_borders, set_up, tear_down)
{
    struct ep_group *group = ep_group_of(((ep_comm **)*state)[0]);
    struct ep_group_address where;
    int elsewhere;
    void *memory;
    char *bytes;

    assert_int_equal(ep_group_alloc_internal(group, 8192, &memory), EP_OK);
    bytes = memory;
    assert_true(ep_group_find(group, bytes, 8192, &where));
    assert_int_equal(where.offset, 0);
    assert_true(ep_group_find(group, bytes + 8191, 1, &where));
    assert_int_equal(where.offset, 8191);
    assert_false(ep_group_find(group, bytes + 1, 8192, &where));
    assert_false(ep_group_find(group, bytes + 8192, 1, &where));
    assert_false(ep_group_find(group, bytes - 1, 2, &where));
    assert_false(ep_group_find(group, bytes, SIZE_MAX, &where));
    assert_false(ep_group_find(group, &elsewhere, sizeof(elsewhere), &where));
    ep_group_free_internal(group, memory);
    assert_false(ep_group_find(group, bytes, 1, &where));
}

/* The slot is reused; the mapping of the peer is still of the old memory. */
TEST_WITH(a_reused_slot_is_mapped_anew, set_up, tear_down)
{
    ep_comm **comms = *state;
    struct ep_group_address first, second;
    void *memory, *seen;

    assert_int_equal(ep_alloc(comms[0], 4096, &memory), EP_OK);
    strcpy(memory, "first");
    assert_true(ep_group_find(ep_group_of(comms[0]), memory, 4096, &first));
    assert_int_equal(ep_group_map(ep_group_of(comms[1]), 0, &first, 1, &seen), EP_OK);
    assert_string_equal(seen, "first");
    assert_int_equal(ep_free(comms[0], memory), EP_OK);
    assert_int_equal(ep_alloc(comms[0], 100000, &memory), EP_OK);
    strcpy((char *)memory + 90000, "second");
    assert_true(ep_group_find(ep_group_of(comms[0]), (char *)memory + 90000, 10, &second));
    assert_int_equal(second.slot, first.slot);
    assert_int_not_equal(second.generation, first.generation);
    assert_int_equal(ep_group_map(ep_group_of(comms[1]), 0, &second, 1, &seen), EP_OK);
    assert_string_equal(seen, "second");
}

/* Pages of freed memory are returned: a peer unmaps with the next operation. */
TEST_WITH(sweeping_unmaps_what_is_freed_and_nothing_else, set_up, tear_down)
{
    ep_comm **comms = *state;
    struct ep_group_peer *peer = &ep_group_of(comms[1])->peers[0];
    struct ep_group_address kept, freed;
    void *memory[2], *seen;

    for (int i = 0; i < 2; i++)
        assert_int_equal(ep_alloc(comms[0], 4096, &memory[i]), EP_OK);
    assert_true(ep_group_find(ep_group_of(comms[0]), memory[0], 1, &kept));
    assert_true(ep_group_find(ep_group_of(comms[0]), memory[1], 1, &freed));
    assert_int_equal(ep_group_map(ep_group_of(comms[1]), 0, &kept, 1, &seen), EP_OK);
    assert_int_equal(ep_group_map(ep_group_of(comms[1]), 0, &freed, 1, &seen), EP_OK);
    assert_int_equal(ep_free(comms[0], memory[1]), EP_OK);
    ep_group_unmap_stale(ep_group_of(comms[1]));
    assert_int_equal(peer->mappings[kept.slot].generation, kept.generation);
    assert_non_null(peer->mappings[kept.slot].shm.base);
    assert_int_equal(peer->mappings[freed.slot].generation, 0);
    assert_null(peer->mappings[freed.slot].shm.base);
}

/* The rank lives: a missing segment does not make it dead. */
TEST_WITH(memory_that_a_living_rank_has_freed_cannot_be_mapped, set_up, tear_down)
{
    ep_comm **comms = *state;
    struct ep_group_address where;
    void *memory, *seen = NULL;

    assert_int_equal(ep_alloc(comms[0], 4096, &memory), EP_OK);
    assert_true(ep_group_find(ep_group_of(comms[0]), memory, 1, &where));
    assert_int_equal(ep_free(comms[0], memory), EP_OK);
    assert_int_equal(ep_group_map(ep_group_of(comms[1]), 0, &where, 1, &seen), EP_E_PEER_LEFT);
    assert_null(seen);
    assert_non_null(strstr(ep_last_error(), "symmetric memory of rank 0"));
}

TEST_WITH(free_takes_only_what_alloc_gave, set_up, tear_down)
{
    ep_comm **comms = *state;
    void *memory, *staging, *other;

    assert_int_equal(ep_alloc(comms[0], 4096, &memory), EP_OK);
    assert_int_equal(ep_alloc(comms[1], 4096, &other), EP_OK);
    assert_int_equal(ep_group_stage(ep_group_of(comms[0]), EP_GROUP_AT_X, 4096, &staging), EP_OK);
    assert_int_equal(ep_free(comms[0], staging), EP_E_ARG);
    assert_int_equal(ep_free(comms[0], (char *)memory + 16), EP_E_ARG);
    assert_int_equal(ep_free(comms[0], other), EP_E_ARG);
    assert_int_equal(ep_free(comms[0], memory), EP_OK);
    assert_int_equal(ep_free(comms[0], memory), EP_E_ARG);
    assert_int_equal(ep_free(comms[0], NULL), EP_OK);
}

TEST_WITH(an_empty_allocation_is_a_valid_one, set_up, tear_down)
{
    ep_comm **comms = *state;
    void *memory;

    assert_int_equal(ep_alloc(comms[0], 0, &memory), EP_OK);
    assert_non_null(memory);
    assert_int_equal(ep_free(comms[0], memory), EP_OK);
}

TEST_WITH(slots_run_out_and_are_reused, set_up, tear_down)
{
    struct ep_group *group = ep_group_of(((ep_comm **)*state)[0]);
    void *memory[EP_GROUP_SLOTS], *more;
    int n = 0;

    while (n < EP_GROUP_SLOTS && ep_group_alloc_internal(group, 1, &memory[n]) == EP_OK)
        n++;
    assert_int_equal(n, EP_GROUP_SLOTS);
    assert_fails(ep_group_alloc_internal(group, 1, &more), EP_E_MEMORY, "512 allocations");
    ep_group_free_internal(group, memory[77]);
    assert_int_equal(ep_group_alloc_internal(group, 1, &memory[77]), EP_OK);
    while (n > 0)
        ep_group_free_internal(group, memory[--n]);
}

TEST_WITH(staging_grows_and_is_counted, set_up, tear_down)
{
    ep_comm *comm = ((ep_comm **)*state)[0];
    ep_comm_info info = {.size = sizeof(info)};
    void *small, *same, *large, *user;
    size_t before;

    assert_int_equal(ep_comm_get_info(comm, &info), EP_OK);
    before = info.library_bytes;
    assert_int_equal(ep_group_stage(ep_group_of(comm), EP_GROUP_AT_X, 4096, &small), EP_OK);
    assert_int_equal(ep_group_stage(ep_group_of(comm), EP_GROUP_AT_X, 100, &same), EP_OK);
    assert_ptr_equal(small, same);
    assert_int_equal(ep_group_stage(ep_group_of(comm), EP_GROUP_AT_X, 1 << 20, &large), EP_OK);
    memset(large, 1, 1 << 20);
    assert_int_equal(ep_comm_get_info(comm, &info), EP_OK);
    assert_true(info.library_bytes >= before + (1 << 20));
    before = info.library_bytes;
    assert_int_equal(ep_alloc(comm, 1 << 20, &user), EP_OK);
    memset(user, 1, 1 << 20);
    assert_int_equal(ep_comm_get_info(comm, &info), EP_OK);
    /* Memory of ep_alloc belongs to the user; the pages of the control block may be new. */
    assert_true(info.library_bytes < before + (1 << 18));
}
