/* SPDX-License-Identifier: Apache-2.0 */
/* agent.c - the loop of the agent: requests, output of the ranks, the lease. */
#include "agent_internal.h"

#include "base/clock.h"
#include "common/capture.h"
#include "common/clean.h"
#include "follow.h"
#include "frame.h"
#include "location.h"

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
#define FOLLOW_MS 3000 /* a pod may begin to wait for the end of a launch late */
#define INPUT_MAX (64u << 20)

static bool is_disconnected; /* the launcher does not read frames any more */

static bool agent_write(const char *data, size_t bytes)
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
    return !is_disconnected;
}

bool agent_send(char kind, int rank, const char *data, size_t bytes)
{
    char head[64];

    return agent_write(head, frame_head(kind, rank, bytes, head)) && agent_write(data, bytes);
}

bool agent_event(const char *name, json_t *object)
{
    char *text;
    bool is_sent;

    json_object_set_new(object, "event", json_string(name));
    text = json_dumps(object, JSON_COMPACT);
    json_decref(object);
    is_sent = text && agent_send('J', 0, text, strlen(text));
    free(text);
    return is_sent;
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
    agent->lease_s = job_number(request, "lease_s", AGENT_LEASE_S);
    if (agent_write_files(agent, json_object_get(request, "files")) != EP_OK) {
        send_error("disk", ep_last_error());
        return;
    }
    follow_send(FOLLOW_ALIVE, 0);
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

static agent_self own_main;

struct command {
    int argc;
    char **argv;
};

static void become_epkit(const void *context)
{
    const struct command *command = context;

    setenv("LC_ALL", "C", 1);
    exit(own_main(command->argc, command->argv));
}

/* A command that begins with "epkit" runs this executable, wherever it is installed: a fork is enough, without exec. */
static void do_ask(const json_t *request)
{
    json_t *words = json_object_get(request, "argv"), *word, *answer;
    struct command command = {.argc = (int)json_array_size(words)};
    struct capture capture = {.execute = become_epkit, .context = &command};
    size_t i;

    command.argv = calloc((size_t)command.argc + 1, sizeof(*command.argv));
    if (!command.argv)
        return;
    json_array_foreach(words, i, word)
    {
        command.argv[i] = (char *)json_string_value(word);
    }
    if (command.argc > 0 && strcmp(command.argv[0], "epkit") != 0)
        capture.argv = command.argv;
    if (command.argc > 0 &&
        capture_run(&capture, 1, 1, job_number(request, "timeout_s", 20) * INT64_C(1000), NULL, NULL) == 0) {
        answer = json_pack("{s:i, s:b}", "status", capture.start_error || capture.late ? -1 : capture.status, "late",
                           capture.late);
        json_object_set_new(answer, "output",
                            json_stringn(capture.output.text ? capture.output.text : "", capture.output.bytes));
        agent_event("answer", answer);
    }
    capture_done(&capture);
    free(command.argv);
}

static void do_run(struct agent *agent, json_t *request)
{
    json_decref(agent->spec);
    agent->spec = json_incref(request);
    if (agent_start_ranks(agent) != EP_OK) {
        bool is_missing = strstr(ep_last_error(), "is not installed") != NULL;

        send_error(is_missing ? "installation" : "start", ep_last_error());
    } else {
        agent_event("running", json_object());
    }
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

/*
 * Has the launcher repeated the request "end", as it does when its user interrupts it twice? No other request matters
 * by then, so the input is searched for the text and not parsed. The text may be split between two reads.
 */
static struct {
    char data[4096];
    size_t used; /* bytes at the beginning that may be the start of the text */
    bool is_found;
} repeated_end;

static void scan_repeated_end(size_t n)
{
    static const char words[] = "\"do\":\"end\"";
    size_t length = repeated_end.used + n, kept = sizeof(words) - 2;

    repeated_end.is_found = repeated_end.is_found || memmem(repeated_end.data, length, words, sizeof(words) - 1);
    repeated_end.used = length < kept ? length : kept;
    memmove(repeated_end.data, repeated_end.data + length - repeated_end.used, repeated_end.used);
}

/* Input that was already read after the current request, at the beginning of the buffer, counts as well. */
static void start_repeated_end(const struct agent *agent)
{
    size_t at = strlen(agent->input) + 1;

    repeated_end.used = 0;
    repeated_end.is_found = false;
    while (at < agent->input_used) {
        size_t n = agent->input_used - at, room = sizeof(repeated_end.data) - repeated_end.used;

        n = n < room ? n : room;
        memcpy(repeated_end.data + repeated_end.used, agent->input + at, n);
        at += n;
        scan_repeated_end(n);
    }
}

static bool is_end_repeated(void)
{
    struct pollfd input = {.fd = STDIN_FILENO, .events = POLLIN};

    while (!repeated_end.is_found && poll(&input, 1, 0) > 0) {
        ssize_t n =
            read(STDIN_FILENO, repeated_end.data + repeated_end.used, sizeof(repeated_end.data) - repeated_end.used);

        if (n <= 0)
            return false;
        scan_repeated_end((size_t)n);
    }
    return repeated_end.is_found;
}

static void do_end(struct agent *agent, const json_t *request)
{
    const char *lost = job_text(request, "launch", NULL);
    int left = 0, killed = 0, grace_s = job_number(request, "grace_s", GRACE_S);

    start_repeated_end(agent);
    if (lost)
        killed = mark_kill(lost, grace_s * 1000, is_end_repeated, &left);
    else if (may_have_processes(agent))
        killed = mark_kill(agent->id, grace_s * 1000, is_end_repeated, &left);
    /* The waiting process may have started only now: a script may launch one job after another. */
    if (json_object_get(request, "code"))
        for (uint64_t until_ns = ep_deadline_ns(FOLLOW_MS);
             !follow_send(FOLLOW_END, job_number(request, "code", 1)) && ep_now_ns() < until_ns;)
            poll(NULL, 0, 50);

    agent_reap(agent);
    agent_event("clean", json_pack("{s:i, s:i}", "killed", killed, "left", left));
    agent->is_ending = true;
}

static void handle_request(struct agent *agent, const char *line)
{
    json_t *request = json_loads(line, 0, NULL);
    const char *what = job_text(request, "do", "");

    agent->heard_ns = ep_now_ns();
    if (strcmp(what, "hello") == 0)
        do_hello(agent, request);
    else if (strcmp(what, "locate") == 0)
        do_locate(request);
    else if (strcmp(what, "ask") == 0)
        do_ask(request);
    else if (strcmp(what, "nics") == 0)
        agent_event("nics", json_pack("{s:o}", "nics", agent_nics()));
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
    static char data[65536]; /* not on the stack, which may be small */
    char *newline;
    ssize_t n = read(STDIN_FILENO, data, sizeof(data));

    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n <= 0 || agent->input_used + (size_t)n > INPUT_MAX) {
        agent->is_ending = true;
        return;
    }
    if (agent->input_used + (size_t)n + 1 > agent->input_capacity) {
        size_t capacity = 2 * agent->input_capacity + (size_t)n + 1;
        char *grown = realloc(agent->input, capacity);

        if (!grown) {
            agent->is_ending = true;
            return;
        }
        agent->input = grown;
        agent->input_capacity = capacity;
    }
    memcpy(agent->input + agent->input_used, data, (size_t)n);
    agent->input_used += (size_t)n;
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
        agent_event("beat", json_object());
        if (*agent->id)
            follow_send(FOLLOW_ALIVE, 0);
    }
    if (now_ns > agent->heard_ns + (uint64_t)agent->lease_s * 1000000000u || is_disconnected)
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

static void step(struct agent *agent, struct pollfd *polls, int signals)
{
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
    sigset_t signals;

    sigemptyset(&signals);
    sigaddset(&signals, SIGCHLD);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGINT);
    sigaddset(&signals, SIGHUP);
    sigprocmask(SIG_BLOCK, &signals, NULL);
    signal(SIGPIPE, SIG_IGN);
    return signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK);
}

