#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# epkit report: a run folder as a page and a document, comparison, history.
#
# shellcheck disable=SC2154 # $stderr is set by run

load common

# internode RDMA: the log of a test on two nodes
internode() {
    local i
    echo '[config] num_tokens=2048, hidden=7168, num_topk_groups=2, num_topk=8'
    for best in 'dispatch (FP8)' 'dispatch (BF16)' combine; do
        for i in 1 2 3; do
            echo "[tuning] SMs 24, NVL chunk 4, RDMA chunk 8: $((50 + i)).00 GB/s (RDMA), 150.00 GB/s (NVL) "
        done
        echo "[tuning] Best $best: SMs 24, NVL chunk 16, RDMA chunk 8: 12 + 345 us, $1 GB/s (RDMA), 258.0 GB/s (NVL)"
    done
}

# make_run NAME RDMA DATE [EXIT_CODE] [WEAK_BYTES]
make_run() {
    local logs="$BATS_TEST_TMPDIR/$1/testbed-logs"
    mkdir -p "$logs"
    internode "$2" >"$logs/coordinator.log"
    internode "$2" >"$logs/worker-node-1.log"
    jq -n --arg date "$3" --argjson code "${4:-0}" --argjson weak "${5:-2000000}" '{schema_version: 1, epkit: "0.1.0",
        commit: "abc", job: "deepep-internode", command: "epkit launch \u0027<x> & y\u0027", began: $date, exit_code: $code, nodes: 2,
        failed_host: (if $code > 0 then "node-1" else null end), environment: {NCCL_NET: "gIB <b>"},
        findings: [{id: "memlock", severity: "warning", text: "the limit is low", nodes: ["node-0", "node-1"]}],
        hosts: [range(2) as $n | {name: "node-\($n)", rank: $n, location: null, exit_code: 0, gpu: "NVIDIA B200",
            driver: "580.126.09", kernel: "6.14.0", epkit: "0.1.0", nics: [range(8) as $i | {device: "mlx5_\($i)",
            port: 1, tx_bytes: (if $n == 1 and $i == 5 then $weak else 2000000 end), rx_bytes: 0}]}]}' \
        >"$logs/run.json"
}

report() {
    run --separate-stderr epkit report "$@"
    echo "$output"
    echo "$stderr" >&2
}

setup() {
    cd "$BATS_TEST_TMPDIR" || return 1
}

@test "a page and a document; both whole, the document as its schema says" {
    make_run a 80 2026-02-03T10:00:00Z
    report a
    [ "$status" -eq 0 ]
    valid report a/report.json
    jq '.parsed + {schema_version: 1, epkit: .epkit, subcommand: "parse"}' a/report.json | valid parse
    [ "$(tail -1 a/report.html)" = '</html>' ]
    grep -q 'epkit launch .*&lt;x&gt; &amp; y' a/report.html
    run ! grep -E "(src|href)=[\"'][^#\"']|@import|url\(|<script|<link|://" a/report.html
    [ "$(jq -r '[.hardware, .job, .hosts[1].driver, .environment.NCCL_NET] | join(" ")' a/report.json)" = \
        "b200 deepep-internode 580.126.09 gIB <b>" ]
    [ "$(jq -r '.findings[1] | "\(.host) \(.id)"' a/report.json)" = "node-1 memlock" ]
    run -0 --separate-stderr bash -c "'$EPKIT' report --json a | python3 -S '$EPKIT_SOURCE/tests/cli/validate.py' '$EPKIT_SOURCE/cmd/report/schema.json'"
}

@test "pages of good, slow, failed, hung, uneven, compared and unknown runs, and of epkit run" {
    python3 -S "$EPKIT_SOURCE/tests/parse/pages.py" "$EPKIT" .
    grep -q 'class="verdict bad"><span>The run failed, first on gpu-1: the program ended with 1. ' failed/report.html
    grep -q 'RuntimeError: DeepEP error: CPU recv timeout: an internode dispatch got no counts.*doctor id nic-handler).</span>' failed/report.html
    grep -q 'testbed-logs/worker-gpu-1.log:16, 1 times)' failed/report.html
    grep -q '<span>The run did not end before its deadline. test_ep, 1 node: 0/144 cases passed' hung/report.html
    grep -q 'float out-of-place [0-9.]* GB/s (busbw), all_reduce float in-place ' good/report.html
    grep -q '2026-11-28T10:00:00Z, 3:24 minutes' good/report.html
    grep -q '>81 GB/s expected</dd>' slow/report.html
    grep -q '<li class="soft">% PEAK is of NICs, 50 GB/s for each GPU' slow/report.html
    grep -q '<p>Nodes whose NICs carried alike: 1 of 2;' nodes/report.html
    run ! grep 'Figures' unknown/report.html
    grep -q 'coordinator.log ends with:' unknown/report.html
    jq -e '.tail.lines[-1] == "INFO:     Application startup complete."' unknown/report.json
    valid report unknown/report.json
    [ -z "${EPKIT_SANITIZED-}" ] || return 0 # to a browser they are those of the other build
    # In a browser: nothing is cut, plots are drawn, at the width of a laptop and of a phone, light and dark.
    run python3 -S "$EPKIT_SOURCE/tests/parse/page.py" good/report.html:1 slow/report.html:2 failed/report.html:0 \
        hung/report.html:0 nodes/report.html:3 after/report.html:3 compared/report.html:0 unknown/report.html:0 run/report.html:2
    [ "$status" -ne 77 ] || skip "there is no Chromium here"
    [ "$status" -eq 0 ]
}

