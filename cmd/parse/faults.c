/* SPDX-License-Identifier: Apache-2.0 */
/* faults.c - lines that name a fault, whatever program printed them. docs/failure-modes.md has the numbers. */
#include "common/text.h"
#include "parse_internal.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

#define TRACEBACK "Traceback (most recent call last)"

enum kind {
    FATAL,
    WARNING,
    STEP,   /* of a script around the tests, which may be repeated or clean up: fatal only if no test began */
    WORD,   /* fatal; of a shell or an interpreter: the line holds nothing else, except a host name in front */
    MODULE, /* fatal; by the interpreter itself */
};

/* The first row that matches counts. Open MPI 4 prints ORTE where Open MPI 5 prints PRTE. */
struct known {
    const char *text, *also; /* both must be in the line */
    const char *id, *cause;
    enum kind kind;
};

static const struct known known[] = {
    {"NVSHMEM_IBGDA_NIC_HANDLER=cpu", "GDR", "gdrcopy", "NVSHMEM wants GDRCopy because its NIC handler is the CPU",
     WARNING},
    {"requires GDRCopy", NULL, "gdrcopy", "the NIC handler is the CPU and there is no GDRCopy", FATAL},
    {"moe_recv_expert_counter", "-1", "nic-handler",
     "an internode dispatch hung with counters of -1: the NIC handler is the CPU, set or by silent fallback", FATAL},
    {"DeepEP timeout", NULL, "nic-handler", "a DeepEP kernel waited 100 s for a peer", FATAL},
    {"DeepEP error: timeout", NULL, "nic-handler", "a DeepEP kernel waited 100 s for a peer", FATAL},
    {"DeepEP error: CPU recv timeout", NULL, "nic-handler",
     "an internode dispatch got no counts: NIC handler cpu, or a lost peer", FATAL},
    {"neither nv_peer_mem, or nvidia_peermem detected", NULL, "peermem", "the NICs cannot reach GPU memory", FATAL},
    {"NVSHMEM device library version does not match", NULL, "two-nvshmem", "two versions of NVSHMEM in one process",
     FATAL},
    {"couldn't load driver 'libmlx5-rdmav", NULL, "provider-missing",
     "libibverbs and its provider come from different sets", WARNING},
    {"couldn't load driver", "rdmav", "provider-missing", "libibverbs and its provider come from different sets",
     WARNING},
    {"DeepEP ", " timeout, channel", "nic-handler", "a DeepEP kernel waited 100 s for a peer", FATAL},
    {"IBVERBS_PRIVATE_", "not found", "verbs-mixed", "a verbs provider was loaded into another set's libibverbs",
     FATAL},
    {"Failed to initialize any NET plugin", NULL, "net-plugin", "NCCL found no usable network plugin", FATAL},
    {"NCCL/NET (shim) mismatch", NULL, "gib-settings", "NCCL variables differ from what the gIB plugin expects",
     WARNING},
    {"en_accel/ipsec.c", "error", "doca-kernel", "DOCA-OFED is too old for this kernel", FATAL},
    {"no kernel image is available", NULL, "gpu-arch", "the extension holds no code for this GPU", FATAL},
    {"named symbol not found", NULL, "gpu-arch", "the extension holds no code for this GPU", FATAL},
    {"Failed to modify QP", NULL, "gid",
     "a queue pair did not come up: the GID index is wrong, or the peer is not reachable", FATAL},
    {"ibv_modify_qp", "failed", "gid",
     "a queue pair did not come up: the GID index is wrong, or the peer is not reachable", FATAL},
    {"ibv_modify_qp", "timed out", "gid", "a queue pair did not come up: the peer is not reachable", FATAL},
    {"Invalid NCCL versions", NULL, "two-nccl", "two versions of NCCL in one process", FATAL},
    {"Cannot allocate memory", "ibv_reg", "memlock", "memory could not be registered", FATAL},
    {"Call to ibv_reg", "Bad address", "peermem", "the NICs cannot reach GPU memory", FATAL},
    {"ystem not yet initialized", NULL, "fabric-manager", "CUDA waits for the fabric manager", FATAL},
    {"WARN Cuda failure", "driver shutting down", NULL, "NCCL was still in use when the process ended", WARNING},
    {"WARN Cuda failure", "out of memory", NULL, "GPU memory ran out", FATAL},
    {"WARN Cuda failure", NULL, NULL, "a CUDA call failed", FATAL},
    {"NVRM: Xid", NULL, "gpu-errors", "the driver reports an error of a GPU", WARNING},
    {"CUDA_ERROR_ILLEGAL_ADDRESS", NULL, NULL, "a kernel used an address that is not valid", FATAL},
    {"CUDA error", NULL, NULL, "a CUDA call failed", FATAL},
    {"AssertionError", NULL, NULL, "a check of the test did not hold", FATAL},
    {"Failed: Assertion error", NULL, NULL, "a check of DeepEP did not hold", FATAL},
    {"RuntimeError: ", NULL, NULL, "the program raised an error", FATAL},
    {"torch.multiprocessing.spawn.ProcessRaisedException", NULL, NULL, "a process of the test raised an error", FATAL},
    {"ProcessExitedException", NULL, NULL, "a process of the test died", FATAL},
    {"DistBackendError", NULL, NULL, "the process group failed", FATAL},
    {"ModuleNotFoundError", NULL, NULL, "a Python module is missing", FATAL},
    {"ImportError:", NULL, NULL, "a Python module could not be loaded", FATAL},
    {"Segmentation fault", NULL, NULL, "a process crashed", FATAL},
    {"Bus error", NULL, "shm", "a process ran out of shared memory", FATAL},
    {"exited on signal", NULL, NULL, "a process was ended by a signal", FATAL},
    {"mpirun has exited due to process rank", NULL, NULL, "a process failed under mpirun", FATAL},
    {"returned a non-zero exit code", NULL, NULL, "a process failed under mpirun", FATAL},
    {"a non-zero exit code", NULL, NULL, "a process failed under mpirun", FATAL},
    {"exiting improperly", NULL, NULL, "a process ended without MPI_Finalize()", FATAL},
    {"detected that one or more processes exited with", NULL, NULL, "a process failed under mpirun", FATAL},
    {"RTE was unable to reliably start", NULL, NULL, "mpirun could not start its daemons", FATAL},
    {"daemon has unexpectedly failed", NULL, NULL, "mpirun could not start its daemons", FATAL},
    {"orted: command not found", NULL, NULL, "mpirun could not start its daemons", FATAL},
    {"prted: command not found", NULL, NULL, "mpirun could not start its daemons", FATAL},
    {"mpirun was unable to ", NULL, NULL, "mpirun could not start the program", FATAL},
    {"All nodes which are allocated for this job are already filled", NULL, NULL,
     "mpirun has no slots for so many ranks", FATAL},
    {"error while loading shared libraries", NULL, NULL, "a shared library is missing", FATAL},
    {": can't open file ", "[Errno 2]", NULL, "the program of the test is not there", FATAL},
    {"could not select device driver", NULL, NULL, "the container runtime cannot give GPUs to containers", FATAL},
    {"nvidia-container-cli: ", "error", NULL, "the container runtime cannot give GPUs to containers", FATAL},
    {"Connection refused", "ssh", NULL, "ssh was refused", FATAL},
    {"Could not resolve hostname", NULL, NULL, "a host name is unknown", FATAL},
    {"Permission denied (publickey", NULL, NULL, "ssh did not accept the key", FATAL},
    {"Host key verification failed", NULL, NULL, "ssh does not know the key of a host, or another one", FATAL},
    {"slurmstepd: error: couldn't chdir", "going to", NULL,
     "the working directory does not exist on a node: the task began in another one", WARNING},
    {"srun: error:", NULL, NULL, "a task of the job step failed", FATAL},
    {"slurmstepd: error:", NULL, NULL, "a task of the job step failed", FATAL},
    {"OOM-killed", NULL, NULL, "a process ran out of memory", FATAL},
    {"Out Of Memory", NULL, NULL, "a process ran out of memory", FATAL},
    {"CUDA out of memory", NULL, NULL, "GPU memory ran out", FATAL},
    {"failed to extend /dev/shm/", NULL, "shm", "a process ran out of shared memory", FATAL},
    {"creating shared memory segment", "nccl-", "shm", "a process ran out of shared memory", FATAL},
    {"No space left on device", "posix_fallocate", "shm", "a process ran out of shared memory", FATAL},
    {"No space left on device", NULL, NULL, "the disk is full", FATAL},
    {"Watchdog caught collective operation timeout", NULL, NULL, "a collective operation timed out", FATAL},
    {"Test NCCL failure", NULL, NULL, "an NCCL call failed", FATAL},
    {"Test CUDA failure", NULL, NULL, "a CUDA call failed", FATAL},
    {"ncclSystemError", NULL, NULL, "an NCCL call failed", FATAL},
    {"ncclInternalError", NULL, NULL, "an NCCL call failed", FATAL},
    {"ncclRemoteError", NULL, NULL, "an NCCL call failed", FATAL},
    {"ncclUnhandledCudaError", NULL, NULL, "an NCCL call failed", FATAL},
    {"an illegal memory access was encountered", NULL, NULL, "a kernel used an address that is not valid", FATAL},
    {"CUDA_ERROR_LAUNCH_FAILED", NULL, NULL, "a kernel failed", FATAL},
    {"cudaErrorIllegalAddress", NULL, NULL, "a kernel used an address that is not valid", FATAL},
    {"cudaErrorLaunchFailure", NULL, NULL, "a kernel failed", FATAL},
    {"non-zero status:", NULL, NULL, "a call of NVSHMEM failed, perhaps of a transport that is not needed", WARNING},
    {"nvshmem setup", "failed", NULL, "NVSHMEM could not start", FATAL},
    {"nvshmem initialization failed", NULL, NULL, "NVSHMEM could not start", FATAL},
    {"ot completion with error", NULL, NULL, "a transfer over RDMA failed", FATAL},
    {"Got completion from peer", NULL, NULL, "a transfer over RDMA failed", FATAL},
    {"NCCL WARN ", "onnect to ", NULL, "NCCL could not connect to a peer", FATAL},
    {"DistNetworkError", NULL, NULL, "the ranks did not find each other at MASTER_ADDR and MASTER_PORT", FATAL},
    {"DistStoreError", NULL, NULL, "the ranks did not find each other at MASTER_ADDR and MASTER_PORT", FATAL},
    {TRACEBACK, NULL, NULL, "the program raised an error", FATAL},
    {"ChildFailedError", NULL, NULL, "a process of the test died", FATAL},
    {"failed (exitcode:", NULL, NULL, "a process of the test died", FATAL},
    {"closing signal SIG", NULL, NULL, "a process of the test died", FATAL},
    {"core dumped)", NULL, NULL, "a process crashed", FATAL},
    {"terminate called ", NULL, NULL, "a process crashed", FATAL},
    {"*** Process received signal ***", NULL, NULL, "a process crashed", FATAL},
    {"double free or corruption", NULL, NULL, "a process crashed", FATAL},
    {": line ", " Killed ", NULL, "a process was ended by a signal", FATAL},
    {": line ", " Terminated ", NULL, "a process was ended by a script, as helpers in the background are", WARNING},
    {"timeout: sending signal", NULL, NULL, "the program did not end in time", FATAL},
    {"command terminated with exit code", NULL, NULL, "a command in a pod failed", FATAL},
    {"oom_kill event", NULL, NULL, "a process ran out of memory", FATAL},
    {"Job step aborted", NULL, NULL, "the job step was ended", FATAL},
    {"MPI_ABORT was invoked", NULL, NULL, "a process failed under mpirun", FATAL},
    {"Primary job ", "terminated normally, but", NULL, "a process failed under mpirun", FATAL},
    {"RTE has lost communication", NULL, NULL, "mpirun lost a node", FATAL},
    {"There are not enough slots available", NULL, NULL, "mpirun has no slots for so many ranks", FATAL},
    {"ssh: connect to host", NULL, NULL, "a host could not be reached by ssh", FATAL},
    {"closed by remote host", NULL, NULL, "a connection by ssh was lost", FATAL},
    {"client_loop: send disconnect", NULL, NULL, "a connection by ssh was lost", FATAL},
    {"epkit: error: ", NULL, NULL, "epkit reports an error", FATAL},
    {"OCI runtime exec failed", NULL, NULL, "a command in a pod failed", STEP},
    {"error: unable to upgrade connection", NULL, NULL, "a command in a pod failed", STEP},
    {"Error from server (", NULL, NULL, "the API server refused a request of kubectl", STEP},
    {": No module named ", NULL, NULL, "a Python module is missing", MODULE},
    {"Killed", NULL, NULL, "a process was ended by a signal", WORD},
    {"Terminated", NULL, NULL, "a process was ended by a signal", WORD},
    {"Aborted", NULL, NULL, "a process was ended by a signal", WORD},
    {"Hangup", NULL, NULL, "a process was ended by a signal", WORD},
    {"KeyboardInterrupt", NULL, NULL, "the program was interrupted", WORD},
};

