/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fork() in a program with threads: a child never waits for a lock that a thread of its parent held, can create its own
 * communicators, and cannot use those of its parent.
 */
#include "ranks.h"
#include "sandbox.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>

#define FORKS 300
#define THREADS 3

static ep_comm *new_comm(void)
{
    static const ep_boot boot = {.size = sizeof(boot), .nranks = 1, .allgather = unit_gather_alone};
    ep_comm *comm = NULL;

    return unit_comm_new(&boot, NULL, 0, 0, &comm) == EP_OK ? comm : NULL;
}

static _Atomic int stop;

/* Takes the locks of the library as often as possible. */
static void *alloc_and_free(void *argument)
{
    ep_comm *comm = new_comm();

    (void)argument;
    while (comm && !atomic_load(&stop)) {
        void *memory;

        if (ep_alloc(comm, 64, &memory) == EP_OK)
            ep_free(comm, memory);
        ep_comm_last_error(comm);
    }
    ep_comm_free(comm);
    return NULL;
}

static void start_threads(pthread_t *threads)
{
    atomic_store(&stop, 0);
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, alloc_and_free, NULL), 0);
}

static void stop_threads(const pthread_t *threads)
{
    atomic_store(&stop, 1);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
}

static int use_own_communicator(void *argument)
{
    ep_comm *comm = new_comm();
    void *memory;

    (void)argument;
    if (!comm || ep_alloc(comm, 100, &memory) != EP_OK)
        return 1;
    memset(memory, 1, 100);
    ep_comm_free(comm);
    return 0;
}

/* gcc's sanitizers take locks in malloc() that are never released in a child. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SKIP_UNDER_SANITIZERS()                                                                                        \
    do {                                                                                                               \
        print_message("SKIP: the sanitizer's malloc() does not survive a fork among threads\n");                       \
        skip();                                                                                                        \
    } while (0)
#else
#define SKIP_UNDER_SANITIZERS() (void)0
#endif

TEST(a_child_waits_for_no_lock)
{
    pthread_t threads[THREADS];
    int result = 0;

    SKIP_UNDER_SANITIZERS();
    start_threads(threads);
    for (int i = 0; i < FORKS && result == 0; i++)
        result = sandbox_run(use_own_communicator, NULL);
    stop_threads(threads);
    assert_int_equal(result, 0);
}

static int gather_and_alloc(const ep_boot *boot, void *argument)
{
    ep_comm *comm = NULL;
    void *memory;

    (void)argument;
    alarm(100);
    if (unit_comm_new(boot, NULL, 0, 60000, &comm) != EP_OK || ep_alloc(comm, 4096, &memory) != EP_OK ||
        ep_comm_barrier(comm) != EP_OK)
        return 1;
    ep_comm_free(comm);
    return 0;
}

TEST(the_launcher_may_have_threads)
{
    ep_launch_args launch = EP_LAUNCH_ARGS_INIT;
    ep_rank_exit exits[4];
    pthread_t threads[THREADS];
    ep_status status = EP_OK;

    SKIP_UNDER_SANITIZERS();
    launch.nranks = 4;
    launch.run = gather_and_alloc;
    start_threads(threads);
    for (int i = 0; i < 20 && status == EP_OK; i++) {
        status = ep_launch(&launch, exits);
        for (int rank = 0; rank < 4; rank++)
            if (status == EP_OK && exits[rank].code)
                status = EP_E_SYSTEM;
    }
    stop_threads(threads);
    assert_int_equal(status, EP_OK);
}

/* --- a child with its parent's communicator --- */

struct objects {
    ep_comm *comm;
    ep_plan *plan;
    ep_event *event;
    ep_ll *ll;
    ep_queue *queue;
    void *memory;
};

#define REFUSED(call)                                                                                                  \
    do {                                                                                                               \
        if ((call) != EP_E_STATE || !strstr(ep_last_error(), "forked child"))                                          \
            return __LINE__ & 0x7f;                                                                                    \
    } while (0)

static void empty_function(void *context)
{
    (void)context;
}

