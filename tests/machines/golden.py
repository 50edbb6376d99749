# SPDX-License-Identifier: Apache-2.0
"""The golden machines: healthy, and each of a shape of its own.

Layouts are those that lspci, sysfs and `nvidia-smi topo -m` show in public reports of such machines.
"""
import software
from software import AARCH64, X86_64
from tree import BROADCOM, DOWNSTREAM, GOOGLE, INTEL, NVIDIA, UNKNOWN_LINK, UPSTREAM, Tree, relative

VIRTUAL_FUNCTION = {"device": 0x101E, "hca": "MT4126"}

CPUS_A4 = ["0-55,112-167", "56-111,168-223"]


# --- GCP: A4 and A3 Ultra ---

# A PCIe switch for each pair of GPUs with its pair of NICs; numbers of buses as the guest sees them.
GCP_SWITCHES = [
    # host bridge, root port, switch, GPUs, NICs, NUMA node
    ("pci0000:8a", "0000:8a:01.0", 0x8B, (0x8F, 0x90), (0x91, 0x92), 0),
    ("pci0000:8a", "0000:8a:02.0", 0x93, (0x96, 0x97), (0x98, 0x99), 0),
    ("pci0000:c0", "0000:c0:01.0", 0xC1, (0xC4, 0xC5), (0xC6, 0xC7), 1),
    ("pci0000:c0", "0000:c0:02.0", 0xC8, (0xCB, 0xCC), (0xCD, 0xCE), 1),
]


def gcp(tree, model, nic_name):
    """GPUs and NICs of both machine types. nic_name(index, bus) names a NIC."""
    gpu = nic = 0
    for host, root_port, bus, gpus, nics, numa in GCP_SWITCHES:
        place = {"numa": numa, "cpus": CPUS_A4[numa]}
        port = tree.bridge(root_port, f"/sys/devices/{host}", **place)
        switch = tree.bridge(f"0000:{bus:02x}:00.0", port, vendor=BROADCOM, device=0xC030, port_type=UPSTREAM, **place)
        for slot, below in enumerate(gpus + nics):
            down = tree.bridge(f"0000:{bus + 1:02x}:{slot:02x}.0", switch, vendor=BROADCOM, device=0xC030,
                               port_type=DOWNSTREAM, **place)
            address = f"0000:{below:02x}:00.0"
            if slot < 2:
                tree.gpu(address, down, gpu, model, driver_version=software.DRIVER, fabric="ready", **place)
                gpu += 1
            else:
                tree.nic(nic_name(nic, below), address, down, netdev=f"gpu{nic}rdma0", sent=250_000_000_000 + nic,
                         received=249_000_000_000 + nic, **VIRTUAL_FUNCTION, **place)
                nic += 1
    for i in range(2):
        tree.interface(f"eth{i}", f"0000:00:{12 + i:02x}.0", "/sys/devices/pci0000:00", GOOGLE, 0x0042, speed=200000,
                       numa=0, cpus=CPUS_A4[0], driver="gve", link=UNKNOWN_LINK)
    for i in range(2):
        tree.pci(f"0000:00:{4 + i:02x}.0", "/sys/devices/pci0000:00", GOOGLE, 0x001F, 0x010802, numa=0,
                 cpus=CPUS_A4[0], driver="nvme", link=UNKNOWN_LINK)
    tree.default_route("eth0")
    for i in range(2):
        tree.numa_node(i, CPUS_A4[i], 1856)
    tree.kernel(software.KERNEL, f"BOOT_IMAGE=/vmlinuz-{software.KERNEL} root=/dev/sda1 ro console=ttyS0",
                hypervisor=True)
    tree.process(memory_gib=3712, cpus="0-223", n_cpus=224, shm="size=268435456k")


def gcp_software(tree, machine, archs):
    software.system(tree)
    software.driver(tree, X86_64)
    software.doca(tree, X86_64)
    software.cuda(tree, X86_64)
    software.nvshmem(tree, X86_64)
    software.torch(tree, X86_64)
    software.deepep(tree, X86_64, archs=archs)
    software.gib(tree, X86_64, machine)


