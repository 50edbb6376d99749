# SPDX-License-Identifier: Apache-2.0
"""More machines of public bug reports, as in reports.py: environments, containers, kernels, libraries half replaced.

What was right was written down first, from the report, and the doctor asked afterwards.
"""
import field
import reports
import software
import stacks
import variants
from reports import env, put, two_nodes
from rules import limits, log
from software import PYTHON, X86_64
from stacks import CUDA_13, dist, extension, files, versions
from variants import nic_port, set_up, unload, update_gpus

changes = []
change = variants.changes_into(changes)


# --- libraries of another version, and two of one name ---


def two_wheels(version="1.2.0", *packages):
    return lambda tree: [dist(f"nixl-cu{cuda}", version, *(packages or ("nixl_ep",)))(tree) for cuda in (12, 13)]


NIXL_EP = files("nixl_ep/__init__.py", "nixl_ep/buffer.py")


def nixl(cuda, folder="nixl_ep"):
    return extension(f"{folder}/nixl_ep_cpp.", cuda, undefined=())


def flashinfer(cubin, jit=""):
    def step(tree):
        files("flashinfer/__init__.py", "flashinfer/moe_ep/__init__.py", "flashinfer_cubin/__init__.py")(tree)
        dist("flashinfer-python", "0.7.4", "flashinfer")(tree)
        dist("flashinfer-cubin", cubin, "flashinfer_cubin")(tree)
        if jit:
            dist("flashinfer-jit-cache", jit, "flashinfer_jit_cache")(tree)
    return step


def system_nvshmem(tree):
    """An image whose PyTorch loads the distribution's NVSHMEM, and DeepEP built with that of the wheel."""
    versions(nccl="2.27.5")(tree)
    stacks.V1(tree)
    stacks.V1_DIST(tree)
    software.wheel(tree, "nvidia-nvshmem-cu12", "3.4.5")
    software.add_transport(tree, X86_64, f"{PYTHON}/nvidia/nvshmem/lib")
    software.add_transport(tree, X86_64, X86_64.lib)
    software.library(tree, X86_64, "libnvshmem_host.so.3", "6.5", needed=["libc.so.6", "libcudart.so.12"])
    tree.append("/var/lib/dpkg/status", software.package("libnvshmem3-cuda-12", "3.6.5-1"))
    tree.library(f"{PYTHON}/torch/lib/libtorch_nvshmem.so", soname="libtorch_nvshmem.so", machine=X86_64.machine,
                 needed=["libnvshmem_host.so.3", "libc.so.6"])
    tree.library(f"{PYTHON}/torch/lib/libtorch_cuda.so", soname="libtorch_cuda.so", machine=X86_64.machine, archs=[90, 100],
                 needed=["libc10_cuda.so", "libtorch_nvshmem.so", "libnccl.so.2", "libcudart.so.12", "libc.so.6"],
                 runpath="$ORIGIN/../../nvidia/nccl/lib:$ORIGIN/../../nvidia/cuda_runtime/lib:$ORIGIN")
    software.deepep_extension(tree, X86_64, f"{PYTHON}/deep_ep_cpp.{stacks.TAG}", archs=[90, 100],
                              nvshmem_lib=f"{PYTHON}/nvidia/nvshmem/lib")


def nccl_of_both(due):
    """The wheels of NCCL for CUDA 12 and 13; that for 13 has a library of `due` bytes, 0: as many as there are."""
    def step(tree):
        due_here = due or len(tree.entries[stacks.NCCL])
        for cuda, version, size in ((12, "2.29.3", 7), (13, "2.32.3", due_here)):
            dist(f"nvidia-nccl-cu{cuda}", version)(tree)
            tree.put(f"{PYTHON}/nvidia_nccl_cu{cuda}-{version}.dist-info/RECORD",
                     f"nvidia/nccl/lib/libnccl.so.2,sha256=made-up,{size}\n")
    return step


EFA_V2 = (CUDA_13, stacks.V2, stacks.V2_DIST, extension("deep_ep/_C.", 13))
JIT_NVSHMEM = f"{PYTHON}/flashinfer_jit_cache/jit_cache/nvshmem"

