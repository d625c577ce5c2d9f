# SPDX-License-Identifier: Apache-2.0
"""Random configuration files and command lines from a seed: any field, value and order, some of them broken."""

from __future__ import annotations

import json
import random

from tests.parity.case import HEADER, Case, with_file, with_flags
from tests.parity.files import BODIES, KUBEADM

_TEXTS = (
    "",
    "a",
    "n",
    "yes",
    "1",
    "0x10",
    "1.5",
    "10.0.0.0/8",
    "::1",
    "fd00::/64",
    "primary",
    "ipvs",
    "nftables",
    "5s",
    "1h30m",
    "-1s",
    "null",
    "~",
    "x y",
    "a: b",
    "it's",
    "#",
    "2026-01-01",
    "é",
    "text",
    "json",
    "rr",
    "1.35",
)
_NUMBERS = (
    "0",
    "1",
    "-1",
    "5.0",
    "1.5",
    "31",
    "32",
    "1e3",
    "0x1F",
    "010",
    "2147483647",
    "2147483648",
    "-2147483649",
    "1_000",
    ".5",
    "9223372036854775808",
    "1e25",
)
_DURATIONS = ("0s", "1s", "30s", "-5s", "1h", "1.5s", "250ms", "1us", "1d", "30", "''", "null", "'0'")
_ADDRESSES = ("0.0.0.0", "'::'", "1.2.3.4", "fd00::1", "x", "''", "1.2.3.4:80", "'[::1]:80'", "1.2.3.4:0", "1.2.3.4:x")
_CIDRS = ("10.0.0.0/8", "fd00::/64", "primary", "x", "10.1.2.3/16", "1.2.3.4")
_BOOLEANS = ("true", "false", "yes", "n", "'true'", "1", "null")

_FIELDS: dict[str, tuple[str, ...]] = {
    "hostnameOverride": ("node", "' A '", "5", "''"),
    "bindAddress": _ADDRESSES,
    "healthzBindAddress": _ADDRESSES,
    "metricsBindAddress": _ADDRESSES,
    "bindAddressHardFail": _BOOLEANS,
    "enableProfiling": _BOOLEANS,
    "showHiddenMetricsForVersion": ("'1.35'", "'1.2'", "''"),
    "mode": ("iptables", "ipvs", "nftables", "''", "userspace"),
    "detectLocalMode": ("ClusterCIDR", "NodeCIDR", "BridgeInterface", "InterfaceNamePrefix", "''", "x"),
    "clusterCIDR": ("10.0.0.0/8", "'10.0.0.0/8,fd00::/64'", "x", "'10.0.0.0/8,11.0.0.0/8'", "''"),
    "oomScoreAdj": _NUMBERS,
    "configSyncPeriod": _DURATIONS,
    "portRange": ("''", "1-2"),
    "windowsRunAsService": _BOOLEANS,
    "clientConnection.qps": (*_NUMBERS, "0.1", "33.3", "1e-9"),
    "clientConnection.burst": _NUMBERS,
    "clientConnection.kubeconfig": ("/x", "''", "5"),
    "clientConnection.contentType": ("application/json", "''"),
    "iptables.masqueradeBit": _NUMBERS,
    "iptables.masqueradeAll": _BOOLEANS,
    "iptables.localhostNodePorts": _BOOLEANS,
    "iptables.syncPeriod": _DURATIONS,
    "iptables.minSyncPeriod": _DURATIONS,
    "ipvs.syncPeriod": _DURATIONS,
    "ipvs.minSyncPeriod": _DURATIONS,
    "ipvs.scheduler": ("rr", "x", "''"),
    "ipvs.strictARP": _BOOLEANS,
    "ipvs.tcpTimeout": _DURATIONS,
    "ipvs.udpTimeout": _DURATIONS,
    "nftables.masqueradeBit": _NUMBERS,
    "nftables.masqueradeAll": _BOOLEANS,
    "nftables.syncPeriod": _DURATIONS,
    "nftables.minSyncPeriod": _DURATIONS,
    "winkernel.networkName": ("n", "x", "''"),
    "winkernel.enableDSR": _BOOLEANS,
    "detectLocal.bridgeInterface": ("cbr0", "''"),
    "detectLocal.interfaceNamePrefix": ("veth", "''"),
    "conntrack.maxPerCore": _NUMBERS,
    "conntrack.min": _NUMBERS,
    "conntrack.tcpEstablishedTimeout": _DURATIONS,
    "conntrack.tcpCloseWaitTimeout": _DURATIONS,
    "conntrack.tcpBeLiberal": _BOOLEANS,
    "conntrack.udpTimeout": _DURATIONS,
    "logging.format": ("text", "json", "xml", "''"),
    "logging.flushFrequency": (*_DURATIONS, "5000000000"),
    "logging.verbosity": _NUMBERS,
    "unknownField": ("1", "[a]", "{b: c}"),
    "iptables.unknownField": ("1", "~"),
}
_FLAG_VALUES: dict[str, tuple[str, ...]] = {
    "bind-address": ("", "1.2.3.4", "::", "x"),
    "healthz-bind-address": ("", "1.2.3.4:80", "[::1]:80", "x", "1.2.3.4"),
    "metrics-bind-address": ("", "1.2.3.4:80", "1.2.3.4:99999"),
    "proxy-mode": ("", "ipvs", "iptables", "nftables", "x"),
    "cluster-cidr": ("", "10.0.0.0/8", "10.0.0.0/8,fd00::/64", "x"),
    "detect-local-mode": ("", "NodeCIDR", "ClusterCIDR", "BridgeInterface", "x"),
    "nodeport-addresses": ("", "primary", "10.0.0.0/8,fd00::/64", "x,primary"),
    "oom-score-adj": ("0", "-1000", "1001", "x", "0x10", "1_0"),
    "conntrack-min": ("0", "-1", "7"),
    "conntrack-tcp-timeout-established": ("0", "1h", "-1s", "1d"),
    "iptables-sync-period": ("1s", "0", "x", "-1s"),
    "iptables-min-sync-period": ("0", "1m", "1s"),
    "ipvs-sync-period": ("9s", "0"),
    "ipvs-min-sync-period": ("9s", "0"),
    "iptables-masquerade-bit": ("0", "31", "32"),
    "masquerade-all": ("true", "false", "x"),
    "ipvs-scheduler": ("rr", ""),
    "kube-api-qps": ("0", "1.5", "x", "1e9"),
    "kube-api-burst": ("0", "-5", "5"),
    "v": ("0", "4", "x"),
    "vmodule": ("a=1", "a", "b=2,c=3"),
    "logging-format": ("text", "json", "xml"),
    "hostname-override": ("A", "", "b c"),
    "feature-gates": ("AllAlpha=false", "Foo=true", "ContextualLogging=x"),
    "healthz-port": ("0", "5"),
    "no-such": ("1",),
}


