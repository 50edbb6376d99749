#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Logs in the formats of the programs that 'epkit parse' reads, and the expected result of each.

usage: samples.py check EPKIT DIALECT     # parses all samples of a dialect and compares
       samples.py cut EPKIT DIALECT       # no passing log passes without its end
       samples.py write DIR               # the samples as files, for the fuzzer's corpus or for inspection
       samples.py list

What is expected comes from the values that a log was made from, never from a parser. The layout of every line is that of
the program named beside it; the figures are made up. All choices come from fixed seeds.
"""
import json
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PER_DIALECT = 24


# --- changes of a log by launchers and loggers ---

def plain(lines, rng):
    return "".join(line + "\n" for line in lines)


def crlf(lines, rng):
    return "".join(line + "\r\n" for line in lines)


def coloured(lines, rng):
    return "".join(f"\x1b[{rng.choice(['0', '32', '1;33'])}m{line}\x1b[0m\n" for line in lines)


def kubectl(lines, rng):
    return "".join(f"[pod/me-deepep-workload-0-0-x7k2p/workload] {line}\n" for line in lines)


def stamp(rng):
    return f"2026-02-03T10:{rng.randrange(60):02}:{rng.randrange(60):02}.{rng.randrange(10**9):09}Z"


def kubectl_times(lines, rng):
    return "".join(f"[pod/me-deepep-workload-0-0-x7k2p/workload] {stamp(rng)} {line}\n" for line in lines)


def runtime_file(lines, rng):
    """A container runtime's own file; it cuts long lines in two."""
    text = ""
    for line in lines:
        if len(line) > 60 and rng.random() < 0.3:
            cut = rng.randrange(20, len(line))
            text += f"{stamp(rng)} stdout P {line[:cut]}\n{stamp(rng)} stdout F {line[cut:]}\n"
        else:
            text += f"{stamp(rng)} stdout F {line}\n"
    return text


def ompi4(lines, rng):
    return "".join(f"[1,0]<stdout>:{line}\n" for line in lines)


def ompi5(lines, rng):
    return "".join(f"[prterun-node-0-4711@1,0]<stdout>: {line}\n" for line in lines)


def ompi_times(lines, rng):
    return "".join(f"Tue Feb  3 10:{rng.randrange(60):02}:{rng.randrange(60):02} 2026<stdout>:{line}\n" for line in lines)


def ompi_both(lines, rng):
    return "".join(f"Tue Feb  3 10:00:{rng.randrange(60):02} 2026[1,0]<stdout>:{line}\n" for line in lines)


def srun(lines, rng):
    return "".join(f" 0: {line}\n" for line in lines)


def host(lines, rng):
    return "".join(f"[node-a] {line}\n" for line in lines)


def host_colon(lines, rng):
    return "".join(f"node-a.example.com: {line}\n" for line in lines)


def compose(lines, rng):
    return "".join(f"worker-1  | {line}\n" for line in lines)


def logger(lines, rng):
    return "".join(f"[2026-02-03 10:00:{rng.randrange(60):02},{rng.randrange(1000):03}] {line}\n" for line in lines)


def noisy(lines, rng):
    """Lines of other programs in between: NCCL, Python, a progress bar, an empty line, binary data."""
    text = ""
    for line in lines:
        kind = rng.randrange(8)
        if kind == 0:
            text += f"node-a:{rng.randrange(9999)}:{rng.randrange(9999)} [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE\n"
        elif kind == 1:
            text += "".join(f"\r{n}%|{'#' * (n // 10):10}| {n}/100" for n in range(0, 100, 20)) + "\n"
        elif kind == 2:
            text += "/usr/lib/python3/torch/x.py:12: UserWarning: barrier() [rank 0] using GPU 0\n\n"
        elif kind == 3:
            text += "\x00\x01 12 34 \xff\n"
        text += line + "\n"
    return text


# Prefixes of loggers and collectors that epkit does not know.
IN_FRONT = {
    "syslog": lambda rng: f"Nov {rng.randrange(10, 28)} 10:00:{rng.randrange(60):02} node1 train[123]: ",
    "journal": lambda rng: f"Nov  3 10:00:{rng.randrange(60):02}.{rng.randrange(10**6):06} node1 python3[123]: ",
    "iso-syslog": lambda rng: f"2026-11-22T10:00:{rng.randrange(60):02}.123456+00:00 node1 train[1]: ",
    "stern": lambda rng: "me-deepep-workload-0-0-abc workload ",
    "logging": lambda rng: "INFO:root:",
    "logging-time": lambda rng: f"2026-11-22 10:00:{rng.randrange(60):02},123 INFO ",
    "logging-place": lambda rng: f"[2026-11-22 10:00:00,{rng.randrange(1000):03}] [INFO] [launch.py:45] ",
    "ray": lambda rng: "\x1b[36m(RayWorker pid=123, ip=10.0.0.1)\x1b[0m ",
    "glog": lambda rng: f"I1122 10:00:00.{rng.randrange(10**6):06} 12345 main.cc:12] ",
    "process": lambda rng: "[node1:12345] ",
    "seconds": lambda rng: f"17322692{rng.randrange(100):02}.123 ",
    "zone": lambda rng: f"2026-11-22 10:00:{rng.randrange(60):02}.123 PST ",
    "angle": lambda rng: "<node1> ",
    "two": lambda rng: "worker-1: [default0]:",
    "tab": lambda rng: "\t",
}


def in_front(make):
    """A log of make(), with each of these prefixes."""
    for name, front in IN_FRONT.items():
        rng = random.Random(name)
        lines, expected = make(rng)
        yield f"front-{name}", "".join(front(rng) + line + "\n" for line in lines), [expected]
    lines, expected = make(rng)
    yield "behind", "".join(line + "   \n" for line in lines), [expected]


