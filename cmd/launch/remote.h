/* SPDX-License-Identifier: Apache-2.0 */
/*
 * remote.h - runs a command on many hosts concurrently over ssh, and tracks the progress of each connection.
 *
 * ssh is run with the user's configuration. Its debugging output shows which layer a connection has reached: the name,
 * TCP, the banner of the server, authentication, the command. Each layer has a deadline, so a host that stops answering
 * is reported with the layer at which it stopped. A program other than OpenSSH shows no layers; then only its last
 * message counts.
 */
#ifndef EP_LAUNCH_REMOTE_H
#define EP_LAUNCH_REMOTE_H

#include "common/child.h"
#include "hosts.h"

#include <jansson.h>
#include <poll.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum remote_layer {
    REMOTE_START, /* ssh has been started and has written nothing yet */
    REMOTE_NAME,
    REMOTE_TCP,
    REMOTE_BANNER,
    REMOTE_LOGIN,
    REMOTE_COMMAND, /* logged in: the command has not answered yet */
    REMOTE_UP       /* set by remote_set_up(): deadlines of layers do not apply any more */
};

struct remote;
struct remote_pool;

struct remote_how {
    const char *ssh;            /* the program and its options, separated by spaces */
    const char *const *options; /* more arguments, after the program's; NULL-terminated; may be NULL */
    const char *port;           /* for hosts without a port; NULL: that of ssh's configuration */
    int64_t layer_timeout_ms;   /* of each layer */
    int64_t command_timeout_ms; /* of the command's first output; 0: layer_timeout_ms */
    int64_t timeout_ms;         /* of the whole connection; 0: none */
    int width;                  /* connections that are set up concurrently */
    bool has_shell;             /* the host runs the command in a shell, as sshd does; else sh is started for it */
    bool has_input;             /* keep standard input open for remote_send() */
    void (*on_output)(struct remote *remote, const char *data, size_t bytes); /* standard output */
    void (*on_end)(
        struct remote *remote); /* called when it has ended, could not be started, or was killed at a deadline */
};

struct remote {
    /* The caller's, set before remote_pool_init(): */
    const struct host *host;
    const char *command; /* command line for the shell of the host */
    void *context;

    enum remote_layer layer;
    uint64_t started_ns, layer_ns;
    char host_name[256]; /* what ssh's configuration makes of the host's name; "" until ssh has reported it */
    struct process process;
    bool is_started, is_ended;

    /* After the end: */
    int start_error; /* errno of the start of ssh; 0: it ran */
    int status;      /* of waitpid(), if it ended by itself */
    bool late;       /* killed at a deadline */
    const char
        *failed_at; /* "DNS", "TCP", "banner", "authentication", "command", "epkit", "version", "ssh", "timeout" */
    char why[400];  /* "" when it ended with status 0 */

    /* Inside: */
    char error_line[512]; /* incomplete line of standard error */
    size_t error_used;
    char last_line[400];         /* the last line of standard error that is not debugging output */
    const char *last_line_layer; /* the layer that a line of standard error named */
    char *queue;                 /* queued for standard input */
    size_t queue_bytes, queue_sent, queue_capacity;
    struct remote_pool *pool;
};

struct remote_pool {
    const struct remote_how *how;
    int n, n_started, n_connecting, n_ended;
    struct remote *remotes;
    bool is_paused; /* do not read standard output: its reader is behind */
    struct pollfd *polls;
    uint64_t looked_ns;
};

/* Initialises the pool; starts nothing. `how` and `remotes` must outlive the pool. */
void remote_pool_init(const struct remote_how *how, struct remote *remotes, int n, struct remote_pool *ret_pool);

/*
 * Starts the connections that may start, waits for at most `timeout_ms` for an event on a connection or on one of the
 * caller's descriptors, and handles it. poll() sets `extra` (at most 16).
 */
void remote_pool_step(struct remote_pool *pool, int timeout_ms, struct pollfd *extra, int n_extra);

/* Kills all running connections. on_end is not called. */
void remote_pool_done(struct remote_pool *pool);

/* Called when the command has answered: deadlines of layers do not apply any more. */
void remote_set_up(struct remote *remote);

/* Queues bytes for its standard input. 0, or -1 for lack of memory or when it has ended. */
int remote_send(struct remote *remote, const char *data, size_t bytes);

/* Kills a connection and ends it as failed at `layer` (a static string). on_end is called. */
void remote_fail(struct remote *remote, const char *layer, const char *why);

/* Resets a connection that has ended to the state before its start, so that it is tried again. */
void remote_reset(struct remote *remote);

/* Prints what to do about the layers, under `key` of the rows, at which connections failed. */
void remote_print_advice(const json_t *rows, const char *key, bool for_doctor);

/* Does a message of ssh say that the host ended the connection? */
bool remote_is_ended_by_host(const char *message);

#endif
