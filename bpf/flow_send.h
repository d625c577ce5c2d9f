/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Packets of flows in the flow table: whether and how the programs send them. */
#ifndef PEP_FLOW_SEND_H
#define PEP_FLOW_SEND_H

#include "checksum.h"
#include "complete.h"
#include "ctx.h"
#include "exchange.h"
#include "renew.h"
#include "rewrite.h"
#include "slots.h"

/* Not a verdict: the packet takes the path that it would take without the table. */
#define NOT_SENT (-2)
#define NOT_KNOWN (-3)		/* the same, and the table does not have its flow */
#define NOT_CONFIRMED (-4)	/* the same, and the observer must see it leave */

/*
 * Defined by each main program: handles a packet of a young flow that cannot be sent.  `f`: its entry in the flow table;
 * NULL: the flow is an exchange.  `backend`: of the client's packet; 0 for an endpoint's.
 */
static __always_inline int leave_young(struct context *ctx, const struct packet *p, struct flow_rewrite *a,
				       struct flow *f, __u32 service, __u32 backend, enum slow_path_reason reason);

static __always_inline bool is_new_connection(const struct packet *p)
{
	return p->protocol == TCP && p->starts_flow;
}

/* The packet ends the flow, or begins a new one. */
static __always_inline bool is_syn_fin_rst(const struct packet *p)
{
	return p->protocol == TCP && p->tcp_flags & (TCP_SYN | TCP_FIN | TCP_RST);
}

/* Why the kernel must handle this packet of a known flow; NOT_SLOW: it need not. */
static __always_inline enum slow_path_reason why_kernel(const struct packet *p, const struct flow_rewrite *a,
							__u32 segment)
{
	if (unlikely(p->fragment))
		return STACK_FRAGMENT;
	if (unlikely(p->options))
		return STACK_OPTIONS;
	if (unlikely(p->hops <= 1))
		return STACK_HOPS;
	if (unlikely((segment ? p->headers + segment : p->length) > a->out.mtu))
		return STACK_TOO_BIG;
	return NOT_SLOW;
}

/* A guessed sequence number is in this window once in a thousand times. */
#define GUESS_WINDOW (4U << 20)
#define LARGEST_WINDOW (64U << 20)	/* more data is hardly ever on its way */
/* From one packet of a side to its next one, the acknowledgment number seldom changes by more. */
#define USUAL_STEP (256U << 10)

/* Whether `number` is in the window around `known`. */
static __always_inline bool is_near(__u32 number, __u32 known, __u32 before, __u32 after)
{
	return number - known + before < before + after;
}

/*
 * A kernel's flow: netfilter has got this side's packets for a while, as those of a client that comes in by another device
 * for good.  So conntrack knows their numbers, and the entry may not.
 */
static __always_inline bool passes_netfilter(const struct flow *f)
{
	return f->last_seen > f->confirmed_until + CONFIRMED_NS;
}

/*
 * Whether a packet with another acknowledgment number than usual is plausible by both of its numbers.  If client and
 * endpoint are behind the same device, a third host can forge packets of both sides.  Without this check, it could set
 * the number that it then sends a RST with.
 */
static __noinline int is_plausible(const struct packet *p, const struct flow_rewrite *a, const struct flow *f)
{
	struct flow *other;

	if (!p || !a || !f || !is_near(p->acknowledged, f->acknowledged, GUESS_WINDOW, LARGEST_WINDOW))
		return 0;
	other = other_direction(a, p);
	return other && (!other->acknowledged || (!f->young && passes_netfilter(other)) ||
			 is_near(p->sequence, other->acknowledged, LARGEST_WINDOW, LARGEST_WINDOW));
}

/* What a RST of either side is compared with.  `a`: of the packet's direction. */
static __always_inline void note_numbers(struct flow *f, const struct packet *p, const struct flow_rewrite *a)
{
	/* 0: a packet without an acknowledgment. */
	if (p->acknowledged) {
		if (f->acknowledged && unlikely(!is_near(p->acknowledged, f->acknowledged, USUAL_STEP, USUAL_STEP)) &&
		    !is_plausible(p, a, f))
			return;
		f->acknowledged = p->acknowledged;
	} else if (unlikely(!(p->tcp_flags & TCP_SYN))) {
		/* A RST, or a packet that its receiver drops unanswered, so a forged one would stay unnoticed. */
		return;
	}
	f->sent_until = next_sequence(p);
}

