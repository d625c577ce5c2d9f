/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Who is meant: service addresses first, then NodePorts (service-semantics 2). */
#ifndef PEP_FRONTEND_H
#define PEP_FRONTEND_H

#include "packet.h"

/*
 * The node's own address.  Byte by byte: a memcpy must cast the volatile away,
 * and the compiler would then use the zeros that stand in the object file.
 */
static __always_inline void own_address(union address *to, bool ipv6)
{
	int i;

	if (ipv6)
		for (i = 0; i < 16; i++)
			to->bytes[i] = settings.node_address6[i];
	else
		for (i = 0; i < 4; i++)
			to->bytes[i] = settings.node_address4[i];
}

/* What is known of an address if it is one of this node's (address type LOCAL), else NULL. */
static __always_inline struct node_address *node_address(const union address *address, bool ipv6)
{
	if (ipv6)
		return bpf_map_lookup_elem(&node_addresses6, address);
	return bpf_map_lookup_elem(&node_addresses4, address);
}

static __always_inline bool is_node_address(const union address *address, bool ipv6)
{
	return (!ipv6 && is_loopback4(address->v4)) || node_address(address, ipv6);
}

static __always_inline struct frontend *exact_frontend(const union address *address, __u16 port,
							 enum protocol protocol, bool ipv6)
{
	if (ipv6) {
		struct frontend6_key key = { .port = port, .protocol = protocol };

		__builtin_memcpy(key.address, address, 16);
		return bpf_map_lookup_elem(&frontends6, &key);
	} else {
		struct frontend4_key key = { .port = port, .protocol = protocol };

		__builtin_memcpy(key.address, address, 4);
		return bpf_map_lookup_elem(&frontends4, &key);
	}
}

static __always_inline bool may_be_node_port(__u16 port)
{
	__u32 word = port / 64;
	__u64 *hints = bpf_map_lookup_elem(&node_port_hints, &word);

	return hints && (*hints >> (port % 64) & 1);
}

/* The NodePort of that number, if its address serves NodePorts to packets that arrive. */
static __always_inline struct frontend *node_port_frontend(const struct packet *p)
{
	const union address any = {};
	struct node_address *node;
	struct frontend *f;

	if (!may_be_node_port(p->destination_port))
		return NULL;
	f = exact_frontend(&any, p->destination_port, p->protocol, p->ipv6);
	if (!f)
		return NULL;
	node = node_address(&p->destination, p->ipv6);
	return node && node->node_ports ? f : NULL;
}

static __always_inline struct frontend *find_frontend(const struct packet *p)
{
	struct frontend *f = exact_frontend(&p->destination, p->destination_port, p->protocol, p->ipv6);

	return f ? f : node_port_frontend(p);
}

/* The version of a service that is in force; NULL while it is being taken away. */
static __always_inline struct table *table_in_force(__u32 id, __u32 *table_id)
{
	struct service *service = bpf_map_lookup_elem(&services, &id);
	struct table *table;

	if (!service)
		return NULL;
	*table_id = *(volatile __u32 *)&service->table;
	if (!*table_id)
		return NULL;
	table = bpf_map_lookup_elem(&tables, table_id);
	if (!table)
		count(TABLE_MISSING);
	return table;
}

#endif
