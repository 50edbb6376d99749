/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The bootstrap over TCP: reads the environment, opens the star of connections (lib/tcp/star.h), and detects which
 * ranks share a host.
 */
#include "net/tcp.h"
#include "base/args.h"
#include "base/locality.h"
#include "base/process.h"
#include "tcp/star.h"

#include <epkit/boot.h>
#include <epkit/types.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEFAULT_TIMEOUT_MS 30000
#define HOST_BYTES 256

struct ep_boot_tcp {
    ep_boot boot;
    struct ep_net_provider provider;
    struct ep_net_tcp_context network;
    struct tcp_star *star;
    uint64_t generation; /* of the process that created it: connections are not shared with a forked child */
};

/* Arguments, completed from the environment. */
struct settings {
    int rank, nranks, timeout_ms, ranks_per_node, local_size;
    char host[HOST_BYTES];
    const char *host_from; /* the argument or variable that names it, for error texts */
    uint16_t port;
    const char *secret, *interface;
    const char *job; /* job ID, which separates jobs with the same secret; "": none */
};

/* --- arguments and environment --- */

static const char *read_env(const char *name)
{
    const char *value = getenv(name);

    return value && *value ? value : NULL;
}

/* EP_E_ARG names the variable; `what` is its meaning, for the case that it is missing. */
static ep_status read_number(const char *name, long least, long most, const char *what, int *ret_value)
{
    const char *text = read_env(name);
    char *end;
    long value;

    if (!text)
        return ep_fail(EP_E_ARG, "ep_boot_tcp_new: %s is %s: %s", name, getenv(name) ? "empty" : "not set", what);
    errno = 0;
    value = strtol(text, &end, 10);
    if (*text < '0' || *text > '9' || *end || errno || value < least || value > most)
        return ep_fail(EP_E_ARG, "ep_boot_tcp_new: %s is \"%.32s\", not a number in %ld..%ld", name, text, least, most);
    *ret_value = (int)value;
    return EP_OK;
}

static ep_status find_rank(const ep_boot_tcp_args *args, struct settings *settings)
{
    settings->rank = args->rank;
    settings->nranks = args->nranks;
    if (!args->nranks) {
        EP_TRY(read_number("WORLD_SIZE", 1, EP_MAX_RANKS, "the number of ranks", &settings->nranks));
        EP_TRY(read_number("RANK", 0, settings->nranks - 1, "the number of this rank", &settings->rank));
    }
    if (settings->nranks < 1 || settings->nranks > EP_MAX_RANKS)
        return ep_fail(EP_E_ARG, "ep_boot_tcp_new: nranks is %d, not in 1..%d", settings->nranks, EP_MAX_RANKS);
    if (settings->rank < 0 || settings->rank >= settings->nranks)
        return ep_fail(EP_E_ARG, "ep_boot_tcp_new: rank is %d of %d", settings->rank, settings->nranks);
    return EP_OK;
}

/* 1 if torchrun's own store listens on MASTER_PORT: then rank 0 uses the next port. */
static int find_port_offset(void)
{
    const char *store = read_env("TORCHELASTIC_USE_AGENT_STORE");

    return store && strcmp(store, "True") == 0;
}

/* Of rank 0: by the arguments or EPKIT_ADDRESS, or else by MASTER_ADDR and MASTER_PORT. */
static ep_status find_address(const ep_boot_tcp_args *args, struct settings *settings)
{
    const char *given = args->address ? args->address : read_env("EPKIT_ADDRESS");
    const char *address = given ? given : read_env("MASTER_ADDR");
    int port = 0, next = find_port_offset();
    ep_status status;

    settings->host_from = args->address ? "the address in ep_boot_tcp_args" : given ? "EPKIT_ADDRESS" : "MASTER_ADDR";
    if (!address)
        return ep_fail(EP_E_ARG, "ep_boot_tcp_new: MASTER_ADDR is %s: the host of rank 0",
                       getenv("MASTER_ADDR") ? "empty" : "not set");
    status = tcp_parse_endpoint(address, settings->host, sizeof(settings->host), &settings->port);
    if (status != EP_OK)
        return ep_fail_prefix(status, "ep_boot_tcp_new: %s: ", settings->host_from);
    if (given && (settings->port || settings->nranks == 1))
        return EP_OK;
    /* Some users add the port to MASTER_ADDR, although torch accepts a host only. */
    if (settings->port && settings->port <= UINT16_MAX - next && !getenv("MASTER_PORT"))
        port = settings->port;
    else
        EP_TRY(read_number("MASTER_PORT", 1, UINT16_MAX - next,
                           given ? "the address of rank 0 names no port" : "a free port of the host of rank 0", &port));
    if (settings->port && settings->port != port)
        return ep_fail(EP_E_ARG, "ep_boot_tcp_new: MASTER_ADDR \"%.64s\" and MASTER_PORT %d name different ports",
                       address, port);
    settings->port = (uint16_t)(port + next);
    return EP_OK;
}

