/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Translates the destination of a socket to an endpoint.  For a process of the node, every verdict is made here,
 * because no program of the proxy sees its packets.  For a pod, only what needs no masquerading is translated here.
 * The rest is left to tc, which sees the pod's packets and handles them as it does without these programs.
 */
#ifndef PEP_TRANSLATE_H
#define PEP_TRANSLATE_H

#include "ctx_sock.h"
#include "pod_sockets.h"
#include "socket_translations.h"
#include "trace.h"

#define ALLOW 1
#define ALLOW_MASQUERADED 2	/* internal, never returned to the kernel */
#define REFUSE 0
#define EPERM_ 1
#define ECONNREFUSED_ 111
#define ETIMEDOUT_ 110
#define PEER_ITSELF (~0U)	/* no backend id: the destination is the endpoint that the socket is connected to */

#ifndef fallthrough
#define fallthrough __attribute__((fallthrough))
#endif

static __always_inline bool serves_node_ports_on_loopback(const struct packet *p)
{
	if (p->ipv6 || !is_loopback4(p->destination.v4) || !settings.localhost_node_ports)
		return false;
	return settings.localhost_node_ports == ON_ALL_LOOPBACK ||
	       (settings.localhost_node_ports == ON_LOCALHOST && p->destination.v4 == bpf_htonl(0x7f000001)) ||
	       node_address(&p->destination, false);
}

/*
 * The node's own NodePorts are also served on loopback addresses where that is configured, never on ::1.
 * Has its own stack frame: the schedulers need all of the remaining stack.
 */
static __noinline int find_own_frontend(const struct packet *p, struct frontend *f)
{
	if (!p || !f || !find_frontend(p, f))
		return 0;
	if (f->kind == UNSERVED_NODE_PORT && serves_node_ports_on_loopback(p))
		f->kind = NODE_PORT;
	return 1;
}

/*
 * An unconnected UDP socket keeps its endpoint as long as conntrack would keep the flow, and the endpoint serves
 * (service-semantics 10).  The lists do not matter: an endpoint that terminates may be in none, and still serve.
 */
__noinline int last_endpoint(struct bpf_sock_addr *ctx, const struct socket_flow_key *key, bool ipv6, struct backend *b)
{
	struct affinity last = {};

	if (!key || !b || !last_translation(ctx, key, &last) || !last.backend)
		return 0;
	if (!is_alive(last.last_used, last.position, bpf_ktime_get_ns()))
		return 0;
	if (load_backend(last.backend, ipv6, b) && is_endpoint(&b->address, b->port, UDP, ipv6, key->service))
		return 1;
	b->id = 0;
	return 0;
}

/*
 * The error that the application would see without these programs: refused at once, or a
 * timeout as if every packet were lost.  EPERM is the error of a datagram that netfilter drops on output.
 */
static __always_inline int refuse(struct context *ctx, const struct packet *p, const struct endpoint_selection *e,
				  enum drop_reason reason)
{
	int error = p->protocol == UDP ? -EPERM_ : -ETIMEDOUT_;

	switch (reason) {
	case REJECT_NO_ENDPOINTS:
		reason = REJECT_NO_ENDPOINTS_SOCKET;
		error = -ECONNREFUSED_;
		break;
	case DROP_SOURCE_RANGE:
		reason = DROP_SOURCE_RANGE_SOCKET;
		break;
	default:
		reason = DROP_NO_LOCAL_ENDPOINTS_SOCKET;
	}
	remember_refused(p, 0, e->service, reason);
	decided(ctx, p, e, NULL, reason);
	/* Without bpf_set_retval the error is EPERM. */
	if (abilities.set_retval)
		bpf_set_retval(error);
	return REFUSE;
}

static __always_inline bool is_specified(const union address *a)
{
	return a->words[0] | a->words[1] | a->words[2] | a->words[3];
}

/*
 * A message of a connected socket that names its peer, as the application knows the peer: 1, and `b` filled if that is
 * a service, whose endpoint the socket is connected to.  The socket gets replies from this endpoint only, so there is
 * no other choice, and no policy counts: the flow exists.  A peer that was not translated stays so for the same reason.
 * Global, for the same reason as choose_by_scheduler.
 */
__noinline int names_peer(struct bpf_sock_addr *ctx, const struct packet *p, struct backend *b)
{
	struct place at = {}, original = {};
	struct bpf_sock *sk = socket_of(ctx);

	if (!p || !b || !sk || FIELD(sk->state) != BPF_TCP_ESTABLISHED)
		return 0;
	if (p->ipv6) {
		at.address.words[0] = FIELD(sk->dst_ip6[0]);
		at.address.words[1] = FIELD(sk->dst_ip6[1]);
		at.address.words[2] = FIELD(sk->dst_ip6[2]);
		at.address.words[3] = FIELD(sk->dst_ip6[3]);
	} else {
		at.address.v4 = FIELD(sk->dst_ip4);
	}
	at.port = bpf_ntohs(FIELD(sk->dst_port));
	if (at.port == p->destination_port && same_address(&at.address, &p->destination, p->ipv6))
		return 1;
	if (!find_original(sk, bpf_get_socket_cookie(ctx), &at, UDP, p->ipv6, &original))
		return 0;
	if (original.port != p->destination_port || !same_address(&original.address, &p->destination, p->ipv6))
		return 0;
	b->address = at.address;
	b->port = at.port;
	b->id = PEER_ITSELF;
	return 1;
}

