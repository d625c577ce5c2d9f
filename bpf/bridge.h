/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * A reply between two ports of one bridge is switched, and would not reach the IP layer, which has to undo the DNAT.
 * The program gives the frame the bridge's MAC address, so that the bridge passes it up to the IP layer.
 */
#ifndef PEP_BRIDGE_H
#define PEP_BRIDGE_H

#include "conntrack.h"
#include "ctx_skb.h"
#include "fragments.h"

/* The entry of a device, if it is a port of a bridge. */
static __always_inline struct node_device *port_of_bridge(__u32 ifindex)
{
	struct node_device *d = bpf_map_lookup_elem(&devices, &ifindex);

	return d && d->bridge ? d : NULL;
}

/* Gives the frame the MAC address of its port's bridge. */
static __always_inline bool set_bridge_mac(struct __sk_buff *skb, const struct node_device *port)
{
	__u8 mac[6];

	__builtin_memcpy(mac, port->bridge_mac, sizeof(mac));
	return !bpf_skb_store_bytes(skb, 0, mac, sizeof(mac), 0);
}

static __always_inline bool is_for_bridge(struct __sk_buff *skb, const struct node_device *port)
{
	__u8 *frame = bytes_at(skb, 0, ETH_HLEN), known = 0;
	int i;

	for (i = 0; i < 6; i++)
		known |= port->bridge_mac[i];
	/* If another device is the gateway of the ports, the IP layer gets from that one what the bridge does not switch. */
	if (!frame || !known)
		return true;
	for (i = 0; i < 6; i++)
		if (frame[i] != port->bridge_mac[i])
			return false;
	return true;
}

/* ---- flows straight to an endpoint ------------------------------------------------------------ */

/*
 * With bridge-nf-call-iptables=0, netfilter does not see a flow from one port to another.  So it gives the flow no other
 * source port if conntrack has a flow from the client's port to a service of this endpoint.  The replies of both look
 * the same.  They belong to the flow that has begun last, unless conntrack's is a connection that has not ended.
 */
static __always_inline __u32 *bridged_slot(__u64 client)
{
	__u32 number = client >> 32 & (BRIDGED_SLOTS - 1);

	return bpf_map_lookup_elem(&bridged_flows, &number);
}

/*
 * The table must not translate the replies of this flow before conntrack has confirmed the other one again.  Global for
 * the same reason as judge_syn().
 */
__noinline int unconfirm(const struct packet *p)
{
	struct flow_key key;
	struct flow *f, *reply;

	if (!settings.fast_path || !p)
		return 0;
	key_of_replies(p, &p->destination, p->destination_port, &key);
	reply = bpf_map_lookup_elem(&flows, &key);
	if (!reply || reply->young || was_reused(&reply->rewrite, tag_of(&key)))
		return 0;
	reply->confirmed_until = 0;
	reply_key_of(&reply->rewrite, p->protocol, p->ipv6, &key);
	f = bpf_map_lookup_elem(&flows, &key);
	if (f)
		f->confirmed_until = 0;
	return 0;
}

/* A SYN or datagram that is not for a service.  Global for the same reason as judge_syn(). */
__noinline int note_bridged(struct __sk_buff *skb, const struct packet *p)
{
	struct node_device *port;
	__u32 *slot, tag;

	if (!settings.conntrack_lookup || !p || !has_hinted_destination(p))
		return 0;
	port = port_of_bridge(skb->ifindex);
	if (!port || is_for_bridge(skb, port))
		return 0;
	tag = tag_of((const struct flow_key *)p);
	slot = bridged_slot(client_hash((const struct flow_key *)p, false));
	if (!slot || *(volatile __u32 *)slot == tag)
		return 0;
	*(volatile __u32 *)slot = tag;
	if (settings.fast_path)
		unconfirm(p);
	return 0;
}

/* A SYN or datagram for a service.  Global for the same reason as judge_syn(). */
__noinline int forget_bridged(const struct packet *p)
{
	__u32 *slot;

	if (!p)
		return 0;
	slot = bridged_slot(client_hash((const struct flow_key *)p, false));
	if (slot && *(volatile __u32 *)slot)
		*(volatile __u32 *)slot = 0;
	return 0;
}

/* 1: the endpoint's packet answers a flow that note_bridged() has noted.  Global for the same reason as judge_syn(). */
__noinline int is_bridged(const struct packet *p)
{
	struct flow_key key;
	__u32 *slot;

	if (!p)
		return 0;
	slot = bridged_slot(client_hash((const struct flow_key *)p, true));
	if (!slot || !*(volatile __u32 *)slot)
		return 0;
	key_of_replies(p, &p->destination, p->destination_port, &key);
	return *(volatile __u32 *)slot == tag_of(&key);
}

/* ---- replies ---------------------------------------------------------------------------------- */

static __noinline int is_translated_reply(struct __sk_buff *skb, const struct packet *p)
{
	struct nf_conn___pep *ct;
	__u8 direction;
	bool translated, may_be_bridged;

	if (!p)
		return 0;
	ct = find_flow(skb, (const struct flow_key *)p, &direction);
	if (!ct)
		return 0;
	translated = direction == DIRECTION_REPLY && ct->status & IPS_DST_NAT_;
	may_be_bridged = p->protocol == UDP || has_ended(ct, p->protocol);
	bpf_ct_release(ct);
	return translated && !(may_be_bridged && is_bridged(p));
}

/* 1: the frame has the bridge's MAC address now. */
static __noinline int redirect_reply_to_bridge(struct __sk_buff *skb, const struct packet *p)
{
	struct node_device *port;
	struct fragments key = {};
	__u32 redirected = fragment_time();

	if (!p || !settings.conntrack_lookup || !comes_from_endpoint(p))
		return 0;
	/* As forget_fragments(). */
	if (p->fragment && is_fragment(skb, &key))
		bpf_map_delete_elem(&bridged_fragments, &key);
	port = port_of_bridge(skb->ifindex);
	if (!port || is_for_bridge(skb, port) ||
	    !is_translated_reply(skb, p) || !set_bridge_mac(skb, port))
		return 0;
	count(BRIDGED_REPLY_REDIRECTED);
	if (p->fragment)
		bpf_map_update_elem(&bridged_fragments, &key, &redirected, BPF_ANY);
	return 1;
}

/*
 * For a later fragment, which has no ports.  If the first fragment was redirected, this one must follow it to be
 * reassembled.
 */
static __noinline int redirect_fragment_to_bridge(struct __sk_buff *skb)
{
	struct node_device *port;
	struct fragments key = {};
	__u32 *redirected;

	if (!is_fragment(skb, &key))
		return 0;
	redirected = bpf_map_lookup_elem(&bridged_fragments, &key);
	if (!redirected || !is_same_datagram(*redirected))
		return 0;
	*redirected = fragment_time();
	port = port_of_bridge(skb->ifindex);
	return port && set_bridge_mac(skb, port);
}

#endif
