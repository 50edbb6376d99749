# SPDX-License-Identifier: Apache-2.0
"""Machines of the kinds that clusters have, each with its fault or, beside it, healthy: what a NIC is for, which device
is meant, what a process may use, what could not be told, and one GPU a task.

Each function changes a golden machine as little as possible. A name of an expected outcome with '?' in front is a check
that could not tell: then the verdict is not known.
"""
import re

import software
from software import X86_64
from tree import NVIDIA, relative
from variants import (core_and_provider_of_different_sets, driver_not_loaded, fault, nic_folder, nic_port, pci_folder,
                      set_state, set_up, unload)

AMAZON, BNXT = 0x1D0F, 0x14E4


# --- changes ---


def remove_nic(tree, name):
    """As if it had never been on the bus."""
    folder = nic_folder(tree, name)
    pci = folder.rsplit("/infiniband/", 1)[0]
    address = pci.rsplit("/", 1)[1]
    verbs = [path for path in tree.entries if path.startswith(f"{pci}/infiniband_verbs/uverbs")]
    uverbs = verbs[0][len(f"{pci}/infiniband_verbs/"):].split("/")[0]
    for path in list(tree.entries):
        target = getattr(tree.entries[path], "target", "")
        if path.startswith(pci + "/") or f"/{address}/" in target + "/":
            del tree.entries[path]
    forget_uverbs(tree, uverbs)


def forget_uverbs(tree, uverbs):
    tree.remove(f"/dev/infiniband/{uverbs}")
    del tree.stats[f"/dev/infiniband/{uverbs}"]


def uverbs_of(tree, name):
    pci = nic_folder(tree, name).rsplit("/infiniband/", 1)[0]
    return next(path for path in tree.entries
                if path.startswith(f"{pci}/infiniband_verbs/uverbs")).split("/infiniband_verbs/")[1].split("/")[0]


def take_uverbs(tree, *names):
    """A container that was not given these devices: sysfs shows them all the same."""
    for name in names:
        forget_uverbs(tree, uverbs_of(tree, name))


def without_rdma(tree, name):
    """The function stays, with its network interface."""
    folder = nic_folder(tree, name)
    pci = folder.rsplit("/infiniband/", 1)[0]
    uverbs = uverbs_of(tree, name)
    for path in list(tree.entries):
        if path.startswith((f"{pci}/infiniband/", f"{pci}/infiniband_verbs/")):
            del tree.entries[path]
    del tree.entries[f"/sys/class/infiniband/{name}"]
    del tree.entries[f"/sys/class/infiniband_verbs/{uverbs}"]
    forget_uverbs(tree, uverbs)


def set_rate(tree, name, rate):
    tree.put(f"{nic_port(tree, name)}/rate", f"{rate}\n")


def set_layer(tree, name, layer):
    tree.put(f"{nic_port(tree, name)}/link_layer", f"{layer}\n")


def set_make(tree, name, vendor, device, hca):
    pci = nic_folder(tree, name).rsplit("/infiniband/", 1)[0]
    tree.put(f"{pci}/vendor", f"0x{vendor:04x}\n")
    tree.put(f"{pci}/device", f"0x{device:04x}\n")
    tree.put(f"{nic_folder(tree, name)}/hca_type", f"{hca}\n")


def bond(tree, bond_name, *members):
    for member in members:
        tree.link(f"/sys/class/net/{bond_name}/lower_{member}", f"../{member}")
    tree.put(f"/sys/class/net/{bond_name}/operstate", "up\n")
    tree.default_route(bond_name)


def deny(tree, *minors):
    """The device cgroup of a job."""
    for minor in minors:
        tree.stats[f"/dev/nvidia{minor}"]["access"] = "---"


def one_task(tree, gpu, n_gpus=8):
    """A task of Slurm that was given one GPU, which it calls 0."""
    tree.answers["nvml"]["gpus"] = [tree.answers["nvml"]["gpus"][gpu]]
    deny(tree, *[minor for minor in range(n_gpus) if minor != gpu])
    tree.environment.update(CUDA_VISIBLE_DEVICES="0", LOCAL_RANK=str(gpu), LOCAL_WORLD_SIZE=str(n_gpus))


def in_container(tree):
    tree.put("/run/.containerenv", "")
    tree.environment["container"] = "podman"


RAILS = [f"mlx5_{i}" for i in (0, 1, 2, 3, 6, 7, 8, 9)]  # of h100; 4 and 5 are its uplinks


