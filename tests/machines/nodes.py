# SPDX-License-Identifier: Apache-2.0
"""Nodes of further sites and clouds, healthy and sick, each with the NICs that its GPUs are to use.

As sites.py: each is one function, whose first sentence says what it is and what is unusual about it. What is expected
was written down before epkit was asked.
"""
import field
import golden
import software
import tree as trees
import variants
from field import (AARCH64, BROADCOM, CPUS_H100, CX6, DOWNSTREAM, INTEL, NVIDIA, UNKNOWN_LINK, UPSTREAM, X86_64, Tree,
                   aws, azure, bare, container, deepep, ethernet, hgx, management, mapping, memory, nvswitches,
                   peer_mapping, product, slurm_task, system)
from kinds import (closed, deny, forget_interfaces, remove_nic, set_make, take_uverbs, without_driver,
                   without_rdma)
from rules import without_peermem
from sites import as_rpm, dnf_log, forget_device, four_superchips, netvsc
from variants import nic_folder, nic_port, set_state

trees.GPU_MODELS.update({
    "V100": ("Tesla V100-SXM2-32GB", 0x1DB5, 0x030200, (7, 0), 6, "88.00.00.00.01"),
})

ROCKY = ('NAME="Rocky Linux"\nVERSION_ID="9.5"\nID="rocky"\nID_LIKE="rhel centos fedora"\n')
RHCOS = ('NAME="Red Hat Enterprise Linux CoreOS"\nVERSION_ID="4.18"\nID="rhcos"\nID_LIKE="rhel fedora"\n'
         'VARIANT_ID="coreos"\n')
AL2023 = 'NAME="Amazon Linux"\nVERSION_ID="2023"\nID="amzn"\nID_LIKE="fedora"\n'

machines = {}
changes = []
maps = {}  # name -> NICs of each GPU, in the order of NVML
machine, change = variants.machines_into(machines, maps), variants.changes_into(changes, maps)


def each(pattern, numbers=range(8)):
    return [[pattern.format(i)] for i in numbers]


def pair(tree, host_bus, numa, devices):
    """A PCIe switch below a root port; `devices`: functions that are given (address, parent, place) for each port."""
    place = {"numa": numa, "cpus": CPUS_H100[numa]}
    port = tree.bridge(f"0000:{host_bus:02x}:01.0", f"/sys/devices/pci0000:{host_bus:02x}", **place)
    up = tree.bridge(f"0000:{host_bus + 1:02x}:00.0", port, vendor=BROADCOM, device=0xC030, port_type=UPSTREAM, **place)
    for slot, make in enumerate(devices):
        down = tree.bridge(f"0000:{host_bus + 2:02x}:{slot:02x}.0", up, vendor=BROADCOM, device=0xC030,
                           port_type=DOWNSTREAM, **place)
        make(f"0000:{host_bus + 3 + slot:02x}:00.0", down, place)


# --- makers ---


@machine("hgx-h200-rocky-e810", each("mlx5_{}"))
def rocky_e810():
    """HGX H200 with Rocky Linux: RoCE rails, and two Intel E810 for the rest, which are RDMA devices too (irdma)."""
    tree = hgx("H200", layer="Ethernet")
    for i in range(2):
        place = {"numa": 0, "cpus": CPUS_H100[0]}
        if i == 0:
            port = tree.bridge("0000:28:01.0", "/sys/devices/pci0000:28", **place)
        tree.nic(f"irdma{i}", f"0000:29:00.{i}", port, netdev=f"ens1f{i}", rate="100 Gb/sec (4X EDR)", device=0x1592,
                 hca="", firmware="1.71", link=("16.0 GT/s PCIe", 16), **place)
        set_make(tree, f"irdma{i}", INTEL, 0x1592, "")
        pci = nic_folder(tree, f"irdma{i}").split("/infiniband/")[0]
        tree.link(f"{pci}/driver", field.relative(pci, "/sys/bus/pci/drivers/ice"))
    field.bond(tree, "ens1f0", "ens1f1")
    nvswitches(tree, 4)
    bare(tree, "5.14.0-503.40.1.el9_5.x86_64", doca=False)
    as_rpm(tree, ROCKY)
    return tree


