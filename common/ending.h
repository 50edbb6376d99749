/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ending.h - the JSON document of a command that ends without its report, because it was refused, failed early, timed
 * out or was interrupted. Its schema is common/ending.json.
 *
 * With --json, standard output is one document. It is empty only after a usage error (cmd_usage(), exit code 2), or if
 * a signal ended the command.
 */
#ifndef EP_COMMON_ENDING_H
#define EP_COMMON_ENDING_H

/* Enables the document for a command called with --json. Child processes never write it. */
void ending_expect(const char *command);

/* Disables the document: other output is written to standard output, or none at all. */
void ending_dismiss(void);

/* Adds an error printed to standard error, in a sentence; and a detail of the last one: "where", "why" or "hint". */
void ending_add(const char *what);
void ending_detail(const char *key, const char *text);

/*
 * Writes the document, if it is still enabled: `verdict` (NULL: the first error, or the meaning of `code`), all errors,
 * and the exit code `code`. A failure to write standard output has been reported already.
 */
void ending_write(int code, const char *verdict);

/*
 * ending_write_late() writes the document from another thread, while the main thread hangs and may hold stdio locks.
 * The caller must end the process at once. The main thread can write no report from then on.
 */
void ending_write_late(int code, const char *what, const char *where, const char *why, const char *hint);

#endif
