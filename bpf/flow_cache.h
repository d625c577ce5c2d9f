/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The decision whether a packet takes the fast path: what the cache knows of
 * its flow, and what the packet itself asks for.  Nothing here touches the packet.
 */
#ifndef PEP_FLOW_CACHE_H
#define PEP_FLOW_CACHE_H

#include "hints.h"

#define FLOW_CHECK_NS NANOSECONDS

/* What makes sure that an element of the cache has not been given to another flow while it was read. */
static __always_inline __u32 flow_tag(const void *key)
{
	const __u64 *w = key;
	__u64 t = w[0] ^ (w[1] << 7 | w[1] >> 57) ^ (w[2] << 14 | w[2] >> 50) ^ (w[3] << 28 | w[3] >> 36) ^
		  (w[4] << 21 | w[4] >> 43);

	t ^= t >> 32;
	/* An element that was never used is zero. */
	return (__u32)t | 1;
}

static __always_inline __u32 *sightings(__u32 tag)
{
	__u32 number = tag * 0x9e3779b1U >> (32 - SIGHTING_BITS);

	return bpf_map_lookup_elem(&flow_sightings, &number);
}

/* This flow's packets come often enough to pay for an entry; what ends soon would have it for nothing. */
static __always_inline bool is_frequent(const struct packet *p)
{
	__u32 tag = flow_tag(p), count, *seen = sightings(tag);

	if (!seen)
		return true;
	count = *seen & SIGHTING_COUNT;
	if ((*seen ^ tag) & ~SIGHTING_COUNT)
		count = 0;
	if (count >= settings.learn_after)
		return true;
	*seen = (tag & ~SIGHTING_COUNT) | (count + 1);
	return false;
}

/* A flow that the cache knows has the Service's address on the one side or the endpoint's on the other. */
static __always_inline bool may_be_known(const struct packet *p)
{
	return is_hinted(&p->destination, p->destination_port, p->ipv6) ||
	       is_hinted(&p->source, p->source_port, p->ipv6);
}

static __always_inline struct fast_path *fast_path_word(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&fast_path, &zero);
}

/* REASON_UNSPECIFIED: somebody watches what the cache cannot see, and nothing there forbids this family. */
static __always_inline enum reason fast_path_closed(const struct fast_path *word, bool ipv6, __u64 now)
{
	if (now >= word->alive_until)
		return STACK_NO_AGENT;
	return ipv6 ? word->closed6 : word->closed4;
}

static __always_inline bool is_due(const struct flow *f, const struct fast_path *word, __u64 now)
{
	return f->generation != *(volatile __u32 *)&word->generation || now >= f->check_at;
}

/* REASON_UNSPECIFIED: this packet of a known flow asks for nothing that the fast path cannot do. */
static __always_inline enum reason why_stack(const struct packet *p, const struct flow *f, __u32 device,
					     __u32 segment)
{
	if (f->passage == TO_STACK)
		return f->why;
	if (f->ended)
		return STACK_ENDING;
	if (f->device_in != device)
		return STACK_OTHER_DEVICE;
	if (p->fragment)
		return STACK_FRAGMENT;
	if (p->options)
		return STACK_OPTIONS;
	if (p->hops <= 1)
		return STACK_HOPS;
	if ((segment ? p->headers + segment : p->length) > f->mtu)
		return STACK_TOO_BIG;
	return REASON_UNSPECIFIED;
}

/* The key of the packets that answer those that `f` sends on. */
static __always_inline void reverse_key(const struct flow *f, const struct packet *p, struct flow_key *key)
{
	__builtin_memcpy(key->source, f->destination, 16);
	__builtin_memcpy(key->destination, f->source, 16);
	key->source_port = f->destination_port;
	key->destination_port = f->source_port;
	key->protocol = p->protocol;
	key->ipv6 = p->ipv6;
}

/* The kernel may give these ports to another connection now: nothing is sent by what was known before it is asked. */
static __always_inline void ask_again(const struct packet *p)
{
	struct flow *f = bpf_map_lookup_elem(&flows, p);
	__u32 tag = flow_tag(p), *seen = sightings(tag);

	/* Asked for another flow's entry it costs time, and nothing else. */
	if (f)
		f->check_at = 0;
	if (seen && !((*seen ^ tag) & ~SIGHTING_COUNT))
		*seen = 0;
}

#endif
