/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Choosing an endpoint: session affinity first, then uniformly at random
 * (service-semantics 4), or by the scheduler of mode ipvs.
 */
#ifndef PEP_BACKEND_H
#define PEP_BACKEND_H

#include "scheduler.h"

static __always_inline void affinity_client(const struct packet *p, struct affinity_key *key)
{
	if (p->ipv6)
		__builtin_memcpy(key->client, &p->source, 16);
	else
		__builtin_memcpy(key->client, &p->source, 4);
}

struct remembered {
	struct affinity_key key;
	struct affinity next;
	struct affinity *last;
};

/* Position + 1 of the client's endpoint; 0: session affinity has none for it. */
static __always_inline __u32 affinity_position(const struct packet *p, const struct endpoint_selection *e,
					       struct remembered *r)
{
	r->key.service = e->service;
	affinity_client(p, &r->key);
	r->next.last_used = coarse_now();
	r->last = bpf_map_lookup_elem(&affinities, &r->key);
	/* Add to last_used, do not subtract: if another CPU has just served the client, it may be later than now. */
	if (r->last && r->next.last_used < r->last->last_used + e->affinity_seconds * NANOSECONDS)
		return position_in_list(e, p->ipv6, r->last->backend, r->last->position);
	return 0;
}

/* Called for new clients only. */
static __always_inline bool has_room_for_client(__u32 *service)
{
	__u32 of_all = 0;
	__u64 *most = bpf_map_lookup_elem(&affinity_counts, &of_all);
	__u64 *count = bpf_map_lookup_elem(&affinity_counts, service);

	if (!most || !count || (*most && *count >= *most))
		return false;
	__sync_fetch_and_add(count, 1);
	return true;
}

static __always_inline void remember_affinity(struct remembered *r, const struct backend *b, __u32 position)
{
	if (r->last && r->last->backend == b->id) {
		/*
		 * Updated in place.  If the element has just been evicted and given to a new client, this changes
		 * little: the time is about the same, and `position` is checked before use.
		 */
		r->last->last_used = r->next.last_used;
		r->last->position = position;
		return;
	}
	if (!r->last && !has_room_for_client(&r->key.service))
		return;
	r->next.backend = b->id;
	r->next.position = position;
	bpf_map_update_elem(&affinities, &r->key, &r->next, BPF_ANY);
}

/* Separate functions with their own stack frames: the schedulers need all of the remaining stack. */
static __noinline __u32 scheduler_affinity(const struct packet *p, const struct endpoint_selection *e)
{
	struct remembered r = {};

	return affinity_position(p, e, &r);
}

static __noinline int remember_scheduled(const struct packet *p, const struct endpoint_selection *e, const struct backend *b,
					 __u32 position)
{
	struct remembered r = { .key.service = e->service, .next.last_used = coarse_now() };

	affinity_client(p, &r.key);
	r.last = bpf_map_lookup_elem(&affinities, &r.key);
	remember_affinity(&r, b, position);
	return 0;
}

/*
 * A global function, so that the verifier checks it once for any packet, and not again on every path to it.  That was
 * nine tenths of its work on the socket programs with a scheduler.
 */
__noinline int choose_by_scheduler(const struct packet *p, const struct endpoint_selection *e, struct backend *b)
{
	enum scheduler scheduler = settings.scheduler;
	__u32 position = 0;

	if (!p || !e || !b)
		return 0;
	if (e->affinity_seconds)
		position = scheduler_affinity(p, e);
	if (position)
		position -= 1;
	else
		position = scheduled_position(scheduler, p, e);
	if (!load_backend(take_slot(e->first_slot + position), p->ipv6, b))
		return 0;
	if (scheduler >= LEAST_CONNECTIONS)
		count_choice(b->id);
	if (e->affinity_seconds)
		remember_scheduled(p, e, b, position);
	return 1;
}

__noinline int choose_at_random(const struct packet *p, const struct endpoint_selection *e, struct backend *b)
{
	struct remembered r = {};
	__u32 position = 0;

	if (!p || !e || !b)
		return 0;
	if (e->affinity_seconds)
		position = affinity_position(p, e, &r);
	if (position)
		position -= 1;
	else
		position = random_position(e);
	b->slot = e->first_slot + position;
	if (!load_backend(take_slot(b->slot), p->ipv6, b))
		return 0;
	if (e->affinity_seconds)
		remember_affinity(&r, b, position);
	return 1;
}

/*
 * Fills `b`.  Called after the verdict SERVE, so the list is not empty.  False: the list has just changed, and the
 * chosen backend is already gone.  Without a scheduler, this check is all that the schedulers cost.
 */
static __always_inline int choose_backend(const struct packet *p, const struct endpoint_selection *e, struct backend *b)
{
	if (settings.scheduler != AT_RANDOM)
		return choose_by_scheduler(p, e, b);
	return choose_at_random(p, e, b);
}

#endif
