/* SPDX-License-Identifier: Apache-2.0 */
/*
 * regroup_cuda [--ranks N] [--nodes N [--network NAME]] [--slow N] [--only SCENARIO] [--rounds N] [--seed N]: other
 * members of a communicator, and the same captured graph. Of the points of kill.c every N-th one is tried, from number
 * --seed on.
 *
 * A graph of a decode step (low-latency dispatch, a copy for the experts, combine, barrier) is captured once by each
 * process, and launched again and again with new inputs and checked outputs. Ranks are killed, before a launch, between
 * it and its kernels, or while the others wait. The others get a status that names the rank, or mask it; go on without
 * it, in the same communicator; and with a new process in its place. In between there are plans, compared with the host
 * backend; in one scenario there is also a graph of operations on plans, in which ranks die then. Also: what a graph of
 * former members does, routing to absent ranks, and a rank that is left out and lives; and ranks that die or are
 * stopped at each point (kill.c).
 *
 * Each rank is a supervisor, which uses no CUDA and starts the processes of its slot. Group 2 * n has all ranks, group
 * 2 * n + 1 lacks the n-th victims: one, or where nodes have several ranks all of a node, or those of one place. Exit
 * 77 if there is no GPU.
 */
#include "regroup_cuda.h"

#include "case.h"

#include <dirent.h>
#include <epkit/cuda.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    SPARE = 16 << 20, /* bytes of GPU memory that the driver may need meanwhile */
    FLAT_FROM = 4     /* group from which on nothing may grow */
};

struct start {
    const struct scenario *scenario;
    struct page *page;
    const struct options *options;
};

static int ranks_per_node(int nranks)
{
    return group_division.nodes > 1 ? nranks / group_division.nodes : nranks;
}

/* Nodes with several ranks: all that are left have members at the same places. */
static bool has_full_nodes(int nranks)
{
    return group_division.nodes > 1 && ranks_per_node(nranks) > 1;
}

static unsigned victims_of(const struct state *s, int group)
{
    int turn = group / 2, nranks = s->group.nranks, per_node = ranks_per_node(nranks);
    unsigned victims = 0;

    if (!has_full_nodes(nranks))
        return s->scenario->lowest ? 1 : 1u << (1 + turn % (nranks - 1));
    for (int rank = 0; rank < nranks; rank++) {
        bool of_node = rank / per_node == (s->scenario->lowest ? 0 : group_division.nodes - 1);

        victims |= (unsigned)(turn % 2 ? rank % per_node == per_node - 1 : of_node) << rank;
    }
    return victims;
}

static unsigned members_of(const struct state *s, int group)
{
    return group % 2 ? all_ranks(s) & ~victims_of(s, group) : all_ranks(s);
}

/* --- groups ------------------------------------------------------------------------------------------------------- */

void reset(struct regroup *shared, int number)
{
    struct regroup_group *old = &shared->groups[(number + REGROUP_GROUPS / 2) % REGROUP_GROUPS];

    atomic_store(&old->members, 0);
    atomic_store(&old->failure, 0);
    for (int rank = 0; rank < REGROUP_RANKS; rank++)
        atomic_store(&old->rounds[rank], 0);
}

ep_status make(const struct state *s, bool cuda, int number, unsigned members, ep_comm **comm)
{
    struct regroup *shared = cuda ? &s->page->cuda : &s->page->host;
    ep_comm_config config = EP_COMM_CONFIG_INIT;
    int timeout_ms = s->scenario->timeout_ms ? s->scenario->timeout_ms : TIMEOUT_MS;
    ep_boot all = {.nranks = s->group.nranks};
    struct regroup_boot boot;
    ep_status status;

    regroup_agree(shared, number % REGROUP_GROUPS, members);
    regroup_boot(shared, number % REGROUP_GROUPS, s->group.rank, s->group.nranks, &boot);
    if (cuda)
        kill_at_gathers(&boot.boot);
    config.backend = cuda ? "cuda" : "host";
    config.flags = s->scenario->comm_flags;
    config.timeout_ms = group_slow * (cuda ? timeout_ms : 2 * timeout_ms + 20000);
    config.ranks_per_node = config.slots = s->group.nranks;
    config.slot = s->group.rank;
    group_divide(&all, &config);
    boot.boot.network = all.network;
    status = *comm ? ep_comm_regroup(*comm, &boot.boot) : ep_comm_new(&boot.boot, &config, comm);
    if (status == EP_OK && !(members & ((1u << s->group.rank) - 1)))
        reset(shared, number);
    return status;
}

