/* SPDX-License-Identifier: Apache-2.0 */
#include "tensor.h"

#include "bind.h"
#include "dlpack_abi.h"

#include <stdio.h>
#include <string.h>

static const struct {
    const char *name;
    uint8_t code, bits;
} types[TYPES] = {
    [TYPE_OTHER] = {"another type", 0xff, 0},    [TYPE_BF16] = {"bfloat16", DL_BFLOAT, 16},
    [TYPE_F8] = {"float8_e4m3fn", DL_E4M3FN, 8}, [TYPE_F32] = {"float32", DL_FLOAT, 32},
    [TYPE_I32] = {"int32", DL_INT, 32},          [TYPE_I64] = {"int64", DL_INT, 64},
    [TYPE_U8] = {"uint8", DL_UINT, 8},           [TYPE_BOOL] = {"bool", DL_BOOL, 8},
};

static PyObject *dtypes[TYPES]; /* dtype objects of Python, for tensors without the table */

/* A tensor without elements has no address. The library asks for one where a pointer says "wanted". */
static uint64_t nothing[2] __attribute__((aligned(64)));

/* The last type that was seen, and its table: nearly always torch.Tensor. Borrowed; tables live as long as the process.
 */
static PyTypeObject *seen;
static const struct dl_exchange *seen_table;

const char *tensor_type_name(enum tensor_type type)
{
    return types[type].name;
}

PyObject *tensor_dtype(enum tensor_type type)
{
    return dtypes[type];
}

int tensor_know_dtype(PyObject *dtype, const char *name)
{
    for (int t = 1; t < TYPES; t++)
        if (!strcmp(types[t].name, name)) {
            object_keep(&dtypes[t], dtype);
            return 0;
        }
    PyErr_Format(PyExc_ValueError, "no element type %s", name);
    return -1;
}

static const struct dl_exchange *table_of(PyTypeObject *type)
{
    const struct dl_exchange *table = NULL;
    PyObject *capsule, *before = (PyObject *)seen;

    if (type == seen)
        return seen_table;
    capsule = PyObject_GetAttrString((PyObject *)type, "__dlpack_c_exchange_api__");
    if (capsule)
        table = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    PyErr_Clear();
    Py_XDECREF(capsule);
    if (table && (table->header.version.major != DL_MAJOR || !table->tensor_from_object))
        table = NULL;
    /* A reference, so that no other type can come to lie at the same address. */
    Py_INCREF((PyObject *)type);
    seen = type;
    seen_table = table;
    Py_XDECREF(before);
    return table;
}

static void copy_dims(const int64_t *shape, const int64_t *strides, struct tensor *tensor)
{
    int64_t stride = 1;

    for (int d = tensor->ndim - 1; d >= 0; d--) {
        tensor->shape[d] = shape[d];
        tensor->stride[d] = strides ? strides[d] : stride;
        stride *= shape[d];
    }
}

static bool read_table(const struct dl_exchange *table, PyObject *object, struct tensor *tensor)
{
    struct dl_tensor dl;

    memset(&dl, 0, sizeof(dl));
    if (table->tensor_from_object(object, &dl) != 0) {
        PyErr_Clear(); /* a subclass or a layout that the table does not serve: its attributes may do */
        return false;
    }
    tensor->data = (char *)dl.data + dl.byte_offset;
    tensor->type = TYPE_OTHER;
    tensor->code = dl.dtype.code;
    tensor->bits = dl.dtype.bits;
    for (int t = 1; t < TYPES && tensor->type == TYPE_OTHER; t++)
        if (types[t].code == dl.dtype.code && types[t].bits == dl.dtype.bits && dl.dtype.lanes == 1)
            tensor->type = (enum tensor_type)t;
    tensor->device_type = dl.device.type == DL_CUDA_HOST ? DL_CPU : dl.device.type;
    tensor->device = dl.device.id;
    tensor->ndim = dl.ndim;
    if (dl.ndim <= TENSOR_DIMS)
        copy_dims(dl.shape, dl.strides, tensor);
    return true;
}

