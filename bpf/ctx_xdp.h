/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Access to the packet in an XDP program.  ctx_skb.h defines the same names for tc.  XDP leaves to tc, unchanged, what
 * it cannot do, and tc counts it.  XDP counts what it did itself, and why it left a packet that tc can send.
 */
#ifndef PEP_CONTEXT_H
#define PEP_CONTEXT_H

#include "checksum.h"
#include "flow_table.h"

/* Not a typedef: BTF would then have its name instead of the kernel's type. */
#define context xdp_md
#define HOOK AT_XDP

#include "rewrite.h"
#include "trace.h"

#define LEFT XDP_PASS
#define DROPPED XDP_DROP

/* ---- reading --------------------------------------------------------------------- */

/* A view of `length` bytes at `offset`; NULL if they are not in the frame's first buffer (tc can pull them in). */
static __always_inline void *bytes_at(struct context *ctx, __u32 offset, __u32 length)
{
	void *data = CONTEXT_POINTER(ctx, data);
	void *end = CONTEXT_POINTER(ctx, data_end);

	if (unlikely(data + offset + length > end))
		return NULL;
	return data + offset;
}

static __always_inline long load_bytes(struct context *ctx, __u32 offset, void *to, __u32 length)
{
	return bpf_xdp_load_bytes(ctx, offset, to, length);
}

/* EtherType; that of a VLAN tag, if there is one. */
static __always_inline __be16 network_protocol(struct context *ctx)
{
	struct ethhdr *link = bytes_at(ctx, 0, sizeof(*link));

	return link ? link->h_proto : 0;
}

static __always_inline __u32 receiving_device(struct context *ctx)
{
	return ctx->ingress_ifindex;
}

static __always_inline __u32 segment_size(struct context *ctx __attribute__((unused)))
{
	return 0;
}

static __always_inline __u32 whole_length(struct context *ctx __attribute__((unused)))
{
	return 0;
}

static __always_inline bool is_plain(struct context *ctx __attribute__((unused)))
{
	return true;
}

/* ---- handing over a choice ----------------------------------------------------------- */

/*
 * tc gets the packet next.  A scheduler has advanced its state, so tc must use this choice.  A random choice is not
 * passed on: it costs less to choose again, and session affinity gives the same endpoint.
 */
static __always_inline void hand_to_netfilter(struct context *ctx __attribute__((unused)), const struct packet *p,
					      const struct endpoint_selection *e, const struct backend *b)
{
	struct xdp_choice choice = { .service = e->service, .backend = b->id };

	if (settings.scheduler != AT_RANDOM)
		bpf_map_update_elem(&xdp_choices, p, &choice, BPF_ANY);
	else
		give_back_slot(b->slot);
}

/* Left to tc, which makes the same decision. */
static __always_inline void reject(struct context *ctx __attribute__((unused)),
				   const struct packet *p __attribute__((unused)),
				   const struct endpoint_selection *e __attribute__((unused)))
{
}

/* ---- the fast path ----------------------------------------------------------------- */

static __always_inline bool fits(struct context *ctx, enum xdp_frames frames)
{
	if (frames == ANY_FRAMES)
		return true;
	return frames == ONE_BUFFER && bpf_xdp_get_buff_len(ctx) == (__u64)(ctx->data_end - ctx->data);
}

/* The action that sends this frame through that device; XDP_PASS: there is none. */
static __always_inline enum xdp_action sending_action(struct context *ctx, __u32 device)
{
	struct xdp_device *out;

	/* Generic XDP sends an skb, so any device will do. */
	if (settings.xdp_generic)
		return device == ctx->ingress_ifindex ? XDP_TX : XDP_REDIRECT;
	out = bpf_map_lookup_elem(&xdp_devices, &device);
	if (!out)
		return XDP_PASS;
	if (device == ctx->ingress_ifindex && fits(ctx, out->returns))
		return XDP_TX;
	/* A veth cannot return a frame, but accepts redirected ones. */
	return fits(ctx, out->takes) ? XDP_REDIRECT : XDP_PASS;
}

/* The frame is addressed to `mac`, an address of this node. */
static __always_inline bool is_for(struct context *ctx, const __u8 *mac)
{
	__u8 *frame = bytes_at(ctx, 0, ETH_HLEN);

	return frame && same_mac(frame, mac);
}

