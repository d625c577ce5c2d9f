/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* From the kernel's conntrack entry and its routes to entries of the flow cache, one for each direction. */
#ifndef PEP_FLOW_LEARN_H
#define PEP_FLOW_LEARN_H

#include "conntrack.h"
#include "flow_cache.h"

#define IPS_SEQ_ADJUST_ (1UL << 6)
#define IPS_DYING_ (1UL << 9)
#define IPS_FIXED_TIMEOUT_ (1UL << 10)
#define IPS_HELPER_ (1UL << 13)
#define IPS_OFFLOAD_ (1UL << 14)
#define IPS_SPECIAL_ (IPS_SEQ_ADJUST_ | IPS_FIXED_TIMEOUT_ | IPS_HELPER_ | IPS_OFFLOAD_)
/* The kernel has not seen all sequence numbers: left to itself it may keep what ended here for a day. */
#define RST_TIMEOUT_MS 10000
#define FIN_TIMEOUT_MS 120000

/* Only with CONFIG_NF_CONNTRACK_MARK. */
struct nf_conn___marked {
	__u32 mark;
} __attribute__((preserve_access_index));

/* Where a packet of the one direction goes, and what it looks like there. */
struct translated {
	union address source;
	union address destination;
	__u16 source_port;
	__u16 destination_port;
	bool reply;
};

static __always_inline __u32 mark_of(const struct nf_conn___pep *ct)
{
	const struct nf_conn___marked *marked = (const void *)ct;

	if (bpf_core_field_exists(marked->mark))
		return BPF_CORE_READ(marked, mark);
	return 0;
}

/*
 * REASON_UNSPECIFIED: `t` says how this packet is translated, and the entry lives on.
 * FLOW_NOT_YET: nothing can be said yet.
 */
static __always_inline enum reason judge(const struct nf_conn___pep *ct, const struct packet *p)
{
	unsigned long status = ct->status;

	if (status & IPS_DYING_)
		return FLOW_NOT_YET;
	if (!(status & IPS_DST_NAT_))
		return STACK_NOT_TRANSLATED;
	if (status & IPS_SPECIAL_ || mark_of(ct))
		return STACK_SPECIAL_FLOW;
	if (p->protocol == TCP && (ct->proto.tcp.state > TCP_STATE_ESTABLISHED || was_reset(ct)))
		return STACK_ENDING;
	if (!(status & IPS_ASSURED_) || (p->protocol == TCP && ct->proto.tcp.state != TCP_STATE_ESTABLISHED))
		return FLOW_NOT_YET;
	return REASON_UNSPECIFIED;
}

/* The kernel sees no packet of this flow: its time-out is ours to push on. */
static __always_inline enum reason keep_alive(struct nf_conn___pep *ct, const struct packet *p)
{
	__u32 barrier_word = 0;
	enum reason reason;

	bpf_ct_change_timeout(ct, p->protocol == TCP ? settings.tcp_established_ms : settings.udp_stream_ms);
	if (p->protocol != TCP)
		return REASON_UNSPECIFIED;
	/*
	 * Another CPU may be giving the kernel a FIN or RST.  It notes that first and sets the time-out afterwards: either
	 * that is seen here, or its time-out is the one that stays.
	 */
	__sync_fetch_and_or(&barrier_word, 1);
	reason = judge(ct, p);
	if (reason)
		bpf_ct_change_timeout(ct, was_reset(ct) ? RST_TIMEOUT_MS : FIN_TIMEOUT_MS);
	return reason;
}

static __noinline int translation_of(struct __sk_buff *skb, const struct packet *p, struct translated *t)
{
	struct nf_conn___pep *ct;
	enum reason reason;
	__u8 direction;

	if (!p || !t)
		return FLOW_NOT_YET;
	ct = find_flow(skb, p, &direction);
	if (!ct)
		return FLOW_NOT_YET;
	reason = judge(ct, p);
	if (reason == REASON_UNSPECIFIED) {
		t->reply = direction != DIRECTION_ORIGINAL;
		/* The other direction's tuple, the other way round. Constant indices: the verifier wants them. */
		if (direction == DIRECTION_ORIGINAL) {
			BPF_CORE_READ_INTO(&t->source, ct, tuplehash[DIRECTION_REPLY].tuple.dst.u3);
			BPF_CORE_READ_INTO(&t->destination, ct, tuplehash[DIRECTION_REPLY].tuple.src.u3);
			t->source_port = bpf_ntohs(ct->tuplehash[DIRECTION_REPLY].tuple.dst.u.all);
			t->destination_port = bpf_ntohs(ct->tuplehash[DIRECTION_REPLY].tuple.src.u.all);
		} else {
			BPF_CORE_READ_INTO(&t->source, ct, tuplehash[DIRECTION_ORIGINAL].tuple.dst.u3);
			BPF_CORE_READ_INTO(&t->destination, ct, tuplehash[DIRECTION_ORIGINAL].tuple.src.u3);
			t->source_port = bpf_ntohs(ct->tuplehash[DIRECTION_ORIGINAL].tuple.dst.u.all);
			t->destination_port = bpf_ntohs(ct->tuplehash[DIRECTION_ORIGINAL].tuple.src.u.all);
		}
		reason = keep_alive(ct, p);
	}
	bpf_ct_release(ct);
	return reason;
}

