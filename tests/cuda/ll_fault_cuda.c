/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ll_fault_cuda [--ranks N] [--nodes N [--network NAME]] [--slow N] [--seed N] [--only SCENARIO]: low latency when the
 * last rank is killed, late, stopped, stuck on its device, or has invalid routing in an asynchronous call; by calls,
 * with hooks, asynchronously and in captured graphs; with both kinds of sums. Or its combine is refused, because its
 * routing is not that of the dispatch, and then it dies, leaves, or does nothing more, while the others, whose combines
 * have begun, need its weights.
 *
 * With masking the others continue without the rank. In later calls, each with a different routing, only their rows
 * arrive, also when the rank comes back; it is then notified that it was masked. Without masking they get a status that
 * names it within the deadline, and form a new group. The CUDA context survives.
 *
 * Exit 77 when there is no GPU.
 */
#include "ll_model.h"

#include <epkit/cuda.h>
#include <limits.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define TIMEOUT_MS 1500
#define SLACK_MS 1500 /* allowed after a deadline, on a busy machine */
#define STEP_MS 30000 /* limit of waits for other ranks of the test */
#define BEGIN_MS 50   /* a call that a rank is about to make has begun after it */

enum { TOKENS = 24, HIDDEN = 512, HEALTHY = 2, MASKED = 3, AFTER = 4 };
enum fault { KILL, LATE, STOP, MIDWAY, STUCK, ROUTING, LEAVE };
enum way {
    MASKS = 1,
    GRAPH = 2,  /* the calls are in a graph, which is launched instead */
    ONCE = 4,   /* EP_LL_NO_PARTIAL_REDUCE */
    REFUSED = 8 /* the fault comes after a refused combine of the victim */
};

#define HOOK EP_LL_RECV_HOOK
#define ASYNC TEST_ASYNC

static const struct scenario {
    const char *name;
    enum fault fault;
    unsigned ways;
    uint32_t flags; /* of all calls */
} scenarios[] = {
    {"kill", KILL, 0, 0},
    {"kill-once", KILL, ONCE, 0},
    {"kill-masked", KILL, MASKS, 0},
    {"kill-hooks-masked", KILL, MASKS, HOOK},
    {"kill-graph", KILL, GRAPH, 0},
    {"kill-graph-masked", KILL, GRAPH | MASKS, 0},
    {"kill-graph-hooks-masked", KILL, GRAPH | MASKS, HOOK},
    {"late", LATE, 0, 0},
    {"late-masked", LATE, MASKS, 0},
    {"late-once-masked", LATE, ONCE | MASKS, 0},
    {"late-hooks-masked", LATE, MASKS, HOOK},
    {"late-graph-masked", LATE, GRAPH | MASKS, 0},
    {"stop", STOP, 0, 0},
    {"stop-masked", STOP, MASKS, 0},
    {"stop-midway-masked", MIDWAY, MASKS, HOOK}, /* between the two halves of a dispatch */
    {"stop-midway-once-masked", MIDWAY, ONCE | MASKS, HOOK},
    {"stop-graph-masked", STOP, GRAPH | MASKS, 0},
    {"stuck", STUCK, 0, ASYNC},
    {"stuck-masked", STUCK, MASKS, ASYNC},
    {"routing-masked", ROUTING, MASKS, ASYNC},
    {"refused-kill", KILL, REFUSED, 0},
    {"refused-kill-masked", KILL, REFUSED | MASKS, 0},
    {"refused-kill-hooks-masked", KILL, REFUSED | MASKS, HOOK},
    {"refused-leave", LEAVE, REFUSED, 0},
    {"refused-leave-masked", LEAVE, REFUSED | MASKS, 0},
    {"refused-late", LATE, REFUSED, 0},
    {"refused-late-masked", LATE, REFUSED | MASKS, 0},
    {"refused-late-once-masked", LATE, REFUSED | ONCE | MASKS, 0},
};

/* State that the test's ranks share. */
struct page {
    _Atomic int ready;  /* ranks that have completed the rounds before the fault */
    _Atomic int begun;  /* complete dispatches of all ranks and rounds; REFUSED and MIDWAY only */
    _Atomic int done;   /* survivors that have continued without the victim */
    _Atomic int go;     /* the victim may come back */
    _Atomic int back;   /* the victim has been notified */
    _Atomic int last;   /* round after which the survivors stop */
    _Atomic int victim; /* process */
};

