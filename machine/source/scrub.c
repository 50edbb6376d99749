/* SPDX-License-Identifier: Apache-2.0 */
/*
 * scrub.c - which entries get into a snapshot, and by which rule.
 *
 * A new file to read needs a row here; without one it is not in snapshots. For a text without a strict format a fact is
 * saved (source_fact()), which needs a row only if it holds text. tests/unit/test_source_deny.c runs identifiers of
 * every type through every row; tests/unit/test_source_scrub.c has a machine full of them, to which the new file is to
 * be added as well.
 */
#include "scrub.h"
#include "common/json.h"
#include "common/memory.h"
#include "common/text.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PCI "/sys/bus/pci/devices/*/"
#define RDMA "/sys/class/infiniband/*/"
#define NET "/sys/class/net/*/"

/* Words of the kernel: speeds of links, states of ports and interfaces, kinds of ports, GIDs and IOMMU groups. */
#define SPEED "GT/s PCIe Unknown"
#define STATE                                                                                                          \
    "NOP: DOWN INIT ARMED ACTIVE ACTIVE_DEFER Sleep Polling Disabled LinkUp PortConfigurationTraining "                \
    "LinkErrorRecovery Phy Test"
#define RATE "Gb/sec (1X (2X (4X (8X (12X SDR) DDR) QDR) FDR10) FDR) EDR) HDR) NDR) XDR)"
#define INTERFACE "up down unknown dormant lowerlayerdown notpresent testing going back"
#define MEMORY "Node kB MemTotal: MemFree: MemAvailable: HugePages_Total: HugePages_Free:"
#define VERSION                                                                                                        \
    "cuda# cu# ubuntu# deb# deb#u# el# rc# post# dev# mlnx# gke cos git a# b# x86 aarch64 amd64 arm64 noarch fips"
/* Products whose number of GPUs is known, and names that hypervisors use. */
#define PRODUCTS                                                                                                          \
    "NVIDIA DGX Spark DGXA# DGXH# DGXB# A# H# p# p#d p#de p#e p#en b# #xlarge Google Compute Engine KVM Virtual Machine " \
    "VMware VMware# HVM domU Standard PC BHYVE OpenStack"
#define GPUS                                                                                                           \
    "Model GPU UUID Device Minor Excluded Yes No NVIDIA Tesla GeForce Quadro TITAN RTX Grace Hopper Blackwell "        \
    "Generation Ada Super Ti Graphics HBM#e HBM# SXM SXM# SXM#e PCIe PCIE NVL A# B# H# L# L#S P# R# T# V# K# GB# GH#"
#define FILE_SYSTEMS                                                                                                   \
    "tmpfs ramfs hugetlbfs overlay fuse.fuse-overlayfs proc sysfs cgroup cgroup2 devpts devtmpfs mqueue ext4 xfs "     \
    "btrfs zfs vfat squashfs nfs nfs4 lustre gpfs beegfs debugfs tracefs configfs bpf autofs iso9660 securityfs "      \
    "efivarfs fuse 9p virtiofs"
#define EVENTS "begin start end failed reboot stopped finished rebuilt repaired undo uninstalled undone again"

