/* SPDX-License-Identifier: Apache-2.0 */
/* checks_platform.c - what fits together: GPU and driver, NIC and IBGDA, libcuda, confidential computing. */
#include "checks.h"
#include "common/env_variables.h"

/* --- open-driver --- */

/*
 * PCI device IDs (pci.ids) of GPUs that NVIDIA's closed kernel modules do not support: Blackwell (GB100, GB102, GB110,
 * GB20x, GB10), and GPUs on boards with Grace processors. And of those that the open modules do not support: before
 * Turing (driver README, "Open Linux Kernel Modules": the GPU System Processor is required).
 */
#define CLASS_DISPLAY 0x03

struct device_range {
    unsigned first, last;
};

static const struct device_range open_only[] = {
    {0x2342, 0x2342}, {0x2348, 0x2348}, {0x2900, 0x29ff}, {0x2b80, 0x2dff},
    {0x2e00, 0x2eff}, {0x2f00, 0x2fff}, {0x3180, 0x32ff},
};
static const struct device_range closed_only[] = {
    {0x0fc0, 0x1dff},
};

#define WITHIN(number, ranges) ANY_OF(i, COUNT(ranges), (number) >= (ranges)[i].first && (number) <= (ranges)[i].last)

bool machine_is_unsupported_gpu(const struct doctor_machine *machine, int pci)
{
    const struct topo_pci *self = pci < 0 ? NULL : &machine->topo->pci[pci];

    /* A display card may be bound to nouveau, and one bound to vfio belongs to a virtual machine. */
    if (!self || (*self->driver && strcmp(self->driver, "nvidia") != 0))
        return false;
    return *machine->software->driver.version && self->vendor == PCI_VENDOR_NVIDIA &&
           self->class_code >> 16 == CLASS_DISPLAY &&
           (machine->software->driver.is_open ? WITHIN(self->device, closed_only) : WITHIN(self->device, open_only));
}

int machine_unsupported_gpus(const struct doctor_machine *machine)
{
    return COUNT_OF(p, machine->topo->n_pci, machine_is_unsupported_gpu(machine, p));
}

static void fix_kind(const struct doctor_machine *machine, struct doctor_result *result, bool needs_open)
{
    const struct os *os = &machine->software->os;
    int n_major = (int)strcspn(machine->software->driver.version, ".");
    const char *version = machine->software->driver.version, *open = needs_open ? "-open" : "";

    if (!os->in_container && os->family == OS_DEBIAN)
        doctor_fix(result, false, "%s\nsudo reboot",
                   os_install(machine->source, os,
                              source_printf(machine->source, "nvidia-driver-%.*s%s", n_major, version, open), ""));
    else if (!os->in_container && os->family == OS_RHEL)
        doctor_fix(result, false,
                   "sudo dnf module reset nvidia-driver\nsudo dnf module install nvidia-driver:%.*s%s\nsudo reboot",
                   n_major, version, needs_open ? "-open" : "-dkms");
    doctor_advise(result, needs_open
                              ? "Install the open kernel modules of the same driver (packages with -open; of the "
                                "runfile --kernel-module-type=open; of gpu-operator driver.kernelModuleType=open)."
                              : "Install the closed kernel modules of the same driver.");
}

void run_open_driver(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct software_driver *driver = &machine->software->driver;
    const struct topo *topo = machine->topo;
    int n = machine_unsupported_gpus(machine);

    if (topo->n_gpus + topo->n_hidden_gpus == 0) {
        machine_has_gpus(machine, result);
        return;
    }
    if (doctor_not_applicable_if(result, !*driver->version, "the NVIDIA driver is not loaded") || n == 0)
        return;
    for (int p = 0; p < topo->n_pci; p++)
        if (machine_is_unsupported_gpu(machine, p))
            doctor_evidence(result, topo->pci[p].address, "PCI device 10de:%04x", topo->pci[p].device);
    doctor_found(result, DOCTOR_ERROR,
                 "the loaded driver has the %s kernel modules, which do not support %d of the GPUs here",
                 driver->is_open ? "open" : "closed", n);
    doctor_evidence(result, "/proc/driver/nvidia/version", "%s, %s kernel modules", driver->version,
                    driver->is_open ? "open" : "closed");
    fix_kind(machine, result, !driver->is_open);
}

