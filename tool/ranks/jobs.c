/* SPDX-License-Identifier: Apache-2.0 */
/* jobs.c - the table of jobs. */
#include "ranks_internal.h"

#include "bench/bench.h"
#include "check/cases.h"
#include "gpu.h"

const struct ranks_job ranks_jobs[] = {
    {"check", check_job},
    {BENCH_JOB, bench_job},
    {GPU_JOB, gpu_job},
    {NULL, NULL},
};
