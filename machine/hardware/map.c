/* SPDX-License-Identifier: Apache-2.0 */
/*
 * map.c - the best assignment of GPUs to the ports of NICs.
 *
 * This is an assignment problem: rows are GPUs, columns are units of the capacity of ports. With at least as many ports
 * as GPUs a port has one column. Otherwise each port has `base` columns, all of which have to be used, and one extra
 * column; so the loads differ by at most one. Each GPU in turn is added by the cheapest change of the assignment of
 * those before it, which leaves it the best one. All costs are integers, so nothing depends on rounding.
 */
#include "read_hardware.h"

#include "common/memory.h"
#include "common/text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_ROWS (2 * TOPO_MAX_GPUS) /* GPUs of this process and of others */
#define MAX_COLUMNS                                                                                                    \
    (TOPO_MAX_NICS * TOPO_MAX_PORTS) /* a port has several columns only if there are fewer ports than GPUs */

/*
 * The cost of a path. An exchange between GPUs ends with the slowest of them, so one GPU that reaches its NIC through
 * the link between the sockets costs more than any number that go through their own host bridge: the number of SYS
 * paths is minimised first, then that of NODE, PHB and PXB. If the paths are those of a tree, a sum of distances has
 * the same best assignments; if NUMA nodes and bridges contradict each other, it would trade one SYS for two NODE. Each
 * class weighs more than the paths of all GPUs of the class below, hence the powers.
 */
#define STEP (2 * TOPO_MAX_GPUS + 1)

static int64_t path_cost(enum topo_path path)
{
    static const int64_t costs[] = {
        [TOPO_SELF] = 0,
        [TOPO_NVLINK] = 0,
        [TOPO_PIX] = 0,
        [TOPO_PXB] = 1,
        [TOPO_PHB] = STEP,
        [TOPO_NODE] = STEP * STEP,
        [TOPO_SYS] = STEP * STEP * STEP,
    };

    return costs[path];
}

/* The cost of an extra column: more than all paths together. */
#define EXTRA_COST ((int64_t)STEP * STEP * STEP * STEP)

/* Of equally good assignments, the order of ports follows that of GPUs; all this weighs less than a step of a path. */
#define ORDER_COSTS (INT64_C(1) << 23)

/* The GPUs of an assignment, by PCI address: indices into topo.pci, and into topo.gpus or -1 without access. */
struct rows {
    int n;
    int pci[MAX_ROWS], gpu[MAX_ROWS];
};

struct problem {
    int n_gpus, n_columns;
    int64_t costs[MAX_ROWS][MAX_COLUMNS];
    int port_of[MAX_COLUMNS];   /* ascending; the extra column of a port is its last */
    int gpu_at[MAX_COLUMNS];    /* the GPU assigned to it, -1 none */
    int column_of[MAX_ROWS];    /* by GPU */
    int64_t added[MAX_COLUMNS]; /* during a search: what it costs that this column is taken */
    int from[MAX_COLUMNS];      /* the column whose GPU moves here; -1: the new GPU comes here */
};

int map_data_ports(const struct topo *topo, struct map_port ret_ports[TOPO_MAX_NICS * TOPO_MAX_PORTS])
{
    int n = 0;

    for (int i = 0; i < topo->n_nics; i++)
        for (int p = 0; p < topo->nics[i].n_ports && topo->nics[i].role == TOPO_ROLE_DATA; p++)
            if (topo->nics[i].ports[p].active)
                ret_ports[n++] = (struct map_port){i, topo->nics[i].ports[p].number};
    return n;
}

/* --- the problem --- */

/* `problem` is all zeros. */
static void problem_init(const struct topo *topo, const struct rows *rows, const struct map_port *ports, int n_ports,
                         struct problem *problem)
{
    int base = rows->n / n_ports;
    int per_port = rows->n % n_ports ? base + 1 : base;

    problem->n_gpus = rows->n;
    problem->n_columns = n_ports * per_port;
    for (int column = 0; column < problem->n_columns; column++) {
        int port = column / per_port;
        bool is_extra = column % per_port >= base && base > 0;

        problem->port_of[column] = port;
        problem->gpu_at[column] = -1;
        for (int gpu = 0; gpu < rows->n; gpu++)
            problem->costs[gpu][column] =
                ORDER_COSTS * (path_cost(topo_path(topo, rows->pci[gpu], topo->nics[ports[port].nic].pci)) +
                               (is_extra ? EXTRA_COST : 0)) +
                (rows->n - gpu) * port;
    }
}

