/* SPDX-License-Identifier: Apache-2.0 */
/* launch.c - a launch from start to end. */
#include "launch_internal.h"

#include "base/clock.h"
#include "base/error.h"
#include "common/dir.h"
#include "common/inherited.h"
#include "common/memory.h"
#include "common/output.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <unistd.h>

#define WIDTH 64 /* connections that are set up concurrently */
#define STEP_MS 100
#define FDS_PER_NODE 4 /* three pipes and a log */
#define FDS_OTHER 64

void launch_note(struct launch *launch, const char *format, ...)
{
    char text[1024];

    WITH_ARGS(args, format, vsnprintf(text, sizeof(text), format, args));
    text_clean(text, text, sizeof(text)); /* names and dates in it may be a stranger's */
    launch_log(launch, text);
    out_note("%s", text);
}

void node_send(struct node *node, json_t *request)
{
    char *text = json_dumps(request, JSON_COMPACT);
    size_t length = strlen(text);

    text[length] = '\n'; /* replaces the NUL */
    remote_send(node->remote, text, length + 1);
    free(text);
    json_decref(request);
}

void node_ask(struct node *node, json_t *request)
{
    json_decref(node->reply);
    node->reply = NULL;
    snprintf(node->asked, sizeof(node->asked), "%s", job_text(request, "do", ""));
    node_send(node, request);
}

bool launch_has_replies(struct launch *launch)
{
    for (int i = 0; i < launch->n && !launch->reason; i++)
        if (launch->nodes[i].state == NODE_READY && *launch->nodes[i].asked)
            return false;
    return true;
}

void launch_ask(struct launch *launch, json_t *request, int seconds)
{
    for (int i = 0; i < launch->n; i++)
        node_ask(&launch->nodes[i], json_incref(request));
    json_decref(request);
    launch_wait(launch, launch_has_replies, ep_deadline_ns(seconds * 1000));
}

/* --- the loop --- */

/* A second interrupt: kills at once what has been asked to end. */
static void kill_at_once(struct launch *launch, int signal)
{
    if (!launch->is_urgent)
        launch_note(launch, "%s: killing everything that has not ended", strsignal(signal));
    launch->is_urgent = true;
    /* If the end has not begun, it begins without grace. */
    if (!launch->is_ending)
        return;
    for (int i = 0; i < launch->n; i++)
        if (launch->nodes[i].state == NODE_READY)
            node_send(&launch->nodes[i], json_pack("{s:s, s:i}", "do", "end", "grace_s", 0));
}

static void handle_signals(struct launch *launch)
{
    struct signalfd_siginfo info;

    while (read(launch->signals, &info, sizeof(info)) == sizeof(info)) {
        /* A second signal may be in the same read, before the end for the first one has begun. */
        if (!launch->interrupted && !launch->is_ending)
            launch_note(launch, "%s: ending everything on all nodes", strsignal((int)info.ssi_signo));
        else
            kill_at_once(launch, (int)info.ssi_signo);
        launch->interrupted = (int)info.ssi_signo;
    }
}

static void keep_leases(struct launch *launch, uint64_t now_ns)
{
    if (now_ns < launch->beat_ns + AGENT_HEARTBEAT_MS * UINT64_C(1000000))
        return;
    launch->beat_ns = now_ns;
    FOR_EACH (node, launch->nodes, launch->n) {
        if (node->state != NODE_READY)
            continue;
        node_send(node, json_pack("{s:s}", "do", "heartbeat"));
        if (!launch->pool.is_paused && now_ns > node->heard_ns + AGENT_LEASE_S * UINT64_C(1000000000))
            remote_fail(node->remote, "connection", "no message from it for 30 s");
        else if (launch->pool.is_paused)
            node->heard_ns = now_ns;
    }
}

