/* SPDX-License-Identifier: Apache-2.0 */
/* agent.c - the loop of the agent: requests, output of the ranks, the lease. */
#include "agent_internal.h"

#include "base/clock.h"
#include "common/capture.h"
#include "common/inherited.h"
#include "common/text.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#define WRITE_MS 30000 /* a launcher that reads nothing for this long is considered dead */
#define TICK_MS 500
#define GRACE_S 5
#define INPUT_MAX (64u << 20)
#define PARTS_NS UINT64_C(500000000)
#define RESERVE_BYTES (256u << 10) /* for the end of an agent that has no memory */

static bool is_disconnected; /* the launcher does not read any more */
static void *reserve;

void agent_no_memory(void)
{
    static const char text[] = "epkit: no memory for the agent on this node\n";

    free(reserve);
    reserve = NULL;
    if (!is_disconnected)
        (void)!write(STDERR_FILENO, text, sizeof(text) - 1);
    is_disconnected = true;
}

static void agent_write(const char *data, size_t bytes)
{
    struct pollfd ready = {.fd = STDOUT_FILENO, .events = POLLOUT};

    while (bytes > 0 && !is_disconnected) {
        ssize_t n = write(STDOUT_FILENO, data, bytes);

        if (n > 0) {
            data += n;
            bytes -= (size_t)n;
        } else if (n < 0 && errno == EAGAIN) {
            is_disconnected = poll(&ready, 1, WRITE_MS) == 0;
        } else if (errno != EINTR) {
            is_disconnected = true;
        }
    }
}

void agent_send_line(char kind, int rank, const char *text, size_t bytes)
{
    static char line[LINE_OUTPUT_MAX + 32];
    size_t n = (size_t)snprintf(line, sizeof(line), "%c%c%d ", LINE_MARK, kind, rank);

    memcpy(line + n, text, bytes);
    line[n + bytes] = '\n';
    agent_write(line, n + bytes + 1);
}

void agent_event(const char *name, json_t *object)
{
    static const char begin[] = {LINE_MARK, LINE_EVENT, '0', ' '};
    char *text;

    json_object_set_new(object, "event", json_string(name));
    text = json_dumps(object, JSON_COMPACT);
    json_decref(object);
    agent_write(begin, sizeof(begin));
    agent_write(text, strlen(text));
    agent_write("\n", 1);
    free(text);
}

void agent_send_part(int rank, const char *text, size_t bytes, bool is_new)
{
    static uint64_t sent_ns;
    uint64_t now_ns = ep_now_ns();

    if (!is_new && now_ns - sent_ns < PARTS_NS)
        return;
    sent_ns = now_ns;
    agent_send_line(LINE_PART, rank, text, bytes < LINE_PART_MAX ? bytes : LINE_PART_MAX);
}

static void send_error(const char *layer, const char *text)
{
    char clean[AGENT_TEXT_BYTES];

    text_clean(text, clean, sizeof(clean));
    agent_event("error", json_pack("{s:s, s:s}", "layer", layer, "text", clean));
}

/* --- requests --- */

static void do_hello(struct agent *agent, const json_t *request)
{
    json_t *facts;

    snprintf(agent->id, sizeof(agent->id), "%s", job_text(request, "launch", ""));
    if (agent_write_files(agent, json_object_get(request, "files")) != EP_OK) {
        send_error("disk", ep_last_error());
        return;
    }
    agent->is_followed = json_is_true(json_object_get(request, "followed"));
    if (agent->is_followed)
        follow_send(FOLLOW_ALIVE);
    facts = agent_facts();
    json_object_set_new(facts, "dir", json_string(agent->folder.path ? agent->folder.path : ""));
    agent_event("hello", facts);
}

static void do_locate(const json_t *request)
{
    char location[LOCATION_BYTES], why[AGENT_TEXT_BYTES], clean[AGENT_TEXT_BYTES];
    bool is_found = location_find(request, location, why, sizeof(why));

    text_clean(why, clean, sizeof(clean));
    agent_event("location", json_pack("{s:s?, s:s?}", "location", is_found ? location : NULL, "why",
                                      is_found || !*clean ? NULL : clean));
}

