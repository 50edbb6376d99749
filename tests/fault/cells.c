/* SPDX-License-Identifier: Apache-2.0 */
#include "fault.h"

#include <stdio.h>

const char *linked_network = "tcp";

static const struct track creating = {.name = "new", .nnodes = 1};
static const struct track plain = {.name = "plain",
                                   .nnodes = 1,
                                   .steps = {STEP_BARRIER, STEP_GATHER, STEP_PLAN, STEP_DISPATCH, STEP_COMBINE},
                                   .n_steps = 5};
static const struct track queued = {
    .name = "async", .nnodes = 1, .steps = {STEP_PLAN, STEP_ASYNC_DISPATCH, STEP_ASYNC_COMBINE}, .n_steps = 3};
static const struct track lowlatency = {
    .name = "ll", .nnodes = 1, .steps = {STEP_LL_NEW, STEP_LL_SEND, STEP_LL_FINISH, STEP_LL_COMBINE}, .n_steps = 4};
static const struct track masked = {.name = "mask",
                                    .nnodes = 1,
                                    .masking = true,
                                    .steps = {STEP_LL_SEND, STEP_LL_FINISH, STEP_LL_COMBINE},
                                    .n_steps = 3};
static const struct track internode = {.name = "hop",
                                       .nnodes = 2,
                                       .steps = {STEP_BARRIER, STEP_GATHER, STEP_PLAN, STEP_DISPATCH, STEP_COMBINE},
                                       .n_steps = 5};
/* Over sockets: each node is a host of its own, and control links connect the hosts. */
static const struct track tcp = {.name = "tcp",
                                 .nnodes = 2,
                                 .linked = true,
                                 .steps = {STEP_BARRIER, STEP_GATHER, STEP_PLAN, STEP_DISPATCH, STEP_COMBINE},
                                 .n_steps = 5};
/* Low latency between nodes: every rank communicates with every rank of the other one. */
static const struct track ll_internode = {
    .name = "ll.hop", .nnodes = 2, .steps = {STEP_LL_NEW, STEP_LL_SEND, STEP_LL_FINISH, STEP_LL_COMBINE}, .n_steps = 4};
static const struct track ll_tcp = {.name = "ll.tcp",
                                    .nnodes = 2,
                                    .linked = true,
                                    .steps = {STEP_LL_NEW, STEP_LL_SEND, STEP_LL_FINISH, STEP_LL_COMBINE},
                                    .n_steps = 4};
static const struct track mask_internode = {.name = "mask.hop",
                                            .nnodes = 2,
                                            .masking = true,
                                            .steps = {STEP_LL_SEND, STEP_LL_FINISH, STEP_LL_COMBINE},
                                            .n_steps = 3};
static const struct track mask_tcp = {.name = "mask.tcp",
                                      .nnodes = 2,
                                      .linked = true,
                                      .masking = true,
                                      .steps = {STEP_LL_SEND, STEP_LL_FINISH, STEP_LL_COMBINE},
                                      .n_steps = 3};
#define KILL (1u << FAULT_KILL)
#define KILLS (1u << FAULT_KILL | 1u << FAULT_CRASH)
#define STOPS (1u << FAULT_STOP)
#define ABORTS (1u << FAULT_ABORT)
#define EXITS (1u << FAULT_EXIT)
/* A rank cannot leave in the middle of a call. */
#define INSIDE (KILLS | STOPS | ABORTS)
#define ALL (INSIDE | EXITS)