WAYS = [plain, crlf, coloured, kubectl, kubectl_times, runtime_file, ompi4, ompi5, ompi_times, ompi_both, srun, host,
        host_colon, compose, logger, noisy]


# --- DeepEP 1, throughput ---

def v1_cases(n):
    kinds = ["BF16", "BF16", "FP8"] + (["FP8"] if n == 32 else [])
    for previous in (False, True):
        for asynchronous in (False, True):
            for kind in kinds:
                for top in ("without", "with"):
                    yield (f"[testing] Running with {kind}, {top} top-k (async={asynchronous}, previous={previous}) ...")


def intranode(rng, style):
    """tests/test_intranode.py: style 0 the first versions, 1 with times, 2 with the default chunk as well."""
    chunk = [rng.choice(range(4, 33, 2)) for _ in range(3)]
    rate = [round(rng.uniform(320, 440), 2), round(rng.uniform(450, 490), 2), round(rng.uniform(360, 400), 2)]
    time = [round(rng.uniform(200, 500), 2) for _ in range(3)]
    lines = ["[config] num_tokens=2048, hidden=7168, num_topk=8", "[layout] Kernel performance: 0.041 ms", ""]
    lines += [case + " passed" for case in v1_cases(24)] + [""]
    for i in range(3):
        for n in range(2, 8, 2):
            other = rate[i] * rng.uniform(0.6, 0.99)
            lines.append(f"[tuning] SMs 24, NVL chunk {n}: {other:.2f} GB/s (NVL)" +
                         (f", {rng.uniform(500, 900):.2f} us" if style else " "))
        if style == 2:
            lines.append(f"[tuning] SMs 24, NVL chunk default: {rate[i] / 2:.2f} GB/s (NVL), 821.28 us")
        tail = f", t: {time[i]:.2f} us" if style else ""
        if i < 2:
            lines.append(f"[tuning] Best dispatch ({('FP8', 'BF16')[i]}): SMs 24, NVL chunk {chunk[i]}, "
                         f"{rate[i]:.2f} GB/s (NVL){tail}")
        else:
            lines.append(f"[tuning] Best combine: SMs 24, NVL chunk {chunk[i]}: {rate[i]:.2f} GB/s (NVL){tail}")
        lines.append("")
    names = [("dispatch", "fp8"), ("dispatch", "bf16"), ("combine", "bf16")]
    measures = {name: {"nvl": rate[i], "nvl_chunk": chunk[i], "sms": 24, "time": time[i] if style else None}
                for i, name in enumerate(names)}
    return lines, {"dialect": "deepep-intranode", "cases": (24, 24), "measures": measures, "result": "passed",
                   "tokens": 2048}


def internode(rng, style, nodes=2, n_cases=32, fault=None):
    """tests/test_internode.py: style 0 rates alone, 1 'a + b us', 2 'transmit, notify, BW', 3 mixed as 1.2.1 has it."""
    chunks = [(rng.choice(range(4, 45, 4)), rng.choice(range(4, 33, 4))) for _ in range(3)]
    base = {2: (70.5, 81.0, 75.0), 4: (54.0, 57.5, 56.5)}[nodes]
    spread = {2: 3.3, 4: 2.02}[nodes]
    factor = {None: 1, "one-nic": 0.09, "half": 0.53}[fault]
    rdma = [round(b * factor * rng.uniform(0.98, 1.02), 2) for b in base]
    nvl = [round(r * spread, 2) for r in rdma]
    notify = [round(rng.uniform(10, 30)) for _ in range(3)]
    time = [round(rng.uniform(300, 900)) for _ in range(3)]
    lines = [f"[config] num_tokens=2048, hidden=7168, num_topk_groups={min(nodes, 4)}, num_topk=8",
             "[layout] Kernel performance: 0.049 ms", ""]
    lines += [case + " passed" for case in v1_cases(n_cases)] + [""]
    for i in range(3):
        for _ in range(4):
            factor = rng.uniform(0.5, 0.99)
            lines.append(f"[tuning] SMs 24, NVL chunk 4, RDMA chunk 8: "
                         f"{rdma[i] * factor:.2f} GB/s (RDMA), {nvl[i] * factor:.2f} GB/s (NVL) ")
        head = "Best combine" if i == 2 else f"Best dispatch ({('FP8', 'BF16')[i]})"
        head = f"[tuning] {head}: SMs 24, NVL chunk {chunks[i][0]}, RDMA chunk {chunks[i][1]}"
        rates = f"{rdma[i]:.2f} GB/s (RDMA), {nvl[i]:.2f} GB/s (NVL)"
        if style == 0:
            lines.append(f"{head}: {rates}")
        elif style == 2:
            lines.append(f"{head}, transmit: {time[i]:.2f} us, notify: {notify[i]:.2f} us, BW: {rates}")
        elif i == 2:
            lines.append(f"{head}, {notify[i]:.2f} + {time[i]:.2f} us, {rates}")
        else:
            lines.append(f"{head}: {notify[i]:.0f} + {time[i]:.0f} us, {rates}")
        lines.append("")
    names = [("dispatch", "fp8"), ("dispatch", "bf16"), ("combine", "bf16")]
    measures = {name: {"rdma": rdma[i], "nvl": nvl[i], "nvl_chunk": chunks[i][0], "rdma_chunk": chunks[i][1],
                       "time": time[i] if style else None, "notify": notify[i] if style else None,
                       "wire": rdma[i] * (nodes - 1) / nodes if nodes < 4 else None}
                for i, name in enumerate(names)}
    return lines, {"dialect": "deepep-internode", "cases": (n_cases, n_cases), "measures": measures,
                   "nodes": nodes if nodes < 4 else "unknown",  # four groups of top-k: four nodes, or more
                   "result": "slow" if fault == "one-nic" else "passed", "tokens": 2048,
                   "cause": "one-nic" if fault == "one-nic" else None}


