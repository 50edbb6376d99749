/* SPDX-License-Identifier: Apache-2.0 */
/*
 * diagnosis.h - what the parts of `epkit doctor` share.
 *
 *   cmd_doctor.c      the command: options, which checks, exit code
 *   text.c            a diagnosis for people
 *   inventory.c       what was looked at, in a few words
 *   json.c            the same as JSON, with the facts that nodes are compared by
 *   fix.c             --fix: runs commands that are safe, and looks again
 *   hosts.c           --hosts: runs epkit doctor on other nodes
 *   compare.c         what differs between nodes
 */
#ifndef EP_TOOL_DIAGNOSIS_H
#define EP_TOOL_DIAGNOSIS_H

#include "cmd.h"
#include "doctor/doctor.h"

#include <jansson.h>

struct diagnosis {
    const struct doctor_machine *machine;
    int n;
    struct doctor_result *results; /* by check, in their order */
    int n_fine, n_found, n_errors, n_not_here, n_unknown;
    int n_open;   /* of n_unknown: doctor_is_open() */
    int n_denied; /* of n_unknown: for root only */
};

/* Runs the checks of `checks` (ends with NULL). EP_E_MEMORY. */
ep_status diagnosis_make(const struct doctor_machine *machine, const struct doctor_check *const *checks,
                         struct diagnosis *ret_diagnosis);
void diagnosis_done(struct diagnosis *diagnosis);

/*
 * CMD_FINDINGS; or CMD_NOT_KNOWN where a check could not tell, except for what this user or this container can never
 * see, or where none could; else CMD_FINE.
 */
int diagnosis_exit(const struct diagnosis *diagnosis);

/* --- inventory.c --- */

/* GPUs and ports for data in a few words, with ", " behind them: "8 x H200, 8 x 400 Gb/s RoCE, "; "" for none. */
void diagnosis_inventory(const struct topo *topo, char *ret_text, size_t bytes);

/* --- text.c --- */

/* The sentence that comes first. */
void diagnosis_verdict(const struct diagnosis *diagnosis, char *ret_text, size_t bytes);

/* Verdict, table, findings in full; with `verbose` every check with its outcome. */
void diagnosis_print(const struct diagnosis *diagnosis, bool verbose);

void diagnosis_print_list(const struct doctor_check *const *checks);
void diagnosis_explain(const struct doctor_check *check);

/* Prints "    label  text" with the text wrapped, its lines below each other. */
void diagnosis_print_block(const char *label, const char *text);

const char *diagnosis_severity(enum doctor_severity severity); /* "serious", "warning" */
const char *diagnosis_fix_class(enum doctor_fix_class class);  /* "safe", "restart", "cuts-off" */

/* --- json.c; new references --- */

json_t *diagnosis_json(const char *command, const struct diagnosis *diagnosis);
json_t *diagnosis_list_json(const char *command, const struct doctor_check *const *checks);
json_t *diagnosis_facts(const struct doctor_machine *machine);
json_t *diagnosis_network(const struct doctor_machine *machine); /* of struct network, machine/doctor/network.h */

/* --- fix.c --- */

/* Makes the machine anew and runs one check on it, after a fix. CMD_FINE, or after reporting why not. */
typedef int (*fix_look_fn)(const struct doctor_check *check, struct doctor_result *ret_result, char *ret_text,
                           size_t bytes, void *context);

struct fix_how {
    bool yes;           /* do not ask */
    int64_t timeout_ms; /* of each command */
    fix_look_fn look;
    void *context;
};

/* What --fix does after the diagnosis was printed. An exit code. */
int fix_run(const struct cmd *cmd, const struct diagnosis *diagnosis, const struct fix_how *how);

/* --- hosts.c --- */

struct hosts_how {
    const char *file;           /* of --hosts */
    const char *ssh;            /* the program and its options */
    const char *remote_command; /* what each node runs */
    int64_t timeout_s;          /* of each node */
    bool json;
};

int hosts_run(const struct cmd *cmd, const struct hosts_how *how);

/* --- compare.c --- */

/* A node, as far as it answered. */
struct node {
    const char *name;  /* as in the file */
    json_t *document;  /* NULL: no answer */
    const char *layer; /* that failed: see launch/remote.h; "answer": what came is no document of ours */
    char why[512];
};

/*
 * What differs between the nodes that answered: an array of {"fact", "value", "nodes", "others": [{"value", "nodes":
 * [names]}]}, where `value` is what most have and `nodes` how many.
 */
json_t *compare_nodes(const struct node *nodes, int n);

/* Findings, those of the same text together: an array of {"severity", "id", "text", "nodes": [names]}. */
json_t *compare_findings(const struct node *nodes, int n);

#endif
