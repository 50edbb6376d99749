#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# epkit triangulate: by runs of a command.
#
# shellcheck disable=SC2154,SC2016 # $stderr is set by run; names that no shell may expand

load common

setup() {
    # measure BAD HOSTS: prints what test_internode would on these nodes; slow when BAD is among them.
    cat >"$BATS_TEST_TMPDIR/measure" <<'END'
#!/bin/sh
echo "$2" >>"$0.runs"
case ",$2," in *",$1,"*) rate=43 ;; *) rate=80 ;; esac
[ "$1" = broken ] && exit 1
echo "[config] num_tokens=2048, hidden=7168, num_topk_groups=2, num_topk=8"
echo "[tuning] Best combine: SMs 24, NVL chunk 4, RDMA chunk 8: $rate.0 GB/s (RDMA), 150.0 GB/s (NVL)"
END
    chmod +x "$BATS_TEST_TMPDIR/measure"
}

triangulate() {
    run --separate-stderr epkit triangulate --hardware b200 --nodes 2 "$@"
    echo "$output"
    echo "$stderr" >&2
}

# has_exited COMMAND-LINE
has_exited() {
    ! pgrep --full "$1" >/dev/null
}

@test "the plan first, then pairs; the slow node is found and confirmed" {
    triangulate --hosts n1,n2,n3,n4,n5,n6 --run "$BATS_TEST_TMPDIR/measure n4 {hosts}"
    [ "$status" -eq 3 ]
    [[ "${lines[0]}" == "Plan: 6 nodes: 3 pairs concurrently"* ]]
    [[ "$output" == *"Slow: n4, by 5 runs, 2 of them slow."* ]]
    [ "$(wc -l <"$BATS_TEST_TMPDIR/measure.runs")" -eq 5 ]
}

@test "many nodes; the document fits the schema" {
    seq -f 'node-%g slots=8' 1 100 >"$BATS_TEST_TMPDIR/hosts"
    triangulate --hosts "@$BATS_TEST_TMPDIR/hosts" --json --run "$BATS_TEST_TMPDIR/measure node-77 {hosts}"
    [ "$status" -eq 3 ]
    [ "$(jq -c '[.result, .slow, .plan.worst_case_runs, (.runs | length)]' <<<"$output")" = '["found",["node-77"],52,52]' ]
    valid triangulate <<<"$output"
}

@test "the plan alone starts nothing; a run that fails counts as slow; the deadline holds" {
    triangulate --hosts a,b,c --plan
    [ "$status" -eq 0 ]
    triangulate --hosts a,b,c --plan --json
    valid triangulate <<<"$output"
    [ ! -e "$BATS_TEST_TMPDIR/measure.runs" ]
    triangulate --hosts a,b,c,d --run "$BATS_TEST_TMPDIR/measure broken {hosts}"
    [ "$status" -eq 3 ]
    [[ "$output" == *"failed: Nothing was recognised"*"No single node"* ]]
    triangulate --hosts a,b --timeout 1 --run "sleep 600; : $BATS_TEST_TMPDIR {hosts}"
    [ "$status" -eq 3 ]
    [[ "$output" == *"it was terminated at its deadline"* ]]
    # None of this test's own processes, which concurrent tests do not know.
    within 10 has_exited "sleep 600; : $BATS_TEST_TMPDIR a,b"
}

@test "names that a shell would split are refused" {
    triangulate --hosts 'a,b;reboot' --run 'echo {hosts}'
    [ "$status" -eq 2 ]
    triangulate --hosts a,a --run 'echo {hosts}'
    [ "$status" -eq 2 ]
    triangulate --hosts a --run 'echo {hosts}'
    [ "$status" -eq 2 ]
    triangulate --hosts a,b --run 'echo'
    [ "$status" -eq 2 ]
}

