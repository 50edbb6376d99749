#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# epkit parse: samples of every dialect, prefixes and ends of files, exit codes, comparison, folders.
#
# shellcheck disable=SC2154,SC2030,SC2031 # $stderr is set by run; a test changes nothing for others

# bats file_tags=once
load common

SAMPLES="$EPKIT_SOURCE/tests/parse/samples.py"
# With sanitizers the command is told some of the rows and forms: the fuzz target fuzz_parse reads all of them there, in one
# process, and what is said of each is compared without.
EVERY=1
[ -z "${EPKIT_SANITIZED-}" ] || [ -n "${EPKIT_TEST_LONG-}" ] || EVERY=8

samples() {
    run -0 python3 -S "$SAMPLES" check "$EPKIT" "$1"
}

@test "samples: deepep-intranode" { samples deepep-intranode; }
@test "samples: deepep-internode" { samples deepep-internode; }
@test "samples: deepep-lowlatency" { samples deepep-lowlatency; }
@test "samples: deepep-v2" { samples deepep-v2; }
@test "samples: nccl-tests" { samples nccl-tests; }
@test "samples: perftest" { samples perftest; }
@test "samples: epkit-test" { samples epkit-test; }
@test "samples: epkit-bench" { samples epkit-bench; }

@test "documents of all kinds of runs fit the schema" {
    mkdir "$BATS_TEST_TMPDIR/logs"
    python3 -S "$SAMPLES" write "$BATS_TEST_TMPDIR/logs"
    epkit parse --json "$BATS_TEST_TMPDIR"/logs/*0[0-7]*.log >"$BATS_TEST_TMPDIR/all.json" || [ $? -eq 1 ]
    valid parse "$BATS_TEST_TMPDIR/all.json"
    [ "$(jq '[.runs[].dialect] | unique | length' "$BATS_TEST_TMPDIR/all.json")" -eq 8 ]
    epkit parse --json --list-hardware | valid parse
    epkit parse --json --hardware b200 "$BATS_TEST_TMPDIR"/logs/*internode*.log | valid parse
}

# internode RDMA NVL [GROUPS]: the log of a test on two nodes (or GROUPS) that reached these rates
internode() {
    echo "[config] num_tokens=2048, hidden=7168, num_topk_groups=${3:-2}, num_topk=8"
    for best in 'dispatch (FP8)' 'dispatch (BF16)' combine; do
        echo "[tuning] Best $best: SMs 24, NVL chunk 16, RDMA chunk 8: 12 + 345 us, $1 GB/s (RDMA), $2 GB/s (NVL)"
    done
}

@test "one NIC of eight is named, with the check that finds it; exit code 3" {
    run -3 --separate-stderr epkit parse <<<"$(internode 6.5 21.4)"
    [[ "${lines[0]}" == *"6.5 GB/s is one NIC of eight"*"(doctor id one-nic)"* ]]
}

@test "half the rate is named on a known machine; on an unknown one nothing is said of it" {
    run -3 --separate-stderr epkit parse --hardware b200 <<<"$(internode 43 142)"
    [[ "$output" == *"doctor id shared-nic"* ]]
    run -0 --separate-stderr epkit parse <<<"$(internode 43 142)"
    [[ "$output" != *"shared-nic"* ]]
}

@test "rates of the seeds' machine are in range, the nodes follow from the rates" {
    run -0 --separate-stderr epkit parse --json --hardware b200 <<<"$(internode 78 258)"
    [ "$(jq -r '.runs[0] | "\(.nodes) \(.nodes_from)"' <<<"$output")" = "2 rates" ]
    jq -e '.runs[0].measures[0] | .expected.value == 70 and .expected.from == "reference" and .wire_gbps.rdma == 39 and
        .rating == "in range"' <<<"$output"
    run --separate-stderr epkit parse --json --hardware b200 <<<"$(internode 57 115 4)"
    # Four groups of top-k are those of four nodes and of any larger number.
    [ "$(jq -r '.runs[0] | "\(.nodes) \(.nodes_from)"' <<<"$output")" = "null none" ]
    # Without rates: DeepEP's test has as many groups as nodes, up to 4, which may be of more nodes.
    nodes=$(for groups in 2 4; do
        printf '[config] num_tokens=4096, hidden=7168, num_topk_groups=%s, num_topk=8\n%s' "$groups" \
            '[testing] Running with BF16, without top-k (async=False, previous=False) ...' |
            "$EPKIT" parse --json - | jq -r '.runs[0] | "\(.nodes) \(.nodes_from)"'
    done)
    [ "$nodes" = $'2 log\nnull none' ]
}

@test "nothing recognised: exit code 4; faults alone: exit code 1" {
    run -4 --separate-stderr epkit parse <<<"hello"
    run -4 --separate-stderr epkit parse </dev/null
    run -1 --separate-stderr epkit parse <<<"libibverbs: version \`IBVERBS_PRIVATE_34' not found (required by libmlx5.so)"
    [[ "$output" == *"doctor id verbs-mixed"* ]]
}

@test "wrong names, machines and reference files are refused before anything is read" {
    run -2 --separate-stderr epkit parse "$BATS_TEST_TMPDIR/none.log"
    [[ "$stderr" == *"none.log: No such file or directory"* ]]
    ln -s loop "$BATS_TEST_TMPDIR/loop"
    run -2 --separate-stderr epkit parse "$BATS_TEST_TMPDIR/loop"
    run -2 --separate-stderr epkit parse --hardware b2000 - </dev/null
    [[ "$stderr" == *"--list-hardware"* ]]
    echo '{"schema_version": 1, "figures": [{"hardware": "b200"}]}' >"$BATS_TEST_TMPDIR/bad.json"
    run -2 --separate-stderr epkit parse --reference "$BATS_TEST_TMPDIR/bad.json" - </dev/null
    [[ "$stderr" == *"figures[0].dialect is not a string"* ]]
}

@test "nccl-tests: the peak of a sweep is expected of large messages only" {
    table() {
        echo '# Collective test starting: all_reduce_perf'
        for i in {0..15}; do echo "#  Rank $i Group  0 Pid 1 on node-$((i / 8)) device $((i % 8)) [0x1b] NVIDIA B200"; done
        for size in "$@"; do echo "$size $((size / 4)) float sum -1 123.4 8.50 15.93 0 121.4 8.60 16.13 0"; done
        printf '# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 16.03\n'
    }
    # A test of connections, as 'epkit launch nccl all_reduce -- -b 1M -e 1M'.
    run -0 epkit parse < <(table 1048576)
    [ "${lines[0]}" = "all_reduce_perf, 2 nodes: all_reduce float out-of-place 15.9 GB/s (busbw), all_reduce float in-place 16.1 GB/s (busbw)." ]
    run -3 epkit parse < <(table 1048576 1073741824)
    [[ "${lines[0]}" == *"is 2% of the expected 684.0 on b200: NCCL uses one NIC, or sockets"* ]]
    # Where a switch adds up, the bus bandwidth is above that of a link: no percentage of it.
    node() { table 1073741824 | sed -E "s/ Rank ([89]|1[0-5]) .*//; s/B200/H200/; s/ 15.93 / $1 /"; }
    run --separate-stderr epkit parse --json - < <(node 360.0)
    [ "$(jq '.runs[0].measures[0].percent_of_peak.bus' <<<"$output")" = 80 ]
    run --separate-stderr epkit parse --json - < <(node 475.0)
    jq -e '.runs[0] | .ranks == 8 and .measures[0].percent_of_peak == {of: "", rdma: null, nvl: null, bus: null, is_assumed: false}' <<<"$output"
}

