/* SPDX-License-Identifier: Apache-2.0 */
/* kubectl.h - a snapshot of a cluster, read by kubectl. */
#ifndef EP_TOOL_KUBECTL_H
#define EP_TOOL_KUBECTL_H

#include "deploy/deploy.h"

#include <jansson.h>
#include <stdint.h>

struct kubectl {
    const char *program; /* with options, divided by blanks */
    const char *context; /* NULL: the current one */
    const char *space;   /* namespace that is asked about */
    int64_t timeout_ms;  /* of each call */
};

/*
 * Everything that deploy_check() reads (see ops/deploy/deploy.h), and for each kind of `documents` whether the user may
 * create it. CMD_FINE; CMD_UNSUPPORTED when there is no kubectl, CMD_FAILED when the cluster does not answer: then the
 * error has been reported. A resource that cannot be read is noted in the snapshot.
 */
int kubectl_snapshot(const struct kubectl *kubectl, const json_t *documents, json_t **ret_snapshot);

/*
 * Asks the API server about each object of the job by a server-side dry run, which stores nothing, and adds the answers
 * to the snapshot. What cannot be asked is noted there.
 */
void kubectl_ask(const struct kubectl *kubectl, const struct deploy_job *job, json_t *snapshot);

#endif
