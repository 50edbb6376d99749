/* SPDX-License-Identifier: Apache-2.0 */
/* faults.c - lines that name a fault, whatever program printed them. docs/failure-modes.md has the numbers. */
#include "parse_internal.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

#define TRACEBACK "Traceback (most recent call last)"

/* Open MPI 4 prints ORTE where Open MPI 5 prints PRTE. */
struct known {
    const char *text, *also; /* both must be in the line */
    const char *id, *cause;
    bool is_fatal;
};

static const struct known known[] = {
    {"NVSHMEM_IBGDA_NIC_HANDLER=cpu", "GDR", "gdrcopy", "NVSHMEM wants GDRCopy because its NIC handler is the CPU",
     false},
    {"requires GDRCopy", NULL, "gdrcopy", "the NIC handler is the CPU and there is no GDRCopy", true},
    {"moe_recv_expert_counter", "-1", "nic-handler",
     "an internode dispatch hung with counters of -1: the NIC handler is the CPU, set or by silent fallback", true},
    {"DeepEP timeout", NULL, "nic-handler", "a DeepEP kernel waited 100 s for a peer", true},
    {"DeepEP error: timeout", NULL, "nic-handler", "a DeepEP kernel waited 100 s for a peer", true},
    {"DeepEP error: CPU recv timeout", NULL, "nic-handler",
     "an internode dispatch got no counts: NIC handler cpu, or a lost peer", true},
    {"neither nv_peer_mem, or nvidia_peermem detected", NULL, "peermem", "the NICs cannot reach GPU memory", true},
    {"NVSHMEM device library version does not match", NULL, "two-nvshmem", "two versions of NVSHMEM in one process",
     true},
    {"couldn't load driver 'libmlx5-rdmav", NULL, "provider-missing",
     "libibverbs and its provider come from different sets", false},
    {"couldn't load driver", "rdmav", "provider-missing", "libibverbs and its provider come from different sets",
     false},
    {"DeepEP ", " timeout, channel", "nic-handler", "a DeepEP kernel waited 100 s for a peer", true},
    {"IBVERBS_PRIVATE_", "not found", "verbs-mixed", "a verbs provider was loaded into another set's libibverbs", true},
    {"Failed to initialize any NET plugin", NULL, "net-plugin", "NCCL found no usable network plugin", true},
    {"NCCL/NET (shim) mismatch", NULL, "gib-settings", "NCCL variables differ from what the gIB plugin expects", false},
    {"en_accel/ipsec.c", "error", "doca-kernel", "DOCA-OFED is too old for this kernel", true},
    {"no kernel image is available", NULL, "gpu-arch", "the extension holds no code for this GPU", true},
    {"named symbol not found", NULL, "gpu-arch", "the extension holds no code for this GPU", true},
    {"Failed to modify QP", NULL, "gid",
     "a queue pair did not come up: the GID index is wrong, or the peer is not reachable", true},
    {"ibv_modify_qp", "failed", "gid",
     "a queue pair did not come up: the GID index is wrong, or the peer is not reachable", true},
    {"ibv_modify_qp", "timed out", "gid", "a queue pair did not come up: the peer is not reachable", true},
    {"Invalid NCCL versions", NULL, "two-nccl", "two versions of NCCL in one process", true},
    {"Cannot allocate memory", "ibv_reg", "memlock", "memory could not be registered", true},
    {"Call to ibv_reg", "Bad address", "peermem", "the NICs cannot reach GPU memory", true},
    {"ystem not yet initialized", NULL, "fabric-manager", "CUDA waits for the fabric manager", true},
    {"WARN Cuda failure", "driver shutting down", NULL, "NCCL was still in use when the process ended", false},
    {"WARN Cuda failure", "out of memory", NULL, "GPU memory ran out", true},
    {"WARN Cuda failure", NULL, NULL, "a CUDA call failed", true},
    {"NVRM: Xid", NULL, "gpu-errors", "the driver reports an error of a GPU", false},
    {"CUDA_ERROR_ILLEGAL_ADDRESS", NULL, NULL, "a kernel used an address that is not valid", true},
    {"CUDA error", NULL, NULL, "a CUDA call failed", true},
    {"AssertionError", NULL, NULL, "a check of the test did not hold", true},
    {"Failed: Assertion error", NULL, NULL, "a check of DeepEP did not hold", true},
    {"RuntimeError: ", NULL, NULL, "the program raised an error", true},
    {"torch.multiprocessing.spawn.ProcessRaisedException", NULL, NULL, "a process of the test raised an error", true},
    {"ProcessExitedException", NULL, NULL, "a process of the test died", true},
    {"DistBackendError", NULL, NULL, "the process group failed", true},
    {"ModuleNotFoundError", NULL, NULL, "a Python module is missing", true},
    {"ImportError:", NULL, NULL, "a Python module could not be loaded", true},
    {"Segmentation fault", NULL, NULL, "a process crashed", true},
    {"Bus error", NULL, "shm", "a process ran out of shared memory", true},
    {"exited on signal", NULL, NULL, "a process was ended by a signal", true},
    {"mpirun has exited due to process rank", NULL, NULL, "a process failed under mpirun", true},
    {"returned a non-zero exit code", NULL, NULL, "a process failed under mpirun", true},
    {"a non-zero exit code", NULL, NULL, "a process failed under mpirun", true},
    {"exiting improperly", NULL, NULL, "a process ended without MPI_Finalize()", true},
    {"detected that one or more processes exited with", NULL, NULL, "a process failed under mpirun", true},
    {"RTE was unable to reliably start", NULL, NULL, "mpirun could not start its daemons", true},
    {"daemon has unexpectedly failed", NULL, NULL, "mpirun could not start its daemons", true},
    {"orted: command not found", NULL, NULL, "mpirun could not start its daemons", true},
    {"prted: command not found", NULL, NULL, "mpirun could not start its daemons", true},
    {"mpirun was unable to ", NULL, NULL, "mpirun could not start the program", true},
    {"All nodes which are allocated for this job are already filled", NULL, NULL,
     "mpirun has no slots for so many ranks", true},
    {"error while loading shared libraries", NULL, NULL, "a shared library is missing", true},
    {": can't open file ", "[Errno 2]", NULL, "the program of the test is not there", true},
    {"could not select device driver", NULL, NULL, "the container runtime cannot give GPUs to containers", true},
    {"nvidia-container-cli: ", "error", NULL, "the container runtime cannot give GPUs to containers", true},
    {"Connection refused", "ssh", NULL, "ssh was refused", true},
    {"Could not resolve hostname", NULL, NULL, "a host name is unknown", true},
    {"Permission denied (publickey", NULL, NULL, "ssh did not accept the key", true},
    {"Host key verification failed", NULL, NULL, "ssh does not know the key of a host, or another one", true},
    {"slurmstepd: error: couldn't chdir", "going to", NULL,
     "the working directory does not exist on a node: the task began in another one", false},
    {"srun: error:", NULL, NULL, "a task of the job step failed", true},
    {"slurmstepd: error:", NULL, NULL, "a task of the job step failed", true},
    {"OOM-killed", NULL, NULL, "a process ran out of memory", true},
    {"Out Of Memory", NULL, NULL, "a process ran out of memory", true},
    {"CUDA out of memory", NULL, NULL, "GPU memory ran out", true},
    {"failed to extend /dev/shm/", NULL, "shm", "a process ran out of shared memory", true},
    {"creating shared memory segment", "nccl-", "shm", "a process ran out of shared memory", true},
    {"No space left on device", "posix_fallocate", "shm", "a process ran out of shared memory", true},
    {"No space left on device", NULL, NULL, "the disk is full", true},
    {"Watchdog caught collective operation timeout", NULL, NULL, "a collective operation timed out", true},
    {"Test NCCL failure", NULL, NULL, "an NCCL call failed", true},
    {"Test CUDA failure", NULL, NULL, "a CUDA call failed", true},
    {"ncclSystemError", NULL, NULL, "an NCCL call failed", true},
    {"ncclInternalError", NULL, NULL, "an NCCL call failed", true},
    {"ncclRemoteError", NULL, NULL, "an NCCL call failed", true},
    {"ncclUnhandledCudaError", NULL, NULL, "an NCCL call failed", true},
    {"an illegal memory access was encountered", NULL, NULL, "a kernel used an address that is not valid", true},
    {"CUDA_ERROR_LAUNCH_FAILED", NULL, NULL, "a kernel failed", true},
    {"cudaErrorIllegalAddress", NULL, NULL, "a kernel used an address that is not valid", true},
    {"cudaErrorLaunchFailure", NULL, NULL, "a kernel failed", true},
    {"non-zero status:", NULL, NULL, "a call of NVSHMEM failed, perhaps of a transport that is not needed", false},
    {"nvshmem setup", "failed", NULL, "NVSHMEM could not start", true},
    {"nvshmem initialization failed", NULL, NULL, "NVSHMEM could not start", true},
    {"ot completion with error", NULL, NULL, "a transfer over RDMA failed", true},
    {"Got completion from peer", NULL, NULL, "a transfer over RDMA failed", true},
    {"NCCL WARN ", "onnect to ", NULL, "NCCL could not connect to a peer", true},
    {"DistNetworkError", NULL, NULL, "the ranks did not find each other at MASTER_ADDR and MASTER_PORT", true},
    {"DistStoreError", NULL, NULL, "the ranks did not find each other at MASTER_ADDR and MASTER_PORT", true},
    {TRACEBACK, NULL, NULL, "the program raised an error", true},
    {"ChildFailedError", NULL, NULL, "a process of the test died", true},
    {"failed (exitcode:", NULL, NULL, "a process of the test died", true},
    {"closing signal SIG", NULL, NULL, "a process of the test died", true},
    {"core dumped)", NULL, NULL, "a process crashed", true},
    {"terminate called ", NULL, NULL, "a process crashed", true},
    {"*** Process received signal ***", NULL, NULL, "a process crashed", true},
    {"double free or corruption", NULL, NULL, "a process crashed", true},
    {": line ", " Killed ", NULL, "a process was ended by a signal", true},
    {": line ", " Terminated ", NULL, "a process was ended by a script, as helpers in the background are", false},
    {"timeout: sending signal", NULL, NULL, "the program did not end in time", true},
    {"command terminated with exit code", NULL, NULL, "a command in a pod failed", true},
    {"oom_kill event", NULL, NULL, "a process ran out of memory", true},
    {"Job step aborted", NULL, NULL, "the job step was ended", true},
    {"MPI_ABORT was invoked", NULL, NULL, "a process failed under mpirun", true},
    {"Primary job ", "terminated normally, but", NULL, "a process failed under mpirun", true},
    {"RTE has lost communication", NULL, NULL, "mpirun lost a node", true},
    {"There are not enough slots available", NULL, NULL, "mpirun has no slots for so many ranks", true},
    {"ssh: connect to host", NULL, NULL, "a host could not be reached by ssh", true},
    {"closed by remote host", NULL, NULL, "a connection by ssh was lost", true},
    {"client_loop: send disconnect", NULL, NULL, "a connection by ssh was lost", true},
    {"epkit: error: ", NULL, NULL, "epkit reports an error", true},
};

