/* SPDX-License-Identifier: Apache-2.0 */
/* free_port.h - a TCP port of the loopback that nothing uses now, for a rank 0 that listens a moment later. */
#ifndef EP_TESTS_UNIT_FREE_PORT_H
#define EP_TESTS_UNIT_FREE_PORT_H

#include "unit.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

static inline int find_port(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t bytes = sizeof(address);
    int fd = socket(AF_INET, SOCK_STREAM, 0);

    assert_true(fd >= 0 && bind(fd, (struct sockaddr *)&address, bytes) == 0 &&
                getsockname(fd, (struct sockaddr *)&address, &bytes) == 0);
    close(fd);
    return ntohs(address.sin_port);
}

#endif
