/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * How a choice is carried out: the direct lane writes the kernel's conntrack
 * entry, the netfilter lane hands the choice to our nft table.  After skb.h or xdp.h.
 */
#ifndef PEP_LANES_H
#define PEP_LANES_H

#include "conntrack.h"
#include "route.h"

/* REASON_UNSPECIFIED: the direct lane can take it. */
static __always_inline enum reason why_netfilter(const struct packet *p, const struct backend *b)
{
	if (p->protocol == SCTP)
		return LANE_SCTP;
	if (b->lane == NETFILTER)
		return LANE_BACKEND_OUTSIDE;
	return REASON_UNSPECIFIED;
}

static __always_inline bool only_said(const struct backend *b, const struct creation *c)
{
	__u32 key = 0;
	struct dry_result *said = bpf_map_lookup_elem(&dry_results, &key);

	if (said) {
		said->backend = b->id;
		said->masqueraded = c->masquerade_wanted;
		__builtin_memcpy(said->masquerade, &c->masquerade, 16);
	}
	count(NEW_FLOW_DIRECT);
	return true;
}

/* True: the packet goes on. False: it is dropped, for `reason`. */
static __always_inline bool direct_lane(struct context *ctx, const struct packet *p, const struct entitlement *e,
					const struct backend *b, __u32 device, enum reason *reason)
{
	struct creation c = { .masquerade_wanted = e->masquerade };

	if (e->masquerade && !masquerade_address(ctx, p, b, device, &c.masquerade)) {
		netfilter_lane(ctx, p, e, b, LANE_NO_ROUTE);
		return true;
	}
	if (settings.dry_run)
		return only_said(b, &c);
	switch (create_flow(ctx, p, b, &c)) {
	case CREATED:
		say_opened(ctx, p, e->masquerade);
		decided(ctx, p, e, b, NEW_FLOW_DIRECT);
		return true;
	case EXISTS_ALREADY:
		decided(ctx, p, e, b, INSERT_RACE);
		return true;
	case CONNTRACK_FULL:
		*reason = DROP_CONNTRACK_FULL;
		return false;
	case INSERT_FAILED:
		*reason = DROP_INSERT_FAILED;
		return false;
	default:
		*reason = DROP_NAT_FAILED;
		return false;
	}
}

#endif
