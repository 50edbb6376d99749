#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""agent.py EPKIT behind|cut|memory - asks the agent of 'epkit launch' for the end, as a launcher does.

A process of the job takes no SIGTERM, and may have ten minutes for it. The launcher asks again, in the same write
(behind) or in two halves (cut): the process has to be killed at once. memory: it does not ask, but the agent has no
memory for the lines of its ranks.
"""
import json
import os
import resource
import subprocess
import sys
import time

LIMIT_S = 120
PROGRAM = """import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: open(sys.argv[1], 'w').write('term'))
print('ready', flush=True)
while True:
    time.sleep(1)
"""
RANKS = 40
LINE = "echo ready; read go <$1; printf %016000d 0; exec sleep 1000"


def lose_memory(agent, ask, await_output):
    """Each line without an end takes 36 kB: the agent says that there is no memory, and leaves none of its ranks."""
    read, go = os.pipe()
    ask(do="run", launch="memory", nodes=1, per_node=RANKS,
        argv=["sh", "-c", LINE, "sh", f"/proc/{os.getpid()}/fd/{read}"])
    await_output(b"ready", RANKS)
    with open(f"/proc/{agent.pid}/task/{agent.pid}/children", encoding="ascii") as children:
        ranks = children.read().split()
    assert len(ranks) == RANKS, ranks
    resource.prlimit(agent.pid, resource.RLIMIT_AS, (1, 1))
    os.write(go, b"\n" * RANKS)
    while os.read(agent.stdout.fileno(), 65536):
        pass
    assert b"no memory for the agent on this node" in agent.stderr.read()
    assert agent.wait(LIMIT_S) == 0, agent.returncode
    # Those that its own parent has not reaped yet are not left.
    left = subprocess.run(["ps", "-o", "stat=", *ranks], stdout=subprocess.PIPE).stdout.split()
    assert all(state.startswith(b"Z") for state in left), left


def main(epkit, how):
    mark = f"{time.monotonic_ns():017x}"
    term, write = os.pipe()
    path = f"/proc/{os.getpid()}/fd/{write}"
    agent = subprocess.Popen([epkit, "__node"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE if how == "memory" else None)

    def ask(**request):
        os.write(agent.stdin.fileno(), json.dumps(request, separators=(",", ":")).encode() + b"\n")

    said = b""

    def await_output(word, count=1):
        nonlocal said
        while said.count(word) < count:
            said += os.read(agent.stdout.fileno(), 65536) or sys.exit(f"no {word} in {said}")

    try:
        ask(do="hello", launch=mark)
        if how == "memory":
            lose_memory(agent, ask, await_output)
            return
        ask(do="run", launch=mark, nodes=1, per_node=1, argv=[sys.executable, "-c", PROGRAM, path])
        await_output(b"ready")
        end = json.dumps({"do": "end", "grace_s": 600}, separators=(",", ":")).encode() + b"\n"
        os.write(agent.stdin.fileno(), end * (2 if how == "behind" else 1))
        if how == "cut":
            assert os.read(term, 4) == b"term"
            half = end.index(b'nd"')
            os.write(agent.stdin.fileno(), end[:half])
            time.sleep(1)  # so that it is read by itself
            os.write(agent.stdin.fileno(), end[half:])
        await_output(b'"signal":9')
        await_output(b'"left":0')
        assert agent.wait(LIMIT_S) == 0, agent.returncode
    finally:
        agent.kill()
        agent.wait()


main(*sys.argv[1:])
