/* SPDX-License-Identifier: Apache-2.0 */
/* queries.h - queries about a machine and its variables that several checks use. */
#ifndef EP_MACHINE_DOCTOR_QUERIES_H
#define EP_MACHINE_DOCTOR_QUERIES_H

#include "doctor.h"

/* The text for a state other than SOURCE_OK; `why` is the reason that the source returned. */
const char *machine_reason(enum source_state state, const char *why);

/* The unit of a size that this letter stands for: 1024 for 'k' and 'K', its powers for m, g and t, otherwise 1. */
long long machine_unit(char letter);

/* The value of a variable, "" if it is not set. */
const char *machine_env(const struct doctor_machine *machine, const char *name);

/* If false, they have set the outcome: "not applicable", or "unknown" if it cannot be determined. */
bool machine_has_gpus(const struct doctor_machine *machine, struct doctor_result *result);
bool machine_has_driver(const struct doctor_machine *machine, struct doctor_result *result);
bool machine_has_data_nics(const struct doctor_machine *machine, struct doctor_result *result);

/* May this process read and write the device? */
static inline bool machine_may_open(struct source_stat device)
{
    return device.state == SOURCE_OK && device.may_read && device.may_write;
}

/* Does a device file have another number than `number`, that of its driver, which may have none? */
static inline bool machine_is_of_another(struct source_stat device, int number)
{
    return number < 0 || (number > 0 && device.bytes > 0 && device.bytes != number);
}

/* Can the process open any GPU? If not, it needs nothing else of the driver either. */
bool machine_has_open_gpu(const struct doctor_machine *machine);

/* If it returns false, it sets the outcome "unknown": the environment exists but could not be read. */
bool machine_has_environment(const struct doctor_machine *machine, struct doctor_result *result);

/* Is `nic` a data NIC on a PCI bus? Software devices (rxe, siw) are not checked. */
bool machine_is_data_nic(const struct topo *topo, int nic);
int machine_n_data_nics(const struct topo *topo);

/* A port of a NIC, by their indices, with what a check compares. */
struct machine_port {
    int nic, port;
    int64_t value;
};

#define MACHINE_PORTS_MAX (TOPO_MAX_NICS * TOPO_MAX_PORTS)

/* The active ports of data NICs, with `serving` of those that serve GPUs alone, of this link layer, unknown: of any. */
int machine_ports(const struct doctor_machine *machine, bool serving, enum topo_link_layer layer,
                  struct machine_port ret_ports[MACHINE_PORTS_MAX]);

/* Is the NIC assigned to a GPU in the best assignment, or of the same model and as near to one? */
bool machine_nic_serves_gpus(const struct doctor_machine *machine, int nic);

/*
 * Does anything need RDMA: variables of NVSHMEM, DeepEP, NCCL's InfiniBand transport or UCX, or a DeepEP that Python
 * finds? Otherwise NICs do not matter to a container with a single GPU, although sysfs shows them in every container.
 */
bool machine_uses_rdma(const struct doctor_machine *machine);

/* Will there be several ranks: several GPUs, a launcher that says so, or anything that needs RDMA? */
bool machine_has_ranks(const struct doctor_machine *machine);

/* Is the state of the port known? Otherwise it could not be read. */
bool machine_knows_port_state(const struct topo_port *port);

/*
 * "GPU 3 (0000:5e:00.0)": the number is NVML's, which CUDA also uses, followed by the PCI address. "the GPU at
 * 0000:5e:00.0" if NVML does not answer or does not know the GPU: its index in the list then has no meaning to users.
 */
const char *machine_gpu_name(const struct doctor_machine *machine, int gpu);

/* GPUs on the bus that the loaded variant (open or closed) of the driver's kernel modules does not support. */
int machine_unsupported_gpus(const struct doctor_machine *machine);
bool machine_is_unsupported_gpu(const struct doctor_machine *machine, int pci);

/*
 * The number of PCI functions of NVIDIA NICs without an RDMA device, if GPUs have fewer NICs than they could have: all
 * such functions if there is no data NIC, otherwise those of the same model as a data NIC. 0 if nothing needs RDMA and
 * there is a single GPU. A function that carries the default route or is passed to a virtual machine does not count.
 */
