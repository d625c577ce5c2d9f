# SPDX-License-Identifier: Apache-2.0
"""``cluster sysdump``: what is left out of an object, a ConfigMap's texts and a log; archives that are incomplete."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from pyebpf_proxy.cluster import objects, sysdump
from pyebpf_proxy.cluster.api import CONFIG_MAPS, DAEMON_SETS, Api
from pyebpf_proxy.cluster.errors import ClusterError, StoppedError
from pyebpf_proxy.cluster.objects import NAME, NAMESPACE
from pyebpf_proxy.cluster.output import Output
from pyebpf_proxy.see.answers import NO_ANSWER
from tests.unit.cluster.fake_api import FakeApi

KEY = "-----BEGIN EC PRIVATE KEY-----\nHIDE1\nHIDE2\n-----END EC PRIVATE KEY-----\n"
KUBECONFIG = """\
# A comment.
apiVersion: v1
kind: Config
users:
- name: default
  user:
    token: HIDE3
    password: 'HIDE4'
    client-key-data: HIDE5
    tokenFile: /var/run/secrets/kubernetes.io/serviceaccount/token
    exec:
      command: aws
      env:
      - name: AWS_SECRET_ACCESS_KEY
        value: HIDE6
      - {name: AWS_REGION, value: eu-west-1}
    auth-provider:
      config: {access-token: HIDE7, refresh-token: HIDE8, client-secret: HIDE9, id-token: HIDE10}