/* --- libcuda --- */

#define DRIVER_CONTAINER "/run/nvidia/driver" /* NVIDIA's GPU operator mounts its driver container here */

/* Where installers and container runtimes put it when they do not add it to the linker's path. */
static const char *const cuda_folders[] = {
    "/usr/local/nvidia/lib64",           /* GKE, and NVIDIA's images */
    "/home/kubernetes/bin/nvidia/lib64", /* a node of GKE */
    DRIVER_CONTAINER "/usr/lib/x86_64-linux-gnu",
    DRIVER_CONTAINER "/usr/lib/aarch64-linux-gnu",
    DRIVER_CONTAINER "/usr/lib64",
    "/usr/lib/x86_64-linux-gnu/nvidia/current", /* Debian */
    "/usr/lib/wsl/lib",
    "/var/lib/nvidia/lib64", /* Container-Optimized OS */
};

/*
 * Reports a libcuda that is found but does not work: the stub of the toolkit, which only defines the symbols; one older
 * than the driver, such as the package cuda-compat of an old image, which is for older drivers ("CUDA Compatibility");
 * or that package with a GeForce card. If libnvidia-ml is in the same folder, driver-skew reports the last two.
 */
static void check_found(const struct doctor_machine *machine, struct doctor_result *result, const struct libs_env *env,
                        const struct lib_location *location)
{
    const char *folder = libs_folder_of(machine->source, location->path), *version = libs_file_version(location->real);
    bool is_stub = strstr(location->path, "/stubs/") || strstr(location->real, "/stubs/");
    /* "CUDA Compatibility" supports a newer libcuda than the driver only for data center GPUs. */
    bool is_newer = *version && strverscmp(version, machine->software->driver.version) > 0 &&
                    ANY_OF(i, machine->topo->n_gpus, strstr(machine->topo->gpus[i].name, "GeForce"));
    struct lib_location ml = libs_find(machine->source, env, "libnvidia-ml.so.1"), own;
    struct libs_env plain = {.library_path = "", .preload = ""};

    if (!is_stub && !is_newer &&
        (!*version || strverscmp(version, machine->software->driver.version) >= 0 ||
         (ml.state == SOURCE_OK && strcmp(libs_folder_of(machine->source, ml.path), folder) == 0)))
        return;
    if (is_stub)
        doctor_found(result, DOCTOR_ERROR,
                     "the libcuda.so.1 that programs find is the stub of the CUDA toolkit, which is only for linking");
    else
        doctor_found(result, DOCTOR_ERROR,
                     "the libcuda.so.1 that programs find is of driver %s, %s than the one that is loaded (%s)%s",
                     version, is_newer ? "newer" : "older", machine->software->driver.version,
                     is_newer ? ", which only data center GPUs support" : "");
    doctor_evidence(result, location->path, "found by %s", location->found_by);
    own = libs_find(machine->source, &plain, "libcuda.so.1");
    if (own.state == SOURCE_OK && strcmp(own.path, location->path) != 0 && !strstr(own.real, "/stubs/"))
        doctor_fix(result, false, "%s", shell_leave_out(machine->source, "LD_LIBRARY_PATH", env->library_path, folder));
    doctor_advise(result, "The right one comes with the driver%s: no search path may have %s in front of its folder.",
                  machine->software->os.in_container ? ", from the node" : "", folder);
}