int machine_functions_without_rdma(const struct doctor_machine *machine);
bool machine_is_function_without_rdma(const struct doctor_machine *machine, int pci);

/* The next word of a list such as that of a bond's members; NULL at its end, and of NULL. Advances *at. */
const char *machine_next_word(const struct doctor_machine *machine, const char **at, const char *separators);

/* Is it the interface of the default route or, with `or_lower`, one below it? */
bool machine_carries_route(const struct doctor_machine *machine, const char *interface, bool or_lower);

/* The copy of DeepEP that Python imports; NULL if there is none. */
const struct software_copy *machine_deepep(const struct doctor_machine *machine);

/* "mlx5_0:1"; `port` is the index of the port in its NIC. */
const char *machine_port_name(const struct doctor_machine *machine, int nic, int port);

/* The shortest path from a NIC to any GPU. */
enum topo_path machine_gpu_distance(const struct topo *topo, int nic);

/* What to do, by what decides about the process: Kubernetes, another container, a job of Slurm, or the host alone. */
struct by_place {
    const char *pod, *container, *job, *host;
};

const char *machine_by_place(const struct doctor_machine *machine, struct by_place words);

/* A board with Grace processors, whose GPUs and CPUs share an address space: GH200, GB200, GB300. */
bool machine_is_grace(const struct topo *topo);

/* A DGX Spark and its kin: one GB10, which shares the memory of the processors, and no way for NICs into a GPU. */
bool machine_is_spark(const struct topo *topo);

/* GB200 and GB300: GPUs whose NVLinks connect several nodes. */
bool machine_has_multinode_nvlink(const struct topo *topo);

/* The less common link layer of the NICs that GPUs use; TOPO_LINK_UNKNOWN if they have one. */
enum topo_link_layer machine_minority_link_layer(const struct doctor_machine *machine);

/* Is confidential computing enabled in the mode that isolates GPUs from each other, with several GPUs? */
bool machine_isolates_gpus(const struct topo *topo);

/* What is missing where NVML does not answer. */
enum doctor_missing machine_missing_nvml(const struct doctor_machine *machine);

enum machine_virtual { MACHINE_BARE_METAL, MACHINE_VIRTUAL, MACHINE_VIRTUAL_UNKNOWN };

/* Is it a virtual machine? Determined by the product names that hypervisors use and the CPU flag. */
enum machine_virtual machine_virtual(struct source *source);

/* Is the kernel locked down, as after Secure Boot (kernel_lockdown(7))? */
#define MACHINE_LOCKDOWN_FILE "/sys/kernel/security/lockdown"
bool machine_is_locked_down(struct source *source);

#define MACHINE_VISIBLE_MAX 128

enum machine_visible_kind { MACHINE_VISIBLE_INDEX, MACHINE_VISIBLE_UUID, MACHINE_VISIBLE_MIG, MACHINE_VISIBLE_INVALID };

struct machine_visible {
    const char *text;
    enum machine_visible_kind kind;
    int gpu; /* index into topo.gpus; -1: no such GPU */
};

/* Parses CUDA_VISIBLE_DEVICES. The number of entries; 0 if it hides all GPUs ("", "-1"), -1 if it is not set. */
int machine_visible(const struct doctor_machine *machine, struct machine_visible *ret_entries);

/* The GPU of the process: that of its rank, as for its NIC, or its only visible one; -1 if not known. */
int machine_own_gpu(const struct doctor_machine *machine);

/* The value of a variable that is an unsigned integer; `without` if it is not set or not such a number. */
long machine_job_number(const struct doctor_machine *machine, const char *name, long without);

/* The number of GPUs that this process uses: one if a launcher started it as a rank, otherwise those that it sees. */
int machine_job_gpus(const struct doctor_machine *machine);

/* The largest of such values, -1 without any; `names` end with NULL. */
long machine_job_largest(const struct doctor_machine *machine, const char *const *names);

/* The number of nodes of the job, from its launcher's variables; -1 if not known. */
long machine_job_nodes(const struct doctor_machine *machine);

/* --- NVSHMEM and NCCL --- */

