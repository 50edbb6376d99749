/* SPDX-License-Identifier: Apache-2.0 */
/* sequence_host - random sequences of calls of the host backend, queued and one by one. See sequence.h. */
#include "sequence.h"
#include "tests/local_ranks.h"

#include <getopt.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

/* The deadline ends a hang: beside other work six ranks that poll take more than a minute for one operation. */
enum { STEPS = 120, SECONDS = 20, DEADLINE_MS = 300000 };
enum { FORK = 1, THREADS = 2 };

struct options {
    uint64_t seed;
    long cases, seconds, least;
    int ranks, steps;
    unsigned modes;
    bool verbose;
};

static void draw_network(struct random *random, struct sequence *sequence)
{
    ep_net_emulation *net = &sequence->emulation;

    sequence->tcp = random_below(random, 3) == 0;
    sequence->config.channels = (int)random_below(random, 17);
    sequence->config.partial_type = random_below(random, 3) ? 0 : EP_BF16;
    net->seed = random_next(random);
    net->delay_us = random_below(random, 2) ? random_below(random, 100) : 0;
    net->ring_bytes = random_below(random, 2) ? 0 : 256u << random_below(random, 8);
    net->split_bytes = random_below(random, 2) ? 0 : 8 + random_below(random, 500);
    net->reorder = random_below(random, 2);
}

static void draw_sequence(uint64_t seed, const struct options *options, struct sequence *ret_sequence)
{
    struct sequence sequence = {.seed = seed, .steps = options->steps, .nnodes = 1, .config = EP_COMM_CONFIG_INIT};
    struct random random = {.key = random_key(seed, 0, 0, 0)};

    sequence.threads = random_below(&random, 2) ? options->modes & THREADS : !(options->modes & FORK);
    sequence.nranks = 1 + (int)random_below(&random, MAX_RANKS);
    if (options->ranks)
        sequence.nranks = options->ranks;
    do
        sequence.nnodes = 1 + (int)random_below(&random, (uint32_t)sequence.nranks);
    while (sequence.nranks % sequence.nnodes);
    sequence.config.backend = "host";
    sequence.config.ranks_per_node = sequence.nranks / sequence.nnodes;
    sequence.config.timeout_ms = DEADLINE_MS;
    sequence.config.flags = random_below(&random, 2) ? EP_COMM_CHECK_VALUES : 0;
    sequence.config.flags |= random_below(&random, 2) ? EP_COMM_CHECK_DISTINCT : 0;
    if (sequence.nnodes > 1)
        draw_network(&random, &sequence);
    *ret_sequence = sequence;
}

static void describe(const struct sequence *sequence)
{
    const ep_net_emulation *net = &sequence->emulation;

    printf("seed %llu: %d ranks (%s) on %d nodes, flags %u", (unsigned long long)sequence->seed, sequence->nranks,
           sequence->threads ? "threads" : "processes", sequence->nnodes, sequence->config.flags);
    if (sequence->nnodes > 1)
        printf(", %s, %d channels, partial sums %s, delay %u us, rings %u, pieces %u, reorder %u",
               sequence->tcp ? "tcp" : "emulated", sequence->config.channels,
               ep_dtype_name((ep_dtype)sequence->config.partial_type), net->delay_us, net->ring_bytes, net->split_bytes,
               net->reorder);
    putchar('\n');
    fflush(stdout);
}

