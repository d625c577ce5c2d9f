/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* A packet that may open a flow to a service: from the frontend to a verdict.  After skb.h or xdp.h. */
#ifndef PEP_SERVE_H
#define PEP_SERVE_H

#include "lanes.h"

/* What each main function says of itself. ---------------------------------------------- */

/* The device as the IP layer will see it. */
static __always_inline __u32 ip_device(struct context *ctx);
/* True, and `b` filled: somebody has chosen for this packet already. */
static __always_inline bool chosen_before(struct context *ctx, const struct packet *p, const struct entitlement *e,
					  struct backend *b);

/*
 * Of any protocol, from elsewhere to 127.0.0.0/8.  route_localnet, which localhost NodePorts are served with,
 * lets it in (service-semantics 8).  Nothing lawful looks like this on a wire: answers to flows that began on
 * loopback come to the node's own address, and translation to a loopback address follows after this.
 */
static __always_inline bool goes_to_loopback(const struct packet *p)
{
	return settings.localhost_node_ports && !p->ipv6 && is_loopback4(p->destination.v4);
}

/* `e`, `b`: as in decided(). */
static __always_inline int drop_flow(struct context *ctx, const struct packet *p, const struct entitlement *e,
				     const struct backend *b, enum reason reason)
{
	remember_refused(p, receiving_device(ctx), e ? e->service : 0, reason);
	decided(ctx, p, e, b, reason);
	return DROPPED;
}

static __always_inline int drop_packet(struct context *ctx, const struct packet *p, enum reason reason)
{
	return drop_flow(ctx, p, NULL, NULL, reason);
}

/* SCTP entries can't be looked up from here; what opens a flow there is an INIT. */
static __always_inline enum existence flow_of(struct context *ctx, const struct packet *p, const struct frontend *f,
					      const struct table *table)
{
	if (!settings.conntrack_lookup || p->protocol == SCTP)
		return NO_FLOW;
	return flow_exists(ctx, p, f->service, table->any_endpoints);
}

/* There is no flow yet. `asked`: as in serve() of tc. */
static __always_inline int open_flow(struct context *ctx, struct packet *p, const struct frontend *f,
				     const struct table *table, __u32 table_id, struct place *asked)
{
	enum reason reason = REASON_UNSPECIFIED;
	struct entitlement e = { .service = f->service };
	struct backend b = {};

	if (asked)
		swap_destination(p, asked);
	switch (decide(p, f, table, table_id, receiving_device(ctx), &e, &reason)) {
	case VERDICT_DROP:
		return drop_flow(ctx, p, &e, NULL, reason);
	case VERDICT_REJECT:
		reject(ctx, p, &e);
		return LEFT;
	case VERDICT_PASS:
		return LEFT;
	default:
		break;
	}
	if (!chosen_before(ctx, p, &e, &b) && !choose_backend(p, &e, &b))
		return drop_flow(ctx, p, &e, NULL, TABLE_MISSING);
	if (asked)
		swap_destination(p, asked);
	/* Hairpin: the endpoint calls itself and must not see its own address. */
	if (same_address(&b.address, &p->source, p->ipv6))
		e.masquerade = true;
	reason = settings.direct_lane ? why_netfilter(p, &b) : LANE_FORCED;
	if (reason) {
		netfilter_lane(ctx, p, &e, &b, reason);
		return LEFT;
	}
	if (!direct_lane(ctx, p, &e, &b, ip_device(ctx), &reason))
		return drop_flow(ctx, p, &e, &b, reason);
	return LEFT;
}

#endif
