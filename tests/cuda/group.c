/* SPDX-License-Identifier: Apache-2.0 */
#include "group.h"

#include "direct_net.h"
#include "net/emulation.h"

#include <epkit/cuda.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define WARM_UP_MS 60000

struct division group_division;
int group_slow = 1;
uint32_t group_flags = 0;

static _Thread_local char context[160];

void test_set_context(const char *format, ...)
{
    va_list list;

    va_start(list, format);
    vsnprintf(context, sizeof(context), format, list);
    va_end(list);
}

/* In one write, so that lines of several ranks are not mixed. */
static void print_line(const char *begin, const char *format, va_list list)
{
    char line[2048];
    int length = snprintf(line, sizeof(line), "%s%s%.500s", context, *context ? ": " : "", begin);

    vsnprintf(line + length, sizeof(line) - (size_t)length - 1, format, list);
    strcat(line, "\n");
    fputs(line, stderr);
}

void test_report(const char *format, ...)
{
    va_list list;

    va_start(list, format);
    print_line("", format, list);
    va_end(list);
}

void test_report_failure(const char *file, int line, const char *condition, const char *format, ...)
{
    const char *name = strrchr(file, '/');
    char begin[400];
    va_list list;

    snprintf(begin, sizeof(begin), "%s:%d: expected %s: ", name ? name + 1 : file, line, condition);
    va_start(list, format);
    print_line(begin, format, list);
    va_end(list);
}

/* --- options ---------------------------------------------------------------------------------------------------- */

bool option_number(const char *option, const char *text, long long min, long long max, long long *ret_number)
{
    char *end = NULL;
    long long number;

    errno = 0;
    number = text ? strtoll(text, &end, 10) : 0;
    if (!text || end == text || *end || errno || number < min || number > max) {
        test_report("%s takes a number from %lld to %lld, not %s", option, min, max, text ? text : "nothing");
        return false;
    }
    *ret_number = number;
    return true;
}

bool options_read(int argc, char **argv, int min_ranks, struct options *options)
{
    for (int i = 1; i < argc; i += 2) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        long long number;

        if (!strcmp(argv[i], "--only") && value) {
            options->only = value;
        } else if (!strcmp(argv[i], "--ranks")) {
            if (!option_number(argv[i], value, min_ranks, MAX_RANKS, &number))
                return false;
            options->ranks = (int)number;
        } else if (!strcmp(argv[i], "--rounds") && options->rounds) {
            if (!option_number(argv[i], value, 1, 1000, &number))
                return false;
            options->rounds = (int)number;
        } else if (!strcmp(argv[i], "--nodes")) {
            if (!option_number(argv[i], value, 1, MAX_RANKS, &number))
                return false;
            group_division.nodes = (int)number;
        } else if (!strcmp(argv[i], "--slow")) {
            if (!option_number(argv[i], value, 1, 100, &number))
                return false;
            group_slow = (int)number;
        } else if (!strcmp(argv[i], "--network") && value) {
            group_division.network = value;
        } else if (!strcmp(argv[i], "--seed")) {
            if (!option_number(argv[i], value, 0, INT64_MAX, &number))
                return false;
            options->seed = (uint64_t)number;
        } else {
            test_report("%s: unknown option, or one without its value. There are --ranks N, --seed N, --only SCENARIO, "
                        "--nodes N, --network NAME, --slow N%s",
                        argv[i], options->rounds ? ", --rounds N" : "");
            return false;
        }
    }
    return true;
}

bool options_select(struct options *options, const char *scenario)
{
    if (options->only && strcmp(options->only, scenario) != 0)
        return false;
    options->found = true;
    return true;
}

int options_code(const struct options *options, int code)
{
    if (options->found)
        return code;
    test_report("there is no scenario %s", options->only);
    return 2;
}

/* --- ranks ------------------------------------------------------------------------------------------------------ */

struct scenario_job {
    const struct scenario_run *run;
    ep_boot_shm *second;
};

