/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Socket LB for processes of the node and for pods: services are translated when a socket connects or sends, so its
 * packets need no translation.  translate.h decides about the endpoint.
 */
#include "ctx_sock.h"
#include "translate.h"

#define SOL_SOCKET_ 1
#define SO_MARK_ 36

/* As CONTEXT_POINTER of common.h: if the field were read twice, the compiler would keep its address. */
static __always_inline __u32 protocol_of(struct bpf_sock_addr *ctx)
{
	__u32 protocol;

	asm volatile("%0 = *(u32 *)(%1 + %2)"
		     : "=r"(protocol)
		     : "r"(ctx), "i"(offsetof(struct bpf_sock_addr, protocol)));
	return protocol;
}

/* Sockets of the network namespace that the proxy serves, and those that may belong to pods. */
static __always_inline bool may_be_served(struct bpf_sock_addr *ctx)
{
	__u32 protocol = protocol_of(ctx);

	return (protocol == TCP || protocol == UDP) &&
	       (settings.pod_sockets || bpf_get_netns_cookie(ctx) == settings.netns_cookie);
}

/* ::ffff:0:0/96: an IPv6 socket that uses IPv4. */
static __always_inline bool is_mapped(const union address *a)
{
	return !a->words[0] && !a->words[1] && a->words[2] == bpf_htonl(0xffff);
}

/* Reads the address of the call; a mapped one as IPv4. True: it is an IPv4 address in an IPv6 socket. */
static __always_inline bool read_address6(struct bpf_sock_addr *ctx, union address *a)
{
	bool mapped;

	a->words[0] = ctx->user_ip6[0];
	a->words[1] = ctx->user_ip6[1];
	a->words[2] = ctx->user_ip6[2];
	a->words[3] = ctx->user_ip6[3];
	mapped = is_mapped(a);
	if (mapped) {
		a->v4 = a->words[3];
		a->words[1] = a->words[2] = a->words[3] = 0;
	}
	return mapped;
}

static __always_inline void write_address6(struct bpf_sock_addr *ctx, const union address *a, bool mapped)
{
	if (mapped) {
		ctx->user_ip6[3] = a->v4;
	} else {
		ctx->user_ip6[0] = a->words[0];
		ctx->user_ip6[1] = a->words[1];
		ctx->user_ip6[2] = a->words[2];
		ctx->user_ip6[3] = a->words[3];
	}
}

/* Reads the address that the socket is bound to, or that the message is sent from; else none. */
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

/* The namespace of the socket selects the rules: a pod's socket or a process of the node. */
static __always_inline long translate_for(struct bpf_sock_addr *ctx, struct packet *p, bool datagram, struct backend *b)
{
	if (settings.pod_sockets && bpf_get_netns_cookie(ctx) != settings.netns_cookie)
		return translate_for_pod(ctx, p, datagram, b);
	return translate(ctx, p, datagram, b);
}

/*
 * The proxy's nft table masquerades packets with this bit, those of the node's own processes included.  For a
 * connected socket the bit is read with the first packet of a flow; conntrack translates all others.
 */
static __noinline int set_masquerade_mark(struct bpf_sock_addr *ctx)
{
	struct socket_flow_key key = { .cookie = bpf_get_socket_cookie(ctx) };
	struct bpf_sock *sk = ctx->sk;
	struct socket_translations *all;
	__u32 mark;

	if (!sk)
		return 0;
	/* If the bit is that of an earlier message, it is the connection's from now on, and no message clears it. */
	all = translations_of(sk, 0);
	if (all)
		all->marked = 0;
	bpf_map_delete_elem(&socket_flows, &key);
	mark = FIELD(sk->mark) | settings.masquerade_mark;
	return bpf_setsockopt(ctx, SOL_SOCKET_, SO_MARK_, &mark, sizeof(mark));
}

/*
 * A message of an unconnected socket already has its mark, so the nft table takes the bit from the socket for this
 * packet.  The next message, or a connection, may have another destination and must not find the bit set.  Only a bit
 * that was set here is cleared.
 */
static __noinline int mark_for_message(struct bpf_sock_addr *ctx, bool masquerade)
{
	struct socket_flow_key key = { .cookie = bpf_get_socket_cookie(ctx) };
	struct bpf_sock *sk = ctx->sk;
	struct socket_translations *all;
	__u32 mark;

	if (!settings.mark_datagrams || !sk)
		return 0;
	mark = FIELD(sk->mark);
	if (!(mark & settings.masquerade_mark) == !masquerade)
		return 0;
	all = translations_of(sk, masquerade ? BPF_SK_STORAGE_GET_F_CREATE : 0);
	if (masquerade && all)
		all->marked = 1;
	else if (masquerade)
		share_translation(&key, 0);
	else if (all && all->marked)
		all->marked = 0;
	else if (bpf_map_delete_elem(&socket_flows, &key))
		return 0;
	mark ^= settings.masquerade_mark;
	return bpf_setsockopt(ctx, SOL_SOCKET_, SO_MARK_, &mark, sizeof(mark));
}

static __always_inline void request_masquerade(struct bpf_sock_addr *ctx, bool datagram, int verdict)
{
	if (!datagram && verdict == ALLOW_MASQUERADED)
		set_masquerade_mark(ctx);
	else
		mark_for_message(ctx, verdict == ALLOW_MASQUERADED);
}

