/* SPDX-License-Identifier: Apache-2.0 */
/*
 * scrub_names.c - names in paths: those of common software stay, all others become dir<n>.
 *
 * A folder may be named after a project or a customer, so removing user names is not enough.
 */
#include "scrub.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

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
    "status", "kern.log", "dmesg", "hostname", "syslog", "messages", "pts", "mqueue", "hugepages", "x86_64-linux",
    "x86_64-linux-gnu", "aarch64-linux-gnu", "sbsa-linux", "extras", "modules.dep", "modules.builtin", "libibverbs.d",
    "memory_peers", ".dockerenv", ".containerenv", ".bashrc", ".profile", ".bash_profile", "bash.bashrc", "bashrc",
    "profile", "environment", "ssh", ".ssh", "sshrc", "cgroup", "cpu", "cpu.max", "driver", "fabricmanager.log",
    "dnf.rpm.log", "epkit", "journal.jsonl", "debian-tools", "epkit-only", "gcp-b200-ubuntu2404", "gcp-h200-ubuntu2404",
    "gke-driver-copy", ".singularity.d",
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
    "hpcx", "ucx", "deepep", "DeepEP", "deepep#", "DeepEP-#", "deep_ep", "deep_ep.egg-info", "deep_ep_cpp*.so", "csrc",
    "kernels", "source", "tests", "unified-env.sh", "nvshmem-source", "nvshmem_src", "nvshmem_build_src", "apt",
    "sources.list.d", "doca.list", "yum.repos.d", "doca.repo", "default", "grub", "setup.py", "third-party", "patches",
    "cccl", "std", "tuple", "gpu", "nvidia_nvshmem_cu#*.dist-info", "nvidia_nccl_cu#*.dist-info", "nvidia_*.dist-info",
    "torch-*.dist-info", "deep_ep-*.dist-info", "deep_ep-*.egg", "deep_ep-*.egg-info", "__editable__*deep_ep*",
    "METADATA", "PKG-INFO", "EGG-INFO", "pyvenv.cfg", ".local", "CMakeLists.txt", "cuda_runtime", "cublas", "cudnn",
    /* Python. */
    "site-packages", "dist-packages", "torch", "__init__.py", "buffer.py", "utils.py", "venv", ".venv", "env", "envs",
    "conda", "miniconda#", "miniforge#", "anaconda#", "base", "easy-install.pth", "*.egg-link"};

/* --- libraries, versions and systems --- */

/*
 * Parts of names of libraries, of versions of symbols and packages, and of distributions, in addition to the plain
 * words of scrub_words.c. Case-insensitive.
 */
static const char *const software_words[] = {
    "dl",         "pthread",   "rt",         "util",       "resolv",     "gcc",        "stdc",        "ssl",
    "crypto",     "cudart",    "cublas",     "cublaslt",   "cudnn",      "cufft",      "cusparse",    "curand",
    "cusolver",   "nvrtc",     "nvtx",       "nvtoolsext", "cupti",      "nvjitlink",  "nvvm",        "ml",
    "torch",      "python",    "gomp",       "numa",       "nl",         "route",      "gdrapi",      "rte",
    "pal",        "ucp",       "uct",        "ucs",        "ucm",        "tcmalloc",   "jemalloc",    "asan",
    "tsan",       "ubsan",     "protobuf",   "ibumad",     "internal",   "stub",       "stubs",       "ptxjitcompiler",
    "opencl",     "allocator", "cfg",        "librdmacm",  "rdmacm",     "rdmav",      "ibverbs",     "private",
    "glibc",      "glibcxx",   "cxxabi",     "openssl",    "zlib",       "cpp",        "hns",         "so",
    "ld",         "musl",      "git",        "post",       "dev",        "alpha",      "beta",        "build",
    "libmlx",     "rdma",      "ibacm",      "libcuda",    "libnvidia",  "libnvshmem", "image",       "headers",
    "mft",        "hat",       "red",        "enterprise", "rocky",      "almalinux",  "centos",      "stream",
    "fedora",     "amazon",    "amzn",       "suse",       "opensuse",   "leap",       "container",   "optimized",
    "os",         "from",      "google",     "rhel",       "ol",         "noble",      "numbat",      "jammy",
    "jellyfish",  "focal",     "fossa",      "bookworm",   "trixie",     "bullseye",   "plow",        "blue",
    "onyx",       "teal",      "serval",     "mariner",    "azurelinux", "nixos",      "alpine",      "gnu",
    "el",         "mlnx",      "dfsg",       "really",     "tensorrt",   "nvjpeg",     "distributed", "linalg",
    "networking", "source",    "datacenter", "manager",    "utils",      "headless",   "firmware",    "bin",
    "binary",     "libs",      "toolkit",    "runtime",    "shm",        "profiling",  "tools",       "compiler",
    "gpucomp",    "fabric",    "rail"};

