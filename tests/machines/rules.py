# SPDX-License-Identifier: Apache-2.0
"""Machines that have exactly the fault of one check, and neighbours that have not.

A neighbour is what looks like the fault and is none; its docstring begins with "What is right".
"""
import json

import software
import variants
from field import bond
from software import X86_64
from variants import nic_port, pci_folder

changes = []
change = variants.changes_into(changes)


def gpus(tree):
    return tree.answers["nvml"]["gpus"]


def off_the_bus(tree, address, minor):
    """As if it had never been there: neither the bus nor the driver knows it."""
    tree.remove(pci_folder(tree, address))
    tree.remove(f"/sys/bus/pci/devices/{address}")
    tree.remove(f"/proc/driver/nvidia/gpus/{address}")
    tree.answers["nvml"]["gpus"] = [gpu for gpu in gpus(tree) if gpu["pci"] != address]
    del tree.entries[f"/dev/nvidia{minor}"]
    del tree.stats[f"/dev/nvidia{minor}"]


def log(tree, *lines):
    for line in lines:
        tree.append("/var/log/kern.log", f"1970-01-01T00:10:00.000000+00:00 node kernel: {line}\n")


def limits(tree, soft, hard):
    tree.replace("/proc/self/limits", "Max open files            1048576              1048576",
                 f"Max open files            {soft:<20} {hard:<7}")


# --- GPUs as a set ---


    # Its NIC is there and idle: one NIC more than GPUs.


@change("gcp-a4-mig-off/half")
def four_gpus_of_a_virtual_machine(tree):
    """What is right: a virtual machine has what its type has, and nothing here says eight."""
    for address, minor in (("0000:c4:00.0", 4), ("0000:c5:00.0", 5), ("0000:cb:00.0", 6), ("0000:cc:00.0", 7)):
        off_the_bus(tree, address, minor)
    tree.environment = {name: tree.environment[name] for name in ("PATH", "HOME", "LANG")}
    for nic in range(4, 8):
        folder = variants.nic_folder(tree, f"mlx5_{nic}").split("/infiniband/")[0]
        tree.remove(folder)
        tree.remove(f"/sys/class/infiniband/mlx5_{nic}")
        tree.remove(f"/sys/class/infiniband_verbs/uverbs{nic}")
        tree.remove(f"/sys/class/net/gpu{nic}rdma0")
        tree.remove(f"/sys/bus/pci/devices/{folder.rsplit('/', 1)[1]}")


@change("gcp-a4-mig-off/power-brake", "clocks")
def power_brake(tree):
    gpus(tree)[0]["slowdown"].update(hardware=True, power_brake=True)


@change("gcp-a4-mig-off/clocks-untold")
def clocks_untold(tree):
    """What is right: a driver that does not tell of clocks."""
    for gpu in gpus(tree):
        del gpu["slowdown"]


@change("dgx-h100-superpod/fabric-manager", "fabric-manager")
def fabric_manager_updated_alone(tree):
    tree.replace("/var/lib/dpkg/status", f"Package: nvidia-fabricmanager-580\nStatus: install ok installed\n"
                 f"Architecture: amd64\nVersion: {software.DRIVER}-1",
                 "Package: nvidia-fabricmanager-580\nStatus: install ok installed\n"
                 "Architecture: amd64\nVersion: 580.140.02-1")


@change("dgx-h100-superpod/sxid", "sxid")
def fatal_sxid(tree):
    log(tree, "nvidia-nvswitch2: SXid (PCI:0000:07:00.0): 24007, Fatal, Link 44 sourcetrack timeout error (First)")