def gcp_environment(names, machine):
    """What `epkit env` advises there."""
    return {
        "PATH": "/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/root",
        "LANG": "C.UTF-8",
        "CUDA_HOME": "/usr/local/cuda",
        "NVSHMEM_HOME": "/opt/deepep/nvshmem",
        "LD_LIBRARY_PATH": f"{X86_64.lib}:/opt/deepep/nvshmem/lib:/usr/local/gib/lib64",
        "LD_PRELOAD": "/opt/deepep/nvshmem/lib/libnvshmem_host.so.3",
        "PYTHONPATH": "/opt/deepep/python",
        "NVSHMEM_IB_ENABLE_IBGDA": "1",
        "NVSHMEM_IBGDA_NIC_HANDLER": "gpu",
        "DEEP_EP_DEVICE_TO_HCA_MAPPING": ",".join(f"{i}:{name}:1" for i, name in enumerate(names)),
        "NCCL_NET": "gIB",
        "NCCL_CROSS_NIC": "0",
        "NCCL_NET_GDR_LEVEL": "PIX",
        "NCCL_P2P_NET_CHUNKSIZE": "131072",
        "NCCL_NVLS_CHUNKSIZE": "524288",
        "NCCL_IB_ADAPTIVE_ROUTING": "1",
        "NCCL_IB_QPS_PER_CONNECTION": "4",
        "NCCL_IB_TC": "52",
        "NCCL_IB_FIFO_TC": "84",
        "NCCL_TUNER_CONFIG_PATH": f"/usr/local/gib/configs/tuner_config_{machine}.txtpb",
    }


def a4():
    """GCP A4: 8 B200, 8 ConnectX-7 with RoCE at 400 Gb/s, two of each on a PCIe switch; a virtual machine."""
    tree = Tree()
    gcp(tree, "B200", lambda index, bus: f"mlx5_{index}")
    gcp_software(tree, "a4", [90, 100])
    tree.environment = gcp_environment([f"mlx5_{i}" for i in range(8)], "a4")
    return tree


def a3u():
    """GCP A3 Ultra: 8 H200, the same shape; NICs have the names that the distribution's udev gives them."""
    tree = Tree()
    gcp(tree, "H200", lambda index, bus: f"rocep{bus}s0")
    gcp_software(tree, "a3u", [90])
    tree.environment = gcp_environment([f"rocep{bus}s0" for *_, nics, _ in GCP_SWITCHES for bus in nics], "a3u")
    tree.environment["NVSHMEM_HCA_PREFIX"] = "rocep"
    return tree


# --- bare metal with 8 H100 ---

# One switch for each GPU with its NIC; buses of GPUs and data NICs of a DGX H100.
DGX_SWITCHES = [
    # host bridge, bus of the switch, NIC, GPU, NUMA node
    (0x15, 0x16, 0x18, 0x1B, 0), (0x3C, 0x3D, 0x40, 0x43, 0), (0x4B, 0x4C, 0x4F, 0x52, 0), (0x5A, 0x5B, 0x5E, 0x61, 0),
    (0x97, 0x98, 0x9A, 0x9D, 1), (0xBD, 0xBE, 0xC0, 0xC3, 1), (0xCB, 0xCC, 0xCE, 0xD1, 1), (0xD9, 0xDA, 0xDC, 0xDF, 1),
]
CPUS_H100 = ["0-55,112-167", "56-111,168-223"]


