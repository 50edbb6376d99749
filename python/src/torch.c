/* SPDX-License-Identifier: Apache-2.0 */
/* torch.c - what calls ask of torch: new tensors, the current stream, whether they are captured. */
#include "bind.h"

#include <string.h>

/* Functions of Python, as know_torch() got them. */
static struct {
    PyObject *make;   /* make(shape, strides, dtype, device or -1 for the CPU, zeros?) */
    PyObject *fast;   /* fast(shape, strides, dtype): on the current CUDA device, outside of modes of torch; or None */
    PyObject *modes;  /* the number of modes that see what torch does */
    PyObject *fills;  /* does torch fill new tensors? */
    PyObject *device; /* the current one */
    PyObject *stream; /* stream(device): the pointer of the current one */
    PyObject *capturing;
    PyObject *part;  /* part(tensor, shape, strides, offset) */
    PyObject *quick; /* the same, outside of modes of torch; or None */
} torch;

enum { TORCH_TUPLE = 8 }; /* the most tensors that a call makes */

PyObject *know_torch(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject **const functions[] = {&torch.make,   &torch.fast,      &torch.modes, &torch.fills, &torch.device,
                                    &torch.stream, &torch.capturing, &torch.part,  &torch.quick};
    const int n = (int)(sizeof(functions) / sizeof(functions[0]));

    if (!want_args("know_torch", PyTuple_Size(args), n))
        return NULL;
    for (int i = 0; i < n; i++)
        object_keep(functions[i], PyTuple_GetItem(args, i));
    Py_RETURN_NONE;
}

/* The number, or truth, that a function returns. */
static bool ask(PyObject *function, long *ret_number)
{
    PyObject *result = PyObject_CallNoArgs(function);

    *ret_number = result ? PyLong_AsLong(result) : -1;
    Py_XDECREF(result);
    return !PyErr_Occurred();
}

bool torch_begin(const struct comm_object *comm, bool *ret_fast)
{
    long modes = 0, fills = 0, device = comm->device;
    bool cuda = comm->cuda && torch.fast != Py_None;

    if (cuda && (!ask(torch.modes, &modes) || !ask(torch.fills, &fills) || !ask(torch.device, &device)))
        return false;
    *ret_fast = cuda && !modes && !fills && device == comm->device;
    return true;
}

static PyObject *tuple_of(int n, const int64_t *values)
{
    PyObject *tuple = PyTuple_New(n);

    for (int i = 0; tuple && i < n; i++)
        PyTuple_SetItem(tuple, i, PyLong_FromLongLong(values[i]));
    return tuple;
}

static PyObject *strides_of(const struct form *form)
{
    int64_t strides[TENSOR_DIMS];

    if (form->stride[0])
        return tuple_of(form->ndim, form->stride);
    for (int d = form->ndim - 1; d >= 0; d--)
        strides[d] = d == form->ndim - 1 ? 1 : strides[d + 1] * (form->shape[d + 1] > 0 ? form->shape[d + 1] : 1);
    return tuple_of(form->ndim, strides);
}

PyObject *torch_new(const struct comm_object *comm, bool fast, PyObject *dtype, const struct form *form)
{
    PyObject *shape = tuple_of(form->ndim, form->shape), *strides = shape ? strides_of(form) : NULL, *tensor = NULL;

    if (strides && fast)
        tensor = PyObject_CallFunctionObjArgs(torch.fast, shape, strides, dtype, NULL);
    else if (strides)
        tensor = PyObject_CallFunction(torch.make, "OOOiO", shape, strides, dtype, comm->cuda ? comm->device : -1,
                                       form->clear ? Py_True : Py_False);
    Py_XDECREF(strides);
    Py_XDECREF(shape);
    return tensor;
}

PyObject *torch_out(const struct comm_object *comm, PyObject *given, const struct form *form)
{
    bool fast;

    if (given == Py_None)
        return torch_begin(comm, &fast) ? torch_new(comm, fast, tensor_dtype(TYPE_BF16), form) : NULL;
    Py_INCREF(given);
    return given;
}

/* A part of the memory of a tensor, from element `offset` on. */
static PyObject *part_of(PyObject *function, PyObject *tensor, const struct form *form, int64_t offset)
{
    PyObject *shape = tuple_of(form->ndim, form->shape), *strides = shape ? strides_of(form) : NULL, *part = NULL;

    if (strides)
        part = PyObject_CallFunction(function, "OOOL", tensor, shape, strides, (long long)offset);
    Py_XDECREF(strides);
    Py_XDECREF(shape);
    return part;
}

/* The function for parts now; NULL with an exception. */
static PyObject *part_function(void)
{
    long modes = 0;

    if (torch.quick != Py_None && !ask(torch.modes, &modes))
        return NULL;
    return torch.quick != Py_None && !modes ? torch.quick : torch.part;
}

