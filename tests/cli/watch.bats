#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# epkit watch: logs that processes write while it reads them.
#
# shellcheck disable=SC2154 # $stderr is set by run

# bats file_tags=once
load common

setup() {
    cd "$BATS_TEST_TMPDIR" || return 1
    export EPKIT_TEST_MARK="$BATS_TEST_TMPDIR"
    # Open MPI gives its ranks a pseudo-terminal; this is no rank.
    unset "${!OMPI_@}" "${!PMI_@}" "${!SLURM_@}"
}

teardown() {
    living | xargs --no-run-if-empty kill -KILL
}

# cases FROM TO: lines of test_intranode
cases() {
    local kind top asynchronous previous
    for previous in False True; do
        for asynchronous in False True; do
            for kind in BF16 BF16 FP8; do
                for top in without with; do
                    echo "[testing] Running with $kind, $top top-k (async=$asynchronous, previous=$previous) ... passed"
                done
            done
        done
    done | sed -n "$1,$2p"
}

config='[config] num_tokens=4096, hidden=7168, num_topk=8'

tuning() {
    echo '[tuning] SMs 24, NVL chunk 4: 145.73 GB/s (NVL), 414.01 us'
    echo '[tuning] Best dispatch (FP8): SMs 24, NVL chunk 24, 246.02 GB/s (NVL), t: 245.24 us'
    echo '[tuning] Best dispatch (BF16): SMs 24, NVL chunk 12, 339.80 GB/s (NVL), t: 344.40 us'
    echo '[tuning] Best combine: SMs 24, NVL chunk 7: 289.00 GB/s (NVL), t: 404.80 us'
}

whole() {
    echo "$config"
    cases 1 24
    tuning
}

# begin ARGUMENT...: watches in the background, with the streams in the files out and err. $watch: its process ID
begin() {
    env --default-signal=HUP,INT "$EPKIT" watch "$@" >out 2>err &
    watch=$!
}

# said TEXT: waits until the text is on standard error
said() {
    within 10 grep -qF -- "$1" err
}

# ends CODE
ends() {
    local code=0
    limited 20 tail --pid="$watch" -f /dev/null
    wait "$watch" || code=$?
    echo "exit code $code"
    cat out err
    [ "$code" -eq "$1" ]
}

@test "standard input: verdict, text and exit code of parse, at its end" {
    local log
    whole >good
    whole | head -5 >part
    { cat part; echo 'RuntimeError: CUDA error: an illegal memory access was encountered'; } >failed
    echo 'nothing that is known' >other
    : >empty
    for log in good part failed other empty; do
        expected=0
        epkit parse - <$log >parsed || expected=$?
        run --separate-stderr epkit watch - <$log
        echo "$log: $status: $output"
        [ "$status" -eq "$expected" ]
        [ "$output" = "$(cat parsed)" ]
    done
    [ "$expected" -eq 4 ]
}

@test "a file that appears, grows and is complete: a line for each change" {
    begin run.log
    said 'run.log: no such file yet: waiting for it'
    echo "$config" >run.log
    said 'test_intranode: begun'
    cases 1 3 >>run.log
    said 'test_intranode: 3 of 24 cases passed'
    # The line of a case has no end until it has passed.
    printf %s "$(cases 4 4 | sed 's/ passed//')" >>run.log
    sleep 1
    echo ' passed' >>run.log
    said '4 of 24 cases passed'
    cases 5 24 >>run.log
    said 'all 24 cases passed, tuning 1 of 3'
    tuning >>run.log
    said 'test_intranode: complete'
    ends 0
    [[ "$(head -1 out)" == "test_intranode, 1 node: 24/24 cases passed; "* ]]
    # A line for each change, and no other one.
    [ "$(grep -c '^epkit: watch, [0-9]* s: ' err)" -eq "$(sort -u -k4 err | wc -l)" ]
}

@test "a FIFO ends with its writer, whether killed or not" {
    mkfifo pipe
    begin pipe
    (whole; exec sleep 1000) >pipe &
    writer=$!
    said 'test_intranode: complete'
    kill -0 "$watch"
    kill -KILL "$writer"
    ends 0
    begin pipe
    (echo "$config"; cases 1 7; exec sleep 1000) >pipe &
    writer=$!
    said '7 of 24'
    kill -KILL "$writer"
    ends 1
    [[ "$(head -1 out)" == *"7/24 cases passed, the log ends after case 7"* ]]
}

