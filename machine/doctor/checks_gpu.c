/* SPDX-License-Identifier: Apache-2.0 */
/* checks_gpu.c - errors and NVLinks as the GPUs report them. In the group of the driver, which reports them. */
#include "checks.h"
#include "inventory.h"
#include "kernel_log.h"
#include "queries.h"
#include "shell.h"
#include "xid.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* --- gpu-errors --- */

#define XID_OFF_THE_BUS 79

static int gpu_at(const struct topo *topo, const char *address)
{
    for (int i = 0; i < topo->n_gpus; i++)
        if (topo->gpus[i].pci >= 0 && strncasecmp(topo->pci[topo->gpus[i].pci].address, address, strlen(address)) == 0)
            return i;
    return -1;
}

struct gpu_errors {
    int n, n_severe;      /* number of different errors; of severe ones */
    int first_gpu;        /* of the first severe error, otherwise of the first error; -1: not a GPU of this process */
    const char *first_at; /* its PCI address, as far as the log contains it */
    const char *first;
    bool in_log;  /* one of them is from the kernel log */
    bool reboot;  /* the driver says that a reset is not sufficient, or the Xid requires a reboot */
    bool is_lost; /* the first severe error is a GPU that has fallen off the bus */
    bool is_link; /* the fault is an NVLink */
};

static void record_error(struct gpu_errors *errors, bool is_severe, int gpu, const char *at, const char *what)
{
    if (errors->n == 0 || (is_severe && errors->n_severe == 0)) {
        errors->first_gpu = gpu;
        errors->first_at = at;
        errors->first = what;
    }
    errors->n++;
    errors->n_severe += is_severe;
}

static void check_nvml(const struct doctor_machine *machine, struct doctor_result *result, struct gpu_errors *errors)
{
    for (int i = 0; i < machine->topo->n_gpus; i++) {
        const struct topo_gpu *gpu = &machine->topo->gpus[i];
        const char *where = machine_gpu_name(machine, i);

        if (!gpu->answered) {
            if (machine->topo->nvml) {
                record_error(errors, true, i, "", "it has a device file, and the driver does not answer for it");
                doctor_evidence(machine, result, where, "NVML does not list it, as of a GPU off the bus");
            }
            continue;
        }
        if (gpu->ecc_uncorrected > 0) {
            record_error(errors, true, i, "", "uncorrected ECC errors");
            doctor_evidence(machine, result, where, "%lld uncorrected ECC errors since the driver was loaded",
                            (long long)gpu->ecc_uncorrected);
        }
        if (gpu->remap_failed > 0) {
            record_error(errors, true, i, "", "remapping a row of memory failed");
            doctor_evidence(machine, result, where, "remapping a row of memory failed: the board has to be replaced");
        }
        if (gpu->remap_pending > 0) {
            record_error(errors, false, i, "", "a remapped row of memory waits for a reset");
            doctor_evidence(machine, result, where, "a remapped row of memory waits for a reset of the GPU");
        }
    }
}

/*
 * Errors caused by a program (an access out of bounds, a kill) are not faults of the machine, and after a successful
 * recovery NVML reports what remains, such as a pending reset. Xid 154 accompanies another one and contains the
 * recovery action.
 */
static void check_log(const struct doctor_machine *machine, struct doctor_result *result, const struct kernel_log *log,
                      struct gpu_errors *errors)
{
    for (int k = 0; k < log->n; k++) {
        const struct kernel_error *error = &log->errors[k];
        const struct xid *xid = xid_find(error->number);
        const char *action = kernel_recovery_name(error->recovery);

        errors->in_log = true;
        errors->reboot = errors->reboot || error->recovery == KERNEL_RECOVERY_REBOOT || xid->action == XID_RESTART;
        errors->is_lost = errors->is_lost || error->number == XID_OFF_THE_BUS;
        errors->is_link = errors->is_link || xid->action == XID_LINK;
        record_error(errors, xid->action != XID_RECOVERED, gpu_at(machine->topo, error->address), error->address,
                     source_printf(machine->source, "Xid %d (%s)", error->number, *action ? action : xid->text));
        doctor_evidence(machine, result, log->where, "%d x %s%s%s", error->n, error->time, *error->time ? " " : "",
                        error->line);
    }
}

