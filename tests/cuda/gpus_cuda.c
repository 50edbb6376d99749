/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The GPUs that libepkit-cuda finds with a simulated CUDA runtime, four calls of which the linker wraps; the GPU that
 * each rank takes; and the groups that it refuses before it opens anything. Needs no GPU.
 */
#include "backend/cuda/cuda.h"
#include "base/error.h"
#include "tests/local_ranks.h"

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

extern const struct ep_cuda_module ep_cuda_module;

/* The machine: compute capabilities by GPU, and the pair, in one direction, that has no P2P. */
static struct machine {
    int n, major[4], from, to;
    cudaError_t broken;
} machine;

cudaError_t __wrap_cudaGetDeviceCount(int *ret_n);
cudaError_t __wrap_cudaDeviceGetAttribute(int *ret_value, enum cudaDeviceAttr attribute, int device);
cudaError_t __wrap_cudaDeviceCanAccessPeer(int *ret_can, int device, int peer);
cudaError_t __wrap_cudaDeviceGetPCIBusId(char *ret_id, int bytes, int device);

cudaError_t __wrap_cudaGetDeviceCount(int *ret_n)
{
    *ret_n = machine.n;
    return machine.broken;
}

/* The GPU that each thread has queried last. */
static _Thread_local int asked;

cudaError_t __wrap_cudaDeviceGetAttribute(int *ret_value, enum cudaDeviceAttr attribute, int device)
{
    asked = device;
    *ret_value = attribute == cudaDevAttrComputeCapabilityMajor ? machine.major[device] : 0;
    return cudaSuccess;
}

cudaError_t __wrap_cudaDeviceCanAccessPeer(int *ret_can, int device, int peer)
{
    *ret_can = !(device == machine.from && peer == machine.to);
    return cudaSuccess;
}

cudaError_t __wrap_cudaDeviceGetPCIBusId(char *ret_id, int bytes, int device)
{
    snprintf(ret_id, (size_t)bytes, "0000:%dB:00.0", device);
    return cudaSuccess;
}

#define GPU(n) "GPU 0000:" #n "b:00.0"
#define OLD " is not of compute capability 9.0 or later"
#define NONE "no usable GPU: "

static const struct test {
    const char *name;
    struct machine machine;
    ep_status status;
    int visible, usable, connected;
    const char *why; /* the error, where the status is one */
} tests[] = {
    {"all of a kind", {4, {9, 9, 9, 9}, -1, -1, cudaSuccess}, EP_OK, 4, 4, 4, ""},
    {"one", {1, {10}, -1, -1, cudaSuccess}, EP_OK, 1, 1, 1, ""},
    {"the second is old", {3, {9, 8, 9}, -1, -1, cudaSuccess}, EP_OK, 3, 1, 1, GPU(1) OLD},
    {"no P2P forward", {2, {9, 9}, 0, 1, cudaSuccess}, EP_OK, 2, 2, 1, "no P2P between " GPU(0) " and " GPU(1)},
    {"no P2P back", {4, {9, 9, 9, 9}, 3, 1, cudaSuccess}, EP_OK, 4, 4, 3, "no P2P between " GPU(1) " and " GPU(3)},
    {"both", {3, {9, 9, 8}, 0, 1, cudaSuccess}, EP_OK, 3, 2, 1, "no P2P between " GPU(0) " and " GPU(1)},
    {"an old one without P2P", {3, {9, 9, 8}, 0, 2, cudaSuccess}, EP_OK, 3, 2, 2, GPU(2) OLD},
    {"the first is old",
     {2, {8, 9}, -1, -1, cudaSuccess},
     EP_OK,
     2,
     0,
     0,
     NONE "GPU 0 is of compute capability 8; 9.0 or later is needed"},
    {"none", {0, {0}, -1, -1, cudaErrorNoDevice}, EP_E_UNSUPPORTED, 0, 0, 0, NONE "none is visible"},
    {"no driver",
     {0, {0}, -1, -1, cudaErrorInsufficientDriver},
     EP_E_UNSUPPORTED,
     0,
     0,
     0,
     NONE "CUDA driver version is insufficient for CUDA runtime version"},
};

static bool run(const struct test *test)
{
    struct ep_cuda_gpus gpus = {.visible = 0};
    ep_status status;
    const char *why;
    bool good;

    machine = test->machine;
    status = ep_cuda_module.query_gpus(&gpus);
    why = status == EP_OK ? gpus.why : ep_last_error();
    good = status == test->status && gpus.visible == test->visible && gpus.usable == test->usable &&
           gpus.connected == test->connected && strcmp(why, test->why) == 0;
    for (int i = 0; i < gpus.visible; i++) {
        char address[32];

        snprintf(address, sizeof(address), "0000:%db:00.0", i);
        good = good && strcmp(gpus.address[i], address) == 0;
    }
    printf("%s: %s\n", test->name, good ? "ok" : "FAILED");
    if (!good)
        printf("    %s, %d visible, %d usable, %d connected: %s\n", ep_status_name(status), gpus.visible, gpus.usable,
               gpus.connected, why);
    return good;
}

