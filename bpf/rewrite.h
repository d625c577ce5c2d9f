/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What changes in a packet of the fast path: link addresses, hop count, addresses, ports, checksums.  The functions
 * work on headers in the frame (XDP) or on a copy of them (tc).
 */
#ifndef PEP_REWRITE_H
#define PEP_REWRITE_H

#include "checksum.h"
#include "packet.h"

/* The end of the checksum in a transport header, in 32-bit words. */
#define UDP_WORDS 2
#define TCP_WORDS 5

/* How decrementing the hop count changes a checksum: TTL before protocol (IPv4), hop limit after next header (IPv6). */
static __always_inline __u32 hop_sum(const struct packet *p)
{
	__u16 from, to;

	if (p->ipv6) {
		from = bpf_htons((__u16)p->protocol << 8 | p->hops);
		to = bpf_htons((__u16)p->protocol << 8 | (p->hops - 1));
	} else {
		from = bpf_htons((__u16)p->hops << 8 | p->protocol);
		to = bpf_htons((__u16)(p->hops - 1) << 8 | p->protocol);
	}
	return add((__u16)~from, to);
}

static __always_inline void rewrite_ip4(struct iphdr *ip, const struct packet *p, const struct flow_rewrite *a)
{
	ip->ttl = p->hops - 1;
	ip->protocol = p->protocol;
	ip->check = ~fold(add(add((__u16)~p->header_check, a->address_sum), hop_sum(p)));
	ip->saddr = *(const __be32 *)a->source;
	ip->daddr = *(const __be32 *)a->destination;
}

static __always_inline void rewrite_ip6(struct ipv6hdr *ip, const struct packet *p, const struct flow_rewrite *a)
{
	ip->hop_limit = p->hops - 1;
	__builtin_memcpy(&ip->saddr, a->source, 16);
	__builtin_memcpy(&ip->daddr, a->destination, 16);
}

static __always_inline void rewrite_ports(__be16 *ports, const struct flow_rewrite *a)
{
	ports[0] = bpf_htons(a->source_port);
	ports[1] = bpf_htons(a->destination_port);
}

static __always_inline void rewrite_link(__u16 *to, const struct link *out)
{
	const __u16 *from = (const void *)out->mac_to;
	int i;

	_Static_assert(offsetof(struct link, mac_from) == offsetof(struct link, mac_to) + 6, "copied together");
	for (i = 0; i < 6; i++)
		to[i] = from[i];
}

/* Where the transport checksum is, from the IP header on. */
static __always_inline __u32 transport_check(const struct packet *p)
{
	__u32 header = p->ipv6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr);

	return header + (p->protocol == TCP ? TCP_CHECK : UDP_CHECK);
}

/* The transport checksum of the changed packet, if the checksum covers the whole segment. */
static __always_inline __u16 changed_check(const struct packet *p, const struct flow_rewrite *a, __u16 check)
{
	__u16 changed;

	/* UDP: 0 means that there is no checksum. */
	if (p->protocol == UDP && !check)
		return 0;
	changed = ~fold(add(add((__u16)~check, a->address_sum), a->port_sum));
	return p->protocol == UDP && !changed ? 0xffff : changed;
}

/*
 * True if the transport checksum covers the pseudo header only: a sender on this machine left the rest to a device.
 * One in 65536 complete checksums looks the same.
 */
static __always_inline bool lacks_checksum(const struct packet *p, __u16 check)
{
	__u16 header = p->ipv6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr);
	__u32 sum = bpf_htons(p->protocol) + (__u32)bpf_htons(p->length - header);
	int i;

	sum = add(sum, add(p->source.words[0], p->destination.words[0]));
	if (p->ipv6)
		for (i = 1; i < 4; i++)
			sum = add(sum, add(p->source.words[i], p->destination.words[i]));
	return check == fold(sum);
}

#endif
