/* SPDX-License-Identifier: Apache-2.0 */
/* driver.c - the NVIDIA driver, its options, and related kernel modules. */
#include "common/memory.h"
#include "read_software.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define VERSION "/proc/driver/nvidia/version"
#define PARAMS "/proc/driver/nvidia/params"
#define DPKG "/var/lib/dpkg/status"

#define MAX_FILES 1024

/* --- options --- */

/* In kmod's order: a file hides files of the same name in later folders. */
static const char *const modprobe_folders[] = {"/etc/modprobe.d", "/run/modprobe.d", "/usr/local/lib/modprobe.d",
                                               "/usr/lib/modprobe.d", "/lib/modprobe.d"};

struct conf_file {
    const char *name, *folder;
};

/* The files that modprobe reads, in its order: by name, regardless of the folder (modprobe.d(5)). */
static size_t list_files(struct source *source, struct conf_file *ret_files)
{
    size_t n = 0;

    for (size_t f = 0; f < COUNT(modprobe_folders); f++) {
        size_t before = n;

        FOR_NAMES (name, source_list(source, "%s", modprobe_folders[f]))
            if (n < MAX_FILES && text_ends(name, ".conf") && strlen(name) > 5 &&
                !ANY_OF(k, before, strcmp(ret_files[k].name, name) == 0))
                ret_files[n++] = (struct conf_file){.name = name, .folder = modprobe_folders[f]};
    }
    qsort(ret_files, n, sizeof(*ret_files), text_order);
    return n;
}

/* The values of RegistryDwords, each followed by a newline. Nothing else of these files is read or saved. */
static json_t *read_dwords(struct source_text file)
{
    struct parse_modprobe state = {.at = file.text};
    struct parse_option option;
    char *found;
    size_t n;
    FILE *out = memory_stream(&found, &n);
    json_t *value;

    while (parse_modprobe_next(&state, "nvidia", &option)) {
        if (!piece_is(option.name, "NVreg_RegistryDwords"))
            continue;
        for (size_t i = 0; i < option.value.n; i++)
            if (option.value.text[i] != '\n')
                fputc(option.value.text[i], out);
        fputc('\n', out);
    }
    memory_close(out);
    value = json_stringn_nocheck(found, n);
    free(found);
    return value;
}

/* A further line with RegistryDwords. It is a single string, so the line replaces what earlier ones set. */
static void record_dwords(struct source *source, struct software_option *option, struct piece dwords, const char *file,
                          struct piece *last)
{
    struct piece value;

    *last = dwords;
    if (*option->configured) {
        option->overruled = option->configured;
        option->overruled_in = option->configured_in;
    }
    option->configured = parse_dword(dwords, "PeerMappingOverride", &value) ? piece_copy(source, value) : "";
    option->configured_in = file;
}

static void read_configured(struct source *source, struct software_driver *driver)
{
    struct software_option *option = &driver->peer_mapping_override;
    struct piece last = {.text = NULL};
    struct conf_file *files = memory_new(MAX_FILES, sizeof(*files));
    size_t n = list_files(source, files);
    struct parse_option parameter;
    const char *at;

    for (size_t i = 0; i < n; i++) {
        const char *path = source_printf(source, "%s/%s", files[i].folder, files[i].name);

        FOR_PIECES (dwords, source_fact_text(source_fact(source, "nvidia-dwords", read_dwords, "%s", path)), "\n")
            record_dwords(source, option, dwords, path, &last);
    }
    /* modprobe appends the options of the kernel command line to those of the files. */
    at = source_read(source, "/proc/cmdline").text;
    while (parse_cmdline_next(&at, "nvidia", &parameter))
        if (piece_is(parameter.name, "NVreg_RegistryDwords"))
            record_dwords(source, option, parameter.value, "/proc/cmdline", &last);
    driver->dwords_with_override = last.text ? parse_dwords_with(source, last, "PeerMappingOverride=1") : "";
    free(files);
}

static void read_live(struct source *source, struct software_option *option)
{
    struct piece dwords = parse_field(source_read(source, PARAMS).text, "RegistryDwords", ':'), value;

    if (dwords.n >= 2 && *dwords.text == '"')
        dwords = (struct piece){.text = dwords.text + 1, .n = dwords.n - 2};
    if (parse_dword(dwords, "PeerMappingOverride", &value))
        option->live = piece_copy(source, value);
}

/* --- versions --- */

