/* SPDX-License-Identifier: Apache-2.0 */
/* topo_save.h - epkit topo --save: a snapshot for all commands. */
#ifndef EP_TOPO_TOPO_SAVE_H
#define EP_TOPO_TOPO_SAVE_H

#include "common/cmd.h"
#include "machine/doctor/doctor.h"

/*
 * Checks whether a snapshot can be written there. CMD_FINE, or another result after reporting why not. Changes nothing.
 */
int topo_save_check(const struct cmd *cmd, const char *file);

/* Reads everything that any command would read of the machine. */
void topo_save_read(const struct doctor_machine *machine);

/* Writes the snapshot and reports it on standard error. CMD_FINE, or CMD_FAILED after reporting why not. */
int topo_save_write(const struct doctor_machine *machine, const char *file);

#endif
