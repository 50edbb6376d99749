# SPDX-License-Identifier: Apache-2.0
"""One change to a golden machine for each failure mode, with the findings of epkit doctor that it must lead to.

A function named for what it breaks, under the name of its variant and the expected ids: nothing else may be found.
Numbers of modes are those of docs/failure-modes.md.
"""
import software
from software import X86_64
from tree import BROADCOM, DOWNSTREAM, PCI_BRIDGE, pci_config

faults = []
by_name = {}


class Variant:
    def __init__(self, name, findings, change):
        self.name = name
        self.machine = name.split("/")[0]
        self.findings = findings
        self.change = change


def register(name, change, findings=()):
    if name in by_name:
        raise ValueError(f"two variants {name}")
    by_name[name] = Variant(name, findings, change)
    return by_name[name]


def changes_into(changes, maps=None):
    """A decorator that puts a change to a machine into that list; `nics` of each GPU, where there are any, into `maps`."""
    def named(name, *findings, nics=None):
        def decorate(function):
            changes.append(register(name, function, findings))
            if nics is not None:
                maps[name] = nics
            return function
        return decorate
    return named


def machines_into(machines, maps=None):
    """The same for a function that builds a machine."""
    def named(name, nics=None):
        def decorate(build):
            machines[name] = build
            if nics is not None:
                maps[name] = nics
            return build
        return decorate
    return named


fault = changes_into(faults)


def set_up(change, rows):
    """Machines that differ by a few steps, each a function of the tree; `change` is the decorator of their list."""
    for name, findings, text, *steps in rows:
        def build(tree, steps=steps):
            for step in steps:
                step(tree)
        build.__doc__ = text
        change(name, *findings.split())(build)


def set_variables(change, rows):
    """The same for machines that differ in variables alone."""
    set_up(change, [(name, findings, text, lambda tree, variables=variables: tree.environment.update(variables))
                    for name, findings, variables, text in rows])


def update_gpus(tree, **answers):
    """What NVML says of every GPU."""
    for gpu in tree.answers["nvml"]["gpus"]:
        gpu.update(answers)


def nic_folder(tree, name):
    """The real folder of an RDMA device."""
    return next(path for path in tree.entries if path.endswith(f"/infiniband/{name}/fw_ver")).rsplit("/", 1)[0]


def nic_port(tree, name):
    return nic_folder(tree, name) + "/ports/1"


def set_state(tree, name, state, phys_state):
    tree.put(f"{nic_port(tree, name)}/state", f"{state}\n")
    tree.put(f"{nic_port(tree, name)}/phys_state", f"{phys_state}\n")


def pci_folder(tree, address):
    return next(path for path in tree.entries if path.endswith(f"/{address}/vendor")).rsplit("/", 1)[0]


def unload(tree, module):
    tree.remove(f"/sys/module/{module}")
    tree.replace("/proc/modules", f"{module} 65536 1 - Live 0x0000000000000000\n", "")


# --- driver ---


@fault("h100/peermem", "peermem")
def no_way_for_a_nic_into_gpu_memory(tree):
    """The proprietary kernel modules give no dma-buf, and nvidia_peermem is not loaded."""
    tree.replace("/proc/driver/nvidia/version", "NVIDIA UNIX Open Kernel Module for x86_64",
                 "NVIDIA UNIX x86_64 Kernel Module")
    unload(tree, "nvidia_peermem")
    tree.remove("/sys/kernel/mm/memory_peers")


@fault("a4/driver-option-overruled", "driver-option")
def a_later_line_wins(tree):
    tree.put("/etc/modprobe.d/zz-power.conf", 'options nvidia NVreg_RegistryDwords="PowerMizerEnable=0x1"\n')
    tree.replace("/proc/driver/nvidia/params", "PeerMappingOverride=1;", "PowerMizerEnable=0x1")


@fault("h100/signed-modules")
def modules_signed_by_the_distribution(tree):
    """What is right: Ubuntu's prebuilt modules have the version of the kernel that they are for, not of the driver."""
    major = software.DRIVER.split(".")[0]
    tree.replace("/var/lib/dpkg/status", f"nvidia-driver-{major}-open", f"nvidia-headless-no-dkms-{major}-open")
    tree.append("/var/lib/dpkg/status",
                software.package(f"linux-modules-nvidia-{major}-open-6.8.0-87-generic", "6.8.0-87.88+1"))


