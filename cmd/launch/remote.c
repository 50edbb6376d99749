/* SPDX-License-Identifier: Apache-2.0 */
#include "remote.h"

#include "base/clock.h"
#include "common/memory.h"
#include "common/output.h"
#include "common/text.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define MAX_WORDS 64
#define MAX_EXTRA 16
#define CLOSED_POLL_MS 50 /* poll interval for the end of a program whose descendants hold its pipes */
#define READS_AT_END 64
#define QUEUE_MAX (64u << 20)

/* --- which layer --- */

static const char *layer_name(enum remote_layer layer)
{
    static const char *const names[] = {"timeout", "DNS", "TCP", "banner", "authentication", "command", "command"};

    return names[layer];
}

static void set_layer(struct remote *remote, enum remote_layer layer)
{
    if (remote->layer >= layer)
        return;
    if (remote->layer < REMOTE_COMMAND && layer >= REMOTE_COMMAND)
        remote->pool->n_connecting--;
    remote->layer = layer;
    remote->layer_ns = ep_now_ns();
    /*
     * A banner may contain any text, and an error in a start-up file of the shell did not prevent the host from
     * answering: neither explains why the connection ends later.
     */
    if (layer >= REMOTE_COMMAND) {
        remote->last_line_layer = NULL;
        remote->last_line[0] = '\0';
    }
}

void remote_set_up(struct remote *remote)
{
    set_layer(remote, REMOTE_UP);
}

/* Parses "HOST:PORT as 'USER'": HOST is what ssh's configuration (HostName) makes of an alias. */
static void parse_host(struct remote *remote, const char *text)
{
    const char *end = strstr(text, " as '");

    while (end && end > text && *end != ':')
        end--;
    if (end && end > text && (size_t)(end - text) < sizeof(remote->host_name))
        snprintf(remote->host_name, sizeof(remote->host_name), "%.*s", (int)(end - text), text);
}

/* Messages of OpenSSH with LogLevel DEBUG1, from reading its configuration to the start of the command. */
static void follow(struct remote *remote, const char *line)
{
    static const struct {
        const char *text;
        enum remote_layer layer;
    } steps[] = {
        {"Reading configuration data", REMOTE_NAME},      {"Connecting to ", REMOTE_TCP},
        {"Executing proxy command", REMOTE_BANNER}, /* the proxy resolves the name and connects */
        {"Connection established", REMOTE_BANNER},        {"Remote protocol version", REMOTE_LOGIN},
        {"Entering interactive session", REMOTE_COMMAND}, {"mux_client_request_session", REMOTE_COMMAND},
    };

    if (strncmp(line, "Authenticating to ", 18) == 0)
        parse_host(remote, line + 18);
    for (size_t i = 0; i < sizeof(steps) / sizeof(steps[0]); i++)
        if (strncmp(line, steps[i].text, strlen(steps[i].text)) == 0)
            set_layer(remote, steps[i].layer);
}

/* Messages of ssh, getaddrinfo() and the remote shell, and the layer that each is about. */
static const char *layer_of(const char *line)
{
    static const struct {
        const char *text, *layer;
    } words[] = {
        {"Could not resolve hostname", "DNS"},
        {"Name or service not known", "DNS"},
        {"Temporary failure in name resolution", "DNS"},
        {"Connection refused", "TCP"},
        {"No route to host", "TCP"},
        {"Network is unreachable", "TCP"},
        {"kex_exchange_identification", "banner"},
        {"Connection reset", "TCP"},
        {"Connection closed by", "TCP"},
        {"Connection timed out", "timeout"},
        {"Operation timed out", "timeout"},
        {"Permission denied (", "authentication"},
        {"Permission denied,", "authentication"},
        {"Host key verification failed", "authentication"},
        {"REMOTE HOST IDENTIFICATION HAS CHANGED", "authentication"},
        {"Too many authentication failures", "authentication"},
        {"command not found", "epkit"},
        {"epkit: not found", "epkit"},
        {"Exec format error", "epkit"},
        {"version `GLIBC_", "epkit"},
        {"error while loading shared libraries", "epkit"},
        {"unknown command '", "version"},
        {"unknown verb '", "version"}, /* earlier versions */
        {"unknown option", "version"},
    };

    for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++)
        if (strstr(line, words[i].text))
            return words[i].layer;
    return NULL;
}