int warm_up(const struct state *s)
{
    int n = 0;

    if (cudaGetDeviceCount(&n) != cudaSuccess || n == 0)
        return 0;
    CUDA(cudaSetDevice(s->group.rank % n));
    CUDA(cudaFree(NULL));
    return 0;
}

int join(struct state *s, int number, unsigned members)
{
    ep_status status;

    TRY(warm_up(s));
    CALL(make(s, false, number, members, &s->group.host));
    atomic_store(&s->page->ready[s->group.rank], number);
    s->members = members;
    status = make(s, true, number, members, &s->group.cuda);
    if (status == EP_E_UNSUPPORTED && number == 0) {
        test_report("%s", ep_last_error());
        return SKIPPED;
    }
    CALL(status);
    CALL(ep_cuda_get_device(s->group.cuda, &s->group.device, NULL));
    CUDA(cudaSetDevice(s->group.device));
    CUDA(cudaStreamCreateWithFlags(&s->group.stream, cudaStreamNonBlocking));
    return model_open(&s->group, TOKENS, HIDDEN, s->scenario->ll_flags, NULL, &s->model);
}

int change(struct state *s, int number, unsigned members)
{
    double begin, took;

    CALL(make(s, false, number, members, &s->group.host));
    for (int rank = 0; rank < s->group.nranks; rank++)
        if ((members & ~s->members) >> rank & 1)
            TRY(await(&s->page->ready[rank], number, STEP_MS, "a new process"));
    s->members = members;
    begin = now_ms();
    CALL(make(s, true, number, members, &s->group.cuda));
    CALL(ep_ll_renew(s->model.ll));
    if (s->scenario->steps)
        TRY(step_renew(&s->step));
    took = now_ms() - begin;
    s->up_ms = took > s->up_ms ? took : s->up_ms;
    return 0;
}

/* --- the graph ---------------------------------------------------------------------------------------------------- */

static int capture(struct state *s)
{
    size_t bytes = (size_t)(MODEL_LOCAL * s->group.nranks * TOKENS * HIDDEN * 2);
    struct model *m = &s->model;

    CUDA(cudaMalloc(&s->rows, bytes));
    /* With these a kernel waits for each rank by itself. */
    if (s->scenario->plans) {
        CUDA(cudaMalloc((void **)&m->waited, sizeof(*m->waited) * (size_t)s->group.nranks));
        CUDA(cudaMemset(m->waited, 0, sizeof(*m->waited) * (size_t)s->group.nranks));
    }
    TRY(capture_begin(&s->group));
    CALL(model_dispatch(m, TEST_ASYNC));
    CUDA(cudaMemcpyAsync(s->rows, m->recv, bytes, cudaMemcpyDeviceToDevice, s->group.stream));
    CUDA(cudaMemcpyAsync(m->recv, s->rows, bytes, cudaMemcpyDeviceToDevice, s->group.stream));
    CALL(model_combine(m, TEST_ASYNC));
    /* With masks the communicator's own operations would not go on without a rank. */
    if (!s->scenario->ll_flags)
        CALL(ep_barrier_on(s->group.cuda, s->group.stream));
    else
        CALL(ep_ll_barrier(m->ll, s->group.stream));
    return capture_end(&s->group, &s->graph);
}

int launch(struct state *s, ep_status *ret_status)
{
    CUDA(cudaGraphLaunch(s->graph, s->group.stream));
    *ret_status = ep_stream_sync(s->group.cuda, s->group.stream);
    return 0;
}

int replay(struct state *s, int rounds, unsigned members)
{
    ep_status status;

    for (int i = 0; i < rounds; i++) {
        TRY(model_load(&s->model, s->round++));
        TRY(launch(s, &status));
        CALL(status);
        TRY(model_check(&s->model, members, members));
        if (s->scenario->steps)
            TRY(step_run(&s->step, (uint64_t)s->round));
    }
    return 0;
}

