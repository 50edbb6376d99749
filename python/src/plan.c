/* SPDX-License-Identifier: Apache-2.0 */
/* plan.c - the type Plan: where tokens go, and what is known of it. */
#include "plan.h"

#include <string.h>

PyTypeObject *plan_type;

static void plan_close(struct member *member, struct comm_box *Py_UNUSED(box))
{
    struct plan_object *plan = (struct plan_object *)member;
    ep_plan *freed = plan->plan;

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
        plan->most_recv = info.most_recv;
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

int32_t narrow(int64_t value)
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

    if (!want_args(call, nargs, 9) || !want_ints(call, args + 3, names, 5, values) ||
        !stream_get(comm, args[8], &plan_args.stream) || !get_routing(comm, call, args, values[0], -1, &routing) ||
        !call_begin(comm, call))
        return NULL;
    /* Before the call, which peers take part in: afterwards a plan without an object would have to be freed on this
     * rank alone. */
    plan = (struct plan_object *)object_new(plan_type);
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
    status = UNLOCKED(ep_plan_new(comm->box->comm, &plan_args, &plan->plan));
    call_done(comm);
    if (status != EP_OK)
        return made_or(status, (PyObject *)plan);
    plan->member.close = plan_close;
    plan->member.noun = "plan";
    plan->idx_type = plan_args.idx_type == EP_I32 ? TYPE_I32 : TYPE_I64;
    plan->fixed = values[3] > 0;
    plan->n_tokens = plan_args.n_tokens;
    member_add(comm, &plan->member);
    return made_or(plan_fill(plan), (PyObject *)plan);
}

/* Comm.layout(topk_idx, n_experts, stream) -> tokens_per_rank, tokens_per_expert, token_in_rank */
PyObject *plan_layout(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    struct comm_object *comm = (struct comm_object *)self;
    static const char call[] = "layout";
    static const enum tensor_type types[] = {TYPE_I32, TYPE_I32, TYPE_BOOL};
    PyObject *made = NULL;
    struct tensor topk_idx, parts[3];
    ep_plan_args plan_args = EP_PLAN_ARGS_INIT;
    ep_layout layout = EP_LAYOUT_INIT;
    int64_t n_experts = 0;
    ep_status status;
    bool ok = true;

    if (!want_args(call, nargs, 3))
        return NULL;
    n_experts = want_within(args[1], call, "num_experts", 1, INT64_MAX, &ok);
    if (!ok)
        return NULL;
    GET(args[0], WANT(call, "topk_idx", IS(I32) | IS(I64), 2, {-1, -1}, false, false), &topk_idx);
    if (!want_size(topk_idx.shape[0], call, "topk_idx", &plan_args.n_tokens) ||
        !want_size(topk_idx.shape[1], call, "topk_idx", &plan_args.topk))
        return NULL;
    made = torch_tuple(comm, 3, types,
                       (const struct form[]){FORM(1, {comm->nranks}), FORM(1, {n_experts}),
                                             FORM(2, {topk_idx.shape[0], comm->nranks})},
                       parts);
    if (!made || !stream_get(comm, args[2], &plan_args.stream) || !call_begin(comm, call)) {
        Py_XDECREF(made);
        return NULL;
    }
    plan_args.topk_idx = plan_args.n_tokens ? topk_idx.data : NULL;
    plan_args.idx_type = topk_idx.type == TYPE_I32 ? EP_I32 : EP_I64;
    plan_args.n_experts = narrow(n_experts);
    layout.tokens_per_rank = parts[0].data;
    layout.tokens_per_expert = parts[1].data;
    layout.token_in_rank = plan_args.n_tokens ? parts[2].data : NULL;
    status = UNLOCKED(ep_plan_layout(comm->box->comm, &plan_args, &layout));
    call_done(comm);
    return made_or(status, made);
}

/* update(topk_idx, token_in_rank, tokens_per_expert, stream) */
static PyObject *run_update(PyObject *self, PyObject *const *args)
{
    struct plan_object *plan = (struct plan_object *)self;
    ep_plan_update_args update = EP_PLAN_UPDATE_ARGS_INIT;
    struct comm_object *comm = plan->member.comm;
    struct routing routing;
    ep_status status;
    void *stream;

    if (!stream_get(comm, args[3], &stream) ||
        !get_routing(comm, "update", args, plan->n_experts, plan->topk ? plan->topk : -1, &routing))
        return NULL;
    if (args[0] != Py_None && routing.topk_idx.type != plan->idx_type)
        return raise_arg("update: topk_idx: dtype is %s, but the plan was made with %s",
                         tensor_type_name(routing.topk_idx.type), tensor_type_name(plan->idx_type));
    update.topk_idx = routing.n_tokens ? routing.topk_idx.data : NULL;
    update.token_in_rank = args[0] == Py_None && routing.n_tokens ? routing.token_in_rank.data : NULL;
    update.tokens_per_expert = args[0] == Py_None ? routing.tokens_per_expert.data : NULL;
    update.n_tokens = routing.n_tokens;
    status = UNLOCKED(complete(comm, ep_plan_update(plan->plan, &update, stream)));
    if (status == EP_OK) {
        plan->n_recv = -1;
        plan->updated |= plan->fixed;
    }
    return result_of(status);
}