@test "a run that hangs: what was seen last, since when, which node is late" {
    {
        echo "$config"
        cases 1 5
        printf '[testing] Running with BF16, without top-k (async=True, previous=False) ...'
    } >run.log
    run --separate-stderr epkit watch --idle 2 run.log
    echo "$output$stderr"
    [ "$status" -eq 1 ]
    [[ "${lines[0]}" == "Hung: nothing was written for "?*" s. test_intranode, 1 node: 5/24 cases passed, the log ends in case 6"* ]]
    [[ "$output" == *"last line: [testing] Running with BF16, without top-k (async=True, previous=False) ..." ]]
    run --separate-stderr epkit watch --json --idle 1 run.log
    [ "$status" -eq 1 ]
    valid watch <<<"$output"
    jq '.parsed + {schema_version: 1, epkit: .epkit, subcommand: "parse"}' <<<"$output" | valid parse
    jq -e '.result == "hung" and .ended_by == "idle" and .silent_seconds >= 1 and (.parsed.runs[0].cases.passed == 5)' <<<"$output"
    # Without the deadline it goes on, and says so.
    begin run.log
    said 'nothing written for'
    said ', last: [testing] Running with BF16, without top-k (async=True, previous=False) ...'
    kill -0 "$watch"
    kill -INT "$watch"
    ends 130
}

@test "a run of one case of DeepEP 2 is complete and does not hang" {
    local call rank mark name after
    {
        printf 'Config:\n > Ranks: 1 x 2\n > Experts: 6/256\n > Tokens: 4096 (max: 4096), hidden: 7168\n > #SM: 64\n'
        printf '\nRunning all test cases:\n > Testing with %s%s\n' \
            'do_handle_copy=1, expert_alignment=128, use_fp8_dispatch=1, num_bias=0, ' \
            'with_previous_event=0, async_with_compute_stream=0, allocate_on_comm_stream=0 ...'
        for call in '* dispatch copy' '- expanded_dispatch copy' '# cached_dispatch copy' '@ combine reduce' '+ reduced_combine reduce'; do
            for rank in 0 1; do
                read -r mark name after <<<"$call"
                echo "   $mark EP:   $rank/2 | ${name/_/ }: 0 GB/s (SO), 567 GB/s (SU), 106.025 us, 60137448 bytes | $after: 4002 GB/s, 30.051 us"
            done
        done
        echo
    } >run.log
    run -0 --separate-stderr epkit watch --idle 1 run.log
    [[ "${lines[0]}" == "test_ep, 1 node: 1/1 cases passed; "* ]]
}

@test "names that are cut within a character" {
    local name

    name=$(printf '中%.0s' {1..90})
    { echo "[pod/$name/w] $config"; echo "[pod/b/w] $config"; } >run.log
    run -1 --separate-stderr epkit watch --json --idle 1 run.log
    valid watch <<<"$output"
    jq -e '.verdict | startswith("Hung: ")' <<<"$output"
}

@test "several nodes: the slowest one counts, and the silent one is named" {
    local i
    mkfifo pipe
    begin --idle 600 pipe
    exec 7>pipe
    { echo "$config"; cases 1 2; } | sed 's|^|[pod/deepep-0/w] |' >&7
    { echo "$config"; cases 1 1; } | sed 's|^|[pod/deepep-1/w] |' >&7
    said 'test_intranode of pod/deepep-1/w: 1 of 24 cases passed'
    # A node is late after ten seconds in which another one went on.
    for ((i = 0; i < 20 * PATIENCE; i++)); do
        ! grep -q '1 of 24 cases passed; pod/deepep-1/w silent for 1[0-9] s' err || break
        cases $((3 + i % 20)) $((3 + i % 20)) | sed 's|^|[pod/deepep-0/w] |' >&7
        sleep 1
    done
    grep -q 'silent for' err
    exec 7>&-
    ends 1
}

@test "a failure is said when it is printed; the file ends when nothing follows it" {
    whole | head -6 >run.log
    begin run.log
    said '5 of 24'
    echo 'RuntimeError: CUDA error: an illegal memory access was encountered' >>run.log
    said 'failed: RuntimeError: CUDA error: an illegal memory access was encountered'
    kill -INT "$watch"
    ends 130
    grep -q 'illegal memory access' out
    run ! grep -q 'So far' out
}

@test "a file that is rotated, removed, truncated: it goes on" {
    { echo "$config"; cases 1 2; } >run.log
    begin run.log
    said '2 of 24'
    mv run.log run.log.1
    # The writer still has the old one.
    cases 3 5 >>run.log.1
    said '5 of 24'
    cases 6 9 >run.log
    said 'run.log was replaced'
    said '9 of 24'
    rm run.log
    cases 10 12 >new
    mv new run.log
    said '12 of 24'
    : >run.log
    said 'run.log was truncated'
    cases 13 24 >>run.log
    said 'all 24 cases passed'
    tuning >>run.log
    ends 0
    grep -q '24/24 cases passed' out
}

