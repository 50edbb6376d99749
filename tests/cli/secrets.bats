#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Secrets in arguments and variables, in every form of secrets.py, are in no file that epkit writes.
#
# shellcheck disable=SC2154,SC2016,SC2054 # $stderr is set by run; programs of inner shells; commas in values

load common

setup() {
    cd "$BATS_TEST_TMPDIR" || exit 1
    unset JOBSET_NAME LWS_LEADER_ADDRESS JOB_COMPLETION_INDEX SLURM_JOB_NODELIST
    mapfile -t words < <(secrets words)
}

secrets() {
    python3 -S "$EPKIT_SOURCE/tests/cli/secrets.py" "$@"
}

# ran ARGUMENT...: a run on one host here, in the folder run; its output and its document
ran() {
    printf '#!/bin/sh\nfor last; do :; done\nexec sh -c "$last"\n' >ssh
    chmod +x ssh
    epkit launch --hosts localhost --ssh "$PWD/ssh" --connect-timeout 60 --checks skip --out run --json "$@" >launch.json 2>said
}

@test "launch and report: run.json, coordinator.log, report.json, report.html, history, documents" {
    env=()
    for i in "${!words[@]}"; do env+=(-x "VALUE_$i=${words[$i]}"); done
    ran "${env[@]:0:60}" -x EPKIT_SECRET=/pw/split -- true "${words[@]}" --password 'pw split' -p "${words[0]}" /usr/bin/mysql -u root -ppw-split db \
        sshpass -p 'pw split' ssh h docker login -p pw-split h curl -ume:pw-split x --hf-token pw-split1 -passin pass:pw-split \
        vault login pw-split1 smbclient -U me%pw-split1 //h/s net use Z: '\\h\s' pw-split1 plink -pw pw-split1 rabbitmqctl add_user me pw-split1 \
        mpiexec -genv HF_TOKEN pw-split npm config set //r/:_authToken pw-split curl -sSLu me:pw-split x vault login pw-split
    epkit report run --history history --json >report.json || [ $? -eq 4 ]
    secrets find launch.json said run/testbed-logs/* run/report.* history report.json
    run ! grep -rE 'pw[ -/]split' launch.json run report.json
    # The forms stay recognisable.
    jq -e '.argv | index("--password=(left out)") and index("DB_PASSWORD=(left out)")' run/testbed-logs/run.json
    valid launch launch.json
    valid report report.json
}

@test "launch --keep-value: the value of a variable stays" {
    word=${words[0]}
    ran -x "HF_TOKEN=$word" -x "OTHER_TOKEN=$word" --keep-value HF_TOKEN -- true "$word"
    epkit report run --json >report.json || [ $? -eq 4 ]
    for file in run/testbed-logs/run.json report.json run/report.json launch.json; do
        [ "$(jq -r '.environment.HF_TOKEN, .environment.OTHER_TOKEN' "$file")" = "$word"$'\n(left out)' ]
    done
    [[ "$(jq -r .command run/testbed-logs/run.json)" == *"--env HF_TOKEN=$word --env OTHER_TOKEN "* ]]
    jq -e '.argv | index("(left out)")' run/testbed-logs/run.json
    valid report report.json
}

@test "what is printed: verdicts, tables, errors and hints; snapshots and documents with variables of the machine" {
    printf '#!/bin/sh\nfor last; do :; done\nexec sh -c "$last"\n' >ssh
    chmod +x ssh
    for i in "${!words[@]}"; do
        [ $((i % 12)) -eq 0 ] || [ -n "${EPKIT_TEST_LONG-}" ] || continue
        word=${words[$i]}
        # The last line of the program is the program's, in its log and as it comes.
        epkit launch --hosts localhost --ssh "$PWD/ssh" --checks skip --out run -- sh -c 'printf "%s\n" "$1"; exit 1' x "$word" >said 2>&1 ||
            [ $? -eq 1 ]
        {
            grep -v '^localhost: ' said
            cat run/testbed-logs/coordinator.log
            epkit triangulate --hosts a,b --run "true {hosts} # $word" || [ $? -eq 3 ]
            EPKIT_BACKEND=$word epkit env --check || [ $? -ge 3 ]
            EPKIT_BACKEND=$word epkit test intranode || [ $? -eq 2 ]
            epkit parse -- "$word" || [ $? -eq 2 ]
            NCCL_X=$word NVSHMEM_HCA_LIST=$word epkit doctor --json || [ $? -ge 3 ]
            NCCL_X=$word NVSHMEM_HCA_LIST=$word epkit topo --save machine || [ $? -eq 4 ]
            cat machine
        } >>all 2>&1
    done
    [ "$(grep -c 'left out' all)" -gt 50 ]
    secrets find all
}

@test "a foreign run folder, a saved cluster, documents about logs" {
    mkdir run
    printf '%s\n' "${words[@]}" | jq -nR '[inputs] as $w | {schema_version: 1, job: "program", argv: $w, command: ($w | join(" ; ")),
        exit_code: 1, reason: "program", environment: ([range($w | length) as $i | {("V\($i)"): $w[$i]}] | add),
        hosts: ($w | map({name: "h", exit_code: 1, why: .})), findings: ($w | map({id: "x", severity: "serious", text: ("see " + .), nodes: ["h"]}))}' >run/run.json
    printf "%s\n" "${words[@]}" >run/coordinator.log
    epkit report run --json >report.json || [ $? -eq 1 ]
    secrets find report.json run/report.json run/report.html
    printf '%s\n' "${words[@]}" | jq -nR '[inputs] as $w | {items: [{metadata: {name: "p", namespace: "ns"},
        spec: {containers: [{name: "c", args: $w, env: [range($w | length) as $i | {name: "V\($i)", value: $w[$i]}]}]}}]}' >pods.json
    printf '%s\n' '#!/bin/sh' 'case "$*" in' '*version*) echo "{\"serverVersion\": {\"gitVersion\": \"v1.34.1\"}}" ;;' \
        '*pods*) cat pods.json ;;' '*/apis*) echo "{\"groups\": []}" ;;' "*) echo '{\"items\": []}' ;;" 'esac' >kube
    chmod +x kube
    epkit deploy check --gpus 8 --kubectl ./kube --save saved.json >/dev/null || [ $? -eq 3 ]
    secrets find saved.json
    jq -e --argjson n "${#words[@]}" '.items.pods[0].spec.containers[0].args | length == $n' saved.json
}

