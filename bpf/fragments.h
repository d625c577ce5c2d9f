/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Fragments of a packet: only the first has ports, and all must take the same path. */
#ifndef PEP_FRAGMENTS_H
#define PEP_FRAGMENTS_H

#include "ctx_skb.h"
#include "flow_send.h"

/* True if the packet is a fragment; `key` then identifies its packet. IPv6: the fragment header must come first. */
static __always_inline bool is_fragment(struct __sk_buff *skb, struct fragments *key)
{
	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		struct iphdr *ip = bytes_at(skb, ETH_HLEN, sizeof(*ip));

		if (!ip || !(ip->frag_off & bpf_htons(0x3fff)))
			return false;
		__builtin_memcpy(key->source, &ip->saddr, 4);
		__builtin_memcpy(key->destination, &ip->daddr, 4);
		key->id = ip->id;
		key->protocol = ip->protocol;
		return true;
	}
	if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		struct {
			struct ipv6hdr ip;
			__u8 next;
			__u8 reserved;
			__be16 offset;
			__be32 id;
		} __attribute__((packed)) *h = bytes_at(skb, ETH_HLEN, sizeof(*h));

		if (!h || h->ip.nexthdr != 44)
			return false;
		__builtin_memcpy(key->source, &h->ip.saddr, 16);
		__builtin_memcpy(key->destination, &h->ip.daddr, 16);
		key->id = h->id;
		key->protocol = h->next;
		return true;
	}
	return false;
}

/*
 * The 16-bit id of an IPv4 packet comes round, soon if the pair of hosts is busy.  A later fragment belongs to a known
 * first one only if the fragment before it came within this time.
 */
#define FRAGMENT_GAP NANOSECONDS
/* Later fragments are not counted, and no rule of netfilter sees them: without a limit they could follow for good. */
#define FRAGMENTS_NS (5 * NANOSECONDS)

/* A time in units of 2^27 ns, 0.13 s.  It comes round after two hours and a half; its lower byte after half a minute. */
static __always_inline __u16 fragment_time(void)
{
	return bpf_ktime_get_coarse_ns() >> 27;
}

static __always_inline bool is_same_datagram(__u16 sent)
{
	return (__u16)(fragment_time() - sent) <= FRAGMENT_GAP >> 27;
}

/* A first fragment begins another packet: the later fragments of an earlier one with its id do not count any more. */
static __noinline int forget_fragments(struct __sk_buff *skb)
{
	struct fragments key = {};

	if (!is_fragment(skb, &key))
		return 0;
	bpf_map_delete_elem(&flow_fragments, &key);
	return 0;
}

/* The part of the rewriting that every fragment needs: addresses and the hop count. */
static __noinline int rewrite_addresses(struct __sk_buff *skb, const struct flow_rewrite *a, bool ipv6)
{
	__u32 change;

	if (!a)
		return -1;
	if (ipv6) {
		struct ipv6hdr *ip = bytes_at(skb, ETH_HLEN, sizeof(*ip));
		__u8 hops;

		if (!ip || ip->hop_limit <= 1)
			return -1;
		hops = ip->hop_limit - 1;
		change = add(a->address_sum, (__u16)~bpf_htons(1));
		update_whole_sum(skb, change);
		return bpf_skb_store_bytes(skb, ETH_HLEN + offsetof(struct ipv6hdr, hop_limit), &hops, 1, 0) ||
		       bpf_skb_store_bytes(skb, ETH_HLEN + offsetof(struct ipv6hdr, saddr), a->source, 16, 0) ||
		       bpf_skb_store_bytes(skb, ETH_HLEN + offsetof(struct ipv6hdr, daddr), a->destination, 16, 0);
	} else {
		struct iphdr *ip = bytes_at(skb, ETH_HLEN, sizeof(*ip));
		__u16 check;
		__u8 hops;

		if (!ip || ip->ttl <= 1)
			return -1;
		hops = ip->ttl - 1;
		/* The TTL is the upper byte of its 16-bit word. */
		change = add(a->address_sum, (__u16)~bpf_htons(0x100));
		check = ~fold(add((__u16)~ip->check, change));
		return bpf_skb_store_bytes(skb, ETH_HLEN + offsetof(struct iphdr, ttl), &hops, 1, 0) ||
		       bpf_skb_store_bytes(skb, ETH_HLEN + offsetof(struct iphdr, check), &check, 2, 0) ||
		       bpf_skb_store_bytes(skb, ETH_HLEN + offsetof(struct iphdr, saddr), a->source, 4, 0) ||
		       bpf_skb_store_bytes(skb, ETH_HLEN + offsetof(struct iphdr, daddr), a->destination, 4, 0);
	}
}

/*
 * Sends the first fragment of a young flow's datagram; the later ones follow it.  It leaves to the kernel a fragment
 * that must be fragmented again, or that the kernel must answer with an ICMP error.
 */
static __noinline int send_first_fragment(struct __sk_buff *skb, const struct packet *p, struct flow_rewrite *a)
{
	struct fragments key = {};
	struct flow_rewrite *sent;
	__be16 ports[2];
	int verdict;

	if (!p || !a || p->protocol != UDP || p->hops <= 1 || p->length > a->out.mtu || !is_fragment(skb, &key))
		return NOT_SENT;
	/* In the flow itself, where nothing reads it, because a copy would need too much of the stack. */
	a->fragment_sent = fragment_time();
	bpf_map_update_elem(&flow_fragments, &key, a, BPF_ANY);
	sent = bpf_map_lookup_elem(&flow_fragments, &key);
	if (sent)
		sent->out.first_fragment = sent->fragment_sent;
	ports[0] = bpf_htons(a->source_port);
	ports[1] = bpf_htons(a->destination_port);
	if (update_transport_check(skb, p, a, p->transport + UDP_CHECK) ||
	    bpf_skb_store_bytes(skb, p->transport, ports, sizeof(ports), 0) || rewrite_addresses(skb, a, p->ipv6) ||
	    (verdict = send(skb, a), was_reused(a, tag_of(p)))) {
		/* As in rewrite_and_send(); later fragments must not be sent either. */
		bpf_map_delete_elem(&flow_fragments, &key);
		count(DROP_REWRITE_FAILED);
		return DROPPED;
	}
	count_sent();
	return verdict;
}

/* For a later fragment, which has no ports. If a young flow sent the first fragment, this one takes the same path. */
static __noinline int send_later_fragment(struct __sk_buff *skb)
{
	struct fragments key = {};
	struct flow_rewrite *a;

	if (!is_fragment(skb, &key))
		return NOT_SENT;
	a = bpf_map_lookup_elem(&flow_fragments, &key);
	if (!a || a->device_in != skb->ifindex || !is_for(skb, a->mac_in) || !is_same_datagram(a->fragment_sent) ||
	    (__u8)(fragment_time() - a->out.first_fragment) > FRAGMENTS_NS >> 27)
		return NOT_SENT;
	a->fragment_sent = fragment_time();
	if (rewrite_addresses(skb, a, skb->protocol == bpf_htons(ETH_P_IPV6))) {
		count(DROP_REWRITE_FAILED);
		return DROPPED;
	}
	count_sent();
	return send(skb, a);
}

#endif