@test "a reference file adds machines and figures" {
    jq -n '{schema_version: 1,
        hardware: [{name: "mine", title: "2x A", match: ["A1"], gpus_per_node: 8, nics_per_node: 1, nic_gbps: 12.5,
            nvlink_gbps: 100, nic_efficiency: 0.9, nvlink_dispatch_efficiency: 0.7, nvlink_combine_efficiency: 0.7,
            overhead_intranode_us: 10, overhead_internode_us: 50}],
        figures: [{hardware: "mine", dialect: "deepep-internode", nodes: 2, op: "dispatch", type: "fp8", rdma: [6, 7],
            source: "me"}]}' >"$BATS_TEST_TMPDIR/mine.json"
    epkit parse --reference "$BATS_TEST_TMPDIR/mine.json" --list-hardware | grep -q '^mine '
    epkit parse --reference <(printf '\xef\xbb\xbf'; sed 's/$/\r/' "$BATS_TEST_TMPDIR/mine.json") --list-hardware | grep -q '^mine '
    run -0 --separate-stderr epkit parse --json --reference "$BATS_TEST_TMPDIR/mine.json" --hardware mine \
        <<<"$(internode 6.5 21.4 | head -n 2)"
    jq -e '.runs[0].measures[0].expected.value == 6' <<<"$output"
}

@test "the folder of a run: logs of all nodes are one run, run.json names machine and nodes" {
    local logs="$BATS_TEST_TMPDIR/run/testbed-logs"
    mkdir -p "$logs/pod-logs"
    internode 70 231 >"$logs/pod-logs/coordinator.log"
    internode 71 235 >"$logs/worker-node-1.log"
    ln -s /etc/passwd "$logs/worker-node-2.log"
    echo '{"schema_version": 1, "nodes": 2, "hosts": [{"name": "node-0", "gpu": "NVIDIA B200"}]}' >"$logs/run.json"
    run -0 --separate-stderr epkit parse --json "$BATS_TEST_TMPDIR/run"
    [ "$(jq -r '.runs | length' <<<"$output")" -eq 1 ]
    jq -e '.runs[0] | .writers == 2 and .nodes == 2 and .hardware == "b200" and .measures[0].logical_gbps.rdma == 70' \
        <<<"$output"
    run -0 --separate-stderr epkit parse "$logs/pod-logs/.."
    mkdir "$BATS_TEST_TMPDIR/empty"
    run -2 --separate-stderr epkit parse "$BATS_TEST_TMPDIR/empty"
}

@test "memory stays bounded: a line without an end, many runs, many writers" {
    python3 - >"$BATS_TEST_TMPDIR/big.log" <<'END'
import sys
out = sys.stdout
out.write("x" * 40_000_000 + "\n")
for run in range(3000):
    out.write(f"[config] num_tokens=1, hidden=2, num_topk=8\n[tuning] Best combine: SMs 24, NVL chunk 4: 1.5 GB/s (NVL)\n")
for writer in range(6000):
    out.write(f"[1,{writer}]<stdout>:[testing] Running with BF16, with")
END
    run --separate-stderr python3 - "$EPKIT" "$BATS_TEST_TMPDIR/big.log" <<'END'
import json, os, resource, subprocess, sys
# AddressSanitizer keeps 256 MiB of what was freed, which is not held.
env = {**os.environ, "ASAN_OPTIONS": os.environ.get("ASAN_OPTIONS", "") + ":quarantine_size_mb=16"}
done = subprocess.run([sys.argv[1], "parse", "--json", sys.argv[2]], stdout=subprocess.PIPE, timeout=900, check=False, env=env)
document = json.loads(done.stdout)
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
print(done.returncode, len(document["runs"]), document["totals"], f"{peak:.0f} MiB")
assert document["totals"]["long_lines"] >= 1 and document["totals"]["unreadable"] >= 4000
assert len(document["runs"]) == 2000 and document["totals"]["runs_dropped"] > 0
assert peak < 400
END
    [ "$status" -eq 0 ]
}

@test "compressed logs and devices are refused; who waits for a pipe sees that" {
    cd "$BATS_TEST_TMPDIR"
    echo text >log
    for command in gzip xz zstd bzip2; do
        command -v $command >/dev/null || continue
        $command -c log >packed
        run -2 --separate-stderr epkit parse packed
        [[ "$stderr" == *"packed: it is compressed"* ]]
    done
    run -2 --separate-stderr epkit parse /dev/zero
    [[ "$stderr" == *"/dev/zero: it is a device, not a log"* ]]
    # A pipe whose writer comes late.
    mkfifo pipe
    { sleep 1; echo "# Avg bus bandwidth    : 40.8712"; } >pipe &
    run --separate-stderr epkit parse pipe
    [[ "$output" != *"Nothing was recognised"* ]]
}

@test "a line that is known without a test: the verdict is that line" {
    cd "$BATS_TEST_TMPDIR"
    echo "NCCL/NET (shim) mismatch in NCCL_CROSS_NIC" >log
    run -4 --separate-stderr epkit parse log
    [[ "${lines[0]}" == "No test was recognised, but a warning: NCCL variables differ from what the gIB plugin expects: "* ]]
}

@test "a rate below what any number of nodes may have is slow, though the number is not known" {
    cd "$BATS_TEST_TMPDIR"
    for best in 'dispatch (FP8)' 'dispatch (BF16)' combine; do
        echo "[tuning] Best $best: SMs 24, NVL chunk 16, RDMA chunk 8: 12 + 345 us, 6.50 GB/s (RDMA), 258.0 GB/s (NVL)"
    done >log
    run -3 --separate-stderr epkit parse log
    [[ "${lines[0]}" == *"6.5 GB/s (RDMA) is "*"% of"* ]]
    # As many as the fastest have: nothing is said.
    sed -i 's/6.50 GB/60.00 GB/' log
    run -0 --separate-stderr epkit parse log
}

