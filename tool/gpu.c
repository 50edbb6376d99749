/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu.h"

#include "cmd.h"

#include "backend/cuda/module.h"
#include "base/clock.h"

#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MODULE_FILE "libepkit-cuda.so"
#define MOST_GPUS 64    /* an exit code holds it */
#define ANSWER_MS 60000 /* several GPUs without a persistent driver take some twenty seconds */

/* Next to libepkit.so first: that is the one of this build, and the one that the library itself takes. */
static void *open_module(void)
{
    char path[4096] = "";
    Dl_info info;

    if (dladdr((void *)ep_version, &info) && info.dli_fname && strchr(info.dli_fname, '/')) {
        int folder = (int)(strrchr(info.dli_fname, '/') - info.dli_fname);

        if (snprintf(path, sizeof(path), "%.*s/%s", folder, info.dli_fname, MODULE_FILE) < (int)sizeof(path) &&
            access(path, F_OK) == 0)
            return dlopen(path, RTLD_NOW | RTLD_LOCAL);
    }
    return dlopen(MODULE_FILE, RTLD_NOW | RTLD_LOCAL);
}

const struct ep_cuda_module *gpu_load(const char **ret_why)
{
    static char why[256];
    const struct ep_cuda_module *module;
    void *handle = open_module();

    *ret_why = why;
    if (!handle) {
        snprintf(why, sizeof(why), "%s", dlerror());
        return NULL;
    }
    module = dlsym(handle, EP_CUDA_MODULE_SYMBOL);
    if (module && module->abi == EP_CUDA_MODULE_ABI)
        return module;
    snprintf(why, sizeof(why), "%s is of another build than this command", MODULE_FILE);
    return NULL;
}

/* A driver that hangs must not hang the command. The child cannot be waited for then: killed, it is init's later. */
static bool wait_for(pid_t child, int *ret_status)
{
    uint64_t until_ns = ep_now_ns() + (uint64_t)ANSWER_MS * 1000000u;
    struct timespec pause = {.tv_nsec = 200000};
    pid_t ended;

    while ((ended = waitpid(child, ret_status, WNOHANG)) != child) {
        if ((ended < 0 && errno != EINTR) || ep_now_ns() >= until_ns) {
            kill(child, SIGKILL);
            return false;
        }
        nanosleep(&pause, NULL);
        if (pause.tv_nsec < 5000000)
            pause.tv_nsec *= 2;
    }
    return true;
}

/* In a child: the exit code is the number of GPUs. */
static int ask_in_child(void)
{
    int status = 0;
    pid_t pid = fork();

    if (pid == 0) {
        const char *why;
        const struct ep_cuda_module *module = gpu_load(&why);
        int n = 0;

        if (!module || module->count(&n) != EP_OK)
            n = 0;
        _exit(n < MOST_GPUS ? n : MOST_GPUS);
    }
    if (pid < 0 || !wait_for(pid, &status) || !WIFEXITED(status))
        return 0;
    return WEXITSTATUS(status);
}

int gpu_count(void)
{
    static int n = -1;

    if (n < 0)
        n = ask_in_child();
    return n;
}

const char *gpu_choose_backend(int nranks, int nnodes)
{
    const char *named = getenv("EPKIT_BACKEND");

    if (named && *named)
        return NULL;
    return nnodes == 1 && nranks <= gpu_count() ? "cuda" : "host";
}

bool gpu_is_backend(const char *backend)
{
    const char *named = backend ? backend : getenv("EPKIT_BACKEND");

    return named && strcmp(named, "cuda") == 0;
}

/* --- processors of a rank ---------------------------------------------------------------------------------------- */

bool gpu_parse_cpus(const char *list, cpu_set_t *ret_cpus)
{
    cpu_set_t cpus;
    char *end;

    CPU_ZERO(&cpus);
    do {
        unsigned long first = strtoul(list, &end, 10), last = first;

        if (end == list || first >= CPU_SETSIZE)
            return false;
        if (*end == '-') {
            list = end + 1;
            last = strtoul(list, &end, 10);
            if (end == list || last < first || last >= CPU_SETSIZE)
                return false;
        }
        for (unsigned long cpu = first; cpu <= last; cpu++)
            CPU_SET(cpu, &cpus);
        list = end + 1;
    } while (*end == ',');
    if (*end && *end != '\n')
        return false;
    *ret_cpus = cpus;
    return true;
}

void gpu_bind(const struct ranks_ctx *ctx)
{
    char address[32], path[128], list[4096] = "";
    cpu_set_t near, mine;
    FILE *file;

    if (ctx->gpu->pci_address(ctx->comm, address, sizeof(address)) != EP_OK)
        return;
    snprintf(path, sizeof(path), "/sys/bus/pci/devices/%s/local_cpulist", address);
    file = fopen(path, "re");
    if (!file)
        return;
    if (!fgets(list, sizeof(list), file))
        list[0] = '\0';
    fclose(file);
    if (!gpu_parse_cpus(list, &near) || sched_getaffinity(0, sizeof(mine), &mine) != 0)
        return;
    /* Whoever started us may have chosen processors already. */
    CPU_AND(&near, &near, &mine);
    if (CPU_COUNT(&near) > 0)
        sched_setaffinity(0, sizeof(near), &near);
}

/* --- memory of a rank -------------------------------------------------------------------------------------------- */

static ep_status take(struct ranks_ctx *ctx, size_t bytes, void **ret_memory)
{
    return ctx->gpu->alloc(ctx->comm, bytes, ret_memory);
}

static void give(struct ranks_ctx *ctx, void *memory)
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

const struct ranks_memory gpu_memory = {.take = take, .give = give, .copy = copy, .fill = fill};
