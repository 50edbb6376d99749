/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fault_cuda [--ranks N]: the last rank is killed, stopped, late, or stuck on its device while the others dispatch.
 * Each of these must get a status that names it within the deadline, with the CUDA context alive, and go on in a new
 * group.
 */
#include <stdbool.h>

#include "case.h"

#include <cuda_runtime_api.h>
#include <epkit/cuda.h>
#include <epkit/launch.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MAX_RANKS 32
#define TIMEOUT_MS 1500

enum fault { KILL, STOP, LATE, STUCK, N_FAULTS };
static const char *const fault_names[N_FAULTS] = {"kill", "stop", "late", "stuck"};

struct scene {
    ep_boot_shm *second;
    enum fault fault;
};

struct group {
    ep_comm *host, *cuda;
    int rank, nranks, victim;
    pid_t victim_pid;
};

static const struct shape shape = {.n_tokens = 64,
                                   .hidden = 1024,
                                   .topk = 4,
                                   .n_experts = 840,
                                   .dtype = EP_BF16,
                                   .idx_type = EP_I64,
                                   .symmetric = true,
                                   .choice = true};

#define EXPECT(condition, ...)                                                                                         \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "rank %d: not %s: ", g->rank, #condition);                                                 \
            fprintf(stderr, __VA_ARGS__);                                                                              \
            fprintf(stderr, "\n");                                                                                     \
            return 1;                                                                                                  \
        }                                                                                                              \
    } while (0)

static double now_ms(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}

static void sleep_ms(int ms)
{
    struct timespec span = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000L};

    nanosleep(&span, NULL);
}

static void CUDART_CB be_stuck(void *argument)
{
    (void)argument;
    sleep_ms(2 * TIMEOUT_MS);
}

/* The victim's part before the call; returns in LATE and STUCK alone. */
static int suffer(struct group *g, enum fault fault)
{
    cudaStream_t stream;

    if (fault == KILL)
        kill(getpid(), SIGKILL);
    if (fault == STOP)
        kill(getpid(), SIGSTOP);
    if (fault == LATE)
        sleep_ms(TIMEOUT_MS + TIMEOUT_MS / 3); /* late for the call, not for the new group */
    if (fault == STUCK) {
        EXPECT(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess, "stream");
        EXPECT(ep_cuda_set_stream(g->cuda, stream) == EP_OK, "%s", ep_last_error());
        EXPECT(cudaLaunchHostFunc(stream, be_stuck, NULL) == cudaSuccess, "host function");
    }
    return 0;
}

static int call_dispatch(struct group *g, ep_plan *plan, void *x, void *out, enum fault fault, ep_status *ret_status)
{
    ep_dispatch_args args = EP_DISPATCH_ARGS_INIT;
    ep_plan_info info = {.size = sizeof(info)};

    EXPECT(ep_plan_get_info(plan, &info) == EP_OK, "%s", ep_last_error());
    args.x = x;
    args.dtype = EP_BF16;
    args.hidden = shape.hidden;
    args.recv_x = out;
    args.out_rows = info.out_rows;
    EXPECT(ep_dispatch(plan, &args, NULL) == EP_OK, "%s", ep_last_error());
    if (g->rank == g->victim && suffer(g, fault))
        return 1;
    *ret_status = ep_dispatch(plan, &args, NULL);
    return 0;
}

static int meet_fault(struct group *g, enum fault fault)
{
    ep_plan_args args = EP_PLAN_ARGS_INIT;
    ep_plan *plan = NULL;
    ep_status status;
    int64_t index[64 * 4];
    void *x, *out;
    char name[32];
    double begin;

    for (int i = 0; i < 64 * 4; i++)
        index[i] = (int64_t)(i * 7 + g->rank) % 840;
    args.topk_idx = index;
    args.idx_type = EP_I64;
    args.n_tokens = 64;
    args.topk = 4;
    args.n_experts = 840;
    EXPECT(ep_plan_new(g->cuda, &args, &plan) == EP_OK, "%s", ep_last_error());
    EXPECT(cudaMalloc(&x, 64 * 2048) == cudaSuccess, "x");
    EXPECT(cudaMemset(x, 0x3c, 64 * 2048) == cudaSuccess, "x");
    EXPECT(ep_alloc(g->cuda, (size_t)64 * 4 * 2048 * (size_t)g->nranks, &out) == EP_OK, "%s", ep_last_error());
    begin = now_ms();
    if (call_dispatch(g, plan, x, out, fault, &status))
        return 1;
    EXPECT(status == (fault == KILL ? EP_E_PEER_DEAD : EP_E_TIMEOUT), "%s: %s", ep_status_name(status),
           ep_last_error());
    snprintf(name, sizeof(name), "rank %d", g->victim);
    EXPECT(strstr(ep_last_error(), name), "%s", ep_last_error());
    if (g->rank != g->victim)
        EXPECT(now_ms() - begin < TIMEOUT_MS + 1000, "after %.0f ms", now_ms() - begin);
    if (g->rank == 0)
        printf("%s: after %.0f ms: %s\n", fault_names[fault], now_ms() - begin, ep_last_error());
    ep_plan_free(plan);
    EXPECT(cudaMemset(x, 0, 64 * 2048) == cudaSuccess && cudaDeviceSynchronize() == cudaSuccess, "context");
    EXPECT(cudaFree(x) == cudaSuccess, "context");
    return 0;
}

