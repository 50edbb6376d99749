/* SPDX-License-Identifier: Apache-2.0 */
/* builtin.h - the recipes of the tree, and the shell code that scripts begin with, compiled in. */
#ifndef EP_INSTALL_BUILTIN_H
#define EP_INSTALL_BUILTIN_H

#include "common/embedded.h"

extern const struct embedded builtin_recipes[];
extern const struct embedded builtin_shell[]; /* prelude.sh */

#endif
