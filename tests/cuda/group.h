/* SPDX-License-Identifier: Apache-2.0 */
/*
 * group.h - what the programs of this folder share: options, ranks under a deadline, the two communicators of a rank,
 * words that all ranks see, streams that are held up, captured graphs.
 */
#ifndef EP_TESTS_CUDA_GROUP_H
#define EP_TESTS_CUDA_GROUP_H

#include "call.h"
#include "testing/launch.h"

#include <epkit/epkit.h>
#include <stdbool.h>
#include <sys/types.h>

#define MAX_RANKS 64 /* a bit of a word for each */
#define SKIPPED 77   /* exit code of a program that could not run anything */

/* Beside the flags of a call, none of which has this bit: it is only queued. */
#define TEST_ASYNC (1u << 31)

static inline bool test_is_capturing(cudaStream_t stream)
{
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;

    return stream && (cudaStreamIsCapturing(stream, &capture) != cudaSuccess || capture != cudaStreamCaptureStatusNone);
}

/*
 * Is a call to be made by its _sync form? Without TEST_ASYNC in `flags`, outside of a capture; then what `stream` holds
 * is complete. A low-latency call that is refused leaves the group as it was in this form alone.
 */
static inline bool test_waits(cudaStream_t stream, uint32_t flags)
{
    return !(flags & TEST_ASYNC) && !test_is_capturing(stream) && cudaStreamSynchronize(stream) == cudaSuccess;
}

/* What has become of a call that was queued in `stream` with `status`; waits for it without TEST_ASYNC in `flags`. */
static inline ep_status test_settle(ep_comm *comm, ep_status status, ep_stream stream, uint32_t flags)
{
    return status == EP_OK && !(flags & TEST_ASYNC) && !test_is_capturing(stream) ? ep_stream_sync(comm, stream)
                                                                                  : status;
}

/* --- options ---------------------------------------------------------------------------------------------------- */

/* Sets *ret_number; false, after saying so, when `text` is no number in least..most. */
bool option_number(const char *option, const char *text, long long least, long long most, long long *ret_number);

struct options {
    int ranks;
    int rounds; /* 0: the program has no --rounds */
    uint64_t seed;
    const char *only; /* NULL: all scenarios */
    bool found;       /* it is one of them */
};

/*
 * --ranks N (from `least` on), --rounds N, --seed N, --only SCENARIO, --slow N for group_slow; values before the call
 * are the defaults. false after a usage error: the program ends with 2.
 */
bool options_read(int argc, char **argv, int least, struct options *options);

/* Is this scenario to be run? */
bool options_want(struct options *options, const char *scenario);

/* The exit code of a program whose scenarios gave `code`: 2 when the one that was asked for is none of them. */
int options_code(const struct options *options, int code);

/* --- ranks ------------------------------------------------------------------------------------------------------ */

struct launch {
    const char *name; /* of the program and the scenario, for what is said */
    int ranks, seconds;
    bool threads;
    int victim; /* rank that is killed by SIGKILL; -1: none */
    ep_rank_fn run;
    void *argument;
};

/*
 * Runs all ranks, none longer than `seconds`, and makes sure that none is left. 0, 1 after saying who failed and how,
 * or SKIPPED when no rank could do anything here. Ranks that are processes come before those that are threads.
 */
int launch_ranks(const struct launch *launch);

/*
 * If the scenario that `launch` names is wanted: its ranks, with a meeting place of its own for their second
 * communicator, and a line with the verdict. What launch_ranks() returns, or SKIPPED.
 */
int launch_scenario(struct options *options, const char *program, const struct launch *launch, ep_boot_shm **second);

/* Of two parts of a program: a failure wins, and SKIPPED is left only when neither ran. */
int worse_of(int a, int b);

/* "passed", "FAILED" or why it was skipped. */
const char *verdict_of(int code);

/*
 * One GPU for each rank: that of its number among the `n` that can be seen. In the rank's process, before its first
 * call of CUDA; the GPUs are counted, by a process of its own, before the ranks start. 0, or FAILED after saying why.
 */
