# SPDX-License-Identifier: Apache-2.0
"""Roots that no kernel would make: damaged, enormous, circular. No verb may crash, hang or print what is not text."""
from tree import Fifo, Folder, Link, Sparse
from variants import register

GARBAGE = bytes(range(256)) * 16 + b"\x1b[31m\x1b]0;title\x07\xff\xfe\xc3("


hostile = []


def damage(change):
    hostile.append(register(f"a4/hostile-{change.__name__.replace('_', '-')}", change))
    return change


def files(tree):
    return [path for path, content in tree.entries.items() if isinstance(content, bytes)]


def links(tree):
    return [path for path, content in tree.entries.items() if isinstance(content, Link)]


@damage
def truncated(tree):
    """Every file ends in its middle."""
    for path in files(tree):
        tree.entries[path] = tree.entries[path][:len(tree.entries[path]) // 2]


@damage
def garbage(tree):
    """Every file is binary, with escape sequences for terminals."""
    for path in files(tree):
        tree.entries[path] = GARBAGE
    tree.environment = {"LD_LIBRARY_PATH": "\x1b[31m:\t:/\x07", "NVSHMEM_HCA_LIST": "\x1b]0;x\x07" * 50,
                        "DEEP_EP_DEVICE_TO_HCA_MAPPING": "0:\x1b[2J:99999999999999999999,-1:::,,,"}


@damage
def sparse(tree):
    """Files that are read whole have 100 MiB."""
    for path in ("/proc/self/status", "/proc/self/limits", "/proc/driver/nvidia/params", "/proc/cmdline",
                 "/var/lib/dpkg/status", "/var/log/kern.log", "/etc/ld.so.conf", "/proc/meminfo",
                 "/opt/deepep/python/deep_ep/buffer.py", "/usr/lib/x86_64-linux-gnu/libibverbs.so.1.14.56.0"):
        tree.entries[path] = Sparse(100 << 20)


@damage
def loops(tree):
    """Links that lead to themselves, to each other, and folders that contain themselves."""
    for i, path in enumerate(links(tree)):
        if i % 3 == 0:
            tree.entries[path] = Link(path.rsplit("/", 1)[1])
    tree.entries["/opt/deepep/python/deep_ep/deep_ep"] = Link(".")
    tree.entries["/etc/ld.so.conf"] = b"include /etc/ld.so.conf\ninclude /etc/ld.so.conf.d/*.conf\n"
    tree.entries["/etc/ld.so.conf.d/again.conf"] = Link("../ld.so.conf")


@damage
def outward(tree):
    """Links out of the root, by name and by going up."""
    for i, path in enumerate(links(tree)):
        tree.entries[path] = Link("/etc" if i % 2 else "../" * 40 + "etc/passwd")
    tree.entries["/etc/ld.so.conf"] = Link("../" * 60 + "etc/passwd")


@damage
def folders(tree):
    """A folder where a file should be."""
    for path in files(tree):
        if path.startswith(("/proc/", "/sys/class/", "/etc/", "/opt/")) or path.endswith(("/rate", "/vendor")):
            tree.entries[path] = Folder()
    tree.environment = {}


@damage
def fifos(tree):
    """A FIFO where a file should be: opening one for reading waits for ever."""
    for path in files(tree):
        if path.startswith(("/proc/", "/etc/", "/var/")) or path.endswith(("/state", "/numa_node", ".py", ".so.1")):
            tree.entries[path] = Fifo()
    tree.environment = {}


@damage
def crowd(tree):
    """20000 entries in folders that are listed."""
    for i in range(20000):
        tree.entries[f"/sys/bus/pci/devices/0000:{i >> 8:02x}:{i >> 3 & 31:02x}.{i & 7}"] = Link("../../../none")
        tree.entries[f"/sys/class/infiniband/mlx5_{i + 100}"] = Link("none")
        tree.entries[f"/etc/ld.so.conf.d/{i:05}.conf"] = b"/nowhere\n"


@damage
def bare(tree):
    """Devices without any attribute."""
    for path in files(tree):
        if path.startswith("/sys/devices/"):
            del tree.entries[path]
            tree.entries[path.rsplit("/", 1)[0]] = Folder()


@damage
def answers(tree):
    """The driver's answer has the wrong types and sizes."""
    gpus = tree.answers["nvml"]["gpus"]
    gpus[0]["pci"] = 7
    gpus[1]["cc"] = ["x", None, 3]
    gpus[2]["nvlinks"] = "switch" * 1000
    gpus[3]["uuid"] = "\x1b[31m" + "U" * 100000
    gpus[4] = None
    gpus[5]["minor"] = -2 ** 62
    gpus[6]["ecc_uncorrected"] = 1.5e300
    gpus += [{"pci": f"ffff:ff:1f.{i}", "name": "x" * 1000} for i in range(1000)]
    for question in list(tree.answers):
        if question.startswith("load:"):
            tree.answers[question] = [question] * 100


@damage
def denied(tree):
    """Nothing may be read that root keeps to itself on many machines, and more."""
    tree.denied = [path for path in files(tree) if path.startswith(("/proc/", "/var/", "/etc/modprobe.d/", "/opt/"))
                   or path.endswith(("/config", "/state", "/type"))]
    tree.denied.append("/proc/self/environ")


@damage
def contradiction(tree):
    """Numbers beyond all bounds."""
    for path in files(tree):
        if path.endswith(("/numa_node", "/current_link_width", "/rate", "/state", "/speed")):
            tree.entries[path] = b"99999999999999999999999999\n"
        elif path.endswith(("/local_cpulist", "/cpulist")):
            tree.entries[path] = b"0-4294967295,7-3,,-,18446744073709551615\n"
        elif "/counters/" in path:
            tree.entries[path] = b"-1\n"


WORDS = "$(touch pwned)`touch pwned`;touch pwned|touch pwned & '\" \\ \n x"


@damage
def words(tree):
    """Names and values that are commands for a shell, where many things are wrong: commands to paste quote them."""
    for path in list(tree.entries):
        for old, new in (("/mlx5_3", "/$(id)_3"), ("/mlx5_5", "/;reboot _5")):
            if path.startswith("/sys/") and old in path + "/":
                tree.entries[path.replace(old, new)] = tree.entries.pop(path)
                break
    for path, entry in list(tree.entries.items()):
        if isinstance(entry, Link):
            target = entry.target.replace("/mlx5_3", "/$(id)_3").replace("/mlx5_5", "/;reboot _5")
            tree.entries[path] = Link(target)
    plugin = "/opt/a b;touch x/libnccl-net.so"
    tree.entries[plugin] = tree.entries["/usr/local/gib/lib64/libnccl-net.so"]
    tree.answers[f"load:{plugin}"] = {"ok": False, "error": WORDS}
    home = "/opt/$(id)/nvshmem"
    for path in tree.below("/opt/deepep/nvshmem"):
        tree.entries[home + path.removeprefix("/opt/deepep/nvshmem")] = tree.entries[path]
    tree.environment.update({
        f"NVSHMEM_X{WORDS}": "1",
        "NVSHMEM_Y;reboot": "1",
        "NVSHMEM_NOBODY_KNOWS": WORDS,
        "NVSHMEM_HCA_PREFIX": "rocep",
        "NVSHMEM_HOME": f"/gone/{WORDS}",
        "GDRCOPY_HOME": "/gone/$(id)",
        "NCCL_NET_PLUGIN": plugin,
        "NCCL_IB_TC": WORDS,
        "RDMAV_DRIVERS": "/usr/lib/$(id)/libibverbs",
        "LD_PRELOAD": "/gone/$(id).so:lib';reboot;'.so:/gone/libnccl.so.2",
        "LD_LIBRARY_PATH": "/usr/local/gib/lib64:" + home + "/lib",
        "CUDA_VISIBLE_DEVICES": "1,0,2,3,4,5,6,7",
    })
    del tree.environment["DEEP_EP_DEVICE_TO_HCA_MAPPING"]


# An overlay is written by people, for tests: one that is wrong is refused with the reason.


@damage
def overlay_cut(tree):
    """The overlay ends in its middle."""
    tree.stats, tree.answers = {}, {}
    tree.entries["/epkit-overlay.json"] = b'{"epkit_snapshot": 1, "answers": {"nvml": {"value": {"gpus": [{"pci'


@damage
def overlay_types(tree):
    """The overlay says of a file what cannot be."""
    tree.stats = {path: {"kind": [], "bytes": -1, "access": 5} for path in tree.stats}
