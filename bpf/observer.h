/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The observer, at egress: compares a packet that leaves netfilter with the record of how it came in.  The fast path
 * learns three things only here: which pairs may communicate, how a flow is translated, and by which device its packets
 * leave.
 */
#ifndef PEP_OBSERVER_H
#define PEP_OBSERVER_H

#include "ctx_skb.h"
#include "handover.h"
#include "young.h"

#define PERMIT_BACK_NS (3 * NANOSECONDS)

/* Set by the proxy's nft table for the first packet of a connection in conntrack. */
#define PRIORITY_NEW 0xEE000001

/* The kernel's priority for a packet with this TOS (ip_tos2prio). */
static __always_inline __u32 priority_of_tos(__u8 tos)
{
	switch (tos >> 3 & 3) {
	case 1:
		return 2;	/* TC_PRIO_BULK */
	case 2:
		return 6;	/* TC_PRIO_INTERACTIVE */
	case 3:
		return 4;	/* TC_PRIO_INTERACTIVE_BULK */
	default:
		return 0;
	}
}

/* Restores the priority that the kernel gave the packet. True: it is the first packet of a new connection. */
static __always_inline bool take_proof_of_new(struct __sk_buff *skb)
{
	__u8 *tos;

	if (skb->priority != PRIORITY_NEW)
		return false;
	tos = skb->protocol == bpf_htons(ETH_P_IP) ? bytes_at(skb, ETH_HLEN + 1, 1) : NULL;
	skb->priority = tos ? priority_of_tos(*tos) : 0;
	return true;
}

/* True if a mark of its flow may have chosen the route of this packet. */
static __always_inline bool has_route_mark(const struct __sk_buff *skb, const struct handover *h)
{
	__u32 family = h->key.ipv6, *marks = bpf_map_lookup_elem(&route_marks, &family);

	return unlikely(marks && skb->mark & *(volatile __u32 *)marks);
}

/*
 * Reads how this packet leaves; false if nothing may be learned from it.  If it came in by a closed device, the other
 * programs there must see its packets.
 */
static __always_inline bool read_link(struct __sk_buff *skb, const struct handover *h, struct link *l)
{
	__u32 ifindex = skb->ifindex, device_in = h->device;
	struct node_device *d = bpf_map_lookup_elem(&devices, &ifindex);
	struct node_device *in = bpf_map_lookup_elem(&devices, &device_in);
	__u32 mtu;

	if (!d || !in || has_route_mark(skb, h))
		return false;
	l->device = ifindex;
	l->redirect = in->redirect ? d->redirect : REDIRECT_NONE;
	mtu = d->mtu;
	l->mtu = mtu > 65535 ? 65535 : mtu;
	return !bpf_skb_load_bytes(skb, 0, l->mac_to, sizeof(l->mac_to) + sizeof(l->mac_from));
}

/* True if the packet was rewritten as in the entry. */
static __always_inline bool matches_rewrite(const struct packet *p, const struct flow_rewrite *a)
{
	const __u64 *source = (const void *)a->source, *destination = (const void *)a->destination;
	const __u64 *s = (const void *)&p->source, *d = (const void *)&p->destination;

	return !((s[0] ^ source[0]) | (s[1] ^ source[1]) | (d[0] ^ destination[0]) | (d[1] ^ destination[1])) &&
	       p->source_port == a->source_port && p->destination_port == a->destination_port;
}

/* ---- a kernel flow that must be confirmed ----------------------------------------------- */

/* Changes the link of an entry. Meanwhile the entry looks to readers like that of another flow. */
static __always_inline void change_link(struct flow_rewrite *a, const struct link *l)
{
	__u32 tag = *(volatile __u32 *)&a->tag;

	/* Another CPU is just changing it. Without its tag, nothing would find or remove the entry any more. */
	if (!tag)
		return;
	*(volatile __u32 *)&a->tag_again = 0;
	*(volatile __u32 *)&a->tag = 0;
	read_barrier();
	a->out = *l;
	read_barrier();
	*(volatile __u32 *)&a->tag = tag;
	*(volatile __u32 *)&a->tag_again = tag;
}

