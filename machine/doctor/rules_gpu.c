/* SPDX-License-Identifier: Apache-2.0 */
/* rules_gpu.c - the set of GPUs: number, MIG, clocks, confidential computing, nvidia-uvm, NVSwitches. */
#include "checks.h"
#include "inventory.h"
#include "kernel_log.h"
#include "machine/software/libs.h"
#include "queries.h"

#include <stdlib.h>
#include <string.h>

/* --- inventory --- */

#define NVIDIA 0x10de
#define CLASS_DISPLAY 0x03

/* The number of GPUs on the bus, including those of other containers and jobs. */
static int gpus_on_bus(const struct topo *topo)
{
    int n = 0;

    for (int i = 0; i < topo->n_pci; i++)
        n += topo->pci[i].vendor == NVIDIA && topo->pci[i].class_code >> 16 == CLASS_DISPLAY;
    return n > topo->n_gpus ? n : topo->n_gpus;
}

static void __attribute__((format(printf, 5, 6)))
differs(const struct doctor_machine *machine, struct doctor_result *result, const char *where, const char *what,
        const char *format, ...)
{
    char text[512];
    va_list args;

    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    if (result->outcome != DOCTOR_FOUND)
        doctor_found(machine, result, DOCTOR_ERROR, "%s: %s", what, text);
    doctor_evidence(machine, result, where, "%s: %s", what, text);
}

/* Matches the beginning of a version: "580" and "580.126" match "580.126.09", "58" does not. */
static bool is_version(const char *expected, const char *is)
{
    size_t n = strlen(expected);

    return strncmp(expected, is, n) == 0 && (is[n] == '\0' || is[n] == '.' || is[n] == '-');
}

static void expect_nics(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct doctor_inventory *expected = machine->expected;
    const struct topo *topo = machine->topo;
    int n = 0;

    for (int i = 0; i < topo->n_nics; i++) {
        const struct topo_nic *nic = &topo->nics[i];

        if (!machine_is_data_nic(topo, i))
            continue;
        n++;
        if (*expected->firmware && *nic->firmware && !is_version(expected->firmware, nic->firmware))
            differs(machine, result, nic->name, "firmware of a NIC", "%s, and %s is expected", nic->firmware,
                    expected->firmware);
        for (int p = 0; p < nic->n_ports; p++) {
            const struct topo_port *port = &nic->ports[p];

            if (!port->active)
                continue;
            if (expected->nic_gbps > 0 && port->rate_gbps > 0 && port->rate_gbps != expected->nic_gbps)
                differs(machine, result, nic->name, "rate of a NIC", "%g Gb/s, and %g Gb/s is expected",
                        port->rate_gbps, expected->nic_gbps);
            if (expected->link_layer != TOPO_LINK_UNKNOWN && port->link_layer != expected->link_layer)
                differs(machine, result, nic->name, "link layer of a NIC", "not %s, as is expected",
                        expected->link_layer == TOPO_LINK_ETHERNET ? "Ethernet" : "InfiniBand");
        }
    }
    if (expected->nics && n != expected->nics)
        differs(machine, result, "/sys/class/infiniband", "NICs for data", "%d, and %d are expected", n,
                expected->nics);
}

static void expect(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct doctor_inventory *expected = machine->expected;
    const struct topo *topo = machine->topo;

    if (expected->gpus && topo->n_gpus != expected->gpus)
        differs(machine, result, "/sys/bus/pci/devices", "GPUs", "%d, and %d are expected", topo->n_gpus,
                expected->gpus);
    for (int i = 0; *expected->gpu && i < topo->n_gpus; i++)
        if (*topo->gpus[i].name && !strcasestr(topo->gpus[i].name, expected->gpu))
            differs(machine, result, topo->pci[topo->gpus[i].pci].address, "kind of a GPU", "%s, and %s is expected",
                    topo->gpus[i].name, expected->gpu);
    if (*expected->driver && !is_version(expected->driver, topo->driver))
        differs(machine, result, "/proc/driver/nvidia/version", "NVIDIA driver", "%s, and %s is expected",
                *topo->driver ? topo->driver : "none", expected->driver);
    expect_nics(machine, result);
    if (result->outcome == DOCTOR_FOUND)
        doctor_advise(
            machine, result,
            "%s specifies this. Look for a missing device on the bus (lspci -d 10de:, lspci -d 15b3:) and in the "
            "kernel log; a device that is not even on the bus needs the node's power cycled, or the vendor.",
            expected->source);
}

