/* SPDX-License-Identifier: Apache-2.0 */
/* predefined.c - the named jobs of `epkit launch`: the tests of DeepEP, NCCL, perftest and epkit itself. */
#include "predefined.h"

#include "base/error.h"
#include "rails.h"

#include <stdio.h>
#include <string.h>

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
    static const char *const argv[] = {"hostname", NULL};
    static const char *const known[] = {"-a",      "-A",       "-d",          "-f",           "-i",
                                        "-I",      "-s",       "--fqdn",      "--long",       "--short",
                                        "--alias", "--domain", "--all-fqdns", "--ip-address", "--all-ip-addresses",
                                        NULL};

    (void)job;
    /* hostname(1) sets the name that it is given: an argument would rename every node. */
    for (int i = 0; i < n_args; i++) {
        const char *const *option = known;

        while (*option && strcmp(*option, args[i]) != 0)
            option++;
        if (!*option) {
            ep_fail(EP_E_ARG,
                    "hostname: '%.40s': only options that print a name, like -f, are allowed; --hosts gives the nodes",
                    args[i]);
            return NULL;
        }
    }
    return json_pack("{s:o}", "argv", words(argv, n_args, args));
}

/* The program is the epkit executable of the node. */
static json_t *make_epkit_test(const struct canned_job *job, int n_args, char **args)
{
    static const char *const argv[] = {"epkit", "test", NULL};

    (void)job;
    return json_pack("{s:o, s:b}", "argv", words(argv, n_args, args), "is_epkit", true);
}

/* The arguments of the testbed's published results: 2048 tokens, or the default of the test for decoding. */
static json_t *make_deepep(const struct canned_job *job, int n_args, char **args)
{
    bool is_low = strcmp(job->name, "deepep-lowlatency") == 0;
    char file[64];
    const char *const argv[] = {"python3",
                                file,
                                "--num-tokens",
                                is_low ? "128" : "2048",
                                "--hidden",
                                "7168",
                                "--num-experts",
                                "256",
                                "--num-topk",
                                "8",
                                NULL};

    snprintf(file, sizeof(file), "tests/test_%s.py", is_low ? "low_latency" : job->name + strlen("deepep-"));
    return json_pack("{s:o, s:[ssss], s:s, s:s, s:[ss]}", "argv", words(argv, n_args, args), "dirs",
                     "/opt/deepep/DeepEP", "/opt/deepep/source", "/opt/DeepEP", "/usr/local/nvidia/deepep", "needs",
                     file, "product", "DeepEP 1 (its tests)", "source", DEEPEP_SCRIPT, GIB_SCRIPT);
}

/*
 * nccl all_reduce or all_reduce_perf ...: the program all_reduce_perf. The first arguments are those of the testbed;
 * later ones win.
 */
