/* SPDX-License-Identifier: Apache-2.0 */
/* discover.c - the hosts of a job, from the environment that its scheduler set. */
#include "hosts.h"

#include "base/error.h"
#include "common/text.h"

#include <netdb.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* NULL if it is not set or empty. */
static const char *variable(const char *name)
{
    const char *value = getenv(name);

    return value && *value ? value : NULL;
}

static ep_status number_of(const char *name, long least, long most, long *ret_number)
{
    const char *value = variable(name);
    char *end;

    if (!value)
        return ep_fail(EP_E_ARG, "%s is not set", name);
    *ret_number = strtol(value, &end, 10);
    if (*end || *ret_number < least || *ret_number > most)
        return ep_fail(EP_E_ARG, "%s is '%.40s', not a number from %ld to %ld", name, value, least, most);
    return EP_OK;
}

/* The number of pods, under the names that charts use for it. */
static ep_status number_of_pods(const char *what, long *ret_n)
{
    static const char *const names[] = {"NNODES", "JOB_COMPLETIONS", "COMPLETIONS", "JOB_PARALLELISM", "PARALLELISM"};

    const char *first = NULL;
    long jobs = 1;

    if (variable("REPLICATED_JOB_REPLICAS"))
        EP_TRY(number_of("REPLICATED_JOB_REPLICAS", 1, HOSTS_MAX, &jobs));
    /* Checks all that are set: if two differed, pods of one job would wait for different hosts. */
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        long n = 0;

        if (!variable(names[i]))
            continue;
        EP_TRY(number_of(names[i], 1, HOSTS_MAX, &n));
        n *= i > 0 ? jobs : 1; /* all but NNODES count the pods of one job */
        if (first && n != *ret_n)
            return ep_fail(EP_E_ARG, "%s: %s is %ld and %s is %ld: which is the number of pods?", what, first, *ret_n,
                           names[i], n);
        first = first ? first : names[i];
        *ret_n = n;
    }
    return first ? EP_OK : ep_fail(EP_E_ARG, "%s: NNODES, the number of pods, is not set", what);
}

/* Adds prefix0.domain, prefix1.domain, ...; without a domain the names alone. */
static ep_status add_numbered(const char *what, const char *prefix, const char *domain, long first, long n,
                              struct hosts *hosts)
{
    for (long i = first; i < first + n; i++) {
        char name[512];
        struct text text = text_in(name, sizeof(name));

        /* A name that is cut is still too long for a host. */
        text_add(&text, "%s%ld%s%s", prefix, i, *domain ? "." : "", domain);
        EP_TRY(hosts_add_list(what, name, hosts));
    }
    return EP_OK;
}

/* Pod `index` of those that `kind` and `name` describe. */
static ep_status set_pods(struct hosts_source *source, long index, const char *kind, const char *name)
{
    source->index = (int)index;
    source->is_pods = true;
    snprintf(source->text, sizeof(source->text), "%s %.120s", kind, name);
    return EP_OK;
}

/*
 * Pods of a JobSet are named JOBSET-REPLICATEDJOB-JOB-INDEX and resolve below the headless service, whose name is that
 * of the JobSet unless spec.network.subdomain sets another. JobSet sets no variables: charts set these from its
 * annotations by the downward API. The index is set by Kubernetes.
 */
static ep_status from_jobset(struct hosts *hosts, struct hosts_source *source)
{
    const char *set = variable("JOBSET_NAME"), *job = variable("REPLICATED_JOB_NAME");
    const char *domain = variable("JOBSET_SUBDOMAIN"), *what = "JobSet";
    long n = 0, index = 0, jobs = 1, job_index = 0;
    char prefix[400];

    if (!job)
        job = "workload";
    EP_TRY(number_of_pods(what, &n));
    if (variable("REPLICATED_JOB_REPLICAS"))
        EP_TRY(number_of("REPLICATED_JOB_REPLICAS", 1, HOSTS_MAX, &jobs));
    if (jobs > 1 && n % jobs != 0)
        return ep_fail(EP_E_ARG, "JobSet: NNODES %ld cannot be spread over REPLICATED_JOB_REPLICAS %ld jobs", n, jobs);
    EP_TRY(number_of("JOB_COMPLETION_INDEX", 0, n / jobs - 1, &index));
    if (variable("JOB_INDEX"))
        EP_TRY(number_of("JOB_INDEX", 0, jobs > 1 ? jobs - 1 : HOSTS_MAX, &job_index));
    for (long i = 0; i < jobs; i++) {
        /* With one job this pod's job index is that of the job. */
        snprintf(prefix, sizeof(prefix), "%.120s-%.120s-%ld-", set, job, jobs > 1 ? i : job_index);
        EP_TRY(add_numbered(what, prefix, domain ? domain : set, 0, n / jobs, hosts));
    }
    return set_pods(source, jobs > 1 ? job_index * (n / jobs) + index : index, what, set);
}

