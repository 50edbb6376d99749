/* SPDX-License-Identifier: Apache-2.0 */
/*
 * verbs_net.h - the network over RDMA NICs: InfiniBand and RoCE, by libibverbs; for verbs*.c only.
 *
 * One reliable connected (RC) queue pair for each (rail peer, channel). A put is sent as RDMA writes, and a signal is a
 * SEND of 16 bytes after them on the same queue pair, which the receiver adds up when it polls. Memory of attach() is
 * read by the NIC; all other memory is copied into a registered ring buffer, so it needs no registration and may be
 * reused when put() returns. A receiver that does not poll throttles its senders: its receive queue is full.
 *
 * GPU memory can be attached and be the payload region, by its dma-buf or through a peer-memory module. A rank whose
 * GPU memory cannot be registered receives payload in its region; its peers write there by the same calls.
 *
 * Each endpoint also opens an endpoint of the tcp network, for what a NIC does not provide: authentication by the
 * shared secret, the control link, and immediate detection of the exit of a process, which a queue pair reports only
 * after seconds. The keys of the regions are exchanged by the boot's all-gather. InfiniBand and RoCE do not
 * authenticate: all hosts of the fabric must be trusted.
 *
 * ep_net_verbs.open: `context` as for ep_net_tcp. The choice of the NIC is described below.
 */
#ifndef EP_NET_VERBS_NET_H
#define EP_NET_VERBS_NET_H

#include "base/error.h"
#include "net/net.h"
#include "net/tcp.h"

#include <infiniband/verbs.h>
#include <stdatomic.h>

/*
 * verbs_device.c: selects and opens the NIC of a rank: device, port and GID.
 *
 * Candidates are the active ports. An Ethernet port needs a RoCE v2 GID: IPv4 is preferred to IPv6, and link-local
 * addresses come last. InfiniBand ports are addressed by their LID. The candidates, in the order of their names or of
 * $EPKIT_VERBS_DEVICE ("mlx5_0", "mlx5_0:1,mlx5_3"), are assigned to the ranks of a node round-robin. Without that
 * list, a rank with a GPU takes only the ports nearest to it (verbs_near.h).
 *
 *   EPKIT_VERBS_DEVICE          list of ports, by local rank
 *   EPKIT_VERBS_GID_INDEX       index in the port's GID table; -1: chosen as above
 *   EPKIT_VERBS_TRAFFIC_CLASS   0..255 of RoCE packets (DSCP * 4); 0 unless set
 *   EPKIT_VERBS_SERVICE_LEVEL   0..15 of InfiniBand; 0 unless set
 *   EPKIT_VERBS_GPU_MEMORY      0, 1: register GPU memory never, always; by default only near it (verbs_near.h)
 */
#define VERBS_NAME_BYTES 80

/*
 * libibverbs, loaded with dlopen() on first use: libepkit must run where it is not installed. What its headers define
 * inline (posting, polling) goes through the context. These have the type that the headers declare:
 */
#define VERBS_FUNCTIONS(F)                                                                                             \
    F(fork_init)                                                                                                       \
    F(get_device_list)                                                                                                 \
    F(free_device_list)                                                                                                \
    F(get_device_name)                                                                                                 \
    F(open_device)                                                                                                     \
    F(close_device)                                                                                                    \
    F(query_device)                                                                                                    \
    F(alloc_pd)                                                                                                        \
    F(dealloc_pd)                                                                                                      \
    F(reg_mr)                                                                                                          \
    F(dereg_mr)                                                                                                        \
    F(create_cq)                                                                                                       \
    F(destroy_cq)                                                                                                      \
    F(create_qp)                                                                                                       \
    F(modify_qp)                                                                                                       \
    F(destroy_qp)                                                                                                      \
    F(wc_status_str)

struct verbs_library {
#define VERBS_POINTER(name) __typeof__(ibv_##name) *name;
    VERBS_FUNCTIONS(VERBS_POINTER)
#undef VERBS_POINTER
    int (*query_port)(struct ibv_context *context, uint8_t port, struct ibv_port_attr *ret_attributes);
    __typeof__(_ibv_query_gid_table) *query_gid_table;
    /* NULL before rdma-core 34. */
    struct ibv_mr *(*reg_dmabuf_mr)(struct ibv_pd *pd, uint64_t offset, size_t bytes, uint64_t address, int fd,
                                    int access);
};

struct verbs_device {
    const struct verbs_library *library;
    struct ibv_context *context; /* NULL: not open */
    struct ibv_device_attr limits;
    char name[VERBS_NAME_BYTES]; /* "mlx5_0:1" */
    uint8_t port;
    bool is_ethernet;
    uint16_t lid; /* of InfiniBand */
    union ibv_gid gid;
    uint8_t gid_index;
    int traffic_class, service_level;
    enum ibv_mtu mtu;
    uint32_t max_message; /* bytes of one operation */
    int gpu_memory;       /* EPKIT_VERBS_GPU_MEMORY; -1: by nearness */
    int nearness;         /* to the rank's GPU; -1: no GPU was named */
};

