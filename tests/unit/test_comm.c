/* SPDX-License-Identifier: Apache-2.0 */
/* Creation and failure of a communicator, with a mock backend. test_config.c tests its configuration. */
#include "mock_backend.h"
#include "unit.h"

static ep_comm *comm;

static int open_comm(void **state)
{
    ep_boot boot = mock_boot(2, 4);
    ep_comm_config config = EP_COMM_CONFIG_INIT;

    (void)state;
    memset((void *)&mock, 0, sizeof(mock));
    config.backend = "host";
    config.ranks_per_node = 2;
    return ep_comm_new(&boot, &config, &comm) != EP_OK;
}

static int close_comm(void **state)
{
    int closed = mock.closed;

    (void)state;
    ep_comm_free(comm);
    return mock.closed != closed + 1;
}

TEST_WITH(info_and_stats_are_those_of_the_rank, open_comm, close_comm)
{
    ep_comm_info info = {.size = sizeof(info)};
    ep_stats stats = {.size = sizeof(stats)};

    assert_int_equal(ep_comm_get_info(comm, &info), EP_OK);
    assert_int_equal(info.rank, 2);
    assert_int_equal(info.nranks, 4);
    assert_int_equal(info.node, 1);
    assert_int_equal(info.nnodes, 2);
    assert_int_equal(info.ranks_per_node, 2);
    assert_int_equal(info.timeout_ms, 30000);
    assert_string_equal(info.backend, "host");
    assert_string_equal(info.network, "emulated");
    assert_int_equal(info.library_bytes, 12345);
    comm->stats.rows_self = 11;
    comm->stats.ns_total = 22;
    assert_int_equal(ep_comm_get_stats(comm, &stats), EP_OK);
    assert_int_equal(stats.rows_self, 11);
    assert_int_equal(stats.ns_total, 22);
    assert_int_equal(stats.size, sizeof(stats));
}

TEST_WITH(a_backend_that_does_not_open_leaves_nothing, open_comm, close_comm)
{
    ep_boot boot = mock_boot(0, 2);
    ep_comm_config config = {.size = sizeof(config), .device = -1, .backend = "host"};
    ep_comm *made = NULL;

    mock.open_answer = EP_E_MEMORY;
    assert_int_equal(ep_comm_new(&boot, &config, &made), EP_E_MEMORY);
    assert_string_equal(ep_last_error(), "mock: comm_open");
    assert_null(made);
    assert_int_equal(mock.closed, 0);
}

/* --- failure --- */

static ep_status fail_barrier(ep_status answer, const char *text)
{
    mock.answer = answer;
    mock.text = text;
    return ep_comm_barrier(comm);
}

/* Errors of the caller and of the machine are recorded as text, but the communicator does not fail. */
TEST_WITH(errors_below_300_do_not_fail_it, open_comm, close_comm)
{
    assert_string_equal(ep_comm_last_error(comm), "");
    assert_int_equal(fail_barrier(EP_E_MEMORY, "no memory"), EP_E_MEMORY);
    assert_string_equal(ep_comm_last_error(comm), "no memory");
    assert_int_equal(ep_comm_async_error(comm), EP_OK);
    assert_int_equal(fail_barrier(EP_E_ARG, "bad"), EP_E_ARG);
    assert_string_equal(ep_comm_last_error(comm), "bad");
    assert_int_equal(fail_barrier(EP_OK, NULL), EP_OK);
    assert_string_equal(ep_comm_last_error(comm), "bad");
}

/* Each collective call returns the first fatal status at once, with its reason, and does not call the backend. */
TEST_WITH(a_fatal_error_is_permanent, open_comm, close_comm)
{
    ep_plan_args plan_args = EP_PLAN_ARGS_INIT;
    ep_dispatch_args dispatch = EP_DISPATCH_ARGS_INIT;
    ep_combine_args combine = EP_COMBINE_ARGS_INIT;
    ep_ll_config config = EP_LL_CONFIG_INIT;
    ep_ll_dispatch_args ll_dispatch = EP_LL_DISPATCH_ARGS_INIT;
    ep_ll_combine_args ll_combine = EP_LL_COMBINE_ARGS_INIT;
    ep_plan plan = {.comm = comm}, *made;
    ep_ll ll = {.comm = comm, .dispatches = 1}, *made_ll;
    char block[4 * 4] = {0};
    void *memory;

#define EXPECT_FAILED(call, name)                                                                                      \
    do {                                                                                                               \
        assert_int_equal((call), EP_E_PEER_DEAD);                                                                      \
        assert_string_equal(ep_last_error(), name ": the communicator has failed before: rank 3 died");                \
        assert_string_equal(ep_comm_last_error(comm), ep_last_error());                                                \
    } while (0)
    assert_int_equal(fail_barrier(EP_E_PEER_DEAD, "rank 3 died"), EP_E_PEER_DEAD);
    assert_int_equal(ep_comm_async_error(comm), EP_E_PEER_DEAD);
    assert_string_equal(ep_comm_last_error(comm), "rank 3 died");
    mock.answer = EP_OK;
    mock.calls = 0;
    EXPECT_FAILED(ep_comm_barrier(comm), "ep_comm_barrier");
    EXPECT_FAILED(ep_comm_barrier(comm), "ep_comm_barrier");
    EXPECT_FAILED(ep_comm_allgather(comm, block, 4, block), "ep_comm_allgather");
    EXPECT_FAILED(ep_alloc(comm, 1, &memory), "ep_alloc");
    EXPECT_FAILED(ep_free(comm, block), "ep_free");
    EXPECT_FAILED(ep_plan_new(comm, &plan_args, &made), "ep_plan_new");
    EXPECT_FAILED(ep_plan_get_sources(&plan, NULL, NULL), "ep_plan_get_sources");
    EXPECT_FAILED(ep_dispatch_sync(&plan, &dispatch), "ep_dispatch");
    EXPECT_FAILED(ep_combine_sync(&plan, &combine), "ep_combine");
    EXPECT_FAILED(ep_ll_new(comm, &config, &made_ll), "ep_ll_new");
    EXPECT_FAILED(ep_ll_dispatch_sync(&ll, &ll_dispatch), "ep_ll_dispatch");
    EXPECT_FAILED(ep_ll_combine_sync(&ll, &ll_combine), "ep_ll_combine");
    EXPECT_FAILED(ep_ll_finish_sync(&ll, 0), "ep_ll_finish");
    assert_int_equal(mock.calls, 0);
}

