/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The fast path in tc: rewrites the packet as its flow's entry says, and sends it on. */
#ifndef PEP_FORWARD_H
#define PEP_FORWARD_H

#include "flow_learn.h"

#define PACKET_HOST 0
/* No verdict: the packet goes the way it would go without the cache. */
#define NOT_SENT (-2)
#define NOT_KNOWN (-3)		/* the same, and the cache knows nothing of its flow */
#define NOT_SURE (-4)		/* the same, and what the cache knows must be asked again */
#define UDP_CHECK 6
#define TCP_CHECK 16

/* What changes in IPv4, in one piece: from the TTL to the ports. */
struct changed4 {
	__u8 ttl;
	__u8 protocol;
	__u16 check;
	__u8 source[4];
	__u8 destination[4];
	__be16 source_port;
	__be16 destination_port;
};

/* The same in IPv6, with the byte before the hop limit. */
struct changed6 {
	__u8 next;
	__u8 hop_limit;
	__u8 source[16];
	__u8 destination[16];
	__be16 source_port;
	__be16 destination_port;
} __attribute__((packed));

static __always_inline __u16 fold(__u32 sum)
{
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return sum;
}

static __always_inline __u32 add(__u32 a, __u32 b)
{
	__u64 sum = (__u64)a + b;

	return (__u32)sum + (sum >> 32);
}

/* What one hop less changes a checksum by: TTL before protocol (IPv4), hop limit behind next header (IPv6). */
static __always_inline __u32 hop_sum(const struct packet *p)
{
	__u16 from, to;

	if (p->ipv6) {
		from = bpf_htons((__u16)p->protocol << 8 | p->hops);
		to = bpf_htons((__u16)p->protocol << 8 | (p->hops - 1));
	} else {
		from = bpf_htons((__u16)p->hops << 8 | p->protocol);
		to = bpf_htons((__u16)(p->hops - 1) << 8 | p->protocol);
	}
	return add((__u16)~from, to);
}

static __always_inline long rewrite4(struct __sk_buff *skb, const struct packet *p, const struct flow *f, __u32 link)
{
	struct changed4 c = { .ttl = p->hops - 1, .protocol = p->protocol };

	c.check = ~fold(add(add((__u16)~p->header_check, f->address_sum), hop_sum(p)));
	__builtin_memcpy(c.source, f->source, 4);
	__builtin_memcpy(c.destination, f->destination, 4);
	c.source_port = bpf_htons(f->source_port);
	c.destination_port = bpf_htons(f->destination_port);
	return bpf_skb_store_bytes(skb, link + offsetof(struct iphdr, ttl), &c, sizeof(c), 0);
}

static __always_inline long rewrite6(struct __sk_buff *skb, const struct packet *p, const struct flow *f, __u32 link)
{
	struct changed6 c = { .next = p->protocol, .hop_limit = p->hops - 1 };

	__builtin_memcpy(c.source, f->source, 16);
	__builtin_memcpy(c.destination, f->destination, 16);
	c.source_port = bpf_htons(f->source_port);
	c.destination_port = bpf_htons(f->destination_port);
	/* This header has no checksum of its own: a sum of the whole packet moves with what changes in it. */
	bpf_csum_update(skb, add(f->address_sum, hop_sum(p)));
	return bpf_skb_store_bytes(skb, link + offsetof(struct ipv6hdr, nexthdr), &c, sizeof(c), 0);
}

static __noinline int rewrite(struct __sk_buff *skb, const struct packet *p, const struct flow *f, __u32 link)
{
	__u64 mangled = 0;
	__u32 check;
	long failed;

	if (!p || !f)
		return -1;
	check = link + (p->ipv6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr));
	check += p->protocol == TCP ? TCP_CHECK : UDP_CHECK;
	if (p->protocol == UDP)
		mangled = BPF_F_MARK_MANGLED_0;	/* 0 says that there is no checksum */
	failed = bpf_l4_csum_replace(skb, check, 0, f->address_sum, BPF_F_PSEUDO_HDR | mangled);
	if (f->port_sum)
		failed |= bpf_l4_csum_replace(skb, check, 0, f->port_sum, mangled);
	failed |= p->ipv6 ? rewrite6(skb, p, f, link) : rewrite4(skb, p, f, link);
	return failed;
}

static __noinline int send(struct __sk_buff *skb, const struct flow *f)
{
	struct bpf_redir_neigh hop = {};

	if (!f)
		return NOT_SENT;
	if (f->passage == TO_PEER) {
		bpf_skb_store_bytes(skb, 0, f->mac_to, sizeof(f->mac_to) + sizeof(f->mac_from), 0);
		return bpf_redirect_peer(f->device_out, 0);
	}
	hop.nh_family = f->next_hop_family;
	__builtin_memcpy(hop.ipv6_nh, f->next_hop, 16);
	return bpf_redirect_neigh(f->device_out, &hop, sizeof(hop), 0);
}

