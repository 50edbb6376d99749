#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# epkit launch without hosts: a stand-in for ssh runs each command here. Wrong and unusual inputs; tests/hosts has sshd.
#
# shellcheck disable=SC2154,SC2016,SC2030,SC2031 # $stderr is set by run; programs of inner shells; a test is a subshell

# bats file_tags=once
load common

setup() {
    cd "$BATS_TEST_TMPDIR" || exit 1
    printf '#!/bin/sh\nfor last; do :; done\nexec sh -c "$last"\n' >ssh
    chmod +x ssh
    unset JOBSET_NAME LWS_LEADER_ADDRESS JOB_COMPLETION_INDEX SLURM_JOB_NODELIST
}

launch() {
    run --separate-stderr epkit launch --ssh "$PWD/ssh" --connect-timeout 60 --no-logs --checks skip "$@"
    echo "$* -> $status: $output $stderr"
}

# refused TEXT ARGUMENT...: before anything is started
refused() {
    local text=$1
    shift
    launch "$@"
    [ "$status" -eq 2 ]
    [ -z "$output" ]
    [[ "$stderr" == *"$text"* ]]
}

@test "invalid lists of hosts, variables and programs" {
    refused "is listed twice" --hosts a,root@A hostname
    refused "there is an empty name" --hosts a,,b hostname
    refused "is not a host" --hosts 'a,-oProxyCommand=x' hostname
    refused "a bracket is not closed" --hosts 'a[1-' hostname
    printf 'a\rb\rc\n' >hostfile
    refused "hostfile, line 1: a carriage return within the line" --hostfile hostfile hostname
    printf 'a slotss=8\n' >hostfile
    refused "'slotss=8' after the host is not a setting" --hostfile hostfile hostname
    refused "the name of the program is empty" --hosts a ''
    # As in a pod with a read-only root.
    run -1 --separate-stderr epkit launch --ssh "$PWD/nossh" --hosts a --out /proc/none hostname
    [[ "$stderr" == *"making the folder /proc/none"*"--no-logs leaves none"* ]]
    # srun would wait for an allocation of its own.
    unset SLURM_JOB_ID SLURM_JOBID
    refused "--connect srun: this is no Slurm job" --hosts a --connect srun hostname
    for name in RANK LOCAL_RANK WORLD_SIZE NNODES MASTER_ADDR MASTER_PORT GPUS_PER_NODE; do
        refused "--env $name: epkit sets it for each rank" --hosts a -x "$name=7" hostname
    done
    refused "'A B' is not a variable name" --hosts a -x 'A B=c-secret' hostname
    [[ "$stderr" != *c-secret* ]]
    refused "the variable is not set here" --hosts a -x EPKIT_NOT_SET hostname
    refused "is not a test of nccl-tests" --hosts a nccl ../../x
    refused "no hosts are given" hostname
    # DeepEP would end with an assertion, after the time of its start.
    for name in deepep-internode ib-write-bw; do
        refused "$name needs two nodes or more, and there is a alone" --hosts a "$name"
    done
    # hostname(1) would give that name to every node.
    refused "--hosts gives the nodes" --hosts a hostname b
    refused "--hosts gives the nodes" --hosts a hostname -- -F file
    refused "did you mean 'intranode'?" --hosts a epkit-test intrande
    EPKIT_SSH_PORT=22x refused "the variable EPKIT_SSH_PORT is '22x', not a port" --hosts a hostname
    export JOBSET_NAME=js NNODES=2 JOB_COMPLETION_INDEX=2
    refused "JOB_COMPLETION_INDEX is '2', not a number from 0 to 1" hostname
}

