#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# group.sh COMMAND [ARG...] - the first process of each container of the DaemonSet: runs COMMAND in a process group of
# its own, passes TERM on to all of that group, and leaves no process of it. The pod shares the node's processes
# (hostPID), so no end of a PID namespace ends them, and a shell handles TERM only when what it waits for has ended.
#
# What epkit runs on the node is in units and sessions of its own: that goes on.
set -uom pipefail # -m: a background job is a process group

grace=${EPKIT_GRACE_S:-5} # less than terminationGracePeriodSeconds
is_stopped=

"$@" </dev/null &
child=$!
# shellcheck disable=SC2064 # the child of now
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
    # A trap ends wait, too: then the child has the grace to end.
    if [ -n "$is_stopped" ] || ! kill -0 "$child" 2>/dev/null; then break; fi
done
kill -TERM -- "-$child" 2>/dev/null
all_ended "$grace" || { kill -KILL -- "-$child" 2>/dev/null; all_ended 5; }
[ -z "$is_stopped" ] || exit 143
exit "$code"