/*
 * A reset uses the PCI address: the numbers of NVML, CUDA and device files differ when a GPU is missing. A GPU that has
 * fallen off the bus cannot be reset through the driver.
 */
static void fix_errors(const struct doctor_machine *machine, struct doctor_result *result,
                       const struct gpu_errors *errors)
{
    const struct topo *topo = machine->topo;
    const struct topo_gpu *gpu = errors->first_gpu >= 0 ? &topo->gpus[errors->first_gpu] : NULL;
    bool is_lost = errors->is_lost || (gpu && topo->nvml && !gpu->answered);

    if (machine->software->os.in_container)
        return;
    if (errors->reboot || is_lost) {
        doctor_fix(machine, result, false, "sudo reboot");
        doctor_cost(machine, result, DOCTOR_FIX_RESTART, "The machine restarts, and every job on it ends.");
    } else if (gpu && gpu->pci >= 0) {
        doctor_fix(machine, result, false, "sudo %s --gpu-reset -i %s",
                   os_driver_program(machine->source, &machine->software->os, "nvidia-smi"),
                   shell_word(machine->source, topo->pci[gpu->pci].address));
        doctor_cost(
            machine, result, DOCTOR_FIX_RESTART,
            "Every program on this GPU ends, and on those connected to it by NVLink; none may be running when it is "
            "reset.");
    }
}

static void run_gpu_errors(const struct doctor_machine *machine, struct doctor_result *result)
{
    struct gpu_errors errors = {.first_gpu = -1};
    struct kernel_log log;
    const char *gpu;

    if (!machine_has_driver(machine, result))
        return;
    kernel_log_read_xids(machine->source, &log);
    check_nvml(machine, result, &errors);
    if (log.state == SOURCE_OK)
        check_log(machine, result, &log, &errors);
    if (errors.n > 0) {
        gpu = errors.first_gpu >= 0 ? machine_gpu_name(machine, errors.first_gpu)
                                    : source_printf(machine->source, "the GPU at %s", errors.first_at);
        doctor_found(machine, result, errors.n_severe ? DOCTOR_ERROR : DOCTOR_WARNING, "%s: %s%s", gpu, errors.first,
                     errors.n > 1 ? ", and more" : "");
        fix_errors(machine, result, &errors);
        doctor_advise(
            machine, result,
            "%s If the error comes back after it, take the node out of service and have the board replaced.%s",
            xid_action_text(errors.reboot || errors.is_lost ? XID_RESTART
                            : errors.is_link                ? XID_LINK
                                                            : XID_RESET),
            errors.in_log
                ? " Lines of the kernel log, and so this finding, stay until the next reboot: after a reset look for "
                  "newer ones (sudo dmesg --ctime | grep Xid)."
                : "");
        return;
    }
    if (!machine->topo->nvml) {
        doctor_unknown(machine, result, "ECC errors: NVML does not answer: %s", machine->topo->nvml_why);
        result->missing = machine_missing_nvml(machine);
    } else if (log.state != SOURCE_OK) {
        doctor_unknown(machine, result, "the kernel log: /dev/kmsg: %s", machine_reason(log.state, log.why));
        result->missing = machine->software->os.in_container ? DOCTOR_MISSING_NODE : DOCTOR_MISSING_ROOT;
    }
}

const struct doctor_check check_gpu_errors = {
    .id = "gpu-errors",
    .group = "driver",
    .mode = 34,
    .title = "GPUs report no errors of their own",
    .symptom = "Programs end with CUDA errors (ECC, illegal address, launch failure), hang, or lose a GPU.",
    .cause = "The GPU or its memory is failing: the driver writes an Xid to the kernel log, and counts uncorrected ECC "
             "errors. A remapped row of memory is in use only after a reset.",
    .remedy = "Reset the GPU; if errors come back, replace it.",
    .links = (const char *const[]){"/dev/kmsg", "nvidia-smi -q -d ECC,ROW_REMAPPER", NULL},
    .run = run_gpu_errors,
};

