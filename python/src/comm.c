/* SPDX-License-Identifier: Apache-2.0 */
/* comm.c - the type Comm: creation over an all-gather in Python, its own calls, memory, and what all calls begin with.
 */
#include "bind.h"

#include "dlpack_abi.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

PyTypeObject *comm_type;

/*
 * --- the library's side ---
 */

/* Frees what nothing needs any more: the box itself, once it is closed and no tensor shows its memory. */
static void box_release(struct comm_box *box, bool close)
{
    bool last;

    pthread_mutex_lock(&box->lock);
    if (close)
        box->closed = true;
    else
        box->exports--;
    last = box->closed && box->exports == 0;
    pthread_mutex_unlock(&box->lock);
    if (!last)
        return;
    for (int i = 0; i < box->n_kept; i++)
        ep_ll_free(box->kept[i]);
    free(box->kept);
    ep_comm_free(box->comm);
    pthread_mutex_destroy(&box->lock);
    free(box);
}

static struct comm_box *box_new(void)
{
    struct comm_box *box = calloc(1, sizeof(*box));

    if (box)
        pthread_mutex_init(&box->lock, NULL);
    else
        PyErr_NoMemory();
    return box;
}

/*
 * --- memory of the library as a tensor ---
 */

struct export
{
    struct dl_managed managed; /* first, so that one is the other */
    struct comm_box *box;
    int64_t shape[1];
};

static void export_delete(struct dl_managed *managed)
{
    struct export *export = (struct export *)managed;

    box_release(export->box, false);
    free(export);
}

/* Of a capsule that nobody made a tensor of: its name is still the first one then. */
static void capsule_delete(PyObject *capsule)
{
    struct dl_managed *managed;

    if (!PyCapsule_IsValid(capsule, "dltensor"))
        return;
    managed = PyCapsule_GetPointer(capsule, "dltensor");
    managed->deleter(managed);
}

PyObject *export_memory(struct comm_object *comm, void *memory, int64_t bytes)
{
    struct export *export = calloc(1, sizeof(*export));
    PyObject *capsule;

    if (!export)
        return PyErr_NoMemory();
    export->shape[0] = bytes;
    export->managed.tensor.data = memory;
    export->managed.tensor.device.type = comm->cuda ? DL_CUDA : DL_CPU;
    export->managed.tensor.device.id = comm->cuda ? comm->device : 0;
    export->managed.tensor.ndim = 1;
    export->managed.tensor.dtype.code = DL_UINT;
    export->managed.tensor.dtype.bits = 8;
    export->managed.tensor.dtype.lanes = 1;
    export->managed.tensor.shape = export->shape;
    export->managed.deleter = export_delete;
    export->box = comm->box;
    capsule = PyCapsule_New(&export->managed, "dltensor", capsule_delete);
    if (!capsule) {
        free(export);
        return NULL;
    }
    pthread_mutex_lock(&comm->box->lock);
    comm->box->exports++;
    pthread_mutex_unlock(&comm->box->lock);
    return capsule;
}

/*
 * --- what every call does ---
 */

bool call_begin(struct comm_object *comm, const char *call)
{
    if (!comm->box)
        raise_state("%s: the communicator has been freed", call);
    else if (comm->busy)
        raise_state("%s: another thread is in a call on this communicator", call);
    else
        comm->busy = true;
    return comm->busy && !PyErr_Occurred();
}

static void object_free(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);

    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF((PyObject *)type);
}

void call_done(struct comm_object *comm)
{
    struct member *late;

    comm->busy = false;
    while ((late = comm->late)) {
        comm->late = late->next_late;
        member_free(late);
        object_free((PyObject *)late);
    }
}

PyObject *call_end(struct comm_object *comm, ep_status status)
{
    PyObject *result = result_of(status);

    call_done(comm);
    return result;
}

