/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The schedulers of mode ipvs: each chooses a position in a list of endpoints.  Every endpoint has weight 1, as in
 * kube-proxy, so wrr is rr, wlc is lc and nq is sed.  docs/ipvs-mode.md lists the differences to IPVS.
 */
#ifndef PEP_SCHEDULER_H
#define PEP_SCHEDULER_H

#include "connections.h"

/* ---- hashes: fixed, so that another node, or this one after a restart, chooses the same --------- */

/* Every bit of the input affects every bit of the output (the finalizer of MurmurHash3, public domain). */
static __always_inline __u64 mixed(__u64 x)
{
	x ^= x >> 33;
	x *= 0xff51afd7ed558ccdULL;
	x ^= x >> 33;
	x *= 0xc4ceb9fe1a85ec53ULL;
	return x ^ x >> 33;
}

static __always_inline __u64 hash_of(const union address *a)
{
	return mixed(mixed((__u64)a->words[0] << 32 | a->words[1]) + ((__u64)a->words[2] << 32 | a->words[3]));
}

static __always_inline __u32 position_of(__u64 hash, const struct endpoint_selection *e)
{
	return ((hash >> 32) * e->count) >> 32;
}

/* ---- rr ----------------------------------------------------------------------- */

/* A list is identified by its first slot. Two CPUs never get the same turn. */
static __always_inline __u32 next_in_turn(const struct endpoint_selection *e)
{
	__u32 list = e->first_slot;
	__u32 *turn = bpf_map_lookup_elem(&rr_cursor, &list);

	return turn ? __sync_fetch_and_add(turn, 1) % e->count : 0;
}

/* ---- mh ------------------------------------------------------------------------ */

struct contest {
	__u64 client;
	__u64 highest;
	__u32 first_slot;
	__u32 count;
	__u32 position;
	bool ipv6;
};

static long compare_rank(__u32 i, struct contest *c)
{
	struct backend b = {};
	__u64 rank;

	if (!load_backend(slot_at(c->first_slot + i), c->ipv6, &b))
		return 0;
	rank = mixed(c->client + hash_of(&b.address) + b.port);
	if (rank >= c->highest) {
		c->highest = rank;
		c->position = i;
	}
	return 0;
}

/*
 * The endpoint with the highest rank for this client.  When an endpoint leaves,
 * only its own clients move; a new endpoint takes its share from all.  A client is
 * an address and a port, as with kube-proxy's mh-port.  A socket that connects has
 * no port yet: a random one is used.
 */
static __always_inline __u32 highest_ranked(const struct packet *p, const struct endpoint_selection *e)
{
	struct contest c = { .first_slot = e->first_slot, .count = e->count, .ipv6 = p->ipv6 };
	__u32 port = p->source_port ? p->source_port : bpf_get_prandom_u32() & 0xffff;
	__u32 i;

	c.client = mixed(hash_of(&p->source) + port);
	if (abilities.loop) {
		bpf_loop(e->count, compare_rank, &c, 0);
		return c.position;
	}
	/* A long list is sampled: the same client always gets the same few endpoints, from all over the list. */
	for (i = 0; i < SHORT_SCAN && i < c.count; i++)
		compare_rank(c.count <= SHORT_SCAN ? i : mixed(c.client + i) % c.count, &c);
	return c.position;
}

/* ---- all ------------------------------------------------------------------------ */

static __always_inline __u32 scheduled_position(enum scheduler scheduler, const struct packet *p,
						const struct endpoint_selection *e)
{
	switch (scheduler) {
	case ROUND_ROBIN:
		return next_in_turn(e);
	case SOURCE_HASH:
		return position_of(hash_of(&p->source), e);
	case DESTINATION_HASH:
		return position_of(hash_of(&p->destination), e);
	case MAGLEV_HASH:
		return highest_ranked(p, e);
	case LEAST_CONNECTIONS:
	case SHORTEST_DELAY:
		return least_loaded(scheduler, e);
	case LOCALITY:
		return least_loaded_with_locality(p, e);
	case LOCALITY_WITH_REPLICATION:
		return least_loaded_of_set(p, e);
	default:
		return random_position(e);
	}
}

#endif
