/* SPDX-License-Identifier: Apache-2.0 */
/* checks_limits.c - limits of the process: locked memory, shared memory, files, processors. */
#include "checks.h"

#include <sys/statvfs.h>

#define MIB (1LL << 20)
#define GIB (1LL << 30)

/* --- memlock --- */

/*
 * Queue pairs, completion queues and buffers in host memory are locked. NCCL locks some MiB per connection, so hundreds
 * of MiB per process; queues alone need tens. NVIDIA's NCCL documentation recommends no limit.
 */
#define MEMLOCK_TOO_LITTLE (64 * MIB)
#define MEMLOCK_LITTLE GIB

#define MEMLOCK "Max locked memory"
#define CAP_IPC_LOCK (1ULL << 14)                    /* capabilities(7) */
#define CAP_MORE_PROCESSES (1ULL << 21 | 1ULL << 24) /* CAP_SYS_ADMIN, CAP_SYS_RESOURCE */

#define UNLIMITED INT64_MAX

/* A limit of the process; -1: not known. An unprivileged user cannot exceed the hard one. */
struct limit {
    int64_t soft, hard;
};

static int64_t limit_number(const char *text)
{
    char *end;
    int64_t value = strtoll(text, &end, 10);

    return strcmp(text, "unlimited") == 0 ? UNLIMITED : end == text || value < 0 ? -1 : value;
}

static struct limit limit_of(struct source *source, const char *name)
{
    const char *line = strstr(source_read(source, "/proc/self/limits").text, name);
    char soft[32] = "", hard[32] = "";

    if (line)
        sscanf(line + strlen(name), "%31s %31s", soft, hard);
    return (struct limit){limit_number(soft), limit_number(hard)};
}

static bool lacks_limit(struct doctor_result *result, const char *name, struct limit limit)
{
    struct source_text limits = source_read(result->machine->source, "/proc/self/limits");

    return doctor_unknown_if(result, limit.soft < 0, "/proc/self/limits: %s",
                             limits.state == SOURCE_OK ? source_printf(result->machine->source, "no line \"%s\"", name)
                                                       : machine_reason(limits.state, limits.why));
}

static bool has_capability(struct source *source, unsigned long long bits)
{
    struct source_text status = source_read(source, "/proc/self/status");
    const char *effective = source_field(source, status.text, "CapEff");

    return *effective && (strtoull(effective, NULL, 16) & bits);
}

void run_memlock(const struct doctor_machine *machine, struct doctor_result *result)
{
    static const struct by_place where = {
        .pod = "give the container the capability IPC_LOCK (securityContext.capabilities.add)",
        .container = "start the container with --ulimit memlock=-1",
        .job = "LimitMEMLOCK=infinity for slurmd, and PropagateResourceLimitsExcept=MEMLOCK in slurm.conf",
        .host = "\"* - memlock unlimited\" in /etc/security/limits.d, and a new login"};
    struct limit limit = limit_of(machine->source, MEMLOCK);
    long long bytes = limit.soft, hard = limit.hard;

    if (lacks_limit(result, MEMLOCK, limit) || bytes >= MEMLOCK_LITTLE || has_capability(machine->source, CAP_IPC_LOCK))
        return;
    doctor_found(result, bytes < MEMLOCK_TOO_LITTLE ? DOCTOR_ERROR : DOCTOR_WARNING,
                 "the process may lock only %lld KiB of memory, which is not enough to register buffers with a NIC",
                 bytes / 1024);
    doctor_evidence(result, "/proc/self/limits", "Max locked memory %lld bytes, hard limit %s", bytes,
                    hard == UNLIMITED ? "unlimited"
                    : hard < 0        ? "not known"
                                      : source_printf(machine->source, "%lld bytes", hard));
    /* A shell may raise its limit up to the hard one; a higher limit must be set by the parent of the process. */
    if (hard == UNLIMITED)
        doctor_fix(result, false, "ulimit -l unlimited");
    else if (hard >= MEMLOCK_LITTLE)
        doctor_fix(result, false, "ulimit -l %lld", hard / 1024);
    doctor_advise(result,
                  hard >= MEMLOCK_LITTLE ? "That holds for this shell. For all: %s."
                                         : "The hard limit is as low, so ulimit cannot raise it: %s.",
                  machine_by_place(machine, where));
}

