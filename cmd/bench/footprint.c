/* SPDX-License-Identifier: Apache-2.0 */
/*
 * footprint.c - memory of the library in addition to the caller's buffers: as reported by the library, and measured.
 *
 * Measured: growth of the process's private pages during plan, dispatch and combine (all buffers of the benchmark are
 * allocated before), plus the pages of the memory files of this process that are not buffers of the benchmark. Unlike
 * the resident set, neither counts a shared page more than once.
 */
#include "bench_case.h"

#include "base/error.h"

#include <ctype.h>
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Private pages of this process, in bytes; -1: unknown. */
static int64_t private_bytes(void)
{
    FILE *file = fopen("/proc/self/status", "re");
    char line[256];
    long long kib = -1;

    while (file && fgets(line, sizeof(line), file))
        if (sscanf(line, "RssAnon: %lld kB", &kib) == 1)
            break;
    if (file)
        fclose(file);
    return kib < 0 ? -1 : kib * 1024;
}

/* Pages of the library's memory files that are open; those of peers are mapped, but not open. -1: unknown. */
static int64_t memory_file_bytes(void)
{
    DIR *folder = opendir("/proc/self/fd");
    struct dirent *entry;
    int64_t bytes = 0;

    if (!folder)
        return -1;
    while ((entry = readdir(folder)) != NULL) {
        char target[64];
        struct stat info;
        ssize_t n;

        if (!isdigit((unsigned char)entry->d_name[0]))
            continue;
        n = readlinkat(dirfd(folder), entry->d_name, target, sizeof(target) - 1);
        if (n < 0)
            continue;
        target[n] = '\0';
        if (strncmp(target, "/memfd:epkit", 12) == 0 && fstat(atoi(entry->d_name), &info) == 0)
            bytes += (int64_t)info.st_blocks * 512;
    }
    closedir(folder);
    return bytes;
}

struct footprint {
    int64_t library, measured;
    int64_t n_unknown; /* ranks where `measured` is not known */
    int64_t data;      /* inputs and outputs of one dispatch and one combine */
};

/* Buffers of any engine: x and top-k in, rows and top-k out, sums out. */
static int64_t data_bytes(const struct bench_route *route, int hidden)
{
    int64_t row = 2 * (int64_t)hidden;
    int64_t choice = (int64_t)route->group.topk * (int64_t)(sizeof(int32_t) + sizeof(float));

    return route->n_tokens * (2 * row + choice) + route->counts.recv * (row + choice);
}

static ep_status run_once(struct bench_case *bench)
{
    ep_dispatch_args dispatch;
    ep_combine_args combine;

    bench_dispatch_args(bench, false, &dispatch);
    bench_combine_args(bench, &combine);
    EP_TRY(bench_plan_new(bench, &bench->route, &bench->plan));
    EP_TRY(ep_dispatch_sync(bench->plan, &dispatch));
    return ep_combine_sync(bench->plan, &combine);
}

static ep_status measure_footprint(struct bench_case *bench, struct footprint *ret_footprint)
{
    ep_comm_info info = {.size = sizeof(info)};
    int64_t before = private_bytes(), after, files;

    EP_TRY(run_once(bench));
    EP_TRY(ep_comm_get_info(bench->ctx->comm, &info));
    after = private_bytes();
    files = memory_file_bytes();
    ret_footprint->library = (int64_t)info.library_bytes;
    ret_footprint->data = data_bytes(&bench->route, bench->request->hidden);
    ret_footprint->measured = after - before + files - bench->symmetric_bytes;
    /* Not with threads, which share one process, and not for device memory. */
    ret_footprint->n_unknown = before < 0 || after < 0 || files < 0 || ret_footprint->measured < 0 ||
                               bench->ctx->spec->boot == RANKS_THREADS || bench->ctx->memory;
    return EP_OK;
}

static void emit(const struct bench_case *bench, const struct footprint *sum)
{
    struct ranks_ctx *ctx = bench->ctx;
    int64_t held = !sum->n_unknown && sum->measured > sum->library ? sum->measured : sum->library;
    json_t *event = json_pack("{s:s, s:i, s:i, s:i, s:i, s:I, s:I, s:f}", "event", "memory", "ranks", ctx->nranks,
                              "nodes", ctx->nnodes, "tokens", bench->tokens, "hidden", bench->request->hidden,
                              "data_bytes", (json_int_t)(sum->data / ctx->nranks), "library_bytes",
                              (json_int_t)(sum->library / ctx->nranks), "share", (double)held / (double)sum->data);

    json_object_set_new(event, "measured_bytes",
                        sum->n_unknown ? json_null() : json_integer(sum->measured / ctx->nranks));
    ranks_emit(ctx, event);
}

int bench_run_footprint(struct bench_case *bench)
{
    struct ranks_ctx *ctx = bench->ctx;
    struct footprint sum;
    ep_status status = measure_footprint(bench, &sum);

    if (status != EP_OK)
        return ranks_emit_error(ctx, status, "first plan, dispatch and combine");
    status = bench_sum(ctx, &sum, sizeof(sum));
    if (status != EP_OK)
        return ranks_emit_error(ctx, status, "adding up the ranks");
    if (ctx->rank == 0)
        emit(bench, &sum);
    return 0;
}
