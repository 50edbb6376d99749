# SPDX-License-Identifier: Apache-2.0
"""The outputs that forms.py starts from: what each program prints when it succeeds, and other logs that are no test at all."""
import json
from dataclasses import dataclass, field

DEEPEP = "https://github.com/deepseek-ai/DeepEP/"
PERFTEST = "https://github.com/linux-rdma/perftest/"
PYTHON = frozenset(["python"])


@dataclass
class Program:
    """begin..end: lines before which a cut leaves a run that is seen to be incomplete; end is that of a failure too."""
    source: str
    kinds: frozenset
    parts: list                 # of each writer; None: a barrier, which all pass before any goes on
    figures: dict = field(default_factory=dict)
    result: str = "passed"
    begin: int = 1
    end: int = 0
    cut: bool = True
    can_mix: bool = False       # the lines of the writers can come without a prefix of each
    whole: bool = False         # a file of its own, such as JSON


# --- DeepEP V1, test_intranode.py and test_internode.py ---

def cases(kinds, passed):
    return [f"[testing] Running with {kind}, {top} top-k (async={a}, previous={p}) ...{passed}"
            for p in (False, True) for a in (False, True) for kind in kinds for top in ("without", "with")]


# Published: H800 (README), H20 (issue 137), H200 (a measurement), B200.
INTRANODE = [(153.2, 153.4, 158.1), (325.2, 336.8, 328.6), (316.9, 446.1, 355.5)]
INTERNODE = {2: [(43.2, 43.5, 43.1), (46.79, 67.62, 62.70), (70.5, 81.0, 75.0)], 4: [(58.1, 58.4, 57.2), (54.2, 57.5, 56.4)]}


def config(rng, groups):
    groups = f", num_topk_groups={groups}" if groups else ""
    return [f"[config] num_tokens={rng.choice([2048, 4096])}, hidden=7168{groups}, num_topk=8",
            f"[layout] Kernel performance: 0.0{rng.randrange(40, 80)} ms", ""]


def v1_intranode(rng):
    rates, style = rng.choice(INTRANODE), rng.randrange(3)
    kinds = ["BF16", "BF16", "FP8"]
    lines = config(rng, 0) + cases(kinds, " passed") + [""]
    for i, rate in enumerate(rates):
        time = f", {rng.uniform(300, 900):.2f} us" if style else " "
        lines += [f"[tuning] SMs 24, NVL chunk {n}: {rate * rng.uniform(.5, .99):.2f} GB/s (NVL){time}" for n in range(4, 16, 4)]
        if style == 2:
            lines.append(f"[tuning] SMs 24, NVL chunk default: {rate * .6:.2f} GB/s (NVL){time}")
        head = "Best combine" if i == 2 else f"Best dispatch ({('FP8', 'BF16')[i]})"
        end = f", t: {rng.uniform(300, 900):.2f} us" if style else ""
        lines += [f"[tuning] {head}: SMs 24, NVL chunk {rng.randrange(2, 32)}{':' if i == 2 else ','} {rate:.2f} GB/s (NVL){end}", ""]
    return Program(DEEPEP + "blob/main/tests/test_intranode.py, README.md", PYTHON | {"v1"}, [lines[:-1]],
                   {("dispatch", "nvl"): rates[1], ("combine", "nvl"): rates[2]}, begin=3, end=len(lines) - 3)


def v1_internode(rng):
    nodes = rng.choice([2, 2, 4])
    style, one_nic = rng.randrange(4), nodes == 2 and rng.random() < 0.2
    passed = "" if rng.random() < 0.2 else " passed"
    base = tuple(4.5 * rng.uniform(.95, 1.05) for _ in range(3)) if one_nic else rng.choice(INTERNODE[nodes])
    parts = []
    for _ in range(rng.choice([1, 1, 2])):
        lines = config(rng, min(nodes, 4)) if not parts else parts[0][:3]
        lines = lines + [None] + cases(["BF16", "BF16", "FP8"], passed) + ["", None]
        for i in range(3):
            rdma = base[i] * rng.uniform(.99, 1.01)
            rates = [f"{rdma * f:.2f} GB/s (RDMA), {rdma * f * {2: 3.27, 4: 2.01}[nodes]:.2f} GB/s (NVL)" for f in (.5, .8, .9, 1)]
            notify, time = rng.uniform(12, 80), rng.uniform(900, 1900)
            chunk = f"SMs 24, NVL chunk {rng.randrange(4, 44, 4)}, RDMA chunk {rng.randrange(4, 32, 4)}"
            forms = [lambda r: f"{chunk}: {r}", lambda r: f"{chunk}: {notify:.0f} + {time:.0f} us, {r}",
                     lambda r: f"{chunk}, transmit: {time:.2f} us, notify: {notify:.2f} us, BW: {r}",
                     lambda r: f"{chunk}, {notify:.2f} + {time:.2f} us, {r}"]
            sweep = forms[2 if style == 2 else 0]
            lines += [f"[tuning] {sweep(r)} " for r in rates[:3]]
            head = "Best combine" if i == 2 else f"Best dispatch ({('FP8', 'BF16')[i]})"
            lines += [f"[tuning] {head}: {forms[style](rates[3])}", "", None]
        parts.append(lines[:-2])
    return Program(DEEPEP + "issues/60, /223, https://github.com/uccl-project/uccl/pull/441", PYTHON | {"v1"}, parts,
                   result="slow" if one_nic else "passed", begin=3, end=len(parts[0]) - 2)


