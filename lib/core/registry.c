/* SPDX-License-Identifier: Apache-2.0 */
#include "core/core.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define MODULE_SYMBOL "ep_backend_module" /* const struct ep_backend_ops */

/* In the order of preference. */
static const struct backend {
    const char *name;
    const struct ep_backend_ops *ops; /* NULL: in a module */
    const char *module;
} backends[] = {
    {.name = "cuda", .module = "libepkit-cuda.so"},
    {.name = "host", .ops = &ep_backend_host},
};

#define N_BACKENDS (sizeof(backends) / sizeof(backends[0]))

/* The folder of the file that this code was loaded from, with the slash at its end; "" if unknown. */
static void own_folder(char folder[PATH_MAX])
{
    Dl_info info;
    const char *slash = NULL;

    folder[0] = '\0';
    if (dladdr(backends, &info) && info.dli_fname)
        slash = strrchr(info.dli_fname, '/');
    if (slash && (size_t)(slash - info.dli_fname) < PATH_MAX - 1)
        snprintf(folder, PATH_MAX, "%.*s", (int)(slash - info.dli_fname) + 1, info.dli_fname);
}

/*
 * A module next to this library is the one of our build, so if it is there it is that or none: falling back to another
 * would hide why ours does not load.
 */
static void *open_module(const char *module)
{
    char folder[PATH_MAX], path[PATH_MAX + 64];

    own_folder(folder);
    snprintf(path, sizeof(path), "%s%s", folder, module);
    if (folder[0] && access(path, F_OK) == 0)
        return dlopen(path, RTLD_NOW | RTLD_LOCAL);
    return dlopen(module, RTLD_NOW | RTLD_LOCAL);
}

/* A module that is good stays loaded until the process ends: its table and its threads may be in use at any time. */
static ep_status load_module(const struct backend *backend, const struct ep_backend_ops **ret_ops)
{
    const struct ep_backend_ops *ops;
    const char *why;
    void *module = open_module(backend->module);

    if (!module) {
        why = dlerror();
        return ep_fail(EP_E_UNSUPPORTED, "backend %s: %s", backend->name, why ? why : backend->module);
    }
    ops = dlsym(module, MODULE_SYMBOL);
    if (!ops) {
        ep_fail(EP_E_UNSUPPORTED, "backend %s: %s has no %s", backend->name, backend->module, MODULE_SYMBOL);
        goto close_module;
    }
    if (ops->abi != EP_BACKEND_ABI) {
        ep_fail(EP_E_UNSUPPORTED, "backend %s: %s is of another build (abi %u, this library has %u)", backend->name,
                backend->module, ops->abi, EP_BACKEND_ABI);
        goto close_module;
    }
    *ret_ops = ops;
    return EP_OK;
close_module:
    dlclose(module);
    return EP_E_UNSUPPORTED;
}

static ep_status try_backend(const struct backend *backend, const struct ep_backend_ops **ret_ops)
{
    const struct ep_backend_ops *ops = backend->ops;
    ep_status status;

    if (!ops)
        EP_TRY(load_module(backend, &ops));
    status = ops->probe ? ops->probe() : EP_OK;
    if (status != EP_OK)
        return ep_fail_prefix(status, "backend %s: ", backend->name);
    *ret_ops = ops;
    return EP_OK;
}

static ep_status find_best(const struct ep_backend_ops **ret_ops)
{
    char text[EP_ERROR_TEXT_BYTES];
    ep_status status = EP_E_UNSUPPORTED;

    /* A backend that is not for this machine is no failure: it leaves no trace in ep_last_error(). */
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