static const char key_changed[] = "its host key has changed (REMOTE HOST IDENTIFICATION HAS "
                                  "CHANGED): if the host was reinstalled, remove the old key with ssh-keygen -R";

/* By its own decision, if it has got as far as the login. */
bool remote_is_ended_by_host(const char *message)
{
    return strstr(message, "Connection closed by") || strstr(message, "Connection reset");
}

/* Lines that go to standard error with debugging enabled, and warnings: no reason why a connection ends. */
static bool is_noise(const char *line)
{
    return !*line || text_begins_any(line, TEXTS("Authenticated to ", "Transferred: ", "Bytes per second: ", "OpenSSH_",
                                                 "Warning: Permanently added ",
                                                 /* OpenSSH 10.1 */
                                                 "** WARNING: connection is not using a post-quantum",
                                                 "** This session may be vulnerable to",
                                                 "** The server may need to be upgraded"));
}

/* At the login, what the host wrote before it closed the connection is why, as by pam_nologin and pam_slurm_adopt. */
static void keep_closing(struct remote *remote, const char *line)
{
    char banner[sizeof(remote->last_line)];

    memcpy(banner, remote->last_line, sizeof(banner));
    text_clean(line, remote->last_line, sizeof(remote->last_line));
    if (*banner && strlen(remote->last_line) < sizeof(remote->last_line) / 2)
        text_append(remote->last_line, sizeof(remote->last_line), "; before that: %.*s",
                    (int)sizeof(remote->last_line) / 2 - 20, banner);
}

static void handle_error_line(struct remote *remote)
{
    const char *line = remote->error_line, *layer;
    bool is_login;

    remote->error_line[strcspn(line, "\r")] = '\0';
    if (strncmp(line, "debug1: ", 8) == 0) {
        follow(remote, line + 8);
        return;
    }
    if (is_noise(line))
        return;
    layer = layer_of(line);
    /* During the login the host may show any banner; of ssh's own messages only these can follow. */
    is_login = remote->layer == REMOTE_LOGIN;
    if (is_login && layer && strcmp(layer, "authentication") != 0 && !remote_is_ended_by_host(line))
        layer = NULL;
    /* Once the command has answered, the network lost the connection; before, the step that was reached counts. */
    if (layer && strcmp(layer, "TCP") == 0 && remote_is_ended_by_host(line) && remote->layer > REMOTE_TCP &&
        remote->layer < REMOTE_UP && !remote->last_line_layer) {
        layer = layer_name(remote->layer);
        if (is_login) {
            remote->last_line_layer = layer;
            keep_closing(remote, line);
            return;
        }
    }
    if (layer && strstr(line, "REMOTE HOST IDENTIFICATION HAS CHANGED"))
        line = key_changed;
    if (!remote->last_line_layer || (layer && is_login && strcmp(remote->last_line, key_changed) != 0)) {
        remote->last_line_layer = layer;
        text_clean(line, remote->last_line, sizeof(remote->last_line));
    }
}

static void handle_error(void *context, const char *data, size_t bytes)
{
    struct remote *remote = context;

    for (size_t i = 0; i < bytes; i++) {
        if (data[i] == '\n') {
            remote->error_line[remote->error_used] = '\0';
            handle_error_line(remote);
            remote->error_used = 0;
        } else if (remote->error_used + 1 < sizeof(remote->error_line)) {
            remote->error_line[remote->error_used++] = data[i];
        }
    }
}

/* --- starting and ending --- */

static void start(struct remote *remote)
{
    const struct remote_pool *pool = remote->pool;
    const struct remote_how *how = pool->how;
    const char *argv[MAX_WORDS + 16], *port = *remote->host->port ? remote->host->port : how->port;
    char words[1024], *rest = words, *word;
    int n = 0;

    snprintf(words, sizeof(words), "%s", how->ssh);
    while ((word = strsep(&rest, " \t")))
        if (*word && n < MAX_WORDS / 2)
            argv[n++] = word;
    for (int i = 0; how->options && how->options[i] && n < MAX_WORDS; i++)
        argv[n++] = how->options[i];
    if (port) {
        argv[n++] = "-p";
        argv[n++] = port;
    }
    argv[n++] = remote->host->target;
    if (!how->has_shell) {
        argv[n++] = "sh";
        argv[n++] = "-c";
    }
    argv[n++] = remote->command;
    argv[n] = NULL;
    remote->is_started = true;
    remote->started_ns = remote->layer_ns = ep_now_ns();
    remote->start_error = process_fork(process_execute_bare, argv, how->has_input, &remote->process);
}

