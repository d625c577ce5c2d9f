/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Young flows: known to the programs alone from their first packet on, because their pair has a permit. */
#ifndef PEP_YOUNG_H
#define PEP_YOUNG_H

#include "backend.h"
#include "ctx.h"
#include "flow_send.h"
#include "permit.h"
#include "refused.h"
#include "taken_ports.h"

#define SNAT_PORT_TRIES 4

/* How a checksum changes with these words. */
static __always_inline __u32 sum_of_change(const __u8 *from, const __u8 *to, const __u32 words)
{
	const __u32 *before = (const void *)from, *after = (const void *)to;
	__u32 i, sum = 0;

	for (i = 0; i < words; i++)
		sum = add(sum, add(~before[i], after[i]));
	return sum;
}

/* How the rewrite changes the checksums: from the packet's addresses and ports to the new ones. */
static __always_inline void set_sums(struct flow_rewrite *a, const struct flow_key *from)
{
	__u32 ports_before = bpf_htonl((__u32)from->source_port << 16 | from->destination_port);
	__u32 ports_after = bpf_htonl((__u32)a->source_port << 16 | a->destination_port);

	if (from->ipv6)
		a->address_sum = add(sum_of_change(from->source, a->source, 4),
				     sum_of_change(from->destination, a->destination, 4));
	else
		a->address_sum = add(sum_of_change(from->source, a->source, 1),
				     sum_of_change(from->destination, a->destination, 1));
	a->port_sum = ports_before == ports_after ? 0 : add(~ports_before, ports_after);
}

static __always_inline void stamp(struct flow *f, const struct flow_key *key, __u32 generation, __u64 now)
{
	f->rewrite.tag = f->rewrite.tag_again = tag_of(key);
	f->generation = generation;
	f->started = f->last_seen = now;
}

/*
 * Completes the draft, in which `key` and the translation in `there` are set.  The entry of the replies follows from
 * them.
 */
static __always_inline void complete_draft(struct flow_draft *d, __u32 generation, __u64 now)
{
	struct flow_rewrite *there = &d->there.rewrite, *reply = &d->reply.rewrite;

	reply_key_of(there, d->key.protocol, d->key.ipv6, &d->reply_key);
	__builtin_memcpy(reply->source, d->key.destination, 16);
	__builtin_memcpy(reply->destination, d->key.source, 16);
	reply->source_port = d->key.destination_port;
	reply->destination_port = d->key.source_port;
	set_sums(there, &d->key);
	reply->address_sum = ~there->address_sum;
	reply->port_sum = there->port_sum ? ~there->port_sum : 0;
	d->reply.reply = 1;
	d->reply.service = d->there.service;
	d->reply.backend = d->there.backend;
	stamp(&d->there, &d->key, generation, now);
	stamp(&d->reply, &d->reply_key, generation, now);
}

/*
 * Source ports are allocated in turn: a port that the endpoint may still have in TIME_WAIT is reused as late as
 * possible.
 */
static __always_inline __u16 next_snat_port(void)
{
	__u32 range = settings.snat_port_max - settings.snat_port_min + 1;
	__u32 zero = 0, *next = bpf_map_lookup_elem(&recent_next, &zero);
	__u32 turn = next ? (*next += RECENT_FLOWS) / RECENT_FLOWS : bpf_get_prandom_u32();

	return settings.snat_port_min + (turn + (bpf_get_smp_processor_id() & 1) * (range / 2)) % range;
}

/* True if this entry of replies belongs to the flow of the draft. */
static __always_inline bool is_own_reply(const struct flow *f, const struct flow_draft *d)
{
	const struct flow_rewrite *a = &f->rewrite, *b = &d->reply.rewrite;

	return same_bytes16(a->source, b->source) && same_bytes16(a->destination, b->destination) &&
	       a->source_port == b->source_port && a->destination_port == b->destination_port;
}

#define OPENED_EXCHANGE (-1)
#define ASK_CONNTRACK (-2)
#define ASK_PORT (-3)

/*
 * Inserts both entries of a complete draft.  That of the replies comes first, so that a packet never finds only half of
 * a flow.  ASK_PORT: as in open_young().  Else the result is an enum slow_path_reason.
 */
