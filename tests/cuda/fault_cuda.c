/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fault_cuda [--ranks N] [--nodes N [--network NAME]] [--only SCENARIO]: the last rank is killed, is stopped, is late,
 * has left, or is stuck on its device while the others dispatch or combine; or it is killed while its rows move. On
 * symmetric memory, and on ordinary memory, whose rows are copied meanwhile. Each of the others must get a status that
 * names it within the deadline, keep its CUDA context, and continue in a new group. Exit 77 if there is no GPU.
 */
#include "case.h"

#include <epkit/cuda.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define TIMEOUT_MS 1500
#define SLACK_MS 1500 /* allowed after a deadline, on a busy machine */

#define TOPK 4
#define SLOW_SMS 1   /* moving the rows of LONG_TOKENS takes tens of milliseconds with it */
#define KILL_AFTER 5 /* ms after they began to move */
#define LONG_TOKENS 65536

#define AWAY_MS 500  /* the victim dies after it, while a call is in progress and hosts do other work */
#define REPLAYS 1000 /* launches of a graph */
#define KILL_AT 500  /* launches of the victim before it is killed */

enum fault { KILL, STOP, LATE, STUCK, LEAVE, AMID, ELSEWHERE, REPLAYED, UPDATED };

static const struct kind {
    const char *name;
    enum fault fault;
    bool combines, ordinary;
    int n_tokens, hidden;
} kinds[] = {
    {"kill", KILL, false, false, 64, 1024},
    {"stop", STOP, false, false, 64, 1024},
    {"late", LATE, false, false, 64, 1024},
    {"stuck", STUCK, false, false, 64, 1024},
    {"leave", LEAVE, false, false, 64, 1024},
    {"kill-ordinary", KILL, false, true, 1500, 7168},
    {"stop-ordinary", STOP, false, true, 1500, 7168},
    {"late-ordinary", LATE, false, true, 1500, 7168},
    {"stuck-ordinary", STUCK, false, true, 1500, 7168},
    {"kill-combine", KILL, true, true, 1500, 7168},
    {"stop-combine", STOP, true, true, 1500, 7168},
    {"late-combine", LATE, true, true, 1500, 7168},
    {"stuck-combine", STUCK, true, true, 1500, 7168},
    {"leave-combine", LEAVE, true, true, 1500, 7168},
    {"amid-dispatch", AMID, false, true, LONG_TOKENS, 7168},
    {"amid-combine", AMID, true, true, LONG_TOKENS, 7168},
    {"elsewhere", ELSEWHERE, false, false, 64, 1024},
    {"elsewhere-combine", ELSEWHERE, true, true, 1500, 7168},
    {"replayed", REPLAYED, true, false, 64, 1024},
    {"replayed-ordinary", REPLAYED, true, true, 1500, 1024},
    {"replayed-update", UPDATED, true, true, 1500, 1024},
};

/* During launches of a graph, with or without an update of the plan in it. */
static bool is_replayed(enum fault fault)
{
    return fault == REPLAYED || fault == UPDATED;
}

/* Does the victim kill itself? */
static bool dies_of(enum fault fault)
{
    return fault == KILL || fault == AMID || fault == ELSEWHERE || is_replayed(fault);
}

struct scenario {
    ep_boot_shm *second, *next; /* for the host backend, for the new group */
    const struct kind *kind;
    _Atomic int *victim_pid; /* in shared memory */
};

struct state {
    struct group group;
    const struct scenario *scenario;
    const struct kind *kind;
    int victim;
    ep_plan *plan;
    void *x, *recv, *out, *index;
    ep_stream stream; /* of the operations */
    int64_t n_recv;
};

static int call_operation(struct state *s, bool combines, bool waits, ep_status *ret_status)
{
    ep_dispatch_args dispatch = args_dispatch(EP_BF16, s->kind->hidden, s->x, s->recv, s->n_recv);
    ep_combine_args combine = args_combine(s->kind->hidden, s->recv, s->out);

    *ret_status = combines ? ep_combine(s->plan, &combine, s->stream) : ep_dispatch(s->plan, &dispatch, s->stream);
    if (waits && *ret_status == EP_OK)
        *ret_status = ep_stream_sync(s->group.cuda, s->stream);
    return 0;
}

