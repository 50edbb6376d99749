/* SPDX-License-Identifier: Apache-2.0 */
/* Running other programs: what they say, how they end, and that none outlives its deadline. */
#include "temp.h"

#include "common/capture.h"

#include <errno.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#define PATIENT_MS 60000 /* where no deadline is to be met */

static char shell[] = "/bin/sh", option[] = "-c";

static int64_t now_ms(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static struct capture run(const char *script, int64_t timeout_ms)
{
    char text[512];
    char *argv[] = {shell, option, text, NULL};
    struct capture capture = {.argv = argv};

    snprintf(text, sizeof(text), "%s", script);
    capture_run(&capture, 1, 1, timeout_ms, NULL, NULL);
    capture.argv = NULL;
    return capture;
}

/* One that speaks and goes on without end, with a deadline that lets it speak. */
static struct capture run_until_it_speaks(const char *script)
{
    struct capture capture = run(script, 300);

    for (int64_t ms = 600; capture.output.bytes == 0 && ms < PATIENT_MS; ms *= 2) {
        capture_done(&capture);
        capture = run(script, ms);
    }
    return capture;
}

TEST(test_both_streams_and_status)
{
    struct capture capture = run("echo out; echo err >&2; exit 7", PATIENT_MS);

    assert_string_equal(capture.output.text, "out\n");
    assert_string_equal(capture.error.text, "err\n");
    assert_true(WIFEXITED(capture.status));
    assert_int_equal(WEXITSTATUS(capture.status), 7);
    assert_false(capture.late);
    capture_done(&capture);
}

TEST(test_standard_input_is_empty)
{
    struct capture capture = run("cat; echo end", PATIENT_MS);

    assert_string_equal(capture.output.text, "end\n");
    capture_done(&capture);
}

TEST(test_a_program_that_is_not_there)
{
    char name[] = "/nonexistent/program";
    char *argv[] = {name, NULL};
    struct capture capture = {.argv = argv};

    capture_run(&capture, 1, 1, PATIENT_MS, NULL, NULL);
    assert_int_equal(capture.start_error, ENOENT);
    capture_done(&capture);
}

static void speak(const void *context)
{
    dprintf(STDOUT_FILENO, "%s", (const char *)context);
    _exit(3);
}

/* What runs in a child without being executed is heard and waited for as a program is. */
TEST(test_a_child)
{
    struct capture capture = {.execute = speak, .context = "from the child"};

    capture_run(&capture, 1, 1, 10000, NULL, NULL);
    assert_string_equal(capture.output.text, "from the child");
    assert_int_equal(WEXITSTATUS(capture.status), 3);
    capture_done(&capture);
}

/* It closes its output long before it ends: its end is what counts. */
TEST(test_closed_output)
{
    struct capture capture = run("echo early; exec >&- 2>&-; sleep 0.3; exit 5", 60000);

    assert_string_equal(capture.output.text, "early\n");
    assert_false(capture.late);
    assert_int_equal(WEXITSTATUS(capture.status), 5);
    capture_done(&capture);
}

TEST(test_deadline)
{
    int64_t before = now_ms();
    struct capture capture = run_until_it_speaks("echo early; sleep 100");

    assert_true(capture.late);
    assert_string_equal(capture.output.text, "early\n");
    assert_in_range(now_ms() - before, 290, 99000);
    capture_done(&capture);
}

/* One that writes without end, and one that has closed its output, meet their deadline as well. */
TEST(test_deadline_of_the_loud_and_of_the_silent)
{
    struct capture loud = run("yes", 300), silent = run("exec >&- 2>&-; sleep 100", 300);

    assert_true(loud.late);
    assert_true(silent.late);
    assert_true(loud.output.bytes <= CAPTURE_BYTES_MAX);
    capture_done(&loud);
    capture_done(&silent);
}

TEST(test_output_is_bounded)
{
    struct capture capture = run("head -c 9000000 /dev/zero", PATIENT_MS);

    assert_int_equal(capture.output.bytes, CAPTURE_BYTES_MAX);
    assert_true(capture.output.cut);
    assert_true(WIFEXITED(capture.status));
    capture_done(&capture);
}

/* A child that stays behind and holds the pipes is not waited for; those of the group die at the deadline. */
TEST(test_children_of_children)
{
    int64_t before = now_ms();
    struct capture capture = run("sleep 1000 & echo $!", PATIENT_MS);
    pid_t left = (pid_t)strtol(capture.output.text, NULL, 10);

    assert_in_range(now_ms() - before, 0, PATIENT_MS);
    assert_false(capture.late);
    assert_int_equal(kill(left, SIGKILL), 0);
    capture_done(&capture);
    capture = run_until_it_speaks("sleep 1000 & echo $!; wait");
    left = (pid_t)strtol(capture.output.text, NULL, 10);
    assert_true(left > 1);
    for (int i = 0; i < 3000 && kill(left, 0) == 0; i++) {
        char path[64], text[256] = "";
        FILE *file;

        /* Without a process that reaps it a dead one stays as a zombie. */
        snprintf(path, sizeof(path), "/proc/%d/stat", (int)left);
        file = fopen(path, "r");
        if (!file)
            break;
        if (fgets(text, sizeof(text), file) && strstr(text, ") Z ")) {
            fclose(file);
            break;
        }
        fclose(file);
        usleep(20000);
        assert_int_not_equal(i, 2999);
    }
    capture_done(&capture);
}

struct counting {
    int n_ended;
};

static void count(const struct capture *capture, void *context)
{
    struct counting *counting = context;

    (void)capture;
    counting->n_ended++;
}

/* Each ends when as many are there as may run at the same time: one after the other none of them would. */
TEST(test_many_side_by_side)
{
    enum { N = 40, BESIDE = 20 };
    char texts[N][PATH_MAX + 160], folder[PATH_MAX];
    char *argvs[N][4];
    struct capture captures[N] = {{0}};
    struct counting counting = {0};

    temp_template("capture", folder);
    assert_non_null(mkdtemp(folder));
    for (int i = 0; i < N; i++) {
        snprintf(texts[i], sizeof(texts[i]),
                 "cd '%s'; : >%d; set -- *; until [ $# -ge %d ]; do sleep 0.2; set -- *; done; echo %d", folder, i,
                 BESIDE, i);
        argvs[i][0] = shell;
        argvs[i][1] = option;
        argvs[i][2] = texts[i];
        argvs[i][3] = NULL;
        captures[i].argv = argvs[i];
    }
    capture_run(captures, N, BESIDE, PATIENT_MS, count, &counting);
    assert_int_equal(counting.n_ended, N);
    for (int i = 0; i < N; i++) {
        char expected[16], path[PATH_MAX + 16];

        snprintf(expected, sizeof(expected), "%d\n", i);
        assert_string_equal(captures[i].output.text, expected);
        capture_done(&captures[i]);
        snprintf(path, sizeof(path), "%s/%d", folder, i);
        unlink(path);
    }
    assert_int_equal(rmdir(folder), 0);
}

TEST(test_unknown_end)
{
    char name[] = "true", *argv[] = {name, NULL};
    struct process process;
    int status = 0;

    assert_int_equal(process_start(argv, &process), 0);
    /* As a library that is preloaded may do. */
    assert_int_equal(waitpid(process.pid, &status, 0), process.pid);
    assert_int_equal(status, 0);
    assert_int_equal(process_wait(process.pid, WNOHANG, &status), process.pid);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), PROCESS_UNKNOWN);
    process_close(&process);
}