void run_libcuda(const struct doctor_machine *machine, struct doctor_result *result)
{
    struct libs_env env = libs_env_of(machine->source);
    const struct os *os = &machine->software->os;
    struct lib_location location = libs_find(machine->source, &env, "libcuda.so.1");
    const char *folder;
    int other;

    if (location.state == SOURCE_OK) {
        check_found(machine, result, &env, &location);
        return;
    }
    if (doctor_unreadable_if(result, location.state != SOURCE_ABSENT, "libcuda.so.1", location.state, NULL))
        return;
    /* On COS, programs run only in containers, where it is mounted. */
    if (doctor_not_applicable_if(result, os->family == OS_COS && !os->in_container,
                                 "Container-Optimized OS: programs run in containers, which get libcuda mounted"))
        return;
    other = FIRST_OF(i, COUNT(cuda_folders),
                     source_stat(machine->source, "%s/libcuda.so.1", cuda_folders[i]).state == SOURCE_OK);
    folder = other < 0 ? "" : cuda_folders[other];
    if (doctor_not_applicable_if(result,
                                 !os->in_container && strncmp(folder, DRIVER_CONTAINER, strlen(DRIVER_CONTAINER)) == 0,
                                 "the GPU operator's container has the driver: programs run in containers, which get "
                                 "libcuda mounted"))
        return;
    doctor_found(result, DOCTOR_ERROR, "libcuda.so.1 is not found%s%s",
                 *folder ? " by the linker, though it is in " : ": no CUDA program starts", folder);
    doctor_evidence(result, "LD_LIBRARY_PATH", "%s", *env.library_path ? env.library_path : "not set");
    if (*folder)
        doctor_fix(result, false, "%s", shell_prepend(machine->source, "LD_LIBRARY_PATH", folder));
    doctor_advise(
        result,
        *folder ? "Or add the folder for all programs: a file in /etc/ld.so.conf.d, then ldconfig."
        : os->in_container
            ? "NVIDIA's container toolkit and enroot mount it where NVIDIA_VISIBLE_DEVICES is set (in Slurm to all) and "
              "NVIDIA_DRIVER_CAPABILITIES has compute in it; on GKE it is mounted at /usr/local/nvidia/lib64 in "
              "containers with a limit of nvidia.com/gpu."
            : "Install the libraries of the driver in its version, %s.",
        machine->software->driver.version);
}

/* --- uvm --- */

#define UVM "/dev/nvidia-uvm"

void run_uvm(const struct doctor_machine *machine, struct doctor_result *result)
{
    bool in_container = machine->software->os.in_container;
    int number = machine->software->driver.uvm_number;
    struct source_stat device;

    if (doctor_not_applicable_if(result, !machine_has_open_gpu(machine), "this process may not open any GPU"))
        return;
    device = source_stat(machine->source, UVM);
    if (doctor_unreadable_if(result, device.state != SOURCE_OK && device.state != SOURCE_ABSENT, UVM, device.state,
                             device.why))
        return;
    if (machine_may_open(device)) {
        if (!machine_is_of_another(device, number))
            return;
        doctor_found(result, DOCTOR_ERROR, "CUDA cannot start: nvidia_uvm is loaded, and has %s number for " UVM,
                     number < 0 ? "no" : "another");
        doctor_evidence(result, "/proc/devices", number < 0 ? "no nvidia-uvm" : "%d nvidia-uvm", number);
        if (number > 0)
            doctor_evidence(result, UVM, "number %d", (int)device.bytes);
        doctor_advise(
            result, "%s%s", in_container ? "On the node, not in this container: " : "",
            number < 0
                ? "Load it again with no program on a GPU: sudo modprobe -r nvidia_uvm, then sudo modprobe nvidia_uvm."
                : "remove the file, run nvidia-modprobe -u -c 0, and for containers describe the devices again: sudo "
                  "nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml.");
        return;
    }
    /* On a host the first CUDA program creates it, through nvidia-modprobe, which is setuid root. */
    if (device.state == SOURCE_ABSENT && !in_container &&
        source_stat(machine->source, "/usr/bin/nvidia-modprobe").state == SOURCE_OK)
        return;
    doctor_found(result, DOCTOR_ERROR, "CUDA cannot start: " UVM " %s",
                 device.state == SOURCE_OK ? "may not be opened" : "is not there");
    doctor_evidence(result, UVM, "%s",
                    device.state == SOURCE_OK ? "not readable and writable for this user" : "not there");
    if (device.state == SOURCE_ABSENT && !in_container)
        doctor_fix(result, true, "sudo nvidia-modprobe --unified-memory --create-nvidia-device-file=0");
    doctor_advise(
        result, "%s",
        in_container
            ? "Give the container the device: the NVIDIA container toolkit and the device plugin do it; without them, "
              "use --device " UVM " in addition to those of the GPUs."
        : device.state == SOURCE_OK
            ? "Its mode has to be 0666, the driver's default (NVreg_DeviceFileMode); a job of Slurm needs it in "
              "cgroup_allowed_devices_file.conf."
            : "nvidia-persistenced or nvidia-modprobe creates it at every boot.");
}

/* --- ibgda-nic --- */