variants.set_up(change, (
    ("azure-ncc-h100-v5/not-ready", "confidential", "Nobody has attested the GPU and let it take work.",
     lambda tree: tree.answers["nvml"]["cc"].update(ready=False)),
    ("azure-ncc-h100-v5/old-driver", "",
     "What is right: a single GPU that takes work, and a driver that does not tell of modes for several.",
     lambda tree: tree.answers["nvml"]["cc"].pop("multi_gpu")),
    ("dgx-h100-superpod/gpu-gone", "inventory", "GPU gone.",
     lambda tree: off_the_bus(tree, "0000:1b:00.0", 0)),
    ("hgx-h200-snc4/gpu-gone", "inventory", "The four NVSwitches say that it is a board of eight.",
     lambda tree: off_the_bus(tree, "0000:df:00.0", 7)),
    ("gcp-a4-mig-off/mig", "mig", "MIG on.",
     lambda tree: gpus(tree)[2].update(mig=True)),
    ("gcp-a4-mig-off/hot", "clocks", "Hot GPU.",
     lambda tree: gpus(tree)[5]["slowdown"].update(hardware=True, hw_thermal=True),
     lambda tree: gpus(tree)[2]["slowdown"].update(sw_thermal=True)),
    ("gcp-a4-mig-off/warm", "clocks", "Warm GPU.",
     lambda tree: gpus(tree)[1]["slowdown"].update(sw_thermal=True)),
    ("cloud-vm-one-gpu/mig", "", "What is right: one GPU in instances, and nothing that would join several.",
     lambda tree: gpus(tree)[0].update(mig=True)),
    ("docker-host-network/uvm", "uvm", "No UVM in the container.",
     lambda tree: tree.entries.pop("/dev/nvidia-uvm"),
     lambda tree: tree.stats.pop("/dev/nvidia-uvm")),
    ("dgx-b200/uvm", "uvm", "UVM not for this user.",
     lambda tree: tree.stats["/dev/nvidia-uvm"].update(access="---")),
    ("hgx-a100-mesh/fabric-manager", "", "What is right: a package that nobody needs here.",
     lambda tree: tree.append("/var/lib/dpkg/status", software.package("nvidia-fabricmanager-535", "535.230.02-1"))),
    ("dgx-h100-superpod/xid-149", "gpu-errors", "NVLink error.",
     lambda tree: log(tree, "NVRM: Xid (PCI:0000:1b:00): 149, NETIR Nonfatal XC0 i0 Link 03 (0x004a80c6)")),
    ("dgx-h100-superpod/xid-94", "",
     "What is right: programs did it, or the driver has dealt with it, which the log tells by a recovery.",
     lambda tree: log(tree, "NVRM: Xid (PCI:0000:1b:00): 31, pid=77, name=python3, MMU Fault: ENGINE GRAPHICS",
                      "NVRM: Xid (PCI:0000:1b:00): 43, pid=77, name=python3, Ch 00000008",
                      "NVRM: Xid (PCI:0000:1b:00): 45, pid=77, name=python3, Ch 00000009")),
))


# --- ports and links ---


@change("dgx-h200-deepep/uplink-speed", "pci-uplink")
def switch_of_an_older_generation(tree):
    for address in ("0000:3d:00.0", "0000:3c:01.0"):
        tree.put(f"{pci_folder(tree, address)}/current_link_speed", "16.0 GT/s PCIe\n")


@change("dgx-h200-deepep/gpu-idle")
def gpu_at_rest(tree):
    """What is right: GPUs that nothing uses lower the speed of their own link."""
    for gpu in gpus(tree)[:5]:
        folder = pci_folder(tree, gpu["pci"])
        tree.put(f"{folder}/current_link_speed", "2.5 GT/s PCIe\n")
        tree.put(f"{folder.rsplit('/', 1)[0]}/current_link_speed", "2.5 GT/s PCIe\n")


@change("dgx-b200/switch-restarts")
def switch_restarts(tree):
    """What is right: all ports have seen the same, so it was not theirs; the worst is within what chance makes."""
    for i in range(8):
        tree.put(f"{nic_port(tree, f'mlx5_{i}')}/counters/link_downed", f"{30 + 9 * (i % 2)}\n")


@change("hgx-h100-worn/loss", "roce-loss")
def loss_on_all_rails(tree):
    for i in range(8):
        port = nic_port(tree, f"mlx5_{i}")
        tree.put(f"{port}/hw_counters/packet_seq_err", f"{5_000_000 + i}\n")
        tree.put(f"{port}/counters/port_xmit_packets", "900000000\n")