set_up(change, (
    ("dgx-b200/nixl-over-nixl", "stack-owners", "ai-dynamo/nixl#1705, vllm-project/vllm#39923, kaito-project/kaito#2050: "
     "nixl_ep of the wheel for CUDA 12 over that for 13.", CUDA_13, NIXL_EP, two_wheels(), nixl(12)),
    ("dgx-b200/nixl-over-nixl-12", "stack-owners", "kaito-project/kaito#2050: the other way round.", versions(),
     NIXL_EP, two_wheels("1.1.0"), nixl(13)),
    ("dgx-b200/nixl-right-one", "", "What is right: vllm-project/vllm#42542, by their order the right one was last.", CUDA_13,
     NIXL_EP, two_wheels(), nixl(13)),
    ("dgx-b200/nixl-both", "", "What is right: ai-dynamo/nixl#1705, since 1.3 each wheel has a folder of its own.", CUDA_13,
     files("nixl_ep/__init__.py", "nixl_ep_cu12/__init__.py", "nixl_ep_cu13/__init__.py"),
     dist("nixl-cu12", "1.5.1", "nixl_ep_cu12"), dist("nixl-cu13", "1.5.1", "nixl_ep_cu13"),
     dist("nixl", "1.5.1", "nixl", "nixl_ep"), nixl(12, "nixl_ep_cu12"), nixl(13, "nixl_ep_cu13")),
    ("dgx-b200/flashinfer-cubin", "stack-needs", "vllm-project/vllm#49804, flashinfer-ai/flashinfer#4781: an upgrade of "
     "flashinfer-python alone.", versions(nccl="2.27.5"), flashinfer("0.6.8.post1")),
    ("dgx-b200/flashinfer-jit-cache", "stack-needs", "lightseekorg/tokenspeed#284: the same of its cache.",
     versions(nccl="2.27.5"), flashinfer("0.7.4", "0.6.9+cu130")),
    ("dgx-b200/flashinfer-same", "", "What is right: flashinfer-ai/flashinfer#4337, the suffix of the CUDA version.",
     versions(nccl="2.27.5"), flashinfer("0.7.4", "0.7.4+cu129")),
    ("dgx-b200/nvshmem-of-system", "two-nvshmem", "NVIDIA-NeMo/Automodel#2614: device code of the wheel, host library "
     "of the distribution.", system_nvshmem),
    ("dgx-b200/nccl-of-both", "two-nccl", "pytorch/pytorch#186591, vllm-project/vllm#36099: NCCL for CUDA 12 over that for 13.",
     CUDA_13, nccl_of_both(218938240)),
    ("dgx-b200/nccl-of-both-right", "", "What is right: by their order the right one was last.", CUDA_13, nccl_of_both(0)),
    ("aws-p5/gin", "stack-needs", "awslabs/awsome-distributed-ai#1241: a container without /dev/gdrdrv.", *EFA_V2),
    ("aws-p5/gin-right", "", "What is right: awslabs/awsome-distributed-ai#1234, with GDRCopy.", *EFA_V2, variants.gdrcopy),
    ("conda/cuda-home", "home", "vllm-project/vllm#36077: CUDA_HOME=$CUDA_HOME:/usr/local/cuda, where it was not set.",
     env(CUDA_HOME=":/usr/local/cuda")),
    ("dgx-h200-deepep/nvshmem-dir-part", "home", "ishandhanani/srt-slurm#242: NVSHMEM_DIR found by name, without headers.",
     lambda tree: tree.library(f"{JIT_NVSHMEM}/lib/libnvshmem_host.so.3", soname="libnvshmem_host.so.3",
                               machine=X86_64.machine, needed=["libc.so.6"]),
     env(NVSHMEM_DIR=JIT_NVSHMEM)),
))


# --- the environment ---


def gid_moved(device):
    """The entry of index 3 is gone, and the address is at index 4."""
    def step(tree):
        port = nic_port(tree, device)
        for folder in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
            tree.put(f"{port}/{folder}/4", tree.text(f"{port}/{folder}/3"))
        tree.put(f"{port}/gids/3", "0000:0000:0000:0000:0000:0000:0000:0000\n")
        tree.remove(f"{port}/gid_attrs/types/3")
        tree.remove(f"{port}/gid_attrs/ndevs/3")
    return step


def interface_mtu(name, mtu):
    return lambda tree: tree.put(f"{tree.real(f'/sys/class/net/{name}')}/mtu", f"{mtu}\n")


PROFILE = env(UCX_TLS="tcp", UCX_NET_DEVICES="eno1np0", NCCL_SOCKET_IFNAME="eno1np0")
NIXL = (CUDA_13, files("nixl_ep_cu13/__init__.py"), dist("nixl-cu13", "1.5.1", "nixl_ep_cu13"), nixl(13, "nixl_ep_cu13"))
ONE_NODE = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}