static int run_scenario_rank(const ep_boot *boot, void *argument)
{
    const struct scenario_job *job = argument;
    struct group group;
    int code = group_open(boot, job->second, job->run->timeout_ms, &group);

    if (!code) {
        test_set_context("rank %d of %d, %s (seed %llu)", boot->rank, boot->nranks, job->run->name,
                         (unsigned long long)job->run->seed);
        code = job->run->run(job->run, &group);
    }
    group_close(&group, code & FAILED);
    return code;
}

int run_group_scenario(struct options *options, struct scenario_run run)
{
    struct scenario_job job = {.run = &run};
    struct launch launch = {.name = run.name,
                            .ranks = options->ranks,
                            .seconds = run.seconds,
                            .victim = -1,
                            .run = run_scenario_rank,
                            .argument = &job};
    int code = FAILED;

    if (!options_select(options, run.name))
        return SKIPPED;
    run.seed = options->seed;
    run.rounds = options->rounds;
    if (run.shared_bytes) {
        run.shared = share(run.shared_bytes);
        if (!run.shared)
            return FAILED;
    }
    if (ep_boot_shm_new(options->ranks, &job.second) == EP_OK)
        code = launch_ranks(&launch);
    else
        test_report("%s", ep_last_error());
    ep_boot_shm_free(job.second);
    printf("%s: %d ranks, %s, seed %llu: %s\n", run.program, options->ranks, run.name,
           (unsigned long long)options->seed, result_name(code));
    fflush(stdout);
    return code;
}

int run_group_scenarios(struct options *options, struct scenario_run run, const void *scenarios, size_t n, size_t bytes)
{
    int code = SKIPPED;

    for (size_t i = 0; i < n; i++) {
        run.scenario = (const char *)scenarios + i * bytes;
        run.name = *(const char *const *)run.scenario;
        code = merge_codes(code, run_group_scenario(options, run));
    }
    return options_code(options, code);
}

int run_group_program(int argc, char **argv, int min_ranks, struct options *options, struct scenario_run run,
                      const void *scenarios, size_t n, size_t bytes)
{
    return options_read(argc, argv, min_ranks, options) ? run_group_scenarios(options, run, scenarios, n, bytes) : 2;
}

int merge_codes(int a, int b)
{
    if (a != SKIPPED && b != SKIPPED)
        return a || b;
    return a == SKIPPED ? b : a;
}

const char *result_name(int code)
{
    return code == SKIPPED ? "skipped, no GPU to be used" : code ? "FAILED" : "passed";
}

static _Noreturn void end_late(int unused)
{
    static const char text[] = "the ranks, which are threads, did not end within their deadline\n";
    ssize_t written = write(2, text, sizeof(text) - 1);

    (void)unused;
    (void)written;
    _exit(1);
}

/* Has the rank ended otherwise than it should? Prints how. */
static bool has_failed(const struct launch *launch, int rank, const ep_rank_exit *mine)
{
    if (rank == launch->victim) {
        if (mine->signal == SIGKILL && !mine->late)
            return false;
        test_report("%s: rank %d was to be killed, but it ended with code %d, signal %d%s", launch->name, rank,
                    mine->code, mine->signal, mine->late ? ", at the deadline" : "");
        return true;
    }
    if (mine->late)
        test_report("%s: rank %d did not end within %d s and was killed", launch->name, rank,
                    group_slow * launch->seconds);
    else if (mine->signal)
        test_report("%s: rank %d was killed by signal %d (%s)", launch->name, rank, mine->signal,
                    strsignal(mine->signal));
    else if (mine->code && mine->code != SKIPPED)
        test_report("%s: rank %d failed (%d)", launch->name, rank, mine->code);
    return mine->late || mine->signal || (mine->code && mine->code != SKIPPED);
}

