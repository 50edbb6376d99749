/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The speed of a GPU's links, queried from NVML, the driver's management library. It is loaded for the query, because
 * neither the library nor its header comes with the CUDA runtime.
 *
 * The query has no deadline of its own. A driver that does not answer blocks its caller inside the kernel, where no
 * thread can be ended, and a library must not start child processes in a program with CUDA and MPI. A child would not
 * help either: the communicator has just opened the GPU through the same driver, and the next CUDA call would block. A
 * program that must not hang queries in a child before, as the command does.
 */
#include "backend/cuda/cuda.h"

#include <dlfcn.h>

#define NVML "libnvidia-ml.so.1"

/* NVML fields: number of links; MB/s of a link in one direction, of link `scope` or common to all links. A driver may
   know only one of the two speeds. */
enum { FIELD_LINK_COUNT = 91, FIELD_LINK_SPEED = 164, FIELD_COMMON_SPEED = 90 };
enum { VALUE_UNSIGNED = 1, VALUE_UNSIGNED_LONG = 2, VALUE_UNSIGNED_LONG_LONG = 3 };

struct field {
    unsigned id, scope;
    long long timestamp, latency_us;
    unsigned type;
    int result;
    union {
        double real;
        unsigned number;
        unsigned long long number64;
    } value;
};

struct nvml {
    void *library;
    int (*init)(void);
    int (*shutdown)(void);
    int (*by_pci)(const char *bus_id, void **ret_device);
    int (*fields)(void *device, int n, struct field *fields);
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

static uint64_t number_of(const struct field *field)
{
    if (field->result != 0)
        return 0;
    return field->type == VALUE_UNSIGNED                                                   ? field->value.number
           : field->type == VALUE_UNSIGNED_LONG || field->type == VALUE_UNSIGNED_LONG_LONG ? field->value.number64
                                                                                           : 0;
}

uint64_t cuda_link_mbps(const char *bus_id)
{
    struct field fields[] = {{.id = FIELD_LINK_COUNT}, {.id = FIELD_LINK_SPEED}, {.id = FIELD_COMMON_SPEED}};
    uint64_t speed;
    struct nvml nvml = {.library = NULL};
    uint64_t rate = 0;
    void *device;

    if (load(&nvml) && nvml.init() == 0) {
        if (nvml.by_pci(bus_id, &device) == 0 && nvml.fields(device, 3, fields) == 0) {
            speed = number_of(&fields[1]);
            rate = number_of(&fields[0]) * (speed ? speed : number_of(&fields[2]));
        }
        nvml.shutdown();
    }
    if (nvml.library)
        dlclose(nvml.library);
    return rate;
}
