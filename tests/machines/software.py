# SPDX-License-Identifier: Apache-2.0
"""What is installed on a machine: driver, libraries, CUDA, NVSHMEM, PyTorch, DeepEP, gIB. Made up, in real places."""
import elf

KERNEL = "6.14.0-1021-gcp"
DRIVER = "580.126.09"
PYTHON = "/usr/local/lib/python3.12/dist-packages"

VERBS_PUBLIC = [f"IBVERBS_1.{i}" for i in range(15)]


class Arch:
    def __init__(self, machine, triplet, loader):
        self.machine = machine
        self.lib = f"/usr/lib/{triplet}"
        self.triplet = triplet
        self.loader = loader


X86_64 = Arch(elf.X86_64, "x86_64-linux-gnu", "ld-linux-x86-64.so.2")
AARCH64 = Arch(elf.AARCH64, "aarch64-linux-gnu", "ld-linux-aarch64.so.1")


# --- the system's own libraries ---


def system(tree, arch=X86_64):
    """Merged /usr, ld.so.conf as Debian and Ubuntu have it, and the C library."""
    tree.link("/lib", "usr/lib")
    tree.link("/lib64", "usr/lib64")
    tree.folder("/usr/lib64")
    tree.put("/etc/ld.so.conf", "include /etc/ld.so.conf.d/*.conf\n")
    tree.put("/etc/ld.so.conf.d/libc.conf", "# libc default configuration\n/usr/local/lib\n")
    tree.put(f"/etc/ld.so.conf.d/{arch.triplet}.conf",
             f"# Multiarch support\n/usr/local/lib/{arch.triplet}\n/lib/{arch.triplet}\n/usr/lib/{arch.triplet}\n")
    tree.put("/etc/os-release", 'PRETTY_NAME="Ubuntu 24.04.3 LTS"\nNAME="Ubuntu"\nVERSION_ID="24.04"\nID=ubuntu\n')
    library(tree, arch, arch.loader, "2", needed=())
    library(tree, arch, "libc.so.6", "", defines=["GLIBC_2.2.5", "GLIBC_2.34", "GLIBC_2.38"], needed=[arch.loader])
    for name in ("libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1"):
        library(tree, arch, name, "")
    library(tree, arch, "libgcc_s.so.1", "")
    library(tree, arch, "libstdc++.so.6", "0.33", needed=["libm.so.6", "libgcc_s.so.1", "libc.so.6"])


def library(tree, arch, soname, version, *, folder="", needed=("libc.so.6",), **facts):
    """A library with its links: libx.so.1 -> libx.so.1.<version>; without a version the file has the soname itself."""
    folder = folder or arch.lib
    if version:
        tree.library(f"{folder}/{soname}.{version}", link=soname, soname=soname, needed=needed, machine=arch.machine,
                     **facts)
    else:
        tree.library(f"{folder}/{soname}", soname=soname, needed=needed, machine=arch.machine, **facts)


# --- rdma-core ---


def verbs(tree, arch, *, private, core, provider, folder="", provider_in=None):
    """
    One set of libibverbs and its mlx5 provider: `private` is the NN of IBVERBS_PRIVATE_NN and of libmlx5-rdmavNN.so,
    which libibverbs looks for in libibverbs/ beside itself. provider_in="" leaves that file out.
    """
    folder = folder or arch.lib
    own = [f"IBVERBS_PRIVATE_{private}"]
    library(tree, arch, "libibverbs.so.1", core, folder=folder, defines=VERBS_PUBLIC + own,
            needs={"libc.so.6": ["GLIBC_2.34"]})
    library(tree, arch, "libmlx5.so.1", provider, folder=folder, needed=["libibverbs.so.1", "libc.so.6"],
            defines=[f"MLX5_1.{i}" for i in range(26)],
            needs={"libibverbs.so.1": ["IBVERBS_1.1", *own], "libc.so.6": ["GLIBC_2.34"]})
    library(tree, arch, "librdmacm.so.1", "3." + core.split(".", 1)[1], folder=folder,
            needed=["libibverbs.so.1", "libc.so.6"], needs={"libibverbs.so.1": ["IBVERBS_1.1", *own]})
    if provider_in is None:
        tree.link(f"{folder}/libibverbs/libmlx5-rdmav{private}.so", f"../libmlx5.so.1.{provider}")


