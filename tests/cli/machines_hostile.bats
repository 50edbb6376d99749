#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Roots that no kernel would make. Every command ends by itself, soon, with something that can be read.

load common
load machines

setup_file() {
    # shellcheck disable=SC2046
    make_trees $(sed -n 's/^    \(hostile\|refused\) \([^ ]*\)$/\2/p' "$BATS_TEST_FILENAME")
}

# hostile NAME/VARIANT: exit code 0, 3, 4 or 5 within 5 s of processor time, JSON that is valid, text without control
# characters: not even the end of a line in what is seen, with which a name would begin lines of its own
hostile() {
    local tree="${1/\//.}" command status
    cd "$BATS_FILE_TMPDIR" || return 1
    for command in topo env nics doctor; do
        status=0
        thrifty 5 "$EPKIT" "$command" --from "$tree" --json >out.json 2>err.txt || status=$?
        echo "$command --json: exit code $status: $(head -c 500 err.txt)"
        [[ "$status" =~ ^[0345]$ ]]
        jq empty out.json
        jq --exit-status \
            '[.checks[]? | .text, (.evidence[]? | .where, .what) | select(test("[[:cntrl:]]"))] | debug == []' out.json
        [ "$command" != nics ] || continue # it would look at the counters for a second again
        status=0
        thrifty 5 "$EPKIT" "$command" --from "$tree" >out.txt 2>err.txt || status=$?
        echo "$command: exit code $status: $(head -c 500 err.txt)"
        [[ "$status" =~ ^[0345]$ ]]
        [ -s out.txt ]
        iconv --from-code UTF-8 --to-code UTF-8 out.txt err.txt >text.txt
        if LC_ALL=C grep --text --perl-regexp '[\x00-\x08\x0b-\x1f\x7f]' text.txt; then
            echo "control characters in the output of $command"
            return 1
        fi
        if grep --no-messages '^root:\|:/bin/' text.txt out.json; then
            echo "$command shows what is not below the root"
            return 1
        fi
    done
}

# refused NAME/VARIANT: exit code 2 and a message
# shellcheck disable=SC2154 # $stderr is set by run
refused() {
    local command
    cd "$BATS_FILE_TMPDIR" || return 1
    for command in topo env nics doctor; do
        run --separate-stderr epkit "$command" --from "${1/\//.}"
        echo "$command: exit code $status: $stderr"
        [ "$status" -eq 2 ]
        [ -z "$output" ]
    done
}

@test "every kind has its test" {
    diff <(python3 -S "$MACHINES/machines.py" --hostile | sort) \
        <(sed -n 's/^    \(hostile\|refused\) \([^ ]*\)$/\2/p' "$BATS_TEST_FILENAME" | sort)
}

@test "every file ends in its middle" {
    hostile a4/hostile-truncated
}

@test "every file is binary, with escape sequences for terminals" {
    hostile a4/hostile-garbage
}

@test "files that are read whole have 100 MiB" {
    hostile a4/hostile-sparse
}

@test "links that lead to themselves, to each other, and folders that contain themselves" {
    hostile a4/hostile-loops
}

@test "links out of the root, by name and by going up" {
    hostile a4/hostile-outward
}

@test "a folder where a file should be" {
    hostile a4/hostile-folders
}

@test "a FIFO where a file should be: opening one for reading waits for ever" {
    hostile a4/hostile-fifos
}

@test "20000 entries in folders that are listed" {
    hostile a4/hostile-crowd
}

@test "devices without any attribute" {
    hostile a4/hostile-bare
}

@test "the driver's answer has the wrong types and sizes" {
    hostile a4/hostile-answers
}

@test "what a snapshot says was read of files has the wrong types" {
    local name value
    cd "$BATS_TEST_TMPDIR" || return 1
    for name in dgx-b200/nccl-family dgx-h100-superpod/firmware torchrun-two-nodes/iptables aws-p5/fabric-vanilla; do
        python3 -S "$MACHINES/machines.py" "$name" machine
        epkit topo --from machine --save saved.json
        for value in 7 null '"x"' '[1, null]' '{"a": 2}'; do
            # shellcheck disable=SC2016 # $value is jq's
            jq --argjson value "$value" \
                '.facts |= with_entries(if (.key | endswith("\tenvironment")) or (.value | has("value") | not) then .
                 else .value.value |= if type == "array" or type == "object" then map_values($value) else $value end
                 end)' \
                saved.json >wrong.json
            [ "$(jq -c .facts wrong.json)" != "$(jq -c .facts saved.json)" ]
            thrifty 5 "$EPKIT" doctor --from wrong.json >out.txt || [[ $? =~ ^[35]$ ]]
        done
        rm -r machine saved.json
    done
}

@test "what may not be read is said to be unknown, with the reason" {
    hostile a4/hostile-denied
    epkit doctor --from a4.hostile-denied --json >denied.json || [ $? -eq 5 ]
    jq -r '.checks[] | select(.outcome == "unknown") | "\(.id): \(.text)"' denied.json
    for id in driver-skew memlock shm visible-devices; do
        jq --exit-status --arg id "$id" \
            '.checks[] | select(.id == $id) | .outcome == "unknown" and (.text | test("ermission denied"))' denied.json
    done
}

@test "numbers beyond all bounds" {
    hostile a4/hostile-contradiction
}

@test "names and values that are commands for a shell: those that epkit writes keep to a strict form" {
    hostile a4/hostile-words
    epkit doctor --from a4.hostile-words --json >words.json || [ $? -eq 3 ]
    jq -r '.checks[] | select(.outcome == "found") | "\(.id): \(.fix)"' words.json
    [ "$(jq '[.checks[] | select(.outcome == "found" and .fix)] | length' words.json)" -ge 8 ]
    PYTHONPATH="$MACHINES" python3 -c \
        'import collection, json, sys; sys.exit("\n".join(collection.judge_commands(json.load(sys.stdin))) or 0)' <words.json
}

@test "the overlay ends in its middle: refused, with the place" {
    refused a4/hostile-overlay-cut
    [[ "$stderr" == *epkit-overlay.json* ]]
}

@test "the overlay says of a file what cannot be: refused, with the place" {
    refused a4/hostile-overlay-types
    [[ "$stderr" == *epkit-overlay.json* ]]
}
