/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The fast path in tc: what the cache knows is sent, and what it does not know is learned. */
#ifndef PEP_FORWARD_H
#define PEP_FORWARD_H

#include "flow_learn.h"
#include "flow_send.h"

/* Both directions stop. The element stays where it is: nobody else gets it while another CPU reads it. */
static __noinline int end_entries(const struct packet *p, struct flow *f)
{
	struct flow_key key = {};

	if (!p || !f)
		return 0;
	f->ended = true;
	if (f->passage == TO_STACK)
		return 0;
	reverse_key(f, p, &key);
	f = bpf_map_lookup_elem(&flows, &key);
	if (f)
		f->ended = true;
	return 0;
}

static __noinline int end_flow(struct __sk_buff *skb, const struct packet *p)
{
	struct flow *f;

	if (!p)
		return NOT_SENT;
	if (p->tcp_flags & TCP_SYN) {
		ask_again(p);
		return NOT_SENT;
	}
	f = bpf_map_lookup_elem(&flows, p);
	if (!f || f->passage == TO_STACK)
		return NOT_SENT;
	end_entries(p, f);
	shorten_timeout(skb, p);
	count(STACK_ENDING);
	return NOT_SENT;
}

/* Ask the kernel about the flow, then send by what is known now. */
static __noinline int learn_and_send(struct __sk_buff *skb, const struct packet *p, __u32 device, bool known)
{
	struct fast_path *word = fast_path_word();
	int verdict;

	if (!p || !word || !is_plain(skb))
		return NOT_SENT;
	count(known ? FLOW_STALE : FLOW_MISS);
	if (!learn_flow(skb, p, device, *(volatile __u32 *)&word->generation)) {
		count(FLOW_NOT_YET);
		if (known && !bpf_map_delete_elem(&flows, p))
			count(FLOW_FORGOTTEN);
		return NOT_SENT;
	}
	verdict = send_by_cache(skb, p, device);
	/* It moved on already: the kernel takes this one. */
	return verdict == NOT_KNOWN || verdict == NOT_SURE ? NOT_SENT : verdict;
}

/*
 * The way of every packet that cannot open a flow, and of UDP.  What opens a UDP
 * flow goes by what serve() finds: its endpoint may be gone.
 */
static __always_inline int fast_way(struct __sk_buff *skb, const struct packet *p, bool bridge_port)
{
	__u32 device;
	int verdict;

	if (p->protocol == SCTP || !may_be_known(p))
		return NOT_SENT;
	if (is_turning_point(p))
		return end_flow(skb, p);
	device = bridge_port ? ip_device(skb) : skb->ifindex;
	verdict = send_by_cache(skb, p, device);
	if (verdict == NOT_SURE && p->protocol == TCP)
		return learn_and_send(skb, p, device, true);
	if (verdict != NOT_SURE && verdict != NOT_KNOWN)
		return verdict;
	if (!comes_from_endpoint(p))
		return verdict;
	if (verdict == NOT_KNOWN && !is_frequent(p)) {
		count(FLOW_MISS);
		return NOT_SENT;
	}
	return learn_and_send(skb, p, device, verdict == NOT_SURE);
}

#endif
