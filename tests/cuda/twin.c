/* SPDX-License-Identifier: Apache-2.0 */
#include "twin.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int twin_new(const struct group *group, const char *name, size_t bytes, enum memory memory, struct twin *ret_twin)
{
    struct twin *twin = ret_twin;

    *twin = (struct twin){.name = name, .bytes = bytes};
    twin->host = malloc(bytes + GUARD);
    EXPECT(twin->host, "no memory for %zu bytes of %s", bytes, name);
    if (memory != ORDINARY)
        CALL(ep_alloc(group->cuda, bytes + GUARD, &twin->shared));
    if (memory == SYMMETRIC)
        twin->device = twin->shared;
    else
        CUDA(cudaMalloc((void **)&twin->device, bytes + GUARD));
    return twin_poison(group, twin);
}

int twin_poison_device(const struct group *group, const struct twin *twin)
{
    CUDA(cudaMemsetAsync(twin->device, POISON, twin->bytes + GUARD, group->stream));
    return 0;
}

int twin_poison(const struct group *group, const struct twin *twin)
{
    memset(twin->host, POISON, twin->bytes + GUARD);
    return twin_poison_device(group, twin);
}

int twin_push(const struct group *group, const struct twin *twin)
{
    CUDA(cudaMemcpyAsync(twin->device, twin->host, twin->bytes + GUARD, cudaMemcpyDefault, group->stream));
    CUDA(cudaStreamSynchronize(group->stream));
    return 0;
}

static void say_difference(const struct twin *twin, const unsigned char *got, const char *phase)
{
    size_t first = twin->bytes + GUARD, count = 0;
    char place[80] = "";

    for (size_t i = twin->bytes + GUARD; i-- > 0;)
        if (got[i] != twin->host[i]) {
            first = i;
            count++;
        }
    if (first >= twin->bytes)
        snprintf(place, sizeof(place), ", behind its end");
    else if (twin->row_bytes)
        snprintf(place, sizeof(place), ", byte %zu of row %zu", first % twin->row_bytes, first / twin->row_bytes);
    test_say("%s: %s: byte %zu of %zu%s is 0x%02x, not 0x%02x; %zu bytes differ (0x%02x is what nobody may write)",
             phase, twin->name, first, twin->bytes, place, got[first], twin->host[first], count, POISON);
}

int twin_compare(const struct group *group, const struct twin *twin, const char *phase)
{
    unsigned char *got = malloc(twin->bytes + GUARD);
    int code = PASSED;

    EXPECT(got, "no memory for %zu bytes of %s", twin->bytes, twin->name);
    CUDA(cudaMemcpyAsync(got, twin->device, twin->bytes + GUARD, cudaMemcpyDefault, group->stream));
    CUDA(cudaStreamSynchronize(group->stream));
    if (memcmp(got, twin->host, twin->bytes + GUARD) != 0) {
        say_difference(twin, got, phase);
        code = DIFFERS;
    }
    free(got);
    return code;
}

int twin_free(const struct group *group, bool failed, struct twin *twin)
{
    void *device = twin->device, *shared = twin->shared;

    free(twin->host);
    twin->host = twin->device = NULL;
    twin->shared = NULL;
    if (device != shared)
        CUDA(cudaFree(device));
    if (!failed)
        CALL(ep_free(group->cuda, shared));
    return 0;
}
