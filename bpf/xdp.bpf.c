/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * XDP: the same decisions as in tc, before the kernel has made an skb of the frame.  docs/xdp.md lists what is done
 * here.  Everything else goes to the tc program of the same device, unchanged, and no state is used up.
 */
#include "ctx_xdp.h"
#include "parse.h"
#include "serve.h"

static __always_inline bool chosen_before(struct xdp_md *ctx __attribute__((unused)),
					  const struct packet *p __attribute__((unused)),
					  const struct endpoint_selection *e __attribute__((unused)),
					  struct backend *b __attribute__((unused)))
{
	return false;
}

/* tc writes the hand-over record: XDP has no memory that the egress program could read. */
static __always_inline void note_handover(struct xdp_md *ctx __attribute__((unused)),
					  const struct packet *p __attribute__((unused)),
					  const struct endpoint_selection *e __attribute__((unused)),
					  const struct backend *b __attribute__((unused)))
{
}

static __always_inline int leave_young(struct xdp_md *ctx __attribute__((unused)),
				       const struct packet *p __attribute__((unused)),
				       struct flow_rewrite *a __attribute__((unused)),
				       struct flow *f __attribute__((unused)),
				       __u32 service __attribute__((unused)), __u32 backend __attribute__((unused)),
				       enum slow_path_reason reason __attribute__((unused)))
{
	return XDP_PASS;
}

static __noinline int continues(struct xdp_md *ctx __attribute__((unused)),
				const struct packet *p __attribute__((unused)),
				const struct frontend *f __attribute__((unused)))
{
	return 0;
}

/*
 * A datagram for this node may answer one that the node itself or a masqueraded pod has sent from the frontend's port.
 * The filter does not have that flow, because it began with a packet to no service.
 */
static __always_inline int may_continue(struct xdp_md *ctx __attribute__((unused)), const struct packet *p,
					const struct frontend *f __attribute__((unused)))
{
	return p->protocol == UDP && is_node_address(&p->destination, p->ipv6);
}

/* tc asks conntrack. */
static __always_inline int may_have_other_flow(struct xdp_md *ctx __attribute__((unused)),
					       const struct packet *p __attribute__((unused)),
					       const struct backend *b __attribute__((unused)))
{
	return 1;
}

static __noinline int may_have_replies(struct xdp_md *ctx __attribute__((unused)))
{
	return 1;
}

/* The device, if the frame is addressed to this node; NULL for other frames that the device sees. */
static __always_inline struct xdp_device *device_of_node(struct xdp_md *ctx)
{
	__u32 ifindex = ctx->ingress_ifindex;
	struct xdp_device *device = bpf_map_lookup_elem(&xdp_devices, &ifindex);

	return device && is_for(ctx, device->mac) ? device : NULL;
}

static __always_inline int serve(struct xdp_md *ctx, struct packet *p, const struct frontend *f)
{
	struct service_config *config;
	bool untracked = is_untracked(p);
	__u32 config_id;

	/*
	 * conntrack may have the flow.  Decisions are for new flows: this packet must not be dropped, nor take a turn of a
	 * scheduler, nor renew session affinity.  tc asks conntrack.  A dry run has no fast path, and no filter to ask.
	 */
	if (settings.fast_path && settings.conntrack_lookup && !untracked)
		return XDP_PASS;
	config = active_config(f->service, &config_id);
	if (!config)
		return XDP_PASS;
	return open_flow(ctx, p, f, config, config_id, NULL, false, settings.fast_path && may_be_young(ctx, p),
			 untracked);
}

static __always_inline int ingress(struct xdp_md *ctx)
{
	struct xdp_device *device;
	struct packet p = {};
	struct frontend f;
	int verdict;

	if (unlikely(!parse_packet(ctx, ETH_HLEN, &p) || p.protocol == SCTP))
		return goes_to_loopback(&p) && device_of_node(ctx) ? drop_packet(ctx, &p, DROP_LOOPBACK_DESTINATION) :
								     XDP_PASS;
	/* First, because this is most of the traffic. */
	if (settings.fast_path && may_be_known(&p)) {
		verdict = send_by_table(ctx, &p, ctx->ingress_ifindex);
		/* What the table does not send goes through netfilter, and the observer sees it leave. */
		if (verdict != NOT_KNOWN)
			return verdict < 0 ? XDP_PASS : verdict;
	}
	if (goes_to_loopback(&p))
		return device_of_node(ctx) ? drop_packet(ctx, &p, DROP_LOOPBACK_DESTINATION) : XDP_PASS;
	if (!p.starts_flow || !find_frontend(&p, &f))
		return XDP_PASS;
	device = device_of_node(ctx);
	if (!device || !device->starts_flow)
		return XDP_PASS;
	return serve(ctx, &p, &f);
}

SEC("xdp.frags")
int xdp_ethernet(struct xdp_md *ctx)
{
	return ingress(ctx);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
