/* SPDX-License-Identifier: Apache-2.0 */
/* member.c - what every call on a communicator begins and ends with, and what belongs to one: plans, low latency. */
#include "bind.h"

#include <pthread.h>
#include <time.h>

/*
 * While a thread frees a member the interpreter lock is released and nothing else may be called: other threads wait
 * here, since it is no call of theirs that the program has begun twice. `closing` changes under both locks.
 */
static pthread_mutex_t closing_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t closing_over;
static pthread_once_t closing_once = PTHREAD_ONCE_INIT;
static unsigned forks; /* from the first process to this one */

static void closing_cond_init(void)
{
    pthread_condattr_t attributes;

    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&closing_over, &attributes);
    pthread_condattr_destroy(&attributes);
}

/*
 * A fork may come while another thread is in here, and the child has no other threads: the lock is held over the fork,
 * so that it is copied in a known state, and the condition begins anew without those that waited for it.
 */
static void fork_begin(void)
{
    pthread_mutex_lock(&closing_lock);
}

static void fork_parent(void)
{
    pthread_mutex_unlock(&closing_lock);
}

static void fork_child(void)
{
    forks++;
    closing_cond_init();
    pthread_mutex_unlock(&closing_lock);
}

static void closing_init(void)
{
    closing_cond_init();
    pthread_atfork(fork_begin, fork_parent, fork_child);
}

/* As long as the library may take to free something, twice. Code of Python that the free itself runs is not kept. */
static void wait_closing(struct comm_object *comm)
{
    struct timespec end;
    int late = 0;

    if (comm->closing && comm->closing_forks != forks)
        comm->closing = comm->busy = false; /* of a thread that a forked child has not; the library refuses its calls */
    if (!comm->closing || comm->closer == PyThread_get_thread_ident())
        return;
    Py_INCREF((PyObject *)comm);
    Py_BEGIN_ALLOW_THREADS;
    clock_gettime(CLOCK_MONOTONIC, &end);
    end.tv_sec += 2 * (comm->timeout_ms / 1000 + 1);
    pthread_once(&closing_once, closing_init);
    pthread_mutex_lock(&closing_lock);
    while (comm->closing && !late)
        late = pthread_cond_timedwait(&closing_over, &closing_lock, &end);
    pthread_mutex_unlock(&closing_lock);
    Py_END_ALLOW_THREADS;
    Py_DECREF((PyObject *)comm);
}

static void set_closing(struct comm_object *comm, bool closing)
{
    pthread_once(&closing_once, closing_init);
    pthread_mutex_lock(&closing_lock);
    comm->closing = closing;
    comm->closer = PyThread_get_thread_ident();
    comm->closing_forks = forks;
    pthread_cond_broadcast(&closing_over);
    pthread_mutex_unlock(&closing_lock);
}

bool call_ready(struct comm_object *comm, const char *call)
{
    if (!comm->freed)
        wait_closing(comm);
    if (!comm->box || comm->freed)
        raise_state("%s: the communicator has been freed", call);
    else if (comm->closing)
        raise_state("%s: something of this communicator is still being freed", call);
    else if (comm->busy)
        raise_state("%s: another thread is in a call on this communicator", call);
    else
        return true;
    return false;
}

bool call_begin(struct comm_object *comm, const char *call)
{
    if (!call_ready(comm, call))
        return false;
    comm->busy = true;
    interrupt_begin(comm);
    return true;
}

PyObject *object_new(PyTypeObject *type)
{
    return ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
}

void object_free(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);

    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF((PyObject *)type);
}

/* Off the list, so that other threads find it freed, before the library's object is freed. */
static void member_close(struct member *member)
{
    struct comm_object *comm = member->comm;

    member->prev->next = member->next;
    if (member->next)
        member->next->prev = member->prev;
    member->comm = NULL;
    member->close(member, comm->box);
    Py_DECREF((PyObject *)comm);
}

