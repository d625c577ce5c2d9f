/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Whether a young flow is complete: every query has its reply, or both sides have closed, and nothing came since. */
#ifndef PEP_COMPLETE_H
#define PEP_COMPLETE_H

#include "flow_table.h"

#define EXCHANGE_NS (NANOSECONDS / 20)
#define ROUND_TRIP_NS NANOSECONDS

/* Sent by its entries, so without the first packet; a flow with more of them is a stream. */
#define EXCHANGE_PACKETS 5

static __always_inline bool is_distant(const struct flow *reply)
{
	return reply->rewrite.out.redirect != REDIRECT_PEER;
}

/*
 * After how long without a packet a complete UDP flow has paused.  A client on another machine sees the reply, and can
 * send the flow's next datagram, only after a round trip: the second flight of QUIC or DTLS must reach the same endpoint.
 */
static __always_inline __u64 pause_ns(bool distant)
{
	return distant ? ROUND_TRIP_NS : EXCHANGE_NS;
}

static __always_inline __u64 newest(const struct flow *f, const struct flow *other)
{
	return other && other->last_seen > f->last_seen ? other->last_seen : f->last_seen;
}

/* UDP.  The first datagram is not counted if it was sent before the entry could be found. */
static __always_inline bool all_answered(const struct flow *f, const struct flow *reply)
{
	return reply->packets + !!f->first_counted > f->packets;
}

/* TCP, a young flow: both sides have closed, and each has acknowledged the FIN of the other one. */
static __always_inline bool have_closed(const struct flow *f, const struct flow *reply)
{
	return f->closing && reply->closing && f->sent_until == (__u16)reply->acknowledged &&
	       reply->sent_until == (__u16)f->acknowledged;
}

/* True if all datagrams are answered, or both sides have closed, and nothing came since. */
static __always_inline bool is_complete(const struct flow *f, const struct flow *reply, enum protocol protocol,
					__u64 now)
{
	if (now <= newest(f, reply) + EXCHANGE_NS)
		return false;
	if (protocol == TCP)
		return f->closing == CLOSING_IN_SEQUENCE && reply->closing == CLOSING_IN_SEQUENCE &&
		       have_closed(f, reply);
	return all_answered(f, reply);
}

/* UDP: more than three requests and their replies. */
static __always_inline bool is_stream(const struct flow *f, const struct flow *reply)
{
	return f->packets + reply->packets > EXCHANGE_PACKETS;
}

/*
 * True for a complete UDP flow whose client has paused.  A stream may pause for longer.  It keeps its endpoint until the
 * agent promotes or ends it.
 */
static __always_inline bool is_over(const struct flow *f, const struct flow *reply, __u64 now)
{
	return !is_stream(f, reply) && is_complete(f, reply, UDP, now) &&
	       now > newest(f, reply) + pause_ns(is_distant(reply));
}

/*
 * True for a complete flow that may be removed to make room.  A UDP flow that has lasted longer than its pause stays for
 * a round trip: the client may not be done.
 */
static __always_inline bool may_make_room(const struct flow *f, const struct flow *reply, enum protocol protocol,
					  __u64 now)
{
	__u64 last = newest(f, reply);

	if (protocol == TCP)
		return is_complete(f, reply, TCP, now);
	return is_over(f, reply, now) && !(last - f->started > now - last && now <= last + ROUND_TRIP_NS);
}

/* ---- exchanges ------------------------------------------------------------------------------ */

/* About a millisecond. */
static __always_inline __u32 exchange_clock(__u64 now)
{
	return now >> 20;
}

/* The time in nanoseconds, given exchange_clock() of it, which may be that of another CPU, a tick ahead of `now`. */
static __always_inline __u64 exchange_time(__u32 clock, __u64 now)
{
	return now - (__s64)(__s32)(exchange_clock(now) - clock) * (1 << 20);
}

/* True if the exchange would be a stream after `more` further packets, and should be in the flow table. */
static __always_inline bool is_long(const struct exchange_head *head, __u32 more)
{
	return head->queries + head->replies + more > EXCHANGE_PACKETS;
}

/* The first query is not counted, or `first_counted` if it is. */
static __always_inline bool is_answered_exchange(const struct exchange_head *head)
{
	return head->replies + !!head->first_counted > head->queries;
}

static __always_inline __s32 exchange_idle(const struct exchange_head *head, __u64 now)
{
	return exchange_clock(now) - head->last_seen;
}

/* As is_over(). `pause`: of its client. */
static __always_inline bool exchange_has_paused(const struct exchange_head *head, __u64 now, __u64 pause)
{
	return is_answered_exchange(head) && !is_long(head, 0) &&
	       exchange_idle(head, now) > (__s32)exchange_clock(pause);
}

static __always_inline bool exchange_is_over(const struct exchange_head *head, __u64 now)
{
	return exchange_has_paused(head, now, pause_ns(head->distant));
}

/*
 * As may_make_room(), but sooner: one that lasts becomes a stream.  `many`: very many flows open, so a pause of the
 * clients on this node is shorter, too.  Otherwise buckets are full, and flows enter the flow table.
 */
static __always_inline bool exchange_may_make_room(const struct exchange_head *head, __u64 now, bool many)
{
	__u64 pause = many && !head->distant ? EXCHANGE_NS / 4 : pause_ns(head->distant);
	__s32 idle = exchange_idle(head, now);
	bool lasted = (__s32)(head->last_seen - head->started) > idle;

	return exchange_has_paused(head, now, pause) &&
	       !(lasted && idle <= (__s32)exchange_clock(4 * EXCHANGE_NS));
}

#endif