static int check_exits(const struct launch *launch, ep_status status, const ep_rank_exit *exits)
{
    bool failed = false;
    int skipped = 0, count = launch->ranks - (launch->victim >= 0);

    for (int rank = 0; rank < launch->ranks; rank++) {
        skipped += rank != launch->victim && exits[rank].code == SKIPPED;
        /* Without a GPU the victim is skipped before it is killed. */
        if (rank != launch->victim || exits[rank].code != SKIPPED)
            failed |= has_failed(launch, rank, &exits[rank]);
    }
    if (skipped && skipped < count) {
        test_report("%s: only %d of %d ranks could run", launch->name, count - skipped, count);
        failed = true;
    }
    /* ep_launch() must report the same. */
    if (!failed && !skipped && status != (launch->victim >= 0 ? EP_E_PEER_DEAD : EP_OK)) {
        test_report("%s: ep_launch: %s: %s", launch->name, ep_status_name(status), ep_last_error());
        failed = true;
    }
    return failed ? 1 : skipped ? SKIPPED : 0;
}

int launch_ranks(const struct launch *launch)
{
    static bool has_used_cuda;
    ep_launch_args args = EP_LAUNCH_ARGS_INIT;
    ep_rank_exit exits[MAX_RANKS] = {{.code = -1}};
    ep_status status;
    int code;

    /* A process that has used CUDA cannot use it in its children. */
    if (has_used_cuda && !launch->threads)
        return test_report("%s: threads of this process have used CUDA before, so its children cannot", launch->name),
               1;
    has_used_cuda = launch->threads;
    args.mode = launch->threads ? EP_LAUNCH_THREADS : EP_LAUNCH_FORK;
    args.nranks = launch->ranks;
    args.run = launch->run;
    args.argument = launch->argument;
    args.timeout_ms = launch->threads ? 0 : group_slow * launch->seconds * 1000;
    if (launch->threads && (signal(SIGALRM, end_late) == SIG_ERR || alarm((unsigned)(group_slow * launch->seconds))))
        return test_report("%s: cannot set an alarm", launch->name), 1;
    status = ep_launch(&args, exits);
    if (launch->threads)
        alarm(0);
    if (status != EP_OK && status != EP_E_PEER_DEAD && status != EP_E_TIMEOUT)
        return test_report("%s: ep_launch: %s: %s", launch->name, ep_status_name(status), ep_last_error()), 1;
    code = check_exits(launch, status, exits);
    if (waitpid(-1, NULL, WNOHANG) != -1 || errno != ECHILD)
        return test_report("%s: a process is left", launch->name), 1;
    return code;
}

int count_gpus_in_child(int *ret_n)
{
    pid_t pid = fork();
    int status = 0;

    if (pid == 0) {
        int n = 0;

        if (cudaGetDeviceCount(&n) != cudaSuccess)
            n = 0;
        _exit(n < MAX_RANKS ? n : MAX_RANKS);
    }
    EXPECT(pid > 0, "fork: %s", strerror(errno));
    while (waitpid(pid, &status, 0) < 0)
        EXPECT(errno == EINTR, "waitpid: %s", strerror(errno));
    EXPECT(WIFEXITED(status), "counting the GPUs ended by signal %d", WTERMSIG(status));
    *ret_n = WEXITSTATUS(status);
    return 0;
}

/* CUDA reads the variable once. It may name some GPUs already: by number, UUID or MIG. */
int hide_other_gpus(int rank, int n)
{
    static const char variable[] = "CUDA_VISIBLE_DEVICES";
    const char *all = getenv(variable), *begin = all;
    char one[256];

    if (!n)
        return 0;
    snprintf(one, sizeof(one), "%d", rank % n);
    for (int i = 0; begin && i < rank % n; i++) {
        begin = strchr(begin, ',');
        EXPECT(begin, "%s is %s, but CUDA counts %d GPUs", variable, all, n);
        begin++;
    }
    if (begin)
        snprintf(one, sizeof(one), "%.*s", (int)strcspn(begin, ","), begin);
    EXPECT(setenv(variable, one, 1) == 0, "setenv: %s", strerror(errno));
    return 0;
}

