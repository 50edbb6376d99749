/* SPDX-License-Identifier: Apache-2.0 */
#include "mpirun.h"

#include "base/module.h"
#include "bench_case.h"
#include "common/file.h"
#include "common/json.h"
#include "common/launcher_env.h"
#include "common/output.h"
#include "common/ranks/ranks_internal.h"
#include "machine/source/source.h"

#include <dlfcn.h>
#include <stdio.h>

#define MODULE_FILE "libepkit-bench-mpi.so"
#define LOAD_MS 30000 /* from a busy file server */

/* --- whether this machine has an MPI that the baseline can be measured with --- */

/* RTLD_GLOBAL: plugins of MPI need its symbols. */
static ep_status load_mpi(const struct bench_mpi_module **ret_module)
{
    const void *table = NULL;

    EP_TRY(ep_module_load(MODULE_FILE, RTLD_GLOBAL, BENCH_MPI_SYMBOL, BENCH_MPI_ABI, &table));
    *ret_module = table;
    return EP_OK;
}

/* Runs in a child process, because an MPI library starts threads and installs memory hooks. */
static json_t *query_version(void *unused)
{
    const struct bench_mpi_module *module = NULL;

    (void)unused;
    if (load_mpi(&module) != EP_OK)
        return json_pack("{s:s}", "why", ep_last_error());
    return json_pack("{s:s}", "version", module->library_version());
}

static struct {
    bool queried, available;
    char text[512]; /* the version, or why it is not available */
} found;

static void query_mpi(void)
{
    struct source *source = NULL;
    struct source_answer answer;
    const char *why;

    if (!file_in_path("mpirun")) {
        snprintf(found.text, sizeof(found.text), "mpirun is not in PATH");
    } else if (source_open(NULL, &source) != EP_OK) {
        snprintf(found.text, sizeof(found.text), "%s", ep_last_error());
    } else {
        answer = source_query(source, "mpi", query_version, NULL, LOAD_MS);
        found.available = json_is_string(json_object_get(answer.value, "version"));
        why = json_string_value(json_object_get(answer.value, "why"));
        if (found.available)
            snprintf(found.text, sizeof(found.text), "%s", json_text(answer.value, "version"));
        else
            snprintf(found.text, sizeof(found.text), "cannot load %s: %s", MODULE_FILE, why ? why : answer.why);
        source_free(source);
    }
}

const char *bench_mpi_version(const char **ret_why)
{
    if (!found.queried)
        query_mpi();
    found.queried = true;
    *ret_why = found.text;
    return found.available ? found.text : NULL;
}

/* --- on a rank --- */

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