def four_rails(tree, rate="200 Gb/sec (4X HDR)"):
    """h100-4nic: 4 HCAs and the two others at the same distance and of the same make, so that only facts tell."""
    for name in ("mlx5_0", "mlx5_1", "mlx5_4", "mlx5_5"):
        set_rate(tree, name, rate)


# --- what a NIC is for ---


@fault("h100-4nic/uplinks-same-rate")
def uplinks_as_fast_as_hcas(tree):
    """What is right: the same with EDR and 100 GbE of the same make; one uplink has the route, the other none."""
    four_rails(tree, "100 Gb/sec (4X EDR)")
    for name in ("mlx5_2", "mlx5_3"):
        set_make(tree, name, 0x15B3, 0x1021, "MT4129")


@fault("vm-flat/uplink-ipv6")
def uplink_by_an_ipv6_route(tree):
    """What is right: the same on a network with IPv6 alone."""
    remove_nic(tree, "mlx5_3")
    tree.remove("/proc/net/route")
    zeros = "0" * 32
    tree.put("/proc/net/ipv6_route",
             f"{zeros} 00 {zeros} 00 20010db8000000000000000000000001 00000400 00000001 00000000 00000003     eth1\n"
             f"{zeros} 00 {zeros} 00 {zeros} ffffffff 00000001 00000000 00200200       lo\n")


@fault("vm-flat/bond-of-all")
def bond_of_all_nics(tree):
    """What is right: there are two NICs, both in the bond with the default route, and GPUs use them."""
    remove_nic(tree, "mlx5_2")
    remove_nic(tree, "mlx5_3")
    bond(tree, "bond0", "eth1", "eth2")


@fault("vm-flat/lone-down", "port-down")
def lone_nic_is_down(tree):
    """The only NIC of four GPUs, which carries the default route as well."""
    for i in (1, 2, 3):
        remove_nic(tree, f"mlx5_{i}")
    tree.default_route("eth1")
    set_state(tree, "mlx5_0", "1: DOWN", "3: Disabled")


@fault("h100/vlan-uplink")
def uplinks_below_a_vlan_on_a_bond(tree):
    """What is right: as fast as the rails, of another layer, below bond0.100."""
    for name in ("mlx5_4", "mlx5_5"):
        set_rate(tree, name, "400 Gb/sec (4X NDR)")
        set_make(tree, name, 0x15B3, 0x1021, "MT4129")
    bond(tree, "bond0", "ens0f0np0", "ens1f0np0")
    tree.link("/sys/class/net/bond0.100/lower_bond0", "../bond0")
    tree.default_route("bond0.100")


@fault("h100/link-layer-route", "link-layer")
def odd_port_with_an_address(tree):
    """A rail that speaks Ethernet, and somebody uses it so: no command may take it away."""
    set_layer(tree, "mlx5_3", "Ethernet")
    port = nic_port(tree, "mlx5_3")
    tree.put(f"{port}/gids/1", "0000:0000:0000:0000:0000:ffff:c000:02c8\n")
    tree.put(f"{port}/gid_attrs/types/1", "RoCE v2\n")


set_up(fault, (
    ("h100-4nic/uplinks", "",
     "What is right: 4 HDR HCAs for 8 GPUs, and 2 x 100 GbE as a bond with the default route, half as fast.",
     lambda tree: four_rails(tree),
     lambda tree: bond(tree, "bond0", "ens0f0np0", "ens1f0np0")),
    ("vm-flat/uplink", "", "What is right: three rails would not do, two and the uplink with the default route do.",
     lambda tree: remove_nic(tree, "mlx5_3"),
     lambda tree: tree.default_route("eth1")),
    ("vm-flat/rail-with-route", "",
     "What is right: as many alike NICs as GPUs; the default route goes over one of them.",
     lambda tree: tree.default_route("eth2")),
    ("h100/rail-gone", "port-down", "Storage as fast, of the same make and layer does not take its place.",
     lambda tree: storage_of_the_same_make(tree),
     lambda tree: remove_nic(tree, "mlx5_7")),
))


@fault("h100/storage-infiniband")
def storage_of_the_same_make(tree):
    """What is right: the same with all rails."""
    for name in ("mlx5_4", "mlx5_5"):
        set_rate(tree, name, "400 Gb/sec (4X NDR)")
        set_layer(tree, name, "InfiniBand")
        set_make(tree, name, 0x15B3, 0x1021, "MT4129")