"""


def written(item: dict[str, Any]) -> str:
    text = sysdump._text([item])
    (read,) = yaml.safe_load(text)
    assert read["metadata"]["name"] == "x"
    return text


def test_credentials_in_a_config_map() -> None:
    data = {
        "kubeconfig.conf": KUBECONFIG,
        "inline.json": json.dumps({"users": [{"name": "json", "user": {"token": "HIDE11"}}]}),
        "key.pem": KEY,
        "not YAML": "{ \n  password: HIDE12\n",
        "environment": "HTTPS_PROXY=http://user:HIDE13@proxy:3128",
        "config.conf": "mode: nftables\n# kept\nclusterCIDR: 10.244.0.0/16\n",
    }
    text = written({"kind": "ConfigMap", "metadata": {"name": "x"}, "data": data})
    assert "HIDE" not in text
    for kept in ("tokenFile: /var/run/secrets/", "eu-west-1", "AWS_REGION", "name: json", "@proxy:3128"):
        assert kept in text
    # A text without credentials stays as it is, in lines.
    assert "    config.conf: |\n      mode: nftables\n      # kept\n      clusterCIDR: 10.244.0.0/16\n" in text


def test_credentials_in_a_pod() -> None:
    container = {
        "env": [
            {"name": "DB_PASSWORD", "value": "HIDE1"},
            {"name": "clientSecret", "value": "HIDE2"},
            {"name": "HTTPS_PROXY", "value": "http://u:HIDE3@proxy:3128"},
            {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
            *(
                {"name": name, "value": "HIDE5"}
                for name in ("PASSWORDS", "DB_PASSWORD_1", "GITHUB_PAT", "JWT", "TOKENS")
            ),
            {"name": "PATH", "value": "/kept-path"},
            {"name": "KEYBOARD_MONKEY", "value": "kept-value"},
        ],
        "args": ["--header=Bearer eyJhbGciOiJS.eyJpc3MiOiJrHIDE.c2lnbmF0dXJl"],
    }
    volumes = [
        {"projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}},
        {"secret": {"secretName": "s"}},
    ]
    pod = {
        "metadata": {
            "name": "x",
            "managedFields": ["HIDE"],
            "annotations": {"note": "https://admin:HIDE4@example.org/"},
        },
        "spec": {"containers": [container], "volumes": volumes, "automountServiceAccountToken": False},
    }
    text = written(pod)
    assert "HIDE" not in text
    for kept in (
        "DB_PASSWORD",
        "kept-path",
        "kept-value",
        "spec.nodeName",
        "path: token",
        "secretName: s",
        "automountServiceAccountToken: false",
    ):
        assert kept in text
    assert pod["spec"]["containers"][0]["env"][0]["value"] == "HIDE1", "the object itself is unchanged"  # type: ignore[index]


def test_credentials_in_annotations() -> None:
    """Tools also keep a whole object there."""
    container = {"env": [{"name": "DB_PASSWORD", "value": "HIDE1"}], "image": "kept:1"}
    annotations = {
        "example.org/join-token": "HIDE2",
        "kapp.k14s.io/original": json.dumps({"spec": {"containers": [container]}, "token": "HIDE3"}),
        "example.org/webhook": "https://HIDE4@example.org/hook?token=HIDE5&kept=1",
        "example.org/note": "kept",
    }
    text = written({"kind": "DaemonSet", "metadata": {"name": "x", "annotations": annotations}})
    assert "HIDE" not in text
    for kept in ("example.org/join-token: REDACTED", "kept:1", "@example.org/hook", "&kept=1", "note: kept"):
        assert kept in text


def test_credentials_in_a_command() -> None:
    key = base64.b64encode(KEY.encode()).decode()
    certificate = base64.b64encode(b"-----BEGIN CERTIFICATE-----\nkept").decode()
    container = {
        "command": ["agent", "--api-token", "HIDE1", "--password=HIDE2", "--token-file=/kept", "--token", "--kept"],
        "args": ["DB_PASS='HIDE 3' MINIO_SECRET_KEY=HIDE4 run --token HIDE5; curl -H 'Authorization: Basic HIDE6'"],
        "env": [{"name": name, "value": text} for name, text in (("A", certificate), ("B", key), ("C", key[:-3]))],
        "image": "docker-pullable://kept@sha256:00",
        "readinessProbe": {"httpGet": {"httpHeaders": [{"name": "Authorization", "value": "Basic HIDE7"}]}},
    }
    text = written({"metadata": {"name": "x"}, "spec": {"containers": [container]}})
    assert "HIDE" not in text
    assert key[:40] not in text
    for kept in (certificate, "--token-file=/kept", "--kept", "kept@sha256:00", "--password=REDACTED"):
        assert kept in text


@pytest.mark.parametrize("broken", ["started: 2026-13-45\n", "a: &a [*a]\n", "x: 0x_\n"])
def test_a_config_map_that_is_no_valid_document(broken: str) -> None:
    """It may be the very reason for the report."""
    data = {"config.conf": f"{broken}password: HIDE1\n"}
    text = written({"metadata": {"name": "x"}, "data": data, "binaryData": {"key": "SElERTI="}})
    assert "HIDE" not in text
    assert "SElERTI=" not in text
    assert broken.partition(":")[0] in text


def test_credentials_in_a_log() -> None:
    log = f"info ready\nwarning refused url=https://u:HIDE1@10.0.0.1/ name=x\ntoken: HIDE2\n{KEY}"
    log += 'Authorization: Bearer HIDE3\n{"message": "kept", "client_secret": "HIDE\\"4", "n": 1}\n'
    log += "sent bearer HIDE5abcdefghijklmnop=\ninfo ends\n"
    text = sysdump._text(log)
    assert "HIDE" not in text
    assert text.startswith("info ready\nwarning refused url=https://REDACTED@10.0.0.1/ name=x\n")
    assert '{"message": "kept", "client_secret": "REDACTED", "n": 1}' in text
    assert text.endswith("info ends\n")


class Logs:
    """An API server with one pod's log."""

    def __init__(self, lines: int) -> None:
        self.text = "".join(f"line {number}\n" for number in range(lines))

    def log(
        self, pod: str, namespace: str, container: str, most_bytes: int, previous: bool, last_lines: int = 0
    ) -> str:
        lines = self.text.splitlines(keepends=True)
        return "".join(lines[-last_lines:])[:most_bytes]


