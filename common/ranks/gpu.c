/* SPDX-License-Identifier: Apache-2.0 */
/* gpu.c - libepkit-cuda, the GPUs that it finds, the CPUs local to them, their memory, and the default backend. */
#include "gpu.h"

#include "base/module.h"
#include "common/json.h"
#include "common/memory.h"
#include "common/text.h"
#include "machine/hardware/topo.h"
#include "ranks_internal.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

#define MODULE_FILE "libepkit-cuda.so"
#define QUERY_NAME "cuda"
#define QUERY_MS 60000  /* several GPUs without nvidia-persistenced take about twenty seconds */
#define WORLD_MS 120000 /* for the slowest driver of all ranks */

ep_status gpu_load(const struct ep_cuda_module **ret_module)
{
    const void *table = NULL;

    EP_TRY(ep_module_load(MODULE_FILE, RTLD_LOCAL, EP_CUDA_MODULE_SYMBOL, EP_CUDA_MODULE_ABI, &table));
    *ret_module = table;
    return EP_OK;
}

/* dlopen() names the file that it does not find: the module, or a library that the module needs. */
bool gpu_is_missing(const char *error)
{
    return strstr(error, MODULE_FILE ": cannot open shared object file") != NULL;
}

/* --- querying the GPUs ------------------------------------------------------------------------------------------- */

/* Initialises CUDA in this process, which must not fork ranks afterwards. */
static void query_here(struct ep_cuda_gpus *ret_gpus)
{
    const struct ep_cuda_module *module = NULL;
    struct ep_cuda_gpus gpus = {.visible = 0};

    if (gpu_load(&module) == EP_OK && module->query_gpus(&gpus) == EP_OK) {
        *ret_gpus = gpus;
        return;
    }
    *ret_gpus = (struct ep_cuda_gpus){.visible = 0};
    /* Without the library, the dlopen() error would not help. */
    snprintf(ret_gpus->why, sizeof(ret_gpus->why), "%s",
             gpu_is_missing(ep_last_error()) ? "this epkit was built without the CUDA backend" : ep_last_error());
}

static json_t *query(void *unused)
{
    struct ep_cuda_gpus gpus;
    json_t *addresses = json_array();

    (void)unused;
    query_here(&gpus);
    for (int i = 0; i < gpus.visible; i++)
        json_array_append_new(addresses, json_string(gpus.address[i]));
    return json_pack("{s:i, s:i, s:i, s:o, s:s}", "visible", gpus.visible, "usable", gpus.usable, "connected",
                     gpus.connected, "addresses", addresses, "why", gpus.why);
}

static bool parse(const json_t *answer, struct ep_cuda_gpus *ret_gpus)
{
    struct ep_cuda_gpus gpus = {.visible = 0};
    int visible, usable, connected;
    const json_t *addresses;
    const char *why;

    if (json_unpack((json_t *)answer, "{s:i, s:i, s:i, s:o, s:s}", "visible", &visible, "usable", &usable, "connected",
                    &connected, "addresses", &addresses, "why", &why) != 0)
        return false;
    if (visible < usable || usable < connected || connected < 0 || visible > EP_CUDA_GPUS ||
        json_array_size(addresses) != (size_t)visible)
        return false;
    gpus.visible = visible;
    gpus.usable = usable;
    gpus.connected = connected;
    for (int i = 0; i < visible; i++)
        snprintf(gpus.address[i], sizeof(gpus.address[i]), "%s", json_text_at(addresses, (size_t)i));
    snprintf(gpus.why, sizeof(gpus.why), "%s", why);
    *ret_gpus = gpus;
    return true;
}

void gpu_query_source(struct source *source, struct ep_cuda_gpus *ret_gpus)
{
    struct source_answer answer = source_query(source, QUERY_NAME, query, NULL, QUERY_MS);

    if (answer.state == SOURCE_OK && parse(answer.value, ret_gpus))
        return;
    *ret_gpus = (struct ep_cuda_gpus){.visible = 0};
    snprintf(ret_gpus->why, sizeof(ret_gpus->why), "asking CUDA: %s", *answer.why ? answer.why : "no answer");
}

bool gpu_has_devices(struct source *source)
{
    FOR_NAMES (name, source_list(source, "/dev"))
        if (strncmp(name, "nvidia", 6) == 0 && name[6] && !name[6 + strspn(name + 6, "0123456789")])
            return true;
    return false;
}

/* Inherited by forked ranks. Locked, because ranks may be threads. */
static struct {
    pthread_mutex_t lock;
    bool is_valid;
    struct ep_cuda_gpus gpus;
} cache = {.lock = PTHREAD_MUTEX_INITIALIZER};

