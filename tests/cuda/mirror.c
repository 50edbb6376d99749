/* SPDX-License-Identifier: Apache-2.0 */
#include "mirror.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int alloc_device(const struct group *group, struct mirror *mirror)
{
    size_t bytes = mirror->bytes + GUARD;

    if (mirror->memory == SYMMETRIC || mirror->memory == ORDINARY_AMONG)
        CALL(ep_alloc(group->cuda, bytes, &mirror->shared));
    /* Its ep_free() has the peers unmap the registered memory. */
    if (mirror->memory == REGISTERED)
        CALL(ep_alloc(group->cuda, 0, &mirror->shared));
    if (mirror->memory == SYMMETRIC)
        mirror->device = mirror->shared;
    else if (mirror->memory == ALLOCATED_LOCAL)
        CALL(ep_alloc_local(group->cuda, bytes, (void **)&mirror->device));
    else
        CUDA(cudaMalloc((void **)&mirror->device, bytes));
    if (mirror->memory == REGISTERED)
        CALL(ep_register(group->cuda, mirror->device, bytes));
    return 0;
}

int mirror_new(const struct group *group, const char *name, size_t bytes, enum memory memory, struct mirror *ret_mirror)
{
    struct mirror *mirror = ret_mirror;

    *mirror = (struct mirror){.name = name, .bytes = bytes, .memory = memory};
    mirror->host = malloc(bytes + GUARD);
    EXPECT(mirror->host, "no memory for %zu bytes of %s", bytes, name);
    TRY(alloc_device(group, mirror));
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
    struct mirror old = *mirror;

    *mirror = (struct mirror){.name = old.name};
    free(old.host);
    if (old.memory == REGISTERED && !failed)
        CALL(ep_unregister(group->cuda, old.device));
    if (!failed)
        CALL(ep_free(group->cuda, old.shared));
    if (old.memory == ALLOCATED_LOCAL)
        CALL(ep_free_local(group->cuda, old.device));
    else if (old.memory != SYMMETRIC && !(failed && old.memory == REGISTERED))
        CUDA(cudaFree(old.device));
    return 0;
}
