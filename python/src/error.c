/* SPDX-License-Identifier: Apache-2.0 */
#include "bind.h"

#include <ctype.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

/* By the hundreds of a status. */
enum { BASE, ARGUMENT, RESOURCE, PEER, GROUP, UNSUPPORTED, CLASSES };

static PyObject *classes[CLASSES];

static const struct {
    const char *name, *doc;
} texts[CLASSES] = {
    {"epkit.Error",
     "A call of libepkit failed. Attributes: status (number), name (\"EP_E_TIMEOUT\"), hint (what to do)."},
    {"epkit.ArgumentError",
     "An argument or the state of an object does not allow the call (status 1xx). Also a ValueError."},
    {"epkit.ResourceError", "The machine or the device cannot do it: memory, system calls, driver (status 2xx)."},
    {"epkit.PeerError", "Another rank is late, dead or has left (status 3xx). The text names it."},
    {"epkit.GroupError", "The ranks disagree, or the group was aborted (status 4xx). The text names the rank."},
    {"epkit.UnsupportedError",
     "This backend, or this machine, does not have what the call needs (status 203). Also a NotImplementedError."},
};

static int class_new(int c)
{
    PyObject *bases = c == BASE          ? PyTuple_Pack(1, PyExc_RuntimeError)
                      : c == ARGUMENT    ? PyTuple_Pack(2, classes[BASE], PyExc_ValueError)
                      : c == UNSUPPORTED ? PyTuple_Pack(2, classes[RESOURCE], PyExc_NotImplementedError)
                                         : PyTuple_Pack(1, classes[BASE]);

    if (!bases)
        return -1;
    classes[c] = PyErr_NewExceptionWithDoc(texts[c].name, texts[c].doc, bases, NULL);
    Py_DECREF(bases);
    return classes[c] ? 0 : -1;
}

int errors_init(PyObject *module)
{
    for (int c = 0; c < CLASSES; c++) {
        if (!classes[c] && class_new(c) < 0)
            return -1;
        Py_INCREF(classes[c]);
        if (PyModule_AddObject(module, strchr(texts[c].name, '.') + 1, classes[c]) < 0)
            return -1;
    }
    return 0;
}

static int set_attribute(PyObject *object, const char *name, PyObject *value)
{
    int failed = value ? PyObject_SetAttrString(object, name, value) : -1;

    Py_XDECREF(value);
    return failed;
}

/* Calls and fields of the library, and what they are in Python. The text may be of another rank. */
static const struct {
    const char *in_c, *in_python;
} words[] = {
    {"ep_comm_new", "Communicator"},
    {"ep_comm_abort", "Communicator.abort"},
    {"ep_comm_allgather", "Communicator.allgather_bytes"},
    {"ep_comm_barrier", "Communicator.barrier"},
    {"ep_comm_get_failed", "Communicator.failed_ranks"},
    {"ep_comm_regroup", "Communicator.regroup"},
    {"ep_comm_free", "Communicator.free"},
    {"ep_alloc", "Communicator.empty"},
    {"ep_plan_layout", "Communicator.layout"},
    {"ep_plan_new", "Communicator.plan"},
    {"ep_plan_update", "Plan.update"},
    {"ep_plan_get_metadata", "Plan.metadata"},
    {"ep_plan_get_sources", "Plan.sources"},
    {"ep_dispatch", "Plan.dispatch"},
    {"ep_combine", "Plan.combine"},
    {"ep_ll_new", "Communicator.low_latency"},
    {"ep_ll_renew", "LowLatency.renew"},
    {"ep_ll_dispatch", "LowLatency.dispatch"},
    {"ep_ll_combine", "LowLatency.combine"},
    {"ep_ll_finish", "finish"},
    {"ep_ll_get_combine_buffer", "LowLatency.combine_buffer"},
    {"ep_stream_sync", "Communicator.synchronize"},
    {"n_experts", "num_experts"},
    {"expert_alignment", "alignment"},
    {"timeout_ms", "timeout (in ms)"},
    {"EP_PLAN_EXPANDED", "expanded=True"},
    {"EP_PLAN_ZERO_PADDING", "zero_padding=True"},
    {"EP_COMBINE_BY_CHOICE", "by_choice=True"},
    {"EP_COMBINE_ROUND_PARTIAL", "round_partial=True"},
    {"EP_COMM_CHECK_VALUES", "check_values=True"},
    {"EP_COMM_DROP_ABSENT", "drop_absent=True"},
    {"EP_LL_MASK_DEAD", "mask_dead=True"},
    {"EP_LL_RECV_HOOK", "hook=True"},
    {"EP_LL_ZERO_COPY", "zero_copy=True"},
    {"EP_LL_NO_PARTIAL_REDUCE", "exact=True"},
};