int agent_main(agent_self self)
{
    struct agent agent = {.listener = -1, .lease_s = AGENT_LEASE_S, .heard_ns = ep_now_ns()};
    int signals = open_signals(), n_polls = 0, left;
    struct pollfd *polls = NULL;

    if (isatty(STDIN_FILENO) || signals < 0) {
        fprintf(stderr, "epkit: " AGENT_COMMAND "is internal: 'epkit launch' starts it on a node\n");
        return 2;
    }
    own_main = self;
    /* Daemons of the job become children of the agent, which reaps them. */
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    fcntl(STDIN_FILENO, F_SETFL, O_NONBLOCK);
    fcntl(STDOUT_FILENO, F_SETFL, O_NONBLOCK);
    agent_event("up", json_pack("{s:i}", "protocol", AGENT_PROTOCOL));
    while (!agent.is_ending) {
        if (3 + 3 * agent.n_ranks > n_polls) {
            struct pollfd *grown = realloc(polls, (size_t)(n_polls = 3 + 3 * agent.n_ranks) * sizeof(*polls));

            if (!grown)
                break;
            polls = grown;
        }
        step(&agent, polls, signals);
        keep_lease(&agent);
    }
    if (may_have_processes(&agent))
        mark_kill(agent.id, GRACE_S * 1000, NULL, &left);
    agent_free_ranks(&agent);
    agent_remove_files(&agent);
    json_decref(agent.spec);
    free(agent.input);
    free(polls);
    return 0;
}
