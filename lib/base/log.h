/* SPDX-License-Identifier: Apache-2.0 */
/* log.h - writes lines to the callback of ep_set_log(). Does not change ep_last_error(). */
#ifndef EP_BASE_LOG_H
#define EP_BASE_LOG_H

#include "base/error.h"

/* printf-like; one line without a newline. Without a log callback it formats nothing. */
EP_PRIVATE_API void ep_log(ep_log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
