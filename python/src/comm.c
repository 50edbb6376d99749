/* SPDX-License-Identifier: Apache-2.0 */
/* comm.c - the type Comm: creation and its own calls. */
#include "bind.h"

#include <stdlib.h>
#include <string.h>

PyTypeObject *comm_type;

/* --- the all-gather in Python that a communicator is made over --- */

struct gather {
    PyObject *function;             /* (bytes, timeout in ms) -> bytes of all ranks */
    PyObject *type, *value, *trace; /* what it raised */
    int nranks;
};

/* The exception that is set becomes a status; its text becomes part of the library's, and it itself the cause. */
static ep_status keep_exception(struct gather *gather)
{
    ep_status status = status_of_exception();
    PyObject *text, *bytes;

    if (gather->type) {
        PyErr_Clear();
        return status;
    }
    PyErr_Fetch(&gather->type, &gather->value, &gather->trace);
    PyErr_NormalizeException(&gather->type, &gather->value, &gather->trace);
    text = gather->value ? PyObject_Str(gather->value) : NULL;
    bytes = text ? PyUnicode_AsEncodedString(text, "utf-8", "replace") : NULL;
    if (bytes)
        ep_set_last_error(PyBytes_AsString(bytes));
    Py_XDECREF(bytes);
    Py_XDECREF(text);
    PyErr_Clear();
    return status;
}

/* For ep_boot: called by ep_comm_new() on the thread that has released the interpreter lock for it. */
static ep_status gather_bytes(void *context, const void *mine, size_t bytes, int timeout_ms, void *ret_all)
{
    struct gather *gather = context;
    PyGILState_STATE lock = PyGILState_Ensure();
    PyObject *own = PyBytes_FromStringAndSize(mine, (Py_ssize_t)bytes);
    PyObject *all = own ? PyObject_CallFunction(gather->function, "Oi", own, timeout_ms) : NULL;
    ep_status status = EP_OK;
    char *data = NULL;
    Py_ssize_t size = 0;

    if (!all || PyBytes_AsStringAndSize(all, &data, &size) < 0)
        data = NULL;
    else if (size != (Py_ssize_t)bytes * gather->nranks) {
        PyErr_Format(PyExc_ValueError, "the all-gather returned %zd bytes, not %d times %zu", size, gather->nranks,
                     bytes);
        data = NULL;
    }
    if (data)
        memcpy(ret_all, data, (size_t)size);
    else
        status = keep_exception(gather);
    Py_XDECREF(all);
    Py_XDECREF(own);
    PyGILState_Release(lock);
    return status;
}

/* Sets the exception of `status`, with what the all-gather raised as its cause; a KeyboardInterrupt there is raised
 * itself. */
static void raise_with_cause(ep_status status, struct gather *gather)
{
    PyObject *type, *value, *trace;

    if (gather->type && !PyErr_GivenExceptionMatches(gather->type, PyExc_Exception)) {
        PyErr_Restore(gather->type, gather->value, gather->trace);
        gather->type = gather->value = gather->trace = NULL;
        return;
    }
    raise_status(status);
    if (!gather->type)
        return;
    PyErr_NormalizeException(&gather->type, &gather->value, &gather->trace);
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (value && gather->value) {
        Py_INCREF(gather->value);
        PyException_SetCause(value, gather->value);
    }
    PyErr_Restore(type, value, trace);
}

static void forget_cause(struct gather *gather)
{
    Py_XDECREF(gather->type);
    Py_XDECREF(gather->value);
    Py_XDECREF(gather->trace);
}

/* --- creation --- */

/* Rank, size, backend and device: read once. */
static ep_status comm_fill(struct comm_object *comm)
{
    ep_comm_info info = {.size = sizeof(info)};
    ep_status status = ep_comm_get_info(comm->box->comm, &info);

    if (status == EP_OK) {
        comm->rank = info.rank;
        comm->nranks = info.nranks;
        comm->timeout_ms = info.timeout_ms;
        comm->cuda = !strcmp(info.backend, "cuda");
    }
    return status;
}

