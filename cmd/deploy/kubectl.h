/* SPDX-License-Identifier: Apache-2.0 */
/* kubectl.h - reads a snapshot of a cluster with kubectl. */
#ifndef EP_DEPLOY_KUBECTL_H
#define EP_DEPLOY_KUBECTL_H

#include "deploy.h"

#include <stdint.h>

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

#endif
