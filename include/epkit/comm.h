/* SPDX-License-Identifier: Apache-2.0 */
/*
 * epkit/comm.h - the communicator: one rank's membership of a group.
 *
 * Threads. Any thread may call, but only one at a time: calls on a communicator and on its plans, queues and
 * low-latency objects must not overlap, whatever their streams; this includes ep_stream_sync(). The following calls are
 * excepted; any thread may make them at any time before ep_comm_free(): ep_comm_abort(), ep_comm_async_error(),
 * ep_event_signal(), ep_event_wait() and ep_event_query(), and from memory.h ep_alloc_local(), ep_free_local(),
 * ep_register(), ep_unregister() and the allocator callbacks.
 *
 * Collective calls. Creation, ep_alloc, ep_free, plans, dispatch, combine and barrier are collective: every rank makes
 * the same calls in the same order, whatever the streams. The other ranks wait for a late rank until the deadline
 * (timeout_ms) and then return EP_E_TIMEOUT; the error text names that rank and the phase. If that rank has just ended
 * a wait of its own, they wait for up to another quarter of the deadline, to find out whether a third rank delays it.
 *
 * Processes. A communicator belongs to the process that created it. In a forked child every call on it and on its
 * plans, events and low-latency objects returns EP_E_STATE, and calls that return no status do nothing, because other
 * threads of the parent may have held locks at the fork. The child can create its own communicators. Any thread may
 * fork at any time.
 *
 * Descriptors. A program that closes descriptors that it has not opened takes away those of the library: its calls
 * fail, and to its peers it looks as if it had died. Files that get the numbers later are left alone: before the
 * library closes a descriptor, and where it costs nothing before it reads or writes one, it checks that the number is
 * still the file that it opened. Not checked are the sockets between nodes on each send and receive, so that a socket
 * of the program with the number of one may be used, and files that have no inode of their own (eventfd, epoll,
 * timerfd; before Linux 6.9 pidfds) cannot be told apart. Free the communicator before descriptors are closed.
 *
 * Stacks. Threads that call the library need 128 KiB of stack for it, which ep_comm_new() checks for the thread that
 * calls it.
 *
 * Peers. A peer is dead (EP_E_PEER_DEAD) when the kernel reports the end of its process: by a pidfd or, without one, by
 * its process ID and /proc. A peer has left (EP_E_PEER_LEFT) when it has freed its communicator or an object that the
 * call needs. If its state cannot be read, the others wait for it until the deadline and return EP_E_TIMEOUT. A live
 * rank of this host is never reported dead. The death of a rank of another host is visible only as the end of its
 * connections (networks "tcp" and "verbs"). The error text says that it died if a rank of its host has reported the
 * death or its process has closed the connection; if the connection was cut, that it cannot be reached. Forked children
 * that have not called exec() keep the connections open: while such a child lives, the others wait until the deadline.
 *
 * Failure. A status of the 3xx or 4xx group means that the communicator has failed. Every later collective call on
 * every rank then returns the same status at once, as does ep_comm_async_error(); the text names the rank that failed
 * first. Ranks of one host report the same failure: the first that any of them detects. The outputs of the failed call
 * are undefined. ep_comm_free() is always allowed. To continue without the failed rank: ep_comm_regroup().
 *
 * A status of the 1xx or 2xx group that is detected before anything was sent does not change the communicator. The
 * peers that made the call correctly are waiting, however: correct and repeat the call, or abort. If it is detected
 * after the ranks have synchronised (a kernel fails, memory cannot be allocated or mapped), or in a call that was only
 * queued (invalid routing, a NaN), it fails the communicator, and the peers get a status that names this rank.
 *
 * Damaged data. Control data that a rank publishes is validated before use. If the memory of a live peer is
 * overwritten, calls fail with EP_E_MISMATCH ("what rank N has published is damaged") or with the status for a rank
 * that does not answer; nothing outside the outputs is written. The contents of rows, scales and weights are not
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
    EP_COMM_CHECK_VALUES = 1u << 0,   /* reject NaN in weights and scales (EP_E_VALUE); costs a pass over them */
    EP_COMM_CHECK_DISTINCT = 1u << 5, /* reject a token that names an expert twice (EP_E_ROUTING): see plan.h */
    EP_COMM_STRICT_SMS = 1u << 6,     /* CUDA: ep_cuda_set_sms() counts all blocks; also EPKIT_STRICT_SMS=1 */
    EP_COMM_DROP_ABSENT = 1u << 7     /* choices of experts of absent ranks count as -1; else they are EP_E_ROUTING */
};

