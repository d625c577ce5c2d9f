#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Builds the real programs of Kubernetes, etcd, CoreDNS and Helm from their Go modules, into a cache folder outside this
# repository.
# Existing programs are kept: kube-proxy and kube-apiserver take 10 to 40 minutes. Needs Go 1.26 or newer.
#   PYEBPF_PROXY_CACHE   the folder; default /var/cache/pyebpf-proxy
#   tests/cluster/build.sh               kube-proxy and kube-apiserver, for make test-cluster
#   tests/cluster/build.sh PROGRAM...    these (the names are below)
#   tests/cluster/build.sh kube-apiserver-1.33   the API server of another release (kubernetes/1.33/go.mod pins it)
#   tests/cluster/build.sh plan          what test_plan.py asks
#   tests/cluster/build.sh gates         writes pyebpf_proxy/config/gate_table.py instead
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

release=v1.36.3
folder=${PYEBPF_PROXY_CACHE:-/var/cache/pyebpf-proxy}/go

# stamp RELEASE: the linker's flags for a program of Kubernetes, which then says that it is of this release.
stamp() {
    local minor=${1#v1.} version="-X k8s.io/component-base/version"
    echo "-s -w $version.gitVersion=$1 $version.gitMajor=1 $version.gitMinor=${minor%%.*}"
}
flags=$(stamp "$release")

# build PACKAGE PROGRAM [MODULE [COMMAND...]]: MODULE is the folder with the go.mod that pins the versions. cgo=1: the
# program has parts in C.
build() {
    local package=$1 program=$2 module=${3:-$here/kubernetes}
    shift $(($# < 3 ? $# : 3))
    [ $# -gt 0 ] || set -- go build
    command -v go >/dev/null || { echo "go is missing: install Go 1.26 or newer to build $(basename "$program")" >&2; exit 1; }
    mkdir -p "$folder"
    # Built elsewhere and moved, so that an interrupted build leaves no incomplete program.
    (cd "$module" && CGO_ENABLED="${cgo:-0}" nice -n 10 "$@" -p 1 -o "$program.$$" -ldflags "$flags" "$package")
    mv "$program.$$" "$program"
}

# cilium PACKAGE [OPTION...]: a program of Cilium, which then says that it is of the version that the go.mod pins.
cilium() {
    local package=github.com/cilium/cilium/$1 pinned=$here/../e2e/cilium version
    shift
    version=$(sed -n 's/^require github.com.cilium.cilium v//p' "$pinned/go.mod")
    flags="-s -w -X github.com/cilium/cilium/pkg/version.ciliumVersion=$version" \
        build "$package" "$folder/$program" "$pinned" go build "$@"
}

if [ "${1:-}" = gates ]; then
    build ./gates "$folder/gates"
    table=$here/../../pyebpf_proxy/config/gate_table.py
    "$folder/gates" | python3 "$here/kubernetes/gates.py" "$release" >"$table.$$"
    mv "$table.$$" "$table"
    exit
fi
[ $# -gt 0 ] || set -- kube-proxy kube-apiserver
for program; do
    if [ -x "$folder/$program" ]; then
        echo "$folder/$program is there"
        continue
    fi
    echo "building $folder/$program"
    case $program in
    kube-apiserver-1.*)
        other=$here/kubernetes/${program##*-}
        [ -d "$other" ] || { echo "$0: $other is missing: no release of ${program##*-} is pinned" >&2; exit 2; }
        flags=$(stamp "$(sed -n 's/^require k8s.io.kubernetes //p' "$other/go.mod")") \
            build k8s.io/kubernetes/cmd/kube-apiserver "$folder/$program" "$other"
        ;;
    kube-router) build github.com/cloudnativelabs/kube-router/v2/cmd/kube-router "$folder/$program" "$here/../e2e/kube-router" ;;
    kube-*|kubelet|kubectl) build "k8s.io/kubernetes/cmd/$program" "$folder/$program" ;;
    plan) build ./plan "$folder/$program" ;;
    agnhost|regression-issue-74839) build "k8s.io/kubernetes/test/images/$program" "$folder/$program" ;;
    e2e.test) build k8s.io/kubernetes/test/e2e "$folder/$program" "$here/kubernetes" go test -vet=off -c ;;
    ginkgo) build github.com/onsi/ginkgo/v2/ginkgo "$folder/$program" ;;
    etcd) build go.etcd.io/etcd/server/v3 "$folder/$program" "$here/etcd" ;;
    helm) build helm.sh/helm/v4/cmd/helm "$folder/$program" "$here/helm" ;;
    coredns) build . "$folder/$program" "$here/../e2e/coredns" ;;
    aws-vpc-cni-rules|kube-network-policies-rules)
        build . "$folder/$program" "$here/../netns/attach/rulesets/${program%-rules}"
        ;;
    flanneld) cgo=1 build github.com/flannel-io/flannel "$folder/$program" "$here/../e2e/flannel" ;;
    cilium-agent) cilium daemon ;;
    cilium-operator) cilium operator -tags ipam_provider_operator ;;
    cilium-cni) cilium plugins/cilium-cni ;;
    *) echo "$0: no program is called $program" >&2; exit 2 ;;
    esac
done