/* The call returns before the rows move. */
static int kill_during(struct state *s)
{
    ep_status status;

    TRY(call_operation(s, s->kind->combines, false, &status));
    CALL(status);
    sleep_ms(KILL_AFTER);
    kill(getpid(), SIGKILL);
    return FAILED;
}

/* The victim's part before the call; returns only in LATE and STUCK. */
static int apply_fault(struct state *s)
{
    static struct hold hold; /* static: outlives a failure */
    cudaStream_t stuck;

    atomic_store(s->scenario->victim_pid, (int)getpid());
    switch (s->kind->fault) {
    case KILL:
        kill(getpid(), SIGKILL);
        break;
    case STOP:
        kill(getpid(), SIGSTOP);
        break;
    case LATE:
        sleep_ms(group_slow * (TIMEOUT_MS + TIMEOUT_MS / 3)); /* late for the call, not for the new group */
        break;
    case STUCK:
        /* Longer than the others wait in the call, but not longer than they wait in the new group. */
        hold = (struct hold){.ms = group_slow * (TIMEOUT_MS + TIMEOUT_MS / 2)};
        CUDA(cudaStreamCreateWithFlags(&stuck, cudaStreamNonBlocking));
        s->stream = stuck;
        TRY(hold_stream(stuck, &hold));
        break;
    case AMID:
        TRY(kill_during(s));
        break;
    case ELSEWHERE:
        sleep_ms(AWAY_MS / 4); /* the others' kernels wait by then */
        kill(getpid(), SIGKILL);
        break;
    case LEAVE:
    case REPLAYED:
    case UPDATED:
        break;
    }
    return 0;
}

static void leave(struct state *s)
{
    ep_plan_free(s->plan);
    ep_comm_free(s->group.cuda);
    s->group.cuda = NULL;
}

/*
 * No rank is in a call when the victim dies, or later: queued work ends, and the communicator reports the failure. A
 * process is dead when the driver has released what it had on the GPU.
 */
static int check_later(struct state *s, ep_status *ret_status)
{
    double limit = now_ms() + group_slow * (TIMEOUT_MS + SLACK_MS);

    TRY(call_operation(s, s->kind->combines, false, ret_status));
    CALL(*ret_status);
    do {
        sleep_ms(10);
        *ret_status = ep_comm_async_error(s->group.cuda);
    } while (*ret_status == EP_OK && now_ms() < limit);
    ep_set_last_error(ep_comm_last_error(s->group.cuda));
    return 0;
}

static int update(const struct state *s)
{
    ep_plan_update_args args = EP_PLAN_UPDATE_ARGS_INIT;

    args.topk_idx = s->index;
    args.n_tokens = s->kind->n_tokens;
    CALL(ep_plan_update(s->plan, &args, s->stream));
    return 0;
}

/* A dispatch and a combine, launched repeatedly. */
static int replay(struct state *s, ep_status *ret_status)
{
    cudaGraphExec_t exec;

    atomic_store(s->scenario->victim_pid, (int)getpid());
    s->stream = s->group.stream;
    TRY(capture_begin(&s->group));
    if (s->kind->fault == UPDATED)
        TRY(update(s));
    for (int combines = 0; combines < 2; combines++) {
        TRY(call_operation(s, combines, false, ret_status));
        CALL(*ret_status);
    }
    TRY(capture_end(&s->group, &exec));
    for (int i = 0; i < REPLAYS; i++) {
        if (s->group.rank == s->victim && i == KILL_AT)
            kill(getpid(), SIGKILL);
        CUDA(cudaGraphLaunch(exec, s->group.stream));
    }
    *ret_status = ep_stream_sync(s->group.cuda, s->group.stream);
    CUDA(cudaGraphExecDestroy(exec));
    return 0;
}

