/* SPDX-License-Identifier: Apache-2.0 */
/* lowlatency.c - the type LowLatency: dispatch and combine for decoding. */
#include "bind.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

PyTypeObject *ll_type;

/* The second half of a call with EP_LL_RECV_HOOK, until it has been received. */
struct half {
    PyObject
        *tensors;  /* tuple of what the call was given, which the library still reads and writes; NULL: none is open */
    uint64_t id;   /* argument of finish() */
    uint64_t call; /* the dispatch, or the one that the combine answers */
    uint64_t combine; /* number of the combine, 0: a dispatch */
    void *stream;
};

struct ll_object {
    struct member member;
    ep_ll *ll;     /* NULL: freed */
    bool exported; /* a tensor showed its buffer: the communicator frees it */
    int max_tokens, hidden, n_experts, n_local, topk;
    uint64_t last_call; /* of a dispatch */
    struct {
        uint64_t call;
        int64_t max_tokens;
    } dispatched[2]; /* those that a combine may still answer, by call % 2 */
    uint64_t combines, halves;
    struct half open[2]; /* by call % 2, as the library has them */
    char refusal[512];   /* of a receive for the call under way; "": none */
};

/* Memory of an ep_ll that became a tensor lives as long as the tensor: it goes with the communicator then. */
static void ll_close(struct member *member, struct comm_box *box)
{
    struct ll_object *ll = (struct ll_object *)member;
    ep_ll *freed = ll->ll;
    ep_ll **kept = NULL;

    if (!freed)
        return;
    ll->ll = NULL; /* before another thread asks */
    if (ll->exported)
        kept = realloc(box->kept, (size_t)(box->n_kept + 1) * sizeof(*kept));
    if (kept) {
        box->kept = kept;
        box->kept[box->n_kept++] = freed;
    } else if (!ll->exported) {
        Py_BEGIN_ALLOW_THREADS;
        ep_ll_free(freed);
        Py_END_ALLOW_THREADS;
    } /* else: no memory for a pointer. It stays until the process ends, which is better than a dangling tensor */
    for (int i = 0; i < 2; i++)
        Py_CLEAR(ll->open[i].tensors);
}

/* Comm.low_latency(max_tokens, hidden, n_experts, topk, flags) */
PyObject *ll_new(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    struct comm_object *comm = (struct comm_object *)self;
    static const char *const names[] = {"max_tokens", "hidden", "num_experts", "topk", "flags"};
    ep_ll_config config = EP_LL_CONFIG_INIT;
    struct ll_object *ll;
    int64_t values[5];
    ep_status status;
    bool ok = true;

    if (!want_args("low_latency", nargs, 5))
        return NULL;
    for (int i = 0; i < 5 && ok; i++) {
        values[i] = want_int(args[i], "low_latency", names[i], &ok);
        if (ok && (values[i] < 0 || values[i] > INT32_MAX))
            return raise_arg("low_latency: %s is %lld", names[i], (long long)values[i]);
    }
    if (!ok || !call_begin(comm, "low_latency"))
        return NULL;
    /* Before the call, which peers take part in. */
    ll = (struct ll_object *)((allocfunc)PyType_GetSlot(ll_type, Py_tp_alloc))(ll_type, 0);
    if (!ll) {
        call_done(comm);
        return NULL;
    }
    config.max_tokens = (int32_t)values[0];
    config.hidden = (int32_t)values[1];
    config.n_experts = (int32_t)values[2];
    config.topk = (int32_t)values[3];
    config.flags = (uint32_t)values[4];
    Py_BEGIN_ALLOW_THREADS;
    status = ep_ll_new(comm->box->comm, &config, &ll->ll);
    Py_END_ALLOW_THREADS;
    call_done(comm);
    if (status != EP_OK) {
        raise_status(status);
        Py_DECREF((PyObject *)ll);
        return NULL;
    }
    ll->max_tokens = config.max_tokens;
    ll->hidden = config.hidden;
    ll->n_experts = config.n_experts;
    ll->n_local = config.n_experts / comm->nranks;
    ll->topk = config.topk;
    ll->member.close = ll_close;
    ll->member.noun = "low-latency object";
    member_add(comm, &ll->member);
    return (PyObject *)ll;
}

