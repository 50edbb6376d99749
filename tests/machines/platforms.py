# SPDX-License-Identifier: Apache-2.0
"""What a firmware, a hypervisor or a kernel does to a machine: Secure Boot, confidential computing, guests, WSL.

As nodes.py: each is one function, whose first sentence says what it is and what is unusual about it. What is expected
was written down before epkit was asked.
"""
import field
import golden
import software
import tree as trees
import variants
from field import (CPUS_H100, UNKNOWN_LINK, X86_64, Tree, azure, bare, container, deepep, ethernet, hgx, management,
                   memory, nvswitches, product, system)
from kinds import remove_nic, without_rdma
from rules import off_the_bus
from sites import forget_device
from variants import driver_not_loaded, pci_folder, set_state

MICROSOFT = 0x1414

machines = {}
changes = []
maps = {}  # name -> NICs of each GPU, in the order of NVML
others = {}  # machines that epkit does not judge
machine, change = variants.machines_into(machines, maps), variants.changes_into(changes, maps)

def node(model="H100", nics=None, **rest):
    """Eight GPUs and eight rails on bare metal, an onboard port with the default route."""
    tree = hgx(model, **(nics or {}))
    ethernet(tree)
    nvswitches(tree, 4)
    return bare(tree, **rest)


LOG = "1970-01-01T00:00:21.000000+00:00 node kernel: "


def each(pattern, numbers=range(8)):
    return [[pattern.format(i)] for i in numbers]


# --- Secure Boot ---


def secure_boot(tree):
    """The kernel of a machine that was started with Secure Boot: locked down, and strict about modules."""
    tree.put("/sys/kernel/security/lockdown", "none [integrity] confidentiality\n")
    tree.put("/sys/module/module/parameters/sig_enforce", "Y\n")
    tree.append("/var/log/kern.log", LOG + "secureboot: Secure boot enabled\n" + LOG
                + "Kernel is locked down from EFI Secure Boot mode; see man kernel_lockdown.7\n")


@machine("hgx-h100-secure-boot", each("mlx5_{}"))
def signed():
    """Secure Boot, and modules of the driver that are signed with a key that the firmware has."""
    tree = node()
    secure_boot(tree)
    return tree


@machine("hgx-h100-tainted")
def tainted():
    """No Secure Boot: the kernel loads modules of DKMS without a signature, says so, and calls itself tainted."""
    tree = node()
    tree.put("/sys/kernel/security/lockdown", "[none] integrity confidentiality\n")
    tree.put("/sys/module/module/parameters/sig_enforce", "N\n")
    tree.append("/var/log/kern.log", LOG + "nvidia: loading out-of-tree module taints kernel.\n" + LOG
                + "nvidia: module verification failed: signature and/or required key missing - tainting kernel\n")
    return tree


@change("hgx-h100-secure-boot/unsigned", "driver-skew")
def unsigned(tree):
    """DKMS built the module, and nobody has enrolled the key that it signs with."""
    driver_not_loaded(tree)
    tree.append("/var/log/kern.log", LOG + "Loading of module with unavailable key is rejected\n")


@change("hgx-h100-secure-boot/unsigned-no-log", "driver-skew")
def unsigned_for_a_user(tree):
    """The same for a user who may not read the kernel's log."""
    driver_not_loaded(tree)
    tree.remove("/var/log/kern.log")
    tree.put("/var/log/kern.log", "")
    tree.denied.append("/var/log/kern.log")


@change("hgx-h100-tainted/locked-down", "driver-skew")
def locked_down(tree):
    """lockdown=integrity on the command line, without Secure Boot."""
    driver_not_loaded(tree)
    tree.put("/sys/kernel/security/lockdown", "none [integrity] confidentiality\n")
    tree.append("/var/log/kern.log", LOG + "Lockdown: modprobe: unsigned module loading is restricted; see man "
                "kernel_lockdown.7\n")


@change("hgx-h100-tainted/not-built", "driver-skew")
def not_built(tree):
    """The kernel was updated, its headers were not, and DKMS has built nothing for it."""
    driver_not_loaded(tree)
    no_module(tree)
    tree.folder(f"/var/lib/dkms/nvidia/{software.DRIVER}/source")


@change("hgx-h100-tainted/not-installed", "driver-skew")
def not_installed(tree):
    """A node as its maker delivers it."""
    driver_not_loaded(tree)
    no_module(tree)
    tree.replace("/var/lib/dpkg/status", f"nvidia-driver-{software.DRIVER.split('.')[0]}-open", "made-up")


