/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ranks that are killed or stopped at each point: of a kernel in a captured graph, after calls of the CUDA runtime in
 * calls of the library, at all-gathers of a bootstrap (points.h). The others go on without the rank, in the same
 * graphs, and then with a new process in its place, or with itself: a rank that is stopped at a point is left out,
 * goes on while the others wait for it to let go, learns it, and reaches nobody any more. Outputs are compared with
 * each set of members.
 *
 * A cell takes four numbers of groups. From 4 * n on all are members; in 4 * n + 1 and 4 * n + 2 members change where
 * somebody dies in that; 4 * n + 3 lacks the victim.
 */
#include "points.h"
#include "regroup_cuda.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum where { IN_KERNEL, IN_CALL, IN_REGROUP, IN_RENEWAL, IN_CREATION_GATHER, IN_CREATION_CALL };
enum { CELL_GROUPS = 4, PARTS = 4 /* positions among all-gathers or calls of the runtime, at most */ };

struct cell {
    char name[64];
    enum where where;
    const struct kernel_point *point; /* IN_KERNEL */
    int call;                         /* IN_CALL: index in `calls` */
    int part, parts;                  /* the part-th of `parts` positions, from the first to the last one */
    bool stop;
};

/* --- calls -------------------------------------------------------------------------------------------------------- */

struct plans {
    ep_plan *exact, *settled, *updated;
};

static ep_status new_plan(struct state *s, int64_t max_recv_tokens, ep_plan **ret_plan)
{
    ep_plan_args args = args_plan(s->model.index, EP_I64, s->model.n_tokens, MODEL_TOPK, MODEL_LOCAL * s->group.nranks);

    args.max_recv_tokens = max_recv_tokens;
    args.stream = s->group.stream;
    return ep_plan_new(s->group.cuda, &args, ret_plan);
}

static ep_status call_new(struct state *s, struct plans *plans)
{
    return new_plan(s, 0, &plans->exact);
}

static ep_status call_dispatch(struct state *s, struct plans *plans)
{
    ep_plan_info info = EP_PLAN_INFO_INIT;
    ep_dispatch_args args;
    ep_status status = ep_plan_get_info(plans->exact, &info);

    args = args_dispatch(EP_BF16, HIDDEN, s->model.x, s->rows, info.out_rows);
    return status == EP_OK ? ep_dispatch(plans->exact, &args, s->group.stream) : status;
}

static ep_status call_combine(struct state *s, struct plans *plans)
{
    ep_combine_args args = args_combine(HIDDEN, s->rows, s->model.out);

    return ep_combine(plans->exact, &args, s->group.stream);
}

static ep_status call_new_fixed(struct state *s, struct plans *plans)
{
    return new_plan(s, s->group.nranks * TOKENS, &plans->settled);
}

static ep_status call_settle(struct state *s, struct plans *plans)
{
    (void)s;
    return ep_plan_settle(plans->settled);
}

static ep_status call_update(struct state *s, struct plans *plans)
{
    ep_plan_update_args args = EP_PLAN_UPDATE_ARGS_INIT;
    ep_status status = new_plan(s, s->group.nranks * TOKENS, &plans->updated);

    args.topk_idx = s->model.index;
    args.n_tokens = s->model.n_tokens;
    return status == EP_OK ? ep_plan_update(plans->updated, &args, s->group.stream) : status;
}

static ep_status call_ll_dispatch(struct state *s, struct plans *plans)
{
    (void)plans;
    return model_dispatch(&s->model, EP_LL_RECV_HOOK | TEST_ASYNC);
}

static ep_status call_ll_wait(struct state *s, struct plans *plans)
{
    (void)plans;
    return model_finish(&s->model);
}

static ep_status call_ll_combine(struct state *s, struct plans *plans)
{
    (void)plans;
    return model_combine(&s->model, TEST_ASYNC);
}

static ep_status call_sync(struct state *s, struct plans *plans)
{
    (void)plans;
    return ep_stream_sync(s->group.cuda, s->group.stream);
}

static const struct {
    const char *name;
    ep_status (*make)(struct state *s, struct plans *plans);
} calls[] = {{"ep_plan_new", call_new},
             {"ep_dispatch", call_dispatch},
             {"ep_combine", call_combine},
             {"ep_plan_new of fixed capacity", call_new_fixed},
             {"ep_plan_settle", call_settle},
             {"ep_plan_update", call_update},
             {"ep_ll_dispatch", call_ll_dispatch},
             {"ep_ll_finish", call_ll_wait},
             {"ep_ll_combine", call_ll_combine},
             {"ep_stream_sync", call_sync}};