/* --- communicators ---------------------------------------------------------------------------------------------- */

/*
 * Creating the contexts of all ranks takes longer than the deadlines of some tests, so all ranks do it before. Without
 * a GPU ep_comm_new() reports that.
 */
static int warm_up(const ep_boot *boot)
{
    char all[MAX_RANKS], mine = 0;
    int n = 0;

    if (cudaGetDeviceCount(&n) == cudaSuccess && n > 0) {
        CUDA(cudaSetDevice(boot->rank % n));
        CUDA(cudaFree(NULL));
    }
    CALL(boot->allgather(boot->context, &mine, sizeof(mine), group_slow * WARM_UP_MS, all));
    return 0;
}

void group_divide(ep_boot *boot, ep_comm_config *config)
{
    static const ep_net_emulation bad = {
        .seed = 11, .delay_us = 300, .ring_bytes = 4096, .split_bytes = 1500, .reorder = 1};

    if (group_division.nodes < 2)
        return;
    if (group_division.bad)
        ep_net_emulate(&bad);
    config->ranks_per_node = boot->nranks / group_division.nodes;
    config->network = group_division.network;
    /* A network for GPUs; the host backend then uses the emulated one. */
    if (config->network && direct_net_find(config->network) && strcmp(config->backend, "cuda") != 0)
        config->network = NULL;
    else if (config->network && direct_net_find(config->network))
        boot->network = direct_net_find(config->network);
    config->partial_type = group_division.partial_type;
}

int group_next(const ep_boot *boot, const char *backend, int timeout_ms, ep_comm **ret_comm)
{
    ep_comm_config config = EP_COMM_CONFIG_INIT;
    ep_boot own = *boot;

    config.backend = backend;
    config.timeout_ms = group_slow * timeout_ms;
    config.flags = strcmp(backend, "cuda") == 0 ? group_flags : 0;
    group_divide(&own, &config);
    /* With a network the nodes share no memory. */
    if (group_division.nodes > 1 && own.nranks % group_division.nodes)
        config.ranks_per_node = group_division.network ? 1 : own.nranks;
    CALL(ep_comm_new(&own, &config, ret_comm));
    return 0;
}

int group_open(const ep_boot *boot, ep_boot_shm *second, int timeout_ms, struct group *ret_group)
{
    ep_comm_config config = EP_COMM_CONFIG_INIT;
    struct group *g = ret_group;
    ep_boot other, own = *boot;
    ep_status status;

    *g = (struct group){.rank = boot->rank, .nranks = boot->nranks};
    test_set_context("rank %d of %d", g->rank, g->nranks);
    TRY(warm_up(boot));
    /* A rank whose CUDA communicator fails has that one's deadline to tell the others through the host backend. */
    timeout_ms *= group_slow;
    config.timeout_ms = 2 * timeout_ms + 20000;
    config.backend = "host";
    if (second) {
        CALL(ep_boot_shm_join(second, boot->rank, &other));
        group_divide(&other, &config);
        CALL(ep_comm_new(&other, &config, &g->host));
    }
    config.timeout_ms = timeout_ms;
    config.backend = "cuda";
    config.flags = group_flags;
    group_divide(&own, &config);
    status = ep_comm_new(&own, &config, &g->cuda);
    if (status == EP_E_UNSUPPORTED) {
        test_report("%s", ep_last_error());
        return SKIPPED;
    }
    CALL(status);
    CALL(ep_cuda_get_device(g->cuda, &g->device, NULL));
    CUDA(cudaSetDevice(g->device));
    CUDA(cudaStreamCreateWithFlags(&g->stream, cudaStreamNonBlocking));
    return 0;
}

void group_close(struct group *group, int code)
{
    if (code && group->cuda)
        ep_comm_abort(group->cuda);
    if (code && group->host)
        ep_comm_abort(group->host);
    ep_comm_free(group->cuda);
    ep_comm_free(group->host);
    if (group->stream)
        cudaStreamDestroy(group->stream);
    *group = (struct group){.rank = group->rank, .nranks = group->nranks};
}