static const char *maker_name(unsigned vendor)
{
    static const struct {
        unsigned vendor;
        const char *name;
    } makers[] = {{PCI_VENDOR_AMAZON, "EFA"}, {0x14e4, "Broadcom"}, {0x8086, "Intel"}, {0x1022, "AMD"}, {0x1dd8, "AMD"},
                  {0x1ded, "Alibaba"}};

    int maker = FIRST_OF(i, COUNT(makers), makers[i].vendor == vendor);

    return maker < 0 ? "another maker" : makers[maker].name;
}

/* DeepEP before version 2 uses only IBGDA between nodes; it is recognised by its own buffer.py and an NVSHMEM. */
static bool needs_ibgda(const struct doctor_machine *machine)
{
    const struct software_copy *copy = machine_deepep(machine);

    return variable_is_true(source_env(machine->source, "NVSHMEM_IB_ENABLE_IBGDA")) ||
           (copy && copy->buffer == SOURCE_OK && machine_has_deepep(machine) && machine->topo->n_gpus > 1);
}

/* A mapping that gives a GPU a NIC that IBGDA does not support. */
static bool find_unsupported(const struct doctor_machine *machine, struct doctor_result *result)
{
    const char *mapping = source_env(machine->source, "DEEP_EP_DEVICE_TO_HCA_MAPPING");
    struct map *map = NULL;
    int gpu;

    if (!mapping || (machine_deepep(machine) && !machine->software->deepep.mapping_active) ||
        map_parse(machine->topo, mapping, &map) != EP_OK)
        return false;
    gpu = FIRST_OF(i, map->n, map->choices[i].nic >= 0 && !topo_has_ibgda(machine->topo, map->choices[i].nic));
    if (gpu >= 0) {
        doctor_found(result, DOCTOR_ERROR,
                     "DEEP_EP_DEVICE_TO_HCA_MAPPING gives GPU %d %s, and IBGDA works only with NVIDIA's NICs", gpu,
                     machine_nic_name(machine, map->choices[gpu].nic));
        doctor_evidence(result, "DEEP_EP_DEVICE_TO_HCA_MAPPING", "%s", mapping);
        doctor_fix(result, false, "export DEEP_EP_DEVICE_TO_HCA_MAPPING=%s",
                   shell_word(machine->source, map_deepep(machine->topo, machine->ibgda)));
    }
    map_free(map);
    return result->outcome == DOCTOR_FOUND;
}

/* Rails of several makers: GPUs share NVIDIA's, or use farther ones, as no GPU does with all of them. */
static void run_several_makers(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct topo *topo = machine->topo;
    const struct map *map = machine->map;
    int n = COUNT_OF(i, map->n, map->choices[i].nic >= 0 && !topo_has_ibgda(topo, map->choices[i].nic)),
        first = FIRST_OF(i, map->n, map->choices[i].nic >= 0 && !topo_has_ibgda(topo, map->choices[i].nic));

    if (!needs_ibgda(machine) || find_unsupported(machine, result) ||
        (machine->ibgda->n_shared <= map->n_shared && machine->ibgda->distance <= map->distance) || n == 0)
        return;
    doctor_found(result, DOCTOR_WARNING, "IBGDA works only with NVIDIA's NICs, and that of %d of %d GPUs is of %s", n,
                 machine->map->n, maker_name(topo->pci[topo->nics[machine->map->choices[first].nic].pci].vendor));
    doctor_evidence(result, machine_gpu_name(machine, first), "its NIC is %s, and with IBGDA %s",
                    machine_nic_name(machine, machine->map->choices[first].nic),
                    machine_nic_name(machine, machine->ibgda->choices[first].nic));
    doctor_advise(result, "'epkit env' spreads the GPUs over NVIDIA's NICs. To use all NICs between nodes, use a "
                          "library with a transport for them, such as epkit or NCCL.");
}