static __always_inline int insert_young(struct context *ctx, struct flow_draft *d, bool masquerade, __u32 *open)
{
	bool other_port = masquerade;
	__u64 now = d->there.started;
	const struct flow *taken;
	int i;

	note_in_table(&d->key, false, now);
	for (i = 0; i < SNAT_PORT_TRIES; i++) {
		if (other_port) {
			d->there.rewrite.source_port = next_snat_port();
			complete_draft(d, d->there.generation, now);
			/* netfilter uses none of these ports to masquerade, but the client itself may use any of them. */
			if (!masquerade)
				return ASK_PORT;
			if (node_has_socket(ctx, &d->reply_key))
				continue;
		}
		note_in_table(&d->reply_key, true, now);
		if (d->key.protocol != UDP || find_exchange(&d->reply_key) < 0) {
			if (!bpf_map_update_elem(&flows, &d->reply_key, &d->reply, BPF_NOEXIST))
				break;
			taken = bpf_map_lookup_elem(&flows, &d->reply_key);
			if (!taken)
				return SLOW_TABLE_FULL;
			/* Another CPU has just opened this flow, or it is removing an older one. */
			if (is_own_reply(taken, d)) {
				if (bpf_map_lookup_elem(&flows, &d->key))
					return NOT_SLOW;
				/* A leftover of a kernel's flow, which conntrack has forgotten. */
				if (!taken->young && now > taken->last_seen + EXCHANGE_NS)
					bpf_map_delete_elem(&flows, &d->reply_key);
				continue;
			}
		} else if (find_exchange(&d->key) >= 0) {
			return NOT_SLOW;
		}
		/*
		 * The client uses this port with another Service of the endpoint: take another port, as netfilter does.
		 */
		if (!settings.snat_port_min)
			return SLOW_NO_PORT;
		other_port = true;
	}
	if (i == SNAT_PORT_TRIES)
		return SLOW_NO_PORT;
	return insert_client_entry(&d->key, &d->there, &d->reply_key, open) ? NOT_SLOW : SLOW_TABLE_FULL;
}

/* ---- exchanges ------------------------------------------------------------------------------ */

/* In two windows of struct exchange_rate. */
#define MANY_FULL 512		/* about a thousand per second */
#define MANY_OPENED 4096	/* about ten thousand per second: all elements are used within a second or two */

/* Counts a new flow.  True: many flows open, so this one replaces a complete exchange.  `full`: its bucket is full. */
static __always_inline bool opens_many(bool full, __u64 now)
{
	__u32 zero = 0;
	struct exchange_rate *r = bpf_map_lookup_elem(&exchange_rates, &zero);
	__u64 window = now >> 28;

	if (!r)
		return false;
	if (r->window != window) {
		bool next = r->window + 1 == window;

		r->opened_before = next ? r->opened : 0;
		r->full_before = next ? r->full : 0;
		r->opened = r->full = 0;
		r->window = window;
	}
	r->opened += 1;
	r->full += full;
	return r->opened + r->opened_before > MANY_OPENED || (full && r->full + r->full_before > MANY_FULL);
}

/* Writes the flow of a complete draft into an element that the caller has claimed. */
static __always_inline void write_exchange(struct exchange *x, struct exchange_bucket *bucket, __u32 way,
					   struct flow_draft *d)
{
	struct exchange_head *head = &bucket->way[WAY(way)];
	__u32 there = d->there.rewrite.tag, reply = d->reply.rewrite.tag;

	empty_exchange(x, bucket, way);
	/* Readers find the flow by its tags, so these are written last. */
	d->there.rewrite.tag = d->reply.rewrite.tag = 0;
	x->there = d->there.rewrite;
	x->reply = d->reply.rewrite;
	x->generation = d->there.generation;
	x->service = d->there.service;
	x->backend = d->there.backend;
	x->ipv6 = d->key.ipv6;
	d->there.rewrite.tag = there;
	d->reply.rewrite.tag = reply;
	head->started = head->last_seen = exchange_clock(d->there.started);
	head->queries = d->there.packets;
	head->replies = 0;
	head->first_counted = d->there.first_counted;
	head->distant = is_distant(&d->reply);
	read_barrier();
	write_tags(x, bucket, way, there, reply);
}

/*
 * Enters the flow of the draft, which is complete.  0: no element is available, so the flow has to enter the flow table.
 * Global for the same reason as judge_syn().
 */
