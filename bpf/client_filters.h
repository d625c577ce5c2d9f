/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Filters of flows by a hash of the client.  They save lookups that would find nothing and wait for memory: of UDP flows
 * in the flow table, and of new flows in conntrack.
 */
#ifndef PEP_CLIENT_FILTERS_H
#define PEP_CLIENT_FILTERS_H

#include "flow_table.h"

/*
 * A hash of the source and its port, or of the destination (`reply`).  So both directions of a flow that is not
 * masqueraded have the client's.
 */
static __always_inline __u64 client_hash(const struct flow_key *key, bool reply)
{
	const __u64 *w = (const void *)(reply ? key->destination : key->source);
	__u64 t = w[0] ^ (__u64)(reply ? key->destination_port : key->source_port) << 40;

	if (key->ipv6)
		t ^= w[1] << 7 | w[1] >> 57;
	return (t ^ t >> 32) * 0x9e3779b97f4a7c15ULL;
}

/* ---- whether the flow table may have a UDP flow --------------------------------------------- */

#define SWEEP_LATE 5	/* the agent sweeps once a second or more often */
#define FILTER_AGES 255	/* a byte of the filter is this clock, modulo this, and one; 0: never */

/* Units of 2^30 ns, about a second. */
static __always_inline __u32 filter_clock(__u64 now)
{
	return now >> 30;
}

/* The byte that notes this time. */
static __always_inline __u8 filter_note(__u64 now)
{
	return filter_clock(now) % FILTER_AGES + 1;
}

static __always_inline struct udp_filter *filter(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&udp_filter, &zero);
}

/* The bits are others than those that select a bucket. */
static __always_inline __u8 *byte_of(struct udp_filter *f, __u64 hash)
{
	return &f->noted[hash >> 16 & (FILTER_BYTES - 1)];
}

/* Called before an entry of this key is inserted, and with every sweep.  `reply`: it is the endpoint's direction. */
static __always_inline void note_in_table(const struct flow_key *key, bool reply, __u64 now)
{
	struct udp_filter *f;

	if (key->protocol != UDP)
		return;
	f = filter();
	if (f)
		*(volatile __u8 *)byte_of(f, client_hash(key, reply)) = filter_note(now);
}

/* `noted`: a byte of a filter.  Another CPU's clock may be one unit ahead of this one's (flow_clock()). */
static __always_inline bool is_recent(__u8 noted, __u32 clock, __u32 ages)
{
	return noted && (clock % FILTER_AGES + FILTER_AGES + 1 - (noted - 1)) % FILTER_AGES <= ages + 3;
}

/* The agent sweeps.  If not, it may have stopped, or a program of another version may have swept. */
static __always_inline bool is_swept(__u32 clock)
{
	__u32 zero = 0;
	struct exchange_sweep_result *last = bpf_map_lookup_elem(&exchange_sweeps, &zero);

	return last && clock - *(volatile __u32 *)&last->when <= SWEEP_LATE;
}

/* False: the table has no UDP flow whose client has one of these hashes, so the lookup can be saved. */
static __always_inline bool may_be_in_table(__u64 from, __u64 to, __u64 now)
{
	__u32 clock = filter_clock(now);
	struct udp_filter *f = filter();

	if (!f || !is_swept(clock))
		return true;
	return is_recent(*(volatile __u8 *)byte_of(f, from), clock, SWEEP_LATE) ||
	       is_recent(*(volatile __u8 *)byte_of(f, to), clock, SWEEP_LATE);
}

/* ---- whether conntrack may have a flow ------------------------------------------------------ */

static __always_inline struct tracked_clients *tracked(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&tracked_clients, &zero);
}

static __always_inline __u8 *tracked_byte_of(struct tracked_clients *t, __u64 hash)
{
	return &t->noted[hash >> 16 & (TRACKED_BYTES - 1)];
}

/*
 * conntrack may have a flow whose client has this hash.  Called for each SYN and datagram that netfilter gets, and with
 * every sweep for the kernel's flows, whose other packets the table sends.
 */
static __always_inline void note_tracked(__u64 hash, __u64 now)
{
	struct tracked_clients *t = tracked();
	__u8 noted = filter_note(now), *byte;

	if (!t)
		return;
	byte = tracked_byte_of(t, hash);
	/* In a flood, most are noted already. */
	if (*(volatile __u8 *)byte != noted)
		*(volatile __u8 *)byte = noted;
}

/*
 * netfilter gets this SYN or datagram.  `reply`: it is an endpoint's.  Global, as is_untracked(): inlined, they would need
 * too much of the callers' stack.
 */
__noinline int note_left(const struct packet *p, bool reply)
{
	if (!settings.fast_path || !settings.conntrack_lookup || !p || p->protocol == SCTP)
		return 0;
	note_tracked(client_hash((const struct flow_key *)p, reply), flow_clock());
	return 0;
}

/*
 * conntrack keeps a connection that is opened or closed for two minutes.  It keeps others for longer.  While they are in
 * the table each sweep notes them, and the agent notes all of them again every 80 seconds: a SYN whose source is forged
 * must not take the place of a connection that has left the table.
 */
#define NOTED_TCP_NS (200 * NANOSECONDS)

/* Either timeout may be the longer one: that of flows with replies, or of those without. */
static __always_inline __u64 noted_udp_ns(void)
{
	__u64 unanswered = settings.udp_seconds * NANOSECONDS;

	return unanswered > forgotten_udp_ns() ? unanswered : forgotten_udp_ns();
}

/*
 * False: conntrack has no flow of this client, so the lookup, which waits for memory, can be saved.  The agent has noted
 * the flows that conntrack had when these programs were loaded.
 */
static __always_inline bool may_be_tracked(__u64 hash, enum protocol protocol, __u64 now)
{
	__u32 clock = filter_clock(now), ages = filter_clock(protocol == UDP ? noted_udp_ns() : NOTED_TCP_NS);
	struct tracked_clients *t = tracked();

	if (!t || !settings.load || *(volatile __u32 *)&t->complete != settings.load || ages + 4 > FILTER_AGES)
		return true;
	return !is_swept(clock) || is_recent(*(volatile __u8 *)tracked_byte_of(t, hash), clock, ages);
}

/* A SYN or datagram of a client that has no flow in conntrack. */
__noinline int is_untracked(const struct packet *p)
{
	if (!settings.fast_path || !settings.conntrack_lookup || !p || p->protocol == SCTP)
		return 0;
	return !may_be_tracked(client_hash((const struct flow_key *)p, false), p->protocol, flow_clock());
}

#endif
