# SPDX-License-Identifier: Apache-2.0
"""More healthy machines of clouds, makers and sites, and for some of them a fault, or what looks like one.

As field.py: each is one function, whose first sentence says what it is and what is unusual about it.
"""
import field
import golden
import software
import tree as trees
import variants
from field import (AMAZON, AARCH64, BLUEFIELD3, BROADCOM, CPUS_H100, CX6, CX8, DGX_SWITCHES, DOWNSTREAM, INTEL,
                   MELLANOX, NVIDIA, PLAIN, UNKNOWN_LINK, UPSTREAM, X86_64, Tree, aws, azure, bare, container,
                   cpu_lists, deepep, ethernet, hgx, management, memory, nvswitches, product, relative, system)
from kinds import remove_nic, without_rdma
from rules import log, off_the_bus, without_peermem
from variants import nic_folder, nic_port, pci_folder, set_state

HPE = 0x17DB
EFA_400 = "400 Gb/sec (4X NDR)"

trees.GPU_MODELS.update({
    "H20": ("NVIDIA H20", 0x2329, 0x030200, (9, 0), 18, "96.00.00.00.05"),
    "A100-PCIE": ("NVIDIA A100 80GB PCIe", 0x20B5, 0x030200, (8, 0), 12, "92.00.00.00.02"),
    "H200-NVL": ("NVIDIA H200 NVL", 0x233B, 0x030200, (9, 0), 18, "96.00.00.00.06"),
    "GB300": ("NVIDIA GB300", 0x31C2, 0x030200, (10, 3), 18, "97.00.00.00.04"),
    "GB10": ("NVIDIA GB10", 0x2E12, 0x030000, (12, 1), 0, "98.00.00.00.02"),
    "DISPLAY": ("NVIDIA DGX Display", 0x1FB0, 0x030000, (7, 5), 0, "90.00.00.00.01"),
})


machines = {}
changes = []
machine, change = variants.machines_into(machines), variants.changes_into(changes)


# --- Azure ---


def netvsc(tree, vf, synthetic="eth0"):
    """Accelerated networking: the virtual function is a member of the interface that Hyper-V emulates."""
    tree.put_all(f"/sys/class/net/{synthetic}", {"operstate": "up\n", "mtu": "1500\n", "speed": "100000\n",
                                                "carrier": "1\n", "type": "1\n", "address": "00:00:5e:00:53:e0\n"})
    tree.link(f"/sys/class/net/{synthetic}/lower_{vf}", f"../{vf}")


@machine("azure-nd-h200-v5")
def azure_nd_h200():
    """Azure ND H200 v5: NVSwitches in PCI domains of their own, the uplink below an interface of Hyper-V."""
    tree = azure("H200", rate="400 Gb/sec (4X NDR)", size="ndv5")
    for i in range(4):
        domain = 0x0201 + i
        tree.pci(f"{domain:04x}:00:00.0", f"/sys/devices/LNXSYSTM:00/VMBUS:00/{domain:08d}/pci{domain:04x}:00", NVIDIA,
                 0x22A3, 0x068000, numa=0, cpus="0-47", driver="nvidia", link=UNKNOWN_LINK)
    netvsc(tree, "enP35414s1")
    tree.append("/var/lib/dpkg/status", software.package("nvidia-fabricmanager-580", f"{software.DRIVER}-1"))
    memory(tree, 141)
    return tree


