/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Lookups in conntrack, on kernels that have its kfuncs.  With them, an existing flow needs no new decision, and a UDP
 * flow whose endpoint is gone recovers with its next packet.  The data plane also works without them.
 */
#ifndef PEP_CONNTRACK_H
#define PEP_CONNTRACK_H

#include "backend.h"
#include "ctx_skb.h"
#include "client_filters.h"

/* nf_conntrack may be a module, whose types are not among the kernel's own. CO-RE relocates them, too. */
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

#define CT_OPTS_SIZE 12		/* accepted by every kernel; 16 (with zone) since 6.11 */
#define IPS_SEEN_REPLY_ (1UL << 1)
#define IPS_DST_NAT_ (1UL << 5)
#define TCP_STATE_SYN_SENT 1
#define TCP_STATE_ESTABLISHED 3
#define TCP_STATE_TIME_WAIT 7
#define TCP_INDEX_RST 4		/* enum tcp_bit_set */
#define TCP_STATE_CLOSE 8
#define DIRECTION_ORIGINAL 0
#define DIRECTION_REPLY 1

#ifdef WITHOUT_LOOKUP
static __always_inline struct nf_conn___pep *
bpf_skb_ct_lookup(struct __sk_buff *skb, struct bpf_sock_tuple *tuple __attribute__((unused)),
		  __u32 size __attribute__((unused)), struct bpf_ct_opts___pep *opts __attribute__((unused)),
		  __u32 opts_size __attribute__((unused)))
{
	struct nf_conn___pep *none = NULL;

	/* If clang knew the result, it would not pass arguments to global functions, and the verifier requires them. */
	asm volatile("" : "+r"(none) : "r"(skb));
	return none;
}

static __always_inline int bpf_ct_change_timeout(struct nf_conn___pep *ct __attribute__((unused)),
						 __u32 timeout __attribute__((unused)))
{
	return 0;
}

static __always_inline void bpf_ct_release(struct nf_conn___pep *ct __attribute__((unused)))
{
}
#else
extern struct nf_conn___pep *bpf_skb_ct_lookup(struct __sk_buff *, struct bpf_sock_tuple *, __u32,
					       struct bpf_ct_opts___pep *, __u32) __ksym __weak;
extern int bpf_ct_change_timeout(struct nf_conn___pep *, __u32) __ksym __weak;
extern void bpf_ct_release(struct nf_conn___pep *) __ksym __weak;
#endif

/* The conntrack entry of packets with this key, and their direction in it. A reference: release it. */
static __always_inline struct nf_conn___pep *find_flow(struct __sk_buff *ctx, const struct flow_key *key, __u8 *direction)
{
	struct bpf_ct_opts___pep opts = { .netns_id = CURRENT_NETNS, .l4proto = key->protocol };
	struct bpf_sock_tuple tuple = {};
	struct nf_conn___pep *ct;
	__u32 size;

	size = tuple_of(key, &tuple);
	ct = bpf_skb_ct_lookup(ctx, &tuple, size, &opts, CT_OPTS_SIZE);
	*direction = opts.dir;
	return ct;
}

/* Whether the flow's endpoint still serves this service; 0: any service. */
static __always_inline bool endpoint_serves(const struct nf_conn___pep *ct, const struct packet *p, __u32 service)
{
	__be16 port = ct->tuplehash[DIRECTION_REPLY].tuple.src.u.all;
	union address endpoint = {};

	if (p->ipv6)
		BPF_CORE_READ_INTO(&endpoint, ct, tuplehash[DIRECTION_REPLY].tuple.src.u3);
	else
		endpoint.v4 = ct->tuplehash[DIRECTION_REPLY].tuple.src.u3.ip;
	return is_endpoint(&endpoint, bpf_ntohs(port), p->protocol, p->ipv6, service);
}

/*
 * This connection was reset.  The entry may still be ESTABLISHED, if the RST was the last packet: the kernel has not
 * seen what the flow table sent, so the sequence number may not be the one that it expects.  The kernel replaces a
 * closed entry only if the client's RST was the last packet: otherwise the next SYN would get the same endpoint.
 */
static __always_inline bool was_reset(const struct nf_conn___pep *ct)
{
	return ct->proto.tcp.state == TCP_STATE_CLOSE ||
	       (ct->proto.tcp.state == TCP_STATE_ESTABLISHED && ct->proto.tcp.last_index == TCP_INDEX_RST);
}

/*
 * The flow table knows this TCP connection, and has seen no RST that ends it: that of was_reset() was forged, or its
 * other side has ignored it.  Some forged packets, RST and SYN, must not end a connection.  `closed`: conntrack has taken
 * the RST for the end.  That is true if the table knows no numbers, and if both sides have sent SYN, FIN or RST: an
 * endpoint that has restarted answers a SYN by a RST.  Global for the same reason as judge_syn().
 */
