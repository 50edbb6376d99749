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


# --- variables that name devices, files and traffic classes ---


def graph(*devices):
    channels = "".join(f'<gpu dev="{device}"/>' for device in devices)
    return put("/opt/site/graph.xml", f'<graphs version="1"><graph id="0"><channel>{channels}</channel></graph></graphs>\n')


CONF = put("/etc/nccl.conf", "NCCL_TOPO_FILE=/opt/site/topo.xml\nNCCL_GRAPH_FILE=/opt/site/graph.xml\n")

set_up(change, (
    ("dgx-h200-deepep/ucx-bonds", "hca-lists", "ai-dynamo/nixl#299: names of bonds on a machine without them.",
     env(UCX_NET_DEVICES=",".join(f"mlx5_bond_{i}:1" for i in range(1, 9)))),
    ("dgx-b200/ucx-one-gone", "hca-lists", "The same, with one name of eight wrong.",
     env(UCX_NET_DEVICES="mlx5_0:1,mlx5_1:1,mlx5_30:1")),
    ("dgx-b200/ucx-no-port", "hca-lists", "NCCL's form of a list; UCX has the port in every name.",
     env(UCX_NET_DEVICES="mlx5_0,mlx5_1")),
    ("dgx-b200/ucx-loopback", "", "What is right: sgl-project/sglang#40641, RDMA ports and an interface for TCP.",
     env(UCX_NET_DEVICES="mlx5_0:1,mlx5_1:1,lo")),
    ("dgx-b200/ucx-all", "", "What is right: LMCache/LMCache#1516, all of them.", env(UCX_NET_DEVICES="all")),
    ("dgx-h200-deepep/nic-name", "hca-lists", "The name that an image for EFA brings.",
     env(EP_NIC_NAME="rdmap101s0")),
    ("dgx-b200/nic-name-twice", "hca-lists", "One fault in two variables: one paste mends both.",
     env(EP_NIC_NAME="bnxt_re0", UCX_NET_DEVICES="bnxt_re0:1")),
    ("dgx-b200/nic-name-right", "", "What is right: a NIC of this machine.", env(EP_NIC_NAME="mlx5_4")),
    ("dgx-b200/epkit-interface", "socket-interface", "libepkit's own variable, by NCCL's rules.",
     env(EPKIT_TCP_INTERFACE="eth0")),
    ("dgx-b200/epkit-address", "", "What is right: it takes an address as well.", env(EPKIT_TCP_INTERFACE="192.0.2.7")),
    ("cloud-vm-one-gpu/graph-of-larger", "topology-file", "NVIDIA/nccl#1008, Azure/azhpc-images#327: /etc/nccl.conf "
     "of a size with four GPUs.", CONF, graph(0, 1, 2, 3),
     lambda tree: topology(*present(tree), "0003:00:00.0", "0004:00:00.0")(tree)),
    ("dgx-b200/graph-gone", "topology-file", "A graph file that is not there, in /etc/nccl.conf.", CONF,
     lambda tree: topology(*present(tree))(tree)),
    ("dgx-b200/graph-right", "", "What is right: a graph of the GPUs here.", CONF, graph(*range(8)),
     lambda tree: topology(*present(tree))(tree)),
    ("dgx-h200-deepep/traffic-class", "traffic-class", "NVIDIA/nvshmem#45: a traffic class on InfiniBand.",
     env(NVSHMEM_IB_TRAFFIC_CLASS="160")),
    ("dgx-h200-deepep/traffic-classes", "traffic-class", "The same of NCCL too: one paste mends both.",
     env(NVSHMEM_IB_TRAFFIC_CLASS="160", NCCL_IB_TC="160")),
    ("dgx-b200/disabled-twice", "nccl-disabled", "Switched off twice: one paste mends both.",
     env(NCCL_IB_DISABLE="1", NCCL_NET="Socket", NCCL_P2P_DISABLE="1")),
    ("hgx-h100-deepep-roce/gid-twice", "gid", "sgl-project/sglang#7888: one index for both libraries, not of this table.",
     env(NVSHMEM_IB_GID_INDEX="7", NCCL_IB_GID_INDEX="7")),
    ("torchrun-two-nodes/localhost", "host-name", "NVIDIA/nccl#375: every node is called localhost.",
     host("127.0.0.1", "localhost", "localhost")),
))


# --- limits, modules, versions ---


def processes(soft, hard):
    return lambda tree: tree.append("/proc/self/limits", f"Max processes             {soft:<20} {hard:<20} processes \n")


def pids(most, current):
    return lambda tree: tree.put_all("/sys/fs/cgroup", {"pids.max": f"{most}\n", "pids.current": f"{current}\n"})


def no_memory(tree):
    tree.numa_node(0, "0-47,96-143", 0)


def no_processors(tree):
    tree.put("/sys/devices/system/node/node1/cpulist", "\n")