@test "no log passes that ended early" {
    for dialect in deepep-intranode deepep-internode deepep-lowlatency deepep-v2 nccl-tests perftest epkit-test; do
        python3 -S "$SAMPLES" cut "$EPKIT" "$dialect"
    done
    # A table of a benchmark without rows, and documents that are torn behind one that is whole.
    run -1 epkit parse <<<"ON   OP       TYPE RANKS TOKENS TIME us     P10     P90 LOGICAL GB/s WIRE GB/s x memcpy x alltoallv"
    cd "$BATS_TEST_TMPDIR"
    echo '{"schema_version": 1, "subcommand": "test", "matrix": "intranode", "total": 1, "passed": 1, "failed": 0}' >whole
    run -0 epkit parse whole
    for text in '{"schema_version": 1, "subcommand": "test", "total": 24,' '{"schema_version": 1, "subcommand": "run", "suites": [,]}' \
        '{"schema_version": 1, "subcommand": "test", "total": 0, "passed": 0, "failed": 0}'; do
        { cat whole && echo "$text"; } >two
        run -1 epkit parse two
    done
}

# bats test_tags=both
@test "no log passes that tells of a failure, wherever it stands; what Python ignores is none" {
    local log
    log=$(for i in 1 2 3 4; do echo "[ $i/4] bf16 random, sync ... passed 1 ms"; done)
    # Each row of the data in front of a run that passed, behind it and within it; a notice before one that is cut off.
    python3 -S - "$EPKIT" "$EPKIT_SOURCE/cmd/parse/failures.json" "$log" "$EVERY" <<'END'
import json, subprocess, sys
from concurrent.futures import ThreadPoolExecutor
log = sys.argv[3].split("\n")
rows = json.load(open(sys.argv[2]))["failures"] + [
    {"kind": "fault", "sample": "mlx5: gpu01: got completion with error:"},
    {"kind": "fault", "sample": "/usr/bin/python3.13t: No module named deep_ep"},
    {"kind": "fault", "sample": "gpu02: python3.10: No module named tests.__main__; 'tests' is a package and cannot be directly executed"},
    {"kind": "launcher", "sample": "PRTE has lost communication with a remote daemon."},
    {"kind": "step", "sample": 'Error from server (AlreadyExists): namespaces "ep" already exists'},
    {"kind": "warning", "sample": "/torch/nn.py:20: UserWarning: Failed to initialize NumPy: No module named 'numpy' (at ../tensor_numpy.cpp:84.)"}]


def code(lines):
    return subprocess.run([sys.argv[1], "parse", "-"], input="\n".join(lines), capture_output=True, text=True, check=False).returncode


def wrong(row):
    fault = row["sample"].split("\n")
    harmless, notice = row["kind"] in ("warning", "step"), row["kind"] == "launcher" or "may_pass" in row
    codes = [code(fault + log), code(log + fault), code(log[:2] + fault + log[2:])] + ([code(fault + log[:3])] if notice else [])
    right = [0 if harmless or notice else 1, 0 if harmless else 1, 0 if harmless else 1] + ([1] if notice else [])
    return [(row["sample"], codes, right)] if codes != right else []


with ThreadPoolExecutor(2) as pool:
    bad = [text for texts in pool.map(wrong, rows[::int(sys.argv[4])]) for text in texts]
assert not bad, bad
END
    # A step, and what failed because of it.
    run -1 epkit parse <<<'OCI runtime exec failed: exec failed'$'\n''command terminated with exit code 126'$'\n'"$log"
    # The first fault that is fatal is why, not a warning in front of it.
    run -1 epkit parse <<<"libibverbs: Warning: couldn't load driver 'libmlx5-rdmav34.so': no such file"$'\n''Segmentation fault'
    [[ "${lines[0]}" == "No test was recognised, but a failure: a process crashed: Segmentation fault." ]]
    run -0 epkit parse <<<"$log"$'\n''Exception ignored in: <function Buffer.__del__>'$'\n''Traceback (most recent call last):'
    # With its last line, also behind the name of a host; what comes after it counts again.
    for host in "" "gpu02: "; do
        ignored=$(printf "$host%s\\n" 'Exception ignored in: <function Buffer.__del__>' 'Traceback (most recent call last):' \
            '  File "/buffer.py", line 9, in __del__' '    self.runtime.destroy()' 'RuntimeError: CUDA error: driver shutting down')
        run -0 epkit parse <<<"$log"$'\n'"$ignored"
        run -1 epkit parse <<<"$log"$'\n'"$ignored"$'\n'"${host}RuntimeError: no"
    done
    # A line of its code is not its end, an exception of any name is, and another traceback counts.
    for last in 'raise RuntimeError' 'except ImportError:'; do
        ignored=$(printf '%s\n' 'Exception ignored in: <function Buffer.__del__>' 'Traceback (most recent call last):' \
            '  File "/buffer.py", line 9, in __del__' "    $last" 'RuntimeError: CUDA error: driver shutting down')
        run -0 epkit parse <<<"$log"$'\n'"$ignored"
    done
    for last in 'queue.Empty' 'KeyboardInterrupt'; do
        ignored=$(printf '%s\n' 'Exception ignored in: <function Buffer.__del__>' 'Traceback (most recent call last):' \
            '  File "/buffer.py", line 9, in __del__' "$last")
        run -0 epkit parse <<<"$log"$'\n'"$ignored"
        run -1 epkit parse <<<"$log"$'\n'"$ignored"$'\n''RuntimeError: DeepEP error: timeout (dispatch CPU)'
    done
    # In another file than the run; and by what the launcher says of the run.
    cd "$BATS_TEST_TMPDIR"
    mkdir run
    echo "$log" >run/coordinator.log
    epkit parse run
    echo "Segmentation fault" >run/worker-b.log
    run -1 epkit parse run
    [[ "${lines[0]}" == "Failed, outside of the runs: a process crashed: Segmentation fault. epkit test: 4/4 cases passed." ]]
    rm run/worker-b.log
    echo '{"schema_version": 1, "began": "x", "exit_code": 7, "reason": "program", "failed_host": "b"}' >run/run.json
    run -1 epkit parse run
    [[ "${lines[0]}" == "The run failed, first on b. "* ]]
    echo '{"schema_version": 1, "began": "x", "ended": null, "exit_code": null}' >run/run.json
    run -1 epkit parse run
    [[ "${lines[0]}" == "The run has not ended, or its launcher was killed. "* ]]
    # Also if the logs contain nothing that is known: a workload, or a test that never began.
    echo 'hello' >run/coordinator.log
    run -1 epkit parse run
    [[ "${lines[0]}" == "The run has not ended, or its launcher was killed. Nothing was recognised"* ]]
    run -1 epkit report run
    echo '{"schema_version": 1, "began": "x", "exit_code": 7}' >run/run.json
    run -1 --separate-stderr epkit parse --json run
    valid parse <<<"$output"
    [ "$(jq -r .result <<<"$output")" = failed ]
    echo '{"schema_version": 1, "began": "x", "exit_code": 0}' >run/run.json
    run -4 epkit parse run
}

