/* SPDX-License-Identifier: Apache-2.0 */
/*
 * scrub_words.c - words that identify no owner, and replacements of others.
 *
 * Values of variables, names of configuration files and of modules, and releases of kernels are chosen by people and
 * contain names of companies, projects and machines, which look like any other word. So the allowed words are listed.
 */
#include "scrub.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* Case-insensitive. '#' stands for digits. */
static const char *const vocabulary[] = {
    /* Switches and numbers. */
    "on", "off", "yes", "no", "true", "false", "none", "void", "all", "auto", "default", "enable", "enabled", "disable",
    "disabled", "inf", "max", "min", "any", "any#", "null",
    /* NCCL, NVSHMEM, CUDA, PyTorch, UCX, Open MPI. */
    "af", "inet", "inet#", "loc", "pix", "pxb", "phb", "node", "sys", "port", "rail", "fastest", "first", "pci", "bus",
    "id", "eager", "lazy", "debug", "local", "global", "version", "warn", "attn", "info", "abort", "trace", "init",
    "coll", "net", "graph", "tuning", "env", "alloc", "call", "proxy", "nvls", "nvlstree", "bootstrap", "reg",
    "profile", "ras", "parallel", "group", "ring", "tree", "collnet", "collnetdirect", "collnetchain", "collnet", "pat",
    "simple", "ll", "ll#", "allreduce", "allgather", "reducescatter", "broadcast", "reduce", "alltoall", "sendrecv",
    "ib", "socket", "tcp", "self", "vader", "sm", "ob#", "ucx", "cma", "smcuda", "gib", "fastrak", "tuner", "profiler",
    "a#", "a#u", "a#x", "h#", "b#", "gb#", "config", "txtpb", "nonblocking", "blocking", "policy", "efficiency", "cx#",
    "mig", "nodevfiles", "ibrc", "ibdevx", "ibgda", "ibgdax", "libfabric", "gpunetio", "gdaki", "gpu", "cpu", "host",
    "memory", "gpumem", "hostmem", "cta", "sm", "warp", "dct", "file", "descriptor", "fabric", "device", "sysmem",
    "vidmem", "cxi", "efa", "verbs", "mpi", "shmem", "pmi", "pmi#", "pmix", "uid", "plugin", "transport", "mem", "topo",
    "p#p", "shm", "rc", "ud", "dc", "rc_x", "ud_x", "dc_x", "x", "xlc", "mlx", "cuda", "cuda#", "copy", "ipc", "gdr",
    "gdrcopy", "rocm", "posix", "sysv", "knem", "xpmem", "try", "ptx", "expandable", "segments", "split", "size", "mb",
    "garbage", "collection", "threshold", "backend", "cudamallocasync", "native", "roundup", "power#", "divisions",
    "compute", "utility", "graphics", "video", "display", "compat#", "c", "utf", "posix", "en", "us", "rapl", "quota",
    "time",
    /* Names of devices and interfaces. */
    "eth", "ens", "enp", "eno", "enx", "wl", "lo", "bond", "docker", "veth", "cilium", "flannel", "cali", "br", "team",
    "vlan", "virbr", "mlx#", "bnxt", "re", "re#", "efa#", "irdma#", "hns#", "rxe#", "siw#", "rocep", "roceo", "rocex",
    "ibp", "ibs", "ibo", "rdmap", "rdmao", "rdmax", "mana", "erdma", "gpu#rdma#", "rdma#", "nic#", "rail#", "roce",
    "roce#", "pf#", "vf#", "ionic", "qedr#", "cxgb#", "hfi#", "usnic", "pcibr", "p#",
    /* Packages, modules, and names of files for them. */
    "nvidia", "nvidiafb", "deepep", "deep", "ep", "nvshmem", "nccl", "libnccl", "libibverbs", "lib", "blacklist",
    "nouveau", "zz", "site", "custom", "options", "power", "drivers", "driver", "installer", "mlnx", "ipoib", "rdma",
    "dkms", "kms", "drm", "uvm", "modeset", "peermem", "peer", "nv", "gdrdrv", "intel", "microcode", "iwlwifi", "amd",
    "amdgpu", "fbdev", "framebuffer", "watchdog", "oss", "firewire", "ath", "modesetting", "rare", "network", "bug",
    "lists", "mdadm", "vfio", "iommu", "type#", "conf", "dist", "systemd", "truescale", "lockd", "tuned", "firewalld",
    "sysctls", "gds", "fs", "nfs", "fakeroot", "gnu", "linux", "libc", "openmpi", "hpcx", "doca", "mellanox", "core",
    "cm", "umad", "uverbs", "ucm", "iser", "isert", "srp", "srpt", "srpconnect", "fwctl", "mofed", "ofed",
    "persistence", "fabricmanager", "nvswitch", "smi", "caps", "vga", "switcheroo", "pcspkr", "softdep", "pre", "post",
    "modprobe", "modules", "sbsa", "platform", "vga", "pro", "open", "kernel", "common", "i#", "infiniband", "efa",
    "ice", "ixgbe", "i#e", "peers", "registry", "dwords", "rm", "bind", "hmm",
    /* Hardware, and terms of its vendors and drivers. */
    "google", "engine", "virtual", "machine", "vmware", "hvm", "domu", "pc", "bhyve", "openstack", "highgpu", "megagpu",
    "ultragpu", "maxgpu", "dgx", "dgx#", "dgxa#", "dgxh#", "dgxb#", "hgx", "p#d", "p#de", "p#e", "p#en", "#xlarge",
    "poweredge", "xe#", "proliant", "supermicro", "mt#", "bcm#", "xefa#", "tesla", "geforce", "rtx", "quadro", "titan",
    "grace", "hopper", "blackwell", "hbm#", "hbm#e", "sxm#", "nvl", "pcie", "gh#", "l#", "l#s", "t#", "v#", "ada",
    "generation", "laptop", "super", "ti", "ultra", "nvrm", "loading", "unix", "module", "for", "release",
    /* Replacements. */
    "custom#", "word#", "host#", "user#", "dir#", "secret#",
    /* Flavours of kernels: Debian, Ubuntu, RHEL, SUSE, Amazon, Google, Microsoft, and boards. */
    "generic", "lowlatency", "gcp", "gke", "aws", "azure", "oracle", "ibm", "kvm", "cloud", "server", "cos", "hwe",
    "rt", "realtime", "lts", "pve", "uek", "fips", "tegra", "bluefield", "raspi", "snp", "largemem", "standard",
    "linuxkit", "microsoft", "wsl#", "dirty", "rc#", "el#", "el#uek", "fc#", "amzn#", "azl#", "cm#", "deb#", "deb#u#",
    "bpo", "x86", "aarch64", "arm64", "amd64", "i386", "i686", "sles", "ubuntu", "debian", "flatcar", "coreos", "talos",
    "nvidia", "preempt", "dynamic", "smp", "hyperv", "xanmod", "zen", "arch", "arch#", "mainline"};

