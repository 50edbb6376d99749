/* SPDX-License-Identifier: Apache-2.0 */
/* launch_work.c - runs the job, and ends it. */
#include "launch_internal.h"

#include "base/clock.h"
#include "base/error.h"

#include <string.h>
#include <sys/wait.h>

#define REPORT_MS 3000   /* for reports of agents about ranks after mpirun has ended */
#define START_SECONDS 90 /* scripts are sourced before a rank starts */
#define NICS_SECONDS 10
#define END_SECONDS 8 /* in addition to the grace: SIGKILL, and the report about it */

/* --- conditions --- */

static void check_silence(struct launch *launch)
{
    uint64_t now_ns = ep_now_ns();

    if (!launch->options->silent_s)
        return;
    for (int i = 0; i < launch->n; i++) {
        struct node *node = launch->order[i];
        uint64_t seconds = (uint64_t)launch->options->silent_s << (node->n_silent < 10 ? node->n_silent : 10);

        if (node->n_ended == launch->per_node || now_ns < node->output_ns + seconds * 1000000000u)
            continue;
        node->n_silent++;
        launch_note(launch, "%s has written nothing for %llu s%s%s", node->name,
                    (unsigned long long)((now_ns - node->output_ns) / 1000000000u),
                    *node->last_line ? "; its last line: " : "", node->last_line);
    }
}

static bool all_ended(const struct launch *launch)
{
    return !ANY_OF(i, launch->n, launch->nodes[i].n_ended < launch->per_node);
}

static bool has_finished(struct launch *launch)
{
    check_silence(launch);
    if (launch->reason)
        return true;
    if (launch->options->job.starter == LAUNCH_MPIRUN)
        return launch->mpirun_ended;
    return all_ended(launch);
}

static bool has_reported(struct launch *launch)
{
    return launch->reason || all_ended(launch);
}

/* --- the run --- */

/* What the other nodes call a node: the loopback would lead each of them to itself. */
static const char *name_for_others(const struct launch *launch, const struct node *node)
{
    if (launch->n > 1 && address_is_loopback(node->address))
        return job_text(node->facts, "host", node->address);
    return node->address;
}

const char *launch_master(const struct launch *launch)
{
    return name_for_others(launch, launch->order[0]);
}

/*
 * What a node uses if it cannot resolve launch_master(): the name from ssh's configuration on this machine, where an
 * alias is defined that is unknown on the nodes. If that is the loopback, as for a tunnel, the hostname: a name that
 * cannot be resolved fails at once, the loopback leads each node to itself, where it waits until the deadline. NULL if
 * there is no other name.
 */
static const char *other_master(const struct launch *launch)
{
    const struct node *first = launch->order[0];
    const char *other = first->remote->host_name;

    if (launch->n > 1 && address_is_loopback(other))
        other = job_text(first->facts, "host", "");
    if (launch->n > 1 && address_is_loopback(other))
        return NULL;
    return *other && strcmp(other, launch_master(launch)) != 0 ? other : NULL;
}

static json_t *make_spec(const struct launch *launch)
{
    const struct launch_job *job = &launch->options->job;
    const char *other = other_master(launch);
    json_t *spec = json_deep_copy(job->spec), *argv = json_object_get(spec, "argv");

    json_object_update_new(spec, json_pack("{s:s, s:s, s:i, s:i, s:i, s:s, s:s, s:s*, s:i, s:b}", "do", "run", "launch",
                                           launch->id, "nodes", launch->n, "per_node", launch->per_node, "gpus",
                                           launch->gpus, "world", job->by_rank ? "ranks" : "nodes", "master",
                                           launch_master(launch), "master_host", other, "port",
                                           launch->options->master_port, "mpi", job->starter == LAUNCH_MPIRUN));
    for (int i = 0; job->takes_names && i < launch->n; i++)
        json_array_append_new(argv, json_string(name_for_others(launch, launch->order[i])));
    return spec;
}

/* The script of --workload is in a different folder on each node. */
static void put_folder(const struct node *node, json_t *spec)
{
    json_t *argv = json_object_get(spec, "argv");
    const char *dir = job_text(node->facts, "dir", "");
    char path[400];

    if (!node->launch->options->job.files)
        return;
    snprintf(path, sizeof(path), "%s/workload", dir);
    argv = json_deep_copy(argv);
    json_array_set_new(argv, 0, json_string(path));
    json_object_set_new(spec, "argv", argv);
}

static void start_nodes(struct launch *launch, const json_t *spec)
{
    for (int i = 0; i < launch->n; i++) {
        struct node *node = launch->order[i];
        json_t *own = json_copy((json_t *)spec);

        node->output_ns = ep_now_ns();
        json_object_set_new(own, "node", json_integer(i));
        put_folder(node, own);
        node_ask(node, own);
    }
}

