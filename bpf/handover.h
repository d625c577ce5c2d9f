/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Hand-over records: how a packet came in, for the observer at egress to compare with how it leaves netfilter.  The
 * kernel takes a packet from ingress to egress on one CPU, so the record is in that CPU's memory.  skb->tc_index names
 * it.
 */
#ifndef PEP_HANDOVER_H
#define PEP_HANDOVER_H

#include "ctx_skb.h"
#include "flow_table.h"

#define HANDOVER_NS 20000000LL		/* a packet that took longer, e.g. for neighbour resolution, proves nothing */

static __always_inline struct handover *handover_slot(__u32 number)
{
	__u32 slot = number % HANDOVER_SLOTS;

	return bpf_map_lookup_elem(&handovers, &slot);
}

/* Fills a record for this packet; NULL if that fails. */
static __always_inline struct handover *hand_over(struct __sk_buff *skb, const struct packet *p,
						  enum handover_kind kind, __u32 ip_device)
{
	__u32 number = (bpf_get_prandom_u32() & HANDOVER_NUMBER) ?: HANDOVER_SLOTS;
	struct handover *h = handover_slot(number);

	if (!h || bpf_skb_load_bytes(skb, 0, h->mac_to, sizeof(h->mac_to) + sizeof(h->mac_from)))
		return NULL;
	__builtin_memcpy(&h->key, p, sizeof(h->key));
	h->when = bpf_ktime_get_coarse_ns();
	h->number = number;
	h->device = skb->ifindex;
	h->ip_device = ip_device;
	h->service = 0;
	h->backend = 0;
	h->kind = kind;
	h->masquerade = 0;
	h->learn = 0;
	skb->tc_index = HANDOVER_MARK | number << HANDOVER_SHIFT;
	return h;
}

/* A backend was chosen, and netfilter will do the DNAT. */
static __noinline int hand_over_open(struct __sk_buff *skb, const struct packet *p, const struct endpoint_selection *e,
				     const struct backend *b, __u32 ip_device)
{
	struct fast_path *state = fast_path_state();
	struct handover *h;
	__u32 nonce;

	if (!p || !e || !b || !state || p->fragment || p->protocol == SCTP)
		return 0;
	/*
	 * The kernel may choose the next hop of each flow by the packet's hash (fib_multipath_hash_policy), which a record
	 * changes.  All packets of a flow must leave by one device: otherwise conntrack ends it, if it is masqueraded.
	 */
	if ((p->ipv6 ? state->closed6 : state->closed4) == STACK_POLICY_ROUTED)
		return 0;
	h = hand_over(skb, p, HANDOVER_OPEN, ip_device);
	if (!h)
		return 0;
	/*
	 * The kernel holds packets back, for example while the link address of the endpoint is unknown.  Meanwhile the
	 * record may have become that of another packet, which a rule drops: the number has too few bits.
	 */
	nonce = bpf_get_prandom_u32() >> 8 | 1;
	bpf_set_hash(skb, nonce);
	h->nonce[0] = nonce;
	h->nonce[1] = nonce >> 8;
	h->nonce[2] = nonce >> 16;
	h->service = e->service;
	h->backend = b->id;
	h->masquerade = e->masquerade;
	h->endpoint_port = b->port;
	__builtin_memcpy(h->endpoint, &b->address, 16);
	return 0;
}

static __noinline int hand_over_confirm(struct __sk_buff *skb, const struct packet *p, __u32 ip_device)
{
	if (p && !p->fragment)
		hand_over(skb, p, HANDOVER_CONFIRM, ip_device);
	return 0;
}

/*
 * An endpoint's packet whose flow is not in the table.  The reply to a first packet completes the permit with the
 * return path.  A flow that continues is entered into the table.  A flow of no service is checked again once a second.
 */
static __noinline int hand_over_reply(struct __sk_buff *skb, const struct packet *p, __u32 ip_device)
{
	__u32 seconds, count = 0, tag;
	struct handover *h;
	__u64 *seen;
	bool first;

	if (!p || p->fragment || p->protocol == SCTP)
		return 0;
	tag = tag_of(p);
	seen = flow_packet_count_of(tag);
	seconds = bpf_ktime_get_coarse_ns() / NANOSECONDS & 0xffffff;
	if (seen && *seen >> 32 == tag)
		count = SIGHTING_COUNT(*seen);
	first = p->protocol == TCP && p->tcp_flags & TCP_SYN;
	if (seen && !first) {
		if (count >= 3 && SIGHTING_SECONDS(*seen) == seconds)
			return 0;
		*seen = flow_packet_count(tag, seconds, count < 3 ? count + 1 : 3);
		/* A TCP connection may end after its first reply, so it is entered with a later one. */
		if (p->protocol == TCP && !count)
			return 0;
	}
	h = hand_over(skb, p, HANDOVER_REPLY, ip_device);
	if (h)
		h->learn = !first;
	return 0;
}

#endif