/* Assigns one more GPU along the cheapest augmenting path, on which assigned GPUs move. */
static void assign_gpu(struct problem *problem, int new_gpu)
{
    int next = -1;

    for (int column = 0; column < problem->n_columns; column++) {
        problem->added[column] = problem->costs[new_gpu][column];
        problem->from[column] = -1;
    }
    /* Bellman and Ford: there is no cycle of moves that would save anything, since the assignment was the best one. */
    for (bool has_changed = true; has_changed;) {
        has_changed = false;
        for (int at = 0; at < problem->n_columns; at++) {
            int gpu = problem->gpu_at[at];

            for (int column = 0; gpu >= 0 && column < problem->n_columns; column++) {
                int64_t added = problem->added[at] + problem->costs[gpu][column] - problem->costs[gpu][at];

                if (added >= problem->added[column])
                    continue;
                problem->added[column] = added;
                problem->from[column] = at;
                has_changed = true;
            }
        }
    }
    /* There are at least as many columns as GPUs, so one is free. */
    for (int column = 0; column < problem->n_columns; column++)
        if (problem->gpu_at[column] < 0 && (next < 0 || problem->added[column] < problem->added[next]))
            next = column;
    while (next >= 0) {
        int before = problem->from[next];

        problem->gpu_at[next] = before < 0 ? new_gpu : problem->gpu_at[before];
        next = before;
    }
}

static void map_solve(struct problem *problem)
{
    for (int gpu = 0; gpu < problem->n_gpus; gpu++)
        assign_gpu(problem, gpu);
    for (int column = 0; column < problem->n_columns; column++)
        if (problem->gpu_at[column] >= 0)
            problem->column_of[problem->gpu_at[column]] = column;
}

/* --- maps --- */

struct map *map_new(const struct topo *topo)
{
    struct map *map = memory_new(1, sizeof(*map));

    map->n = topo_usable_gpus(topo);
    for (int i = 0; i < topo->n_gpus; i++)
        map->choices[i] = (struct map_choice){.gpu = i, .nic = -1, .port = -1, .path = TOPO_SYS};
    return map;
}

void map_free(struct map *map)
{
    free(map);
}

void map_explain(struct map_choice *choice, const char *format, ...)
{
    WITH_ARGS(args, format, vsnprintf(choice->why, sizeof(choice->why), format, args));
}

void map_finish(const struct topo *topo, struct map *map)
{
    map->n_idle = map->n_shared = map->distance = 0;
    FOR_EACH (choice, map->choices, map->n) {
        choice->sharers = 0;
        if (choice->nic < 0)
            continue;
        choice->path = topo_gpu_nic_path(topo, choice->gpu, choice->nic);
        map->distance += choice->path > TOPO_PIX ? (int)choice->path - TOPO_PIX : 0;
        choice->sharers =
            COUNT_OF(k, map->n, map->choices[k].nic == choice->nic && map->choices[k].port == choice->port);
    }
    for (int nic = 0; nic < topo->n_nics; nic++) {
        bool is_more = ANY_OF(i, map->n, ANY_OF(k, map->choices[i].n_more, map->choices[i].more[k].nic == nic));
        int users = COUNT_OF(i, map->n, map->choices[i].nic == nic);

        map->n_shared += users > 1;
        if (users == 0 && !is_more && topo->nics[nic].role == TOPO_ROLE_DATA)
            map->idle[map->n_idle++] = nic;
    }
}

/* --- GPUs that take part --- */

static void add_row(struct rows *rows, int pci, int gpu)
{
    int at = rows->n++;

    /* A device without a PCI address is last. */
    for (; at > 0 && (unsigned)rows->pci[at - 1] > (unsigned)pci; at--) {
        rows->pci[at] = rows->pci[at - 1];
        rows->gpu[at] = rows->gpu[at - 1];
    }
    rows->pci[at] = pci;
    rows->gpu[at] = gpu;
}

/*
 * A function of the same make as the rails, whose card shows no RDMA device: it is in another network namespace
 * (exclusive mode of rdma(8)), or missing. The second port of a bond has no RDMA device because the first has it for
 * both.
 */
static bool is_rail_elsewhere(const struct topo *topo, int pci)
{
    const struct topo_pci *self = &topo->pci[pci];
    bool is_of_the_make = false;

    if (self->class_code >> 16 != PCI_CLASS_NETWORK)
        return false;
    for (int i = 0; i < topo->n_nics; i++) {
        const struct topo_pci *other = topo->nics[i].pci >= 0 ? &topo->pci[topo->nics[i].pci] : NULL;

        if (!other)
            continue;
        if (topo_is_same_card(topo, pci, topo->nics[i].pci))
            return false;
        is_of_the_make = is_of_the_make || (topo->nics[i].role == TOPO_ROLE_DATA && other->vendor == self->vendor &&
                                            other->device == self->device);
    }
    return is_of_the_make;
}

/* Does this process have access to all rails of the machine? Then the GPUs of other processes use them as well. */
static bool has_all_rails(const struct topo *topo)
{
    return !ANY_OF(i, topo->n_nics, topo->nics[i].role == TOPO_ROLE_NO_ACCESS) &&
           !ANY_OF(p, topo->n_pci, is_rail_elsewhere(topo, p));
}

