/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The node's own processes: services are translated when a socket connects or
 * sends, so there is nothing left to translate in its packets.  Only sockets
 * of the network namespace that the proxy serves.
 */
#include "backend.h"

#define ALLOW 1
#define REFUSE 0
#define EPERM_ 1
#define ECONNREFUSED_ 111
#define ETIMEDOUT_ 110
#define SOCKET_FLOW_SECONDS 30		/* as long as conntrack would remember a UDP flow without replies */

static __always_inline bool is_served(struct bpf_sock_addr *ctx)
{
	return bpf_get_netns_cookie(ctx) == settings.netns_cookie &&
	       (ctx->protocol == TCP || ctx->protocol == UDP);
}

/* ::ffff:0:0/96: an IPv6 socket that talks IPv4. */
static __always_inline bool is_mapped(const union address *a)
{
	return !a->words[0] && !a->words[1] && a->words[2] == bpf_htonl(0xffff);
}

/*
 * The node's own NodePorts are also served on 127.0.0.0/8 where that is asked for, never on ::1.
 * With a frame of its own: the schedulers need all of the stack that is left.
 */
static __noinline int find_own_frontend(const struct packet *p, struct frontend *f)
{
	if (!p || !f || !find_frontend(p, f))
		return 0;
	if (f->kind == UNSERVED_NODE_PORT && settings.localhost_node_ports && !p->ipv6 &&
	    is_loopback4(p->destination.v4))
		f->kind = NODE_PORT;
	return 1;
}

/* An unconnected UDP socket keeps its endpoint as long as it keeps sending and the endpoint serves. */
static __always_inline bool recall(const struct socket_flow_key *key, const struct entitlement *e, bool ipv6,
				   struct backend *b)
{
	struct affinity *last = bpf_map_lookup_elem(&socket_flows, key);
	__u64 now = bpf_ktime_get_ns();

	if (!last || now - last->last_used > SOCKET_FLOW_SECONDS * NANOSECONDS)
		return false;
	if (!position_in_list(e, last->backend, last->position) || !load_backend(last->backend, ipv6, b))
		return false;
	last->last_used = now;
	return true;
}

static __always_inline void remember(const struct socket_flow_key *key, const struct backend *b)
{
	struct affinity value = { .last_used = bpf_ktime_get_ns(), .backend = b->id };

	bpf_map_update_elem(&socket_flows, key, &value, BPF_ANY);
}

static __always_inline void note_peer(__u64 cookie, const struct packet *p, const struct backend *b)
{
	long failed;

	if (p->ipv6) {
		struct socket_peer6_key key = { .cookie = cookie, .port = b->port, .protocol = p->protocol };
		struct socket_peer6 peer = { .port = p->destination_port };

		__builtin_memcpy(key.address, &b->address, 16);
		__builtin_memcpy(peer.address, &p->destination, 16);
		failed = bpf_map_update_elem(&socket_peers6, &key, &peer, BPF_ANY);
	} else {
		struct socket_peer4_key key = { .cookie = cookie, .port = b->port, .protocol = p->protocol };
		struct socket_peer4 peer = { .port = p->destination_port };

		__builtin_memcpy(key.address, &b->address, 4);
		__builtin_memcpy(peer.address, &p->destination, 4);
		failed = bpf_map_update_elem(&socket_peers4, &key, &peer, BPF_ANY);
	}
	if (failed)
		count(SOCKET_PEER_FULL);
}

/*
 * As the application would see it: refused at once, or as if every packet were
 * lost; a datagram that netfilter drops on its way out is not permitted.
 */
static __always_inline int refuse(enum reason reason, enum protocol protocol)
{
	switch (reason) {
	case REJECT_NO_ENDPOINTS:
		count(REJECT_NO_ENDPOINTS_SOCKET);
		bpf_set_retval(-ECONNREFUSED_);
		break;
	case DROP_SOURCE_RANGE:
		count(DROP_SOURCE_RANGE_SOCKET);
		bpf_set_retval(protocol == UDP ? -EPERM_ : -ETIMEDOUT_);
		break;
	default:
		count(DROP_NO_LOCAL_ENDPOINTS_SOCKET);
		bpf_set_retval(protocol == UDP ? -EPERM_ : -ETIMEDOUT_);
	}
	return REFUSE;
}

static __always_inline bool is_specified(const union address *a)
{
	return a->words[0] | a->words[1] | a->words[2] | a->words[3];
}

/* What the route would give a socket that is bound to no address: to an address of the node, that address itself. */
static __always_inline void likely_source(struct packet *p)
{
	if (node_address(&p->destination, p->ipv6))
		p->source = p->destination;
	else
		own_address(&p->source, p->ipv6);
}