const struct ep_cuda_gpus *gpu_query(void)
{
    struct source *source;

    pthread_mutex_lock(&cache.lock);
    if (!cache.is_valid && source_open(NULL, &source) == EP_OK) {
        gpu_query_source(source, &cache.gpus);
        source_free(source);
    }
    cache.is_valid = true;
    pthread_mutex_unlock(&cache.lock);
    return &cache.gpus;
}

/* --- CPUs of a rank ---------------------------------------------------------------------------------------------- */

static void find_address(int rank, char *ret_address, size_t bytes)
{
    pthread_mutex_lock(&cache.lock);
    if (!cache.is_valid)
        query_here(&cache.gpus);
    cache.is_valid = true;
    snprintf(ret_address, bytes, "%s", cache.gpus.visible ? cache.gpus.address[rank % cache.gpus.visible] : "");
    pthread_mutex_unlock(&cache.lock);
}

static bool read_cpus(const char *address, cpu_set_t *ret_cpus)
{
    uint64_t mask[(CPU_SETSIZE + 63) / 64] = {0};
    char path[128], list[4096] = "";
    FILE *file;

    snprintf(path, sizeof(path), "/sys/bus/pci/devices/%s/local_cpulist", address);
    file = fopen(path, "re");
    if (!file)
        return false;
    if (!fgets(list, sizeof(list), file))
        list[0] = '\0';
    fclose(file);
    if (!topo_parse_cpus(list, mask, CPU_SETSIZE))
        return false;
    CPU_ZERO(ret_cpus);
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (mask[cpu / 64] >> (cpu % 64) & 1)
            CPU_SET(cpu, ret_cpus);
    return true;
}

void gpu_bind(int rank)
{
    cpu_set_t near, mine;
    char address[20];

    find_address(rank, address, sizeof(address));
    if (!*address || !read_cpus(address, &near) || sched_getaffinity(0, sizeof(mine), &mine) != 0)
        return;
    /* Only CPUs of the affinity that was set for this process. */
    CPU_AND(&near, &near, &mine);
    if (CPU_COUNT(&near) > 0)
        sched_setaffinity(0, sizeof(near), &near);
}

/* --- memory of a rank -------------------------------------------------------------------------------------------- */

static ep_status alloc_memory(struct ranks_ctx *ctx, size_t bytes, void **ret_memory)
{
    return ctx->gpu->alloc(ctx->comm, bytes, ret_memory);
}

static void free_memory(struct ranks_ctx *ctx, void *memory)
{
    ctx->gpu->free(ctx->comm, memory);
}

static ep_status copy(struct ranks_ctx *ctx, void *to, const void *from, size_t bytes)
{
    return ctx->gpu->copy(ctx->comm, to, from, bytes);
}

static ep_status fill(struct ranks_ctx *ctx, void *to, int byte, size_t bytes)
{
    return ctx->gpu->fill(ctx->comm, to, byte, bytes);
}

const struct ranks_memory gpu_memory = {.alloc = alloc_memory, .free = free_memory, .copy = copy, .fill = fill};

/* --- GPUs of the ranks ------------------------------------------------------------------------------------------- */

/* The GPU that the backend selects for a rank by default; -1: none. */
static int gpu_of_rank(const struct ep_cuda_gpus *gpus, int rank)
{
    return gpus->visible ? rank % gpus->visible : -1;
}

static bool is_visible(const struct ep_cuda_gpus *gpus, const char *address)
{
    return ANY_OF(i, gpus->visible, strcmp(gpus->address[i], address) == 0);
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
    struct ep_cuda_gpus *views = memory_new((size_t)ctx->nranks, sizeof(*views));
    char why[sizeof(ctx->spec->backend_why)];
    bool hidden = false, cuda;
    ep_status status;

    (void)parameters;
    status = ep_comm_allgather(ctx->comm, mine, sizeof(*mine), views);
    if (status != EP_OK) {
        free(views);
        return ranks_emit_error(ctx, status, "gathering the GPUs of all ranks");
    }
    /* All ranks compute the same result, so that all of them try or none. */
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

static void take_choice(void *context, const json_t *event)
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
        .boot = RANKS_TCP, .nranks = ranks_world_size(), .nnodes = 1, .timeout_ms = WORLD_MS, .backend = "host"};
    json_t *parameters;

    if (choice.is_valid)
        return &choice;
    choice.is_valid = true;
    parameters = json_object();
    if (ranks_run(&spec, GPU_JOB, parameters, take_choice, &choice) != 0)
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
