/* SPDX-License-Identifier: Apache-2.0 */
/* The results of software_read(): driver options, libibverbs and provider, copies of DeepEP, NVSHMEM, NCCL. */
#include "machine/software/software.h"
#include "world.h"

#define OPEN_DRIVER                                                                                                    \
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.126.09  Release Build\nGCC version:  gcc 13.3.0\n"
#define DWORDS(value) "options nvidia NVreg_RegistryDwords=\"" value "\"\n"

static const struct topo no_topo;

static struct world world;
static struct software *software;

static void read_software(void)
{
    software = software_read(world_open(&world), &no_topo);
}

static void done(void)
{
    world_done(&world);
}

/* --- driver --- */

TEST(driver)
{
    world_init(&world);
    tree_put(&world.tree, "/proc/driver/nvidia/version", OPEN_DRIVER);
    tree_put(&world.tree, "/proc/sys/kernel/osrelease", "6.14.0-1021-gcp\n");
    tree_put(&world.tree, "/sys/module/nvidia/version", "580.126.09\n");
    tree_put(&world.tree, "/sys/module/nvidia_peermem/initstate", "live\n");
    tree_put(&world.tree, "/var/lib/dpkg/status",
             "Package: nvidia-driver-assistant\nStatus: install ok installed\nVersion: 1.0\n\n"
             "Package: nvidia-driver-570\nStatus: deinstall ok config-files\nVersion: 570.1\n\n"
             "Package: nvidia-driver-580-open\nStatus: install ok installed\nVersion: 1:580.140.02-0ubuntu1\n\n"
             "Package: doca-kernel\nStatus: install ok installed\nVersion: 9.9\n\n"
             "Package: doca-ofed\nStatus: install ok installed\nVersion: 3.2.1-044000\n");
    read_software();
    assert_string_equal(software->driver.version, "580.126.09");
    assert_true(software->driver.is_open);
    assert_string_equal(software->driver.module_version, "580.126.09");
    assert_string_equal(software->driver.installed_version, "580.140.02");
    assert_string_equal(software->driver.doca, "3.2.1");
    assert_int_equal(software->driver.peermem, SOURCE_OK);
    assert_int_equal(software->driver.gdrdrv, SOURCE_ABSENT);
    assert_int_equal(software->driver.dmabuf, SOURCE_OK);
    done();
}

static void assert_peermem(const char *file, enum source_state expected)
{
    world_init(&world);
    tree_put(&world.tree, file, "1\n");
    read_software();
    assert_int_equal(software->driver.peermem, expected);
    done();
}

/* The driver's module, and equivalent ones. */
TEST(peermem_of_any_kind)
{
    assert_peermem("/sys/module/nvidia_peermem/initstate", SOURCE_OK);
    assert_peermem("/sys/module/nv_peer_mem/initstate", SOURCE_OK);
    assert_peermem("/sys/module/efa_nv_peermem/initstate", SOURCE_OK);
    assert_peermem("/sys/kernel/mm/memory_peers/nv_mem/version", SOURCE_OK);
    assert_peermem("/sys/module/nvidia/initstate", SOURCE_ABSENT);
}

/* Ubuntu's signed modules have the version of the kernel, not of the driver. */
TEST(driver_of_signed_modules)
{
    world_init(&world);
    tree_put(&world.tree, "/proc/driver/nvidia/version", OPEN_DRIVER);
    tree_put(&world.tree, "/proc/sys/kernel/osrelease", "6.8.0-87-generic\n");
    tree_put(&world.tree, "/var/lib/dpkg/status",
             "Package: linux-modules-nvidia-580-server-open-6.8.0-87-generic\nStatus: install ok installed\n"
             "Version: 6.8.0-1041.46+1\n\n");
    read_software();
    assert_string_equal(software->driver.installed_version, "");
    done();
}