@fault("a4/doca-kernel", "doca-kernel")
def doca_too_old_for_the_kernel(tree):
    """DOCA 3.0.0 does not compile for kernel 6.14: the distribution's modules are loaded instead."""
    tree.replace("/var/lib/dpkg/status", "Version: 3.2.1-044000", "Version: 3.0.0-058000")
    for name in ("mlx5_core", "mlx5_ib", "ib_core", "ib_uverbs"):
        tree.remove(f"/usr/lib/modules/{software.KERNEL}/updates/dkms/{name}.ko")
        tree.replace(f"/usr/lib/modules/{software.KERNEL}/modules.dep", f"updates/dkms/{name}.ko:\n", "")
        tree.remove(f"/sys/module/{name}/version")


@fault("a4/driver-skew", "driver-skew")
def driver_updated_and_not_reloaded(tree):
    for name in ("nvidia", "nvidia_uvm", "nvidia_peermem"):
        path = f"/usr/lib/modules/{software.KERNEL}/updates/dkms/{name}.ko"
        tree.replace(path, software.DRIVER, "580.140.02")
    tree.replace("/var/lib/dpkg/status", f"{software.DRIVER}-1ubuntu1", "580.140.02-1ubuntu1")


@fault("a4/driver-skew-library", "driver-skew")
def libraries_of_another_node(tree):
    """A container with the driver's libraries of another version in front."""
    for name in ("libcuda", "libnvidia-ml"):
        software.library(tree, X86_64, f"{name}.so.1", "", folder="/usr/local/nvidia/lib64")
        tree.remove(f"/usr/local/nvidia/lib64/{name}.so.1")
        tree.library(f"/usr/local/nvidia/lib64/{name}.so.570.172.08", link=f"{name}.so.1", soname=f"{name}.so.1")
    tree.environment["LD_LIBRARY_PATH"] = "/usr/local/nvidia/lib64:" + tree.environment["LD_LIBRARY_PATH"]


@fault("h100/driver-absent", "driver-skew")
def driver_not_loaded(tree):
    for name in ("nvidia", "nvidia_uvm", "nvidia_peermem"):
        unload(tree, name)
    tree.remove("/proc/driver")
    tree.answers["nvml"] = {"error": "Driver Not Loaded"}
    for path in list(tree.entries):
        if path.endswith("/driver") and tree.entries[path].target.endswith("/drivers/nvidia"):
            tree.remove(path)


@fault("gb200/iommu-gb200", "iommu-gb200")
def passthrough_on_grace(tree):
    tree.replace("/proc/cmdline", "init_on_alloc=0", "init_on_alloc=0 iommu.passthrough=1")


@fault("a4/gpu-errors-xid", "gpu-errors")
def fallen_off_the_bus(tree):
    tree.append("/var/log/kern.log",
                "1970-01-01T00:10:00.000000+00:00 node kernel: NVRM: Xid (PCI:0000:c4:00): 79, pid='<unknown>', "
                "name=<unknown>, GPU has fallen off the bus.\n")


@fault("h100/gpu-recovered")
def recovered_by_a_reset(tree):
    """What is right: the driver says that nothing is left to be done about an earlier Xid."""
    for text in ("95, pid='<unknown>', name=<unknown>, Uncontained: FBHUB (EP) error",
                 "154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)",
                 "154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"):
        tree.append("/var/log/kern.log",
                    f"1970-01-01T00:10:00.000000+00:00 node kernel: NVRM: Xid (PCI:0000:0f:00): {text}\n")


@fault("a4/nvlink", "nvlink")
def some_links_down(tree):
    tree.nvml(3)["nvlinks"][4] = tree.nvml(3)["nvlinks"][11] = "down"


@fault("h100/nvlink-cards")
def cards_without_bridges(tree):
    """What is right: cards whose NVLinks wait for a bridge that nobody bought."""
    for gpu in tree.answers["nvml"]["gpus"]:
        gpu.update(name="NVIDIA A40", nvlinks=["down"] * 4, fabric="none")