int count_gpus_apart(int *ret_n);
int see_one_gpu(int rank, int n);

/* How the communicators of group_open() are divided; all zero: one node. Before the ranks start. */
struct division {
    int nodes;
    const char *network; /* NULL: emulated */
    int partial_type;
    bool bad; /* the emulated network delays, splits and reorders, and has little room */
};
extern struct division group_division;

/* Deadlines of groups, of what is awaited and of launches are so many times as long: for many ranks on a GPU. 1. */
extern int group_slow;

/* Says so in a configuration. */
void group_divide(const ep_boot *boot, ep_comm_config *config);

/* What a rank's program returns: 0, FAILED, SKIPPED. */
struct group {
    ep_comm *host, *cuda; /* the host backend says what the CUDA backend must give. host: NULL where nobody asks it */
    int rank, nranks, device;
    cudaStream_t stream; /* of the caller; not that of `cuda` unless somebody sets it */
};

/*
 * A communicator of the CUDA backend over `boot`, and one of the host backend, whose deadline is longer, over `second`
 * unless that is NULL. 0, FAILED, or SKIPPED where there is no GPU. The group is to be closed in each case.
 */
int group_open(const ep_boot *boot, ep_boot_shm *second, int timeout_ms, struct group *ret_group);

/* After a failure (code not 0) the peers are told. */
void group_close(struct group *group, int code);

/* A scenario that all ranks of a group run. */
struct scenario_run {
    const char *program, *name;
    int timeout_ms, seconds; /* of the group; of all ranks */
    size_t shared_bytes;     /* 0: none */
    /* On each rank, between group_open() and group_close(): 0, DIFFERS or FAILED of call.h. */
    int (*run)(const struct scenario_run *run, const struct group *group);
    const void *scenario; /* the program's own description of it */
    /* By run_group_scenario(): what the ranks share, [shared_bytes] and zeroed; of the options. */
    void *shared;
    uint64_t seed;
    int rounds;
};

/* If it is wanted. What launch_ranks() returns, or SKIPPED. */
int run_group_scenario(struct options *options, struct scenario_run run);

/*
 * All of a program's, `n` descriptions of so many bytes, each of which begins with a name: `run` but for what differs.
 * Returns the exit code of the program.
 */
int run_group_scenarios(struct options *options, struct scenario_run run, const void *scenarios, size_t n,
                        size_t bytes);

/* The ranks have come; by the host backend. */
int group_meet(const struct group *group);

/* The worst of what the ranks have, on all of them; by the host backend. */
int group_worst(const struct group *group, int code, int *ret_worst);

/* A call that must fail, with `says` (NULL: anything) in the text. 0, or FAILED after saying what came instead. */
int expect_status(const char *call, ep_status got, ep_status expected, const char *says);
/* The same, with the rank named. */
int expect_culprit(const char *call, ep_status got, ep_status expected, int rank);

/* Does an error text name the rank? */
bool names_rank(const char *text, int rank);

/* --- time and words between processes --------------------------------------------------------------------------- */

uint64_t next_random(uint64_t *state);
double now_ms(void);
void sleep_ms(int ms);

/* Zeroed memory that the ranks share when it is made before they start; NULL after saying so. */
void *share(size_t bytes);

/* Until *word is at least `value`, for at most `ms`: 0, or FAILED after saying what was waited for. */
int await(const _Atomic int *word, int value, int ms, const char *what);

/* A stream that stands still until it is released, or for `ms`. Where `ended` is seen it goes on. */
struct hold {
    const _Atomic int *word; /* released when it is not 0; NULL: only by time */
    int ms, after_ms;        /* at most; from the release on */
    _Atomic int ended;
};

int hold_stream(cudaStream_t stream, struct hold *hold);

/* --- graphs ----------------------------------------------------------------------------------------------------- */

int capture_begin(const struct group *group);
int capture_end(const struct group *group, cudaGraphExec_t *ret_exec);

#endif