static void run_inventory(const struct doctor_machine *machine, struct doctor_result *result)
{
    const char *board = "";
    int due, n = gpus_on_bus(machine->topo);

    if (machine->expected) {
        expect(machine, result);
        return;
    }
    due = machine->topo->n_gpus ? inventory_of_board(machine, &board) : 0;
    if (due == 0) {
        doctor_not_applicable(machine, result, "no expectation is given (--expect FILE)");
        return;
    }
    if (n >= due)
        return;
    doctor_found(machine, result, DOCTOR_ERROR, "%d of %d GPUs are on the PCI bus of %s", n, due, board);
    for (int i = 0; i < machine->topo->n_gpus; i++)
        doctor_evidence(machine, result, machine->topo->pci[machine->topo->gpus[i].pci].address, "GPU %d", i);
    doctor_advise(
        machine, result,
        "A GPU that is not on the bus is not seen by the driver either: take the node out of service, cycle its "
        "power, and have the board inspected if the GPU stays missing.");
}

const struct doctor_check check_inventory = {
    .id = "inventory",
    .group = "driver",
    .mode = 43,
    .title = "the machine has the devices that it should have",
    .symptom = "A job finds fewer GPUs or NICs than on other nodes, and waits or fails at its start.",
    .cause = "A device has dropped off the PCI bus, or the node is of another type than the job expects.",
    .remedy = "Cycle the power of the node, and have it repaired if the device stays missing.",
    .links = (const char *const[]){"/sys/bus/pci/devices", "/sys/class/dmi/id/product_name", NULL},
    .run = run_inventory,
};

/* --- mig --- */

/*
 * "NVIDIA H100XM-1-10C" is a virtual GPU of one slice with 10 GB, an instance of a GPU of the host; "H100XM-80C" is a
 * whole GPU.
 */
static bool is_virtual_instance(const struct topo_gpu *gpu)
{
    const char *last = strrchr(gpu->name, '-'), *at = last;
    size_t n = last ? 1 + strspn(last + 1, "0123456789") : 0;

    while (at && at > gpu->name && strchr("0123456789", at[-1]))
        at--;
    return n > 1 && strchr("ABCQ", last[n]) && last[n] && at < last && at > gpu->name && at[-1] == '-';
}

static void run_mig(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct topo *topo = machine->topo;
    int n = 0, n_virtual = 0, first = -1;

    for (int i = 0; i < topo->n_gpus; i++) {
        n += topo->gpus[i].mig == 1;
        n_virtual += is_virtual_instance(&topo->gpus[i]);
        first = first < 0 && topo->gpus[i].mig == 1 ? i : first;
    }
    if (n + n_virtual == 0)
        return;
    if (!machine_has_ranks(machine)) {
        doctor_not_applicable(machine, result, "one GPU, and nothing needs several ranks");
        return;
    }
    if (n_virtual > 0) {
        doctor_found(
            machine, result, DOCTOR_ERROR,
            "%d of %d GPUs are virtual ones of a part of a GPU, which have neither NVLink nor access to others",
            n_virtual, topo->n_gpus);
        for (int i = 0; i < topo->n_gpus; i++)
            if (is_virtual_instance(&topo->gpus[i]))
                doctor_evidence(machine, result, machine_gpu_name(machine, i), "%s", topo->gpus[i].name);
        doctor_advise(
            machine, result,
            "Ask the operator of the host for whole GPUs: passed through, or with a profile of the whole memory, "
            "which has a single number in its name.");
        return;
    }
    doctor_found(machine, result, DOCTOR_ERROR,
                 "MIG is on for %d of %d GPUs, and instances have neither NVLink nor access to other GPUs", n,
                 topo->n_gpus);
    for (int i = 0; i < topo->n_gpus; i++)
        if (topo->gpus[i].mig == 1)
            doctor_evidence(machine, result, topo->pci[topo->gpus[i].pci].address, "GPU %d: MIG mode is on", i);
    doctor_advise(machine, result,
                  "On the node, with nothing running on GPU %d: sudo %s -i %s -mig 0. It removes the instances "
                  "and resets the GPU, which ends every program on it.%s",
                  first, os_driver_program(machine->source, &machine->software->os, "nvidia-smi"),
                  topo->pci[topo->gpus[first].pci].address,
                  machine->software->os.in_container ? " In Kubernetes the MIG manager does it, by the label "
                                                       "nvidia.com/mig.config=all-disabled."
                                                     : "");
}