set_up(fault, (
    ("h100/nv-peer-mem", "", "What is right: nv_peer_mem does what nvidia_peermem does.",
     lambda tree: no_way_for_a_nic_into_gpu_memory(tree),
     lambda tree: software.load_module(tree, "nv_peer_mem", "1.3")),
    ("a4/driver-option", "driver-option", "No reboot since the option.",
     lambda tree: tree.replace("/proc/driver/nvidia/params", "PeerMappingOverride=1;", "")),
    ("a4/doca-packages", "",
     "What is right: an older DOCA whose modules came built, below updates and not updates/dkms.",
     lambda tree: doca_too_old_for_the_kernel(tree),
     lambda tree: tree.append(f"/usr/lib/modules/{software.KERNEL}/modules.dep",
                              "updates/mlnx-ofa_kernel/drivers/net/ethernet/mellanox/mlx5/core/mlx5_core.ko:\n")),
    ("a4/gpu-errors-ecc", "gpu-errors", "Uncorrected memory error.",
     lambda tree: tree.nvml(5).update(ecc_uncorrected=2)),
    ("a4/gpu-errors-remap", "gpu-errors", "Row remap waits for a reset.",
     lambda tree: tree.nvml(2).update(remap_pending=True)),
    ("h100/gpu-errors-lost", "gpu-errors", "Fallen off the bus: the driver has its device file, and NVML no handle.",
     lambda tree: tree.answers["nvml"]["gpus"].pop(3)),
    ("h100/nvlink-fabric", "nvlink", "Fabric manager is off.",
     lambda tree: update_gpus(tree, nvlinks=["down"] * 18, fabric="starting")),
))


# --- NICs ---


def storage_nics(tree):
    """The NICs that are for management become as fast as those for data, in an Ethernet of their own."""
    for name in ("mlx5_4", "mlx5_5"):
        tree.put(f"{nic_port(tree, name)}/rate", "400 Gb/sec (4X NDR)\n")


def without_ipv4(tree, name):
    """Without an IPv4 address on its interface a port has the link-local GIDs only."""
    port = nic_port(tree, name)
    for i in (2, 3):
        tree.put(f"{port}/gids/{i}", "0000:0000:0000:0000:0000:0000:0000:0000\n")
        tree.remove(f"{port}/gid_attrs/types/{i}")
        tree.remove(f"{port}/gid_attrs/ndevs/{i}")


@fault("h100/storage")
def storage_of_another_rate(tree):
    """What is right: 8 NICs for data, one for storage at half their rate, one as fast without an IPv4 address."""
    storage_nics(tree)
    tree.put(f"{nic_port(tree, 'mlx5_4')}/rate", "200 Gb/sec (4X HDR)\n")
    without_ipv4(tree, "mlx5_5")


@fault("a3u/gid-ipv6", "gid")
def network_with_ipv6_only(tree):
    for path in list(tree.entries):
        if "/gids/" in path and b":ffff:c000:" in tree.entries[path]:
            tree.replace(path, "0000:0000:0000:0000:0000:ffff:c000:", "2001:0db8:0000:0000:0000:0000:0000:")


@fault("h100/port-down", "port-down")
def cable_pulled(tree):
    set_state(tree, "mlx5_9", "1: DOWN", "2: Polling")


set_up(fault, (
    ("h100/slow-link-pcie", "slow-link", "Half the lanes.",
     lambda tree: tree.put(f"{pci_folder(tree, '0000:9a:00.0')}/current_link_width", "8\n")),
    ("h100/slow-link-rate", "slow-link", "Half the rate.",
     lambda tree: tree.put(f"{nic_port(tree, 'mlx5_2')}/rate", "200 Gb/sec (2X NDR)\n")),
    ("h100/storage-port-down", "port-down", "Cable pulled beside storage.",
     lambda tree: storage_nics(tree),
     lambda tree: cable_pulled(tree)),
    ("h100/storage-link-layer", "link-layer", "One port is Ethernet as storage is.",
     lambda tree: storage_nics(tree),
     lambda tree: one_port_is_ethernet(tree)),
    ("a4/gid", "gid", "No IPv4 GID.",
     lambda tree: without_ipv4(tree, "mlx5_6")),
    ("a4/gid-index", "gid", "Index of a RoCE v1 GID.",
     lambda tree: tree.environment.update(NVSHMEM_IB_GID_INDEX="2")),
    ("a4/port-down", "port-down shared-nic",
     "Two things to repair: the port, and until then the environment, which gives it to a GPU.",
     lambda tree: set_state(tree, "mlx5_3", "1: DOWN", "3: Disabled")),
))


@fault("h100/link-layer", "link-layer")
def one_port_is_ethernet(tree):
    tree.put(f"{nic_port(tree, 'mlx5_3')}/link_layer", "Ethernet\n")


@fault("a4/nic-access", "nic-access")
def device_files_not_for_this_user(tree):
    for i in range(8):
        tree.stats[f"/dev/infiniband/uverbs{i}"]["access"] = "---"


@fault("a4/nic-access-absent", "nic-access")
def device_files_not_in_the_container(tree):
    tree.remove("/dev/infiniband")
    for i in range(8):
        del tree.stats[f"/dev/infiniband/uverbs{i}"]