PyObject *member_call(PyObject *self, const char *call, PyObject *const *args, Py_ssize_t nargs, Py_ssize_t wanted,
                      PyObject *(*function)(PyObject *self, PyObject *const *args))
{
    struct member *member = (struct member *)self;
    struct comm_object *comm = member->comm;
    PyObject *result;

    if (!want_args(call, nargs, wanted))
        return NULL;
    if (!comm)
        return raise_state("%s: the %s has been freed, or its communicator", call, member->noun);
    if (!call_begin(comm, call))
        return NULL;
    result = function(self, args);
    call_done(comm);
    return result;
}

struct place place_of(const struct comm_object *comm)
{
    return (struct place){comm->cuda, comm->device};
}

bool want_args(const char *call, Py_ssize_t given, Py_ssize_t wanted)
{
    if (given == wanted)
        return true;
    PyErr_Format(PyExc_TypeError, "%s: takes %zd arguments, %zd given", call, wanted, given);
    return false;
}

int64_t want_int(PyObject *value, const char *call, const char *name, bool *ret_ok)
{
    int64_t number = PyLong_AsLongLong(value);

    if (number == -1 && PyErr_Occurred()) {
        PyErr_Clear();
        /* Of anything else the type alone: to print a tensor would read it. */
        if (PyLong_Check(value))
            PyErr_Format(PyExc_TypeError, "%s: %s: %R is no integer of 64 bits", call, name, value);
        else
            PyErr_Format(PyExc_TypeError, "%s: %s: is a %R, must be an integer", call, name,
                         (PyObject *)Py_TYPE(value));
        *ret_ok = false;
    }
    return number;
}

void member_add(struct comm_object *comm, struct member *member)
{
    Py_INCREF((PyObject *)comm);
    member->comm = comm;
    member->next = comm->members.next;
    member->prev = &comm->members;
    if (member->next)
        member->next->prev = member;
    comm->members.next = member;
}

void member_free(struct member *member)
{
    struct comm_object *comm = member->comm;
    bool busy;

    if (!comm)
        return;
    /* The library may wait for what is queued, and for peers that still read: other threads go on meanwhile. */
    busy = comm->busy;
    comm->busy = true;
    member->close(member);
    comm->busy = busy;
    member->prev->next = member->next;
    if (member->next)
        member->next->prev = member->prev;
    member->comm = NULL;
    if (!busy)
        call_done(comm);
    Py_DECREF((PyObject *)comm);
}

void member_dealloc(PyObject *self)
{
    struct member *member = (struct member *)self;
    struct comm_object *comm = member->comm;

    if (comm && comm->busy) {
        member->next_late = comm->late;
        comm->late = member;
        return;
    }
    member_free(member);
    object_free(self);
}

PyObject *member_free_method(PyObject *self, PyObject *unused)
{
    struct member *member = (struct member *)self;

    (void)unused;
    if (member->comm && member->comm->busy)
        return raise_state("free: another thread is in a call on this communicator");
    member_free(member);
    Py_RETURN_NONE;
}

static PyObject *member_get_closed(PyObject *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong(!((struct member *)self)->comm);
}

