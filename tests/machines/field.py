# SPDX-License-Identifier: Apache-2.0
"""Healthy machines as the field has them: clouds, reference systems, schedulers, containers. None has a finding.

Each is one function; its first sentence says what it is and what is unusual about it. Layouts are those of the makers'
documentation and of public lspci, sysfs and nvidia-smi listings; identifiers are invented.
"""
import golden
import software
import tree as trees
import variants
from golden import CPUS_H100, DGX_SWITCHES, iommu_groups
from software import AARCH64, X86_64
from tree import BROADCOM, DOWNSTREAM, INTEL, MELLANOX, NVIDIA, UNKNOWN_LINK, UPSTREAM, Tree, relative

AMAZON, MICROSOFT = 0x1D0F, 0x1414
BROADCOM_NET = 0x14E4
GIB = 1 << 30

trees.GPU_MODELS.update({
    "A100": ("NVIDIA A100-SXM4-80GB", 0x20B2, 0x030200, (8, 0), 12, "92.00.00.00.01"),
    "H100-NVL": ("NVIDIA H100 NVL", 0x2321, 0x030200, (9, 0), 12, "96.00.00.00.03"),
    "GH200": ("NVIDIA GH200 480GB", 0x2342, 0x030200, (9, 0), 18, "96.00.00.00.04"),
    "B300": ("NVIDIA B300 SXM6 AC", 0x3182, 0x030200, (10, 3), 18, "97.00.00.00.03"),
    "RTX6000": ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 0x2BB5, 0x030200, (12, 0), 0, "98.00.00.00.01"),
    "4090": ("NVIDIA GeForce RTX 4090", 0x2684, 0x030000, (8, 9), 0, "95.02.00.00.02"),
})

PLAIN = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/root", "LANG": "C.UTF-8"}
CX6 = {"device": 0x101B, "hca": "MT4123", "firmware": "20.41.1000", "rate": "200 Gb/sec (4X HDR)",
       "link": ("16.0 GT/s PCIe", 16)}
CX8 = {"device": 0x1023, "hca": "MT4131", "firmware": "40.45.1200", "rate": "800 Gb/sec (4X XDR)",
       "link": ("64.0 GT/s PCIe", 16)}
BLUEFIELD3 = {"device": 0xA2DC, "hca": "MT41692", "firmware": "32.43.2026"}

machines = {}
machine = variants.machines_into(machines)


# --- parts ---


def product(tree, name, vendor):
    tree.put("/sys/class/dmi/id/product_name", f"{name}\n")
    tree.put("/sys/class/dmi/id/sys_vendor", f"{vendor}\n")


def cpu_lists(n_nodes, n_cores=112):
    """Processors of each NUMA node: its cores, then their second threads."""
    each = n_cores // n_nodes
    return [f"{i * each}-{(i + 1) * each - 1},{n_cores + i * each}-{n_cores + (i + 1) * each - 1}"
            for i in range(n_nodes)]


def nvswitches(tree, n, device=0x22A3):
    for i in range(n):
        port = tree.bridge(f"0000:00:{0x10 + i:02x}.0", "/sys/devices/pci0000:00", numa=0, cpus=CPUS_H100[0])
        tree.pci(f"0000:{5 + i:02x}:00.0", port, NVIDIA, device, 0x068000, numa=0, cpus=CPUS_H100[0], driver="nvidia",
                 link=("5.0 GT/s PCIe", 2))