/* A group must be refused before its first exchange. */
static ep_status fail_allgather(void *context, const void *mine, size_t bytes, int timeout_ms, void *ret_all)
{
    (void)mine, (void)bytes, (void)timeout_ms, (void)ret_all;
    *(bool *)context = true;
    return ep_fail(EP_E_STATE, "the all-gather was called");
}

static bool run_group(const char *name, int nranks, int nnodes, ep_status expected, const char *says)
{
    bool gathered = false, good;
    ep_comm comm = {.nranks = nranks,
                    .n_members = nranks,
                    .nnodes = nnodes,
                    .ranks_per_node = nranks / nnodes,
                    .config = {.timeout_ms = 1000}};
    ep_boot boot = {.size = sizeof(boot), .nranks = nranks, .context = &gathered, .allgather = fail_allgather};
    ep_status status;

    memset(comm.members, 0xff, sizeof(comm.members));
    status = cuda_comm_open(&comm, &boot);
    good = status == expected && strstr(ep_last_error(), says) && !comm.impl && gathered == (expected == EP_E_STATE);
    printf("%s: %s\n", name, good ? "ok" : "FAILED");
    if (!good)
        printf("    %s, all-gather %s, impl %p: %s\n", ep_status_name(status), gathered ? "called" : "not called",
               comm.impl, ep_last_error());
    return good;
}

/* The GPU that each of two ranks takes: all are too old, so each queries one and is refused before it opens it. */
static const struct choice {
    const char *name;
    int device[2], taken[2];
    ep_status status;
} choices[] = {
    {"by place", {-1, -1}, {0, 1}, EP_E_UNSUPPORTED}, {"device 0 is device 0", {0, 0}, {0, 0}, EP_E_UNSUPPORTED},
    {"crosswise", {1, 0}, {1, 0}, EP_E_UNSUPPORTED},  {"one by place", {1, -1}, {1, 1}, EP_E_UNSUPPORTED},
    {"none of these", {2, 2}, {-1, -1}, EP_E_ARG},    {"below the default", {-2, -2}, {-1, -1}, EP_E_ARG},
};

static int choose(const ep_boot *boot, void *argument)
{
    const struct choice *choice = argument;
    ep_comm comm = {.rank = boot->rank,
                    .nranks = 2,
                    .n_members = 2,
                    .members = {3},
                    .nnodes = 1,
                    .ranks_per_node = 2,
                    .config = {.timeout_ms = 10000, .device = choice->device[boot->rank]}};
    ep_status status;

    asked = -1;
    status = cuda_comm_open(&comm, boot);
    if (status == choice->status && asked == choice->taken[boot->rank])
        return 0;
    printf("    rank %d asked GPU %d, not %d, %s: %s\n", boot->rank, asked, choice->taken[boot->rank],
           ep_status_name(status), ep_last_error());
    return 1;
}

static bool run_choice(const struct choice *choice)
{
    ep_launch_args launch = EP_LAUNCH_ARGS_INIT;
    ep_rank_exit exits[2];
    bool good;

    machine = (struct machine){2, {8, 8}, -1, -1, cudaSuccess};
    launch.mode = EP_LAUNCH_THREADS;
    launch.nranks = 2;
    launch.run = choose;
    launch.argument = (void *)choice;
    good = ep_launch(&launch, exits) == EP_OK && exits[0].code == 0 && exits[1].code == 0;
    printf("device, %s: %s\n", choice->name, good ? "ok" : "FAILED");
    return good;
}

int main(void)
{
    bool good = true;

    good &= run_group("two nodes", 4, 2, EP_E_STATE, "the all-gather was called");
    good &= run_group("a rank a node", 64, 64, EP_E_STATE, "the all-gather was called");
    good &= run_group("two nodes of more ranks than there can be", 66, 2, EP_E_UNSUPPORTED, "up to 32 ranks, not 33");
    good &= run_group("too many ranks", CUDA_MAX_RANKS + 1, 1, EP_E_UNSUPPORTED, "up to 32 ranks, not 33");
    /* A supported group reaches its first exchange. */
    good &= run_group("as many as there may be", CUDA_MAX_RANKS, 1, EP_E_STATE, "the all-gather was called");
    for (size_t i = 0; i < sizeof(choices) / sizeof(choices[0]); i++)
        good &= run_choice(&choices[i]);
    for (size_t i = 0; i < sizeof(tests) / sizeof(tests[0]); i++)
        good &= run(&tests[i]);
    return good ? 0 : 1;
}
