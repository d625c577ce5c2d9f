/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Run by the agent once or twice a second: removes finished flows from the flow table and requests promotions. */
#ifndef PEP_SWEEP_H
#define PEP_SWEEP_H

#include "young.h"

#define YOUNG_NS (2 * NANOSECONDS)		/* flows that live longer are promoted */
#define MOVED_NS (NANOSECONDS / 2)		/* the same, after a change of routes, devices or neighbours */
#define CLOSING_NS NANOSECONDS
#define UNANSWERED_NS (5 * NANOSECONDS)		/* TCP: an unanswered SYN is retransmitted by then */
#define ENDING_NS (4 * NANOSECONDS)		/* a closing flow that still has traffic */
#define UDP_IDLE_NS (30 * NANOSECONDS)
#define UNUSED_NS (2 * NANOSECONDS)
#define KERNEL_TCP_NS (3600 * NANOSECONDS)
#define KERNEL_CLOSED_NS (10 * NANOSECONDS)	/* TCP: after the last packet, if a FIN or RST was seen */
#define KERNEL_PRESSED_NS (10 * NANOSECONDS)
#define GIVEN_UP_SECONDS 180	/* TCP sends a segment again after 2 minutes at the latest */
#define NO_ANSWER_SECONDS 10
#define MASQUERADED_NS (24 * KERNEL_TCP_NS)	/* kube-proxy's timeout of established connections in conntrack */

struct sweep {
	struct sweep_result found;
	__u64 now;
	__u64 udp_idle;		/* a young UDP flow ends when it was idle for this long */
	__u32 generation;	/* of fast_path */
	__u32 draining;
	__u32 pressed;		/* half of the table is in use */
	__u32 crowded;		/* three eighths of it by young flows, whose endpoints nothing else knows */
	__u32 from;		/* promotions are requested from this entry on, counted from 1 */
	__u32 anew;		/* the agent has started: what its predecessor was asked for may not be done */
	__u32 full_at;		/* the entry at which the queue was full; 0: it was not */
};

/* After how much time without a packet UDP flows end, by how many of their elements are in use. */
static __always_inline __u64 idle_limit(bool crowded, bool half_full)
{
	return crowded ? 2 * NANOSECONDS : half_full ? 10 * NANOSECONDS : UDP_IDLE_NS;
}

/*
 * After how much time without a packet a young UDP flow ends, if `limit` is that of the others.  As long as conntrack
 * would keep it, if there is space: longer if the flow was used again, and is answered.
 */
static __always_inline __u64 udp_idle_ns(__u64 limit, __u8 first_counted, bool answered)
{
	bool again = first_counted == RENEWED && answered;

	return limit == UDP_IDLE_NS && again ? settings.udp_stream_seconds * NANOSECONDS : limit;
}

/* Nanoseconds from `then` to the start of the sweep; 0 if `then` is later: flows start and continue during a sweep. */
static __always_inline __u64 since(const struct sweep *s, __u64 then)
{
	return s->now > then ? s->now - then : 0;
}

/*
 * True if the flow is masqueraded to a port of the range for young flows.  While conntrack has the flow, only its
 * entries in the table keep a young flow from taking the port.  Otherwise the replies of both would go to the
 * young flow's client.
 */
static __always_inline bool holds_snat_port(const struct flow_key *key, const struct flow_rewrite *a, bool reply)
{
	const __u8 *client = reply ? a->destination : key->source, *snat = reply ? key->destination : a->source;
	__u16 client_port = reply ? a->destination_port : key->source_port;
	__u16 port = reply ? key->destination_port : a->source_port;
	const __u64 *x = (const void *)client, *y = (const void *)snat;

	return port >= settings.snat_port_min && port <= settings.snat_port_max &&
	       ((x[0] ^ y[0]) | (x[1] ^ y[1]) | (client_port ^ port));
}

/* True if a reply was sent by the table, or was seen to leave netfilter. */
static __always_inline bool is_answered(const struct flow *f, const struct flow *other)
{
	const struct flow *reply = f->reply ? f : other;

	return reply && (reply->packets || reply->confirmed_until);
}

/*
 * A RST ends both directions.  conntrack knows only the sequence numbers of packets that it has seen, so it treats the
 * RST as one that may be forged, and keeps the entry ESTABLISHED for ten seconds.  A new connection with the same ports
 * would follow that entry to the old endpoint.  The flow table has seen the numbers of all packets.
 */