static void end(struct remote *remote)
{
    process_close(&remote->process);
    remote->process.pid = 0;
    if (remote->layer < REMOTE_COMMAND)
        remote->pool->n_connecting--;
    remote->is_ended = true;
    remote->pool->n_ended++;
    free(remote->queue);
    remote->queue = NULL;
    remote->queue_bytes = remote->queue_sent = remote->queue_capacity = 0;
    remote->pool->how->on_end(remote);
}

/* Records why it ended by itself, if not with status 0. */
static void explain(struct remote *remote)
{
    int code = WIFEXITED(remote->status) ? WEXITSTATUS(remote->status) : -1;

    if (remote->error_used) {
        remote->error_line[remote->error_used] = '\0';
        handle_error_line(remote);
    }
    if (code == 0)
        return;
    if (remote->last_line_layer)
        remote->failed_at = remote->last_line_layer;
    else if (code == 127 || code == 126)
        remote->failed_at = "epkit";
    else if (code == 255)
        remote->failed_at = remote->layer > REMOTE_NAME ? layer_name(remote->layer) : "ssh";
    else
        remote->failed_at = "command";
    if (*remote->last_line)
        snprintf(remote->why, sizeof(remote->why), "%s", remote->last_line);
    else if (code < 0)
        snprintf(remote->why, sizeof(remote->why), "ssh was killed by signal %d", WTERMSIG(remote->status));
    else
        snprintf(remote->why, sizeof(remote->why), "exit status %d", code);
}

void remote_fail(struct remote *remote, const char *layer, const char *why)
{
    if (remote->is_ended)
        return;
    process_kill(&remote->process);
    remote->failed_at = layer;
    snprintf(remote->why, sizeof(remote->why), "%s", why);
    end(remote);
}

/* A prompt has no newline. */
static const char *last_message(struct remote *remote)
{
    remote->error_line[remote->error_used] = '\0';
    if (remote->error_used && !remote->last_line_layer && strncmp(remote->error_line, "debug", 5) != 0)
        text_clean(remote->error_line, remote->last_line, sizeof(remote->last_line));
    return remote->last_line;
}

static void check_deadlines(struct remote *remote, uint64_t now_ns)
{
    const struct remote_how *how = remote->pool->how;
    /* A program that reports no layers may have reached the command. */
    bool is_command = remote->layer == REMOTE_COMMAND || remote->layer == REMOTE_START;
    int64_t layer_ms = is_command && how->command_timeout_ms ? how->command_timeout_ms : how->layer_timeout_ms;
    char why[400];
    int n;

    if (remote->layer < REMOTE_UP && now_ns > remote->layer_ns + (uint64_t)layer_ms * 1000000u) {
        n = snprintf(why, sizeof(why), "%s within %g s",
                     remote->layer == REMOTE_NAME     ? "the name did not resolve"
                     : remote->layer == REMOTE_TCP    ? "no TCP connection"
                     : remote->layer == REMOTE_BANNER ? "TCP is connected, but the ssh server sent no banner"
                     : remote->layer == REMOTE_LOGIN  ? "the ssh server sent its banner, but did not complete the login"
                                                      : "no answer",
                     (double)layer_ms / 1000);
        if (*last_message(remote))
            snprintf(why + n, sizeof(why) - (size_t)n, "; it said: %.250s", remote->last_line);
        remote->late = true;
        remote_fail(remote, layer_name(remote->layer), why);
    } else if (how->timeout_ms && now_ns > remote->started_ns + (uint64_t)how->timeout_ms * 1000000u) {
        snprintf(why, sizeof(why), "no answer within %g s", (double)how->timeout_ms / 1000);
        remote->late = true;
        remote_fail(remote, remote->layer < REMOTE_UP ? layer_name(remote->layer) : "timeout", why);
    }
}

/* --- one step --- */