const struct point points[] = {
    {"new.before", &creating, STEP_NEW, WHERE_BEFORE, 0, 0, KILLS | STOPS | EXITS},
    {"new.first", &creating, STEP_NEW, WHERE_MIDDLE, 0, 1, KILLS | STOPS},
    {"new.second", &creating, STEP_NEW, WHERE_MIDDLE, 0, 2, KILLS | STOPS},

    {"barrier.before", &plain, STEP_BARRIER, WHERE_BEFORE, 0, 0, ALL},
    {"barrier.waiting", &plain, STEP_BARRIER, WHERE_WAITING, 0, 0, INSIDE},
    {"gather.before", &plain, STEP_GATHER, WHERE_BEFORE, 0, 0, ALL},
    {"gather.waiting", &plain, STEP_GATHER, WHERE_WAITING, 0, 0, INSIDE},
    {"plan.before", &plain, STEP_PLAN, WHERE_BEFORE, 0, 0, ALL},
    {"plan.middle", &plain, STEP_PLAN, WHERE_MIDDLE, BUFFER_TOPK, 50, INSIDE},
    {"plan.waiting", &plain, STEP_PLAN, WHERE_WAITING, 0, 0, INSIDE},
    {"dispatch.before", &plain, STEP_DISPATCH, WHERE_BEFORE, 0, 0, ALL},
    {"dispatch.middle", &plain, STEP_DISPATCH, WHERE_MIDDLE, BUFFER_X, 50, INSIDE},
    {"dispatch.waiting", &plain, STEP_DISPATCH, WHERE_WAITING, 0, 0, INSIDE},
    {"dispatch.end", &plain, STEP_DISPATCH, WHERE_END, BUFFER_X, 50, INSIDE},
    {"combine.before", &plain, STEP_COMBINE, WHERE_BEFORE, 0, 0, ALL},
    {"combine.middle", &plain, STEP_COMBINE, WHERE_MIDDLE, BUFFER_OUT, 50, INSIDE},
    {"combine.waiting", &plain, STEP_COMBINE, WHERE_WAITING, 0, 0, INSIDE},
    {"combine.end", &plain, STEP_COMBINE, WHERE_END, BUFFER_OUT, 50, INSIDE},

    {"async.dispatch.before", &queued, STEP_ASYNC_DISPATCH, WHERE_BEFORE, 0, 0, ALL},
    {"async.dispatch.middle", &queued, STEP_ASYNC_DISPATCH, WHERE_MIDDLE, BUFFER_X, 50, INSIDE},
    {"async.dispatch.waiting", &queued, STEP_ASYNC_DISPATCH, WHERE_WAITING, 0, 0, INSIDE},
    {"async.combine.middle", &queued, STEP_ASYNC_COMBINE, WHERE_MIDDLE, BUFFER_OUT, 50, INSIDE},
    {"async.combine.end", &queued, STEP_ASYNC_COMBINE, WHERE_END, BUFFER_OUT, 50, INSIDE},

    {"ll.new.before", &lowlatency, STEP_LL_NEW, WHERE_BEFORE, 0, 0, ALL},
    {"ll.send.before", &lowlatency, STEP_LL_SEND, WHERE_BEFORE, 0, 0, ALL},
    {"ll.send.middle", &lowlatency, STEP_LL_SEND, WHERE_MIDDLE, BUFFER_X, 10, INSIDE},
    {"ll.finish.before", &lowlatency, STEP_LL_FINISH, WHERE_BEFORE, 0, 0, KILLS | STOPS | ABORTS},
    {"ll.finish.middle", &lowlatency, STEP_LL_FINISH, WHERE_MIDDLE, BUFFER_LL_RECV, 50, INSIDE},
    {"ll.finish.waiting", &lowlatency, STEP_LL_FINISH, WHERE_WAITING, 0, 0, INSIDE},
    {"ll.combine.before", &lowlatency, STEP_LL_COMBINE, WHERE_BEFORE, 0, 0, ALL},
    {"ll.combine.middle", &lowlatency, STEP_LL_COMBINE, WHERE_MIDDLE, BUFFER_OUT, 10, INSIDE},
    {"ll.combine.waiting", &lowlatency, STEP_LL_COMBINE, WHERE_WAITING, 0, 0, INSIDE},

    {"mask.send.before", &masked, STEP_LL_SEND, WHERE_BEFORE, 0, 0, KILLS | STOPS | EXITS},
    {"mask.send.middle", &masked, STEP_LL_SEND, WHERE_MIDDLE, BUFFER_X, 10, KILLS | STOPS},
    {"mask.finish.before", &masked, STEP_LL_FINISH, WHERE_BEFORE, 0, 0, KILLS | STOPS},
    {"mask.finish.middle", &masked, STEP_LL_FINISH, WHERE_MIDDLE, BUFFER_LL_RECV, 50, KILLS | STOPS},
    {"mask.combine.before", &masked, STEP_LL_COMBINE, WHERE_BEFORE, 0, 0, KILLS | STOPS | EXITS},
    {"mask.combine.middle", &masked, STEP_LL_COMBINE, WHERE_MIDDLE, BUFFER_OUT, 10, KILLS | STOPS},

    {"hop.barrier.before", &internode, STEP_BARRIER, WHERE_BEFORE, 0, 0, ALL},
    {"hop.plan.before", &internode, STEP_PLAN, WHERE_BEFORE, 0, 0, ALL},
    {"hop.plan.waiting", &internode, STEP_PLAN, WHERE_WAITING, 0, 0, INSIDE},
    {"hop.dispatch.before", &internode, STEP_DISPATCH, WHERE_BEFORE, 0, 0, ALL},
    {"hop.dispatch.sender", &internode, STEP_DISPATCH, WHERE_MIDDLE, BUFFER_X, 50, INSIDE},
    {"hop.dispatch.forwarder", &internode, STEP_DISPATCH, WHERE_MIDDLE, BUFFER_RECV, 10, INSIDE},
    {"hop.dispatch.waiting", &internode, STEP_DISPATCH, WHERE_WAITING, 0, 0, INSIDE},
    {"hop.combine.before", &internode, STEP_COMBINE, WHERE_BEFORE, 0, 0, ALL},
    {"hop.combine.middle", &internode, STEP_COMBINE, WHERE_MIDDLE, BUFFER_OUT, 50, INSIDE},
    {"hop.combine.forwarder", &internode, STEP_COMBINE, WHERE_MIDDLE, BUFFER_RECV, 10, INSIDE},
    {"hop.combine.end", &internode, STEP_COMBINE, WHERE_END, BUFFER_OUT, 50, INSIDE},

    {"tcp.barrier.before", &tcp, STEP_BARRIER, WHERE_BEFORE, 0, 0, ALL},
    {"tcp.plan.waiting", &tcp, STEP_PLAN, WHERE_WAITING, 0, 0, INSIDE},
    {"tcp.dispatch.before", &tcp, STEP_DISPATCH, WHERE_BEFORE, 0, 0, ALL},
    /* The kernel reads memory that is sent: no page fault handler runs there. */
    {"tcp.dispatch.forwarder", &tcp, STEP_DISPATCH, WHERE_MIDDLE, BUFFER_RECV, 10, INSIDE},
    {"tcp.combine.before", &tcp, STEP_COMBINE, WHERE_BEFORE, 0, 0, STOPS | EXITS},
    {"tcp.combine.middle", &tcp, STEP_COMBINE, WHERE_MIDDLE, BUFFER_OUT, 50, INSIDE},
    {"tcp.combine.end", &tcp, STEP_COMBINE, WHERE_END, BUFFER_OUT, 50, INSIDE},

    {"ll.hop.finish.waiting", &ll_internode, STEP_LL_FINISH, WHERE_WAITING, 0, 0, KILL},
    {"ll.hop.combine.middle", &ll_internode, STEP_LL_COMBINE, WHERE_MIDDLE, BUFFER_OUT, 10, KILL | STOPS | ABORTS},
    {"ll.tcp.new.before", &ll_tcp, STEP_LL_NEW, WHERE_BEFORE, 0, 0, KILL | STOPS},
    {"ll.tcp.send.before", &ll_tcp, STEP_LL_SEND, WHERE_BEFORE, 0, 0, KILL | STOPS | ABORTS | EXITS},
    {"ll.tcp.finish.waiting", &ll_tcp, STEP_LL_FINISH, WHERE_WAITING, 0, 0, KILL | STOPS | ABORTS},
    {"ll.tcp.combine.before", &ll_tcp, STEP_LL_COMBINE, WHERE_BEFORE, 0, 0, KILL | STOPS | EXITS},
    {"ll.tcp.combine.middle", &ll_tcp, STEP_LL_COMBINE, WHERE_MIDDLE, BUFFER_OUT, 10, KILL | STOPS | ABORTS},
    {"mask.hop.send.before", &mask_internode, STEP_LL_SEND, WHERE_BEFORE, 0, 0, KILL | STOPS},
    {"mask.tcp.send.before", &mask_tcp, STEP_LL_SEND, WHERE_BEFORE, 0, 0, KILL | STOPS | EXITS},
    {"mask.tcp.finish.middle", &mask_tcp, STEP_LL_FINISH, WHERE_MIDDLE, BUFFER_LL_RECV, 50, KILL},
    {"mask.tcp.combine.before", &mask_tcp, STEP_LL_COMBINE, WHERE_BEFORE, 0, 0, KILL | STOPS},
    {"mask.tcp.combine.middle", &mask_tcp, STEP_LL_COMBINE, WHERE_MIDDLE, BUFFER_OUT, 10, KILL | STOPS},
};
const int n_points = (int)(sizeof(points) / sizeof(points[0]));