@change("dgx-b200/loss")
def counters_of_infiniband(tree):
    """What is right: InfiniBand loses nothing by congestion, and counts other things under these names."""
    port = nic_port(tree, "mlx5_1")
    tree.put(f"{port}/hw_counters/packet_seq_err", "5000000\n")
    tree.put(f"{port}/counters/port_xmit_packets", "900000000\n")


variants.set_up(change, (
    ("dgx-h200-deepep/uplink-width", "pci-uplink", "Switch with half of its lanes.",
     lambda tree: tree.put(f"{pci_folder(tree, '0000:3d:00.0')}/current_link_width", "8\n"),
     lambda tree: tree.put(f"{pci_folder(tree, '0000:3c:01.0')}/current_link_width", "8\n")),
    ("hgx-h100-worn/flaps", "link-errors", "Flapping link.",
     lambda tree: tree.put(f"{nic_port(tree, 'mlx5_3')}/counters/link_downed", "73\n")),
    ("dgx-b200/symbols", "link-errors", "Damaged symbols.",
     lambda tree: tree.put(f"{nic_port(tree, 'mlx5_6')}/counters/symbol_error", "184467\n")),
    ("hgx-h100-worn/mtu", "mtu", "One rail with a small MTU.",
     lambda tree: tree.put(f"{tree.real('/sys/class/net/ens2np0')}/mtu", "1500\n")),
    ("hgx-h100-worn/mtu-alike", "", "What is right: 4200, 8896 and 9000 are all of 4096 bytes to RDMA.",
     lambda tree: tree.put(f"{tree.real('/sys/class/net/ens2np0')}/mtu", "4200\n"),
     lambda tree: tree.put(f"{tree.real('/sys/class/net/ens3np0')}/mtu", "9000\n")),
    ("hgx-h100-worn/firmware", "firmware", "Odd firmware.",
     lambda tree: tree.put(f"{variants.nic_folder(tree, 'mlx5_5')}/fw_ver", "28.39.1002\n")),
    ("dgx-b200/firmware", "", "What is right: ports for management are of another make, and have what they have.",
     lambda tree: tree.put(f"{variants.nic_folder(tree, 'mlx5_20')}/fw_ver", "22.36.1010\n")),
    ("hgx-h100-bonded-management/bond", "bond", "Dead member.",
     lambda tree: tree.put(f"{tree.real('/sys/class/net/eno2np1')}/bonding_slave/mii_status", "down\n")),
))


@change("workstation-4090/bond")
def bond_of_others(tree):
    """What is right: a bond that is neither for RDMA nor for the default route."""
    bond(tree, "enp5s0")
    tree.put(f"{tree.real('/sys/class/net/enp5s0')}/bonding_slave/mii_status", "down\n")
    tree.remove("/sys/class/net/bond0")
    tree.put_all("/sys/class/net/bond0", {"operstate": "down\n", "bonding/slaves": "dummy0 dummy1\n"})
    tree.put("/sys/class/net/dummy0/bonding_slave/mii_status", "down\n")
    tree.default_route("enp5s0")


# --- NVSHMEM ---


@change("dgx-h200-deepep/hca-list", "hca-lists")
def list_with_a_wrong_separator(tree):
    tree.environment["NVSHMEM_HCA_LIST"] = "mlx5_0:1;mlx5_1:1"
    tree.environment["LOCAL_RANK"], tree.environment["LOCAL_WORLD_SIZE"] = "0", "8"


@change("dgx-h200-deepep/hca-port", "hca-lists")
def list_with_a_port_that_is_not_there(tree):
    tree.environment["NVSHMEM_HCA_LIST"] = "mlx5_0:1,mlx5_1:2"
    tree.environment["LOCAL_RANK"], tree.environment["LOCAL_WORLD_SIZE"] = "0", "8"


@change("dgx-h200-deepep/hca-list-right")
def list_of_a_rank(tree):
    """What is right: one NIC, with its port, for the rank that it belongs to."""
    tree.environment["NVSHMEM_HCA_LIST"] = "mlx5_2:1"
    tree.environment["LOCAL_RANK"], tree.environment["LOCAL_WORLD_SIZE"] = "2", "8"


