#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# installer.sh - the init container of the DaemonSet: brings the node to what a recipe says. epkit does the work on the
# node itself, in steps that outlive this pod; this script only waits for the agent beside it before anything changes,
# reboots, and says how far it is. It may be killed at any time: the next one goes on.
set -euo pipefail

recipe=${EPKIT_RECIPE:?}
shared=${EPKIT_SHARED:-/run/epkit-agent}
host=${EPKIT_HOST:-/host}

say() { printf '%s epkit-installer: %s\n' "$(date -u +%H:%M:%S)" "$*"; }

# What the agent reads, whole or not at all.
phase() {
    printf '%s\n' "$1" >"$shared/phase.new"
    mv "$shared/phase.new" "$shared/phase"
    say "phase: $1"
}

fail() {
    phase failed
    say "$*"
    exit 1
}

# on_node COMMAND...: in the node's own namespaces, with this container's environment
on_node() {
    nsenter --target 1 --mount --uts --net --ipc --pid -- env PATH=/opt/epkit-installer/bin:/usr/sbin:/usr/bin:/sbin:/bin "$@"
}

# The node gets the epkit of this image, whole: a pod may be killed while it copies. In a folder that no recipe uses.
copy_epkit() {
    rm -rf "$host/opt/epkit-installer.new"
    mkdir -p "$host/opt"
    cp -a /opt/epkit "$host/opt/epkit-installer.new"
    if [ -e "$recipe" ]; then
        cp "$recipe" "$host/opt/epkit-installer.new/recipe.yaml"
        recipe=/opt/epkit-installer/recipe.yaml
    fi
    rm -rf "$host/opt/epkit-installer.old"
    [ ! -e "$host/opt/epkit-installer" ] || mv "$host/opt/epkit-installer" "$host/opt/epkit-installer.old"
    mv "$host/opt/epkit-installer.new" "$host/opt/epkit-installer"
    rm -rf "$host/opt/epkit-installer.old"
}

boot=$(on_node cat /proc/sys/kernel/random/boot_id)

# A grant counts for one boot of the node: after a reboot the agent gives it anew.
wait_for_grant() {
    local waited=0
    phase "$1"
    while [ "$(cat "$shared/grant" 2>/dev/null || true)" != "$boot" ]; do
        [ $((waited % 300)) -ne 0 ] || say "waiting for this node's turn: the agent has to cordon and drain it"
        sleep 2 &
        wait $!
        waited=$((waited + 2))
    done
}

trap 'exit 143' TERM INT
phase starting
printf '%s\n' "$boot" >"$shared/boot.new"
mv "$shared/boot.new" "$shared/boot"
say "node ${NODE_NAME:-?}, boot $boot, recipe $recipe"
copy_epkit

code=0
on_node epkit install plan "$recipe" || code=$?
case $code in
0) say "nothing is to be installed" ;;
3) wait_for_grant waiting ;;
4) fail "this node is not one for recipe $recipe; nothing was changed" ;;
*) fail "the plan of recipe $recipe failed with exit code $code; nothing was changed" ;;
esac

if [ "$code" -eq 3 ]; then
    phase installing
    code=0
    on_node epkit install apply "$recipe" --reboot sentinel --no-resume-unit || code=$?
    if [ "$code" -eq 3 ]; then
        echo "Rebooting the node to load driver and modules..."
        phase rebooting
        on_node systemctl reboot
        # The pod goes on after it, from the top.
        sleep infinity &
        wait $!
    fi
    [ "$code" -eq 0 ] || fail "recipe $recipe failed with exit code $code; the node stays cordoned"
fi

phase verifying
on_node epkit install verify "$recipe" || fail "the node does not pass the tests of recipe $recipe"
phase "done"
say "installation complete"
