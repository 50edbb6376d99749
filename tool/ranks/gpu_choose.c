/* SPDX-License-Identifier: Apache-2.0 */
/* gpu_choose.c - which backend a group gets when nobody has named one. */
#include "gpu.h"
#include "ranks_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TELL_MS 120000 /* until the last of the ranks has asked its driver */

/* --- what the ranks would get ------------------------------------------------------------------------------------ */

/* The GPU that a rank takes when its configuration names none; -1: none. */
static int place_of(const struct ep_cuda_gpus *gpus, int rank)
{
    return gpus->visible ? rank % gpus->visible : -1;
}

static bool sees(const struct ep_cuda_gpus *gpus, const char *address)
{
    for (int i = 0; i < gpus->visible; i++)
        if (strcmp(gpus->address[i], address) == 0)
            return true;
    return false;
}

static bool all_see_the_same(const struct ep_cuda_gpus *views, int nranks)
{
    for (int rank = 1; rank < nranks; rank++)
        if (memcmp(&views[rank], &views[0], sizeof(views[0])) != 0)
            return false;
    return true;
}

/* One rank by itself. */
static bool judge_rank(const struct ep_cuda_gpus *gpus, bool alike, int rank, char *ret_why, size_t bytes)
{
    if (place_of(gpus, rank) >= 0 && place_of(gpus, rank) < gpus->connected)
        return true;
    if (alike)
        snprintf(ret_why, bytes, "%s", gpus->why);
    else
        snprintf(ret_why, bytes, "rank %d: %s", rank, gpus->why);
    return false;
}

bool gpu_judge(const struct ep_cuda_gpus *views, bool alike, int nranks, bool *ret_hidden, char *ret_why, size_t bytes)
{
    bool hidden = false;

    alike = alike || all_see_the_same(views, nranks);
    for (int rank = 0; rank < nranks; rank++) {
        const struct ep_cuda_gpus *mine = &views[alike ? 0 : rank];

        if (!judge_rank(mine, alike, rank, ret_why, bytes))
            return false;
        for (int other = 0; other < rank; other++) {
            const struct ep_cuda_gpus *its = &views[alike ? 0 : other];
            const char *address = its->address[place_of(its, other)];

            if (strcmp(address, mine->address[place_of(mine, rank)]) == 0) {
                if (alike)
                    snprintf(ret_why, bytes, "%d GPU%s visible, %d ranks", mine->visible,
                             mine->visible == 1 ? " is" : "s are", nranks);
                else
                    snprintf(ret_why, bytes, "ranks %d and %d see the same GPU, %s", other, rank, address);
                return false;
            }
            hidden |= !sees(mine, address) || !sees(its, mine->address[place_of(mine, rank)]);
        }
    }
    *ret_hidden = hidden;
    snprintf(ret_why, bytes, "%s", nranks == 1 ? "there is a GPU" : "there is a GPU for each rank");
    return true;
}

/* --- the ranks of an mpirun -------------------------------------------------------------------------------------- */

/* Whether GPUs that are hidden from each other's ranks can be mapped is known when it has been tried. */
static bool try_hidden(struct ranks_ctx *ctx, char *ret_why, size_t bytes)
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
    const struct ep_cuda_gpus *mine = gpu_look();
    struct ep_cuda_gpus *views = calloc((size_t)ctx->nranks, sizeof(*views));
    char why[sizeof(ctx->spec->backend_why)];
    bool hidden = false, cuda;
    ep_status status;

    (void)parameters;
    status = views ? ep_comm_allgather(ctx->comm, mine, sizeof(*mine), views) : EP_E_MEMORY;
    if (status != EP_OK) {
        free(views);
        return ranks_emit_error(ctx, status, "telling of GPUs");
    }
    /* The same on all ranks, so either all of them try or none. */
    cuda = gpu_judge(views, false, ctx->nranks, &hidden, why, sizeof(why));
    if (cuda && hidden)
        cuda = try_hidden(ctx, why, sizeof(why));
    if (ctx->rank == 0)
        ranks_emit(ctx, json_pack("{s:s, s:s, s:s}", "event", "gpus", "backend", cuda ? "cuda" : "host", "why", why));
    free(views);
    return 0;
}

struct verdict {
    bool asked, cuda;
    char why[sizeof(((struct ranks_spec *)NULL)->backend_why)];
};

static void take_event(void *context, const json_t *event)
{
    struct verdict *verdict = context;
    const char *kind, *backend, *why;

    if (json_unpack((json_t *)event, "{s:s, s:s, s:s}", "event", &kind, "backend", &backend, "why", &why) != 0 ||
        strcmp(kind, "gpus") != 0)
        return;
    verdict->cuda = gpu_is_backend(backend);
    snprintf(verdict->why, sizeof(verdict->why), "%s", why);
}

/* Once: the ranks stay the same. */
static const struct verdict *ask_world(void)
{
    static struct verdict verdict = {.why = "the ranks did not tell which GPUs they see"};
    struct ranks_spec spec = {.boot = ranks_world_boot(),
                              .nranks = ranks_world_size(),
                              .nnodes = 1,
                              .timeout_ms = TELL_MS,
                              .backend = "host"};
    json_t *parameters;

    if (verdict.asked)
        return &verdict;
    verdict.asked = true;
    parameters = json_object();
    if (ranks_run(&spec, GPU_JOB, parameters, take_event, &verdict) != 0)
        verdict.cuda = false;
    json_decref(parameters);
    return &verdict;
}

/* --- the choice -------------------------------------------------------------------------------------------------- */

static bool are_offered(void)
{
    struct root *root;
    bool offered;

    if (root_open(NULL, &root) != EP_OK)
        return false;
    offered = gpu_are_offered(root);
    root_free(root);
    return offered;
}

bool gpu_choose(struct ranks_spec *spec)
{
    const struct ep_cuda_gpus *gpus;
    bool cuda, hidden;

    spec->backend = "host";
    if (spec->nnodes > 1) {
        snprintf(spec->backend_why, sizeof(spec->backend_why), "%s",
                 spec->network || spec->boot == RANKS_TCP ? "only the host backend serves several nodes"
                                                          : "nodes are emulated by the host backend alone");
        return false;
    }
    gpus = gpu_look();
    if (ranks_world_rank() == 0 && gpus->visible) {
        const struct verdict *verdict = ask_world();

        cuda = verdict->cuda;
        snprintf(spec->backend_why, sizeof(spec->backend_why), "%s", verdict->why);
    } else {
        cuda = gpu_judge(gpus, true, spec->nranks, &hidden, spec->backend_why, sizeof(spec->backend_why));
    }
    if (cuda)
        spec->backend = "cuda";
    return !cuda && (gpus->visible || are_offered());
}

int gpu_default_ranks(void)
{
    const struct ep_cuda_gpus *gpus = gpu_look();

    return gpus->connected == gpus->usable ? gpus->usable : 0;
}
