/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The flow table: finding an entry, checking that it is this flow's, and removing a flow.  Does not change packets. */
#ifndef PEP_FLOW_TABLE_H
#define PEP_FLOW_TABLE_H

#include "frontend.h"

#define CONFIRMED_NS NANOSECONDS

/* Never 0, because an unused element is zero. */
static __always_inline __u32 tag_of(const void *key)
{
	const __u64 *w = key;
	__u64 t = w[0] ^ (w[1] << 7 | w[1] >> 57) ^ (w[2] << 14 | w[2] >> 50) ^ (w[3] << 28 | w[3] >> 36) ^
		  (w[4] << 21 | w[4] >> 43);

	/* Addresses and ports that differ in one bit must have different tags. */
	t = (t ^ t >> 32) * 0x9e3779b97f4a7c15ULL;
	return (__u32)(t >> 32) | 1;
}

/* A guess: clients usually have the higher port. */
static __always_inline bool is_for_client(const struct packet *p)
{
	return p->destination_port > p->source_port;
}

/*
 * A packet of a flow in the table goes to a frontend, or comes from an endpoint.  The word with the hint of a client's
 * port is rarely in the CPU's cache, so the other end comes first.
 */
static __always_inline bool may_be_known(const struct packet *p)
{
	if (is_for_client(p))
		return has_hinted_source(p) || has_hinted_destination(p);
	return has_hinted_destination(p) || has_hinted_source(p);
}

static __always_inline bool comes_from_endpoint(const struct packet *p)
{
	return has_hinted_source(p) && is_endpoint(&p->source, p->source_port, p->protocol, p->ipv6, 0);
}

/* bpf_ktime_get_coarse_ns(), perhaps of the tick before. */
static __always_inline __u64 flow_clock(void)
{
	__u32 zero = 0;
	struct tick *tick = bpf_map_lookup_elem(&ticks, &zero);
	__u64 number = bpf_jiffies64();

	if (unlikely(!tick))
		return bpf_ktime_get_coarse_ns();
	if (unlikely(tick->number != number)) {
		tick->now = bpf_ktime_get_coarse_ns();
		tick->number = number;
	}
	return tick->now;
}

static __always_inline struct flow_draft *draft_of(__u32 user)
{
	return bpf_map_lookup_elem(&flow_drafts, &user);
}

static __always_inline struct flow_draft *flow_draft(void)
{
	return draft_of(FOR_PACKETS);
}

static __always_inline struct fast_path *fast_path_state(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&fast_path, &zero);
}

/* NOT_SLOW: the agent is alive and has not closed the fast path for this family. */
static __always_inline enum slow_path_reason fast_path_closed(const struct fast_path *state, bool ipv6, __u64 now)
{
	if (now >= state->alive_until)
		return STACK_NO_AGENT;
	return ipv6 ? state->closed6 : state->closed4;
}

/* Orders the loads before this call before those after it. x86 keeps that order by itself. */
static __always_inline void read_barrier(void)
{
	__u32 word = 0;

	barrier();
	if (settings.weak_memory)
		__sync_lock_test_and_set(&word, 1);
}

/*
 * The element may be given to another flow at any time.  Called before and after an entry is used: if both calls
 * return false, the entry was this flow's all the time.
 */
static __always_inline bool was_reused(const struct flow_rewrite *a, __u32 tag)
{
	bool another;

	read_barrier();
	another = *(volatile __u32 *)&a->tag_again != tag || *(volatile __u32 *)&a->tag != tag;
	read_barrier();
	return another;
}

static __always_inline bool same_bytes16(const __u8 *a, const void *b)
{
	const __u64 *x = (const void *)a, *y = b;

	return !((x[0] ^ y[0]) | (x[1] ^ y[1]));
}

#define CURRENT_NETNS (-1)

/* The key as the kernel's lookups expect it; returns the bytes that they read. */
static __always_inline __u32 tuple_of(const struct flow_key *key, struct bpf_sock_tuple *t)
{
	const __u32 *source = (const void *)key->source, *destination = (const void *)key->destination;
	__u32 i;

	if (key->ipv6) {
		for (i = 0; i < 4; i++) {
			t->ipv6.saddr[i] = source[i];
			t->ipv6.daddr[i] = destination[i];
		}
		t->ipv6.sport = bpf_htons(key->source_port);
		t->ipv6.dport = bpf_htons(key->destination_port);
		return sizeof(t->ipv6);
	}
	t->ipv4.saddr = *source;
	t->ipv4.daddr = *destination;
	t->ipv4.sport = bpf_htons(key->source_port);
	t->ipv4.dport = bpf_htons(key->destination_port);
	return sizeof(t->ipv4);
}

/* The key of the replies to packets that were rewritten by `a`. */
static __always_inline void reply_key_of(const struct flow_rewrite *a, enum protocol protocol, bool ipv6,
					 struct flow_key *key)
{
	__builtin_memset(key, 0, sizeof(*key));
	__builtin_memcpy(key->source, a->destination, 16);
	__builtin_memcpy(key->destination, a->source, 16);
	key->source_port = a->destination_port;
	key->destination_port = a->source_port;
	key->protocol = protocol;
	key->ipv6 = ipv6;
}

