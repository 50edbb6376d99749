/* SPDX-License-Identifier: Apache-2.0 */
/*
 * driver_fix.h - how an option of the NVIDIA driver comes into effect, by operating system, without losing the options
 * that are configured beside it; and why the driver is not loaded at all.
 */
#ifndef EP_DOCTOR_DRIVER_FIX_H
#define EP_DOCTOR_DRIVER_FIX_H

#include "doctor/doctor.h"

/* After doctor_found(): fix and advice that have the driver loaded with what modprobe.d says. */
void driver_fix_reload(const struct doctor_machine *machine, struct doctor_result *result);

/* The same, that set PeerMappingOverride=1 first: in the line with NVreg_RegistryDwords that wins, if there is one. */
void driver_fix_peer_mapping(const struct doctor_machine *machine, struct doctor_result *result);

/* GPUs are on the bus, and the driver is not loaded: why, as far as the machine tells (driver_missing.c). */
void driver_missing(const struct doctor_machine *machine, struct doctor_result *result);

/* Nouveau has `n` of the GPUs. */
void driver_found_nouveau(const struct doctor_machine *machine, struct doctor_result *result, int n);

#endif
