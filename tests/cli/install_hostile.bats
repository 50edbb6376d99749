#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Invalid and malicious recipes: each is refused with its file and line, and nothing changes.
#
# shellcheck disable=SC2016 # what recipes hold

load common

HEAD='recipe: bad
title: a recipe
steps:'
STEP='  - id: one
    type: file
    title: a file
    why: for the test
    budget: 5s
    path: /etc/one
    content: text'

setup() {
    cd "$BATS_TEST_TMPDIR" || exit 1
    mkdir m
}

# refused LINE TEXT [OPTION...]: the recipe on standard input is refused in this line (0: no line of it) for this reason.
refused() {
    local line=$1 text=$2
    shift 2
    cat >bad.yaml
    for action in plan apply uninstall; do
        run -2 timeout 600 "$EPKIT" install "$action" ./bad.yaml --root m "$@"
        if [ "$line" -gt 0 ]; then [[ "$output" == *"./bad.yaml:$line: "* ]]; fi
        [[ "$output" == *"$text"* ]]
    done
    [ -z "$(ls m)" ]
}

@test "unknown keys" {
    printf '%s\n%s\n    pth: x\n' "$HEAD" "$STEP" | refused 11 "has no key 'pth'"
    printf 'recpe: x\n%s\n%s\n' "$HEAD" "$STEP" | refused 1 "has no key 'recpe'"
    printf 'target: {planet: mars}\n%s\n%s\n' "$HEAD" "$STEP" | refused 1 "has no key 'planet'"
    printf '%s\n%s\n    verify: [{name: a, run: b, shell: c}]\n' "$HEAD" "$STEP" | refused 11 "has no key 'shell'"
}

@test "missing keys, types and versions" {
    printf '%s\n%s\n' "$HEAD" "${STEP/    path: \/etc\/one/}" | refused 4 "lacks 'path'"
    printf '%s\n%s\n' "$HEAD" "${STEP/type: file/type: fil}" | refused 5 "unknown type 'fil'"
    printf '%s\n%s\n' "$HEAD" "${STEP/budget: 5s/budget: 5}" | refused 8 "'budget' must be a time"
    printf '%s\n%s\n    deadline: 4s\n' "$HEAD" "$STEP" | refused 11 "'deadline' is shorter than 'budget'"
    printf '%s\n%s\n' "$HEAD" "${STEP/budget: 5s/budget: 99999999999h}" | refused 8 "'budget' must be a time"
    printf '%s\n  - {id: a, type: apt, title: t, why: w, budget: 1s, packages: {git: }}\n' "$HEAD" | refused 4 'empty'
    printf '%s\n  - {id: a, type: apt, title: t, why: w, budget: 1s, packages: [git]}\n' "$HEAD" |
        refused 4 'must be a map'
    printf '%s\n  - {id: a, type: apt, title: t, why: w, budget: 1s, packages: {git: "@{git}"}}\n' "$HEAD" |
        refused 4 "no version or variable 'git'"
    printf '%s\n  - {id: a, type: build, title: t, why: w, budget: 1s, git: "https://h/r", ref: main, script: x, provides: [/a], owns: [/a]}\n' "$HEAD" |
        refused 4 "needs 'ref' and 'commit'"
    printf '%s\n  - {id: a, type: deb, title: t, why: w, budget: 1s, package: p, version: "1", url: "https://h/p.deb"}\n' "$HEAD" |
        refused 4 "lacks 'sha256'"
    printf '%s\n  - {id: a, type: command, title: t, why: w, budget: 1s, run: x, undo: y}\n' "$HEAD" |
        refused 4 "needs 'check' or 'creates'"
}

@test "cycles, missing needs, duplicate ids" {
    printf '%s\n%s\n    needs: [one]\n' "$HEAD" "$STEP" | refused 4 'form a cycle'
    printf '%s\n%s\n    needs: [two]\n%s\n    needs: [one]\n' "$HEAD" "$STEP" "${STEP/id: one/id: two}" |
        refused 4 'form a cycle'
    printf '%s\n%s\n    needs: [three]\n' "$HEAD" "$STEP" | refused 11 "needs 'three', which is not a step"
    printf '%s\n%s\n%s\n' "$HEAD" "$STEP" "$STEP" | refused 11 'is a duplicate'
    printf '%s\n%s\n    path: /etc/two\n' "$HEAD" "$STEP" | refused 11 "'path' is a duplicate"
}

