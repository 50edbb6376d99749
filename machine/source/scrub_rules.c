/* SPDX-License-Identifier: Apache-2.0 */
/* scrub_rules.c - rules for the contents of files, one for each kind of file. */
#include "common/loopback.h"
#include "common/secret.h"
#include "scrub.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

/* Is it one of the space-separated `words`? A word that ends with '*' is a prefix. */
static bool is_among(const char *word, size_t bytes, const char *words)
{
    for (size_t n; *words; words += n, words += *words == ' ') {
        n = strcspn(words, " ");
        if (words[n - 1] == '*' ? bytes >= n - 1 && strncmp(word, words, n - 1) == 0
                                : bytes == n && strncmp(word, words, n) == 0)
            return true;
    }
    return false;
}

bool scrub_line(const char **text, const char *end, const char **ret_line, size_t *ret_bytes)
{
    const char *newline;

    if (*text >= end)
        return false;
    newline = memchr(*text, '\n', (size_t)(end - *text));
    *ret_line = *text;
    *ret_bytes = (size_t)((newline ? newline : end) - *text);
    *text += *ret_bytes + 1;
    return true;
}

/* Words separated by white space. */
static bool next_word(const char **text, const char *end, const char **ret_word, size_t *ret_bytes)
{
    while (*text < end && isspace((unsigned char)**text))
        ++*text;
    *ret_word = *text;
    while (*text < end && !isspace((unsigned char)**text))
        ++*text;
    *ret_bytes = (size_t)(*text - *ret_word);
    return *ret_bytes > 0;
}

/* --- any text --- */

void scrub_as_is(struct scrub *scrub, const char *text, size_t bytes, FILE *out)
{
    (void)scrub;
    fwrite(text, 1, bytes, out);
}

/* Lines of numbers and plain words only: "MemTotal:  1 kB", "Node 0 MemFree: 1 kB", "Max open files  1 1 files". */
static bool is_strict_line(const char *line, size_t n)
{
    static const char words[] =
        "Node kB MemTotal: MemFree: MemAvailable: HugePages_Total: HugePages_Free: Limit Soft Hard Units Max open "
        "files locked memory processes bytes size stack core file unlimited";
    const char *end = line + n, *word;
    size_t length, digits;

    while (next_word(&line, end, &word, &length)) {
        digits = strspn(word, "0123456789");
        if ((digits < length || length > 20) && !is_among(word, length, words))
            return false;
    }
    return true;
}

void scrub_numbers(struct scrub *scrub, const char *text, size_t bytes, FILE *out)
{
    const char *end = text + bytes, *line;
    size_t n;

    (void)scrub;
    while (scrub_line(&text, end, &line, &n)) {
        if (!is_strict_line(line, n))
            continue;
        fwrite(line, 1, n, out);
        fputc('\n', out);
    }
}

/*
 * Words in attributes of the kernel: states of ports, links, interfaces and modules, rates, layers, kinds of GIDs and
 * of IOMMU groups.
 */
static const char attribute_words[] =
    "CA RNIC NOP DOWN INIT ARMED ACTIVE ACTIVE_DEFER Sleep Polling Disabled LinkUp PortConfigurationTraining "
    "LinkErrorRecovery Phy Test Gb/sec SDR DDR QDR FDR FDR10 EDR HDR NDR XDR 1X 2X 4X 8X 12X InfiniBand Ethernet "
    "Unspecified IB/RoCE RoCE v1 v2 GT/s PCIe Unknown up down unknown dormant lowerlayerdown notpresent testing "
    "going back live coming max identity DMA DMA-FQ blocked auto on off Linux enabled disabled yes no none";

/*
 * A number of the kernel: decimal of up to 9 digits, with a point or as a list ("0-3,8"), or up to 8 hexadecimal digits
 * after 0x. Two dashes without a comma between them, or two points, are an address.
 */
