/* SPDX-License-Identifier: Apache-2.0 */
/* checks_limits.c - limits of the process: locked memory, shared memory. */
#include "checks.h"
#include "queries.h"

#include <stdlib.h>
#include <string.h>

#define MIB (1LL << 20)
#define GIB (1LL << 30)

/* --- memlock --- */

/*
 * Queue pairs, completion queues and buffers in host memory are locked. NCCL locks some MiB per connection, so hundreds
 * of MiB per process; queues alone need tens. NVIDIA's NCCL documentation recommends no limit.
 */
#define MEMLOCK_TOO_LITTLE (64 * MIB)
#define MEMLOCK_LITTLE GIB

#define CAP_IPC_LOCK_BIT 14 /* capabilities(7) */

/* Parses a limit in bytes; -1: unlimited, -2: not a limit. */
static long long parse_limit(const char *value, const char **ret_end)
{
    long long bytes;
    char *end;

    value += strspn(value, " ");
    if (strncmp(value, "unlimited", 9) == 0) {
        *ret_end = value + 9;
        return -1;
    }
    bytes = strtoll(value, &end, 10);
    *ret_end = end;
    return end == value || bytes < 0 ? -2 : bytes;
}

/* The soft limit; *ret_hard is the hard one, which an unprivileged user cannot exceed. */
static long long memlock_of(struct source *source, const char *limits, long long *ret_hard)
{
    const char *line = strstr(limits, "Max locked memory"), *rest;
    long long soft;

    *ret_hard = -2;
    if (!line)
        return -2;
    soft = parse_limit(source_printf(source, "%.64s", line + strlen("Max locked memory")), &rest);
    if (soft != -2)
        *ret_hard = parse_limit(rest, &rest);
    return soft;
}

/* A shell may raise its limit up to the hard one; a higher limit must be set by the parent of the process. */
static void fix_memlock(const struct doctor_machine *machine, struct doctor_result *result, long long hard)
{
    const char *where = "\"* - memlock unlimited\" in /etc/security/limits.d and a new login; for jobs of Slurm, "
                        "LimitMEMLOCK=infinity for slurmd and PropagateResourceLimitsExcept=MEMLOCK in slurm.conf";

    if (hard == -1)
        doctor_fix(machine, result, false, "ulimit -l unlimited");
    else if (hard >= MEMLOCK_LITTLE)
        doctor_fix(machine, result, false, "ulimit -l %lld", hard / 1024);
    if (os_is_for_containers(&machine->software->os))
        doctor_advise(machine, result,
                      "Start the container with more: docker run --ulimit memlock=-1, in Kubernetes the capability "
                      "IPC_LOCK.");
    else if (hard == -1 || hard >= MEMLOCK_LITTLE)
        doctor_advise(machine, result, "That holds for this shell. For all: %s.", where);
    else
        doctor_advise(machine, result, "The hard limit is as low, so ulimit cannot raise it: %s.", where);
}

static bool may_lock_all(struct source *source)
{
    struct source_text status = source_read(source, "/proc/self/status");
    const char *effective = machine_text_field(source, status.text, "CapEff");

    return *effective && (strtoull(effective, NULL, 16) >> CAP_IPC_LOCK_BIT & 1);
}

long long machine_memlock(const struct doctor_machine *machine)
{
    struct source_text limits = source_read(machine->source, "/proc/self/limits");
    long long hard;

    if (may_lock_all(machine->source))
        return MACHINE_MEMLOCK_UNLIMITED;
    return limits.state == SOURCE_OK ? memlock_of(machine->source, limits.text, &hard) : MACHINE_MEMLOCK_UNKNOWN;
}