@machine("azure-nd-gb200-v6")
def azure_nd_gb200():
    """Azure ND GB200 v6: a virtual machine with the four GPUs and four InfiniBand functions of a tray, on ARM."""
    tree = Tree()
    for i in range(4):
        place = {"numa": i // 2, "cpus": f"{64 * (i // 2)}-{64 * (i // 2) + 63}"}
        for domain, what in ((0x0008 + i, "gpu"), (0x0101 + i, "nic")):
            folder = f"/sys/devices/LNXSYSTM:00/VMBUS:00/{domain:08d}/pci{domain:04x}:00"
            if what == "gpu":
                tree.gpu(f"{domain:04x}:00:00.0", folder, i, "GB200", driver_version=software.DRIVER, fabric="ready",
                         link=UNKNOWN_LINK, **place)
            else:
                tree.nic(f"mlx5_ib{i}", f"{domain:04x}:00:00.0", folder, netdev=f"ib{i}", link_layer="InfiniBand",
                         device=0x101E, hca="MT4126", link=UNKNOWN_LINK, **place)
    tree.nic("mlx5_an0", "b1d2:00:02.0", "/sys/devices/LNXSYSTM:00/VMBUS:00/0000b1d2/pcib1d2:00", netdev="enP45522s1",
             rate="160 Gb/sec", device=0x101E, hca="MT4126", link=UNKNOWN_LINK, numa=0, cpus="0-63")
    netvsc(tree, "enP45522s1")
    tree.default_route("eth0")
    system(tree, release="6.8.0-1030-azure-nvidia-64k", hypervisor=True, arch=AARCH64, n_cpus=128, memory=860,
           cmdline="")
    tree.replace("/proc/devices", "508 nvidia-caps\n", "508 nvidia-caps\n509 nvidia-caps-imex-channels\n")
    tree.device_node("/dev/nvidia-caps-imex-channels/channel0")
    product(tree, "Virtual Machine", "Microsoft Corporation")
    return tree


# --- AWS ---


@machine("aws-p6-b200")
def aws_p6():
    """AWS p6-b200.48xlarge: one EFA of 400 Gb/s for each GPU."""
    return aws("B200", "p6-b200.48xlarge", 8, rate=EFA_400)


@machine("aws-g6e")
def aws_g6e():
    """AWS g6e.48xlarge: 8 L40S without NVLink, four EFA adapters."""
    return aws("L40S", "g6e.48xlarge", 4, rate="100 Gb/sec (4X EDR)")


@machine("aws-p5-half-pod")
def aws_p5_pod():
    """A pod on EKS with four of eight GPUs and their 16 of 32 adapters; sysfs shows all."""
    tree = aws("H100", "p5.48xlarge", 32, rate="100 Gb/sec (4X EDR)")
    container(tree, kubernetes=True)
    tree.answers["nvml"]["gpus"] = tree.answers["nvml"]["gpus"][4:]
    for i in range(4):
        forget_device(tree, f"/dev/nvidia{i}")
    for i in range(16):
        forget_device(tree, f"/dev/infiniband/uverbs{i}")
    return tree


def forget_device(tree, path):
    tree.entries.pop(path)
    del tree.stats[path]


# --- other clouds ---


@machine("oci-bm-h100")
def oci_bm():
    """Oracle's bare metal: 8 cards with two ports of 200 Gb/s for 8 H100, and two cards for the other network."""
    tree = Tree()
    names = iter(f"mlx5_{i}" for i in range(18))
    for gpu, (host, switch, nic, gpu_bus, numa) in enumerate(DGX_SWITCHES):
        place = {"numa": numa, "cpus": CPUS_H100[numa]}
        port = tree.bridge(f"0000:{host:02x}:01.0", f"/sys/devices/pci0000:{host:02x}", **place)
        up = tree.bridge(f"0000:{switch:02x}:00.0", port, vendor=BROADCOM, device=0xC030, port_type=UPSTREAM, **place)
        down = tree.bridge(f"0000:{switch + 1:02x}:00.0", up, vendor=BROADCOM, device=0xC030, port_type=DOWNSTREAM,
                           **place)
        for function in range(2):
            tree.nic(next(names), f"0000:{nic:02x}:00.{function}", down, netdev=f"rdma{2 * gpu + function}",
                     rate="200 Gb/sec (4X HDR)", **place)
        down = tree.bridge(f"0000:{switch + 1:02x}:1f.0", up, vendor=BROADCOM, device=0xC030, port_type=DOWNSTREAM,
                           **place)
        tree.gpu(f"0000:{gpu_bus:02x}:00.0", down, gpu, "H100", driver_version=software.DRIVER, fabric="ready", **place)
        if gpu in (0, 4):
            port = tree.bridge(f"0000:{0x29 + gpu:02x}:01.0", f"/sys/devices/pci0000:{0x29 + gpu:02x}", **place)
            tree.nic(next(names), f"0000:{0x2a + gpu:02x}:00.0", port, netdev=f"eth{gpu // 4}",
                     rate="100 Gb/sec (4X EDR)", device=0x101D, hca="MT4125", **place)
    tree.default_route("eth0")
    nvswitches(tree, 4)
    bare(tree, "5.15.0-1072-oracle")
    rails = [f"mlx5_{i}" for i in range(18) if i not in (2, 11)]
    tree.environment.update({"NCCL_IB_HCA": "=" + ",".join(rails), "NCCL_IB_GID_INDEX": "3", "NCCL_IB_TC": "41",
                             "NCCL_IB_SL": "0", "NCCL_IB_QPS_PER_CONNECTION": "4", "NCCL_CROSS_NIC": "2",
                             "NCCL_SOCKET_IFNAME": "eth0"})
    return tree


@machine("hgx-h20-bonded-rails")
def h20_bonded_rails():
    """HGX H20 of a Chinese cloud: each rail is a bond of a card's two ports, one RDMA device for both functions."""
    tree = hgx("H20", layer="Ethernet", name=lambda i: f"mlx5_bond_{i}", netdev=lambda i: f"ens{i}f0np0")
    for i in range(8):
        lag(tree, i)
    ethernet(tree)
    nvswitches(tree, 4)
    bare(tree)
    tree.environment.update({"NCCL_IB_HCA": "mlx5_bond", "NCCL_IB_GID_INDEX": "3", "NCCL_IB_TC": "136",
                             "NCCL_IB_TIMEOUT": "22", "NCCL_SOCKET_IFNAME": "eno1"})
    return tree


def lag(tree, i):
    """The second function of the card has an interface, and no RDMA device of its own."""
    name, bond = f"mlx5_bond_{i}", f"bond{i}"
    first = nic_folder(tree, name).split("/infiniband/")[0]
    parent, address = first.rsplit("/", 1)
    numa = int(tree.text(f"{first}/numa_node"))
    tree.interface(f"ens{i}f1np1", address[:-1] + "1", parent, MELLANOX, 0x1021, speed=200000, numa=numa,
                   cpus=CPUS_H100[numa], driver="mlx5_core")
    members = (f"ens{i}f0np0", f"ens{i}f1np1")
    tree.put_all(f"/sys/class/net/{bond}", {
        "operstate": "up\n", "mtu": "9000\n", "speed": "400000\n", "carrier": "1\n", "type": "1\n",
        "address": f"00:00:5e:00:53:a{i}\n", "bonding/slaves": " ".join(members) + "\n",
        "bonding/mode": "802.3ad 4\n"})
    tree.append("/sys/class/net/bonding_masters", f"{bond} ")
    for member in members:
        folder = tree.real(f"/sys/class/net/{member}")
        tree.put(f"{folder}/mtu", "9000\n")
        tree.put_all(f"{folder}/bonding_slave", {"mii_status": "up\n", "state": "active 0\n"})
        tree.link(f"{folder}/master", relative(folder, f"/sys/class/net/{bond}"))
        tree.link(f"/sys/class/net/{bond}/lower_{member}", f"../{member}")
    port = nic_port(tree, name)
    for path in [path for path in tree.entries if path.startswith(f"{port}/gid_attrs/ndevs/")]:
        tree.put(path, f"{bond}\n")


@machine("kvm-passthrough")
def kvm_passthrough():
    """A virtual machine with a whole board: each device below a port of its own, no NUMA nodes, shared NVSwitches."""
    tree = Tree()
    cpus = "0-159"
    for i in range(8):
        for slot, what in ((2 + i, "gpu"), (0x10 + i, "nic")):
            port = tree.bridge(f"0000:00:{slot:02x}.0", "/sys/devices/pci0000:00", vendor=0x1B36, device=0x000C,
                               cpus=cpus, link=("2.5 GT/s PCIe", 1), link_max=("16.0 GT/s PCIe", 32))
            if what == "gpu":
                tree.gpu(f"0000:{0x10 + i:02x}:00.0", port, i, "H200", driver_version=software.DRIVER, cpus=cpus,
                         fabric="ready")
            else:
                tree.nic(f"mlx5_{i}", f"0000:{0x30 + i:02x}:00.0", port, netdev=f"ibp{0x30 + i}s0", cpus=cpus,
                         link_layer="InfiniBand", device=0x101E, hca="MT4126")
    tree.interface("enp1s0", "0000:01:00.0", "/sys/devices/pci0000:00", 0x1AF4, 0x1041, cpus=cpus, driver="virtio-pci",
                   link=UNKNOWN_LINK)
    tree.default_route("enp1s0")
    system(tree, release="6.8.0-87-generic", hypervisor=True, n_cpus=160, memory=1600, nodes=1, cmdline="")
    product(tree, "Standard PC (Q35 + ICH9, 2009)", "QEMU")
    memory(tree, 141)
    return tree


@machine("gke-a4-dranet-half")
def gke_dranet():
    """A pod on A4 to which DRANET moved four NICs: the RDMA devices of the others are in another name space."""
    tree = golden.a4()
    container(tree, kubernetes=True)
    tree.answers["nvml"]["gpus"] = tree.answers["nvml"]["gpus"][:4]
    for i in range(4, 8):
        forget_device(tree, f"/dev/nvidia{i}")
        other_namespace(tree, f"mlx5_{i}")
    tree.environment["DEEP_EP_DEVICE_TO_HCA_MAPPING"] = field.mapping(f"mlx5_{i}" for i in range(4))
    return tree


def other_namespace(tree, name):
    """The PCI function stays; its RDMA device and its interface are of another network name space."""
    pci = nic_folder(tree, name).split("/infiniband/")[0]
    address = pci.rsplit("/", 1)[1]
    uverbs = next(path for path in tree.entries if path.startswith(f"{pci}/infiniband_verbs/")).split("/")[-2]
    for path in list(tree.entries):
        target = getattr(tree.entries[path], "target", "")
        if path.startswith((f"{pci}/infiniband", f"{pci}/net/")) or (
                f"/{address}/" in target + "/" and not path.startswith(("/sys/bus/pci/", "/sys/kernel/"))):
            del tree.entries[path]
    forget_device(tree, f"/dev/infiniband/{uverbs}")


# --- racks of NVLink ---


@machine("gb300-nvl72")
def gb300():
    """A tray of GB300 NVL72: ConnectX-8 at 800 Gb/s, each with a function for data direct; two ports of a BlueField."""
    tree = Tree()
    cpus = ["0-71", "72-143"]
    for i, domain in enumerate((0x0008, 0x0009, 0x0018, 0x0019)):
        place = {"numa": i // 2, "cpus": cpus[i // 2]}
        port = tree.bridge(f"{domain:04x}:00:00.0", f"/sys/devices/pci{domain:04x}:00", vendor=NVIDIA, device=0x22B8,
                           **place)
        up = tree.bridge(f"{domain:04x}:01:00.0", port, vendor=MELLANOX, device=0x197B, port_type=UPSTREAM, **place)
        for slot in (0, 1, 2):
            down = tree.bridge(f"{domain:04x}:02:{slot:02x}.0", up, vendor=MELLANOX, device=0x197B,
                               port_type=DOWNSTREAM, **place)
            if slot == 0:
                tree.nic(f"mlx5_{i}", f"{domain:04x}:03:00.0", down, netdev=f"ibP{domain}p3s0",
                         link_layer="InfiniBand", **CX8, **place)
            elif slot == 1:
                tree.pci(f"{domain:04x}:04:00.0", down, MELLANOX, 0x2100, 0x080100, driver="mlx5_data_direct", **place)
            else:
                tree.gpu(f"{domain:04x}:06:00.0", down, i, "GB300", driver_version=software.DRIVER, fabric="ready",
                         link=("64.0 GT/s PCIe", 16), **place)
    place = {"numa": 0, "cpus": cpus[0]}
    port = tree.bridge("0006:00:00.0", "/sys/devices/pci0006:00", vendor=NVIDIA, device=0x22B1, **place)
    for function in range(2):
        tree.nic(f"mlx5_{4 + function}", f"0006:03:00.{function}", port, netdev=f"enP6p3s0f{function}np{function}",
                 rate="200 Gb/sec (4X HDR)", **BLUEFIELD3, **place)
    tree.default_route("enP6p3s0f0np0")
    system(tree, release="6.14.0-1012-nvidia-64k", arch=AARCH64, n_cpus=144, memory=960, cmdline="init_on_alloc=0")
    tree.replace("/proc/devices", "508 nvidia-caps\n", "508 nvidia-caps\n509 nvidia-caps-imex-channels\n")
    tree.device_node("/dev/nvidia-caps-imex-channels/channel0")
    memory(tree, 279)
    return tree


@machine("hgx-b200-nvlink-management")
def b200_nvlink_management():
    """HGX B200 of another maker: two ConnectX-7 on the board lead to the NVSwitches, and look like InfiniBand NICs."""
    tree = hgx("B200")
    for i in range(4):
        place = {"numa": 0, "cpus": CPUS_H100[0]}
        bus = 0x05 + i // 2
        port = f"/sys/devices/pci0000:00/0000:00:0{i // 2 + 2}.0"
        if i % 2 == 0:
            port = tree.bridge(f"0000:00:0{i // 2 + 2}.0", "/sys/devices/pci0000:00", **place)
        tree.nic(f"mlx5_{8 + i}", f"0000:{bus:02x}:00.{i % 2}", port, netdev=f"ibp{bus}s0f{i % 2}",
                 link_layer="InfiniBand", firmware="28.42.1274", link=("8.0 GT/s PCIe", 2), **place)
        tree.put(f"{nic_port(tree, f'mlx5_{8 + i}')}/sm_lid", "0x7\n")
    ethernet(tree)
    return bare(tree)


# --- cards and small machines ---


@machine("l40s-nps4")
def l40s_nps4():
    """8 L40S and 2 NICs on two EPYC with four NUMA nodes each; no NVLink at all."""
    tree = Tree()
    cpus = cpu_lists(8)
    for gpu in range(8):
        numa = gpu
        place = {"numa": numa, "cpus": cpus[numa]}
        bus = 0x20 + 0x10 * gpu
        port = tree.bridge(f"0000:{bus - 1:02x}:01.1", f"/sys/devices/pci0000:{bus - 1:02x}", vendor=0x1022,
                           device=0x14AB, **place)
        tree.gpu(f"0000:{bus:02x}:00.0", port, gpu, "L40S", driver_version=software.DRIVER,
                 link=("16.0 GT/s PCIe", 16), **place)
        if gpu in (1, 5):
            port = tree.bridge(f"0000:{bus - 1:02x}:03.1", f"/sys/devices/pci0000:{bus - 1:02x}", vendor=0x1022,
                               device=0x14AB, **place)
            tree.nic(f"mlx5_{gpu // 4}", f"0000:{bus + 1:02x}:00.0", port, netdev=f"ens{gpu}np0",
                     rate="200 Gb/sec (4X HDR)", **place)
    ethernet(tree)
    return bare(tree, nodes=8, memory=1536, vendor="AuthenticAMD", model="AMD EPYC 9554 64-Core Processor")


@machine("a100-pcie")
def a100_pcie():
    """Four A100 as cards without bridges: the driver counts twelve NVLinks, none of which is connected."""
    tree = Tree()
    for gpu in range(4):
        numa = gpu // 2
        place = {"numa": numa, "cpus": CPUS_H100[numa]}
        bus = (0x17, 0x3A, 0x97, 0xBA)[gpu]
        port = tree.bridge(f"0000:{bus - 1:02x}:01.0", f"/sys/devices/pci0000:{bus - 1:02x}", **place)
        tree.gpu(f"0000:{bus:02x}:00.0", port, gpu, "A100-PCIE", driver_version=software.DRIVER, nvlinks="down",
                 link=("16.0 GT/s PCIe", 16), **place)
    place = {"numa": 0, "cpus": CPUS_H100[0]}
    port = tree.bridge("0000:4a:01.0", "/sys/devices/pci0000:4a", **place)
    tree.nic("mlx5_0", "0000:4b:00.0", port, netdev="ibs1", link_layer="InfiniBand", **CX6, **place)
    ethernet(tree)
    return bare(tree, "4.18.0-553.el8_10.x86_64", memory=1024)


@machine("dgx-station-a100")
def dgx_station():
    """Four A100 tied to each other, and a small card for the screen that the same driver has."""
    tree = Tree()
    addresses = [f"0000:{bus:02x}:00.0" for bus in (0x01, 0x47, 0x81, 0xC2)]
    for gpu, address in enumerate(addresses):
        port = tree.bridge(f"0000:{int(address[5:7], 16) - 1:02x}:01.1",
                           f"/sys/devices/pci0000:{int(address[5:7], 16) - 1:02x}", numa=0, cpus="0-127")
        tree.gpu(address, port, gpu, "A100", driver_version=software.DRIVER, numa=0, cpus="0-127",
                 link=("16.0 GT/s PCIe", 16))
        tree.nvml(gpu)["nvlinks"] = [other for other in addresses if other != address for _ in range(4)]
    port = tree.bridge("0000:c0:03.1", "/sys/devices/pci0000:c0", numa=0, cpus="0-127")
    tree.gpu("0000:c1:00.0", port, 4, "DISPLAY", driver_version=software.DRIVER, numa=0, cpus="0-127",
             link=("8.0 GT/s PCIe", 8))
    ethernet(tree, "enp3s0", "0000:03:00.0")
    bare(tree, nodes=1, n_cpus=128, memory=512)
    product(tree, "DGX Station A100 920-23487-2530-000", "NVIDIA")
    return tree


@machine("h200-nvl-quads")
def h200_nvl():
    """Eight H200 NVL cards in two groups of four by bridges, four NICs."""
    tree = Tree()
    addresses = []
    for gpu in range(8):
        numa = gpu // 4
        place = {"numa": numa, "cpus": CPUS_H100[numa]}
        bus = 0x20 + 0x10 * gpu
        port = tree.bridge(f"0000:{bus - 1:02x}:01.0", f"/sys/devices/pci0000:{bus - 1:02x}", **place)
        up = tree.bridge(f"0000:{bus:02x}:00.0", port, vendor=BROADCOM, device=0xC030, port_type=UPSTREAM, **place)
        down = tree.bridge(f"0000:{bus + 1:02x}:00.0", up, vendor=BROADCOM, device=0xC030, port_type=DOWNSTREAM,
                           **place)
        addresses.append(f"0000:{bus + 2:02x}:00.0")
        tree.gpu(addresses[-1], down, gpu, "H200-NVL", driver_version=software.DRIVER, **place)
        if gpu % 2 == 0:
            down = tree.bridge(f"0000:{bus + 1:02x}:01.0", up, vendor=BROADCOM, device=0xC030, port_type=DOWNSTREAM,
                               **place)
            tree.nic(f"rocep{bus + 3}s0", f"0000:{bus + 3:02x}:00.0", down, netdev=f"enp{bus + 3}s0np0", **BLUEFIELD3,
                     **place)
    for gpu in range(8):
        mates = [addresses[k] for k in range(gpu // 4 * 4, gpu // 4 * 4 + 4) if k != gpu]
        tree.nvml(gpu)["nvlinks"] = [mate for mate in mates for _ in range(6)]
    ethernet(tree)
    bare(tree, memory=1536)
    memory(tree, 141)
    return tree


@machine("rtx-pro-connectx8")
def rtx_pro_cx8():
    """Eight RTX PRO 6000 of which two each lie below the switch in a ConnectX-8."""
    tree = Tree()
    for pair in range(4):
        numa = pair // 2
        place = {"numa": numa, "cpus": CPUS_H100[numa]}
        bus = 0x20 + 0x20 * pair
        port = tree.bridge(f"0000:{bus - 1:02x}:01.0", f"/sys/devices/pci0000:{bus - 1:02x}", **place)
        up = tree.bridge(f"0000:{bus:02x}:00.0", port, vendor=MELLANOX, device=0x197B, port_type=UPSTREAM, **place)
        for slot in range(3):
            down = tree.bridge(f"0000:{bus + 1:02x}:{slot:02x}.0", up, vendor=MELLANOX, device=0x197B,
                               port_type=DOWNSTREAM, **place)
            address = f"0000:{bus + 2 + slot:02x}:00.0"
            if slot == 0:
                tree.nic(f"mlx5_{pair}", address, down, netdev=f"ens{pair}np0", device=0x1023, hca="MT4131",
                         firmware="40.45.1200", rate="400 Gb/sec (4X NDR)", link=("64.0 GT/s PCIe", 16), **place)
            else:
                tree.gpu(address, down, 2 * pair + slot - 1, "RTX6000", driver_version=software.DRIVER, **place)
    ethernet(tree)
    return bare(tree, "6.14.0-37-generic", memory=1024)


def four_superchips(tree):
    """Four GH200 tied to each other. Of each the first PCI domain for its NICs, what makes a port there, its place."""
    addresses = [f"{0x0009 + 0x10 * i:04x}:01:00.0" for i in range(4)]
    for i, address in enumerate(addresses):
        place = {"numa": i, "cpus": f"{72 * i}-{72 * i + 71}"}

        def port(domain, device=0x22B1, place=place):
            return tree.bridge(f"{domain:04x}:00:00.0", f"/sys/devices/pci{domain:04x}:00", vendor=NVIDIA,
                               device=device, **place)

        tree.gpu(address, port(int(address[:4], 16), 0x22B8), i, "GH200", driver_version=software.DRIVER, **place)
        tree.nvml(i)["nvlinks"] = [other for other in addresses if other != address for _ in range(6)]
        yield 0x10 * i, port, place


@machine("quad-gh200-slingshot")
def quad_gh200():
    """A node of a Cray EX: four GH200 tied to each other, four Slingshot NICs, which are no RDMA devices."""
    tree = Tree()
    for i, (domain, port, place) in enumerate(four_superchips(tree)):
        tree.interface(f"hsn{i}", f"{domain:04x}:01:00.0", port(domain), HPE, 0x0501, speed=200000, driver="cxi_ss1",
                       link=("16.0 GT/s PCIe", 16), **place)
    tree.default_route("nmn0")
    system(tree, release="6.4.0-150600.23.17_15.0.104-cray_shasta_c_64k", arch=AARCH64, nodes=4, n_cpus=288,
           memory=860, doca=False, peermem=False, cmdline="")
    tree.put("/etc/os-release", 'NAME="SLES"\nVERSION="15-SP6"\nID="sles"\nID_LIKE="suse"\n')
    tree.remove("/var/lib/dpkg/status")
    tree.library("/opt/cray/libfabric/ofi-nccl/lib/libnccl-net.so", soname="libnccl-net.so", needed=["libc.so.6"],
                 machine=AARCH64.machine)
    software.loads(tree, "/opt/cray/libfabric/ofi-nccl/lib/libnccl-net.so")
    tree.environment.update({"LD_LIBRARY_PATH": "/opt/cray/libfabric/ofi-nccl/lib",
                             "FI_PROVIDER": "cxi", "NCCL_NET": "AWS Libfabric", "NCCL_CROSS_NIC": "1",
                             "NCCL_SOCKET_IFNAME": "hsn", "NCCL_NET_GDR_LEVEL": "PHB", "SLURM_NTASKS": "8"})
    return tree


@machine("dgx-spark")
def dgx_spark():
    """GB10: one GPU, and two ports of 200 Gb/s that show as four devices; a cable is in one of them."""
    tree = Tree()
    place = {"numa": 0, "cpus": "0-19"}
    port = tree.bridge("000f:00:00.0", "/sys/devices/pci000f:00", vendor=NVIDIA, device=0x22D1, **place)
    tree.gpu("000f:01:00.0", port, 0, "GB10", driver_version=software.DRIVER, link=("2.5 GT/s PCIe", 1), **place)
    for domain, prefix in (("0000", "p1"), ("0002", "P2p1")):
        port = tree.bridge(f"{domain}:00:00.0", f"/sys/devices/pci{domain}:00", vendor=NVIDIA, device=0x22D0, **place)
        for function in range(2):
            name = f"roce{prefix}s0f{function}"
            tree.nic(name, f"{domain}:01:00.{function}", port, netdev=f"en{prefix}s0f{function}np{function}",
                     rate="200 Gb/sec (4X HDR)", link=("32.0 GT/s PCIe", 4), **place)
            if function == 1:
                set_state(tree, name, "1: DOWN", "3: Disabled")
                tree.put(f"{tree.real(f'/sys/class/net/en{prefix}s0f1np1')}/operstate", "down\n")
    tree.interface("enP7s7", "0007:01:00.0", "/sys/devices/pci0007:00", 0x10EC, 0x8127, speed=10000, driver="r8127",
                   link=("8.0 GT/s PCIe", 1), **place)
    tree.default_route("enP7s7")
    system(tree, release="6.11.0-1016-nvidia", arch=AARCH64, nodes=1, n_cpus=20, memory=120, peermem=False, cmdline="")
    product(tree, "NVIDIA_DGX_Spark", "NVIDIA")
    return tree


# --- systems ---


@machine("sles-hpc")
def sles():
    """SLES 15: rpm, libraries in /usr/lib64, the kernel's log in /var/log/messages and the journal alone."""
    tree = hgx("H100")
    management(tree, "mlx5_20", "mlx5_21")
    nvswitches(tree, 4)
    bare(tree, "6.4.0-150600.23.60-default", doca=False)
    as_rpm(tree, 'NAME="SLES"\nVERSION="15-SP6"\nVERSION_ID="15.6"\nID="sles"\nID_LIKE="suse"\n')
    return tree


def as_rpm(tree, release):
    tree.put("/etc/os-release", release)
    for path in ("/var/lib/dpkg/status", "/var/log/kern.log", "/etc/ld.so.conf.d/x86_64-linux-gnu.conf",
                 "/etc/ld.so.conf.d/libc.conf"):
        if tree.has(path):
            tree.remove(path)
    for path in list(tree.entries):
        if path.startswith(X86_64.lib + "/"):
            tree.entries["/usr/lib64" + path.removeprefix(X86_64.lib)] = tree.entries.pop(path)
    software.verbs(tree, X86_64, private=50, core="14.50.0", provider="24.50.0", folder="/usr/lib64")
    tree.put("/dev/kmsg",
             f"6,1,20000000,-;NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  {software.DRIVER}\n")


@machine("flatcar-gpu-operator")
def flatcar():
    """The node itself where the GPU operator's container has the driver: its libraries are below /run/nvidia/driver."""
    tree = hgx("H100")
    ethernet(tree)
    nvswitches(tree, 4)
    bare(tree, "6.6.95-flatcar", doca=False)
    tree.put("/etc/os-release", 'NAME="Flatcar Container Linux by Kinvolk"\nID=flatcar\nID_LIKE=coreos\n')
    tree.remove("/var/lib/dpkg/status")
    libraries = (f"{X86_64.lib}/libcuda", f"{X86_64.lib}/libnvidia-ml")
    for path in [path for path in tree.entries if path.startswith(libraries)]:
        tree.entries["/run/nvidia/driver" + path] = tree.entries.pop(path)
    tree.remove("/etc/ld.so.conf.d/000_cuda.conf")
    for path in [path for path in tree.entries if path.startswith("/usr/local/cuda")]:
        tree.remove(path)
    return tree


@machine("ordinary-user")
def ordinary_user():
    """A user without rights: neither the kernel's log nor the environment of others can be read."""
    tree = field.dgx("H200", "DGX H200", 4)
    tree.denied += ["/var/log/kern.log", "/dev/kmsg", "/proc/1/environ"]
    tree.put("/dev/kmsg", "")
    tree.environment.update({"HOME": "/home/user", "USER": "user"})
    return tree


@machine("ipv6-roce")
def ipv6_roce():
    """RoCE in a network with IPv6 alone: GIDs of global addresses, none of IPv4, and NCCL is told so."""
    tree = hgx("H200", layer="Ethernet")
    ethernet(tree)
    nvswitches(tree, 4)
    bare(tree)
    for i in range(8):
        port = nic_port(tree, f"mlx5_{i}")
        for index in (2, 3):
            tree.put(f"{port}/gids/{index}", f"2001:0db8:0000:000{i}:0200:5eff:fe00:530{i}\n")
    tree.environment["NCCL_IB_ADDR_FAMILY"] = "AF_INET6"
    tree.remove("/proc/net/route")
    zeros = "0" * 32
    tree.put("/proc/net/ipv6_route",
             f"{zeros} 00 {zeros} 00 fe800000000000000000000000000001 00000400 00000001 00000000 00000003     eno1\n")
    return tree


@machine("ipoib-only")
def ipoib_only():
    """A cluster without Ethernet: the default route goes over IPoIB on the first rail."""
    tree = hgx("H100")
    nvswitches(tree, 4)
    tree.default_route(f"ibp{DGX_SWITCHES[0][2]}s0")
    return bare(tree)


@machine("rails-in-namespaces")
def rails_in_namespaces():
    """InfiniBand whose IPoIB interfaces were moved into name spaces of containers; the RDMA devices are for all."""
    tree = hgx("H100")
    management(tree, "mlx5_20")
    nvswitches(tree, 4)
    bare(tree)
    for row in DGX_SWITCHES:
        name = f"ibp{row[2]}s0"
        tree.remove(tree.real(f"/sys/class/net/{name}"))
        del tree.entries[f"/sys/class/net/{name}"]
    return tree


def own_packages(tree, folder):
    """DeepEP and PyTorch are in `folder`, and nowhere else."""
    for path in tree.below("/opt/deepep/python") + tree.below(software.PYTHON):
        base = "/opt/deepep/python" if path.startswith("/opt") else software.PYTHON
        tree.entries[folder + path.removeprefix(base)] = tree.entries.pop(path)
    del tree.environment["PYTHONPATH"]


@machine("venv-of-the-system")
def venv_of_the_system():
    """A virtual environment that sees the system's packages, where DeepEP and PyTorch are."""
    tree = field.machines["dgx-h200-deepep"]()
    own_packages(tree, software.PYTHON)
    tree.put("/srv/train/venv/pyvenv.cfg", "home = /usr/bin\ninclude-system-site-packages = true\nversion = 3.12.3\n")
    tree.folder("/srv/train/venv/lib/python3.12/site-packages")
    tree.environment["VIRTUAL_ENV"] = "/srv/train/venv"
    return tree


@machine("packages-of-the-user")
def packages_of_the_user():
    """pip install --user: DeepEP and PyTorch below the home directory."""
    tree = field.machines["dgx-h200-deepep"]()
    own_packages(tree, "/root/.local/lib/python3.12/site-packages")
    return tree


# --- schedulers and containers ---


@machine("docker-two-gpus")
def docker_two_gpus():
    """docker run --gpus '"device=2,3"' --ipc host on a node of eight, with a network of its own and without RDMA."""
    tree = hgx("H100")
    management(tree, "mlx5_20", "mlx5_21")
    nvswitches(tree, 4)
    bare(tree)
    container(tree)
    tree.answers["nvml"]["gpus"] = tree.answers["nvml"]["gpus"][2:4]
    for i in (0, 1, 4, 5, 6, 7):
        forget_device(tree, f"/dev/nvidia{i}")
    tree.remove("/dev/infiniband")
    for path in [path for path in tree.stats if path.startswith("/dev/infiniband/")]:
        del tree.stats[path]
    for path in [path for path in tree.entries if path.startswith("/sys/class/net/") or "/net/" in path]:
        tree.entries.pop(path, None)
    tree.put_all("/sys/class/net/eth0", {"operstate": "up\n", "mtu": "1500\n", "type": "1\n", "speed": "10000\n"})
    tree.default_route("eth0")
    tree.environment.update({"NVIDIA_VISIBLE_DEVICES": "2,3", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"})
    return tree


@machine("mig-instance-pod")
def mig_instance_pod():
    """A pod with one instance of a GPU on a node of eight."""
    tree = hgx("H100")
    ethernet(tree)
    nvswitches(tree, 4)
    bare(tree)
    container(tree, kubernetes=True)
    memory(tree, 80)
    tree.answers["nvml"]["gpus"] = tree.answers["nvml"]["gpus"][1:2]
    tree.nvml(0)["mig"] = True
    for i in (0, 2, 3, 4, 5, 6, 7):
        forget_device(tree, f"/dev/nvidia{i}")
    for i in range(8):
        forget_device(tree, f"/dev/infiniband/uverbs{i}")
    tree.environment.update({"NVIDIA_VISIBLE_DEVICES": "MIG-00000000-0000-0000-0000-0000000000a1"})
    tree.put("/sys/fs/cgroup/cpu.max", "400000 100000\n")
    return tree


@machine("slurm-four-of-eight")
def slurm_four_of_eight():
    """Slurm gave a job four of eight GPUs by its device cgroup; all NICs are open to it."""
    tree = hgx("H100")
    management(tree, "mlx5_20", "mlx5_21")
    nvswitches(tree, 4)
    bare(tree)
    tree.answers["nvml"]["gpus"] = tree.answers["nvml"]["gpus"][4:]
    for i in range(4):
        tree.stats[f"/dev/nvidia{i}"]["access"] = "---"
    tree.environment.update({"CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_JOB_GPUS": "4,5,6,7", "SLURM_JOB_NUM_NODES": "1",
                             "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"})
    return tree


# --- faults ---


def ecc(tree, gpu):
    tree.nvml(gpu)["ecc_uncorrected"] = 7


@change("azure-nd-h200-v5/xid", "gpu-errors")
def azure_xid(tree):
    log(tree, "NVRM: Xid (PCI:0003:00:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.")
    del tree.answers["nvml"]["gpus"][2]


@change("azure-nd-h200-v5/init", "port-down")
def azure_init(tree):
    for i in range(8):
        tree.put(f"{nic_port(tree, f'mlx5_ib{i}')}/state", "2: INIT\n")


@change("aws-p6-b200/deepep", "ibgda-nic")
def deepep_on_efa(tree):
    software.doca(tree, X86_64, "6.8.0-1021-aws")
    field.peer_mapping(tree)
    path = tree.environment["LD_LIBRARY_PATH"]
    deepep(tree, archs=(100,))
    tree.environment["LD_LIBRARY_PATH"] += f":{path}"


@change("aws-p5-half-pod/other-half", "nic-access")
def adapters_of_other_gpus(tree):
    """The device plugins have chosen GPUs of one half and adapters of the other."""
    for i in range(16, 32):
        forget_device(tree, f"/dev/infiniband/uverbs{i}")
    for i in range(16):
        tree.device_node(f"/dev/infiniband/uverbs{i}")


@change("oci-bm-h100/flaps", "link-errors")
def flaps(tree):
    tree.put(f"{nic_port(tree, 'mlx5_7')}/counters/link_downed", "212\n")


@change("hgx-h20-bonded-rails/member", "bond")
def rail_with_a_dead_member(tree):
    """Half of the bandwidth is gone, and the device is active as before."""
    folder = tree.real("/sys/class/net/ens3f1np1")
    tree.put(f"{folder}/bonding_slave/mii_status", "down\n")
    tree.put(f"{folder}/operstate", "down\n")
    tree.put(f"{folder}/carrier", "0\n")


@change("hgx-h20-bonded-rails/rail-gone", "port-down")
def bonded_rail_gone(tree):
    pci = nic_folder(tree, "mlx5_bond_5").split("/infiniband/")[0]
    remove_nic(tree, "mlx5_bond_5")
    second = pci[:-1] + "1"
    tree.remove(second)
    del tree.entries[f"/sys/bus/pci/devices/{second.rsplit('/', 1)[1]}"]
    tree.remove("/sys/class/net/bond5")
    del tree.entries["/sys/class/net/ens5f1np1"]


@change("gb300-nvl72/passthrough", "iommu-gb200")
def passthrough_on_grace(tree):
    tree.replace("/proc/cmdline", "init_on_alloc=0", "init_on_alloc=0 iommu.passthrough=1")


@change("hgx-b200-nvlink-management/closed", "open-driver")
def closed_on_blackwell(tree):
    tree.replace("/proc/driver/nvidia/version", "NVIDIA UNIX Open Kernel Module for x86_64",
                 "NVIDIA UNIX x86_64 Kernel Module")
    tree.answers["nvml"] = {"driver": software.DRIVER, "gpus": []}
    for minor in range(8):
        forget_device(tree, f"/dev/nvidia{minor}")
    for path in [path for path in tree.entries if path.startswith("/proc/driver/nvidia/gpus/")]:
        del tree.entries[path]


@change("dgx-station-a100/nvlink", "nvlink")
def link_of_a_mesh_down(tree):
    tree.nvml(1)["nvlinks"][2] = "down"


@change("h200-nvl-quads/nvlink", "nvlink")
def bridge_not_seated(tree):
    for gpu in range(4, 8):
        tree.nvml(gpu)["nvlinks"] = ["down"] * 18


@change("dgx-spark/both-down", "port-down")
def no_cable_and_a_job(tree):
    """No port has a link, and NCCL is told to use them."""
    for prefix in ("p1", "P2p1"):
        name = f"roce{prefix}s0f0"
        set_state(tree, name, "1: DOWN", "3: Disabled")
    tree.environment["NCCL_IB_HCA"] = "rocep1s0f0,roceP2p1s0f0"


@change("sles-hpc/sxid", "sxid")
def sxid_in_kmsg(tree):
    tree.append("/dev/kmsg", "3,912,90000000,-;nvidia-nvswitch1: SXid (PCI:0000:06:00.0): 20034, Fatal, Link 30 LTSSM "
                             "Fault Up\n")


@change("sles-hpc/xid", "gpu-errors")
def xid_in_kmsg(tree):
    tree.append("/dev/kmsg", "3,913,90000000,-;NVRM: Xid (PCI:0000:43:00): 95, pid=4711, name=python3, Uncontained: "
                             "FBHUB. RST: Yes, D-RST: No\n")


def dnf_log(tree, *lines):
    tree.put("/var/log/dnf.rpm.log", "1970-01-01T00:00:00+0000 INFO --- logging initialized ---\n"
             + "".join(f"1970-01-01T00:00:01+0000 SUBDEBUG {line}\n" for line in lines))


def started(tree, version):
    tree.put("/var/log/fabricmanager.log",
             "[Jan 01 1970 00:00:10] [INFO] [tid 77] Fabric Manager version 535.54.03 is running with the following "
             "configuration options\n[Jan 01 1970 00:00:10] [INFO] [tid 77] Logging level = 4\n"
             f"[Jan 01 1970 01:00:10] [INFO] [tid 78] Fabric Manager version {version} is running with the following "
             "configuration options\n")


@change("sles-hpc/fabric-manager-old", "nvlink")
def fabric_manager_of_another_version(tree):
    """No fabric, and by its log the fabric manager is of another version: to start it again would not help."""
    started(tree, "570.124.06")
    for gpu in tree.answers["nvml"]["gpus"]:
        gpu["fabric"] = "starting"


@change("sles-hpc/mlx5-ib", "rdma-device")
def no_rdma_on_sles(tree):
    for name in [f"mlx5_{i}" for i in range(8)] + ["mlx5_20", "mlx5_21"]:
        without_rdma(tree, name)


@change("ordinary-user/shut", "gpu-access")
def files_of_root(tree):
    """NVreg_DeviceFileMode=0660, and the user is not of the group."""
    for name in [f"nvidia{i}" for i in range(8)] + ["nvidiactl", "nvidia-uvm"]:
        tree.stats[f"/dev/{name}"]["access"] = "---"
    tree.answers["nvml"] = {"error": "NVML: Insufficient Permissions"}


@change("dgx-h100-superpod/library-updated", "driver-skew")
def library_updated(tree):
    """An update at night: the libraries are new, the loaded module is not, and NVML says so."""
    for name in ("libcuda.so", "libnvidia-ml.so"):
        old = f"{X86_64.lib}/{name}.{software.DRIVER}"
        tree.entries[f"{X86_64.lib}/{name}.580.140.02"] = tree.entries.pop(old)
        tree.link(f"{X86_64.lib}/{name}.1", f"{name}.580.140.02")
    tree.answers["nvml"] = {"error": "NVML: Driver/library version mismatch"}


@change("docker-two-gpus/uvm", "uvm")
def no_uvm(tree):
    forget_device(tree, "/dev/nvidia-uvm")


@change("l40s-nps4/narrow", "slow-link")
def narrow_gpu(tree):
    tree.put(f"{pci_folder(tree, tree.nvml(3)['pci'])}/current_link_width", "4\n")


@change("l40s-nps4/gid", "gid")
def no_address(tree):
    """No IPv4 address: no GID that can be routed."""
    for nic in range(2):
        port = nic_port(tree, f"mlx5_{nic}")
        for index in (2, 3):
            tree.put(f"{port}/gids/{index}", trees.EMPTY_GID + "\n")
            tree.remove(f"{port}/gid_attrs/types/{index}")
            tree.remove(f"{port}/gid_attrs/ndevs/{index}")


def without_mapping(tree):
    """DeepEP without the mapping of pull request 466, and two GPUs that share what NVSHMEM takes."""
    for path in [path for path in tree.entries if path.endswith("/deep_ep/buffer.py") and "/opt/" not in path]:
        tree.put(path, software.buffer_py(call=False))


variants.set_up(change, (
    ("azure-nd-h200-v5/ecc", "gpu-errors", "The GPU has an address that no other number tells.",
     lambda tree: ecc(tree, 5),
     lambda tree: tree.environment.update(CUDA_VISIBLE_DEVICES="7,6,5,4,3,2,1,0")),
    ("aws-p6-b200/efa-gone", "port-down", "EFA gone.",
     lambda tree: remove_nic(tree, "rdmap97s0")),
    ("oci-bm-h100/port-gone", "port-down", "One function of a card with two.",
     lambda tree: remove_nic(tree, "mlx5_5")),
    ("oci-bm-h100/port-down", "port-down", "One port without link.",
     lambda tree: set_state(tree, "mlx5_5", "1: DOWN", "2: Polling")),
    ("oci-bm-h100/gpu-gone", "inventory", "GPU gone of bare metal.",
     lambda tree: off_the_bus(tree, "0000:61:00.0", 3)),
    ("oci-bm-h100/mtu", "mtu", "Small MTU.",
     lambda tree: tree.put(f"{tree.real('/sys/class/net/rdma9')}/mtu", "1500\n")),
    ("kvm-passthrough/nic-gone", "port-down", "NIC gone of a guest.",
     lambda tree: remove_nic(tree, "mlx5_6")),
    ("kvm-passthrough/fabric", "nvlink", "Fabric not up.",
     lambda tree: variants.update_gpus(tree, fabric="starting")),
    ("gb300-nvl72/firmware", "firmware", "Odd cx8.",
     lambda tree: tree.put(f"{nic_folder(tree, 'mlx5_2')}/fw_ver", "40.44.1036\n")),
    ("gb300-nvl72/nic-down", "port-down", "Cx8 down.",
     lambda tree: set_state(tree, "mlx5_2", "1: DOWN", "2: Polling")),
    ("gb300-nvl72/imex", "imex", "No channel.",
     lambda tree: forget_device(tree, "/dev/nvidia-caps-imex-channels/channel0")),
    ("hgx-b200-nvlink-management/gpu-gone", "inventory",
     "No NVSwitch on the bus and no known name: but such boards have eight.",
     lambda tree: off_the_bus(tree, "0000:9d:00.0", 4)),
    ("hgx-b200-nvlink-management/umad", "nvlink",
     "The fabric manager does not start without ib_umad on such a board, whatever its version.",
     lambda tree: variants.update_gpus(tree, fabric="starting")),
    ("hgx-h100-rhel/fabric-manager", "fabric-manager",
     "Updated alone while the machine ran; rpm keeps no file that tells, dnf's log does.",
     lambda tree: dnf_log(tree, f"Installed: nvidia-fabric-manager-{software.DRIVER}-1.x86_64",
                          "Upgrade: nvidia-fabric-manager-580.140.02-1.x86_64",
                          f"Upgraded: nvidia-fabric-manager-{software.DRIVER}-1.x86_64")),
    ("hgx-h100-rhel/fabric-manager-right", "", "What is right: the driver's version.",
     lambda tree: dnf_log(tree, f"Installed: nvidia-fabric-manager-{software.DRIVER}-1.x86_64")),
    ("sles-hpc/fabric-manager-log", "", "What is right: the one that was started last is of the driver's version.",
     lambda tree: started(tree, software.DRIVER)),
    ("sles-hpc/peermem", "peermem", "Closed without peermem.",
     lambda tree: tree.replace("/proc/driver/nvidia/version", "NVIDIA UNIX Open Kernel Module for x86_64",
                               "NVIDIA UNIX x86_64 Kernel Module"),
     lambda tree: without_peermem(tree)),
    ("slurm-four-of-eight/quota-v1", "processors", "cgroup v1.",
     lambda tree: tree.put("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "100000\n"),
     lambda tree: tree.put("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")),
    ("venv-of-the-system/mapping", "mapping-inactive", "Venv mapping.",
     lambda tree: without_mapping(tree)),
    ("packages-of-the-user/mapping", "mapping-inactive", "User mapping.",
     lambda tree: without_mapping(tree)),
))


# --- variables alone ---

variants.set_variables(change, (
    # name, findings, variables, what it is
    ("azure-nd-h200-v5/hca-list", "nccl-hca", {"NCCL_IB_HCA": "mlx5_an"},
     "The list of another size, whose devices have other names."),
    ("hgx-h20-bonded-rails/one-rail", "nccl-hca", {"NCCL_IB_HCA": "=mlx5_bond_0"}, "'=' makes of the prefix a name."),
    ("ipoib-only/socket", "", {"NCCL_SOCKET_IFNAME": "ibp"},
     "What is right: NCCL's bootstrap over IPoIB, by a prefix."),
    ("rtx-pro-connectx8/sm-gdr", "", {"NCCL_NET_GDR_LEVEL": "3"}, "What is right: the level by its number."),
))