/* Updates the entry for a packet that is sent.  send_kernels() notes the numbers of a kernel's flow. */
static __always_inline void note_sent(struct flow *f, const struct packet *p, const struct flow_rewrite *a, __u64 now)
{
	f->packets++;
	/* The coarse clock advances every few milliseconds, so the cache line is written once for many packets. */
	if (f->last_seen != now)
		f->last_seen = now;
	if (p->protocol == TCP && f->young)
		note_numbers(f, p, a);
}

/* `way`: from why_not_here(). */
static __always_inline int rewrite_and_send(struct context *ctx, const struct packet *p, const struct flow_rewrite *a,
					    __u32 way)
{
	int verdict;

	/* A packet must not continue half rewritten, or rewritten by an entry that has changed meanwhile. */
	if (unlikely(rewrite(ctx, p, a) || (verdict = redirect(a, way), was_reused(a, tag_of(p))))) {
		count(DROP_REWRITE_FAILED);
		return DROPPED;
	}
	count_sent();
	return verdict;
}

static __always_inline bool ends_by_reset(const struct flow *f, const struct flow *other)
{
	return f->closing == CLOSING_BY_RESET || other->closing == CLOSING_BY_RESET;
}

/*
 * Handles a RST or FIN of a young flow.  Not 0: the flow has ended.  Only the sequence number that the other side
 * expects next ends a connection at once (RFC 5961).  An attacker who forges packets does not know it.  A RST right
 * after data of its own side is the usual end of a socket with unread data.  The flow stays for ten seconds, as in
 * conntrack (nf_conntrack_tcp_packet()), because the data may have been forged, too.
 */
static __noinline int end_young(const struct packet *p, const struct flow_rewrite *a, struct flow *f)
{
	struct flow *other;
	__u32 ahead;

	if (!p || !a || !f)
		return 0;
	other = other_direction(a, p);
	if (!other)
		return 0;
	ahead = p->sequence - other->acknowledged;
	if (ahead) {
		/* Earlier data may still be on its way. Outside the window the other side ignores the packet, too. */
		if (ahead < GUESS_WINDOW && p->tcp_flags & TCP_RST && (__u16)p->sequence == f->sent_until)
			f->closing = CLOSING_BY_RESET;
		else if (ahead < GUESS_WINDOW && !f->closing)
			f->closing = CLOSING;
		return 0;
	}
	f->closing = CLOSING_IN_SEQUENCE;
	return p->tcp_flags & TCP_RST;
}

/*
 * True if a new connection of this client would be served, and the flow's backend is one of the Service's.  A backend
 * that has left stays in `backends` for a moment.  Searching the list is too deep.
 * A global function, so that the verifier checks it once.
 */
__noinline int may_keep_endpoint(const struct packet *p, const struct flow_rewrite *a, __u32 backend)
{
	enum drop_reason reason = NOT_DROPPED;
	struct endpoint_selection e = {};
	struct frontend f = {};
	struct service_config *config;
	__u32 config_id;

	if (!p || !a || !find_frontend(p, &f))
		return 0;
	config = active_config(f.service, &config_id);
	if (!config || decide(p, &f, config, config_id, a->device_in, &e, &reason) != VERDICT_SERVE)
		return 0;
	return service_of_backend(backend, p->ipv6) == f.service;
}

enum syn {
	SYN_REPEATED = 0,	/* the flow's own SYN, or one that changes nothing */
	SYN_OF_ANOTHER = 1,	/* another connection begins */
	SYN_AFTER_END = 2,	/* the flow may have ended: treat it like a new connection */
};

/*
 * What a SYN for a flow in the table means.  A global function, so that the verifier checks it once.  Older verifiers
 * check a global function even if nothing calls it.  Without the fast path there is no flow table, so the function must
 * return before it uses the table.
 */
__noinline int judge_syn(const struct packet *p, const struct flow_rewrite *a, const struct flow *f)
{
	union address endpoint = {};
	struct fast_path *state;
	struct flow *other;

	if (!settings.fast_path || !p || !a || !f)
		return SYN_REPEATED;
	state = fast_path_state();
	other = other_direction(a, p);
	if (!other || (f->closing == CLOSING_IN_SEQUENCE && other->closing == CLOSING_IN_SEQUENCE))
		return SYN_OF_ANOTHER;
	if (ends_by_reset(f, other))
		return SYN_OF_ANOTHER;
	/* No answer, and routes, devices or neighbours may have changed since: the first SYN may have gone nowhere. */
	if (!f->reply && !other->packets && state && f->generation != *(volatile __u32 *)&state->generation)
		return SYN_OF_ANOTHER;
	__builtin_memcpy(&endpoint, a->destination, 16);
	/* For the client's SYN only: both sides may open a connection at once, so an endpoint may send one, too. */
	if (!f->reply && !is_endpoint(&endpoint, a->destination_port, TCP, p->ipv6, 0))
		return SYN_OF_ANOTHER;
	/* A SYN does not end a flow that is alive. */
	return f->closing || other->closing ? SYN_AFTER_END : SYN_REPEATED;
}

