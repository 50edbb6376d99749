/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fault_cuda [--ranks N] [--only FAULT]: the last rank is killed, stopped, late, or stuck on its device while the
 * others dispatch. Each of these must get a status that names it within the deadline, with the CUDA context alive, and
 * go on in a new group. Exit 77 when there is no GPU.
 */
#include "case.h"

#include <epkit/cuda.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <unistd.h>

#define TIMEOUT_MS 1500
#define SLACK_MS 1500 /* beyond a deadline, on a busy machine */

enum fault { KILL, STOP, LATE, STUCK, N_FAULTS };
static const char *const fault_names[N_FAULTS] = {"kill", "stop", "late", "stuck"};

struct scene {
    ep_boot_shm *second;
    enum fault fault;
    _Atomic int *victim_pid; /* that all see */
};

struct state {
    struct group group;
    const struct scene *scene;
    int victim;
};

static const struct shape shape = {.n_tokens = 64,
                                   .hidden = 1024,
                                   .topk = 4,
                                   .n_experts = 840,
                                   .dtype = EP_BF16,
                                   .idx_type = EP_I64,
                                   .symmetric = true,
                                   .choice = true};

/* The victim's part before the call; returns in LATE and STUCK alone. */
static int suffer(struct state *s)
{
    static struct hold hold; /* which outlives a failure */
    cudaStream_t stuck;

    atomic_store(s->scene->victim_pid, (int)getpid());
    if (s->scene->fault == KILL)
        kill(getpid(), SIGKILL);
    if (s->scene->fault == STOP)
        kill(getpid(), SIGSTOP);
    if (s->scene->fault == LATE)
        sleep_ms(TIMEOUT_MS + TIMEOUT_MS / 3); /* late for the call, not for the new group */
    if (s->scene->fault == STUCK) {
        hold = (struct hold){.ms = 2 * TIMEOUT_MS};
        CUDA(cudaStreamCreateWithFlags(&stuck, cudaStreamNonBlocking));
        CALL(ep_cuda_set_stream(s->group.cuda, stuck));
        TRY(hold_stream(stuck, &hold));
    }
    return 0;
}

static int call_dispatch(struct state *s, ep_plan *plan, void *x, void *out, ep_status *ret_status)
{
    ep_dispatch_args args = EP_DISPATCH_ARGS_INIT;
    ep_plan_info info = {.size = sizeof(info)};

    CALL(ep_plan_get_info(plan, &info));
    args.x = x;
    args.dtype = EP_BF16;
    args.hidden = shape.hidden;
    args.recv_x = out;
    args.out_rows = info.out_rows;
    CALL(ep_dispatch(plan, &args, NULL));
    if (s->group.rank == s->victim)
        TRY(suffer(s));
    *ret_status = ep_dispatch(plan, &args, NULL);
    return 0;
}

static int check_status(struct state *s, ep_status status, double took)
{
    enum fault fault = s->scene->fault;

    if (s->group.rank == 0)
        printf("%s: after %.0f ms: %s\n", fault_names[fault], took, ep_last_error());
    TRY(expect_culprit("ep_dispatch", status, fault == KILL ? EP_E_PEER_DEAD : EP_E_TIMEOUT, s->victim));
    if (s->group.rank != s->victim)
        EXPECT(took < TIMEOUT_MS + SLACK_MS, "after %.0f ms", took);
    return 0;
}

