/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * UDP clients that use a port again.  A resolver uses each of its ports every few seconds.  As one flow, its exchanges
 * would be a stream, which is promoted and then passes netfilter after each pause.  So the query after a pause is judged
 * like that of a new flow, but keeps its endpoint, as in conntrack: the permit decides whether netfilter must see it.
 */
#ifndef PEP_RENEW_H
#define PEP_RENEW_H

#include "complete.h"
#include "exchange.h"
#include "permit.h"

/* True for a flow that is not masqueraded, and has not got another source port. */
static __always_inline bool keeps_source(const struct packet *p, const struct flow_rewrite *there)
{
	return same_bytes16(there->source, &p->source) && there->source_port == p->source_port;
}

/*
 * 1: the pair of this flow, which keeps its source, has a permit, by which a new flow would be sent like this one.
 * A global function, so that the verifier checks it once.
 */
__noinline int has_permit(const struct packet *p, const struct flow_rewrite *there, const struct flow_rewrite *reply)
{
	struct fast_path *state;
	struct flow_draft *d;
	__u64 now;

	if (!settings.fast_path || !p || !there || !reply)
		return 0;
	state = fast_path_state();
	d = flow_draft();
	if (!state || !d)
		return 0;
	now = flow_clock();
	permit_key_of(&d->permit_key, there->device_in, (const void *)there->source, (const void *)there->destination,
		      there->destination_port, UDP, p->ipv6, frontend_hash((const struct flow_key *)p, true), false);
	return !why_not_young(p, state, now) && !read_permit(d, state, now) &&
	       is_same_link(&there->out, &d->permit.out) && is_same_link(&reply->out, &d->permit.back) &&
	       same_mac(there->mac_in, d->permit.back.mac_from) && reply->device_in == d->permit.device_back &&
	       same_mac(reply->mac_in, d->permit.mac_in_back);
}

/*
 * 1: as a new flow, this query would reach no endpoint, or from another source: its Service has none, or a policy
 * forbids it or demands masquerading, or the address is no Service's any more.  This is so for new flows only
 * (service-semantics 5, 10); conntrack would continue this one.  A global function, so that the verifier checks it once.
 */
__noinline int cannot_begin_anew(const struct packet *p, const struct flow_rewrite *there)
{
	enum drop_reason reason = NOT_DROPPED;
	struct endpoint_selection e = {};
	struct service_config *config;
	struct frontend f = {};
	__u32 config_id;

	if (!p || !there)
		return 0;
	if (!find_frontend(p, &f))
		return 1;
	config = active_config(f.service, &config_id);
	if (!config || decide(p, &f, config, config_id, there->device_in, &e, &reason) != VERDICT_SERVE)
		return 1;
	return e.masquerade && keeps_source(p, there);
}

#define CLAIMED (~0ULL)		/* as confirmed_until: a program is making the flow young, or has done so */

/* From now on the entries count another exchange, of which this query is the first. */
static __always_inline void renew(struct flow *f, struct flow *reply, __u64 now)
{
	f->packets = reply->packets = 0;
	f->first_counted = RENEWED;
	/* At once, so that a sweep does not end the flow meanwhile. */
	f->started = f->last_seen = now;
	f->promote = reply->promote = NO_REQUEST;
}

/* The bucket of this client has an element for it, at least while very many flows open. */
static __always_inline bool has_room(const struct packet *p, __u64 now)
{
	const struct exchange_bucket *bucket = bucket_at(bucket_of(client_hash((const struct flow_key *)p, false)));

	return bucket && way_for_many(bucket, now) < EXCHANGE_WAYS;
}

/*
 * A query of a young flow, after a pause, or after routes, devices, neighbours or endpoints have changed, which may have
 * moved its links.  Not 0: its pair has no permit, or the packet is not plain, so the query begins a new flow, which
 * should have this backend.  0: the flow continues, or was renewed.  An answered flow that has not paused continues in
 * any case, as it would in conntrack: a rule that accepts established flows must not meet it as a new one.  So does any
 * flow that cannot begin anew.  Once it is promoted, it learns its new links.  Calls are expensive, so the caller has
 * compared the time, and the generation, which is that of now.  Global for the same reason as has_permit().
 */
