/* SPDX-License-Identifier: Apache-2.0 */
/* plan_rows.c - dispatch and combine of a plan, and the tensors that they return. */
#include "plan.h"

static PyObject *rows_type; /* epkit.plan.Rows: a named tuple of received rows, scales, choices, weights */

enum { RECV_X, RECV_SCALES, RECV_IDX, RECV_WEIGHTS, RECV_ALL };

PyObject *know_rows(PyObject *Py_UNUSED(module), PyObject *type)
{
    object_keep(&rows_type, type);
    Py_RETURN_NONE;
}

/* Known formats: those of epkit.plan.FORMATS, in its order. */
struct format {
    enum tensor_type x, scales;
    int block, scale_type; /* block: elements for each float or word */
    bool only_bytes;
};
static const struct format formats[] = {{TYPE_F8, TYPE_F32, EP_SCALE_BLOCK, EP_F32, false},
                                        {TYPE_F8, TYPE_I32, 4 * EP_SCALE_BLOCK, EP_UE8M0, false},
                                        {TYPE_F8, TYPE_I32, 4 * 32, EP_UE8M0_32, true},
                                        {TYPE_U8, TYPE_I32, 4 * 16, EP_F8E4M3, true}};
#define FORMATS ((int64_t)(sizeof(formats) / sizeof(formats[0])))

/* Inputs of a dispatch. */
struct sent {
    struct tensor x, scales, weights;
    const struct format
        *made;             /* of the rows that the call makes of x, whose scales have no data here; NULL: x itself */
    enum tensor_type type; /* of the rows, and their columns */
    int64_t columns;
    bool has_scales;
};

/* args: x, scales or None, topk_weights or None */
static PyObject *get_sent(struct comm_object *comm, PyObject *const *args, int64_t n_tokens, int64_t topk,
                          const struct format *made, struct sent *ret_sent)
{
    const unsigned types = made ? IS(BF16) : IS(BF16) | IS(F8) | IS(U8);

    GET(args[0], WANT("dispatch", "x", types, 2, {n_tokens, -1}, false, false), &ret_sent->x);
    GET(args[1], WANT("dispatch", "scales", IS(F32) | IS(I32), 2, {n_tokens, -1}, true, true), &ret_sent->scales);
    GET(args[2], WANT("dispatch", "topk_weights", IS(F32), 2, {n_tokens, topk}, false, true), &ret_sent->weights);
    ret_sent->made = made;
    ret_sent->type = made ? made->x : ret_sent->x.type;
    ret_sent->columns = ret_sent->x.shape[1] / (made && made->x == TYPE_U8 ? 2 : 1);
    ret_sent->has_scales = made || args[1] != Py_None;
    if (made)
        ret_sent->scales =
            (struct tensor){.type = made->scales, .shape = {ret_sent->x.shape[0], ret_sent->x.shape[1] / made->block}};
    return Py_None;
}

/* Comm.check_dispatch(x, scales, topk_weights, topk_idx or None, token_in_rank or None). The plan refuses what is no
 * routing. */
PyObject *plan_check_dispatch(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    struct comm_object *comm = (struct comm_object *)self;
    struct tensor routing = {.ndim = 0}, mask;
    PyObject *given;
    struct sent sent;

    if (!want_args("check_dispatch", nargs, 5))
        return NULL;
    given = args[3] == Py_None ? args[4] : args[3];
    if (given != Py_None && !tensor_read(given, &routing))
        PyErr_Clear();
    if (routing.ndim == 2 && !get_sent(comm, args, routing.shape[0], routing.shape[1], NULL, &sent))
        return NULL;
    GET(args[4],
        WANT("dispatch", "is_token_in_rank", IS(U8) | IS(BOOL), 2,
             {args[3] == Py_None || routing.ndim != 2 ? -1 : routing.shape[0], comm->nranks}, false, true),
        &mask);
    Py_RETURN_NONE;
}

/* Elements of a row: bytes are two fp4 each. */
static int64_t hidden_of(const struct tensor *x)
{
    return x->shape[1] * (x->type == TYPE_U8 ? 2 : 1);
}

/* Scales of a known format by their number: floats, or words of four bytes. Others are words that are not interpreted,
 * as those that the program gave as words where DeepEP has no such format. */