static void run_memlock(const struct doctor_machine *machine, struct doctor_result *result)
{
    struct source_text limits;
    long long bytes, hard = -2;

    if (!machine_has_gpus(machine, result) || !machine_has_data_nics(machine, result))
        return;
    limits = source_read(machine->source, "/proc/self/limits");
    bytes = limits.state == SOURCE_OK ? memlock_of(machine->source, limits.text, &hard) : -2;
    if (bytes == -2) {
        doctor_unknown(machine, result, "/proc/self/limits: %s",
                       limits.state == SOURCE_OK ? "no line \"Max locked memory\""
                                                 : machine_reason(limits.state, limits.why));
        return;
    }
    if (bytes == -1 || bytes >= MEMLOCK_LITTLE || may_lock_all(machine->source))
        return;
    doctor_found(machine, result, bytes < MEMLOCK_TOO_LITTLE ? DOCTOR_ERROR : DOCTOR_WARNING,
                 "the process may lock only %lld KiB of memory, which is not enough to register buffers with a NIC",
                 bytes / 1024);
    doctor_evidence(machine, result, "/proc/self/limits", "Max locked memory %lld bytes, hard limit %s", bytes,
                    hard == -1   ? "unlimited"
                    : hard == -2 ? "not known"
                                 : source_printf(machine->source, "%lld bytes", hard));
    fix_memlock(machine, result, hard);
}

const struct doctor_check check_memlock = {
    .id = "memlock",
    .group = "limits",
    .mode = 38,
    .title = "the process may lock enough memory for RDMA",
    .symptom = "ibv_reg_mr or ibv_create_cq fails with ENOMEM; \"Cannot allocate memory\" although there is plenty.",
    .cause = "Memory that a NIC works with is locked, and the limit for it (RLIMIT_MEMLOCK) is small by default.",
    .remedy = "Remove the limit, or give the container the capability IPC_LOCK.",
    .links = (const char *const[]){"/proc/self/limits", "/etc/security/limits.d", NULL},
    .run = run_memlock,
};

/* --- shm --- */

/* NVIDIA's NCCL documentation asks containers for --shm-size=1g; Docker gives 64 MiB. */
#define SHM_TOO_LITTLE (256 * MIB)
#define SHM_LITTLE GIB

struct mount {
    char point[256], type[32], options[512];
};

/*
 * The mount that contains `path`: the one with the longest mount point; of several at one mount point the last one,
 * which hides the others.
 */
static bool mount_of(const char *mounts, const char *path, struct mount *ret_mount)
{
    size_t longest = 0;

    for (const char *line = mounts; line && *line; line = strchr(line, '\n')) {
        struct mount mount;
        size_t n;

        line += *line == '\n';
        if (sscanf(line, "%*s %255s %31s %511s", mount.point, mount.type, mount.options) != 3)
            continue;
        n = strcmp(mount.point, "/") == 0 ? 0 : strlen(mount.point);
        if (strncmp(path, mount.point, n) == 0 && (path[n] == '/' || path[n] == '\0') && n + 1 > longest) {
            longest = n + 1;
            *ret_mount = mount;
        } else if (n + 1 == longest && strcmp(mount.point, ret_mount->point) == 0) {
            *ret_mount = mount;
        }
    }
    return longest > 0;
}

/* MemTotal in bytes; -1: not known. */
static long long memory_of(struct source *source)
{
    struct source_text text = source_read(source, "/proc/meminfo");
    const char *value = machine_text_field(source, text.text, "MemTotal");
    long long kib = strtoll(value, NULL, 10);

    return kib > 0 && kib < INT64_MAX / 1024 ? kib * 1024 : -1;
}

/* size=65536k, 1g, 50%, as in tmpfs(5); the default is half of the memory. -1: not known, INT64_MAX: no limit. */
static long long tmpfs_bytes(const char *options, long long memory)
{
    const char *size = strncmp(options, "size=", 5) == 0 ? options : strstr(options, ",size=");
    char *end;
    long long value, unit = 1;

    if (!size)
        return memory > 0 ? memory / 2 : -1;
    size = strchr(size, '=') + 1;
    value = strtoll(size, &end, 10);
    if (end == size || value < 0)
        return -1;
    if (*end == '%')
        return memory > 0 && value <= 100 ? memory / 100 * value : -1;
    if (*end == 'k' || *end == 'K')
        unit = 1024;
    else if (*end == 'm' || *end == 'M')
        unit = MIB;
    else if (*end == 'g' || *end == 'G')
        unit = GIB;
    if (value == 0)
        return INT64_MAX;
    return value > INT64_MAX / unit ? INT64_MAX : value * unit;
}

