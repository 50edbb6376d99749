/* SPDX-License-Identifier: Apache-2.0 */
/* machine.h - what several checks want to know about a machine. */
#ifndef EP_DOCTOR_MACHINE_H
#define EP_DOCTOR_MACHINE_H

#include "doctor/doctor.h"

/* A reason in words for every state but SOURCE_OK; `why` is what the source said. */
const char *machine_reason(enum source_state state, const char *why);

/*
 * These say why not when they return false: "does not apply" where there is none, "could not tell" where the machine
 * does not let it be seen.
 */
bool machine_has_gpus(const struct doctor_machine *machine, struct doctor_result *result);
bool machine_has_driver(const struct doctor_machine *machine, struct doctor_result *result);
bool machine_has_data_nics(const struct doctor_machine *machine, struct doctor_result *result);

/* Does the process have any GPU at all? One that has none needs nothing else of the driver's either. */
bool machine_has_open_gpu(const struct doctor_machine *machine);

/* Says "could not tell" when it returns false: the environment is there and could not be read. */
bool machine_has_environment(const struct doctor_machine *machine, struct doctor_result *result);

/* Is NIC `nic` one for data on a PCI bus? Software devices (rxe, siw) are nobody's business here. */
bool machine_is_data_nic(const struct topo *topo, int nic);

/* Is it one that a GPU uses by the best assignment, or its equal: of the same make, and as near to a GPU? */
bool machine_nic_serves_gpus(const struct doctor_machine *machine, int nic);

/*
 * Does anything ask for RDMA: variables of NVSHMEM, DeepEP, or NCCL's and UCX's of InfiniBand, or a DeepEP that Python
 * finds? Without them a container with a single GPU has no business with NICs, which sysfs shows in each container.
 */
bool machine_uses_rdma(const struct doctor_machine *machine);

/* Will there be several ranks: several GPUs, a launcher that says so, or something that asks for RDMA? */
bool machine_has_ranks(const struct doctor_machine *machine);

#define MACHINE_MEMLOCK_UNLIMITED (-1)
#define MACHINE_MEMLOCK_UNKNOWN (-2)

/* Bytes that the process may lock, or one of these. */
long long machine_memlock(const struct doctor_machine *machine);

/* Is the state of a port one that the kernel has? Else it could not be read. */
bool machine_knows_port_state(const struct topo_port *port);

/*
 * "GPU 3 (0000:5e:00.0)": the number is NVML's, which CUDA counts by as well; the address is the device's own. "the GPU
 * at 0000:5e:00.0" where NVML does not know it, or does not answer: its place in a list is then no number of anything.
 */
const char *machine_gpu_name(const struct doctor_machine *machine, int gpu);

/* GPUs on the bus that the loaded kind of the driver's kernel modules, open or closed, does not drive. */
int machine_unsupported_gpus(const struct doctor_machine *machine);
bool machine_is_unsupported_gpu(const struct doctor_machine *machine, int pci);

/*
 * PCI functions of NVIDIA's NICs without an RDMA device, where GPUs have fewer NICs than they could: all of them where
 * there is no NIC for data, else those like one. None where nothing asks for
 * RDMA and there is a single GPU, and never one that carries the default route or is handed to a virtual machine.
 */
int machine_functions_without_rdma(const struct doctor_machine *machine);
bool machine_is_function_without_rdma(const struct doctor_machine *machine, int pci);

/* "mlx5_0:1"; `port` is the index of the port in its NIC. */
const char *machine_port_name(const struct doctor_machine *machine, int nic, int port);

/* The nearest path from a NIC to any GPU. */
enum topo_path machine_gpu_distance(const struct topo *topo, int nic);

/* A board with Grace processors, whose GPUs and processors share an address space: GH200, GB200, GB300. */
bool machine_is_grace(const struct topo *topo);

/* GB200 and GB300: GPUs whose NVLinks lead from node to node. */
bool machine_has_multinode_nvlink(const struct topo *topo);

/*
 * The link layer of the fewer NICs where those that GPUs use are of both; else TOPO_LINK_UNKNOWN. NICs that no GPU uses
 * do not count: one for storage may well be of the other kind.
 */
enum topo_link_layer machine_minority_link_layer(const struct doctor_machine *machine);

/* Confidential computing is on in the mode in which each GPU is alone, and there are several. */
bool machine_isolates_gpus(const struct topo *topo);

/* What would tell what NVML does not. */
enum doctor_missing machine_missing_nvml(const struct doctor_machine *machine);

enum machine_virtual { MACHINE_BARE_METAL, MACHINE_VIRTUAL, MACHINE_VIRTUAL_UNKNOWN };

/* Is it a virtual machine? By the names that hypervisors give to their boards, and by the flag of the processors. */
enum machine_virtual machine_virtual(struct source *source);

/* Does the kernel keep even root from changing it, as it does after Secure Boot (kernel_lockdown(7))? */
#define MACHINE_LOCKDOWN_FILE "/sys/kernel/security/lockdown"
bool machine_is_locked_down(struct source *source);

/* The value behind "name:" in a file of such lines, "" if it is not there. */
const char *machine_text_field(struct source *source, const char *text, const char *name);

#define MACHINE_VISIBLE_MAX 128

enum machine_visible_kind { MACHINE_VISIBLE_INDEX, MACHINE_VISIBLE_UUID, MACHINE_VISIBLE_MIG, MACHINE_VISIBLE_INVALID };

struct machine_visible {
    const char *text;
    enum machine_visible_kind kind;
    int gpu; /* index into topo.gpus; -1: there is none */
};

/*
 * The entries of CUDA_VISIBLE_DEVICES, at most MACHINE_VISIBLE_MAX; 0 when it hides everything ("", "-1"), -1 when it
 * is not set.
 */
int machine_visible(const struct doctor_machine *machine, struct machine_visible *ret_entries);

/*
 * The GPU that the process works with, -1 if nothing tells: that of its rank, by the rule that its NIC is chosen by; or
 * the only one that it sees, whatever started it.
 */
int machine_own_gpu(const struct doctor_machine *machine);

#endif
