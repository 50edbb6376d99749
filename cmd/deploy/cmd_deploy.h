/* SPDX-License-Identifier: Apache-2.0 */
/* cmd_deploy.h - what is around the checks: kubectl, which reads a snapshot of a cluster, and the reports. */
#ifndef EP_DEPLOY_CMD_DEPLOY_H
#define EP_DEPLOY_CMD_DEPLOY_H

#include "common/cmd.h"
#include "deploy.h"

struct kubectl {
    const char *program; /* with options, separated by blanks */
    const char *context; /* NULL: the current one */
    const char *space;   /* namespace to read */
    int64_t timeout_ms;  /* of each call */
    bool derived;        /* also dry runs of what controllers create */
};

/*
 * Reads what deploy_check() needs for `job`, or, if that is NULL, what deploy_why() needs. CMD_FINE; CMD_UNSUPPORTED:
 * no kubectl; CMD_FAILED: the cluster does not answer; both after reporting the error. The snapshot lists what could
 * not be read.
 */
int kubectl_snapshot(const struct kubectl *kubectl, const struct deploy_job *job, json_t **ret_snapshot);

/* Writes the findings of deploy_check(), and returns the exit code. */
int check_report(const struct cmd *cmd, const struct deploy_job *job, const json_t *snapshot, bool is_json);

/* Writes the answer of deploy_why(), which it consumes, and returns the exit code. */
int why_report(const struct cmd *cmd, json_t *answer, const json_t *snapshot, bool is_json);

#endif
