#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# epkit install on a node with its own systemd: debian-tools really installs, the node really reboots and loses
# power. The numbers of kills and cuts are small unless EPKIT_TEST_LONG=1.

# shellcheck disable=SC2016 # for shells on the node

load node
load ../page

KILLS=3
CUTS=1
if [ -n "${EPKIT_TEST_LONG:-}" ]; then
    KILLS=20
    CUTS=5
fi

setup_file() {
    node_up
    if [ -e "$BATS_FILE_TMPDIR/skip" ]; then return 0; fi
    # Caches that any installation would create exist from the beginning.
    on ldconfig
    snapshot >"$BATS_FILE_TMPDIR/bare"
    on epkit install apply debian-tools >"$BATS_FILE_TMPDIR/apply" 2>&1
    snapshot >"$BATS_FILE_TMPDIR/applied"
}

teardown_file() {
    node_down
}

setup() {
    skip_without_node
}

# Kills epkit, and every other time its step as well: dpkg dies in the middle.
strike() {
    on sh -c 'for p in /proc/[0-9]*/exe; do case $(readlink "$p") in */opt/epkit/epkit)
        p=${p%/exe}; kill -9 "${p#/proc/}" ;; esac; done' || true
    if [ $((RANDOM % 2)) = 0 ]; then on systemctl kill --signal=KILL 'epkit-step:*' || true; fi
}

uninstall() {
    on epkit install uninstall debian-tools >"$BATS_TEST_TMPDIR/uninstall" 2>&1 || {
        cat "$BATS_TEST_TMPDIR/uninstall"
        return 1
    }
}

@test "apply installs, tests pass, and a second apply does nothing" {
    grep -q 'All steps are done, and 4 tests pass' "$BATS_FILE_TMPDIR/apply"
    run -0 on epkit install apply debian-tools
    [[ "${lines[0]}" == "Nothing to do"* ]]
    same "$BATS_FILE_TMPDIR/applied"
    run -0 on epkit install plan debian-tools
    run -0 on epkit install verify debian-tools
}

@test "steps run as systemd units, and no unit is left" {
    run on systemctl list-units --all --plain --no-legend 'epkit-*'
    [ -z "$output" ]
    [ ! -e "$ROOT/etc/systemd/system/epkit-install-debian-tools.service" ]
    grep -q '"event":"finished"' "$ROOT/var/lib/epkit/install/debian-tools/journal.jsonl"
}

@test "uninstall removes what apply added" {
    uninstall
    same "$BATS_FILE_TMPDIR/bare"
    [ ! -e "$ROOT/var/lib/epkit" ]
    [ -s "$ROOT/var/log/epkit/install/debian-tools/perftest.log" ]
}

@test "what was installed later and needs the recipe's packages: an uninstall refuses before it undoes anything" {
    on epkit install apply debian-tools
    on sh -c 'mkdir -p /tmp/late/DEBIAN && printf "Package: late\nVersion: 1\nArchitecture: all\nMaintainer: t\nDepends: perftest\nDescription: t\n" \
        >/tmp/late/DEBIAN/control && dpkg-deb --build /tmp/late /tmp/late.deb && dpkg -i /tmp/late.deb' >/dev/null 2>&1
    snapshot >"$BATS_TEST_TMPDIR/before"
    run -1 on epkit install uninstall debian-tools
    [[ "$output" == *"nothing was undone: late was installed later"*"apt-get remove late"* ]]
    same "$BATS_TEST_TMPDIR/before"
    on dpkg --purge late >/dev/null
    uninstall
    same "$BATS_FILE_TMPDIR/bare"
}