@test "text of other systems, units of newer perftest, rates of nothing, a first byte alone" {
    cd "$BATS_TEST_TMPDIR"
    echo "[ 1/1] bf16 random, sync ... passed 1 ms" >log
    for code in UTF-16 UTF-16BE UTF-32; do
        iconv -f UTF-8 -t "$code" log >coded
        run -0 epkit parse coded
        [ "${lines[0]}" = "epkit test: 1/1 cases passed." ]
    done
    printf '%s\n' '                    RDMA_Write BW Test' ' Dual-port       : OFF          Device         : mlx5_0' \
        ' #bytes     #iterations    BW peak[MiB/sec]    BW average[MiB/sec]   MsgRate[Mpps]' \
        ' 65536      5000             43012.44            42998.71              0.687979' \
        '---------------------------------------------------------------------------------------' >log
    run -0 epkit parse log
    [ "${lines[0]}" = "ib_write_bw on mlx5_0: write 45.1 GB/s (RDMA)." ]
    run -0 epkit parse - < <(sed 's/43012.44            42998.71/18.12               18.01/' log)
    [ "${lines[0]}" = "ib_write_bw on mlx5_0: write 0.02 GB/s (RDMA)." ] && [[ "${lines[2]}" == *' 0.02 '* ]]
    sed -i 's/43012.44            42998.71/0.00                0.00/' log
    run -1 epkit parse log
    gzip -c log >packed
    run -2 --separate-stderr epkit parse < <(head -c 1 packed; sleep 0.2; tail -c +2 packed)
    [[ "$stderr" == *"it is compressed"* ]]
}

@test "colours in UTF-16, and hosts in front of what perftest says of its failure" {
    cd "$BATS_TEST_TMPDIR"
    printf '\033[32m[ 1/1] bf16 random, sync ... passed 1 ms\033[0m\n' >log
    for code in UTF-16 UTF-16BE; do
        iconv -f UTF-8 -t "$code" log >coded
        run -0 epkit parse coded
        [ "${lines[0]}" = "epkit test: 1/1 cases passed." ]
    done
    printf '%s\n' '                    RDMA_Write BW Test' ' Dual-port       : OFF          Device         : mlx5_5' \
        " Couldn't connect to 192.0.2.7:18515" ' Unable to init the socket connection' >log
    for front in '' 'node1: ' '[2026-11-23 10:00:00,123] node1: '; do
        sed "s/^/$front/" log >fronted
        run -1 epkit parse fronted
        [ "${lines[0]}" = "ib_write_bw on mlx5_5: nothing was measured; Couldn't connect to 192.0.2.7:18515: the peer of perftest did not answer." ]
    done
    for text in "Couldn't allocate MR" ' Unable to create QP' " Couldn't create IB resources"; do
        printf '%s\n' '                    RDMA_Write BW Test' "$text" >log
        run epkit parse log
        [[ "${lines[0]}" == "ib_write_bw: nothing was measured; ${text# }"* ]]
    done
    # What no prefix explains is a failure all the same.
    echo "who knows what 77 Couldn't connect to 192.0.2.7:18515" >log
    run -1 epkit parse log
    [[ "${lines[0]}" == "perftest: nothing was measured; "*"Couldn't connect to"* ]]
}

@test "a log of DeepEP 2 that was cut amid its last case does not pass" {
    # figures CASE OPERATIONS: all ranks of it
    figures() {
        local rank op
        echo " > Testing with do_handle_copy=1, expert_alignment=128, use_fp8_dispatch=1, num_bias=$1, with_previous_event=0, async_with_compute_stream=0, allocate_on_comm_stream=0 ..."
        for rank in 0 1; do
            for op in '* dispatch' '- expanded dispatch' '# cached dispatch' '@ combine' '+ reduced combine'; do
                echo "   ${op%% *} EP:   $rank/2 | ${op#* }: 0 GB/s (SO), 700 GB/s (SU), 900.000 us, 401408000 bytes | copy: 1648 GB/s, 61.250 us"
            done
        done
    }
    { printf '%s\n' 'Config:' ' > Ranks: 1 x 2' ' > Experts: 8/256' ' > Tokens: 8192 (max: 8192), hidden: 7168' \
        ' > #SM: 12, #QPs: 17/17' 'Running all test cases:' && figures 0; } >"$BATS_TEST_TMPDIR/whole"
    run -0 epkit parse "$BATS_TEST_TMPDIR/whole"
    for n in 1 2 4 6 9; do
        head -n -"$n" "$BATS_TEST_TMPDIR/whole" >"$BATS_TEST_TMPDIR/cut"
        run epkit parse "$BATS_TEST_TMPDIR/cut"
        echo "$n: $output"
        [ "$status" -eq 1 ]
    done
}

@test "carriage returns without a newline cost no more than newlines" {
    head -c 20000000 /dev/zero | tr '\0' '\r' >"$BATS_TEST_TMPDIR/log"
    run -4 thrifty 15 "$EPKIT" parse "$BATS_TEST_TMPDIR/log"
}

# shows TEXT: the first line of the text and the verdict in JSON have it, and the page of a run with this log
shows() {
    run epkit parse log
    [[ "${lines[0]}" == *"$1"* ]] || { echo "$output" && false; }
    epkit parse --json log >document || true
    valid parse document
    jq -e --arg text "$1" '.verdict | contains($text)' document
    mkdir -p folder && cp log folder/coordinator.log
    epkit report folder >/dev/null || true
    python3 -c 'import html, sys; sys.exit(sys.argv[1] not in html.unescape(open("folder/report.html").read()))' "$1"
}

