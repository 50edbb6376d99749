/* SPDX-License-Identifier: Apache-2.0 */
/* launch_events.c - events from the agents, and the loss of an agent. */
#include "launch_internal.h"

#include "base/clock.h"

#include <epkit/types.h>

#include <string.h>

void launch_fail(struct launch *launch, struct node *node, int code, const char *reason)
{
    if (launch->is_ending || launch->reason)
        return;
    launch->reason = reason;
    launch->failed = node;
    launch->code = code;
}

static void set_failure(struct node *node, const char *layer, const char *why)
{
    if (node->failed_at)
        return;
    node->failed_at = layer;
    text_clean(why, node->why, sizeof(node->why));
}

static void set_up_node(struct node *node)
{
    const struct launch *launch = node->launch;
    json_t *hello;

    if (node->is_swept) {
        remote_set_up(node->remote);
        hello = make_end(launch, node);
        json_object_set_new(hello, "launch", json_string(launch->id));
    } else {
        hello = json_pack("{s:s, s:s, s:b, s:O*}", "do", "hello", "launch", launch->id, "followed",
                          node_is_followed(node), "files", launch->options->job.files);
    }
    node_send(node, hello);
}

static void handle_hello(struct node *node, json_t *event)
{
    char why[256];
    const char *version = job_text(event, "epkit", "");

    if (strcmp(version, ep_version()) != 0) {
        snprintf(why, sizeof(why),
                 "epkit %.40s is installed there, and this is %s: install the same version on all nodes", version,
                 ep_version());
        remote_fail(node->remote, "version", why);
        return;
    }
    remote_set_up(node->remote);
    node->facts = json_incref(event);
    node->state = NODE_READY;
}

static void handle_exit(struct node *node, const json_t *event)
{
    int code = job_number(event, "code", 0), signal = job_number(event, "signal", 0);
    char why[300];

    node->n_ended++;
    if ((!code && !signal) || node->code || node->signal)
        return;
    node->code = code;
    node->signal = signal;
    if (signal)
        snprintf(why, sizeof(why), "killed by signal %d (%s)", signal, strsignal(signal));
    else
        snprintf(why, sizeof(why), "exit status %d", code);
    if (!signal && *node->last_line && node->last_rank == job_number(event, "rank", 0))
        text_append(why, sizeof(why), "; its last line: %s", node->last_line);
    /* A rank that is killed because another one has failed is not a failure of its own. */
    if (node->launch->is_ending || node->launch->reason)
        return;
    set_failure(node, "program", why);
    launch_fail(node->launch, node, signal ? 128 + signal : code, "program");
}

static void handle_error_event(struct node *node, const json_t *event)
{
    const char *layer = job_text(event, "layer", "agent"), *text = job_text(event, "text", "");

    if (strcmp(layer, "disk") == 0) {
        remote_fail(node->remote, "disk", text);
    } else {
        set_failure(node, "start", text);
        launch_fail(node->launch, node, LAUNCH_FAILED, "start");
    }
}

static void handle_event(struct node *node, json_t *event)
{
    const char *name = job_text(event, "event", "");

    if (strcmp(name, "up") == 0) {
        set_up_node(node);
    } else if (strcmp(name, "hello") == 0) {
        handle_hello(node, event);
    } else if (*name && strcmp(name, node->asked) == 0) {
        node->asked[0] = '\0';
        node->reply = json_incref(event);
    } else if (strcmp(name, "exit") == 0) {
        handle_exit(node, event);
    } else if (strcmp(name, "error") == 0) {
        handle_error_event(node, event);
    } else if (strcmp(name, "clean") == 0) {
        node->is_clean = true;
        node->n_left = job_number(event, "left", 0);
    }
}

/* A line of the agent, or of what ran before it, which may explain a failure. */
static void handle_line(void *context, const char *text, size_t bytes)
{
    struct node *node = context;
    int rank, length = 0;
    bool is_of_rank;
    char kind;
    json_t *event;

    if (*text != LINE_MARK || sscanf(text + 1, "%c%5d%n", &kind, &rank, &length) != 2 || text[length + 1] != ' ') {
        if (!node->has_answered && text[strspn(text, "\r\t ")])
            text_clean(text, node->stray, sizeof(node->stray));
        return;
    }
    node->has_answered = true;
    text += length + 2;
    bytes -= (size_t)length + 2;
    is_of_rank = rank >= 0 && rank < node->launch->per_node;
    if (kind == LINE_OUTPUT && is_of_rank)
        node_write(node, rank, text, bytes);
    if (kind == LINE_PART && is_of_rank)
        node_keep_part(node, rank, text, bytes);
    event = kind == LINE_EVENT && !node->remote->is_ended ? json_loadb(text, bytes, 0, NULL) : NULL;
    if (event)
        handle_event(node, event);
    json_decref(event);
}

void node_on_output(struct remote *remote, const char *data, size_t bytes)
{
    struct node *node = remote->context;

    node->heard_ns = ep_now_ns();
    if (!line_add(&node->stream, LINE_EVENT_MAX, data, bytes, handle_line, node))
        remote_fail(remote, "memory", "no memory for its output");
}

void node_on_end(struct remote *remote)
{
    struct node *node = remote->context;
    struct launch *launch = node->launch;
    enum node_state before = node->state;
    char why[400];

    line_flush(&node->stream, handle_line, node);
    node->state = node->is_clean ? NODE_ENDED : NODE_FAILED;
    if (node->is_clean || node->is_swept)
        return;
    if (node->part_bytes)
        node_write(node, node->part_rank, node->part, node->part_bytes);
    if (before == NODE_CONNECTING) {
        snprintf(why, sizeof(why), "%.260s%s%s",
                 remote->failed_at ? remote->why : "the connection ended without an answer from epkit",
                 *node->stray && !node->has_answered ? "; it wrote: " : "", node->has_answered ? "" : node->stray);
        set_failure(node, remote->failed_at ? remote->failed_at : "answer", why);
        return;
    }
    snprintf(why, sizeof(why), "the connection was lost%s%.300s", *remote->why ? ": " : "", remote->why);
    set_failure(node, "connection", why);
    if (!launch->is_ending)
        launch_note(launch, "%s: %s", node->name, node->why);
    launch_fail(launch, node, LAUNCH_FAILED, "host-failed");
}
