/* SPDX-License-Identifier: Apache-2.0 */
#include "topo.h"

#include "nvml.h"
#include "read_hardware.h"

#include "common/text.h"

#include <stdlib.h>
#include <string.h>

const char *topo_copy_line(struct topo *topo, const char *text)
{
    char line[256], clean[256];
    size_t n = strcspn(text, "\n");

    if (n > sizeof(line) - 1)
        n = sizeof(line) - 1;
    memcpy(line, text, n);
    while (n > 0 && strchr(" \t\r", line[n - 1]))
        n--;
    line[n] = '\0';
    text_clean(line, clean, sizeof(clean));
    return source_printf(topo->source, "%s", clean);
}

/*
 * Queries the driver only if there is a GPU or a driver: starting NVML takes time and loads a library. If sysfs is not
 * available (some sandboxes), the driver's folder shows that there is one.
 */
static const json_t *query_driver(struct topo *topo, const struct pci_set *set)
{
    struct source_answer answer;

    topo->nvml_why = "no NVIDIA GPU and no NVIDIA driver on this machine";
    if (set->n_gpus == 0 && source_stat(topo->source, "/proc/driver/nvidia/version").state != SOURCE_OK)
        return NULL;
    answer = source_query(topo->source, NVML_QUERY_NAME, nvml_query, NULL, NVML_DEADLINE_MS);
    topo->nvml_why = "";
    if (answer.state == SOURCE_NOT_RECORDED)
        topo->nvml_why = "the driver was not queried when the snapshot was saved";
    else if (answer.state != SOURCE_OK)
        topo->nvml_why = *answer.why ? answer.why : "the driver gave no answer";
    return answer.state == SOURCE_OK ? answer.value : NULL;
}

/* What was searched, where, and what was found. */
static const char *explain_empty(struct topo *topo, const struct pci_set *set)
{
    struct source_names nics = source_list(topo->source, "/sys/class/infiniband");
    const char *gpus, *rdma;

    if (topo->n_hidden_gpus)
        gpus = source_printf(topo->source, "none of the %d NVIDIA GPUs on the PCI bus is offered to this process",
                             topo->n_hidden_gpus);
    else if (set->state == SOURCE_OK)
        gpus = source_printf(topo->source, "no NVIDIA GPU among %d PCI devices (/sys/bus/pci/devices)", set->n_seen);
    else if (set->state == SOURCE_ABSENT)
        gpus = "no PCI device (/sys/bus/pci/devices is not there)";
    else
        gpus = source_printf(topo->source, "PCI devices could not be read (/sys/bus/pci/devices: %s)",
                             *set->why ? set->why : "not known");
    if (nics.state == SOURCE_OK || nics.state == SOURCE_ABSENT)
        rdma = nics.state == SOURCE_OK ? "no RDMA device (/sys/class/infiniband is empty)"
                                       : "no RDMA device (/sys/class/infiniband is not there)";
    else
        rdma = source_printf(topo->source, "RDMA devices could not be read (/sys/class/infiniband: %s)",
                             *nics.why ? nics.why : "not known");
    return source_printf(
        topo->source, "Neither a GPU nor an RDMA NIC: %s, %s.%s", gpus, rdma,
        source_stat(topo->source, "/dev/dxg").state == SOURCE_OK
            ? " This is WSL 2: its GPUs are those of Windows, by way of /dev/dxg. CUDA programs find them; "
              "NVLinks, PCI places and RDMA cannot be seen or used from here."
        : set->state == SOURCE_ABSENT && source_stat(topo->source, "/dev/nvidiactl").state == SOURCE_OK
            ? " But there is NVIDIA's driver, /dev/nvidiactl: a sandbox (gVisor, or one without /sys) hides where its GPUs "
              "are. epkit sees them on the node, outside of it."
            : "");
}