/* It may differ between hosts; find_ranks_per_node() handles that. If the caller sets nranks, the variable may belong
 * to another job: then a bad value is no error. */
static ep_status find_local_size(const ep_boot_tcp_args *args, struct settings *settings)
{
    int size = 0;
    ep_status status;

    if (settings->ranks_per_node || !read_env("LOCAL_WORLD_SIZE"))
        return EP_OK;
    status = read_number("LOCAL_WORLD_SIZE", 1, settings->nranks, "the ranks of this host", &size);
    if (status == EP_OK)
        settings->local_size = size;
    return args->nranks ? EP_OK : status;
}

/* If the caller numbers the ranks, they need not be all ranks of torchrun's job. */
static const char *find_job(bool numbered_by_caller)
{
    const char *job = read_env("EPKIT_JOB_ID");

    if (!job && !numbered_by_caller)
        job = read_env("TORCHELASTIC_RUN_ID");
    return job ? job : "";
}

static ep_status read_settings(const ep_boot_tcp_args *args, struct settings *settings)
{
    *settings = (struct settings){.timeout_ms = args->timeout_ms, .ranks_per_node = args->ranks_per_node};
    EP_TRY(find_rank(args, settings));
    EP_TRY(find_address(args, settings));
    if (args->timeout_ms < 0)
        return ep_fail(EP_E_ARG, "ep_boot_tcp_new: timeout_ms is %d", args->timeout_ms);
    if (!settings->timeout_ms && read_env("EPKIT_TIMEOUT_MS"))
        EP_TRY(read_number("EPKIT_TIMEOUT_MS", 1, INT_MAX, "milliseconds", &settings->timeout_ms));
    if (!settings->timeout_ms)
        settings->timeout_ms = DEFAULT_TIMEOUT_MS;
    if (settings->ranks_per_node < 0 || (settings->ranks_per_node && settings->nranks % settings->ranks_per_node))
        return ep_fail(EP_E_ARG, "ep_boot_tcp_new: ranks_per_node %d does not divide the %d ranks",
                       settings->ranks_per_node, settings->nranks);
    EP_TRY(find_local_size(args, settings));
    settings->secret = args->secret ? args->secret : read_env("EPKIT_SECRET");
    if (!settings->secret)
        settings->secret = "";
    settings->job = find_job(args->nranks != 0);
    settings->interface = args->interface ? args->interface : read_env("EPKIT_TCP_INTERFACE");
    return EP_OK;
}

/* --- which ranks share a host --- */

struct node_info {
    struct ep_locality locality;
    int32_t requested;  /* ranks per node, by the arguments; 0: not set */
    int32_t local_size; /* LOCAL_WORLD_SIZE; 0: not set. It may differ between hosts */
};

/* As requested, or LOCAL_WORLD_SIZE if it is equal on all ranks, or detected from the hosts; 0 if these differ in size.
 */
static ep_status find_ranks_per_node(const struct node_info *all, int nranks, int *ret_n)
{
    int n = all[0].local_size;

    for (int rank = 0; rank < nranks; rank++) {
        if (all[rank].requested != all[0].requested)
            return ep_fail(EP_E_MISMATCH,
                           "ep_boot_tcp_new: ranks disagree: ranks_per_node is %d on rank 0 and %d on rank %d",
                           all[0].requested, all[rank].requested, rank);
        if (all[rank].local_size != n)
            n = 0;
    }
    if (all[0].requested)
        n = all[0].requested;
    else if (!n || nranks % n)
        n = ep_locality_find_nodes(&all[0].locality, sizeof(all[0]), nranks, NULL);
    *ret_n = n;
    return EP_OK;
}

