/* SPDX-License-Identifier: Apache-2.0 */
/*
 * scrub_names.c - names in paths: those of common software stay, all others become dir<n>.
 *
 * A folder may be called after a project or a customer, so it is not enough to take users out.
 */
#include "root/scrub.h"

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
    "kernel", "drivers", "extra", "firmware", "targets", "stubs", "compat", "modprobe.d", "modules-load.d",
    "ld.so.conf.d", "ld.so.conf", "ld.so.cache", "ld.so.preload", "os-release", "security", "limits.d", "dpkg",
    "status", "kern.log", "dmesg", "hostname", "syslog", "messages", "pts", "mqueue", "hugepages", "x86_64-linux",
    "x86_64-linux-gnu", "aarch64-linux-gnu", "sbsa-linux", "extras", "modules.dep", "modules.builtin", "libibverbs.d",
    "memory_peers", ".dockerenv", ".containerenv", ".singularity.d",
    /* Devices. */
    "infiniband", "uverbs#", "umad#", "rdma_cm", "nvidia#", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools",
    "nvidia-modeset", "nvidia-caps", "nvidia-cap#", "nvidia-caps-imex-channels", "channel#", "gdrdrv", "kmsg", "null",
    "nvidia-nvswitch#", "nvidia-nvswitchctl",
    /* Libraries and programs. */
    "lib*.so", "lib*.so.*", "nvshmem_*.so", "nvshmem_*.so.*", "lib*.a", "*.ko", "*.ko.*", "python", "python#",
    "ld-linux-x86-64.so.#", "ld-linux-aarch64.so.#", "nvidia-smi", "nvcc", "ofed_info", "plugins",
    /* The stack. */
    "nvidia", "nvidia-#", "nvidia-imex", "nodes_config.cfg", "cuda", "cuda-#", "cuda#", "cu#", "version.json",
    "version.txt", "nvshmem", "nvshmem-#", "nvshmem_#", "libnvshmem", "non_abi", "device", "host", "nvshmem*.h", "nccl",
    "nccl*.h", "nccl-#", "gib", "gIB", "configs", "tuner_config_*.txtpb", "scripts", "set_nccl_env.sh", "gdrcopy",
    "gdrcopy-#", "gdrapi.h", "mlx5dv.h", "verbs.h", "mellanox", "doca", "rdma-core", "libibverbs", "openmpi", "mpi",
    "hpcx", "ucx", "deepep", "DeepEP", "deepep#", "DeepEP-#", "deep_ep", "deep_ep.egg-info", "deep_ep_cpp*.so", "csrc",
    "kernels", "source", "tests", "unified-env.sh", "nvshmem-source", "nvshmem_src", "nvshmem_build_src", "apt",
    "sources.list.d", "doca.list", "yum.repos.d", "doca.repo", "default", "grub", "setup.py", "third-party", "patches",
    "cccl", "std", "tuple", "gpu", "nvidia_nvshmem_cu#*.dist-info", "nvidia_nccl_cu#*.dist-info", "nvidia_*.dist-info",
    "torch-*.dist-info", "deep_ep-*.dist-info", "deep_ep-*.egg", "deep_ep-*.egg-info", "__editable__*deep_ep*",
    "METADATA", "PKG-INFO", "cuda_runtime", "cublas", "cudnn",
    /* Python. */
    "site-packages", "dist-packages", "torch", "__init__.py", "buffer.py", "utils.py", "venv", ".venv", "env", "envs",
    "conda", "miniconda#", "miniforge#", "anaconda#", "base", "easy-install.pth", "*.egg-link"};

/* Folders whose names come from the kernel or from us, where every name stays. */
static bool is_of_kernel(const char *path)
{
    return strncmp(path, "/sys/", 5) == 0 || strncmp(path, "/proc/", 6) == 0 || strcmp(path, "/sys") == 0 ||
           strcmp(path, "/proc") == 0;
}

/* A kernel release below lib/modules. */
static bool ends_in_modules(const char *folder)
{
    return scrub_match("**/lib/modules", folder);
}

bool scrub_is_common(const char *folder, const char *name)
{
    if (is_of_kernel(folder) || ends_in_modules(folder))
        return true;
    /* Users, but for the place where GKE mounts its driver. */
    if (scrub_match("**/home", folder) || scrub_match("**/users", folder))
        return strcmp(name, "kubernetes") == 0;
    for (size_t i = 0; i < sizeof(common_names) / sizeof(common_names[0]); i++)
        if (scrub_match(common_names[i], name))
            return true;
    if (scrub_is_plain_conf(name))
        return true;
    return strcmp(name, "..") == 0 || name[0] == '\0';
}

/* Folders whose files count in the order of their names. */
static bool holds_confs(const char *folder)
{
    return scrub_match("**/modprobe.d", folder) || scrub_match("**/modules-load.d", folder) ||
           scrub_match("**/ld.so.conf.d", folder) || scrub_match("**/libibverbs.d", folder);
}

void scrub_name(struct scrub *scrub, const char *folder, const char *name, FILE *out)
{
    if (ends_in_modules(folder))
        scrub_release(scrub, name, strlen(name), out);
    else if (scrub_is_conf(name) && holds_confs(folder))
        scrub_write_conf(scrub, name, out);
    else if (scrub_is_common(folder, name))
        scrub_text(scrub, name, strlen(name), SCRUB_VERSIONS | SCRUB_NAME, out);
    else
        fprintf(out, "dir%d", scrub_number(scrub, SCRUB_FOLDER, name));
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
