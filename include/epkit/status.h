/* SPDX-License-Identifier: Apache-2.0 */
/*
 * epkit/status.h - one status type, from one table.
 *
 * Every call that can fail returns an ep_status. It writes what its ret_ arguments point to only if it returns EP_OK.
 * The library never prints, exits, aborts or throws. The reason of a failure (argument, rank, phase, errno or driver
 * text) is kept as text: see ep_last_error() here and ep_comm_last_error() in comm.h.
 */
#ifndef EPKIT_STATUS_H
#define EPKIT_STATUS_H

#include <epkit/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * X(NAME, number, text, hint). The hundreds digit says where to act:
 * 1xx the caller, 2xx the machine or device, 3xx a peer, 4xx the group.
 */
#define EP_STATUS_TABLE(X)                                                                                             \
    X(EP_OK, 0, "success", "")                                                                                         \
    X(EP_E_ARG, 101, "invalid argument", "correct the argument that the error text names")                             \
    X(EP_E_ABI, 102, "argument struct of an unknown size",                                                             \
      "set .size with the EP_*_INIT macro; rebuild if header and library differ")                                      \
    X(EP_E_ROUTING, 103, "invalid routing", "every top-k entry must be -1 or an expert below E")                       \
    X(EP_E_ALIGN, 104, "misaligned pointer or size", "align the buffer to 16 bytes and rows to a multiple of 16")      \
    X(EP_E_OVERFLOW, 105, "size overflows", "use fewer tokens, ranks or a smaller hidden size")                        \
    X(EP_E_CAPACITY, 106, "output too small", "allocate at least the rows that ep_plan_get_info() reports")            \
    X(EP_E_STATE, 107, "call not allowed in this state", "see the documentation of the call")                          \
    X(EP_E_FORMAT, 108, "malformed input", "the error text names the file and the offending field")                    \
    X(EP_E_VALUE, 109, "not-a-number in the input", "find the source of the NaN, or turn value checks off")            \
    X(EP_E_MEMORY, 201, "out of memory",                                                                               \
      "free memory, raise the limit that the error text names, or use smaller buffers")                                \
    X(EP_E_SYSTEM, 202, "system call failed", "the error text names the call and its errno")                           \
    X(EP_E_UNSUPPORTED, 203, "not supported here", "the error text says what is missing on this machine")              \
    X(EP_E_DEVICE, 204, "device error", "the error text has the driver's message")                                     \
    X(EP_E_TIMEOUT, 301, "a peer did not answer within the deadline",                                                  \
      "check whether the named rank is stopped, overloaded or in another call; then go on without it "                 \
      "(ep_comm_regroup)")                                                                                             \
    X(EP_E_PEER_DEAD, 302, "a peer died or cannot be reached",                                                         \
      "check the log of the named rank; go on without it (ep_comm_regroup)")                                           \
    X(EP_E_PEER_LEFT, 303, "a peer left the group",                                                                    \
      "the named rank has freed its communicator, as the end of a Python program does, or an object that this call "   \
      "needs: check its log")                                                                                          \
    X(EP_E_MISMATCH, 401, "ranks disagree",                                                                            \
      "give the named field the same value on every rank; if data is damaged, check the named rank")                   \
    X(EP_E_ABORTED, 402, "the group was aborted", "the named rank called ep_comm_abort()")                             \
    X(EP_E_EXCLUDED, 403, "this rank was excluded from the group", "the others continue without it; restart it")

typedef enum ep_status {
#define EP_STATUS_ENUM(name, number, text, hint) name = number,
    EP_STATUS_TABLE(EP_STATUS_ENUM)
#undef EP_STATUS_ENUM
} ep_status;

/* "EP_E_TIMEOUT", "a peer did not ...", "check ...". Static strings; never NULL, also for unknown numbers. */
EP_API const char *ep_status_name(ep_status status);
EP_API const char *ep_status_text(ep_status status);
EP_API const char *ep_status_hint(ep_status status);

/*
 * The reason of the last failed epkit call of the calling thread: "what: where: why". Never NULL; "" if none failed.
 * Valid until the next call that fails on this thread. Any thread.
 */
EP_API const char *ep_last_error(void);

/* Sets the reason of the calling thread, for a callback that fails (such as that of an ep_boot). Any thread. */
EP_API void ep_set_last_error(const char *reason);

/*
 * Sets the log callback of the process; NULL, the initial value, disables logging. Returns when no call of the previous
 * callback is in progress.
 *
 * The callback gets events that no status reports: a communicator is created or fails, a rank is masked. `line` is one
 * line without a newline. The callback runs on the thread of the event, which may be a library thread, and may run on
 * several threads at the same time. It must not call the library.
 */
typedef enum ep_log_level { EP_LOG_INFO = 1, EP_LOG_WARNING = 2, EP_LOG_ERROR = 3 } ep_log_level;
typedef void (*ep_log_fn)(void *context, ep_log_level level, const char *line);
EP_API void ep_set_log(ep_log_fn function, void *context);

#ifdef __cplusplus
}
#endif

#endif