static int scale_type_of(const struct tensor *x, const struct tensor *scales, bool were_bytes)
{
    for (int i = 0; i < FORMATS; i++)
        if (x->type == formats[i].x && scales->type == formats[i].scales &&
            scales->shape[1] * formats[i].block == hidden_of(x) && (were_bytes || !formats[i].only_bytes))
            return formats[i].scale_type;
    return EP_I32;
}

/* Rows that outputs of a dispatch have at least. */
static int64_t rows_of(const struct plan_object *plan)
{
    return plan->n_recv >= 0 ? plan->n_recv : plan->out_rows;
}

/* Whether the call is part of a graph, which uses the counts of later updates: inputs and outputs have the capacity. */
static bool has_capacity(const struct plan_object *plan, bool *ret_capacity)
{
    *ret_capacity = plan->n_recv < 0;
    return !plan->fixed || plan->n_recv < 0 || is_captured(plan->member.comm, ret_capacity);
}

/* [n, words], or with strides (1, multiple of 16 bytes), as TMA requires for scales. */
static struct form form_of_scales(int64_t n, int64_t words, bool column_major)
{
    struct form form = FORM(2, {n, words});
    const int64_t each = TENSOR_ALIGNMENT / 4;

    if (column_major) {
        form.stride[0] = 1;
        form.stride[1] = n > each ? (n + each - 1) / each * each : each;
    }
    return form;
}

static PyObject *new_of(struct plan_object *plan, bool fast, enum tensor_type type, struct form form)
{
    struct comm_object *comm = plan->member.comm;

    /* On the CPU nothing is left uninitialised where rows may stay unwritten: results are the same in every run. */
    form.clear = !comm->cuda && (plan->expanded || plan->fixed);
    return torch_new(comm, fast, tensor_dtype(type), &form);
}

/*
 * The outputs, as a tuple of RECV_ALL: those of args[3], a result of before, or new ones. Of new ones the rows may be
 * given, as args[3]. args: see plan_dispatch().
 */
static PyObject *get_outputs(struct plan_object *plan, PyObject *const *args, const struct sent *sent)
{
    const int wants_idx = PyObject_IsTrue(args[4]), column_major = PyObject_IsTrue(args[5]);
    struct comm_object *comm = plan->member.comm;
    PyObject *parts[RECV_ALL] = {NULL};
    bool fast, capacity, ok;
    struct form choices;
    int64_t n;

    if (wants_idx < 0 || column_major < 0)
        return NULL;
    if ((PyObject *)Py_TYPE(args[3]) == rows_type) {
        Py_INCREF(args[3]);
        return args[3];
    }
    if (!has_capacity(plan, &capacity) || !torch_begin(comm, &fast))
        return NULL;
    n = capacity ? plan->out_rows : plan->n_recv;
    if (args[3] == Py_None) {
        parts[RECV_X] = new_of(plan, fast, sent->type, (struct form)FORM(2, {n, sent->columns}));
    } else {
        struct tensor given;

        GET(args[3],
            WANT("dispatch", "out", 1u << sent->type, 2, {AT_LEAST(rows_of(plan)), sent->columns}, false, false),
            &given);
        n = given.shape[0];
        Py_INCREF(args[3]);
        parts[RECV_X] = args[3];
    }
    choices = (struct form)FORM(2, {n, plan->topk});
    ok = parts[RECV_X];
    if (ok && sent->has_scales)
        ok = (parts[RECV_SCALES] =
                  new_of(plan, fast, sent->scales.type, form_of_scales(n, sent->scales.shape[1], column_major)));
    if (ok && wants_idx && !plan->expanded && plan->topk)
        ok = (parts[RECV_IDX] = new_of(plan, fast, plan->idx_type, choices));
    choices.ndim = plan->expanded ? 1 : 2;
    if (ok && args[2] != Py_None)
        ok = (parts[RECV_WEIGHTS] = new_of(plan, fast, TYPE_F32, choices));
    return tuple_from(RECV_ALL, parts, ok);
}