def test_of_a_long_log_the_beginning_and_the_end() -> None:
    assert sysdump._log(cast(Api, Logs(3)), "p", "c") == Logs(3).text
    text = sysdump._log(cast(Api, Logs(60_000)), "p", "c")
    assert text.startswith("line 0\nline 1\n")
    assert "\n[...]\n" in text
    assert text.endswith("line 59999\n")
    assert text.count("\n") < 30_000


def lost(api: FakeApi, part: str) -> list[str]:
    """The API server is lost with the first request for such a path. The result: the later requests."""
    later: list[str] = []

    def before(method: str, path: str) -> None:
        if part in path or later:
            later.append(path)
            raise StoppedError("the API server has not answered for 300 s: timed out", NO_ANSWER)

    api.before = before
    return later


def test_a_sysdump_waits_for_a_lost_api_server_once(tmp_path: Path) -> None:
    """Each request would wait for five minutes, and there is one for each log."""
    api = FakeApi("n1", "n2")
    later = lost(api, "/log")
    path = tmp_path / "dump.tar.gz"
    missing = sysdump.write(api, Output(as_json=False), str(path), "", 1.0)
    assert len(later) == 1
    assert missing[-1].endswith("the API server has not answered for 300 s: timed out")
    assert path.exists()


def test_a_selector_of_no_node_is_reported(tmp_path: Path) -> None:
    """The objects of the cluster are in the archive, but no agent's report is."""
    missing = sysdump.write(FakeApi("n1"), Output(as_json=False), str(tmp_path / "dump.tar.gz"), "role=wroker", 1.0)
    assert any(line.startswith("status.txt: no node matches --nodes") for line in missing)


def test_an_interrupted_sysdump_leaves_no_truncated_archive(tmp_path: Path) -> None:
    """The same command can be run again."""
    api = FakeApi("n1")

    def interrupt(method: str, path: str) -> None:
        if path.endswith("/log"):
            raise KeyboardInterrupt

    api.before = interrupt
    path = tmp_path / "dump.tar.gz"
    with pytest.raises(KeyboardInterrupt):
        sysdump.write(api, Output(as_json=False), str(path), "", 1.0)
    assert not path.exists()
    api.before = lambda method, path: None
    sysdump.write(api, Output(as_json=False), str(path), "", 1.0)
    with pytest.raises(ClusterError, match="already exists"):
        sysdump.write(api, Output(as_json=False), str(path), "", 1.0)
    assert path.exists(), "of another command"


def test_the_datapath_configuration_is_that_which_the_pods_mount() -> None:
    """kustomize appends a hash to the name of the ConfigMap."""
    api = FakeApi("n1")
    daemon_set = objects.agent("registry.example/pyebpf-proxy:1")[-1]
    volumes = daemon_set["spec"]["template"]["spec"]["volumes"]
    volumes.append({"name": "datapath", "configMap": {"name": f"{objects.DATAPATH}-67hkhkfg6d"}})
    api.put(DAEMON_SETS.path(NAMESPACE, NAME), daemon_set)
    for name in (objects.DATAPATH, f"{objects.DATAPATH}-67hkhkfg6d"):
        api.put(CONFIG_MAPS.path(NAMESPACE, name), {"metadata": {"name": name}, "data": {objects.DATAPATH_KEY: name}})
    parts = dict(sysdump._parts(api, "", 0.1))
    assert parts[f"{objects.DATAPATH}.config.yaml"]()["metadata"]["name"] == f"{objects.DATAPATH}-67hkhkfg6d"
    del volumes[-1]
    api.put(DAEMON_SETS.path(NAMESPACE, NAME), daemon_set)
    assert parts[f"{objects.DATAPATH}.config.yaml"]()["metadata"]["name"] == objects.DATAPATH
