/* SPDX-License-Identifier: Apache-2.0 */
/* member.c - what every call on a communicator begins and ends with, and what belongs to one: plans, low latency. */
#include "bind.h"

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

void object_free(PyObject *self)
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