static int go_on(struct group *g, enum fault fault)
{
    bool gone = fault == KILL || fault == STOP;
    ep_comm *host = NULL, *cuda = NULL;
    ep_comm_info info = {.size = sizeof(info)};
    struct shape mine = shape;
    int bad;

    EXPECT(ep_comm_shrink(g->cuda, NULL, &cuda) == EP_OK, "%s", ep_last_error());
    EXPECT(ep_comm_shrink(g->host, NULL, &host) == EP_OK, "%s", ep_last_error());
    EXPECT(ep_comm_get_info(cuda, &info) == EP_OK, "%s", ep_last_error());
    EXPECT(info.nranks == g->nranks - (gone ? 1 : 0), "%d ranks", info.nranks);
    mine.seed = (uint64_t)g->rank + 1;
    bad = case_run(host, cuda, &mine);
    if (gone && g->rank == 0)
        kill(g->victim_pid, SIGKILL);
    ep_comm_free(cuda);
    ep_comm_free(host);
    return bad;
}

static int run_rank(const ep_boot *boot, void *argument)
{
    const struct scene *scene = argument;
    ep_comm_config config = EP_COMM_CONFIG_INIT;
    struct group group = {.rank = boot->rank, .nranks = boot->nranks, .victim = boot->nranks - 1}, *g = &group;
    pid_t mine = getpid(), all[MAX_RANKS];
    ep_boot other;
    int device, code;

    config.timeout_ms = TIMEOUT_MS;
    config.backend = "host";
    EXPECT(ep_boot_shm_join(scene->second, boot->rank, &other) == EP_OK, "%s", ep_last_error());
    EXPECT(ep_comm_new(boot, &config, &g->host) == EP_OK, "%s", ep_last_error());
    config.backend = "cuda";
    config.timeout_ms = 20000;
    EXPECT(ep_comm_allgather(g->host, &mine, sizeof(mine), all) == EP_OK, "%s", ep_last_error());
    config.timeout_ms = TIMEOUT_MS;
    EXPECT(ep_comm_new(&other, &config, &g->cuda) == EP_OK, "%s", ep_last_error());
    EXPECT(ep_cuda_get_device(g->cuda, &device, NULL) == EP_OK && cudaSetDevice(device) == cudaSuccess, "device");
    g->victim_pid = all[g->victim];
    code = meet_fault(g, scene->fault) || go_on(g, scene->fault);
    ep_comm_free(g->cuda);
    ep_comm_free(g->host);
    return code;
}

int main(int argc, char **argv)
{
    ep_launch_args launch = EP_LAUNCH_ARGS_INIT;
    ep_rank_exit exits[MAX_RANKS];
    int ranks = argc > 2 ? atoi(argv[2]) : 2, code = 0;

    for (int fault = 0; fault < N_FAULTS; fault++) {
        struct scene scene = {.fault = (enum fault)fault};
        bool gone = fault == KILL || fault == STOP;
        int failed = 0;

        if (ep_boot_shm_new(ranks, &scene.second) != EP_OK)
            return 2;
        launch.nranks = ranks;
        launch.run = run_rank;
        launch.argument = &scene;
        launch.timeout_ms = 60000;
        ep_launch(&launch, exits); /* a killed rank is what we want */
        for (int rank = 0; rank < ranks - (gone ? 1 : 0); rank++)
            failed |= exits[rank].code != 0;
        printf("fault_cuda: %d ranks, %s: %s\n", ranks, fault_names[fault], failed ? "FAILED" : "passed");
        fflush(stdout);
        code |= failed;
        ep_boot_shm_free(scene.second);
    }
    return code;
}
