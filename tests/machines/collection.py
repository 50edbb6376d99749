#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Holds epkit doctor to what it has to say about every machine of the collection, live and from its snapshot.

usage: collection.py EPKIT field|rules|sites|nodes|details|platforms|reports|public|trials|stacks|variants|all [--live] [--every N] [--saved N] [--only TEXT]

For each machine: the findings are those expected, and on a healthy one no check could not tell; commands of findings
may be pasted and are classified; a snapshot says the very same (of variants all that is printed, in the long tier of
the other commands too); the NICs of each GPU are those that were written down; and (with "field" and "all" alone, as most
machines of the others are variants) after identifiers of every kind were planted into each file that was read, the
snapshot holds none of them and still says what the machine says. With --live no snapshots: the findings alone, which is
what an epkit with sanitizers is to be taken through. --every N takes each Nth machine, --saved N the snapshots of each
Nth. Prints a line for each machine that is not as it should be; fails if there is any.
"""
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile

sys.dont_write_bytecode = not sys.pycache_prefix  # nothing beside the sources

import details  # noqa: E402
import field  # noqa: E402
import golden  # noqa: E402
import identifiers  # noqa: E402
import machines  # noqa: E402
import nodes  # noqa: E402
import planted  # noqa: E402
import platforms  # noqa: E402
import public  # noqa: E402
import reports  # noqa: E402
import rules  # noqa: E402
import sites  # noqa: E402
import stacks  # noqa: E402
import trials  # noqa: E402
import tree as trees  # noqa: E402
import variants  # noqa: E402

COLLECTIONS = {"field": field, "rules": rules, "sites": sites, "nodes": nodes, "details": details,
               "platforms": platforms, "reports": reports, "public": public, "trials": trials, "stacks": stacks,
               "variants": variants}
GOLDEN_VARIANTS = {variant.name for variant in variants.faults}
MAPS = {**nodes.maps, **platforms.maps}


def expectations(which):
    """Name -> ids that must be found; with '?' in front, those that must leave open whether the machine is healthy."""
    expected = {}
    for name, module in COLLECTIONS.items():
        if which in (name, "all"):
            expected.update({machine: () for machine in getattr(module, "machines", ())})
            expected.update({variant.name: variant.findings for variant in getattr(module, "changes", getattr(module, "faults", ()))})
    if which == "all":
        expected.update({name: () for name in golden.MACHINES if name != "empty"})
    return expected


def epkit_json(epkit, machine, folder, *command):
    """What a command prints about `machine`, a name in `folder`, what it says besides, and the exit code."""
    run = subprocess.run([epkit, *command, "--json", "--from", machine], cwd=folder, stdout=subprocess.PIPE,
                         stderr=subprocess.PIPE, timeout=120, check=False)
    return run.stdout.decode(), run.stderr.decode(errors="replace").strip(), run.returncode


def doctor(epkit, machine, folder):
    """What it says about `machine`: the document, as it is printed, and the exit code."""
    text, complaint, code = epkit_json(epkit, machine, folder, "doctor")
    if code not in (0, 3, 5) or complaint:
        raise ValueError(f"ends with {code}: {complaint}")
    return json.loads(text), text, code


def save(epkit, machine, folder):
    """A snapshot, which has the name of the machine in a folder of its own, and what is printed beside it."""
    os.makedirs(f"{folder}/saved", exist_ok=True)
    text, complaint, code = epkit_json(epkit, machine, folder, "topo", "--save", f"saved/{machine}")
    if code not in (0, 4):
        raise ValueError(f"topo --save ends with {code}: {complaint}")
    return f"{folder}/saved", text


def without_names(check):
    """Evidence quotes names and lines of the machine, of which a snapshot has pseudonyms, or the part that is known."""
    return {**check, "evidence": len(check.get("evidence", []))}


def differences(live, saved):
    for one, other in zip(live["checks"], saved["checks"]):
        if without_names(one) != without_names(other):
            yield f"{one['id']}: {one['outcome']} ({one['text']}), and {other['outcome']} ({other['text']}) when saved"
    states, saved_states = ([f"{row['name']} {row['state']}" for row in document["stacks"]] for document in (live, saved))
    if states != saved_states:
        yield f"stacks: {states}, and {saved_states} when saved"
    if live["verdict"] != saved["verdict"]:
        yield f"verdict: '{live['verdict']}' and '{saved['verdict']}'"


# Words that a shell takes as they are, text in single quotes, and the few expansions that epkit writes itself.
WORD = r"(?:[A-Za-z0-9_./+,:=@%*-]|'[^'\n]*'|\\')+"
OWN = r'(?:"\$\(epkit env\)"|linux-headers-\$\(uname -r\)|\||[A-Z_]+=' + WORD + r"\$\{([A-Z_]+):\+:\$\1\})"
# Groups inside a repetition would be counted: one pattern for each word instead.
TOKEN = re.compile(f"(?:{OWN}|{WORD})(?: |$)")
COMMANDS = {"pip", "unset", "export", "eval", "sudo", "sudoedit", "ldd", "echo", "epkit", "taskset", "ulimit", "nvidia-smi",
            "scontrol", "NVSHMEM_USE_GDRCOPY=0"}
STOPS = re.compile("reboot|gpu-reset|systemctl restart|mlxconfig|cos-extensions install")


def judge_command(line):
    at = 0
    while at < len(line):
        token = TOKEN.match(line, at)
        if not token:
            yield f"not a command that may be pasted: {line!r}, from {line[at:]!r}"
            return
        at = token.end()
    if line.split(" ")[0] not in COMMANDS and not re.match(r"[A-Z_]+=", line):
        yield f"not one of the commands that epkit writes: {line!r}"
    if line.startswith("unset ") and not re.fullmatch(r"unset(?: [A-Za-z_][A-Za-z0-9_]*)+", line):
        yield f"not names of variables: {line!r}"


def judge_commands(document):
    for check in document["checks"]:
        for line in (check["fix"] or "").splitlines() if check["outcome"] == "found" else ():
            yield from judge_command(line)


def judge_fixes(document):
    """
    A command that stops something is of a class that says so, tells its cost, and names its device by the PCI address;
    what is unknown says what would tell.
    """
    for check in document["checks"]:
        if check["outcome"] == "unknown" and not check["would_tell"]:
            yield f"{check['id']}: unknown, and nothing would tell"
        if check["outcome"] != "found":
            continue
        fix = check["fix"] or ""
        stops = bool(STOPS.search(fix))
        if (check["fix"] is None) != (check["fix_class"] is None) or (check["fix_class"] in ("restart", "cuts-off")) != stops:
            yield f"{check['id']}: class {check['fix_class']} of {fix!r}"
        if stops and (check["fix_cost"] is None or check["fix_is_safe"]):
            yield f"{check['id']}: cost {check['fix_cost']} of {fix!r}"
        if re.search("gpu-reset|mlxconfig", fix) and not re.search(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}[.][0-7]", fix):
            yield f"{check['id']}: no PCI address in {fix!r}"


def without_log_text(text):
    """Of an error in the kernel log a snapshot has number, device and time, and not what the driver says besides."""
    return re.sub(r'(NVRM: Xid \(PCI:[^)]*\): [0-9]+|SXid \(PCI:[^)]*\): [0-9]+)[^"]*', r"\1", text)


def judge_printed(epkit, machine, folder, live, beside_save):
    """All that is printed of a machine and of its snapshot, and of one that is saved by the same command."""
    _, text, code = doctor(epkit, machine, f"{folder}/saved")
    if (without_log_text(text), code) != (without_log_text(live[1]), live[2]):
        yield "doctor prints another text when saved"
    for command in ("topo", "env") if os.environ.get("EPKIT_TEST_LONG") else ():
        if epkit_json(epkit, machine, folder, command) != epkit_json(epkit, machine, f"{folder}/saved", command):
            yield f"{command} prints another text when saved"
    if epkit_json(epkit, machine, folder, "topo")[0] != beside_save:
        yield "topo --save prints another text"


def judge(epkit, name, expected, disk, plants, live_only):
    folder, machine = os.path.split(disk.folder)
    tree = machines.build(name)
    disk.hold(tree)
    live, text, code = doctor(epkit, machine, folder)
    left_open = {name[1:] for name in expected if name.startswith("?")}
    expected = [name for name in expected if not name.startswith("?")]
    found = {check["id"]: check["text"] for check in live["checks"] if check["outcome"] == "found"}
    for check in live["checks"]:
        # A container does not see the kernel's log.
        has_log = tree.has("/dev/kmsg") or tree.has("/var/log/kern.log")
        if check["outcome"] == "unknown" and not expected and not left_open and (has_log or check["id"] not in ("gpu-errors", "sxid")):
            yield f"{check['id']} could not tell: {check['text']}"
    for missing in sorted(set(expected) - set(found)):
        yield f"{missing} is not found"
    for more in sorted(set(found) - set(expected)):
        yield f"{more} is found: {found[more]}"
    unknown = {check["id"] for check in live["checks"] if check["outcome"] == "unknown" and check.get("open")}
    if left_open and unknown != left_open:
        yield f"left open by {sorted(unknown)}, not by {sorted(left_open)}"
    if code != (3 if found else 5 if left_open else 0):
        yield f"exit code {code}"
    if live["counts"]["serious"]:
        for row in live["stacks"]:
            if row["state"] == "runs":
                yield f"{row['name']} runs here, where a finding is serious"
    yield from judge_commands(live)
    yield from judge_fixes(live)
    if name in MAPS:
        yield from judge_map(epkit, machine, folder, MAPS[name])
    if live_only:
        return
    where, beside_save = save(epkit, machine, folder)
    if name in GOLDEN_VARIANTS:
        yield from judge_printed(epkit, machine, folder, (live, text, code), beside_save)
    else:
        yield from differences(live, doctor(epkit, machine, where)[0])
    if name in MAPS:
        yield from judge_map(epkit, machine, where, MAPS[name])
    if plants:
        yield from judge_planted(epkit, machine, folder, where)


def judge_map(epkit, machine, folder, nics):
    """The NICs of each GPU, the first of which is the one for whoever takes one alone."""
    run = subprocess.run([epkit, "topo", "--json", "--from", machine], cwd=folder, stdout=subprocess.PIPE, check=True,
                         timeout=120)
    found = [[device.split(":")[0] for device in choice["devices"]] for choice in json.loads(run.stdout)["map"]]
    if found != nics:
        yield f"the map is {found}, not {nics}"


def judge_planted(epkit, machine, folder, where):
    marks = io.StringIO()
    # A process knows the names of its host and of its user, which look like any other words.
    with open(f"{folder}/{machine}/proc/self/environ", "ab") as environ:
        for variable, kind in (("HOSTNAME", "host name"), ("USER", "user name"), ("SUDO_USER", "second user")):
            environ.write(f"{variable}={identifiers.MARKS[kind]}\0".encode())
    with open(f"{where}/{machine}", encoding="utf-8") as snapshot, contextlib.redirect_stdout(marks):
        planted.plant(f"{folder}/{machine}", snapshot)
    live = doctor(epkit, machine, folder)[0]
    where, _ = save(epkit, machine, folder)
    with open(f"{where}/{machine}", encoding="utf-8") as snapshot:
        text = snapshot.read().lower()
    for mark in marks.getvalue().splitlines():
        if mark.lower() in text:
            yield f"the snapshot holds what was planted: {mark}"
    for difference in differences(live, doctor(epkit, machine, where)[0]):
        yield f"with planted identifiers: {difference}"


def new_disk(shared):
    # Trees are thousands of small files: in memory, where there is room.
    folder = tempfile.mkdtemp(prefix="epkit-collection-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    os.mkdir(f"{folder}/machine")
    return trees.Disk(f"{folder}/machine", shared)


def remove(disk):
    subprocess.run(["rm", "-rf", os.path.dirname(disk.folder)], check=True)  # shutil takes half as long again


def chosen(which, only, each, live_only):
    """(name, expectations, whether live only, whether to plant), variants of a machine one after another."""
    chosen_ones = [(name, expected, live_only or number % each["--saved"] > 0)
                   for number, (name, expected) in enumerate(expectations(which).items())
                   if only in name and number % each["--every"] == 0]
    for name, expected, live in sorted(chosen_ones, key=lambda one: one[0].split("/")[0]):
        yield name, expected, live, not live and which in ("field", "all")


def main(arguments):
    live_only = "--live" in arguments
    arguments = [argument for argument in arguments if argument != "--live"]
    each = {"--every": 1, "--saved": 1}
    while arguments[2:3] and arguments[2] in each and arguments[3:4]:
        each[arguments[2]] = int(arguments[3])
        del arguments[2:4]
    only = arguments[3] if arguments[2:3] == ["--only"] else ""
    if len(arguments) not in (2, 4) or arguments[1] not in (*COLLECTIONS, "all") or min(each.values()) < 1:
        sys.exit(__doc__)
    epkit = os.path.abspath(arguments[0])
    n = n_wrong = 0
    disk = new_disk({})
    for name, expected, live, plants in chosen(arguments[1], only, each, live_only):
        # What is planted stays, in files of their own.
        place = new_disk(None) if plants else disk
        try:
            wrong = list(judge(epkit, name, expected, place, plants, live))
        except (ValueError, subprocess.SubprocessError) as error:
            wrong = [str(error)]
        if plants:
            remove(place)
        n += 1
        if wrong:
            n_wrong += 1
            print("\n".join(f"{name}: {line}" for line in wrong), flush=True)
    remove(disk)
    print(f"{n} machines, {n_wrong} not as they should be")
    return 1 if n_wrong or n == 0 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
