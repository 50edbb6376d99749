/* SPDX-License-Identifier: Apache-2.0 */
/*
 * map_nvshmem.c - the NICs that NVSHMEM chooses by default.
 *
 * From the public source of NVSHMEM 3.4 (nvshmemi_setup_connections(), nvshmemi_get_devices_by_distance(), the
 * enumeration of devices in the ibgda transport, nvshmemt_parse_hca_list()):
 *
 * - Candidates are the active InfiniBand and Ethernet ports of the devices whose name contains the prefix, in the order
 * of the devices (here: by PCI address, as the kernel finds them). A list filters them by exact name and port; a
 * leading "^" inverts it. The role of a NIC does not matter: a management NIC is a candidate.
 * - A single candidate is used by all. With NVSHMEM_ENABLE_NIC_PE_MAPPING a PE uses candidate number (local PE modulo
 * candidates).
 * - Otherwise all pairs of the node's PEs with candidates are sorted by path (PIX, PXB, PHB, NODE, SYS), within one
 * class by PE, then candidate. In that order each PE takes up to (candidates / PEs) of its best class, at least one;
 * the transport uses the first. PIX and PXB are one class here and in the second pass, which moves a PE from a
 * candidate with several users to one of the same class with at least two users less.
 * - "PEs of the node" are those of the job.
 */
#include "map_internal.h"

#include "base/error.h"

#include <stdlib.h>
#include <string.h>

#define MAX_CANDIDATES (TOPO_MAX_NICS * TOPO_MAX_PORTS)
#define NOT_YET (-1)
#define NO_MORE (-2)

/* --- candidates --- */

/* Does the list name this port? "NAME" or "NAME:PORT", separated by commas; after a second colon is a count. */
static bool list_has(const char *list, const char *name, int port)
{
    size_t length = strlen(name);

    for (const char *entry = list; *entry; entry += strcspn(entry, ","), entry += *entry == ',') {
        size_t n = strcspn(entry, ":,");

        if (n == length && strncmp(entry, name, n) == 0 && (entry[n] != ':' || strtol(entry + n + 1, NULL, 10) == port))
            return true;
    }
    return false;
}

static int find_candidates(const struct topo *topo, const struct map_nvshmem *how,
                           struct map_port ret_ports[MAX_CANDIDATES])
{
    bool is_exclusion = how->hca_list[0] == '^';
    const char *list = how->hca_list + is_exclusion;
    int n = 0;

    for (int i = 0; i < topo->n_nics && i < TOPO_MAX_NICS; i++) {
        const struct topo_nic *nic = &topo->nics[i];

        if (!strstr(nic->name, how->hca_prefix) || nic->role == TOPO_ROLE_NO_ACCESS)
            continue;
        for (int p = 0; p < nic->n_ports && p < TOPO_MAX_PORTS; p++) {
            const struct topo_port *port = &nic->ports[p];

            if (!port->active || port->link_layer == TOPO_LINK_UNKNOWN)
                continue;
            if (how->hca_list[0] && list_has(list, nic->name, port->number) == is_exclusion)
                continue;
            ret_ports[n++] = (struct map_port){i, port->number};
        }
    }
    return n;
}

/* --- by distance --- */

struct pair {
    int pe, candidate;
    enum topo_path path;
};

/* The job on this node: PE i runs on GPU gpus[i]. */
struct job {
    int n_pes, n_candidates, per_pe;
    int gpus[TOPO_MAX_GPUS];
    struct pair *pairs;
    int n_pairs;
    int *taken; /* n_pes x per_pe: candidate, NOT_YET or NO_MORE */
    enum topo_path *paths;
    int users[MAX_CANDIDATES];
};

static enum topo_path class_of(enum topo_path path)
{
    return path <= TOPO_PXB ? TOPO_PIX : path;
}

static void sort_pairs(const struct topo *topo, const struct map_port *ports, struct job *job)
{
    job->n_pairs = 0;
    for (enum topo_path path = TOPO_SELF; path <= TOPO_SYS; path++)
        for (int pe = 0; pe < job->n_pes; pe++)
            for (int c = 0; c < job->n_candidates; c++)
                if (topo_bus_path(topo, topo->gpus[job->gpus[pe]].pci, topo->nics[ports[c].nic].pci) == path)
                    job->pairs[job->n_pairs++] = (struct pair){pe, c, path};
}

static void first_pass(struct job *job)
{
    for (int i = 0; i < job->n_pairs; i++) {
        const struct pair *pair = &job->pairs[i];
        int *taken = &job->taken[pair->pe * job->per_pe];
        enum topo_path *paths = &job->paths[pair->pe * job->per_pe];
        int slot = 0;

        while (slot < job->per_pe && taken[slot] != NOT_YET)
            slot++;
        if (slot == job->per_pe)
            continue;
        if (slot > 0 && class_of(pair->path) > class_of(paths[0])) {
            for (; slot < job->per_pe; slot++)
                taken[slot] = NO_MORE;
            continue;
        }
        taken[slot] = pair->candidate;
        paths[slot] = pair->path;
        job->users[pair->candidate]++;
    }
}

/*
 * The source compares the index of the entry in the table of choices with the number of the PE, even if a PE has
 * several entries; this code does the same. Later sources divide first. The results differ only in one job with at
 * least two candidates for each PE.
 */