/* Comm(rank, nranks, gather, backend or None, timeout in ms, device, flags, network or None, ranks per node or 0, slots
 * or 0, slot) */
static PyObject *comm_new(PyTypeObject *Py_UNUSED(type), PyObject *args, PyObject *names)
{
    ep_comm_config config = EP_COMM_CONFIG_INIT;
    ep_boot boot = {.size = sizeof(boot), .allgather = gather_bytes};
    struct gather gather = {NULL, NULL, NULL, NULL, 0};
    struct comm_object *comm;
    ep_status status;
    unsigned flags = 0;

    if (names && PyDict_Size(names))
        return PyErr_Format(PyExc_TypeError, "Comm: takes no keywords");
    if (!PyArg_ParseTuple(args, "iiOziiIziii:Comm", &boot.rank, &boot.nranks, &gather.function, &config.backend,
                          &config.timeout_ms, &config.device, &flags, &config.network, &config.ranks_per_node,
                          &config.slots, &config.slot))
        return NULL;
    config.flags = flags;
    boot.context = &gather;
    gather.nranks = boot.nranks;
    comm = (struct comm_object *)object_new(comm_type);
    if (!comm)
        return NULL;
    comm->device = config.device;
    comm->box = box_new();
    if (!comm->box) {
        Py_DECREF((PyObject *)comm);
        return NULL;
    }
    status = UNLOCKED(ep_comm_new(&boot, &config, &comm->box->comm));
    if (status == EP_OK)
        status = comm_fill(comm);
    if (status != EP_OK) {
        raise_with_cause(status, &gather);
        Py_DECREF((PyObject *)comm);
        comm = NULL;
    }
    forget_cause(&gather);
    return (PyObject *)comm;
}

/* regroup(rank, nranks, gather): of the members */
static PyObject *comm_regroup(PyObject *self, PyObject *args)
{
    struct comm_object *comm = (struct comm_object *)self;
    ep_boot boot = {.size = sizeof(boot), .allgather = gather_bytes};
    struct gather gather = {NULL, NULL, NULL, NULL, 0};
    ep_status status;

    if (!PyArg_ParseTuple(args, "iiO:regroup", &boot.rank, &boot.nranks, &gather.function) ||
        !call_begin(comm, "regroup"))
        return NULL;
    boot.context = &gather;
    gather.nranks = boot.nranks;
    status = UNLOCKED(ep_comm_regroup(comm->box->comm, &boot));
    comm->regroups += status == EP_OK;
    call_done(comm);
    if (status != EP_OK)
        raise_with_cause(status, &gather);
    forget_cause(&gather);
    if (status != EP_OK)
        return NULL;
    Py_RETURN_NONE;
}

static void comm_close(struct comm_object *comm)
{
    struct comm_box *box = comm->box;

    comm->freed = true;
    if (comm->members.next)
        members_free(comm, NULL);
    comm->box = NULL;
    if (box) {
        Py_BEGIN_ALLOW_THREADS;
        box_release(box);
        Py_END_ALLOW_THREADS;
    }
}

static void comm_dealloc(PyObject *self)
{
    comm_close((struct comm_object *)self);
    object_free(self);
}

/* --- methods --- */

static PyObject *comm_free(PyObject *self, PyObject *Py_UNUSED(unused))
{
    struct comm_object *comm = (struct comm_object *)self;

    if (comm->freed || !comm->box)
        Py_RETURN_NONE;
    if (!call_ready(comm, "free"))
        return NULL;
    comm_close(comm);
    Py_RETURN_NONE;
}

static PyObject *comm_barrier(PyObject *self, PyObject *stream)
{
    struct comm_object *comm = (struct comm_object *)self;
    void *on;

    if (!stream_get(comm, stream, &on) || !call_begin(comm, "barrier"))
        return NULL;
    return call_end(comm, UNLOCKED(comm->cuda ? ep_barrier_on(comm->box->comm, on) : ep_comm_barrier(comm->box->comm)));
}

