/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* tc ingress: every packet that enters the node passes here once. docs/data-plane.md tells its way. */
#include "skb.h"
#include "parse.h"
#include "serve.h"
#include "pods.h"
#include "bridge.h"
#include "forward.h"
#include "opened.h"

/* The device as the IP layer will see it: a port's packets come in by its bridge. */
static __always_inline __u32 ip_device(struct __sk_buff *skb)
{
	__u32 ifindex = skb->ifindex;
	struct node_device *port = port_of_bridge(ifindex);

	return port ? port->bridge : ifindex;
}

/* What the fast path did not send goes on to the kernel. */
static __always_inline int carried(int verdict)
{
	return verdict == NOT_SENT ? TC_ACT_UNSPEC : verdict;
}

#define PACKET_HOST 0

/* The frame is meant for this node, not for somebody whose traffic it only sees. */
static __always_inline bool is_for_node(struct __sk_buff *skb, bool bridge_port)
{
	struct node_device *port;

	if (!bridge_port)
		return skb->pkt_type == PACKET_HOST;
	port = port_of_bridge(skb->ifindex);
	return port && port->passage && is_for_bridge(skb, port);
}

/* True, and `b` filled, if XDP has chosen this packet's endpoint and left the rest to us. */
static __noinline int take_over_from_xdp(const struct packet *p, const struct entitlement *e, struct backend *b)
{
	struct xdp_choice *found, choice;

	if (!p || !e || !b)
		return 0;
	found = bpf_map_lookup_elem(&xdp_choices, p);
	if (!found)
		return 0;
	choice = *found;
	bpf_map_delete_elem(&xdp_choices, p);
	if (choice.service != e->service || !position_in_list(e, choice.backend, 0))
		return 0;
	return load_backend(choice.backend, p->ipv6, b);
}

/* XDP has just opened this packet's flow: there is nothing to decide, nor to learn yet. */
static __noinline int is_opened_by_xdp(struct __sk_buff *skb, const struct packet *p)
{
	struct xdp_opened *o;

	if (!p)
		return 0;
	o = opened_at(p);
	if (!o || !o->when || !is_same_flow(&o->key, p) || bpf_ktime_get_coarse_ns() - o->when > NANOSECONDS)
		return 0;
	o->when = 0;
	if (o->masqueraded)
		say_masqueraded(skb);
	return 1;
}

static __always_inline bool chosen_before(struct __sk_buff *skb, const struct packet *p, const struct entitlement *e,
					  struct backend *b)
{
	return (settings.pod_sockets && take_over(skb, p, e, b)) || (settings.xdp && take_over_from_xdp(p, e, b));
}

/*
 * A packet that may open a flow to a service.  `asked`, if not NULL: its socket was translated to an endpoint that is
 * gone, and had asked for this.
 */
static __always_inline int serve(struct __sk_buff *skb, struct packet *p, const struct frontend *f,
				 struct place *asked, bool fast)
{
	enum existence existence;
	struct table *table;
	__u32 table_id;

	table = table_in_force(f->service, &table_id);
	if (!table)
		return TC_ACT_UNSPEC;
	existence = flow_of(skb, p, f, table);
	if (existence == FLOW_ASSURED && p->protocol == UDP && fast)
		return carried(learn_and_send(skb, p, ip_device(skb), true));
	if (existence == FLOW_MASQUERADED)
		say_masqueraded(skb);
	if (existence)
		return TC_ACT_UNSPEC;
	return open_flow(skb, p, f, table, table_id, asked);
}

/*
 * Where XDP runs on packets, the kernel (6.18) copies nearly each of them to make room, and forgets the length of its
 * link header: what comes here begins with the IP header then.
 */
static __noinline int has_lost_link_header(struct __sk_buff *skb)
{
	__u32 ifindex = skb->ifindex;
	struct xdp_device *device;
	__u8 *begin;
	int i;

	device = bpf_map_lookup_elem(&xdp_devices, &ifindex);
	begin = bytes_at(skb, 0, ETH_HLEN);
	if (!device || !begin)
		return 0;
	for (i = 0; i < 6; i++)
		if (begin[i] != device->mac[i])
			return begin[0] >> 4 == (skb->protocol == bpf_htons(ETH_P_IP) ? 4 : 6);
	return 0;
}

static __always_inline int ingress(struct __sk_buff *skb, __u32 link, bool bridge_port)
{
	struct packet p = {};
	struct place asked;
	struct frontend f;
	bool stale = false;
	bool parsed, fast;
	int verdict;

	if (settings.xdp_generic && link && has_lost_link_header(skb))
		link = 0;
	parsed = parse_packet(skb, link, &p);
	if (goes_to_loopback(&p))
		return drop_packet(skb, &p, DROP_LOOPBACK_DESTINATION);
	if (!parsed) {
		if (bridge_port)
			lift_later_fragment(skb);
		return TC_ACT_UNSPEC;
	}
	if (settings.xdp && p.opens && is_opened_by_xdp(skb, &p))
		return TC_ACT_UNSPEC;
	/* What the redirects to neighbours need is an Ethernet header that comes off. */
	fast = settings.fast_path && link == ETH_HLEN && is_for_node(skb, bridge_port);
	if (fast) {
		verdict = fast_way(skb, &p, bridge_port);
		if (verdict != NOT_SENT && verdict != NOT_KNOWN && verdict != NOT_SURE)
			return verdict;
	}
	if ((p.opens || bridge_port) && find_frontend(&p, &f)) {
		if (!p.opens)
			return TC_ACT_UNSPEC;
	} else if (settings.pod_sockets && p.protocol == UDP && is_stale(skb, &p, &f, &asked)) {
		stale = true;
	} else {
		if (bridge_port)
			lift_bridged_reply(skb, &p);
		return TC_ACT_UNSPEC;
	}
	return serve(skb, &p, &f, stale ? &asked : NULL, fast);
}

/* A device with Ethernet frames. */
SEC("tc")
int tc_ethernet(struct __sk_buff *skb)
{
	return ingress(skb, ETH_HLEN, false);
}

/* A port of a bridge. */
SEC("tc")
int tc_bridge_port(struct __sk_buff *skb)
{
	return ingress(skb, ETH_HLEN, true);
}

/* A device whose packets begin with the IP header: tun, ipip, wireguard. */
SEC("tc")
int tc_l3(struct __sk_buff *skb)
{
	return ingress(skb, 0, false);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