/* Lists that exist but could not be read: without this note devices would be missing unnoticed. */
static const char *list_unread(struct topo *topo, const struct pci_set *set)
{
    struct source_names nics = source_list(topo->source, "/sys/class/infiniband");
    bool no_pci = set->state == SOURCE_DENIED || set->state == SOURCE_FAILED;
    bool no_nics = nics.state == SOURCE_DENIED || nics.state == SOURCE_FAILED;

    if (!no_pci && !no_nics)
        return "";
    return source_printf(topo->source, "%s%s%s%s%s", no_pci ? "/sys/bus/pci/devices: " : "", no_pci ? set->why : "",
                         no_pci && no_nics ? "; " : "", no_nics ? "/sys/class/infiniband: " : "",
                         no_nics ? nics.why : "");
}

struct topo *topo_read(struct source *source)
{
    struct topo *topo = source_alloc(source, sizeof(*topo));
    struct pci_set set = {0};
    const json_t *answer;

    topo->source = source;
    pci_set_read(source, &set);
    answer = query_driver(topo, &set);
    nvml_collect_pci(answer, &set);
    nics_collect_pci(source, &set);
    pci_read(topo, &set);
    nccl_topology_read(topo);
    gpus_read(topo, answer);
    numa_read(topo);
    nics_read(topo);
    nics_classify(topo);
    topo->not_read = list_unread(topo, &set);
    topo->why_empty = topo->n_gpus + topo->n_nics == 0 ? explain_empty(topo, &set) : "";
    free(set.addresses);
    return topo;
}

static int is_at(const void *address, const void *pci)
{
    struct pci_address found = {0};

    parse_pci_address(((const struct topo_pci *)pci)->address, &found);
    return compare_pci_addresses(address, &found);
}

int topo_find_pci(const struct topo *topo, const char *address)
{
    struct pci_address wanted;
    const struct topo_pci *pci = NULL;

    if (topo->n_pci > 0 && parse_pci_address(address, &wanted))
        pci = bsearch(&wanted, topo->pci, (size_t)topo->n_pci, sizeof(*pci), is_at);
    return pci ? (int)(pci - topo->pci) : -1;
}

const struct topo_port *topo_find_port(const struct topo *topo, int nic, int number)
{
    for (int i = 0; nic >= 0 && i < topo->nics[nic].n_ports; i++)
        if (topo->nics[nic].ports[i].number == number)
            return &topo->nics[nic].ports[i];
    return NULL;
}

int topo_data_ports(const struct topo *topo, const struct topo_port *ret_ports[TOPO_MAX_DATA_PORTS])
{
    int n = 0;

    for (int i = 0; i < topo->n_nics; i++)
        for (int p = 0; p < topo->nics[i].n_ports && topo->nics[i].role == TOPO_ROLE_DATA; p++)
            if (topo->nics[i].ports[p].active) {
                if (ret_ports)
                    ret_ports[n] = &topo->nics[i].ports[p];
                n++;
            }
    return n;
}

bool topo_is_same_model(const struct topo *topo, int a, int b)
{
    const struct topo_pci *pci_a = &topo->pci[topo->nics[a].pci], *pci_b = &topo->pci[topo->nics[b].pci];

    return pci_a->vendor == pci_b->vendor && pci_a->device == pci_b->device;
}

int topo_find_nic(const struct topo *topo, const char *name)
{
    for (int i = 0; i < topo->n_nics; i++)
        if (strcmp(topo->nics[i].name, name) == 0)
            return i;
    return -1;
}

int topo_find_gpu_uuid(const struct topo *topo, const char *uuid)
{
    int found = -1;

    /* A prefix has to name one GPU alone; "GPU-" with nothing behind it names none. */
    if (strncmp(uuid, "GPU-", 4) != 0 || !uuid[4])
        return -1;
    for (int i = 0; i < topo->n_gpus; i++)
        if (strncmp(topo->gpus[i].uuid, uuid, strlen(uuid)) == 0) {
            if (found >= 0)
                return -1;
            found = i;
        }
    return found;
}