static __always_inline bool flow_was_reset(const struct flow_key *key, const struct flow *f, const struct flow *other)
{
	return key->protocol == TCP && other &&
	       (f->closing == CLOSING_IN_SEQUENCE || other->closing == CLOSING_IN_SEQUENCE);
}

/*
 * One side of a kernel's flow has sent packets for a while, got no acknowledgement of the last one, and sends no more:
 * the other side has vanished.  conntrack would keep the entry for nf_conntrack_tcp_timeout_established, a day, as it
 * cannot judge the sequence numbers.  Without the fast path it is nf_conntrack_tcp_timeout_max_retrans, five minutes.
 */
static __always_inline bool one_side_has_vanished(const struct flow_key *key, const struct flow *f,
						  const struct flow *other, __u64 idle)
{
	const struct flow *sender = f, *silent = other;

	if (key->protocol != TCP || !other || idle <= GIVEN_UP_SECONDS * NANOSECONDS)
		return false;
	if (other->last_seen > f->last_seen) {
		sender = other;
		silent = f;
	}
	/* A keepalive probe repeats an old number, but if it is answered, both sides were seen at the same time. */
	return sender->last_seen - silent->last_seen > NO_ANSWER_SECONDS * NANOSECONDS && silent->acknowledged &&
	       sender->sent_until != (__u16)silent->acknowledged;
}

/*
 * Two kinds of flows must stay while conntrack may have them.  If a program does not look it up, an answered UDP flow:
 * its next datagram would open a flow to any endpoint.  And a flow that holds a source port: a young flow could take
 * the port.  That also holds while one side has closed, and the other one has not answered yet.
 */
static __always_inline bool kernel_flow_is_stale(const struct flow_key *key, const struct flow_rewrite *a,
						 const struct flow *f, const struct flow *other, __u64 idle, bool pressed)
{
	bool udp = key->protocol == UDP, reserves = holds_snat_port(key, a, f->reply);

	/* An entry without its opposite direction is a leftover. */
	if (!other)
		return idle > (pressed ? UNUSED_NS : KERNEL_CLOSED_NS);
	if (pressed && !reserves && !(udp && !conntrack_is_asked() && is_answered(f, other)))
		return idle > (f->packets ? KERNEL_PRESSED_NS : UNUSED_NS);
	if (udp)
		return idle > forgotten_udp_ns();
	if (reserves && !(f->closing && other->closing) && !flow_was_reset(key, f, other))
		return idle > (f->closing || other->closing || pressed || one_side_has_vanished(key, f, other, idle)
				       ? KERNEL_TCP_NS
				       : MASQUERADED_NS);
	return idle > (f->closing || other->closing ? KERNEL_CLOSED_NS : KERNEL_TCP_NS);
}

/* `f`: the client's direction of a young flow. True: it is over. */
static __always_inline bool young_flow_is_over(const struct flow_key *key, const struct flow *f,
					       const struct flow *reply, __u64 idle, const struct sweep *s)
{
	if (!reply)
		return true;
	if (key->protocol == UDP)
		return idle > udp_idle_ns(s->udp_idle, f->first_counted, all_answered(f, reply)) ||
		       (s->crowded && may_make_room(f, reply, UDP, s->now));
	/*
	 * Not if only one side has closed, or a FIN is not acknowledged: such a connection may continue, a lost packet may be
	 * sent again, or the packet may have been forged.  It is promoted, and the kernel has to end it.
	 */
	if (have_closed(f, reply) && idle > CLOSING_NS)
		return true;
	if (ends_by_reset(f, reply) && idle > (s->crowded ? CLOSING_NS : KERNEL_CLOSED_NS))
		return true;
	/*
	 * An unanswered flow ends even if the client keeps sending: no rule of netfilter, however new, would see its
	 * packets.
	 */
	return !reply->packets && (idle > UNANSWERED_NS || since(s, f->started) > UNANSWERED_NS);
}

/*
 * True for a flow that continues, which would be in conntrack by now.  Client and endpoint cannot keep it young longer
 * by what they send or do not send, even if both cooperate: only packets of kernel's flows pass netfilter again.
 */
static __always_inline bool is_due_for_promotion(const struct flow_key *key, const struct flow *f,
						 const struct flow *reply, __u64 idle, const struct sweep *s)
{
	__u64 age = since(s, f->started);

	if (key->protocol == TCP && !reply->packets)
		return false;
	if (f->closing && reply->closing && age < ENDING_NS)
		return false;
	if (s->draining)
		return true;
	/* Promoted, it would be in conntrack for minutes, with its endpoint. */
	if (ends_by_reset(f, reply))
		return idle < CLOSING_NS && age > 2 * ENDING_NS;
	if (f->closing || reply->closing)
		return idle > CLOSING_NS || age > ENDING_NS;
	/* Its links may be out of date: only a kernel's flow learns the new ones. */
	if (age < (f->generation == s->generation ? YOUNG_NS : MOVED_NS))
		return false;
	return key->protocol == TCP || (idle < YOUNG_NS && is_stream(f, reply));
}