static const struct known missing_module = {NULL, NULL, NULL, "a Python module is missing", true};

/* Steps of a script around the tests, which may be repeated or clean up: fatal only if no test began. */
static const struct known steps[] = {
    {"OCI runtime exec failed", NULL, NULL, "a command in a pod failed", false},
    {"error: unable to upgrade connection", NULL, NULL, "a command in a pod failed", false},
    {"Error from server (", NULL, NULL, "the API server refused a request of kubectl", false},
};

/* Lines of a shell or an interpreter that hold nothing else, except a host name in front. */
static const struct known words[] = {
    {"Killed", NULL, NULL, "a process was ended by a signal", true},
    {"Terminated", NULL, NULL, "a process was ended by a signal", true},
    {"Aborted", NULL, NULL, "a process was ended by a signal", true},
    {"Hangup", NULL, NULL, "a process was ended by a signal", true},
    {"KeyboardInterrupt", NULL, NULL, "the program was interrupted", true},
};

static const struct known *find_word(const char *line)
{
    size_t n = strlen(line);

    while (n > 0 && line[n - 1] == ' ')
        n--;
    for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++) {
        size_t length = strlen(words[i].text), begin = n - length;

        if (n < length || strncmp(line + begin, words[i].text, length) != 0)
            continue;
        while (begin > 0 && line[begin - 1] == ' ')
            begin--;
        if (begin == 0 || strchr(":]|>", line[begin - 1]))
            return &words[i];
    }
    return NULL;
}