/* The two checks run one after the other: both at once need too much stack. */
static __always_inline bool begins_anew(const struct packet *p, const struct flow_rewrite *a, const struct flow *f)
{
	int syn = judge_syn(p, a, f);

	return syn == SYN_OF_ANOTHER || (syn == SYN_AFTER_END && !may_keep_endpoint(p, a, f->backend));
}

/*
 * A packet of a young flow.  conntrack does not know the flow, so a packet that cannot be sent has to wait until the
 * agent has promoted the flow.
 */
static __always_inline int send_young(struct context *ctx, const struct packet *p, struct flow *known, __u32 way,
				      __u64 now)
{
	const struct flow_rewrite *a;
	enum slow_path_reason reason;
	bool over = false;
	int verdict;

	if (unlikely(!p || !known))
		return NOT_SENT;
	a = &known->rewrite;
	reason = why_kernel(p, a, segment_size(ctx));
	if (unlikely(reason)) {
		count_left(reason);
		return leave_young(ctx, p, &known->rewrite, known, known->service, known->reply ? 0 : known->backend, reason);
	}
	if (p->protocol == TCP && unlikely(p->tcp_flags & (TCP_RST | TCP_FIN)))
		over = end_young(p, a, known);
	else if (unlikely(known->closing) && (p->length > p->headers || p->tcp_flags & TCP_SYN))
		/*
		 * A packet with data: the flow continues.  Or the next connection with these ports: if it is silent, the sweep
		 * must not take it for the one that has closed.
		 */
		known->closing = 0;
	else if (unlikely(known->closing == CLOSING_BY_RESET))
		/* Nothing follows a RST: one of the packets was forged. */
		known->closing = CLOSING;
	note_sent(known, p, a, now);
	verdict = rewrite_and_send(ctx, p, a, way);
	if (unlikely(over) && forget_flow((const struct flow_key *)p, a, known->reply, true))
		count(YOUNG_ENDED);
	return verdict;
}

/*
 * A RST of a kernel's flow after which nothing follows: its number is the one that the other side expects, or follows
 * data that is on its way.  conntrack would close the connection in both cases, if it had seen the packet before.
 */
static __always_inline bool is_last_packet(const struct packet *p, const struct flow *f, const struct flow *other)
{
	__u32 ahead = p->sequence - other->acknowledged;

	return p->tcp_flags & TCP_RST && other->acknowledged &&
	       (!ahead || (ahead < GUESS_WINDOW && (__u16)p->sequence == f->sent_until));
}

/*
 * A FIN or RST of a kernel's flow that the other side ignores: it was forged, or the packet before it was lost, and it
 * will be sent again.  conntrack does not check the number, and expects the connection to end soon.  False if the
 * numbers are not known: then the fast path has sent nothing, so conntrack knows them.
 */
static __always_inline bool is_out_of_sequence(const struct packet *p, const struct flow *f, const struct flow *other)
{
	__u32 ahead = p->sequence - other->acknowledged;

	if (!(p->tcp_flags & (TCP_FIN | TCP_RST)) || !other->acknowledged)
		return false;
	if ((ahead < LARGEST_WINDOW || passes_netfilter(other)) && (__u16)p->sequence == f->sent_until)
		return false;
	/* A FIN may be sent again, or may have overtaken data. */
	return p->tcp_flags & TCP_RST ? !!ahead : ahead + GUESS_WINDOW > 2 * GUESS_WINDOW;
}

/*
 * A TCP packet of a kernel's flow came in by another device: the path of its sender has changed, or it was forged.  The
 * sender has not vanished.  If it is a FIN or RST, nothing but conntrack checks it.
 */
static __noinline int note_elsewhere(const struct packet *p, const struct flow_rewrite *a, struct flow *known)
{
	struct flow *other;

	/* A datagram, or a SYN, may be that of a new flow. */
	if (!p || !a || !known || p->starts_flow)
		return 0;
	known->last_seen = flow_clock();
	if (!is_syn_fin_rst(p))
		return 0;
	other = other_direction(a, p);
	if (other && known->closing < CLOSING_IN_SEQUENCE && is_out_of_sequence(p, known, other))
		known->promote = RESTORE;
	return 0;
}