/* --- shm --- */

/* NVIDIA's NCCL documentation asks containers for --shm-size=1g; Docker gives 64 MiB. */
#define SHM_TOO_LITTLE (256 * MIB)
#define SHM_LITTLE GIB

/* size=65536k, 1g, 50%, as in tmpfs(5); the default is half of the memory. 0: *ret_percent of it; -1: no size. */
static long long tmpfs_bytes(const char *options, int *ret_percent)
{
    const char *size = strncmp(options, "size=", 5) == 0 ? options : strstr(options, ",size=");
    char *end;
    long long value, unit;

    *ret_percent = size ? 0 : 50;
    if (!size)
        return 0;
    size = strchr(size, '=') + 1;
    value = strtoll(size, &end, 10);
    if (end == size || value < 0 || (*end == '%' && value > 100))
        return -1;
    if (*end == '%')
        *ret_percent = (int)value;
    else if (value == 0)
        return INT64_MAX;
    unit = machine_unit(*end);
    return *ret_percent ? 0 : value > INT64_MAX / unit ? INT64_MAX : value * unit;
}

/*
 * The mount that contains /dev/shm: the longest mount point, and of several there the last, which hides the others:
 * {"point": "/dev/shm", "type": "tmpfs", "bytes": 0, "percent": 50}; null: there is none.
 */
static json_t *read_shm_mount(struct source_text file)
{
    static const char path[] = "/dev/shm";
    json_t *mount = json_null();
    size_t longest = 0;

    for (const char *line = file.text; line && *line; line = strchr(line, '\n')) {
        char point[256], type[32], options[512];
        long long size;
        int percent;
        size_t n;

        line += *line == '\n';
        if (sscanf(line, "%*s %255s %31s %511s", point, type, options) != 3)
            continue;
        n = strcmp(point, "/") == 0 ? 0 : strlen(point);
        if (strncmp(path, point, n) != 0 || (path[n] != '/' && path[n]) || n + 1 < longest)
            continue;
        longest = n + 1;
        json_decref(mount);
        size = tmpfs_bytes(options, &percent);
        mount = json_pack("{s:s, s:s, s:I, s:i}", "point", point, "type", type, "bytes", (json_int_t)size, "percent",
                          percent);
    }
    return mount;
}

/* Of the live machine: {"bytes": of the file system, "free": of them}. */
static json_t *ask_shm(void *argument)
{
    struct statvfs info;

    (void)argument;
    if (statvfs("/dev/shm", &info) < 0)
        return NULL;
    return json_pack("{s:I, s:I}", "bytes", (json_int_t)info.f_blocks * (json_int_t)info.f_frsize, "free",
                     (json_int_t)info.f_bavail * (json_int_t)info.f_frsize);
}

/* What /dev/shm holds; -1: not known. A folder has the sizes of its files. */
static long long shm_used(struct source *source)
{
    struct source_answer answer = source_query(source, "shm", ask_shm, NULL, 1000);
    struct source_names names;
    long long used = 0;

    if (answer.state == SOURCE_OK)
        return json_integer_value(json_object_get(answer.value, "bytes")) -
               json_integer_value(json_object_get(answer.value, "free"));
    names = source_list(source, "/dev/shm");
    for (size_t i = 0; i < names.n && i < 4096; i++) {
        struct source_stat file = source_stat(source, "/dev/shm/%s", names.names[i]);

        if (file.state == SOURCE_OK && file.kind == SOURCE_FILE && file.bytes >= 0 && file.bytes <= INT64_MAX - used)
            used += file.bytes;
    }
    return names.state == SOURCE_OK ? used : -1;
}

