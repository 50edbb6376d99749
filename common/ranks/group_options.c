/* SPDX-License-Identifier: Apache-2.0 */
#include "group_options.h"

#include "common/output.h"
#include "gpu.h"
#include "ranks_internal.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

const char *const group_boots[] = {"fork", "threads", "tcp", NULL};
const char *const group_networks[] = {"auto", "emulated", "tcp", "verbs", NULL};
const char *const group_partials[] = {"f32", "bf16", NULL};
const char *const group_backends[] = {"auto", "host", "cuda", NULL};

/* The options of the emulated network only. */
static const char *const emulation_options[] = {"net-delay-us", "net-reorder", "net-ring", "net-split", "net-flip"};

uint64_t group_draw_seed(void)
{
    uint32_t seed = 0;

    if (getrandom(&seed, sizeof(seed), GRND_NONBLOCK) != (ssize_t)sizeof(seed))
        seed = (uint32_t)time(NULL);
    return seed % 1000000000u;
}

static int check_world(const struct cmd *cmd, const struct cmd_call *call, const struct group_options *group)
{
    if (cmd_given(cmd, call, "ranks") && group->ranks != ranks_world_size())
        return cmd_usage(cmd, "--ranks %" PRId64 ": %s started %d ranks", group->ranks, ranks_world_launcher(),
                         ranks_world_size());
    if (cmd_given(cmd, call, "boot") && group->boot != RANKS_TCP)
        return cmd_usage(cmd, "--boot %s: these ranks were started by %s", group_boots[group->boot],
                         ranks_world_launcher());
    return CMD_FINE;
}

int group_check_environment(const struct cmd *cmd, bool for_backend, bool for_network)
{
    static const char *const isas[] = {"portable", "avx2", "avx512", NULL};
    const char *backend = getenv("EPKIT_BACKEND"), *network = getenv("EPKIT_NETWORK"), *isa = getenv("EPKIT_HOST_ISA");

    /* "auto" is valid for the options only. */
    if (for_backend && backend && *backend && !text_is_any(backend, group_backends + 1))
        return cmd_refuse(cmd, "EPKIT_BACKEND", "'%s' is none of host, cuda", backend);
    if (for_network && network && *network && !text_is_any(network, group_networks + 1))
        return cmd_refuse(cmd, "EPKIT_NETWORK", "'%s' is none of emulated, tcp, verbs", network);
    /* One of these that the processor does not support is found by the library. */
    if (isa && *isa && !text_is_any(isa, isas))
        return cmd_refuse(cmd, "EPKIT_HOST_ISA", "'%s' is none of portable, avx2, avx512", isa);
    return CMD_FINE;
}

/* The first of `names` that the command line gives; NULL: none. */
static const char *given_option(const struct cmd *cmd, const struct cmd_call *call, const char *const *names, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (cmd_given(cmd, call, names[i]))
            return names[i];
    return NULL;
}

/* Rejects options that have no effect on one node, so that results are not attributed to them. */
static int check_network(const struct cmd *cmd, const struct cmd_call *call)
{
    static const char *const names[] = {"channels", "partial", "network"};
    const char *given = given_option(cmd, call, emulation_options, COUNT(emulation_options));

    for (size_t i = 0; i < COUNT(names) && !given; i++)
        /* --network tcp selects the bootstrap even on one node. */
        if (cmd_given(cmd, call, names[i]) && !(ranks_world_rank() >= 0 && strcmp(names[i], "network") == 0))
            given = names[i];
    return given ? cmd_usage(cmd, "--%s needs --nodes 2 or more", given) : CMD_FINE;
}

static int check_emulated(const struct cmd *cmd, const char *network)
{
    if (strcmp(network, "emulated") == 0 && ranks_world_nodes() > 1)
        return cmd_usage(cmd, "--network emulated needs all ranks on one host, and these were started by %s",
                         ranks_world_launcher());
    return CMD_FINE;
}

