/* SPDX-License-Identifier: Apache-2.0 */
/* machine_nvshmem.h - what the checks of NVSHMEM and NCCL want to know. */
#ifndef EP_DOCTOR_MACHINE_NVSHMEM_H
#define EP_DOCTOR_MACHINE_NVSHMEM_H

#include "doctor/doctor.h"

#define MACHINE_HCA_PREFIX "mlx5" /* NVSHMEM_HCA_PREFIX, where it is not set; NVSHMEM 3.4 and 3.5 */

/* Active ports of NICs for data. */
int machine_data_ports(const struct topo *topo);

/* The name of a NIC, fit to be shown. */
const char *machine_nic_name(const struct doctor_machine *machine, int nic);

/* An NVSHMEM_HCA_LIST with one NIC in it: nothing is left to choose. NULL is none. */
bool machine_is_single_nic(const char *list);

/* Does the environment set a variable that NVSHMEM or DeepEP reads in a running program? */
bool machine_sets_nvshmem(const struct doctor_machine *machine);

/* Is there a NIC for data of NVIDIA's? libmlx5 and IBGDA are for no others. Says why not as machine_has_data_nics()
 * does.
 */
bool machine_has_mlx5(const struct doctor_machine *machine, struct doctor_result *result);

/* Does Python import a DeepEP that loads NVSHMEM? One that was built without it works within a node only. */
bool machine_has_deepep(const struct doctor_machine *machine);

/*
 * Will programs use IBGDA? The environment says so, or a DeepEP is imported, which switches it on itself. Says "not
 * applicable here" if not, or without NVSHMEM or NICs.
 */
bool machine_uses_ibgda(const struct doctor_machine *machine, struct doctor_result *result);

/* As NVSHMEM takes NVSHMEM_HCA_PREFIX: a part of the name; in later versions "^" in front of what is left out. */
bool machine_hca_prefix_matches(const char *prefix, const char *name);

/* The NICs that NVSHMEM takes with the variables that are set, one job for each GPU. */
ep_status machine_nvshmem_map(const struct doctor_machine *machine, struct map **ret_map);

/* The first entry of LD_PRELOAD with `part` in its file name, and whether it is there; "" none. */
struct machine_preload {
    const char *path;
    bool is_there;
};

struct machine_preload machine_preload(const struct doctor_machine *machine, const char *part);

/* The next entry of LD_PRELOAD; NULL at the end. *at is where it goes on, the value itself at first. */
const char *machine_next_preload(const struct doctor_machine *machine, const char **at);

/* A path of LD_PRELOAD that is not there; names without a folder are searched for, and may well be. */
bool machine_is_missing_preload(const struct doctor_machine *machine, const char *entry);

/* The command that leaves the entries of LD_PRELOAD that are there. */
const char *machine_preload_command(const struct doctor_machine *machine);

/*
 * Loads a library in a child process, as a program with this environment would; a snapshot says what came of it there.
 * SOURCE_OK with ret_error "" when it loads, else what the linker says. Another state: nobody knows, *ret_error why.
 */
enum source_state machine_try_load(const struct doctor_machine *machine, const char *path, const char **ret_error);

/*
 * "libibverbs.so.1" or "libmlx5.so.1" where the linker finds none and something that the environment asks for needs it:
 * the check provider-missing reports that. Else "".
 */
const char *machine_missing_verbs_library(const struct doctor_machine *machine);

/*
 * Does a library not load because libibverbs or libmlx5 is not found, or because the two are of different sets? By what
 * its files say. The checks of the group verbs report both; any other reason is a matter of what does not load.
 */
bool machine_has_verbs_fault(const struct doctor_machine *machine, const char *path);

#endif