/* Frees those whose last reference went while the communicator was busy. */
static void free_late(struct comm_object *comm)
{
    struct member *late;

    while ((late = comm->late)) {
        comm->late = late->next_late;
        if (late->comm)
            member_close(late);
        object_free((PyObject *)late);
    }
}

void members_free(struct comm_object *comm, struct member *one)
{
    struct member *next;

    Py_INCREF((PyObject *)comm);
    comm->busy = true;
    set_closing(comm, true);
    if (one)
        member_close(one);
    free_late(comm);
    while (!one && (next = comm->members.next)) {
        Py_INCREF((PyObject *)next); /* other threads may drop the last reference while the library frees */
        member_close(next);
        Py_DECREF((PyObject *)next);
        free_late(comm); /* which take themselves off the list, too */
    }
    comm->busy = false;
    set_closing(comm, false);
    Py_DECREF((PyObject *)comm);
}

ep_status complete(const struct comm_object *comm, ep_status status)
{
    return status == EP_OK && !comm->cuda ? ep_stream_sync(comm->box->comm, NULL) : status;
}

void call_done(struct comm_object *comm)
{
    interrupt_end(comm);
    if (!comm->late) {
        comm->busy = false;
        return;
    }
    Py_INCREF((PyObject *)comm);
    set_closing(comm, true);
    free_late(comm);
    comm->busy = false;
    set_closing(comm, false);
    Py_DECREF((PyObject *)comm);
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
        if (PyLong_Check(value))
            PyErr_Format(PyExc_TypeError, "%s: %s: %R is no integer of 64 bits", call, name, value);
        else
            raise_kind(call, name, value, "an integer");
        *ret_ok = false;
    }
    return number;
}

int64_t want_within(PyObject *value, const char *call, const char *name, int64_t least, int64_t most, bool *ret_ok)
{
    int64_t number = want_int(value, call, name, ret_ok);

    if (*ret_ok && (number < least || number > most)) {
        raise_arg(most == INT64_MAX ? "%s: %s is %lld, must be %lld or more" : "%s: %s is %lld, must be %lld to %lld",
                  call, name, (long long)number, (long long)least, (long long)most);
        *ret_ok = false;
    }
    return number;
}

bool want_ints(const char *call, PyObject *const *args, const char *const *names, int n, int64_t *ret_values)
{
    bool ok = true;

    for (int i = 0; i < n && ok; i++)
        ret_values[i] = want_int(args[i], call, names[i], &ok);
    return ok;
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

static void member_dealloc(PyObject *self)
{
    struct member *member = (struct member *)self;
    struct comm_object *comm = member->comm;

    if (comm && comm->busy) {
        member->next_late = comm->late;
        comm->late = member;
        return;
    }
    if (comm)
        members_free(comm, member);
    object_free(self);
}

PyObject *member_free_method(PyObject *self, PyObject *Py_UNUSED(unused))
{
    struct member *member = (struct member *)self;

    if (member->comm && !call_ready(member->comm, "free"))
        return NULL;
    if (member->comm) /* not freed meanwhile */
        members_free(member->comm, member);
    Py_RETURN_NONE;
}

static PyObject *member_get_closed(PyObject *self, void *Py_UNUSED(unused))
{
    return PyBool_FromLong(!((struct member *)self)->comm);
}

static PyGetSetDef member_properties[] = {
    {"closed", member_get_closed, NULL, "freed?", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyTypeObject *member_type_new(PyObject *module, const char *name, size_t bytes, PyMethodDef *methods)
{
    PyType_Slot slots[] = {{Py_tp_dealloc, (void *)member_dealloc},
                           {Py_tp_methods, methods},
                           {Py_tp_getset, member_properties},
                           {0, NULL}};
    PyType_Spec spec = {name, (int)bytes, 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};

    return (PyTypeObject *)PyType_FromModuleAndSpec(module, &spec, NULL);
}
