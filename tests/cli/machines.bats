#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# What epkit says about the golden machines, against text that is checked in. tests/machines/update.sh writes it anew.

load common
load machines

setup_file() {
    # shellcheck disable=SC2046
    make_trees $(python3 -S "$MACHINES/machines.py" --list) a4/testbed-env a4/identifiers
}

setup() {
    cd "$BATS_FILE_TMPDIR" || return 1
}

# golden NAME: all outputs are as expected, the JSON fits its schemas and tells the facts of the texts, and a snapshot
# says the same
golden() {
    local command status
    "$MACHINES/outputs.sh" "$EPKIT" "$1" "got.$1"
    diff --recursive --unified "$MACHINES/expected/$1" "got.$1"
    for command in topo env nics doctor; do
        status=0
        epkit "$command" --from "$1" --json >"$1.$command.json" || status=$?
        [ "$command" = nics ] || grep --line-regexp "$command.txt $status" "got.$1/exit.txt"
        valid "$command" "$1.$command.json"
    done
    python3 -S "$MACHINES/facts.py" "$1" "$MACHINES/expected/$1" "$1.topo.json" "$1.env.json"
    same_from_snapshot "$1" topo env doctor
    same_counters "$1"
}

# healthy NAME: the doctor has one line to say
healthy() {
    run -0 --separate-stderr epkit doctor --from "$1"
    [ "${#lines[@]}" -eq 1 ]
    epkit doctor --from "$1" --json | jq --exit-status '.healthy and .counts.found == 0 and .counts.unknown == 0'
}

@test "A4: as expected" {
    golden a4
    healthy a4
}

@test "A3 Ultra: as expected" {
    golden a3u
    healthy a3u
}

@test "8 H100, bare metal: as expected" {
    golden h100
    healthy h100
}

@test "8 H100 with 4 NICs: as expected" {
    golden h100-4nic
    healthy h100-4nic
}

@test "8 H100 with 16 NICs: as expected" {
    golden h100-16nic
    healthy h100-16nic
}

@test "GB200: as expected" {
    golden gb200
    healthy gb200
}

@test "virtual machine with one bus: as expected" {
    golden vm-flat
    healthy vm-flat
}

@test "laptop: as expected" {
    golden laptop
    healthy laptop
}

@test "empty root: as expected, and every command ends with 4 after one line" {
    local command
    golden empty
    for command in topo env nics doctor; do
        run --separate-stderr epkit "$command" --from empty
        echo "$command: $status: $output"
        [ "$status" -eq 4 ]
        [ "${#lines[@]}" -eq 1 ]
        [ -z "$stderr" ]
    done
}

@test "every machine has its expected output, and nothing else has" {
    diff <(python3 -S "$MACHINES/machines.py" --list | sort) \
        <(find "$MACHINES/expected" -mindepth 1 -maxdepth 1 -printf '%f\n' | sort)
}

@test "every check has its variant" {
    diff <(epkit doctor --list | tail --lines=+2 | cut -d' ' -f1 | sort) \
        <({ python3 -S "$MACHINES/machines.py" --variants && python3 -S "$MACHINES/machines.py" --rules; } |
            cut -s -d' ' -f2- | tr -d '?' | xargs -n1 | sort -u)
}

@test "A4: each GPU has the NIC of its own number" {
    epkit topo --from a4 --json >a4.map.json
    [ "$(jq -r '[.map[] | "\(.gpu):\(.device)"] | join(" ")' a4.map.json)" = \
        "0:mlx5_0:1 1:mlx5_1:1 2:mlx5_2:1 3:mlx5_3:1 4:mlx5_4:1 5:mlx5_5:1 6:mlx5_6:1 7:mlx5_7:1" ]
}

# sourced ENVIRON SCRIPT [NAME=VALUE...]: the environment, NUL-separated, of a shell that began with the one in ENVIRON
# and has read SCRIPT
sourced() {
    local environ="$1" script="$2" begin=()
    shift 2
    mapfile -d '' begin <"$environ"
    # A preloaded library is not there on this machine, which ld.so says on standard error.
    # shellcheck disable=SC2016
    env -i "${begin[@]}" "$@" PATH="$PATH" sh -c '. "$0" && exec env -0' "$script" 2>/dev/null |
        grep --null-data --invert-match --extended-regexp '^(PWD|OLDPWD|SHLVL|_|PATH)='
}

