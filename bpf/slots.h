/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Reading a list of endpoints: slots name backends. */
#ifndef PEP_SLOTS_H
#define PEP_SLOTS_H

#include "policy.h"
#include "refused.h"

struct backend {
	union address address;
	__u32 id;
	__u16 port;
	enum lane lane;
};

static __always_inline __u32 slot_at(__u32 index)
{
	struct slot *slot = bpf_map_lookup_elem(&slots, &index);

	return slot ? slot->backend : 0;
}

/* The endpoint of a new flow. Its line of memory is in hand, so that counting costs next to nothing. */
static __always_inline __u32 take_slot(__u32 index)
{
	struct slot *slot = bpf_map_lookup_elem(&slots, &index);

	if (!slot)
		return 0;
	if (!settings.dry_run)
		__sync_fetch_and_add(&slot->chosen, 1);
	return slot->backend;
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
		b->lane = found->lane;
	} else {
		struct backend4 *found = bpf_map_lookup_elem(&backends4, &id);

		if (!found)
			return false;
		__builtin_memcpy(&b->address, found->address, 4);
		b->port = found->port;
		b->lane = found->lane;
	}
	return true;
}

struct search {
	__u32 first_slot;
	__u32 wanted;
	__u32 found;	/* position + 1 */
};

static long compare_slot(__u32 i, struct search *s)
{
	if (slot_at(s->first_slot + i) != s->wanted)
		return 0;
	s->found = i + 1;
	return 1;
}

/* Position + 1 of a backend in the list that the packet is entitled to; 0: not in it. */
static __always_inline __u32 position_in_list(const struct entitlement *e, __u32 backend, __u32 hint)
{
	struct search s = { .first_slot = e->first_slot, .wanted = backend };

	if (hint < e->count && slot_at(e->first_slot + hint) == backend)
		return hint + 1;
	bpf_loop(e->count, compare_slot, &s, 0);
	return s.found;
}

static __always_inline __u32 random_position(const struct entitlement *e)
{
	return ((__u64)bpf_get_prandom_u32() * e->count) >> 32;
}

#endif
