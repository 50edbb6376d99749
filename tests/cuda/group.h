/* SPDX-License-Identifier: Apache-2.0 */
/*
 * group.h - shared by the programs of this folder: options, ranks under a deadline, the two communicators of a rank,
 * shared words, streams that are held, captured graphs.
 */
#ifndef EP_TESTS_CUDA_GROUP_H
#define EP_TESTS_CUDA_GROUP_H

#include "call.h"
#include "tests/args.h"
#include "tests/local_ranks.h"

#include <epkit/epkit.h>
#include <stdbool.h>
#include <sys/types.h>

#define MAX_RANKS 64 /* bits of a mask */
#define SKIPPED 77   /* exit code of a program that could not run anything */

/* Added to the flags of a call, none of which uses this bit: the call is only queued. */
#define TEST_ASYNC (1u << 31)

static inline bool test_is_capturing(cudaStream_t stream)
{
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;

    return stream && (cudaStreamIsCapturing(stream, &capture) != cudaSuccess || capture != cudaStreamCaptureStatusNone);
}

/*
 * Is a call to be made in its _sync form? Yes without TEST_ASYNC in `flags` and outside a capture; waits for `stream`
 * then. A refused low-latency call leaves the group as it was only in this form.
 */
static inline bool test_waits(cudaStream_t stream, uint32_t flags)
{
    return !(flags & TEST_ASYNC) && !test_is_capturing(stream) && cudaStreamSynchronize(stream) == cudaSuccess;
}

/* The result of a call that was queued in `stream` with `status`; waits for it without TEST_ASYNC in `flags`. */
static inline ep_status test_sync_call(ep_comm *comm, ep_status status, ep_stream stream, uint32_t flags)
{
    return status == EP_OK && !(flags & TEST_ASYNC) && !test_is_capturing(stream) ? ep_stream_sync(comm, stream)
                                                                                  : status;
}

/* --- options ---------------------------------------------------------------------------------------------------- */

/* Sets *ret_number; false, with a message, if `text` is no number in min..max. */
bool option_number(const char *option, const char *text, long long min, long long max, long long *ret_number);

struct options {
    int ranks;
    int rounds; /* 0: the program has no --rounds */
    uint64_t seed;
    const char *only; /* NULL: all scenarios */
    bool found;       /* it is one of them */
};

/*
 * --ranks N (from `min_ranks` on), --rounds N, --seed N, --only SCENARIO, --slow N for group_slow; values before the
 * call are the defaults. false after a usage error: the program ends with 2.
 */
bool options_read(int argc, char **argv, int min_ranks, struct options *options);

/* Is this scenario to be run? */
bool options_select(struct options *options, const char *scenario);

/* The exit code of a program whose scenarios gave `code`: 2 if --only names none of them. */
int options_code(const struct options *options, int code);

/* --- ranks ------------------------------------------------------------------------------------------------------ */

struct launch {
    const char *name; /* of the program and the scenario, for messages */
    int ranks, seconds;
    bool threads;
    int victim; /* the rank that gets SIGKILL; -1: none */
    ep_rank_fn run;
    void *argument;
};

/*
 * Runs all ranks, none longer than `seconds`, and checks that no process is left. Returns 0; 1 with a message for each
 * failed rank; or SKIPPED if no rank could run. Launches with processes must come before those with threads.
 */
int launch_ranks(const struct launch *launch);

/* Merges the codes of two parts of a program: a failure wins, and SKIPPED remains only if both were skipped. */
int merge_codes(int a, int b);

/* "passed", "FAILED", or why it was skipped. */
const char *result_name(int code);

/*
 * Makes one GPU visible to each rank: number `rank` modulo `n`. Called in the rank's process before its first CUDA
 * call; a child process counts the GPUs before the ranks start. 0, or FAILED with a message.
 */
int count_gpus_in_child(int *ret_n);
int hide_other_gpus(int rank, int n);

/* How the communicators of group_open() are divided; all zero: one node. Before the ranks start. */
struct division {
    int nodes;
    const char *network; /* NULL: emulated */
    int partial_type;
    bool bad; /* the emulated network delays, splits and reorders, and has small rings */
};
extern struct division group_division;

/* Factor for the deadlines of groups, waits and launches, for many ranks on a GPU; 1 by default. */
extern int group_slow;

/* EP_COMM_* of the groups on GPUs. */
extern uint32_t group_flags;