bool launch_wait(struct launch *launch, launch_condition is_done, uint64_t until_ns)
{
    while (!is_done(launch)) {
        struct pollfd extra[4] = {
            {.fd = launch->signals, .events = POLLIN},
            {.fd = launch->queued ? launch->options->output_fd : -1, .events = POLLOUT},
            {.fd = launch->mpirun.pid > 0 ? launch->mpirun.out : -1, .events = POLLIN},
            {.fd = launch->mpirun.pid > 0 ? launch->mpirun.err : -1, .events = POLLIN},
        };
        uint64_t now_ns;

        remote_pool_step(&launch->pool, STEP_MS, extra, 4);
        if (extra[0].revents)
            handle_signals(launch);
        if (launch->queued)
            launch_flush(launch);
        mpirun_poll(launch, extra + 2);
        now_ns = ep_now_ns();
        keep_leases(launch, now_ns);
        if (launch->interrupted && !launch->is_ending)
            return false;
        if (until_ns && now_ns > until_ns) {
            if (until_ns == launch->deadline_ns)
                launch_fail(launch, NULL, LAUNCH_DEADLINE, "deadline");
            return false;
        }
    }
    return true;
}

/* --- preparing --- */

/* Chooses the executable on the node: this file where the nodes share a file system, else the one in PATH. */
static char *make_remote_command(const char *given, const char *command)
{
    char exe[4096];
    ssize_t length = readlink("/proc/self/exe", exe, sizeof(exe) - 1);

    exe[length > 0 ? length : 0] = '\0';
    if (given)
        return memory_printf("exec %s %s", given, command);
    if (*exe && !strpbrk(exe, " \t'\"\\$`"))
        return memory_printf("if test -x %s; then exec %s %s; else exec epkit %s; fi", exe, exe, command, command);
    return memory_printf("exec epkit %s", command);
}

static ep_status raise_limits(int n)
{
    struct rlimit limit;
    rlim_t needed = (rlim_t)n * FDS_PER_NODE + FDS_OTHER;

    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= needed)
        return EP_OK;
    limit.rlim_cur = limit.rlim_max < needed ? limit.rlim_max : needed;
    if (limit.rlim_max < needed || setrlimit(RLIMIT_NOFILE, &limit) != 0)
        return ep_fail(EP_E_SYSTEM, "%d nodes need %llu open files, and the limit (ulimit -Hn) is %llu", n,
                       (unsigned long long)needed, (unsigned long long)limit.rlim_max);
    return EP_OK;
}

static void make_id(char ret_id[JOB_ID_BYTES])
{
    uint64_t number = 0;

    if (getrandom(&number, sizeof(number), 0) != (ssize_t)sizeof(number))
        number = ep_now_ns() ^ ((uint64_t)getpid() << 40);
    snprintf(ret_id, JOB_ID_BYTES, "%016llx", (unsigned long long)number);
}

/* srun instead of ssh: one task on one node, concurrently with other steps of the job. */
static const char srun_words[] = "srun --overlap --nodes=1 --ntasks=1 --unbuffered --quiet --export=ALL -w";

static void prepare_how(struct launch *launch)
{
    static const char *const ssh_options[] = {
        "-T", "-oBatchMode=yes", "-oLogLevel=DEBUG1", "-oServerAliveInterval=5", "-oServerAliveCountMax=4", NULL};
    const struct launch_options *options = launch->options;

    launch->how = (struct remote_how){
        .ssh = options->by_srun ? srun_words : options->ssh,
        .options = options->by_srun ? NULL : ssh_options,
        .port = options->by_srun ? NULL : options->port,
        .layer_timeout_ms = options->connect_s * 1000,
        .width = WIDTH,
        .has_shell = !options->by_srun,
        .has_input = true,
        .on_output = node_on_output,
        .on_end = node_on_end,
    };
}