static bool matches(const char *pattern, const char *word, size_t n)
{
    size_t i = 0;

    for (; *pattern; pattern++) {
        if (*pattern == '#') {
            size_t digits = 0;

            while (i + digits < n && isdigit((unsigned char)word[i + digits]))
                digits++;
            if (digits == 0 || digits > 6)
                return false;
            i += digits;
        } else if (i >= n || tolower((unsigned char)word[i++]) != *pattern) {
            return false;
        }
    }
    return i == n;
}

/* "8", "512M", "10a", "0x1f": a number with a unit of at most two letters. GUIDs are longer. */
static bool is_number(const char *word, size_t n)
{
    size_t digits = 0;

    if (n > 2 && n <= 12 && word[0] == '0' && tolower((unsigned char)word[1]) == 'x') {
        while (2 + digits < n && isxdigit((unsigned char)word[2 + digits]))
            digits++;
        return 2 + digits == n;
    }
    while (digits < n && isdigit((unsigned char)word[digits]))
        digits++;
    return digits > 0 && digits <= 9 && n - digits <= (digits > 6 ? 0u : 2u) &&
           (digits == n || isalpha((unsigned char)word[digits])) &&
           (n - digits < 2 || isalpha((unsigned char)word[n - 1]));
}

/*
 * "enp12s0f1np1", "rocep145s0": a kind of device, then locations, each a letter or two with a number
 * (systemd.net-naming).
 */