@test "an idle NIC and a failed node are in the verdict and the exit code" {
    make_run idle 80 2026-02-03T10:00:00Z 0 1000
    report idle
    [ "$status" -eq 3 ]
    [[ "${lines[0]}" == *"1 NIC carried much less than the others."* ]]
    jq -e '.nics.hosts[1].nics[5].uneven and (.nics.hosts[0].uneven == 0)' idle/report.json
    make_run failed 80 2026-02-03T10:00:00Z 1
    report failed
    [ "$status" -eq 1 ]
    [[ "${lines[0]}" == "The run failed, first on node-1. "* ]]
}

@test "comparison: only what changed by more than noise" {
    make_run a 80 2026-02-03T10:00:00Z
    make_run b 77 2026-02-04T10:00:00Z
    make_run c 60 2026-02-05T10:00:00Z
    report --compare a b
    [ "$status" -eq 0 ]
    report --compare a c --output page
    [ "$status" -eq 3 ]
    [[ "${lines[0]}" == "3 of 3 figures are worse beyond noise; most of all "*" by 25.0%." ]]
    [ "$(tail -1 page/report.html)" = '</html>' ]
    valid report page/report.json
    epkit report a >/dev/null
    report --compare --json a/report.json c
    [ "$status" -eq 3 ]
    valid report <<<"$output"
    # One that a newer epkit wrote may mean something else by the same names.
    jq '.schema_version = 2' a/report.json >newer.json
    report --compare newer.json c
    [ "$status" -eq 2 ]
    [[ "$stderr" == *"newer.json: it is in version 2 of the format, this epkit reads 1"* ]]
    report --compare --noise 40 a c
    [ "$status" -eq 0 ]
    report --compare c a
    [ "$status" -eq 0 ]
}

@test "comparison: a test with small messages is no sweep that became slow" {
    table() {
        mkdir -p "$1"
        { echo '# Collective test starting: all_reduce_perf'
            echo '#  Rank  0 Group  0 Pid 1 on node-0 device  0 [0x1b] NVIDIA B200'
            echo "$2 $(($2 / 4)) float sum -1 123.4 8.50 $3 0 121.4 8.60 $3 0"
            printf '# Out of bounds values : 0 OK\n# Avg bus bandwidth    : %s\n' "$3"
        } >"$1/coordinator.log"
    }
    table sweep 17179869184 600
    table later 8589934592 300
    table small 1048576 16
    report --compare sweep later
    [ "$status" -eq 3 ]
    report --compare sweep small
    [ "$status" -eq 4 ]
    [[ "$output" == *"all_reduce_perf all_reduce float in-place up to 1 MiB "* ]]
    report --compare small small
    [[ "$output" == "No figure of 2 differs beyond noise."* ]]
}

@test "history: a line for each run; differences to the last other run; its spread is the noise" {
    local i
    for i in 1 2 3 4 5; do
        make_run "r$i" "80.$i" "2026-02-0${i}T10:00:00Z"
        report "r$i" --history h.jsonl
        [ "$status" -eq 0 ]
    done
    [ "$(wc -l <h.jsonl)" -eq 5 ]
    jq -e '.versions.driver == "580.126.09" and .commit == "abc" and .hardware == "b200" and .date' h.jsonl
    # 1.5% less is far outside of what these runs differ by.
    make_run r6 79 2026-02-06T10:00:00Z
    report r6 --history h.jsonl
    [[ "$output" == *"Compared with the previous run: 3 of 3 figures are worse beyond noise"* ]]
    jq -e '(.history | length == 6) and (.previous.rows[0].noise < 0.02)' r6/report.json
    valid report r6/report.json
    # Lines that are none do no harm, and are not lost.
    echo 'torn {' >>h.jsonl
    report r6 --history h.jsonl
    [[ "$stderr" == *"1 line is no entry and left out"* ]]
    [ "$(wc -l <h.jsonl)" -eq 8 ]
    # A run that is reported again, is still compared with the run before it.
    [[ "$output" == *"Compared with the previous run: 3 of 3 figures are worse beyond noise"* ]]
    jq -e '.history | length == 6' r6/report.json
    for i in 1 2 3; do report r6 --history h.jsonl; done
    make_run r7 79.5 2026-02-07T10:00:00Z
    report r7 --history h.jsonl
    jq -e '(.history | length == 7) and (.previous.rows[0].noise > 0.01)' r7/report.json
}

