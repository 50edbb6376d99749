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
    ("hgx-h100-deepep-roce/one-subnet", "rails-subnet", "NVIDIA/nccl#1131: eight rails in a flat network.", subnet(RAILS)),
    ("hgx-h100-deepep-roce/two-in-a-subnet", "rails-subnet", "openucx/ucx#5598: two of them, the halves of a card.", subnet(RAILS[2:4])),
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
    ("gke-a3-ultra-cos-pod/shm-full", "shm", "llm-d/llm-d#352: large enough, and full of what engines left.", shm(32, 8, 4)),
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
    ("dgx-h200-deepep/systemd-boot", "iommu", "No grub either: systemd-boot.", translates, put("/etc/kernel/cmdline", "ro quiet\n")),
    ("dgx-spark/iommu", "", "What is right: NVIDIA/NV-Kernels#226, translation for the GPU of a Spark is the kernel's own choice.",
     put("/sys/kernel/iommu_groups/3/type", "DMA-FQ\n"), put("/sys/kernel/iommu_groups/3/devices/000f:01:00.0", "")),
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


# --- between nodes: firewalls, routes, the domain of NVLink ---


def blocked(source, port, prefix="[UFW BLOCK]", interface="eno1np0"):
    """A line of the kernel as netfilter writes it, for a connection to 192.0.2.7."""
    return lambda tree: log(tree, f"{prefix} IN={interface} OUT= MAC=00:00:5e:00:53:01:00:00:5e:00:53:02:08:00 SRC={source} "
                            f"DST=192.0.2.7 LEN=60 TOS=0x00 PREC=0x00 TTL=64 ID=54321 DF PROTO=TCP SPT=40000 DPT={port} "
                            "WINDOW=64240 RES=0x00 SYN URGP=0")


def ufw(*rules):
    return lambda tree: tree.put_all("/etc", {
        "ufw/ufw.conf": "# made up\nENABLED=yes\nLOGLEVEL=low\n", "default/ufw": 'IPV6=yes\nDEFAULT_INPUT_POLICY="DROP"\n',
        "ufw/user.rules": "*filter\n" + "".join(f"### tuple ### {rule}\n" for rule in rules) + "COMMIT\n"})


def nft(*rules, policy="drop"):
    def step(tree):
        tree.link("/etc/systemd/system/sysinit.target.wants/nftables.service", "/usr/lib/systemd/system/nftables.service")
        tree.put("/usr/lib/systemd/system/nftables.service", "")
        tree.put("/etc/nftables.conf", "table inet filter {\n chain input {\n  type filter hook input priority 0; policy "
                 f"{policy};\n  ct state established,related accept\n  iif lo accept\n  tcp dport 22 accept\n"
                 + "".join(f"  {rule}\n" for rule in rules) + " }\n}\n")
    return step


def firewalld(zone, trusted=False):
    def step(tree):
        tree.put("/etc/systemd/system/multi-user.target.wants/firewalld.service", "")
        tree.put("/etc/firewalld/firewalld.conf", f"# made up\nDefaultZone={zone}\n")
        if trusted:
            tree.put("/etc/firewalld/zones/trusted.xml", '<zone target="ACCEPT"><source address="192.0.2.0/24"/></zone>\n')
    return step


def same_network(*names, **settings):
    return lambda tree: (subnet(names, **settings)(tree), [tree.put(f"{tree.real(f'/sys/class/net/{name}')}/operstate", "up\n")
                                                           for name in names if tree.has(f"/sys/class/net/{name}")])


def second_interface(tree):
    tree.interface("eno2", "0000:02:00.1", "/sys/devices/pci0000:00", 0x8086, 0x1563, speed=10000, driver="ixgbe")


def domain(*cliques, cluster="00000000-0000-0000-0000-0000000000{:02x}"):
    """Of each GPU, the number of its cluster and that of its clique."""
    def step(tree):
        for gpu, (number, clique) in zip(tree.answers["nvml"]["gpus"], cliques):
            gpu["domain"] = {"cluster": cluster.format(number) if number else "", "clique": clique}
    return step