/* The first match counts. */
static const struct scrub_row file_rows[] = {
    {PCI "class", scrub_lines, "", NULL},
    {PCI "vendor", scrub_lines, "", NULL},
    {PCI "device", scrub_lines, "", NULL},
    {PCI "numa_node", scrub_lines, "", NULL},
    {PCI "local_cpulist", scrub_lines, "", NULL},
    {PCI "current_link_*", scrub_lines, SPEED, NULL},
    {PCI "max_link_*", scrub_lines, SPEED, NULL},
    {"/sys/devices/system/node/**/meminfo", scrub_lines, MEMORY, "64 bits"},
    {"/sys/devices/system/node/**", scrub_lines, "", NULL},
    {"/sys/class/dmi/id/product_name", scrub_words, PRODUCTS, NULL},
    {"/sys/kernel/iommu_groups/*/type", scrub_lines, "identity DMA DMA-FQ blocked auto", NULL},
    {"/sys/module/*/version", scrub_version, VERSION, NULL},
    {RDMA "hca_type", scrub_words, "MT# BCM# EFA#", NULL},
    {RDMA "node_type", scrub_lines, "#: CA RNIC", NULL},
    {RDMA "fw_ver", scrub_version, VERSION, NULL},
    {RDMA "ports/*/state", scrub_lines, STATE, NULL},
    {RDMA "ports/*/phys_state", scrub_lines, STATE, NULL},
    {RDMA "ports/*/rate", scrub_lines, RATE, NULL},
    {RDMA "ports/*/link_layer", scrub_lines, "InfiniBand Ethernet Unspecified", NULL},
    {RDMA "ports/*/gids/*", scrub_words, "", NULL},
    {RDMA "ports/*/gid_attrs/types/*", scrub_lines, "IB/RoCE RoCE v1 v2", NULL},
    {RDMA "ports/*/gid_attrs/ndevs/*", scrub_words, SCRUB_DEVICE_WORDS, NULL},
    {RDMA "ports/*/counters/*", scrub_lines, "", "64 bits"},
    {RDMA "ports/*/hw_counters/*", scrub_lines, "", "64 bits"},
    {RDMA "device/infiniband_verbs/*/ibdev", scrub_words, SCRUB_DEVICE_WORDS, NULL},
    {"/sys/class/infiniband_verbs/*/ibdev", scrub_words, SCRUB_DEVICE_WORDS, NULL},
    {"/sys/class/infiniband_verbs/*/abi_version", scrub_lines, "", NULL},
    {RDMA "device/net/*/dev_port", scrub_lines, "", NULL},
    {NET "statistics/*", scrub_lines, "", "64 bits"},
    {NET "operstate", scrub_lines, INTERFACE, NULL},
    {NET "mtu", scrub_lines, "", NULL},
    {NET "speed", scrub_lines, "", NULL},
    {NET "carrier", scrub_lines, "", NULL},
    {NET "carrier_down_count", scrub_lines, "", NULL},
    {NET "bonding/slaves", scrub_words, SCRUB_DEVICE_WORDS, NULL},
    {NET "bonding_slave/mii_status", scrub_lines, INTERFACE, NULL},
    {"/sys/class/net/bonding_masters", scrub_words, SCRUB_DEVICE_WORDS, NULL},
    {"/sys/fs/cgroup/cpu.max", scrub_lines, "max", NULL},
    {"/sys/fs/cgroup/cpu/cpu.cfs_*_us", scrub_lines, "", NULL},
    {"/sys/fs/cgroup/pids.*", scrub_lines, "max", NULL},
    {"/sys/fs/cgroup/pids/pids.*", scrub_lines, "max", NULL},
    {"/proc/driver/nvidia/version", scrub_fields,
     "NVRM version NVIDIA UNIX Open Kernel Module for x86 aarch64 Release Build", "NVRM version:"},
    {"/proc/driver/nvidia/params", scrub_dwords, "", "RegistryDwords: "},
    {"/proc/driver/nvidia/gpus/*/information", scrub_fields, GPUS, "Model:,GPU UUID:,Device Minor:,GPU Excluded:"},
    {"/proc/self/limits", scrub_lines,
     "Limit Soft Hard Units Max open files locked memory processes bytes size stack core file unlimited", "64 bits"},
    {"/proc/self/status", scrub_lines, "Cpus_allowed_list: Mems_allowed_list: CapEff: Seccomp:", NULL},
    {"/proc/meminfo", scrub_lines, MEMORY, "64 bits"},
    {"/proc/cmdline", scrub_dwords,
     "iommu=pt iommu.passthrough=1 iommu.passthrough=y iommu.passthrough=on iommu.passthrough=true",
     "nvidia.NVreg_RegistryDwords="},
    {"/proc/sys/net/ipv4/conf/*/arp_*", scrub_lines, "", NULL},
    {"/proc/sys/kernel/numa_balancing", scrub_lines, "", NULL},
    {"/proc/sys/kernel/yama/ptrace_scope", scrub_lines, "", NULL},
    {"/proc/sys/kernel/osrelease", scrub_words, SCRUB_RELEASE_WORDS, ""},
    {"/etc/ld.so.conf", scrub_fields, "include ld so conf d", "/,include "},
    {"**/ld.so.conf.d/*.conf", scrub_fields, "include ld so conf d", "/,include "},
    {"/etc/libibverbs.d/*.driver", scrub_fields, "driver efa irdma erdma cxgb4 qedr hns " SCRUB_DEVICE_WORDS,
     "driver "},
};

