/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_variables.h - values of NCCL's variables, which also come from files, and its lists of names. */
#ifndef EP_MACHINE_DOCTOR_NCCL_VARIABLES_H
#define EP_MACHINE_DOCTOR_NCCL_VARIABLES_H

#include "doctor.h"

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

#endif
