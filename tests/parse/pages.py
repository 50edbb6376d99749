#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs as folders, and the pages that epkit makes of them.

usage: pages.py EPKIT DIR     # DIR/NAME/report.html of: good, slow, failed, hung, nodes, after, compared, unknown, run

The logs come from the samples of the formats and the failures of forms_failures.py.
"""
import json
import random
import subprocess
import sys
from pathlib import Path

import forms_failures
import forms_programs
import samples


def write_run(folder, job, logs, code=0, **more):
    """A folder as epkit launch leaves it: logs of nodes, and run.json."""
    logs_dir = folder / "testbed-logs"
    logs_dir.mkdir(parents=True)
    names = [f"gpu-{i}" for i in range(len(logs))]
    for i, lines in enumerate(logs):
        name = "coordinator.log" if i == 0 else f"worker-{names[i]}.log"
        (logs_dir / name).write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    hosts = [{"name": name, "rank": i, "exit_code": code if i == len(logs) - 1 else 0, "gpu": "NVIDIA H200",
              "driver": "580.159.04", "kernel": "6.8.0-1021-gke", "epkit": "0.1.0", "location": None,
              "nics": [{"device": f"mlx5_{n}", "port": 1, "tx_bytes": 2e11 * (more.get("nic", 1) if (i, n) == (0, 5) else 1),
                        "rx_bytes": 2e11} for n in range(8)] if len(logs) > 1 else []}
             for i, name in enumerate(names)]
    run = {"schema_version": 1, "epkit": "0.1.0", "job": job, "command": f"epkit launch {job} --hosts gpu-[0-{len(logs) - 1}]",
           "began": "2026-11-28T10:00:00Z", "ended": "2026-11-28T10:03:24Z", "nodes": len(logs), "exit_code": code, "hosts": hosts,
           "environment": {"NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1,mlx5_2:1,mlx5_3:1,mlx5_4:1,mlx5_5:1,mlx5_6:1,mlx5_7:1"},
           "findings": [{"id": "memlock", "severity": "warning", "text": "the limit of locked memory is 64 KiB", "nodes": names}]}
    run.update({key: value for key, value in more.items() if key != "nic"})
    (logs_dir / "run.json").write_text(json.dumps(run), encoding="utf-8")


def failing(seed, n):
    """A run between nodes whose second node gave up; n: lines until then."""
    rng = random.Random(seed)
    lines, _ = samples.internode(rng, 3)
    row = next(row for row in forms_failures.FAILURES if "CPU recv timeout" in row.headline)
    return lines[:n], [forms_failures.fill(line, rng) for line in lines[:3] + row.lines]


def make(epkit, out):
    two = [samples.internode(random.Random(7), 3)[0] for _ in range(2)]
    write_run(out / "good", "nccl", [samples.nccl(random.Random(1), 0, 8, "NVIDIA H200", 478.0)[0]])
    write_run(out / "slow", "deepep-internode", [samples.internode(random.Random(7), 3, fault="one-nic")[0]], hardware="b200", nodes=2)
    write_run(out / "failed", "deepep-internode", failing(3, 20), 1, reason="host-failed", failed_host="gpu-1")
    (out / "failed/testbed-logs/run.json").write_text(
        (out / "failed/testbed-logs/run.json").read_text().replace('"rank": 1,', '"rank": 1, "why": "the program ended with 1",'))
    write_run(out / "hung", "deepep-v2", [samples.v2(random.Random(5), 1, 1, False)[0]], 1, reason="deadline")
    write_run(out / "nodes", "deepep-internode", two, nic=0.01, hardware="b200")
    write_run(out / "unknown", "workload", [forms_programs.UNKNOWN[0] * 3])
    slower = [samples.internode(random.Random(7), 3, fault="half")[0] for _ in range(2)]
    write_run(out / "after", "deepep-internode", slower, hardware="b200", began="2026-11-29T10:00:00Z", ended="2026-11-29T10:04:00Z")
    (out / "compared").mkdir()
    for command in ([["report", "--history", out / "history.jsonl", out / name] for name in ("good", "slow", "failed", "hung",
                                                                                             "nodes", "after", "unknown")] +
                    [["report", "--compare", out / "nodes", out / "after", "--output", out / "compared"],
                     ["run", "--quick", "--output", out / "run"]]):
        done = subprocess.run([epkit, *command], capture_output=True, text=True, timeout=300, check=False)
        if done.returncode not in (0, 1, 3, 4):
            sys.exit(f"{command}: {done.returncode}: {done.stderr}")


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))
