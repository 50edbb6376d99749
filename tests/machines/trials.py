# SPDX-License-Identifier: Apache-2.0
"""A further trial with public bug reports, as in public.py: what was right was written down before the doctor was asked."""
import field
import reports
import software
import stacks
import variants
from reports import env, put, two_nodes
from rules import log
from software import PYTHON, X86_64
from stacks import CUDA_13, V1, V1_DIST, V2, V2_DIST, dist, extension, files, versions
from variants import nic_port, set_up

changes = []
change = variants.changes_into(changes)

EFA_LIB, OFI = "/opt/amazon/efa/lib", "/opt/amazon/ofi-nccl/lib"


# --- libfabric and network plugins ---


def ofi_plugin(api, *folders, plugin=f"{OFI}/libnccl-net-ofi.so"):
    """A plugin that needs FABRIC_1.`api`, and a libfabric in each folder: {folder: the latest that it defines}."""
    def step(tree):
        tree.library(plugin, soname="libnccl-net.so", needed=["libfabric.so.1", "libc.so.6"], machine=X86_64.machine,
                     needs={"libfabric.so.1": ["FABRIC_1.0", f"FABRIC_1.{api}"]})
        for folder, latest in folders:
            software.library(tree, X86_64, "libfabric.so.1", f"{latest + 20}.0", folder=folder,
                             defines=[f"FABRIC_1.{i}" for i in range(latest + 1)])
        tree.answers.pop(f"load:{OFI}/libnccl-net.so", None)
    return step


TORCH = versions(nccl="2.27.5")


def plugin_needs(name):
    def step(tree):
        tree.library(f"{OFI}/libnccl-net-ofi.so", soname="libnccl-net.so", needed=[name, "libc.so.6"], machine=X86_64.machine)
        tree.answers.pop(f"load:{OFI}/libnccl-net.so", None)
    return step


def libraries(*folders):
    return env(LD_LIBRARY_PATH=":".join(folders))


def gib_needs_glibc(tree):
    tree.library("/usr/local/gib/lib64/libnccl-net.so", soname="libnccl-net.so", machine=X86_64.machine,
                 needed=["libibverbs.so.1", "libc.so.6"], needs={"libc.so.6": ["GLIBC_2.39"]})
    tree.answers.pop("load:/usr/local/gib/lib64/libnccl-net.so", None)


set_up(change, (
    ("aws-p5/fabric-version", "net-plugin", "awslabs/awsome-distributed-ai#292: conda's plugin, and EFA's older libfabric.",
     TORCH, ofi_plugin(7, (EFA_LIB, 6))),
    ("aws-p5/fabric-of-debian", "net-plugin", "aws/aws-ofi-nccl#241: libfabric-bin brought Debian's library, found first.",
     TORCH, ofi_plugin(6, (EFA_LIB, 6), (X86_64.lib, 5)), libraries(OFI, X86_64.lib, EFA_LIB)),
    ("aws-p5/fabric-vanilla", "net-plugin", "aws/aws-ofi-nccl#1055: an own libfabric before that of the installer.",
     TORCH, ofi_plugin(7, (EFA_LIB, 8), ("/usr/local/lib", 7)), libraries(OFI, "/usr/local/lib", EFA_LIB)),
    ("aws-p5/fabric-right", "", "What is right: the same, behind that of the installer.",
     TORCH, ofi_plugin(7, (EFA_LIB, 8), ("/usr/local/lib", 7)), libraries(OFI, EFA_LIB, "/usr/local/lib")),
    ("dgx-b200/plugin-of-efa", "", "What is right: NVIDIA's images brought the plugin of EFA for all machines.",
     TORCH, ofi_plugin(7, (EFA_LIB, 8)), lambda tree: tree.link(f"{OFI}/libnccl-net.so", "libnccl-net-ofi.so"),
     libraries(OFI, EFA_LIB)),
    ("aws-p5/plugin-spcx", "net-plugin", "NVIDIA-NeMo/Megatron-Bridge#5033: an image that names the plugin for another network.",
     TORCH, env(NCCL_NET_PLUGIN="spcx")),
    ("aws-p5/plugin-cudart", "net-plugin", "eth-cscs/cscs-docs#414: it needs libcudart.so, which an image has under its number.",
     TORCH, plugin_needs("libcudart.so")),
    ("a3u/plugin-glibc", "net-plugin", "AI-Hypercomputer/gpu-recipes#5: GLIBC of an older image.", gib_needs_glibc),
))