@test "workloads: files that are not scripts, Windows line ends and marks, missing interpreters" {
    printf '#!/bin/bash\r\necho hi\r\n' >crlf.sh
    refused "crlf.sh: its lines end in CR LF" --hosts a --workload crlf.sh
    printf 'echo hi\r\n' >crlf.sh
    refused "crlf.sh: its lines end in CR LF" --hosts a --workload crlf.sh
    mkfifo pipe
    refused "not a script" --hosts a --workload pipe
    printf '\xef\xbb\xbf#!/bin/bash\necho hi\n' >mark.sh
    refused "mark.sh: a byte order mark precedes its first line" --hosts a --workload mark.sh
    eval "$(sed -n "s/.*: \(sed -i .*\)/\1/p" <<<"$stderr")"
    [ "$(head -n 1 mark.sh)" = '#!/bin/bash' ]
    # A shell runs a script without '#!', and does not find its first command.
    printf '\xef\xbb\xbfecho hi\n' >mark.sh
    refused "mark.sh: a byte order mark precedes its first line" --hosts a --workload mark.sh
    : >empty
    refused "not a script" --hosts a --workload empty
    refused "not a script" --hosts a --workload /
    head -c 2000000 /dev/zero | tr '\0' a >big
    refused "not a script" --hosts a --workload big
    printf '\377\376\0' >binary
    refused "not a script" --hosts a --workload binary
    printf '#!/no/such/interpreter\n' >script
    launch --hosts a --workload script
    [ "$status" -eq 127 ]
    [[ "$output$stderr" == *"/workload: the interpreter in its first line does not exist"* ]]
    # Without a #! line it is a shell script.
    printf 'echo "rank $RANK of $WORLD_SIZE"\n' >script
    launch --hosts a,b --workload script
    [ "$status" -eq 0 ]
    [[ "$output" == *"b: rank 1 of 2"* ]]
}

@test "programs other than ssh; a value of several lines; output without a newline" {
    launch --ssh /bin/true --hosts a hostname
    [ "$status" -eq 1 ]
    [[ "$output" == *"a: answer: the connection ended without an answer from epkit"* ]]
    launch --ssh /nowhere/ssh --hosts a hostname
    [ "$status" -eq 1 ]
    [[ "$output" == *"/nowhere/ssh: No such file or directory"* ]]
    launch --hosts a -x "A=$(printf 'x\ny')" -- sh -c 'echo "[$A]"'
    [ "$status" -eq 0 ]
    [[ "$output" == *"a: [x"$'\n'"a: y]"* ]]
    launch --hosts a -- sh -c 'head -c 100000 /dev/zero | tr "\0" x'
    [ "$status" -eq 0 ]
    [ "$(tr -cd x <<<"$output" | wc -c)" -ge 100000 ]
}

@test "output of a node instead of epkit's is the reason, and each layer has its advice" {
    printf '#!/bin/sh\necho "Welcome"; echo "This account is currently not available."\nexit 1\n' >nologin
    printf '#!/bin/sh\nprintf "user@host password: " >&2\nexec sleep 100\n' >question
    chmod +x nologin question
    launch --ssh "$PWD/nologin" --hosts a,b nccl all_reduce
    [ "$status" -eq 1 ]
    [[ "${lines[0]}" == *"a: command: exit status 1; it wrote: This account is currently not available." ]]
    [ "$(grep -c "'ssh NODE epkit version' shows what happens there" <<<"$output")" -eq 1 ]
    run ! grep -q 'Nothing was recognised' <<<"$output"
    launch --ssh "$PWD/question" --connect-timeout 8 --hosts a hostname
    [ "$status" -eq 1 ]
    [[ "$output" == *"no answer within 8 s; it said: user@host password:"* ]]
    launch --hosts a deepep-interode
    [ "$status" -eq 127 ]
    [[ "$stderr" == *"did you mean the job 'deepep-internode'?"* ]]
    # The last line of a rank that fails, and only of it.
    launch --hosts a -- sh -c 'echo reason; exit 7'
    [ "$status" -eq 7 ]
    [[ "$output" == *"program failed on a first: exit status 7; its last line: reason"* ]]
}

