/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tensor.h - what a tensor of Python is, for C: where its data are, its element type, shape and strides.
 *
 * A tensor whose type offers DLPack's C exchange table is read in some 50 ns. Any other one that has data_ptr(), dtype,
 * shape, stride() and device is read through these, which takes microseconds.
 */
#ifndef EPKIT_PYTHON_TENSOR_H
#define EPKIT_PYTHON_TENSOR_H

#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030A0000
#endif
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>

enum { TENSOR_DIMS = 4, TENSOR_ALIGNMENT = 16 }; /* bytes, of every pointer that is passed to the library */

enum tensor_type { TYPE_OTHER, TYPE_BF16, TYPE_F8, TYPE_F32, TYPE_I32, TYPE_I64, TYPE_U8, TYPE_BOOL, TYPES };

/* Sets of types. */
#define IS(type) (1u << TYPE_##type)

struct tensor {
    void *data; /* never NULL for a tensor, also without elements; NULL for None */
    enum tensor_type type;
    uint8_t code, bits;      /* of DLPack; 0, 0 where they are not known */
    int device_type, device; /* DL_CPU, DL_CUDA */
    int ndim;                /* may be more than TENSOR_DIMS; then shape and stride are not set */
    int64_t shape[TENSOR_DIMS], stride[TENSOR_DIMS];
};

/* Where tensors have to be: host memory, or a CUDA device (-1: any). */
struct place {
    bool cuda;
    int device;
};

/* What a call wants of one of its tensors. */
struct want {
    const char *call, *name;
    unsigned types; /* IS(..) | IS(..) */
    int ndim;
    int64_t shape[TENSOR_DIMS]; /* -1: any. AT_LEAST(n): n or more */
    bool strided;               /* any strides; otherwise contiguous */
    bool optional;              /* None is allowed */
};

#define AT_LEAST(n) (-2 - (n))

/* Registers a dtype object of Python for tensors without the exchange table: "bfloat16" and so on. */
int tensor_know_dtype(PyObject *dtype, const char *name);

/* False with an exception set that names the call, the argument and what is wrong with it. */
bool tensor_get(PyObject *object, const struct want *want, struct place place, struct tensor *ret_tensor);

/* METH_FASTCALL: True if each is None, or a tensor that a call can read as it is: it begins at a multiple of 16 bytes,
 * takes no part in gradients, and its memory holds the values, not the negated ones (torch.Tensor.is_neg()). */
PyObject *is_ready(PyObject *module, PyObject *const *tensors, Py_ssize_t n);

/* A tensor that a call has made itself: as tensor_get(), which would say the same. */
struct form;
bool tensor_made(PyObject *object, enum tensor_type type, const struct form *form, struct place place,
                 struct tensor *ret_tensor);

/* What a tensor is, whatever that may be; false with an exception. */
bool tensor_read(PyObject *object, struct tensor *ret_tensor);

const char *tensor_type_name(enum tensor_type type);
PyObject *tensor_dtype(enum tensor_type type); /* the dtype object that tensor_know_dtype() got; borrowed */

#endif