enum { CALLS = sizeof(calls) / sizeof(calls[0]) };

/* --- the cells ---------------------------------------------------------------------------------------------------- */

static bool is_in_creation(const struct cell *cell)
{
    return cell->where == IN_CREATION_GATHER || cell->where == IN_CREATION_CALL;
}

static const struct {
    const char *name;
    enum where where;
    int parts, stops; /* the last `stops` positions are also for a rank that is stopped */
} changes[] = {{"all-gather of ep_comm_regroup", IN_REGROUP, PARTS, 2},
               {"ep_ll_renew", IN_RENEWAL, 3, 1},
               {"all-gather of ep_comm_new", IN_CREATION_GATHER, PARTS, 0},
               {"ep_comm_new, ep_ll_new", IN_CREATION_CALL, PARTS, 0}};

/* Is it the cell that is looked for? `i` counts down. */
static bool is_it(int *i, const char *name, struct cell cell, struct cell *ret_cell)
{
    if ((*i)-- != 0)
        return false;
    *ret_cell = cell;
    snprintf(ret_cell->name, sizeof(ret_cell->name), "%s %d of %d, %s", name, cell.part + 1, cell.parts,
             cell.stop ? "stopped" : "killed");
    return true;
}

static bool cell_at(int i, struct cell *ret_cell)
{
    struct cell cell = {.parts = 1};

    for (int at = 0; (cell.point = ep_cuda_point_at(at)); at++)
        for (int stop = 0; stop < 2; stop++) {
            cell.stop = stop;
            if (is_it(&i, cell.point->name, cell, ret_cell))
                return true;
        }
    cell.where = IN_CALL;
    for (cell.call = 0; cell.call < CALLS; cell.call++)
        for (int at = 0; at < 3; at++) {
            cell.parts = 2;
            cell.part = at > 0;
            cell.stop = at > 1;
            if (is_it(&i, calls[cell.call].name, cell, ret_cell))
                return true;
        }
    for (size_t change = 0; change < sizeof(changes) / sizeof(changes[0]); change++)
        for (int at = 0; at < changes[change].parts + changes[change].stops; at++) {
            cell.where = changes[change].where;
            cell.parts = changes[change].parts;
            cell.stop = at >= cell.parts;
            cell.part = cell.stop ? at - changes[change].stops : at;
            if (is_it(&i, changes[change].name, cell, ret_cell))
                return true;
        }
    return false;
}

/* That part of n positions, which are counted from 1 on. */
static int position(const struct cell *cell, int n)
{
    return n > 1 && cell->parts > 1 ? 1 + (n - 1) * cell->part / (cell->parts - 1) : 1;
}

/* --- the victim --------------------------------------------------------------------------------------------------- */

/* One per process, for callbacks without an argument. */
static struct {
    struct state *s;
    bool stop;
    int next; /* killed: the group of the next process */
    int base; /* of the cell */
    bool done;
    int calls[CALLS]; /* calls of the CUDA runtime in each, when it was made last */
    ep_boot boot;
    int gather, gathers; /* the all-gather before which it suffers, 0: none; how many there were */
} victim;

static int timeout_ms(const struct state *s)
{
    return group_slow * s->scenario->timeout_ms;
}

/* Stopped: returns when the process goes on. */
static void suffer(void)
{
    struct page *page = victim.s->page;

    victim.done = true;
    if (!victim.stop) {
        atomic_store(&page->died[victim.s->group.rank], victim.next - 1);
        kill(getpid(), SIGKILL);
    }
    atomic_store(&page->stopped, getpid());
    kill(getpid(), SIGSTOP);
    while (atomic_load(&page->resumed) <= victim.base)
        sleep_ms(1);
}

/* Where it has not come to the place: there are fewer calls than when they were counted. */
static void suffer_at_last(void)
{
    if (!victim.done)
        suffer();
}

static ep_status gather(void *context, const void *mine, size_t bytes, int limit_ms, void *ret_all)
{
    (void)context;
    if (++victim.gathers == victim.gather)
        suffer();
    return victim.boot.allgather(victim.boot.context, mine, bytes, limit_ms, ret_all);
}

void kill_at_gathers(ep_boot *boot)
{
    victim.boot = *boot;
    victim.gathers = 0;
    boot->allgather = gather;
}

