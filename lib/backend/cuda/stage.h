/* SPDX-License-Identifier: Apache-2.0 */
/* stage.h - buffers that peers access, and copies between ordinary and staging memory while rows move. */
#ifndef EP_CUDA_STAGE_H
#define EP_CUDA_STAGE_H

#include "backend/cuda/cuda.h"

/*
 * Finds where the peers access a buffer of `bytes`, and describes it: `memory` itself if it is symmetric and
 * all have it mapped; otherwise, and if it is NULL, staging.
 */
ep_status cuda_place_buffer(struct cuda_comm *cuda, struct cuda_op_desc *desc, int which, void *memory, size_t bytes,
                            void **ret_placed);
/*
 * Is the ordinary memory of this rank, in rows of `row_bytes`, copied while the rows move? Otherwise it is copied
 * before or after the kernel.
 */
bool cuda_overlaps_copies(const struct cuda_comm *cuda, const ep_plan *plan, size_t row_bytes);
/*
 * Fills the kernel's arguments, except the memory, and the number of blocks that move rows. `copies`: some of its
 * blocks copy, with rings of at least `slot` bytes within the shape of the others.
 */
void cuda_fill_stage(const struct cuda_comm *cuda, int n_tokens, bool copies, size_t slot, struct cuda_stage *ret_stage,
                     struct cuda_shape *shape);
/* Rows of other ranks' tokens on this rank. */
int64_t cuda_rows_of_others(const struct cuda_comm *cuda, const ep_plan *plan);

#endif
