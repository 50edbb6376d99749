/* SPDX-License-Identifier: Apache-2.0 */
/* diagnosis.h - shared by the parts of `epkit doctor`. */
#ifndef EP_DOCTOR_DIAGNOSIS_H
#define EP_DOCTOR_DIAGNOSIS_H

#include "cmd/inspect.h"
#include "common/cmd.h"
#include "machine/doctor/doctor.h"

#include <jansson.h>

#define DOCTOR_CHECKS_MAX 256

struct diagnosis {
    const struct doctor_machine *machine;
    int n;
    struct doctor_result *results; /* one per check, in the order of the checks */
    int n_fine, n_found, n_errors, n_not_applicable, n_unknown;
    int n_open;   /* of n_unknown: doctor_is_inconclusive() */
    int n_denied; /* of n_unknown: need root */
};

/* Reads the machine that the options name. Another code than CMD_FINE was reported. */
int diagnosis_read(const struct cmd *cmd, const struct inspect_options *inspect, struct doctor_machine **ret_machine);

/*
 * CMD_FINDINGS; or CMD_NOT_KNOWN if a check was inconclusive, ignoring what this user or container can never see, or if
 * all checks were unknown; otherwise CMD_FINE.
 */
int diagnosis_exit(const struct diagnosis *diagnosis);

/* --- doctor_text.c --- */

/* The first sentence of the output. */
void diagnosis_verdict(const struct diagnosis *diagnosis, char *ret_text, size_t bytes);

/* Prints verdict, table and findings; with `verbose` also every check with its outcome. */
void diagnosis_print(const struct diagnosis *diagnosis, bool verbose);

void diagnosis_explain(const struct doctor_check *check);

/* Prints "    label  text" with the text wrapped and aligned. */
void diagnosis_print_block(const char *label, const char *text);

/* Executes --stacks with `n` names: none, "all", or names of stacks. Returns an exit code. */
int diagnosis_run_stacks(const struct cmd *cmd, const struct inspect_options *inspect, bool json, char *const *names,
                         int n);

/* --- doctor_json.c; new references --- */

json_t *diagnosis_json(const char *command, const struct diagnosis *diagnosis);
json_t *diagnosis_row(const struct doctor_result *result);
json_t *diagnosis_list(const struct doctor_check *const *checks); /* what they check: rows */
/* A row for each installed stack, for each of `n` names, or with "all" for each known. NULL: one is not known. */
json_t *diagnosis_stacks(const struct doctor_machine *machine, char *const *names, int n);
json_t *diagnosis_facts(const struct doctor_machine *machine);

/* --- doctor_hosts.c --- */

struct hosts_options {
    const char *file;           /* of --hosts */
    const char *ssh;            /* the ssh program and its options */
    const char *remote_command; /* the command to run on each node */
    int port;                   /* of sshd, for nodes without one; 0: that of ssh's configuration */
    int64_t timeout_s;          /* of each node */
    bool json;
};

int hosts_run(const struct cmd *cmd, const struct hosts_options *options);

/* --- compare_nodes.c --- */

/* The answer of a node. */
struct node {
    const char *name;  /* as in the file */
    json_t *document;  /* NULL if there was no answer */
    const char *layer; /* that failed (launch/remote.h); "answer": the output was no document of epkit doctor */
    char why[512];
    char *text; /* what it wrote to standard output */
    size_t bytes;
    bool is_cut;
};

/*
 * Differences between the nodes that answered: an array of {"fact", "value", "nodes", "others": [{"value", "nodes":
 * [names]}]}, `value` being the most common value and `nodes` the number of nodes that have it.
 */
json_t *compare_nodes(const struct node *nodes, int n);

/* Findings, grouped by text: an array of {"severity", "id", "text", "nodes": [names]}. */
json_t *compare_findings(const struct node *nodes, int n);

#endif
