/* SPDX-License-Identifier: Apache-2.0 */
/* driver_missing.c - why NVIDIA's driver is not bound to GPUs on the bus. */
#include "common/text.h"
#include "fixes.h"
#include "kernel_log.h"
#include "queries.h"

#include <stdlib.h>
#include <string.h>

#define VERSION "/proc/driver/nvidia/version"
#define SIG_ENFORCE "/sys/module/module/parameters/sig_enforce"

struct undriven {
    int n, n_nouveau, n_vfio;
    const char *module; /* that has the n_nouveau */
};

/*
 * Counts compute GPUs that are bound to another driver than NVIDIA's, or to none; display cards may be intended so.
 * Adds them as evidence unless `result` is NULL: after the evidence for the cause, which must fit.
 */
static struct undriven count_undriven(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct topo *topo = machine->topo;
    struct undriven count = {.n = 0};

    for (int i = 0; i < topo->n_gpus; i++) {
        const struct topo_pci *pci = topo->gpus[i].pci >= 0 ? &topo->pci[topo->gpus[i].pci] : NULL;
        const char *module = pci ? driver_of_kernel(pci->driver) : NULL;

        if (pci && strncmp(pci->driver, "vfio", 4) == 0)
            count.n_vfio++;
        /* 0x0302 is a 3D controller: a compute board. */
        if (!pci || (*pci->driver && !module) || (!module && pci->class_code >> 8 != 0x0302))
            continue;
        if (result)
            doctor_evidence(result, pci->address, module ? "driver %s" : "no driver", module);
        count.n++;
        count.n_nouveau += module != NULL;
        count.module = module ? module : count.module;
    }
    return count;
}

const char *driver_of_kernel(const char *driver)
{
    return strcmp(driver, "nouveau") == 0 ? driver : strcmp(driver, "NovaCore") == 0 ? "nova_core" : NULL;
}

void driver_found_nouveau(const struct doctor_machine *machine, struct doctor_result *result, int n, const char *module)
{
    const char *initramfs = os_initramfs(&machine->software->os);

    doctor_found(result, DOCTOR_ERROR, "%d GPU%s driven by %s, which cannot run CUDA programs", n,
                 n == 1 ? " is" : "s are", module);
    if (*initramfs)
        doctor_fix(result, false, "echo 'blacklist %s' | sudo tee /etc/modprobe.d/blacklist-%s.conf\n%s\nsudo reboot",
                   module, module, initramfs);
    doctor_cost(result, DOCTOR_FIX_RESTART,
                "The machine restarts; a screen on the GPU stays dark if NVIDIA's driver is not installed.");
    doctor_advise(result, "NVIDIA's driver cannot use GPUs that are bound to it. %s",
                  *initramfs || machine->software->os.in_container
                      ? "Install it first; its packages disable nouveau."
                      : os_kernel_argument(machine->source, &machine->software->os, true,
                                           source_printf(machine->source, "modprobe.blacklist=%s", module)));
}

/* --- addresses for the memory of a GPU --- */

#define WINDOW_LEAST (64ULL << 20) /* BAR1 of a GPU has 256 MiB and more, its other regions 16 and 32 MiB */

/* Does no region of the device ("START END FLAGS" a line) have an address and the size of a window into GPU memory? */
static json_t *read_no_window(struct source_text file)
{
    bool has_window = false;

    for (int i = 0; i < 6 && *file.text; i++) {
        struct piece line = text_take(&file.text, "\n");
        char *end;
        unsigned long long first = strtoull(line.text, &end, 16), last = strtoull(end, NULL, 16);

        has_window = has_window || (first > 0 && last - first >= WINDOW_LEAST - 1);
    }
    return json_boolean(!has_window);
}

/* "NVRM: BAR1 is 0M @ 0x0 (PCI:0000:14:00.0)": the addresses of devices. */
static json_t *read_lost_windows(struct source_text file)
{
    json_t *devices = json_array();

    while ((file.text = strstr(file.text, " is 0M @ 0x0 (PCI:"))) {
        file.text += strlen(" is 0M @ 0x0 (PCI:");
        json_array_append_new(devices, json_stringn_nocheck(file.text, strcspn(file.text, ")\n")));
    }
    return devices;
}