/* Suffers when its kernel has come to the point; a kernel that is held goes on when the process does. */
static void *watch_point(void *argument)
{
    const struct state *s = argument;
    double limit = now_ms() + timeout_ms(s);

    while (!ep_cuda_point_is_reached(s->group.cuda)) {
        if (now_ms() > limit)
            return NULL;
        sleep_ms(1);
    }
    suffer();
    ep_cuda_point_release(s->group.cuda);
    return argument;
}

static int launch_at(struct state *s, const struct kernel_point *point, ep_status *ret_status)
{
    return point->plans ? step_launch(&s->step, ret_status) : launch(s, ret_status);
}

static int suffer_in_kernel(struct state *s, const struct cell *cell, ep_status *ret_status)
{
    pthread_t watch;
    void *reached = NULL;

    ep_cuda_point_set(s->group.cuda, cell->point);
    EXPECT(pthread_create(&watch, NULL, watch_point, s) == 0, "no thread");
    TRY(launch_at(s, cell->point, ret_status));
    pthread_join(watch, &reached);
    EXPECT(reached, "no kernel has come to the point");
    return 0;
}

static ep_status make_calls(struct state *s, int suffers_in, int at)
{
    struct plans plans = {.exact = NULL};
    ep_status status = EP_OK;

    for (int i = 0; i < CALLS && status == EP_OK; i++) {
        ep_cuda_point_count_calls(i == suffers_in ? at : 0, suffer);
        status = calls[i].make(s, &plans);
        victim.calls[i] = ep_cuda_point_count_calls(0, NULL);
        if (i == suffers_in)
            suffer_at_last();
    }
    ep_plan_free(plans.exact);
    ep_plan_free(plans.settled);
    ep_plan_free(plans.updated);
    return status;
}

/* Of ep_ll_renew(), in a group of all. */
static int count_renewal(struct state *s, int number, int *ret_n)
{
    CALL(make(s, true, number, all_ranks(s), &s->group.cuda));
    ep_cuda_point_count_calls(0, NULL);
    CALL(ep_ll_renew(s->model.ll));
    *ret_n = ep_cuda_point_count_calls(0, NULL);
    return 0;
}

/* A killed one does not return. */
static int suffer_at(struct state *s, const struct cell *cell, int base, ep_status *ret_status)
{
    int n;

    victim.stop = cell->stop;
    victim.next = base + CELL_GROUPS;
    victim.base = base;
    victim.done = false;
    switch (cell->where) {
    case IN_KERNEL:
        return suffer_in_kernel(s, cell, ret_status);
    case IN_CALL:
        *ret_status = make_calls(s, cell->call, position(cell, victim.calls[cell->call]));
        break;
    case IN_REGROUP:
        victim.gather = position(cell, victim.gathers);
        *ret_status = make(s, true, base + 1, all_ranks(s), &s->group.cuda);
        victim.gather = 0;
        suffer_at_last();
        break;
    case IN_RENEWAL:
        TRY(count_renewal(s, base + 1, &n));
        CALL(make(s, true, base + 2, all_ranks(s), &s->group.cuda));
        ep_cuda_point_count_calls(position(cell, n), suffer);
        *ret_status = ep_ll_renew(s->model.ll);
        ep_cuda_point_count_calls(0, NULL);
        suffer_at_last();
        break;
    default:
        victim.next = base + 2;
        suffer();
    }
    return 0;
}

/*
 * Has gone on, is left out and learns it, unless it learns that the others have waited too long for it before; nothing
 * that it launches reaches them. Then it is a member again.
 */
static int come_back(struct state *s, int next, ep_status status)
{
    double limit = now_ms() + timeout_ms(s);

    EXPECT(status == EP_OK || status == EP_E_EXCLUDED || status == EP_E_TIMEOUT, "%s: %s", ep_status_name(status),
           ep_last_error());
    while ((status = ep_comm_async_error(s->group.cuda)) == EP_OK && now_ms() < limit)
        sleep_ms(1);
    EXPECT(status == EP_E_EXCLUDED || status == EP_E_TIMEOUT, "%s", ep_status_name(status));
    while (atomic_load(&s->page->open) < next)
        TRY(reach_nobody(s, status));
    atomic_store(&s->page->ready[s->group.rank], next);
    return 0;
}

/* A new process, which dies while it joins. */
static int die_joining(struct state *s, const struct cell *cell, int number)
{
    TRY(await(&s->page->open, number, STEP_MS, "the others"));
    victim.next = number + 2;
    if (cell->where == IN_CREATION_GATHER)
        victim.gather = position(cell, atomic_load(&s->page->gathers));
    else
        ep_cuda_point_count_calls(position(cell, atomic_load(&s->page->new_calls)), suffer);
    TRY(join(s, number, all_ranks(s)));
    suffer_at_last();
    return FAILED;
}