# --- DeepEP V1, test_low_latency.py ---

def low_latency(rng):
    nodes = rng.choice([1, 1, 2])
    time, rate = {1: ((77, 114), (98, 127)), 2: ((118, 195), (63, 74))}[nodes]
    kinds = rng.choice([(0, 1, 2), (0, 1, 2), (0, 1), (1,)])
    if nodes == 2 and rng.random() < 0.3:
        shown = range(0, 8)     # the log of one node
    else:
        shown = range(0, 8 * nodes)
    parts = []
    slowest = 0
    for first in range(0, len(shown), 8):
        lines = ["Allocating buffer size: 2116.291072 MB ..."] if kinds == (0, 1, 2) else []  # else a similar program
        for kind in kinds:
            lines.append(None)
            ranks = list(shown[first:first + 8])
            rng.shuffle(ranks)
            for r in ranks:
                d, c = (t * rng.uniform(.98, 1.02) for t in time)
                if kind == 0:
                    text = (f"Dispatch + combine bandwidth: {rate[1]:.2f} GB/s, avg_t={d + c:.2f} us, min_t={d + c - 9:.2f} us, "
                            f"max_t={d + c + 20:.2f} us")
                elif kind == 1:
                    slowest = max(slowest, round(d, 2))
                    text = (f"Dispatch bandwidth: {rate[0]:.2f} GB/s, avg_t={d:.2f} us | Combine bandwidth: {rate[1]:.2f} GB/s, "
                            f"avg_t={c:.2f} us")
                else:
                    text = (f"Dispatch send/recv time: {d / 3:.2f} + {d / 9:.2f} us | Combine send/recv time: {c / 3:.2f} + "
                            f"{c / 9:.2f} us")
                lines.append(f"[rank {r}] {text}")
        parts.append(lines)
    return Program(DEEPEP + "issues/28, /148, https://github.com/uccl-project/uccl/pull/522, /723", PYTHON | {"ll"}, parts,
                   {("dispatch", "time_us"): slowest}, begin=len(parts[0]) - 6, end=len(parts[0]) - 1, cut=len(parts) == 1,
                   can_mix=True)


# --- DeepEP V2, tests/elastic/test_ep.py ---

def v2(rng):
    nodes, local = rng.choice([(1, 2), (1, 8), (2, 8)])
    ranks, us = nodes * local, {}
    lines = ["Config:", f" > Ranks: {nodes} x {local}", " > Experts: 8/256", " > Tokens: 4096 (max: 4096), hidden: 7168",
             " > #SM: 24, #QPs: 129/129", "", "Running all test cases:",
             " > Testing with do_handle_copy=1, expert_alignment=128, use_fp8_dispatch=1, num_bias=0, with_previous_event=0, "
             "async_with_compute_stream=0, allocate_on_comm_stream=0 ..."]
    begin = len(lines)
    for mark, op in zip("*-#@+", ("dispatch", "expanded dispatch", "cached dispatch", "combine", "reduced combine")):
        order = list(range(ranks))
        rng.shuffle(order)
        for r in order:
            so, su, t = (rng.randrange(88, 93) if nodes > 1 else 0), rng.randrange(560, 600), rng.uniform(300, 320)
            us[op] = max(us.get(op, 0), round(t, 3))
            last = "reduce" if "combine" in op else "copy"
            lines.append(f"   {mark} EP: {r:3}/{ranks} | {op}: {so} GB/s (SO), {su} GB/s (SU), {t:.3f} us, 401408000 bytes | "
                         f"{last}: 1648 GB/s, 61.250 us")
    return Program("https://github.com/awslabs/awsome-distributed-ai/pull/1234, case v2-two-h200-healthy", PYTHON | {"v2"}, [lines],
                   {("dispatch", "time_us"): us["dispatch"], ("combine", "time_us"): us["combine"]}, begin=begin,
                   end=len(lines) - 1)


