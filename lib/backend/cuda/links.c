/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How fast the links of a GPU are: asked of the driver's management library, which is loaded for the question, because
 * neither the library nor its header comes with the CUDA runtime.
 *
 * The question has no deadline of its own. A driver that does not answer holds its caller inside the kernel, where no
 * thread can be ended, and a child process is nothing that a library may start in a program with CUDA and MPI. Nor
 * would one help: the communicator that asks has just opened the GPU by the same driver, and the next call of CUDA
 * would wait for it. Who must not hang asks in a child before, as the command does.
 */
#include "backend/cuda/cuda.h"

#include <dlfcn.h>

#define NVML "libnvidia-ml.so.1"

/* As in the documentation of NVML: links; MB/s of one link in one direction, of link `scope` or common to all of them,
   of which a driver may know only one. */
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
        unsigned long long wide;
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
           : field->type == VALUE_UNSIGNED_LONG || field->type == VALUE_UNSIGNED_LONG_LONG ? field->value.wide
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