/* Asynchronous work may fail at any time; later failures report the first one and its reason. */
TEST_WITH(the_first_fatal_error_wins, open_comm, close_comm)
{
    assert_int_equal(ep_comm_record(comm, EP_OK), EP_OK);
    ep_comm_record(comm, ep_fail(EP_E_TIMEOUT, "rank 1 is late"));
    assert_int_equal(ep_comm_record(comm, ep_fail(EP_E_ABORTED, "rank 0 aborted")), EP_E_TIMEOUT);
    assert_string_equal(ep_last_error(), "the communicator has failed before: rank 1 is late");
    assert_int_equal(ep_comm_record(comm, ep_fail(EP_E_ARG, "bytes is 5")), EP_E_ARG);
    ep_fail(EP_E_ARG, "%s", "host \33[31mred\r\a");
    assert_string_equal(ep_last_error(), "host ?[31mred??");
    assert_int_equal(ep_comm_async_error(comm), EP_E_TIMEOUT);
    assert_int_equal(ep_comm_barrier(comm), EP_E_TIMEOUT);
    assert_non_null(strstr(ep_comm_last_error(comm), "rank 1 is late"));
}

/* A backend may set `failed` to any status; its text stays the reason, too. */
TEST_WITH(a_backend_fails_it_with_any_status, open_comm, close_comm)
{
    ep_comm_record(comm, ep_fail(EP_E_ROUTING, "a token has an expert twice"));
    assert_int_equal(ep_comm_async_error(comm), EP_OK);
    atomic_store(&comm->failed, (int)EP_E_ROUTING);
    ep_comm_record(comm, ep_fail(EP_E_ROUTING, "rank 1 had routing that is not valid"));
    assert_int_equal(ep_comm_barrier(comm), EP_E_ROUTING);
    assert_non_null(strstr(ep_comm_last_error(comm), "rank 1 had routing that is not valid"));
}

/* abort() may be called in a signal handler, which cannot set a reason. */
TEST_WITH(an_abort_needs_no_reason, open_comm, close_comm)
{
    ep_comm_abort(comm);
    assert_int_equal(ep_comm_async_error(comm), EP_E_ABORTED);
    assert_int_equal(ep_comm_barrier(comm), EP_E_ABORTED);
    assert_string_equal(ep_last_error(), "ep_comm_barrier: rank 2, this one, called ep_comm_abort");
}

/* The status of an event does not fail the communicator: a timeout of the wait is not a late peer. */
TEST_WITH(waiting_for_events_fails_nothing, open_comm, close_comm)
{
    ep_event *event;
    int done;

    assert_int_equal(ep_event_new(comm, &event), EP_OK);
    mock.answer = EP_E_TIMEOUT;
    assert_int_equal(ep_event_wait(event, 1), EP_E_TIMEOUT);
    assert_int_equal(ep_event_query(event, &done), EP_E_TIMEOUT);
    assert_int_equal(ep_comm_async_error(comm), EP_OK);
    mock.answer = EP_OK;
    assert_int_equal(ep_comm_barrier(comm), EP_OK);
    ep_event_free(event);
}

static void *record_often(void *context)
{
    for (int i = 0; i < 2000; i++)
        ep_comm_record(context, ep_fail(i % 2 ? EP_E_TIMEOUT : EP_E_MEMORY, "%s",
                                        i % 2 ? "one text, whole" : "the other text, also whole"));
    return NULL;
}

/* A worker fails while the caller reads: texts are complete, and ThreadSanitizer finds no data race. */
TEST_WITH(texts_are_complete_in_two_threads, open_comm, close_comm)
{
    pthread_t worker;

    ep_comm_record(comm, ep_fail(EP_E_MEMORY, "one text, whole"));
    assert_int_equal(pthread_create(&worker, NULL, record_often, comm), 0);
    for (int i = 0; i < 2000; i++) {
        const char *text = ep_comm_last_error(comm);

        assert_true(strcmp(text, "one text, whole") == 0 || strcmp(text, "the other text, also whole") == 0);
    }
    pthread_join(worker, NULL);
}
