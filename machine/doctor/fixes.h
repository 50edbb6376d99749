/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fixes.h - how to apply an option of the NVIDIA driver on each operating system without losing other configured
 * options; why the driver is not loaded; and words and commands of a shell.
 */
#ifndef EP_DOCTOR_FIXES_H
#define EP_DOCTOR_FIXES_H

#include "doctor.h"

/* Call after doctor_found(): sets fix and advice to reload the driver with the options in modprobe.d. */
void driver_fix_reload(const struct doctor_machine *machine, struct doctor_result *result);

/* driver_fix_peer_mapping() first sets PeerMappingOverride=1, in the effective NVreg_RegistryDwords line if any. */
void driver_fix_peer_mapping(const struct doctor_machine *machine, struct doctor_result *result);

/* GPUs are on the bus, but the driver is not loaded: reports why, as far as it can be determined (driver_missing.c). */
void driver_missing(const struct doctor_machine *machine, struct doctor_result *result);

/* The module of a driver for GPUs that is the kernel's own, nouveau or its successor nova_core; NULL of any other. */
const char *driver_of_kernel(const char *driver);

/* Reports that it is bound to `n` of the GPUs. */
void driver_found_nouveau(const struct doctor_machine *machine, struct doctor_result *result, int n,
                          const char *module);

/* Has firmware or host given the GPU no addresses for its memory (BAR1)? What to do then. */
bool machine_lacks_window(const struct doctor_machine *machine, int pci);
const char *machine_window_advice(const struct doctor_machine *machine);

/* --- words and commands of a shell --- */

/* shell_quote() of any length, owned by the source. */
const char *shell_word(struct source *source, const char *text);

/* Is it a valid name of a shell variable? */
bool shell_is_name(const char *name);

/* Does a line of a shell script evaluate /proc/1/environ? Reading one variable from it with grep does not count. */
bool shell_evaluates_environ(const char *line, size_t bytes);

/* Prepends `folders` to a search path without an empty entry, which would mean the current folder. */
const char *shell_prepend(struct source *source, const char *name, const char *folders);

/* A command that removes `folder` from a search path, `path` being its current value. */
const char *shell_leave_out(struct source *source, const char *name, const char *path, const char *folder);

#endif
