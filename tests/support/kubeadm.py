# SPDX-License-Identifier: Apache-2.0
"""What kubeadm creates in a cluster for kube-proxy, field by field: its ConfigMap and its DaemonSet."""

from __future__ import annotations

from typing import Any

import yaml

Object = dict[str, Any]

CONFIGURATION = {
    "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
    "kind": "KubeProxyConfiguration",
    "bindAddress": "0.0.0.0",
    "bindAddressHardFail": False,
    "clientConnection": {
        "acceptContentTypes": "",
        "burst": 0,
        "contentType": "",
        "kubeconfig": "/var/lib/kube-proxy/kubeconfig.conf",
        "qps": 0,
    },
    "clusterCIDR": "10.244.0.0/16,fd00:10:244::/56",
    "configSyncPeriod": "0s",
    "conntrack": {
        "maxPerCore": None,
        "min": None,
        "tcpBeLiberal": False,
        "tcpCloseWaitTimeout": None,
        "tcpEstablishedTimeout": None,
        "udpStreamTimeout": "0s",
        "udpTimeout": "0s",
    },
    "detectLocal": {"bridgeInterface": "", "interfaceNamePrefix": ""},
    "detectLocalMode": "",
    "enableProfiling": False,
    "healthzBindAddress": "",
    "hostnameOverride": "",
    "iptables": {
        "localhostNodePorts": None,
        "masqueradeAll": False,
        "masqueradeBit": None,
        "minSyncPeriod": "0s",
        "syncPeriod": "0s",
    },
    "logging": {
        "flushFrequency": 0,
        "options": {"json": {"infoBufferSize": "0"}, "text": {"infoBufferSize": "0"}},
        "verbosity": 0,
    },
    "metricsBindAddress": "",
    "mode": "",
    "nodePortAddresses": None,
    "oomScoreAdj": None,
    "portRange": "",
    "showHiddenMetricsForVersion": "",
}


def config_map(server: str, mode: str = "") -> Object:
    """``kube-system/kube-proxy`` for a control plane at this URL. ``mode``: "" is kube-proxy's default, iptables."""
    account = "/var/run/secrets/kubernetes.io/serviceaccount"
    kubeconfig = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"cluster": {"certificate-authority": f"{account}/ca.crt", "server": server}, "name": "default"}],
        "contexts": [{"context": {"cluster": "default", "namespace": "default", "user": "default"}, "name": "default"}],
        "current-context": "default",
        "users": [{"name": "default", "user": {"tokenFile": f"{account}/token"}}],
    }
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "kube-proxy", "namespace": "kube-system", "labels": {"app": "kube-proxy"}},
        "data": {
            "kubeconfig.conf": yaml.safe_dump(kubeconfig),
            "config.conf": yaml.safe_dump(CONFIGURATION | {"mode": mode}),
        },
    }


def daemon_set() -> Object:
    """``kube-system/kube-proxy``."""
    container = {
        "name": "kube-proxy",
        "image": "kube-proxy:v1.36.3",
        "imagePullPolicy": "IfNotPresent",
        "command": [
            "/usr/local/bin/kube-proxy",
            "--config=/var/lib/kube-proxy/config.conf",
            "--hostname-override=$(NODE_NAME)",
        ],
        "securityContext": {"privileged": True},
        "volumeMounts": [
            {"mountPath": "/var/lib/kube-proxy", "name": "kube-proxy"},
            {"mountPath": "/run/xtables.lock", "name": "xtables-lock", "readOnly": False},
            {"mountPath": "/lib/modules", "name": "lib-modules", "readOnly": True},
        ],
        "env": [{"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
    }
    labels = {"k8s-app": "kube-proxy"}
    pod = {
        "priorityClassName": "system-node-critical",
        "containers": [container],
        "hostNetwork": True,
        "serviceAccountName": "kube-proxy",
        "volumes": [
            {"name": "kube-proxy", "configMap": {"name": "kube-proxy"}},
            {"name": "xtables-lock", "hostPath": {"path": "/run/xtables.lock", "type": "FileOrCreate"}},
            {"name": "lib-modules", "hostPath": {"path": "/lib/modules"}},
        ],
        "tolerations": [{"operator": "Exists"}],
        "nodeSelector": {"kubernetes.io/os": "linux"},
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": "kube-proxy", "namespace": "kube-system", "labels": labels},
        "spec": {
            "selector": {"matchLabels": labels},
            "updateStrategy": {"type": "RollingUpdate"},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
