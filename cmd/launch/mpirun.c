/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mpirun.c - Open MPI's mpirun, as a child. It starts 'epkit __exec' on the nodes, which executes the ranks and passes
 * their output to the agents. So mpirun's own output is only about mpirun.
 */
#include "launch_internal.h"

#include "agent.h"
#include "base/clock.h"
#include "base/error.h"
#include "common/clean.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define TERM_MS 5000
#define READS_AT_END 64

struct words {
    const char *list[64];
    int n;
};

static void add(struct words *words, const char *a, const char *b, const char *c)
{
    const char *const all[] = {a, b, c};

    for (size_t i = 0; i < 3 && all[i]; i++)
        words->list[words->n++] = all[i];
}

/* The user's preloaded libraries, and MPI settings of another job, are not for mpirun. */
static char **make_environment(const char *spec, const char *mark)
{
    static const char *const dropped[] = {"LD_PRELOAD",
                                          "LD_AUDIT",
                                          "EPKIT_PRELOAD",
                                          JOB_MARK,
                                          JOB_SPEC,
                                          "OMPI_ALLOW_RUN_AS_ROOT",
                                          "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM",
                                          NULL};
    char **list = process_environment(dropped);
    static char root[] = "OMPI_ALLOW_RUN_AS_ROOT=1", confirm[] = "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1";
    size_t n = 0;
    char **grown;

    for (char **entry = list; entry && *entry; entry++)
        if (!job_is_of_rank(*entry))
            list[n++] = *entry;
    grown = list ? realloc(list, (n + 5) * sizeof(*list)) : NULL;
    if (!grown) {
        free(list);
        return NULL;
    }
    grown[n++] = (char *)spec;
    grown[n++] = (char *)mark;
    if (geteuid() == 0) {
        grown[n++] = root;
        grown[n++] = confirm;
    }
    grown[n] = NULL;
    return grown;
}

/*
 * ssh as mpirun shall use it: the same program and port. Open MPI splits the text at spaces. Its nodes report to mpirun
 * directly (no tree): with a tree every node would have to log in on others.
 */
static void add_remote_shell(const struct launch *launch, struct words *words, char *ret_agent, size_t bytes,
                             char *ret_daemon, size_t daemon_bytes)
{
    const char *port = launch->options->port;

    snprintf(ret_agent, bytes, "%s -q -o BatchMode=yes -o LogLevel=ERROR%s%s", launch->options->ssh, port ? " -p " : "",
             port ? port : "");
    snprintf(ret_daemon, daemon_bytes, "env " JOB_MARK "=%s orted", launch->id);
    add(words, "--mca", "plm", "rsh");
    add(words, "--mca", "plm_rsh_agent", ret_agent);
    add(words, "--mca", "plm_rsh_no_tree_spawn", "1");
    add(words, "--mca", "orte_launch_agent", ret_daemon);
    /* Of a scheduler's allocation only the hosts matter, which are in the hostfile. */
    add(words, "--mca", "ras", "^slurm,tm,lsf,gridengine");
    add(words, "--mca", "orte_keep_fqdn_hostnames", "1");
}

static void name_hostfile(const struct launch *launch, char *ret_path, size_t bytes)
{
    const char *base = getenv("TMPDIR");

    if (*launch->folder)
        snprintf(ret_path, bytes, "%s/hostfile-mpirun", launch->folder);
    else
        snprintf(ret_path, bytes, "%s/epkit-hostfile-%s", base && *base ? base : "/tmp", launch->id);
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
 * wherever it is in the list; rank 0 would then not be at MASTER_ADDR.
 */
static ep_status write_hostfile(struct launch *launch, char *ret_path, size_t bytes)
{
    struct hosts ranks = {.n = 0};
    char own[256] = "";
    ep_status status;

    gethostname(own, sizeof(own) - 1);
    name_hostfile(launch, ret_path, bytes);
    ranks.list = calloc((size_t)launch->n * (size_t)launch->per_node, sizeof(*ranks.list));
    if (!ranks.list)
        return ep_fail(EP_E_MEMORY, "no memory for a hostfile");
    for (int i = 0; i < launch->n; i++)
        for (int k = 0; k < launch->per_node; k++)
            ranks.list[ranks.n++] = name_for_mpirun(launch->order[i], own);
    status = hosts_write(ret_path, &ranks, 0);
    free(ranks.list);
    return status;
}

ep_status mpirun_start(struct launch *launch, const json_t *spec)
{
    char agent[1400], daemon[100], count[16], hostfile[sizeof(launch->folder) + 64], mark[64];
    char *text = json_dumps(spec, JSON_COMPACT), *variable = NULL;
    struct words words = {.n = 0};
    char **environment;
    int number;

    EP_TRY(write_hostfile(launch, hostfile, sizeof(hostfile)));
    snprintf(count, sizeof(count), "%d", launch->n * launch->per_node);
    snprintf(mark, sizeof(mark), JOB_MARK "=%s", launch->id);
    add(&words, "mpirun", NULL, NULL);
    add(&words, "--hostfile", hostfile, NULL);
    add(&words, "-np", count, NULL);
    add(&words, "--map-by", "seq", NULL);
    add(&words, "--bind-to", "none", NULL);
    add_remote_shell(launch, &words, agent, sizeof(agent), daemon, sizeof(daemon));
    add(&words, "-x", JOB_SPEC, NULL);
    /* A shell on the node chooses the executable, as for the agent. */
    add(&words, "sh", "-c", launch->remote_command);
    words.list[words.n] = NULL;
    environment = text && asprintf(&variable, JOB_SPEC "=%s", text) >= 0 ? make_environment(variable, mark) : NULL;
    number = environment ? process_start((char *const *)words.list, environment, false, &launch->mpirun) : ENOMEM;
    free(environment);
    free(variable);
    free(text);
    if (number)
        return ep_fail_errno(number == ENOENT ? EP_E_UNSUPPORTED : EP_E_SYSTEM, number, "starting mpirun");
    launch->mpirun_ended = false;
    return EP_OK;
}

/* Skips mpirun's banners about a rank that has ended: the agents report it in more detail. */
static void handle_line(struct launch *launch, const char *line)
{
    char clean[300];

    launch_log(launch, line);
    if (strspn(line, "-* ") == strlen(line) || strstr(line, "[mpirun:") == line)
        return;
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
    struct output *output = context;
    struct line_buffer *buffer = output->buffer;

    if (!buffer->text)
        buffer->text = malloc(LINE_MAX_BYTES);
    for (size_t i = 0; buffer->text && i < bytes; i++) {
        if (data[i] == '\n' || buffer->used + 1 == LINE_MAX_BYTES) {
            buffer->text[buffer->used] = '\0';
            handle_line(output->launch, buffer->text);
            buffer->used = 0;
        }
        if (data[i] != '\n')
            buffer->text[buffer->used++] = data[i];
    }
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
    char path[sizeof(launch->folder) + 64];

    if (launch->mpirun.pid > 0) {
        kill(launch->mpirun.pid, SIGTERM);
        while (!launch->mpirun_ended && ep_now_ns() < until_ns) {
            poll(NULL, 0, 20);
            reap(launch);
        }
        process_kill(&launch->mpirun);
    }
    for (int which = 0; which < 2; which++) {
        free(launch->mpirun_lines[which].text);
        launch->mpirun_lines[which] = (struct line_buffer){0};
    }
    name_hostfile(launch, path, sizeof(path));
    unlink(path);
}
