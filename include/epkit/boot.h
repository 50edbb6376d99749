/* SPDX-License-Identifier: Apache-2.0 */
/*
 * epkit/boot.h - bootstrap: how the ranks of a group find each other.
 *
 * A communicator needs one thing of its surroundings while it is created: an all-gather of small blocks. Four ways:
 *   - ep_boot_shm_*:   ranks that are threads of one process or forked children of it (below);
 *   - ep_boot_tcp_*:   ranks on any hosts, started by torchrun, a JobSet, ssh or by hand (below);
 *   - epkit/mpi.h:     ranks that mpirun started;
 *   - your own:        fill an ep_boot with a callback over whatever your engine already has (a TCP store, a key-value
 *                      service, torch.distributed).
 */
#ifndef EPKIT_BOOT_H
#define EPKIT_BOOT_H

#include <epkit/status.h>
#include <epkit/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Gather `bytes` from every rank: rank r's block lands at ret_all + r * bytes on every rank. Called by all ranks in the
 * same order, from one thread a rank, only inside ep_comm_new(). Must return within timeout_ms, with EP_E_TIMEOUT if
 * not all ranks came. A boot that notices the end of a rank should return EP_E_PEER_DEAD at once, because
 * ep_comm_new() itself notices it no earlier than the deadline. May be called several times. Its reason for a failure
 * becomes part of that of ep_comm_new() when it leaves one with ep_set_last_error().
 */
typedef ep_status (*ep_allgather_fn)(void *context, const void *mine, size_t bytes, int timeout_ms, void *ret_all);

typedef struct ep_boot {
    size_t size; /* EP_BOOT_INIT sets it */
    int32_t rank;
    int32_t nranks;
    ep_allgather_fn allgather;
    void *context;          /* handed to allgather */
    const void *network;    /* NULL; a boot that brings its own network between hosts (epkit/mpi.h) sets it */
    int32_t ranks_per_node; /* what config.ranks_per_node = 0 means; 0: not known, ep_comm_new() finds the nodes */
    int32_t reserved;       /* 0 */
} ep_boot;

#define EP_BOOT_INIT EP_INIT(ep_boot)

/*
 * A rendezvous in shared anonymous memory. Create it once before the ranks exist (before fork(), before the threads
 * start), then every rank joins it. Leaves no file and no name behind, however the ranks end.
 */
typedef struct ep_boot_shm ep_boot_shm;

EP_API ep_status ep_boot_shm_new(int nranks, ep_boot_shm **ret_shm);

/*
 * Fills *ret_boot for `rank`. Each rank joins once: EP_E_STATE for a second time. The boot borrows `shm`, which must
 * live until ep_comm_new() has returned. An all-gather that fails on any rank makes the rendezvous unusable: the others
 * fail at once or with their next one, because it is no longer known which all-gather a rank is in.
 *
 * A rank that dies before it has joined an all-gather fails it at once, from its first all-gather on, with
 * EP_E_PEER_DEAD and its number. Ranks in PID namespaces of their own or without /proc cannot be watched: the others
 * wait until their deadline.
 */
EP_API ep_status ep_boot_shm_join(ep_boot_shm *shm, int rank, ep_boot *ret_boot);

/* NULL is fine. In a forked child it frees the child's mapping only. */
EP_API void ep_boot_shm_free(ep_boot_shm *shm);

/*
 * A bootstrap over TCP, IPv4 or IPv6: rank 0 listens, the others connect to it and prove that they know the shared
 * secret (HMAC-SHA256 over nonces of both sides). Fields that are NULL or 0 come from the environment, as torchrun, a
 * JobSet, `epkit launch` and most launchers set it. It brings the network "tcp" with it.
 *
 * The secret keeps other programs and the ranks of other jobs out. What the ranks then send each other is neither
 * encrypted nor authenticated, so the network has to be trusted. Without a secret any program that speaks the protocol
 * and connects first can take the place of a rank.
 */
typedef struct ep_boot_tcp ep_boot_tcp;

typedef struct ep_boot_tcp_args {
    size_t size;            /* sizeof(ep_boot_tcp_args); EP_BOOT_TCP_ARGS_INIT sets it */
    int32_t rank;           /* this one, where nranks is given */
    int32_t nranks;         /* 0: $WORLD_SIZE, and the rank is $RANK */
    const char *address;    /* of rank 0: "host", "host:port" or "[IPv6]:port"; NULL: $EPKIT_ADDRESS, else $MASTER_ADDR
                               and $MASTER_PORT. Where torchrun holds that port itself (TORCHELASTIC_USE_AGENT_STORE),
                               it is the next one */
    const char *secret;     /* NULL: $EPKIT_SECRET; none: "" */
    const char *interface;  /* NULL: $EPKIT_TCP_INTERFACE; none: that of the way to rank 0. Names or beginnings of names
                               ("eth0,ens"), "=eth0" for the whole name, "^docker" for all but those, or an address */
    int32_t timeout_ms;     /* for all ranks to come; 0: $EPKIT_TIMEOUT_MS, else 30000 */
    int32_t ranks_per_node; /* the same on all ranks; 0: $LOCAL_WORLD_SIZE, if all have the same, else found from the
                               hosts (epkit/comm.h, ep_comm_new) */
} ep_boot_tcp_args;

#define EP_BOOT_TCP_ARGS_INIT EP_INIT(ep_boot_tcp_args)

/*
 * Collective. Returns when all ranks have connected, or at the deadline with EP_E_TIMEOUT and the ranks that have not,
 * with addresses where they are known. The deadline of rank 0 counts for all that have reached it; one that receives
 * nothing from rank 0 any more waits timeout_ms from when it reached it. Until then a rank tries again: rank 0 may come
 * later, its host name may not be known yet or still lead elsewhere, and a rank that came and died may be started once
 * more. EP_E_MISMATCH: another number of ranks, another ranks_per_node, a rank that is there already, or a process that
 * came with a rank that this job does not have (EP_E_ARG there). $EPKIT_JOB_ID, or $TORCHELASTIC_RUN_ID where nranks is
 * 0, tells jobs with one secret apart: a process of another job ends nothing. With another job or secret a rank tries
 * until its deadline, because what listens there may be of another job: EP_E_TIMEOUT, and the text says so. EP_E_STATE:
 * rank 0 cannot listen at its port. EP_E_SYSTEM: rank 0 lacks descriptors for the others. Connections of strangers,
 * silent ones and those that send anything else are dropped and change nothing.
 */
EP_API ep_status ep_boot_tcp_new(const ep_boot_tcp_args *args, ep_boot_tcp **ret_boot);

/*
 * The boot to hand to ep_comm_new(), borrowed: it lives as long as `boot`. While a communicator is created, a rank that
 * dies is noticed at once (EP_E_PEER_DEAD). An all-gather that fails on any rank makes the boot void. Not in a forked
 * child: EP_E_STATE.
 */
EP_API const ep_boot *ep_boot_tcp_get(const ep_boot_tcp *boot);

/* Connections that rank 0 has dropped while it waited for the ranks. */
EP_API uint64_t ep_boot_tcp_get_dropped(const ep_boot_tcp *boot);

/* Call it after every ep_comm_new() with it has returned: communicators do not need it any more. NULL is fine. */
EP_API void ep_boot_tcp_free(ep_boot_tcp *boot);

#ifdef __cplusplus
}
#endif

#endif