@fault("h100/bluefield")
def bluefield_for_storage(tree):
    """What is right: rails of RoCE, and two BlueField-3 for storage, as fast and Ethernet as well."""
    for name in RAILS:
        roce(tree, name)
    for name in ("mlx5_4", "mlx5_5"):
        set_rate(tree, name, "400 Gb/sec (4X NDR)")
        set_make(tree, name, 0x15B3, 0xA2DC, "MT41692")


def roce(tree, name):
    set_layer(tree, name, "Ethernet")
    port, number = nic_port(tree, name), int(name.split("_")[1])
    tree.put(f"{port}/gids/1", f"0000:0000:0000:0000:0000:ffff:c000:02{number + 1:02x}\n")
    tree.put(f"{port}/gid_attrs/types/1", "RoCE v2\n")


@fault("h100-16nic/efa")
def two_efa_for_each_gpu(tree):
    """What is right: EFA tells no link layer, and is not NVIDIA's; two for each GPU, as the shape of p5en."""
    for path in list(tree.entries):
        if path.endswith("/link_layer"):
            folder = path.rsplit("/ports/", 1)[0]
            pci = folder.rsplit("/infiniband/", 1)[0]
            if "mlx5_8" in folder or "mlx5_9" in folder:
                continue
            tree.put(path, "Unspecified\n")
            tree.put(f"{folder}/ports/1/rate", "200 Gb/sec (4X HDR)\n")
            tree.put(f"{pci}/vendor", f"0x{AMAZON:04x}\n")
            tree.put(f"{pci}/device", "0xefa3\n")


# --- ports ---


@fault("h100/subnet-manager", "port-down")
def no_subnet_manager(tree):
    """The links are up, and nobody gives addresses."""
    for name in RAILS:
        set_state(tree, name, "2: INIT", "5: LinkUp")


@fault("h100/subnet-manager-one", "port-down")
def one_port_is_not_managed(tree):
    set_state(tree, "mlx5_2", "2: INIT", "5: LinkUp")


# --- which device ---


@fault("h100/gpu-lost", "gpu-errors")
def gpu_3_off_the_bus(tree):
    """NVML counts the other 7 from 0 to 6; its device file and its place on the bus stay."""
    del tree.answers["nvml"]["gpus"][3]
    tree.append("/var/log/kern.log",
                "1970-01-01T00:10:00.000000+00:00 node kernel: NVRM: Xid (PCI:0000:61:00): 79, pid='<unknown>', "
                "name=<unknown>, GPU has fallen off the bus.\n")


@fault("h100/gpu-lost-silently", "gpu-errors")
def gpu_gone_without_an_xid(tree):
    """Its minor number is 3 as before, NVML's index 3 is another GPU now."""
    del tree.answers["nvml"]["gpus"][3]


@fault("h100/gpu-ecc-renumbered", "gpu-errors")
def error_of_a_gpu_whose_numbers_differ(tree):
    """A job with the last two GPUs, its 0 and 1: minor number 7 is its GPU 1."""
    tree.answers["nvml"]["gpus"] = tree.answers["nvml"]["gpus"][6:]
    deny(tree, *range(6))
    tree.nvml(1)["ecc_uncorrected"] = 3


# --- nothing can work ---


def closed(tree):
    tree.replace("/proc/driver/nvidia/version", "NVIDIA UNIX Open Kernel Module for x86_64",
                 "NVIDIA UNIX x86_64 Kernel Module")


@fault("a4/closed-driver", "open-driver")
def closed_driver_on_blackwell(tree):
    """The driver is loaded and drives none of them."""
    closed(tree)
    device_files_are_not_made(tree)
    for path in [path for path in tree.entries if path.startswith("/proc/driver/nvidia/gpus/")]:
        del tree.entries[path]


@fault("h100/nouveau", "driver-skew")
def nouveau_has_all_gpus(tree):
    drivers = [path for path in tree.entries
               if path.endswith("/driver") and tree.entries[path].target.endswith("/drivers/nvidia")]
    driver_not_loaded(tree)
    for path in drivers:
        tree.link(path, relative(path.rsplit("/", 1)[0], "/sys/bus/pci/drivers/nouveau"))
    tree.folder("/sys/bus/pci/drivers/nouveau")