static bool form_from(PyObject *shape, struct form *ret_form)
{
    bool ok = true;

    memset(ret_form, 0, sizeof(*ret_form));
    ret_form->ndim = (int)PyTuple_Size(shape);
    if (ret_form->ndim < 0)
        return false;
    if (ret_form->ndim > TENSOR_DIMS) {
        raise_arg("shape has %d dimensions, the most is %d", ret_form->ndim, TENSOR_DIMS);
        return false;
    }
    for (int d = 0; d < ret_form->ndim && ok; d++)
        ret_form->shape[d] = want_int(PyTuple_GetItem(shape, d), "shape", "size", &ok);
    return ok;
}

PyObject *torch_parts(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *function = part_function(), *parts[TORCH_TUPLE] = {NULL};
    const int n = (int)(nargs / 2);
    bool ok = true;

    if (!function)
        return NULL;
    if (nargs % 2 != 1 || n > TORCH_TUPLE)
        return PyErr_Format(PyExc_TypeError, "parts: takes a tensor, and a shape and an offset for each part, up to %d",
                            TORCH_TUPLE);
    for (int i = 0; i < n && ok; i++) {
        int64_t offset = want_int(args[2 * i + 2], "parts", "offset", &ok);
        struct form form;

        ok = ok && form_from(args[2 * i + 1], &form) && (parts[i] = part_of(function, args[0], &form, offset));
    }
    return tuple_from(n, parts, ok);
}

PyObject *torch_head(PyObject *tensor, int64_t n)
{
    struct form form = {0};
    PyObject *function;
    struct tensor is;

    if (tensor == Py_None) {
        Py_INCREF(tensor);
        return tensor;
    }
    if (!tensor_read(tensor, &is) || is.ndim < 1 || is.ndim > TENSOR_DIMS)
        return PyErr_Occurred() ? NULL : raise_arg("a tensor has %d dimensions", is.ndim);
    form.ndim = is.ndim;
    memcpy(form.shape, is.shape, sizeof(form.shape));
    memcpy(form.stride, is.stride, sizeof(form.stride));
    form.shape[0] = n;
    function = part_function();
    return function ? part_of(function, tensor, &form, 0) : NULL;
}

bool stream_get(const struct comm_object *comm, PyObject *stream, void **ret_stream)
{
    PyObject *pointer = NULL;

    *ret_stream = NULL;
    if (!comm->cuda)
        return true;
    if (stream == Py_None)
        pointer = PyObject_CallFunction(torch.stream, "i", comm->device);
    else
        pointer = PyObject_GetAttrString(stream, "cuda_stream");
    if (pointer)
        *ret_stream = PyLong_AsVoidPtr(pointer);
    Py_XDECREF(pointer);
    return !PyErr_Occurred();
}

bool is_captured(const struct comm_object *comm, bool *ret_captured)
{
    long captured = 0;

    if (comm->cuda && !ask(torch.capturing, &captured))
        return false;
    *ret_captured = captured;
    return true;
}

/* A tuple is filled at once: code of Python that runs while objects are made could see it, and hold it. */
PyObject *tuple_from(int n, PyObject **objects, bool ok)
{
    PyObject *tuple = ok ? PyTuple_New(n) : NULL;

    for (int i = 0; i < n; i++) {
        if (!tuple) {
            Py_XDECREF(objects[i]);
            continue;
        }
        if (!objects[i])
            Py_INCREF(Py_None);
        PyTuple_SetItem(tuple, i, objects[i] ? objects[i] : Py_None);
    }
    return tuple;
}

PyObject *torch_tuple(const struct comm_object *comm, int n, const enum tensor_type *types, const struct form *forms,
                      struct tensor *ret_tensors)
{
    PyObject *tensors[TORCH_TUPLE] = {NULL};
    bool fast = false, ok = torch_begin(comm, &fast);

    for (int i = 0; i < n && ok; i++) {
        if (types[i] == TYPE_OTHER)
            continue;
        tensors[i] = torch_new(comm, fast, tensor_dtype(types[i]), &forms[i]);
        ok = tensors[i] && tensor_made(tensors[i], types[i], &forms[i], place_of(comm), &ret_tensors[i]);
    }
    return tuple_from(n, tensors, ok);
}

/* Comm.new(shape, dtype): a new tensor, contiguous, on the communicator's device. */
PyObject *torch_new_method(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    const struct comm_object *comm = (const struct comm_object *)self;
    struct form form;
    bool fast;

    if (!want_args("new", nargs, 2) || !torch_begin(comm, &fast) || !form_from(args[0], &form))
        return NULL;
    return torch_new(comm, fast, args[1], &form);
}

/* Takes any arguments, and does nothing. */
PyObject *torch_nothing(PyObject *Py_UNUSED(module), PyObject *const *Py_UNUSED(args), Py_ssize_t Py_UNUSED(nargs))
{
    Py_RETURN_NONE;
}
