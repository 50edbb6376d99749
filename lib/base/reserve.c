/* SPDX-License-Identifier: Apache-2.0 */
#include "base/reserve.h"

#include "base/clock.h"
#include "base/fd.h"
#include "base/process.h"

#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

/*
 * Pages are allocated in pieces, small parts of what is left, so that ranks that allocate at the same time see the
 * allocations of each other. If they took the last pages of a cgroup together, all of them would fail; but until they
 * had freed their pages, the OOM killer would end processes that access memory of any kind.
 */
#define CHUNK_BYTES ((size_t)16 << 20)
#define CHUNK_LEAST_BYTES ((size_t)128 << 10)
#define CHUNK_PARTS 64
/* Too small for a check of the limits: all allocations of a rank below this size fit into the margin of the checks. */
#define SMALL_BYTES ((size_t)64 << 10)
#define MARGIN_BYTES ((size_t)1 << 20)

/*
 * Reading the limits costs more than a small allocation. So each check allows this process to allocate a small part of
 * what is left without another check, for a short time: ALLOWANCE_PARTS processes can do the same and still fit.
 */
#define ALLOWANCE_NS 50000000u
#define ALLOWANCE_PARTS 256
#define ALLOWANCE_MOST_BYTES ((uint64_t)4 << 20)

/* --- limits ------------------------------------------------------------------------------------------------------ */

/* The number after `name` at the start of a line. */
static bool find_number(const char *text, const char *name, uint64_t *ret_value)
{
    size_t length = strlen(name);

    for (const char *at = text; at; at = strchr(at, '\n'), at = at ? at + 1 : NULL)
        if (strncmp(at, name, length) == 0 && (at[length] == ' ' || at[length] == ':')) {
            *ret_value = strtoull(at + length + 1, NULL, 10);
            return true;
        }
    return false;
}

static bool read_number(const char *folder, const char *name, uint64_t *ret_value)
{
    char path[PATH_MAX], text[64], *end;

    if (snprintf(path, sizeof(path), "%s/%s", folder, name) >= (int)sizeof(path) ||
        !ep_fd_read_text(path, text, sizeof(text)))
        return false;
    *ret_value = strtoull(text, &end, 10);
    return end != text; /* "max" is not a number */
}

/* File names of one cgroup version. */
struct cgroup_files {
    const char *mount, *limit, *usage, *inactive, *active;
};

static const struct cgroup_files cgroup_v1 = {.mount = "/sys/fs/cgroup/memory",
                                              .limit = "memory.limit_in_bytes",
                                              .usage = "memory.usage_in_bytes",
                                              .inactive = "total_inactive_file",
                                              .active = "total_active_file"};
static const struct cgroup_files cgroup_v2 = {.mount = "/sys/fs/cgroup",
                                              .limit = "memory.max",
                                              .usage = "memory.current",
                                              .inactive = "inactive_file",
                                              .active = "active_file"};

static uint64_t left_of(uint64_t limit, uint64_t usage)
{
    return usage < limit ? limit - usage : 0;
}

/* One cgroup; false if it has no limit or cannot be read. The page cache of files counts as free: it can be reclaimed.
 */
static bool read_cgroup(const struct cgroup_files *files, const char *folder, uint64_t *ret_limit, uint64_t *ret_left)
{
    uint64_t limit, usage, inactive = 0, active = 0;
    char path[PATH_MAX], text[8192];

    if (!read_number(folder, files->limit, &limit) || limit >= (uint64_t)INT64_MAX / 2 ||
        !read_number(folder, files->usage, &usage))
        return false;
    if (snprintf(path, sizeof(path), "%s/memory.stat", folder) < (int)sizeof(path) &&
        ep_fd_read_text(path, text, sizeof(text))) {
        find_number(text, files->inactive, &inactive);
        find_number(text, files->active, &active);
    }
    *ret_limit = limit;
    *ret_left = left_of(limit, left_of(usage, inactive + active));
    return true;
}

/* The path of this process below the hierarchy. */
static bool find_cgroup(char *text, const struct cgroup_files **ret_files, char **ret_path)
{
    char *line, *rest = text;

    *ret_path = NULL;
    while ((line = strsep(&rest, "\n")) && *line) {
        char *names = strchr(line, ':'), *path = names ? strchr(names + 1, ':') : NULL;

        if (!path)
            continue;
        *path++ = '\0';
        names++;
        if (strcmp(names, "memory") == 0 || strncmp(names, "memory,", 7) == 0 || strstr(names, ",memory")) {
            *ret_files = &cgroup_v1;
            *ret_path = path;
            return true;
        }
        if (!*names) {
            *ret_files = &cgroup_v2;
            *ret_path = path;
        }
    }
    return *ret_path != NULL;
}

