/* SPDX-License-Identifier: Apache-2.0 */
/* Limits of control groups, read from made-up trees of /proc and /sys. */
#include "unit.h"

#include "cmd/bench/bench_host.h"

#include <sys/stat.h>

static char root[1024];

static int make_root(void **state)
{
    const char *folder = getenv("TMPDIR");

    (void)state;
    snprintf(root, sizeof(root), "%s/epkit-limits-XXXXXX", folder ? folder : "/tmp");
    return mkdtemp(root) ? 0 : -1;
}

static int remove_root(void **state)
{
    char command[1100];

    (void)state;
    snprintf(command, sizeof(command), "rm -r '%s'", root);
    return system(command);
}

/* Writes root/path, with the folders on the way. */
static void put(const char *path, const char *text)
{
    char full[2048];
    FILE *file;

    snprintf(full, sizeof(full), "%s/%s", root, path);
    for (char *at = full + strlen(root) + 1; (at = strchr(at, '/')); at++) {
        *at = '\0';
        mkdir(full, 0777);
        *at = '/';
    }
    file = fopen(full, "w");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
}

static void expect(uint64_t memory_bytes, double cpus)
{
    struct machine_limits limits;
    struct source *machine;

    assert_int_equal(source_open(root, &machine), EP_OK);
    machine_limits(machine, &limits);
    source_free(machine);
    assert_int_equal(limits.memory_bytes, memory_bytes);
    assert_true(limits.cpus > cpus - 1e-9 && limits.cpus < cpus + 1e-9);
}

TEST_WITH(test_nothing, make_root, remove_root)
{
    expect(UINT64_MAX, 0);
}

TEST_WITH(test_v2, make_root, remove_root)
{
    put("proc/self/cgroup", "0::/job/step\n");
    put("sys/fs/cgroup/job/step/memory.max", "max\n");
    put("sys/fs/cgroup/job/step/cpu.max", "max 100000\n");
    expect(UINT64_MAX, 0);
    put("sys/fs/cgroup/job/step/memory.max", "4294967296\n");
    put("sys/fs/cgroup/job/step/cpu.max", "250000 100000\n");
    expect(UINT64_C(4) << 30, 2.5);
    /* The group above allows less. */
    put("sys/fs/cgroup/job/memory.max", "1073741824\n");
    put("sys/fs/cgroup/job/cpu.max", "50000 100000\n");
    expect(UINT64_C(1) << 30, 0.5);
}

/* A container: the path is that of the host, and only the group at the mount point is to be seen. */
TEST_WITH(test_container, make_root, remove_root)
{
    put("proc/self/cgroup", "0::/../../outside\n");
    put("sys/fs/cgroup/memory.max", "2147483648\n");
    expect(UINT64_C(2) << 30, 0);
}

TEST_WITH(test_nonsense, make_root, remove_root)
{
    put("proc/self/cgroup", "\n::\nno colon\n0::/x\n");
    put("sys/fs/cgroup/x/memory.max", "\n");
    put("sys/fs/cgroup/x/cpu.max", "100000 0\n");
    expect(UINT64_MAX, 0);
}

TEST(test_this_machine)
{
    assert_true(machine_memory_bytes() >= 1 << 20);
    assert_true(machine_cores() >= 1);
}
