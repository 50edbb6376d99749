#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# The output of 'epkit install export', run on a node.
#
# shellcheck disable=SC2154 # set by run

load node

setup() {
    [ -n "${EPKIT_TEST_LONG:-}" ] || skip 'only with EPKIT_TEST_LONG=1'
    cd "$BATS_TEST_TMPDIR" || exit 1
}

teardown() {
    node_down
}

epkit() { "$EPKIT_BUILD/epkit" "$@"; }

@test "the script on a node: debian-tools is installed, a second run does nothing, a missing package fails the tests" {
    HOME=/root node_up
    skip_without_node
    epkit install export sh debian-tools >"$ROOT/root/debian-tools.sh"
    run on sh /root/debian-tools.sh
    echo "$output"
    # It has requested its reboot, if any.
    if [ "$status" -eq 75 ]; then
        boots=$("$NODE" boots "$ROOT")
        on systemctl reboot || true
        for _ in $(seq 600); do [ "$("$NODE" boots "$ROOT")" = "$boots" ] || break; sleep 0.2; done
        "$NODE" boot_wait "$ROOT"
        run on sh /root/debian-tools.sh
        echo "$output"
    fi
    [ "$status" -eq 0 ]
    [[ "$output" == *'ok      mpirun starts two processes'* ]]
    run -0 on sh /root/debian-tools.sh
    [[ "$output" != *'step '* ]]
    # epkit reports the same steps as done.
    on epkit install verify debian-tools
    run on epkit install plan debian-tools
    echo "$output"
    on apt-get -qqy remove perftest
    run -1 on sh /root/debian-tools.sh
    [[ "$output" == *'FAILED  ib_write_bw runs'* ]]
}
