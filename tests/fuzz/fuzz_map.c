/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Any bytes as a map in the environment, and as a list of HCAs: what is accepted stays within the machine, what is
 * refused has a reason that can be printed.
 */
#include "../unit/map_machine.h"
#include "machine/hardware/map.h"

#include <stdio.h>

enum { MOST_BYTES = 4096 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static struct machine machine;

static void make_machine(void)
{
    static const char *const names[] = {"mlx5_0", "mlx5_1", "mlx5_10", "rocep5s0"};

    machine_init(&machine);
    for (int i = 0; i < 4; i++) {
        int at = machine_switch(&machine, i / 2, i / 2);

        machine_gpu(&machine, at, i / 2, i / 2);
        machine_nic(&machine, names[i], 1 + i % 2, at, i / 2, i / 2);
    }
}

static void check_map(struct map *map)
{
    int users = 0;

    if (map->n != machine.topo.n_gpus)
        abort();
    for (int i = 0; i < map->n; i++) {
        const struct map_choice *choice = &map->choices[i];

        if (choice->nic >= machine.topo.n_nics || choice->nic < -1 || (choice->nic >= 0) != (choice->port >= 1))
            abort();
        if (choice->nic >= 0 && choice->port > machine.nics[choice->nic].n_ports)
            abort();
        if (!*choice->why)
            abort();
        users += choice->sharers > 0;
    }
    if (users > map->n || map->n_idle > machine.topo.n_nics)
        abort();
    map_free(map);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct map_nvshmem how = {.hca_prefix = ""};
    char text[MOST_BYTES + 1];
    struct map *map;

    if (size > MOST_BYTES)
        return 0;
    if (machine.topo.n_gpus == 0)
        make_machine();
    memcpy(text, data, size);
    text[size] = '\0';
    if (map_parse(&machine.topo, text, &map) == EP_OK) {
        check_map(map);
    } else {
        for (const char *at = ep_last_error(); *at; at++)
            if ((unsigned char)*at < 0x20)
                abort();
    }
    how.hca_list = text;
    for (int i = 0; i < 2; i++) {
        how.pe_mapping = i;
        map = map_nvshmem(&machine.topo, &how);
        check_map(map);
    }
    return 0;
}