def cut_v1(lines, expected, rng, n_cases):
    """The log of a test that stopped in the middle of a case: its line has no end."""
    at = [i for i, line in enumerate(lines) if line.startswith("[testing]")]
    stop = rng.randrange(4, n_cases - 1)
    lines = lines[:at[stop]] + [lines[at[stop]].removesuffix(" passed")]
    expected = dict(expected, cases=(stop, n_cases), measures={}, result="failed", cause=None, nodes=None)
    return lines, expected


def torn(lines, rng):
    """Two processes wrote concurrently: the ends of some sweep lines are lost, and some lines have no newline between."""
    result, lost = [], 0
    for line in lines:
        if line.startswith("[tuning] SMs") and rng.random() < 0.4:
            result.append(line[:rng.randrange(12, 30)])
            lost += 1
        else:
            result.append(line)
    return result, lost


def two_writers(lines, rng):
    """Two nodes through one mpirun without tags: every line twice, cases torn at the point where Python flushes."""
    text = ""
    for line in lines:
        if line.startswith("[testing]") and line.endswith(" passed"):
            head = line.removesuffix(" passed")
            text += rng.choice([f"{head} passed\n{head} passed\n", f"{head}{head} passed\n passed\n",
                                f"{head}{head} passed passed\n\n"])
        else:
            text += f"{line}\n{line}\n"
    return text


def two_tagged(lines, rng):
    """The same with mpirun --tag-output, which prints its tag before every chunk."""
    tags = ["[1,0]<stdout>:", "[1,1]<stdout>:"]
    text = ""
    for line in lines:
        if line.startswith("[testing]") and line.endswith(" passed"):
            head = line.removesuffix(" passed")
            text += rng.choice([
                f"{tags[0]}{head}{tags[1]}{head}{tags[0]} passed\n{tags[1]} passed\n",
                f"{tags[0]}{head}{tags[0]} passed\n{tags[1]}{head}{tags[1]} passed\n"])
        else:
            text += f"{tags[0]}{line}\n{tags[1]}{line}\n"
    return text


def v1_samples(make, n_cases):
    for i in range(PER_DIALECT):
        rng = random.Random(1000 + i)
        lines, expected = make(rng, i)
        name = f"{i:02}"
        if i % 8 == 5:
            lines, expected = cut_v1(lines, expected, rng, n_cases(i))
            text = plain(lines, rng)[:-1]
        elif i % 8 == 6:
            lines, lost = torn(lines, rng)
            expected["unreadable"] = lost
            text = plain(lines, rng)
        elif i % 8 == 7:
            second, other = make(rng, i)
            yield f"{name}-two-runs", plain(["== first =="] + lines + ["== second =="] + second, rng), [expected, other]
            continue
        elif i % 8 == 3:
            lines[12:12] = ["Traceback (most recent call last):", "  File \"test.py\", line 12, in test_main",
                            "AssertionError: 5 != 6"]
            expected["result"] = "failed"
            text = plain(lines, rng)
        else:
            text = WAYS[(3 * i) % len(WAYS)](lines, rng)
        yield name, text, [expected]


def intranode_samples():
    yield from in_front(lambda rng: intranode(rng, 1))
    yield from v1_samples(lambda rng, i: intranode(rng, i % 3), lambda i: 24)


def internode_samples():
    yield from in_front(lambda rng: internode(rng, 1, 2, 32))
    yield from v1_samples(lambda rng, i: internode(rng, i % 4, 2 if i % 2 else 4, 32 if i % 5 else 24,
                                                   {1: "one-nic", 9: "one-nic"}.get(i)), lambda i: 32 if i % 5 else 24)
    for i in range(4):
        rng = random.Random(1500 + i)
        lines, expected = internode(rng, i)
        expected["writers"] = 2
        yield f"writers-{i}", (two_tagged if i % 2 else two_writers)(lines, rng), [expected]


# --- DeepEP 1, low latency: tests/test_low_latency.py ---

def low_latency(rng, ranks, style):
    lines = ["Allocating buffer size: 2116.288512 MB ..."]
    both, apart, hook = {}, {}, {}
    for r in range(ranks):
        t = [round(rng.uniform(30, 42), 2), round(rng.uniform(55, 66), 2)]
        bw = [round(rng.uniform(180, 250), 2), round(rng.uniform(220, 260), 2)]
        send = [round(rng.uniform(5, 30), 2) for _ in range(4)]
        mean = round(rng.uniform(80, 110), 2)
        rate = round(rng.uniform(150, 260), 2)
        both[r] = (f"[rank {r}] Dispatch + combine bandwidth: {rate:.2f} GB/s, avg_t={mean:.2f} us, "
                   f"min_t={mean - 9:.2f} us, max_t={mean + 20:.2f} us", mean)
        apart[r] = (f"[rank {r}] Dispatch bandwidth: {bw[0]:.2f} GB/s, avg_t={t[0]:.2f} us | "
                    f"Combine bandwidth: {bw[1]:.2f} GB/s, avg_t={t[1]:.2f} us", t)
        if style:
            hook[r] = (f"[rank {r}] Dispatch send/recv time: {send[0]:.2f} + {send[1]:.2f} us | "
                       f"Combine send/recv time: {send[2]:.2f} + {send[3]:.2f} us", send)
        else:
            hook[r] = (f"[rank {r}] Dispatch send/recv time: {send[0]:.2f} us | "
                       f"Combine send/recv time: {send[2]:.2f} us", send)
    for group in (both, apart, hook):
        order = list(group)
        rng.shuffle(order)
        lines += [group[r][0] for r in order]
    measures = {("dispatch + combine", ""): {"time": max(v[1] for v in both.values()), "count": ranks},
                ("dispatch", "fp8"): {"time": max(v[1][0] for v in apart.values())},
                ("combine", "bf16"): {"time": max(v[1][1] for v in apart.values())}}
    names = ["dispatch send", "dispatch recv", "combine send", "combine recv"] if style else \
        ["dispatch send + recv", None, "combine send + recv", None]
    for i, name in enumerate(names):
        if name:
            kind = "fp8" if name.startswith("dispatch") else "bf16"
            measures[(name, kind)] = {"time": max(v[1][i] for v in hook.values())}
    return lines, {"dialect": "deepep-lowlatency", "ranks": ranks, "measures": measures, "result": "passed"}


