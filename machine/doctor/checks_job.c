/* SPDX-License-Identifier: Apache-2.0 */
/* checks_job.c - the variables of a job, its peers; and an installation that does not finish. */
#include "checks.h"

/* --- rendezvous --- */

#define PORT "MASTER_PORT"

/* A contradiction in the job's variables; NULL if there is none. */
static const char *rank_contradiction(const struct doctor_machine *machine)
{
    static const char *const numbers[] = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"};
    long world = machine_job_number(machine, "WORLD_SIZE", -1), rank = machine_job_number(machine, "RANK", -1),
         local_world = machine_job_number(machine, "LOCAL_WORLD_SIZE", -1),
         local_rank = machine_job_number(machine, "LOCAL_RANK", -1), port = machine_job_number(machine, PORT, -1);
    const char *address = source_env(machine->source, "MASTER_ADDR");
    int n_gpus = topo_usable_gpus(machine->topo);

    /* For Python; an unresolved reference of a manifest, "$(NNODES)", is none. LOCAL_RANK=-1 is no rank for some. */
    for (size_t i = 0; i < COUNT(numbers); i++) {
        const char *value = machine_env(machine, numbers[i]);
        char *end;

        strtol(value, &end, 10);
        if (*value && (end == value || end[strspn(end, " \t\r\n")]))
            return source_printf(machine->source, "%s is not a number", numbers[i]);
    }
    if (world > 0 && rank >= world)
        return source_printf(machine->source, "RANK=%ld is beyond WORLD_SIZE=%ld", rank, world);
    if (local_world > 0 && local_rank >= local_world)
        return source_printf(machine->source, "LOCAL_RANK=%ld is beyond LOCAL_WORLD_SIZE=%ld", local_rank, local_world);
    if (!source_env(machine->source, "CUDA_VISIBLE_DEVICES") && n_gpus > 1 && local_rank >= n_gpus)
        return source_printf(machine->source, "LOCAL_RANK=%ld, and there are %d GPUs", local_rank, n_gpus);
    if (world > 0 && local_world > world)
        return source_printf(machine->source, "WORLD_SIZE=%ld is less than LOCAL_WORLD_SIZE=%ld", world, local_world);
    if (source_env(machine->source, PORT) && (port < 1 || port > 65535))
        return "MASTER_PORT is not a port";
    if (address && !*address)
        return "MASTER_ADDR is empty";
    if (address && (strcmp(address, "0.0.0.0") == 0 || strcmp(address, "::") == 0))
        return "MASTER_ADDR is an address to listen on, not one to connect to";
    if (address && address_is_loopback(address) &&
        (machine_job_nodes(machine) > 1 || (local_world > 0 && world > local_world)))
        return "MASTER_ADDR is the loopback, and there are other nodes: each waits for itself";
    return NULL;
}

void run_rendezvous(const struct doctor_machine *machine, struct doctor_result *result)
{
    static const char *const shown[] = {"RANK",        "WORLD_SIZE",  "LOCAL_RANK",          "LOCAL_WORLD_SIZE",
                                        "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_NUM_NODES", "NNODES"};
    const char *fault;

    if (doctor_not_applicable_if(result, !ANY_OF(i, COUNT(shown), source_env(machine->source, shown[i])),
                                 "the environment is not that of a rank"))
        return;
    fault = rank_contradiction(machine);
    if (!fault)
        return;
    doctor_found(result, DOCTOR_ERROR, "the ranks cannot find each other: %s", fault);
    for (size_t i = 0; i < COUNT(shown); i++)
        if (source_env(machine->source, shown[i]))
            doctor_evidence_env(result, shown[i]);
}

/* --- single-ranks --- */

void run_single_ranks(const struct doctor_machine *machine, struct doctor_result *result)
{
    bool is_openmpi = source_env(machine->source, "OMPI_COMM_WORLD_SIZE") != NULL;
    const char *name = is_openmpi ? "OMPI_COMM_WORLD_SIZE" : "PMI_SIZE", *mpi = "";
    long tasks = machine_job_number(machine, "SLURM_STEP_NUM_TASKS", -1),
         of_mpi = machine_job_number(machine, name, -1);
    struct source_names mapped = libs_mapped(machine->source, "libmpi.so");

    /* By ABI number: Open MPI 4 and 5, MPICH and Intel MPI. */
    for (size_t i = 0; i < mapped.n && !*mpi; i++)
        mpi = strstr(mapped.names[i], "libmpi.so.40") || strstr(mapped.names[i], "libmpi.so.80") ? "Open MPI"
              : strstr(mapped.names[i], "libmpi.so.12")                                          ? "MPICH or Intel MPI"
                                                                                                 : "";
    if (doctor_not_applicable_if(result, of_mpi < 1, "the process was not started by a launcher of MPI"))
        return;
    if (tasks > 1 && of_mpi == 1) {
        doctor_found(result, DOCTOR_ERROR, "%ld tasks were started, and each is a separate run with one rank", tasks);
        doctor_evidence(result, "SLURM_STEP_NUM_TASKS", "%ld", tasks);
        doctor_evidence(result, name, "1");
        doctor_advise(result, "Use one launcher, not two: srun with an MPI that knows Slurm (srun --mpi=pmix), or one "
                              "mpirun for all ranks within the allocation.");
    } else if (of_mpi > 1 && *mpi && is_openmpi != (strcmp(mpi, "Open MPI") == 0)) {
        doctor_found(result, DOCTOR_ERROR, "the process was started by %s and has loaded %s: each rank runs alone",
                     is_openmpi ? "Open MPI" : "MPICH or Intel MPI", mpi);
        doctor_evidence(result, name, "%ld", of_mpi);
        doctor_evidence(result, "/proc/self/maps", "%s", mapped.names[0]);
        doctor_advise(result, "Start it with the mpirun of the MPI that it was built with, or build it again with the "
                              "MPI of this mpirun.");
    }
}

