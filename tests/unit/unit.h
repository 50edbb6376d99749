/* SPDX-License-Identifier: Apache-2.0 */
/*
 * unit.h - a program of test cases. TEST(name) { ... } defines a case; the main() of unit.c runs all of them in this
 * order, or those that the command line names.
 */
#ifndef EP_TESTS_UNIT_UNIT_H
#define EP_TESTS_UNIT_UNIT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

static inline void unit_sleep_ms(int ms)
{
    nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000L}, NULL);
}

/* Of this process. */
static inline double unit_processor_seconds(void)
{
    struct timespec now;

    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

void unit_add(struct CMUnitTest test, const char *file, int line);
void unit_set_fixtures(CMFixtureFunction set_up, CMFixtureFunction tear_down);

/* Each case between its own set_up and tear_down, which may be NULL. */
#define TEST_WITH(name, set_up, tear_down)                                                                             \
    static void name(void **state);                                                                                    \
    __attribute__((constructor)) static void add_##name(void)                                                          \
    {                                                                                                                  \
        unit_add((struct CMUnitTest){#name, name, set_up, tear_down, NULL}, __FILE__, __LINE__);                       \
    }                                                                                                                  \
    static void name(void **state __attribute__((unused)))

#define TEST(name) TEST_WITH(name, NULL, NULL)

/* A case that is one call. */
#define TEST_CALL(name, ...)                                                                                           \
    TEST(name)                                                                                                         \
    {                                                                                                                  \
        __VA_ARGS__;                                                                                                   \
    }

/* The call returns this error, and the error text of the library contains `says`. */
#define assert_fails(call, status, says)                                                                               \
    do {                                                                                                               \
        assert_int_equal(call, status);                                                                                \
        if (!strstr(ep_last_error(), says))                                                                            \
            fail_msg("no \"%s\" in: %s", says, ep_last_error());                                                       \
    } while (0)

/* At the end of a file: what surrounds all cases of the program. */
#define TEST_GROUP(set_up, tear_down)                                                                                  \
    __attribute__((constructor)) static void set_fixtures(void)                                                        \
    {                                                                                                                  \
        unit_set_fixtures(set_up, tear_down);                                                                          \
    }

#endif
