/* SPDX-License-Identifier: Apache-2.0 */
/*
 * core/registry.c with modules that load, do not load, are of another build or find no device. The search path of a
 * module depends on the start of a process, so each search is a new process: this program, as "find <backend>".
 */
#include "core/core.h"

#include <dlfcn.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#define ELSEWHERE "/nonexistent"

/* The child: "<status>|<name>|<text>" on stdout. */
static int find(const char *name)
{
    const struct ep_backend_ops *ops = NULL;
    ep_status status;

    if (getenv("LINKED") && !dlopen(getenv("LINKED"), RTLD_NOW))
        return 1;
    ep_fail(EP_OK, "%s", "");
    status = ep_backend_find(strcmp(name, "auto") == 0 ? NULL : name, &ops);
    printf("%s|%s|%s", ep_status_name(status), ops ? ops->name : "none", ep_last_error());
    return 0;
}

/* Starts it as if it were in `folder`, with `path` for the loader; returns its output. */
static const char *run_find(const char *folder, const char *path, const char *name)
{
    static char output[2048];
    char self[600];
    size_t used = 0;
    ssize_t got;
    int ends[2], how;
    pid_t child;

    assert_int_equal(pipe(ends), 0);
    child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        snprintf(self, sizeof(self), "%s/test_registry", folder);
        dup2(ends[1], STDOUT_FILENO);
        close(ends[0]);
        setenv("LD_LIBRARY_PATH", path, 1);
        execl("/proc/self/exe", self, "find", name, (char *)NULL);
        _exit(127);
    }
    close(ends[1]);
    while ((got = read(ends[0], output + used, sizeof(output) - 1 - used)) > 0)
        used += (size_t)got;
    output[used] = '\0';
    close(ends[0]);
    assert_int_equal(waitpid(child, &how, 0), child);
    assert_true(WIFEXITED(how) && WEXITSTATUS(how) == 0);
    return output;
}

static void expect_start(const char *output, const char *start)
{
    if (strncmp(output, start, strlen(start)) != 0)
        fail_msg("\"%s\" does not begin with \"%s\"", output, start);
}

static void host_is_built_in(void **state)
{
    (void)state;
    assert_string_equal(run_find(ELSEWHERE, ELSEWHERE, "host"), "EP_OK|host|");
    assert_string_equal(run_find(MODULES "/good", MODULES "/good", "host"), "EP_OK|host|");
}

static void a_good_module_comes_first(void **state)
{
    (void)state;
    assert_string_equal(run_find(MODULES "/good", ELSEWHERE, "cuda"), "EP_OK|cuda|");
    assert_string_equal(run_find(MODULES "/good", ELSEWHERE, "auto"), "EP_OK|cuda|");
    assert_string_equal(run_find(ELSEWHERE, MODULES "/good", "cuda"), "EP_OK|cuda|");
    assert_string_equal(run_find(ELSEWHERE, MODULES "/good", "auto"), "EP_OK|cuda|");
}

/* Requested by name, each reports its error; without a name, the host backend is used and nothing is reported. */
static void a_bad_module_says_why(void **state)
{
    char other_build[200];
    const struct {
        const char *folder, *output;
    } cases[] = {
        {ELSEWHERE, "EP_E_UNSUPPORTED|none|backend cuda: libepkit-cuda.so: cannot open shared object file"},
        {MODULES "/abi", other_build},
        {MODULES "/symbol", "EP_E_UNSUPPORTED|none|backend cuda: libepkit-cuda.so has no ep_backend_module"},
        {MODULES "/probe", "EP_E_UNSUPPORTED|none|backend cuda: no GPU answers"},
        {MODULES "/broken", "EP_E_UNSUPPORTED|none|backend cuda: " MODULES "/broken/libepkit-cuda.so: undefined "
                            "symbol: ep_function_of_no_library"},
    };

    (void)state;
    snprintf(other_build, sizeof(other_build),
             "EP_E_UNSUPPORTED|none|backend cuda: libepkit-cuda.so is of another build (its abi is %u, ours is %u)",
             EP_BACKEND_ABI + 1, EP_BACKEND_ABI);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        expect_start(run_find(cases[i].folder, ELSEWHERE, "cuda"), cases[i].output);
        expect_start(run_find(ELSEWHERE, cases[i].folder, "cuda"), cases[i].output);
        assert_string_equal(run_find(cases[i].folder, ELSEWHERE, "auto"), "EP_OK|host|");
    }
}

/* The module next to the library is of the same build: no other one replaces it. */
static void a_module_next_to_the_library_is_final(void **state)
{
    (void)state;
    expect_start(run_find(MODULES "/probe", MODULES "/good", "cuda"), "EP_E_UNSUPPORTED|none|backend cuda: no GPU");
    expect_start(run_find(MODULES "/broken", MODULES "/good", "cuda"), "EP_E_UNSUPPORTED|none|backend cuda: " MODULES);
    assert_string_equal(run_find(MODULES "/good", MODULES "/probe", "cuda"), "EP_OK|cuda|");
}

/* But a module that the program is linked with is used: two copies would not share their communicators. */
static void a_loaded_module_is_used(void **state)
{
    (void)state;
    setenv("LINKED", MODULES "/linked/libepkit-cuda.so", 1);
    assert_string_equal(run_find(MODULES "/probe", ELSEWHERE, "cuda"), "EP_OK|cuda|");
    assert_string_equal(run_find(ELSEWHERE, ELSEWHERE, "auto"), "EP_OK|cuda|");
    unsetenv("LINKED");
}

static void unknown_backends_are_refused(void **state)
{
    (void)state;
    assert_string_equal(run_find(ELSEWHERE, ELSEWHERE, "rocm"),
                        "EP_E_ARG|none|backend \"rocm\" is not one of \"cuda\", \"host\"");
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(host_is_built_in),        cmocka_unit_test(a_good_module_comes_first),
        cmocka_unit_test(a_bad_module_says_why),   cmocka_unit_test(a_module_next_to_the_library_is_final),
        cmocka_unit_test(a_loaded_module_is_used), cmocka_unit_test(unknown_backends_are_refused),
    };

    if (argc == 3 && strcmp(argv[1], "find") == 0)
        return find(argv[2]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
