# SPDX-License-Identifier: Apache-2.0
"""A file tree in memory that looks like a Linux machine, and what builds its parts.

Nothing in it names a real machine: addresses are those for documentation (RFC 5737, RFC 7042), UUIDs count upwards.
"""
import json
import os
import struct

import elf

NVIDIA, MELLANOX, GOOGLE, INTEL, BROADCOM = 0x10DE, 0x15B3, 0x1AE0, 0x8086, 0x1000
PCI_BRIDGE = 0x060400
GEN5 = ("32.0 GT/s PCIe", 16)
UNKNOWN_LINK = ("Unknown", 0)

PCI_CAP_EXPRESS, PCI_EXT_CAP_ACS = 0x10, 0x000D
ROOT_PORT, UPSTREAM, DOWNSTREAM = 4, 5, 6  # PCI Express capability: port types


class Link:
    def __init__(self, target):
        self.target = target


class Sparse:
    def __init__(self, size):
        self.size = size


class Fifo:
    pass


class Folder:
    pass


class Tree:
    def __init__(self):
        self.entries = {}  # path -> bytes, Link, Sparse, Fifo or Folder
        self.environment = {}
        self.stats = {}  # path -> what the overlay says about it
        self.answers = {}  # question -> JSON value
        self.denied = []  # paths of files that this user may not read
        self.uverbs = 0
        self.unicast = 0  # counts MAC and IPv4 addresses

    # --- files ---

    def put(self, path, content):
        if path in self.entries and isinstance(self.entries[path], Link):
            raise ValueError(f"{path} is a link")
        self.entries[path] = content.encode() if isinstance(content, str) else content

    def put_all(self, folder, files):
        for name, content in files.items():
            self.put(f"{folder}/{name}", content)

    def link(self, path, target):
        self.entries[path] = Link(target)

    def folder(self, path):
        self.entries[path] = Folder()

    def has(self, path):
        return path in self.entries

    def real(self, path):
        """What a link leads to."""
        return os.path.normpath(os.path.join(os.path.dirname(path), self.entries[path].target))

    def text(self, path):
        return self.entries[path].decode()

    def below(self, path):
        """Paths of entries at and below `path`."""
        found = [name for name in self.entries if name == path or name.startswith(path + "/")]
        if not found:
            raise KeyError(path)
        return found

    def remove(self, path):
        """A file, a link, or a folder with everything in it."""
        for name in self.below(path):
            del self.entries[name]

    def replace(self, path, old, new):
        text = self.text(path)
        if old not in text:
            raise ValueError(f"{path}: '{old}' is not in it")
        self.put(path, text.replace(old, new))

    def append(self, path, text):
        self.put(path, (self.text(path) if self.has(path) else "") + text)

    def library(self, path, *, link=None, **facts):
        """A shared library; `link`: its name for the linker, beside it."""
        self.put(path, elf.shared_object(**facts))
        if link:
            self.link(f"{os.path.dirname(path)}/{link}", os.path.basename(path))

    # --- writing ---

    def write(self, folder, shared=None):
        """
        `shared`: a dictionary, the same for several trees. Files of the same content are then one file under several
        names, which takes a quarter of the time; who changes such a tree has to replace files.
        """
        os.makedirs(folder)
        Disk(folder, shared).hold(self)

    def files(self):
        """All entries, with the environment and what is no file."""
        entries = dict(self.entries)
        if self.environment:
            entries["/proc/self/environ"] = b"".join(
                f"{name}={value}\0".encode() for name, value in self.environment.items())
        if self.stats or self.answers or self.denied:
            entries["/epkit-overlay.json"] = (json.dumps(self.overlay(), indent=1) + "\n").encode()
        return entries

    def overlay(self):
        """What is no file, in the format of a snapshot."""
        return {"epkit_snapshot": 1, "stats": self.stats,
                "files": {path: {"state": "denied", "why": "Permission denied"} for path in self.denied},
                "answers": {question: {"value": answer} for question, answer in self.answers.items()}}

    # --- PCI ---

    def pci(self, address, parent, vendor, device, class_code, *, numa=-1, cpus="", link=GEN5, link_max=None,
            driver="", port_type=None, acs=0):
        """
        A device below the folder `parent` ("/sys/devices/pci0000:00/0000:00:01.0"). Returns its own folder. With a
        port type it is a bridge with an ACS capability whose control register is `acs`.
        """
        folder = f"{parent}/{address}"
        link_max = link_max or link
        self.put_all(folder, {
            "class": f"0x{class_code:06x}\n",
            "vendor": f"0x{vendor:04x}\n",
            "device": f"0x{device:04x}\n",
            "numa_node": f"{numa}\n",
            "local_cpulist": f"{cpus}\n",
            "current_link_speed": f"{link[0]}\n",
            "current_link_width": f"{link[1]}\n",
            "max_link_speed": f"{link_max[0]}\n",
            "max_link_width": f"{link_max[1]}\n",
            "config": pci_config(vendor, device, class_code, port_type, acs),
        })
        if driver:
            self.link(f"{folder}/driver", relative(folder, f"/sys/bus/pci/drivers/{driver}"))
            self.folder(f"/sys/bus/pci/drivers/{driver}")
        self.link(f"/sys/bus/pci/devices/{address}", relative("/sys/bus/pci/devices", folder))
        return folder

    def bridge(self, address, parent, *, vendor=INTEL, device=0x352A, port_type=ROOT_PORT, **rest):
        return self.pci(address, parent, vendor, device, PCI_BRIDGE, driver="pcieport", port_type=port_type, **rest)

    # --- GPUs ---

    def gpu(self, address, parent, minor, model, *, numa=-1, cpus="", nvlinks="switch", fabric=None, driver_version,
            link=GEN5):
        """`model`: a row of GPU_MODELS. NVML's answer grows by one."""
        name, device, class_code, cc, n_links, firmware = GPU_MODELS[model]
        self.pci(address, parent, NVIDIA, device, class_code, numa=numa, cpus=cpus, driver="nvidia", link=link)
        uuid = f"GPU-00000000-0000-0000-0000-{minor + 1:012d}"
        self.put(f"/proc/driver/nvidia/gpus/{address}/information",
                 f"Model: \t\t {name}\nIRQ:   \t\t {200 + minor}\nGPU UUID: \t {uuid}\nVideo BIOS: \t {firmware}\n"
                 f"Bus Type: \t PCIe\nDMA Size: \t 52 bits\nDMA Mask: \t 0xfffffffffffff\nBus Location: \t {address}\n"
                 f"Device Minor: \t {minor}\nGPU Firmware: \t {driver_version}\nGPU Excluded:\t No\n")
        self.device_node(f"/dev/nvidia{minor}")
        answer = {"pci": address, "name": name, "uuid": uuid, "minor": minor, "cc": list(cc)}
        if n_links:
            answer.update(ecc_uncorrected=0, remap_pending=False, remap_failed=False, nvlinks=[nvlinks] * n_links,
                          slowdown=dict.fromkeys(("hardware", "hw_thermal", "power_brake", "sw_thermal"), False))
        if fabric:
            answer["fabric"] = fabric
        self.answers.setdefault("nvml", {"driver": driver_version, "gpus": []})["gpus"].append(answer)

    def nvml(self, gpu):
        return self.answers["nvml"]["gpus"][gpu]

    def device_node(self, path, access="rw-"):
        """A plain file, of which the overlay says that it is a character device."""
        self.put(path, "")
        self.stats[path] = {"kind": "char", "bytes": 0, "access": access}

    # --- NICs ---

    def nic(self, name, address, parent, *, netdev, numa=-1, cpus="", rate="400 Gb/sec (4X NDR)",
            link_layer="Ethernet", device=0x1021, hca="MT4129", firmware="28.43.2026", link=GEN5, physfn="", sent=0,
            received=0):
        """
        An mlx5 device with one port: PCI function, RDMA device, uverbs node, network interface. `sent`, `received`:
        its data counters, in words of 4 bytes as the kernel has them.
        """
        infiniband = link_layer == "InfiniBand"
        self.unicast += 1
        pci = self.pci(address, parent, MELLANOX, device, 0x020700 if infiniband else 0x020000, numa=numa, cpus=cpus,
                       driver="mlx5_core", link=link)
        if physfn:
            self.link(f"{pci}/physfn", relative(pci, physfn))
        folder = f"{pci}/infiniband/{name}"
        guid = f"0200:5eff:fe00:53{self.unicast:02x}"
        self.put_all(folder, {
            "node_type": "1: CA\n", "hca_type": f"{hca}\n", "fw_ver": f"{firmware}\n",
            "board_id": "MT_0000000000\n", "node_guid": f"{guid}\n", "sys_image_guid": f"{guid}\n",
            "node_desc": f"{name}\n"})
        self.link(f"{folder}/device", f"../../../{address}")
        self.link(f"/sys/class/infiniband/{name}", relative("/sys/class/infiniband", folder))
        self.port(f"{folder}/ports/1", rate, link_layer, guid, netdev, sent, received)
        self.add_uverbs(name, pci, address)
        self.netdev(netdev, pci, speed=int(rate.split()[0]) * 1000, infiniband=infiniband)

    def port(self, folder, rate, link_layer, guid, netdev, sent, received):
        infiniband = link_layer == "InfiniBand"
        self.put_all(folder, {
            "state": "4: ACTIVE\n", "phys_state": "5: LinkUp\n", "rate": f"{rate}\n", "link_layer": f"{link_layer}\n",
            "cap_mask": "0x00010000\n", "lid": f"0x{self.unicast if infiniband else 0:x}\n", "sm_lid": "0x1\n"})
        self.put_all(f"{folder}/counters", {
            "port_xmit_data": f"{sent}\n", "port_rcv_data": f"{received}\n",
            "port_xmit_packets": f"{sent // 1024}\n", "port_rcv_packets": f"{received // 1024}\n",
            "unicast_xmit_packets": f"{sent // 1024}\n", "unicast_rcv_packets": f"{received // 1024}\n",
            **{name: "0\n" for name in PORT_COUNTERS}})
        self.put_all(f"{folder}/hw_counters", {name: "0\n" for name in HW_COUNTERS})
        if infiniband:
            gids = [(f"fe80:0000:0000:0000:{guid}", "IB/RoCE v1")]
            table = 1
        else:
            # GCP and most RoCE networks: the link-local address and the IPv4 address, each as v1 and as v2.
            address = f"0000:0000:0000:0000:0000:ffff:c000:02{self.unicast:02x}"
            link_local = f"fe80:0000:0000:0000:{guid}"
            gids = [(link_local, "IB/RoCE v1"), (link_local, "RoCE v2"), (address, "IB/RoCE v1"), (address, "RoCE v2")]
            table = 8
        for i in range(table):
            self.put(f"{folder}/gids/{i}", EMPTY_GID + "\n")
        for i, (gid, kind) in enumerate(gids):
            self.put(f"{folder}/gids/{i}", f"{gid}\n")
            self.put(f"{folder}/gid_attrs/types/{i}", f"{kind}\n")
            if not infiniband:
                self.put(f"{folder}/gid_attrs/ndevs/{i}", f"{netdev}\n")

    def add_uverbs(self, name, pci, address):
        number = self.uverbs
        self.uverbs += 1
        folder = f"{pci}/infiniband_verbs/uverbs{number}"
        self.put_all(folder, {"ibdev": f"{name}\n", "dev": f"231:{192 + number}\n", "abi_version": "1\n"})
        self.link(f"{folder}/device", f"../../../{address}")
        self.link(f"/sys/class/infiniband_verbs/uverbs{number}", relative("/sys/class/infiniband_verbs", folder))
        self.device_node(f"/dev/infiniband/uverbs{number}")

    def interface(self, name, address, parent, vendor, device, *, speed=-1, class_code=0x020000, **rest):
        """A network card without RDMA."""
        self.unicast += 1
        self.netdev(name, self.pci(address, parent, vendor, device, class_code, **rest), speed=speed)

    def netdev(self, name, pci, *, speed, infiniband=False, rx_bytes=0, tx_bytes=0):
        folder = f"{pci}/net/{name}"
        self.put_all(folder, {
            "address": f"00:00:5e:00:53:{self.unicast:02x}\n", "operstate": "up\n", "speed": f"{speed}\n",
            "mtu": "8896\n", "type": "32\n" if infiniband else "1\n", "carrier": "1\n"})
        self.put_all(f"{folder}/statistics", {
            "rx_bytes": f"{rx_bytes}\n", "tx_bytes": f"{tx_bytes}\n", "rx_packets": f"{rx_bytes // 1024}\n",
            "tx_packets": f"{tx_bytes // 1024}\n", **{counter: "0\n" for counter in NET_COUNTERS}})
        self.link(f"{folder}/device", f"../../../{os.path.basename(pci)}")
        self.link(f"/sys/class/net/{name}", relative("/sys/class/net", folder))

    def default_route(self, interface):
        # /proc/net/route has addresses as little-endian hexadecimal: gateway 192.0.2.254
        self.put("/proc/net/route",
                 "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
                 f"{interface}\t00000000\tFE0200C0\t0003\t0\t0\t100\t00000000\t0\t0\t0\n"
                 f"{interface}\t000200C0\t00000000\t0001\t0\t0\t100\t00FFFFFF\t0\t0\t0\n")

    # --- processors, memory, kernel ---

    def numa_node(self, number, cpus, memory_gib):
        folder = f"/sys/devices/system/node/node{number}"
        self.put(f"{folder}/cpulist", f"{cpus}\n")
        self.put(f"{folder}/meminfo", f"Node {number} MemTotal:       {memory_gib << 20} kB\n"
                                      f"Node {number} MemFree:        {memory_gib << 19} kB\n")

    def kernel(self, release, cmdline, *, hypervisor, vendor="GenuineIntel", model="Intel(R) Xeon(R) Platinum 8581C",
               arch="x86_64"):
        self.put("/proc/sys/kernel/osrelease", f"{release}\n")
        self.put("/proc/sys/kernel/ostype", "Linux\n")
        self.put("/proc/version", f"Linux version {release} (build@example) (gcc 13.3.0) #1 SMP\n")
        self.put("/proc/cmdline", f"{cmdline}\n")
        if arch == "x86_64":
            flags = "fpu vme de pse tsc msr" + (" hypervisor" if hypervisor else "") + " lahf_lm avx512f"
            self.put("/proc/cpuinfo",
                     f"processor\t: 0\nvendor_id\t: {vendor}\nmodel name\t: {model}\nflags\t\t: {flags}\n")
        else:
            self.put("/proc/cpuinfo", "processor\t: 0\nFeatures\t: fp asimd sve\nCPU implementer\t: 0x41\n")

    def process(self, *, memory_gib, cpus, n_cpus, memlock="unlimited", shm="size=65536k"):
        self.put("/proc/meminfo", f"MemTotal:       {memory_gib << 20} kB\nMemFree:        {memory_gib << 19} kB\n"
                                  f"MemAvailable:   {memory_gib << 19} kB\n")
        self.put("/proc/self/limits", PROCESS_LIMITS.format(memlock=memlock))
        self.put("/proc/self/status",
                 f"Name:\tpython3\nState:\tR (running)\nPid:\t4242\nPPid:\t4241\nUid:\t0\t0\t0\t0\nGid:\t0\t0\t0\t0\n"
                 f"Cpus_allowed:\t{'f' * (n_cpus // 4)}\nCpus_allowed_list:\t{cpus}\nMems_allowed_list:\t0\n")
        self.put("/proc/self/mounts",
                 "/dev/root / ext4 rw,relatime,discard 0 0\nproc /proc proc rw,nosuid,nodev,noexec,relatime 0 0\n"
                 "sysfs /sys sysfs rw,nosuid,nodev,noexec,relatime 0 0\n"
                 f"tmpfs /dev/shm tmpfs rw,nosuid,nodev,{shm} 0 0\n")
        self.folder("/dev/shm")