static ep_status prepare(struct launch *launch)
{
    const struct launch_options *options = launch->options;
    const sigset_t signals = SIGNALS(SIGINT, SIGTERM, SIGHUP);

    EP_TRY(raise_limits(launch->n));
    EP_TRY(folder_open(launch));
    launch->nodes = memory_new((size_t)launch->n, sizeof(*launch->nodes));
    launch->order = memory_new((size_t)launch->n, sizeof(*launch->order));
    launch->rank_command = make_remote_command(options->remote_epkit, AGENT_RANK);
    launch->findings = json_array();
    make_id(launch->id);
    text_time(time(NULL), launch->began);
    launch->began_ns = launch->beat_ns = ep_now_ns();
    if (options->deadline_s)
        launch->deadline_ns = launch->began_ns + (uint64_t)options->deadline_s * 1000000000u;
    sigprocmask(SIG_BLOCK, &signals, NULL);
    launch->signals = signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK);
    return launch->signals < 0 ? ep_fail_errno(EP_E_SYSTEM, errno, "preparing for signals") : EP_OK;
}

/* --- from begin to end --- */

/* The text of a reason that belongs to no node. */
static const char *explain(const char *reason)
{
    static const char *const texts[][2] = {
        {"prepare", "the preparation failed"},
        {"checks", "the doctor has a serious finding"},
        {"mpirun", "mpirun failed"},
        {"log", "a log could not be written"},
        {"output", "its output could not be written"},
    };

    for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++)
        if (strcmp(reason, texts[i][0]) == 0)
            return texts[i][1];
    return reason;
}

static void conclude(const struct launch *launch, struct launch_result *result)
{
    const char *job = launch->options->job.name;
    double seconds = (double)(ep_now_ns() - launch->began_ns) / 1e9;
    int n_failed = 0, n_ranks = launch->n * launch->per_node;
    const struct node *first = launch->failed;
    struct text text = text_in(result->verdict, sizeof(result->verdict));
    char nodes[32];

    snprintf(nodes, sizeof(nodes), "%d node%s", launch->n, launch->n == 1 ? "" : "s");
    for (int i = 0; i < launch->n; i++) {
        n_failed += launch->nodes[i].failed_at != NULL;
        if (!first && launch->nodes[i].failed_at)
            first = &launch->nodes[i];
    }
    if (!result->is_connected && !launch->interrupted)
        text_add(&text, "%s was not started: %d of %d nodes did not answer; %s: %s: %s", job, n_failed, launch->n,
                 first ? first->name : "?", first ? first->failed_at : "?", first ? first->why : "?");
    else if (launch->interrupted)
        text_add(&text, "%s on %s was interrupted after %.1f s", job, nodes, seconds);
    else if (launch->reason && strcmp(launch->reason, "deadline") == 0)
        text_add(&text, "%s on %s did not end within %lld s and was ended", job, nodes,
                 (long long)launch->options->deadline_s);
    else if (launch->reason && first)
        text_add(&text, "%s failed on %s first: %s%s%s", job, first->name,
                 strcmp(first->failed_at, "program") == 0 ? "" : first->failed_at,
                 strcmp(first->failed_at, "program") == 0 ? "" : ": ", first->why);
    else if (launch->reason)
        text_add(&text, "%s on %s failed: %s", job, nodes, explain(launch->reason));
    else
        text_add(&text, "%s ran on %s with %d rank%s: all ended with status 0 (%.1f s)", job, nodes, n_ranks,
                 n_ranks == 1 ? "" : "s", seconds);
}

static void run(struct launch *launch, struct launch_result *result)
{
    ep_status status;

    folder_write(launch);
    result->is_connected = launch_connect(launch);
    if (launch->interrupted || launch->reason)
        return;
    if (!result->is_connected) {
        launch->code = LAUNCH_FAILED;
        launch->reason = "host-failed";
        for (int i = 0; i < launch->n; i++)
            if (launch->nodes[i].failed_at)
                launch_note(launch, "%s: %s: %s", launch->nodes[i].name, launch->nodes[i].failed_at,
                            launch->nodes[i].why);
        return;
    }
    status = launch_arrange(launch);
    if (status != EP_OK) {
        launch_fail(launch, NULL, LAUNCH_FAILED, "prepare");
        launch_note(launch, "%s", ep_last_error());
    }
    if (!launch->reason && !launch->interrupted && !launch_check(launch))
        launch_fail(launch, NULL, 3, "checks");
    if (!launch->reason && !launch->interrupted) {
        folder_write(launch);
        launch_work(launch);
    }
}

