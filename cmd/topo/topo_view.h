/* SPDX-License-Identifier: Apache-2.0 */
/* topo_view.h - the output of `epkit topo`: JSON, text from the same rows, and snapshots. */
#ifndef EP_TOPO_TOPO_VIEW_H
#define EP_TOPO_TOPO_VIEW_H

#include "common/cmd.h"
#include "machine/doctor/doctor.h"

#include <jansson.h>

struct topo_view {
    const struct topo *topo;
    const struct map *best;
    const struct map *ibgda;   /* the best one for NVSHMEM and DeepEP */
    const struct map *nvshmem; /* the choice of NVSHMEM without any of its variables */
    bool tree, matrix, map, nics;
};

/* "8 x NVIDIA B200 and 8 NICs (mlx5_0..mlx5_7, 400 Gb/s RoCE), each GPU its own nearest NIC." */
void topo_sentence(const struct topo_view *view, char *ret_text, size_t bytes);

/* Adds the verdict and the sections to a document. */
void topo_json(const struct topo_view *view, json_t *document);

/* Prints the verdict and the sections. 0, or -1 after reporting that they could not be written. */
int topo_text(const struct topo_view *view);

/* --- rows that text and JSON share; new references --- */

json_t *topo_matrix_rows(const struct topo_view *view);
json_t *topo_map_rows(const struct topo_view *view);
json_t *topo_rank_rows(const struct topo_view *view);
json_t *topo_nvshmem_rows(const struct topo_view *view);
json_t *topo_port_rows(const struct topo_view *view);

const char *topo_role_name(enum topo_role role);
const char *topo_link_name(enum topo_link_layer link_layer); /* "RoCE", "InfiniBand", "" */

/* "NVIDIA B200", or if the name is unknown "NVIDIA device 2901". */
void topo_gpu_name(const struct topo *topo, const struct topo_gpu *gpu, char *ret_text, size_t bytes);

#endif
