/* SPDX-License-Identifier: Apache-2.0 */
/* report.h - what a run folder says, as one JSON document and one page; comparison with other runs; history. */
#ifndef EP_OPS_REPORT_REPORT_H
#define EP_OPS_REPORT_REPORT_H

#include "folder/folder.h"

#include <stdio.h>

/*
 * All that a run folder holds, with `parsed`, the verdict on its logs (ops/verdict): tool/schema/report.json without
 * the keys that every document begins with. A new reference; NULL: out of memory.
 */
json_t *report_gather(const struct folder *folder, json_t *parsed);

/*
 * The figures of a document, for comparison: {"test_internode dispatch fp8": {"value": 70.1, "unit": "GB/s (RDMA)",
 * "lower_is_better": false}}. A new reference.
 */
json_t *report_figures(const json_t *document);

/*
 * B beside A: {"rows": [{figure, unit, a, b, change, noise, rating}], "regressions", "improvements", "verdict"}. A
 * change is positive when it is for the better. `noise` is the share below which a change means nothing; a figure that
 * `history` (may be NULL) holds at least four times has a noise of its own, three standard deviations. A new reference.
 */
json_t *report_compare(const json_t *a, const json_t *b, double noise, const json_t *history);

/* One line of a history: date, job, hardware, nodes, versions, commit, result, figures. A new reference. */
json_t *report_history_entry(const json_t *document);

/* Lines that are not entries are counted in *ret_bad. An array, or NULL with errno; ENOENT if there is no file yet. */
json_t *report_history_read(const char *path, int *ret_bad);

/* Appends one entry; whole lines only, also when several write at the same time. 0 or the errno. */
int report_history_add(const char *path, const json_t *entry);

/* The entries of `history` that `document` can be compared with: same job, hardware and number of nodes. */
json_t *report_history_of(const json_t *history, const json_t *document);

/* The page. */
void report_page(FILE *stream, const json_t *document);
void report_compare_page(FILE *stream, const json_t *document);

#endif