static PyObject *get_scales(struct plan_object *plan, const struct sent *sent, PyObject *output, bool were_bytes,
                            ep_dispatch_args *args)
{
    struct comm_object *comm = plan->member.comm;
    const struct tensor *scales = &sent->scales;
    const int64_t words = scales->shape[1];
    struct tensor recv;

    GET(output, WANT("dispatch", "recv_scales", 1u << scales->type, 2, {AT_LEAST(rows_of(plan)), words}, true, false),
        &recv);
    if (!sent->made && plan->n_tokens > 1 && words > 1 && !scales->stride[0] && !scales->stride[1])
        return raise_arg("dispatch: scales: both strides are 0: give a copy that is not expanded");
    args->scales = scales->data;
    args->scale_stride_token = scales->stride[0];
    args->scale_stride_block = scales->stride[1];
    args->recv_scales = recv.data;
    args->recv_scale_stride_token = recv.stride[0];
    args->recv_scale_stride_block = recv.stride[1];
    args->scale_type = sent->made ? sent->made->scale_type : scale_type_of(&sent->x, scales, were_bytes);
    if (args->scale_type == EP_I32)
        args->scale_words = narrow(words);
    return Py_None;
}

static PyObject *get_topk(struct plan_object *plan, PyObject *outputs, ep_dispatch_args *ret_args)
{
    struct comm_object *comm = plan->member.comm;
    struct tensor recv_idx, recv_weights;
    int dims = plan->expanded ? 1 : 2;

    GET(PyTuple_GetItem(outputs, RECV_IDX),
        WANT("dispatch", "recv_topk_idx", 1u << plan->idx_type, 2, {AT_LEAST(rows_of(plan)), plan->topk}, false, true),
        &recv_idx);
    GET(PyTuple_GetItem(outputs, RECV_WEIGHTS),
        WANT("dispatch", "recv_topk_weights", IS(F32), dims, {AT_LEAST(rows_of(plan)), plan->topk}, false, true),
        &recv_weights);
    ret_args->recv_topk_idx = recv_idx.data;
    ret_args->recv_topk_weights = recv_weights.data;
    return Py_None;
}

/* args: recv_source or None, its stride */
static PyObject *get_source(struct plan_object *plan, PyObject *const *args, ep_dispatch_args *ret_args)
{
    struct comm_object *comm = plan->member.comm;
    struct tensor source;
    bool ok = true;

    if (args[0] == Py_None)
        return Py_None;
    GET(args[0], WANT("dispatch", "recv_source", IS(I32), 1, {AT_LEAST(rows_of(plan))}, false, true), &source);
    ret_args->recv_source = source.data;
    ret_args->source_stride = narrow(want_int(args[1], "dispatch", "source_stride", &ok));
    return ok ? Py_None : NULL;
}

/* Pointers of all tensors of a dispatch. */
static PyObject *get_pointers(struct plan_object *plan, PyObject *const *args, const struct sent *sent,
                              PyObject *outputs, ep_dispatch_args *ret_args)
{
    struct comm_object *comm = plan->member.comm;
    PyObject *recv_scales = PyTuple_GetItem(outputs, RECV_SCALES);
    struct tensor recv_x, global;

    GET(PyTuple_GetItem(outputs, RECV_X),
        WANT("dispatch", "out", 1u << sent->type, 2, {AT_LEAST(rows_of(plan)), sent->columns}, false, false), &recv_x);
    GET(args[11], WANT("dispatch", "global_scale", IS(F32), 1, {AT_LEAST(1)}, false, true), &global);
    if (!sent->has_scales && recv_scales != Py_None)
        return raise_arg("dispatch: recv_scales without scales");
    if (sent->has_scales && !get_scales(plan, sent, recv_scales, args[7] == Py_True, ret_args))
        return NULL;
    if (!get_topk(plan, outputs, ret_args) || !get_source(plan, args + 8, ret_args))
        return NULL;
    ret_args->x = sent->x.data;
    ret_args->dtype = sent->type == TYPE_BF16 ? EP_BF16 : sent->type == TYPE_U8 ? EP_F4E2M1 : EP_F8E4M3;
    ret_args->flags = sent->made ? EP_DISPATCH_QUANTIZE : 0;
    ret_args->global_scale = global.data;
    ret_args->hidden = narrow(hidden_of(&sent->x));
    ret_args->topk_weights = sent->weights.data;
    ret_args->recv_x = recv_x.data;
    ret_args->out_rows = recv_x.shape[0];
    return outputs;
}