const struct doctor_check check_mig = {
    .id = "mig",
    .group = "driver",
    .mode = 44,
    .title = "GPUs are whole: MIG is off",
    .symptom = "NCCL and NVSHMEM see no peer access between GPUs; memory and SMs are a fraction of what is expected.",
    .cause = "A GPU in MIG mode is divided into instances. They do not use NVLink, and cannot map memory of other "
             "GPUs.",
    .remedy = "Switch MIG off on nodes for expert parallelism.",
    .needs = DOCTOR_NEEDS_NVML,
    .links = (const char *const[]){"nvidia-smi -mig", "CUDA_VISIBLE_DEVICES", NULL},
    .run = run_mig,
};

/* --- clocks --- */

static const char *slowdown_text(int slowdown)
{
    if (slowdown & TOPO_SLOW_HW_THERMAL)
        return "the hardware lowers the clocks to half or less because it is too hot";
    if (slowdown & TOPO_SLOW_POWER_BRAKE)
        return "the power supply makes the hardware lower the clocks to half or less (power brake)";
    if (slowdown & TOPO_SLOW_HARDWARE)
        return "the hardware lowers the clocks to half or less";
    return "the driver lowers the clocks because it is too hot";
}

/* Clocks that are lowered by a power cap, as under any full load, or by a setting are not a fault of the machine. */
static void run_clocks(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct topo *topo = machine->topo;
    int n = 0, n_expected = 0, first = -1, all = 0;

    for (int i = 0; i < topo->n_gpus; i++) {
        int slowdown = topo->gpus[i].slowdown;
        bool is_hardware = slowdown > 0 && (slowdown & ~TOPO_SLOW_SW_THERMAL);

        n_expected += slowdown >= 0;
        n += slowdown > 0;
        if (slowdown > 0 && (first < 0 || (is_hardware && !(all & ~TOPO_SLOW_SW_THERMAL))))
            first = i;
        all |= slowdown > 0 ? slowdown : 0;
    }
    if (n == 0) {
        if (n_expected == 0)
            doctor_not_applicable(machine, result, "the driver does not report why clocks are lowered");
        return;
    }
    doctor_found(machine, result, all & ~TOPO_SLOW_SW_THERMAL ? DOCTOR_ERROR : DOCTOR_WARNING, "%s: %s%s",
                 machine_gpu_name(machine, first), slowdown_text(topo->gpus[first].slowdown),
                 n > 1 ? ", and other GPUs are slowed down, too" : "");
    for (int i = 0; i < topo->n_gpus; i++)
        if (topo->gpus[i].slowdown > 0)
            doctor_evidence(machine, result, machine_gpu_name(machine, i), "%s", slowdown_text(topo->gpus[i].slowdown));
    doctor_advise(
        machine, result,
        "Check the current state: %s -q -d PERFORMANCE,TEMPERATURE,POWER. %s Under sustained load, one slow GPU "
        "delays all ranks.",
        os_driver_program(machine->source, &machine->software->os, "nvidia-smi"),
        all & (TOPO_SLOW_HW_THERMAL | TOPO_SLOW_SW_THERMAL)
            ? "Check the fans, the flow of air or water and its inlet temperature."
            : "Check the node's power supplies, their cables and the power limit of the rack.");
}