class Disk:
    """A folder that is one tree after another: what the next one has in common with the last is not written again."""

    def __init__(self, folder, shared=None):
        self.folder = folder
        self.shared = shared
        self.entries = {}
        self.folders = {""}

    def hold(self, tree):
        entries = tree.files()
        folders = folders_of(entries)
        stays = {path for path, entry in self.entries.items() if path in entries and same(entry, entries[path])}
        for path, entry in self.entries.items():
            if path not in stays and not isinstance(entry, Folder):
                os.unlink(self.folder + path)
                if self.shared and isinstance(entry, bytes) and self.shared.get(entry) == self.folder + path:
                    del self.shared[entry]
        for path in sorted(self.folders - folders, reverse=True):
            os.rmdir(self.folder + path)
        for path in sorted(folders - self.folders):
            os.mkdir(self.folder + path)
        for path, entry in entries.items():
            if path not in stays and not isinstance(entry, Folder):
                write_entry(self.folder + path, entry, self.shared)
        self.entries, self.folders = entries, folders


def folders_of(entries):
    folders = {""}
    for path, entry in entries.items():
        place = path if isinstance(entry, Folder) else path.rpartition("/")[0]
        while place not in folders:
            folders.add(place)
            place = place.rpartition("/")[0]
    return folders


def same(one, other):
    return one == other if isinstance(one, bytes) else type(one) is type(other) and vars(one) == vars(other)


