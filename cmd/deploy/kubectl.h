/* SPDX-License-Identifier: Apache-2.0 */
/* kubectl.h - reads a snapshot of a cluster with kubectl. */
#ifndef EP_DEPLOY_KUBECTL_H
#define EP_DEPLOY_KUBECTL_H

#include "deploy.h"

#include <jansson.h>
#include <stdint.h>

struct kubectl {
    const char *program; /* with options, separated by blanks */
    const char *context; /* NULL: the current one */
    const char *space;   /* namespace to read */
    int64_t timeout_ms;  /* of each call */
};

/*
 * Reads the resources (see cmd/deploy/deploy.h), and for each kind of `documents` (may be NULL) whether the user may
 * create it. CMD_FINE; CMD_UNSUPPORTED: no kubectl; CMD_FAILED: the cluster does not answer; both after
 * reporting the error. The snapshot lists the resources that could not be read.
 */
int kubectl_snapshot(const struct kubectl *kubectl, const struct deploy_resource *resources, const json_t *documents,
                     json_t **ret_snapshot);

/*
 * Makes a server-side dry run of each object of the job, which stores nothing, and adds the answers to the snapshot.
 * Failures are noted there.
 */
void kubectl_dry_run(const struct kubectl *kubectl, const struct deploy_job *job, json_t *snapshot);

#endif
