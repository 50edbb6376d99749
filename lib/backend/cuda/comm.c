/* SPDX-License-Identifier: Apache-2.0 */
#include "backend/cuda/ll_impl.h"
#include "group/memory.h"
#include "group/queue.h"

#include <assert.h>
#include <epkit/cuda.h>
#include <stdlib.h>
#include <string.h>

static_assert(sizeof(struct cuda_report) <= 4096, "a report fits a page");

#define REPORT_BYTES 4096
#define SCRATCH_BYTES (CUDA_SCRATCH_WORDS * sizeof(int32_t))
#define MAP_BYTES(cuda) ((size_t)(cuda)->group.nlocal * CUDA_SLOTS * sizeof(struct cuda_map_entry))

/* Process and device of a rank, for the whole group. */
struct location {
    struct ep_process_id process;
    char bus_id[20]; /* "": no device is chosen yet */
};

/* ret_all [R]; collective. */
static ep_status gather_locations(const struct cuda_comm *cuda, const ep_boot *boot, struct location *ret_all)
{
    struct location mine;

    memset(&mine, 0, sizeof(mine));
    ep_process_get_self(&mine.process);
    memcpy(mine.bus_id, cuda->ctrl->bus_id, sizeof(mine.bus_id));
    return boot->allgather(boot->context, &mine, sizeof(mine), cuda->group.comm->config.timeout_ms, ret_all);
}

/* Containers of a machine have PID namespaces of their own, and each numbers its GPUs from 0 on. */
static bool see_same_gpus(const struct ep_process_id *a, const struct ep_process_id *b)
{
    return memcmp(a->host, b->host, sizeof(a->host)) == 0 && a->pid_namespace == b->pid_namespace;
}

/*
 * The order of this rank among the ranks that see the same GPUs; they may be of several nodes. Where the machine is
 * unknown it is the order within the node.
 */
static ep_status find_device_order(struct cuda_comm *cuda, const ep_boot *boot)
{
    struct location all[EP_MAX_RANKS];
    int me = cuda->group.comm->rank;

    EP_TRY(gather_locations(cuda, boot, all));
    if (!all[me].process.host[0]) {
        cuda->device_order = cuda->group.local;
        return EP_OK;
    }
    cuda->device_order = 0;
    /* Absent ranks of this node count as if they were here: they may come, or have been here before. */
    for (int rank = 0; rank < me; rank++)
        cuda->device_order += ep_comm_has(cuda->group.comm, rank) ? see_same_gpus(&all[rank].process, &all[me].process)
                                                                  : rank >= cuda->group.first;
    return EP_OK;
}

