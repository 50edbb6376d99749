/* SPDX-License-Identifier: Apache-2.0 */
/*
 * checks_ibgda.c - requirements of IBGDA: its transport, the doorbell handler, a single copy of NVSHMEM.
 *
 * Which check reports what: a driver option that is configured but not live is driver-option; the handler cpu without
 * GDRCopy is gdrcopy, with it nic-handler.
 */
#include "checks.h"
#include "common/env_variables.h"

#define PARAMS "/proc/driver/nvidia/params"
#define GDRDRV "/dev/gdrdrv"

static bool handler_is_cpu(const struct doctor_machine *machine)
{
    return strcasecmp(machine_env(machine, "NVSHMEM_IBGDA_NIC_HANDLER"), "cpu") == 0;
}

/* What prevents libgdrapi from opening its device; "" if nothing does, or if a snapshot does not contain it. */
static const char *gdrdrv_problem(const struct doctor_machine *machine)
{
    struct source_stat device = source_stat(machine->source, GDRDRV);

    if (device.state == SOURCE_ABSENT)
        return "is not there";
    if (device.state == SOURCE_OK && machine_is_of_another(device, machine->software->driver.gdrdrv_number))
        return "belongs to no driver: the module has no device number, or another one";
    return device.state == SOURCE_OK && !machine_may_open(device) ? "may not be opened" : "";
}

const char *machine_lacks_gdrcopy(const struct doctor_machine *machine)
{
    const char *device = gdrdrv_problem(machine);

    if (machine->software->nvshmem.gdrapi.state == SOURCE_ABSENT)
        return "libgdrapi.so.2 is not there";
    if (machine->software->driver.gdrdrv == SOURCE_ABSENT)
        return "its module gdrdrv is not loaded";
    if (source_stat(machine->source, "/sys/module/nv_p2p_dummy").state == SOURCE_OK)
        return "its module gdrdrv was built without the driver, and uses nv_p2p_dummy in its place";
    return *device ? source_printf(machine->source, GDRDRV " %s", device) : "";
}

static bool gdrcopy_is_complete(const struct doctor_machine *machine)
{
    return machine->software->nvshmem.gdrapi.state == SOURCE_OK && machine->software->driver.gdrdrv == SOURCE_OK &&
           !*machine_lacks_gdrcopy(machine) &&
           !variable_is_true(source_env(machine->source, "NVSHMEM_DISABLE_GDRCOPY"));
}

/* --- nic-handler --- */

void run_nic_handler(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct software_option *option = &machine->software->driver.peer_mapping_override;
    const char *handler = source_env(machine->source, "NVSHMEM_IBGDA_NIC_HANDLER");
    struct source_text params;

    if (!machine_uses_ibgda(machine, result))
        return;
    if (handler_is_cpu(machine)) {
        if (!gdrcopy_is_complete(machine))
            return;
        doctor_found(result, DOCTOR_ERROR, "the CPU rings the NICs' doorbells: NVSHMEM_IBGDA_NIC_HANDLER=cpu");
        doctor_evidence(result, "NVSHMEM_IBGDA_NIC_HANDLER", "%s", handler);
        doctor_fix(result, false, "export NVSHMEM_IBGDA_NIC_HANDLER=gpu");
        return;
    }
    if (strtoll(option->live, NULL, 0) != 0 || *option->configured || *option->overruled ||
        doctor_not_applicable_if(result,
                                 software_has_cpu_assisted_ibgda(&machine->software->nvshmem) &&
                                     !(handler && strcasecmp(handler, "gpu") == 0),
                                 "without PeerMappingOverride, NVSHMEM %s has the CPU ring the doorbells: slower, and "
                                 "right",
                                 machine->software->nvshmem.version))
        return;
    params = source_read(machine->source, PARAMS);
    if (doctor_unreadable_if(result, params.state != SOURCE_OK, PARAMS, params.state, params.why))
        return;
    /* NVIDIA/nvshmem#34: from 3.4.5 on it runs, whatever was asked for. */
    if (software_has_cpu_assisted_ibgda(&machine->software->nvshmem))
        doctor_found(result, DOCTOR_WARNING,
                     "GPUs may not ring the NICs' doorbells, as NVSHMEM_IBGDA_NIC_HANDLER=gpu "
                     "asks for: the CPU does, which is slower");
    else
        doctor_found(result, DOCTOR_ERROR,
                     "GPUs cannot ring the NICs' doorbells, and NVSHMEM falls back to the CPU without a message");
    doctor_evidence(result, PARAMS, "%s%s", *option->live ? "PeerMappingOverride=" : "no PeerMappingOverride",
                    option->live);
    doctor_evidence(result, "NVSHMEM_IBGDA_NIC_HANDLER", "%s", handler ? handler : "not set, which is auto");
    driver_fix_peer_mapping(machine, result);
}

