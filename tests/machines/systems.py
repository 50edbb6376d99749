#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Holds the commands and the words of findings to the operating system of the machine.

usage: systems.py EPKIT

A fault for each check whose remedy differs between systems, on each system: nothing that epkit says there may name a
command or a file of another one. The same for what runs the process: a pod, docker, a job of Slurm, nothing. Prints what
does; fails if there is any.
"""
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

sys.dont_write_bytecode = not sys.pycache_prefix  # nothing beside the sources

import machines  # noqa: E402
import nodes  # noqa: E402

DEBIAN, RHEL = r"apt-get|dpkg|update-initramfs|update-grub", r"\bdnf\b|grubby"
# What a system does not have, or forgets at its next start.
SYSTEMS = {
    "debian": ('ID=ubuntu\nID_LIKE=debian\n', f"{RHEL}|dracut|zypper|rpm-ostree|cos-extensions"),
    "rhel": (nodes.ROCKY, f"{DEBIAN}|/etc/default/grub|linux-modules-extra|zypper|rpm-ostree|cos-extensions"),
    "suse": ('ID="sles"\nID_LIKE="suse"\n', f"{DEBIAN}|{RHEL}|linux-modules-extra|rpm-ostree|cos-extensions"),
    "rhcos": (nodes.RHCOS, f"{DEBIAN}|{RHEL}|dracut|/etc/default/grub|linux-modules-extra|cos-extensions|"
                           "modprobe nvidia|/etc/modprobe.d/"),
    "cos": ('ID=cos\n', f"{DEBIAN}|{RHEL}|dracut|/etc/default/grub|linux-modules-extra|rpm-ostree|modprobe nvidia|"
                        r"tee /etc|limits\.d|modules-load|(?<!bin/)nvidia-smi -|(?<!bin/)nvidia-modprobe"),
}
FAULTS = ["h100/peermem", "a4/driver-option", "a4/driver-option-overruled", "h100/driver-absent", "h100/nouveau",
          "gb200/iommu-gb200", "h100/iommu", "a4/gpu-errors-ecc", "h100/device-files", "h100/mlx5-ib",
          "a4/provider-missing", "a4/nic-handler-fallback", "a4/home", "a4/build-files", "a4/build-files-cccl",
          "a4/memlock", "dgx-b200/nofile", "gcp-a4-mig-off/mig", "a4/closed-driver", "sles-hpc/fabric-manager-old"]
# Who runs the process, by its variables, and words of others.
POD, DOCKER, SLURM, HOST = r"Kubernetes|kubelet|\bpod\b|securityContext|emptyDir|nvidia\.com/", \
    r"docker|--ulimit|--shm-size|--gpus all|--pids-limit|--cpus,", "[Ss]lurm|srun|--gres", r"limits\.d|new login"
PLACES = {
    "pod": ({"KUBERNETES_SERVICE_HOST": "192.0.2.1"}, f"{DOCKER}|{SLURM}|{HOST}"),
    "docker": ({"container": "docker"}, f"{POD}|{SLURM}|{HOST}"),
    "slurm": ({"SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "8"}, f"{POD}|{DOCKER}|{HOST}"),
    "host": ({}, f"{POD}|{DOCKER}|{SLURM}"),
}
PLACED = ["a4/memlock", "a4/memlock-hard", "dgx-b200/nofile", "a4/shm", "docker-host-network/lost-gpus", "docker-two-gpus/pids-podman",
          "docker-host-network/quota"]
# Where the file is another one's: what a user wrote into it is quoted.
QUOTED = {"a4/driver-option-overruled": "/etc/modprobe.d/zz-power.conf"}


def sayings(epkit, release, folder):
    """What it says to do about the machine in `folder` with that os-release: (check, text)."""
    if release:
        with open(f"{folder}/machine/etc/os-release", "w", encoding="utf-8") as file:
            file.write(release)
    run = subprocess.run([epkit, "doctor", "--json", "--from", "machine"], cwd=folder, stdout=subprocess.PIPE,
                         check=False, timeout=120)
    for check in json.loads(run.stdout)["checks"]:
        if check["outcome"] == "found":
            yield check["id"], "\n".join((check.get("fix") or "", check.get("advice") or ""))


def main(arguments):
    if len(arguments) != 1:
        sys.exit(__doc__)
    epkit = os.path.abspath(arguments[0])
    folder = tempfile.mkdtemp(prefix="epkit-systems-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    n = n_wrong = 0
    try:
        for name in PLACED:
            for place, (variables, foreign) in PLACES.items():
                tree = machines.build(name)
                for variable in [one for other, _ in PLACES.values() for one in other]:
                    tree.environment.pop(variable, None)
                tree.environment.update(variables)
                for mark in ("/.dockerenv", "/run/.containerenv"):
                    tree.entries.pop(mark, None)
                tree.put("/proc/self/mounts", "".join(
                    line if " / " not in line else "/dev/sda1 / ext4 rw 0 0\n"
                    for line in tree.text("/proc/self/mounts").splitlines(keepends=True)))
                tree.write(f"{folder}/machine")
                for check, text in sayings(epkit, None, folder):
                    n += 1
                    found = re.search(foreign, text)
                    if found:
                        n_wrong += 1
                        print(f"{name} in {place}: {check} says '{found.group()}': {text}", flush=True)
                shutil.rmtree(f"{folder}/machine")
        for name in FAULTS:
            machines.build(name).write(f"{folder}/machine")
            for system, (release, foreign) in SYSTEMS.items():
                for check, text in sayings(epkit, release, folder):
                    n += 1
                    found = re.search(foreign, text.replace(QUOTED.get(name, "\0"), ""))
                    if found:
                        n_wrong += 1
                        print(f"{name} on {system}: {check} says '{found.group()}': {text}", flush=True)
            shutil.rmtree(f"{folder}/machine")
    finally:
        shutil.rmtree(folder)
    print(f"{n} remedies, {n_wrong} of another system")
    return 1 if n_wrong or n < (len(FAULTS) + len(PLACED)) * 4 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