struct state {
    const struct scenario *scenario;
    struct page *page;
    struct group group;
    struct model model;
    cudaGraphExec_t graph;
    ep_boot_shm *next; /* of the others */
    int victim;
    uint64_t all, others;
};

struct start {
    const struct scenario *scenario;
    struct page *page;
    ep_boot_shm *next;
};

static bool has_mode(const struct state *s, unsigned ways)
{
    return (s->scenario->ways & ways) == ways;
}

/* --- rounds ------------------------------------------------------------------------------------------------------ */

static int call_dispatch(struct state *s)
{
    CALL(model_dispatch(&s->model, s->scenario->flags));
    if (s->scenario->flags & HOOK)
        CALL(model_finish(&s->model));
    if (has_mode(s, REFUSED) || s->scenario->fault == MIDWAY)
        atomic_fetch_add(&s->page->begun, 1);
    return 0;
}

/* The calls of a round, with the flags of the scenario. */
static int call_both(struct state *s)
{
    TRY(call_dispatch(s));
    CALL(model_combine(&s->model, s->scenario->flags));
    if (s->scenario->flags & HOOK)
        CALL(model_finish(&s->model));
    return 0;
}

static int capture(struct state *s)
{
    TRY(capture_begin(&s->group));
    TRY(call_both(s));
    return capture_end(&s->group, &s->graph);
}

/* A round with the calls of the scenario: checks that the rows of `senders` arrive, and the results of `experts`. */
static int run_round(struct state *s, int round, uint64_t senders, uint64_t experts)
{
    test_set_context("rank %d of %d, %s, round %d", s->group.rank, s->group.nranks, s->scenario->name, round);
    TRY(model_load(&s->model, round));
    if (!has_mode(s, GRAPH)) {
        TRY(call_both(s));
    } else {
        CUDA(cudaGraphLaunch(s->graph, s->group.stream));
        CUDA(cudaStreamSynchronize(s->group.stream));
        CALL(ep_comm_async_error(s->group.cuda));
    }
    return model_check(&s->model, senders, experts);
}

static int begin(struct state *s)
{
    uint32_t flags = (has_mode(s, MASKS) ? EP_LL_MASK_DEAD : 0) | (has_mode(s, ONCE) ? EP_LL_NO_PARTIAL_REDUCE : 0);

    TRY(model_open(&s->group, TOKENS, HIDDEN, flags, NULL, &s->model));
    if (has_mode(s, GRAPH))
        TRY(capture(s));
    for (int round = 0; round < HEALTHY; round++)
        TRY(run_round(s, round, s->all, s->all));
    atomic_fetch_add(&s->page->ready, 1);
    return await(&s->page->ready, s->group.nranks, STEP_MS, "all ranks to complete the rounds before the fault");
}

/* --- the victim -------------------------------------------------------------------------------------------------- */

static int come_back(struct state *s)
{
    return await(&s->page->go, 1, STEP_MS, "the others to go on without this rank");
}

static void stop_self(struct state *s)
{
    atomic_store(&s->page->victim, (int)getpid());
    kill(getpid(), SIGSTOP);
}

/* Checks the status that this rank gets when it comes back. Without masking the group has failed, for any reason. */
static int check_notified(struct state *s, const char *call, ep_status status)
{
    ep_status expected = s->scenario->fault == ROUTING ? EP_E_ROUTING : EP_E_EXCLUDED;

    if (has_mode(s, MASKS))
        return expect_status(call, status, expected, expected == EP_E_EXCLUDED ? "masked" : NULL);
    EXPECT(status != EP_OK, "%s is EP_OK, though the others have given this rank up", call);
    return 0;
}

static int learn_by_call(struct state *s)
{
    if (s->scenario->fault == MIDWAY)
        return check_notified(s, "ep_ll_finish", model_finish(&s->model));
    if (has_mode(s, REFUSED))
        return check_notified(s, "ep_ll_combine", model_combine(&s->model, s->scenario->flags));
    return check_notified(s, "ep_ll_dispatch", model_dispatch(&s->model, s->scenario->flags));
}

