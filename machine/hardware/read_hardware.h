/* SPDX-License-Identifier: Apache-2.0 */
/* read_hardware.h - internal to this folder: the steps of topo_read(), in their order, and maps. */
#ifndef EP_MACHINE_HARDWARE_READ_HARDWARE_H
#define EP_MACHINE_HARDWARE_READ_HARDWARE_H

#include "map.h"
#include "topo.h"

#include <jansson.h>

#define PCI_CLASS_NETWORK 0x02 /* upper byte of the class code: PCI Code and ID Assignment Specification */
#define PCI_CLASS_DISPLAY 0x03

/* --- parsers for the small texts of sysfs (pci_text.c). The input is not trusted --- */

struct pci_address {
    unsigned domain, bus, device, function;
};

/* "0000:0f:00.0" in either case, with a domain of up to 8 digits (NVML writes 8), and nothing else. */
bool parse_pci_address(const char *text, struct pci_address *ret_address);

/* As sysfs writes it: lower case, a domain of at least 4 digits. */
void print_pci_address(const struct pci_address *address, char ret_text[20]);

/* Less than, equal to or greater than 0, as for qsort(). */
int compare_pci_addresses(const struct pci_address *a, const struct pci_address *b);

/* "pci0000:00", the folder of a host bridge. */
bool parse_host_bridge(const char *text, struct pci_address *ret_address);

/* "400 Gb/sec (4X NDR)": Gb/s; 0 if it is not a rate. */
double parse_rate(const char *text);

/* "32.0 GT/s PCIe": 10^9 transfers per second; 0 if it is not a speed ("Unknown"). */
double parse_speed(const char *text);

/* "fe80:0000:...", 8 groups of 4 digits. False otherwise. */
bool parse_gid(const char *text, uint8_t ret_bytes[16]);

/* As gid_attrs/types/<i> says it: "IB/RoCE v1", "RoCE v2". The first is two things, told apart by the link layer. */
enum topo_gid_type parse_gid_type(const char *text, enum topo_link_layer link_layer);

enum topo_gid_kind gid_kind(const uint8_t bytes[16]);

/* The word in "4: ACTIVE" or "5: LinkUp"; "" if it is none of `words`, the kernel's. */
const char *parse_state(const char *text, const char *const *words);

/* --- the steps of topo_read() --- */

/* PCI devices that the topology should contain. */
struct pci_set {
    int n, n_gpus;   /* GPUs among them */
    int n_seen;      /* all devices on the bus */
    const char *why; /* why the list could not be read; "" */
    enum source_state state;
    struct pci_address *addresses; /* TOPO_MAX_PCI, for free() */
    bool is_full;
};

/* Creates a set with the GPUs and network controllers of the bus. */
void pci_set_read(struct source *source, struct pci_set *ret_set);
void pci_set_add(struct pci_set *set, const struct pci_address *address);

/* Reads the devices of the set, the bridges above them, and their locations: .pci, .host_bridge_names. */
void pci_read(struct topo *topo, const struct pci_set *set);

/* The last PCI device on a path of sysfs. False without one. */
bool pci_of_path(const char *path, struct pci_address *ret_address);

/* Before pci_read(): adds the PCI devices of the GPUs in the answer of NVML. NULL: no answer. */
void nvml_collect_pci(const json_t *answer, struct pci_set *set);

/* After pci_read(). `answer`: of NVML, or NULL. */
void gpus_read(struct topo *topo, const json_t *answer);

/* Before pci_read(): adds the PCI devices that have RDMA devices. */
void nics_collect_pci(struct source *source, struct pci_set *set);

/* After pci_read() and gpus_read(). */
void nics_read(struct topo *topo);

/* Before nics_classify(): which NICs default routes use (.is_uplink), and which this process may use (.access). */
void nics_find_uplinks(struct topo *topo);
void nics_find_access(struct topo *topo);

/* Classifies the NICs from everything else that is known: .role and .role_why. */
void nics_classify(struct topo *topo);

void numa_read(struct topo *topo);

/* The first line of `text`, printable, in memory of the source. */
const char *topo_copy_line(struct topo *topo, const char *text);

/* --- shared by the files map*.c --- */

/* Active ports of NICs with role DATA, in the order of (NIC, port). The result is their number. */
int map_data_ports(const struct topo *topo, struct map_port ret_ports[TOPO_MAX_NICS * TOPO_MAX_PORTS]);

/* An assignment in which no GPU has a NIC. */
struct map *map_new(const struct topo *topo);

/* Computes paths, sharers, idle NICs and sums from the NICs and ports of the choices. */
void map_finish(const struct topo *topo, struct map *map);

/* Sets the reason of a choice. printf-like. */
void map_explain(struct map_choice *choice, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