/* A layout that the device makes: one token for each rank, of which those of absent ranks are dropped. */
static int check_layout(const struct state *s, unsigned members)
{
    int32_t index[MAX_RANKS], counts[MAX_RANKS], *device;
    ep_layout layout = EP_LAYOUT_INIT;
    ep_plan_args args;

    for (int rank = 0; rank < s->group.nranks; rank++)
        index[rank] = rank;
    CUDA(cudaMalloc((void **)&device, 2 * sizeof(index)));
    CUDA(cudaMemcpy(device, index, sizeof(index), cudaMemcpyDefault));
    args = args_plan(device, EP_I32, s->group.nranks, 1, s->group.nranks);
    layout.tokens_per_rank = device + MAX_RANKS;
    args.stream = s->group.stream;
    CALL(ep_plan_layout(s->group.cuda, &args, &layout));
    CALL(ep_stream_sync(s->group.cuda, s->group.stream));
    CUDA(cudaMemcpy(counts, layout.tokens_per_rank, sizeof(counts), cudaMemcpyDefault));
    for (int rank = 0; rank < s->group.nranks; rank++)
        EXPECT(counts[rank] == (int)(members >> rank & 1), "%d tokens for rank %d", counts[rank], rank);
    CUDA(cudaFree(device));
    return 0;
}

/* The same with a plan, each time in another way. */
static int run_plans(const struct state *s, int number)
{
    struct shape shape = {.n_tokens = 64 + 300 * (number % 3),
                          .hidden = 1024,
                          .topk = 4,
                          .n_experts = 16 * s->group.nranks,
                          .dtype = EP_BF16,
                          .idx_type = number % 2 ? EP_I32 : EP_I64,
                          .expanded = number % 4 >= 2,
                          .alignment = number % 4 >= 2 ? 8 : 1,
                          .fixed_capacity = number % 5 == 1,
                          .symmetric = number % 3 ? AT_ALL : 0,
                          .choice = true,
                          .seed = (uint64_t)(number * MAX_RANKS + s->group.rank)};

    TRY(check_layout(s, members_of(s, number)));
    return case_run(&s->group, &shape) ? FAILED : 0;
}

/* --- losses and new processes ------------------------------------------------------------------------------------- */

_Noreturn void die(struct state *s, int number)
{
    atomic_store(&s->page->died[s->group.rank], number + 1);
    kill(getpid(), SIGKILL);
    _exit(FAILED);
}

/* The victims do not return. */
static int lose(struct state *s, int number)
{
    int way = number / 2 % 3, victim = 0;
    unsigned victims = victims_of(s, number), left = members_of(s, number + 1);
    bool dies = victims >> s->group.rank & 1, steps = s->scenario->steps;
    ep_status status = EP_OK;
    double begin, took;

    TRY(model_load(&s->model, s->round++));
    TRY(group_barrier(&s->group));
    if (dies && way == 1)
        CUDA(cudaGraphLaunch(steps ? s->step.graph : s->graph, s->group.stream));
    if (dies && way == 2)
        sleep_ms(WAIT_MS);
    if (dies)
        die(s, number);
    begin = now_ms();
    /* All that it had to send may have arrived: then the next launch misses it. */
    for (int i = 0; i < 3 && status == EP_OK; i++)
        TRY(steps ? step_launch(&s->step, &status) : launch(s, &status));
    took = now_ms() - begin;
    s->down_ms = took > s->down_ms ? took : s->down_ms;
    EXPECT(took < group_slow * (TIMEOUT_MS + SLACK_MS), "after %.0f ms", took);
    while (!(victims >> victim & 1) || ((victims >> victim) - 1 && !names_rank(ep_last_error(), victim)))
        victim++;
    if (!s->scenario->ll_flags)
        return expect_failed_rank("the graph", status, EP_E_PEER_DEAD, victim);
    CALL(status);
    s->round++;
    return replay(s, 2, left);
}

static int count_descriptors(void)
{
    DIR *folder = opendir("/proc/self/fd");
    int n = 0;

    while (folder && readdir(folder))
        n++;
    if (folder)
        closedir(folder);
    return n;
}

