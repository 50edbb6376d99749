/* SPDX-License-Identifier: Apache-2.0 */
/*
 * base/reserve.c and shm.c: an allocation above a limit fails with a status that names the limit, and not by a signal
 * at the first access. Each case runs in a child, because a lowered limit cannot be raised again.
 */
#include "base/reserve.h"
#include "base/shm.h"
#include "cgroup.h"
#include "sandbox.h"
#include "unit.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)

/* Ends the child with the line that is wrong. */
#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "line %d: %s: %s\n", __LINE__, #condition, ep_last_error());                               \
            _exit(1);                                                                                                  \
        }                                                                                                              \
    } while (0)

/* 0: the child found no error. A signal is returned as its negated number. */
static int in_child(void (*run)(void))
{
    pid_t pid = fork();
    int how = 0;

    if (pid == 0) {
        alarm(100);
        run();
        _exit(0);
    }
    assert_true(pid > 0);
    assert_int_equal(waitpid(pid, &how, 0), pid);
    return WIFSIGNALED(how) ? -WTERMSIG(how) : WEXITSTATUS(how);
}

static void set_limit(int which, rlim_t value)
{
    struct rlimit limit;

    CHECK(getrlimit((__rlimit_resource_t)which, &limit) == 0);
    limit.rlim_cur = value;
    CHECK(setrlimit((__rlimit_resource_t)which, &limit) == 0);
}

/* A large allocation fails with the limit in the text; one that fits still succeeds, and can be accessed. */
static void refused(size_t too_much, size_t fits, const char *limit)
{
    struct ep_shm shm = {.fd = -1};

    CHECK(ep_shm_new(too_much, &shm) == EP_E_MEMORY);
    CHECK(strstr(ep_last_error(), limit));
    CHECK(!shm.base);
    if (!fits)
        return;
    CHECK(ep_shm_new(fits, &shm) == EP_OK);
    memset(shm.base, 1, fits);
    ep_shm_done(&shm);
}

static void limit_of_files(void)
{
    set_limit(RLIMIT_FSIZE, 256 << 10);
    refused(MIB, 256 << 10, "RLIMIT_FSIZE (ulimit -f) allows, which is 262144 bytes");
    set_limit(RLIMIT_FSIZE, 0);
    refused(1, 0, "RLIMIT_FSIZE (ulimit -f)");
}

static void limit_of_address_space(void)
{
    set_limit(RLIMIT_AS, 256 * MIB);
    refused(512 * MIB, MIB, "RLIMIT_AS (ulimit -v) is 268435456 bytes");
}

static void limit_of_locked_memory(void)
{
    /* Privileged processes are exempt. */
    CHECK(setgid(65534) == 0 && setuid(65534) == 0);
    set_limit(RLIMIT_MEMLOCK, 4 * MIB);
    CHECK(mlockall(MCL_FUTURE) == 0);
    refused(8 * MIB, 65536, "RLIMIT_MEMLOCK (ulimit -l) is 4194304 bytes");
}

static void limit_of_descriptors(void)
{
    struct ep_shm shm = {.fd = -1};

    set_limit(RLIMIT_NOFILE, 3);
    for (int fd = 3; fd < 64; fd++)
        close(fd);
    CHECK(ep_shm_new(4096, &shm) == EP_E_SYSTEM);
    CHECK(strstr(ep_last_error(), "RLIMIT_NOFILE"));
}

static void memory_of_the_machine(void)
{
    refused((size_t)1 << 44, MIB, "this machine has ");
}

TEST(limits_are_named)
{
    assert_int_equal(in_child(limit_of_files), 0);
    assert_int_equal(in_child(limit_of_descriptors), 0);
    assert_int_equal(in_child(memory_of_the_machine), 0);
}

TEST(limits_of_mappings_are_named)
{
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    print_message("SKIP: the sanitizer's own mappings do not fit\n");
    skip();
#endif
    if (geteuid() == 0)
        assert_int_equal(in_child(limit_of_locked_memory), 0);
    assert_int_equal(in_child(limit_of_address_space), 0);
}