@machine("hgx-b200-four-switches", [[f"mlx5_{4 * (i // 2) + i % 2}", f"mlx5_{4 * (i // 2) + i % 2 + 2}"] for i in range(8)])
def b200_sixteen():
    """HGX B200 with 16 ConnectX-7 of 400 Gb/s: two GPUs and four NICs below each of four switches."""
    tree = Tree()
    count = {"gpu": 0, "nic": 0}

    def gpu(address, down, place):
        tree.gpu(address, down, count["gpu"], "B200", driver_version=software.DRIVER, fabric="ready", **place)
        count["gpu"] += 1

    def nic(address, down, place):
        tree.nic(f"mlx5_{count['nic']}", address, down, netdev=f"ibp{int(address[5:7], 16)}s0",
                 link_layer="InfiniBand", **place)
        count["nic"] += 1

    for i, bus in enumerate((0x10, 0x40, 0x80, 0xB0)):
        pair(tree, bus, i // 2, (gpu, nic, nic, gpu, nic, nic))
    ethernet(tree)
    return bare(tree)


@machine("xe9680-mixed-fabric", [[f"mlx5_{2 * (i // 2)}"] for i in range(8)])
def mixed_fabric():
    """One InfiniBand NIC for two GPUs, and on the same switch one for storage over Ethernet, half as fast, bonded."""
    tree = Tree()
    count = {"gpu": 0, "nic": 0}

    def gpu(address, down, place):
        tree.gpu(address, down, count["gpu"], "H100", driver_version=software.DRIVER, fabric="ready", **place)
        count["gpu"] += 1

    def infiniband(address, down, place):
        tree.nic(f"mlx5_{count['nic']}", address, down, netdev=f"ib{count['nic']}", link_layer="InfiniBand", **place)
        count["nic"] += 1

    def storage(address, down, place):
        tree.nic(f"mlx5_{count['nic']}", address, down, netdev=f"ens{count['nic']}np0", rate="200 Gb/sec (4X HDR)",
                 device=0x101D, hca="MT4125", firmware="22.41.1000", **place)
        count["nic"] += 1

    for i, bus in enumerate((0x10, 0x40, 0x80, 0xB0)):
        pair(tree, bus, i // 2, (gpu, infiniband, gpu, storage))
    field.bond(tree, "ens1np0", "ens5np0")
    nvswitches(tree, 4)
    return bare(tree)


@machine("dgx-a100-one-port-of-two", each("mlx5_{}", range(0, 16, 2)))
def one_port_of_two():
    """Eight HDR cards with two ports each, of which the second has no cable and never had one."""
    tree = hgx("A100", nic=CX6, fabric=None)
    for number in range(7, -1, -1):
        rename(tree, f"mlx5_{number}", f"mlx5_{2 * number}")
    for number in range(8):
        folder = nic_folder(tree, f"mlx5_{2 * number}").split("/infiniband/")[0]
        parent, address = folder.rsplit("/", 1)
        numa = int(tree.text(f"{folder}/numa_node"))
        tree.nic(f"mlx5_{2 * number + 1}", address[:-1] + "1", parent, netdev=f"ibs{number}f1", numa=numa,
                 cpus=CPUS_H100[numa], link_layer="InfiniBand", **CX6)
        set_state(tree, f"mlx5_{2 * number + 1}", "1: DOWN", "3: Disabled")
    management(tree, "mlx5_20")
    nvswitches(tree, 6, 0x1AF1)
    return bare(tree)


def rename(tree, old, new):
    if old == new:
        return
    for path in list(tree.entries):
        entry = tree.entries[path]
        if hasattr(entry, "target") and f"/{old}" in entry.target + "/":
            entry.target = "/".join(new if part == old else part for part in entry.target.split("/"))
        if path.endswith("/ibdev") and entry == f"{old}\n".encode():
            tree.put(path, f"{new}\n")
        if f"/{old}" in path:
            moved = "/".join(new if part == old else part for part in path.split("/"))
            if moved != path:
                tree.entries[moved] = tree.entries.pop(path)


@machine("quad-gh200-ndr200", each("mlx5_{}", range(4)))
def quad_gh200_ndr200():
    """Four GH200 tied to each other, four NDR200 InfiniBand NICs, RHEL 9 on ARM, one task a GPU that sees all."""
    tree = Tree()
    for i, (domain, port, place) in enumerate(four_superchips(tree)):
        tree.nic(f"mlx5_{i}", f"{domain + 2:04x}:01:00.0", port(domain + 2), netdev=f"ib{i}", link_layer="InfiniBand",
                 rate="200 Gb/sec (2X NDR)", **place)
    tree.interface("enP5p9s0", "0005:09:00.0", "/sys/devices/pci0005:00", INTEL, 0x1563, speed=10000, numa=0,
                   cpus="0-71", driver="ixgbe")
    tree.default_route("enP5p9s0")
    system(tree, release="5.14.0-503.40.1.el9_5.aarch64+64k", arch=AARCH64, nodes=4, n_cpus=288, memory=860,
           doca=False, cmdline="")
    tree.put("/etc/os-release", 'NAME="Red Hat Enterprise Linux"\nVERSION_ID="9.5"\nID="rhel"\nID_LIKE="fedora"\n')
    software.verbs(tree, AARCH64, private=50, core="14.50.0", provider="24.50.0")
    slurm_task(tree, 2, 4, visible="0,1,2,3")
    tree.environment.update({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"})
    tree.replace("/proc/self/status", "Cpus_allowed_list:\t0-287", "Cpus_allowed_list:\t144-215")
    return tree


@machine("v100-nvlink-mesh", [["mlx5_0"]] * 4 + [["mlx5_1"]] * 4)
def v100():
    """Eight V100 in a cube of NVLinks, two HCAs for all, and the closed driver, the only one for them."""
    tree = hgx("V100", nics_per_gpu=0, fabric=None)
    addresses = [gpu["pci"] for gpu in tree.answers["nvml"]["gpus"]]
    for gpu in range(8):
        tree.nvml(gpu)["nvlinks"] = [addresses[gpu ^ 1], addresses[gpu ^ 2], addresses[gpu ^ 4]] * 2
    for numa, bus in ((0, 0x29), (1, 0xAA)):
        place = {"numa": numa, "cpus": CPUS_H100[numa]}
        port = tree.bridge(f"0000:{bus - 1:02x}:01.0", f"/sys/devices/pci0000:{bus - 1:02x}", **place)
        tree.nic(f"mlx5_{numa}", f"0000:{bus:02x}:00.0", port, netdev=f"ib{numa}", link_layer="InfiniBand",
                 rate="100 Gb/sec (4X EDR)", device=0x1017, hca="MT4119", firmware="16.35.4030",
                 link=("8.0 GT/s PCIe", 16), **place)
    ethernet(tree)
    bare(tree, "5.15.0-139-generic", version="570.172.08", memory=768)
    closed(tree)
    return tree


# --- clouds ---


@machine("gke-a3-ultra-cos-pod", each("mlx5_{}"))
def a3_ultra_pod():
    """A pod on A3 Ultra with COS: hostNetwork, the driver at /usr/local/nvidia, the whole stack in the image."""
    tree = Tree()
    golden.gcp(tree, "H200", lambda index, bus: f"mlx5_{index}")
    golden.gcp_software(tree, "a3u", [90])
    tree.environment = golden.gcp_environment([f"mlx5_{i}" for i in range(8)], "a3u")
    tree.put("/proc/sys/kernel/osrelease", "6.6.113+\n")
    container(tree, kubernetes=True)
    for soname in ("libcuda.so", "libnvidia-ml.so"):
        for path in [path for path in tree.entries if path.startswith(f"{X86_64.lib}/{soname}")]:
            tree.entries[path.replace(X86_64.lib, "/usr/local/nvidia/lib64")] = tree.entries.pop(path)
    tree.remove("/usr/lib/modules")
    for path in [path for path in tree.entries if path.startswith("/var/lib/dpkg/")]:
        tree.put(path, software.package("libibverbs1", "2510mlnx56-1.2510079"))
    tree.environment["LD_LIBRARY_PATH"] += ":/usr/local/nvidia/lib64"
    memory(tree, 141)
    return tree


@machine("gke-a4x", each("mlx5_{}", range(4)))
def a4x():
    """A pod on A4X (GB200 on GKE): four RoCE NICs, a gVNIC for the pod, an IMEX channel by a ComputeDomain."""
    tree = Tree()
    cpus = ["0-71", "72-143"]
    for i, domain in enumerate((0x0008, 0x0009, 0x0018, 0x0019)):
        place = {"numa": i // 2, "cpus": cpus[i // 2]}
        port = tree.bridge(f"{domain:04x}:00:00.0", f"/sys/devices/pci{domain:04x}:00", vendor=NVIDIA, device=0x22B8,
                           **place)
        tree.gpu(f"{domain:04x}:01:00.0", port, i, "GB200", driver_version=software.DRIVER, fabric="ready", **place)
    for i, domain in enumerate((0x0000, 0x0002, 0x0010, 0x0012)):
        place = {"numa": i // 2, "cpus": cpus[i // 2]}
        port = tree.bridge(f"{domain:04x}:00:00.0", f"/sys/devices/pci{domain:04x}:00", vendor=NVIDIA, device=0x22B1,
                           **place)
        tree.nic(f"mlx5_{i}", f"{domain:04x}:01:00.0", port, netdev=f"gpu{i}rdma0", **place)
    tree.interface("eth0", "0006:00:01.0", "/sys/devices/pci0006:00", trees.GOOGLE, 0x0042, speed=200000, numa=0,
                   cpus=cpus[0], driver="gve", link=UNKNOWN_LINK)
    tree.default_route("eth0")
    system(tree, release="6.8.0-1036-gke-64k", arch=AARCH64, n_cpus=144, memory=960, cmdline="")
    tree.replace("/proc/devices", "508 nvidia-caps\n", "508 nvidia-caps\n509 nvidia-caps-imex-channels\n")
    tree.device_node("/dev/nvidia-caps-imex-channels/channel7")
    container(tree, kubernetes=True)
    return tree


@machine("azure-slurm-one-gpu", [["mlx5_ib5"]])
def azure_slurm():
    """A task of Slurm on Azure ND H100 v5 that sees GPU 5 as GPU 0; the addresses of devices are in no order."""
    tree = azure("H100", rate="400 Gb/sec (4X NDR)", size="ndv5")
    netvsc(tree, "enP35414s1")
    tree.answers["nvml"]["gpus"] = tree.answers["nvml"]["gpus"][5:6]
    deny(tree, *[i for i in range(8) if i != 5])
    slurm_task(tree, 0, 1)
    tree.environment["NCCL_IB_HCA"] = "mlx5_ib5"
    tree.replace("/proc/self/status", "Cpus_allowed_list:\t0-95", "Cpus_allowed_list:\t60-71")
    return tree


@machine("aws-p5-docker", [[f"rdmap{65 + 16 * gpu}s{i}" for i in range(4)] for gpu in range(8)])
def aws_docker():
    """A container on EC2 p5 with Amazon Linux, all 32 adapters, and NCCL's variables of AWS's guide."""
    tree = aws("H100", "p5.48xlarge", 32, rate="100 Gb/sec (4X EDR)")
    tree.put("/etc/os-release", AL2023)
    tree.remove("/var/lib/dpkg/status")
    container(tree)
    tree.environment.update({"NCCL_SOCKET_IFNAME": "^docker,lo,veth", "NCCL_BUFFSIZE": "8388608",
                             "FI_EFA_FORK_SAFE": "1", "NCCL_P2P_NET_CHUNKSIZE": "524288"})
    return tree


@machine("openstack-two-l40s", [["mlx5_0"]] * 2)
def openstack():
    """A guest with two L40S and one virtual function for RoCE, the default route on virtio, cloud-init's Ubuntu."""
    tree = Tree()
    root = "/sys/devices/pci0000:00"
    for i in range(2):
        port = tree.bridge(f"0000:00:02.{i}", root, vendor=0x1B36, device=0x000C, cpus="0-31",
                           link=("2.5 GT/s PCIe", 1), link_max=("16.0 GT/s PCIe", 32))
        tree.gpu(f"0000:0{i + 5}:00.0", port, i, "L40S", cpus="0-31", driver_version=software.DRIVER,
                 link=("16.0 GT/s PCIe", 16))
    port = tree.bridge("0000:00:02.5", root, vendor=0x1B36, device=0x000C, cpus="0-31", link=("2.5 GT/s PCIe", 1),
                       link_max=("16.0 GT/s PCIe", 32))
    tree.nic("mlx5_0", "0000:08:00.0", port, netdev="enp8s0", cpus="0-31", rate="100 Gb/sec (2X HDR)",
             link=UNKNOWN_LINK, **golden.VIRTUAL_FUNCTION)
    tree.interface("enp1s0", "0000:01:00.0", root, 0x1AF4, 0x1041, cpus="0-31", driver="virtio-pci", link=UNKNOWN_LINK)
    tree.default_route("enp1s0")
    system(tree, release="6.8.0-87-generic", hypervisor=True, n_cpus=32, memory=256, nodes=1, cmdline="")
    product(tree, "OpenStack Nova", "OpenStack Foundation")
    return tree


# --- containers and schedulers ---


@machine("openshift-sriov-pod", each("mlx5_{}", range(8, 16)))
def openshift_sriov():
    """A pod on OpenShift: eight virtual functions as net1 to net8, the physical functions on the node alone."""
    tree = hgx("H200", layer="Ethernet")
    for i in range(8):
        pci = nic_folder(tree, f"mlx5_{i}").rsplit("/infiniband/", 1)[0]
        parent, address = pci.rsplit("/", 1)
        tree.nic(f"mlx5_{8 + i}", address[:-1] + "2", parent, netdev=f"net{i + 1}", device=0x101E, hca="MT4126",
                 numa=i // 4, cpus=CPUS_H100[i // 4], physfn=pci)
    ethernet(tree, "eth0")
    nvswitches(tree, 4)
    bare(tree, "5.14.0-427.70.1.el9_4.x86_64", doca=False)
    software.verbs(tree, X86_64, private=50, core="14.50.0", provider="24.50.0")
    forget_interfaces(tree, *[f"ens{i}np0" for i in range(8)])
    take_uverbs(tree, *[f"mlx5_{i}" for i in range(8)])
    for i in range(8):
        port = nic_port(tree, f"mlx5_{i}")
        for path in [path for path in tree.entries if path.startswith(f"{port}/gid_attrs/")]:
            del tree.entries[path]
        for index in range(8):
            tree.put(f"{port}/gids/{index}", trees.EMPTY_GID + "\n")
    container(tree, kubernetes=True)
    tree.environment.update({"NCCL_IB_HCA": ",".join(f"mlx5_{i}" for i in range(8, 16)),
                             "NCCL_SOCKET_IFNAME": "eth0", "NCCL_IB_GID_INDEX": "3"})
    return tree


@machine("slurm-half-exclusive", each("mlx5_{}", range(4)))
def slurm_half():
    """Half a node by Slurm in an enroot container: four GPUs and their processors, all NICs, all visible by number."""
    tree = hgx("H200")
    management(tree, "mlx5_20", "mlx5_21")
    nvswitches(tree, 4)
    bare(tree)
    tree.answers["nvml"]["gpus"] = tree.answers["nvml"]["gpus"][:4]
    deny(tree, 4, 5, 6, 7)
    slurm_task(tree, 1, 4, visible="0,1,2,3")
    tree.environment.update({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "SLURM_JOB_GPUS": "0,1,2,3",
                             "ENROOT_ROOTFS": "/run/enroot/overlay", "NVIDIA_VISIBLE_DEVICES": "all",
                             "NCCL_IB_HCA": "mlx5_0,mlx5_1,mlx5_2,mlx5_3"})
    tree.replace("/proc/self/status", "Cpus_allowed_list:\t0-223", "Cpus_allowed_list:\t0-55,112-167")
    return tree


@machine("conda-forge-system-mpi", each("mlx5_{}"))
def conda_forge():
    """A conda environment with MPI of the module system: CUDA from conda, no /usr/local/cuda at all."""
    tree = field.machines["conda"]()
    home = "/usr/local/cuda-12.9"
    prefix = tree.environment["CONDA_PREFIX"]
    for path in [path for path in tree.entries if path.startswith(f"{home}/lib64/libcudart")]:
        tree.entries[f"{prefix}/lib/{path.rsplit('/', 1)[1]}"] = tree.entries.pop(path)
    tree.remove(home)
    del tree.entries["/usr/local/cuda"]
    tree.remove("/etc/ld.so.conf.d/000_cuda.conf")
    del tree.environment["CUDA_HOME"]
    tree.environment["LD_LIBRARY_PATH"] += f":{prefix}/lib"
    return tree


# --- faults: GPUs and the driver ---


@change("v100-nvlink-mesh/open", "open-driver")
def open_modules_on_volta(tree):
    """The other way round than on Blackwell: the open modules do not drive what is older than Turing."""
    tree.replace("/proc/driver/nvidia/version", "NVIDIA UNIX x86_64 Kernel Module",
                 "NVIDIA UNIX Open Kernel Module for x86_64")
    tree.answers["nvml"] = {"driver": "570.172.08", "gpus": []}
    for path in [path for path in tree.entries if path.startswith("/proc/driver/nvidia/gpus/")]:
        del tree.entries[path]
    for minor in range(8):
        forget_device(tree, f"/dev/nvidia{minor}")


@change("gke-a3-ultra-cos-pod/no-nvml", "?gpu-errors", "?nvlink", "?mig", "?clocks", "?fabric-manager", "?gpu-arch")
def no_nvml_in_the_pod(tree):
    """NVIDIA_DRIVER_CAPABILITIES=compute: the runtime mounts libcuda, and no libnvidia-ml."""
    for path in [path for path in tree.entries if "/libnvidia-ml.so" in path]:
        del tree.entries[path]
    tree.answers["nvml"] = {"error": "libnvidia-ml.so.1: cannot open shared object file: No such file or directory"}


@change("hgx-h200-rocky-e810/nouveau", "driver-skew")
def nouveau_on_rocky(tree):
    drivers = [path for path in tree.entries
               if path.endswith("/driver") and tree.entries[path].target.endswith("/drivers/nvidia")]
    variants.driver_not_loaded(tree)
    for path in drivers:
        tree.link(path, field.relative(path.rsplit("/", 1)[0], "/sys/bus/pci/drivers/nouveau"))
    tree.folder("/sys/bus/pci/drivers/nouveau")


@change("hgx-h200-rocky-e810/iommu", "iommu")
def translating_iommu(tree):
    tree.replace("/proc/cmdline", "iommu=pt", "intel_iommu=on")
    for path in [path for path in tree.entries if path.startswith("/sys/kernel/iommu_groups/")
                 and path.endswith("/type")]:
        tree.put(path, "DMA-FQ\n")


@change("hgx-h200-rocky-e810/option", "driver-option")
def option_without_dracut(tree):
    """The option is in modprobe.d, and the initramfs is older."""
    tree.put("/etc/modprobe.d/nvidia.conf", 'options nvidia NVreg_RegistryDwords="PeerMappingOverride=1;"\n')


variants.set_up(change, (
    ("gke-a3-ultra-cos-pod/no-path", "libcuda two-nvshmem",
     "An image that sets LD_LIBRARY_PATH for itself and forgets what GKE mounts, and the preloaded library.",
     lambda tree: tree.environment.update(LD_LIBRARY_PATH=f"/opt/deepep/nvshmem/lib:{X86_64.lib}:/usr/local/gib/lib64"),
     lambda tree: tree.environment.pop("LD_PRELOAD")),
    ("gke-a3-ultra-cos-pod/shm", "shm", "Default shm.",
     lambda tree: tree.replace("/proc/self/mounts", "size=268435456k", "size=65536k")),
    ("hgx-h200-rocky-e810/fabric-missing", "nvlink",
     "The fabric manager was never installed: the fabric never starts, CUDA says 802.",
     lambda tree: variants.update_gpus(tree, fabric="starting")),
    ("hgx-h200-rocky-e810/fabric-updated", "fabric-manager",
     "The package by the name that it has from driver 580 on, updated alone.",
     lambda tree: dnf_log(tree, f"Installed: nvidia-fabricmanager-{software.DRIVER}-1.x86_64",
                          "Upgrade: nvidia-fabricmanager-580.140.02-1.x86_64")),
    ("hgx-b200-four-switches/gpu-and-xid", "gpu-errors",
     "GPU 6 of the bus is NVML's 6 no more, since GPU 2 is at a virtual machine; row remap pending on it.",
     lambda tree: without_driver(tree, tree.nvml(2)["pci"], 2, "vfio-pci"),
     lambda tree: tree.nvml(5).update(remap_pending=True)),
))


@change("azure-slurm-one-gpu/index-mapping", "visible-devices")
def index_mapping(tree):
    """The map of the whole node in the batch script, with indices of GPUs, where each task has a GPU 0."""
    peer_mapping(tree)
    deepep(tree)
    tree.environment["DEEP_EP_DEVICE_TO_HCA_MAPPING"] = mapping(f"mlx5_ib{i}" for i in range(8))
    tree.environment["NVSHMEM_HCA_PREFIX"] = "mlx5_ib"


# --- faults: NICs ---


@change("hgx-b200-four-switches/init", "port-down")
def half_without_subnet_manager(tree):
    """One of two fabrics has no subnet manager."""
    for i in range(0, 16, 2):
        set_state(tree, f"mlx5_{i}", "2: INIT", "5: LinkUp")


@change("dgx-a100-one-port-of-two/wrong-socket", nics=[[f"mlx5_{2 * i + (i == 3)}"] for i in range(8)])
def cable_in_the_other_socket(tree):
    """What is right: on one card the cable is in the second port, which works as well."""
    set_state(tree, "mlx5_6", "1: DOWN", "3: Disabled")
    set_state(tree, "mlx5_7", "4: ACTIVE", "5: LinkUp")


variants.set_up(change, (
    ("hgx-b200-four-switches/nic-gone", "port-down", "One of sixteen gone.",
     lambda tree: remove_nic(tree, "mlx5_9")),
    ("xe9680-mixed-fabric/rail-gone", "port-down",
     "Storage over Ethernet does not take its place, though it is on the same switch.",
     lambda tree: remove_nic(tree, "mlx5_4")),
    ("xe9680-mixed-fabric/storage-down", "port-down", "The GPUs' NICs are well; a port for storage has lost its link.",
     lambda tree: set_state(tree, "mlx5_7", "1: DOWN", "2: Polling")),
    ("dgx-a100-one-port-of-two/cable", "port-down", "The port that has a cable on the other seven cards.",
     lambda tree: set_state(tree, "mlx5_6", "1: DOWN", "2: Polling")),
    ("aws-p5-docker/efa-down", "port-down", "One EFA down.",
     lambda tree: set_state(tree, "rdmap81s2", "1: DOWN", "3: Disabled")),
    ("aws-p5-docker/memlock", "memlock", "Locked memory of docker.",
     lambda tree: tree.replace("/proc/self/limits", "Max locked memory         unlimited            unlimited ",
                               "Max locked memory         65536                65536     ")),
    ("gke-a4x/passthrough", "iommu-gb200", "Passthrough on a4x.",
     lambda tree: tree.replace("/proc/cmdline", " ro", " ro iommu.passthrough=1")),
    ("gke-a4x/no-channel", "imex", "Pod without compute domain.",
     lambda tree: forget_device(tree, "/dev/nvidia-caps-imex-channels/channel7")),
))


@change("openshift-sriov-pod/no-address", "gid")
def functions_without_addresses(tree):
    """The network attachment gave no IPv4 address, so that no GID can be routed."""
    for i in range(8, 16):
        port = nic_port(tree, f"mlx5_{i}")
        for index in (2, 3):
            tree.put(f"{port}/gids/{index}", trees.EMPTY_GID + "\n")
            del tree.entries[f"{port}/gid_attrs/types/{index}"]
            del tree.entries[f"{port}/gid_attrs/ndevs/{index}"]


# --- faults: variables ---


@change("gke-a3-ultra-cos-pod/list-of-task")
def list_of_one_task(tree):
    """What is right: a list for the one GPU of this task."""
    del tree.environment["DEEP_EP_DEVICE_TO_HCA_MAPPING"]
    tree.environment["NVSHMEM_HCA_LIST"] = "mlx5_4:1"
    one(tree, 4)


def one(tree, gpu):
    tree.answers["nvml"]["gpus"] = [tree.answers["nvml"]["gpus"][gpu]]
    deny(tree, *[minor for minor in range(8) if minor != gpu])
    tree.environment.update(CUDA_VISIBLE_DEVICES="0", LOCAL_RANK=str(gpu), LOCAL_WORLD_SIZE="8")


@change("gke-a3-ultra-cos-pod/dmabuf", "dmabuf-off")
def dmabuf_off_without_peermem(tree):
    without_peermem(tree)
    tree.environment["NVSHMEM_IB_DISABLE_DMABUF"] = "yes"


@change("slurm-half-exclusive/no-dev-files", "gpu-access")
def step_without_gpus(tree):
    """srun without --gres in an allocation that has GPUs."""
    tree.answers["nvml"] = {"driver": software.DRIVER, "gpus": []}
    deny(tree, *range(8))
    tree.environment["CUDA_VISIBLE_DEVICES"] = "NoDevFiles"


@change("quad-gh200-ndr200/bound", "affinity")
def bound_to_another_socket(tree):
    """Task 2 on the processors of superchip 0."""
    tree.replace("/proc/self/status", "Cpus_allowed_list:\t144-215", "Cpus_allowed_list:\t0-71")


# --- more variables ---


@change("gke-a3-ultra-cos-pod/pe-mapping-on", "one-nic", "hca-lists")
def pe_mapping_switched_on(tree):
    """A stale list by PE that is read: with a separator that NVSHMEM does not know."""
    del tree.environment["DEEP_EP_DEVICE_TO_HCA_MAPPING"]
    tree.environment.update(NVSHMEM_ENABLE_NIC_PE_MAPPING="true", NVSHMEM_HCA_PE_MAPPING="mlx5_0:1:1;mlx5_1:1:1")


@change("gke-a3-ultra-cos-pod/mapping-twice", "shared-nic")
def mapping_with_one_nic_twice(tree):
    names = [f"mlx5_{i}" for i in range(8)]
    names[3] = "mlx5_2"
    tree.environment["DEEP_EP_DEVICE_TO_HCA_MAPPING"] = mapping(names)


@change("hgx-h200-rocky-e810/one-address", "gid")
def one_rail_without_address(tree):
    """DHCP has failed on one rail."""
    port = nic_port(tree, "mlx5_6")
    for index in (2, 3):
        tree.put(f"{port}/gids/{index}", trees.EMPTY_GID + "\n")
        del tree.entries[f"{port}/gid_attrs/types/{index}"]
        del tree.entries[f"{port}/gid_attrs/ndevs/{index}"]


@change("hgx-h200-rocky-e810/no-rdma", "rdma-device")
def rails_without_rdma(tree):
    """The kernel's mlx5_ib is blacklisted: Intel's functions alone are RDMA devices."""
    for i in range(8):
        without_rdma(tree, f"mlx5_{i}")


@change("hgx-b200-four-switches/armed", "port-down")
def armed(tree):
    set_state(tree, "mlx5_3", "3: ARMED", "5: LinkUp")


@change("hgx-b200-four-switches/half-speed", "slow-link")
def narrow_nic(tree):
    pci = nic_folder(tree, "mlx5_5").split("/infiniband/")[0]
    tree.put(f"{pci}/current_link_width", "8\n")


@change("aws-p5-docker/group-gone", "port-down")
def group_of_adapters_gone(tree):
    """The four adapters of one GPU were not handed to the container."""
    for i in range(4):
        remove_nic(tree, f"rdmap97s{i}")


@change("aws-p5-docker/no-devices", "nic-access")
def container_without_adapters(tree):
    """docker run without --device: NCCL is told to use EFA."""
    for i in range(32):
        forget_device(tree, f"/dev/infiniband/uverbs{i}")


variants.set_up(change, (
    ("gke-a3-ultra-cos-pod/dmabuf-zero", "", "What is right: the variable is set, to no.",
     lambda tree: without_peermem(tree),
     lambda tree: tree.environment.update(NVSHMEM_IB_DISABLE_DMABUF="0")),
    ("hgx-h200-rocky-e810/rail-down", "port-down", "Neither Intel card takes its place.",
     lambda tree: set_state(tree, "mlx5_6", "1: DOWN", "2: Polling")),
    ("hgx-h200-rocky-e810/rail-gone", "port-down", "Rail gone.",
     lambda tree: remove_nic(tree, "mlx5_6")),
    ("hgx-h200-rocky-e810/peermem", "peermem", "No way on rocky.",
     lambda tree: closed(tree),
     lambda tree: without_peermem(tree)),
    ("hgx-b200-four-switches/defer", "port-down", "The link recovers again and again.",
     lambda tree: set_state(tree, "mlx5_3", "5: ACTIVE_DEFER", "6: LinkErrorRecovery")),
    ("gke-a4x/nic-gone", "port-down", "NIC of a tray gone.",
     lambda tree: remove_nic(tree, "mlx5_2")),
    ("gke-a4x/fabric", "imex", "Rack not joined.",
     lambda tree: variants.update_gpus(tree, fabric="starting")),
    ("openstack-two-l40s/function-down", "port-down", "The only NIC, and a job of several nodes.",
     lambda tree: set_state(tree, "mlx5_0", "1: DOWN", "3: Disabled"),
     lambda tree: tree.environment.update(NCCL_IB_HCA="mlx5_0")),
    ("v100-nvlink-mesh/ecc", "gpu-errors", "ECC of Volta.",
     lambda tree: tree.nvml(4).update(ecc_uncorrected=3)),
))


# --- variables alone ---

variants.set_variables(change, (
    # name, findings, variables, what it is
    ("xe9680-mixed-fabric/no-path-of-links", "", {"NCCL_IB_HCA": "=mlx5_0,mlx5_2,mlx5_4,mlx5_6"},
     "What is right: NCCL is told the four InfiniBand devices by name."),
    ("aws-p5-docker/ibgda", "ibgda-nic", {"NVSHMEM_IB_ENABLE_IBGDA": "true"}, "IBGDA on EFA."),
    ("aws-p5-docker/interface", "socket-interface", {"NCCL_SOCKET_IFNAME": "eth0"}, "Interface of another cloud."),
    ("openshift-sriov-pod/list-of-physical", "nccl-hca", {"NCCL_IB_HCA": ','.join((f'mlx5_{i}' for i in range(8)))},
     "List of physical functions."),
    ("gke-a3-ultra-cos-pod/pe-mapping-semicolon", "void-variables",
     {"NVSHMEM_HCA_PE_MAPPING": "mlx5_0:1:1;mlx5_1:1:1;mlx5_2:1:1;mlx5_3:1:1"},
     "Names that are right, and a separator that NVSHMEM does not know."),
    ("gke-a3-ultra-cos-pod/pe-mapping-port", "void-variables",
     {"NVSHMEM_HCA_PE_MAPPING": ','.join((f'mlx5_{i}:2:1' for i in range(8)))},
     "Pe mapping with a port too many."),
    ("gke-a3-ultra-cos-pod/pe-mapping-spaces", "void-variables",
     {"NVSHMEM_HCA_PE_MAPPING": ', '.join((f'gpu{i}rdma0:1:1' for i in range(8)))},
     "From the time when the devices had the names of their interfaces, with spaces behind the commas."),
    ("gke-a3-ultra-cos-pod/handler-value", "void-variables", {"NVSHMEM_IBGDA_NIC_HANDLER": "GPU "},
     "Handler of no value."),
    ("slurm-half-exclusive/hca-of-others", "nccl-hca", {"NCCL_IB_HCA": "mlx5_4,mlx5_5,mlx5_6,mlx5_7"},
     "A list for the other half of the node."),
    ("slurm-half-exclusive/port-form", "nccl-hca", {"NCCL_IB_HCA": "=mlx5_0:2,mlx5_1:2,mlx5_2:2,mlx5_3:2"},
     "List with a port that is none."),
    ("gke-a3-ultra-cos-pod/mapping-semicolon", "shared-nic",
     {"DEEP_EP_DEVICE_TO_HCA_MAPPING": mapping((f'mlx5_{i}' for i in range(8))).replace(',', ';')},
     "Mapping with semicolons."),
    ("gke-a3-ultra-cos-pod/mapping-spaces", "",
     {"DEEP_EP_DEVICE_TO_HCA_MAPPING": ','.join((f'{i}:mlx5_{i}' for i in range(8)))},
     "What is right: an entry without a port means port 1."),
    ("gke-a3-ultra-cos-pod/mapping-short", "shared-nic",
     {"DEEP_EP_DEVICE_TO_HCA_MAPPING": mapping((f'mlx5_{i}' for i in range(4)))},
     "A mapping for a machine with four GPUs."),
    ("gke-a3-ultra-cos-pod/mapping-stale", "shared-nic",
     {"DEEP_EP_DEVICE_TO_HCA_MAPPING": mapping((f'rocep{i}s0' for i in range(8)))},
     "Mapping of a former image."),
    ("slurm-half-exclusive/hca-spaces", "nccl-hca", {"NCCL_IB_HCA": "mlx5_0, mlx5_1, mlx5_2, mlx5_3"},
     "NCCL does not take spaces away."),
    ("slurm-half-exclusive/visible-nine", "visible-devices", {"CUDA_VISIBLE_DEVICES": "0,9,1,2"},
     "CUDA stops at the first that it does not know."),
    ("slurm-half-exclusive/visible-twice", "visible-devices", {"CUDA_VISIBLE_DEVICES": "0,1,1,2"},
     "CUDA takes none at all."),
    ("hgx-h200-rocky-e810/gid-zero", "gid", {"NCCL_IB_GID_INDEX": "2"}, "A GID of RoCE v1."),
    ("quad-gh200-ndr200/wrong-list", "nccl-hca", {"NCCL_IB_HCA": "=mlx5_0:1"},
     "All tasks of the node were given the list of the first."),
))
