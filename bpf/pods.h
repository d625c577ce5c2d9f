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