/* The version without the distribution's suffix: "580.126.09" of "580.126.09-0ubuntu0.24.04.1". */
static struct piece upstream_version(struct piece version)
{
    const char *colon = memchr(version.text, ':', version.n), *dash;

    if (colon) {
        version.n -= (size_t)(colon + 1 - version.text);
        version.text = colon + 1;
    }
    dash = memchr(version.text, '-', version.n);
    if (dash)
        version.n = (size_t)(dash - version.text);
    return version;
}

/*
 * Packages that contain the kernel module or its source and have the version of the driver. Ubuntu's signed modules
 * (linux-modules-nvidia-580-open-6.8.0-87-generic) do not count: they have the version of the kernel.
 */
static bool brings_driver(const struct parse_package *package)
{
    static const char *const prefixes[] = {"nvidia-dkms-", "nvidia-kernel-source-", "nvidia-driver-"};

    if (!package->installed)
        return false;
    for (size_t i = 0; i < COUNT(prefixes); i++) {
        size_t n = strlen(prefixes[i]);

        /* nvidia-driver-580-open, not nvidia-driver-assistant */
        if (piece_begins(package->name, prefixes[i]) && package->name.n > n &&
            strchr("0123456789", package->name.text[n]))
            return true;
    }
    return piece_is(package->name, "nvidia-dkms") || piece_is(package->name, "nvidia-open");
}

/* NVIDIA's packages for Debian and Ubuntu: nvidia-fabricmanager-580, and nvidia-fabricmanager of its own repository. */
static bool is_fabric_manager(const struct parse_package *package)
{
    static const char name[] = "nvidia-fabricmanager";
    size_t n = strlen(name);

    return package->installed && piece_begins(package->name, name) &&
           (package->name.n == n || (package->name.n > n + 1 && strchr("0123456789", package->name.text[n + 1])));
}

/* Ordered by how well a package's version represents that of DOCA-OFED as a whole. */
static const char *const doca_packages[] = {"doca-ofed", "doca-all",  "doca-networking",
                                            "doca-roce", "doca-host", "doca-kernel"};

static int doca_rank(const struct parse_package *package)
{
    for (int i = 0; i < (int)COUNT(doca_packages); i++)
        if (package->installed && piece_is(package->name, doca_packages[i]))
            return i;
    return (int)COUNT(doca_packages);
}

static void set_version(json_t *versions, const char *name, struct piece version)
{
    json_object_set_new(versions, name, json_stringn(version.text, version.n));
}

/* Only three versions of dpkg's status. Other packages of the machine are private to its owner. */
static json_t *read_packages(struct source_text file)
{
    json_t *versions = json_object();
    int doca = (int)COUNT(doca_packages);
    struct parse_package package;

    while (parse_package_next(&file.text, &package)) {
        struct piece version = upstream_version(package.version);
        int rank = doca_rank(&package);

        if (brings_driver(&package) && !json_object_get(versions, "driver"))
            set_version(versions, "driver", version);
        if (is_fabric_manager(&package) && !json_object_get(versions, "fabric-manager"))
            set_version(versions, "fabric-manager", version);
        if (rank < (int)COUNT(doca_packages) && rank <= doca)
            set_version(versions, "doca", version);
        doca = rank < doca ? rank : doca;
    }
    return versions;
}

static const char *package_version(struct source *source, const char *name)
{
    struct source_answer packages = source_fact(source, "packages", read_packages, DPKG);
    const char *version = json_string_value(json_object_get(packages.value, name));

    return version ? piece_copy(source, (struct piece){.text = version, .n = strlen(version)}) : "";
}

/* From DKMS's state, /var/lib/dkms/nvidia/<version>/<kernel>, or from the package. */
static const char *installed_driver(struct source *source, const char *kernel)
{
    const char *newest = "";

    FOR_NAMES (version, source_list(source, "/var/lib/dkms/nvidia"))
        if (*kernel && source_is_folder(source_stat(source, "/var/lib/dkms/nvidia/%s/%s", version, kernel)) &&
            strverscmp(version, newest) > 0)
            newest = version;
    return *newest ? newest : package_version(source, "driver");
}

/* --- fabric manager --- */