/* Applies the division to a configuration, which names its backend, and to its boot. */
void group_divide(ep_boot *boot, ep_comm_config *config);

/* A communicator of the ranks that go on, over their bootstrap: on one node if they no longer fill the nodes. */
int group_next(const ep_boot *boot, const char *backend, int timeout_ms, ep_comm **ret_comm);

/* What a rank's program returns: 0, FAILED, SKIPPED. */
struct group {
    ep_comm *host, *cuda; /* the host backend is the oracle for the CUDA backend; NULL if not used */
    int rank, nranks, device;
    cudaStream_t stream; /* of the caller; not that of `cuda` unless a test sets it */
};

/* Those of the host backend, or, with `device`, of the CUDA backend. */
static inline ep_comm *group_comm(const struct group *group, int device)
{
    return device ? group->cuda : group->host;
}

static inline ep_stream group_stream(const struct group *group, int device)
{
    return device ? (ep_stream)group->stream : NULL;
}

/* Waits for that stream. */
int group_sync(const struct group *group, int device);

/*
 * A communicator of the CUDA backend over `boot`, and one of the host backend, whose deadline is longer, over `second`
 * unless that is NULL. 0, FAILED, or SKIPPED where there is no GPU. The group is to be closed in each case.
 */
int group_open(const ep_boot *boot, ep_boot_shm *second, int timeout_ms, struct group *ret_group);

/* After a failure (code not 0) aborts the communicators first. */
void group_close(struct group *group, int code);

/* A scenario that all ranks of a group run. */
struct scenario_run {
    const char *program, *name;
    int timeout_ms, seconds; /* of the group; of all ranks */
    size_t shared_bytes;     /* 0: none */
    /* On each rank, between group_open() and group_close(): 0, DIFFERS or FAILED of call.h. */
    int (*run)(const struct scenario_run *run, const struct group *group);
    const void *scenario; /* the program's own description of it */
    /* Set by run_group_scenario(): memory that the ranks share, [shared_bytes], zeroed; seed and rounds of the options.
     */
    void *shared;
    uint64_t seed;
    int rounds;
};

/* Runs it if it is selected. Returns the result of launch_ranks(), or SKIPPED. */
int run_group_scenario(struct options *options, struct scenario_run run);

/*
 * Runs all scenarios of a program: `n` descriptions of `bytes` bytes, each of which begins with a name. `run` holds
 * what they have in common. Returns the exit code of the program.
 */
int run_group_scenarios(struct options *options, struct scenario_run run, const void *scenarios, size_t n,
                        size_t bytes);

/* run_group_program() calls options_read(), then run_group_scenarios(). */
int run_group_program(int argc, char **argv, int min_ranks, struct options *options, struct scenario_run run,
                      const void *scenarios, size_t n, size_t bytes);

/* A barrier on the host backend. */
int group_barrier(const struct group *group);

/* Combines the codes of all ranks by bitwise or, on the host backend. */
int group_merge_codes(const struct group *group, int code, int *ret_code);

/* Checks a call that must fail, with `says` (NULL: anything) in the text. 0, or FAILED with a message. */
int expect_status(const char *call, ep_status got, ep_status expected, const char *says);
/* expect_failed_rank() checks a call that must fail with a text that names the rank. */
int expect_failed_rank(const char *call, ep_status got, ep_status expected, int rank);

/* Does an error text name the rank? */
bool names_rank(const char *text, int rank);

/* --- time and words between processes --------------------------------------------------------------------------- */

uint64_t next_random(uint64_t *state);
double now_ms(void);
void sleep_ms(int ms);

/* Zeroed memory that ranks share if it is made before they start; NULL, with a message, on failure. */
void *share(size_t bytes);

/* Waits until *word is at least `value`, for at most `ms`: 0, or FAILED with a message. */
int await(const _Atomic int *word, int value, int ms, const char *what);

/* Holds a stream until it is released, or for `ms`. `ended` is set when it continues. */
struct hold {
    const _Atomic int *word; /* releases the stream when not 0; NULL: only by time */
    int ms, after_ms;        /* the limit; additional time after the release */
    _Atomic int ended;
};

int hold_stream(cudaStream_t stream, struct hold *hold);

/* --- graphs ----------------------------------------------------------------------------------------------------- */

int capture_begin(const struct group *group);
int capture_end(const struct group *group, cudaGraphExec_t *ret_exec);

#endif