def write_entry(place, content, shared):
    if isinstance(content, Link):
        os.symlink(content.target, place)
    elif isinstance(content, Fifo):
        os.mkfifo(place)
    elif isinstance(content, Sparse):
        with open(place, "wb") as file:
            file.truncate(content.size)
    elif shared is None or not link_entry(place, content, shared):
        with open(place, "wb") as file:
            file.write(content)
        if shared is not None:
            shared[content] = place


def link_entry(place, content, shared):
    if content not in shared:
        return False
    try:
        os.link(shared[content], place)
        return True
    except OSError:  # as many names as the file system allows, or none at all
        return False


def relative(folder, target):
    return os.path.relpath(target, folder)


def pci_config(vendor, device, class_code, port_type, acs):
    """
    Configuration space: of a device its header; of a port also the PCI Express capability and, as an extended
    capability, Access Control Services (PCI Express Base Specification 7.5, 7.7.8).
    """
    is_port = port_type is not None
    header = struct.pack("<HHHHI", vendor, device, 0x0006, 0x0010 if is_port else 0, class_code << 8)
    header += struct.pack("<BBBB", 0, 0, 1 if is_port else 0, 0)
    if not is_port:
        return header.ljust(256, b"\0")
    header = header.ljust(0x34, b"\0") + b"\x40"
    header = header.ljust(0x40, b"\0") + struct.pack("<BBH", PCI_CAP_EXPRESS, 0, 2 | port_type << 4)
    header = header.ljust(0x100, b"\0") + struct.pack("<IHH", PCI_EXT_CAP_ACS | 1 << 16, 0x001F, acs)
    return header.ljust(4096, b"\0")


