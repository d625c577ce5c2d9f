/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Permits: which pairs of a client and an endpoint may have young flows, because netfilter has just forwarded one. */
#ifndef PEP_PERMIT_H
#define PEP_PERMIT_H

#include "exchange.h"

#define PERMIT_NS NANOSECONDS

/*
 * A hash of the address and port of a frontend: the destination of `key`, or its source (not `reply`).  The seeds are
 * secret.  Otherwise a tenant could choose an address and port with the hash of another frontend, and its flows would
 * give permits for that one, which a rule may deny.
 */
static __always_inline __u32 frontend_hash(const struct flow_key *key, bool reply)
{
	const __u64 *w = (const void *)(reply ? key->destination : key->source);
	__u64 hash = client_hash(key, reply) * settings.permit_seed;

	if (key->ipv6)
		hash += w[1] * settings.permit_seed6;
	return hash >> 32;
}

/* `frontend`: frontend_hash() of the end of a packet that has its address. */
static __always_inline void permit_key_of(struct permit_key *key, __u32 device, const union address *client,
					  const union address *endpoint, __u16 port, enum protocol protocol,
					  bool ipv6, __u32 frontend, bool masquerade)
{
	__builtin_memset(key, 0, sizeof(*key));
	key->device = device;
	__builtin_memcpy(key->client, client, 16);
	__builtin_memcpy(key->endpoint, endpoint, 16);
	key->port = port;
	key->protocol = protocol;
	key->ipv6 = ipv6;
	key->frontend = (frontend & ~1U) | masquerade;
}

static __always_inline bool is_same_link(const struct link *a, const struct link *b)
{
	const __u32 *x = (const void *)a, *y = (const void *)b;

	_Static_assert(sizeof(struct link) == 20, "compared in words");
	return !((x[0] ^ y[0]) | (x[1] ^ y[1]) | (x[2] ^ y[2]) | (x[3] ^ y[3]) | (x[4] ^ y[4]));
}

/* Why this new flow cannot be young, whether or not its pair has a permit. */
static __always_inline enum slow_path_reason why_not_young(const struct packet *p, const struct fast_path *state,
							   __u64 now)
{
	enum slow_path_reason reason = fast_path_closed(state, p->ipv6, now);

	if (reason)
		return reason;
	if (state->draining)
		return STACK_DRAINING;
	/* The schedulers that count connections in the kernel must see each of them. */
	if (p->protocol == SCTP || settings.scheduler >= LEAST_CONNECTIONS)
		return SLOW_NO_PERMIT;
	if (p->fragment)
		return STACK_FRAGMENT;
	if (p->options)
		return STACK_OPTIONS;
	return p->hops <= 1 ? STACK_HOPS : NOT_SLOW;
}

/*
 * Why the pair of the draft's `permit_key` may have no young flow now; NOT_SLOW: it may, and the draft has a copy of the
 * permit.
 */
static __always_inline enum slow_path_reason read_permit(struct flow_draft *d, const struct fast_path *state, __u64 now)
{
	const struct permit *permit = bpf_map_lookup_elem(&permits, &d->permit_key);

	if (!permit)
		return SLOW_NO_PERMIT;
	/* A copy: the element may be given to another pair meanwhile, and the key would not show that. */
	d->permit = *permit;
	if (now >= d->permit.until || now >= d->permit.back_until ||
	    d->permit.generation != *(volatile __u32 *)&state->permit_generation)
		return SLOW_NO_PERMIT;
	return d->permit.out.redirect && d->permit.back.redirect ? NOT_SLOW : STACK_DEVICE;
}

#endif
