# SPDX-License-Identifier: Apache-2.0
"""Machines as public bug reports describe them: for each class the reported one, a further one, and neighbours.

Figures and forms are those of the reports; the machines are those of field.py and its kin, with the fault put in. The
docstring of a neighbour begins with "What is right".
"""
import software
import variants
from field import X86_64
from rules import log
from variants import gdrcopy, handler_on_the_cpu, handler_falls_back, set_up

changes = []
change = variants.changes_into(changes)

TWO_NODES = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "RANK": "8", "LOCAL_RANK": "0",
             "MASTER_ADDR": "192.0.2.10", "MASTER_PORT": "29500"}


def env(**variables):
    return lambda tree: tree.environment.update(variables)


def put(path, text):
    return lambda tree: tree.put(path, text)


def two_nodes(tree):
    tree.environment.update(TWO_NODES)


# --- NCCL's configuration files ---

set_up(change, (
    ("dgx-h200-deepep/nccl-conf", "socket-interface", "An image brings /etc/nccl.conf of other machines.",
     put("/etc/nccl.conf", "NCCL_DEBUG=WARN\nNCCL_SOCKET_IFNAME=enp4s0\n")),
    ("dgx-b200/nccl-conf-home", "nccl-disabled", "A user's own file, long forgotten.",
     put("/root/.nccl.conf", "NCCL_IB_DISABLE=1\n")),
    ("dgx-b200/nccl-conf-file", "nccl-hca", "The file that a variable names.",
     put("/etc/site/nccl.conf", "NCCL_IB_HCA=rocep0s0\n"), env(NCCL_CONF_FILE="/etc/site/nccl.conf")),
    ("dgx-b200/nccl-conf-precedence", "", "What is right: the environment precedes the file.",
     put("/etc/nccl.conf", "NCCL_SOCKET_IFNAME=enp4s0\n"), env(NCCL_SOCKET_IFNAME="^lo,docker")),
    ("dgx-b200/nccl-conf-first", "", "What is right: of two lines the first counts, and '#' begins no comment.",
     put("/etc/nccl.conf", "#NCCL_P2P_DISABLE=1\nNCCL_IB_DISABLE=0\nNCCL_IB_DISABLE=1\n")),
    ("dgx-b200/nccl-conf-own", "", "What is right: with NCCL_CONF_FILE the user's own file is not read.",
     put("/root/.nccl.conf", "NCCL_IB_DISABLE=1\n"), put("/etc/site/nccl.conf", "NCCL_DEBUG=WARN\n"),
     env(NCCL_CONF_FILE="/etc/site/nccl.conf")),
))


# --- files that NCCL's variables name ---


def topology(*gpus):
    elements = "".join(f'<cpu numaid="{i}"><pci busid="{gpu}" class="0x030200" link_width="16"/></cpu>'
                       for i, gpu in enumerate(gpus))
    return put("/opt/site/topo.xml", f'<system version="1">{elements}</system>\n')


def present(tree):
    return [gpu["pci"] for gpu in tree.answers["nvml"]["gpus"]]


TOPO_FILE = env(NCCL_TOPO_FILE="/opt/site/topo.xml")

set_up(change, (
    ("cloud-vm-one-gpu/topology-of-larger", "topology-file", "The file of a size with four GPUs.",
     lambda tree: topology(*present(tree), "0003:00:00.0", "0004:00:00.0")(tree), TOPO_FILE),
    ("dgx-b200/topology-in-conf", "topology-file", "Named by /etc/nccl.conf, for a machine with other addresses.",
     topology("0001:00:00.0", "0002:00:00.0"), put("/etc/nccl.conf", "NCCL_TOPO_FILE=/opt/site/topo.xml\n")),
    ("dgx-b200/topology-right", "", "What is right: a file with the GPUs of this machine.",
     lambda tree: topology(*present(tree))(tree), TOPO_FILE),
))


# --- interfaces, each library by its own rules ---

HOSTS = "127.0.0.1 localhost\n{address} {names}\n"


def host(address, names="gpu-7", name="gpu-7"):
    def step(tree):
        tree.put("/proc/sys/kernel/hostname", f"{name}\n")
        tree.put("/etc/hosts", HOSTS.format(address=address, names=names))
    return step