static bool run(uint64_t seed, const struct options *options)
{
    struct sequence sequence;
    ep_launch_args args = EP_LAUNCH_ARGS_INIT;
    ep_rank_exit exits[MAX_RANKS];
    ep_status status;
    bool ok = false;

    draw_sequence(seed, options, &sequence);
    if (options->verbose)
        describe(&sequence);
    sequence.publication = publication_new();
    sequence.regroup = mmap(NULL, sizeof(*sequence.regroup), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (!sequence.publication || sequence.regroup == MAP_FAILED ||
        ep_boot_shm_new(sequence.nranks, &sequence.base_boot) != EP_OK) {
        fprintf(stderr, "seed %llu: %s\n", (unsigned long long)seed, ep_last_error());
        goto free_publication;
    }
    args.mode = sequence.threads ? EP_LAUNCH_THREADS : EP_LAUNCH_FORK;
    args.nranks = sequence.nranks;
    args.run = run_sequence;
    args.argument = &sequence;
    status = ep_launch(&args, exits);
    ok = status == EP_OK;
    if (!ok)
        fprintf(stderr, "seed %llu: %s\n", (unsigned long long)seed, ep_last_error());
    for (int rank = 0; ok && rank < sequence.nranks; rank++)
        ok = exits[rank].code == 0;
    ep_boot_shm_free(sequence.base_boot);
free_publication:
    publication_free(sequence.publication);
    if (sequence.regroup != MAP_FAILED)
        munmap(sequence.regroup, sizeof(*sequence.regroup));
    if (!ok)
        printf("FAIL  again: sequence_host --seed %llu --cases 1 --steps %d%s%s --verbose\n", (unsigned long long)seed,
               options->steps, options->modes == FORK ? " --mode fork" : "",
               options->modes == THREADS ? " --mode threads" : "");
    fflush(stdout);
    return ok;
}

static int usage(void)
{
    fputs("Usage: sequence_host [--seed N] [--cases N] [--seconds N] [--least N] [--steps N] [--ranks N]\n"
          "                     [--mode fork|threads] [--verbose]\n"
          "Runs the sequences of seed N, N + 1, ... until so many are done or so many seconds have passed (20), but\n"
          "at least --least of them.\n",
          stderr);
    return 2;
}

static bool read_options(int argc, char **argv, struct options *options)
{
    static const struct option list[] = {{"seed", required_argument, NULL, 's'},
                                         {"cases", required_argument, NULL, 'c'},
                                         {"seconds", required_argument, NULL, 't'},
                                         {"least", required_argument, NULL, 'l'},
                                         {"steps", required_argument, NULL, 'n'},
                                         {"ranks", required_argument, NULL, 'r'},
                                         {"mode", required_argument, NULL, 'm'},
                                         {"verbose", no_argument, NULL, 'v'},
                                         {NULL, 0, NULL, 0}};
    int option;

    while ((option = getopt_long(argc, argv, "", list, NULL)) != -1) {
        if (option == 's')
            options->seed = strtoull(optarg, NULL, 0);
        else if (option == 'c')
            options->cases = atol(optarg);
        else if (option == 't')
            options->seconds = atol(optarg);
        else if (option == 'l')
            options->least = atol(optarg);
        else if (option == 'n')
            options->steps = atoi(optarg);
        else if (option == 'r')
            options->ranks = atoi(optarg);
        else if (option == 'm')
            options->modes = strcmp(optarg, "fork") == 0 ? FORK : strcmp(optarg, "threads") == 0 ? THREADS : 0;
        else if (option == 'v')
            options->verbose = true;
        else
            return false;
    }
    return optind == argc && options->modes && options->ranks >= 0 && options->ranks <= MAX_RANKS;
}

int main(int argc, char **argv)
{
    struct options options = {
        .seed = (uint64_t)time(NULL) * 100000, .seconds = SECONDS, .least = 1, .steps = STEPS, .modes = FORK | THREADS};
    long n_passed = 0, n_failed = 0;
    time_t begin = time(NULL);

    if (!read_options(argc, argv, &options))
        return usage();
    printf("sequences from --seed %llu\n", (unsigned long long)options.seed);
    fflush(stdout);
    for (long i = 0; (!options.cases || i < options.cases) &&
                     (i < options.least || options.cases || time(NULL) - begin < options.seconds);
         i++)
        ++*(run(options.seed + (uint64_t)i, &options) ? &n_passed : &n_failed);
    printf("%ld passed, %ld failed\n", n_passed, n_failed);
    return n_failed > 0 || n_passed < options.least;
}
