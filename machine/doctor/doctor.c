/* SPDX-License-Identifier: Apache-2.0 */
/* doctor.c - reads the machine that is checked, and runs checks. */
#include "doctor.h"
#include "base/error.h"
#include "queries.h"
#include "stacks.h"

#include <stdlib.h>
#include <string.h>

static ep_status read_parts(struct doctor_machine *machine)
{
    ep_status status;

    status = topo_read(machine->source, &machine->topo);
    if (status == EP_OK)
        status = map_best(machine->topo, &machine->map);
    if (status == EP_OK)
        status = map_ibgda(machine->topo, &machine->ibgda);
    if (status == EP_OK)
        status = software_read(machine->source, machine->topo, &machine->software);
    if (status == EP_OK)
        status = advice_make(machine->topo, machine->software, machine->map, machine->ibgda, &machine->advice);
    if (status == EP_OK)
        status = audit_make(machine->topo, machine->software, machine->advice, &machine->audit);
    return status;
}

ep_status doctor_machine_read(struct source *source, struct doctor_machine **ret_machine)
{
    struct doctor_machine *machine = calloc(1, sizeof(*machine));
    ep_status status;

    if (!machine) {
        source_free(source);
        return ep_fail(EP_E_MEMORY, "doctor: no memory for the machine");
    }
    machine->source = source;
    machine->stacks = calloc(STACKS_MAX, sizeof(*machine->stacks));
    status = machine->stacks ? read_parts(machine) : ep_fail(EP_E_MEMORY, "doctor: no memory for the machine");
    if (status != EP_OK) {
        doctor_machine_free(machine);
        return status;
    }
    *ret_machine = machine;
    return EP_OK;
}

void doctor_machine_free(struct doctor_machine *machine)
{
    if (!machine)
        return;
    free(machine->stacks);
    audit_free(machine->audit);
    advice_free(machine->advice);
    software_free(machine->software);
    map_free(machine->ibgda);
    map_free(machine->map);
    topo_free(machine->topo);
    source_free(machine->source);
    free(machine);
}

const struct doctor_check *doctor_find(const char *id)
{
    for (size_t i = 0; doctor_checks[i]; i++)
        if (strcmp(doctor_checks[i]->id, id) == 0)
            return doctor_checks[i];
    return NULL;
}

static bool has_nvml(const struct doctor_machine *machine, struct doctor_result *result)
{
    if (!machine->topo->nvml)
        result->missing = machine_missing_nvml(machine);
    return !doctor_unknown_if(result, !machine->topo->nvml, "NVML does not answer: %s", machine->topo->nvml_why);
}

static bool has_needs(const struct doctor_machine *machine, unsigned needs, struct doctor_result *result)
{
    return (!(needs & NEEDS_GPUS) || machine_has_gpus(machine, result)) &&
           (!(needs & (NEEDS_DRIVER | NEEDS_NVML)) || machine_has_driver(machine, result)) &&
           (!(needs & NEEDS_NVML) || has_nvml(machine, result)) &&
           (!(needs & NEEDS_DATA_NICS) || machine_has_data_nics(machine, result)) &&
           (!(needs & NEEDS_ENVIRONMENT) || machine_has_environment(machine, result));
}

void doctor_result_init(const struct doctor_machine *machine, const struct doctor_check *check,
                        struct doctor_result *ret_result)
{
    *ret_result =
        (struct doctor_result){.machine = machine, .check = check, .text = "", .fix = "", .advice = "", .fix_cost = ""};
}

void doctor_run(const struct doctor_machine *machine, const struct doctor_check *check,
                struct doctor_result *ret_result)
{
    doctor_result_init(machine, check, ret_result);
    if (has_needs(machine, check->needs, ret_result))
        check->run(machine, ret_result);
}