# --- nccl-tests and rccl-tests ---

# program, ranks, of a node, GPU, GB/s of the bus at the largest size
COLLECTIVES = [("all_reduce_perf", 8, 8, "NVIDIA H200", 478), ("all_gather_perf", 16, 8, "NVIDIA H200", 359),
               ("alltoall_perf", 8, 8, "NVIDIA H200", 338), ("all_reduce_perf", 72, 4, "NVIDIA Graphics Device", 834),
               ("all_reduce_perf", 8, 8, "AMD Instinct MI300X", 310), ("all_reduce_perf", 8, 8, "NVIDIA A100-SXM4-80GB", 231)]


def collective(rng):
    name, ranks, local, gpu, peak = rng.choice(COLLECTIVES)
    version, check = rng.choice(["old", "2017", "2.17", "2.20", "rccl"]), rng.random() < 0.7
    each, stamps = version == "2.20" and rng.random() < 0.5, rng.random() < 0.2
    small = rng.random() < 0.2           # only small messages: their rate says nothing of the links
    wrong = 5 if check and rng.random() < 0.1 else 0
    top = 1 << (20 if small else 34)
    lines = []
    if version in ("2.17", "2.20"):
        lines += [f"# nccl-tests version {version}.0 nccl-headers=23007 nccl-library=23007"]
    if version in ("2.17", "2.20", "rccl"):
        lines += [f"# Collective test starting: {name}"]
    lines += [f"# nThread 1 nGpus {local} minBytes 1024 maxBytes {top} step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1 "
              f"validation: {int(check)} graph: 0", "#"]
    lines += ["rccl-tests: Version develop:83d38d9"] if version == "rccl" else []
    lines += ["# Per-Iteration Report: CUDA event timing; i_* uses max over process rows "] if each else []
    lines += ["# Using devices"]
    for r in range(ranks):
        group = "" if version in ("old", "2017") else " Group  0"
        lines.append(f"#  Rank {r:2}{group} Pid {37300 + r:6} on {'gpu-' + str(r // local):>10} device {r % local:2} "
                     f"[0000:{5 + r % local:02x}:00] {gpu}")
    per = "    i_min    i_max    i_p99    i_cv%" if each else ""
    header = "  error" if version == "2017" else " #wrong" if version != "2.20" else "  #wrong"
    lines += ["#", "#" + " " * 62 + "out-of-place" + " " * 23 + "in-place          ",
              f"#       size         count      type   redop    root     time   algbw   busbw{header}{per}     time   algbw   busbw"
              f"{header}{per}" + (" " * 12 + "timestamp" if stamps else ""),
              "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)       "]
    best, size = 0, 1024
    op = name.removesuffix("_perf") if version in ("2.17", "2.20", "rccl") else "collective"  # not printed before
    factor = 2 * (ranks - 1) / ranks if name.startswith("all_reduce") else (ranks - 1) / ranks
    while size <= top:
        row = f"{size:12d}  {size // 4:12d}  {'float':>8}  {'sum' if name.startswith('all_reduce') else 'none':>6}  {-1:6d}"
        for _ in range(2):
            bus = peak * size / (size + 3e7) * rng.uniform(.995, 1)
            alg = bus / factor
            bad = f"{'2e-07' if version == '2017' else (wrong if size == top else 0):>6}" if check else "   N/A"
            time = f"{size / alg / 1e3:7.2f}"[:7]
            row += f"  {time}  {alg:6.2f}  {bus:6.2f}  {bad}"
            row += f"  {time}  {time}  {time}     1.21" if each else ""
            best = max(best, round(bus, 2))
        lines.append(row + ("  2026-05-21 15:43:03" if stamps else ""))
        size *= 2
    bad = wrong and version != "2017"
    lines += [f"# Out of bounds values : {1 if bad else 0} {'FAILED' if bad else 'OK'}", f"# Avg bus bandwidth    : {peak / 3:g} ", "#"]
    lines += [f"# Collective test concluded: {name}", "#"] if version in ("2.17", "2.20") else [""]
    average = next(i for i, line in enumerate(lines) if line.startswith("# Avg"))
    return Program("https://github.com/NVIDIA/nccl-tests src/util.cu; https://github.com/ROCm/container-toolkit/pull/77; "
                   "https://github.com/coreweave/nccl-tests/pull/43", frozenset(["nccl", "mpi"]), [lines],
                   {(op, "busbw_gbps"): best}, "failed" if bad else "passed", begin=4, end=average)