@test "the exception or the first specific failure is the headline, whole" {
    cd "$BATS_TEST_TMPDIR"
    # An exception in the logger's prefix, and what the engine makes of it.
    printf '(Core pid=7) ERROR 01-20 04:26:31 [core.py:857] %s\n' 'EngineCore failed to start.' \
        'Traceback (most recent call last):' '  File "/srv/deep_ep/buffer.py", line 129, in __init__' \
        "RuntimeError: Failed: Assertion error deep_ep.cpp:60 'num_ranks > 8 or low_latency_mode'" >log
    echo '(Api pid=6) RuntimeError: Engine core initialization failed. See root cause above.' >>log
    shows "deep_ep.cpp:60 'num_ranks > 8 or low_latency_mode'"
    # NCCL's line says more than PyTorch's exception after it.
    printf '%s\n' 'gpu5:24:24 [6] misc/socket.cc:533 NCCL WARN socketPollConnect: Connect to 192.0.2.4<5684> returned 113(No route to host)' \
        '[2026-02-24 14:09:34 TP14] Scheduler hit an exception: Traceback (most recent call last):' \
        '  File "pynccl_wrapper.py", line 257, in NCCL_CHECK' 'RuntimeError: NCCL error: unhandled system error' Killed >log
    shows 'Connect to 192.0.2.4<5684> returned 113(No route to host)'
    printf '%s\n' 'Traceback (most recent call last):' '  File "spawn.py", line 9' \
        'torch.multiprocessing.spawn.ProcessRaisedException: ' '' '-- Process 0 terminated with the following error:' \
        'Traceback (most recent call last):' '  File "test_ep.py", line 5' \
        'RuntimeError: Assertion exception (nccl.cu:87): props.ginType != NCCL_GIN_TYPE_NONE' >log
    shows 'Assertion exception (nccl.cu:87): props.ginType != NCCL_GIN_TYPE_NONE'
    jq -e '.faults[0].id == "net-plugin" and (.faults[1:] | map(.text) | contains(["Traceback"]))' document
    # An exception of any name, but not one in the code of the traceback.
    printf '%s\n' 'Traceback (most recent call last):' '    raise MyError("x")' 'module.TopologyError: rank 3 has no NIC' >log
    shows 'module.TopologyError: rank 3 has no NIC'
    # Within a run: device and GIDs stay, and nothing is said of the speed.
    printf '%s\n' '# Collective test starting: gather_perf' '# nThread 1 nGpus 1 minBytes 8 maxBytes 1073741824 step: 2(factor)' \
        '[2026-03-13 22:26:02] gpu-1:1042 [5] ibvwrap.c:262 NCCL WARN Call to ibv_modify_qp failed with 110 Connection timed out, on dev mlx5_5:1, curr state INIT, next state RTR, local GID index 3, local GID ::ffff:192.0.2.11, remote GID ::ffff:192.0.2.12' \
        "gpu-1: Test NCCL failure gather.cu:84 'unhandled system error'" >log
    shows 'on dev mlx5_5:1, curr state INIT, next state RTR, local GID index 3, local GID ::ffff:192.0.2.11, remote GID ::ffff:192.0.2.12'
    { internode 38.2 73.8 4 | head -n 2 && printf '%s\n' 'Traceback (most recent call last):' '  File "test_internode.py", line 2' \
        "RuntimeError: Failed: Assertion error internode.cu:1713 'num_chunked > send_tokens'"; } >log
    shows "internode.cu:1713 'num_chunked > send_tokens'"
    [[ "$output" != *"4 nodes"* && "${lines[0]}" != *"slow"* ]]
}

@test "failures of DeepEP's kernels and of NVSHMEM are known, with the check; none is taken for perftest's" {
    cd "$BATS_TEST_TMPDIR"
    { internode 70 231 | head -n 1 && echo 'DeepEP dispatch forwarder timeout (RDMA meta), channel: 5, RDMA: 0, nvl: 4, src RDMA lane: 1, dst NVL: 2, meta: 0, 0, 0, 0'; } >log
    shows 'forwarder timeout (RDMA meta), channel: 5'
    jq -e '.faults[0].id == "nic-handler"' document
    printf '%s\n' 'Allocating buffer size: 2115.111296 MB ...' 'WARN: init failed for remote transport: ibrc' \
        'transport.cpp:nvshmemi_transport_init:287: Unable to initialize any transports. returning error.' \
        'init.cu:nvshmemi_check_state_and_init:1080: nvshmem initialization failed, exiting' >log
    shows 'Unable to initialize any transports'
    jq -e '[.runs[].dialect] == ["deepep-lowlatency"] and ([.faults[] | select(.fatal)][0].id == "ibgda-transport")' document
    printf '%s\n' 'Allocating buffer size: 2115.111296 MB ...' 'ibgda.cpp:1348: NULL value' 'Unable to create ah.' \
        'ibgda.cpp:3025: non-zero status: 7' 'nvshmem initialization failed, exiting' >log
    shows 'Unable to create ah: NVSHMEM could not address a peer'
    [[ "${lines[0]}" == *"(doctor id gid)." ]]
    jq -e '[.runs[].dialect] == ["deepep-lowlatency"] and .faults[0].id == "gid" and .runs[0].causes[0].id == "gid"' document
    # Where nothing failed but nothing was printed either, a warning may say why.
    printf '%s\n' 'WARN: device mlx5_9 cannot allocate buffer on the specified memory type.' 'Allocating buffer size: 2115.111296 MB ...' \
        'WARN: device erdma_0 is not enumerated as an mlx5 device. Skipping...' >log
    shows 'no rank printed a result: IBGDA works with NICs of mlx5 alone'
    [[ "${lines[0]}" == *"device erdma_0"*"(doctor id ibgda-nic)." ]]
    # An assertion whose cure is known; a check of the machine that finds the cause.
    echo "RuntimeError: Failed: Assertion error deep_ep.cpp:60 'num_ranks > NUM_MAX_NVL_PEERS or low_latency_mode'" >log
    shows 'use the low-latency mode'
    echo 'ibgda.cpp:1889: NULL value cannot allocate mlx5dv_devx_uar' >log
    shows 'cannot allocate mlx5dv_devx_uar (doctor id nic-access)'
}

# bats test_tags=both
@test "logs as people post them get the right verdict: 500, and 10,000 in the long tier" {
    local count=$((500 / EVERY))

    [ -z "${EPKIT_TEST_LONG:-}" ] || count=10000
    python3 -S "$EPKIT_SOURCE/tests/parse/forms.py" "$EPKIT" "$count"
}

@test "excerpts of public reports that were judged wrongly once" {
    python3 -S "$EPKIT_SOURCE/tests/parse/excerpts.py" "$EPKIT"
}

@test "each program of programs.json begins as its rows say, and has a source" {
    python3 - "$EPKIT" "$EPKIT_SOURCE/cmd/parse/programs.json" <<'END'
import json, subprocess, sys
document = json.load(open(sys.argv[2]))
for program in document["programs"]:
    assert program["source"] and (isinstance(program["lines"], list) or program["lines"] in document["tables"]), program
    for form in program["begin"]:
        line = form.replace("%f", "3").replace("*", " x ") + " 3 ranks\n"
        out = subprocess.run([sys.argv[1], "parse", "--json", "-"], input=line, capture_output=True, text=True, check=False)
        runs = json.loads(out.stdout)["runs"]
        assert [run["title"] for run in runs] == [program["title"]], (form, [run["title"] for run in runs])
        assert out.returncode == 1, form  # begun, and nothing more
END
}

