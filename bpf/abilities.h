/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What the helpers of this kernel can do, probed before the programs are loaded
 * (pyebpf_proxy/datapath/loader/abilities.py).  A constant: the verifier removes the branch that is not taken,
 * so it never sees a helper that the kernel does not have.
 */
#ifndef PEP_ABILITIES_H
#define PEP_ABILITIES_H

struct abilities {
	__u8 loop;		/* bpf_loop (Linux 5.17) */
	__u8 set_retval;	/* bpf_set_retval in socket programs (5.18): a refused connect returns the right error */
	__u8 coarse_clock;	/* bpf_ktime_get_coarse_ns (5.11) */
	__u8 socket_storage;	/* bpf_sk_storage_get in socket programs and in tc */
};

const volatile struct abilities abilities SEC(".rodata") = {
	.loop = 1,
	.set_retval = 1,
	.coarse_clock = 1,
	.socket_storage = 1,
};

/* Without bpf_loop the verifier follows each iteration of a loop, so scans are no longer than this. */
#define SHORT_SCAN 64

/* The callers need seconds only. The coarse clock has the resolution of a tick, and costs a tenth. */
static __always_inline __u64 coarse_now(void)
{
	return abilities.coarse_clock ? bpf_ktime_get_coarse_ns() : bpf_ktime_get_ns();
}

#endif
