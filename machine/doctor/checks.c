/* SPDX-License-Identifier: Apache-2.0 */
/* checks.c - the array of checks. The build makes DOCTOR_TEXTS_<name> of docs/failure-modes.md (texts.awk). */
#include "checks.h"

#define DOCTOR_ROW(name, its_group, its_needs)                                                                         \
    const struct doctor_check check_##name = {                                                                         \
        .group = #its_group, .needs = (its_needs), .run = run_##name, DOCTOR_TEXTS_##name};
#define DOCTOR_ROW_STACK(name, its_group, its_needs)                                                                   \
    const struct doctor_check check_##name = {                                                                         \
        .group = #its_group, .needs = (its_needs), .run = stacks_run, DOCTOR_TEXTS_##name};
DOCTOR_CHECKS(DOCTOR_ROW, DOCTOR_ROW_STACK)

#define DOCTOR_POINTER(name, group, needs) &check_##name,
const struct doctor_check *const doctor_checks[] = {DOCTOR_CHECKS(DOCTOR_POINTER, DOCTOR_POINTER) NULL};