# bats test_tags=both
@test "each known failure has a sample that no other row takes, a source, and a check that exists" {
    cd "$BATS_TEST_TMPDIR"
    epkit doctor --list | cut -d' ' -f1 >ids
    python3 -S - "$EPKIT" "$EPKIT_SOURCE/cmd/parse/failures.json" "$EVERY" <<'END'
import json, subprocess, sys
rows = json.load(open(sys.argv[2]))["failures"][::int(sys.argv[3])]
ids = open("ids").read().split()
bad = []
for row in rows:
    out = subprocess.run([sys.argv[1], "parse", "--json", "-"], input=row["sample"] + "\n", capture_output=True, text=True, check=False)
    document = json.loads(out.stdout)
    if row.get("id") and row["id"] not in ids:
        bad.append(f"no check {row['id']}")
    if "run" in row:
        if [run["dialect"] for run in document["runs"]] != ["perftest"]:
            bad.append(row["text"])
    elif not any(fault["cause"] == row["cause"] and fault["id"] == row.get("id") and
                 (fault["text"].endswith(last) if "next" in row else last.endswith(fault["text"]))
                 for fault in document["faults"] for last in [row["sample"].split("\n")[-1].strip()]) and "a non-zero" not in row["text"] or not row["source"]:
        bad.append(row["text"])
    if (document["result"] == "failed") != (row["kind"] != "warning"):
        bad.append(f"{row['text']}: {document['result']}")
assert not bad, bad
END
}

@test "a launcher that waits for its hosts does not fail the run that then is complete" {
    cd "$BATS_TEST_TMPDIR"
    printf '%s\n' 'Waiting for gpu-1' 'ssh: Could not resolve hostname gpu-1: Name or service not known' \
        '[1668693503.473099] [gpu-0:1188443:0] ib_log.c:246  UCX  ERROR mlx5_0: ibv_create_cq() failed: Cannot allocate memory.' \
        'ssh: connect to host gpu-1 port 222: Connection refused' '# Collective test starting: all_gather_perf' \
        '#  Rank  0 Group  0 Pid    500 on gpu-0 device  0 [0000:8f:00] NVIDIA H200' \
        '#  Rank  1 Group  0 Pid    508 on gpu-1 device  0 [0000:8f:00] NVIDIA H200' \
        ' 17179869184     268435456     float    none      -1    44802  383.46  359.50      0    44790  383.57  359.60      0' \
        '# Out of bounds values : 0 OK' '# Avg bus bandwidth    : 239.341' >log
    run -0 epkit parse log
    [[ "${lines[0]}" == "all_gather_perf, 2 nodes: "* && "$output" == *"warning: ssh was refused (log:4, 1 times): ssh: connect"* ]]
    [[ "$output" == *"warning (doctor id memlock): UCX"* ]]
    # The same in the log of another host is a failure, and so is a run that does not end.
    grep ssh log >other && tail -n 6 log >good
    run -1 epkit parse other good
    [[ "${lines[0]}" == "Failed, outside of the runs: a host name is unknown: ssh: Could not resolve hostname gpu-1: "* ]]
    run -1 epkit parse <<<"$(head -n -1 log)"
}

@test "a plug-in or a call that failed before a run that passed is a notice; a launcher's whole phrase counts" {
    local log='[ 1/1] bf16 random, sync ... passed 1 ms' line
    for line in 'gpu1:9:9 [0] init:1 NCCL WARN NET/OFI aws-ofi-nccl initialization failed' \
        "gpu1:9:9 [7] init:1 NCCL WARN NET/OFI Couldn't open AV. RC: -22" 'mem.cpp:9: non-zero status: 2 cuMemCreate failed' \
        'gpu1:9:9 [1] p2p.cc:220 NCCL WARN hipIpcGetMemHandle failed : invalid argument'; do
        run -0 epkit parse <<<"$line"$'\n'"$log"
        run -1 epkit parse <<<"$line"
    done
    run -0 epkit parse <<<"$log"$'\n''not enough slots available for a second cache'
    run -1 epkit parse <<<"$log"$'\n''There are not enough slots available in the system to satisfy the 16'
}

@test "documents of a benchmark: each operation of the schema is read, without a device too; many in one line" {
    local type device
    cd "$BATS_TEST_TMPDIR"
    for type in bf16 fp8; do
        [ $type = bf16 ] && device=host || device=
        jq -c --arg device "$device" --arg type $type '[.["$defs"].row.properties.op.enum[] | {op: ., type: (if . == "plan" then "" else $type end),
            ranks: 2, tokens: 128, time_us: 9.5, logical_gbps: 3}] as $rows |
            {schema_version: 1, subcommand: "bench", device: $device, parameters: {}, $rows}' \
            "$EPKIT_SOURCE/cmd/bench/schema.json" >log
        run -0 --separate-stderr epkit parse --json log
        jq -e --argjson rows "$(jq .rows log)" '[.runs[0].measures[] | .op] | sort == ([$rows[].op] | sort)' <<<"$output"
    done
    python3 -c "print('{\"version\":1}' * 25000)" >log
    run -4 epkit parse log
    # Totals that no matrix has are not believed.
    run -4 epkit parse <<<'[ 1/4000000000] bf16 random, sync ... passed 1 ms'
    run -0 epkit parse <<<'[ 1/1] bf16 random, sync ... passed 1 ms'$'\n''4000000000/4000000000 cases passed'
    [ "${lines[0]}" = "epkit test: 1/1 cases passed." ]
}

@test "the password of a command at the end of a sentence is not shown" {
    for end in . ',' ';' : ')' ').' ''; do
        for form in "" --json; do
            run ! --separate-stderr epkit parse $form <<<"epkit: error: echo root:Secr3t | chpasswd$end"
            [[ "$output$stderr" == *chpasswd* && "$output$stderr" != *Secr3t* ]]
        done
    done
}

@test "a case of DeepEP 2 that began and printed no result has not passed" {
    run -1 epkit parse < <(printf '%s\n' 'Config:' ' > Ranks: 1 x 2' ' > Experts: 6/256' ' > Tokens: 4096 (max: 4096), hidden: 7168' \
        'Running all test cases:' ' > Testing with do_handle_copy=1, expert_alignment=128, use_fp8_dispatch=1, num_bias=0, with_previous_event=0, async_with_compute_stream=0, allocate_on_comm_stream=0 ...')
    [[ "${lines[0]}" == "test_ep, 1 node: 0/144 cases passed, the log ends in case 1: the first case printed no result"* ]]
}

