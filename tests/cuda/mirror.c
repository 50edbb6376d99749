/* SPDX-License-Identifier: Apache-2.0 */
#include "mirror.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int mirror_new(const struct group *group, const char *name, size_t bytes, enum memory memory, struct mirror *ret_mirror)
{
    struct mirror *mirror = ret_mirror;

    *mirror = (struct mirror){.name = name, .bytes = bytes};
    mirror->host = malloc(bytes + GUARD);
    EXPECT(mirror->host, "no memory for %zu bytes of %s", bytes, name);
    if (memory != ORDINARY)
        CALL(ep_alloc(group->cuda, bytes + GUARD, &mirror->shared));
    if (memory == SYMMETRIC)
        mirror->device = mirror->shared;
    else
        CUDA(cudaMalloc((void **)&mirror->device, bytes + GUARD));
    return mirror_poison(group, mirror);
}

int mirror_poison_device(const struct group *group, const struct mirror *mirror)
{
    CUDA(cudaMemsetAsync(mirror->device, POISON, mirror->bytes + GUARD, group->stream));
    return 0;
}

int mirror_poison(const struct group *group, const struct mirror *mirror)
{
    memset(mirror->host, POISON, mirror->bytes + GUARD);
    return mirror_poison_device(group, mirror);
}

int mirror_push(const struct group *group, const struct mirror *mirror)
{
    CUDA(cudaMemcpyAsync(mirror->device, mirror->host, mirror->bytes + GUARD, cudaMemcpyDefault, group->stream));
    CUDA(cudaStreamSynchronize(group->stream));
    return 0;
}

static void report_difference(const struct mirror *mirror, const unsigned char *got, const char *phase)
{
    size_t first = mirror->bytes + GUARD, count = 0;
    char position[80] = "";

    for (size_t i = mirror->bytes + GUARD; i-- > 0;)
        if (got[i] != mirror->host[i]) {
            first = i;
            count++;
        }
    if (first >= mirror->bytes)
        snprintf(position, sizeof(position), ", beyond its end");
    else if (mirror->row_bytes)
        snprintf(position, sizeof(position), ", byte %zu of row %zu", first % mirror->row_bytes,
                 first / mirror->row_bytes);
    test_report("%s: %s: byte %zu of %zu%s is 0x%02x, not 0x%02x; %zu bytes differ (0x%02x: must not be written)",
                phase, mirror->name, first, mirror->bytes, position, got[first], mirror->host[first], count, POISON);
}

int mirror_compare(const struct group *group, const struct mirror *mirror, const char *phase)
{
    unsigned char *got = malloc(mirror->bytes + GUARD);
    int code = PASSED;

    EXPECT(got, "no memory for %zu bytes of %s", mirror->bytes, mirror->name);
    CUDA(cudaMemcpyAsync(got, mirror->device, mirror->bytes + GUARD, cudaMemcpyDefault, group->stream));
    CUDA(cudaStreamSynchronize(group->stream));
    if (memcmp(got, mirror->host, mirror->bytes + GUARD) != 0) {
        report_difference(mirror, got, phase);
        code = DIFFERS;
    }
    free(got);
    return code;
}

int mirror_free(const struct group *group, bool failed, struct mirror *mirror)
{
    void *device = mirror->device, *shared = mirror->shared;

    free(mirror->host);
    mirror->host = mirror->device = NULL;
    mirror->shared = NULL;
    if (device != shared)
        CUDA(cudaFree(device));
    if (!failed)
        CALL(ep_free(group->cuda, shared));
    return 0;
}
