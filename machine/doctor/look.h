/* SPDX-License-Identifier: Apache-2.0 */
/* look.h - what several checks want to know about a machine. */
#ifndef EP_DOCTOR_LOOK_H
#define EP_DOCTOR_LOOK_H

#include "doctor/doctor.h"

/* A reason in words for every state but ROOT_OK; `why` is what the root said. */
const char *look_why(enum root_state state, const char *why);

/*
 * These say why not when they return false: "does not apply" where there is none, "could not tell" where the machine
 * does not let it be seen.
 */
bool look_has_gpus(const struct doctor_machine *machine, struct doctor_result *result);
bool look_has_driver(const struct doctor_machine *machine, struct doctor_result *result);
bool look_has_data_nics(const struct doctor_machine *machine, struct doctor_result *result);

/* Does the process have any GPU at all? One that has none needs nothing else of the driver's either. */
bool look_has_open_gpu(const struct doctor_machine *machine);

/* Says "could not tell" when it returns false: the environment is there and could not be read. */
bool look_has_environment(const struct doctor_machine *machine, struct doctor_result *result);

/* Is NIC `nic` one for data on a PCI bus? Software devices (rxe, siw) are nobody's business here. */
bool look_is_data_nic(const struct topo *topo, int nic);

/* Is it one that a GPU uses by the best assignment, or its equal: of the same make, and as near to a GPU? */
bool look_serves_gpus(const struct doctor_machine *machine, int nic);

/*
 * Does anything ask for RDMA: variables of NVSHMEM, DeepEP, or NCCL's and UCX's of InfiniBand, or a DeepEP that Python
 * finds? Without them a container with a single GPU has no business with NICs, which sysfs shows in each container.
 */
bool look_asks_for_rdma(const struct doctor_machine *machine);

/* Will there be several ranks: several GPUs, a launcher that says so, or something that asks for RDMA? */
bool look_has_ranks(const struct doctor_machine *machine);

#define LOOK_MEMLOCK_ALL (-1)
#define LOOK_MEMLOCK_NOT_KNOWN (-2)

/* Bytes that the process may lock, or one of these. */
long long look_memlock(const struct doctor_machine *machine);

/* Is the state of a port one that the kernel has? Else it could not be read. */
bool look_knows_port(const struct topo_port *port);

/*
 * "GPU 3 (0000:5e:00.0)": the number is NVML's, which CUDA counts by as well; the address is the device's own. "the GPU
 * at 0000:5e:00.0" where NVML does not know it, or does not answer: its place in a list is then no number of anything.
 */
const char *look_gpu_name(const struct doctor_machine *machine, int gpu);

/* GPUs on the bus that the loaded kind of the driver's kernel modules, open or closed, does not drive. */
int look_wrong_kind(const struct doctor_machine *machine);
bool look_is_wrong_kind(const struct doctor_machine *machine, int pci);

/*
 * PCI functions of NVIDIA's NICs without an RDMA device, where GPUs have fewer NICs than they could: all of them where
 * there is no NIC for data, else those like one. None where nothing asks for
 * RDMA and there is a single GPU, and never one that carries the default route or is handed to a virtual machine.
 */
int look_functions_without_rdma(const struct doctor_machine *machine);
bool look_is_function_without_rdma(const struct doctor_machine *machine, int pci);

/* "mlx5_0:1"; `port` is the index of the port in its NIC. */
const char *look_port_name(const struct doctor_machine *machine, int nic, int port);

/* The nearest path from a NIC to any GPU. */
enum topo_path look_gpu_distance(const struct topo *topo, int nic);

/* A board with Grace processors, whose GPUs and processors share an address space: GH200, GB200, GB300. */
bool look_is_grace(const struct topo *topo);

/* GB200 and GB300: GPUs whose NVLinks lead from node to node. */
bool look_has_multinode_nvlink(const struct topo *topo);

/*
 * The link layer of the fewer NICs where those that GPUs use are of both; else TOPO_LINK_UNKNOWN. NICs that no GPU uses
 * do not count: one for storage may well be of the other kind.
 */
enum topo_link_layer look_odd_layer(const struct doctor_machine *machine);

/* Confidential computing is on in the mode in which each GPU is alone, and there are several. */
bool look_keeps_gpus_apart(const struct topo *topo);

/* What would tell what NVML does not. */
enum doctor_tells look_nvml_tells(const struct doctor_machine *machine);

enum look_virtual { LOOK_BARE, LOOK_VIRTUAL, LOOK_NOT_KNOWN };

/* Is it a virtual machine? By the names that hypervisors give to their boards, and by the flag of the processors. */
enum look_virtual look_virtual(struct root *root);

/* Does the kernel keep even root from changing it, as it does after Secure Boot (kernel_lockdown(7))? */
#define LOOK_LOCKDOWN "/sys/kernel/security/lockdown"
bool look_is_locked_down(struct root *root);

/* The value behind "name:" in a file of such lines, "" if it is not there. */
const char *look_field(struct root *root, const char *text, const char *name);

#define LOOK_VISIBLE_MAX 128

enum look_visible_kind { LOOK_VISIBLE_INDEX, LOOK_VISIBLE_UUID, LOOK_VISIBLE_MIG, LOOK_VISIBLE_NONSENSE };

struct look_visible {
    const char *text;
    enum look_visible_kind kind;
    int gpu; /* index into topo.gpus; -1: there is none */
};

/*
 * The entries of CUDA_VISIBLE_DEVICES, at most LOOK_VISIBLE_MAX; 0 when it hides everything ("", "-1"), -1 when it is
 * not set.
 */
int look_visible(const struct doctor_machine *machine, struct look_visible *ret_entries);

/*
 * The GPU that the process works with, -1 if nothing tells: that of its rank, by the rule that its NIC is chosen by; or
 * the only one that it sees, whatever started it.
 */
int look_own_gpu(const struct doctor_machine *machine);

#endif
