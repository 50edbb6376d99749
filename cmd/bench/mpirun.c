/* SPDX-License-Identifier: Apache-2.0 */
#include "mpirun.h"

#include "base/module.h"
#include "bench_case.h"
#include "common/launcher_env.h"
#include "common/output.h"
#include "common/ranks/ranks_internal.h"

#include <dlfcn.h>

#define MODULE_FILE "libepkit-bench-mpi.so"

/* RTLD_GLOBAL: plugins of MPI need its symbols. */
static ep_status load_mpi(const struct bench_mpi_module **ret_module)
{
    const void *table = NULL;

    EP_TRY(ep_module_load(MODULE_FILE, RTLD_GLOBAL, BENCH_MPI_SYMBOL, BENCH_MPI_ABI, &table));
    *ret_module = table;
    return EP_OK;
}

static ep_status all_succeeded(struct ranks_ctx *ctx, ep_status own, bool *ret_all)
{
    int64_t n = own == EP_OK;

    if (own != EP_OK && ctx->rank == 0)
        out_warning("MPI_Alltoallv is not measured: %s", ep_last_error());
    EP_TRY(bench_sum(ctx, &n, sizeof(n)));
    *ret_all = n == ctx->nranks;
    return EP_OK;
}

ep_status bench_mpi_start(struct ranks_ctx *ctx, const struct bench_request *request,
                          const struct bench_mpi_module **ret_mpi)
{
    const struct bench_mpi_module *mpi = NULL;
    bool all;

    *ret_mpi = NULL;
    if (!request->baselines || ctx->memory || ranks_world_rank() < 0 || !ranks_env_is_mpirun())
        return EP_OK;
    /* MPI_Init() waits for all ranks. */
    EP_TRY(all_succeeded(ctx, load_mpi(&mpi), &all));
    if (all)
        EP_TRY(all_succeeded(ctx, mpi->start(ctx->rank, ctx->nranks), &all));
    *ret_mpi = all ? mpi : NULL;
    return EP_OK;
}
