/* SPDX-License-Identifier: Apache-2.0 */
/* write.h - writes everything, with as many calls as it takes; why something could not be written. */
#ifndef EP_COMMON_WRITE_H
#define EP_COMMON_WRITE_H

#include <stddef.h>

/* 0, or errno. May be called in a signal handler. The descriptor blocks. */
int write_all(int fd, const void *data, size_t bytes);

/* The reason of a failed write, of a file or by dir.h, by errno. */
const char *write_reason(int error_number);

#endif
