/* SPDX-License-Identifier: Apache-2.0 */
/* rank_environment.h - the variables that the ranks of epkit launch get. */
#ifndef EP_LAUNCH_RANK_ENVIRONMENT_H
#define EP_LAUNCH_RANK_ENVIRONMENT_H

#include "common/cmd.h"

#include <jansson.h>
#include <stdbool.h>

/* Options of the command; borrowed. */
struct launch_environment {
    const struct opt_strings *env, *source; /* --env, --source */
    const char *preload;                    /* --preload; NULL: LD_PRELOAD of epkit itself */
    bool debug;
};

/*
 * Sets env, source and preload of a job's spec. `is_pods`: the hosts are pods of the job that epkit runs in. CMD_FINE,
 * or an exit code after the reason was reported.
 */
int launch_environment(const struct cmd *cmd, const struct launch_environment *args, bool is_pods, json_t *spec);

/* Adds a secret for the ranks of this job, which find each other over TCP, unless `env` has one. Result as above. */
int launch_add_secret(const struct cmd *cmd, json_t *env);

#endif