_CHARACTERS = (
    *"abyn015:-,.[]{}\"'#&*!|>%@`? \n\t~<=\\/",
    "  ",
    "\n  ",
    "- ",
    ": ",
    "&a ",
    "*a",
    "<<: ",
    "!!str ",
    "é",
    "---\n",
)


def generate(seed: int, count: int) -> list[Case]:
    """``count`` cases of this seed: files, command lines, and damaged files."""
    kinds = (_file, _file, _command_line, _file, _damaged)
    return [kinds[number % len(kinds)](seed, number) for number in range(count)]


def _damaged(seed: int, number: int) -> Case:
    """A file case with some characters added, removed or changed."""
    chance = random.Random(f"damage {seed} {number}")
    text = HEADER + chance.choice([KUBEADM, *(body for _, body in BODIES if len(body) < 300)])
    for _ in range(chance.randint(1, 4)):
        place = chance.randint(0 if chance.random() < 0.1 else min(len(HEADER), len(text)), len(text))
        gone = chance.choice((0, 0, 1, 3))
        text = text[:place] + chance.choice((*_CHARACTERS, "")) + text[place + gone :]
    return with_file(f"damaged file {seed}/{number}", text)


def _file(seed: int, number: int) -> Case:
    chance = random.Random(f"file {seed} {number}")
    names = chance.sample(sorted(_FIELDS), chance.randint(1, 9))
    if chance.random() < 0.15:
        names.append(chance.choice(names))
    nested: dict[str, list[str]] = {}
    lines: list[str] = []
    for name in names:
        # Mostly values that suit the field: otherwise hardly any file would be valid.
        wild = chance.random() < 0.06
        value = _wild(chance) if wild else chance.choice(_FIELDS[name])
        section, dot, field = name.partition(".")
        if dot:
            if section not in nested:
                nested[section] = []
                lines.append(section)
            nested[section].append(f"{field}: {value}")
        else:
            lines.append(f"{name}: {value}")
    if chance.random() < 0.3:
        cidrs = chance.sample(_CIDRS, chance.randint(0, 3))
        lines.append("nodePortAddresses: [" + ", ".join(cidrs) + "]")
    text = HEADER
    for line in lines:
        if line not in nested:
            text += line + "\n"
        elif chance.random() < 0.5:
            text += f"{line}:\n" + "".join(f"  {field}\n" for field in nested[line])
        else:
            text += f"{line}: {{{', '.join(nested[line])}}}\n"
    return with_file(f"generated file {seed}/{number}", text)


def _wild(chance: random.Random, depth: int = 0) -> str:
    kind = chance.randrange(6 if depth < 2 else 4)
    if kind == 0:
        return chance.choice(_NUMBERS)
    if kind == 1:
        return json.dumps(chance.choice(_TEXTS), ensure_ascii=False)
    if kind == 2:
        return chance.choice(_BOOLEANS)
    if kind == 3:
        return "null"
    values = [_wild(chance, depth + 1) for _ in range(chance.randint(0, 3))]
    if kind == 4:
        return "[" + ", ".join(values) + "]"
    return "{" + ", ".join(f"k{index}: {value}" for index, value in enumerate(values)) + "}"


def _command_line(seed: int, number: int) -> Case:
    chance = random.Random(f"line {seed} {number}")
    arguments = []
    for name in chance.sample(sorted(_FLAG_VALUES), chance.randint(1, 6)):
        value = chance.choice(_FLAG_VALUES[name])
        shown = name.replace("-", "_") if chance.random() < 0.1 else name
        if name == "v" and chance.random() < 0.5:
            arguments += [f"-v{value}"]
        elif chance.random() < 0.7 or name == "masquerade-all":
            arguments.append(f"--{shown}={value}")
        else:
            arguments += [f"--{shown}", value]
    return with_flags(f"generated line {seed}/{number}", *arguments)