static void on_output(void *context, const char *data, size_t bytes)
{
    struct remote *remote = context;

    remote->pool->how->on_output(remote, data, bytes);
}

static void read_pipe(struct remote *remote, bool is_error, int reads)
{
    if (is_error)
        process_read(&remote->process.err, reads, handle_error, remote);
    else
        process_read(&remote->process.out, reads, on_output, remote);
}

static void write_queue(struct remote *remote)
{
    ssize_t n = write(remote->process.in, remote->queue + remote->queue_sent, remote->queue_bytes - remote->queue_sent);

    if (n < 0 && errno != EAGAIN && errno != EINTR) {
        /* Its end is found by other means. */
        process_close_fd(&remote->process.in);
        remote->queue_bytes = remote->queue_sent = 0;
    } else if (n > 0) {
        remote->queue_sent += (size_t)n;
    }
    if (remote->queue_sent == remote->queue_bytes)
        remote->queue_bytes = remote->queue_sent = 0;
}

int remote_send(struct remote *remote, const char *data, size_t bytes)
{
    if (remote->is_ended || !remote->is_started || remote->process.in < 0)
        return -1;
    if (remote->queue_bytes + bytes > remote->queue_capacity) {
        size_t capacity = remote->queue_bytes + bytes + 4096;

        if (capacity > QUEUE_MAX)
            return -1;
        remote->queue = memory_grow(remote->queue, capacity);
        remote->queue_capacity = capacity;
    }
    memcpy(remote->queue + remote->queue_bytes, data, bytes);
    remote->queue_bytes += bytes;
    write_queue(remote);
    return 0;
}

/* Checks whether it has ended. Its output is read first, unless reading is paused. */
static void check_end(struct remote *remote)
{
    struct remote_pool *pool = remote->pool;

    if (pool->is_paused && remote->process.out >= 0)
        return;
    if (process_wait(remote->process.pid, WNOHANG, &remote->status) == 0)
        return;
    read_pipe(remote, false, READS_AT_END);
    read_pipe(remote, true, READS_AT_END);
    if (remote->is_ended)
        return;
    explain(remote);
    end(remote);
}

static void start_more(struct remote_pool *pool)
{
    for (int i = 0; i < pool->n && pool->n_started < pool->n && pool->n_connecting < pool->how->width; i++) {
        struct remote *remote = &pool->remotes[i];

        if (remote->is_started)
            continue;
        pool->n_started++;
        pool->n_connecting++;
        start(remote);
        if (remote->start_error) {
            char program[200];

            remote->failed_at = "ssh";
            text_clean(pool->how->ssh, program, sizeof(program));
            snprintf(remote->why, sizeof(remote->why), "%s: %s", program, strerror(remote->start_error));
            end(remote);
        }
    }
}

void remote_pool_step(struct remote_pool *pool, int timeout_ms, struct pollfd *extra, int n_extra)
{
    struct pollfd *polls = pool->polls;
    int n = 3 * pool->n;
    uint64_t now_ns;
    bool is_tick;

    start_more(pool);
    /* Pipes of a connection that does not run are -1, which poll() ignores. */
    for (int i = 0; i < pool->n; i++) {
        const struct remote *remote = &pool->remotes[i];

        polls[3 * i] = (struct pollfd){.fd = pool->is_paused ? -1 : remote->process.out, .events = POLLIN};
        polls[3 * i + 1] = (struct pollfd){.fd = remote->process.err, .events = POLLIN};
        polls[3 * i + 2] = (struct pollfd){.fd = remote->queue_bytes ? remote->process.in : -1, .events = POLLOUT};
    }
    if (n_extra)
        memcpy(polls + n, extra, (size_t)n_extra * sizeof(*extra));
    if (timeout_ms > CLOSED_POLL_MS)
        timeout_ms = CLOSED_POLL_MS;
    if (poll(polls, (nfds_t)n + (nfds_t)n_extra, timeout_ms) < 0)
        for (int i = 0; i < n + n_extra; i++)
            polls[i].revents = 0;
    if (n_extra)
        memcpy(extra, polls + n, (size_t)n_extra * sizeof(*extra));
    now_ns = ep_now_ns();
    is_tick = now_ns > pool->looked_ns + (uint64_t)CLOSED_POLL_MS * 1000000u;
    if (is_tick)
        pool->looked_ns = now_ns;
    for (int i = 0; i < n; i++) {
        struct remote *remote = &pool->remotes[i / 3];

        if (!polls[i].revents || remote->is_ended)
            continue;
        if (i % 3 == 2)
            write_queue(remote);
        else
            read_pipe(remote, i % 3 == 1, 1);
        if (!remote->is_ended && remote->process.out < 0 && remote->process.err < 0)
            check_end(remote);
    }
    for (int i = 0; is_tick && i < pool->n; i++) {
        struct remote *remote = &pool->remotes[i];

        if (remote->is_started && !remote->is_ended)
            check_end(remote);
        if (remote->is_started && !remote->is_ended)
            check_deadlines(remote, now_ns);
    }
}