def low_latency_samples():
    yield from in_front(lambda rng: low_latency(rng, 8, 1))
    for i in range(PER_DIALECT):
        rng = random.Random(2000 + i)
        lines, expected = low_latency(rng, 8 if i % 3 else 16, i % 4)
        if i % 8 == 5:  # a rank hung
            lost = [k for k, line in enumerate(lines) if line.startswith("[rank 3] ")]
            lines = [line for k, line in enumerate(lines) if k not in lost]
            expected.update(result="failed", measures={})
        elif i % 8 == 6:  # a line of another rank in the middle of one, and its end lost
            k = next(k for k, line in enumerate(lines) if line.startswith("[rank 2] Dispatch send"))
            m = next(m for m, line in enumerate(lines) if line.startswith("[rank 4] Dispatch send"))
            lines[k] = lines[k][:20] + lines[m]
            del lines[m]
            expected["unreadable"] = 1
            expected["measures"] = {key: value for key, value in expected["measures"].items() if "recv" not in key[0]
                                    and "send" not in key[0]}
        elif i % 8 == 7:
            second, other = low_latency(rng, 8, 1)
            yield f"{i:02}-two-runs", plain(lines + second, rng), [expected, other]
            continue
        way = plain if i % 8 in (5, 6) else WAYS[(5 * i) % len(WAYS)]
        yield f"{i:02}", way(lines, rng), [expected]
    # Each writer has its own prefix: the first process of a node, or every rank; no writer prints all ranks.
    for name, tag, writers in (("hosts", lambda r: f"gpu-{r // 8}: ", 2), ("files", lambda r: f"[pod/w-0-{r // 8}-x/w] ", 2),
                               ("torchrun", lambda r: f"[default{r % 8}]:", 8), ("mpirun", lambda r: f"[1,{r}]<stdout>:", 16)):
        lines, expected = low_latency(random.Random(2500 + writers), 16, 1)
        expected["writers"] = writers
        text = "".join(tag(int(line[6:line.index("]")]) if line.startswith("[rank") else 0) + line + "\n" for line in lines)
        yield f"each-{name}", text, [expected]


# --- DeepEP 2: tests/elastic/test_ep.py ---

def v2(rng, nodes, n_cases, with_rates=True):
    ranks = 8 * nodes
    lines = ["Config:", f" > Ranks: {nodes} x 8", " > Experts: 8/256", " > Tokens: 8192 (max: 8192), hidden: 7168",
             " > #SM: 12, #QPs: 17/17", "Running all test cases:"]
    slowest, done = {}, 0
    for copy in (1, 0):
        for alignment in (128, 1):
            for fp8 in (1, 0):
                for bias in (0, 1, 2):
                    for previous in (0, 1):
                        for asynchronous in (0, 1):
                            for allocate in ((1,) if previous else (0, 1)):
                                if done == n_cases:
                                    continue
                                done += 1
                                lines.append(f" > Testing with do_handle_copy={copy}, expert_alignment={alignment}, "
                                             f"use_fp8_dispatch={fp8}, num_bias={bias}, with_previous_event={previous}, "
                                             f"async_with_compute_stream={asynchronous}, "
                                             f"allocate_on_comm_stream={allocate} ...")
                                for r in range(ranks if with_rates and done <= 2 else 0):
                                    for mark, op in (("*", "dispatch"), ("-", "expanded dispatch"),
                                                     ("#", "cached dispatch"), ("@", "combine"),
                                                     ("+", "reduced combine")):
                                        so, su = (rng.randrange(88, 95) if nodes > 1 else 0), rng.randrange(660, 740)
                                        us = round(rng.uniform(800, 1600), 3)
                                        last = "reduce" if "combine" in op else "copy"
                                        lines.append(f"   {mark} EP: {r:3}/{ranks} | {op}: {so} GB/s (SO), {su} GB/s (SU), "
                                                     f"{us:.3f} us, 401408000 bytes | {last}: 1648 GB/s, 61.250 us")
                                        kind = "bf16" if "combine" in op or not fp8 else "fp8"
                                        if us > slowest.get((op, kind), (0,))[0]:
                                            slowest[(op, kind)] = (us, so, su)
    measures = {key: {"time": us, "nvl": su, "rdma": so if so else None, "epilogue": 61.25}
                for key, (us, so, su) in slowest.items()}
    complete = n_cases in (1, 144)
    return lines, {"dialect": "deepep-v2", "nodes": nodes, "ranks": ranks, "tokens": 8192, "measures": measures,
                   "cases": (n_cases, n_cases) if complete else (n_cases - 1, 144),
                   "result": "passed" if complete else "failed"}


