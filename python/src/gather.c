/* SPDX-License-Identifier: Apache-2.0 */
/* gather.c - the all-gather in Python that a communicator is made over. */
#include "bind.h"

#include <string.h>

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

ep_status gather_bytes(void *context, const void *mine, size_t bytes, int timeout_ms, void *ret_all)
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

void raise_with_cause(ep_status status, struct gather *gather)
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