__noinline int goes_on(const struct packet *p, bool closed)
{
	struct flow *f, *other;
	struct flow_key key;

	if (!settings.fast_path || !p)
		return 0;
	__builtin_memcpy(&key, p, sizeof(key));
	f = bpf_map_lookup_elem(&flows, &key);
	if (!f || was_reused(&f->rewrite, tag_of(&key)) || f->young || f->closing >= CLOSING_IN_SEQUENCE)
		return 0;
	other = other_direction(&f->rewrite, p);
	if (!other || other->closing >= CLOSING_IN_SEQUENCE)
		return 0;
	return !closed || (f->acknowledged && other->acknowledged && !(f->closing && other->closing));
}

static __always_inline bool has_ended(const struct nf_conn___pep *ct, enum protocol protocol)
{
	return protocol == TCP &&
	       (ct->proto.tcp.state == TCP_STATE_TIME_WAIT || ct->proto.tcp.state == TCP_STATE_CLOSE);
}

/*
 * Why this entry must be removed, so that the packet gets a new one.  NOT_COUNTED: the entry stays.
 *  - UDP: the endpoint is gone, and this packet gets another one.
 *  - TCP: the endpoint is gone and has not answered.  The SYN that is sent again, or the next one of this port, reaches
 *    another one.  The endpoints of a TCP service are stored only as those of any service.
 *  - Any protocol: the flow was never translated.  It began before the service had endpoints, or the kernel picked it
 *    up midstream.  A TCP connection whose other side has answered is real, and stays.
 * The kernel itself replaces TCP connections that have ended.
 */
static __always_inline enum counter must_go(const struct nf_conn___pep *ct, const struct packet *p,
					    __u32 service, bool any_endpoints)
{
	if (p->protocol == TCP && settings.fast_path && was_reset(ct) &&
	    !goes_on(p, ct->proto.tcp.state == TCP_STATE_CLOSE))
		return CLOSING_FLOW_REPLACED;
	if (!any_endpoints || has_ended(ct, p->protocol))
		return NOT_COUNTED;
	if (p->protocol == TCP && ct->status & IPS_SEEN_REPLY_)
		return NOT_COUNTED;
	if (!(ct->status & IPS_DST_NAT_))
		return UNTRANSLATED_FLOW_REPLACED;
	if (p->protocol == TCP && ct->proto.tcp.state != TCP_STATE_SYN_SENT)
		return NOT_COUNTED;
	if (endpoint_serves(ct, p, p->protocol == TCP ? 0 : service))
		return NOT_COUNTED;
	return p->protocol == TCP ? UNANSWERED_FLOW_REPLACED : STALE_UDP_REPLACED;
}

/*
 * 1: conntrack has this flow, which continues unchanged.  Above: why its entry was removed, an enum counter for the
 * caller to record, because the stack has no space for that here.  Global for the same reason as judge_syn().
 */
__noinline int flow_exists(struct __sk_buff *skb, const struct packet *p, __u32 service, bool any_endpoints)
{
	struct nf_conn___pep *ct;
	enum counter replaced;
	__u8 direction;
	int ended;

	if (!settings.conntrack_lookup || !p)
		return 0;
	ct = find_flow(skb, (const struct flow_key *)p, &direction);
	if (!ct)
		return 0;
	/* At its next SYN the kernel drops the entry of a closed connection, and asks for a translation again. */
	ended = has_ended(ct, p->protocol);
	replaced = direction == DIRECTION_ORIGINAL ? must_go(ct, p, service, any_endpoints) : NOT_COUNTED;
	/* The next lookup removes an expired entry. */
	if (replaced && !settings.dry_run)
		bpf_ct_change_timeout(ct, 0);
	bpf_ct_release(ct);
	if (replaced)
		return replaced;
	note_left(p, false);
	return !ended;
}

_Static_assert(CLOSING_FLOW_REPLACED > 1 && UNTRANSLATED_FLOW_REPLACED > 1 && STALE_UDP_REPLACED > 1 &&
		       UNANSWERED_FLOW_REPLACED > 1,
	       "flow_exists() returns these beside 0 and 1");

/* 1: conntrack has a flow with the replies of the draft's flow.  Global for the same reason as judge_syn(). */
__noinline int conntrack_has_replies(struct __sk_buff *skb)
{
	struct nf_conn___pep *ct;
	struct flow_draft *d;
	__u8 direction;
	bool ended;

	if (!settings.fast_path || !settings.conntrack_lookup)
		return 0;
	d = flow_draft();
	if (!d)
		return 0;
	ct = find_flow(skb, &d->reply_key, &direction);
	if (!ct)
		return 0;
	ended = has_ended(ct, d->reply_key.protocol);
	bpf_ct_release(ct);
	return !ended;
}

/* The same for this endpoint's replies to the client's port. */
__noinline int conntrack_has_port(struct __sk_buff *skb, const struct packet *p, const struct backend *b)
{
	struct flow_draft *d;

	if (!settings.fast_path || !settings.conntrack_lookup || !p || !b)
		return 0;
	d = flow_draft();
	if (!d)
		return 0;
	key_of_replies(p, &b->address, b->port, &d->reply_key);
	return conntrack_has_replies(skb);
}

#endif
