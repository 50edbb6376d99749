/* SPDX-License-Identifier: Apache-2.0 */
/* plan.c - the type Plan: where tokens go, dispatch and combine. */
#include "bind.h"

#include <string.h>

PyTypeObject *plan_type;

struct plan_object {
    struct member member;
    ep_plan *plan;    /* NULL: freed */
    int32_t n_tokens; /* of the current call */
    int topk, n_experts, n_local;
    enum tensor_type idx_type;
    int64_t out_rows;
    int64_t n_recv; /* -1: not known */
    bool expanded;
    bool fixed; /* capacity: rows of inputs may be more than those received */
};

/* Sets *ret to the pointer of a tensor argument. */
#define GET(object, want_, tensor)                                                                                     \
    do {                                                                                                               \
        const struct want wanted_ = want_;                                                                             \
        if (!tensor_get(object, &wanted_, place_of(comm), tensor))                                                     \
            return NULL;                                                                                               \
    } while (0)
#define WANT(...) ((struct want){__VA_ARGS__})

static void plan_close(struct member *member, struct comm_box *box)
{
    struct plan_object *plan = (struct plan_object *)member;
    ep_plan *freed = plan->plan;

    (void)box;
    plan->plan = NULL; /* before another thread asks */
    Py_BEGIN_ALLOW_THREADS;
    ep_plan_free(freed);
    Py_END_ALLOW_THREADS;
}

static ep_status plan_fill(struct plan_object *plan)
{
    ep_plan_info info = EP_PLAN_INFO_INIT;
    ep_status status = ep_plan_get_info(plan->plan, &info);

    if (status == EP_OK) {
        plan->topk = info.topk;
        plan->n_experts = info.n_experts;
        plan->n_local = info.n_local_experts;
        plan->out_rows = info.out_rows;
        plan->n_recv = info.n_recv;
        plan->expanded = info.flags & EP_PLAN_EXPANDED;
    }
    return status;
}

/* The routing as choices or as a mask; exactly one of the two. */
struct routing {
    struct tensor topk_idx, token_in_rank, tokens_per_expert;
    int n_tokens, topk;
};

static bool want_size(int64_t size, const char *call, const char *name, int *ret_size)
{
    if (size > INT32_MAX)
        raise_arg("%s: %s has %lld rows, the most is %d", call, name, (long long)size, INT32_MAX);
    *ret_size = (int)size;
    return size <= INT32_MAX;
}

static PyObject *get_routing(struct comm_object *comm, const char *call, PyObject *const *args, int64_t n_experts,
                             int64_t topk, struct routing *ret_routing)
{
    bool mask = args[0] == Py_None;

    memset(ret_routing, 0, sizeof(*ret_routing));
    if (!mask && (args[1] != Py_None || args[2] != Py_None))
        return raise_arg("%s: topk_idx and %s: give topk_idx, or token_in_rank and tokens_per_expert", call,
                         args[1] != Py_None ? "token_in_rank" : "tokens_per_expert");
    GET(args[0], WANT(call, "topk_idx", IS(I32) | IS(I64), 2, {-1, topk}, false, true), &ret_routing->topk_idx);
    GET(args[1], WANT(call, "token_in_rank", IS(U8) | IS(BOOL), 2, {-1, comm->nranks}, false, !mask),
        &ret_routing->token_in_rank);
    GET(args[2], WANT(call, "tokens_per_expert", IS(I32), 1, {n_experts}, false, !mask),
        &ret_routing->tokens_per_expert);
    if (mask)
        memset(&ret_routing->topk_idx, 0, sizeof(ret_routing->topk_idx));
    else
        ret_routing->topk = (int)ret_routing->topk_idx.shape[1];
    if (!want_size(mask ? ret_routing->token_in_rank.shape[0] : ret_routing->topk_idx.shape[0], call,
                   mask ? "token_in_rank" : "topk_idx", &ret_routing->n_tokens))
        return NULL;
    return Py_None;
}

static bool get_ints(const char *call, PyObject *const *args, const char *const *names, int n, int64_t *ret_values)
{
    bool ok = true;

    for (int i = 0; i < n && ok; i++)
        ret_values[i] = want_int(args[i], call, names[i], &ok);
    return ok;
}

/* An argument of the library's 32 bits; out of range it becomes one that the library refuses and names. */
static int32_t narrow(int64_t value)
{
    return value > INT32_MAX || value < INT32_MIN ? -1 : (int32_t)value;
}