/* Queued work ends, and then the communicator reports the failure. */
static int learn_by_stream(struct state *s)
{
    ep_status status;

    CUDA(cudaStreamSynchronize(s->group.stream));
    status = ep_comm_async_error(s->group.cuda);
    return check_notified(s, "ep_comm_async_error", status);
}

/* Calls queued afterwards are stopped, and may already be refused. */
static int spoil(struct state *s)
{
    const int64_t beyond = (int64_t)MODEL_LOCAL * s->group.nranks; /* no such expert */
    ep_status status;

    CUDA(cudaMemcpyAsync(s->model.index, &beyond, sizeof(beyond), cudaMemcpyDefault, s->group.stream));
    CALL(model_dispatch(&s->model, ASYNC));
    status = model_combine(&s->model, ASYNC);
    if (status != EP_OK)
        TRY(check_notified(s, "ep_ll_combine", status));
    return learn_by_stream(s);
}

static int run_stuck(struct state *s)
{
    static struct hold hold; /* static: outlives a failure */

    hold = (struct hold){.word = &s->page->go, .ms = group_slow * STEP_MS};
    TRY(hold_stream(s->group.stream, &hold));
    CALL(model_dispatch(&s->model, ASYNC));
    CALL(model_combine(&s->model, ASYNC));
    TRY(come_back(s));
    return learn_by_stream(s);
}

/* The others have what they need from the dispatch, and their combines have begun. */
static int run_refused(struct state *s)
{
    const int64_t swapped[2] = {s->model.host_index[1], s->model.host_index[0]};

    TRY(call_dispatch(s));
    TRY(await(&s->page->begun, (HEALTHY + 1) * s->group.nranks, STEP_MS, "all ranks to complete the dispatch"));
    sleep_ms(BEGIN_MS);
    CUDA(cudaMemcpy(s->model.index, swapped, sizeof(swapped), cudaMemcpyDefault));
    TRY(expect_status("ep_ll_combine with two choices swapped", model_combine(&s->model, s->scenario->flags),
                      EP_E_ROUTING, "dispatch that it answers"));
    CUDA(cudaMemcpy(s->model.index, s->model.host_index, sizeof(swapped), cudaMemcpyDefault));
    return 0;
}

/* The first half of a dispatch. Between nodes, the rows leave this process after the call has returned. */
static int begin_dispatch(struct state *s)
{
    int others = s->group.nranks - 1;

    CALL(model_dispatch(&s->model, HOOK));
    return await(&s->page->begun, HEALTHY * s->group.nranks + others, STEP_MS, "the others to receive the rows");
}

static int leave(struct state *s)
{
    ep_ll_free(s->model.ll);
    s->model.ll = NULL;
    ep_comm_free(s->group.cuda);
    s->group.cuda = NULL;
    atomic_store(&s->page->back, 1);
    return 0;
}

static int apply_fault(struct state *s)
{
    enum fault fault = s->scenario->fault;

    test_set_context("rank %d of %d (the victim), %s", s->group.rank, s->group.nranks, s->scenario->name);
    TRY(model_load(&s->model, HEALTHY));
    if (has_mode(s, REFUSED))
        TRY(run_refused(s));
    if (fault == KILL)
        kill(getpid(), SIGKILL);
    if (fault == LEAVE)
        return leave(s);
    if (fault == MIDWAY)
        TRY(begin_dispatch(s));
    if (fault == STOP || fault == MIDWAY)
        stop_self(s);
    if (fault == LATE)
        TRY(come_back(s));
    if (fault == ROUTING) {
        TRY(spoil(s));
    } else if (fault == STUCK) {
        TRY(run_stuck(s));
    } else if (has_mode(s, GRAPH)) {
        CUDA(cudaGraphLaunch(s->graph, s->group.stream));
        TRY(learn_by_stream(s));
    } else {
        TRY(learn_by_call(s));
    }
    /* The next call reports it again. */
    if (fault == MIDWAY)
        TRY(check_notified(s, "a second ep_ll_finish", model_finish(&s->model)));
    else
        TRY(check_notified(s, "the next ep_ll_dispatch", model_dispatch(&s->model, 0)));
    atomic_store(&s->page->back, 1);
    return 0;
}

/* --- the others -------------------------------------------------------------------------------------------------- */

