/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Finds where the peers access a buffer, decides whether ordinary memory is copied while the rows move (stage.cuh), and
 * fills the kernel's arguments for it. Each rank decides on its own, and publishes it in its descriptor, because the
 * others send it progress words.
 */
#include "backend/cuda/plan.h"

#include <string.h>

/*
 * Blocks that copy. Half of them would keep up with the links, but what is left after the last rows should take little
 * time: measured on two H200, a dispatch of 117 MB takes 193, 186 and 183 us with 16, 24 and 32 (docs/decisions.md).
 */
#define COPY_BLOCKS 24

#define MIN_SLOT 4096u /* bytes: a row may be shorter, a piece should not be */

int64_t cuda_rows_of_others(const struct cuda_comm *cuda, const ep_plan *plan)
{
    const int64_t *first = ((const struct ep_group_plan *)plan->impl)->recv_from_rank;
    int me = cuda->group.comm->rank, others = cuda->group.comm->nranks - 1;

    /* Only the devices know the rows: as if each rank had as many tokens as this one, and sent each of them here. */
    if (ep_plan_info_now(plan)->n_recv < 0)
        return (int64_t)plan->args.n_tokens * others;
    return plan->full.n_recv - (first[me + 1] - first[me]);
}

ep_status cuda_place_buffer(struct cuda_comm *cuda, struct cuda_op_desc *desc, int which, void *memory, size_t bytes,
                            size_t stage_bytes, void **ret_placed)
{
    uint32_t *words = &desc->words[CUDA_DESC_BUFFERS + 2 * which];
    bool direct = false;

    if (cuda_desc_buffer(cuda, memory, bytes, words))
        EP_TRY(cuda_await_mapped(cuda, words, &direct));
    *ret_placed = memory;
    if (direct)
        return EP_OK;
    EP_TRY(cuda_stage(cuda, which, stage_bytes, ret_placed));
    if (!cuda_desc_buffer(cuda, *ret_placed, stage_bytes, words))
        return ep_fail(EP_E_STATE, "%s: the staging buffer of %zu bytes is not in symmetric memory",
                       desc->kind == CUDA_DISPATCH ? "dispatch" : "combine", bytes);
    return EP_OK;
}

/* Counts the ranks of the node that use this rank's device, as threads or processes. */
static int count_sharing(const struct cuda_comm *cuda)
{
    int n = 0;

    for (int rank = cuda->group.first; rank < cuda_end_of_node(cuda); rank++)
        n += !strcmp(cuda->peers[rank].bus_id, cuda->ctrl->bus_id);
    return n;
}

/* Does a number that the caller has set count all blocks (EP_COMM_STRICT_SMS)? */
static bool is_strict(const struct cuda_comm *cuda)
{
    return cuda->sms_given && cuda->group.comm->config.flags & EP_COMM_STRICT_SMS;
}

int cuda_side_sms(const struct cuda_comm *cuda)
{
    return is_strict(cuda) ? cuda->sms : cuda_ll_sms(cuda);
}

static int least(int a, int b)
{
    return a < b ? a : b;
}

/*
 * Multiprocessors for the blocks that move rows and for those that copy. With EP_COMM_STRICT_SMS a number set by the
 * caller limits both together: three fifths of it copy, similar to the default. With one multiprocessor none is left
 * to copy.
 */
static void share_with_copies(const struct cuda_comm *cuda, int *ret_move_blocks, int *ret_copy_blocks)
{
    int room = cuda->all_sms / count_sharing(cuda) - COPY_BLOCKS;

    *ret_move_blocks = cuda->sms;
    *ret_copy_blocks = COPY_BLOCKS;
    if (is_strict(cuda)) {
        *ret_copy_blocks = least(cuda->sms * 3 / 5, COPY_BLOCKS);
        *ret_move_blocks = cuda->sms - *ret_copy_blocks;
    } else if (room > 0) {
        /* As many as are left: more than saturate the links. */
        *ret_move_blocks = least(cuda->sms, room);
    }
}

/*
 * The same for blocks that add up rows: device memory limits these, so all multiprocessors that are left do it. There
 * is at least one of each kind, even where the caller has set one in all.
 */
static void share_with_sums(const struct cuda_comm *cuda, int *ret_move_blocks, int *ret_copy_blocks)
{
    int all = is_strict(cuda) ? cuda->sms : cuda->all_sms / count_sharing(cuda);
    int sums = is_strict(cuda) || all - cuda->sms < COPY_BLOCKS ? all * 3 / 5 : all - cuda->sms;

    *ret_copy_blocks = sums > 0 ? sums : 1;
    *ret_move_blocks = all > *ret_copy_blocks ? all - *ret_copy_blocks : 1;
}

bool cuda_overlaps_copies(const struct cuda_comm *cuda, const ep_plan *plan, size_t row_bytes, size_t least)
{
    size_t rows = (size_t)cuda_rows_of_others(cuda, plan);
    int move_blocks, copy_blocks;

    /* In the expanded layout the rows of a source are not contiguous, and rows of other nodes arrive in any order. */
    if (cuda_crosses_nodes(cuda) || plan->args.flags & EP_PLAN_EXPANDED || rows * row_bytes < least ||
        cuda_plan_rows(plan) >= CUDA_ALL_ROWS)
        return false;
    share_with_copies(cuda, &move_blocks, &copy_blocks);
    /* Waiting blocks must not keep the blocks of another rank off the device. */
    return copy_blocks > 0 && count_sharing(cuda) * (move_blocks + copy_blocks) <= cuda->all_sms;
}

void cuda_fill_stage(const struct cuda_comm *cuda, int n_tokens, enum cuda_writes writes, size_t slot,
                     struct cuda_stage *ret_stage, struct cuda_shape *shape)
{
    size_t n = (size_t)shape->warps * (size_t)shape->stages;
    size_t max = (cuda->shared_limit - CUDA_BARRIERS_MAX) / n / 16 * 16, bytes;
    int32_t blocks = (n_tokens + CUDA_COUNT_TOKENS - 1) / CUDA_COUNT_TOKENS, of_part;

    *ret_stage = (struct cuda_stage){.move_blocks = cuda->sms};
    if (writes == CUDA_WRITES_SUMS)
        share_with_sums(cuda, &ret_stage->move_blocks, &ret_stage->copy_blocks);
    else if (writes == CUDA_WRITES_COPIES)
        share_with_copies(cuda, &ret_stage->move_blocks, &ret_stage->copy_blocks);
    shape->blocks = ret_stage->move_blocks;
    of_part = (blocks + CUDA_MAX_PARTS - 1) / CUDA_MAX_PARTS;
    ret_stage->parts = of_part ? (blocks + of_part - 1) / of_part : 0;
    ret_stage->part_tokens = (of_part ? of_part : 1) * CUDA_COUNT_TOKENS;
    if (writes != CUDA_WRITES_COPIES)
        return;
    if (slot < MIN_SLOT)
        slot = max < MIN_SLOT ? max : MIN_SLOT;
    ret_stage->slot_bytes = (int32_t)slot;
    bytes = cuda_shared_bytes(shape, slot);
    if (shape->shared_bytes < bytes)
        shape->shared_bytes = bytes;
}