/* Words in values of variables; others have the values that common/env_variables_table.c lists. */
#define VALUES                                                                                                           \
    "on off yes no true false none void all any auto default inf max min gpu mig try ib socket x# "                      \
    "utf en us nodevfiles expandable segments rc ud dc sm sysv posix copy ipc gdr cma knem xpmem flashinfer nvlink one " \
    "two sided " SCRUB_LIBRARY_WORDS

/* Symbols of the C++ library, PyTorch, NCCL, NVSHMEM, CUDA and rdma-core. */
#define SYMBOLS                                                                                                           \
    "_ZSt* _ZNSt* _ZNKSt* _ZN3c10* _ZNK3c10* _ZTVN3c10* _ZTIN3c10* _ZN2at* _ZNK2at* _ZN5torch* _ZTVN5torch* _ZN6caffe2* " \
    "_ZN7deep_ep* _Z#THP* THP* aoti_torch* nccl* nvshmem* nvshmemi* __cuda* cuda* cu* ibv* mlx5dv*"

/* Facts that are or hold text. Of all other facts, booleans and numbers stay. */
static const struct scrub_row fact_rows[] = {
    {"version", scrub_version, VERSION, NULL},
    {"packages", scrub_version, VERSION, NULL},
    {"nvidia-dwords", scrub_dwords, "", NULL},
    {"xids", scrub_event, NULL, NULL},
    {"sxids", scrub_event, NULL, NULL},
    {"gpu-inits", scrub_event, NULL, NULL},
    {"gpus-without-window", scrub_event, NULL, NULL},
    {"topology-gpus", scrub_event, NULL, NULL},
    {"gib-settings", scrub_variable, VALUES, NULL},
    {"nccl-conf", scrub_variable, VALUES, NULL},
    {"default-routes", scrub_words, SCRUB_DEVICE_WORDS, NULL},
    {"mapped", scrub_path_list, NULL, NULL},
    {"shm-mount", scrub_words, "dev shm " FILE_SYSTEMS, NULL},
    {"journal", scrub_words, EVENTS, NULL},
    {"host-name", scrub_words, "", NULL},
    {"loopback-names", scrub_words, "", NULL},
    {"shared-subnets", scrub_words, SCRUB_DEVICE_WORDS, NULL},
    {"equal-routes", scrub_words, SCRUB_DEVICE_WORDS, NULL},
    {"ipv6-interfaces", scrub_words, SCRUB_DEVICE_WORDS, NULL},
    {"dropped-connections", scrub_words, SCRUB_DEVICE_WORDS, NULL},
    {"Link *", scrub_words, SCRUB_DEVICE_WORDS, NULL},
    {"health *", scrub_words, SCRUB_DEVICE_WORDS, NULL},
    {"nccl-switches", scrub_event, NULL, NULL},
    {"pth", scrub_path_list, NULL, NULL},
    {"editable", scrub_path_list, NULL, NULL},
    {"missing-symbols", scrub_symbol, SYMBOLS, NULL},
    {"fabric-manager*", scrub_version, VERSION, NULL},
    {CACHE_ENVIRONMENT_FACT, scrub_variable, VALUES, NULL},
};

/* Folders whose names all stay; in others, names of common software (scrub_name()). */
static const char *const *const folder_rows =
    TEXTS("/sys/**", "/dev/shm", "/proc/driver/nvidia/**", "/dev/infiniband", "/dev/nvidia-caps-imex-channels",
          "**/modprobe.d", "/etc/profile.d", "/var/lib/epkit/install", "**/ld.so.conf.d", "/lib/modules/**",
          "/usr/lib/modules/**");