__noinline int enter_exchange(__u64 now)
{
	struct exchange_bucket *bucket;
	struct exchange_head *head;
	struct flow_draft *d;
	struct exchange *x;
	__u32 owner, way;
	__u64 hash;
	bool many;

	if (!settings.fast_path)
		return 0;
	d = flow_draft();
	if (!d)
		return 0;
	hash = client_hash(&d->key, false);
	bucket = bucket_at(bucket_of(hash));
	/* find_in_bucket() compares the key of one way only. */
	if (!bucket || way_with(bucket->there, d->there.rewrite.tag) < EXCHANGE_WAYS ||
	    way_with(bucket->reply, d->reply.rewrite.tag) < EXCHANGE_WAYS)
		return 0;
	way = way_with(bucket->there, 0);
	many = opens_many(way == EXCHANGE_WAYS, now);
	if (many)
		way = way_for_many(bucket, now);
	if (way >= EXCHANGE_WAYS)
		return 0;
	/* A flow of the table may have the same replies: insert_young() then gives this one another source port. */
	if (may_be_in_table(hash, hash, now) && bpf_map_lookup_elem(&flows, &d->reply_key))
		return 0;
	x = exchange_at(bucket_of(hash) * EXCHANGE_WAYS + way);
	head = &bucket->way[WAY(way)];
	owner = owner_of(bucket, way);
	/* Compared again: another CPU may have written the element before its owner was read. */
	if (!x || !may_have_way(bucket, way, now, many) || !claim_exchange(head, owner))
		return 0;
	write_exchange(x, bucket, way, d);
	release_exchange(head, owner, true);
	return 1;
}

/* The reply entry of a young flow; NULL if the table has none with this key. */
static __always_inline struct flow *young_reply_entry(const struct flow_key *reply_key)
{
	struct flow *f = bpf_map_lookup_elem(&flows, reply_key);

	return f && f->young && f->reply && !was_reused(&f->rewrite, tag_of(reply_key)) ? f : NULL;
}

/*
 * The same for UDP.  An exchange is moved to the table.  In a flood of new flows every lookup in the table waits for
 * memory, and the filter saves it.
 */
static __always_inline struct flow *young_udp_reply_entry(const struct flow_key *reply_key, __u32 device)
{
	__u64 client = client_hash(reply_key, true);
	struct flow *f = NULL;

	if (may_be_in_table(client, client, flow_clock()))
		f = young_reply_entry(reply_key);
	if (!f && unfold_found(find_reply_exchange(reply_key, client), device))
		f = young_reply_entry(reply_key);
	return f;
}

#define HALF_CLOSED_NS (5 * NANOSECONDS)

/*
 * One side has closed, and nothing came since.  The FIN of the other side may have been overtaken by its data.  The
 * agent promotes such a flow after a second.  Without an agent it would keep its port for good.
 */
static __always_inline bool is_half_closed(const struct flow *f, const struct flow *other)
{
	return (f->closing || other->closing) && flow_clock() > newest(f, other) + HALF_CLOSED_NS;
}

/*
 * Checks a flow to this endpoint that netfilter will forward with its ports unchanged.  1: a young flow, to a Service
 * of the endpoint, has the same client and endpoint ports.  Netfilter does not know that flow, so it must be promoted
 * first.  `device`: where the packet came in; 0: any, because its source address is no longer the client's.
 */
static __noinline int is_taken_by_young(const struct packet *p, const union address *endpoint, __u16 port, __u32 device)
{
	struct flow_key reply_key;
	struct flow *f, *client;

	if (!p || !endpoint)
		return 0;
	key_of_replies(p, endpoint, port, &reply_key);
	f = p->protocol == UDP ? young_udp_reply_entry(&reply_key, device) : young_reply_entry(&reply_key);
	if (!f)
		return 0;
	client = other_direction(&f->rewrite, p);
	/* A packet from another device is forged, or not of this client: it changes nothing here. */
	if (client && device && client->rewrite.device_in != device)
		return 0;
	if (!client || (f->closing && client->closing) || ends_by_reset(f, client) || is_half_closed(f, client) ||
	    (p->protocol == UDP && is_complete(client, f, UDP, flow_clock()))) {
		/* The young flow is over, except for retransmissions. Without an agent nothing else removes it. */
		if (forget_flow(&reply_key, &f->rewrite, true, true))
			count(CLOSING_FLOW_REPLACED);
		return 0;
	}
	request_promotion(&reply_key, &f->rewrite, f);
	return 1;
}

