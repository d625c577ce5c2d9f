/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The kernel's connection tracking: look a flow up, create it with its NAT
 * written in, expire it.  The kernel does the translating.  After skb.h or xdp.h.
 */
#ifndef PEP_CONNTRACK_H
#define PEP_CONNTRACK_H

#include "backend.h"

/* nf_conntrack may be a module, whose types are not in vmlinux.h: the few that are needed, found by CO-RE. */
union nf_inet_addr___pep {
	__u32 all[4];
	__be32 ip;
	__be32 ip6[4];
};

struct nf_conntrack_man___pep {
	union nf_inet_addr___pep u3;
	union {
		__be16 all;
	} u;
} __attribute__((preserve_access_index));

struct nf_conntrack_tuple___pep {
	struct nf_conntrack_man___pep src;
	struct {
		union nf_inet_addr___pep u3;
		union {
			__be16 all;
		} u;
	} dst;
} __attribute__((preserve_access_index));

struct nf_conntrack_tuple_hash___pep {
	struct nf_conntrack_tuple___pep tuple;
} __attribute__((preserve_access_index));

struct ip_ct_tcp___pep {
	__u8 state;
	__u8 last_index;
} __attribute__((preserve_access_index));

union nf_conntrack_proto___pep {
	struct ip_ct_tcp___pep tcp;
} __attribute__((preserve_access_index));

struct nf_conn___pep {
	struct nf_conntrack_tuple_hash___pep tuplehash[2];
	unsigned long status;
	union nf_conntrack_proto___pep proto;
} __attribute__((preserve_access_index));

struct bpf_ct_opts___pep {
	__s32 netns_id;
	__s32 error;
	__u8 l4proto;
	__u8 dir;
	__u8 reserved[2];
};

enum nf_nat_manip_type___pep {
	MANIP_SRC,
	MANIP_DST,
};

#define CT_OPTS_SIZE 12		/* accepted everywhere; 16 (zone) only since 6.11 */
#define CURRENT_NETNS (-1)
#define IPS_SEEN_REPLY_ (1UL << 1)
#define IPS_ASSURED_ (1UL << 2)
#define IPS_SRC_NAT_ (1UL << 4)
#define IPS_DST_NAT_ (1UL << 5)
#define TCP_STATE_SYN_SENT 1
#define TCP_STATE_ESTABLISHED 3
#define TCP_STATE_TIME_WAIT 7
#define TCP_INDEX_RST 4		/* enum tcp_bit_set */
#define DIRECTION_ORIGINAL 0
#define DIRECTION_REPLY 1
#define INSERT_TRIES 4

extern struct nf_conn___pep *CONNTRACK_LOOKUP(struct context *, struct bpf_sock_tuple *, __u32,
					       struct bpf_ct_opts___pep *, __u32) __ksym __weak;
extern struct nf_conn___pep *CONNTRACK_ALLOC(struct context *, struct bpf_sock_tuple *, __u32,
					      struct bpf_ct_opts___pep *, __u32) __ksym __weak;
extern int bpf_ct_set_nat_info(struct nf_conn___pep *, union nf_inet_addr___pep *, int port,
			       enum nf_nat_manip_type___pep) __ksym __weak;
extern void bpf_ct_set_timeout(struct nf_conn___pep *, __u32) __ksym __weak;
extern struct nf_conn___pep *bpf_ct_insert_entry(struct nf_conn___pep *) __ksym __weak;
extern int bpf_ct_change_timeout(struct nf_conn___pep *, __u32) __ksym __weak;
extern void bpf_ct_release(struct nf_conn___pep *) __ksym __weak;

static __always_inline __u32 tuple_of(const struct packet *p, struct bpf_sock_tuple *t)
{
	if (p->ipv6) {
		__builtin_memcpy(t->ipv6.saddr, &p->source, 16);
		__builtin_memcpy(t->ipv6.daddr, &p->destination, 16);
		t->ipv6.sport = bpf_htons(p->source_port);
		t->ipv6.dport = bpf_htons(p->destination_port);
		return sizeof(t->ipv6);
	}
	t->ipv4.saddr = p->source.v4;
	t->ipv4.daddr = p->destination.v4;
	t->ipv4.sport = bpf_htons(p->source_port);
	t->ipv4.dport = bpf_htons(p->destination_port);
	return sizeof(t->ipv4);
}

