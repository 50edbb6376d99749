/* SPDX-License-Identifier: Apache-2.0 */
#include "nccl_variables.h"

#include "machine/software/software.h"
#include "queries.h"
#include "shell.h"

#include <stdlib.h>
#include <string.h>

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

/* Does an entry of the list, "name" or "name:port", match this device? */
static bool stands_for(const char *entry, size_t n, bool is_exact, const char *name, int port)
{
    const char *colon = memchr(entry, ':', n);
    size_t n_name = colon ? (size_t)(colon - entry) : n;

    if (n_name == 0 || strncmp(name, entry, n_name) != 0 || (is_exact && name[n_name]))
        return false;
    return !colon || port < 0 || strtol(colon + 1, NULL, 10) == port;
}

bool list_names_it(const struct list_names *names, const char *name, int port)
{
    for (const char *at = names->list; *at;) {
        size_t n = strcspn(at, ",");

        if (stands_for(at, n, names->is_exact, name, port))
            return !names->is_exclusion;
        at += n + (at[n] != '\0');
    }
    return names->is_exclusion;
}