EMPTY_GID = "0000:0000:0000:0000:0000:0000:0000:0000"

# name, PCI device, class, compute capability, NVLinks, firmware of the board
GPU_MODELS = {
    "B200": ("NVIDIA B200", 0x2901, 0x030200, (10, 0), 18, "97.00.00.00.01"),
    "H200": ("NVIDIA H200", 0x2335, 0x030200, (9, 0), 18, "96.00.00.00.01"),
    "H100": ("NVIDIA H100 80GB HBM3", 0x2330, 0x030200, (9, 0), 18, "96.00.00.00.02"),
    "GB200": ("NVIDIA GB200", 0x2941, 0x030200, (10, 0), 18, "97.00.00.00.02"),
    "L40S": ("NVIDIA L40S", 0x26B9, 0x030200, (8, 9), 0, "95.02.00.00.01"),
    "4060": ("NVIDIA GeForce RTX 4060 Laptop GPU", 0x28E0, 0x030000, (8, 9), 0, "95.07.00.00.01"),
}

# Documentation/ABI/stable/sysfs-class-infiniband; drivers/infiniband/hw/mlx5/counters.c
PORT_COUNTERS = [
    "symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "port_rcv_remote_physical_errors",
    "port_rcv_switch_relay_errors", "port_xmit_discards", "port_xmit_constraint_errors", "port_rcv_constraint_errors",
    "local_link_integrity_errors", "excessive_buffer_overrun_errors", "VL15_dropped", "port_xmit_wait",
    "multicast_rcv_packets", "multicast_xmit_packets"]