/* The columns of topk_idx: K of the call. */
static bool has_topk(const struct ll_object *ll, const char *call, const struct tensor *topk_idx)
{
    if (topk_idx->shape[1] >= 1 && topk_idx->shape[1] <= ll->topk)
        return true;
    raise_arg("%s: topk_idx has %lld columns, must have 1 to %d", call, (long long)topk_idx->shape[1], ll->topk);
    return false;
}

static void note_dispatch(struct ll_object *ll, uint64_t call, int64_t max_tokens)
{
    ll->last_call = call;
    ll->dispatched[call % 2].call = call;
    ll->dispatched[call % 2].max_tokens = max_tokens;
}

/* The library takes x of a combine to have as many rows as the dispatch gave, and asks for no number. */
static bool answers_size(const struct ll_object *ll, uint64_t call, int64_t max_tokens)
{
    const uint64_t number = call ? call : ll->last_call;
    const int64_t had = ll->dispatched[number % 2].max_tokens;

    if (!number || ll->dispatched[number % 2].call != number || had == max_tokens)
        return true;
    raise_arg("low_latency_combine: max_tokens is %lld, but its dispatch had %lld", (long long)max_tokens,
              (long long)had);
    return false;
}

/*
 * --- second halves ---
 *
 * The library refuses a call that needs the place of one that is half done. A program that has lost the hook could
 * never make room, so such a call receives first. What the program does with the hook later finds nothing left to do.
 */

static bool is_refused(ep_status status)
{
    return (int)status / 100 == 1;
}

/* In the stream of the first half. One that is refused stays open. */
static ep_status receive(struct ll_object *ll, struct half *half)
{
    bool cuda = ll->member.comm->cuda;
    ep_status status;

    Py_BEGIN_ALLOW_THREADS;
    status = cuda ? ep_ll_finish(ll->ll, half->call, half->stream) : ep_ll_finish_sync(ll->ll, half->call);
    Py_END_ALLOW_THREADS;
    /* What failed is said again by a second try: the rows are not there. */
    if (status == EP_OK)
        Py_CLEAR(half->tensors);
    return status;
}

/*
 * For a call that needs the place. A refusal is not this call's: the library says what it thinks of the call itself.
 * Why there is no room is in `refusal`, for fail_after().
 */
static ep_status receive_before(struct ll_object *ll, struct half *half)
{
    ep_status status = receive(ll, half);

    if (!is_refused(status))
        return status;
    snprintf(ll->refusal, sizeof(ll->refusal), "%s", ep_last_error());
    return EP_OK;
}

/* The exception of a call that may have made room first: the library asks for a receive that this call has tried. */
static PyObject *fail_after(struct ll_object *ll, ep_status status)
{
    if (status != EP_E_STATE || !ll->refusal[0])
        return raise_status(status);
    return raise_state("%s. This call has tried to, and was refused: %s", ep_last_error(), ll->refusal);
}

/* Before a dispatch: the one before the last must have been received, or the combine that answers it. */
static ep_status make_room_for_dispatch(struct ll_object *ll)
{
    struct half *half = &ll->open[(ll->last_call + 1) % 2];

    return half->tensors ? receive_before(ll, half) : EP_OK;
}

/* Before a combine: an open one that answers the same dispatch, or that is the one before the last. */
static ep_status make_room_for_combine(struct ll_object *ll, uint64_t call)
{
    ep_status status = EP_OK;

    for (uint64_t i = 0; i < 2 && status == EP_OK; i++) {
        struct half *half = &ll->open[i];

        if (half->tensors && half->combine && (half->call == call || half->combine + 2 <= ll->combines + 1))
            status = receive_before(ll, half);
    }
    return status;
}

/* All arguments of a call, kept until it has been received. Before the call: there may be no memory for it. */
static PyObject *keep(PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *tuple = PyTuple_New(nargs);

    for (Py_ssize_t i = 0; tuple && i < nargs; i++) {
        Py_INCREF(args[i]);
        PyTuple_SetItem(tuple, i, args[i]);
    }
    return tuple;
}