static bool is_word(const char *line, const char *word)
{
    size_t n = strlen(line), length = strlen(word);

    while (n > 0 && line[n - 1] == ' ')
        n--;
    if (n < length || strncmp(line + n - length, word, length) != 0)
        return false;
    n -= length;
    while (n > 0 && line[n - 1] == ' ')
        n--;
    return n == 0 || strchr(":]|>", line[n - 1]);
}

/*
 * "/usr/bin/python3: No module named deep_ep". In the warnings of a program that goes on without the module, as torch
 * does without NumPy, the name is quoted.
 */
static bool names_missing_module(const char *line, const char *phrase)
{
    const char *end = strstr(line, phrase), *begin = end;

    if (!end || (!isalnum((unsigned char)end[strlen(phrase)]) && end[strlen(phrase)] != '_'))
        return false;
    /* python3.13t and python3.12-dbg, too. */
    while (begin > line && (isalnum((unsigned char)begin[-1]) || begin[-1] == '.' || begin[-1] == '-'))
        begin--;
    return text_begins(begin, "python");
}

static const struct known *find(const char *line)
{
    for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++) {
        const struct known *row = &known[i];

        if (row->kind == WORD     ? is_word(line, row->text)
            : row->kind == MODULE ? names_missing_module(line, row->text)
                                  : strstr(line, row->text) && (!row->also || strstr(line, row->also)))
            return row;
    }
    return NULL;
}

