/* SPDX-License-Identifier: Apache-2.0 */
/* inventory.c - the number of GPUs of known boards. */
#include "inventory.h"

#include "queries.h"

#include "common/text.h"

#include <string.h>

#define CLASS_SWITCH 0x0680 /* PCI Code and ID Assignment Specification: other bridge, the class of NVSwitches */

/* Product names (SMBIOS, type 1) that imply the number of GPUs: DGX systems; "EC2 Instance Types". */
static const struct {
    const char *product;
    int gpus;
} boards[] = {
    {"DGX-2", 16},        {"DGXA100", 8},          {"DGX A100", 8},      {"DGXH100", 8},     {"DGX H100", 8},
    {"DGXH200", 8},       {"DGX H200", 8},         {"DGXB200", 8},       {"DGX B200", 8},    {"DGXB300", 8},
    {"DGX B300", 8},      {"p4d.24xlarge", 8},     {"p4de.24xlarge", 8}, {"p5.48xlarge", 8}, {"p5e.48xlarge", 8},
    {"p5en.48xlarge", 8}, {"p6-b200.48xlarge", 8},
};

int inventory_nvswitches(const struct doctor_machine *machine)
{
    struct source_names names = source_list(machine->source, "/sys/bus/pci/devices");
    int n = 0;

    for (size_t i = 0; i < names.n; i++) {
        int64_t vendor, class_code;

        if (source_number(machine->source, &vendor, "/sys/bus/pci/devices/%s/vendor", names.names[i]) == SOURCE_OK &&
            vendor == PCI_VENDOR_NVIDIA &&
            source_number(machine->source, &class_code, "/sys/bus/pci/devices/%s/class", names.names[i]) == SOURCE_OK)
            n += class_code >> 8 == CLASS_SWITCH;
    }
    return n;
}

/*
 * GPUs with NVLinks to switches are modules of a board with 4, 8 or 16 of them (data sheets of HGX and of GB200 NVL72,
 * whose trays have 2 or 4). An odd number means that one is missing. 0: not known.
 */
static int modules_due(const struct topo *topo)
{
    static const int sizes[] = {4, 8, 16};
    int n = 0;

    for (int i = 0; i < topo->n_gpus; i++)
        if (topo->gpus[i].nvlinks_switch == 0 || topo->gpus[i].pci < 0)
            return 0;
    /* Includes GPUs of other jobs and of virtual machines; several functions of one GPU count once. */
    for (int p = 0; p < topo->n_pci; p++)
        n += topo->pci[p].vendor == PCI_VENDOR_NVIDIA && topo->pci[p].device == topo->pci[topo->gpus[0].pci].device &&
             (p == 0 || !topo_is_same_card(topo, p - 1, p));
    for (size_t i = 0; n > 2 && i < COUNT(sizes); i++)
        if (n <= sizes[i])
            return sizes[i];
    return 0;
}

int inventory_of_board(const struct doctor_machine *machine, const char **ret_board)
{
    struct source_text product = source_line(machine->source, "/sys/class/dmi/id/product_name");
    int n_switches;

    for (size_t i = 0; product.state == SOURCE_OK && i < COUNT(boards); i++) {
        if (!strstr(product.text, boards[i].product))
            continue;
        *ret_board = source_printf(machine->source, "a %s", boards[i].product);
        return boards[i].gpus;
    }
    /* A hypervisor may pass any number to a guest. */
    if (machine_virtual(machine->source) != MACHINE_BARE_METAL)
        return 0;
    n_switches = inventory_nvswitches(machine);
    /* HGX A100 has six NVSwitches for 8 GPUs, HGX H100 and H200 four, boards with 4 GPUs none (data sheets). */
    if (n_switches != 4 && n_switches != 6) {
        *ret_board = "a board of modules with NVSwitches";
        return modules_due(machine->topo);
    }
    *ret_board = source_printf(machine->source, "an HGX board with %d NVSwitches", n_switches);
    return 8;
}