/*
 * 1: the table has the flow, and its rewrite is right.  Removes a flow that netfilter translates differently, and one
 * whose packet came in by another device, if that `is_new` to conntrack.  If it is not, it may be a forged SYN.
 */
static __noinline int confirm(struct __sk_buff *skb, const struct packet *p, const struct handover *h, __u64 now,
			      bool is_new)
{
	struct fast_path *state = fast_path_state();
	struct flow_key key;
	struct link l = {};
	struct flow *f;

	if (!p || !h || !state || !read_link(skb, h, &l))
		return 0;
	key = h->key;
	f = bpf_map_lookup_elem(&flows, &key);
	if (!f || f->young || was_reused(&f->rewrite, tag_of(&key)))
		return 0;
	if (!f->rewrite.device_in) {
		/* An entry of enter_tracked(): its devices were not known. */
		__builtin_memcpy(f->rewrite.mac_in, h->mac_to, 6);
		f->rewrite.device_in = h->device;
	}
	if (f->rewrite.device_in != h->device && !is_new)
		return 0;
	/* The device has another link address now.  A bridge forwards frames for other hosts untranslated. */
	if (f->rewrite.device_in == h->device && !same_mac(f->rewrite.mac_in, h->mac_to)) {
		if (!matches_rewrite(p, &f->rewrite))
			return 0;
		__builtin_memcpy(f->rewrite.mac_in, h->mac_to, 6);
	}
	if (!matches_rewrite(p, &f->rewrite) || f->rewrite.device_in != h->device) {
		struct flow_rewrite a = f->rewrite;

		forget_flow(&key, &a, f->reply, false);
		count(FLOW_CHANGED);
		return 0;
	}
	if (!is_same_link(&f->rewrite.out, &l))
		change_link(&f->rewrite, &l);
	f->generation = *(volatile __u32 *)&state->generation;
	/* The fast path does not use a closed device. */
	if (!l.redirect)
		count(STACK_DEVICE);
	f->confirmed_until = l.redirect ? now + CONFIRMED_NS : 0;
	/*
	 * After a RST or FIN: a packet with data, or of a new connection with these ports, shows that this side goes on.  An
	 * acknowledgement does not: the other direction ends later.  After a RST in sequence, note_ending() decides.
	 */
	if (f->closing != CLOSING_IN_SEQUENCE && (p->length > p->headers || p->tcp_flags & TCP_SYN))
		f->closing = 0;
	count(FLOW_CONFIRMED);
	return 1;
}

/* ---- entering a kernel flow ----------------------------------------------------------------- */

/* The draft has the key, the translation and the links. Neither direction is in the table yet. */
static __always_inline void enter_kernel_flow(struct flow_draft *d, __u64 now, bool reply_confirmed)
{
	struct fast_path *state = fast_path_state();
	union address address = {};

	if (!state || is_over_quota(bpf_map_lookup_elem(&young_counts, &d->there.rewrite.device_in)))
		return;
	complete_draft(d, *(volatile __u32 *)&state->generation, now);
	/* A packet with a forged source must not hide the exchange of that client. */
	if (d->key.protocol == UDP && (find_exchange(&d->key) >= 0 || find_exchange(&d->reply_key) >= 0))
		return;
	if (reply_confirmed && d->reply.rewrite.out.redirect)
		d->reply.confirmed_until = now + CONFIRMED_NS;
	note_in_table(&d->reply_key, true, now);
	note_in_table(&d->key, false, now);
	if (bpf_map_update_elem(&flows, &d->reply_key, &d->reply, BPF_NOEXIST))
		return;
	if (bpf_map_update_elem(&flows, &d->key, &d->there, BPF_NOEXIST)) {
		bpf_map_delete_elem(&flows, &d->reply_key);
		return;
	}
	__builtin_memcpy(&address, d->key.destination, 16);
	set_hint(&address, d->key.destination_port, d->key.ipv6);
	count(FLOW_LEARNED);
}

/*
 * A masqueraded flow that conntrack had before the programs were attached.  No young flow may take its source port.
 * `key` is that of the client's packets; the other fields are their addresses and ports after the translation.
 */
