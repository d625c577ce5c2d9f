/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The schedulers of mode ipvs that use the number of connections of each
 * endpoint.  The control plane counts them (`connections`); the programs add what
 * they have chosen since (`choices`).
 */
#ifndef PEP_CONNECTIONS_H
#define PEP_CONNECTIONS_H

#include "slots.h"

#define SCAN_LIMIT 1024			/* endpoints of a list that are compared, from a random start */
#define INACTIVE_PER_ACTIVE 256		/* the weights of IPVS */
#define OVERLOADED_ACTIVE 1		/* an endpoint with more is overloaded, if another one has none */
#define SET_SETTLED_SECONDS (24 * 60 * 60)

struct load {
	__u32 active;
	__u32 inactive;
};

static __always_inline void count_choice(__u32 id)
{
	__u32 *chosen = bpf_map_lookup_elem(&choices, &id);
	__u32 none = 0;

	if (!chosen) {
		bpf_map_update_elem(&choices, &id, &none, BPF_NOEXIST);
		chosen = bpf_map_lookup_elem(&choices, &id);
	}
	if (chosen)
		__sync_fetch_and_add(chosen, 1);
}

static __always_inline void load_of(__u32 id, struct load *l)
{
	__u32 *chosen = bpf_map_lookup_elem(&choices, &id);
	struct connections *counted = bpf_map_lookup_elem(&connections, &id);
	__s32 since = chosen ? *chosen : 0;

	l->active = l->inactive = 0;
	if (counted) {
		since -= counted->choices;
		l->active = counted->active;
		l->inactive = counted->inactive;
	}
	/* `since` is negative only while the control plane writes new counts. */
	if (since > 0)
		l->active += since;
}

static __always_inline __u64 overhead(enum scheduler scheduler, const struct load *l)
{
	if (scheduler == SHORTEST_DELAY)
		return l->active;	/* active + 1 would give the same order */
	return (__u64)l->active * INACTIVE_PER_ACTIVE + l->inactive;
}

struct scan {
	__u64 least;
	__u64 least_member;
	__u64 most_member;
	__u32 first_slot;
	__u32 count;
	__u32 start;
	__u32 position;		/* of the least loaded */
	__u32 member_position;	/* of the least loaded in the set */
	__u32 member_active;
	__u32 worst_member;	/* index in the set */
	__u32 present;		/* bit for each member that is in the list */
	enum scheduler scheduler;
	bool idle;		/* an endpoint has no active connection */
	struct server_set *set;
};

static __always_inline void compare_member(struct scan *s, __u32 id, __u32 position, const struct load *l,
					   __u64 overhead)
{
	struct server_set *set = s->set;
	__u32 i;

	if (!set)
		return;
	for (i = 0; i < SET_SIZE; i++) {
		if (set->backends[i] != id)
			continue;
		if (!s->present || overhead < s->least_member) {
			s->least_member = overhead;
			s->member_position = position;
			s->member_active = l->active;
		}
		if (!s->present || overhead > s->most_member) {
			s->most_member = overhead;
			s->worst_member = i;
		}
		s->present |= 1U << i;
		return;
	}
}

static long compare_load(__u32 i, struct scan *s)
{
	__u32 position = s->start + i;
	struct load l;
	__u64 here;
	__u32 id;

	if (position >= s->count)
		position -= s->count;
	id = slot_at(s->first_slot + position);
	if (!id)
		return 0;
	load_of(id, &l);
	here = overhead(s->scheduler, &l);
	if (here < s->least) {
		s->least = here;
		s->position = position;
	}
	if (!l.active)
		s->idle = true;
	if (s->scheduler == LOCALITY_WITH_REPLICATION) {
		compare_member(s, id, position, &l, here);
		return 0;
	}
	return !here;	/* no endpoint can have less */
}

static __always_inline void scan_list(struct scan *s, enum scheduler scheduler, const struct endpoint_selection *e)
{
	__u32 i;

	s->least = ~0ULL;
	s->first_slot = e->first_slot;
	s->count = e->count;
	s->scheduler = scheduler;
	/* A random start: equal endpoints take turns, and different nodes do not all begin with the first one. */
	s->start = s->position = random_position(e);
	if (abilities.loop) {
		bpf_loop(e->count < SCAN_LIMIT ? e->count : SCAN_LIMIT, compare_load, s, 0);
		return;
	}
	for (i = 0; i < SHORT_SCAN && i < e->count; i++)
		if (compare_load(i, s))
			break;
}

