/* SPDX-License-Identifier: Apache-2.0 */
#include "common/memory.h"
#include "common/text.h"
#include "read_hardware.h"

#include <arpa/inet.h>
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* sscanf() alone would accept blanks and signs. */
static bool has_only(const char *text, const char *characters)
{
    return text[strspn(text, characters)] == '\0';
}

bool parse_pci_address(const char *text, struct pci_address *ret_address)
{
    struct pci_address address;
    int n = 0;

    /* PCI: 5 bits of device and 3 of function. */
    if (!has_only(text, "0123456789abcdefABCDEF:.") || strcspn(text, ":") < 4 ||
        sscanf(text, "%8x:%2x:%2x.%1x%n", &address.domain, &address.bus, &address.device, &address.function, &n) != 4 ||
        text[n] || address.device > 31 || address.function > 7)
        return false;
    *ret_address = address;
    return true;
}

void print_pci_address(const struct pci_address *address, char ret_text[20])
{
    snprintf(ret_text, 20, "%04x:%02x:%02x.%x", address->domain, address->bus & 0xff, address->device & 0x1f,
             address->function & 7);
}

static uint64_t place_of(const struct pci_address *address)
{
    return (uint64_t)address->domain << 32 | address->bus << 16 | address->device << 8 | address->function;
}

int compare_pci_addresses(const struct pci_address *a, const struct pci_address *b)
{
    return (place_of(a) > place_of(b)) - (place_of(a) < place_of(b));
}

bool parse_host_bridge(const char *text, struct pci_address *ret_address)
{
    struct pci_address address = {0};
    int n = 0;

    if (!has_only(text, "pci0123456789abcdef:") ||
        sscanf(text, "pci%8x:%2x%n", &address.domain, &address.bus, &n) != 2 || text[n])
        return false;
    *ret_address = address;
    return true;
}

/* A decimal number of at most 6 digits before the point, followed by the unit; otherwise 0. */
static double parse_with_unit(const char *text, const char *unit)
{
    size_t n = strspn(text, "0123456789.");

    return strspn(text, "0123456789") <= 6 && strncmp(text + n, unit, strlen(unit)) == 0 ? strtod(text, NULL) : 0;
}

double parse_rate(const char *text)
{
    return parse_with_unit(text, " Gb/sec");
}

double parse_speed(const char *text)
{
    return parse_with_unit(text, " GT/s");
}

bool parse_gid(const char *text, uint8_t ret_bytes[16])
{
    return strlen(text) == 39 && inet_pton(AF_INET6, text, ret_bytes) == 1;
}

enum topo_gid_type parse_gid_type(const char *text, enum topo_link_layer link_layer)
{
    if (strcmp(text, "RoCE v2") == 0)
        return TOPO_GID_ROCE2;
    if (strcmp(text, "IB/RoCE v1") != 0)
        return TOPO_GID_UNKNOWN;
    if (link_layer == TOPO_LINK_UNKNOWN)
        return TOPO_GID_UNKNOWN;
    return link_layer == TOPO_LINK_ETHERNET ? TOPO_GID_ROCE1 : TOPO_GID_IB;
}

enum topo_gid_kind gid_kind(const uint8_t bytes[16])
{
    /* RFC 4291: IPv4-mapped addresses are ::ffff:a.b.c.d, link-local ones fe80::/10. */
    static const uint8_t mapped[12] = {[10] = 0xff, [11] = 0xff};

    if (memcmp(bytes, mapped, sizeof(mapped)) == 0)
        return TOPO_GID_IPV4;
    return bytes[0] == 0xfe && (bytes[1] & 0xc0) == 0x80 ? TOPO_GID_LINK_LOCAL : TOPO_GID_OTHER;
}

const char *parse_state(const char *text, const char *const *words)
{
    text += strspn(text, "0123456789");
    text += *text == ':' ? 1 + strspn(text + 1, " ") : 0;
    return text_is_any(text, words) ? text : "";
}

/* A number; NULL without one. */
static const char *read_cpu(const char *text, long *ret_value)
{
    char *end;

    *ret_value = strtol(text, &end, 10);
    return isdigit((unsigned char)*text) ? end : NULL;
}

static void set_bits(uint64_t *mask, long first, long last, int bits)
{
    if (last >= bits)
        last = bits - 1;
    for (long i = first; i <= last; i++)
        mask[i / 64] |= UINT64_C(1) << (i % 64);
}

bool topo_parse_cpus(const char *text, uint64_t *ret_mask, int bits)
{
    size_t words = ((size_t)bits + 63) / 64;
    uint64_t *mask = memory_new(words, sizeof(*mask));
    bool is_list = true;

    /* An empty list is valid: a NUMA node without processors has one. */
    while (is_list && *text && *text != '\n') {
        long first = 0, last;

        text = read_cpu(text, &first);
        last = first;
        if (text && *text == '-')
            text = read_cpu(text + 1, &last);
        is_list = text && last >= first && (*text == ',' ? text[1] != '\0' : *text == '\0' || *text == '\n');
        if (!is_list)
            break;
        set_bits(mask, first, last, bits);
        text += *text == ',';
    }
    if (is_list)
        memcpy(ret_mask, mask, words * sizeof(*mask));
    free(mask);
    return is_list;
}