void remote_pool_init(const struct remote_how *how, struct remote *remotes, int n, struct remote_pool *ret_pool)
{
    *ret_pool = (struct remote_pool){.how = how, .n = n, .remotes = remotes};
    ret_pool->polls = memory_new((size_t)n * 3 + MAX_EXTRA, sizeof(*ret_pool->polls));
    for (int i = 0; i < n; i++) {
        remotes[i].pool = ret_pool;
        remotes[i].process = (struct process){.in = -1, .out = -1, .err = -1};
    }
}

void remote_reset(struct remote *remote)
{
    struct remote fresh = {.host = remote->host, .command = remote->command, .context = remote->context};

    if (!remote->is_ended)
        return;
    fresh.pool = remote->pool;
    fresh.process = (struct process){.in = -1, .out = -1, .err = -1};
    remote->pool->n_started--;
    remote->pool->n_ended--;
    *remote = fresh;
}

void remote_pool_done(struct remote_pool *pool)
{
    for (int i = 0; i < pool->n; i++) {
        process_kill(&pool->remotes[i].process);
        free(pool->remotes[i].queue);
        pool->remotes[i].queue = NULL;
    }
    free(pool->polls);
    *pool = (struct remote_pool){0};
}

void remote_print_advice(const json_t *rows, const char *key, bool for_doctor)
{
    static const struct {
        const char *layer, *text, *doctor; /* doctor: for 'epkit doctor --hosts'; NULL: the same */
    } advice[] = {
        {"DNS", "is the name right? 'getent hosts NAME' shows what is known here", NULL},
        {"TCP",
         "is the host up, and does its sshd listen on that port? --port N chooses another, --port 0 that of ssh's "
         "configuration",
         "is the host up, and does its sshd listen on that port? --port N chooses another"},
        {"banner", "another program listens there, or sshd accepts no more connections (MaxStartups)", NULL},
        {"authentication",
         "ssh must log in without a prompt: 'ssh -o BatchMode=yes NODE true' shows why it does not; --connect-timeout "
         "gives slow nodes more time",
         "ssh must log in without a prompt: 'ssh -o BatchMode=yes NODE true' shows why it does not; --timeout gives "
         "slow nodes more time"},
        {"command", "'ssh NODE epkit version' shows what happens there", NULL},
        {"answer", "'ssh NODE epkit version' shows what happens there",
         "'ssh NODE epkit doctor --json' shows what happens there"},
        {"timeout", "'ssh NODE epkit version' shows what happens there; --connect-timeout gives slow nodes more time",
         "'ssh NODE epkit doctor --json' shows what happens there; --timeout gives slow nodes more time"},
        {"ssh", "'ssh -v NODE true' shows where it fails; --ssh and EPKIT_SSH choose the program", NULL},
        {"epkit", "install epkit there in PATH, or give its path: --remote-epkit FILE",
         "install epkit there in PATH, or give its path: --remote-command '/PATH/epkit doctor --json'"},
        {"version", "install the same version on all nodes, or give its path: --remote-epkit FILE",
         "install the same version on all nodes"},
        {"disk", "free space there, or set TMPDIR to another folder there", NULL},
    };

    for (size_t i = 0; i < COUNT(advice); i++)
        for (size_t k = 0; k < json_array_size(rows); k++)
            if (strcmp(json_string_value(json_object_get(json_array_get(rows, k), key)), advice[i].layer) == 0) {
                out_line("  %s: %s", advice[i].layer,
                         for_doctor && advice[i].doctor ? advice[i].doctor : advice[i].text);
                break;
            }
}
