#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# programs.sh path|build|have - the programs of the test cluster: Kubernetes, JobSet, Kueue, LeaderWorkerSet, kwok, helm,
# CoreDNS, and the charts of JobSet, Kueue and LeaderWorkerSet. All come from the Go modules that programs/go.mod pins.
#
#   path    the folder for the pinned versions: bin/ and charts/ below it. It need not exist yet
#   have    exit code 0 when the folder is complete
#   build   build what is missing: about 20 minutes of one processor when Go's cache is cold, nothing when it is there
#
# The name of the folder is a hash of all that goes in, so a build is never of other versions than the tree asks for.
# EPKIT_CLUSTER_CACHE names the folder above it (default: ~/.cache/epkit-tests).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
hash=$(cat "$here/programs/go.mod" "$here/programs/go.sum" "$here/programs/dns/main.go" | sha256sum)
out="${EPKIT_CLUSTER_CACHE:-$HOME/.cache/epkit-tests}/cluster-${hash:0:16}"

# program, package. helm comes first, since most tests of the chart need it alone.
packages() {
    cat <<'END'
helm                     helm.sh/helm/v3/cmd/helm
kube-apiserver           k8s.io/kubernetes/cmd/kube-apiserver
kube-controller-manager  k8s.io/kubernetes/cmd/kube-controller-manager
kube-scheduler           k8s.io/kubernetes/cmd/kube-scheduler
kubectl                  k8s.io/kubernetes/cmd/kubectl
kwok                     sigs.k8s.io/kwok/cmd/kwok
jobset                   sigs.k8s.io/jobset
kueue                    sigs.k8s.io/kueue/cmd/kueue
lws                      sigs.k8s.io/lws/cmd
kubelet                  k8s.io/kubernetes/cmd/kubelet
coredns                  ./dns
END
}

# chart, module, folder inside the module
charts() {
    cat <<'END'
jobset  sigs.k8s.io/jobset  charts/jobset
kueue   sigs.k8s.io/kueue   charts/kueue
lws     sigs.k8s.io/lws     charts/lws
END
}

build() {
    mkdir -p "$out/bin" "$out/charts"
    exec 9>"$out/lock"
    flock 9 # a second build waits for the first one, and then finds everything
    cd "$here/programs"
    export CGO_ENABLED=0 GOFLAGS='-mod=readonly -trimpath -buildvcs=false' GOMAXPROCS="${GOMAXPROCS:-1}"
    local version flags name package module folder source
    version=$(go list -m -f '{{.Version}}' k8s.io/kubernetes)
    flags="-s -w -X k8s.io/component-base/version.gitVersion=$version -X k8s.io/component-base/version.gitMajor=1"
    flags="$flags -X k8s.io/component-base/version.gitMinor=$(echo "$version" | cut -d. -f2)"
    while read -r name package; do
        [ ! -x "$out/bin/$name" ] || continue
        echo "programs.sh: building $name" >&2
        go build -p 1 -ldflags "$flags" -o "$out/bin/.$name" "$package"
        mv "$out/bin/.$name" "$out/bin/$name"
    done < <(packages)
    while read -r name module folder; do
        [ ! -d "$out/charts/$name" ] || continue
        source=$(go list -m -f '{{.Dir}}' "$module")
        cp -r "$source/$folder" "$out/charts/.$name"
        chmod -R u+w "$out/charts/.$name"
        mv "$out/charts/.$name" "$out/charts/$name"
    done < <(charts)
    : >"$out/complete"
}

case "${1:-}" in
path) printf '%s\n' "$out" ;;
have) [ -e "$out/complete" ] ;;
build) [ -e "$out/complete" ] || build ;;
*)
    echo "usage: programs.sh path|build|have" >&2
    exit 2
    ;;
esac
