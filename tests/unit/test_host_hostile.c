/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A live rank that writes invalid values. While it takes part in calls like the others, a second thread of it writes to
 * one word of the memory that the rank may write: its control block with the exchange rows and op descriptors, its
 * low-latency segment, its slots in the segments of the others. All the time, alternating with the valid value, or
 * once.
 *
 * Whatever the effect on the calls, the other ranks do not crash or hang, return valid statuses, and nothing is written
 * outside of their outputs. Damage that they report is that of the hostile rank.
 */
#include "ranks.h"

#include "backend/host/lowlatency.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    RANKS = 3,
    HOSTILE = 1,
    TOKENS = 8,
    TOPK = 2,
    EXPERTS = 6,
    HIDDEN = 128,
    ROWS = RANKS * TOKENS,
    LOCAL = EXPERTS / RANKS,
    ROUNDS = 4,
    TIMEOUT_MS = 150,
    GUARD = 4096,
    HANG_S = 120,
    SHARES = 13, /* the sum of those of choose() */
};

#define GUARD_BYTE 0x5a

/* Where the word is. */
enum place { IN_CONTROL, IN_BOARDS, IN_LL_SHARED, IN_LL_WORDS, IN_LL_SLOTS, PLACES };

static const char *const place_names[] = {"control block", "exchange rows", "low-latency ranges", "low-latency words",
                                          "low-latency slots"};

/* How it is written. */
enum manner { ALWAYS, IN_TURNS, ONCE, MANNERS };

struct attack {
    enum place place;
    enum manner manner;
    size_t offset;
    uint32_t value;
    unsigned after_us;
};

struct report {
    _Atomic int wrong; /* an error described in the text */
    char text[512];
    ep_status status;
};

struct scenario {
    _Atomic int ready; /* ranks that have completed creation */
    struct attack attack;
    struct report report[RANKS];
};

static const struct attack *attack; /* of this process */
static volatile bool stop;

static void complain(struct report *report, const char *what, int number)
{
    if (!report->wrong)
        snprintf(report->text, sizeof(report->text), "%s (%d): %s", what, number, ep_last_error());
    report->wrong = 1;
}

/* --- the hostile thread ------------------------------------------------------------------------------------------ */

struct target {
    ep_comm *comm;
    ep_ll *ll;
};

static volatile uint32_t *find_word(const struct target *target)
{
    const struct ep_group *group = ep_group_of(target->comm);
    struct host_ll *inner = target->ll ? target->ll->impl : NULL;
    size_t at = attack->offset / 4 * 4;
    char *base = NULL;

    switch (attack->place) {
    case IN_CONTROL:
        base = (char *)group->control;
        at %= offsetof(struct ep_group_control, slot) + 3 * sizeof(struct ep_group_slot);
        break;
    case IN_BOARDS:
        base = (char *)(group->control + 1) + at / 128 % EP_GROUP_EXCHANGES * group->exchange_row_bytes;
        at %= 128;
        break;
    case IN_LL_SHARED:
        base = inner ? (char *)inner->segment + inner->shared_at : NULL;
        at %= sizeof(struct ll_shared) + 2 * LOCAL * RANKS * sizeof(struct ll_range);
        break;
    case IN_LL_WORDS:
        /* One of its words in the segment of rank 0. */
        base = inner ? (char *)inner->peer[0] : NULL;
        at = (const size_t[]){LL_WORD(completed), LL_WORD(rows_ready), LL_WORD(barriers),
                              LL_WORD(masked_by) - HOSTILE * 4}[at / 8 % 4] +
             HOSTILE * 8 + at % 8;
        break;
    default:
        /* Counts, flags and the first slots that rank 0 has of this rank. */
        if (inner) {
            const struct ll_view to = ll_to(target->ll, 0);

            base = (char *)to.segment + (const int64_t[]){ll_wire_counts_at(to.layout, 0, to.source),
                                                          ll_wire_slot_flag_at(to.layout, to.source, 0),
                                                          ll_wire_slot_at(to.layout, to.source, 0),
                                                          ll_wire_slot_at(to.layout, to.source, 1)}[at / 16 % 4];
        }
        at = at % 16;
    }
    return base ? (volatile uint32_t *)(void *)(base + at) : NULL;
}

