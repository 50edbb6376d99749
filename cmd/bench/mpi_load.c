/* SPDX-License-Identifier: Apache-2.0 */
/* mpi_load.c - whether this machine has an MPI that the benchmark's baseline can be measured with. */
#include "mpirun.h"

#include "base/module.h"
#include "common/file.h"
#include "common/json.h"
#include "machine/source/source.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#define MODULE_FILE "libepkit-bench-mpi.so"
#define LOAD_MS 30000 /* from a busy file server */

/* RTLD_GLOBAL: plugins of MPI need its symbols. */
ep_status bench_mpi_load(const struct bench_mpi_module **ret_module)
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
    if (bench_mpi_load(&module) != EP_OK)
        return json_pack("{s:s}", "why", ep_last_error());
    return json_pack("{s:s}", "version", module->library_version());
}

static struct {
    bool queried, available;
    char text[512]; /* the version, or why it is not available */
} mpi;

static void query_mpi(void)
{
    struct source *source = NULL;
    struct source_answer answer;
    const char *why;

    if (!file_in_path("mpirun")) {
        snprintf(mpi.text, sizeof(mpi.text), "mpirun is not in PATH");
    } else if (source_open(NULL, &source) != EP_OK) {
        snprintf(mpi.text, sizeof(mpi.text), "%s", ep_last_error());
    } else {
        answer = source_query(source, "mpi", query_version, NULL, LOAD_MS);
        mpi.available = json_is_string(json_object_get(answer.value, "version"));
        why = json_string_value(json_object_get(answer.value, "why"));
        if (mpi.available)
            snprintf(mpi.text, sizeof(mpi.text), "%s", json_text(answer.value, "version"));
        else
            snprintf(mpi.text, sizeof(mpi.text), "cannot load %s: %s", MODULE_FILE, why ? why : answer.why);
        source_free(source);
    }
}

const char *bench_mpi_version(const char **ret_why)
{
    if (!mpi.queried)
        query_mpi();
    mpi.queried = true;
    *ret_why = mpi.text;
    return mpi.available ? mpi.text : NULL;
}
