/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The bootstrap over TCP: what the environment says, the star of connections (lib/tcp/star.h), and which ranks share a
 * host.
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
    uint64_t generation; /* of the process that made it: connections are not shared with a forked child */
};

/* What is to be done, with the environment taken in. */
struct plan {
    int rank, nranks, timeout_ms, ranks_per_node, local_size;
    char host[HOST_BYTES];
    const char *host_from; /* who names it, for error texts */
    uint16_t port;
    const char *secret, *interface;
    const char *job; /* which job this is, beside the secret: "" where nothing says it */
};

/* --- arguments and environment --- */

static const char *read_env(const char *name)
{
    const char *value = getenv(name);

    return value && *value ? value : NULL;
}

/* EP_E_ARG naming the variable; `what` says what it is for where it is missing. */
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

static ep_status find_place(const ep_boot_tcp_args *args, struct plan *plan)
{
    plan->rank = args->rank;
    plan->nranks = args->nranks;
    if (!args->nranks) {
        EP_TRY(read_number("WORLD_SIZE", 1, EP_MAX_RANKS, "the number of ranks", &plan->nranks));
        EP_TRY(read_number("RANK", 0, plan->nranks - 1, "the number of this rank", &plan->rank));
    }
    if (plan->nranks < 1 || plan->nranks > EP_MAX_RANKS)
        return ep_fail(EP_E_ARG, "ep_boot_tcp_new: nranks is %d, not in 1..%d", plan->nranks, EP_MAX_RANKS);
    if (plan->rank < 0 || plan->rank >= plan->nranks)
        return ep_fail(EP_E_ARG, "ep_boot_tcp_new: rank is %d of %d", plan->rank, plan->nranks);
    return EP_OK;
}

static ep_status find_master(struct plan *plan)
{
    const char *host = read_env("MASTER_ADDR"), *store = read_env("TORCHELASTIC_USE_AGENT_STORE");
    int port = 0, next;
    ep_status status;

    if (!host)
        return ep_fail(EP_E_ARG, "ep_boot_tcp_new: MASTER_ADDR is %s: the host of rank 0",
                       getenv("MASTER_ADDR") ? "empty" : "not set");
    plan->host_from = "MASTER_ADDR";
    /* torchrun's own store listens at that port. */
    next = store && strcmp(store, "True") == 0;
    status = tcp_parse_endpoint(host, plan->host, sizeof(plan->host), &plan->port);
    if (status != EP_OK)
        return ep_fail_prefix(status, "ep_boot_tcp_new: MASTER_ADDR: ");
    /* As people write it, though torch takes a host alone. */
    if (plan->port && plan->port <= UINT16_MAX - next && !getenv("MASTER_PORT"))
        port = plan->port;
    else
        EP_TRY(read_number("MASTER_PORT", 1, UINT16_MAX - next, "a free port of the host of rank 0", &port));
    if (plan->port && plan->port != port)
        return ep_fail(EP_E_ARG, "ep_boot_tcp_new: MASTER_ADDR \"%.64s\" and MASTER_PORT %d name different ports", host,
                       port);
    plan->port = (uint16_t)(port + next);
    return EP_OK;
}

static ep_status find_address(const ep_boot_tcp_args *args, struct plan *plan)
{
    const char *address = args->address ? args->address : read_env("EPKIT_ADDRESS");
    ep_status status;
    int port = 0;

    if (!address)
        return find_master(plan);
    plan->host_from = args->address ? "the address in ep_boot_tcp_args" : "EPKIT_ADDRESS";
    status = tcp_parse_endpoint(address, plan->host, sizeof(plan->host), &plan->port);
    if (status != EP_OK)
        return ep_fail_prefix(status, "ep_boot_tcp_new: %s: ", plan->host_from);
    if (plan->port || plan->nranks == 1)
        return EP_OK;
    EP_TRY(read_number("MASTER_PORT", 1, UINT16_MAX, "the address of rank 0 names no port", &port));
    plan->port = (uint16_t)port;
    return EP_OK;
}

/* It may differ between hosts, which find_ranks_per_node() sees. Beside nranks of the caller it may be of another job.
 */
static ep_status find_local_size(const ep_boot_tcp_args *args, struct plan *plan)
{
    int size = 0;
    ep_status status;

    if (plan->ranks_per_node || !read_env("LOCAL_WORLD_SIZE"))
        return EP_OK;
    status = read_number("LOCAL_WORLD_SIZE", 1, plan->nranks, "the ranks of this host", &size);
    if (status == EP_OK)
        plan->local_size = size;
    return args->nranks ? EP_OK : status;
}