@fault("h100/device-files", "gpu-access")
def device_files_are_not_made(tree):
    """On the machine itself: nobody has made /dev/nvidia0 and its like since the start."""
    tree.answers["nvml"] = {"driver": software.DRIVER, "gpus": []}
    for minor in range(8):
        tree.remove(f"/dev/nvidia{minor}")
        del tree.stats[f"/dev/nvidia{minor}"]


@fault("h100/mlx5-ib", "rdma-device")
def mlx5_ib_is_not_loaded(tree):
    for i in range(10):
        without_rdma(tree, f"mlx5_{i}")
    unload(tree, "mlx5_ib")


@fault("h100/uplinks-without-rdma")
def uplinks_without_rdma(tree):
    """What is right: RDMA is switched off for the uplinks, and all rails have it."""
    for name in ("mlx5_4", "mlx5_5"):
        without_rdma(tree, name)


@fault("vm-flat/ethernet-only")
def card_that_is_a_network_interface_only(tree):
    """What is right: one card for the network, not beside a GPU, and nothing asks for RDMA of it."""
    for i in (1, 2, 3):
        remove_nic(tree, f"mlx5_{i}")
    without_rdma(tree, "mlx5_0")
    unload(tree, "mlx5_ib")


def other_nics(tree, vendor, device, hca, names):
    for i in range(8):
        set_make(tree, f"mlx5_{i}", vendor, device, hca)
    for path in list(tree.entries):
        entry = tree.entries.pop(path)
        if hasattr(entry, "target"):
            entry.target = entry.target.replace("infiniband/mlx5_", f"infiniband/{names}")
        elif path.endswith("/ibdev"):
            entry = entry.replace(b"mlx5_", names.encode())
        tree.entries[path.replace("infiniband/mlx5_", f"infiniband/{names}")] = entry
    for name in ("DEEP_EP_DEVICE_TO_HCA_MAPPING", "NVSHMEM_IB_ENABLE_IBGDA", "NVSHMEM_IBGDA_NIC_HANDLER"):
        del tree.environment[name]


def without_gib(tree):
    tree.remove("/usr/local/gib")
    for name in [name for name in tree.environment if name.startswith("NCCL_")]:
        del tree.environment[name]
    path = tree.environment["LD_LIBRARY_PATH"].replace(":/usr/local/gib/lib64", "")
    tree.environment["LD_LIBRARY_PATH"] = path


@fault("a4/efa", "ibgda-nic")
def deepep_on_efa(tree):
    other_nics(tree, AMAZON, 0xEFA2, "", "rdmap")
    without_gib(tree)
    software.library(tree, software.X86_64, "libnccl-net.so", "")
    software.loads(tree, f"{software.X86_64.lib}/libnccl-net.so")


def some_other_nics(tree, numbers, vendor, device, hca, name):
    """These of the mlx5_N become NAME0, NAME1, ... of another maker."""
    new = {}
    for i, number in enumerate(numbers):
        set_make(tree, f"mlx5_{number}", vendor, device, hca)
        new[f"mlx5_{number}"] = f"{name}{i}"

    def renamed(text):
        return re.sub(r"(?<=infiniband/)mlx5_[0-9]+(?=/|$)", lambda found: new.get(found[0], found[0]), text)

    for path in list(tree.entries):
        entry = tree.entries.pop(path)
        if hasattr(entry, "target"):
            entry.target = renamed(entry.target)
        elif path.endswith("/ibdev"):
            old = entry.decode().strip()
            entry = f"{new.get(old, old)}\n".encode()
        tree.entries[renamed(path)] = entry


@fault("a4/two-makers", "ibgda-nic")
def half_of_the_rails_of_another_maker(tree):
    """The mapping is that of 'epkit env': two GPUs share each of NVIDIA's NICs."""
    some_other_nics(tree, range(1, 8, 2), BNXT, 0x1760, "BCM57608", "bnxt_re")
    tree.environment["DEEP_EP_DEVICE_TO_HCA_MAPPING"] = ",".join(f"{gpu}:mlx5_{gpu // 2 * 2}:1" for gpu in range(8))
    without_gib(tree)


@fault("a4/two-makers-mapped", "ibgda-nic")
def mapping_to_nics_of_another_maker(tree):
    half_of_the_rails_of_another_maker(tree)
    tree.environment["DEEP_EP_DEVICE_TO_HCA_MAPPING"] = ",".join(
        f"{gpu}:{f'bnxt_re{gpu // 2}' if gpu % 2 else f'mlx5_{gpu}'}:1" for gpu in range(8))