/* --- gdrcopy --- */

void run_gdrcopy(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct software_nvshmem *nvshmem = &machine->software->nvshmem;
    enum source_state module = machine->software->driver.gdrdrv;
    const char *device = gdrdrv_problem(machine), *lacks = machine_lacks_gdrcopy(machine);
    bool is_disabled = variable_is_true(source_env(machine->source, "NVSHMEM_DISABLE_GDRCOPY"));

    if (doctor_not_applicable_if(result, !handler_is_cpu(machine),
                                 "only NVSHMEM_IBGDA_NIC_HANDLER=cpu needs GDRCopy") ||
        gdrcopy_is_complete(machine) ||
        doctor_unreadable_if(result, !*lacks && !is_disabled, "GDRCopy",
                             nvshmem->gdrapi.state != SOURCE_OK ? nvshmem->gdrapi.state : module, NULL))
        return;
    doctor_found(result, DOCTOR_ERROR, "NVSHMEM_IBGDA_NIC_HANDLER=cpu needs GDRCopy, and %s",
                 *lacks ? lacks : "NVSHMEM_DISABLE_GDRCOPY switches it off");
    doctor_evidence(result, "libgdrapi.so.2", "%s",
                    nvshmem->gdrapi.state == SOURCE_OK ? nvshmem->gdrapi.path : "not found by the linker");
    doctor_evidence(result, "/sys/module/gdrdrv", "%s", module == SOURCE_OK ? "loaded" : machine_reason(module, NULL));
    if (module == SOURCE_OK && *device)
        doctor_evidence(result, GDRDRV, "%s", device);
    doctor_fix(result, false, "export NVSHMEM_IBGDA_NIC_HANDLER=gpu");
    doctor_advise(result, "The handler gpu needs no GDRCopy. If it has to be cpu, %s%s.",
                  machine->software->driver.gdrdrv_number < 0
                      ? "load the module again: sudo modprobe -r gdrdrv, then sudo modprobe gdrdrv"
                      : "install GDRCopy",
                  *device && machine->software->os.in_container ? ", and give the container " GDRDRV : "");
}

/* --- ibgda-transport --- */

void run_ibgda_transport(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct software_nvshmem *nvshmem = &machine->software->nvshmem;

    if (!machine_uses_ibgda(machine, result))
        return;
    if (!*nvshmem->transport_ibgda) {
        doctor_found(result, DOCTOR_ERROR, "NVSHMEM %s has no transport for IBGDA: it was built without",
                     nvshmem->version);
        doctor_evidence(result, "libnvshmem_host.so.3", "%s",
                        nvshmem->host.state == SOURCE_OK ? nvshmem->host.path : nvshmem->home);
        doctor_evidence(result, "nvshmem_transport_ibgda.so.*", "not in the same folder");
        doctor_advise(result, "Build NVSHMEM with NVSHMEM_IBGDA_SUPPORT=1, or install the wheel nvidia-nvshmem, which "
                              "has it.");
        return;
    }
    machine_check_load(machine, result, "NVSHMEM's transport for IBGDA", nvshmem->transport_ibgda,
                       "Install what is missing, or build NVSHMEM again against the libmlx5 of this machine.");
}

/* --- two-nvshmem --- */

