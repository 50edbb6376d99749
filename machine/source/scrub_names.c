/* SPDX-License-Identifier: Apache-2.0 */
/*
 * scrub_names.c - names of files, libraries and kernels: those of common software stay, others are replaced.
 *
 * A folder may be named after a project or a customer, so removing user names is not enough.
 */
#include "common/memory.h"
#include "common/text.h"
#include "scrub.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

/* '*': any run without '/', '#': one or more digits and dots, '**': any run. */
bool scrub_match(const char *pattern, const char *text)
{
    for (; *pattern; pattern++, text++) {
        if (pattern[0] == '*') {
            bool deep = pattern[1] == '*';

            pattern += deep ? 2 : 1;
            for (;; text++) {
                if (scrub_match(pattern, text))
                    return true;
                if (!*text || (!deep && *text == '/'))
                    return false;
            }
        }
        if (*pattern == '#') {
            if (!*text || !strchr("0123456789.", *text))
                return false;
            while (text[1] && strchr("0123456789.", text[1]) && !scrub_match(pattern + 1, text + 1))
                text++;
        } else if (*pattern != *text) {
            return false;
        }
    }
    return !*text;
}

static const char *const common_names[] = {
    /* The file system hierarchy. */
    "bin", "boot", "users", "dev", "etc", "home", "include", "lib", "lib32", "lib64", "libexec", "local", "mnt", "opt",
    "proc", "root", "run", "sbin", "share", "shm", "src", "srv", "sys", "tmp", "usr", "var", "log", "data", "data#",
    "scratch", "work", "workspace", "build", "install", "tools", "software", "apps", "modules", "updates", "dkms",
    "kernel", "drivers", "extra", "firmware", "targets", "stubs", "compat", "modprobe.d", "profile.d", "modules-load.d",
    "ld.so.conf.d", "ld.so.conf", "ld.so.cache", "ld.so.preload", "os-release", "security", "limits.d", "dpkg",
    "status", "kern.log", "dmesg", "hostname", "hosts", "iproute2", "rt_tables", "ufw", "ufw.conf", "firewalld.conf",
    "user.rules", "nftables.conf", "firewalld", "zones", "trusted.xml", "systemd", "system", "*.target.wants",
    "nftables.service", "firewalld.service", "iptables.service", "netfilter-persistent.service", "iptables", "rules.v4",
    "sysconfig", "extlinux", "cmdline", "nccl.conf", ".nccl.conf", "syslog", "messages", "pts", "mqueue", "hugepages",
    "x86_64-linux", "x86_64-linux-gnu", "aarch64-linux-gnu", "sbsa-linux", "extras", "modules.dep", "modules.builtin",
    "libibverbs.d", "memory_peers", ".dockerenv", ".containerenv", ".bashrc", ".profile", ".bash_profile",
    "bash.bashrc", "bashrc", "profile", "environment", "ssh", ".ssh", "sshrc", "cgroup", "cpu", "cpu.max", "driver",
    "fabricmanager.log", "dnf.rpm.log", "epkit", "journal.jsonl", "debian-tools", "epkit-only", "gcp-b200-ubuntu2404",
    "gcp-h200-ubuntu2404", "gke-driver-copy", ".singularity.d",
    /* Devices. */
    "infiniband", "uverbs#", "umad#", "rdma_cm", "nvidia#", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools",
    "nvidia-modeset", "nvidia-caps", "nvidia-cap#", "nvidia-caps-imex-channels", "channel#", "gdrdrv", "kmsg", "null",
    "nvidia-nvswitch#", "nvidia-nvswitchctl", "dxg",
    /* Libraries and programs. */
    "lib*.so", "lib*.so.*", "nvshmem_*.so", "nvshmem_*.so.*", "lib*.a", "*.ko", "*.ko.*", "python", "python#",
    "ld-linux-x86-64.so.#", "ld-linux-aarch64.so.#", "nvidia-smi", "nvidia-modprobe", "nvcc", "ofed_info", "plugins",
    /* The stack. */
    "nvidia", "nvidia-#", "nvidia-imex", "nodes_config.cfg", "cuda", "cuda-#", "cuda#", "cu#", "version.json",
    "version.txt", "nvshmem", "nvshmem-#", "nvshmem_#", "libnvshmem", "non_abi", "device", "host", "nvshmem*.h", "nccl",
    "nccl*.h", "nccl-#", "gib", "gIB", "configs", "tuner_config_*.txtpb", "scripts", "set_nccl_env.sh", "gdrcopy",
    "gdrcopy-#", "gdrapi.h", "mlx5dv.h", "verbs.h", "mellanox", "doca", "rdma-core", "libibverbs", "openmpi", "mpi",
    "hpcx", "ucx", "amazon", "efa", "ofi-nccl", "aws-ofi-nccl", "efa_installed_packages", "libbnxt_re", "libefa",
    "libirdma", "libmlx5", "deepep", "DeepEP", "deepep#", "DeepEP-#", "deep_ep", "deep_ep.egg-info", "deep_ep_cpp*.so",
    "csrc", "kernels", "source", "tests", "unified-env.sh", "nvshmem-source", "nvshmem_src", "nvshmem_build_src", "apt",
    "sources.list.d", "doca.list", "yum.repos.d", "doca.repo", "default", "grub", "setup.py", "third-party", "patches",
    "cccl", "std", "tuple", "gpu", "nvidia_nvshmem_cu#*.dist-info", "nvidia_nccl_cu#*.dist-info", "nvidia_*.dist-info",
    "torch-*.dist-info", "deep_ep-*.dist-info", "deep_ep-*.egg", "deep_ep-*.egg-info", "__editable__*deep_ep*",
    "METADATA", "PKG-INFO", "EGG-INFO", "pyvenv.cfg", ".local", "CMakeLists.txt", "cuda_runtime", "cublas", "cudnn",
    "cufft", "curand", "cusolver", "cusparse", "cusparselt", "nvjitlink", "nvtx", "cuda_nvrtc", "cuda_cupti", "cufile",
    /* Python. */
    "site-packages", "dist-packages", "torch", "__init__.py", "buffer.py", "utils.py", "venv", ".venv", "env", "envs",
    "conda", "miniconda#", "miniforge#", "anaconda#", "base", "easy-install.pth", "*.egg-link", "buffers", "elastic.py",
    "ep.py", "hybrid_ep_buffer.py", "hybrid_ep_cpp*.so", "prerequisites.py", "deep_ep.py", "epkit_deep_ep",
    "epkit_deep_ep.pth", "_C.*.so", "RECORD", "deep_ep_v25", "nixl_ep", "nixl_ep_cu#", "nixl_ep_cpp*.so",
    "nixl_cu#.libs", "nccl_extensions", "ep", "_extensions", "bindings", "nccl_ep*.so", "flashinfer",
    "flashinfer_jit_cache", "jit_cache", "moe_ep", "uccl", "mooncake", "mori", "pplx_kernels",
    "sgl_deep_ep-*.dist-info", "sgl_deep_ep_v25-*.dist-info", "tokenspeed_deepep-*.dist-info", "nixl*-*.dist-info",
    "nccl_extensions-*.dist-info", "flashinfer_python-*.dist-info", "flashinfer_cubin-*.dist-info",
    "flashinfer_jit_cache-*.dist-info", "epkit-*.dist-info"};

