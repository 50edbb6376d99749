#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# outputs.sh EPKIT TREE DIR - what epkit says about the machine below TREE, a name in the working directory, as files
# in DIR; in exit.txt the exit codes.
set -euo pipefail

epkit=$1
tree=$2
to=$3

mkdir -p "$to"
: >"$to/exit.txt"

# output FILE ARGUMENT...
output() {
    local file=$1 status=0
    shift
    timeout 60 "$epkit" "$@" --from "$tree" >"$to/$file" 2>"$to/stderr" || status=$?
    printf '%s %d\n' "$file" "$status" >>"$to/exit.txt"
    if [ -s "$to/stderr" ]; then
        cat "$to/stderr" >&2
        exit 1
    fi
    rm "$to/stderr"
}

# part FILTER FILE ARGUMENT...: of a JSON document what the texts do not tell; facts.py compares the rest with them
part() {
    local filter=$1 file=$2
    shift
    output "$@" --json
    jq --raw-output "$filter" "$to/$file" >"$to/json"
    mv "$to/json" "$to/$file"
}

output topo.txt topo
output env.txt env
part '.variables[]? | "\(.name) \(.scope)"' variables.txt env
output doctor.txt doctor