/* Ranks that the caller numbers need not be all those of torchrun's job. */
static const char *find_job(bool numbered_by_caller)
{
    const char *job = read_env("EPKIT_JOB_ID");

    if (!job && !numbered_by_caller)
        job = read_env("TORCHELASTIC_RUN_ID");
    return job ? job : "";
}

static ep_status make_plan(const ep_boot_tcp_args *args, struct plan *plan)
{
    *plan = (struct plan){.timeout_ms = args->timeout_ms, .ranks_per_node = args->ranks_per_node};
    EP_TRY(find_place(args, plan));
    EP_TRY(find_address(args, plan));
    if (args->timeout_ms < 0)
        return ep_fail(EP_E_ARG, "ep_boot_tcp_new: timeout_ms is %d", args->timeout_ms);
    if (!plan->timeout_ms && read_env("EPKIT_TIMEOUT_MS"))
        EP_TRY(read_number("EPKIT_TIMEOUT_MS", 1, INT_MAX, "milliseconds", &plan->timeout_ms));
    if (!plan->timeout_ms)
        plan->timeout_ms = DEFAULT_TIMEOUT_MS;
    if (plan->ranks_per_node < 0 || (plan->ranks_per_node && plan->nranks % plan->ranks_per_node))
        return ep_fail(EP_E_ARG, "ep_boot_tcp_new: ranks_per_node %d does not divide the %d ranks",
                       plan->ranks_per_node, plan->nranks);
    EP_TRY(find_local_size(args, plan));
    plan->secret = args->secret ? args->secret : read_env("EPKIT_SECRET");
    if (!plan->secret)
        plan->secret = "";
    plan->job = find_job(args->nranks != 0);
    plan->interface = args->interface ? args->interface : read_env("EPKIT_TCP_INTERFACE");
    return EP_OK;
}

/* --- which ranks share a host --- */

struct node_facts {
    struct ep_locality locality;
    int32_t asked;      /* ranks per node, by the arguments; 0: nothing was said */
    int32_t local_size; /* LOCAL_WORLD_SIZE; 0: not set. It may differ between hosts */
};

/* As asked for, or as all launchers say alike, or as found from the hosts; 0 where these make no equal nodes. */
static ep_status find_ranks_per_node(const struct node_facts *all, int nranks, int *ret_n)
{
    int n = all[0].local_size;

    for (int rank = 0; rank < nranks; rank++) {
        if (all[rank].asked != all[0].asked)
            return ep_fail(EP_E_MISMATCH,
                           "ep_boot_tcp_new: ranks disagree: ranks_per_node is %d on rank 0 and %d on rank %d",
                           all[0].asked, all[rank].asked, rank);
        if (all[rank].local_size != n)
            n = 0;
    }
    if (all[0].asked)
        n = all[0].asked;
    else if (!n || nranks % n)
        n = ep_locality_find_nodes(&all[0].locality, sizeof(all[0]), nranks, NULL);
    *ret_n = n;
    return EP_OK;
}

static ep_status find_nodes(ep_boot_tcp *boot, const struct plan *plan)
{
    struct node_facts mine, *all = calloc((size_t)plan->nranks, sizeof(*all));
    ep_status status;

    if (!all)
        return ep_fail(EP_E_MEMORY, "ep_boot_tcp_new: no memory for %d ranks", plan->nranks);
    memset(&mine, 0, sizeof(mine));
    ep_locality_get_self(&mine.locality);
    mine.asked = plan->ranks_per_node;
    mine.local_size = plan->local_size;
    status = tcp_star_allgather(boot->star, &mine, sizeof(mine), plan->timeout_ms, all);
    if (status == EP_OK)
        status = find_ranks_per_node(all, plan->nranks, &boot->boot.ranks_per_node);
    free(all);
    return status;
}

/* --- the boot --- */

static ep_status allgather(void *context, const void *mine, size_t bytes, int timeout_ms, void *ret_all)
{
    ep_boot_tcp *boot = context;

    if (boot->generation != ep_process_generation())
        return ep_fail(EP_E_STATE, "boot tcp: this process is a forked child of the one that made the boot");
    return tcp_star_allgather(boot->star, mine, bytes, timeout_ms, ret_all);
}

/* Of the secret and the job, so that a rank of another job is a stranger. */
static void make_key(const struct plan *plan, struct tcp_key *ret_key)
{
    tcp_key_make(plan->secret, "bootstrap", plan->job, strlen(plan->job), ret_key);
}