/* LeaderWorkerSet's own variables. The leader's name is SET-GROUP, those of its workers SET-GROUP-INDEX. */
static ep_status from_leader_worker_set(struct hosts *hosts, struct hosts_source *source)
{
    const char *leader = variable("LWS_LEADER_ADDRESS"), *what = "LeaderWorkerSet", *dot;
    char prefix[300];
    long n = 0, index = 0;

    EP_TRY(number_of("LWS_GROUP_SIZE", 1, HOSTS_MAX, &n));
    EP_TRY(number_of("LWS_WORKER_INDEX", 0, n - 1, &index));
    EP_TRY(hosts_add_list(what, leader, hosts));
    dot = leader + strcspn(leader, ".");
    snprintf(prefix, sizeof(prefix), "%.*s-", (int)(dot - leader < 250 ? dot - leader : 250), leader);
    EP_TRY(add_numbered(what, prefix, *dot ? dot + 1 : "", 1, n - 1, hosts));
    return set_pods(source, index, what, leader);
}

/* Variables that charts of the GKE testbed set: HOSTNAME_PREFIX0.DOMAIN_NAME, HOSTNAME_PREFIX1.DOMAIN_NAME, ... */
static ep_status from_chart(struct hosts *hosts, struct hosts_source *source)
{
    const char *prefix = variable("HOSTNAME_PREFIX"), *domain = variable("DOMAIN_NAME");
    long n = 0, index = 0;

    EP_TRY(number_of_pods("HOSTNAME_PREFIX", &n));
    EP_TRY(number_of("JOB_COMPLETION_INDEX", 0, n - 1, &index));
    EP_TRY(add_numbered("HOSTNAME_PREFIX", prefix, domain ? domain : "", 0, n, hosts));
    return set_pods(source, index, "pods", prefix);
}

/* The domain in which this host's own name resolves: that of the headless service. */
static void own_domain(const char *name, char *ret_domain, size_t bytes)
{
    struct addrinfo hints = {.ai_flags = AI_CANONNAME}, *info = NULL;
    const char *dot;

    ret_domain[0] = '\0';
    if (getaddrinfo(name, NULL, &hints, &info) != 0)
        return;
    dot = info->ai_canonname ? strchr(info->ai_canonname, '.') : NULL;
    if (dot)
        snprintf(ret_domain, bytes, "%s", dot + 1);
    freeaddrinfo(info);
}

/* Pods of an Indexed Job with a headless service are named JOB-INDEX. */
static ep_status from_indexed_job(struct hosts *hosts, struct hosts_source *source)
{
    const char *set_domain = variable("JOB_SUBDOMAIN"), *what = "Indexed Job";
    char name[256] = "", domain[256], suffix[24];
    size_t length;
    long n = 0, index = 0;

    EP_TRY(number_of_pods(what, &n));
    EP_TRY(number_of("JOB_COMPLETION_INDEX", 0, n - 1, &index));
    gethostname(name, sizeof(name) - 1);
    if (set_domain)
        snprintf(domain, sizeof(domain), "%s", set_domain);
    else
        own_domain(name, domain, sizeof(domain));
    snprintf(suffix, sizeof(suffix), "-%ld", index);
    name[strcspn(name, ".")] = '\0';
    length = strlen(name);
    if (length <= strlen(suffix) || strcmp(name + length - strlen(suffix), suffix) != 0)
        return ep_fail(EP_E_ARG, "Indexed Job: the name of this host, '%s', does not end in '%s': give --hosts", name,
                       suffix);
    name[length - strlen(suffix) + 1] = '\0';
    EP_TRY(add_numbered(what, name, domain, 0, n, hosts));
    name[strlen(name) - 1] = '\0';
    return set_pods(source, index, what, name);
}

/*
 * In a step (srun) every task runs the command, on some or all nodes of the job; in sbatch and salloc it runs once. A
 * batch script has SLURM_PROCID too, but is not a task of a step: only a task has a step number.
 */
