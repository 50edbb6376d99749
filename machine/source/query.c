/* SPDX-License-Identifier: Apache-2.0 */
/*
 * query.c - queries of libraries, made in a child process.
 *
 * A driver library may hang in the kernel, crash, print, or leave threads and signal handlers behind. The child is
 * killed at the deadline at the latest. Its answer is JSON and a newline, without which it is not complete; an answer
 * of NULL is the newline alone.
 */
#include "common/capture.h"
#include "common/dir.h"
#include "state.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#define ANSWER_MAX (4u << 20)
#define ANSWER_FD 3
#define WHY_BYTES 160

struct question {
    json_t *(*query)(void *argument);
    void *argument;
};

/* --- in the child --- */

/* The library inherits nothing of the parent: no descriptors, output, signal handlers or core dump. */
static bool prepare_child(void)
{
    struct rlimit no_core = {0};
    int null = open("/dev/null", O_RDWR);

    for (int number = 1; number < NSIG; number++)
        if (number != SIGKILL && number != SIGSTOP)
            signal(number, SIG_DFL);
    setrlimit(RLIMIT_CORE, &no_core);
    /* Descriptor 3 is replaced below. */
    if (null == ANSWER_FD)
        null = dup(null);
    if (null < 0 || dup3(STDOUT_FILENO, ANSWER_FD, O_CLOEXEC) < 0 || dup2(null, STDOUT_FILENO) < 0 ||
        dup2(null, STDERR_FILENO) < 0)
        return false;
    closefrom(ANSWER_FD + 1);
    return true;
}

static void answer_question(const void *context)
{
    const struct question *question = context;
    json_t *value;
    char *text;

    if (!prepare_child())
        return;
    value = question->query(question->argument);
    text = value ? json_dumps(value, JSON_COMPACT | JSON_ENCODE_ANY) : NULL;
    if (value && !text)
        _exit(2);
    _exit((text && write_all(ANSWER_FD, text, strlen(text))) || write_all(ANSWER_FD, "\n", 1) ? 1 : 0);
}

/* --- in the parent --- */

static json_t *parse_answer(const char *text, size_t bytes)
{
    json_t *value = snapshot_is_bounded(text, bytes)
                        ? json_loadb(text, bytes, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL | JSON_DECODE_ANY, NULL)
                        : NULL;

    return value ? json_pack("{s:o}", "value", value) : cache_failure(SOURCE_FAILED, "the answer is malformed");
}

/* An end before the answer was complete. */
static json_t *explain_end(int status)
{
    char why[WHY_BYTES];

    if (WIFSIGNALED(status))
        snprintf(why, sizeof(why), "killed by signal %d (%s)", WTERMSIG(status), sigdescr_np(WTERMSIG(status)));
    else if (WEXITSTATUS(status) == PROCESS_UNKNOWN)
        snprintf(why, sizeof(why), "ended without an answer");
    else
        snprintf(why, sizeof(why), "ended with exit status %d and without an answer", WEXITSTATUS(status));
    return cache_failure(SOURCE_FAILED, why);
}

static json_t *read_answer(const struct capture *capture, int deadline_ms)
{
    const struct capture_text *output = &capture->output;
    char why[WHY_BYTES];

    if (capture->start_error)
        return cache_failure_errno(capture->start_error);
    if (output->cut)
        return cache_failure(SOURCE_FAILED, "the answer is larger than 4 MiB");
    if (output->bytes > 0 && output->text[output->bytes - 1] == '\n')
        return output->bytes == 1 ? cache_failure(SOURCE_FAILED, "the query has no answer here")
                                  : parse_answer(output->text, output->bytes);
    if (!capture->late)
        return explain_end(capture->status);
    snprintf(why, sizeof(why), "no answer within %d ms", deadline_ms);
    return cache_failure(SOURCE_FAILED, why);
}

static json_t *make_answer(json_t *(*query)(void *argument), void *argument, int deadline_ms)
{
    const struct question question = {.query = query, .argument = argument};
    struct capture capture = {.execute = answer_question, .context = &question, .bytes_max = ANSWER_MAX + 1};
    json_t *entry;

    capture_run(&capture, 1, 1, deadline_ms > 0 ? deadline_ms : 0, NULL, NULL);
    entry = read_answer(&capture, deadline_ms);
    capture_done(&capture);
    return entry;
}

struct source_answer source_query(struct source *source, const char *name, json_t *(*query)(void *argument),
                                  void *argument, int deadline_ms)
{
    struct source_answer answer = {0};
    const json_t *entry = cache_get(source, CACHE_ANSWERS, name);

    if (!entry) {
        source_set_current_path(source, name);
        entry = cache_put(source, CACHE_ANSWERS, name, make_answer(query, argument, deadline_ms));
        live_done(source);
    }
    answer.state = cache_state(entry, &answer.why);
    if (answer.state == SOURCE_OK)
        answer.value = json_object_get(entry, "value");
    return answer;
}