def not_registered(tree):
    tree.replace("/proc/driver/nvidia/version", "NVIDIA UNIX Open Kernel Module for x86_64", "NVIDIA UNIX x86_64 Kernel Module")
    tree.remove("/sys/kernel/mm/memory_peers")
    tree.put("/sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")


def refused(tree):
    variants.by_name["h100/peermem"].change(tree)
    log(tree, "nvidia_peermem: disagrees about version of symbol ib_register_peer_memory_client",
        "nvidia_peermem: Unknown symbol ib_register_peer_memory_client (err -22)")


def old_module(version):
    def step(tree):
        variants.unload(tree, "nvidia_peermem")
        software.load_module(tree, "nv_peer_mem", version)
    return step


def broadcom_abi(version, folder=""):
    def step(tree):
        provider(tree)
        for i in range(8):
            path = next(path for path in tree.entries if path.endswith(f"/uverbs{i}/abi_version"))
            tree.put(path, f"{version}\n")
        if folder:
            tree.library(f"{folder}/libbnxt_re-rdmav50.so", needed=["libc.so.6"], machine=X86_64.machine)
            tree.put("/etc/libibverbs.d/bnxt_re.driver", f"driver {folder}/libbnxt_re\n")
    return step


def efa_installer(version, nccl="2.27.5"):
    def step(tree):
        tree.library(f"{X86_64.lib}/libnccl.so.{nccl}", link="libnccl.so.2", soname="libnccl.so.2", needed=["libc.so.6"],
                     machine=X86_64.machine)
        efa_packages(version)(tree)
    return step


def efa_packages(version):
    return put("/opt/amazon/efa_installed_packages",
               f"# EFA installer version: {version}\n# Debug packages installed: no\nefa-config_1.15_all.deb\n")


set_up(change, (
    ("docker-host-network/nproc", "processes", "MIC-DKFZ/nnUNet#1343: a small limit of processes for a user.",
     processes(1024, 513046)),
    ("gke-a3-ultra-cos-pod/pids", "processes", "vladmandic/sdnext#2642: none for the user, and a small one for the pod.",
     processes("unlimited", "unlimited"), pids(1024, 40)),
    ("docker-two-gpus/pids-podman", "processes", "podman-container-tools/podman#17647: podman's default, nearly used up.",
     pids(2048, 1900)),
    ("gke-a3-ultra-cos-pod/pids-right", "", "What is right: the default of many clusters.", pids(4200, 40)),
    ("docker-host-network/nproc-root", "", "What is right: limits of users do not hold for root.",
     processes(1024, 513046), lambda tree: tree.append("/proc/self/status", "CapEff:\t000001ffffffffff\n")),
    ("dgx-b200/nproc", "", "What is right: the kernel's default on a large machine.", processes(8255291, 8255291)),
    ("hgx-h200-snc4/numa-memory", "numa-memory", "numactl/numactl#165: a node whose memory slots are empty.", no_memory),
    ("dgx-b200/numa-processors", "numa-memory", "NVIDIA/nccl#2190: a node without processors.", no_processors),
    ("gb200/numa-of-gpus", "", "What is right: the memory of the GPUs is nodes without processors.",
     lambda tree: tree.numa_node(2, "", 186)),
    ("h100/peermem-idle", "peermem", "NVIDIA/nccl#1939, #1537: loaded, and no client of ib_core.", not_registered),
    ("h100/peermem-refused", "peermem", "NVIDIA/gpu-operator#2868, Mellanox/nv_peer_memory#39: built for another ib_core.",
     refused),
    ("h100/peermem-old", "peermem", "Mellanox/nv_peer_memory#28: the module of an old image.", old_module("1.1-0")),
    ("hgx-h100-broadcom/abi", "verbs-abi", "sgl-project/sglang#16242: an image with rdma-core's provider.", broadcom_abi(6)),
    ("hgx-h100-broadcom/abi-of-maker", "", "What is right: the provider of the maker, which its configuration names.",
     broadcom_abi(6, "/usr/local/lib")),
    ("hgx-h100-broadcom/abi-right", "", "What is right: the kernel's own driver.", broadcom_abi(1)),
    ("aws-p5/efa-installer", "efa-version", "aws/aws-ofi-nccl#584: a new PyTorch in an old image.", efa_installer("1.28.0")),
    ("aws-p5/efa-installer-workaround", "", "What is right: the attribute is not set.", efa_installer("1.28.0"),
     env(FI_EFA_SET_CUDA_SYNC_MEMOPS="0")),
    ("aws-p5/efa-installer-both-old", "", "What is right: an NCCL that does without cuMem calls.",
     efa_installer("1.28.0", "2.18.6")),
    ("aws-p5/efa-installer-new", "", "What is right: a newer installer.", efa_installer("1.43.2")),
))
