#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Excerpts of logs in the forms of public reports, and what 'epkit parse' has to say of each.

usage: excerpts.py EPKIT

Each was judged wrongly once; its source is where the form was seen. Names and figures are made up.
"""
import json
import subprocess
import sys
from dataclasses import dataclass, field

RATES = "{} GB/s (RDMA), {} GB/s (NVL)"
LOWLAT = "[rank {}] Dispatch + combine bandwidth: {} GB/s, avg_t={} us, min_t={} us, max_t={} us"
HYBRID = "[rank {}] HybridEP dispatch torch API (BF16): {} GB/s (NVL), t: {} us, nvl_recv_bytes: 250.68 MB"
FRAME = '  File "/srv/engine/{}.py", line {}, in {}'
MORI = "{} dispatch: best/avg RDMA bandwidth {} / {} XGMI bandwidth {} / {} GB/s | best/avg latency {} / {} us"
ROW = "{:>12} {:>12}   float     sum    163.7    {}    {}  2e-07    164.0    {}    {}  1e-07"


@dataclass
class Excerpt:
    source: str
    lines: list
    code: int
    begins: str          # the verdict begins with it
    holds: list = field(default_factory=list)  # and the text contains these
    runs: list = field(default_factory=list)   # [nodes, ranks, first line, last line] of each run


EXCERPTS = [
    Excerpt("DeepEP issue 261, pull request 456", [f"[tuning] SMs 24, NVL chunk 28, RDMA chunk {n}{tail}" for n, tail in (
        (4, ": " + RATES.format(45.2, 90.9)), (8, ": " + RATES.format(57.6, 115.6)),
        (12, ", transmit: 4474.00 us, notify: 1940.00 us, BW: " + RATES.format(52.2, 97.2)))], 0,
            "test_internode: tuning 57.6 GB/s (RDMA).", ["note: Part of a run: rows of the tuning of an operation"], [[None, None, 1, 3]]),
    Excerpt("DeepEP issue 138: a run within a node, and one between nodes behind it", [
        f"[tuning] Best {op}: SMs 24, NVL chunk 8{rdma}" for rdma in (", 326.5 GB/s (NVL)", ", RDMA chunk 32: " + RATES.format(60.1, 196))
        for op in ("dispatch (FP8)", "dispatch (BF16)", "combine")], 0, "2 runs: 2 passed", [], [[1, None, 1, 3], [2, None, 4, 6]]),
    Excerpt("DeepEP issue 60: a rate below 1 has two digits where it is judged, too", [
        "[tuning] Best dispatch (FP8): SMs 24, NVL chunk 20, RDMA chunk 32: " + RATES.format(0.47, 0.9)], 3,
            "test_internode; dispatch fp8 0.47 GB/s (RDMA) is 1% of"),
    Excerpt("DeepEP issue 28: the command says how many nodes and ranks", [
        "# mpirun --allow-run-as-root -x MASTER_ADDR=192.0.2.1 --host 192.0.2.1:8,192.0.2.2:8 python3 tests/test_low_latency.py",
        "Allocating buffer size: 2116.29 MB ..."] + [LOWLAT.format(r, 42.2, 522, 517, 527) for r in (1, 2, 3, 4, 6, 0)], 1,
            "test_low_latency, 2 nodes: 6 of 16 ranks printed a result.", ["the logs of 8 of at least 16 ranks"], [[2, 16, 2, 8]]),
    Excerpt("DeepEP issue 183: the variables of its tests", ["/srv# MASTER_ADDR=gpu-0 WORLD_SIZE=2 RANK=0 python tests/test_internode.py",
                                                             "[tuning] Best combine: SMs 24, NVL chunk 4, RDMA chunk 8: " + RATES.format(58, 100)], 0,
            "test_internode, 2 nodes: combine bf16 58.0 GB/s (RDMA)", [], [[2, None, 2, 2]]),
    Excerpt("deepops issue 1179: options of srun", ["$ srun -N 4 --ntasks-per-node=4 ./run.sh", *[LOWLAT.format(r, 42.2, 522, 517, 527) for r in range(16)]], 0,
            "test_low_latency, 4 nodes: dispatch + combine 522.0 us", [], [[4, 16, 2, 17]]),
    Excerpt("nccl-tests issue 360: hosts in variables; more ranks than any run has", [
        'mpirun -H "${HEAD}:8,${WORKER}:8" -np 99999999 ./run.sh', LOWLAT.format(0, 42.2, 522, 517, 527), LOWLAT.format(1, 42.2, 522, 517, 527)], 0,
            "test_low_latency, number of nodes unknown: dispatch + combine 522.0 us", [], [[None, 2, 2, 3]]),
    Excerpt("DeepEP issue 208: ranks of another node", [LOWLAT.format(r, 11.8, 924, 895, 949) for r in range(16, 24)] + [
        f"[rank {r}] Dispatch bandwidth: 5.9 GB/s, avg_t=629.4 us | Combine bandwidth: 32.5 GB/s, avg_t=221.3 us" for r in (21, 22)], 1,
            "test_low_latency, number of nodes unknown: the log ends before all ranks have printed", ["the logs of 16 of at least 24 ranks are missing"]),
    Excerpt("DeepEP pull request 588", ["=== Correctness Check (BF16, 2 ranks) ===", "  dispatch+combine API: PASS",
                                        "  dispatch_with_permute + combine_with_unpermute API (non-fused): PASS",
                                        "=== Torch API Benchmark (BF16, 2 ranks) ==="] + [HYBRID.format(r, 549, 456) for r in (0, 1)], 1,
            "test_hybrid_ep: 2 checks passed, the log ends before the last figures."),
    Excerpt("DeepEP pull request 634, behind srun --label", ["0: === Kernel Benchmark (BF16, 32 ranks) ===",
                                                             "0: dispatch kernel (BF16)(NVL):                     223.20 GB/s, avg_t=1917.7 us",
                                                             "0: combine kernel(NVL):                             212.85 GB/s, avg_t=2010.9 us"], 0,
            "test_hybrid_ep: dispatch kernel bf16 223.2 GB/s", [", of task 0\n", "note: Part of a run"]),
    Excerpt("MoRI pull request 72: figures alone", [MORI.format(kind, 60, 55.1, 196, 181, 974, 1071) for kind in ("FP8", "BF16")], 0, "2 runs: 2 passed",
            ["dispatch 55.1 GB/s (RDMA)", "note: Part of a run: its beginning and its last figures are missing."]),
    Excerpt("easybuild-easyconfigs pull request 25902", ["# OSU MPI-ROCM Bandwidth Test v7.5", "# Size      Bandwidth (MB/s)", "4194304     139961.80"], 0,
            "osu_bw: osu_bw 140.0 GB/s.", [" GB/s BEST"]),
    Excerpt("easybuild-easyconfigs pull request 15344: another of OSU", ["# OSU MPI_Put-CUDA Latency Test v5.9", "# Size          Latency (us)", "1   2.1"], 0,
            "osu_put_latency: osu_put_latency 2.1 us."),
    Excerpt("pib issue 4: less than 10 MB/s", [" Dual-port       : OFF          Device         : pib_1", "                    Atomic CMP_AND_SWAP BW Test",
                                               " #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]",
                                               " 8          1000           1.70               1.67                 0.219031", "-" * 87], 0,
            "ib_atomic_bw: atomic 0.0018 GB/s (RDMA)."),
    Excerpt("nccl issue 527: magnitudes of an error, without the title that says so", [ROW.format(64 << n, 16 << n, 0.32, 0.62, 0.28, 0.54) for n in range(4)], 0,
            "nccl-tests: collective float out-of-place 0.62 GB/s (busbw)", ["note: Part of a run: rows of a table"]),
    Excerpt("DeepEP issue 584: an error in two lines", ["RuntimeError: Failed: CUDA error /srv/DeepEP/csrc/deep_ep.cpp:200",
                                                        "'peer access is not supported between these two devices'"], 1,
            "No test was recognised, but a failure: two GPUs of a node do not reach each other: DeepEP needs NVLink, or P2P between all of them: "
            "RuntimeError: Failed: CUDA error /srv/DeepEP/csrc/deep_ep.cpp:200 'peer access is not supported between these two devices' (doctor id nvlink)."),
    Excerpt("DeepEP issues 114 and 670: a traceback without its end", ["    raise ProcessRaisedException(msg, error_index, failed_process.pid)",
                                                                       "torch.multiprocessing.spawn.ProcessRaisedException: ", "",
                                                                       "-- Process 5 terminated with the following error:", "Traceback (most recent call last):",
                                                                       FRAME.format("test_internode", 210, "test_main")], 1,
            "No test was recognised, but a failure: a process of the test raised an error: torch.multiprocessing.spawn.ProcessRaisedException: "
            "-- Process 5 terminated with the following error."),
    Excerpt("SGLang issue 9435: frames alone", [FRAME.format("operations", 51, "execute"), "    executor.next()", FRAME.format("moe", 692, "op_dispatch_b")], 1,
            "No test was recognised, but a failure: the program raised an error; the end of its traceback, which says which, is not there: "
            'File "/srv/engine/moe.py", line 692, in op_dispatch_b.', ["(standard input:3, 1 times)"]),
    Excerpt("vLLM issue 48466: frames behind a logger", ['(EngineCore pid=108) ERROR 07-13 13:31:12 [core.py:1195] File "/srv/core.py", line 1164, in run_engine_core',
                                                         "", "(EngineCore pid=108) ERROR 07-13 13:31:12 [core.py:1195] super().__init__("], 1,
            "No test was recognised, but a failure: the program raised an error; the end of its traceback"),
    Excerpt("nccl-tests issue 294: a paragraph of mpirun", ["-" * 74, "mpirun detected that one or more processes exited with non-zero status, thus causing",
                                                            "the job to be terminated. The first process to do so was:", "", "  Process name: [[12167,1],10]",
                                                            "  Exit code:    3", "-" * 74], 1,
            "No test was recognised, but a failure: a process under mpirun failed first: mpirun detected that one or more processes exited with non-zero status, "
            "thus causing the job to be terminated. The first process to do so was: Process name: [[12167,1],10] Exit code:    3.", ["(standard input:2, 1 times)"]),
    Excerpt("awsome-distributed-ai pull request 1234: figures of DeepEP 2 without their case", [
        f"   - EP:   {r}/16 | expanded dispatch: 115 GB/s (SO), 376 GB/s (SU), 106{r}.000 us, 400593024 bytes | copy: 4791 GB/s, 187.879 us" for r in (4, 5, 6)], 0,
            "test_ep: part of a run, whose cases are missing.", ["expanded dispatch"], [[None, 16, 1, 3]]),
    Excerpt("nccl issue 653: a warning of NCCL that says why, before a traceback without its end", [
        "201: gpu-25:41367:41367 [1] enqueue.cc:422 NCCL WARN Error : no algorithm/protocol available", "201: Traceback (most recent call last):",
        "201: " + FRAME.format("pretrain", 124, "<module>")], 1,
            "No test was recognised, but a failure: NCCL has no algorithm for the operation that NCCL_ALGO and NCCL_PROTO allow: ", [", task 201, 1 times)"]),
    Excerpt("aws-ofi-nccl issue 22: the plug-in outside of NCCL", ["WARN: Function: create_component Line: 459: NET/OFI Couldn't open AV. RC: -22, ERROR: Invalid argument"], 1,
            "No test was recognised, but a failure: NCCL's plug-in for libfabric could not use a NIC: WARN: Function: create_component"),
    Excerpt("zetta_utils issue 671: the limit of the job, not what follows from it", [
        "srun: Job step aborted: Waiting up to 47 seconds for job step to finish.",
        "slurmstepd: error: *** JOB 494583 ON gpu-7 CANCELLED AT 2024-04-20T09:09:37 DUE TO TIME LIMIT ***"], 1,
            "No test was recognised, but a failure: the job reached its time limit: "),
]


def parse(epkit, text, *options):
    done = subprocess.run([epkit, "parse", *options, "-"], input=text, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout


def wrongs(epkit, excerpt):
    text = "".join(line + "\n" for line in excerpt.lines)
    code, out = parse(epkit, text)
    wrong = [] if code == excerpt.code else [f"exit code {code}, not {excerpt.code}"]
    if not out.startswith(excerpt.begins):
        wrong.append(f"it does not begin '{excerpt.begins}'")
    wrong += [f"it lacks '{part}'" for part in excerpt.holds if part not in out]
    runs = [[run["nodes"], run["ranks"], *run["lines"]] for run in json.loads(parse(epkit, text, "--json")[1])["runs"]]
    if excerpt.runs and runs != excerpt.runs:
        wrong.append(f"runs {runs}, not {excerpt.runs}")
    return [f"{excerpt.source}: {'; '.join(wrong)}; it says:\n{out}"] if wrong else []


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    wrong = [text for excerpt in EXCERPTS for text in wrongs(sys.argv[1], excerpt)]
    print("\n".join(wrong + [f"{len(EXCERPTS) - len(wrong)} of {len(EXCERPTS)} excerpts as expected"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