/*
 * ALLOW or REFUSE. `b->id` is set if the destination has to be rewritten.
 * `datagram`: a single message of an unconnected socket.
 */
static __noinline int translate(struct packet *p, __u64 cookie, bool datagram, struct backend *b)
{
	struct socket_flow_key key = { .cookie = cookie };
	enum reason reason = REASON_UNSPECIFIED;
	struct entitlement e = {};
	struct frontend f = {};
	struct table *table;
	__u32 table_id;

	if (!p || !b)
		return ALLOW;
	/* The kernel takes the unspecified address for the loopback. */
	if (!p->ipv6 && !p->destination.v4)
		p->destination.v4 = bpf_htonl(0x7f000001);
	if (!find_own_frontend(p, &f))
		return ALLOW;
	table = table_in_force(f.service, &table_id);
	if (!table)
		return ALLOW;
	if (!is_specified(&p->source))
		likely_source(p);
	switch (decide(p, &f, table, table_id, 0, &e, &reason)) {
	case VERDICT_SERVE:
		break;
	case VERDICT_PASS:
		return ALLOW;
	default:
		return refuse(reason, p->protocol);
	}
	if (datagram) {
		key.service = f.service;
		key.kind = f.kind;
		if (!recall(&key, &e, p->ipv6, b)) {
			if (!choose_backend(p, &e, b))
				return refuse(REJECT_NO_ENDPOINTS, p->protocol);
			remember(&key, b);
			count(NEW_FLOW_SOCKET);
		}
	} else {
		if (!choose_backend(p, &e, b))
			return refuse(REJECT_NO_ENDPOINTS, p->protocol);
		count(NEW_FLOW_SOCKET);
	}
	note_peer(cookie, p, b);
	return ALLOW;
}

/* The verifier wants constant offsets into these: each is read by an instruction of its own. */
#define FIELD(x) (*(volatile typeof(x) *)&(x))

/* The address a socket is bound to, or that a message is to be sent from; else none. */
static __always_inline void bound_source4(struct bpf_sock_addr *ctx, bool datagram, struct packet *p)
{
	if (datagram && ctx->msg_src_ip4)
		p->source.v4 = ctx->msg_src_ip4;
	else if (ctx->sk)
		p->source.v4 = FIELD(ctx->sk->src_ip4);
}

static __always_inline void bound_source6(struct bpf_sock_addr *ctx, bool datagram, struct packet *p)
{
	struct bpf_sock *sk = ctx->sk;
	union address a = {};

	if (datagram) {
		a.words[0] = FIELD(ctx->msg_src_ip6[0]);
		a.words[1] = FIELD(ctx->msg_src_ip6[1]);
		a.words[2] = FIELD(ctx->msg_src_ip6[2]);
		a.words[3] = FIELD(ctx->msg_src_ip6[3]);
	}
	if (!is_specified(&a) && sk) {
		a.words[0] = FIELD(sk->src_ip6[0]);
		a.words[1] = FIELD(sk->src_ip6[1]);
		a.words[2] = FIELD(sk->src_ip6[2]);
		a.words[3] = FIELD(sk->src_ip6[3]);
	}
	if (p->ipv6)
		p->source = a;
	else if (is_mapped(&a))
		p->source.v4 = a.words[3];
}

static __always_inline int outgoing4(struct bpf_sock_addr *ctx, bool datagram)
{
	struct packet p = {};
	struct backend b = {};

	if (!is_served(ctx))
		return ALLOW;
	p.protocol = ctx->protocol;
	p.destination.v4 = ctx->user_ip4;
	p.destination_port = bpf_ntohs(ctx->user_port);
	bound_source4(ctx, datagram, &p);
	if (!translate(&p, bpf_get_socket_cookie(ctx), datagram, &b))
		return REFUSE;
	if (b.id) {
		ctx->user_ip4 = b.address.v4;
		ctx->user_port = bpf_htons(b.port);
	}
	return ALLOW;
}

