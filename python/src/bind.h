/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bind.h - what the files of the extension module share.
 *
 * The module is a thin layer: it checks that tensors are what a call needs (type, shape, strides, device, alignment),
 * makes those that it returns, turns all into the pointers of libepkit's argument structs, releases the interpreter
 * lock around every call that can wait, and turns a status into an exception. What is convenient is written in Python,
 * above it. A call of Python costs more than one of C: engines call eagerly, and their devices wait for the host.
 *
 * Lifetimes. A Comm owns its ep_comm. Plans and low-latency objects hold a reference to their Comm and are on its list:
 * Comm.free() frees them first, and a method of a freed object raises. Memory of the library that became a tensor
 * (export_memory()) is counted; while there are such tensors, Comm.free() only marks the communicator as freed, and the
 * last tensor frees it. That may happen in any thread, without the interpreter.
 */
#ifndef EPKIT_PYTHON_BIND_H
#define EPKIT_PYTHON_BIND_H

/*
 * Without PY_SSIZE_T_CLEAN, and so without "#" in formats: the headers of 3.13 and those before disagree on which
 * functions take these, and a module compiled with either has to run on all from 3.10 on.
 */
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include "tensor.h"

#include <epkit/epkit.h>
#include <stdatomic.h>
#include <stdbool.h>

/* The library's side of a communicator, which may outlive the Python object: see above. */
struct comm_box {
    ep_comm *comm;
    /* The Comm, and tensors that show memory of the library. No lock: a fork might copy it locked. */
    atomic_int holders;
    ep_ll **kept; /* low-latency objects that tensors show memory of, freed with the communicator */
    int n_kept;
};

/* Something that belongs to a communicator: the beginning of plans and low-latency objects. */
struct member {
    PyObject_HEAD struct comm_object *comm; /* a reference */
    struct member *next, *prev, *next_late;
    /* Frees the library's object. The member is off the list by then, and its comm NULL. */
    void (*close)(struct member *self, struct comm_box *box);
    const char *noun; /* "plan": what errors call it */
};

/* A communicator belongs to one thread at a time: another one that drops the last reference to a plan has to wait. */

struct comm_object {
    PyObject_HEAD struct comm_box *box; /* NULL: creation failed */
    struct member members;              /* head of the list; not an object */
    bool busy;                          /* a call is under way, with the interpreter lock released */
    struct member *late;                /* members whose last reference went meanwhile: call_done() frees them */
    bool freed;                         /* by Comm.free(), which may still be at it */
    bool closing;                       /* something is being freed: other threads wait until it is over ... */
    unsigned long closer;               /* ... but not the thread that does it, nor a forked child ... */
    unsigned closing_forks;             /* ... in which that thread does not exist: forks of this process until then */
    bool cuda;
    int rank, nranks, device, timeout_ms;
    unsigned regroups; /* that have changed the members */
};

extern PyTypeObject *comm_type, *plan_type, *ll_type;
extern const PyMethodDef module_methods[];

PyTypeObject *comm_type_new(PyObject *module);
PyTypeObject *plan_type_new(PyObject *module);
PyTypeObject *ll_type_new(PyObject *module);

/* error.c: exceptions. Each returns NULL, for the caller to return. */
int errors_init(PyObject *module);
PyObject *raise_status(ep_status status); /* of a call of this thread that has just failed; or what a signal raises */
PyObject *result_of(ep_status status);    /* None, or that */
PyObject *made_or(ep_status status, PyObject *made); /* what the call was to return, or that, without the reference */
PyObject *raise_arg(const char *format, ...) __attribute__((format(printf, 1, 2)));   /* EP_E_ARG */
PyObject *raise_state(const char *format, ...) __attribute__((format(printf, 1, 2))); /* EP_E_STATE */
/* TypeError, with the type of the argument alone: to print a tensor would read it. */
void raise_kind(const char *call, const char *name, PyObject *value, const char *wanted);
ep_status status_of_exception(void); /* of the exception that is set; it stays set */

/* memory.c: the library's side of a communicator. */
struct comm_box *box_new(void); /* NULL: with MemoryError set */
/* One holder less. Without any the communicator is freed, and the box. */
void box_release(struct comm_box *box);
/* A capsule "dltensor" of the library's memory, bytes [bytes] uint8. Counts as an export of the communicator. */
PyObject *export_memory(struct comm_object *comm, void *memory, int64_t bytes);
/* clear(address, bytes): zeros, without access to whole pages, which are allocated when something accesses them. */
PyObject *clear_memory(PyObject *module, PyObject *args);