static int meet_fault(struct state *s)
{
    ep_plan_args args = EP_PLAN_ARGS_INIT;
    ep_plan *plan = NULL;
    ep_status status;
    int64_t index[64 * 4];
    void *x, *out;
    double begin;

    args.topk_idx = index;
    args.idx_type = EP_I64;
    args.n_tokens = 64;
    args.topk = 4;
    args.n_experts = shape.n_experts / s->group.nranks * s->group.nranks;
    for (int i = 0; i < 64 * 4; i++)
        index[i] = (int64_t)(i * 7 + s->group.rank) % args.n_experts;
    CALL(ep_plan_new(s->group.cuda, &args, &plan));
    CUDA(cudaMalloc(&x, 64 * 2048));
    CUDA(cudaMemset(x, 0x3c, 64 * 2048));
    CALL(ep_alloc(s->group.cuda, (size_t)64 * 4 * 2048 * (size_t)s->group.nranks, &out));
    begin = now_ms();
    TRY(call_dispatch(s, plan, x, out, &status));
    TRY(check_status(s, status, now_ms() - begin));
    ep_plan_free(plan);
    CUDA(cudaMemset(x, 0, 64 * 2048));
    CUDA(cudaDeviceSynchronize());
    CUDA(cudaFree(x));
    return 0;
}

static int go_on(struct state *s)
{
    bool gone = s->scene->fault == KILL || s->scene->fault == STOP;
    struct group next = s->group;
    ep_comm_info info = {.size = sizeof(info)};
    struct shape mine = shape;
    int code;

    CALL(ep_comm_shrink(s->group.cuda, NULL, &next.cuda));
    CALL(ep_comm_shrink(s->group.host, NULL, &next.host));
    CALL(ep_comm_get_info(next.cuda, &info));
    EXPECT(info.nranks == s->group.nranks - (gone ? 1 : 0), "%d ranks in the new group", info.nranks);
    next.rank = info.rank;
    next.nranks = info.nranks;
    mine.seed = (uint64_t)s->group.rank + 1;
    mine.n_experts -= mine.n_experts % info.nranks;
    code = case_run(&next, &mine);
    ep_comm_free(next.cuda);
    ep_comm_free(next.host);
    return code;
}

/* The host backend's, with the same deadline: it, too, waits for the rank that does not come. */
static int open_host(struct state *s)
{
    ep_comm_config config = EP_COMM_CONFIG_INIT;
    ep_boot boot;

    config.backend = "host";
    config.timeout_ms = TIMEOUT_MS;
    CALL(ep_boot_shm_join(s->scene->second, s->group.rank, &boot));
    CALL(ep_comm_new(&boot, &config, &s->group.host));
    return 0;
}

static int run_rank(const ep_boot *boot, void *argument)
{
    const struct scene *scene = argument;
    struct state state = {.scene = scene, .victim = boot->nranks - 1}, *s = &state;
    int code = group_open(boot, NULL, TIMEOUT_MS, &s->group);

    if (!code)
        code = open_host(s);
    if (!code)
        code = meet_fault(s);
    if (!code)
        code = go_on(s);
    /* A rank that is stopped ends in no other way. */
    if (s->group.rank == 0 && scene->fault == STOP && atomic_load(scene->victim_pid))
        kill((pid_t)atomic_load(scene->victim_pid), SIGKILL);
    group_close(&s->group, code);
    return code;
}

static int run_scene(struct options *options, enum fault fault)
{
    struct scene scene = {.fault = fault, .victim_pid = share(sizeof(*scene.victim_pid))};
    struct launch launch = {.name = fault_names[fault],
                            .ranks = options->ranks,
                            .seconds = 60,
                            .victim = fault == KILL || fault == STOP ? options->ranks - 1 : -1,
                            .run = run_rank,
                            .argument = &scene};
    int code = 1;

    if (!options_want(options, launch.name))
        return SKIPPED;
    if (scene.victim_pid && ep_boot_shm_new(options->ranks, &scene.second) == EP_OK)
        code = launch_ranks(&launch);
    else
        test_say("%s", ep_last_error());
    ep_boot_shm_free(scene.second);
    printf("fault_cuda: %d ranks, %s: %s\n", options->ranks, launch.name, verdict_of(code));
    fflush(stdout);
    return code;
}

int main(int argc, char **argv)
{
    struct options options = {.ranks = 3};
    int code = SKIPPED;

    if (!options_read(argc, argv, 2, &options))
        return 2;
    for (int fault = 0; fault < N_FAULTS; fault++)
        code = worse_of(code, run_scene(&options, (enum fault)fault));
    return options_code(&options, code);
}