static bool is_software_word(const char *word, size_t n)
{
    size_t letters = n;

    /* "c10", "python3": a word with a number. */
    while (letters > 0 && strchr("0123456789", word[letters - 1]))
        letters--;
    if (letters <= 1) /* a longer number is that of a device */
        return n <= 9;
    for (size_t i = 0; i < sizeof(software_words) / sizeof(software_words[0]); i++)
        if (strlen(software_words[i]) == letters && strncasecmp(word, software_words[i], letters) == 0)
            return true;
    return scrub_is_plain(word, n) || (n - letters <= 4 && scrub_is_plain(word, letters));
}

void scrub_parts(struct scrub *scrub, const char *text, size_t bytes, FILE *out)
{
    size_t at = 0;

    while (at < bytes) {
        size_t n = 0;
        char part[256];

        /* The part after "lib" is checked by itself: a variable may name the library without "lib". */
        if (bytes - at > 3 && strncmp(text + at, "lib", 3) == 0 && isalnum((unsigned char)text[at + 3])) {
            fwrite(text + at, 1, 3, out);
            at += 3;
        }
        while (at + n < bytes && n + 1 < sizeof(part) && text[at + n] &&
               !strchr("-_.+~:() \t\n\"'/,;=", text[at + n])) {
            part[n] = (char)tolower((unsigned char)text[at + n]);
            n++;
        }
        part[n] = '\0';
        if (n == 0)
            fputc((unsigned char)text[at++], out);
        else if (is_software_word(text + at, n))
            fwrite(text + at, 1, n, out);
        else
            fprintf(out, "word%d", scrub_number(scrub, SCRUB_WORD, part));
        at += n;
    }
}

void scrub_library(struct scrub *scrub, const char *name, size_t bytes, FILE *out)
{
    const char *version = memmem(name, bytes, ".so", 3);
    size_t n = 0, n_stem = version ? (size_t)(version - name) - 3 : bytes - 3;
    char *kept = NULL, *stem = strndup(name + 3, n_stem);
    FILE *passed = open_memstream(&kept, &n);

    /* Host names and addresses may consist of plain words and numbers. */
    if (passed && stem)
        scrub_text(scrub, stem, n_stem, SCRUB_NAME, passed);
    if (!stem || !passed || fclose(passed) != 0) {
        scrub->failed = true;
    } else {
        fputs("lib", out);
        scrub_parts(scrub, kept, n, out);
        scrub_parts(scrub, name + 3 + n_stem, bytes - 3 - n_stem, out);
    }
    free(stem);
    free(kept);
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

/* Folders whose entries are named by the kernel or by epkit: every name stays. */
static bool is_of_kernel(const char *path)
{
    return strncmp(path, "/sys/", 5) == 0 || strncmp(path, "/proc/", 6) == 0 || strcmp(path, "/sys") == 0 ||
           strcmp(path, "/proc") == 0;
}

/* Kernel releases: in lib/modules, and below a version of the driver in the tree of DKMS. */
static bool holds_releases(const char *folder)
{
    return scrub_match("**/lib/modules", folder) || scrub_match("/var/lib/dkms/nvidia/#", folder);
}

/* A version of the driver in that tree; four numbers could be an address. */
static bool is_driver_version(const char *folder, const char *name)
{
    return strcmp(folder, "/var/lib/dkms/nvidia") == 0 && scrub_match("#.#", name) && !scrub_match("*.*.*.*", name);
}

bool scrub_is_common(const char *folder, const char *name)
{
    if (is_of_kernel(folder) || holds_releases(folder) || is_driver_version(folder, name))
        return true;
    /* Users, except for the folder where GKE mounts its driver. */
    if (scrub_match("**/home", folder) || scrub_match("**/users", folder))
        return strcmp(name, "kubernetes") == 0;
    if (strncmp(name, "lib", 3) == 0 && strstr(name, ".so") && scrub_library_bytes(name, strlen(name)) != strlen(name))
        return false;
    for (size_t i = 0; i < sizeof(common_names) / sizeof(common_names[0]); i++)
        if (scrub_match(common_names[i], name))
            return true;
    if (scrub_is_plain_conf(name))
        return true;
    return strcmp(name, "..") == 0 || name[0] == '\0';
}

/* Folders whose files are read in the order of their names. */
static bool holds_confs(const char *folder)
{
    return scrub_match("**/modprobe.d", folder) || scrub_match("**/modules-load.d", folder) ||
           scrub_match("**/ld.so.conf.d", folder) || scrub_match("**/libibverbs.d", folder);
}

void scrub_name(struct scrub *scrub, const char *folder, const char *name, FILE *out)
{
    if (holds_releases(folder))
        scrub_release(scrub, name, strlen(name), out);
    else if (scrub_is_conf(name) && holds_confs(folder))
        scrub_write_conf(scrub, name, out);
    else if (name[0] && scrub_library_bytes(name, strlen(name)) == strlen(name))
        scrub_library(scrub, name, strlen(name), out);
    else if (scrub_is_conf(name) && scrub_is_common(folder, name))
        scrub_text(scrub, name, strlen(name), SCRUB_NAME, out);
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
