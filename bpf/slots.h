/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Reading a list of endpoints: each slot names a backend. */
#ifndef PEP_SLOTS_H
#define PEP_SLOTS_H

#include "policy.h"
#include "refused.h"

struct backend {
	union address address;
	__u32 id;
	__u32 slot;		/* the slot that choose_at_random() took */
	__u16 port;
};

static __always_inline __u32 slot_at(__u32 index)
{
	struct slot *slot = bpf_map_lookup_elem(&slots, &index);

	return slot ? slot->backend : 0;
}

/* The backend of a new flow. Counts the choice: the cache line is already loaded, so this costs next to nothing. */
static __always_inline __u32 take_slot(__u32 index)
{
	struct slot *slot = bpf_map_lookup_elem(&slots, &index);

	if (!slot)
		return 0;
	if (!settings.dry_run)
		__sync_fetch_and_add(&slot->chosen, 1);
	return slot->backend;
}

/* Undoes the count of take_slot(): the flow does not use this backend. */
static __always_inline void give_back_slot(__u32 index)
{
	struct slot *slot = bpf_map_lookup_elem(&slots, &index);

	if (slot)
		__sync_fetch_and_add(&slot->chosen, -1);
}

static __always_inline bool load_backend(__u32 id, bool ipv6, struct backend *b)
{
	b->id = id;
	if (ipv6) {
		struct backend6 *found = bpf_map_lookup_elem(&backends6, &id);

		if (!found)
			return false;
		__builtin_memcpy(&b->address, found->address, 16);
		b->port = found->port;
	} else {
		struct backend4 *found = bpf_map_lookup_elem(&backends4, &id);

		if (!found)
			return false;
		__builtin_memcpy(&b->address, found->address, 4);
		b->port = found->port;
	}
	return true;
}

/* The service port of a backend; 0: there is no such backend. */
static __always_inline __u32 service_of_backend(__u32 id, bool ipv6)
{
	if (ipv6) {
		struct backend6 *found = bpf_map_lookup_elem(&backends6, &id);

		return found ? found->service : 0;
	}
	struct backend4 *found = bpf_map_lookup_elem(&backends4, &id);

	return found ? found->service : 0;
}

#define SEARCH_STEPS 20		/* enough for 2^20 - 1 entries; map `slots` holds fewer by default */

/* 1 or 0 without a branch: the verifier would follow both sides of a branch in each step of a search. */
static __always_inline __u64 is_less(__u64 a, __u64 b)
{
	__u64 borrow = (~a & b) | (~(a ^ b) & (a - b));

	barrier_var(borrow);
	return borrow >> 63;
}

/* Address and port of a backend as numbers. An IPv4 address is followed by zeros. */
struct rank {
	__u64 upper, lower, port;
};

static __always_inline bool load_rank(__u32 id, bool ipv6, struct rank *r)
{
	if (ipv6) {
		struct backend6 *found = bpf_map_lookup_elem(&backends6, &id);
		const __u32 *words = (const void *)found;	/* the address is first */

		if (!found)
			return false;
		r->upper = (__u64)bpf_ntohl(words[0]) << 32 | bpf_ntohl(words[1]);
		r->lower = (__u64)bpf_ntohl(words[2]) << 32 | bpf_ntohl(words[3]);
		r->port = found->port;
	} else {
		struct backend4 *found = bpf_map_lookup_elem(&backends4, &id);

		if (!found)
			return false;
		r->upper = (__u64)bpf_ntohl(*(const __u32 *)found->address) << 32;
		r->lower = 0;
		r->port = found->port;
	}
	return true;
}

static __always_inline __u64 comes_before(struct rank a, struct rank b)
{
	__u64 less = is_less(a.port, b.port);

	less = is_less(a.lower, b.lower) | (less & ~is_less(b.lower, a.lower));
	return is_less(a.upper, b.upper) | (less & ~is_less(b.upper, a.upper));
}

/*
 * Lists are sorted by address and port (mirror.py).  A binary search therefore finds a backend that has moved within
 * its list, or shows that it has left, in as many steps as the length has bits.  Returns position + 1.
 * A global function: the verifier checks it once, for any list.
 */
__noinline int search_list(const struct endpoint_selection *e, bool ipv6, __u32 wanted_id)
{
	struct rank wanted, here;
	__u32 low = 0, high, middle, after, id;
	int i;

	if (!e || !load_rank(wanted_id, ipv6, &wanted))
		return 0;
	high = e->count;
	for (i = 0; i < SEARCH_STEPS; i++) {
		if (low >= high)
			return 0;
		middle = low + (high - low) / 2;
		id = slot_at(e->first_slot + middle);
		if (id == wanted_id)
			return middle + 1;
		/* Only while the list is being rewritten, when no packet is sent to this backend any more. */
		if (!load_rank(id, ipv6, &here))
			return 0;
		/* A mask instead of a branch: all bits set, or none. */
		after = -(__u32)comes_before(here, wanted);
		barrier_var(after);
		low = (low & ~after) | ((middle + 1) & after);
		high = (high & after) | (middle & ~after);
	}
	return 0;
}

/* Position + 1 of a backend in the list that applies to the packet; 0: not in it. */
static __always_inline __u32 position_in_list(const struct endpoint_selection *e, bool ipv6, __u32 backend, __u32 hint)
{
	if (hint < e->count && slot_at(e->first_slot + hint) == backend)
		return hint + 1;
	return search_list(e, ipv6, backend);
}

static __always_inline __u32 random_position(const struct endpoint_selection *e)
{
	return ((__u64)bpf_get_prandom_u32() * e->count) >> 32;
}

#endif
