/* SPDX-License-Identifier: Apache-2.0 */
/*
 * driver_fix.h - how an option of the NVIDIA driver comes into effect, by operating system, without losing the options
 * that are configured beside it.
 */
#ifndef EP_DOCTOR_DRIVER_FIX_H
#define EP_DOCTOR_DRIVER_FIX_H

#include "doctor/doctor.h"

/* After doctor_found(): fix and advice that have the driver loaded with what modprobe.d says. */
void driver_fix_reload(const struct doctor_machine *machine, struct doctor_result *result);

/* The same, that set PeerMappingOverride=1 first: in the line with NVreg_RegistryDwords that wins, if there is one. */
void driver_fix_peer_mapping(const struct doctor_machine *machine, struct doctor_result *result);

#endif