/* The races are intended: ThreadSanitizer need not report them. */
__attribute__((no_sanitize("thread"))) static void *write_rubbish(void *argument)
{
    volatile uint32_t *word = find_word(argument);
    struct timespec nap = {.tv_nsec = (long)attack->after_us * 1000};

    if (!word)
        return NULL;
    nanosleep(&nap, NULL);
    for (unsigned i = 0; !stop; i++) {
        uint32_t proper = *word;

        *word = attack->value;
        if (attack->manner == ONCE)
            break;
        if (attack->manner == IN_TURNS && proper != attack->value) {
            for (volatile int wait = 0; wait < 20; wait++)
                ;
            *word = proper;
        }
        if (i % 64 == 63)
            sched_yield();
    }
    return NULL;
}

/* --- the calls --------------------------------------------------------------------------------------------------- */

/* Memory with guards on both sides. */
struct guarded {
    unsigned char *memory;
    size_t bytes;
};

static void fill_guards(const struct guarded *g)
{
    memset(g->memory - GUARD, GUARD_BYTE, GUARD);
    memset(g->memory + g->bytes, GUARD_BYTE, GUARD);
}

static bool guards_hold(const struct guarded *g)
{
    for (size_t i = 0; i < GUARD; i++)
        if (g->memory[i - GUARD] != GUARD_BYTE || g->memory[g->bytes + i] != GUARD_BYTE)
            return false;
    return true;
}

enum { OUT_X, OUT_INDEX, OUT_WEIGHTS, OUT_SUM, OUT_SUM_WEIGHTS, LL_X, LL_COUNT, LL_SOURCE, LL_RANGE, LL_SUM, BUFFERS };

struct life {
    ep_comm *comm;
    ep_ll *ll;
    struct guarded buffer[BUFFERS];
    uint16_t x[TOKENS * HIDDEN];
    int64_t index[TOKENS * TOPK];
    float weights[TOKENS * TOPK];
};

/* Every second buffer is ordinary memory. */
static ep_status make_buffers(struct life *life)
{
    static const size_t bytes[BUFFERS] = {
        [OUT_X] = ROWS * HIDDEN * 2,
        [OUT_INDEX] = ROWS * TOPK * 8,
        [OUT_WEIGHTS] = ROWS * TOPK * 4,
        [OUT_SUM] = TOKENS * HIDDEN * 2,
        [OUT_SUM_WEIGHTS] = TOKENS * TOPK * 4,
        [LL_X] = (size_t)LOCAL * ROWS * HIDDEN * 2,
        [LL_COUNT] = LOCAL * 4,
        [LL_SOURCE] = (size_t)LOCAL * ROWS * 4,
        [LL_RANGE] = LOCAL * RANKS * 8,
        [LL_SUM] = TOKENS * HIDDEN * 2,
    };

    for (int i = 0; i < BUFFERS; i++) {
        void *memory;

        if (i % 2) {
            memory = aligned_alloc(4096, (2 * GUARD + bytes[i] + 4095) / 4096 * 4096);
            if (!memory)
                return EP_E_MEMORY;
        } else {
            EP_TRY(ep_alloc(life->comm, 2 * GUARD + bytes[i], &memory));
        }
        memset(memory, 0, 2 * GUARD + bytes[i]);
        life->buffer[i] = (struct guarded){(unsigned char *)memory + GUARD, bytes[i]};
        fill_guards(&life->buffer[i]);
    }
    return EP_OK;
}

static ep_status use_plan(struct life *life, bool worst)
{
    ep_plan_args args = args_plan(life->index, EP_I64, TOKENS, TOPK, EXPERTS);
    ep_dispatch_args dispatch;
    ep_combine_args combine;
    ep_plan_info info = {.size = sizeof(info)};
    ep_plan *plan;
    ep_status status;

    args.max_recv_tokens = worst ? ROWS : 0;
    EP_TRY(ep_plan_new(life->comm, &args, &plan));
    ep_plan_get_info(plan, &info);
    dispatch = args_dispatch(EP_BF16, HIDDEN, life->x, life->buffer[OUT_X].memory, ROWS);
    dispatch.topk_weights = life->weights;
    dispatch.recv_topk_idx = life->buffer[OUT_INDEX].memory;
    dispatch.recv_topk_weights = (float *)(void *)life->buffer[OUT_WEIGHTS].memory;
    status = info.out_rows > ROWS ? ep_fail(EP_E_MISMATCH, "more rows than there are tokens: rank %d damaged", HOSTILE)
                                  : ep_dispatch_sync(plan, &dispatch);
    combine = args_combine(HIDDEN, dispatch.recv_x, life->buffer[OUT_SUM].memory);
    combine.topk_weights = dispatch.recv_topk_weights;
    combine.out_topk_weights = (float *)(void *)life->buffer[OUT_SUM_WEIGHTS].memory;
    if (status == EP_OK)
        status = ep_combine_sync(plan, &combine);
    ep_plan_free(plan);
    return status;
}

