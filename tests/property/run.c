/* SPDX-License-Identifier: Apache-2.0 */
#include "property.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { ARENA_BYTES = 8 << 20 };

void fail_check(struct run *run, const char *format, ...)
{
    char text[400];
    va_list args;

    if (run->wrong)
        return;
    run->wrong = true;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    fprintf(stderr, "seed %llu, rank %d of %d, operation %d (%s): %s\n", (unsigned long long)run->shape->seed,
            run->rank, run->shape->nranks, run->op,
            run->op < run->shape->n_ops ? op_name(run->shape->ops[run->op].kind) : "end", text);
}

bool passed(struct run *run, ep_status status, const char *what)
{
    if (status == EP_OK)
        return true;
    fail_check(run, "%s: %s: %s", what, ep_status_name(status), ep_last_error());
    ep_comm_abort(run->comm);
    return false;
}

void drain(struct run *run)
{
    int op = run->op;

    for (int i = 0; i < run->n_uses; i++)
        use_finish(&run->uses[i]);
    for (int i = 0; i < run->n_uses; i++)
        use_free(&run->uses[i]);
    run->n_uses = 0;
    for (int i = 0; i < N_ARENAS; i++)
        run->arena[i].used = 0;
    run->op = op;
}

/* --- the rest --------------------------------------------------------------------------------------------------- */

static void check_gather(struct run *run)
{
    uint64_t mine[64], all[MAX_RANKS * 64];
    size_t n = (size_t)(run->shape->seed + (uint64_t)run->op) % 65;

    for (size_t i = 0; i < n; i++)
        mine[i] = random_at(run->shape->seed + (uint64_t)run->rank, i);
    if (!passed(run, ep_comm_allgather(run->comm, mine, n * 8, all), "ep_comm_allgather"))
        return;
    for (size_t i = 0; i < n * (size_t)run->shape->nranks; i++)
        if (all[i] != random_at(run->shape->seed + (uint64_t)(i / n), i % n))
            fail_check(run, "all-gather of %zu words: word %zu of rank %zu", n, i % n, i / n);
}

static bool new_arena(struct run *run, int which, size_t bytes)
{
    void *memory;

    if (!passed(run, ep_alloc(run->comm, bytes, &memory), "ep_alloc"))
        return false;
    run->arena[which] = (struct arena){.memory = memory, .bytes = bytes};
    return true;
}

static void change_arena(struct run *run)
{
    int which = run->op % N_ARENAS;

    drain(run);
    if (passed(run, ep_free(run->comm, run->arena[which].memory), "ep_free"))
        new_arena(run, which, random_below(&run->local, 4) ? ARENA_BYTES : 0);
}

static void start_use(struct run *run, const struct op *op)
{
    struct use *use = &run->uses[run->n_uses];
    bool started = op->kind == OP_DISPATCH ? use_dispatch(run, op, use) : use_combine(run, op, use);

    run->n_uses++;
    (void)started; /* failures were reported; freed with the others */
}

/* Not between a dispatch and the combine of its rows, which needs them. */
static bool may_drain(const struct run *run)
{
    return run->op >= run->shape->n_ops || !run->shape->ops[run->op].echo;
}

static void do_op(struct run *run, const struct op *op)
{
    struct plan_state *state = &run->plans[op->plan];

    /* Random delays, because ranks in step never overlap with a rank in the previous operation. */
    if (random_below(&run->local, 12) == 0)
        usleep(random_below(&run->local, 3000));
    if (may_drain(run) && (run->n_uses > MAX_USES - 2 || random_below(&run->local, 4) == 0))
        drain(run);
    switch (op->kind) {
    case OP_PLAN:
        make_plan(run, op);
        break;
    case OP_UPDATE:
        update_plan(run, op);
        break;
    case OP_DISPATCH:
    case OP_COMBINE:
        start_use(run, op);
        break;
    case OP_SOURCES:
        check_sources(run, op);
        break;
    case OP_METADATA:
        check_metadata(run, op);
        break;
    case OP_FREE:
        ep_plan_free(state->plan);
        state->plan = NULL;
        break;
    case OP_BARRIER:
        passed(run, ep_comm_barrier(run->comm), "ep_comm_barrier");
        break;
    case OP_GATHER:
        check_gather(run);
        break;
    case OP_ARENA:
        change_arena(run);
        break;
    case OP_LOWLATENCY:
        use_lowlatency(run, op);
        break;
    case OP_CAPACITY:
        check_capacity(run, op);
        break;
    }
}

int run_rank(const ep_boot *boot, void *argument)
{
    const struct shape *shape = argument;
    struct run run = {.shape = shape, .rank = boot->rank};
    bool ready;

    run.local = stream_of(shape, STREAM_LOCAL, (uint64_t)boot->rank, 0);
    ep_net_emulate(&shape->emulation);
    if (!passed(&run, ep_comm_new(boot, &shape->config, &run.comm), "ep_comm_new"))
        return 1;
    for (int i = 1; i < N_QUEUES; i++)
        if (!passed(&run, ep_queue_new(run.comm, &run.queues[i]), "ep_queue_new"))
            return 1;
    ready = new_arena(&run, 0, ARENA_BYTES) && new_arena(&run, 1, ARENA_BYTES) && new_arena(&run, 2, ARENA_BYTES);
    for (run.op = 0; ready && !run.wrong && run.op < shape->n_ops; run.op++)
        do_op(&run, &shape->ops[run.op]);
    /* The others wait for this rank in a call that it will not make. */
    if (run.wrong)
        ep_comm_abort(run.comm);
    drain(&run);
    for (int i = 0; i < shape->n_plans; i++)
        plan_done(&run.plans[i]);
    for (int i = 1; i < N_QUEUES; i++)
        ep_queue_free(run.queues[i]);
    ep_comm_free(run.comm);
    return run.wrong;
}