static bool is_attribute_number(const char *word, size_t n)
{
    size_t n_dashes = 0, n_points = 0, n_digits = 0;

    if (n > 2 && n <= 10 && word[0] == '0' && word[1] == 'x') {
        for (size_t i = 2; i < n; i++)
            if (!isxdigit((unsigned char)word[i]))
                return false;
        return true;
    }
    for (size_t i = 0; i < n; i++) {
        n_dashes = word[i] == ',' ? 0 : n_dashes + (word[i] == '-' && i > 0);
        n_points += word[i] == '.';
        n_digits = isdigit((unsigned char)word[i]) ? n_digits + 1 : 0;
        if (!strchr("0123456789.,-", word[i]) || n_dashes > 1 || n_points > 1 || n_digits > 9)
            return false;
    }
    return n > 0;
}

void scrub_counter(struct scrub *scrub, const char *text, size_t bytes, FILE *out)
{
    size_t n = 0;

    (void)scrub;
    while (n < bytes && isdigit((unsigned char)text[n]))
        n++;
    fprintf(out, "%.*s\n", n <= 20 && (n == bytes || text[n] == '\n') ? (int)n : 0, text);
}

/* One line, dropped unless it consists of words of the kernel and numbers. */
void scrub_attribute(struct scrub *scrub, const char *text, size_t bytes, FILE *out)
{
    const char *newline = memchr(text, '\n', bytes), *end = newline ? newline : text + bytes;
    bool is_strict = true;

    (void)scrub;
    for (const char *at = text; at < end && is_strict;) {
        size_t n = 0;

        while (at + n < end && !strchr(" \t()", at[n]))
            n++;
        /* "4: ACTIVE" */
        is_strict = n == 0 || is_among(at, n, attribute_words) ||
                    is_attribute_number(at, n > 1 && at[n - 1] == ':' ? n - 1 : n);
        at += n + 1;
    }
    if (is_strict)
        fwrite(text, 1, (size_t)(end - text), out);
    if (newline)
        fputc('\n', out);
}

void scrub_words(struct scrub *scrub, const char *text, size_t bytes, FILE *out)
{
    scrub_text(scrub, text, bytes, SCRUB_VERSIONS | SCRUB_WORDS, out);
}

void scrub_versions(struct scrub *scrub, const char *text, size_t bytes, FILE *out)
{
    scrub_text(scrub, text, bytes, SCRUB_VERSIONS, out);
}

/* Eight groups of four digits. */
void scrub_gid(struct scrub *scrub, const char *text, size_t bytes, FILE *out)
{
    size_t n = strspn(text, "0123456789abcdef:");

    if (n == 39 && n <= bytes)
        scrub_text(scrub, text, n, 0, out);
    fputc('\n', out);
}

/* The driver's version text; the names of its builders are words like any other. */
void scrub_driver(struct scrub *scrub, const char *text, size_t bytes, FILE *out)
{
    static const char version[] = "NVRM version:";
    const char *end = text + bytes, *line;
    size_t n;

    while (scrub_line(&text, end, &line, &n)) {
        if (n < sizeof(version) - 1 || memcmp(line, version, sizeof(version) - 1) != 0)
            continue;
        scrub_text(scrub, line, n, SCRUB_VERSIONS | SCRUB_WORDS, out);
        fputc('\n', out);
    }
}

/* --- hardware --- */

/*
 * PCI Express Base Specification, chapter 7: the first 64 bytes are the header. Capabilities may hold a serial number:
 * of each the header stays, of PCI Express (id 0x10) and Access Control Services (extended, id 0x000d) everything, and
 * all other bytes become zero.
 */
static void copy_bytes(const char *from, size_t bytes, size_t at, size_t n, char *to)
{
    if (at < bytes)
        memcpy(to + at, from + at, n < bytes - at ? n : bytes - at);
}

static unsigned byte_of(const char *text, size_t bytes, size_t at)
{
    return at < bytes ? (unsigned char)text[at] : 0;
}

