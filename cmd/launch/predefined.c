/* SPDX-License-Identifier: Apache-2.0 */
/* predefined.c - the named jobs of `epkit launch`: the tests of DeepEP, NCCL, perftest and epkit itself. */
#include "agent.h"
#include "base/error.h"
#include "cmd_launch.h"
#include "common/embedded.h"
#include "common/memory.h"
#include "common/text.h"
#include "launch_job.h"
#include "machine/hardware/map.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* --- epkit __job --- */

extern const struct embedded job_scripts[]; /* jobs.sh */

/* The ports of this machine that carry data; an exit code. */
static int find_ports(char *ret_list, size_t bytes)
{
    struct source *source = NULL;
    const struct topo *topo;
    int code = CMD_FAILED;

    if (source_open(NULL, &source) != EP_OK) {
        fprintf(stderr, "epkit: %s\n", ep_last_error());
    } else {
        topo = topo_read(source);
        snprintf(ret_list, bytes, "%s", map_nccl(topo));
        code = *ret_list ? CMD_FINE : CMD_UNSUPPORTED;
        if (code != CMD_FINE)
            fputs(topo->n_nics == 0 ? "epkit: there is no RDMA device: 'epkit doctor' says why\n"
                                    : "epkit: no RDMA device carries data here ('epkit topo' says why): name those to "
                                      "measure\n",
                  stderr);
    }
    source_free(source);
    return code;
}

int job_main(int argc, char **argv)
{
    const char **words = memory_new((size_t)argc + 4, sizeof(*words));
    char list[4096] = "";
    int code = CMD_FINE;

    if (argc < 3) {
        fputs("epkit: " JOB_COMMAND " is internal: 'epkit launch' uses it on a node\n", stderr);
        free(words);
        return CMD_USAGE;
    }
    memcpy(words, TEXTS("sh", "-c", job_scripts[0].text, "epkit"), 4 * sizeof(*words));
    memcpy(words + 4, argv + 1, (size_t)(argc - 1) * sizeof(*words));
    if (strcmp(argv[1], "ring") == 0 && !*argv[2]) {
        code = find_ports(list, sizeof(list));
        words[5] = list;
    }
    if (code == CMD_FINE) {
        execvp(words[0], (char *const *)words);
        fprintf(stderr, "epkit: %s: %s\n", words[0], strerror(errno));
        code = 126;
    }
    free(words);
    return code;
}

/* --- the jobs --- */

#define HOUR_S 3600

/* Scripts that set the environment up where they are installed. */
#define DEEPEP_SCRIPT "?/opt/deepep/unified-env.sh"
#define GIB_SCRIPT "?/usr/local/gib/scripts/set_nccl_env.sh"

static json_t *words(const char *const *list, int n_args, char **args)
{
    json_t *argv = json_array();

    for (; *list; list++)
        json_array_append_new(argv, json_string(*list));
    for (int i = 0; i < n_args; i++)
        json_array_append_new(argv, json_string(args[i]));
    return argv;
}

static json_t *make_hostname(const struct canned_job *job, int n_args, char **args)
{
    (void)job;
    /* hostname(1) sets the name that it is given: an argument would rename every node. */
    for (int i = 0; i < n_args; i++)
        if (!text_is_any(args[i], TEXTS("-a", "-A", "-d", "-f", "-i", "-I", "-s", "--fqdn", "--long", "--short",
                                        "--alias", "--domain", "--all-fqdns", "--ip-address", "--all-ip-addresses"))) {
            ep_fail(EP_E_ARG,
                    "hostname: '%.40s': only options that print a name, like -f, are allowed; --hosts gives the nodes",
                    args[i]);
            return NULL;
        }
    return json_pack("{s:o}", "argv", words(TEXTS("hostname"), n_args, args));
}

/* The program is the epkit executable of the node. */
static json_t *make_epkit_test(const struct canned_job *job, int n_args, char **args)
{
    (void)job;
    return json_pack("{s:o, s:b}", "argv", words(TEXTS("epkit", "test"), n_args, args), "is_epkit", true);
}

/*
 * The tests of DeepEP, which use whatever deep_ep Python imports, also that of epkit. Checkouts of DeepEP 2 have those
 * of DeepEP 1 in tests/legacy. The arguments are those of the testbed's published results: 2048 tokens, or the default
 * of the test for decoding.
 */
static const struct deepep_test {
    const char *job, *tokens, *files, *product;
} deepep_tests[] = {
    {"deepep-intranode", "2048", "tests/test_intranode.py tests/legacy/test_intranode.py", "DeepEP (its tests)"},
    {"deepep-internode", "2048", "tests/test_internode.py tests/legacy/test_internode.py", "DeepEP (its tests)"},
    {"deepep-lowlatency", "128", "tests/test_low_latency.py tests/legacy/test_low_latency.py", "DeepEP (its tests)"},
    {"deepep-v2", "4096", "tests/elastic/test_ep.py tests/ep/test_ep.py", "DeepEP 2 (its tests)"},
};

static json_t *make_deepep(const struct canned_job *job, int n_args, char **args)
{
    const struct deepep_test *test = deepep_tests;

    while (strcmp(test->job, job->name) != 0)
        test++;
    return json_pack("{s:o, s:b, s:[sss]}", "argv",
                     words(TEXTS("epkit", JOB_COMMAND, "start", test->product, "",
                                 "/opt/deepep/DeepEP /opt/deepep/source /opt/DeepEP /usr/local/nvidia/deepep",
                                 test->files, "python3", "--num-tokens", test->tokens, "--hidden", "7168",
                                 "--num-experts", "256", "--num-topk", "8"),
                           n_args, args),
                     "is_job", true, "source", DEEPEP_SCRIPT, GIB_SCRIPT, JOB_ENV);
}

