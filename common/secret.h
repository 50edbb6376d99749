/* SPDX-License-Identifier: Apache-2.0 */
/* secret.h - environment variables and addresses that contain secrets, which reports and snapshots must not show. */
#ifndef EP_COMMON_SECRET_H
#define EP_COMMON_SECRET_H

#include <stdbool.h>

/* Does the name of an environment variable, in any case, say that its value is a secret? */
bool secret_is_name(const char *name);

/* Is there a password in an address, "scheme://user:password@host"? */
bool secret_is_in_address(const char *value);

#endif
