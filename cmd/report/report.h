/* SPDX-License-Identifier: Apache-2.0 */
/* report.h - a run folder as a JSON document and an HTML page; comparison with other runs; history. */
#ifndef EP_REPORT_REPORT_H
#define EP_REPORT_REPORT_H

#include "folder.h"

#include <stdio.h>

/*
 * The contents of a run folder, with `parsed`, the verdict on its logs (cmd/parse/verdict.h): cmd/report/schema.json
 * without the common keys of epkit's documents. A new reference; NULL: out of memory.
 */
json_t *report_gather(const struct folder *folder, json_t *parsed);

/*
 * The figures of a document, for comparison: {"test_internode dispatch fp8": {"value": 70.1, "unit": "GB/s (RDMA)",
 * "lower_is_better": false}}. A new reference.
 */
json_t *report_figures(const json_t *document);

/*
 * Compares B with A: {"rows": [{figure, unit, a, b, change, noise, rating}], "regressions", "improvements", "verdict"}.
 * A positive change is an improvement. Changes below the share `noise` are insignificant; a figure with at least four
 * entries in `history` (may be NULL) has a noise of its own, three standard deviations. A new reference.
 */
json_t *report_compare(const json_t *a, const json_t *b, double noise, const json_t *history);

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

#endif