static PyObject *comm_sync(PyObject *self, PyObject *stream)
{
    struct comm_object *comm = (struct comm_object *)self;
    void *on;

    if (!stream_get(comm, stream, &on) || !call_begin(comm, "sync"))
        return NULL;
    return call_end(comm, UNLOCKED(ep_stream_sync(comm->box->comm, on)));
}

static PyObject *comm_allgather(PyObject *self, PyObject *bytes)
{
    struct comm_object *comm = (struct comm_object *)self;
    PyObject *all;
    char *mine, *data;
    Py_ssize_t size, unused;
    ep_status status;

    if (PyBytes_AsStringAndSize(bytes, &mine, &size) < 0 || !call_begin(comm, "allgather"))
        return NULL;
    all = PyBytes_FromStringAndSize(NULL, size * comm->nranks);
    if (!all || PyBytes_AsStringAndSize(all, &data, &unused) < 0) {
        call_done(comm);
        Py_XDECREF(all);
        return NULL;
    }
    status = UNLOCKED(ep_comm_allgather(comm->box->comm, mine, (size_t)size, data));
    call_done(comm);
    return made_or(status, all);
}

static PyObject *comm_abort(PyObject *self, PyObject *Py_UNUSED(unused))
{
    struct comm_object *comm = (struct comm_object *)self;

    if (!comm->box)
        return raise_state("abort: the communicator has been freed");
    ep_comm_abort(comm->box->comm);
    Py_RETURN_NONE;
}

static PyObject *comm_check(PyObject *self, PyObject *Py_UNUSED(unused))
{
    struct comm_object *comm = (struct comm_object *)self;

    if (!comm->box)
        return raise_state("check: the communicator has been freed");
    return result_of(ep_comm_async_error(comm->box->comm));
}

static PyObject *comm_failed(PyObject *self, PyObject *Py_UNUSED(unused))
{
    struct comm_object *comm = (struct comm_object *)self;
    int32_t failed[EP_MAX_RANKS];
    ep_comm_info info = {.size = sizeof(info)};
    PyObject *ranks;
    ep_status status;

    if (!comm->box)
        return raise_state("failed_ranks: the communicator has been freed");
    status = ep_comm_get_info(comm->box->comm, &info);
    if (status == EP_OK)
        status = ep_comm_get_failed(comm->box->comm, failed);
    if (status != EP_OK)
        return raise_status(status);
    ranks = PyDict_New();
    for (int rank = 0; ranks && rank < info.nranks; rank++) {
        PyObject *key, *value;

        if (failed[rank] == EP_OK)
            continue;
        key = PyLong_FromLong(rank);
        value = PyUnicode_FromString(ep_status_name((ep_status)failed[rank]));
        if (!key || !value || PyDict_SetItem(ranks, key, value) < 0)
            Py_CLEAR(ranks);
        Py_XDECREF(key);
        Py_XDECREF(value);
    }
    return ranks;
}

static PyObject *comm_info(PyObject *self, PyObject *Py_UNUSED(unused))
{
    struct comm_object *comm = (struct comm_object *)self;
    ep_comm_info info = {.size = sizeof(info)};
    ep_status status;

    if (!comm->box)
        return raise_state("info: the communicator has been freed");
    status = ep_comm_get_info(comm->box->comm, &info);
    if (status != EP_OK)
        return raise_status(status);
    return Py_BuildValue("{s:i,s:i,s:i,s:i,s:i,s:s,s:s,s:K}", "rank", info.rank, "nranks", info.nranks, "node",
                         info.node, "nnodes", info.nnodes, "timeout_ms", info.timeout_ms, "backend", info.backend,
                         "network", info.network, "library_bytes", (unsigned long long)info.library_bytes);
}

static PyObject *comm_stats(PyObject *self, PyObject *Py_UNUSED(unused))
{
    struct comm_object *comm = (struct comm_object *)self;
    ep_stats stats = {.size = sizeof(stats)};
    ep_status status;

    if (!comm->box)
        return raise_state("stats: the communicator has been freed");
    status = ep_comm_get_stats(comm->box->comm, &stats);
    if (status != EP_OK)
        return raise_status(status);
#define FIELD(name) #name, (unsigned long long)stats.name
    return Py_BuildValue("{s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K}", FIELD(rows_self), FIELD(rows_node),
                         FIELD(rows_net), FIELD(rows_forward), FIELD(bytes_self), FIELD(bytes_node), FIELD(bytes_net),
                         FIELD(bytes_forward), FIELD(ns_move), FIELD(ns_total));
#undef FIELD
}