# --- stacks ---


def system_nccl(version):
    """NCCL of the distribution, and none of a wheel."""
    def step(tree):
        for path in [path for path in tree.entries if "nvidia/nccl" in path or "nvidia_nccl" in path]:
            del tree.entries[path]
        software.library(tree, X86_64, "libnccl.so.2", version.removeprefix("2."),
                         exports=["ncclGetVersion", "ncclCommInitRank", "ncclGetLsaDevicePointer"])
        tree.put("/usr/include/nccl.h", "// made up\n")
    return step


def nvshmem_wheel(cuda, version):
    """NVSHMEM as PyTorch brings it; the extension of DeepEP was built with it."""
    def step(tree):
        for path in [path for path in tree.entries if "nvidia_nvshmem" in path]:
            del tree.entries[path]
        software.wheel(tree, f"nvidia-nvshmem-cu{cuda}", version)
        tree.library(f"{PYTHON}/nvidia/nvshmem/lib/libnvshmem_host.so.3", soname="libnvshmem_host.so.3",
                     needed=["libc.so.6"], machine=X86_64.machine)
        software.add_transport(tree, X86_64, f"{PYTHON}/nvidia/nvshmem/lib")
    return step


def with_nvshmem(path, cuda):
    return lambda tree: tree.library(
        f"{PYTHON}/{path}{stacks.TAG}", machine=X86_64.machine, archs=[90, 100], runpath=f"{PYTHON}/nvidia/nvshmem/lib",
        needed=["libnvshmem_host.so.3", *stacks.NEEDED, f"libcudart.so.{cuda}"])


def flashinfer(version, nvshmem):
    return (versions(nccl="2.27.5"), files("flashinfer/__init__.py", "flashinfer/moe_ep/__init__.py"),
            dist("flashinfer-python", version, "flashinfer"), nvshmem_wheel(12, nvshmem))


def older_mlx5(tree):
    software.library(tree, X86_64, "libmlx5.so.1", "24.10.0", needed=["libibverbs.so.1", "libc.so.6"],
                     defines=[f"MLX5_1.{i}" for i in range(18)],
                     needs={"libibverbs.so.1": ["IBVERBS_1.1", "IBVERBS_PRIVATE_57"]})