static __always_inline int outgoing6(struct bpf_sock_addr *ctx, bool datagram)
{
	struct packet p = {};
	struct backend b = {};
	bool mapped;

	if (!is_served(ctx))
		return ALLOW;
	p.protocol = ctx->protocol;
	p.destination.words[0] = ctx->user_ip6[0];
	p.destination.words[1] = ctx->user_ip6[1];
	p.destination.words[2] = ctx->user_ip6[2];
	p.destination.words[3] = ctx->user_ip6[3];
	p.destination_port = bpf_ntohs(ctx->user_port);
	mapped = is_mapped(&p.destination);
	if (mapped) {
		p.destination.v4 = p.destination.words[3];
		p.destination.words[1] = p.destination.words[2] = p.destination.words[3] = 0;
	} else {
		p.ipv6 = true;
	}
	bound_source6(ctx, datagram, &p);
	if (!translate(&p, bpf_get_socket_cookie(ctx), datagram, &b))
		return REFUSE;
	if (!b.id)
		return ALLOW;
	if (mapped) {
		ctx->user_ip6[3] = b.address.v4;
	} else {
		ctx->user_ip6[0] = b.address.words[0];
		ctx->user_ip6[1] = b.address.words[1];
		ctx->user_ip6[2] = b.address.words[2];
		ctx->user_ip6[3] = b.address.words[3];
	}
	ctx->user_port = bpf_htons(b.port);
	return ALLOW;
}

/* Backwards: the application is told the address that it asked for. */
static __always_inline struct socket_peer4 *peer_of4(struct bpf_sock_addr *ctx, __be32 address)
{
	struct socket_peer4_key key = {
		.cookie = bpf_get_socket_cookie(ctx),
		.port = bpf_ntohs(ctx->user_port),
		.protocol = ctx->protocol,
	};

	__builtin_memcpy(key.address, &address, 4);
	return bpf_map_lookup_elem(&socket_peers4, &key);
}

static __always_inline int incoming4(struct bpf_sock_addr *ctx)
{
	struct socket_peer4 *peer;
	__be32 address;

	if (!is_served(ctx))
		return ALLOW;
	peer = peer_of4(ctx, ctx->user_ip4);
	if (!peer)
		return ALLOW;
	__builtin_memcpy(&address, peer->address, 4);
	ctx->user_ip4 = address;
	ctx->user_port = bpf_htons(peer->port);
	return ALLOW;
}

static __always_inline int incoming6(struct bpf_sock_addr *ctx)
{
	struct socket_peer6_key key = {};
	struct socket_peer6 *peer6;
	union address a = {};

	if (!is_served(ctx))
		return ALLOW;
	a.words[0] = ctx->user_ip6[0];
	a.words[1] = ctx->user_ip6[1];
	a.words[2] = ctx->user_ip6[2];
	a.words[3] = ctx->user_ip6[3];
	if (is_mapped(&a)) {
		struct socket_peer4 *peer4 = peer_of4(ctx, a.words[3]);
		__be32 address;

		if (!peer4)
			return ALLOW;
		__builtin_memcpy(&address, peer4->address, 4);
		ctx->user_ip6[3] = address;
		ctx->user_port = bpf_htons(peer4->port);
		return ALLOW;
	}
	key.cookie = bpf_get_socket_cookie(ctx);
	key.port = bpf_ntohs(ctx->user_port);
	key.protocol = ctx->protocol;
	__builtin_memcpy(key.address, &a, 16);
	peer6 = bpf_map_lookup_elem(&socket_peers6, &key);
	if (!peer6)
		return ALLOW;
	__builtin_memcpy(&a, peer6->address, 16);
	ctx->user_ip6[0] = a.words[0];
	ctx->user_ip6[1] = a.words[1];
	ctx->user_ip6[2] = a.words[2];
	ctx->user_ip6[3] = a.words[3];
	ctx->user_port = bpf_htons(peer6->port);
	return ALLOW;
}

SEC("cgroup/connect4")
int connect4(struct bpf_sock_addr *ctx)
{
	return outgoing4(ctx, false);
}

SEC("cgroup/connect6")
int connect6(struct bpf_sock_addr *ctx)
{
	return outgoing6(ctx, false);
}

SEC("cgroup/sendmsg4")
int sendmsg4(struct bpf_sock_addr *ctx)
{
	return outgoing4(ctx, true);
}

SEC("cgroup/sendmsg6")
int sendmsg6(struct bpf_sock_addr *ctx)
{
	return outgoing6(ctx, true);
}

SEC("cgroup/recvmsg4")
int recvmsg4(struct bpf_sock_addr *ctx)
{
	return incoming4(ctx);
}

SEC("cgroup/recvmsg6")
int recvmsg6(struct bpf_sock_addr *ctx)
{
	return incoming6(ctx);
}

SEC("cgroup/getpeername4")
int getpeername4(struct bpf_sock_addr *ctx)
{
	return incoming4(ctx);
}

SEC("cgroup/getpeername6")
int getpeername6(struct bpf_sock_addr *ctx)
{
	return incoming6(ctx);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
