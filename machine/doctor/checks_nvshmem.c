/* SPDX-License-Identifier: Apache-2.0 */
/*
 * checks_nvshmem.c - which NIC NVSHMEM assigns to each GPU, in the end.
 *
 * Which check reports what: NVSHMEM_ENABLE_NIC_PE_MAPPING is one-nic, a prefix that matches no NIC is hca-prefix, a
 * mapping that DeepEP does not read is mapping-inactive; shared-nic reports the rest.
 */
#include "checks.h"
#include "common/env_variables.h"

/*
 * A shell that is not a rank has no NIC of its own: only the mapping helps, which DeepEP converts to a NIC. All other
 * values must be evaluated by each rank, as NVSHMEM_HCA_LIST is not set in a shell that is not a rank.
 */
static void fix_ranks(const struct doctor_machine *machine, struct doctor_result *result, const char *first)
{
    bool reads_mapping = machine_deepep(machine) && machine->software->deepep.mapping_active;
    bool is_rank = advice_gpu_of(machine->topo, advice_source_env, machine->source) >= 0;

    doctor_fix(result, false, is_rank || reads_mapping ? "%seval \"$(epkit env)\"" : "%sepkit env -- PROGRAM", first);
    doctor_advise(
        result,
        reads_mapping
            ? "That sets DEEP_EP_DEVICE_TO_HCA_MAPPING, by which DeepEP gives each of its "
              "processes one NIC. For other programs put it into the script that the "
              "launcher starts for each rank, or start them with 'epkit env -- PROGRAM'."
            : "Put that into the script that the launcher starts for each rank, or start the program with 'epkit env -- PROGRAM': each rank gets the NIC nearest to its GPU as NVSHMEM_HCA_LIST, which a login shell has not.");
}

/* --- one-nic --- */

void run_one_nic(const struct doctor_machine *machine, struct doctor_result *result)
{
    const char *switched = source_env(machine->source, "NVSHMEM_ENABLE_NIC_PE_MAPPING");
    const char *list = source_env(machine->source, "NVSHMEM_HCA_LIST");
    const char *mapping = source_env(machine->source, "DEEP_EP_DEVICE_TO_HCA_MAPPING");
    struct map *map, *deepep = NULL;
    bool spares_deepep;

    if (!variable_is_true(switched) || advice_is_single_nic(list) ||
        doctor_not_applicable_if(result, machine->topo->n_gpus < 2 || topo_data_ports(machine->topo, NULL) < 2,
                                 "there are not two GPUs with two NICs"))
        return;
    map = machine_nvshmem_map(machine);
    if (map->choices[0].nic < 0) {
        map_free(map);
        return; /* no NIC at all is reported by hca-prefix */
    }
    spares_deepep =
        mapping && machine->software->deepep.mapping_active && map_parse(machine->topo, mapping, &deepep) == EP_OK;
    doctor_found(result, spares_deepep ? DOCTOR_WARNING : DOCTOR_ERROR, "all %d GPUs take one NIC, %s, %s", map->n,
                 machine_nic_name(machine, map->choices[0].nic),
                 spares_deepep ? "in every program but DeepEP" : "because NVSHMEM_ENABLE_NIC_PE_MAPPING is set");
    doctor_evidence(result, "NVSHMEM_ENABLE_NIC_PE_MAPPING", "%s", switched);
    doctor_evidence_env(result, "NVSHMEM_HCA_LIST");
    if (spares_deepep)
        doctor_evidence(result, "DEEP_EP_DEVICE_TO_HCA_MAPPING",
                        "read by %s, which makes a list of one NIC for each process", machine_deepep(machine)->folder);
    /* Without the switch, the list by PE is a variable that does nothing. */
    fix_ranks(machine, result,
              source_env(machine->source, "NVSHMEM_HCA_PE_MAPPING")
                  ? "unset NVSHMEM_ENABLE_NIC_PE_MAPPING NVSHMEM_HCA_PE_MAPPING\n"
                  : "unset NVSHMEM_ENABLE_NIC_PE_MAPPING\n");
    map_free(deepep);
    map_free(map);
}

/* --- shared-nic --- */

