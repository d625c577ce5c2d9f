/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * XDP: the same decisions as tc's, before the kernel has made a packet of the frame.  docs/xdp.md tells what is
 * done here; everything else goes up to the tc program of the same device, unchanged and with nothing consumed.
 */
#include "xdp.h"
#include "parse.h"
#include "serve.h"
#include "flow_send.h"

/* Ports of a bridge carry no program. */
static __always_inline __u32 ip_device(struct xdp_md *ctx)
{
	return ctx->ingress_ifindex;
}

static __always_inline bool chosen_before(struct xdp_md *ctx __attribute__((unused)),
					  const struct packet *p __attribute__((unused)),
					  const struct entitlement *e __attribute__((unused)),
					  struct backend *b __attribute__((unused)))
{
	return false;
}

static __always_inline int serve(struct xdp_md *ctx, struct packet *p, const struct frontend *f)
{
	struct table *table;
	__u32 table_id;

	table = table_in_force(f->service, &table_id);
	if (!table || flow_of(ctx, p, f, table))
		return XDP_PASS;
	return open_flow(ctx, p, f, table, table_id, NULL);
}

/* The frame is meant for this node, not for somebody whose traffic it only sees; NULL if it is not. */
static __always_inline struct xdp_device *device_of_node(struct xdp_md *ctx)
{
	__u32 ifindex = ctx->ingress_ifindex;
	struct xdp_device *device = bpf_map_lookup_elem(&xdp_devices, &ifindex);

	return device && is_for(ctx, device->mac) ? device : NULL;
}

static __always_inline int ingress(struct xdp_md *ctx)
{
	struct xdp_device *device;
	struct packet p = {};
	struct frontend f;
	bool parsed;
	int verdict;

	parsed = parse_packet(ctx, ETH_HLEN, &p) && p.protocol != SCTP;
	/* First, since it is most of the traffic: an entry of the cache knows the device's address, too. */
	if (settings.fast_path && parsed && !is_turning_point(&p) && may_be_known(&p)) {
		verdict = send_by_cache(ctx, &p, ctx->ingress_ifindex);
		/* What the cache is not sure of, tc asks the kernel about; and so the kernel looks after the neighbour. */
		if (verdict != NOT_KNOWN)
			return verdict < 0 ? XDP_PASS : verdict;
	}
	if (goes_to_loopback(&p))
		return device_of_node(ctx) ? drop_packet(ctx, &p, DROP_LOOPBACK_DESTINATION) : XDP_PASS;
	if (!settings.direct_lane || !parsed || !p.opens || !find_frontend(&p, &f))
		return XDP_PASS;
	device = device_of_node(ctx);
	if (!device || !device->opens)
		return XDP_PASS;
	/* As tc does it, which will not look at the packet of a flow that is opened here. */
	if (settings.fast_path && p.tcp_flags & TCP_SYN)
		ask_again(&p);
	return serve(ctx, &p, &f);
}

SEC("xdp.frags")
int xdp_ethernet(struct xdp_md *ctx)
{
	return ingress(ctx);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