/* Consumes `tensors`. Returns the argument of finish(). */
static uint64_t open_half(struct ll_object *ll, uint64_t call, uint64_t combine, void *stream, PyObject *tensors)
{
    struct half *half = &ll->open[call % 2];
    PyObject *before = half->tensors;

    *half = (struct half){.tensors = tensors, .id = ++ll->halves, .call = call, .combine = combine, .stream = stream};
    Py_XDECREF(before);
    return half->id;
}

/* One tensor of a call: reads it as `want` says. */
static bool get(struct ll_object *ll, PyObject *object, const struct want want, struct tensor *ret_tensor)
{
    return tensor_get(object, &want, place_of(ll->member.comm), ret_tensor);
}

/* Those of nvfp4 and mxfp8: bytes, of whole tiles with EP_LL_SWIZZLED_SCALES. */
static bool get_byte_scales(struct ll_object *ll, PyObject *object, int64_t rows, ep_ll_dispatch_args *args)
{
    int64_t each = args->flags & EP_LL_SWIZZLED_SCALES ? (rows + 127) / 128 * 128 : rows;
    int64_t bytes = ll->n_local * each * (ll->hidden / (args->out_dtype == EP_F4E2M1 ? 16 : 32));
    struct tensor scales;

    if (!get(ll, object, (struct want){"low_latency_dispatch", "recv_scales", IS(U8), 1, {bytes}, false, false},
             &scales))
        return false;
    args->scale_type = args->out_dtype == EP_F4E2M1 ? EP_F8E4M3 : EP_UE8M0_32;
    args->recv_scales = scales.data;
    return true;
}

/* The scales of one expert may have any strides; experts follow each other without a gap. */
static bool get_scales(struct ll_object *ll, PyObject *object, int64_t rows, bool mxfp8, ep_ll_dispatch_args *args)
{
    static const char call[] = "low_latency_dispatch";
    int64_t blocks = ll->hidden / EP_SCALE_BLOCK;
    struct tensor scales;

    if (object == Py_None && args->out_dtype == EP_BF16)
        return true;
    if (args->out_dtype == EP_F4E2M1 || mxfp8)
        return get_byte_scales(ll, object, rows, args);
    if (!get(ll, object, (struct want){call, "recv_scales", IS(F32) | IS(I32), 3, {ll->n_local, rows, -1}, true, false},
             &scales))
        return false;
    if (scales.type == TYPE_I32)
        blocks /= 4;
    if (scales.shape[2] != blocks || (ll->n_local > 1 && scales.stride[0] != rows * blocks)) {
        raise_arg("%s: recv_scales: %lld columns and a stride of %lld between experts, must be %lld and %lld", call,
                  (long long)scales.shape[2], (long long)scales.stride[0], (long long)blocks,
                  (long long)rows * (long long)blocks);
        return false;
    }
    args->scale_type = scales.type == TYPE_I32 ? EP_UE8M0 : EP_F32;
    args->recv_scales = scales.data;
    args->recv_scale_stride_token = scales.stride[1];
    args->recv_scale_stride_block = scales.stride[2];
    return true;
}

static bool get_outputs(struct ll_object *ll, PyObject *const *args, int64_t rows, int nranks, bool mxfp8,
                        ep_ll_dispatch_args *ret_args)
{
    static const char call[] = "low_latency_dispatch";
    struct tensor tensor[6];

    if (!get(ll, args[0],
             (struct want){call, "recv_x", IS(BF16) | IS(F8) | IS(U8), 3, {ll->n_local, rows, -1}, false, false},
             &tensor[0]) ||
        !get(ll, args[2], (struct want){call, "recv_count", IS(I32), 1, {ll->n_local}, false, false}, &tensor[1]) ||
        !get(ll, args[3], (struct want){call, "recv_source", IS(I32), 2, {ll->n_local, rows}, false, true},
             &tensor[2]) ||
        !get(ll, args[4], (struct want){call, "recv_range", IS(I64), 2, {ll->n_local, nranks}, false, true},
             &tensor[3]) ||
        !get(ll, args[5], (struct want){call, "recv_stats", IS(I32), 1, {ll->n_local}, false, true}, &tensor[4]) ||
        !get(ll, args[6], (struct want){call, "wait_cost", IS(I64), 1, {nranks}, false, true}, &tensor[5]))
        return false;
    ret_args->out_dtype = tensor[0].type == TYPE_BF16 ? EP_BF16 : tensor[0].type == TYPE_U8 ? EP_F4E2M1 : EP_F8E4M3;
    if (tensor[0].shape[2] != ll->hidden / (tensor[0].type == TYPE_U8 ? 2 : 1)) {
        raise_arg("%s: recv_x has %lld columns, hidden is %d", call, (long long)tensor[0].shape[2], ll->hidden);
        return false;
    }
    ret_args->recv_x = tensor[0].data;
    ret_args->recv_count = tensor[1].data;
    ret_args->recv_source = tensor[2].data;
    ret_args->recv_range = tensor[3].data;
    ret_args->recv_stats_add = tensor[4].data;
    ret_args->wait_cost_add = tensor[5].data;
    return get_scales(ll, args[1], rows, mxfp8, ret_args);
}