@fault("a4/three-nics", "port-down")
def five_nics_missing(tree):
    """NVSHMEM puts more GPUs on one NIC than necessary, but no NIC is idle."""
    for i in (1, 3, 4, 5, 7):
        remove_nic(tree, f"mlx5_{i}")
    del tree.environment["DEEP_EP_DEVICE_TO_HCA_MAPPING"]
    without_gib(tree)


@fault("a4/unknown-nics", "?ibgda-nic")
def makers_are_not_shown(tree):
    other_nics(tree, BNXT, 0x1760, "BCM57608", "bnxt_re")
    for i in range(8):
        pci = nic_folder(tree, f"bnxt_re{i}").rsplit("/infiniband/", 1)[0]
        tree.remove(f"{pci}/vendor")
    without_gib(tree)


@fault("a4/no-nics", "port-down")
def the_pod_has_no_nics(tree):
    """Its environment has been written for a node with all of them."""
    for i in range(8):
        remove_nic(tree, f"mlx5_{i}")


@fault("a4/no-nics-unwanted")
def no_nics_and_none_wanted(tree):
    """What is right: NCCL's plugin and prefix come with the image, and name no NIC of this machine."""
    the_pod_has_no_nics(tree)
    del tree.environment["DEEP_EP_DEVICE_TO_HCA_MAPPING"]
    tree.environment["NCCL_IB_HCA"] = "mlx5"


@fault("a4/broadcom-nccl")
def nccl_on_broadcom(tree):
    """What is right: nothing needs IBGDA there."""
    other_nics(tree, BNXT, 0x1760, "BCM57608", "bnxt_re")
    without_gib(tree)
    tree.remove("/opt/deepep")
    for name in ("PYTHONPATH", "LD_PRELOAD", "NVSHMEM_HOME"):
        del tree.environment[name]
    tree.environment["LD_LIBRARY_PATH"] = X86_64.lib


@fault("h100/libcuda", "libcuda")
def libcuda_off_the_path(tree):
    """GKE mounts the driver's libraries at /usr/local/nvidia, and the image does not look there."""
    in_container(tree)
    for soname in ("libcuda.so", "libnvidia-ml.so"):
        for path in [path for path in tree.entries if path.startswith(f"{X86_64.lib}/{soname}")]:
            tree.entries[path.replace(X86_64.lib, "/usr/local/nvidia/lib64")] = tree.entries.pop(path)


def cuda_library(tree, folder, version, where="front"):
    """Another libcuda.so.1, in front of the driver's or behind it."""
    tree.library(f"{folder}/libcuda.so.{version}" if version else f"{folder}/libcuda.so", link="libcuda.so.1",
                 soname="libcuda.so.1", needed=["libc.so.6"])
    path = tree.environment["LD_LIBRARY_PATH"]
    tree.environment["LD_LIBRARY_PATH"] = f"{folder}:{path}" if where == "front" else f"{path}:{folder}"


def without_driver(tree, address, minor, driver=""):
    """One GPU that NVIDIA's driver does not have, while it has the others."""
    folder = pci_folder(tree, address)
    del tree.entries[f"{folder}/driver"]
    if driver:
        tree.folder(f"/sys/bus/pci/drivers/{driver}")
        tree.link(f"{folder}/driver", relative(folder, f"/sys/bus/pci/drivers/{driver}"))
    tree.remove(f"/proc/driver/nvidia/gpus/{address}")
    tree.answers["nvml"]["gpus"] = [gpu for gpu in tree.answers["nvml"]["gpus"] if gpu["pci"] != address]
    tree.remove(f"/dev/nvidia{minor}")
    del tree.stats[f"/dev/nvidia{minor}"]


@fault("h100/vgpu")
def functions_of_a_gpu(tree):
    """What is right: functions that a GPU is divided into, which wait for virtual machines without a driver."""
    physical = pci_folder(tree, "0000:52:00.0")
    for i in (4, 5):
        function = tree.pci(f"0000:52:00.{i}", physical.rsplit("/", 1)[0], NVIDIA, 0x2330, 0x030200, numa=0)
        tree.link(f"{function}/physfn", relative(function, physical))


