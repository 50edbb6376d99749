/* SPDX-License-Identifier: Apache-2.0 */
/*
 * epkit/comm.h - the communicator: one rank's membership of a group.
 *
 * Threads. A communicator belongs to one thread at a time: calls on it and on its plans, queues and low-latency objects
 * must not overlap, whatever their streams, ep_stream_sync() included; which threads make them does not matter. Except
 * for ep_comm_abort(), ep_comm_async_error(), ep_event_signal(), _wait() and _query(), and in memory.h
 * ep_alloc_local(), ep_free_local(), ep_register(), ep_unregister() and the allocator callbacks, which any thread may
 * make at any time before ep_comm_free().
 *
 * Collective calls. Creation, ep_alloc, ep_free, plans, dispatch, combine, barrier: every rank makes the same calls in
 * the same order, whatever the streams. The others wait for a late rank until the deadline (timeout_ms) and then return
 * EP_E_TIMEOUT with that rank and the phase in the error text. If that rank has just ended a wait of its own, they wait
 * for up to another quarter of the deadline, to find out whether a third rank delays it.
 *
 * Processes. A communicator belongs to the process that made it. In a forked child every call on it, and on its plans,
 * events and low-latency objects, is EP_E_STATE, and those without a status do nothing: other threads of the parent may
 * have held locks when it forked. The child can make communicators of its own. Any thread may fork at any time.
 *
 * Peers. A peer is dead (EP_E_PEER_DEAD) when the kernel says that its process has ended: by a pidfd, or where there
 * are none by its process number and /proc. It has left (EP_E_PEER_LEFT) when it has freed its communicator, or what a
 * call needs of it. Where neither is known - no pidfd, a /proc that hides it (hidepid, another user, another PID
 * namespace) - the peer is waited for until the deadline, then it is late (EP_E_TIMEOUT), and the error text adds that
 * its state cannot be read here. A live rank of this host is never reported dead. Of a rank of another host only the
 * end of its connections can be seen (networks "tcp" and "verbs"): the text says that it died or was cut off.
 *
 * Failure. When a communicator has failed, each later collective call returns the same status at once, on every rank,
 * as does ep_comm_async_error(); the text names the rank that failed first. Ranks of one host report the same failure:
 * the first that any of them finds. Outputs of the failed call are undefined. ep_comm_shrink() builds a new group of
 * the survivors; ep_comm_free() is always allowed. A status of the 3xx or 4xx kind means that it has failed. One of the
 * 1xx or 2xx kind found before anything was sent leaves it as it was - but the peers, had they made the call correctly,
 * are waiting: correct and repeat the call, or abort. Found when the ranks have already synchronised (a kernel that
 * fails, memory that cannot be had or mapped), or in a call that was only queued (invalid routing, a NaN), it fails the
 * communicator, and the peers get a status that names this rank.
 *
 * Damage. What a rank publishes for the others is checked before it is used. A peer that lives but whose memory is
 * overwritten makes calls fail with EP_E_MISMATCH ("what rank N has published is damaged"), or with the status of a
 * rank that does not answer; nothing is written outside of the outputs. Contents of rows, scales and weights are not
 * checked.
 */
#ifndef EPKIT_COMM_H
#define EPKIT_COMM_H

#include <epkit/boot.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ep_comm ep_comm;

enum {
    EP_COMM_CHECK_VALUES = 1u << 0 /* refuse NaN in weights and scales (EP_E_VALUE); costs a pass over them */
};

typedef struct ep_comm_config {
    size_t size;         /* sizeof(ep_comm_config); EP_COMM_CONFIG_INIT sets it */
    const char *backend; /* "host", "cuda", or NULL: $EPKIT_BACKEND, else the best one that works here. It
                            decides where pointers must point, so name it if the CUDA backend may be installed */
    /*
     * Between nodes: "emulated" (ranks of one host), "tcp", "verbs" (RDMA NICs), "mpi", or NULL: what the boot brings,
     * else "emulated" where all ranks share one host, "tcp" where they do not. With "tcp" and "verbs" nodes share no
     * memory, also on one host.
     */
    const char *network;
    int32_t ranks_per_node; /* node = rank / ranks_per_node; must divide R; 0: what the boot says, else the ranks that
                               share a host (see ep_comm_new) */
    int32_t timeout_ms;     /* deadline of every wait; 0: $EPKIT_TIMEOUT_MS, else 30000 */
    uint32_t flags;         /* EP_COMM_* */
    int32_t channels;       /* independent ordered streams per network peer, 1..16; 0: 4 */
    int32_t
        partial_type; /* network combine: EP_F32 (exact, default when 0) or EP_BF16 (half the bytes, rounded twice) */
    int32_t device;   /* CUDA device; -1 (EP_COMM_CONFIG_INIT): by the rank's place on its machine, modulo the devices
                         that are visible. Ignored by the host backend */
} ep_comm_config;