const struct doctor_check check_clocks = {
    .id = "clocks",
    .group = "driver",
    .mode = 57,
    .title = "no fault lowers the clocks of GPUs",
    .symptom = "One rank is slower than the others at the same work, and all others wait for it.",
    .cause = "The GPU is too hot, or the power supply asks the hardware to save power: it runs with lower clocks.",
    .remedy =
        "Repair the cooling or the power supply. Clocks lowered by a power cap under full load are normal, and are "
        "not reported.",
    .needs = DOCTOR_NEEDS_NVML,
    .links = (const char *const[]){"nvidia-smi -q -d PERFORMANCE", NULL},
    .run = run_clocks,
};

/* --- confidential --- */

bool machine_isolates_gpus(const struct topo *topo)
{
    return topo->cc_feature == 1 && topo->cc_mode == TOPO_CC_NONE && topo->n_gpus > 1;
}

static void run_confidential(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct topo *topo = machine->topo;
    const char *smi = os_driver_program(machine->source, &machine->software->os, "nvidia-smi");

    if (!topo_is_confidential(topo)) {
        doctor_not_applicable(machine, result, "%s",
                              topo->cc_feature < 0 ? "the driver does not report confidential computing"
                                                   : "confidential computing is off");
        return;
    }
    if (topo->cc_ready == 0) {
        doctor_found(machine, result, DOCTOR_ERROR,
                     "confidential computing is on, and the GPUs accept no work: their ready state is off");
        doctor_advise(
            machine, result,
            "The operator of this guest has to attest the GPUs and then set their ready state: sudo %s conf-compute "
            "-srs 1. It is lost when the driver is reloaded, so attestation belongs in the boot of the guest.",
            smi);
    } else if (machine_isolates_gpus(topo)) {
        doctor_found(machine, result, DOCTOR_ERROR,
                     "confidential computing is on in the mode for single GPUs, which isolates the %d GPUs",
                     topo->n_gpus);
        doctor_advise(
            machine, result,
            "Several GPUs of one guest reach each other in protected PCIe mode (Hopper, a whole board with its "
            "switches) or with encrypted NVLinks (Blackwell). The mode is set on the host, while no guest has the "
            "GPUs.");
    } else if (topo->n_gpus > 1 && machine_uses_rdma(machine) && machine_has_data_nics(machine, result)) {
        doctor_found(
            machine, result, DOCTOR_ERROR,
            "confidential computing is on: NICs cannot reach the memory of the GPUs, and something needs RDMA");
        doctor_advise(
            machine, result,
            "GPUDirect RDMA and IBGDA do not work with it. Between nodes, use a transport that copies through host "
            "memory (NCCL over sockets, or with NCCL_NET_GDR_LEVEL=LOC), or GPUs without confidential computing.%s",
            topo->cc_mode == TOPO_CC_PROTECTED_PCIE
                ? " In protected PCIe mode there is no CUDA IPC either, which DeepEP uses within the node."
                : "");
    } else {
        result->outcome = DOCTOR_FINE;
        return;
    }
    doctor_evidence(machine, result, "NVML", "confidential computing %s, ready state %s, multi-GPU mode %s",
                    topo->cc_feature == 1 ? "on" : "off",
                    topo->cc_ready == 1   ? "on"
                    : topo->cc_ready == 0 ? "off"
                                          : "not known",
                    topo->cc_mode == TOPO_CC_PROTECTED_PCIE      ? "protected PCIe"
                    : topo->cc_mode == TOPO_CC_NVLINK_ENCRYPTION ? "encrypted NVLinks"
                    : topo->cc_mode == TOPO_CC_NONE              ? "none"
                                                                 : "not known");
}

