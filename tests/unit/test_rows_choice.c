/* SPDX-License-Identifier: Apache-2.0 */
/* rows.c: which form of the inner loops is chosen. */
#include "backend/host/rows.h"
#include "unit.h"

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
