/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the host of a rank concludes about the others, from what they have published. Needs no GPU.
 *
 * Staging memory of a peer that has less than an operation needs: a call waits until the peer has called it, and knows
 * then that the peer needs no more. A call of a capture does not know that: a new member captures alone what the others
 * have captured before, so its count is not theirs.
 *
 * A late rank: that which does not say that it waits for another one. The monitor says what kernels say.
 *
 * A rank that could not join a group: its graphs have done nothing.
 */
#include "backend/cuda/plan.h"
#include "call.h"

#include <epkit/epkit.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>

enum { RANKS = 3, ROWS = 100, BYTES = 64, LESS = 1000, TIMEOUT_MS = 40000 };
#define DEADLINE_NS (TIMEOUT_MS * UINT64_C(1000000))

/* Rank 2, which has called less than the others. */
struct ranks {
    ep_comm comm;
    struct cuda_comm cuda;
    struct cuda_report report;
    struct cuda_ctrl ctrl[RANKS];
    struct cuda_peer peers[RANKS];
    struct ep_group_peer group_peers[RANKS];
    struct ep_group_control control[RANKS];
    struct ep_group_plan inner;
    struct cuda_plan device;
    ep_plan plan;
};

static void init(struct ranks *r)
{
    *r = (struct ranks){.comm = {.rank = RANKS - 1,
                                 .nranks = RANKS,
                                 .n_members = RANKS,
                                 .ranks_per_node = RANKS,
                                 .nnodes = 1,
                                 .config = {.timeout_ms = TIMEOUT_MS}}};
    r->comm.members[0] = (1u << RANKS) - 1;
    r->comm.impl = &r->cuda;
    r->cuda.group = (struct ep_group){.comm = &r->comm,
                                      .nlocal = RANKS,
                                      .local = RANKS - 1,
                                      .control = &r->control[RANKS - 1],
                                      .peers = r->group_peers};
    r->cuda.ctrl = &r->ctrl[RANKS - 1];
    r->cuda.peers = r->peers;
    r->cuda.report = &r->report;
    for (int rank = 0; rank < RANKS; rank++) {
        r->peers[rank].ctrl = &r->ctrl[rank];
        r->group_peers[rank] =
            (struct ep_group_peer){.control = &r->control[rank], .same_process = true, .process.pidfd = -1};
        atomic_store(&r->ctrl[rank].called[0], 5);
        atomic_store(&r->ctrl[rank].called[1], 5);
        atomic_store(&r->ctrl[rank].stage_bytes[EP_GROUP_AT_X], LESS);
    }
    r->device.on_device = true;
    r->inner.device = &r->device;
    r->plan = (ep_plan){.comm = &r->comm, .args = {.max_recv_tokens = ROWS}, .impl = &r->inner};
}

static int check_stages(struct ranks *r, unsigned long long capture, uint64_t known)
{
    struct cuda_call call = {.cuda = &r->cuda, .capture = capture};
    const size_t row_bytes[EP_GROUP_AT_COUNT] = {[EP_GROUP_AT_X] = BYTES};

    init(r);
    CALL(cuda_sync_stages(&call, &r->plan, row_bytes, EP_GROUP_DISPATCH_READY));
    for (int rank = 0; rank < RANKS - 1; rank++)
        EXPECT(r->peers[rank].stage_bytes[EP_GROUP_AT_X] == known, "%llu bytes",
               (unsigned long long)r->peers[rank].stage_bytes[EP_GROUP_AT_X]);
    return PASSED;
}

/* A kernel has waited too long for rank 0, which may say that it waits for another one. */
static int check_late(struct ranks *r, int waits_for, const char *named)
{
    uint64_t begin = ep_now_ns();

    init(r);
    if (waits_for >= 0) {
        atomic_store(&r->control[0].state.probed_ns, begin);
        atomic_store(&r->control[0].state.waiting, (uint32_t)(waits_for + 1) << 8);
    }
    r->report.failure = CUDA_FAILURE(CUDA_FAILED_LATE, 0, EP_GROUP_PLAN_COUNTS);
    EXPECT(cuda_check(&r->cuda) == EP_E_TIMEOUT && strstr(ep_last_error(), named), "%s", ep_last_error());
    EXPECT(ep_now_ns() - begin < DEADLINE_NS / 8, "it took so long to say which rank is late that an event is late");
    return PASSED;
}

static int await_waiting(struct ranks *r, uint32_t value)
{
    const _Atomic uint32_t *waiting = &r->control[RANKS - 1].state.waiting;

    for (uint64_t limit = ep_now_ns() + DEADLINE_NS; atomic_load(waiting) != value; sched_yield())
        EXPECT(ep_now_ns() < limit, "it says %#x, not %#x", atomic_load(waiting), value);
    return PASSED;
}

/* A kernel waits for the second rank of the node, and then no more. */
static int check_waiting(struct ranks *r)
{
    init(r);
    r->cuda.stop = -1;
    r->report.waits_for = 2u << 8 | EP_GROUP_LL_SEND;
    CALL(cuda_monitor_start(&r->cuda));
    TRY(await_waiting(r, 2u << 8 | EP_GROUP_LL_SEND));
    TRY(await_waiting(r, 0));
    cuda_monitor_stop(&r->cuda);
    return PASSED;
}

static int check_failed_regroup(struct ranks *r)
{
    init(r);
    CALL(cuda_check(&r->cuda));
    r->cuda.let_go = true;
    atomic_store(&r->comm.failed, EP_E_TIMEOUT);
    EXPECT(cuda_check(&r->cuda) == EP_E_TIMEOUT && strstr(ep_last_error(), "ep_comm_regroup"), "%s", ep_last_error());
    return PASSED;
}

int main(void)
{
    static struct ranks ranks;

    TRY(check_stages(&ranks, 0, ROWS * BYTES));
    TRY(check_stages(&ranks, 1, LESS));
    TRY(check_late(&ranks, -1, "rank 0 did not answer"));
    TRY(check_late(&ranks, 1, "rank 1 did not answer"));
    TRY(check_late(&ranks, RANKS - 1, "rank 0 did not answer"));
    TRY(check_waiting(&ranks));
    TRY(check_failed_regroup(&ranks));
    printf("members_cuda: passed\n");
    return 0;
}