set_up(change, (
    ("dgx-b200/nccl-of-system", "stack-needs", "coreweave/ml-containers#232: sgl-deep-ep, and the NCCL of an image by apt.",
     CUDA_13, *stacks.SGL, extension("deep_ep/_C.", 13), system_nccl("2.30.4")),
    ("dgx-b200/only-hopper", "gpu-arch", "deepseek-ai/DeepEP#224: named symbol not found on B200.", versions(nccl="2.27.5"), V1,
     V1_DIST, lambda tree: tree.library(f"{PYTHON}/deep_ep_cpp.{stacks.TAG}", machine=X86_64.machine, archs=[90],
                                        needed=[name for name in stacks.NEEDED if "nccl" not in name])),
    ("h100-nvl-pairs/part", "import-symbols", "deepseek-ai/DeepEP#481: built without its part between nodes.",
     versions(nccl="2.27.5"), V1, V1_DIST,
     extension("deep_ep_cpp.", undefined=["_ZN7deep_ep9internode17get_source_meta_bytesEv"])),
    ("dgx-b200/legacy-nvshmem", "stack-needs", "deepseek-ai/DeepEP#764, #707, #696: the legacy classes of DeepEP 2 "
     "do not know the queue pairs of NVSHMEM 3.5.", two_nodes, CUDA_13, V2, V2_DIST, nvshmem_wheel(13, "3.7.2"), with_nvshmem("deep_ep/_C.", 13)),
    ("dgx-b200/legacy-older", "", "What is right: that of PyTorch 2.14.", two_nodes, CUDA_13, V2, V2_DIST, nvshmem_wheel(13, "3.4.5"),
     with_nvshmem("deep_ep/_C.", 13)),
    ("dgx-b200/flashinfer-nvshmem", "", "What is right: FlashInfer without NVSHMEM 3.6 (flashinfer-ai/flashinfer#2943).",
     *flashinfer("0.6.7", "3.4.5")),
    ("dgx-b200/flashinfer-nvshmem-new", "", "flashinfer-ai/flashinfer#2943, eugr/spark-vllm-docker#152: a part.",
     *flashinfer("0.6.7", "3.6.5")),
    ("dgx-b200/flashinfer-later", "", "What is right: flashinfer-ai/flashinfer#2960, since 0.6.8.", *flashinfer("0.6.8", "3.7.2")),
    ("dgx-b200/hybrid-nvshmem", "stack-needs", "deepseek-ai/DeepEP#691: HybridEP with a newer NVSHMEM.", two_nodes, CUDA_13,
     V1, files("deep_ep/hybrid_ep_buffer.py"), dist("deep_ep", "1.2.1+3f601f7", "deep_ep"), nvshmem_wheel(13, "3.7.2"),
     with_nvshmem("deep_ep_cpp.", 13), extension("hybrid_ep_cpp.", 13, undefined=())),
    ("dgx-b200/handler-cpu-v2", "nic-handler", "deepseek-ai/DeepEP#677: with the CPU as handler the legacy classes hang.",
     CUDA_13, V2, V2_DIST, nvshmem_wheel(13, "3.4.5"), with_nvshmem("deep_ep/_C.", 13), variants.gdrcopy,
     env(NVSHMEM_IBGDA_NIC_HANDLER="cpu")),
))


# --- the environment ---


def holes(first):
    """A pod's GIDs begin at index `first`: the entries before are of other pods."""
    def step(tree):
        for device in sorted({path.split("/infiniband/")[1].split("/")[0] for path in tree.entries if "/ports/1/gids/" in path}):
            port = nic_port(tree, device)
            for i in reversed(range(4)):
                if not tree.has(f"{port}/gid_attrs/types/{i}"):
                    continue
                for folder in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
                    tree.put(f"{port}/{folder}/{i + first}", tree.text(f"{port}/{folder}/{i}"))
                tree.put(f"{port}/gids/{i}", "0000:0000:0000:0000:0000:0000:0000:0000\n")
                tree.remove(f"{port}/gid_attrs/types/{i}")
                tree.remove(f"{port}/gid_attrs/ndevs/{i}")
    return step


def only_ipv6(tree):
    """fe80:: and an address of a site, no IPv4."""
    for path in [path for path in tree.entries if "/gids/" in path and tree.text(path).startswith("0000:0000:0000:0000:0000:ffff")]:
        tree.put(path, f"fd93:16d3:59b6:0000:0000:0000:0000:{path[-1]}{path[-1]}{path[-1]}{path[-1]}\n")


def no_ipv6(tree):
    """An interface with IPv4 alone: if_inet6 has the loopback."""
    tree.put("/proc/net/if_inet6", "00000000000000000000000000000001 01 80 10 80       lo\n")


def vm_nic(tree):
    """A NIC for the virtual machine's own network, nearer than the rails, and without GIDs."""
    place = {"numa": 0, "cpus": "0-55,112-167"}
    port = tree.bridge("0000:f0:01.0", "/sys/devices/pci0000:f0", **place)
    tree.nic("mlx5_11", "0000:f1:00.0", port, netdev="ens11np0", rate="100 Gb/sec (4X EDR)", device=0x101E, hca="MT4126",
             **place)
    for i in range(4):
        tree.put(f"{nic_port(tree, 'mlx5_11')}/gids/{i}", "0000:0000:0000:0000:0000:0000:0000:0000\n")
        for folder in ("types", "ndevs"):
            tree.remove(f"{nic_port(tree, 'mlx5_11')}/gid_attrs/{folder}/{i}")


NIXL = (CUDA_13, files("nixl_ep_cu13/__init__.py"), dist("nixl-cu13", "1.5.1", "nixl_ep_cu13"),
        extension("nixl_ep_cu13/nixl_ep_cpp.", 13, undefined=()))


