/* SPDX-License-Identifier: Apache-2.0 */
/* checks.c - the array of checks. */
#include "checks.h"

#define DOCTOR_ROW(name) &check_##name,
const struct doctor_check *const doctor_checks[] = {DOCTOR_CHECKS(DOCTOR_ROW) NULL};
#undef DOCTOR_ROW