def providers(tree, arch, private, folder=""):
    """Those that rdma-core brings for NICs of other makers."""
    for name in ("bnxt_re", "efa", "irdma"):
        tree.library(f"{folder or arch.lib}/libibverbs/lib{name}-rdmav{private}.so", needed=["libc.so.6"],
                     machine=arch.machine)
        tree.put(f"/etc/libibverbs.d/{name}.driver", f"driver {name}\n")


def verbs_development(tree, arch):
    tree.link(f"{arch.lib}/libibverbs.so", "libibverbs.so.1")
    tree.link(f"{arch.lib}/libmlx5.so", "libmlx5.so.1")
    tree.put("/usr/include/infiniband/verbs.h", "/* made up: the names that builds look for */\nstruct ibv_context;\n")
    tree.put("/usr/include/infiniband/mlx5dv.h",
             "/* made up: the names that builds look for */\n#define MLX5DV_UMEM_MASK_DMABUF 1\n"
             "enum mlx5dv_reg_dmabuf_access { MLX5DV_REG_DMABUF_ACCESS_DATA_DIRECT = (1 << 0) };\n")


def doca(tree, arch, release=KERNEL, version="3.2.1"):
    """DOCA-OFED: its rdma-core, and its kernel modules built for the running kernel."""
    verbs(tree, arch, private=57, core="14.56.0", provider="25.56.0")
    verbs_development(tree, arch)
    tree.put("/etc/libibverbs.d/mlx5.driver", "driver mlx5\n")
    providers(tree, arch, 57)
    tree.append("/var/lib/dpkg/status", package("doca-ofed", f"{version}-044000") + package(
        "doca-kernel", f"{version}-044000-{release}") + package("libibverbs1", "2510mlnx56-1.2510079"))
    tree.put(f"/lib/modules/{release}/modules.dep", "")
    for name in ("mlx5_core", "mlx5_ib", "ib_core", "ib_uverbs"):
        kernel_module(tree, release, name, version="25.10-1.2.3", dkms=True)


def package(name, version):
    return (f"Package: {name}\nStatus: install ok installed\nArchitecture: amd64\nVersion: {version}\n"
            f"Description: made up\n\n")


def kernel_module(tree, release, name, version="", dkms=False):
    """A module that is installed and loaded."""
    place = f"updates/dkms/{name}.ko" if dkms else f"kernel/drivers/{name}.ko.zst"
    modules = f"/usr/lib/modules/{release}"
    if tree.has(f"/lib/modules/{release}/modules.dep"):
        tree.remove(f"/lib/modules/{release}/modules.dep")
    tree.put(f"{modules}/{place}", f"\x7fELF made up\0name={name}\0version={version}\0vermagic={release} SMP\0")
    tree.append(f"{modules}/modules.dep", f"{place}:\n")
    load_module(tree, name, version)


def load_module(tree, name, version=""):
    tree.append("/proc/modules", f"{name} 65536 1 - Live 0x0000000000000000\n")
    tree.put(f"/sys/module/{name}/initstate", "live\n")
    if version:
        tree.put(f"/sys/module/{name}/version", f"{version}\n")


# --- NVIDIA's driver ---


