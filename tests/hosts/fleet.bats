#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# epkit launch on many hosts: 64 of namespaces, and 1000 that a stand-in for ssh runs on this one. How long it takes is
# printed, but not checked.
#
# shellcheck disable=SC2154,SC2016 # $stderr is set by run; programs of inner shells

load common

setup_file() {
    if [ -z "${EPKIT_TEST_LONG:-}" ]; then
        export HOSTS_WHY="in the long tier only"
        return
    fi
    hosts_up 64
}

teardown_file() {
    hosts_down
}

@test "hostname on 64 hosts, with the doctor on each" {
    run -0 --separate-stderr launch --no-logs --hosts 'h[1-64]' hostname
    for i in 1 17 64; do grep -qx "h$i: h$i" <<<"$output"; done
    [[ "$output" == *"hostname ran on 64 nodes with 64 ranks: all ended with status 0 "* ]]
    grep 'ran on 64 nodes' <<<"$output" >&3
    all_clean 10 h1 h32 h64
}

# fleet ARGUMENT...: on 1000 nodes by a stand-in for ssh, which runs the command here; the largest process in KiB to $kib
fleet() {
    printf '#!/bin/sh\nfor last; do :; done\nexec sh -c "$last"\n' >"$BATS_TEST_TMPDIR/ssh"
    chmod +x "$BATS_TEST_TMPDIR/ssh"
    python3 - "$BATS_TEST_TMPDIR" "$EPKIT" "$@" <<'END'
import resource, subprocess, sys
folder, epkit, *rest = sys.argv[1:]
with open(f"{folder}/out", "wb") as out, open(f"{folder}/err", "wb") as err:
    code = subprocess.run([epkit, "launch", "--ssh", f"{folder}/ssh", "--connect-timeout", "300", "--no-logs",
                           "--hosts", "n[0001-1000]", *rest], stdout=out, stderr=err, timeout=900).returncode
with open(f"{folder}/kib", "w") as stream:
    stream.write(str(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))
sys.exit(code)
END
    kib=$(cat "$BATS_TEST_TMPDIR/kib")
}

@test "a fleet of 1000: every node answers, and memory stays small whatever they write" {
    fleet hostname
    grep -q 'hostname ran on 1000 nodes with 1000 ranks: all ended with status 0' "$BATS_TEST_TMPDIR/out"
    [ "$(grep -c '^n[0-9]*: ' "$BATS_TEST_TMPDIR/out")" -eq 1000 ]
    echo "# $(grep 'ran on 1000 nodes' "$BATS_TEST_TMPDIR/out"), $kib KiB" >&3
    [ "$kib" -lt 131072 ]

    # 200 MB of output.
    fleet -- sh -c 'i=0; while [ $i -lt 2000 ]; do i=$((i + 1)); echo "a line that is one of very many, with some hundred bytes in all, as logs of tests have them $i"; done'
    [ "$(wc -l <"$BATS_TEST_TMPDIR/out")" -eq 2000001 ]
    echo "# $kib KiB" >&3
    # Less than the output: epkit buffers lines, not logs.
    [ "$kib" -lt 163840 ]
}