/*
 * nccl all_reduce or all_reduce_perf ...: the program all_reduce_perf. The first arguments are those of the testbed;
 * later ones win.
 */
static json_t *make_nccl(const struct canned_job *job, int n_args, char **args)
{
    static const char suffix[] = "_perf";
    char program[80];
    size_t n;

    (void)job;
    if (strspn(args[0], "abcdefghijklmnopqrstuvwxyz_") != strlen(args[0]) || strlen(args[0]) > 40) {
        ep_fail(EP_E_ARG, "nccl: '%.40s' is not a test of nccl-tests: all_reduce, all_gather, alltoall, sendrecv, ...",
                args[0]);
        return NULL;
    }
    n = strlen(args[0]);
    if (n > strlen(suffix) && strcmp(args[0] + n - strlen(suffix), suffix) == 0)
        n -= strlen(suffix);
    snprintf(program, sizeof(program), "%.*s%s", (int)n, args[0], suffix);
    return json_pack("{s:o, s:b, s:[s]}", "argv",
                     words(TEXTS("epkit", JOB_COMMAND, "start", "nccl-tests", "MPI=1 MPI_HOME=...",
                                 "/third_party/nccl-tests/build /opt/nccl-tests/build /usr/local/bin /usr/bin", program,
                                 "", "-b", "2M", "-e", "16G", "-f", "2", "-n", "1", "-g", "1", "-w", "10"),
                           n_args - 1, args + 1),
                     "is_job", true, "source", GIB_SCRIPT);
}

/* A group of one process on each node: tests whether NCCL finds its network plugin. */
static json_t *make_nccl_init(const struct canned_job *job, int n_args, char **args)
{
    static const char program[] = "import os\n"
                                  "os.environ.update(MASTER_ADDR='localhost', MASTER_PORT='29500')\n"
                                  "os.environ.pop('TORCH_NCCL_USE_COMM_NONBLOCKING', None)\n"
                                  "try:\n"
                                  "    import torch, torch.distributed as dist\n"
                                  "except ImportError as error:\n"
                                  "    print('epkit: no PyTorch here (see epkit install list):', error)\n"
                                  "    raise SystemExit(4)\n"
                                  "torch.cuda.set_device(0)\n"
                                  "dist.init_process_group(backend='nccl', rank=0, world_size=1)\n"
                                  "dist.all_reduce(torch.ones(1, device='cuda'))\n"
                                  "torch.cuda.synchronize()\n"
                                  "print('NCCL initialized successfully', torch.cuda.nccl.version())\n"
                                  "dist.destroy_process_group()\n";

    (void)job;
    return json_pack("{s:o, s:[ss]}", "argv", words(TEXTS("python3", "-c", program), n_args, args), "source",
                     DEEPEP_SCRIPT, GIB_SCRIPT);
}

/* "mlx5_0", "mlx5_0:2" */
static bool is_device(const char *word)
{
    size_t n = strspn(word, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.");
    const char *port = word + n + 1;

    if (n == 0 || n > 63 || *word == '-')
        return false;
    return !word[n] || (word[n] == ':' && *port && strlen(port) <= 3 && strspn(port, "0123456789") == strlen(port));
}

/* The names of the nodes follow the devices to measure. */
static json_t *make_ib_write_bw(const struct canned_job *job, int n_args, char **args)
{
    char list[1024] = "";

    (void)job;
    for (int i = 0; i < n_args; i++) {
        if (!is_device(args[i])) {
            ep_fail(EP_E_ARG, "ib-write-bw: '%.40s' is not a device like mlx5_0 or mlx5_0:1", args[i]);
            return NULL;
        }
        if (strlen(list) + strlen(args[i]) + 4 > sizeof(list)) {
            ep_fail(EP_E_ARG, "ib-write-bw: more than %zu characters of devices", sizeof(list) - 1);
            return NULL;
        }
        text_append(list, sizeof(list), "%s%s%s", i ? "," : "", args[i], strchr(args[i], ':') ? "" : ":1");
    }
    return json_pack("{s:[ssss], s:b}", "argv", "epkit", JOB_COMMAND, "ring", list, "is_job", true);
}

const struct canned_job canned_jobs[] = {
    {"hostname", .per_node = 1, .deadline_s = 300, .make = make_hostname},
    {"epkit-test", "MATRIX", .by_rank = true, .is_measured = true, .deadline_s = HOUR_S, .make = make_epkit_test},
    {"deepep-intranode", .per_node = 1, .is_measured = true, .deadline_s = HOUR_S, .make = make_deepep},
    {"deepep-internode", .per_node = 1, .is_internode = true, .is_measured = true, .deadline_s = HOUR_S,
     .make = make_deepep},
    {"deepep-lowlatency", .per_node = 1, .is_measured = true, .deadline_s = HOUR_S, .make = make_deepep},
    {"deepep-v2", .per_node = 1, .is_measured = true, .deadline_s = HOUR_S, .make = make_deepep},
    {"nccl", "TEST", .starter = LAUNCH_MPIRUN, .by_rank = true, .is_measured = true, .deadline_s = HOUR_S,
     .make = make_nccl},
    {"nccl-init", .per_node = 1, .deadline_s = 600, .make = make_nccl_init},
    {"ib-write-bw", .per_node = 1, .takes_names = true, .is_internode = true, .is_measured = true, .deadline_s = HOUR_S,
     .make = make_ib_write_bw},
    {.name = NULL},
};

const struct canned_job *canned_job_find(const char *name)
{
    for (const struct canned_job *job = canned_jobs; job->name; job++)
        if (strcmp(job->name, name) == 0)
            return job;
    return NULL;
}