static void find_full_shm(const struct doctor_machine *machine, struct doctor_result *result, long long bytes)
{
    long long used = shm_used(machine->source), left = bytes - used;

    /* One that is small is not full because a little of it is used. */
    if (used <= 0 || left >= SHM_LITTLE || (left >= SHM_TOO_LITTLE && used < bytes / 2))
        return;
    doctor_found(result, left < SHM_TOO_LITTLE ? DOCTOR_ERROR : DOCTOR_WARNING,
                 "/dev/shm is full: %lld of its %lld MiB are used, and ranks share memory through it", used / MIB,
                 bytes / MIB);
    doctor_evidence(result, "/dev/shm", "%lld MiB used", used / MIB);
    doctor_advise(result,
                  "A program that is killed leaves its files there. Look who uses them (sudo fuser -v "
                  "/dev/shm/*), and remove those that nobody does%s.",
                  source_env(machine->source, "KUBERNETES_SERVICE_HOST") ? "; a new pod begins with an empty one"
                  : machine->software->os.in_container ? "; a new container begins with an empty one, unless it has "
                                                         "--ipc=host"
                                                       : "");
}

void run_shm(const struct doctor_machine *machine, struct doctor_result *result)
{
    struct source_answer mount;
    static const struct by_place more_shm = {.pod = "Mount an emptyDir with medium: Memory at /dev/shm.",
                                             .container = "Start the container with --shm-size=16g or --ipc=host.",
                                             .job = "Ask for more where the node mounts it: size= in /etc/fstab.",
                                             .host = "For later boots: size= of /dev/shm in /etc/fstab."};
    long long bytes, memory, percent;
    const char *type, *point;

    if (doctor_not_applicable_if(result, !machine_has_ranks(machine), "one GPU, and nothing needs several ranks"))
        return;
    mount = source_fact(machine->source, "shm-mount", read_shm_mount, "/proc/self/mounts");
    if (doctor_unreadable_if(result, mount.state != SOURCE_OK, "/proc/self/mounts", mount.state, mount.why))
        return;
    if (source_stat(machine->source, "/dev/shm").state == SOURCE_ABSENT) {
        doctor_found(result, DOCTOR_ERROR, "there is no /dev/shm, and ranks share memory through it");
        doctor_evidence(result, "/dev/shm", "not there");
        doctor_fix(result, false, "sudo mkdir -m 1777 /dev/shm\nsudo mount -t tmpfs tmpfs /dev/shm");
        return;
    }
    if (doctor_unknown_if(result, !json_is_object(mount.value),
                          "/proc/self/mounts: no file system that holds /dev/shm"))
        return;
    type = json_text(mount.value, "type");
    point = json_text(mount.value, "point");
    if (strcmp(type, "tmpfs") != 0 && strcmp(type, "devtmpfs") != 0)
        return;
    memory = strtoll(source_field(machine->source, source_read(machine->source, "/proc/meminfo").text, "MemTotal"),
                     NULL, 10); /* KiB */
    memory = memory > 0 && memory < INT64_MAX / 1024 ? memory * 1024 : -1;
    percent = json_integer_value(json_object_get(mount.value, "percent"));
    bytes = json_integer_value(json_object_get(mount.value, "bytes"));
    if (percent)
        bytes = memory > 0 ? memory / 100 * percent : -1;
    if (bytes < 0)
        doctor_unknown(result, "the size of /dev/shm: %s",
                       percent ? "/proc/meminfo has no MemTotal" : "size= in /proc/self/mounts is no size");
    else if (bytes < SHM_LITTLE) {
        doctor_found(result, bytes < SHM_TOO_LITTLE ? DOCTOR_ERROR : DOCTOR_WARNING,
                     "/dev/shm has only %lld MiB, and ranks share memory through it", bytes / MIB);
        doctor_evidence(result, "/proc/self/mounts", "%s %s of %lld MiB", type, point, bytes / MIB);
        /*
         * Half of the memory is the kernel's default for a tmpfs: a limit, not an allocation. Not suggested in a
         * container that may remount: that would bypass the limit set by the operator, and Kubernetes evicts a pod that
         * exceeds its limit.
         */
        if (strcmp(point, "/dev/shm") == 0 && memory / 2 >= SHM_LITTLE && !machine->software->os.in_container)
            doctor_fix(result, true, "sudo mount -o remount,size=%lldM /dev/shm", memory / 2 / MIB);
        doctor_advise(result, "%s", machine_by_place(machine, more_shm));
    } else if (bytes < INT64_MAX && strcmp(point, "/dev/shm") == 0)
        find_full_shm(machine, result, bytes);
}

/* --- nofile --- */