/* Another flow's entry by now, or half of it. */
static __always_inline bool is_another_flows(const struct flow *f, const struct packet *p)
{
	__u32 tag = flow_tag(p);

	return *(volatile __u32 *)&f->tag_again != tag || *(volatile __u32 *)&f->tag != tag;
}

/*
 * A copy that is whole.  The element may be given to another flow at any time; who
 * does that writes `tag` first and `tag_again` last.
 */
static __always_inline bool copy_entry(const struct flow *from, const struct packet *p, struct flow *to)
{
	if (is_another_flows(from, p))
		return false;
	*to = *from;
	barrier();
	return !is_another_flows(from, p);
}

/* What the packet as a whole asks for, beyond its headers. Whoever set a mark wants the kernel's rules to see it. */
static __always_inline bool is_plain(struct __sk_buff *skb)
{
	return !skb->vlan_present && !skb->mark;
}

/* The flow ends with this packet, or begins anew. */
static __always_inline bool is_turning_point(const struct packet *p)
{
	return p->protocol == TCP && p->tcp_flags & (TCP_SYN | TCP_FIN | TCP_RST);
}

static __noinline int end_flow(struct __sk_buff *skb, const struct packet *p)
{
	struct flow *f;

	if (!p)
		return NOT_SENT;
	if (p->tcp_flags & TCP_SYN)
		return NOT_SENT;
	f = bpf_map_lookup_elem(&flows, p);
	if (!f || f->passage == TO_STACK)
		return NOT_SENT;
	end_entries(p, f, p->tcp_flags & TCP_RST ? ENDED_BY_RST : ENDED_BY_FIN);
	shorten_timeout(skb, p);
	count(STACK_ENDING);
	return NOT_SENT;
}

/* By the cache, if it knows the flow. `device` is the one that the IP layer sees; the packet has an Ethernet header. */
static __noinline int send_by_cache(struct __sk_buff *skb, const struct packet *p, __u32 device)
{
	struct fast_path *word = fast_path_word();
	struct flow *known, f;
	enum reason reason;
	__u64 now;

	if (!p || !word)
		return NOT_SENT;
	known = bpf_map_lookup_elem(&flows, p);
	now = bpf_ktime_get_coarse_ns();
	reason = fast_path_closed(word, p->ipv6, now);
	if (!known)
		return reason ? NOT_SENT : NOT_KNOWN;
	if (!reason && is_due(known, word, now))
		return NOT_SURE;
	if (!reason && !copy_entry(known, p, &f))
		return NOT_SURE;
	if (!reason)
		reason = why_stack(p, &f, device, skb->gso_size);
	if (!reason && !is_plain(skb))
		reason = STACK_NOT_PLAIN;
	if (reason) {
		count(reason);
		return NOT_SENT;
	}
	/* Half rewritten it must not go on. */
	if (rewrite(skb, p, &f, ETH_HLEN)) {
		count(DROP_REWRITE_FAILED);
		return TC_ACT_SHOT;
	}
	count(FLOW_HIT);
	return send(skb, &f);
}

/* Ask the kernel about the flow, then send by what is known now. */
static __noinline int learn_and_send(struct __sk_buff *skb, const struct packet *p, __u32 device, bool known)
{
	struct fast_path *word = fast_path_word();
	int verdict;

	if (!p || !word || !is_plain(skb))
		return NOT_SENT;
	count(known ? FLOW_STALE : FLOW_MISS);
	if (!learn_flow(skb, p, device, *(volatile __u32 *)&word->generation)) {
		count(FLOW_NOT_YET);
		if (known && !bpf_map_delete_elem(&flows, p))
			count(FLOW_FORGOTTEN);
		return NOT_SENT;
	}
	verdict = send_by_cache(skb, p, device);
	/* It moved on already: the kernel takes this one. */
	return verdict == NOT_KNOWN || verdict == NOT_SURE ? NOT_SENT : verdict;
}

/*
 * The way of every packet that cannot open a flow, and of UDP.  What opens a UDP
 * flow goes by what serve() finds: its endpoint may be gone.
 */
static __always_inline int fast_way(struct __sk_buff *skb, const struct packet *p, __u32 device)
{
	int verdict;

	if (p->protocol == SCTP)
		return NOT_SENT;
	if (is_turning_point(p))
		return end_flow(skb, p);
	verdict = send_by_cache(skb, p, device);
	if (verdict == NOT_SURE && p->protocol == TCP)
		return learn_and_send(skb, p, device, true);
	if ((verdict == NOT_SURE || verdict == NOT_KNOWN) && comes_from_endpoint(p))
		return learn_and_send(skb, p, device, verdict == NOT_SURE);
	return verdict;
}

#endif