set_up(change, (
    ("aws-p5/gloo-caret", "socket-interface", "NCCL's list of exclusions, given to Gloo (a report about a serving engine).",
     two_nodes, env(GLOO_SOCKET_IFNAME="^lo,docker,veth,eni", NCCL_SOCKET_IFNAME="^lo,docker,veth,eni")),
    ("dgx-b200/gloo-exact", "socket-interface", "NCCL's '=' in front.",
     env(GLOO_SOCKET_IFNAME="=eno1np0")),
    ("dgx-b200/gloo-beginning", "socket-interface", "The beginning of a name, which is enough for NCCL alone.",
     env(GLOO_SOCKET_IFNAME="eno", NCCL_SOCKET_IFNAME="eno")),
    ("dgx-b200/tensorpipe", "socket-interface", "TensorPipe takes names as Gloo does.", env(TP_SOCKET_IFNAME="eth0")),
    ("dgx-b200/gloo-right", "", "What is right: the name of an interface.",
     env(GLOO_SOCKET_IFNAME="eno1np0", TP_SOCKET_IFNAME="eno1np0", NCCL_SOCKET_IFNAME="=eno1np0")),
    ("dgx-b200/two-interfaces", "socket-interface", "One fault in two variables: one paste mends both.",
     two_nodes, env(NCCL_SOCKET_IFNAME="ens5", GLOO_SOCKET_IFNAME="ens5")),
    ("dgx-b200/three-interfaces", "socket-interface", "The same in three, and one of them must not be unset.",
     two_nodes, host("127.0.1.1"),
     env(NCCL_SOCKET_IFNAME="ens5", GLOO_SOCKET_IFNAME="ens5", NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME="ens5")),
    ("dgx-b200/gloo-to-loopback", "socket-interface", "Unset, Gloo would take 127.0.1.1.",
     two_nodes, host("127.0.1.1"), env(GLOO_SOCKET_IFNAME="ens5")),
    ("torchrun-two-nodes/host-loopback", "host-name", "Ubuntu's /etc/hosts, and nothing names an interface for Gloo.",
     host("127.0.1.1")),
    ("torchrun-two-nodes/host-loopback-full", "host-name", "A full name, with the short one behind it, over IPv6.",
     host("::1", "gpu-7.cluster.internal gpu-7")),
    ("torchrun-two-nodes/host-address", "", "What is right: the name has its address before the loopback.",
     host("192.0.2.7"), lambda tree: tree.append("/etc/hosts", "127.0.1.1 gpu-7\n")),
    ("torchrun-two-nodes/host-named", "", "What is right: Gloo is told its interface.",
     host("127.0.1.1"), env(GLOO_SOCKET_IFNAME="eno1np0")),
    ("dgx-b200/host-alone", "", "What is right: on one node the loopback serves.", host("127.0.1.1")),
))


# --- several rails in one subnet ---


def subnet(names, **settings):
    """Each has an address of 198.51.100.0/24, and the kernel's defaults for ARP except `settings`."""
    def step(tree):
        for name in names:
            tree.append("/proc/net/route", f"{name}\t006433C6\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n")
        for name in ("all", "default", *names):
            for key in ("arp_ignore", "arp_announce", "arp_filter"):
                value = settings.get(key, 0) if name == "all" else 0
                tree.put(f"/proc/sys/net/ipv4/conf/{name}/{key}", f"{value}\n")
    return step


RAILS = [f"ens{i}np0" for i in range(8)]

set_up(change, (
    ("hgx-h100-deepep-roce/one-subnet", "rails-subnet", "Eight rails in a flat network.", subnet(RAILS)),
    ("hgx-h100-deepep-roce/two-in-a-subnet", "rails-subnet", "Two of them, after a repair.", subnet(RAILS[2:4])),
    ("hgx-h100-deepep-roce/arp-ignore", "", "What is right: each interface answers for itself.",
     subnet(RAILS, arp_ignore=1, arp_announce=2)),
    ("hgx-h100-deepep-roce/arp-filter", "", "What is right: the routing rules decide who answers.",
     subnet(RAILS, arp_filter=1)),
    ("hgx-h100-deepep-roce/one-of-them", "", "What is right: a rail beside an interface that is none.",
     subnet([RAILS[0], "eno1"])),
))


# --- what a container lost, and what is full ---


def lose_gpus(tree):
    for i in range(8):
        tree.stats[f"/dev/nvidia{i}"]["access"] = "---"
    tree.answers["nvml"] = {"error": "NVML: Unknown Error"}