/* DKMS lists the version for the running kernel; versions for other kernels do not count. */
TEST(driver_of_dkms)
{
    world_init(&world);
    tree_put(&world.tree, "/proc/sys/kernel/osrelease", "6.8.0-1\n");
    tree_put(&world.tree, "/var/lib/dkms/nvidia/580.9.1/6.8.0-1/x86_64/log", "");
    tree_put(&world.tree, "/var/lib/dkms/nvidia/580.10.1/6.8.0-1/x86_64/log", "");
    tree_put(&world.tree, "/var/lib/dkms/nvidia/590.1.1/6.14.0-1/x86_64/log", "");
    tree_put(&world.tree, "/usr/share/doca-host-3.1.0-091000-25.07-ubuntu2404/repo", "");
    read_software();
    assert_string_equal(software->driver.installed_version, "580.10.1");
    assert_string_equal(software->driver.version, "");
    assert_string_equal(software->driver.doca, "3.1.0");
    assert_int_equal(software->driver.dmabuf, SOURCE_ABSENT);
    done();
}

/*
 * A status file that exceeds the size limit: the version comes from the repository, if OFED's source shows that it was
 * used.
 */
TEST(doca_of_repository)
{
    for (int with_source = 0; with_source < 2; with_source++) {
        char *status = calloc(1, SOURCE_FILE_MAX + 2);

        assert_non_null(status);
        memset(status, '\n', SOURCE_FILE_MAX + 1);
        world_init(&world);
        tree_put(&world.tree, "/var/lib/dpkg/status", status);
        tree_put(&world.tree, "/etc/apt/sources.list.d/doca.list",
                 "deb [signed-by=/x] https://repository.example/public/repo/doca/3.2.1/ubuntu24.04/x86_64/ ./\n");
        if (with_source)
            tree_put(&world.tree, "/usr/src/mlnx-ofed-kernel-25.10.OFED.25.10.1/dkms.conf", "");
        read_software();
        assert_string_equal(software->driver.doca, with_source ? "3.2.1" : "");
        done();
        free(status);
    }
}

TEST(no_dmabuf)
{
    static const struct {
        const char *version, *kernel, *why;
    } cases[] = {
        {"NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.1.1  Sat", "6.8.0", "proprietary"},
        {"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  510.2.1  Rel", "6.8.0", "older than 515"},
        {"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.2.1  Rel", "5.10.0", "older than 5.12"},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        world_init(&world);
        tree_put(&world.tree, "/proc/driver/nvidia/version", cases[i].version);
        tree_put(&world.tree, "/proc/sys/kernel/osrelease", cases[i].kernel);
        read_software();
        assert_int_equal(software->driver.dmabuf, SOURCE_ABSENT);
        assert_non_null(strstr(software->driver.dmabuf_why, cases[i].why));
        done();
    }
}

/* Files are read by name, regardless of the folder; /etc hides others; only the last line counts. */
TEST(option_that_wins)
{
    const struct software_option *option;

    world_init(&world);
    tree_put(&world.tree, "/etc/modprobe.d/b.conf", DWORDS("PeerMappingOverride=1;"));
    tree_put(&world.tree, "/usr/lib/modprobe.d/b.conf", DWORDS("PeerMappingOverride=7;"));
    tree_put(&world.tree, "/usr/lib/modprobe.d/z.conf", DWORDS("RMOther=1;"));
    tree_put(&world.tree, "/run/modprobe.d/a.conf", DWORDS("PeerMappingOverride=5;"));
    tree_put(&world.tree, "/etc/modprobe.d/zz.conf.bak", DWORDS("PeerMappingOverride=9;"));
    tree_put(
        &world.tree, "/proc/driver/nvidia/params",
        "EnableStreamMemOPs: 1\nRegistryDwords: \"PeerMappingOverride=0x1;A=2;\"\nRegistryDwordsPerDevice: \"\"\n");
    read_software();
    option = &software->driver.peer_mapping_override;
    assert_string_equal(option->configured, "");
    assert_string_equal(option->configured_in, "/usr/lib/modprobe.d/z.conf");
    assert_string_equal(option->overruled, "1");
    assert_string_equal(option->overruled_in, "/etc/modprobe.d/b.conf");
    assert_string_equal(option->live, "0x1");
    assert_string_equal(software->driver.dwords_with_override, "RMOther=1;PeerMappingOverride=1;");
    done();
}

