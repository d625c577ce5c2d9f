/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The fast path for a flow that the cache knows: rewrites the packet as its entry says, and sends it on.
 * After skb.h or xdp.h.
 */
#ifndef PEP_FLOW_SEND_H
#define PEP_FLOW_SEND_H

#include "checksum.h"
#include "flow_cache.h"

/* No verdict: the packet goes the way it would go without the cache. */
#define NOT_SENT (-2)
#define NOT_KNOWN (-3)		/* the same, and the cache knows nothing of its flow */
#define NOT_SURE (-4)		/* the same, and what the cache knows must be asked again */

/* What changes in IPv4, in one piece: from the TTL to the ports. */
struct changed4 {
	__u8 ttl;
	__u8 protocol;
	__u16 check;
	__u8 source[4];
	__u8 destination[4];
	__be16 source_port;
	__be16 destination_port;
};

/* The same in IPv6, with the byte before the hop limit. */
struct changed6 {
	__u8 next;
	__u8 hop_limit;
	__u8 source[16];
	__u8 destination[16];
	__be16 source_port;
	__be16 destination_port;
} __attribute__((packed));

/* What one hop less changes a checksum by: TTL before protocol (IPv4), hop limit behind next header (IPv6). */
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

static __always_inline long rewrite4(struct context *ctx, const struct packet *p, const struct flow *f, __u32 link)
{
	struct changed4 c = { .ttl = p->hops - 1, .protocol = p->protocol };

	c.check = ~fold(add(add((__u16)~p->header_check, f->address_sum), hop_sum(p)));
	__builtin_memcpy(c.source, f->source, 4);
	__builtin_memcpy(c.destination, f->destination, 4);
	c.source_port = bpf_htons(f->source_port);
	c.destination_port = bpf_htons(f->destination_port);
	return store_bytes(ctx, link + offsetof(struct iphdr, ttl), &c, sizeof(c));
}

static __always_inline long rewrite6(struct context *ctx, const struct packet *p, const struct flow *f, __u32 link)
{
	struct changed6 c = { .next = p->protocol, .hop_limit = p->hops - 1 };

	__builtin_memcpy(c.source, f->source, 16);
	__builtin_memcpy(c.destination, f->destination, 16);
	c.source_port = bpf_htons(f->source_port);
	c.destination_port = bpf_htons(f->destination_port);
	/* This header has no checksum of its own: a sum of the whole packet moves with what changes in it. */
	update_whole_sum(ctx, add(f->address_sum, hop_sum(p)));
	return store_bytes(ctx, link + offsetof(struct ipv6hdr, nexthdr), &c, sizeof(c));
}

static __noinline int rewrite(struct context *ctx, const struct packet *p, const struct flow *f, __u32 link)
{
	__u32 check;
	long failed;

	if (!p || !f)
		return -1;
	check = link + (p->ipv6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr));
	check += p->protocol == TCP ? TCP_CHECK : UDP_CHECK;
	failed = update_transport_check(ctx, p, f, check);
	failed |= p->ipv6 ? rewrite6(ctx, p, f, link) : rewrite4(ctx, p, f, link);
	return failed;
}

/* Another flow's entry by now, or half of it. */
static __always_inline bool is_another_flows(const struct flow *f, const struct packet *p)
{
	__u32 tag = flow_tag(p);

	return *(volatile __u32 *)&f->tag_again != tag || *(volatile __u32 *)&f->tag != tag;
}

/*
 * A copy that is whole.  The element may be given to another flow at any time; who
 * does that writes `tag` first and `tag_again` last.
 */
static __always_inline bool copy_entry(const struct flow *from, const struct packet *p, struct flow *to)
{
	if (is_another_flows(from, p))
		return false;
	*to = *from;
	barrier();
	return !is_another_flows(from, p);
}

/* The flow ends with this packet, or begins anew. */
static __always_inline bool is_turning_point(const struct packet *p)
{
	return p->protocol == TCP && p->tcp_flags & (TCP_SYN | TCP_FIN | TCP_RST);
}

/* By the cache, if it knows the flow. `device` is the one that the IP layer sees; the packet has an Ethernet header. */
static __noinline int send_by_cache(struct context *ctx, const struct packet *p, __u32 device)
{
	struct fast_path *word = fast_path_word();
	struct flow *known, f;
	enum reason reason;
	__u64 now;

	if (!p || !word)
		return NOT_SENT;
	known = bpf_map_lookup_elem(&flows, p);
	now = bpf_ktime_get_coarse_ns();
	reason = fast_path_closed(word, p->ipv6, now);
	if (!known)
		return reason ? NOT_SENT : NOT_KNOWN;
	if (!reason && is_due(known, word, now))
		return NOT_SURE;
	if (!reason && !copy_entry(known, p, &f))
		return NOT_SURE;
	if (!reason)
		reason = why_stack(p, &f, device, segment_size(ctx));
	if (!reason && !is_plain(ctx))
		reason = STACK_NOT_PLAIN;
	if (!reason)
		reason = why_not_here(ctx, p, &f);
	if (reason) {
		count_left(reason);
		return NOT_SENT;
	}
	/* Half rewritten it must not go on. */
	if (rewrite(ctx, p, &f, ETH_HLEN)) {
		count(DROP_REWRITE_FAILED);
		return DROPPED;
	}
	count_sent();
	return send(ctx, &f);
}

#endif
