/* SPDX-License-Identifier: Apache-2.0 */
#include "base/module.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* The directory of the file that this code was loaded from, with a trailing slash; "" if unknown. */
static void own_folder(char folder[PATH_MAX])
{
    static const char here = 0;
    const char *slash = NULL;
    Dl_info info;

    folder[0] = '\0';
    if (dladdr(&here, &info) && info.dli_fname)
        slash = strrchr(info.dli_fname, '/');
    if (slash && (size_t)(slash - info.dli_fname) < PATH_MAX - 1)
        snprintf(folder, PATH_MAX, "%.*s", (int)(slash - info.dli_fname) + 1, info.dli_fname);
}

static void *open_file(const char *file, int scope)
{
    char folder[PATH_MAX], path[PATH_MAX + 64], linked[128];
    size_t bytes = strlen(file);
    void *module;

    /* A program that is linked with the module must not get a second copy. */
    if (bytes > 3 && strcmp(file + bytes - 3, ".so") == 0)
        snprintf(linked, sizeof(linked), "%s.%d", file, EP_VERSION_MAJOR);
    else
        snprintf(linked, sizeof(linked), "%s", file);
    module = dlopen(linked, RTLD_NOW | RTLD_NOLOAD | scope);
    if (module)
        return module;
    own_folder(folder);
    snprintf(path, sizeof(path), "%s%s", folder, file);
    if (folder[0] && access(path, F_OK) == 0)
        return dlopen(path, RTLD_NOW | scope);
    return dlopen(file, RTLD_NOW | scope);
}

ep_status ep_module_load(const char *file, int scope, const char *symbol, uint32_t abi, const void **ret_table)
{
    void *module = open_file(file, scope);
    const uint32_t *table;
    const char *why;

    if (!module) {
        why = dlerror();
        return ep_fail(EP_E_UNSUPPORTED, "%s", why ? why : file);
    }
    table = dlsym(module, symbol);
    if (!table) {
        ep_fail(EP_E_UNSUPPORTED, "%s has no %s", file, symbol);
        goto close_module;
    }
    if (*table != abi) {
        ep_fail(EP_E_UNSUPPORTED, "%s is of another build (its abi is %u, ours is %u)", file, *table, abi);
        goto close_module;
    }
    *ret_table = table;
    return EP_OK;
close_module:
    dlclose(module);
    return EP_E_UNSUPPORTED;
}