@test "two steps that write the same, unless one of them is left out" {
    two() { printf '%s\n  - {id: a, type: file, title: t, why: w, budget: 1s, path: /etc/a, content: x%s}\n  - {id: b, type: file, title: t, why: w, budget: 1s, path: /etc/a, content: y%s}\n' "$HEAD" "$1" "$2"; }
    two '' '' | refused 5 "steps 'a' and 'b' both write /etc/a"
    printf '%s\n  - {id: a, type: modprobe, title: t, why: w, budget: 1s, module: m, options: {a: "1"}}\n  - {id: b, type: modprobe, title: t, why: w, budget: 1s, module: m, options: {b: "1"}}\n' "$HEAD" |
        refused 5 "steps 'a' and 'b' both write /etc/modprobe.d/zz-epkit-m.conf"
    { two ', when: v' ', when: "!v"' && printf 'variables: {v: {kind: flag, default: "1", help: h}}\n'; } >good.yaml
    "$EPKIT" install plan ./good.yaml --root m || [ $? -eq 3 ]
}

@test "steps that would delete what others made" {
    two() { printf '%s\n  - {id: a, title: t, why: w, budget: 1s, %s}\n  - {id: b, title: t, why: w, budget: 1s, %s}\n' "$HEAD" "$1" "$2"; }
    local build='type: build, git: "https://h/r", ref: main, commit: abcdef0, script: x'
    two "$build, provides: [/o/b/a], owns: [/o/b]" 'type: file, path: /o/b/c, content: x' |
        refused 4 "step 'a' owns /o/b and would delete /o/b/c, which belongs to step 'b'"
    two 'type: pip, target: /o/b, packages: {x: "1.0"}' "$build, provides: [/o/b/a], owns: [/o]" | refused 5 'would delete /o/b'
    two "$build, provides: [/o/a], owns: [/o]" "$build, provides: [/o/a], owns: [/o]" | refused 4 'would delete /o'
    # A sibling path is not within it.
    two "$build, provides: [/o/b/a], owns: [/o/b]" 'type: file, path: /o/bc, content: x' >good.yaml
    "$EPKIT" install plan ./good.yaml --root m || [ $? -eq 3 ]
}

@test "system folders that a build would replace, also through a value" {
    for folder in /usr /usr/local /opt /etc /lib/modules /var/lib; do
        printf '%s\n  - {id: a, type: build, title: t, why: w, budget: 1s, git: "https://h/r", ref: main, commit: abcdef0, script: x, provides: [/a], owns: [%s]}\n' "$HEAD" $folder |
            refused 4 "would own $folder, a folder of the system"
    done
    run -2 env NVSHMEM_HOME=/usr/local "$EPKIT" install plan gcp-b200-ubuntu2404 --root m
    [[ "$output" == *"step 'nvshmem' would own /usr/local"* ]]
    run -2 env NVSHMEM_HOME=/opt/deepep "$EPKIT" install plan gcp-b200-ubuntu2404 --root m
    [[ "$output" == *"owns /opt/deepep and would delete "* ]]
    run -2 env NVSHMEM_HOME=/opt/nvshmem/ "$EPKIT" install plan gcp-b200-ubuntu2404 --root m
    [[ "$output" == *"must not end with /"* ]]
    [ -z "$(ls m)" ]
}

