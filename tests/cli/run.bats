#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# epkit run: the verdict and the report. All tests of this file use one run: a quick one, in the long tier a full one.
#
# shellcheck disable=SC2154 # $stderr is set by run

load common

setup_file() {
    cd "$BATS_FILE_TMPDIR" || return 1
    quick=--quick
    [ -z "${EPKIT_TEST_LONG-}" ] || quick=
    echo "epkit run${quick:+ $quick} --seed 3" >how
    # shellcheck disable=SC2086
    "$EPKIT" run $quick --output here --seed 3 >out 2>err
    echo $? >code
}

setup() {
    cd "$BATS_FILE_TMPDIR" || return 1
}

@test "it works here" {
    cat out err
    [ "$(cat code)" -eq 0 ]
}

@test "the verdict comes first, in one sentence" {
    head -1 out
    grep -Eq '^epkit works here: 24/24, 32/32 and 32/32 cases passed; .* dispatch moves [0-9.]+ GB/s, [0-9.]+ of memcpy\.$' \
        <(head -1 out)
}

@test "progress is on standard error" {
    # After some seconds; a quick run may end earlier.
    [ -z "${EPKIT_TEST_LONG-}" ] || grep -q '^epkit: run ' err
    run ! grep -q 'epkit: run ' out
}

@test "the results in run.json and report.json are valid by their schemas" {
    jq .results here/run.json >results
    valid run results
    valid report here/report.json
    cmp <(jq -S . results) <(jq -S .results here/report.json)
    [ "$(jq -r '.job, .exit_code, .command' here/run.json)" = "$(printf 'epkit-run\n0\n%s' "$(cat how)")" ]
    [ "$(jq -r .verdict here/report.json)" = "$(head -1 out)" ]
    [ "$(jq -r .result here/report.json)" = passed ]
    [ "$(jq -r .result results)" = works ]
    [ "$(jq '[.suites[].passed] | add' results)" -eq 88 ]
    jq -e '[.bench.rows[] | select(.op == "dispatch")] | length > 0' results
}

@test "epkit report makes the same page of the folder" {
    run -0 --separate-stderr epkit report here --output again
    [ "${lines[0]}" = "$(head -1 out)" ]
    cmp here/report.html again/report.html
    cmp here/report.json again/report.json
}

@test "report.html: complete, with the verdict, without external resources" {
    [ "$(tail -1 here/report.html)" = '</html>' ]
    grep -qF "$(head -1 out)" here/report.html
    # The URIs of SVG namespaces are not links.
    sed 's|http://www.w3.org/||g' here/report.html >page
    run ! grep -E "(src|href)=[\"'][^#\"']|@import|url\(|<script|<link|://" page
    echo "$output"
}

@test "report.html: tags are closed and names are unique" {
    python3 - here/report.html <<'PYTHON'
import html.parser
import sys

VOID = {"meta", "path", "rect", "circle", "use", "feflood", "fecomposite"}


class Checker(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.names = [], set()

    def handle_starttag(self, tag, attributes):
        self.handle_startendtag(tag, attributes)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        name = dict(attributes).get("id")
        assert name not in self.names, f"{name} is there twice"
        if name:
            self.names.add(name)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag, f"{tag} at {self.getpos()}"


checker = Checker()
with open(sys.argv[1], encoding="utf-8") as file:
    checker.feed(file.read())
assert not checker.open, checker.open
PYTHON
}

@test "both have the command that reproduces the report" {
    [ "$(jq -r .command here/report.json)" = "$(cat how)" ]
    grep -qF "<code>$(cat how)</code>" here/report.html
}

@test "plots exist, and axes have labels" {
    [ "$(grep -c '<svg viewBox=.* role="img"' here/report.html)" -eq 1 ]
    grep -q 'GB/s of one rank' here/report.html
    grep -q 'tokens of each rank' here/report.html
}

@test "only the three files remain" {
    [ "$(find here -mindepth 1 -printf '%f\n' | sort | xargs)" = "report.html report.json run.json" ]
}

@test "a network that cannot be used here: the verdict names it, and what passed" {
    [ ! -e /sys/class/infiniband_verbs ] || skip "this machine has RDMA"
    run -4 --separate-stderr epkit run --quick --network verbs --output "$BATS_TEST_TMPDIR/report" --json
    valid run <<<"$output"
    [ "$(jq -r .verdict <<<"$output")" = "epkit cannot use the network verbs here: 24/24, 0/32 and 32/32 cases passed." ]
}

@test "a folder that cannot be used: exit code 2 before anything runs" {
    touch file
    run -2 --separate-stderr epkit run --output file
    [[ "$stderr" == *"file: it is not a folder"* ]]
    run -2 --separate-stderr epkit run --output no/such/parent
    [[ "$stderr" == *"the folder of the report, no/such/parent: No such file or directory"* ]]
    [ ! -e no ]
    mkdir other
    echo '{"schema_version": 1, "job": "hostname"}' >other/run.json
    run -2 --separate-stderr epkit run --output other
    [[ "$stderr" == *"other: it has the run of another command"* ]]
}