/*
 * Drops a packet that must wait for the agent: a young flow is not in conntrack yet, or conntrack's entry is to be
 * restored.  `p` is never NULL.  Not inlined, because several places need it, and none is on the path of a packet that is
 * served.  Global for the same reason as judge_syn().
 */
__noinline int drop_until_promotion(const struct packet *p, __u32 device, __u32 service)
{
	if (!settings.fast_path || !p)
		return 0;
	count(DROP_AWAITING_PROMOTION);
	remember_refused(p, device, service, DROP_AWAITING_PROMOTION);
	return 0;
}

/* Asks the agent to promote this young UDP flow.  As a stream it stays the kernel's: more such packets may follow. */
static __always_inline void request_stream(const struct packet *p, struct flow *f)
{
	if (request_promotion((const struct flow_key *)p, &f->rewrite, f))
		f->packets += EXCHANGE_PACKETS + 1;
}

/*
 * A packet of a young flow that came in by another device, or for a link address that is not known: the path of its
 * sender has changed, or it was forged.  1: it must wait.  conntrack does not know the flow, so the kernel would answer
 * with a RST, or send an endpoint's packet untranslated to the client, which would answer so.  Not a client's datagram:
 * it may be that of a new flow.
 */
static __noinline int awaits_promotion(const struct packet *p, const struct flow_rewrite *a, struct flow *known)
{
	struct flow *other;

	if (!p || !a || !known || !known->young)
		return 0;
	if (p->protocol == UDP && known->reply) {
		request_stream(p, known);
		return 1;
	}
	if (p->starts_flow)
		return 0;
	other = other_direction(a, p);
	/* Not with an unanswered SYN, which a forged packet must not bring into conntrack. */
	if (other && (known->reply ? known : other)->packets)
		request_promotion((const struct flow_key *)p, a, known);
	return 1;
}

static __always_inline bool asks_for_restoration(const struct flow *f)
{
	return f->promote == RESTORE || f->promote == RESTORING;
}

/* A kernel's flow. True if conntrack's entry should be restored, and the connection has not ended since. */
static __always_inline bool needs_restoration(const struct flow *f, const struct flow *other)
{
	return other && (asks_for_restoration(f) || asks_for_restoration(other)) && f->closing < CLOSING_IN_SEQUENCE &&
	       other->closing < CLOSING_IN_SEQUENCE;
}

/*
 * A SYN of a kernel's flow came after a FIN or RST out of sequence, perhaps also a forged one.  If conntrack has closed
 * the entry, it would replace it now.  A client that really connects again sends the SYN once more.
 */
static __noinline int awaits_restoration(const struct packet *p, const struct flow_rewrite *a, struct flow *known)
{
	const struct fast_path *state = fast_path_state();

	if (!p || !a || !known || !state)
		return 0;
	return needs_restoration(known, other_direction(a, p)) && flow_clock() < state->alive_until;
}

/* Not 0: passes_netfilter() compares. */
static __always_inline void unconfirm_from(struct flow *f, __u64 now)
{
	if (f->confirmed_until > now)
		f->confirmed_until = now;
}

/* A packet of a kernel's flow that is a SYN, FIN or RST, or that comes after a RST in sequence. */
static __noinline int note_ending(const struct packet *p, const struct flow_rewrite *a, struct flow *known)
{
	__u64 now = flow_clock();
	struct flow *other;
	__u8 closing;

	if (!p || !a || !known)
		return 0;
	if (!is_syn_fin_rst(p)) {
		/* A later number: the flow goes on.  Otherwise the RST has overtaken this packet. */
		if ((__s16)(p->sequence + p->length - p->headers - known->sent_until) > 0) {
			known->closing = CLOSING;
			note_numbers(known, p, a);
		}
		return 0;
	}
	closing = p->tcp_flags & TCP_RST && known->closing == CLOSING_IN_SEQUENCE ? CLOSING_IN_SEQUENCE : CLOSING;
	other = other_direction(a, p);
	/* The kernel must see the end of the flow; later packets are confirmed again. */
	unconfirm_from(known, now);
	if (other)
		unconfirm_from(other, now);
	/* tc gets the packet next, and judges it.  If it did so a second time, it would take it for a repeated one. */
	if (HOOK == AT_XDP && !settings.xdp_generic)
		return 0;
	/* Not the answer to a SYN: a host that has restarted knows no numbers. */
	if (other && !other->closing && known->closing < CLOSING_IN_SEQUENCE && is_out_of_sequence(p, known, other)) {
		known->promote = RESTORE;
		return 0;
	}
	if (p->tcp_flags & TCP_SYN) {
		/* Both sides have closed, or one has reset the connection: the next one has other numbers. */
		if (other && ((known->closing && other->closing) || known->closing >= CLOSING_IN_SEQUENCE ||
			      other->closing >= CLOSING_IN_SEQUENCE))
			known->acknowledged = other->acknowledged = 0;
		/* The next connection with these ports. */
		if (known->closing >= CLOSING_IN_SEQUENCE)
			closing = CLOSING_BY_RESET;
		if (other && other->closing == CLOSING_IN_SEQUENCE) {
			closing = CLOSING_BY_RESET;
			other->closing = CLOSING;
		}
		/* Its end is reported, too, even if no sweep runs before. */
		if (known->promote == CLOSE)
			known->promote = NO_REQUEST;
	} else if (other && is_last_packet(p, known, other)) {
		closing = CLOSING_IN_SEQUENCE;
		known->sent_until = p->sequence;
	}
	known->closing = closing;
	return 0;
}

