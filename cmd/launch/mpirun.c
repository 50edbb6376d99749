/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mpirun.c - Open MPI's mpirun, as a child. It starts 'epkit __exec' on the nodes, which executes the ranks and passes
 * their output to the agents. So mpirun's own output is only about mpirun.
 */
#include "launch_internal.h"

#include "base/clock.h"
#include "base/error.h"
#include "common/dir.h"
#include "common/memory.h"

#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define TERM_MS 5000
#define READS_AT_END 64

struct start {
    char *const *argv;
    const char *spec, *id;
};

/* The user's preloaded libraries, and MPI settings of another job, are not for mpirun. */
static void become_mpirun(const void *context)
{
    const struct start *start = context;

    job_leave_rank();
    setenv(JOB_MARK, start->id, 1);
    if (geteuid() == 0) {
        setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
        setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
    }
    if (setenv(JOB_SPEC, start->spec, 1) == 0)
        process_execute_bare(start->argv);
}

/*
 * The name of a node for mpirun: the machine that mpirun runs on needs its own hostname, because pods resolve no other
 * name for themselves.
 */
static struct host name_for_mpirun(const struct node *node, const char *own)
{
    struct host host = *node->host;

    if (*own && strcmp(job_text(node->facts, "host", ""), own) == 0)
        snprintf(host.target, sizeof(host.target), "%s", own);
    return host;
}

/*
 * Writes a line for each rank, for the sequential mapper. The other mappers begin with the host that mpirun runs on,
 * wherever it is in the list; rank 0 would then not be at MASTER_ADDR. In a folder of its own: who owns that of the
 * logs could choose other hosts.
 */
static ep_status write_hostfile(struct launch *launch, char *ret_path, size_t bytes)
{
    struct hosts ranks = {.n = 0};
    const char *base = getenv("TMPDIR");
    char own[256] = "";
    ep_status status;
    int number;

    base = base && *base ? base : "/tmp";
    gethostname(own, sizeof(own) - 1);
    number = temporary_folder_in(base, "epkit-mpirun", &launch->mpirun_folder);
    if (number)
        return ep_fail(EP_E_SYSTEM, "making the folder %s/epkit-mpirun-...: %s", base, write_reason(number));
    snprintf(ret_path, bytes, "%s/hostfile", launch->mpirun_folder.path);
    ranks.list = memory_new((size_t)launch->n * (size_t)launch->per_node, sizeof(*ranks.list));
    for (int i = 0; i < launch->n; i++)
        for (int k = 0; k < launch->per_node; k++)
            ranks.list[ranks.n++] = name_for_mpirun(launch->order[i], own);
    status = hosts_write(ret_path, &ranks, 0);
    free(ranks.list);
    return status;
}

/*
 * ssh as mpirun shall use it has the same program and port; Open MPI splits its text at spaces. The nodes report to
 * mpirun directly: with a tree every node would have to log in on others. Of a scheduler's allocation only the hosts
 * matter, which are in the hostfile. A shell on the node chooses the executable, as for the agent.
 */
ep_status mpirun_start(struct launch *launch, const json_t *spec)
{
    char ssh[1400], daemon[100], count[16], hostfile[PATH_MAX];
    const char *const *words =
        TEXTS("mpirun", "--hostfile", hostfile, "-np", count, "--map-by", "seq", "--bind-to", "none", "--mca", "plm",
              "rsh", "--mca", "plm_rsh_agent", ssh, "--mca", "plm_rsh_no_tree_spawn", "1", "--mca", "orte_launch_agent",
              daemon, "--mca", "ras", "^slurm,tm,lsf,gridengine", "--mca", "orte_keep_fqdn_hostnames", "1", "-x",
              JOB_SPEC, "sh", "-c", launch->rank_command);
    const char *port = launch->options->port;
    char *text = json_dumps(spec, JSON_COMPACT);
    struct start start = {(char *const *)words, text, launch->id};
    ep_status status = write_hostfile(launch, hostfile, sizeof(hostfile));
    int number;

    snprintf(count, sizeof(count), "%d", launch->n * launch->per_node);
    snprintf(ssh, sizeof(ssh), "%s -q -o BatchMode=yes -o LogLevel=ERROR%s%s", launch->options->ssh, port ? " -p " : "",
             port ? port : "");
    snprintf(daemon, sizeof(daemon), "env " JOB_MARK "=%s orted", launch->id);
    if (status == EP_OK) {
        number = process_fork(become_mpirun, &start, false, &launch->mpirun);
        if (number)
            status = ep_fail_errno(number == ENOENT ? EP_E_UNSUPPORTED : EP_E_SYSTEM, number,
                                   "starting mpirun (apt install openmpi-bin)");
    }
    free(text);
    return status;
}

/* Skips mpirun's banners about a rank that has ended: the agents report it in more detail. */
static void handle_line(void *context, const char *line, size_t bytes)
{
    struct launch *launch = context;
    char clean[300];

    launch_log(launch, line);
    if (strspn(line, "-* ") == strlen(line) || strstr(line, "[mpirun:") == line)
        return;
    (void)bytes;
    text_clean(line, clean, sizeof(clean));
    if (!*launch->mpirun_message)
        snprintf(launch->mpirun_message, sizeof(launch->mpirun_message), "%s", clean);
}

struct output {
    struct launch *launch;
    struct line_buffer *buffer;
};

static void split_lines(void *context, const char *data, size_t bytes)
{
    const struct output *output = context;

    if (line_add(output->buffer, LINE_OUTPUT_MAX, data, bytes, handle_line, output->launch))
        return;
    launch_note(output->launch, "no memory for the output of mpirun");
    launch_fail(output->launch, NULL, LAUNCH_FAILED, "mpirun");
}

static void read_pipe(struct launch *launch, int which, int reads)
{
    struct output output = {launch, &launch->mpirun_lines[which]};

    process_read(which ? &launch->mpirun.err : &launch->mpirun.out, reads, split_lines, &output);
}

static void reap(struct launch *launch)
{
    if (launch->mpirun.pid <= 0 || process_wait(launch->mpirun.pid, WNOHANG, &launch->mpirun_status) == 0)
        return;
    read_pipe(launch, 0, READS_AT_END);
    read_pipe(launch, 1, READS_AT_END);
    process_close(&launch->mpirun);
    launch->mpirun.pid = 0;
    launch->mpirun_ended = true;
}

void mpirun_poll(struct launch *launch, const struct pollfd *polls)
{
    for (int which = 0; which < 2; which++)
        if (polls[which].fd >= 0 && polls[which].revents)
            read_pipe(launch, which, 1);
    reap(launch);
}

void mpirun_end(struct launch *launch)
{
    uint64_t until_ns = ep_deadline_ns(TERM_MS);

    if (launch->mpirun.pid > 0) {
        kill(launch->mpirun.pid, SIGTERM);
        while (!launch->mpirun_ended && ep_now_ns() < until_ns) {
            poll(NULL, 0, 20);
            reap(launch);
        }
        process_kill(&launch->mpirun);
    }
    for (int which = 0; which < 2; which++)
        line_end(&launch->mpirun_lines[which], handle_line, launch);
    temporary_remove(&launch->mpirun_folder);
}
