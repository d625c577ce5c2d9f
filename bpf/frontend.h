/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Frontend lookup: service addresses first, then NodePorts (service-semantics 2). */
#ifndef PEP_FRONTEND_H
#define PEP_FRONTEND_H

#include "hints.h"

static __always_inline bool is_loopback6(const union address *address)
{
	return !address->words[0] && !address->words[1] && !address->words[2] && address->words[3] == bpf_htonl(1);
}

/*
 * The node's own address.  Copied byte by byte: a memcpy would cast the volatile away, and the compiler would then use
 * the zeros of the object file.
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

/* The entry of an address if it is one of this node's (address type LOCAL), else NULL. */
static __always_inline struct node_address *node_address(const union address *address, bool ipv6)
{
	/* Linux 6.1 does not accept an argument of a global function as a key. */
	const union address key = *address;

	if (ipv6)
		return bpf_map_lookup_elem(&node_addresses6, &key);
	return bpf_map_lookup_elem(&node_addresses4, &key);
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

/*
 * For an address where the NodePort is not served (service-semantics 8).  True: its Service may refuse or drop the
 * packet (policy.h).  This holds in iptables mode, at addresses of this node and at ::1, which never serves NodePorts.
 * In nftables mode the packet belongs to no service.
 */
static __always_inline bool is_unserved_node_port(const union address *address, bool ipv6)
{
	if (settings.nft_mode)
		return false;
	return is_node_address(address, ipv6) || (ipv6 && is_loopback6(address));
}

/* Fills `f` with the NodePort of that number, if it applies at this address. */
static __always_inline bool find_node_port(const struct packet *p, struct frontend *f)
{
	const union address any = {};
	struct node_address *node;
	struct frontend *found;

	if (!may_be_node_port(p->destination_port))
		return false;
	found = exact_frontend(&any, p->destination_port, p->protocol, p->ipv6);
	if (!found)
		return false;
	/* A copy: a deleted element may be reused at once. */
	*f = *found;
	node = node_address(&p->destination, p->ipv6);
	if (node && node->node_ports)
		return true;
	f->kind = UNSERVED_NODE_PORT;
	return is_unserved_node_port(&p->destination, p->ipv6);
}

static __always_inline bool find_frontend(const struct packet *p, struct frontend *f)
{
	struct frontend *found = NULL;

	if (has_hinted_destination(p))
		found = exact_frontend(&p->destination, p->destination_port, p->protocol, p->ipv6);
	/* NodePorts are stored with the unspecified address. A packet to that address must not match them here. */
	if (!found || found->kind == NODE_PORT)
		return find_node_port(p, f);
	*f = *found;
	return true;
}

/* Whether this endpoint serves that service; 0: any service. */
static __always_inline bool is_endpoint(const union address *address, __u16 port, enum protocol protocol, bool ipv6,
					__u32 service)
{
	if (ipv6) {
		struct endpoint6_key key = { .service = service, .port = port, .protocol = protocol };

		__builtin_memcpy(key.address, address, 16);
		return bpf_map_lookup_elem(&endpoints6, &key);
	} else {
		struct endpoint4_key key = { .service = service, .port = port, .protocol = protocol };

		__builtin_memcpy(key.address, address, 4);
		return bpf_map_lookup_elem(&endpoints4, &key);
	}
}

/* The current version of a service; NULL while it is being removed. */
static __always_inline struct service_config *active_config(__u32 id, __u32 *config_id)
{
	struct service *service = bpf_map_lookup_elem(&services, &id);
	struct service_config *config;

	if (!service)
		return NULL;
	*config_id = *(volatile __u32 *)&service->config;
	if (!*config_id)
		return NULL;
	config = bpf_map_lookup_elem(&service_configs, config_id);
	if (!config)
		count(SERVICE_CONFIG_MISSING);
	return config;
}

#endif
