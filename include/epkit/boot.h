/* SPDX-License-Identifier: Apache-2.0 */
/*
 * epkit/boot.h - bootstrap: how the ranks of a group find each other.
 *
 * ep_comm_new() needs one service from its environment: an all-gather of small blocks. There are three ways to provide
 * it:
 *   - ep_boot_shm_*:   ranks that are threads of one process or forked children of it (below);
 *   - ep_boot_tcp_*:   ranks on any hosts, started by torchrun, a JobSet, ssh or manually (below);
 *   - your own:        fill an ep_boot with a callback over what your engine already has (a TCP store, a key-value
 *                      service, torch.distributed, MPI: examples/mpi_bootstrap.c).
 */
#ifndef EPKIT_BOOT_H
#define EPKIT_BOOT_H

#include <epkit/status.h>
#include <epkit/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Gathers `bytes` from every rank. On every rank, the block of rank r is written to ret_all + r * bytes.
 *
 * ep_comm_new() calls it, and nothing else does: on all ranks in the same order, possibly several times, from one
 * thread per rank. It must return within timeout_ms, with EP_E_TIMEOUT if not all ranks called it. A callback that
 * detects the death of a rank should return EP_E_PEER_DEAD at once, because ep_comm_new() itself detects it only at the
 * deadline. A callback that fails may set the reason with ep_set_last_error(); ep_comm_new() adds it to its own. A
 * number that is no ep_status counts as EP_E_SYSTEM.
 */
typedef ep_status (*ep_allgather_fn)(void *context, const void *mine, size_t bytes, int timeout_ms, void *ret_all);

typedef struct ep_boot {
    size_t size; /* EP_BOOT_INIT sets it */
    int32_t rank;
    int32_t nranks;
    ep_allgather_fn allgather;
    void *context;          /* passed to allgather */
    const void *network;    /* NULL; a bootstrap of epkit that provides a network between hosts sets it */
    int32_t ranks_per_node; /* used if config.ranks_per_node is 0; 0: unknown, ep_comm_new() detects the nodes */
    int32_t reserved;       /* 0 */
} ep_boot;

#define EP_BOOT_INIT EP_INIT(ep_boot)

/*
 * A rendezvous in shared anonymous memory. Create it once, before the ranks start (before fork() or before the threads
 * start); then every rank joins it. No file and no name remains, however the ranks end.
 */
typedef struct ep_boot_shm ep_boot_shm;

EP_API ep_status ep_boot_shm_new(int nranks, ep_boot_shm **ret_shm);

/*
 * Fills *ret_boot for `rank`. Each rank joins once; a second join is EP_E_STATE. *ret_boot borrows `shm`, which must
 * stay allocated until ep_comm_new() has returned.
 *
 * An all-gather that fails on any rank makes the rendezvous unusable: the other ranks fail at once or in their next
 * all-gather, because it is no longer known which all-gather each rank is in.
 *
 * If a rank dies after its first all-gather has begun, the all-gathers that wait for it return EP_E_PEER_DEAD at once
 * and name it. A rank in another PID namespace, or without /proc, cannot be watched: the others wait for it until their
 * deadline.
 */
EP_API ep_status ep_boot_shm_join(ep_boot_shm *shm, int rank, ep_boot *ret_boot);

/* NULL is allowed. In a forked child it frees the child's mapping only. */
EP_API void ep_boot_shm_free(ep_boot_shm *shm);

/*
 * A bootstrap over TCP, IPv4 or IPv6: rank 0 listens; the others connect to it and prove that they know the shared
 * secret (HMAC-SHA256 over nonces of both sides). It provides the network "tcp". Fields that are NULL or 0 are read
 * from the environment, as torchrun, a JobSet, `epkit launch` and most launchers set it.
 *
 * The secret rejects other programs and ranks of other jobs. The data that ranks send afterwards is neither encrypted
 * nor authenticated, so the network must be trusted. Without a secret, any program that implements the protocol and
 * connects first can impersonate a rank.
 */
typedef struct ep_boot_tcp ep_boot_tcp;