/* By rank 0: continues the stopped victim until it has reported back. */
static void wake(struct state *s)
{
    int survivors = s->group.nranks - 1;

    if (atomic_load(&s->page->done) < survivors)
        return;
    atomic_store(&s->page->go, 1);
    if (atomic_load(&s->page->victim))
        kill((pid_t)atomic_load(&s->page->victim), SIGCONT);
}

static int check_mask(struct state *s)
{
    int32_t masked[MAX_RANKS];

    CALL(ep_ll_get_mask(s->model.ll, masked));
    for (int rank = 0; rank < s->group.nranks; rank++)
        EXPECT(masked[rank] == (rank == s->victim), "ep_ll_get_mask: %d for rank %d, but the victim is rank %d",
               masked[rank], rank, s->victim);
    return 0;
}

/* Rounds without the victim: while it is absent, while it comes back, and some more. */
static int continue_masked(struct state *s)
{
    bool returns = s->scenario->fault != KILL;
    double limit = now_ms() + group_slow * STEP_MS;

    /* What the victim has sent before it was lost counts. */
    TRY(run_round(s, HEALTHY, s->scenario->fault == MIDWAY || has_mode(s, REFUSED) ? s->all : s->others, s->others));
    for (int round = HEALTHY + 1; round <= atomic_load(&s->page->last); round++) {
        TRY(run_round(s, round, s->others, s->others));
        if (round == HEALTHY + MASKED)
            atomic_fetch_add(&s->page->done, 1);
        if (s->group.rank != 0)
            continue;
        wake(s);
        EXPECT(now_ms() < limit, "rank %d, the victim, has said nothing for %d ms", s->victim, group_slow * STEP_MS);
        /* The others are at most a round ahead: none has passed the last one yet. */
        if (round > HEALTHY + MASKED && atomic_load(&s->page->last) == INT_MAX &&
            (!returns || atomic_load(&s->page->back)))
            atomic_store(&s->page->last, round + AFTER);
    }
    return check_mask(s);
}

/* The first status that names the victim. */
static ep_status run_into_failure(struct state *s)
{
    ep_status status = EP_OK;

    if (has_mode(s, REFUSED))
        return model_combine(&s->model, s->scenario->flags);
    if (has_mode(s, GRAPH))
        cudaGraphLaunch(s->graph, s->group.stream);
    else
        status = model_dispatch(&s->model, s->scenario->flags);
    if (status != EP_OK || !(has_mode(s, GRAPH) || s->scenario->flags & ASYNC))
        return status;
    cudaStreamSynchronize(s->group.stream);
    return has_mode(s, GRAPH) ? model_dispatch(&s->model, 0) : model_combine(&s->model, s->scenario->flags);
}

static int check_named(struct state *s)
{
    enum fault fault = s->scenario->fault;
    ep_status status, expected = fault == KILL ? EP_E_PEER_DEAD : fault == LEAVE ? EP_E_PEER_LEFT : EP_E_TIMEOUT;
    double begin_ms, took;

    if (has_mode(s, REFUSED))
        TRY(call_dispatch(s));
    begin_ms = now_ms();
    status = run_into_failure(s);
    took = now_ms() - begin_ms;
    if (s->group.rank == 0)
        printf("ll_fault_cuda: %s: after %.0f ms: %s\n", s->scenario->name, took, ep_last_error());
    /* The host must see that the process is dead only where it waits. */
    if (has_mode(s, GRAPH) && status == EP_E_TIMEOUT)
        expected = EP_E_TIMEOUT;
    TRY(expect_failed_rank("the call", status, expected, s->victim));
    EXPECT(took < group_slow * (TIMEOUT_MS + SLACK_MS), "after %.0f ms", took);
    return expect_failed_rank("the next call", model_dispatch(&s->model, 0), status, s->victim);
}

