/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Ports that processes of the node use. */
#ifndef PEP_NODE_SOCKETS_H
#define PEP_NODE_SOCKETS_H

#include "ctx.h"
#include "flow_table.h"

/*
 * 1: packets with this key could be for a socket of the node.  conntrack does not know young flows, so it would not give
 * the socket another port if a young flow had the same replies.  Not inline: the callers have no stack for the tuple.
 */
static __noinline int node_has_socket(struct context *ctx, const struct flow_key *key)
{
	struct bpf_sock_tuple tuple = {};
	struct bpf_sock *socket;
	__u32 size;

	size = tuple_of(key, &tuple);
	if (key->protocol == UDP)
		socket = bpf_sk_lookup_udp(ctx, &tuple, size, CURRENT_NETNS, 0);
	else
		socket = bpf_skc_lookup_tcp(ctx, &tuple, size, CURRENT_NETNS, 0);
	if (!socket)
		return 0;
	bpf_sk_release(socket);
	return 1;
}

#endif
