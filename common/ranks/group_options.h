/* SPDX-License-Identifier: Apache-2.0 */
/* group_options.h - options of a group of ranks, shared by the commands that run one. */
#ifndef EP_COMMON_RANKS_GROUP_OPTIONS_H
#define EP_COMMON_RANKS_GROUP_OPTIONS_H

#include "common/cmd.h"
#include "ranks.h"

struct group_options {
    int64_t ranks, nodes;
    int boot;    /* enum ranks_boot */
    int backend; /* index into group_backends */
    int64_t timeout_s;
    int64_t channels;
    int partial; /* index into group_partials */
    int network; /* index into group_networks */
    int64_t net_delay_us, net_ring, net_split, net_flip;
    bool net_reorder;
};

extern const char *const group_boots[];    /* "fork", "threads", "tcp": in the order of enum ranks_boot */
extern const char *const group_networks[]; /* "auto", "emulated", "tcp", "verbs" */
extern const char *const group_partials[]; /* "f32", "bf16" */
extern const char *const group_backends[]; /* "auto", "host", "cuda" */

#define GROUP_BOOT_HELP                                                                                                \
    "forked processes, threads of one process, or tcp: each rank is an epkit of its own, started by mpirun, or with "  \
    "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun and 'epkit launch' set them"
#define GROUP_NETWORK_HELP                                                                                             \
    "network between nodes: emulated, tcp (sockets), verbs (RDMA NICs); auto: that of --boot, else emulated"

/* Paragraph in the descriptions of commands. */
#define GROUP_BACKEND_TEXT                                                                                             \
    "The default backend is cuda if all ranks are on one node and libepkit-cuda finds a GPU for each of them, with "   \
    "peer access (P2P) between all of these; else it is host. If GPUs of this machine are not used, a warning says "   \
    "why. --backend or EPKIT_BACKEND select the backend; with an explicit cuda, ranks share GPUs if there are too "    \
    "few. The default of --ranks is one rank for each GPU if GPUs are used. Under mpirun each rank may see different " \
    "GPUs (CUDA_VISIBLE_DEVICES).\n\n"

/* Rows of an option table. `owner` is the command's options struct, `member` its struct group_options. */
/* clang-format off */
#define GROUP_RANK_OPTIONS(owner, member, timeout)                                                                     \
    {"network", 0, "NAME", OPT_CHOICE, offsetof(owner, member.network), .choices = group_networks, .value = "auto",    \
     .help = GROUP_NETWORK_HELP},                                                                                      \
    {"backend", 0, "NAME", OPT_CHOICE, offsetof(owner, member.backend), .choices = group_backends, .value = "auto",    \
     .help = "backend of the library; auto: cuda if each rank gets its own GPU and these have peer access, else host"},\
    {"timeout", 0, "SECONDS", OPT_INT, offsetof(owner, member.timeout_s), .min = 1, .max = 86400, .value = timeout,    \
     .help = "deadline of every wait for a peer, and for all ranks to join over tcp unless $EPKIT_TIMEOUT_MS is set; " \
             "ranks started by a launcher wait a minute longer between jobs"},                                         \
    {"channels", 0, "N", OPT_INT, offsetof(owner, member.channels), .min = 1, .max = 16, .value = "4",                 \
     .help = "independent streams per network peer"},                                                                  \
    {"partial", 0, "TYPE", OPT_CHOICE, offsetof(owner, member.partial), .choices = group_partials, .value = "f32",     \
     .help = "element type of partial sums on the network"}

#define GROUP_OPTIONS(owner, member)                                                                                   \
    {"ranks", 'r', "N", OPT_INT, offsetof(owner, member.ranks), .min = 1, .max = EP_MAX_RANKS,                         \
     .help = "number of ranks", .heading = "Group"},                                                                   \
    {"nodes", 'n', "N", OPT_INT, offsetof(owner, member.nodes), .min = 1, .max = EP_MAX_RANKS,                         \
     .help = "nodes that the ranks are spread over; must divide the ranks"},                                           \
    {"boot", 'b', "HOW", OPT_CHOICE, offsetof(owner, member.boot), .choices = group_boots, .value = "fork",            \
     .help = "how ranks are started: " GROUP_BOOT_HELP},                                                               \
    GROUP_RANK_OPTIONS(owner, member, "30"),                                                                           \
    {"net-delay-us", 0, "US", OPT_INT, offsetof(owner, member.net_delay_us), .min = 0, .max = 1000000, .value = "0",   \
     .help = "most delay of each write, drawn at random", .heading = "Emulated network between nodes"},                \
    {"net-reorder", 0, NULL, OPT_FLAG, offsetof(owner, member.net_reorder),                                            \
     .help = "process channels in random order"},                                                                      \
    {"net-ring", 0, "BYTES", OPT_SIZE, offsetof(owner, member.net_ring), .min = 0, .max = INT64_C(1) << 30,            \
     .value = "0", .help = "capacity of the wire per peer and channel; 0: default of the library"},                    \
    {"net-split", 0, "BYTES", OPT_SIZE, offsetof(owner, member.net_split), .min = 0, .max = INT64_C(1) << 30,          \
     .value = "0", .help = "writes take effect in pieces of at most this size; 0: whole"},                             \
    {"net-flip", 0, "N", OPT_INT, offsetof(owner, member.net_flip), .min = 0, .max = INT32_MAX, .value = "0",          \
     .help = "the Nth large write to each rank arrives with a wrong bit, so that the check of the results must fail; " \
             "0: none; needs whole writes (no smaller --net-split)"}
/* clang-format on */

/*
 * Validates the options and fills in the spec of a job, except for its backend; `seed` is that of the emulated network.
 * CMD_FINE, or CMD_USAGE or CMD_UNSUPPORTED after reporting why. Under a launcher the ranks are those of the world.
 */
int group_spec(const struct cmd *cmd, const struct cmd_call *call, const struct group_options *group, uint64_t seed,
               struct ranks_spec *ret_spec);

/*
 * Sets the backend of the specs of one run: the same for all, by the largest, because the results are compared in one
 * table. True if GPUs of this machine are not used: call group_warn_host().
 */
bool group_choose_backend(const struct group_options *group, struct ranks_spec *specs, size_t n);

/* Warns on standard error why the host backend was chosen. */
void group_warn_host(const struct ranks_spec *spec);

/* Default number of ranks of a group with these options: one for each GPU; 0: GPUs will not be used. */
int group_gpu_ranks(const struct group_options *group);

/* CMD_FINE, or CMD_USAGE after reporting a wrong EPKIT_BACKEND or EPKIT_NETWORK that no option replaces. */
int group_check_environment(const struct cmd *cmd, bool for_backend, bool for_network);

/* A random seed of at most nine digits. */
uint64_t group_draw_seed(void);

#endif
