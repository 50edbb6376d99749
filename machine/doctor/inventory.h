/* SPDX-License-Identifier: Apache-2.0 */
/* inventory.h - how many GPUs a board has. What --expect says is in doctor.h. */
#ifndef EP_DOCTOR_INVENTORY_H
#define EP_DOCTOR_INVENTORY_H

#include "doctor/doctor.h"

/* NVSwitches on the PCI bus. */
int inventory_nvswitches(const struct doctor_machine *machine);

/* The GPUs that a machine of this make has, and what it is, for people; 0: its make does not tell. */
int inventory_of_board(const struct doctor_machine *machine, const char **ret_board);

#endif
