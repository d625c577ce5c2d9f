/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Serves a packet that may open a flow to a service: from the frontend to a verdict. */
#ifndef PEP_SERVE_H
#define PEP_SERVE_H

#include "ctx.h"
#include "young.h"

/* Defined by each main program. ---------------------------------------------------------- */

/*
 * 1: conntrack may have a flow of the client from this port to this endpoint, straight or by another Service.  The
 * replies of both would look the same, and netfilter gives a new flow another port.
 */
static __always_inline int may_have_other_flow(struct context *ctx, const struct packet *p, const struct backend *b);

/* The same for a flow with the replies of this CPU's draft, which open_young() may open if conntrack has none. */
static __noinline int may_have_replies(struct context *ctx);

/* Called for a packet that netfilter will translate. */
static __always_inline void note_handover(struct context *ctx, const struct packet *p, const struct endpoint_selection *e,
					  const struct backend *b);
/* True, and `b` filled, if the endpoint of this packet was chosen earlier: by XDP or at a socket. */
static __always_inline bool chosen_before(struct context *ctx, const struct packet *p, const struct endpoint_selection *e,
					  struct backend *b);

/*
 * conntrack has the flow of this packet, which continues unchanged.  Called only if open_flow() got `unasked`.  XDP never
 * asks: it leaves to tc what it does not open.
 */
static __noinline int continues(struct context *ctx, const struct packet *p, const struct frontend *f);

/* The same for a packet that would be dropped as the first one of a flow.  XDP only guesses. */
static __always_inline int may_continue(struct context *ctx, const struct packet *p, const struct frontend *f);

/*
 * A packet of any protocol from outside to 127.0.0.0/8.  route_localnet, which NodePorts on localhost need, lets it in
 * (service-semantics 8).  No legitimate packet on a wire looks like this: replies to flows that began on loopback go
 * to the node's own address, and translation to a loopback address happens later.
 */
static __always_inline bool goes_to_loopback(const struct packet *p)
{
	return settings.localhost_node_ports && !p->ipv6 && is_loopback4(p->destination.v4);
}

/* `e`, `b`: as in decided(). */
static __always_inline int drop_flow(struct context *ctx, const struct packet *p, const struct endpoint_selection *e,
				     const struct backend *b, enum drop_reason reason)
{
	remember_refused(p, receiving_device(ctx), e ? e->service : 0, reason);
	decided(ctx, p, e, b, reason);
	return DROPPED;
}

static __always_inline int drop_packet(struct context *ctx, const struct packet *p, enum drop_reason reason)
{
	return drop_flow(ctx, p, NULL, NULL, reason);
}

/*
 * 1, and `b` filled: the client has used this port before, and the endpoint still serves the Service.  It may have left
 * the list of endpoints for new flows, for example because it terminates.
 * A global function, so that the verifier checks it once.
 */
__noinline int keep_endpoint(const struct packet *p, const struct endpoint_selection *e, struct backend *b)
{
	return p && e && b && load_backend(p->kept, p->ipv6, b) &&
	       is_endpoint(&b->address, b->port, UDP, p->ipv6, e->service);
}

/* The first packet of a young flow, whose entries open_young() has created. */
static __always_inline int send_first(struct context *ctx, const struct packet *p, const struct endpoint_selection *e,
				      const struct backend *b)
{
	struct flow_draft *d = flow_draft();
	__u32 way = 0;

	if (!d)
		return DROPPED;
	decided(ctx, p, e, b, NEW_FLOW_FAST);
	/* The entries exist. The next program that sees the packet sends it by these entries, and counts it. */
	if (why_not_here(ctx, p, &d->there.rewrite, &way)) {
		note_first_counted(&d->key);
		return LEFT;
	}
	return rewrite_and_send(ctx, p, &d->there.rewrite, way);
}

static __always_inline int record_dry_run(const struct endpoint_selection *e, const struct backend *b)
{
	__u32 key = 0;
	struct dry_result *result = bpf_map_lookup_elem(&dry_results, &key);

	if (result) {
		result->backend = b->id;
		result->masqueraded = e->masquerade;
	}
	count(NEW_FLOW_NETFILTER);
	return LEFT;
}