set_up(fault, (
    ("h100/closed-driver", "",
     "What is right: before Blackwell both kinds do, and nvidia_peermem lets NICs into GPU memory.",
     lambda tree: closed(tree)),
    ("h100/no-gres", "gpu-access", "Slurm without --gres: the device cgroup keeps all GPUs shut.",
     lambda tree: tree.answers.update(nvml={"driver": software.DRIVER, "gpus": []}),
     lambda tree: deny(tree, *range(8))),
    ("h100/device-mode", "gpu-access", "NVML answers, which takes less.",
     lambda tree: deny(tree, *range(8))),
    ("h100/no-gres-nvml", "gpu-access",
     "The same where /dev/nvidiactl is kept shut as well, so that NVML does not start.",
     lambda tree: tree.answers.update(nvml={"error": "NVML: Insufficient Permissions"}),
     lambda tree: deny(tree, *range(8))),
    ("h100/nvml-dead", "?gpu-errors ?nvlink ?mig ?clocks ?fabric-manager", "NVML does not answer.",
     lambda tree: tree.answers.update(nvml={"error": "NVML: Unknown Error"})),
    ("h100/nvml-dead-one", "?gpu-errors ?nvlink ?mig ?clocks ?fabric-manager",
     "What a sick driver does: there is no answer at all.",
     lambda tree: tree.answers.pop("nvml")),
    ("h100/container-without-gpus", "?gpu-access",
     "A container that was given none, and does not say that it wants any: nobody knows about the machine.",
     lambda tree: in_container(tree),
     lambda tree: device_files_are_not_made(tree)),
    ("h100/mlx5-unbound", "rdma-device", "One function is not bound.",
     lambda tree: without_rdma(tree, "mlx5_8")),
    ("h100/mlx5-unbound-untold", "rdma-device", "The same where the model of the first NIC cannot be read.",
     lambda tree: without_rdma(tree, "mlx5_8"),
     lambda tree: tree.remove(nic_folder(tree, "mlx5_0").rsplit("/infiniband/", 1)[0] + "/device")),
    ("a4/broadcom", "ibgda-nic", "DeepEP on broadcom.",
     lambda tree: other_nics(tree, BNXT, 0x1760, "BCM57608", "bnxt_re"),
     lambda tree: without_gib(tree)),
    ("h100/hca-list", "nccl-hca", "Unset, it would lead NCCL to the uplinks as well.",
     lambda tree: tree.environment.update(NCCL_IB_HCA="mlx5_1")),
    ("h100-16nic/two-makers", "", "What is right: IBGDA has a NIC for each GPU, as near as the other one.",
     lambda tree: some_other_nics(tree, (0, 2, 4, 6, 10, 12, 14, 16), BNXT, 0x1760, "BCM57608", "bnxt_re")),
    ("h100/libcuda-path", "", "What is right: the same with its folder in LD_LIBRARY_PATH.",
     lambda tree: libcuda_off_the_path(tree),
     lambda tree: tree.environment.update(LD_LIBRARY_PATH="/usr/local/nvidia/lib64")),
    ("a4/libcuda-stub", "libcuda", "An image whose build gave the toolkit's stub the name that programs look for.",
     lambda tree: cuda_library(tree, "/usr/local/cuda-12.9/lib64/stubs", "")),
    ("a4/libcuda-stub-behind", "", "What is right: the driver's is found before it.",
     lambda tree: cuda_library(tree, "/usr/local/cuda-12.9/lib64/stubs", "", "behind")),
    ("a4/libcuda-older", "libcuda", "cuda-compat for drivers of its time in front, and the node has a newer one.",
     lambda tree: cuda_library(tree, "/usr/local/cuda-12.9/compat", "535.104.05")),
    ("a4/libcuda-newer", "", "What is right: what cuda-compat is for.",
     lambda tree: cuda_library(tree, "/usr/local/cuda-12.9/compat", "590.10.01")),
    ("h100/nouveau-one", "driver-skew", "Nouveau has one GPU.",
     lambda tree: without_driver(tree, "0000:52:00.0", 2, "nouveau")),
    ("h100/unbound-one", "driver-skew", "Its probe failed at the start of the machine.",
     lambda tree: without_driver(tree, "0000:52:00.0", 2)),
    ("h100/vfio-one", "", "What is right: somebody has handed it to a virtual machine.",
     lambda tree: without_driver(tree, "0000:52:00.0", 2, "vfio-pci")),
    ("h100/screen", "", "What is right: an old card that the open kernel modules do not drive, and nouveau does.",
     lambda tree: tree.pci("0000:00:1e.0", "/sys/devices/pci0000:00", NVIDIA, 0x128B, 0x030000, driver="nouveau")),
))


