/* SPDX-License-Identifier: Apache-2.0 */
/* checks_driver.c - the NVIDIA driver and related kernel modules. */
#include "checks.h"
#include "kernel_log.h"

#define PARAMS "/proc/driver/nvidia/params"
#define VERSION "/proc/driver/nvidia/version"
#define CLASS_DISPLAY 0x03 /* PCI Code and ID Assignment Specification */

/* --- peermem --- */

static void fix_peermem(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct os *os = &machine->software->os;

    if (!os->in_container && (os->family == OS_COS || os->family == OS_OSTREE)) {
        doctor_advise(
            result,
            os->family == OS_COS
                ? "The driver's installer brings the modules here: choose a driver with the open kernel modules "
                  "(cos-extensions install gpu; on GKE the pool's gpu-driver-version), which have dma-buf."
                : "The driver's container brings the modules here: in the GPU operator, driver.rdma.enabled loads "
                  "nvidia_peermem, and driver.kernelModuleType=open gives dma-buf.");
        return;
    }
    doctor_fix(result, !os->in_container, "sudo modprobe nvidia-peermem");
    doctor_advise(result,
                  "To load it at every boot: echo nvidia-peermem | sudo tee /etc/modules-load.d/nvidia-peermem.conf%s. "
                  "If modprobe answers \"Invalid argument\", ib_core is not the one of DOCA-OFED: install that first, "
                  "or use the open kernel modules on Linux 5.12 or later, which have dma-buf.",
                  os->in_container ? " (both on the node, not in this container)" : "");
}

/* "nvidia_peermem: Unknown symbol ib_register_peer_memory_client (err -22)": built for another ib_core. */
READER_BOOL(read_refused, strstr(file.text, ": Unknown symbol") || strstr(file.text, ": disagrees"))

/* It registers with ib_core, which shows it; loaded with an ib_core that has no such interface it does not. */
static bool has_not_registered(struct source *source)
{
    static const char *const absent[] = {"/sys/module/nv_peer_mem", "/sys/module/efa_nv_peermem",
                                         "/sys/kernel/mm/memory_peers"};

    return source_stat(source, "/sys/module/nvidia_peermem").state == SOURCE_OK &&
           source_stat(source, "/sys/kernel/mm").state == SOURCE_OK &&
           !ANY_OF(i, COUNT(absent), source_stat(source, "%s", absent[i]).state != SOURCE_ABSENT);
}

#define OLD_PEERMEM "/sys/module/nv_peer_mem/version"

void run_peermem(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct software_driver *driver = &machine->software->driver;
    struct source_text version = source_line(machine->source, OLD_PEERMEM);
    const char *where;
    bool is_idle =
        driver->peermem == SOURCE_OK && driver->dmabuf == SOURCE_ABSENT && has_not_registered(machine->source);

    if (!is_idle && (driver->peermem == SOURCE_OK || driver->dmabuf == SOURCE_OK)) {
        /* Up to 1.1 it may deadlock with the kernel's memory management; its successor is part of the driver. */
        if (version.state != SOURCE_OK || !*version.text || strverscmp(version.text, "1.2") >= 0)
            return;
        doctor_found(result, DOCTOR_WARNING, "nv_peer_mem %s is loaded, which may lock up the kernel", version.text);
        doctor_evidence(result, OLD_PEERMEM, "%s", version.text);
        doctor_advise(result, "Remove its package (nvidia-peer-memory, nvidia-peer-memory-dkms) and load "
                              "nvidia_peermem, which the driver brings, when no program uses RDMA: the two exclude "
                              "each other.");
        return;
    }
    if (doctor_unreadable_if(result, driver->peermem != SOURCE_ABSENT && !is_idle, "/sys/module/nvidia_peermem",
                             driver->peermem, NULL) ||
        doctor_unreadable_if(result, driver->dmabuf != SOURCE_ABSENT, "whether GPU memory can be exported as dma-buf",
                             driver->dmabuf, driver->dmabuf_why))
        return;
    doctor_found(result, DOCTOR_ERROR,
                 "NICs cannot reach GPU memory: nvidia_peermem is %s, and there is no dma-buf either",
                 is_idle ? "loaded, but no client of ib_core" : "not loaded");
    doctor_evidence(result, is_idle ? "/sys/kernel/mm/memory_peers" : "/sys/module/nvidia_peermem", "not there");
    doctor_evidence(result, "dma-buf", "%s", machine_reason(driver->dmabuf, driver->dmabuf_why));
    if (is_idle || source_fact_bool(kernel_log_fact(machine->source, "refused-peermem", read_refused,
                                                    "ib_register_peer_memory_client", &where)))
        doctor_advise(
            result,
            "Install DOCA-OFED, then build the driver's modules anew (dkms build and install of nvidia; with the GPU operator delete the driver's pod), and load it. Or use the open kernel modules, which have dma-buf and need no peermem.");
    else
        fix_peermem(machine, result);
}

