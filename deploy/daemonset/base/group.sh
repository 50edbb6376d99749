#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# group.sh COMMAND [ARG...] - the first process of each container of the DaemonSet: runs COMMAND in a process group of
# its own, forwards TERM to the whole group, and leaves no process of it. The pod shares the PID namespace of the node
# (hostPID), so the processes do not end with the namespace, and a shell handles TERM only after the process that it
# waits for has ended.
#
# Programs that epkit runs on the node are in units and sessions of their own, and continue.
set -uom pipefail # -m: a background job is a process group

grace=${EPKIT_GRACE_S:-5} # less than terminationGracePeriodSeconds
is_stopped=

"$@" </dev/null &
child=$!
# shellcheck disable=SC2064 # the current child
trap "is_stopped=yes; kill -TERM -- -$child 2>/dev/null" TERM INT HUP

# all_ended SECONDS: of the group
all_ended() {
    local until=$((SECONDS + $1))
    while kill -0 -- "-$child" 2>/dev/null; do
        [ "$SECONDS" -lt "$until" ] || return 1
        sleep 0.1
    done
}

code=0
while :; do
    wait "$child" 2>/dev/null
    code=$?
    # A trap also ends wait; then the child has the grace period to end.
    if [ -n "$is_stopped" ] || ! kill -0 "$child" 2>/dev/null; then break; fi
done
kill -TERM -- "-$child" 2>/dev/null
all_ended "$grace" || { kill -KILL -- "-$child" 2>/dev/null; all_ended 5; }
[ -z "$is_stopped" ] || exit 143
exit "$code"
