#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""storm_command.py - end the command by signals at random instants, and check for leftovers.

usage: storm_command.py EPKIT [--seed N] [--storm K] [--faults N] [--jobs N] [--verbose]

Every run would last for minutes, so only the signal ends it. Then no process of it may be left, its exit code is that
of the signal, and each output is complete or absent. 40 signals; 400 with EPKIT_TEST_LONG.
"""
import argparse
import ctypes
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback

FAULTS, LONG_FAULTS = 40, 400
LIMIT_S = 60  # far above the time to end on a loaded machine: detects hangs
OUTPUT_S = 1.5  # to wait for a first output, which some runs never write
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
TERMINATING = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT]
SIGNALS = [*TERMINATING, *TERMINATING, signal.SIGKILL, signal.SIGKILL, signal.SIGPIPE]

SSH = """#!/bin/bash
while [[ "$1" == -* ]]; do shift 2; done
case "$1" in
hanging*) exec sleep 600 ;;
refused*) echo "ssh: connect to host refused port 22: Connection refused" >&2; exit 255 ;;
*) exec "$EPKIT" doctor --json ;;
esac
"""


class Scenario:
    """A run of the command that does not end by itself."""

    def __init__(self, name, arguments, json_output=False, files=(), folder=None):
        self.name, self.arguments, self.json_output = name, arguments, json_output
        self.files, self.folder = files, folder

    def prepare(self):
        if "--hosts" in self.arguments:
            with open("hosts", "w", encoding="utf-8") as file:
                file.write("good1\nhanging1\nrefused1\nhanging2\n")
            with open("ssh", "w", encoding="utf-8") as file:
                file.write(SSH)
            os.chmod("ssh", 0o755)
        if self.folder == "old":
            os.mkdir("old")
            for name in ("report.json", "report.html"):
                with open(f"old/{name}", "w", encoding="utf-8") as file:
                    file.write("precious")


MATRIX = ["--ranks", "3", "--tokens", "256", "--hidden", "2048", "--repeat", "1000", "--timeout", "60"]
BENCH = ["bench", "--ranks", "2", "--tokens", "64", "--hidden", "1024", "--iters", "100000"]
HOSTS = ["doctor", "--hosts", "hosts", "--ssh", "./ssh", "--timeout", "600"]
SCENARIOS = [
    Scenario("test", ["test", "intranode", *MATRIX]),
    Scenario("test, threads", ["test", "intranode", *MATRIX, "--boot", "threads"]),
    Scenario("test, two nodes", ["test", "internode", *MATRIX[2:], "--ranks", "4", "--nodes", "2"]),
    Scenario("test, JSON", ["test", "lowlatency", *MATRIX, "--json"], json_output=True),
    Scenario("bench", BENCH),
    Scenario("bench, JSON", [*BENCH, "--json"], json_output=True),
    Scenario("run", ["run", "--output", "fresh"], folder="fresh"),
    Scenario("run over a report", ["run", "--output", "old"], folder="old"),
    Scenario("doctor --hosts", HOSTS),
    Scenario("doctor --hosts, JSON", [*HOSTS, "--json"], json_output=True),
    Scenario("nics -- CMD", ["nics", "--devices", "lo", "--", "sleep", "600"]),
    Scenario("nics --json --output FILE -- CMD",
             ["nics", "--devices", "lo", "--json", "--output", "nics.json", "--", "sleep", "600"], files=["nics.json"]),
]


class Wrong(Exception):
    pass


def children_left():
    """Whether anything that the storm started still lives: orphans are children of this process, a subreaper."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True


def describe_children():
    text = []
    for entry in os.listdir("/proc"):
        try:
            with open(f"/proc/{entry}/stat", encoding="utf-8") as file:
                if int(file.read().rsplit(")", 1)[1].split()[1]) != os.getpid():
                    continue
            with open(f"/proc/{entry}/cmdline", encoding="utf-8") as file:
                text.append(f"{entry} ({file.read().replace(chr(0), ' ').strip()})")
            os.kill(int(entry), signal.SIGKILL)
        except (OSError, ValueError, IndexError):
            continue
    return ", ".join(text)


def die_with_parent():
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def begin():
    """In the child, before exec. The parent of the tests may ignore signals, as nohup and shells do."""
    die_with_parent()
    for number in SIGNALS:
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)


def wait_until(condition, limit_s=LIMIT_S):
    """Counts polls instead of time, so that a machine that is suspended is no hang."""
    polls = 0
    while not condition():
        polls += 1
        if polls > limit_s * 100:
            return False
        time.sleep(0.01)
    return True


def right_code(code, number):
    return code in (-number, 128 + number)


def check_json(path, what):
    with open(path, encoding="utf-8") as file:
        text = file.read()
    if not text.strip():
        return
    try:
        json.loads(text)
    except ValueError as error:
        raise Wrong(f"half-written {what}: {error}: {text[-60:]!r}") from error