static void second_pass(struct job *job)
{
    for (int entry = 0; entry < job->n_pes * job->per_pe; entry++) {
        int users = job->taken[entry] < 0 ? 0 : job->users[job->taken[entry]];

        for (int i = 0; i < job->n_pairs && users >= 2; i++) {
            const struct pair *pair = &job->pairs[i];

            if (pair->pe != entry)
                continue;
            if (class_of(pair->path) > class_of(job->paths[entry]))
                break;
            if (users - job->users[pair->candidate] < 2)
                continue;
            job->users[job->taken[entry]]--;
            users = ++job->users[pair->candidate];
            job->taken[entry] = pair->candidate;
            job->paths[entry] = pair->path;
        }
    }
}

/* The choice of PE `pe` of this job: ret_taken[i] for GPU gpus[i]. */
static ep_status run_job(const struct topo *topo, const struct map_port *ports, struct job *job)
{
    size_t entries;

    job->per_pe = job->n_candidates / job->n_pes;
    if (job->per_pe == 0)
        job->per_pe = 1;
    entries = (size_t)job->n_pes * (size_t)job->per_pe;
    job->pairs = calloc((size_t)job->n_pes * (size_t)job->n_candidates, sizeof(*job->pairs));
    job->taken = calloc(entries, sizeof(*job->taken));
    job->paths = calloc(entries, sizeof(*job->paths));
    if (!job->pairs || !job->taken || !job->paths)
        return ep_fail(EP_E_MEMORY, "no memory to follow NVSHMEM's choice of NICs");
    for (size_t i = 0; i < entries; i++)
        job->taken[i] = NOT_YET;
    memset(job->users, 0, sizeof(job->users));
    sort_pairs(topo, ports, job);
    first_pass(job);
    second_pass(job);
    return EP_OK;
}

static void job_done(struct job *job)
{
    free(job->pairs);
    free(job->taken);
    free(job->paths);
}

static ep_status choose_by_distance(const struct topo *topo, const struct map_port *ports, int n_ports,
                                    bool one_world_per_gpu, int ret_choices[TOPO_MAX_GPUS])
{
    ep_status status = EP_OK;

    for (int first = 0; first < topo->n_gpus && status == EP_OK; first += one_world_per_gpu ? 1 : topo->n_gpus) {
        struct job job = {.n_pes = one_world_per_gpu ? 1 : topo->n_gpus, .n_candidates = n_ports};

        for (int pe = 0; pe < job.n_pes; pe++)
            job.gpus[pe] = first + pe;
        status = run_job(topo, ports, &job);
        for (int pe = 0; pe < job.n_pes && status == EP_OK; pe++)
            ret_choices[first + pe] = job.taken[pe * job.per_pe];
        job_done(&job);
    }
    return status;
}

/* --- the assignment --- */

static void explain_choice(const struct topo *topo, const struct map_nvshmem *how, int n_ports,
                           struct map_choice *choice)
{
    const char *path = topo_path_name(choice->path);
    int pe = how->one_world_per_gpu ? 0 : choice->gpu;

    if (choice->nic < 0)
        map_explain(choice,
                    topo->n_nics == 0 ? "there is no NIC" : "no active port fits the prefix and the list of HCAs");
    else if (n_ports == 1)
        map_explain(choice, "the only candidate, %s", path);
    else if (how->pe_mapping)
        map_explain(choice, "NVSHMEM_ENABLE_NIC_PE_MAPPING: local PE %d takes candidate %d of %d, %s", pe, pe % n_ports,
                    n_ports, path);
    else if (how->one_world_per_gpu)
        map_explain(choice, "the first of its nearest, %s; a world of one GPU does not see the others", path);
    else
        map_explain(choice, "%s, by distance and then balanced within the job", path);
}

ep_status map_nvshmem(const struct topo *topo, const struct map_nvshmem *how, struct map **ret_map)
{
    struct map_port ports[MAX_CANDIDATES];
    int choices[TOPO_MAX_GPUS] = {0};
    int n_ports = find_candidates(topo, how, ports);
    ep_status status = EP_OK;
    struct map *map;

    EP_TRY(map_new(topo, &map));
    if (n_ports > 1 && how->pe_mapping) {
        for (int gpu = 0; gpu < map->n; gpu++)
            choices[gpu] = how->one_world_per_gpu ? 0 : gpu % n_ports;
    } else if (n_ports > 1) {
        status = choose_by_distance(topo, ports, n_ports, how->one_world_per_gpu, choices);
    }
    for (int gpu = 0; gpu < map->n && n_ports > 0 && status == EP_OK; gpu++) {
        map->choices[gpu].nic = ports[choices[gpu]].nic;
        map->choices[gpu].port = ports[choices[gpu]].port;
    }
    if (status != EP_OK) {
        map_free(map);
        return status;
    }
    map_finish(topo, map);
    for (int gpu = 0; gpu < map->n; gpu++) {
        struct map_choice *choice = &map->choices[gpu];

        /* NVSHMEM does not read NCCL's topology file. */
        if (choice->nic >= 0)
            choice->path = topo_bus_path(topo, topo->gpus[choice->gpu].pci, topo->nics[choice->nic].pci);
        explain_choice(topo, how, n_ports, choice);
    }
    *ret_map = map;
    return EP_OK;
}
