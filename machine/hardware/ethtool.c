/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ethtool.c - the statistics of the driver of an interface, as "ethtool -S" shows them: events at the port and for each
 * priority. They are read by ioctl, as sysfs does not have them; only the names that counters.c lists are used.
 */
#include "counters.h"

#include <linux/ethtool.h>
#include <linux/sockios.h>
#include <net/if.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#define STATISTICS_MAX 16384 /* mlx5 has some thousands with many queues */

static bool ethtool_request(int fd, const char *interface, void *data)
{
    struct ifreq request = {.ifr_data = data};

    snprintf(request.ifr_name, sizeof(request.ifr_name), "%s", interface);
    return ioctl(fd, SIOCETHTOOL, &request) == 0;
}

static unsigned ethtool_count(int fd, const char *interface)
{
    union {
        struct ethtool_sset_info info;
        char bytes[sizeof(struct ethtool_sset_info) + sizeof(__u32)];
    } sets = {.info = {.cmd = ETHTOOL_GSSET_INFO, .sset_mask = 1ULL << ETH_SS_STATS}};
    __u32 n = 0;

    if (ethtool_request(fd, interface, &sets) && sets.info.sset_mask)
        memcpy(&n, sets.bytes + sizeof(sets.info), sizeof(n));
    return n <= STATISTICS_MAX ? n : 0;
}

static bool is_wanted(const char *name)
{
    struct counter_rows rows = counter_rows(true);

    for (size_t i = 0; i < rows.n; i++)
        if (strncmp(rows.at[i].file, COUNTER_ETHTOOL, strlen(COUNTER_ETHTOOL)) == 0 &&
            strcmp(rows.at[i].file + strlen(COUNTER_ETHTOOL), name) == 0)
            return true;
    return false;
}

json_t *ethtool_query(void *interface)
{
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    unsigned n = fd >= 0 && strlen(interface) < IFNAMSIZ ? ethtool_count(fd, interface) : 0;
    /* The kernel writes as many as there are by then: a driver may have opened queues meanwhile. */
    size_t room = 2 * (size_t)STATISTICS_MAX;
    struct ethtool_gstrings *names = calloc(1, sizeof(*names) + room * ETH_GSTRING_LEN);
    struct ethtool_stats *values = calloc(1, sizeof(*values) + room * sizeof(__u64));
    json_t *answer = NULL;

    if (names && values) {
        names->cmd = ETHTOOL_GSTRINGS;
        names->string_set = ETH_SS_STATS;
        names->len = values->n_stats = n;
        values->cmd = ETHTOOL_GSTATS;
    }
    if (n > 0 && names && values && ethtool_request(fd, interface, names) && ethtool_request(fd, interface, values))
        answer = json_object();
    for (unsigned i = 0; answer && i < n && i < names->len && i < values->n_stats; i++) {
        char name[ETH_GSTRING_LEN + 1] = "";

        memcpy(name, names->data + (size_t)i * ETH_GSTRING_LEN, ETH_GSTRING_LEN);
        if (is_wanted(name))
            json_object_set_new(answer, name, json_integer((json_int_t)(values->data[i] & INT64_MAX)));
    }
    free(names);
    free(values);
    if (fd >= 0)
        close(fd);
    return answer;
}