__noinline __u32 judge_query(const struct packet *p, struct flow *f, __u32 generation, bool plain)
{
	struct flow *reply;
	bool kept, over;
	__u64 now;

	if (!settings.fast_path || !p || !f)
		return 0;
	now = flow_clock();
	reply = other_direction(&f->rewrite, p);
	if (!reply)
		return 0;
	kept = keeps_source(p, &f->rewrite);
	/* Only a flow that keeps its source is renewed after a pause. */
	over = kept && is_over(f, reply, now);
	if (!over && f->generation == generation)
		return 0;
	/*
	 * It entered the table because its bucket of exchanges was full.  As an exchange it costs less, and so do the flows
	 * that share its byte of the filter.  conntrack has a flow that make_young() took from it: that one stays.
	 */
	if (over && f->confirmed_until != CLAIMED && has_room(p, now) && !cannot_begin_anew(p, &f->rewrite))
		return f->backend;
	if (!plain || !kept || !has_permit(p, &f->rewrite, &reply->rewrite)) {
		if ((over || !reply->packets) && !cannot_begin_anew(p, &f->rewrite))
			return f->backend;
		request_promotion((const struct flow_key *)p, &f->rewrite, f);
		over = false;
	}
	f->generation = generation;
	if (over)
		renew(f, reply, now);
	return 0;
}

/* As judge_query(), for the exchange in this element.  The table promotes it: it becomes a stream, which is moved there. */
__noinline __u32 judge_exchange(const struct packet *p, __u32 element, __u32 generation, bool plain)
{
	struct exchange_bucket *bucket;
	struct exchange_head *head;
	struct exchange *x;
	__u64 now;
	bool over;

	if (!settings.fast_path || !p)
		return 0;
	bucket = bucket_with(element);
	x = exchange_at(element);
	if (!bucket || !x)
		return 0;
	now = flow_clock();
	head = &bucket->way[WAY(element)];
	over = exchange_is_over(head, now);
	if (!over && x->generation == generation)
		return 0;
	if (!plain || !has_permit(p, &x->there, &x->reply)) {
		if ((over || !head->replies) && !cannot_begin_anew(p, &x->there))
			return x->backend;
		if (!is_long(head, 0))
			head->queries += EXCHANGE_PACKETS + 1;
		return 0;
	}
	x->generation = generation;
	if (!over)
		return 0;
	head->queries = head->replies = 0;
	head->first_counted = RENEWED;
	head->started = head->last_seen = exchange_clock(now);
	return 0;
}

/*
 * A query of a kernel's flow that would have to pass netfilter.  1: the flow is young again.  Its conntrack entry stays
 * until it expires, with the same translation.  A stream stays the kernel's, because conntrack keeps its endpoint more
 * surely.  `last_seen`: when the client sent before.
 */
__noinline int make_young(const struct packet *p, struct flow *f, __u64 last_seen)
{
	struct flow *reply;
	__u32 device, *open;
	__u64 now, last, confirmed;

	if (!settings.fast_path || !p || !f)
		return 0;
	now = flow_clock();
	reply = other_direction(&f->rewrite, p);
	/* Without its backend, it could not keep its endpoint when it has no permit. */
	if (!reply || reply->young || !f->backend || is_stream(f, reply) || !keeps_source(p, &f->rewrite) ||
	    was_reused(&f->rewrite, tag_of(p)))
		return 0;
	last = reply->last_seen;
	/* A reply came last, and then nothing. */
	if (last < last_seen || now <= last + pause_ns(is_distant(reply)))
		return 0;
	device = f->rewrite.device_in;
	open = bpf_map_lookup_elem(&young_counts, &device);
	if (is_over_quota(open) || !has_permit(p, &f->rewrite, &reply->rewrite))
		return 0;
	/* Another CPU may have a query of the flow, too. */
	confirmed = *(volatile __u64 *)&f->confirmed_until;
	if (confirmed == CLAIMED || __sync_val_compare_and_swap(&f->confirmed_until, confirmed, CLAIMED) != confirmed)
		return 0;
	count_young(open, device);
	renew(f, reply, now);
	reply->young = 1;
	f->young = 1;
	return 1;
}

#endif
