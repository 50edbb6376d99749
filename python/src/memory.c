/* SPDX-License-Identifier: Apache-2.0 */
/* memory.c - the library's side of a communicator, which may outlive the Python object, and its memory as tensors. */
#include "bind.h"

#include "dlpack_abi.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

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

/* Whether the kernel has taken the pages back: they are zeros again, and cost nothing until they are accessed. */
static bool return_pages(char *begin, size_t bytes)
{
    volatile char *first = begin, *last = begin + bytes - 1;

    /* Pages of shared memory, which an allocator may have chosen, keep what was written; so does half a huge page. */
    *first = *last = 1;
    return madvise(begin, bytes, MADV_DONTNEED) == 0 && *first == 0 && *last == 0;
}

PyObject *clear_memory(PyObject *Py_UNUSED(module), PyObject *args)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), head, whole;
    unsigned long long address, bytes;
    char *memory;

    if (!PyArg_ParseTuple(args, "KK:clear", &address, &bytes))
        return NULL;
    memory = (char *)(uintptr_t)address;
    head = (page - (size_t)address % page) % page;
    whole = bytes > head ? ((size_t)bytes - head) / page * page : 0;
    Py_BEGIN_ALLOW_THREADS; /* gigabytes take a while */
    if (whole && return_pages(memory + head, whole)) {
        memset(memory, 0, head);
        memset(memory + head + whole, 0, (size_t)bytes - head - whole);
    } else {
        memset(memory, 0, (size_t)bytes);
    }
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}
