/* SPDX-License-Identifier: Apache-2.0 */
/* gpus.c - the GPUs on the PCI bus, with facts from the driver's folder in /proc and the answer of NVML. */
#include "common/json.h"
#include "common/text.h"
#include "read_hardware.h"

#include <string.h>

/* --- fields of the answer of NVML, which is not trusted --- */

/* An integer from min to max, else `otherwise`. */
static int64_t get_number(const json_t *value, int64_t min, int64_t max, int64_t otherwise)
{
    int64_t number = json_integer_value(value);

    return json_is_integer(value) && number >= min && number <= max ? number : otherwise;
}

/* 0, 1, or -1 if unknown. */
static int get_truth(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);

    return json_is_boolean(value) ? json_is_true(value) : -1;
}

/* GPU `i` of an answer; NULL after the last. A snapshot may list any number, and the loops over them are nested. */
static const json_t *get_gpu(const json_t *answer, size_t i)
{
    return i < TOPO_MAX_GPUS ? json_array_get(json_object_get(answer, "gpus"), i) : NULL;
}

/* Is the PCI device among the GPUs of an answer? */
static bool is_answered(const struct topo *topo, int pci, const json_t *answer)
{
    const json_t *gpu;

    for (size_t i = 0; (gpu = get_gpu(answer, i)); i++)
        if (topo_find_pci(topo, json_text(gpu, "pci")) == pci)
            return true;
    return false;
}

void nvml_collect_pci(const json_t *answer, struct pci_set *set)
{
    struct pci_address address;
    const json_t *gpu;

    for (size_t i = 0; (gpu = get_gpu(answer, i)); i++)
        if (parse_pci_address(json_text(gpu, "pci"), &address))
            pci_set_add(set, &address);
}

static int find_gpu_at(const struct topo *topo, const char *address)
{
    int pci = topo_find_pci(topo, address);

    return pci < 0 ? -1 : FIRST_OF(i, topo->n_gpus, topo->gpus[i].pci == pci);
}

static void read_links(const struct topo *topo, struct topo_gpu *gpu, const json_t *links)
{
    for (size_t i = 0; i < json_array_size(links) && i < TOPO_MAX_NVLINKS; i++) {
        const char *to = json_string_value(json_array_get(links, i));
        int peer;

        if (!to)
            continue;
        gpu->nvlinks++;
        if (strcmp(to, "down") == 0)
            continue;
        gpu->nvlinks_up++;
        peer = find_gpu_at(topo, to);
        if (strcmp(to, "switch") == 0)
            gpu->nvlinks_switch++;
        else if (peer >= 0)
            gpu->nvlinks_gpu[peer]++;
    }
}

/* The index of a text in `names`, which end with NULL; -1, unknown, if it is not there. */
static int number_of(const char *text, const char *const *names)
{
    for (int i = 0; names[i]; i++)
        if (strcmp(text, names[i]) == 0)
            return i;
    return -1;
}

static const char *const fabric_names[] = {"none", "starting", "ready", "failed", NULL}; /* enum topo_fabric */
static const char *const cc_modes[] = {"none", "ppcie", "nvle", NULL};                   /* enum topo_cc_mode */

/* Bits of enum topo_slowdown; -1 if the driver does not report them. */
static int read_slowdown(const json_t *slowdown)
{
    static const char *const names[] = {"hardware", "hw_thermal", "power_brake", "sw_thermal"};
    int bits = 0;

    if (!json_is_object(slowdown))
        return -1;
    for (int i = 0; i < 4; i++)
        bits |= get_truth(slowdown, names[i]) == 1 ? 1 << i : 0;
    return bits;
}