/*
 * False: the former sweep asked for this entry before the queue was full.  Otherwise, if conntrack is full, the first
 * flows of the table would fill the queue each time.
 */
static __always_inline bool is_its_turn(const struct sweep *s)
{
	return s->found.entries >= s->from;
}

/* `requested`: 0: the queue was full. */
static __always_inline void note_request(struct sweep *s, int requested)
{
	s->found.requested += requested;
	if (!requested && !s->full_at)
		s->full_at = s->found.entries;
}

/*
 * `f`: the client's direction of a kernel's flow; `request`: CLOSE or SHORTEN.  It is requested once of each agent, as
 * long as the flow does not go on.
 */
static __always_inline bool request_end(const struct flow_key *key, struct flow *f, bool anew, __u8 request)
{
	if ((f->promote == request && !anew) || bpf_map_push_elem(&promotions, key, 0))
		return false;
	f->promote = request;
	return true;
}

/*
 * `f`: as for request_end().  Two sweeps ask for each restoration: when the first one asks, the forged packet may not
 * have reached conntrack yet.  False: the queue was full.
 */
static __always_inline bool request_restoration(const struct flow_key *key, struct flow *f, struct flow *other)
{
	if (bpf_map_push_elem(&promotions, key, 0))
		return false;
	f->promote = f->promote == RESTORE || other->promote == RESTORE ? RESTORING : NO_REQUEST;
	other->promote = NO_REQUEST;
	return true;
}

/* A global function, so that the verifier checks it once, and not for each number of entries that came before. */
__noinline int sweep_flow(const struct flow_key *entry_key, struct flow *f, struct sweep *s)
{
	struct flow_key key, other_key;
	struct flow_rewrite a;
	struct flow *other;
	bool over, reset;
	__u64 idle;
	__u32 tag;

	if (!settings.fast_path || !entry_key || !f || !s)
		return 0;
	key = *entry_key;
	a = f->rewrite;
	tag = tag_of(&key);
	s->found.entries++;
	/* The element may have been given to another flow between the two copies. */
	if (a.tag != tag || a.tag_again != tag)
		return 0;
	note_in_table(&key, f->reply, s->now);
	reply_key_of(&a, key.protocol, key.ipv6, &other_key);
	other = bpf_map_lookup_elem(&flows, &other_key);
	idle = since(s, newest(f, other));
	if (!f->young) {
		if (was_reused(&f->rewrite, tag))
			return 0;
		if (settings.conntrack_lookup && !f->reply)
			note_tracked(client_hash(&key, false), s->now);
		reset = flow_was_reset(&key, f, other);
		/* The agent reads both entries. That of the client is removed first. */
		if (reset && (f->reply || request_end(&key, f, s->anew, CLOSE))) {
			s->found.requested += !f->reply;
			return 0;
		}
		if (!f->reply && needs_restoration(f, other)) {
			if (is_its_turn(s))
				note_request(s, request_restoration(&key, f, other));
			return 0;
		}
		if (kernel_flow_is_stale(&key, &a, f, other, idle, s->pressed) && !bpf_map_delete_elem(&flows, &key))
			count(FLOW_FORGOTTEN);
		else if (!f->reply && !reset && one_side_has_vanished(&key, f, other, idle))
			s->found.requested += request_end(&key, f, s->anew, SHORTEN);
		else if (!f->reply && !reset && f->promote)
			f->promote = NO_REQUEST;
		return 0;
	}
	if (f->reply) {
		/* The other direction decides about the flow; without it this entry is a leftover. */
		if (!other && idle > CLOSING_NS && !was_reused(&f->rewrite, tag))
			bpf_map_delete_elem(&flows, &key);
		return 0;
	}
	s->found.young++;
	over = young_flow_is_over(&key, f, other, idle, s);
	/* The fields that were read may be those of another flow, which continues. */
	if (was_reused(&f->rewrite, tag) || (other && was_reused(&other->rewrite, tag_of(&other_key))))
		return 0;
	if (over) {
		s->found.ended += forget_flow(&key, &a, false, true);
		count(YOUNG_ENDED);
		return 0;
	}
	if (!other || !is_due_for_promotion(&key, f, other, idle, s))
		return 0;
	if (!is_its_turn(s))
		return 0;
	/* Requested with each sweep, until it is promoted: an agent that took an earlier request may have ended. */
	f->promote = NO_REQUEST;
	note_request(s, request_promotion(&key, &a, f));
	return 0;
}

