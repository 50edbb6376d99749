/* SPDX-License-Identifier: Apache-2.0 */
/* log.h - lines for the function of ep_set_log(). Leaves ep_last_error() as it is. */
#ifndef EP_BASE_LOG_H
#define EP_BASE_LOG_H

#include "base/error.h"

/* printf-like; one line without its end. Nothing happens, and nothing is formatted, where there is no log callback. */
EP_PRIVATE_API void ep_log(ep_log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
