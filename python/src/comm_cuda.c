/* SPDX-License-Identifier: Apache-2.0 */
/* comm_cuda.c - calls of the type Comm that epkit/cuda.h has. */
#include "bind.h"

#include <dlfcn.h>
#include <stdio.h>

/* A function of libepkit-cuda, which libepkit has loaded when there is a communicator of that backend. */
static void *cuda_function(const char *name)
{
    char file[64];
    void *module;

    snprintf(file, sizeof(file), "libepkit-cuda.so.%d", EP_VERSION_MAJOR);
    module = dlopen(file, RTLD_NOW | RTLD_NOLOAD);
    return module ? dlsym(module, name) : NULL;
}

/* call_begin(), and the function that the call needs where the backend is that of CUDA. */
static bool cuda_begin(struct comm_object *comm, const char *call, const char *name, void **function)
{
    if (!call_begin(comm, call))
        return false;
    if (comm->cuda && !*function)
        *function = cuda_function(name);
    if (!comm->cuda || *function)
        return true;
    call_done(comm);
    raise_state("%s: libepkit-cuda has no %s()", call, name);
    return false;
}

/* set_sms(n): epkit/cuda.h. A host backend has none. */
PyObject *comm_set_sms(PyObject *self, PyObject *number)
{
    struct comm_object *comm = (struct comm_object *)self;
    static ep_status (*set_sms)(ep_comm * comm, int sms);
    bool ok = true;
    int64_t sms = want_within(number, "set_sms", "sms", 0, INT32_MAX, &ok);

    if (!ok || !cuda_begin(comm, "set_sms", "ep_cuda_set_sms", (void **)&set_sms))
        return NULL;
    return call_end(comm, comm->cuda ? UNLOCKED(set_sms(comm->box->comm, (int)sms)) : EP_OK);
}

/* sms() -> multiprocessors of an operation, without those that copy; 0 without CUDA */
PyObject *comm_sms(PyObject *self, PyObject *Py_UNUSED(unused))
{
    struct comm_object *comm = (struct comm_object *)self;
    static ep_status (*get_device)(ep_comm * comm, int *ret_device, int *ret_sms);
    ep_status status;
    int sms = 0;

    if (!comm->box)
        return raise_state("sms: the communicator has been freed");
    if (comm->cuda && !get_device)
        *(void **)&get_device = cuda_function("ep_cuda_get_device");
    status = comm->cuda && get_device ? get_device(comm->box->comm, NULL, &sms) : EP_OK;
    return status == EP_OK ? PyLong_FromLong(sms) : raise_status(status);
}

/* set_net_memory(reserve, limit): epkit/cuda.h. A host backend has no pinned memory. */
PyObject *comm_set_net_memory(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    struct comm_object *comm = (struct comm_object *)self;
    static ep_status (*set_memory)(ep_comm * comm, size_t reserve, size_t limit);
    int64_t reserve, limit;
    bool ok = true;

    if (!want_args("set_net_memory", nargs, 2))
        return NULL;
    reserve = want_within(args[0], "set_net_memory", "reserve", 0, INT64_MAX, &ok);
    limit = ok ? want_within(args[1], "set_net_memory", "limit", 0, INT64_MAX, &ok) : 0;
    if (!ok)
        return NULL;
    if (limit && reserve > limit)
        return raise_arg("set_net_memory: reserve is %lld, more than the limit of %lld", (long long)reserve,
                         (long long)limit);
    if (!cuda_begin(comm, "set_net_memory", "ep_cuda_set_net_memory", (void **)&set_memory))
        return NULL;
    return call_end(comm, comm->cuda ? UNLOCKED(set_memory(comm->box->comm, (size_t)reserve, (size_t)limit)) : EP_OK);
}

/* net_memory() -> (bytes held, bytes of the largest need); 0 without CUDA, and on one node */
PyObject *comm_net_memory(PyObject *self, PyObject *Py_UNUSED(unused))
{
    struct comm_object *comm = (struct comm_object *)self;
    static ep_status (*get_memory)(ep_comm * comm, size_t * ret_held, size_t * ret_needed);
    ep_status status;
    size_t held = 0, needed = 0;

    if (!cuda_begin(comm, "net_memory", "ep_cuda_get_net_memory", (void **)&get_memory))
        return NULL;
    status = comm->cuda ? UNLOCKED(get_memory(comm->box->comm, &held, &needed)) : EP_OK;
    call_done(comm);
    return status == EP_OK ? Py_BuildValue("(KK)", (unsigned long long)held, (unsigned long long)needed)
                           : raise_status(status);
}