/* *least: lowered to what is left in a cgroup, without swap space: nobody wants the rows of a peer there. */
static ep_status check_cgroups(size_t bytes, size_t need, uint64_t *least)
{
    const struct cgroup_files *files = NULL;
    char text[8192], folder[PATH_MAX], *path, *slash;
    uint64_t limit, left;

    if (!ep_fd_read_text("/proc/self/cgroup", text, sizeof(text)) || !find_cgroup(text, &files, &path) ||
        snprintf(folder, sizeof(folder), "%s%s", files->mount, path) >= (int)sizeof(folder))
        return EP_OK;
    /* All levels up to the mount point. Levels above that of a container are not visible, and their limits unknown. */
    for (;;) {
        if (read_cgroup(files, folder, &limit, &left)) {
            if (left < need)
                return ep_fail(EP_E_MEMORY,
                               "%zu bytes of shared memory do not fit: the memory cgroup %s is limited to %llu bytes "
                               "(%s), of which %llu are left",
                               bytes, folder, (unsigned long long)limit, files->limit, (unsigned long long)left);
            if (left < *least)
                *least = left;
        }
        slash = strrchr(folder, '/');
        if (!slash || strlen(folder) <= strlen(files->mount))
            return EP_OK;
        *slash = '\0';
    }
}

/* *least: what is left under the tightest limit. */
static ep_status check_limits(size_t bytes, size_t need, uint64_t *least)
{
    uint64_t available, swap_free = 0, limit, used;
    char text[4096], policy[8];

    *least = UINT64_MAX;
    if (!ep_fd_read_text("/proc/meminfo", text, sizeof(text)))
        return check_cgroups(bytes, need, least);
    if (find_number(text, "SwapFree", &swap_free))
        swap_free *= 1024;
    if (find_number(text, "MemAvailable", &available))
        *least = available * 1024 + swap_free;
    if (*least < need)
        return ep_fail(EP_E_MEMORY,
                       "%zu bytes of shared memory do not fit: this machine has %llu bytes of memory and swap left",
                       bytes, (unsigned long long)*least);
    if (ep_fd_read_text("/proc/sys/vm/overcommit_memory", policy, sizeof(policy)) && policy[0] == '2' &&
        find_number(text, "CommitLimit", &limit) && find_number(text, "Committed_AS", &used)) {
        uint64_t left = left_of(limit, used) * 1024;

        if (left < bytes)
            return ep_fail(EP_E_MEMORY,
                           "%zu bytes of shared memory do not fit: vm.overcommit_memory is 2 and the commit limit is "
                           "%llu bytes, of which %llu are in use",
                           bytes, (unsigned long long)(limit * 1024), (unsigned long long)(used * 1024));
        if (left < *least)
            *least = left;
    }
    return check_cgroups(bytes, need, least);
}

/* Valid in the process of that generation. If two threads write it at the same time, at most both allowances are used.
 */
static struct {
    _Atomic uint64_t generation, until_ns;
    _Atomic int64_t bytes;
} allowance;

static bool is_allowed(int64_t bytes)
{
    return bytes <= (int64_t)ALLOWANCE_MOST_BYTES && atomic_load(&allowance.generation) == ep_process_generation() &&
           ep_now_ns() < atomic_load(&allowance.until_ns) && atomic_fetch_sub(&allowance.bytes, bytes) >= bytes;
}

static void allow(uint64_t left)
{
    uint64_t bytes = left / ALLOWANCE_PARTS;

    atomic_store(&allowance.bytes, (int64_t)(bytes < ALLOWANCE_MOST_BYTES ? bytes : ALLOWANCE_MOST_BYTES));
    atomic_store(&allowance.until_ns, ep_now_ns() + ALLOWANCE_NS);
    atomic_store(&allowance.generation, ep_process_generation());
}

/* Plus the kernel's metadata of the pages. */
static size_t need_of(size_t bytes)
{
    return bytes + bytes / 256 + MARGIN_BYTES;
}

/* A small allocation, or one within the allowance of an earlier check. */
static bool needs_no_check(size_t bytes)
{
    return bytes < SMALL_BYTES ||
           (bytes <= ALLOWANCE_MOST_BYTES && is_allowed((int64_t)(need_of(bytes) - MARGIN_BYTES)));
}

static ep_status check_and_allow(size_t bytes, uint64_t *ret_least)
{
    EP_TRY(check_limits(bytes, need_of(bytes), ret_least));
    allow(left_of(*ret_least, need_of(bytes)));
    return EP_OK;
}

ep_status ep_reserve_check(size_t bytes)
{
    uint64_t least;

    return needs_no_check(bytes) ? EP_OK : check_and_allow(bytes, &least);
}