/* Integers of a sequence; false with an exception. */
static bool read_integers(PyObject *sequence, int n, int64_t *ret_values)
{
    for (int i = 0; i < n; i++) {
        PyObject *item = PySequence_GetItem(sequence, i);

        if (!item)
            return false;
        ret_values[i] = PyLong_AsLongLong(item);
        Py_DECREF(item);
        if (ret_values[i] == -1 && PyErr_Occurred())
            return false;
    }
    return true;
}

static bool read_device(PyObject *object, struct tensor *tensor)
{
    PyObject *device = PyObject_GetAttrString(object, "device");
    PyObject *type = device ? PyObject_GetAttrString(device, "type") : NULL;
    PyObject *index = type ? PyObject_GetAttrString(device, "index") : NULL;

    if (index) {
        tensor->device_type = PyUnicode_CompareWithASCIIString(type, "cpu") == 0    ? DL_CPU
                              : PyUnicode_CompareWithASCIIString(type, "cuda") == 0 ? DL_CUDA
                                                                                    : 0;
        tensor->device = index == Py_None ? 0 : (int)PyLong_AsLong(index);
    }
    Py_XDECREF(index);
    Py_XDECREF(type);
    Py_XDECREF(device);
    return !PyErr_Occurred();
}

/* Through data_ptr(), dtype, shape, stride() and device. */
static bool read_attributes(PyObject *object, struct tensor *tensor)
{
    PyObject *address = PyObject_CallMethod(object, "data_ptr", NULL);
    PyObject *dtype = address ? PyObject_GetAttrString(object, "dtype") : NULL;
    PyObject *shape = dtype ? PyObject_GetAttrString(object, "shape") : NULL;
    PyObject *strides = shape ? PyObject_CallMethod(object, "stride", NULL) : NULL;
    int64_t both[2][TENSOR_DIMS];
    bool ok = false;

    if (strides && read_device(object, tensor)) {
        tensor->data = PyLong_AsVoidPtr(address);
        tensor->type = TYPE_OTHER;
        tensor->code = tensor->bits = 0;
        for (int t = 1; t < TYPES; t++)
            if (dtypes[t] == dtype)
                tensor->type = (enum tensor_type)t;
        tensor->ndim = (int)PySequence_Size(shape);
        ok = !PyErr_Occurred();
        if (ok && tensor->ndim <= TENSOR_DIMS) {
            ok = read_integers(shape, tensor->ndim, both[0]) && read_integers(strides, tensor->ndim, both[1]);
            if (ok)
                copy_dims(both[0], both[1], tensor);
        }
    }
    Py_XDECREF(strides);
    Py_XDECREF(shape);
    Py_XDECREF(dtype);
    Py_XDECREF(address);
    return ok;
}

/* "[3, any, 8]" */
static void write_shape(char *ret_text, size_t size, const int64_t *shape, int ndim)
{
    size_t at = 0;

    at += (size_t)snprintf(ret_text, size, "[");
    for (int d = 0; d < ndim && at < size; d++) {
        const char *comma = d ? ", " : "";

        if (shape[d] == -1)
            at += (size_t)snprintf(ret_text + at, size - at, "%sany", comma);
        else if (shape[d] < -1)
            at += (size_t)snprintf(ret_text + at, size - at, "%s>=%lld", comma, (long long)(-2 - shape[d]));
        else
            at += (size_t)snprintf(ret_text + at, size - at, "%s%lld", comma, (long long)shape[d]);
    }
    if (at < size)
        snprintf(ret_text + at, size - at, "]");
}

