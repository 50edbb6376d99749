# SPDX-License-Identifier: Apache-2.0
# What the tests of epkit on made-up machines share; loaded after common. tests/machines/ makes the machines.

MACHINES="$EPKIT_SOURCE/tests/machines"

# make_trees NAME[/VARIANT]...: in setup_file. They lie in $BATS_FILE_TMPDIR, where the tests of the file run.
make_trees() {
    local name arguments=()
    for name in "$@"; do
        arguments+=("$name" "$BATS_FILE_TMPDIR/${name/\//.}")
    done
    python3 "$MACHINES/machines.py" "${arguments[@]}"
}

# Variants that the tests of a file are about: `fault NAME/VARIANT` is all of their body.
variants_of_file() {
    sed -n 's/^    fault \([^ ]*\)$/\1/p' "$1"
}

# ids FILE: of the findings in a JSON document of the doctor, sorted, in one line
ids() {
    jq -r '[.findings[].id] | sort | join(" ")' "$1"
}

# fault NAME/VARIANT: the doctor finds what the variant is about, and nothing else; a snapshot of it says the same
fault() {
    local tree="${1/\//.}" expected status=0
    cd "$BATS_FILE_TMPDIR" || return 1
    expected=$(python3 "$MACHINES/machines.py" --variants | sed -n "s|^$1 ||p" | xargs -n1 | sort | xargs)
    epkit doctor --from "$tree" --json >"$tree.json" || status=$?
    echo "exit code $status, expected: $expected"
    jq -r '.findings[] | "found: \(.id): \(.text)"' "$tree.json"
    [ "$(ids "$tree.json")" = "$expected" ]
    [ "$status" -eq 3 ]
    same_from_snapshot "$tree"
}

# same_from_snapshot TREE: every verb that looks at a machine says the same of the snapshot
same_from_snapshot() {
    local verb of_tree of_file
    rm -rf "$1.snapshot"
    mkdir "$1.snapshot"
    epkit topo --from "$1" --save "$1.snapshot/$1" >/dev/null || [ $? -eq 4 ]
    for verb in topo env nics doctor; do
        of_tree=0
        of_file=0
        epkit "$verb" --from "$1" --json >"$1.$verb.tree" || of_tree=$?
        (cd "$1.snapshot" && epkit "$verb" --from "$1" --json >"../$1.$verb.file") || of_file=$?
        [ "$of_tree" -eq "$of_file" ]
        diff "$1.$verb.tree" "$1.$verb.file"
    done
}