bool find_tokens(struct plan_object *plan, void *stream)
{
    ep_status status = EP_OK;

    if (plan->updated)
        status = ep_plan_get_tokens(plan->plan, stream, &plan->n_tokens);
    if (status != EP_OK)
        raise_status(status);
    return status == EP_OK;
}

/* tokens(stream) */
static PyObject *run_tokens(PyObject *self, PyObject *const *args)
{
    struct plan_object *plan = (struct plan_object *)self;
    void *stream;

    return stream_get(plan->member.comm, args[0], &stream) && find_tokens(plan, stream)
               ? PyLong_FromLong(plan->n_tokens)
               : NULL;
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
    void *stream;
    bool ok = true;

    GET(args[0], WANT("metadata", "memory", IS(I32), 1, {-1}, false, false), &memory);
    metadata.source_stride = narrow(want_int(args[1], "metadata", "source_stride", &ok));
    for (int i = 0; i < 7 && ok; i++) {
        int64_t offset = want_int(args[3 + i], "metadata", "offset", &ok);

        if (ok && offset >= 0 && offset > memory.shape[0] - sizes[i])
            return raise_arg("metadata: memory has %lld elements, part %d needs %lld from %lld on",
                             (long long)memory.shape[0], i, (long long)sizes[i], (long long)offset);
        if (offset >= 0)
            *fields[i] = (int32_t *)memory.data + offset;
    }
    if (!ok || !stream_get(comm, args[2], &stream))
        return NULL;
    return result_of(UNLOCKED(complete(comm, ep_plan_get_metadata(plan->plan, &metadata, stream))));
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

/* sizes() -> (n_recv, out_rows, most_recv, tokens, top-k, or R of a mask) */
static PyObject *plan_sizes(PyObject *self, PyObject *Py_UNUSED(unused))
{
    const struct plan_object *plan = (struct plan_object *)self;

    return Py_BuildValue("(LLLii)", (long long)plan->n_recv, (long long)plan->out_rows, (long long)plan->most_recv,
                         plan->n_tokens, plan->topk);
}

/* settle(rows or None, tensor or None) -> (n_recv, out_rows, most_recv, those of both that were received) */
static PyObject *run_settle(PyObject *self, PyObject *const *args)
{
    struct plan_object *plan = (struct plan_object *)self;
    ep_status status;

    status = UNLOCKED(ep_plan_settle(plan->plan));
    if (status == EP_OK)
        status = plan_fill(plan);
    if (status != EP_OK)
        return raise_status(status);
    plan->fixed = false;
    return Py_BuildValue("(LLLNN)", (long long)plan->n_recv, (long long)plan->out_rows, (long long)plan->most_recv,
                         received_rows(args[0], plan->n_recv), torch_head(args[1], plan->n_recv));
}

/* info() -> (n_recv, out_rows, n_send, n_wire, recv_per_expert, recv_from_rank, expert_start) */
static PyObject *plan_info(PyObject *self, PyObject *Py_UNUSED(unused))
{
    struct plan_object *plan = (struct plan_object *)self;
    PyObject *per_expert = NULL, *from_rank = NULL, *start = NULL;
    ep_plan_info info = EP_PLAN_INFO_INIT;
    ep_status status;

    if (!plan->plan)
        return raise_state("info: the plan has been freed, or its communicator");
    status = ep_plan_get_info(plan->plan, &info);
    if (status != EP_OK)
        return raise_status(status);
    LIST_OF(info.recv_per_expert, info.n_local_experts, per_expert);
    LIST_OF(info.recv_from_rank, plan->member.comm->nranks + 1, from_rank);
    LIST_OF(info.expert_start, info.n_local_experts + 1, start);
    return Py_BuildValue("(LLLLNNN)", (long long)info.n_recv, (long long)info.out_rows, (long long)info.n_send,
                         (long long)info.n_wire, per_expert, from_rank, start);
}

/* --- methods: the number of their arguments --- */

MEMBER_METHOD(run_update, "update", 4)
MEMBER_METHOD(run_tokens, "tokens", 1)
MEMBER_METHOD(plan_dispatch, "dispatch", 12)
MEMBER_METHOD(run_settle, "settle", 2)
MEMBER_METHOD(plan_combine, "combine", 6)
MEMBER_METHOD(run_metadata, "metadata", 10)

static PyMethodDef methods[] = {
    FAST("dispatch", fast_plan_dispatch),
    FAST("combine", fast_plan_combine),
    FAST("update", fast_run_update),
    FAST("tokens", fast_run_tokens),
    FAST("metadata", fast_run_metadata),
    FAST("settle", fast_run_settle),
    {"sizes", plan_sizes, METH_NOARGS, NULL},
    {"info", plan_info, METH_NOARGS, NULL},
    {"free", member_free_method, METH_NOARGS, "Free the plan. Again: nothing."},
    {NULL, NULL, 0, NULL},
};

PyTypeObject *plan_type_new(PyObject *module)
{
    return member_type_new(module, "epkit._C.Plan", sizeof(struct plan_object), methods);
}
