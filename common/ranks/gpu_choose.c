/* SPDX-License-Identifier: Apache-2.0 */
/* gpu_choose.c - the default backend of a group. */
#include "gpu.h"
#include "ranks_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define QUERY_MS 120000 /* for the slowest driver of all ranks */

/* --- GPUs of the ranks ------------------------------------------------------------------------------------------- */

/* The GPU that the backend selects for a rank by default; -1: none. */
static int gpu_of_rank(const struct ep_cuda_gpus *gpus, int rank)
{
    return gpus->visible ? rank % gpus->visible : -1;
}

static bool is_visible(const struct ep_cuda_gpus *gpus, const char *address)
{
    for (int i = 0; i < gpus->visible; i++)
        if (strcmp(gpus->address[i], address) == 0)
            return true;
    return false;
}

static bool are_views_equal(const struct ep_cuda_gpus *views, int nranks)
{
    for (int rank = 1; rank < nranks; rank++)
        if (memcmp(&views[rank], &views[0], sizeof(views[0])) != 0)
            return false;
    return true;
}

static bool check_rank(const struct ep_cuda_gpus *gpus, bool alike, int rank, char *ret_why, size_t bytes)
{
    if (gpu_of_rank(gpus, rank) >= 0 && gpu_of_rank(gpus, rank) < gpus->connected)
        return true;
    if (alike)
        snprintf(ret_why, bytes, "%s", gpus->why);
    else
        snprintf(ret_why, bytes, "rank %d: %s", rank, gpus->why);
    return false;
}

bool gpu_check(const struct ep_cuda_gpus *views, bool alike, int nranks, bool *ret_hidden, char *ret_why, size_t bytes)
{
    bool hidden = false;

    alike = alike || are_views_equal(views, nranks);
    for (int rank = 0; rank < nranks; rank++) {
        const struct ep_cuda_gpus *mine = &views[alike ? 0 : rank];

        if (!check_rank(mine, alike, rank, ret_why, bytes))
            return false;
        for (int other = 0; other < rank; other++) {
            const struct ep_cuda_gpus *its = &views[alike ? 0 : other];
            const char *address = its->address[gpu_of_rank(its, other)];

            if (strcmp(address, mine->address[gpu_of_rank(mine, rank)]) == 0) {
                if (alike)
                    snprintf(ret_why, bytes, "%d GPU%s visible, %d ranks", mine->visible,
                             mine->visible == 1 ? " is" : "s are", nranks);
                else
                    snprintf(ret_why, bytes, "ranks %d and %d see the same GPU, %s", other, rank, address);
                return false;
            }
            hidden |= !is_visible(mine, address) || !is_visible(its, mine->address[gpu_of_rank(mine, rank)]);
        }
    }
    *ret_hidden = hidden;
    snprintf(ret_why, bytes, "%s", nranks == 1 ? "there is a GPU" : "there is a GPU for each rank");
    return true;
}

/* --- the ranks of a launcher ------------------------------------------------------------------------------------- */

/* Peer access to a GPU that is not visible to this rank can only be found out by mapping its memory. */
static bool try_mapping(struct ranks_ctx *ctx, char *ret_why, size_t bytes)
{
    ep_comm_config config = EP_COMM_CONFIG_INIT;
    ep_comm *comm = NULL;
    ep_status status;

    config.backend = "cuda";
    config.timeout_ms = ctx->spec->timeout_ms;
    status = ep_comm_new(ctx->boot, &config, &comm);
    if (status != EP_OK)
        snprintf(ret_why, bytes, "%s", ep_last_error());
    ep_comm_free(comm);
    return status == EP_OK;
}

int gpu_job(struct ranks_ctx *ctx, const json_t *parameters)
{
    const struct ep_cuda_gpus *mine = gpu_query();
    struct ep_cuda_gpus *views = calloc((size_t)ctx->nranks, sizeof(*views));
    char why[sizeof(ctx->spec->backend_why)];
    bool hidden = false, cuda;
    ep_status status;

    (void)parameters;
    status = views ? ep_comm_allgather(ctx->comm, mine, sizeof(*mine), views) : EP_E_MEMORY;
    if (status != EP_OK) {
        free(views);
        return ranks_emit_error(ctx, status, "gathering the GPUs of all ranks");
    }
    /* The same result on all ranks, so that all of them try or none. */
    cuda = gpu_check(views, false, ctx->nranks, &hidden, why, sizeof(why));
    if (cuda && hidden)
        cuda = try_mapping(ctx, why, sizeof(why));
    if (ctx->rank == 0)
        ranks_emit(ctx, json_pack("{s:s, s:s, s:s}", "event", "gpus", "backend", cuda ? "cuda" : "host", "why", why));
    free(views);
    return 0;
}

struct choice {
    bool is_valid, cuda;
    char why[sizeof(((struct ranks_spec *)NULL)->backend_why)];
};

static void on_event(void *context, const json_t *event)
{
    struct choice *choice = context;
    const char *kind, *backend, *why;

    if (json_unpack((json_t *)event, "{s:s, s:s, s:s}", "event", &kind, "backend", &backend, "why", &why) != 0 ||
        strcmp(kind, "gpus") != 0)
        return;
    choice->cuda = gpu_is_backend(backend);
    snprintf(choice->why, sizeof(choice->why), "%s", why);
}

/* Queried once: the ranks stay the same. */
static const struct choice *query_world(void)
{
    static struct choice choice = {.why = "the GPUs of the ranks could not be queried"};
    struct ranks_spec spec = {
        .boot = RANKS_TCP, .nranks = ranks_world_size(), .nnodes = 1, .timeout_ms = QUERY_MS, .backend = "host"};
    json_t *parameters;

    if (choice.is_valid)
        return &choice;
    choice.is_valid = true;
    parameters = json_object();
    if (ranks_run(&spec, GPU_JOB, parameters, on_event, &choice) != 0)
        choice.cuda = false;
    json_decref(parameters);
    return &choice;
}

/* --- the choice -------------------------------------------------------------------------------------------------- */

static bool has_devices(void)
{
    struct source *source;
    bool found;

    if (source_open(NULL, &source) != EP_OK)
        return false;
    found = gpu_has_devices(source);
    source_free(source);
    return found;
}

bool gpu_choose_backend(struct ranks_spec *spec)
{
    const struct ep_cuda_gpus *gpus;
    bool cuda, hidden;

    spec->backend = "host";
    if (spec->nnodes > 1) {
        snprintf(spec->backend_why, sizeof(spec->backend_why), "%s",
                 "several nodes use the host backend unless --backend cuda is given");
        return false;
    }
    gpus = gpu_query();
    if (ranks_world_rank() == 0 && gpus->visible) {
        const struct choice *choice = query_world();

        cuda = choice->cuda;
        snprintf(spec->backend_why, sizeof(spec->backend_why), "%s", choice->why);
    } else {
        cuda = gpu_check(gpus, true, spec->nranks, &hidden, spec->backend_why, sizeof(spec->backend_why));
    }
    if (cuda)
        spec->backend = "cuda";
    return !cuda && (gpus->visible || has_devices());
}

int gpu_default_ranks(void)
{
    const struct ep_cuda_gpus *gpus = gpu_query();

    return gpus->connected == gpus->usable ? gpus->usable : 0;
}