/* Both calls, with the interpreter lock released. */
static ep_status call_dispatch(struct ll_object *ll, const ep_ll_dispatch_args *dispatch, void *stream)
{
    bool cuda = ll->member.comm->cuda;
    ep_status status;

    ll->refusal[0] = '\0';
    status = make_room_for_dispatch(ll);
    if (status != EP_OK)
        return status;
    Py_BEGIN_ALLOW_THREADS;
    status = cuda ? ep_ll_dispatch(ll->ll, dispatch, stream) : ep_ll_dispatch_sync(ll->ll, dispatch);
    Py_END_ALLOW_THREADS;
    return status;
}

static ep_status call_combine(struct ll_object *ll, const ep_ll_combine_args *combine, void *stream)
{
    bool cuda = ll->member.comm->cuda;
    ep_status status;

    ll->refusal[0] = '\0';
    status = make_room_for_combine(ll, combine->call ? combine->call : ll->last_call);
    if (status != EP_OK)
        return status;
    Py_BEGIN_ALLOW_THREADS;
    status = cuda ? ep_ll_combine(ll->ll, combine, stream) : ep_ll_combine_sync(ll->ll, combine);
    Py_END_ALLOW_THREADS;
    ll->combines += status == EP_OK;
    return status;
}

/*
 * dispatch(x, topk_idx, max_tokens, recv_x, recv_scales, recv_count, recv_source, recv_range, recv_stats, wait_cost,
 * flags, stream, mxfp8, global_scale) -> number of the call, and the argument of finish(), 0 without EP_LL_RECV_HOOK
 */
static PyObject *run_dispatch(PyObject *self, PyObject *const *args)
{
    static const char call[] = "low_latency_dispatch";
    struct ll_object *ll = (struct ll_object *)self;
    ep_ll_dispatch_args dispatch = EP_LL_DISPATCH_ARGS_INIT;
    struct comm_object *comm = ll->member.comm;
    PyObject *tensors = NULL;
    struct tensor x, topk_idx, global;
    uint64_t number = 0, half = 0;
    int64_t max_tokens;
    ep_status status;
    void *stream;
    bool ok = true;

    max_tokens = want_int(args[2], call, "max_tokens", &ok);
    dispatch.flags = (uint32_t)want_int(args[10], call, "flags", &ok);
    if (ok && (max_tokens < 1 || max_tokens > ll->max_tokens))
        return raise_arg("%s: max_tokens is %lld, must be 1 to %d", call, (long long)max_tokens, ll->max_tokens);
    if (!ok || !get(ll, args[0], (struct want){call, "x", IS(BF16), 2, {-1, ll->hidden}, false, false}, &x) ||
        !get(ll, args[1], (struct want){call, "topk_idx", IS(I32) | IS(I64), 2, {x.shape[0], -1}, false, false},
             &topk_idx) ||
        !has_topk(ll, call, &topk_idx) ||
        !get_outputs(ll, args + 3, max_tokens * comm->nranks, comm->nranks, args[12] == Py_True, &dispatch) ||
        !get(ll, args[13], (struct want){call, "global_scale", IS(F32), 1, {-1}, false, true}, &global))
        return NULL;
    if (args[13] != Py_None && global.shape[0] < 1)
        return raise_arg("%s: global_scale has no element", call);
    dispatch.global_scale = global.data;
    if (x.shape[0] > max_tokens)
        return raise_arg("%s: x has %lld tokens, the most is %lld", call, (long long)x.shape[0], (long long)max_tokens);
    stream = stream_of(args[11]);
    if (!ok || PyErr_Occurred())
        return NULL;
    dispatch.x = x.data;
    dispatch.topk_idx = topk_idx.data;
    dispatch.idx_type = topk_idx.type == TYPE_I32 ? EP_I32 : EP_I64;
    dispatch.n_tokens = (int32_t)x.shape[0];
    dispatch.max_tokens = (int32_t)max_tokens;
    dispatch.topk = (int32_t)topk_idx.shape[1];
    dispatch.ret_call = &number;
    if ((dispatch.flags & EP_LL_RECV_HOOK) && !(tensors = keep(args, 14)))
        return NULL;
    status = call_dispatch(ll, &dispatch, stream);
    if (status != EP_OK) {
        Py_XDECREF(tensors);
        return fail_after(ll, status);
    }
    note_dispatch(ll, number, max_tokens);
    if (tensors)
        half = open_half(ll, number, 0, stream, tensors);
    return Py_BuildValue("(KK)", (unsigned long long)number, (unsigned long long)half);
}