def topology_without_gpus(tree):
    gpus = reports.present(tree)
    tree.put("/etc/site/topo.xml", '<system version="1"><cpu numaid="0" affinity="ffff" arch="x86_64"><pci busid="ffff:ff:01.0" '
             'class="0x060400" link_width="16">' + "".join(f'<pci busid="{gpu}" class="0x030200" link_width="16"/>' for gpu in gpus)
             + "</pci></cpu></system>\n")


def iptables(*rules):
    """As images of Oracle's cloud bring them."""
    def step(tree):
        tree.put("/etc/systemd/system/multi-user.target.wants/netfilter-persistent.service", "")
        tree.put("/etc/iptables/rules.v4", "*filter\n:INPUT ACCEPT [0:0]\n:FORWARD ACCEPT [0:0]\n-A INPUT -m state --state "
                 "RELATED,ESTABLISHED -j ACCEPT\n-A INPUT -p icmp -j ACCEPT\n-A INPUT -i lo -j ACCEPT\n-A INPUT -p tcp -m state "
                 "--state NEW -m tcp --dport 22 -j ACCEPT\n" + "".join(f"{rule}\n" for rule in rules)
                 + "-A INPUT -j REJECT --reject-with icmp-host-prohibited\nCOMMIT\n")
    return step


set_up(change, (
    ("torchrun-two-nodes/iptables", "firewall", "k3s-io/k3s#977, filippolmt/terraform-oci-free-tier#166: No route to host.",
     iptables()),
    ("torchrun-two-nodes/iptables-open", "", "What is right: the network of the nodes is accepted.",
     iptables("-A INPUT -s 192.0.2.0/24 -j ACCEPT")),
    ("hgx-h100-deepep-roce/gid-holes", "gid", "NVIDIA/nccl#1573, #1587, uccl-project/uccl#301: NCCL 2.21 stops at an empty entry.",
     versions(nccl="2.21.5"), holes(4)),
    ("gke-pod-networks/gid-holes", "gid", "NVIDIA/nccl#1587: the same of another pod.", versions(nccl="2.22.3"), holes(6)),
    ("hgx-h100-deepep-roce/gid-holes-later", "", "What is right: NVIDIA/nccl#1573, a later NCCL.", versions(nccl="2.28.9"), holes(4)),
    ("hgx-h100-deepep-roce/gid-holes-named", "", "What is right: the index is named.", versions(nccl="2.21.5"), holes(4),
     env(NCCL_IB_GID_INDEX="7")),
    ("hgx-h100-broadcom/ipv6-fabric", "gid", "uccl-project/uccl#803: all GIDs are IPv6.", reports.provider, TORCH, only_ipv6),
    ("dgx-b200/nvshmem-family", "socket-interface", "ByteDance-Seed/Triton-distributed#122, #206: AF_INET6 forced where there is IPv4 "
     "alone.", no_ipv6, env(NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME="eno1np0", NVSHMEM_BOOTSTRAP_UID_SOCK_FAMILY="AF_INET6")),
    ("dgx-b200/nccl-family", "socket-interface", "NVIDIA/nccl#210: the same of NCCL.", no_ipv6, env(NCCL_SOCKET_FAMILY="AF_INET6")),
    ("cloud-vm-one-gpu/graph", "topology-file", "NVIDIA/nccl#1240: a graph of two GPUs, of an image.", reports.graph(0, 1),
     env(NCCL_GRAPH_FILE="/opt/site/graph.xml")),
    ("hgx-h100-deepep-roce/vm-nic", "", "smg-project/smg#2520: a NIC of the virtual machine's network, without GIDs.", vm_nic),
    ("hgx-h100-deepep-roce/vm-nic-nixl", "stack-needs", "smg-project/smg#2520: the same where UCX takes it.", vm_nic, *NIXL),
    ("kvm-passthrough/topology-bare", "", "What is right: NVIDIA/nccl-tests#86, NVIDIA/nccl#1843: processors and switches alone, "
     "with addresses that are not there.", topology_without_gpus, env(NCCL_TOPO_FILE="/etc/site/topo.xml")),
))


# --- containers ---


