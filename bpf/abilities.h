/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What this kernel's helpers can do, found by trying before the programs are loaded
 * (pyebpf_proxy/datapath/loader/abilities.py).  A constant: the verifier removes the way that is not taken,
 * so it never sees a helper that the kernel does not have.
 */
#ifndef PEP_ABILITIES_H
#define PEP_ABILITIES_H

struct abilities {
	__u8 loop;		/* bpf_loop (Linux 5.17) */
	__u8 set_retval;	/* bpf_set_retval in programs of sockets (5.18): a refused connect says why */
	__u8 coarse_clock;	/* bpf_ktime_get_coarse_ns (5.11) */
	__u8 socket_storage;	/* bpf_sk_storage_get in programs of sockets and of tc */
};

const volatile struct abilities abilities SEC(".rodata") = {
	.loop = 1,
	.set_retval = 1,
	.coarse_clock = 1,
	.socket_storage = 1,
};

/* A kernel without bpf_loop reads each turn of a loop: no scan is longer there. */
#define SHORT_SCAN 64

/* Seconds are asked for: a clock that goes by the tick tells them, and costs a tenth. */
static __always_inline __u64 coarse_now(void)
{
	return abilities.coarse_clock ? bpf_ktime_get_coarse_ns() : bpf_ktime_get_ns();
}

#endif
