/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What was refused or dropped last, for people who look for it. Costs nothing where nothing is refused. */
#ifndef PEP_REFUSED_H
#define PEP_REFUSED_H

#include "packet.h"

/* `device`: where the packet came in; 0: a socket asked. */
static __always_inline void remember_refused(const struct packet *p, __u32 device, enum reason reason)
{
	__u32 key = reason;
	struct refused *last = bpf_map_lookup_elem(&last_refused, &key);

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
