/* SPDX-License-Identifier: Apache-2.0 */
/* unit.c - runs the cases of a test program: all of them, or those whose names the command line has (* and ? match). */
#include "unit.h"

#include <fnmatch.h>
#include <stdbool.h>

#define MOST_CASES 128

static struct unit_case {
    struct CMUnitTest test;
    const char *file;
    int line;
} cases[MOST_CASES];

static size_t n_cases;
static CMFixtureFunction group_set_up, group_tear_down;

void unit_add(struct CMUnitTest test, const char *file, int line)
{
    if (n_cases == MOST_CASES)
        abort();
    cases[n_cases++] = (struct unit_case){test, file, line};
}

void unit_set_fixtures(CMFixtureFunction set_up, CMFixtureFunction tear_down)
{
    group_set_up = set_up;
    group_tear_down = tear_down;
}

/* Compilers call constructors in any order. */
static int compare_places(const void *a, const void *b)
{
    const struct unit_case *one = a, *other = b;
    int order = strcmp(one->file, other->file);

    return order ? order : one->line - other->line;
}

static bool is_wanted(const char *name, int argc, char **argv)
{
    for (int i = 1; i < argc; i++)
        if (fnmatch(argv[i], name, 0) == 0)
            return true;
    return argc == 1;
}

int main(int argc, char **argv)
{
    const char *slash = strrchr(argv[0], '/');
    struct CMUnitTest wanted[MOST_CASES];
    size_t n = 0;

    qsort(cases, n_cases, sizeof(cases[0]), compare_places);
    for (size_t i = 0; i < n_cases; i++)
        if (is_wanted(cases[i].test.name, argc, argv))
            wanted[n++] = cases[i].test;
    if (n == 0) {
        fprintf(stderr, "usage: %s [CASE...], of:\n", argv[0]);
        for (size_t i = 0; i < n_cases; i++)
            fprintf(stderr, "    %s\n", cases[i].test.name);
        return 2;
    }
    return _cmocka_run_group_tests(slash ? slash + 1 : argv[0], wanted, n, group_set_up, group_tear_down);
}