struct tracked_flow {
	struct flow_key key;
	__u8 source[16];
	__u8 destination[16];
	__u16 source_port;
	__u16 destination_port;
};

/* Devices and links stay 0 until a packet of each direction has left netfilter.  1: the flow was entered. */
static __always_inline int enter_tracked(const struct tracked_flow *t)
{
	/* Before Linux 6.3, a packet may interrupt a program that the agent runs. */
	struct flow_draft *d = draft_of(FOR_SWEEP);

	if (!d)
		return 0;
	__builtin_memset(&d->there, 0, sizeof(d->there));
	__builtin_memset(&d->reply, 0, sizeof(d->reply));
	d->key = t->key;
	__builtin_memcpy(d->there.rewrite.source, t->source, 16);
	__builtin_memcpy(d->there.rewrite.destination, t->destination, 16);
	d->there.rewrite.source_port = t->source_port;
	d->there.rewrite.destination_port = t->destination_port;
	enter_kernel_flow(d, bpf_ktime_get_coarse_ns(), false);
	return bpf_map_lookup_elem(&flows, &t->key) != NULL;
}

/* ---- the first packet of a flow ------------------------------------------------------------- */

/* True if the pair was seen within the last second. A spoofed source is seen only once. */
static __always_inline bool was_seen_recently(const struct permit_key *key, __u64 now)
{
	__u32 seconds = now / NANOSECONDS & 0xffffff;
	__u64 *seen;
	bool recently;
	__u32 tag;

	/* The map also has tags of flow keys. Those of permit keys are hashed again, so that the two differ. */
	tag = (tag_of(key) ^ key->frontend) * 0x85ebca6bU | 1;
	seen = flow_packet_count_of(tag);
	if (!seen)
		return true;
	recently = *seen >> 32 == tag && seconds - SIGHTING_SECONDS(*seen) <= 1;
	*seen = flow_packet_count(tag, seconds, 1);
	return recently;
}

static __noinline int grant_permit(struct __sk_buff *skb, const struct packet *p, const struct handover *h, __u64 now)
{
	struct fast_path *state = fast_path_state();
	struct flow_draft *d = flow_draft();
	union address client = {}, endpoint = {};
	struct permit *known;
	__u32 generation;

	if (!p || !h || !d || !state)
		return 0;
	__builtin_memcpy(&client, h->key.source, 16);
	__builtin_memcpy(&endpoint, h->endpoint, 16);
	permit_key_of(&d->permit_key, h->device, &client, &endpoint, h->endpoint_port, p->protocol, p->ipv6,
		      frontend_hash(&h->key, true), h->masquerade);
	known = bpf_map_lookup_elem(&permits, &d->permit_key);
	if (!known && !was_seen_recently(&d->permit_key, now))
		return 0;
	generation = *(volatile __u32 *)&state->permit_generation;
	__builtin_memset(&d->permit, 0, sizeof(d->permit));
	/* After a change of the rulesets or devices a reply must prove the return path again, too. */
	if (known && known->generation == generation)
		d->permit = *known;
	if (!read_link(skb, h, &d->permit.out))
		return 0;
	d->permit.until = now + PERMIT_NS;
	d->permit.generation = generation;
	if (h->masquerade)
		__builtin_memcpy(d->permit.snat, &p->source, 16);
	bpf_map_update_elem(&permits, &d->permit_key, &d->permit, BPF_ANY);
	count(PERMIT_GRANTED);
	return 1;
}

/* Enters the flow of a first packet. It may continue without a reply, and must keep its endpoint. */
static __noinline int enter_opened(struct __sk_buff *skb, const struct packet *p, const struct handover *h, __u64 now)
{
	struct flow_draft *d = flow_draft();

	if (!p || !h || !d)
		return 0;
	__builtin_memset(&d->there, 0, sizeof(d->there));
	__builtin_memset(&d->reply, 0, sizeof(d->reply));
	d->key = h->key;
	d->there.rewrite.device_in = h->device;
	__builtin_memcpy(d->there.rewrite.mac_in, h->mac_to, 6);
	__builtin_memcpy(d->there.rewrite.source, &p->source, 16);
	__builtin_memcpy(d->there.rewrite.destination, &p->destination, 16);
	d->there.rewrite.source_port = p->source_port;
	d->there.rewrite.destination_port = p->destination_port;
	if (!read_link(skb, h, &d->there.rewrite.out))
		return 0;
	/* Assumed, until a reply has been observed. */
	d->reply.rewrite.device_in = d->there.rewrite.out.device;
	__builtin_memcpy(d->reply.rewrite.mac_in, d->there.rewrite.out.mac_from, 6);
	d->reply.rewrite.out.device = h->device;
	d->there.service = h->service;
	d->there.backend = h->backend;
	enter_kernel_flow(d, now, false);
	return 0;
}

