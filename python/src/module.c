/* SPDX-License-Identifier: Apache-2.0 */
/* module.c - the module epkit._C. */
#include "plan.h"

static PyObject *versions(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    return Py_BuildValue("(si)", ep_version(), EP_VERSION_MAJOR * 10000 + EP_VERSION_MINOR * 100 + EP_VERSION_PATCH);
}

static PyObject *know_dtype(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *dtype;
    const char *name;

    if (!PyArg_ParseTuple(args, "Os:know_dtype", &dtype, &name) || tensor_know_dtype(dtype, name) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"versions", versions, METH_NOARGS, "(version of libepkit as loaded, number of the version compiled for)"},
    {"clear", clear_memory, METH_VARARGS, "clear(address, bytes): zeros in private memory of the host"},
    {"watch_interrupt", watch_interrupt, METH_NOARGS, "where SIGINT raises KeyboardInterrupt it also ends a wait"},
    {"know_dtype", know_dtype, METH_VARARGS, "know_dtype(dtype object, name)"},
    {"know_torch", know_torch, METH_VARARGS, "functions that calls use: see torch.c"},
    FAST("parts", torch_parts),
    FAST("nothing", torch_nothing),
    {"know_rows", know_rows, METH_O, "know_rows(type): the named tuple that a dispatch returns"},
    FAST("is_ready", is_ready),
    {NULL, NULL, 0, NULL},
};

static int add_type(PyObject *module, const char *name, PyTypeObject *type)
{
    if (!type)
        return -1;
    Py_INCREF((PyObject *)type);
    return PyModule_AddObject(module, name, (PyObject *)type);
}

/* Warnings, which no status tells: a slower path, a rank that is left out. */
static void print_warning(void *Py_UNUSED(unused), ep_log_level level, const char *line)
{
    if (level == EP_LOG_WARNING)
        fprintf(stderr, "epkit: %s\n", line);
}

/*
 * Runs for each import of the module. Types and exceptions are made once for the process: libepkit has one state for
 * it, and torch, whose tensors are taken here, lives in the main interpreter alone.
 */
static int fill_module(PyObject *module)
{
    if (PyInterpreterState_GetID(PyInterpreterState_Get()) != 0) {
        PyErr_SetString(PyExc_ImportError,
                        "epkit: subinterpreters are not supported: import it in the main interpreter");
        return -1;
    }
    if (!comm_type) {
        ep_set_log(print_warning, NULL);
        comm_type = comm_type_new(module);
        plan_type = plan_type_new(module);
        ll_type = ll_type_new(module);
    }
    if (errors_init(module) < 0 || add_type(module, "Comm", comm_type) < 0 || add_type(module, "Plan", plan_type) < 0)
        return -1;
    return add_type(module, "LowLatency", ll_type);
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)fill_module},
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    "epkit._C",
    "libepkit for Python; use the package epkit.",
    0,
    functions,
    slots,
    NULL,
    NULL,
    NULL,
};

PyMODINIT_FUNC PyInit__C(void);

PyMODINIT_FUNC PyInit__C(void)
{
    return PyModuleDef_Init(&definition);
}
