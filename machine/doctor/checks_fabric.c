/* SPDX-License-Identifier: Apache-2.0 */
/* checks_fabric.c - NVLinks, NVSwitches and the fabric manager. */
#include "checks.h"
#include "kernel_log.h"

/* --- nvlink --- */

/*
 * Boards with soldered NVLinks, where all links should be up: SXM modules, Blackwell superchips, and everything with a
 * fabric or a switch. On all others (PCIe cards, A40, workstations, a single GH200) the links go to a bridge or a cable
 * that may be absent.
 */
static bool is_soldered(const struct topo *topo, const struct topo_gpu *self)
{
    static const char *const cards[] = {"PCIe", " NVL", "RTX", "Quadro", "GH200"};
    static const char *const boards[] = {"SXM", "HBM3", "H100", "H200", "H800", "H20", "B200", "B300"};

    if (ANY_OF(i, COUNT(cards), strcasestr(self->name, cards[i])))
        return false;
    return ANY_OF(i, COUNT(boards), strstr(self->name, boards[i])) ||
           ANY_OF(i, topo->n_gpus,
                  topo->gpus[i].answered && strcmp(topo->gpus[i].name, self->name) == 0 &&
                      (topo->gpus[i].fabric > TOPO_FABRIC_NONE || topo->gpus[i].nvlinks_switch > 0));
}

/* Links that should be up on a GPU: all of its own; on boards with bridges, as many as on its siblings. */
static int links_due(const struct topo *topo, int gpu)
{
    const struct topo_gpu *self = &topo->gpus[gpu];
    int due = 0;

    if (is_soldered(topo, self))
        return self->nvlinks;
    for (int i = 0; i < topo->n_gpus; i++)
        if (strcmp(topo->gpus[i].name, self->name) == 0 && topo->gpus[i].nvlinks_up > due)
            due = topo->gpus[i].nvlinks_up;
    return due;
}

static bool is_down(const struct topo *topo, int gpu)
{
    return topo->gpus[gpu].answered && topo->gpus[gpu].nvlinks_up < links_due(topo, gpu);
}

static void report_nvlinks(const struct doctor_machine *machine, struct doctor_result *result)
{
    FOR_EACH (gpu, machine->topo->gpus, machine->topo->n_gpus) {
        const char *fabric = gpu->fabric == TOPO_FABRIC_FAILED     ? ", fabric failed"
                             : gpu->fabric == TOPO_FABRIC_STARTING ? ", fabric not ready"
                                                                   : "";

        if (gpu->answered && (is_down(machine->topo, gpu->index) || *fabric))
            doctor_evidence(result, machine_gpu_name(machine, gpu->index), "%d of %d NVLinks up%s", gpu->nvlinks_up,
                            gpu->nvlinks, fabric);
    }
}

/* Some links of a board are down: all GPUs have lost the same number where an NVSwitch is missing. */
static void report_links(const struct doctor_machine *machine, struct doctor_result *result, int first, int n_down)
{
    const struct topo *topo = machine->topo;
    int due = links_due(topo, first), n_switches = inventory_nvswitches(machine);

    doctor_found(result, DOCTOR_ERROR, "%d of %d NVLinks of %s are down%s", due - topo->gpus[first].nvlinks_up, due,
                 machine_gpu_name(machine, first), n_down > 1 ? ", and of more GPUs" : "");
    if (n_down >= 2 && n_down == topo->n_gpus && n_switches > 0 &&
        !ANY_OF(i, topo->n_gpus, topo->gpus[i].nvlinks_up != topo->gpus[0].nvlinks_up)) {
        doctor_evidence(result, "/sys/bus/pci/devices", "%d NVSwitches", n_switches);
        doctor_advise(
            result,
            "All GPUs have lost the same number of links: the NVSwitch at their other end is missing or has failed. Look for it on the bus (lspci -d 10de:) and for SXids; cycle the node's power, since a reset of a GPU does not bring a switch back.");
    } else
        doctor_advise(
            result,
            "Look at the links (nvidia-smi nvlink --status -i %s) and for Xid 74; reset the GPU when nothing runs on the node. If the link stays down, take the node out of service.",
            topo->pci[topo->gpus[first].pci].address);
}

