# SPDX-License-Identifier: Apache-2.0
# What the tests of epkit on made-up machines share; loaded after common. tests/machines/ makes the machines.

MACHINES="$EPKIT_SOURCE/tests/machines"

# make_trees NAME[/VARIANT]...: in setup_file. They lie in $BATS_FILE_TMPDIR, where the tests of the file run. Nothing
# may be written into their files: equal ones are one.
make_trees() {
    local name arguments=()
    for name in "$@"; do
        arguments+=("$name" "$BATS_FILE_TMPDIR/${name/\//.}")
    done
    python3 "$MACHINES/machines.py" --share "${arguments[@]}"
    python3 "$MACHINES/machines.py" --variants >"$BATS_FILE_TMPDIR/variants"
}

# Variants that the tests of a file are about: `fault NAME/VARIANT` is all of their body.
variants_of_file() {
    sed -n 's/^    fault \([^ ]*\)$/\1/p' "$1"
}

# ids FILE: of the findings in a JSON document of the doctor, sorted, in one line
ids() {
    jq -r '[.checks[] | select(.outcome == "found").id] | sort | join(" ")' "$1"
}

# unknown FILE: checks that leave open whether the machine is healthy, as ids() has those that found something
unknown() {
    jq -r '[.checks[] | select(.outcome == "unknown" and .open).id] | sort | join(" ")' "$1"
}

# classified FILE: a command that stops something is of a class that says so, tells its cost, and names its device by
# the PCI address; what is unknown says what would tell
classified() {
    jq --exit-status '[.checks[] | select(.outcome == "found")] | all(
        ((.fix // "") | test("reboot|gpu-reset|systemctl restart|mlxconfig|cos-extensions install")) as $stops
        | ((.fix == null) == (.fix_class == null))
        and ((.fix_class == "restart" or .fix_class == "cuts-off") == $stops)
        and (($stops | not) or .fix_cost != null) and (($stops and .fix_is_safe) | not)
        and (((.fix // "") | test("gpu-reset|mlxconfig") | not) or (.fix | test("[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}[.][0-7]"))))' "$1"
    jq --exit-status '[.checks[] | select(.outcome == "unknown")] | all(.would_tell != "")' "$1"
}

# commands FILE: every command of the doctor is made of words that a shell takes as they are, of text in single quotes,
# and of the few expansions that epkit writes itself
commands() {
    jq --raw-output '.checks[] | select(.outcome == "found") | .fix // empty' "$1" >"$1.commands"
    python3 - "$1.commands" <<'END'
import re
import sys

WORD = r"(?:[A-Za-z0-9_./+,:=@%*-]|'[^'\n]*'|\\')+"
OWN = r'(?:"\$\(epkit env(?: --only [a-z]+)?\)"|\||[A-Z_]+=' + WORD + r"\$\{([A-Z_]+):\+:\$\1\})"
# Groups inside a repetition would be counted: one pattern for each word instead.
TOKEN = re.compile(f"(?:{OWN}|{WORD})(?: |$)")
COMMANDS = {"unset", "export", "eval", "sudo", "sudoedit", "ldd", "echo", "epkit", "taskset", "ulimit", "nvidia-smi",
            "scontrol", "NVSHMEM_USE_GDRCOPY=0"}
lines = open(sys.argv[1], encoding="utf-8").read().splitlines()
for line in lines:
    at = 0
    while at < len(line):
        token = TOKEN.match(line, at)
        if not token:
            sys.exit(f"not a command that may be pasted: {line!r}, from {line[at:]!r}")
        at = token.end()
    if line.split(" ")[0] not in COMMANDS and not re.match(r"[A-Z_]+=", line):
        sys.exit(f"not one of the commands that epkit writes: {line!r}")
    if line.startswith("unset ") and not re.fullmatch(r"unset(?: [A-Za-z_][A-Za-z0-9_]*)+", line):
        sys.exit(f"not names of variables: {line!r}")
print(len(lines))
END
}

# fault NAME/VARIANT: the doctor finds what the variant is about, and nothing else; a snapshot of it says the same.
# There are variants that are healthy too: what looks like a fault and is none.
fault() {
    local tree="${1/\//.}" expected open
    cd "$BATS_FILE_TMPDIR" || return 1
    expected=$(sed -n "s|^$1 ||p" variants | tr ' ' '\n' | grep -v '^?' | sort | xargs)
    # What is to be unknown is written with '?' in front.
    open=$(sed -n "s|^$1 ||p" variants | tr ' ' '\n' | sed -n 's/^?//p' | sort | xargs)
    # A fault is the doctor's to find; of the other commands, machines.bats compares every shape of machine.
    if [ -n "${EPKIT_TEST_LONG-}" ]; then
        same_from_snapshot "$tree" topo env doctor
    else
        same_from_snapshot "$tree" doctor
    fi
    echo "expected: $expected"
    jq -r '.checks[] | select(.outcome == "found" or .outcome == "unknown") | "\(.outcome): \(.id): \(.text)"' \
        "$tree.doctor.tree"
    [ "$(ids "$tree.doctor.tree")" = "$expected" ]
    [ -n "$expected" ] || [ "$(unknown "$tree.doctor.tree")" = "$open" ]
    commands "$tree.doctor.tree"
    classified "$tree.doctor.tree"
    [ "$(cat "$tree.doctor.exit")" -eq "$([ -n "$expected" ] && echo 3 || { [ -n "$open" ] && echo 5; } || echo 0)" ]
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