/* Distinguishes a flow from an earlier one with the same key. */
static __always_inline __u16 recent_stamp(__u64 started)
{
	return started >> 20;
}

/*
 * Puts the young flow of the draft into the next slot of recent_flows, and removes the flow that had the slot, if it is
 * complete.  `opened` false: there was no space for the new flow.  Global for the same reason as judge_syn().
 */
__noinline int note_recent(const struct flow_key *key, bool opened)
{
	struct flow_key *place, former, reply_key;
	__u32 zero = 0, turn, tag, *next, *ended;
	struct flow *f, *reply;
	struct flow_draft *d;
	__u16 stamp;
	__u64 now;

	if (!settings.fast_path || !key)
		return 0;
	next = bpf_map_lookup_elem(&recent_next, &zero);
	d = flow_draft();
	now = flow_clock();
	if (!next || !d)
		return 0;
	turn = *next % RECENT_FLOWS;
	*next += (turn + 1) % RECENT_FLOWS - turn;
	place = bpf_map_lookup_elem(&recent_flows, &turn);
	if (!place)
		return 0;
	former = *place;
	__builtin_memcpy(&stamp, former.zero, sizeof(stamp));
	__builtin_memset(former.zero, 0, sizeof(former.zero));
	*place = *key;
	if (opened) {
		*(__u16 *)place->zero = recent_stamp(d->there.started);
		/* An earlier flow with this key has ended. */
		ended = recent_end_of(d->there.rewrite.tag);
		if (ended && *(volatile __u32 *)ended == d->there.rewrite.tag)
			*(volatile __u32 *)ended = 0;
	}
	/* Most connections end by themselves before their slot has its turn. The lookup would wait for memory. */
	tag = tag_of(&former);
	ended = recent_end_of(tag);
	if (ended && *(volatile __u32 *)ended == tag)
		return 0;
	f = bpf_map_lookup_elem(&flows, &former);
	/* If the client has used the port again, its newer flow has the same key, but another slot. */
	if (!f || !f->young || f->reply || was_reused(&f->rewrite, tag) ||
	    recent_stamp(f->started) != stamp)
		return 0;
	reply_key_of(&f->rewrite, former.protocol, former.ipv6, &reply_key);
	reply = bpf_map_lookup_elem(&flows, &reply_key);
	if (reply && may_make_room(f, reply, former.protocol, now) && forget_flow(&former, &f->rewrite, false, true))
		count(YOUNG_ENDED);
	return 0;
}

#define UNPERMITTED_PER_SECOND 1024

/* The source of a pair without a permit may be forged, so the number of such flows per CPU and second is limited. */
static __always_inline bool may_enter_without_permit(__u64 now)
{
	__u32 one = 1, second = (now / NANOSECONDS & 0xfffff) << 12;
	__u32 *entered = bpf_map_lookup_elem(&recent_next, &one);

	if (!entered)
		return false;
	if ((*entered & ~0xfffU) != second)
		*entered = second;
	if ((*entered & 0xfff) >= UNPERMITTED_PER_SECOND)
		return false;
	*entered += 1;
	return true;
}

/*
 * Called after open_young() has left this packet to netfilter, for `reason`.  1: a datagram whose pair was proven
 * recently, so the observer would learn nothing.  In a flood without replies that is most packets.  Global for the same
 * reason as judge_syn().
 */
__noinline int is_proven(const struct packet *p, enum slow_path_reason reason)
{
	struct fast_path *state;
	struct flow_draft *d;
	__u64 now;

	if (!settings.fast_path || !p || p->protocol != UDP || reason != SLOW_NO_PERMIT)
		return 0;
	state = fast_path_state();
	d = flow_draft();
	now = flow_clock();
	if (!state || !d || d->permit.generation != *(volatile __u32 *)&state->permit_generation)
		return 0;
	/* Some packets go to the observer all the same, so that a flow that continues without a reply is entered. */
	return now + PERMIT_NS / 2 < d->permit.until && !may_enter_without_permit(now);
}

/* The key of a flow from this client's port straight to the endpoint. */
static __always_inline void straight_key_of(const struct packet *p, const struct backend *b, struct flow_key *key)
{
	__builtin_memcpy(key, p, sizeof(*key));
	__builtin_memcpy(key->destination, &b->address, 16);
	key->destination_port = b->port;
}

