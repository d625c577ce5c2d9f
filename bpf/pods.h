/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Which pods' sockets are translated when they connect (socketLB: all), and what their packets look like to tc.
 *
 * An unbound socket has no source address and no device yet, and the rules need both.  So the first socket of a network
 * namespace that connects to a service is left to tc.  tc finds the namespace by the socket, to which the packet still
 * belongs, and learns what its packets look like.  tc learns only namespaces whose packets come straight into this
 * node: after one more hop through an IP layer a packet belongs to no socket.
 */
#ifndef PEP_PODS_H
#define PEP_PODS_H

#include "ctx_skb.h"
#include "socket_storage.h"

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

/*
 * Whether replies to this packet go back through the device that it came from.  A pod may use any source address
 * (IP_TRANSPARENT, or an address that it configures itself), so the source is trusted only if the node's route leads
 * there.  A bridge may have many pods: the node's neighbour entry must then also have this packet's MAC address.
 * Global for the same reason as judge_syn().
 */
__noinline int is_found_here(struct __sk_buff *skb, const struct packet *p)
{
	__u32 port = skb->ifindex;
	struct node_device *d = bpf_map_lookup_elem(&devices, &port);
	__u32 device = d && d->bridge ? d->bridge : port;
	struct bpf_fib_lookup route = {};
	struct ethhdr *link;
	long found;
	int i;

	if (!settings.pod_sockets || !p)
		return 0;
	route.ifindex = device;
	if (p->ipv6) {
		route.family = AF_INET6;
		__builtin_memcpy(route.ipv6_dst, &p->source, 16);
		__builtin_memcpy(route.ipv6_src, &p->destination, 16);
	} else {
		route.family = AF_INET;
		route.ipv4_dst = p->source.v4;
		route.ipv4_src = p->destination.v4;
	}
	found = bpf_fib_lookup(skb, &route, sizeof(route), 0);
	if ((found != BPF_FIB_LKUP_RET_SUCCESS && found != BPF_FIB_LKUP_RET_NO_NEIGH) || route.ifindex != device)
		return 0;
	if (device == port)
		return 1;
	link = bytes_at(skb, 0, ETH_HLEN);
	if (!link || found != BPF_FIB_LKUP_RET_SUCCESS)
		return 0;
	for (i = 0; i < 6; i++)
		if (link->h_source[i] != route.dmac[i])
			return 0;
	return 1;
}

/* tc: records that packets of that network namespace look like this one. */
static __noinline int learn_pod(__u64 netns, struct __sk_buff *skb, const struct packet *p)
{
	struct pod_key key = { .netns = netns, .family = family_of(p->ipv6) };
	__u32 device = skb->ifindex;
	struct pod_source source = { .learned = bpf_ktime_get_ns(), .device = device };

	if (!is_found_here(skb, p))
		return 0;

	if (p->ipv6)
		__builtin_memcpy(source.address, &p->source, 16);
	else
		__builtin_memcpy(source.address, &p->source, 4);
	source.served = is_pod_source(p, device) && !is_node_address(&p->source, p->ipv6) && !is_excluded(p);
	bpf_map_update_elem(&pod_sources, &key, &source, BPF_ANY);
	return 0;
}

enum socket_state {
	SOCKET_UNTRANSLATED,
	SOCKET_CURRENT,	/* still uses the endpoint that it was translated to */
	SOCKET_MOVED,	/* tc has chosen another one since */
};

/*
 * Whether the socket of this datagram was translated: enum socket_state.  `original`: receives the destination that the
 * application used.  `move`: the socket gets another endpoint now.  A global function, so that the verifier checks it
 * once.
 */
__noinline int find_socket_state(struct __sk_buff *skb, const struct packet *p, struct place *original, bool move)
{
	struct place at = {};
	struct bpf_sock *sk;
	__u64 cookie;
	__u8 *moved;

	if (!settings.pod_sockets || !p || !original)
		return SOCKET_UNTRANSLATED;
	cookie = bpf_get_socket_cookie(skb);
	if (!cookie)
		return SOCKET_UNTRANSLATED;
	at.address = p->destination;
	at.port = p->destination_port;
	__builtin_memset(original, 0, sizeof(*original));
	sk = skb->sk;
	if (sk)
		sk = bpf_sk_fullsock(sk);
	moved = find_original(sk, cookie, &at, UDP, p->ipv6, original);
	if (!moved)
		return SOCKET_UNTRANSLATED;
	if (move)
		*moved = 1;
	return *moved ? SOCKET_MOVED : SOCKET_CURRENT;
}

/* Whether the packet's destination is a serving endpoint of that service (UDP). */
static __noinline int serves(__u32 service, const struct packet *p)
{
	return is_endpoint(&p->destination, p->destination_port, UDP, p->ipv6, service);
}

/*
 * tc: true for a datagram of a pod's translated socket, if its endpoint no longer serves the service, or if tc has
 * moved the socket to another endpoint.  The datagram is served as if the socket had not been translated, and the
 * application does not notice.  (A process of the node has to connect again: its packets do not pass here.)
 */
static __noinline int is_stale(struct __sk_buff *skb, struct packet *p, struct frontend *f, struct place *original)
{
	int state = find_socket_state(skb, p, original, false);
	bool found;

	if (state == SOCKET_UNTRANSLATED)
		return 0;
	swap_destination(p, original);
	found = find_frontend(p, f);
	swap_destination(p, original);
	if (!found || (state == SOCKET_CURRENT && serves(f->service, p)))
		return 0;
	if (state == SOCKET_CURRENT)
		find_socket_state(skb, p, original, true);
	return 1;
}

/* tc: true, and `b` filled, if this flow's endpoint was chosen when its socket connected. */
static __noinline int take_over(struct __sk_buff *skb, const struct packet *p, const struct endpoint_selection *e,
				struct backend *b)
{
	__u64 cookie = bpf_get_socket_cookie(skb);
	struct deferred_socket *found, left;

	if (!cookie)
		return 0;
	found = bpf_map_lookup_elem(&deferred_sockets, &cookie);
	if (!found)
		return 0;
	left = *found;
	bpf_map_delete_elem(&deferred_sockets, &cookie);
	learn_pod(left.netns, skb, p);
	if (!left.backend || left.service != e->service || !position_in_list(e, p->ipv6, left.backend, 0))
		return 0;
	return load_backend(left.backend, p->ipv6, b);
}

#endif
