/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Exchanges: young UDP flows of a few packets, outside the flow table.  A new flow never takes the place of an exchange
 * that is not complete: it enters the flow table instead.
 */
#ifndef PEP_EXCHANGE_H
#define PEP_EXCHANGE_H

#include "complete.h"
#include "flow_table.h"
#include "client_filters.h"

#define WAY(element) ((element) & (EXCHANGE_WAYS - 1))

static __always_inline __u32 bucket_of(__u64 hash)
{
	return (hash >> 32) * EXCHANGE_BUCKETS >> 32;
}

static __always_inline struct exchange_bucket *bucket_at(__u32 number)
{
	return bpf_map_lookup_elem(&exchange_heads, &number);
}

static __always_inline struct exchange_bucket *bucket_with(__u32 element)
{
	return bucket_at(element / EXCHANGE_WAYS);
}

/* The first elements of all buckets are next to each other. Most others are rarely used. */
static __always_inline struct exchange *exchange_at(__u32 element)
{
	__u32 number = WAY(element) * EXCHANGE_BUCKETS + element / EXCHANGE_WAYS;

	return bpf_map_lookup_elem(&exchanges, &number);
}

/* ---- finding -------------------------------------------------------------------------------- */

#define OWNER_MASK 0x7fffffff	/* so that find_exchange() returns no negative number */

static __always_inline __u32 owner_of(const struct exchange_bucket *bucket, __u32 way)
{
	__u32 owner = *(volatile __u32 *)&bucket->way[WAY(way)].owner;

	read_barrier();
	return owner;
}

/* The tags in the bucket have matched.  A packet of one direction answers those that were rewritten for the other. */
static __always_inline bool is_direction(const struct exchange *x, const struct flow_key *key, const bool reply,
					 __u32 tag)
{
	const struct flow_rewrite *other = reply ? &x->there : &x->reply;
	const __u64 *source = (const void *)key->source, *destination = (const void *)key->destination;
	const __u64 *from = (const void *)other->destination, *to = (const void *)other->source;

	return !was_reused(reply ? &x->reply : &x->there, tag) &&
	       !((source[0] ^ from[0]) | (source[1] ^ from[1]) | (destination[0] ^ to[0]) | (destination[1] ^ to[1]) |
		 (key->source_port ^ other->destination_port) | (key->destination_port ^ other->source_port) |
		 (key->ipv6 ^ x->ipv6));
}

/* The element with this tag; EXCHANGE_WAYS: there is none. */
static __always_inline __u32 way_with(const __u32 *tags, __u32 tag)
{
	const volatile __u32 *t = tags;

	return t[0] == tag ? 0 : t[1] == tag ? 1 : t[2] == tag ? 2 : t[3] == tag ? 3 : EXCHANGE_WAYS;
}

/* The exchange in this bucket that packets with this key belong to, as find_exchange() returns it. */
static __always_inline long find_in_bucket(__u32 number, const struct flow_key *key, const bool reply)
{
	struct exchange_bucket *bucket = bucket_at(number);
	__u32 tag = tag_of(key), way, element, owner;
	struct exchange *x;

	if (unlikely(!bucket))
		return -1;
	way = way_with(reply ? bucket->reply : bucket->there, tag);
	if (way == EXCHANGE_WAYS)
		return -1;
	element = number * EXCHANGE_WAYS + way;
	owner = owner_of(bucket, way);
	x = exchange_at(element);
	if (unlikely(!x || !is_direction(x, key, reply, tag)))
		return -1;
	return (__u64)owner << 32 | element << 1 | reply;
}

/*
 * The exchange that packets with this key belong to: the number of its element in the upper bits of the lower half, and
 * whether it is the endpoint's direction in the lowest bit.  Upper half: the element's owner.
 * Below 0: none has it.  Global, as all functions that other headers call, so that the verifier checks it once.
 */