/* --- the others --------------------------------------------------------------------------------------------------- */

void note_end(struct page *page, int rank)
{
    atomic_fetch_or(&page->host.ended, 1u << rank);
    atomic_fetch_or(&page->cuda.ended, 1u << rank);
}

/*
 * By one rank: lets the next process of a rank that was killed, or the rank itself, join that group. The others wait
 * for that, because they would agree on a group without the rank.
 */
static int open_group(struct state *s, const struct cell *cell, int dead, int number)
{
    double limit = now_ms() + STEP_MS;

    if (s->group.rank)
        return await(&s->page->open, number, STEP_MS, "rank 0");
    while (!cell->stop && !(atomic_load(&s->page->cuda.ended) >> dead & 1)) {
        EXPECT(now_ms() < limit, "rank %d has not ended", dead);
        sleep_ms(1);
    }
    atomic_fetch_and(&s->page->host.ended, ~(1u << dead));
    atomic_fetch_and(&s->page->cuda.ended, ~(1u << dead));
    atomic_store(&s->page->stopped, 0);
    atomic_store(&s->page->leaving, 0);
    atomic_store(&s->page->open, number);
    return 0;
}

/* What has to succeed without a rank that was lost late may: launches until it is missed. */
static int launch_until_missed(struct state *s, const struct cell *cell, ep_status *status)
{
    for (int i = 0; i < 3 && *status == EP_OK; i++) {
        if (cell->where == IN_KERNEL && cell->point->plans) {
            TRY(step_launch(&s->step, status));
            continue;
        }
        TRY(model_load(&s->model, s->round));
        TRY(launch(s, status));
        if (*status == EP_OK)
            TRY(model_check(&s->model, all_ranks(s), all_ranks(s)));
    }
    return 0;
}

/* A sum that is missing is waited for two deadlines (lowlatency.h), if no other rank misses it before. */
static int deadlines(const struct cell *cell)
{
    return cell->where == IN_KERNEL && strncmp(cell->point->name, "ll-combine", 10) == 0 ? 2 : 1;
}

/* The call in which the victim suffers, or the first one that misses it. */
static int miss(struct state *s, const struct cell *cell, int dead, int base)
{
    unsigned all = all_ranks(s), left = all & ~(1u << dead);
    ep_status status = EP_OK, expected = cell->stop ? EP_E_TIMEOUT : EP_E_PEER_DEAD;
    bool in_change = cell->where != IN_KERNEL && cell->where != IN_CALL;
    double begin = now_ms(), took;
    int n;

    if (cell->where == IN_CALL)
        status = make_calls(s, -1, 0);
    if (cell->where == IN_RENEWAL)
        TRY(count_renewal(s, base + 1, &n));
    if (cell->where == IN_REGROUP || cell->where == IN_RENEWAL)
        status = make(s, true, base + 1 + (cell->where == IN_RENEWAL), all, &s->group.cuda);
    if (is_in_creation(cell)) {
        TRY(change(s, base + 1, left));
        TRY(open_group(s, cell, dead, base + 2));
        CALL(make(s, false, base + 2, all, &s->group.host));
        TRY(await(&s->page->ready[dead], base + 2, STEP_MS, "a new process"));
        begin = now_ms();
        status = make(s, true, base + 2, all, &s->group.cuda);
    }
    if (status == EP_OK && in_change)
        status = ep_ll_renew(s->model.ll);
    TRY(launch_until_missed(s, cell, &status));
    took = now_ms() - begin;
    EXPECT(took < deadlines(cell) * timeout_ms(s) + group_slow * SLACK_MS, "after %.0f ms", took);
    return in_change ? expect_status(cell->name, status, expected, NULL)
                     : expect_failed_rank(cell->name, status, expected, dead);
}

/* Lets the rank that was stopped go on, once the others wait for it to let go. */
static void *resume(void *argument)
{
    struct state *s = argument;
    struct page *page = s->page;

    while (atomic_load(&page->leaving) < s->group.nranks - 1 || !atomic_load(&page->stopped))
        sleep_ms(1);
    sleep_ms(timeout_ms(s) / 10); /* the limit of their wait is half of it */
    atomic_store(&page->resumed, victim.base + 1);
    kill(atomic_load(&page->stopped), SIGCONT);
    return NULL;
}

