/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Leaving: device memory of a communicator that peers may still have mapped. A kernel of a late peer writes into the
 * segment of a rank that has nothing more to do, and an exported allocation must not be freed before the peers have
 * unmapped it (cudaIpcOpenMemHandle() in the CUDA runtime's reference). So each rank notes on the boards of the others
 * that it reaches them, and takes that back when it leaves. Memory that is still reached is kept until nobody does, and
 * freed by a later call here: waiting for that would hang a program that frees the communicators of its threads one by
 * one. Should the process end before, the driver frees it.
 *
 * cudaFree() may wait for all that runs on its device and on its peers', a kernel among it that waits for a rank of
 * this process. So one rank frees memory of another one's device only where no communicator is open on that, and no
 * operation frees what is kept.
 */
#include "backend/cuda/cuda.h"

#include <fcntl.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define PATIENCE_NS 1000000000u /* ranks mostly leave at about the same time */
#define MOST_DEVICES 256
#define MOST_MEMORY (CUDA_SLOTS + 1)

/* Memory of a rank that has left. */
struct estate {
    struct estate *next;
    struct ep_shm shm; /* of the board */
    struct cuda_board *board;
    struct ep_process process[CUDA_MAX_RANKS]; /* of the node, as in struct ep_group_peer, with pidfds of its own */
    int device, n;
    void *memory[MOST_MEMORY];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct estate *estates;
static int open_on[MOST_DEVICES]; /* communicators of this process */

void cuda_note_reach(struct cuda_comm *cuda, int rank, bool reaches)
{
    uint32_t mine = 1u << cuda->group.local;
    struct cuda_board *board = cuda->peers[rank].board;

    if (!board || rank == cuda->group.comm->rank)
        return;
    if (reaches)
        atomic_fetch_or(&board->reached_by, mine);
    else
        atomic_fetch_and(&board->reached_by, ~mine);
}

/* Ranks that still reach the memory, of those in `of`. */
static uint32_t find_reaching(const struct estate *estate, uint32_t of)
{
    uint32_t ranks = atomic_load(&estate->board->reached_by) & of;

    for (int rank = 0; rank < CUDA_MAX_RANKS; rank++)
        if (ranks >> rank & 1 && ep_process_look(&estate->process[rank]) == EP_PROCESS_DEAD)
            ranks &= ~(1u << rank);
    return ranks;
}

/* Threads of this process may only be able to leave when this one returns: they are not waited for. */
static void wait_for_processes(const struct cuda_comm *cuda, const struct estate *estate)
{
    uint64_t limit = (uint64_t)cuda->group.comm->config.timeout_ms * 1000000u;
    struct timespec backoff = {.tv_nsec = 50000};
    uint32_t others = 0;

    for (int rank = cuda->group.first; rank < cuda_end_of_node(cuda); rank++)
        if (!cuda->peers[rank].same_process)
            others |= 1u << (rank - cuda->group.first);
    limit = ep_now_ns() + (limit < PATIENCE_NS ? limit : PATIENCE_NS);
    while (find_reaching(estate, others) && ep_now_ns() < limit) {
        nanosleep(&backoff, NULL);
        if (backoff.tv_nsec < 5000000)
            backoff.tv_nsec *= 2;
    }
}

static void free_estate(struct estate *estate)
{
    int previous = -1;

    if (cudaGetDevice(&previous) == cudaSuccess && cudaSetDevice(estate->device) == cudaSuccess) {
        for (int i = 0; i < estate->n; i++)
            cudaFree(estate->memory[i]);
        cuda_return_to(previous);
    }
    cudaGetLastError();
    for (int rank = 0; rank < CUDA_MAX_RANKS; rank++)
        ep_process_close(&estate->process[rank]);
    ep_shm_done(&estate->shm);
    free(estate);
}

void cuda_count_open(const struct cuda_comm *cuda, int change)
{
    pthread_mutex_lock(&lock);
    if (cuda->device < MOST_DEVICES)
        open_on[cuda->device] += change;
    pthread_mutex_unlock(&lock);
}

/* May memory of the device be freed by a rank on `own`? */
static bool may_free(int device, int own)
{
    return device == own || own == CUDA_ALL_DEVICES || (device < MOST_DEVICES && !open_on[device]);
}

void cuda_settle(int own)
{
    struct estate *settled = NULL;

    pthread_mutex_lock(&lock);
    for (struct estate **at = &estates; *at;) {
        struct estate *estate = *at;

        if (!may_free(estate->device, own) || find_reaching(estate, UINT32_MAX)) {
            at = &estate->next;
            continue;
        }
        *at = estate->next;
        estate->next = settled;
        settled = estate;
    }
    pthread_mutex_unlock(&lock);
    while (settled) {
        struct estate *next = settled->next;

        free_estate(settled);
        settled = next;
    }
}

static void note_processes(const struct cuda_comm *cuda, struct estate *estate)
{
    for (int rank = 0; rank < CUDA_MAX_RANKS; rank++) {
        const struct ep_group_peer *peer =
            rank < cuda->group.nlocal ? &cuda->group.peers[cuda->group.first + rank] : NULL;

        estate->process[rank] = peer ? peer->process : (struct ep_process){.pidfd = -1};
        if (peer && peer->process.pidfd >= 0)
            estate->process[rank].pidfd = fcntl(peer->process.pidfd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
    }
}

static void take_memory(struct cuda_comm *cuda, struct estate *estate)
{
    for (int slot = 0; slot < CUDA_SLOTS; slot++) {
        if (cuda->allocations[slot].base && !cuda->allocations[slot].foreign)
            estate->memory[estate->n++] = cuda->allocations[slot].base;
        cuda->allocations[slot].base = NULL;
    }
    if (cuda->signals)
        estate->memory[estate->n++] = cuda->signals;
    cuda->signals = NULL;
}

void cuda_leave_memory(struct cuda_comm *cuda)
{
    struct estate *estate = calloc(1, sizeof(*estate));

    /* Without memory for this note the driver frees the rest when the process ends. */
    if (!estate)
        return;
    estate->device = cuda->device;
    note_processes(cuda, estate);
    /* Attached to once more, so that it stays when the communicator goes. */
    if (ep_shm_attach(&cuda->group.control->slot[CUDA_BOARD_SLOT].name, NULL, &estate->shm) != EP_OK) {
        free_estate(estate);
        return;
    }
    estate->board = estate->shm.base;
    take_memory(cuda, estate);
    wait_for_processes(cuda, estate);
    pthread_mutex_lock(&lock);
    estate->next = estates;
    estates = estate;
    pthread_mutex_unlock(&lock);
    cuda_settle(cuda->device);
}