def without_peermem(tree):
    variants.unload(tree, "nvidia_peermem")
    tree.remove("/sys/kernel/mm/memory_peers")


@change("dgx-h200-deepep/dmabuf", "dmabuf-off")
def dmabuf_off_without_peermem(tree):
    without_peermem(tree)
    tree.environment["NVSHMEM_IB_DISABLE_DMABUF"] = "1"


# --- NCCL ---


@change("dgx-b200/socket-down", "socket-interface")
def interface_that_is_down(tree):
    tree.environment["GLOO_SOCKET_IFNAME"] = "eno2np1"
    tree.put(f"{tree.real('/sys/class/net/eno2np1')}/operstate", "down\n")


@change("dgx-b200/socket-loopback")
def loopback_of_one_node(tree):
    """What is right: a job of one node, which needs no other interface."""
    tree.put_all("/sys/class/net/lo", {"operstate": "unknown\n", "mtu": "65536\n"})
    tree.environment.update({"NCCL_SOCKET_IFNAME": "lo", "RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"})


# --- the import of deep_ep ---

EXTENSION = f"/opt/deepep/python/{software.DEEPEP_EXTENSION}"
NEEDED = ["libnvshmem_host.so.3", "libc10.so", "libtorch.so", "libtorch_python.so", "libcudart.so.12", "libmlx5.so.1",
          "libstdc++.so.6", "libc.so.6"]


def extension(tree, path=EXTENSION, *, needed=(), **facts):
    tree.library(path, archs=[90], machine=X86_64.machine,
                 **{"runpath": "/opt/deepep/nvshmem/lib", "needed": NEEDED + list(needed), **facts})


@change("dgx-h200-deepep/import-glibcxx", "import-libraries")
def built_with_a_newer_compiler(tree):
    software.library(tree, X86_64, "libstdc++.so.6", "0.33", defines=[f"GLIBCXX_3.4.{i}" for i in range(34)])
    extension(tree, needs={"libstdc++.so.6": ["GLIBCXX_3.4.34"]})


@change("conda/newer-libstdc")
def conda_has_a_newer_libstdc(tree):
    """What is right: the system's is too old, and Python has conda's in memory before the extension comes."""
    software.library(tree, X86_64, "libstdc++.so.6", "0.30", defines=[f"GLIBCXX_3.4.{i}" for i in range(31)])


@change("dgx-h200-deepep/import-nvshmem", "import-libraries")
def nvshmem_lost(tree):
    """Moved after the build, and PyTorch without one."""
    tree.remove("/opt/deepep/nvshmem")
    tree.remove(f"{software.PYTHON}/nvidia/nvshmem")
    for question in [name for name in tree.answers if name.startswith("load:/opt/deepep/nvshmem")]:
        del tree.answers[question]
    for name in ("NVSHMEM_HOME", "LD_PRELOAD", "LD_LIBRARY_PATH"):
        del tree.environment[name]


variants.set_up(change, (
    ("dgx-h200-deepep/import-missing", "import-libraries", "Library of the build image.",
     lambda tree: extension(tree, needed=["libgomp-custom.so.1"])),
    ("dgx-h200-deepep/import-glibc", "import-libraries", "Built on a newer system.",
     lambda tree: extension(tree, needs={"libc.so.6": ["GLIBC_2.34", "GLIBC_2.41"]})),
    ("dgx-h200-deepep/import-python", "import-python", "Extension for another Python.",
     lambda tree: tree.remove(EXTENSION),
     lambda tree: extension(tree, "/opt/deepep/python/deep_ep_cpp.cpython-310-x86_64-linux-gnu.so")),
    ("dgx-h200-deepep/import-pythons", "", "What is right: one of the two is for this Python.",
     lambda tree: extension(tree, "/opt/deepep/python/deep_ep_cpp.cpython-310-x86_64-linux-gnu.so")),
))


