/* SPDX-License-Identifier: Apache-2.0 */
#include "doctor/look_nvshmem.h"

#include "doctor/look.h"
#include "stack/variables.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define LOAD_MS 5000 /* a library on a network file system takes its time */

int look_data_ports(const struct topo *topo)
{
    int n = 0;

    for (int i = 0; i < topo->n_nics; i++)
        for (int p = 0; p < topo->nics[i].n_ports && topo->nics[i].role == TOPO_ROLE_DATA; p++)
            n += topo->nics[i].ports[p].active;
    return n;
}

const char *look_nic_name(const struct doctor_machine *machine, int nic)
{
    char name[64];

    root_clean(machine->topo->nics[nic].name, name, sizeof(name));
    return root_printf(machine->root, "%s", name);
}

bool look_is_single_nic(const char *list)
{
    return list && *list && *list != '^' && !strchr(list, ',');
}

bool look_sets_nvshmem(const struct doctor_machine *machine)
{
    struct root_environment environment = root_environment(machine->root);

    for (size_t i = 0; i < environment.n; i++) {
        const struct variable *known = variable_find(environment.variables[i].name);

        if (known && known->effect == VARIABLE_WORKS &&
            (strncmp(known->name, "NVSHMEM_", 8) == 0 || strncmp(known->name, "DEEP_EP_", 8) == 0))
            return true;
    }
    return false;
}

bool look_uses_ibgda(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct stack_nvshmem *nvshmem = &machine->stack->nvshmem;
    const char *transport = root_env(machine->root, "NVSHMEM_REMOTE_TRANSPORT");

    if (!look_has_data_nics(machine, result))
        return false;
    if (nvshmem->host.state != ROOT_OK && !*nvshmem->home) {
        doctor_not_here(machine, result, "no NVSHMEM was found");
        return false;
    }
    if (machine->stack->deepep.imported >= 0 || variable_is_true(root_env(machine->root, "NVSHMEM_IB_ENABLE_IBGDA")) ||
        root_env(machine->root, "NVSHMEM_IBGDA_NIC_HANDLER") || (transport && strcasecmp(transport, "ibgda") == 0))
        return true;
    doctor_not_here(machine, result, "neither the environment nor a DeepEP that Python finds asks for IBGDA");
    return false;
}

bool look_prefix_fits(const char *prefix, const char *name)
{
    bool is_exclusion = prefix[0] == '^';

    return (strstr(name, prefix + is_exclusion) != NULL) != is_exclusion;
}

ep_status look_nvshmem_map(const struct doctor_machine *machine, struct map **ret_map)
{
    const char *list = root_env(machine->root, "NVSHMEM_HCA_LIST");
    const char *prefix = root_env(machine->root, "NVSHMEM_HCA_PREFIX");
    struct map_nvshmem how = {
        .pe_mapping = variable_is_true(root_env(machine->root, "NVSHMEM_ENABLE_NIC_PE_MAPPING")),
        .hca_list = list ? list : "",
        .hca_prefix = prefix ? prefix : LOOK_HCA_PREFIX,
        .one_world_per_gpu = true,
    };

    return map_nvshmem(machine->topo, &how, ret_map);
}

struct look_preload look_preload(const struct doctor_machine *machine, const char *part)
{
    const char *at = root_env(machine->root, "LD_PRELOAD");

    /* ld.so(8): spaces or colons divide the entries */
    for (; at && *at; at += strcspn(at, ": "), at += *at != '\0') {
        const char *path = root_printf(machine->root, "%.*s", (int)strcspn(at, ": "), at);
        const char *slash = strrchr(path, '/');

        if (strstr(slash ? slash + 1 : path, part))
            return (struct look_preload){path,
                                         *path != '/' || root_stat(machine->root, "%s", path).state != ROOT_ABSENT};
    }
    return (struct look_preload){"", false};
}

/* In a child process: what the library does when it is loaded, or how it ends, is that one's alone. */
static json_t *load(void *path)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    const char *error = library ? NULL : dlerror();

    return error ? json_pack("{s:b, s:s}", "ok", 0, "error", error) : json_pack("{s:b}", "ok", 1);
}

enum root_state look_load(const struct doctor_machine *machine, const char *path, const char **ret_error)
{
    const char *theirs = root_env(machine->root, "LD_LIBRARY_PATH"), *own = getenv("LD_LIBRARY_PATH");
    const char *text;
    struct root_answer answer;
    char shown[512];

    /* The child's linker has read LD_LIBRARY_PATH when this process started: for another one's it cannot speak. */
    if (root_is_live(machine->root) && strcmp(theirs ? theirs : "", own ? own : "") != 0) {
        *ret_error = "the process that is looked at has another LD_LIBRARY_PATH";
        return ROOT_UNASKED;
    }
    answer =
        root_ask(machine->root, root_printf(machine->root, "load:%s", path), load, (void *)(uintptr_t)path, LOAD_MS);
    if (answer.state != ROOT_OK) {
        *ret_error = look_why(answer.state, answer.why);
        return answer.state;
    }
    text = json_string_value(json_object_get(answer.value, "error"));
    root_clean(text ? text : "it does not say why", shown, sizeof(shown));
    *ret_error = json_is_true(json_object_get(answer.value, "ok")) ? "" : root_printf(machine->root, "%s", shown);
    return ROOT_OK;
}

bool look_is_verbs_error(const char *error)
{
    return strstr(error, "IBVERBS_") || strstr(error, "libibverbs") || strstr(error, "libmlx5");
}