static int use_all(void *argument)
{
    struct objects *o = argument;
    ep_comm_info info = {.size = sizeof(info)};
    ep_stats stats = {.size = sizeof(stats)};
    ep_plan_info plan_info = {.size = sizeof(plan_info)};
    ep_plan_args plan_args = EP_PLAN_ARGS_INIT;
    ep_layout layout = EP_LAYOUT_INIT;
    ep_dispatch_args dispatch = EP_DISPATCH_ARGS_INIT;
    ep_combine_args combine = EP_COMBINE_ARGS_INIT;
    ep_ll_config ll_config = EP_LL_CONFIG_INIT;
    ep_ll_dispatch_args ll_dispatch = EP_LL_DISPATCH_ARGS_INIT;
    ep_ll_combine_args ll_combine = EP_LL_COMBINE_ARGS_INIT;
    ep_plan *plan;
    ep_event *event;
    ep_ll *ll;
    ep_ll_sizes ll_sizes = EP_LL_SIZES_INIT;
    ep_plan_update_args update = EP_PLAN_UPDATE_ARGS_INIT;
    ep_plan_metadata metadata = EP_PLAN_METADATA_INIT;
    ep_queue *queue;
    void *memory;
    int64_t rows;
    int32_t mask[1], one = 0;
    int done;

    REFUSED(ep_comm_get_info(o->comm, &info));
    REFUSED(ep_comm_get_stats(o->comm, &stats));
    REFUSED(ep_comm_barrier(o->comm));
    REFUSED(ep_comm_allgather(o->comm, &one, 4, &one));
    REFUSED(ep_comm_async_error(o->comm));
    REFUSED(ep_comm_get_failed(o->comm, &one));
    REFUSED(ep_alloc(o->comm, 1, &memory));
    REFUSED(ep_free(o->comm, o->memory));
    REFUSED(ep_plan_new(o->comm, &plan_args, &plan));
    REFUSED(ep_plan_layout(o->comm, &plan_args, &layout));
    REFUSED(ep_plan_get_info(o->plan, &plan_info));
    REFUSED(ep_plan_get_sources(o->plan, &one, &one));
    REFUSED(ep_dispatch_sync(o->plan, &dispatch));
    REFUSED(ep_combine_sync(o->plan, &combine));
    REFUSED(ep_event_new(o->comm, &event));
    REFUSED(ep_event_record(o->comm, NULL, &event));
    REFUSED(ep_event_signal(o->event));
    REFUSED(ep_event_wait(o->event, 0));
    REFUSED(ep_event_query(o->event, &done));
    REFUSED(ep_ll_new(o->comm, &ll_config, &ll));
    REFUSED(ep_ll_dispatch_sync(o->ll, &ll_dispatch));
    REFUSED(ep_ll_combine_sync(o->ll, &ll_combine));
    REFUSED(ep_ll_finish_sync(o->ll, 0));
    REFUSED(ep_ll_get_combine_buffer(o->ll, &memory));
    REFUSED(ep_ll_get_mask(o->ll, mask));
    REFUSED(ep_ll_set_mask(o->ll, 0, 1, NULL));
    REFUSED(ep_ll_clear_mask(o->ll, NULL));
    REFUSED(ep_ll_query_mask(o->ll, mask, NULL));
    REFUSED(ep_ll_merge_mask(o->ll, o->ll, NULL));
    REFUSED(ep_ll_barrier(o->ll, NULL));
    REFUSED(ep_ll_get_sizes(o->comm, &ll_config, &ll_sizes));
    REFUSED(ep_plan_update(o->plan, &update, NULL));
    REFUSED(ep_plan_get_metadata(o->plan, &metadata, NULL));
    REFUSED(ep_plan_get_max_rows(o->comm, &plan_args, &rows));
    REFUSED(ep_queue_new(o->comm, &queue));
    REFUSED(ep_stream_sync(o->comm, NULL));
    REFUSED(ep_stream_call(o->comm, NULL, empty_function, NULL));
    REFUSED(ep_stream_wait(o->comm, NULL, o->event));
    REFUSED(ep_barrier_on(o->comm, NULL));
    REFUSED(ep_alloc_local(o->comm, 1, &memory));
    REFUSED(ep_free_local(o->comm, o->memory));
    REFUSED(ep_register(o->comm, o->memory, 4096));
    REFUSED(ep_unregister(o->comm, o->memory));
    REFUSED(ep_pool_attach(o->comm, 0));
    if (!strstr(ep_comm_last_error(o->comm), "forked child"))
        return 126;
    /* These return no status, and must not affect the parent. */
    ep_comm_abort(o->comm);
    ep_ll_free(o->ll);
    ep_event_free(o->event);
    ep_plan_free(o->plan);
    ep_queue_free(o->queue);
    ep_comm_free(o->comm);
    return use_own_communicator(NULL);
}

TEST(the_parents_communicator_is_refused)
{
    ep_plan_args plan;
    ep_ll_config ll;
    struct objects o = {.comm = new_comm()};
    int32_t expert = 0;

    assert_non_null(o.comm);
    plan = args_plan(&expert, EP_I32, 1, 1, 1);
    ll = args_ll(1, 128, 1, 1);
    assert_int_equal(ep_plan_new(o.comm, &plan, &o.plan), EP_OK);
    assert_int_equal(ep_ll_new(o.comm, &ll, &o.ll), EP_OK);
    assert_int_equal(ep_event_new(o.comm, &o.event), EP_OK);
    assert_int_equal(ep_alloc(o.comm, 4096, &o.memory), EP_OK);
    assert_int_equal(ep_queue_new(o.comm, &o.queue), EP_OK);
    assert_int_equal(sandbox_run(use_all, &o), 0);
    /* That of the parent has not changed. */
    assert_int_equal(ep_comm_async_error(o.comm), EP_OK);
    assert_int_equal(ep_comm_barrier(o.comm), EP_OK);
    assert_int_equal(ep_event_signal(o.event), EP_OK);
    ep_event_free(o.event);
    ep_ll_free(o.ll);
    ep_plan_free(o.plan);
    ep_queue_free(o.queue);
    ep_comm_free(o.comm);
}

#if defined(__SANITIZE_ADDRESS__)
int __lsan_do_recoverable_leak_check(void);

static int check_for_leaks(void *argument)
{
    ep_comm *comm = new_comm();

    (void)argument;
    if (!comm || ep_pool_attach(comm, 0) != EP_OK)
        return 1;
    ep_pool_free(ep_pool_alloc(100, 0, NULL), 100, 0, NULL);
    ep_comm_free(comm);
    return __lsan_do_recoverable_leak_check() ? 2 : 0;
}
#endif

/* It cannot free the tables of its parent, because threads may have been changing them. */
TEST(a_child_has_no_reported_leaks)
{
#if defined(__SANITIZE_ADDRESS__)
    ep_comm *comm = new_comm();
    void *block;

    assert_non_null(comm);
    assert_int_equal(ep_pool_attach(comm, 0), EP_OK);
    block = ep_pool_alloc(100, 0, NULL);
    assert_non_null(block);
    assert_int_equal(sandbox_run(check_for_leaks, NULL), 0);
    ep_pool_free(block, 100, 0, NULL);
    ep_comm_free(comm);
#else
    print_message("SKIP: needs LeakSanitizer\n");
    skip();
#endif
}