/* The text that precedes the version of the fabric manager in each log. */
static const struct {
    const char *fact, *path, *words;
} fabric_logs[] = {{"fabric-manager-upgrade", "/var/log/dnf.rpm.log", "Upgrade: nvidia-fabric-manager-"},
                   {"fabric-manager-install", "/var/log/dnf.rpm.log", "Installed: nvidia-fabric-manager-"},
                   {"fabric-manager-upgrade-580", "/var/log/dnf.rpm.log", "Upgrade: nvidia-fabricmanager-"},
                   {"fabric-manager-install-580", "/var/log/dnf.rpm.log", "Installed: nvidia-fabricmanager-"},
                   {"fabric-manager-start", SOFTWARE_FABRIC_LOG, "Fabric Manager version "}};

/* The last version in lines of one of these logs. */
static json_t *read_fabric_log(struct source_text file)
{
    const char *last = "";

    for (size_t i = 0; i < COUNT(fabric_logs); i++)
        for (const char *at = strstr(file.text, fabric_logs[i].words); at; at = strstr(at + 1, fabric_logs[i].words))
            last = at > last || !*last ? at + strlen(fabric_logs[i].words) : last;
    return json_stringn_nocheck(last, strspn(last, "0123456789."));
}

/*
 * Without dpkg: the last installation in dnf(8)'s log; otherwise the version that the fabric manager logged at its last
 * start. rpm's own database cannot be read without rpm.
 */
static void read_fabric_manager(struct source *source, struct software_driver *driver)
{
    driver->fabric_manager_from = DPKG;
    driver->fabric_manager = package_version(source, "fabric-manager");
    for (size_t i = 0; !*driver->fabric_manager && i < COUNT(fabric_logs); i++) {
        driver->fabric_manager_from = fabric_logs[i].path;
        driver->fabric_manager = source_fact_text(source_log_fact(source, fabric_logs[i].fact, read_fabric_log,
                                                                  fabric_logs[i].words, "%s", fabric_logs[i].path));
    }
}

/* --- DOCA --- */

/* The package doca-host unpacks its repository to /usr/share/doca-host-<version>-<build>. */
static const char *doca_by_folder(struct source *source)
{
    const char *name = software_first_with(source, "/usr/share", "doca-host-", "");
    size_t n = *name ? strspn(name + 10, "0123456789.") : 0;

    return n ? source_printf(source, "%.*s", (int)n, name + 10) : "";
}

static json_t *read_repository(struct source_text file)
{
    const char *version = strstr(file.text, "/doca/");
    size_t n = version ? strspn(version + 6, "0123456789.") : 0;

    return n && version[6 + n] == '/' ? json_stringn(version + 6, n) : json_string("");
}

/*
 * If much is installed, dpkg's status exceeds the limit on the size of a file that is read. NVIDIA's instructions add
 * an apt source with the version in its path. It counts if the source of OFED's modules shows that the package was
 * installed from it.
 */
static const char *doca_by_repository(struct source *source)
{
    static const char *const files[] = {"/etc/apt/sources.list.d/doca.list", "/etc/yum.repos.d/doca.repo"};

    if (!*software_first_with(source, "/usr/src", "mlnx-ofed-kernel-", ""))
        return "";
    for (size_t i = 0; i < COUNT(files); i++) {
        const char *version = source_fact_text(source_fact(source, "version", read_repository, "%s", files[i]));

        if (*version)
            return version;
    }
    return "";
}

static const char *doca_version(struct source *source)
{
    const char *version = package_version(source, "doca");

    if (!*version)
        version = doca_by_folder(source);
    return *version ? version : doca_by_repository(source);
}

/* --- dma-buf --- */

READER_BOOL(read_no_p2pdma, strstr(file.text, "\n# CONFIG_PCI_P2PDMA is not set"))

/*
 * Can the driver export GPU memory as dma-buf? According to NVIDIA's guide to GPUDirect RDMA (gpu-operator: "DMA-BUF")
 * it needs the open kernel modules of 515 or later, Linux 5.12 or later, and a Turing GPU or later. The driver is not
 * queried.
 */