/* What this process holds, and all of them on the GPU. Of rank 0, which is in all groups; staging of plans grows. */
static int check_flat(const struct state *s, int number, int last)
{
    static ep_comm_info before = EP_COMM_INFO_INIT;
    static int descriptors;
    static size_t free_before;
    ep_comm_info now = EP_COMM_INFO_INIT;
    size_t free_now, all;

    if (s->group.rank || s->scenario->lowest || s->scenario->plans || (number != FLAT_FROM && number != last))
        return 0;
    CALL(ep_comm_get_info(s->group.cuda, &now));
    CUDA(cudaMemGetInfo(&free_now, &all));
    if (number == FLAT_FROM) {
        before = now;
        free_before = free_now;
        descriptors = count_descriptors();
        return 0;
    }
    EXPECT(count_descriptors() == descriptors, "%d descriptors, before %d", count_descriptors(), descriptors);
    EXPECT(now.library_bytes == before.library_bytes, "%zu bytes of the library, before %zu", now.library_bytes,
           before.library_bytes);
    EXPECT(free_now + SPARE > free_before, "%zu bytes of the GPU are free, before %zu", free_now, free_before);
    printf("%s: %d groups, %d launches of one graph: longest times: %.0f ms until a dead rank was reported, %.1f ms to "
           "make a group and renew the ep_ll; %d descriptors, %zu bytes of the library; %zd bytes of the GPU more\n",
           s->scenario->name, last + 1, (last + 1) * s->scenario->rounds, s->down_ms, s->up_ms, descriptors,
           now.library_bytes, (ssize_t)(free_before - free_now));
    fflush(stdout);
    return 0;
}

int open_graphs(struct state *s)
{
    TRY(capture(s));
    return s->scenario->steps ? step_open(&s->group, &s->step) : 0;
}

int begin(struct state *s, int number)
{
    TRY(join(s, number, all_ranks(s)));
    return open_graphs(s);
}

/* From group `number` on. */
static int take_part(struct state *s, int number)
{
    int last = 2 * s->scenario->losses;

    s->round = number * 1000;
    TRY(begin(s, number));
    for (;; number++) {
        unsigned members = members_of(s, number);

        test_set_context("rank %d of %d, %s, group %d", s->group.rank, s->group.nranks, s->scenario->name, number);
        s->round = number * 1000;
        TRY(replay(s, s->scenario->rounds, members));
        if (s->scenario->plans && (s->scenario->comm_flags & EP_COMM_DROP_ABSENT))
            TRY(run_plans(s, number));
        if (last > FLAT_FROM)
            TRY(check_flat(s, number, last));
        if (number == last)
            return 0;
        if (number % 2 == 0)
            TRY(lose(s, number));
        TRY(change(s, number + 1, members_of(s, number + 1)));
    }
}

/* --- other scenarios ---------------------------------------------------------------------------------------------- */

/* With an operation on a plan that has its counts. */
static int capture_exact(const struct state *s, ep_plan *plan, cudaGraphExec_t *ret_graph)
{
    ep_plan_info info = EP_PLAN_INFO_INIT;
    ep_dispatch_args args;

    CALL(ep_plan_get_info(plan, &info));
    args = args_dispatch(EP_BF16, HIDDEN, s->model.x, s->model.recv, info.out_rows);
    TRY(capture_begin(&s->group));
    CALL(ep_dispatch(plan, &args, s->group.stream));
    return capture_end(&s->group, ret_graph);
}

/* What is refused: a graph of former members, and routing to ranks that are absent. */
static int refuse(struct state *s, int number)
{
    int last = s->group.nranks - 1;
    unsigned all = all_ranks(s), left = all & ~(1u << last);
    static const int32_t index[2] = {0, 0};
    int32_t absent[2] = {0, last};
    ep_plan_args args = args_plan(index, EP_I32, 2, 1, s->group.nranks);
    cudaGraphExec_t exact;
    ep_plan *before, *plan;
    ep_status status;

    TRY(begin(s, number));
    TRY(replay(s, 2, all));
    CALL(ep_plan_new(s->group.cuda, &args, &before));
    TRY(capture_exact(s, before, &exact));
    TRY(group_barrier(&s->group));
    if (s->group.rank == last)
        die(s, 0);
    CALL(make(s, true, 1, left, &s->group.cuda));
    CALL(make(s, false, 1, left, &s->group.host));
    TRY(model_load(&s->model, 100));
    TRY(launch(s, &status));
    TRY(expect_status("a graph of former members", status, EP_E_STATE, "ep_ll_renew"));
    CALL(make(s, true, 2, left, &s->group.cuda));
    CUDA(cudaGraphLaunch(exact, s->group.stream));
    TRY(expect_status("a graph with a plan of exact counts", ep_stream_sync(s->group.cuda, s->group.stream), EP_E_STATE,
                      "captured again"));
    CUDA(cudaGraphExecDestroy(exact));
    CALL(make(s, true, 3, left, &s->group.cuda));
    CALL(ep_ll_renew(s->model.ll));
    TRY(launch(s, &status));
    TRY(expect_status("a graph with choices of an absent rank", status, EP_E_ROUTING, NULL));
    CALL(make(s, true, 4, left, &s->group.cuda));
    args.topk_idx = absent;
    TRY(expect_status("ep_plan_new", ep_plan_new(s->group.cuda, &args, &plan), EP_E_ROUTING, "which is absent"));
    args.topk_idx = index;
    CALL(ep_plan_new(s->group.cuda, &args, &plan));
    TRY(expect_status("ep_plan_settle", ep_plan_settle(before), EP_E_STATE, "the members have changed"));
    ep_plan_free(before);
    ep_plan_free(plan);
    CALL(ep_comm_barrier(s->group.cuda));
    return 0;
}