def no_module(tree):
    for path in [path for path in tree.entries if "/lib/modules/" in path]:
        if path.rsplit("/", 1)[1].startswith("nvidia"):
            del tree.entries[path]
        elif path.endswith("/modules.dep") and not hasattr(tree.entries[path], "target"):
            lines = [line for line in tree.text(path).splitlines() if "/nvidia" not in line]
            tree.put(path, "\n".join(lines) + "\n")


variants.set_up(change, (
    ("hgx-h100-tainted/newer-on-disk", "driver-skew",
     "DKMS has built a newer driver for this kernel, by a runfile, and the old one is loaded.",
     lambda tree: tree.folder("/var/lib/dkms/nvidia/590.44.01/6.8.0-87-generic")),
    ("hgx-h100-tainted/not-loaded", "driver-skew", "The module is there, and nobody has loaded it.",
     lambda tree: driver_not_loaded(tree)),
    ("hgx-h100-secure-boot/not-built", "driver-skew", "What is missing is the module, whatever its signature would be.",
     lambda tree: driver_not_loaded(tree),
     lambda tree: no_module(tree)),
))


# --- confidential computing ---


def confidential(tree, *, ready=True, multi_gpu="none"):
    """What NVML says of it: the feature is on, the GPUs take work, how several of them are protected. In protected PCIe
    mode the feature itself is called off."""
    tree.answers["nvml"]["cc"] = {"feature": multi_gpu != "ppcie", "ready": ready, "multi_gpu": multi_gpu}


def guest(tree, **rest):
    system(tree, release="6.8.0-87-generic", hypervisor=True, n_cpus=160, memory=1600, nodes=1, cmdline="", **rest)
    product(tree, "Standard PC (Q35 + ICH9, 2009)", "QEMU")


def ports(tree, model, gpus, *, nics=0, cpus="0-159", nvlinks="switch", fabric="ready"):
    """QEMU: each device below a port of its own, on one bus, and no word about NUMA nodes."""
    for first, n in ((2, gpus), (0x10, nics)):
        for i in range(n):
            port = tree.bridge(f"0000:00:{first + i:02x}.0", "/sys/devices/pci0000:00", vendor=0x1B36, device=0x000C,
                               cpus=cpus, link=("2.5 GT/s PCIe", 1), link_max=("16.0 GT/s PCIe", 32))
            if first == 2:
                tree.gpu(f"0000:{0x10 + i:02x}:00.0", port, i, model, driver_version=software.DRIVER, cpus=cpus,
                         nvlinks=nvlinks, fabric=fabric)
            else:
                tree.nic(f"mlx5_{i}", f"0000:{0x30 + i:02x}:00.0", port, netdev=f"ibp{0x30 + i}s0", cpus=cpus,
                         link_layer="InfiniBand", device=0x101E, hca="MT4126")
    tree.interface("enp1s0", "0000:01:00.0", "/sys/devices/pci0000:00", 0x1AF4, 0x1041, cpus=cpus, driver="virtio-pci",
                   link=UNKNOWN_LINK)
    tree.default_route("enp1s0")


@machine("azure-ncc-h100-v5", [[]])
def azure_ncc():
    """Azure NCCads H100 v5: a confidential guest with one H100 NVL, whose GPU takes work."""
    tree = Tree()
    tree.gpu("0001:00:00.0", "/sys/devices/LNXSYSTM:00/VMBUS:00/00000001/pci0001:00", 0, "H100-NVL", cpus="0-39",
             nvlinks="down", driver_version=software.DRIVER, link=UNKNOWN_LINK, numa=0)
    tree.interface("eth0", "0002:00:00.0", "/sys/devices/LNXSYSTM:00/VMBUS:00/00000002/pci0002:00", MICROSOFT, 0x00BA,
                   cpus="0-39", driver="mana", link=UNKNOWN_LINK)
    tree.default_route("eth0")
    system(tree, release="6.8.0-1030-azure-fde", hypervisor=True, n_cpus=40, memory=320, nodes=1, cmdline="", doca=False,
           peermem=False)
    product(tree, "Virtual Machine", "Microsoft Corporation")
    secure_boot(tree)
    confidential(tree)
    return tree


@machine("tdx-hgx-h100-ppcie")
def protected_pcie():
    """A confidential guest with a whole HGX H100 in protected PCIe mode, its switches, and no NIC for data."""
    tree = Tree()
    ports(tree, "H100", 8)
    nvswitches(tree, 4)
    guest(tree, doca=False, peermem=False)
    secure_boot(tree)
    confidential(tree, multi_gpu="ppcie")
    return tree