bool machine_lacks_window(const struct doctor_machine *machine, int pci)
{
    const char *where;
    struct source_answer lost =
        kernel_log_fact(machine->source, "gpus-without-window", read_lost_windows, "NVRM: BAR", &where);

    FOR_JSON (device, lost.value)
        if (pci >= 0 && json_is_string(device) &&
            strcmp(json_string_value(device), machine->topo->pci[pci].address) == 0)
            return true;
    return pci >= 0 && !machine_is_grace(machine->topo) && !machine_is_spark(machine->topo) &&
           source_fact_bool(source_fact(machine->source, "no-window", read_no_window,
                                        "/sys/bus/pci/devices/%s/resource", machine->topo->pci[pci].address));
}

const char *machine_window_advice(const struct doctor_machine *machine)
{
    return machine_virtual(machine->source) == MACHINE_VIRTUAL
               ? "Give the virtual machine a larger window of 64-bit addresses for devices (VMware: "
                 "pciPassthru.use64bitMMIO=TRUE and pciPassthru.64bitMMIOSizeGB of twice the memory of all GPUs; OVMF: "
                 "opt/ovmf/X-PciMmio64Mb), and start it again."
               : "Switch on Above 4G Decoding and Resizable BAR in the BIOS, and see whether an update of it is due.";
}

/* --- why it is not loaded --- */

/* Does a line of modules.dep begin with the driver's module, which Debian names nvidia-current? */
static json_t *read_module(struct source_text file)
{
    FOR_PIECES (line, file.text, "\n") {
        line.n = strcspn(line.text, ":\n");
        if (piece_find(line, "/nvidia.ko") || piece_find(line, "/nvidia-current.ko"))
            return json_true();
    }
    return json_false();
}

/* "Y": the kernel accepts only signed modules. */
READER_BOOL(read_enforced, *file.text == 'Y')

/* Messages of mod_verify_sig() and of the lockdown, which contain no module name. */
static json_t *read_refusals(struct source_text file)
{
    int n = 0;

    FOR_PIECES (line, file.text, "\n")
        n += (piece_find(line, "Loading of ") && piece_find(line, " is rejected")) ||
             piece_find(line, "unsigned module loading is restricted");
    return json_integer(n);
}

/* Does the kernel log say that a module was rejected? Records the line and what enforces signatures. */
static bool has_refused(const struct doctor_machine *machine, struct doctor_result *result)
{
    static const char *const logs[] = {"/dev/kmsg", KERNEL_LOG_FILE};
    static const char *const needles[][2] = {{"module-rejected", " is rejected"},
                                             {"module-restricted", "module loading is restricted"}};
    json_int_t n = 0;

    for (size_t i = 0; i < COUNT(logs) && n == 0; i++) {
        for (size_t k = 0; k < COUNT(needles); k++)
            n += json_integer_value(
                source_log_fact(machine->source, needles[k][0], read_refusals, needles[k][1], "%s", logs[i]).value);
        if (n > 0)
            doctor_evidence(result, logs[i], "the kernel has rejected a module because of its signature");
    }
    return n > 0;
}

static bool is_strict(const struct doctor_machine *machine, struct doctor_result *result)
{
    bool locked = machine_is_locked_down(machine->source),
         enforced = source_fact_bool(source_fact(machine->source, "signed-modules", read_enforced, "%s", SIG_ENFORCE));

    if (locked || enforced)
        doctor_evidence(result, locked ? MACHINE_LOCKDOWN_FILE : SIG_ENFORCE, "the kernel accepts only signed modules");
    return locked || enforced;
}

/* The installed version of the driver, from DKMS or a package; "" if not known. */
static const char *installed_version(const struct doctor_machine *machine, bool *ret_is_dkms)
{
    struct source_names versions = source_list(machine->source, "/var/lib/dkms/nvidia");

    *ret_is_dkms = versions.n > 0;
    if (*machine->software->driver.installed_version)
        return machine->software->driver.installed_version;
    for (size_t i = versions.n; i-- > 0;)
        if (strchr("0123456789", versions.names[i][0]))
            return versions.names[i];
    return "";
}

static const char signing[] =
    "Use modules that are signed with a key that the firmware knows (on Ubuntu linux-modules-nvidia-<branch>-<kernel>), or enroll the key that DKMS signs with: sudo mokutil --import /var/lib/shim-signed/mok/MOK.der, elsewhere /var/lib/dkms/mok.pub; the next boot asks for it. Until then modprobe answers \"Key was rejected by service\".";