/* The packet's flow, and which of its directions the packet has. A reference: release it. */
static __always_inline struct nf_conn___pep *find_flow(struct context *ctx, const struct packet *p, __u8 *direction)
{
	struct bpf_ct_opts___pep opts = { .netns_id = CURRENT_NETNS, .l4proto = p->protocol };
	struct bpf_sock_tuple tuple = {};
	struct nf_conn___pep *ct;
	__u32 size;

	size = tuple_of(p, &tuple);
	ct = CONNTRACK_LOOKUP(ctx, &tuple, size, &opts, CT_OPTS_SIZE);
	*direction = opts.dir;
	return ct;
}

static __always_inline bool comes_from_endpoint(const struct packet *p)
{
	if (!is_hinted(&p->source, p->source_port, p->ipv6))
		return false;
	if (p->ipv6) {
		struct endpoint6_key key = { .port = p->source_port, .protocol = p->protocol };

		__builtin_memcpy(key.address, &p->source, 16);
		return bpf_map_lookup_elem(&endpoints6, &key);
	} else {
		struct endpoint4_key key = { .port = p->source_port, .protocol = p->protocol };

		__builtin_memcpy(key.address, &p->source, 4);
		return bpf_map_lookup_elem(&endpoints4, &key);
	}
}

/* The UDP flow's endpoint still serves this service (or serves nothing that we know of: then leave it alone). */
static __always_inline bool endpoint_serves(const struct nf_conn___pep *ct, __u32 service, bool ipv6)
{
	__be16 port = ct->tuplehash[DIRECTION_REPLY].tuple.src.u.all;

	if (ipv6) {
		struct endpoint6_key key = { .service = service, .port = bpf_ntohs(port), .protocol = UDP };

		BPF_CORE_READ_INTO(&key.address, ct, tuplehash[DIRECTION_REPLY].tuple.src.u3);
		return bpf_map_lookup_elem(&endpoints6, &key);
	} else {
		struct endpoint4_key key = { .service = service, .port = bpf_ntohs(port), .protocol = UDP };
		__be32 address = ct->tuplehash[DIRECTION_REPLY].tuple.src.u3.ip;

		__builtin_memcpy(key.address, &address, 4);
		return bpf_map_lookup_elem(&endpoints4, &key);
	}
}

/*
 * The last packet that the kernel saw of this connection is a reset.  It may call it established all the same: what
 * took the fast path it has not seen, and a sequence number that it does not expect is none that it believes.
 */
static __always_inline bool was_reset(const struct nf_conn___pep *ct)
{
	return ct->proto.tcp.last_index == TCP_INDEX_RST;
}

/*
 * Must this entry make room for a new one?  REASON_UNSPECIFIED: no, the flow lives.
 *  - TCP that has ended: the kernel would drop the entry on this SYN and track
 *    the packet without NAT;
 *  - UDP whose endpoint is gone heals with this packet;
 *  - a flow from before the service had endpoints was never translated.
 */
static __always_inline enum reason must_go(const struct nf_conn___pep *ct, const struct packet *p,
					   __u32 service, bool any_endpoints)
{
	if (p->protocol == TCP) {
		__u8 state = ct->proto.tcp.state;

		if (state >= TCP_STATE_TIME_WAIT || (state == TCP_STATE_ESTABLISHED && settings.fast_path && was_reset(ct)))
			return CLOSING_FLOW_REPLACED;
		if (any_endpoints && state == TCP_STATE_SYN_SENT && !(ct->status & IPS_DST_NAT_))
			return UNTRANSLATED_FLOW_REPLACED;
		return REASON_UNSPECIFIED;
	}
	if (!any_endpoints)
		return REASON_UNSPECIFIED;
	if (!(ct->status & IPS_DST_NAT_))
		return UNTRANSLATED_FLOW_REPLACED;
	return endpoint_serves(ct, service, p->ipv6) ? REASON_UNSPECIFIED : STALE_UDP_REPLACED;
}

static __noinline int exists(struct context *ctx, const struct packet *p)
{
	struct nf_conn___pep *ct;
	__u8 direction;

	if (!p)
		return 0;
	ct = find_flow(ctx, p, &direction);
	if (!ct)
		return 0;
	bpf_ct_release(ct);
	return 1;
}

enum existence {
	NO_FLOW,	/* or none any more */
	FLOW_EXISTS,	/* and goes on as it is */
	FLOW_ASSURED,	/* the same, and there was traffic both ways */
	FLOW_MASQUERADED,	/* the same, there was no answer yet, and the endpoint sees an address of ours */
};

/* An entry made by XDP, where there is no mark to set. */
static __always_inline bool is_masqueraded(const struct nf_conn___pep *ct, const struct packet *p)
{
	union address to = {};

	if ((ct->status & (IPS_SRC_NAT_ | IPS_SEEN_REPLY_)) != IPS_SRC_NAT_)
		return false;
	BPF_CORE_READ_INTO(&to, ct, tuplehash[DIRECTION_REPLY].tuple.dst.u3);
	return !same_address(&to, &p->source, p->ipv6);
}

