# SPDX-License-Identifier: Apache-2.0
"""Starts without anything to write, up to the first error: flags, files, folders, and the rules of the ports' flags.

Only cases that end before the program uses an API server or the kernel.
"""

from __future__ import annotations

from tests.parity.case import CONFIG, HEADER, Case, refused, with_fields


def starts(name: str, fields: str, *arguments: str) -> Case:
    """A start with a file of the usual header and ``fields``."""
    return Case(name, ("--config", CONFIG, *arguments), f"{HEADER}{fields}\n".encode())


CASES: tuple[Case, ...] = (
    # The completion of addresses (spec/configuration §4.4) shows in what is rejected afterwards.
    refused("start: metrics port 0", "--metrics-port=0"),
    refused("start: both ports 0", "--healthz-port=0", "--metrics-port=0"),
    refused("start: metrics port too large", "--metrics-port=70000", "--metrics-bind-address=1.2.3.4"),
    refused("start: metrics port negative", "--metrics-port=-1", "--metrics-bind-address=1.2.3.4"),
    refused("start: health port too large", "--healthz-port=65536", "--healthz-bind-address=::1"),
    refused("start: health port negative", "--healthz-port=-5", "--healthz-bind-address=::1"),
    refused(
        "start: metrics port 0 over an address with a port", "--metrics-port=0", "--metrics-bind-address=1.2.3.4:5"
    ),
    refused(
        "start: a port that the address has wins",
        "--healthz-port=0",
        "--metrics-bind-address=1.2.3.4:70",
        "--metrics-port=99999",
        "--oom-score-adj=5000",
    ),
    refused("start: metrics port appended to IPv6", "--metrics-bind-address=fd00::5", "--metrics-port=99999"),
    refused("start: health port appended to IPv4", "--healthz-bind-address=1.2.3.4", "--healthz-port=99999"),
    refused("start: health port no number", "--healthz-port=x"),
    refused("start: metrics port beyond 32 bits", "--metrics-port=4294967296"),
    starts(
        "start: ports with a file are not looked at", "oomScoreAdj: 5000", "--metrics-port=0", "--healthz-port=99999"
    ),
    starts("start: ports in a file", "metricsBindAddress: 1.2.3.4:0\nhealthzBindAddress: 1.2.3.4:99999"),
    starts("start: no port in a file", "metricsBindAddress: 1.2.3.4\nhealthzBindAddress: x"),
    # The file.
    refused("start: a file that is not there", "--config={dir}/missing.yaml"),
    refused("start: a folder that is not there", "--config={dir}/missing/config.yaml"),
    refused("start: a folder as a file", "--config={dir}"),
    refused("start: a file as a folder", "--config=/etc/passwd/config.yaml"),
    refused("start: a name too long", "--config=/" + "x" * 300),
    refused("start: a file of another kind", "--config=/etc/passwd"),
    Case("start: an empty file", ("--config", CONFIG), b""),
    Case("start: only a comment", ("--config", CONFIG), b"# nothing\n"),
    Case("start: another kind", ("--config", CONFIG), b"apiVersion: v1\nkind: Pod\n"),
    Case("start: another version", ("--config", CONFIG), HEADER.replace("v1alpha1", "v1beta1").encode()),
    Case("start: NUL bytes", ("--config", CONFIG), (HEADER + "mode: \0\n").encode()),
    Case("start: no UTF-8", ("--config", CONFIG), HEADER.encode() + b"mode: \xff\xfe\n"),
    Case("start: a list", ("--config", CONFIG), b"- 1\n- 2\n"),
    starts("start: an unknown field and a bad value", "mod: x\nmode: y"),
    starts("start: a duplicate field and a bad value", "mode: iptables\nmode: y"),
    starts("start: a wrong type", "oomScoreAdj: many"),
    starts("start: a bad duration", "configSyncPeriod: 5"),
    starts("start: many bad values", "mode: x\noomScoreAdj: 5000\nbindAddress: y\nconntrack: {min: -1}"),
    # The order of steps: complete, logging, validate.
    starts("start: an unknown gate", "featureGates: {Foo: true}\nmode: x"),
    starts("start: a locked gate", "featureGates: {NFTablesProxyMode: false}\nmode: x"),
    starts("start: logging before validation", "logging: {format: xml}\nmode: x"),
    starts("start: a blank host name before gates", "featureGates: {Foo: true}", "--hostname-override= "),
    refused("start: logging flags before validation", "--logging-format=xml", "--proxy-mode=x"),
    refused("start: vmodule with json", "--logging-format=json", "--vmodule=a=1", "--proxy-mode=x"),
    refused("start: an unknown gate in a flag", "--feature-gates=Foo=true", "--proxy-mode=x"),
    refused("start: a gate that is no boolean", "--feature-gates=AllAlpha=maybe"),
    refused("start: a blank host name", "--hostname-override=  "),
    refused("start: a bad mode", "--proxy-mode=userspace"),
    refused("start: kernelspace", "--proxy-mode=kernelspace"),
    refused("start: a bad detect mode", "--detect-local-mode=Pods"),
    refused("start: a bridge without a name", "--detect-local-mode=BridgeInterface"),
    refused("start: a prefix without a name", "--detect-local-mode=InterfaceNamePrefix"),
    refused("start: bad cluster CIDRs", "--cluster-cidr=10.0.0.0/8,10.1.0.0/16"),
    refused("start: no CIDR", "--cluster-cidr=10.0.0.0"),
    refused("start: a minimum above the period", "--iptables-sync-period=1s", "--iptables-min-sync-period=2s"),
    refused("start: a period of zero", "--config-sync-period=0"),
    refused("start: shown metrics of another release", "--show-hidden-metrics-for-version=1.20"),
    # nodePortAddresses: v1.37 and v1.36 have different messages (spec/configuration §2.8).
    *(
        refused(f"start: NodePort addresses {value}", f"--nodeport-addresses={value}")
        for value in (
            "localhost",
            "all",
            "primary,localhost",
            "primary,primary",
            "primary,10.0.0.0/8",
            "10.0.0.0/8,primary",
            "10.0.0.0/8,primary,x",
            "Primary",
            "10.0.0.1",
            "fd00::/200",
            "10.0.0.0/8,x,fd00::",
        )
    ),
    # The command line.
    refused("start: a word", "foo"),
    refused("start: words", "--masquerade-all", "false", "and", "more"),
    refused("start: an empty word and another", "", "foo"),
    refused("start: words after two dashes", "--", "--proxy-mode=x"),
    refused("start: an unknown flag before a bad file", "--nope", "--config=/nonexistent"),
    refused("start: a bad value before a bad file", "--oom-score-adj=x", "--config=/nonexistent"),
    refused("start: a word before a bad file", "--config=/nonexistent", "foo"),
    refused("start: a flag without its value", "--config"),
    refused("start: an unknown letter", "-x"),
    refused("start: cleanup with a bad value", "--cleanup", "--proxy-mode=x"),
    refused("start: cleanup with a file that is not there", "--cleanup", "--config={dir}/missing.yaml"),
    refused("start: init only with a bad value", "--init-only", "--proxy-mode=x"),
    refused("start: init only with a file that is not there", "--init-only", "--config={dir}/missing.yaml"),
    # Findings of live comparisons.
    with_fields("an escaped apostrophe", r"""hostnameOverride: "a\'b" """),
    with_fields("an escaped slash", r'hostnameOverride: "a\/b"'),
    with_fields("an object with numbers as a frequency", "logging: {flushFrequency: {k1: 2, k0: {k0: 010, k1: null}}}"),
    with_fields("a list as a frequency", "logging: {flushFrequency: [1.5e3, 'a\"b', '<>&', true]}"),
    # Writing.
    refused("start: write into a folder that is not there", "--write-config-to={dir}/missing/out.yaml"),
    refused("start: write to a folder", "--write-config-to={dir}"),
    refused("start: write below a file", "--write-config-to=/etc/passwd/out.yaml"),
    refused("start: write where nothing may be written", "--write-config-to=/proc/out.yaml"),
    refused("start: write and clean up", "--cleanup", "--init-only", "--write-config-to={dir}/written.yaml"),
    starts("start: write a bad value", "mode: x", "--write-config-to={dir}/written.yaml"),
)


#: The first step of a start after the checks: access to the API server. Only messages that both have.
ACCESS: tuple[Case, ...] = (
    refused("access: a kubeconfig that is not there", "--kubeconfig={dir}/missing"),
    starts("access: a kubeconfig of the file that is not there", "clientConnection: {kubeconfig: /nonexistent/k}"),
    Case("access: a kubeconfig of another kind", ("--kubeconfig", CONFIG), b"kind: Pod\napiVersion: v1\n"),
)


def cases() -> list[Case]:
    """Every case of a start."""
    return [*CASES, *ACCESS]