/* A packet of a kernel's flow. */
static __always_inline int send_kernels(struct context *ctx, const struct packet *p, struct flow *known)
{
	struct fast_path *state = fast_path_state();
	const struct flow_rewrite *a;
	enum slow_path_reason reason;
	__u32 way = 0;
	__u64 now;

	if (unlikely(!p || !known || !state))
		return NOT_SENT;
	a = &known->rewrite;
	now = flow_clock();
	/* Also if netfilter forwards the packet: conntrack then keeps the flow, and so must the table. */
	if (known->last_seen != now)
		known->last_seen = now;
	reason = fast_path_closed(state, p->ipv6, now);
	if (unlikely(is_syn_fin_rst(p) || known->closing == CLOSING_IN_SEQUENCE))
		note_ending(p, a, known);
	else
		note_numbers(known, p, a);
	if (!reason && unlikely(is_syn_fin_rst(p)))
		reason = STACK_ENDING;
	if (!reason && unlikely(!is_plain(ctx)))
		reason = STACK_NOT_PLAIN;
	if (unlikely(reason)) {
		count_left(reason);
		return NOT_SENT;
	}
	if (unlikely(now >= known->confirmed_until || known->generation != *(volatile __u32 *)&state->generation))
		return NOT_CONFIRMED;
	/* Only a confirmed entry has a complete link. */
	reason = why_kernel(p, a, segment_size(ctx));
	if (!reason)
		reason = why_not_here(ctx, p, a, &way);
	if (unlikely(reason)) {
		count_left(reason);
		return NOT_SENT;
	}
	note_sent(known, p, a, now);
	return rewrite_and_send(ctx, p, a, way);
}

/*
 * True if the endpoint of a UDP flow is gone: the next datagram gets another one.  `a`: of the client's direction.
 * The address may belong to another Service by now, so the one that opened the flow does not count.  Without another
 * endpoint, or without a Service, the flow stays, as it does in conntrack (must_go()).
 * A global function, so that the verifier checks it once.
 */
__noinline int has_lost_endpoint(const struct packet *p, const struct flow_rewrite *a)
{
	struct service_config *config;
	union address endpoint = {};
	struct frontend f = {};
	__u32 config_id;

	if (!p || !a || !find_frontend(p, &f) || f.kind == UNSERVED_NODE_PORT)
		return 0;
	config = active_config(f.service, &config_id);
	if (!config || !config->any_endpoints)
		return 0;
	__builtin_memcpy(&endpoint, a->destination, 16);
	return !is_endpoint(&endpoint, a->destination_port, UDP, p->ipv6, f.service);
}

/*
 * A reply of a young UDP flow, and since the flow began, routes, devices or neighbours have changed.  A query would show
 * whether the flow's links still lead to both sides (judge_query()).  But the client has its answer, and the endpoint
 * goes on sending: there may be no further query.  Once the flow is promoted, its replies find their way.
 */
static __noinline int note_unasked(const struct packet *p, struct flow *reply, __u32 generation)
{
	struct flow *client;

	if (!p || !reply)
		return 0;
	client = other_direction(&reply->rewrite, p);
	if (!client)
		return 0;
	if (client->generation == generation)
		reply->generation = generation;
	else if (all_answered(client, reply))
		request_stream(p, reply);
	return 0;
}

/* The flow table has the flow now. */
#define MOVED_TO_TABLE (-5)

/* A packet of an exchange is sent. */
static __always_inline void note_exchanged(struct exchange_head *head, bool reply, __u64 now)
{
	if (reply)
		head->replies++;
	else
		head->queries++;
	head->last_seen = exchange_clock(now);
}

