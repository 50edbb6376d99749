/* SPDX-License-Identifier: Apache-2.0 */
#include "net/verbs_library.h"

#include "base/error.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define LIBRARY "libibverbs.so.1"

/* Set once. No lock: a process may fork while another thread is here. */
static struct verbs_library *_Atomic loaded;

static ep_status load(struct verbs_library *into)
{
    const struct {
        const char *name;
        void *pointer; /* to the function pointer */
    } symbols[] = {
        {"ibv_fork_init", &into->fork_init},
        {"ibv_get_device_list", &into->get_device_list},
        {"ibv_free_device_list", &into->free_device_list},
        {"ibv_get_device_name", &into->get_device_name},
        {"ibv_open_device", &into->open_device},
        {"ibv_close_device", &into->close_device},
        {"ibv_query_device", &into->query_device},
        {"ibv_query_port", &into->query_port},
        {"_ibv_query_gid_table", &into->query_gid_table},
        {"ibv_alloc_pd", &into->alloc_pd},
        {"ibv_dealloc_pd", &into->dealloc_pd},
        {"ibv_reg_mr", &into->reg_mr},
        {"ibv_dereg_mr", &into->dereg_mr},
        {"ibv_create_cq", &into->create_cq},
        {"ibv_destroy_cq", &into->destroy_cq},
        {"ibv_create_qp", &into->create_qp},
        {"ibv_modify_qp", &into->modify_qp},
        {"ibv_destroy_qp", &into->destroy_qp},
        {"ibv_wc_status_str", &into->wc_status_str},
    };
    void *module = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL), *symbol;

    if (!module) {
        const char *why = dlerror();

        return ep_fail(EP_E_UNSUPPORTED, "network verbs: %s; it comes with rdma-core (libibverbs1)",
                       why ? why : LIBRARY);
    }
    for (size_t i = 0; i < sizeof(symbols) / sizeof(symbols[0]); i++) {
        symbol = dlsym(module, symbols[i].name);
        if (!symbol) {
            dlclose(module);
            return ep_fail(EP_E_UNSUPPORTED, "network verbs: " LIBRARY " has no %s: rdma-core 32 or later is needed",
                           symbols[i].name);
        }
        memcpy(symbols[i].pointer, &symbol, sizeof(symbol));
    }
    symbol = dlsym(module, "ibv_reg_dmabuf_mr");
    memcpy(&into->reg_dmabuf_mr, &symbol, sizeof(symbol));
    /* Keeps registered pages intact in the parent after fork(); kernels before 5.12 need it. */
    into->fork_init();
    return EP_OK;
}

ep_status verbs_library_load(const struct verbs_library **ret_library)
{
    struct verbs_library *library = atomic_load(&loaded), *before = NULL;
    ep_status status;

    if (!library) {
        library = malloc(sizeof(*library));
        status = library ? load(library) : ep_fail(EP_E_MEMORY, "network verbs: no memory");
        if (status != EP_OK) {
            free(library);
            return status;
        }
        if (!atomic_compare_exchange_strong(&loaded, &before, library)) {
            free(library);
            library = before;
        }
    }
    *ret_library = library;
    return EP_OK;
}
