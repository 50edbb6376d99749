/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nvml.c - queries the NVIDIA Management Library, in a child process.
 *
 * It declares the part that it uses, as the NVML API Reference Guide (docs.nvidia.com/deploy/nvml-api) describes it;
 * names with _v2 and _v3 are those that its header maps the plain ones to. The library belongs to the driver and may be
 * older than a function: missing functions are not called.
 */
#include "nvml.h"

#include "common/text.h"
#include "read_hardware.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#define NVML_SUCCESS 0
#define NVML_ERROR_GPU_IS_LOST 15
#define NVML_DRIVER_BYTES 80
#define NVML_NAME_BYTES 96
#define NVML_UUID_BYTES 96
#define NVML_MEMORY_ERROR_UNCORRECTED 1
#define NVML_VOLATILE_ECC 0
#define NVML_LINK_TO_GPU 0 /* nvmlIntNvLinkDeviceType_t */
#define NVML_LINK_TO_SWITCH 2
#define NVML_SLOW_HARDWARE 0x08ULL /* nvmlClocksEventReason*: by half or more */
#define NVML_SLOW_SW_THERMAL 0x20ULL
#define NVML_SLOW_HW_THERMAL 0x40ULL
#define NVML_SLOW_POWER_BRAKE 0x80ULL
#define NVML_FABRIC_NOT_SUPPORTED 0 /* NVML_GPU_FABRIC_STATE_* */
#define NVML_FABRIC_NOT_STARTED 1
#define NVML_FABRIC_IN_PROGRESS 2
#define NVML_FABRIC_COMPLETED 3

typedef int nvml_return;
typedef struct nvml_device_opaque *nvml_device;