/* The result, as Rows. Consumes `outputs`. */
static PyObject *as_rows(PyObject *outputs)
{
    newfunc new_tuple = (newfunc)PyType_GetSlot(&PyTuple_Type, Py_tp_new);
    PyObject *args, *rows;

    if ((PyObject *)Py_TYPE(outputs) == rows_type)
        return outputs;
    args = PyTuple_Pack(1, outputs);
    rows = args ? new_tuple((PyTypeObject *)rows_type, args, NULL) : NULL;
    Py_XDECREF(args);
    Py_DECREF(outputs);
    return rows;
}

PyObject *received_rows(PyObject *rows, int64_t n)
{
    PyObject *heads[RECV_ALL] = {NULL};
    bool ok = true;

    if ((PyObject *)Py_TYPE(rows) != rows_type)
        return torch_head(rows, n); /* of None */
    for (int i = 0; i < RECV_ALL && ok; i++)
        ok = (heads[i] = torch_head(PyTuple_GetItem(rows, i), n)) != NULL;
    rows = tuple_from(RECV_ALL, heads, ok);
    return rows ? as_rows(rows) : NULL;
}

/*
 * dispatch(x, scales, topk_weights, out, want_topk_idx, column_major, stream, were_bytes, recv_source, source_stride,
 * format, global_scale) -> Rows. out: Rows of before, or received rows alone, or None; were_bytes: has as_words() made
 * words of bytes? format: 0, or 1 + that of the rows that the call makes of x
 */
PyObject *plan_dispatch(PyObject *self, PyObject *const *args)
{
    struct plan_object *plan = (struct plan_object *)self;
    ep_dispatch_args dispatch = EP_DISPATCH_ARGS_INIT;
    struct comm_object *comm = plan->member.comm;
    PyObject *outputs = NULL;
    const struct format *made;
    struct sent sent;
    ep_status status;
    void *stream;
    bool ok = true;
    int64_t format = want_within(args[10], "dispatch", "format", 0, FORMATS, &ok);

    made = ok && format ? &formats[format - 1] : NULL;
    if (!ok || !get_sent(comm, args, plan->updated ? -1 : plan->n_tokens, plan->topk, made, &sent))
        return NULL;
    outputs = get_outputs(plan, args, &sent);
    /* After the allocations: whatever torch does to new memory in its own stream comes before the call. */
    if (!outputs || !stream_get(comm, args[6], &stream) || !find_tokens(plan, stream) ||
        (plan->updated && !get_sent(comm, args, plan->n_tokens, plan->topk, made, &sent)) ||
        !get_pointers(plan, args, &sent, outputs, &dispatch)) {
        Py_XDECREF(outputs);
        return NULL;
    }
    status =
        UNLOCKED(comm->cuda ? ep_dispatch(plan->plan, &dispatch, stream) : ep_dispatch_sync(plan->plan, &dispatch));
    outputs = made_or(status, outputs);
    return outputs ? as_rows(outputs) : NULL;
}

/* The biases of args[2], a tuple or list: up to two, each may be None. */
static PyObject *get_biases(struct plan_object *plan, PyObject *biases, int64_t hidden, ep_combine_args *ret_args)
{
    const Py_ssize_t n = PySequence_Size(biases);
    struct comm_object *comm = plan->member.comm;

    if (n < 0)
        return NULL;
    if (n > 2)
        return raise_arg("combine: %zd biases, the most is 2", n);
    for (int i = 0; i < n; i++) {
        PyObject *bias = PySequence_GetItem(biases, i); /* the caller's, which keeps it */
        struct tensor tensor;

        Py_XDECREF(bias);
        if (!bias)
            return NULL;
        GET(bias, WANT("combine", i ? "bias[1]" : "bias[0]", IS(BF16), 2, {plan->n_tokens, hidden}, false, true),
            &tensor);
        ret_args->bias[i] = tensor.data;
    }
    return biases;
}

