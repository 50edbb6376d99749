/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The deferred free list: device memory of closed communicators that peers may still have mapped. A kernel of a slow
 * peer may write into the segment of a rank that has finished, and an exported allocation must not be freed before the
 * peers have unmapped it (cudaIpcOpenMemHandle() in the CUDA runtime's reference). So each rank sets a bit in the
 * control pages of the peers whose memory it has mapped, and clears it when it closes. Memory that is still mapped goes
 * to the list, and a later call here frees it. Waiting instead would hang a program that frees the communicators of its
 * threads one by one. If the process ends first, the driver frees the memory.
 *
 * cudaFree() may wait for all that runs on its device and on the peers of that device, including a kernel that waits
 * for a rank of this process. So a rank frees memory of another device only where no communicator is open on that
 * device, and no operation frees deferred memory.
 */
#include "backend/cuda/cuda.h"
#include "base/fd.h"

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#define CLOSE_WAIT_NS 1000000000u /* ranks mostly close at about the same time */
#define MAX_DEVICES 256

/* Memory of a closed communicator. */
struct deferred {
    struct deferred *next;
    struct ep_shm shm; /* of the control page */
    struct cuda_ctrl *ctrl;
    struct ep_process process[CUDA_MAX_RANKS]; /* of the node, as in struct ep_group_peer, with pidfds of its own */
    int device, n;
    void *memory[CUDA_SLOTS];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct deferred *deferred_list;
static int open_on[MAX_DEVICES]; /* communicators of this process */

void cuda_set_mapped_by(struct cuda_comm *cuda, int rank, bool mapped)
{
    uint32_t mine = 1u << cuda->group.local;
    struct cuda_ctrl *ctrl = cuda->peers[rank].ctrl;

    if (!ctrl || rank == cuda->group.comm->rank || cuda->peers[rank].marked == mapped)
        return;
    cuda->peers[rank].marked = mapped;
    if (mapped)
        atomic_fetch_or(&ctrl->mapped_by, mine);
    else
        atomic_fetch_and(&ctrl->mapped_by, ~mine);
}

/* The ranks of `ranks` that still have the memory mapped. */
static uint32_t find_mapped_by(const struct deferred *d, uint32_t ranks)
{
    ranks &= atomic_load(&d->ctrl->mapped_by);
    for (int rank = 0; rank < CUDA_MAX_RANKS; rank++)
        if (ranks >> rank & 1 && ep_process_probe(&d->process[rank]) == EP_PROCESS_DEAD)
            ranks &= ~(1u << rank);
    return ranks;
}

/* Does not wait for threads of this process: they may only be able to close after this one has returned. */
static void wait_for_processes(const struct cuda_comm *cuda, const struct deferred *d)
{
    uint64_t limit = (uint64_t)cuda->group.comm->config.timeout_ms * 1000000u;
    struct cuda_backoff backoff = {.begin_ns = 0};
    uint32_t others = 0;

    for (int rank = cuda->group.first; rank < cuda_end_of_node(cuda); rank++)
        if (!cuda->peers[rank].same_process)
            others |= 1u << (rank - cuda->group.first);
    limit = ep_now_ns() + (limit < CLOSE_WAIT_NS ? limit : CLOSE_WAIT_NS);
    while (find_mapped_by(d, others) && ep_now_ns() < limit)
        cuda_backoff(&backoff);
}

static void free_deferred(struct deferred *d)
{
    int previous = -1;

    if (cudaGetDevice(&previous) == cudaSuccess && cudaSetDevice(d->device) == cudaSuccess) {
        for (int i = 0; i < d->n; i++)
            cudaFree(d->memory[i]);
        cuda_restore_device(previous);
    }
    cudaGetLastError();
    for (int rank = 0; rank < CUDA_MAX_RANKS; rank++)
        ep_process_close(&d->process[rank]);
    ep_shm_done(&d->shm);
    free(d);
}

void cuda_count_open(const struct cuda_comm *cuda, int change)
{
    pthread_mutex_lock(&lock);
    if (cuda->device < MAX_DEVICES)
        open_on[cuda->device] += change;
    pthread_mutex_unlock(&lock);
}

/* May a rank on device `own` free memory of `device`? */
static bool may_free(int device, int own)
{
    return device == own || own == CUDA_ALL_DEVICES || (device < MAX_DEVICES && !open_on[device]);
}

void cuda_reclaim(int own)
{
    struct deferred *to_free = NULL;

    pthread_mutex_lock(&lock);
    for (struct deferred **at = &deferred_list; *at;) {
        struct deferred *d = *at;

        if (!may_free(d->device, own) || find_mapped_by(d, UINT32_MAX)) {
            at = &d->next;
            continue;
        }
        *at = d->next;
        d->next = to_free;
        to_free = d;
    }
    pthread_mutex_unlock(&lock);
    while (to_free) {
        struct deferred *next = to_free->next;

        free_deferred(to_free);
        to_free = next;
    }
}

static void copy_processes(const struct cuda_comm *cuda, struct deferred *d)
{
    for (int rank = 0; rank < CUDA_MAX_RANKS; rank++) {
        const struct ep_group_peer *peer =
            rank < cuda->group.nlocal ? &cuda->group.peers[cuda->group.first + rank] : NULL;

        d->process[rank] = peer ? peer->process : (struct ep_process){.pidfd = -1};
        if (peer && peer->process.pidfd >= 0)
            d->process[rank].pidfd = ep_fd_above_stdio(fcntl(peer->process.pidfd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1));
    }
}

static void move_memory(struct cuda_comm *cuda, struct deferred *d)
{
    for (int slot = 0; slot < CUDA_SLOTS; slot++) {
        if (cuda->allocations[slot].base && !cuda->allocations[slot].foreign)
            d->memory[d->n++] = cuda->allocations[slot].base;
        cuda->allocations[slot].base = NULL;
    }
    cuda->signals = NULL;
}

void cuda_defer_free(struct cuda_comm *cuda)
{
    struct deferred *d = calloc(1, sizeof(*d));

    /* Without memory for the list the driver frees the rest when the process ends. */
    if (!d)
        return;
    d->device = cuda->device;
    copy_processes(cuda, d);
    /* A second attachment, which outlives the communicator. */
    if (ep_shm_attach(&cuda->group.control->slot[CUDA_CTRL_SLOT].name, 0, &d->shm) != EP_OK) {
        free_deferred(d);
        return;
    }
    d->ctrl = d->shm.base;
    move_memory(cuda, d);
    wait_for_processes(cuda, d);
    pthread_mutex_lock(&lock);
    d->next = deferred_list;
    deferred_list = d;
    pthread_mutex_unlock(&lock);
    cuda_reclaim(cuda->device);
}