/* Connections of NCCL and NVSHMEM, shared memory and data loaders: about 2 per peer, and some hundred at start. */
#define NOFILE "Max open files"
#define FILES_TOO_FEW 1024
#define FILES_HARD_FEW 4096
#define RANKS_MANY 32 /* goodfire-ai/spd#957: 1024 were too few for 32 ranks, whatever the hard limit is */

void run_nofile(const struct doctor_machine *machine, struct doctor_result *result)
{
    struct limit limit = limit_of(machine->source, NOFILE);
    long long soft = limit.soft, hard = limit.hard;
    long ranks = machine_job_largest(
        machine, TEXTS("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"));

    if (doctor_not_applicable_if(result, !machine_has_ranks(machine), "one GPU, and nothing needs several ranks") ||
        lacks_limit(result, NOFILE, limit) ||
        (soft >= FILES_TOO_FEW && hard >= FILES_HARD_FEW && !(soft <= FILES_TOO_FEW && ranks >= RANKS_MANY)))
        return;
    doctor_found(result, soft < FILES_TOO_FEW ? DOCTOR_ERROR : DOCTOR_WARNING,
                 "the process may open %lld files, and can raise that to %lld", soft, hard);
    doctor_evidence(result, "/proc/self/limits", "Max open files %lld %lld", soft, hard);
    if (hard > soft)
        doctor_fix(result, false, "ulimit -n %lld", hard < 1048576 ? hard : 1048576LL);
    doctor_advise(
        result, "The hard limit is set where the process is started: %s.",
        machine_by_place(machine, (struct by_place){.pod = "LimitNOFILE=1048576 for containerd on the node",
                                                    .container = "--ulimit nofile=1048576 for the container",
                                                    .job = "LimitNOFILE=1048576 for slurmd",
                                                    .host = "\"* - nofile 1048576\" in /etc/security/limits.d, and "
                                                            "LimitNOFILE=1048576 for services"}));
}

/* --- processes --- */

/*
 * Threads of PyTorch, NCCL's proxies, data loaders and of libraries that start one for each processor: some hundred for
 * a rank. Podman's default is 2048 for a container, that of several distributions 4096 for a user.
 */
#define PROCESSES_OF_RANK 512
#define PROCESSES "Max processes"

/* What the control group leaves; UNLIMITED without a limit. */
static int64_t pids_left(struct source *source, const char **ret_where)
{
    static const char *const groups[] = {"/sys/fs/cgroup/pids.", "/sys/fs/cgroup/pids/pids."};
    int64_t max, current = 0;

    for (size_t i = 0; i < COUNT(groups); i++) {
        *ret_where = source_printf(source, "%smax", groups[i]);
        if (source_number(source, &max, "%s", *ret_where) != SOURCE_OK)
            continue;
        source_number(source, &current, "%scurrent", groups[i]);
        return max > current ? max - current : 0;
    }
    return UNLIMITED;
}

void run_processes(const struct doctor_machine *machine, struct doctor_result *result)
{
    struct source *source = machine->source;
    struct limit limit = limit_of(source, PROCESSES);
    const char *where, *hard;
    int64_t left = pids_left(source, &where), needed = PROCESSES_OF_RANK * machine_job_gpus(machine);
    bool is_limit = limit.soft >= 0 && limit.soft < left && !has_capability(source, CAP_MORE_PROCESSES);

    if (doctor_not_applicable_if(result, needed == 0 || !machine_has_ranks(machine),
                                 "no GPU for this process, or one GPU and nothing that needs several ranks"))
        return;
    left = is_limit ? limit.soft : left;
    if (left >= needed)
        return;
    doctor_found(result, left < needed / 4 ? DOCTOR_ERROR : DOCTOR_WARNING,
                 "the process and its children may have %lld processes and threads%s, and %d GPU%s take some hundred "
                 "each",
                 (long long)left, is_limit ? "" : " more", machine_job_gpus(machine),
                 machine_job_gpus(machine) == 1 ? "" : "s");
    if (is_limit) {
        hard = limit.hard == UNLIMITED ? "unlimited" : source_printf(source, "%lld", (long long)limit.hard);
        doctor_evidence(result, "/proc/self/limits", PROCESSES " %lld, hard limit %s", (long long)limit.soft, hard);
        if (limit.hard > limit.soft)
            doctor_fix(result, false, "ulimit -u %s", hard);
        doctor_advise(result, "It counts all processes of the user, also those in other containers. For all shells: "
                              "\"* - nproc unlimited\" in /etc/security/limits.d.");
        return;
    }
    doctor_evidence(result, where, "%lld left", (long long)left);
    doctor_advise(result, "The limit is set where the process is started: %s.",
                  machine_by_place(machine, (struct by_place){.pod = "podPidsLimit of the kubelet",
                                                              .container = "--pids-limit=-1 for the container",
                                                              .job = "TasksMax=infinity for slurmd",
                                                              .host = "TasksMax of the systemd unit or slice"}));
}

