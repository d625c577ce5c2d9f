# SPDX-License-Identifier: Apache-2.0
"""At which instructions a load's time is spent: how samples of perf are read and shown."""

from __future__ import annotations

from bench.instructions import busiest, samples

PERF = """\
 ffffffffc10d0263 bpf_prog_417e38b0dbd78af6_tc_ethernet
 ffffffffc10d0263 bpf_prog_417e38b0dbd78af6_tc_ethernet
 ffffffffc10d1000 bpf_prog_0123456789abcdef_find_exchange
 ffffffff81a2b3c4 _copy_to_iter
 ffffffff81a2b3c4 bpf_prog_array_free

"""

CODE = [(1, "push rbp"), (0, "mov rbp,rsp"), (2, "mov rdi,rsi"), (0, "mov eax,[rdi]"), (0, "nop"), (97, "test eax,eax")]


def test_samples_of_programs_are_counted_by_address() -> None:
    found, total = samples(PERF.splitlines())
    assert found == {(0xFFFFFFFFC10D0263, "tc_ethernet"): 2, (0xFFFFFFFFC10D1000, "find_exchange"): 1}
    assert total == 5


def test_the_busiest_instructions_are_shown_with_those_before_them() -> None:
    code = [(count, f"{number:>6}  {text}") for number, (count, text) in enumerate(CODE)]
    assert [line.split() for line in busiest(code)] == [
        ["1", "mov", "rbp,rsp"],
        ["2", "2", "mov", "rdi,rsi"],
        ["3", "mov", "eax,[rdi]"],
        ["4", "nop"],
        ["97", "5", "test", "eax,eax"],
        [],
    ]
