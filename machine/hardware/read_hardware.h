/* SPDX-License-Identifier: Apache-2.0 */
/* read_hardware.h - the steps of topo_read(), one file each, in their order. */
#ifndef EP_MACHINE_HARDWARE_READ_HARDWARE_H
#define EP_MACHINE_HARDWARE_READ_HARDWARE_H

#include "pci_text.h"
#include "topo.h"

#include <jansson.h>

#define PCI_CLASS_NETWORK 0x02 /* upper byte of the class code: PCI Code and ID Assignment Specification */
#define PCI_CLASS_DISPLAY 0x03

/* PCI devices that the topology should contain. */
struct pci_set {
    int n, n_gpus;   /* GPUs among them */
    int n_seen;      /* all devices on the bus */
    const char *why; /* why the list could not be read; "" */
    enum source_state state;
    struct pci_address *addresses; /* TOPO_MAX_PCI */
    bool is_full;
};

/* Creates a set with the GPUs and network controllers of the bus. */
ep_status pci_set_read(struct source *source, struct pci_set *ret_set);
void pci_set_add(struct pci_set *set, const struct pci_address *address);
void pci_set_done(struct pci_set *set);

/* Reads the devices of the set, the bridges above them, and their locations: .pci, .host_bridge_names. */
ep_status pci_read(struct topo *topo, const struct pci_set *set);

/* The last PCI device on a path of sysfs. False without one. */
bool pci_of_path(const char *path, struct pci_address *ret_address);

/* Before pci_read(): adds the PCI devices of the GPUs in the answer of NVML. NULL: no answer. */
void nvml_collect_pci(const json_t *answer, struct pci_set *set);

/* After pci_read(): the switches declared in NCCL's topology file. */
void nccl_topology_read(struct topo *topo);

/* After pci_read(). `answer`: of NVML, or NULL. */
ep_status gpus_read(struct topo *topo, const json_t *answer);

/* Before pci_read(): adds the PCI devices that have RDMA devices. */
void nics_collect_pci(struct source *source, struct pci_set *set);

/* After pci_read() and gpus_read(). */
ep_status nics_read(struct topo *topo);

/* Before nics_classify(): which NICs default routes use (.is_uplink), and which this process may use (.access). */
void nics_find_uplinks(struct topo *topo);
void nics_find_access(struct topo *topo);

/* Classifies the NICs from everything else that is known: .role and .role_why. */
void nics_classify(struct topo *topo);

ep_status numa_read(struct topo *topo);

/* The first line of `text`, printable, in memory of the source. */
const char *topo_copy_line(struct topo *topo, const char *text);

#endif
