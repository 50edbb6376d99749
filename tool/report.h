/* SPDX-License-Identifier: Apache-2.0 */
/*
 * report.h - what `epkit run` leaves behind: a folder with report.json and a report.html that needs nothing else.
 */
#ifndef EP_TOOL_REPORT_H
#define EP_TOOL_REPORT_H

#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>

/*
 * Makes sure that a report can be written into `folder`, creating it (not its parents). false: the reason has been
 * reported. From here on SIGINT, SIGTERM and SIGHUP, unless ignored, take back what was created before they end the
 * process.
 */
bool report_prepare(const char *folder);

/* There will be no report: takes back what report_prepare() created. Nothing after report_write(). */
void report_abandon(void);

/*
 * Writes report.json and report.html of a document of `epkit run`. Each file appears whole or not at all: a reader
 * never sees half of one, and an old report stays until both of the new one are complete. false: the reason has been
 * reported.
 */
bool report_write(const char *folder, const json_t *document);

/* --- report_html.c --- */

/* The whole page. */
void report_html(FILE *stream, const json_t *document);

/* --- report_plot.c --- */

/* Plots of the measurements `rows`, those for which there is enough. */
void report_plots(FILE *stream, const json_t *rows);

#endif
