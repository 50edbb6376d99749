/* SPDX-License-Identifier: Apache-2.0 */
/* agent_ranks.c - the ranks of a node: children of the agent, or processes that mpirun has started. */
#include "agent_internal.h"
#include "common/text.h"

#include "base/error.h"
#include "common/child.h"
#include "common/dir.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define READS_AT_END 256
#define CONNECT_TRIES 250 /* of 20 ms: mpirun may be faster than the launcher's request to the agent */
#define CONNECT_WAIT_US 20000

/* --- children of the agent --- */

/* Prepares rank `local` and starts it. */
static ep_status start_rank(const json_t *spec, int node, int local, struct process *ret_process)
{
    struct job_rank rank;
    int number;

    EP_TRY(job_rank_make(spec, node, local, &rank));
    number = process_fork(job_rank_execute, &rank, false, ret_process);
    free(rank.sourced);
    return number ? ep_fail_errno(EP_E_SYSTEM, number, "starting rank %d of the node", local) : EP_OK;
}

static ep_status start_children(struct agent *agent)
{
    for (int i = 0; i < agent->n_ranks; i++) {
        struct process process;

        EP_TRY(start_rank(agent->spec, agent->node, i, &process));
        agent->ranks[i].pid = process.pid;
        agent->ranks[i].fds[0] = process.out;
        agent->ranks[i].fds[1] = process.err;
    }
    return EP_OK;
}

/* --- ranks of mpirun --- */

/* The address at which ranks of mpirun find the agent: an abstract one, which leaves no file. Returns its length. */
static socklen_t agent_address(const char *id, struct sockaddr_un *ret_address)
{
    *ret_address = (struct sockaddr_un){.sun_family = AF_UNIX};
    /* The first character stays NUL: an abstract address. */
    snprintf(ret_address->sun_path + 1, sizeof(ret_address->sun_path) - 1, "epkit-launch-%s", id);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(ret_address->sun_path + 1));
}

static ep_status listen_for_ranks(struct agent *agent)
{
    struct sockaddr_un address;
    socklen_t length = agent_address(agent->id, &address);

    agent->listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (agent->listener < 0 || bind(agent->listener, (struct sockaddr *)&address, length) != 0 ||
        listen(agent->listener, 1024) != 0)
        return errno == EADDRINUSE
                   ? ep_fail(EP_E_SYSTEM, "another node of this run is this host, where mpirun starts all ranks "
                                          "together: name each host once")
                   : ep_fail_errno(EP_E_SYSTEM, errno, "listening for ranks of mpirun");
    return EP_OK;
}

/* Others may listen or connect at an abstract address. */
static bool is_of_this_user(int fd)
{
    struct ucred peer;
    socklen_t length = sizeof(peer);

    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.uid == geteuid();
}

/* The rank's number and the ends of its pipes. */
static bool receive_rank(int fd, int *ret_local, int ret_fds[2])
{
    char space[CMSG_SPACE(2 * sizeof(int))];
    struct iovec part = {.iov_base = ret_local, .iov_len = sizeof(*ret_local)};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof(space)};
    struct cmsghdr *control;
    struct pollfd ready = {.fd = fd, .events = POLLIN};

    if (!is_of_this_user(fd) || poll(&ready, 1, 1000) != 1 ||
        recvmsg(fd, &message, MSG_CMSG_CLOEXEC) != sizeof(*ret_local))
        return false;
    control = CMSG_FIRSTHDR(&message);
    if (!control || control->cmsg_type != SCM_RIGHTS || control->cmsg_len != CMSG_LEN(2 * sizeof(int)))
        return false;
    memcpy(ret_fds, CMSG_DATA(control), 2 * sizeof(int));
    return true;
}

void agent_accept(struct agent *agent)
{
    int fd = accept4(agent->listener, NULL, NULL, SOCK_CLOEXEC), fds[2] = {-1, -1}, local = -1;
    struct agent_rank *rank;

    if (fd < 0)
        return;
    if (!receive_rank(fd, &local, fds) || local < 0 || local >= agent->n_ranks || agent->ranks[local].control >= 0) {
        process_close_fd(&fds[0]);
        process_close_fd(&fds[1]);
        close(fd);
        return;
    }
    rank = &agent->ranks[local];
    rank->control = fd;
    for (int which = 0; which < 2; which++) {
        rank->fds[which] = fds[which];
        fcntl(fds[which], F_SETFL, O_NONBLOCK);
    }
    fcntl(fd, F_SETFL, O_NONBLOCK);
}

ep_status agent_start_ranks(struct agent *agent)
{
    agent_free_ranks(agent);
    agent->node = job_number(agent->spec, "node", 0);
    agent->n_ranks = job_number(agent->spec, "per_node", 1);
    if (agent->n_ranks > AGENT_RANKS_MAX)
        return ep_fail(EP_E_ARG, "more than %d ranks on a node", AGENT_RANKS_MAX);
    for (int i = 0; i < agent->n_ranks; i++)
        agent->ranks[i] = (struct agent_rank){.local = i, .control = -1, .fds = {-1, -1}};
    if (json_is_true(json_object_get(agent->spec, "mpi")))
        return listen_for_ranks(agent);
    return start_children(agent);
}

/* --- output and end --- */

struct output {
    struct agent_rank *rank;
    int which;
};

static void send_line(void *context, const char *text, size_t bytes)
{
    agent_send_line(LINE_OUTPUT, ((const struct agent_rank *)context)->local, text, bytes);
}