@fault("a3u/gid-ipv6-told")
def network_with_ipv6_only_and_told(tree):
    """What is right: the libraries are told to look for IPv6 addresses."""
    network_with_ipv6_only(tree)
    tree.environment["NVSHMEM_IB_ADDR_FAMILY"] = tree.environment["NCCL_IB_ADDR_FAMILY"] = "AF_INET6"


@fault("h100/pod-without-rdma")
def pod_without_rdma(tree):
    """What is right: sysfs shows all NICs in a container that was given none and does not ask for one."""
    tree.remove("/dev/infiniband")
    for path in list(tree.stats):
        if path.startswith("/dev/infiniband/"):
            del tree.stats[path]


@fault("vm-flat/workstation")
def one_cable_for_two_ports(tree):
    """What is right: two GPUs, and a card with two ports of which one has a cable."""
    for i in (2, 3):
        tree.remove(f"/proc/driver/nvidia/gpus/0000:00:{0x10 + i:02x}.0")
        for address in (f"0000:00:{0x10 + i:02x}.0", f"0000:00:{0x18 + i:02x}.0"):
            tree.remove(pci_folder(tree, address))
            tree.remove(f"/sys/bus/pci/devices/{address}")
        tree.remove(f"/sys/class/infiniband/mlx5_{i}")
        tree.remove(f"/sys/class/infiniband_verbs/uverbs{i}")
    del tree.answers["nvml"]["gpus"][2:]
    for path in list(tree.entries):
        entry = tree.entries.pop(path)
        if hasattr(entry, "target"):
            entry.target = entry.target.replace("0000:00:19.0", "0000:00:18.1")
        tree.entries[path.replace("0000:00:19.0", "0000:00:18.1")] = entry
    port = nic_port(tree, "mlx5_1")
    tree.put(f"{port}/state", "1: DOWN\n")
    tree.put(f"{port}/phys_state", "3: Disabled\n")


# --- verbs libraries ---


@fault("a4/provider-missing", "provider-missing")
def core_library_without_its_provider(tree):
    tree.remove(f"{X86_64.lib}/libibverbs/libmlx5-rdmav57.so")


@fault("a4/provider-missing-core", "provider-missing")
def no_libibverbs_at_all(tree):
    """NCCL's plugin and NVSHMEM's transport do not load, for one reason."""
    for path in list(tree.entries):
        if "/libibverbs.so" in path:
            del tree.entries[path]
    error = "libibverbs.so.1: cannot open shared object file: No such file or directory"
    for question in [name for name in tree.answers if name.startswith("load:")]:
        software.loads(tree, question.removeprefix("load:"), error)


@fault("a4/verbs-mixed", "verbs-mixed")
def core_and_provider_of_different_sets(tree):
    """The driver's folder holds libibverbs of another set, with its plugin, but not its libmlx5.so.1."""
    software.verbs(tree, X86_64, private=34, core="14.50.0", provider="24.50.0", folder="/usr/local/nvidia/lib64")
    tree.remove("/usr/local/nvidia/lib64/libmlx5.so.1")
    tree.environment["LD_LIBRARY_PATH"] = "/usr/local/nvidia/lib64:" + tree.environment["LD_LIBRARY_PATH"]


@fault("a4/rdmav-drivers", "rdmav-drivers")
def providers_as_a_folder(tree):
    tree.environment["RDMAV_DRIVERS"] = f"{X86_64.lib}/libibverbs"


@fault("a4/verbs-from-gib", "verbs-from-gib")
def gib_before_the_system(tree):
    path = tree.environment["LD_LIBRARY_PATH"].split(":")
    tree.environment["LD_LIBRARY_PATH"] = ":".join(["/usr/local/gib/lib64"] + path)


# --- NVSHMEM ---


@fault("a4/shared-nic", "shared-nic")
def two_gpus_on_one_nic(tree):
    mapping = tree.environment["DEEP_EP_DEVICE_TO_HCA_MAPPING"]
    tree.environment["DEEP_EP_DEVICE_TO_HCA_MAPPING"] = mapping.replace("3:mlx5_3", "3:mlx5_2")


def fresh_shell(tree):
    """Python finds DeepEP, which switches IBGDA on by itself; nobody has set anything else."""
    tree.environment = {name: tree.environment[name] for name in ("PATH", "HOME", "LANG", "PYTHONPATH")}


@fault("a4/nic-handler", "nic-handler")
def handler_on_the_cpu(tree):
    gdrcopy(tree)
    tree.environment["NVSHMEM_IBGDA_NIC_HANDLER"] = "cpu"


