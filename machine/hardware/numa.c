/* SPDX-License-Identifier: Apache-2.0 */
/* numa.c - NUMA nodes. */
#include "base/error.h"
#include "read_hardware.h"

#include <stdio.h>
#include <string.h>

/* "Node 0 MemTotal:  1056317528 kB" among other lines. */
static int64_t parse_memory(const char *text)
{
    const char *total = strstr(text, "MemTotal:");
    long long kilobytes;

    if (!total || sscanf(total, "MemTotal: %12lld kB", &kilobytes) != 1 || kilobytes < 0)
        return -1;
    return (int64_t)kilobytes * 1024;
}

/* "node12": 12; -1 if it is not a node. */
static int node_number(const char *name)
{
    int n = 0;

    if (strncmp(name, "node", 4) != 0 || !name[4] || strlen(name) > 8)
        return -1;
    for (name += 4; *name >= '0' && *name <= '9'; name++)
        n = n * 10 + (*name - '0');
    return *name ? -1 : n;
}

ep_status numa_read(struct topo *topo)
{
    struct source_names names = source_list(topo->source, "/sys/devices/system/node");

    topo->numa = source_alloc(topo->source, TOPO_MAX_NUMA * sizeof(*topo->numa));
    if (!topo->numa)
        return ep_fail(EP_E_MEMORY, "no memory for a list of NUMA nodes");
    for (size_t i = 0; i < names.n; i++) {
        struct topo_numa node = {.number = node_number(names.names[i])};

        if (node.number < 0)
            continue;
        if (topo->n_numa == TOPO_MAX_NUMA) {
            topo->cut = true;
            break;
        }
        node.cpus = source_line(topo->source, "/sys/devices/system/node/node%d/cpulist", node.number).text;
        node.memory_bytes =
            parse_memory(source_read(topo->source, "/sys/devices/system/node/node%d/meminfo", node.number).text);
        topo->numa[topo->n_numa++] = node;
    }
    return EP_OK;
}
