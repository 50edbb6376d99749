/* SPDX-License-Identifier: Apache-2.0 */
/* property_host - random cases against the reference. See property.h. */
#include "property.h"
#include "tests/local_ranks.h"

#include <getopt.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const char *const mode_names[] = {"", "fork", "threads", "both"};

static void describe(const struct shape *shape)
{
    const ep_net_emulation *net = &shape->emulation;

    printf("seed %llu: %d ranks (%s) on %d nodes, topk %d of %d experts, timeout %d ms\n",
           (unsigned long long)shape->seed, shape->nranks, shape->threads ? "threads" : "fork", shape->nnodes,
           shape->topk, shape->n_experts, shape->config.timeout_ms);
    if (shape->nnodes > 1)
        printf("  network: %d channels, partial sums %s, delay %u us, rings %u, pieces %u, reorder %u, stall %u ms of "
               "rank %u\n",
               shape->config.channels, ep_dtype_name((ep_dtype)shape->config.partial_type), net->delay_us,
               net->ring_bytes, net->split_bytes, net->reorder, net->stall_ms, net->stall_rank);
    for (int i = 0; i < shape->n_ops; i++) {
        const struct op *op = &shape->ops[i];
        const struct plan_shape *plan = &shape->plans[op->plan];

        printf("  %2d %-11s plan %d", i, op_name(op->kind), op->plan);
        if (op->kind == OP_PLAN)
            printf(": %s, flags %u, alignment %d%s%s", ep_dtype_name((ep_dtype)plan->idx_type), plan->flags,
                   plan->alignment, plan->fixed_capacity ? ", worst case" : "", plan->mask ? ", mask" : "");
        if (op->kind == OP_PLAN || op->kind == OP_UPDATE) {
            printf(", routing %d, tokens", plan->versions[op->version].style);
            for (int rank = 0; rank < shape->nranks; rank++)
                printf(" %d", plan->versions[op->version].n_tokens[rank]);
        }
        if (op->kind == OP_DISPATCH || op->kind == OP_COMBINE)
            printf(": hidden %d, %s, scales %s%s%s%s, %d bias", op->hidden, ep_dtype_name((ep_dtype)op->dtype),
                   op->scale_type ? ep_dtype_name((ep_dtype)op->scale_type) : "none", op->index ? ", index" : "",
                   op->weights ? ", weights" : "", op->echo ? ", of the rows received" : "", op->n_bias);
        putchar('\n');
    }
    fflush(stdout);
}

static bool run_case(uint64_t seed, unsigned modes, bool verbose)
{
    static struct shape shape;
    ep_launch_args args = EP_LAUNCH_ARGS_INIT;
    ep_rank_exit exits[MAX_RANKS];
    ep_status status;
    bool passed_all;

    shape_draw(seed, modes, &shape);
    if (verbose)
        describe(&shape);
    args.mode = shape.threads ? EP_LAUNCH_THREADS : EP_LAUNCH_FORK;
    args.nranks = shape.nranks;
    args.run = run_rank;
    args.argument = &shape;
    args.timeout_ms = shape.threads ? 0 : 120000;
    status = ep_launch(&args, exits);
    passed_all = status == EP_OK;
    for (int rank = 0; passed_all && rank < shape.nranks; rank++)
        passed_all = exits[rank].code == 0;
    if (passed_all)
        return true;
    if (status != EP_OK)
        fprintf(stderr, "seed %llu: %s\n", (unsigned long long)seed, ep_last_error());
    printf("FAIL  again: property_host --seed %llu --cases 1 --mode %s --verbose\n", (unsigned long long)seed,
           mode_names[modes]);
    fflush(stdout);
    return false;
}

static int usage(void)
{
    fputs(
        "Usage: property_host [--seed N] [--cases N] [--seconds N] [--least N] [--mode fork|threads|both] [--verbose]\n"
        "Runs the cases of seed N, N + 1, ... until so many are done or so many seconds have passed, but at least\n"
        "--least of them.\n",
        stderr);
    return 2;
}

static unsigned find_mode(const char *name)
{
    for (unsigned mode = 1; mode <= 3; mode++)
        if (strcmp(name, mode_names[mode]) == 0)
            return mode;
    return 0;
}

int main(int argc, char **argv)
{
    static const struct option options[] = {{"seed", required_argument, NULL, 's'},
                                            {"cases", required_argument, NULL, 'c'},
                                            {"seconds", required_argument, NULL, 't'},
                                            {"least", required_argument, NULL, 'l'},
                                            {"mode", required_argument, NULL, 'm'},
                                            {"verbose", no_argument, NULL, 'v'},
                                            {NULL, 0, NULL, 0}};
    uint64_t seed = (uint64_t)(getenv("EPKIT_TEST_LONG") ? time(NULL) : 7001) * 100000;
    long cases = 0, seconds = 0, least = 1, n_passed = 0, n_failed = 0;
    unsigned modes = 3;
    bool verbose = false;
    time_t begin = time(NULL);
    int option;

    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        switch (option) {
        case 's':
            seed = strtoull(optarg, NULL, 0);
            break;
        case 'c':
            cases = atol(optarg);
            break;
        case 't':
            seconds = atol(optarg);
            break;
        case 'l':
            least = atol(optarg);
            break;
        case 'm':
            modes = find_mode(optarg);
            break;
        case 'v':
            verbose = true;
            break;
        default:
            return usage();
        }
    }
    if (optind < argc || !modes)
        return usage();
    if (!cases)
        cases = seconds ? LONG_MAX : 400;
    printf("cases from --seed %llu\n", (unsigned long long)seed);
    fflush(stdout);
    for (long i = 0; i < cases && (i < least || !seconds || time(NULL) - begin < seconds); i++)
        ++*(run_case(seed + (uint64_t)i, modes, verbose) ? &n_passed : &n_failed);
    printf("%ld passed, %ld failed\n", n_passed, n_failed);
    return n_failed > 0 || n_passed < least;
}