int reach_nobody(struct state *s, ep_status expected)
{
    ep_status status;

    TRY(launch(s, &status));
    TRY(expect_status("a graph of a rank that is left out", status, expected, NULL));
    TRY(step_launch(&s->step, &status));
    TRY(expect_status("its graph of operations on plans", status, expected, NULL));
    CUDA(cudaStreamSynchronize(s->group.stream));
    return 0;
}

/*
 * The rank that is left out, first while it waits in a graph: it learns it, and goes on launching that, which reaches
 * nobody. It comes back as a new one, is stopped while it is left out again, and comes back with what it has.
 */
static int be_left_out(struct state *s, unsigned all)
{
    bool is_told = group_division.nodes < 2 || !group_division.network; /* on the host of the others */
    ep_status status, expected = is_told ? EP_E_EXCLUDED : EP_E_PEER_LEFT;

    TRY(model_load(&s->model, s->round++));
    TRY(launch(s, &status));
    TRY(expect_status("a graph of a rank that is left out", status, expected, is_told ? "goes on with other" : NULL));
    while (!atomic_load(&s->page->step))
        TRY(reach_nobody(s, expected));
    TRY(expect_status("ep_comm_barrier", ep_comm_barrier(s->group.cuda), expected, NULL));
    step_close(&s->step);
    model_close(&s->model);
    CUDA(cudaGraphExecDestroy(s->graph));
    CUDA(cudaFree(s->rows));
    group_close(&s->group, 0);
    s->round = 500;
    TRY(begin(s, 2));
    TRY(replay(s, 5, all));
    if (group_division.nodes > 1)
        return 0;
    atomic_store(&s->page->stopped, getpid());
    kill(getpid(), SIGSTOP);
    TRY(await(&s->page->step, s->group.nranks + 1, STEP_MS, "the others"));
    TRY(expect_status("ep_comm_async_error", ep_comm_async_error(s->group.cuda), EP_E_EXCLUDED, NULL));
    atomic_store(&s->page->ready[s->group.rank], 6);
    s->round = 1000;
    TRY(change(s, 6, all));
    return replay(s, 5, all);
}

/* A rank that is left out, and lives, writes nothing any more; the others go on if it can let go of their memory. */
static int leave_out(struct state *s, int number)
{
    int last = s->group.nranks - 1;
    unsigned all = all_ranks(s), left = all & ~(1u << last);
    char says[64];

    TRY(begin(s, number));
    TRY(replay(s, 2, all));
    if (s->group.rank == last)
        return be_left_out(s, all);
    sleep_ms(10 * WAIT_MS);
    TRY(change(s, 1, left));
    TRY(replay(s, 20, left));
    TRY(group_barrier(&s->group));
    atomic_store(&s->page->step, 1);
    TRY(change(s, 2, all));
    s->round = 500;
    TRY(replay(s, 5, all));
    /* Ranks of other nodes have no memory mapped that they could hold. */
    if (group_division.nodes > 1)
        return 0;
    TRY(await(&s->page->stopped, 1, STEP_MS, "the rank that is stopped"));
    sleep_ms(10 * WAIT_MS);
    snprintf(says, sizeof(says), "rank %d lives, and has not let go", last);
    TRY(expect_status("ep_comm_regroup", make(s, true, 3, left, &s->group.cuda), EP_E_STATE, says));
    atomic_fetch_add(&s->page->step, 1);
    TRY(await(&s->page->step, s->group.nranks, STEP_MS, "the others"));
    kill(atomic_load(&s->page->stopped), SIGCONT);
    TRY(change(s, 5, left));
    TRY(replay(s, 5, left));
    TRY(group_barrier(&s->group));
    atomic_store(&s->page->step, s->group.nranks + 1);
    s->round = 1000;
    TRY(change(s, 6, all));
    return replay(s, 5, all);
}