def v2_samples():
    yield from in_front(lambda rng: v2(rng, 2, 144))
    for i in range(PER_DIALECT):
        rng = random.Random(3000 + i)
        lines, expected = v2(rng, 1 + i % 2, [144, 1, 144, 77, 144, 13, 144, 144][i % 8])
        if i % 8 == 6:
            k = [k for k, line in enumerate(lines) if "| cached dispatch" in line][3]
            lines[k] = lines[k][:-45]
            lines[k] = lines[k][:lines[k].index("(S")]
            expected["unreadable"] = 1
            expected["measures"] = {key: value for key, value in expected["measures"].items() if "cached" not in key[0]}
        elif i % 8 == 7:  # every line of a case comes once for each node
            lines = [line for line in lines for _ in range(2 if line.startswith(" > Testing") else 1)]
        yield f"{i:02}", (plain if i % 8 == 6 else WAYS[(7 * i) % len(WAYS)])(lines, rng), [expected]
    # One log per rank: only the first rank of a node prints cases.
    for n_cases in (144, 13):
        lines, expected = v2(random.Random(3500 + n_cases), 2, n_cases)
        expected["writers"] = 16
        text = ""
        for line in lines:
            rank = int(line.split("EP:")[1].split("/")[0]) if " EP: " in line else 0
            text += f"[1,{rank}]<stdout>:{line}\n"
        yield f"each-rank-{n_cases}", text, [expected]


# --- nccl-tests ---

def nccl(rng, style, ranks=16, gpu="NVIDIA B200", peak=None):
    """style 0: 2026, 1: 2023, 2: the first versions (error column), 3: a test without an in-place form, 4: no redop."""
    name = "all_reduce_perf" if style in (0, 1, 2) else "alltoall_perf" if style == 3 else "all_gather_perf"
    peak = peak or (690.0 if ranks == 16 else 850.0)
    lines = []
    if style == 0:
        lines.append(f"# Collective test starting: {name}")
    else:
        lines.append(f"+ ./build/{name} -b 2M -e 16G -f 2 -n 1 -g 1 -w 10")
    lines += ["# nThread 1 nGpus 1 minBytes 2097152 maxBytes 17179869184 step: 2(factor) warmup iters: 10 iters: 1 "
              "agg iters: 1 validation: 1 graph: 0", "#", "# Using devices"]
    for r in range(ranks):
        if style == 2:
            lines.append(f"#   Rank {r:2} Pid  {4000 + r} on node-{r // 8} device {r % 8:2} [0x1b] {gpu}")
        else:
            # If each process sees only one GPU, all have device 0.
            lines.append(f"#  Rank {r:2} Group  0 Pid  {4000 + r} on node-{r // 8} device {0 if style == 1 else r % 8:2} "
                         f"[0000:1b:00] {gpu}")
    wrong = "  error" if style == 2 else " #wrong"
    lines += ["#", "#" + " " * 62 + "out-of-place" + " " * 23 + "in-place          ",
              f"#       size         count      type   redop    root     time   algbw   busbw{wrong}     time   algbw   "
              f"busbw{wrong}",
              "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  "
              "(GB/s)       "]
    best, size, shown, values = {}, 2 << 20, [], []
    while size <= 1 << 34:
        row = f"{size:12d}  {size // 4:12d}  {'float':>8}  "
        row += {3: "  none      -1", 4: "              "}.get(style, "   sum      -1")
        for place in ("out-of-place", "in-place"):
            if style == 3 and place == "in-place":
                row += "      N/A     N/A     N/A    N/A"
                continue
            bus = round(peak * min(1, size / (1 << 30)) * rng.uniform(0.9, 1.0), 2)
            alg, time = round(bus / 1.875, 2), round(size / max(bus / 1.875, 0.01) / 1e3, 1)
            check = "  4e-07" if style == 2 else "      0"
            row += f"  {time:7.1f}  {alg:6.2f}  {bus:6.2f}{check}"
            values.append(bus)
            if bus > best.get(place, (0,))[0]:
                best[place] = (bus, size, alg, time)
        lines.append(row)
        shown.append(row)
        size *= 2
    average = sum(values) / len(values)
    lines += ["# Out of bounds values : 0 OK", f"# Avg bus bandwidth    : {average:g} ", "#"]
    if style == 0:
        lines += [f"# Collective test concluded: {name}", "#"]
    op = name.removesuffix("_perf")
    measures = {(op, "float", place): {"bus": bus, "bytes": size, "alg": alg, "time": time}
                for place, (bus, size, alg, time) in best.items()}
    return lines, {"dialect": "nccl-tests", "ranks": ranks, "nodes": ranks // 8, "measures": measures, "wrong": 0,
                   "average": average, "result": "passed", "title": name}