const char *fault_name(enum fault fault)
{
    static const char *const names[FAULTS] = {"kill", "stop", "crash", "abort", "exit"};

    return names[fault];
}

void cell_name(const struct cell *cell, char *ret_name, size_t bytes)
{
    snprintf(ret_name, bytes, "%s/%s", cell->point->name, fault_name(cell->fault));
}

static struct cell cell_of(const struct point *point, enum fault fault)
{
    return (struct cell){.point = point, .fault = fault, .victim = 2, .warm = 1, .percent = point->percent};
}

bool cell_at(int i, struct cell *ret_cell)
{
    for (int p = 0; p < n_points; p++)
        for (int fault = 0; fault < FAULTS; fault++)
            if (points[p].faults >> fault & 1 && i-- == 0) {
                *ret_cell = cell_of(&points[p], (enum fault)fault);
                return true;
            }
    return false;
}

struct cell cell_random(uint64_t seed)
{
    uint64_t state = seed;
    int n = 0;
    struct cell cell;

    while (cell_at(n, &cell))
        n++;
    cell_at((int)(fault_draw(&state) % (unsigned)n), &cell);
    cell.victim = (int)(fault_draw(&state) % RANKS);
    cell.warm = (int)(fault_draw(&state) % 3);
    cell.free_early = fault_draw(&state) & 1;
    /* Not below the whole pages before the trap, not above what is always accessed. */
    if (cell.point->step != STEP_NEW && cell.point->percent == 50)
        cell.percent = (int)(fault_draw(&state) % 60);
    return cell;
}
