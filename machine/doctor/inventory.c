/* SPDX-License-Identifier: Apache-2.0 */
/* inventory.c - the expected hardware of a machine: the file of --expect, and known boards. */
#include "inventory.h"
#include "common/text.h"

#include "base/error.h"
#include "queries.h"

#include "common/clean.h"
#include "common/file.h"

#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define CLASS_SWITCH 0x0680 /* PCI Code and ID Assignment Specification: other bridge, the class of NVSwitches */

/* --- the file of --expect --- */

/* The members of a file: texts of less than `bytes`; without `bytes` numbers. */
static const struct {
    const char *key;
    size_t offset, bytes;
    const char *wrong; /* what one is not */
} members[] = {
    {"gpus", offsetof(struct doctor_inventory, gpus), 0, "is no number from 1 to 128"},
    {"nics", offsetof(struct doctor_inventory, nics), 0, "is no number from 1 to 128"},
    {"gpu", offsetof(struct doctor_inventory, gpu), 128, "is no text of this length"},
    {"driver", offsetof(struct doctor_inventory, driver), 64, "is no text of this length"},
    {"firmware", offsetof(struct doctor_inventory, firmware), 64, "is no text of this length"},
    {"link_layer", offsetof(struct doctor_inventory, link_layer), 0, "is neither \"InfiniBand\" nor \"Ethernet\""},
    {"nic_gbps", offsetof(struct doctor_inventory, nic_gbps), 0, "is no rate in Gb/s"},
};

/* What is wrong with it; NULL if nothing is. */
static const char *read_member(const char *key, const json_t *value, struct doctor_inventory *inventory)
{
    const char *text = json_string_value(value);
    bool is_ethernet = text && (strcasecmp(text, "Ethernet") == 0 || strcasecmp(text, "RoCE") == 0);
    double number = json_number_value(value);
    size_t i = 0;

    while (i < COUNT(members) && strcmp(key, members[i].key) != 0)
        i++;
    if (i == COUNT(members))
        return "is not known; known are gpus, gpu, nics, nic_gbps, link_layer, driver and firmware";
    if (members[i].bytes && text && *text && strlen(text) < members[i].bytes)
        memcpy((char *)inventory + members[i].offset, text, strlen(text) + 1);
    else if (strcmp(key, "link_layer") == 0 && (is_ethernet || (text && strcasecmp(text, "InfiniBand") == 0)))
        inventory->link_layer = is_ethernet ? TOPO_LINK_ETHERNET : TOPO_LINK_INFINIBAND;
    else if (strcmp(key, "nic_gbps") == 0 && number > 0 && number <= 1e6)
        inventory->nic_gbps = number;
    else if (text_ends(key, "s") && json_is_integer(value) && number >= 1 && number <= TOPO_MAX_NICS)
        *(int *)((char *)inventory + members[i].offset) = (int)number;
    else
        return members[i].wrong;
    return NULL;
}

static ep_status read_members(const char *file, json_t *document, struct doctor_inventory *inventory)
{
    const char *key, *wrong;
    json_t *value;
    char shown[128];

    json_object_foreach (document, key, value) {
        wrong = read_member(key, value, inventory);
        if (!wrong)
            continue;
        text_clean(key, shown, sizeof(shown));
        return ep_fail(EP_E_ARG, "--expect: %s: '%s' %s", file, shown, wrong);
    }
    return EP_OK;
}

/* Fills the inventory from a correct machine. */
static void count_machine(const struct topo *topo, struct doctor_inventory *inventory)
{
    inventory->gpus = topo->n_gpus;
    snprintf(inventory->gpu, sizeof(inventory->gpu), "%s", topo->n_gpus ? topo->gpus[0].name : "");
    snprintf(inventory->driver, sizeof(inventory->driver), "%s", topo->driver);
    for (int i = 0; i < topo->n_nics; i++) {
        const struct topo_nic *nic = &topo->nics[i];

        if (!machine_is_data_nic(topo, i))
            continue;
        if (inventory->nics++ == 0)
            snprintf(inventory->firmware, sizeof(inventory->firmware), "%s", nic->firmware);
        for (int p = 0; p < nic->n_ports; p++) {
            if (!nic->ports[p].active)
                continue;
            inventory->link_layer = nic->ports[p].link_layer;
            if (nic->ports[p].rate_gbps > inventory->nic_gbps)
                inventory->nic_gbps = nic->ports[p].rate_gbps;
        }
    }
}

static ep_status read_snapshot(const char *file, struct doctor_inventory *inventory)
{
    struct source *source;
    struct topo *topo = NULL;
    ep_status status = source_open(file, &source);

    if (status != EP_OK)
        return status;
    status = topo_read(source, &topo);
    if (status == EP_OK)
        count_machine(topo, inventory);
    /* Saved on another machine than was meant: everything would be as expected. */
    if (status == EP_OK && !inventory->gpus && !inventory->nics)
        status = ep_fail(EP_E_ARG,
                         "--expect: %s: its machine has neither a GPU nor a data NIC: save one on a healthy node: "
                         "epkit topo --save FILE",
                         file);
    topo_free(topo);
    source_free(source);
    return status;
}

ep_status doctor_expect(struct doctor_machine *machine, const char *file)
{
    FILE *stream = file_open_regular(file);
    struct doctor_inventory *inventory;
    json_t *document;
    json_error_t error;
    ep_status status;

    if (!stream)
        return ep_fail(EP_E_ARG, "--expect: %s: %s", file, errno == EINVAL ? "not a regular file" : file_error(errno));
    file_skip_mark(stream);
    document = json_loadf(stream, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &error);
    fclose(stream);
    if (!document)
        return ep_fail(EP_E_ARG, "--expect: %s: line %d: %s", file, error.line, error.text);
    inventory = calloc(1, sizeof(*inventory));
    if (!json_is_object(document) || json_object_size(document) == 0)
        status = ep_fail(EP_E_ARG, "--expect: %s: not a JSON object with the expected hardware", file);
    else if (!inventory)
        status = ep_fail(EP_E_MEMORY, "--expect: no memory");
    else if (json_object_get(document, "epkit_snapshot"))
        status = read_snapshot(file, inventory);
    else
        status = read_members(file, document, inventory);
    json_decref(document);
    if (status != EP_OK) {
        free(inventory);
        return status;
    }
    inventory->source = source_printf(machine->source, "%s", file);
    free(machine->expected);
    machine->expected = inventory;
    return EP_OK;
}

/* --- boards --- */

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