/* --- nvlink --- */

/*
 * Boards with soldered NVLinks, where all links should be up: SXM modules, Blackwell superchips, and everything with a
 * fabric or a switch. On all others (PCIe cards, A40, workstations, a single GH200) the links go to a bridge or a cable
 * that may be absent.
 */
static bool is_soldered(const struct topo *topo, const struct topo_gpu *self)
{
    static const char *const cards[] = {"PCIe", " NVL", "RTX", "Quadro", "GH200", NULL};
    static const char *const boards[] = {"SXM", "HBM3", "H100", "H200", "H800", "H20", "B200", "B300", NULL};

    for (int i = 0; cards[i]; i++)
        if (strcasestr(self->name, cards[i]))
            return false;
    for (int i = 0; boards[i]; i++)
        if (strstr(self->name, boards[i]))
            return true;
    for (int i = 0; i < topo->n_gpus; i++)
        if (topo->gpus[i].answered && strcmp(topo->gpus[i].name, self->name) == 0 &&
            (topo->gpus[i].fabric > TOPO_FABRIC_NONE || topo->gpus[i].nvlinks_switch > 0))
            return true;
    return false;
}

/*
 * The number of links that should be up on a GPU: all of its own; on boards with bridges, as many as on its siblings.
 */
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

/* Cloud instances with a single GPU of a board have the links to the others disabled. */
static bool is_partial_board(const struct topo *topo)
{
    return topo->n_gpus == 1 && topo->gpus[0].nvlinks_up == 0 && topo->gpus[0].fabric != TOPO_FABRIC_FAILED;
}

struct nvlink_count {
    int n_answered, n_linked; /* GPUs that answered; that have links */
    int n_down, first_down;   /* GPUs with links down; the first of them */
    int n_dead;               /* GPUs with all links down */
    int n_due;                /* GPUs whose links should be up */
    bool without_bridge;      /* GPUs with links down have no link up, and may have no bridge */
    int n_starting, n_failed; /* by state of their fabric */
    int first_fabric;
};

static struct nvlink_count count_nvlinks(const struct doctor_machine *machine)
{
    const struct topo *topo = machine->topo;
    struct nvlink_count count = {.first_down = -1, .first_fabric = -1, .without_bridge = true};

    for (int i = 0; i < topo->n_gpus; i++) {
        const struct topo_gpu *gpu = &topo->gpus[i];

        if (!gpu->answered)
            continue;
        count.n_answered++;
        count.n_linked += gpu->nvlinks > 0;
        count.n_due += links_due(topo, i) > 0;
        if (gpu->nvlinks_up < links_due(topo, i)) {
            count.n_down++;
            count.n_dead += gpu->nvlinks_up == 0;
            count.without_bridge = count.without_bridge && gpu->nvlinks_up == 0 && !is_soldered(topo, gpu);
            if (count.first_down < 0)
                count.first_down = i;
        }
        /* If NVLinks connect several nodes, the check imex reports the state of the fabric. */
        if (machine_has_multinode_nvlink(topo))
            continue;
        count.n_starting += gpu->fabric == TOPO_FABRIC_STARTING;
        count.n_failed += gpu->fabric == TOPO_FABRIC_FAILED;
        if (count.first_fabric < 0 && (gpu->fabric == TOPO_FABRIC_STARTING || gpu->fabric == TOPO_FABRIC_FAILED))
            count.first_fabric = i;
    }
    return count;
}

/* All GPUs of a board with NVSwitches have lost the same number of links. */
static bool is_switch_lost(const struct doctor_machine *machine, const struct nvlink_count *count)
{
    const struct topo *topo = machine->topo;

    if (count->n_down < 2 || count->n_down != topo->n_gpus || inventory_nvswitches(machine) == 0)
        return false;
    for (int i = 1; i < topo->n_gpus; i++)
        if (topo->gpus[i].nvlinks_up != topo->gpus[0].nvlinks_up)
            return false;
    return true;
}