@test "lists of nodes are those of epkit launch: ranges, ports, hostfiles with comments and settings" {
    cd "$BATS_TEST_TMPDIR"
    plan() { epkit triangulate --plan --json --hosts "$@" | jq .plan.nodes; }
    printf '# the job\r\na slots=8\r\nb # second\r\n[2001:db8::1]:222\r\n' >hosts
    [ "$(plan @hosts)" = 3 ]
    [ "$(plan 'gpu[001-100],root@login:222')" = 101 ]
    for wrong in 'a;b,c' 'a,$(id)' 'a,b,A' 'a,-x' 'n[1-5000]' @/dev/zero @/nowhere; do
        run --separate-stderr epkit triangulate --plan --hosts "$wrong"
        echo "$wrong: $stderr"
        [ "$status" -eq 2 ]
    done
}

@test "figures without anything to compare them with: exit code 4; a node that fails is found" {
    cat >"$BATS_TEST_TMPDIR/write" <<'END'
#!/bin/sh
case ",$2," in *",$1,"*) exit 1 ;; esac
cat <<'X'
                    RDMA_Write BW Test
 #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
 65536      5000             390.12             388.71               0.741405
---------------------------------------------------------------------------------------
X
END
    chmod +x "$BATS_TEST_TMPDIR/write"
    run -4 --separate-stderr epkit triangulate --hosts a,b,c,d --run "$BATS_TEST_TMPDIR/write none {hosts}" --json
    valid triangulate <<<"$output"
    jq -e '.slow == [] and .result == "open" and all(.runs[]; .ratio == null and .failed == null) and (.verdict | startswith("Not known: no run failed, and none could be compared"))' <<<"$output"
    run epkit triangulate --hosts a,b,c,d --run "$BATS_TEST_TMPDIR/write none {hosts}"
    [[ "${lines[3]}" == "a,b: passed; there is nothing to compare its figures with" ]]
    epkit triangulate --hosts a,b,c,d --hardware h200 --run "$BATS_TEST_TMPDIR/write none {hosts}"
    run -3 epkit triangulate --hosts a,b,c,d --run "$BATS_TEST_TMPDIR/write c {hosts}"
    [[ "$output" == *"Slow: c, by 4 runs, 2 of them slow."* ]]
}

@test "each run says by itself whether its figures were compared, whatever others were" {
    # Of a, figures of a machine that the log names; of c, figures of an unknown one; of e, none.
    cat >"$BATS_TEST_TMPDIR/mixed" <<'END'
#!/bin/sh
case ",$1," in
*,a,*) echo '# Collective test starting: all_reduce_perf'
       for i in 0 1 2 3 4 5 6 7; do
           echo "#  Rank  $i Group  0 Pid 1 on a device $i [0x1b] NVIDIA B200"
           echo "#  Rank $((i + 8)) Group  0 Pid 1 on b device $i [0x1b] NVIDIA B200"
       done
       echo '17179869184 4294967296 float sum -1 47000 365 685 0 47000 365 685 0'
       printf '# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 685\n' ;;
*,c,*) printf ' #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]\n'
       printf ' 65536      5000             390.12             388.71               0.741405\n' ;;
*) for i in 1 2 3 4; do echo "[ $i/4] bf16 random, sync ... passed 1 ms"; done ;;
esac
END
    chmod +x "$BATS_TEST_TMPDIR/mixed"
    for hosts in a,b,c,d,e,f c,d,a,b,e,f e,f,c,d,a,b; do
        run -0 --separate-stderr epkit triangulate --nodes 2 --hosts "$hosts" --json \
            --run "$BATS_TEST_TMPDIR/mixed {hosts}"
        echo "$hosts: $output" "$stderr"
        valid triangulate <<<"$output"
        jq -e 'def of(name): .runs[] | select((.hosts | length) == 2 and (.hosts | index(name)));
            (of("a").ratio | type) == "number" and of("c").ratio == null and of("e").ratio == null' <<<"$output"
    done
}

@test "a command that measures nothing names no node" {
    run -3 --separate-stderr epkit triangulate --hosts a,b,c --run 'echo {hosts}; exit 7' --json
    valid triangulate <<<"$output"
    jq -e '.slow == [] and (.verdict | startswith("No single node can be named: no group gave a figure: Nothing was"))' \
        <<<"$output"
}
