/* SPDX-License-Identifier: Apache-2.0 */
#include "base/args.h"

#include <string.h>

/* No struct of epkit will be larger, so a larger size is uninitialised memory. */
#define MOST_BYTES 4096

static ep_status check_size(size_t size, size_t our_bytes, size_t first_bytes, const char *what)
{
    if (size < first_bytes)
        return ep_fail(EP_E_ABI, "%s.size is %zu: at least %zu are needed, this library has %zu", what, size,
                       first_bytes, our_bytes);
    if (size > MOST_BYTES)
        return ep_fail(EP_E_ABI, "%s.size is %zu: this library has %zu", what, size, our_bytes);
    return EP_OK;
}

ep_status ep_args_load(void *ret_args, size_t our_bytes, size_t first_bytes, const void *args, const char *what)
{
    const unsigned char *bytes = args;
    size_t size;

    if (!args)
        return ep_fail(EP_E_ARG, "%s is NULL", what);
    memcpy(&size, args, sizeof(size));
    EP_TRY(check_size(size, our_bytes, first_bytes, what));
    for (size_t i = our_bytes; i < size; i++)
        if (bytes[i])
            return ep_fail(EP_E_ABI,
                           "%s: byte %zu is set, but this library knows %zu only: it is older than the header", what, i,
                           our_bytes);
    memset(ret_args, 0, our_bytes);
    memcpy(ret_args, args, size < our_bytes ? size : our_bytes);
    memcpy(ret_args, &our_bytes, sizeof(our_bytes));
    return EP_OK;
}

ep_status ep_args_store(void *ret_args, const void *ours, size_t our_bytes, size_t first_bytes, const char *what)
{
    unsigned char *bytes = ret_args;
    size_t size;

    if (!ret_args)
        return ep_fail(EP_E_ARG, "%s is NULL", what);
    memcpy(&size, ret_args, sizeof(size));
    EP_TRY(check_size(size, our_bytes, first_bytes, what));
    memcpy(bytes, ours, size < our_bytes ? size : our_bytes);
    if (size > our_bytes)
        memset(bytes + our_bytes, 0, size - our_bytes);
    memcpy(bytes, &size, sizeof(size));
    return EP_OK;
}
