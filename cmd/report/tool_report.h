/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tool_report.h - the report of `epkit run`: a folder with report.json and a self-contained report.html.
 */
#ifndef EP_REPORT_TOOL_REPORT_H
#define EP_REPORT_TOOL_REPORT_H

#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>

/* Can a report be written into `folder`? Its parent must exist. Creates nothing. false: the reason was reported. */
bool report_check(const char *folder);

/*
 * Writes report.json and report.html of a document of `epkit run`. A new folder appears with both files in it. In an
 * existing folder each file is replaced atomically, after both are complete. false: the reason was reported, and
 * nothing is left behind.
 */
bool report_write(const char *folder, const json_t *document);

/* --- html.c --- */

/* The whole page. */
void report_html(FILE *stream, const json_t *document);

/* --- plot.c --- */

/* Prints the plots for which `rows` has enough measurements. */
void report_plots(FILE *stream, const json_t *rows);

#endif
