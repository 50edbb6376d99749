#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Counters of NICs: sequences of known counters in a tree, commands around which they are read, and this machine's lo.
#
# shellcheck disable=SC2154 # $stderr is set by run
# shellcheck disable=SC2016 # what commands do is written for the shell that runs them

load common

ROOT="$BATS_TEST_TMPDIR/root"

# nic NAME ADDRESS [PORTS]: an active RDMA NIC of 400 Gb/s without any traffic
nic() {
    local folder="$ROOT/sys/devices/pci0000:00/$2" port
    mkdir -p "$folder/infiniband/$1" "$ROOT/sys/bus/pci/devices" "$ROOT/sys/class/infiniband"
    echo 0x020700 >"$folder/class"
    echo 0x15b3 >"$folder/vendor"
    echo 0x1021 >"$folder/device"
    echo 0 >"$folder/numa_node"
    ln -s "../../../devices/pci0000:00/$2" "$ROOT/sys/bus/pci/devices/$2"
    ln -s "../../devices/pci0000:00/$2/infiniband/$1" "$ROOT/sys/class/infiniband/$1"
    ln -s "../../../$2" "$folder/infiniband/$1/device"
    for port in $(seq "${3:-1}"); do
        mkdir -p "$folder/infiniband/$1/ports/$port/"{counters,hw_counters}
        echo "4: ACTIVE" >"$folder/infiniband/$1/ports/$port/state"
        echo "5: LinkUp" >"$folder/infiniband/$1/ports/$port/phys_state"
        echo "400 Gb/sec (4X NDR)" >"$folder/infiniband/$1/ports/$port/rate"
        echo InfiniBand >"$folder/infiniband/$1/ports/$port/link_layer"
        set_counters "$1:$port" port_xmit_data 0 port_rcv_data 0 port_xmit_packets 0 port_rcv_packets 0 \
            symbol_error 0 port_xmit_wait 0
    done
}

gpu() {
    local folder="$ROOT/sys/devices/pci0000:00/$1"
    mkdir -p "$folder"
    echo 0x030200 >"$folder/class"
    echo 0x10de >"$folder/vendor"
    echo 0x2330 >"$folder/device"
    echo 0 >"$folder/numa_node"
    ln -s "../../../devices/pci0000:00/$1" "$ROOT/sys/bus/pci/devices/$1"
}

