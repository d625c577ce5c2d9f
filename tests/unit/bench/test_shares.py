# SPDX-License-Identifier: Apache-2.0
"""Where a load's CPU time goes: how a sample of perf is classified."""

from __future__ import annotations

import pytest

from bench.shares import ASKED, OTHERS, PROGRAM, kind, samples, table


@pytest.mark.parametrize(
    ("chain", "counted"),
    [
        (["tcp_ack", "tcp_rcv_established", "tcp_v4_rcv", "process_backlog", "handle_softirqs"], "TCP"),
        (["fib_table_lookup", "ip_route_input_slow", "ip_rcv", "process_backlog"], "routing and forwarding"),
        (["jhash", "bpf_prog_417e38b0dbd78af6_send_by_cache", "cls_bpf_classify", "tcf_classify"], "the BPF programs"),
        (["cls_bpf_classify", "tcf_classify", "__netif_receive_skb_core.constprop.0"], "the programs' call"),
        (["__siphash", "hash_conntrack_raw", "nf_conntrack_in", "nf_hook_slow", "ip_rcv"], "conntrack"),
        (["nf_conntrack_hash_check_insert", "bpf_ct_insert_entry", "bpf_prog_0123_open_flow"], ASKED),
        (["main", "[unknown]"], PROGRAM),
    ],
)
def test_a_sample_is_counted_as_the_nearest_that_has_a_name(chain: list[str], counted: str) -> None:
    assert kind(chain) == counted


def test_a_timer_interrupt_counts_for_the_interrupted_code() -> None:
    timer = ["handle_softirqs", "__irq_exit_rcu", "sysvec_apic_timer_interrupt", "asm_sysvec_apic_timer_interrupt"]
    assert kind([*timer, "_copy_to_iter", "tcp_recvmsg"]) == "copying"


PERF = """\
iperf3
\tffffffff81a2b3c4 _copy_to_iter
\tffffffff81a2b3c4 tcp_recvmsg_locked

swapper
\tffffffff81a2b3c4 pv_native_safe_halt

ksoftirqd/1
\tffffffff81a2b3c4 process_backlog

iperf3
\t    7f0000001234 [unknown]
"""


def test_samples_are_those_of_the_load_and_of_the_kernels_thread() -> None:
    found = samples(PERF.splitlines(), ["iperf3"])
    assert found == {"copying": 1, OTHERS: 1, "devices and their queues": 1, PROGRAM: 1}


def test_a_column_for_each_contender_and_a_sum_without_other_tasks() -> None:
    found = {"none": [{"TCP": 10.0, OTHERS: 7.0}], "ours": [{"TCP": 10.0, "the BPF programs": 2.0}] * 3}
    lines = list(table(found, "kB"))
    assert lines[0] == "| nanoseconds for one kB | no proxy | pyebpf-proxy (defaults) |"
    assert lines[2:4] == ["| the BPF programs | – | 2.00 |", "| TCP | 10.0 | 10.0 |"]
    assert lines[-1] == "| all but that | 10.0 | 12.0 |"
