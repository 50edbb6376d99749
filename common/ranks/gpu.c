/* SPDX-License-Identifier: Apache-2.0 */
/* gpu.c - libepkit-cuda, the GPUs that it finds, the CPUs local to them, and their memory. */
#include "gpu.h"

#include "base/module.h"
#include "machine/hardware/topo.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>

#define MODULE_FILE "libepkit-cuda.so"
#define QUERY_NAME "cuda"
#define QUERY_MS 60000 /* several GPUs without nvidia-persistenced take about twenty seconds */

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
    for (int i = 0; i < visible; i++) {
        const char *address = json_string_value(json_array_get(addresses, (size_t)i));

        snprintf(gpus.address[i], sizeof(gpus.address[i]), "%s", address ? address : "");
    }
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
    struct source_names names = source_list(source, "/dev");

    for (size_t i = 0; i < names.n; i++) {
        const char *digits = strncmp(names.names[i], "nvidia", 6) == 0 ? names.names[i] + 6 : "";

        if (*digits && strspn(digits, "0123456789") == strlen(digits))
            return true;
    }
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
