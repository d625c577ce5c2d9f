/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Parses a packet into its descriptor. Later code does not read the bytes. */
#ifndef PEP_PARSE_H
#define PEP_PARSE_H

#include "ctx.h"
#include "packet.h"

#define SCTP_INIT 1
#define IPV6_EXTENSIONS_MAX 6

/* The part of a transport header that is read: ports, TCP's numbers and flags, or SCTP's first chunk type. */
struct transport {
	__be16 source_port;
	__be16 destination_port;
	__be32 sequence;
	__be32 acknowledged;
	__u8 sctp_chunk;	/* TCP: the header's length in 32-bit words, in the upper half */
	__u8 tcp_flags;
};

static __always_inline bool parse_transport(struct context *ctx, __u32 offset, struct packet *p)
{
	struct transport *t;
	__be16 *ports;

	p->transport = offset;
	if (p->protocol == UDP) {
		ports = bytes_at(ctx, offset, 8);
		if (unlikely(!ports))
			return false;
		p->source_port = bpf_ntohs(ports[0]);
		p->destination_port = bpf_ntohs(ports[1]);
		p->starts_flow = true;
		p->headers += 8;
		return true;
	}
	t = bytes_at(ctx, offset, sizeof(*t));
	if (unlikely(!t))
		return false;
	p->source_port = bpf_ntohs(t->source_port);
	p->destination_port = bpf_ntohs(t->destination_port);
	if (p->protocol == TCP) {
		p->starts_flow = (t->tcp_flags & (TCP_SYN | TCP_ACK | TCP_RST | TCP_FIN)) == TCP_SYN;
		p->tcp_flags = t->tcp_flags;
		p->sequence = bpf_ntohl(t->sequence);
		p->acknowledged = t->tcp_flags & TCP_ACK ? bpf_ntohl(t->acknowledged) : 0;
		p->headers += t->sctp_chunk >> 4 << 2;
	} else {
		p->starts_flow = t->sctp_chunk == SCTP_INIT;
	}
	return true;
}

/*
 * The length of a packet whose IP header has none, because it has more than 64 KiB and will be segmented (BIG TCP).  It
 * is the lower half, which is all that sequence numbers are compared by.  0: the header is wrong.
 */
static __always_inline __u16 long_length(struct context *ctx, __u32 offset)
{
	return segment_size(ctx) ? whole_length(ctx) - offset : 0;
}

static __always_inline bool is_transport(__u8 protocol)
{
	return protocol == TCP || protocol == UDP || protocol == SCTP;
}

static __always_inline bool parse_ipv4(struct context *ctx, __u32 offset, struct packet *p)
{
	struct iphdr *ip = bytes_at(ctx, offset, sizeof(*ip));
	__u32 header;

	if (unlikely(!ip || ip->version != 4 || ip->ihl < 5))
		return false;
	/* For every protocol: goes_to_loopback() checks for 127.0.0.0/8. */
	p->source.v4 = ip->saddr;
	p->destination.v4 = ip->daddr;
	/* Only the first fragment has ports. The kernel reassembles before it looks up the flow. */
	if (unlikely(!is_transport(ip->protocol) || (ip->frag_off & bpf_htons(0x1fff))))
		return false;
	header = ip->ihl * 4;
	p->protocol = ip->protocol;
	p->fragment = ip->frag_off & bpf_htons(0x2000);
	p->options = ip->ihl > 5;
	p->hops = ip->ttl;
	p->headers = sizeof(*ip);
	p->length = likely(ip->tot_len) ? bpf_ntohs(ip->tot_len) : long_length(ctx, offset);
	p->header_check = ip->check;
	return parse_transport(ctx, offset + header, p);
}

/* Skips extension headers. They are rare, so a helper reads them. False: the packet has no transport header. */
static __noinline int skip_extensions(struct context *ctx, __u32 *offset, __u8 *next)
{
	__u8 header[8];
	int i;

	if (!offset || !next)
		return 0;
	for (i = 0; i < IPV6_EXTENSIONS_MAX; i++) {
		if (is_transport(*next))
			return 1;
		if (load_bytes(ctx, *offset, header, sizeof(header)))
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

static __always_inline bool parse_ipv6(struct context *ctx, __u32 offset, struct packet *p)
{
	struct ipv6hdr *ip = bytes_at(ctx, offset, sizeof(*ip));
	__u8 next;

	if (unlikely(!ip || ip->version != 6))
		return false;
	__builtin_memcpy(&p->source, &ip->saddr, 16);
	__builtin_memcpy(&p->destination, &ip->daddr, 16);
	p->ipv6 = true;
	p->hops = ip->hop_limit;
	p->headers = sizeof(*ip);
	p->length = likely(ip->payload_len) ? sizeof(*ip) + bpf_ntohs(ip->payload_len) : long_length(ctx, offset);
	next = ip->nexthdr;
	offset += sizeof(*ip);
	if (unlikely(!is_transport(next))) {
		__u32 at = offset;

		/* Senders put the fragment header before all other extension headers. */
		p->fragment = next == 44;
		/* ICMPv6 is common and needs no handling. */
		if (next == 58 || !skip_extensions(ctx, &at, &next))
			return false;
		if (at > 4096)
			return false;
		offset = at;
		p->options = true;
	}
	p->protocol = next;
	return parse_transport(ctx, offset, p);
}

/* False: the packet cannot be for a service. `link` is the length of the link header. */
static __always_inline bool parse_packet(struct context *ctx, __u32 link, struct packet *p)
{
	__be16 protocol = network_protocol(ctx);

	if (protocol == bpf_htons(ETH_P_IP))
		return parse_ipv4(ctx, link, p);
	if (protocol == bpf_htons(ETH_P_IPV6))
		return parse_ipv6(ctx, link, p);
	return false;
}

#endif
