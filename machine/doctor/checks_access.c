/* SPDX-License-Identifier: Apache-2.0 */
/*
 * checks_access.c - devices on the bus that this process cannot use: GPUs that it was not given, NIC functions without
 * an RDMA device.
 */
#include "checks.h"

#include <limits.h>

/* --- gpu-access --- */

/* Was the process supposed to have GPUs? Not if its launcher or container explicitly requested none. */
static bool expects_gpus(const struct doctor_machine *machine)
{
    const char *visible = source_env(machine->source, "CUDA_VISIBLE_DEVICES");
    const char *given = source_env(machine->source, "NVIDIA_VISIBLE_DEVICES");

    if ((visible && strcmp(visible, "NoDevFiles") == 0) || (given && strcmp(given, "none") == 0))
        return false;
    return (visible && *visible && strcmp(visible, "-1") != 0) || (given && *given && strcmp(given, "void") != 0) ||
           machine_sets_nvshmem(machine) || machine_deepep(machine);
}

/* What took the devices of a container: the runtime had added them behind systemd's back. */
#define CGROUP_LOST                                                                                                    \
    " It was given them, and its device cgroup has lost them since: systemctl daemon-reload on the node rewrites the " \
    "cgroups of containers to which the NVIDIA runtime has added devices. With CDI (nvidia-ctk, mode cdi) systemd "    \
    "knows them."

/* What to do where device files are there and may not be opened: it depends on who keeps the process from them. */
static const struct by_place denied = {
    .pod = "Restart the pod." CGROUP_LOST,
    .container = "Restart the container." CGROUP_LOST,
    .job = "A job has only the GPUs that it asks for, a device cgroup blocks the others: srun --gres=gpu:8 or "
           "--gpus-per-task=1.",
    .host = "/dev/nvidia* has to be readable and writable (NVreg_DeviceFileMode of the driver)."};

/* What to do where there are no device files. */
static const struct by_place not_given = {.pod = "Give the container a limit of nvidia.com/gpu.",
                                          .container = "Start the container with --gpus all.",
                                          .job = "Ask for GPUs: srun --gres=gpu:8.",
                                          .host = ""};

#define CONTROL "/dev/nvidiactl"

/* CUDA and NVML open it before any GPU. On a host, nvidia-modprobe creates it on first use. */
static void find_control(const struct doctor_machine *machine, struct doctor_result *result)
{
    struct source_stat device = source_stat(machine->source, CONTROL);
    bool is_inaccessible = device.state == SOURCE_DENIED || (device.state == SOURCE_OK && !machine_may_open(device));

    if (machine->topo->nvml || !machine_has_open_gpu(machine) ||
        (!is_inaccessible && !(device.state == SOURCE_ABSENT && machine->software->os.in_container)))
        return;
    doctor_found(result, DOCTOR_ERROR, "CUDA cannot start: " CONTROL " %s",
                 is_inaccessible ? "may not be opened" : "is not there");
    doctor_evidence(result, CONTROL, "%s", is_inaccessible ? "not readable and writable for this user" : "not there");
    doctor_advise(result, "Every process with a GPU needs it, in addition to the files of the GPUs and "
                          "/dev/nvidia-uvm. The NVIDIA container toolkit and the device plugin mount it; without them, "
                          "use --device " CONTROL ".");
}

#define TASKS "SLURM_STEP_TASKS_PER_NODE"

/* CUDA maps the memory of another process only from a GPU that both may open (NVIDIA/nccl#1066, #1647). */
static void find_single(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct topo *topo = machine->topo;
    const char *tasks = source_env(machine->source, TASKS);
    long all = machine_job_number(machine, "SLURM_GPUS_ON_NODE", LONG_MAX);
    int n = tasks ? atoi(tasks) : 0; /* "8(x2)" */

    /* GPUs that this task may not open can be those of another job, unless the step has more than this task sees. */
    if (topo->n_denied_gpus == 0 || n <= topo->n_gpus || all <= topo->n_gpus)
        return;
    doctor_found(result, DOCTOR_ERROR,
                 "each of the %d tasks of this node may open %d GPU%s: none reaches those of others", n, topo->n_gpus,
                 topo->n_gpus == 1 ? "" : "s");
    doctor_evidence_env(result, TASKS);
    doctor_advise(result,
                  "NVLink is not used between the tasks, and DeepEP stops. Give all GPUs to each of them, which "
                  "takes one by its number: srun --gpus-per-node=%d --gpu-bind=none, and no --gpus-per-task.",
                  n);
}