static __always_inline int observe_open(struct __sk_buff *skb, const struct packet *p, const struct handover *h,
					bool is_new, __u64 now)
{
	bool keeps_address, same_source, known_pair;

	if (confirm(skb, p, h, now, is_new) || !is_new)
		return TC_ACT_UNSPEC;
	if (!same_bytes16(h->endpoint, &p->destination) || h->endpoint_port != p->destination_port)
		return TC_ACT_UNSPEC;
	keeps_address = same_bytes16(h->key.source, &p->source);
	same_source = keeps_address && h->key.source_port == p->source_port;
	/*
	 * Netfilter changed the source of a flow that is not masqueraded: by a rule of another program, or because
	 * conntrack has another flow with this port.  conntrack does not know young flows, so a young flow may already
	 * use the new port: then the replies of both look the same.
	 */
	if (!h->masquerade && !same_source) {
		if (!is_taken_by_young(p, &p->destination, p->destination_port, keeps_address ? h->device : 0))
			return TC_ACT_UNSPEC;
		drop_until_promotion(p, h->device, h->service);
		return TC_ACT_SHOT;
	}
	known_pair = grant_permit(skb, p, h, now);
	/* The entry also keeps a young flow, to another Service of the endpoint, from taking the same ports. */
	if (known_pair || (p->protocol == UDP && may_enter_without_permit(now)))
		enter_opened(skb, p, h, now);
	return TC_ACT_UNSPEC;
}

/* ---- an endpoint's packet ---------------------------------------------------------------------- */

/* Adds the return path to the pair's permit. */
static __noinline int complete_permit(struct __sk_buff *skb, const struct packet *p, const struct handover *h,
				      bool masqueraded, __u64 now)
{
	struct flow_draft *d = flow_draft();
	union address endpoint = {};
	struct permit *permit;
	struct link l = {};

	if (!p || !h || !d || !read_link(skb, h, &l))
		return 0;
	__builtin_memcpy(&endpoint, h->key.source, 16);
	permit_key_of(&d->permit_key, skb->ifindex, &p->destination, &endpoint, h->key.source_port, p->protocol,
		      p->ipv6, frontend_hash((const struct flow_key *)p, false), masqueraded);
	permit = bpf_map_lookup_elem(&permits, &d->permit_key);
	/* The sender may be another host that forges the endpoint's address. With asymmetric routes, netfilter serves. */
	if (!permit || h->device != permit->out.device)
		return 0;
	if (permit->device_back != h->device || !is_same_link(&permit->back, &l) || permit->back_until < now) {
		/* Readers ignore the return path while its fields are written. */
		permit->back_until = 0;
		permit->device_back = h->device;
		permit->back = l;
		__builtin_memcpy(permit->mac_in_back, h->mac_to, 6);
	}
	permit->back_until = now + PERMIT_BACK_NS;
	return 1;
}