@change("dgx-h200-deepep/cuda-13", "cuda-major")
def extension_for_another_cuda(tree):
    extension(tree, needed=["libcudart.so.13"])
    tree.library(EXTENSION, archs=[90], machine=X86_64.machine, runpath="/opt/deepep/nvshmem/lib",
                 needed=[name.replace("libcudart.so.12", "libcudart.so.13") for name in NEEDED])
    tree.library("/usr/local/cuda-13.0/lib64/libcudart.so.13", soname="libcudart.so.13", machine=X86_64.machine,
                 needed=["libc.so.6"])
    tree.append("/etc/ld.so.conf.d/000_cuda.conf", "/usr/local/cuda-13.0/lib64\n")


# --- limits ---


variants.set_up(change, (
    ("dgx-b200/nofile", "nofile", "Few files.",
     lambda tree: limits(tree, 256, 1024)),
    ("dgx-b200/nofile-default", "", "What is right: a shell's default, which a process may raise.",
     lambda tree: limits(tree, 1024, 524288)),
    ("slurm-one-gpu-a-task/one-cpu", "processors", "One processor.",
     lambda tree: tree.replace("/proc/self/status", "Cpus_allowed_list:\t42-55,154-167", "Cpus_allowed_list:\t42")),
    ("docker-host-network/quota", "processors", "Small quota.",
     lambda tree: tree.put("/sys/fs/cgroup/cpu.max", "200000 100000\n")),
    ("docker-host-network/no-quota", "", "What is right.",
     lambda tree: tree.put("/sys/fs/cgroup/cpu.max", "max 100000\n")),
))


# --- jobs ---


@change("mpirun-nccl-tests/other-mpi", "single-ranks")
def mpi_of_another_launcher(tree):
    tree.library("/opt/mpich/lib/libmpi.so.12", soname="libmpi.so.12", needed=["libc.so.6"])
    tree.put("/proc/self/maps", "7f0000000000-7f0000100000 r-xp 00000000 08:01 77 /opt/mpich/lib/libmpi.so.12\n")


@change("mpirun-nccl-tests/its-mpi")
def mpi_of_its_launcher(tree):
    """What is right."""
    tree.library("/opt/openmpi/lib/libmpi.so.40", soname="libmpi.so.40", needed=["libc.so.6"])
    tree.put("/proc/self/maps", "7f0000000000-7f0000100000 r-xp 00000000 08:01 77 /opt/openmpi/lib/libmpi.so.40\n")


def journal(tree, *events):
    lines = [{"v": 1, "time": "2026-02-03T10:00:00Z", "boot": f"00000000-0000-4000-8000-{i:012d}", "event": event,
              "step": "driver"} for i, event in enumerate(events)]
    tree.put("/var/lib/epkit/install/gcp-b200-ubuntu2404/journal.jsonl", "".join(json.dumps(line) + "\n" for line in lines))


variants.set_up(change, (
    ("docker-host-network/environ", "environ-sourced", "Environment of process 1.",
     lambda tree: tree.put("/root/.bashrc", "# made up\nexport $(cat /proc/1/environ | tr '\\0' '\\n' | xargs)\n")),
    ("docker-host-network/environ-read", "", "What is right: one variable is taken out of it, nothing is evaluated.",
     lambda tree: tree.put("/root/.bashrc", "# export /proc/1/environ is wrong\n"
                           "tr '\\0' '\\n' </proc/1/environ | grep ^NCCL_ >/tmp/nccl\n")),
    ("gcp-a4-mig-off/install", "install-stuck", "Restarts again and again.",
     lambda tree: journal(tree, "begin", *["start", "end", "reboot"] * 4)),
    ("gcp-a4-mig-off/install-done", "", "What is right: it restarted the node twice, and finished.",
     lambda tree: journal(tree, "begin", *["start", "end", "reboot"] * 2, "finished")),
))


# --- variables alone ---