/* Reports the first GPU of the mapping without a working NIC. */
static bool find_gpu_without(const struct doctor_machine *machine, const struct map *map, struct doctor_result *result)
{
    FOR_EACH (choice, map->choices, map->n) {
        const struct topo_port *port = topo_find_port(machine->topo, choice->nic, choice->port);

        if (choice->nic < 0)
            doctor_found(result, DOCTOR_ERROR, "DEEP_EP_DEVICE_TO_HCA_MAPPING names no NIC for GPU %d", choice->gpu);
        else if (!port || !port->active)
            doctor_found(result, DOCTOR_ERROR,
                         "DEEP_EP_DEVICE_TO_HCA_MAPPING gives GPU %d port %d of %s, which is down", choice->gpu,
                         choice->port, machine_nic_name(machine, choice->nic));
        else
            continue;
        return true;
    }
    return false;
}

/* The largest number of GPUs on one port. */
static int n_on_fullest(const struct map *map)
{
    const struct map_choice *all = map->choices;
    int most = 0;

    for (int gpu = 0; gpu < map->n; gpu++) {
        int n = all[gpu].nic < 0 ? 0 : COUNT_OF(i, map->n, all[i].nic == all[gpu].nic && all[i].port == all[gpu].port);

        most = n > most ? n : most;
    }
    return most;
}

/* Two GPUs on one port while other ports are idle; otherwise GPUs farther from their NIC than necessary. */
static bool find_worse(const struct doctor_machine *machine, const struct map *map, const char *by,
                       struct doctor_result *result)
{
    const struct map *best = machine->ibgda;
    /* That IBGDA could use. */
    int first = FIRST_OF(i, map->n_idle, topo_has_ibgda(machine->topo, map->idle[i])),
        idle = first < 0 ? -1 : map->idle[first];
    bool is_uneven = map->n_shared > best->n_shared || (idle >= 0 && n_on_fullest(map) > n_on_fullest(best));

    for (int gpu = 0; gpu < map->n && is_uneven; gpu++) {
        for (int other = gpu + 1; other < map->n; other++) {
            if (map->choices[gpu].nic < 0 || map->choices[gpu].nic != map->choices[other].nic ||
                map->choices[gpu].port != map->choices[other].port)
                continue;
            /* Half of the throughput is a warning; a third of it or less is an error. */
            doctor_found(result, n_on_fullest(map) > 2 * n_on_fullest(best) ? DOCTOR_ERROR : DOCTOR_WARNING,
                         "GPUs %d and %d share %s while %s is idle", gpu, other,
                         machine_nic_name(machine, map->choices[gpu].nic),
                         idle >= 0 ? machine_nic_name(machine, idle) : "none");
            doctor_evidence(result, by, "%d NIC%s used by several GPUs, %d idle", map->n_shared,
                            map->n_shared == 1 ? " is" : "s are", map->n_idle);
            return true;
        }
    }
    for (int gpu = 0; gpu < map->n && map->distance > best->distance; gpu++) {
        const struct map_choice *choice = &map->choices[gpu], *better = &best->choices[gpu];

        if (choice->nic < 0 || better->nic < 0 || choice->path <= better->path)
            continue;
        doctor_found(result, DOCTOR_WARNING, "GPU %d uses %s, which is %s away; %s is %s", gpu,
                     machine_nic_name(machine, choice->nic), topo_path_name(choice->path),
                     machine_nic_name(machine, better->nic), topo_path_name(better->path));
        doctor_evidence(result, by, "%s for GPU %d", machine_nic_name(machine, choice->nic), gpu);
        return true;
    }
    return false;
}

static void run_mapping(const struct doctor_machine *machine, const char *mapping, struct doctor_result *result)
{
    const char *best = map_deepep(machine->topo, machine->ibgda);
    struct map *map = NULL;

    /* visible-devices checks what a number means when GPUs are hidden. */
    if (map_parse(machine->topo, mapping, &map) != EP_OK) {
        doctor_found(result, DOCTOR_ERROR, "DEEP_EP_DEVICE_TO_HCA_MAPPING does not fit this machine: %s",
                     ep_last_error());
    } else if (machine->topo->n_hidden_gpus > 0 ||
               (!find_gpu_without(machine, map, result) &&
                !find_worse(machine, map, "DEEP_EP_DEVICE_TO_HCA_MAPPING", result))) {
        map_free(map);
        return;
    }
    map_free(map);
    doctor_evidence(result, "DEEP_EP_DEVICE_TO_HCA_MAPPING", "%s", mapping);
    doctor_fix(result, false, "export DEEP_EP_DEVICE_TO_HCA_MAPPING=%s", shell_word(machine->source, best));
}