@fault("h100/gpu-lost-minors", "gpu-errors")
def minor_numbers_are_not_indices(tree):
    """The driver has counted by another order than NVML, and the GPU that is lost is 2 to one and 7 to the other."""
    minors = (5, 6, 7, 4, 1, 2, 3, 0)
    for gpu, minor in zip(tree.answers["nvml"]["gpus"], minors):
        tree.replace(f"/proc/driver/nvidia/gpus/{gpu['pci']}/information", f"Device Minor: \t {gpu['minor']}\n",
                     f"Device Minor: \t {minor}\n")
        gpu["minor"] = minor
    del tree.answers["nvml"]["gpus"][2]


# --- what a process may use ---


@fault("h100/nics-of-others", "nic-access")
def pod_with_nics_of_other_gpus(tree):
    """As many NICs as GPUs, and device plugins that know nothing of each other have chosen them."""
    in_container(tree)
    tree.answers["nvml"]["gpus"] = tree.answers["nvml"]["gpus"][:2]
    deny(tree, *range(2, 8))
    take_uverbs(tree, *[f"mlx5_{i}" for i in range(8)])


@fault("h100/half-node")
def pod_with_half_a_node(tree):
    """What is right: 4 GPUs and their 4 NICs; sysfs shows the others."""
    in_container(tree)
    tree.answers["nvml"]["gpus"] = tree.answers["nvml"]["gpus"][:4]
    deny(tree, 4, 5, 6, 7)
    take_uverbs(tree, "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_7", "mlx5_8", "mlx5_9")


@fault("h100/sriov")
def pod_with_virtual_functions(tree):
    """What is right: a function for each GPU; the physical ones are on the node and not in the pod."""
    in_container(tree)
    for i, name in enumerate(RAILS):
        pci = nic_folder(tree, name).rsplit("/infiniband/", 1)[0]
        parent, address = pci.rsplit("/", 1)
        tree.nic(f"mlx5_{20 + i}", address[:-1] + "1", parent, netdev=f"net{i + 1}", link_layer="InfiniBand",
                 device=0x101E, hca="MT4126", numa=i // 4, cpus="0-55,112-167" if i < 4 else "56-111,168-223",
                 physfn=pci)
    take_uverbs(tree, *RAILS, "mlx5_4", "mlx5_5")


def forget_interfaces(tree, *netdevs):
    """Interfaces in another network namespace: /sys/class/net and the device's folder do not have them."""
    for netdev in netdevs:
        for path in list(tree.entries):
            if path == f"/sys/class/net/{netdev}" or f"/net/{netdev}/" in path:
                del tree.entries[path]


set_up(fault, (
    ("h100/half-nics", "nic-access", "Pod with all GPUs and half of the NICs.",
     lambda tree: in_container(tree),
     lambda tree: take_uverbs(tree, "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_7", "mlx5_8", "mlx5_9")),
    ("a4/pod-network", "gid", "The GIDs show, and their interfaces are the node's.",
     lambda tree: in_container(tree),
     lambda tree: forget_interfaces(tree, *[f"gpu{i}rdma0" for i in range(8)])),
    ("h100/pod-network-unasked", "", "What is right: the same, InfiniBand: no GID of it belongs to an interface.",
     lambda tree: in_container(tree),
     lambda tree: forget_interfaces(tree, "ens0f0np0", "ens1f0np0")),
))


# --- one GPU a task ---


@fault("a4/one-task-list")
def list_for_this_task(tree):
    """What is right: a list of the one NIC of its GPU."""
    one_task(tree, 5)
    del tree.environment["DEEP_EP_DEVICE_TO_HCA_MAPPING"]
    tree.environment["NVSHMEM_HCA_LIST"] = "mlx5_5:1"


@fault("a4/one-task-list-of-another", "shared-nic")
def list_from_the_batch_script(tree):
    """The list of the first rank, handed to all."""
    one_task(tree, 5)
    del tree.environment["DEEP_EP_DEVICE_TO_HCA_MAPPING"]
    tree.environment["NVSHMEM_HCA_LIST"] = "mlx5_0:1"


def by_uuid(tree):
    """GPU 0: snapshots give UUIDs new numbers, from 1 upwards."""
    one_task(tree, 0)
    tree.environment["CUDA_VISIBLE_DEVICES"] = "GPU-00000000-0000-0000-0000-000000000001"