/* The kernel drops such frames only after XDP.  tc_ethernet leaves them alone. */
static __always_inline bool is_for_other_host(struct context *ctx)
{
	__u32 ifindex = ctx->ingress_ifindex;
	struct xdp_device *device = bpf_map_lookup_elem(&xdp_devices, &ifindex);

	return !device || !is_for(ctx, device->mac);
}

static __always_inline bool is_for_host(struct context *ctx)
{
	return !is_for_other_host(ctx);
}

/*
 * A TCP segment with more payload than this makes its direction a bulk stream, which is left to tc.  There the kernel
 * has merged such segments (generic receive offload), and handles many at the cost of one.  The direction stays with
 * tc: a packet sent here would overtake segments that are still being merged.
 */
#define BULK_BYTES 512

static __always_inline bool is_bulk(struct context *ctx __attribute__((unused)), const struct packet *p, struct flow *f)
{
	if (p->protocol != TCP)
		return false;
	if (!f->bulk) {
		if (p->length <= p->headers + BULK_BYTES)
			return false;
		f->bulk = 1;
	}
	count(XDP_LEFT_STREAM);
	return true;
}

/* A checksum that a device still has to complete, or one that cannot be read here. */
static __always_inline bool needs_checksum(struct context *ctx, const struct packet *p)
{
	__u16 *check = bytes_at(ctx, ETH_HLEN + transport_check(p), sizeof(*check));

	return unlikely(!check || lacks_checksum(p, *check));
}

/*
 * tc sends what XDP leaves of a young flow.  After generic XDP it cannot, because such a packet has lost its link header
 * (has_lost_link_header()), and it would drop the packet until the flow is promoted.
 */
static __always_inline bool may_be_young(struct context *ctx, const struct packet *p)
{
	return !settings.xdp_generic || !needs_checksum(ctx, p);
}

/* Why a packet of a known flow is left to tc. NOT_SLOW: `way` is how redirect() sends it. */
static __always_inline enum slow_path_reason why_not_here(struct context *ctx, const struct packet *p,
							  const struct flow_rewrite *a, __u32 *way)
{
	enum slow_path_reason reason = NOT_SLOW;

	*way = sending_action(ctx, a->out.device);
	if (*way == XDP_PASS)
		reason = XDP_LEFT_DEVICE;
	else if (needs_checksum(ctx, p))
		reason = XDP_LEFT_CHECKSUM;
	if (unlikely(reason))
		count(reason);
	return reason;
}

static __always_inline void count_left(enum slow_path_reason reason __attribute__((unused)))
{
}

static __always_inline void count_sent(void)
{
	count(XDP_FLOW_HIT);
}

static __always_inline long rewrite_headers(struct context *ctx, const struct packet *p, const struct flow_rewrite *a,
					    const bool ipv6, const __u32 words)
{
	const __u32 ip = ipv6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr);
	__u8 *frame = bytes_at(ctx, 0, ETH_HLEN + ip + words * 4);
	__u16 *check;

	if (unlikely(!frame))
		return -1;
	check = (void *)frame + ETH_HLEN + ip + (words == TCP_WORDS ? TCP_CHECK : UDP_CHECK);
	rewrite_link((__u16 *)frame, &a->out);
	if (ipv6)
		rewrite_ip6((struct ipv6hdr *)(frame + ETH_HLEN), p, a);
	else
		rewrite_ip4((struct iphdr *)(frame + ETH_HLEN), p, a);
	rewrite_ports((__be16 *)(frame + ETH_HLEN + ip), a);
	*check = changed_check(p, a, *check);
	return 0;
}

static __always_inline long rewrite(struct context *ctx, const struct packet *p, const struct flow_rewrite *a)
{
	if (p->protocol == TCP)
		return p->ipv6 ? rewrite_headers(ctx, p, a, true, TCP_WORDS) :
				 rewrite_headers(ctx, p, a, false, TCP_WORDS);
	return p->ipv6 ? rewrite_headers(ctx, p, a, true, UDP_WORDS) : rewrite_headers(ctx, p, a, false, UDP_WORDS);
}

static __always_inline int redirect(const struct flow_rewrite *a, __u32 way)
{
	return way == XDP_TX ? XDP_TX : bpf_redirect(a->out.device, 0);
}

#endif
