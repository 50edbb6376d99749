/* SPDX-License-Identifier: Apache-2.0 */
/* Lists of processors as sysfs writes them. */
#include "gpu.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

static void lists_of_processors(void **state)
{
    cpu_set_t cpus;

    (void)state;
    assert_true(gpu_parse_cpus("0-3,8,10-11\n", &cpus));
    assert_int_equal(CPU_COUNT(&cpus), 7);
    for (int cpu = 0; cpu < 16; cpu++)
        assert_int_equal(CPU_ISSET(cpu, &cpus) != 0, cpu < 4 || cpu == 8 || cpu == 10 || cpu == 11);
    assert_true(gpu_parse_cpus("5", &cpus));
    assert_int_equal(CPU_COUNT(&cpus), 1);
    assert_true(CPU_ISSET(5, &cpus));
}

static void what_is_no_list_changes_nothing(void **state)
{
    static const char *const bad[] = {"", "\n", "a", "3-1", "1,", "1-", "1 2", "0-99999999", "-1"};
    cpu_set_t cpus;

    (void)state;
    CPU_ZERO(&cpus);
    CPU_SET(7, &cpus);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        assert_false(gpu_parse_cpus(bad[i], &cpus));
        assert_int_equal(CPU_COUNT(&cpus), 1);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lists_of_processors),
        cmocka_unit_test(what_is_no_list_changes_nothing),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
