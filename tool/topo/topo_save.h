/* SPDX-License-Identifier: Apache-2.0 */
/* topo_save.h - epkit topo --save: a snapshot for all commands. */
#ifndef EP_TOOL_TOPO_SAVE_H
#define EP_TOOL_TOPO_SAVE_H

#include "cmd.h"
#include "doctor/doctor.h"

/* Can a snapshot be written there? CMD_FINE, or another result after saying why not. Nothing is changed. */
int topo_save_check(const struct cmd *cmd, const char *file);

/* Reads what any command would read of the machine. */
void topo_save_read(const struct doctor_machine *machine);

/* Writes the snapshot and says so on standard error. CMD_FINE, or CMD_FAILED after saying why not. */
int topo_save_write(const struct doctor_machine *machine, const char *file);

#endif
