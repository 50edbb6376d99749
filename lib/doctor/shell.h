/* SPDX-License-Identifier: Apache-2.0 */
/* shell.h - words for commands that people paste: names of files come from a machine that may mean harm. */
#ifndef EP_DOCTOR_SHELL_H
#define EP_DOCTOR_SHELL_H

#include "root/root.h"

/* `text` as one word of a shell command: as it is if it is plain, else in single quotes. */
const char *shell_word(struct root *root, const char *text);

#endif