static __always_inline int outgoing4(struct bpf_sock_addr *ctx, bool datagram)
{
	struct packet p = {};
	struct backend b = {};
	long verdict;

	if (!may_be_served(ctx))
		return ALLOW;
	p.protocol = protocol_of(ctx);
	p.destination.v4 = ctx->user_ip4;
	p.destination_port = bpf_ntohs(ctx->user_port);
	bound_source4(ctx, datagram, &p);
	verdict = translate_for(ctx, &p, datagram, &b);
	if (verdict == REFUSE)
		return REFUSE;
	request_masquerade(ctx, datagram, verdict);
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
	long verdict;
	bool mapped;

	if (!may_be_served(ctx))
		return ALLOW;
	p.protocol = protocol_of(ctx);
	p.destination_port = bpf_ntohs(ctx->user_port);
	mapped = read_address6(ctx, &p.destination);
	p.ipv6 = !mapped;
	bound_source6(ctx, datagram, &p);
	verdict = translate_for(ctx, &p, datagram, &b);
	if (verdict == REFUSE)
		return REFUSE;
	request_masquerade(ctx, datagram, verdict);
	if (!b.id)
		return ALLOW;
	write_address6(ctx, &b.address, mapped);
	ctx->user_port = bpf_htons(b.port);
	return ALLOW;
}

/* A pod sends to itself.  It must not fill the maps that it shares with others, however many sockets it has. */
static __always_inline bool is_pods_own(struct bpf_sock_addr *ctx, const struct place *at, bool ipv6)
{
	return settings.pod_sockets && bpf_get_netns_cookie(ctx) != settings.netns_cookie &&
	       (ipv6 ? is_loopback6(&at->address) : is_loopback4(at->address.v4));
}

/*
 * A message of a socket on the node whose port is also a NodePort's number: what is sent back must reach it, and not the
 * service.  An entry that leads to itself tells that (answers_asker() in translate.h).
 */
static __noinline int note_asker(__u64 cookie, const struct place *at, bool ipv6)
{
	struct socket_translation t = { .port = at->port, .original_port = at->port, .ipv6 = ipv6 };

	if (!is_node_address(&at->address, ipv6) && !(ipv6 && is_loopback6(&at->address)))
		return 0;
	__builtin_memcpy(t.address, &at->address, 16);
	__builtin_memcpy(t.original, &at->address, 16);
	return share_peer(cookie, UDP, &t);
}

/* A reply keeps the flow of an unconnected socket alive, as in conntrack.  `original`: where the application had sent. */
static __noinline int note_reply(__u64 cookie, const struct place *original, bool ipv6, __u64 now)
{
	struct socket_flow_key key = { .cookie = cookie };
	struct affinity *flow;
	struct frontend f = {};
	struct packet p = {};

	p.destination = original->address;
	p.destination_port = original->port;
	p.protocol = UDP;
	p.ipv6 = ipv6;
	if (!find_own_frontend(&p, &f))
		return 0;
	key.service = f.service;
	key.kind = f.kind;
	flow = bpf_map_lookup_elem(&socket_flows, &key);
	if (!flow)
		return 0;
	flow->last_used = now;
	flow->position |= ANSWERED;
	return 0;
}

/*
 * Reverse translation: the application sees the address that it connected or sent to.  `received`: a message came from
 * there.  In the shared maps it is noted once in 2^30 ns, about a second, because that takes several lookups.
 */
static __noinline int original_destination(struct bpf_sock_addr *ctx, const struct place *at, bool ipv6, bool received,
					   struct place *original)
{
	__u64 cookie = bpf_get_socket_cookie(ctx), now = received ? bpf_ktime_get_ns() : 0;
	__u8 *answered = NULL, second = now >> 30;

	if (stored_original(socket_of(ctx), at, ipv6, original, now))
		return 1;
	if (!shared_original(cookie, at, protocol_of(ctx), ipv6, original, &answered)) {
		if (received && may_be_node_port(at->port) && !is_pods_own(ctx, at, ipv6))
			note_asker(cookie, at, ipv6);
		return 0;
	}
	if (received && *answered != second) {
		*answered = second;
		note_reply(cookie, original, ipv6, now);
	}
	return 1;
}

static __always_inline int incoming4(struct bpf_sock_addr *ctx, bool received)
{
	struct place at = {}, original = {};

	if (!may_be_served(ctx))
		return ALLOW;
	at.address.v4 = ctx->user_ip4;
	at.port = bpf_ntohs(ctx->user_port);
	if (original_destination(ctx, &at, false, received, &original)) {
		ctx->user_ip4 = original.address.v4;
		ctx->user_port = bpf_htons(original.port);
	}
	return ALLOW;
}

static __always_inline int incoming6(struct bpf_sock_addr *ctx, bool received)
{
	struct place at = {}, original = {};
	bool mapped;

	if (!may_be_served(ctx))
		return ALLOW;
	at.port = bpf_ntohs(ctx->user_port);
	mapped = read_address6(ctx, &at.address);
	if (!original_destination(ctx, &at, !mapped, received, &original))
		return ALLOW;
	write_address6(ctx, &original.address, mapped);
	ctx->user_port = bpf_htons(original.port);
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
	return incoming4(ctx, true);
}

SEC("cgroup/recvmsg6")
int recvmsg6(struct bpf_sock_addr *ctx)
{
	return incoming6(ctx, true);
}

SEC("cgroup/getpeername4")
int getpeername4(struct bpf_sock_addr *ctx)
{
	return incoming4(ctx, false);
}

SEC("cgroup/getpeername6")
int getpeername6(struct bpf_sock_addr *ctx)
{
	return incoming6(ctx, false);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