@fault("a4/nic-handler-fallback", "nic-handler")
def handler_falls_back(tree):
    """The driver option that the GPU needs to ring the NIC's doorbell is neither configured nor live."""
    tree.remove("/etc/modprobe.d/nvidia-deepep.conf")
    tree.replace("/proc/driver/nvidia/params", "PeerMappingOverride=1;", "")


@fault("a4/nic-handler-beside", "nic-handler")
def other_options_are_configured(tree):
    """The option is in no line, and there is one that a second would replace or be replaced by."""
    handler_falls_back(tree)
    tree.put("/etc/modprobe.d/zz-site.conf", 'options nvidia NVreg_RegistryDwords="PowerMizerEnable=0x1;"\n')


@fault("a4/ibgda-transport", "ibgda-transport")
def built_without_ibgda(tree):
    for name in ("nvshmem_transport_ibgda.so.3", "nvshmem_transport_ibgda.so.3.0.0"):
        tree.remove(f"/opt/deepep/nvshmem/lib/{name}")
        del tree.answers[f"load:/opt/deepep/nvshmem/lib/{name}"]


@fault("a4/ibgda-transport-unloadable", "ibgda-transport")
def transport_does_not_load(tree):
    for name in ("nvshmem_transport_ibgda.so.3", "nvshmem_transport_ibgda.so.3.0.0"):
        software.loads(tree, f"/opt/deepep/nvshmem/lib/{name}",
                       f"/opt/deepep/nvshmem/lib/{name}: undefined symbol: mlx5dv_devx_umem_reg_ex")


def gdrcopy(tree, *, module=True):
    software.library(tree, X86_64, "libgdrapi.so.2", "5")
    if module:
        software.load_module(tree, "gdrdrv", "2.5")
        tree.replace("/proc/devices", "507 nvidia-uvm\n", "505 gdrdrv\n507 nvidia-uvm\n")
        tree.device_node("/dev/gdrdrv")


@fault("a4/gdrcopy-device", "gdrcopy")
def gdrcopy_without_its_device(tree):
    """The module is loaded, but nothing has created its device, or the container was not given it."""
    handler_on_the_cpu(tree)
    tree.remove("/dev/gdrdrv")
    del tree.stats["/dev/gdrdrv"]


@fault("a4/home-preload", "home")
def one_of_several_to_preload_is_gone(tree):
    tree.environment["LD_PRELOAD"] = "/opt/nvshmem/lib/libtcmalloc.so.4:" + tree.environment["LD_PRELOAD"]


set_up(fault, (
    ("a4/one-nic", "one-nic", "Mapping by PE.",
     lambda tree: tree.environment.update(NVSHMEM_ENABLE_NIC_PE_MAPPING="1")),
    ("a4/shared-nic-by-default", "shared-nic",
     "Two GPUs on a switch: each sees the first of the two NICs there as its nearest.",
     lambda tree: tree.environment.pop("DEEP_EP_DEVICE_TO_HCA_MAPPING")),
    ("a4/no-env", "shared-nic two-nvshmem", "Nothing set.",
     lambda tree: fresh_shell(tree)),
    ("a3u/no-env", "hca-prefix two-nvshmem", "NVSHMEM finds no NIC at all, so that none is shared.",
     lambda tree: fresh_shell(tree)),
    ("a4/two-nvshmem", "two-nvshmem", "PyTorch brings its own.",
     lambda tree: tree.environment.pop("LD_PRELOAD")),
    ("a4/two-nvshmem-dangling", "two-nvshmem", "Preload of nothing.",
     lambda tree: tree.environment.update(LD_PRELOAD="/opt/nvshmem/lib/libnvshmem_host.so.3")),
    ("a4/gdrcopy", "gdrcopy", "Handler on the CPU without GDRCopy.",
     lambda tree: tree.environment.update(NVSHMEM_IBGDA_NIC_HANDLER="cpu")),
    ("a4/gdrcopy-denied", "gdrcopy", "GDRCopy for other users.",
     lambda tree: handler_on_the_cpu(tree),
     lambda tree: tree.stats["/dev/gdrdrv"].update(access="---")),
    ("a4/home", "home", "Homes that are not there.",
     lambda tree: tree.environment.update(GDRCOPY_HOME="/opt/deepep/gdrcopy")),
    ("a3u/hca-prefix", "hca-prefix", "Prefix of other names.",
     lambda tree: tree.environment.pop("NVSHMEM_HCA_PREFIX")),
    ("a4/void-variables", "void-variables", "Variables that do nothing.",
     lambda tree: tree.environment.update(NVSHMEM_IBGDA_SUPPORT="1"),
     lambda tree: tree.environment.update(NVSHMEM_USE_GDRCOPY="1")),
))


