/* SPDX-License-Identifier: Apache-2.0 */
/* memory.c - the library's side of a communicator, which may outlive the Python object, and its memory as tensors. */
#include "bind.h"

#include "dlpack_abi.h"

#include <stdlib.h>

void box_release(struct comm_box *box)
{
    if (atomic_fetch_sub(&box->holders, 1) > 1)
        return;
    for (int i = 0; i < box->n_kept; i++)
        ep_ll_free(box->kept[i]);
    free(box->kept);
    ep_comm_free(box->comm);
    free(box);
}

struct comm_box *box_new(void)
{
    struct comm_box *box = calloc(1, sizeof(*box));

    if (box)
        atomic_init(&box->holders, 1);
    else
        PyErr_NoMemory();
    return box;
}

struct export
{
    struct dl_managed managed; /* first, so that one is the other */
    struct comm_box *box;
    int64_t shape[1];
};

static void export_delete(struct dl_managed *managed)
{
    struct export *export = (struct export *)managed;

    box_release(export->box);
    free(export);
}

/* Of a capsule that never became a tensor: it still has its first name then. */
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
    atomic_fetch_add(&comm->box->holders, 1);
    return capsule;
}