/* `gpu`: as in struct ep_net_params. EP_E_UNSUPPORTED: no library, no device or no usable port; the error text lists
 * the ports found and the reasons. */
ep_status verbs_device_open(int local_rank, const char *gpu, struct verbs_device *ret_device);
/* Whether the environment allows it; a value that is none is an error of verbs_device_open(). */
bool verbs_uses_gpu_memory(void);
/* The port is known not to be active. */
bool verbs_device_is_down(const struct verbs_device *device);
void verbs_device_close(struct verbs_device *device);

/* --- the network ------------------------------------------------------------------------------------------------- */

/* Outstanding operations of a queue pair. */
#define VERBS_SENDS 64
/* Posted receives of a queue pair: so many signals may arrive unpolled; beyond that the sender's NIC retries (RNR). */
#define VERBS_RECEIVES 128
#define VERBS_INLINE_BYTES 64
#define VERBS_SOURCES 64
/* Far beyond any region, so that an offset that is too large does not lead to the payload. */
#define VERBS_PAYLOAD_BASE (UINT64_C(1) << 62)

enum verbs_kind { VERBS_SIGNAL = 0x7669676e, VERBS_BYE = 0x76627965, VERBS_HELLO = 0x7668656c };

/* A message, in host byte order: all hosts have the same architecture. */
struct verbs_record {
    uint32_t kind, index;
    uint64_t add;
};

/* The queue pair of one channel to a rail peer. */
struct verbs_conn {
    struct ibv_qp *qp; /* NULL: revoked, or no communication with that rank (ep_net_params.block_ranks) */
    int index;
    uint32_t inline_bytes;
    /* Remote regions; one and the same if the peer has none for payload. */
    uint64_t remote_region, remote_payload;
    uint32_t remote_key, remote_payload_key;
    /* The send buffer, a ring: running byte counts, in use from `head` to `tail`. */
    unsigned char *ring;
    uint64_t head, tail;
    uint64_t ends[VERBS_SENDS]; /* of the outstanding operations: `tail` after each */
    unsigned first, count;
    /* Operations posted so far, and the last of them that reads memory of the caller. */
    uint64_t posted, last_attached;
    struct verbs_record *received; /* [VERBS_RECEIVES] */
    bool hello_received;
    bool bye_received; /* no more input */
    bool bye_sent;
    bool discards;           /* the peer no longer receives: puts are discarded */
    uint64_t peer_closed_ns; /* when the tcp connection to the peer ended, 0: it is open */
    uint64_t failed_ns;      /* when the queue pair failed, 0: it has not */
    enum ibv_wc_status why;
};

/* Memory of the caller that puts read without a copy. */
struct verbs_source {
    const unsigned char *begin;
    size_t bytes;
    bool device;
    struct ibv_mr *mr;
};

struct verbs_net {
    struct ep_net net;
    struct verbs_device device;
    int n; /* connections */
    struct verbs_conn *conns;
    size_t ring_bytes;     /* of a connection: any put fits */
    unsigned char *copies; /* rings and receive buffers of all connections */
    size_t copies_bytes;
    struct ibv_pd *pd;
    struct ibv_mr *region_mr, *payload_mr, *copies_mr; /* payload_mr: NULL if payload is received in the region */
    struct verbs_source sources[VERBS_SOURCES];
    _Atomic unsigned n_sources;
    struct ibv_cq *sends, *receives;
    uint32_t tcp_polls;     /* calls of check_ends(), for TCP_POLL_INTERVAL */
    uint64_t port_check_ns; /* when the local port is to be checked again */
    int port_downs;         /* checks that have found it down, without one between them that has not */
};

/* Its free() accepts an endpoint that is partly open, if that is abandoned. */
extern const struct ep_net_ops verbs_ops;

/* Allocates and registers everything but sources. Payload is received in the region if `payload` cannot be used. */
ep_status verbs_memory_open(struct verbs_net *v, const struct ep_net_buffer *payload);
/* Deregisters it and the sources, and frees the copies. The queue pairs no longer exist. */
void verbs_memory_close(struct verbs_net *v);
ep_status verbs_attach(struct ep_net *net, const struct ep_net_buffer *buffer);
/* NULL: it is not part of a registered source. */
const struct verbs_source *verbs_find_source(const struct verbs_net *v, const unsigned char *src, size_t bytes);

/* Posts a receive into conn->received[slot]. 0 or errno. */
int verbs_post_receive(struct verbs_net *v, struct verbs_conn *conn, unsigned slot);

/*
 * Sends a message on every connection and waits for those of the peers: connecting a queue pair involves no peer, so
 * that NICs without a route between them would otherwise be found by the first operation only. Fails as soon as `watch`
 * does. *ret_unverified: a connection that did not transfer both messages, or NULL.
 */
ep_status verbs_exchange_hello(struct verbs_net *v, uint64_t deadline_ns, struct ep_net_tcp_watch *watch,
                               const struct verbs_conn **ret_unverified);

#endif