set_up(change, (
    ("dgx-b200/ucx-tcp", "stack-needs", "ome-projects/ome#837: an injected profile for NCCL pins UCX to TCP.",
     *NIXL, PROFILE),
    ("dgx-b200/ucx-tcp-nccl", "", "What is right: the same report, NCCL does not read it.", two_nodes, PROFILE),
    ("dgx-b200/ucx-tcp-cuda", "stack-needs", "openucx/ucx#9908: what made it run once, with sockets.", *NIXL,
     env(UCX_TLS="tcp,cuda,cuda_copy,cuda_ipc")),
    ("dgx-b200/ucx-interface", "stack-needs", "The same by the device alone.", *NIXL, env(UCX_NET_DEVICES="eno1np0")),
    ("gb200/ucx-no-ipc", "stack-needs", "ai-dynamo/nixl#1110: the image of NIXL excludes cuda_ipc.", NIXL_EP,
     lambda tree: software.torch(tree, software.AARCH64), lambda tree: tree.library(
         f"{PYTHON}/nixl_ep/nixl_ep_cpp.cpython-312-aarch64-linux-gnu.so", needed=["libc.so.6"],
         machine=software.AARCH64.machine), env(UCX_TLS="^cuda_ipc")),
    ("dgx-b200/ucx-no-ipc", "", "What is right: NICs carry it between boards.", *NIXL, env(UCX_TLS="^cuda_ipc")),
    ("dgx-b200/ucx-local", "", "What is right: radixark/miles#2729, one node needs no verbs.", *NIXL, env(**ONE_NODE),
     env(UCX_TLS="sm,self,tcp,cuda_copy,cuda_ipc")),
    ("dgx-b200/ucx-rc", "", "What is right: verbs, and what goes with them.", *NIXL, two_nodes,
     env(UCX_TLS="rc,cuda_copy,cuda_ipc,sm,self", UCX_NET_DEVICES="mlx5_0:1,mlx5_1:1")),
    ("dgx-spark/half-port", "nccl-hca", "NVIDIA/dgx-spark-playbooks#102, tonyd2wild/DeepSeek-v4-Flash-Vision-Exp-DSpark-"
     "1M-NVFP4-KV-2x-DGX-Spark#35: one of the two functions of the port.",
     env(NCCL_IB_HCA="rocep1s0f0")),
    ("dgx-spark/both-halves", "", "What is right: the same with both.",
     env(NCCL_IB_HCA="rocep1s0f0,roceP2p1s0f0", NCCL_IB_MERGE_NICS="1", NCCL_SOCKET_IFNAME="enP7s7")),
    ("dgx-spark/gid-pinned", "gid", "tonyd2wild/DeepSeek-v4-Flash-Vision-Exp-DSpark-1M-NVFP4-KV-2x-DGX-Spark#38: the "
     "index moved on one of them.", gid_moved("roceP2p1s0f0"),
     env(NCCL_IB_HCA="rocep1s0f0,roceP2p1s0f0", NCCL_IB_GID_INDEX="3")),
    ("dgx-spark/mtu", "mtu", "The same report: an update of the firmware set one of them back to 1500.",
     interface_mtu("enp1s0f0np0", 9000), interface_mtu("enP2p1s0f0np0", 1500)),
    ("dgx-b200/fabric-handles", "imex", "MoonshotAI/MoonEP#28, microsoft/mscclpp#467: handles of the fabric, and no "
     "channel.", env(NVSHMEM_CUMEM_HANDLE_TYPE="FABRIC")),
    ("dgx-b200/vllm-defaults", "", "What is right: vllm-project/vllm#16992, what vLLM sets itself on such boards.",
     env(NCCL_CUMEM_ENABLE="0", NCCL_NVLS_ENABLE="0", VLLM_WORKER_MULTIPROC_METHOD="spawn")),
))


# --- containers ---

TORCH = versions(nccl="2.27.5")


def without_verbs(tree):
    """An image without rdma-core."""
    for path in list(tree.entries):
        if "/libibverbs" in path or "/libmlx5" in path or "/librdmacm" in path:
            del tree.entries[path]


def compat(version):
    def step(tree):
        tree.library(f"/usr/local/cuda-12.9/compat/libcuda.so.{version}", link="libcuda.so.1", soname="libcuda.so.1",
                     needed=["libc.so.6"], machine=X86_64.machine)
    return step


COMPAT = env(LD_LIBRARY_PATH="/usr/local/cuda/compat:/usr/local/cuda/lib64")


def memlock(tree):
    tree.replace("/proc/self/limits", "Max locked memory         unlimited            unlimited ",
                 "Max locked memory         65536                unlimited ")


def no_uverbs(tree):
    field.container(tree)
    tree.remove("/dev/infiniband")
    for path in [path for path in tree.stats if path.startswith("/dev/infiniband/")]:
        del tree.stats[path]


def docker_without_addresses(tree):
    """A container with the devices of the node, and a network of its own."""
    field.container(tree)
    for path in [path for path in tree.entries if "/gids/" in path and "/infiniband/" in path]:
        tree.put(path, "0000:0000:0000:0000:0000:0000:0000:0000\n")
    for path in [path for path in tree.entries if "/gid_attrs/" in path]:
        del tree.entries[path]


PLUGIN = "/opt/amazon/ofi-nccl/lib/libnccl-net.so"


def plugin_lacks_hwloc(tree):
    tree.library("/opt/amazon/ofi-nccl/lib/libnccl-net-ofi.so", link="libnccl-net.so", soname="libnccl-net.so",
                 needed=["libhwloc.so.15", "libc.so.6"])
    software.loads(tree, PLUGIN, "libhwloc.so.15: cannot open shared object file: No such file or directory")