#define MACHINE_HCA_PREFIX "mlx5" /* default of NVSHMEM_HCA_PREFIX in NVSHMEM 3.4 and 3.5 */

/* The name of a NIC, safe to print. */
const char *machine_nic_name(const struct doctor_machine *machine, int nic);

/* Does the environment set a variable that NVSHMEM or DeepEP reads in a running program? */
bool machine_sets_nvshmem(const struct doctor_machine *machine);

/* Is there an NVIDIA data NIC, as libmlx5 and IBGDA need? If not, sets the outcome. */
bool machine_has_mlx5(const struct doctor_machine *machine, struct doctor_result *result);

/* Would Python import a DeepEP that loads NVSHMEM? One that was built without it works only within a node. */
bool machine_has_deepep(const struct doctor_machine *machine);

/* Will programs use IBGDA, by the environment or by a DeepEP that enables it itself? If not, sets the outcome. */
bool machine_uses_ibgda(const struct doctor_machine *machine, struct doctor_result *result);

/* The NICs that NVSHMEM chooses with the current variables and one NVSHMEM job for each GPU. */
struct map *machine_nvshmem_map(const struct doctor_machine *machine);

/* The first entry of LD_PRELOAD with `part` in its file name, and whether the file exists; path "" if there is none. */
struct machine_preload {
    const char *path;
    bool is_there;
};

struct machine_preload machine_preload(const struct doctor_machine *machine, const char *part);

#define MACHINE_PRELOAD_SEPARATORS ": " /* ld.so(8) */

/* Is the entry of LD_PRELOAD a path that does not exist? False for names without a folder: ld.so searches for them. */
bool machine_is_missing_preload(const struct doctor_machine *machine, const char *entry);

/* The command that removes the entries of LD_PRELOAD that do not exist. */
const char *machine_preload_command(const struct doctor_machine *machine);

/*
 * Loads the library at `path` in a child process, as a program with this environment would (from a snapshot: the
 * recorded result), and reports "WHAT does not load". Not if libibverbs or libmlx5 is not found, or the two are from
 * different installations, by the ELF headers: the checks of the group verbs report that.
 */
void machine_check_load(const struct doctor_machine *machine, struct doctor_result *result, const char *what,
                        const char *path, const char *advice);

/* Has the process loaded several libraries with `part` in their names? Then it is reported as copies of `name`. */
bool machine_has_two(struct doctor_result *result, const char *part, const char *name);

/* Are Amazon's the NICs for data, and none of NVIDIA? */
bool machine_has_only_efa(const struct doctor_machine *machine);

/* What GDRCopy lacks, as the end of a sentence; "" if nothing is known to be missing. */
const char *machine_lacks_gdrcopy(const struct doctor_machine *machine);

/*
 * Has the wheel for another CUDA overwritten PyTorch's library at `path`, of the wheel nvidia-NAME-cu<CUDA>? The wheels
 * have one folder, and the one that was installed last stays (pytorch/pytorch#186591).
 */
bool machine_is_overwritten(struct doctor_result *result, const char *name, const char *path);

/*
 * What a program finds for the variable: its value in the environment or, of NCCL's, in one of NCCL's configuration
 * files; "" if nothing sets it. `ret_file` (NULL: not needed) is that file, "" for the environment.
 */
const char *machine_nccl_value(const struct doctor_machine *machine, const char *name, const char **ret_file);

/* The variable is wrong: how to get rid of it, in one paste with others; and with its value as evidence. */
void doctor_unset_value(struct doctor_result *result, const char *name);
void doctor_found_value(struct doctor_result *result, const char *name);

/* Do the launcher's variables say that the job has other nodes? */
bool machine_has_other_nodes(const struct doctor_machine *machine);

/* A list of names as NCCL reads it: beginnings of names, after '=' whole names, after '^' all others. */
struct list_names {
    bool is_exclusion, is_exact;
    const char *list;
};

struct list_names list_names_of(const char *value);

/* Does the list choose this device? Interfaces have port -1. */
bool list_names_it(const struct list_names *names, const char *name, int port);

/* NVSwitches on the PCI bus. */
int inventory_nvswitches(const struct doctor_machine *machine);

#endif