static __noinline int flow_exists(struct context *ctx, const struct packet *p, __u32 service, bool any_endpoints)
{
	enum existence living;
	struct nf_conn___pep *ct;
	enum reason reason;
	__u8 direction;

	if (!p)
		return NO_FLOW;
	ct = find_flow(ctx, p, &direction);
	if (!ct)
		return NO_FLOW;
	living = ct->status & IPS_ASSURED_ ? FLOW_ASSURED : FLOW_EXISTS;
	reason = direction == DIRECTION_ORIGINAL ? must_go(ct, p, service, any_endpoints) : REASON_UNSPECIFIED;
	if (reason == REASON_UNSPECIFIED) {
		if (settings.xdp && direction == DIRECTION_ORIGINAL && is_masqueraded(ct, p))
			living = FLOW_MASQUERADED;
		bpf_ct_release(ct);
		return living;
	}
	if (!settings.dry_run)
		bpf_ct_change_timeout(ct, 0);
	bpf_ct_release(ct);
	decided(ctx, p, NULL, NULL, reason);
	if (settings.dry_run)
		return NO_FLOW;
	/* An expired entry is taken out of the table by the next lookup that meets it. */
	return exists(ctx, p) ? FLOW_EXISTS : NO_FLOW;
}

enum created {
	CREATED,
	EXISTS_ALREADY,
	CONNTRACK_FULL,
	INSERT_FAILED,
	NAT_FAILED,
};

struct creation {
	union address masquerade;	/* used if masquerade_wanted */
	bool masquerade_wanted;
};

static __always_inline void nat_address(const union address *from, bool ipv6, union nf_inet_addr___pep *to)
{
	__builtin_memset(to, 0, sizeof(*to));
	if (ipv6)
		__builtin_memcpy(to, from, 16);
	else
		to->ip = from->v4;
}

/*
 * One attempt.  `port` is the source port to masquerade with; 0 lets the kernel
 * keep the client's if it is free.  The source is always set, even to itself:
 * without it the reply tuple may clash with a flow that the client has with the
 * endpoint directly.
 */
static __noinline int create_entry(struct context *ctx, const struct packet *p, const struct backend *b,
				   const struct creation *c, __u16 port)
{
	struct bpf_ct_opts___pep opts = { .netns_id = CURRENT_NETNS };
	struct bpf_sock_tuple tuple = {};
	union nf_inet_addr___pep to;
	struct nf_conn___pep *ct;
	int failed;
	__u32 size;

	if (!p || !b || !c)
		return NAT_FAILED;
	opts.l4proto = p->protocol;
	size = tuple_of(p, &tuple);
	ct = CONNTRACK_ALLOC(ctx, &tuple, size, &opts, CT_OPTS_SIZE);
	if (!ct)
		return CONNTRACK_FULL;
	nat_address(&b->address, p->ipv6, &to);
	failed = bpf_ct_set_nat_info(ct, &to, b->port, MANIP_DST);
	nat_address(c->masquerade_wanted ? &c->masquerade : &p->source, p->ipv6, &to);
	failed |= bpf_ct_set_nat_info(ct, &to, port, MANIP_SRC);
	bpf_ct_set_timeout(ct, p->protocol == TCP ? settings.tcp_timeout_ms : settings.udp_timeout_ms);
	ct = bpf_ct_insert_entry(ct);
	if (!ct)
		return INSERT_FAILED;
	if (failed)
		bpf_ct_change_timeout(ct, 0);
	bpf_ct_release(ct);
	return failed ? NAT_FAILED : CREATED;
}

/*
 * Masqueraded flows get a random port, as with random-fully, and another one
 * if that is taken; the last attempt leaves the search to the kernel.
 */
static __always_inline enum created create_flow(struct context *ctx, const struct packet *p,
						const struct backend *b, const struct creation *c)
{
	enum created result = INSERT_FAILED;
	int i;

	for (i = 0; i < INSERT_TRIES; i++) {
		__u16 port = 0;

		if (c->masquerade_wanted && i < INSERT_TRIES - 1)
			port = 1024 + bpf_get_prandom_u32() % (65536 - 1024);
		result = create_entry(ctx, p, b, c, port);
		if (result != INSERT_FAILED)
			return result;
		/* No error code says why: another CPU may have been faster with the same packet's twin. */
		if (exists(ctx, p))
			return EXISTS_ALREADY;
	}
	return result;
}

#endif