/* Misses the victim, and goes on without it. */
static int survive(struct state *s, const struct cell *cell, int dead, int base)
{
    unsigned left = all_ranks(s) & ~(1u << dead);
    bool resumes = cell->stop && !s->group.rank;
    pthread_t thread;

    TRY(miss(s, cell, dead, base));
    victim.base = base;
    if (resumes)
        EXPECT(pthread_create(&thread, NULL, resume, s) == 0, "no thread");
    atomic_fetch_add(&s->page->leaving, 1);
    TRY(change(s, base + 3, left));
    if (resumes)
        pthread_join(thread, NULL);
    TRY(replay(s, 2, left));
    TRY(group_barrier(&s->group));
    for (int i = 0; i < CELL_GROUPS && !s->group.rank; i++) {
        reset(&s->page->cuda, base + i);
        reset(&s->page->host, base + i);
    }
    return open_group(s, cell, dead, base + CELL_GROUPS);
}

/* Of a new process; what it counts is for one that dies where it was. */
static int enter(struct state *s, int number)
{
    TRY(await(&s->page->open, number, STEP_MS, "the others"));
    ep_cuda_point_count_calls(0, NULL);
    TRY(join(s, number, all_ranks(s)));
    atomic_store(&s->page->new_calls, ep_cuda_point_count_calls(0, NULL));
    atomic_store(&s->page->gathers, victim.gathers);
    return open_graphs(s);
}

/* In group `base`, of all: a healthy round of everything, then the cell. */
static int run_cell(struct state *s, const struct cell *cell, int base)
{
    int dead = 1 + base / CELL_GROUPS % (s->group.nranks - 1);
    unsigned all = all_ranks(s);
    ep_status status = EP_OK;
    double begin = now_ms();
    int code;

    test_set_context("rank %d of %d, cell %d: %s", s->group.rank, s->group.nranks, base / CELL_GROUPS, cell->name);
    s->round = base * 100;
    TRY(replay(s, 2, all));
    TRY(model_load(&s->model, s->round++));
    CALL(make_calls(s, -1, 0));
    TRY(model_check(&s->model, all, all));
    TRY(model_load(&s->model, s->round));
    TRY(step_load(&s->step, (uint64_t)s->round));
    TRY(group_barrier(&s->group));
    if (s->group.rank != dead) {
        code = survive(s, cell, dead, base);
        if (code && atomic_load(&s->page->stopped)) /* nobody lets it go on any more */
            kill(atomic_load(&s->page->stopped), SIGKILL);
        TRY(code);
    } else {
        TRY(suffer_at(s, cell, base, &status));
        EXPECT(cell->stop, "it is not killed");
        TRY(come_back(s, base + CELL_GROUPS, status));
    }
    TRY(change(s, base + CELL_GROUPS, all));
    if (!s->group.rank)
        printf("%s: %.0f ms\n", cell->name, now_ms() - begin);
    fflush(stdout);
    return 0;
}

bool has_points(void)
{
    return ep_cuda_point_at;
}

int run_points(struct state *s, int number)
{
    int n = number / CELL_GROUPS;
    struct cell cell;

    victim.s = s;
    TRY(warm_up(s)); /* while the others go on */
    if (number % CELL_GROUPS) {
        EXPECT(cell_at((int)(s->first + (uint64_t)n * s->every), &cell), "there is no cell %d", n);
        return die_joining(s, &cell, number);
    }
    TRY(enter(s, number));
    for (; cell_at((int)(s->first + (uint64_t)n * s->every), &cell); n++)
        TRY(run_cell(s, &cell, n * CELL_GROUPS));
    if (!s->group.rank)
        printf("points with %d ranks: %d; the longest time to make a group and renew what graphs use: %.1f ms\n",
               s->group.nranks, n, s->up_ms);
    fflush(stdout);
    return 0;
}

int run_unrenewed(struct state *s, int number)
{
    unsigned all = all_ranks(s);
    ep_status status;

    TRY(begin(s, number));
    TRY(replay(s, 2, all));
    CALL(make(s, true, 1, all, &s->group.cuda));
    CALL(ep_ll_renew(s->model.ll));
    TRY(step_load(&s->step, 1));
    TRY(step_launch(&s->step, &status));
    TRY(expect_status("a graph with a plan that was not renewed", status, EP_E_STATE, "ep_plan_update"));
    TRY(change(s, 3, all));
    return replay(s, 2, all);
}
