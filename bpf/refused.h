/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Records the newest refused or dropped packet for diagnosis. No cost unless a packet is refused. */
#ifndef PEP_REFUSED_H
#define PEP_REFUSED_H

#include "packet.h"

/* Counts by period and by service. Has its own stack frame, because the socket programs have no stack left. */
static __noinline int count_refusal(__u32 service, enum drop_reason reason)
{
	__u32 period = bpf_ktime_get_boot_ns() / (REFUSED_PERIOD * NANOSECONDS);
	struct refusal_key key = { .service = service, .reason = reason };
	struct recent_refusals *lately = bpf_map_lookup_elem(&recent_refusals, &key.reason);
	__u32 i = period % REFUSED_PERIODS;
	__u64 first = 1, *count;

	if (lately && lately->period[i] != period) {
		lately->period[i] = period;
		lately->count[i] = 0;
	}
	if (lately)
		lately->count[i] += 1;
	count = bpf_map_lookup_elem(&refusals, &key);
	if (count)
		*count += 1;
	else
		bpf_map_update_elem(&refusals, &key, &first, BPF_NOEXIST);
	return 0;
}

/* `device`: the device the packet came in by; 0: a socket call. `service`: 0 for none. */
static __always_inline void remember_refused(const struct packet *p, __u32 device, __u32 service,
					     enum drop_reason reason)
{
	__u32 key = reason;
	struct refused *last = bpf_map_lookup_elem(&last_refused, &key);

	count_refusal(service, reason);
	if (!last)
		return;
	last->when = bpf_ktime_get_boot_ns();
	__builtin_memcpy(last->source, &p->source, 16);
	__builtin_memcpy(last->destination, &p->destination, 16);
	last->source_port = p->source_port;
	last->destination_port = p->destination_port;
	last->protocol = p->protocol;
	last->ipv6 = p->ipv6;
	last->device = device;
}

#endif