#ifdef __cplusplus
#define EP_COMM_CONFIG_INIT                                                                                            \
    ([] {                                                                                                              \
        ep_comm_config init_{};                                                                                        \
        init_.size = sizeof(ep_comm_config);                                                                           \
        init_.device = -1;                                                                                             \
        return init_;                                                                                                  \
    }())
#else
#define EP_COMM_CONFIG_INIT                                                                                            \
    {                                                                                                                  \
        .size = sizeof(ep_comm_config), .device = -1                                                                   \
    }
#endif

/*
 * Creates this rank's communicator. Collective over the boot. Configurations are compared: a field that must agree
 * (backend, network, ranks_per_node, flags, channels, partial_type, library version) and does not gives EP_E_MISMATCH
 * on every rank, with the field, both ranks and both values in ep_last_error(). `config` NULL means all defaults.
 *
 * Nodes that neither the configuration nor the boot knows are found from the hosts: ranks share one when they run under
 * one kernel and in one PID or network namespace, because only those can share memory. Each host must then have equally
 * many ranks, numbered in a row; otherwise EP_E_ARG names ranks that are in the way, and ranks_per_node has to be set.
 * Where a rank cannot identify its host (no /proc), all are taken for one node, unless others are on several hosts:
 * then EP_E_ARG names that rank. ep_comm_get_info() has the result.
 *
 * A rank whose own arguments are bad, or on which the backend does not work, reports that in the comparison, so no rank
 * waits for it: the others return its status, with its number and its reason in the text. The same holds for failures
 * later in the creation: memory, descriptors, connections. Only a bad `boot` cannot be reported to the others. The
 * death of a rank during the creation is EP_E_PEER_DEAD at once where the boot detects it (epkit/boot.h, epkit/mpi.h).
 *
 * Ranks of one host share memory, which comes from peer to peer as a descriptor: through /proc/PID/fd or pidfd_getfd(),
 * or, when some rank of the group cannot be reached so, over a socket with an abstract name that only this process and
 * its peers know; each process then has one more thread, which takes no signals. That works for ranks of several users
 * and PID namespaces, as long as they share the network namespace; otherwise the error text names what forbids each
 * way. A rank takes one descriptor for its control block, one for each allocation, and one for each peer (a pidfd), all
 * of them above the standard streams and closed by exec.
 */
EP_API ep_status ep_comm_new(const ep_boot *boot, const ep_comm_config *config, ep_comm **ret_comm);

/*
 * Leaves the group and frees everything of this rank, including memory of ep_alloc. Waits for queued asynchronous work
 * of this rank (within its deadline). Not collective; a peer that still waits for this rank gets EP_E_PEER_LEFT.
 * Plans, events and queues of the communicator must have been freed before. In a forked child it does nothing. NULL is
 * fine.
 */
EP_API void ep_comm_free(ep_comm *comm);

typedef struct ep_comm_info {
    size_t size; /* EP_COMM_INFO_INIT sets it */
    int32_t rank, nranks;
    int32_t node, nnodes;
    int32_t ranks_per_node;
    int32_t timeout_ms;
    const char *backend;  /* static strings */
    const char *network;  /* "none" on one node */
    size_t library_bytes; /* memory the library holds for this rank beyond memory of ep_alloc, now */
} ep_comm_info;

#define EP_COMM_INFO_INIT EP_INIT(ep_comm_info)

EP_API ep_status ep_comm_get_info(const ep_comm *comm, ep_comm_info *ret_info);

/* Returns when all ranks have called it. What any rank wrote to memory before it is visible after it. */
EP_API ep_status ep_comm_barrier(ep_comm *comm);

/*
 * All-gather of small blocks over an existing communicator (sizes, seeds, timings: not for bulk data). At most 4096
 * bytes a rank. As ep_allgather_fn. ret_all may not overlap mine: EP_E_ARG.
 */
EP_API ep_status ep_comm_allgather(ep_comm *comm, const void *mine, size_t bytes, void *ret_all);

/*
 * Wakes every wait of every rank of this host, now: they return EP_E_ABORTED naming this rank. Ranks on other hosts are
 * notified over the networks "tcp" and "verbs"; over MPI they are not, and wait until their own deadline. Any thread,
 * any time, repeatedly; async-signal-safe on the host backend, errno is kept. Returns at once.
 */
EP_API void ep_comm_abort(ep_comm *comm);

/*
 * EP_OK, or the status with which the communicator failed, also when it was asynchronous work that did, or a peer of
 * this host that has failed or aborted while this rank was outside of any call. Never blocks. Any thread.
 */
EP_API ep_status ep_comm_async_error(const ep_comm *comm);

