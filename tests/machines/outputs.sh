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

# json FILE ARGUMENT...: without what a build changes
json() {
    output "$@" --json
    jq 'del(.epkit)' "$to/$1" >"$to/json"
    mv "$to/json" "$to/$1"
}

output topo.txt topo
json topo.json topo
output env.txt env
json env.json env
output doctor.txt doctor

# Which network epkit uses between nodes: of the document of doctor, whose checks doctor.txt has.
output network.json doctor --json
jq .network "$to/network.json" >"$to/json"
mv "$to/json" "$to/network.json"