typedef struct ep_comm_config {
    size_t size;         /* sizeof(ep_comm_config); EP_COMM_CONFIG_INIT sets it */
    const char *backend; /* "host", "cuda", or NULL: $EPKIT_BACKEND, else the best that works here. The backend decides
                            whether pointers are host or device memory: name it if the CUDA backend may be installed */
    /*
     * Between nodes: "emulated" (ranks of one host), "tcp", "verbs" (RDMA NICs), or NULL: $EPKIT_NETWORK, else the
     * network of the bootstrap, else "emulated" if all ranks share one host, else "tcp". With "tcp" and "verbs" nodes
     * share no memory, even on one host.
     */
    const char *network;
    int32_t ranks_per_node; /* node = rank / ranks_per_node; must divide R; 0: that of the bootstrap, else the ranks
                               that share a host (see ep_comm_new) */
    int32_t timeout_ms;     /* deadline of every wait; 0: $EPKIT_TIMEOUT_MS, else 30000 */
    uint32_t flags;         /* EP_COMM_* */
    int32_t channels;       /* independent ordered streams per network peer, 1..16; 0: 4 */
    int32_t
        partial_type; /* network combine: EP_F32 (exact, default when 0) or EP_BF16 (half the bytes, rounded twice) */
    int32_t device;   /* CUDA device; -1 (EP_COMM_CONFIG_INIT): local rank on the host modulo the number of visible
                         devices. Ignored by the host backend */
    int32_t slots;    /* > 0: the number of ranks R, of which those of the bootstrap are the members; see
                         ep_comm_regroup(). 0: all ranks are members */
    int32_t slot;     /* with slots: number of this rank, 0..slots-1, whatever its number in the bootstrap */
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
 * Creates the communicator of this rank. Collective over the ranks of `boot`. `config` NULL: all defaults.
 *
 * Configurations are compared. If a field that must agree (backend, network, ranks_per_node, flags, channels,
 * partial_type, library version) differs, every rank gets EP_E_MISMATCH, and ep_last_error() names the field, both
 * ranks and both values.
 *
 * Nodes. If neither `config` nor the bootstrap gives ranks_per_node, the nodes are detected from the hosts. Ranks share
 * a host if they run under one kernel and in one PID namespace, because only such ranks can share memory.
 * Every host must then have the same number of ranks, with consecutive numbers. Otherwise EP_E_ARG names ranks that
 * violate this, and ranks_per_node must be set. So it must on several hosts where some slots are absent, whose hosts
 * are not known (EP_E_UNSUPPORTED). If a rank cannot identify its host (no /proc), all ranks form one node;
 * but if the other ranks are on several hosts, EP_E_ARG names that rank. ep_comm_get_info() returns the result.
 *
 * Failures. A rank with invalid arguments, or on which the backend does not work, reports it in the comparison, so that
 * no rank waits for it: the others return its status, and the text has its rank and reason. The same applies to
 * failures in later steps (memory, descriptors, connections). Only an invalid `boot` cannot be reported to the others.
 * If a rank dies, the others get EP_E_PEER_DEAD at once if the bootstrap detects it (epkit/boot.h).
 *
 * Shared memory. Ranks of one host share memory by file descriptors, which they get through /proc/PID/fd: as one user,
 * in one PID namespace. Where this fails within a node, EP_E_ARG names what prevents it. A rank uses one descriptor for
 * its control block, one for each allocation, and one for each peer (a pidfd); all are above the standard streams and
 * close-on-exec.
 */
EP_API ep_status ep_comm_new(const ep_boot *boot, const ep_comm_config *config, ep_comm **ret_comm);

/*
 * Leaves the group and frees all resources of this rank, including memory of ep_alloc. Waits for queued asynchronous
 * work of this rank, until its deadline at most; over "tcp" also until the hosts of the peers have received what this
 * rank has sent, which needs a peer that reads: again until the deadline at most, and not after a failure. Not
 * collective; a peer that still waits for this rank gets EP_E_PEER_LEFT. Plans, events and queues of the communicator
 * must be freed first. In a forked child it does nothing. NULL is allowed.
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
    size_t library_bytes; /* memory that the library holds now for this rank, in addition to memory of ep_alloc */
    int32_t n_members;    /* ranks that are not absent */
    int32_t reserved;     /* 0 */
} ep_comm_info;