TEST(option_of_command_line)
{
    world_init(&world);
    tree_put(&world.tree, "/etc/modprobe.d/b.conf", DWORDS("PeerMappingOverride=0"));
    tree_put(&world.tree, "/proc/cmdline", "ro nvidia.NVreg_RegistryDwords=PeerMappingOverride=1\n");
    read_software();
    assert_string_equal(software->driver.peer_mapping_override.configured, "1");
    assert_string_equal(software->driver.peer_mapping_override.configured_in, "/proc/cmdline");
    assert_string_equal(software->driver.peer_mapping_override.live, "");
    done();
}

/* --- verbs --- */

#define GNU "/usr/lib/x86_64-linux-gnu"
#define CORE(number) "{'machine': 62, 'definitions': ['IBVERBS_1.0', 'IBVERBS_PRIVATE_" number "']}"
#define MLX5(number) "{'machine': 62, 'needs': [['libibverbs.so.1', 'IBVERBS_PRIVATE_" number "']]}"

static void put_verbs(void)
{
    world_init(&world);
    world_library(&world, GNU "/libibverbs.so.1", CORE("50"));
    world_library(&world, GNU "/libmlx5.so.1", MLX5("50"));
    tree_put(&world.tree, "/etc/libibverbs.d/mlx5.driver", "# words\ndriver mlx5\n");
}

TEST(provider)
{
    put_verbs();
    world_library(&world, GNU "/libibverbs/libmlx5-rdmav50.so", MLX5("50"));
    world_library(&world, GNU "/libibverbs/libmlx5-rdmav34.so", MLX5("34"));
    read_software();
    assert_int_equal(software->verbs.private_version, 50);
    assert_int_equal(software->verbs.provider_needs, 50);
    assert_string_equal(software->verbs.provider, GNU "/libibverbs/libmlx5-rdmav50.so");
    done();
}

TEST(provider_of_another_number)
{
    put_verbs();
    world_library(&world, GNU "/libibverbs/libmlx5-rdmav34.so", MLX5("34"));
    read_software();
    assert_string_equal(software->verbs.provider, "");
    assert_non_null(strstr(software->verbs.provider_folders, GNU "/libibverbs"));
    done();
}

/* By RDMAV_DRIVERS, to which the suffix is appended; with a folder the file does not exist. */
TEST(provider_by_environment)
{
    static const char good[] = "RDMAV_DRIVERS=other:/opt/p/libmlx5\0", folder[] = "RDMAV_DRIVERS=/opt/p\0";

    put_verbs();
    world_library(&world, "/opt/p/libmlx5-rdmav50.so", MLX5("50"));
    world_environment(&world, good, sizeof(good));
    read_software();
    assert_string_equal(software->verbs.provider, "/opt/p/libmlx5-rdmav50.so");
    done();

    put_verbs();
    world_library(&world, "/opt/p/libmlx5-rdmav50.so", MLX5("50"));
    world_environment(&world, folder, sizeof(folder));
    read_software();
    assert_string_equal(software->verbs.provider, "");
    done();
}

/* By a path in a file of /etc/libibverbs.d, and through ld.so's search. */
TEST(provider_elsewhere)
{
    put_verbs();
    tree_put(&world.tree, "/etc/libibverbs.d/mlx5.driver", "driver /opt/p/libmlx5\n");
    world_library(&world, "/opt/p/libmlx5-rdmav50.so", MLX5("50"));
    read_software();
    assert_string_equal(software->verbs.provider, "/opt/p/libmlx5-rdmav50.so");
    done();

    put_verbs();
    world_library(&world, GNU "/libmlx5-rdmav50.so", MLX5("50"));
    read_software();
    assert_string_equal(software->verbs.provider, GNU "/libmlx5-rdmav50.so");
    done();
}

/* A folder of *.driver files without one for mlx5: libibverbs then loads no provider for it. */
TEST(provider_not_named)
{
    put_verbs();
    tree_put(&world.tree, "/etc/libibverbs.d/mlx5.driver", "driver mlx4\n#driver mlx5\ndrivers mlx5\n");
    world_library(&world, GNU "/libibverbs/libmlx5-rdmav50.so", MLX5("50"));
    read_software();
    assert_string_equal(software->verbs.provider, "");
    assert_non_null(strstr(software->verbs.provider_folders, "no file there names mlx5"));
    done();
}

