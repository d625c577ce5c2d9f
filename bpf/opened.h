/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Where XDP notes which flow it has opened, and tc finds it. */
#ifndef PEP_OPENED_H
#define PEP_OPENED_H

#include "flow_cache.h"

static __always_inline struct xdp_opened *opened_at(const struct packet *p)
{
	__u32 number = flow_tag(p) * 0x9e3779b1U >> (32 - OPENED_BITS);

	return bpf_map_lookup_elem(&xdp_opened, &number);
}

static __always_inline bool is_same_flow(const struct flow_key *key, const struct packet *p)
{
	const __u64 *x = (const void *)key, *y = (const void *)p;

	return !((x[0] ^ y[0]) | (x[1] ^ y[1]) | (x[2] ^ y[2]) | (x[3] ^ y[3]) | (x[4] ^ y[4]));
}

_Static_assert(sizeof(struct flow_key) == 5 * sizeof(__u64), "compared in words");

#endif
