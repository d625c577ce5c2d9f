/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* A packet is parsed once, into one descriptor; nothing after this looks at its bytes. */
#ifndef PEP_PACKET_H
#define PEP_PACKET_H

#include "common.h"

/*
 * IPv4 uses v4 alone; the other words are then zero.  The words are first: an empty
 * initializer is for the first member, and what is beyond it would be undefined.
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
	bool opens;		/* may be the first packet of a flow: TCP SYN, SCTP INIT, any UDP */
	bool fragment;		/* the first one; others have no ports */
	bool options;		/* IPv4 options, IPv6 extension headers */
	__u8 hops;		/* TTL, hop limit */
	__u8 tcp_flags;
	__u8 headers;		/* bytes of IP and transport header, if there are no options */
	__u16 length;		/* bytes of the IP packet, as its header says */
	__u16 header_check;	/* IPv4: checksum of the header, as it is in it */
} __attribute__((aligned(8)));

_Static_assert(offsetof(struct packet, opens) == sizeof(struct flow_key), "the key of a flow begins the packet");
_Static_assert(offsetof(struct packet, source_port) == offsetof(struct flow_key, source_port), "its ports");
_Static_assert(offsetof(struct packet, ipv6) == offsetof(struct flow_key, ipv6), "its family");

#define TCP_FIN 0x01
#define TCP_SYN 0x02
#define TCP_RST 0x04
#define TCP_ACK 0x10
#define VLAN_ID_MASK 0x0fff
#define SCTP_INIT 1
#define IPV6_EXTENSIONS_MAX 6

/* Enough of any transport header: ports, and TCP's flags or SCTP's first chunk type. */
struct transport {
	__be16 source_port;
	__be16 destination_port;
	__u8 rest[8];
	__u8 sctp_chunk;	/* TCP: the header's length in 32-bit words, in the upper half */
	__u8 tcp_flags;
};

static __always_inline bool same_address(const union address *a, const union address *b, bool ipv6)
{
	if (!ipv6)
		return a->v4 == b->v4;
	return a->words[0] == b->words[0] && a->words[1] == b->words[1] &&
	       a->words[2] == b->words[2] && a->words[3] == b->words[3];
}

/*
 * The context must be read at a constant offset; left to itself the compiler
 * merges such reads into one at a computed offset, which the verifier refuses.
 */
#define CONTEXT_POINTER(skb, field)                                                   \
	({                                                                            \
		void *pointer;                                                        \
		asm volatile("%0 = *(u32 *)(%1 + %2)"                                 \
			     : "=r"(pointer)                                          \
			     : "r"(skb), "i"(offsetof(struct __sk_buff, field)));     \
		pointer;                                                              \
	})

/* A view of `length` bytes at `offset`, pulled into the linear part if need be; NULL if the packet is shorter. */
static __always_inline void *bytes_at(struct __sk_buff *skb, __u32 offset, __u32 length)
{
	void *data = CONTEXT_POINTER(skb, data);
	void *end = CONTEXT_POINTER(skb, data_end);

	if (data + offset + length <= end)
		return data + offset;
	if (offset + length > skb->len || bpf_skb_pull_data(skb, offset + length))
		return NULL;
	data = CONTEXT_POINTER(skb, data);
	end = CONTEXT_POINTER(skb, data_end);
	if (data + offset + length > end)
		return NULL;
	return data + offset;
}

static __always_inline bool parse_transport(struct __sk_buff *skb, __u32 offset, struct packet *p)
{
	struct transport *t;
	__be16 *ports;

	if (p->protocol == UDP) {
		ports = bytes_at(skb, offset, 8);
		if (!ports)
			return false;
		p->source_port = bpf_ntohs(ports[0]);
		p->destination_port = bpf_ntohs(ports[1]);
		p->opens = true;
		p->headers += 8;
		return true;
	}
	t = bytes_at(skb, offset, sizeof(*t));
	if (!t)
		return false;
	p->source_port = bpf_ntohs(t->source_port);
	p->destination_port = bpf_ntohs(t->destination_port);
	if (p->protocol == TCP) {
		p->opens = (t->tcp_flags & (TCP_SYN | TCP_ACK | TCP_RST | TCP_FIN)) == TCP_SYN;
		p->tcp_flags = t->tcp_flags;
		p->headers += t->sctp_chunk >> 4 << 2;
	} else {
		p->opens = t->sctp_chunk == SCTP_INIT;
	}
	return true;
}