/* --- environ-sourced --- */

#define ENVIRON "/proc/1/environ"

/* Startup files of shells with fixed paths. */
static const char *const start_files[] = {"/etc/profile",        "/etc/bash.bashrc", "/etc/bashrc",
                                          "/etc/environment",    "/root/.bashrc",    "/root/.profile",
                                          "/root/.bash_profile", "/etc/ssh/sshrc",   "/root/.ssh/environment"};

/* The number of lines that evaluate it. */
static json_t *read_start_file(struct source_text file)
{
    int n_lines = 0;

    FOR_LINES (line, file)
        n_lines += shell_evaluates_environ(line.text, line.n);
    return json_integer(n_lines);
}

static void check_start_file(struct doctor_result *result, const char *file, const char *what)
{
    struct source_answer lines =
        source_log_fact(result->machine->source, "evaluates-environ", read_start_file, ENVIRON, "%s", file);

    for (json_int_t n = json_integer_value(lines.value); n > 0; n--) {
        doctor_found_first(result, DOCTOR_WARNING, "%s evaluates " ENVIRON " in every shell", what);
        doctor_evidence(result, file, "a line that evaluates " ENVIRON);
    }
}

void run_environ_sourced(const struct doctor_machine *machine, struct doctor_result *result)
{
    for (size_t i = 0; i < COUNT(start_files); i++)
        check_start_file(result, start_files[i], start_files[i]);
    FOR_NAMES (name, source_list(machine->source, "/etc/profile.d"))
        check_start_file(result, source_printf(machine->source, "/etc/profile.d/%s", name), "a file in /etc/profile.d");
}

/* --- install-stuck --- */

#define INSTALL "/var/lib/epkit/install" /* INSTALL_STATE of epkit install: one folder for each recipe */
#define RESTARTS_MANY 3

/* The last event of a journal with its step, and the restarts since the installation was started or resumed. */
static json_t *read_journal(struct source_text file)
{
    char event[64] = "", step[64] = "";
    int reboots = 0;

    FOR_PIECES (text, file.text, "\n") {
        json_t *line = text.n < 65536 && text.text[text.n] == '\n' ? json_loadb(text.text, text.n, 0, NULL) : NULL;

        if (json_is_string(json_object_get(line, "event"))) {
            snprintf(event, sizeof(event), "%s", json_text(line, "event"));
            snprintf(step, sizeof(step), "%s", json_text(line, "step"));
            reboots = text_is_any(event, TEXTS("finished", "uninstalled", "again")) ? 0
                      : strcmp(event, "reboot") == 0                                ? reboots + 1
                                                                                    : reboots;
        }
        json_decref(line);
    }
    return json_pack("{s:s, s:s, s:i}", "event", event, "step", step, "reboots", reboots);
}

void run_install_stuck(const struct doctor_machine *machine, struct doctor_result *result)
{
    struct source_names recipes = source_list(machine->source, INSTALL);

    if (doctor_not_applicable_if(result, recipes.state == SOURCE_ABSENT || recipes.state == SOURCE_NOT_RECORDED,
                                 "nothing was installed by epkit install") ||
        doctor_unreadable_if(result, recipes.state != SOURCE_OK, INSTALL, recipes.state, recipes.why))
        return;
    for (size_t i = 0; i < recipes.n && result->outcome != DOCTOR_FOUND; i++) {
        const char *recipe = recipes.names[i], *word = shell_word(machine->source, recipe),
                   *path = source_printf(machine->source, INSTALL "/%s/journal.jsonl", recipe);
        const json_t *journal = source_fact(machine->source, "journal", read_journal, "%s", path).value;
        const char *event = json_text(journal, "event"), *step = json_text(journal, "step");
        int n = json_int(journal, "reboots");

        if (strcmp(event, "stopped") == 0)
            doctor_found(result, DOCTOR_ERROR, "the installation of %s was given up after %d restart%s of the node",
                         recipe, n, n == 1 ? "" : "s");
        else if (n >= RESTARTS_MANY)
            doctor_found(result, DOCTOR_ERROR, "the installation of %s has restarted the node %d times and is not done",
                         recipe, n);
        else
            continue;
        doctor_evidence(result, path, "last event: %s%s%s", event, *step ? ", step " : "", step);
        doctor_advise(result,
                      "epkit install status %s says which step is not done and why. After removing the cause, resume "
                      "with epkit install apply %s --again.",
                      word, word);
    }
}