/* The counters of blocks of x: as many as there are blocks, or more. */
static bool get_signals(struct ll_object *ll, PyObject *const *args, int64_t rows, ep_ll_combine_args *combine)
{
    static const char call[] = "low_latency_combine";
    struct tensor signals;
    int64_t block, value, sms, blocks;
    bool ok = true;

    if (args[0] == Py_None)
        return true;
    block = want_int(args[1], call, "signal_rows", &ok);
    value = want_int(args[2], call, "signal_value", &ok);
    sms = want_int(args[3], call, "max_sms", &ok);
    if (!ok || !get(ll, args[0], (struct want){call, "signals", IS(I32), 1, {-1}, false, false}, &signals))
        return false;
    if (block < 1 || value < 0 || value > UINT32_MAX || sms < 0) {
        raise_arg("%s: signal_rows is %lld, must be 1 or more; signal_value %lld and max_sms %lld must be 0 or more",
                  call, (long long)block, (long long)value, (long long)sms);
        return false;
    }
    block = block > rows ? rows : block;
    blocks = ll->n_local * ((rows + block - 1) / block);
    if (signals.shape[0] < blocks) {
        raise_arg("%s: signals has %lld elements, must have %lld: one for each %lld of the %lld rows of %d experts",
                  call, (long long)signals.shape[0], (long long)blocks, (long long)block, (long long)rows, ll->n_local);
        return false;
    }
    combine->signals = signals.data;
    combine->signal_rows = (int32_t)block;
    combine->signal_value = (uint32_t)value;
    combine->max_sms = (int32_t)(sms < INT32_MAX ? sms : INT32_MAX);
    return true;
}

/*
 * combine(x, topk_idx, topk_weights, out, call, max_tokens, wait_cost, flags, stream, signals, signal_rows,
 * signal_value, max_sms) -> argument of finish(), or 0
 */