/* --- DeepEP --- */

#define MAPPED                                                                                                         \
    "class Buffer:\n    def __init__(self):\n        self._setup_device_hca_mapping()\n"                               \
    "    def _setup_device_hca_mapping(self):\n        pass\n"
#define SITE "/usr/local/lib/python3.12/dist-packages"

static void put_copy(const char *folder, const char *buffer)
{
    char path[PATH_MAX];

    snprintf(path, sizeof(path), "%s/deep_ep/__init__.py", folder);
    tree_put(&world.tree, path, "__version__ = \"1.2.1\"\n");
    snprintf(path, sizeof(path), "%s/deep_ep/buffer.py", folder);
    tree_put(&world.tree, path, buffer);
}

TEST(copies)
{
    static const char variables[] = "PYTHONPATH=/not/there:/first:relative:\0HOME=/home/user\0";

    world_init(&world);
    world_environment(&world, variables, sizeof(variables));
    put_copy("/first", "class Buffer:\n    pass\n");
    put_copy(SITE, MAPPED);
    put_copy("/usr/local/lib/python3.9/dist-packages", MAPPED);
    put_copy("/opt/deepep/source", MAPPED);
    tree_put(&world.tree, SITE "/deep_ep-1.2.1+29d31c0.dist-info/METADATA", "Name: deep_ep\nVersion: 1.2.1+29d31c0\n");
    tree_put(&world.tree, "/opt/deepep/source/setup.py", "");
    tree_put(&world.tree, "/opt/deepep/source/csrc/x.cpp", "");
    tree_put(&world.tree, SITE "/deep_ep_cpp.cpython-312-x86_64-linux-gnu.so", "");
    read_software();
    assert_int_equal(software->deepep.n, 4);
    assert_int_equal(software->deepep.imported, 0);
    assert_false(software->deepep.mapping_active);
    assert_string_equal(software->deepep.copies[0].folder, "/first/deep_ep");
    assert_string_equal(software->deepep.copies[0].version, "1.2.1");
    /* Not next to it, but on the path. */
    assert_string_equal(software->deepep.copies[0].extension, SITE "/deep_ep_cpp.cpython-312-x86_64-linux-gnu.so");
    /* The latest Python first. */
    assert_string_equal(software->deepep.copies[1].folder, SITE "/deep_ep");
    assert_string_equal(software->deepep.copies[1].version, "1.2.1+29d31c0");
    assert_true(software->deepep.copies[1].defines_mapping && software->deepep.copies[1].calls_mapping);
    assert_true(software->deepep.copies[1].hash == software->deepep.copies[2].hash);
    assert_true(software->deepep.copies[1].hash != software->deepep.copies[0].hash);
    assert_string_equal(software->deepep.copies[3].folder, "/opt/deepep/source/deep_ep");
    assert_true(software->deepep.copies[3].is_source);
    assert_false(software->deepep.copies[3].on_path);
    done();
}

/* An egg of setup.py install, and a tree that was installed in place: .pth files refer to both. */
TEST(pth_files)
{
    world_init(&world);
    tree_put(&world.tree, SITE "/easy-install.pth",
             "import sys; sys.path\n# words\n./deep_ep-1.2.1+309785a-py3.12-linux-x86_64.egg\n/src/DeepEP\n");
    put_copy(SITE "/deep_ep-1.2.1+309785a-py3.12-linux-x86_64.egg", MAPPED);
    tree_put(&world.tree, SITE "/deep_ep-1.2.1+309785a-py3.12-linux-x86_64.egg/EGG-INFO/PKG-INFO",
             "Version: 1.2.1+309785a\n");
    put_copy("/src/DeepEP", MAPPED);
    read_software();
    assert_int_equal(software->deepep.n, 2);
    assert_string_equal(software->deepep.copies[0].version, "1.2.1+309785a");
    assert_true(software->deepep.copies[1].on_path);
    assert_true(software->deepep.mapping_active);
    done();
}

