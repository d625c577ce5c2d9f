/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * ICMP errors about young flows.  Only conntrack can translate them for the sender.  The first error has the flow
 * promoted at once, so that the next one finds its conntrack entry.
 */
#ifndef PEP_ICMP_H
#define PEP_ICMP_H

#include "ctx_skb.h"
#include "flow_send.h"
#include "parse.h"

#define ICMP_PROTOCOL 1
#define ICMP_UNREACHABLE 3
#define ICMP_TIME_EXCEEDED 11
#define ICMP_PARAMETER_PROBLEM 12
#define ICMPV6_PROTOCOL 58
#define ICMPV6_ERRORS_END 5	/* 1: unreachable; 2: too big; 3: time exceeded; 4: parameter problem */
#define ICMP_HEADER 8

/* Reads the ports of the packet that the error is about; they follow its header. */
static __always_inline bool read_ports(struct __sk_buff *skb, __u32 offset, struct flow_key *key)
{
	__be16 ports[2];

	if (key->protocol != TCP && key->protocol != UDP)
		return false;
	if (bpf_skb_load_bytes(skb, offset, ports, sizeof(ports)))
		return false;
	/* Reversed: the key of the replies to that packet. */
	key->source_port = bpf_ntohs(ports[1]);
	key->destination_port = bpf_ntohs(ports[0]);
	return true;
}

static __always_inline bool reply_key_of_error4(struct __sk_buff *skb, struct flow_key *key)
{
	__u32 offset = ETH_HLEN + sizeof(struct iphdr);
	struct iphdr outer, inner;
	__u8 type;

	if (bpf_skb_load_bytes(skb, ETH_HLEN, &outer, sizeof(outer)) || outer.protocol != ICMP_PROTOCOL || outer.ihl != 5)
		return false;
	if (bpf_skb_load_bytes(skb, offset, &type, 1) ||
	    (type != ICMP_UNREACHABLE && type != ICMP_TIME_EXCEEDED && type != ICMP_PARAMETER_PROBLEM))
		return false;
	if (bpf_skb_load_bytes(skb, offset + ICMP_HEADER, &inner, sizeof(inner)) || inner.ihl != 5)
		return false;
	__builtin_memcpy(key->source, &inner.daddr, 4);
	__builtin_memcpy(key->destination, &inner.saddr, 4);
	key->protocol = inner.protocol;
	return read_ports(skb, offset + ICMP_HEADER + sizeof(inner), key);
}

static __always_inline bool reply_key_of_error6(struct __sk_buff *skb, struct flow_key *key)
{
	__u32 offset = ETH_HLEN + sizeof(struct ipv6hdr);
	struct ipv6hdr header;
	__u8 type, next;

	if (bpf_skb_load_bytes(skb, ETH_HLEN, &header, sizeof(header)) || header.nexthdr != ICMPV6_PROTOCOL)
		return false;
	if (bpf_skb_load_bytes(skb, offset, &type, 1) || !type || type >= ICMPV6_ERRORS_END)
		return false;
	if (bpf_skb_load_bytes(skb, offset + ICMP_HEADER, &header, sizeof(header)))
		return false;
	__builtin_memcpy(key->source, &header.daddr, 16);
	__builtin_memcpy(key->destination, &header.saddr, 16);
	key->ipv6 = 1;
	next = header.nexthdr;
	offset += ICMP_HEADER + sizeof(header);
	/* The fast path also sends fragments, so a router may quote one. */
	if (!skip_extensions(skb, &offset, &next))
		return false;
	key->protocol = next;
	return read_ports(skb, offset, key);
}

/* Called for packets other than TCP, UDP and SCTP, and for later fragments. */
static __noinline int promote_by_error(struct __sk_buff *skb)
{
	struct flow_key key = {};
	struct flow *f;
	bool found;

	if (skb->protocol == bpf_htons(ETH_P_IP))
		found = reply_key_of_error4(skb, &key);
	else
		found = skb->protocol == bpf_htons(ETH_P_IPV6) && reply_key_of_error6(skb, &key);
	if (!found)
		return 0;
	f = bpf_map_lookup_elem(&flows, &key);
	if (!f && key.protocol == UDP && unfold_found(find_exchange(&key), 0))
		f = bpf_map_lookup_elem(&flows, &key);
	return f && f->young && request_promotion(&key, &f->rewrite, f);
}

#endif