HW_COUNTERS = [
    "rx_write_requests", "rx_read_requests", "rx_atomic_requests", "out_of_buffer", "out_of_sequence",
    "duplicate_request", "rnr_nak_retry_err", "packet_seq_err", "implied_nak_seq_err", "local_ack_timeout_err",
    "resp_local_length_error", "resp_cqe_error", "req_cqe_error", "req_remote_invalid_request",
    "req_remote_access_errors", "resp_remote_access_errors", "resp_cqe_flush_error", "req_cqe_flush_error",
    "roce_adp_retrans", "roce_adp_retrans_to", "roce_slow_restart", "roce_slow_restart_cnps", "roce_slow_restart_trans",
    "rp_cnp_ignored", "rp_cnp_handled", "np_ecn_marked_roce_packets", "np_cnp_sent", "rx_icrc_encapsulated"]
NET_COUNTERS = [
    "rx_errors", "tx_errors", "rx_dropped", "tx_dropped", "rx_crc_errors", "rx_fifo_errors", "tx_fifo_errors",
    "collisions", "multicast"]

PROCESS_LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units     
Max cpu time              unlimited            unlimited            seconds   
Max stack size            8388608              unlimited            bytes     
Max open files            1048576              1048576              files     
Max locked memory         {memlock:<20} {memlock:<20} bytes     
Max address space         unlimited            unlimited            bytes     
"""
