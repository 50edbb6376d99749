/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A program closes all descriptors, also those of the library, and opens files, pipes and sockets that get their
 * numbers: the library neither reads, writes nor closes them. Ranks are processes.
 */
#include <epkit/epkit.h>
#include <fcntl.h>
#include <stdalign.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ranks.h"
#include "sandbox.h"

enum { FIRST = 3, NUMBERS = 120, TIMEOUT_MS = 10000, HEARTBEATS_MS = 2500, TEXT_BYTES = 11, TOKENS = 4, HIDDEN = 512 };

static const char text[TEXT_BYTES] = "not epkit's";

struct scenario {
    int ranks_per_node;
    bool calls; /* after that, with files alone */
};

/* Opens a memfd, a pipe or a socket with that number; false: the lowest free one is another. */
static bool open_at(int number, int kind, int ret_ends[2])
{
    ret_ends[1] = -1;
    if (kind == 0)
        ret_ends[0] = memfd_create("of the program", 0);
    else if ((kind == 1 ? pipe(ret_ends) : socketpair(AF_UNIX, SOCK_STREAM, 0, ret_ends)) != 0)
        return false;
    if (ret_ends[0] == number)
        return true;
    close(ret_ends[0]);
    if (ret_ends[1] >= 0)
        close(ret_ends[1]);
    return false;
}

/* A number has its other end far away, and the text in it. */
static int take_number(int number, int kind, int *ret_far)
{
    int ends[2];

    /* A thread of the library that has just accepted a peer has the number for a moment. */
    for (int wait_ms = 0; !open_at(number, kind, ends); wait_ms++) {
        if (wait_ms == TIMEOUT_MS)
            return -1;
        unit_sleep_ms(1);
    }
    *ret_far = ends[1] < 0 ? -1 : fcntl(ends[1], F_DUPFD, FIRST + NUMBERS + 100);
    if (ends[1] >= 0)
        close(ends[1]);
    if (write(ends[1] < 0 ? ends[0] : *ret_far, text, TEXT_BYTES) != TEXT_BYTES)
        return -1;
    return 0;
}

/* Is it open, with the text and nothing else in it? */
static bool is_untouched(int number, int far)
{
    char got[2 * TEXT_BYTES] = "";
    struct stat info;

    if (far < 0)
        return fstat(number, &info) == 0 && info.st_size == TEXT_BYTES && lseek(number, 0, SEEK_CUR) == TEXT_BYTES &&
               pread(number, got, sizeof(got), 0) == TEXT_BYTES && memcmp(got, text, TEXT_BYTES) == 0;
    return read(number, got, sizeof(got)) == TEXT_BYTES && memcmp(got, text, TEXT_BYTES) == 0 &&
           (number % 3 == 1 || recv(far, got, 1, MSG_DONTWAIT) < 0);
}

/* A low-latency round, whose memory is taken from the kernel when rows come. */
static ep_status round_trip(ep_ll *ll)
{
    static const int32_t index[TOKENS] = {0, 1, 0, 1};
    static const float weights[TOKENS] = {1, 1, 1, 1};
    static alignas(64) uint16_t x[TOKENS * HIDDEN], recv[2 * TOKENS * HIDDEN], out[TOKENS * HIDDEN];
    int32_t count[1], source[2 * TOKENS];
    ep_ll_dispatch_args dispatch = args_ll_dispatch(x, index, EP_I32, TOKENS);
    ep_ll_combine_args combine = args_ll_combine(recv, index, EP_I32, TOKENS, weights, out);
    ep_status status;

    dispatch.out_dtype = EP_BF16;
    dispatch.recv_x = recv;
    dispatch.recv_count = count;
    dispatch.recv_source = source;
    status = ep_ll_dispatch_sync(ll, &dispatch);
    return status == EP_OK ? ep_ll_combine_sync(ll, &combine) : status;
}

static int close_all(const ep_boot *boot, void *argument)
{
    const struct scenario *scenario = argument;
    const ep_ll_config config = args_ll(TOKENS, HIDDEN, 2, 1);
    int far[FIRST + NUMBERS];
    ep_comm *comm = NULL;
    ep_ll *ll = NULL;

    SURE(unit_comm_new(boot, scenario->ranks_per_node == 1 ? "tcp" : NULL, scenario->ranks_per_node, TIMEOUT_MS,
                       &comm) == EP_OK);
    SURE(ep_ll_new(comm, &config, &ll) == EP_OK);
    SURE(ep_comm_barrier(comm) == EP_OK);
    if (boot->rank == 0) {
        if (scenario->calls)
            (void)round_trip(ll);
        unit_sleep_ms(HEARTBEATS_MS);
        (void)ep_comm_regroup(comm, boot);
        ep_ll_free(ll);
        ep_comm_free(comm);
        return 0;
    }
    for (int number = FIRST; number < FIRST + NUMBERS; number++)
        close(number);
    for (int number = FIRST; number < FIRST + NUMBERS; number++)
        SURE(take_number(number, scenario->calls ? 0 : number % 3, &far[number]) == 0);
    if (scenario->calls)
        SURE(round_trip(ll) == EP_E_STATE && strstr(ep_last_error(), "the program has closed"));
    ep_comm_abort(comm); /* wakes the library's thread */
    unit_sleep_ms(HEARTBEATS_MS);
    (void)ep_comm_async_error(comm);
    (void)ep_comm_regroup(comm, boot);
    ep_ll_free(ll);
    ep_comm_free(comm);
    for (int number = FIRST; number < FIRST + NUMBERS; number++)
        if (!is_untouched(number, far[number])) {
            fprintf(stderr, "descriptor %d was used\n", number);
            return 1;
        }
    return 0;
}

TEST_CALL(files_of_the_program_between_nodes,
          unit_run_ranks(EP_LAUNCH_FORK, 2, close_all, &(struct scenario){.ranks_per_node = 1}))
TEST_CALL(files_of_the_program_on_a_node,
          unit_run_ranks(EP_LAUNCH_FORK, 2, close_all, &(struct scenario){.ranks_per_node = 2}))
TEST_CALL(files_of_the_program_and_memory_that_is_taken_later,
          unit_run_ranks(EP_LAUNCH_FORK, 2, close_all, &(struct scenario){.ranks_per_node = 2, .calls = true}))