@test "a host that ends the connection at the login, and an epkit that does not start there" {
    # after MESSAGE: ssh has reached the login, the host says this, and closes the connection
    after() {
        { echo '#!/bin/sh' && echo 'cat >&2 <<END' && printf '%s\n' 'debug1: Connecting to a [10.0.0.1] port 222.' \
            'debug1: Connection established.' 'debug1: Remote protocol version 2.0, remote software version OpenSSH_8.7' \
            'debug1: Offering public key: /root/.ssh/id_ed25519 ED25519' "$@" END && echo 'exit 255'; } >ends
        chmod +x ends
        launch --ssh "$PWD/ends" --hosts a hostname
        [ "$status" -eq 1 ]
    }
    local closed='Connection closed by 10.0.0.1 port 222' denied='Access denied by pam_slurm_adopt: you have no active jobs on this node'
    after "$denied" "$closed"
    [[ "$output" == *"a: authentication: $closed; before that: $denied"* ]]
    after "$closed"
    [[ "$output" == *"a: authentication: $closed"$'\n'* ]]
    after 'Authenticated to a ([10.0.0.1]:222) using "publickey".' 'debug1: Entering interactive session.' "$closed"
    [[ "$output" == *"a: command: $closed"* ]]
    # What the shell wrote is not why; nor are the warnings of ssh.
    after 'debug1: Entering interactive session.' 'bash: warning: setlocale: LC_ALL: cannot change locale' "$closed"
    [[ "$output" == *"a: command: $closed"$'\n'* ]]
    after "$denied" '** WARNING: connection is not using a post-quantum key exchange algorithm.' \
        '** This session may be vulnerable to "store now, decrypt later" attacks.' \
        '** The server may need to be upgraded. See https://openssh.com/pq.html' "$closed"
    [[ "$output" == *"a: authentication: $closed; before that: $denied"* ]]
    # A host that boots (pam_nologin) is tried again within --wait.
    printf '#!/bin/sh\necho >>tries; [ "$(wc -l <tries)" -gt 2 ] && exec ./ssh "$@"\nexec ./ends\n' >boots
    chmod +x boots
    launch --ssh "$PWD/boots" --wait 60 --hosts a hostname
    [ "$status" -eq 0 ]
    [ "$(wc -l <tries)" -eq 3 ]
    # Without epkit's view of the steps.
    printf '#!/bin/sh\necho "%s" >&2; exit 255\n' "$closed" >ends
    launch --ssh "$PWD/ends" --hosts a hostname
    [[ "$output" == *"a: TCP: $closed"* ]]
    for text in "/opt/epkit: /lib/libc.so.6: version \`GLIBC_2.38' not found (required by /opt/epkit)" \
        '/opt/epkit: error while loading shared libraries: libjansson.so.4: cannot open shared object file' \
        'sh: 1: /opt/epkit: Exec format error'; do
        printf '#!/bin/sh\ncat >&2 <<"END"\n%s\nEND\nexit 1\n' "$text" >ends
        launch --ssh "$PWD/ends" --hosts a hostname
        [[ "$output" == *"a: epkit: $text"*"or give its path: --remote-epkit FILE"* ]]
    done
}

@test "sourced scripts that end the shell; a workload that is not there" {
    for number in 0 3; do
        echo "exit $number" >ends
        launch --hosts a --source "$PWD/ends" true
        [[ "$output" == *"sourcing scripts failed: epkit: $PWD/ends ended the shell with status $number; if it calls exit, use return"* ]]
    done
    # Not only exit ends it; what the shell says of it comes first.
    echo 'echo "${NOT_SET:?name the partition}"' >ends
    launch --hosts a --source "$PWD/ends" true
    [[ "$output" == *"NOT_SET: name the partition; epkit: $PWD/ends ended the shell with status "*"; if it calls exit, use return"* ]]
    echo 'return 3' >ends
    launch --hosts a --source "$PWD/ends" true
    [[ "$output" == *"sourcing scripts failed: epkit: $PWD/ends ended with status 3"$'\n'* ]]
    echo 'export FROM=script' >ends
    launch --hosts a --source "$PWD/ends" -- sh -c 'echo $FROM'
    [[ "$output" == "a: script"* ]]
    refused "--workload missing: No such file or directory" --hosts a --workload missing
}

