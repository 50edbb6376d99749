#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# installer.sh - the init container of the DaemonSet: installs a recipe on the node. epkit does the work on the node
# itself, in steps that survive this pod. This script only waits for the agent before anything changes, reboots, and
# reports the progress. It may be killed at any time: the next one continues.
set -euo pipefail

# One or more recipes, in the order in which they are applied; a file is also possible.
read -ra recipes <<<"${EPKIT_RECIPE:?}"
shared=${EPKIT_SHARED:-/run/epkit-agent}

say() { printf '%s epkit-installer: %s\n' "$(date -u +%H:%M:%S)" "$*"; }

# Written atomically, since the agent reads it.
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

# on_node COMMAND...: in the node's own namespaces, with this container's environment, but nothing that the image's PATH
# finds on the node. The folder of epkit comes last: before copy_epkit() has checked it, it holds what the owner of /opt
# put there, and no variable by which a loader or a shell loads what the image has.
on_node() {
    env -u LD_LIBRARY_PATH -u LD_PRELOAD -u LD_AUDIT -u BASH_ENV -u ENV \
        nsenter --target 1 --mount --uts --net --ipc --pid -- /usr/bin/env PATH=/usr/sbin:/usr/bin:/sbin:/bin:/opt/epkit-installer/bin "$@"
}

# epkit_on_node ARGUMENT...: the epkit that was copied, whichever the node has of its own
epkit_on_node() {
    on_node /opt/epkit-installer/bin/epkit "$@"
}

# Copies the epkit of this image to the node, atomically, since a pod may be killed meanwhile; to a folder that no
# recipe uses. The node itself writes: links there lead to where they lead there. Root runs what is copied, so nobody
# else may be able to exchange it.
# shellcheck disable=SC2016 # for the shell of the node
copy_epkit() {
    local i
    tar -C /opt/epkit -c . | on_node sh -euc '
        umask 022
        mkdir -p /opt
        cd /opt
        at=$(pwd -P)
        while :; do
            if [ -n "$(find "$at" -maxdepth 0 \( ! -user root -o -perm -020 ! -group root -o -perm -002 ! -perm -1000 \))" ]; then
                echo "$at: not only root may rename what is in it" >&2
                exit 1
            fi
            [ "$at" != / ] || break
            at=${at%/*}
            at=${at:-/}
        done
        rm -rf epkit-installer.new
        mkdir epkit-installer.new
        tar -C epkit-installer.new -x --no-same-owner --no-same-permissions' || return 1
    for i in "${!recipes[@]}"; do
        [ -e "${recipes[i]}" ] || continue
        on_node sh -c "cat >/opt/epkit-installer.new/recipe-$i.yaml" <"${recipes[i]}" || return 1
        recipes[i]=/opt/epkit-installer/recipe-$i.yaml
    done
    on_node sh -euc '
        cd /opt
        rm -rf epkit-installer.old
        { [ ! -e epkit-installer ] && [ ! -L epkit-installer ]; } || mv -T epkit-installer epkit-installer.old
        mv -T epkit-installer.new epkit-installer
        rm -rf epkit-installer.old'
}

boot=$(on_node cat /proc/sys/kernel/random/boot_id)

# A grant is valid for one boot of the node; after a reboot the agent gives a new one.
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
say "node ${NODE_NAME:-?}, boot $boot, recipe ${recipes[*]}"
case ${REBOOT_BY:=epkit} in
epkit | kured) ;;
*) fail "REBOOT_BY is '$REBOOT_BY': it must be epkit or kured; nothing was changed" ;;
esac
copy_epkit || fail "epkit cannot be copied to /opt/epkit-installer of the node; nothing was changed"

# plan RECIPE: 0 nothing to do, 3 something to do. What apply would refuse ends the installation here, while the node
# still works.
plan() {
    local code=0 text
    text=$(epkit_on_node install plan "$1" 2>&1) || code=$?
    printf '%s\n' "$text"
    case $code in
    0) ;;
    3)
        if grep -q '^  missing ' <<<"$text"; then
            fail "recipe $1 lacks values (see 'missing' above): set them in the ConfigMap deepep-installer-settings, in" \
                "the overlay; nothing was changed"
        fi
        ;;
    4) fail "this node is not one for recipe $1; nothing was changed" ;;
    *) fail "the plan of recipe $1 failed with exit code $code; nothing was changed" ;;
    esac
    return "$code"
}

reboot_node() {
    echo "Rebooting the node to load driver and modules..."
    phase rebooting
    if [ "$REBOOT_BY" = kured ]; then
        say "kured reboots the node, because of /run/reboot-required"
    else
        on_node systemctl reboot
    fi
    # Afterwards the pod starts again from the top.
    sleep infinity &
    wait $!
}

# apply RECIPE
apply() {
    local code=0
    epkit_on_node install apply "$1" --reboot sentinel --no-resume-unit || code=$?
    if [ "$code" -eq 3 ]; then reboot_node; fi
    [ "$code" -eq 0 ] || fail "recipe $1 failed with exit code $code; the node stays cordoned"
}

todo=
for recipe in "${recipes[@]}"; do
    plan "$recipe" || todo=yes
done
if [ -n "$todo" ]; then
    wait_for_grant waiting
    phase installing
    for recipe in "${recipes[@]}"; do apply "$recipe"; done
else
    say "nothing is to be installed"
fi

phase verifying
for recipe in "${recipes[@]}"; do
    epkit_on_node install verify "$recipe" || fail "the node does not pass the tests of recipe $recipe"
done
phase "done"
say "installation complete"
