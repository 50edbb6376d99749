/* SPDX-License-Identifier: Apache-2.0 */
/* expected.c - a summary of the inspected hardware: "8 x H200, 8 x 400 Gb/s RoCE". */
#include "common/text.h"
#include "diagnosis.h"

#include <stdio.h>
#include <string.h>

#define KINDS_MAX 8
#define AMAZON 0x1d0f

struct kind {
    char name[96];
    int n;
};

static void count_kind(struct kind *kinds, int *n_kinds, const char *name)
{
    int i = 0;

    while (i < *n_kinds && strcmp(kinds[i].name, name) != 0)
        i++;
    if (i == KINDS_MAX)
        return;
    if (i == *n_kinds) {
        snprintf(kinds[i].name, sizeof(kinds[i].name), "%s", name);
        kinds[i].n = 0;
        ++*n_kinds;
    }
    kinds[i].n++;
}

/* "H100" of "NVIDIA H100 80GB HBM3", "A100" of "NVIDIA A100-SXM4-80GB": without vendor, memory and form factor. */
static void short_name(const char *name, char *ret_text, size_t bytes)
{
    static const char *const ends[] = {"-SXM", " SXM", "-PCIE", " PCIe", " HBM"};
    char *end;
    size_t n;

    if (strncmp(name, "NVIDIA ", 7) == 0)
        name += 7;
    snprintf(ret_text, bytes, "%s", *name ? name : "GPU");
    for (size_t i = 0; i < COUNT(ends); i++)
        if ((end = strstr(ret_text, ends[i])))
            *end = '\0';
    n = strlen(ret_text);
    if (n > 2 && strcmp(ret_text + n - 2, "GB") == 0 && (end = strrchr(ret_text, ' ')))
        *end = '\0';
}

static const char *network_name(const struct topo *topo, const struct topo_nic *nic, const struct topo_port *port)
{
    if (port->link_layer == TOPO_LINK_INFINIBAND)
        return "InfiniBand";
    if (port->link_layer == TOPO_LINK_ETHERNET)
        return "RoCE";
    return nic->pci >= 0 && topo->pci[nic->pci].vendor == AMAZON ? "EFA" : "RDMA";
}

static void count_ports(const struct topo *topo, struct kind *kinds, int *n_kinds)
{
    for (int i = 0; i < topo->n_nics; i++) {
        const struct topo_nic *nic = &topo->nics[i];
        const char *access = nic->access == TOPO_ACCESS_NO ? " (not accessible)" : "";
        char name[96];

        for (int p = 0; p < nic->n_ports && nic->role == TOPO_ROLE_DATA; p++) {
            if (!nic->ports[p].active)
                continue;
            if (nic->ports[p].rate_gbps > 0)
                snprintf(name, sizeof(name), "%g Gb/s %s%s", nic->ports[p].rate_gbps,
                         network_name(topo, nic, &nic->ports[p]), access);
            else
                snprintf(name, sizeof(name), "%s%s", network_name(topo, nic, &nic->ports[p]), access);
            count_kind(kinds, n_kinds, name);
        }
    }
}

void diagnosis_inventory(const struct topo *topo, char *ret_text, size_t bytes)
{
    struct kind kinds[KINDS_MAX];
    int n_kinds = 0;
    size_t used = 0;

    *ret_text = '\0';
    for (int i = 0; i < topo->n_gpus; i++) {
        char name[96];

        short_name(topo->gpus[i].name, name, sizeof(name));
        count_kind(kinds, &n_kinds, name);
    }
    count_ports(topo, kinds, &n_kinds);
    for (int i = 0; i < n_kinds && used < bytes; i++)
        used += (size_t)snprintf(ret_text + used, bytes - used, "%d x %s, ", kinds[i].n, kinds[i].name);
}