# bats test_tags=both
@test "deadlines: of a run that goes on, of a file that never appears" {
    mkfifo pipe
    # What is written is there before the deadline begins; the pipe has a writer until the end.
    exec 9<>pipe
    { echo "$config"; cases 1 2; } >&9
    begin --timeout 2 pipe
    ends 5
    exec 9>&-
    [[ "$(head -1 out)" == "Not over after "?*" s. So far: test_intranode, 1 node: 2/24 cases passed"* ]]
    run --separate-stderr epkit watch --idle 1 none
    [ "$status" -eq 2 ]
    [[ "$stderr" == *"none: no such file after "* ]]
    # It is said at once; without another deadline it ends after a minute, as the manual page says.
    if [ -n "${EPKIT_TEST_LONG:-}" ]; then
        run --separate-stderr epkit watch none
        [ "$status" -eq 2 ]
        [[ "$stderr" == *"none: no such file yet: waiting for it"*"none: no such file after 6"[0-9]" s; "*"--timeout"* ]]
    fi
    run --separate-stderr epkit watch .
    [ "$status" -eq 2 ]
    [[ "$stderr" == *"Is a directory"* && "$stderr" != *waiting* ]]
    run --separate-stderr epkit watch /dev/zero
    [ "$status" -eq 2 ]
    run --separate-stderr epkit watch
    [ "$status" -eq 2 ]
}

@test "several runs in one file: --until-end does not stop at the first" {
    whole >run.log
    begin --until-end --idle 8 --quiet run.log
    sleep 6
    kill -0 "$watch"
    whole >>run.log
    ends 0
    [ "$(head -1 out)" = "2 runs: 2 passed, 0 failed, 0 slow." ]
    [ ! -s err ]
}

@test "an interrupt prints the verdict so far; in JSON it is whole" {
    mkfifo pipe
    for option in --quiet --json; do
        begin "$option" pipe
        (echo "$config"; cases 1 2; exec sleep 1000) >pipe &
        writer=$!
        [ "$option" = --quiet ] || said '2 of 24'
        [ "$option" = --json ] || sleep 1
        kill -INT "$watch"
        ends 130
        kill -KILL "$writer"
    done
    valid watch out
    jq -e '.result == "unfinished" and .ended_by == "interrupted" and .parsed.runs[0].cases.passed == 2' out
}

@test "on a terminal one line is rewritten" {
    command -v script >/dev/null || skip "script is not installed"
    { echo "$config"; cases 1 3; } >run.log
    TERM=xterm limited 10 script -qec "stty cols 60; $EPKIT watch --idle 3 run.log" typescript >/dev/null || true
    tr '\r' '\n' <typescript >lines
    cat -v lines
    grep -q 'watch [0-9]* s  test_intranode: 3 of 24 cases passed' lines
    [ "$(grep -c $'^\033\\[Kwatch' lines)" -ge 5 ]
    # What does not fit is cut: a line that wraps cannot be rewritten.
    [ "$(sed -n $'s/^\033\\[Kwatch/watch/p' lines | sed $'s/\033.*//' | wc -L)" -le 60 ]
    run ! grep -q '^epkit: watch' lines
}

@test "launch's own stream" {
    whole >log
    # shellcheck disable=SC2016 # the shell of the script expands it
    printf '#!/bin/sh\nfor last; do :; done\nexec sh -c "$last"\n' >ssh
    chmod +x ssh
    run --separate-stderr bash -c "'$EPKIT' launch --ssh '$PWD/ssh' --no-logs --checks skip --hosts a \\
        cat '$PWD/log' | '$EPKIT' watch -"
    echo "$output$stderr"
    [ "$status" -eq 0 ]
    [[ "$output" == "test_intranode, 1 node: 24/24 cases passed"* ]]
}

# bats test_tags=both
@test "a log of days: the memory does not grow with it" {
    # A leak of a hundred bytes in each line would not fit.
    python3 -S - >script <<'END'
for day in range(3):
    for i in range(33000):
        print(f"INFO 2026-02-0{day + 1} step {i}: loss 0.1, NCCL INFO ring {i % 97}", f"[rank{i % 64}] x")
END
    whole >>script
    run --separate-stderr bash -c "ulimit -v 20000; cat '$PWD/script' | '$EPKIT' watch --quiet -"
    [ -n "$EPKIT_SANITIZED" ] || [ "$status" -eq 0 ]
}
