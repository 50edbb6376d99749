/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Any bytes as the small texts of sysfs: what is read lies within its limits, and an address that is read can be
 * written and read again.
 */
#include "machine/hardware/read_hardware.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(bool holds)
{
    if (!holds)
        abort();
}

static void check_address(const char *text)
{
    struct pci_address address, again;
    char written[20];

    if (!parse_pci_address(text, &address))
        return;
    check(address.bus <= 255 && address.device <= 31 && address.function <= 7);
    print_pci_address(&address, written);
    check(parse_pci_address(written, &again) && compare_pci_addresses(&address, &again) == 0);
}

static void check_cpus(const char *text)
{
    uint64_t mask[3] = {7, 7, 7};

    if (!topo_parse_cpus(text, mask, 100))
        check(mask[0] == 7 && mask[1] == 7);
    else
        check(mask[1] >> 36 == 0);
    check(mask[2] == 7);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *text = malloc(size + 1);
    struct pci_address address;
    uint8_t gid[16];
    double rate;

    if (!text)
        return 0;
    memcpy(text, data, size);
    text[size] = '\0';
    check_address(text);
    check_cpus(text);
    rate = parse_rate(text);
    check(rate >= 0 && rate < 1e6);
    rate = parse_speed(text);
    check(rate >= 0 && rate < 1e6);
    if (parse_host_bridge(text, &address))
        check(address.bus <= 255 && address.device == 0);
    if (parse_gid(text, gid))
        check(gid_kind(gid) <= TOPO_GID_OTHER);
    check(parse_gid_type(text, TOPO_LINK_ETHERNET) != TOPO_GID_IB);
    check(strlen(parse_state(text, (const char *const[]){"ACTIVE", NULL})) < 32);
    free(text);
    return 0;
}
