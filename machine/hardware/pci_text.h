/* SPDX-License-Identifier: Apache-2.0 */
/* pci_text.h - parsers for the small texts of sysfs: addresses, rates, speeds, GIDs. The input is not trusted. */
#ifndef EP_MACHINE_HARDWARE_PCI_TEXT_H
#define EP_MACHINE_HARDWARE_PCI_TEXT_H

#include "topo.h"

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

/* "4: ACTIVE", "5: LinkUp". */
enum topo_port_state parse_port_state(const char *text);
enum topo_phys_state parse_phys_state(const char *text);

#endif
