/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dlpack_abi.h - the part of DLPack's binary interface that is used here, as its specification 1.3 defines it: a tensor
 * as a C struct, a capsule that hands one over, and the table of functions that a tensor's type offers to C code
 * (__dlpack_c_exchange_api__). Names are ours; sizes and order of the members are DLPack's.
 */
#ifndef EPKIT_PYTHON_DLPACK_ABI_H
#define EPKIT_PYTHON_DLPACK_ABI_H

#include <stdint.h>

enum { DL_CPU = 1, DL_CUDA = 2, DL_CUDA_HOST = 3 };                                         /* device types */
enum { DL_INT = 0, DL_UINT = 1, DL_FLOAT = 2, DL_BFLOAT = 4, DL_BOOL = 6, DL_E4M3FN = 10 }; /* element types */

#define DL_MAJOR 1 /* of the tables that are understood here */

struct dl_tensor {
    void *data;
    struct {
        int32_t type, id;
    } device;
    int32_t ndim;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape;
    int64_t *strides; /* in elements; NULL: contiguous */
    uint64_t byte_offset;
};

/* What a capsule named "dltensor" holds. */
struct dl_managed {
    struct dl_tensor tensor;
    void *context;
    void (*deleter)(struct dl_managed *self);
};

struct dl_exchange {
    struct {
        struct {
            uint32_t major, minor;
        } version;
        struct dl_exchange *older;
    } header;
    void *allocate;
    void *managed_from_object;
    void *managed_to_object;
    int (*tensor_from_object)(void *object, struct dl_tensor *ret_tensor); /* NULL: not offered. Borrows from object */
    int (*current_stream)(int32_t device_type, int32_t device, void **ret_stream);
};

#endif
