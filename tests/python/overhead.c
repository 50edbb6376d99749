/* SPDX-License-Identifier: Apache-2.0 */
/*
 * overhead.c - what a dispatch of one rank costs in C: nanoseconds of processor time of the quickest of some batches,
 * for overhead.py to compare with the same call from Python. Seven tensors: fp8 rows, scales, weights, and the four
 * outputs. overhead [host|cuda]; on a GPU in batches for which its queue has room, in memory that the library does not
 * know from before, as torch's.
 */
#include <dlfcn.h>
#include <epkit/epkit.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { TOKENS = 1, HIDDEN = 128, TOPK = 1, BATCHES = 50, TENSORS = 8, TENSOR_BYTES = 1024 };

static double now(void)
{
    struct timespec time;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
}

static int fail(const char *what)
{
    fprintf(stderr, "overhead: %s: %s\n", what, ep_last_error());
    return 1;
}

/* Memory of the backend, zeroed, that lives as long as the process; NULL: none. */
static char *new_memory(bool cuda, size_t bytes)
{
    void *driver = cuda ? dlopen("libcuda.so.1", RTLD_NOW) : NULL;
    int (*alloc)(unsigned long long *, size_t) = NULL;
    int (*fill)(unsigned long long, unsigned char, size_t) = NULL;
    unsigned long long address = 0;

    if (!cuda)
        return calloc(1, bytes);
    if (driver) {
        *(void **)&alloc = dlsym(driver, "cuMemAlloc_v2");
        *(void **)&fill = dlsym(driver, "cuMemsetD8_v2");
    }
    if (!alloc || !fill || alloc(&address, bytes) || fill(address, 0, bytes))
        return NULL;
    return (char *)(uintptr_t)address; // NOLINT(performance-no-int-to-ptr): the driver gives addresses as integers
}

static double time_dispatches(ep_comm *comm, ep_plan *plan, const ep_dispatch_args *args, bool cuda)
{
    const int batch = cuda ? 100 : 2000;
    double best = 1e18;

    for (int i = 0; i < BATCHES; i++) {
        double begin = now(), each;

        for (int n = 0; n < batch; n++)
            if (cuda ? ep_dispatch(plan, args, NULL) : ep_dispatch_sync(plan, args))
                return -1;
        each = (now() - begin) / batch;
        best = each < best ? each : best;
        if (cuda && ep_stream_sync(comm, NULL))
            return -1;
    }
    return best;
}

int main(int argc, char **argv)
{
    const bool cuda = argc > 1 && !strcmp(argv[1], "cuda");
    ep_comm_config config = EP_COMM_CONFIG_INIT;
    ep_plan_args plan_args = EP_PLAN_ARGS_INIT;
    ep_dispatch_args args = EP_DISPATCH_ARGS_INIT;
    ep_boot_shm *place = NULL;
    ep_comm *comm = NULL;
    ep_plan *plan = NULL;
    char *memory;
    double best;
    ep_boot boot;

    config.backend = cuda ? "cuda" : "host";
    if (ep_boot_shm_new(1, &place) || ep_boot_shm_join(place, 0, &boot) || ep_comm_new(&boot, &config, &comm))
        return fail("communicator");
    memory = new_memory(cuda, (size_t)TENSORS * TENSOR_BYTES);
    if (!memory)
        return fail("memory");
    plan_args.topk_idx = (int64_t *)(void *)memory;
    plan_args.idx_type = EP_I64;
    plan_args.n_tokens = TOKENS;
    plan_args.topk = TOPK;
    plan_args.n_experts = 1;
    if (ep_plan_new(comm, &plan_args, &plan))
        return fail("plan");
    args.x = memory + 1 * TENSOR_BYTES;
    args.dtype = EP_F8E4M3;
    args.hidden = HIDDEN;
    args.scales = memory + 2 * TENSOR_BYTES;
    args.scale_type = EP_F32;
    args.topk_weights = (float *)(void *)(memory + 3 * TENSOR_BYTES);
    args.recv_x = memory + 4 * TENSOR_BYTES;
    args.recv_scales = memory + 5 * TENSOR_BYTES;
    args.recv_topk_idx = memory + 6 * TENSOR_BYTES;
    args.recv_topk_weights = (float *)(void *)(memory + 7 * TENSOR_BYTES);
    args.out_rows = TOKENS;
    best = time_dispatches(comm, plan, &args, cuda);
    if (best < 0)
        return fail("dispatch");
    printf("%.0f\n", best);
    ep_plan_free(plan);
    ep_comm_free(comm);
    ep_boot_shm_free(place);
    return 0;
}