static void read_gpu(struct topo *topo, struct topo_gpu *gpu, const json_t *answer)
{
    const json_t *cc = json_object_get(answer, "cc");

    gpu->answered = true;
    if (*json_text(answer, "name"))
        gpu->name = topo_copy_line(topo, json_text(answer, "name"));
    if (*json_text(answer, "uuid"))
        gpu->uuid = topo_copy_line(topo, json_text(answer, "uuid"));
    gpu->minor = (int)get_number(json_object_get(answer, "minor"), 0, INT16_MAX, gpu->minor);
    gpu->cc_major = (int)get_number(json_array_get(cc, 0), 0, 999, 0);
    gpu->cc_minor = (int)get_number(json_array_get(cc, 1), 0, 99, 0);
    gpu->ecc_uncorrected = get_number(json_object_get(answer, "ecc_uncorrected"), 0, INT64_MAX, -1);
    gpu->remap_pending = get_truth(answer, "remap_pending");
    gpu->remap_failed = get_truth(answer, "remap_failed");
    gpu->mig = get_truth(answer, "mig");
    gpu->memory_bytes = get_number(json_object_get(answer, "memory_bytes"), 0, INT64_MAX, -1);
    gpu->slowdown = read_slowdown(json_object_get(answer, "slowdown"));
    gpu->fabric = number_of(json_text(answer, "fabric"), fabric_names);
    if (json_object_get(answer, "domain"))
        gpu->cluster = topo_copy_line(topo, json_text(json_object_get(answer, "domain"), "cluster"));
    gpu->clique = get_number(json_object_get(json_object_get(answer, "domain"), "clique"), 0, UINT32_MAX, 0);
    read_links(topo, gpu, json_object_get(answer, "nvlinks"));
}

static void read_answer(struct topo *topo, const json_t *answer)
{
    const json_t *gpu;

    topo->nvml = json_is_array(json_object_get(answer, "gpus"));
    if (!topo->nvml) {
        topo->nvml_why = *json_text(answer, "error") ? topo_copy_line(topo, json_text(answer, "error"))
                                                     : "the answer is not of the form that epkit writes";
        return;
    }
    if (!*topo->driver)
        topo->driver = topo_copy_line(topo, json_text(answer, "driver"));
    topo->cc_feature = get_truth(json_object_get(answer, "cc"), "feature");
    topo->cc_ready = get_truth(json_object_get(answer, "cc"), "ready");
    topo->cc_mode = (enum topo_cc_mode)number_of(json_text(json_object_get(answer, "cc"), "multi_gpu"), cc_modes);
    for (size_t i = 0; (gpu = get_gpu(answer, i)); i++) {
        int index = find_gpu_at(topo, json_text(gpu, "pci"));

        if (index >= 0 && !topo->gpus[index].answered)
            read_gpu(topo, &topo->gpus[index], gpu);
    }
}

/* --- files of the driver --- */

/* "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release ...": the first word of digits. */
const char *topo_driver_version(struct source *source)
{
    FOR_PIECES (word, source_line(source, "/proc/driver/nvidia/version").text, " ")
        if (strspn(word.text, "0123456789.") == word.n && memchr(word.text, '.', word.n))
            return source_printf(source, "%.*s", (int)word.n, word.text);
    return "";
}

static void read_files(struct topo *topo, struct topo_gpu *gpu)
{
    const char *address = topo->pci[gpu->pci].address;
    const char *text = source_read(topo->source, "/proc/driver/nvidia/gpus/%s/information", address).text;
    const char *uuid = source_field(topo->source, text, "GPU UUID"),
               *minor = source_field(topo->source, text, "Device Minor");

    gpu->name = source_field(topo->source, text, "Model");
    /* Until the GPU was used, the driver does not know its UUID and writes question marks. */
    gpu->uuid = strncmp(uuid, "GPU-", 4) == 0 && !strchr(uuid, '?') ? uuid : "";
    gpu->minor = text_number(minor, strlen(minor), 9999);
}

/* A device that NVML lists is a GPU, even if sysfs does not show its class. */
static bool is_gpu(const struct topo *topo, int pci, const json_t *answer)
{
    const struct topo_pci *device = &topo->pci[pci];

    if (device->vendor == PCI_VENDOR_NVIDIA && device->class_code >> 16 == PCI_CLASS_DISPLAY)
        return true;
    return device->class_code == 0 && is_answered(topo, pci, answer);
}

/* Does the driver list the GPU, and may its device file be opened? *ret_is_denied: it exists and may not. */
static bool is_openable(struct topo *topo, int pci, bool *ret_is_denied)
{
    const char *address = topo->pci[pci].address;
    struct source_text text = source_read(topo->source, "/proc/driver/nvidia/gpus/%s/information", address);
    const char *minor;
    struct source_stat device;

    if (text.state != SOURCE_OK || strcmp(source_field(topo->source, text.text, "GPU Excluded"), "Yes") == 0)
        return false;
    minor = source_field(topo->source, text.text, "Device Minor");
    if (!*minor || strspn(minor, "0123456789") != strlen(minor))
        return false;
    device = source_stat(topo->source, "/dev/nvidia%s", minor);
    *ret_is_denied =
        device.state == SOURCE_DENIED || (device.state == SOURCE_OK && (!device.may_read || !device.may_write));
    return device.state == SOURCE_OK && !*ret_is_denied;
}