@test "history: the last line has no end" {
    make_run a 80 2026-02-03T10:00:00Z
    make_run b 81 2026-02-04T10:00:00Z
    report a --history h.jsonl
    truncate --size=-1 h.jsonl
    report b --history h.jsonl
    [ -z "$stderr" ]
    [ "$(wc -l <h.jsonl)" -eq 2 ]
    [ "$(jq -c .date h.jsonl | wc -l)" -eq 2 ]
}

@test "history: several at the same time leave whole lines" {
    local i pids=()
    make_run a 80 2026-02-03T10:00:00Z
    for i in 1 2 3 4 5 6; do
        "$EPKIT" report a --history h.jsonl --output "out$i" >/dev/null &
        pids+=($!)
    done
    for i in "${pids[@]}"; do wait "$i"; done
    [ "$(jq -c .date h.jsonl | wc -l)" -eq 6 ]
}

@test "full disks and wrong names leave nothing behind" {
    make_run a 80 2026-02-03T10:00:00Z
    report none
    [ "$status" -eq 2 ]
    report a a
    [ "$status" -eq 2 ]
    report a --output /dev/full/x
    [ "$status" -eq 1 ]
    echo '{' >a/testbed-logs/run.json
    report a
    [[ "$stderr" == *"run.json: line"*"it is left out"* ]]
    echo '{"schema_version": 2}' >a/testbed-logs/run.json
    report a
    [[ "$stderr" == *"run.json: its schema_version is not 1"*"it is left out"* ]]
    [ "$(find a -name '.report*' | wc -l)" -eq 0 ]
}

@test "what a report that was killed has left goes with the next one" {
    make_run a 70 2026-11-22T10:00:00Z
    echo half >a/.report.html.epkit-AbCdEf
    # A process that writes it right now holds a lock.
    echo half >a/.report.json.epkit-AbCdEf
    exec 5<a/.report.json.epkit-AbCdEf
    flock -n 5
    report a
    [ "$status" -eq 0 ] || [ "$status" -eq 3 ]
    [ ! -e a/.report.html.epkit-AbCdEf ]
    [ -e a/.report.json.epkit-AbCdEf ]
    exec 5<&-
    report a
    [ ! -e a/.report.json.epkit-AbCdEf ]
}

@test "a run that fails where the one before did not is worse, with figures or without; so is a rate of nothing" {
    local i
    mkdir good bad less
    for i in 1 2 3 4; do echo "[ $i/4] bf16 random, sync ... passed 1 ms"; done >good/coordinator.log
    head -n 3 good/coordinator.log >bad/coordinator.log
    report --compare good bad
    [ "$status" -eq 3 ]
    [[ "${lines[0]}" == "The later run failed, and the earlier one did not: epkit test: 3/4 cases passed"* ]]
    report --compare bad good
    [ "$status" -eq 4 ]
    report good --history all
    report bad --history all
    [[ "$output" == *"Compared with the previous run: The later run failed"* ]]
    make_run a 80 2026-02-03T10:00:00Z
    report a
    jq '(.figures[]).value = 0' a/report.json >none.json
    report --json --compare a none.json
    [ "$status" -eq 3 ]
    jq -e '[.rows[].rating] | unique == ["regression"]' <<<"$output"
    valid report <<<"$output"
}

@test "a run.json of other types than documented does not get into the report" {
    make_run a 80 2026-02-03T10:00:00Z
    jq '.exit_code = "x" | .job = 5 | .environment.N = 1 | .hosts[0].name = 7 | .hosts[1].rank = "z" | .hosts[2] = 3' \
        a/testbed-logs/run.json >changed && mv changed a/testbed-logs/run.json
    report a --json
    [ "$status" -eq 0 ]
    valid report <<<"$output"
    jq -e '.job == null and .environment == {NCCL_NET: "gIB <b>"} and .hosts[0].name == null' <<<"$output"
}

@test "characters that reverse, hide or split a text are in no page" {
    make_run a 80 2026-02-03T10:00:00Z
    jq '.job = "a\u202eb\u2028c\u200bd\u2066e" | .environment.X = .job | .command = .job' a/testbed-logs/run.json >new
    mv new a/testbed-logs/run.json
    report a
    [[ "$(grep -o 'a?b?c?d?e' a/report.html | wc -l)" -ge 2 ]]
    run ! grep -qP '[\x{202a}-\x{202e}\x{2028}\x{200b}\x{2066}]' a/report.html
}

@test "a folder of 10000 hosts, a command of 3 MB: linear" {
    mkdir run
    jq -n '{schema_version: 1, exit_code: 1, command: ("epkit launch " + "token=" * 500000), hosts: [range(10000) | {name: "h\(.)", why: "x"}]}' >run/run.json
    echo 'a: NCCL WARN' >run/worker-a.log
    run -1 thrifty 10 "$EPKIT" report run
}