/*
 * A frame of a known flow, on the device of its direction.  device_in is 0 in an entry of enter_tracked(), until the
 * flow is confirmed.
 */
static __always_inline bool came_in_right(struct context *ctx, const struct flow_rewrite *a, __u32 device)
{
	if (unlikely(!a->device_in))
		return HOOK == AT_TC || !is_for_other_host(ctx);
	if (unlikely(a->device_in != device)) {
		count_left(STACK_OTHER_DEVICE);
		return false;
	}
	return is_for(ctx, a->mac_in);
}

/* A device that leads out of the node, not to a pod. */
static __always_inline bool is_uplink(__u32 device)
{
	const struct node_device *d = bpf_map_lookup_elem(&devices, &device);

	return d && !d->bridge && !d->pod_source && d->redirect == REDIRECT_DEVICE;
}

/* The frame is for the device by which it came in, or for the bridge of which that is a port. */
static __always_inline bool is_for_device(struct context *ctx, __u32 device)
{
	const struct node_device *d;

	if (is_for_host(ctx))
		return true;
	d = bpf_map_lookup_elem(&devices, &device);
	return d && d->bridge && is_for(ctx, d->bridge_mac);
}

/*
 * True if a reply of a young flow may come in by this device, which is not the one by which its client's packets leave.
 * The network may choose one of several uplinks for each flow (ECMP), or choose another one than before, and conntrack
 * would take the reply.  A pod may forge the endpoint's address.  But it does not know the sequence number of the
 * client's SYN; and its datagrams do not come in by an uplink.
 */
static __always_inline bool may_come_in_by(const struct packet *p, const struct flow_rewrite *a, __u32 device)
{
	struct flow *client;

	if (p->protocol != TCP)
		return is_uplink(device) && is_uplink(a->device_in);
	client = other_direction(a, p);
	return !(~p->tcp_flags & (TCP_SYN | TCP_ACK)) && client && (__u16)p->acknowledged == client->sent_until;
}

/*
 * A packet of a young flow came in by another device than before, or for another link address.  1: from now on, packets
 * of this direction come in like this one.  `moves`: they may come in by another device, if may_come_in_by() allows it.
 * A device or its bridge may also have another link address now.
 */
static __noinline int learn_entrance(struct context *ctx, const struct packet *p, struct flow_rewrite *a, __u32 device,
				     bool moves)
{
	__u8 *frame;

	if (!p || !a || !is_for_device(ctx, device))
		return 0;
	if (a->device_in != device && !(moves && may_come_in_by(p, a, device)))
		return 0;
	frame = bytes_at(ctx, 0, ETH_HLEN);
	if (!frame)
		return 0;
	__builtin_memcpy(a->mac_in, frame, 6);
	a->device_in = device;
	return 1;
}

/*
 * A packet of a young flow that came_in_right() and learn_entrance() refuse.  False: the frame is for another host.  Not
 * if it came in by the flow's port of a bridge: the bridge, or the pod at another port, may have a link address that is
 * not known yet.
 */
static __always_inline bool may_be_of_flow(struct context *ctx, const struct flow_rewrite *a, __u32 device)
{
	return a->device_in == device || is_for_device(ctx, device);
}

/*
 * A packet came in by another device than its flow's.  True: that device is gone or down, so this is the client, by
 * another one, and the flow's links lead nowhere.
 */
static __always_inline bool has_lost_device(const struct flow_rewrite *a, __u32 device)
{
	__u32 before = a->device_in;
	struct node_device *d;

	if (!before || before == device)
		return false;
	d = bpf_map_lookup_elem(&devices, &before);
	return !d || !d->mtu;
}

/*
 * Handles a packet of an exchange that should be in the flow table, but the table has no space.  The client's packets go
 * to the kernel, with the same endpoint, so conntrack has the flow from now on.  If not every program looks new flows up
 * in conntrack, the exchange stays for as long as the client sends: it alone keeps the endpoint.  NOT_KNOWN: the packet
 * can only be sent.
 */
static __always_inline int leave_exchange(struct context *ctx, const struct packet *p, const struct exchange *x,
					  struct exchange_head *head, struct flow_rewrite *a, long found,
					  enum slow_path_reason reason, bool draining)
{
	bool reply = FOUND_REPLY(found);
	__u32 device = a->device_in;
	int verdict;