@test "another process holds dpkg's lock while steps run: they wait for it, and name it" {
    on perl -MFcntl -e 'open(F, "+<", "/var/lib/dpkg/lock-frontend") or die;
        my $lock = pack("s s x4 q q l x4", F_WRLCK, 0, 0, 0, 0);
        fcntl(F, F_SETLK, $lock) or die; sleep 25' 3>&- &
    holds() { [ -n "$(on sh -c 'grep ":$(stat -c %i /var/lib/dpkg/lock-frontend) " /proc/locks')" ]; }
    for _ in $(seq 100); do holds && break; sleep 0.1; done
    on epkit install apply debian-tools
    wait
    grep -qE 'locked by another process with pid|held by process [0-9]+ [(]perl[)]' "$ROOT"/var/log/epkit/install/debian-tools/*.log
    same "$BATS_FILE_TMPDIR/applied"
}

@test "an uninstall that was killed between removal and purge leaves no configuration files" {
    on epkit install apply debian-tools
    on dpkg --remove openmpi-bin >/dev/null 2>&1
    [ -d "$ROOT/etc/openmpi" ]
    uninstall
    same "$BATS_FILE_TMPDIR/bare"
}

@test "killed at random times, the result is the same" {
    local n=0
    while [ "$n" -lt "$KILLS" ]; do
        on epkit install apply debian-tools >/dev/null 2>&1 &
        random_pause 60
        strike
        wait || true
        n=$((n + 1))
        if on epkit install status debian-tools >/dev/null 2>&1; then
            finish debian-tools
            same "$BATS_FILE_TMPDIR/applied"
            uninstall
        fi
    done
    finish debian-tools
    same "$BATS_FILE_TMPDIR/applied"
    # An uninstall that was killed can be completed, too.
    for _ in 1 2; do
        on epkit install uninstall debian-tools >/dev/null 2>&1 &
        random_pause 30
        strike
        wait || true
    done
    if [ -e "$ROOT/var/lib/epkit/install/debian-tools" ]; then uninstall; fi
    same "$BATS_FILE_TMPDIR/bare"
}

@test "after power cuts at random times, it resumes by itself" {
    local n=0
    while [ "$n" -lt "$CUTS" ]; do
        on epkit install apply debian-tools >/dev/null 2>&1 &
        random_pause 80
        "$NODE" cut "$ROOT"
        wait || true
        "$NODE" boot "$ROOT"
        n=$((n + 1))
        if on epkit install status debian-tools >/dev/null 2>&1; then uninstall; fi
    done
    finish debian-tools
    same "$BATS_FILE_TMPDIR/applied"
    uninstall
    same "$BATS_FILE_TMPDIR/bare"
}

# As another user of the node: in each folder that all may write to, a link to a file of root for every name that root
# has used there, as soon as it is free.
plant() {
    on setpriv --reuid 54321 --regid 54321 --clear-groups perl -e '
        chomp(my $host = qx(uname -n));
        my %names = map { $_ => 1 } qw(epkit epkit-install epkit-install.lock reboot-required epkit-launch-AAAAAA),
            "ompi.$host.0"; # of mpirun, which a test of the recipe runs
        for (;;) {
            for my $dir (qw(/tmp /var/tmp /dev/shm /run/lock)) {
                opendir(my $in, $dir) or next;
                $names{$_} = 1 for grep { !/^\.\.?$/ } readdir $in;
                symlink "/root/victim/file", "$dir/$_" for keys %names;
            }
            select(undef, undef, undef, 0.002);
        }' 3>&- 4>&- &
}

@test "dpkg was killed between a configuration file and its record: the record is made" {
    on epkit install apply debian-tools >/dev/null 2>&1
    on perl -0pi -e 's/(Package: rdma-core\nStatus: install ok )installed/${1}half-configured/;
        s/(modules.infiniband.conf) [0-9a-f]{32}/$1 newconffile/' /var/lib/dpkg/status
    on epkit install apply debian-tools >/dev/null 2>&1
    same "$BATS_FILE_TMPDIR/applied"
    uninstall
    same "$BATS_FILE_TMPDIR/bare"
}

@test "another user plants links in all folders that are open, umask 0, a power cut: nothing of root's changes" {
    on sh -c 'mkdir -p /root/victim && echo precious >/root/victim/file'
    for _ in 1 2; do
        plant
        on sh -c 'umask 0; epkit install apply debian-tools' >/dev/null 2>&1 &
        random_pause 80
        "$NODE" cut "$ROOT"
        wait || true
        "$NODE" boot "$ROOT"
        plant
        finish debian-tools
        on sh -c '[ -L "/tmp/ompi.$(uname -n).0" ]'
        on epkit install verify debian-tools
        same "$BATS_FILE_TMPDIR/applied"
        [ -z "$(find "$ROOT"/var/lib/epkit "$ROOT"/var/log/epkit "$ROOT"/etc/systemd/system -perm /022 ! -type l)" ]
        on sh -c 'umask 0; epkit install uninstall debian-tools' >/dev/null 2>&1
        same "$BATS_FILE_TMPDIR/bare"
        on pkill --uid 54321 || on sh -c 'for p in /proc/[0-9]*; do [ "$(stat -c %u "$p")" != 54321 ] || kill -9 "${p#/proc/}"; done' || true
    done
    on find /tmp /var/tmp /dev/shm /run/lock -maxdepth 1 -user 54321 -delete
    [ "$(cd "$ROOT/root/victim" && cat ./* && find . -printf '%P:%m:%U ')" = "precious"$'\n'":755:0 file:644:0 " ]
}

@test "a journal that is deleted, truncated or corrupted midway is rebuilt" {
    local journal="$ROOT/var/lib/epkit/install/debian-tools/journal.jsonl"
    for damage in 'rm -f "$1"' 'truncate -s -7 "$1"' 'echo rubbish >"$1"; echo more >>"$1"'; do
        on epkit install apply debian-tools >/dev/null 2>&1 &
        for _ in $(seq 200); do
            if grep -qs '"event":"end"' "$journal"; then break; fi
            sleep 0.1
        done
        strike
        wait || true
        sh -c "$damage" - "$journal"
        finish debian-tools
        same "$BATS_FILE_TMPDIR/applied"
        uninstall
        same "$BATS_FILE_TMPDIR/bare"
    done
}

@test "a wrong version that was installed before is replaced, and stays, as uninstall reports" {
    on sh -c 'apt-get -q update && apt-get -qy install --no-install-recommends perftest=0.9-1 libfabric1=0.9-1'
    run -3 on epkit install plan debian-tools
    [[ "$output" == *"perftest 0.9-1 is installed"* ]]
    on epkit install apply debian-tools >"$BATS_TEST_TMPDIR/out" 2>&1
    run on dpkg-query -W perftest libfabric1 libfabric-bin
    [[ "$output" != *0.9-1* ]]
    uninstall
    grep -q '^  left     package perftest stays at 4.5.*; it was 0.9-1 before' "$BATS_TEST_TMPDIR/uninstall"
    on dpkg-query -W perftest libfabric1
    [ ! -e "$ROOT/usr/bin/fi_info" ] # of libfabric-bin, which the recipe added
    on sh -c 'apt-get -qy purge --autoremove perftest libfabric1' >/dev/null 2>&1
}

@test "a held package of another version is shown by the plan, and not replaced" {
    on sh -c 'apt-get -q update && apt-get -qy install --no-install-recommends perftest=0.9-1 && apt-mark hold perftest'
    run on epkit install plan debian-tools
    [[ "$output" == *"perftest 0.9-1 is installed and held, expected 4.5"* ]]
    run -1 on epkit install apply debian-tools
    [[ "$output" == *"step 'perftest' failed"*"Held packages were changed"* ]]
    uninstall
    on sh -c 'apt-mark unhold perftest; apt-get -qy purge --autoremove perftest' >/dev/null 2>&1
    rm -rf "$ROOT"/var/lib/apt/lists/* "$ROOT"/var/cache/apt/*.bin
}

@test "a foreign package that cannot be configured is named by the step whose dpkg fails because of it" {
    on sh -ec 'mkdir -p /root/bad/DEBIAN
        printf "Package: bad\nVersion: 1\nArchitecture: all\nMaintainer: t\nDescription: t\n" >/root/bad/DEBIAN/control
        printf "#!/bin/sh\nexit 1\n" >/root/bad/DEBIAN/postinst
        chmod 755 /root/bad/DEBIAN/postinst
        dpkg-deb -b /root/bad /root/bad.deb'
    run on dpkg -i /root/bad.deb
    [ "$status" -ne 0 ]
    run -1 on epkit install apply debian-tools
    [[ "$output" == *"step 'rdma-core' failed (apply, "*"dpkg: error processing package bad (--configure)"* ]]
    on dpkg --purge bad
    on epkit install resume debian-tools
    uninstall
}

@test "configuration files of a package that had been removed before, and not purged, are unchanged" {
    local file="$ROOT/etc/openmpi/openmpi-mca-params.conf"
    on sh -c 'apt-get -q update && apt-get -qy install --no-install-recommends openmpi-bin'
    echo '# of the site' >>"$file"
    on sh -c 'apt-get -qy autoremove openmpi-bin' >/dev/null 2>&1
    on epkit install apply debian-tools >/dev/null 2>&1
    grep -q '# of the site' "$file"
    uninstall
    grep -q '# of the site' "$file"
    run on dpkg-query -W -f='${db:Status-Abbrev} ' openmpi-bin
    [ "$output" = 'rc  ' ]
    on sh -c 'apt-get -qy purge --autoremove openmpi-bin' >/dev/null 2>&1
    rm -rf "$ROOT"/var/lib/apt/lists/* "$ROOT"/var/cache/apt/*.bin
}

@test "the quickstart's block for a VM: a step that needs a reboot makes one, and the installation resumes by itself" {
    local boots typed command
    boots=$("$NODE" boots "$ROOT")
    # epkit is there already, and this recipe stands in for one with a driver.
    mapfile -t typed < <(page_commands 'VM, Slurm' | sed '/^scripts.dist.sh/d; s|gcp-b200-ubuntu2404|/root/recipes/reboot.yaml|')
    [ "${#typed[@]}" -eq 4 ]
    on bash -c "${typed[0]}"
    run -3 on bash -c "${typed[1]}"
    [[ "${lines[0]}" == *"3 of 3 steps of recipe test-reboot are to be applied, about "*min* ]]
    on bash -c "${typed[2]}" >"$BATS_TEST_TMPDIR/out" 2>&1 || true
    grep -q 'Rebooting the node to load driver and modules...' "$BATS_TEST_TMPDIR/out"
    for _ in $(seq 600); do
        if [ -e "$ROOT/etc/epkit-test-behind" ]; then break; fi
        sleep 0.2
    done
    "$NODE" boot_wait "$ROOT"
    finish test-reboot
    [ "$("$NODE" boots "$ROOT")" -eq $((boots + 1)) ]
    run -0 on bash -c "${typed[3]}"
    [ "$(grep -c ' done ' <<<"$output")" -eq 3 ]
    page_row VM '3. Verify'
    run -0 on bash -c "${command/gcp-b200-ubuntu2404/test-reboot}"
    [[ "$output" == *"behind the reboot" ]]
    run -0 on epkit install apply /root/recipes/reboot.yaml
    page_row 'VM, Slurm' '7. Clean up'
    on bash -c "${command/gcp-b200-ubuntu2404/test-reboot}"
    [ ! -e "$ROOT/etc/epkit-test-before" ]
    [ ! -e "$ROOT/etc/epkit-test-boot" ]
    [ ! -e "$ROOT/etc/epkit-test-behind" ]
}

@test "the quickstart where driver and DeepEP are there already: epkit-only, and its script" {
    snapshot >"$BATS_TEST_TMPDIR/before"
    on epkit install apply epkit-only
    on sh -c '. /opt/epkit/env.sh'
    on epkit install uninstall epkit-only
    [ ! -e "$ROOT/opt/epkit/env.sh" ]
    same "$BATS_TEST_TMPDIR/before"
}

@test "reboots that have no effect stop at the limit of the recipe" {
    local boots
    boots=$("$NODE" boots "$ROOT")
    on epkit install apply /root/recipes/loop.yaml >"$BATS_TEST_TMPDIR/out" 2>&1 || true
    for _ in $(seq 900); do
        if grep -qs '"event":"stopped"' "$ROOT/var/lib/epkit/install/test-loop/journal.jsonl"; then break; fi
        sleep 0.2
    done
    "$NODE" boot_wait "$ROOT"
    [ "$("$NODE" boots "$ROOT")" -eq $((boots + 2)) ]
    [ ! -e "$ROOT/etc/systemd/system/epkit-install-test-loop.service" ]
    run -1 on epkit install apply /root/recipes/loop.yaml
    [[ "$output" == *"stopped after 2 reboots: step 'option'"* ]]
    [ "$("$NODE" boots "$ROOT")" -eq $((boots + 2)) ]
    run -3 on epkit install status test-loop
    on epkit install uninstall test-loop
}