def collective_json(rng):
    """nccl-tests -J (src/util.cu, version 2 of the file)."""
    name, ranks, local, gpu, peak = rng.choice(COLLECTIVES)
    rows, wrong = [], 3 if rng.random() < 0.2 else 0
    for size in (1 << n for n in range(10, 35)):
        bus = peak * size / (size + 3e7)
        row = {"time": size / bus / 1e3, "alg_bw": bus / 1.75, "bus_bw": bus, "nwrong": float(wrong if size == 1 << 34 else 0)}
        rows.append({"size": size, "count": size // 4, "type": "float", "redop": "sum", "root": "    -1", "out_of_place": row,
                     "in_place": dict(row), "actual_iterations": 20, "experiment_name": name})
    document = {"version": 2, "start_time": "2026-05-21 15:43:03", "args": [f"./build/{name}", "-g", "8"], "env": ["A=b"],
                "nccl_version": 23007,
                "config": {"nthreads": 1, "ngpus": local, "minimum_bytes": 1024, "maximum_bytes": 1 << 34, "validation": 1,
                           "devices": [{"rank": r, "group": 0, "pid": 37300 + r, "hostname": f"gpu-{r // local}",
                                        "device": r % local, "device_hex": "0000:05:00", "device_info": gpu}
                                       for r in range(ranks)]},
                "results": rows, "out_of_bounds": {"count": wrong, "okay": "false" if wrong else "true"},
                "average_bus_bandwidth": {"bandwidth": peak / 3, "okay": "unchecked"}, "errors": [""],
                "end_time": "2026-05-21 15:44:03"}
    text = json.dumps(document, separators=(",", ":")) if rng.random() < 0.7 else json.dumps(document, indent=1)
    return Program("https://github.com/NVIDIA/nccl-tests src/util.cu", frozenset(), [text.splitlines()],
                   {(name.removesuffix("_perf"), "busbw_gbps"): rows[-1]["in_place"]["bus_bw"]}, "failed" if wrong else "passed",
                   cut=False, whole=True)


def rccl_json(rng):
    """rccl-tests --output_file (ROCm/rccl-tests pull 93): a line of JSON of each size and place."""
    lines = []
    for size in (1 << n for n in range(10, 35, 2)):
        bus = round(310 * size / (size + 3e7), 6)
        lines += [json.dumps({"#wrong": "0", "algBw": bus / 1.75, "busBw": bus, "gpus": 8, "inPlace": p, "name": "AllReduce",
                              "redop": "sum", "size": size, "time": size / bus / 1e3, "type": "float"}) for p in (0, 1)]
    return Program("https://github.com/ROCm/rccl-tests/pull/93", frozenset(), [lines], {("all_reduce", "busbw_gbps"): bus},
                   cut=False, whole=True)


# --- perftest ---

def perftest_header(rng, title, gbits):
    return ["-" * 87, f"                    {title}", f" Dual-port       : OFF\t\tDevice         : mlx5_{rng.randrange(8)}",
            " Number of qps   : 1\t\tTransport type : IB", " Connection type : RC\t\tUsing SRQ      : OFF",
            " PCIe relax order: ON", " ibv_wr* API     : ON", " TX depth        : 128", " CQ Moderation   : 1",
            " Mtu             : 4096[B]", " Link type       : Ethernet", " GID index       : 3", " Max inline data : 0[B]",
            " rdma_cm QPs\t : OFF", " Data ex. method : Ethernet", "-" * 87,
            " local address: LID 0000 QPN 0x27d8 PSN 0x79f042", " GID: 00:00:00:00:00:00:00:00:00:00:255:255:10:00:01:39",
            " remote address: LID 0000 QPN 0x1c901 PSN 0x6726b1", " GID: 00:00:00:00:00:00:00:00:00:00:255:255:10:00:01:06",
            "-" * 87]