@test "no false alarms: variables of NCCL, NVSHMEM and epkit, paths, names, commits, digests" {
    plain=(NCCL_IB_HCA=mlx5_0:1 NCCL_SOCKET_IFNAME=^lo,docker0 NCCL_IB_PKEY=0x8001 NVSHMEM_HCA_PE_MAPPING=mlx5_0:1:1 EPKIT_TOKENS=4096
        NUM_TOKENS=4096 MAX_TOKEN=4096 TOKENIZERS_PARALLELISM=false EPKIT_PRELOAD=/usr/lib/libnccl.so EPKIT_SSH=/usr/bin/ssh USE_AUTH_TOKEN=true DEEP_EP_BYTES_PER_TOKEN=7168
        LD_LIBRARY_PATH=/usr/local/cuda-12.8/lib64:/opt/nvshmem/lib "IMAGE=nvcr.io/nvidia/nemo:25.11@sha256:$(printf x | sha256sum | cut -d' ' -f1)"
        "COMMIT=$(printf x | sha1sum | cut -d' ' -f1)" JOB=0b5c6e2a-93f1-4d3c-8a55-7d1f9f2f3c11 "URL=https://me@host.example:8080/a/b?c=d"
        NODE=sk-pool-a-worker AUTHOR=someone TOKEN_DISPATCHER=alltoall DATA_KEY=text AUTHORITY_MODE=strict
        KERNEL=_ZN7cutlass13device_kernelIN7deep_ep9Sm90Fp8E4M3ILi128ELi64EEEEvT_ CALL=nvmlDeviceGetNvLinkRemotePciInfo_v2
        MODEL=Qwen3-235B-A22B-Instruct-2507-FP8 RUN=DeepEP-H100x8-FP8-B200x4-Run12-Abl3)
    env=()
    for word in "${plain[@]}"; do env+=(-x "$word"); done
    ran "${env[@]}" -- true --tokens 4096 --num-tokens=128 --hidden 7168 task-0b5c6e2a-93f1 'token: see the manual' \
        /home/user/sk-project/checkpoints/step-1000 monkey=1 --moe-token-dispatcher-type flex --moe-token-drop-policy position \
        data.prompt_key=prompt --sort-key loss --pad-token '<pad>' eos_token=end --private-network 10.0.0.0/8 --magic-number=0x1234 \
        --user root:root --user nobody:nogroup -u 1000:users 'secrets: [{name: x}]' 'tokens per second: 12345.6' --tokenizer llama \
        --max-tokens 8 'num_tokens: 4096' '"use_auth_token": true, x' 'token = get_token()' --ssh-key /root/.ssh/id_rsa \
        --private-key=/etc/tls/server.key 'mysql -h x -p' 'redis-cli -p 6379' 'docker run -p 8080:80' 'ssh login -p 22222' \
        login -p 2222 mkdir -p /data 'secret "hf-token-1" not found' SECRET_NAME=regcred 'if token == expected:' \
        'token throughput : 12.3M' '{"name":"NUM_TOKENS","value":"4096"}' 'TOKEN=$HF_TOKEN' 'set token limits' \
        'vault login failed' 'net use is low' 'cat <<< text' 'echo done | sudo tee /x' 'echo $PASS | sudo -S true' 'echo 1 | tee x; sudo -S' \
        vault login -method=oidc net use 'echo "$TOKEN" | docker login --password-stdin' 'http -a x' htpasswd -c f me \
        'rabbitmqctl list_users now' 'curl -b jar h' '//host/share' PWD=/home/me '["pad_token", "eos_token"]' 'ls -sl. x' save-as-checkpoint \
        mlx5_0:1@node1 nemo:25a11-py3@sha256:0123456789abcdef pod:gpu-001a@cluster mgs01@tcp:mgs02a@tcp:/fs cuda@12.4:12.8 '12:30:45.123456@n.x' \
        'password is incorrect' 'Loading token ...... ok' 'num_tokens ............ 4096' 'pad_token ....... im_end2' data.salt_length=12 \
        'aws ssm put-parameter --type String --value vpc-12345' 'pulumi config set region us-east-1' 'session key: see below' 'sort key: loss2' \
        --token-mixer=attn token=12.5 sk-learn-pipelines-version-1x -u 1000:1000 http://proxy:3128/a@b "$(printf x | sha256sum | cut -d' ' -f1)"
    run ! grep -rF '(left out)' launch.json run
}
