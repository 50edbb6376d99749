/* SPDX-License-Identifier: Apache-2.0 */
/* env.h - inside `epkit env`: the advised environment in various formats, and running a command with it. */
#ifndef EP_ENV_ENV_H
#define EP_ENV_ENV_H

#include "machine/doctor/doctor.h"
#include "machine/software/advice.h"

#include <jansson.h>
#include <stdio.h>

enum env_format { ENV_SH, ENV_DOCKER, ENV_K8S, ENV_SLURM };

extern const char *const env_format_names[]; /* ends with NULL */

/* Writes the rows as text. */
void env_write(FILE *stream, const struct doctor_machine *machine, enum env_format format);

/* An array with one object for each row. A new reference. */
json_t *env_json(const struct doctor_machine *machine);

#endif
