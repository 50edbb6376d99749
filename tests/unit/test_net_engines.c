/* SPDX-License-Identifier: Apache-2.0 */
/* Runs the conformance tests on the engines of the library. Ranks are threads. */
#include "net_conformance.h"
#include "ranks.h"

#include "net/tcp.h"

static void fail_check(int rank, const char *test, int line, const char *condition)
{
    fprintf(stderr, "rank %d: %s: line %d: %s (last error: %s)\n", rank, test, line, condition, ep_last_error());
    exit(1);
}

static int run_rank(const ep_boot *boot, void *argument)
{
    net_conformance_run(argument, boot, fail_check);
    return 0;
}

static void run(const struct ep_net_provider *provider)
{
    unit_run_threads(NET_CONFORMANCE_RANKS, run_rank, (void *)provider);
}

static void test_emulated(void **state)
{
    (void)state;
    run(&ep_net_emulated);
}

static void test_tcp(void **state)
{
    (void)state;
    run(&ep_net_tcp);
}

static void test_verbs(void **state)
{
    (void)state;
    run(&ep_net_verbs);
}

static void free_with_failure(struct ep_net *net)
{
    ep_fail(EP_E_SYSTEM, "a failure of closing");
    ep_net_free(net);
}

/* An engine that fails while it opens: closing what it has opened does not replace the reason. */
static void test_reason_of_opening(void **state)
{
    static const struct ep_net_ops ops = {.name = "failing", .free = free_with_failure};
    const struct ep_net_params params = {
        .nranks = 2, .ranks_per_node = 1, .channels = 1, .region_bytes = 64, .n_signals = 1};
    struct ep_net *net;

    (void)state;
    assert_int_equal(ep_net_new(&ops, sizeof(*net), &params, &net), EP_OK);
    assert_int_equal(ep_net_opened(ep_fail(EP_E_MEMORY, "no memory for %d%%", 3), &net), EP_E_MEMORY);
    assert_null(net);
    assert_string_equal(ep_last_error(), "no memory for 3%");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_emulated), cmocka_unit_test(test_tcp),
                                       cmocka_unit_test(test_reason_of_opening)};
    const struct CMUnitTest verbs_tests[] = {cmocka_unit_test(test_verbs)};

    /* On machines with an RDMA device, see tests/verbs. */
    if (getenv("EPKIT_TEST_VERBS"))
        return cmocka_run_group_tests(verbs_tests, NULL, NULL);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