/* A virtual environment hides the system's packages unless it was created with access to them. */
TEST(virtual_environment)
{
    static const char variables[] = "VIRTUAL_ENV=/venv\0";

    for (int with_system = 0; with_system < 2; with_system++) {
        world_init(&world);
        world_environment(&world, variables, sizeof(variables));
        tree_put(&world.tree, "/venv/pyvenv.cfg",
                 with_system ? "home = /usr\ninclude-system-site-packages = true\n"
                             : "include-system-site-packages = false\n");
        tree_put(&world.tree, "/venv/lib/python3.12/site-packages/x.py", "");
        put_copy(SITE, MAPPED);
        read_software();
        assert_int_equal(software->deepep.n, 1);
        assert_int_equal(software->deepep.imported, with_system ? 0 : -1);
        done();
    }
}

/* One folder under two names is one copy. */
TEST(same_copy_twice)
{
    static const char variables[] = "PYTHONPATH=/a:/b\0";

    world_init(&world);
    world_environment(&world, variables, sizeof(variables));
    put_copy("/a", MAPPED);
    tree_link(&world.tree, "/b", "a");
    read_software();
    assert_int_equal(software->deepep.n, 1);
    done();
}

/* --- NVSHMEM and NCCL --- */

#define WHEELS SITE "/nvidia"

TEST(bundled)
{
    world_init(&world);
    world_library(&world, WHEELS "/nvshmem/lib/libnvshmem_host.so.3", "{'soname': 'libnvshmem_host.so.3'}");
    world_library(&world, WHEELS "/nccl/lib/libnccl.so.2", "{'soname': 'libnccl.so.2'}");
    tree_put(&world.tree, SITE "/nvidia_nvshmem_cu12-3.4.5.dist-info/METADATA", "Version: 3.4.5\n");
    tree_put(&world.tree, SITE "/nvidia_nccl_cu12-2.27.5.dist-info/RECORD", "");
    read_software();
    assert_string_equal(software->nvshmem.bundled, WHEELS "/nvshmem/lib/libnvshmem_host.so.3");
    assert_string_equal(software->nvshmem.bundled_version, "3.4.5");
    assert_string_equal(software->nccl.bundled_version, "2.27.5");
    assert_int_equal(software->nvshmem.host.state, SOURCE_ABSENT);
    assert_string_equal(software->nvshmem.home, "");
    done();
}

/* DeepEP's extension has its NVSHMEM in its RUNPATH; LD_PRELOAD takes precedence. */
TEST(nvshmem_by_extension)
{
    static const char variables[] = "PYTHONPATH=/py\0",
                      preloaded[] = "PYTHONPATH=/py\0LD_PRELOAD=/new/lib64/libnvshmem_host.so.3\0";

    for (int with_preload = 0; with_preload < 2; with_preload++) {
        world_init(&world);
        if (with_preload)
            world_environment(&world, preloaded, sizeof(preloaded));
        else
            world_environment(&world, variables, sizeof(variables));
        put_copy("/py", MAPPED);
        world_library(&world, "/py/deep_ep_cpp.so", "{'runpath': '/own/lib', 'needed': ['libnvshmem_host.so.3']}");
        world_library(&world, "/own/lib/libnvshmem_host.so.3", "{'soname': 'libnvshmem_host.so.3'}");
        world_library(&world, "/new/lib64/libnvshmem_host.so.3", "{'soname': 'libnvshmem_host.so.3'}");
        world_library(&world, "/own/lib/nvshmem_transport_ibgda.so.3", "{}");
        tree_put(&world.tree, "/own/include/non_abi/nvshmem_version.h",
                 "#define NVSHMEM_VENDOR_MAJOR_VERSION 3\n#define NVSHMEM_VENDOR_MINOR_VERSION 3\n"
                 "#define NVSHMEM_VENDOR_PATCH_VERSION 20\n");
        read_software();
        if (with_preload) {
            assert_string_equal(software->nvshmem.home, "/new");
            assert_string_equal(software->nvshmem.version, "");
            assert_string_equal(software->nvshmem.transport_ibgda, "");
        } else {
            assert_string_equal(software->nvshmem.home, "/own");
            assert_string_equal(software->nvshmem.version, "3.3.20");
            assert_string_equal(software->nvshmem.transport_ibgda, "/own/lib/nvshmem_transport_ibgda.so.3");
            assert_string_equal(software->nvshmem.host.found_by, "RUNPATH of /py/deep_ep_cpp.so");
        }
        done();
    }
}

