# SPDX-License-Identifier: Apache-2.0
"""``cluster status``: what runs on each node, and differences between nodes."""

from __future__ import annotations

from collections import Counter

from pyebpf_proxy.cluster import agents, model
from pyebpf_proxy.cluster.agents import Asked
from pyebpf_proxy.cluster.model import View
from pyebpf_proxy.cluster.objects import AGENT, NAME, NAMESPACE, PARKED, PROXIES, is_prepared
from pyebpf_proxy.cluster.output import Finding, Output, counted

HEAD = ["NODE", "PROXY", "STATE", "RESTARTS", "VERSION", "FAST PATH", "DROPS", "BEHIND"]
KEYS = ["node", "proxy", "state", "restarts", "version", "fastPath", "drops", "behind"]


def show(found: View, asked: Asked, output: Output) -> list[Finding]:
    """Print the table. The result: what an administrator should look at."""
    # This raises ClusterError for a DaemonSet that was created by hand: the labels of nodes do not apply to it.
    wanted = model.installed_image(found)
    rows = []
    for node in found.nodes:
        pod = found.agents.get(node)
        row = [node, found.proxy(node), state(found, node), str(pod.restarts if pod else 0)]
        rows.append([*row, *agents.cells(asked.answers.get(node))])
    output.table("nodes", HEAD, rows, KEYS)
    for each in output.document["nodes"]:
        pod = found.agents.get(each["node"])
        each |= {"image": pod.image if pod else "", "agent": agents.document(asked.answers.get(each["node"]))}
    if asked.why:
        output.say(f"the agents could not be queried: {asked.why}")
    findings = [*problems(found, wanted), *agents.findings(asked)]
    output.findings(findings)
    done = sum(map(found.is_done, found.nodes))
    output.document["takenOver"] = done
    output.say(f"{done} of {counted(len(found.nodes), 'node')} served by {NAME}{f', image {wanted}' if wanted else ''}")
    return [each for each in findings if each.state != "good"]


def state(found: View, node: str) -> str:
    """Which of the two proxies serves the node, or how far its takeover is, in a few words."""
    pod, agent, parked = found.agents.get(node), found.has(node, AGENT), found.has(node, PARKED)
    if not agent and not parked:
        return "kube-proxy" if pod is None else "agent ends"
    if found.is_done(node):
        return "taken over"
    if pod is not None and pod.hopeless:
        return pod.hopeless
    if pod is None:
        return "agent is missing"
    return "agent not ready" if parked else "agent alongside kube-proxy"


def problems(found: View, wanted: str) -> list[Finding]:
    """What an administrator should look at. ``wanted``: the DaemonSet's image, or ""."""
    wrong = []
    for node in found.nodes:
        pod = found.agents.get(node)
        usable = [each for each in (pod, found.kube_proxies.get(node)) if each is not None and each.usable]
        if not usable:
            text = "no proxy runs; the programs or rules of the last one carry the traffic"
            remedy = f"kubectl -n {NAMESPACE} describe pods -l '{PROXIES}' --field-selector spec.nodeName={node}"
            wrong.append(Finding("proxy", "bad", text, remedy, node))
        elif found.has(node, PARKED) and not found.is_done(node):
            text = f"not taken over: {state(found, node)}"
            wrong.append(
                Finding(
                    "proxy", "warning", text, "pyebpf-proxy cluster install goes on, cluster rollback undoes it", node
                )
            )
        elif found.has(node, AGENT) and not found.has(node, PARKED):
            text = "both proxies run: an installation was stopped here"
            wrong.append(
                Finding(
                    "proxy", "warning", text, "pyebpf-proxy cluster install goes on, cluster rollback undoes it", node
                )
            )
    images = Counter(pod.image for node, pod in found.agents.items() if node in found.nodes and not pod.deleted)
    for image, count in sorted(images.items()):
        if image != wanted:
            text = f"{counted(count, 'node')} with {image}, the DaemonSet has {wanted or 'been deleted'}"
            wrong.append(Finding("version", "warning", text, "pyebpf-proxy cluster upgrade"))
    taken = [node for node in found.nodes if found.has(node, PARKED)]
    if taken and found.kube_proxy_set is not None and not is_prepared(found.kube_proxy_set):
        text = "its DaemonSet was rewritten, so that it runs on all nodes again (kubeadm upgrade does this)"
        wrong.append(Finding("kube-proxy", "warning", text, "pyebpf-proxy cluster install"))
    return wrong