def nccl_samples():
    yield from in_front(lambda rng: nccl(rng, 1))
    for i in range(PER_DIALECT):
        rng = random.Random(4000 + i)
        lines, expected = nccl(rng, i % 5, 16 if i % 2 else 8)
        if i % 8 == 5:  # killed
            k = next(k for k, line in enumerate(lines) if line.lstrip().startswith("67108864 "))
            lines = lines[:k + 1]
            expected.update(result="failed", average=None, measures={})
        elif i % 8 == 6:  # wrong values
            k = next(k for k, line in enumerate(lines) if line.startswith("# Out of bounds"))
            lines[k] = "# Out of bounds values : 12 FAILED"
            expected.update(result="failed", wrong=12)
        elif i % 8 == 3:  # a warning of NCCL in the middle of a row
            k = next(k for k, line in enumerate(lines) if line.lstrip().startswith("4194304 "))
            lines[k] = lines[k][:45] + "node-0:4711:4800 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC"
            expected["unreadable"] = 1
        elif i % 8 == 7:
            second, other = nccl(rng, 0, 16)
            yield f"{i:02}-two-runs", plain(lines + second, rng), [expected, other]
            continue
        elif i % 8 == 4:  # slow: one NIC
            lines, expected = nccl(rng, 1, 16, peak=60.0)
            expected.update(result="slow", cause="net-plugin")
        text = (plain if i % 8 in (3, 5) else WAYS[(3 * i) % len(WAYS)])(lines, rng)
        yield f"{i:02}", "\ufeff" + text if i == 0 else text, [expected]
    # mpirun of a program without MPI: each process runs the whole test, here line by line at the same time.
    for ranks in (1, 8):
        lines, expected = nccl(random.Random(4500 + ranks), 1, ranks)
        expected.update(result="failed", writers=2, nodes=None, measures={}, average=None)
        yield f"without-mpi-{ranks}", "".join(f"{line}\n{line}\n" for line in lines), [expected]
    # Without '#', as the first versions print it, and as a page shows it.
    lines, expected = nccl(random.Random(4600), 2, 8)
    yield "no-hash", plain([line.lstrip("# ") if line.startswith("#") else line for line in lines], None), [expected]
    lines, expected = nccl(random.Random(4601), 2, 8)
    lines = [line.lstrip("# ") if line.startswith("#") else line for line in lines]
    lines = [line.replace("values : 0 OK", "values : 248 FAILED") for line in lines]
    yield "no-hash-wrong", plain(lines, None), [dict(expected, result="failed", wrong=248)]
    # Failed before the table, and started once more.
    lines, expected = nccl(random.Random(4602), 1, 8)
    k = next(k for k, line in enumerate(lines) if "device  7" in line or "Rank  7" in line)
    text = plain(lines[:k + 1] + ["node-0: Test NCCL failure common.cu:958 'unhandled system error / '",
                                  " .. node-0 pid 4001: Test failure common.cu:842"] + lines, None)
    yield "again", text, [dict(expected, result="failed", measures={}, average=None), expected]


# --- perftest ---

def perftest(rng, gbits, sweep, device="mlx5_0", rate=None):
    rate = rate or rng.uniform(44, 46)  # GB/s
    lines = ["---------------------------------------------------------------------------------------",
             "                    RDMA_Write BW Test",
             f" Dual-port       : OFF\t\tDevice         : {device}",
             " Number of qps   : 1\t\tTransport type : IB", " Connection type : RC\t\tUsing SRQ      : OFF",
             " PCIe relax order: ON", " ibv_wr* API     : ON", " TX depth        : 128", " CQ Moderation   : 1",
             " Mtu             : 4096[B]", " Link type       : Ethernet", " GID index       : 3",
             " Max inline data : 0[B]", " rdma_cm QPs\t : OFF", " Data ex. method : Ethernet",
             "---------------------------------------------------------------------------------------",
             " local address: LID 0000 QPN 0x03ad PSN 0x17d925 RKey 0x029300 VAddr 0x0073f17a0af000",
             " GID: 00:00:00:00:00:00:00:00:00:00:255:255:192:00:02:01",
             "---------------------------------------------------------------------------------------"]
    unit = "Gb/sec" if gbits else "MB/sec"
    lines.append(f" #bytes     #iterations    BW peak[{unit}]    BW average[{unit}]   MsgRate[Mpps]")
    if rng.random() < 0.5:
        lines.append("Conflicting CPU frequency values detected: 800.140000 != 2100.000000. CPU Frequency is not max.")
    best, size_of_best = 0, 0
    for size in ([2 ** n for n in range(1, 24)] if sweep else [65536]):
        value = rate * min(1, size / 65536) * (1 - 0.001 * (size == 8388608))
        shown = round(value * 8, 2) if gbits else round(value * 1e9 / 1048576, 2)
        back = shown / 8 if gbits else shown * 1048576 / 1e9
        if back > best:
            best, size_of_best = back, size
        if gbits:
            lines.append(f" {size:<7d}    5000           {shown:<7.6f}            {shown:<7.6f}            "
                         f"{value * 1e3 / size:<7.6f}")
        else:
            lines.append(f" {size:<7d}    {5000:<10d}       {shown:<7.2f}            {shown:<7.2f}\t\t   "
                         f"{value * 1e3 / size:<7.6f}")
    lines.append("---------------------------------------------------------------------------------------")
    return lines, {"dialect": "perftest", "measures": {("write", ""): {"rdma": best, "bytes": size_of_best,
                                                                       "wire": best}},
                   "result": "passed", "device": device}


def perftest_samples():
    yield from in_front(lambda rng: perftest(rng, 1, True))
    for i in range(PER_DIALECT):
        rng = random.Random(5000 + i)
        lines, expected = perftest(rng, i % 2, i % 3 == 0, f"mlx5_{i % 8}" if i % 4 else f"rocep{i}s0f0")
        if i % 8 == 5:
            lines = lines[:19] + ["Couldn't connect to 192.0.2.7:18515", " Unable to init the socket connection"]
            expected.update(result="failed", measures={})
        elif i % 8 == 6:
            lines[-2] = lines[-2][:30] + "[node-b] error: something else"
            expected.update(unreadable=1, result="failed" if i % 3 else "passed", measures={})
        elif i % 8 == 7:  # eight NICs one after the other, one of them slow
            text, runs = "", []
            for nic in range(8):
                lines, expected = perftest(rng, 1, False, f"mlx5_{nic}", 22.0 if nic == 3 else None)
                expected["result"] = "slow" if nic == 3 else "passed"
                text += plain(lines, rng)
                runs.append(expected)
            yield f"{i:02}-eight", text, runs
            continue
        yield f"{i:02}", (plain if i % 8 in (5, 6) else WAYS[(3 * i) % len(WAYS)])(lines, rng), [expected]
    # Every kind of test by its title.
    for i, (title, program, op) in enumerate([
            ("RDMA_Write Bidirectional Post List BW Test", "ib_write_bw -b", "write (both ways)"),
            ("Send Post List BW Test", "ib_send_bw", "send"), ("RDMA_Read BW Test", "ib_read_bw", "read"),
            ("Atomic FETCH_AND_ADD BW Test", "ib_atomic_bw", "atomic"),
            ("RDMA_Write_Imm BW Test", "ib_write_imm_bw", "write with immediate"),
            ("Raw Eth BW Test", "raw_ethernet_bw", "raw Ethernet")]):
        lines, expected = perftest(random.Random(5500 + i), i % 2, False)
        lines[1] = " " * 20 + title
        expected["title"] = program
        expected["measures"] = {(op, ""): next(iter(expected["measures"].values()))}
        yield f"title-{i}", plain(lines, None), [expected]
    # Of two links the slower one is slow, also on unknown hardware.
    fast, first = perftest(random.Random(5600), 1, False, "mlx5_0", 45.0)
    slow, second = perftest(random.Random(5601), 1, False, "mlx5_1", 20.0)
    yield "two-links", plain(fast + slow, None), [first, dict(second, result="slow")]


