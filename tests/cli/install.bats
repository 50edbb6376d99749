#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# epkit install without a dedicated machine: recipes, plans of fake disks, applying files below a folder.
# tests/install/node.bats installs on real nodes.
#
# shellcheck disable=SC2154 # $stderr is set by run
# shellcheck disable=SC2016 # what recipes hold

load common
load install

VARIANTS=(gcp-b200-ubuntu2404 gcp-h200-ubuntu2404 gcp-a4x-ubuntu2404 gdrcopy deepep-v2 deepep-v25)
RECIPES=(debian-tools epkit-only gke-driver-copy "${VARIANTS[@]}")
SUM=aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa
# What no source tells, and the users of two recipes have to give.
declare -A GIVEN=([gcp-a4x-ubuntu2404]="cuda_keyring_sha256=$SUM" [deepep-v25]="torch=9.9.9,deepep_commit=abcdef0")

setup() {
    cd "$BATS_TEST_TMPDIR" || exit 1
    # Values that recipes require from their users.
    export EPKIT_DOCA_KEY=0123456789ABCDEF0123456789ABCDEF01234567 EPKIT_GDRCOPY_COMMIT=1234567
    unset CUDA_HOME NVSHMEM_HOME GDRCOPY_HOME
}

# Makes the disk of a machine in a given state: disk RECIPE KIND FOLDER
disk() {
    mkdir -p blank/proc/sys/kernel "$3"
    # A4X has another kernel, which its DOCA-OFED is known to build for.
    case $1 in *a4x*) echo 7.0.0-1011-gcp ;; *) echo 6.8.0-1021-gcp ;; esac >blank/proc/sys/kernel/osrelease
    epkit install plan "$1" --root blank --json ${GIVEN[$1]:+--set "${GIVEN[$1]}"} >plan.json || [ $? -ge 3 ]
    python3 -S "$EPKIT_SOURCE/tests/install/roots.py" plan.json "$2" "$3"
}

# States of a plan's steps that are not skipped, each once.
states() {
    jq -r '[.steps[].state | select(. != "skipped")] | unique | join(" ")'
}

# A recipe of files alone; more of a step from standard input.
files_recipe() {
    cat <<'END'
recipe: files
title: two files
variables:
  word: {kind: word, default: hello, help: what is written}
steps:
  - id: one
    type: file
    title: a file
    why: for the test
    budget: 5s
    path: /etc/deep/er/one
    mode: "0755"
    content: |
      it's "@{word}" and ${HOME} $(date) `date`
      EPKIT_END_0
  - id: two
    type: modprobe
    title: options
    why: for the test
    budget: 5s
    needs: [one]
    module: some
    options: {a: "1;b=2"}
END
}

