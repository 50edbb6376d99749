#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Downloads of 'epkit install' from a server that misbehaves: retried while that may help, never accepted in place of the
# right file, and the error names the file and the reason.

load common
load install

setup() {
    [ "$(id -u)" -eq 0 ] || skip 'a build of this machine needs root'
    [ -x /usr/lib/apt/apt-helper ] || skip 'there is no apt here'
    cd "$BATS_TEST_TMPDIR" || exit 1
    mkdir source
    seq 20000 >source/tool
    tar -czf source.tar.gz source
    python3 -S "$EPKIT_SOURCE/tests/cli/serve.py" source.tar.gz >port 3>&- &
    echo $! >server
    within 20 test -s port
    url=http://127.0.0.1:$(cat port)
}

teardown() {
    [ ! -s server ] || kill "$(cat server)"
    rm -rf /var/log/epkit/install/download-*
    rmdir /var/log/epkit/install /var/log/epkit 2>/dev/null || true
}

# apply NAME URL [DEADLINE]: in a folder of its own; its exit status and what it said are in NAME.status and NAME.out
apply() {
    cat >"$1.yaml" <<END
recipe: download-$1
title: a download
steps:
  - {id: one, type: build, title: t, why: w, budget: 9s, deadline: ${3:-10m}, url: "$2", sha256: $(sha256sum source.tar.gz | cut -d' ' -f1),
     script: "mkdir -p $PWD/$1.made && cp tool $PWD/$1.made", provides: [$PWD/$1.made/tool], owns: [$PWD/$1.made]}
END
    # Without a proxy: the server runs on this machine.
    env -u http_proxy -u https_proxy "${WITHOUT_SYSTEMD[@]}" timeout 1200 "$EPKIT" install apply "./$1.yaml" --state "$PWD/$1.state" >"$1.out" 2>&1 3>&- || echo $? >"$1.status"
}

# In the background.
start() {
    apply "$@" 3>&- &
    started+=($!)
}

# refused NAME TEXT: it failed, says so, and nothing was made
refused() {
    cat "$1.out"
    [ "$(cat "$1.status")" = 1 ]
    grep -q "error: step 'one' .*$2" "$1.out"
    [ ! -e "$1.made" ]
}

@test "a download that ends in the middle, or is refused for a while, is tried again" {
    start good "$url/good"
    start cut "$url/cut-5"
    start error "$url/error-2"
    wait "${started[@]}"
    for name in good cut error; do
        cat $name.out
        [ ! -e $name.status ]
        cmp source/tool $name.made/tool
    done
    grep -q "download failed, attempt 2 of 5; again in 4 s" error.out
}

@test "a missing or wrong download is named with its reason, and changes nothing" {
    start absent "$url/absent"
    start half "$url/half"
    start open "$url/open"
    start loop "$url/loop"
    start name "http://no-such-host.invalid/x"
    start mute "$url/mute" 60s
    wait "${started[@]}"
    refused absent "$url/absent .*404"
    refused half "$url/half .*Hash Sum mismatch"
    refused open "$url/open .*Hash Sum mismatch"
    refused loop "$url/loop .*edirection loop encountered"
    refused name "no-such-host.invalid"
    refused mute "stopped at its deadline of 60 s (download).* $url/mute"
}
