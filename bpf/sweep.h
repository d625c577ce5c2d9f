/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What the agent runs once or twice a second: ends what is over in the flow table, and asks for promotions. */
#ifndef PEP_SWEEP_H
#define PEP_SWEEP_H

#include "young.h"

#define YOUNG_NS (2 * NANOSECONDS)		/* what lives longer goes to the kernel */
#define CLOSING_NS NANOSECONDS
#define UNANSWERED_NS (5 * NANOSECONDS)		/* TCP: a SYN that nobody answers is sent again by then */
#define ENDING_NS (4 * NANOSECONDS)		/* what closes, and goes on all the same */
#define UNUSED_NS (2 * NANOSECONDS)
#define KERNEL_UDP_NS (180 * NANOSECONDS)	/* longer than conntrack remembers */
#define KERNEL_TCP_NS (3600 * NANOSECONDS)
#define KERNEL_PRESSED_NS (10 * NANOSECONDS)

struct sweep {
	struct sweep_result found;
	__u64 now;
	__u64 udp_idle;		/* a young UDP flow ends when nothing came for so long */
	__u32 draining;
	__u32 pressed;		/* half of the table is in use */
};

static __always_inline __u64 newest(const struct flow *f, const struct flow *other)
{
	return other && other->last_seen > f->last_seen ? other->last_seen : f->last_seen;
}

static __always_inline bool kernel_flow_is_stale(const struct flow_key *key, const struct flow *f, __u64 idle,
						 bool pressed)
{
	if (pressed)
		return idle > (f->packets ? KERNEL_PRESSED_NS : UNUSED_NS);
	return idle > (key->protocol == UDP ? KERNEL_UDP_NS : KERNEL_TCP_NS);
}

/* `f`: the client's direction of a young flow. True: it is over. */
static __always_inline bool young_flow_is_over(const struct flow_key *key, const struct flow *f,
					       const struct flow *reply, __u64 idle, const struct sweep *s)
{
	if (!reply)
		return true;
	if (key->protocol == UDP)
		return idle > s->udp_idle || (s->pressed && is_complete(f, reply, UDP, s->now));
	/* Half closed it may go on, and what one packet says may have been forged: that is for the kernel to end. */
	if (f->closing && reply->closing && idle > CLOSING_NS)
		return true;
	/* Also if its client goes on sending: no rule of netfilter would see that, whatever is added. */
	return !reply->packets && (idle > UNANSWERED_NS || s->now - f->started > UNANSWERED_NS);
}

/*
 * What goes on: conntrack would have it by now.  Nothing stays young for longer because of what its ends do or leave out,
 * as two that collude could: only the kernel's flows ask netfilter again.
 */
static __always_inline bool is_due_for_kernel(const struct flow_key *key, const struct flow *f,
					      const struct flow *reply, __u64 idle, const struct sweep *s)
{
	__u64 age = s->now - f->started;

	if (key->protocol == TCP && !reply->packets)
		return false;
	if (f->closing && reply->closing && age < ENDING_NS)
		return false;
	if (s->draining)
		return true;
	if (f->closing || reply->closing)
		return idle > CLOSING_NS || age > ENDING_NS;
	if (age < YOUNG_NS)
		return false;
	/* Two questions by datagram and their answers are no stream. */
	return key->protocol == TCP || (idle < YOUNG_NS && f->packets + reply->packets > 5);
}

static long sweep_entry(void *map __attribute__((unused)), const struct flow_key *entry_key, struct flow *f,
			struct sweep *s)
{
	struct flow_rewrite a = f->rewrite;
	struct flow_key key = *entry_key;
	struct flow_key other_key;
	struct flow *other;
	__u64 idle, last;

	s->found.entries++;
	answer_key(&a, key.protocol, key.ipv6, &other_key);
	other = bpf_map_lookup_elem(&flows, &other_key);
	last = newest(f, other);
	idle = s->now > last ? s->now - last : 0;
	if (!f->young) {
		if (kernel_flow_is_stale(&key, f, idle, s->pressed) && !bpf_map_delete_elem(&flows, &key))
			count(FLOW_FORGOTTEN);
		return 0;
	}
	if (f->reply) {
		/* Its flow is judged by the other direction; without that it is left over. */
		if (!other && idle > CLOSING_NS)
			bpf_map_delete_elem(&flows, &key);
		return 0;
	}
	s->found.young++;
	if (young_flow_is_over(&key, f, other, idle, s)) {
		s->found.ended += forget_flow(&key, &a, false, true);
		count(YOUNG_ENDED);
		return 0;
	}
	if (!other || !is_due_for_kernel(&key, f, other, idle, s))
		return 0;
	/* The agent tries again with each sweep what it could not do before: the table of conntrack may be full. */
	f->promote = 0;
	s->found.requested += request_promotion(&key, &a, f);
	return 0;
}

static __always_inline int sweep(void)
{
	__u32 zero = 0;
	struct sweep_result *result = bpf_map_lookup_elem(&sweep_results, &zero);
	struct fast_path *word = fast_path_state();
	struct sweep s = {};

	if (!result || !word)
		return 0;
	s.now = bpf_ktime_get_coarse_ns();
	s.draining = word->draining;
	s.pressed = result->entries > settings.flow_quota * 2;
	/* As long as conntrack would remember it where there is room, and shorter the fuller the table is. */
	s.udp_idle = (s.pressed ? 2 : result->entries > settings.flow_quota ? 10 : 30) * NANOSECONDS;
	bpf_for_each_map_elem(&flows, sweep_entry, &s, 0);
	*result = s.found;
	return 0;
}

/* The agent has made the kernel's entry of this flow: it is the kernel's from now on. */
static __always_inline int promote(const struct flow_key *key)
{
	struct flow_key other_key;
	struct flow *f, *other;

	f = bpf_map_lookup_elem(&flows, key);
	if (!f || f->reply || !f->young)
		return 0;
	answer_key(&f->rewrite, key->protocol, key->ipv6, &other_key);
	other = bpf_map_lookup_elem(&flows, &other_key);
	if (!other)
		return 0;
	f->confirmed_until = other->confirmed_until = 0;
	other->young = 0;
	f->young = 0;
	uncount_young(f->rewrite.device_in);
	count(FLOW_PROMOTED);
	return 1;
}

/* The kernel has no place for this young flow: its packets are netfilter's from now on. */
static __always_inline int end(const struct flow_key *key)
{
	struct flow *f = bpf_map_lookup_elem(&flows, key);

	if (!f || f->reply || !f->young || !forget_flow(key, &f->rewrite, false, true))
		return 0;
	count(YOUNG_ENDED);
	return 1;
}

#endif