@test "inherited variables reach sourced scripts, and no command line" {
    mkdir bin
    printf '#!/bin/bash\nprintf "%%s\\n" "$@" >>%q/words\nexec /usr/bin/env "$@"\n' "$PWD" >bin/env
    chmod +x bin/env
    printf '%s\n' 'export SEEN=$HF_TOKEN; tr "\0" "\n" </proc/$$/cmdline >>words; tr "\0" "\n" </proc/$PPID/cmdline >>words' >script
    export JOBSET_NAME=js NNODES=1 JOB_COMPLETION_INDEX=0 HF_TOKEN=hush-hush PATH=$PWD/bin:$PATH
    launch --hostfiles no --source "$PWD/script" -- sh -c 'echo "seen $SEEN, $HF_TOKEN"'
    [ "$status" -eq 0 ]
    [[ "$output" == *"seen hush-hush, hush-hush"* ]]
    [ -s words ]
    run ! grep hush words
}

end_server() {
    [ -z "${SERVER:-}" ] || kill "$SERVER" 2>/dev/null || true
}

teardown() {
    end_server
}

# answers TEXT: $PORT is that of a server whose answer is TEXT; it reads nothing and closes if there is none
answers() {
    end_server
    rm -f port
    python3 -c 'import socket, sys
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
while True:
    with server.accept()[0] as end:
        asked = b""
        while sys.argv[1] and b"\r\n\r\n" not in asked:
            asked += end.recv(4096)
        end.sendall(sys.argv[1].encode())' "$1" >port 3>&- &
    SERVER=$!
    within 60 test -s port
    PORT=$(<port)
}

@test "a location that is not found has a reason" {
    launch --hosts a,b --location kubernetes true
    [[ "$stderr" == *"a: /etc/podinfo/labels cannot be read"* ]]
    for line in 'HTTP/1.0 200 OK' 'HTTP/1.0 200'; do
        answers "$line"$'\r\n\r\n\r\n'
        GCE_METADATA_HOST=127.0.0.1:$PORT launch --hosts a,b --location metadata true
            [[ "$stderr" == *"a: http://127.0.0.1:$PORT/"*": the answer is empty"* ]]
    done
    answers ''
    GCE_METADATA_HOST=127.0.0.1:$PORT launch --hosts a,b --location metadata true
    [[ "$stderr" == *"a: http://127.0.0.1:$PORT/"*": HTTP status missing"* ]]
    answers $'HTTP/1.0 200\r\n\r\n/a/b/c\r\n'
    GCE_METADATA_HOST=127.0.0.1:$PORT launch --hosts a,b --location metadata true
    [[ "$stderr" != *"not known"* ]]
}

@test "what NICs of EFA moved is recorded, from the counters of their driver" {
    mkdir -p sys/class/infiniband/rdmap0s6/ports/1/hw_counters
    unshare -rm mount --bind sys /sys || skip "no user and mount namespaces here"
    for counter in tx_bytes rx_bytes; do echo 1000 >"sys/class/infiniband/rdmap0s6/ports/1/hw_counters/$counter"; done
    unshare -rm sh -c 'mount --bind sys /sys && exec "$@"' sh "$EPKIT" launch --ssh "$PWD/ssh" --checks skip --out run \
        --hosts a -- sh -c 'echo 1007 >/sys/class/infiniband/rdmap0s6/ports/1/hw_counters/tx_bytes'
    [ "$(jq -c '.hosts[0].nics' run/testbed-logs/run.json)" = \
        '[{"device":"rdmap0s6","port":1,"tx_bytes":7,"rx_bytes":0}]' ]
}

