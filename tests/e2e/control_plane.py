# SPDX-License-Identifier: Apache-2.0
"""etcd, kube-apiserver, kube-controller-manager and kube-scheduler, in a network namespace with the nodes' bridge."""

from __future__ import annotations

import subprocess

from tests.e2e.layout import BRIDGE, CONTROL, PROGRAMS, Network
from tests.e2e.node import run
from tests.e2e.processes import State, wait_for

#: Not `ip netns exec`: its mount namespace would keep other programs' mounts.
INSIDE = ["nsenter", f"--net=/run/netns/{CONTROL}"]
_ETCD = "http://127.0.0.1:2379"
_ETCD_PEER = "http://127.0.0.1:2380"


def start(state: State, network: Network) -> None:
    """Start all four, and wait for the API server."""
    run("ip", "netns", "add", CONTROL)
    run("ip", "-n", CONTROL, "link", "set", "lo", "up")
    run("ip", "-n", CONTROL, "link", "add", BRIDGE, "type", "bridge")
    run("ip", "-n", CONTROL, "addr", "add", f"{network.api}/24", "dev", BRIDGE)
    if network.dual:
        run("ip", "-n", CONTROL, "addr", "add", f"{network.api6}/64", "dev", BRIDGE, "nodad")
    run("ip", "-n", CONTROL, "link", "set", BRIDGE, "up")
    run(*INSIDE, "sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")
    start_etcd(state)
    start_api_server(state, network)
    _start_controllers(state, network)


def kubectl(state: State) -> list[str]:
    """The command with its kubeconfig."""
    return [*INSIDE, str(PROGRAMS / "kubectl"), f"--kubeconfig={state.folder}/pki/admin.conf"]


def start_etcd(state: State) -> None:
    state.spawn(
        "etcd",
        [
            *INSIDE,
            "etcd",
            f"--data-dir={state.folder}/etcd",
            f"--listen-client-urls={_ETCD}",
            f"--advertise-client-urls={_ETCD}",
            f"--listen-peer-urls={_ETCD_PEER}",
            f"--initial-advertise-peer-urls={_ETCD_PEER}",
            f"--initial-cluster=default={_ETCD_PEER}",
            "--unsafe-no-fsync",
        ],
    )


def start_api_server(state: State, network: Network) -> None:
    keys = state.folder / "pki"
    state.spawn(
        "kube-apiserver",
        [
            *INSIDE,
            PROGRAMS / "kube-apiserver",
            f"--etcd-servers={_ETCD}",
            "--bind-address=0.0.0.0",
            f"--advertise-address={network.api}",
            "--secure-port=6443",
            f"--tls-cert-file={keys}/apiserver.crt",
            f"--tls-private-key-file={keys}/apiserver.key",
            f"--client-ca-file={keys}/ca.crt",
            f"--cert-dir={state.folder}/certs",
            f"--kubelet-client-certificate={keys}/kubelet-client.crt",
            f"--kubelet-client-key={keys}/kubelet-client.key",
            "--kubelet-preferred-address-types=InternalIP,Hostname",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged=true",
            f"--requestheader-client-ca-file={keys}/ca.crt",
            "--requestheader-allowed-names=front-proxy-client",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--proxy-client-cert-file={keys}/front-proxy.crt",
            f"--proxy-client-key-file={keys}/front-proxy.key",
            "--enable-aggregator-routing=true",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            f"--service-account-key-file={keys}/accounts.pub",
            f"--service-account-signing-key-file={keys}/accounts.key",
            f"--service-cluster-ip-range={network.services}",
        ],
    )

    def is_ready() -> bool:
        state.must_run("etcd")
        state.must_run("kube-apiserver")
        asked = subprocess.run(
            [*kubectl(state), "get", "--raw", "/readyz"], check=False, capture_output=True, text=True
        )
        return asked.stdout == "ok"

    wait_for("the API server is ready", is_ready, 180)


def _start_controllers(state: State, network: Network) -> None:
    keys = state.folder / "pki"
    for name, arguments in {
        "kube-controller-manager": [
            "--allocate-node-cidrs=true",
            f"--cluster-cidr={network.pods}",
            *(["--node-cidr-mask-size-ipv6=64"] if network.dual else []),
            f"--service-cluster-ip-range={network.services}",
            "--cluster-name=pep-e2e",
            f"--cluster-signing-cert-file={keys}/ca.crt",
            f"--cluster-signing-key-file={keys}/ca.key",
            f"--root-ca-file={keys}/ca.crt",
            f"--service-account-private-key-file={keys}/accounts.key",
            "--use-service-account-credentials=true",
        ],
        "kube-scheduler": [],
    }.items():
        configuration = f"{keys}/{name}.conf"
        state.spawn(
            name,
            [
                *INSIDE,
                PROGRAMS / name,
                f"--kubeconfig={configuration}",
                f"--authentication-kubeconfig={configuration}",
                f"--authorization-kubeconfig={configuration}",
                "--leader-elect=false",
                "--bind-address=127.0.0.1",
                *arguments,
            ],
        )