void scrub_pci_config(struct scrub *scrub, const char *text, size_t bytes, FILE *out)
{
    char *kept = calloc(1, bytes ? bytes : 1);
    size_t at = byte_of(text, bytes, 0x34) & 0xfc;

    if (!kept) {
        scrub->failed = true;
        return;
    }
    copy_bytes(text, bytes, 0, 64, kept);
    /* A chain has at most as many links as there are possible positions. */
    for (int i = 0; at >= 64 && i < 48; i++) {
        copy_bytes(text, bytes, at, byte_of(text, bytes, at) == 0x10 ? 60 : 2, kept);
        at = byte_of(text, bytes, at + 1) & 0xfc;
    }
    at = 256;
    for (int i = 0; at >= 256 && i < 960; i++) {
        unsigned id = byte_of(text, bytes, at) | byte_of(text, bytes, at + 1) << 8;

        copy_bytes(text, bytes, at, id == 0x000d ? 8 : 4, kept);
        at = (byte_of(text, bytes, at + 2) >> 4 | byte_of(text, bytes, at + 3) << 4) & 0xffc;
    }
    fwrite(kept, 1, bytes, out);
    free(kept);
}

void scrub_information(struct scrub *scrub, const char *text, size_t bytes, FILE *out)
{
    static const char *const words[] = {"Model:", "Device Minor:", "GPU Excluded:"};
    static const char uuid[] = "GPU UUID:";
    const char *end = text + bytes, *line;
    size_t n;

    while (scrub_line(&text, end, &line, &n)) {
        for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++) {
            if (n < strlen(words[i]) || memcmp(line, words[i], strlen(words[i])) != 0)
                continue;
            fputs(words[i], out);
            scrub_text(scrub, line + strlen(words[i]), n - strlen(words[i]), SCRUB_VERSIONS | SCRUB_WORDS, out);
            fputc('\n', out);
        }
        if (n < sizeof(uuid) - 1 || memcmp(line, uuid, sizeof(uuid) - 1) != 0)
            continue;
        /* Question marks until the GPU was used. */
        if (memchr(line, '?', n) || n < sizeof(uuid) - 1 + 40 || memcmp(line + n - 40, "GPU-", 4) != 0)
            fputs("GPU UUID: ?\n", out);
        else {
            fputs("GPU UUID: \t ", out);
            scrub_text(scrub, line + n - 40, 40, 0, out);
            fputc('\n', out);
        }
    }
}

/* --- process --- */

static const char variables_kept[] =
    "NVSHMEM_* NCCL_* DEEP_EP_* DEEPEP_* GDRCOPY_* UCX_* MLX5_* IBV_* RDMAV_* CUDA_* TORCH_NCCL_* "
    "TORCH_CUDA_ARCH_LIST LD_LIBRARY_PATH LD_PRELOAD LD_AUDIT PATH PYTHONPATH PYTHONHOME VIRTUAL_ENV CONDA_PREFIX "
    "PYTHONNOUSERSITE PYTHONUSERBASE HOME LANG MPI_HOME OMPI_MCA_btl* OMPI_MCA_pml NVIDIA_VISIBLE_DEVICES container "
    "KUBERNETES_SERVICE_HOST NVIDIA_DRIVER_CAPABILITIES WORLD_SIZE RANK LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK "
    "MASTER_ADDR MASTER_PORT NNODES GROUP_WORLD_SIZE OMPI_COMM_WORLD_* MPI_LOCAL* PMI_SIZE PMI_LOCAL_SIZE PMI_RANK "
    "PMI_LOCAL_RANK SLURM_JOB_NUM_NODES SLURM_NNODES SLURM_NTASKS SLURM_STEP_NUM_TASKS SLURM_STEP_TASKS_PER_NODE "
    "SLURM_LOCALID SLURM_NODEID SLURM_PROCID GLOO_SOCKET_IFNAME USE_NVPEERMEM DISABLE_SM90_FEATURES OMP_NUM_THREADS "
    "PYTORCH_CUDA_ALLOC_CONF FI_PROVIDER EP_* EPKIT_*";

/* Variables whose value is a host name, which no pattern recognises. */
static bool is_host_variable(const char *name)
{
    static const char names[] = "MASTER_ADDR NCCL_HOSTID NCCL_COMM_ID NCCL_RAS_ADDR NVSHMEM_BOOTSTRAP_UID_SESSION_ID";

    return is_among(name, strlen(name), names);
}

