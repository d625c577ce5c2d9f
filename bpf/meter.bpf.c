/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Packets and bytes of services and their endpoints, for `pyebpf-proxy top`.  Not part of the data plane: it runs
 * before the proxy's tc programs on the same devices, only while `top` runs, and changes nothing.  See docs/top.md.
 */
/* This program uses only the lookup functions of the headers. */
#pragma clang diagnostic ignored "-Wunused-function"

#include "ctx_skb.h"
#include "parse.h"
#include "conntrack.h"
#include "exchange.h"

/* An endpoint of a service. Address and port zero: the endpoint is not known, as with the first packet of a flow. */
struct meter_key {
	__u32 service;
	__u16 port;
	enum protocol protocol;
	__u8 ipv6;
	__u8 address[16];
};

struct meter {
	__u64 packets;
	__u64 bytes;		/* of IP packets, headers included */
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 65536);
	__type(key, struct meter_key);
	__type(value, struct meter);
} meters SEC(".maps");

/* Sampling: one of this many packets is looked at and counts for all of them; a power of two. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} meter_one_in SEC(".maps");

static __always_inline __u32 one_in(void)
{
	__u32 zero = 0;
	__u64 *number = bpf_map_lookup_elem(&meter_one_in, &zero);

	return number && *number ? *number : 1;
}

static __always_inline void measure(struct __sk_buff *skb, const struct packet *p, __u32 link, struct meter *m)
{
	__u32 segments = skb->gso_segs;

	m->packets = 1;
	m->bytes = p->length;
	if (segments > 1) {
		m->packets = segments;
		m->bytes = skb->len - link + (segments - 1) * p->headers;
	}
}

/* As key_from_conntrack(), but from the flow table, which has flows that conntrack does not have. */
static __noinline int key_from_flow_table(struct packet *p, struct meter_key *key)
{
	const struct flow_rewrite *a = NULL;
	struct exchange *x;
	struct flow *f;
	bool reply;
	long found;

	if (!p || !key)
		return 0;
	f = bpf_map_lookup_elem(&flows, p);
	if (f) {
		a = &f->rewrite;
		reply = f->reply;
	} else if (p->protocol == UDP) {
		found = find_exchange((const struct flow_key *)p);
		x = found < 0 ? NULL : exchange_at(FOUND_ELEMENT(found));
		reply = FOUND_REPLY(found);
		a = x ? found_rewrite(x, found) : NULL;
	}
	if (!a)
		return 0;
	if (reply) {
		key->port = p->source_port;
		__builtin_memcpy(key->address, &p->source, 16);
		__builtin_memcpy(&p->destination, a->source, 16);
		p->destination_port = a->source_port;
	} else {
		key->port = a->destination_port;
		__builtin_memcpy(key->address, a->destination, 16);
	}
	return 1;
}

/* True if the flow was translated. Fills `p` with the frontend and `key` with the endpoint. */
static __noinline int key_from_conntrack(struct __sk_buff *skb, struct packet *p, struct meter_key *key)
{
	struct nf_conn___pep *ct;
	__u8 direction;
	int translated;

	if (!p || !key)
		return 0;
	ct = find_flow(skb, (const struct flow_key *)p, &direction);
	if (!ct)
		return 0;
	translated = !!(ct->status & IPS_DST_NAT_);
	if (translated) {
		key->port = bpf_ntohs(ct->tuplehash[DIRECTION_REPLY].tuple.src.u.all);
		p->destination_port = bpf_ntohs(ct->tuplehash[DIRECTION_ORIGINAL].tuple.dst.u.all);
		if (p->ipv6) {
			BPF_CORE_READ_INTO(&key->address, ct, tuplehash[DIRECTION_REPLY].tuple.src.u3);
			BPF_CORE_READ_INTO(&p->destination, ct, tuplehash[DIRECTION_ORIGINAL].tuple.dst.u3);
		} else {
			__be32 address = ct->tuplehash[DIRECTION_REPLY].tuple.src.u3.ip;

			__builtin_memcpy(key->address, &address, 4);
			p->destination.v4 = ct->tuplehash[DIRECTION_ORIGINAL].tuple.dst.u3.ip;
		}
	}
	bpf_ct_release(ct);
	return translated;
}

static __always_inline void count_for(const struct meter_key *key, const struct meter *m, __u32 times)
{
	struct meter *sum = bpf_map_lookup_elem(&meters, key), first;

	if (sum) {
		sum->packets += m->packets * times;
		sum->bytes += m->bytes * times;
		return;
	}
	first.packets = m->packets * times;
	first.bytes = m->bytes * times;
	bpf_map_update_elem(&meters, key, &first, BPF_NOEXIST);
}

static __always_inline int account(struct __sk_buff *skb, __u32 link)
{
	__u32 times = one_in();
	struct meter_key key = {};
	struct packet p = {};
	struct frontend f = {};
	struct meter m;
	bool found;

	if (times > 1 && bpf_get_prandom_u32() & (times - 1))
		return LEFT;
	if (settings.xdp_generic && link && has_lost_link_header(skb))
		link = 0;
	if (!parse_packet(skb, link, &p))
		return LEFT;
	found = find_frontend(&p, &f);
	if (!found && !comes_from_endpoint(&p))
		return LEFT;
	measure(skb, &p, link, &m);
	if (settings.fast_path && p.protocol != SCTP && key_from_flow_table(&p, &key))
		found = find_frontend(&p, &f);
	else if (settings.conntrack_lookup && p.protocol != SCTP && key_from_conntrack(skb, &p, &key))
		found = find_frontend(&p, &f);
	if (!found)
		return LEFT;
	key.service = f.service;
	key.protocol = p.protocol;
	key.ipv6 = p.ipv6;
	count_for(&key, &m, times);
	return LEFT;
}

SEC("tc")
int meter_ethernet(struct __sk_buff *skb)
{
	return account(skb, ETH_HLEN);
}

/* A device whose packets begin with the IP header. */
SEC("tc")
int meter_l3(struct __sk_buff *skb)
{
	return account(skb, 0);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
