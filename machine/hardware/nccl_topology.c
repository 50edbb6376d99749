/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nccl_topology.c - PCIe switches that a hypervisor hides, from the topology file that its cloud provides for NCCL.
 *
 * Azure and others show each GPU and each NIC on a bus of its own, and declare in an XML file which of them share a
 * switch of the host: NCCL_TOPO_FILE, or NCCL's default file (NCCL user guide, "NCCL_TOPO_FILE"). NCCL trusts this
 * file; so does the assignment. Only switches are read from it, and only if the file is complete.
 */
#include "read_hardware.h"

#include <string.h>

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
    for (int i = 0; i < topo->n_pci; i++)
        if (topo->pci[i].vendor == PCI_VENDOR_NVIDIA && topo->pci[i].class_code >> 16 == PCI_CLASS_DISPLAY &&
            !topo->pci[i].declared_switch)
            return false;
    return true;
}

void nccl_topology_read(struct topo *topo)
{
    const char *file = source_env(topo->source, "NCCL_TOPO_FILE");
    const json_t *device, *devices;
    size_t i;

    topo->topology_file = "";
    file = file && *file ? file : DEFAULT_FILE;
    devices = source_fact(topo->source, "nccl-switches", read_switches, "%s", file).value;
    json_array_foreach (devices, i, device) {
        const char *address = json_string_value(json_array_get(device, 0));
        json_int_t number = json_integer_value(json_array_get(device, 1));
        int pci = address ? topo_find_pci(topo, address) : -1;

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