/* --- driver-option --- */

/* 1 and 0x1 are the same value. */
static bool same_number(const char *a, const char *b)
{
    char *end_a, *end_b;
    long long value_a = strtoll(a, &end_a, 0), value_b = strtoll(b, &end_b, 0);

    if (end_a == a || *end_a || end_b == b || *end_b)
        return strcmp(a, b) == 0;
    return value_a == value_b;
}

static void report_option(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct software_option *option = &machine->software->driver.peer_mapping_override;

    if (*option->configured)
        doctor_evidence(result, option->configured_in, "PeerMappingOverride=%s", option->configured);
    if (*option->overruled)
        doctor_evidence(result, option->overruled_in, "PeerMappingOverride=%s, replaced by a later line",
                        option->overruled);
    doctor_evidence(result, PARAMS, "%s%s", *option->live ? "PeerMappingOverride=" : "no PeerMappingOverride",
                    option->live);
}

void run_driver_option(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct software_option *option = &machine->software->driver.peer_mapping_override;
    struct source_text params;

    if (doctor_not_applicable_if(result, !*option->configured && !*option->overruled,
                                 "PeerMappingOverride is not configured"))
        return;
    params = source_read(machine->source, PARAMS);
    if (doctor_unreadable_if(result, !*option->live && params.state != SOURCE_OK, PARAMS, params.state, params.why))
        return;
    if (*option->live && same_number(*option->configured ? option->configured : option->overruled, option->live))
        return;
    if (!*option->configured ||
        (*option->overruled && same_number(*option->live ? option->live : "0", option->configured))) {
        doctor_found(result, DOCTOR_ERROR,
                     "PeerMappingOverride is configured, but a later line of modprobe.d replaces it");
        driver_fix_peer_mapping(machine, result);
        report_option(machine, result);
        return;
    }
    doctor_found(result, DOCTOR_ERROR, "PeerMappingOverride=%s is configured, but the loaded driver does not have it",
                 option->configured);
    report_option(machine, result);
    driver_fix_reload(machine, result);
}

/* --- doca-kernel --- */

#define KERNEL_NEEDS_DOCA_321 "6.14"
#define DOCA_FOR_614 "3.2.1"

/*
 * Does modules.dep contain an mlx5_core that is not the kernel's own? DKMS puts modules in updates/dkms, DOCA's
 * prebuilt packages in updates, extra or weak-updates; the kernel's own are in kernel.
 */
static json_t *read_foreign_module(struct source_text file)
{
    for (const char *at = strstr(file.text, "/mlx5_core.ko"); at; at = strstr(at + 1, "/mlx5_core.ko")) {
        const char *line = at;

        while (line > file.text && line[-1] != '\n')
            line--;
        /* The names after ':' are the modules that it depends on. */
        if (!memchr(line, ':', (size_t)(at - line)) && strncmp(line, "kernel/", 7) != 0)
            return json_true();
    }
    return json_false();
}

/* Are DOCA-OFED's modules installed for the running kernel? SOURCE_OK, SOURCE_ABSENT, or why that is not known. */
static struct source_text built_modules(const struct doctor_machine *machine, const char *release)
{
    struct source *source = machine->source;
    struct source_text loaded = source_line(source, "/sys/module/mlx5_core/version");
    struct source_answer dep;

    /* OFED's modules have a version; those of kernels have none, or in some distributions the kernel's release. */
    if (loaded.state == SOURCE_OK && *loaded.text && strcmp(loaded.text, release) != 0)
        return loaded;
    FOR_NAMES (module, source_list(source, "/lib/modules/%s/updates/dkms", release))
        if (strncmp(module, "mlx5_core.ko", 12) == 0)
            return (struct source_text){.state = SOURCE_OK, .text = module};
    dep = source_fact(source, "foreign-mlx5", read_foreign_module, "/lib/modules/%s/modules.dep", release);
    if (dep.state == SOURCE_OK && !source_fact_bool(dep))
        dep.state = SOURCE_ABSENT;
    else if (dep.state == SOURCE_ABSENT && source_list(source, "/lib/modules/%s", release).state != SOURCE_OK)
        return (struct source_text){
            .state = SOURCE_FAILED, .text = "", .why = "the modules of the running kernel are not in this file system"};
    return (struct source_text){.state = dep.state, .text = "", .why = dep.why};
}