const struct doctor_check check_confidential = {
    .id = "confidential",
    .group = "driver",
    .mode = 56,
    .title = "confidential computing allows the GPUs to work, and to reach each other",
    .symptom = "CUDA fails with \"system not yet initialized\" or \"operation not permitted\"; GPUs have no peer "
               "access; NCCL and NVSHMEM fail to register GPU memory with a NIC.",
    .cause = "In a confidential guest GPUs protect their memory. They accept no work before their ready state is set, "
             "reach each other only in a mode for several GPUs, and cannot be reached by NICs.",
    .remedy = "Set the ready state after attestation; have the host choose the mode for several GPUs.",
    .needs = DOCTOR_NEEDS_DRIVER,
    .links = (const char *const[]){"nvidia-smi conf-compute", NULL},
    .run = run_confidential,
};

/* --- uvm --- */

#define UVM "/dev/nvidia-uvm"

static void run_uvm(const struct doctor_machine *machine, struct doctor_result *result)
{
    bool in_container = machine->software->os.in_container;
    struct source_stat device;

    if (!machine_has_open_gpu(machine)) {
        doctor_not_applicable(machine, result, "this process may not open any GPU");
        return;
    }
    device = source_stat(machine->source, UVM);
    if (device.state != SOURCE_OK && device.state != SOURCE_ABSENT) {
        doctor_unknown(machine, result, UVM ": %s", machine_reason(device.state, device.why));
        return;
    }
    if (device.state == SOURCE_OK && device.may_read && device.may_write)
        return;
    /* On a host the first CUDA program creates it, through nvidia-modprobe, which is setuid root. */
    if (device.state == SOURCE_ABSENT && !in_container &&
        source_stat(machine->source, "/usr/bin/nvidia-modprobe").state == SOURCE_OK)
        return;
    doctor_found(machine, result, DOCTOR_ERROR, "CUDA cannot start: " UVM " %s",
                 device.state == SOURCE_OK ? "may not be opened" : "is not there");
    doctor_evidence(machine, result, UVM, "%s",
                    device.state == SOURCE_OK ? "not readable and writable for this user" : "not there");
    if (device.state == SOURCE_ABSENT && !in_container)
        doctor_fix(machine, result, true, "sudo nvidia-modprobe --unified-memory --create-nvidia-device-file=0");
    doctor_advise(
        machine, result, "%s",
        in_container
            ? "Give the container the device: the NVIDIA container toolkit and the device plugin do it; without them, "
              "use --device " UVM " in addition to those of the GPUs."
        : device.state == SOURCE_OK
            ? "Its mode has to be 0666, the driver's default (NVreg_DeviceFileMode); a job of Slurm needs it in "
              "cgroup_allowed_devices_file.conf."
            : "nvidia-persistenced or nvidia-modprobe creates it at every boot.");
}

const struct doctor_check check_uvm = {
    .id = "uvm",
    .group = "driver",
    .mode = 45,
    .title = "CUDA can open nvidia-uvm",
    .symptom = "cuInit fails with CUDA_ERROR_UNKNOWN (999) or \"no CUDA-capable device\", while nvidia-smi works.",
    .cause = "CUDA manages memory through the module nvidia_uvm, whose device file is missing or not accessible. "
             "nvidia-smi does not need it.",
    .remedy = "Load the module and create its device file, or give it to the container.",
    .needs = DOCTOR_NEEDS_DRIVER,
    .links = (const char *const[]){UVM, "/sys/module/nvidia_uvm", NULL},
    .run = run_uvm,
};

/* --- fabric-manager --- */

/* The check nvlink reports a fabric that is not up, and checks the versions as well. */
static bool is_fabric_up(const struct topo *topo)
{
    bool is_up = false;

    for (int i = 0; i < topo->n_gpus; i++) {
        if (topo->gpus[i].fabric == TOPO_FABRIC_STARTING || topo->gpus[i].fabric == TOPO_FABRIC_FAILED)
            return false;
        is_up = is_up || topo->gpus[i].nvlinks_up > 0;
    }
    return is_up;
}