static __noinline int enter_by_reply(struct __sk_buff *skb, const struct packet *p, const struct handover *h,
				     __u64 now)
{
	struct flow_draft *d = flow_draft();
	struct packet client_packet = {};
	struct frontend f = {};

	if (!p || !h || !d)
		return 0;
	__builtin_memset(&d->there, 0, sizeof(d->there));
	__builtin_memset(&d->reply, 0, sizeof(d->reply));
	__builtin_memset(&d->key, 0, sizeof(d->key));
	/* The key of the client's packets: the reverse direction. */
	__builtin_memcpy(d->key.source, &p->destination, 16);
	__builtin_memcpy(d->key.destination, &p->source, 16);
	d->key.source_port = p->destination_port;
	d->key.destination_port = p->source_port;
	d->key.protocol = p->protocol;
	d->key.ipv6 = p->ipv6;
	__builtin_memcpy(d->there.rewrite.source, h->key.destination, 16);
	__builtin_memcpy(d->there.rewrite.destination, h->key.source, 16);
	d->there.rewrite.source_port = h->key.destination_port;
	d->there.rewrite.destination_port = h->key.source_port;
	if (!read_link(skb, h, &d->reply.rewrite.out))
		return 0;
	d->reply.rewrite.device_in = h->device;
	__builtin_memcpy(d->reply.rewrite.mac_in, h->mac_to, 6);
	d->there.rewrite.device_in = d->reply.rewrite.out.device;
	__builtin_memcpy(d->there.rewrite.mac_in, d->reply.rewrite.out.mac_from, 6);
	/* The link of the client's packets is learned from the first one that is confirmed. */
	d->there.rewrite.out.device = h->device;
	__builtin_memcpy(&client_packet, &d->key, sizeof(d->key));
	if (find_frontend(&client_packet, &f))
		d->there.service = f.service;
	enter_kernel_flow(d, now, true);
	return 0;
}

/* False: the source is unchanged, so this is not a reply from a service. */
static __always_inline bool learn_return_path(struct __sk_buff *skb, const struct packet *p, const struct handover *h,
					   __u64 now)
{
	bool masqueraded;

	if (same_bytes16(h->key.source, &p->source) && h->key.source_port == p->source_port)
		return false;
	masqueraded = !same_bytes16(h->key.destination, &p->destination) ||
		      h->key.destination_port != p->destination_port;
	complete_permit(skb, p, h, masqueraded, now);
	return true;
}

static __always_inline void observe_reply(struct __sk_buff *skb, const struct packet *p, const struct handover *h,
					  __u64 now)
{
	if (!learn_return_path(skb, p, h, now))
		return;
	/*
	 * The reply keeps conntrack's entry.  If it was masqueraded, only here it has the client's address.  The table may
	 * have no space for the flow.
	 */
	if (p->protocol == UDP)
		note_left(p, true);
	if (h->learn && !confirm(skb, p, h, now, true))
		enter_by_reply(skb, p, h, now);
}

/* ---- all ------------------------------------------------------------------------------------------ */

static __always_inline int observe(struct __sk_buff *skb)
{
	struct packet p = {};
	struct handover *h;
	bool is_new, known;
	__u32 number;
	__u64 now;

	/* Comes first, because packets without a record have this priority, too. */
	is_new = take_proof_of_new(skb);
	number = (skb->tc_index ^ HANDOVER_MARK) >> HANDOVER_SHIFT;
	if (number > HANDOVER_NUMBER)
		return TC_ACT_UNSPEC;
	skb->tc_index = 0;
	h = handover_slot(number);
	if (!h || h->number != number)
		return TC_ACT_UNSPEC;
	h->number = 0;
	now = bpf_ktime_get_coarse_ns();
	known = parse_packet(skb, ETH_HLEN, &p) && !p.fragment;
	if (!known || (__s64)(now - h->when) > HANDOVER_NS || h->ip_device != skb->ingress_ifindex ||
	    p.protocol != h->key.protocol || p.ipv6 != h->key.ipv6)
		return TC_ACT_UNSPEC;
	if (has_route_mark(skb, h))
		count(STACK_ROUTE_MARK);
	switch (h->kind) {
	case HANDOVER_OPEN:
		if (skb->hash != ((__u32)h->nonce[0] | (__u32)h->nonce[1] << 8 | (__u32)h->nonce[2] << 16))
			return TC_ACT_UNSPEC;
		return observe_open(skb, &p, h, is_new, now);
	case HANDOVER_REPLY:
		observe_reply(skb, &p, h, now);
		break;
	case HANDOVER_CONFIRM:
		/*
		 * The flow of a first reply may already be in the table, while the permit still lacks the return path.
		 */
		if (confirm(skb, &p, h, now, is_new))
			learn_return_path(skb, &p, h, now);
		break;
	}
	return TC_ACT_UNSPEC;
}

#endif