set_up(change, (
    ("docker-host-network/no-verbs", "provider-missing", "NVIDIA/nvidia-container-toolkit#1877: an image of CUDA without "
     "libibverbs.", TORCH, without_verbs, env(NCCL_IB_DISABLE="0", NCCL_IB_HCA="mlx5")),
    ("docker-host-network/no-verbs-no-rdma", "", "What is right: the same where nothing asks for the NICs.", TORCH,
     without_verbs),
    ("workstation-4090/compat", "libcuda", "NVIDIA/nvidia-docker#1515: CUDA error 804, forward compatibility is for the "
     "boards of data centers.", compat("590.48.01"), COMPAT),
    ("docker-two-gpus/compat-older", "libcuda", "ai-dynamo/nixl#441: CUDA error 803.", compat("570.172.08"), COMPAT),
    ("docker-two-gpus/compat-unused", "", "What is right: every image of CUDA has them, and the path does not.",
     compat("590.48.01")),
    ("slurm-eight-tasks/memlock", "memlock", "ai4d-iasc/trixie#81, NVIDIA/nccl-tests#206: slurmd's limit, not limits.conf.",
     memlock),
    ("aws-p5/no-devices", "nic-access", "aws/aws-ofi-nccl#803, #1020: docker without the adapters: provider tcp.", no_uverbs),
    ("hgx-h100-deepep-roce/no-addresses", "gid", "radixark/miles#2729: the devices without their network.", docker_without_addresses),
    ("aws-p5/plugin-path", "net-plugin", "NVIDIA-NeMo/RL#1973: an image whose LD_LIBRARY_PATH leaves out the plugin.",
     TORCH, env(LD_LIBRARY_PATH="/usr/local/nvidia/lib:/usr/local/nvidia/lib64")),
    ("aws-p5/plugin-right", "", "What is right: NVIDIA-NeMo/RL#2585, the plugin is found.", TORCH),
    ("aws-p5/no-nccl", "", "What is right: the node itself, whose containers have all of it.",
     env(LD_LIBRARY_PATH=""), lambda tree: tree.remove("/opt/amazon/ofi-nccl")),
    ("aws-p5/plugin-hwloc", "net-plugin", "PrimeIntellect-ai/prime-rl#3452: the plugin lacks a library, and NCCL takes "
     "sockets.", TORCH, plugin_lacks_hwloc),
))


# --- the kernel and the hardware ---


def other_major(tree):
    """The files that the runtime made have a number of another machine."""
    tree.stats["/dev/nvidia-uvm"]["bytes"] = 510


def nova(tree):
    """The kernel's driver in Rust has the cards, and NVIDIA's found none."""
    for name in ("nvidia", "nvidia_uvm"):
        unload(tree, name)
    tree.remove("/proc/driver")
    tree.answers["nvml"] = {"error": "Driver Not Loaded"}
    for gpu in ("0000:01:00.0", "0000:02:00.0"):
        folder = variants.pci_folder(tree, gpu)
        tree.link(f"{folder}/driver", "../../../../bus/pci/drivers/NovaCore")
    tree.put("/sys/bus/pci/drivers/NovaCore/module", "")
    log(tree, "NVRM: GPU 0000:01:00.0 is already bound to NovaCore.", "NVRM: No NVIDIA devices probed.")


def unknown_symbol(tree):
    variants.by_name["h100/peermem"].change(tree)
    log(tree, "nv_peer_mem: Unknown symbol ib_register_peer_memory_client (err 0)",
        "nv_peer_mem: Unknown symbol ib_unregister_peer_memory_client (err 0)")


def starting(tree):
    update_gpus(tree, nvlinks=["down"] * 18, fabric="starting")


def closed_modules(tree):
    """The driver says so, and that it could not initialise a GPU."""
    tree.replace("/proc/driver/nvidia/version", "NVIDIA UNIX Open Kernel Module for x86_64", "NVIDIA UNIX x86_64 Kernel Module")
    for gpu in tree.answers["nvml"]["gpus"]:
        log(tree, "NVRM: installed in this system requires use of the NVIDIA open kernel modules.",
            f"NVRM: GPU {gpu['pci']}: RmInitAdapter failed! (0x22:0x56:884)")
    tree.answers["nvml"]["gpus"] = []


def four_numbers(tree):
    """The kernel of Azure Linux, the distribution's mlx5_core, and a DOCA that is not for Linux 6.14."""
    old, new = "6.8.0-87-generic", "6.6.117.1-1.azl3"
    for path, entry in list(tree.entries.items()):
        if isinstance(entry, bytes) and not path.endswith((".so", ".bin")):
            tree.put(path, entry.replace(old.encode(), new.encode()))
        if old in path:
            tree.entries[path.replace(old, new)] = tree.entries.pop(path)
    tree.replace("/var/lib/dpkg/status", "3.2.1-044000", "3.1.0-044000")
    tree.replace(f"/usr/lib/modules/{new}/modules.dep", "updates/dkms/mlx5_core.ko:\n", "")
    tree.remove(f"/usr/lib/modules/{new}/updates/dkms/mlx5_core.ko")
    tree.remove("/sys/module/mlx5_core/version")


def unprivileged(tree):
    field.container(tree)
    for path in [path for path in tree.stats if "/infiniband/" in path or "imex-channels" in path]:
        tree.stats[path]["access"] = "---"


def initializing(tree):
    for path in [path for path in tree.entries if "/infiniband/mlx5_ib" in path and path.endswith("/ports/1/state")]:
        tree.put(path, "2: INIT\n")
        tree.put(path.replace("/state", "/lid"), "0xffff\n")