set_up(change, (
    ("torchrun-two-nodes/ufw-blocks", "firewall", "NVIDIA/nccl-tests#162, sgl-project/sglang#3794: the kernel's log has them.",
     blocked("192.0.2.8", 29500), blocked("192.0.2.9", 43210)),
    ("torchrun-two-nodes/nft-blocks", "firewall", "NVIDIA/nccl#352: a rule of the site, with a prefix of its own.",
     blocked("192.0.2.8", 50655, "input-drop:")),
    ("torchrun-two-nodes/ufw-noise", "", "What is right: NVIDIA/nvidia-docker#876, what ufw is for: multicast, and the "
     "Internet.", blocked("203.0.113.5", 43210),
     lambda tree: log(tree, "[UFW BLOCK] IN=eno1np0 OUT= SRC=192.0.2.8 DST=224.0.0.251 LEN=32 TTL=1 PROTO=2"),
     blocked("192.0.2.8", 45000, "[UFW ALLOW]"), blocked("192.0.2.8", 9100)),
    ("dgx-b200/ufw-blocks", "firewall", "The same before a job is set up: several attempts.",
     *[blocked("192.0.2.8", port) for port in (29500, 29500, 41000)]),
    ("dgx-b200/ufw-late", "", "What is right: one attempt, and packets of connections that are closed.",
     blocked("192.0.2.8", 41000), *[lambda tree: log(
         tree, "[UFW BLOCK] IN=eno1np0 OUT= SRC=192.0.2.8 DST=192.0.2.7 PROTO=TCP SPT=1 DPT=45000 ACK FIN URGP=0")] * 5),
    ("dgx-b200/ufw-alone", "", "What is right: the job has no other nodes.", ufw("allow tcp 22 0.0.0.0/0 any 0.0.0.0/0 in")),
    ("torchrun-two-nodes/ufw", "firewall", "NVIDIA/nccl#352: nothing but ssh is allowed.",
     ufw("allow tcp 22 0.0.0.0/0 any 0.0.0.0/0 in")),
    ("torchrun-two-nodes/ufw-open", "", "What is right: the network of the nodes is allowed.",
     ufw("allow tcp 22 0.0.0.0/0 any 0.0.0.0/0 in", "allow any any 0.0.0.0/0 any 192.0.2.0/24 in")),
    ("torchrun-two-nodes/nft", "firewall", "mulgadc/spinifex#769: policy drop, and single ports.", nft()),
    ("torchrun-two-nodes/nft-open", "", "What is right: the peers are accepted.", nft("ip saddr 192.0.2.0/24 accept")),
    ("torchrun-two-nodes/nft-accepts", "", "What is right: its policy is to accept.", nft(policy="accept")),
    ("torchrun-two-nodes/firewalld", "firewall", "dell/omnia#4071, firewalld/firewalld#1452, projectcalico/calico#10655: the zone "
     "of the installation.",
     firewalld("public")),
    ("torchrun-two-nodes/firewalld-trusted", "", "What is right: the nodes are in the zone that accepts all.",
     firewalld("public", trusted=True)),
    ("torchrun-two-nodes/two-routes", "rails-subnet", "NVIDIA/nccl#1581: two interfaces in 192.0.2.0/20.",
     second_interface, same_network("eno1np0", "eno2")),
    ("torchrun-two-nodes/two-routes-named", "rails-subnet", "NVIDIA/nccl#1580: NCCL_SOCKET_IFNAME does not help.",
     second_interface, same_network("eno1np0", "eno2"), env(NCCL_SOCKET_IFNAME="eno2")),
    ("torchrun-two-nodes/two-routes-alone", "rails-subnet", "NVIDIA/nccl#1581 as its report has it: routes, and nothing else.",
     second_interface, lambda tree: [tree.append(
         "/proc/net/route", f"{name}\t000200C0\t00000000\t0001\t0\t0\t0\t00F0FFFF\t0\t0\t0\n") for name in ("eno1np0", "eno2")]),
    ("torchrun-two-nodes/two-routes-metrics", "", "What is right: the metrics decide, as Amazon's and cloud-init's settings have it.",
     second_interface, lambda tree: [tree.append(
         "/proc/net/route", f"{name}\t000200C0\t00000000\t0001\t0\t0\t{metric}\t00F0FFFF\t0\t0\t0\n")
         for name, metric in (("eno1np0", 100), ("eno2", 200))]),
    ("torchrun-two-nodes/two-routes-tables", "", "What is right: routing tables of the site.",
     second_interface, same_network("eno1np0", "eno2"),
     put("/etc/iproute2/rt_tables", "255\tlocal\n254\tmain\n253\tdefault\n0\tunspec\n100\teno1\n101\teno2\n")),
    ("torchrun-two-nodes/two-routes-rules", "", "What is right: NVIDIA/nccl#1269, a rule for each address.",
     second_interface, same_network("eno1np0", "eno2", arp_filter=1)),
    ("gke-a4x/domain", "", "What is right: one domain.", domain(*[(1, 32766)] * 4)),
    ("gke-a4x/no-domain", "imex", "meta-pytorch/torchcomms#1385: a fabric that is up, and no cluster.",
     domain(*[(0, 0)] * 4)),
    ("gb200/two-domains", "imex", "meta-pytorch/torchcomms#3612, NVIDIA/nccl#1301: the clique alone does not tell.",
     domain((1, 32766), (1, 32766), (2, 32766), (2, 32766))),
    ("gb200/two-cliques", "imex", "The same cluster, in two partitions.", domain((1, 1), (1, 1), (1, 2), (1, 2))),
    ("gke-a4x/mnnvl-off", "nccl-disabled", "GoogleCloudPlatform/cluster-toolkit#6116: left over from a measurement.",
     two_nodes, env(NCCL_MNNVL_ENABLE="0")),
    ("gke-a4x/cumem-off", "nccl-disabled", "awslabs/awsome-distributed-ai#876, vllm-project/vime#103: it needs cuMem.",
     two_nodes, env(NCCL_CUMEM_ENABLE="0")),
    ("gke-a4x/mnnvl-on", "", "What is right: it may use them.", two_nodes, env(NCCL_MNNVL_ENABLE="1")),
    ("dgx-b200/mnnvl-off", "", "What is right: a board has none between nodes.", two_nodes, env(NCCL_MNNVL_ENABLE="0")),
    ("gke-a4x/gib", "", "What is right: llm-d/llm-d#2043, gIB's plugin without its script, and no level of A4.",
     lambda tree: (software.gib(tree, software.AARCH64, "a4x"), tree.remove("/usr/local/gib/scripts/set_nccl_env.sh"),
                   tree.environment.update(NCCL_NET="gIB", NCCL_TUNER_CONFIG_PATH="/usr/local/gib/configs/tuner_config_a4x.txtpb",
                                           LD_LIBRARY_PATH="/usr/lib/aarch64-linux-gnu:/usr/local/gib/lib64"))),
    ("dgx-b200/no-cluster", "", "What is right: meta-pytorch/torchcomms#1385, boards without a rack have none.",
     domain(*[(0, 0)] * 8)),
))


