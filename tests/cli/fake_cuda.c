/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fake libepkit-cuda.so: the host backend under the name cuda, and GPUs described by the environment, to test the
 * command's use of GPUs on machines without any.
 *
 *   FAKE_GPUS             number of GPUs; CUDA_VISIBLE_DEVICES selects some of them
 *   FAKE_APART=N          no P2P between GPUs below number N and the others
 *   FAKE_OLD=N            GPUs from number N on are too old
 *   FAKE_ISOLATED=1       a rank cannot map the memory of a GPU that it does not see
 *   FAKE_NO_LL=1          no low-latency operations
 *   FAKE_USED=FILE        created when a rank uses a GPU
 */
#include "backend/cuda/module.h"
#include "backend/host/host.h"

#include "base/clock.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

EP_PRIVATE_API extern struct ep_backend_ops ep_backend_module;
EP_PRIVATE_API extern const struct ep_cuda_module ep_cuda_module;

struct ep_backend_ops ep_backend_module;

static int number(const char *name, int otherwise)
{
    const char *value = getenv(name);

    return value ? atoi(value) : otherwise;
}

/* Numbers of the visible GPUs. */
static int find_visible(int numbers[EP_CUDA_GPUS])
{
    const char *at = getenv("CUDA_VISIBLE_DEVICES");
    int there = number("FAKE_GPUS", 0), n = 0;

    for (int i = 0; !at && i < there; i++)
        numbers[n++] = i;
    while (at && *at && n < EP_CUDA_GPUS) {
        char *end;
        int chosen = (int)strtol(at, &end, 10);

        if (end == at || chosen < 0 || chosen >= there)
            break;
        numbers[n++] = chosen;
        at = end + (*end == ',');
    }
    return n;
}

static ep_status query_gpus(struct ep_cuda_gpus *ret_gpus)
{
    int numbers[EP_CUDA_GPUS], apart = number("FAKE_APART", EP_CUDA_GPUS), old = number("FAKE_OLD", EP_CUDA_GPUS);
    struct ep_cuda_gpus gpus = {.visible = find_visible(numbers)};

    if (!gpus.visible)
        return ep_fail(EP_E_UNSUPPORTED, "no usable GPU: none is visible");
    for (int i = 0; i < gpus.visible; i++)
        snprintf(gpus.address[i], sizeof(gpus.address[i]), "0000:%02x:00.0", numbers[i] + 0xe0);
    while (gpus.usable < gpus.visible && numbers[gpus.usable] < old)
        gpus.usable++;
    if (gpus.usable < gpus.visible)
        snprintf(gpus.why, sizeof(gpus.why), "GPU %s is too old", gpus.address[gpus.usable]);
    while (gpus.connected < gpus.usable && (numbers[gpus.connected] < apart) == (numbers[0] < apart))
        gpus.connected++;
    if (gpus.connected < gpus.usable)
        snprintf(gpus.why, sizeof(gpus.why), "no P2P between GPU %s and GPU %s", gpus.address[0],
                 gpus.address[gpus.connected]);
    *ret_gpus = gpus;
    return EP_OK;
}

static ep_status probe(void)
{
    struct ep_cuda_gpus gpus;

    return query_gpus(&gpus);
}

static ep_status comm_open(ep_comm *comm, const ep_boot *boot)
{
    int numbers[EP_CUDA_GPUS];
    FILE *used = getenv("FAKE_USED") ? fopen(getenv("FAKE_USED"), "we") : NULL;

    if (used)
        fclose(used);
    if (number("FAKE_ISOLATED", 0) && find_visible(numbers) < comm->nranks)
        return ep_fail(EP_E_UNSUPPORTED, "ep_comm_new: the GPU of rank %d cannot be mapped by rank %d",
                       (comm->rank + 1) % comm->nranks, comm->rank);
    return host_comm_open(comm, boot);
}

static void __attribute__((constructor)) fill_table(void)
{
    ep_backend_module = ep_backend_host;
    ep_backend_module.name = "cuda";
    ep_backend_module.probe = probe;
    ep_backend_module.comm_open = comm_open;
    if (number("FAKE_NO_LL", 0))
        ep_backend_module.ll_open = NULL;
}

static ep_status device_name(ep_comm *comm, char *ret_name, size_t bytes)
{
    snprintf(ret_name, bytes, "Made-up GPU %d", comm->rank);
    return EP_OK;
}

/* --- memory ------------------------------------------------------------------------------------------------------ */

static ep_status alloc(ep_comm *comm, size_t bytes, void **ret_memory)
{
    (void)comm;
    *ret_memory = calloc(1, bytes + 1);
    return *ret_memory ? EP_OK : ep_fail(EP_E_MEMORY, "no memory");
}

static void release(ep_comm *comm, void *memory)
{
    (void)comm;
    free(memory);
}

static ep_status copy(ep_comm *comm, void *to, const void *from, size_t bytes)
{
    (void)comm;
    if (bytes)
        memcpy(to, from, bytes);
    return EP_OK;
}

static ep_status fill(ep_comm *comm, void *to, int byte, size_t bytes)
{
    (void)comm;
    if (bytes)
        memset(to, byte, bytes);
    return EP_OK;
}

/* --- clock and baselines ---------------------------------------------------------------------------------------- */

static _Thread_local uint64_t started_ns, stopped_ns;

static ep_status clock_start(ep_comm *comm, int queued)
{
    (void)comm;
    (void)queued;
    started_ns = ep_now_ns();
    return EP_OK;
}

static ep_status clock_stop(ep_comm *comm)
{
    (void)comm;
    stopped_ns = ep_now_ns();
    return EP_OK;
}

static ep_status clock_read(ep_comm *comm, uint64_t *ret_ns)
{
    (void)comm;
    *ret_ns = stopped_ns - started_ns + 1;
    return EP_OK;
}

static ep_status set_sms(ep_comm *comm, int sms)
{
    (void)comm;
    (void)sms;
    return EP_OK;
}

static ep_status get_sms(ep_comm *comm, int low_latency, int *ret_sms)
{
    (void)comm;
    *ret_sms = low_latency ? 8 : 16;
    return EP_OK;
}

/* Without baselines, which need real GPUs (--no-baselines). */
const struct ep_cuda_module ep_cuda_module = {
    .abi = EP_CUDA_MODULE_ABI,
    .query_gpus = query_gpus,
    .device_name = device_name,
    .alloc = alloc,
    .free = release,
    .copy = copy,
    .fill = fill,
    .clock_start = clock_start,
    .clock_stop = clock_stop,
    .clock_read = clock_read,
    .set_sms = set_sms,
    .get_sms = get_sms,
};