# set_counters NIC:PORT [NAME VALUE]...
set_counters() {
    local port="$ROOT/sys/class/infiniband/${1%:*}/ports/${1#*:}"
    shift
    while [ $# -gt 0 ]; do
        case "$1" in
        hw_counters/*) echo "$2" >"$port/$1" ;;
        *) echo "$2" >"$port/counters/$1" ;;
        esac
        shift 2
    done
}

# A machine of N GPUs and N NICs; the script that a command of the test runs is made by the function `during`.
machine() {
    mkdir -p "$ROOT"
    for i in $(seq 0 $(($1 - 1))); do
        nic "mlx5_$i" "0000:00:$(printf %02x $((i + 4))).0"
        gpu "0000:00:$(printf %02x $((i + 20))).0"
    done
    export -f set_counters seen
    export ROOT
}

# In a command that epkit runs: until epkit has read every counter twice, so once from its begin to its end. epkit is the
# parent of the process that supervises the command.
seen() {
    local reader calls files
    reader=$(sed -n 's/^PPid:[[:space:]]*//p' "/proc/$PPID/status")
    files=$(find "$ROOT" -path '*counters/*' -type f | wc -l)
    calls=$(sed -n 's/^syscr: //p' "/proc/$reader/io")
    until [ "$(sed -n 's/^syscr: //p' "/proc/$reader/io")" -ge $((calls + 4 * files)) ]; do
        sleep 0.05
    done
}

# during COMMAND: as `epkit nics --from ROOT -- CMD`, where CMD is shell text that may set counters
during() {
    epkit nics --from "$ROOT" --output "$BATS_TEST_TMPDIR/report" "${@:2}" -- bash -c "$1"
}

report() {
    jq "$@" "$BATS_TEST_TMPDIR/report"
}

verdict_is() {
    local said
    said=$(head -1 "$BATS_TEST_TMPDIR/report")
    echo "$said"
    # shellcheck disable=SC2053 # a pattern
    [[ "$said" == $1 ]]
}

# --- what is counted ---

@test "words of 4 bytes, packets, errors and congestion, and the GPU of each NIC" {
    machine 2
    set_counters mlx5_0:1 port_xmit_data 1000 symbol_error 3 hw_counters/np_cnp_sent 5
    during 'set_counters mlx5_0:1 port_xmit_data 1000001000 port_rcv_data 500000000 port_xmit_packets 77 symbol_error 4
            set_counters mlx5_1:1 port_xmit_data 900000000 port_rcv_data 600000000 port_xmit_wait 9' --json
    valid nics "$BATS_TEST_TMPDIR/report"
    [ "$(report -c '[.devices[] | .device, .gpus]')" = '["mlx5_0",[0],"mlx5_1",[1]]' ]
    [ "$(report -c '.devices[0].moved | [.sent_bytes, .received_bytes, .sent_packets, .errors, .congestion]')" = \
        '[4000000000,2000000000,77,1,0]' ]
    [ "$(report -c '.devices[0].total | [.sent_bytes, .errors, .congestion]')" = '[4000004000,4,5]' ]
    [ "$(report '.devices[1].moved.congestion')" -eq 9 ]
    [ "$(report '.devices[1].moved.sent_bytes')" -eq 3600000000 ]
    [ "$(report '[.devices[0].counters[] | select(.name == "port_xmit_data")][0].total')" -eq 4000004000 ]
    [ "$(report .uneven)" = false ]
    [ "$(report '.devices[0].load * 50 / .devices[0].sent_gbs | round')" -eq 1 ]
    [ "$(report -c .command)" = "$(report -c '{args: ["bash", "-c", .command.args[2]], exit_code: 0, signal: null}')" ]
}

@test "a counter of 32 bits goes around several times while a command runs: all of it is counted" {
    machine 1
    set_counters mlx5_0:1 port_xmit_data 4294967000 port_rcv_data 10
    during 'for value in 1000000000 2400000000 3800000000 900000000 2300000000 3700000000 800000000 2200000000; do
                set_counters mlx5_0:1 port_xmit_data $value
                seen
            done' --json
    # 296 words to 2^32, twice around, and to 2200000000; the two ends alone would say 2200000296.
    [ "$(report '.devices[0].moved.sent_bytes')" -eq $(((296 + 2 * 4294967296 + 2200000000) * 4)) ]
}

@test "counters of 64 bits go around; one that is set back is named" {
    machine 2
    set_counters mlx5_0:1 port_xmit_data 18446744073709551000 port_rcv_data 70000000000
    set_counters mlx5_1:1 port_xmit_data 70000000000 port_rcv_data 70000000000
    during 'set_counters mlx5_0:1 port_xmit_data 250000000 port_rcv_data 70000000004
            set_counters mlx5_1:1 port_xmit_data 250000616 port_rcv_data 70000000004' --json
    valid nics "$BATS_TEST_TMPDIR/report"
    [ "$(report '.devices[0].moved.sent_bytes')" -eq 1000002464 ]
    [ "$(report '.devices[1].moved.sent_bytes')" -eq 1000002464 ]
    [ "$(report '[.devices[] | .counters[] | select(.reset)] | length')" -eq 1 ]
    [ "$(report '.notes | length')" -eq 1 ]
    [ "$(report -r '.notes[0]')" = \
        "mlx5_1: port_xmit_data was reset during the period; the change is its value since then" ]
}

@test "counters that cannot be read are named, and so are devices that come and go" {
    machine 3
    rm "$ROOT/sys/class/infiniband/mlx5_0/ports/1/counters/port_rcv_packets"
    set_counters mlx5_0:1 symbol_error nonsense
    rm -r "$ROOT/sys/class/infiniband/mlx5_2/ports/1/counters"
    during 'rm -r "$ROOT/sys/class/infiniband/mlx5_1/ports/1/counters"
            mkdir "$ROOT/sys/class/infiniband/mlx5_2/ports/1/counters"
            set_counters mlx5_2:1 port_xmit_data 5 port_rcv_data 5 port_xmit_packets 5 port_rcv_packets 5' --json
    valid nics "$BATS_TEST_TMPDIR/report"
    report .notes
    [ "$(report '.notes | length')" -eq 4 ]
    report -e '.notes | index("mlx5_0: port_rcv_packets could not be read: there is no such counter")'
    report -e '.notes | index("mlx5_0: symbol_error could not be read: it is not a number")'
    report -e '.notes | index("mlx5_1 has vanished: its counters are those of the last sample")'
    report -e '.notes | index("mlx5_2 has appeared during the period: its earlier changes are unknown")'
    [ "$(report -c '[.devices[].present]')" = '[true,false,true]' ]
}

# --- the verdict ---

@test "one NIC of four: a finding, and whose it is" {
    machine 4
    during 'set_counters mlx5_0:1 port_xmit_data 500000000
            for i in 1 2 3; do set_counters mlx5_$i:1 port_xmit_data 100000; done' --json
    [ "$(report .uneven)" = true ]
    report -r .verdict | grep -Eq '^1 of 4 NICs carried the traffic within [0-9.]+ m?s \(2\.0 GB\): mlx5_0 99\.9 %\.$'
    during 'set_counters mlx5_0:1 port_xmit_data 1000000000
            set_counters mlx5_2:1 port_xmit_data 500000000'
    verdict_is "2 of 4 NICs carried the traffic within * (4.0 GB): mlx5_0 50.0 %, mlx5_2 50.0 %."
    grep -q "'epkit topo' shows which GPU should use which NIC" "$BATS_TEST_TMPDIR/report"
}

@test "all NICs, evenly and not; hardly any traffic, and none" {
    machine 2
    during 'set_counters mlx5_0:1 port_xmit_data 500000000; set_counters mlx5_1:1 port_rcv_data 510000000'
    verdict_is "2 of 2 NICs carried 4.0 GB within *, evenly (spread 1.01)."
    during 'set_counters mlx5_0:1 port_xmit_data 1000000000; set_counters mlx5_1:1 port_rcv_data 610000000'
    verdict_is "2 of 2 NICs carried 2.4 GB within *, unevenly: mlx5_0 carried 1.7 times the average."
    during 'set_counters mlx5_0:1 port_xmit_data 1000200000'
    verdict_is "Hardly any traffic within *: 800.0 kB, too little to judge its balance."
    during 'true'
    verdict_is "No traffic within *."
    during 'set_counters mlx5_1:1 symbol_error 12'
    verdict_is "No traffic within *. Errors were counted on mlx5_1. mlx5_1: 12 symbols were damaged on the link within *."
    grep -q '^mlx5_1 symbol_error *12 *12 symbols damaged' "$BATS_TEST_TMPDIR/report"
}

@test "without a command uneven traffic is exit code 3; a NIC without a GPU does not count" {
    machine 2
    nic mlx5_2 0000:00:0a.0
    set_counters mlx5_0:1 port_xmit_data 1000000
    set_counters mlx5_1:1 port_xmit_data 1100000
    run -0 epkit nics --from "$ROOT" --devices mlx5_2
    [[ "${lines[0]}" == "No traffic within "[0-9.]*" s, nor since boot." ]]
    run -0 epkit nics --from "$ROOT"
    [[ "${lines[0]}" == "No traffic within "[0-9.]*" s. 2 of 2 NICs carried 8.4 MB since boot, evenly (spread 1.05)." ]]
    run -3 epkit nics --from "$ROOT" --devices mlx5_0,mlx5_2:1
    [[ "${lines[0]}" == *"1 of 2 NICs carried the traffic since boot (4.0 MB): mlx5_0 100.0 %." ]]
    set_counters mlx5_2:1 port_xmit_data 900000000
    run -3 epkit nics --from "$ROOT"
    [[ "${lines[0]}" == *"1 of 3 NICs carried the traffic since boot (3.6 GB): mlx5_2 99.8 %." ]]
}

@test "management NICs and ports that are down are not shown; ports of one NIC are" {
    machine 1
    nic mlx5_4 0000:00:08.0 2
    nic mlx5_5 0000:00:09.0
    nic mlx5_6 0000:00:0b.0
    echo "100 Gb/sec (4X EDR)" >"$ROOT/sys/class/infiniband/mlx5_5/ports/1/rate"
    echo "1: DOWN" >"$ROOT/sys/class/infiniband/mlx5_6/ports/1/state"
    [ "$(epkit nics --from "$ROOT" --json | jq -c '[.devices[] | .device, .port]')" = \
        '["mlx5_0",1,"mlx5_4:1",1,"mlx5_4:2",2]' ]
    [ "$(epkit nics --from "$ROOT" --json --devices mlx5_6 | jq -c '[.devices[] | .device]')" = '["mlx5_6"]' ]
}

# --- commands ---

@test "a command has standard input, output and error to itself" {
    machine 1
    run -0 --separate-stderr during 'cat; echo to-error >&2; exit 0' <<<"through"
    [ "$output" = through ]
    [ "$stderr" = to-error ]
    run --separate-stderr epkit nics --from "$ROOT" -- echo first
    [ "${lines[0]}" = first ]
    [[ "${lines[1]}" == "No traffic within"* ]]
    [ -z "$stderr" ]
}

@test "the exit code is that of the command" {
    machine 1
    for code in 0 1 3 4 77 125 200 255; do
        run --separate-stderr during "exit $code"
        [ "$status" -eq "$code" ]
        [ -z "$stderr" ]
    done
    run -139 --separate-stderr during 'kill -SEGV $$'
    during 'kill -KILL $$' --json || true
    [ "$(report -c '[.command.exit_code, .command.signal]')" = '[137,9]' ]
}

@test "a command that is not there is 127, one that cannot be executed 126, and no report" {
    machine 1
    run -127 --separate-stderr epkit nics --from "$ROOT" -- no-such-command
    [ -z "$output" ]
    [[ "$stderr" == *"'no-such-command' could not be started: No such file or directory"* ]]
    run -126 --separate-stderr epkit nics --from "$ROOT" -- /etc/passwd
}

# passes SIGNAL CODE: epkit gets the signal, the command sees it, and epkit's exit code is the command's
passes() {
    local code=0 launched
    rm -f "$BATS_TEST_TMPDIR/ready" "$BATS_TEST_TMPDIR/got"
    # Shells start background processes with SIGINT ignored, nohup those with SIGHUP.
    env --default-signal=HUP,INT,QUIT "$EPKIT" nics --from "$ROOT" --output "$BATS_TEST_TMPDIR/report" -- bash -c "
        trap 'echo $1 >\"$BATS_TEST_TMPDIR/got\"; exit 41' $1
        : >\"$BATS_TEST_TMPDIR/ready\"
        while :; do sleep 0.1; done" &
    launched=$!
    within 10 test -e "$BATS_TEST_TMPDIR/ready"
    kill "-$1" "$launched"
    wait "$launched" || code=$?
    [ "$(cat "$BATS_TEST_TMPDIR/got")" = "$1" ]
    [ "$code" -eq 41 ]
    verdict_is "No traffic within *"
}

@test "signals are passed on, and the report is written all the same" {
    machine 1
    for signal in TERM INT HUP QUIT USR1; do
        passes $signal
    done
}

@test "Ctrl-C at a terminal reaches the command once" {
    machine 1
    run python3 - "$EPKIT" nics --from "$ROOT" --output "$BATS_TEST_TMPDIR/report" -- bash -c "
        trap 'echo got >>\"$BATS_TEST_TMPDIR/got\"' INT
        trap 'exit 42' TERM
        : >\"$BATS_TEST_TMPDIR/ready\"
        while :; do sleep 0.05; done" <<EOF
import os
import pty
import signal
import sys
import time

def until(done):
    end = time.monotonic() + 10 * $PATIENCE
    while not done() and time.monotonic() < end:
        time.sleep(0.05)

process, terminal = pty.fork()
if process == 0:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # whoever runs the tests may ignore it, as shells do in the background
    os.execv(sys.argv[1], sys.argv[1:])
until(lambda: os.path.exists("$BATS_TEST_TMPDIR/ready"))
os.write(terminal, b"\x03")
until(lambda: os.path.exists("$BATS_TEST_TMPDIR/got"))
time.sleep(0.5)  # a second one would come now
os.kill(process, signal.SIGTERM)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
EOF
    [ "$status" -eq 42 ]
    [ "$(cat "$BATS_TEST_TMPDIR/got")" = got ]
    verdict_is "No traffic within *"
}

@test "a command that ends by the signal: so does epkit" {
    machine 1
    local code=0 launched
    "$EPKIT" nics --from "$ROOT" --output "$BATS_TEST_TMPDIR/report" -- sleep 2400 2>/dev/null 3>&- &
    launched=$!
    within 10 pgrep --parent "$launched"
    kill -TERM "$launched"
    wait "$launched" || code=$?
    [ "$code" -eq 143 ]
    [ -s "$BATS_TEST_TMPDIR/report" ]
}

@test "a report that cannot be written: 1 if the command succeeded, and it is not run in vain" {
    machine 1
    touch "$BATS_TEST_TMPDIR/report"
    run -1 --separate-stderr epkit nics --from "$ROOT" --output /dev/full -- true
    [[ "$stderr" == *"No space left on device"* ]]
    run -9 --separate-stderr epkit nics --from "$ROOT" --output /dev/full -- sh -c 'exit 9'
    run -1 --separate-stderr epkit nics --from "$ROOT" --output "$BATS_TEST_TMPDIR/no/folder" -- touch "$BATS_TEST_TMPDIR/ran"
    [ ! -e "$BATS_TEST_TMPDIR/ran" ]
    [[ "$stderr" == *"no/folder: No such file or directory"* ]]
    run -1 --separate-stderr epkit nics --from "$ROOT" --output "$BATS_TEST_TMPDIR/report/below" -- touch "$BATS_TEST_TMPDIR/ran"
    [ ! -e "$BATS_TEST_TMPDIR/ran" ]
    [[ "$stderr" == *"report/below: Not a directory"* ]]
    run -1 --separate-stderr epkit nics --from "$ROOT" --output /proc/sys/new -- true
    [[ "$stderr" == *"/proc/sys/new: "@(Permission denied|Read-only file system)* ]]
}

@test "a file is replaced as a whole: whoever reads it sees this report or the one before" {
    machine 1
    local file="$BATS_TEST_TMPDIR/report" before="$BATS_TEST_TMPDIR/before" signal launched code number
    epkit nics --from "$ROOT" --output "$file" --prometheus
    chmod 640 "$file"
    cp "$file" "$before"
    for signal in INT TERM HUP KILL; do
        env --default-signal=INT "$EPKIT" nics --from "$ROOT" --output "$file" --interval 3600 2>/dev/null 3>&- &
        launched=$!
        # It has set up its signals (SIGXFSZ and SIGPIPE are ignored), and waits.
        within 20 sh -c "grep -qs '^State:.S' /proc/$launched/status && grep -qs '^SigIgn:.*1001' /proc/$launched/status"
        code=0
        kill "-$signal" "$launched"
        wait "$launched" || code=$?
        [ "$code" -gt 128 ]
        cmp "$file" "$before"
    done
    epkit nics --from "$ROOT" --output "$file" -- ./no-such-command || [ $? -eq 127 ]
    cmp "$file" "$before"
    number=$(stat -c %i "$file")
    epkit nics --from "$ROOT" --output "$file" --json -- true
    valid nics <"$file"
    [ "$(stat -c %i "$file")" -ne "$number" ]
    [ "$(stat -c %a "$file")" = 640 ]
    [ -z "$(find "$BATS_TEST_TMPDIR" -name '*epkit-*')" ]
    # A link stays one, and what is no file is written to.
    ln -s "$file" "$BATS_TEST_TMPDIR/link"
    epkit nics --from "$ROOT" --output "$BATS_TEST_TMPDIR/link" --prometheus
    [ -L "$BATS_TEST_TMPDIR/link" ]
    grep -q '^# TYPE' "$file"
    epkit nics --from "$ROOT" --output /dev/stdout --prometheus | grep -q '^# TYPE'
    # A disk without room keeps the report before.
    epkit nics --from "$ROOT" --output "$file" --prometheus
    cp "$file" "$before"
    run -1 bash -c 'ulimit -f 0; exec "$@"' - "$EPKIT" nics --from "$ROOT" --output "$file" --prometheus
    [[ "$output" == *"writing $file: "* ]]
    cmp "$file" "$before"
}

@test "no NIC, and nobody can read that: 1, also where a command was not run" {
    mkdir "$BATS_TEST_TMPDIR/bare"
    for arguments in "" "--json" "-- true" "--json -- true"; do
        # shellcheck disable=SC2086 # words
        run --separate-stderr bash -c '"$@" >/dev/full' - "$EPKIT" nics --from "$BATS_TEST_TMPDIR/bare" $arguments
        echo "$arguments: $status $stderr"
        [ "$status" -eq 1 ]
        [[ "$stderr" == *"No space left on device"* ]]
    done
}

# --- forms ---

@test "Prometheus: every metric once with help and type, counters in bytes" {
    machine 2
    mkdir -p "$ROOT/sys/class/net/eth7/statistics"
    echo 12 >"$ROOT/sys/class/net/eth7/statistics/rx_bytes"
    echo 3 >"$ROOT/sys/class/net/eth7/statistics/rx_dropped"
    set_counters mlx5_0:1 port_xmit_data 9007199254740993 hw_counters/np_cnp_sent 5
    epkit nics --from "$ROOT" --devices mlx5_0,mlx5_1,eth7 --prometheus >"$BATS_TEST_TMPDIR/metrics"
    cat "$BATS_TEST_TMPDIR/metrics"
    grep -qF 'epkit_nic_sent_bytes_total{device="mlx5_0",port="1",gpu="0"} 36028797018963972' "$BATS_TEST_TMPDIR/metrics"
    grep -qF 'epkit_nic_received_bytes_total{device="eth7",port="",gpu=""} 12' "$BATS_TEST_TMPDIR/metrics"
    grep -qF 'epkit_nic_np_cnp_sent_total{device="mlx5_0",port="1",gpu="0"} 5' "$BATS_TEST_TMPDIR/metrics"
    grep -qF 'epkit_nic_rate_bytes_per_second{device="mlx5_1",port="1",gpu="1"} 50000000000' "$BATS_TEST_TMPDIR/metrics"
    python3 - "$BATS_TEST_TMPDIR/metrics" <<'EOF'
import re
import sys

known, now, series = {}, None, set()
for line in open(sys.argv[1], encoding="utf-8"):
    assert line.endswith("\n"), line
    if line.startswith("# HELP "):
        now = line.split()[2]
        assert now not in known, f"{now} again"
        known[now] = None
    elif line.startswith("# TYPE "):
        _, _, name, kind = line.split()
        assert name == now and known[name] is None, line
        known[name] = kind
        assert (kind == "counter") == name.endswith("_total"), line
    else:
        found = re.fullmatch(r'([a-zA-Z_:][a-zA-Z0-9_:]*)\{((?:[a-z]+="(?:[^"\\]|\\["\\n])*",?)*)\} ([0-9.e+]+)\n', line)
        assert found and found[1] == now and known[now], line
        assert (found[1], found[2]) not in series, f"{line} again"
        series.add((found[1], found[2]))
        float(found[3])
assert len(known) > 6
EOF
}

@test "a snapshot has totals and no rates" {
    machine 1
    set_counters mlx5_0:1 port_xmit_data 300000000
    epkit topo --from "$ROOT" --save "$BATS_TEST_TMPDIR/snapshot" >/dev/null
    run -0 --separate-stderr epkit nics --from "$BATS_TEST_TMPDIR/snapshot" --json
    valid nics <<<"$output"
    [ "$(jq -c '[.seconds, .devices[0].moved, .devices[0].sent_gbs]' <<<"$output")" = '[null,null,null]' ]
    for wish in "--interval 1" "-- true"; do
        # shellcheck disable=SC2086 # several words
        run -2 --separate-stderr epkit nics --from "$BATS_TEST_TMPDIR/snapshot" $wish
        [[ "$stderr" == *"a snapshot holds the counters of one moment, so there are no rates in it"* ]]
    done
}

# --- wrong and missing things ---

@test "devices that are not there, or twice, or no names: exit code 2 and what there is" {
    machine 1
    for names in mlx5_9 mlx5_0:7 mlx5_0:x ../../../etc . mlx5_0,,mlx5_0 ',' "$(printf 'x%.0s' {1..300})"; do
        run --separate-stderr epkit nics --from "$ROOT" --devices "$names"
        echo "$names: $stderr"
        [ "$status" -eq 2 ]
        [ -z "$output" ]
        [[ "$stderr" == "epkit: error: nics: --devices: "* ]]
    done
    run --separate-stderr epkit nics --from "$ROOT" --devices mlx5_9
    [[ "$stderr" == *"has no device 'mlx5_9'; it has: mlx5_0"* ]]
    run --separate-stderr epkit nics --from "$ROOT" --devices mlx5_0,mlx5_0:1
    [[ "$stderr" == *"mlx5_0 is named twice"* ]]
}

@test "options that exclude each other" {
    machine 1
    refuses() {
        run -2 --separate-stderr epkit nics --from "$ROOT" "${@:2}"
        [[ "$stderr" == *"$1"* ]]
    }
    refuses "--interval has no meaning" --interval 2 -- true
    refuses "--prometheus shows" --prometheus --json
    refuses "--prometheus shows" --prometheus -- true
    refuses "out of range" --interval 0
}

@test "nothing to look at: one line, exit code 4, and the command does not run" {
    mkdir -p "$ROOT/sys/class"
    run -4 --separate-stderr epkit nics --from "$ROOT" -- touch "$BATS_TEST_TMPDIR/ran"
    [ "${#lines[@]}" -eq 1 ]
    [ -z "$stderr" ]
    [ ! -e "$BATS_TEST_TMPDIR/ran" ]
    run -4 --separate-stderr epkit nics --from "$ROOT" --json
    valid nics <<<"$output"
    mkdir -p "$ROOT/sys/bus/pci/devices"
    gpu 0000:00:05.0
    run -4 --separate-stderr epkit nics --from "$ROOT"
    [ "${#lines[@]}" -eq 1 ]
    [ "$output" = "No RDMA NIC: the machine has 1 GPU and no RDMA device." ]
    # A report that was asked for in a file is there, and nowhere else.
    for format in "" --json --prometheus; do
        run -4 --separate-stderr epkit nics --from "$ROOT" --output "$BATS_TEST_TMPDIR/none" $format
        [ -z "$output$stderr" ]
        grep -q "No RDMA NIC: the machine has 1 GPU" "$BATS_TEST_TMPDIR/none"
    done
    grep -q '^# No RDMA NIC' "$BATS_TEST_TMPDIR/none"
    epkit nics --from "$ROOT" --output "$BATS_TEST_TMPDIR/none" --json || [ "$?" -eq 4 ]
    valid nics <"$BATS_TEST_TMPDIR/none"
    run -1 --separate-stderr epkit nics --from "$ROOT" --output /dev/full
    run -1 --separate-stderr epkit nics --from "$ROOT" --output "$BATS_TEST_TMPDIR/no/folder"
    nic mlx5_0 0000:00:06.0
    echo "1: DOWN" >"$ROOT/sys/class/infiniband/mlx5_0/ports/1/state"
    run -4 --separate-stderr epkit nics --from "$ROOT"
    [ "$output" = "No RDMA port carries data: 'epkit topo' shows the role of 1 NIC, and why." ]
}

@test "this machine: bytes over loopback are counted" {
    [ -r /sys/class/net/lo/statistics/rx_bytes ] || skip "no loopback interface"
    run -0 --separate-stderr epkit nics --devices lo --json --output "$BATS_TEST_TMPDIR/report" -- python3 -c '
import socket
import threading

def drain():
    peer, _ = server.accept()
    while peer.recv(1 << 20):
        pass

server = socket.create_server(("127.0.0.1", 0))
reader = threading.Thread(target=drain)
reader.start()
client = socket.create_connection(server.getsockname())
client.sendall(bytes(50_000_000))
client.close()
reader.join()
print("sent")'
    [ "$output" = sent ]
    valid nics "$BATS_TEST_TMPDIR/report"
    report -e '.devices[0].moved | .sent_bytes >= 50000000 and .received_bytes >= 50000000'
    report -e '.devices[0] | .sent_gbs > 0 and .kind == "interface"'
}

@test "EFA counts its traffic in its driver, in bytes" {
    machine 4
    rm "$ROOT/sys/class/infiniband/"*/ports/1/counters/*
    for i in 0 1 2 3; do
        set_counters "mlx5_$i:1" hw_counters/tx_bytes 1000000000 hw_counters/rx_bytes 1000000000 \
            hw_counters/tx_pkts 250000 hw_counters/rx_pkts 250000
    done
    run -0 --separate-stderr epkit nics --from "$ROOT"
    [[ "${lines[0]}" == *"4 of 4 NICs carried 8.0 GB since boot, evenly (spread 1.00)." ]]
    [[ "$output" != *"could not be read"* && "$output" != *"could be read"* ]]
    epkit nics --from "$ROOT" --json | tee "$BATS_TEST_TMPDIR/json" | valid nics
    jq -e '.devices[3].total | .sent_bytes == 1000000000 and .received_packets == 250000' "$BATS_TEST_TMPDIR/json"
    set_counters "mlx5_2:1" hw_counters/tx_bytes 0 hw_counters/rx_bytes 0
    run --separate-stderr epkit nics --from "$ROOT"
    [[ "${lines[0]}" == *"3 of 4 NICs carried the traffic since boot"* ]]
    # Where a port has both, only one counts.
    set_counters "mlx5_2:1" port_xmit_data 250000000 port_rcv_data 250000000 hw_counters/tx_bytes 1000000000 \
        hw_counters/rx_bytes 1000000000
    run --separate-stderr epkit nics --from "$ROOT"
    [[ "${lines[0]}" == *"4 of 4 NICs carried 8.0 GB since boot, evenly (spread 1.00)." ]]
}

@test "devices without counters of bytes: not said to be idle, and left out of the balance" {
    machine 4
    for i in 0 1 2 3; do
        set_counters "mlx5_$i:1" port_xmit_data 1000000000 port_rcv_data 1000000000
    done
    # As of some virtual functions.
    rm "$ROOT/sys/class/infiniband/mlx5_2/ports/1/counters/"*
    run -0 --separate-stderr epkit nics --from "$ROOT"
    [[ "${lines[0]}" == *"3 of 3 NICs carried 24.0 GB since boot, evenly (spread 1.00)." ]]
    [[ "$output" == *"mlx5_2 has no counters that could be read"* ]]
    [[ "$(grep '^mlx5_2 ' <<<"$output" | head -n 1)" != *" B "* ]]
    rm "$ROOT/sys/class/infiniband/"*/ports/1/counters/* 2>/dev/null || true
    run -0 --separate-stderr epkit nics --from "$ROOT" -- true
    [ "${lines[0]}" = "The traffic is not known: no counter of bytes can be read." ]
    epkit nics --from "$ROOT" --json | tee "$BATS_TEST_TMPDIR/json" | valid nics
    [ "$(jq -c '[.verdict, .uneven]' "$BATS_TEST_TMPDIR/json")" = '["The traffic is not known: no counter of bytes can be read.",false]' ]
}