def shm(size, files, each):
    """/dev/shm of `size` GiB with files of programs that are no more."""
    def step(tree):
        mounts = "".join(line if " /dev/shm " not in line else f"tmpfs /dev/shm tmpfs rw,nosuid,nodev,size={size << 20}k 0 0\n"
                         for line in tree.text("/proc/self/mounts").splitlines(keepends=True))
        tree.put("/proc/self/mounts", mounts)
        for i in range(files):
            tree.put(f"/dev/shm/nccl-aBcDe{i}", "")
            tree.stats[f"/dev/shm/nccl-aBcDe{i}"] = {"kind": "file", "bytes": int(each * 2**30), "access": "rw-"}
    return step


set_up(change, (
    ("gke-a3-ultra-cos-pod/lost-gpus", "gpu-access", "systemctl daemon-reload on the node (gpu-operator).", lose_gpus),
    ("docker-host-network/lost-gpus", "gpu-access", "The same in docker.", lose_gpus),
    ("gke-a3-ultra-cos-pod/shm-full", "shm", "Large enough, and full of what engines left.", shm(32, 8, 4)),
    ("dgx-b200/shm-nearly-full", "shm", "On a host, with less than 256 MiB left.", shm(15, 3, 5)),
    ("dgx-b200/shm-half-full", "", "What is right: half of it is free.", shm(32, 4, 4)),
    ("dgx-b200/shm-of-one-gib", "", "Small, as docker run --shm-size=1g makes it, and nearly empty.", shm(1, 1, 1 / 64)),
))


# --- a driver, a module, the kernel ---


def no_answer(tree, address):
    gpus = tree.answers["nvml"]["gpus"]
    gpus[:] = [gpu for gpu in gpus if gpu["pci"] != address]


GFW = "NVRM: kgspWaitForGfwBootOk_TU102: failed to wait for GFW boot complete: 0x65 VBIOS version 96.00.89.00.01"
INIT = "NVRM: GPU 0000:61:00.0: RmInitAdapter failed! (0x62:0x65:1792)"
BANNER = "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.126.09  Release Build"


def number_lost(name):
    return lambda tree: tree.put("/proc/devices", "".join(
        line for line in tree.text("/proc/devices").splitlines(keepends=True) if not line.endswith(f" {name}\n")))


def older_nvshmem(tree):
    tree.put("/opt/deepep/nvshmem/include/non_abi/nvshmem_version.h",
             "#define NVSHMEM_VENDOR_MAJOR_VERSION 3\n#define NVSHMEM_VENDOR_MINOR_VERSION 4\n"
             "#define NVSHMEM_VENDOR_PATCH_VERSION 4\n")


def balancing(value):
    return put("/proc/sys/kernel/numa_balancing", f"{value}\n")


set_up(change, (
    ("dgx-h100-superpod/init-failed", "gpu-errors", "A GPU whose firmware does not start (open-gpu-kernel-modules).",
     lambda tree: no_answer(tree, "0000:61:00.0"), lambda tree: log(tree, GFW, INIT)),
    ("dgx-b200/init-failed", "gpu-errors", "RmInitAdapter alone.",
     lambda tree: no_answer(tree, "0000:61:00.0"), lambda tree: log(tree, INIT)),
    ("dgx-b200/init-recovered", "", "What is right: a later attempt succeeded.", lambda tree: log(tree, INIT)),
    ("dgx-b200/init-of-last-boot", "", "What is right: the driver has been loaded since.",
     lambda tree: log(tree, GFW, INIT, BANNER)),
    ("a4/gdrdrv-number", "gdrcopy", "In lsmod, and gone from /proc/devices (gdrcopy).",
     handler_on_the_cpu, number_lost("gdrdrv")),
    ("dgx-b200/uvm-number", "uvm", "The same of nvidia_uvm.", number_lost("nvidia-uvm")),
    ("a4/gdrdrv-number-unused", "", "What is right: the GPUs ring the doorbells.", gdrcopy, number_lost("gdrdrv")),
    ("a4/cpu-assisted", "", "What is right: NVSHMEM 3.5 has the CPU ring the doorbells, if it may choose.",
     handler_falls_back, lambda tree: tree.environment.pop("NVSHMEM_IBGDA_NIC_HANDLER")),
    ("hgx-h100-roce-venv/numa-balancing", "numa-balancing", "The kernel's default on machines with several nodes.",
     balancing(1)),
    ("gke-a3-ultra-cos-pod/numa-balancing", "numa-balancing", "The node's, seen from a pod.", balancing(3)),
    ("dgx-b200/numa-balancing-off", "", "What is right: off.", balancing(0)),
    ("dgx-b200/numa-balancing-tiers", "", "What is right: tiers of memory alone.", balancing(2)),
    ("gh200/numa-balancing", "", "What is right: one node with processors.", balancing(1)),
))