/* What `object` says of its type: "torch.float64". */
static void write_dtype(char *ret_text, size_t size, PyObject *object)
{
    PyObject *dtype = PyObject_GetAttrString(object, "dtype");
    PyObject *text = dtype ? PyObject_Str(dtype) : NULL;
    PyObject *bytes = text ? PyUnicode_AsEncodedString(text, "utf-8", "replace") : NULL;

    snprintf(ret_text, size, "%s", bytes ? PyBytes_AsString(bytes) : types[TYPE_OTHER].name);
    Py_XDECREF(bytes);
    Py_XDECREF(text);
    Py_XDECREF(dtype);
    PyErr_Clear();
}

/* "float64", also of a type that nothing here takes. `object`: the tensor. */
static void write_type(char *ret_text, size_t size, const struct tensor *tensor, PyObject *object)
{
    static const char *const names[] = {"int", "uint", "float", "opaque", "bfloat", "complex"};

    if (tensor->type == TYPE_OTHER && tensor->bits == 0)
        write_dtype(ret_text, size, object);
    else if (tensor->type != TYPE_OTHER)
        snprintf(ret_text, size, "%s", types[tensor->type].name);
    else if (tensor->code < sizeof(names) / sizeof(names[0]))
        snprintf(ret_text, size, "%s%d", names[tensor->code], tensor->bits);
    else
        snprintf(ret_text, size, "another type of %d bits", tensor->bits);
}

static bool refuse_type(const struct want *want, const struct tensor *tensor, PyObject *object)
{
    char text[128] = "", is[32];
    size_t at = 0;

    for (int t = 1; t < TYPES; t++)
        if (want->types & 1u << t)
            at += (size_t)snprintf(text + at, sizeof(text) - at, "%s%s", at ? " or " : "", types[t].name);
    write_type(is, sizeof(is), tensor, object);
    raise_arg("%s: %s: dtype is %s, must be %s", want->call, want->name, is, text);
    return false;
}

static bool refuse_shape(const struct want *want, const struct tensor *tensor)
{
    char is[128], must[128];

    write_shape(must, sizeof(must), want->shape, want->ndim);
    if (tensor->ndim > TENSOR_DIMS)
        snprintf(is, sizeof(is), "one of %d dimensions", tensor->ndim);
    else
        write_shape(is, sizeof(is), tensor->shape, tensor->ndim);
    raise_arg("%s: %s: shape is %s, must be %s", want->call, want->name, is, must);
    return false;
}

static bool check_shape(const struct want *want, const struct tensor *tensor)
{
    if (tensor->ndim != want->ndim)
        return refuse_shape(want, tensor);
    for (int d = 0; d < want->ndim; d++)
        if (tensor->shape[d] < 0 ||
            (want->shape[d] >= 0 ? tensor->shape[d] != want->shape[d]
                                 : want->shape[d] < -1 && tensor->shape[d] < -2 - want->shape[d]))
            return refuse_shape(want, tensor);
    return true;
}

static int64_t count_elements(const struct tensor *tensor)
{
    int64_t elements = 1;

    for (int d = 0; d < tensor->ndim; d++)
        elements *= tensor->shape[d];
    return elements;
}

static bool check_contiguous(const struct want *want, const struct tensor *tensor)
{
    int64_t stride = 1, elements = count_elements(tensor);

    for (int d = tensor->ndim - 1; d >= 0 && elements > 1; d--) {
        if (tensor->shape[d] > 1 && tensor->stride[d] != stride) {
            char strides[128];

            write_shape(strides, sizeof(strides), tensor->stride, tensor->ndim);
            raise_arg("%s: %s: strides are %s, must be contiguous", want->call, want->name, strides);
            return false;
        }
        stride *= tensor->shape[d];
    }
    return true;
}

static bool check_place(const struct want *want, const struct tensor *tensor, struct place place)
{
    const char *is = tensor->device_type == DL_CUDA ? "cuda" : tensor->device_type == DL_CPU ? "cpu" : "another device";

    if (tensor->device_type == (place.cuda ? DL_CUDA : DL_CPU) &&
        (!place.cuda || place.device < 0 || tensor->device == place.device))
        return true;
    if (place.cuda)
        raise_arg("%s: %s: device is %s:%d, but the communicator's is cuda:%d", want->call, want->name, is,
                  tensor->device, place.device);
    else
        raise_arg("%s: %s: device is %s:%d, but the communicator's is cpu", want->call, want->name, is, tensor->device);
    return false;
}

