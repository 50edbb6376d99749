# SPDX-License-Identifier: Apache-2.0
"""Healthy nodes on which one detail is unusual, or wrong in a way that its neighbours are not.

As nodes.py: what is expected was written down before epkit was asked.
"""
import field
import software
import tree as trees
import variants
from field import (AARCH64, BROADCOM, CPUS_H100, DGX_SWITCHES, DOWNSTREAM, NVIDIA, UNKNOWN_LINK, UPSTREAM, X86_64, Tree,
                   aws, bare, container, efa, ethernet, hgx, iommu_groups, management, memory, nvswitches, product,
                   relative, system)
from kinds import remove_nic, take_uverbs
from rules import extension, log
from sites import forget_device
from variants import nic_folder, nic_port, pci_folder, set_state

machines = {}
changes = []
machine, change = variants.machines_into(machines), variants.changes_into(changes)


# --- healthy ---


@machine("aws-p6e-gb200")
def aws_p6e():
    """AWS P6e-GB200: a tray with four GPUs on ARM, four EFA adapters of 400 Gb/s and an IMEX channel."""
    tree = Tree()
    for i, domain in enumerate((0x0008, 0x0009, 0x0018, 0x0019)):
        place = {"numa": i // 2, "cpus": f"{72 * (i // 2)}-{72 * (i // 2) + 71}"}
        port = tree.bridge(f"{domain:04x}:00:00.0", f"/sys/devices/pci{domain:04x}:00", vendor=NVIDIA, device=0x22B8,
                           **place)
        tree.gpu(f"{domain:04x}:01:00.0", port, i, "GB200", driver_version=software.DRIVER, fabric="ready", **place)
    for i, domain in enumerate((0x0000, 0x0002, 0x0010, 0x0012)):
        place = {"numa": i // 2, "cpus": f"{72 * (i // 2)}-{72 * (i // 2) + 71}"}
        port = tree.bridge(f"{domain:04x}:00:00.0", f"/sys/devices/pci{domain:04x}:00", vendor=NVIDIA, device=0x22B1,
                           **place)
        efa(tree, i, f"{domain:04x}:{0x51 + i:02x}:00.0", port, rate="400 Gb/sec (4X NDR)", device=0xEFA3, **place)
    tree.interface("enP5p9s0", "0005:09:00.0", "/sys/devices/pci0005:00", 0x1D0F, 0xEC20, speed=100000, numa=0,
                   cpus="0-71", driver="ena", link=UNKNOWN_LINK)
    tree.default_route("enP5p9s0")
    system(tree, release="6.8.0-1021-aws-64k", hypervisor=False, arch=AARCH64, n_cpus=144, memory=960, doca=False,
           cmdline="", peermem=False)
    tree.replace("/proc/devices", "508 nvidia-caps\n", "508 nvidia-caps\n509 nvidia-caps-imex-channels\n")
    tree.device_node("/dev/nvidia-caps-imex-channels/channel0")
    product(tree, "p6e-gb200.36xlarge", "Amazon EC2")
    software.load_module(tree, "efa", "2.15.0")
    return tree


@machine("alibaba-erdma")
def alibaba_erdma():
    """Eight GPUs of a cloud whose only RDMA device is its own (eRDMA, iWARP), on the interface of the default route."""
    tree = Tree()
    for i in range(8):
        tree.gpu(f"0000:00:{8 + i:02x}.0", "/sys/devices/pci0000:00", i, "A100", driver_version=software.DRIVER,
                 numa=0, cpus="0-127", link=UNKNOWN_LINK)
    pci = tree.pci("0000:00:05.0", "/sys/devices/pci0000:00", 0x1DED, 0x107F, 0x020000, numa=0, cpus="0-127",
                   driver="erdma", link=UNKNOWN_LINK)
    folder = f"{pci}/infiniband/erdma_0"
    tree.put_all(folder, {"node_type": "4: RNIC\n", "fw_ver": "0.2.0\n", "node_guid": "0200:5eff:fe00:5301\n",
                          "sys_image_guid": "0200:5eff:fe00:5301\n", "node_desc": "\n"})
    tree.link(f"{folder}/device", "../../../0000:00:05.0")
    tree.link("/sys/class/infiniband/erdma_0", relative("/sys/class/infiniband", folder))
    tree.put_all(f"{folder}/ports/1", {
        "state": "4: ACTIVE\n", "phys_state": "5: LinkUp\n", "rate": "200 Gb/sec (4X HDR)\n",
        "link_layer": "Ethernet\n", "cap_mask": "0x00000000\n", "lid": "0x0\n", "sm_lid": "0x0\n"})
    tree.put(f"{folder}/ports/1/gids/0", "0016:3e00:0001:0000:0000:0000:0000:0000\n")
    tree.put(f"{folder}/ports/1/gid_attrs/ndevs/0", "eth0\n")
    tree.put(f"{folder}/ports/1/gid_attrs/types/0", "IB/RoCE v1\n")
    tree.add_uverbs("erdma_0", pci, "0000:00:05.0")
    tree.netdev("eth0", pci, speed=-1)
    tree.default_route("eth0")
    system(tree, release="5.10.134-18.al8.x86_64", hypervisor=True, n_cpus=128, memory=1000, nodes=1, cmdline="",
           doca=False)
    product(tree, "Alibaba Cloud ECS", "Alibaba Cloud")
    return tree


@machine("hgx-a100-sixteen")
def hgx_a100_sixteen():
    """Two base boards in one machine: 16 A100, 12 NVSwitches, eight NICs for two GPUs each."""
    tree = Tree()
    for pair, (host, switch, nic, gpu_bus, half) in enumerate(DGX_SWITCHES):
        place = {"numa": half, "cpus": CPUS_H100[half]}
        port = tree.bridge(f"0000:{host:02x}:01.0", f"/sys/devices/pci0000:{host:02x}", **place)
        up = tree.bridge(f"0000:{switch:02x}:00.0", port, vendor=BROADCOM, device=0xC010, port_type=UPSTREAM, **place)
        for slot in range(3):
            down = tree.bridge(f"0000:{switch + 1:02x}:{slot:02x}.0", up, vendor=BROADCOM, device=0xC010,
                               port_type=DOWNSTREAM, **place)
            if slot == 2:
                tree.nic(f"mlx5_{pair}", f"0000:{nic:02x}:00.0", down, netdev=f"ib{pair}", link_layer="InfiniBand",
                         **{**field.CX6, **place})
            else:
                tree.gpu(f"0000:{gpu_bus + slot:02x}:00.0", down, 2 * pair + slot, "A100",
                         driver_version=software.DRIVER, **place)
    ethernet(tree)
    nvswitches(tree, 12, 0x1AF1)
    return bare(tree)


@machine("oci-vm-one-vf")
def vm_with_one_function():
    """A virtual machine with two GPUs over NVLink bridges and one virtual function of a RoCE NIC, with the route."""
    tree = Tree()
    for i in range(2):
        tree.gpu(f"0000:{0x10 + i:02x}:00.0", "/sys/devices/pci0000:00", i, "A100-PCIE", cpus="0-31",
                 nvlinks=f"0000:{0x11 - i:02x}:00.0", driver_version=software.DRIVER, link=UNKNOWN_LINK)
    tree.nic("mlx5_0", "0000:00:03.0", "/sys/devices/pci0000:00", netdev="ens3", device=0x101E, hca="MT4126",
             rate="100 Gb/sec (4X EDR)", cpus="0-31", link=UNKNOWN_LINK)
    tree.default_route("ens3")
    system(tree, release="5.15.0-1072-oracle", hypervisor=True, n_cpus=32, memory=240, nodes=1, cmdline="")
    return tree


@machine("hgx-h100-weka-and-dpu")
def storage_of_three_kinds():
    """Rails of InfiniBand; two BlueField-3 for management in a bond, two ConnectX-7 Ethernet for storage, one idle."""
    tree = hgx("H100")
    management(tree, "mlx5_20", "mlx5_21", device=0xA2DC, hca="MT41692", rate="200 Gb/sec (4X HDR)")
    field.bond(tree, "eno1np0", "eno2np1")
    for i, (state, phys) in enumerate((("4: ACTIVE", "5: LinkUp"), ("1: DOWN", "3: Disabled"))):
        place = {"numa": i, "cpus": CPUS_H100[i]}
        port = tree.bridge(f"0000:{0x70 + 0x10 * i:02x}:01.0", f"/sys/devices/pci0000:{0x70 + 0x10 * i:02x}", **place)
        tree.nic(f"mlx5_{30 + i}", f"0000:{0x71 + 0x10 * i:02x}:00.0", port, netdev=f"stor{i}", **place)
        set_state(tree, f"mlx5_{30 + i}", state, phys)
    tree.default_route("bond0")
    nvswitches(tree, 4)
    return bare(tree)


@machine("hgx-h100-deepep-roce")
def deepep_roce():
    """HGX H100 over RoCE with nine rows of GIDs: link-local, IPv6 and IPv4, and jumbo frames."""
    tree = hgx("H100", layer="Ethernet")
    ethernet(tree)
    nvswitches(tree, 4)
    return bare(tree)


# --- NCCL's lists ---

ALL = ",".join(f"mlx5_{i}" for i in range(8))


def hca(tree, value):
    tree.environment["NCCL_IB_HCA"] = value


@change("dgx-h100-superpod/hca-quotes", "nccl-hca")
def quotes(tree):
    """A file of variables for a container, which keeps quotes."""
    hca(tree, f'"{ALL}"')


@change("dgx-h100-superpod/sockets", "nccl-disabled")
def sockets(tree):
    """NCCL_NET=Socket as a search for an error left it."""
    tree.environment["NCCL_NET"] = "Socket"


@change("dgx-h100-superpod/visible-part-of-uuid")
def beginning_of_uuid(tree):
    """What is right: CUDA takes the beginning of a UUID, as long as it is that of one GPU."""
    tree.environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpu["uuid"] for gpu in tree.answers["nvml"]["gpus"])


# --- GPUs, driver, fabric ---


@change("dgx-h100-superpod/mig-two", "mig")
def mig_on_two(tree):
    for gpu in tree.answers["nvml"]["gpus"]:
        gpu["mig"] = gpu["minor"] in (1, 5)


@change("dgx-h100-superpod/no-uvm", "uvm")
def no_uvm(tree):
    """No device file, and no setuid program that would make it."""
    tree.entries.pop("/dev/nvidia-uvm", None)
    tree.stats.pop("/dev/nvidia-uvm", None)
    tree.entries.pop("/usr/bin/nvidia-modprobe", None)


def package(tree, name, version, status="install ok installed"):
    text = software.package(name, version).replace("install ok installed", status)
    tree.append("/var/lib/dpkg/status", text)


def xid(tree, text, address="0000:43:00"):
    log(tree, f"NVRM: Xid (PCI:{address}): {text}")


@change("dgx-h100-superpod/xid-engines")
def engines(tree):
    """What is right: programs' errors in engines for copies and for video, and a limit of the InfoROM."""
    xid(tree, "39, pid=912, name=python3, CCMDs 00000000")
    xid(tree, "68, pid=912, name=python3, NVDEC0 Exception")
    xid(tree, "93, Exceeded a provisioned limit of writes")


def hide_gpus(tree, number):
    """The driver knows the GPUs, but sysfs of the container does not show the first of them."""
    addresses = [path.rsplit("/", 2)[1] for path in tree.entries
                 if path.startswith("/sys/devices/") and path.endswith("/class") and tree.text(path).startswith("0x0302")]
    for address in sorted(addresses)[:number]:
        tree.remove(pci_folder(tree, address))
        tree.remove(f"/sys/bus/pci/devices/{address}")


@change("dgx-h100-superpod/sxid-nonfatal")
def nonfatal_sxid(tree):
    """What is right: the switch repaired it."""
    log(tree, "nvidia-nvswitch1: SXid (PCI:0000:06:00.0): 11012, Non-fatal, Link 12 egress non-posted PRIV error")


def remove_gpu(tree, gpu):
    address = tree.nvml(gpu)["pci"]
    folder = pci_folder(tree, address)
    tree.remove(folder)
    del tree.entries[f"/sys/bus/pci/devices/{address}"]
    for path in list(tree.entries):
        if path.startswith("/sys/kernel/iommu_groups/") and path.endswith(address):
            del tree.entries[path]
    tree.remove(f"/proc/driver/nvidia/gpus/{address}")
    del tree.answers["nvml"]["gpus"][gpu]


variants.set_up(change, (
    ("dgx-b200/manager-removed", "", "What is right: an older package was removed, and its configuration stayed.",
     lambda tree: package(tree, "nvidia-fabricmanager-550", "550.54.15-1", "deinstall ok config-files")),
    ("hgx-h100-worn/manager-removed", "", "Manager of old removed.",
     lambda tree: package(tree, "nvidia-fabricmanager-550", "550.54.15-1", "deinstall ok config-files"),
     lambda tree: package(tree, "nvidia-fabricmanager-580", f"{software.DRIVER}-1ubuntu1")),
    ("hgx-h100-worn/manager-dev", "", "What is right: headers of another version beside the manager's own.",
     lambda tree: package(tree, "nvidia-fabricmanager-580", f"1:{software.DRIVER}-0ubuntu0.24.04.1"),
     lambda tree: package(tree, "nvidia-fabricmanager-dev-570", "570.124.06-1")),
    ("hgx-h100-worn/manager-older", "fabric-manager", "Manager older.",
     lambda tree: package(tree, "nvidia-fabricmanager-580", "580.65.06-1")),
    ("dgx-h100-superpod/xid-137", "", "What is right: a program's wild access to memory of another GPU.",
     lambda tree: xid(tree, "137, pid=912, name=python3, NVLink: Privilege error")),
    ("dgx-b200/gdr-hidden", "?nccl-gdr", "No distance is known.",
     lambda tree: tree.environment.update({"NCCL_NET_GDR_LEVEL": "PIX"}),
     lambda tree: hide_gpus(tree, 8)),
    ("dgx-b200/two-hidden", "?port-down", "Whether these have their NICs cannot be seen.",
     lambda tree: hide_gpus(tree, 2)),
    ("dgx-h100-superpod/xid-unknown", "gpu-errors", "A number that nobody here knows: it is not passed over.",
     lambda tree: xid(tree, "219, something new")),
    ("dgx-b200/xid-173", "gpu-errors", "A GPU's fatal timeout.",
     lambda tree: xid(tree, "158, GPU fatal timeout")),
    ("dgx-h100-superpod/xid-old-form", "gpu-errors", "As drivers before 2013 and some forwarders write it.",
     lambda tree: log(tree, "NVRM: Xid (0000:43:00): 79, GPU has fallen off the bus.")),
    ("hgx-a100-sixteen/gpu-gone", "inventory", "Fifteen.",
     lambda tree: remove_gpu(tree, 11)),
    ("aws-p6e-gb200/gpu-gone", "inventory", "Tray with three.",
     lambda tree: remove_gpu(tree, 2)),
    ("aws-p6e-gb200/efa-gone", "port-down", "Tray with three EFA.",
     lambda tree: remove_nic(tree, "rdmap83s0")),
    ("gb200-nvl72-bluefield/gpu-gone", "inventory", "GB200 with three.",
     lambda tree: remove_gpu(tree, 1)),
))


# --- ports and counters ---


@change("hgx-h100-deepep-roce/mtu-larger", "mtu")
def one_larger(tree):
    """Seven rails at 1500, and one at 9000."""
    for i in range(8):
        tree.put(f"{tree.real(f'/sys/class/net/ens{i}np0')}/mtu", "9000\n" if i == 4 else "1500\n")


@change("hgx-h100-deepep-roce/mtu-all-small")
def all_small(tree):
    """What is right, if slower: the network carries no larger packets."""
    for i in range(8):
        tree.put(f"{tree.real(f'/sys/class/net/ens{i}np0')}/mtu", "1500\n")


@change("hgx-h100-deepep-roce/loss-one", "roce-loss")
def loss_of_one(tree):
    port = nic_port(tree, "mlx5_5")
    tree.put_all(port, {"counters/port_xmit_packets": "900000000\n", "hw_counters/packet_seq_err": "912345\n",
                        "hw_counters/out_of_sequence": "3\n"})


@change("hgx-h100-deepep-roce/incast", "roce-loss")
def incast(tree):
    """Packets to this node are lost, on all rails: it asks for them again, and its own are not."""
    for i in range(8):
        tree.put_all(nic_port(tree, f"mlx5_{i}"), {
            "counters/port_rcv_packets": "800000000\n", "hw_counters/out_of_sequence": "2400000\n",
            "hw_counters/packet_seq_err": "0\n", "hw_counters/duplicate_request": "2100000\n"})


@change("hgx-h100-deepep-roce/adaptive-routing")
def overtaking(tree):
    """What is right: adaptive routing, packets overtake each other, and nobody sends again."""
    tree.environment["NCCL_IB_ADAPTIVE_ROUTING"] = "1"
    for i in range(8):
        tree.put_all(nic_port(tree, f"mlx5_{i}"), {
            "counters/port_rcv_packets": "800000000\n", "hw_counters/out_of_sequence": "2400000\n"})


@change("hgx-h100-deepep-roce/timeouts", "roce-loss")
def timeouts(tree):
    """Acknowledgements stay away: whole messages are sent again after a timeout."""
    for i in range(8):
        tree.put_all(nic_port(tree, f"mlx5_{i}"), {
            "counters/port_xmit_packets": "800000000\n", "hw_counters/local_ack_timeout_err": "41000\n"})


@change("hgx-h100-deepep-roce/recovery", "link-errors")
def recovery(tree):
    tree.put(f"{nic_port(tree, 'mlx5_2')}/counters/link_error_recovery", "91\n")


@change("hgx-h100-deepep-roce/carrier", "link-errors")
def carrier(tree):
    """The link of an Ethernet rail comes and goes, which the interface counts."""
    for i in range(8):
        folder = tree.real(f"/sys/class/net/ens{i}np0")
        tree.put_all(folder, {"carrier_changes": "318\n" if i == 6 else "2\n", "carrier_down_count":
                              "159\n" if i == 6 else "1\n"})


@change("hgx-h20-bonded-rails/carrier", "bond")
def member_without_carrier(tree):
    """The bond was told to watch nothing (miimon 0): its member says up, and has no carrier."""
    folder = tree.real("/sys/class/net/ens2f1np1")
    tree.put_all(folder, {"carrier": "0\n", "operstate": "down\n"})


@change("hgx-h20-bonded-rails/left", "bond")
def member_left(tree):
    """The second port is up and is a member of no bond any more, as on no other rail."""
    folder = tree.real("/sys/class/net/ens5f1np1")
    tree.remove(f"{folder}/bonding_slave")
    del tree.entries[f"{folder}/master"]
    del tree.entries["/sys/class/net/bond5/lower_ens5f1np1"]
    tree.put("/sys/class/net/bond5/bonding/slaves", "ens5f0np0\n")


@change("hgx-h100-deepep-roce/gen4", "slow-link")
def gen4(tree):
    pci = nic_folder(tree, "mlx5_1").split("/infiniband/")[0]
    tree.put(f"{pci}/current_link_speed", "16.0 GT/s PCIe\n")


variants.set_up(change, (
    ("hgx-h100-deepep-roce/bad-frames", "link-errors",
     "Ethernet counts damaged frames at the interface, not at the RDMA device.",
     lambda tree: tree.put(f"{tree.real('/sys/class/net/ens3np0')}/statistics/rx_crc_errors", "871234\n")),
    ("hgx-h100-deepep-roce/rate", "slow-link", "Half of the lanes of a 400 Gb/s link.",
     lambda tree: tree.put(f"{nic_port(tree, 'mlx5_1')}/rate", "200 Gb/sec (2X NDR)\n")),
))


# --- what Python imports ---


@change("dgx-h200-deepep/cxxabi", "import-libraries")
def cxxabi(tree):
    software.library(tree, X86_64, "libstdc++.so.6", "0.30",
                     defines=[f"GLIBCXX_3.4.{i}" for i in range(31)] + [f"CXXABI_1.3.{i}" for i in range(14)])
    extension(tree, needs={"libstdc++.so.6": ["CXXABI_1.3.15"]})


def venv_extension(tree):
    return next(path for path in tree.entries if "/deep_ep_cpp" in path and path.endswith(".so"))


@change("hgx-h100-roce-venv/abi3")
def stable_abi(tree):
    """What is right: an extension for every Python from one on."""
    path = venv_extension(tree)
    tree.entries[f"{path.rsplit('/', 1)[0]}/deep_ep_cpp.abi3.so"] = tree.entries.pop(path)


@change("hgx-h100-roce-venv/python", "import-python")
def other_python(tree):
    path = venv_extension(tree)
    tree.entries[f"{path.rsplit('/', 1)[0]}/deep_ep_cpp.cpython-39-x86_64-linux-gnu.so"] = tree.entries.pop(path)


# --- containers ---


@change("gke-pod-hostnetwork/no-ib", "nic-access")
def no_device_files(tree):
    """hostNetwork, and nobody mounted /dev/infiniband."""
    tree.remove("/dev/infiniband")
    for path in [path for path in tree.stats if path.startswith("/dev/infiniband/")]:
        del tree.stats[path]


@change("sriov-pod/one-missing", "nic-access")
def a_function_too_few(tree):
    """The device plugin has handed out seven functions."""
    take_uverbs(tree, "mlx5_15")


# --- NVSHMEM's variables ---


# --- jobs and shells ---


@change("docker-host-network/set-a", "environ-sourced")
def environment_by_set(tree):
    tree.put("/etc/profile.d/50-container.sh", "set -a\n. /proc/1/environ\nset +a\n")


@change("docker-host-network/environ-comment")
def environment_in_a_comment(tree):
    """What is right."""
    tree.put("/root/.bashrc", "echo ready # not: source /proc/1/environ\n")


# --- containers and device files ---


variants.set_up(change, (
    ("docker-host-network/no-control", "gpu-access", "--device /dev/nvidia0 and so on by hand, without /dev/nvidiactl.",
     lambda tree: forget_device(tree, "/dev/nvidiactl"),
     lambda tree: tree.answers.update(nvml={"error": "NVML: Driver Not Loaded"})),
    ("docker-host-network/no-tools", "", "What is right: nvidia-uvm-tools is for profilers.",
     lambda tree: tree.entries.pop("/dev/nvidia-uvm-tools", None),
     lambda tree: tree.stats.pop("/dev/nvidia-uvm-tools", None)),
))


@change("docker-host-network/void-devices", "?gpu-errors", "?nvlink", "?mig", "?clocks", "?fabric-manager")
def runtime_told_void(tree):
    """NVIDIA_VISIBLE_DEVICES=void: the runtime does nothing, and the image asks for GPUs all the same."""
    tree.environment["NVIDIA_VISIBLE_DEVICES"] = "void"
    tree.answers["nvml"] = {"error": "NVML: Driver Not Loaded"}
    for path in [path for path in tree.stats if path.startswith("/dev/nvidia")]:
        forget_device(tree, path)


# --- more hardware ---


@machine("t4-sixteen")
def t4_sixteen():
    """16 small cards of one board each, two sockets without NUMA in the firmware, one NIC of 100 Gb/s."""
    trees.GPU_MODELS.setdefault("T4", ("Tesla T4", 0x1EB8, 0x030200, (7, 5), 0, "90.04.00.00.01"))
    tree = Tree()
    for i in range(16):
        port = tree.bridge(f"0000:{0x10 + 8 * i:02x}:01.0", f"/sys/devices/pci0000:{0x10 + 8 * i:02x}", cpus="0-127")
        tree.gpu(f"0000:{0x11 + 8 * i:02x}:00.0", port, i, "T4", driver_version=software.DRIVER, cpus="0-127",
                 link=("8.0 GT/s PCIe", 16))
    port = tree.bridge("0000:c8:01.0", "/sys/devices/pci0000:c8", cpus="0-127")
    tree.nic("mlx5_0", "0000:c9:00.0", port, netdev="ens9np0", rate="100 Gb/sec (4X EDR)", cpus="0-127",
             device=0x1017, hca="MT4119", firmware="16.35.4030", link=("8.0 GT/s PCIe", 16))
    ethernet(tree)
    system(tree, release="6.8.0-87-generic", n_cpus=128, memory=512, nodes=1)
    iommu_groups(tree, "identity")
    return tree


@machine("dgx-h100-uverbs-order")
def uverbs_in_another_order():
    """Numbers of uverbs are not those of the devices: the driver has found them in another order."""
    tree = field.machines["dgx-h100-superpod"]()
    folders = sorted(path for path in tree.entries if "/infiniband_verbs/uverbs" in path and path.endswith("/ibdev"))
    names = [tree.text(path) for path in folders]
    for path, name in zip(folders, names):
        number = int(path.split("uverbs")[-1].split("/")[0])
        tree.put(path, name)
        tree.put(path.replace("/ibdev", "/dev"), f"231:{192 + (number + 3) % 10}\n")
    return tree


@change("dgx-h100-superpod/gpu-gen1")
def links_at_rest(tree):
    """What is right: GPUs at rest run their links at the first speed."""
    for gpu in tree.answers["nvml"]["gpus"]:
        tree.put(f"{pci_folder(tree, gpu['pci'])}/current_link_speed", "2.5 GT/s PCIe\n")


@change("dgx-h100-superpod/gpu-narrow", "slow-link")
def narrow_gpu(tree):
    tree.put(f"{pci_folder(tree, tree.nvml(6)['pci'])}/current_link_width", "8\n")


@change("dgx-h100-superpod/remap-failed", "gpu-errors")
def remap_failed(tree):
    tree.nvml(2)["remap_failed"] = True


@change("dgx-h100-superpod/pkey-errors")
def errors_of_programs(tree):
    """What is right: errors that peers and programs make, and waiting for credits."""
    for i in range(8):
        port = nic_port(tree, f"mlx5_{i}")
        tree.put_all(port, {"counters/port_xmit_wait": "918273645\n", "hw_counters/req_remote_access_errors": "812\n",
                            "hw_counters/out_of_buffer": "77\n", "counters/port_rcv_switch_relay_errors": "91823\n"})


@change("dgx-h100-superpod/integrity", "link-errors")
def integrity(tree):
    tree.put(f"{nic_port(tree, 'mlx5_4')}/counters/local_link_integrity_errors", "7312\n")


@change("dgx-h100-superpod/firmware-two", "firmware")
def two_odd(tree):
    for name in ("mlx5_0", "mlx5_7"):
        tree.put(f"{nic_folder(tree, name)}/fw_ver", "28.39.3560\n")


@change("dgx-h100-superpod/firmware-halves", "firmware")
def halves(tree):
    """An update that was stopped half-way: nobody has the majority."""
    for i in range(4):
        tree.put(f"{nic_folder(tree, f'mlx5_{i}')}/fw_ver", "28.39.3560\n")


@change("dgx-h200-deepep/preload-colon")
def preload_with_colons(tree):
    """What is right: LD_PRELOAD takes colons and blanks."""
    tree.environment["LD_PRELOAD"] = tree.environment["LD_PRELOAD"] + ":" + tree.environment["LD_PRELOAD"]


variants.set_up(change, (
    ("h100-4nic/rail-down", "port-down", "One of four down.",
     lambda tree: set_state(tree, "mlx5_1", "1: DOWN", "2: Polling")),
    ("dgx-h100-superpod/drain", "gpu-errors", "Drain and reset.",
     lambda tree: xid(tree, "154, GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)")),
    ("dgx-b200/link-156", "gpu-errors", "Retirement.",
     lambda tree: xid(tree, "156, Resource Retirement Event")),
    ("dgx-h100-superpod/rcv-errors", "link-errors", "InfiniBand: packets with a wrong checksum, on one port.",
     lambda tree: tree.put(f"{nic_port(tree, 'mlx5_4')}/counters/port_rcv_errors", "48123\n")),
    ("dgx-h200-deepep/preload-quotes", "two-nvshmem", "Preload in quotes.",
     lambda tree: tree.environment.update(LD_PRELOAD='"' + tree.environment["LD_PRELOAD"] + '"')),
))


# --- variables alone ---

variants.set_variables(change, (
    # name, findings, variables, what it is
    ("dgx-h100-superpod/hca-leave-out", "", {"NCCL_IB_HCA": "^mlx5_20,mlx5_21"},
     "What is right: '^' leaves the ports for management out."),
    ("dgx-h100-superpod/hca-leave-out-names", "", {"NCCL_IB_HCA": "^=mlx5_20:1,mlx5_21:1"},
     "What is right: the same by whole names."),
    ("dgx-h100-superpod/hca-leave-out-prefix", "nccl-hca", {"NCCL_IB_HCA": "^mlx5_2"},
     "mlx5_2 was meant to be a prefix of mlx5_20 and mlx5_21, and is the name of a rail."),
    ("dgx-h100-superpod/hca-leave-out-one", "nccl-hca", {"NCCL_IB_HCA": "^mlx5_0"}, "Leave out one."),
    ("dgx-h100-superpod/hca-leave-out-all", "nccl-hca", {"NCCL_IB_HCA": "^mlx5"}, "Leave out all."),
    ("dgx-h100-superpod/hca-one", "nccl-hca", {"NCCL_IB_HCA": "=mlx5_1:1"}, "One for all."),
    ("dgx-h100-superpod/hca-equal-inside", "nccl-hca", {"NCCL_IB_HCA": ','.join((f'=mlx5_{i}' for i in range(8)))},
     "'=' belongs in front of the list, not of each entry."),
    ("dgx-h100-superpod/hca-equal-caret", "nccl-hca", {"NCCL_IB_HCA": "=^mlx5_20,mlx5_21"},
     "The two marks the wrong way round."),
    ("dgx-h100-superpod/hca-blank", "nccl-hca", {"NCCL_IB_HCA": f" ={ALL}"}, "Blank in front."),
    ("dgx-h100-superpod/hca-ports", "", {"NCCL_IB_HCA": '=' + ','.join((f'mlx5_{i}:1' for i in range(8)))},
     "What is right."),
    ("dgx-h100-superpod/hca-trailing", "", {"NCCL_IB_HCA": f"{ALL},"},
     "What is right: an empty entry stands for nothing."),
    ("dgx-h100-superpod/hca-empty", "void-variables", {"NCCL_IB_HCA": ""}, "Somebody meant to say something."),
    ("dgx-h100-superpod/net-ib", "", {"NCCL_NET": "IB"},
     "What is right: NCCL's own network, which it would take anyhow."),
    ("dgx-h100-superpod/ifname-blank", "socket-interface", {"NCCL_SOCKET_IFNAME": " eno1np0"},
     "Interface with a blank."),
    ("dgx-h100-superpod/ifname-quotes", "socket-interface", {"NCCL_SOCKET_IFNAME": "'eno1np0'"},
     "Interface with quotes."),
    ("dgx-h100-superpod/ifname-exact", "socket-interface", {"NCCL_SOCKET_IFNAME": "=eno"}, "Interface not whole."),
    ("dgx-h100-superpod/ifname-out", "", {"NCCL_SOCKET_IFNAME": "^lo,docker,veth"},
     "What is right: the usual list of what not to take."),
    ("dgx-h100-superpod/ifname-all-out", "socket-interface", {"NCCL_SOCKET_IFNAME": "^lo,docker,veth,eno,ibp"},
     "All left out."),
    ("dgx-h100-superpod/switched-on", "",
     {"NCCL_IB_DISABLE": "0",
      "NCCL_P2P_DISABLE": "0",
      "NCCL_P2P_LEVEL": "NVL",
      "NCCL_SHM_DISABLE": "0",
      "NCCL_NET_GDR_LEVEL": "SYS",
      "NCCL_IB_TC": "0",
      "NCCL_IB_GID_INDEX": "3"},
     "What is right: everything is said to be on."),
    ("dgx-h100-superpod/gdr-off", "nccl-gdr", {"NCCL_NET_GDR_LEVEL": "LOC"}, "GPUDirect switched off."),
    ("dgx-h100-superpod/traffic-class", "traffic-class", {"NVSHMEM_IB_TRAFFIC_CLASS": "104"},
     "The traffic class of NVSHMEM."),
    ("dgx-h100-superpod/visible-range", "visible-devices", {"CUDA_VISIBLE_DEVICES": "0-7"}, "CUDA knows no ranges."),
    ("half-a-node-pod/nccl-all", "nccl-hca", {"NCCL_IB_HCA": "=mlx5_0,mlx5_1,mlx5_2,mlx5_3"},
     "A list of the other half only."),
    ("dgx-h200-deepep/pe-mapping-stale", "void-variables", {"NVSHMEM_HCA_PE_MAPPING": "ibp24s0:1:2,ibp64s0:1:2"},
     "A mapping by PE that nobody reads."),
    ("dgx-h200-deepep/list-quotes", "hca-lists", {"NVSHMEM_HCA_LIST": '"mlx5_0:1,mlx5_1:1"'}, "A list in quotes."),
    ("dgx-h200-deepep/list-caret", "", {"NVSHMEM_HCA_LIST": "^mlx5_20,mlx5_21"},
     "What is right: NVSHMEM knows '^' too."),
    ("dgx-h200-deepep/heap-suffix", "", {"NVSHMEM_DISABLE_CUDA_VMM": "1", "NVSHMEM_SYMMETRIC_SIZE": "4g"},
     "What is right: the size with a small letter."),
    ("dgx-h200-deepep/heap-words", "heap-size", {"NVSHMEM_DISABLE_CUDA_VMM": "1", "NVSHMEM_SYMMETRIC_SIZE": "512G"},
     "More than the GPU has."),
    ("torchrun-two-nodes/own-name", "rendezvous", {"MASTER_ADDR": "127.0.1.1"},
     "Debian's name of the host itself, by its address."),
    ("torchrun-two-nodes/any-address", "rendezvous", {"MASTER_ADDR": "0.0.0.0"},
     "An address to listen on, not one to connect to."),
    ("torchrun-two-nodes/loopback6", "rendezvous", {"MASTER_ADDR": "::1"}, "The loopback of IPv6."),
    ("torchrun-two-nodes/loopback-name", "rendezvous", {"MASTER_ADDR": "ip6-localhost"},
     "The loopback of IPv6, by Debian's name."),
    ("torchrun-two-nodes/127-name", "", {"MASTER_ADDR": "127.example.com"},
     "What is right: a name that begins like the loopback."),
    ("torchrun-two-nodes/local-rank", "rendezvous", {"LOCAL_RANK": "8", "LOCAL_WORLD_SIZE": "9"},
     "Nine ranks on a node with eight GPUs."),
    ("dgx-h100-superpod/hca-capitals", "nccl-hca",
     {"NCCL_IB_HCA": "MLX5_0,MLX5_1,MLX5_2,MLX5_3,MLX5_4,MLX5_5,MLX5_6,MLX5_7"},
     "Names in capitals."),
    ("dgx-h100-superpod/hca-blanks", "nccl-hca", {"NCCL_IB_HCA": ALL.replace(',', ' ')}, "Blanks between the names."),
    ("dgx-h200-deepep/ibgda-quotes", "void-variables", {"NVSHMEM_IBGDA_NIC_HANDLER": '"gpu"'}, "A value in quotes."),
))
