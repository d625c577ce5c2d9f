/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Source ports that young flows must not take, because another flow has the same replies.  conntrack does not know young
 * flows, so it does not give one of the two another port.  The table's own flows are found by their keys (young.h).
 */
#ifndef PEP_TAKEN_PORTS_H
#define PEP_TAKEN_PORTS_H

#include "client_filters.h"
#include "ctx.h"

/*
 * 1: packets with this key could be for a socket of the node.  Not inline: the callers' stacks have no space for the
 * tuple.
 */
static __noinline int node_has_socket(struct context *ctx, const struct flow_key *key)
{
	struct bpf_sock_tuple tuple = {};
	struct bpf_sock *socket;
	__u32 size;

	size = tuple_of(key, &tuple);
	if (key->protocol == UDP)
		socket = bpf_sk_lookup_udp(ctx, &tuple, size, CURRENT_NETNS, 0);
	else
		socket = bpf_skc_lookup_tcp(ctx, &tuple, size, CURRENT_NETNS, 0);
	if (!socket)
		return 0;
	bpf_sk_release(socket);
	return 1;
}

/* ---- flows straight to endpoints, if conntrack cannot be asked ------------------------------- */

static __always_inline struct straight_flow *straight_slot(__u32 tag)
{
	__u32 zero = 0;
	struct straight_flows *all = bpf_map_lookup_elem(&straight_flows, &zero);

	return all ? &all->noted[tag >> 17 & (STRAIGHT_SLOTS - 1)] : NULL;
}

/* The kernel gets a SYN or a datagram of a flow straight to an endpoint. */
static __always_inline void note_straight(const struct flow_key *key)
{
	__u32 tag = tag_of(key);
	struct straight_flow *slot = straight_slot(tag);

	if (!slot)
		return;
	*(volatile __u32 *)&slot->when = filter_clock(flow_clock());
	*(volatile __u32 *)&slot->tag = tag;
}

/* The agent notes long connections again before this has passed. */
static __always_inline bool is_straight(const struct flow_key *key)
{
	__u32 tag = tag_of(key), age;
	struct straight_flow *slot = straight_slot(tag);

	if (!slot || *(volatile __u32 *)&slot->tag != tag)
		return false;
	age = filter_clock(flow_clock()) - *(volatile __u32 *)&slot->when;
	/* Another CPU's clock may be one unit ahead of this one's. */
	return (__s32)age <= (__s32)filter_clock(key->protocol == UDP ? noted_udp_ns() : NOTED_TCP_NS);
}

#endif
