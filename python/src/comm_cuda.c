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

/* set_sms(n): epkit/cuda.h. A host backend has none. */
PyObject *comm_set_sms(PyObject *self, PyObject *number)
{
    struct comm_object *comm = (struct comm_object *)self;
    static ep_status (*set_sms)(ep_comm * comm, int sms);
    bool ok = true;
    int64_t sms = want_int(number, "set_sms", "sms", &ok);
    ep_status status;

    if (!ok)
        return NULL;
    if (sms < 0 || sms > INT32_MAX)
        return raise_arg("set_sms: sms is %lld", (long long)sms);
    if (!call_begin(comm, "set_sms"))
        return NULL;
    if (!comm->cuda)
        return call_end(comm, EP_OK);
    if (!set_sms)
        *(void **)&set_sms = cuda_function("ep_cuda_set_sms");
    if (!set_sms) {
        call_done(comm);
        return raise_state("set_sms: libepkit-cuda has no ep_cuda_set_sms()");
    }
    Py_BEGIN_ALLOW_THREADS;
    status = set_sms(comm->box->comm, (int)sms);
    Py_END_ALLOW_THREADS;
    return call_end(comm, status);
}

/* sms() -> multiprocessors of an operation, without those that copy; 0 without CUDA */
PyObject *comm_sms(PyObject *self, PyObject *unused)
{
    struct comm_object *comm = (struct comm_object *)self;
    static ep_status (*get_device)(ep_comm * comm, int *ret_device, int *ret_sms);
    ep_status status;
    int sms = 0;

    (void)unused;
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
    ep_status status;
    bool ok = true;

    if (!want_args("set_net_memory", nargs, 2))
        return NULL;
    reserve = want_int(args[0], "set_net_memory", "reserve", &ok);
    limit = ok ? want_int(args[1], "set_net_memory", "limit", &ok) : 0;
    if (!ok)
        return NULL;
    if (reserve < 0 || limit < 0 || (limit && reserve > limit))
        return raise_arg(
            "set_net_memory: reserve is %lld and limit %lld, must be 0 or more, and reserve within the limit",
            (long long)reserve, (long long)limit);
    if (!call_begin(comm, "set_net_memory"))
        return NULL;
    if (!comm->cuda)
        return call_end(comm, EP_OK);
    if (!set_memory)
        *(void **)&set_memory = cuda_function("ep_cuda_set_net_memory");
    if (!set_memory) {
        call_done(comm);
        return raise_state("set_net_memory: libepkit-cuda has no ep_cuda_set_net_memory()");
    }
    Py_BEGIN_ALLOW_THREADS;
    status = set_memory(comm->box->comm, (size_t)reserve, (size_t)limit);
    Py_END_ALLOW_THREADS;
    return call_end(comm, status);
}

/* net_memory() -> (bytes held, bytes of the largest need); 0 without CUDA, and on one node */
PyObject *comm_net_memory(PyObject *self, PyObject *unused)
{
    struct comm_object *comm = (struct comm_object *)self;
    static ep_status (*get_memory)(ep_comm * comm, size_t * ret_held, size_t * ret_needed);
    ep_status status = EP_OK;
    size_t held = 0, needed = 0;

    (void)unused;
    if (!call_begin(comm, "net_memory"))
        return NULL;
    if (comm->cuda && !get_memory)
        *(void **)&get_memory = cuda_function("ep_cuda_get_net_memory");
    if (comm->cuda && get_memory) {
        Py_BEGIN_ALLOW_THREADS;
        status = get_memory(comm->box->comm, &held, &needed);
        Py_END_ALLOW_THREADS;
    }
    call_done(comm);
    return status == EP_OK ? Py_BuildValue("(KK)", (unsigned long long)held, (unsigned long long)needed)
                           : raise_status(status);
}