/* comm_cuda.c: methods of the type Comm. */
PyObject *comm_set_sms(PyObject *self, PyObject *number);
PyObject *comm_sms(PyObject *self, PyObject *unused);
PyObject *comm_set_net_memory(PyObject *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *comm_net_memory(PyObject *self, PyObject *unused);

/* interrupt.c: Ctrl-C ends a wait. */
PyObject *watch_interrupt(PyObject *module, PyObject *unused);
void interrupt_begin(const struct comm_object *comm);
void interrupt_end(const struct comm_object *comm);

/* member.c: calls on a communicator, and what belongs to it. */
/* Begins a call: false, with an exception, when the communicator is freed or another thread is in a call on it. */
bool call_begin(struct comm_object *comm, const char *call);
/* Whether a call could begin; the same exceptions. Another thread that frees something is waited for. */
bool call_ready(struct comm_object *comm, const char *call);
/* Of a call that was queued: on the CPU it is complete when it returns. Without the interpreter lock. */
ep_status complete(const struct comm_object *comm, ep_status status);
/* Ends it. */
void call_done(struct comm_object *comm);
/* Ends it: None, or NULL with the exception of `status`. */
PyObject *call_end(struct comm_object *comm, ep_status status);
/*
 * A call on a member. It owns the communicator while `function` runs: code of Python that runs while tensors are read
 * (a foreign type may run any) can neither free what the call works on nor begin another one.
 */
PyObject *member_call(PyObject *self, const char *call, PyObject *const *args, Py_ssize_t nargs, Py_ssize_t wanted,
                      PyObject *(*function)(PyObject *self, PyObject *const *args));
/* fast_FUNCTION(), the method `call` of n arguments: the function as such a call. */
#define MEMBER_METHOD(function, call, n)                                                                               \
    static PyObject *fast_##function(PyObject *self, PyObject *const *args, Py_ssize_t nargs)                          \
    {                                                                                                                  \
        return member_call(self, call, args, nargs, n, function);                                                      \
    }
void member_add(struct comm_object *comm, struct member *member);
/* Frees `one`, or all, with the interpreter lock released; other threads that call anything wait meanwhile. */
void members_free(struct comm_object *comm, struct member *one);
PyObject *object_new(PyTypeObject *type); /* zeros; NULL: with MemoryError set */
void object_free(PyObject *self);         /* the memory of an object of Python, by its type */
PyObject *member_free_method(PyObject *self, PyObject *unused);
/* The type of members with these static methods, and the property "closed". */
PyTypeObject *member_type_new(PyObject *module, const char *name, size_t bytes, PyMethodDef *methods);

/* A reference to an object in place of the one before. The place is set first: the old one may run code of Python. */
static inline void object_keep(PyObject **at, PyObject *object)
{
    PyObject *before = *at;

    Py_INCREF(object);
    *at = object;
    Py_XDECREF(before);
}

/* A row of a table of methods that take positional arguments as an array. */
#define FAST(name, function)                                                                                           \
    {                                                                                                                  \
        name, (PyCFunction)(void (*)(void))function, METH_FASTCALL, NULL                                               \
    }

/* torch.c: what calls ask of torch. False, or NULL, with an exception set. */
PyObject *know_torch(PyObject *module, PyObject *functions);
/* parts(tensor, shape, offset, shape, offset, ...): parts of its memory, contiguous, of a tensor without gradients */
PyObject *torch_parts(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
/* The first n rows of a tensor of any strides, which begins at its memory's begin and has no gradients; None of None.
 */
PyObject *torch_head(PyObject *tensor, int64_t n);
PyObject *torch_nothing(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
/* The stream argument of the library: of None torch's current one, else what has `cuda_stream`; NULL on the CPU. */
bool stream_get(const struct comm_object *comm, PyObject *stream, void **ret_stream);
/* Whether work in torch's current stream is captured into a graph. */
bool is_captured(const struct comm_object *comm, bool *ret_captured);
/* A tensor that a call makes; without strides it is contiguous. */
struct form {
    int ndim;
    int64_t shape[TENSOR_DIMS], stride[TENSOR_DIMS];
    bool clear; /* of zeros */
};
#define FORM(n, ...)                                                                                                   \
    {                                                                                                                  \
        .ndim = (n), .shape = __VA_ARGS__                                                                              \
    }
/* Once for each call that makes tensors: whether torch_new() may use the faster function. */
bool torch_begin(const struct comm_object *comm, bool *ret_fast);
/* A new tensor on the communicator's device. */
PyObject *torch_new(const struct comm_object *comm, bool fast, PyObject *dtype, const struct form *form);
PyObject *torch_new_method(PyObject *self, PyObject *const *args, Py_ssize_t nargs);
/* `given`, or for None a new tensor of bfloat16: a new reference. */
PyObject *torch_out(const struct comm_object *comm, PyObject *given, const struct form *form);
/* A tuple of n new tensors, and what they are. TYPE_OTHER: None. */
PyObject *torch_tuple(const struct comm_object *comm, int n, const enum tensor_type *types, const struct form *forms,
                      struct tensor *ret_tensors);
/* A tuple of n objects, NULL as None. Consumes them. !ok: NULL, for one that could not be made. */
PyObject *tuple_from(int n, PyObject **objects, bool ok);

/* plan.c, lowlatency.c: methods of the type Comm. */
PyObject *plan_layout(PyObject *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *plan_new(PyObject *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *plan_check_dispatch(PyObject *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *ll_new(PyObject *self, PyObject *const *args, Py_ssize_t nargs);

/* The status of a call of the library, made with the interpreter lock released. */
#define UNLOCKED(call)                                                                                                 \
    ({                                                                                                                 \
        ep_status unlocked_;                                                                                           \
        Py_BEGIN_ALLOW_THREADS;                                                                                        \
        unlocked_ = (call);                                                                                            \
        Py_END_ALLOW_THREADS;                                                                                          \
        unlocked_;                                                                                                     \
    })

/* Number of positional arguments of a fast call. */
bool want_args(const char *call, Py_ssize_t given, Py_ssize_t wanted);
/* Integer arguments; on an error an exception is set and *ret_ok is false. */
int64_t want_int(PyObject *value, const char *call, const char *name, bool *ret_ok);
int64_t want_within(PyObject *value, const char *call, const char *name, int64_t least, int64_t most, bool *ret_ok);
/* n of them; the result is false then. */
bool want_ints(const char *call, PyObject *const *args, const char *const *names, int n, int64_t *ret_values);

/* What tensors of this communicator must be on. */
struct place place_of(const struct comm_object *comm);

#endif
