#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Records the rules of AWS VPC CNI and kube-network-policies again: functions of these projects write them in an empty
# network namespace, and iptables-save, ip and nft list them. Needs root, and
#   tests/cluster/build.sh aws-vpc-cni-rules kube-network-policies-rules
#   tests/netns/attach/rulesets/record.sh            all of them
#   tests/netns/attach/rulesets/record.sh NAME...    these (the names are below)
# kube-network-policies needs a kernel with nft_queue, as Debian's (tests/kernels boots them).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
programs=${PYEBPF_PROXY_CACHE:-/var/cache/pyebpf-proxy}/go

# aws VARIANT [ipv6 | NAME=VALUE...]: with this variant of iptables, and with these settings of the plugin.
aws() {
    local variant=$1 arguments=() tools
    shift
    [ "${1:-}" != ipv6 ] || { arguments=(ipv6) && shift; }
    # The plugin calls iptables, and asks it which variant it is.
    tools=$(mktemp -d)
    ln -s "/usr/sbin/iptables-$variant" "$tools/iptables"
    ip netns add pod1
    ip netns add pod2
    for device in eth0 eth1; do
        ip link add $device type veth peer name "${device/eth/far}"
        ip link set $device up
    done
    ip address add 10.0.1.1/24 dev eth0
    env "$@" PATH="$tools:$PATH" AWS_VPC_K8S_CNI_LOG_FILE="$tools/log" \
        "$programs/aws-vpc-cni-rules" "${arguments[@]}" || { cat "$tools/log" >&2; exit 1; }
    rm -r "$tools"
    set -- "iptables-$variant" "${arguments[@]}" "$@"
    echo "# AWS VPC CNI $(version github.com/aws/amazon-vpc-cni-k8s aws-vpc-cni), $*"
    echo "== iptables-save"
    "iptables-$variant-save" | grep -v '^#'
    echo "== nft"
    nft --stateless list table ip aws-cni 2>/dev/null || true
    for family in 4 6; do
        echo "== ip -$family rule"
        ip "-$family" rule | grep -Ev '^(0|32766|32767):' || true
    done
}

# version MODULE FOLDER: the version that the folder's go.mod pins.
version() { sed -n "s#^\(require\)\?\s*$1 \(v[^ ]*\)\$#\2#p" "$here/$2/go.mod"; }

if [ "${1:-}" != --inside ]; then
    [ $# -gt 0 ] || set -- aws-legacy aws-nft aws-without-marks aws-ipv6 kube-network-policies
    for name; do
        # Namespaces that end with the process, also those of pods.
        unshare --net --mount "$0" --inside "$name"
    done
    exit
fi
mkdir -p /run/netns
mount -t tmpfs none /run/netns
case $2 in
aws-legacy) aws legacy >"$here/aws-vpc-cni/legacy.txt" ;;
aws-nft) aws nft >"$here/aws-vpc-cni/nft.txt" ;;
aws-without-marks)
    aws nft AWS_VPC_K8S_CNI_EXTERNALSNAT=true AWS_VPC_CNI_NODE_PORT_SUPPORT=false \
        >"$here/aws-vpc-cni/without-marks.txt"
    ;;
aws-ipv6) aws nft ipv6 >"$here/aws-vpc-cni/ipv6.txt" ;;
kube-network-policies)
    found=""
    "$programs/kube-network-policies-rules" 2>/run/netns/log &
    for _ in $(seq 50); do
        sleep 0.2
        found=$(nft --stateless list table inet kindnet-network-policies 2>/dev/null) && break
    done
    kill -KILL $!
    [ -n "$found" ] || { cat /run/netns/log >&2; exit 1; }
    {
        echo "# kube-network-policies $(version sigs.k8s.io/kube-network-policies kube-network-policies), as in kindnetd"
        echo "$found"
    } >"$here/kube-network-policies/policy.nft"
    ;;
*) echo "$0: nothing is called $2" >&2; exit 2 ;;
esac