static void hide_gpu(struct topo *topo, int pci, bool is_denied)
{
    if (topo->n_hidden_gpus < TOPO_MAX_GPUS)
        topo->hidden_gpus[topo->n_hidden_gpus] = pci;
    topo->n_hidden_gpus++;
    topo->n_denied_gpus += is_denied;
}

/* GPUs beyond the maximum are reported as cut. */
static void add_gpu(struct topo *topo, int pci)
{
    if (topo->n_gpus == TOPO_MAX_GPUS) {
        topo->cut = true;
        return;
    }
    topo->gpus[topo->n_gpus] = (struct topo_gpu){.index = topo->n_gpus,
                                                 .pci = pci,
                                                 .ecc_uncorrected = -1,
                                                 .remap_pending = -1,
                                                 .remap_failed = -1,
                                                 .mig = -1,
                                                 .memory_bytes = -1,
                                                 .slowdown = -1,
                                                 .fabric = TOPO_FABRIC_UNKNOWN};
    read_files(topo, &topo->gpus[topo->n_gpus++]);
}

/* The GPUs of NVML's answer, in its order. Returns whether the answer is valid. */
static bool add_answered(struct topo *topo, const json_t *answer)
{
    const json_t *gpu;

    for (size_t i = 0; (gpu = get_gpu(answer, i)); i++) {
        int pci = topo_find_pci(topo, json_text(gpu, "pci"));

        if (pci >= 0 && is_gpu(topo, pci, answer) && find_gpu_at(topo, topo->pci[pci].address) < 0)
            add_gpu(topo, pci);
    }
    return json_is_array(json_object_get(answer, "gpus"));
}

/* NVML that does not start because no device file may be opened says nothing of GPUs off the bus. */
static bool are_all_denied(struct topo *topo, const json_t *answer)
{
    int n = 0;

    for (int i = 0; i < topo->n_pci; i++) {
        bool is_denied = false;

        if (!is_gpu(topo, i, answer))
            continue;
        is_openable(topo, i, &is_denied);
        if (!is_denied)
            return false;
        n++;
    }
    return n > 0;
}

bool topo_has_ibgda(const struct topo *topo, int nic)
{
    int pci = topo->nics[nic].pci;

    return pci >= 0 && (!topo->pci[pci].vendor || topo->pci[pci].vendor == PCI_VENDOR_MELLANOX);
}

bool topo_is_confidential(const struct topo *topo)
{
    return topo->cc_feature == 1 || topo->cc_mode == TOPO_CC_PROTECTED_PCIE;
}

/*
 * If NVML answers, its GPUs are those of this process, in the order in which CUDA numbers them. There may be others on
 * the bus. Those of other containers and jobs have no device file, or the device cgroup denies it, which access(2)
 * detects (devcgroup_inode_permission() in Linux), though /proc/driver/nvidia/gpus may list them (it does under Slurm's
 * ConstrainDevices). Those that have fallen off the bus still have their device file; they come last, where they change
 * no number.
 */
void gpus_read(struct topo *topo, const json_t *answer)
{
    bool has_answered, is_shut;

    topo->driver = topo_driver_version(topo->source);
    topo->cc_feature = topo->cc_ready = -1;
    topo->cc_mode = TOPO_CC_UNKNOWN;
    topo->gpus = source_alloc(topo->source, TOPO_MAX_GPUS * sizeof(*topo->gpus));
    has_answered = add_answered(topo, answer);
    is_shut = !has_answered && are_all_denied(topo, answer);
    for (int i = 0; i < topo->n_pci; i++) {
        bool is_denied = false;

        if (!is_gpu(topo, i, answer) || find_gpu_at(topo, topo->pci[i].address) >= 0)
            continue;
        if ((has_answered || is_shut) && !is_openable(topo, i, &is_denied))
            hide_gpu(topo, i, is_denied);
        else
            add_gpu(topo, i);
    }
    if (answer)
        read_answer(topo, answer);
}