# lowlat FIRST LAST GB/s US: the lines of these ranks, without the times of send and receive
lowlat() {
    local rank
    for ((rank = $1; rank <= $2; rank++)); do
        echo "[rank $rank] Dispatch + combine bandwidth: $3 GB/s, avg_t=$4 us, min_t=$4 us, max_t=$4 us"
        echo "[rank $rank] Dispatch bandwidth: $3 GB/s, avg_t=$4 us | Combine bandwidth: $3 GB/s, avg_t=$4 us"
    done
}

@test "low latency: the ranks of one node say nothing of the number of nodes, unless no NIC is as fast" {
    run -0 --separate-stderr epkit parse --json --hardware h200 - < <(lowlat 0 7 70.1 314.2)
    jq -e '.runs[0] | .nodes == null and .nodes_from == "none" and (.notes[0] | startswith("Part of a run, if")) and
        all(.measures[]; .rating == null)' <<<"$output"
    run -0 --separate-stderr epkit parse --json - < <(lowlat 8 15 70.1 314.2)
    jq -e '.runs[0] | .nodes == null and .notes[0] == "Part of a run: the logs of 8 of at least 16 ranks are missing."' <<<"$output"
    run -0 --separate-stderr epkit parse --json --hardware h200 - < <(lowlat 0 7 236.1 38)
    jq -e '.runs[0] | .nodes == 1 and .nodes_from == "rates" and .measures[1].rating == "in range"' <<<"$output"
    run -3 epkit parse --hardware h200 --nodes 1 - < <(lowlat 0 7 70.1 118.9)
    # A rank that is missing among others of its node is a failure; so are the times in a log that begins as DeepEP's.
    run -1 epkit parse - < <(lowlat 0 2 70.1 314.2; lowlat 4 7 70.1 314.2)
    run -1 epkit parse - < <(echo 'Allocating buffer size: 2116.29 MB ...'; lowlat 0 7 70.1 314.2)
}

@test "figures of whole nodes do not apply to two GPUs of one" {
    cd "$BATS_TEST_TMPDIR"
    # Rate and time say how many ranks a token went to: 60.3 MB of 4096 tokens are two, 160.2 MB are eight.
    one() {
        echo '[config] num_tokens=4096, hidden=7168, num_topk=8'
        echo "[tuning] Best dispatch (FP8): SMs 24, NVL chunk 24, $1 GB/s (NVL), t: $2 us"
    }
    run -0 --separate-stderr epkit parse --json --hardware h200 - < <(one 246.04 245.22)
    jq -e '.runs[0] | .ranks == 2 and .measures[0].rating == null and .measures[0].wire_gbps.nvl == 123.02' <<<"$output"
    run -3 --separate-stderr epkit parse --json --hardware h200 - < <(one 246.04 654.2)
    jq -e '.runs[0] | .ranks == 8 and .measures[0].rating == "slow" and .measures[0].percent_of_peak.of == "NVLink, 450 GB/s for each GPU"' <<<"$output"
    # Another hidden size is not that of the published figures.
    run --separate-stderr epkit parse --json --hardware h200 - < <(one 246.04 654.2 | sed 's/7168/5120/')
    jq -e '.runs[0].measures[0].expected.from == "model"' <<<"$output"
    printf '%s\n' 'Config:' ' > Ranks: 1 x 2' ' > Experts: 6/256' ' > Tokens: 4096 (max: 4096), hidden: 7168' 'Running all test cases:' \
        ' > Testing with do_handle_copy=1, expert_alignment=128, use_fp8_dispatch=1, num_bias=0, with_previous_event=0, async_with_compute_stream=0, allocate_on_comm_stream=0 ...' >log
    for rank in 0 1; do
        for op in '* dispatch' '- expanded dispatch' '# cached dispatch' '@ combine' '+ reduced combine'; do
            echo "   ${op%% *} EP:   $rank/2 | ${op#* }: 0 GB/s (SO), 167 GB/s (SU), 360.000 us, 60137448 bytes | copy: 4002 GB/s, 30.051 us"
        done >>log
    done
    run -0 --separate-stderr epkit parse --json --hardware h200 log
    jq -e '.runs[0] | .result == "passed" and .measures[0].rating == null' <<<"$output"
}

@test "similar programs that print nothing for a case passed when the tuning is complete" {
    { internode 46.8 153.1 | head -n 1
      for kind in BF16 BF16 FP8; do for topk in without with; do for async in False True; do for previous in False True; do
          echo "[testing] Running with $kind, $topk top-k (async=$async, previous=$previous) ..."
      done; done; done; done
      internode 46.8 153.1 | tail -n +2; } >"$BATS_TEST_TMPDIR/log"
    run -0 epkit parse "$BATS_TEST_TMPDIR/log"
    [[ "${lines[0]}" == "test_internode, 2 nodes by its rates: 24/24 cases passed; dispatch fp8 46.8 GB/s"* ]]
    run -1 epkit parse <<<"$(head -n -1 "$BATS_TEST_TMPDIR/log")"
}

@test "two runs stay two: pasted blocks, and files that are not parts of one" {
    cd "$BATS_TEST_TMPDIR"
    block() { internode "$1" "$2" | tail -n +2; }
    { echo '# 2 nodes'; block 44.3 145; echo; echo '# 4 nodes'; block 12.5 25; } >log
    run --separate-stderr epkit parse --json log
    [ "$(jq -c '[.runs[] | [.nodes, .nodes_from, .measures[2].logical_gbps.rdma]]' <<<"$output")" = '[[2,"log",44.3],[4,"log",12.5]]' ]
    # Without headings: the lines return to an operation. Lines of two nodes of one run do not.
    run --separate-stderr epkit parse --json - < <(block 44.3 145; block 12.5 25)
    [ "$(jq '.runs | length' <<<"$output")" = 2 ]
    run --separate-stderr epkit parse --json - < <(block 44.3 145 | sed p)
    [ "$(jq '.runs | length' <<<"$output")" = 1 ]
    # A run within a node, and one between nodes behind it.
    run --separate-stderr epkit parse --json - < <(block 44.3 326.6 | sed 's/, RDMA chunk [0-9]*:.*(RDMA),/,/'; block 17.8 58)
    [ "$(jq -c '[.runs[] | [.dialect, .measures[0].logical_gbps.nvl, .measures[0].logical_gbps.rdma]]' <<<"$output")" = '[["deepep-intranode",326.6,null],["deepep-internode",58,17.8]]' ]
    # Files: without a common setting, or with rates that nodes of one run cannot have.
    block 44.3 145 >a; block 44.1 144 >b
    run --separate-stderr epkit parse --json a b
    [ "$(jq '.runs | length' <<<"$output")" = 2 ]
    internode 44.3 145 >a; internode 12.5 41 >b; internode 44.1 144 >c
    run --separate-stderr epkit parse --json a b
    [ "$(jq '.runs | length' <<<"$output")" = 2 ]
    run --separate-stderr epkit parse --json a c
    [ "$(jq '.runs | length' <<<"$output")" = 1 ]
}