#define EP_COMM_INFO_INIT EP_INIT(ep_comm_info)

EP_API ep_status ep_comm_get_info(const ep_comm *comm, ep_comm_info *ret_info);

/* Returns when all ranks have called it. Memory that any rank wrote before the barrier is visible after it. */
EP_API ep_status ep_comm_barrier(ep_comm *comm);

/*
 * All-gather of small blocks over an existing communicator (sizes, seeds, timings; not for bulk data), at most 4096
 * bytes per rank. Collective. Layout as ep_allgather_fn, with zeros for absent ranks. ret_all must not overlap mine
 * (EP_E_ARG).
 */
EP_API ep_status ep_comm_allgather(ep_comm *comm, const void *mine, size_t bytes, void *ret_all);

/*
 * Wakes all waits of all ranks of this host at once: they return EP_E_ABORTED and name this rank. Ranks of other hosts
 * are notified over the network. Returns at once: if the process then exits without ep_comm_free(), ranks of other
 * hosts may report that it died. Any thread, at any time, repeatedly; on the host backend async-signal-safe, and errno
 * is preserved.
 */
EP_API void ep_comm_abort(ep_comm *comm);

/*
 * EP_OK, or the status with which the communicator failed. It includes failures of asynchronous work, and peers of this
 * host that failed or aborted while this rank was not in any call. On the CUDA backend also EP_E_CAPACITY, after which
 * the communicator is usable, if an operation of a plan with max_recv_tokens was refused (ep_plan_new) and
 * ep_stream_sync() has not returned that yet. Never blocks. Any thread.
 */
EP_API ep_status ep_comm_async_error(const ep_comm *comm);

/*
 * Reason of the last failure on this communicator, with rank, phase and system text. Never NULL. Valid until the next
 * call on it that fails.
 */
EP_API const char *ep_comm_last_error(const ep_comm *comm);

/*
 * What this rank knows of each rank: ret_failed [R], host memory, is EP_OK for a rank of which nothing is known,
 * EP_E_PEER_DEAD if it has ended or cannot be reached, EP_E_PEER_LEFT if it has freed its communicator, EP_E_EXCLUDED
 * if it is absent, or else the status of the failure of this communicator for the rank that it names. Ranks may know
 * different things, and more later; a failure of ep_comm_regroup() itself names a rank in its text only. Decide who
 * goes on before any of them frees its communicator, because it has left then. Never blocks. Any thread.
 */
EP_API ep_status ep_comm_get_failed(const ep_comm *comm, int32_t *ret_failed);