__noinline long find_exchange(const struct flow_key *key)
{
	long found;

	if (!settings.fast_path || !key)
		return -1;
	found = find_in_bucket(bucket_of(client_hash(key, false)), key, false);
	return found < 0 ? find_in_bucket(bucket_of(client_hash(key, true)), key, true) : found;
}

/* As find_exchange(), for the key of an endpoint's packet only. */
static __always_inline long find_reply_exchange(const struct flow_key *key, __u64 hash)
{
	return find_in_bucket(bucket_of(hash), key, true);
}

/*
 * Reads what a new flow in this bucket, or a packet of its first exchange, will need.  The CPU loads these lines from
 * memory at the same time as the bucket's, and not one after the other.
 */
static __always_inline void prefetch_exchange(__u64 hash)
{
	__u32 number = bucket_of(hash);
	const struct exchange *x = bpf_map_lookup_elem(&exchanges, &number);

	if (!x)
		return;
	(void)*(volatile __u32 *)&x->there.tag;
	(void)*(volatile __u32 *)&x->reply.tag;
	(void)*(volatile __u32 *)&x->backend;
}

#define FOUND_ELEMENT(found) ((__u32)(found) >> 1)
#define FOUND_REPLY(found) ((found) & 1)
#define FOUND_OWNER(found) ((__u32)((found) >> 32))

/* How packets of the direction that find_exchange() has found are rewritten. */
static __always_inline struct flow_rewrite *found_rewrite(struct exchange *x, long found)
{
	return (struct flow_rewrite *)((void *)x + FOUND_REPLY(found) * sizeof(struct flow_rewrite));
}

/* The first packet of a young flow is left to the next program, which finds the entries, sends and counts it. */
static __always_inline void note_first_counted(const struct flow_key *key)
{
	struct flow *f = bpf_map_lookup_elem(&flows, key);
	struct exchange_bucket *bucket;
	long found;

	if (f) {
		f->first_counted = LEFT_BY_XDP;
		return;
	}
	found = key->protocol == UDP ? find_exchange(key) : -1;
	if (found < 0)
		return;
	bucket = bucket_with(FOUND_ELEMENT(found));
	if (bucket)
		bucket->way[WAY(FOUND_ELEMENT(found))].first_counted = LEFT_BY_XDP;
}

/* True if a new flow may have this way.  `many`: as in exchange_may_make_room(). */
static __always_inline bool may_have_way(const struct exchange_bucket *bucket, __u32 way, __u64 now, bool many)
{
	return !bucket->there[WAY(way)] || exchange_may_make_room(&bucket->way[WAY(way)], now, many);
}

/*
 * The first way that is free, or whose exchange is complete; EXCHANGE_WAYS: none.  Few elements stay in use, which the
 * CPU has in its cache.  And a client port that is used again, as soon as all others were, then begins a new exchange,
 * not a stream.
 */
static __always_inline __u32 way_for_many(const struct exchange_bucket *bucket, __u64 now)
{
	int i;

	for (i = 0; i < EXCHANGE_WAYS; i++)
		if (may_have_way(bucket, i, now, true))
			return i;
	return EXCHANGE_WAYS;
}

/* ---- writing -------------------------------------------------------------------------------- */

/* Makes this program the only writer.  False: another one writes, or has written since `owner` was read. */
static __always_inline bool claim_exchange(struct exchange_head *head, __u32 owner)
{
	return !(owner & 1) && __sync_val_compare_and_swap(&head->owner, owner, owner | 1) == owner;
}

/* `written`: the element may have another flow than before, so programs that have read `owner` must not use it. */
static __always_inline void release_exchange(struct exchange_head *head, __u32 owner, bool written)
{
	read_barrier();
	*(volatile __u32 *)&head->owner = (owner + (written ? 2 : 0)) & OWNER_MASK;
}

static __always_inline void write_tags(struct exchange *x, struct exchange_bucket *bucket, __u32 way, __u32 there,
				       __u32 reply)
{
	*(volatile __u32 *)&x->there.tag = there;
	*(volatile __u32 *)&x->reply.tag = reply;
	*(volatile __u32 *)&bucket->there[WAY(way)] = there;
	*(volatile __u32 *)&bucket->reply[WAY(way)] = reply;
}