# --- epkit ---

def epkit_test(rng, total, style, failed=0):
    if style == 0:
        lines = [f"[{k + 1:{len(str(total))}}/{total}] bf16 random, top-k, sync ... " +
                 (f"passed {rng.randrange(1, 20)} ms" if k >= failed else "FAILED: row 3 of rank 1 differs")
                 for k in range(total)]
        lines.append(f"{total - failed}/{total} cases passed" + (f", {failed} failed" if failed else ""))
    else:
        document = {"schema_version": 1, "epkit": "0.1.0", "subcommand": "test", "matrix": "internode",
                    "result": "failed" if failed else "passed", "passed": total - failed, "failed": failed,
                    "total": total, "seconds": 0.5, "parameters": {"tokens": 64, "hidden": 512, "topk": 8,
                                                                   "experts": 64, "ranks": 4, "nodes": 2},
                    "cases": [{"index": k + 1, "name": "bf16 {random}, \"x\" [1]", "passed": k >= failed, "ms": 1.5,
                               "seed": 1} for k in range(total)], "errors": [], "repeat_commands": []}
        lines = json.dumps(document, indent=2 if style == 1 else None).split("\n")
    return lines, {"dialect": "epkit-test", "cases": (total - failed, total), "measures": {},
                   "result": "failed" if failed else "passed"}


def epkit_test_samples():
    yield from in_front(lambda rng: epkit_test(rng, 32, rng.randrange(3)))
    for i in range(PER_DIALECT):
        rng = random.Random(6000 + i)
        lines, expected = epkit_test(rng, rng.choice([24, 32]), i % 3, 2 if i % 5 == 2 else 0)
        if i % 8 == 6 and i % 3 == 0:
            lines = lines[:10]
            expected.update(cases=(10, expected["cases"][1]), result="failed")
        way = plain if i % 3 == 1 and i % 4 == 0 else WAYS[(3 * i) % len(WAYS)]
        if i % 3 and way is noisy:
            way = plain
        yield f"{i:02}", way(lines, rng), [expected]


def epkit_bench(rng, style):
    device = rng.choice(["host", "NVIDIA-H200"])
    rows, measures = [], {}
    for op, kind in (("dispatch", "bf16"), ("dispatch", "fp8"), ("combine", "bf16"), ("plan", ""),
                     ("ll-dispatch", "fp8"), ("ll-combine", "bf16")):
        time, rate = round(rng.uniform(10, 900), 1), round(rng.uniform(1, 400), 3)
        rows.append((op, kind, time, rate))
        if op != "plan":
            measures[(op, kind)] = {"time": time, "nvl": rate}
    if style == 0:
        lines = [f"{device}, 8 ranks: dispatch runs at 0.81 of memcpy.",
                 "ON   OP             TYPE RANKS TOKENS TIME us     P10     P90 LOGICAL GB/s WIRE GB/s x memcpy x alltoallv"]
        for op, kind, time, rate in rows:
            tail = "" if op == "plan" else f"        {rate:.3f}     {rate * 7 / 8:.3f}     0.81      123.76"
            lines.append(f"{device} {op:14} {kind:4}     8   4096   {time:.1f}   1.0  9.2{tail}")
    else:
        document = {"schema_version": 1, "epkit": "0.1.0", "subcommand": "bench", "verdict": "x", "device": device,
                    "parameters": {"tokens": [4096], "hidden": 7168, "topk": 8, "experts": 256, "ranks": [8], "nodes": 1},
                    "rows": [dict({"op": op, "type": kind, "ranks": 8, "tokens": 4096, "time_us": time},
                                  **({} if op == "plan" else {"logical_gbps": rate})) for op, kind, time, rate in rows]}
        lines = json.dumps(document, indent=2 if style == 1 else None).split("\n")
    return lines, {"dialect": "epkit-bench", "measures": measures, "result": "passed"}


def epkit_bench_samples():
    for i in range(PER_DIALECT):
        rng = random.Random(7000 + i)
        lines, expected = epkit_bench(rng, i % 3)
        way = WAYS[(3 * i) % len(WAYS)]
        if i % 3 and way is noisy:
            way = plain
        yield f"{i:02}", way(lines, rng), [expected]


DIALECTS = {"deepep-intranode": intranode_samples, "deepep-internode": internode_samples,
            "deepep-lowlatency": low_latency_samples, "deepep-v2": v2_samples, "nccl-tests": nccl_samples,
            "perftest": perftest_samples, "epkit-test": epkit_test_samples, "epkit-bench": epkit_bench_samples}


# --- comparison ---

def differs(what, got, wanted):
    if wanted is None and got is None:
        return []
    if isinstance(wanted, float) or isinstance(got, float):
        if got is not None and wanted is not None and abs(got - wanted) <= 1e-4 * max(1.0, abs(wanted)):
            return []
    elif got == wanted:
        return []
    return [f"{what}: {got}, expected {wanted}"]


