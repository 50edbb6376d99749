/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check.h - argument checks of the public calls. Each error text names the call and the argument.
 */
#ifndef EP_CORE_CHECK_H
#define EP_CORE_CHECK_H

#include "base/process.h"
#include "core/core.h"

#define EP_ROW_ALIGN 16

/* Returns EP_E_ARG from the enclosing public call if `pointer` is NULL. */
#define EP_CHECK_HANDLE(pointer)                                                                                       \
    do {                                                                                                               \
        if (!(pointer))                                                                                                \
            return ep_fail(EP_E_ARG, "%s: %s is NULL", __func__, #pointer);                                            \
    } while (0)

/*
 * As EP_CHECK_HANDLE(handle), and returns EP_E_STATE in a forked child of the process that created `comm`: other
 * threads of that process may have held locks at the fork, so the child must not access it.
 */
#define EP_CHECK_OWN(handle, comm)                                                                                     \
    do {                                                                                                               \
        EP_CHECK_HANDLE(handle);                                                                                       \
        if (!ep_comm_is_own(comm))                                                                                     \
            return ep_comm_fail_forked(__func__);                                                                      \
    } while (0)

/*
 * As EP_CHECK_OWN(), and returns EP_E_STATE in a function of ep_stream_call(): the work that the call would queue or
 * wait for runs after that function.
 */
#define EP_CHECK_COMM(handle, comm)                                                                                    \
    do {                                                                                                               \
        EP_CHECK_OWN(handle, comm);                                                                                    \
        if (ep_comm_calling == (comm))                                                                                 \
            return ep_fail(EP_E_STATE, "%s: called in a function of ep_stream_call()", __func__);                      \
    } while (0)

/* Records `status` in the communicator and returns it from the enclosing public call, unless it is EP_OK. */
#define EP_TRY_ON(comm, status)                                                                                        \
    do {                                                                                                               \
        ep_status try_status_ = (status);                                                                              \
        if (try_status_ != EP_OK)                                                                                      \
            return ep_comm_record((comm), try_status_);                                                                \
    } while (0)

/* As EP_CHECK_COMM(), and also returns the status of a failed communicator. For the start of collective calls. */
#define EP_CHECK_USABLE(handle, comm)                                                                                  \
    do {                                                                                                               \
        EP_CHECK_COMM(handle, comm);                                                                                   \
        EP_TRY_ON(comm, ep_comm_usable((comm), __func__));                                                             \
    } while (0)

/* As EP_CHECK_USABLE(), for a plan or low-latency object: it must be of the members of now. */
#define EP_CHECK_CURRENT(object)                                                                                       \
    do {                                                                                                               \
        EP_CHECK_USABLE(object, (object)->comm);                                                                       \
        EP_CHECK_GENERATION(object);                                                                                   \
    } while (0)
/* That alone, after a check of the communicator. */
#define EP_CHECK_GENERATION(object)                                                                                    \
    do {                                                                                                               \
        if ((object)->generation != (object)->comm->generation)                                                        \
            return ep_comm_record(                                                                                     \
                (object)->comm,                                                                                        \
                ep_fail(EP_E_STATE,                                                                                    \
                        "%s: the members have changed since it was made: free it, and make a new one (or, of fixed "   \
                        "capacity, ep_plan_update() outside of captures; of low latency, ep_ll_renew())",              \
                        __func__));                                                                                    \
    } while (0)

/* For other pointers: a status, which the caller can record in the communicator. */
#define EP_CHECK_PTR(call, pointer) ((pointer) ? EP_OK : ep_fail(EP_E_ARG, "%s: %s is NULL", (call), #pointer))

#define EP_CHECK_LOAD(call, ret_args, args, type)                                                                      \
    ep_args_load((ret_args), sizeof(type), EP_ARGS_FIRST_BYTES(type), (args), call ": " #args)

#define EP_CHECK_STORE(call, ret_args, ours, type)                                                                     \
    ep_args_store((ret_args), (ours), sizeof(type), EP_ARGS_FIRST_BYTES(type), call ": " #ret_args)

/* Calls an operation of the backend of `comm`. */
#define EP_BACKEND_CALL(comm, op, ...)                                                                                 \
    ((comm)->ops->op ? (comm)->ops->op(__VA_ARGS__)                                                                    \
                     : ep_fail(EP_E_UNSUPPORTED, "%s: backend %s does not provide it", __func__, (comm)->ops->name))

/* A _sync form: the call in the stream NULL, then ep_stream_sync(). */
#define EP_SYNC(comm, call)                                                                                            \
    do {                                                                                                               \
        ep_status sync_status_;                                                                                        \
        (comm)->blocking = true;                                                                                       \
        sync_status_ = (call);                                                                                         \
        (comm)->blocking = false;                                                                                      \
        return sync_status_ == EP_OK ? ep_stream_sync((comm), NULL) : sync_status_;                                    \
    } while (0)

/* May this thread free an object of `comm`? Not in a forked child, nor where it would wait for itself. */
static inline bool ep_comm_may_free(const ep_comm *comm)
{
    return comm->process == ep_process_generation() && ep_comm_calling != comm;
}

/* Created by this process, not by a parent that it was forked from? Async-signal-safe. */
static inline bool ep_comm_is_own(const ep_comm *comm)
{
    return comm->process == ep_process_generation();
}

ep_status ep_comm_fail_forked(const char *call);

/* EP_OK, or the status with which the communicator has failed. */
ep_status ep_comm_usable(ep_comm *comm, const char *call);

ep_status ep_check_range(const char *call, const char *name, int64_t value, int64_t least, int64_t most);
ep_status ep_check_flags(const char *call, uint32_t flags, uint32_t known);
/* A reserved field must be 0: a later release may give it a meaning. */
ep_status ep_check_reserved(const char *call, uint32_t reserved);
ep_status ep_check_idx_type(const char *call, int idx_type);

/* n_experts in range and a multiple of the ranks. */
ep_status ep_check_experts(const char *call, const ep_comm *comm, int n_experts);

/* Not NULL unless `empty`, and aligned. */
ep_status ep_check_buffer(const char *call, const char *name, const void *buffer, bool empty, size_t align);

/* a * b * c fits int64 (all are >= 0); *ret_product may be NULL. */
ep_status ep_check_product(const char *call, const char *name, int64_t a, int64_t b, int64_t c, int64_t *ret_product);

/*
 * Strides, in elements, of an output of `rows` rows of `words` elements: positive, no two elements have the same
 * address, and the last element is below `room` (0: its offset in bytes fits int64).
 */
ep_status ep_check_out_strides(const char *call, int64_t token, int64_t block, int64_t rows, int64_t words,
                               int64_t room);

/* One buffer of a call. Sizes from ep_check_product(); NULL or 0 bytes: absent. */
struct ep_buffer {
    const char *name;
    const void *at;
    int64_t bytes;
    size_t align;  /* for ep_check_buffers(); 0: checked before */
    bool required; /* not NULL; with `align` */
};

/*
 * No output has a byte in common with an input or with another output. Inputs may overlap each other. The first
 * `n_outputs` of the `n` buffers are outputs; EP_E_ARG names the two fields, the output first.
 */
ep_status ep_check_no_overlap(const char *call, const struct ep_buffer *buffers, int n_outputs, int n);
/* ep_check_buffers() calls ep_check_buffer() for each buffer with `align`, then ep_check_no_overlap(). */
ep_status ep_check_buffers(const char *call, const struct ep_buffer *buffers, int n_outputs, int n);

#endif