static PyObject *run_combine(PyObject *self, PyObject *const *args)
{
    static const char call[] = "low_latency_combine";
    struct ll_object *ll = (struct ll_object *)self;
    ep_ll_combine_args combine = EP_LL_COMBINE_ARGS_INIT;
    struct comm_object *comm = ll->member.comm;
    struct tensor x, topk_idx, weights, out, cost;
    PyObject *tensors = NULL;
    int64_t number, max_tokens;
    uint64_t half = 0;
    ep_status status;
    void *stream;
    bool ok = true;

    number = want_int(args[4], call, "call", &ok);
    max_tokens = want_int(args[5], call, "max_tokens", &ok);
    combine.flags = (uint32_t)want_int(args[7], call, "flags", &ok);
    stream = stream_of(args[8]);
    if (!ok || PyErr_Occurred() || !answers_size(ll, (uint64_t)number, max_tokens) ||
        !get(ll, args[0],
             (struct want){call, "x", IS(BF16), 3, {ll->n_local, max_tokens * comm->nranks, ll->hidden}, false, false},
             &x) ||
        !get(ll, args[1], (struct want){call, "topk_idx", IS(I32) | IS(I64), 2, {-1, -1}, false, false}, &topk_idx) ||
        !has_topk(ll, call, &topk_idx) ||
        !get(ll, args[2],
             (struct want){call, "topk_weights", IS(F32), 2, {topk_idx.shape[0], topk_idx.shape[1]}, false, false},
             &weights) ||
        !get(ll, args[3], (struct want){call, "out", IS(BF16), 2, {topk_idx.shape[0], ll->hidden}, false, false},
             &out) ||
        !get(ll, args[6], (struct want){call, "wait_cost", IS(I64), 1, {comm->nranks}, false, true}, &cost) ||
        !get_signals(ll, args + 9, max_tokens * comm->nranks, &combine))
        return NULL;
    if (topk_idx.shape[0] > max_tokens)
        return raise_arg("%s: topk_idx has %lld tokens, the most is %lld", call, (long long)topk_idx.shape[0],
                         (long long)max_tokens);
    combine.x = x.data;
    combine.topk_idx = topk_idx.data;
    combine.idx_type = topk_idx.type == TYPE_I32 ? EP_I32 : EP_I64;
    combine.n_tokens = (int32_t)topk_idx.shape[0];
    combine.topk = (int32_t)topk_idx.shape[1];
    combine.topk_weights = weights.data;
    combine.out = out.data;
    combine.call = (uint64_t)number;
    combine.wait_cost_add = cost.data;
    if ((combine.flags & EP_LL_RECV_HOOK) && !(tensors = keep(args, 10)))
        return NULL;
    status = call_combine(ll, &combine, stream);
    if (status != EP_OK) {
        Py_XDECREF(tensors);
        return fail_after(ll, status);
    }
    if (tensors)
        half = open_half(ll, number ? (uint64_t)number : ll->last_call, ll->combines, stream, tensors);
    return PyLong_FromUnsignedLongLong(half);
}

/* finish(half): receives it. False: a later call has done so. */
static PyObject *run_finish(PyObject *self, PyObject *const *args)
{
    struct ll_object *ll = (struct ll_object *)self;
    bool ok = true;
    uint64_t id = (uint64_t)want_int(args[0], "finish", "half", &ok);

    if (!ok)
        return NULL;
    for (int i = 0; i < 2; i++)
        if (ll->open[i].tensors && ll->open[i].id == id) {
            ep_status status = receive(ll, &ll->open[i]);

            return status == EP_OK ? PyBool_FromLong(1) : raise_status(status);
        }
    return PyBool_FromLong(0);
}

/* combine_buffer(max_tokens) -> capsule of [n_local, nranks * max_tokens, hidden] bf16, as bytes */
static PyObject *run_combine_buffer(PyObject *self, PyObject *const *args)
{
    struct ll_object *ll = (struct ll_object *)self;
    struct comm_object *comm = ll->member.comm;
    bool ok = true;
    int64_t max_tokens = want_int(args[0], "combine_buffer", "max_tokens", &ok);
    void *buffer = NULL;
    ep_status status;

    if (!ok)
        return NULL;
    if (max_tokens < 1 || max_tokens > ll->max_tokens)
        return raise_arg("combine_buffer: max_tokens is %lld, must be 1 to %d", (long long)max_tokens, ll->max_tokens);
    Py_BEGIN_ALLOW_THREADS;
    status = ep_ll_get_combine_buffer(ll->ll, &buffer);
    Py_END_ALLOW_THREADS;
    if (status != EP_OK)
        return raise_status(status);
    ll->exported = true;
    return export_memory(comm, buffer, (int64_t)ll->n_local * comm->nranks * max_tokens * ll->hidden * 2);
}