/* Installed, but not on the linker's path: `home` is set for the advice, but no process finds the library. */
TEST(nvshmem_installed)
{
    world_init(&world);
    world_library(&world, "/opt/deepep/nvshmem/lib/libnvshmem_host.so.3", "{}");
    read_software();
    assert_int_equal(software->nvshmem.host.state, SOURCE_ABSENT);
    assert_string_equal(software->nvshmem.home, "/opt/deepep/nvshmem");
    done();
}

TEST(plugin)
{
    static const struct {
        const char *variable;
        size_t bytes;
        const char *name, *path;
    } cases[] = {
        {"\0", 2, "libnccl-net.so", "/usr/lib/libnccl-net.so"},
        {"NCCL_NET_PLUGIN=none\0", 22, "", ""},
        {"NCCL_NET_PLUGIN=gib\0", 21, "libnccl-net-gib.so", "/usr/lib/libnccl-net-gib.so"},
        {"NCCL_NET_PLUGIN=/x/liby.so\0", 28, "/x/liby.so", "/x/liby.so"},
        {"NCCL_NET_PLUGIN=other\0", 23, "libnccl-net-other.so", ""},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        world_init(&world);
        world_environment(&world, cases[i].variable, cases[i].bytes);
        world_library(&world, "/usr/lib/libnccl-net.so", "{}");
        world_library(&world, "/usr/lib/libnccl-net-gib.so", "{}");
        world_library(&world, "/x/liby.so", "{}");
        read_software();
        assert_string_equal(software->nccl.plugin_name, cases[i].name);
        assert_string_equal(software->nccl.plugin.path, cases[i].path);
        done();
    }
}

/* The settings of gIB's script: "NAME=VALUE", "-NAME" if unset. */
static void assert_settings(const char *script, const char *expected)
{
    char said[512] = "";
    size_t n = 0;

    world_init(&world);
    tree_put(&world.tree, "/usr/local/gib/scripts/set_nccl_env.sh", script);
    tree_put(&world.tree, "/usr/local/gib/lib64/libnccl-net.so", "made up");
    read_software();
    for (int i = 0; i < software->nccl.n_settings; i++) {
        const struct software_setting *setting = &software->nccl.settings[i];

        if (!setting->value)
            n += (size_t)snprintf(said + n, sizeof(said) - n, "-%s ", setting->name);
        else
            n += (size_t)snprintf(said + n, sizeof(said) - n, "%s=%s ", setting->name, setting->value);
        assert_in_range(n, 0, sizeof(said) - 1);
    }
    assert_string_equal(said, expected);
    done();
}

TEST(settings_of_gib)
{
    assert_settings("", "");
    assert_settings("#!/bin/bash\nexport NCCL_NET=gIB\n  export NCCL_IB_TC=\"52\" NCCL_IB_FIFO_TC='84' # words\n"
                    "unset TORCH_NCCL_USE_COMM_NONBLOCKING NCCL_DEBUG",
                    "NCCL_NET=gIB NCCL_IB_TC=52 NCCL_IB_FIFO_TC=84 -TORCH_NCCL_USE_COMM_NONBLOCKING -NCCL_DEBUG ");
    /* Unclear: an expansion, different values by case, set and unset. The same value twice is clear. */
    assert_settings("export NCCL_NET=gIB\nexport NCCL_A=$X\nexport NCCL_B=1\nexport NCCL_B=2\nexport NCCL_C=1\n"
                    "unset NCCL_C\nexport NCCL_D=1\nexport NCCL_D=\"1\"\n",
                    "NCCL_NET=gIB NCCL_D=1 ");
    /* Other names, lines without settings, unterminated quotes. */
    assert_settings("export PATH=/x\n#export NCCL_NET=x\nNCCL_NET=y\necho export NCCL_NET=z\nexport NCCL_=1\n"
                    "export NCCL_E=\"1\nexport NCCL_F=1;true\nexport =\nexport\nunset \nexport NCCL_G",
                    "NCCL_F=1 ");
}