def driver(tree, arch, *, version=DRIVER, release=KERNEL, override=True, peermem=True, folder=""):
    architecture = "x86_64" if arch is X86_64 else "aarch64"
    tree.put("/proc/driver/nvidia/version",
             f"NVRM version: NVIDIA UNIX Open Kernel Module for {architecture}  {version}  Release Build  "
             "(dvs-builder@example)  Thu Jan  1 00:00:00 UTC 1970\n"
             "GCC version:  gcc version 13.3.0 (Ubuntu 13.3.0-6ubuntu2~24.04)\n")
    dwords = "PeerMappingOverride=1;" if override else ""
    tree.put("/proc/driver/nvidia/params", DRIVER_PARAMS.format(dwords=dwords))
    if override:
        tree.put("/etc/modprobe.d/nvidia-deepep.conf",
                 'options nvidia NVreg_EnableStreamMemOPs=1 NVreg_RegistryDwords="PeerMappingOverride=1;"\n')
    kernel_module(tree, release, "nvidia", version, dkms=True)
    kernel_module(tree, release, "nvidia_uvm", version, dkms=True)
    if peermem:
        kernel_module(tree, release, "nvidia_peermem", version, dkms=True)
        tree.put("/sys/kernel/mm/memory_peers/nv_mem/version", f"{version}\n")
    tree.append("/var/log/kern.log",
                f"1970-01-01T00:00:20.000000+00:00 node kernel: NVRM: loading NVIDIA UNIX Open Kernel Module for "
                f"{architecture}  {version}  Release Build\n")
    tree.append("/var/lib/dpkg/status", package(f"nvidia-driver-{version.split('.')[0]}-open", f"{version}-1ubuntu1"))
    tree.put("/proc/devices", "Character devices:\n  1 mem\n195 nvidia\n195 nvidiactl\n231 infiniband_verbs\n"
                              "507 nvidia-uvm\n508 nvidia-caps\n\nBlock devices:\n259 blkext\n")
    for node in ("nvidiactl", "nvidia-uvm"):
        tree.device_node(f"/dev/{node}")
    for soname in ("libcuda.so.1", "libnvidia-ml.so.1"):
        name = soname.removesuffix(".1")
        place = folder or arch.lib
        tree.library(f"{place}/{name}.{version}", link=soname, soname=soname, needed=["libc.so.6"],
                     machine=arch.machine)


DRIVER_PARAMS = """\
ResmanDebugLevel: 4294967295
RmLogonRC: 1
ModifyDeviceFiles: 1
DeviceFileUID: 0
DeviceFileGID: 0
DeviceFileMode: 438
EnableStreamMemOPs: 1
EnableGpuFirmware: 18
NvLinkDisable: 0
RegistryDwords: "{dwords}"
RegistryDwordsPerDevice: ""
OpenRmEnableUnsupportedGpus: 1
DmaRemapPeerMmio: 1
"""


# --- CUDA, NVSHMEM, PyTorch ---


def cuda(tree, arch, version="12.9"):
    home = f"/usr/local/cuda-{version}"
    tree.link("/usr/local/cuda", f"cuda-{version}")
    tree.put(f"{home}/version.json", f'{{"cuda": {{"name": "CUDA SDK", "version": "{version}.1"}}}}\n')
    tree.put(f"{home}/bin/nvcc", "#!/bin/sh\n")
    tree.put(f"{home}/include/cuda.h", "#define CUDA_VERSION 12090\n")
    tree.put(f"{home}/include/cuda/std/tuple", "// made up\n")
    tree.library(f"{home}/lib64/libcudart.so.{version}.79", link="libcudart.so.12", soname="libcudart.so.12",
                 needed=["libc.so.6", "libdl.so.2"], machine=arch.machine)
    tree.put("/etc/ld.so.conf.d/000_cuda.conf", "/usr/local/cuda/lib64\n")


def nvshmem(tree, arch, home="/opt/deepep/nvshmem", version="3.5.19", transport=True):
    lib = f"{home}/lib"
    tree.library(f"{lib}/libnvshmem_host.so.{version}", link="libnvshmem_host.so.3", soname="libnvshmem_host.so.3",
                 needed=["libc.so.6", "libstdc++.so.6", "libcudart.so.12"], machine=arch.machine)
    tree.link(f"{lib}/libnvshmem_host.so", "libnvshmem_host.so.3")
    tree.put(f"{lib}/libnvshmem_device.a", "!<arch>\n")
    tree.put(f"{home}/include/nvshmem.h", "// made up\n")
    major, minor, patch = version.split(".")
    tree.put(f"{home}/include/non_abi/nvshmem_version.h",
             f"#define NVSHMEM_VENDOR_MAJOR_VERSION {major}\n#define NVSHMEM_VENDOR_MINOR_VERSION {minor}\n"
             f"#define NVSHMEM_VENDOR_PATCH_VERSION {patch}\n")
    tree.put(f"{home}/bin/nvshmem-info", "#!/bin/sh\n")
    if transport:
        add_transport(tree, arch, lib)