/* Comm.plan(topk_idx, token_in_rank, tokens_per_expert, n_experts, flags, alignment, max_recv, max_tokens, stream) */
PyObject *plan_new(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    struct comm_object *comm = (struct comm_object *)self;
    static const char *const names[] = {"num_experts", "flags", "alignment", "max_recv_tokens", "max_tokens"};
    static const char call[] = "plan";
    ep_plan_args plan_args = EP_PLAN_ARGS_INIT;
    struct plan_object *plan;
    struct routing routing;
    int64_t values[5];
    ep_status status;

    if (!want_args(call, nargs, 9) || !get_ints(call, args + 3, names, 5, values))
        return NULL;
    plan_args.stream = stream_of(args[8]);
    if (PyErr_Occurred() || !get_routing(comm, call, args, values[0], -1, &routing) || !call_begin(comm, call))
        return NULL;
    /* Before the call, which peers take part in: afterwards a plan without an object would have to be freed on this
     * rank alone. */
    plan = (struct plan_object *)((allocfunc)PyType_GetSlot(plan_type, Py_tp_alloc))(plan_type, 0);
    if (!plan) {
        call_done(comm);
        return NULL;
    }
    plan_args.topk_idx = routing.n_tokens ? routing.topk_idx.data : NULL;
    plan_args.token_in_rank = args[0] == Py_None && routing.n_tokens ? routing.token_in_rank.data : NULL;
    plan_args.tokens_per_expert = args[0] == Py_None ? routing.tokens_per_expert.data : NULL;
    plan_args.idx_type = args[0] == Py_None ? 0 : routing.topk_idx.type == TYPE_I32 ? EP_I32 : EP_I64;
    plan_args.n_tokens = routing.n_tokens;
    plan_args.topk = routing.topk;
    plan_args.n_experts = narrow(values[0]);
    plan_args.flags = (uint32_t)values[1];
    plan_args.expert_alignment = narrow(values[2]);
    plan_args.max_recv_tokens = values[3];
    plan_args.max_tokens = narrow(values[4]);
    Py_BEGIN_ALLOW_THREADS;
    status = ep_plan_new(comm->box->comm, &plan_args, &plan->plan);
    Py_END_ALLOW_THREADS;
    call_done(comm);
    if (status != EP_OK) {
        raise_status(status);
        Py_DECREF((PyObject *)plan);
        return NULL;
    }
    plan->member.close = plan_close;
    plan->member.noun = "plan";
    plan->idx_type = plan_args.idx_type == EP_I32 ? TYPE_I32 : TYPE_I64;
    plan->fixed = values[3] > 0;
    member_add(comm, &plan->member);
    status = plan_fill(plan);
    if (status == EP_OK)
        return (PyObject *)plan;
    raise_status(status);
    Py_DECREF((PyObject *)plan);
    return NULL;
}

/* Comm.layout(topk_idx, n_experts, tokens_per_rank, tokens_per_expert, token_in_rank, stream) */
PyObject *plan_layout(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    struct comm_object *comm = (struct comm_object *)self;
    static const char call[] = "layout";
    struct tensor topk_idx, per_rank, per_expert, in_rank;
    ep_plan_args plan_args = EP_PLAN_ARGS_INIT;
    ep_layout layout = EP_LAYOUT_INIT;
    int64_t n_experts = 0;
    ep_status status;
    bool ok = true;

    if (!want_args(call, nargs, 6))
        return NULL;
    n_experts = want_int(args[1], call, "num_experts", &ok);
    plan_args.stream = ok ? stream_of(args[5]) : NULL;
    if (!ok || PyErr_Occurred())
        return NULL;
    if (n_experts < 1)
        return raise_arg("%s: num_experts is %lld", call, (long long)n_experts);
    GET(args[0], WANT(call, "topk_idx", IS(I32) | IS(I64), 2, {-1, -1}, false, false), &topk_idx);
    GET(args[2], WANT(call, "tokens_per_rank", IS(I32), 1, {comm->nranks}, false, false), &per_rank);
    GET(args[3], WANT(call, "tokens_per_expert", IS(I32), 1, {n_experts}, false, false), &per_expert);
    GET(args[4], WANT(call, "token_in_rank", IS(U8) | IS(BOOL), 2, {topk_idx.shape[0], comm->nranks}, false, false),
        &in_rank);
    if (!want_size(topk_idx.shape[0], call, "topk_idx", &plan_args.n_tokens) ||
        !want_size(topk_idx.shape[1], call, "topk_idx", &plan_args.topk) || !call_begin(comm, call))
        return NULL;
    plan_args.topk_idx = plan_args.n_tokens ? topk_idx.data : NULL;
    plan_args.idx_type = topk_idx.type == TYPE_I32 ? EP_I32 : EP_I64;
    plan_args.n_experts = narrow(n_experts);
    layout.tokens_per_rank = per_rank.data;
    layout.tokens_per_expert = per_expert.data;
    layout.token_in_rank = plan_args.n_tokens ? in_rank.data : NULL;
    Py_BEGIN_ALLOW_THREADS;
    status = ep_plan_layout(comm->box->comm, &plan_args, &layout);
    Py_END_ALLOW_THREADS;
    return call_end(comm, status);
}