/*
 * Opens a young flow, if its pair has a permit: as an exchange (OPENED_EXCHANGE) or in the flow table (NOT_SLOW).  The
 * packet is then rewritten by `d->there.rewrite`.  ASK_CONNTRACK: the flow may be opened if conntrack has no flow with
 * the same replies; `no_other`: it has none.  ASK_PORT: the same for the draft's replies, which go to another source
 * port; the draft's `asked_port` is then this port.  Anything else is an enum slow_path_reason.  Global for the same
 * reason as judge_syn().
 */
__noinline int open_young(struct context *ctx, const struct packet *p, const struct endpoint_selection *e,
			  const struct backend *b, bool no_other)
{
	struct flow_rewrite *there, *reply;
	struct fast_path *state;
	struct flow_draft *d;
	__u32 device, *open;
	bool exchange;
	int reason;
	__u64 now;

	if (!settings.fast_path || !p || !e || !b)
		return SLOW_NO_PERMIT;
	state = fast_path_state();
	d = flow_draft();
	if (!state || !d)
		return SLOW_NO_PERMIT;
	d->permit.until = 0;
	/* Once, whether the flow is opened or not. */
	d->source_port = d->asked_port ? d->asked_port : p->source_port;
	d->asked_port = 0;
	now = flow_clock();
	reason = why_not_young(p, state, now);
	if (reason)
		return reason;
	if (!is_plain(ctx))
		return STACK_NOT_PLAIN;
	device = receiving_device(ctx);
	permit_key_of(&d->permit_key, device, &p->source, &b->address, b->port, p->protocol, p->ipv6,
		      frontend_hash((const struct flow_key *)p, true), e->masquerade);
	reason = read_permit(d, state, now);
	if (reason)
		return reason;
	if (p->length > d->permit.out.mtu)
		return STACK_TOO_BIG;
	if (e->masquerade && !settings.snat_port_min)
		return SLOW_NO_PORT;
	/* tc has asked conntrack for this flow itself, but XDP has not.  A masqueraded flow needs no more than that. */
	if (settings.conntrack_lookup && !no_other && (!e->masquerade || HOOK == AT_XDP))
		return ASK_CONNTRACK;
	if (!settings.conntrack_lookup && !no_other && !e->masquerade) {
		straight_key_of(p, b, &d->key);
		if (is_straight(&d->key))
			return SLOW_NO_PORT;
	}

	__builtin_memset(&d->there, 0, sizeof(d->there));
	__builtin_memset(&d->reply, 0, sizeof(d->reply));
	__builtin_memcpy(&d->key, p, sizeof(d->key));
	there = &d->there.rewrite;
	reply = &d->reply.rewrite;
	there->device_in = device;
	__builtin_memcpy(there->source, e->masquerade ? d->permit.snat : p->source.bytes, 16);
	there->source_port = d->source_port;
	__builtin_memcpy(there->destination, &b->address, 16);
	there->destination_port = b->port;
	there->out = d->permit.out;
	__builtin_memcpy(there->mac_in, d->permit.back.mac_from, 6);
	reply->device_in = d->permit.device_back;
	reply->out = d->permit.back;
	__builtin_memcpy(reply->mac_in, d->permit.mac_in_back, 6);
	d->there.young = d->reply.young = 1;
	/* may_come_in_by() compares. The packet is not counted in the entry. */
	if (p->protocol == TCP)
		d->there.sent_until = next_sequence(p);
	d->there.service = e->service;
	d->there.backend = b->id;
	if (p->kept) {
		/* As renew() does: the client used this port before. */
		d->there.first_counted = RENEWED;
		d->there.packets = 1;
	}
	d->there.generation = *(volatile __u32 *)&state->generation;
	d->there.started = now;
	complete_draft(d, d->there.generation, now);
	/* The client may use its port with another Service of the endpoint: then the flow needs another source port. */
	exchange = p->protocol == UDP && !e->masquerade && d->source_port == p->source_port &&
		   find_exchange(&d->reply_key) < 0 && enter_exchange(now);
	if (!exchange) {
		open = bpf_map_lookup_elem(&young_counts, &device);
		reason = is_over_quota(open) ? SLOW_QUOTA : insert_young(ctx, d, e->masquerade, open);
		if (reason)
			return reason;
	}
	/* From now on, packets to this address are looked up in the table. */
	set_hint(&p->destination, p->destination_port, p->ipv6);
	return exchange ? OPENED_EXCHANGE : NOT_SLOW;
}

#endif