def add_transport(tree, arch, lib):
    """The plugin for IBGDA, and the answer that a test-load of it would give."""
    path = f"{lib}/nvshmem_transport_ibgda.so.3.0.0"
    tree.library(path, link="nvshmem_transport_ibgda.so.3", soname="nvshmem_transport_ibgda.so.3",
                 needed=["libmlx5.so.1", "libibverbs.so.1", "libstdc++.so.6", "libc.so.6"],
                 needs={"libibverbs.so.1": ["IBVERBS_1.1"], "libmlx5.so.1": ["MLX5_1.0"]}, machine=arch.machine)
    loads(tree, path)
    loads(tree, f"{lib}/nvshmem_transport_ibgda.so.3")


def loads(tree, path, error=""):
    tree.answers[f"load:{path}"] = {"ok": False, "error": error} if error else {"ok": True}


def torch(tree, arch, archs=(80, 90, 100, -120)):
    """PyTorch as its wheel installs it, with NVSHMEM and NCCL from NVIDIA's wheels."""
    for name in ("libc10.so", "libtorch.so", "libtorch_cpu.so", "libtorch_python.so"):
        tree.library(f"{PYTHON}/torch/lib/{name}", soname=name, needed=["libc.so.6", "libstdc++.so.6"],
                     machine=arch.machine)
    tree.library(f"{PYTHON}/torch/lib/libc10_cuda.so", soname="libc10_cuda.so", machine=arch.machine,
                 needed=["libc10.so", "libcudart.so.12", "libc.so.6"])
    tree.library(f"{PYTHON}/torch/lib/libtorch_cuda.so", soname="libtorch_cuda.so", archs=archs, machine=arch.machine,
                 needed=["libc10_cuda.so", "libnccl.so.2", "libnvshmem_host.so.3", "libcudart.so.12", "libc.so.6"],
                 runpath="$ORIGIN/../../nvidia/nccl/lib:$ORIGIN/../../nvidia/nvshmem/lib:$ORIGIN")
    tree.put(f"{PYTHON}/torch/__init__.py", "")
    tree.put(f"{PYTHON}/torch/version.py", "__version__ = '2.10.0+cu129'\n")
    wheel(tree, "torch", "2.10.0+cu129")
    wheel(tree, "nvidia-nvshmem-cu12", "3.4.5")
    wheel(tree, "nvidia-nccl-cu12", "2.27.5")
    tree.library(f"{PYTHON}/nvidia/nvshmem/lib/libnvshmem_host.so.3", soname="libnvshmem_host.so.3",
                 needed=["libc.so.6", "libcudart.so.12"], machine=arch.machine)
    tree.library(f"{PYTHON}/nvidia/nccl/lib/libnccl.so.2", soname="libnccl.so.2", needed=["libc.so.6"],
                 machine=arch.machine)