static long sweep_entry(void *map __attribute__((unused)), const struct flow_key *entry_key, struct flow *f,
			struct sweep *s)
{
	/* The verifier does not accept the key of an element as an argument of a global function. */
	struct flow_key key = *entry_key;

	sweep_flow(&key, f, s);
	return 0;
}

struct exchange_sweep {
	__u64 now;
	__u64 idle;		/* an exchange ends when it was idle for this long */
	__u32 draining;		/* move them all to the flow table, from which they are promoted */
	__u32 used;
};

#define UNANSWERED_EXCHANGE_NS (10 * NANOSECONDS)	/* at least: a resolver may ask others first */
#define UNMOVED_NS (30 * NANOSECONDS)	/* a stream for which the table has no space; the agent's limit for promotions */

/* Global for the same reason as sweep_flow(). */
__noinline int sweep_exchange(__u32 element, struct exchange_sweep *s)
{
	const struct exchange_head *head;
	struct exchange_bucket *bucket;
	__u32 owner, clock, last_seen;
	__s32 idle, age;
	__u64 limit;

	if (!settings.fast_path || !s)
		return 0;
	bucket = bucket_with(element);
	if (!bucket || !bucket->there[WAY(element)])
		return 0;
	owner = owner_of(bucket, element);
	head = &bucket->way[WAY(element)];
	clock = exchange_clock(s->now);
	last_seen = *(volatile __u32 *)&head->last_seen;
	idle = clock - last_seen;
	age = clock - head->started;
	if ((s->draining || is_long(head, 0)) && unfold_exchange(element, owner, FOR_SWEEP))
		return 0;
	limit = udp_idle_ns(s->idle, head->first_counted, is_answered_exchange(head));
	if (!is_answered_exchange(head) && limit < UNANSWERED_EXCHANGE_NS)
		limit = UNANSWERED_EXCHANGE_NS;
	/* The client may just have used the exchange again. */
	if ((idle > (__s32)exchange_clock(limit) || (is_long(head, 0) && age > (__s32)exchange_clock(UNMOVED_NS))) &&
	    *(volatile __u32 *)&head->last_seen == last_seen && forget_exchange(element, owner))
		count(YOUNG_ENDED);
	else
		s->used++;
	return 0;
}

static long sweep_bucket(void *map __attribute__((unused)), const __u32 *number,
			 struct exchange_bucket *bucket __attribute__((unused)), struct exchange_sweep *s)
{
	__u32 first = *number * EXCHANGE_WAYS, way;

	for (way = 0; way < EXCHANGE_WAYS; way++)
		sweep_exchange(first + way, s);
	return 0;
}

/* Called before the sweep of the flow table, which also requests the promotion of what a drain has moved there. */
static __always_inline void sweep_exchanges(struct exchange_sweep_result *result, __u64 now, bool draining)
{
	struct exchange_sweep s = { .now = now, .draining = draining };

	s.idle = idle_limit(result->used > EXCHANGES / 4 * 3, result->used > EXCHANGES / 2);
	bpf_for_each_map_elem(&exchange_heads, sweep_bucket, &s, 0);
	result->used = s.used;
}

#define LASTING_NS (3 * NANOSECONDS)	/* longer than from one sweep to the next */

/* Families, as bits: their permits are extended as long as nothing voids them. */
enum lasting {
	LASTING_IPV4 = 1,
	LASTING_IPV6 = 2,
};

struct permit_sweep {
	__u64 until;
	__u32 generation;
	__u32 lasting;
};

/* The element may be given to another pair at any time.  Its time is another one then, and must not change. */
static __always_inline void extend(__u64 *until, __u64 later)
{
	__u64 before = *(volatile __u64 *)until;

	if (before && before < later)
		__sync_val_compare_and_swap(until, before, later);
}

static long sweep_permit(void *map __attribute__((unused)), const struct permit_key *key, struct permit *permit,
			 struct permit_sweep *s)
{
	if (!(s->lasting & (key->ipv6 ? LASTING_IPV6 : LASTING_IPV4)))
		return 0;
	if (*(volatile __u32 *)&permit->generation != s->generation)
		return 0;
	extend(&permit->until, s->until);
	extend(&permit->back_until, s->until);
	return 0;
}

