/* SPDX-License-Identifier: Apache-2.0 */
/* report.h - a run folder as a JSON document and an HTML page; comparison with other runs; history. */
#ifndef EP_REPORT_REPORT_H
#define EP_REPORT_REPORT_H

#include "cmd/parse/log_input.h"
#include "common/json.h"
#include "common/output.h"
#include "folder.h"

#include <stdio.h>

/*
 * The contents of a run folder, with `parsed`, the verdict on its logs (cmd/parse/verdict.h): cmd/report/schema.json
 * without the common keys of epkit's documents. A new reference.
 */
json_t *report_gather(const struct folder *folder, json_t *parsed);

/*
 * The figures of a document, for comparison: {"test_internode dispatch fp8": {"value": 70.1, "unit": "GB/s (RDMA)",
 * "lower_is_better": false}}. A new reference.
 */
json_t *report_figures(const json_t *document);

/* Sets these members to those of another object, also NULL; to null where that has none. `keys` ends with NULL. */
void report_copy_members(json_t *into, const json_t *from, const char *const *keys);

/*
 * Compares B with A: {"rows": [{figure, unit, a, b, change, noise, rating}], "regressions", "improvements", "verdict"}.
 * A positive change is an improvement. Changes below the share `noise` are insignificant; a figure with at least four
 * entries in `history` (may be NULL) has a noise of its own, three standard deviations. A new reference.
 */
json_t *report_compare(const json_t *a, const json_t *b, double noise, const json_t *history);

/* Prints its rows. 0, or -1 after reporting the error. */
int report_compare_print(FILE *stream, const json_t *comparison, enum out_format format);

/* One line of a history: date, job, hardware, nodes, versions, commit, result, figures. A new reference. */
json_t *report_history_entry(const json_t *document);

/* An array of the entries, or NULL with errno; ENOENT: no file yet. *ret_bad counts lines that are not entries. */
json_t *report_history_read(const char *path, int *ret_bad);

/* Appends one entry atomically, also with concurrent writers. 0 or the errno. */
int report_history_add(const char *path, const json_t *entry);

/*
 * The entries of `history` that `document` can be compared with: other runs of the same job, on the same hardware and
 * number of nodes. Earlier reports of the same run are not among them: a run does not differ from itself.
 */
json_t *report_history_of(const json_t *history, const json_t *document);

/* Prints the page. */
void report_page(FILE *stream, const json_t *document);
void report_compare_page(FILE *stream, const json_t *document);

/* The sections of the results of `epkit run`. */
void report_results(FILE *stream, const json_t *results);

/*
 * Can a report of `epkit run` be written into `folder`? Its parent must exist. Leaves nothing behind. false: the reason
 * was reported.
 */
bool report_check(const char *folder);

/*
 * Writes report.json and report.html, and run.json if `run` is not NULL. Makes the folder if
 * it is missing. Each file is replaced atomically. false: the reason was reported.
 */
bool report_write(const char *folder, const json_t *run, const json_t *document,
                  void (*page)(FILE *stream, const json_t *document));

/*
 * Writes the run folder of `epkit run`: `results` is its document (cmd/run/schema.json), which ended with `code` after
 * `seconds`.
 */
bool report_write_results(const char *folder, json_t *results, int code, double seconds);

/* --- the parts of the command --- */

struct report_options {
    const char *output, *history;
    int64_t noise;
    bool compare, json;
    struct input_options input;
};

int report_one(const struct cmd *cmd, const struct report_options *options, const struct reference *reference,
               const struct verdict_options *wanted, const char *path);
int report_two(const struct cmd *cmd, const struct report_options *options, const struct reference *reference,
               const struct verdict_options *wanted, const char *path_a, const char *path_b);

#endif