def no_devices(tree):
    if "/dev/root / ext4" in tree.text("/proc/self/mounts"):
        field.container(tree)
    tree.remove("/dev/infiniband")
    for path in [path for path in tree.stats if path.startswith("/dev/infiniband/")]:
        del tree.stats[path]


def one_device(tree):
    for i in range(8):
        if i != 1:
            tree.entries.pop(f"/dev/infiniband/uverbs{i}")
            del tree.stats[f"/dev/infiniband/uverbs{i}"]


def foreign_gids(tree):
    """macvlan: the RDMA devices of the node, and no GID of this namespace."""
    for path in [path for path in tree.entries if "/gids/" in path and "/infiniband/" in path]:
        tree.put(path, "0000:0000:0000:0000:0000:0000:0000:0000\n")
    for path in [path for path in tree.entries if "/gid_attrs/" in path]:
        del tree.entries[path]
    field.container(tree, kubernetes=True)


def compat(version, driver):
    def step(tree):
        for name in ("libcuda", "libnvidia-ml"):
            tree.remove(f"{X86_64.lib}/{name}.so.{software.DRIVER}")
            tree.remove(f"{X86_64.lib}/{name}.so.1")
            tree.library(f"{X86_64.lib}/{name}.so.{driver}", link=f"{name}.so.1", soname=f"{name}.so.1",
                         needed=["libc.so.6"], machine=X86_64.machine)
        for path in ("/proc/driver/nvidia/version", "/var/lib/dpkg/status", "/sys/module/nvidia/version"):
            tree.put(path, tree.text(path).replace(software.DRIVER, driver))
        for path in [path for path in tree.entries if path.endswith("/information") or "/updates/dkms/nvidia" in path]:
            tree.put(path, tree.entries[path].replace(software.DRIVER.encode(), driver.encode()))
        tree.answers["nvml"]["driver"] = driver
        tree.library(f"/usr/local/cuda-12.9/compat/libcuda.so.{version}", link="libcuda.so.1", soname="libcuda.so.1",
                     needed=["libc.so.6"], machine=X86_64.machine)
    return step


set_up(change, (
    ("docker-host-network/no-infiniband", "nic-access", "vllm-project/vllm#42075, NVIDIA/nccl#941, #952: --network host and no device.",
     TORCH, no_devices, env(NCCL_IB_DISABLE="0", NCCL_IB_HCA="mlx5")),
    ("docker-host-network/one-uverbs", "nic-access", "NVIDIA/caffe#590: one of the devices was given.", TORCH, one_device),
    ("hgx-h100-deepep-roce/calico", "gid", "projectcalico/calico#8482, Mellanox/k8s-rdma-sriov-dev-plugin#33: no GIDs in a pod.",
     foreign_gids),
    ("dgx-spark/no-infiniband", "nic-access", "getainode/ainode#87: an engine in a container, Devices: [].", no_devices,
     env(NCCL_IB_HCA="rocep1s0f0,roceP2p1s0f0")),
    ("docker-two-gpus/compat-used", "", "What is right: NVIDIA-NeMo/labs-molt#44, forward compatibility on a board of a data center.",
     compat("590.48.01", "570.172.08"), env(LD_LIBRARY_PATH="/usr/local/cuda/compat:/usr/local/cuda/lib64")),
))


# --- the kernel and the hardware ---


def dummy(tree):
    """gdrdrv that was compiled without the driver's sources, with a module that stands in for it."""
    variants.handler_on_the_cpu(tree)
    software.load_module(tree, "nv_p2p_dummy", "")
    log(tree, "gdrdrv:gdrdrv_init:loading gdrdrv version 2.5 built for proprietary NVIDIA driver",
        "gdrdrv:gdrdrv_init:device registered with major number 505")


def p2pdma(value):
    """No nvidia_peermem: dma-buf is the only way, which the kernel has to allow."""
    def step(tree):
        variants.unload(tree, "nvidia_peermem")
        tree.remove("/sys/kernel/mm/memory_peers")
        release = tree.text("/proc/sys/kernel/osrelease").strip()
        tree.put(f"/boot/config-{release}", f"CONFIG_PCI=y\n{value}\nCONFIG_DMABUF_MOVE_NOTIFY=y\n")
    return step