@machine("tdx-hgx-b200-nics")
def confidential_with_nics():
    """A confidential guest with eight B200 whose NVLinks are encrypted, and InfiniBand for what is in host memory."""
    tree = Tree()
    ports(tree, "B200", 8, nics=8)
    guest(tree)
    secure_boot(tree)
    confidential(tree, multi_gpu="nvle")
    return tree


variants.set_up(change, (
    ("tdx-hgx-h100-ppcie/not-ready", "confidential", "Protected not ready.",
     lambda tree: confidential(tree, ready=False, multi_gpu="ppcie")),
    ("tdx-hgx-h100-ppcie/each-alone", "confidential",
     "Eight GPUs in the mode for one: they keep their memory from each other, and no NVLink is up.",
     lambda tree: confidential(tree),
     lambda tree: variants.update_gpus(tree, nvlinks=["down"] * 18, fabric="none")),
    ("tdx-hgx-b200-nics/gdr", "confidential",
     "A job that is told to have NICs reach GPU memory, which is protected from them.",
     lambda tree: software.nvshmem(tree, X86_64),
     lambda tree: tree.environment.update({"NVSHMEM_IB_ENABLE_IBGDA": "1", "NVSHMEM_HOME": "/opt/deepep/nvshmem",
                                           "LD_LIBRARY_PATH": "/opt/deepep/nvshmem/lib"})),
))


@machine("h200-cc-off", each("mlx5_{}"))
def confidential_off():
    """A driver that knows of confidential computing, and has it switched off, on a node like any other."""
    tree = node("H200")
    tree.answers["nvml"]["cc"] = {"feature": False, "ready": True, "multi_gpu": "none"}
    return tree


# --- guests ---


@machine("kvm-shared-nvswitch", each("mlx5_{}"))
def shared_nvswitch():
    """A guest whose switches the host keeps, from an image that has a fabric manager of another version installed."""
    tree = Tree()
    ports(tree, "H200", 8, nics=8)
    guest(tree)
    tree.append("/var/lib/dpkg/status", software.package("nvidia-fabricmanager-570", "570.124.06-1"))
    return tree


@change("kvm-shared-nvswitch/fabric", "nvlink")
def fabric_of_the_host(tree):
    """The partition is not active: nothing in the guest mends that."""
    for gpu in tree.answers["nvml"]["gpus"]:
        gpu["fabric"] = "starting"


NCCL_TOPOLOGY = """\
<!-- made up: the pairs of a cloud that shows each device on a bus of its own -->
<system version="1">
{cpus}</system>
"""


def nccl_topology(tree, path, cpus):
    """NCCL's file: for each processor the switches, for each switch the addresses of what is below."""
    text = ""
    for numa, switches in enumerate(cpus):
        text += f'  <cpu numaid="{numa}" affinity="0000ffff,0000ffff" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">\n'
        for bridge, devices in switches:
            text += f'    <pci busid="{bridge}" class="0x060400" link_speed="32.0 GT/s PCIe" link_width="16">\n'
            for address, class_code in devices:
                text += (f'      <pci busid="{address}" class="{class_code}" link_speed="32.0 GT/s PCIe" '
                         'link_width="16"/>\n')
            text += "    </pci>\n"
        text += "  </cpu>\n"
    tree.put(path, NCCL_TOPOLOGY.format(cpus=text))
    tree.environment["NCCL_TOPO_FILE"] = path


@machine("azure-nd-h100-v5-pairs", each("mlx5_ib{}", (3, 2, 1, 0, 7, 6, 5, 4)))
def azure_pairs():
    """Azure ND H100 v5 where the file of the cloud says which NIC is beside which GPU, and the numbers do not."""
    tree = azure("H100", rate="400 Gb/sec (4X NDR)", size="ndv5")
    order = (3, 2, 1, 0, 7, 6, 5, 4)
    switches = [(f"ffff:ff:{i + 1:02x}.0", [(f"{i + 1:04x}:00:00.0", "0x030200"),
                                           (f"{0x0101 + order[i]:04x}:00:00.0", "0x020700")]) for i in range(8)]
    nccl_topology(tree, "/opt/microsoft/ndv5-topo.xml", [switches[:4], switches[4:]])
    return tree