/* A FIN or RST of a flow that the kernel has lost sight of. The packet itself goes to the kernel afterwards. */
static __noinline int shorten_timeout(struct __sk_buff *skb, const struct packet *p)
{
	struct nf_conn___pep *ct;
	__u8 direction;

	if (!p)
		return 0;
	ct = find_flow(skb, p, &direction);
	if (!ct)
		return 0;
	bpf_ct_change_timeout(ct, p->tcp_flags & TCP_RST ? RST_TIMEOUT_MS : FIN_TIMEOUT_MS);
	bpf_ct_release(ct);
	return 0;
}

struct question {
	struct packet const *p;
	const union address *source;
	const union address *destination;
	__u16 source_port;
	__u16 destination_port;
	__u32 device;
	__u32 length;
};

/* Fills in where `f` leads: device, next hop, link addresses, MTU. */
static __always_inline enum reason find_way(struct __sk_buff *skb, const struct question *q, struct flow *f)
{
	struct bpf_fib_lookup fib = {};
	long result;

	fib.ifindex = q->device;
	fib.l4_protocol = q->p->protocol;
	fib.sport = bpf_htons(q->source_port);
	fib.dport = bpf_htons(q->destination_port);
	fib.tot_len = q->length;
	if (q->p->ipv6) {
		fib.family = AF_INET6;
		__builtin_memcpy(fib.ipv6_src, q->source, 16);
		__builtin_memcpy(fib.ipv6_dst, q->destination, 16);
	} else {
		fib.family = AF_INET;
		fib.ipv4_src = q->source->v4;
		fib.ipv4_dst = q->destination->v4;
	}
	result = bpf_fib_lookup(skb, &fib, sizeof(fib), 0);
	f->device_out = fib.ifindex;
	if (result == BPF_FIB_LKUP_RET_NO_NEIGH)
		return STACK_NO_NEIGHBOUR;
	if (result == BPF_FIB_LKUP_RET_FRAG_NEEDED)
		return STACK_TOO_BIG;
	if (result != BPF_FIB_LKUP_RET_SUCCESS)
		return STACK_NO_ROUTE;
	f->mtu = fib.mtu_result;
	f->next_hop_family = fib.family;
	__builtin_memset(f->next_hop, 0, 16);
	if (fib.family == AF_INET6)
		__builtin_memcpy(f->next_hop, fib.ipv6_dst, 16);
	else
		__builtin_memcpy(f->next_hop, &fib.ipv4_dst, 4);
	__builtin_memcpy(f->mac_to, fib.dmac, 6);
	__builtin_memcpy(f->mac_from, fib.smac, 6);
	return REASON_UNSPECIFIED;
}

static __always_inline enum passage passage_of(__u32 device)
{
	struct node_device *d = bpf_map_lookup_elem(&devices, &device);

	return d ? d->passage : TO_STACK;
}

/* What XDP asks of a frame, and of the device that `f` leaves by. `back` leads to where it comes in. */
static __always_inline void find_frames(struct flow *f, const struct flow *back)
{
	struct xdp_device *out = bpf_map_lookup_elem(&xdp_devices, &f->device_out);

	__builtin_memcpy(f->mac_in, back->mac_from, 6);
	if (!out)
		return;
	if (f->device_out == f->device_in)
		f->returns = out->returns;
	f->takes = out->takes;
}

/* The way there, and the proof that the way back leads to where the packet came from: nobody else speaks for it. */
static __noinline int find_ways(struct __sk_buff *skb, const struct packet *p, struct translated *t,
				struct flow_draft *draft, __u32 device)
{
	struct question q = { .p = p, .device = device };
	enum reason reason;

	if (!p || !t || !draft)
		return STACK_NO_ROUTE;
	q.source = &t->source;
	q.destination = &t->destination;
	q.source_port = t->source_port;
	q.destination_port = t->destination_port;
	q.length = skb->gso_size ? p->headers + skb->gso_size : p->length;
	reason = find_way(skb, &q, &draft->there);
	if (reason)
		return reason;
	q.source = &p->destination;
	q.destination = &p->source;
	q.source_port = p->destination_port;
	q.destination_port = p->source_port;
	q.device = draft->there.device_out;
	q.length = 1;
	reason = find_way(skb, &q, &draft->back);
	if (reason && reason != STACK_NO_NEIGHBOUR)
		return reason;
	if (draft->back.device_out != device)
		return STACK_OTHER_DEVICE;
	draft->there.passage = passage_of(draft->there.device_out);
	draft->back.passage = passage_of(device);
	if (!draft->there.passage || !draft->back.passage)
		return STACK_DEVICE;
	draft->there.device_in = device;
	draft->back.device_in = draft->there.device_out;
	draft->back.why = reason;
	if (settings.xdp) {
		find_frames(&draft->there, &draft->back);
		find_frames(&draft->back, &draft->there);
	}
	return REASON_UNSPECIFIED;
}