static void check_mpirun(struct launch *launch)
{
    int code = WIFEXITED(launch->mpirun_status) ? WEXITSTATUS(launch->mpirun_status) : 1;

    /* The agents report which rank failed; their reports may still be in flight. */
    launch_wait(launch, has_reported, ep_now_ns() + REPORT_MS * UINT64_C(1000000));
    if (launch->reason)
        return;
    if (code != 0 || !all_ended(launch)) {
        launch_fail(launch, NULL, code ? code : LAUNCH_FAILED, "mpirun");
        launch_note(launch, "mpirun ended with status %d%s%s", code, *launch->mpirun_message ? ": " : "",
                    launch->mpirun_message);
    }
}

static void run(struct launch *launch)
{
    bool is_mpirun = launch->options->job.starter == LAUNCH_MPIRUN;
    json_t *spec = make_spec(launch);

    start_nodes(launch, spec);
    if (is_mpirun) {
        launch_wait(launch, launch_has_replies, ep_deadline_ns(START_SECONDS * 1000));
        if (!launch->reason && !launch->interrupted && mpirun_start(launch, spec) != EP_OK) {
            launch_fail(launch, NULL, LAUNCH_UNSUPPORTED, "mpirun");
            launch_note(launch, "%s", ep_last_error());
        }
    }
    json_decref(spec);
    if (!launch->reason && !launch->interrupted)
        launch_wait(launch, has_finished, launch->deadline_ns);
    if (is_mpirun && !launch->reason && !launch->interrupted)
        check_mpirun(launch);
}

void launch_work(struct launch *launch)
{
    /* The first reply stores the counters of the NICs, the second one is what they moved since. */
    launch_ask(launch, json_pack("{s:s}", "do", "nics"), NICS_SECONDS);
    if (!launch->reason && !launch->interrupted)
        run(launch);
    if (launch->reason || launch->interrupted)
        return;
    launch_ask(launch, json_pack("{s:s}", "do", "nics"), NICS_SECONDS);
    for (int i = 0; i < launch->n; i++)
        launch->nodes[i].nics = json_incref(json_object_get(launch->nodes[i].reply, "nics"));
}

/* --- the end --- */

bool node_is_followed(const struct node *node)
{
    return node->launch->options->has_followers && node != node->launch->nodes;
}

static bool is_open(const struct node *node)
{
    return node->state == NODE_READY || node->state == NODE_CONNECTING;
}

static bool has_ended(struct launch *launch)
{
    return !ANY_OF(i, launch->n, is_open(&launch->nodes[i]));
}

/* Agents of followed nodes have something left to do. */
static bool is_clean(struct launch *launch)
{
    FOR_EACH (node, launch->nodes, launch->n)
        if (is_open(node) && !(node->is_clean && node_is_followed(node)))
            return false;
    return true;
}

json_t *make_end(const struct launch *launch, const struct node *node)
{
    json_t *request =
        json_pack("{s:s, s:I}", "do", "end", "grace_s", (json_int_t)(launch->is_urgent ? 0 : launch->options->grace_s));

    if (node_is_followed(node))
        json_object_set_new(request, "code",
                            json_integer(launch->interrupted ? 128 + launch->interrupted : launch->code));
    return request;
}

/*
 * For a node whose agent was lost after it had answered: starts another agent, which ends what the first one started.
 */
static void end_lost_node(struct launch *launch)
{
    FOR_EACH (node, launch->nodes, launch->n) {
        if (node->state != NODE_FAILED || !node->facts || node->is_swept)
            continue;
        node->is_swept = true;
        node_reconnect(node);
    }
}

void launch_end(struct launch *launch)
{
    int64_t grace_s = launch->options->grace_s;

    launch->is_ending = true;
    for (int i = 0; i < launch->n; i++)
        if (launch->nodes[i].state == NODE_READY)
            node_send(&launch->nodes[i], make_end(launch, &launch->nodes[i]));
        else if (launch->nodes[i].state == NODE_CONNECTING)
            remote_fail(launch->nodes[i].remote, "connection", "the launch was ended");
    end_lost_node(launch);
    mpirun_end(launch);
    launch_wait(launch, is_clean,
                ep_now_ns() + (uint64_t)(grace_s + END_SECONDS + launch->options->connect_s) * 1000000000u);
    FOR_EACH (node, launch->nodes, launch->n) {
        if (node->state == NODE_READY && !node->is_clean)
            launch_note(launch, "%s: its agent did not confirm that everything has ended", node->name);
        if (node->n_left > 0)
            launch_note(launch, "%s: %d processes could not be killed", node->name, node->n_left);
        if (node->log && fclose(node->log) != 0)
            launch->is_log_lost = true;
        node->log = NULL;
    }
    /* Flushes the queue; a reader that is blocked cannot block the launcher for ever. */
    for (int i = 0; i < 100 && launch->queued; i++) {
        struct pollfd ready = {.fd = launch->options->output_fd, .events = POLLOUT};

        poll(&ready, 1, 100);
        launch_flush(launch);
    }
}

void launch_tell(struct launch *launch)
{
    for (int i = 0; i < launch->n; i++)
        process_close_fd(&launch->nodes[i].remote->process.in);
    launch_wait(launch, has_ended, ep_deadline_ns(2 * FOLLOW_TELL_MS));
}