set_up(change, (
    ("docker-two-gpus/uvm-number", "uvm", "NVIDIA/nvidia-container-toolkit#1934: a device file with the number of "
     "another kernel.", other_major),
    ("workstation-4090/nova", "driver-skew", "beclab/Olares#3963: nova_core of Linux 7.0 has the GPUs.", nova),
    ("h100/peermem-unknown-symbol", "peermem", "Mellanox/nv_peer_memory#84: built without the interface of OFED.",
     unknown_symbol),
    ("dgx-b200/no-umad", "nvlink", "NVIDIA/gpu-operator#2781, spectrocloud/CanvOS#700: the switches of a B200 are reached "
     "by ib_umad.", starting),
    ("aws-p5/no-fabric-manager", "nvlink", "aws-samples/aws-deep-learning-ami-ubuntu-dcv-desktop#33: it is not installed.",
     lambda tree: field.nvswitches(tree, 4), starting),
    ("rtx-6000-server/closed-modules", "open-driver", "metal-stack/metal-images#399: the GPUs are not broken.", closed_modules),
    ("cloud-vm-one-gpu/fabric", "nvlink", "huggingface/huggingface_hub#4134: one GPU whose fabric is never ready (CUDA 802).",
     starting),
    ("gb200/unprivileged", "nic-access imex", "sgl-project/sglang#12533: a container that may open neither.", unprivileged,
     env(NVSHMEM_CUMEM_HANDLE_TYPE="FABRIC")),
    ("docker-two-gpus/numbers-of-node", "visible-devices", "NVIDIA/pyxis#47: the numbers that the GPUs have on the node.",
     env(CUDA_VISIBLE_DEVICES="2,3")),
    ("gcp-a3-mega/one-too-high", "fastrak-interfaces", "NVIDIA/aicr#422: eth2 to eth9, and eth1 for the rest.",
     reports.gvnics(False), env(NCCL_FASTRAK_CTRL_DEV="eth1", NCCL_SOCKET_IFNAME="eth1",
                                NCCL_FASTRAK_IFNAME=",".join(f"eth{i}" for i in range(2, 10)))),
    ("dgx-h200-deepep/four-numbers", "", "What is right: a kernel whose release looks like an address.", four_numbers),
    ("azure-nd-h100-v5/initializing", "port-down", "Azure/azhpc-diagnostics#59: no subnet manager has configured the ports.",
     initializing),
    ("a4/gdrcopy-versions", "", "What is right: NVIDIA/gdrcopy#327, module and library need not be of one version.",
     variants.gdrcopy, put("/sys/module/gdrdrv/version", "2.4.3\n")),
    ("dgx-b200/mlx5-older", "", "What is right: vllm-project/vllm#42750, a libmlx5 without a symbol that NCCL only asks for.",
     lambda tree: software.library(tree, X86_64, "libmlx5.so.1", "25.56.0", needed=["libibverbs.so.1", "libc.so.6"],
                                   defines=[f"MLX5_1.{i}" for i in range(18)],
                                   needs={"libibverbs.so.1": ["IBVERBS_1.1", "IBVERBS_PRIVATE_57"]})),
    ("slurm-one-gpu-a-task/eight-tasks", "gpu-access", "NVIDIA/nccl#1066, #1647, open-mpi/ompi#11949, NVIDIA/pyxis#73: "
     "--gpus-per-task keeps the other ranks' GPUs out of reach.", lambda tree: field.slurm_task(tree, 3)),
))


# --- a trial: what was right was written down before the doctor was asked ---


def nvshmem_of_image(tree):
    """NVSHMEM built in the image, DeepEP with it, and a PyTorch that loads the one of its wheel."""
    versions(nccl="2.27.5")(tree)
    field.peer_mapping(tree)
    software.nvshmem(tree, X86_64, home="/opt/nvshmem", version="3.3.9")
    software.wheel(tree, "nvidia-nvshmem-cu12", "3.4.5")
    tree.library(f"{PYTHON}/nvidia/nvshmem/lib/libnvshmem_host.so.3", soname="libnvshmem_host.so.3", needed=["libc.so.6"],
                 machine=X86_64.machine)
    tree.library(f"{PYTHON}/torch/lib/libtorch_cuda.so", soname="libtorch_cuda.so", machine=X86_64.machine, archs=[90, 100],
                 needed=["libc10_cuda.so", "libnvshmem_host.so.3", "libnccl.so.2", "libcudart.so.12", "libc.so.6"],
                 runpath=":".join(f"$ORIGIN/../../nvidia/{name}/lib" for name in ("nccl", "nvshmem", "cuda_runtime")))
    stacks.V1(tree)
    stacks.V1_DIST(tree)
    software.deepep_extension(tree, X86_64, f"{PYTHON}/deep_ep_cpp.{stacks.TAG}", archs=[90, 100],
                              nvshmem_lib="/opt/nvshmem/lib")


def renamed(tree):
    """Names of RDMA devices by a rule of the site, and nothing tells NVSHMEM."""
    names = sorted({path.split("/")[4] for path in tree.entries if path.startswith("/sys/class/infiniband/")})
    for i, old in enumerate(names):
        for path, entry in list(tree.entries.items()):
            new = f"roce_rail{i + 1}"
            if hasattr(entry, "target"):
                entry.target = entry.target.replace(f"/infiniband/{old}", f"/infiniband/{new}")
            elif path.endswith(("/ibdev", "/node_desc")) and entry == f"{old}\n".encode():
                tree.put(path, f"{new}\n")
            if f"/infiniband/{old}" in path:
                tree.entries[path.replace(f"/infiniband/{old}", f"/infiniband/{new}")] = tree.entries.pop(path)
    for name in ("NVSHMEM_HCA_PREFIX", "DEEP_EP_DEVICE_TO_HCA_MAPPING"):
        tree.environment.pop(name)