void run_doca_kernel(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct software_driver *driver = &machine->software->driver;
    struct source_text built;

    if (doctor_not_applicable_if(result, !*driver->doca, "DOCA-OFED is not installed") ||
        doctor_unknown_if(result, !*driver->kernel, "the release of the running kernel is not known") ||
        strverscmp(driver->kernel, KERNEL_NEEDS_DOCA_321) < 0 || strverscmp(driver->doca, DOCA_FOR_614) >= 0)
        return;
    built = built_modules(machine, driver->kernel);
    if (built.state == SOURCE_OK)
        return;
    if (built.state != SOURCE_ABSENT) {
        doctor_unknown(result, "whether DOCA %s was built for kernel %s: %s", driver->doca, driver->kernel,
                       machine_reason(built.state, built.why));
        if (machine->software->os.in_container)
            result->missing = DOCTOR_MISSING_NODE;
        return;
    }
    doctor_found(result, DOCTOR_ERROR, "DOCA %s does not build for kernel %s, which needs DOCA %s or later",
                 driver->doca, driver->kernel, DOCA_FOR_614);
    doctor_evidence(result, "/proc/sys/kernel/osrelease", "%s", driver->kernel);
    doctor_evidence(result, "DOCA-OFED", "%s is installed", driver->doca);
    doctor_evidence(result, source_printf(machine->source, "/lib/modules/%s", driver->kernel),
                    "only the kernel's own mlx5_core.ko");
}

/* --- driver-skew --- */

/* "570.124.06" and "570.124.06-0ubuntu1" are the same driver. */
static bool same_version(const char *a, const char *b)
{
    size_t n = strspn(a, "0123456789."), m = strspn(b, "0123456789.");

    return n == m && n > 0 && strncmp(a, b, n) == 0;
}

/* The driver version of libnvidia-ml, from its file name; "" if the name does not contain it. */
static const char *library_version(const struct doctor_machine *machine, struct libs_env env,
                                   struct lib_location *ret_location)
{
    *ret_location = libs_find(machine->source, &env, "libnvidia-ml.so.1");
    return ret_location->state == SOURCE_OK ? libs_file_version(ret_location->real) : "";
}

/*
 * If LD_LIBRARY_PATH selects a wrong library while the system's own is right, a reboot does not help. Otherwise a
 * reboot helps only if the driver on the disk has the version of the library.
 */
static void fix_library(const struct doctor_machine *machine, struct doctor_result *result,
                        const struct lib_location *location, const char *version)
{
    const struct software_driver *driver = &machine->software->driver;
    struct libs_env env = libs_env_of(machine->source), plain = {.library_path = "", .preload = ""};
    const char *folder = libs_folder_of(machine->source, location->path);
    struct lib_location own;

    if (same_version(driver->version, library_version(machine, plain, &own))) {
        doctor_fix(result, false, "%s", shell_leave_out(machine->source, "LD_LIBRARY_PATH", env.library_path, folder));
        doctor_advise(result, "LD_LIBRARY_PATH leads to %s; without it %s is found, which matches the driver.", folder,
                      own.path);
        return;
    }
    if (!machine->software->os.in_container &&
        (same_version(version, driver->installed_version) ||
         (!*driver->installed_version && strverscmp(version, driver->version) > 0)))
        doctor_fix(result, false, "sudo reboot");
    doctor_advise(
        result,
        machine->software->os.in_container
            ? "The libraries of the driver are from another node: mount those of this node, as NVIDIA's container "
              "toolkit does."
            : "Install the libraries and the kernel module in one version. A reboot helps if the installed module is "
              "newer than the loaded one.");
}

/* Of the driver, in the third line about a GPU that it could not start. There is no Xid. */
READER_BOOL(read_fallen, strstr(file.text, "fallen off the bus and is not responding"))

/*
 * Reports GPUs that are bound to nouveau or to no driver while NVIDIA's driver has others of the same model. A card of
 * another model may be for a display; functions of a partitioned GPU wait for a virtual machine; a GPU bound to vfio is
 * passed to one.
 */
