/* SPDX-License-Identifier: Apache-2.0 */
/* jobs.c - the table of jobs. */
#include "common/ranks/ranks_internal.h"

#include "cmd/bench/bench.h"
#include "cmd/test/check/cases.h"
#include "common/ranks/gpu.h"

const struct ranks_job ranks_jobs[] = {
    {"check", check_job},
    {BENCH_JOB, bench_job},
    {GPU_JOB, gpu_job},
    {NULL, NULL},
};
