#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# own_cgroup.sh COMMAND [ARG...] - runs COMMAND in control groups of its own, which go when it ends.
#
# systemd-nspawn --keep-unit makes the groups "payload" and "supervisor" in the one that it is started in. Containers that
# are started in the same one share the groups of their units: a unit of one then never ends while the other one runs a
# unit of that name.
set -euo pipefail

groups=()
while IFS=: read -r _ controllers path; do
    case $controllers in
    name=systemd) mount=/sys/fs/cgroup/systemd ;;
    '') if [ -e /sys/fs/cgroup/unified ]; then mount=/sys/fs/cgroup/unified; else mount=/sys/fs/cgroup; fi ;;
    *) continue ;;
    esac
    group=$mount${path%/}/epkit-test-$$
    if mkdir "$group" 2>/dev/null && echo $$ >"$group/cgroup.procs" 2>/dev/null; then groups+=("$group"); fi
done </proc/self/cgroup

"$@" &
child=$!
trap 'kill "$child" 2>/dev/null || :' TERM INT HUP
code=0
wait "$child" || code=$?
# A signal ends wait, too.
while kill -0 "$child" 2>/dev/null; do wait "$child" || code=$?; done
for group in "${groups[@]}"; do
    echo $$ >"${group%/*}/cgroup.procs"
    # What was killed leaves its group a moment later.
    for _ in $(seq 100); do
        find "$group" -depth -type d -exec rmdir {} + 2>/dev/null || :
        [ -e "$group" ] || break
        sleep 0.1
    done
done
exit "$code"
