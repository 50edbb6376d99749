#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the commands that epkit doctor gives on the made-up machine that has the fault, and looks whether they help.

usage: fixes.py EPKIT [NAME/VARIANT ...]

What changes an environment (export, unset, eval "$(epkit env)") runs in a shell with the machine's environment. What
changes files (mkdir, ln, cp) runs below the machine's folder. setpci writes the machine's configuration space, modprobe
makes what the kernel shows of a loaded module. Then the doctor is asked again: the finding has to be gone, and no other
may have come. Commands of other kinds are not run. Without names: all variants with a finding. Prints what did not help.
"""
import glob
import json
import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile

sys.dont_write_bytecode = not sys.pycache_prefix  # nothing beside the sources

import machines  # noqa: E402
import software  # noqa: E402
import tree as trees  # noqa: E402
import variants  # noqa: E402

# The answer of a test-load stays as it was, whatever the environment is.
NOT_TRIED = ("a4/verbs-mixed-unloadable",)
# With the right NICs found the next fault shows.
UNCOVERS = {"a3u/no-env": "shared-nic"}
ENVIRONMENT = re.compile(r'export [A-Za-z_]\w*=|unset [A-Za-z_]\w*|eval "\$\(epkit env[a-z -]*\)"$')
FILES = re.compile(r"sudo (mkdir -p|ln -s|cp) ")
SETPCI = re.compile(r"sudo setpci -s (\S+) ECAP_ACS\+0x6\.w=([0-9a-f]{4})$")
MODPROBE = re.compile(r"sudo modprobe (nvidia-peermem|gdrdrv)$")


def found(epkit, machine, folder):
    run_ = subprocess.run([epkit, "doctor", "--json", "--from", machine], cwd=folder, stdout=subprocess.PIPE,
                          timeout=120, check=False)
    checks = json.loads(run_.stdout)["checks"]
    return {check["id"]: check for check in checks if check["outcome"] == "found"}


def can_run(fix):
    lines = (fix or "").splitlines()
    return bool(lines) and all(any(pattern.match(line) for pattern in (ENVIRONMENT, FILES, SETPCI, MODPROBE))
                               for line in lines)


def run_environment(epkit, lines, tree):
    """
    The machine's environment after `lines`, as the kernel shows one. The shell gets it by export, and starts nothing but
    epkit: LD_PRELOAD names libraries of the machine.
    """
    environ = f"{tree}/proc/self/environ"
    with open(environ, encoding="utf-8") as file:
        before = [item for item in file.read().split("\0") if re.match(r"[A-Za-z_]\w*=", item)]
    call = f'{shlex.quote(epkit)} "$@" --from {shlex.quote(tree)}'
    script = ["set -eu", f"epkit() {{ (unset LD_PRELOAD LD_LIBRARY_PATH; {call}); }}"]
    for item in before:
        name, value = item.split("=", 1)
        script.append(f"export {name}={shlex.quote(value)}")
    script += lines
    script.append("for name in $(compgen -e); do printf '%s=%s\\0' \"$name\" \"${!name}\"; done")
    shell = subprocess.run(["/bin/bash", "-c", "\n".join(script)], env={}, check=True, stdout=subprocess.PIPE,
                           stderr=subprocess.DEVNULL, timeout=60)
    own = {"_", "PWD", "SHLVL", "OLDPWD"} - {item.split("=", 1)[0] for item in before}
    items = [item for item in shell.stdout.decode().split("\0") if item and item.split("=", 1)[0] not in own]
    os.unlink(environ)
    with open(environ, "w", encoding="utf-8") as file:
        file.write("".join(item + "\0" for item in items))


def run_files(line, tree):
    words = shlex.split(line)[1:]
    if words[0] == "ln":
        os.symlink(words[2], tree + words[3])
    elif words[0] == "mkdir":
        os.makedirs(tree + words[2], exist_ok=True)
    else:
        for source in [path for word in words[1:-1] for path in glob.glob(tree + word)]:
            shutil.copy(source, tree + words[-1])


def run_setpci(address, value, tree):
    """Extended capabilities: PCI Express Base Specification, 7.6.3; ACS: 7.7.8."""
    with open(f"{tree}/sys/bus/pci/devices/{address}/config", "r+b") as file:
        config = file.read()
        at = 0x100
        while struct.unpack_from("<H", config, at)[0] != 0x000D:
            at = struct.unpack_from("<H", config, at + 2)[0] >> 4
        file.seek(at + 6)
        file.write(struct.pack("<H", int(value, 16)))


def run_modprobe(module, tree):
    made = trees.Tree()
    software.load_module(made, module.replace("-", "_"))
    made.put("/sys/kernel/mm/memory_peers/nv_mem/version", f"{software.DRIVER}\n")
    for path, content in made.entries.items():
        os.makedirs(os.path.dirname(tree + path), exist_ok=True)
        with open(tree + path, "ab") as file:
            file.write(content)


def run(epkit, fix, tree):
    lines = fix.splitlines()
    run_environment(epkit, [line for line in lines if ENVIRONMENT.match(line)], tree)
    for line in lines:
        if FILES.match(line):
            run_files(line, tree)
        elif SETPCI.match(line):
            run_setpci(*SETPCI.match(line).groups(), tree)
        elif MODPROBE.match(line):
            run_modprobe(MODPROBE.match(line).group(1), tree)


def judge(epkit, name, folder):
    """What did not help; the number of commands is the last thing that it yields."""
    machines.build(name).write(f"{folder}/before")
    before = found(epkit, "before", folder)
    n_run = 0
    for check in before.values():
        if not can_run(check.get("fix")):
            continue
        n_run += 1
        machines.build(name).write(f"{folder}/after")
        try:
            run(epkit, check["fix"], f"{folder}/after")
        except (OSError, subprocess.SubprocessError) as error:
            yield f"{check['id']}: {error}"
        after = found(epkit, "after", folder)
        # What was serious and is a warning now is what else there is to say of these NICs.
        left = after.get(check["id"])
        if left and (check["severity"], left["severity"]) != ("serious", "warning"):
            yield f"{check['id']} is still found after {check['fix']!r}: {after[check['id']]['text']}"
        for more in sorted(set(after) - set(before) - {UNCOVERS.get(name)}):
            yield f"{more} is found after {check['fix']!r}: {after[more]['text']}"
        shutil.rmtree(f"{folder}/after")
    yield n_run


def main(arguments):
    if not arguments or arguments[0].startswith("-"):
        sys.exit(__doc__)
    n_run = n_wrong = 0
    names = arguments[1:] or [name for name, variant in variants.by_name.items()
                              if variant.findings and name not in NOT_TRIED]
    for name in names:
        folder = tempfile.mkdtemp(prefix="epkit-fixes-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
        try:
            for said in judge(os.path.abspath(arguments[0]), name, folder):
                if isinstance(said, int):
                    n_run += said
                    if said or len(arguments) == 1:
                        continue
                    said = "has no command that can be run"
                n_wrong += 1
                print(f"{name}: {said}", flush=True)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            n_wrong += 1
            print(f"{name}: {error}", flush=True)
        finally:
            shutil.rmtree(folder)
    print(f"{n_run} commands run, {n_wrong} did not help")
    return 1 if n_wrong or n_run == 0 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