static ep_status from_slurm(struct hosts *hosts, struct hosts_source *source)
{
    const char *list = variable("SLURM_JOB_NODELIST") ? variable("SLURM_JOB_NODELIST") : variable("SLURM_NODELIST");
    const char *job = variable("SLURM_JOB_ID"), *name = "SLURM_JOB_NODELIST";
    long n = 1, index = 0;

    if (variable("SLURM_STEP_ID") && variable("SLURM_STEP_NUM_TASKS") && variable("SLURM_PROCID")) {
        EP_TRY(number_of("SLURM_STEP_NUM_TASKS", 1, 1 << 20, &n));
        EP_TRY(number_of("SLURM_PROCID", 0, n - 1, &index));
    }
    if (n > 1 && variable("SLURM_STEP_NODELIST")) {
        name = "SLURM_STEP_NODELIST";
        list = variable(name);
    }
    /* Each component of a heterogeneous job has a list of nodes; this is that of the first one. */
    if (n == 1 && (variable("SLURM_HET_SIZE") || variable("SLURM_PACK_SIZE")))
        return ep_fail(EP_E_ARG, "a heterogeneous job of Slurm has several lists of nodes: give --hosts");
    EP_TRY(hosts_add_list(name, list, hosts));
    if (n > 1)
        source->index = (int)index;
    snprintf(source->text, sizeof(source->text), "Slurm job %.40s", job ? job : "(no number)");
    return EP_OK;
}

/* Hostfiles of MPI, and those of schedulers that MPI reads. */
static const struct file_variable {
    const char *name;
    enum hosts_format format;
} file_variables[] = {
    {"OMPI_MCA_orte_default_hostfile", HOSTS_OPEN_MPI},
    {"PRTE_MCA_prte_default_hostfile", HOSTS_OPEN_MPI},
    {"OMPI_MCA_hostfile", HOSTS_OPEN_MPI},
    {"PBS_NODEFILE", HOSTS_REPEATED},
    {"LSB_DJOB_HOSTFILE", HOSTS_REPEATED},
};

static const struct file_variable *find_file_variable(void)
{
    for (size_t i = 0; i < COUNT(file_variables); i++)
        if (variable(file_variables[i].name))
            return &file_variables[i];
    return NULL;
}

/* No source names the hosts. Names a variable that is set without the one that belongs to it. */
static ep_status explain_nothing(void)
{
    static const char *const pairs[][2] = {
        {"LWS_GROUP_SIZE", "LWS_LEADER_ADDRESS"},
        {"LWS_WORKER_INDEX", "LWS_LEADER_ADDRESS"},
        {"SLURM_JOB_ID", "SLURM_JOB_NODELIST"},
        {"HOSTNAME_PREFIX", "JOB_COMPLETION_INDEX"},
    };

    for (size_t i = 0; i < sizeof(pairs) / sizeof(pairs[0]); i++)
        if (variable(pairs[i][0]))
            return ep_fail(EP_E_STATE, "no hosts are given: %s is set, but %s is not", pairs[i][0], pairs[i][1]);
    return ep_fail(EP_E_STATE,
                   "no hosts are given: neither JobSet, LeaderWorkerSet, Indexed Job, Slurm nor MPI "
                   "is in the environment, and %s does not exist",
                   HOSTS_FILE);
}

ep_status hosts_discover(struct hosts *ret_hosts, struct hosts_source *ret_source)
{
    const struct file_variable *file = find_file_variable();
    struct hosts_source source = {.index = -1};
    struct hosts hosts = {0};
    struct stat info;
    ep_status status;

    if (variable("JOBSET_NAME")) {
        status = from_jobset(&hosts, &source);
    } else if (variable("LWS_LEADER_ADDRESS")) {
        status = from_leader_worker_set(&hosts, &source);
    } else if (variable("HOSTNAME_PREFIX") && variable("JOB_COMPLETION_INDEX")) {
        status = from_chart(&hosts, &source);
    } else if (variable("JOB_COMPLETION_INDEX")) {
        status = from_indexed_job(&hosts, &source);
    } else if (variable("SLURM_JOB_NODELIST") || variable("SLURM_NODELIST")) {
        status = from_slurm(&hosts, &source);
    } else if (file) {
        status = hosts_add_file(variable(file->name), file->format, &hosts);
        snprintf(source.text, sizeof(source.text), "%s (%.100s)", variable(file->name), file->name);
    } else if (stat(HOSTS_FILE, &info) == 0) {
        status = hosts_add_file(HOSTS_FILE, HOSTS_OPEN_MPI, &hosts);
        snprintf(source.text, sizeof(source.text), "%s", HOSTS_FILE);
    } else {
        return explain_nothing();
    }
    if (status != EP_OK) {
        hosts_done(&hosts);
        return status;
    }
    *ret_hosts = hosts;
    *ret_source = source;
    return EP_OK;
}