@test "every recipe of the tree is listed, and show prints it as it is" {
    run -0 --separate-stderr epkit install list
    for recipe in "${RECIPES[@]}"; do
        [[ "$output" == *"$recipe "* ]]
        # A variant: the text of all of them, after its own name.
        file=$EPKIT_SOURCE/recipes/$recipe.yaml
        [ -e "$file" ] || file=$EPKIT_SOURCE/recipes/deepep.yaml
        sed "1s/.*/recipe: $recipe/" "$file" >text
        epkit install show "$recipe" | cmp - text
    done
    [ "$(epkit install list --json | jq '.recipes | length')" -eq ${#RECIPES[@]} ]
    [ "$(sed -n '/^variants:/,/^target:/s/^  \([a-z].*\):$/\1/p' "$EPKIT_SOURCE/recipes/deepep.yaml" | wc -l)" -eq ${#VARIANTS[@]} ]
    epkit install list --json | valid install
}

@test "a bare machine: every step is to be done" {
    for recipe in "${RECIPES[@]}"; do
        disk "$recipe" bare "$recipe"
        run -3 --separate-stderr epkit install plan "$recipe" --root "$recipe" --json ${GIVEN[$recipe]:+--set "${GIVEN[$recipe]}"}
        [ "$(states <<<"$output")" = todo ]
        valid install <<<"$output"
    done
}

@test "a machine where all is done: nothing to do" {
    for recipe in "${RECIPES[@]}"; do
        disk "$recipe" "done" "$recipe"
        run -0 --separate-stderr epkit install plan "$recipe" --root "$recipe" --json ${GIVEN[$recipe]:+--set "${GIVEN[$recipe]}"}
        [ "$(states <<<"$output")" = "done" ]
        [ "$(jq .changes <<<"$output")" -eq 0 ]
        run -0 epkit install status "$recipe" --root "$recipe" ${GIVEN[$recipe]:+--set "${GIVEN[$recipe]}"}
    done
}

@test "a machine where an installation was interrupted: what is half there is not taken for done" {
    for recipe in "${RECIPES[@]}"; do
        disk "$recipe" half "$recipe"
        run -3 --separate-stderr epkit install plan "$recipe" --root "$recipe" --json ${GIVEN[$recipe]:+--set "${GIVEN[$recipe]}"}
        jq -e '[.steps[] | select(.state != "skipped")] as $s | ($s | length / 2 | floor) as $half |
            ($s[:$half] | all(.state == "done")) and ($s[$half:] | all(.state != "done"))' <<<"$output" >/dev/null
    done
}

@test "a machine with other versions: each step that has a version says so" {
    for recipe in "${RECIPES[@]}"; do
        disk "$recipe" wrong "$recipe"
        run -3 --separate-stderr epkit install plan "$recipe" --root "$recipe" --json ${GIVEN[$recipe]:+--set "${GIVEN[$recipe]}"}
        jq -e '.steps[] | select(.state == "wrong") | .text' <<<"$output" >/dev/null
        jq -e '[.steps[] | select(.type == "file" or .type == "build" or .type == "copyset" or .type == "pip") |
            select(.state != "skipped")] | all(.state == "wrong")' <<<"$output" >/dev/null
    done
    epkit install plan gcp-b200-ubuntu2404 --root gcp-b200-ubuntu2404 >out || true
    grep -q 'nvidia-open-580 0.0.1 is installed, expected 580.126.09' out
    grep -q 'nvidia 0.1 is loaded, expected 580.126.09: takes effect after a reboot' out
}

@test "the traps of a driver: configured but not live, another module of a longer name" {
    disk gcp-b200-ubuntu2404 "done" m
    echo 'RegistryDwords: ""' >m/proc/driver/nvidia/params
    epkit install plan gcp-b200-ubuntu2404 --root m --json >out || [ $? -eq 3 ]
    [ "$(jq -r '.steps[] | select(.id == "peer-mapping").state' out)" = reboot ]
    sed -i 's/^nvidia /nvidia_drm /' m/proc/modules
    epkit install plan gcp-b200-ubuntu2404 --root m --json >out || [ $? -eq 3 ]
    [ "$(jq -r '.steps[] | select(.id == "driver-loaded").text' out)" = 'nvidia is not loaded' ]
}

@test "after an update of the kernel, what DKMS built for the old one does not count" {
    disk gdrcopy "done" m
    echo 6.8.0-1030-gcp >m/proc/sys/kernel/osrelease
    epkit install plan gdrcopy --root m --json >out || [ $? -eq 3 ]
    jq -r '.steps[] | select(.id == "driver-loaded").text' out | grep -q 'not built for kernel 6.8.0-1030-gcp'
    jq -r '.steps[] | select(.id == "gdrcopy").text' out | grep -q 'made for kernel 6.8.0-1021-gcp, and 6.8.0-1030-gcp runs'
    [ "$(jq -r '.steps[] | select(.id == "headers").state' out)" != "done" ]
}

@test "machines that a recipe is not for are refused, with the reason" {
    disk gcp-b200-ubuntu2404 bare m
    mkdir -p m/etc/default
    echo 'KUBELET_OPTS="--node-labels=cloud.google.com/gke-gpu-driver-version=default,a=b"' >m/etc/default/kubelet
    run -4 epkit install plan gcp-b200-ubuntu2404 --root m
    [[ "$output" == *"gpu-driver-version=disabled"* ]]
    echo 'KUBELET_OPTS="--node-labels=cloud.google.com/gke-gpu-driver-version=disabled"' >m/etc/default/kubelet
    run -3 epkit install plan gcp-b200-ubuntu2404 --root m
    mkdir -p m/sys/firmware/efi/efivars
    printf '\006\000\000\000\001' >m/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c
    run -4 epkit install plan gcp-b200-ubuntu2404 --root m
    [[ "$output" == *"secure boot"* ]]
    sed -i 's/ubuntu/cos/' m/etc/os-release
    run -4 epkit install plan gcp-b200-ubuntu2404 --root m
    [[ "$output" == *"this is cos"* ]]
}

# kernel RELEASE: the disk m has this kernel
kernel() {
    echo "$1" >m/proc/sys/kernel/osrelease
}

# accelerator FOLDER: as on Google's accelerator images, a driver is loaded, with its libraries
accelerator() {
    mkdir -p "$1/sys/module/nvidia" "$1/usr/lib/x86_64-linux-gnu"
    echo 580.159.04 >"$1/sys/module/nvidia/version"
    echo 'nvidia 1 0 - Live 0x0' >"$1/proc/modules"
    : >"$1/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.159.04"
}

@test "a kernel is accepted where a source says that DOCA-OFED builds for it; else what to take is said" {
    local recipe release kind kinds=(bare) said code
    [ -z "${EPKIT_TEST_LONG:-}" ] || kinds=(bare half accelerator)
    # recipe: what is said of 6.8, 6.14, 6.17, 7.0
    while read -r recipe codes; do
        for kind in "${kinds[@]}"; do
            said=$codes
            rm -rf m
            disk "$recipe" "${kind/accelerator/bare}" m
            [ "$kind" != accelerator ] || accelerator m
            for release in 6.8.0-1021-gcp 6.14.0-1021-gcp 6.17.0-1003-gcp 7.0.0-1011-gcp; do
                code=${said%% *}
                kernel $release
                run "-$code" epkit install plan "$recipe" --root m ${GIVEN[$recipe]:+--set "${GIVEN[$recipe]}"}
                if [ "$code" -eq 4 ]; then
                    [[ "${lines[0]}" == *"nothing will be changed: kernel $release is not known"*"--set kernel_also=${release%-*-gcp} if you know that it builds"* ]]
                else
                    [[ "${lines[0]}" =~ ^[0-9]+" of 19 steps of recipe $recipe are to be applied, about "[0-9]+" min" ]]
                fi
                [ "$kind" != accelerator ] || [ "$(grep -c 'driver 580.159.04 is loaded, with its libraries: it is kept' <<<"$output")" -eq 3 ]
                said=${said#* }
            done
        done
    done <<'END'
gcp-b200-ubuntu2404 3 3 4 4
gcp-h200-ubuntu2404 3 3 4 4
gdrcopy 3 4 4 4
deepep-v2 3 4 4 3
deepep-v25 3 4 4 3
gcp-a4x-ubuntu2404 4 4 4 3
END
    kernel 7.0.0-1011-gcp
    run -4 epkit install plan gcp-b200-ubuntu2404 --root m
    [[ "$output" == *"--set doca=3.4.0, which builds for it"* ]]
    run -3 epkit install plan gcp-b200-ubuntu2404 --root m --set doca=3.4.0
    kernel 6.17.0-1003-gcp
    run -4 epkit install plan gcp-b200-ubuntu2404 --root m
    [[ "$output" == *"linux-image-gcp-lts-24.04"* ]]
    run -3 epkit install plan gcp-b200-ubuntu2404 --root m --set kernel_also=6.17
    kernel 6.80.0-1
    run -4 epkit install plan gcp-b200-ubuntu2404 --root m
}

@test "a driver that is loaded and has its libraries is kept, if it is not older" {
    disk gcp-b200-ubuntu2404 bare m
    drivers() { epkit install plan gcp-b200-ubuntu2404 --root m --json | jq -r '[.steps[] | select(.id | test("^driver")).state] | join(" ")'; }
    accelerator m
    # Its libraries are another driver's: it does not work.
    mv m/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.159.04 m/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.126.09
    [[ "$(drivers)" != *done* ]]
    : >m/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.159.04
    [ "$(drivers)" = "done done done" ]
    [[ "$(epkit install plan gcp-b200-ubuntu2404 --root m)" == *"driver 580.159.04 is loaded, with its libraries: it is kept"* ]]
    echo 570.1 >m/sys/module/nvidia/version
    : >m/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.570.1
    [[ "$(drivers)" != *done* ]]
}

@test "this machine: too little disk is refused before anything changes" {
    files_recipe | sed 's/^variables:/target: {disk_gb: "99999"}\n&/' >disk.yaml
    run -4 epkit install plan ./disk.yaml
    [[ "$output" == *"99999 GB needed"* ]]
}

@test "the eight switches are read from the environment under their names" {
    disk gdrcopy bare m
    NVSHMEM_IBGDA_SUPPORT=0 NVSHMEM_USE_GDRCOPY=0 GDRCOPY_HOME=/g NVSHMEM_HOME=/n USE_NVPEERMEM=1 CUDA_HOME=/c \
        TORCH_CUDA_ARCH_LIST_B200=10.0a TORCH_CUDA_ARCH_LIST_H200=9.0a \
        epkit install plan gdrcopy --root m --json >out || [ $? -eq 3 ]
    [ "$(jq -c '[.variables[] | select(.from == "environment" and (.name | test("key|commit") | not)) | .value] | sort' out)" = \
        '["/c","/g","/n","0","0","1","10.0a","9.0a"]' ]
    # What they switch.
    [ "$(jq -r '.steps[] | select(.id == "gdrdrv").state' out)" = skipped ]
    [ "$(jq -r '.steps[] | select(.id == "peermem").state' out)" = todo ]
    [ "$(jq -r '.steps[] | select(.id == "nvshmem").args.owns[0]' out)" = /n ]
    NVSHMEM_HOME='/n;reboot' run -2 epkit install plan gdrcopy --root m
    [[ "$output" == *"environment variable NVSHMEM_HOME"* ]]
}

@test "a build is done with the values that it was made with alone" {
    disk gcp-b200-ubuntu2404 "done" m
    wrong() { jq -r '[.steps[] | select(.state == "wrong").id] | join(" ")'; }
    [ -z "$(epkit install plan gcp-b200-ubuntu2404 --root m --json | wrong)" ]
    [ "$(TORCH_CUDA_ARCH_LIST_B200=10.3 epkit install plan gcp-b200-ubuntu2404 --root m --json | wrong)" = "nvshmem deepep" ]
    NVSHMEM_IBGDA_SUPPORT=0 epkit install plan gcp-b200-ubuntu2404 --root m --json >out || [ $? -eq 3 ]
    [ "$(wrong <out)" = nvshmem ]
    # Versions too, each in its one place.
    epkit install plan gcp-b200-ubuntu2404 --root m --set nvshmem=v3.6.0-1,torch=2.10.1 --json >out || [ $? -eq 3 ]
    [ "$(wrong <out)" = "nvshmem pytorch" ]
    [ "$(jq -r '.steps[] | select(.id == "nvshmem").args.ref' out)" = refs/tags/v3.6.0-1 ]
}

@test "the pinned driver can be installed when newer ones are published, and all of it is of that version" {
    command -v apt-get >/dev/null || skip "apt-get is not here"
    mkdir -p apt/etc/apt/preferences.d apt/var/lib/apt/lists/partial apt/var/cache/apt/archives/partial apt/var/lib/dpkg repo
    : >apt/var/lib/dpkg/status
    package() {
        printf 'Package: %s\nVersion: %s\nArchitecture: all\nMaintainer: t\nDescription: t\nFilename: ./%s_%s.deb\nSize: 1\n' \
            "$1" "$2" "$1" "$2"
        [ -z "${3:-}" ] || printf 'Depends: %s\n' "$3"
        printf 'SHA256: %s\n\n' $SUM
    }
    for version in 580.126.09-1 580.999.1-1; do
        package nvidia-open-580 $version "nvidia-dkms-580-open (= $version), libnvidia-compute-580"
        package nvidia-dkms-580-open $version "nvidia-firmware-580 (= $version)"
        package nvidia-firmware-580 $version
        package libnvidia-compute-580 $version
    done >repo/Packages
    echo "deb [trusted=yes] file:$PWD/repo ./" >apt/etc/apt/sources.list
    apt() {
        apt-get -o Dir="$PWD/apt" -o Dir::State::status="$PWD/apt/var/lib/dpkg/status" -o APT::Architecture=amd64 \
            -o APT::Sandbox::User=root -q "$@"
    }
    apt update >log 2>&1 || { cat log; false; }
    for recipe in gcp-b200-ubuntu2404 gdrcopy; do
        disk $recipe "done" $recipe
        rm -f apt/etc/apt/preferences.d/*
        run ! apt install -s 'nvidia-open-580=580.126.09-*'
        cp $recipe/etc/apt/preferences.d/epkit-nvidia-driver apt/etc/apt/preferences.d/
        run -0 apt install -s 'nvidia-open-580=580.126.09-*'
        [ "$(grep -c '^Inst .* (580[.]126[.]09-1 ' <<<"$output")" -eq 4 ]
    done
}

@test "udev makes the device of gdrcopy's module, which does not do so itself" {
    [ "$(id -u)" -eq 0 ] || skip "mknod needs root"
    disk gdrcopy "done" m
    rule=m/etc/udev/rules.d/60-epkit-gdrdrv.rules
    grep -q '^ACTION=="add", SUBSYSTEM=="module", KERNEL=="gdrdrv", RUN+="/bin/sh -c ' $rule
    # What udev runs, with other paths.
    sed -n "s/.*sh -c '\(.*\)'\"\$/\1/p" $rule | sed "s,[$][$],$,g; s,/dev/,$PWD/,g; s,/proc/devices,devices," >made.sh
    printf 'Character devices:\n  1 mem\n195 nvidia\n511 gdrdrv\n\nBlock devices:\n  8 sd\n' >devices
    : >gdrdrv
    sh made.sh || skip "no devices can be made here"
    [ -c gdrdrv ]
    [ "$(stat -c '%t %T %a' gdrdrv)" = "1ff 0 666" ]
}

@test "a value that only the user can know is asked for before anything changes" {
    missing() { # missing RECIPE VARIABLE...: these alone
        run -3 epkit install plan "$1" --root m
        [ "$(sed -n 's/^  missing  variable \([a-z0-9_]*\):.*/\1/p' <<<"$output" | xargs)" = "${*:2}" ]
        local names=${*:2}
        [[ "${lines[0]}" == *"; to be given first: ${names// /, }." ]]
        run -2 epkit install apply "$1" --root m
        [[ "$output" == *"variable '$2' has no value"* ]]
        [ ! -e m/etc/modprobe.d ]
    }
    unset EPKIT_DOCA_KEY EPKIT_GDRCOPY_COMMIT
    disk gcp-b200-ubuntu2404 bare m
    missing gcp-b200-ubuntu2404 doca_key
    missing gdrcopy doca_key gdrcopy_commit
    run -2 epkit install plan gdrcopy --root m --set doca_key=short
    [[ "$output" == *"40 hexadecimal digits"* ]]
    # In an image no driver is installed, and no key is needed.
    run -3 epkit install plan gcp-b200-ubuntu2404 --root m --set node=0
    [[ "$output" != *missing* ]]
    sed -i 's/$/ /; s/^6.8.0-1021-gcp /7.0.0-1011-gcp/' m/proc/sys/kernel/osrelease
    missing deepep-v25 torch doca_key deepep_commit
    missing deepep-v2 doca_key
}

@test "ibv_devices that is not installed fails its test, also on a machine without RDMA devices" {
    python3 - "$EPKIT_SOURCE/recipes/debian-tools.yaml" >check.sh <<'END'
import sys
import yaml
steps = yaml.safe_load(open(sys.argv[1]))["steps"]
(check,) = [v["run"] for s in steps for v in s.get("verify", []) if "ibv_devices" in v["run"]]
print(check)
END
    mkdir bin
    run ! env PATH="$PWD/bin" /bin/sh check.sh
    # As libibverbs without a kernel that has RDMA.
    printf '#!/bin/sh\nexit 1\n' >bin/ibv_devices
    chmod +x bin/ibv_devices
    [ -e /sys/class/infiniband ] || PATH="$PWD/bin" /bin/sh check.sh
}

@test "the base of DeepEP is checked, and the commit that is known to work with NVSHMEM 3.5 passes on any base" {
    mkdir -p fetch
    git init -q fetch/deepep
    # In the shell that the recipe's own test is: an old commit, a new one, and the known one, which is not there at all.
    for n in old base new; do
        git -C fetch/deepep -c user.name=t -c user.email=t@example.com commit -q --allow-empty -m $n
        git -C fetch/deepep tag $n
    done
    python3 - "$EPKIT_SOURCE/recipes/deepep.yaml" >check.sh <<'END'
import sys
import yaml
steps = yaml.safe_load(open(sys.argv[1]))["steps"]
(check,) = [v["run"] for s in steps for v in s.get("verify", []) if "is-ancestor" in v["run"]]
print("set -eu\n" + check)
END
    check() { EPKIT_STATE=$PWD deepep_v2=0 deepep_base=base deepep_commit=$1 sh check.sh; }
    check new
    check base
    check 8a07e7e
    check 8a07e7e0123456789
    run ! check old
}

@test "lines that users of the older scripts look for are there word for word" {
    for recipe in gcp-b200-ubuntu2404 gcp-h200-ubuntu2404 gdrcopy; do
        epkit install show "$recipe" >out
        grep -qx ' *says: NVSHMEM_IBGDA_SUPPORT is enabled correctly.' out
        grep -qx ' *says: DeepEP installation complete' out
    done
}

@test "files are applied below a folder, a second apply does nothing, uninstall brings back the tree" {
    mkdir -p m/etc/modprobe.d
    echo old >m/etc/modprobe.d/zz-epkit-some.conf
    (cd m && find . -printf '%p %m\n' | sort && cat etc/modprobe.d/*) >before
    files_recipe >files.yaml
    run -0 epkit install apply ./files.yaml --root m
    [ "$(stat -c %a m/etc/deep/er/one)" = 755 ]
    diff m/etc/deep/er/one - <<'END'
it's "hello" and ${HOME} $(date) `date`
EPKIT_END_0
END
    grep -qx 'options some a="1;b=2"' m/etc/modprobe.d/zz-epkit-some.conf
    run -0 --separate-stderr epkit install apply ./files.yaml --root m --json
    [ "$(jq -r '.result + " " + (.changes | tostring)' <<<"$output")" = 'fine 0' ]
    [ "$(jq '.steps[0].attempts' <<<"$output")" -eq 1 ]
    valid install <<<"$output"
    # Wrong content is mended; what the user had is still known.
    echo wrong >m/etc/deep/er/one
    run -3 epkit install status files --root m
    epkit install resume --root m
    grep -q hello m/etc/deep/er/one
    rm -f m/etc/deep/er/one.epkit-old # what was made of the file, above
    run -0 --separate-stderr epkit install uninstall files --root m --json
    valid install <<<"$output"
    rm -rf m/var/log
    rmdir m/var/lib m/var 2>/dev/null || true
    (cd m && find . -printf '%p %m\n' | sort && cat etc/modprobe.d/*) >after
    diff before after
}

@test "steps are applied in the order of their needs, whatever the order of the file" {
    mkdir m
    cat >order.yaml <<'END'
recipe: order
title: the other way round
steps:
  - {id: c, type: file, title: t, why: w, budget: 1s, needs: [b], path: /c, content: c}
  - {id: b, type: file, title: t, why: w, budget: 1s, needs: [a], path: /b, content: b}
  - {id: a, type: file, title: t, why: w, budget: 1s, path: /a, content: a}
END
    run -0 --separate-stderr epkit install apply ./order.yaml --root m --json
    [ "$(jq -r '.steps | map(.id) | join(" ")' <<<"$output")" = 'a b c' ]
    [ "$(jq -rs 'map(select(.event == "end") | .step) | join(" ")' m/var/lib/epkit/install/order/journal.jsonl)" = 'a b c' ]
    epkit install uninstall order --root m
    [ ! -e m/a ]
}

@test "what was there before a recipe was applied is not undone" {
    mkdir -p m
    files_recipe >files.yaml
    epkit install apply ./files.yaml --root m
    rm -rf m/var
    epkit install apply ./files.yaml --root m
    epkit install uninstall ./files.yaml --root m
    [ -e m/etc/deep/er/one ]
}

@test "a truncated or corrupted journal is repaired, a folder in its place is reported, and no step is lost" {
    mkdir -p m
    files_recipe >files.yaml
    epkit install apply ./files.yaml --root m
    journal=m/var/lib/epkit/install/files/journal.jsonl
    truncate -s -5 "$journal"
    run -0 epkit install apply ./files.yaml --root m
    grep -q '"event":"repaired"' "$journal"
    { echo rubbish; echo '{"event":1}'; } >"$journal"
    run -0 epkit install apply ./files.yaml --root m
    head -1 "$journal" | grep -q '"event":"rebuilt"'
    grep -q rubbish "$journal.unreadable"
    rm "$journal"
    mkfifo "$journal"
    run -1 timeout 300 "$EPKIT" install apply ./files.yaml --root m
    [[ "$output" == *"not a regular file"* ]]
    rm "$journal"
    mkdir "$journal"
    run -1 epkit install apply ./files.yaml --root m
    [[ "$output" == *journal.jsonl* ]]
}

@test "below a folder no link leads to the disk of this machine" {
    files_recipe >files.yaml
    mkdir -p m/etc outside/er
    ln -s "$PWD/outside" m/etc/deep
    echo mine >outside/er/one
    run -1 epkit install apply files.yaml --root m
    [[ "$output" == *"leads out of $PWD/m by a link"* ]]
    epkit install uninstall files --root m || true
    [ "$(cat outside/er/one)" = mine ]
    # A link that stays inside is followed.
    ln -sfn ../usr m/etc/deep
    mkdir m/usr
    epkit install apply files.yaml --root m
    [ -x m/usr/er/one ]
    epkit install uninstall files --root m
    [ ! -e m/usr/er ]
}

@test "a full disk is reported, the state of the recipe stays valid, and the next run continues" {
    files_recipe >files.yaml
    mkdir m
    unshare -m mount -t tmpfs -o size=256k none m 2>/dev/null || skip "nothing can be mounted here"
    cat >inside.sh <<'END'
set -eu
mount -t tmpfs -o size=256k,mode=755 none m
"$EPKIT" install apply files.yaml --root m --set word=first --reboot never >/dev/null
rm -r m/etc
head -c 400k /dev/zero >m/full 2>/dev/null || true
"$EPKIT" install resume files --root m && exit 1
cmp files.yaml m/var/lib/epkit/install/files/recipe.yaml
rm m/full
"$EPKIT" install resume files --root m >/dev/null
grep -q '"first"' m/etc/deep/er/one
# Undo needs space.
head -c 400k /dev/zero >m/full 2>/dev/null || true
"$EPKIT" install uninstall files --root m >/dev/null
test ! -e m/etc
test ! -e m/var/lib/epkit
END
    run --separate-stderr unshare -m sh inside.sh
    echo "$output $stderr"
    [ "$status" -eq 0 ]
    [[ "$stderr" == *"o space left on"* ]]
}

@test "a file never replaces a folder, and the folder stays" {
    mkdir -p m/etc/deep/er/one
    echo mine >m/etc/deep/er/one/mine
    files_recipe >files.yaml
    run -1 epkit install apply files.yaml --root m
    [[ "$output" == *"/etc/deep/er/one is a folder, but a file is expected: nothing is changed"* ]]
    epkit install uninstall files --root m
    [ "$(cat m/etc/deep/er/one/mine)" = mine ]
}

@test "a step that was killed before it saved the previous state is undone without losing it" {
    mkdir -p m/etc/deep/er
    echo mine >m/etc/deep/er/one
    files_recipe >files.yaml
    epkit install apply files.yaml --root m
    # As if it had been killed right after it recorded the step.
    rm -r m/var/lib/epkit/install/files/before/one
    mkdir m/var/lib/epkit/install/files/before/one
    echo mine >m/etc/deep/er/one
    epkit install uninstall files --root m
    [ "$(cat m/etc/deep/er/one)" = mine ]
}

@test "values of an earlier apply that cannot be read are not replaced by others" {
    mkdir m
    files_recipe >files.yaml
    epkit install apply files.yaml --root m --set word=first
    for text in '' '{' '[]' '{"word": "a", "word": "b"}'; do
        printf %s "$text" >m/var/lib/epkit/install/files/settings.json
        run -1 epkit install resume files --root m
        [[ "$output" == *"settings.json cannot be read"* ]]
        grep -q first m/etc/deep/er/one
    done
    epkit install apply files.yaml --root m --set word=second
    epkit install resume files --root m
    grep -q second m/etc/deep/er/one
}

@test "uninstall removes what earlier values and an earlier version of the recipe have added" {
    mkdir -p m/etc
    echo mine >m/etc/first
    cp -a m before
    moves() { printf 'recipe: moves\ntitle: t\nvariables: {p: {kind: path, default: /etc/first}}\nsteps:\n  - {id: moved, type: file, title: t, why: w, budget: 5s, path: "@{p}", content: x}\n'; }
    { moves && printf '  - {id: lost, type: file, title: t, why: w, budget: 5s, path: /etc/lost, content: x}\n'; } >moves.yaml
    epkit install apply ./moves.yaml --root m
    [ "$(cat m/etc/first m/etc/lost)" = "x
x" ]
    moves >moves.yaml
    epkit install apply ./moves.yaml --root m --set p=/etc/deep/second
    [ "$(cat m/etc/first m/etc/deep/second)" = "x
x" ]
    # A target that already is as expected does not belong to the recipe.
    echo x >m/etc/fourth
    cp m/etc/fourth before/etc/
    epkit install apply ./moves.yaml --root m --set p=/etc/fourth
    epkit install uninstall moves --root m
    rm -r m/var
    diff -r before m
}

@test "uninstall undoes a step that the current values skip" {
    mkdir m
    files_recipe | sed 's/^steps:/  wanted: {kind: flag, default: "1", env: EPKIT_TEST_WANTED}\n&/; s/path: .*one/&\n    when: wanted/' >files.yaml
    epkit install apply files.yaml --root m
    run --separate-stderr epkit install apply files.yaml --root m --set wanted=0 --json
    [ "$(jq -r '.steps[0].state' <<<"$output")" = skipped ]
    epkit install uninstall files --root m
    [ ! -e m/etc ]
}

@test "a run that finds the lock held reports the holder, and leaves the steps unknown" {
    files_recipe >files.yaml
    mkdir m
    epkit install apply files.yaml --root m
    # A holder whose process runs, with epkit's name.
    lock=m/var/lib/epkit/install/files/lock
    cp "$(command -v sleep)" epkit
    flock "$lock" ./epkit 1000 3>&- &
    holder=$!
    until pgrep -P $holder -x epkit >pid; do sleep 0.1; done
    cp pid "$lock"
    run --separate-stderr epkit install apply files.yaml --root m --json
    kill "$(cat pid)"
    [ "$status" -eq 1 ]
    [[ "$stderr" == *"process $(cat pid) is installing this recipe now"* ]]
    valid install <<<"$output"
    [ "$(jq -r '.result + " " + (.steps | map(.state) | unique | join(","))' <<<"$output")" = 'busy unknown' ]
    # A PID in a lock that is not held is ignored.
    wait "$holder" || true
    epkit install apply files.yaml --root m
    # The report after an uninstall shows the current state.
    run --separate-stderr epkit install uninstall files --root m --json
    [ "$(jq -r '.steps | map(.state) | unique | join(",")' <<<"$output")" = todo ]
}

@test "an interrupt ends a recipe's tests, and what they run" {
    cat >slow.yaml <<END
recipe: slow
title: tests that take their time
steps:
  - {id: one, type: file, title: t, why: w, budget: 5s, path: $PWD/none, content: x, verify: [
      {name: first, run: "echo \$\$ >$PWD/first; sleep 1000"}, {name: second, run: "touch $PWD/second"}]}
END
    mkdir own
    TMPDIR=$PWD/own "$EPKIT" install verify ./slow.yaml >out 2>&1 3>&- &
    verify=$!
    for _ in $(seq 600); do
        [ ! -s first ] || break
        sleep 0.1
    done
    kill -TERM $verify
    status=0
    wait $verify || status=$?
    cat out
    [ "$status" -eq 143 ]
    grep -q interrupted out
    [ ! -e second ]
    rmdir own # empty
    for _ in $(seq 100); do
        grep -qs '^State:.[^Z]' "/proc/$(cat first)/status" || return 0
        sleep 0.1
    done
    false
}

# Removes the folder when it is empty; fails if it stays.
until_gone() {
    for _ in $(seq 600); do
        rmdir "$1" 2>/dev/null && return
        sleep 0.1
    done
    false
}

@test "an interrupt ends a recipe's test also before it has a folder" {
    mkdir slow
    printf '#!/bin/sh\necho $$ >%s\nsleep 1000\n' "$PWD/asked" >slow/mktemp
    chmod +x slow/mktemp
    cat >one.yaml <<END
recipe: one
title: no folder
steps:
  - {id: one, type: file, title: t, why: w, budget: 5s, path: $PWD/none, content: x, verify: [
      {name: first, run: "touch $PWD/first"}]}
END
    PATH=$PWD/slow:$PATH "$EPKIT" install verify ./one.yaml >out 2>&1 3>&- &
    verify=$!
    until [ -s asked ] || ! kill -0 $verify; do sleep 0.1; done
    kill -TERM $verify
    for _ in $(seq 300); do
        kill -0 $verify 2>/dev/null || break
        sleep 0.1
    done
    [ ! -e first ]
    grep -q interrupted out
}

@test "a step that is ended at its deadline leaves nothing in /tmp" {
    [ "$(id -u)" -eq 0 ] || skip 'an apply of this machine needs root'
    cat >late.yaml <<END
recipe: late
title: no end
steps:
  - {id: one, type: command, title: t, why: w, budget: 1s, deadline: 1s, check: "false", undo: "true", run: "
      echo \$TMPDIR >'$PWD/where'; sleep 1000"}
END
    mkdir own
    run -1 env TMPDIR="$PWD/own" "${WITHOUT_SYSTEMD[@]}" "$EPKIT" install apply ./late.yaml --state "$PWD/state"
    [[ "$output" == *"deadline"* && "$(cat where)" == "$PWD/own/"* ]]
    # Its shell outlives the script's by a moment.
    until_gone own
    # As systemd ends it: with a second SIGTERM when the script's shell has ended.
    mkdir own slow
    printf '#!/bin/sh\nsleep 1\nexec %s "$@"\n' "$(command -v rm)" >slow/rm
    chmod +x slow/rm
    rm where
    TMPDIR=$PWD/own PATH=$PWD/slow:$PATH setsid sh state/late/scripts/one.apply.sh >out 2>&1 3>&- &
    script=$!
    until [ -s where ] || ! kill -0 $script; do sleep 0.1; done
    kill -TERM -- -$script
    wait $script || true
    kill -TERM -- -$script || true
    until_gone own
    rm -rf /var/log/epkit/install/late
    rmdir /var/log/epkit/install /var/log/epkit 2>/dev/null || true
}

@test "a name that another user has taken in /tmp matters neither to a recipe's tests nor to its steps" {
    [ "$(id -u)" -eq 0 ] || skip 'an apply of this machine needs root'
    local text='(set -C; echo mine >"${TMPDIR:-/tmp}/name") && ls -ld "$TMPDIR" | grep "^drwx------"'
    mkdir -m 1777 open
    ln -s "$PWD/victim" open/name
    cat >own.yaml <<END
recipe: own
title: files for a moment
steps:
  - id: one
    type: command
    title: t
    why: w
    budget: 20m
    run: '$text && touch "$PWD/one"'
    check: test -e "$PWD/one"
    undo: rm "$PWD/one"
    verify:
      - {name: first, run: '$text'}
      - {name: second, run: 'echo; echo --------; echo "  ----"; $text && exit 3'}
      - {name: third, run: 'echo --------; exit 4'}
END
    export TMPDIR=$PWD/open
    run -1 "${WITHOUT_SYSTEMD[@]}" "$EPKIT" install apply ./own.yaml --state "$PWD/state"
    [[ "$output" == *"ok     one: first"*"FAILED one: second: drwx------"*"FAILED one: third: exit status 4"* ]]
    [ -e one ]
    run -0 env TMPDIR="$PWD/none" "$EPKIT" install status own --state "$PWD/state" # no folder there: that is no answer
    [[ "$output" == *"its check succeeds"* ]]
    epkit install uninstall own --state "$PWD/state"
    [ "$(ls open)" = name ]
    [ ! -e victim ]
    rm -rf /var/log/epkit/install/own
    rmdir /var/log/epkit/install /var/log/epkit 2>/dev/null || true
}

@test "copies: an incomplete set is not copied, a second run nests nothing, another set replaces the first" {
    mkdir -p m/src/folder m/dst
    echo core >m/src/libcore.so.1
    echo theirs >m/dst/libcore.so.1
    echo same >m/src/libcore.so.2
    echo same >m/dst/libcore.so.2
    echo inside >m/src/folder/file
    cat >copies.yaml <<'END'
recipe: copies
title: a set
steps:
  - id: set
    type: copyset
    title: a set
    why: for the test
    budget: 5s
    to: /dst
    files: [/src/libcore.so*, /src/libprovider*.so, /src/folder]
END
    run -1 epkit install apply ./copies.yaml --root m
    [[ "$output" == *"libprovider"*"is not there: nothing of the set is copied"* ]]
    [ "$(cat m/dst/libcore.so.1)" = theirs ]
    echo provider >m/src/libprovider-1.so
    echo provider >m/src/libprovider-old.so
    epkit install apply ./copies.yaml --root m
    [ "$(cat m/dst/libcore.so.1)" = core ]
    [ "$(cat m/dst/folder/file)" = inside ]
    rm m/src/libprovider-old.so
    echo 'a newer provider' >m/src/libprovider-1.so
    run -3 epkit install plan ./copies.yaml --root m
    epkit install apply ./copies.yaml --root m
    [ "$(cat m/dst/libprovider-1.so)" = 'a newer provider' ]
    [ ! -e m/dst/libprovider-old.so ]
    [ ! -e m/dst/folder/folder ]
    epkit install uninstall copies --root m
    [ "$(ls m/dst)" = 'libcore.so.1
libcore.so.2' ]
    [ "$(cat m/dst/libcore.so.1)" = theirs ]
}

@test "steps that need a machine's programs are refused below a folder that has none" {
    disk epkit-only bare m
    run -2 epkit install apply epkit-only --root m
    [[ "$output" == *"needs the programs of the machine"* ]]
    run -4 epkit install verify epkit-only --root m
}

applied() {
    run -0 "${WITHOUT_SYSTEMD[@]}" "$EPKIT" install apply ./builds.yaml --state "$PWD/state"
}

@test "sources are built from the pinned commit and checksum alone, Python packages in the pinned version" {
    [ "$(id -u)" -eq 0 ] || skip 'a build of this machine needs root'
    [ -x /usr/lib/apt/apt-helper ] || skip 'there is no apt here'
    command -v git >/dev/null || skip 'git is not installed'
    python3 -m pip --version >/dev/null 2>&1 || skip 'pip is not installed'
    git init -q repo
    echo first >repo/tool
    git -C repo add tool
    git -C repo -c user.name=t -c user.email=t@example.org commit -qm first
    first=$(git -C repo rev-parse HEAD)
    echo second >repo/tool
    git -C repo -c user.name=t -c user.email=t@example.org commit -qam second
    git -C repo checkout -q -b other
    echo other >repo/tool
    git -C repo -c user.name=t -c user.email=t@example.org commit -qam other
    other=$(git -C repo rev-parse HEAD)
    git -C repo checkout -q -
    main=$(git -C repo symbolic-ref HEAD)
    mkdir archive
    echo archived >archive/tool
    cp /bin/true archive/program
    chmod 6777 archive/program # root, who builds here, does not give it to others
    chmod 777 archive
    tar -czf archive.tar.gz archive
    wheels index thing 1.0 2.0
    cat >builds.yaml <<END
recipe: builds
title: builds
versions: {thing: "1.0"}
variables:
  commit: {kind: word, default: ${first:0:10}}
  sum: {kind: sha256, default: $(sha256sum archive.tar.gz | cut -d' ' -f1)}
steps:
  - {id: git, type: build, title: t, why: w, budget: 9s, git: "file://$PWD/repo", ref: $main, commit: "@{commit}",
     script: "mkdir -p $PWD/out && cp tool $PWD/out/git", provides: [$PWD/out/git], owns: [$PWD/out/git]}
  - {id: tar, type: build, title: t, why: w, budget: 9s, url: "file://$PWD/archive.tar.gz", sha256: "@{sum}",
     script: "! find . -perm /7022 | grep . && cp tool $PWD/out/tar", provides: [$PWD/out/tar], owns: [$PWD/out/tar]}
  - {id: pip, type: pip, title: t, why: w, budget: 9s, target: $PWD/out/python, index: "file://$PWD/index",
     packages: {thing: "@{thing}"}}
END
    applied
    [ "$(cat out/git out/tar)" = "first
archived" ]
    [ "$(PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=out/python python3 -c 'import thing; print(thing.version)')" = 1.0 ]
    # Another version replaces the first.
    sed -i 's/thing: "1.0"/thing: "2.0"/' builds.yaml
    applied
    [ "$(PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=out/python python3 -c 'import thing; print(thing.version)')" = 2.0 ]
    [ ! -e out/python/thing-1.0.dist-info ]
    # A download that fails in the middle does not count, nor a commit that is not in the history of the ref.
    fetch() {
        EPKIT_STATE=$PWD/state/builds EPKIT_STEP=git arg_git=file://$PWD/repo arg_ref=$main arg_commit=$1 \
            sh -euc '. "$1"; epkit_fetch_git' - "$EPKIT_SOURCE/cmd/install/prelude.sh"
    }
    fetch "$first"
    mkdir state/builds/fetch/git/.git/index.lock
    run ! fetch "$first"
    rmdir state/builds/fetch/git/.git/index.lock
    run ! fetch "$other"
    [[ "$output" == *"commit $other is not in what was fetched"* ]]
    "$EPKIT" install uninstall builds --state "$PWD/state"
    [ ! -e out ]
    rm -rf /var/log/epkit/install/builds
    rmdir /var/log/epkit/install /var/log/epkit 2>/dev/null || true
}

@test "wrong usage is refused with a hint" {
    run -2 epkit install
    run -2 epkit install aply debian-tools
    run -2 epkit install plan debian-tool
    [[ "$output" == *"did you mean 'debian-tools'"* ]]
    run -2 epkit install plan
    run -2 epkit install plan debian-tools --set nothing=1
    [[ "$output" == *"no such version or variable"* ]]
    run -2 epkit install plan /does/not/exist.yaml
    run -2 epkit install plan /dev/zero
    : >file
    for action in plan apply status resume uninstall; do
        run -2 epkit install $action debian-tools --root /does/not/exist
        [[ "${lines[0]}" == "epkit: error: install: --root: /does/not/exist: No such file or directory" ]]
        run -2 epkit install $action debian-tools --root file
        [[ "${lines[0]}" == "epkit: error: install: --root: file: not a folder" ]]
    done
    run -2 epkit install list debian-tools
    # A value of the user is not a fault of the recipe.
    NVSHMEM_IBGDA_SUPPORT=maybe run -2 epkit install plan gcp-b200-ubuntu2404
    [[ "$output" == *"a value is refused: environment variable NVSHMEM_IBGDA_SUPPORT "*": it must be 0 or 1"*"'epkit install show' prints"* ]]
    run -2 epkit install plan gcp-b200-ubuntu2404 --set cuda_home=here
    [[ "$output" == *"a value is refused: --set cuda_home"* ]]
    # A fault of the recipe, whatever the name of its file.
    echo 'recipe: X' >'--set x.yaml'
    run -2 epkit install plan -- '--set x.yaml'
    [[ "$output" == *"the recipe is refused: --set x.yaml:1: "* ]]
}
