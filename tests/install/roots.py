#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write the disk of a machine in a given state.

usage: roots.py PLAN KIND FOLDER

PLAN is the output of `epkit install plan RECIPE --json` for any machine. KIND:
  bare    no step is done
  done    all steps are done
  half    the first half of the steps is done; the next one is partly done, as after an interrupted run
  wrong   all steps are done, in other versions or with other content
"""
import json
import os
import sys
from pathlib import Path

KERNEL = ""  # of the plan


class Disk:
    def __init__(self, folder, recipe):
        self.folder, self.state = Path(folder), f"/var/lib/epkit/install/{recipe}"
        self.packages, self.modules = [], []

    def write(self, path, text, mode=0o644):
        place = self.folder / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
        place.chmod(mode)

    def package(self, name, version, status="install ok installed"):
        self.packages.append(f"Package: {name}\nStatus: {status}\nArchitecture: amd64\nVersion: {version}\n")

    def stamp(self, step, digest=None):
        self.write(f"{self.state}/stamp/{step['id']}", (digest or step["digest"]) + f"\n{KERNEL}\n")

    def close(self):
        self.write("/var/lib/dpkg/status", "\n".join(self.packages) + "\n")
        self.write("/proc/modules", "".join(f"{name} 16384 0 - Live 0x0\n" for name in self.modules))


def packages_of(step):
    if step["type"] == "deb":
        return {step["args"]["package"]: step["args"]["version"]}
    return step["args"]["packages"]


def concrete(pin):
    """A version that matches a pin."""
    return "1.2" if pin == "*" else pin.replace("*", "1")


def apt(disk, step, kind):
    for i, (name, pin) in enumerate(packages_of(step).items()):
        if kind == "wrong":
            disk.package(name, concrete(pin) if pin == "*" else "0.0.1")
        elif kind == "partial":
            disk.package(name, concrete(pin), "install ok half-configured" if i == 0 else "install ok unpacked")
        else:
            disk.package(name, concrete(pin))


def file(disk, step, kind):
    content = step["args"]["content"]
    content += "" if content.endswith("\n") else "\n"
    mode = int(step["args"].get("mode", "0644"), 8)
    disk.write(step["args"]["path"], content if kind == "done" else content[: len(content) // 2], mode)


def modprobe(disk, step, kind):
    args = step["args"]
    options = "".join(f'options {args["module"]} {key}="{value}"\n' for key, value in args["options"].items())
    if kind in ("wrong", "partial"):
        options = f"options {args['module']} other=1\n"
    disk.write(f"/etc/modprobe.d/zz-epkit-{args['module']}.conf", "# Written by epkit install.\n" + options)
    if "effect_file" in args and kind == "done":
        disk.write(args["effect_file"], f'RegistryDwords: "{args["effect_any"][-1]}"\n')


def module(disk, step, kind):
    name = step["args"]["module"]
    if kind == "partial":  # the trap: another module whose name begins with it
        disk.modules.append(name + "_drm")
        return
    disk.modules.append(name)
    disk.write(f"/sys/module/{name}/version", ("0.1" if kind == "wrong" else step["args"].get("version", "1")) + "\n")
    disk.write(f"/etc/modules-load.d/epkit-{name}.conf", name + "\n")
    if step["args"].get("dkms") == "true":
        disk.write(f"/lib/modules/{KERNEL}/updates/dkms/{name}.ko.zst", "")


def build(disk, step, kind):
    provides = step["args"]["provides"]
    for path in provides[: 1 if kind == "partial" else None]:
        disk.write(path, "", 0o755)
    if kind != "partial":
        disk.stamp(step, "0" * 16 if kind == "wrong" else None)


def pip(disk, step, kind):
    for i, (name, pin) in enumerate(step["args"]["packages"].items()):
        version = "0.0.1" if kind == "wrong" else concrete(pin)
        if kind != "partial" or i == 0:
            disk.write(f"{step['args']['target']}/{name}-{version}.dist-info/METADATA", "")
    if kind == "done":
        disk.stamp(step)


def copyset(disk, step, kind):
    for i, pattern in enumerate(step["args"]["files"]):
        source = pattern.replace("*", ".1")
        disk.write(source, f"file {i}\n")
        if kind != "partial" or i == 0:
            copy = f"{step['args']['to']}/{os.path.basename(source)}"
            disk.write(copy, "another one\n" if kind == "wrong" else f"file {i}\n")
    if kind == "done":
        disk.stamp(step)


def command(disk, step, kind):
    if kind == "done":
        for path in step["args"].get("creates", []):
            disk.write(path, "")


WRITERS = {"apt": apt, "deb": apt, "file": file, "modprobe": modprobe, "module": module, "build": build, "pip": pip,
           "copyset": copyset, "command": command}


def main():
    global KERNEL
    plan, kind, folder = json.loads(Path(sys.argv[1]).read_text()), sys.argv[2], sys.argv[3]
    KERNEL = plan["kernel"]
    disk = Disk(folder, plan["recipe"])
    system = "debian" if plan["recipe"] == "debian-tools" else "ubuntu"
    release = "12" if system == "debian" else "24.04"
    disk.write("/etc/os-release", f'ID={system}\nVERSION_ID="{release}"\n')
    disk.write("/proc/sys/kernel/osrelease", KERNEL + "\n")
    steps = [step for step in plan["steps"] if step["state"] != "skipped"]
    for i, step in enumerate(steps):
        if kind in ("done", "wrong"):
            WRITERS[step["type"]](disk, step, kind)
        elif kind == "half" and i <= len(steps) // 2:
            WRITERS[step["type"]](disk, step, "done" if i < len(steps) // 2 else "partial")
    disk.close()


if __name__ == "__main__":
    main()
