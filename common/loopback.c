/* SPDX-License-Identifier: Apache-2.0 */
#include "loopback.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <string.h>
#include <strings.h>

bool address_is_loopback(const char *name)
{
    /* The names in /etc/hosts of the distributions. */
    static const char *const names[] = {"localhost",
                                        "localhost.",
                                        "localhost.localdomain",
                                        "localhost.localdomain4",
                                        "localhost.localdomain6",
                                        "localhost4",
                                        "localhost4.localdomain4",
                                        "localhost6",
                                        "localhost6.localdomain6",
                                        "ip6-localhost",
                                        "ip6-loopback"};
    struct in6_addr six;
    struct in_addr four;

    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        if (strcasecmp(name, names[i]) == 0)
            return true;
    /* As getaddrinfo() reads it, which also accepts "127.1". */
    if (inet_aton(name, &four))
        return ntohl(four.s_addr) >> 24 == 127;
    if (inet_pton(AF_INET6, name, &six) != 1)
        return false;
    return IN6_IS_ADDR_LOOPBACK(&six) || (IN6_IS_ADDR_V4MAPPED(&six) && six.s6_addr[12] == 127);
}
