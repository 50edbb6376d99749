/* SPDX-License-Identifier: Apache-2.0 */
/* ep_launch() is killed by SIGKILL: no rank may survive it, at any point. */
#include "common/ranks/local_ranks.h"
#include "fault.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum scenario { SCENARIO_CREATION, SCENARIO_BARRIER, SCENARIO_TRAFFIC, SCENARIO_ASYNC, SCENARIO_SHRINK, SCENARIOS };

static const char *const scene_names[SCENARIOS] = {
    "launcher.creation/kill", "launcher.barrier/kill", "launcher.traffic/kill",
    "launcher.async/kill",    "launcher.shrink/kill",
};
const int n_launcher_cells = SCENARIOS;

const char *launcher_cell_name(int i)
{
    return scene_names[i];
}

struct stage {
    enum scenario scenario;
    _Atomic int pid[RANKS];
    _Atomic int there; /* ranks that are in the scenario, or about to enter it */
};

/* Ranks repeat the scenario far longer than the test lasts. Rank 0 keeps the others waiting if they are to wait. */
static int run_scene(const ep_boot *boot, void *argument)
{
    struct stage *stage = argument;
    struct traffic traffic = {0};
    ep_comm_config config = EP_COMM_CONFIG_INIT;
    bool wait = boot->rank == 0 && stage->scenario != SCENARIO_TRAFFIC && stage->scenario != SCENARIO_ASYNC;
    ep_comm *comm, *next;

    config.backend = "host";
    config.timeout_ms = 60000;
    atomic_store(&stage->pid[boot->rank], (int)getpid());
    if (stage->scenario == SCENARIO_CREATION)
        atomic_fetch_add(&stage->there, 1);
    if (stage->scenario == SCENARIO_CREATION && wait)
        pause();
    if (ep_comm_new(boot, &config, &comm) != EP_OK || traffic_init(&traffic, comm) != EP_OK)
        return 1;
    atomic_fetch_add(&stage->there, 1);
    if (wait)
        pause();
    if (stage->scenario == SCENARIO_BARRIER)
        return ep_comm_barrier(comm) != EP_OK;
    if (stage->scenario == SCENARIO_SHRINK)
        return ep_comm_shrink(comm, NULL, &next) != EP_OK;
    for (;;) {
        ep_status status = traffic_step(&traffic, STEP_PLAN);

        if (status == EP_OK)
            status = traffic_step(&traffic, stage->scenario == SCENARIO_ASYNC ? STEP_ASYNC_DISPATCH : STEP_DISPATCH);
        if (status != EP_OK)
            return 1;
    }
}

static int launch(struct stage *stage)
{
    ep_launch_args args = EP_LAUNCH_ARGS_INIT;
    ep_rank_exit exits[RANKS];

    args.mode = EP_LAUNCH_FORK;
    args.nranks = RANKS;
    args.run = run_scene;
    args.argument = stage;
    return ep_launch(&args, exits) != EP_OK;
}

/*
 * The ranks have become children of this process, a subreaper, and must have been killed by the death of the launcher.
 */
static bool all_died(struct stage *stage, char *ret_why, size_t bytes)
{
    uint64_t end_ns = now_ns() + (uint64_t)CELL_MS * 1000000u;
    int left = RANKS, how, pid;

    while (left > 0 && now_ns() < end_ns) {
        pid = waitpid(-1, &how, WNOHANG);
        if (pid < 0)
            break;
        if (pid == 0) {
            sleep_us(1000);
            continue;
        }
        left--;
        if (!WIFSIGNALED(how) || WTERMSIG(how) != SIGKILL) {
            snprintf(ret_why, bytes, "\n     a rank ended by itself, with status %#x", (unsigned)how);
            return false;
        }
    }
    if (left == 0)
        return true;
    snprintf(ret_why, bytes, "\n     %d ranks outlive their launcher", left);
    for (int rank = 0; rank < RANKS; rank++)
        if (kill(stage->pid[rank], 0) == 0) {
            show_process(stage->pid[rank], "left");
            kill(stage->pid[rank], SIGKILL);
        }
    while (waitpid(-1, &how, 0) > 0)
        ;
    return false;
}

bool run_launcher_cell(int i)
{
    struct resources before = count_resources();
    struct stage *stage = mmap(NULL, sizeof(*stage), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    uint64_t begin_ns = now_ns(), end_ns;
    char why[256] = "", left[128];
    bool passed;
    int pid, how;

    if (stage == MAP_FAILED)
        return false;
    measure_load();
    end_ns = begin_ns + (uint64_t)CELL_MS * 1000000u;
    stage->scenario = (enum scenario)i;
    fflush(NULL);
    pid = fork();
    if (pid == 0)
        exit(launch(stage));
    while (atomic_load(&stage->there) < RANKS && now_ns() < end_ns)
        sleep_us(1000);
    sleep_us(30000);
    if (atomic_load(&stage->there) < RANKS || kill(pid, SIGKILL) != 0)
        snprintf(why, sizeof(why), "\n     the ranks did not come into the scenario");
    kill(pid, SIGKILL);
    waitpid(pid, &how, 0);
    passed = all_died(stage, why, sizeof(why)) && !why[0];
    munmap(stage, sizeof(*stage));
    if (!check_resources(&before, left, sizeof(left))) {
        snprintf(why, sizeof(why), "\n     left behind: %s", left);
        passed = false;
    }
    print_result(passed, scene_names[i], begin_ns, why);
    return passed;
}
