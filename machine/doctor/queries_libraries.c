/* SPDX-License-Identifier: Apache-2.0 */
#include "queries.h"

#include "common/env_variables.h"
#include "common/json.h"
#include "common/text.h"
#include "fixes.h"

#include "machine/software/software.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define LOAD_MS 5000 /* loading from a network file system is slow */

const char *machine_nic_name(const struct doctor_machine *machine, int nic)
{
    char name[64];

    text_clean(machine->topo->nics[nic].name, name, sizeof(name));
    return source_printf(machine->source, "%s", name);
}

static bool is_nvshmem(const char *name)
{
    const struct variable *known = text_begins_any(name, TEXTS("NVSHMEM_", "DEEP_EP_")) ? variable_find(name) : NULL;

    return known && known->effect == VARIABLE_WORKS;
}

bool machine_sets_nvshmem(const struct doctor_machine *machine)
{
    struct source_environment environment = source_environment(machine->source);

    return ANY_OF(i, environment.n, is_nvshmem(environment.variables[i].name));
}

bool machine_has_mlx5(const struct doctor_machine *machine, struct doctor_result *result)
{
    if (!machine_has_data_nics(machine, result))
        return false;
    if (advice_has_mlx5(machine->topo))
        return true;
    doctor_not_applicable(result, "no NIC for data is one of NVIDIA's, which libmlx5 and IBGDA are for");
    return false;
}

bool machine_has_deepep(const struct doctor_machine *machine)
{
    const struct software_copy *copy = machine_deepep(machine);
    struct elf_facts facts;

    if (!copy)
        return false;
    facts = source_elf(machine->source, "%s", copy->extension);
    return facts.state != SOURCE_OK || ANY_OF(i, facts.n_needed, text_begins(facts.needed[i], "libnvshmem_host.so"));
}

bool machine_uses_ibgda(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct software_nvshmem *nvshmem = &machine->software->nvshmem;
    const char *transport = source_env(machine->source, "NVSHMEM_REMOTE_TRANSPORT");
    bool is_on = variable_is_true(source_env(machine->source, "NVSHMEM_IB_ENABLE_IBGDA"));

    if (doctor_not_applicable_if(
            result, topo_is_confidential(machine->topo),
            "confidential computing blocks NICs from GPU memory, as the check confidential says") ||
        !machine_has_mlx5(machine, result) ||
        doctor_not_applicable_if(result, nvshmem->host.state != SOURCE_OK && !*nvshmem->home, "no NVSHMEM was found"))
        return false;
    /* An explicit choice: this environment is not for DeepEP. */
    if (!is_on && transport && (strcasecmp(transport, "libfabric") == 0 || strcasecmp(transport, "ucx") == 0)) {
        doctor_not_applicable(result, "NVSHMEM_REMOTE_TRANSPORT selects %s",
                              strcasecmp(transport, "ucx") == 0 ? "ucx" : "libfabric");
        return false;
    }
    if (is_on || machine_has_deepep(machine) || source_env(machine->source, "NVSHMEM_IBGDA_NIC_HANDLER") ||
        (transport && strcasecmp(transport, "ibgda") == 0))
        return true;
    doctor_not_applicable(result, "neither the environment nor a DeepEP that Python finds uses IBGDA");
    return false;
}

struct map *machine_nvshmem_map(const struct doctor_machine *machine)
{
    const char *list = source_env(machine->source, "NVSHMEM_HCA_LIST");
    const char *prefix = source_env(machine->source, "NVSHMEM_HCA_PREFIX");
    struct map_nvshmem how = {
        .pe_mapping = variable_is_true(source_env(machine->source, "NVSHMEM_ENABLE_NIC_PE_MAPPING")),
        .hca_list = list ? list : "",
        .hca_prefix = prefix ? prefix : MACHINE_HCA_PREFIX,
    };

    return map_nvshmem(machine->topo, &how);
}

bool machine_is_missing_preload(const struct doctor_machine *machine, const char *entry)
{
    /* ld.so(8) treats quotes as part of the name. */
    if (*entry == '"' || *entry == '\'')
        return true;
    /* ld.so expands $LIB and similar variables */
    return *entry == '/' && !strchr(entry, '$') && source_stat(machine->source, "%s", entry).state == SOURCE_ABSENT;
}

struct machine_preload machine_preload(const struct doctor_machine *machine, const char *part)
{
    const char *at = source_env(machine->source, "LD_PRELOAD"), *entry;

    while ((entry = machine_next_word(machine, &at, MACHINE_PRELOAD_SEPARATORS)))
        if (strstr(text_base(entry), part))
            return (struct machine_preload){entry, !machine_is_missing_preload(machine, entry)};
    return (struct machine_preload){"", false};
}

const char *machine_preload_command(const struct doctor_machine *machine)
{
    const char *at = source_env(machine->source, "LD_PRELOAD"), *entry, *kept = "";

    while ((entry = machine_next_word(machine, &at, MACHINE_PRELOAD_SEPARATORS)))
        if (!machine_is_missing_preload(machine, entry))
            kept = source_printf(machine->source, "%s%s%s", kept, *kept ? ":" : "", entry);
    return *kept ? source_printf(machine->source, "export LD_PRELOAD=%s", shell_word(machine->source, kept))
                 : "unset LD_PRELOAD";
}

/* Runs in a child process, so that constructors and crashes of the library do not affect this one. */
static json_t *load_library(void *path)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    const char *error = library ? NULL : dlerror();

    return error ? json_pack("{s:b, s:s}", "ok", 0, "error", error) : json_pack("{s:b}", "ok", 1);
}