static bool is_device(const char *word, size_t n)
{
    static const char *const kinds[] = {"en", "eth", "ib", "roce", "rdma", "bond", "wl", "ww", "docker", "lo"};
    size_t used = 0, places = 0;

    for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++)
        if (n > strlen(kinds[i]) && strncmp(word, kinds[i], strlen(kinds[i])) == 0 && strlen(kinds[i]) > used)
            used = strlen(kinds[i]);
    while (used > 0 && used < n) {
        size_t letters = 0, digits = 0;

        while (used + letters < n && strchr("Popsfdnvibu", word[used + letters]))
            letters++;
        while (used + letters + digits < n && isdigit((unsigned char)word[used + letters + digits]))
            digits++;
        if (letters > 2 || digits == 0 || digits > 5)
            return false;
        used += letters + digits;
        places++;
    }
    return places > 0;
}

static bool is_plain_part(const char *word, size_t n)
{
    if (n <= 1 || is_number(word, n) || is_device(word, n))
        return true;
    for (size_t i = 0; i < sizeof(vocabulary) / sizeof(vocabulary[0]); i++)
        if (matches(vocabulary[i], word, n))
            return true;
    return false;
}

bool scrub_is_plain(const char *word, size_t n)
{
    size_t start = 0, ones = 0;

    for (size_t i = 0; i <= n; i++) {
        if (i < n && !strchr("-_.+~", word[i]))
            continue;
        if (!is_plain_part(word + start, i - start))
            return false;
        /* Single letters could spell anything. */
        ones = i - start == 1 && isalpha((unsigned char)word[start]) ? ones + 1 : 0;
        if (ones > 2)
            return false;
        start = i + 1;
    }
    return true;
}

bool scrub_is_known(const struct scrub *scrub, const char *word, size_t n)
{
    const char *device;
    json_t *value;

    json_object_foreach(scrub->devices, device, value)
    {
        if (n <= strlen(device) && n > 1 && strncmp(device, word, n) == 0)
            return true;
    }
    return scrub_is_plain(word, n);
}

/* --- releases of kernels --- */

static void write_custom(struct scrub *scrub, const char *text, size_t n, FILE *out)
{
    char key[256];

    snprintf(key, sizeof(key), "%.*s", (int)(n < 255 ? n : 255), text);
    fprintf(out, "custom%d", scrub_number(scrub, SCRUB_RELEASE, key));
}

void scrub_release(struct scrub *scrub, const char *text, size_t bytes, FILE *out)
{
    size_t at = 0;

    /* A release begins like "6.8". */
    if (bytes < 3 || !isdigit((unsigned char)text[0]) || text[1] != '.') {
        write_custom(scrub, text, strnlen(text, bytes), out);
        return;
    }
    while (at < bytes) {
        size_t n = 0, end;

        while (at + n < bytes && !strchr("-_.+~\n", text[at + n]))
            n++;
        if (n == 0) {
            fputc((unsigned char)text[at++], out);
            continue;
        }
        if (is_plain_part(text + at, n) && (n > 1 || isdigit((unsigned char)text[at]))) {
            fwrite(text + at, 1, n, out);
            at += n;
            continue;
        }
        /* Consecutive foreign parts are replaced as one. */
        for (end = at + n; end < bytes && strchr("-_.+~", text[end]);) {
            size_t next = end + 1;

            while (next < bytes && !strchr("-_.+~\n", text[next]))
                next++;
            if (next == end + 1 || is_plain_part(text + end + 1, next - end - 1))
                break;
            end = next;
        }
        write_custom(scrub, text + at, end - at, out);
        at = end;
    }
}

