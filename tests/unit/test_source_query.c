/* SPDX-License-Identifier: Apache-2.0 */
/* Queries of libraries: however the child ends, there is an answer in time, and nothing is left behind. */
#include "base/clock.h"
#include "machine/source/state.h"
#include "tree.h"
#include "unit.h"

#include <dirent.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>

#define PATIENT_MS 60000 /* for tests without a deadline */

static int setup(void **state)
{
    assert_int_equal(source_open(NULL, (struct source **)state), EP_OK);
    return 0;
}

static int teardown(void **state)
{
    source_free(*state);
    return 0;
}

/* --- what a library may do --- */

static json_t *answer(void *argument)
{
    const char *text = argument;

    return json_pack("{s:s, s:[i, b]}", "text", text, "list", 7, 1);
}

static json_t *answer_bytes(void *argument)
{
    (void)argument;
    return json_pack("{s:o}", "raw", json_stringn_nocheck("\1\0x", 3));
}

static json_t *answer_scalar(void *argument)
{
    (void)argument;
    return json_integer(42);
}

static json_t *answer_nothing(void *argument)
{
    (void)argument;
    return NULL;
}

static json_t *hang(void *argument)
{
    (void)argument;
    for (;;)
        pause();
    return NULL;
}

static json_t *hang_deaf(void *argument)
{
    for (int number = 1; number < NSIG; number++)
        signal(number, SIG_IGN);
    return hang(argument);
}

static json_t *crash(void *argument)
{
    (void)argument;
    raise(SIGSEGV);
    return NULL;
}

static json_t *leave(void *argument)
{
    (void)argument;
    _exit(9);
    return NULL;
}

static _Noreturn void say(const void *data, size_t bytes)
{
    /* In parts: a pipe holds less. */
    for (ssize_t n; bytes > 0; data = (const char *)data + n, bytes -= (size_t)n)
        if ((n = write(3, data, bytes)) < 0)
            _exit(1);
    _exit(0);
}

static json_t *say_garbage(void *argument)
{
    (void)argument;
    say("{]xyz\n", 6);
}

static json_t *say_less(void *argument)
{
    (void)argument;
    say("{}", 2);
}

static json_t *say_bomb(void *argument)
{
    size_t bytes = 3u << 20;
    char *text = malloc(bytes);

    (void)argument;
    memset(text, '[', bytes);
    text[bytes - 1] = '\n';
    say(text, bytes);
}

static json_t *text_of(size_t bytes)
{
    char *text = malloc(bytes);
    json_t *value;

    memset(text, 'x', bytes);
    value = json_stringn(text, bytes);
    free(text);
    return value;
}

static json_t *answer_too_much(void *argument)
{
    (void)argument;
    return text_of((4u << 20) + 1);
}

static json_t *answer_much(void *argument)
{
    (void)argument;
    return text_of(3u << 20);
}

/* A helper process that outlives its parent and inherits its descriptors. */
static json_t *leave_a_process(void *argument)
{
    if (fork() == 0)
        hang(argument);
    return json_true();
}

static json_t *machine_around(void *argument)
{
    json_t *seen = json_object(), *fds = json_array();
    struct rlimit core;
    sigset_t blocked;
    DIR *dir = opendir("/proc/self/fd");
    struct dirent *one;
    int signal_number = 0;

    (void)argument;
    while ((one = readdir(dir)))
        if (one->d_name[0] != '.' && atoi(one->d_name) != dirfd(dir))
            json_array_append_new(fds, json_integer(atoi(one->d_name)));
    closedir(dir);
    getrlimit(RLIMIT_CORE, &core);
    prctl(PR_GET_PDEATHSIG, &signal_number);
    sigprocmask(SIG_BLOCK, NULL, &blocked);
    printf("a library that prints\n");
    fflush(stdout);
    json_object_set_new(seen, "fds", fds);
    json_object_set_new(seen, "core", json_integer((json_int_t)core.rlim_cur));
    json_object_set_new(seen, "death", json_integer(signal_number));
    json_object_set_new(seen, "blocked", json_boolean(sigismember(&blocked, SIGUSR1) == 1));
    json_object_set_new(seen, "handler", json_boolean(signal(SIGUSR2, SIG_DFL) != SIG_DFL));
    return seen;
}

/* --- tests --- */

TEST_WITH(answers_come_back, setup, teardown)
{
    char text[] = "of the child";
    struct source_answer got = source_query(*state, "question", answer, text, PATIENT_MS);
    const json_t *raw;

    assert_int_equal(got.state, SOURCE_OK);
    assert_string_equal(got.why, "");
    assert_string_equal(json_string_value(json_object_get(got.value, "text")), "of the child");
    assert_int_equal(json_integer_value(json_array_get(json_object_get(got.value, "list"), 0)), 7);
    /* It is queried once. */
    assert_ptr_equal(source_query(*state, "question", crash, NULL, PATIENT_MS).value, got.value);

    got = source_query(*state, "bytes", answer_bytes, NULL, PATIENT_MS);
    raw = json_object_get(got.value, "raw");
    assert_int_equal(json_string_length(raw), 3);
    assert_memory_equal(json_string_value(raw), "\1\0x", 3);
    assert_int_equal(json_integer_value(source_query(*state, "scalar", answer_scalar, NULL, PATIENT_MS).value), 42);
    got = source_query(*state, "much", answer_much, NULL, PATIENT_MS);
    assert_int_equal(json_string_length(got.value), 3u << 20);
}