def check_folder(folder, number):
    if folder == "old":
        for name in sorted(os.listdir("old")):
            if name in ("report.json", "report.html"):
                with open(f"old/{name}", encoding="utf-8") as file:
                    if file.read() != "precious":
                        raise Wrong(f"the old {name} is changed")
            elif number != signal.SIGKILL:
                raise Wrong(f"{name} is left in the folder of the report")
    elif os.path.exists(folder):
        names = sorted(os.listdir(folder))
        if number != signal.SIGKILL:
            raise Wrong(f"the folder of the report is left, with {names}")
        if "report.json" in names:
            check_json(f"{folder}/report.json", "report.json")


def instant(random_source, process):
    """Waits for a random instant of the run: early ones more often, some after its first output."""
    kind = random_source.random()
    if kind < 0.25:
        time.sleep(random_source.random() * 0.01)
    elif kind < 0.7:
        time.sleep(random_source.random() ** 2 * 0.6)
    else:
        wait_until(lambda: os.path.getsize("out") or os.path.getsize("err") or process.poll() is not None,
                   OUTPUT_S)
        time.sleep(random_source.random() * 0.3)


def to_whom(random_source, process, number):
    """The command alone, or all of its group as from a terminal."""
    if random_source.random() < 0.3:
        os.killpg(process.pid, number)
        return "all of them"
    os.kill(process.pid, number)
    return "the command"


def inject(storm, epkit):
    random_source = random.Random(storm["seed"] * 1000003 + storm["number"])
    scenario = random_source.choice(SCENARIOS)
    number = random_source.choice(SIGNALS)
    storm["what"] = f"{scenario.name}, {signal.Signals(number).name}"
    scenario.prepare()
    with open("out", "wb") as out, open("err", "wb") as err:
        process = subprocess.Popen([epkit, *scenario.arguments], stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                                   start_new_session=True, preexec_fn=begin,
                                   env={**os.environ, "EPKIT": epkit})
    instant(random_source, process)
    if process.poll() is not None:
        raise Wrong(f"it ended with {process.returncode} before the injection")
    whom = to_whom(random_source, process, number)
    storm["what"] += f" to {whom}"
    # Another member of the signalled group may have ended first, and the command reports that.
    others_may_end = whom == "all of them" and number in (signal.SIGPIPE, signal.SIGKILL)
    if number == signal.SIGPIPE:
        # A process that ignores it continues.
        time.sleep(0.5)
        if process.poll() is None:
            number = signal.SIGTERM
            os.kill(process.pid, number)
    if not wait_until(lambda: process.poll() is not None):
        process.kill()
        raise Wrong("it does not end")
    if not right_code(process.returncode, number) and not others_may_end:
        raise Wrong(f"exit code {process.returncode}")
    if not wait_until(lambda: not children_left()):
        raise Wrong(f"left: {describe_children()}")
    if scenario.json_output and number != signal.SIGKILL and os.path.getsize("out"):
        check_json("out", "standard output")
    for path in scenario.files:
        if os.path.exists(path):
            check_json(path, path)
    if scenario.folder:
        check_folder(scenario.folder, number)


def run_storm(seed, number, epkit, result):
    """In a process of its own, which has no other children."""
    storm = {"seed": seed, "number": number, "what": "", "wrong": ""}
    folder = tempfile.mkdtemp(prefix="storm_command.")
    die_with_parent()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.chdir(folder)
    os.environ["TMPDIR"] = folder
    try:
        inject(storm, epkit)
    except Wrong as wrong:
        with open("err", encoding="utf-8", errors="replace") as file:
            storm["wrong"] = f"{wrong}\n     standard error: {file.read()[-300:].strip()!r}"
    except Exception:  # pylint: disable=broad-except
        storm["wrong"] = traceback.format_exc()
    describe_children()
    os.chdir("/")
    shutil.rmtree(folder, ignore_errors=True)
    os.write(result, json.dumps(storm).encode())
    os._exit(0)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("epkit")
    parser.add_argument("--seed", type=int, default=int(time.time()) if "EPKIT_TEST_LONG" in os.environ else 7001)
    parser.add_argument("--storm", type=int)
    parser.add_argument("--faults", type=int, default=LONG_FAULTS if os.environ.get("EPKIT_TEST_LONG") else FAULTS)
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    numbers = [options.storm] if options.storm is not None else list(range(options.faults))
    running, failed, passed = {}, 0, 0
    print(f"storms of the command, --seed {options.seed}", flush=True)
    while numbers or running:
        while numbers and len(running) < options.jobs:
            number = numbers.pop(0)
            here, there = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(here)
                run_storm(options.seed, number, os.path.realpath(options.epkit), there)
            os.close(there)
            running[pid] = (number, here)
        pid, _ = os.wait()
        number, here = running.pop(pid)
        with os.fdopen(here, "rb") as pipe:
            text = pipe.read()
        storm = json.loads(text) if text else {"what": "?", "wrong": "the controller did not finish"}
        failed += bool(storm["wrong"])
        passed += not storm["wrong"]
        if storm["wrong"] or options.verbose:
            print(f"{'FAIL' if storm['wrong'] else 'ok  '} storm {number}: {storm['what']}")
        if storm["wrong"]:
            print(f"     {storm['wrong']}\n     again: --seed {options.seed} --storm {number}", flush=True)
    print(f"{passed} passed, {failed} failed")
    sys.exit(1 if failed or not passed else 0)


if __name__ == "__main__":
    main()