/* The fabric manager works only with the driver of its own version, so another version should not be restarted. */
static void fix_fabric(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct software_driver *driver = &machine->software->driver;
    const struct os *os = &machine->software->os;
    const char *manager = driver->fabric_manager, *version = driver->version;
    int n_major = (int)strcspn(version, ".");
    /*
     * The NVSwitches of Blackwell boards are not on the PCI bus. The fabric manager reaches them by InfiniBand
     * management datagrams, and its service does not start without the module ib_umad ("Fabric Manager User Guide").
     */
    bool misses_umad = machine->topo->n_gpus > 0 && machine->topo->gpus[0].cc_major == 10 &&
                       !machine_is_grace(machine->topo) && !os->in_container &&
                       machine_virtual(machine->source) == MACHINE_BARE_METAL && inventory_nvswitches(machine) == 0 &&
                       source_stat(machine->source, "/sys/module/ib_umad").state == SOURCE_ABSENT;

    /* Up to Hopper, the fabric manager runs where the switches are. Those of Blackwell are not on the bus. */
    if (machine_virtual(machine->source) == MACHINE_VIRTUAL && inventory_nvswitches(machine) == 0 &&
        machine->topo->gpus[0].cc_major < 10) {
        doctor_advise(
            result,
            "The host of this virtual machine owns the NVSwitches, and its fabric manager sets up the partition with these GPUs. Contact the operator of the host.");
        return;
    }
    if (*manager)
        doctor_evidence(result, "nvidia-fabricmanager", "%s is %s, the driver is %s", manager,
                        strcmp(driver->fabric_manager_from, SOFTWARE_FABRIC_LOG) == 0 ? "what was started last"
                                                                                      : "installed",
                        version);
    if (misses_umad) {
        doctor_evidence(result, "/sys/module/ib_umad", "not loaded");
        doctor_fix(result, false, "sudo modprobe ib_umad\nsudo systemctl restart nvidia-fabricmanager");
    } else if (!os->in_container && strcmp(manager, version) == 0)
        doctor_fix(result, false, "sudo systemctl restart nvidia-fabricmanager");
    else if (!os->in_container && (*manager || inventory_nvswitches(machine) > 0) &&
             *os_install(machine->source, os, "x", "x"))
        doctor_fix(
            result, false, "%s\nsudo systemctl restart nvidia-fabricmanager",
            os_install(machine->source, os,
                       source_printf(machine->source, "nvidia-fabricmanager-%.*s=%s-1", n_major, version, version),
                       source_printf(machine->source, "'nvidia-fabric*manager-%s-1'", version)));
    doctor_cost(result, DOCTOR_FIX_RESTART, "Programs that use the GPUs of this machine end.");
    doctor_advise(result,
                  "nvidia-fabricmanager has to run, in exactly the driver's version, %s, where the NVSwitches are (of "
                  "a container: on the node). 'nv-fabricmanager --version' prints its version; its journal "
                  "says why it does not run.%s",
                  *version ? version : "which is not known",
                  machine->topo->gpus[0].cc_major == 10 && inventory_nvswitches(machine) == 0
                      ? " This board needs NVLink's subnet manager as well (package nvlsm)."
                      : "");
}

