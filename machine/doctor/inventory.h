/* SPDX-License-Identifier: Apache-2.0 */
/* inventory.h - the number of GPUs of known boards. */
#ifndef EP_DOCTOR_INVENTORY_H
#define EP_DOCTOR_INVENTORY_H

#include "doctor.h"

/* NVSwitches on the PCI bus. */
int inventory_nvswitches(const struct doctor_machine *machine);

/* The number of GPUs of this machine type, and its name for messages; 0 if the type is not known. */
int inventory_of_board(const struct doctor_machine *machine, const char **ret_board);

#endif