/* nvmlPciInfo_t of nvmlDeviceGetPciInfo_v3 and nvmlDeviceGetNvLinkRemotePciInfo_v2. */
struct nvml_pci {
    char bus_id_legacy[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
};

/* nvmlGpuFabricInfo_v2_t. The version field identifies the struct: its size, and the version in the upper byte. */
struct nvml_fabric {
    unsigned version;
    unsigned char cluster_uuid[16];
    nvml_return status; /* of the registration, once it is completed */
    unsigned clique;
    unsigned char state;
    unsigned health;
};

/* nvmlMemory_t, in bytes. */
struct nvml_memory {
    unsigned long long total, free, used;
};

/* nvmlConfComputeSystemState_t; nvmlSystemConfComputeSettings_v1_t, which also has the mode of several GPUs. */
struct nvml_cc_state {
    unsigned environment, feature, devtools;
};

struct nvml_cc_settings {
    unsigned version, environment, feature, devtools, multi_gpu;
};

#define NVML_CC_SETTINGS_VERSION ((unsigned)sizeof(struct nvml_cc_settings) | 1u << 24)
#define NVML_FABRIC_VERSION ((unsigned)sizeof(struct nvml_fabric) | 2u << 24)

/* X(name in the library, member, required, result, parameters) */
/* clang-format off */
#define NVML_FUNCTIONS(X) \
    X(nvmlInit_v2, init, true, nvml_return, (void)) \
    X(nvmlErrorString, error, true, const char *, (nvml_return result)) \
    X(nvmlSystemGetDriverVersion, driver_version, true, nvml_return, (char *version, unsigned bytes)) \
    X(nvmlDeviceGetCount_v2, count, true, nvml_return, (unsigned *ret_n)) \
    X(nvmlDeviceGetHandleByIndex_v2, by_index, true, nvml_return, (unsigned index, nvml_device *ret_device)) \
    X(nvmlDeviceGetPciInfo_v3, pci, true, nvml_return, (nvml_device device, struct nvml_pci *ret_pci)) \
    X(nvmlDeviceGetName, name, false, nvml_return, (nvml_device device, char *name, unsigned bytes)) \
    X(nvmlDeviceGetUUID, uuid, false, nvml_return, (nvml_device device, char *uuid, unsigned bytes)) \
    X(nvmlDeviceGetMinorNumber, minor, false, nvml_return, (nvml_device device, unsigned *ret_minor)) \
    X(nvmlDeviceGetCudaComputeCapability, capability, false, nvml_return, (nvml_device device, int *ret_major, int *ret_minor)) \
    X(nvmlDeviceGetTotalEccErrors, ecc_errors, false, nvml_return, (nvml_device device, int error, int counter, unsigned long long *ret_n)) \
    X(nvmlDeviceGetRemappedRows, remapped, false, nvml_return, (nvml_device device, unsigned *ret_corrected, unsigned *ret_uncorrected, unsigned *ret_pending, unsigned *ret_failed)) \
    X(nvmlDeviceGetMigMode, mig_mode, false, nvml_return, (nvml_device device, unsigned *ret_current, unsigned *ret_pending)) \
    X(nvmlDeviceGetMemoryInfo, memory, false, nvml_return, (nvml_device device, struct nvml_memory *ret_memory)) \
    X(nvmlDeviceGetCurrentClocksEventReasons, clocks, false, nvml_return, (nvml_device device, unsigned long long *ret_reasons)) \
    X(nvmlDeviceGetCurrentClocksThrottleReasons, clocks_old, false, nvml_return, (nvml_device device, unsigned long long *ret_reasons)) \
    X(nvmlDeviceGetNvLinkState, link_state, false, nvml_return, (nvml_device device, unsigned link, unsigned *ret_active)) \
    X(nvmlDeviceGetNvLinkRemotePciInfo_v2, link_pci, false, nvml_return, (nvml_device device, unsigned link, struct nvml_pci *ret_pci)) \
    X(nvmlDeviceGetNvLinkRemoteDeviceType, link_type, false, nvml_return, (nvml_device device, unsigned link, int *ret_type)) \
    X(nvmlDeviceGetGpuFabricInfoV, fabric, false, nvml_return, (nvml_device device, struct nvml_fabric *fabric)) \
    X(nvmlSystemGetConfComputeState, cc_state, false, nvml_return, (struct nvml_cc_state *ret_state)) \
    X(nvmlSystemGetConfComputeGpusReadyState, cc_ready, false, nvml_return, (unsigned *ret_is_accepting)) \
    X(nvmlSystemGetConfComputeSettings, cc_settings, false, nvml_return, (struct nvml_cc_settings *settings))
/* clang-format on */

struct nvml {
#define MEMBER(name, member, needed, result, parameters) result(*member) parameters;
    NVML_FUNCTIONS(MEMBER)
};

struct nvml_symbol {
    const char *name;
    size_t offset;
    bool is_needed;
};

static const struct nvml_symbol nvml_symbols[] = {
#define SYMBOL(name, member, needed, result, parameters) {#name, offsetof(struct nvml, member), needed},
    NVML_FUNCTIONS(SYMBOL)};

/* The second is where GKE mounts the driver, which only containers with a GPU have in their search path. */
static const char *const nvml_files[] = {"libnvidia-ml.so.1", "/usr/local/nvidia/lib64/libnvidia-ml.so.1"};

static json_t *error_answer(const char *what, const char *why)
{
    return json_pack("{s:o}", "error", json_sprintf("%s%s%s", what, *what ? ": " : "", why));
}

/* False with *ret_answer, the error. */
static bool nvml_load(struct nvml *ret_nvml, json_t **ret_answer)
{
    struct nvml nvml = {0};
    void *library = NULL;
    char why[256] = "";

    for (size_t i = 0; i < COUNT(nvml_files) && !library; i++) {
        library = dlopen(nvml_files[i], RTLD_NOW | RTLD_LOCAL);
        /* dlerror() names the file. Report the first error: that file may exist and be broken. */
        if (!library && !*why)
            snprintf(why, sizeof(why), "%s", dlerror());
    }
    if (!library) {
        *ret_answer = error_answer("", why);
        return false;
    }
    for (size_t i = 0; i < COUNT(nvml_symbols); i++) {
        void *function = dlsym(library, nvml_symbols[i].name);

        if (!function && nvml_symbols[i].is_needed) {
            *ret_answer = error_answer("libnvidia-ml.so.1 has no function", nvml_symbols[i].name);
            return false;
        }
        memcpy((char *)&nvml + nvml_symbols[i].offset, &function, sizeof(function));
    }
    *ret_nvml = nvml;
    return true;
}

static const char *fabric_name(const struct nvml_fabric *fabric)
{
    static const char *const names[] = {[NVML_FABRIC_NOT_SUPPORTED] = "none",
                                        [NVML_FABRIC_NOT_STARTED] = "starting",
                                        [NVML_FABRIC_IN_PROGRESS] = "starting",
                                        [NVML_FABRIC_COMPLETED] = "ready"};

    if (fabric->state == NVML_FABRIC_COMPLETED && fabric->status != NVML_SUCCESS)
        return "failed";
    return fabric->state < COUNT(names) ? names[fabric->state] : NULL;
}

/* The PCI address of NVML; false if it is invalid. */
static bool print_address(struct nvml_pci *pci, char ret_text[20])
{
    struct pci_address address;

    pci->bus_id[sizeof(pci->bus_id) - 1] = '\0';
    if (!parse_pci_address(pci->bus_id, &address))
        return false;
    print_pci_address(&address, ret_text);
    return true;
}

/* The NVLink domain of the GPU: the UUID of its cluster, "" if that is zero, and the number of its clique. */
static json_t *domain_of(const struct nvml_fabric *fabric)
{
    static const unsigned char zero[sizeof(fabric->cluster_uuid)];
    char uuid[2 * sizeof(zero) + 5] = "";

    for (size_t i = 0; i < sizeof(zero) && memcmp(fabric->cluster_uuid, zero, sizeof(zero)) != 0; i++)
        sprintf(uuid + strlen(uuid), i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", fabric->cluster_uuid[i]);
    return json_pack("{s:s, s:I}", "cluster", uuid, "clique", (json_int_t)fabric->clique);
}

static json_t *query_link(const struct nvml *nvml, nvml_device device, unsigned link)
{
    struct nvml_pci pci = {0};
    char text[20];
    int type = -1;

    if (nvml->link_type && nvml->link_type(device, link, &type) == NVML_SUCCESS && type == NVML_LINK_TO_SWITCH)
        return json_string("switch");
    if (type == NVML_LINK_TO_GPU && nvml->link_pci && nvml->link_pci(device, link, &pci) == NVML_SUCCESS &&
        print_address(&pci, text))
        return json_string(text);
    return json_string("up");
}

static json_t *query_links(const struct nvml *nvml, nvml_device device)
{
    json_t *links = json_array();

    for (unsigned i = 0; i < TOPO_MAX_NVLINKS && nvml->link_state; i++) {
        unsigned active = 0;

        /* An index beyond the links of the board is an invalid argument; a board may skip indices. */
        if (nvml->link_state(device, i, &active) == NVML_SUCCESS)
            json_array_append_new(links, active ? query_link(nvml, device, i) : json_string("down"));
    }
    return links;
}

/* Texts that are not UTF-8 are omitted: json_string() gives NULL for them. */
static void query_identity(const struct nvml *nvml, nvml_device device, json_t *gpu)
{
    char name[NVML_NAME_BYTES] = "", uuid[NVML_UUID_BYTES] = "";
    int cc_major, cc_minor;
    unsigned minor;

    if (nvml->name && nvml->name(device, name, sizeof(name) - 1) == NVML_SUCCESS)
        json_object_set_new(gpu, "name", json_string(name));
    if (nvml->uuid && nvml->uuid(device, uuid, sizeof(uuid) - 1) == NVML_SUCCESS)
        json_object_set_new(gpu, "uuid", json_string(uuid));
    if (nvml->minor && nvml->minor(device, &minor) == NVML_SUCCESS)
        json_object_set_new(gpu, "minor", json_integer(minor));
    if (nvml->capability && nvml->capability(device, &cc_major, &cc_minor) == NVML_SUCCESS)
        json_object_set_new(gpu, "cc", json_pack("[i, i]", cc_major, cc_minor));
}

/* Before 535 only under its older name. Power caps, idling and clocks set by the user are not faults. */
static void query_clocks(const struct nvml *nvml, nvml_device device, json_t *gpu)
{
    unsigned long long reasons = 0;

    if (!(nvml->clocks && nvml->clocks(device, &reasons) == NVML_SUCCESS) &&
        !(nvml->clocks_old && nvml->clocks_old(device, &reasons) == NVML_SUCCESS))
        return;
    json_object_set_new(gpu, "slowdown",
                        json_pack("{s:b, s:b, s:b, s:b}", "hardware", (reasons & NVML_SLOW_HARDWARE) != 0, "hw_thermal",
                                  (reasons & NVML_SLOW_HW_THERMAL) != 0, "power_brake",
                                  (reasons & NVML_SLOW_POWER_BRAKE) != 0, "sw_thermal",
                                  (reasons & NVML_SLOW_SW_THERMAL) != 0));
}

static void query_health(const struct nvml *nvml, nvml_device device, json_t *gpu)
{
    struct nvml_fabric fabric = {.version = NVML_FABRIC_VERSION};
    unsigned corrected, uncorrected, pending, failed;
    struct nvml_memory memory = {0};
    unsigned mig, mig_pending;
    unsigned long long errors;

    if (nvml->ecc_errors &&
        nvml->ecc_errors(device, NVML_MEMORY_ERROR_UNCORRECTED, NVML_VOLATILE_ECC, &errors) == NVML_SUCCESS)
        json_object_set_new(gpu, "ecc_uncorrected", json_integer(errors > INT64_MAX ? INT64_MAX : (json_int_t)errors));
    if (nvml->remapped && nvml->remapped(device, &corrected, &uncorrected, &pending, &failed) == NVML_SUCCESS) {
        json_object_set_new(gpu, "remap_pending", json_boolean(pending));
        json_object_set_new(gpu, "remap_failed", json_boolean(failed));
    }
    if (nvml->mig_mode && nvml->mig_mode(device, &mig, &mig_pending) == NVML_SUCCESS)
        json_object_set_new(gpu, "mig", json_boolean(mig));
    if (nvml->memory && nvml->memory(device, &memory) == NVML_SUCCESS && memory.total <= INT64_MAX)
        json_object_set_new(gpu, "memory_bytes", json_integer((json_int_t)memory.total));
    query_clocks(nvml, device, gpu);
    json_object_set_new(gpu, "nvlinks", query_links(nvml, device));
    if (nvml->fabric && nvml->fabric(device, &fabric) == NVML_SUCCESS && fabric_name(&fabric))
        json_object_set_new(gpu, "fabric", json_string(fabric_name(&fabric)));
    if (fabric.state == NVML_FABRIC_COMPLETED)
        json_object_set_new(gpu, "domain", domain_of(&fabric));
}

/* A GPU lost after initialisation may still have a handle. */
static bool is_lost(const struct nvml *nvml, nvml_device device)
{
    char uuid[NVML_UUID_BYTES];
    int major, minor;

    return (nvml->uuid && nvml->uuid(device, uuid, sizeof(uuid)) == NVML_ERROR_GPU_IS_LOST) ||
           (nvml->capability && nvml->capability(device, &major, &minor) == NVML_ERROR_GPU_IS_LOST);
}

static json_t *query_gpu(const struct nvml *nvml, unsigned index)
{
    struct nvml_pci pci = {0};
    nvml_device device;
    char text[20];
    json_t *gpu;

    /* A GPU that has fallen off the bus has no handle; only the list of PCI devices shows it. */
    if (nvml->by_index(index, &device) != NVML_SUCCESS || nvml->pci(device, &pci) != NVML_SUCCESS ||
        is_lost(nvml, device) || !print_address(&pci, text))
        return NULL;
    gpu = json_pack("{s:s}", "pci", text);
    query_identity(nvml, device, gpu);
    query_health(nvml, device, gpu);
    return gpu;
}

/* Confidential computing is a property of the whole system. NULL: the driver does not know it. */
static json_t *query_confidential(const struct nvml *nvml)
{
    static const char *const modes[] = {"none", "ppcie", "nvle"};
    struct nvml_cc_settings settings = {.version = NVML_CC_SETTINGS_VERSION};
    struct nvml_cc_state state = {0};
    unsigned ready;
    json_t *cc;

    if (!nvml->cc_state || nvml->cc_state(&state) != NVML_SUCCESS)
        return NULL;
    cc = json_pack("{s:b}", "feature", state.feature != 0);
    if (nvml->cc_ready && nvml->cc_ready(&ready) == NVML_SUCCESS)
        json_object_set_new(cc, "ready", json_boolean(ready));
    if (nvml->cc_settings && nvml->cc_settings(&settings) == NVML_SUCCESS && settings.multi_gpu < COUNT(modes))
        json_object_set_new(cc, "multi_gpu", json_string(modes[settings.multi_gpu]));
    return cc;
}

json_t *nvml_query(void *unused)
{
    char driver[NVML_DRIVER_BYTES] = "";
    json_t *answer, *gpus;
    nvml_return result;
    struct nvml nvml;
    unsigned n = 0;

    (void)unused;
    if (!nvml_load(&nvml, &answer))
        return answer;
    result = nvml.init();
    if (result == NVML_SUCCESS)
        result = nvml.count(&n);
    if (result != NVML_SUCCESS)
        return error_answer("NVML", nvml.error(result));
    gpus = json_array();
    answer = json_pack("{s:o}", "gpus", gpus);
    if (nvml.driver_version(driver, sizeof(driver) - 1) == NVML_SUCCESS)
        json_object_set_new(answer, "driver", json_string(driver));
    json_object_set_new(answer, "cc", query_confidential(&nvml));
    for (unsigned i = 0; i < n && i < TOPO_MAX_GPUS; i++)
        json_array_append_new(gpus, query_gpu(&nvml, i));
    /* No nvmlShutdown(): the child exits now, and shutdown takes as long as initialisation. */
    return answer;
}