static int check_status(struct state *s, ep_status status, double took)
{
    bool killed = dies_of(s->kind->fault);

    if (s->group.rank == 0)
        printf("%s: after %.0f ms: %s\n", s->kind->name, took, ep_last_error());
    TRY(expect_failed_rank(s->kind->combines ? "ep_combine" : "ep_dispatch", status,
                           killed                    ? EP_E_PEER_DEAD
                           : s->kind->fault == LEAVE ? EP_E_PEER_LEFT
                                                     : EP_E_TIMEOUT,
                           s->victim));
    if (s->group.rank != s->victim)
        EXPECT(took < group_slow * (TIMEOUT_MS + SLACK_MS), "after %.0f ms", took);
    return 0;
}

/* The experts of a token are spread over as many ranks as possible. */
static int make_plan(struct state *s)
{
    int experts = 840 / s->group.nranks * s->group.nranks, n = s->kind->n_tokens;
    ep_plan_info info = {.size = sizeof(info)};
    ep_plan_args args;
    int64_t *index = malloc((size_t)n * TOPK * sizeof(*index));

    EXPECT(index, "no memory for the routing");
    for (int i = 0; i < n * TOPK; i++)
        index[i] = (int64_t)(i / TOPK * 7 + i % TOPK * (experts / TOPK) + s->group.rank) % experts;
    args = args_plan(index, EP_I64, n, TOPK, experts);
    if (s->kind->fault == UPDATED)
        CALL(ep_plan_get_max_rows(s->group.cuda, &args, &args.max_recv_tokens));
    CALL(ep_plan_new(s->group.cuda, &args, &s->plan));
    CUDA(cudaMalloc(&s->index, (size_t)n * TOPK * sizeof(*index)));
    CUDA(cudaMemcpy(s->index, index, (size_t)n * TOPK * sizeof(*index), cudaMemcpyDefault));
    free(index);
    CALL(ep_plan_get_info(s->plan, &info));
    s->n_recv = info.out_rows;
    return 0;
}

static int make_buffers(struct state *s)
{
    size_t row = (size_t)s->kind->hidden * 2, rows = (size_t)s->n_recv, n = (size_t)s->kind->n_tokens;

    CUDA(cudaMalloc(&s->x, n * row));
    CUDA(cudaMemset(s->x, 0x3c, n * row));
    CUDA(cudaMalloc(&s->out, n * row));
    if (s->kind->ordinary)
        CUDA(cudaMalloc(&s->recv, (rows + 1) * row));
    else
        CALL(ep_alloc(s->group.cuda, (rows + 1) * row, &s->recv));
    return 0;
}

/* Once without a fault, so that staging is allocated and mapped. */
static int run_into_fault(struct state *s)
{
    ep_status status;
    double begin;

    TRY(make_plan(s));
    TRY(make_buffers(s));
    TRY(call_operation(s, false, true, &status));
    CALL(status);
    if (s->kind->combines) {
        TRY(call_operation(s, true, true, &status));
        CALL(status);
    }
    if (s->kind->fault == AMID)
        CALL(ep_cuda_set_sms(s->group.cuda, SLOW_SMS));
    /* A fault while another rank still waits for the first operations would be a fault of those. */
    TRY(group_barrier(&s->group));
    begin = now_ms();
    if (s->group.rank == s->victim)
        TRY(apply_fault(s));
    if (s->group.rank == s->victim && s->kind->fault == LEAVE)
        return leave(s), 0;
    if (s->kind->fault == ELSEWHERE)
        TRY(check_later(s, &status));
    else if (is_replayed(s->kind->fault))
        TRY(replay(s, &status));
    else
        TRY(call_operation(s, s->kind->combines, true, &status));
    if (s->kind->fault == AMID && status == EP_OK) {
        /* Kernels of a dead process may run for some ms more: then all that it had to send has arrived. */
        printf("%s: the rows of rank %d were complete; the next call reports the failure\n", s->kind->name, s->victim);
        begin = now_ms();
        TRY(call_operation(s, s->kind->combines, true, &status));
    }
    TRY(check_status(s, status, now_ms() - begin));
    ep_plan_free(s->plan);
    CUDA(cudaMemset(s->x, 0, (size_t)s->kind->n_tokens * (size_t)s->kind->hidden * 2));
    CUDA(cudaDeviceSynchronize());
    CUDA(cudaFree(s->x));
    CUDA(cudaFree(s->out));
    CUDA(cudaFree(s->index));
    if (s->kind->ordinary)
        CUDA(cudaFree(s->recv));
    return 0;
}

