#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compare the JSON of epkit topo and epkit env with what else tells the same facts.

usage: facts.py TREE FOLDER TOPO-JSON ENV-JSON

FOLDER has the expected texts of the machine below TREE (topo.txt, env.txt). The whole document of the topology is made
from them and from the files of the machine, so a key that is missing, wrong or new is a fault. Prints one line for each
fault and exits with 1 if there is any.
"""
import json
import os
import re
import sys

STATES = {"4: ACTIVE": "ACTIVE"}
PHYS_STATES = {"5: LinkUp": "LinkUp"}


def read(*path):
    with open(os.path.join(*path), encoding="utf-8") as file:
        return file.read().strip()


def section(lines, start):
    """The lines after the one that starts with `start`, up to an empty one."""
    found = [i for i, line in enumerate(lines) if line.startswith(start)]
    if not found:
        return []
    rest = lines[found[0] + 1:]
    return rest[:rest.index("")] if "" in rest else rest


def port_name(name):
    """Of "mlx5_0:1": "mlx5_0"."""
    return name.rpartition(":")[0]


# --- from the files of the machine ---


def pci_function(tree, address):
    folder = f"{tree}/sys/bus/pci/devices/{address}"
    above = [part for part in os.readlink(folder).split("/") if re.match(r"pci|\w{4}:\w\w:", part)]
    driver = os.path.join(folder, "driver")
    row = {"address": address, "parent": above[-2] if len(above) > 2 else None, "host_bridge": above[0],
           "local_cpus": read(folder, "local_cpulist"),
           "driver": os.path.basename(os.readlink(driver)) if os.path.islink(driver) else None}
    for key, file in (("vendor", "vendor"), ("device", "device"), ("class", "class")):
        row[key] = read(folder, file)
    numa = int(read(folder, "numa_node"))
    row["numa_node"] = numa if numa >= 0 else None
    for key, prefix in (("", "current"), ("_max", "max")):
        speed = re.match(r"[\d.]+", read(folder, f"{prefix}_link_speed"))
        row[f"link_gts{key}"] = float(speed[0]) if speed else None
        row[f"link_width{key}"] = int(read(folder, f"{prefix}_link_width")) or None
    return row


def pci_functions(tree):
    """Network and display controllers, and the bridges above them."""
    rows = {address: pci_function(tree, address) for address in sorted(os.listdir(f"{tree}/sys/bus/pci/devices"))}
    shown = set()
    for address, row in rows.items():
        if row["class"][:4] in ("0x02", "0x03"):
            while address:
                shown.add(address)
                address = rows[address]["parent"]
    return [row for address, row in rows.items() if address in shown]


def numa_nodes(tree):
    base = f"{tree}/sys/devices/system/node"
    nodes = sorted(int(name[4:]) for name in os.listdir(base))
    memory = {node: re.search(r"MemTotal: +(\d+) kB", read(base, f"node{node}/meminfo"))[1] for node in nodes}
    return [{"number": node, "cpus": read(base, f"node{node}/cpulist"), "memory_bytes": int(memory[node]) << 10}
            for node in nodes]


def gpus(answer):
    rows = []
    for index, gpu in enumerate(answer["gpus"]):
        links = gpu.get("nvlinks", [])
        rows.append({"index": index, "pci": gpu["pci"], "name": gpu["name"], "minor": gpu["minor"],
                     "compute_capability": ".".join(map(str, gpu["cc"])), "answered": True,
                     **{key: gpu.get(key) for key in ("ecc_uncorrected", "remap_pending", "remap_failed", "fabric")},
                     "nvlinks": len(links), "nvlinks_up": len(links), "nvlinks_switch": links.count("switch"),
                     "nvlink_peers": []})
    return rows


def gids(folder):
    rows = []
    for index in sorted(map(int, os.listdir(f"{folder}/gid_attrs/types"))):
        gid, kind = read(folder, f"gids/{index}"), read(folder, f"gid_attrs/types/{index}")
        if kind == "IB/RoCE v1":
            kind = "IB" if read(folder, "link_layer") == "InfiniBand" else "RoCE v1"
        rows.append({"index": index, "type": kind, "kind": "link-local" if gid.startswith("fe80:") else "IPv4"})
    return rows


def nic(tree, name, role, why):
    folder = f"{tree}/sys/class/infiniband/{name}"
    port = f"{folder}/ports/1"
    function = os.path.realpath(f"{folder}/device")
    roce = read(port, "link_layer") == "Ethernet"
    return {"name": name, "pci": os.path.basename(function), "hca": read(folder, "hca_type"),
            "firmware": read(folder, "fw_ver"),
            "uverbs": "/dev/infiniband/" + os.listdir(f"{function}/infiniband_verbs")[0], "role": role, "role_why": why,
            "ports": [{"number": 1, "state": STATES[read(port, "state")], "active": True,
                       "phys_state": PHYS_STATES[read(port, "phys_state")], "rate_gbps": int(read(port, "rate").split()[0]),
                       "link": "RoCE" if roce else "InfiniBand",
                       "netdev": read(port, "gid_attrs/ndevs/0") if roce else None, "gids_state": "ok",
                       "gids": gids(port)}]}


# --- from the text ---


def matrix(lines):
    rows = []
    header = next(line for line in lines if re.match(r" +GPU0 ", line))
    names = header.split(" CPU affinity")[0].split()
    for line in section(lines, header)[:len(names)]:
        words = line.split()
        cpus, *numa = words[1 + len(names):]
        rows.append({"name": words[0], "paths": dict(zip(names, words[1:])), "cpus": cpus,
                     "numa_node": int(numa[0]) if numa else None})
    return rows


def with_sharers(rows):
    for row in rows:
        used = [other for other in rows if port_name(other["device"]) == port_name(row["device"])]
        row["sharers"] = len(used)
    return rows


def best_map(lines):
    rows = []
    header = next((line for line in lines if line.endswith("PATH NUMA Gb/s WHY")), "no GPU has a NIC")
    for line in section(lines, header):
        gpu, ports, path, numa, rate, why = re.fullmatch(
            r" *(\d+) (\S+(?:, \S+)*) +([A-Z]+) +(\d*) +(\d+) +(.+)", line).groups()
        devices = ports.split(", ")
        rows.append({"gpu": int(gpu), "device": devices[0], "devices": devices, "path": path,
                     "numa_node": int(numa) if numa else None, "rate_gbps": int(rate), "why": why})
    return with_sharers(rows)


def nvshmem_map(lines):
    rows = []
    start = next((i for i, line in enumerate(lines) if line.startswith("What NVSHMEM would choose")), len(lines))
    for line in section(lines[start:], "GPU NIC"):
        gpu, device, path, why = re.fullmatch(r" *(\d+) (\S+) +([A-Z]+) +(.+)", line).groups()
        rows.append({"gpu": int(gpu), "device": device, "path": path, "why": why})
    return with_sharers(rows)


def no_nic(n_gpus, why, more):
    return [{"gpu": gpu, "device": None, "path": None, "sharers": 0, "why": why, **more} for gpu in range(n_gpus)]


def forms(lines):
    found = {name: None for name in ("EPKIT_VERBS_DEVICE", "DEEP_EP_DEVICE_TO_HCA_MAPPING", "NCCL_IB_HCA")}
    for line in section(lines, "For all processes:"):
        name, _, value = line.strip().partition("=")
        found[name] = value
    found["ranks"] = [dict(zip(("rank", "NVSHMEM_HCA_LIST", "UCX_NET_DEVICES"), [int(line.split()[0])] + line.split()[1:]))
                      for line in section(lines, "RANK NVSHMEM_HCA_LIST")]
    return found


def excluded(lines):
    """Role and reason by the name of the NIC."""
    found = (re.fullmatch(r" +(\S+)  ([a-z-]+): (.+)", line) for line in section(lines, "NICs that are left out:"))
    return {match[1]: (match[2], match[3]) for match in found}


def expected_topo(tree, text):
    lines = text.split("\n")
    document = {"schema_version": 1, "subcommand": "topo", "verdict": lines[0]}
    if len(lines) == 1:
        return document
    with open(f"{tree}/epkit-overlay.json", encoding="utf-8") as file:
        answer = json.load(file)["answers"]["nvml"]["value"]
    roles = excluded(lines)
    names = [port_name(line.split()[0]) for line in section(lines, "NIC ") if ":" in line.split()[0]]
    best = best_map(lines)
    nvshmem = nvshmem_map(lines)
    nothing = re.search(r"would choose by itself: nothing. (.+)$", text, re.M)
    document |= {
        "not_read": None, "hidden_gpus": 0, "cut": False,
        "driver": {"version": re.search(r"^NVIDIA driver (.+)$", text, re.M)[1], "answered": True, "why_not": None},
        "numa": numa_nodes(tree), "pci": pci_functions(tree),
        "gpus": gpus(answer), "matrix": matrix(lines),
        "map": best or no_nic(len(answer["gpus"]), "there is no NIC", {
            "devices": [], "numa_node": None, "rate_gbps": None}),
        "forms": forms(lines),
        "nvshmem": nvshmem or no_nic(len(answer["gpus"]), nothing[1] if nothing else "there is no NIC", {}),
        "nics": [nic(tree, name, *roles.get(name, ("data", None))) for name in names]}
    return document


# --- the environment ---


def env_faults(script, document):
    """Each variable is in the script with its value and its reason, and the script has no other."""
    variables = document.get("variables", [])
    if "variables" in document and document["verdict"].split()[0] != str(len(variables)):
        yield f"env: {len(variables)} variables, and the verdict is {document['verdict']}"
    words = " ".join(script.replace("\n#", "\n").split())
    advised = set(re.findall(r"^ *(?:export|unset) ([A-Z]\w*)|^\d\) export (\w+)", script, re.M))
    advised = {first or second for first, second in advised}
    named = {"EPKIT_PRELOAD" if row["scope"] == "program" else row["name"] for row in variables}
    if advised != named:
        yield f"env: the script has {sorted(advised)}, the document {sorted(named)}"
    for row in variables:
        name = row["name"]
        if " ".join(row["reason"].split()) not in words:
            yield f"env: {name}: its reason is not in the script"
        if row["scope"] == "rank":
            lines = [f"{rank}) export {name}='{value}' ;;" for rank, value in enumerate(row["values"])]
        elif row["scope"] == "program":
            lines = [f"export EPKIT_PRELOAD='{row['value']}'"]
        else:
            lines = [{"set": f"export {name}='{row['value']}'", "unset": f"unset {name}",
                      "prepend": f"_epkit_prepend '{row['value']}' \"${{{name}-}}\""}[row["action"]]]
        yield from (f"env: not in the script: {line}" for line in lines if line not in script.split("\n"))


def differences(got, expected, where):
    if isinstance(expected, dict) and isinstance(got, dict):
        for key in sorted(got.keys() | expected.keys()):
            yield from differences(got.get(key, "nothing"), expected.get(key, "nothing"), f"{where}.{key}")
    elif isinstance(expected, list) and isinstance(got, list) and len(got) == len(expected):
        for i, pair in enumerate(zip(got, expected)):
            yield from differences(*pair, f"{where}[{i}]")
    elif got != expected:
        yield f"{where}: is {json.dumps(got)}, and should be {json.dumps(expected)}"


def main():
    tree, folder, topo, env = sys.argv[1:]
    got = json.loads(read(topo))
    got.pop("epkit", None)
    faults = list(differences(got, expected_topo(tree, read(folder, "topo.txt")), "topo"))
    faults += env_faults(read(folder, "env.txt"), json.loads(read(env)))
    for fault in faults:
        print(fault)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