/* update(topk_idx, token_in_rank, tokens_per_expert, stream) */
static PyObject *run_update(PyObject *self, PyObject *const *args)
{
    struct plan_object *plan = (struct plan_object *)self;
    ep_plan_update_args update = EP_PLAN_UPDATE_ARGS_INIT;
    struct comm_object *comm = plan->member.comm;
    struct routing routing;
    ep_status status;
    void *stream = stream_of(args[3]);

    if (PyErr_Occurred() || !get_routing(comm, "update", args, plan->n_experts, plan->topk ? plan->topk : -1, &routing))
        return NULL;
    if (args[0] != Py_None && routing.topk_idx.type != plan->idx_type)
        return raise_arg("update: topk_idx: dtype is %s, but the plan was made with %s",
                         tensor_type_name(routing.topk_idx.type), tensor_type_name(plan->idx_type));
    update.topk_idx = routing.n_tokens ? routing.topk_idx.data : NULL;
    update.token_in_rank = args[0] == Py_None && routing.n_tokens ? routing.token_in_rank.data : NULL;
    update.tokens_per_expert = args[0] == Py_None ? routing.tokens_per_expert.data : NULL;
    update.n_tokens = routing.n_tokens;
    Py_BEGIN_ALLOW_THREADS;
    status = complete(comm, ep_plan_update(plan->plan, &update, stream));
    Py_END_ALLOW_THREADS;
    plan->n_recv = -1;
    return result_of(status);
}

/* Sets n_tokens for a call in that stream. */
static bool find_tokens(struct plan_object *plan, PyObject *stream_object, void **ret_stream)
{
    ep_status status;

    *ret_stream = stream_of(stream_object);
    if (PyErr_Occurred())
        return false;
    status = ep_plan_get_tokens(plan->plan, *ret_stream, &plan->n_tokens);
    if (status != EP_OK)
        raise_status(status);
    return status == EP_OK;
}

/* tokens(stream) */
static PyObject *run_tokens(PyObject *self, PyObject *const *args)
{
    struct plan_object *plan = (struct plan_object *)self;
    void *stream;

    return find_tokens(plan, args[0], &stream) ? PyLong_FromLong(plan->n_tokens) : NULL;
}

/* Inputs of a dispatch. */
struct sent {
    struct tensor x, scales, weights;
};

/* args: x, scales or None, topk_weights or None */
static PyObject *get_sent(struct comm_object *comm, PyObject *const *args, int64_t n_tokens, int64_t topk,
                          struct sent *ret_sent)
{
    GET(args[0], WANT("dispatch", "x", IS(BF16) | IS(F8) | IS(U8), 2, {n_tokens, -1}, false, false), &ret_sent->x);
    GET(args[1], WANT("dispatch", "scales", IS(F32) | IS(I32), 2, {n_tokens, -1}, true, true), &ret_sent->scales);
    GET(args[2], WANT("dispatch", "topk_weights", IS(F32), 2, {n_tokens, topk}, false, true), &ret_sent->weights);
    return Py_None;
}

