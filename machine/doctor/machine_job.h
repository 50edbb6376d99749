/* SPDX-License-Identifier: Apache-2.0 */
/* machine_job.h - queries about the job of a process, from its environment. */
#ifndef EP_DOCTOR_MACHINE_JOB_H
#define EP_DOCTOR_MACHINE_JOB_H

#include "doctor.h"

/* The value of a variable that is an unsigned integer; `without` if it is not set or not such a number. */
long machine_job_number(const struct doctor_machine *machine, const char *name, long without);

/* The number of GPUs that this process uses: one if a launcher started it as a rank, otherwise those that it sees. */
int machine_job_gpus(const struct doctor_machine *machine);

/* The number of nodes of the job, from its launcher's variables; -1 if not known. */
long machine_job_nodes(const struct doctor_machine *machine);

#endif