static __always_inline void describe(struct flow *f, const union address *source, const union address *destination,
				     __u16 source_port, __u16 destination_port)
{
	__builtin_memcpy(f->source, source, 16);
	__builtin_memcpy(f->destination, destination, 16);
	f->source_port = source_port;
	f->destination_port = destination_port;
}

static __always_inline bool leads_the_same_way(const struct flow *a, const struct flow *b)
{
	const __u64 *x = (const void *)a->source, *y = (const void *)b->source;
	__u64 differ = 0;
	int i;

	/* Everything but the tags, and when it was asked; see the assertion below. */
	for (i = 0; i < (int)((offsetof(struct flow, tag_again) + 4 - offsetof(struct flow, source)) / 8); i++)
		differ |= x[i] ^ y[i];
	return !differ;
}

_Static_assert(offsetof(struct flow, source) % 8 == 0 && sizeof(struct flow) % 8 == 0, "compared in words");
_Static_assert(sizeof(struct flow) == offsetof(struct flow, tag_again) + 4, "nothing behind the last tag");

/* An entry that says the same is not replaced: a replaced element is anybody's at once. */
static __always_inline void put(const void *key, struct flow *draft)
{
	struct flow *known = bpf_map_lookup_elem(&flows, key);

	if (known && known->tag == draft->tag && leads_the_same_way(known, draft)) {
		known->generation = draft->generation;
		known->check_at = draft->check_at;
		return;
	}
	if (!known && !bpf_map_update_elem(&flows, key, draft, BPF_NOEXIST)) {
		count(FLOW_LEARNED);
		return;
	}
	bpf_map_update_elem(&flows, key, draft, BPF_ANY);
}

static __always_inline void stamp(struct flow *f, const void *key, __u32 generation, __u64 now)
{
	f->tag = f->tag_again = flow_tag(key);
	f->generation = generation;
	f->check_at = now + FLOW_CHECK_NS;
}

/* What both directions' entries change in a checksum. */
static __always_inline void sums(struct flow *f, const struct packet *p, const struct flow_key *back)
{
	__be32 from = bpf_htonl((__u32)p->source_port << 16 | p->destination_port);
	__be32 to = bpf_htonl((__u32)back->destination_port << 16 | back->source_port);
	__u32 size = p->ipv6 ? 16 : 4;
	__s64 sum;

	sum = bpf_csum_diff((__be32 *)&p->source, size, (__be32 *)back->destination, size, 0);
	sum = bpf_csum_diff((__be32 *)&p->destination, size, (__be32 *)back->source, size, sum);
	f->address_sum = sum;
	f->port_sum = bpf_csum_diff(&from, 4, &to, 4, 0);
}

/*
 * Asks the kernel about the packet's flow. 1: the cache knows now what to do with it.
 * Not static, for the reason that choose_by_scheduler isn't.
 */
__noinline int learn_flow(struct __sk_buff *skb, const struct packet *p, __u32 device, __u32 generation)
{
	struct translated t = {};
	struct flow_draft *draft;
	enum reason reason;
	__u32 zero = 0;
	__u64 now;

	/* Linux 6.1 reads it by itself, also where nobody calls it; the maps are not there then. */
	if (!p || !settings.fast_path)
		return 0;
	draft = bpf_map_lookup_elem(&flow_drafts, &zero);
	if (!draft)
		return 0;
	now = bpf_ktime_get_coarse_ns();
	reason = translation_of(skb, p, &t);
	if (reason == FLOW_NOT_YET)
		return 0;
	__builtin_memset(draft, 0, sizeof(*draft));
	__builtin_memcpy(&draft->key, p, sizeof(draft->key));
	if (reason == REASON_UNSPECIFIED) {
		/* Whoever translates these flows: packets for that address are looked for in the cache from now on. */
		if (t.reply)
			set_hint(&t.source, t.source_port, p->ipv6);
		else
			set_hint(&p->destination, p->destination_port, p->ipv6);
		reason = find_ways(skb, p, &t, draft, device);
	}
	stamp(&draft->there, &draft->key, generation, now);
	if (reason) {
		draft->there.passage = TO_STACK;
		draft->there.why = reason;
		put(&draft->key, &draft->there);
		return 1;
	}
	__builtin_memcpy(draft->back_key.source, &t.destination, 16);
	__builtin_memcpy(draft->back_key.destination, &t.source, 16);
	draft->back_key.source_port = t.destination_port;
	draft->back_key.destination_port = t.source_port;
	draft->back_key.protocol = p->protocol;
	draft->back_key.ipv6 = p->ipv6;
	describe(&draft->there, &t.source, &t.destination, t.source_port, t.destination_port);
	sums(&draft->there, p, &draft->back_key);
	put(&draft->key, &draft->there);
	/* Its neighbour is not known: the first packet that way finds out. */
	if (draft->back.why)
		return 1;
	describe(&draft->back, &p->destination, &p->source, p->destination_port, p->source_port);
	draft->back.address_sum = ~draft->there.address_sum;
	draft->back.port_sum = ~draft->there.port_sum;
	stamp(&draft->back, &draft->back_key, generation, now);
	put(&draft->back_key, &draft->back);
	return 1;
}

#endif