static void do_doctor(const json_t *request)
{
    struct job_rank rank;
    struct capture capture = {.execute = job_doctor_execute, .context = &rank};

    /* A script that fails is reported when the job starts. */
    if (job_environment_make(request, &rank) != EP_OK)
        rank = (struct job_rank){.spec = request};
    capture_run(&capture, 1, 1, job_number(request, "timeout_s", 20) * INT64_C(1000), NULL, NULL);
    agent_event("doctor",
                json_pack("{s:o?}", "output",
                          json_stringn(capture.output.text ? capture.output.text : "", capture.output.bytes)));
    capture_done(&capture);
    free(rank.sourced);
}

static void do_run(struct agent *agent, json_t *request)
{
    ep_status status;

    json_decref(agent->spec);
    agent->spec = json_incref(request);
    status = agent_start_ranks(agent);
    if (status == EP_OK)
        agent_event("run", json_object());
    else
        send_error("start", ep_last_error());
}

/*
 * The descendants of the agent's own ranks become children of the agent at the latest when their parent ends: without
 * children nothing is left. Ranks of mpirun are children of mpirun's daemon.
 */
static bool may_have_processes(const struct agent *agent)
{
    if (!*agent->id)
        return false;
    return agent->listener >= 0 || waitid(P_ALL, 0, &(siginfo_t){0}, WEXITED | WNOHANG | WNOWAIT) == 0 ||
           errno != ECHILD;
}

/* Reads input once, into the buffer. False: there is none. */
static bool fill_input(struct agent *agent)
{
    static char data[65536]; /* not on the stack, which may be small */
    ssize_t n = read(STDIN_FILENO, data, sizeof(data));
    char *grown;

    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return false;
    grown = n > 0 && agent->input_used + (size_t)n <= INPUT_MAX ? realloc(agent->input, agent->input_used + (size_t)n)
                                                                : NULL;
    agent->is_ending |= !grown;
    if (!grown)
        return false;
    agent->input = grown;
    memcpy(agent->input + agent->input_used, data, (size_t)n);
    agent->input_used += (size_t)n;
    return true;
}

/*
 * Has the launcher repeated the request "end", as it does when its user interrupts it twice? No other request matters
 * by then, so what follows the first one is searched for the text and not parsed.
 */
static bool is_end_repeated(void *context)
{
    static const char words[] = "\"do\":\"end\"";
    struct agent *agent = context;
    struct pollfd input = {.fd = STDIN_FILENO, .events = POLLIN};
    size_t first = strlen(agent->input) + 1;

    while (poll(&input, 1, 0) > 0 && fill_input(agent))
        ;
    return memmem(agent->input + first, agent->input_used - first, words, sizeof(words) - 1);
}

static void do_end(struct agent *agent, const json_t *request)
{
    const char *lost = job_text(request, "launch", NULL);
    int left = 0, killed = 0, grace_s = job_number(request, "grace_s", GRACE_S);

    if (lost)
        killed = mark_kill(lost, grace_s * 1000, is_end_repeated, agent, &left);
    else if (may_have_processes(agent))
        killed = mark_kill(agent->id, grace_s * 1000, is_end_repeated, agent, &left);
    agent_reap(agent);
    agent_free_ranks(agent);
    agent_event("clean", json_pack("{s:i, s:i}", "killed", killed, "left", left));
    /* A repeated request has none. */
    if (!agent->code)
        agent->code = json_incref(json_object_get(request, "code"));
    agent->is_ending = !agent->code;
}

/* The launcher has written everything. */
static void tell_follower(struct agent *agent)
{
    uint64_t until_ns = ep_deadline_ns(FOLLOW_TELL_MS);

    /* The waiting process may have started only now: a script may launch one job after another. */
    while (agent->code && !follow_send((int)json_integer_value(agent->code)) && ep_now_ns() < until_ns)
        poll(NULL, 0, 50);
    json_decref(agent->code);
}

static void handle_request(struct agent *agent, const char *line)
{
    json_t *request = json_loads(line, 0, NULL);
    const char *what = job_text(request, "do", "");

    agent->heard_ns = ep_now_ns();
    if (!request)
        agent_no_memory();
    else if (strcmp(what, "hello") == 0)
        do_hello(agent, request);
    else if (strcmp(what, "location") == 0)
        do_locate(request);
    else if (strcmp(what, "doctor") == 0)
        do_doctor(request);
    else if (strcmp(what, "nics") == 0)
        agent_event("nics", json_pack("{s:o}", "nics", agent_nics(agent->nics)));
    else if (strcmp(what, "run") == 0)
        do_run(agent, request);
    else if (strcmp(what, "end") == 0)
        do_end(agent, request);
    /* A program that the agent ran may have ended meanwhile, or a rank without notice. */
    agent_reap(agent);
    json_decref(request);
}