@test "nccl-tests: rows without the beginning of their run are a part of it; a run that begins and does not end has failed" {
    cd "$BATS_TEST_TMPDIR"
    columns='#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong'
    rows=$'   771751936     192937984  bfloat16    none      -1   2786.5  276.96  138.48      0   2384.8  323.62  161.81      0\n
   788529152     197132288  bfloat16    none      -1   2787.1  282.92  141.46      0   2427.4  324.84  162.42      0'
    for part in "$rows" "$columns"$'\n'"$rows"; do
        run -0 epkit parse <<<"$part"
        [[ "$output" == *"note: Part of a run: rows of a table, without its beginning and its end."* ]]
    done
    # The end alone, or with rows that somebody has edited.
    for part in '' $'size(B)   time(us)  algbw(GB/s)  busbw(GB/s)\n1073741824   4100  261.89  458.30\n'; do
        run -0 epkit parse <<<"$part# Out of bounds values : 0 OK"$'\n'"# Avg bus bandwidth    : 467.7"
        [ "${lines[0]}" = "nccl-tests: the average bus bandwidth is 467.7 GB/s, of a table that is not there." ]
    done
    run -1 epkit parse <<<"# Avg bus bandwidth    : 0"
    # The end names the operation; a few of the ranks do not say how many nodes there were.
    run -0 epkit parse <<<"$rows"$'\n'"# Avg bus bandwidth    : 138.5"$'\n'"# Collective test concluded: all_gather_perf"
    [[ "${lines[0]}" == "all_gather_perf: all_gather bfloat16 out-of-place 141.5 GB/s"* ]]
    run --separate-stderr epkit parse --json - <<<"#  Rank 71 Group  0 Pid    500 on gpu-17 device  3 [0x01] NVIDIA GB200"$'\n'"$rows"$'\n'"# Avg bus bandwidth    : 138.5"
    [ "$(jq -c '[.runs[] | .ranks, .nodes]' <<<"$output")" = '[72,null]' ]
    for begin in '# nThread 1 nGpus 8 minBytes 8 maxBytes 8589934592 step: 2(factor)' '# Collective test starting: all_gather_perf' \
        '#  Rank  0 Group  0 Pid    500 on gpu-0 device  0 [0000:8f:00] NVIDIA H200'; do
        run -1 epkit parse <<<"$begin"$'\n'"$columns"$'\n'"$rows"
        [[ "${lines[0]}" == *": the table was cut off." ]]
    done
}

@test "nccl-tests: columns of single iterations, and two runs at once without MPI whose headers come first" {
    cd "$BATS_TEST_TMPDIR"
    rank() { echo "#  Rank  $1 Group  0 Pid   $2 on         vm device  $1 [0000:00:06] NVIDIA H200"; }
    columns='#       size         count      type   redop    root     time   algbw   busbw  #wrong'
    { echo '# Collective test starting: alltoall_perf'; rank 0 1; rank 1 1
      echo "$columns    i_min    i_max    i_p99    i_cv%     time   algbw   busbw  #wrong    i_min    i_max    i_p99    i_cv%"
      echo '  1073741824      33554432     float    none      -1  2788.10  385.12  336.98       0  2768.10  2878.10  2878.10     1.21  2789.10  385.12  336.97     N/A  2768.10  2878.10  2878.10     1.24'
      printf '# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 336.98\n'; } >log
    run -0 --separate-stderr epkit parse --json log
    jq -e '.totals.unreadable == 0 and [.runs[0].measures[].busbw_gbps] == [336.98, 336.97]' <<<"$output"
    head='# nThread 1 nGpus 2 minBytes 2097152 maxBytes 17179869184 step: 2(factor)'
    { for _ in 1 2; do echo '# Collective test starting: all_reduce_perf'; echo "$head"; done
      for pid in 1443 1447; do rank 0 $pid; rank 1 $pid; done; echo "$columns     time   algbw   busbw  #wrong"
      for time in 2432.17 2040.72; do
          echo "     2097152        524288     float     sum      -1  $time    0.86    0.86       0  2434.74    0.86    0.86       0"
      done
      printf '# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 0.86\n'; } >log
    run -1 epkit parse log
    [ "${lines[0]}" = "all_reduce_perf, 1 node: 2 independent runs of 2 ranks each instead of one: the program was built without MPI, or with another MPI than mpirun's." ]
}

@test "a slow combine beside a fast dispatch is no NIC" {
    run -3 epkit parse --hardware b200 - < <(internode 70 231 | head -n 2; internode 81 268 | sed -n 3p; internode 33 109 | tail -n 1)
    [[ "${lines[0]}" == *"combine bf16 33.0 GB/s (RDMA) is 44%"*"another operation is as fast as expected"* && "$output" != *"shared-nic"* ]]
}

@test "where nothing is printed for a case that passed, the next case or the tuning says so" {
    {
        echo '[config] num_tokens=4096, hidden=7168, num_topk=8'
        for kind in BF16 BF16 FP8; do
            echo "[testing] Running with $kind, without top-k (async=False, previous=False) ..."
        done
    } >"$BATS_TEST_TMPDIR/log"
    run -1 epkit parse "$BATS_TEST_TMPDIR/log"
    [[ "${lines[0]}" == *": 2/24 cases passed, the log ends in case 3." ]]
    echo '[tuning] Best dispatch (FP8): SMs 24, NVL chunk 24, 246.02 GB/s (NVL), t: 245.24 us' >>"$BATS_TEST_TMPDIR/log"
    run -1 epkit parse "$BATS_TEST_TMPDIR/log"
    [[ "${lines[0]}" == *": 3/24 cases passed, "* ]]
}

@test "a line of nccl-tests about a rank on no host ends nothing" {
    printf '%s\n' '# nThread 1 nGpus 1' '#  Rank  0 Group  0 Pid 1 on device 0 [0] x' >"$BATS_TEST_TMPDIR/log"
    run -4 epkit parse "$BATS_TEST_TMPDIR/log"
    [[ "$output" == "Nothing was recognised"* ]]
}