/*
 * Decides about a packet that may open a flow.  `original`, if not NULL: the socket was translated to an endpoint that
 * is gone, and this is the frontend that it used.  `known`: the flow table has it as a kernel's flow.  `fast`: it may
 * become a young flow.  `unasked`: conntrack was not asked for the flow, because it has none by the filter.
 * A young flow saves the question; otherwise it is asked in any case.
 */
static __always_inline int open_flow(struct context *ctx, struct packet *p, const struct frontend *f,
				     const struct service_config *config, __u32 config_id, struct place *original,
				     bool known, bool fast, bool unasked)
{
	enum slow_path_reason slow = NOT_SLOW;
	enum drop_reason reason = NOT_DROPPED;
	struct endpoint_selection e = { .service = f->service };
	struct backend b = {};

	if (original)
		swap_destination(p, original);
	switch (decide(p, f, config, config_id, receiving_device(ctx), &e, &reason)) {
	case VERDICT_DROP:
		/* The decision is for new flows: the kernel continues this flow if it still has it. */
		if (known || (unasked && may_continue(ctx, p, f)))
			return LEFT;
		return drop_flow(ctx, p, &e, NULL, reason);
	case VERDICT_REJECT:
		if (unasked && continues(ctx, p, f))
			return LEFT;
		reject(ctx, p, &e);
		return LEFT;
	case VERDICT_PASS:
		return LEFT;
	default:
		break;
	}
	if (!(p->kept && keep_endpoint(p, &e, &b)) && !chosen_before(ctx, p, &e, &b) && !choose_backend(p, &e, &b))
		return drop_flow(ctx, p, &e, NULL, SERVICE_CONFIG_MISSING);
	if (original)
		swap_destination(p, original);
	/* Hairpin: the endpoint connects to itself and must not see its own address. */
	if (same_address(&b.address, &p->source, p->ipv6))
		e.masquerade = true;
	if (settings.dry_run)
		return record_dry_run(&e, &b);
	/*
	 * The observer notes the client of masqueraded replies, but those of a former endpoint have no record.  So the filter
	 * may not have a UDP flow whose client has sent nothing for some time.
	 */
	if (unasked && e.masquerade && p->protocol == UDP && continues(ctx, p, f))
		return LEFT;
	if (fast) {
		int opened = open_young(ctx, p, &e, &b, unasked);

		if (opened == ASK_CONNTRACK)
			opened = may_have_other_flow(ctx, p, &b) ? SLOW_NO_PORT : open_young(ctx, p, &e, &b, true);
		if (opened == ASK_PORT)
			opened = may_have_replies(ctx) ? SLOW_NO_PORT : open_young(ctx, p, &e, &b, true);
		if (opened == ASK_PORT)
			opened = SLOW_NO_PORT;
		/*
		 * Also when there is no space: the flow in the next slot of recent_flows is removed if it is complete.  After
		 * XDP, tc does that.
		 */
		if (opened == NOT_SLOW || (HOOK == AT_TC && (opened == SLOW_QUOTA || opened == SLOW_TABLE_FULL)))
			note_recent((const struct flow_key *)p, !opened);
		slow = opened == OPENED_EXCHANGE ? NOT_SLOW : opened;
		if (!slow)
			return send_first(ctx, p, &e, &b);
		if (unasked && continues(ctx, p, f))
			return LEFT;
		count_left(slow);
		e.slow = slow;
	}
	if (HOOK == AT_TC && settings.fast_path && !known && !e.masquerade &&
	    is_taken_by_young(p, &b.address, b.port, receiving_device(ctx))) {
		drop_until_promotion(p, receiving_device(ctx), e.service);
		return DROPPED;
	}
	hand_to_netfilter(ctx, p, &e, &b);
	if (HOOK == AT_TC)
		note_left(p, false);
	if (settings.fast_path && !(fast && is_proven(p, slow)))
		note_handover(ctx, p, &e, &b);
	return LEFT;
}

#endif
