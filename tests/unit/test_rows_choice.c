/* SPDX-License-Identifier: Apache-2.0 */
/* rows.c: which form of the inner loops is chosen, and the size of the last-level cache from fake sysfs trees. */
#include "backend/host/rows.h"
#include "temp.h"
#include "unit.h"

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

/* ep_rows_get() chooses once in a process: each name in a child. Before anything else in this process has chosen. */
static void check_choice(const char *name, const char *expected)
{
    int status;
    pid_t pid = fork();

    assert_true(pid >= 0);
    if (pid == 0) {
        if (name)
            setenv("EPKIT_HOST_ISA", name, 1);
        else
            unsetenv("EPKIT_HOST_ISA");
        _exit(strcmp(ep_rows_get()->name, expected) || ep_rows_get() != ep_rows_find(expected));
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

TEST(test_choice)
{
    static const char *const names[] = {"portable", "avx2", "avx512"};
    const char *best = NULL;
    size_t i;

    for (i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        const struct ep_rows_ops *form = ep_rows_find(names[i]);

        if (!form)
            continue;
        assert_string_equal(form->name, names[i]);
        check_choice(names[i], names[i]);
        best = names[i];
    }
    assert_non_null(ep_rows_find("portable"));
    check_choice(NULL, best);
    check_choice("mmx", best);
    check_choice("", best);
    assert_null(ep_rows_find("mmx"));
}

static void write_file(const char *directory, int index, const char *name, const char *text)
{
    char path[PATH_MAX + 32];
    FILE *file;

    snprintf(path, sizeof(path), "%s/index%d", directory, index);
    mkdir(path, 0700);
    snprintf(path, sizeof(path), "%s/index%d/%s", directory, index, name);
    file = fopen(path, "w");
    assert_non_null(file);
    fputs(text, file);
    assert_int_equal(fclose(file), 0);
}

static void describe(const char *directory, int index, const char *level, const char *type, const char *size)
{
    write_file(directory, index, "level", level);
    write_file(directory, index, "type", type);
    write_file(directory, index, "size", size);
}

static void forget(const char *directory, int n)
{
    static const char *const names[] = {"/level", "/type", "/size", ""};
    char path[PATH_MAX + 32];
    int index, i;

    for (index = 0; index < n; index++) {
        for (i = 0; i < 4; i++) {
            snprintf(path, sizeof(path), "%s/index%d%s", directory, index, names[i]);
            assert_int_equal(remove(path), 0);
        }
    }
    assert_int_equal(remove(directory), 0);
}

TEST(test_last_level_cache)
{
    char directory[PATH_MAX];

    temp_template("rows", directory);
    assert_non_null(mkdtemp(directory));
    assert_int_equal(ep_rows_last_level_cache(directory), 0);
    describe(directory, 0, "1\n", "Data\n", "48K\n");
    assert_int_equal(ep_rows_last_level_cache(directory), 48 << 10);
    describe(directory, 1, "9\n", "Instruction\n", "32M\n"); /* holds no rows, on whatever level */
    describe(directory, 2, "3\n", "Unified\n", "36M\n");
    describe(directory, 3, "2\n", "Unified\n", "1024K\n");
    assert_int_equal(ep_rows_last_level_cache(directory), 36 << 20);
    describe(directory, 2, "3\n", "Unified\n", "\n"); /* some virtual machines leave it empty */
    assert_int_equal(ep_rows_last_level_cache(directory), 1 << 20);
    describe(directory, 2, "3\n", "Unified\n", "36X\n");
    assert_int_equal(ep_rows_last_level_cache(directory), 1 << 20);
    describe(directory, 2, "3\n", "Unified\n", "99999999999999999999K\n");
    assert_int_equal(ep_rows_last_level_cache(directory), 1 << 20);
    describe(directory, 2, "3\n", "Unified\n", "2097152\n");
    assert_int_equal(ep_rows_last_level_cache(directory), 2 << 20);
    forget(directory, 4);

    assert_true(ep_rows_stream_threshold() >= 1 << 16);
    assert_true(ep_rows_stream_threshold() <= 16 << 20); /* whatever the machine shows */
    assert_int_equal(ep_rows_stream_threshold(), ep_rows_stream_threshold());
}