@test "ib-write-bw measures each node against both neighbours, in two rounds" {
    printf '#!/bin/sh\necho measured "$@"\n' >ib_write_bw
    chmod +x ib_write_bw
    # pairs NODES: who connects to whom, as CLIENT-SERVER
    pairs() {
        launch -x "PATH=$PWD:$PATH" --hosts "$1" ib-write-bw mlx5_0 >&2
        grep -oE '^[a-d]: device mlx5_0 to [a-d]' <<<"$output" | sed 's/: .* /-/' | sort | xargs
    }
    [ "$(pairs a,b)" = "b-a" ]
    [ "$(pairs a,b,c)" = "b-a c-b" ]
    [ "$(pairs a,b,c,d)" = "a-d b-a c-b d-c" ]
    # Each round has its own ports.
    launch -x "PATH=$PWD:$PATH" --hosts a,b,c ib-write-bw mlx5_0
    [[ "$output" == *"b: measured -d mlx5_0 -i 1 -F -p 18516 -x 3 a"* ]]
    [[ "$output" == *"c: measured -d mlx5_0 -i 1 -F -p 19516 -x 3 b"* ]]
}

@test "two names of one host are reported" {
    launch --hosts a,b,c hostname
    [ "$status" -eq 0 ]
    [[ "$stderr" == *"a and b, ... are one host, $(uname -n): ranks of both share its GPUs and ports"* ]]
    launch --hosts a hostname
    [ -z "$stderr" ]
}

@test "the recorded command of a run can be repeated literally, and contains no secret" {
    local command
    export DB_PASSWORD=secret-1
    run -0 --separate-stderr epkit launch --ssh "$PWD/ssh" --connect-timeout 60 --checks skip --out run --hosts 'a b' --json \
        -x WANDB_KEY=secret-2 -x http_proxy=http://me:secret-3@proxy:3128 -x DB_PASSWORD -x A="it's" -- \
        sh -c 'echo "$A  $WANDB_KEY"' '' -x
    [[ "$stderr" == *"a: it's  secret-2"* ]]
    [ "$(jq -c .environment <<<"$output")" = \
        '{"WANDB_KEY":"(left out)","http_proxy":"(left out)","DB_PASSWORD":"(left out)","A":"it'"'"'s"}' ]
    command=$(jq -r .command <<<"$output")
    [[ "$command" == "epkit launch "* && "$command" != *secret-* ]]
    run ! grep -r secret- run/testbed-logs/run.json run/testbed-logs/coordinator.log
    # Variables whose values were left out must be set.
    export WANDB_KEY=secret-4 http_proxy=x
    cd "$(mktemp -d -p "$BATS_TEST_TMPDIR")"
    run -0 --separate-stderr bash -c "epkit() { '$EPKIT' \"\$@\"; }; $command"
    [[ "$stderr" == *"a: it's  secret-4"* ]]
    [ "$(jq -r .command <<<"$output")" = "$command" ]
}

@test "processes that clear their environment are ended with the others" {
    local seconds=$((1000000 + $$))
    launch --hosts a -- sh -c "env -i setsid sleep $seconds & env -i setsid sh -c 'setsid sleep $seconds' & sleep 0.2; exit 3"
    [ "$status" -eq 3 ]
    run ! pgrep -f "sleep $seconds"
}

@test "variables that mpirun set for the launching rank are not passed to its ranks, those of the user are" {
    unset "${!OMPI_@}" "${!PMI@}" # what the tests of mpirun are told
    export OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 PMIX_RANK=3 PMI_SIZE=4 OMPI_MCA_ess_base_jobid=7
    export OMPI_MCA_btl=tcp,self PMIX_MCA_gds=hash
    launch --hosts a -x PMI_FD=5 -- env
    [ "$status" -eq 0 ]
    [ "$(grep -oE '(OMPI_COMM|OMPI_MCA|PMI)[A-Z_a-z]*=.*' <<<"$output" | sort | tr '\n' ' ')" = \
        "OMPI_MCA_btl=tcp,self PMIX_MCA_gds=hash PMI_FD=5 " ]
}