int group_sync(const struct group *group, int device)
{
    CALL(ep_stream_sync(group_comm(group, device), group_stream(group, device)));
    return 0;
}

int group_barrier(const struct group *group)
{
    CALL(ep_comm_barrier(group->host));
    return 0;
}

int group_merge_codes(const struct group *group, int code, int *ret_code)
{
    int all[MAX_RANKS], merged = 0;

    CALL(ep_comm_allgather(group->host, &code, sizeof(code), all));
    for (int rank = 0; rank < group->nranks; rank++)
        merged |= all[rank];
    *ret_code = merged;
    return 0;
}

/* "rank 1" is not in "rank 10". */
static bool has_words(const char *text, const char *words)
{
    size_t length = strlen(words);

    for (const char *at = strstr(text, words); at; at = strstr(at + 1, words))
        if (at[length] < '0' || at[length] > '9')
            return true;
    return false;
}

bool names_rank(const char *text, int rank)
{
    char name[32];

    snprintf(name, sizeof(name), "rank %d", rank);
    return has_words(text, name);
}

int expect_status(const char *call, ep_status got, ep_status expected, const char *says)
{
    char text[1024];

    snprintf(text, sizeof(text), "%s", got == EP_OK ? "" : ep_last_error());
    if (got == expected && (!says || has_words(text, says)))
        return 0;
    test_report("%s gave %s (%s), not %s%s%s%s", call, ep_status_name(got), text, ep_status_name(expected),
                says ? " with \"" : "", says ? says : "", says ? "\" in its text" : "");
    return FAILED;
}

int expect_failed_rank(const char *call, ep_status got, ep_status expected, int rank)
{
    char name[32];

    snprintf(name, sizeof(name), "rank %d", rank);
    return expect_status(call, got, expected, name);
}

/* --- time and words between processes --------------------------------------------------------------------------- */

/* splitmix64 */
uint64_t next_random(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;

    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

double now_ms(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}

void sleep_ms(int ms)
{
    struct timespec span = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000L};

    nanosleep(&span, NULL);
}

void *share(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    if (memory != MAP_FAILED)
        return memory;
    test_report("mmap of %zu bytes: %s", bytes, strerror(errno));
    return NULL;
}

int await(const _Atomic int *word, int value, int ms, const char *what)
{
    double limit;

    ms *= group_slow;
    limit = now_ms() + ms;
    while (atomic_load(word) < value) {
        if (now_ms() > limit) {
            test_report("waited %d ms without success: %s (%d of %d)", ms, what, atomic_load(word), value);
            return FAILED;
        }
        sleep_ms(1);
    }
    return 0;
}

static void CUDART_CB hold_callback(void *argument)
{
    struct hold *hold = argument;
    double limit = now_ms() + hold->ms;

    while (now_ms() < limit && !(hold->word && atomic_load(hold->word)))
        sleep_ms(1);
    sleep_ms(hold->after_ms);
    atomic_store(&hold->ended, 1);
}

int hold_stream(cudaStream_t stream, struct hold *hold)
{
    atomic_store(&hold->ended, 0);
    CUDA(cudaLaunchHostFunc(stream, hold_callback, hold));
    return 0;
}

/* --- graphs ----------------------------------------------------------------------------------------------------- */

int capture_begin(const struct group *group)
{
    CUDA(cudaStreamBeginCapture(group->stream, cudaStreamCaptureModeGlobal));
    return 0;
}

int capture_end(const struct group *group, cudaGraphExec_t *ret_exec)
{
    cudaGraph_t graph;

    CUDA(cudaStreamEndCapture(group->stream, &graph));
    CUDA(cudaGraphInstantiate(ret_exec, graph, 0));
    CUDA(cudaGraphDestroy(graph));
    return 0;
}
