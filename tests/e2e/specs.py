# SPDX-License-Identifier: Apache-2.0
"""Upstream's specs against a cluster: which ones, how they run, and what a failure means."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.e2e import cluster as clusters
from tests.e2e import results
from tests.e2e.cni import DEFAULT_CNI
from tests.e2e.layout import CONTROL, NODES, PROGRAMS, RELEASE, STORE
from tests.e2e.problem import E2EError
from tests.e2e.replacements import Replacements

FOCUS = r"\[sig-network\]"
DUAL_FOCUS = r"\[sig-network\].*\[Feature:IPv6DualStack\]"
_LONG = "run for many minutes, or need the cluster for themselves"
_NEEDS_BALANCER = "need a load balancer; these run with `ARGS=--load-balancer`"
_NEEDS_POLICIES = "need a CNI with NetworkPolicy; these run with `CNI=flannel` and `CNI=cilium`"
#: Why a spec is left out, by parts of its name.
LEFT_OUT = {
    _LONG: r"\[Slow\]|\[Serial\]|\[Disruptive\]",
    _NEEDS_BALANCER: r"Feature:LoadBalancer",
    _NEEDS_POLICIES: r"Netpol|Feature:NetworkPolicy|NetworkPolicyLegacy",
    "need an Ingress controller": r"Ingress",
    "need SCTP in the kernel": r"SCTP|sctp",
    "need the Internet": r"Feature:Networking-IPv4|Feature:Networking-IPv6|Feature:Networking-DNS",
    "measure performance": r"Feature:PerformanceDNS|Feature:Networking-Performance",
    "need a cloud": r"Provider:GCE|Feature:KubeProxyDaemonSet",
}
DUAL = r"Feature:IPv6DualStack"
#: With the load-balancer controller: these, also those that take minutes.
BALANCED_FOCUS = r"\[sig-network\] LoadBalancers"
BALANCED = (_LONG, _NEEDS_BALANCER)
#: With Cilium these fail beside kube-proxy, too.
_CILIUM = {
    r"IPBlock\.CIDR|CIDR block": "Cilium does not apply `ipBlock` to addresses of pods",
    r"deny ingress access to updated pod": "Cilium applies a pod's new label seconds later, on a busy machine too late",
    r"Traffic Distribution": "Cilium chooses the endpoints of pods' ClusterIPs, by rules of its own for zones",
}
#: kube-router's chain is the first one in FORWARD, and ends with ACCEPT for what complies with policies.
_KUBE_ROUTER = {
    r"should be rejected": "kube-router accepts the packet in FORWARD before kube-proxy's rule rejects it",
}
#: Specs that may fail, by recorded run: regular expressions of their names, with reasons. Only what was recorded.
KNOWN: dict[str, dict[str, str]] = {
    "kube-proxy-cilium": _CILIUM,
    "pyebpf-proxy-cilium": _CILIUM,
    "kube-proxy-flannel": _KUBE_ROUTER,
}
_LIMIT = 3600


@dataclass(frozen=True)
class Choice:
    """Which specs run, and how.

    ``focus``: a regular expression of their names. ``processes``: how many run at once. ``balanced``: with the
    load-balancer controller, and also specs that need it or take minutes. ``replace``: while the proxy is replaced.
    """

    focus: str
    processes: int
    balanced: bool = False
    replace: bool = False


def run(proxy: str, dual: bool, cni: str, choice: Choice, here: bool, record: bool) -> int:
    """Run the specs, in a new cluster or in the one that is up. 1 if one fails without a known reason."""
    clusters.prepare(True, cni)
    with clusters.exclusive():
        made = clusters.Cluster()
        if here and not made.proxy:
            raise E2EError("no cluster is up: make cluster-up")
        if not here:
            clusters.refuse_if_used()
            try:
                made.up(proxy, dual, cni, keeper=os.getpid())
                return _judge(made, choice, record)
            finally:
                with _undisturbed():
                    clusters.down()
        return _judge(made, choice, record)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """The clean-up runs to its end, whatever signal comes."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _judge(made: clusters.Cluster, choice: Choice, record: bool) -> int:
    if choice.balanced:
        made.start_load_balancer()
    name = made.proxy + ("-dual" if made.network.dual else "") + ("-replaced" if choice.replace else "")
    name += "" if made.cni_name == DEFAULT_CNI else f"-{made.cni_name}"
    folder = STORE / "reports" / name
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    replacements = Replacements(made, folder / "replacements.log") if choice.replace else None
    with replacements or nullcontext():
        specs = _run(made, choice, folder)
        seconds = round(time.monotonic() - began)
    if not specs:
        raise E2EError(f"no spec matches {choice.focus}")
    print(f"\n{results.table(specs)}\n\n{made.proxy}, {RELEASE}, {NODES} nodes: {seconds} s")
    for spec in specs:
        if spec.state != "passed":
            print(f"{spec.state}: {spec.name}: {spec.why[:300]}")
    if record:
        about = {"proxy": made.proxy, "dual": made.network.dual, "release": RELEASE, "nodes": NODES}
        about |= {"seconds": seconds, "processes": choice.processes}
        about |= {"cni": made.cni_name, "fastPath": made.fast_path()}
        if replacements:
            about["replacements"] = [asdict(each) for each in replacements.made]
        if choice.focus != FOCUS:
            # The outcome of some specs replaces only theirs, and their time is not that of all.
            about |= results.times(name)
            all_specs = results.replaced(name, specs)
        else:
            # Results of specs that this run leaves out are those of another run. Others no longer exist.
            all_specs = results.replaced(name, specs, kept="|".join(left_out(choice.balanced, made.cni.policies)))
        print(f"written: {results.save(name, all_specs, about)}")
    if replacements:
        replacements.require_success()
    failed = results.unexpected(specs, KNOWN.get(name, {}))
    return 1 if failed else 0