/* The key of this endpoint's replies to the client, if neither masqueraded nor given another port. */
static __always_inline void key_of_replies(const struct packet *p, const union address *endpoint, __u16 port,
					   struct flow_key *key)
{
	__builtin_memset(key, 0, sizeof(*key));
	__builtin_memcpy(key->source, endpoint, 16);
	__builtin_memcpy(key->destination, &p->source, 16);
	key->source_port = port;
	key->destination_port = p->source_port;
	key->protocol = p->protocol;
	key->ipv6 = p->ipv6;
}

/* `open`: how many young flows the device has open; NULL: none. */
static __always_inline bool is_over_quota(const __u32 *open)
{
	return open && *(volatile __u32 *)open >= settings.flow_quota;
}

/* `open`: the entry of the device, if it has one. */
static __always_inline void count_young(__u32 *open, __u32 device)
{
	__u32 first = 1;

	if (open)
		__sync_fetch_and_add(open, 1);
	else
		bpf_map_update_elem(&young_counts, &device, &first, BPF_NOEXIST);
}

/*
 * If a flow ends while it is promoted, the count of its device may be lowered twice, so it can be too low.  It must not
 * go below zero: the huge number would keep the device off the fast path for good.
 */
static __always_inline void uncount_young(__u32 device)
{
	__u32 *open = bpf_map_lookup_elem(&young_counts, &device);

	if (open && *(volatile __u32 *)open && !__sync_fetch_and_add(open, -1))
		__sync_fetch_and_add(open, 1);
}

/*
 * Inserts the client's entry of a young flow whose reply entry is in the table.  False: there is no space, and the reply
 * entry is removed again.  `open`: as for count_young().
 */
static __always_inline bool insert_client_entry(const struct flow_key *key, const struct flow *f,
						const struct flow_key *reply_key, __u32 *open)
{
	/* Counted before it can be found, because the removal of the flow lowers the count. */
	count_young(open, f->rewrite.device_in);
	if (!bpf_map_update_elem(&flows, key, f, BPF_NOEXIST))
		return true;
	uncount_young(f->rewrite.device_in);
	bpf_map_delete_elem(&flows, reply_key);
	return false;
}

static __always_inline __u32 *recent_end_of(__u32 tag)
{
	__u32 number = tag >> 20;

	_Static_assert(RECENT_ENDS == 1 << (32 - 20), "the upper bits of a tag");
	return bpf_map_lookup_elem(&recent_ends, &number);
}

/* note_recent() need not look for this flow. `key`: of the client's direction. */
static __always_inline void note_end(const struct flow_key *key)
{
	__u32 tag = tag_of(key), *ended = recent_end_of(tag);

	if (ended)
		*(volatile __u32 *)ended = tag;
}

/*
 * Removes both directions of a flow, given one key and its rewrite.  1: the flow was there.  The rewrite may be part of
 * an element.  If that now belongs to another flow, this flow is already gone, and the other direction's key, which is
 * computed from the rewrite, is not its own.
 */
static __noinline int forget_flow(const struct flow_key *key, const struct flow_rewrite *a, bool reply, bool young)
{
	long failed, failed_other;
	struct flow_key other;
	__u32 device;

	if (!key || !a)
		return 0;
	reply_key_of(a, key->protocol, key->ipv6, &other);
	device = reply ? a->out.device : a->device_in;
	if (was_reused(a, tag_of(key)))
		return 0;
	failed_other = bpf_map_delete_elem(&flows, &other);
	failed = bpf_map_delete_elem(&flows, key);
	/* Several callers may remove a flow at once. The one that removed the client's direction counts. */
	if (reply ? failed_other : failed)
		return 0;
	if (young) {
		uncount_young(device);
		note_end(reply ? &other : key);
	}
	return 1;
}

/* The entry of the opposite direction; NULL if there is none. */
static __always_inline struct flow *other_direction(const struct flow_rewrite *a, const struct packet *p)
{
	struct flow_key key;

	reply_key_of(a, p->protocol, p->ipv6, &key);
	return bpf_map_lookup_elem(&flows, &key);
}

/* Asks the agent to promote this young flow. */
static __noinline __attribute__((unused)) int request_promotion(const struct flow_key *key, const struct flow_rewrite *a, struct flow *f)
{
	struct flow_key client;

	if (!key || !a || !f || f->promote)
		return 0;
	if (f->reply)
		reply_key_of(a, key->protocol, key->ipv6, &client);
	else
		client = *key;
	if (bpf_map_push_elem(&promotions, &client, 0))
		return 0;
	f->promote = PROMOTION;
	return 1;
}

/* ---- flow_packet_counts ------------------------------------------------------------------- */

static __always_inline __u64 *flow_packet_count_of(__u32 tag)
{
	__u32 number = tag * 0x9e3779b1U >> (32 - SIGHTING_BITS);

	return bpf_map_lookup_elem(&flow_packet_counts, &number);
}

#define SIGHTING_SECONDS(s) ((__u32)(s) >> 8)
#define SIGHTING_COUNT(s) ((__u32)(s) & 0xff)

static __always_inline __u64 flow_packet_count(__u32 tag, __u32 seconds, __u32 count)
{
	return (__u64)tag << 32 | (seconds & 0xffffff) << 8 | count;
}

#endif