# --- NCCL and gIB ---


@fault("a4/net-plugin", "net-plugin")
def plugin_does_not_load(tree):
    for name in ("libnccl-net.so", "libnccl-net_internal.so"):
        software.loads(tree, f"/usr/local/gib/lib64/{name}",
                       "libprotobuf.so.32: cannot open shared object file: No such file or directory")


@fault("a4/two-nccl", "two-nccl")
def another_nccl_on_the_path(tree):
    software.library(tree, X86_64, "libnccl.so.2", "21.5", folder="/opt/nccl/lib")
    tree.environment["LD_LIBRARY_PATH"] += ":/opt/nccl/lib"


set_up(fault, (
    ("a4/net-plugin-missing", "net-plugin", "Plugin not installed.",
     lambda tree: tree.remove("/usr/local/gib/lib64/libnccl-net.so"),
     lambda tree: tree.remove("/usr/local/gib/lib64/libnccl-net_internal.so")),
    ("a4/gib-settings", "gib-settings", "Variable that must not be set.",
     lambda tree: tree.environment.update(TORCH_NCCL_USE_COMM_NONBLOCKING="0")),
    ("a4/gib-settings-value", "gib-settings", "Value that gIB does not expect.",
     lambda tree: tree.environment.update(NCCL_IB_TC="0")),
    ("a4/gib-settings-script", "gib-settings",
     "The installed script is what counts, not the values that were known once.",
     lambda tree: tree.replace("/usr/local/gib/scripts/set_nccl_env.sh", "NCCL_NVLS_CHUNKSIZE=524288",
                               'NCCL_NVLS_CHUNKSIZE="1048576"')),
    ("a4/two-nccl-system", "two-nccl",
     "Images for CUDA bring one along as a package, and the system's folder is in front for libibverbs.",
     lambda tree: software.library(tree, X86_64, "libnccl.so.2", "26.2")),
))


# --- DeepEP ---


@fault("a4/mapping-inactive", "mapping-inactive")
def defined_and_never_called(tree):
    for folder in ("python", "source"):
        tree.put(f"/opt/deepep/{folder}/deep_ep/buffer.py", software.buffer_py(call=False))


@fault("a4/mapping-inactive-decorator", "mapping-inactive")
def decorator_stolen(tree):
    """The method was inserted between a decorator and the function that it belongs to."""
    text = software.buffer_py(method=False)
    text = text.replace("    @staticmethod\n    def is_sm90",
                        "    @staticmethod\n" + software.MAPPING_METHOD + "    def is_sm90")
    for folder in ("python", "source"):
        tree.put(f"/opt/deepep/{folder}/deep_ep/buffer.py", text)


@fault("a4/other-nvshmem", "other-nvshmem")
def built_against_another_nvshmem(tree):
    software.nvshmem(tree, X86_64, "/opt/nvshmem-3.3.9", "3.3.9")
    software.deepep_extension(tree, X86_64, f"/opt/deepep/python/{software.DEEPEP_EXTENSION}", archs=[90, 100],
                              nvshmem_lib="/opt/nvshmem-3.3.9/lib")


@fault("a4/gpu-arch", "gpu-arch")
def built_for_another_gpu(tree):
    software.deepep_extension(tree, X86_64, f"/opt/deepep/python/{software.DEEPEP_EXTENSION}", archs=[90])


set_up(fault, (
    ("a4/stale-copy", "stale-copy", "Copied before it was patched.",
     lambda tree: tree.put("/opt/deepep/python/deep_ep/buffer.py", software.buffer_py(call=False, method=False))),
    ("a4/deepep-too-old", "deepep-too-old", "Older than what NVSHMEM needs.",
     lambda tree: tree.remove(f"/opt/deepep/python/deep_ep-{software.DEEPEP_VERSION}.dist-info"),
     lambda tree: software.wheel(tree, "deep_ep", "1.1.0+c50f3d6", "/opt/deepep/python")),
    ("a4/build-files", "build-files", "Link for the linker is missing.",
     lambda tree: tree.remove(f"{X86_64.lib}/libmlx5.so")),
    ("a4/build-files-cccl", "build-files", "Header of cccl is missing.",
     lambda tree: tree.remove("/usr/local/cuda-12.9/include/cuda")),
))


