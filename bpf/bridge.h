/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * A reply between two ports of one bridge is switched and would never meet
 * the IP layer, which alone can translate it back.  It is given the bridge's
 * MAC address so that it comes up.
 */
#ifndef PEP_BRIDGE_H
#define PEP_BRIDGE_H

#include "conntrack.h"

static __always_inline bool comes_from_endpoint(const struct packet *p)
{
	if (p->ipv6) {
		struct endpoint6_key key = { .port = p->source_port, .protocol = p->protocol };

		__builtin_memcpy(key.address, &p->source, 16);
		return bpf_map_lookup_elem(&endpoints6, &key);
	} else {
		struct endpoint4_key key = { .port = p->source_port, .protocol = p->protocol };

		__builtin_memcpy(key.address, &p->source, 4);
		return bpf_map_lookup_elem(&endpoints4, &key);
	}
}

static __noinline int is_translated_reply(struct __sk_buff *skb, const struct packet *p)
{
	struct bpf_ct_opts___pep opts = { .netns_id = CURRENT_NETNS };
	struct bpf_sock_tuple tuple = {};
	struct nf_conn___pep *ct;
	int translated;
	__u32 size;

	if (!p)
		return 0;
	opts.l4proto = p->protocol;
	size = tuple_of(p, &tuple);
	ct = bpf_skb_ct_lookup(skb, &tuple, size, &opts, CT_OPTS_SIZE);
	if (!ct)
		return 0;
	translated = opts.dir == DIRECTION_REPLY && (ct->status & IPS_DST_NAT_);
	bpf_ct_release(ct);
	return translated;
}

static __always_inline void lift_bridged_reply(struct __sk_buff *skb, const struct packet *p)
{
	__u32 ifindex = skb->ifindex;
	struct node_device *d;
	__u8 *frame, mac[6];
	int i;

	if (!settings.conntrack_lookup || !comes_from_endpoint(p))
		return;
	d = bpf_map_lookup_elem(&devices, &ifindex);
	if (!d || !d->bridge)
		return;
	frame = bytes_at(skb, 0, ETH_HLEN);
	if (!frame)
		return;
	for (i = 0; i < 6; i++)
		if (frame[i] != d->bridge_mac[i])
			break;
	if (i == 6 || !is_translated_reply(skb, p))
		return;
	__builtin_memcpy(mac, d->bridge_mac, sizeof(mac));
	if (!bpf_skb_store_bytes(skb, 0, mac, sizeof(mac), 0))
		count(BRIDGED_REPLY_LIFTED);
}

#endif
