/* SPDX-License-Identifier: Apache-2.0 */
/*
 * epkit/status.h - one status type, from one table.
 *
 * Every call that can fail returns an ep_status; what its ret_ arguments point to is written on EP_OK alone. The
 * library never prints, exits, aborts or throws. The reason behind a status (which argument, which rank, which phase,
 * the errno or driver text) is kept as text: see ep_last_error() here and ep_comm_last_error() in comm.h.
 */
#ifndef EPKIT_STATUS_H
#define EPKIT_STATUS_H

#include <epkit/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * X(NAME, number, text, hint). The hundreds say who must act:
 * 1xx the caller, 2xx the machine or device, 3xx a peer, 4xx the group.
 */
#define EP_STATUS_TABLE(X)                                                                                             \
    X(EP_OK, 0, "success", "")                                                                                         \
    X(EP_E_ARG, 101, "invalid argument", "correct the argument that the error text names")                             \
    X(EP_E_ABI, 102, "argument struct of an unknown size",                                                             \
      "set .size with the EP_*_INIT macro; rebuild if header and library differ")                                      \
    X(EP_E_ROUTING, 103, "invalid routing", "every top-k entry must be -1 or a distinct expert below E")               \
    X(EP_E_ALIGN, 104, "misaligned pointer or size", "align the buffer to 16 bytes and rows to a multiple of 16")      \
    X(EP_E_OVERFLOW, 105, "size overflows", "use fewer tokens, ranks or a smaller hidden size")                        \
    X(EP_E_CAPACITY, 106, "output too small", "allocate at least the rows that ep_plan_get_info() reports")            \
    X(EP_E_STATE, 107, "call not allowed in this state", "see the contract of the call in its header")                 \
    X(EP_E_FORMAT, 108, "malformed input", "the error text names the file and the offending field")                    \
    X(EP_E_VALUE, 109, "not-a-number in the input", "find the source of the NaN, or turn value checks off")            \
    X(EP_E_MEMORY, 201, "out of memory",                                                                               \
      "free memory, raise the limit that the error text names, or use smaller buffers")                                \
    X(EP_E_SYSTEM, 202, "system call failed", "the error text holds the call and its errno")                           \
    X(EP_E_UNSUPPORTED, 203, "not supported here", "the error text says what is missing on this machine")              \
    X(EP_E_DEVICE, 204, "device error", "the error text holds the driver's message")                                   \
    X(EP_E_TIMEOUT, 301, "a peer did not answer within the deadline",                                                  \
      "look at the named rank: stopped, overloaded, or in another call; then ep_comm_shrink()")                        \
    X(EP_E_PEER_DEAD, 302, "a peer died", "look at the named rank's log; go on without it with ep_comm_shrink()")      \
    X(EP_E_PEER_LEFT, 303, "a peer left the group",                                                                    \
      "the named rank lives, but has freed its communicator or what this call needs of it")                            \
    X(EP_E_MISMATCH, 401, "ranks disagree",                                                                            \
      "give the named field the same value on every rank; if it is damaged, look at what the named rank does")         \
    X(EP_E_ABORTED, 402, "the group was aborted", "ep_comm_abort() was called by the named rank")                      \
    X(EP_E_EXCLUDED, 403, "this rank was excluded from the group", "the others went on without it; start it anew")

typedef enum ep_status {
#define EP_STATUS_ENUM(name, number, text, hint) name = number,
    EP_STATUS_TABLE(EP_STATUS_ENUM)
#undef EP_STATUS_ENUM
} ep_status;

/* "EP_E_TIMEOUT", "a peer did not ...", "look at ...". Static strings; never NULL, also for unknown numbers. */
EP_API const char *ep_status_name(ep_status status);
EP_API const char *ep_status_text(ep_status status);
EP_API const char *ep_status_hint(ep_status status);

/*
 * The reason of the last failed epkit call of the calling thread: "what: where: why". Never NULL, "" if none failed.
 * Valid until the thread's next failing call. Any thread.
 */
EP_API const char *ep_last_error(void);

/* For a callback of the caller's that fails, as that of an ep_boot: sets the reason of the calling thread. Any thread.
 */
EP_API void ep_set_last_error(const char *reason);

/*
 * What the library reports beyond the status of a call: a communicator that opens or fails, a rank that is masked,
 * a group that shrinks. One line without its end. Called on the thread where it happens, which may be one of the
 * library's, and on several at a time; it may call nothing of the library. NULL, the initial value: no log.
 * For all of the process; returns when no call of the former function is under way.
 */
typedef enum ep_log_level { EP_LOG_INFO = 1, EP_LOG_WARNING = 2, EP_LOG_ERROR = 3 } ep_log_level;
typedef void (*ep_log_fn)(void *context, ep_log_level level, const char *line);
EP_API void ep_set_log(ep_log_fn function, void *context);

#ifdef __cplusplus
}
#endif

#endif