static ep_status find_nodes(ep_boot_tcp *boot, const struct settings *settings)
{
    struct node_info mine, *all = calloc((size_t)settings->nranks, sizeof(*all));
    ep_status status;

    if (!all)
        return ep_fail(EP_E_MEMORY, "ep_boot_tcp_new: no memory for %d ranks", settings->nranks);
    memset(&mine, 0, sizeof(mine));
    ep_locality_get_self(&mine.locality);
    mine.requested = settings->ranks_per_node;
    mine.local_size = settings->local_size;
    status = tcp_star_allgather(boot->star, &mine, sizeof(mine), settings->timeout_ms, all);
    if (status == EP_OK)
        status = find_ranks_per_node(all, settings->nranks, &boot->boot.ranks_per_node);
    free(all);
    return status;
}

/* --- the bootstrap --- */

static ep_status allgather(void *context, const void *mine, size_t bytes, int timeout_ms, void *ret_all)
{
    ep_boot_tcp *boot = context;

    if (boot->generation != ep_process_generation())
        return ep_fail(EP_E_STATE,
                       "bootstrap tcp: this process is a forked child of the one that created the bootstrap");
    return tcp_star_allgather(boot->star, mine, bytes, timeout_ms, ret_all);
}

static ep_status open_star(ep_boot_tcp *boot, const struct settings *settings)
{
    struct tcp_star_args args = {.name = "bootstrap tcp",
                                 .rank = settings->rank,
                                 .nranks = settings->nranks,
                                 .host = settings->host,
                                 .host_from = settings->host_from,
                                 .port = settings->port,
                                 .timeout_ms = settings->timeout_ms};
    struct tcp_address local[TCP_ADDRESSES];
    int n = 0;

    /* Derived from secret and job ID, so that a rank of another job fails the handshake. */
    tcp_key_make(settings->secret, "bootstrap", settings->job, strlen(settings->job), &args.key);
    if (settings->interface && *settings->interface) {
        if (strlen(settings->interface) >= sizeof(boot->network.interface))
            return ep_fail(EP_E_ARG, "ep_boot_tcp_new: the interfaces \"%.64s...\" are more than %zu characters",
                           settings->interface, sizeof(boot->network.interface) - 1);
        EP_TRY(tcp_find_interfaces(settings->interface, NULL, local, &n));
        /* Rank 0 listens on all addresses: the others may know it by another name. */
        args.interface = settings->rank ? settings->interface : NULL;
        snprintf(boot->network.interface, sizeof(boot->network.interface), "%s", settings->interface);
    }
    return tcp_star_open(&args, &boot->star);
}

ep_status ep_boot_tcp_new(const ep_boot_tcp_args *args, ep_boot_tcp **ret_boot)
{
    ep_boot_tcp_args mine;
    struct settings settings;
    ep_boot_tcp *boot;
    ep_status status;

    if (!ret_boot)
        return ep_fail(EP_E_ARG, "ep_boot_tcp_new: ret_boot is NULL");
    EP_TRY(ep_args_load(&mine, sizeof(mine), EP_ARGS_FIRST_BYTES(ep_boot_tcp_args), args, "ep_boot_tcp_new: args"));
    EP_TRY(read_settings(&mine, &settings));
    boot = calloc(1, sizeof(*boot));
    if (!boot)
        return ep_fail(EP_E_MEMORY, "ep_boot_tcp_new: no memory");
    boot->generation = ep_process_generation();
    boot->boot = (ep_boot){.size = sizeof(boot->boot),
                           .rank = settings.rank,
                           .nranks = settings.nranks,
                           .allgather = allgather,
                           .context = boot,
                           .network = &boot->provider};
    boot->provider = ep_net_tcp;
    boot->provider.context = &boot->network;
    tcp_key_make(settings.secret, "network", NULL, 0, &boot->network.key);
    status = open_star(boot, &settings);
    if (status == EP_OK) {
        boot->network.local = tcp_star_local_address(boot->star);
        boot->network.check = tcp_star_check;
        boot->network.check_context = boot->star;
        status = find_nodes(boot, &settings);
    }
    if (status != EP_OK) {
        ep_boot_tcp_free(boot);
        return status;
    }
    *ret_boot = boot;
    return EP_OK;
}

const ep_boot *ep_boot_tcp_get(const ep_boot_tcp *boot)
{
    return boot ? &boot->boot : NULL;
}

uint64_t ep_boot_tcp_get_dropped(const ep_boot_tcp *boot)
{
    return boot ? tcp_star_dropped(boot->star) : 0;
}

void ep_boot_tcp_free(ep_boot_tcp *boot)
{
    if (!boot || boot->generation != ep_process_generation())
        return;
    tcp_star_free(boot->star);
    memset(&boot->network, 0, sizeof(boot->network));
    free(boot);
}
