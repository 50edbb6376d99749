/* SPDX-License-Identifier: Apache-2.0 */
#include "core/check.h"

static ep_status check_bytes(const char *call, size_t bytes)
{
    return bytes > (size_t)INT64_MAX ? ep_fail(EP_E_OVERFLOW, "%s: bytes is %zu", call, bytes) : EP_OK;
}

ep_status ep_alloc(ep_comm *comm, size_t bytes, void **ret_memory)
{
    ep_status status;

    EP_CHECK_COMM(comm, comm);
    status = ep_comm_usable(comm, __func__);
    if (status == EP_OK)
        status = EP_CHECK_PTR(__func__, ret_memory);
    if (status == EP_OK)
        status = check_bytes(__func__, bytes);
    if (status == EP_OK)
        status = EP_BACKEND_CALL(comm, alloc, comm, bytes, ret_memory);
    return ep_comm_record(comm, status);
}

ep_status ep_free(ep_comm *comm, void *memory)
{
    ep_status status;

    EP_CHECK_COMM(comm, comm);
    if (!memory)
        return EP_OK;
    status = ep_comm_usable(comm, __func__);
    if (status == EP_OK)
        status = EP_BACKEND_CALL(comm, free, comm, memory);
    return ep_comm_record(comm, status);
}

/*
 * --- by one rank alone: nobody else is concerned, so that a failure is none of the communicator's ---
 */

ep_status ep_alloc_local(ep_comm *comm, size_t bytes, void **ret_memory)
{
    EP_CHECK_OWN(comm, comm);
    EP_TRY(ep_comm_usable(comm, __func__));
    EP_TRY(EP_CHECK_PTR(__func__, ret_memory));
    EP_TRY(check_bytes(__func__, bytes));
    return EP_BACKEND_CALL(comm, alloc_local, comm, bytes, ret_memory);
}

ep_status ep_free_local(ep_comm *comm, void *memory)
{
    EP_CHECK_OWN(comm, comm);
    return memory ? EP_BACKEND_CALL(comm, free_local, comm, memory) : EP_OK;
}

ep_status ep_register(ep_comm *comm, void *memory, size_t bytes)
{
    EP_CHECK_OWN(comm, comm);
    EP_TRY(ep_comm_usable(comm, __func__));
    EP_TRY(EP_CHECK_PTR(__func__, memory));
    EP_TRY(check_bytes(__func__, bytes));
    if (!bytes)
        return ep_fail(EP_E_ARG, "%s: bytes is 0", __func__);
    return EP_BACKEND_CALL(comm, register_memory, comm, memory, bytes);
}

ep_status ep_unregister(ep_comm *comm, void *memory)
{
    EP_CHECK_OWN(comm, comm);
    return memory ? EP_BACKEND_CALL(comm, unregister_memory, comm, memory) : EP_OK;
}

/*
 * --- allocator callbacks ---
 */

/* The communicator that serves each device. Atomic, because a forked child may have found any lock held. */
static _Atomic(ep_comm *) pools[EP_MAX_POOLS];

ep_status ep_pool_attach(ep_comm *comm, int device)
{
    EP_CHECK_OWN(comm, comm);
    EP_TRY(ep_check_range(__func__, "device", device, 0, EP_MAX_POOLS - 1));
    if (!comm->ops->alloc_local)
        return ep_fail(EP_E_UNSUPPORTED, "%s: backend %s does not provide it", __func__, comm->ops->name);
    atomic_store(&pools[device], comm);
    return EP_OK;
}

void ep_pool_detach(ep_comm *comm)
{
    for (int device = 0; device < EP_MAX_POOLS; device++) {
        ep_comm *own = comm;

        atomic_compare_exchange_strong(&pools[device], &own, NULL);
    }
}

void *ep_pool_alloc(ptrdiff_t bytes, int device, ep_stream stream)
{
    ep_comm *comm = device >= 0 && device < EP_MAX_POOLS ? atomic_load(&pools[device]) : NULL;
    void *memory = NULL;

    (void)stream;
    if (!comm || bytes < 0) {
        ep_fail(EP_E_ARG, "ep_pool_alloc: %lld bytes on device %d, %s", (long long)bytes, device,
                comm ? "which are none" : "which no communicator serves: see ep_pool_attach()");
        return NULL;
    }
    return ep_alloc_local(comm, (size_t)bytes, &memory) == EP_OK ? memory : NULL;
}

void ep_pool_free(void *memory, ptrdiff_t bytes, int device, ep_stream stream)
{
    ep_comm *comm = device >= 0 && device < EP_MAX_POOLS ? atomic_load(&pools[device]) : NULL;

    (void)bytes;
    (void)stream;
    /* Without one it went away with its communicator. */
    if (comm)
        ep_free_local(comm, memory);
}
