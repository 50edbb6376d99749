/* SPDX-License-Identifier: Apache-2.0 */
/* lowlatency.c - the type LowLatency: its buffers and masks. */
#include "lowlatency.h"

#include <stdlib.h>

PyTypeObject *ll_type;

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
    for (int i = 0; i < 5 && ok; i++)
        values[i] = want_within(args[i], "low_latency", names[i], 0, INT32_MAX, &ok);
    if (!ok || !call_begin(comm, "low_latency"))
        return NULL;
    /* Before the call, which peers take part in. */
    ll = (struct ll_object *)object_new(ll_type);
    if (!ll) {
        call_done(comm);
        return NULL;
    }
    config.max_tokens = (int32_t)values[0];
    config.hidden = (int32_t)values[1];
    config.n_experts = (int32_t)values[2];
    config.topk = (int32_t)values[3];
    config.flags = (uint32_t)values[4];
    status = UNLOCKED(ep_ll_new(comm->box->comm, &config, &ll->ll));
    call_done(comm);
    if (status != EP_OK)
        return made_or(status, (PyObject *)ll);
    ll->max_tokens = config.max_tokens;
    ll->hidden = config.hidden;
    ll->n_experts = config.n_experts;
    ll->n_local = config.n_experts / comm->nranks;
    ll->topk = config.topk;
    ll->regroups = comm->regroups;
    ll->member.close = ll_close;
    ll->member.noun = "low-latency object";
    member_add(comm, &ll->member);
    return (PyObject *)ll;
}

/* combine_buffer(max_tokens) -> capsule of [n_local, nranks * max_tokens, hidden] bf16, as bytes */
static PyObject *run_combine_buffer(PyObject *self, PyObject *const *args)
{
    struct ll_object *ll = (struct ll_object *)self;
    struct comm_object *comm = ll->member.comm;
    bool ok = true;
    int64_t max_tokens = want_within(args[0], "combine_buffer", "max_tokens", 1, ll->max_tokens, &ok);
    void *buffer = NULL;
    ep_status status;

    if (!ok)
        return NULL;
    status = UNLOCKED(ep_ll_get_combine_buffer(ll->ll, &buffer));
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
    void *stream;

    rank = want_int(args[0], "set_mask", "rank", &ok);
    on = want_int(args[1], "set_mask", "mask", &ok);
    if (!ok || !stream_get(comm, args[2], &stream))
        return NULL;
    if (rank == -1)
        return result_of(UNLOCKED(ep_ll_clear_mask(ll->ll, stream)));
    rank = rank > INT32_MAX || rank < 0 ? INT32_MAX : rank;
    return result_of(UNLOCKED(complete(comm, ep_ll_set_mask(ll->ll, (int)rank, on != 0, stream))));
}

/* query_mask(out [nranks] int32, stream) */
static PyObject *run_query_mask(PyObject *self, PyObject *const *args)
{
    struct ll_object *ll = (struct ll_object *)self;
    struct comm_object *comm = ll->member.comm;
    struct tensor out;
    void *stream;

    if (!stream_get(comm, args[1], &stream) ||
        !get(ll, args[0], (struct want){"query_mask", "mask_status", IS(I32), 1, {comm->nranks}, false, false}, &out))
        return NULL;
    return result_of(UNLOCKED(complete(comm, ep_ll_query_mask(ll->ll, out.data, stream))));
}

/* merge_mask(from, stream) */
static PyObject *run_merge_mask(PyObject *self, PyObject *const *args)
{
    struct ll_object *ll = (struct ll_object *)self;
    struct comm_object *comm = ll->member.comm;
    const struct ll_object *from = (const struct ll_object *)args[0];
    void *stream;

    if (!stream_get(comm, args[1], &stream))
        return NULL;
    if (!PyObject_TypeCheck(args[0], ll_type))
        return PyErr_Format(PyExc_TypeError, "merge_mask: from is no LowLatency");
    if (from->member.comm != comm)
        return raise_arg("merge_mask: from is of another communicator, or has been freed");
    if (!from->ll)
        return raise_state("merge_mask: the low-latency object `from` has been freed");
    return result_of(UNLOCKED(complete(comm, ep_ll_merge_mask(ll->ll, from->ll, stream))));
}

static PyObject *run_barrier(PyObject *self, PyObject *const *args)
{
    struct ll_object *ll = (struct ll_object *)self;
    struct comm_object *comm = ll->member.comm;
    void *stream;

    if (!stream_get(comm, args[0], &stream))
        return NULL;
    return result_of(UNLOCKED(complete(comm, ep_ll_barrier(ll->ll, stream))));
}

static PyObject *run_renew(PyObject *self, PyObject *const *Py_UNUSED(args))
{
    struct ll_object *ll = (struct ll_object *)self;
    ep_status status;

    status = UNLOCKED(ep_ll_renew(ll->ll));
    if (ll->regroups == ll->member.comm->regroups) /* it was of the present members: what is half done still is */
        return result_of(status);
    ll->regroups = ll->member.comm->regroups;
    ll->last_call = 0;
    for (int i = 0; i < 2; i++)
        Py_CLEAR(ll->open[i].tensors);
    return result_of(status);
}

/* --- methods: the number of their arguments --- */

MEMBER_METHOD(ll_dispatch, "low_latency_dispatch", 9)
MEMBER_METHOD(ll_combine, "low_latency_combine", 13)
MEMBER_METHOD(ll_finish, "finish", 1)
MEMBER_METHOD(run_combine_buffer, "combine_buffer", 1)
MEMBER_METHOD(run_set_mask, "set_mask", 3)
MEMBER_METHOD(run_query_mask, "query_mask", 2)
MEMBER_METHOD(run_merge_mask, "merge_mask", 2)
MEMBER_METHOD(run_barrier, "barrier", 1)
MEMBER_METHOD(run_renew, "renew", 0)

static PyMethodDef methods[] = {
    FAST("dispatch", fast_ll_dispatch),
    FAST("combine", fast_ll_combine),
    FAST("finish", fast_ll_finish),
    FAST("set_mask", fast_run_set_mask),
    FAST("query_mask", fast_run_query_mask),
    FAST("merge_mask", fast_run_merge_mask),
    FAST("combine_buffer", fast_run_combine_buffer),
    FAST("barrier", fast_run_barrier),
    FAST("renew", fast_run_renew),
    {"free", member_free_method, METH_NOARGS, "Free the object. Again: nothing."},
    {NULL, NULL, 0, NULL},
};

PyTypeObject *ll_type_new(PyObject *module)
{
    return member_type_new(module, "epkit._C.LowLatency", sizeof(struct ll_object), methods);
}
