/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tool_report.h - what `epkit run` leaves behind: a folder with report.json and a report.html that needs nothing else.
 */
#ifndef EP_TOOL_REPORT_H
#define EP_TOOL_REPORT_H

#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>

/* Can a report be written into `folder`? Its parents must be there. Nothing is made. false: the reason is reported. */
bool report_check(const char *folder);

/*
 * Writes report.json and report.html of a document of `epkit run`. A folder that is not there yet appears with both of
 * them in it. In one that is there each file appears whole or not at all: a reader never sees half of one, and an old
 * report stays until both of the new one are complete. false: the reason has been reported, and nothing is left behind.
 */
bool report_write(const char *folder, const json_t *document);

/* --- html.c --- */

/* The whole page. */
void report_html(FILE *stream, const json_t *document);

/* --- plot.c --- */

/* Plots of the measurements `rows`, those for which there is enough. */
void report_plots(FILE *stream, const json_t *rows);

#endif