/*
 * While conntrack is full, netfilter forwards no new flow, so no flow can renew a permit.  An expired permit is extended,
 * too, if nothing has voided it: all that its proof depends on is as it was.
 */
static __always_inline void sweep_permits(const struct fast_path *state, __u64 now, __u32 lasting)
{
	struct permit_sweep s = {
		.until = now + LASTING_NS,
		.generation = *(volatile __u32 *)&state->permit_generation,
		.lasting = lasting,
	};

	bpf_for_each_map_elem(&permits, sweep_permit, &s, 0);
}

/*
 * Requests promotions from the entry `from` on.  Returns the entry at which the queue was full, where the next sweep
 * should begin to request; 0: it was not full.  `anew`: the first sweep of an agent.  `lasting`: enum lasting.
 */
static __always_inline int sweep(__u32 from, __u32 anew, __u32 lasting)
{
	__u32 zero = 0;
	struct sweep_result *result = bpf_map_lookup_elem(&sweep_results, &zero);
	struct fast_path *state = fast_path_state();
	struct exchange_sweep_result *exchanged = bpf_map_lookup_elem(&exchange_sweeps, &zero);
	struct sweep s = { .from = from, .anew = anew };

	if (!result || !state || !exchanged)
		return 0;
	s.now = bpf_ktime_get_coarse_ns();
	if (lasting)
		sweep_permits(state, s.now, lasting);
	s.generation = *(volatile __u32 *)&state->generation;
	s.draining = state->draining;
	s.pressed = result->entries > settings.flow_quota * 2;
	/* Less than one device may have, which is half of the table. */
	s.crowded = result->young > settings.flow_quota / 4 * 3;
	/*
	 * As long as conntrack would keep the flow, or shorter when young flows fill the table.  Kernel's flows are
	 * removed first.
	 */
	s.udp_idle = idle_limit(s.crowded, result->young > settings.flow_quota / 2);
	sweep_exchanges(exchanged, s.now, s.draining);
	bpf_for_each_map_elem(&flows, sweep_entry, &s, 0);
	*(volatile __u32 *)&exchanged->when = filter_clock(s.now);
	/* The agent drains until there is no young flow: also those for which the table has no space. */
	if (s.draining)
		s.found.young += exchanged->used;
	*result = s.found;
	return s.full_at;
}

/*
 * A young flow as the agent has read it: the key of the client's direction, and its start.  The client may reuse the
 * port of a flow that has ended, and the new flow's endpoint may be another one.  A start of 0 is not compared: agents
 * of earlier versions give the key only.
 */
struct flow_read {
	struct flow_key key;
	__u64 started;
};

/* The client's direction of that flow; NULL if it is gone. */
static __always_inline struct flow *same_young_flow(const struct flow_read *read)
{
	struct flow *f = bpf_map_lookup_elem(&flows, &read->key);

	if (!f || f->reply || !f->young || (read->started && f->started != read->started))
		return NULL;
	return f;
}

/* The agent has created the conntrack entry of this flow: from now on it is a kernel flow. */
static __always_inline int promote(const struct flow_read *read)
{
	struct flow *f = same_young_flow(read), *other;
	const struct flow_key *key = &read->key;
	struct flow_key other_key;

	if (!f)
		return 0;
	reply_key_of(&f->rewrite, key->protocol, key->ipv6, &other_key);
	other = bpf_map_lookup_elem(&flows, &other_key);
	if (!other || was_reused(&f->rewrite, tag_of(key)) ||
	    was_reused(&other->rewrite, tag_of(&other_key)))
		return 0;
	if (settings.conntrack_lookup)
		note_tracked(client_hash(key, false), bpf_ktime_get_coarse_ns());
	f->confirmed_until = other->confirmed_until = 0;
	/* CLOSING_IN_SEQUENCE of a young flow may be a FIN; of a kernel's flow it is a RST. */
	f->closing = f->closing ? CLOSING : 0;
	other->closing = other->closing ? CLOSING : 0;
	other->young = 0;
	f->young = 0;
	uncount_young(f->rewrite.device_in);
	count(FLOW_PROMOTED);
	return 1;
}

/* conntrack cannot take this young flow over. From now on netfilter handles its packets. */
static __always_inline int end(const struct flow_read *read)
{
	struct flow *f = same_young_flow(read);

	if (!f || !forget_flow(&read->key, &f->rewrite, false, true))
		return 0;
	count(YOUNG_ENDED);
	return 1;
}

#endif