/* Does the group go on without the victim? */
static bool is_lost(enum fault fault)
{
    return fault == STOP || fault == LEAVE || dies_of(fault);
}

static int continue_group(struct state *s)
{
    struct group next = s->group;
    ep_boot boot;
    struct shape mine = {.n_tokens = s->kind->n_tokens < 1500 ? s->kind->n_tokens : 1500,
                         .hidden = 1024,
                         .topk = TOPK,
                         .dtype = EP_BF16,
                         .idx_type = EP_I64,
                         .symmetric = s->kind->ordinary ? 0 : AT_ALL,
                         .choice = true,
                         .seed = (uint64_t)s->group.rank + 1};
    int32_t failed[MAX_RANKS];
    int code;

    CALL(ep_comm_get_failed(s->group.cuda, failed));
    EXPECT(failed[s->victim] != EP_OK, "ep_comm_get_failed knows nothing of rank %d", s->victim);
    CALL(ep_boot_shm_join(s->scenario->next, s->group.rank, &boot));
    TRY(group_next(&boot, "cuda", TIMEOUT_MS, &next.cuda));
    TRY(group_next(&boot, "host", TIMEOUT_MS, &next.host));
    next.nranks = boot.nranks;
    mine.n_experts = 840 / next.nranks * next.nranks;
    code = case_run(&next, &mine);
    ep_comm_free(next.cuda);
    ep_comm_free(next.host);
    return code;
}

/* A host communicator with the same deadline: it, too, waits for the missing rank. */
static int open_host(struct state *s)
{
    ep_comm_config config = EP_COMM_CONFIG_INIT;
    ep_boot boot;

    config.backend = "host";
    config.timeout_ms = group_slow * TIMEOUT_MS;
    CALL(ep_boot_shm_join(s->scenario->second, s->group.rank, &boot));
    group_divide(&boot, &config);
    CALL(ep_comm_new(&boot, &config, &s->group.host));
    return 0;
}

static int run_rank(const ep_boot *boot, void *argument)
{
    const struct scenario *scenario = argument;
    struct state state = {.scenario = scenario, .kind = scenario->kind, .victim = boot->nranks - 1}, *s = &state;
    int code = group_open(boot, NULL, TIMEOUT_MS, &s->group);

    if (!code)
        code = open_host(s);
    if (!code)
        code = run_into_fault(s);
    if (!code && s->group.cuda)
        code = continue_group(s);
    /* A stopped rank does not end in any other way. */
    if (s->group.rank == 0 && scenario->kind->fault == STOP && atomic_load(scenario->victim_pid))
        kill((pid_t)atomic_load(scenario->victim_pid), SIGKILL);
    group_close(&s->group, code);
    return code;
}

static int run_scenario(struct options *options, const struct kind *kind)
{
    bool dies = kind->fault == STOP || dies_of(kind->fault);
    struct scenario scenario = {.kind = kind, .victim_pid = share(sizeof(*scenario.victim_pid))};
    struct launch launch = {.name = kind->name,
                            .ranks = options->ranks,
                            .seconds = 60,
                            .victim = dies ? options->ranks - 1 : -1,
                            .run = run_rank,
                            .argument = &scenario};
    int code = 1;

    if (!options_select(options, launch.name))
        return SKIPPED;
    if (scenario.victim_pid && ep_boot_shm_new(options->ranks, &scenario.second) == EP_OK &&
        ep_boot_shm_new(options->ranks - is_lost(kind->fault), &scenario.next) == EP_OK)
        code = launch_ranks(&launch);
    else
        test_report("%s", ep_last_error());
    ep_boot_shm_free(scenario.second);
    ep_boot_shm_free(scenario.next);
    printf("fault_cuda: %d ranks, %s: %s\n", options->ranks, launch.name, result_name(code));
    fflush(stdout);
    return code;
}

int main(int argc, char **argv)
{
    struct options options = {.ranks = 3};
    int code = SKIPPED;

    if (!options_read(argc, argv, 2, &options))
        return 2;
    for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++)
        code = merge_codes(code, run_scenario(&options, &kinds[i]));
    return options_code(&options, code);
}
