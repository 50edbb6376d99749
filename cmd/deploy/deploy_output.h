/* SPDX-License-Identifier: Apache-2.0 */
/* deploy_output.h - the reports of epkit deploy. */
#ifndef EP_DEPLOY_DEPLOY_OUTPUT_H
#define EP_DEPLOY_DEPLOY_OUTPUT_H

#include "common/cmd.h"
#include "deploy.h"

/* Writes the findings of deploy_check(), and returns the exit code. */
int check_report(const struct cmd *cmd, const struct deploy_job *job, const json_t *snapshot, bool is_json);

/* Writes the answer of deploy_why(), which it consumes, and returns the exit code. */
int why_report(const struct cmd *cmd, json_t *answer, const json_t *snapshot, bool is_json);

#endif