void scrub_learn_release(struct scrub *scrub, const char *release)
{
    char *kept = NULL;
    size_t n = strcspn(release, "\n"), bytes = 0;
    FILE *out;

    if (n < 3 || n > 128 || !isdigit((unsigned char)release[0]))
        return;
    out = open_memstream(&kept, &bytes);
    if (out)
        scrub_release(scrub, release, n, out);
    if (!out || fclose(out) != 0 || !kept) {
        scrub->failed = true;
    } else if (bytes != n || memcmp(kept, release, n) != 0) {
        char name[129];

        snprintf(name, sizeof(name), "%.*s", (int)n, release);
        if (json_object_set_new_nocheck(scrub->releases, name, json_stringn_nocheck(kept, bytes)) < 0)
            scrub->failed = true;
    }
    free(kept);
}

/* --- names of configuration files --- */

bool scrub_is_conf(const char *name)
{
    size_t n = strlen(name);

    return (n > 5 && strcmp(name + n - 5, ".conf") == 0) || (n > 7 && strcmp(name + n - 7, ".driver") == 0);
}

/* "988_cuda-12.conf" stays. */
bool scrub_is_plain_conf(const char *name)
{
    return scrub_is_conf(name) && scrub_is_plain(name, (size_t)(strrchr(name, '.') - name));
}

static int by_name(const void *left, const void *right)
{
    const char *const *a = left, *const *b = right;

    return strcmp(*a, *b);
}

/*
 * The last file by name takes effect. So the replacement of a foreign name sorts like it: after the plain name that
 * precedes it ("nvidia.conf" < "nvidia.conf.001.conf" < "nvidia.d.conf"), and in the same order.
 */
void scrub_learn_confs(struct scrub *scrub, json_t *const cached[CACHE_KINDS])
{
    static const enum cache_kind kinds[] = {CACHE_FOLDERS, CACHE_FILES, CACHE_STATS};
    json_t *all = json_object(), *value, *item;
    const char **names, *key, *before = "", *name;
    size_t n = 0, i;
    int count = 0;

    for (size_t k = 0; k < sizeof(kinds) / sizeof(kinds[0]); k++) {
        json_object_foreach(cached[kinds[k]], key, value)
        {
            name = strrchr(key, '/');
            if (name && scrub_is_conf(name + 1))
                json_object_set_new_nocheck(all, name + 1, json_true());
            if (kinds[k] != CACHE_FOLDERS)
                continue;
            json_array_foreach(value, i, item)
            {
                if (json_is_string(item) && scrub_is_conf(json_string_value(item)))
                    json_object_set_new_nocheck(all, json_string_value(item), json_true());
            }
        }
    }
    names = calloc(json_object_size(all) + 1, sizeof(*names));
    scrub->failed = scrub->failed || !names || !all;
    json_object_foreach(all, key, value)
    {
        if (names)
            names[n++] = key;
    }
    if (n)
        qsort(names, n, sizeof(*names), by_name);
    for (i = 0; i < n; i++) {
        char given[PATH_MAX];

        if (scrub_is_plain_conf(names[i])) {
            before = names[i];
            count = 0;
            continue;
        }
        snprintf(given, sizeof(given), "%.3000s%s%05d%s", before, *before ? "." : "0", ++count, strrchr(names[i], '.'));
        if (json_object_set_new_nocheck(scrub->confs, names[i], json_string_nocheck(given)) < 0)
            scrub->failed = true;
    }
    free(names);
    json_decref(all);
}

void scrub_write_conf(struct scrub *scrub, const char *name, FILE *out)
{
    const char *given = json_string_value(json_object_get(scrub->confs, name));

    /* A host name may consist of plain words, and an address of numbers. */
    if (scrub_is_plain_conf(name) || given) {
        name = given ? given : name;
        scrub_text(scrub, name, strlen(name), SCRUB_NAME, out);
    } else {
        fprintf(out, "dir%d%s", scrub_number(scrub, SCRUB_FOLDER, name), strrchr(name, '.'));
    }
}