# --- limits ---


set_up(fault, (
    ("a4/memlock", "memlock", "Little locked memory.",
     lambda tree: tree.replace("/proc/self/limits", "Max locked memory         unlimited            unlimited ",
                               "Max locked memory         8388608              8388608   ")),
    ("a4/shm", "shm", "Shm of a container.",
     lambda tree: tree.replace("/proc/self/mounts", "size=268435456k", "size=65536k")),
    ("laptop/shm", "", "What is right: no rank shares memory with another.",
     lambda tree: tree.replace("/proc/self/mounts", "size=16777216k", "size=65536k")),
))


# --- topology ---


@fault("gb200/imex", "imex")
def no_imex_channel(tree):
    for i in range(4):
        tree.remove(f"/dev/nvidia-caps-imex-channels/channel{i}")
        del tree.stats[f"/dev/nvidia-caps-imex-channels/channel{i}"]


@fault("a4/visible-devices-uuid", "visible-devices")
def by_uuid(tree):
    tree.environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpu["uuid"] for gpu in tree.answers["nvml"]["gpus"])


@fault("h100/acs", "acs")
def requests_are_redirected(tree):
    """Source validation, request and completion redirect, upstream forwarding on the ports of one switch."""
    for address in ("0000:3e:00.0", "0000:3e:1f.0"):
        tree.put(f"{pci_folder(tree, address)}/config",
                 pci_config(BROADCOM, 0xC030, PCI_BRIDGE, DOWNSTREAM, acs=0x001D))


@fault("h100/iommu", "iommu")
def translation_on(tree):
    tree.replace("/proc/cmdline", " iommu=pt", " intel_iommu=on")
    for path in list(tree.entries):
        if path.startswith("/sys/kernel/iommu_groups/") and path.endswith("/type"):
            tree.put(path, "DMA-FQ\n")


@fault("laptop/iommu")
def one_gpu_behind_the_iommu(tree):
    """What is right: a kernel's default, and nothing that a lone GPU would talk to directly."""
    tree.put("/sys/kernel/iommu_groups/1/type", "DMA-FQ\n")
    tree.link("/sys/kernel/iommu_groups/1/devices/0000:01:00.0", "../../../../bus/pci/devices/0000:01:00.0")
    tree.put(f"{pci_folder(tree, '0000:00:01.0')}/config", pci_config(0x8086, 0xA70D, PCI_BRIDGE, DOWNSTREAM, acs=0x001D))


@fault("h100/no-devices")
def step_without_gpus(tree):
    """What is right: Slurm's word for a step that has no GPU."""
    tree.environment["CUDA_VISIBLE_DEVICES"] = "NoDevFiles"


@fault("h100/one-task")
def shell_of_one_task(tree):
    """What is right: the only task on the node, bound to the far socket, may start the ranks itself."""
    tree.environment.update(CUDA_VISIBLE_DEVICES="0,1,2,3,4,5,6,7", SLURM_LOCALID="0", SLURM_STEP_TASKS_PER_NODE="1")
    tree.replace("/proc/self/status", "Cpus_allowed_list:\t0-223", "Cpus_allowed_list:\t56-69")


set_up(fault, (
    ("gb200/imex-fabric", "imex", "Fabric not joined.",
     lambda tree: update_gpus(tree, fabric="starting")),
    ("a4/visible-devices", "visible-devices", "Permuted.",
     lambda tree: tree.environment.update(CUDA_VISIBLE_DEVICES="4,5,6,7,0,1,2,3")),
    ("a4/affinity", "affinity", "Bound to the other NUMA node.",
     lambda tree: tree.environment.update(LOCAL_RANK="1"),
     lambda tree: tree.replace("/proc/self/status", "Cpus_allowed_list:\t0-223", "Cpus_allowed_list:\t56-111,168-223")),
))