/* --- a memory cgroup --- */

static struct cgroup cgroup;

static void limit_of_cgroup(void)
{
    struct ep_shm shm[64];
    int n = 0;

    CHECK(cgroup_join(&cgroup));
    refused(128 * MIB, 16 * MIB, cgroup.limit_file);
    CHECK(strstr(ep_last_error(), "limited to 67108864 bytes"));
    /* Many allocations: the first that does not fit fails, and the ones before can be accessed. */
    while (n < 64 && ep_shm_new(4 * MIB, &shm[n]) == EP_OK)
        n++;
    CHECK(n >= 8 && n < 16);
    CHECK(strstr(ep_last_error(), cgroup.limit_file));
    for (int i = 0; i < n; i++)
        memset(shm[i].base, i, 4 * MIB);
    /* Freed memory is available again. */
    ep_shm_done(&shm[0]);
    ep_shm_done(&shm[1]);
    CHECK(ep_shm_new(4 * MIB, &shm[0]) == EP_OK);
}

TEST(a_cgroup_is_named)
{
    int result;

#if defined(__SANITIZE_THREAD__)
    print_message("SKIP: the shadow memory of ThreadSanitizer counts against the limit, too\n");
    skip();
#endif
    if (!cgroup_make(&cgroup, 64 * MIB)) {
        print_message("SKIP: no memory cgroup can be made here\n");
        skip();
    }
    result = in_child(limit_of_cgroup);
    cgroup_remove(&cgroup);
    assert_int_equal(result, 0);
}

/* --- limits of both versions of cgroups: with fake kernel files --- */

static void write_file(const char *folder, const char *name, const char *text)
{
    char path[400];
    FILE *stream;

    snprintf(path, sizeof(path), "%s/%s", folder, name);
    stream = fopen(path, "w");
    CHECK(stream && fputs(text, stream) >= 0 && fclose(stream) == 0);
}

/* 8 GiB of memory and 8 GiB of swap space, a cgroup with 1 MiB of memory left. */
static int fake_limits(const char *cgroups, const char *folder)
{
    char meminfo[64] = "/sys/fs/cgroup/meminfo", own[64] = "/sys/fs/cgroup/own";

    if (!sandbox_private_mounts() || mount("none", "/sys/fs/cgroup", "tmpfs", 0, "size=64k") != 0)
        return SANDBOX_SKIP;
    CHECK(mkdir("/sys/fs/cgroup/memory", 0755) == 0);
    write_file("/sys/fs/cgroup", "meminfo", "MemAvailable:    8388608 kB\nSwapFree:        8388608 kB\n");
    write_file("/sys/fs/cgroup", "own", cgroups);
    write_file(folder, "memory.stat", "inactive_file 0\nactive_file 0\ntotal_inactive_file 0\ntotal_active_file 0\n");
    if (mount(meminfo, "/proc/meminfo", NULL, MS_BIND, NULL) != 0 ||
        mount(own, "/proc/self/cgroup", NULL, MS_BIND, NULL) != 0)
        return SANDBOX_SKIP;
    return 0;
}

/* 1 MiB is left in the cgroup; swap space does not count. */
static int check_fake_limits(const char *cgroups, const char *folder, const char *limit, const char *usage)
{
    int result = fake_limits(cgroups, folder);

    if (result)
        return result;
    write_file(folder, limit, "67108864\n");
    write_file(folder, usage, "66060288\n");
    CHECK(ep_reserve_check(5 * MIB) == EP_E_MEMORY);
    CHECK(strstr(ep_last_error(), "of which 1048576 are left"));
    write_file(folder, usage, "33554432\n");
    CHECK(ep_reserve_check(5 * MIB) == EP_OK);
    return 0;
}

