/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Low latency over the host backend: ranks that oversleep or are used differently. Ranks are threads; each keeps its
 * verdicts, which the test looks at afterwards.
 */
#include "backend/host/host.h"

#include <epkit/launch.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#define MAX_RANKS 3
#define TOKENS 2
#define HIDDEN 512

/* One rank's low-latency object with one expert per rank; each token goes to all of them. */
struct member {
    ep_comm *comm;
    ep_ll *ll;
    int nranks;
    ep_ll_dispatch_args dispatch;
    ep_ll_combine_args combine;
    alignas(16) uint16_t x[TOKENS * HIDDEN];
    alignas(16) uint16_t out[TOKENS * HIDDEN];
    alignas(16) uint16_t recv[MAX_RANKS * TOKENS * HIDDEN];
    int32_t index[TOKENS * MAX_RANKS], count;
    float weights[TOKENS * MAX_RANKS];
};

static bool member_init(struct member *member, const ep_boot *boot, int timeout_ms, uint32_t comm_flags,
                        uint32_t ll_flags)
{
    ep_comm_config config = EP_COMM_CONFIG_INIT;
    ep_ll_config ll_config = EP_LL_CONFIG_INIT;

    *member = (struct member){.nranks = boot->nranks};
    config.backend = "host";
    config.timeout_ms = timeout_ms;
    config.flags = comm_flags;
    if (ep_comm_new(boot, &config, &member->comm) != EP_OK)
        return false;
    ll_config.max_tokens = TOKENS;
    ll_config.hidden = HIDDEN;
    ll_config.n_experts = ll_config.topk = boot->nranks;
    ll_config.flags = ll_flags;
    if (ep_ll_new(member->comm, &ll_config, &member->ll) != EP_OK) {
        ep_comm_free(member->comm);
        return false;
    }
    for (int i = 0; i < TOKENS * boot->nranks; i++) {
        member->index[i] = i % boot->nranks;
        member->weights[i] = 1;
    }
    member->dispatch = (ep_ll_dispatch_args)EP_LL_DISPATCH_ARGS_INIT;
    member->dispatch.x = member->x;
    member->dispatch.topk_idx = member->index;
    member->dispatch.idx_type = EP_I32;
    member->dispatch.n_tokens = TOKENS;
    member->dispatch.out_dtype = EP_BF16;
    member->dispatch.recv_x = member->recv;
    member->dispatch.recv_count = &member->count;
    member->combine = (ep_ll_combine_args)EP_LL_COMBINE_ARGS_INIT;
    member->combine.x = member->recv;
    member->combine.topk_idx = member->index;
    member->combine.idx_type = EP_I32;
    member->combine.n_tokens = TOKENS;
    member->combine.topk_weights = member->weights;
    member->combine.out = member->out;
    return true;
}

static void member_done(struct member *member)
{
    ep_ll_free(member->ll);
    ep_comm_free(member->comm);
}

/* A dispatch and its combine; rows hold `value` in all places (bf16). */
static ep_status member_round(struct member *member, uint16_t value)
{
    for (int i = 0; i < TOKENS * HIDDEN; i++)
        member->x[i] = value;
    EP_TRY(ep_ll_dispatch(member->ll, &member->dispatch));
    return ep_ll_combine(member->ll, &member->combine);
}

static void nap_ms(int ms)
{
    nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000L}, NULL);
}

static void run_ranks(ep_rank_fn run, int nranks, void *argument)
{
    ep_launch_args launch = EP_LAUNCH_ARGS_INIT;
    ep_rank_exit exits[MAX_RANKS];

    launch.mode = EP_LAUNCH_THREADS;
    launch.nranks = nranks;
    launch.run = run;
    launch.argument = argument;
    assert_int_equal(ep_launch(&launch, exits), EP_OK);
    for (int rank = 0; rank < nranks; rank++)
        assert_int_equal(exits[rank].code, 0);
}

/* --- masks ------------------------------------------------------------------------------------------------------ */

#define SLEEPER 1

struct sleep_story {
    _Atomic int ahead; /* ranks that have gone on without the sleeper */
    ep_status status;  /* of the sleeper once it is awake */
    ep_status others[MAX_RANKS];
    char text[256];
    int32_t mask[MAX_RANKS];
};

static int oversleep(const ep_boot *boot, void *argument)
{
    struct sleep_story *story = argument;
    struct member member;
    int rank = boot->rank;

    if (!member_init(&member, boot, 1000, 0, EP_LL_MASK_DEAD))
        return 1;
    for (int round = 0; round < 3; round++)
        if (member_round(&member, (uint16_t)(0x3f80 + round)) != EP_OK)
            return 2;
    if (rank != SLEEPER) {
        /* Two rounds alone: the second one reuses the buffers that the sleeper has not read. */
        for (int round = 3; round < 5 && story->others[rank] == EP_OK; round++)
            story->others[rank] = member_round(&member, (uint16_t)(0x3f80 + round));
        if (rank == 0)
            ep_ll_get_mask(member.ll, story->mask);
        atomic_fetch_add(&story->ahead, 1);
    } else {
        for (int i = 0; i < 20000 && atomic_load(&story->ahead) < boot->nranks - 1; i++)
            nap_ms(1);
        story->status = member_round(&member, 0x4000);
        snprintf(story->text, sizeof(story->text), "%s", ep_comm_last_error(member.comm));
    }
    member_done(&member);
    return 0;
}

/* Rows and counts of earlier dispatches lie where nobody has written for a masked rank: it must not take them. */
static void rank_that_overslept_is_told_so(void **state)
{
    static struct sleep_story story;

    (void)state;
    run_ranks(oversleep, 3, &story);
    assert_int_equal(story.others[0], EP_OK);
    assert_int_equal(story.others[2], EP_OK);
    assert_int_equal(story.mask[SLEEPER], 1);
    assert_int_equal(story.mask[0] + story.mask[2], 0);
    assert_int_equal(story.status, EP_E_EXCLUDED);
    assert_non_null(strstr(story.text, "has masked this rank in \"low-latency dispatch: "));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rank_that_overslept_is_told_so),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