/* Behind the name of a host, if that may stand in front. */
static const char *skip_host(const char *line)
{
    return line + prefix_guess(line, (char[KEY_BYTES]){""}, KEY_BYTES);
}

static bool is_indented(const char *line)
{
    return text_begins(line, "  ") || text_begins(skip_host(line), "  ");
}

/* "RuntimeError: text", "queue.Empty", "KeyboardInterrupt": the last line of a traceback. */
static bool is_exception(const char *text)
{
    size_t n = 0;

    while (isalnum((unsigned char)text[n]) || (n && text[n] == '.') || text[n] == '_')
        n++;
    return n && !isdigit((unsigned char)*text) && (text[n] == '\0' || text_begins(text + n, ": "));
}

/*
 * A traceback from the cleanup of an object is harmless: Python prints "Exception ignored in" in the line before. Its
 * first line that is not indented is the exception. Lines of other ranks may come between.
 */
static bool is_ignored(struct parser *parser, const char *line)
{
    struct stream *stream = stream_now(parser);
    bool was_ignoring = stream && stream->ignores_traceback;

    if (!stream)
        return false;
    stream->ignores_traceback = strstr(line, "Exception ignored in") != NULL;
    if (strstr(line, TRACEBACK)) {
        stream->n_ignored = was_ignoring ? stream->n_ignored + 1 : 0;
        return was_ignoring;
    }
    if (stream->n_ignored == 0)
        return false;
    if (is_indented(line))
        return true;
    if (!is_exception(line) && !is_exception(skip_host(line)))
        return false;
    stream->n_ignored--;
    return true;
}

