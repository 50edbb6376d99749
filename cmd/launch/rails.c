/* SPDX-License-Identifier: Apache-2.0 */
#include "agent.h"

#include "base/error.h"
#include "common/cmd.h"
#include "common/text.h"
#include "machine/hardware/map.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LIST_BYTES 4096

/* Adds a port that is not in the list yet. */
static void add(const struct topo *topo, int nic, int port, struct text *list)
{
    char entry[128], spaced[LIST_BYTES + 2];

    snprintf(entry, sizeof(entry), " %s:%d ", topo->nics[nic].name, port);
    snprintf(spaced, sizeof(spaced), " %s ", list->bytes);
    if (!strstr(spaced, entry))
        text_add(list, "%s%s:%d", list->n ? " " : "", topo->nics[nic].name, port);
}

/* The ports of GPUs; without GPUs those that carry data. */
static void list_ports(const struct topo *topo, const struct map *map, struct text *list)
{
    for (int gpu = 0; gpu < map->n; gpu++) {
        const struct map_choice *choice = &map->choices[gpu];

        if (choice->nic >= 0)
            add(topo, choice->nic, choice->port, list);
        for (int i = 0; i < choice->n_more; i++)
            add(topo, choice->more[i].nic, choice->more[i].port, list);
    }
    for (int nic = 0; map->n == 0 && nic < topo->n_nics; nic++)
        for (int i = 0; i < topo->nics[nic].n_ports && topo->nics[nic].role == TOPO_ROLE_DATA; i++)
            if (topo->nics[nic].ports[i].active)
                add(topo, nic, topo->nics[nic].ports[i].number, list);
}

/* Writes the ports of this machine; an exit code. */
static int find(char ret_list[LIST_BYTES])
{
    struct text list = text_in(ret_list, LIST_BYTES);
    struct source *source = NULL;
    struct topo *topo = NULL;
    struct map *map = NULL;
    int code = CMD_FAILED;

    if (source_open(NULL, &source) != EP_OK || topo_read(source, &topo) != EP_OK || map_best(topo, &map) != EP_OK) {
        fprintf(stderr, "epkit: %s\n", ep_last_error());
    } else {
        list_ports(topo, map, &list);
        code = list.n ? CMD_FINE : CMD_UNSUPPORTED;
        if (code != CMD_FINE)
            fputs(topo->n_nics == 0 ? "epkit: there is no RDMA device\n"
                                    : "epkit: no RDMA device carries data here ('epkit topo' says why): name those to "
                                      "measure\n",
                  stderr);
    }
    map_free(map);
    topo_free(topo);
    source_free(source);
    return code;
}

int rails_main(int argc, char **argv)
{
    char list[LIST_BYTES];
    int code = CMD_FINE;

    if (argc < 3) {
        fputs("epkit: " RAILS_COMMAND " is internal: 'epkit launch ib-write-bw' uses it on a node\n", stderr);
        return CMD_USAGE;
    }
    if (!*argv[1])
        code = find(list);
    if (code != CMD_FINE)
        return code;
    setenv(RAILS_VARIABLE, *argv[1] ? argv[1] : list, 1);
    execvp(argv[2], argv + 2);
    fprintf(stderr, "epkit: %s: %s\n", argv[2], strerror(errno));
    return 126;
}