	if (!reason && reply)
		return NOT_KNOWN;
	if (reason)
		count_left(reason);
	else
		count_left(is_over_quota(bpf_map_lookup_elem(&young_counts, &device)) ? SLOW_QUOTA : SLOW_TABLE_FULL);
	/* The kernel gets the first fragment of a datagram that would be one too many, as any other packet of the client. */
	if (reason == STACK_FRAGMENT && !reply && is_long(head, 1))
		reason = NOT_SLOW;
	verdict = leave_young(ctx, p, a, NULL, x->service, reply ? 0 : x->backend, reason);
	if (HOOK == AT_TC && verdict != LEFT && verdict != DROPPED)
		note_exchanged(head, reply, flow_clock());
	/* XDP passes the packet on, and tc leaves it. */
	if (HOOK != AT_TC || verdict != LEFT)
		return verdict;
	if (conntrack_is_asked() || draining)
		forget_exchange(FOUND_ELEMENT(found), FOUND_OWNER(found));
	else
		/* UNMOVED_NS begins anew: netfilter has just seen the flow. */
		head->started = head->last_seen = exchange_clock(flow_clock());
	return verdict;
}

/* Sends the packet if it belongs to an exchange.  A packet that an exchange cannot handle moves it to the table. */
static __noinline int send_exchanged(struct context *ctx, struct packet *p, __u32 device)
{
	const struct fast_path *state = fast_path_state();
	enum slow_path_reason reason;
	struct exchange_bucket *bucket;
	struct exchange_head *head;
	struct flow_rewrite *a;
	struct exchange *x;
	__u32 way = 0, generation;
	bool reply, moved, unasked;
	int verdict;
	long found;
	__u64 now;

	if (!p)
		return NOT_KNOWN;
	found = find_exchange((const struct flow_key *)p);
	if (found < 0)
		return NOT_KNOWN;
	x = exchange_at(FOUND_ELEMENT(found));
	bucket = bucket_with(FOUND_ELEMENT(found));
	if (unlikely(!x || !bucket || !state))
		return NOT_KNOWN;
	reply = FOUND_REPLY(found);
	a = found_rewrite(x, found);
	head = &bucket->way[WAY(FOUND_ELEMENT(found))];
	if (unlikely(!came_in_right(ctx, a, device)) &&
	    !(HOOK == AT_TC && learn_entrance(ctx, p, a, device, reply))) {
		if (HOOK == AT_XDP)
			return NOT_SENT;
		/* The table makes it wait. */
		if (reply)
			return may_be_of_flow(ctx, a, device) &&
			       unfold_exchange(FOUND_ELEMENT(found), FOUND_OWNER(found), FOR_PACKETS)
				       ? MOVED_TO_TABLE
				       : NOT_SENT;
		if (!has_lost_device(a, device))
			return NOT_SENT;
		p->kept = x->backend;
		forget_exchange(FOUND_ELEMENT(found), FOUND_OWNER(found));
		return NOT_KNOWN;
	}
	/* Read once: it may change again meanwhile.  Of queries only: a reply must not hide the change from the next one. */
	generation = *(volatile __u32 *)&state->generation;
	moved = x->generation != generation;
	unasked = unlikely(moved) && reply && is_answered_exchange(head);
	moved = moved && !reply;
	if (unlikely(moved) && has_lost_endpoint(p, a)) {
		forget_exchange(FOUND_ELEMENT(found), FOUND_OWNER(found));
		return NOT_KNOWN;
	}
	now = flow_clock();
	if (unlikely(moved || (!reply && exchange_idle(head, now) > (__s32)exchange_clock(EXCHANGE_NS)))) {
		p->kept = judge_exchange(p, FOUND_ELEMENT(found), generation, is_plain(ctx));
		if (p->kept) {
			if (HOOK == AT_XDP)
				return NOT_SENT;
			forget_exchange(FOUND_ELEMENT(found), FOUND_OWNER(found));
			return NOT_KNOWN;
		}
	}
	reason = why_kernel(p, a, segment_size(ctx));
	if (unlikely(reason || unasked || is_long(head, 1))) {
		if (unfold_exchange(FOUND_ELEMENT(found), FOUND_OWNER(found), FOR_PACKETS))
			return MOVED_TO_TABLE;
		/* It stays a stream, however many replies follow: the counter is a byte. */
		if (head->replies == 255)
			head->replies--;
		verdict = leave_exchange(ctx, p, x, head, a, found, reason, state->draining);
		if (verdict != NOT_KNOWN)
			return verdict;
	}
	if (why_not_here(ctx, p, a, &way))
		return NOT_SENT;
	note_exchanged(head, reply, now);
	return rewrite_and_send(ctx, p, a, way);
}