static void report_nvlinks(const struct doctor_machine *machine, struct doctor_result *result)
{
    for (int i = 0; i < machine->topo->n_gpus; i++) {
        const struct topo_gpu *gpu = &machine->topo->gpus[i];
        const char *fabric = gpu->fabric == TOPO_FABRIC_FAILED     ? ", fabric failed"
                             : gpu->fabric == TOPO_FABRIC_STARTING ? ", fabric not ready"
                                                                   : "";

        if (gpu->answered && (gpu->nvlinks_up < links_due(machine->topo, i) || *fabric))
            doctor_evidence(machine, result, machine_gpu_name(machine, i), "%d of %d NVLinks up%s", gpu->nvlinks_up,
                            gpu->nvlinks, fabric);
    }
}

/*
 * The NVSwitches of Blackwell boards are not on the PCI bus. The fabric manager reaches them by InfiniBand management
 * datagrams, and its service does not start without the module ib_umad ("Fabric Manager User Guide").
 */
static bool misses_umad(const struct doctor_machine *machine)
{
    const struct topo *topo = machine->topo;

    return topo->n_gpus > 0 && topo->gpus[0].cc_major == 10 && !machine_is_grace(topo) &&
           !machine->software->os.in_container && machine_virtual(machine->source) == MACHINE_BARE_METAL &&
           inventory_nvswitches(machine) == 0 &&
           source_stat(machine->source, "/sys/module/ib_umad").state == SOURCE_ABSENT;
}

/* The fabric manager works only with the driver of its own version, so another version should not be restarted. */
static void fix_fabric(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct software_driver *driver = &machine->software->driver;
    const struct os *os = &machine->software->os;
    const char *manager = driver->fabric_manager, *version = driver->version;
    int n_major = (int)strcspn(version, ".");

    /* Up to Hopper, the fabric manager runs where the switches are. Those of Blackwell are not on the bus. */
    if (machine_virtual(machine->source) == MACHINE_VIRTUAL && inventory_nvswitches(machine) == 0 &&
        machine->topo->gpus[0].cc_major < 10) {
        doctor_advise(
            machine, result,
            "The host of this virtual machine owns the NVSwitches. Its fabric manager sets up the fabric and the "
            "partition with these GPUs, which cannot be done in the virtual machine. Contact the operator of the "
            "host.");
        return;
    }
    if (*manager)
        doctor_evidence(machine, result, "nvidia-fabricmanager", "%s is %s, the driver is %s", manager,
                        strcmp(driver->fabric_manager_from, SOFTWARE_FABRIC_LOG) == 0 ? "what was started last"
                                                                                      : "installed",
                        version);
    if (misses_umad(machine)) {
        doctor_evidence(machine, result, "/sys/module/ib_umad", "not loaded");
        doctor_fix(machine, result, false, "sudo modprobe ib_umad\nsudo systemctl restart nvidia-fabricmanager");
    } else if (!os->in_container && strcmp(manager, version) == 0)
        doctor_fix(machine, result, false, "sudo systemctl restart nvidia-fabricmanager");
    else if (!os->in_container && *manager && *os_install(machine->source, os, "x", "x"))
        doctor_fix(
            machine, result, false, "%s\nsudo systemctl restart nvidia-fabricmanager",
            os_install(machine->source, os,
                       source_printf(machine->source, "nvidia-fabricmanager-%.*s=%s-1", n_major, version, version),
                       source_printf(machine->source, "'nvidia-fabric*manager-%s-1'", version)));
    doctor_cost(machine, result, DOCTOR_FIX_RESTART, "Programs that use the GPUs of this machine end.");
    doctor_advise(
        machine, result,
        "nvidia-fabricmanager has to run, in exactly the driver's version, %s (in a virtual machine: on the host; in "
        "a container: on the node). 'nv-fabricmanager --version' prints its version; its journal says why it does not "
        "run.%s",
        *version ? version : "which is not known",
        machine->topo->gpus[0].cc_major == 10 && inventory_nvswitches(machine) == 0
            ? " This board needs NVLink's subnet manager as well (package nvlsm)."
            : "");
}

