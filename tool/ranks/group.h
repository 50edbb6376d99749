/* SPDX-License-Identifier: Apache-2.0 */
/*
 * group.h - options that describe a group of ranks, shared by the verbs that run one.
 */
#ifndef EP_TOOL_GROUP_H
#define EP_TOOL_GROUP_H

#include "cmd.h"
#include "ranks.h"

struct group_options {
    int64_t ranks, nodes;
    int boot;    /* enum ranks_boot */
    int backend; /* index into group_backends */
    int64_t timeout_s;
    int64_t channels;
    int partial; /* index into group_partials */
    int network; /* index into group_networks */
    int64_t net_delay_us, net_ring, net_split;
    bool net_reorder;
};

extern const char *const group_boots[];    /* "fork", "mpi", "threads", "tcp": in the order of enum ranks_boot */
extern const char *const group_networks[]; /* "auto", "emulated", "tcp", "verbs", "mpi" */
extern const char *const group_partials[]; /* "f32", "bf16" */
extern const char *const group_backends[]; /* "auto", "host", "cuda" */

#define GROUP_BOOT_HELP                                                                                                \
    "forked processes, mpirun, threads of one process, or tcp: each rank is an epkit of its own, started with RANK, "  \
    "WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun and 'epkit launch' set them"
#define GROUP_NETWORK_HELP                                                                                             \
    "network between nodes: emulated, tcp (sockets), verbs (RDMA NICs), mpi; auto: that of --boot, else emulated"

#define GROUP_TIMEOUT_HELP                                                                                             \
    "deadline of every wait for a peer, and of tcp for all ranks to come, which $EPKIT_TIMEOUT_MS sets apart; ranks "  \
    "that a launcher started wait a minute more between jobs"
#define GROUP_BACKEND_HELP                                                                                             \
    "backend of the library; auto takes cuda where each rank gets a GPU of its own and these reach each other, else "  \
    "host"

/* What the texts of verbs say about it. */
#define GROUP_BACKEND_TEXT                                                                                             \
    "The backend is cuda where libepkit-cuda finds a GPU of its own for each rank, all on one node, and these reach "  \
    "each other (P2P); else it is host. Where GPUs of this machine are passed over, a line says why. --backend or "    \
    "EPKIT_BACKEND name one instead; named, cuda lets ranks share GPUs where there are too few. Without --ranks "      \
    "there is a rank for each GPU, if they are taken. Under mpirun each rank tells which GPUs it sees: each may have " \
    "one of its own (CUDA_VISIBLE_DEVICES).\n\n"

/* Rows of an option table. `owner` is the verb's options struct, `member` its struct group_options. */
/* clang-format off */
#define GROUP_OPTIONS(owner, member, ranks_default, nodes_default)                                                     \
    {"ranks", 'r', "N", OPT_INT, offsetof(owner, member.ranks), .min = 1, .max = EP_MAX_RANKS,                         \
     .value = ranks_default, .help = "number of ranks", .heading = "Group"},                                           \
    {"nodes", 'n', "N", OPT_INT, offsetof(owner, member.nodes), .min = 1, .max = EP_MAX_RANKS,                         \
     .value = nodes_default, .help = "nodes that the ranks are spread over; must divide the ranks"},                   \
    {"boot", 'b', "HOW", OPT_CHOICE, offsetof(owner, member.boot), .choices = group_boots, .value = "fork",            \
     .help = "how ranks are started: " GROUP_BOOT_HELP},                                                               \
    {"network", 0, "NAME", OPT_CHOICE, offsetof(owner, member.network), .choices = group_networks, .value = "auto",    \
     .help = GROUP_NETWORK_HELP},                                                                                      \
    {"backend", 0, "NAME", OPT_CHOICE, offsetof(owner, member.backend), .choices = group_backends, .value = "auto",    \
     .help = GROUP_BACKEND_HELP},                                                                                      \
    {"timeout", 0, "SECONDS", OPT_INT, offsetof(owner, member.timeout_s), .min = 1, .max = 86400, .value = "30",       \
     .help = GROUP_TIMEOUT_HELP},                                                                                      \
    {"channels", 0, "N", OPT_INT, offsetof(owner, member.channels), .min = 1, .max = 16, .value = "4",                 \
     .help = "independent streams per network peer"},                                                                  \
    {"partial", 0, "TYPE", OPT_CHOICE, offsetof(owner, member.partial), .choices = group_partials, .value = "f32",     \
     .help = "element type of partial sums on the network"},                                                           \
    {"net-delay-us", 0, "US", OPT_INT, offsetof(owner, member.net_delay_us), .min = 0, .max = 1000000, .value = "0",   \
     .help = "each write lands up to this much later", .heading = "Emulated network between nodes"},                   \
    {"net-reorder", 0, NULL, OPT_FLAG, offsetof(owner, member.net_reorder), .help = "serve channels in random order"}, \
    {"net-ring", 0, "BYTES", OPT_SIZE, offsetof(owner, member.net_ring), .min = 0, .max = INT64_C(1) << 30,            \
     .value = "0", .help = "capacity of the wire per peer and channel; 0 leaves it to the library"},                   \
    {"net-split", 0, "BYTES", OPT_SIZE, offsetof(owner, member.net_split), .min = 0, .max = INT64_C(1) << 30,          \
     .value = "0", .help = "writes land in pieces of at most this; 0: whole"}
/* clang-format on */

/*
 * Checks the options against each other and makes the spec of a job, but for its backend; `seed` is that of the
 * emulated network. CMD_FINE, or CMD_USAGE or CMD_UNSUPPORTED after reporting why. Under mpirun the ranks are those of
 * the world.
 */
int group_spec(const struct cmd *cmd, const struct cmd_call *call, const struct group_options *group, uint64_t seed,
               struct ranks_spec *ret_spec);

/*
 * Gives the specs of one run their backend: the same to all, since figures of one table are compared, and so that of
 * the largest. True if GPUs of this machine are passed over, which is worth group_warn_host().
 */
bool group_choose_backend(const struct group_options *group, struct ranks_spec *specs, size_t n);

/* The line on standard error that says why the host backend was chosen. */
void group_warn_host(const struct ranks_spec *spec);

/* Ranks that a group of these options has when nobody says how many, one for each GPU; 0: it will not be on GPUs. */
int group_gpu_ranks(const struct group_options *group);

/* Is the backend of EPKIT_BACKEND one there can be? CMD_FINE, or CMD_USAGE after reporting that it is not. */
int group_check_backend(const struct cmd *cmd);

/* CMD_USAGE where the ranks come from several hosts and the network is the emulated one. */
int group_check_emulated(const struct cmd *cmd, const char *network, enum ranks_boot boot);

/* A seed that prints as a short number, from the kernel. */
uint64_t group_draw_seed(void);

#endif
