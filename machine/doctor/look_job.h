/* SPDX-License-Identifier: Apache-2.0 */
/* look_job.h - what the environment of a process says about its job. */
#ifndef EP_DOCTOR_LOOK_JOB_H
#define EP_DOCTOR_LOOK_JOB_H

#include "doctor/doctor.h"

/* A variable that is a whole number without sign; `without` if it is not set or no such number. */
long look_job_number(const struct doctor_machine *machine, const char *name, long without);

/* GPUs that this process uses: one as a rank that its launcher started, else those that it sees. */
int look_job_gpus(const struct doctor_machine *machine);

/* Nodes of the job, by its launcher's variables; -1 nobody says. */
long look_job_nodes(const struct doctor_machine *machine);

#endif
