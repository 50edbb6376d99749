/* SPDX-License-Identifier: Apache-2.0 */
/*
 * overhead.c - what a dispatch of one rank costs in C, for overhead.py, which loads this library and calls the same
 * from Python in the same process. Seven tensors: fp8 rows, scales, weights, and the four outputs. On a GPU in batches
 * for which its queue has room, in memory of the driver, which the library does not know from before, as torch's.
 */
#include <dlfcn.h>
#include <epkit/epkit.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* NULL after a failure, which stderr names. What it allocates lives as long as the process. */
void *overhead_open(int cuda);
/* Nanoseconds of processor time of one call of a batch; -1 after a failure. */
double overhead_batch(const void *opened, int batch);

enum { TOKENS = 1, HIDDEN = 128, TOPK = 1, TENSORS = 8, TENSOR_BYTES = 1024 };

static double now(void)
{
    struct timespec time;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
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

struct measured {
    ep_comm *comm;
    ep_plan *plan;
    ep_dispatch_args args;
    char *memory;
    bool cuda;
};

static bool open_comm(struct measured *m)
{
    ep_comm_config config = {.size = sizeof(config), .device = -1, .backend = m->cuda ? "cuda" : "host"};
    ep_boot_shm *place = NULL;
    ep_boot boot;

    return !ep_boot_shm_new(1, &place) && !ep_boot_shm_join(place, 0, &boot) && !ep_comm_new(&boot, &config, &m->comm);
}

static bool open_plan(struct measured *m)
{
    ep_plan_args args = EP_PLAN_ARGS_INIT;
    char *memory = m->memory;

    args.topk_idx = (int64_t *)(void *)memory;
    args.idx_type = EP_I64;
    args.n_tokens = TOKENS;
    args.topk = TOPK;
    args.n_experts = 1;
    m->args = (ep_dispatch_args)EP_DISPATCH_ARGS_INIT;
    m->args.x = memory + 1 * TENSOR_BYTES;
    m->args.dtype = EP_F8E4M3;
    m->args.hidden = HIDDEN;
    m->args.scales = memory + 2 * TENSOR_BYTES;
    m->args.scale_type = EP_F32;
    m->args.topk_weights = (float *)(void *)(memory + 3 * TENSOR_BYTES);
    m->args.recv_x = memory + 4 * TENSOR_BYTES;
    m->args.recv_scales = memory + 5 * TENSOR_BYTES;
    m->args.recv_topk_idx = memory + 6 * TENSOR_BYTES;
    m->args.recv_topk_weights = (float *)(void *)(memory + 7 * TENSOR_BYTES);
    m->args.out_rows = TOKENS;
    return !ep_plan_new(m->comm, &args, &m->plan);
}

void *overhead_open(int cuda)
{
    static struct measured measured; /* lives as long as the process, as what it opens */
    struct measured *m = &measured;

    m->cuda = cuda;
    m->memory = new_memory(cuda, (size_t)TENSORS * TENSOR_BYTES);
    if (m->memory && open_comm(m) && open_plan(m))
        return m;
    fprintf(stderr, "overhead: %s\n", m->memory ? ep_last_error() : "no memory");
    return NULL;
}

double overhead_batch(const void *opened, int batch)
{
    const struct measured *m = opened;
    ep_status status = EP_OK;
    double begin = now(), each;

    for (int n = 0; n < batch && status == EP_OK; n++)
        status = m->cuda ? ep_dispatch(m->plan, &m->args, NULL) : ep_dispatch_sync(m->plan, &m->args);
    each = (now() - begin) / batch;
    if (m->cuda && status == EP_OK)
        status = ep_stream_sync(m->comm, NULL);
    if (status == EP_OK)
        return each;
    fprintf(stderr, "overhead: dispatch: %s\n", ep_last_error());
    return -1;
}
