#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# All command lines in the documents are valid, and the check detects invalid ones.
#
# shellcheck disable=SC2154,SC2016,SC2030,SC2031 # set by run; text of documents

load common
load ../page

documented() {
    limited 60 python3 -S "$EPKIT_SOURCE/tests/cli/documented.py" "$EPKIT" "$@"
}

@test "all command lines in the documents are valid" {
    cd "$EPKIT_SOURCE"
    documented ./*.md {bench,docs,examples,python,tests/*}/*.md man/*.scd deploy/helm/epkit/templates/NOTES.txt
}

@test "the quickstart on a laptop: each command is taken as it is, and the output is what the page says" {
    [ ! -e /proc/driver/nvidia ] && [ ! -e /sys/class/infiniband ] || skip "this machine has GPUs or RDMA devices"
    local command expected code section n=0
    PATH=$EPKIT_BUILD:$PATH
    for section in '2. Environment' '3. Verify'; do
        page_row laptop "$section"
        run "-$code" bash -c "$command"
        page_agrees "$expected" "$output"
        n=$((n + 1))
    done
    [ "$n" -eq 2 ]
    run -0 bash -c "$(page_commands 'Laptop · 10 s')"
    page_expects 'Laptop · 10 s' "$output"
}

@test "a page without the heading, or without an output to compare, is no agreement" {
    run ! page_commands 'No such heading'
    run -1 bash -c "$(page_commands 'No such heading')"
    [ "$output" = "the page has no commands 1 below: No such heading" ]
    run ! page_expects 'No such heading' anything
    [[ "$output" == "the page promises nothing: "* ]]
    run ! page_agrees 'no backquotes' anything
}

@test "the version in a remedy is the one that its check compares with" {
    cd "$EPKIT_SOURCE"
    local check macro version
    while read -r check macro; do
        version=$(sed -n "s/^#define $macro \"\(.*\)\"$/\1/p" machine/doctor/*.c)
        [ -n "$version" ]
        grep "\`$check\` |\$" docs/failure-modes.md | grep --fixed-strings " $version or later"
    done <<<$'doca-kernel DOCA_FOR_614\nefa-version EFA_FOR_NCCL_219'
}

@test "links of the documents lead to files and headings, and both languages have the same commands and checks" {
    cd "$EPKIT_SOURCE"
    python3 - <<'END'
import glob, os, re, sys
bad = 0
def headings(path):
    text = re.sub(r"^```.*?^```", "", open(path, encoding="utf-8").read(), flags=re.S | re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^#+ (.*)", text, re.M)}
def blocks(path):
    return re.findall(r"^```sh$.*?^```$", open(path, encoding="utf-8").read(), re.S | re.M)
pages = glob.glob("*.md") + glob.glob("*/*.md") + glob.glob("tests/*/*.md")
for page in pages:
    for link in re.findall(r"\]\(([^)\s]+)\)", open(page, encoding="utf-8").read()):
        path, _, anchor = link.partition("#")
        target = os.path.join(os.path.dirname(page), path) if path else page
        if "://" in link or (os.path.exists(target) and (not anchor or anchor in headings(target))):
            continue
        print(f"{page}: {link} leads nowhere")
        bad = 1
if blocks("docs/quickstart.md") != blocks("docs/quickstart.zh-CN.md"):
    print("the commands of the quickstarts differ")
    bad = 1
def promised(page, begin, end):
    text = open(page, encoding="utf-8").read()
    return sorted(re.findall(r"`[^`]+`", " ".join(re.findall(rf"{begin}(.*?)(?:{end}|\n\n)", text, re.S))))
if promised("docs/quickstart.md", "Expected:", "If not:") != promised("docs/quickstart.zh-CN.md", "预期：", "否则："):
    print("what the quickstarts call expected differs")
    bad = 1
def ends(page):
    rows = re.findall(r"^\| (\d+) \|.*\|([^|]*)\|$", open(page, encoding="utf-8").read(), re.M)
    return [(mode, check.strip()) for mode, checks in rows for check in checks.split(",")]
if ends("docs/failure-modes.md") != ends("docs/failure-modes.zh-CN.md"):
    print("the failure modes differ in numbers or checks")
    bad = 1
sys.exit(bad)
END
}

# noticed WHY LINE
noticed() {
    printf '```sh\n%s\n```\n' "$2" >"$BATS_TEST_TMPDIR/page.md"
    run -1 documented "$BATS_TEST_TMPDIR/page.md"
    [[ "${lines[0]}" == *": $1" ]]
}

@test "invalid command lines are detected, with page and line" {
    noticed "no command tset" 'epkit tset internode'
    noticed "test has no option --rnaks" 'epkit test internode --rnaks 2'
    noticed "test has no othernode" 'epkit test othernode'
    noticed "nothing explains two-nics" 'epkit doctor --explain two-nics'
    noticed "no recipe gcp-b201" 'sudo epkit install apply gcp-b201'
    noticed "doctor has no option --jsn" 'srun -N2 epkit doctor --jsn'
    noticed "launch has no option --conect" 'kubectl exec -it $POD -- epkit launch --conect srun hostname'
    noticed "--queue lacks its value" 'epkit deploy check --gpus 8 --queue'
    noticed "bench does not take --ll-tokens 8,128" 'build-cuda/epkit bench --only ll --ll-tokens 8,128 --iters 9'
    noticed "test does not take --boot=thraeds" 'epkit test internode --boot=thraeds'
    printf 'One\n\nSee `epkit launch --hsots x`.\n' >"$BATS_TEST_TMPDIR/page.md"
    run documented "$BATS_TEST_TMPDIR/page.md"
    [[ "${lines[0]}" == *"page.md:3: epkit launch --hsots x: launch has no option --hsots" ]]
}