/* To no service.  Most destinations are no endpoint either, which the hints tell. */
static __always_inline long leave_direct(struct bpf_sock_addr *ctx, const struct packet *p, bool datagram)
{
	if (has_hinted_destination(p))
		forget_original(ctx, p, datagram);
	return ALLOW;
}

/*
 * The number of a NodePort may also be the port of a socket on the node that has asked this one (note_asker() in
 * sock.bpf.c).  The message is the answer, which belongs to a flow that no service has.
 */
__noinline int answers_asker(struct bpf_sock_addr *ctx, const struct packet *p, const struct frontend *f)
{
	struct place at = {}, original = {};
	__u8 *answered;

	if (!p || !f || (f->kind != NODE_PORT && f->kind != UNSERVED_NODE_PORT))
		return 0;
	at.address = p->destination;
	at.port = p->destination_port;
	if (!shared_original(bpf_get_socket_cookie(ctx), &at, UDP, p->ipv6, &original, &answered))
		return 0;
	return original.port == at.port && same_address(&original.address, &at.address, p->ipv6);
}

/* The source that the route would give an unbound socket: for an address of the node, that address itself. */
static __always_inline void likely_source(struct packet *p)
{
	if (node_address(&p->destination, p->ipv6))
		p->source = p->destination;
	else
		own_address(&p->source, p->ipv6);
}

/* Records a choice that takes effect here; `own`: of a process of the node. True: the first time. */
static __always_inline bool record_choice(struct bpf_sock_addr *ctx, const struct packet *p,
					  const struct socket_flow_key *key, bool datagram, bool own,
					  const struct backend *b)
{
	struct affinity last = {};
	bool first = true;

	if (datagram) {
		first = !last_translation(ctx, key, &last) || last.backend != b->id;
		note_translation(ctx, key, p, b);
	} else {
		/* The agent ends UDP sockets of the node whose endpoint is gone; tc handles those of pods (is_stale). */
		note_connected(ctx, p, b, own && p->protocol == UDP);
	}
	return first;
}

/*
 * A process of the node.  REFUSE, ALLOW, or ALLOW_MASQUERADED: the address that the
 * socket is bound to must be hidden.  `b->id` is set if the destination has to be
 * rewritten.  `datagram`: a single message of an unconnected socket.
 * A global function, as translate_for_pod, for the same reason as choose_by_scheduler.
 */
__noinline long translate(struct bpf_sock_addr *ctx, struct packet *p, bool datagram, struct backend *b)
{
	struct socket_flow_key key = { .cookie = bpf_get_socket_cookie(ctx) };
	enum drop_reason reason = NOT_DROPPED;
	struct endpoint_selection e = {};
	struct frontend f = {};
	struct service_config *config;
	enum verdict verdict;
	__u32 config_id;
	bool bound, known;

	if (!p || !b)
		return ALLOW;
	/* The kernel treats the unspecified address as loopback. */
	if (!p->ipv6 && !p->destination.v4)
		p->destination.v4 = bpf_htonl(0x7f000001);
	if (datagram && names_peer(ctx, p, b))
		return ALLOW;
	if (!find_own_frontend(p, &f))
		return leave_direct(ctx, p, datagram);
	if (datagram && answers_asker(ctx, p, &f))
		return ALLOW;
	/* A local cache, such as NodeLocal DNSCache, listens at the ClusterIP itself. */
	if (f.kind == CLUSTER_IP && node_address(&p->destination, p->ipv6))
		return ALLOW;
	config = active_config(f.service, &config_id);
	if (!config)
		return ALLOW;
	e.service = f.service;
	bound = is_specified(&p->source);
	if (!bound)
		likely_source(p);
	key.service = f.service;
	key.kind = f.kind;
	/* First, because policies are for new flows.  The verdict is needed all the same, for masquerading. */
	known = datagram && last_endpoint(ctx, &key, p->ipv6, b);
	verdict = decide(p, &f, config, config_id, 0, &e, &reason);
	if (!known && verdict == VERDICT_PASS)
		return ALLOW;
	if (!known && verdict != VERDICT_SERVE)
		return refuse(ctx, p, &e, reason);
	/* An unbound socket gets the address that it would be masqueraded with. */
	e.masquerade = e.masquerade && bound;
	/* The list may change so fast that it is empty now. */
	if (!known && !choose_backend(p, &e, b))
		return refuse(ctx, p, &e, REJECT_NO_ENDPOINTS);
	if (record_choice(ctx, p, &key, datagram, true, b)) {
		decided(ctx, p, &e, b, NEW_FLOW_SOCKET);
		if (f.kind == NODE_PORT && !p->ipv6 && is_loopback4(p->destination.v4))
			count(LOCALHOST_NODE_PORT);
	}
	return e.masquerade ? ALLOW_MASQUERADED : ALLOW;
}