def perftest_bandwidth(rng):
    rate = rng.choice([45.1, 48.6, 24.3, 12.1])                       # of 400, 200 and 100 Gb/s
    unit = rng.choice(["MB/sec", "MiB/sec", "Gb/sec"])
    duration = rng.random() < 0.3
    lines = perftest_header(rng, rng.choice(["RDMA_Write BW Test", "RDMA_Read BW Test", "Send Bidirectional BW Test"]), unit)
    if duration:
        lines.insert(0, " WARNING: BW peak won't be measured in this run.")
    if rng.random() < 0.3:
        lines[:0] = ["", "*" * 36, "* Waiting for client to connect... *", "*" * 36]
    lines.append(f" #bytes     #iterations    BW peak[{unit}]    BW average[{unit}]   MsgRate[Mpps]")
    for size in rng.choice([[65536], [1 << n for n in range(1, 24)]]):
        gb = rate * size / (size + (0 if size == 65536 else 4000))
        value = gb * 8 if unit == "Gb/sec" else gb * 1e9 / 1048576
        lines.append(f" {size:<10} {5000:<16} {0 if duration else value:<19.2f}{value:.2f}  \t\t   {gb * 1e9 / size / 1e6:.6f}")
    lines.append("-" * 87)
    return Program("https://github.com/linux-rdma/perftest/pull/342, /issues/132", frozenset(["perftest"]), [lines],
                   begin=next(i for i, line in enumerate(lines) if line.endswith(" Test")) + 1, end=len(lines) - 1)


def perftest_latency(rng):
    lines = perftest_header(rng, "RDMA_Write Latency Test", "")
    lines += [" #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   "
              "99% percentile[usec]   99.9% percentile[usec] ",
              " 2       1000          1.91           4.12         1.94              1.95             0.06            2.10"
              "                    4.12", "-" * 87]
    return Program("https://github.com/linux-rdma/perftest", frozenset(["perftest"]), [lines], begin=3, end=len(lines) - 1)


def perftest_json(rng):
    rate, factor = rng.choice([390.2, 195.1, 97.4]), rng.choice([1, 1e9 / 8 / 1048576])   # Gb/s or MiB/s
    document = {"test_info": {"test": "RDMA_Write_BW_Test", "Dual_port": "OFF", "Device": "mlx5_3", "Number_of_qps": 1,
                              "Transport_type": "IB", "Connection_type": "RC", "Mtu": 4096, "Link_type": "Ethernet"},
                "results": {"MsgSize": 65536, "n_iterations": 5000, "BW_peak": round(rate * factor, 2), "BW_average": round(rate * factor, 2),
                            "MsgRate": round(rate * 1e3 / 8 / 65536, 6)}}
    text = "\n".join(["{", '"test_info": ' + json.dumps(document["test_info"], indent=0) + ",",
                      '"results": ' + json.dumps(document["results"], indent=0), "}"])
    return Program("https://github.com/linux-rdma/perftest/pull/322", frozenset(), [text.splitlines()],
                   {("write", "rdma"): rate / 8}, cut=False, whole=True)


def perftest_bare_json(rng):
    """--out_json of 2023: no quotes, and commas before brackets."""
    name, key = rng.choice([("Write", "write"), ("Read", "read")])
    us = round(rng.uniform(1, 6), 2)
    text = (f"{{\ntest_info: {{\ntest: RDMA_{name}_Latency_Test,\nDual_port: OFF,\nDevice: \"mlx5_2\",\nTX_depth : 1,\nMtu: 1024,\n}},\n"
            f"results: {{\nMsgSize: 128,\nn_iterations: 5000,\nt_min: {us - .1:.2f},\nt_max: {us + 3:.2f},\nt_typical: {us},\nt_avg: {us},\n"
            f"t_stdev: 0.05,\npercentile_99: 2.47,\npercentile_99.9: 4.03,\n}},\n}}")
    return Program(PERFTEST + "issues/216", frozenset(), [text.splitlines()], {(f"{key} latency", "time_us"): us}, cut=False, whole=True)