static const struct scenario scenarios[] = {
    {.name = "plain", .comm_flags = EP_COMM_DROP_ABSENT, .losses = 20, .rounds = 25},
    {.name = "plans", .comm_flags = EP_COMM_DROP_ABSENT, .losses = 4, .rounds = 2, .plans = true},
    {.name = "steps", .comm_flags = EP_COMM_DROP_ABSENT, .losses = 20, .rounds = 10, .steps = true},
    {.name = "masked", .ll_flags = EP_LL_MASK_DEAD, .losses = 4, .rounds = 10},
    {.name = "lowest", .comm_flags = EP_COMM_DROP_ABSENT, .losses = 3, .rounds = 5, .lowest = true, .plans = true},
    {.name = "refused", .run = refuse},
    {.name = "left-out", .comm_flags = EP_COMM_DROP_ABSENT, .steps = true, .run = leave_out},
    {.name = "unrenewed", .comm_flags = EP_COMM_DROP_ABSENT, .steps = true, .one_node = true, .run = run_unrenewed},
    {.name = "points",
     .comm_flags = EP_COMM_DROP_ABSENT,
     .steps = true,
     .timeout_ms = 1500,
     .replaces = true,
     .one_node = true,
     .run = run_points},
};

/* --- processes ---------------------------------------------------------------------------------------------------- */

static int run_process(const struct start *start, int rank, int number)
{
    struct state state = {.scenario = start->scenario,
                          .page = start->page,
                          .every = (uint64_t)start->options->rounds,
                          .first = start->options->seed},
                 *s = &state;
    int code;

    s->group.rank = rank;
    s->group.nranks = start->options->ranks;
    s->model.group = &s->group;
    test_set_context("rank %d of %d, %s", rank, start->options->ranks, s->scenario->name);
    code = s->scenario->run ? s->scenario->run(s, number) : take_part(s, number);
    if (!code)
        code = group_barrier(&s->group);
    step_close(&s->step);
    model_close(&s->model);
    group_close(&s->group, code);
    return code;
}

/* Starts the processes of a slot, one after the other. */
static int supervise(const ep_boot *boot, void *argument)
{
    const struct start *start = argument;
    const _Atomic int *died = &start->page->died[boot->rank];
    int number = 0, status;

    for (;;) {
        pid_t pid = fork();

        if (pid == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            _exit(run_process(start, boot->rank, number));
        }
        EXPECT(pid > 0 && waitpid(pid, &status, 0) == pid, "no process");
        if (WIFEXITED(status))
            return WEXITSTATUS(status);
        EXPECT(WTERMSIG(status) == SIGKILL && *died > number, "rank %d was killed by signal %d", boot->rank,
               WTERMSIG(status));
        if (start->scenario->run && !start->scenario->replaces)
            return 0;
        if (start->scenario->replaces)
            note_end(start->page, boot->rank);
        number = *died + 1;
    }
}

int main(int argc, char **argv)
{
    struct options options = {.ranks = 4, .rounds = 1};
    int code = SKIPPED;

    if (!options_read(argc, argv, 2, &options))
        return 2;
    for (size_t i = 0; i < sizeof(scenarios) / sizeof(scenarios[0]); i++) {
        struct start start = {.scenario = &scenarios[i], .page = share(sizeof(*start.page)), .options = &options};
        struct launch launch = {.name = scenarios[i].name,
                                .ranks = options.ranks,
                                .seconds = scenarios[i].replaces ? 1000 : 200,
                                .victim = -1,
                                .run = supervise,
                                .argument = &start};
        int result;

        if (!options_select(&options, launch.name) || !start.page ||
            (scenarios[i].one_node && group_division.nodes > 1))
            continue;
        if (scenarios[i].replaces && !has_points()) {
            test_report("%s: the module that is loaded has no points: build the target epkit-cuda-points, and put the "
                        "folder tests/cuda/points of the build first in LD_LIBRARY_PATH",
                        launch.name);
            if (options.only)
                return FAILED;
            continue;
        }
        /* These leave out the last rank alone. */
        if (start.scenario->run && has_full_nodes(options.ranks))
            continue;
        result = launch_ranks(&launch);
        printf("regroup_cuda: %d ranks, %s: %s\n", options.ranks, launch.name, result_name(result));
        fflush(stdout);
        code = merge_codes(code, result);
    }
    return options_code(&options, code);
}
