/* SPDX-License-Identifier: Apache-2.0 */
/* lowlatency_rows.c - dispatch and combine with low latency, their second halves, and the tensors that they return. */
#include "lowlatency.h"

#include <stdio.h>

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

    status = UNLOCKED(cuda ? ep_ll_finish(ll->ll, half->call, half->stream) : ep_ll_finish_sync(ll->ll, half->call));
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

/* All arguments of a call and what it returns, kept until it has been received. Before the call: there may be no memory
 * for it. */
static PyObject *keep(PyObject *const *args, Py_ssize_t nargs, PyObject *outputs)
{
    PyObject *tuple = PyTuple_New(nargs + 1);

    for (Py_ssize_t i = 0; tuple && i <= nargs; i++) {
        PyObject *one = i < nargs ? args[i] : outputs;

        Py_INCREF(one);
        PyTuple_SetItem(tuple, i, one);
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

/* Outputs of a dispatch: rows, scales or None, counts, sources, ranges. */
enum { OUT_X, OUT_SCALES, OUT_COUNT, OUT_SOURCE, OUT_RANGE, OUT_ALL };

/* Formats of the rows, as epkit.lowlatency numbers them. */
enum format { FORMAT_BF16, FORMAT_FP8, FORMAT_UE8M0, FORMAT_NVFP4, FORMAT_MXFP8, FORMATS };

static const struct {
    enum tensor_type x, scales;       /* TYPE_OTHER: none */
    int out_dtype, scale_type, block; /* elements of a scale, or of a word of scales */
} formats[FORMATS] = {
    [FORMAT_BF16] = {TYPE_BF16, TYPE_OTHER, EP_BF16, 0, 1},
    [FORMAT_FP8] = {TYPE_F8, TYPE_F32, EP_F8E4M3, EP_F32, EP_SCALE_BLOCK},
    [FORMAT_UE8M0] = {TYPE_F8, TYPE_I32, EP_F8E4M3, EP_UE8M0, 4 * EP_SCALE_BLOCK},
    [FORMAT_NVFP4] = {TYPE_U8, TYPE_U8, EP_F4E2M1, EP_F8E4M3, 16},
    [FORMAT_MXFP8] = {TYPE_F8, TYPE_U8, EP_F8E4M3, EP_UE8M0_32, 32},
};

/*
 * Scales of floats or words: experts follow each other without a gap, each with contiguous columns. Bytes are flat, of
 * whole tiles with EP_LL_SWIZZLED_SCALES.
 */
static struct form form_of_scales(const struct ll_object *ll, enum format format, int64_t rows, uint32_t flags)
{
    const int64_t columns = ll->hidden / formats[format].block;
    const int64_t each = flags & EP_LL_SWIZZLED_SCALES ? (rows + 127) / 128 * 128 : rows;

    if (formats[format].scales == TYPE_OTHER)
        return (struct form)FORM(0, {0});
    if (formats[format].scales == TYPE_U8)
        return (struct form)FORM(1, {ll->n_local * each * columns});
    return (struct form){.ndim = 3, .shape = {ll->n_local, rows, columns}, .stride = {columns * rows, 1, rows}};
}

/* Makes the outputs; a tuple of OUT_ALL. */
static PyObject *make_outputs(struct ll_object *ll, enum format format, int64_t rows, ep_ll_dispatch_args *args)
{
    struct comm_object *comm = ll->member.comm;
    const int64_t columns = ll->hidden / (formats[format].x == TYPE_U8 ? 2 : 1);
    struct form forms[] = {FORM(3, {ll->n_local, rows, columns}), form_of_scales(ll, format, rows, args->flags),
                           FORM(1, {ll->n_local}), FORM(2, {ll->n_local, rows}), FORM(2, {ll->n_local, comm->nranks})};
    const enum tensor_type types[] = {formats[format].x, formats[format].scales, TYPE_I32, TYPE_I32, TYPE_I64};
    struct tensor made[OUT_ALL] = {{0}};
    PyObject *outputs;

    /* Rows beyond the counts stay as they are: on the CPU zeros, so that results are the same in every run. */
    forms[OUT_X].clear = forms[OUT_SCALES].clear = forms[OUT_SOURCE].clear = !comm->cuda;
    outputs = torch_tuple(comm, OUT_ALL, types, forms, made);

    args->out_dtype = formats[format].out_dtype;
    args->scale_type = formats[format].scale_type;
    args->recv_x = made[OUT_X].data;
    args->recv_scales = made[OUT_SCALES].data;
    args->recv_scale_stride_token = forms[OUT_SCALES].stride[1];
    args->recv_scale_stride_block = forms[OUT_SCALES].stride[2];
    args->recv_count = made[OUT_COUNT].data;
    args->recv_source = made[OUT_SOURCE].data;
    args->recv_range = made[OUT_RANGE].data;
    return outputs;
}

static bool get_sums(struct ll_object *ll, PyObject *const *args, ep_ll_dispatch_args *ret_args)
{
    static const char call[] = "low_latency_dispatch";
    struct tensor stats, cost, global;

    if (!get(ll, args[0], (struct want){call, "recv_stats", IS(I32), 1, {ll->n_local}, false, true}, &stats) ||
        !get(ll, args[1], (struct want){call, "wait_cost", IS(I64), 1, {ll->member.comm->nranks}, false, true},
             &cost) ||
        !get(ll, args[2], (struct want){call, "global_scale", IS(F32), 1, {-1}, false, true}, &global))
        return false;
    if (args[2] != Py_None && global.shape[0] < 1) {
        raise_arg("%s: global_scale has no element", call);
        return false;
    }
    ret_args->recv_stats_add = stats.data;
    ret_args->wait_cost_add = cost.data;
    ret_args->global_scale = global.data;
    return true;
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
    status = UNLOCKED(cuda ? ep_ll_dispatch(ll->ll, dispatch, stream) : ep_ll_dispatch_sync(ll->ll, dispatch));
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
    status = UNLOCKED(cuda ? ep_ll_combine(ll->ll, combine, stream) : ep_ll_combine_sync(ll->ll, combine));
    ll->combines += status == EP_OK;
    return status;
}

/* x and topk_idx of a dispatch. */
static bool get_tokens(struct ll_object *ll, PyObject *const *args, int64_t max_tokens, ep_ll_dispatch_args *ret_args)
{
    static const char call[] = "low_latency_dispatch";
    struct tensor x, topk_idx;

    if (!get(ll, args[0], (struct want){call, "x", IS(BF16), 2, {-1, ll->hidden}, false, false}, &x) ||
        !get(ll, args[1], (struct want){call, "topk_idx", IS(I32) | IS(I64), 2, {x.shape[0], -1}, false, false},
             &topk_idx) ||
        !has_topk(ll, call, &topk_idx))
        return false;
    if (x.shape[0] > max_tokens) {
        raise_arg("%s: x has %lld tokens, the most is %lld", call, (long long)x.shape[0], (long long)max_tokens);
        return false;
    }
    ret_args->x = x.data;
    ret_args->topk_idx = topk_idx.data;
    ret_args->idx_type = topk_idx.type == TYPE_I32 ? EP_I32 : EP_I64;
    ret_args->n_tokens = (int32_t)x.shape[0];
    ret_args->max_tokens = (int32_t)max_tokens;
    ret_args->topk = (int32_t)topk_idx.shape[1];
    return true;
}

/*
 * dispatch(x, topk_idx, max_tokens, format, flags, recv_stats, wait_cost, global_scale, stream) -> outputs, number of
 * the call, argument of finish() or 0 without EP_LL_RECV_HOOK
 */
PyObject *ll_dispatch(PyObject *self, PyObject *const *args)
{
    static const char call[] = "low_latency_dispatch";
    struct ll_object *ll = (struct ll_object *)self;
    ep_ll_dispatch_args dispatch = EP_LL_DISPATCH_ARGS_INIT;
    struct comm_object *comm = ll->member.comm;
    PyObject *tensors = NULL, *outputs;
    int64_t max_tokens, format;
    uint64_t number = 0, half = 0;
    ep_status status;
    void *stream;
    bool ok = true;

    max_tokens = want_within(args[2], call, "max_tokens", 1, ll->max_tokens, &ok);
    format = ok ? want_within(args[3], call, "format", 0, FORMATS - 1, &ok) : 0;
    dispatch.flags = ok ? (uint32_t)want_int(args[4], call, "flags", &ok) : 0;
    if (!ok || !get_tokens(ll, args, max_tokens, &dispatch) || !get_sums(ll, args + 5, &dispatch))
        return NULL;
    outputs = make_outputs(ll, (enum format)format, max_tokens * comm->nranks, &dispatch);
    if (!outputs)
        return NULL;
    dispatch.ret_call = &number;
    if (!stream_get(comm, args[8], &stream) ||
        ((dispatch.flags & EP_LL_RECV_HOOK) && !(tensors = keep(args, 9, outputs)))) {
        Py_DECREF(outputs);
        return NULL;
    }
    status = call_dispatch(ll, &dispatch, stream);
    if (status != EP_OK) {
        Py_DECREF(outputs);
        Py_XDECREF(tensors);
        return fail_after(ll, status);
    }
    note_dispatch(ll, number, max_tokens);
    if (tensors)
        half = open_half(ll, number, 0, stream, tensors);
    return Py_BuildValue("(NKK)", outputs, (unsigned long long)number, (unsigned long long)half);
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
    block = want_within(args[1], call, "signal_rows", 1, INT64_MAX, &ok);
    value = ok ? want_within(args[2], call, "signal_value", 0, UINT32_MAX, &ok) : 0;
    sms = ok ? want_within(args[3], call, "max_sms", 0, INT64_MAX, &ok) : 0;
    if (!ok || !get(ll, args[0], (struct want){call, "signals", IS(I32), 1, {-1}, false, false}, &signals))
        return false;
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

/* Inputs of a combine. args: see ll_combine(). */
static bool get_summed(struct ll_object *ll, PyObject *const *args, int64_t max_tokens, ep_ll_combine_args *ret_args)
{
    static const char call[] = "low_latency_combine";
    const int nranks = ll->member.comm->nranks;
    struct tensor x, topk_idx, weights, cost;

    if (!get(ll, args[0],
             (struct want){call, "x", IS(BF16), 3, {ll->n_local, max_tokens * nranks, ll->hidden}, false, false}, &x) ||
        !get(ll, args[1], (struct want){call, "topk_idx", IS(I32) | IS(I64), 2, {-1, -1}, false, false}, &topk_idx) ||
        !has_topk(ll, call, &topk_idx) ||
        !get(ll, args[2],
             (struct want){call, "topk_weights", IS(F32), 2, {topk_idx.shape[0], topk_idx.shape[1]}, false, false},
             &weights) ||
        !get(ll, args[6], (struct want){call, "wait_cost", IS(I64), 1, {nranks}, false, true}, &cost))
        return false;
    if (topk_idx.shape[0] > max_tokens) {
        raise_arg("%s: topk_idx has %lld tokens, the most is %lld", call, (long long)topk_idx.shape[0],
                  (long long)max_tokens);
        return false;
    }
    ret_args->x = x.data;
    ret_args->topk_idx = topk_idx.data;
    ret_args->idx_type = topk_idx.type == TYPE_I32 ? EP_I32 : EP_I64;
    ret_args->n_tokens = (int32_t)topk_idx.shape[0];
    ret_args->topk = (int32_t)topk_idx.shape[1];
    ret_args->topk_weights = weights.data;
    ret_args->wait_cost_add = cost.data;
    return true;
}

/* The tensor of the sums: `given`, or for None a new one. */
static PyObject *get_out(struct ll_object *ll, PyObject *given, ep_ll_combine_args *ret_args)
{
    const struct form form = FORM(2, {ret_args->n_tokens, ll->hidden});
    const struct want want = {"low_latency_combine", "out", IS(BF16), 2, {form.shape[0], form.shape[1]}, false, false};
    PyObject *out = torch_out(ll->member.comm, given, &form);
    struct tensor tensor;

    if (out && get(ll, out, want, &tensor)) {
        ret_args->out = tensor.data;
        return out;
    }
    Py_XDECREF(out);
    return NULL;
}

/*
 * combine(x, topk_idx, topk_weights, out, call, max_tokens, wait_cost, flags, stream, signals, signal_rows,
 * signal_value, max_sms) -> out, argument of finish() or 0; out: None: a new one
 */
PyObject *ll_combine(PyObject *self, PyObject *const *args)
{
    static const char call[] = "low_latency_combine";
    struct ll_object *ll = (struct ll_object *)self;
    ep_ll_combine_args combine = EP_LL_COMBINE_ARGS_INIT;
    struct comm_object *comm = ll->member.comm;
    PyObject *tensors = NULL, *out;
    int64_t number, max_tokens;
    uint64_t half = 0;
    ep_status status;
    void *stream;
    bool ok = true;

    number = want_int(args[4], call, "call", &ok);
    max_tokens = want_int(args[5], call, "max_tokens", &ok);
    combine.flags = (uint32_t)want_int(args[7], call, "flags", &ok);
    if (!ok || !answers_size(ll, (uint64_t)number, max_tokens) || !get_summed(ll, args, max_tokens, &combine) ||
        !get_signals(ll, args + 9, max_tokens * comm->nranks, &combine))
        return NULL;
    out = get_out(ll, args[3], &combine);
    if (!out)
        return NULL;
    combine.call = (uint64_t)number;
    if (!stream_get(comm, args[8], &stream) ||
        ((combine.flags & EP_LL_RECV_HOOK) && !(tensors = keep(args, 10, out)))) {
        Py_DECREF(out);
        return NULL;
    }
    status = call_combine(ll, &combine, stream);
    if (status != EP_OK) {
        Py_DECREF(out);
        Py_XDECREF(tensors);
        return fail_after(ll, status);
    }
    if (tensors)
        half = open_half(ll, number ? (uint64_t)number : ll->last_call, ll->combines, stream, tensors);
    return Py_BuildValue("(NK)", out, (unsigned long long)half);
}

/* finish(half): receives it. False: a later call has done so. */
PyObject *ll_finish(PyObject *self, PyObject *const *args)
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