# --- how a machine boots ---

PXE = ("initrd=initramfs.img root=live:http://192.0.2.5/rootfs.squashfs BOOTIF=01-00-00-5e-00-53-01 ip=dhcp "
       "intel_iommu=on console=ttyS0\n")


def translates(tree):
    for path in tree.entries:
        if path.startswith("/sys/kernel/iommu_groups/") and path.endswith("/type"):
            tree.put(path, "DMA-FQ\n")


set_up(change, (
    ("dgx-h200-deepep/pxe-iommu", "iommu", "No grub decides here.", translates, put("/proc/cmdline", PXE)),
    ("dgx-h200-deepep/nfs-root", "nic-handler", "No modprobe.d of this node lasts.",
     put("/proc/cmdline", "root=/dev/nfs nfsroot=192.0.2.5:/image ip=dhcp rw iommu=pt\n"),
     lambda tree: handler_falls_back(tree)),
    ("dgx-h200-deepep/pxe", "", "What is right: it boots over the network.", put("/proc/cmdline", PXE)),
))


# --- what no check knows ---

set_up(change, (
    ("dgx-b200/unknown-stack", "", "What is right: no fault, and the verdict says what nobody looked at.",
     put(f"{software.PYTHON}/uccl/__init__.py", "")),
))


# --- NICs: providers, lists ---


def broadcom_with_other_provider(tree):
    tree.put("/etc/libibverbs.d/mlx5.driver", "driver mlx5\n")


def provider(tree):
    broadcom_with_other_provider(tree)
    software.providers(tree, X86_64, 50)


def near_gpus(tree, names):
    """The interfaces are on the switches of the GPUs, in their order."""
    uplinks = sorted({path.rsplit("/", 2)[0] for path in tree.entries
                      if path.startswith("/sys/devices/") and path.endswith("/vendor")
                      and any(path.rsplit("/", 1)[0].endswith(f"/{gpu}") for gpu in present(tree))})
    for name, uplink in zip(names, [path.rsplit("/", 1)[0] for path in uplinks]):
        address = tree.entries[f"/sys/class/net/{name}"].target.split("/")[-3]
        old = variants.pci_folder(tree, address)
        for path in tree.below(old):
            tree.entries[f"{uplink}/{address}{path.removeprefix(old)}"] = tree.entries.pop(path)
        for path, entry in tree.entries.items():
            if getattr(entry, "target", "").find(f"/{address}") >= 0:
                entry.target = entry.target.replace(old.removeprefix("/sys/"), f"{uplink}/{address}".removeprefix("/sys/"))


def gvnics(extra):
    """eth0 for the pod, eight beside the GPUs, and with `extra` another network in between."""
    def step(tree):
        names = [f"eth{i}" for i in range(1, 9)]
        if extra:
            tree.environment["NCCL_FASTRAK_IFNAME"] = ",".join(["eth0", *names[:7]])
        near_gpus(tree, names)
    return step


set_up(change, (
    ("hgx-h100-broadcom/provider", "provider-missing", "An image with NVIDIA's verbs alone (a report about Thor 2).",
     broadcom_with_other_provider),
    ("a4/efa-no-provider", "ibgda-nic provider-missing", "The same of EFA.",
     lambda tree: variants.by_name["a4/efa"].change(tree), lambda tree: tree.remove("/etc/libibverbs.d/efa.driver")),
    ("hgx-h100-broadcom/provider-right", "", "What is right: rdma-core's providers.", provider),
    ("hgx-h100-two-nics-per-gpu/half", "nccl-hca", "One NIC of each pair.",
     env(NCCL_IB_HCA="=" + ",".join(f"mlx5_{i}" for i in range(0, 16, 2)))),
    ("hgx-h100-two-nics-per-gpu/half-of-some", "nccl-hca", "Both of some, and one of the others.",
     env(NCCL_IB_HCA="=" + ",".join(f"mlx5_{i}" for i in (*range(8), *range(8, 16, 2))))),
    ("hgx-h100-two-nics-per-gpu/all", "", "What is right: all.", env(NCCL_IB_HCA="mlx5")),
    ("gcp-a3-mega/extra-network", "fastrak-interfaces", "One network too many has taken the slot of a NIC.", gvnics(True)),
    ("gcp-a3-mega/right", "", "What is right: the eight on the switches of the GPUs.", gvnics(False)),
))