# --- one process and another; links; devices; addresses ---


def ptrace_scope(value, capabilities="", seccomp=0):
    def step(tree):
        tree.put("/proc/sys/kernel/yama/ptrace_scope", f"{value}\n")
        tree.append("/proc/self/status", f"CapEff:\t{capabilities or '0000000000000000'}\nSeccomp:\t{seccomp}\n")
    return step


RAY = env(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True", RAY_JOB_ID="01000000")


def flaps(times, *lines):
    return lambda tree: log(tree, *[line for _ in range(times) for line in lines])


def node_devices(tree):
    """/dev/infiniband of the node, in a pod with functions of its own."""
    for i in range(0, 16, 2):
        tree.device_node(f"/dev/infiniband/uverbs{i}")


def last_gpu(tree):
    """The address of the GPU to which regions() gave some."""
    return next(path for path in tree.entries if path.endswith("/resource")).split("/")[-2]


def regions(*sizes):
    """Of the last GPU, which the driver does not have; 0: without an address."""
    def step(tree):
        address = tree.answers["nvml"]["gpus"].pop()["pci"]
        folder = variants.pci_folder(tree, address)
        tree.remove(f"{folder}/driver")
        tree.put(f"{folder}/resource", "".join(
            f"0x{base:016x} 0x{base + (size << 20) - 1 if base else 0:016x} 0x{0x14220c if base else 0:016x}\n"
            for base, size in ((0x38_0000_0000 * bool(size), size) for size in sizes)))
        for path in (f"/dev/nvidia{len(tree.answers['nvml']['gpus'])}", f"/proc/driver/nvidia/gpus/{address}/information"):
            tree.entries.pop(path, None)
            tree.stats.pop(path, None)
    return step


set_up(change, (
    ("docker-host-network/expandable", "ptrace", "pytorch/pytorch#165685: tensors between Ray's processes, in a container.",
     RAY, ptrace_scope(0, seccomp=2)),
    ("dgx-b200/expandable", "ptrace", "verl-project/verl#3377: Ubuntu's default, in no container.", RAY, ptrace_scope(1)),
    ("gke-a3-ultra-cos-pod/flashinfer-shares", "ptrace", "flashinfer-ai/flashinfer#4089: one-sided all-to-all of vLLM.",
     env(VLLM_ALL2ALL_BACKEND="flashinfer_nvlink_one_sided"), ptrace_scope(1)),
    ("dgx-b200/cma", "ptrace", "openucx/ucx#3545: UCX is told to use it.", env(UCX_TLS="rc,cuda_copy,cma"), ptrace_scope(1)),
    ("docker-host-network/vader", "ptrace", "open-mpi/ompi#4948: Open MPI in docker.",
     env(OMPI_MCA_btl_vader_single_copy_mechanism="cma"), ptrace_scope(2)),
    ("dgx-b200/expandable-alone", "", "What is right: each process keeps its tensors.",
     env(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"), ptrace_scope(1)),
    ("docker-host-network/expandable-right", "", "What is right: --cap-add=SYS_PTRACE.", RAY,
     ptrace_scope(1, "00000000a80c25fb", 2)),
    ("dgx-b200/scope-default", "", "What is right: nothing needs it.", ptrace_scope(1)),
    ("hgx-h100-deepep-roce/flapping", "link-errors", "NVIDIA/nccl#905: one link, from minute to minute.",
     flaps(12, "mlx5_core 0000:18:00.0 ens0np0: Link down", "mlx5_core 0000:18:00.0 ens0np0: Link up")),
    ("hgx-h100-broadcom/flapping", "link-errors", "nebius/soperator#481, NVIDIA/NVSentinel#1236: all of them.",
     flaps(15, *[f"bnxt_en 0000:{i:02x}:00.0 ens{i}np0: NIC Link is Down" for i in range(8)])),
    ("dgx-h100-superpod/flapping", "link-errors", "InfiniBand: the driver names the RDMA device.",
     flaps(11, "infiniband mlx5_3: Port: 1 Link DOWN", "infiniband mlx5_3: Port: 1 Link ACTIVE")),
    ("hgx-h100-deepep-roce/switch-restarts", "", "What is right: each link has seen its switch restart twice.",
     flaps(2, *[f"mlx5_core 0000:{i:02x}:00.0 ens{i}np0: Link down" for i in range(8)])),
    ("sriov-pod/devices-of-node", "nic-access", "smg-project/smg#1762, Mellanox/k8s-rdma-shared-dev-plugin#93: all of "
     "/dev/infiniband is mounted.", node_devices),
    ("sriov-pod/devices-of-node-unlisted", "", "What is right: NCCL is told which are its own.", node_devices,
     env(NCCL_IB_HCA="=" + ",".join(f"mlx5_{i}" for i in range(1, 16, 2)))),
    ("dgx-b200/no-window", "driver-skew", "NVIDIA/open-gpu-kernel-modules#862: Above 4G Decoding is off.",
     regions(16, 0, 0, 32)),
    ("kvm-passthrough/no-window", "driver-skew", "NVIDIA/gpu-operator#492: the virtual machine's window is too small.",
     regions(16, 0, 0, 32)),
    ("dgx-b200/no-window-logged", "driver-skew", "NVIDIA/gpu-operator#492: the driver says so.", regions(16, 262144, 0, 32),
     lambda tree: log(tree, "NVRM: This PCI I/O region assigned to your NVIDIA device is invalid:",
                      "NVRM: BAR1 is 0M @ 0x0 (PCI:{})".format(last_gpu(tree)))),
    ("dgx-b200/no-power", "gpu-errors", "The other cause that the driver names.",
     lambda tree: no_answer(tree, "0000:61:00.0"),
     lambda tree: log(tree, "NVRM: GPU 0000:61:00.0: GPU does not have the necessary power cables connected.", INIT)),
    ("dgx-b200/unbound", "driver-skew", "The same GPU with its addresses: unbound by hand.", regions(16, 262144, 0, 32)),
))