@fault("h100/job")
def job_with_two_gpus(tree):
    """What is right: Slurm's device cgroup keeps six GPUs from a job, which /proc/driver/nvidia/gpus lists."""
    tree.answers["nvml"]["gpus"] = tree.answers["nvml"]["gpus"][4:6]
    for minor in (0, 1, 2, 3, 6, 7):
        tree.stats[f"/dev/nvidia{minor}"]["access"] = "---"
    tree.environment.update(CUDA_VISIBLE_DEVICES="0,1", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")
    tree.replace("/proc/self/status", "Cpus_allowed_list:\t0-223", "Cpus_allowed_list:\t56-69")


# --- whole scripts ---

# What the environment script of a published installation guide for B200 machines exports.
TESTBED = {
    "NVSHMEM_HOME": "/opt/deepep/nvshmem",
    "CUDA_HOME": "/usr/local/cuda",
    "LD_LIBRARY_PATH": "/opt/deepep/nvshmem/lib:/usr/local/cuda/lib64:",
    "LD_PRELOAD": "/opt/deepep/nvshmem/lib/libnvshmem_host.so.3",
    "NVSHMEM_REMOTE_TRANSPORT": "ibgda",
    "NVSHMEM_IB_ENABLE_IBGDA": "1",
    "NVSHMEM_IBGDA_NIC_HANDLER": "gpu",
    "NVSHMEM_HCA_PREFIX": "mlx5",
    "NVSHMEM_IB_GID_INDEX": "3",
    "NVSHMEM_DISABLE_CUDA_VMM": "1",
    "NVSHMEM_ENABLE_NIC_PE_MAPPING": "1",
    "NVSHMEM_IBGDA_NUM_RC_PER_PE": "8",
    "NVSHMEM_IBGDA_NUM_DCI": "4",
    "DEEP_EP_DEVICE_TO_HCA_MAPPING":
        "0:mlx5_0:1,1:mlx5_1:1,2:mlx5_2:1,3:mlx5_3:1,4:mlx5_4:1,5:mlx5_5:1,6:mlx5_6:1,7:mlx5_7:1",
    "PYTHONPATH": "/opt/deepep/python:",
}


@fault("a4/testbed-env", "one-nic", "void-variables")
def environment_of_the_testbed(tree):
    tree.environment = {name: tree.environment[name] for name in ("PATH", "HOME", "LANG")}
    tree.environment.update(TESTBED)


# The environment of a published Kubernetes job for such machines, which mounts the libraries that the node's installer
# copied to one folder.
JOB = {
    "LD_LIBRARY_PATH": "/usr/local/nvidia/lib64:/usr/local/nvidia/lib:/usr/local/gib/lib64",
    "PYTHONPATH": "/usr/local/nvidia/deepep",
    "RDMAV_DRIVERS": "/usr/local/nvidia/lib64/libibverbs",
    "NCCL_NET": "gIB",
    "NCCL_IB_TC": "52",
    "NCCL_IB_ADAPTIVE_ROUTING": "1",
    "NCCL_IB_QPS_PER_CONNECTION": "4",
    "NCCL_CROSS_NIC": "0",
    "NCCL_NET_GDR_LEVEL": "PIX",
    "NCCL_P2P_NET_CHUNKSIZE": "131072",
    "NCCL_NVLS_CHUNKSIZE": "524288",
    "NCCL_IB_FIFO_TC": "84",
    "NCCL_TUNER_CONFIG_PATH": "/usr/local/gib/configs/tuner_config_a4.txtpb",
    "GDRCOPY_HOME": "/opt/deepep/gdrcopy",
    "NVSHMEM_HOME": "/opt/deepep/nvshmem",
    "NVSHMEM_IBGDA_SUPPORT": "1",
    "NVSHMEM_USE_GDRCOPY": "1",
    "USE_NVPEERMEM": "1",
    "CUDA_HOME": "/usr/local/cuda",
    "TORCH_CUDA_ARCH_LIST_B200": "10.0",
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "0",
}


@fault("a4/job-env", "gib-settings", "home", "provider-missing", "rdmav-drivers", "shared-nic", "two-nvshmem",
       "void-variables")
def environment_of_the_job(tree):
    for path in list(tree.entries):
        if path.startswith(f"{X86_64.lib}/lib") and ("ibverbs" in path or "mlx5" in path or "rdmacm" in path):
            del tree.entries[path]
    software.verbs(tree, X86_64, private=34, core="14.50.0", provider="24.50.0")
    software.verbs_development(tree, X86_64)
    folder = "/usr/local/nvidia/lib64"
    software.verbs(tree, X86_64, private=57, core="14.56.0", provider="25.56.0", folder=folder, provider_in="")
    for path in tree.below("/opt/deepep/nvshmem/lib"):
        tree.entries[folder + path.removeprefix("/opt/deepep/nvshmem/lib")] = tree.entries[path]
    for path in tree.below("/opt/deepep/python"):
        tree.entries["/usr/local/nvidia/deepep" + path.removeprefix("/opt/deepep/python")] = tree.entries[path]
    tree.remove("/opt/deepep")
    tree.environment = {name: tree.environment[name] for name in ("PATH", "HOME", "LANG")}
    tree.environment.update(JOB)