static __noinline __u32 least_loaded(enum scheduler scheduler, const struct endpoint_selection *e)
{
	struct scan s = {};

	scan_list(&s, scheduler, e);
	return s.position;
}

static __always_inline void locality_key(const struct packet *p, const struct endpoint_selection *e, struct affinity_key *key)
{
	key->service = e->service;
	__builtin_memcpy(key->client, &p->destination, 16);
}

#define OVERLOADED (1U << 31)

/* Position + 1 of the endpoint last used for this address, with OVERLOADED if it is overloaded; 0: none. */
static __noinline __u32 former_position(const struct packet *p, const struct endpoint_selection *e)
{
	struct affinity_key key = {};
	struct affinity *last;
	__u32 position;
	struct load l;

	locality_key(p, e, &key);
	last = bpf_map_lookup_elem(&localities, &key);
	if (!last)
		return 0;
	position = position_in_list(e, p->ipv6, last->backend, last->position);
	if (!position)
		return 0;
	load_of(last->backend, &l);
	return l.active <= OVERLOADED_ACTIVE ? position : position | OVERLOADED;
}

/* `position`, from former_position(), is kept if no endpoint is idle. */
static __noinline __u32 next_locality(const struct packet *p, const struct endpoint_selection *e, __u32 position)
{
	struct affinity next = {};
	struct affinity_key key = {};
	struct scan s = {};

	scan_list(&s, LEAST_CONNECTIONS, e);
	if (position && !s.idle)
		return position - 1;
	locality_key(p, e, &key);
	next.last_used = bpf_ktime_get_ns();
	next.backend = slot_at(e->first_slot + s.position);
	next.position = s.position;
	bpf_map_update_elem(&localities, &key, &next, BPF_ANY);
	return s.position;
}

/*
 * lblc: an address keeps its endpoint unless that one is overloaded.  Split into two functions, so that the stack
 * frames of the search and of the scan do not add up.
 */
static __always_inline __u32 least_loaded_with_locality(const struct packet *p, const struct endpoint_selection *e)
{
	__u32 position = former_position(p, e);

	if (position && !(position & OVERLOADED))
		return position - 1;
	return next_locality(p, e, position & ~OVERLOADED);
}

static __noinline int begin_set(const struct affinity_key *key, __u32 id)
{
	struct server_set set = { .changed = bpf_ktime_get_ns(), .backends = { id } };

	bpf_map_update_elem(&locality_sets, key, &set, BPF_NOEXIST);
	return 0;
}

/*
 * lblcr: as lblc, but with a set of endpoints for each address.  A set grows when all of its endpoints are overloaded.
 * Sets are changed in place: if two CPUs change one at the same time, a change may be lost.
 */
static __noinline __u32 least_loaded_of_set(const struct packet *p, const struct endpoint_selection *e)
{
	struct affinity_key key = {};
	struct server_set *set;
	struct scan s = {};
	__u32 i, id;
	__u64 now;

	locality_key(p, e, &key);
	set = s.set = bpf_map_lookup_elem(&locality_sets, &key);
	scan_list(&s, LOCALITY_WITH_REPLICATION, e);
	id = slot_at(e->first_slot + s.position);
	if (!set) {
		begin_set(&key, id);
		return s.position;
	}
	now = bpf_ktime_get_ns();
	if (s.present & (s.present - 1) && now > set->changed + SET_SETTLED_SECONDS * NANOSECONDS) {
		/* The set has not changed for a long time: remove its endpoint with the most load. */
		set->backends[s.worst_member % SET_SIZE] = 0;
		set->changed = now;
	}
	if (s.present && !(s.member_active > OVERLOADED_ACTIVE && s.idle))
		return s.member_position;
	for (i = 0; i < SET_SIZE; i++) {
		/* This place is free, or its endpoint has left the list. */
		if (!(s.present & 1U << i)) {
			set->backends[i] = id;
			set->changed = now;
			break;
		}
	}
	return s.position;
}

#endif
