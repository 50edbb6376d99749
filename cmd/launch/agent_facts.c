/* SPDX-License-Identifier: Apache-2.0 */
/* agent_facts.c - the facts about a node that the launcher needs. */
#include "agent_internal.h"

#include <epkit/types.h>

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <unistd.h>

#define GPUS_DIR "/proc/driver/nvidia/gpus"
#define RDMA_DIR "/sys/class/infiniband"

/* The first line of a file, or the text after `key` in the line that begins with it. */
static bool read_line(const char *path, const char *key, char *ret_text, size_t bytes)
{
    FILE *stream = fopen(path, "re");
    char line[256];
    bool is_found = false;

    while (stream && !is_found && fgets(line, sizeof(line), stream)) {
        const char *text = line + strlen(key);

        if (strncmp(line, key, strlen(key)) != 0)
            continue;
        text += strspn(text, " \t");
        snprintf(ret_text, bytes, "%.*s", (int)strcspn(text, "\r\n"), text);
        is_found = true;
    }
    if (stream)
        fclose(stream);
    return is_found;
}

static int count_gpus(char *ret_name, size_t bytes)
{
    DIR *folder = opendir(GPUS_DIR);
    struct dirent *item;
    char path[512];
    int n = 0;

    while (folder && (item = readdir(folder))) {
        if (item->d_name[0] == '.')
            continue;
        snprintf(path, sizeof(path), GPUS_DIR "/%s/information", item->d_name);
        n += read_line(path, "Model:", ret_name, bytes);
    }
    if (folder)
        closedir(folder);
    return n;
}

/*
 * Identifies the network namespace of a running kernel: equal for two names of one host, different for two containers.
 * "": unknown.
 */
static void read_machine(char *ret_text, size_t bytes)
{
    char boot[64] = "", net[64];
    ssize_t n = readlink("/proc/self/ns/net", net, sizeof(net) - 1);

    *ret_text = '\0';
    if (n > 0 && read_line("/proc/sys/kernel/random/boot_id", "", boot, sizeof(boot)))
        snprintf(ret_text, bytes, "%s %.*s", boot, (int)n, net);
}

json_t *agent_facts(void)
{
    char host[256] = "", gpu[128] = "", driver[64] = "", machine[160];
    struct utsname system = {.release = ""};
    int gpus = count_gpus(gpu, sizeof(gpu));

    gethostname(host, sizeof(host) - 1);
    uname(&system);
    read_line("/sys/module/nvidia/version", "", driver, sizeof(driver));
    read_machine(machine, sizeof(machine));
    return json_pack("{s:i, s:s, s:s, s:s, s:s?, s:s?, s:i, s:s}", "protocol", AGENT_PROTOCOL, "epkit", ep_version(),
                     "host", host, "kernel", system.release, "driver", *driver ? driver : NULL, "gpu",
                     *gpu ? gpu : NULL, "gpus", gpus, "machine", machine);
}

/* A data counter, in bytes: the IB specification counts 4-byte words, EFA in its driver bytes. */
static bool read_counter(const char *device, int port, const char *name, const char *of_driver, json_int_t *ret_bytes)
{
    char path[512], text[32];
    unsigned scale = 4;

    snprintf(path, sizeof(path), RDMA_DIR "/%s/ports/%d/counters/%s", device, port, name);
    if (!read_line(path, "", text, sizeof(text))) {
        snprintf(path, sizeof(path), RDMA_DIR "/%s/ports/%d/hw_counters/%s", device, port, of_driver);
        if (!read_line(path, "", text, sizeof(text)))
            return false;
        scale = 1;
    }
    *ret_bytes = (json_int_t)(strtoull(text, NULL, 10) * scale);
    return true;
}

json_t *agent_nics(void)
{
    DIR *folder = opendir(RDMA_DIR);
    json_t *list = json_array();
    struct dirent *item;

    while (folder && (item = readdir(folder))) {
        json_int_t sent, received;

        if (item->d_name[0] == '.')
            continue;
        for (int port = 1; read_counter(item->d_name, port, "port_xmit_data", "tx_bytes", &sent) &&
                           read_counter(item->d_name, port, "port_rcv_data", "rx_bytes", &received);
             port++)
            json_array_append_new(list, json_pack("{s:s, s:i, s:I, s:I}", "device", item->d_name, "port", port,
                                                  "tx_bytes", sent, "rx_bytes", received));
    }
    if (folder)
        closedir(folder);
    return list;
}
