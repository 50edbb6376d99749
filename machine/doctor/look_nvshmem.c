/* SPDX-License-Identifier: Apache-2.0 */
#include "doctor/look_nvshmem.h"

#include "doctor/look.h"
#include "doctor/shell.h"
#include "software/variables.h"

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

bool look_has_mlx5(const struct doctor_machine *machine, struct doctor_result *result)
{
    if (!look_has_data_nics(machine, result))
        return false;
    if (advice_has_mlx5(machine->topo))
        return true;
    doctor_not_here(machine, result, "no NIC for data is one of NVIDIA's, which libmlx5 and IBGDA are for");
    return false;
}

bool look_has_deepep(const struct doctor_machine *machine)
{
    const struct stack_deepep *deepep = &machine->stack->deepep;
    struct elf_facts facts;

    if (deepep->imported < 0)
        return false;
    facts = root_elf(machine->root, "%s", deepep->copies[deepep->imported].extension);
    if (facts.state != ROOT_OK)
        return true;
    for (size_t i = 0; i < facts.n_needed; i++)
        if (strncmp(facts.needed[i], "libnvshmem_host.so", strlen("libnvshmem_host.so")) == 0)
            return true;
    return false;
}

bool look_uses_ibgda(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct stack_nvshmem *nvshmem = &machine->stack->nvshmem;
    const char *transport = root_env(machine->root, "NVSHMEM_REMOTE_TRANSPORT");
    bool is_on = variable_is_true(root_env(machine->root, "NVSHMEM_IB_ENABLE_IBGDA"));

    if (topo_is_confidential(machine->topo)) {
        doctor_not_here(machine, result,
                        "confidential computing keeps NICs from GPU memory, as the check confidential says");
        return false;
    }
    if (!look_has_mlx5(machine, result))
        return false;
    if (nvshmem->host.state != ROOT_OK && !*nvshmem->home) {
        doctor_not_here(machine, result, "no NVSHMEM was found");
        return false;
    }
    /* Somebody has decided: DeepEP is not what this environment is for. */
    if (!is_on && transport && (strcasecmp(transport, "libfabric") == 0 || strcasecmp(transport, "ucx") == 0)) {
        doctor_not_here(machine, result, "NVSHMEM_REMOTE_TRANSPORT asks for %s",
                        strcasecmp(transport, "ucx") == 0 ? "ucx" : "libfabric");
        return false;
    }
    if (is_on || look_has_deepep(machine) || root_env(machine->root, "NVSHMEM_IBGDA_NIC_HANDLER") ||
        (transport && strcasecmp(transport, "ibgda") == 0))
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

const char *look_next_preload(const struct doctor_machine *machine, const char **at)
{
    static const char separators[] = ": "; /* ld.so(8) */
    const char *start;
    size_t n;

    if (!*at)
        return NULL;
    start = *at + strspn(*at, separators);
    n = strcspn(start, separators);
    *at = start + n;
    return n ? root_printf(machine->root, "%.*s", (int)n, start) : NULL;
}

bool look_is_dangling(const struct doctor_machine *machine, const char *entry)
{
    /* ld.so(8) takes quotes as a part of the name. */
    if (*entry == '"' || *entry == '\'')
        return true;
    /* $LIB and the like are ld.so's to expand */
    return *entry == '/' && !strchr(entry, '$') && root_stat(machine->root, "%s", entry).state == ROOT_ABSENT;
}

struct look_preload look_preload(const struct doctor_machine *machine, const char *part)
{
    const char *at = root_env(machine->root, "LD_PRELOAD"), *entry;

    while ((entry = look_next_preload(machine, &at))) {
        const char *slash = strrchr(entry, '/');

        if (strstr(slash ? slash + 1 : entry, part))
            return (struct look_preload){entry, !look_is_dangling(machine, entry)};
    }
    return (struct look_preload){"", false};
}

const char *look_keep_preload(const struct doctor_machine *machine)
{
    const char *at = root_env(machine->root, "LD_PRELOAD"), *entry, *kept = "";

    while ((entry = look_next_preload(machine, &at)))
        if (!look_is_dangling(machine, entry))
            kept = root_printf(machine->root, "%s%s%s", kept, *kept ? ":" : "", entry);
    return *kept ? root_printf(machine->root, "export LD_PRELOAD=%s", shell_word(machine->root, kept))
                 : "unset LD_PRELOAD";
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

const char *look_lacking_verbs(const struct doctor_machine *machine)
{
    const struct stack_verbs *verbs = &machine->stack->verbs;
    const char *net = root_env(machine->root, "NCCL_NET"), *plugin = root_env(machine->root, "NCCL_NET_PLUGIN");
    bool wants_plugin = (net && strcasecmp(net, "Socket") != 0) || plugin;
    struct doctor_result unused = {.text = ""};
    bool uses_ibgda;

    if (!look_has_mlx5(machine, &unused))
        return "";
    uses_ibgda = look_uses_ibgda(machine, &unused);
    if (verbs->ibverbs.state == ROOT_ABSENT && (uses_ibgda || wants_plugin))
        return "libibverbs.so.1";
    return verbs->mlx5.state == ROOT_ABSENT && uses_ibgda ? "libmlx5.so.1" : "";
}

bool look_has_verbs_fault(const struct doctor_machine *machine, const char *path)
{
    struct libs_setting setting = libs_setting_of(machine->root);
    struct libs_closure *closure = NULL;
    bool has_fault = false;

    if (libs_load(machine->root, &setting, path, &closure) != EP_OK)
        return false;
    for (int i = 0; i < closure->n; i++)
        has_fault = has_fault || (closure->libs[i].place.state == ROOT_ABSENT &&
                                  (strcmp(closure->libs[i].name, "libibverbs.so.1") == 0 ||
                                   strcmp(closure->libs[i].name, "libmlx5.so.1") == 0));
    for (int i = 0; i < closure->n_gaps; i++)
        has_fault = has_fault || strncmp(closure->gaps[i].version, "IBVERBS_PRIVATE_", 16) == 0;
    libs_closure_free(closure);
    return has_fault;
}
