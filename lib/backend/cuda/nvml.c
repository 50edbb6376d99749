/* SPDX-License-Identifier: Apache-2.0 */
/*
 * NVML is loaded for each query, because neither the library nor its header comes with the CUDA runtime.
 *
 * The query has no deadline of its own. A driver that does not answer blocks its caller inside the kernel, where no
 * thread can be ended, and a library must not start child processes in a program with CUDA and MPI. A child would not
 * help either: the communicator has just opened the GPU through the same driver, and the next CUDA call would block. A
 * program that must not hang queries in a child before, as the command does.
 */
#include "backend/cuda/nvml.h"

#include <dlfcn.h>
#include <stddef.h>

#define NVML "libnvidia-ml.so.1"

enum { VALUE_UNSIGNED = 1, VALUE_UNSIGNED_LONG = 2, VALUE_UNSIGNED_LONG_LONG = 3 };

struct nvml {
    void *library;
    int (*init)(void);
    int (*shutdown)(void);
    int (*by_pci)(const char *bus_id, void **ret_device);
    int (*fields)(void *device, int n, struct cuda_nvml_field *fields);
};

static bool load(struct nvml *nvml)
{
    nvml->library = dlopen(NVML, RTLD_NOW | RTLD_LOCAL);
    if (!nvml->library)
        return false;
    *(void **)&nvml->init = dlsym(nvml->library, "nvmlInit_v2");
    *(void **)&nvml->shutdown = dlsym(nvml->library, "nvmlShutdown");
    *(void **)&nvml->by_pci = dlsym(nvml->library, "nvmlDeviceGetHandleByPciBusId_v2");
    *(void **)&nvml->fields = dlsym(nvml->library, "nvmlDeviceGetFieldValues");
    return nvml->init && nvml->shutdown && nvml->by_pci && nvml->fields;
}

bool cuda_nvml_number(const struct cuda_nvml_field *field, uint64_t *ret_number)
{
    if (field->result != 0)
        return false;
    if (field->type == VALUE_UNSIGNED)
        *ret_number = field->value.number;
    else if (field->type == VALUE_UNSIGNED_LONG || field->type == VALUE_UNSIGNED_LONG_LONG)
        *ret_number = field->value.number64;
    else
        return false;
    return true;
}

bool cuda_nvml_read(const char *bus_id, struct cuda_nvml_field *fields, int n)
{
    struct nvml nvml = {.library = NULL};
    bool ok = false;
    void *device;

    if (load(&nvml) && nvml.init() == 0) {
        ok = nvml.by_pci(bus_id, &device) == 0 && nvml.fields(device, n, fields) == 0;
        nvml.shutdown();
    }
    if (nvml.library)
        dlclose(nvml.library);
    return ok;
}

static uint64_t number_or_0(const struct cuda_nvml_field *field)
{
    uint64_t number;

    return cuda_nvml_number(field, &number) ? number : 0;
}

uint64_t cuda_link_mbps(const char *bus_id)
{
    /*
     * Number of links; MB/s of a link in one direction, of link `scope` or common to all links. A driver may know only
     * one of the two speeds.
     */
    enum { LINK_COUNT = 91, LINK_SPEED = 164, COMMON_SPEED = 90 };
    struct cuda_nvml_field fields[] = {{.id = LINK_COUNT}, {.id = LINK_SPEED}, {.id = COMMON_SPEED}};
    uint64_t speed;

    if (!cuda_nvml_read(bus_id, fields, sizeof(fields) / sizeof(fields[0])))
        return 0;
    speed = number_or_0(&fields[1]);
    return number_or_0(&fields[0]) * (speed ? speed : number_or_0(&fields[2]));
}