/* The run in progress: the run of this stream that had the latest line. */
static struct parse_run *latest(struct parser *parser)
{
    struct stream *stream = stream_now(parser);
    struct parse_run *best = NULL;

    for (int i = 0; stream && i < PARSE_N_DIALECTS; i++)
        if (stream->open[i] && (!best || stream->open[i]->last_line > best->last_line))
            best = stream->open[i];
    if (best || parser->n_runs == 0)
        return best;
    return &parser->runs[parser->n_runs - 1]->public;
}

void fault_line(struct parser *parser, const char *line)
{
    const struct known *fault = is_ignored(parser, line) ? NULL : find(line);
    bool is_loose = false, is_fatal = fault && fault->kind != WARNING && fault->kind != STEP;
    struct parse_fault *entry;
    struct parse_run *run;

    if (!fault)
        return;
    if (is_fatal) {
        run = latest(parser);
        is_loose = !run || strcmp(run->source, parser->source) != 0;
        if (!is_loose)
            run_problem(run, line + strspn(line, " "));
    }
    for (size_t i = 0; i < parser->n_faults; i++) {
        /* A step and a failure may have the same cause: the verdicts on them differ. */
        if (parser->faults[i].cause == fault->cause && parser->faults[i].is_fatal == is_fatal) {
            parser->faults[i].count++;
            parser->faults[i].is_loose |= is_loose;
            return;
        }
    }
    if (parser->n_faults == MAX_FAULTS)
        return;
    entry = &parser->faults[parser->n_faults++];
    *entry = (struct parse_fault){
        .id = fault->id,
        .cause = fault->cause,
        .is_fatal = is_fatal,
        .is_fatal_alone = fault->kind == STEP,
        .is_loose = is_loose,
        .line_number = parser->line_number,
        .count = 1,
    };
    snprintf(entry->line, sizeof(entry->line), "%.*s", PARSE_TEXT - 1, line + strspn(line, " "));
    snprintf(entry->source, sizeof(entry->source), "%s", parser->source);
}