/* An empty machine, and a snapshot without any answer. */
TEST(nothing)
{
    world_init(&world);
    read_software();
    assert_string_equal(software->driver.version, "");
    assert_string_equal(software->cuda_home, "");
    assert_int_equal(software->deepep.imported, -1);
    assert_int_equal(software->verbs.ibverbs.state, SOURCE_ABSENT);
    done();
}

/* --- operating system --- */

TEST(systems)
{
    static const struct {
        const char *release;
        enum os_family family;
        const char *initramfs, *install, *argument;
    } cases[] = {
        {"PRETTY_NAME=\"Ubuntu 24.04\"\nVERSION_ID=\"24.04\"\nID=ubuntu\nID_LIKE=debian\n", OS_DEBIAN,
         "sudo update-initramfs -u", "sudo apt-get install libibverbs-dev", "/etc/default/grub"},
        {"ID=pop\nID_LIKE='ubuntu debian'\n", OS_DEBIAN, "sudo update-initramfs -u",
         "sudo apt-get install libibverbs-dev", "/etc/default/grub"},
        {"ID=\"rocky\"\nID_LIKE=\"rhel centos fedora\"\n", OS_RHEL, "sudo dracut --force",
         "sudo dnf install rdma-core-devel", "grubby --update-kernel=ALL --args=iommu=pt"},
        {"ID=\"sles\"\nID_LIKE=\"suse\"\n", OS_SUSE, "sudo dracut --force", "",
         "grub2-mkconfig -o /boot/grub2/grub.cfg"},
        {"ID=\"rhcos\"\nID_LIKE=\"rhel fedora\"\n", OS_OSTREE, "", "", "rpm-ostree kargs --append=iommu=pt"},
        {"ID=fedora\nVARIANT_ID=coreos\n", OS_OSTREE, "", "", "MachineConfig"},
        {"ID=fedora\nVARIANT_ID=server\n", OS_RHEL, "sudo dracut --force", "sudo dnf install rdma-core-devel",
         "grubby"},
        {"ID=cos\nID_LIKE=chromeos\n", OS_COS, "", "", "Container-Optimized OS"},
        {"ID=debianic\nID_LIKE=\n", OS_OTHER, "", "", "boot loader"},
        {"ID=", OS_OTHER, "", "", "boot loader"},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        world_init(&world);
        tree_put(&world.tree, "/etc/os-release", cases[i].release);
        read_software();
        assert_int_equal(software->os.family, cases[i].family);
        assert_false(software->os.in_container);
        assert_string_equal(os_initramfs(&software->os), cases[i].initramfs);
        assert_string_equal(os_install(software->source, &software->os, "libibverbs-dev", "rdma-core-devel"),
                            cases[i].install);
        assert_non_null(
            strstr(os_kernel_argument(software->source, &software->os, true, "iommu=pt"), cases[i].argument));
        done();
    }
}

TEST(containers)
{
    static const struct {
        const char *file, *text;
        bool in_container;
    } cases[] = {
        {"/.dockerenv", "", true},
        {"/run/.containerenv", "", true},
        {"/proc/self/environ", "KUBERNETES_SERVICE_HOST=192.0.2.1", true},
        {"/proc/self/environ", "container=oci", true},
        {"/proc/self/environ", "container=", false},
        {"/proc/self/mounts", "overlay / overlay rw,lowerdir=/a 0 0\nproc /proc proc rw 0 0\n", true},
        {"/proc/self/mounts", "overlay / overlay rw 0 0\n/dev/root / ext4 rw 0 0\n", false},
        {"/proc/self/mounts", "/dev/root / ext4 rw 0 0\noverlay /var/lib/x overlay rw 0 0\n / ", false},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        world_init(&world);
        tree_put(&world.tree, "/etc/os-release", "ID=debian\n");
        tree_put(&world.tree, cases[i].file, cases[i].text);
        read_software();
        assert_int_equal(software->os.in_container, cases[i].in_container);
        assert_string_equal(os_initramfs(&software->os), cases[i].in_container ? "" : "sudo update-initramfs -u");
        done();
    }
}
