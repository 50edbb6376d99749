/* SPDX-License-Identifier: Apache-2.0 */
/* map.h - assignment of GPUs to NICs: the best one, and the one that NVSHMEM makes by default. */
#ifndef EP_TOPO_MAP_H
#define EP_TOPO_MAP_H

#include "topo.h"

#define MAP_MAX_MORE 15
#define MAP_WHY_BYTES 768

/* A port of a NIC. */
struct map_port {
    int nic, port; /* index into topo.nics, port number */
};

struct map_choice {
    int gpu;       /* index into topo.gpus */
    int nic, port; /* index into topo.nics, port number; -1 when there is no NIC at all */
    enum topo_path path;
    int sharers; /* GPUs that use this NIC and port, itself included */
    int n_more;  /* further ports for this GPU, if there are several for each: NCCL uses all of them */
    struct map_port more[MAP_MAX_MORE];
    char why[MAP_WHY_BYTES]; /* "nearest, PIX; of those as near mlx5_1 goes to GPU 1" */
};

struct map {
    int n;                                    /* topo_usable_gpus() */
    struct map_choice choices[TOPO_MAX_GPUS]; /* by GPU */
    int n_idle;
    int idle[TOPO_MAX_NICS]; /* NICs with role DATA that no GPU uses, including those that this process has no access to
                              */
    int distance;            /* sum over the GPUs: PIX 0, PXB 1, PHB 2, NODE 3, SYS 4 */
    int n_shared;            /* NICs that more than one GPU uses */
};

/*
 * If this process has access to all NICs, GPUs that it has no access to take part as well: tasks with one GPU each then
 * find, independently, the assignment that one process with all GPUs would. GPUs are ordered by PCI address.
 *
 * The best assignment: GPUs are spread over the active ports of NICs with role DATA as evenly as their numbers allow
 * (one port each while there are enough). Then as few as possible have the path SYS, then NODE, PHB, PXB: an exchange
 * ends with its slowest GPU, so one far path is worse than several medium ones. Then GPUs have NICs and ports in their
 * order, the first ones first: the same machine gives the same assignment. The algorithm is polynomial:
 * TOPO_MAX_GPUS x TOPO_MAX_NICS take milliseconds, whatever the input.
 */
struct map *map_best(const struct topo *topo);

/* As map_best(), over the rails that IBGDA supports, if any: the assignment for NVSHMEM and DeepEP. */
struct map *map_ibgda(const struct topo *topo);

/* The part of NVSHMEM's environment that its choice depends on (3.4 and 3.5). */
struct map_nvshmem {
    bool pe_mapping;        /* NVSHMEM_ENABLE_NIC_PE_MAPPING */
    const char *hca_list;   /* NVSHMEM_HCA_LIST, "" if not set */
    const char *hca_prefix; /* NVSHMEM_HCA_PREFIX, "mlx5" by default; also filters the list */
};

/*
 * The assignment of NVSHMEM with a job for each GPU, as DeepEP makes them: candidates by prefix and list, whatever
 * their role; each GPU takes the first of its nearest. With PE mapping every GPU is local PE 0 and takes the first NIC.
 */
struct map *map_nvshmem(const struct topo *topo, const struct map_nvshmem *how);

/* "0:mlx5_0:1,1:mlx5_1", DEEP_EP_DEVICE_TO_HCA_MAPPING. EP_E_ARG names a wrong entry; a GPU left out has NIC -1. */
ep_status map_parse(const struct topo *topo, const char *text, struct map **ret_map);

void map_free(struct map *map);

/* --- formats; the strings belong to the source of the topology --- */

const char *map_deepep(const struct topo *topo, const struct map *map); /* "0:mlx5_0:1,1:mlx5_1:1" */

/* "mlx5_0:1": NVSHMEM_HCA_LIST, UCX_NET_DEVICES. */
const char *map_hca_list(const struct topo *topo, const struct map *map, int gpu);

/* "=mlx5_0:1,mlx5_1:1": NCCL_IB_HCA, exact names, all rails: NCCL spreads its channels over them. */
const char *map_nccl(const struct topo *topo);

/* "mlx5_0:1,mlx5_1:1", a port for each GPU: EPKIT_VERBS_DEVICE of all ranks of a node; "" if a GPU has none. */
const char *map_verbs(const struct topo *topo, const struct map *map);

#endif
