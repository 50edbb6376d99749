/* SPDX-License-Identifier: Apache-2.0 */
/* machine_nvshmem.h - queries for the checks of NVSHMEM and NCCL. */
#ifndef EP_DOCTOR_MACHINE_NVSHMEM_H
#define EP_DOCTOR_MACHINE_NVSHMEM_H

#include "doctor.h"

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
ep_status machine_nvshmem_map(const struct doctor_machine *machine, struct map **ret_map);

/* The first entry of LD_PRELOAD with `part` in its file name, and whether the file exists; path "" if there is none. */
struct machine_preload {
    const char *path;
    bool is_there;
};

struct machine_preload machine_preload(const struct doctor_machine *machine, const char *part);

/* The next entry of LD_PRELOAD; NULL at the end. *at is the position, initially the value itself. */
const char *machine_next_preload(const struct doctor_machine *machine, const char **at);

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
bool machine_has_two(const struct doctor_machine *machine, struct doctor_result *result, const char *part,
                     const char *name);

/* "libibverbs.so.1" or "libmlx5.so.1", which provider-missing reports, if needed and not found; otherwise "". */
const char *machine_missing_verbs_library(const struct doctor_machine *machine);

#endif