def own_json(rng):
    """epkit test and epkit bench --json, on one line or many."""
    if rng.random() < 0.5:
        bad = rng.random() < 0.3
        cases = [{"index": i, "name": f"bf16 {i}", "passed": not (bad and i == 3), "detail": "row {7}"} for i in range(1, 25)]
        document, figures = {"subcommand": "test", "matrix": "intranode", "total": 24, "passed": 24 - bad, "failed": int(bad), "cases": cases}, {}
    else:
        bad, us = False, round(rng.uniform(200, 900), 1)
        rows = [{"op": op, "type": "bf16", "ranks": 8, "tokens": 4096, "time_us": us, "logical_gbps": 321.5} for op in ("dispatch", "combine")]
        document, figures = {"subcommand": "bench", "device": "cuda", "rows": rows}, {("dispatch", "time_us"): us}
    text = json.dumps({"schema_version": 1, "epkit": "0.1.0", **document}, indent=rng.choice([None, 2]))
    return Program("cmd/test/schema.json, cmd/bench/schema.json", frozenset(), [text.splitlines()], figures, "failed" if bad else "passed",
                   cut=False, whole=True)


# --- other programs for expert parallelism, and others ---

def ep_bench(rng):
    """NCCL EP's ep_bench: both modes."""
    ranks = rng.choice([4, 8, 16])
    d, c = round(rng.uniform(70, 90), 2), round(rng.uniform(100, 120), 2)
    high = rng.random() < 0.5
    mode = "HIGH_THROUGHPUT" if high else "LOW_LATENCY"
    lines = ["=== NCCL EP Performance Benchmark ===", "Configuration:", f"  Algorithm:       {mode}", f"  Ranks:           {ranks}",
             "  Tokens:          4096" if high else "  Tokens:          128", "  Hidden:          7168", "  Top-k:           8",
             f"  Experts:         256 (local: {256 // ranks})", ""]
    if high:
        kind = rng.choice(["BF16", "FP8", "recipe none"])
        lines += [f"=== Summary (High Throughput {kind}, across {ranks} ranks) ===",
                  "NOTE: total time = kernel time + memcpyD2D + misc", "--- BW based on total time ---",
                  f"Dispatch:    total={d:.2f} us (min={d - 3:.2f}, max={d + 3:.2f})",
                  f"             recv: total_bw={28000 / d:.2f}  nvl_bw={18000 / d:.2f}  rdma_bw={10000 / d:.2f} GB/s",
                  f"             send: total_bw={28000 / d:.2f}  nvl_bw={18000 / d:.2f}  rdma_bw={10000 / d:.2f} GB/s",
                  f"Combine:     total={c:.2f} us (min={c - 3:.2f}, max={c + 3:.2f})",
                  f"             send: total_bw={28000 / c:.2f}  nvl_bw={18000 / c:.2f}  rdma_bw={10000 / c:.2f} GB/s",
                  f"Total (D+C): avg={d + c:.2f} us, min={d + c - 6:.2f} us, max={d + c + 6:.2f} us"]
    else:
        lines += [f"=== Summary (Low Latency, across {ranks} ranks) ===", "", "--- Host-observed performance ---",
                  f"Dispatch (BF16):  avg={d:.2f} us, min={d - 3:.2f} us, max={d + 3:.2f} us",
                  "                  throughput: avg=77.78 GB/s, min=75.32 GB/s (rank 2), max=80.20 GB/s (rank 1)",
                  f"Combine (BF16):   avg={c:.2f} us, min={c - 3:.2f} us, max={c + 3:.2f} us",
                  "                  throughput: avg=54.88 GB/s, min=53.84 GB/s (rank 1), max=55.88 GB/s (rank 2)",
                  f"Total (D+C):      avg={d + c:.2f} us, min={d + c - 6:.2f} us, max={d + c + 6:.2f} us",
                  "                  throughput: avg=62.42 GB/s, min=62.34 GB/s (rank 2), max=62.40 GB/s (rank 3)"]
    bad = rng.random() < 0.15
    lines.append(f"Global validation: Dispatch={'FAILED' if bad else 'PASSED'}, Combine=PASSED")
    return Program("https://github.com/NVIDIA/nccl contrib/nccl_ep/ep_bench.cu, https://github.com/NVIDIA/nccl/pull/2067",
                   frozenset(["mpi"]), [lines], {} if bad else {("dispatch", "time_us"): d, ("combine", "time_us"): c},
                   "failed" if bad else "passed", begin=5, end=10)


