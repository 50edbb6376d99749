/* SPDX-License-Identifier: Apache-2.0 */
/* The layout of a routing: the device makes it if the outputs are in device memory, otherwise the host does. */
#include "backend/cuda/cuda.h"

#include "backend/cuda/device.h"
#include "backend/cuda/plan.h"
#include "backend/cuda/report.h"
#include "backend/cuda/stream.h"
#include "core/routing.h"

#include <stdlib.h>

static ep_status lay_out_on_host(ep_comm *comm, const ep_plan_args *args, ep_layout *layout)
{
    struct cuda_comm *cuda = cuda_of(comm);
    size_t bytes = (size_t)args->n_tokens * (size_t)args->topk * ep_dtype_bytes((ep_dtype)args->idx_type);
    ep_plan_args mine = *args;
    struct cuda_scope scope;
    void *copy = NULL;
    ep_status status;

    EP_TRY(cuda_scope_begin(cuda, &scope));
    status = cuda_fetch_routing(args->topk_idx, bytes, cuda_stream_of(cuda, args->stream), &copy);
    cuda_scope_end(&scope);
    mine.topk_idx = copy;
    if (status == EP_OK)
        status = ep_routing_layout(comm, &mine, layout);
    free(copy);
    return status;
}

/* `output` may be NULL. */
static ep_status zero(void *output, size_t bytes, cudaStream_t stream)
{
    return output && bytes ? cuda_status(cudaMemsetAsync(output, 0, bytes, stream), "cudaMemsetAsync") : EP_OK;
}

static ep_status lay_out_on_device(const struct cuda_call *call, const ep_comm *comm, const ep_plan_args *args,
                                   const ep_layout *layout)
{
    static const char name[] = "ep_plan_layout";
    struct cuda_layout l = {.topk_idx = args->topk_idx,
                            .per_rank = layout->tokens_per_rank,
                            .per_node = layout->tokens_per_node,
                            .per_expert = layout->tokens_per_expert,
                            .in_rank = layout->token_in_rank,
                            .idx64 = args->idx_type == EP_I64,
                            .n_tokens = args->n_tokens,
                            .topk = args->topk,
                            .n_experts = args->n_experts,
                            .nranks = comm->nranks,
                            .ranks_per_node = comm->ranks_per_node};
    size_t nranks = (size_t)comm->nranks;

    EP_TRY(cuda_check_pointer(call->cuda, name, "topk_idx", args->n_tokens ? l.topk_idx : NULL));
    EP_TRY(cuda_check_pointer(call->cuda, name, "tokens_per_rank", l.per_rank));
    EP_TRY(cuda_check_pointer(call->cuda, name, "tokens_per_node", l.per_node));
    EP_TRY(cuda_check_pointer(call->cuda, name, "tokens_per_expert", l.per_expert));
    EP_TRY(cuda_check_pointer(call->cuda, name, "token_in_rank", args->n_tokens ? l.in_rank : NULL));
    EP_TRY(zero(l.per_rank, nranks * sizeof(int32_t), call->stream));
    EP_TRY(zero(l.per_node, (size_t)comm->nnodes * sizeof(int32_t), call->stream));
    EP_TRY(zero(l.per_expert, (size_t)args->n_experts * sizeof(int32_t), call->stream));
    cuda_fill_waits(call->cuda, EP_GROUP_PLAN_COUNTS, EP_GROUP_PLAN_COUNTS, &l.waits);
    return cuda_status(cuda_launch_layout(&l, call->stream), "layout kernel");
}

/* A wait for the stream must wait for this, too, so it counts as an operation, although no peer takes part. */
ep_status cuda_plan_layout(ep_comm *comm, const ep_plan_args *args, ep_layout *layout)
{
    const void *outputs[] = {layout->tokens_per_rank, layout->tokens_per_node, layout->tokens_per_expert,
                             layout->token_in_rank};
    struct cuda_call call;
    bool device = false;
    ep_status status;

    for (size_t i = 0; i < sizeof(outputs) / sizeof(outputs[0]) && !device; i++)
        if (outputs[i])
            EP_TRY(cuda_is_device_memory(outputs[i], &device));
    if (!device)
        return lay_out_on_host(comm, args, layout);
    EP_TRY(cuda_call_begin(cuda_of(comm), args->stream, true, &call));
    status = lay_out_on_device(&call, comm, args, layout);
    call.queued = status == EP_OK;
    return cuda_call_end(&call, status);
}
