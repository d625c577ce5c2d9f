/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The first check of a packet: can it belong to a service at all? False positives are possible, false negatives not. */
#ifndef PEP_HINTS_H
#define PEP_HINTS_H

#include "packet.h"

/* The bit in address_hints. The control plane computes the same (datapath/maps/hints.py). */
static __always_inline __u32 hint_of(const union address *address, __u16 port, bool ipv6)
{
	__u32 mixed = address->words[0] ^ port;

	if (ipv6)
		mixed ^= address->words[1] * 0x85ebca6bU ^ address->words[2] * 0xc2b2ae35U ^
			 address->words[3] * 0x27d4eb2fU;
	return mixed * 0x9e3779b1U >> (32 - ADDRESS_HINT_BITS);
}

/* The address and port may belong to a frontend or an endpoint, of any protocol. */
static __always_inline bool is_hinted(const union address *address, __u16 port, bool ipv6)
{
	__u32 hint = hint_of(address, port, ipv6), word = hint / 64;
	__u64 *bits = bpf_map_lookup_elem(&address_hints, &word);

	return bits && (*bits >> (hint % 64) & 1);
}

static __always_inline bool has_hinted_source(const struct packet *p)
{
	return is_hinted(&p->source, p->source_port, p->ipv6);
}

static __always_inline bool has_hinted_destination(const struct packet *p)
{
	return is_hinted(&p->destination, p->destination_port, p->ipv6);
}

static __always_inline void set_hint(const union address *address, __u16 port, bool ipv6)
{
	__u32 hint = hint_of(address, port, ipv6), word = hint / 64;
	__u64 *bits = bpf_map_lookup_elem(&address_hints, &word);
	__u64 bit = 1ULL << (hint % 64);

	/* Every packet reads the word, so it is written only if needed. */
	if (bits && !(*bits & bit))
		__sync_fetch_and_or(bits, bit);
}

static __always_inline bool may_be_node_port(__u16 port)
{
	__u32 word = port / 64;
	__u64 *hints = bpf_map_lookup_elem(&node_port_hints, &word);

	return hints && (*hints >> (port % 64) & 1);
}

#endif
