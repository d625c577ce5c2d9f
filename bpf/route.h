/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The address that the MASQUERADE target would take for a flow to this backend. After skb.h or xdp.h. */
#ifndef PEP_ROUTE_H
#define PEP_ROUTE_H

#include "backend.h"

static __always_inline bool masquerade_by_device(__u32 device, const union address *next_hop, bool ipv6,
						 union address *out)
{
	if (ipv6) {
		struct masquerade6_key key = { .prefix_length = 32 + 128, .device = device };
		struct address6 *found;

		__builtin_memcpy(key.address, next_hop, 16);
		found = bpf_map_lookup_elem(&masquerade6, &key);
		if (!found)
			return false;
		__builtin_memcpy(out, found->address, 16);
	} else {
		struct masquerade4_key key = { .prefix_length = 32 + 32, .device = device };
		struct address4 *found;

		__builtin_memcpy(key.address, next_hop, 4);
		found = bpf_map_lookup_elem(&masquerade4, &key);
		if (!found)
			return false;
		__builtin_memcpy(out, found->address, 4);
	}
	return true;
}

/* 0: this packet can't be routed to the backend by forwarding; the kernel must find out what becomes of it. */
static __noinline int masquerade_address(struct context *ctx, const struct packet *p, const struct backend *b,
					 __u32 device, union address *out)
{
	struct bpf_fib_lookup fib = {};
	union address next_hop = {};
	long result;

	if (!p || !b || !out)
		return 0;
	fib.ifindex = device;
	fib.l4_protocol = p->protocol;
	fib.sport = bpf_htons(p->source_port);
	fib.dport = bpf_htons(b->port);
	if (p->ipv6) {
		fib.family = AF_INET6;
		__builtin_memcpy(fib.ipv6_src, &p->source, 16);
		__builtin_memcpy(fib.ipv6_dst, &b->address, 16);
	} else {
		fib.family = AF_INET;
		fib.ipv4_src = p->source.v4;
		fib.ipv4_dst = b->address.v4;
	}
	result = bpf_fib_lookup(ctx, &fib, sizeof(fib), 0);
	if (result != BPF_FIB_LKUP_RET_SUCCESS && result != BPF_FIB_LKUP_RET_NO_NEIGH &&
	    result != BPF_FIB_LKUP_RET_FRAG_NEEDED)
		return 0;
	if (p->ipv6)
		/* Source selection looks at the destination, not at the next hop. */
		next_hop = b->address;
	else if (fib.family == AF_INET)
		next_hop.v4 = fib.ipv4_dst;
	if (masquerade_by_device(fib.ifindex, &next_hop, p->ipv6, out))
		return 1;
	own_address(out, p->ipv6);
	return p->ipv6 ? out->words[0] || out->words[1] || out->words[2] || out->words[3] : out->v4 != 0;
}

#endif