KEYS = {"rdma": ("logical_gbps", "rdma"), "nvl": ("logical_gbps", "nvl"), "wire": ("wire_gbps", "rdma"),
        "bus": ("busbw_gbps",), "alg": ("algbw_gbps",), "time": ("time_us",), "notify": ("notify_us",),
        "epilogue": ("epilogue_us",), "bytes": ("bytes",), "sms": ("sms",), "nvl_chunk": ("nvl_chunk",),
        "rdma_chunk": ("rdma_chunk",), "count": ("count",)}


def compare_run(run, expected):
    wrong = []
    for key in ("dialect", "result", "nodes", "ranks", "writers", "wrong", "title", "device"):
        if expected.get(key) is not None:
            wrong += differs(key, "unknown" if run[key] is None else run[key], expected[key])
    if expected.get("tokens"):
        wrong += differs("tokens", run["settings"]["tokens"], expected["tokens"])
    if expected.get("average") is not None:
        wrong += differs("average", run["average_busbw_gbps"], float(f"{expected['average']:g}"))
    if expected.get("cases"):
        cases = run["cases"] or {"passed": None, "expected": None}
        wrong += differs("cases", (cases["passed"], cases["expected"]), expected["cases"])
    if expected.get("cause"):
        ids = [cause["id"] for cause in run["causes"]]
        if expected["cause"] not in ids:
            wrong.append(f"cause {expected['cause']} is not among {ids}")
    for name, values in expected["measures"].items():
        found = [m for m in run["measures"] if m["op"] == name[0] and m["type"] == name[1] and
                 (len(name) < 3 or m["config"] == name[2])]
        if len(found) != 1:
            wrong.append(f"{len(found)} measures {name}")
            continue
        for key, value in values.items():
            got = found[0]
            for step in KEYS[key]:
                got = got[step]
            wrong += differs(f"{name} {key}", got, value if not isinstance(value, int) or isinstance(got, int)
                             else float(value))
    return wrong


CODES = {"passed": 0, "failed": 1, "slow": 3}


def compare(epkit, text, runs):
    done = subprocess.run([epkit, "parse", "--json", "-"], input=text.encode("utf-8", "surrogateescape"),
                          capture_output=True, timeout=120, check=False)
    try:
        document = json.loads(done.stdout)
    except json.JSONDecodeError:
        return [f"no JSON, exit code {done.returncode}: {done.stderr.decode(errors='replace')}"]
    wrong = differs("number of runs", len(document["runs"]), len(runs))
    if not wrong:
        for i, (run, expected) in enumerate(zip(document["runs"], runs)):
            wrong += [f"run {i}: {text}" for text in compare_run(run, expected)]
    unreadable = sum(expected.get("unreadable", 0) for expected in runs)
    wrong += differs("unreadable", document["totals"]["unreadable"], unreadable)
    results = [expected["result"] for expected in runs]
    code = max((CODES[r] for r in results), key=lambda c: {0: 0, 3: 1, 1: 2}[c])
    return wrong + differs("exit code", done.returncode, code)


def check(epkit, dialect):
    samples = list(DIALECTS[dialect]())
    if len(samples) < 20:
        sys.exit(f"{dialect}: only {len(samples)} samples")
    with ThreadPoolExecutor(4) as pool:
        results = pool.map(lambda sample: compare(epkit, sample[1], sample[2]), samples)
    bad = 0
    for (name, _, _), wrong in zip(samples, results):
        for text in wrong:
            print(f"{dialect} {name}: {text}")
        bad += bool(wrong)
    print(f"{dialect}: {len(samples) - bad} of {len(samples)} samples as expected")
    return 1 if bad else 0


# The last line of a run contains this. The text of epkit's benchmark has no last line.
LAST = {"deepep-intranode": "Best combine", "deepep-internode": "Best combine", "deepep-lowlatency": "[rank ",
        "deepep-v2": "Testing with", "nccl-tests": "Avg bus bandwidth", "perftest": "-----",
        "epkit-test": " ... passed"}


def passes_cut(epkit, text, last):
    """Does a log pass without its last such line and what follows?"""
    lines = text.splitlines(keepends=True)
    end = max((i for i, line in enumerate(lines) if last in line), default=len(lines) // 2)
    data = "".join(lines[:end]).encode("utf-8", "surrogateescape")
    done = subprocess.run([epkit, "parse", "-"], input=data, capture_output=True, timeout=120, check=False)
    return done.returncode in (0, 3)


def cut(epkit, dialect):
    """Samples of one run without torn lines, because the torn part may be the end."""
    samples = [(name, text) for name, text, runs in DIALECTS[dialect]()
               if len(runs) == 1 and runs[0]["result"] == "passed" and not runs[0].get("unreadable")][:12]
    if len(samples) < 6:
        sys.exit(f"{dialect}: only {len(samples)} samples to cut")
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda sample: passes_cut(epkit, sample[1], LAST[dialect]), samples))
    for (name, _), passes in zip(samples, results):
        if passes:
            print(f"{dialect} {name}: passes without its end")
    return 1 if any(results) else 0


def main():
    if sys.argv[1:2] == ["list"]:
        print("\n".join(DIALECTS))
        return 0
    if sys.argv[1:2] == ["write"] and len(sys.argv) == 3:
        for dialect, make in DIALECTS.items():
            for name, text, _ in make():
                path = Path(sys.argv[2]) / f"{dialect}-{name}.log"
                path.write_bytes(text.encode("utf-8", "surrogateescape"))
        return 0
    if sys.argv[1:2] == ["check"] and len(sys.argv) == 4:
        return check(sys.argv[2], sys.argv[3])
    if sys.argv[1:2] == ["cut"] and len(sys.argv) == 4:
        return cut(sys.argv[2], sys.argv[3])
    sys.exit(__doc__)


if __name__ == "__main__":
    sys.exit(main())