/* Answers whose strings stay, after the general pass. */
static const char *const *const answer_rows = TEXTS("nvml", "load:**", "ethtool:**", "shm");

static bool matches_any(const char *const *patterns, const char *text)
{
    for (; *patterns; patterns++)
        if (scrub_match(*patterns, text))
            return true;
    return false;
}

static const struct scrub_row *row_of(const struct scrub_row *rows, size_t n, const char *path)
{
    for (size_t i = 0; i < n; i++)
        if (scrub_match(rows[i].pattern, path))
            return &rows[i];
    return NULL;
}

/* --- strings --- */

/* Puts '?' for what JSON cannot hold: bytes that are not UTF-8. */
static void make_utf8(char *text, size_t bytes)
{
    uint32_t code;

    for (size_t at = 0, n; at < bytes; at += n) {
        n = text_decode(text + at, bytes - at, &code);
        if (n > 0 && n != TEXT_INCOMPLETE)
            continue;
        text[at] = '?';
        n = 1;
    }
}

/* What is left of a string under a rule; a new value. */
static json_t *apply_row(struct scrub *scrub, const struct scrub_row *row, const json_t *value)
{
    char *kept;
    size_t n;
    FILE *out = memory_stream(&kept, &n);
    json_t *string;

    row->rule(scrub, json_string_value(value), json_string_length(value), row, out);
    memory_close(out);
    make_utf8(kept, n);
    string = json_stringn(kept, n);
    free(kept);
    return string;
}

static void rule_path(struct scrub *scrub, const char *text, size_t bytes, const struct scrub_row *row, FILE *out)
{
    (void)row;
    if (bytes == 1)
        fputc('/', out);
    else
        scrub_path(scrub, text, bytes, out);
}

/* A name in the folder `words`. */
static void rule_name(struct scrub *scrub, const char *text, size_t bytes, const struct scrub_row *row, FILE *out)
{
    (void)bytes;
    scrub_name(scrub, row->words, text, out);
}

/* The name of a symbol of a library, or of its version. */
static void rule_symbol(struct scrub *scrub, const char *text, size_t bytes, const struct scrub_row *row, FILE *out)
{
    scrub_text(scrub, text, bytes, SCRUB_NAME | SCRUB_VERSIONS, row->words, out);
}

static const struct scrub_row text_row = {"", scrub_any, NULL, NULL};
static const struct scrub_row path_row = {"", rule_path, NULL, NULL};
static const struct scrub_row paths_row = {"", scrub_path_list, NULL, NULL};
static const struct scrub_row symbol_row = {"", rule_symbol, SCRUB_LIBRARY_WORDS, NULL};

/* In an ELF file $ORIGIN/../x is a path as well, and versions of symbols are user-chosen. */
static const struct scrub_row *row_of_member(const char *key, const struct scrub_row *row)
{
    if (strcmp(key, "runpath") == 0 || strcmp(key, "rpath") == 0)
        return &paths_row;
    return strcmp(key, "definitions") == 0 || strcmp(key, "needs") == 0 ? &symbol_row : row;
}

/* The value of a variable; NULL if it may not be saved. */
static json_t *scrub_setting(struct scrub *scrub, const struct scrub_row *row, const char *name, const json_t *value)
{
    struct scrub_row named = *row;

    named.keys = name;
    return scrub_allows_variable(name) ? apply_row(scrub, &named, value) : NULL;
}

static json_t *scrub_value(struct scrub *scrub, const struct scrub_row *row, const json_t *value);

static json_t *scrub_object(struct scrub *scrub, const struct scrub_row *row, const json_t *object)
{
    json_t *copy = json_object(), *kept;

    FOR_MEMBERS (key, item, object) {
        if (strstr(key, "serial") || strcmp(key, "hostname") == 0)
            continue;
        if (row && row->rule == scrub_variable && json_is_string(item))
            kept = scrub_setting(scrub, row, key, item);
        else
            kept = scrub_value(scrub, row ? row_of_member(key, row) : NULL, item);
        if (kept)
            json_object_set_new_nocheck(copy, key, kept);
    }
    return copy;
}

