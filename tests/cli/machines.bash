# SPDX-License-Identifier: Apache-2.0
# What the tests of epkit on made-up machines share; loaded after common. tests/machines/ makes the machines.

MACHINES="$EPKIT_SOURCE/tests/machines"

# trees NAME[/VARIANT]...: those that are not here yet, as NAME.VARIANT. Nothing may be written into their files: equal ones
# are one, and many together take little longer than one.
trees() {
    local name arguments=()
    for name in "$@"; do
        [ -e "${name/\//.}" ] || arguments+=("$name" "${name/\//.}")
    done
    [ ${#arguments[@]} -eq 0 ] || python3 -S "$MACHINES/machines.py" --share "${arguments[@]}"
}

# make_trees NAME[/VARIANT]...: in setup_file; in $BATS_FILE_TMPDIR, where the tests of the file run.
make_trees() {
    (cd "$BATS_FILE_TMPDIR" && trees "$@")
}

# ids FILE: of the findings in a JSON document of the doctor, sorted, in one line
ids() {
    jq -r '[.checks[] | select(.outcome == "found").id] | sort | join(" ")' "$1"
}

# Of an error in the kernel log a snapshot has number, device and time, and not what the driver says besides.
without_log_text() {
    sed --regexp-extended 's/(NVRM: Xid \(PCI:[^)]*\): [0-9]+|SXid \(PCI:[^)]*\): [0-9]+)[^"]*/\1/' "$1"
}

# same_from_snapshot TREE COMMAND...: the commands say the same of the snapshot. Leaves TREE.COMMAND.tree and TREE.COMMAND.exit.
same_from_snapshot() {
    local command of_tree of_file
    local tree="$1"
    shift
    rm -rf "$tree.snapshot"
    mkdir "$tree.snapshot"
    epkit topo --from "$tree" --save "$tree.snapshot/$tree" --json >"$tree.topo.saved" 2>"$tree.said" || [ $? -eq 4 ]
    for command in "$@"; do
        of_tree=0
        of_file=0
        epkit "$command" --from "$tree" --json >"$tree.$command.tree" || of_tree=$?
        (cd "$tree.snapshot" && epkit "$command" --from "$tree" --json >"../$tree.$command.file") || of_file=$?
        diff <(without_log_text "$tree.$command.tree") <(without_log_text "$tree.$command.file")
        [ "$of_tree" -eq "$of_file" ]
        echo "$of_tree" >"$tree.$command.exit"
        [ "$command" != topo ] || diff "$tree.topo.saved" "$tree.topo.tree"
    done
}

# same_counters TREE: after same_from_snapshot. A folder may change and is looked at twice, a snapshot is of one moment.
same_counters() {
    local which='[.devices[]? | [.device, .gpus, .rate_gbps, .total, [.counters[] | [.name, .total]]]]'
    diff <(epkit nics --from "$1" --json | jq "$which") <(epkit nics --from "$1.snapshot/$1" --json | jq "$which")
}