@test "values that would be code" {
    for value in 'a;reboot' '$(reboot)' '`reboot`' 'a b' "a'b" 'a"b' 'a|b' 'a>b' '-rf' '../x' 'a&b' '*'; do
        printf 'variables:\n  v: {kind: word, default: %s}\n%s\n%s\n' "$(jq -n --arg v "$value" '$v')" "$HEAD" "$STEP" >v
        if [ "$value" = '../x' ]; then continue; fi # a word, and no place takes words as paths
        refused 2 "the default of 'v' is refused" <v
        printf 'variables:\n  v: {kind: word, default: a}\n%s\n%s\n' "$HEAD" "$STEP" |
            refused 0 '--set v' --set "v=$value"
    done
    for value in '/a/../b' 'a' '/' '/a b' '/a$b' '//a' '/..' '/a/' '/a/.' '/.'; do
        printf 'variables:\n  v: {kind: path, default: %s}\n%s\n%s\n' "$(jq -n --arg v "$value" '$v')" "$HEAD" "$STEP" |
            refused 2 "the default of 'v' is refused"
    done
    printf 'versions: {v: "1;reboot"}\n%s\n%s\n' "$HEAD" "$STEP" | refused 1 "version 'v'"
    printf 'versions: {PATH: "1"}\n%s\n%s\n' "$HEAD" "$STEP" | refused 1 'is not a name'
    printf 'versions: {kernel: "1"}\n%s\n%s\n' "$HEAD" "$STEP" | refused 1 'is a name that epkit sets'
    printf '%s\n%s\n' "$HEAD" "${STEP/path: \/etc\/one/path: \/etc\/..\/..\/one}" | refused 9 "must not contain '..'"
    printf '%s\n%s\n    mode: "0644; reboot"\n' "$HEAD" "$STEP" | refused 11 "'mode'"
    printf '%s\n  - {id: a, type: apt, title: t, why: w, budget: 1s, packages: {"git;reboot": "1"}}\n' "$HEAD" |
        refused 4 'not a package name'
    printf '%s\n  - {id: a, type: command, title: t, why: w, budget: 1s, run: "echo @{kernel}", creates: [/a], undo: y}\n' "$HEAD" |
        refused 4 'is not replaced in text for a shell'
    printf '%s\n  - {id: "a;b", type: file, title: t, why: w, budget: 1s, path: /a, content: b}\n' "$HEAD" | refused 4 'id '
    printf 'recipe: bad\ntitle: "t\\nreboot"\nsteps: []\n' | refused 2 'one line'
    printf 'recipe: ../../etc\ntitle: t\nsteps: []\n' | refused 1 'name '
}

@test "bombs, anchors, tags, depth, size, bytes that are not text" {
    printf 'recipe: &a bad\ntitle: *a\nsteps: []\n' | refused 1 'anchors are not accepted'
    printf 'recipe: bad\ntitle: *a\nsteps: []\n' | refused 2 'liases'
    printf 'recipe: !!binary bad\n' | refused 1 'tags are not accepted'
    printf 'recipe: bad\ntitle: t\nsteps: %s\n' "$(printf '[%.0s' $(seq 5000))" | refused 3 'nested too deeply'
    { printf 'recipe: bad\ntitle: t\nsteps:\n'; yes '  - a' | head -9000; } | refused 8192 'too many'
    head -c 300000 /dev/zero | tr '\0' a | refused 1 'larger than'
    printf 'recipe: bad\ntitle: "a\\0b"\n' | refused 2 'NUL'
    printf 'recipe: bad\ntitle: \377\376\n' | refused 1 'UTF-8'
    printf 'recipe: bad\n\ttitle: x\n' | refused 2 'not valid YAML'
    printf 'recipe: a\ntitle: b\n---\nrecipe: b\n' | refused 3 'second document'
    printf '' | refused 1 'empty'
    printf -- '- a\n' | refused 1 'a recipe is a map'
    run -2 epkit install plan ./m
    [[ "$output" == *"recipe ./m: not a regular file"*"name a file in YAML, or a recipe of 'epkit install list'"* ]]
}

@test "reboots that are not allowed, and too many" {
    printf '%s\n%s\n    reboot: after\n' "$HEAD" "$STEP" | refused 11 "'reboots' of the recipe is 0"
    printf 'reboots: 1000\n%s\n%s\n' "$HEAD" "$STEP" | refused 1 "'reboots' must be"
    printf '%s\n%s\n    when: never\n' "$HEAD" "$STEP" | refused 11 "'when' must be"
}