/* What an unconnected socket did with its earlier messages to this service. */
enum socket_flow {
	SOCKET_FLOW_NEW,
	SOCKET_FLOW_TRANSLATED,
	SOCKET_FLOW_DEFERRED,	/* left to tc: conntrack has its endpoint */
};

static __noinline int earlier_translation(struct bpf_sock_addr *ctx, const struct socket_flow_key *key, const struct packet *p)
{
	struct backend none = {};
	struct affinity last = {};

	if (!last_translation(ctx, key, &last))
		return SOCKET_FLOW_NEW;
	if (last.backend)
		return SOCKET_FLOW_TRANSLATED;
	if (bpf_ktime_get_ns() - last.last_used > forgotten_udp_ns())
		return SOCKET_FLOW_NEW;
	note_translation(ctx, key, p, &none);
	return SOCKET_FLOW_DEFERRED;
}

/* tc serves this socket, with the backend `b` if one was chosen. */
static __always_inline int leave_to_tc(struct bpf_sock_addr *ctx, const struct socket_flow_key *key, __u64 netns,
				       const struct packet *p, bool datagram, struct backend *b)
{
	defer_to_tc(key->cookie, netns, key->service, b->id);
	b->id = 0;
	if (datagram)
		note_translation(ctx, key, p, b);
	return ALLOW;
}

/* A pod. Makes the decisions of tc, and leaves to tc what tc does better or has to refuse. Never returns REFUSE. */
__noinline long translate_for_pod(struct bpf_sock_addr *ctx, struct packet *p, bool datagram, struct backend *b)
{
	struct socket_flow_key key = { .cookie = bpf_get_socket_cookie(ctx) };
	__u64 netns = bpf_get_netns_cookie(ctx);
	enum drop_reason reason = NOT_DROPPED;
	struct endpoint_selection e = {};
	int earlier = SOCKET_FLOW_NEW;
	struct frontend f;
	struct service_config *config;
	__u32 config_id;
	__u32 device = 0;
	bool known;

	/* As in judge_syn(): the verifier checks this function also where pod_sockets is off. */
	if (!settings.pod_sockets || !p || !b)
		return ALLOW;
	if (!find_frontend(p, &f))
		return leave_direct(ctx, p, datagram);
	if (datagram && (names_peer(ctx, p, b) || answers_asker(ctx, p, &f)))
		return ALLOW;
	/* As in translate().  The node's rules decide whether the packet reaches the cache, so they must see its address. */
	if (f.kind == CLUSTER_IP && node_address(&p->destination, p->ipv6))
		return ALLOW;
	key.service = f.service;
	key.kind = f.kind;
	if (datagram)
		earlier = earlier_translation(ctx, &key, p);
	if (earlier == SOCKET_FLOW_DEFERRED)
		return ALLOW;
	switch (pod_state(netns, p, &device)) {
	case POD_LEFT:
		return ALLOW;
	case POD_SERVED:
		break;
	case POD_STALE:
		/* The socket must keep its endpoint. */
		if (earlier == SOCKET_FLOW_TRANSLATED)
			break;
		fallthrough;
	default:
		return leave_to_tc(ctx, &key, netns, p, datagram, b);
	}
	if (!leaves_unchanged(netns, p->ipv6))
		return ALLOW;
	config = active_config(f.service, &config_id);
	if (!config)
		return ALLOW;
	/* As in translate(). */
	known = datagram && last_endpoint(ctx, &key, p->ipv6, b);
	if (!known && decide(p, &f, config, config_id, device, &e, &reason) != VERDICT_SERVE)
		return ALLOW;
	if (e.masquerade) {
		/* conntrack has the flow from now on, and its endpoint, also when a policy changes. */
		b->id = 0;
		if (datagram)
			note_translation(ctx, &key, p, b);
		return ALLOW;
	}
	if (!known && !choose_backend(p, &e, b)) {
		b->id = 0;
		return ALLOW;
	}
	/* Hairpin: the endpoint is the socket's own pod, which must not see its own address. */
	if (same_address(&b->address, &p->source, p->ipv6))
		return leave_to_tc(ctx, &key, netns, p, datagram, b);
	if (record_choice(ctx, p, &key, datagram, false, b))
		decided(ctx, p, &e, b, NEW_FLOW_SOCKET);
	return ALLOW;
}

#endif