/* From now on no packet finds the flow. */
static __always_inline void empty_exchange(struct exchange *x, struct exchange_bucket *bucket, __u32 way)
{
	write_tags(x, bucket, way, 0, 0);
	read_barrier();
}

/* True: the exchange was there, and is no more. */
static __always_inline bool forget_exchange(__u32 element, __u32 owner)
{
	struct exchange_bucket *bucket = bucket_with(element);
	struct exchange *x = exchange_at(element);
	struct exchange_head *head;

	if (!bucket || !x)
		return false;
	head = &bucket->way[WAY(element)];
	if (!claim_exchange(head, owner))
		return false;
	empty_exchange(x, bucket, element);
	release_exchange(head, owner, true);
	return true;
}

/* The entry of one direction, as the flow table has it. */
static __always_inline void entry_of(const struct exchange *x, const struct exchange_head *head, const bool reply,
				     __u64 now, struct flow *f)
{
	__builtin_memset(f, 0, sizeof(*f));
	f->rewrite = reply ? x->reply : x->there;
	f->generation = x->generation;
	f->service = x->service;
	f->backend = x->backend;
	f->started = exchange_time(head->started, now);
	f->last_seen = exchange_time(head->last_seen, now);
	f->packets = reply ? head->replies : head->queries;
	f->first_counted = head->first_counted;
	f->reply = reply;
	f->young = 1;
}

/* The caller has claimed the element, so it does not change. */
static __always_inline bool move_to_table(const struct exchange *x, const struct exchange_head *head,
					  struct flow_draft *d)
{
	__u32 device = x->there.device_in, *open = bpf_map_lookup_elem(&young_counts, &device);
	__u64 now = flow_clock();

	reply_key_of(&x->reply, UDP, x->ipv6, &d->key);
	reply_key_of(&x->there, UDP, x->ipv6, &d->reply_key);
	entry_of(x, head, false, now, &d->there);
	entry_of(x, head, true, now, &d->reply);
	note_in_table(&d->key, false, now);
	note_in_table(&d->reply_key, true, now);
	if (is_over_quota(open) || bpf_map_update_elem(&flows, &d->reply_key, &d->reply, BPF_NOEXIST))
		return false;
	return insert_client_entry(&d->key, &d->there, &d->reply_key, open);
}

/*
 * Moves an exchange to the flow table, where streams, promotion and everything unusual are handled.  1: it was moved.
 * If there is no space it stays.  `user`: enum draft_user.
 */
__noinline int unfold_exchange(__u32 element, __u32 owner, __u32 user)
{
	struct exchange_bucket *bucket;
	struct exchange_head *head;
	struct flow_draft *d;
	struct exchange *x;
	bool moved;

	if (!settings.fast_path)
		return 0;
	bucket = bucket_with(element);
	x = exchange_at(element);
	d = draft_of(user);
	if (!bucket || !x || !d || !x->there.tag)
		return 0;
	head = &bucket->way[WAY(element)];
	if (!claim_exchange(head, owner))
		return 0;
	moved = move_to_table(x, head, d);
	if (moved)
		empty_exchange(x, bucket, element);
	release_exchange(head, owner, moved);
	return moved;
}

/*
 * Moves an exchange to the flow table.  `found`: what find_exchange() has returned.  1: it was moved.  `device`: only if
 * the client's packets come in there; 0: any.
 */
static __always_inline int unfold_found(long found, __u32 device)
{
	struct exchange *x;

	if (found < 0)
		return 0;
	x = exchange_at(FOUND_ELEMENT(found));
	if (!x || (device && x->there.device_in != device))
		return 0;
	return unfold_exchange(FOUND_ELEMENT(found), FOUND_OWNER(found), FOR_PACKETS);
}

#endif