def wheel(tree, name, version, folder=PYTHON):
    tree.put(f"{folder}/{name.replace('-', '_')}-{version}.dist-info/METADATA",
             f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: made up\n")


# --- DeepEP ---

DEEPEP_VERSION = "1.2.1+29d31c0"
DEEPEP_EXTENSION = "deep_ep_cpp.cpython-312-x86_64-linux-gnu.so"

# The shape of deep_ep/buffer.py with the mapping of pull request 466 (commit 8a07e7e): its definition, its call in the
# constructor, and a static method behind it whose decorator a careless patch would steal. Wording and bodies are ours.
MAPPING_CALL = "        self._setup_device_hca_mapping()\n"
MAPPING_METHOD = '''\
    def _setup_device_hca_mapping(self):
        """Made up: restrict NVSHMEM to the NIC of this device."""
        entries = os.environ.get("DEEP_EP_DEVICE_TO_HCA_MAPPING", "")
        for entry in filter(None, entries.split(",")):
            device, nic = entry.split(":", 1)
            if int(device) == torch.cuda.current_device():
                os.environ["NVSHMEM_HCA_LIST"] = nic

'''
BUFFER = '''\
"""Made up: the outline of DeepEP's buffer.py."""
import os
import torch


class Buffer:
    num_sms: int = 20

    def __init__(self, group, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        self.rank = group.rank()
{call}        self.runtime = None

{method}    @staticmethod
    def is_sm90_compiled():
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        Buffer.num_sms = new_num_sms
'''


def buffer_py(call=True, method=True):
    return BUFFER.format(call=MAPPING_CALL if call else "", method=MAPPING_METHOD if method else "")


def deepep_extension(tree, arch, path, *, archs, nvshmem_lib="/opt/deepep/nvshmem/lib"):
    tree.library(path, soname="", archs=archs, machine=arch.machine, runpath=nvshmem_lib,
                 needed=["libnvshmem_host.so.3", "libc10.so", "libtorch.so", "libtorch_cpu.so", "libtorch_python.so",
                         "libcudart.so.12", "libc10_cuda.so", "libtorch_cuda.so", "libmlx5.so.1", "libstdc++.so.6",
                         "libc.so.6"])


def deepep(tree, arch, *, archs, version=DEEPEP_VERSION, source=True):
    installed = "/opt/deepep/python"
    copies = [installed] + (["/opt/deepep/source"] if source else [])
    for folder in copies:
        tree.put(f"{folder}/deep_ep/__init__.py", "from .buffer import Buffer\n")
        tree.put(f"{folder}/deep_ep/utils.py", "")
        tree.put(f"{folder}/deep_ep/buffer.py", buffer_py())
    deepep_extension(tree, arch, f"{installed}/{DEEPEP_EXTENSION}", archs=archs)
    wheel(tree, "deep_ep", version, installed)
    if source:
        tree.put("/opt/deepep/source/setup.py", "# made up\n")
        tree.put("/opt/deepep/source/csrc/deep_ep.cpp", "// made up\n")
        tree.put("/opt/deepep/source/tests/test_internode.py", "# made up\n")


# --- gIB ---


GIB_SETTINGS = {
    "NCCL_NET": "gIB",
    "NCCL_CROSS_NIC": "0",
    "NCCL_NET_GDR_LEVEL": "PIX",
    "NCCL_P2P_NET_CHUNKSIZE": "131072",
    "NCCL_NVLS_CHUNKSIZE": "524288",
    "NCCL_IB_ADAPTIVE_ROUTING": "1",
    "NCCL_IB_QPS_PER_CONNECTION": "4",
    "NCCL_IB_TC": "52",
    "NCCL_IB_FIFO_TC": "84",
}


def gib(tree, arch, machine="a4"):
    """Google's NCCL plugin. It brings rdma-core along, which other programs must not pick up."""
    home = "/usr/local/gib"
    verbs(tree, arch, private=57, core="14.56.1", provider="25.56.1", folder=f"{home}/lib64")
    for name in ("libnccl-net.so", "libnccl-net_internal.so"):
        tree.library(f"{home}/lib64/{name}", soname=name, needed=["libibverbs.so.1", "libstdc++.so.6", "libc.so.6"],
                     needs={"libibverbs.so.1": ["IBVERBS_1.1"]}, machine=arch.machine)
        loads(tree, f"{home}/lib64/{name}")
    tree.library(f"{home}/lib64/libnccl-tuner.so", soname="libnccl-tuner.so", needed=["libc.so.6"],
                 machine=arch.machine)
    tree.put(f"{home}/configs/tuner_config_{machine}.txtpb", "# made up\n")
    tree.put(f"{home}/scripts/set_nccl_env.sh",
             "# made up\n" + "".join(f"export {name}={value}\n" for name, value in GIB_SETTINGS.items())
             + "unset TORCH_NCCL_USE_COMM_NONBLOCKING\n")