void run_nvlink(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct topo *topo = machine->topo;
    const struct topo_gpu *gpus = topo->gpus;
    /* If NVLinks connect several nodes, the check imex reports the state of the fabric. */
    int n = topo->n_gpus, n_own = machine_has_multinode_nvlink(topo) ? 0 : n,
        n_failed = COUNT_OF(i, n_own, gpus[i].answered && gpus[i].fabric == TOPO_FABRIC_FAILED),
        n_starting = COUNT_OF(i, n_own, gpus[i].answered && gpus[i].fabric == TOPO_FABRIC_STARTING),
        n_linked = COUNT_OF(i, n, gpus[i].answered && gpus[i].nvlinks > 0), n_down = COUNT_OF(i, n, is_down(topo, i)),
        n_dead = COUNT_OF(i, n, is_down(topo, i) && gpus[i].nvlinks_up == 0), first = FIRST_OF(i, n, is_down(topo, i));
    /* Cloud instances with a single GPU of a board have the links to the others disabled, and no fabric to wait for. */
    bool is_partial = n == 1 && gpus[0].nvlinks_up == 0 && gpus[0].fabric != TOPO_FABRIC_FAILED &&
                      gpus[0].fabric != TOPO_FABRIC_STARTING;
    bool without_bridge = !ANY_OF(i, n, is_down(topo, i) && (gpus[i].nvlinks_up > 0 || is_soldered(topo, &gpus[i])));

    if (doctor_not_applicable_if(result, machine_isolates_gpus(topo),
                                 "confidential computing isolates the GPUs, as the check confidential says") ||
        doctor_not_applicable_if(result, n_linked == 0 || is_partial,
                                 n_linked ? "a single GPU, provided without its NVLinks" : "GPUs without NVLink") ||
        doctor_not_applicable_if(
            result, n_failed + n_starting == 0 && !ANY_OF(i, n, gpus[i].answered && links_due(topo, i) > 0),
            "GPUs whose NVLinks need a bridge, and there is none") ||
        n_down + n_failed + n_starting == 0)
        return;
    if (n_failed || n_starting || (n_dead == n_linked && n_dead > 1)) {
        doctor_found(result, DOCTOR_ERROR, "the NVLink fabric is not up on %d of %d GPUs: %s",
                     n_failed + n_starting ? n_failed + n_starting : n_dead, n,
                     n_failed     ? "it has failed"
                     : n_starting ? "it is not ready"
                                  : "no link is up");
        fix_fabric(machine, result);
    } else if (without_bridge) {
        doctor_found(result, DOCTOR_WARNING, "no NVLink of %s is up%s, and other GPUs of its kind have them",
                     machine_gpu_name(machine, first), n_down > 1 ? ", nor of more GPUs" : "");
        doctor_advise(result,
                      "The NVLinks of these GPUs lead to a bridge: check that it is plugged in at both %s and its "
                      "neighbor. If the machine is meant to have no bridge, this is normal.",
                      machine_gpu_name(machine, first));
    } else
        report_links(machine, result, first, n_down);
    report_nvlinks(machine, result);
}

/* --- fabric-manager --- */

void run_fabric_manager(const struct doctor_machine *machine, struct doctor_result *result)
{
    const char *version = machine->software->driver.fabric_manager, *driver = machine->software->driver.version;
    const char *from = machine->software->driver.fabric_manager_from;
    const struct topo *topo = machine->topo;
    /* The check nvlink reports a fabric that is not up, and checks the versions as well. */
    bool is_up = ANY_OF(i, topo->n_gpus, topo->gpus[i].nvlinks_up > 0) &&
                 !ANY_OF(i, topo->n_gpus,
                         topo->gpus[i].fabric == TOPO_FABRIC_STARTING || topo->gpus[i].fabric == TOPO_FABRIC_FAILED);

    if (doctor_not_applicable_if(result, inventory_nvswitches(machine) == 0, "no NVSwitch on the PCI bus") ||
        doctor_not_applicable_if(result, machine->software->os.in_container || !is_up, "%s",
                                 machine->software->os.in_container
                                     ? "a container: the fabric manager runs on the node"
                                     : "the fabric is not up, as the check nvlink says") ||
        doctor_not_applicable_if(result, !*version,
                                 "neither a package of the fabric manager nor its log contains its version"))
        return;
    /* The fabric manager that set up this fabric had the driver's version, whatever an older log says. */
    if (doctor_not_applicable_if(result, strcmp(from, SOFTWARE_FABRIC_LOG) == 0 && strcmp(version, driver) != 0,
                                 "no package contains the version of the fabric manager, and its log is old") ||
        strcmp(version, driver) == 0)
        return;
    doctor_found(result, DOCTOR_WARNING,
                 "the installed fabric manager has version %s, the driver %s: it will not start again", version,
                 driver);
    doctor_evidence(result, from, "nvidia-fabricmanager %s", version);
    doctor_evidence(result, "/proc/driver/nvidia/version", "%s", driver);
}

/* --- sxid --- */

void run_sxid(const struct doctor_machine *machine, struct doctor_result *result)
{
    struct kernel_log log;
    int first = 0, n = 0;

    if (doctor_not_applicable_if(result, inventory_nvswitches(machine) == 0, "no NVSwitch on the PCI bus"))
        return;
    log = kernel_log_sxids(machine->source);
    if (doctor_not_applicable_if(result, log.state != SOURCE_OK, "no kernel log can be read here, as gpu-errors says"))
        return;
    FOR_JSON (error, log.errors) {
        if (!kernel_error_is_since(error, log.since))
            continue;
        first = n++ == 0 ? json_int(error, "number") : first;
        doctor_evidence(result, log.where, "%s", kernel_error_line(machine->source, "SXid", error));
    }
    if (n == 0)
        return;
    doctor_found(result, DOCTOR_ERROR, "an NVSwitch reported a fatal error: SXid %d%s", first,
                 n > 1 ? ", and more" : "");
}
