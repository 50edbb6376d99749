/* SPDX-License-Identifier: Apache-2.0 */
#include "core/check.h"

ep_status ep_alloc(ep_comm *comm, size_t bytes, void **ret_memory)
{
    ep_status status;

    EP_CHECK_COMM(comm, comm);
    status = ep_comm_usable(comm, __func__);
    if (status == EP_OK)
        status = EP_CHECK_PTR(__func__, ret_memory);
    if (status == EP_OK && bytes > (size_t)INT64_MAX)
        status = ep_fail(EP_E_OVERFLOW, "%s: bytes is %zu", __func__, bytes);
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