/* All strings of a value under a rule; without one, they and lists are omitted. Keys belong to a format. */
static json_t *scrub_value(struct scrub *scrub, const struct scrub_row *row, const json_t *value)
{
    json_t *copy;

    if (json_is_object(value))
        return scrub_object(scrub, row, value);
    if (!json_is_string(value) && !json_is_array(value))
        return json_incref((json_t *)value);
    if (!row)
        return json_null();
    if (json_is_string(value))
        return apply_row(scrub, row, value);
    copy = json_array();
    FOR_JSON (item, value)
        json_array_append_new(copy, scrub_value(scrub, row, item));
    return copy;
}

/* --- entries --- */

/* Names in a folder: all if a row says so, else only those that identify no owner. */
static json_t *scrub_names(struct scrub *scrub, const char *folder, const json_t *names)
{
    bool all = matches_any(folder_rows, folder);
    const struct scrub_row row = {"", rule_name, folder, NULL};
    json_t *copy = json_array();

    FOR_JSON (name, names)
        if (all || scrub_is_common(scrub, folder, json_string_value(name)) || scrub_is_dist(json_string_value(name)))
            json_array_append_new(copy, apply_row(scrub, &row, name));
    return copy;
}

/* The row of an entry, or NULL if it is omitted. */
static const struct scrub_row *row_of_entry(enum cache_kind kind, const char *key)
{
    size_t n = strcspn(key, "\t");

    switch (kind) {
    case CACHE_FILES:
        return row_of(file_rows, COUNT(file_rows), key);
    case CACHE_LINES:
        return NULL;
    case CACHE_FACTS:
        return key[n] ? row_of(fact_rows, COUNT(fact_rows), key + n + 1) : NULL;
    case CACHE_ANSWERS:
        return matches_any(answer_rows, key) ? &text_row : NULL;
    case CACHE_LINKS:
        return &path_row;
    default:
        return &text_row;
    }
}

/* The scrubbed entry, or NULL if it is omitted. */
static json_t *scrub_entry(struct scrub *scrub, enum cache_kind kind, const char *key, const json_t *entry)
{
    const struct scrub_row *row = row_of_entry(kind, key);
    const char *why;

    /* Errors are saved for every path: that it does not exist, or why it could not be read. */
    if (cache_state(entry, &why) != SOURCE_OK)
        return scrub_value(scrub, &text_row, entry);
    if (!row && kind != CACHE_FACTS)
        return NULL;
    if (kind == CACHE_FOLDERS)
        return scrub_names(scrub, key, entry);
    return kind == CACHE_STATS ? json_deep_copy(entry) : scrub_value(scrub, row, entry);
}

/* For free(). */
static char *scrub_key(struct scrub *scrub, enum cache_kind kind, const char *key)
{
    size_t n = kind == CACHE_LINES || kind == CACHE_FACTS ? strcspn(key, "\t") : strlen(key);
    json_t *given = json_stringn_nocheck(key, n);
    json_t *scrubbed = apply_row(scrub, kind == CACHE_ANSWERS ? &text_row : &path_row, given);
    /* The search text and the name of the fact are constants of epkit. */
    char *text = memory_printf("%s%s", json_string_value(scrubbed), key + n);

    json_decref(given);
    json_decref(scrubbed);
    return text;
}

static json_t *scrub_kind(struct scrub *scrub, enum cache_kind kind, const json_t *entries)
{
    json_t *copy = json_object();

    FOR_MEMBERS (key, entry, entries) {
        json_t *kept = scrub_entry(scrub, kind, key, entry);
        char *name = kept ? scrub_key(scrub, kind, key) : NULL;

        if (kept)
            json_object_set_new_nocheck(copy, name, kept);
        free(name);
    }
    return copy;
}