def t4_pod(tree):
    """Four of the cards, and what a runtime mounts for a pod that does not say."""
    field.container(tree, kubernetes=True)
    del tree.answers["nvml"]["gpus"][4:]
    for i in range(4, 16):
        tree.stats[f"/dev/nvidia{i}"]["access"] = "---"
    shm_of("65536k")(tree)


def shm_of(size):
    return lambda tree: tree.put("/proc/self/mounts", "".join(
        line if " /dev/shm " not in line else f"shm /dev/shm tmpfs rw,nosuid,nodev,noexec,relatime,size={size} 0 0\n"
        for line in tree.text("/proc/self/mounts").splitlines(keepends=True)))


def rails_without_addresses(tree):
    """The agent of the cloud has not configured them; the two for the rest have theirs."""
    for device in (f"mlx5_{i}" for i in range(18) if i not in (2, 11)):
        for index in (2, 3):
            tree.put(f"{nic_port(tree, device)}/gids/{index}", "0000:0000:0000:0000:0000:0000:0000:0000\n")
            for folder in ("types", "ndevs"):
                tree.remove(f"{nic_port(tree, device)}/gid_attrs/{folder}/{index}")


def fabric_updated(tree):
    field.nvswitches(tree, 6)
    update_gpus(tree, nvlinks=["down"] * 12)
    tree.append("/var/lib/dpkg/status", software.package("nvidia-fabricmanager-580", "580.140.02-1ubuntu1"))


def libraries_updated(tree):
    for name in ("libcuda", "libnvidia-ml"):
        tree.remove(f"{X86_64.lib}/{name}.so.{software.DRIVER}")
        tree.remove(f"{X86_64.lib}/{name}.so.1")
        tree.library(f"{X86_64.lib}/{name}.so.580.140.02", link=f"{name}.so.1", soname=f"{name}.so.1", needed=["libc.so.6"],
                     machine=X86_64.machine)
    tree.replace("/var/lib/dpkg/status", f"{software.DRIVER}-1ubuntu1", "580.140.02-1ubuntu1")


def fell_off(tree):
    """The bus has eight, and the driver could start seven."""
    address = tree.answers["nvml"]["gpus"].pop()["pci"]
    tree.remove(f"{variants.pci_folder(tree, address)}/driver")
    tree.remove(f"/proc/driver/nvidia/gpus/{address}")
    del tree.entries["/dev/nvidia7"], tree.stats["/dev/nvidia7"]
    log(tree, f"NVRM: The NVIDIA GPU {address}", "NVRM: (PCI ID: 10de:26b9) installed in this system has",
        "NVRM: fallen off the bus and is not responding to commands.")


def losses(tree):
    for i in range(8):
        tree.put_all(f"{nic_port(tree, f'mlx5_{i}')}/hw_counters", {
            "packet_seq_err": "929974\n", "local_ack_timeout_err": "91316\n", "out_of_sequence": "6140236\n"})
        tree.put(f"{nic_port(tree, f'mlx5_{i}')}/counters/port_xmit_packets", "900000000\n")


def without_rdma(tree):
    for path in [path for path in tree.entries if "/infiniband" in path]:
        del tree.entries[path]
    for path in [path for path in tree.stats if "/infiniband" in path]:
        del tree.stats[path]
    unload(tree, "mlx5_ib")


def driver_not_compiled(tree):
    """DKMS has the driver, and no module of it for the kernel that runs."""
    variants.driver_not_loaded(tree)
    of_kernel("7.0.0-1011-gcp")(tree)
    for path in [path for path in tree.entries if "/lib/modules/" in path]:
        del tree.entries[path]
    tree.put("/usr/lib/modules/7.0.0-1011-gcp/modules.dep", "kernel/drivers/net/ethernet/google/gve.ko.zst:\n")
    tree.folder(f"/var/lib/dkms/nvidia/{software.DRIVER}/source")


def of_kernel(new):
    """The same with another kernel."""
    def step(tree):
        old = tree.text("/proc/sys/kernel/osrelease").strip()
        for path, entry in list(tree.entries.items()):
            if isinstance(entry, bytes) and not path.endswith((".so", ".bin")):
                tree.put(path, entry.replace(old.encode(), new.encode()))
            if old in path:
                tree.entries[path.replace(old, new)] = tree.entries.pop(path)
    return step


def foreign_interfaces(tree):
    field.container(tree, kubernetes=True)
    for path in [path for path in tree.entries for i in range(4, 8) if f"/net/ens{i}np0" in path]:
        tree.entries.pop(path, None)