/* --- libraries --- */

void scrub_library(struct scrub *scrub, const char *name, size_t bytes, FILE *out)
{
    fputs("lib", out);
    /* A variable may name the library without "lib". */
    scrub_text(scrub, name + 3, bytes - 3, SCRUB_NAME | SCRUB_VERSIONS, SCRUB_LIBRARY_WORDS, out);
}

size_t scrub_library_bytes(const char *text, size_t bytes)
{
    static const char others[] = "-_.+";
    size_t n = 0, end = 0;

    if (bytes < 7 || strncmp(text, "lib", 3) != 0)
        return 0;
    while (n < bytes && text[n] && (isalnum((unsigned char)text[n]) || strchr(others, text[n]))) {
        n++;
        if (n >= 6 && strncmp(text + n - 3, ".so", 3) == 0)
            end = n;
    }
    /* "libx.so", "libx.so.1.2"; not "libx.sock", nor a full stop after it. */
    if (end == 0 || (end < n && text[end] != '.' && isalnum((unsigned char)text[end])))
        return 0;
    while (n > end && strchr(others, text[n - 1]))
        n--;
    return n;
}

/* --- folders and files --- */

/* Folders whose entries are named by the kernel or by epkit: every name stays. */
static bool is_of_kernel(const char *path)
{
    return strncmp(path, "/sys/", 5) == 0 || strncmp(path, "/proc/", 6) == 0 || strcmp(path, "/sys") == 0 ||
           strcmp(path, "/proc") == 0;
}

/* Kernel releases: in lib/modules, of files in /boot, and below a version of the driver in the tree of DKMS. */
static bool holds_releases(const char *folder)
{
    return scrub_match("**/lib/modules", folder) || strcmp(folder, "/boot") == 0 ||
           scrub_match("/var/lib/dkms/nvidia/#", folder);
}

/* A version of the driver in that tree; four numbers could be an address. */
static bool is_driver_version(const char *folder, const char *name)
{
    return strcmp(folder, "/var/lib/dkms/nvidia") == 0 && scrub_match("#.#", name) && !scrub_match("*.*.*.*", name);
}

/* Folders whose files are read in the order of their names. */
static bool holds_confs(const char *folder)
{
    return scrub_match("**/modprobe.d", folder) || scrub_match("**/modules-load.d", folder) ||
           scrub_match("**/ld.so.conf.d", folder) || scrub_match("**/libibverbs.d", folder);
}

static bool is_conf(const char *name)
{
    return scrub_match("*.conf", name) || scrub_match("*.driver", name);
}