static void found_small_shm(const struct doctor_machine *machine, struct doctor_result *result,
                            const struct mount *mount, long long bytes, long long memory)
{
    doctor_found(machine, result, bytes < SHM_TOO_LITTLE ? DOCTOR_ERROR : DOCTOR_WARNING,
                 "/dev/shm has only %lld MiB, and ranks share memory through it", bytes / MIB);
    doctor_evidence(machine, result, "/proc/self/mounts", "%s %s %s", mount->type, mount->point, mount->options);
    /*
     * Half of the memory is the kernel's default for a tmpfs: a limit, not an allocation. Not suggested in a container
     * that may remount: that would bypass the limit set by the operator, and Kubernetes evicts a pod that exceeds its
     * limit.
     */
    if (strcmp(mount->point, "/dev/shm") == 0 && memory / 2 >= SHM_LITTLE && !machine->software->os.in_container)
        doctor_fix(machine, result, true, "sudo mount -o remount,size=%lldM /dev/shm", memory / 2 / MIB);
    doctor_advise(
        machine, result,
        "In a container: docker run --shm-size=16g or --ipc=host, in Kubernetes an emptyDir with medium: Memory "
        "at /dev/shm.");
}

static void run_shm(const struct doctor_machine *machine, struct doctor_result *result)
{
    struct source_text mounts;
    struct source_stat shm;
    struct mount mount = {.point = ""};
    long long bytes, memory;

    if (!machine_has_gpus(machine, result))
        return;
    if (!machine_has_ranks(machine)) {
        doctor_not_applicable(machine, result, "one GPU, and nothing needs several ranks");
        return;
    }
    mounts = source_read(machine->source, "/proc/self/mounts");
    if (mounts.state != SOURCE_OK) {
        doctor_unknown(machine, result, "/proc/self/mounts: %s", machine_reason(mounts.state, mounts.why));
        return;
    }
    shm = source_stat(machine->source, "/dev/shm");
    if (shm.state == SOURCE_ABSENT) {
        doctor_found(machine, result, DOCTOR_ERROR, "there is no /dev/shm, and ranks share memory through it");
        doctor_evidence(machine, result, "/dev/shm", "not there");
        doctor_fix(machine, result, false, "sudo mkdir -m 1777 /dev/shm\nsudo mount -t tmpfs tmpfs /dev/shm");
        return;
    }
    if (!mount_of(mounts.text, "/dev/shm", &mount)) {
        doctor_unknown(machine, result, "/proc/self/mounts: no file system that holds /dev/shm");
        return;
    }
    if (strcmp(mount.type, "tmpfs") != 0 && strcmp(mount.type, "devtmpfs") != 0)
        return;
    memory = memory_of(machine->source);
    bytes = tmpfs_bytes(mount.options, memory);
    if (bytes < 0)
        doctor_unknown(machine, result, "the size of /dev/shm: %s, and /proc/meminfo has no MemTotal", mount.options);
    else if (bytes < SHM_LITTLE)
        found_small_shm(machine, result, &mount, bytes, memory);
}

const struct doctor_check check_shm = {
    .id = "shm",
    .group = "limits",
    .mode = 38,
    .title = "/dev/shm is large enough",
    .symptom = "Bus error (SIGBUS) in NCCL or a data loader; \"No space left on device\" on /dev/shm/nccl-*.",
    .cause =
        "Ranks of a node share memory through /dev/shm. Docker's default is 64 MiB, and a process that writes beyond "
        "that is killed.",
    .remedy = "Give the container more (--shm-size, an emptyDir in memory), or remount it larger.",
    .links = (const char *const[]){"/dev/shm", "/proc/self/mounts", NULL},
    .run = run_shm,
};