def firmware_gone(tree):
    address = reports.present(tree)[2]
    reports.no_answer(tree, address)
    log(tree, f"nvidia {address}: Direct firmware load for nvidia/{software.DRIVER}/gsp_ga10x.bin failed with error -2",
        f"NVRM: GPU {address}: RmInitAdapter failed! (0x61:0x56:1784)")


def wpr2(tree):
    address = reports.present(tree)[2]
    reports.no_answer(tree, address)
    log(tree, "NVRM: _kgspBootGspRm: unexpected WPR2 already up, cannot proceed with booting GSP",
        "NVRM: _kgspBootGspRm: (the GPU is likely in a bad state and may need to be reset)",
        "NVRM: RmInitAdapter: Cannot initialize GSP firmware RM", f"NVRM: GPU {address}: RmInitAdapter failed! (0x62:0x40:2168)")


def patched(tree):
    """A patched build of the modules, a patch version newer than the libraries."""
    for path in ("/proc/driver/nvidia/version", "/sys/module/nvidia/version"):
        tree.put(path, tree.text(path).replace(software.DRIVER, "580.126.16"))
    tree.answers["nvml"] = {"error": "Driver/library version mismatch"}


def redirects(value):
    """The root ports above the cards."""
    def step(tree):
        for gpu in reports.present(tree):
            folder = variants.pci_folder(tree, gpu).rsplit("/", 1)[0]
            tree.put(f"{folder}/config", variants.pci_config(0x1022, 0x1483, variants.PCI_BRIDGE, 4, acs=value))
    return step


def translated(tree):
    tree.put("/proc/cmdline", "BOOT_IMAGE=/vmlinuz root=/dev/nvme0n1p2 ro amd_iommu=on\n")
    reports.translates(tree)


def nic_health(tree):
    log(tree, *["mlx5_core 0000:18:00.0: mlx5_health_check_fatal_sensors:405:(pid 0): Fatal error 3 detected",
                "mlx5_core 0000:18:00.0: poll_health:835:(pid 0): device's health compromised - reached miss count",
                "mlx5_core 0000:18:00.0: print_health_info:491:(pid 0): Health issue observed, High temperature"])


set_up(change, (
    ("a4/gdrdrv-dummy", "gdrcopy", "NVIDIA/gdrcopy#334: depends: nv-p2p-dummy.", dummy),
    ("a4/gdrdrv-no-file", "gdrcopy", "NVIDIA/gdrcopy#234: modprobe makes no device file.", variants.handler_on_the_cpu,
     lambda tree: (tree.remove("/dev/gdrdrv"), tree.stats.pop("/dev/gdrdrv"))),
    ("h100/no-p2pdma", "peermem", "siderolabs/pkgs#1356: a kernel without PCI_P2PDMA.", p2pdma("# CONFIG_PCI_P2PDMA is not set")),
    ("h100/p2pdma", "", "What is right: a kernel with it.", p2pdma("CONFIG_PCI_P2PDMA=y")),
    ("dgx-h100-superpod/firmware", "gpu-errors", "NVIDIA/open-gpu-kernel-modules#639, #943: the firmware is not there.", firmware_gone),
    ("dgx-h100-superpod/wpr2", "gpu-errors", "NVIDIA/open-gpu-kernel-modules#1104, #876: WPR2 already up.", wpr2),
    ("workstation-4090/patched", "driver-skew", "tinygrad/open-gpu-kernel-modules#47: libraries of another patch version.", patched),
    ("rtx-6000-server/root-acs", "acs", "NVIDIA/nccl#2079: root ports of an EPYC redirect.", redirects(0x1D)),
    ("rtx-6000-server/root-acs-source", "", "What is right: NVIDIA/nccl#606, source validation alone.", redirects(0x01)),
    ("workstation-4090/amd-iommu", "iommu", "vllm-project/vllm#33041, local-inference-lab/vllm#262: a hang of two cards.", translated),
    ("hgx-h100-deepep-roce/nic-health", "link-errors", "NVIDIA/nccl#230: the firmware of a NIC has failed.", nic_health),
))