/* "988_cuda-12.conf" stays. */
static bool is_plain_conf(const struct scrub *scrub, const char *name)
{
    static const char words[] = "nvidia deepep ibgda cuda gnu libc linux ofed mlnx rdma power site wsl x86 zz";
    const char *at = name, *end = strrchr(name, '.');

    while (is_conf(name) && at < end) {
        size_t n = strcspn(at, "-_.");

        if (n > 0 && !scrub_is_known(scrub, at, n, words))
            return false;
        at += n + 1;
    }
    return is_conf(name);
}

bool scrub_is_dist(const char *name)
{
    return text_ends(name, ".dist-info") && strcasestr(name, "ep");
}

bool scrub_is_common(const struct scrub *scrub, const char *folder, const char *name)
{
    if (is_of_kernel(folder) || holds_releases(folder) || is_driver_version(folder, name))
        return true;
    /* Users, except for the folder where GKE mounts its driver. */
    if (scrub_match("**/home", folder) || scrub_match("**/users", folder))
        return strcmp(name, "kubernetes") == 0;
    if (strncmp(name, "lib", 3) == 0 && strstr(name, ".so") && scrub_library_bytes(name, strlen(name)) != strlen(name))
        return false;
    return ANY_OF(i, COUNT(common_names), scrub_match(common_names[i], name)) || is_plain_conf(scrub, name) ||
           strcmp(name, "..") == 0 || name[0] == '\0';
}

void scrub_name(struct scrub *scrub, const char *folder, const char *name, FILE *out)
{
    const char *conf = json_string_value(json_object_get(scrub->maps[SCRUB_CONFS], name));
    size_t n = strlen(name);

    if (holds_releases(folder))
        scrub_text(scrub, name, n, SCRUB_NAME | SCRUB_VERSIONS, SCRUB_RELEASE_WORDS, out);
    else if (strcmp(folder, "/sys/class/net") == 0 || strcmp(folder, "/sys/class/infiniband") == 0 ||
             strcmp(folder, "/proc/sys/net/ipv4/conf") == 0)
        scrub_text(scrub, name, n, SCRUB_NAME, "bonding masters all default " SCRUB_DEVICE_WORDS,
                   out);                  /* devices here */
    else if (conf && holds_confs(folder)) /* of the plain name that it begins with */
        scrub_text(scrub, conf, strlen(conf), SCRUB_NAME, NULL, out);
    else if (n && scrub_library_bytes(name, n) == n)
        scrub_library(scrub, name, n, out);
    else if (scrub_is_common(scrub, folder, name))
        scrub_text(scrub, name, n, is_conf(name) ? SCRUB_NAME : SCRUB_NAME | SCRUB_VERSIONS, NULL, out);
    else
        fprintf(out, scrub_is_dist(name) ? "ep%d-0.dist-info" : "dir%d", scrub_number(scrub, SCRUB_FOLDER, name));
}

void scrub_path(struct scrub *scrub, const char *path, size_t bytes, FILE *out)
{
    char folder[PATH_MAX], name[PATH_MAX];
    size_t at = 0;

    if (bytes >= PATH_MAX) {
        fputs("/dir", out);
        return;
    }
    while (at < bytes) {
        size_t n = 0;

        memcpy(folder, path, at);
        folder[at] = '\0';
        fputc('/', out);
        at++;
        while (at + n < bytes && path[at + n] != '/')
            n++;
        memcpy(name, path + at, n);
        name[n] = '\0';
        scrub_name(scrub, folder, name, out);
        at += n;
    }
}

/* --- names of configuration files --- */

static void collect_conf(json_t *all, const char *name)
{
    if (is_conf(name))
        json_object_set_new_nocheck(all, name, json_true());
}

/*
 * The last file by name takes effect. So the replacement of a foreign name sorts like it: after the plain name that
 * precedes it ("nvidia.conf" < "nvidia.conf.001.conf" < "nvidia.d.conf"), and in the same order.
 */
static void replace_confs(struct scrub *scrub, const char *const *names, size_t n)
{
    const char *before = "";
    char given[PATH_MAX];
    int count = 0;

    for (size_t i = 0; i < n; i++) {
        if (is_plain_conf(scrub, names[i])) {
            before = names[i];
            count = 0;
            continue;
        }
        snprintf(given, sizeof(given), "%.3000s%s%05d%s", before, *before ? "." : "0", ++count, strrchr(names[i], '.'));
        json_object_set_new_nocheck(scrub->maps[SCRUB_CONFS], names[i], json_string_nocheck(given));
    }
}

void scrub_learn_confs(struct scrub *scrub, json_t *const cached[CACHE_KINDS])
{
    json_t *all = json_object();
    const char **names;
    size_t n = 0;

    for (int kind = CACHE_FILES; kind <= CACHE_STATS; kind++)
        FOR_MEMBERS (key, value, cached[kind]) {
            collect_conf(all, text_base(key));
            if (kind == CACHE_FOLDERS && json_is_array(value))
                FOR_JSON (item, value)
                    collect_conf(all, json_string_value(item));
        }
    names = memory_new(json_object_size(all), sizeof(*names));
    FOR_MEMBERS (key, value, all)
        names[n++] = key;
    qsort(names, n, sizeof(*names), text_order);
    replace_confs(scrub, names, n);
    free(names);
    json_decref(all);
}