/* *bytes: lowered to what may be allocated before the next check. */
static ep_status limit_piece(size_t *bytes)
{
    uint64_t least, part;

    if (needs_no_check(*bytes))
        return EP_OK;
    EP_TRY(check_and_allow(*bytes, &least));
    part = least / CHUNK_PARTS;
    part = part > CHUNK_LEAST_BYTES ? part & ~(CHUNK_LEAST_BYTES - 1) : CHUNK_LEAST_BYTES;
    if (*bytes > part)
        *bytes = (size_t)part;
    return EP_OK;
}

ep_status ep_reserve_resize(int fd, size_t bytes)
{
    struct rlimit limit;

    /* Checked before, because the kernel sends SIGXFSZ. */
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && bytes > limit.rlim_cur)
        return ep_fail(EP_E_MEMORY,
                       "%zu bytes of shared memory are more than RLIMIT_FSIZE (ulimit -f) allows, which is %llu bytes: "
                       "shared memory is a file to the kernel",
                       bytes, (unsigned long long)limit.rlim_cur);
    if (ftruncate(fd, (off_t)bytes) != 0)
        return ep_fail_errno(EP_E_MEMORY, errno, "shared memory: ftruncate to %zu bytes", bytes);
    return EP_OK;
}

ep_status ep_reserve_fail_map(int error_number, size_t bytes)
{
    struct rlimit space = {.rlim_cur = RLIM_INFINITY}, locked = space;
    char count[32] = "?";

    if (error_number != ENOMEM && error_number != EAGAIN)
        return ep_fail_errno(EP_E_SYSTEM, error_number, "shared memory: mmap of %zu bytes", bytes);
    getrlimit(RLIMIT_AS, &space);
    getrlimit(RLIMIT_MEMLOCK, &locked);
    if (error_number == EAGAIN)
        return ep_fail(EP_E_MEMORY,
                       "shared memory: mmap of %zu bytes: memory of this process is locked (mlockall) and "
                       "RLIMIT_MEMLOCK (ulimit -l) is %llu bytes",
                       bytes, (unsigned long long)locked.rlim_cur);
    if (space.rlim_cur != RLIM_INFINITY)
        return ep_fail(EP_E_MEMORY,
                       "shared memory: mmap of %zu bytes: no address space: RLIMIT_AS (ulimit -v) is %llu bytes", bytes,
                       (unsigned long long)space.rlim_cur);
    if (ep_fd_read_text("/proc/sys/vm/max_map_count", count, sizeof(count)))
        count[strcspn(count, "\n")] = '\0';
    return ep_fail(EP_E_MEMORY,
                   "shared memory: mmap of %zu bytes: out of memory, or more than vm.max_map_count = %s mappings",
                   bytes, count);
}

/* --- pages ------------------------------------------------------------------------------------------------------- */

/* fallocate(), with signals blocked: one makes it undo what it has allocated, and would do so again in each attempt. */
static int allocate_blocked(int fd, size_t offset, size_t bytes)
{
    sigset_t all, old;
    int result, error;

    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    result = fallocate(fd, 0, (off_t)offset, (off_t)bytes);
    error = errno;
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    errno = error;
    return result;
}

/* Allocates the pages of a mapping; contents are kept. */
static ep_status populate(void *base, size_t bytes)
{
    int tries = 0;

    while (madvise(base, bytes, MADV_POPULATE_WRITE) != 0) {
        if ((errno == EINTR || errno == EAGAIN) && tries++ < 1000)
            continue;
        if (errno == EFAULT || errno == ENOMEM || errno == EHWPOISON)
            return ep_fail_errno(EP_E_MEMORY, errno, "%zu bytes of shared memory cannot be allocated", bytes);
        break; /* kernels before 5.14 do not have it: rely on the check of the limits */
    }
    return EP_OK;
}

ep_status ep_reserve_file(int fd, size_t offset, size_t bytes)
{
    size_t done = 0;

    EP_TRY(ep_reserve_check(bytes)); /* before any page is allocated */
    while (done < bytes) {
        size_t piece = bytes - done < CHUNK_BYTES ? bytes - done : CHUNK_BYTES;

        EP_TRY(limit_piece(&piece));
        if (allocate_blocked(fd, offset + done, piece) == 0)
            done += piece;
        else if (errno != EINTR) /* SIGSTOP, which cannot be blocked */
            return ep_fail_errno(
                EP_E_MEMORY, errno,
                "%zu bytes of shared memory cannot be allocated, %zu of them can (memory of the machine, its "
                "cgroup, or the commit limit)",
                bytes, done);
    }
    return EP_OK;
}

ep_status ep_reserve_mapping(void *base, size_t bytes)
{
    EP_TRY(ep_reserve_check(bytes));
    return populate(base, bytes);
}
