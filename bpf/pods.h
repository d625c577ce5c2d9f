/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Which pods' sockets are translated when they connect (socketLB: all), and how
 * what they send would look to tc.
 *
 * A socket that is not bound has no source yet, and no device: nothing that the
 * rules ask for.  So the first socket of a network namespace that wants a
 * service is left to tc, which finds the namespace by the socket that the
 * packet still belongs to, and learns what its packets look like.  Only
 * namespaces whose packets come straight into this node are learned: one more
 * hop through an IP layer, and a packet belongs to no socket.
 */
#ifndef PEP_PODS_H
#define PEP_PODS_H

#include "backend.h"

static __noinline int is_excluded(const struct packet *p)
{
	struct excluded_pods_key key = { .family = family_of(p->ipv6) };

	key.prefix_length = 32 + (p->ipv6 ? 128 : 32);
	if (p->ipv6)
		__builtin_memcpy(key.address, &p->source, 16);
	else
		__builtin_memcpy(key.address, &p->source, 4);
	return !!bpf_map_lookup_elem(&excluded_pods, &key);
}

/* tc: what a socket of that network namespace sends looks like this packet. */
static __noinline int learn_pod(__u64 netns, const struct packet *p, __u32 device)
{
	struct pod_key key = { .netns = netns, .family = family_of(p->ipv6) };
	struct pod_source source = { .learned = bpf_ktime_get_ns(), .device = device };

	if (p->ipv6)
		__builtin_memcpy(source.address, &p->source, 16);
	else
		__builtin_memcpy(source.address, &p->source, 4);
	source.served = is_pod_source(p, device) && !is_node_address(&p->source, p->ipv6) && !is_excluded(p);
	bpf_map_update_elem(&pod_sources, &key, &source, BPF_ANY);
	return 0;
}

/* What the socket of this datagram asked for, if it was translated: `moved` of its entry, else NULL. */
static __always_inline __u8 *peer_of(struct __sk_buff *skb, const struct packet *p, struct place *asked)
{
	__u64 cookie = bpf_get_socket_cookie(skb);

	if (!cookie)
		return NULL;
	__builtin_memset(asked, 0, sizeof(*asked));
	if (p->ipv6) {
		struct socket_peer6_key key = { .cookie = cookie, .port = p->destination_port, .protocol = UDP };
		struct socket_peer6 *peer;

		__builtin_memcpy(key.address, &p->destination, 16);
		peer = bpf_map_lookup_elem(&socket_peers6, &key);
		if (!peer)
			return NULL;
		__builtin_memcpy(&asked->address, peer->address, 16);
		asked->port = peer->port;
		return &peer->moved;
	} else {
		struct socket_peer4_key key = { .cookie = cookie, .port = p->destination_port, .protocol = UDP };
		struct socket_peer4 *peer;

		__builtin_memcpy(key.address, &p->destination, 4);
		peer = bpf_map_lookup_elem(&socket_peers4, &key);
		if (!peer)
			return NULL;
		__builtin_memcpy(&asked->address, peer->address, 4);
		asked->port = peer->port;
		return &peer->moved;
	}
}

/* Whether what the packet is for is a serving endpoint of that service (UDP). */
static __noinline int serves(__u32 service, const struct packet *p)
{
	if (p->ipv6) {
		struct endpoint6_key key = { .service = service, .port = p->destination_port, .protocol = UDP };

		__builtin_memcpy(key.address, &p->destination, 16);
		return !!bpf_map_lookup_elem(&endpoints6, &key);
	} else {
		struct endpoint4_key key = { .service = service, .port = p->destination_port, .protocol = UDP };

		__builtin_memcpy(key.address, &p->destination, 4);
		return !!bpf_map_lookup_elem(&endpoints4, &key);
	}
}

/*
 * tc: a datagram of a pod whose endpoint serves its service no more, or that has had another one since: it is
 * served as if its socket had not been translated.  The socket knows nothing of it, and its owner notices
 * nothing.  (A process of the node has to connect anew: its packets do not pass here.)
 */
static __noinline int is_stale(struct __sk_buff *skb, struct packet *p, struct frontend *f, struct place *asked)
{
	__u8 *moved = peer_of(skb, p, asked);
	bool found;

	if (!moved)
		return 0;
	swap_destination(p, asked);
	found = find_frontend(p, f);
	swap_destination(p, asked);
	if (!found || (!*moved && serves(f->service, p)))
		return 0;
	*moved = 1;
	return 1;
}

/* tc: true, and `b` filled, if this flow's endpoint was chosen when its socket connected. */
static __noinline int take_over(struct __sk_buff *skb, const struct packet *p, const struct entitlement *e,
				struct backend *b)
{
	__u64 cookie = bpf_get_socket_cookie(skb);
	struct left_socket *found, left;

	if (!cookie)
		return 0;
	found = bpf_map_lookup_elem(&left_sockets, &cookie);
	if (!found)
		return 0;
	left = *found;
	bpf_map_delete_elem(&left_sockets, &cookie);
	learn_pod(left.netns, p, skb->ifindex);
	if (!left.backend || left.service != e->service || !position_in_list(e, left.backend, 0))
		return 0;
	return load_backend(left.backend, p->ipv6, b);
}

#endif