/*
 * Changes the members: those of `boot` are present from now on, the other ranks absent. Collective over `boot`. A rank
 * that has the communicator makes this call; a new one, or one that was absent, calls ep_comm_new() at the same time,
 * with the same number of slots and its own slot. After a failure or without one, any number of times.
 *
 * Who goes on is for the program to decide, because it alone knows what else a rank is needed for: its controller, or
 * the survivors through any store that can set a key once (examples/continue.c). The bootstrap is the decision: one
 * that is made for these members, with an address or key of its own for each change, lets no others in.
 *
 * What stays: the number of each rank, its experts, memory of ep_alloc() with its contents, queues.
 * What was published of the failure of before is gone. Plans of exact counts are EP_E_STATE: free them; all members
 * make new ones. So are low-latency objects and plans of fixed capacity until all members have renewed them
 * (ep_ll_renew(), ep_plan_update()). Then captured graphs with their calls, with plans that were made in the capture,
 * and with ep_barrier_on() are valid again, once new members have captured theirs: let ep_comm_barrier() be between
 * that and the first launch. A graph with anything that was not renewed fails the communicator with EP_E_STATE.
 *
 * An absent rank has no tokens. A choice of one of its experts is EP_E_ROUTING, or with EP_COMM_DROP_ABSENT (low
 * latency: also with EP_LL_MASK_DEAD) counts as -1. Such a rank can change nothing of the members: its processes have
 * ended, nothing that it sends is read any more, or, if it lives on this node, the memory of ep_alloc() of the members
 * has moved to new pages at the same addresses, during which no thread may use it. GPU memory cannot move: there the
 * members wait until a thread of that rank has unmapped it, after which its graphs reach nobody, or its process has
 * ended; after half of the deadline all members get EP_E_STATE (it is stopped: end it). So they do at once for threads
 * of one process that have not freed their communicator.
 *
 * A rank that lives, and is left out, gets EP_E_EXCLUDED on its host: from the next call that waits for a member, on
 * the CUDA backend from the next call; or the failure that its communicator had before. With EP_LL_MASK_DEAD low
 * latency of the host backend masks the members instead. It can free its communicator, or come back, with it or with a
 * new one.
 *
 * The members agree before anything changes. Where that fails (a late member: EP_E_TIMEOUT of the bootstrap; other
 * slots: EP_E_MISMATCH) the communicator is as before; a failure after that leaves a failed one. On both the call can
 * be made again, with another bootstrap. An abort during the call takes effect after it.
 *
 * Between nodes, each node that has members must have them at the same places (EP_E_UNSUPPORTED names one that has
 * not), because rows travel between ranks of the same place; with ranks_per_node 1 any rank may be absent. On the CUDA
 * backend a graph that makes a plan is not valid after a change there, and fails the communicator with EP_E_STATE.
 *
 * Queued work is waited for; launches of graphs must have ended. No other call may be in progress, except those of
 * "Threads" that do not wait. On the CUDA backend also an ep_stream_wait() that no operation follows must have ended,
 * and a killed rank can write as long as a child that it forked lives and has not called exec().
 */
EP_API ep_status ep_comm_regroup(ep_comm *comm, const ep_boot *boot);

/*
 * Rows, bytes and times of the last dispatch or combine on this rank. All counts are those of this rank. The CUDA
 * backend gives those of the last call, which returns before the rows are transferred: all times are 0, and so are the
 * counts of a plan whose counts only the device knows. A combine that adds up the rows of each rank first
 * (EP_COMBINE_ROUND_PARTIAL) counts their sums there.
 */
typedef struct ep_stats {
    size_t size;           /* EP_STATS_INIT sets it */
    uint64_t rows_self;    /* rows placed in (dispatch) or read from (combine) this rank's own memory */
    uint64_t rows_node;    /* the same for other ranks of this node, this rank's tokens only */
    uint64_t rows_net;     /* rows (dispatch) or partial sums (combine) that this rank sent over the network */
    uint64_t rows_forward; /* rows placed or read within the node for ranks of other nodes */
    uint64_t bytes_self, bytes_node, bytes_net, bytes_forward; /* payload: row + scales; net: as sent */
    uint64_t ns_wait_ready;                                    /* waiting until the peers' buffers were ready */
    uint64_t ns_move;      /* transfer of rows, including the network if there are several nodes */
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
