/* SPDX-License-Identifier: Apache-2.0 */
/* Part of the module with points: see points.h. */
#include "points.h"

#include "backend/cuda/cuda.h"
#include "base/array.h"

/* Each point of a kind of kernel, by the phase for which the kernel waits first. */
#define POINT(kernel, point, phase, plans)                                                                             \
    {                                                                                                                  \
        kernel " " #point, CUDA_POINT(CUDA_POINT_##point, phase), plans                                                \
    }
#define POINTS(kernel, phase, plans)                                                                                   \
    POINT(kernel, PUBLISHED, phase, plans), POINT(kernel, BEGUN, phase, plans), POINT(kernel, MOVED, phase, plans),    \
        POINT(kernel, COMPLETE, phase, plans)
#define POINTS_OF_OPERATION(kernel, phase, plans) POINTS(kernel, phase, plans), POINT(kernel, SIGNALLED, phase, plans)

static const struct kernel_point points[] = {
    POINTS_OF_OPERATION("plan", EP_GROUP_PLAN_COUNTS, true),
    POINT("plan", ROW, EP_GROUP_PLAN_COUNTS, true),
    POINTS_OF_OPERATION("dispatch", EP_GROUP_DISPATCH_READY, true),
    POINT("dispatch", ROW, EP_GROUP_DISPATCH_READY, true),
    POINTS_OF_OPERATION("combine", EP_GROUP_COMBINE_READY, true),
    POINT("combine", ROW, EP_GROUP_COMBINE_READY, true),
    POINTS_OF_OPERATION("barrier", EP_GROUP_BARRIER, false),
    POINTS("ll-dispatch", EP_GROUP_LL_SEND, false),
    POINT("ll-dispatch", ROW, EP_GROUP_LL_SEND, false),
    POINTS("ll-combine", EP_GROUP_LL_COMBINE_BUFFER, false),
    POINT("ll-combine", ROW, EP_GROUP_LL_COMBINE_BUFFER, false),
};

static _Thread_local struct {
    int n, at;
    void (*reached)(void);
} calls;

const struct kernel_point *ep_cuda_point_at(int i)
{
    return (size_t)i < COUNT(points) ? &points[i] : NULL;
}

void ep_cuda_point_set(ep_comm *comm, const struct kernel_point *point)
{
    __atomic_store_n(&cuda_of(comm)->report->point, point->word, __ATOMIC_SEQ_CST);
}

bool ep_cuda_point_is_reached(ep_comm *comm)
{
    return __atomic_load_n(&cuda_of(comm)->report->point, __ATOMIC_ACQUIRE) & CUDA_POINT_REACHED;
}

void ep_cuda_point_release(ep_comm *comm)
{
    __atomic_store_n(&cuda_of(comm)->report->point, 0, __ATOMIC_RELEASE);
}

int ep_cuda_point_count_calls(int at, void (*reached)(void))
{
    int n = calls.n;

    calls.n = 0;
    calls.at = at;
    calls.reached = reached;
    return n;
}

/* The linker's --wrap: the results of all calls of the CUDA runtime pass through this function. */
ep_status __real_cuda_status(cudaError_t error, const char *call);
ep_status __wrap_cuda_status(cudaError_t error, const char *call);

ep_status __wrap_cuda_status(cudaError_t error, const char *call)
{
    if (++calls.n == calls.at)
        calls.reached();
    return __real_cuda_status(error, call);
}
