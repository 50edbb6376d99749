/* SPDX-License-Identifier: Apache-2.0 */
/* read.h - the steps of topo_read(), one file each, in their order. */
#ifndef EP_TOPO_READ_H
#define EP_TOPO_READ_H

#include "hardware/parse.h"
#include "hardware/topo.h"

#include <jansson.h>

#define PCI_VENDOR_NVIDIA 0x10de
#define PCI_CLASS_NETWORK 0x02 /* upper byte of the class code: PCI Code and ID Assignment Specification */
#define PCI_CLASS_DISPLAY 0x03

/* PCI devices that the topology is to have. */
struct pci_set {
    int n, n_gpus;   /* of the GPUs among them */
    int n_seen;      /* devices on the bus, wanted or not */
    const char *why; /* the list could not be read; "" */
    enum source_state state;
    struct pci_address *addresses; /* TOPO_MAX_PCI */
    bool is_full;
};

/* An empty set that has the GPUs and network controllers of the bus. */
ep_status pci_set_read(struct source *source, struct pci_set *ret_set);
void pci_set_add(struct pci_set *set, const struct pci_address *address);
void pci_set_done(struct pci_set *set);

/* The devices of the set, the bridges above them, and where they are: .pci, .host_bridge_names. */
ep_status pci_read(struct topo *topo, const struct pci_set *set);

/* The PCI device that a path of sysfs leads to or through; the last one on it. False when there is none. */
bool pci_of_path(const char *path, struct pci_address *ret_address);

/* Before pci_read(): the PCI devices of GPUs that the answer of NVML has. NULL: no answer. */
void nvml_collect_pci(const json_t *answer, struct pci_set *set);

/* After pci_read(): the switches that a cloud tells NCCL of. */
void nccl_topology_read(struct topo *topo);

/* After pci_read(). `answer`: what NVML said, or NULL. */
ep_status gpus_read(struct topo *topo, const json_t *answer);

/* Before pci_read(): the PCI devices that have RDMA devices. */
void nics_collect_pci(struct source *source, struct pci_set *set);

/* After pci_read() and gpus_read(). */
ep_status nics_read(struct topo *topo);

/* Before nics_classify(): which NICs default routes go over (.is_uplink), and which this process may use (.access). */
void nics_find_uplinks(struct topo *topo);
void nics_find_access(struct topo *topo);

/* What each NIC is for, from everything else that is known: .role and .role_why. */
void nics_classify(struct topo *topo);

ep_status numa_read(struct topo *topo);

/* `text` printable and cut to a line, kept as long as the source. */
const char *topo_copy_line(struct topo *topo, const char *text);

#endif