static int limits_of_cgroup_v2(void *unused)
{
    (void)unused;
    return check_fake_limits("0::/\n", "/sys/fs/cgroup", "memory.max", "memory.current");
}

static int limits_of_cgroup_v1(void *unused)
{
    (void)unused;
    return check_fake_limits("4:memory:/\n", "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes");
}

TEST(cgroups_of_both_versions_count)
{
    sandbox_expect(sandbox_run(limits_of_cgroup_v2, NULL));
    sandbox_expect(sandbox_run(limits_of_cgroup_v1, NULL));
}

/* --- implementation --- */

/* Calls of read() so far; -1: the kernel does not count them. */
static long count_reads(void)
{
    char text[512], *at;
    FILE *stream = fopen("/proc/self/io", "re");
    size_t n = stream ? fread(text, 1, sizeof(text) - 1, stream) : 0;

    if (stream)
        fclose(stream);
    text[n] = '\0';
    at = strstr(text, "syscr:");
    return at ? atol(at + 6) : -1;
}

/* Each reading of the limits takes more than ten calls. */
TEST(small_allocations_share_a_check)
{
    enum { ALLOCATIONS = 2000 };
    long before = count_reads();
    struct ep_shm shm;

    if (before < 0) {
        print_message("SKIP: the kernel does not count calls of read()\n");
        skip();
    }
    for (int i = 0; i < ALLOCATIONS; i++) {
        assert_int_equal(ep_shm_new(65536, &shm), EP_OK);
        ep_shm_done(&shm);
    }
    assert_true(count_reads() - before < 3 * ALLOCATIONS);
}

static size_t pages_of(const struct ep_shm *shm)
{
    struct stat info;

    assert_int_equal(fstat(shm->fd, &info), 0);
    return (size_t)info.st_blocks * 512;
}

TEST(pages_exist_before_they_are_touched)
{
    struct ep_shm shm, sparse;

    assert_int_equal(ep_shm_new(3 * MIB + 1, &shm), EP_OK);
    assert_true(pages_of(&shm) >= 3 * MIB + 4096);
    assert_int_equal(ftruncate(shm.fd, 4096), -1); /* a peer may have it mapped */
    ep_shm_done(&shm);
    assert_int_equal(ep_shm_new_sparse(64 * MIB, &sparse), EP_OK);
    assert_int_equal(pages_of(&sparse), 0);
    assert_int_equal(ep_shm_reserve(&sparse, 5000, 8192), EP_OK);
    assert_true(pages_of(&sparse) >= 12288 && pages_of(&sparse) < MIB);
    ep_shm_done(&sparse);
}

static void tick(int number)
{
    (void)number;
}

/* The timer of a profiler interrupts the reservation repeatedly. */
static void among_signals(void)
{
    struct sigaction action = {.sa_handler = tick};
    struct itimerval often = {.it_interval = {.tv_usec = 200}, .it_value = {.tv_usec = 200}}, never = {{0, 0}, {0, 0}};
    struct ep_shm shm;

    CHECK(sigaction(SIGALRM, &action, NULL) == 0);
    CHECK(setitimer(ITIMER_REAL, &often, NULL) == 0);
    CHECK(ep_shm_new(96 * MIB, &shm) == EP_OK);
    CHECK(setitimer(ITIMER_REAL, &never, NULL) == 0);
    ((char *)shm.base)[96 * MIB - 1] = 1;
}

TEST_CALL(signals_do_not_delay_it, assert_int_equal(in_child(among_signals), 0))

static void without_standard_streams(void)
{
    struct ep_shm shm;

    close(0);
    close(1);
    close(2);
    if (ep_shm_new(4096, &shm) != EP_OK || shm.fd < 3)
        _exit(2);
    /* Output of a program whose standard streams are closed. */
    if (write(1, "noise", 5) != -1 || ((char *)shm.base)[0])
        _exit(3);
}

TEST_CALL(no_descriptor_becomes_a_standard_stream, assert_int_equal(in_child(without_standard_streams), 0))