variants.set_variables(change, (
    # name, findings, variables, what it is
    ("dgx-h200-deepep/stale-mapping", "void-variables", {"NVSHMEM_HCA_PE_MAPPING": "mlx5_90:1:2"},
     "Left over from another machine, and nobody reads it: no NIC is missed, but the variable does nothing."),
    ("dgx-h200-deepep/dmabuf-peermem", "", {"NVSHMEM_IB_DISABLE_DMABUF": "1"},
     "What is right: the older way is there."),
    ("dgx-h200-deepep/heap", "heap-size", {"NVSHMEM_DISABLE_CUDA_VMM": "1", "NVSHMEM_SYMMETRIC_SIZE": "200G"},
     "A heap larger than the GPU."),
    ("dgx-h200-deepep/heap-small", "heap-size", {"NVSHMEM_DISABLE_CUDA_VMM": "1", "NVSHMEM_SYMMETRIC_SIZE": "128M"},
     "A heap that is too small."),
    ("dgx-h200-deepep/heap-right", "", {"NVSHMEM_DISABLE_CUDA_VMM": "1", "NVSHMEM_SYMMETRIC_SIZE": "4g"},
     "What is right: a static heap with room for DeepEP; without VMM off the size says nothing."),
    ("dgx-b200/nccl-hca", "nccl-hca", {"NCCL_IB_HCA": "=rocep0s0,rocep1s0"}, "NICs of another machine."),
    ("dgx-b200/nccl-hca-some", "nccl-hca", {"NCCL_IB_HCA": "=mlx5_0,mlx5_1,mlx5_2,mlx5_3"},
     "Hca list with half of them."),
    ("dgx-b200/nccl-hca-separator", "nccl-hca", {"NCCL_IB_HCA": "=mlx5_0;mlx5_1;mlx5_2"},
     "Hca list with a wrong separator."),
    ("dgx-b200/nccl-hca-rank", "", {"NCCL_IB_HCA": "=mlx5_3:1", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8"},
     "What is right: a rank that uses one GPU has its one NIC."),
    ("dgx-b200/socket", "socket-interface", {"NCCL_SOCKET_IFNAME": "eth0"}, "Interface of another machine."),
    ("dgx-b200/p2p", "nccl-disabled", {"NCCL_P2P_DISABLE": "1"}, "NVLink switched off."),
    ("dgx-b200/ib-off", "nccl-disabled", {"NCCL_IB_DISABLE": "1"}, "InfiniBand switched off."),
    ("workstation-4090/ib-off", "", {"NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1"},
     "What is right: switched off, and there is none."),
    ("rtx-6000-server/gdr", "nccl-gdr", {"NCCL_NET_GDR_LEVEL": "PIX"}, "Level below the distance."),
    ("dgx-b200/gdr", "", {"NCCL_NET_GDR_LEVEL": "PIX"}, "What is right: each GPU has its NIC on its switch."),
    ("dgx-b200/traffic-class", "traffic-class", {"NCCL_IB_TC": "106"}, "A traffic class on InfiniBand."),
    ("hgx-h100-worn/traffic-class", "", {"NCCL_IB_TC": "106"}, "What is right."),
    ("torchrun-two-nodes/loopback", "rendezvous", {"MASTER_ADDR": "localhost"}, "Address that nobody reaches."),
    ("torchrun-two-nodes/rank", "rendezvous", {"WORLD_SIZE": "8"}, "Rank beyond the world."),
    ("torchrun-two-nodes/unresolved", "rendezvous", {"WORLD_SIZE": "$(NNODES)"}, "Kubernetes did not know that name."),
    ("torchrun-two-nodes/no-rank", "", {"LOCAL_RANK": "-1", "WORLD_SIZE": "16 "}, "What programs and shells leave."),
    ("dgx-b200/nodes", "", {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "192.0.2.10", "MASTER_PORT": "8361"},
     "What is right: DeepEP's tests count nodes, and start the ranks of a node themselves."),
    ("dgx-b200/single-ranks", "single-ranks",
     {"SLURM_STEP_NUM_TASKS": "16",
      "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
      "SLURM_LOCALID": "1",
      "OMPI_COMM_WORLD_SIZE": "1"},
     "A run for each task."),
))