static json_t *make_nccl(const struct canned_job *job, int n_args, char **args)
{
    static const char suffix[] = "_perf";
    char program[80], path[90];
    size_t n;
    const char *const argv[] = {path, "-b", "2M", "-e", "16G", "-f", "2", "-n", "1", "-g", "1", "-w", "10", NULL};

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
    snprintf(path, sizeof(path), "./%s", program);
    return json_pack("{s:o, s:[ssss], s:s, s:s, s:[s]}", "argv", words(argv, n_args - 1, args + 1), "dirs",
                     "/third_party/nccl-tests/build", "/opt/nccl-tests/build", "/usr/local/bin", "/usr/bin", "needs",
                     program, "product", "nccl-tests", "source", GIB_SCRIPT);
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
                                  "    print('epkit: PyTorch is not installed:', error)\n"
                                  "    raise SystemExit(4)\n"
                                  "torch.cuda.set_device(0)\n"
                                  "dist.init_process_group(backend='nccl', rank=0, world_size=1)\n"
                                  "dist.all_reduce(torch.ones(1, device='cuda'))\n"
                                  "torch.cuda.synchronize()\n"
                                  "print('NCCL initialized successfully', torch.cuda.nccl.version())\n"
                                  "dist.destroy_process_group()\n";
    static const char *const argv[] = {"python3", "-c", program, NULL};

    (void)job;
    return json_pack("{s:o, s:[ss]}", "argv", words(argv, n_args, args), "source", DEEPEP_SCRIPT, GIB_SCRIPT);
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

/* The devices to measure, as RAILS_COMMAND takes them; argv_of_ib_write_bw() adds the program of each node. */
static json_t *make_ib_write_bw(const struct canned_job *job, int n_args, char **args)
{
    char list[1024] = "";
    size_t used = 0;

    (void)job;
    for (int i = 0; i < n_args; i++) {
        if (!is_device(args[i])) {
            ep_fail(EP_E_ARG, "ib-write-bw: '%.40s' is not a device like mlx5_0 or mlx5_0:1", args[i]);
            return NULL;
        }
        used += (size_t)snprintf(list + used, sizeof(list) - used, "%s%s%s", i ? " " : "", args[i],
                                 strchr(args[i], ':') ? "" : ":1");
        if (used >= sizeof(list)) {
            ep_fail(EP_E_ARG, "ib-write-bw: more than %zu characters of devices", sizeof(list) - 1);
            return NULL;
        }
    }
    return json_pack("{s:[sss], s:b}", "argv", "epkit", RAILS_COMMAND, list, "is_epkit", true);
}

/*
 * For each port: the server waits for its client; the client retries until the server is there. RoCE v2 needs the index
 * of a GID; a port of InfiniBand is addressed by its LID, and its GIDs beyond the first are empty.
 */
#define EACH_RAIL                                                                                                      \
    "command -v ib_write_bw >/dev/null || { echo 'epkit: ib_write_bw (perftest) is not installed' >&2; exit 4; };"     \
    " port=18515; for rail in $" RAILS_VARIABLE "; do port=$((port + 1));"                                             \
    " device=${rail%:*}; set_up=\"-d $device -i ${rail##*:} -F -p $port\";"                                            \
    " [ \"$(cat \"/sys/class/infiniband/$device/ports/${rail##*:}/link_layer\" 2>/dev/null)\" = InfiniBand ] ||"       \
    " set_up=\"$set_up -x 3\";"

static const char server_program[] = EACH_RAIL " timeout 120 ib_write_bw $set_up || exit 1; done";
static const char client_program[] =
    EACH_RAIL " tries=0; echo \"device $device to $1\";"
              " until timeout 120 ib_write_bw $set_up \"$1\"; do"
              " tries=$((tries + 1)); [ $tries -lt 20 ] || exit 1; sleep 0.5; done; done";

/* `peer` NULL: the program of the server. */
static json_t *argv_with(const json_t *argv, const char *peer)
{
    json_t *whole = json_copy((json_t *)argv);
    const char *const program[] = {"sh", "-c", peer ? client_program : server_program, "sh", peer, NULL};

    for (const char *const *word = program; *word; word++)
        json_array_append_new(whole, json_string(*word));
    return whole;
}

/*
 * A ring in two rounds: 0-1, 2-3, ...; then 1-2, 3-4, ..., and the last with the first. So each node is measured
 * against both of its neighbours in the order by location, and a bad node is bad in both rounds.
 */
static json_t *argv_of_ib_write_bw(const json_t *argv, int phase, int rank, int n_nodes, const char *const *names,
                                   bool *ret_is_last)
{
    int place = rank - phase, peer;

    *ret_is_last = phase == 1 || n_nodes <= 2;
    if (phase == 1 && rank == 0) {
        /* The peer of the last node, if its own role is that of a server. */
        return n_nodes % 2 == 0 ? argv_with(argv, names[n_nodes - 1]) : NULL;
    }
    peer = place % 2 == 0 ? rank + 1 : rank - 1;
    if (phase == 1 && peer == n_nodes && n_nodes % 2 == 0)
        peer = 0;
    if (peer >= n_nodes)
        return NULL;
    return argv_with(argv, place % 2 == 0 ? NULL : names[peer]);
}

const struct canned_job canned_jobs[] = {
    {"hostname", "", "prints the name of each node: do all of them answer?", .per_node = 1, .has_checks = true,
     .deadline_s = 300, .make = make_hostname},
    {"epkit-test", "MATRIX", "'epkit test MATRIX' of epkit itself, internode over TCP", .needs_args = true,
     .starter = LAUNCH_SSH, .by_rank = true, .has_checks = true, .is_measured = true, .deadline_s = HOUR_S,
     .make = make_epkit_test},
    {"deepep-intranode", "", "DeepEP's test_intranode.py on each node by itself", .per_node = 1, .has_checks = true,
     .is_measured = true, .deadline_s = HOUR_S, .make = make_deepep},
    {"deepep-internode", "", "DeepEP's test_internode.py, one process a node", .per_node = 1, .has_checks = true,
     .is_measured = true, .deadline_s = HOUR_S, .make = make_deepep},
    {"deepep-lowlatency", "", "DeepEP's test_low_latency.py, one process a node", .per_node = 1, .has_checks = true,
     .is_measured = true, .deadline_s = HOUR_S, .make = make_deepep},
    {"nccl", "TEST", "TEST_perf of nccl-tests (all_reduce, alltoall, ...), a rank for each GPU", .needs_args = true,
     .starter = LAUNCH_MPIRUN, .is_mpi = true, .by_rank = true, .has_checks = true, .is_measured = true,
     .deadline_s = HOUR_S, .make = make_nccl},
    {"nccl-init", "", "a group of one process on each node: does NCCL start?", .per_node = 1, .has_checks = true,
     .deadline_s = 600, .make = make_nccl_init},
    {"ib-write-bw", "[DEVICE...]", "ib_write_bw between neighbours, each NIC of GPUs, or each DEVICE, in turn",
     .per_node = 1, .has_checks = true, .is_measured = true, .deadline_s = HOUR_S, .make = make_ib_write_bw,
     .argv_of = argv_of_ib_write_bw},
    {.name = NULL},
};

const struct canned_job *canned_job_find(const char *name)
{
    for (const struct canned_job *job = canned_jobs; job->name; job++)
        if (strcmp(job->name, name) == 0)
            return job;
    return NULL;
}
