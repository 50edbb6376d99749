/* SPDX-License-Identifier: Apache-2.0 */
#include "rails.h"

#include "base/error.h"
#include "common/cmd.h"
#include "machine/hardware/map.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Adds a port that is not in the list yet. */
static const char *add(const struct topo *topo, const char *list, int nic, int port)
{
    const char *entry = source_printf(topo->source, " %s:%d ", topo->nics[nic].name, port);

    if (strstr(source_printf(topo->source, " %s ", list), entry))
        return list;
    return source_printf(topo->source, "%s%s%s:%d", list, *list ? " " : "", topo->nics[nic].name, port);
}

static const char *list_assigned(const struct topo *topo, const struct map *map)
{
    const char *list = "";

    for (int gpu = 0; gpu < map->n; gpu++) {
        const struct map_choice *choice = &map->choices[gpu];

        if (choice->nic >= 0)
            list = add(topo, list, choice->nic, choice->port);
        for (int i = 0; i < choice->n_more; i++)
            list = add(topo, list, choice->more[i].nic, choice->more[i].port);
    }
    return list;
}

static const char *list_data(const struct topo *topo)
{
    const char *list = "";

    for (int nic = 0; nic < topo->n_nics; nic++)
        for (int i = 0; i < topo->nics[nic].n_ports && topo->nics[nic].role == TOPO_ROLE_DATA; i++)
            if (topo->nics[nic].ports[i].active)
                list = add(topo, list, nic, topo->nics[nic].ports[i].number);
    return list;
}

static int set_rails(const char *list)
{
    if (setenv(RAILS_VARIABLE, list, 1) == 0)
        return CMD_FINE;
    fprintf(stderr, "epkit: %s: %s\n", RAILS_VARIABLE, strerror(errno));
    return CMD_FAILED;
}

/* Sets RAILS_VARIABLE for this machine; an exit code. */
static int find(void)
{
    struct source *source = NULL;
    struct topo *topo = NULL;
    struct map *map = NULL;
    const char *list;
    int code = CMD_FAILED;

    if (source_open(NULL, &source) != EP_OK || topo_read(source, &topo) != EP_OK || map_best(topo, &map) != EP_OK) {
        fprintf(stderr, "epkit: %s\n", ep_last_error());
        goto free_all;
    }
    list = map->n ? list_assigned(topo, map) : list_data(topo);
    code = *list ? CMD_FINE : CMD_UNSUPPORTED;
    if (code != CMD_FINE && topo->n_nics == 0)
        fputs("epkit: there is no RDMA device\n", stderr);
    else if (code != CMD_FINE)
        fputs("epkit: no RDMA device carries data here ('epkit topo' says why): name those to measure\n", stderr);
    else
        code = set_rails(list);
free_all:
    map_free(map);
    topo_free(topo);
    source_free(source);
    return code;
}

int rails_main(int argc, char **argv)
{
    int code = CMD_FINE;

    if (argc < 3) {
        fputs("epkit: " RAILS_COMMAND " is internal: 'epkit launch ib-write-bw' uses it on a node\n", stderr);
        return CMD_USAGE;
    }
    if (*argv[1])
        code = set_rails(argv[1]);
    else
        code = find();
    if (code != CMD_FINE)
        return code;
    execvp(argv[2], argv + 2);
    fprintf(stderr, "epkit: %s: %s\n", argv[2], strerror(errno));
    return 126;
}