static bool is_word(char c)
{
    return isalnum((unsigned char)c) || c == '_';
}

/* Copies `text` with the words of Python. */
static void translate(const char *text, char *ret_text, size_t bytes)
{
    const char *begin = text;
    size_t n = 0;

    while (*text && n + 1 < bytes) {
        size_t found = 0, length = 0;

        for (; found < sizeof(words) / sizeof(words[0]); found++) {
            length = strlen(words[found].in_c);
            if (!strncmp(text, words[found].in_c, length) && !is_word(text[length]) &&
                (text == begin || !is_word(text[-1])))
                break;
        }
        if (found == sizeof(words) / sizeof(words[0])) {
            ret_text[n++] = *text++;
            continue;
        }
        n += (size_t)snprintf(ret_text + n, bytes - n, "%s", words[found].in_python);
        n = n < bytes ? n : bytes - 1;
        text += length;
    }
    ret_text[n] = '\0';
}

static PyObject *raise_text(ep_status status, const char *reason)
{
    int hundreds = (int)status / 100;
    PyObject *class = classes[status == EP_E_UNSUPPORTED                  ? UNSUPPORTED
                              : hundreds >= ARGUMENT && hundreds <= GROUP ? hundreds
                                                                          : BASE];
    char hint[256];
    PyObject *text, *error;

    translate(ep_status_hint(status), hint, sizeof(hint));
    text = PyUnicode_FromFormat("%s: %s%s%s%s", ep_status_name(status), reason[0] ? reason : ep_status_text(status),
                                hint[0] ? " (" : "", hint, hint[0] ? ")" : "");
    error = text ? PyObject_CallFunctionObjArgs(class, text, NULL) : NULL;

    Py_XDECREF(text);
    if (error && !set_attribute(error, "status", PyLong_FromLong(status)) &&
        !set_attribute(error, "name", PyUnicode_FromString(ep_status_name(status))) &&
        !set_attribute(error, "hint", PyUnicode_FromString(hint)))
        PyErr_SetObject(class, error);
    Py_XDECREF(error);
    return NULL;
}

PyObject *raise_status(ep_status status)
{
    char reason[2048]; /* before code of Python runs, which may call the library */

    translate(ep_last_error(), reason, sizeof(reason));
    return PyErr_CheckSignals() < 0 ? NULL : raise_text(status, reason);
}

PyObject *result_of(ep_status status)
{
    if (status != EP_OK)
        return raise_status(status);
    Py_RETURN_NONE;
}

PyObject *made_or(ep_status status, PyObject *made)
{
    if (status == EP_OK)
        return made;
    raise_status(status);
    Py_DECREF(made);
    return NULL;
}

static PyObject *raise_format(ep_status status, const char *format, va_list args)
{
    char text[2048]; /* texts of the library among the arguments have up to 512 */

    vsnprintf(text, sizeof(text), format, args);
    return raise_text(status, text);
}

PyObject *raise_arg(const char *format, ...)
{
    va_list args;

    va_start(args, format);
    raise_format(EP_E_ARG, format, args);
    va_end(args);
    return NULL;
}

PyObject *raise_state(const char *format, ...)
{
    va_list args;

    va_start(args, format);
    raise_format(EP_E_STATE, format, args);
    va_end(args);
    return NULL;
}

void raise_kind(const char *call, const char *name, PyObject *value, const char *wanted)
{
    PyObject *type = PyObject_GetAttrString((PyObject *)Py_TYPE(value), "__name__");

    if (type)
        PyErr_Format(PyExc_TypeError, "%s: %s is a %S, must be %s", call, name, type, wanted);
    Py_XDECREF(type);
}

ep_status status_of_exception(void)
{
    PyObject *type, *value, *trace, *number;
    ep_status status = EP_E_SYSTEM;

    if (PyErr_ExceptionMatches(PyExc_TimeoutError))
        return EP_E_TIMEOUT;
    if (PyErr_ExceptionMatches(PyExc_MemoryError))
        return EP_E_MEMORY;
    if (!PyErr_ExceptionMatches(classes[BASE]))
        return EP_E_SYSTEM;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    number = value ? PyObject_GetAttrString(value, "status") : NULL;
    if (number && PyLong_Check(number))
        status = (ep_status)PyLong_AsLong(number);
    Py_XDECREF(number);
    PyErr_Clear();
    PyErr_Restore(type, value, trace);
    return status;
}
