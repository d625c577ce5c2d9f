/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Choosing an endpoint: session affinity first, then uniformly at random
 * (service-semantics 4), or as the scheduler of mode ipvs says.
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

/* Position + 1 of the endpoint that session affinity asks for; 0: any. */
static __always_inline __u32 affinity_position(const struct packet *p, const struct endpoint_selection *e,
					       struct remembered *r)
{
	r->key.service = e->service;
	affinity_client(p, &r->key);
	r->next.last_used = coarse_now();
	r->last = bpf_map_lookup_elem(&affinities, &r->key);
	/* Added, for the entry may be younger than this: another CPU has served the same client meanwhile. */
	if (r->last && r->next.last_used < r->last->last_used + e->affinity_seconds * NANOSECONDS)
		return position_in_list(e, p->ipv6, r->last->backend, r->last->position);
	return 0;
}

/* Asked for new clients only. */
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
		/* In place: an entry that is thrown out meanwhile is some new client's, whose time is this, too. */
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

/* With frames of their own: the schedulers need all of the stack that is left. */
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
 * Not static, so that the verifier reads it once, for any packet, and not again for every way that leads here:
 * of the sockets' programs with a scheduler that was nine tenths of its work.
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
	if (!load_backend(take_slot(e->first_slot + position), p->ipv6, b))
		return 0;
	if (e->affinity_seconds)
		remember_affinity(&r, b, position);
	return 1;
}

/*
 * Fills `b`; false only if the list changes so fast that the chosen backend
 * is gone already.  A verdict to serve has come before, so the list is not empty.
 * Where no scheduler is set, what is read to know that is all that remains of them.
 */
static __always_inline int choose_backend(const struct packet *p, const struct endpoint_selection *e, struct backend *b)
{
	if (settings.scheduler != AT_RANDOM)
		return choose_by_scheduler(p, e, b);
	return choose_at_random(p, e, b);
}

#endif