static void list_rows(const struct topo *topo, struct rows *ret_rows)
{
    struct rows rows = {.n = 0};

    for (int i = 0; i < topo_usable_gpus(topo); i++)
        add_row(&rows, topo->gpus[i].pci, i);
    for (int i = 0; i < topo->n_hidden_gpus && i < TOPO_MAX_GPUS && rows.n > 0 && has_all_rails(topo); i++)
        add_row(&rows, topo->hidden_gpus[i], -1);
    *ret_rows = rows;
}

/* One port for each row; ret_ports[row] is an index into `ports`. */
static void assign_once(const struct topo *topo, const struct rows *rows, const struct map_port *ports, int n_ports,
                        int *ret_ports)
{
    struct problem *problem = memory_new(1, sizeof(*problem));

    problem_init(topo, rows, ports, n_ports, problem);
    map_solve(problem);
    for (int row = 0; row < rows->n; row++)
        ret_ports[row] = problem->port_of[problem->column_of[row]];
    free(problem);
}

/* Removes the ports used in the last round from the list; returns how many remain. */
static int drop_used(struct map_port *ports, int n_ports, const int *taken, int n_taken)
{
    bool is_taken[MAX_COLUMNS] = {false};
    int n = 0;

    for (int i = 0; i < n_taken; i++)
        is_taken[taken[i]] = true;
    for (int i = 0; i < n_ports; i++)
        if (!is_taken[i])
            ports[n++] = ports[i];
    return n;
}

static void record_port(struct map *map, int gpu, const struct map_port *port, bool is_first)
{
    struct map_choice *choice = &map->choices[gpu];

    if (is_first) {
        choice->nic = port->nic;
        choice->port = port->port;
    } else if (choice->n_more < MAP_MAX_MORE) {
        choice->more[choice->n_more++] = *port;
    }
}

/* Where there are several ports for each GPU, as many rounds: each takes from what the ones before have left. */
static void map_assign(const struct topo *topo, const struct rows *rows, const struct map_port *all, int n_all,
                       struct map *map)
{
    struct map_port ports[MAX_COLUMNS];
    int taken[MAX_ROWS], n_ports = n_all;

    memcpy(ports, all, (size_t)n_all * sizeof(*ports));
    for (int round = 0; rows->n > 0 && n_ports > 0 && (round == 0 || n_ports >= rows->n); round++) {
        assign_once(topo, rows, ports, n_ports, taken);
        for (int row = 0; row < rows->n; row++)
            if (rows->gpu[row] >= 0)
                record_port(map, rows->gpu[row], &ports[taken[row]], round == 0);
        n_ports = drop_used(ports, n_ports, taken, rows->n);
    }
    /* The remaining ports are unused; those of other processes' GPUs were removed from the list. */
    map->n_idle = 0;
    for (int i = 0; i < n_ports; i++)
        if (map->n_idle == 0 || map->idle[map->n_idle - 1] != ports[i].nic)
            map->idle[map->n_idle++] = ports[i].nic;
}

/* Of the idle NICs of map_assign() those that have no other port in use. */
static void set_idle(struct map *map, const int *left, int n_left)
{
    int n = 0;

    for (int i = 0; i < map->n_idle; i++)
        for (int k = 0; k < n_left; k++)
            if (map->idle[i] == left[k]) {
                map->idle[n++] = map->idle[i];
                break;
            }
    map->n_idle = n;
}

/* --- reasons --- */

#define NAMED 3 /* alternatives that are named; the rest is counted */

/* "mlx5_0", or "mlx5_0:2" where the NIC has several ports; safe to print. */
static void map_port_name(const struct topo *topo, int nic, int port, char *ret_text, size_t bytes)
{
    char name[64];

    text_clean(topo->nics[nic].name, name, sizeof(name));
    if (topo->nics[nic].n_ports > 1)
        snprintf(ret_text, bytes, "%s:%d", name, port);
    else
        snprintf(ret_text, bytes, "%s", name);
}

static bool is_own(const struct map_choice *choice, const struct map_port *port)
{
    return ANY_OF(i, choice->n_more, choice->more[i].nic == port->nic && choice->more[i].port == port->port) ||
           (choice->nic == port->nic && choice->port == port->port);
}