/* Makes a group without the victim, which must work. */
static int make_new_group(struct state *s)
{
    struct group next = s->group;
    int32_t failed[MAX_RANKS];
    struct model model;
    ep_boot boot;
    int code;

    CALL(ep_comm_get_failed(s->group.cuda, failed));
    EXPECT(failed[s->victim] != EP_OK, "ep_comm_get_failed knows nothing of rank %d", s->victim);
    CALL(ep_boot_shm_join(s->next, s->group.rank, &boot));
    TRY(group_next(&boot, "cuda", TIMEOUT_MS, &next.cuda));
    next.nranks = boot.nranks;
    code = model_open(&next, TOKENS, HIDDEN, has_mode(s, ONCE) ? EP_LL_NO_PARTIAL_REDUCE : 0, NULL, &model);
    for (int round = 0; round < MASKED && !code; round++)
        code = model_round(&model, round, s->scenario->flags, s->others);
    model_close(&model);
    ep_comm_free(next.cuda);
    return code;
}

static int continue_in_new_group(struct state *s)
{
    test_set_context("rank %d of %d, %s", s->group.rank, s->group.nranks, s->scenario->name);
    TRY(model_load(&s->model, HEALTHY));
    TRY(check_named(s));
    TRY(make_new_group(s));
    atomic_fetch_add(&s->page->done, 1);
    for (double limit = now_ms() + group_slow * STEP_MS; s->group.rank == 0 && s->scenario->fault != KILL;) {
        wake(s);
        if (atomic_load(&s->page->back))
            break;
        EXPECT(now_ms() < limit, "rank %d, the victim, has said nothing for %d ms", s->victim, group_slow * STEP_MS);
        sleep_ms(20);
    }
    return 0;
}

/* ----------------------------------------------------------------------------------------------------------------- */

static int check_context(struct state *s)
{
    void *memory;

    CUDA(cudaMalloc(&memory, 1 << 20));
    CUDA(cudaMemset(memory, 0, 1 << 20));
    CUDA(cudaDeviceSynchronize());
    CUDA(cudaFree(memory));
    CUDA(cudaMemset(s->model.out, 0, 16));
    return 0;
}

static int run_rank(const ep_boot *boot, void *argument)
{
    const struct start *start = argument;
    struct state state = {.scenario = start->scenario,
                          .page = start->page,
                          .next = start->next,
                          .victim = boot->nranks - 1},
                 *s = &state;
    int code = group_open(boot, NULL, TIMEOUT_MS, &s->group);

    if (code)
        goto close;
    s->all = UINT64_MAX >> (64 - s->group.nranks);
    s->others = s->all & ~(UINT64_C(1) << s->victim);
    code = begin(s);
    if (!code && s->group.rank == s->victim)
        code = apply_fault(s);
    else if (!code)
        code = has_mode(s, MASKS) ? continue_masked(s) : continue_in_new_group(s);
    if (!code)
        code = check_context(s);
close:
    /* In any case the victim must not stay stopped, or wait for a rank that does not come. */
    if (code)
        atomic_store(&s->page->go, 1);
    if (s->group.rank == 0 && atomic_load(&s->page->victim))
        kill((pid_t)atomic_load(&s->page->victim), SIGCONT);
    if (s->graph)
        cudaGraphExecDestroy(s->graph);
    model_close(&s->model);
    group_close(&s->group, code);
    return code;
}

static int run_scenario(struct options *options, const struct scenario *scenario)
{
    struct start start = {.scenario = scenario};
    struct launch launch = {.name = scenario->name,
                            .ranks = options->ranks,
                            .seconds = 90,
                            .victim = scenario->fault == KILL ? options->ranks - 1 : -1,
                            .run = run_rank,
                            .argument = &start};
    int code = 1;

    if (!options_select(options, scenario->name))
        return SKIPPED;
    start.page = share(sizeof(*start.page));
    if (start.page && ep_boot_shm_new(options->ranks - 1, &start.next) == EP_OK) {
        atomic_store(&start.page->last, INT_MAX);
        code = launch_ranks(&launch);
    }
    ep_boot_shm_free(start.next);
    printf("ll_fault_cuda: %d ranks, %s: %s\n", options->ranks, scenario->name, result_name(code));
    fflush(stdout);
    return code;
}

int main(int argc, char **argv)
{
    struct options options = {.ranks = 3};
    int code = SKIPPED;

    if (!options_read(argc, argv, 2, &options))
        return 2;
    for (size_t i = 0; i < sizeof(scenarios) / sizeof(scenarios[0]); i++)
        code = merge_codes(code, run_scenario(&options, &scenarios[i]));
    return options_code(&options, code);
}