def hybrid_ep(rng):
    """test_hybrid_ep.py of DeepEP's branch hybrid-ep."""
    ranks, nodes = rng.choice([(8, 1), (16, 2), (32, 4)])
    lines = []
    rates = {}
    for kind in ("BF16", "FP8"):
        lines += ["", f"=== Correctness Check ({kind}, {ranks} ranks) ===", "  dispatch+combine API: PASS",
                  "  dispatch_with_permute + combine_with_unpermute API (non-fused): PASS",
                  "  dispatch_with_permute + combine_with_unpermute API (fused): PASS", "",
                  f"=== Torch API Benchmark ({kind}, {ranks} ranks) ===", "  Non-permute:  dispatch = dispatch_kernel + d2d + misc",
                  "  (misc = device_sync, update_flag, etc.)"]
        for op in (f"dispatch ({kind})", "combine", f"dispatch+permute ({kind})", "combine+unpermute"):
            t = rng.uniform(1700, 1900)
            nvl = round(rng.uniform(140, 220), 2)
            rates.setdefault(op.split(" ")[0], nvl)
            for link, rate in (("NVL", nvl), ("RDMA", nvl / 3))[:1 + (nodes > 1)]:
                lines.append(f"{op + ':':<48} {rate:.2f} GB/s ({link}), t: {t:.1f} us [min={t - 1:.1f}, max={t + 1:.1f}], "
                             f"nvl_recv_bytes: 393.84 MB")
        lines += ["", f"=== Kernel Benchmark ({kind}, {ranks} ranks) ===", "  Non-fused:  dispatch_kernel only  |  combine_kernel only"]
        for op in (f"dispatch kernel ({kind})", "combine kernel"):
            for link in ("NVL", "RDMA")[:1 + (nodes > 1)]:
                lines.append(f"{op + '(' + link + '):':<48} {rng.uniform(140, 220):.2f} GB/s, avg_t=2638.9 us [min=2609.0, max=2671.0]")
    end = next(i for i, line in enumerate(lines) if line.startswith("combine:"))
    return Program(DEEPEP + "issues/590, /pull/588, /pull/634", PYTHON, [lines], {("combine", "nvl"): rates["combine"]},
                   begin=3, end=end)


def ascend(rng):
    """The tests of DeepEP's interface on NPUs: no cases, no SMs."""
    kind, rdma = rng.choice(["BF16", "FP8"]), rng.random() < 0.5
    us = [round(rng.uniform(700, 14000), 2) for _ in range(2)]
    link = " 8.80 GB/s (RDMA)," if rdma else ""
    lines = [f"[tuning] Dispatch ({kind}) 35.30 GB/s (HCCS),{link} avg_t: {us[0]:.2f} us" + (", notify_t: 2555.80 us" if rdma else ""), "",
             f"[tuning] Combine 52.56 GB/s (HCCS),{link} avg_t: {us[1]:.2f} us"]
    return Program("https://github.com/sgl-project/sgl-kernel-npu/pull/193", PYTHON, [lines],
                   {("dispatch", "time_us"): us[0], ("combine", "time_us"): us[1]}, begin=1, end=2)


def mori(rng):
    """MoRI's test_dispatch_combine_internode.py --cmd bench: the tables of prettytable."""
    d, c = rng.randrange(55, 60), rng.randrange(60, 70)
    lines = ["WarmUp Round 0 begin"]
    for i in range(3):
        lines += [f"Round {i}", "  dispatch duration [1071, 1069] avg 1070.00 µs", "  rdma bandwidth [55, 55] avg 55.00 GB/s"]
    for op, rdma in (("Dispatch", d), ("Combine", c)):
        bar = "+" + "-" * 9 + "+" + "-" * 23 + "+" + "-" * 23 + "+" + "-" * 21 + "+" + "-" * 14 + "+"
        lines += ["+" + "-" * 94 + "+", f"|{op + ' Performance':^94}|", bar,
                  "| Metrics | RDMA Bandwidth (GB/s) | XGMI Bandwidth (GB/s) | LL Bandwidth (GB/s) | Latency (us) |", bar]
        for row, f in (("Best", 1), ("Worst", 0.8), ("Average", 0.9)):
            lines.append(f"|{row:^9}|{int(rdma * f):^23}|{int(rdma * f * 3):^23}|{int(rdma * f * 5):^21}|{int(60000 / rdma / f):^14}|")
        lines.append(bar)
    end = max(i for i, line in enumerate(lines) if "Combine Performance" in line)
    return Program("https://github.com/ROCm/mori examples/ops/dispatch_combine/test_dispatch_combine_internode.py", PYTHON, [lines],
                   {("dispatch", "rdma"): int(d * .9), ("combine", "rdma"): int(c * .9)}, begin=4, end=end)