static void run_fabric_manager(const struct doctor_machine *machine, struct doctor_result *result)
{
    const char *version = machine->software->driver.fabric_manager, *driver = machine->software->driver.version;
    const char *from = machine->software->driver.fabric_manager_from;

    if (inventory_nvswitches(machine) == 0) {
        doctor_not_applicable(machine, result, "no NVSwitch on the PCI bus");
        return;
    }
    if (machine->software->os.in_container || !is_fabric_up(machine->topo)) {
        doctor_not_applicable(machine, result, "%s",
                              machine->software->os.in_container ? "a container: the fabric manager runs on the node"
                                                                 : "the fabric is not up, as the check nvlink says");
        return;
    }
    if (!*version) {
        doctor_not_applicable(machine, result,
                              "neither a package of the fabric manager nor its log contains its version");
        return;
    }
    /* The fabric manager that set up this fabric had the driver's version, whatever an older log says. */
    if (strcmp(from, SOFTWARE_FABRIC_LOG) == 0 && strcmp(version, driver) != 0) {
        doctor_not_applicable(machine, result,
                              "no package contains the version of the fabric manager, and its log is old");
        return;
    }
    if (strcmp(version, driver) == 0)
        return;
    doctor_found(machine, result, DOCTOR_WARNING,
                 "the installed fabric manager has version %s, the driver %s: it will not start again", version,
                 driver);
    doctor_evidence(machine, result, from, "nvidia-fabricmanager %s", version);
    doctor_evidence(machine, result, "/proc/driver/nvidia/version", "%s", driver);
    doctor_advise(
        machine, result,
        "Do not restart it now: the fabric that is up would go down. Install both in one version (the package is "
        "named after the driver's branch), prevent updates of only one of them, and restart the node when it is "
        "drained.");
}

const struct doctor_check check_fabric_manager = {
    .id = "fabric-manager",
    .group = "driver",
    .mode = 35,
    .title = "the fabric manager is of the driver's version",
    .symptom = "After the next boot CUDA fails with \"system not yet initialized\" (802), on this node only.",
    .cause = "The fabric manager works only with a driver of the same version. One of the two was updated while the "
             "machine ran.",
    .remedy = "Install both in one version, and restart the node.",
    .needs = DOCTOR_NEEDS_NVML,
    .links = (const char *const[]){"nvidia-fabricmanager", "/var/lib/dpkg/status", SOFTWARE_FABRIC_LOG, NULL},
    .run = run_fabric_manager,
};

/* --- sxid --- */

static void run_sxid(const struct doctor_machine *machine, struct doctor_result *result)
{
    struct kernel_log log;

    if (inventory_nvswitches(machine) == 0) {
        doctor_not_applicable(machine, result, "no NVSwitch on the PCI bus");
        return;
    }
    kernel_log_read_sxids(machine->source, &log);
    if (log.state != SOURCE_OK) {
        doctor_not_applicable(machine, result, "no kernel log can be read here, as gpu-errors says");
        return;
    }
    for (int i = 0; i < log.n; i++)
        doctor_evidence(machine, result, log.where, "%s", log.errors[i].line);
    if (log.n == 0)
        return;
    doctor_found(machine, result, DOCTOR_ERROR, "an NVSwitch reported a fatal error: SXid %d%s", log.errors[0].number,
                 log.n > 1 ? ", and more" : "");
    doctor_advise(
        machine, result,
        "Drain the node and restart it: after a fatal SXid the fabric manager takes ports or the switch out of use, "
        "and all GPUs have to be reset together with the switches. If it comes back, have the board repaired. \"SXid "
        "Errors\" of NVIDIA's fabric manager guide explains the numbers.");
}

const struct doctor_check check_sxid = {
    .id = "sxid",
    .group = "driver",
    .mode = 35,
    .title = "NVSwitches report no fatal errors",
    .symptom = "Programs that use NVLink end with an error or hang; GPUs report Xid 74 at the same time.",
    .cause = "A switch or one of its links has failed: its driver writes an SXid to the kernel log.",
    .remedy = "Restart the node, and have the board repaired if it comes back.",
    .needs = DOCTOR_NEEDS_DRIVER,
    .links = (const char *const[]){"/dev/kmsg", KERNEL_LOG_FILE, NULL},
    .run = run_sxid,
};
