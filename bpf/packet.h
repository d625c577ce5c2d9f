/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The packet descriptor: parsed once (parse.h), used by all decisions. */
#ifndef PEP_PACKET_H
#define PEP_PACKET_H

#include "common.h"

/*
 * IPv4 uses only v4; the other words are zero.  The words come first because an empty
 * initializer covers the first member only; what is beyond it would be undefined.
 */
union address {
	__u32 words[4];
	__be32 v4;
	__u8 bytes[16];
};

struct packet {
	/* From here to `same` this is a struct flow_key (flow_maps.h). */
	union address source;
	union address destination;
	__u16 source_port;	/* host order */
	__u16 destination_port;
	enum protocol protocol;
	bool ipv6;
	__u8 same[2];		/* zero */
	bool starts_flow;		/* may be the first packet of a flow: TCP SYN, SCTP INIT, any UDP */
	bool fragment;		/* the first fragment; later ones have no ports */
	bool options;		/* IPv4 options, IPv6 extension headers */
	__u8 hops;		/* TTL, hop limit */
	__u8 tcp_flags;
	__u8 headers;		/* bytes of IP and transport header, without options */
	__u16 transport;	/* offset of the transport header in the packet, link header included */
	__u16 length;		/* bytes of the IP packet, from its header */
	__u16 header_check;	/* IPv4: checksum field of the header */
	__u32 sequence;		/* TCP, host order */
	__u32 acknowledged;	/* TCP: acknowledgment number, host order; 0 without ACK */
	__u32 kept;		/* backend of the client's flow that is over; 0: none */
} __attribute__((aligned(8)));

_Static_assert(offsetof(struct packet, starts_flow) == sizeof(struct flow_key), "the key of a flow begins the packet");
_Static_assert(offsetof(struct packet, source_port) == offsetof(struct flow_key, source_port), "its ports");
_Static_assert(offsetof(struct packet, ipv6) == offsetof(struct flow_key, ipv6), "its family");

#define TCP_FIN 0x01
#define TCP_SYN 0x02
#define TCP_RST 0x04
#define TCP_ACK 0x10

/* TCP: the sequence number after this packet. */
static __always_inline __u32 next_sequence(const struct packet *p)
{
	return p->sequence + (p->length - p->headers) + !!(p->tcp_flags & (TCP_SYN | TCP_FIN));
}

static __always_inline bool same_mac(const __u8 *a, const __u8 *b)
{
	return !((*(__u32 *)a ^ *(__u32 *)b) | (*(__u16 *)(a + 4) ^ *(__u16 *)(b + 4)));
}

static __always_inline bool same_address(const union address *a, const union address *b, bool ipv6)
{
	if (!ipv6)
		return a->v4 == b->v4;
	return a->words[0] == b->words[0] && a->words[1] == b->words[1] &&
	       a->words[2] == b->words[2] && a->words[3] == b->words[3];
}

struct place {
	union address address;
	__u32 port;
};

static __always_inline void swap_destination(struct packet *p, struct place *place)
{
	struct place was = { .address = p->destination, .port = p->destination_port };

	p->destination = place->address;
	p->destination_port = place->port;
	*place = was;
}

static __always_inline bool is_loopback4(__be32 address)
{
	return (address & bpf_htonl(0xff000000)) == bpf_htonl(0x7f000000);
}

#endif