static void read_input(struct agent *agent)
{
    char *newline;

    fill_input(agent);
    while (!agent->is_ending && (newline = memchr(agent->input, '\n', agent->input_used))) {
        size_t length = (size_t)(newline - agent->input) + 1;

        *newline = '\0';
        handle_request(agent, agent->input);
        memmove(agent->input, agent->input + length, agent->input_used - length);
        agent->input_used -= length;
    }
}

/* --- the loop --- */

static void keep_lease(struct agent *agent)
{
    uint64_t now_ns = ep_now_ns();

    if (now_ns > agent->sent_ns + (uint64_t)AGENT_HEARTBEAT_MS * 1000000u) {
        agent->sent_ns = now_ns;
        agent_event("heartbeat", json_object());
        if (agent->is_followed)
            follow_send(FOLLOW_ALIVE);
    }
    if (now_ns > agent->heard_ns + AGENT_LEASE_S * UINT64_C(1000000000) || is_disconnected)
        agent->is_ending = true;
}

static void handle_signals(struct agent *agent, int fd)
{
    struct signalfd_siginfo info;

    while (read(fd, &info, sizeof(info)) == sizeof(info))
        if (info.ssi_signo != SIGCHLD)
            agent->is_ending = true;
    agent_reap(agent);
}

static void step(struct agent *agent, int signals)
{
    static struct pollfd polls[3 + 3 * AGENT_RANKS_MAX];
    int n = 0;

    polls[n++] = (struct pollfd){.fd = STDIN_FILENO, .events = POLLIN};
    polls[n++] = (struct pollfd){.fd = signals, .events = POLLIN};
    polls[n++] = (struct pollfd){.fd = agent->listener, .events = POLLIN};
    for (int i = 0; i < agent->n_ranks; i++) {
        polls[n++] = (struct pollfd){.fd = agent->ranks[i].fds[0], .events = POLLIN};
        polls[n++] = (struct pollfd){.fd = agent->ranks[i].fds[1], .events = POLLIN};
        polls[n++] = (struct pollfd){.fd = agent->ranks[i].control, .events = POLLIN};
    }
    if (poll(polls, (nfds_t)n, TICK_MS) < 0)
        return;
    for (int i = 0; i < agent->n_ranks; i++) {
        const struct pollfd *own = polls + 3 + 3 * i;

        for (int which = 0; which < 2; which++)
            if (own[which].revents && own[which].fd == agent->ranks[i].fds[which])
                agent_read_rank(&agent->ranks[i], which, 1);
        if (own[2].revents && own[2].fd == agent->ranks[i].control)
            agent_read_control(&agent->ranks[i]);
    }
    if (polls[1].revents)
        handle_signals(agent, signals);
    if (polls[2].revents)
        agent_accept(agent);
    if (polls[0].revents)
        read_input(agent);
}

static int open_signals(void)
{
    const sigset_t signals = SIGNALS(SIGCHLD, SIGTERM, SIGINT, SIGHUP);

    sigprocmask(SIG_BLOCK, &signals, NULL);
    signal(SIGPIPE, SIG_IGN);
    return signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK);
}

int agent_main(void)
{
    struct agent agent = {.listener = -1, .heard_ns = ep_now_ns(), .nics = json_object()};
    int signals = open_signals(), left;

    reserve = malloc(RESERVE_BYTES);
    if (isatty(STDIN_FILENO) || signals < 0) {
        fprintf(stderr, "epkit: " AGENT_COMMAND "is internal: 'epkit launch' starts it on a node\n");
        return 2;
    }
    /* Daemons of the job become children of the agent, which reaps them. */
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    fcntl(STDIN_FILENO, F_SETFL, O_NONBLOCK);
    fcntl(STDOUT_FILENO, F_SETFL, O_NONBLOCK);
    /* A greeting may have no end. */
    agent_write("\n", 1);
    agent_event("up", json_object());
    while (!agent.is_ending) {
        step(&agent, signals);
        keep_lease(&agent);
    }
    if (may_have_processes(&agent))
        mark_kill(agent.id, GRACE_S * 1000, NULL, NULL, &left);
    agent_free_ranks(&agent);
    agent_remove_files(&agent);
    tell_follower(&agent);
    json_decref(agent.spec);
    json_decref(agent.nics);
    free(agent.input);
    free(reserve);
    return 0;
}