/*
 * Reason of the last failure on this communicator, with rank, phase and system text. Never NULL. Valid until the next
 * failing call on it.
 */
EP_API const char *ep_comm_last_error(const ep_comm *comm);

/*
 * After a failure: the survivors agree on the ranks that remain and form a new group of them, numbered densely in the
 * old order. Called by every survivor. Also works without a failure.
 *
 * The ranks wait for each other until the deadline. Ranks that have not called it by then are left out, if those that
 * have are more than half of the live ranks (neither dead nor gone by ep_comm_free(); one whose state cannot be read
 * counts as live). A rank that was left out gets EP_E_EXCLUDED from this and every later call. If they are not more
 * than half, they wait for one more deadline, and then the call fails with EP_E_TIMEOUT naming a rank that did not call
 * it, also on ranks that call it later. So there are never two groups, and a single slow rank never forms one alone.
 * Where half of the ranks are stopped, end them first. Takes at most two deadlines, and two more for each rank that
 * stops answering while it runs. Over the networks "tcp" and "verbs" the lowest rank that answers leads: there one more
 * deadline for each lower rank that does not, and three more for each that stops answering while it runs. A rank that
 * is left out while it waits learns the outcome within three deadlines, and ten more while the others make their group.
 * There a rank that calls it later is told by the members of the new group, as long as they have it; for that each of
 * them keeps one more thread, which sleeps, and two descriptors, unless all who are left out have died.
 * Without sockets between nodes the ranks make at most 32 attempts on one communicator, in all calls; each call makes
 * at least one, and one that finds none left fails with EP_E_TIMEOUT.
 *
 * The call succeeds on all ranks of the new group, or fails on all of them with the same status, naming the same rank:
 * then all may call it again. Between hosts a rank that dies while the others learn that the group is made may have
 * been counted in: then the call succeeds, and the next one on the new communicator names that rank. Only where a
 * second rank dies or stops answering at that very time can some ranks have the group and others the status
 * EP_E_PEER_DEAD, after at most one more deadline: on the first the next call fails naming a rank that is gone, and
 * each of the two shrinks the communicator that it has; where the two are to be one group, free both and make a new one
 * by ep_comm_new(). ep_comm_abort() on the old communicator wakes it: EP_E_ABORTED, for an abort that was called after
 * this rank or a peer that it waits for began the call. Between hosts the order of the two cannot be known: an abort
 * ends the call at once if its rank was in the call, and otherwise after half the deadline, at most two seconds, unless
 * its rank begins the call within that time: then it was the reason to shrink.
 *
 * `config` NULL keeps the old one; when the survivors no longer fill their nodes evenly, they become one node, as they
 * do with a `config` whose ranks_per_node is 0 (they share a host). The old communicator stays as it is, failed or not,
 * and must still be freed; its memory of ep_alloc is not part of the new group. With the networks "tcp" and "verbs" it
 * works across hosts, too. A rank of another host counts as dead when its connections have ended; one whose host is
 * only silent counts as living, also when its connections end behind that: where the network fails, the smaller part
 * forms no group, and of two halves neither does. The ranks of a new node are then as many as divide the survivors of
 * each old node, unless `config` has another ranks_per_node than 0 and the old one. EP_E_UNSUPPORTED over MPI when the
 * ranks are on several hosts.
 */
EP_API ep_status ep_comm_shrink(ep_comm *comm, const ep_comm_config *config, ep_comm **ret_comm);

/*
 * What the last dispatch or combine on this rank moved and where the time went. All counts are this rank's own. On the
 * CUDA backend they are those of the last call, which returns before the rows move: all times are 0, and so are the
 * counts of a plan whose own the device alone knows.
 */
typedef struct ep_stats {
    size_t size;           /* EP_STATS_INIT sets it */
    uint64_t rows_self;    /* rows placed in (dispatch) or read from (combine) this rank's own memory */
    uint64_t rows_node;    /* the same for other ranks of this node, this rank's tokens only */
    uint64_t rows_net;     /* rows (dispatch) or partial sums (combine) that this rank put on the network */
    uint64_t rows_forward; /* rows placed or read within the node on behalf of ranks of other nodes */
    uint64_t bytes_self, bytes_node, bytes_net, bytes_forward; /* payload: row + scales; net: as sent */
    uint64_t ns_wait_ready;                                    /* waiting until the peers' buffers were ready */
    uint64_t ns_move;      /* moving rows, including the network when there are nodes */
    uint64_t ns_wait_done; /* waiting for the peers to finish */
    uint64_t ns_copy;      /* copies for buffers outside symmetric memory */
    uint64_t ns_total;
} ep_stats;

#define EP_STATS_INIT EP_INIT(ep_stats)

EP_API ep_status ep_comm_get_stats(const ep_comm *comm, ep_stats *ret_stats);

#ifdef __cplusplus
}
#endif

#endif