def osu(rng):
    """OSU micro-benchmarks: a title and a table; there is no last line."""
    title, op = rng.choice([
        ("All-to-All Personalized Exchange Latency", "osu_alltoall"), ("All-to-Allv Personalized Exchange Latency", "osu_alltoallv"),
        ("Allreduce Latency", "osu_allreduce"), ("Allgather Latency", "osu_allgather"), ("Broadcast Latency", "osu_bcast"),
        ("Reduce_scatter Latency", "osu_reduce_scatter"), ("Latency", "osu_latency"), ("Bandwidth", "osu_bw"),
        ("Bi-Directional Bandwidth", "osu_bibw"), ("Multiple Bandwidth / Message Rate", "osu_mbw_mr")])
    title = f"OSU MPI{rng.choice(['', '-CUDA'])} {title} Test v7.5"
    key, column = ("algbw_gbps", "Bandwidth (MB/s)") if "Bandwidth" in title else ("time_us", "Avg Latency(us)")
    valid = op != "osu_mbw_mr" and rng.random() < 0.3
    bad = valid and rng.random() < 0.3
    # With -f and -z: minimum, maximum, iterations and percentiles (pmodels/mpich issue 7601).
    tail = rng.choice(["", "".join(f"{v:>18}" for v in ("460.43", "474.05", "1000", "407.18", "584.22", "634.30"))]) if key == "time_us" else ""
    lines = [f"# {title}", "# Datatype: MPI_CHAR.", f"# Size       {column}" + ("        Validation" if valid else "")]
    for n in range(21):
        value = 22 + (1 << n) / 2200 if key == "time_us" else 20000 * (1 << n) / ((1 << n) + 9000)
        lines.append(f"{1 << n:<10}{value:>18.2f}" + (f"{'Fail' if bad and n == 20 else 'Pass':>18}" if valid else f"{1e9 / (1 << n):>18.2f}" if op == "osu_mbw_mr" else tail))
    figures = {} if bad else {(op, key): round(value, 2) / (1000 if key == "algbw_gbps" else 1)}
    return Program("https://github.com/eth-cscs/cscs-docs (osu_alltoall, --validation)", frozenset(["mpi"]), [lines], figures,
                   "failed" if bad else "passed", cut=False, end=len(lines) - 1)


def nccom(rng):
    bus = round(rng.uniform(38, 44), 2)
    lines = ["     size(B)    count(elems)     type    time(us)    algbw(GB/s)    busbw(GB/s)",
             f"    33554432        33554432    uint8         768          {bus:.2f}          {bus:.2f}",
             f"Avg bus bandwidth:      {bus:.4f}GB/s"]
    return Program("https://awsdocs-neuron.readthedocs-hosted.com/en/v2.29.0/tools/neuron-sys-tools/nccom-test.html", frozenset(["mpi"]),
                   [lines], {("nccom-test", "busbw_gbps"): bus}, begin=1, end=2)


UNKNOWN = [
    ["INFO 01-20 04:21:21 [api_server.py:1281] vLLM API server version 0.33.0",
     "INFO 01-20 04:21:26 [cuda_communicator.py:81] Using DeepEP low-latency all2all manager.",
     "INFO:     Application startup complete."],
    [" iteration       10/     100 | consumed samples:         2560 | elapsed time per iteration (ms): 4711.3 | loss: 1.1E+01 |",
     " iteration       20/     100 | consumed samples:         5120 | elapsed time per iteration (ms): 4700.1 | loss: 1.0E+01 |"],
    ["[  5]   0.00-1.00   sec  11.0 GBytes  94.1 Gbits/sec    0   3.01 MBytes", "iperf Done."],
    ["|   0  NVIDIA H200                    On  |   00000000:8F:00.0 Off |                    0 |", "| N/A   31C    P0             76W / 700W |"],
    ["Building wheels for collected packages: deep_ep", "  Building wheel for deep_ep (setup.py): finished with status 'done'",
     "Successfully installed deep_ep-1.2.1"],
]


def unknown(rng):
    return Program("logs of other programs: vLLM, Megatron, iperf3, nvidia-smi, pip", frozenset(["none"]), [list(rng.choice(UNKNOWN))],
                   result="nothing", cut=False)


PROGRAMS = [v1_intranode, v1_internode, v1_internode, low_latency, low_latency, v2, v2, collective, collective, collective,
            collective_json, rccl_json, perftest_bandwidth, perftest_latency, perftest_json, perftest_bare_json, own_json, ep_bench,
            hybrid_ep, ascend, mori, osu, nccom, unknown]