void run_two_nvshmem(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct advice_row *advised = advice_find(machine->advice, "LD_PRELOAD");
    struct source_names mapped = libs_mapped(machine->source, "libnvshmem_host.so");
    struct machine_preload preload = machine_preload(machine, "libnvshmem");
    const struct software_nvshmem *nvshmem = &machine->software->nvshmem;
    bool is_used = machine_sets_nvshmem(machine) || machine_has_deepep(machine);
    /* A script of 'epkit env' sets it instead of LD_PRELOAD: programs are started with it. */
    const char *script = machine_env(machine, "EPKIT_PRELOAD");

    if (machine_is_overwritten(result, "nvshmem", nvshmem->bundled))
        return;
    if (!machine_has_two(result, "libnvshmem_host.so", "NVSHMEM")) {
        if (*preload.path && preload.is_there)
            return;
        if (*preload.path) {
            doctor_found(result, DOCTOR_ERROR, "LD_PRELOAD names an NVSHMEM that is not there: %s", preload.path);
            doctor_evidence(result, "LD_PRELOAD", "%s", preload.path);
        } else {
            /* A process that has already loaded one has made its choice. */
            if (!advised || mapped.n == 1 || !is_used ||
                (*script == '/' && source_stat(machine->source, "%s", script).state == SOURCE_OK))
                return;
            /* PyTorch's is loaded first, where a program imports it: certain if DeepEP is imported. */
            doctor_found(
                result, machine_has_deepep(machine) ? DOCTOR_ERROR : DOCTOR_WARNING,
                "PyTorch loads NVSHMEM %s, and nothing makes the one that DeepEP was built with take precedence",
                *nvshmem->bundled_version ? nvshmem->bundled_version : "of another version");
            doctor_evidence(result, nvshmem->bundled, "%s", nvshmem->bundled_version);
            doctor_evidence(result, "LD_PRELOAD", "%s",
                            source_env(machine->source, "LD_PRELOAD") ? "has no NVSHMEM in it" : "not set");
        }
    }
    if (advised && !advised->unset) {
        doctor_fix(result, false, "epkit env -- PROGRAM");
        doctor_advise(result,
                      "That sets LD_PRELOAD=%s for the program only. Exported in a shell, it would affect launchers "
                      "and ssh as well.",
                      advised->value);
    } else if (*preload.path) {
        doctor_fix(result, false, "%s", machine_preload_command(machine));
    } else {
        doctor_advise(result, "Start the program with one of them in LD_PRELOAD, or remove the other one.");
    }
}

/* --- home --- */

struct missing_paths {
    const char *first, *names, *unset; /* the first path; the variables, and the command without LD_PRELOAD */
    bool has_preload;
};

static void add_missing(struct doctor_result *result, const char *name, const char *path, struct missing_paths *all)
{
    struct source *source = result->machine->source;
    bool is_preload = strcmp(name, "LD_PRELOAD") == 0;

    doctor_evidence(result, name, "%s: not there", path);
    all->first = *all->first ? all->first : path;
    if (!is_preload || !all->has_preload)
        all->names = source_printf(source, "%s%s%s", all->names, *all->names ? " " : "", name);
    if (!is_preload && shell_is_name(name))
        all->unset = source_printf(source, "%s %s", *all->unset ? all->unset : "unset", name);
    all->has_preload = all->has_preload || is_preload;
}

#define BUILD "NVSHMEM_DIR" /* read by DeepEP's build */

static void find_missing_paths(const struct doctor_machine *machine, struct doctor_result *result,
                               struct missing_paths *all)
{
    struct machine_preload nvshmem = machine_preload(machine, "libnvshmem"),
                           nccl = machine_preload(machine, "libnccl.so");
    const char *headers = source_env(machine->source, BUILD), *at = source_env(machine->source, "LD_PRELOAD"), *entry;

    FOR_EACH (row, machine->audit->rows, machine->audit->n) {
        /* gib-settings checks that of NCCL's tuner. */
        if (row->kind == AUDIT_PATH && strcmp(row->name, "LD_PRELOAD") != 0 &&
            !(strcmp(row->name, "NCCL_TUNER_CONFIG_PATH") == 0 && *machine->software->nccl.gib))
            add_missing(result, row->name, row->value, all);
    }
    if (headers && source_is_folder(source_stat(machine->source, "%s", headers)) &&
        source_stat(machine->source, "%s/include/nvshmem.h", headers).state == SOURCE_ABSENT)
        add_missing(result, BUILD, source_printf(machine->source, "%s/include/nvshmem.h", headers), all);
    /* Of LD_PRELOAD, two-nvshmem and two-nccl report theirs. */
    while ((entry = machine_next_word(machine, &at, MACHINE_PRELOAD_SEPARATORS)))
        if (machine_is_missing_preload(machine, entry) && strcmp(entry, nvshmem.path) != 0 &&
            strcmp(entry, nccl.path) != 0)
            add_missing(result, "LD_PRELOAD", entry, all);
}

void run_home(const struct doctor_machine *machine, struct doctor_result *result)
{
    struct missing_paths all = {.first = "", .names = "", .unset = ""};

    find_missing_paths(machine, result, &all);
    if (!*all.first)
        return;
    if (!strchr(all.names, ' '))
        doctor_found(result, DOCTOR_WARNING, "%s names a path that does not exist: %s", all.names, all.first);
    else
        doctor_found(result, DOCTOR_WARNING, "several variables name paths that do not exist: %s", all.names);
    doctor_fix(result, false, "%s%s%s", all.unset, *all.unset && all.has_preload ? "\n" : "",
               all.has_preload ? machine_preload_command(machine) : "");
    doctor_advise(result, "Or set each to the right path%s",
                  machine->software->os.in_container
                      ? " in this container: what an installer put below /opt may be mounted elsewhere, "
                        "/usr/local/nvidia on GKE."
                      : " on this machine.");
}