@fault("a4/one-task-uuid-list")
def list_and_uuids(tree):
    """What is right: the GPU by its UUID, and a list of its one NIC."""
    by_uuid(tree)
    del tree.environment["DEEP_EP_DEVICE_TO_HCA_MAPPING"]
    tree.environment["NVSHMEM_HCA_LIST"] = "mlx5_0:1"


@fault("a4/one-task-mig-list", "shared-nic")
def list_of_another_and_mig(tree):
    """An instance of GPU 0, by the name that has its GPU's UUID in it."""
    by_uuid(tree)
    tree.environment["CUDA_VISIBLE_DEVICES"] = "MIG-" + tree.environment["CUDA_VISIBLE_DEVICES"] + "/1/0"
    del tree.environment["DEEP_EP_DEVICE_TO_HCA_MAPPING"]
    tree.environment["NVSHMEM_HCA_LIST"] = "mlx5_6:1"


set_up(fault, (
    ("a4/one-task-mapping", "visible-devices", "CUDA_VISIBLE_DEVICES=0 in each: DeepEP takes entry 0 for all of them.",
     lambda tree: one_task(tree, 5)),
    ("a4/one-task-own-mapping", "", "What is right: what 'epkit env -- PROGRAM' sets in the task.",
     lambda tree: one_task(tree, 5),
     lambda tree: tree.environment.update(DEEP_EP_DEVICE_TO_HCA_MAPPING="0:mlx5_5:1")),
    ("a4/one-task-default", "shared-nic",
     "Two tasks have the same two NICs nearest, and NVSHMEM takes the first in both.",
     lambda tree: one_task(tree, 5),
     lambda tree: tree.environment.pop("DEEP_EP_DEVICE_TO_HCA_MAPPING")),
    ("a4/one-task-uuid", "visible-devices", "Mapping by number and UUIDs.",
     lambda tree: by_uuid(tree)),
    ("a4/one-task-visible", "", "What is right: no cgroup, and each task told its own GPU by the number of the node.",
     lambda tree: tree.environment.update(CUDA_VISIBLE_DEVICES="5", LOCAL_RANK="5", LOCAL_WORLD_SIZE="8"),
     lambda tree: tree.replace("/proc/self/status", "Cpus_allowed_list:\t0-223", "Cpus_allowed_list:\t56-111")),
))


# --- fixes ---


@fault("a4/fabric-manager-version", "nvlink")
def fabric_manager_of_another_version(tree):
    """To start it again would not help: it does not run with this driver."""
    for gpu in tree.answers["nvml"]["gpus"]:
        gpu["nvlinks"] = ["down"] * 18
        gpu["fabric"] = "starting"
    tree.append("/var/lib/dpkg/status", software.package("nvidia-fabricmanager-580", "580.95.05-1"))


@fault("a4/memlock-hard", "memlock")
def locked_memory_below_a_hard_limit(tree):
    tree.replace("/proc/self/limits", "Max locked memory         unlimited            unlimited ",
                 "Max locked memory         8388608              16777216  ")


@fault("a4/verbs-mixed-unloadable", "verbs-mixed")
def transport_that_mixed_sets_keep_from_loading(tree):
    """By what the files need and define, not by what the linker says about it."""
    core_and_provider_of_different_sets(tree)
    for name in ("nvshmem_transport_ibgda.so.3", "nvshmem_transport_ibgda.so.3.0.0"):
        software.loads(tree, f"/opt/deepep/nvshmem/lib/{name}", "something that nobody has translated")


@fault("a4/provider-of-another-set", "provider-missing")
def provider_in_another_folder(tree):
    """libmlx5 of another installation has the same number: a link to it would mix the two."""
    tree.remove(f"{X86_64.lib}/libibverbs/libmlx5-rdmav57.so")
    tree.link(f"{X86_64.lib}/libmlx5.so", "/opt/mellanox/lib/libmlx5.so.1")
    for name in ("libmlx5.so.1", "libmlx5.so.1.25.56.0"):
        tree.entries[f"/opt/mellanox/lib/{name}"] = tree.entries.pop(f"{X86_64.lib}/{name}")
    tree.environment["LD_LIBRARY_PATH"] = "/opt/mellanox/lib:" + tree.environment["LD_LIBRARY_PATH"]