/*
 * "/usr/bin/python3: No module named deep_ep", by the interpreter itself. In the warnings of a program that goes on
 * without the module, as torch does without NumPy, the name is quoted.
 */
static bool names_missing_module(const char *line)
{
    static const char phrase[] = ": No module named ", program[] = "python";
    const char *end = strstr(line, phrase), *begin = end;

    if (!end || (!isalnum((unsigned char)end[strlen(phrase)]) && end[strlen(phrase)] != '_'))
        return false;
    /* python3.13t and python3.12-dbg, too. */
    while (begin > line && (isalnum((unsigned char)begin[-1]) || begin[-1] == '.' || begin[-1] == '-'))
        begin--;
    return lex_starts(begin, program);
}

/* Cheap test first: most lines contain no fault. */
static const struct known *find_in(const struct known *rows, size_t n, const char *line)
{
    for (size_t i = 0; i < n; i++)
        if (strstr(line, rows[i].text) && (!rows[i].also || strstr(line, rows[i].also)))
            return &rows[i];
    return NULL;
}

static const struct known *find(const char *line, bool *ret_is_step)
{
    const struct known *fault = find_in(known, sizeof(known) / sizeof(known[0]), line);

    *ret_is_step = false;
    if (fault)
        return fault;
    fault = find_in(steps, sizeof(steps) / sizeof(steps[0]), line);
    *ret_is_step = fault != NULL;
    if (fault)
        return fault;
    if (names_missing_module(line))
        return &missing_module;
    return find_word(line);
}