@test "A4: what epkit env writes gives a shell the environment that is healthy there" {
    epkit env --from a4 >env.sh
    diff <(sourced /dev/null ./env.sh | tr '\0' '\n' | grep --invert-match '^EPKIT_' | sort) \
        <(tr '\0' '\n' <a4/proc/self/environ |
            grep --extended-regexp '^(LD_LIBRARY_PATH|PYTHONPATH|DEEP_EP_.*|NCCL_.*|NVSHMEM_I.*)=' | sort)
    [ "$(sourced /dev/null ./env.sh | tr '\0' '\n' | sed -n 's/^EPKIT_PRELOAD=//p')" = \
        "$(tr '\0' '\n' <a4/proc/self/environ | sed -n 's/^LD_PRELOAD=//p')" ]
}

@test "A4: in a clean shell one reading sets everything: a second one changes nothing" {
    [ -e a4.clean ] || python3 -S "$MACHINES/machines.py" a4 a4.clean
    printf 'PATH=/usr/bin\0HOME=/root\0' >a4.clean/proc/self/environ
    epkit env --from a4.clean >once.sh
    grep -q DEEP_EP_DEVICE_TO_HCA_MAPPING once.sh
    sourced a4.clean/proc/self/environ ./once.sh >once
    cp once a4.clean/proc/self/environ
    epkit env --from a4.clean >twice.sh
    sourced a4.clean/proc/self/environ ./twice.sh >twice
    diff <(tr '\0' '\n' <once | sort) <(tr '\0' '\n' <twice | sort)
}

@test "the environment script of recipe and image gives a clean shell what is right, and the preload to the program" {
    local tree code
    epkit install show gcp-b200-ubuntu2404 >recipe.yaml
    python3 - recipe.yaml >unified-env.sh <<'END'
import sys
import yaml
recipe = yaml.safe_load(open(sys.argv[1]))
(step,) = [step for step in recipe["steps"] if step["id"] == "environment"]
content = step["content"]
for name, variable in recipe["variables"].items():
    content = content.replace("@{" + name + "}", str(variable.get("default", "")))
# The folders are those of the machine.
print(content.replace("[ -d /opt/deepep/nvshmem ]", "true"))
END
    grep -q 'export NVSHMEM_HOME=/opt/deepep/nvshmem' unified-env.sh
    mkdir -p bin
    for tree in a4 a3u gke-a4x; do
        rm -rf "$tree.script"
        python3 -S "$MACHINES/machines.py" "$tree" "$tree.script"
        # What the script calls sees the machine, with the environment that the script has by then.
        printf '#!/bin/sh\nenv -0 >"%s/proc/self/environ"\nexec "%s" "$@" --from "%s"\n' \
            "$PWD/$tree.script" "$EPKIT" "$PWD/$tree.script" >bin/epkit
        chmod +x bin/epkit
        printf 'HOME=/root\0' >begin
        PATH="$PWD/bin:$PATH" sourced begin ./unified-env.sh >got
        tr '\0' '\n' <got | sed -n 's/^EPKIT_PRELOAD=/LD_PRELOAD=/p' | tr '\n' '\0' >preload
        cat got preload >"$tree.script/proc/self/environ"
        code=0
        epkit env --check --from "$tree.script" >said || code=$?
        echo "$tree: $(cat said)"
        [ "$code" -eq 0 ]
        epkit doctor --from "$tree.script"
        # A second reading, as in a shell below, changes nothing.
        PATH="$PWD/bin:$PATH" sourced got ./unified-env.sh | tr '\0' '\n' | grep -v ^EPKIT_PRELOAD= | sort >twice
        diff twice <(tr '\0' '\n' <got | grep -v ^EPKIT_PRELOAD= | sort)
    done
    # Without epkit it sets nothing of NVSHMEM, and says so.
    run -1 env -i PATH=/usr/bin:/bin sh -c '. ./unified-env.sh'
    [[ "$output" == *"epkit is not in PATH"* ]]
}

@test "A4: each rank gets its NIC from the same script, and reading it twice changes nothing" {
    local i
    epkit env --from a4 >env.sh
    for i in 0 1 2 3 4 5 6 7; do
        [ "$(sourced /dev/null ./env.sh LOCAL_RANK=$i LOCAL_WORLD_SIZE=8 | tr '\0' '\n' |
            sed -n 's/^NVSHMEM_HCA_LIST=//p')" = "mlx5_$i:1" ]
    done
    sourced a4/proc/self/environ ./env.sh >once
    sourced once ./env.sh >twice
    diff <(tr '\0' '\n' <once | sort) <(tr '\0' '\n' <twice | sort)
}