PyGetSetDef member_properties[] = {
    {"closed", member_get_closed, NULL, "freed?", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

void *stream_of(PyObject *stream)
{
    return stream == Py_None ? NULL : PyLong_AsVoidPtr(stream);
}

/*
 * --- creation ---
 */

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

/* Called by ep_comm_new() on the thread that has released the interpreter lock for it. */
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

/* The exception of `status`, with what the all-gather raised as its cause. */
static void raise_with_cause(ep_status status, struct gather *gather)
{
    PyObject *type, *value, *trace;

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

static struct comm_object *comm_alloc(void)
{
    allocfunc alloc = (allocfunc)PyType_GetSlot(comm_type, Py_tp_alloc);

    return (struct comm_object *)alloc(comm_type, 0);
}

/* Who, where, on what: asked once. */
static ep_status comm_fill(struct comm_object *comm)
{
    ep_comm_info info = {.size = sizeof(info)};
    ep_status status = ep_comm_get_info(comm->box->comm, &info);

    if (status == EP_OK) {
        comm->rank = info.rank;
        comm->nranks = info.nranks;
        comm->cuda = !strcmp(info.backend, "cuda");
    }
    return status;
}

/* Comm(rank, nranks, gather, backend or None, timeout in ms, device, flags) */
static PyObject *comm_new(PyTypeObject *type, PyObject *args, PyObject *names)
{
    ep_comm_config config = EP_COMM_CONFIG_INIT;
    ep_boot boot = {.size = sizeof(boot), .allgather = gather_bytes};
    struct gather gather = {NULL, NULL, NULL, NULL, 0};
    struct comm_object *comm;
    ep_status status;
    unsigned flags = 0;

    (void)type;
    if (names && PyDict_Size(names))
        return PyErr_Format(PyExc_TypeError, "Comm: takes no keywords");
    if (!PyArg_ParseTuple(args, "iiOziiI:Comm", &boot.rank, &boot.nranks, &gather.function, &config.backend,
                          &config.timeout_ms, &config.device, &flags))
        return NULL;
    config.flags = flags;
    boot.context = &gather;
    gather.nranks = boot.nranks;
    comm = comm_alloc();
    if (!comm)
        return NULL;
    comm->device = config.device;
    comm->box = box_new();
    if (!comm->box) {
        Py_DECREF((PyObject *)comm);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS;
    status = ep_comm_new(&boot, &config, &comm->box->comm);
    Py_END_ALLOW_THREADS;
    if (status == EP_OK)
        status = comm_fill(comm);
    if (status != EP_OK) {
        raise_with_cause(status, &gather);
        Py_DECREF((PyObject *)comm);
        comm = NULL;
    }
    Py_XDECREF(gather.type);
    Py_XDECREF(gather.value);
    Py_XDECREF(gather.trace);
    return (PyObject *)comm;
}

static void comm_close(struct comm_object *comm)
{
    struct comm_box *box = comm->box;

    while (comm->members.next)
        member_free(comm->members.next);
    comm->box = NULL;
    if (box) {
        Py_BEGIN_ALLOW_THREADS;
        box_release(box, true);
        Py_END_ALLOW_THREADS;
    }
}

static void comm_dealloc(PyObject *self)
{
    comm_close((struct comm_object *)self);
    object_free(self);
}

/*
 * --- methods ---
 */

static PyObject *comm_free(PyObject *self, PyObject *unused)
{
    struct comm_object *comm = (struct comm_object *)self;

    (void)unused;
    if (comm->busy)
        return raise_state("free: another thread is in a call on this communicator");
    comm_close(comm);
    Py_RETURN_NONE;
}

static PyObject *comm_barrier(PyObject *self, PyObject *stream)
{
    struct comm_object *comm = (struct comm_object *)self;
    void *on = stream_of(stream);
    ep_status status;

    if (PyErr_Occurred() || !call_begin(comm, "barrier"))
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    status = stream == Py_None ? ep_comm_barrier(comm->box->comm) : ep_barrier_on(comm->box->comm, on);
    if (status == EP_OK && stream != Py_None && !comm->cuda)
        status = ep_stream_sync(comm->box->comm, NULL);
    Py_END_ALLOW_THREADS;
    return call_end(comm, status);
}

static PyObject *comm_sync(PyObject *self, PyObject *stream)
{
    struct comm_object *comm = (struct comm_object *)self;
    void *on = PyLong_AsVoidPtr(stream);
    ep_status status;

    if (PyErr_Occurred() || !call_begin(comm, "sync"))
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    status = ep_stream_sync(comm->box->comm, on);
    Py_END_ALLOW_THREADS;
    return call_end(comm, status);
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
        comm->busy = false;
        Py_XDECREF(all);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS;
    status = ep_comm_allgather(comm->box->comm, mine, (size_t)size, data);
    Py_END_ALLOW_THREADS;
    call_done(comm);
    if (status == EP_OK)
        return all;
    Py_DECREF(all);
    return raise_status(status);
}

static PyObject *comm_abort(PyObject *self, PyObject *unused)
{
    struct comm_object *comm = (struct comm_object *)self;

    (void)unused;
    if (!comm->box)
        return raise_state("abort: the communicator has been freed");
    ep_comm_abort(comm->box->comm);
    Py_RETURN_NONE;
}

static PyObject *comm_check(PyObject *self, PyObject *unused)
{
    struct comm_object *comm = (struct comm_object *)self;
    ep_status status;

    (void)unused;
    if (!comm->box)
        return raise_state("check: the communicator has been freed");
    status = ep_comm_async_error(comm->box->comm);
    if (status != EP_OK)
        return raise_status(status);
    Py_RETURN_NONE;
}

static PyObject *comm_shrink(PyObject *self, PyObject *unused)
{
    struct comm_object *comm = (struct comm_object *)self, *next;
    ep_status status;

    (void)unused;
    if (!call_begin(comm, "shrink"))
        return NULL;
    next = comm_alloc();
    if (next)
        next->box = box_new();
    if (!next || !next->box) {
        comm->busy = false;
        Py_XDECREF((PyObject *)next);
        return NULL;
    }
    next->device = comm->device;
    Py_BEGIN_ALLOW_THREADS;
    status = ep_comm_shrink(comm->box->comm, NULL, &next->box->comm);
    Py_END_ALLOW_THREADS;
    call_done(comm);
    if (status == EP_OK)
        status = comm_fill(next);
    if (status == EP_OK)
        return (PyObject *)next;
    raise_status(status);
    Py_DECREF((PyObject *)next);
    return NULL;
}

static PyObject *comm_info(PyObject *self, PyObject *unused)
{
    struct comm_object *comm = (struct comm_object *)self;
    ep_comm_info info = {.size = sizeof(info)};
    ep_status status;

    (void)unused;
    if (!comm->box)
        return raise_state("info: the communicator has been freed");
    status = ep_comm_get_info(comm->box->comm, &info);
    if (status != EP_OK)
        return raise_status(status);
    return Py_BuildValue("{s:i,s:i,s:i,s:i,s:i,s:s,s:s,s:K}", "rank", info.rank, "nranks", info.nranks, "node",
                         info.node, "nnodes", info.nnodes, "timeout_ms", info.timeout_ms, "backend", info.backend,
                         "network", info.network, "library_bytes", (unsigned long long)info.library_bytes);
}

static PyObject *comm_stats(PyObject *self, PyObject *unused)
{
    struct comm_object *comm = (struct comm_object *)self;
    ep_stats stats = {.size = sizeof(stats)};
    ep_status status;

    (void)unused;
    if (!comm->box)
        return raise_state("stats: the communicator has been freed");
    status = ep_comm_get_stats(comm->box->comm, &stats);
    if (status != EP_OK)
        return raise_status(status);
    return Py_BuildValue("{s:K,s:K,s:K,s:K,s:K,s:K}", "rows_self", (unsigned long long)stats.rows_self, "rows_node",
                         (unsigned long long)stats.rows_node, "bytes_self", (unsigned long long)stats.bytes_self,
                         "bytes_node", (unsigned long long)stats.bytes_node, "ns_move",
                         (unsigned long long)stats.ns_move, "ns_total", (unsigned long long)stats.ns_total);
}

static PyObject *comm_alloc_memory(PyObject *self, PyObject *size)
{
    struct comm_object *comm = (struct comm_object *)self;
    bool ok = true;
    int64_t bytes = want_int(size, "alloc", "bytes", &ok);
    void *memory = NULL;
    ep_status status;

    if (!ok)
        return NULL;
    if (bytes < 0)
        return raise_arg("alloc: bytes is %lld", (long long)bytes);
    if (!call_begin(comm, "alloc"))
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    status = ep_alloc(comm->box->comm, (size_t)bytes, &memory);
    Py_END_ALLOW_THREADS;
    call_done(comm);
    return status == EP_OK ? export_memory(comm, memory, bytes) : raise_status(status);
}

/* pool_attach(device): ep_pool_attach(). While what it returns lives, so does the communicator's memory. */
static PyObject *comm_pool_attach(PyObject *self, PyObject *number)
{
    struct comm_object *comm = (struct comm_object *)self;
    bool ok = true;
    int64_t device = want_int(number, "pool_attach", "device", &ok);
    ep_status status;

    if (!ok)
        return NULL;
    if (device < 0 || device > INT32_MAX)
        return raise_arg("pool_attach: device is %lld", (long long)device);
    if (!call_begin(comm, "pool_attach"))
        return NULL;
    status = ep_pool_attach(comm->box->comm, (int)device);
    call_done(comm);
    return status == EP_OK ? export_memory(comm, NULL, 0) : raise_status(status);
}

/* A function of libepkit-cuda, which libepkit has loaded when there is a communicator of that backend. */
static void *cuda_function(const char *name)
{
    char file[64];
    void *module;

    snprintf(file, sizeof(file), "libepkit-cuda.so.%d", EP_VERSION_MAJOR);
    module = dlopen(file, RTLD_NOW | RTLD_NOLOAD);
    return module ? dlsym(module, name) : NULL;
}

/* set_sms(n): epkit/cuda.h. A host backend has none. */
static PyObject *comm_set_sms(PyObject *self, PyObject *number)
{
    struct comm_object *comm = (struct comm_object *)self;
    static ep_status (*set_sms)(ep_comm * comm, int sms);
    bool ok = true;
    int64_t sms = want_int(number, "set_sms", "sms", &ok);
    ep_status status;

    if (!ok)
        return NULL;
    if (sms < 0 || sms > INT32_MAX)
        return raise_arg("set_sms: sms is %lld", (long long)sms);
    if (!call_begin(comm, "set_sms"))
        return NULL;
    if (!comm->cuda)
        return call_end(comm, EP_OK);
    if (!set_sms)
        *(void **)&set_sms = cuda_function("ep_cuda_set_sms");
    if (!set_sms) {
        call_done(comm);
        return raise_state("set_sms: libepkit-cuda has no ep_cuda_set_sms()");
    }
    status = set_sms(comm->box->comm, (int)sms);
    return call_end(comm, status);
}

/* sms() -> multiprocessors of an operation, without those that copy; 0 without CUDA */
static PyObject *comm_sms(PyObject *self, PyObject *unused)
{
    struct comm_object *comm = (struct comm_object *)self;
    static ep_status (*get_device)(ep_comm * comm, int *ret_device, int *ret_sms);
    ep_status status;
    int sms = 0;

    (void)unused;
    if (!comm->box)
        return raise_state("sms: the communicator has been freed");
    if (comm->cuda && !get_device)
        *(void **)&get_device = cuda_function("ep_cuda_get_device");
    status = comm->cuda && get_device ? get_device(comm->box->comm, NULL, &sms) : EP_OK;
    return status == EP_OK ? PyLong_FromLong(sms) : raise_status(status);
}

/* set_net_memory(reserve, limit): epkit/cuda.h. A host backend has no pinned memory. */
static PyObject *comm_set_net_memory(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    struct comm_object *comm = (struct comm_object *)self;
    static ep_status (*set_memory)(ep_comm * comm, size_t reserve, size_t limit);
    int64_t reserve, limit;
    ep_status status;
    bool ok = true;

    if (!want_args("set_net_memory", nargs, 2))
        return NULL;
    reserve = want_int(args[0], "set_net_memory", "reserve", &ok);
    limit = ok ? want_int(args[1], "set_net_memory", "limit", &ok) : 0;
    if (!ok)
        return NULL;
    if (reserve < 0 || limit < 0 || (limit && reserve > limit))
        return raise_arg(
            "set_net_memory: reserve is %lld and limit %lld, must be 0 or more, and reserve within the limit",
            (long long)reserve, (long long)limit);
    if (!call_begin(comm, "set_net_memory"))
        return NULL;
    if (!comm->cuda)
        return call_end(comm, EP_OK);
    if (!set_memory)
        *(void **)&set_memory = cuda_function("ep_cuda_set_net_memory");
    if (!set_memory) {
        call_done(comm);
        return raise_state("set_net_memory: libepkit-cuda has no ep_cuda_set_net_memory()");
    }
    Py_BEGIN_ALLOW_THREADS;
    status = set_memory(comm->box->comm, (size_t)reserve, (size_t)limit);
    Py_END_ALLOW_THREADS;
    return call_end(comm, status);
}

/* net_memory() -> (bytes held, bytes of the largest need); 0 without CUDA, and on one node */
static PyObject *comm_net_memory(PyObject *self, PyObject *unused)
{
    struct comm_object *comm = (struct comm_object *)self;
    static ep_status (*get_memory)(ep_comm * comm, size_t * ret_held, size_t * ret_needed);
    ep_status status = EP_OK;
    size_t held = 0, needed = 0;

    (void)unused;
    if (!comm->box)
        return raise_state("net_memory: the communicator has been freed");
    if (comm->cuda && !get_memory)
        *(void **)&get_memory = cuda_function("ep_cuda_get_net_memory");
    if (comm->cuda && get_memory)
        status = get_memory(comm->box->comm, &held, &needed);
    return status == EP_OK ? Py_BuildValue("(KK)", (unsigned long long)held, (unsigned long long)needed)
                           : raise_status(status);
}

static PyObject *comm_plan(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    return plan_new((struct comm_object *)self, args, nargs);
}

static PyObject *comm_layout(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    return plan_layout((struct comm_object *)self, args, nargs);
}

static PyObject *comm_low_latency(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    return ll_new((struct comm_object *)self, args, nargs);
}

static PyObject *get_closed(PyObject *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong(!((struct comm_object *)self)->box);
}

static PyMethodDef methods[] = {
    {"free", comm_free, METH_NOARGS, "Leave the group and free everything. Again: nothing."},
    {"barrier", comm_barrier, METH_O, "barrier(stream or None)"},
    {"sync", comm_sync, METH_O, "sync(stream)"},
    {"allgather", comm_allgather, METH_O, "allgather(bytes) -> bytes of all ranks"},
    {"abort", comm_abort, METH_NOARGS, "Wake every wait of every rank. Any thread."},
    {"check", comm_check, METH_NOARGS, "Raise what the communicator failed with. Never waits."},
    {"shrink", comm_shrink, METH_NOARGS, "A new Comm of the ranks that live."},
    {"info", comm_info, METH_NOARGS, "rank, nranks, backend, ... as a dict"},
    {"stats", comm_stats, METH_NOARGS, "what the last operation moved"},
    {"alloc", comm_alloc_memory, METH_O, "alloc(bytes) -> capsule of symmetric memory. Collective."},
    {"pool_attach", comm_pool_attach, METH_O, "pool_attach(device) -> capsule that keeps the memory"},
    {"set_sms", comm_set_sms, METH_O, "set_sms(n): multiprocessors of an operation, 0: the default"},
    {"sms", comm_sms, METH_NOARGS, "sms() -> multiprocessors of an operation, without those that copy"},
    FAST("set_net_memory", comm_set_net_memory),
    {"net_memory", comm_net_memory, METH_NOARGS, "net_memory() -> (bytes held, bytes of the largest need)"},
    FAST("plan", comm_plan),
    FAST("layout", comm_layout),
    FAST("low_latency", comm_low_latency),
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
