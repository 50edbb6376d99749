/* SPDX-License-Identifier: Apache-2.0 */
/* A fake libepkit-cuda.so for test_registry.c: MOCK_KIND is good, abi, symbol, probe or broken. */
#include "core/core.h"

#define GOOD 1
#define ABI 2
#define SYMBOL 3
#define PROBE 4
#define BROKEN 5

extern const struct ep_backend_ops ep_backend_module;

#if MOCK_KIND == SYMBOL
#define ep_backend_module ep_backend_of_another_name
extern const struct ep_backend_ops ep_backend_module;
#endif

#if MOCK_KIND == BROKEN
ep_status ep_function_of_no_library(void);
#endif

static ep_status probe(void)
{
#if MOCK_KIND == PROBE
    return ep_fail(EP_E_UNSUPPORTED, "no GPU answers");
#elif MOCK_KIND == BROKEN
    return ep_function_of_no_library();
#else
    return EP_OK;
#endif
}

const struct ep_backend_ops ep_backend_module = {
    .abi = EP_BACKEND_ABI + (MOCK_KIND == ABI),
    .name = "cuda",
    .probe = probe,
};