@test "a reader that closes the output is reported once" {
    run -0 bash -c "'$EPKIT' launch --ssh '$PWD/ssh' --connect-timeout 60 --no-logs --checks skip --hosts a -- yes 2>errors | head -n 1"
    [ "$output" = "a: y" ]
    [ "$(grep -c 'the output cannot be written: Broken pipe' errors)" -eq 1 ]
}

@test "a run in the folder of an earlier one replaces it, and removes the logs of other nodes" {
    run -0 epkit launch --ssh "$PWD/ssh" --connect-timeout 60 --checks skip --out run --hosts a,b,c -- sh -c 'echo "Segmentation fault"'
    touch run/testbed-logs/mine.txt
    run -0 --separate-stderr epkit launch --ssh "$PWD/ssh" --connect-timeout 60 --checks skip --out run --hosts a -- \
        echo '[ 1/1] bf16 random, sync ... passed 1 ms'
    [[ "$stderr" == *"replacing the run of 20"*" in this folder"* ]]
    [ "$(cd run/testbed-logs && echo worker-* mine*)" = "worker-a.log mine.txt" ]
    run -0 epkit parse run
}

@test "a line whose end comes late is whole, also behind the end of its rank; what has no end yet is output" {
    launch --silent 3 --hosts a,b -- sh -c 'for i in 1 2 3 4; do printf .; sleep 0.9; done
        [ $RANK = 1 ] || { (printf "abc "; sleep 1; echo def) & exit; }; for i in 1 2 3 4; do printf .; sleep 0.9; done'
    [ "$status" -eq 0 ]
    grep -qxF 'a: ....abc def' <<<"$output"
    grep -qxF 'b: ........' <<<"$output"
    [[ "$stderr" != *'has written nothing'* ]]
}

@test "what a host had written of a line when it was lost is in the output" {
    # Each write is read before the next one, and told before the next one is read.
    cat >program <<'END'
import array, fcntl, os, termios, time
for text in b"a line\n[testing] ", b"case 7 ... ", b"x", b"y":
    os.write(1, text)
    left = array.array("i", [1])
    while left[0]:
        fcntl.ioctl(1, termios.FIONREAD, left)
pid, agent = os.getpid(), None
while pid > 1:
    agent = pid if b"__node" in open(f"/proc/{pid}/cmdline", "rb").read().split(b"\0") else agent
    pid = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
os.kill(agent, 9)
time.sleep(1000)
END
    launch --hosts a -- python3 "$PWD/program"
    [ "$status" -eq 1 ]
    [[ "$output" == *"a: a line"$'\n'"a: [testing] "* ]]
    [[ "$output$stderr" == *"the connection was lost"* ]]
}

@test "an agent that gets the request 'end' twice kills at once, also if the second request is split" {
    limited 15 python3 -S "$EPKIT_SOURCE/tests/cli/agent.py" "$EPKIT" behind
    limited 15 python3 -S "$EPKIT_SOURCE/tests/cli/agent.py" "$EPKIT" cut
}

# bats test_tags=both
@test "an agent without memory for the lines of its ranks says so, and leaves none of them" {
    [ -z "${EPKIT_SANITIZED-}" ] || skip "without memory AddressSanitizer ends a program itself"
    limited 15 python3 -S "$EPKIT_SOURCE/tests/cli/agent.py" "$EPKIT" memory
}

@test "a host that says that it has two billion GPUs is refused by name" {
    printf '%s\n' '#!/bin/sh' 'for command; do :; done' 'sh -c "$command" | sed -u '"'s/\"gpus\":[0-9]*/\"gpus\":2000000000/'" >liar
    chmod +x liar
    run -1 --separate-stderr epkit launch --ssh "$PWD/liar" --connect-timeout 60 --no-logs --checks skip --world ranks --hosts a hostname
    [[ "$stderr" == *"a says that it has 2000000000 GPUs, and at most 1024 are believed"* ]]
}