static __always_inline bool is_transport(__u8 protocol)
{
	return protocol == TCP || protocol == UDP || protocol == SCTP;
}

static __always_inline bool parse_ipv4(struct __sk_buff *skb, __u32 offset, struct packet *p)
{
	struct iphdr *ip = bytes_at(skb, offset, sizeof(*ip));
	__u32 header;

	if (!ip || ip->version != 4 || ip->ihl < 5)
		return false;
	/* Whatever it carries: 127.0.0.0/8 is asked for. */
	p->source.v4 = ip->saddr;
	p->destination.v4 = ip->daddr;
	/* Only the first fragment has ports. The kernel reassembles before it looks for the flow. */
	if (!is_transport(ip->protocol) || (ip->frag_off & bpf_htons(0x1fff)))
		return false;
	header = ip->ihl * 4;
	p->protocol = ip->protocol;
	p->fragment = ip->frag_off & bpf_htons(0x2000);
	p->options = ip->ihl > 5;
	p->hops = ip->ttl;
	p->headers = sizeof(*ip);
	p->length = bpf_ntohs(ip->tot_len);
	p->header_check = ip->check;
	return parse_transport(skb, offset + header, p);
}

/* Walks extension headers; rare, so by helper. False: no transport header in this packet. */
static __noinline int skip_extensions(struct __sk_buff *skb, __u32 *offset, __u8 *next)
{
	__u8 header[8];
	int i;

	if (!offset || !next)
		return 0;
	for (i = 0; i < IPV6_EXTENSIONS_MAX; i++) {
		if (is_transport(*next))
			return 1;
		if (bpf_skb_load_bytes(skb, *offset, header, sizeof(header)))
			return 0;
		switch (*next) {
		case 0:		/* hop by hop */
		case 43:	/* routing */
		case 60:	/* destination options */
			*offset += (header[1] + 1) * 8;
			break;
		case 51:	/* authentication */
			*offset += (header[1] + 2) * 4;
			break;
		case 44:	/* fragment */
			if (header[2] || (header[3] & 0xf8))
				return 0;
			*offset += 8;
			break;
		default:
			return 0;
		}
		*next = header[0];
	}
	return is_transport(*next);
}

static __always_inline bool parse_ipv6(struct __sk_buff *skb, __u32 offset, struct packet *p)
{
	struct ipv6hdr *ip = bytes_at(skb, offset, sizeof(*ip));
	__u8 next;

	if (!ip || ip->version != 6)
		return false;
	__builtin_memcpy(&p->source, &ip->saddr, 16);
	__builtin_memcpy(&p->destination, &ip->daddr, 16);
	p->ipv6 = true;
	p->hops = ip->hop_limit;
	p->headers = sizeof(*ip);
	p->length = sizeof(*ip) + bpf_ntohs(ip->payload_len);
	next = ip->nexthdr;
	offset += sizeof(*ip);
	if (!is_transport(next)) {
		__u32 at = offset;

		/* ICMPv6 is common and needs nothing. */
		if (next == 58 || !skip_extensions(skb, &at, &next))
			return false;
		if (at > 4096)
			return false;
		offset = at;
		p->options = true;
	}
	p->protocol = next;
	return parse_transport(skb, offset, p);
}

/* VLAN 0 is a priority alone; any other tag makes the frame that of the VLAN device above this one. */
static __always_inline bool belongs_to_vlan(struct __sk_buff *skb)
{
	return skb->vlan_present && (skb->vlan_tci & VLAN_ID_MASK);
}

static __always_inline bool is_loopback4(__be32 address)
{
	return (address & bpf_htonl(0xff000000)) == bpf_htonl(0x7f000000);
}

/* False: not a packet that any service could be meant by. `link` is the length of the link header. */
static __always_inline bool parse_packet(struct __sk_buff *skb, __u32 link, struct packet *p)
{
	/* The VLAN device has a program of its own. */
	if (belongs_to_vlan(skb))
		return false;
	if (skb->protocol == bpf_htons(ETH_P_IP))
		return parse_ipv4(skb, link, p);
	if (skb->protocol == bpf_htons(ETH_P_IPV6))
		return parse_ipv6(skb, link, p);
	return false;
}

#endif