/* NVML lists the GPUs, but CUDA may not open one of them. */
static void find_inaccessible(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct topo *topo = machine->topo;
    int n = 0;

    for (int i = 0; i < topo->n_gpus; i++) {
        struct source_stat device = {.state = SOURCE_NOT_RECORDED};

        if (topo->gpus[i].minor >= 0)
            device = source_stat(machine->source, "/dev/nvidia%d", topo->gpus[i].minor);
        if (device.state != SOURCE_DENIED && (device.state != SOURCE_OK || machine_may_open(device)))
            continue;
        n++;
        doctor_evidence(result, machine_gpu_name(machine, i), "/dev/nvidia%d may not be opened", topo->gpus[i].minor);
    }
    if (n == 0) {
        find_control(machine, result);
        find_single(machine, result);
        return;
    }
    doctor_found(result, DOCTOR_ERROR, "%d of %d GPUs may not be used by this process", n, topo->n_gpus);
    doctor_advise(result, "%s", machine_by_place(machine, denied));
}

/* Reports when this process has no GPU; the other checks then say that there is none. */
void run_gpu_access(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct topo *topo = machine->topo;
    const struct os *os = &machine->software->os;
    int n = topo->n_hidden_gpus, n_denied = topo->n_denied_gpus;

    if (topo->n_gpus > 0) {
        find_inaccessible(machine, result);
        return;
    }
    if (n == 0) {
        machine_has_gpus(machine, result);
        return;
    }
    result->missing = DOCTOR_MISSING_GPUS;
    if (doctor_not_applicable_if(result, machine_unsupported_gpus(machine) > 0,
                                 "the driver does not support them, as the check open-driver says") ||
        doctor_unknown_if(result, n_denied == 0 && os->in_container && !expects_gpus(machine),
                          "this container was given none of the %d GPUs of the machine", n))
        return;
    doctor_found(result, DOCTOR_ERROR, "none of the %d GPUs of this machine may be used by this process", n);
    for (int i = 0; i < n && i < TOPO_MAX_GPUS; i++)
        doctor_evidence(result, topo->pci[topo->hidden_gpus[i]].address, "%s",
                        n_denied == n ? "its device file may not be opened"
                                      : "its device file does not exist here, or cannot be opened");
    if (n_denied > 0 || os->in_container)
        doctor_advise(result, "%s", machine_by_place(machine, n_denied > 0 ? denied : not_given));
    else {
        doctor_fix(result, true, "sudo %s -u -c 0", os_driver_program(machine->source, os, "nvidia-modprobe"));
        doctor_advise(result, "The device files are created when the driver is first used; nvidia-persistenced does "
                              "that at boot.");
    }
}

/* --- rdma-device --- */

void run_rdma_device(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct topo *topo = machine->topo;
    enum source_state module = source_stat(machine->source, "/sys/module/mlx5_ib").state;
    int n = machine_functions_without_rdma(machine), n_unbound = 0, first = -1;

    if (n == 0) {
        if (topo->n_nics == 0)
            machine_has_data_nics(machine, result);
        return;
    }
    /* In a container without RDMA devices, the node may have bound all of them. */
    if (doctor_not_applicable_if(result, machine->software->os.in_container && !machine_uses_rdma(machine),
                                 "a container without RDMA devices, and nothing in it needs one"))
        return;
    for (int p = 0; p < topo->n_pci; p++) {
        if (!machine_is_function_without_rdma(machine, p))
            continue;
        first = first < 0 ? p : first;
        n_unbound += !*topo->pci[p].driver;
        doctor_evidence(result, topo->pci[p].address, "%s%s, no RDMA device",
                        *topo->pci[p].driver ? "driver " : "no driver", topo->pci[p].driver);
    }
    doctor_found(result, DOCTOR_ERROR, "the NIC at %s has no RDMA device%s", topo->pci[first].address,
                 n > 1 ? ", and more have none" : "");
    doctor_evidence(result, "/sys/module/mlx5_ib", "%s", module == SOURCE_OK ? "loaded" : machine_reason(module, NULL));
    if (machine->software->os.in_container)
        doctor_advise(result, "Give the pod this device too, or load mlx5_ib on the node: GPUs here have fewer NICs "
                              "than there are.");
    else if (n_unbound > 0) {
        doctor_fix(result, true, "sudo modprobe mlx5_core\nsudo modprobe mlx5_ib");
        doctor_advise(result, "If they stay without a driver, the kernel log says why (sudo dmesg | grep mlx5).");
    } else if (module == SOURCE_ABSENT) {
        doctor_fix(result, true, "sudo modprobe mlx5_ib");
        doctor_advise(result, "If modprobe does not find it, %sDOCA-OFED was built without it.",
                      machine->software->os.family == OS_DEBIAN
                          ? "it is in a separate package (linux-modules-extra), or "
                          : "the kernel or ");
    } else {
        doctor_advise(result,
                      "mlx5_ib is loaded, but not bound to it: check 'devlink dev param show pci/%s name enable_roce', "
                      "'devlink dev param show pci/%s name enable_rdma' and /sys/bus/auxiliary/drivers.",
                      topo->pci[first].address, topo->pci[first].address);
    }
}
