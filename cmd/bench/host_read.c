/* SPDX-License-Identifier: Apache-2.0 */
/* host_read.c - the parts of a machine's description that come from files and the driver. */
#include "host.h"
#include "machine/hardware/topo.h"

#include <string.h>

/* The value after `key` in the first line that begins with it, without quotes; null if there is none. */
static json_t *value_of_key(const char *text, const char *key)
{
    size_t n = strlen(key);
    const char *line = text;

    while (line && strncmp(line, key, n) != 0) {
        line = strchr(line, '\n');
        line = line ? line + 1 : NULL;
    }
    if (!line)
        return json_null();
    line += n;
    line += strspn(line, " \t:=\"");
    n = strcspn(line, "\"\n");
    return n ? json_stringn(line, n) : json_null();
}

static json_t *describe_gpus(const struct topo *topo)
{
    json_t *gpus = json_array();

    for (int i = 0; i < topo->n_gpus; i++) {
        const struct topo_gpu *gpu = &topo->gpus[i];
        const struct topo_pci *pci = &topo->pci[gpu->pci];
        json_t *name =
            *gpu->name ? json_string(gpu->name) : json_sprintf("NVIDIA device %04x (no driver)", pci->device);

        json_array_append_new(gpus, json_pack("{s:o, s:s}", "name", name, "pci", pci->address));
    }
    return gpus;
}

void machine_read(struct source *source, json_t *machine)
{
    struct topo *topo;

    json_object_set_new(machine, "cpu",
                        value_of_key(source_lines(source, "model name", "/proc/cpuinfo").text, "model name"));
    json_object_set_new(machine, "os", value_of_key(source_read(source, "/etc/os-release").text, "PRETTY_NAME"));
    if (topo_read(source, &topo) != EP_OK)
        return;
    /* A kernel without NUMA lists no nodes. */
    json_object_set_new(machine, "numa_nodes", json_integer(topo->n_numa ? topo->n_numa : 1));
    json_object_set_new(machine, "gpus", describe_gpus(topo));
    json_object_set_new(machine, "gpu_driver", *topo->driver ? json_string(topo->driver) : json_null());
    topo_free(topo);
}
