/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ll_copy_cuda [--ranks N] [--nodes N] [--network NAME] [--rounds N]: low-latency calls in CUDA's legacy default
 * stream, each followed at once by a copy of its output to pageable memory, as simple programs do; the last rank is
 * late. Until the copy is done, CUDA may block every other thread of the process that calls it: what the kernel waits
 * for must not depend on such a thread. Exit 77 if there is no GPU.
 */
#include "ll_model.h"

#include <epkit/cuda.h>
#include <stdlib.h>

#define TIMEOUT_MS 4000
#define LATE_MS 60 /* long enough for the proxy to reach its longest backoff */

enum { TOKENS = 64, HIDDEN = 2048 };

static const struct scenario {
    const char *name;
    bool late_dispatch, late_combine;
} scenarios[] = {{"dispatch", true, false}, {"combine", false, true}, {"both", true, true}};

/* Copies the first part of the call's output; waits for the call. */
static int copy_out(const void *from, void *pageable)
{
    CUDA(cudaMemcpy(pageable, from, (size_t)HIDDEN * 2, cudaMemcpyDeviceToHost));
    return 0;
}

static int run_round(const struct scenario *scenario, struct model *m, int round, void *pageable)
{
    const struct group *g = m->group;
    uint32_t all = (uint32_t)(((uint64_t)1 << g->nranks) - 1);
    bool last = g->rank == g->nranks - 1;

    test_set_context("rank %d of %d, %s, round %d", g->rank, g->nranks, scenario->name, round);
    TRY(model_load(m, round));
    TRY(group_barrier(g));
    if (last && scenario->late_dispatch)
        sleep_ms(LATE_MS);
    CALL(model_dispatch(m, TEST_ASYNC));
    TRY(copy_out(m->recv, pageable));
    if (last && scenario->late_combine)
        sleep_ms(LATE_MS);
    CALL(model_combine(m, TEST_ASYNC));
    TRY(copy_out(m->out, pageable));
    CALL(ep_comm_async_error(g->cuda));
    return model_check(m, all, all);
}

static int run_rank(const struct scenario_run *run, const struct group *group)
{
    void *pageable = malloc((size_t)HIDDEN * 2);
    struct group g = *group;
    struct model model;
    int code;

    if (!pageable) {
        test_report("no memory");
        return FAILED;
    }
    g.stream = NULL;
    code = model_open(&g, TOKENS, HIDDEN, 0, NULL, &model);
    for (int round = 0; round < run->rounds && !code; round++)
        code = run_round(run->scenario, &model, round, pageable);
    model_close(&model);
    free(pageable);
    return code;
}

int main(int argc, char **argv)
{
    struct options options = {.ranks = 2, .rounds = 4, .seed = 1};
    struct scenario_run run = {.program = "ll_copy_cuda", .timeout_ms = TIMEOUT_MS, .seconds = 60, .run = run_rank};

    return run_group_program(argc, argv, 2, &options, run, scenarios, sizeof(scenarios) / sizeof(scenarios[0]),
                             sizeof(scenarios[0]));
}