static void find_some_undriven(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct topo *topo = machine->topo;
    const char *nouveau = NULL, *where;
    int n = 0, n_nouveau = 0, first = -1;

    if (machine_unsupported_gpus(machine) > 0)
        return;
    for (int i = 0; i < topo->n_pci; i++) {
        const char *module = driver_of_kernel(topo->pci[i].driver);

        if ((*topo->pci[i].driver && !module) || topo->pci[i].class_code >> 16 != CLASS_DISPLAY ||
            !ANY_OF(k, topo->n_pci,
                    strcmp(topo->pci[k].driver, "nvidia") == 0 && topo->pci[k].vendor == topo->pci[i].vendor &&
                        topo->pci[k].device == topo->pci[i].device) ||
            source_resolve(machine->source, "/sys/bus/pci/devices/%s/physfn", topo->pci[i].address).state == SOURCE_OK)
            continue;
        doctor_evidence(result, topo->pci[i].address, module ? "driver %s" : "no driver", module);
        if (machine_lacks_window(machine, i))
            doctor_evidence(result, topo->pci[i].address, "resource: no address for the GPU's memory (BAR1)");
        first = first < 0 ? i : first;
        n++;
        n_nouveau += module != NULL;
        nouveau = module ? module : nouveau;
    }
    if (n_nouveau > 0)
        driver_found_nouveau(machine, result, n_nouveau, nouveau);
    else if (n > 0) {
        doctor_found(result, DOCTOR_ERROR, "the GPU at %s has no driver%s, while others like it have NVIDIA's",
                     topo->pci[first].address, n > 1 ? ", and more have none" : "");
        if (machine_lacks_window(machine, first))
            doctor_advise(result, "It got no addresses for its memory, so the driver cannot start it. %s",
                          machine_window_advice(machine));
        else if (source_fact_bool(
                     kernel_log_fact(machine->source, "gpu-fell", read_fallen, "fallen off the bus", &where)))
            doctor_advise(result,
                          "The driver found that it has fallen off the bus (%s): cycle the power of the node, and have "
                          "the board, its slot and its power looked at if it comes back.",
                          where);
        else
            doctor_advise(
                result,
                "The driver could not start it, or it was unbound: the kernel log says why (sudo dmesg | grep -e "
                "NVRM -e %s). If it says nothing: echo %s | sudo tee /sys/bus/pci/drivers/nvidia/bind.",
                topo->pci[first].address, topo->pci[first].address);
    }
}

void run_driver_skew(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct software_driver *driver = &machine->software->driver;
    const char *other = "", *what = "", *library;
    struct lib_location location;
    bool is_library = false;

    if (!*driver->version) {
        driver_missing(machine, result);
        return;
    }
    library = library_version(machine, libs_env_of(machine->source), &location);
    if (*driver->module_version && !same_version(driver->version, driver->module_version)) {
        other = driver->module_version;
        what = "/sys/module/nvidia/version";
    } else if (*driver->installed_version && !same_version(driver->version, driver->installed_version)) {
        other = driver->installed_version;
        what = "the one installed for this kernel";
    } else if (*library && !same_version(driver->version, library)) {
        other = library;
        what = location.path;
        is_library = true;
    }
    if (!*other) {
        find_some_undriven(machine, result);
        return;
    }
    doctor_found(result, DOCTOR_ERROR, "the loaded NVIDIA driver is %s, but another part of it is %s", driver->version,
                 other);
    doctor_evidence(result, VERSION, "%s", driver->version);
    doctor_evidence(result, what, "%s", other);
    if (!machine->topo->nvml && *machine->topo->nvml_why)
        doctor_evidence(result, "NVML", "%s", machine->topo->nvml_why);
    if (is_library) {
        fix_library(machine, result, &location, other);
        return;
    }
    if (!machine->software->os.in_container)
        doctor_fix(result, false, "sudo reboot");
    doctor_advise(result, "The driver was updated while the old one was loaded: a reboot%s loads the new one.",
                  machine->software->os.in_container ? " of the node" : "");
}

/* --- iommu-gb200 --- */

void run_iommu_gb200(const struct doctor_machine *machine, struct doctor_result *result)
{
    const char *const *bad = TEXTS("iommu.passthrough=1", "iommu.passthrough=y", "iommu.passthrough=on",
                                   "iommu.passthrough=true", "iommu=pt");
    struct source_text text;
    const char *word;

    if (doctor_not_applicable_if(result, !machine_is_grace(machine->topo), "no board with Grace processors"))
        return;
    text = source_line(machine->source, "/proc/cmdline");
    if (doctor_unreadable_if(result, text.state != SOURCE_OK, "/proc/cmdline", text.state, text.why))
        return;
    while ((word = machine_next_word(machine, &text.text, " \t")))
        for (int i = 0; bad[i]; i++) {
            if (strcasecmp(word, bad[i]) != 0)
                continue;
            doctor_found(result, DOCTOR_ERROR, "the kernel was started with %s, which these GPUs do not work with",
                         bad[i]);
            doctor_evidence(result, "/proc/cmdline", "%s", word);
            doctor_advise(result, "%s", os_kernel_argument(machine->source, &machine->software->os, false, bad[i]));
            return;
        }
}