static ep_status use_ll(struct life *life, bool hook)
{
    ep_ll_dispatch_args dispatch = args_ll_dispatch(life->x, life->index, EP_I64, TOKENS);
    ep_ll_combine_args combine;

    dispatch.out_dtype = EP_BF16;
    dispatch.recv_x = life->buffer[LL_X].memory;
    dispatch.recv_count = (int32_t *)(void *)life->buffer[LL_COUNT].memory;
    dispatch.recv_source = (int32_t *)(void *)life->buffer[LL_SOURCE].memory;
    dispatch.recv_range = (int64_t *)(void *)life->buffer[LL_RANGE].memory;
    dispatch.flags = hook ? EP_LL_RECV_HOOK : 0;
    EP_TRY(ep_ll_dispatch_sync(life->ll, &dispatch));
    if (hook)
        EP_TRY(ep_ll_finish_sync(life->ll, 0));
    combine = args_ll_combine(dispatch.recv_x, life->index, EP_I64, TOKENS, life->weights, life->buffer[LL_SUM].memory);
    combine.flags = dispatch.flags;
    EP_TRY(ep_ll_combine_sync(life->ll, &combine));
    return hook ? ep_ll_finish_sync(life->ll, 0) : EP_OK;
}

static ep_status one_round(struct life *life, int round)
{
    int32_t mine = round, all[RANKS];

    EP_TRY(use_plan(life, round % 2));
    EP_TRY(use_ll(life, round % 2));
    EP_TRY(ep_comm_barrier(life->comm));
    return ep_comm_allgather(life->comm, &mine, sizeof(mine), all);
}

static void check(struct life *life, struct report *report, ep_status status)
{
    char named[32];

    for (int i = 0; i < BUFFERS; i++)
        if (!guards_hold(&life->buffer[i]))
            complain(report, "written beside an output", i);
    if (status == EP_OK)
        return;
    snprintf(named, sizeof(named), "rank %d ", HOSTILE);
    if (!ep_status_is_failure(status))
        complain(report, "a status that there is not", (int)status);
    if (strstr(ep_last_error(), "is damaged") && !strstr(ep_last_error(), named))
        complain(report, "damage of another rank", (int)status);
}

/* What the rank that writes says of others: one entry for each rank, and statuses that there are. */
static void check_failed(const struct life *life, struct report *report)
{
    int32_t failed[2 * RANKS];

    for (int i = 0; i < 2 * RANKS; i++)
        failed[i] = GUARD_BYTE;
    if (ep_comm_get_failed(life->comm, failed) != EP_OK)
        complain(report, "ep_comm_get_failed() fails", 0);
    for (int i = 0; i < RANKS; i++)
        if (failed[i] != EP_OK && !ep_status_is_failure((ep_status)failed[i]))
            complain(report, "a status of a rank that there is not", failed[i]);
    for (int i = RANKS; i < 2 * RANKS; i++)
        if (failed[i] != GUARD_BYTE)
            complain(report, "written behind the statuses of the ranks", i);
}

static void live(ep_boot_shm *place, int rank, struct scenario *scenario)
{
    struct report *report = &scenario->report[rank];
    ep_ll_config ll_config;
    struct life life = {.comm = NULL};
    struct target target;
    ep_status status;
    pthread_t thread;
    ep_boot boot;

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    alarm(HANG_S);
    attack = &scenario->attack;
    for (int i = 0; i < TOKENS * TOPK; i++) {
        life.index[i] = (i / TOPK + i % TOPK * 2 + rank) % EXPERTS;
        life.weights[i] = 1.0f;
    }
    if (ep_boot_shm_join(place, rank, &boot) != EP_OK || unit_comm_new(&boot, NULL, 0, 60000, &life.comm) != EP_OK)
        _exit(10);
    ll_config = args_ll(TOKENS, HIDDEN, EXPERTS, TOPK);
    if (make_buffers(&life) != EP_OK || ep_ll_new(life.comm, &ll_config, &life.ll) != EP_OK ||
        ep_comm_barrier(life.comm) != EP_OK)
        _exit(10);
    life.comm->config.timeout_ms = TIMEOUT_MS;
    target = (struct target){life.comm, life.ll};
    /* The attack targets the rounds, not ranks that still leave the barrier. */
    atomic_fetch_add(&scenario->ready, 1);
    while (rank == HOSTILE && atomic_load(&scenario->ready) < RANKS)
        usleep(100);
    if (rank == HOSTILE && pthread_create(&thread, NULL, write_rubbish, &target) != 0)
        _exit(10);
    for (int round = 0; round < ROUNDS; round++) {
        status = one_round(&life, round);
        check(&life, report, status);
        report->status = status;
        if (status != EP_OK)
            break;
    }
    check_failed(&life, report);
    if (rank == HOSTILE) {
        stop = true;
        pthread_join(thread, NULL);
    } else {
        ep_ll_free(life.ll);
        ep_comm_free(life.comm);
        life.ll = NULL;
    }
    _exit(0);
}