TEST_WITH(a_child_may_end_as_it_likes, setup, teardown)
{
    static const struct {
        const char *name;
        json_t *(*ask)(void *argument);
        const char *why;
    } cases[] = {{"nothing", answer_nothing, "the query has no answer here"},
                 {"crash", crash, "killed by signal 11 (Segmentation fault)"},
                 {"leave", leave, "ended with exit status 9 and without an answer"},
                 {"garbage", say_garbage, "the answer is malformed"},
                 {"bomb", say_bomb, "the answer is malformed"},
                 {"less", say_less, "ended with exit status 0 and without an answer"},
                 {"too much", answer_too_much, "the answer is larger than 4 MiB"},
                 {"hang", hang, "no answer within 200 ms"},
                 {"deaf", hang_deaf, "no answer within 200 ms"}};

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        int deadline_ms = strstr(cases[i].why, "200") ? 200 : PATIENT_MS;
        uint64_t start = ep_now_ns();
        struct source_answer got = source_query(*state, cases[i].name, cases[i].ask, NULL, deadline_ms);

        assert_int_equal(got.state, SOURCE_FAILED);
        assert_null(got.value);
        assert_string_equal(got.why, cases[i].why);
        if (deadline_ms == 200)
            assert_in_range(ep_now_ns() - start, 190 * 1000000ull, PATIENT_MS * 1000000ull);
        /* The failure is cached: a query that would succeed now is not made, so nobody waits for the deadline twice. */
        assert_string_equal(source_query(*state, cases[i].name, answer_scalar, NULL, PATIENT_MS).why, cases[i].why);
    }
    /* No child is left. */
    assert_int_equal(waitpid(-1, NULL, WNOHANG), -1);
    assert_int_equal(errno, ECHILD);
}

TEST_WITH(an_answer_ends_where_it_says, setup, teardown)
{
    uint64_t start = ep_now_ns();

    /* This process becomes the reaper of orphans, to detect them. */
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    assert_int_equal(source_query(*state, "left", leave_a_process, NULL, PATIENT_MS).state, SOURCE_OK);
    assert_in_range(ep_now_ns() - start, 0, PATIENT_MS * 1000000ull);
    prctl(PR_SET_CHILD_SUBREAPER, 0);
    for (int i = 0; i < 2000 && waitpid(-1, NULL, WNOHANG) == 0; i++) {
        char path[64], children[256] = "";
        FILE *file;

        snprintf(path, sizeof(path), "/proc/self/task/%d/children", (int)getpid());
        file = fopen(path, "r");
        if (file) {
            if (fgets(children, sizeof(children), file))
                kill((pid_t)strtol(children, NULL, 10), SIGKILL);
            fclose(file);
        }
        usleep(1000);
    }
}

static void ignore(int number)
{
    (void)number;
}

TEST_WITH(a_child_has_nothing_of_its_parent, setup, teardown)
{
    struct source_answer got;
    sigset_t blocked, old;
    int fd = open("/dev/null", O_RDONLY);

    signal(SIGUSR2, ignore);
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGUSR1);
    sigprocmask(SIG_BLOCK, &blocked, &old);
    got = source_query(*state, "around", machine_around, NULL, PATIENT_MS);
    sigprocmask(SIG_SETMASK, &old, NULL);
    signal(SIGUSR2, SIG_DFL);
    close(fd);
    assert_int_equal(got.state, SOURCE_OK);
    assert_int_equal(json_array_size(json_object_get(got.value, "fds")), 4);
    assert_int_equal(json_integer_value(json_object_get(got.value, "core")), 0);
    assert_int_equal(json_integer_value(json_object_get(got.value, "death")), SIGKILL);
    assert_true(json_is_false(json_object_get(got.value, "blocked")));
    assert_true(json_is_false(json_object_get(got.value, "handler")));
}

/* If the parent ignores SIGCHLD, an answer is still valid. */
TEST_WITH(children_may_be_ignored, setup, teardown)
{
    void (*old)(int) = signal(SIGCHLD, SIG_IGN);

    assert_int_equal(source_query(*state, "scalar", answer_scalar, NULL, PATIENT_MS).state, SOURCE_OK);
    assert_string_equal(source_query(*state, "crash", crash, NULL, PATIENT_MS).why, "ended without an answer");
    signal(SIGCHLD, old);
}

TEST_WITH(only_the_live_machine_is_asked, setup, teardown)
{
    struct tree tree;
    struct source *source;

    tree_init(&tree);
    assert_int_equal(source_open(tree.place, &source), EP_OK);
    assert_int_equal(source_query(source, "nvml", answer_scalar, NULL, PATIENT_MS).state, SOURCE_NOT_RECORDED);
    source_free(source);
    tree_put(&tree, "/" SOURCE_OVERLAY,
             "{\"epkit_snapshot\": 1, \"answers\": {\"nvml\": {\"value\": 43},"
             " \"load:x\": {\"state\": \"failed\", \"why\": \"made up\"}}}");
    assert_int_equal(source_open(tree.place, &source), EP_OK);
    assert_int_equal(json_integer_value(source_query(source, "nvml", answer_scalar, NULL, PATIENT_MS).value), 43);
    assert_string_equal(source_query(source, "load:x", answer_scalar, NULL, PATIENT_MS).why, "made up");
    source_free(source);
    tree_done(&tree);
}