/* --- registration of known names --- */

static void learn_value(struct scrub *scrub, const json_t *value)
{
    FOR_JSON (item, value)
        learn_value(scrub, item);
    FOR_MEMBERS (key, item, value)
        learn_value(scrub, item);
    if (json_is_string(value))
        scrub_learn_uuids(scrub, json_string_value(value), json_string_length(value));
}

/* Registers a host also without its domain. */
static void learn_host(struct scrub *scrub, const char *name)
{
    char host[256];

    snprintf(host, sizeof(host), "%s", name);
    scrub_learn_name(scrub, SCRUB_HOST, host);
    host[strcspn(host, ".")] = '\0';
    scrub_learn_name(scrub, SCRUB_HOST, host);
}

static void learn_variable(struct scrub *scrub, const char *name, const char *value)
{
    if (text_is_any(name, TEXTS("USER", "LOGNAME", "SUDO_USER", "USERNAME")))
        scrub_learn_name(scrub, SCRUB_USER, value);
    if (text_is_any(name, TEXTS("HOSTNAME", "HOST", "NODE_NAME", "SLURMD_NODENAME", "POD_NAME")))
        learn_host(scrub, value);
    if (strcmp(name, "HOME") == 0)
        scrub_learn_name(scrub, SCRUB_USER, text_base(value));
}

/* Registers names of devices. */
static void learn_folder(struct scrub *scrub, const char *folder, const json_t *names)
{
    FOR_JSON (name, names) {
        if (!json_is_string(name))
            continue;
        if (strcmp(folder, "/sys/class/infiniband") == 0 || strcmp(folder, "/sys/class/net") == 0 ||
            scrub_match("/sys/class/infiniband/*/device/net", folder))
            json_object_set_new_nocheck(scrub->maps[SCRUB_DEVICES], json_string_value(name), json_true());
    }
}

static void learn_all(struct scrub *scrub, json_t *const cached[CACHE_KINDS], bool is_live)
{
    const json_t *fact = json_object_get(cached[CACHE_FACTS], CACHE_ENVIRONMENT "\t" CACHE_ENVIRONMENT_FACT),
                 *fact_name;
    const char *user;
    char host[256] = "";

    for (int kind = 0; kind < CACHE_KINDS; kind++)
        learn_value(scrub, cached[kind]);
    FOR_MEMBERS (name, value, cached[CACHE_FOLDERS])
        learn_folder(scrub, name, value);
    scrub_learn_confs(scrub, cached);
    fact_name = json_object_get(cached[CACHE_FACTS], "/proc/sys/kernel/hostname\thost-name");
    if (json_is_string(json_object_get(fact_name, "value")))
        learn_host(scrub, json_string_value(json_object_get(fact_name, "value")));
    FOR_MEMBERS (name, value, json_object_get(fact, "value"))
        if (json_is_string(value))
            learn_variable(scrub, name, json_string_value(value));
    if (!is_live)
        return;
    if (gethostname(host, sizeof(host) - 1) == 0)
        learn_host(scrub, host);
    /* Not from the user database, which may query the network. */
    user = getenv("USER");
    if (user)
        scrub_learn_name(scrub, SCRUB_USER, user);
}

void scrub_init(struct scrub *scrub)
{
    for (int map = 0; map < SCRUB_MAPS; map++)
        scrub->maps[map] = json_object();
}

void scrub_done(struct scrub *scrub)
{
    for (int map = 0; map < SCRUB_MAPS; map++)
        json_decref(scrub->maps[map]);
}

json_t *scrub_snapshot(json_t *const cached[CACHE_KINDS], bool is_live)
{
    struct scrub scrub;
    json_t *all = json_object();

    scrub_init(&scrub);
    learn_all(&scrub, cached, is_live);
    for (int kind = 0; kind < CACHE_KINDS; kind++)
        json_object_set_new(all, cache_kind_names[kind], scrub_kind(&scrub, (enum cache_kind)kind, cached[kind]));
    scrub_done(&scrub);
    return all;
}