/* --- the parent -------------------------------------------------------------------------------------------------- */

static uint64_t random_state;

static uint32_t draw(void)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 32);
}

static void describe(const struct attack *a, char *text, size_t bytes)
{
    snprintf(text, bytes, "%s, offset %zu, manner %d, value 0x%08x, after %u us", place_names[a->place], a->offset,
             a->manner, a->value, a->after_us);
}

/* The statuses that the others ended with. */
static int seen[512];

static void run_attack(struct scenario *scenario, const struct attack *a)
{
    pid_t children[RANKS];
    ep_boot_shm *place;
    char text[160];

    memset(scenario, 0, sizeof(*scenario));
    scenario->attack = *a;
    describe(a, text, sizeof(text));
    assert_int_equal(ep_boot_shm_new(RANKS, &place), EP_OK);
    for (int rank = 0; rank < RANKS; rank++) {
        children[rank] = fork();
        assert_true(children[rank] >= 0);
        if (children[rank] == 0)
            live(place, rank, scenario);
    }
    for (int rank = 0; rank < RANKS; rank++) {
        int how = 0;

        assert_int_equal(waitpid(children[rank], &how, 0), children[rank]);
        if (WIFSIGNALED(how))
            fail_msg("%s: rank %d %s (signal %d)", text, rank, WTERMSIG(how) == SIGALRM ? "hangs" : "crashed",
                     WTERMSIG(how));
        if (WEXITSTATUS(how) != 0)
            fail_msg("%s: rank %d ended with %d", text, rank, WEXITSTATUS(how));
        if (rank != HOSTILE && scenario->report[rank].wrong)
            fail_msg("%s: rank %d: %s", text, rank, scenario->report[rank].text);
        if (rank != HOSTILE)
            seen[scenario->report[rank].status]++;
    }
    ep_boot_shm_free(place);
}

static void choose(struct attack *a, int number)
{
    static const uint32_t extremes[] = {0xffffffff, 0x7fffffff, 0x80000000, 0x00010000, 0, 1, 7, 0xffff0000};
    static const struct {
        enum place place;
        int share;
    } shares[] = {{IN_CONTROL, 5}, {IN_BOARDS, 3}, {IN_LL_SHARED, 1}, {IN_LL_WORDS, 1}, {IN_LL_SLOTS, 3}};
    int at = number % SHARES;

    for (size_t i = 0; i < sizeof(shares) / sizeof(shares[0]); i++) {
        if (at >= 0 && at < shares[i].share)
            a->place = shares[i].place;
        at -= shares[i].share;
    }
    a->manner = (enum manner)(draw() % MANNERS);
    /* In order, so that every word is covered. */
    a->offset = (size_t)number / SHARES * 20 + (size_t)(number % 5) * 4;
    if (draw() % 8 == 0)
        a->offset = draw() % 4096;
    a->value = draw() % 4 ? extremes[draw() % 8] : draw();
    a->after_us = draw() % 3 ? draw() % 3000 : 0;
}

/* ThreadSanitizer, which does not see accesses of other processes, takes ten times as long. */
#if defined(__SANITIZE_THREAD__)
enum { ATTACKS = 60 };
#else
enum { ATTACKS = 286 };
#endif

TEST(a_rank_that_writes_rubbish_harms_nobody)
{
    const char *is_long = getenv("EPKIT_TEST_LONG"), *seed = getenv("EPKIT_TEST_SEED");
    int n = is_long && *is_long == '1' ? 6000 : ATTACKS;
    struct scenario *scenario =
        mmap(NULL, sizeof(*scenario), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    assert_true(scenario != MAP_FAILED);
    random_state = seed ? strtoull(seed, NULL, 0) : 11;
    for (int i = 0; i < n; i++) {
        struct attack a;

        choose(&a, i);
        run_attack(scenario, &a);
    }
    printf("# %d attacks: no failure %d", n, seen[EP_OK]);
    for (int status = 1; status < 512; status++)
        if (seen[status])
            printf(", %s %d", ep_status_name((ep_status)status), seen[status]);
    printf("\n");
    /* The damage was detected, and not only as a timeout. */
    assert_true(seen[EP_E_MISMATCH] > 0);
    munmap(scenario, sizeof(*scenario));
}