def h100(nics_per_switch=1, switches_with_nics=range(8)):
    """
    Bare metal with 8 H100 and 8 InfiniBand NICs, each GPU with its NIC on a switch of its own; 2 more NICs for
    management, one of which carries the default route; NVSwitch.
    """
    tree = Tree()
    management = [(0x29, 0), (0xAA, 1)]
    names = iter(f"mlx5_{i}" for i in range(64))
    data = []
    for gpu, (host, switch, nic, gpu_bus, numa) in enumerate(DGX_SWITCHES):
        place = {"numa": numa, "cpus": CPUS_H100[numa]}
        port = tree.bridge(f"0000:{host:02x}:01.0", f"/sys/devices/pci0000:{host:02x}", **place)
        up = tree.bridge(f"0000:{switch:02x}:00.0", port, vendor=BROADCOM, device=0xC030, port_type=UPSTREAM, **place)
        n_nics = nics_per_switch if gpu in switches_with_nics else 0
        for i in range(n_nics):
            down = tree.bridge(f"0000:{switch + 1:02x}:{i:02x}.0", up, vendor=BROADCOM, device=0xC030,
                               port_type=DOWNSTREAM, **place)
            data.append((f"0000:{nic + i:02x}:00.0", down, place))
        down = tree.bridge(f"0000:{switch + 1:02x}:1f.0", up, vendor=BROADCOM, device=0xC030, port_type=DOWNSTREAM,
                           **place)
        tree.gpu(f"0000:{gpu_bus:02x}:00.0", down, gpu, "H100", driver_version=software.DRIVER, fabric="ready",
                 **place)
    for address, down, place in data[:len(data) // 2]:
        tree.nic(next(names), address, down, netdev=f"ibp{int(address[5:7], 16)}s0", link_layer="InfiniBand", **place)
    for bus, numa in management:
        place = {"numa": numa, "cpus": CPUS_H100[numa]}
        port = tree.bridge(f"0000:{bus - 1:02x}:01.0", f"/sys/devices/pci0000:{bus - 1:02x}", **place)
        tree.nic(next(names), f"0000:{bus:02x}:00.0", port, netdev=f"ens{numa}f0np0", rate="100 Gb/sec (4X EDR)",
                 device=0x101D, hca="MT4125", **place)
    for address, down, place in data[len(data) // 2:]:
        tree.nic(next(names), address, down, netdev=f"ibp{int(address[5:7], 16)}s0", link_layer="InfiniBand", **place)
    for i in range(4):
        port = tree.bridge(f"0000:00:{0x10 + i:02x}.0", "/sys/devices/pci0000:00", numa=0, cpus=CPUS_H100[0])
        tree.pci(f"0000:{7 + i:02x}:00.0", port, NVIDIA, 0x22A3, 0x068000, numa=0, cpus=CPUS_H100[0], driver="nvidia",
                 link=("5.0 GT/s PCIe", 2))
    tree.default_route("ens0f0np0")
    for i in range(2):
        tree.numa_node(i, CPUS_H100[i], 1024)
    release = "6.8.0-87-generic"
    tree.kernel(release, f"BOOT_IMAGE=/vmlinuz-{release} root=/dev/nvme0n1p2 ro iommu=pt", hypervisor=False,
                model="Intel(R) Xeon(R) Platinum 8480C")
    iommu_groups(tree, "identity")
    tree.process(memory_gib=2048, cpus="0-223", n_cpus=224, shm="size=1056964608k")
    software.system(tree)
    software.driver(tree, X86_64, release=release, override=False)
    software.doca(tree, X86_64, release)
    software.cuda(tree, X86_64)
    tree.environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/root", "LANG": "C.UTF-8"}
    return tree


def iommu_groups(tree, kind):
    """A group for each PCI device, as the kernel makes them where ACS allows."""
    addresses = sorted(path.rsplit("/", 1)[1] for path in tree.entries if path.startswith("/sys/bus/pci/devices/"))
    for i, address in enumerate(addresses):
        tree.put(f"/sys/kernel/iommu_groups/{i}/type", f"{kind}\n")
        folder = tree.real(f"/sys/bus/pci/devices/{address}")
        tree.link(f"/sys/kernel/iommu_groups/{i}/devices/{address}",
                  relative(f"/sys/kernel/iommu_groups/{i}/devices", folder))
        tree.link(f"{folder}/iommu_group", relative(folder, f"/sys/kernel/iommu_groups/{i}"))


def h100_4nic():
    """As h100 with 4 data NICs for 8 GPUs."""
    return h100(switches_with_nics=(0, 2, 4, 6))


def h100_16nic():
    """As h100 with 16 data NICs for 8 GPUs."""
    return h100(nics_per_switch=2)


# --- a node of GB200 NVL72 ---


def gb200():
    """
    4 GPUs and 4 NICs, each in a PCI domain of its own, on two Grace processors; NVLink over the rack: IMEX channels.
    """
    tree = Tree()
    cpus = ["0-71", "72-143"]
    release = "6.11.0-1016-nvidia-64k"
    for i, domain in enumerate((0x0008, 0x0009, 0x0018, 0x0019)):
        place = {"numa": i // 2, "cpus": cpus[i // 2]}
        port = tree.bridge(f"{domain:04x}:00:00.0", f"/sys/devices/pci{domain:04x}:00", vendor=NVIDIA, device=0x22B8,
                           **place)
        tree.gpu(f"{domain:04x}:01:00.0", port, i, "GB200", driver_version=software.DRIVER, fabric="ready", **place)
    for i, domain in enumerate((0x0000, 0x0002, 0x0010, 0x0012)):
        place = {"numa": i // 2, "cpus": cpus[i // 2]}
        port = tree.bridge(f"{domain:04x}:00:00.0", f"/sys/devices/pci{domain:04x}:00", vendor=NVIDIA, device=0x22B1,
                           **place)
        tree.nic(f"mlx5_{i}", f"{domain:04x}:03:00.0", port, netdev=f"ibP{domain}p3s0", link_layer="InfiniBand",
                 **place)
    tree.interface("enP5p9s0", "0005:09:00.0", "/sys/devices/pci0005:00", INTEL, 0x1563, speed=10000, numa=0,
                   cpus=cpus[0], driver="ixgbe")
    tree.default_route("enP5p9s0")
    for i in range(2):
        tree.numa_node(i, cpus[i], 480)
    for i in range(2, 34):  # memory of the GPUs shows as nodes without processors
        tree.numa_node(i, "", 0)
    tree.kernel(release, f"BOOT_IMAGE=/vmlinuz-{release} root=/dev/nvme0n1p2 ro init_on_alloc=0", hypervisor=False,
                arch="aarch64")
    tree.process(memory_gib=960, cpus="0-143", n_cpus=144, shm="size=503316480k")
    software.system(tree, AARCH64)
    software.driver(tree, AARCH64, release=release, override=False)
    software.doca(tree, AARCH64, release)
    software.cuda(tree, AARCH64)
    tree.append("/proc/devices", "")
    tree.replace("/proc/devices", "508 nvidia-caps\n", "508 nvidia-caps\n509 nvidia-caps-imex-channels\n")
    for i in range(4):
        tree.device_node(f"/dev/nvidia-caps-imex-channels/channel{i}")
    tree.environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/root", "LANG": "C.UTF-8"}
    return tree


# --- small ones ---


def vm_flat():
    """A virtual machine that puts all its devices on one bus and says nothing about NUMA nodes."""
    tree = Tree()
    root = "/sys/devices/pci0000:00"
    release = "5.15.0-1066-cloud"
    for i in range(4):
        tree.gpu(f"0000:00:{0x10 + i:02x}.0", root, i, "L40S", cpus="0-63", driver_version=software.DRIVER,
                 link=UNKNOWN_LINK)
    for i in range(4):
        tree.nic(f"mlx5_{i}", f"0000:00:{0x18 + i:02x}.0", root, netdev=f"eth{i + 1}", cpus="0-63",
                 rate="200 Gb/sec (4X HDR)", link=UNKNOWN_LINK, **VIRTUAL_FUNCTION)
    tree.interface("eth0", "0000:00:03.0", root, 0x1AF4, 0x1041, cpus="0-63", driver="virtio-pci", link=UNKNOWN_LINK)
    tree.default_route("eth0")
    tree.numa_node(0, "0-63", 512)
    tree.kernel(release, f"BOOT_IMAGE=/vmlinuz-{release} root=/dev/vda1 ro", hypervisor=True, vendor="AuthenticAMD",
                model="AMD EPYC 9354 32-Core Processor")
    tree.process(memory_gib=512, cpus="0-63", n_cpus=64, shm="size=264241152k")
    software.system(tree)
    software.driver(tree, X86_64, release=release, override=False)
    software.doca(tree, X86_64, release)
    software.cuda(tree, X86_64)
    tree.environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/root", "LANG": "C.UTF-8"}
    return tree


def laptop():
    """One GPU, no RDMA."""
    tree = Tree()
    release = "6.14.0-37-generic"
    port = tree.bridge("0000:00:01.0", "/sys/devices/pci0000:00", numa=-1, cpus="0-15")
    tree.gpu("0000:01:00.0", port, 0, "4060", cpus="0-15", driver_version=software.DRIVER,
             link=("16.0 GT/s PCIe", 8))
    wifi = tree.bridge("0000:00:1c.0", "/sys/devices/pci0000:00", numa=-1, cpus="0-15")
    tree.interface("wlp2s0", "0000:02:00.0", wifi, INTEL, 0x2725, class_code=0x028000, cpus="0-15", driver="iwlwifi",
                   link=("5.0 GT/s PCIe", 1))
    tree.default_route("wlp2s0")
    tree.numa_node(0, "0-15", 32)
    tree.kernel(release, f"BOOT_IMAGE=/boot/vmlinuz-{release} root=/dev/mapper/vg-root ro quiet splash",
                hypervisor=False, model="13th Gen Intel(R) Core(TM) i7-13700H")
    tree.process(memory_gib=32, cpus="0-15", n_cpus=16, memlock="4208635904", shm="size=16777216k")
    software.system(tree)
    software.driver(tree, X86_64, release=release, override=False, peermem=False)
    software.cuda(tree, X86_64)
    tree.environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/home/user", "LANG": "C.UTF-8"}
    return tree


def empty():
    """Nothing at all."""
    return Tree()


MACHINES = {
    "a4": a4,
    "a3u": a3u,
    "h100": h100,
    "h100-4nic": h100_4nic,
    "h100-16nic": h100_16nic,
    "gb200": gb200,
    "vm-flat": vm_flat,
    "laptop": laptop,
    "empty": empty,
}