/* --- processors --- */

/* The number of processors in a list such as "0-3,8"; 0 if it is not one. */
static int count_list(const char *list)
{
    uint64_t mask[TOPO_MAX_CPUS / 64] = {0};
    int n = 0;

    if (topo_parse_cpus(list, mask, TOPO_MAX_CPUS))
        for (size_t i = 0; i < COUNT(mask); i++)
            n += __builtin_popcountll(mask[i]);
    return n;
}

#define CPU_MAX "/sys/fs/cgroup/cpu.max"
#define CPU_V1 "/sys/fs/cgroup/cpu/"
#define CPU_V1_QUOTA CPU_V1 "cpu.cfs_quota_us"

/* The quota of the control group in processors: "200000 100000" is 2. Negative: none, or not known (cgroups(7)). */
static double quota_of(struct source *source, const char **ret_where, const char **ret_text)
{
    struct source_text text = source_line(source, CPU_MAX);
    double quota, period;
    int64_t quota_us, period_us;

    if (text.state == SOURCE_OK) {
        *ret_where = CPU_MAX;
        *ret_text = text.text;
        return sscanf(text.text, "%lf %lf", &quota, &period) == 2 && period > 0 ? quota / period : -1;
    }
    if (source_number(source, &quota_us, CPU_V1_QUOTA) != SOURCE_OK || quota_us <= 0 ||
        source_number(source, &period_us, CPU_V1 "cpu.cfs_period_us") != SOURCE_OK || period_us <= 0)
        return -1;
    *ret_where = CPU_V1_QUOTA;
    *ret_text = source_printf(source, "%lld of a period of %lld", (long long)quota_us, (long long)period_us);
    return (double)quota_us / (double)period_us;
}

void run_processors(const struct doctor_machine *machine, struct doctor_result *result)
{
    struct source_text status = source_read(machine->source, "/proc/self/status");
    const char *list = source_field(machine->source, status.text, "Cpus_allowed_list");
    int n = count_list(list), gpus = machine_job_gpus(machine);
    const char *where = "", *text = "";
    double quota = quota_of(machine->source, &where, &text);
    bool is_quota = quota > 0 && quota < n;
    double has = is_quota ? quota : n;

    if (doctor_not_applicable_if(result, !machine_has_ranks(machine) || gpus == 0,
                                 "no GPU for this process, or one GPU and nothing that needs several ranks") ||
        doctor_unknown_if(result, n == 0, "/proc/self/status: %s",
                          status.state == SOURCE_OK ? "no line \"Cpus_allowed_list\""
                                                    : machine_reason(status.state, status.why)) ||
        has >= (gpus > 1 ? gpus : 2))
        return;
    doctor_found(result, has < gpus ? DOCTOR_ERROR : DOCTOR_WARNING, "the process has %g processor%s for %d GPU%s", has,
                 has == 1 ? "" : "s", gpus, gpus == 1 ? "" : "s");
    if (is_quota)
        doctor_evidence(result, where, "%s", text);
    else
        doctor_evidence(result, "/proc/self/status", "Cpus_allowed_list %s", list);
    doctor_advise(
        result,
        "Each rank needs a processor for itself and one for the threads of NCCL and NVSHMEM, better four: %s. Under "
        "mpirun: --bind-to none or --map-by numa:PE=8.",
        machine_by_place(machine, (struct by_place){.pod = "a larger limit for cpu, or none",
                                                    .container = "the container with a larger --cpus, or none",
                                                    .job = "srun --cpus-per-task=8",
                                                    .host = "no taskset or CPUQuota below that"}));
}
