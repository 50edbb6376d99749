#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Logs as people post them, made from a seed; the verdict of each is known because of how it was made.

usage: forms.py EPKIT COUNT [SEED [DIR]]    # with DIR, keeps there what epkit says wrongly

A log is a program's output (PROGRAMS) of one or more writers, perhaps broken off by a failure (FAILURES) or cut, with lines
of other programs that mean nothing (CHATTER), merged line by line, prefixed by a launcher (LAUNCHERS), and pasted (PASTES).
The forms are those of public logs: each row names where it was seen; names and figures are made up. Nothing here was taken
from the parser.
"""
import json
import random
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import forms_failures
import forms_programs

CODES = {"passed": 0, "failed": 1, "slow": 3, "nothing": 4}


@dataclass
class Log:
    """What is written to files, and what has to be said of it."""
    files: list
    result: str
    headline: str = ""
    runs: int = None
    figures: dict = field(default_factory=dict)
    made_of: list = field(default_factory=list)


# --- launchers: prefix of a line of writer w of host h ---

def clock(rng):
    return f"{rng.randrange(24):02}:{rng.randrange(60):02}:{rng.randrange(60):02}"


LAUNCHERS = [
    ("none", lambda rng, w: ""),
    ("none again", lambda rng, w: ""),
    ("srun --label; NVIDIA/DeepEP pull 634", lambda rng, w: f"{w}: "),
    ("srun --label, padded; ufs-weather-model pull 907", lambda rng, w: f"{w:3d}: "),
    ("mpirun --tag-output; Open MPI 4 manual", lambda rng, w: f"[1,{w}]<stdout>:"),
    ("mpirun --output tag; Open MPI 5 manual", lambda rng, w: f"[prterun-host-{w}-713@1,{w}]<stdout>: "),
    ("kubectl logs --prefix", lambda rng, w: f"[pod/ep-{w}-x7k2p/worker] "),
    ("kubectl logs --prefix --timestamps", lambda rng, w: f"[pod/ep-{w}-x7k2p/worker] 2026-05-05T{clock(rng)}.2111544Z "),
    ("GitHub Actions; pytorch/torchtitan pull 3184", lambda rng, w: f"2026-05-05T{clock(rng)}.{rng.randrange(10**7):07}Z "),
    ("torchrun; pytorch/torchtitan pull 3184", lambda rng, w: f"[rank{8 * w}]:"),
    ("torchrun --role; PyTorch elastic", lambda rng, w: f"[default{8 * w}]:"),
    ("pdsh", lambda rng, w: f"gpu-{w}: "),
    ("docker compose", lambda rng, w: f"worker-{w}  | "),
    ("ray; Facico/Chinese-Vicuna", lambda rng, w: f"(Worker pid={4100 + w}, ip=10.0.0.{w + 4}) "),
    ("logging; DeepSpeed", lambda rng, w: f"[2026-04-19 {clock(rng)},{rng.randrange(1000):03}] [INFO] [run.py:93:log_dist] "),
    ("a job's captured output; huggingface/accelerate issue 1573", lambda rng, w: "stdout: "),
]


# --- how a log gets into an issue ---

def fenced(text, rng):
    return f"Here is what I get:\n```{rng.choice(['', 'bash', 'shell', 'log'])}\n{text}```\nAny idea?\n"


def quoted(text, rng):
    return "".join(f"> {line}\n" for line in text.splitlines())


def indented(text, rng):
    return "".join(f"    {line}\n" for line in text.splitlines())


def padded(text, rng):
    """The width of a terminal, as tmux copies it (uccl-project/uccl issue 684)."""
    return "".join(f"{line:<238}\n" for line in text.splitlines())


def windows(text, rng):
    return text.replace("\n", "\r\n")


def with_command(text, rng):
    command = rng.choice([
        "root@gpu-0:/workspace# python tests/test.py 2>&1 | tee run.log",
        "# mpirun --allow-run-as-root -np 16 --hostfile hosts -x NCCL_DEBUG=WARN ./run.sh",
        "+ srun --mpi=pmix -N 2 --gpus-per-node=8 ./run.sh",
        "(base) user@login:~/x$ MASTER_ADDR=10.0.0.1 WORLD_SIZE=2 RANK=0 python3 tests/test.py"])
    return f"{command}\n{text}"


def coloured(text, rng):
    return "".join(f"\x1b[36m{line}\x1b[0m\n" for line in text.splitlines())


def escaped(text, rng):
    """A '#' would begin a heading (pmodels/mpich issue 7601)."""
    return "".join(("\\" if line.startswith("#") else "") + line + "\n" for line in text.splitlines())


def as_is(text, rng):
    return text


PASTES = [as_is, as_is, as_is, fenced, quoted, indented, padded, windows, with_command, coloured, escaped]


# --- merging ---

def glued(lines, rng):
    """Two lines in one and an empty one behind them, as unbuffered ranks write (uccl-project/uccl pull 781)."""
    result, i = [], 0
    while i < len(lines):
        if i + 1 < len(lines) and lines[i].startswith("[rank ") and lines[i + 1].startswith("[rank ") and rng.random() < 0.3:
            result += [lines[i] + lines[i + 1], ""]
            i += 2
        else:
            result.append(lines[i])
            i += 1
    return result


def merge(parts, rng):
    """The lines of all writers as (writer, line): each in its order, a few lines of one at a time, up to each barrier."""
    at, result = [0] * len(parts), []

    def may_go(w):
        return at[w] < len(parts[w]) and parts[w][at[w]] is not None

    while any(at[w] < len(part) for w, part in enumerate(parts)):
        left = [w for w in range(len(parts)) if may_go(w)]
        if not left:
            at = [n + 1 for n in at]
            continue
        w = rng.choice(left)
        for _ in range(rng.randrange(1, 5)):
            if may_go(w):
                result.append((w, parts[w][at[w]]))
                at[w] += 1
    return result


def chatter(lines, rng, names, kinds):
    """Lines that mean nothing put before, between and behind; only whole lines, so that no line is torn."""
    blocks = [[line] for line in lines]
    for _ in range(rng.randrange(0, 4)):
        # Before a log of no test, an ssh that was refused may be why there is none.
        row = rng.choice([row for row in forms_failures.CHATTER if row.of & kinds or row.where == "any"])
        at = {"before": 0, "after": len(blocks), "any": rng.randrange(len(blocks) + 1)}[row.where]
        names.append(row.source)
        blocks.insert(at, [forms_failures.fill(line, rng) for line in row.lines])
    return [line for block in blocks for line in block]


# --- one log ---

def break_off(program, row, rng):
    """The output up to a line, then the failure; the other writers stop there too."""
    at = rng.randrange(0, program.end) if row.where == "any" else 0
    share = at / max(1, len(program.parts[0]))
    parts = [part[:int(share * len(part))] for part in program.parts]
    parts[0] = program.parts[0][:at]
    return parts, [forms_failures.fill(line, rng) for line in row.lines]


# What a document of each kind has near its beginning: without it the rest of one is of no known program.
KEYS = ['"nccl_version":', '"test_info":', "test_info:", '"#wrong":', '"subcommand": "test"', '"subcommand": "bench"']


def damaged(program, rng):
    """A file of JSON that was not written to its end, not at all, twice, or again after a part: its text, what is right, a name."""
    text = "".join(line + "\n" for line in program.parts[0])
    known = next(text.index(key) + len(key) for key in KEYS if key in text)
    ends = [i for i in range(known, len(text) - 2) if text[i - 1] not in "}\n" and not '{"#wrong":'.startswith(text[:i].split("\n")[-1])]
    how = rng.choice(["torn", "empty", "joined", "restarted"])
    if how == "empty":
        return rng.choice(["", "\n"]), "nothing", 1, {}, "an empty file"
    if how == "joined":
        return text.rstrip() + rng.choice(["", "\n"]) + text, program.result, 2, program.figures, "two files joined"
    part = text[:rng.choice(ends)]
    return part + ("\n" + text if how == "restarted" else ""), "failed", None, {}, f"a file {how}"


def one(seed):
    rng = random.Random(seed)
    program = rng.choice(forms_programs.PROGRAMS)(rng)
    names = [program.source]
    result, headline, runs, figures, tail = program.result, "", 1, program.figures, []
    parts = program.parts
    fate = rng.random()
    rows = [row for row in forms_failures.FAILURES if row.of & program.kinds]
    if fate < 0.4 and rows and program.result != "nothing":
        row = rng.choice(rows)
        parts, tail = break_off(program, row, rng)
        names.append(row.source)
        result, headline, runs, figures = "failed", row.headline, None, {}
    elif fate < 0.5 and program.cut:
        at = rng.randrange(program.begin, program.end)
        parts = [part[:int(at / len(program.parts[0]) * len(part))] for part in program.parts]
        parts[0] = program.parts[0][:at]
        result, figures, runs = "failed", {}, None
        names.append("cut at its end")
    name, prefix = rng.choice(LAUNCHERS if len(parts) == 1 or program.can_mix else LAUNCHERS[2:8])
    if program.whole:
        name, prefix = LAUNCHERS[0]
    names.append(name)
    if len(parts) > 1 and rng.random() < 0.3 and not tail:
        files = [[(w, line) for line in part if line is not None] for w, part in enumerate(parts)]
        names.append("a file of each node")
    else:
        files = [merge(parts, rng)]
    texts = []
    if program.whole and rng.random() < 0.4:
        text, result, runs, figures, how = damaged(program, rng)
        return Log([text], result, "", runs, figures, names + [how])
    for lines in files:
        lines = [(w, line) for w, line in lines] + [(0, line) for line in tail if lines is files[0]]
        if name.startswith("none"):
            plain = glued([line for _, line in lines], rng) if rng.random() < 0.3 else [line for _, line in lines]
            plain = plain if program.whole else chatter(plain, rng, names, program.kinds)
            texts.append("".join(line + "\n" for line in plain))
        else:
            texts.append("".join(prefix(rng, w) + line + "\n" for w, line in lines))
    paste = as_is if program.whole else rng.choice(PASTES)
    names.append(paste.__name__)
    return Log([paste(text, rng) for text in texts], result, headline, runs, figures, names)


# --- comparison ---

def wrongs(document, code, log):
    wrong = []
    if document["result"] != log.result:
        wrong.append(f"result {document['result']}, not {log.result}")
    if code != CODES[log.result]:
        wrong.append(f"exit code {code}, not {CODES[log.result]}")
    if log.headline and not re.search(log.headline, document["verdict"]):
        wrong.append(f"the headline lacks '{log.headline}'")
    if log.runs is not None and len(document["runs"]) != log.runs * (log.result != "nothing"):
        wrong.append(f"{len(document['runs'])} runs, not {log.runs}")
    found = {}
    for run in document["runs"]:
        for m in run["measures"]:
            for key in ("time_us", "busbw_gbps", "algbw_gbps"):
                found.setdefault((m["op"], key), []).append(m[key])
            for link in ("rdma", "nvl"):
                found.setdefault((m["op"], link), []).append(m["logical_gbps"][link])
    for key, value in log.figures.items():
        if not any(v is not None and abs(v - value) <= 0.002 * value + 0.006 for v in found.get(key, [])):
            wrong.append(f"{key} {value} is not in {found.get(key)}")
    return wrong


def check(epkit, seed, keep):
    log = one(seed)
    with tempfile.TemporaryDirectory() as folder:
        names = []
        for i, text in enumerate(log.files):
            names.append(f"{folder}/node-{i}.log")
            Path(names[-1]).write_text(text, encoding="utf-8", newline="")
        done = subprocess.run([epkit, "parse", "--json", *names], capture_output=True, timeout=120, check=False)
    try:
        document = json.loads(done.stdout)
        wrong = wrongs(document, done.returncode, log)
    except json.JSONDecodeError:
        document, wrong = {"verdict": ""}, [f"no JSON, exit code {done.returncode}: {done.stderr.decode(errors='replace')}"]
    if wrong and keep:
        for i, text in enumerate(log.files):
            (Path(keep) / f"{seed}-{i}.log").write_text(text, encoding="utf-8", newline="")
    return [f"log {seed} ({'; '.join(log.made_of)}): {'; '.join(wrong)}; it says: {document['verdict']}"] if wrong else []


def main():
    if len(sys.argv) not in (3, 4, 5):
        sys.exit(__doc__)
    first = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    keep = sys.argv[4] if len(sys.argv) > 4 else None
    seeds = range(first, first + int(sys.argv[2]))
    with ThreadPoolExecutor(2) as pool:
        wrong = [text for texts in pool.map(lambda seed: check(sys.argv[1], seed, keep), seeds) for text in texts]
    for text in wrong[:300]:
        print(text)
    print(f"{len(seeds) - len(wrong)} of {len(seeds)} logs from seed {first} as expected")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