/* With one GPU per task: another task has the same nearest NIC, and both take the first one. */
static bool find_neighbour(const struct doctor_machine *machine, const struct map *map, struct doctor_result *result)
{
    const struct map_choice *choice = &map->choices[0], *best = &machine->ibgda->choices[0];

    if (machine->topo->n_hidden_gpus == 0 || map->n != 1 || best->nic < 0 || choice->nic == best->nic)
        return false;
    doctor_found(
        result, DOCTOR_WARNING, "%s takes %s, which is the NIC of a GPU that this process does not have; its own is %s",
        machine_gpu_name(machine, 0), machine_nic_name(machine, choice->nic), machine_nic_name(machine, best->nic));
    doctor_evidence(result, "NVSHMEM's own choice", "%s", choice->why);
    return true;
}

static void run_default_choice(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct software_copy *copy = machine_deepep(machine);
    struct map *map = machine_nvshmem_map(machine);

    if (map->n > 0 && map->choices[0].nic >= 0 &&
        (find_worse(machine, map, "NVSHMEM's own choice", result) || find_neighbour(machine, map, result))) {
        doctor_evidence_env(result, "NVSHMEM_HCA_LIST");
        if (copy && machine->software->deepep.mapping_active)
            doctor_evidence(result, "DEEP_EP_DEVICE_TO_HCA_MAPPING", "not set, and read by %s", copy->folder);
        else if (copy)
            doctor_evidence(result, copy->folder, "switches IBGDA on, and has no mapping of GPUs to NICs");
        fix_ranks(machine, result, "");
    }
    map_free(map);
}

/* A list with one NIC is right for one process; set once for all of them, it is far from the GPUs of most. */
static void run_single(const struct doctor_machine *machine, struct doctor_result *result)
{
    const char *list = source_env(machine->source, "NVSHMEM_HCA_LIST");
    const struct topo *topo = machine->topo;
    int gpu = machine_own_gpu(machine), nic, best;

    if (gpu < 0 || gpu >= machine->ibgda->n)
        return;
    nic = topo_find_nic(topo, source_printf(machine->source, "%.*s", (int)strcspn(list, ":"), list));
    best = machine->ibgda->choices[gpu].nic;
    if (nic < 0 || best < 0 || topo_gpu_nic_path(topo, gpu, nic) <= machine->ibgda->choices[gpu].path)
        return;
    doctor_found(result, DOCTOR_WARNING,
                 "this process uses %s and NVSHMEM_HCA_LIST gives it %s, which is %s away; %s is %s",
                 machine_gpu_name(machine, gpu), machine_nic_name(machine, nic),
                 topo_path_name(topo_gpu_nic_path(topo, gpu, nic)), machine_nic_name(machine, best),
                 topo_path_name(machine->ibgda->choices[gpu].path));
    doctor_evidence(result, "NVSHMEM_HCA_LIST", "%s", list);
    doctor_fix(result, false, "epkit env -- PROGRAM");
    doctor_advise(result, "A list that is set in a script that runs once is the same for all ranks. If each rank "
                          "starts the program like this, it gets the NIC of its own GPU.");
}

void run_shared_nic(const struct doctor_machine *machine, struct doctor_result *result)
{
    const char *mapping = source_env(machine->source, "DEEP_EP_DEVICE_TO_HCA_MAPPING");

    if (doctor_not_applicable_if(result,
                                 machine->topo->n_gpus + machine->topo->n_hidden_gpus < 2 ||
                                     topo_data_ports(machine->topo, NULL) < 1,
                                 "there are not two GPUs with a NIC"))
        return;
    if (advice_is_single_nic(source_env(machine->source, "NVSHMEM_HCA_LIST"))) {
        run_single(machine, result);
        return;
    }
    if (mapping) {
        if (!machine_deepep(machine) || machine->software->deepep.mapping_active)
            run_mapping(machine, mapping, result);
        return;
    }
    if (machine_uses_ibgda(machine, result) &&
        !variable_is_true(source_env(machine->source, "NVSHMEM_ENABLE_NIC_PE_MAPPING")))
        run_default_choice(machine, result);
}