void run_ibgda_nic(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct topo *topo = machine->topo;
    int first = FIRST_OF(i, topo->n_nics, machine_is_data_nic(topo, i)),
        unknown = FIRST_OF(i, topo->n_nics, machine_is_data_nic(topo, i) && !topo->pci[topo->nics[i].pci].vendor);
    unsigned vendor;

    if (advice_has_mlx5(topo)) {
        run_several_makers(machine, result);
        return;
    }
    if (doctor_not_applicable_if(result, !needs_ibgda(machine), "nothing needs IBGDA"))
        return;
    if (unknown >= 0) {
        doctor_unknown(result, "the maker of %s is not known: /sys/bus/pci/devices/%s/vendor cannot be read",
                       topo->nics[unknown].name, topo->pci[topo->nics[unknown].pci].address);
        return;
    }
    vendor = topo->pci[topo->nics[first].pci].vendor;
    doctor_found(result, DOCTOR_ERROR, "IBGDA works only with NVIDIA's NICs, and the %d here are of %s",
                 machine_n_data_nics(topo), maker_name(vendor));
    doctor_evidence(result, topo->nics[first].name, "PCI device %04x:%04x at %s", vendor,
                    topo->pci[topo->nics[first].pci].device, topo->pci[topo->nics[first].pci].address);
    if (machine_deepep(machine))
        doctor_evidence(result, machine_deepep(machine)->folder, "uses only IBGDA between nodes");
    doctor_evidence_env(result, "NVSHMEM_REMOTE_TRANSPORT");
    doctor_advise(result,
                  "Within a node everything works. Between nodes, use a library with a transport for these NICs: "
                  "epkit, UCCL-EP, DeepEP version 2 over NCCL%s. NVSHMEM_REMOTE_TRANSPORT=libfabric does not make "
                  "DeepEP's kernels use it.",
                  vendor == PCI_VENDOR_AMAZON ? " with aws-ofi-nccl" : "");
}

/* --- confidential --- */

bool machine_isolates_gpus(const struct topo *topo)
{
    return topo->cc_feature == 1 && topo->cc_mode == TOPO_CC_NONE && topo->n_gpus > 1;
}

void run_confidential(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct topo *topo = machine->topo;
    const char *smi = os_driver_program(machine->source, &machine->software->os, "nvidia-smi");

    if (doctor_not_applicable_if(result, !topo_is_confidential(topo), "%s",
                                 topo->cc_feature < 0 ? "the driver does not report confidential computing"
                                                      : "confidential computing is off"))
        return;
    if (topo->cc_ready == 0) {
        doctor_found(result, DOCTOR_ERROR,
                     "confidential computing is on, and the GPUs accept no work: their ready state is off");
        doctor_advise(result,
                      "The operator of this guest has to attest the GPUs and then set their ready state: sudo %s "
                      "conf-compute -srs 1. It is lost when the driver is reloaded, so attestation belongs in the boot "
                      "of the guest.",
                      smi);
    } else if (machine_isolates_gpus(topo)) {
        doctor_found(result, DOCTOR_ERROR,
                     "confidential computing is on in the mode for single GPUs, which isolates the %d GPUs",
                     topo->n_gpus);
        doctor_advise(
            result,
            "Several GPUs of one guest need protected PCIe mode (Hopper, a whole board) or encrypted NVLinks (Blackwell), which is set on the host while no guest has them.");
    } else if (topo->n_gpus > 1 && machine_uses_rdma(machine) && machine_has_data_nics(machine, result)) {
        doctor_found(result, DOCTOR_ERROR,
                     "confidential computing is on: NICs cannot reach the memory of the GPUs, and something needs "
                     "RDMA");
        doctor_advise(
            result,
            "Between nodes, use a transport through host memory (NCCL over sockets, or with NCCL_NET_GDR_LEVEL=LOC), or GPUs without confidential computing.%s",
            topo->cc_mode == TOPO_CC_PROTECTED_PCIE
                ? " In protected PCIe mode there is no CUDA IPC either, which DeepEP uses within the node."
                : "");
    } else {
        result->outcome = DOCTOR_FINE;
        return;
    }
    doctor_evidence(result, "NVML", "confidential computing %s, ready state %s, multi-GPU mode %s",
                    topo->cc_feature == 1 ? "on" : "off",
                    topo->cc_ready == 1   ? "on"
                    : topo->cc_ready == 0 ? "off"
                                          : "not known",
                    topo->cc_mode == TOPO_CC_PROTECTED_PCIE      ? "protected PCIe"
                    : topo->cc_mode == TOPO_CC_NVLINK_ENCRYPTION ? "encrypted NVLinks"
                    : topo->cc_mode == TOPO_CC_NONE              ? "none"
                                                                 : "not known");
}
