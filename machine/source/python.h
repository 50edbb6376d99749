/* SPDX-License-Identifier: Apache-2.0 */
/*
 * python.h - lines of DeepEP's buffer.py, as both who reads it and who scrubs it see them: what the scrubber keeps is
 * what the reader looks at.
 */
#ifndef EP_ROOT_PYTHON_H
#define EP_ROOT_PYTHON_H

#include <stdbool.h>

#define PYTHON_MAPPING "_setup_device_hca_mapping" /* the method of DeepEP's pull request 466 */
#define PYTHON_BLANK " \t\r\f\v"
#define PYTHON_LINE_BYTES 4096 /* longer lines are cut */

/* The decorator after which a method has no `self` that `text` begins with, or NULL. */
const char *python_decorator(const char *text);

bool python_is_name_byte(char c);

/*
 * Blanks out what is quoted, and ends the line at a comment. *quote is the quote of the text in triple quotes that goes
 * on in the next line, 0 if none; 0 before the first line.
 */
void python_strip(char *line, char *quote);

/* What stands behind "def" or "async def" of a stripped line without its indent; NULL if it begins no function. */
const char *python_function(const char *text);

/* Is there "self.<PYTHON_MAPPING>(" with nothing that makes another name of it? */
bool python_calls_mapping(const char *line);

#endif