static PyObject *comm_alloc_memory(PyObject *self, PyObject *size)
{
    struct comm_object *comm = (struct comm_object *)self;
    bool ok = true;
    int64_t bytes = want_within(size, "alloc", "bytes", 0, INT64_MAX, &ok);
    void *memory = NULL;
    ep_status status;

    if (!ok || !call_begin(comm, "alloc"))
        return NULL;
    status = UNLOCKED(ep_alloc(comm->box->comm, (size_t)bytes, &memory));
    call_done(comm);
    return status == EP_OK ? export_memory(comm, memory, bytes) : raise_status(status);
}

/* pool_attach(device): ep_pool_attach(). While what it returns lives, so does the communicator's memory. */
static PyObject *comm_pool_attach(PyObject *self, PyObject *number)
{
    struct comm_object *comm = (struct comm_object *)self;
    bool ok = true;
    int64_t device = want_within(number, "pool_attach", "device", 0, INT32_MAX, &ok);
    ep_status status;

    if (!ok || !call_begin(comm, "pool_attach"))
        return NULL;
    status = UNLOCKED(ep_pool_attach(comm->box->comm, (int)device));
    call_done(comm);
    return status == EP_OK ? export_memory(comm, NULL, 0) : raise_status(status);
}

static PyObject *get_closed(PyObject *self, void *Py_UNUSED(unused))
{
    const struct comm_object *comm = (struct comm_object *)self;

    return PyBool_FromLong(comm->freed || !comm->box);
}

static PyMethodDef methods[] = {
    {"free", comm_free, METH_NOARGS, "Leave the group and free everything. Again: nothing."},
    {"barrier", comm_barrier, METH_O, "barrier(stream or None)"},
    {"sync", comm_sync, METH_O, "sync(stream)"},
    {"allgather", comm_allgather, METH_O, "allgather(bytes) -> bytes of all ranks"},
    {"abort", comm_abort, METH_NOARGS, "Wake every wait of every rank. Any thread."},
    {"check", comm_check, METH_NOARGS, "Raise what the communicator failed with. Never waits."},
    {"regroup", comm_regroup, METH_VARARGS, "Changes the members. Collective over them."},
    {"failed", comm_failed, METH_NOARGS, "Names of the statuses of ranks that have failed, by rank."},
    {"info", comm_info, METH_NOARGS, "rank, nranks, backend, ... as a dict"},
    {"stats", comm_stats, METH_NOARGS, "what the last operation moved"},
    {"alloc", comm_alloc_memory, METH_O, "alloc(bytes) -> capsule of symmetric memory. Collective."},
    {"pool_attach", comm_pool_attach, METH_O, "pool_attach(device) -> capsule that keeps the memory"},
    {"set_sms", comm_set_sms, METH_O, "set_sms(n): multiprocessors of an operation, 0: the default"},
    {"sms", comm_sms, METH_NOARGS, "sms() -> multiprocessors of an operation, without those that copy"},
    FAST("set_net_memory", comm_set_net_memory),
    {"net_memory", comm_net_memory, METH_NOARGS, "net_memory() -> (bytes held, bytes of the largest need)"},
    FAST("plan", plan_new),
    FAST("layout", plan_layout),
    FAST("new", torch_new_method),
    FAST("check_dispatch", plan_check_dispatch),
    FAST("low_latency", ll_new),
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef properties[] = {
    {"closed", get_closed, NULL, "freed?", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, (void *)comm_new},
    {Py_tp_dealloc, (void *)comm_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {0, NULL},
};

static PyType_Spec spec = {"epkit._C.Comm", sizeof(struct comm_object), 0, Py_TPFLAGS_DEFAULT, slots};

PyTypeObject *comm_type_new(PyObject *module)
{
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, &spec, NULL);
}
