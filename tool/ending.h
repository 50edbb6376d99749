/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ending.h - what --json answers with when a verb ends without its report: it was refused, failed before it began, ran
 * out of time or was interrupted. The document is that of schema/ending.json.
 *
 * Standard output of a verb with --json is one document. It is empty only when the command line itself is wrong, which
 * cmd_usage() reports with exit code 2: such a call was never that of a program that reads JSON.
 */
#ifndef EP_TOOL_ENDING_H
#define EP_TOOL_ENDING_H

#include <stdarg.h>

/*
 * The verb was called with --json, and standard output is this process' own: from here on SIGINT, SIGTERM, SIGHUP and
 * SIGQUIT write the document before they end it, unless they are blocked or handled. Children do not.
 */
void ending_expect(const char *verb);

/* Something else is written to standard output now, or nothing is to be: there will be no such document. */
void ending_dismiss(void);

/* What standard error says: a new error, in a sentence, and more of the last one: "where", "why" or "hint", what to do.
 */
void ending_add(const char *what);
void ending_detail(const char *key, const char *text);

/*
 * The verb ends with `code`. If the document is still expected it is written: `verdict` (NULL: the first error, or what
 * the code means), every error, the code. Where standard output cannot be written that has been said already.
 */
void ending_write(int code, const char *verdict);

/*
 * The same from a thread beside the main one, which hangs and may hold the locks of streams. The process has to end at
 * once: the main thread is held back from a report of its own.
 */
void ending_write_late(int code, const char *what, const char *where, const char *why, const char *hint);

#endif