static void add_output(void *context, const char *data, size_t bytes)
{
    const struct output *output = context;
    struct line_buffer *lines = &output->rank->lines[output->which];
    bool is_new = lines->used == 0 || memchr(data, '\n', bytes);

    if (!line_add(lines, LINE_OUTPUT_MAX, data, bytes, send_line, output->rank))
        agent_no_memory();
    else if (lines->used)
        agent_send_part(output->rank->local, lines->text, lines->used, is_new);
}

void agent_read_rank(struct agent_rank *rank, int which, int reads)
{
    process_read(&rank->fds[which], reads, add_output, &(struct output){rank, which});
    if (rank->fds[which] < 0)
        line_end(&rank->lines[which], send_line, rank);
}

/* Reports the end of a rank, after its output. Descendants may hold its pipes: what they write later is forwarded. */
static void end_rank(struct agent_rank *rank, int code, int signal)
{
    rank->pid = 0;
    process_close_fd(&rank->control);
    for (int which = 0; which < 2; which++)
        agent_read_rank(rank, which, READS_AT_END);
    agent_event("exit", json_pack("{s:i, s:i, s:i}", "rank", rank->local, "code", code, "signal", signal));
}

void agent_reap(struct agent *agent)
{
    bool has_none;
    int status;
    pid_t pid;

    /* Also reaps daemons of the job, whose parents have ended. */
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0)
        for (int i = 0; i < agent->n_ranks; i++)
            if (agent->ranks[i].pid == pid)
                end_rank(&agent->ranks[i], WIFEXITED(status) ? WEXITSTATUS(status) : 0,
                         WIFSIGNALED(status) ? WTERMSIG(status) : 0);
    has_none = pid < 0 && errno == ECHILD;
    for (int i = 0; has_none && i < agent->n_ranks; i++)
        if (agent->ranks[i].pid > 0)
            end_rank(&agent->ranks[i], PROCESS_UNKNOWN, 0);
}

struct ending {
    int code, signal;
};

void agent_read_control(struct agent_rank *rank)
{
    struct ending ending = {.signal = SIGKILL};
    ssize_t n = recv(rank->control, &ending, sizeof(ending), 0);

    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    /* End-of-file without a report: the process that supervised the rank was killed, and the rank with it. */
    if (n != sizeof(ending))
        ending = (struct ending){.signal = SIGKILL};
    end_rank(rank, ending.code, ending.signal);
}

void agent_free_ranks(struct agent *agent)
{
    FOR_EACH (rank, agent->ranks, agent->n_ranks) {
        process_close_fd(&rank->control);
        for (int which = 0; which < 2; which++) {
            process_close_fd(&rank->fds[which]);
            line_end(&rank->lines[which], send_line, rank);
        }
    }
    agent->n_ranks = 0;
    process_close_fd(&agent->listener);
}

/* --- epkit __exec --- */

static int connect_agent(const char *id)
{
    struct sockaddr_un address;
    socklen_t length = agent_address(id, &address);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

    for (int i = 0; fd >= 0 && i < CONNECT_TRIES; i++) {
        if (connect(fd, (struct sockaddr *)&address, length) == 0) {
            if (is_of_this_user(fd))
                return fd;
            break;
        }
        usleep(CONNECT_WAIT_US);
    }
    dir_close(fd);
    return -1;
}

static bool send_rank(int fd, int local, const int fds[2])
{
    char space[CMSG_SPACE(2 * sizeof(int))] = {0};
    struct iovec part = {.iov_base = &local, .iov_len = sizeof(local)};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof(space)};
    struct cmsghdr *control = CMSG_FIRSTHDR(&message);

    if (!control)
        return false;
    control->cmsg_level = SOL_SOCKET;
    control->cmsg_type = SCM_RIGHTS;
    control->cmsg_len = CMSG_LEN(2 * sizeof(int));
    memcpy(CMSG_DATA(control), fds, 2 * sizeof(int));
    return sendmsg(fd, &message, MSG_NOSIGNAL) == sizeof(local);
}

static int run_rank(const json_t *spec, int rank)
{
    int per_node = job_number(spec, "per_node", 1), status, control;
    struct ending ending = {0};
    struct process process;

    if (start_rank(spec, rank / per_node, rank % per_node, &process) != EP_OK) {
        fprintf(stderr, "epkit: rank %d: %s\n", rank, ep_last_error());
        return 1;
    }
    control = connect_agent(job_text(spec, "launch", ""));
    if (control < 0 || !send_rank(control, rank % per_node, (const int[]){process.out, process.err})) {
        fprintf(stderr, "epkit: rank %d: no agent of this launch runs on the node\n", rank);
        process_kill(&process);
        return 1;
    }
    process_close(&process);
    process_wait(process.pid, 0, &status);
    ending.code = WIFEXITED(status) ? WEXITSTATUS(status) : 0;
    ending.signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
    if (send(control, &ending, sizeof(ending), MSG_NOSIGNAL) < 0)
        return 1;
    return ending.signal ? 128 + ending.signal : ending.code;
}

int agent_rank_main(void)
{
    const char *text = getenv(JOB_SPEC), *number = getenv("OMPI_COMM_WORLD_RANK");
    json_t *spec = text ? json_loads(text, 0, NULL) : NULL;
    int result = 2;

    if (!spec || !number)
        fprintf(stderr, "epkit: " AGENT_RANK "is internal: mpirun starts it for 'epkit launch'\n");
    else
        result = run_rank(spec, atoi(number));
    json_decref(spec);
    return result;
}
