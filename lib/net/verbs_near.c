/* SPDX-License-Identifier: Apache-2.0 */
#include "net/verbs_near.h"

#include <ctype.h>
#include <dirent.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ADDRESS_BYTES = 32, VENDOR_NVIDIA = 0x10de, CLASS_DISPLAY = 0x03 };

/*
 * From the component of the host bridge on, "pci0000:00": below /sys/devices, but with Hyper-V deep below its own
 * devices, and with a device tree below the platform's. NULL: the device is not on PCI.
 */
static const char *host_bridge(const char *path)
{
    for (const char *at = strstr(path, "/pci"); at; at = strstr(at + 1, "/pci"))
        if (isxdigit((unsigned char)at[4]) && at[4 + strspn(at + 4, "0123456789abcdef")] == ':')
            return at;
    return NULL;
}

/* Number of the first components that both absolute paths have in common. */
static int count_common(const char *a, const char *b)
{
    int n = 0;

    for (; *a && *a == *b; a++, b++)
        n += *a == '/';
    /* The last one counts if it ends in both. */
    return n - !((!*a || *a == '/') && (!*b || *b == '/'));
}

/* The number in a file of a device, decimal or "0x..."; -1: none, or not known. */
static int read_number(const char *device, const char *name)
{
    char path[PATH_MAX + 16];
    int number = -1;
    FILE *file;

    snprintf(path, sizeof(path), "%s/%s", device, name);
    file = fopen(path, "re");
    if (!file)
        return -1;
    if (fscanf(file, "%i", &number) != 1)
        number = -1;
    fclose(file);
    return number;
}

/* The real path of a device, resolved from a link below `sys`. */
static bool resolve(const char *sys, const char *folder, const char *name, const char *last, char *ret_path)
{
    char path[PATH_MAX];

    return snprintf(path, sizeof(path), "%s/%s/%s%s", sys, folder, name, last) < (int)sizeof(path) &&
           realpath(path, ret_path);
}

/* As sysfs writes a PCI address: in lower case. */
static void to_lower(const char *pci, char ret_address[ADDRESS_BYTES])
{
    memset(ret_address, 0, ADDRESS_BYTES);
    for (size_t i = 0; pci[i] && i < ADDRESS_BYTES - 1; i++)
        ret_address[i] = (char)tolower((unsigned char)pci[i]);
}

int verbs_nearness(const char *sys, const char *rdma_device, const char *pci)
{
    char address[ADDRESS_BYTES], gpu[PATH_MAX], nic[PATH_MAX];
    const char *gpu_bridge, *nic_bridge;
    int common = 0, numa;

    to_lower(pci, address);
    if (!resolve(sys, "bus/pci/devices", address, "", gpu) ||
        !resolve(sys, "class/infiniband", rdma_device, "/device", nic))
        return 0;
    gpu_bridge = host_bridge(gpu);
    nic_bridge = host_bridge(nic);
    if (gpu_bridge && nic_bridge)
        common = count_common(gpu_bridge, nic_bridge);
    if (common > 0)
        return 1 + common;
    numa = read_number(gpu, "numa_node");
    return numa >= 0 && numa == read_number(nic, "numa_node");
}

static bool is_gpu(const char *sys, const char *address)
{
    char device[PATH_MAX];

    return snprintf(device, sizeof(device), "%s/bus/pci/devices/%s", sys, address) < (int)sizeof(device) &&
           read_number(device, "vendor") == VENDOR_NVIDIA && read_number(device, "class") >> 16 == CLASS_DISPLAY;
}

/* Of the device that is nearest. */
static int most_near(const char *sys, const char *const *rdma_devices, int n, const char *pci)
{
    int most = 0;

    for (int i = 0; i < n; i++) {
        int nearness = verbs_nearness(sys, rdma_devices[i], pci);

        most = nearness > most ? nearness : most;
    }
    return most;
}

int verbs_gpu_index(const char *sys, const char *const *rdma_devices, int n, const char *pci)
{
    int nearness = most_near(sys, rdma_devices, n, pci), before = 0;
    char address[ADDRESS_BYTES], path[PATH_MAX];
    const struct dirent *entry;
    DIR *devices = NULL;

    to_lower(pci, address);
    if (is_gpu(sys, address) && snprintf(path, sizeof(path), "%s/bus/pci/devices", sys) < (int)sizeof(path))
        devices = opendir(path);
    if (!devices)
        return -1;
    while ((entry = readdir(devices)))
        before += strcmp(entry->d_name, address) < 0 && is_gpu(sys, entry->d_name) &&
                  most_near(sys, rdma_devices, n, entry->d_name) == nearness;
    closedir(devices);
    return before;
}