/* The other ports at distance `path`, and their use. Returns their number. */
static int add_others(struct text *text, const struct topo *topo, const struct map *map,
                      const struct map_choice *choice, const struct map_port *ports, int n_ports, enum topo_path path)
{
    int n = 0;

    for (int i = 0; i < n_ports; i++) {
        int user = FIRST_OF(k, map->n, k != choice->gpu && is_own(&map->choices[k], &ports[i]));
        char name[80];

        if (is_own(choice, &ports[i]) || topo_gpu_nic_path(topo, choice->gpu, ports[i].nic) != path)
            continue;
        n++;
        if (n > NAMED)
            continue;
        map_port_name(topo, ports[i].nic, ports[i].port, name, sizeof(name));
        if (user >= 0)
            text_add(text, "%s%s goes to GPU %d", n > 1 ? ", " : "", name, user);
        else
            text_add(text, "%s%s %s", n > 1 ? ", " : "", name,
                     ANY_OF(k, map->n_idle, map->idle[k] == ports[i].nic)
                         ? "comes later in order and stays idle"
                         : "goes to a GPU that this process is not given");
    }
    if (n > NAMED)
        text_add(text, " and %d more", n - NAMED);
    return n;
}

static void add_sharing(struct text *text, const struct map *map, const struct map_choice *choice, int n_ports)
{
    bool is_first = true;

    if (choice->sharers < 2)
        return;
    text_add(text, "; shared with GPU ");
    for (int i = 0; i < map->n; i++) {
        if (i == choice->gpu || map->choices[i].nic != choice->nic || map->choices[i].port != choice->port)
            continue;
        text_add(text, "%s%d", is_first ? "" : ", ", i);
        is_first = false;
    }
    text_add(text, ", because %d GPUs have %d port%s", map->n, n_ports, n_ports == 1 ? "" : "s");
}

static void explain_map(const struct topo *topo, const struct map *map, struct map_choice *choice,
                        const struct map_port *ports, int n_ports)
{
    enum topo_path nearest = TOPO_SYS;
    char room[MAP_WHY_BYTES];
    struct text text = text_in(choice->why, sizeof(choice->why)), others = text_in(room, sizeof(room));
    int n;

    for (int i = 0; i < n_ports; i++) {
        enum topo_path path = topo_gpu_nic_path(topo, choice->gpu, ports[i].nic);

        if (path < nearest)
            nearest = path;
    }
    n = add_others(&others, topo, map, choice, ports, n_ports, nearest);
    if (choice->path == nearest && n == 0) {
        text_add(&text, n_ports == 1 ? "the only one, %s" : "nearest, %s; no other is as near",
                 topo_path_name(nearest));
    } else if (choice->path == nearest) {
        text_add(&text, "nearest, %s; of those as near %s", topo_path_name(nearest), others.bytes);
    } else {
        text_add(&text, "%s, not the nearest: %s (%s); ", topo_path_name(choice->path), others.bytes,
                 topo_path_name(nearest));
        text_add(&text, map->n <= n_ports ? "no port serves two GPUs while another is free"
                                          : "the ports serve equally many GPUs, within one");
    }
    add_sharing(&text, map, choice, n_ports);
    for (int i = 0; i < choice->n_more; i++) {
        char name[80];

        map_port_name(topo, choice->more[i].nic, choice->more[i].port, name, sizeof(name));
        text_add(&text, "%s%s", i ? ", " : "; NCCL also uses ", name);
    }
}

/* Sets the reasons of map_best(); after map_finish(). */
static void map_explain_best(const struct topo *topo, struct map *map, const struct map_port *ports, int n_ports)
{
    FOR_EACH (choice, map->choices, map->n) {
        if (choice->nic >= 0)
            explain_map(topo, map, choice, ports, n_ports);
        else
            map_explain(choice, topo->n_nics ? "none of the NICs carries data over an active port" : "there is no NIC");
    }
}

struct map *map_best(const struct topo *topo)
{
    struct map_port ports[MAX_COLUMNS];
    int left[TOPO_MAX_NICS], n_left, n_ports = map_data_ports(topo, ports);
    struct map *map = map_new(topo);
    struct rows rows;

    list_rows(topo, &rows);
    map_assign(topo, &rows, ports, n_ports, map);
    n_left = map->n_idle;
    memcpy(left, map->idle, (size_t)n_left * sizeof(*left));
    map_finish(topo, map);
    set_idle(map, left, n_left);
    map_explain_best(topo, map, ports, n_ports);
    return map;
}

struct map *map_ibgda(const struct topo *topo)
{
    struct topo supported = *topo;
    int n_supported = 0;
    struct map *map;

    supported.nics = memory_new((size_t)topo->n_nics, sizeof(*supported.nics));
    for (int i = 0; i < topo->n_nics; i++) {
        supported.nics[i] = topo->nics[i];
        if (topo->nics[i].role == TOPO_ROLE_DATA && topo_has_ibgda(topo, i))
            n_supported++;
        else if (topo->nics[i].role == TOPO_ROLE_DATA)
            supported.nics[i].role = TOPO_ROLE_STORAGE;
    }
    map = map_best(n_supported ? &supported : topo);
    free(supported.nics);
    return map;
}