/* Behind the name of a host, if that may stand in front. */
static const char *skip_host(const char *line)
{
    return line + prefix_guess(line, (char[KEY_BYTES]){""}, KEY_BYTES);
}

static bool is_indented(const char *line)
{
    return lex_starts(line, "  ") || lex_starts(skip_host(line), "  ");
}

/* "RuntimeError: text", "queue.Empty", "KeyboardInterrupt": the last line of a traceback. */
static bool is_exception(const char *text)
{
    size_t n = 0;

    while (isalnum((unsigned char)text[n]) || (n && text[n] == '.') || text[n] == '_')
        n++;
    return n && !isdigit((unsigned char)*text) && (text[n] == '\0' || lex_starts(text + n, ": "));
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
    bool is_loose = false, is_step = false;
    const struct known *fault = is_ignored(parser, line) ? NULL : find(line, &is_step);
    struct parse_fault *entry;
    struct parse_run *run;

    if (!fault)
        return;
    if (fault->is_fatal) {
        run = latest(parser);
        is_loose = !run || strcmp(run->source, parser->source) != 0;
        if (!is_loose)
            run_problem(run, line + strspn(line, " "));
    }
    for (size_t i = 0; i < parser->n_faults; i++) {
        /* A step and a failure may have the same cause: the verdicts on them differ. */
        if (parser->faults[i].cause == fault->cause && parser->faults[i].is_fatal == fault->is_fatal) {
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
        .is_fatal = fault->is_fatal,
        .is_fatal_alone = is_step,
        .is_loose = is_loose,
        .line_number = parser->line_number,
        .count = 1,
    };
    snprintf(entry->line, sizeof(entry->line), "%.*s", PARSE_TEXT - 1, line + strspn(line, " "));
    snprintf(entry->source, sizeof(entry->source), "%s", parser->source);
}