def other_port(tree):
    """The cable of a Spark is in the second socket, and a recipe preloads an NCCL of its own."""
    for prefix in ("p1", "P2p1"):
        for function, (state, link) in enumerate((("1: DOWN", "down"), ("4: ACTIVE", "up"))):
            variants.set_state(tree, f"roce{prefix}s0f{function}", state, "5: LinkUp" if function else "3: Disabled")
            tree.put(f"{tree.real(f'/sys/class/net/en{prefix}s0f{function}np{function}')}/operstate", f"{link}\n")
    software.torch(tree, software.AARCH64)
    tree.library("/opt/nccl/libnccl.so.2", soname="libnccl.so.2", needed=["libc.so.6"], machine=software.AARCH64.machine)
    tree.environment.update(LD_PRELOAD="/opt/nccl/libnccl.so.2", NCCL_IB_HCA="rocep1s0f1,roceP2p1s0f1",
                            NCCL_SOCKET_IFNAME="enp1s0f1np1", GLOO_SOCKET_IFNAME="enp1s0f1np1")


def slinky(tree):
    """slurmd in a pod: a step with eight tasks on each of two nodes."""
    tree.remove("/.dockerenv")
    field.slurm_task(tree, 3, visible="0,1,2,3,4,5,6,7")
    tree.environment.update(KUBERNETES_SERVICE_HOST="192.0.2.1", LOCAL_RANK="3", LOCAL_WORLD_SIZE="8")


def resolute(tree):
    tree.put("/etc/os-release", 'PRETTY_NAME="Ubuntu 26.04 LTS"\nNAME="Ubuntu"\nVERSION_ID="26.04"\nID=ubuntu\n')


def memory_nodes(first, n):
    """NUMA nodes for the memory of GPUs, the most of them empty."""
    return lambda tree: [tree.numa_node(i, "", 96 * (i == first)) for i in range(first, first + n)]