/* The rank that was given, where that is a number and none of this job; -1: any other. */
static bool find_bad_rank(const ep_boot_tcp_args *args, int *ret_nranks, int *ret_rank)
{
    const char *text = read_env("RANK");
    char *end;
    long rank = args->rank;

    *ret_nranks = args->nranks;
    if (!args->nranks) {
        if (!text || read_number("WORLD_SIZE", 1, EP_MAX_RANKS, "", ret_nranks) != EP_OK)
            return false;
        rank = strtol(text, &end, 10);
        if (*end || end == text)
            rank = -1;
    }
    *ret_rank = rank < -1 || rank > INT_MAX ? -1 : (int)rank;
    return rank < 0 || rank >= *ret_nranks;
}

/*
 * After a failure, whose text stays: a number that no rank can have is seen here alone, and the others would wait for
 * the rank that is missing then.
 */
static void report_bad_rank(const ep_boot_tcp_args *args)
{
    char text[EP_ERROR_TEXT_BYTES];
    ep_boot_tcp_args good = *args;
    struct tcp_star_args star = {.name = "boot tcp"};
    struct plan plan;

    snprintf(text, sizeof(text), "%s", ep_last_error());
    if (find_bad_rank(args, &star.nranks, &star.rank) && star.nranks > 1) {
        good.rank = 0;
        good.nranks = star.nranks;
        if (make_plan(&good, &plan) == EP_OK) {
            if (!args->nranks)
                plan.job = find_job(false);
            star.host = plan.host;
            star.host_from = plan.host_from;
            star.port = plan.port;
            star.timeout_ms = plan.timeout_ms;
            make_key(&plan, &star.key);
            tcp_star_report(&star);
        }
    }
    ep_fail(EP_E_ARG, "%s", text);
}

static ep_status open_star(ep_boot_tcp *boot, const struct plan *plan)
{
    struct tcp_star_args args = {.name = "boot tcp",
                                 .rank = plan->rank,
                                 .nranks = plan->nranks,
                                 .host = plan->host,
                                 .host_from = plan->host_from,
                                 .port = plan->port,
                                 .timeout_ms = plan->timeout_ms};
    struct tcp_address local[TCP_ADDRESSES];
    int n = 0;

    make_key(plan, &args.key);
    if (plan->interface) {
        if (strlen(plan->interface) >= sizeof(boot->network.interface))
            return ep_fail(EP_E_ARG, "ep_boot_tcp_new: the interfaces \"%.64s...\" are more than %zu characters",
                           plan->interface, sizeof(boot->network.interface) - 1);
        EP_TRY(tcp_find_interfaces(plan->interface, local, &n));
        /* Rank 0 listens everywhere: the others may know it by another name. */
        args.from = plan->rank ? &local[0] : NULL;
        snprintf(boot->network.interface, sizeof(boot->network.interface), "%s", plan->interface);
    }
    return tcp_star_open(&args, &boot->star);
}

ep_status ep_boot_tcp_new(const ep_boot_tcp_args *args, ep_boot_tcp **ret_boot)
{
    ep_boot_tcp_args mine;
    struct plan plan;
    ep_boot_tcp *boot;
    ep_status status;

    if (!ret_boot)
        return ep_fail(EP_E_ARG, "ep_boot_tcp_new: ret_boot is NULL");
    EP_TRY(ep_args_load(&mine, sizeof(mine), EP_ARGS_FIRST_BYTES(ep_boot_tcp_args), args, "ep_boot_tcp_new: args"));
    status = make_plan(&mine, &plan);
    if (status != EP_OK) {
        report_bad_rank(&mine);
        return status;
    }
    boot = calloc(1, sizeof(*boot));
    if (!boot)
        return ep_fail(EP_E_MEMORY, "ep_boot_tcp_new: no memory");
    boot->generation = ep_process_generation();
    boot->boot = (ep_boot){.size = sizeof(boot->boot),
                           .rank = plan.rank,
                           .nranks = plan.nranks,
                           .allgather = allgather,
                           .context = boot,
                           .network = &boot->provider};
    boot->provider = ep_net_tcp;
    boot->provider.context = &boot->network;
    tcp_key_make(plan.secret, "network", NULL, 0, &boot->network.key);
    status = open_star(boot, &plan);
    if (status == EP_OK) {
        boot->network.local = tcp_star_local_address(boot->star);
        boot->network.check = tcp_star_check;
        boot->network.check_context = boot->star;
        status = find_nodes(boot, &plan);
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
    return &boot->boot;
}

uint64_t ep_boot_tcp_get_dropped(const ep_boot_tcp *boot)
{
    return tcp_star_dropped(boot->star, NULL);
}

void ep_boot_tcp_free(ep_boot_tcp *boot)
{
    if (!boot || boot->generation != ep_process_generation())
        return;
    tcp_star_free(boot->star);
    memset(&boot->network, 0, sizeof(boot->network));
    free(boot);
}
