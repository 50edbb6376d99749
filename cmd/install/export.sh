# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=sh disable=SC2034,SC2154
# export.sh - the beginning of an exported script, after prelude.sh. $done_steps is the file of its completed steps.

EPKIT_KERNEL=$(uname -r)
EPKIT_MACHINE=$(uname -m)
export EPKIT_KERNEL EPKIT_MACHINE
failed=0

# require KEY FOUND WANTED: the recipe is for other machines.
require() {
    if [ "$2" != "$3" ]; then
        echo "$1 is '$2' here, and the recipe is for '$3': nothing was changed" >&2
        exit 4
    fi
}

begin() {
    mkdir -p "${done_steps%/*}"
    touch "$done_steps"
    exec 9>"$done_steps.lock"
    if ! flock -n 9; then
        echo 'another run of this script is at work' >&2
        exit 1
    fi
    boot=$(cat /proc/sys/kernel/random/boot_id)
}

# run_step ID REBOOT FETCH APPLY: what has been completed is not run again. Exit status 75: reboot, run this again.
run_step() {
    if grep -q "^$1 " "$done_steps"; then
        if [ "$2" != never ] && grep -qx "$1 $boot" "$done_steps"; then want_reboot "$1"; fi
        return 0
    fi
    echo "step $1"
    if [ "$3" != : ]; then
        for wait in 2 4 8 16 0; do
            set +e # behind 'if' no failure inside would end the function
            (set -e; "${3}${4#apply_}") 9>&-
            code=$?
            set -e
            if [ "$code" = 0 ]; then break; fi
            if [ "$wait" = 0 ]; then echo "step $1: download failed" >&2; exit 1; fi
            sleep "$wait"
        done
    fi
    "$4" 9>&-
    echo "$1 $boot" >>"$done_steps"
    sync
    if [ "$2" != never ]; then want_reboot "$1"; fi
}
want_reboot() {
    echo "Rebooting the node to load driver and modules..."
    exit 75
}

# run_verify NAME PATTERN: runs the function verify, whose output has to match the pattern.
run_verify() {
    set +e # behind 'if' no failure inside would end the function
    output=$(set -e; verify 2>&1)
    code=$?
    set -e
    if [ "$code" = 0 ] && { [ -z "$2" ] || printf '%s\n' "$output" | grep -Eq -e "$2"; }; then
        printf 'ok      %s\n' "$1"
    else
        failed=1
        printf 'FAILED  %s\n%s\n' "$1" "$output" >&2
    fi
}