/* Only the emulated network can inject faults. */
static int check_engine(const struct cmd *cmd, const struct cmd_call *call, const struct group_options *group)
{
    const char *network = group_networks[group->network];
    const char *given = given_option(cmd, call, emulation_options, COUNT(emulation_options));

    if (group->network > 1 && given)
        return cmd_usage(cmd, "--%s is for the emulated network, not for --network %s", given, network);
    return check_emulated(cmd, network);
}

/* The backend named by the user, and where; NULL: none. */
static const char *named_backend(const struct group_options *group, const char **ret_where)
{
    const char *name = getenv("EPKIT_BACKEND");

    *ret_where = group->backend ? "--backend names it" : "EPKIT_BACKEND names it";
    if (group->backend)
        return group_backends[group->backend];
    return name && *name ? name : NULL;
}

bool group_choose_backend(const struct group_options *group, struct ranks_spec *specs, size_t n)
{
    struct ranks_spec *largest = &specs[0];
    const char *where, *named = named_backend(group, &where);
    struct ranks_spec chosen;
    bool passed_over = false;

    for (size_t i = 1; i < n; i++)
        if (specs[i].nranks > largest->nranks)
            largest = &specs[i];
    chosen = *largest;
    if (named) {
        chosen.backend = gpu_is_backend(named) ? "cuda" : "host";
        snprintf(chosen.backend_why, sizeof(chosen.backend_why), "%s", where);
    } else {
        passed_over = gpu_choose_backend(&chosen);
    }
    for (size_t i = 0; i < n; i++) {
        specs[i].backend = chosen.backend;
        memcpy(specs[i].backend_why, chosen.backend_why, sizeof(chosen.backend_why));
    }
    return passed_over;
}

void group_warn_host(const struct ranks_spec *spec)
{
    out_warning("using the host backend, not the GPUs of this machine: %s", spec->backend_why);
}

int group_gpu_ranks(const struct group_options *group)
{
    const char *where, *named = named_backend(group, &where);

    if (named)
        return gpu_is_backend(named) ? gpu_query()->usable : 0;
    return group->nodes > 1 ? 0 : gpu_default_ranks();
}

int group_spec(const struct cmd *cmd, const struct cmd_call *call, const struct group_options *group, uint64_t seed,
               struct ranks_spec *ret_spec)
{
    bool world = ranks_world_rank() >= 0;
    int64_t ranks = world ? ranks_world_size() : group->ranks;
    int result = CMD_FINE;

    if (world)
        result = check_world(cmd, call, group);
    if (result != CMD_FINE)
        return result;
    if (group->nodes > ranks)
        return cmd_usage(cmd, "--nodes %" PRId64 ": there are only %" PRId64 " ranks", group->nodes, ranks);
    if (ranks % group->nodes != 0)
        return cmd_usage(cmd, "--ranks %" PRId64 " cannot be spread evenly over --nodes %" PRId64, ranks, group->nodes);
    if (!world && group->boot == RANKS_TCP)
        return cmd_usage(cmd,
                         "--boot tcp needs RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment, and %s",
                         ranks_env_missing());
    if (group->nodes == 1)
        result = check_network(cmd, call);
    else
        result = check_engine(cmd, call, group);
    if (result == CMD_FINE)
        result = group_check_environment(cmd, group->backend == 0, group->network == 0);
    if (result != CMD_FINE)
        return result;
    *ret_spec = (struct ranks_spec){
        .boot = world ? RANKS_TCP : (enum ranks_boot)group->boot,
        .nranks = (int)ranks,
        .nnodes = (int)group->nodes,
        .timeout_ms = (int)(group->timeout_s * 1000),
        .channels = (int)group->channels,
        .network = group->network && group->nodes > 1 ? group_networks[group->network] : NULL,
        .partial_type = strcmp(group_partials[group->partial], "bf16") == 0 ? EP_BF16 : EP_F32,
        .emulation =
            {
                .seed = seed,
                .delay_us = (uint32_t)group->net_delay_us,
                .ring_bytes = (uint32_t)group->net_ring,
                .split_bytes = (uint32_t)group->net_split,
                .reorder = group->net_reorder,
                .flip_put = (uint32_t)group->net_flip,
            },
    };
    return CMD_FINE;
}