/* With device -1, the default, the rank's device_order decides. */
static ep_status choose_device(struct cuda_comm *cuda)
{
    const ep_comm *comm = cuda->group.comm;
    int n = 0, device = comm->config.device, shared = 0, clusters = 0;

    CUDA_TRY(cudaGetDeviceCount(&n));
    if (device < -1 || device >= n)
        return ep_fail(EP_E_ARG, "ep_comm_new: device is %d, but %d are visible", device, n);
    if (device < 0)
        device = cuda->device_order % n;
    CUDA_TRY(cudaDeviceGetAttribute(&clusters, cudaDevAttrComputeCapabilityMajor, device));
    if (clusters < CUDA_MIN_MAJOR)
        return ep_fail(EP_E_UNSUPPORTED, "ep_comm_new: GPU %d is of compute capability %d; %d.0 or later is needed",
                       device, clusters, CUDA_MIN_MAJOR);
    CUDA_TRY(cudaDeviceGetAttribute(&cuda->all_sms, cudaDevAttrMultiProcessorCount, device));
    CUDA_TRY(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    if (shared < CUDA_MIN_SHARED)
        return ep_fail(EP_E_UNSUPPORTED, "ep_comm_new: GPU %d gives a block %d KiB of shared memory; %d are needed",
                       device, shared >> 10, CUDA_MIN_SHARED >> 10);
    cuda->device = device;
    /* 2 KiB for the kernels' static shared memory. */
    cuda->shared_limit = (size_t)shared - 2048;
    return EP_OK;
}

/* Memory that kernels read or write as long as the communicator exists. */
static ep_status open_memory(struct cuda_comm *cuda)
{
    size_t map_bytes = MAP_BYTES(cuda), at[2] = {0};
    struct cuda_pinned host;
    void *device;

    EP_TRY(cuda_keep_pinned(&cuda->memory, REPORT_BYTES + map_bytes, &host));
    cuda->report = cuda_carve(host.memory, &at[0], 1, REPORT_BYTES);
    cuda->report_device = cuda_carve(host.device, &at[1], 1, REPORT_BYTES);
    cuda->host_map_entries = cuda_carve(host.memory, &at[0], 1, map_bytes);
    cuda->host_map_entries_device = cuda_carve(host.device, &at[1], 1, map_bytes);
    EP_TRY(cuda_keep_device(&cuda->memory, map_bytes + SCRATCH_BYTES, &device));
    cuda->map_entries = device;
    cuda->scratch = (int32_t *)(void *)((char *)device + map_bytes);
    return cuda_alloc_kind(cuda, sizeof(*cuda->signals), CUDA_MEMORY_INTERNAL, (void **)&cuda->signals);
}

ep_status cuda_comm_clear(struct cuda_comm *cuda)
{
    cudaStream_t stream = cuda->internal_stream;

    memset(cuda->report, 0, REPORT_BYTES);
    memset(cuda->host_map_entries, 0, MAP_BYTES(cuda));
    CUDA_TRY(cudaMemsetAsync(cuda->map_entries, 0, MAP_BYTES(cuda) + SCRATCH_BYTES, stream));
    CUDA_TRY(cudaMemsetAsync(cuda->signals, 0, sizeof(*cuda->signals), stream));
    CUDA_TRY(cudaStreamSynchronize(stream));
    return EP_OK;
}

static ep_status open_device(struct cuda_comm *cuda)
{
    CUDA_TRY(cudaSetDevice(cuda->device));
    CUDA_TRY(cuda_kernels_load((int)cuda->shared_limit));
    CUDA_TRY(cudaStreamCreateWithFlags(&cuda->internal_stream, cudaStreamNonBlocking));
    cuda_count_open(cuda, 1);
    CUDA_TRY(cudaEventCreateWithFlags(&cuda->order, cudaEventDisableTiming));
    CUDA_TRY(cudaEventCreateWithFlags(&cuda->captured_order, cudaEventDisableTiming));
    CUDA_TRY(cudaEventCreateWithFlags(&cuda->end, cudaEventDisableTiming));
    EP_TRY(open_memory(cuda));
    return cuda_comm_clear(cuda);
}

/* Kernels load from and store to the peer's memory, so P2P is required. */
static ep_status check_p2p(struct cuda_comm *cuda, int rank, bool *ret_hidden)
{
    const struct cuda_peer *peer = &cuda->peers[rank];
    int device = -1, reach = 0, me = cuda->group.comm->rank;
    cudaError_t error = cudaDeviceGetByPCIBusId(&device, peer->bus_id);

    /*
     * Hidden by CUDA_VISIBLE_DEVICES. Its memory can be mapped nevertheless (CUDA runtime manual,
     * cudaIpcOpenMemHandle()), and the attempt shows whether the GPUs have P2P.
     */
    *ret_hidden = error != cudaSuccess;
    if (*ret_hidden) {
        cudaGetLastError();
        return EP_OK;
    }
    if (device == cuda->device)
        return EP_OK;
    CUDA_TRY(cudaDeviceCanAccessPeer(&reach, cuda->device, device));
    if (!reach)
        return ep_fail(EP_E_UNSUPPORTED, "ep_comm_new: no P2P between rank %d (GPU %s) and rank %d (GPU %s)", me,
                       cuda->ctrl->bus_id, rank, peer->bus_id);
    if (!peer->same_process)
        return EP_OK;
    error = cudaDeviceEnablePeerAccess(device, 0);
    if (error == cudaErrorPeerAccessAlreadyEnabled) {
        cudaGetLastError();
        error = cudaSuccess;
    }
    return cuda_status(error, "cudaDeviceEnablePeerAccess");
}

static ep_status map_peer_signals(struct cuda_comm *cuda, int rank, struct cuda_signals **ret_signals)
{
    const struct ep_group_address signals = {.slot = CUDA_SIGNALS_SLOT, .generation = 1};
    const struct cuda_peer *peer = &cuda->peers[rank];
    bool hidden = false;
    ep_status status;

    EP_TRY(check_p2p(cuda, rank, &hidden));
    status = cuda_map(cuda, rank, &signals, sizeof(**ret_signals), (void **)ret_signals);
    if (status != EP_OK && !hidden && strcmp(peer->bus_id, cuda->ctrl->bus_id) == 0)
        return ep_fail_prefix(status,
                              "ep_comm_new: rank %d cannot map memory of rank %d, which is on the same GPU %s "
                              "(MIG instances of a GPU have no P2P: give all ranks of a node the "
                              "same instance, or whole GPUs): ",
                              cuda->group.comm->rank, rank, peer->bus_id);
    if (status == EP_OK || !hidden)
        return status;
    return ep_fail(EP_E_UNSUPPORTED,
                   "ep_comm_new: rank %d (GPU %s) cannot map memory of rank %d on GPU %s, which it does not see: let "
                   "each rank see all GPUs (CUDA_VISIBLE_DEVICES, the batch system), if they have P2P: %s",
                   cuda->group.comm->rank, cuda->ctrl->bus_id, rank, peer->bus_id, ep_last_error());
}

static ep_status map_peers(struct cuda_comm *cuda)
{
    const struct ep_group_address ctrl = {.slot = CUDA_CTRL_SLOT, .generation = 1};
    struct cuda_signals *signals[CUDA_MAX_RANKS] = {NULL};
    ep_comm *comm = cuda->group.comm;
    uint32_t none = 0, members[CUDA_MAX_GROUP / 32 + 1] = {[CUDA_MAX_GROUP / 32] = comm->generation};

    for (int rank = 0; rank < comm->nranks; rank++)
        members[rank / 32] |= (uint32_t)!ep_comm_has(comm, rank) << rank % 32;
    for (int rank = cuda->group.first; rank < cuda_end_of_node(cuda); rank++) {
        struct cuda_peer *peer = &cuda->peers[rank];
        void *address;

        if (!ep_comm_has(comm, rank))
            continue;
        EP_TRY(ep_group_map(&cuda->group, rank, &ctrl, sizeof(struct cuda_ctrl), &address));
        peer->ctrl = address;
        ep_group_read_shared(peer->bus_id, peer->ctrl->bus_id, sizeof(peer->bus_id) - 1);
        peer->same_process = rank == comm->rank || cuda->group.peers[rank].same_process;
        signals[rank - cuda->group.first] = cuda->signals;
        if (rank == comm->rank)
            continue;
        cuda_set_mapped_by(cuda, rank, true);
        EP_TRY(map_peer_signals(cuda, rank, &signals[rank - cuda->group.first]));
    }
    EP_TRY(cuda_transfer(cuda, cuda->signals->peer, signals, sizeof(signals)));
    EP_TRY(cuda_transfer(cuda, cuda->signals->absent, members, sizeof(members)));
    return cuda_transfer(cuda, &cuda->signals->failure, &none, sizeof(none));
}

/* Collective. Counts ranks of other nodes, too: tests and small machines have several nodes on a GPU. */
static ep_status choose_default_stream(struct cuda_comm *cuda, const ep_boot *boot)
{
    const ep_comm *comm = cuda->group.comm;
    struct location all[EP_MAX_RANKS], *mine = &all[comm->rank];

    EP_TRY(gather_locations(cuda, boot, all));
    cuda->sharing = 0;
    for (int rank = 0; rank < comm->nranks; rank++)
        cuda->sharing += rank == comm->rank || (all[rank].process.key == mine->process.key &&
                                                memcmp(all[rank].bus_id, mine->bus_id, sizeof(mine->bus_id)) == 0);
    if (cuda->sharing > 1 && !cuda->default_stream)
        CUDA_TRY(cudaStreamCreateWithFlags(&cuda->default_stream, cudaStreamNonBlocking));
    return EP_OK;
}

static ep_status open_control(struct cuda_comm *cuda)
{
    const ep_comm *comm = cuda->group.comm;
    void *ctrl;

    pthread_mutex_init(&cuda->memory_lock, NULL);
    pthread_mutex_init(&cuda->map_lock, NULL);
    pthread_mutex_init(&cuda->pending_lock, NULL);
    cuda->stop = -1;
    if (comm->config.flags & EP_COMM_CHECK_VALUES)
        return ep_fail(EP_E_UNSUPPORTED, "ep_comm_new: the CUDA backend does not support EP_COMM_CHECK_VALUES");
    cuda->peers = calloc((size_t)comm->nranks, sizeof(*cuda->peers));
    if (!cuda->peers)
        return ep_fail(EP_E_MEMORY, "ep_comm_new: no memory for %d ranks", comm->nranks);
    EP_TRY(ep_group_alloc_internal(&cuda->group, sizeof(struct cuda_ctrl), &ctrl));
    cuda->ctrl = ctrl;
    return EP_OK;
}

static ep_status open_and_publish(struct cuda_comm *cuda)
{
    if (cuda->signals)
        return EP_OK; /* in a regroup */
    EP_TRY(choose_device(cuda));
    cuda_reclaim(cuda->device);
    EP_TRY(open_device(cuda));
    CUDA_TRY(cudaDeviceGetPCIBusId(cuda->ctrl->bus_id, sizeof(cuda->ctrl->bus_id), cuda->device));
    cuda->group.gpu = cuda->ctrl->bus_id;
    return EP_OK;
}

/* Without a device in the configuration it depends on other ranks. Right for one node on a host whose ranks see the
 * same GPUs; otherwise the endpoint of the group may use a NIC that is not the nearest. */
static const char *find_gpu(struct ep_group *group)
{
    struct cuda_comm *cuda = (struct cuda_comm *)group;
    const ep_comm *comm = group->comm;
    int n = 0, device = comm->config.device;

    if (cuda->signals)
        return cuda->ctrl->bus_id; /* in a regroup */
    if (cudaGetDeviceCount(&n) == cudaSuccess && n > 0 && device < n &&
        cudaDeviceGetPCIBusId(cuda->likely_gpu, sizeof(cuda->likely_gpu), device < 0 ? group->local % n : device) ==
            cudaSuccess)
        return cuda->likely_gpu;
    cudaGetLastError();
    return NULL;
}

ep_status cuda_comm_join(struct cuda_comm *cuda, const ep_boot *boot, ep_status mine)
{
    int timeout_ms = cuda->group.comm->config.timeout_ms;
    ep_status status = ep_group_agree(boot, timeout_ms, mine);

    if (status == EP_OK)
        status = ep_group_agree(boot, timeout_ms, find_device_order(cuda, boot));
    if (status == EP_OK)
        status = ep_group_agree(boot, timeout_ms, open_and_publish(cuda));
    if (status == EP_OK)
        status = ep_group_agree(boot, timeout_ms, map_peers(cuda));
    if (status == EP_OK)
        status = ep_group_agree(boot, timeout_ms, choose_default_stream(cuda, boot));
    if (status == EP_OK && cuda_crosses_nodes(cuda))
        status = ep_group_agree(boot, timeout_ms, cuda_proxy_open(cuda, boot));
    if (status == EP_OK)
        status = ep_group_agree(boot, timeout_ms, cuda_monitor_start(cuda));
    return status;
}

ep_status cuda_comm_open(ep_comm *comm, const ep_boot *boot)
{
    static const struct ep_group_backend backend = {
        .comm_bytes = sizeof(struct cuda_comm), .fixed_memory = true, .find_gpu = find_gpu};
    int previous = -1;
    struct cuda_comm *cuda;
    ep_status status;

    /*
     * The ranks have agreed on the number, so each refuses on its own. It does so before it opens a network, whose
     * failure would hide the cause.
     */
    if (comm->ranks_per_node > CUDA_MAX_RANKS)
        return ep_fail(EP_E_UNSUPPORTED, "ep_comm_new: the CUDA backend supports nodes of up to %d ranks, not %d",
                       CUDA_MAX_RANKS, comm->ranks_per_node);
    EP_TRY(ep_group_open(comm, boot, &backend));
    cuda = cuda_of(comm);
    if (cudaGetDevice(&previous) != cudaSuccess)
        previous = -1;
    status = cuda_comm_join(cuda, boot, open_control(cuda));
    if (status != EP_OK)
        cuda_comm_close(comm);
    else
        ep_cuda_set_sms(comm, 0);
    cuda_restore_device(previous);
    return status;
}

static void close_device(struct cuda_comm *cuda)
{
    cudaEvent_t events[] = {cuda->order, cuda->captured_order, cuda->end};

    cuda_kept_free(&cuda->memory);
    cuda->report = NULL;
    for (size_t i = 0; i < sizeof(events) / sizeof(events[0]); i++)
        if (events[i])
            cudaEventDestroy(events[i]);
    if (cuda->default_stream)
        cudaStreamDestroy(cuda->default_stream);
    cudaStreamDestroy(cuda->internal_stream);
    cudaGetLastError();
}

void cuda_comm_close(ep_comm *comm)
{
    struct cuda_comm *cuda = cuda_of(comm);
    struct cuda_scope scope = {.previous = 0};

    if (!cuda)
        return;
    ep_group_queue_close(&cuda->group);
    cuda_ll_nets_stop(cuda);
    if (cuda->peers && cuda->internal_stream && cuda_scope_begin(cuda, &scope) == EP_OK) {
        /* No kernel may run when its memory is freed; one that waits for a peer ends at its deadline. */
        if (cuda->report && atomic_load(&comm->failed))
            cuda_stop_kernels(cuda);
        if (cuda->operations)
            cuda_drain(cuda);
        cuda_proxy_close(cuda);
        cuda_monitor_stop(cuda);
        cudaStreamSynchronize(cuda->internal_stream);
        cuda_unmap_all(cuda); /* before a new rank may have this one's place */
        ep_group_leave(&cuda->group);
        cuda_count_open(cuda, -1);
        cuda_module_close(cuda);
        cuda_memory_close(cuda);
        close_device(cuda);
        cuda_scope_end(&scope);
    }
    /* For a device that could not be made current: their memory stays with the process. */
    cuda_proxy_stop(cuda);
    cuda_monitor_stop(cuda);
    free(cuda->peers);
    pthread_mutex_destroy(&cuda->memory_lock);
    pthread_mutex_destroy(&cuda->map_lock);
    pthread_mutex_destroy(&cuda->pending_lock);
    ep_group_close(comm);
}

size_t cuda_comm_bytes(const ep_comm *comm)
{
    struct cuda_comm *cuda = cuda_of(comm);
    size_t bytes = ep_group_bytes(comm) + sizeof(*cuda) + cuda->memory.device_bytes + cuda_proxy_bytes(cuda) +
                   atomic_load(&cuda->ll_net_bytes);

    pthread_mutex_lock(&cuda->memory_lock);
    for (int slot = 0; slot < CUDA_SLOTS; slot++)
        if (cuda->allocations[slot].base && (cuda->allocations[slot].kind == CUDA_MEMORY_INTERNAL ||
                                             cuda->allocations[slot].kind == CUDA_MEMORY_CACHED))
            bytes += cuda->allocations[slot].bytes;
    bytes += cuda_pool_bytes(cuda);
    pthread_mutex_unlock(&cuda->memory_lock);
    return bytes;
}

void cuda_abort(ep_comm *comm)
{
    ep_group_abort(comm);
    cuda_stop_kernels(cuda_of(comm));
}