/* For systems whose modules come from packages or from DKMS. */
static void explain_missing(const struct doctor_machine *machine, struct doctor_result *result, const char *gpus)
{
    bool is_dkms, is_missing;
    const char *version = installed_version(machine, &is_dkms), *kernel = machine->software->driver.kernel,
               *headers = os_install(machine->source, &machine->software->os, "linux-headers-$(uname -r)",
                                     "kernel-devel-$(uname -r)");
    struct source_answer module =
        source_fact(machine->source, "nvidia-module", read_module, "/lib/modules/%s/modules.dep", kernel);

    /* Not known in a container and without depmod. */
    is_missing = *kernel && module.state == SOURCE_OK && !source_fact_bool(module);
    if (is_missing && *version) {
        doctor_found(result, DOCTOR_ERROR,
                     "the NVIDIA driver %s is installed, and its module was not built for the running kernel %s; %s",
                     version, kernel, gpus);
        doctor_evidence(result, source_printf(machine->source, "/lib/modules/%s", kernel), "no nvidia.ko");
        if (is_dkms && *headers)
            doctor_fix(result, false, "%s\nsudo dkms autoinstall\nsudo modprobe nvidia", headers);
        doctor_advise(result,
                      "DKMS builds it when the headers of this kernel are installed; if the build fails, "
                      "/var/lib/dkms/nvidia/%s/build/make.log says why. If modules come as packages, install the one "
                      "for this kernel, or boot the previous kernel.",
                      version);
    } else if (is_missing) {
        doctor_found(result, DOCTOR_ERROR, "there is no NVIDIA driver for the running kernel %s, and %s", kernel, gpus);
        doctor_evidence(result, source_printf(machine->source, "/lib/modules/%s", kernel), "no nvidia.ko");
        doctor_advise(result, "Install it: epkit install, the distribution's packages, or the GPU operator's driver "
                              "container.");
    } else if (has_refused(machine, result)) {
        is_strict(machine, result);
        doctor_found(result, DOCTOR_ERROR,
                     "the kernel rejected a module without a trusted signature, the NVIDIA driver is not loaded, and "
                     "%s",
                     gpus);
        doctor_advise(result, "%s", signing);
    } else if (is_strict(machine, result)) {
        doctor_found(result, DOCTOR_ERROR,
                     "the NVIDIA driver is not loaded, and %s; the kernel accepts only signed modules (Secure Boot), "
                     "and may have rejected it",
                     gpus);
        doctor_fix(result, false, "sudo modprobe nvidia");
        doctor_advise(result, "It loads a module that is signed. %s", signing);
    } else {
        doctor_found(result, DOCTOR_ERROR, "the NVIDIA driver is not loaded, and %s", gpus);
        doctor_fix(result, false, "sudo modprobe nvidia");
        doctor_advise(result, "If modprobe does not find it, install the driver; if it fails, the kernel log says why "
                              "(sudo dmesg | grep -i nvrm).");
    }
}

void driver_missing(const struct doctor_machine *machine, struct doctor_result *result)
{
    struct source_text version = source_line(machine->source, VERSION);
    struct undriven count;
    const char *gpus;

    if (doctor_unknown_if(result, version.state != SOURCE_ABSENT, VERSION ": %s",
                          version.state == SOURCE_OK ? "no version in it" : machine_reason(version.state, version.why)))
        return;
    count = count_undriven(machine, NULL);
    if (count.n_nouveau) {
        count_undriven(machine, result);
        driver_found_nouveau(machine, result, count.n_nouveau, count.module);
        return;
    }
    if (doctor_unknown_if(result, count.n_vfio == machine->topo->n_gpus,
                          "the GPUs are passed to virtual machines (driver vfio)") ||
        doctor_not_applicable_if(result, count.n == 0, "the NVIDIA driver is not in use"))
        return;
    gpus = source_printf(machine->source, "%d GPU%s on the bus", count.n, count.n == 1 ? " is" : "s are");
    if (!machine->software->os.in_container && machine->software->os.family != OS_COS &&
        machine->software->os.family != OS_OSTREE) {
        explain_missing(machine, result, gpus);
        count_undriven(machine, result);
        return;
    }
    doctor_found(result, DOCTOR_ERROR, "the NVIDIA driver is not loaded, and %s", gpus);
    count_undriven(machine, result);
    if (machine->software->os.in_container)
        doctor_advise(result, "Load it on the node, outside of this container.");
    else if (machine->software->os.family == OS_COS) {
        doctor_fix(result, false, "sudo cos-extensions install gpu");
        doctor_advise(result, "On GKE, the node pool's gpu-driver-version or the DaemonSet of the installer installs "
                              "it.");
    } else
        doctor_advise(result, "A container loads it here: with the GPU operator, check the pod "
                              "nvidia-driver-daemonset.");
}
