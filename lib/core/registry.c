/* SPDX-License-Identifier: Apache-2.0 */
#include "core/core.h"

#include "base/module.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#define MODULE_SYMBOL "ep_backend_module" /* const struct ep_backend_ops */

/* In order of preference. */
static const struct backend {
    const char *name;
    const struct ep_backend_ops *ops; /* NULL: in a module */
    const char *module;
} backends[] = {
    {.name = "cuda", .module = "libepkit-cuda.so"},
    {.name = "host", .ops = &ep_backend_host},
};

#define N_BACKENDS (sizeof(backends) / sizeof(backends[0]))

static ep_status try_backend(const struct backend *backend, const struct ep_backend_ops **ret_ops)
{
    const struct ep_backend_ops *ops = backend->ops;
    const void *table = ops;
    ep_status status = EP_OK;

    if (!ops)
        status = ep_module_load(backend->module, RTLD_LOCAL, MODULE_SYMBOL, EP_BACKEND_ABI, &table);
    ops = table;
    if (status == EP_OK && ops->probe)
        status = ops->probe();
    if (status != EP_OK)
        return ep_fail_prefix(status, "backend %s: ", backend->name);
    *ret_ops = ops;
    return EP_OK;
}

static ep_status find_best(const struct ep_backend_ops **ret_ops)
{
    char text[EP_ERROR_TEXT_BYTES];
    ep_status status = EP_E_UNSUPPORTED;

    /* A backend that does not work on this machine is not a failure: do not leave its reason in ep_last_error(). */
    snprintf(text, sizeof(text), "%s", ep_last_error());
    for (size_t i = 0; i < N_BACKENDS && status != EP_OK; i++)
        status = try_backend(&backends[i], ret_ops);
    return status == EP_OK ? ep_fail(EP_OK, "%s", text) : status;
}

ep_status ep_backend_find(const char *name, const struct ep_backend_ops **ret_ops)
{
    char known[64] = "";

    if (!name)
        return find_best(ret_ops);
    for (size_t i = 0; i < N_BACKENDS; i++)
        if (strcmp(name, backends[i].name) == 0)
            return try_backend(&backends[i], ret_ops);
    for (size_t i = 0; i < N_BACKENDS; i++)
        snprintf(known + strlen(known), sizeof(known) - strlen(known), "%s\"%s\"", i ? ", " : "", backends[i].name);
    return ep_fail(EP_E_ARG, "backend \"%.32s\" is not one of %s", name, known);
}
