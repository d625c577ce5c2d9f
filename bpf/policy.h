/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The decision table of service-semantics 5, source ranges (7) and the local
 * traffic detector (6).  Shared by packets and sockets.
 */
#ifndef PEP_POLICY_H
#define PEP_POLICY_H

#include "frontend.h"

enum verdict {
	VERDICT_SERVE,
	VERDICT_PASS,	/* handled as if there were no such frontend */
	VERDICT_REJECT,
	VERDICT_DROP,
};

/* Which endpoints a packet may go to, and whether it is masqueraded. */
struct endpoint_selection {
	__u32 service;
	__u32 first_slot;
	__u32 count;
	__u32 affinity_seconds;
	bool masquerade;
	enum slow_path_reason slow;	/* NOT_SLOW: not known */
};

static __always_inline bool has_detector(bool ipv6)
{
	return ipv6 ? settings.detector6 != DETECT_NOTHING : settings.detector4 != DETECT_NOTHING;
}

/* `device`: the device the packet came in by; 0 for a packet or socket of the node itself. */
static __always_inline bool is_pod_source(const struct packet *p, __u32 device)
{
	enum detector how = p->ipv6 ? settings.detector6 : settings.detector4;
	struct node_device *d;
	int i;

	if (how == DETECT_DEVICE) {
		d = device ? bpf_map_lookup_elem(&devices, &device) : NULL;
		return d && d->pod_source;
	}
	if (how != DETECT_CIDR)
		return false;
	if (p->ipv6) {
		for (i = 0; i < 16; i++)
			if ((p->source.bytes[i] & settings.pod_mask6[i]) != settings.pod_cidr6[i])
				return false;
		return true;
	}
	for (i = 0; i < 4; i++)
		if ((p->source.bytes[i] & settings.pod_mask4[i]) != settings.pod_cidr4[i])
			return false;
	return true;
}

static __always_inline bool in_source_ranges(const struct packet *p, __u32 config_id)
{
	if (p->ipv6) {
		struct source_range6_key key = { .prefix_length = 32 + 128, .config = config_id };

		__builtin_memcpy(key.address, &p->source, 16);
		return bpf_map_lookup_elem(&source_ranges6, &key);
	} else {
		struct source_range4_key key = { .prefix_length = 32 + 32, .config = config_id };

		__builtin_memcpy(key.address, &p->source, 4);
		return bpf_map_lookup_elem(&source_ranges4, &key);
	}
}

static __always_inline bool source_allowed(const struct packet *p, const struct frontend *f,
					   const struct service_config *config, __u32 config_id)
{
	struct frontend *own;

	if (f->kind != LOAD_BALANCER || !config->source_ranges || in_source_ranges(p, config_id))
		return true;
	if (!config->vip_source_allowed)
		return false;
	own = exact_frontend(&p->source, p->destination_port, p->protocol, p->ipv6);
	return own && own->service == f->service && own->kind == LOAD_BALANCER;
}

static __always_inline void select_cluster(const struct service_config *config, struct endpoint_selection *e,
					   bool masquerade)
{
	e->first_slot = config->first_slot;
	e->count = config->cluster_count;
	e->masquerade = masquerade;
}

static __always_inline void select_local(const struct service_config *config, struct endpoint_selection *e,
					 bool masquerade)
{
	e->first_slot = config->first_slot + config->cluster_count;
	e->count = config->local_count;
	e->masquerade = masquerade;
}

/*
 * In iptables mode kube-proxy refuses packets in the filter table.  Its rules there match more than those of its nat
 * table: they refuse NodePorts at every address of the node.  No rule there checks what the node itself sends to an
 * externalIP or VIP elsewhere, so these packets are not refused.
 */
static __always_inline enum verdict refuse_unserved(const struct service_config *config, enum drop_reason *reason)
{
	if (!config->any_endpoints) {
		*reason = REJECT_NO_ENDPOINTS;
		return VERDICT_REJECT;
	}
	if (!config->external_local || config->local_count)
		return VERDICT_PASS;
	*reason = DROP_NO_LOCAL_ENDPOINTS;
	return VERDICT_DROP;
}

static __always_inline bool leaves_unfiltered(const struct packet *p, const struct frontend *f, __u32 device)
{
	if (device || settings.nft_mode || (f->kind != EXTERNAL_IP && f->kind != LOAD_BALANCER))
		return false;
	return !is_node_address(&p->destination, p->ipv6);
}

/* The row of a ClusterIP. True: only endpoints of this node may be used. */
static __always_inline bool select_for_cluster_ip(const struct packet *p, const struct service_config *config, bool pod,
					       struct endpoint_selection *e)
{
	bool masquerade = settings.masquerade_all || (has_detector(p->ipv6) && !pod);

	if (config->internal_local)
		select_local(config, e, masquerade);
	else
		select_cluster(config, e, masquerade);
	return config->internal_local;
}

/* The rows of externalIPs, load balancer addresses and NodePorts. True: as above. */
static __always_inline bool select_for_external_address(const struct packet *p, const struct service_config *config,
							__u32 device, bool pod, struct endpoint_selection *e)
{
	if (!config->external_local) {
		select_cluster(config, e, true);
	} else if (pod) {
		select_cluster(config, e, false);
	} else if (!device || is_node_address(&p->source, p->ipv6)) {
		select_cluster(config, e, true);
	} else {
		select_local(config, e, false);
		return true;
	}
	return false;
}

/*
 * One row of the table: VERDICT_SERVE fills the endpoint_selection, any other verdict sets
 * the reason.  `device`: the device the packet came in by; 0 for a socket of the node.
 */
static __always_inline enum verdict decide(const struct packet *p, const struct frontend *f,
					   const struct service_config *config, __u32 config_id, __u32 device,
					   struct endpoint_selection *e, enum drop_reason *reason)
{
	bool local_only;
	bool pod;

	if (f->kind == UNSERVED_NODE_PORT)
		return refuse_unserved(config, reason);
	/* The modes differ in which check comes first (service-semantics 7, 14). */
	if (settings.nft_mode && !source_allowed(p, f, config, config_id)) {
		*reason = DROP_SOURCE_RANGE;
		return VERDICT_DROP;
	}
	if (!config->any_endpoints) {
		if (leaves_unfiltered(p, f, device))
			return VERDICT_PASS;
		*reason = REJECT_NO_ENDPOINTS;
		return VERDICT_REJECT;
	}
	if (!settings.nft_mode && !source_allowed(p, f, config, config_id)) {
		*reason = DROP_SOURCE_RANGE;
		return VERDICT_DROP;
	}

	e->service = f->service;
	e->affinity_seconds = config->affinity_seconds;
	pod = is_pod_source(p, device);
	if (f->kind == CLUSTER_IP)
		local_only = select_for_cluster_ip(p, config, pod, e);
	else
		local_only = select_for_external_address(p, config, device, pod, e);
	if (e->count)
		return VERDICT_SERVE;
	*reason = local_only ? DROP_NO_LOCAL_ENDPOINTS : REJECT_NO_ENDPOINTS;
	return local_only ? VERDICT_DROP : VERDICT_REJECT;
}

#endif