/* set_mask(rank, on, stream); a rank of -1 clears the mask of all */
static PyObject *run_set_mask(PyObject *self, PyObject *const *args)
{
    struct ll_object *ll = (struct ll_object *)self;
    struct comm_object *comm = ll->member.comm;
    bool ok = true;
    int64_t rank, on;
    ep_status status;
    void *stream;

    rank = want_int(args[0], "set_mask", "rank", &ok);
    on = want_int(args[1], "set_mask", "mask", &ok);
    stream = stream_of(args[2]);
    if (!ok || PyErr_Occurred())
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    if (rank == -1)
        status = ep_ll_clear_mask(ll->ll, stream);
    else
        status = complete(
            comm, ep_ll_set_mask(ll->ll, rank > INT32_MAX || rank < 0 ? INT32_MAX : (int)rank, on != 0, stream));
    Py_END_ALLOW_THREADS;
    return result_of(status);
}

/* query_mask(out [nranks] int32, stream) */
static PyObject *run_query_mask(PyObject *self, PyObject *const *args)
{
    struct ll_object *ll = (struct ll_object *)self;
    struct comm_object *comm = ll->member.comm;
    struct tensor out;
    ep_status status;
    void *stream;

    stream = stream_of(args[1]);
    if (PyErr_Occurred() ||
        !get(ll, args[0], (struct want){"query_mask", "mask_status", IS(I32), 1, {comm->nranks}, false, false}, &out))
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    status = complete(comm, ep_ll_query_mask(ll->ll, out.data, stream));
    Py_END_ALLOW_THREADS;
    return result_of(status);
}

/* merge_mask(from, stream) */
static PyObject *run_merge_mask(PyObject *self, PyObject *const *args)
{
    struct ll_object *ll = (struct ll_object *)self;
    struct comm_object *comm = ll->member.comm;
    const struct ll_object *from = (const struct ll_object *)args[0];
    void *stream = stream_of(args[1]);
    ep_status status;

    if (PyErr_Occurred())
        return NULL;
    if (!PyObject_TypeCheck(args[0], ll_type))
        return PyErr_Format(PyExc_TypeError, "merge_mask: from is no LowLatency");
    if (from->member.comm != comm)
        return raise_arg("merge_mask: from is of another communicator, or has been freed");
    if (!from->ll)
        return raise_state("merge_mask: the low-latency object `from` has been freed");
    Py_BEGIN_ALLOW_THREADS;
    status = complete(comm, ep_ll_merge_mask(ll->ll, from->ll, stream));
    Py_END_ALLOW_THREADS;
    return result_of(status);
}

static PyObject *run_barrier(PyObject *self, PyObject *const *args)
{
    struct ll_object *ll = (struct ll_object *)self;
    struct comm_object *comm = ll->member.comm;
    void *stream = stream_of(args[0]);
    ep_status status;

    if (PyErr_Occurred())
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    status = complete(comm, ep_ll_barrier(ll->ll, stream));
    Py_END_ALLOW_THREADS;
    return result_of(status);
}

/* --- methods: the number of their arguments --- */

MEMBER_METHOD(dispatch, "low_latency_dispatch", 14)
MEMBER_METHOD(combine, "low_latency_combine", 13)
MEMBER_METHOD(finish, "finish", 1)
MEMBER_METHOD(combine_buffer, "combine_buffer", 1)
MEMBER_METHOD(set_mask, "set_mask", 3)
MEMBER_METHOD(query_mask, "query_mask", 2)
MEMBER_METHOD(merge_mask, "merge_mask", 2)
MEMBER_METHOD(barrier, "barrier", 1)

static PyMethodDef methods[] = {
    FAST("dispatch", fast_dispatch),
    FAST("combine", fast_combine),
    FAST("finish", fast_finish),
    FAST("set_mask", fast_set_mask),
    FAST("query_mask", fast_query_mask),
    FAST("merge_mask", fast_merge_mask),
    FAST("combine_buffer", fast_combine_buffer),
    FAST("barrier", fast_barrier),
    {"free", member_free_method, METH_NOARGS, "Free the object. Again: nothing."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_dealloc, (void *)member_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_getset, member_properties},
    {0, NULL},
};

static PyType_Spec spec = {"epkit._C.LowLatency", sizeof(struct ll_object), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};

PyTypeObject *ll_type_new(PyObject *module)
{
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, &spec, NULL);
}