/* The packet's entry in the flow table; NULL: there is none. Most datagrams of exchanges save the lookup. */
static __always_inline struct flow *entry_in_table(const struct packet *p)
{
	const struct flow_key *key = (const void *)p;
	__u64 from, to;

	if (p->protocol == UDP) {
		from = client_hash(key, false);
		to = client_hash(key, true);
		if (!may_be_in_table(from, to, flow_clock())) {
			prefetch_exchange(is_for_client(p) ? to : from);
			return NULL;
		}
	}
	return bpf_map_lookup_elem(&flows, p);
}

/* Sends the packet if its flow is in the table. `device`: of a bridge, the port. The packet has an Ethernet header. */
static __always_inline int send_by_table(struct context *ctx, struct packet *p, __u32 device)
{
	const struct flow_rewrite *a;
	struct fast_path *state;
	struct flow *known;
	__u32 way = 0, generation;
	__u64 last_seen, now;
	bool is_query, moved;
	int verdict;

	if (!p)
		return NOT_KNOWN;
	known = entry_in_table(p);
	if (!known && p->protocol == UDP) {
		verdict = send_exchanged(ctx, p, device);
		if (verdict == NOT_KNOWN)
			/* Another CPU may just have moved it. Then the filter has it. */
			known = entry_in_table(p);
		else if (verdict != MOVED_TO_TABLE)
			return verdict;
		else
			known = bpf_map_lookup_elem(&flows, p);
	}
	if (unlikely(!known || was_reused(&known->rewrite, tag_of(p))))
		return NOT_KNOWN;
	a = &known->rewrite;
	if (unlikely(is_new_connection(p)) && !known->young && (HOOK == AT_TC || !is_for_other_host(ctx)) &&
	    awaits_restoration(p, a, known)) {
		drop_until_promotion(p, device, known->service);
		return DROPPED;
	}
	if (unlikely(!came_in_right(ctx, a, device)) &&
	    !(HOOK == AT_TC && known->young &&
	      learn_entrance(ctx, p, &known->rewrite, device, known->reply && (p->protocol == UDP || !known->packets)))) {
		if (HOOK == AT_TC && !known->young) {
			/* The device has another link address now.  The entry learns it from a packet that leaves netfilter. */
			if (a->device_in == device && is_for_device(ctx, device) && !is_syn_fin_rst(p))
				return NOT_CONFIRMED;
			note_elsewhere(p, a, known);
		}
		if (HOOK == AT_TC && may_be_of_flow(ctx, a, device) && awaits_promotion(p, a, known)) {
			drop_until_promotion(p, device, known->service);
			return DROPPED;
		}
		if (HOOK == AT_XDP || !p->starts_flow || !known->young || known->reply || !has_lost_device(a, device))
			return NOT_SENT;
		p->kept = known->backend;
		forget_flow((const struct flow_key *)p, a, false, true);
		return NOT_KNOWN;
	}
	if (unlikely(is_bulk(ctx, p, known)))
		return NOT_SENT;
	if (unlikely(is_new_connection(p)) && known->young && begins_anew(p, a, known)) {
		forget_flow((const struct flow_key *)p, a, known->reply, true);
		return NOT_KNOWN;
	}
	state = fast_path_state();
	if (unlikely(!state))
		return NOT_SENT;
	is_query = p->protocol == UDP && !known->reply;
	generation = *(volatile __u32 *)&state->generation;
	moved = is_query && known->generation != generation;
	if (unlikely(moved) && has_lost_endpoint(p, a)) {
		forget_flow((const struct flow_key *)p, a, false, known->young);
		return NOT_KNOWN;
	}
	if (!known->young) {
		last_seen = known->last_seen;
		verdict = send_kernels(ctx, p, known);
		if (likely(verdict != NOT_CONFIRMED))
			return verdict;
		if (!is_query || !may_be_young(ctx, p) || !make_young(p, known, last_seen)) {
			count_left(STACK_NOT_CONFIRMED);
			return NOT_CONFIRMED;
		}
		known->generation = generation;
		moved = false;
	}
	now = flow_clock();
	/* A flow that has just become young again has not paused: it was renewed. */
	if (unlikely(moved || (is_query && now > known->last_seen + EXCHANGE_NS))) {
		p->kept = judge_query(p, known, generation, is_plain(ctx));
		if (p->kept) {
			if (HOOK == AT_XDP)
				return NOT_SENT;
			forget_flow((const struct flow_key *)p, a, false, true);
			return NOT_KNOWN;
		}
	}
	if (why_not_here(ctx, p, a, &way))
		return NOT_SENT;
	if (p->protocol == UDP && known->reply && unlikely(known->generation != generation))
		note_unasked(p, known, generation);
	return send_young(ctx, p, known, way, now);
}

#endif
