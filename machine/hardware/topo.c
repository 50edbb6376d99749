/* SPDX-License-Identifier: Apache-2.0 */
#include "topo.h"

#include "nvml.h"
#include "read_hardware.h"

#include "common/json.h"
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

/* --- PCIe switches that a hypervisor hides, from the topology file that its cloud provides for NCCL --- */

/*
 * Azure and others show each GPU and each NIC on a bus of its own, and declare in an XML file which of them share a
 * switch of the host: NCCL_TOPO_FILE, or NCCL's default file (NCCL user guide, "NCCL_TOPO_FILE"). NCCL trusts this
 * file; so does the assignment. Only switches are read from it, and only if the file is complete.
 */

#define DEFAULT_FILE "/var/run/nvidia-topologyd/virtualTopology.xml"
#define MAX_DEPTH 32
#define ADDRESS_BYTES 32

/* The value of an attribute of the tag at `tag`, of `n` bytes; NULL without one. */
static const char *xml_attribute(const char *tag, size_t n, const char *name, size_t *ret_n)
{
    const char *at = memmem(tag, n, name, strlen(name)), *end;

    if (!at)
        return NULL;
    at += strlen(name);
    end = memchr(at, '"', n - (size_t)(at - tag));
    *ret_n = end ? (size_t)(end - at) : 0;
    return end ? at : NULL;
}

/* The elements around an element: the number of a switch, 0 for any other. */
struct nesting {
    int n, n_switches;
    int above[MAX_DEPTH];
};

/* A tag <pci ...>: records the switch above a device, and opens a level. False: the file is invalid. */
static bool read_device(struct nesting *nesting, const char *tag, size_t n, json_t *devices)
{
    size_t n_class = 0, n_address = 0;
    const char *class = xml_attribute(tag, n, " class=\"", &n_class),
               *address = xml_attribute(tag, n, " busid=\"", &n_address);
    bool is_bridge = class && n_class >= 6 && strncmp(class, "0x0604", 6) == 0, is_leaf = n > 0 && tag[n - 1] == '/';

    if (!address || n_address >= ADDRESS_BYTES || (!is_leaf && nesting->n == MAX_DEPTH) ||
        json_array_size(devices) >= TOPO_MAX_GPUS + TOPO_MAX_NICS)
        return false;
    if (!is_bridge && nesting->n > 0 && nesting->above[nesting->n - 1])
        json_array_append_new(devices,
                              json_pack("[o, i]", json_stringn(address, n_address), nesting->above[nesting->n - 1]));
    if (!is_leaf)
        nesting->above[nesting->n++] = is_bridge ? ++nesting->n_switches : 0;
    return true;
}

/* [["0001:00:00.0", 1], ...]: devices, and the number of the switch above each. Empty in another format. */
static json_t *read_switches(struct source_text file)
{
    json_t *devices = json_array();
    struct nesting nesting = {.n = 0};
    bool is_whole = strstr(file.text, "</system>") != NULL;

    for (const char *tag = strchr(file.text, '<'); tag && is_whole; tag = strchr(tag, '<')) {
        size_t n = strcspn(++tag, ">");

        if (strncmp(tag, "!--", 3) == 0)
            tag = strstr(tag, "-->") ? strstr(tag, "-->") : tag + strlen(tag);
        else if (strncmp(tag, "/pci", 4) == 0)
            is_whole = nesting.n-- > 0;
        else if (strncmp(tag, "pci ", 4) == 0)
            is_whole = read_device(&nesting, tag, n, devices);
    }
    if (!is_whole || nesting.n != 0)
        json_array_clear(devices);
    return devices;
}

/* A file for only some of the GPUs belongs to another machine: NICs near to these would become the rails of all. */
static bool knows_all_gpus(const struct topo *topo)
{
    return !ANY_OF(i, topo->n_pci,
                   topo->pci[i].vendor == PCI_VENDOR_NVIDIA && topo->pci[i].class_code >> 16 == PCI_CLASS_DISPLAY &&
                       !topo->pci[i].declared_switch);
}

static void read_nccl_topology(struct topo *topo)
{
    const char *file = source_env(topo->source, "NCCL_TOPO_FILE");
    const json_t *devices;

    topo->topology_file = "";
    file = file && *file ? file : DEFAULT_FILE;
    devices = source_fact(topo->source, "nccl-switches", read_switches, "%s", file).value;
    FOR_JSON (device, devices) {
        json_int_t number = json_integer_value(json_array_get(device, 1));
        int pci = topo_find_pci(topo, json_text_at(device, 0));

        if (pci < 0 || number <= 0 || number > TOPO_MAX_PCI)
            continue;
        topo->pci[pci].declared_switch = (int)number;
        topo->topology_file = source_printf(topo->source, "%s", file);
    }
    if (!*topo->topology_file || knows_all_gpus(topo))
        return;
    topo->topology_file = "";
    for (int p = 0; p < topo->n_pci; p++)
        topo->pci[p].declared_switch = 0;
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
    read_nccl_topology(topo);
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
    return FIRST_OF(i, topo->n_nics, strcmp(topo->nics[i].name, name) == 0);
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