typedef struct ep_boot_tcp_args {
    size_t size;            /* sizeof(ep_boot_tcp_args); EP_BOOT_TCP_ARGS_INIT sets it */
    int32_t rank;           /* of this process; ignored if nranks is 0 */
    int32_t nranks;         /* 0: $WORLD_SIZE, and the rank is $RANK */
    const char *address;    /* of rank 0: "host", "host:port" or "[IPv6]:port"; NULL: $EPKIT_ADDRESS, else $MASTER_ADDR.
                               Without a port: $MASTER_PORT, plus 1 if torchrun uses that port itself
                               (TORCHELASTIC_USE_AGENT_STORE) */
    const char *secret;     /* NULL: $EPKIT_SECRET; "": none */
    const char *interface;  /* prefixes of interface names ("eth0,ens"), "=eth0" for an exact name, "^docker" for all
                               but these, or an address; NULL: $EPKIT_TCP_INTERFACE, else any. Of several interfaces
                               the one that routes to rank 0 is used if it is among them, else the first */
    int32_t timeout_ms;     /* for all ranks to connect; 0: $EPKIT_TIMEOUT_MS, else 30000 */
    int32_t ranks_per_node; /* the same on all ranks; 0: $LOCAL_WORLD_SIZE if it is equal on all ranks, else detected
                               from the hosts (epkit/comm.h, ep_comm_new) */
} ep_boot_tcp_args;

#define EP_BOOT_TCP_ARGS_INIT EP_INIT(ep_boot_tcp_args)

/*
 * Collective. Returns when all ranks have connected.
 *
 * Retries. Until its deadline a rank retries the name lookup and the connection: rank 0 may start later, and its host
 * name may not resolve yet or may still resolve to another host. A rank that connected and died may be started again.
 *
 * Deadlines. The deadline of rank 0 applies to all ranks that have connected to it. A rank that no longer receives
 * anything from rank 0 waits for timeout_ms from the time of its connection.
 *
 * Jobs. $EPKIT_JOB_ID, or $TORCHELASTIC_RUN_ID if nranks is 0, separates jobs that share a secret: a process of another
 * job cannot make this one fail. A rank whose job or secret differs from that of rank 0 retries until its deadline,
 * because the listener may belong to another job; the text of its EP_E_TIMEOUT says so.
 *
 * Connections of other programs, connections that send nothing and connections that send other data are dropped; they
 * have no effect.
 *
 *   EP_E_TIMEOUT   the deadline has passed; the text names the ranks that have not connected, with known addresses
 *   EP_E_MISMATCH  ranks differ in nranks or ranks_per_node, two processes have the same rank, or a process has a rank
 *                  that this job does not have (EP_E_ARG in that process)
 *   EP_E_STATE     rank 0 cannot listen on its port
 *   EP_E_SYSTEM    rank 0 does not have enough file descriptors for the connections
 */
EP_API ep_status ep_boot_tcp_new(const ep_boot_tcp_args *args, ep_boot_tcp **ret_boot);

/*
 * The bootstrap to pass to ep_comm_new(), borrowed: it stays valid as long as `boot`. If a rank dies while a
 * communicator is created, the others get EP_E_PEER_DEAD at once. An all-gather that fails on any rank makes the
 * bootstrap unusable. Its all-gather is EP_E_STATE in a forked child. NULL for NULL, which ep_comm_new() refuses.
 */
EP_API const ep_boot *ep_boot_tcp_get(const ep_boot_tcp *boot);

/*
 * Number of connections that rank 0 accepted and dropped: while it waited for the ranks, and those that had not
 * authenticated themselves when all ranks were there. 0 for NULL.
 */
EP_API uint64_t ep_boot_tcp_get_dropped(const ep_boot_tcp *boot);

/* Call it when every ep_comm_new() on it has returned; communicators do not need it afterwards. NULL is allowed. */
EP_API void ep_boot_tcp_free(ep_boot_tcp *boot);

#ifdef __cplusplus
}
#endif

#endif