def system(tree, *, release, hypervisor=False, override=False, peermem=True, version=software.DRIVER, doca=True,
           memory=2048, n_cpus=224, cmdline="iommu=pt", arch=X86_64, nodes=2, **kernel):
    """The kernel, its process, and the software that every one of them has."""
    tree.kernel(release, f"BOOT_IMAGE=/vmlinuz-{release} root=/dev/nvme0n1p2 ro {cmdline}".rstrip(),
                hypervisor=hypervisor, arch="aarch64" if arch is AARCH64 else "x86_64", **kernel)
    cpus = cpu_lists(nodes) if arch is X86_64 and n_cpus == 224 else None
    for i in range(nodes):
        tree.numa_node(i, cpus[i] if cpus else "0-71" if i == 0 else f"{72 * i}-{72 * i + 71}", memory // nodes)
    tree.process(memory_gib=memory, cpus=f"0-{n_cpus - 1}", n_cpus=n_cpus, shm=f"size={memory << 19}k")
    software.system(tree, arch)
    software.driver(tree, arch, release=release, version=version, override=override, peermem=peermem)
    if doca:
        software.doca(tree, arch, release)
    software.cuda(tree, arch)
    tree.environment = dict(PLAIN)


def hgx(model, *, nics_per_gpu=1, nic=None, layer="InfiniBand", numa_of=None, n_nodes=2, fabric="ready",
        name=lambda i: f"mlx5_{i}", netdev=None, speed=None):
    """Eight GPUs on switches of their own, each with its NICs; no software, and nothing for management."""
    tree = Tree()
    nic = nic or {}
    cpus = cpu_lists(n_nodes)
    n = 0
    for gpu, (host, switch, nic_bus, gpu_bus, half) in enumerate(DGX_SWITCHES):
        numa = numa_of(gpu) if numa_of else half
        place = {"numa": numa, "cpus": cpus[numa]}
        port = tree.bridge(f"0000:{host:02x}:01.0", f"/sys/devices/pci0000:{host:02x}", **place)
        up = tree.bridge(f"0000:{switch:02x}:00.0", port, vendor=BROADCOM, device=0xC030, port_type=UPSTREAM, **place)
        for i in range(nics_per_gpu):
            down = tree.bridge(f"0000:{switch + 1:02x}:{i:02x}.0", up, vendor=BROADCOM, device=0xC030,
                               port_type=DOWNSTREAM, **place)
            bus = nic_bus if i == 0 else gpu_bus + 1 + i
            interface = netdev(n) if netdev else f"ibp{nic_bus}s{i}" if layer == "InfiniBand" else f"ens{n}np0"
            tree.nic(name(n), f"0000:{bus:02x}:00.0", down, netdev=interface, link_layer=layer,
                     sent=10_000_000_000 + n, received=10_000_000_000 + n, **{**nic, **place})
            n += 1
        down = tree.bridge(f"0000:{switch + 1:02x}:1f.0", up, vendor=BROADCOM, device=0xC030, port_type=DOWNSTREAM,
                           **place)
        tree.gpu(f"0000:{gpu_bus:02x}:00.0", down, gpu, model, driver_version=software.DRIVER, fabric=fabric, **place)
    return tree


def management(tree, *names, device=0x101D, hca="MT4125", firmware="22.41.1000", rate="100 Gb/sec (4X EDR)"):
    """Ethernet ports for everything else; the first carries the default route."""
    for i, name in enumerate(names):
        place = {"numa": i, "cpus": CPUS_H100[i]}
        bus = (0x29, 0xAA)[i]
        port = tree.bridge(f"0000:{bus - 1:02x}:01.0", f"/sys/devices/pci0000:{bus - 1:02x}", **place)
        tree.nic(name, f"0000:{bus:02x}:00.0", port, netdev=f"eno{i + 1}np{i}", rate=rate, device=device, hca=hca,
                 firmware=firmware, **place)
    tree.default_route("eno1np0")


def ethernet(tree, name="eno1", address="0000:01:00.0"):
    """An onboard port without RDMA, with the default route."""
    port = tree.bridge("0000:00:1c.0", "/sys/devices/pci0000:00", numa=0, cpus=CPUS_H100[0])
    tree.interface(name, address, port, INTEL, 0x1563, speed=10000, numa=0, cpus=CPUS_H100[0], driver="ixgbe",
                   link=("8.0 GT/s PCIe", 4))
    tree.default_route(name)


def bare(tree, release="6.8.0-87-generic", **rest):
    system(tree, release=release, hypervisor=False, **rest)
    iommu_groups(tree, "identity")
    return tree


def memory(tree, gib):
    for gpu in tree.answers["nvml"]["gpus"]:
        gpu["memory_bytes"] = gib * GIB
        gpu["mig"] = False


def deepep(tree, arch=X86_64, archs=(90,), python=software.PYTHON, at="/opt/deepep"):
    """The whole stack, and the environment that epkit advises for it."""
    software.nvshmem(tree, arch, f"{at}/nvshmem")
    software.torch(tree, arch)
    software.deepep(tree, arch, archs=list(archs))
    tree.environment.update({
        "CUDA_HOME": "/usr/local/cuda", "NVSHMEM_HOME": f"{at}/nvshmem",
        "LD_LIBRARY_PATH": f"{arch.lib}:{at}/nvshmem/lib", "LD_PRELOAD": f"{at}/nvshmem/lib/libnvshmem_host.so.3",
        "PYTHONPATH": f"{at}/python", "NVSHMEM_IB_ENABLE_IBGDA": "1", "NVSHMEM_IBGDA_NIC_HANDLER": "gpu"})


def mapping(names):
    return ",".join(f"{i}:{name}:1" for i, name in enumerate(names))


def container(tree, *, kubernetes=False):
    """Inside of a container: an overlay as root, and the marks of the runtime."""
    tree.replace("/proc/self/mounts", "/dev/root / ext4 rw,relatime,discard 0 0", "overlay / overlay rw,relatime 0 0")
    if kubernetes:
        tree.environment["KUBERNETES_SERVICE_HOST"] = "192.0.2.1"
    else:
        tree.put("/.dockerenv", "")
    for path in ("/var/log/kern.log", "/etc/modprobe.d"):
        if any(name == path or name.startswith(path + "/") for name in tree.entries):
            tree.remove(path)


def efa(tree, index, address, parent, *, numa, cpus, rate="100 Gb/sec (4X EDR)", device=0xEFA2):
    """Amazon's adapter: an RDMA device of its own kind, without RoCE and without an interface."""
    pci = tree.pci(address, parent, AMAZON, device, 0x020000, numa=numa, cpus=cpus, driver="efa", link=UNKNOWN_LINK)
    name = f"rdmap{int(address[5:7], 16)}s{int(address[8:10], 16)}"
    tree.unicast += 1
    guid = f"0200:5eff:fe00:53{tree.unicast:02x}"
    folder = f"{pci}/infiniband/{name}"
    tree.put_all(folder, {"node_type": "8: unspecified\n", "fw_ver": "0.0.0.0\n", "node_guid": f"{guid}\n",
                          "sys_image_guid": f"{guid}\n", "node_desc": f"{name}\n"})
    tree.link(f"{folder}/device", f"../../../{address}")
    tree.link(f"/sys/class/infiniband/{name}", relative("/sys/class/infiniband", folder))
    tree.put_all(f"{folder}/ports/1", {
        "state": "4: ACTIVE\n", "phys_state": "5: LinkUp\n", "rate": f"{rate}\n", "link_layer": "Unspecified\n",
        "cap_mask": "0x00000000\n", "lid": "0x0\n", "sm_lid": "0x0\n"})
    tree.put(f"{folder}/ports/1/gids/0", f"fe80:0000:0000:0000:{guid}\n")
    tree.add_uverbs(name, pci, address)
    return name


# --- reference systems, bare metal ---


def dgx(model, name, n_switches, **rest):
    tree = hgx(model, **rest)
    management(tree, "mlx5_20", "mlx5_21")
    nvswitches(tree, n_switches)
    bare(tree)
    product(tree, name, "NVIDIA")
    if n_switches:
        tree.append("/var/lib/dpkg/status", software.package("nvidia-fabricmanager-580", f"{software.DRIVER}-1"))
    return tree


@machine("dgx-h100-superpod")
def dgx_h100_superpod():
    """A node of a DGX SuperPOD: storage and management on two more NICs, fabric manager of the driver's version."""
    tree = dgx("H100", "DGXH100", 4)
    memory(tree, 80)
    return tree


@machine("dgx-h200-deepep")
def dgx_h200_deepep():
    """DGX H200 with the whole stack and the environment for it."""
    tree = dgx("H200", "DGX H200", 4)
    memory(tree, 141)
    tree.put("/etc/modprobe.d/nvidia-deepep.conf",
             'options nvidia NVreg_EnableStreamMemOPs=1 NVreg_RegistryDwords="PeerMappingOverride=1;"\n')
    tree.replace("/proc/driver/nvidia/params", 'RegistryDwords: ""', 'RegistryDwords: "PeerMappingOverride=1;"')
    deepep(tree)
    tree.environment["DEEP_EP_DEVICE_TO_HCA_MAPPING"] = mapping(f"mlx5_{i}" for i in range(8))
    return tree


@machine("dgx-b200")
def dgx_b200():
    """DGX B200: NVSwitches are not on the PCI bus any more."""
    tree = dgx("B200", "DGX B200", 0)
    memory(tree, 180)
    return tree


@machine("hgx-b300")
def hgx_b300():
    """HGX B300: one ConnectX-8 for each GPU, 800 Gb/s on PCIe 6."""
    tree = hgx("B300", nic=CX8)
    management(tree, "mlx5_20")
    return bare(tree, "6.14.0-37-generic")


@machine("dgx-a100")
def dgx_a100():
    """DGX A100: HDR, six NVSwitches of the second generation, an older driver."""
    tree = hgx("A100", nic=CX6, fabric=None)
    management(tree, "mlx5_20", "mlx5_21")
    nvswitches(tree, 6, 0x1AF1)
    bare(tree, "5.15.0-1066-nvidia", version="535.230.02", cmdline="iommu=pt")
    tree.answers["nvml"]["driver"] = "535.230.02"
    product(tree, "DGXA100 920-23687-2530-000", "NVIDIA")
    return tree


@machine("hgx-a100-mesh")
def hgx_a100_mesh():
    """HGX A100 with 4 GPUs, each tied to each by four NVLinks, without a switch; 4 NICs."""
    tree = Tree()
    addresses = []
    for gpu, (host, switch, nic, gpu_bus, numa) in enumerate(DGX_SWITCHES[::2]):
        place = {"numa": numa, "cpus": CPUS_H100[numa]}
        port = tree.bridge(f"0000:{host:02x}:01.0", f"/sys/devices/pci0000:{host:02x}", **place)
        up = tree.bridge(f"0000:{switch:02x}:00.0", port, vendor=BROADCOM, device=0xC030, port_type=UPSTREAM, **place)
        for slot, bus in enumerate((nic, gpu_bus)):
            down = tree.bridge(f"0000:{switch + 1:02x}:{slot:02x}.0", up, vendor=BROADCOM, device=0xC030,
                               port_type=DOWNSTREAM, **place)
            if slot == 0:
                tree.nic(f"mlx5_{gpu}", f"0000:{bus:02x}:00.0", down, netdev=f"ib{gpu}", link_layer="InfiniBand",
                         **CX6, **place)
            else:
                tree.gpu(f"0000:{bus:02x}:00.0", down, gpu, "A100", driver_version=software.DRIVER, **place)
                addresses.append(f"0000:{bus:02x}:00.0")
    for i in range(4):
        others = [address for k, address in enumerate(addresses) if k != i]
        tree.nvml(i)["nvlinks"] = [other for other in others for _ in range(4)]
    ethernet(tree)
    return bare(tree)


@machine("hgx-h100-roce-venv")
def hgx_h100_roce_venv():
    """HGX H100 with RoCE, DeepEP and PyTorch in a virtual environment, without DOCA (inbox drivers)."""
    tree = hgx("H100", layer="Ethernet", name=lambda i: f"rocep{DGX_SWITCHES[i][2]}s0")
    ethernet(tree)
    nvswitches(tree, 4)
    bare(tree, doca=False)
    software.verbs(tree, X86_64, private=50, core="14.50.0", provider="24.50.0")
    software.verbs_development(tree, X86_64)
    venv = "/srv/train/venv"
    tree.put(f"{venv}/pyvenv.cfg", "home = /usr/bin\ninclude-system-site-packages = false\nversion = 3.12.3\n")
    deepep(tree)
    for path in tree.below("/opt/deepep/python") + tree.below(software.PYTHON):
        base = "/opt/deepep/python" if path.startswith("/opt") else software.PYTHON
        tree.entries[f"{venv}/lib/python3.12/site-packages" + path.removeprefix(base)] = tree.entries.pop(path)
    tree.environment.update({"VIRTUAL_ENV": venv, "NVSHMEM_HCA_PREFIX": "rocep",
                             "DEEP_EP_DEVICE_TO_HCA_MAPPING": mapping(f"rocep{row[2]}s0" for row in DGX_SWITCHES)})
    del tree.environment["PYTHONPATH"]
    peer_mapping(tree)
    return tree


def peer_mapping(tree):
    tree.put("/etc/modprobe.d/nvidia-deepep.conf", 'options nvidia NVreg_RegistryDwords="PeerMappingOverride=1;"\n')
    tree.replace("/proc/driver/nvidia/params", 'RegistryDwords: ""', 'RegistryDwords: "PeerMappingOverride=1;"')


@machine("hgx-h200-snc4")
def hgx_h200_snc4():
    """Sub-NUMA clustering: eight NUMA nodes, of which each GPU is near to another one."""
    tree = hgx("H200", numa_of=lambda gpu: gpu, n_nodes=8)
    ethernet(tree)
    nvswitches(tree, 4)
    return bare(tree, nodes=8)


@machine("hgx-h100-bluefield")
def hgx_h100_bluefield():
    """BlueField-3 SuperNICs for data, RoCE, and two BlueField-3 DPUs for management and storage."""
    tree = hgx("H100", nic=BLUEFIELD3, layer="Ethernet")
    management(tree, "mlx5_20", "mlx5_21", rate="200 Gb/sec (4X HDR)", **BLUEFIELD3)
    nvswitches(tree, 4)
    return bare(tree)


@machine("hgx-h100-broadcom")
def hgx_h100_broadcom():
    """RoCE on Broadcom's Thor 2: nothing of NVIDIA's verbs libraries is needed."""
    tree = hgx("H100", nic={"device": 0x1760, "hca": "BCM57608", "firmware": "231.2.63.0"}, layer="Ethernet",
               name=lambda i: f"bnxt_re{i}")
    for path in list(tree.entries):
        if path.endswith("/device") and tree.entries[path] == b"0x1760\n":
            tree.put(path.removesuffix("device") + "vendor", f"0x{BROADCOM_NET:04x}\n")
    for path, entry in tree.entries.items():
        if path.endswith("/driver") and getattr(entry, "target", "").endswith("/mlx5_core"):
            entry.target = entry.target.replace("mlx5_core", "bnxt_en")
    ethernet(tree)
    nvswitches(tree, 4)
    bare(tree, doca=False)
    software.library(tree, X86_64, "libibverbs.so.1", "14.50.0",
                     defines=software.VERBS_PUBLIC + ["IBVERBS_PRIVATE_50"])
    return tree


@machine("hgx-h100-bonded-management")
def hgx_h100_bonded_management():
    """Two ports for management in a bond (LACP) with the default route, both up."""
    tree = hgx("H100")
    management(tree, "mlx5_20", "mlx5_21")
    nvswitches(tree, 4)
    bare(tree)
    bond(tree, "eno1np0", "eno2np1")
    return tree


def bond(tree, *members):
    tree.put("/sys/class/net/bonding_masters", "bond0\n")
    tree.put_all("/sys/class/net/bond0", {"operstate": "up\n", "mtu": "9000\n", "speed": "200000\n", "carrier": "1\n",
                                          "type": "1\n", "address": "00:00:5e:00:53:f0\n",
                                          "bonding/slaves": " ".join(members) + "\n",
                                          "bonding/mode": "802.3ad 4\n"})
    for member in members:
        folder = tree.real(f"/sys/class/net/{member}")
        tree.put(f"{folder}/bonding_slave/mii_status", "up\n")
        tree.put(f"{folder}/bonding_slave/state", "active 0\n")
        tree.link(f"/sys/class/net/bond0/lower_{member}", f"../{member}")
    tree.default_route("bond0")


@machine("hgx-h100-two-nics-per-gpu")
def hgx_h100_two_nics_per_gpu():
    """Two NICs of 200 Gb/s for each GPU."""
    tree = hgx("H100", nics_per_gpu=2, nic={"rate": "200 Gb/sec (4X HDR)"})
    ethernet(tree)
    nvswitches(tree, 4)
    return bare(tree)


@machine("hgx-h100-rhel")
def hgx_h100_rhel():
    """RHEL 9: no dpkg, libraries in /usr/lib64, messages instead of kern.log."""
    tree = hgx("H100")
    management(tree, "mlx5_20", "mlx5_21")
    nvswitches(tree, 4)
    bare(tree, "5.14.0-503.11.1.el9_5.x86_64", doca=False)
    tree.put("/etc/os-release", 'NAME="Red Hat Enterprise Linux"\nVERSION_ID="9.5"\nID="rhel"\nID_LIKE="fedora"\n')
    for path in ("/var/lib/dpkg/status", "/var/log/kern.log", "/etc/ld.so.conf.d/x86_64-linux-gnu.conf",
                 "/etc/ld.so.conf.d/libc.conf"):
        if tree.has(path):
            tree.remove(path)
    for path in list(tree.entries):
        if path.startswith(X86_64.lib + "/"):
            tree.entries["/usr/lib64" + path.removeprefix(X86_64.lib)] = tree.entries.pop(path)
    software.verbs(tree, X86_64, private=50, core="14.50.0", provider="24.50.0", folder="/usr/lib64")
    tree.put("/dev/kmsg", f"6,1,20000000,-;NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  {software.DRIVER}\n")
    return tree


@machine("hgx-h100-old-fabric")
def hgx_h100_old_errors():
    """A log with what programs did, errors of switches that are no errors, and faults before the last start."""
    tree = hgx("H100")
    management(tree, "mlx5_20")
    nvswitches(tree, 4)
    bare(tree)
    log = tree.text("/var/log/kern.log")
    early = "1969-12-30T00:00:00.000000+00:00 node kernel: "
    late = "1970-01-01T00:10:00.000000+00:00 node kernel: "
    tree.put("/var/log/kern.log", early + "NVRM: Xid (PCI:0000:1b:00): 79, pid='<unknown>', GPU has fallen off the bus.\n"
             + early + "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 24007, Fatal, Link 44 sourcetrack timeout error\n"
             + log + late + "NVRM: Xid (PCI:0000:1b:00): 31, pid=77, name=python3, MMU Fault\n"
             + late + "NVRM: Xid (PCI:0000:1b:00): 13, pid=77, name=python3, Graphics Exception\n"
             + late + "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error\n")
    return tree


@machine("hgx-h100-worn")
def hgx_h100_worn():
    """A year in service: each port has seen its switch restart, and some loss and congestion, all alike."""
    tree = hgx("H100", layer="Ethernet")
    ethernet(tree)
    nvswitches(tree, 4)
    bare(tree)
    for i in range(8):
        port = next(path for path in tree.entries if path.endswith(f"/infiniband/mlx5_{i}/fw_ver")).rsplit("/", 1)[0]
        tree.put(f"{port}/ports/1/counters/link_downed", f"{6 + i % 3}\n")
        tree.put(f"{port}/ports/1/counters/symbol_error", f"{40 + i}\n")
        tree.put(f"{port}/ports/1/hw_counters/out_of_sequence", f"{40_000_000 + i}\n")
        tree.put(f"{port}/ports/1/hw_counters/packet_seq_err", f"{300 + i}\n")
        tree.put(f"{port}/ports/1/hw_counters/np_cnp_sent", f"{90_000_000 + i}\n")
    return tree


# --- GPUs as cards ---


@machine("h100-nvl-pairs")
def h100_nvl_pairs():
    """Four PCIe cards in two pairs with a bridge each, one NIC for two GPUs."""
    tree = Tree()
    addresses = []
    for gpu in range(4):
        numa = gpu // 2
        place = {"numa": numa, "cpus": CPUS_H100[numa]}
        bus = (0x17, 0x3A, 0x97, 0xBA)[gpu]
        port = tree.bridge(f"0000:{bus - 1:02x}:01.0", f"/sys/devices/pci0000:{bus - 1:02x}", **place)
        tree.gpu(f"0000:{bus:02x}:00.0", port, gpu, "H100-NVL", driver_version=software.DRIVER, **place)
        addresses.append(f"0000:{bus:02x}:00.0")
        if gpu % 2 == 0:
            port = tree.bridge(f"0000:{bus - 1:02x}:03.0", f"/sys/devices/pci0000:{bus - 1:02x}", **place)
            tree.nic(f"mlx5_{numa}", f"0000:{bus + 1:02x}:00.0", port, netdev=f"ib{numa}", link_layer="InfiniBand",
                     **place)
    for gpu in range(4):
        tree.nvml(gpu)["nvlinks"] = [addresses[gpu ^ 1]] * 12
    ethernet(tree)
    return bare(tree, memory=1024)


@machine("rtx-6000-server")
def rtx_6000_server():
    """Eight workstation cards without NVLink, two NICs; the environment keeps NCCL from PCIe peer access."""
    tree = Tree()
    for gpu in range(8):
        numa = gpu // 4
        place = {"numa": numa, "cpus": CPUS_H100[numa]}
        bus = 0x20 + 0x10 * gpu
        port = tree.bridge(f"0000:{bus - 1:02x}:01.0", f"/sys/devices/pci0000:{bus - 1:02x}", **place)
        tree.gpu(f"0000:{bus:02x}:00.0", port, gpu, "RTX6000", driver_version=software.DRIVER, **place)
    for numa in range(2):
        place = {"numa": numa, "cpus": CPUS_H100[numa]}
        port = tree.bridge(f"0000:{0xC0 + numa * 8:02x}:01.0", f"/sys/devices/pci0000:{0xC0 + numa * 8:02x}", **place)
        tree.nic(f"mlx5_{numa}", f"0000:{0xC1 + numa * 8:02x}:00.0", port, netdev=f"ens{numa}np0", **place)
    ethernet(tree)
    bare(tree)
    tree.environment["NCCL_P2P_DISABLE"] = "1"
    return tree


@machine("workstation-4090")
def workstation_4090():
    """Two consumer cards, one in a slot of eight lanes, no RDMA, a default limit of open files."""
    tree = Tree()
    for i, width in enumerate((16, 8)):
        port = tree.bridge(f"0000:00:0{i + 1}.0", "/sys/devices/pci0000:00", numa=-1, cpus="0-31",
                           link=("16.0 GT/s PCIe", width))
        tree.gpu(f"0000:0{i + 1}:00.0", port, i, "4090", cpus="0-31", driver_version=software.DRIVER,
                 link=("16.0 GT/s PCIe", width))
    wired = tree.bridge("0000:00:1c.0", "/sys/devices/pci0000:00", numa=-1, cpus="0-31")
    tree.interface("enp5s0", "0000:05:00.0", wired, INTEL, 0x15F3, speed=2500, cpus="0-31", driver="igc",
                   link=("5.0 GT/s PCIe", 1))
    tree.default_route("enp5s0")
    release = "6.14.0-37-generic"
    tree.numa_node(0, "0-31", 128)
    tree.kernel(release, f"BOOT_IMAGE=/vmlinuz-{release} root=/dev/nvme0n1p2 ro iommu=pt", hypervisor=False)
    tree.process(memory_gib=128, cpus="0-31", n_cpus=32, memlock="8388608", shm="size=67108864k")
    tree.replace("/proc/self/limits", "1048576              1048576", "1024                 1048576")
    iommu_groups(tree, "identity")
    software.system(tree)
    software.driver(tree, X86_64, release=release, override=False, peermem=False)
    software.cuda(tree, X86_64)
    tree.environment = dict(PLAIN)
    return tree


# --- Grace ---


def grace(model, n, nics, name, *, fabric=None):
    tree = Tree()
    release = "6.11.0-1016-nvidia-64k"
    for i in range(n):
        place = {"numa": i, "cpus": f"{72 * i}-{72 * i + 71}"}
        domain = 0x0009 + 0x10 * i
        port = tree.bridge(f"{domain:04x}:00:00.0", f"/sys/devices/pci{domain:04x}:00", vendor=NVIDIA, device=0x22B8,
                           **place)
        tree.gpu(f"{domain:04x}:01:00.0", port, i, model, driver_version=software.DRIVER, fabric=fabric, **place)
    for i in range(nics):
        place = {"numa": i % n, "cpus": f"{72 * (i % n)}-{72 * (i % n) + 71}"}
        domain = 0x0000 + 0x10 * (i % n) + 2 * (i // n)
        port = tree.bridge(f"{domain:04x}:00:00.0", f"/sys/devices/pci{domain:04x}:00", vendor=NVIDIA, device=0x22B1,
                           **place)
        tree.nic(f"mlx5_{i}", f"{domain:04x}:01:00.0", port, netdev=f"ibP{domain}p1s0", link_layer="InfiniBand",
                 **place)
    tree.interface("enP5p9s0", "0005:09:00.0", "/sys/devices/pci0005:00", INTEL, 0x1563, speed=10000, numa=0,
                   cpus="0-71", driver="ixgbe")
    tree.default_route("enP5p9s0")
    system(tree, release=release, arch=AARCH64, nodes=n, n_cpus=72 * n, memory=480 * n, cmdline="init_on_alloc=0")
    product(tree, name, "NVIDIA")
    return tree


@machine("gh200")
def gh200():
    """One superchip: GPU memory is a NUMA node, NVLinks lead to the processor alone, one NIC."""
    tree = grace("GH200", 1, 1, "GH200 Grace Hopper")
    tree.nvml(0)["nvlinks"] = ["down"] * 18
    return tree


@machine("gh200-nvl2")
def gh200_nvl2():
    """Two superchips tied by NVLink, a NIC for each."""
    tree = grace("GH200", 2, 2, "GH200 NVL2")
    for i in range(2):
        tree.nvml(i)["nvlinks"] = ["0019:01:00.0" if i == 0 else "0009:01:00.0"] * 18
    return tree


@machine("gb200-nvl72-bluefield")
def gb200_nvl72_bluefield():
    """A compute tray of GB200 NVL72: four ConnectX-7 for data, two BlueField-3 for the rest, IMEX by a ComputeDomain."""
    tree = golden.gb200()
    for i, domain in enumerate((0x0006, 0x0016)):
        place = {"numa": i, "cpus": ["0-71", "72-143"][i]}
        port = tree.bridge(f"{domain:04x}:00:00.0", f"/sys/devices/pci{domain:04x}:00", vendor=NVIDIA, device=0x22B1,
                           **place)
        tree.nic(f"mlx5_{8 + i}", f"{domain:04x}:03:00.0", port, netdev=f"enP{domain}p3s0f0np0",
                 rate="200 Gb/sec (4X HDR)", **BLUEFIELD3, **place)
    return tree


# --- clouds ---


def azure(model, *, rate, size, device=0x101E, hca="MT4126"):
    """Hyper-V gives each device a PCI domain of its own; InfiniBand for data, accelerated networking beside it."""
    tree = Tree()
    for i in range(8):
        place = {"numa": i // 4, "cpus": f"{48 * (i // 4)}-{48 * (i // 4) + 47}"}
        tree.gpu(f"{i + 1:04x}:00:00.0", f"/sys/devices/LNXSYSTM:00/VMBUS:00/{i + 1:08d}/pci{i + 1:04x}:00", i, model,
                 driver_version=software.DRIVER, fabric=None if model == "A100" else "ready", link=UNKNOWN_LINK,
                 **place)
        domain = 0x0101 + i
        tree.nic(f"mlx5_ib{i}", f"{domain:04x}:00:00.0",
                 f"/sys/devices/LNXSYSTM:00/VMBUS:00/{domain:08d}/pci{domain:04x}:00", netdev=f"ib{i}",
                 link_layer="InfiniBand", rate=rate, device=device, hca=hca, link=UNKNOWN_LINK, **place)
    tree.nic("mlx5_an0", "8a56:00:02.0", "/sys/devices/LNXSYSTM:00/VMBUS:00/00008a56/pci8a56:00", netdev="enP35414s1",
             rate="100 Gb/sec (4X EDR)", device=0x101A, hca="MT4120", link=UNKNOWN_LINK, numa=0, cpus="0-47")
    tree.default_route("eth0")
    system(tree, release="6.8.0-1030-azure", hypervisor=True, n_cpus=96, memory=1900, nodes=2, cmdline="")
    product(tree, "Virtual Machine", "Microsoft Corporation")
    tree.environment.update({"UCX_NET_DEVICES": "mlx5_ib0:1", "NCCL_IB_PCI_RELAXED_ORDERING": "1",
                             "NCCL_TOPO_FILE": f"/opt/microsoft/{size}-topo.xml", "NCCL_IB_HCA": "mlx5_ib"})
    tree.put(f"/opt/microsoft/{size}-topo.xml", "<system version=\"1\"/>\n")
    return tree


@machine("azure-nd-h100-v5")
def azure_nd_h100():
    """Azure ND H100 v5: InfiniBand devices called mlx5_ibN, one Ethernet device that is not for data."""
    return azure("H100", rate="400 Gb/sec (4X NDR)", size="ndv5")


@machine("azure-nd-a100-v4")
def azure_nd_a100():
    """Azure ND A100 v4."""
    return azure("A100", rate="200 Gb/sec (4X HDR)", size="ndv4", device=0x101C, hca="MT4124")


def aws(model, kind, n_efa, *, rate, gpus=8):
    """EC2: each group of GPUs with its adapters behind a switch of the host; the default route on an ENA."""
    tree = Tree()
    each = n_efa // gpus
    for gpu in range(gpus):
        numa = gpu * 2 // gpus
        place = {"numa": numa, "cpus": ["0-47,96-143", "48-95,144-191"][numa]}
        bus = 0x40 + 0x10 * gpu
        port = tree.bridge(f"0000:{bus:02x}:00.0", f"/sys/devices/pci0000:{bus:02x}", vendor=AMAZON, device=0x0200,
                           link=UNKNOWN_LINK, **place)
        for i in range(each):
            efa(tree, gpu * each + i, f"0000:{bus + 1:02x}:{i:02x}.0", port, rate=rate, **place)
        if each == 0 and gpu % 2 == 0:
            efa(tree, gpu // 2, f"0000:{bus + 1:02x}:1b.0", port, rate=rate, device=0xEFA0, **place)
        tree.gpu(f"0000:{bus + 2:02x}:00.0", port, gpu, model, driver_version=software.DRIVER,
                 fabric=None if model == "A100" else "ready", link=UNKNOWN_LINK, **place)
    tree.interface("ens32", "0000:20:00.0", "/sys/devices/pci0000:20", AMAZON, 0xEC20, speed=100000, numa=0,
                   cpus="0-47,96-143", driver="ena", link=UNKNOWN_LINK)
    tree.default_route("ens32")
    system(tree, release="6.8.0-1021-aws", hypervisor=True, n_cpus=192, memory=2000, doca=False, cmdline="",
           peermem=False)
    product(tree, kind, "Amazon EC2")
    software.load_module(tree, "efa", "2.13.0")
    software.load_module(tree, "efa_nv_peermem", "1.2.1")
    software.library(tree, X86_64, "libibverbs.so.1", "14.50.0",
                     defines=software.VERBS_PUBLIC + ["IBVERBS_PRIVATE_50"])
    tree.library("/opt/amazon/ofi-nccl/lib/libnccl-net-ofi.so", link="libnccl-net.so", soname="libnccl-net.so",
                 needed=["libc.so.6"])
    software.loads(tree, "/opt/amazon/ofi-nccl/lib/libnccl-net.so")
    tree.environment.update({"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1",
                             "LD_LIBRARY_PATH": "/opt/amazon/ofi-nccl/lib:/opt/amazon/efa/lib"})
    return tree


@machine("aws-p5")
def aws_p5():
    """AWS p5.48xlarge: 32 EFA adapters, four for each GPU."""
    return aws("H100", "p5.48xlarge", 32, rate="100 Gb/sec (4X EDR)")


@machine("aws-p5en")
def aws_p5en():
    """AWS p5en.48xlarge: 16 EFA adapters for 8 H200."""
    return aws("H200", "p5en.48xlarge", 16, rate="200 Gb/sec (4X HDR)")


@machine("aws-p4d")
def aws_p4d():
    """AWS p4d.24xlarge: four EFA adapters for 8 A100."""
    return aws("A100", "p4d.24xlarge", 4, rate="100 Gb/sec (4X EDR)")


@machine("gcp-a4-mig-off")
def gcp_a4_mig_off():
    """GCP A4 whose GPUs say that MIG is off, and how much memory they have."""
    tree = golden.a4()
    memory(tree, 180)
    product(tree, "Google Compute Engine", "Google")
    return tree


@machine("gcp-a4-cos")
def gcp_a4_cos():
    """Container-Optimized OS: the driver lies in /home/kubernetes/bin/nvidia, the system is read-only, no packages."""
    tree = Tree()
    golden.gcp(tree, "B200", lambda index, bus: f"mlx5_{index}")
    software.system(tree)
    software.driver(tree, X86_64, release="6.6.105+", override=False, folder="/home/kubernetes/bin/nvidia/lib64")
    tree.put("/proc/sys/kernel/osrelease", "6.6.105+\n")
    tree.put("/etc/os-release", 'NAME="Container-Optimized OS"\nID=cos\nVERSION_ID=121\n')
    for path in ("/var/lib/dpkg/status", "/var/log/kern.log"):
        if tree.has(path):
            tree.remove(path)
    product(tree, "Google Compute Engine", "Google")
    tree.environment = {**PLAIN, "LD_LIBRARY_PATH": "/home/kubernetes/bin/nvidia/lib64"}
    return tree


@machine("cloud-vm-one-gpu")
def cloud_vm_one_gpu():
    """One GPU of a board, lent without its NVLinks, and no NIC for data."""
    tree = Tree()
    tree.gpu("0000:00:05.0", "/sys/devices/pci0000:00", 0, "H100", cpus="0-25", driver_version=software.DRIVER,
             link=UNKNOWN_LINK)
    tree.nvml(0)["nvlinks"] = ["down"] * 18
    tree.interface("ens3", "0000:00:03.0", "/sys/devices/pci0000:00", 0x1AF4, 0x1041, cpus="0-25", driver="virtio-pci",
                   link=UNKNOWN_LINK)
    tree.default_route("ens3")
    release = "6.8.0-60-generic"
    tree.numa_node(0, "0-25", 200)
    tree.kernel(release, f"BOOT_IMAGE=/vmlinuz-{release} root=/dev/vda1 ro", hypervisor=True)
    tree.process(memory_gib=200, cpus="0-25", n_cpus=26, memlock="8388608")
    software.system(tree)
    software.driver(tree, X86_64, release=release, override=False, peermem=False)
    software.cuda(tree, X86_64)
    product(tree, "Standard PC (Q35 + ICH9, 2009)", "QEMU")
    tree.environment = dict(PLAIN)
    return tree


@machine("dgx-b200-bluefield-bond")
def dgx_b200_bluefield_bond():
    """DGX B200 with two BlueField-3: of each a port for storage in InfiniBand, and one in the bond of the uplink."""
    tree = hgx("B200")
    for i, bus in enumerate((0x29, 0xAA)):
        place = {"numa": i, "cpus": CPUS_H100[i]}
        port = tree.bridge(f"0000:{bus - 1:02x}:01.0", f"/sys/devices/pci0000:{bus - 1:02x}", **place)
        tree.nic(f"mlx5_{10 + 2 * i}", f"0000:{bus:02x}:00.0", port, netdev=f"ibs{i}", link_layer="InfiniBand",
                 **BLUEFIELD3, **place)
        tree.nic(f"mlx5_{11 + 2 * i}", f"0000:{bus:02x}:00.1", port, netdev=f"enp{bus}s0f1np1",
                 rate="200 Gb/sec (4X HDR)", **BLUEFIELD3, **place)
    for bus in (0x29, 0xAA):
        tree.link(f"/sys/class/net/bond0/lower_enp{bus}s0f1np1", f"../enp{bus}s0f1np1")
    tree.put("/sys/class/net/bond0/operstate", "up\n")
    tree.default_route("bond0")
    bare(tree)
    product(tree, "DGX B200", "NVIDIA")
    memory(tree, 180)
    return tree


@machine("hgx-h100-roce-vrf")
def hgx_h100_roce_vrf():
    """Each rail's addresses are those of a VLAN on it, in a VRF of its own."""
    tree = hgx("H100", layer="Ethernet")
    ethernet(tree)
    nvswitches(tree, 4)
    bare(tree)
    for i in range(8):
        vlan, folder = f"ens{i}np0.200", f"{variants.nic_port(tree, f'mlx5_{i}')}"
        tree.put_all(f"/sys/class/net/{vlan}", {"operstate": "up\n", "mtu": "8896\n", "type": "1\n"})
        tree.link(f"/sys/class/net/{vlan}/lower_ens{i}np0", f"../ens{i}np0")
        tree.put_all(f"/sys/class/net/vrf-rail{i}", {"operstate": "up\n", "mtu": "65575\n"})
        tree.link(f"/sys/class/net/vrf-rail{i}/lower_{vlan}", f"../{vlan}")
        for old, new in ((2, 6), (3, 7)):
            tree.put(f"{folder}/gids/{new}", tree.text(f"{folder}/gids/{old}"))
            tree.put(f"{folder}/gids/{old}", f"{trees.EMPTY_GID}\n")
            tree.put(f"{folder}/gid_attrs/types/{new}", tree.text(f"{folder}/gid_attrs/types/{old}"))
            tree.put(f"{folder}/gid_attrs/ndevs/{new}", f"{vlan}\n")
            tree.remove(f"{folder}/gid_attrs/types/{old}")
            tree.remove(f"{folder}/gid_attrs/ndevs/{old}")
    return tree


@machine("gh200-one-nic")
def gh200_one_nic():
    """GH200 with one NIC, RoCE, which carries the default route as well."""
    tree = Tree()
    place = {"numa": 0, "cpus": "0-71"}
    port = tree.bridge("0009:00:00.0", "/sys/devices/pci0009:00", vendor=NVIDIA, device=0x22B8, **place)
    tree.gpu("0009:01:00.0", port, 0, "GH200", driver_version=software.DRIVER, **place)
    tree.nvml(0)["nvlinks"] = ["down"] * 18
    port = tree.bridge("0002:00:00.0", "/sys/devices/pci0002:00", vendor=NVIDIA, device=0x22B1, **place)
    tree.nic("mlx5_0", "0002:01:00.0", port, netdev="enp1s0np0", **place)
    tree.default_route("enp1s0np0")
    system(tree, release="6.8.0-1021-nvidia-64k", n_cpus=72, memory=480, arch=AARCH64, nodes=1, cmdline="")
    return tree


@machine("gcp-a3-mega")
def gcp_a3_mega():
    """A pod on GCP A3 Mega: gVNICs for TCPX, and no RDMA at all."""
    tree = hgx("H100", nics_per_gpu=0)
    for i in range(9):
        tree.interface(f"eth{i}", f"0000:00:{0x14 + i:02x}.0", "/sys/devices/pci0000:00", trees.GOOGLE, 0x0042,
                       speed=200000, numa=0, cpus=CPUS_H100[0], driver="gve", link=UNKNOWN_LINK)
    tree.default_route("eth0")
    system(tree, release="6.1.112+", hypervisor=True, n_cpus=208, doca=False, peermem=False, cmdline="")
    container(tree, kubernetes=True)
    product(tree, "Google Compute Engine", "Google")
    tree.environment.update({"NCCL_FASTRAK_CTRL_DEV": "eth0", "NCCL_SOCKET_IFNAME": "eth0", "NCCL_CROSS_NIC": "0",
                             "NCCL_FASTRAK_IFNAME": ",".join(f"eth{i}" for i in range(1, 9))})
    return tree


# --- schedulers and containers ---


def slurm_task(tree, task, n=8, visible="0"):
    tree.environment.update({"CUDA_VISIBLE_DEVICES": visible, "SLURM_LOCALID": str(task), "SLURM_PROCID": str(task),
                             "SLURM_STEP_TASKS_PER_NODE": f"{n}(x2)", "SLURM_STEP_NUM_TASKS": str(2 * n),
                             "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": str(2 * n),
                             "SLURM_JOB_NODELIST": "node[01-02]", "MASTER_ADDR": "node01", "MASTER_PORT": "29500",
                             "WORLD_SIZE": str(2 * n), "RANK": str(task), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})


@machine("slurm-one-gpu-a-task")
def slurm_one_gpu_a_task():
    """Slurm with a task on each node: it sees one GPU of eight, as GPU 0, and its processors."""
    tree = hgx("H100")
    management(tree, "mlx5_20", "mlx5_21")
    nvswitches(tree, 4)
    bare(tree)
    tree.answers["nvml"]["gpus"] = tree.answers["nvml"]["gpus"][3:4]
    for minor in range(8):
        if minor != 3:
            tree.stats[f"/dev/nvidia{minor}"]["access"] = "---"
    slurm_task(tree, 0, 1)
    tree.replace("/proc/self/status", "Cpus_allowed_list:\t0-223", "Cpus_allowed_list:\t42-55,154-167")
    return tree


@machine("slurm-eight-tasks")
def slurm_eight_tasks():
    """Slurm with all GPUs for each of eight tasks, which choose by their number; torchrun's variables are not set."""
    tree = hgx("H100")
    management(tree, "mlx5_20", "mlx5_21")
    nvswitches(tree, 4)
    bare(tree)
    slurm_task(tree, 5, visible="0,1,2,3,4,5,6,7")
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE"):
        del tree.environment[name]
    tree.replace("/proc/self/status", "Cpus_allowed_list:\t0-223", "Cpus_allowed_list:\t70-83,182-195")
    return tree


@machine("torchrun-two-nodes")
def torchrun_two_nodes():
    """A rank of torchrun on the second of two nodes, with NCCL's usual variables."""
    tree = hgx("H100")
    management(tree, "mlx5_20", "mlx5_21")
    nvswitches(tree, 4)
    bare(tree)
    tree.environment.update({"RANK": "11", "WORLD_SIZE": "16", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8",
                             "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "192.0.2.10", "MASTER_PORT": "29500",
                             "NCCL_IB_HCA": "^=mlx5_20,mlx5_21", "NCCL_SOCKET_IFNAME": "^lo,docker",
                             "NCCL_NET_GDR_LEVEL": "PIX", "OMP_NUM_THREADS": "1"})
    return tree


@machine("mpirun-nccl-tests")
def mpirun_nccl_tests():
    """A rank of nccl-tests under Open MPI, bound to two cores, with every NIC by a prefix."""
    tree = hgx("H100")
    management(tree, "mlx5_20", "mlx5_21")
    nvswitches(tree, 4)
    bare(tree)
    tree.environment.update({"OMPI_COMM_WORLD_SIZE": "16", "OMPI_COMM_WORLD_RANK": "2",
                             "OMPI_COMM_WORLD_LOCAL_RANK": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
                             "NCCL_IB_HCA": "mlx5", "NCCL_SOCKET_IFNAME": "eno1", "NCCL_DEBUG": "INFO"})
    tree.replace("/proc/self/status", "Cpus_allowed_list:\t0-223", "Cpus_allowed_list:\t8-9,120-121")
    return tree


@machine("docker-host-network")
def docker_host_network():
    """docker run --gpus all --network host --ipc host --device /dev/infiniband with unlimited locked memory."""
    tree = hgx("H100")
    management(tree, "mlx5_20", "mlx5_21")
    nvswitches(tree, 4)
    bare(tree)
    container(tree)
    return tree


@machine("gke-pod-hostnetwork")
def gke_pod_hostnetwork():
    """A pod on A4 with hostNetwork and all devices."""
    tree = golden.a4()
    container(tree, kubernetes=True)
    tree.environment["KUBERNETES_SERVICE_HOST"] = "192.0.2.1"
    return tree


@machine("gke-pod-networks")
def gke_pod_networks():
    """A pod on A3 Ultra without hostNetwork, with the eight networks attached: the interfaces have the pod's names."""
    tree = golden.a3u()
    container(tree, kubernetes=True)
    return tree


@machine("gke-pod-no-network")
def gke_pod_no_network():
    """A pod on A4 without hostNetwork and without RDMA: sysfs shows all NICs, and no interface of theirs."""
    tree = golden.a4()
    container(tree, kubernetes=True)
    for path in list(tree.entries):
        if path.startswith("/sys/class/net/gpu") or "/net/gpu" in path or "/gid_attrs/ndevs/" in path:
            del tree.entries[path]
    for path in [name for name in tree.entries if "/gids/" in name]:
        tree.put(path, trees.EMPTY_GID + "\n")
    for path in [name for name in tree.entries if "/gid_attrs/types/" in name]:
        del tree.entries[path]
    tree.remove("/dev/infiniband")
    for path in [name for name in tree.stats if name.startswith("/dev/infiniband/")]:
        del tree.stats[path]
    tree.environment = {**PLAIN, "KUBERNETES_SERVICE_HOST": "192.0.2.1"}
    return tree


@machine("sriov-pod")
def sriov_pod():
    """A pod with eight virtual functions; the physical functions belong to the host and have no device file here."""
    tree = hgx("H100", nics_per_gpu=2, layer="Ethernet")
    ethernet(tree)
    nvswitches(tree, 4)
    bare(tree)
    for gpu in range(8):
        parent = next(path for path in tree.entries if path.endswith(f"/infiniband/mlx5_{2 * gpu}/fw_ver"))
        child = next(path for path in tree.entries if path.endswith(f"/infiniband/mlx5_{2 * gpu + 1}/fw_ver"))
        parent, child = parent.split("/infiniband/")[0], child.split("/infiniband/")[0]
        tree.link(f"{child}/physfn", relative(child, parent))
        tree.put(f"{child}/device", "0x101e\n")
        for path in [name for name in tree.entries if name.startswith(f"{parent}/net/")]:
            del tree.entries[path]
        tree.entries.pop(f"/sys/class/net/ens{2 * gpu}np0")
        for path in [name for name in tree.entries if name.startswith(f"{parent}/infiniband/")
                     and ("/gids/" in name or "/gid_attrs/" in name)]:
            if "/gids/" in path:
                tree.put(path, trees.EMPTY_GID + "\n")
            else:
                del tree.entries[path]
        tree.entries.pop(f"/dev/infiniband/uverbs{2 * gpu}")
        del tree.stats[f"/dev/infiniband/uverbs{2 * gpu}"]
    container(tree, kubernetes=True)
    return tree


@machine("half-a-node-pod")
def half_a_node_pod():
    """A pod with four GPUs and their four NICs; sysfs shows all eight of both."""
    tree = hgx("H100")
    ethernet(tree)
    nvswitches(tree, 4)
    bare(tree)
    tree.answers["nvml"]["gpus"] = tree.answers["nvml"]["gpus"][4:]
    for i in range(4):
        for path in (f"/dev/nvidia{i}", f"/dev/infiniband/uverbs{i}"):
            tree.entries.pop(path)
            del tree.stats[path]
    container(tree, kubernetes=True)
    tree.replace("/proc/self/status", "Cpus_allowed_list:\t0-223", "Cpus_allowed_list:\t56-111,168-223")
    tree.put("/sys/fs/cgroup/cpu.max", "6400000 100000\n")
    return tree


@machine("conda")
def conda():
    """DeepEP and PyTorch in a conda environment, whose libstdc++ is newer than the system's."""
    tree = hgx("H100")
    management(tree, "mlx5_20", "mlx5_21")
    nvswitches(tree, 4)
    bare(tree)
    peer_mapping(tree)
    deepep(tree)
    prefix = "/opt/conda/envs/train"
    for path in tree.below("/opt/deepep/python") + tree.below(software.PYTHON):
        base = "/opt/deepep/python" if path.startswith("/opt") else software.PYTHON
        tree.entries[f"{prefix}/lib/python3.12/site-packages" + path.removeprefix(base)] = tree.entries.pop(path)
    software.library(tree, X86_64, "libstdc++.so.6", "0.34", folder=f"{prefix}/lib",
                     defines=[f"GLIBCXX_3.4.{i}" for i in range(35)])
    extension = f"{prefix}/lib/python3.12/site-packages/{software.DEEPEP_EXTENSION}"
    tree.library(extension, archs=[90], machine=X86_64.machine, runpath="/opt/deepep/nvshmem/lib",
                 needed=["libnvshmem_host.so.3", "libc10.so", "libtorch.so", "libtorch_python.so", "libcudart.so.12",
                         "libmlx5.so.1", "libstdc++.so.6", "libc.so.6"],
                 needs={"libstdc++.so.6": ["GLIBCXX_3.4.34"], "libc.so.6": ["GLIBC_2.34"]})
    tree.environment["CONDA_PREFIX"] = prefix
    tree.environment["DEEP_EP_DEVICE_TO_HCA_MAPPING"] = mapping(f"mlx5_{i}" for i in range(8))
    del tree.environment["PYTHONPATH"]
    return tree


@machine("apptainer")
def apptainer():
    """An Apptainer image under Slurm: the host's network and devices, the image's software."""
    tree = hgx("H200")
    management(tree, "mlx5_20", "mlx5_21")
    nvswitches(tree, 4)
    bare(tree)
    tree.folder("/.singularity.d")
    tree.environment.update({"APPTAINER_NAME": "train.sif", "SLURM_JOB_NUM_NODES": "4"})
    return tree


@machine("driver-not-used-yet")
def driver_not_used_yet():
    """Right after the start: no program has used CUDA, so /dev/nvidia-uvm is made by the first one."""
    tree = hgx("H100")
    management(tree, "mlx5_20", "mlx5_21")
    nvswitches(tree, 4)
    bare(tree)
    tree.entries.pop("/dev/nvidia-uvm")
    del tree.stats["/dev/nvidia-uvm"]
    tree.put("/usr/bin/nvidia-modprobe", "\x7fELF made up\n")
    return tree
