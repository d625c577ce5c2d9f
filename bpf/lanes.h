/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * How a choice is carried out: the direct lane writes the kernel's conntrack
 * entry, the netfilter lane hands the choice to our nft table.
 */
#ifndef PEP_LANES_H
#define PEP_LANES_H

#include "conntrack.h"
#include "route.h"

/* skb->priority: read by our nft table; the kernel resets it when it forwards. */
#define PRIORITY_BACKEND 0xEB000000
#define PRIORITY_REJECT 0xEC000001
#define BACKEND_ID_MASK 0x00FFFFFF

static __always_inline void netfilter_lane(struct __sk_buff *skb, const struct backend *b, bool masquerade,
					   enum reason why)
{
	skb->priority = PRIORITY_BACKEND | (b->id & BACKEND_ID_MASK);
	if (masquerade)
		skb->mark |= settings.masquerade_mark;
	count(NEW_FLOW_NETFILTER);
	count(why);
}

static __always_inline void reject(struct __sk_buff *skb)
{
	skb->priority = PRIORITY_REJECT;
	count(REJECT_NO_ENDPOINTS);
}

/* REASON_UNSPECIFIED: the direct lane can take it. */
static __always_inline enum reason why_netfilter(const struct packet *p, const struct backend *b)
{
	if (p->protocol == SCTP)
		return LANE_SCTP;
	if (b->lane == NETFILTER)
		return LANE_BACKEND_OUTSIDE;
	return REASON_UNSPECIFIED;
}

/* True: the packet goes on. False: it is dropped, for `reason`. */
static __always_inline bool direct_lane(struct __sk_buff *skb, const struct packet *p, const struct backend *b,
					__u32 device, bool masquerade, enum reason *reason)
{
	struct creation c = { .masquerade_wanted = masquerade };

	if (masquerade && !masquerade_address(skb, p, b, device, &c.masquerade)) {
		netfilter_lane(skb, b, masquerade, LANE_NO_ROUTE);
		return true;
	}
	switch (create_flow(skb, p, b, &c)) {
	case CREATED:
		/* Other people's rules may look at the mark. */
		if (masquerade)
			skb->mark |= settings.masquerade_mark;
		count(NEW_FLOW_DIRECT);
		return true;
	case EXISTS_ALREADY:
		count(INSERT_RACE);
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