static void find_dmabuf(struct source *source, const struct topo *topo, struct software_driver *driver)
{
    struct source_text version = source_line(source, VERSION);

    driver->dmabuf = SOURCE_ABSENT;
    if (version.state != SOURCE_OK) {
        driver->dmabuf = version.state;
        driver->dmabuf_why = version.state == SOURCE_ABSENT ? "the NVIDIA driver is not loaded" : version.why;
    } else if (!driver->is_open) {
        driver->dmabuf_why = "the loaded driver is the proprietary one; only the open kernel modules export dma-buf";
    } else if (strverscmp(driver->version, "515") < 0) {
        driver->dmabuf_why = source_printf(source, "driver %s is older than 515", driver->version);
    } else if (!*driver->kernel) {
        driver->dmabuf = SOURCE_FAILED;
        driver->dmabuf_why = "the release of the kernel is not known";
    } else if (strverscmp(driver->kernel, "5.12") < 0) {
        driver->dmabuf_why = source_printf(source, "Linux %s is older than 5.12", driver->kernel);
    } else if (source_fact_bool(source_fact(source, "no-p2pdma", read_no_p2pdma, "/boot/config-%s", driver->kernel))) {
        driver->dmabuf_why = "the kernel was built without CONFIG_PCI_P2PDMA";
    } else {
        driver->dmabuf = SOURCE_OK;
        driver->dmabuf_why = "";
        FOR_EACH (gpu, topo->gpus, topo->n_gpus)
            if (gpu->cc_major && (gpu->cc_major < 7 || (gpu->cc_major == 7 && gpu->cc_minor < 5))) {
                driver->dmabuf = SOURCE_ABSENT;
                driver->dmabuf_why = source_printf(source, "GPU %d is older than Turing", gpu->index);
            }
    }
}

static enum source_state module_state(struct source *source, const char *name)
{
    return source_stat(source, "/sys/module/%s", name).state;
}

/*
 * Modules that give NICs access to GPU memory without dma-buf; SOURCE_OK if any is loaded: the driver's nvidia_peermem,
 * its predecessor nv_peer_mem of Mellanox, Amazon's efa_nv_peermem, or any other client of OFED's ib_core, which lists
 * its clients in /sys/kernel/mm/memory_peers (ib_peer_mem.h).
 */
static enum source_state peermem_state(struct source *source)
{
    static const char *const modules[] = {"nvidia_peermem", "nv_peer_mem", "efa_nv_peermem"};
    struct source_names clients = source_list(source, "/sys/kernel/mm/memory_peers");
    enum source_state state = SOURCE_ABSENT;

    if (clients.state == SOURCE_OK && clients.n > 0)
        return SOURCE_OK;
    for (size_t i = 0; i < COUNT(modules); i++) {
        enum source_state module = module_state(source, modules[i]);

        if (module == SOURCE_OK)
            return SOURCE_OK;
        state = state == SOURCE_ABSENT ? module : state;
    }
    return state;
}

/* The numbers of devices that checks look at, false for one that is not there: "505 gdrdrv". */
static json_t *read_char_devices(struct source_text file)
{
    json_t *devices = json_pack("{s:b, s:b}", "gdrdrv", 0, "nvidia-uvm", 0);

    while (*file.text) {
        char name[32];
        int number;

        if (sscanf(file.text, "%d %31s", &number, name) == 2 && json_object_get(devices, name))
            json_object_set_new(devices, name, json_integer(number));
        text_take(&file.text, "\n");
    }
    return devices;
}

/* -1: it is known that the loaded module has none; 0: not known. */
static int device_number(struct source *source, const char *module, const char *name)
{
    struct source_answer devices = source_fact(source, "char-devices", read_char_devices, "/proc/devices");
    const json_t *number = json_object_get(devices.value, name);

    return json_is_false(number) && module_state(source, module) == SOURCE_OK ? -1 : (int)json_integer_value(number);
}

void software_read_driver(struct source *source, const struct topo *topo, struct software_driver *driver)
{
    struct source_text version = source_line(source, VERSION);
    struct software_option nothing = {"", "", "", "", ""};

    driver->version = topo_driver_version(source);
    driver->is_open = strstr(version.text, "Open Kernel Module") != NULL;
    driver->kernel = source_line(source, "/proc/sys/kernel/osrelease").text;
    driver->module_version = source_line(source, "/sys/module/nvidia/version").text;
    driver->installed_version = installed_driver(source, driver->kernel);
    driver->peer_mapping_override = nothing;
    read_configured(source, driver);
    read_live(source, &driver->peer_mapping_override);
    driver->peermem = peermem_state(source);
    driver->gdrdrv = module_state(source, "gdrdrv");
    driver->gdrdrv_number = device_number(source, "gdrdrv", "gdrdrv");
    driver->uvm_number = device_number(source, "nvidia_uvm", "nvidia-uvm");
    driver->doca = doca_version(source);
    read_fabric_manager(source, driver);
    find_dmabuf(source, topo, driver);
}