def left_out(balanced: bool, policies: bool = False) -> list[str]:
    """The regular expressions of the names of specs that do not run.

    ``policies``: the cluster enforces NetworkPolicies.
    """
    run_too = (*(BALANCED if balanced else ()), *((_NEEDS_POLICIES,) if policies else ()))
    return [pattern for why, pattern in LEFT_OUT.items() if why not in run_too]


def _run(made: clusters.Cluster, choice: Choice, folder: Path) -> list[results.Spec]:
    report, log = folder / "report.json", folder / "e2e.log"
    report.unlink(missing_ok=True)
    focus = DUAL_FOCUS if made.network.dual and choice.focus == FOCUS else choice.focus
    skip = "|".join([*left_out(choice.balanced, made.cni.policies), *([] if made.network.dual else [DUAL])])
    command = [
        *("nice", "-n", "10", "nsenter", f"--net=/run/netns/{CONTROL}", str(PROGRAMS / "ginkgo"), "run"),
        *(f"--procs={choice.processes}", "--no-color", f"--timeout={_LIMIT}s", "--silence-skips"),
        *(f"--focus={focus}", f"--skip={skip}", f"--output-dir={folder}", f"--json-report={report.name}"),
        *(str(PROGRAMS / "e2e.test"), "--", f"--kubeconfig={made.kubeconfig}", "--provider=skeleton"),
        *(f"--kubectl-path={PROGRAMS / 'kubectl'}", f"--num-nodes={NODES}", "--delete-namespace=true"),
    ]
    print(f"specs run, {choice.processes} at once; output in {log}", flush=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=folder
        )
        try:
            process.wait(_LIMIT + 300)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if not report.exists():
        lines = log.read_text(errors="replace").strip().splitlines()
        raise E2EError(f"e2e.test wrote no report: {lines[-1] if lines else 'no output'} ({log})")
    return results.read_report(report.read_text())