/* Are libibverbs or libmlx5 not found, or from different installations? */
static bool has_verbs_fault(const struct libs_closure *closure)
{
    return ANY_OF(i, closure->n,
                  closure->libs[i].location.state == SOURCE_ABSENT &&
                      text_is_any(closure->libs[i].name, TEXTS("libibverbs.so.1", "libmlx5.so.1"))) ||
           ANY_OF(i, closure->n_gaps, text_begins(closure->gaps[i].version, "IBVERBS_PRIVATE_"));
}

/* What ld.so would say of what the file needs, by the ELF headers; "" if nothing is known to be wrong. */
static const char *linker_error(const struct doctor_machine *machine, const struct libs_closure *closure)
{
    const struct lib_version_gap *gap = closure->gaps;
    int missing = closure->first_missing;

    if (missing > 0 && closure->libs[missing].location.state == SOURCE_ABSENT)
        return source_printf(machine->source, "%s: cannot open shared object file", closure->libs[missing].name);
    return closure->n_gaps == 0 ? ""
                                : source_printf(machine->source, "%s: version `%s' not found (required by %s)",
                                                closure->libs[gap->provider].location.path, gap->version,
                                                closure->libs[gap->user].location.path);
}

void machine_check_load(const struct doctor_machine *machine, struct doctor_result *result, const char *what,
                        const char *path, const char *advice)
{
    struct libs_env env = libs_env_of(machine->source);
    struct libs_closure *closure = libs_load(machine->source, &env, path);
    struct source_answer answer;
    const char *error;
    char shown[512];

    /* Constructors would run with the rights of this user, and the linker's environment is that of this process. */
    if (source_is_live(machine->source) && !source_is_self(machine->source))
        return;
    answer = source_query(machine->source, source_printf(machine->source, "load:%s", path), load_library,
                          (void *)(uintptr_t)path, LOAD_MS);
    if ((answer.state != SOURCE_NOT_RECORDED && doctor_unknown_if(result, answer.state != SOURCE_OK, "loading %s: %s",
                                                                  path, machine_reason(answer.state, answer.why))) ||
        json_is_true(json_object_get(answer.value, "ok")))
        return;
    error = answer.state == SOURCE_NOT_RECORDED ? linker_error(machine, closure) : json_text(answer.value, "error");
    text_clean(error, shown, sizeof(shown));
    if (!*shown || has_verbs_fault(closure))
        return;
    doctor_found(result, DOCTOR_ERROR, "%s does not load: %s", what, shown);
    doctor_evidence(result, path, "%s", shown);
    doctor_fix(result, false, "ldd %s", shell_word(machine->source, path));
    doctor_advise(result, "%s", advice);
}

bool machine_has_two(struct doctor_result *result, const char *part, const char *name)
{
    struct source_names mapped = libs_mapped(result->machine->source, part);

    if (mapped.n < 2)
        return false;
    doctor_found(result, DOCTOR_ERROR, "the process has loaded %zu copies of %s", mapped.n, name);
    for (size_t i = 0; i < mapped.n; i++)
        doctor_evidence(result, "/proc/self/maps", "%s", mapped.names[i]);
    return true;
}

/* --- values of variables --- */

const char *machine_nccl_value(const struct doctor_machine *machine, const char *name, const char **ret_file)
{
    const char *value = source_env(machine->source, name), *file = "";

    if (!value)
        value = software_nccl_conf(machine->source, name, &file);
    if (ret_file)
        *ret_file = file;
    return value;
}

void doctor_unset_value(struct doctor_result *result, const char *name)
{
    struct source *source = result->machine->source;
    const char *file, *fix = result->fix, *edit;

    machine_nccl_value(result->machine, name, &file);
    edit = *file ? source_printf(source, "sudoedit %s", shell_word(source, file)) : "";
    if (*edit && !strstr(fix, edit))
        doctor_fix(result, false, "%s%s%s", fix, *fix ? "\n" : "", edit);
    else if (!*edit && strncmp(fix, "unset ", 6) == 0)
        doctor_fix(result, false, "%.*s %s%s", (int)strcspn(fix, "\n"), fix, name, fix + strcspn(fix, "\n"));
    else if (!*edit)
        doctor_fix(result, false, "unset %s%s%s", name, *fix ? "\n" : "", fix);
}

void doctor_found_value(struct doctor_result *result, const char *name)
{
    const char *file, *value = machine_nccl_value(result->machine, name, &file);

    doctor_evidence(result, name, *file ? "%s, from %s" : "%s%s", value, file);
    doctor_unset_value(result, name);
}

bool machine_has_other_nodes(const struct doctor_machine *machine)
{
    return machine_job_nodes(machine) > 1 ||
           machine_job_number(machine, "WORLD_SIZE", 0) > machine_job_number(machine, "LOCAL_WORLD_SIZE", 1 << 20) ||
           machine_job_number(machine, "OMPI_COMM_WORLD_SIZE", 0) >
               machine_job_number(machine, "OMPI_COMM_WORLD_LOCAL_SIZE", 1 << 20);
}

struct list_names list_names_of(const char *value)
{
    struct list_names names = {.list = value ? value : ""};

    names.is_exclusion = *names.list == '^';
    names.list += names.is_exclusion;
    names.is_exact = *names.list == '=';
    names.list += names.is_exact;
    return names;
}

bool list_names_it(const struct list_names *names, const char *name, int port)
{
    FOR_PIECES (entry, names->list, ",") {
        const char *colon = memchr(entry.text, ':', entry.n);
        size_t n = colon ? (size_t)(colon - entry.text) : entry.n;

        if (n > 0 && strncmp(name, entry.text, n) == 0 && !(names->is_exact && name[n]) &&
            (!colon || port < 0 || strtol(colon + 1, NULL, 10) == port))
            return !names->is_exclusion;
    }
    return names->is_exclusion;
}