static void done(struct launch *launch)
{
    for (int i = 0; launch->nodes && i < launch->n; i++) {
        struct node *node = &launch->nodes[i];

        free(node->stream.text);
        json_decref(node->facts);
        json_decref(node->reply);
        json_decref(node->nics);
    }
    if (launch->log)
        fclose(launch->log);
    dir_close(launch->folder_fd);
    dir_close(launch->signals);
    json_decref(launch->findings);
    free(launch->queue);
    free(launch->rank_command);
    free(launch->agent_command);
    free(launch->remotes);
    free(launch->nodes);
    free(launch->order);
}

/* Hosts behind one address, at several ports, would have the same name and share one log. */
static void name_nodes(struct launch *launch)
{
    for (int i = 0; i < launch->n; i++)
        for (int k = 0; k < launch->n; k++) {
            struct node *node = &launch->nodes[i];

            if (i == k || strcasecmp(node->address, launch->nodes[k].address) != 0)
                continue;
            snprintf(node->numbered, sizeof(node->numbered), "%s-%s", node->address,
                     *node->host->port ? node->host->port : "ssh");
            node->name = node->numbered;
        }
}

/* The connections: all agents are started by one command. */
static void open_pool(struct launch *launch)
{
    char *agent = make_remote_command(launch->options->remote_epkit, AGENT_COMMAND);

    /* Login shells differ in their syntax of a condition. */
    launch->agent_command = memory_printf(launch->options->by_srun ? "%s" : "exec sh -c '%s'", agent);
    free(agent);
    launch->remotes = memory_new((size_t)launch->n, sizeof(*launch->remotes));
    prepare_how(launch);
    for (int i = 0; i < launch->n; i++) {
        struct node *node = &launch->nodes[i];

        node->launch = launch;
        node->host = &launch->options->hosts.list[i];
        node->name = node->address = host_name(node->host);
        node->remote = &launch->remotes[i];
        *node->remote = (struct remote){.host = node->host, .command = launch->agent_command, .context = node};
    }
    name_nodes(launch);
    remote_pool_init(&launch->how, launch->remotes, launch->n, &launch->pool);
}

/* A run whose logs are not whole does not count as complete. */
static void judge_logs(struct launch *launch)
{
    if (!launch->is_log_lost || launch->code || launch->reason)
        return;
    launch->code = LAUNCH_FAILED;
    launch->reason = "log";
}

ep_status launch_run(const struct launch_options *options, struct launch_result *ret_result)
{
    struct launch *launch = memory_new(1, sizeof(*launch));

    *ret_result = (struct launch_result){.launch = launch};
    *launch = (struct launch){.options = options, .n = options->hosts.n, .per_node = 1, .signals = -1, .folder_fd = -1};
    EP_TRY(prepare(launch));
    open_pool(launch);
    run(launch, ret_result);
    judge_logs(launch);
    launch_end(launch);
    text_time(time(NULL), launch->ended);
    if (launch->interrupted) {
        launch->code = 128 + launch->interrupted;
        launch->reason = "interrupted";
    }
    judge_logs(launch);
    folder_write(launch);
    conclude(launch, ret_result);
    launch_log(launch, ret_result->verdict);
    ret_result->document = folder_document(launch);
    ret_result->code = launch->code;
    ret_result->interrupted = launch->interrupted;
    return EP_OK;
}

void launch_result_done(struct launch_result *result)
{
    if (result->document)
        launch_tell(result->launch);
    if (result->launch) {
        remote_pool_done(&result->launch->pool);
        done(result->launch);
    }
    free(result->launch);
    json_decref(result->document);
    *result = (struct launch_result){0};
}