@change("azure-nd-h100-v5-pairs/torn", nics=each("mlx5_ib{}"))
def torn_topology(tree):
    """What is right: a file that ends in the middle says nothing, and the map is that of the bus."""
    text = tree.text("/opt/microsoft/ndv5-topo.xml")
    tree.put("/opt/microsoft/ndv5-topo.xml", text[:len(text) // 4])


@machine("vgpu-mig-backed", [[]])
def vgpu():
    """A guest with one virtual GPU that is an instance of an H100: nothing between GPUs is wanted of it."""
    tree = Tree()
    ports(tree, "vgpu-mig", 1, cpus="0-15", fabric=None)
    system(tree, release="6.8.0-87-generic", hypervisor=True, n_cpus=16, memory=64, nodes=1, cmdline="", doca=False,
           peermem=False)
    product(tree, "VMware7,1", "VMware, Inc.")
    return tree


@change("vgpu-mig-backed/job", "mig")
def vgpu_job(tree):
    """Several ranks on instances."""
    tree.environment.update({"WORLD_SIZE": "4", "RANK": "1", "MASTER_ADDR": "192.0.2.10", "MASTER_PORT": "29500"})


trees.GPU_MODELS.update({
    "vgpu-mig": ("NVIDIA H100XM-1-10C", 0x2330, 0x030200, (9, 0), 0, "00.00.00.00.00"),
})


@variants.machines_into(others)("wsl2")
def wsl2():
    """WSL2: no GPU on the bus and none of the driver's files, /dev/dxg and libraries of Windows' driver instead."""
    tree = Tree()
    tree.interface("eth0", "0000:00:01.0", "/sys/devices/pci0000:00", MICROSOFT, 0x0000, cpus="0-15", driver="hv_netvsc",
                   link=UNKNOWN_LINK)
    tree.default_route("eth0")
    tree.numa_node(0, "0-15", 32)
    tree.kernel("6.6.87.2-microsoft-standard-WSL2", "initrd=\\initrd.img WSL_ROOT_INIT=1 panic=-1", hypervisor=True)
    tree.process(memory_gib=32, cpus="0-15", n_cpus=16)
    software.system(tree, X86_64)
    software.cuda(tree, X86_64)
    tree.device_node("/dev/dxg")
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        tree.library(f"/usr/lib/wsl/lib/{name}", soname=name, needed=["libc.so.6"])
    tree.put("/etc/ld.so.conf.d/ld.wsl.conf", "/usr/lib/wsl/lib\n")
    tree.answers["nvml"] = {"driver": "581.57", "gpus": [{
        "pci": "0000:01:00.0", "name": "NVIDIA GeForce RTX 4090",
        "uuid": "GPU-00000000-0000-0000-0000-000000000001", "minor": 0, "cc": [8, 9], "nvlinks": []}]}
    tree.environment = dict(field.PLAIN)
    return tree


# --- CUDA and drivers ---


@machine("ngc-image-forward-compatible", each("mlx5_{}"))
def forward_compatible():
    """An image for CUDA 13 on a node with driver 570: its package cuda-compat brings the newer libcuda."""
    tree = node(version="570.172.08")
    tree.answers["nvml"]["driver"] = "570.172.08"
    container(tree)
    software.torch(tree, X86_64)
    cuda_13(tree)
    compat(tree)
    return tree


def cuda_13(tree):
    """PyTorch was built with CUDA 13."""
    tree.library(f"{software.PYTHON}/torch/lib/libtorch_cuda.so", soname="libtorch_cuda.so",
                 needed=["libcudart.so.13", "libc.so.6"])


def compat(tree):
    folder = "/usr/local/cuda/compat/lib"
    tree.library("/usr/local/cuda-12.9/compat/lib/libcuda.so.580.95.05", link="libcuda.so.1", soname="libcuda.so.1",
                 needed=["libc.so.6"])
    tree.environment["LD_LIBRARY_PATH"] = folder


@change("ngc-image-forward-compatible/no-compat", "cuda-major")
def no_compat(tree):
    """The image's start script was not run, so that nothing leads to the newer libcuda."""
    del tree.environment["LD_LIBRARY_PATH"]


@machine("workstation-4090-newer-driver")
def workstation():
    """Two cards for games, and an image whose libcuda is that of the driver."""
    return field.machines["workstation-4090"]()


@change("workstation-4090-newer-driver/compat", "libcuda")
def compat_for_games(tree):
    """The package cuda-compat does not work with cards for games: cuInit says 803."""
    tree.library("/usr/local/cuda-12.9/compat/libcuda.so.590.44.01", link="libcuda.so.1", soname="libcuda.so.1",
                 needed=["libc.so.6"])
    tree.environment["LD_LIBRARY_PATH"] = "/usr/local/cuda/compat"


# --- rails ---


@machine("gb300-two-planes", [[f"mlx5_{2 * i}", f"mlx5_{2 * i + 1}"] for i in range(8)])
def two_planes():
    """HGX B300 whose ConnectX-8 are two ports of 400 Gb/s each, one for each plane of the network."""
    tree = hgx("B300", nic={**field.CX8, "rate": "400 Gb/sec (2X XDR)"}, name=lambda i: f"mlx5_{2 * i}",
               netdev=lambda i: f"ibs{i}f0")
    for i in range(8):
        folder = variants.nic_folder(tree, f"mlx5_{2 * i}").split("/infiniband/")[0]
        parent, address = folder.rsplit("/", 1)
        numa = int(tree.text(f"{folder}/numa_node"))
        tree.nic(f"mlx5_{2 * i + 1}", address[:-1] + "1", parent, netdev=f"ibs{i}f1", numa=numa, cpus=CPUS_H100[numa],
                 link_layer="InfiniBand", **{**field.CX8, "rate": "400 Gb/sec (2X XDR)"})
    management(tree, "mlx5_20")
    return bare(tree, "6.14.0-37-generic")


variants.set_up(change, (
    ("gb300-two-planes/plane-down", "port-down", "One port of sixteen.",
     lambda tree: set_state(tree, "mlx5_7", "1: DOWN", "2: Polling")),
    ("hgx-h20-bonded-rails/member-mtu", "mtu",
     "The bond says 9000, and one of its ports was set back to 1500: what is hashed to it is lost.",
     lambda tree: tree.put(f"{tree.real('/sys/class/net/ens5f1np1')}/mtu", "1500\n")),
))


# --- what the driver of an Ethernet port counts ---


def ethtool(tree, port, **counters):
    """As "ethtool -S" of mlx5 has them; zero what is not named."""
    names = ["rx_discards_phy", "tx_discards_phy", "tx_pause_storm_error_events"]
    names += [f"{way}_prio{n}_{what}" for n in range(8)
              for way, what in (("rx", "pause"), ("tx", "pause"), ("rx", "discards"))]
    tree.answers[f"ethtool:{port}"] = {**{name: 0 for name in names}, **counters}


@machine("hgx-h100-pfc", each("mlx5_{}"))
def flow_control():
    """RoCE with flow control on priority 3, which has paused everybody now and then."""
    tree = node("H100", {"layer": "Ethernet"})
    for i in range(8):
        ethtool(tree, f"ens{i}np0", rx_prio3_pause=4_000_000 + i, tx_prio3_pause=900_000 + i, rx_discards_phy=12)
    return tree


@change("hgx-h100-pfc/discards")
def discards(tree):
    """One port has no room for packets of priority 0, which nothing holds back; "nics" says so."""
    ethtool(tree, "ens5np0", rx_discards_phy=9_000_000, rx_prio0_discards=9_000_000)


@machine("hugepages-database", each("mlx5_{}"))
def hugepages():
    """Half of the memory is reserved as huge pages, and vm.max_map_count is the kernel's own."""
    tree = node(cmdline="iommu=pt default_hugepagesz=1G hugepagesz=1G hugepages=1024")
    tree.append("/proc/meminfo", "HugePages_Total:    1024\nHugePages_Free:     1024\nHugepagesize:    1048576 kB\n")
    tree.put("/proc/sys/vm/max_map_count", "65530\n")
    tree.append("/proc/self/mounts", "hugetlbfs /dev/hugepages hugetlbfs rw,relatime,pagesize=1024M 0 0\n")
    return tree


# --- boards and hosts that look like others ---


@machine("gb200-nvl4", each("mlx5_{}", range(4)))
def nvl4():
    """GB200 NVL4: four GPUs tied to each other on one board, and no rack whose fabric they could join."""
    tree = golden.gb200()
    addresses = [gpu["pci"] for gpu in tree.answers["nvml"]["gpus"]]
    for i, gpu in enumerate(tree.answers["nvml"]["gpus"]):
        gpu["fabric"] = "none"
        gpu["nvlinks"] = [other for k, other in enumerate(addresses) if k != i for _ in range(6)]
    no_imex(tree)
    return tree


def no_imex(tree):
    for i in range(4):
        forget_device(tree, f"/dev/nvidia-caps-imex-channels/channel{i}")
    tree.replace("/proc/devices", "509 nvidia-caps-imex-channels\n", "")


@machine("dgx-station-gb300", [["mlx5_0"]])
def station():
    """A workstation with one GB300 and a ConnectX-8: no rack either, and one GPU is all."""
    tree = golden.gb200()
    for address, minor in (("0009:01:00.0", 1), ("0018:01:00.0", 2), ("0019:01:00.0", 3)):
        off_the_bus(tree, address, minor)
    for i in (1, 2, 3):
        remove_nic(tree, f"mlx5_{i}")
    gpu = tree.nvml(0)
    gpu.update({"name": "NVIDIA GB300", "cc": [10, 3], "fabric": "none", "nvlinks": []})
    tree.put(f"{pci_folder(tree, gpu['pci'])}/device", "0x31c2\n")
    no_imex(tree)
    return tree


@machine("vgpu-host", each("mlx5_{}"))
def vgpu_host():
    """A host that offers virtual GPUs: functions of each GPU that nobody has bound yet, beside the GPUs themselves."""
    tree = node()
    for gpu in list(tree.answers["nvml"]["gpus"]):
        folder = pci_folder(tree, gpu["pci"])
        parent, address = folder.rsplit("/", 1)
        numa = int(tree.text(f"{folder}/numa_node"))
        for function in range(4, 8):
            pci = tree.pci(address[:-1] + str(function), parent, trees.NVIDIA, 0x2330, 0x030200, numa=numa,
                           cpus=CPUS_H100[numa])
            tree.link(f"{pci}/physfn", f"../{address}")
    return tree


@machine("passthrough-host", each("mlx5_{}", range(4)))
def passthrough_host():
    """A host that has handed four of its GPUs and their NICs to a guest, and works with the others."""
    tree = node()
    for gpu in tree.answers["nvml"]["gpus"][4:]:
        folder = pci_folder(tree, gpu["pci"])
        tree.link(f"{folder}/driver", trees.relative(folder, "/sys/bus/pci/drivers/vfio-pci"))
        tree.remove(f"/proc/driver/nvidia/gpus/{gpu['pci']}")
        forget_device(tree, f"/dev/nvidia{gpu['minor']}")
    tree.folder("/sys/bus/pci/drivers/vfio-pci")
    tree.answers["nvml"]["gpus"] = tree.answers["nvml"]["gpus"][:4]
    for i in range(4, 8):
        folder = variants.nic_folder(tree, f"mlx5_{i}").split("/infiniband/")[0]
        without_rdma(tree, f"mlx5_{i}")
        tree.link(f"{folder}/driver", trees.relative(folder, "/sys/bus/pci/drivers/vfio-pci"))
    return tree


@machine("vgpu-whole", [["mlx5_0"]] * 2)
def vgpu_whole():
    """A guest with two virtual GPUs of the whole memory each, which is the profile with NVLink, and one NIC."""
    tree = Tree()
    ports(tree, "vgpu-whole", 2, nics=1, fabric=None)
    guest(tree)
    return tree


trees.GPU_MODELS["vgpu-whole"] = ("NVIDIA H100XM-80C", 0x2330, 0x030200, (9, 0), 18, "00.00.00.00.00")


@machine("kvm-topology-file", each("mlx5_{}", (1, 0, 3, 2, 5, 4, 7, 6)))
def kvm_pairs():
    """A guest with a port for each device on one bus, and the cloud's file for NCCL with two levels of switches."""
    tree = Tree()
    ports(tree, "H200", 8, nics=8)
    guest(tree)
    order = (1, 0, 3, 2, 5, 4, 7, 6)
    switches = [(f"ffff:f{i}:00.0", [(f"0000:{0x10 + i:02X}:00.0", "0x030200"),
                                     (f"0000:{0x30 + order[i]:02X}:00.0", "0x020700")]) for i in range(8)]
    nccl_topology(tree, "/etc/nccl-topo-h200.xml", [switches[:4], switches[4:]])
    tree.replace("/etc/nccl-topo-h200.xml", '  <cpu numaid="0"', '  <!-- <pci busid="0000:99:00.0"/> -->\n  <cpu numaid="0"')
    return tree


@machine("kvm-acs-in-guest", each("mlx5_{}"))
def acs_in_guest():
    """A guest with a virtual IOMMU: ACS is on at the ports that the hypervisor makes up, and says nothing of the host."""
    tree = Tree()
    ports(tree, "H200", 8, nics=8)
    guest(tree)
    for slot in (*range(2, 10), *range(0x10, 0x18)):
        address = f"0000:00:{slot:02x}.0"
        tree.put(f"{pci_folder(tree, address)}/config",
                 trees.pci_config(0x1B36, 0x000C, trees.PCI_BRIDGE, trees.ROOT_PORT, acs=0x001D))
    golden.iommu_groups(tree, "DMA-FQ")
    return tree


@machine("hgx-h100-lambda", each("mlx5_{}"))
def full_passthrough():
    """A guest with a whole board, its four switches too: the fabric manager is the guest's own here."""
    tree = Tree()
    ports(tree, "H100", 8, nics=8)
    nvswitches(tree, 4)
    guest(tree)
    tree.append("/var/lib/dpkg/status", software.package("nvidia-fabricmanager-580", f"{software.DRIVER}-1"))
    return tree


@change("dgx-h100-superpod/switch-gone", "nvlink")
def switch_gone(tree):
    """One of four NVSwitches has left the bus, and with it the same five links of each GPU."""
    tree.remove("/sys/bus/pci/devices/0000:08:00.0")
    tree.remove(next(path for path in tree.entries if path.endswith("/0000:08:00.0/class")).rsplit("/", 1)[0])
    for gpu in tree.answers["nvml"]["gpus"]:
        gpu["nvlinks"] = ["switch"] * 13 + ["down"] * 5


def representor(tree, nic, number, name):
    """Switchdev mode: a port of the RDMA device for each virtual function, with the interface that stands for it."""
    folder = variants.nic_folder(tree, nic)
    pci = folder.split("/infiniband/")[0]
    tree.port(f"{folder}/ports/{number}", "400 Gb/sec (4X NDR)", "Ethernet", "0200:5eff:fe00:53ff", name, 0, 0)
    tree.netdev(name, pci, speed=400000)
    tree.put(f"{tree.real(f'/sys/class/net/{name}')}/phys_port_name", f"pf0vf{number - 2}\n")


@machine("hgx-h200-switchdev", each("mlx5_{}"))
def switchdev():
    """RoCE rails in switchdev mode with three virtual functions each, whose representors are ports of the rails."""
    tree = node("H200", {"layer": "Ethernet"})
    for i in range(8):
        tree.put(f"{tree.real(f'/sys/class/net/ens{i}np0')}/phys_port_name", "p0\n")
        for number in (2, 3, 4):
            representor(tree, f"mlx5_{i}", number, f"ens{i}npf0vf{number - 2}")
            if number == 4:
                port = f"{variants.nic_folder(tree, f'mlx5_{i}')}/ports/4"
                tree.put(f"{port}/state", "1: DOWN\n")
                tree.put(f"{port}/phys_state", "3: Disabled\n")
    return tree


variants.set_up(change, (
    ("h100/acs-locked", "acs",
     "With Secure Boot the kernel lets nobody write PCI configuration space, so that setpci does not help.",
     lambda tree: variants.by_name["h100/acs"].change(tree),
     lambda tree: secure_boot(tree)),
    ("dgx-b200/fabric", "nvlink", "The fabric manager of Blackwell needs NVLink's subnet manager beside it.",
     lambda tree: variants.update_gpus(tree, fabric="starting"),
     lambda tree: tree.put("/sys/module/ib_umad/initstate", "live\n")),
    ("hgx-h100-lambda/fabric", "nvlink", "Fabric of the guest.",
     lambda tree: variants.update_gpus(tree, fabric="starting")),
    ("hgx-h200-switchdev/down", "port-down", "The uplink of a rail: its representors are up as before.",
     lambda tree: set_state(tree, "mlx5_6", "1: DOWN", "3: Disabled")),
))


@machine("hgx-h100-vmd", each("mlx5_{}"))
def volume_management():
    """Disks behind Intel's VMD, whose PCI domains have five digits, and a firmware that names no NUMA node of GPUs."""
    tree = node()
    for i in range(2):
        tree.pci(f"1000{i}:e1:00.0", f"/sys/devices/pci0000:e0/pci1000{i}:e0", trees.INTEL, 0x0A54, 0x010802,
                 driver="nvme")
    for gpu in tree.answers["nvml"]["gpus"]:
        tree.put(f"{pci_folder(tree, gpu['pci'])}/numa_node", "-1\n")
    return tree


# --- further sites ---


@machine("gke-a4x-max", [[f"mlx5_{2 * i}", f"mlx5_{2 * i + 1}"] for i in range(4)])
def a4x_max():
    """A pod on A4X Max (GB300): each GPU below the switch of its ConnectX-8, which shows a function for each plane."""
    tree = Tree()
    cpus = ["0-71", "72-143"]
    for i, domain in enumerate((0x0000, 0x0002, 0x0010, 0x0012)):
        place = {"numa": i // 2, "cpus": cpus[i // 2]}
        port = tree.bridge(f"{domain:04x}:00:00.0", f"/sys/devices/pci{domain:04x}:00", vendor=trees.NVIDIA,
                           device=0x22B1, **place)
        up = tree.bridge(f"{domain:04x}:01:00.0", port, vendor=trees.MELLANOX, device=0x197C,
                         port_type=trees.UPSTREAM, **place)
        for slot in range(3):
            down = tree.bridge(f"{domain:04x}:02:{slot:02x}.0", up, vendor=trees.MELLANOX, device=0x197C,
                               port_type=trees.DOWNSTREAM, **place)
            if slot < 2:
                tree.nic(f"mlx5_{2 * i + slot}", f"{domain:04x}:03:00.{slot}", down, netdev=f"gpu{i}rdma{slot}",
                         **{**field.CX8, "rate": "400 Gb/sec (2X XDR)"}, **place)
            else:
                tree.gpu(f"{domain:04x}:04:00.0", down, i, "GB300", driver_version=software.DRIVER, fabric="ready",
                         **place)
    tree.interface("eth0", "0006:00:01.0", "/sys/devices/pci0006:00", trees.GOOGLE, 0x0042, speed=200000, numa=0,
                   cpus=cpus[0], driver="gve", link=UNKNOWN_LINK)
    tree.default_route("eth0")
    system(tree, release="6.8.0-1040-gke-64k", arch=field.AARCH64, n_cpus=144, memory=960, cmdline="")
    tree.replace("/proc/devices", "508 nvidia-caps\n", "508 nvidia-caps\n509 nvidia-caps-imex-channels\n")
    tree.device_node("/dev/nvidia-caps-imex-channels/channel0")
    container(tree, kubernetes=True)
    return tree


@machine("kata-pod", [["mlx5_0"], ["mlx5_1"]])
def kata():
    """A pod in a virtual machine of its own (Kata): a container inside of a guest, with two GPUs and two functions."""
    tree = Tree()
    ports(tree, "H200", 2, nics=2, nvlinks="down", fabric="none")
    guest(tree)
    container(tree, kubernetes=True)
    for gpu in tree.answers["nvml"]["gpus"]:
        gpu["nvlinks"] = []
    return tree


@machine("tdx-gke-h100-cos", [[]])
def confidential_gke():
    """GKE's confidential node with one H100 (a3-highgpu-1g, TDX): Container-Optimized OS, seen from a pod."""
    tree = Tree()
    ports(tree, "H100", 1, cpus="0-25", nvlinks="down", fabric=None)
    system(tree, release="6.6.113+", hypervisor=True, n_cpus=26, memory=234, nodes=1, cmdline="", doca=False,
           peermem=False)
    product(tree, "Google Compute Engine", "Google")
    secure_boot(tree)
    container(tree, kubernetes=True)
    confidential(tree)
    return tree


@change("hgx-h100-tainted/debian", "driver-skew")
def debian_not_loaded(tree):
    """Debian calls the module nvidia-current: it is there."""
    driver_not_loaded(tree)
    for path in [path for path in tree.entries if path.endswith("/modules.dep") and not hasattr(tree.entries[path], "target")]:
        tree.replace(path, "updates/dkms/nvidia.ko:", "updates/dkms/nvidia-current.ko:")


@change("azure-nd-h100-v5-pairs/some-only", nics=each("mlx5_ib{}"))
def half_a_topology(tree):
    """What is right: a file that knows the devices of one processor alone is for another machine."""
    path = "/opt/microsoft/ndv5-topo.xml"
    text = tree.text(path)
    first, second = text.index("  <cpu "), text.index("  </cpu>\n") + len("  </cpu>\n")
    tree.put(path, text[:first] + text[second:])


variants.set_up(change, (
    ("gke-a4x-max/plane-down", "port-down", "Plane of a pod down.",
     lambda tree: set_state(tree, "mlx5_5", "1: DOWN", "2: Polling")),
    ("gke-a4x-max/no-channel", "imex", "The pod asks for GPUs, and for no ComputeDomain.",
     lambda tree: forget_device(tree, "/dev/nvidia-caps-imex-channels/channel0")),
    ("azure-nd-h100-v5-pairs/rail-down", "port-down", "Rail of a pair down.",
     lambda tree: set_state(tree, "mlx5_ib6", "1: DOWN", "2: Polling")),
    ("hgx-h100-pfc/flap", "link-errors", "Carrier lost.",
     lambda tree: tree.put(f"{tree.real('/sys/class/net/ens2np0')}/carrier_down_count", "57\n")),
))