bool tensor_read(PyObject *object, struct tensor *ret_tensor)
{
    const struct dl_exchange *table = table_of(Py_TYPE(object));

    return (table && read_table(table, object, ret_tensor)) || read_attributes(object, ret_tensor);
}

bool tensor_get(PyObject *object, const struct want *want, struct place place, struct tensor *ret_tensor)
{
    if (object == Py_None) {
        memset(ret_tensor, 0, sizeof(*ret_tensor));
        if (!want->optional)
            raise_kind(want->call, want->name, object, "a tensor");
        return want->optional;
    }
    if (!tensor_read(object, ret_tensor)) {
        PyErr_Clear();
        raise_kind(want->call, want->name, object, "a tensor with data in memory");
        return false;
    }
    if (!(want->types & 1u << ret_tensor->type) || ret_tensor->type == TYPE_OTHER)
        return refuse_type(want, ret_tensor, object);
    if (!check_place(want, ret_tensor, place) || !check_shape(want, ret_tensor) ||
        (!want->strided && !check_contiguous(want, ret_tensor)))
        return false;
    if (!ret_tensor->data && count_elements(ret_tensor) > 0) {
        raise_arg("%s: %s: has no memory: it is a fake tensor, or its storage has been resized to nothing", want->call,
                  want->name);
        return false;
    }
    if (!ret_tensor->data)
        ret_tensor->data = nothing;
    return true;
}

bool tensor_made(PyObject *object, enum tensor_type type, const struct form *form, struct place place,
                 struct tensor *ret_tensor)
{
    struct want want = {.call = "epkit", .name = "a new tensor", .types = 1u << type, .ndim = form->ndim};

    want.strided = form->stride[0] != 0;
    memcpy(want.shape, form->shape, sizeof(want.shape));
    return tensor_get(object, &want, place, ret_tensor);
}

/* 1, 0, or -1 with an exception */
static int is_true(PyObject *object, PyObject *name, bool call)
{
    PyObject *value = call ? PyObject_CallMethodObjArgs(object, name, NULL) : PyObject_GetAttr(object, name);
    int result = value ? PyObject_IsTrue(value) : -1;

    Py_XDECREF(value);
    return result;
}

/* 1, 0, or -1 with an exception */
static int is_one_ready(PyObject *object)
{
    static PyObject *requires_grad, *is_neg;
    const struct dl_exchange *table;
    struct tensor tensor;
    int not_ready;

    if (object == Py_None)
        return 1;
    if (!is_neg && (!(requires_grad = PyUnicode_InternFromString("requires_grad")) ||
                    !(is_neg = PyUnicode_InternFromString("is_neg"))))
        return -1;
    table = table_of(Py_TYPE(object));
    if (!table || !read_table(table, object, &tensor) || (uintptr_t)tensor.data % TENSOR_ALIGNMENT)
        return 0;
    not_ready = is_true(object, requires_grad, false);
    if (!not_ready && tensor.type == TYPE_F32)
        not_ready = is_true(object, is_neg, true);
    if (not_ready < 0 && PyErr_ExceptionMatches(PyExc_AttributeError)) { /* a tensor of another library */
        PyErr_Clear();
        not_ready = 1;
    }
    return not_ready < 0 ? -1 : !not_ready;
}

PyObject *is_ready(PyObject *Py_UNUSED(module), PyObject *const *tensors, Py_ssize_t n)
{
    int ready = 1;

    for (Py_ssize_t i = 0; i < n && ready > 0; i++)
        ready = is_one_ready(tensors[i]);
    return ready < 0 ? NULL : PyBool_FromLong(ready);
}