set_up(change, (
    ("dgx-b200/nvshmem-of-image", "two-nvshmem", "sgl-project/sglang#12949: device library and host library do not match.",
     nvshmem_of_image),
    ("hgx-h100-roce-venv/renamed", "hca-prefix", "deepseek-ai/DeepEP#386: not enumerated as an mlx5 device.", renamed),
    ("dgx-b200/torch-pins-nccl", "stack-needs", "nebius/ml-cookbook#43: PyTorch 2.13 asks for NCCL 2.29.",
     versions("2.13.0+cu130", "2.29.7", "13.1"), stacks.V2, stacks.V2_DIST, extension("deep_ep/_C.", 13)),
    ("dgx-b200/nixl-ucx-of-image", "", "LMCache/LMCache#605: a UCX of the image; of NIXL the "
     "other users are served.", CUDA_13,
     files("nixl_ep_cu13/__init__.py"), dist("nixl-cu13", "1.5.1", "nixl_ep_cu13"), env(LD_LIBRARY_PATH="/opt/ucx/lib"),
     lambda tree: tree.library(f"{PYTHON}/nixl_ep_cu13/nixl_ep_cpp.{stacks.TAG}", machine=X86_64.machine, archs=[90, 100],
                               needed=["libucp.so.0", *stacks.NEEDED, "libcudart.so.13"]),
     lambda tree: tree.library("/opt/ucx/lib/libucp.so.0", soname="libucp.so.0", needed=["libc.so.6"], machine=X86_64.machine)),
    ("workstation-4090/unlinked", "gpu-arch import-symbols", "deepseek-ai/DeepEP#429: built without NVSHMEM, for other GPUs.",
     versions(nccl="2.27.5"), stacks.V1, stacks.V1_DIST,
     extension("deep_ep_cpp.", undefined=["__cudaRegisterLinkedBinary_ba346c27_12_intranode_cu_6b1dae6a"])),
    ("hgx-h100-broadcom/deepep-v2", "stack-needs", "deepseek-ai/DeepEP#759, #646: NICs of another maker.", reports.provider,
     CUDA_13, stacks.V2, stacks.V2_DIST, extension("deep_ep/_C.", 13)),
    ("hgx-h100-broadcom/deepep-v2-one-node", "", "What is right: GIN is off.", reports.provider, CUDA_13, stacks.V2,
     stacks.V2_DIST, extension("deep_ep/_C.", 13), env(EP_DISABLE_GIN="1", **ONE_NODE)),
    ("rtx-6000-server/deepep-v1", "stack-needs", "deepseek-ai/DeepEP#216: no NVLink.", versions(nccl="2.27.5"), stacks.V1,
     stacks.V1_DIST, lambda tree: tree.library(f"{PYTHON}/deep_ep_cpp.{stacks.TAG}", machine=X86_64.machine, archs=[90, 120],
                                               needed=[name for name in stacks.NEEDED if "nccl" not in name])),
    ("aws-p5/uccl", "", "uccl-project/uccl#1042: UCCL's deep_ep, which says itself what it lacks.", versions(nccl="2.27.5"),
     files("uccl/__init__.py", "deep_ep/buffer.py", "deep_ep/utils.py"), dist("uccl", "0.1.2", "uccl"),
     put(f"{PYTHON}/deep_ep/__init__.py", "from uccl.ep import Config\n"), dist("deep_ep", "0.1.0", "deep_ep"), two_nodes),
    ("hgx-h100-roce-venv/ib-timeout", "void-variables", "areal-project/AReaL#640: 16 us.", env(NCCL_IB_TIMEOUT="2")),
    ("dgx-b200/nvshmem-interface", "socket-interface", "ByteDance-Seed/Triton-distributed#97: the interface of another image.",
     env(NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME="eth0", NVSHMEM_BOOTSTRAP_UID_SOCK_FAMILY="AF_INET")),
    ("dgx-a100/p2p-level", "nccl-disabled", "NVIDIA/nccl-tests#228: LOC, on GPUs with NVSwitches.", env(NCCL_P2P_LEVEL="LOC")),
    ("hgx-a100-mesh/ucx-of-eight", "hca-lists", "coreweave/nccl-tests#20: the list for machines with eight.",
     env(UCX_NET_DEVICES=",".join(f"mlx5_{i}:1" for i in range(8)))),
    ("t4-sixteen/shm-of-pod", "shm", "pytorch/ci-infra#490: 64 MiB.", t4_pod),
    ("slurm-eight-tasks/nofile", "nofile", "goodfire-ai/spd#957: 32 ranks, and what a shell has.",
     lambda tree: limits(tree, 1024, 1048576), env(SLURM_JOB_NUM_NODES="4", SLURM_NTASKS="32", SLURM_STEP_NUM_TASKS="32")),
    ("docker-host-network/no-uvm", "uvm", "NVIDIA/nvidia-container-toolkit#50: the list of devices was made before the module "
     "was loaded.", lambda tree: (tree.remove("/dev/nvidia-uvm"), tree.stats.pop("/dev/nvidia-uvm"))),
    ("oci-bm-h100/no-addresses", "gid", "oracle-quickstart/oci-hpc#36: a plugin of the agent is off.", rails_without_addresses),
    ("aws-p4d/fabric-updated", "nvlink", "aws/aws-parallelcluster#3034: an update by night.", fabric_updated),
    ("dgx-b200/libraries-updated", "driver-skew", "pando85/homelab#4110: the same of the driver.", libraries_updated),
    ("l40s-nps4/fell-off", "driver-skew", "NVIDIA/NVSentinel#155, leptonai/gpud#1209: without an Xid.", fell_off),
    ("hgx-h100-deepep-roce/losses", "roce-loss", "NVIDIA/nccl#394: a hang, and counters as the report has them.", losses),
    ("h100/switch-redirects", "acs iommu", "NVIDIA/nccl#667: a hang of GPUs below one switch.",
     variants.by_name["h100/acs"].change, variants.by_name["h100/iommu"].change),
    ("azure-nd-a100-v4/no-rdma", "rdma-device", "oracle/oracle-linux#85: the modules of OFED came without it.", without_rdma),
    ("hgx-h100-roce-venv/linux-7", "driver-skew", "GoogleCloudPlatform/ops-agent#2426: the driver does not compile for the kernel "
     "of a new image.", driver_not_compiled),
    ("hgx-h100-deepep-roce/foreign-interfaces", "nic-access", "NVIDIA-NeMo/nemo-platform#922: RDMA devices in a pod without "
     "their interfaces.", foreign_interfaces),
    ("gh200/memory-nodes", "", "What is right: bytedance/xpu-perf#129, nine nodes, one with processors.", memory_nodes(1, 8)),
    ("quad-gh200-ndr200/memory-nodes", "", "What is right: NVIDIA/mlperf-common#16, 36 nodes.", memory_nodes(4, 32)),
    ("gb200/oke-pod", "", "What is right: NVIDIA/aicr#2345, dma-buf, as nvidia-peermem does not compile there.",
     lambda tree: field.container(tree, kubernetes=True), of_kernel("6.8.0-1040-nvidia-64k")),
    ("dgx-b200/resolute", "", "What is right: NVIDIA/gpu-driver-container#853, Ubuntu 26.04.", resolute,
     of_kernel("7.0.0-1013-nvidia")),
    ("gb300-nvl72/resolute", "", "What is right: the same of Grace.", resolute, of_kernel("7.0.0-1009-nvidia-64k")),
    ("kvm-passthrough/vmware", "", "What is right: NVIDIA/nccl-tests#256, the same of another hypervisor.",
     lambda tree: field.product(tree, "VMware20,1", "VMware, Inc.")),
    ("dgx-h200-deepep/other-provider", "", "What is right: NVIDIA/nccl#1044, libibverbs warns of hardware that is not here.",
     put("/etc/libibverbs.d/ipath.driver", "driver ipathverbs\n")),
    ("dgx-spark/other-port", "", "What is right: MiaAI-Lab/Qwen3.8-Flash-Next-Dual-DGX-Sparks#3.", other_port),
    ("hgx-h200-rocky-e810/rocky-10", "", "What is right: Rocky Linux 10, and AMD's processors.",
     put("/etc/os-release", 'NAME="Rocky Linux"\nVERSION_ID="10.0"\nID="rocky"\nID_LIKE="rhel centos fedora"\n'),
     of_kernel("6.12.0-55.40.1.el10_0.x86_64"),
     lambda tree: tree.replace("/proc/cpuinfo", "GenuineIntel", "AuthenticAMD")),
    ("docker-host-network/slinky", "", "What is right: Slurm in pods, with the variables of both.", slinky),
))