static void run_nvlink(const struct doctor_machine *machine, struct doctor_result *result)
{
    struct nvlink_count count;

    if (!machine_has_driver(machine, result))
        return;
    if (!machine->topo->nvml) {
        doctor_unknown(machine, result, "NVML does not answer: %s", machine->topo->nvml_why);
        result->missing = machine_missing_nvml(machine);
        return;
    }
    if (machine_isolates_gpus(machine->topo)) {
        doctor_not_applicable(machine, result,
                              "confidential computing isolates the GPUs, as the check confidential says");
        return;
    }
    count = count_nvlinks(machine);
    if (count.n_linked == 0 || is_partial_board(machine->topo)) {
        doctor_not_applicable(machine, result,
                              count.n_linked ? "a single GPU, provided without its NVLinks" : "GPUs without NVLink");
        return;
    }
    if (count.n_due == 0 && count.n_failed == 0 && count.n_starting == 0) {
        doctor_not_applicable(machine, result, "GPUs whose NVLinks need a bridge, and there is none");
        return;
    }
    if (count.n_down == 0 && count.n_failed == 0 && count.n_starting == 0)
        return;
    if (count.n_failed || count.n_starting || (count.n_dead == count.n_linked && count.n_dead > 1)) {
        doctor_found(machine, result, DOCTOR_ERROR, "the NVLink fabric is not up on %d of %d GPUs: %s",
                     count.n_failed + count.n_starting ? count.n_failed + count.n_starting : count.n_dead,
                     machine->topo->n_gpus,
                     count.n_failed     ? "it has failed"
                     : count.n_starting ? "it is not ready"
                                        : "no link is up");
        fix_fabric(machine, result);
    } else if (count.without_bridge) {
        doctor_found(machine, result, DOCTOR_WARNING, "no NVLink of %s is up%s, and other GPUs of its kind have them",
                     machine_gpu_name(machine, count.first_down), count.n_down > 1 ? ", nor of more GPUs" : "");
        doctor_advise(
            machine, result,
            "The NVLinks of these GPUs lead to a bridge: check that it is plugged in at both %s and its neighbor. If "
            "the machine is meant to have no bridge, this is normal.",
            machine_gpu_name(machine, count.first_down));
    } else {
        doctor_found(machine, result, DOCTOR_ERROR, "%d of %d NVLinks of %s are down%s",
                     links_due(machine->topo, count.first_down) - machine->topo->gpus[count.first_down].nvlinks_up,
                     links_due(machine->topo, count.first_down), machine_gpu_name(machine, count.first_down),
                     count.n_down > 1 ? ", and of more GPUs" : "");
        if (is_switch_lost(machine, &count)) {
            doctor_evidence(machine, result, "/sys/bus/pci/devices", "%d NVSwitches", inventory_nvswitches(machine));
            doctor_advise(
                machine, result,
                "All GPUs have lost the same number of links: the NVSwitch at their other end is missing or has "
                "failed. Look for it on the bus (lspci -d 10de: | grep -i bridge) and for SXids in the kernel log; "
                "take the node out of service and cycle its power. A reset of a GPU does not bring a switch back.");
        } else
            doctor_advise(
                machine, result,
                "Look at the links (nvidia-smi nvlink --status -i %s) and at the kernel log for Xid 74; reset the "
                "GPU when nothing runs on the node. If the link stays down, take the node out of service.",
                machine->topo->pci[machine->topo->gpus[count.first_down].pci].address);
    }
    report_nvlinks(machine, result);
}

const struct doctor_check check_nvlink = {
    .id = "nvlink",
    .group = "driver",
    .mode = 35,
    .title = "all NVLinks are up and the fabric is ready",
    .symptom =
        "Dispatch within a node runs at a fraction of NVLink's bandwidth; \"system not yet initialized\" (CUDA 802).",
    .cause = "NVLinks are down, or the fabric manager has not set up the switches.",
    .remedy = "Start nvidia-fabricmanager in the version of the driver; repair links that stay down.",
    .links = (const char *const[]){"nvidia-smi nvlink --status", "nvidia-fabricmanager", NULL},
    .run = run_nvlink,
};