/* Inputs of a combine. args: see plan_combine(). */
static PyObject *get_summed(struct plan_object *plan, PyObject *const *args, struct tensor *ret_x,
                            ep_combine_args *ret_args)
{
    struct comm_object *comm = plan->member.comm;
    ep_plan_info info = EP_PLAN_INFO_INIT;
    int dims = plan->expanded ? 1 : 2;
    int64_t rows = plan->out_rows;
    struct tensor weights;
    bool capacity, ok = true;

    if (plan->fixed && ep_plan_get_info(plan->plan, &info) == EP_OK && info.n_recv >= 0)
        rows = info.n_recv;
    rows = plan->fixed ? AT_LEAST(rows) : rows;
    GET(args[0], WANT("combine", "x", IS(BF16), 2, {rows, -1}, false, false), ret_x);
    if (!has_capacity(plan, &capacity))
        return NULL;
    if (capacity && plan->n_recv >= 0 && ret_x->shape[0] < plan->out_rows)
        return raise_arg("combine: x has %lld rows, in a capture it must have the %lld of the capacity",
                         (long long)ret_x->shape[0], (long long)plan->out_rows);
    GET(args[1], WANT("combine", "topk_weights", IS(F32), dims, {rows, plan->topk}, false, true), &weights);
    ret_args->flags = (uint32_t)want_int(args[4], "combine", "flags", &ok);
    ret_args->x = ret_x->data;
    ret_args->dtype = EP_BF16;
    ret_args->hidden = narrow(ret_x->shape[1]);
    ret_args->topk_weights = weights.data;
    return ok ? Py_None : NULL;
}

/* The sums as a tuple, args[3] or new ones, and the sums of weights, new or None. */
static PyObject *get_sums(struct plan_object *plan, PyObject *const *args, int64_t n, int64_t hidden)
{
    struct comm_object *comm = plan->member.comm;
    const struct form form = FORM(2, {n, hidden}), choices = FORM(2, {n, plan->topk});
    PyObject *sums[2] = {NULL};
    bool fast, ok = (sums[0] = torch_out(comm, args[3], &form));

    if (ok && args[1] != Py_None)
        ok = torch_begin(comm, &fast) && (sums[1] = torch_new(comm, fast, tensor_dtype(TYPE_F32), &choices));
    return tuple_from(2, sums, ok);
}

static PyObject *get_sum_pointers(struct plan_object *plan, PyObject *sums, int64_t hidden, ep_combine_args *ret_args)
{
    struct comm_object *comm = plan->member.comm;
    struct tensor out, weights;

    GET(PyTuple_GetItem(sums, 0), WANT("combine", "out", IS(BF16), 2, {plan->n_tokens, hidden}, false, false), &out);
    GET(PyTuple_GetItem(sums, 1),
        WANT("combine", "out_topk_weights", IS(F32), 2, {plan->n_tokens, plan->topk}, false, true), &weights);
    ret_args->out = out.data;
    ret_args->out_topk_weights = weights.data;
    return sums;
}

/* combine(x, topk_weights, biases, out, flags, stream) -> out, and the sums of weights or None */
PyObject *plan_combine(PyObject *self, PyObject *const *args)
{
    struct plan_object *plan = (struct plan_object *)self;
    ep_combine_args combine = EP_COMBINE_ARGS_INIT;
    struct comm_object *comm = plan->member.comm;
    PyObject *sums = NULL;
    struct tensor x;
    void *stream;
    ep_status status;

    /* The outputs are made before the call's stream waits for anything: their size is that in torch's current one. */
    if (!get_summed(plan, args, &x, &combine) ||
        (plan->updated && (!stream_get(comm, Py_None, &stream) || !find_tokens(plan, stream))))
        return NULL;
    sums = get_sums(plan, args, plan->n_tokens, x.shape[1]);
    if (!sums || !stream_get(comm, args[5], &stream) || !find_tokens(plan, stream) ||
        !get_biases(plan, args[2], x.shape[1], &combine) || !get_sum_pointers(plan, sums, x.shape[1], &combine)) {
        Py_XDECREF(sums);
        return NULL;
    }
    status = UNLOCKED(comm->cuda ? ep_combine(plan->plan, &combine, stream) : ep_combine_sync(plan->plan, &combine));
    return made_or(status, sums);
}
