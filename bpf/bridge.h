/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * A reply between two ports of one bridge is switched and would never meet
 * the IP layer, which alone can translate it back.  It is given the bridge's
 * MAC address so that it comes up.
 */
#ifndef PEP_BRIDGE_H
#define PEP_BRIDGE_H

#include "conntrack.h"

/* What is known of a device, if it is a port of a bridge. */
static __always_inline struct node_device *port_of_bridge(__u32 ifindex)
{
	struct node_device *d = bpf_map_lookup_elem(&devices, &ifindex);

	return d && d->bridge ? d : NULL;
}

static __noinline int is_translated_reply(struct __sk_buff *skb, const struct packet *p)
{
	struct nf_conn___pep *ct;
	__u8 direction;
	int translated;

	if (!p)
		return 0;
	ct = find_flow(skb, p, &direction);
	if (!ct)
		return 0;
	translated = direction == DIRECTION_REPLY && (ct->status & IPS_DST_NAT_);
	bpf_ct_release(ct);
	return translated;
}

/* Gives the frame the MAC address of its port's bridge. */
static __always_inline bool lift(struct __sk_buff *skb, const struct node_device *port)
{
	__u8 mac[6];

	__builtin_memcpy(mac, port->bridge_mac, sizeof(mac));
	return !bpf_skb_store_bytes(skb, 0, mac, sizeof(mac), 0);
}

static __always_inline bool is_for_bridge(struct __sk_buff *skb, const struct node_device *port)
{
	__u8 *frame = bytes_at(skb, 0, ETH_HLEN);
	int i;

	if (!frame)
		return true;
	for (i = 0; i < 6; i++)
		if (frame[i] != port->bridge_mac[i])
			return false;
	return true;
}

/* True: the packet is a fragment, and `key` says of what. IPv6: with the fragment header first, as senders put it. */
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

static __always_inline void lift_bridged_reply(struct __sk_buff *skb, const struct packet *p)
{
	struct node_device *port;
	struct fragments key = {};
	__u32 lifted = 1;

	if (!settings.conntrack_lookup || !comes_from_endpoint(p))
		return;
	port = port_of_bridge(skb->ifindex);
	if (!port || is_for_bridge(skb, port) ||
	    !is_translated_reply(skb, p) || !lift(skb, port))
		return;
	count(BRIDGED_REPLY_LIFTED);
	if (is_fragment(skb, &key))
		bpf_map_update_elem(&lifted_fragments, &key, &lifted, BPF_ANY);
}

/* A packet without ports: if its first fragment was lifted it goes the same way, to be put together there. */
static __always_inline void lift_later_fragment(struct __sk_buff *skb)
{
	struct node_device *port;
	struct fragments key = {};

	if (!is_fragment(skb, &key) || !bpf_map_lookup_elem(&lifted_fragments, &key))
		return;
	port = port_of_bridge(skb->ifindex);
	if (port)
		lift(skb, port);
}

#endif