@test "A4 under a published environment script: the one-NIC fault is named, and epkit env clears it" {
    local status=0
    epkit doctor --from a4.testbed-env --json >before.json || status=$?
    [ "$status" -eq 3 ]
    [ "$(ids before.json)" = "one-nic void-variables" ]
    epkit env --from a4.testbed-env >fix.sh
    [ -e a4.fixed ] || python3 -S "$MACHINES/machines.py" a4/testbed-env a4.fixed
    sourced a4.testbed-env/proc/self/environ ./fix.sh >a4.fixed/proc/self/environ
    healthy a4.fixed
}

@test "A4 under a published job's environment: epkit env clears all of its faults" {
    [ -e a4.job ] || python3 -S "$MACHINES/machines.py" a4/job-env a4.job
    epkit env --from a4.job >job.sh
    sourced a4.job/proc/self/environ ./job.sh >job.environ
    mv job.environ a4.job/proc/self/environ
    epkit doctor --from a4.job --json | ids /dev/stdin
    epkit doctor --from a4.job
}

@test "a snapshot holds nothing that identifies a machine, its owner or its users" {
    local mark
    epkit topo --from a4.identifiers --save identifiers.json >/dev/null
    while read -r mark; do
        grep --recursive --quiet --text --fixed-strings -- "$mark" a4.identifiers
        ! grep --ignore-case --fixed-strings -- "$mark" identifiers.json || {
            echo "in the snapshot: $mark"
            return 1
        }
    done < <(python3 -S "$MACHINES/machines.py" --identifiers)
    # What it is for is still in it.
    diff <(epkit doctor --from a4.identifiers --json | ids /dev/stdin) \
        <(epkit doctor --from identifiers.json --json | ids /dev/stdin)
    diff <(epkit topo --from a4.identifiers --only map) <(epkit topo --from identifiers.json --only map)
}

@test "options of a module in a folder that few sites have: the snapshot says what the machine says" {
    python3 -S "$MACHINES/machines.py" a4 rare
    mkdir -p rare/usr/local/lib/modprobe.d
    echo 'options nvidia NVreg_RegistryDwords="RMNvLinkDisableLinks=0x0"' >rare/usr/local/lib/modprobe.d/zz-site.conf
    same_from_snapshot rare doctor
    jq --exit-status '.facts["/usr/local/lib/modprobe.d/zz-site.conf\tnvidia-dwords"].value | contains("RMNvLinkDisableLinks=0x0")' rare.snapshot/rare
}

@test "a program's text is not in a snapshot, and what was read from it is" {
    python3 -S "$MACHINES/machines.py" a4 program
    epkit topo --from program --save program.json >/dev/null
    jq --exit-status '.facts | length >= 5' program.json
    jq --exit-status '[.facts | to_entries[] | select(.key | endswith("deep_ep/buffer.py\tdeepep-buffer")).value.value
        | .defines_mapping and .calls_mapping] | any' program.json
    jq --exit-status '[.files | keys[] | select(endswith(".py") or endswith(".sh") or endswith("METADATA"))] == []' program.json
}

@test "identifiers in other forms, in the place of words of everything that was read: no snapshot holds one" {
    python3 -S "$MACHINES/machines.py" a4 replaced
    epkit topo --from replaced --save read.json >/dev/null
    python3 -S "$MACHINES/planted.py" --replace replaced read.json >marks
    epkit topo --from replaced --save replaced.json >/dev/null
    [ "$(wc --lines <marks)" -ge 30 ]
    run -1 grep --ignore-case --only-matching --fixed-strings --file marks replaced.json
}

@test "identifiers planted in everything that was read: no snapshot holds one, and its verdict is the machine's" {
    local mark
    python3 -S "$MACHINES/machines.py" a4/identifiers planted
    epkit topo --from planted --save read.json >/dev/null
    python3 -S "$MACHINES/planted.py" planted read.json >marks
    epkit topo --from planted --save planted.json >/dev/null
    while read -r mark; do
        ! grep --ignore-case --fixed-strings -- "$mark" planted.json || {
            echo "in the snapshot: $mark"
            return 1
        }
    done <marks
    diff <(epkit doctor --from planted --json | jq -c '.checks[] | [.id, .outcome]') \
        <(epkit doctor --from planted.json --json | jq -c '.checks[] | [.id, .outcome]')
    diff <(epkit topo --from planted --only map) <(epkit topo --from planted.json --only map)
}