static bool is_plain_name(const char *name)
{
    return name[0] && name[strspn(name, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_")] == '\0';
}

static void write_host_value(struct scrub *scrub, const char *value, FILE *out)
{
    const char *port = strchr(value, ':');
    char host[256];

    /* The loopback address is the same everywhere. */
    if (address_is_loopback(value)) {
        fputs(strchr(value, ':') ? "::1" : isdigit((unsigned char)*value) ? "127.0.0.1" : "localhost", out);
        return;
    }
    /* The general pass replaces addresses. */
    if (value[strspn(value, "0123456789.:[]abcdefABCDEF")] == '\0' && strpbrk(value, ".:")) {
        scrub_text(scrub, value, strlen(value), 0, out);
        return;
    }
    snprintf(host, sizeof(host), "%.*s", (int)(port ? port - value : (ptrdiff_t)strlen(value)), value);
    fprintf(out, "host%d", scrub_number(scrub, SCRUB_HOST, host));
    if (port && port[1] && port[1 + strspn(port + 1, "0123456789")] == '\0')
        fputs(port, out);
}

/* Lists of files and folders, which need not be absolute. */
void scrub_path_list(struct scrub *scrub, const char *value, size_t bytes, FILE *out)
{
    static const char own[] = ". $ORIGIN ${ORIGIN} $LIB ${LIB} $PLATFORM ${PLATFORM}";
    const char *end = value + bytes;
    char item[PATH_MAX], *name, *rest;

    while (value < end) {
        size_t n = strcspn(value, ": \"'");

        n = n < (size_t)(end - value) ? n : (size_t)(end - value);
        if (n > 0 && value[0] == '/') {
            scrub_path(scrub, value, n, out);
        } else if (n > 0 && n < sizeof(item)) {
            memcpy(item, value, n);
            item[n] = '\0';
            for (rest = item; (name = strsep(&rest, "/"));) {
                if (is_among(name, strlen(name), own))
                    fputs(name, out);
                else
                    scrub_name(scrub, "", name, out);
                if (rest)
                    fputc('/', out);
            }
        }
        value += n;
        if (value < end)
            fputc(*value++, out);
    }
}

/*
 * A short number, or a memory size in whole pages, identifies nothing. A longer one may be a serial number or an
 * account.
 */
static bool is_plain_count(const char *value)
{
    size_t n = strspn(value, "0123456789");

    return !value[n] && (n <= 9 || (n <= 15 && strtoull(value, NULL, 10) % 4096 == 0));
}

bool scrub_allows_variable(const char *name)
{
    return is_plain_name(name) && strlen(name) < 128 && is_among(name, strlen(name), variables_kept) &&
           !secret_is_name(name);
}

void scrub_variable(struct scrub *scrub, const char *text, size_t bytes, FILE *out)
{
    static const char path_lists[] = "LD_LIBRARY_PATH LD_PRELOAD LD_AUDIT PATH PYTHONPATH";
    size_t n = strcspn(text, "=");
    const char *value = text + n + 1;
    char name[128];

    if (n >= bytes || n >= sizeof(name))
        return;
    memcpy(name, text, n);
    name[n] = '\0';
    if (is_host_variable(name))
        write_host_value(scrub, value, out);
    else if (is_among(name, n, path_lists))
        scrub_path_list(scrub, value, strlen(value), out);
    else if (is_plain_count(value))
        fputs(value, out);
    else
        scrub_text(scrub, value, strlen(value), SCRUB_VERSIONS | SCRUB_WORDS, out);
}

/*
 * Documentation/admin-guide/kernel-parameters.txt of Linux, without parameters that name a disk, a host or an address.
 */
static const char parameters_kept[] =
    "ro rw quiet splash iommu iommu.* intel_iommu amd_iommu arm-smmu* pci pcie_* pci.* hugepages hugepagesz "
    "default_hugepagesz transparent_hugepage numa_balancing isolcpus nohz_full nohz rcu_nocbs rcu_nocb_poll "
    "mitigations nosmt nokaslr kpti nvidia* nouveau* modprobe.blacklist module_blacklist rd.driver.blacklist "
    "cgroup_* systemd.unified_cgroup_hierarchy apparmor selinux security processor.* intel_idle.* intel_pstate "
    "cpufreq.* idle tsc clocksource console panic crashkernel init_on_alloc init_on_free memhp_default_state "
    "mlx5_core.* ib_core.* efi noefi acpi*";

void scrub_cmdline(struct scrub *scrub, const char *text, size_t bytes, FILE *out)
{
    const char *end = text + bytes, *word;
    bool first = true;
    size_t n;

    while (next_word(&text, end, &word, &n)) {
        const char *equals = memchr(word, '=', n);

        if (!is_among(word, equals ? (size_t)(equals - word) : n, parameters_kept))
            continue;
        if (!first)
            fputc(' ', out);
        scrub_text(scrub, word, n, 0, out);
        first = false;
    }
    fputc('\n', out);
}

/* --- mounts --- */

/* "nosuid", "size=65536k", "huge=within_size": a value is a number with its unit, or one of a few words. */
static bool is_plain_option(const char *option, size_t n)
{
    static const char words[] = "huge=always huge=never huge=advise huge=within_size";
    const char *equals = memchr(option, '=', n), *value = equals + 1;
    size_t n_value = equals ? n - (size_t)(value - option) : 0, digits;

    if (!equals)
        return true;
    digits = strspn(value, "0123456789");
    if (digits == 0)
        return is_among(option, n, words);
    return digits >= n_value ? n_value <= 9 : digits <= 12 && n_value == digits + 1 && strchr("kKmMgG%", value[digits]);
}

static void write_options(const char *options, size_t bytes, FILE *out)
{
    static const char kept[] =
        "rw ro nosuid nodev noexec relatime noatime size=* nr_inodes=* inode64 mode=* huge=* pagesize=* hidepid=* "
        "nr_blocks=*";
    const char *end = options + bytes;
    bool first = true;

    while (options < end) {
        size_t n = strcspn(options, ", \t\n");

        if (is_among(options, n, kept) && is_plain_option(options, n)) {
            fprintf(out, "%s%.*s", first ? "" : ",", (int)n, options);
            first = false;
        }
        options += n + 1;
    }
    if (first)
        fputs("rw", out);
}

void scrub_mounts(struct scrub *scrub, const char *text, size_t bytes, FILE *out)
{
    const char *end = text + bytes, *line, *line_end;
    static const char types[] =
        "tmpfs ramfs hugetlbfs overlay fuse.fuse-overlayfs proc sysfs cgroup cgroup2 devpts devtmpfs mqueue ext4 xfs "
        "btrfs zfs vfat squashfs nfs nfs4 lustre gpfs beegfs debugfs tracefs configfs bpf autofs iso9660 securityfs "
        "efivarfs fuse 9p virtiofs";
    const char *source, *place, *type, *options;
    size_t n, n_source, n_place, n_type, n_options;

    while (scrub_line(&text, end, &line, &n)) {
        line_end = line + n;
        if (!next_word(&line, line_end, &source, &n_source) || !next_word(&line, line_end, &place, &n_place) ||
            !next_word(&line, line_end, &type, &n_type) || !next_word(&line, line_end, &options, &n_options) ||
            place[0] != '/')
            continue;
        fputs("none ", out);
        scrub_path(scrub, place, n_place == 1 ? 0 : n_place, out);
        fputs(n_place == 1 ? "/ " : " ", out);
        fprintf(out, "%.*s ", is_among(type, n_type, types) ? (int)n_type : 1,
                is_among(type, n_type, types) ? type : "-");
        write_options(options, n_options, out);
        fputs(" 0 0\n", out);
    }
}

/* --- other files of /proc --- */

/* Addresses are 8 hexadecimal digits in host byte order; little-endian is assumed. */
static void write_route_address(struct scrub *scrub, const char *word, size_t n, FILE *out)
{
    uint32_t address = (uint32_t)strtoul(word, NULL, 16);

    if (n != 8 || address == 0)
        fputs("00000000", out);
    else
        fprintf(out, "%08X", __builtin_bswap32(scrub_ipv4(scrub, __builtin_bswap32(address))));
}

/* An interface, then at least seven numbers. */
static bool is_route(const char *line, const char *end)
{
    const char *word;
    int column = 0;
    size_t n;

    for (; next_word(&line, end, &word, &n); column++)
        if (column > 0 && strspn(word, "0123456789abcdefABCDEF") < n)
            return false;
    return column >= 8;
}

void scrub_route(struct scrub *scrub, const char *text, size_t bytes, FILE *out)
{
    const char *end = text + bytes, *line, *line_end, *word;
    bool is_title = true;
    size_t n;

    while (scrub_line(&text, end, &line, &n)) {
        line_end = line + n;
        if (is_title ? n < 5 || memcmp(line, "Iface", 5) != 0 : !is_route(line, line_end))
            continue;
        for (int column = 0; next_word(&line, line_end, &word, &n); column++) {
            if (column > 0)
                fputc('\t', out);
            if (is_title)
                fwrite(word, 1, n, out);
            else if (column == 1 || column == 2)
                write_route_address(scrub, word, n, out);
            else
                scrub_text(scrub, word, n, column == 0 ? SCRUB_NAME | SCRUB_WORDS : SCRUB_NAME, out);
        }
        fputc('\n', out);
        is_title = false;
    }
}

/* Only default routes, without their gateways: "0{32} 00 source prefix gateway metric references use flags device". */
void scrub_ipv6_route(struct scrub *scrub, const char *text, size_t bytes, FILE *out)
{
    static const char zeros[] = "00000000000000000000000000000000";
    const char *end = text + bytes, *line;
    size_t n;

    while (scrub_line(&text, end, &line, &n)) {
        const char *device = memrchr(line, ' ', n);

        if (n < 36 || !device || strncmp(line, zeros, 32) != 0 || strncmp(line + 32, " 00 ", 4) != 0)
            continue;
        fprintf(out, "%s 00 %s 00 %s 00000000 00000000 00000000 00000003 ", zeros, zeros, zeros);
        scrub_text(scrub, device + 1, n - (size_t)(device + 1 - line), SCRUB_NAME, out);
        fputc('\n', out);
    }
}

/* "address permissions offset device inode path", only of libraries. */
void scrub_maps(struct scrub *scrub, const char *text, size_t bytes, FILE *out)
{
    const char *end = text + bytes, *line;
    char path[PATH_MAX], last[PATH_MAX] = "";
    size_t n;

    while (scrub_line(&text, end, &line, &n)) {
        const char *slash = memchr(line, '/', n);
        size_t n_path = slash ? n - (size_t)(slash - line) : 0;

        if (!slash || n_path >= sizeof(path))
            continue;
        memcpy(path, slash, n_path);
        path[n_path] = '\0';
        /* A library has several consecutive mappings. */
        if (!strstr(path, ".so") || strcmp(path, last) == 0)
            continue;
        memcpy(last, path, n_path + 1);
        fputs("00000000-00000000 r-xp 00000000 00:00 0 ", out);
        scrub_path(scrub, path, n_path, out);
        fputc('\n', out);
    }
}

void scrub_status(struct scrub *scrub, const char *text, size_t bytes, FILE *out)
{
    static const char lists[] = "Cpus_allowed_list Mems_allowed_list";
    static const char capabilities[] = "CapEff:";
    const char *end = text + bytes, *line;
    size_t n;

    (void)scrub;
    while (scrub_line(&text, end, &line, &n)) {
        size_t n_word = strcspn(line, ":\n"), n_blank = n_word < n ? 1 + strspn(line + n_word + 1, " \t") : 0;

        /* Capabilities are a mask of 64 bits; the upper 16 are unused (capabilities(7)). */
        if (n_blank &&
            ((is_among(line, n_word, lists) && is_attribute_number(line + n_word + n_blank, n - n_word - n_blank)) ||
             (n == sizeof(capabilities) + 16 && strncmp(line, capabilities, strlen(capabilities)) == 0 &&
              strncmp(line + n - 16, "0000", 4) == 0 && strspn(line + n - 16, "0123456789abcdef") >= 16))) {
            fwrite(line, 1, n, out);
            fputc('\n', out);
        }
    }
}