/* Comm.check_dispatch(x, scales, topk_weights, n_tokens, topk) */
PyObject *plan_check_dispatch(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    struct comm_object *comm = (struct comm_object *)self;
    static const char *const names[] = {"n_tokens", "topk"};
    struct sent sent;
    int64_t values[2];

    if (!want_args("check_dispatch", nargs, 5) || !get_ints("check_dispatch", args + 3, names, 2, values) ||
        !get_sent(comm, args, values[0], values[1], &sent))
        return NULL;
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
    static const struct {
        enum tensor_type x, scales;
        int block, scale_type; /* elements for each float or word */
        bool only_bytes;
    } formats[] = {{TYPE_F8, TYPE_F32, EP_SCALE_BLOCK, EP_F32, false},
                   {TYPE_F8, TYPE_I32, 4 * EP_SCALE_BLOCK, EP_UE8M0, false},
                   {TYPE_F8, TYPE_I32, 4 * 32, EP_UE8M0_32, true},
                   {TYPE_U8, TYPE_I32, 4 * 16, EP_F8E4M3, true}};

    for (size_t i = 0; i < sizeof(formats) / sizeof(formats[0]); i++)
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

static PyObject *get_scales(struct plan_object *plan, const struct sent *sent, PyObject *output, bool were_bytes,
                            ep_dispatch_args *args)
{
    struct comm_object *comm = plan->member.comm;
    const struct tensor *scales = &sent->scales;
    const int64_t words = scales->shape[1];
    struct tensor recv;

    GET(output, WANT("dispatch", "recv_scales", 1u << scales->type, 2, {AT_LEAST(rows_of(plan)), words}, true, false),
        &recv);
    if (plan->n_tokens > 1 && words > 1 && !scales->stride[0] && !scales->stride[1])
        return raise_arg("dispatch: scales: both strides are 0: give a copy that is not expanded");
    args->scales = scales->data;
    args->scale_stride_token = scales->stride[0];
    args->scale_stride_block = scales->stride[1];
    args->recv_scales = recv.data;
    args->recv_scale_stride_token = recv.stride[0];
    args->recv_scale_stride_block = recv.stride[1];
    args->scale_type = scale_type_of(&sent->x, scales, were_bytes);
    if (args->scale_type == EP_I32)
        args->scale_words = narrow(words);
    return Py_None;
}

static PyObject *get_topk(struct plan_object *plan, PyObject *const *args, ep_dispatch_args *ret_args)
{
    struct comm_object *comm = plan->member.comm;
    struct tensor recv_idx, recv_weights;
    int dims = plan->expanded ? 1 : 2;

    GET(args[5],
        WANT("dispatch", "recv_topk_idx", 1u << plan->idx_type, 2, {AT_LEAST(rows_of(plan)), plan->topk}, false, true),
        &recv_idx);
    GET(args[6],
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

/*
 * dispatch(x, scales, topk_weights, recv_x, recv_scales, recv_topk_idx, recv_topk_weights, stream, were_bytes,
 * recv_source, source_stride); were_bytes: has as_words() made words of bytes?
 */
static PyObject *run_dispatch(PyObject *self, PyObject *const *args)
{
    struct plan_object *plan = (struct plan_object *)self;
    ep_dispatch_args dispatch = EP_DISPATCH_ARGS_INIT;
    struct comm_object *comm = plan->member.comm;
    struct tensor recv_x;
    struct sent sent;
    void *stream;
    ep_status status;

    if (!find_tokens(plan, args[7], &stream) || !get_sent(comm, args, plan->n_tokens, plan->topk, &sent))
        return NULL;
    GET(args[3],
        WANT("dispatch", "recv_x", 1u << sent.x.type, 2, {AT_LEAST(rows_of(plan)), sent.x.shape[1]}, false, false),
        &recv_x);
    if (args[1] == Py_None && args[4] != Py_None)
        return raise_arg("dispatch: recv_scales without scales");
    if (args[1] != Py_None && !get_scales(plan, &sent, args[4], args[8] == Py_True, &dispatch))
        return NULL;
    if (!get_topk(plan, args, &dispatch) || !get_source(plan, args + 9, &dispatch))
        return NULL;
    dispatch.x = sent.x.data;
    dispatch.dtype = sent.x.type == TYPE_BF16 ? EP_BF16 : sent.x.type == TYPE_U8 ? EP_F4E2M1 : EP_F8E4M3;
    dispatch.hidden = narrow(hidden_of(&sent.x));
    dispatch.topk_weights = sent.weights.data;
    dispatch.recv_x = recv_x.data;
    dispatch.out_rows = recv_x.shape[0];
    Py_BEGIN_ALLOW_THREADS;
    status = comm->cuda ? ep_dispatch(plan->plan, &dispatch, stream) : ep_dispatch_sync(plan->plan, &dispatch);
    Py_END_ALLOW_THREADS;
    return result_of(status);
}

/* combine(x, topk_weights, bias 0, bias 1, out, out_topk_weights, flags, stream) */
static PyObject *run_combine(PyObject *self, PyObject *const *args)
{
    struct plan_object *plan = (struct plan_object *)self;
    ep_combine_args combine = EP_COMBINE_ARGS_INIT;
    struct comm_object *comm = plan->member.comm;
    int dims = plan->expanded ? 1 : 2;
    struct tensor x, weights, bias[2], out, out_weights;
    ep_plan_info info = EP_PLAN_INFO_INIT;
    int64_t rows = plan->out_rows;
    void *stream;
    ep_status status;
    bool ok = true;

    if (!find_tokens(plan, args[7], &stream))
        return NULL;
    if (plan->fixed && ep_plan_get_info(plan->plan, &info) == EP_OK && info.n_recv >= 0)
        rows = info.n_recv;
    rows = plan->fixed ? AT_LEAST(rows) : rows;
    GET(args[0], WANT("combine", "x", IS(BF16), 2, {rows, -1}, false, false), &x);
    GET(args[1], WANT("combine", "topk_weights", IS(F32), dims, {rows, plan->topk}, false, true), &weights);
    for (int i = 0; i < 2; i++)
        GET(args[2 + i],
            WANT("combine", i ? "bias[1]" : "bias[0]", IS(BF16), 2, {plan->n_tokens, x.shape[1]}, false, true),
            &bias[i]);
    GET(args[4], WANT("combine", "out", IS(BF16), 2, {plan->n_tokens, x.shape[1]}, false, false), &out);
    GET(args[5], WANT("combine", "out_topk_weights", IS(F32), 2, {plan->n_tokens, plan->topk}, false, true),
        &out_weights);
    combine.flags = (uint32_t)want_int(args[6], "combine", "flags", &ok);
    if (!ok)
        return NULL;
    combine.x = x.data;
    combine.dtype = EP_BF16;
    combine.hidden = narrow(x.shape[1]);
    combine.topk_weights = weights.data;
    combine.bias[0] = bias[0].data;
    combine.bias[1] = bias[1].data;
    combine.out = out.data;
    combine.out_topk_weights = out_weights.data;
    Py_BEGIN_ALLOW_THREADS;
    status = comm->cuda ? ep_combine(plan->plan, &combine, stream) : ep_combine_sync(plan->plan, &combine);
    Py_END_ALLOW_THREADS;
    return result_of(status);
}

/*
 * metadata(memory, stride, stream, offset of recv_source, recv_slot, n_recv_tokens, psum_rank, psum_expert,
 * count_exact, rank_prefix): to parts of one int32 tensor; an offset of -1: not wanted. A tensor for each would be made
 * before the call, and is rarely read.
 */
static PyObject *run_metadata(PyObject *self, PyObject *const *args)
{
    struct plan_object *plan = (struct plan_object *)self;
    const int64_t ranks = plan->member.comm->nranks;
    ep_plan_metadata metadata = EP_PLAN_METADATA_INIT;
    int32_t **const fields[] = {&metadata.recv_source, &metadata.recv_slot,   &metadata.n_recv_tokens,
                                &metadata.psum_rank,   &metadata.psum_expert, &metadata.count_exact,
                                &metadata.rank_prefix};
    const int64_t sizes[] = {plan->out_rows, plan->out_rows * plan->topk, 1, ranks, plan->n_local, plan->n_local,
                             ranks * ranks};
    struct comm_object *comm = plan->member.comm;
    struct tensor memory;
    ep_status status;
    void *stream;
    bool ok = true;

    GET(args[0], WANT("metadata", "memory", IS(I32), 1, {-1}, false, false), &memory);
    metadata.source_stride = narrow(want_int(args[1], "metadata", "source_stride", &ok));
    stream = ok ? stream_of(args[2]) : NULL;
    for (int i = 0; i < 7 && ok && !PyErr_Occurred(); i++) {
        int64_t offset = want_int(args[3 + i], "metadata", "offset", &ok);

        if (ok && offset >= 0 && offset > memory.shape[0] - sizes[i])
            return raise_arg("metadata: memory has %lld elements, part %d needs %lld from %lld on",
                             (long long)memory.shape[0], i, (long long)sizes[i], (long long)offset);
        if (offset >= 0)
            *fields[i] = (int32_t *)memory.data + offset;
    }
    if (!ok || PyErr_Occurred())
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    status = complete(comm, ep_plan_get_metadata(plan->plan, &metadata, stream));
    Py_END_ALLOW_THREADS;
    return result_of(status);
}

/* A list of n integers, or None where the library has no array yet. */
#define LIST_OF(array, n, ret_list)                                                                                    \
    do {                                                                                                               \
        if (!(array)) {                                                                                                \
            Py_INCREF(Py_None);                                                                                        \
            ret_list = Py_None;                                                                                        \
            break;                                                                                                     \
        }                                                                                                              \
        ret_list = PyList_New(n);                                                                                      \
        for (int i_ = 0; ret_list && i_ < (n); i_++)                                                                   \
            PyList_SetItem(ret_list, i_, PyLong_FromLongLong((array)[i_]));                                            \
    } while (0)

/* sizes() -> (n_recv, out_rows) */
static PyObject *plan_sizes(PyObject *self, PyObject *unused)
{
    const struct plan_object *plan = (struct plan_object *)self;

    (void)unused;
    return Py_BuildValue("(LL)", (long long)plan->n_recv, (long long)plan->out_rows);
}

/* wait() -> n_recv */
static PyObject *run_wait(PyObject *self, PyObject *const *args)
{
    struct plan_object *plan = (struct plan_object *)self;
    ep_status status;

    (void)args;
    Py_BEGIN_ALLOW_THREADS;
    status = ep_plan_wait(plan->plan);
    Py_END_ALLOW_THREADS;
    if (status == EP_OK)
        status = plan_fill(plan);
    return status == EP_OK ? PyLong_FromLongLong(plan->n_recv) : raise_status(status);
}

/* info() -> (n_recv, out_rows, n_send, n_wire, recv_per_expert, recv_from_rank, expert_start) */
static PyObject *plan_info(PyObject *self, PyObject *unused)
{
    struct plan_object *plan = (struct plan_object *)self;
    PyObject *per_expert = NULL, *from_rank = NULL, *start = NULL;
    ep_plan_info info = EP_PLAN_INFO_INIT;
    ep_status status;

    (void)unused;
    if (!plan->plan)
        return raise_state("info: the plan has been freed, or its communicator");
    status = ep_plan_get_info(plan->plan, &info);
    if (status != EP_OK)
        return raise_status(status);
    LIST_OF(info.recv_per_expert, info.n_local_experts, per_expert);
    LIST_OF(info.recv_from_rank, plan->member.comm->nranks + 1, from_rank);
    LIST_OF(info.expert_start, info.n_local_experts + 1, start);
    if (!per_expert || !from_rank || !start) {
        Py_XDECREF(per_expert);
        Py_XDECREF(from_rank);
        Py_XDECREF(start);
        return NULL;
    }
    return Py_BuildValue("(LLLLNNN)", (long long)info.n_recv, (long long)info.out_rows, (long long)info.n_send,
                         (long long)info.n_wire, per_expert, from_rank, start);
}

/* --- methods: the number of their arguments --- */

MEMBER_METHOD(update, "update", 4)
MEMBER_METHOD(tokens, "tokens", 1)
MEMBER_METHOD(dispatch, "dispatch", 11)
MEMBER_METHOD(wait, "wait", 0)
MEMBER_METHOD(combine, "combine", 8)
MEMBER_METHOD(metadata, "metadata", 10)

static PyMethodDef methods[] = {
    FAST("dispatch", fast_dispatch),
    FAST("combine", fast_combine),
    FAST("update", fast_update),
    FAST("tokens", fast_tokens),
    FAST("metadata", fast_metadata),
    FAST("wait", fast_wait),
    {"sizes", plan_sizes, METH_NOARGS, NULL},
    {"info", plan_info, METH_NOARGS, NULL},
    {"free", member_free_method, METH_NOARGS, "Free the plan. Again: nothing."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_dealloc, (void *)member_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_getset, member_properties},
    {0, NULL},
};

static PyType_Spec spec = {"epkit._C.Plan", sizeof(struct plan_object), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};

PyTypeObject *plan_type_new(PyObject *module)
{
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, &spec, NULL);
}
