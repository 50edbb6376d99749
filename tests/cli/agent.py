#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""agent.py EPKIT behind|cut - asks the agent of 'epkit launch' for the end, as a launcher does.

A process of the job takes no SIGTERM, and may have ten minutes for it. The launcher asks again, in the same write
(behind) or in two halves (cut): the process has to be killed at once.
"""
import json
import os
import subprocess
import sys
import time

LIMIT_S = 120
PROGRAM = """import signal, time
signal.signal(signal.SIGTERM, lambda *_: print('term', flush=True))
print('ready', flush=True)
while True:
    time.sleep(1)
"""


def main(epkit, how):
    mark = f"{time.monotonic_ns():017x}"
    job = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True,
                           env={**os.environ, "EPKIT_LAUNCH": mark})
    agent = subprocess.Popen([epkit, "__node"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        assert job.stdout.readline() == "ready\n"
        end = json.dumps({"do": "end", "launch": mark, "grace_s": 600}, separators=(",", ":")).encode() + b"\n"
        os.write(agent.stdin.fileno(), end * (2 if how == "behind" else 1))
        if how == "cut":
            assert job.stdout.readline() == "term\n"
            half = end.index(b'nd"')
            os.write(agent.stdin.fileno(), end[:half])
            time.sleep(1)  # so that it is read by itself
            os.write(agent.stdin.fileno(), end[half:])
        assert job.wait(LIMIT_S) == -9, job.returncode
        assert agent.wait(LIMIT_S) == 0, agent.returncode
    finally:
        for process in (job, agent):
            process.kill()
            process.wait()


main(*sys.argv[1:])
