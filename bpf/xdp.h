/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The packet as an XDP program has it; skb.h has the same names for tc.  Whatever
 * cannot be done here goes up unchanged, and tc counts it: this side counts what
 * it did itself, and what made it leave a packet that tc can do something with.
 */
#ifndef PEP_CONTEXT_H
#define PEP_CONTEXT_H

#include "checksum.h"
#include "opened.h"

/* No typedef: type information would name that, and not the kernel's type. */
#define context xdp_md
#define HOOK AT_XDP

#include "trace.h"

#define LEFT XDP_PASS
#define DROPPED XDP_DROP
#define CONNTRACK_LOOKUP bpf_xdp_ct_lookup
#define CONNTRACK_ALLOC bpf_xdp_ct_alloc

/* ---- reading --------------------------------------------------------------------- */

/* A view of `length` bytes at `offset`; NULL if they are not in the frame's first buffer: tc can pull them there. */
static __always_inline void *bytes_at(struct context *ctx, __u32 offset, __u32 length)
{
	void *data = CONTEXT_POINTER(ctx, data);
	void *end = CONTEXT_POINTER(ctx, data_end);

	if (data + offset + length > end)
		return NULL;
	return data + offset;
}

static __always_inline long load_bytes(struct context *ctx, __u32 offset, void *to, __u32 length)
{
	return bpf_xdp_load_bytes(ctx, offset, to, length);
}

/* EtherType: that of a VLAN tag, if there is one. */
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

static __always_inline bool is_plain(struct context *ctx __attribute__((unused)))
{
	return true;
}

/* ---- handing a choice on ----------------------------------------------------------- */

/* The affinity is written, the turn is taken: tc must not choose another time. */
static __always_inline void netfilter_lane(struct context *ctx __attribute__((unused)), const struct packet *p,
					   const struct entitlement *e, const struct backend *b,
					   enum reason why __attribute__((unused)))
{
	struct xdp_choice choice = { .service = e->service, .backend = b->id };

	bpf_map_update_elem(&xdp_choices, p, &choice, BPF_ANY);
}

/* Nothing has been consumed: tc decides the same. */
static __always_inline void reject(struct context *ctx __attribute__((unused)),
				   const struct packet *p __attribute__((unused)),
				   const struct entitlement *e __attribute__((unused)))
{
}

/* There is no mark yet: tc sets it. */
static __always_inline void say_opened(struct context *ctx __attribute__((unused)), const struct packet *p,
				       bool masqueraded)
{
	struct xdp_opened *o = opened_at(p);

	if (!o)
		return;
	__builtin_memcpy(&o->key, p, sizeof(o->key));
	o->masqueraded = masqueraded;
	o->when = bpf_ktime_get_coarse_ns();
}

/* ---- the fast path ----------------------------------------------------------------- */

/*
 * The transport header's checksum is the sum of its pseudo header alone: a sender
 * on this machine left the rest to a device that will never do it.  skbs say so,
 * frames do not.  One in 65536 lawful checksums looks the same, and loses nothing.
 */
static __always_inline bool lacks_checksum(const struct packet *p, __u16 check)
{
	__u16 header = p->ipv6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr);
	__u32 sum = bpf_htons(p->protocol) + (__u32)bpf_htons(p->length - header);
	int i;

	for (i = 0; i < 4; i++)
		sum = add(sum, add(p->source.words[i], p->destination.words[i]));
	return check == fold(sum);
}

static __always_inline __u32 transport_check(const struct packet *p)
{
	__u32 header = p->ipv6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr);

	return header + (p->protocol == TCP ? TCP_CHECK : UDP_CHECK);
}

static __always_inline bool fits(struct context *ctx, enum xdp_frames frames)
{
	if (frames == ANY_FRAMES)
		return true;
	return frames == ONE_BUFFER && bpf_xdp_get_buff_len(ctx) == (__u64)(ctx->data_end - ctx->data);
}

/* The action that sends this frame by the device that the flow leaves by; XDP_PASS: none. */
static __always_inline enum xdp_action sending_action(struct context *ctx, const struct flow *f)
{
	/* Made into a packet before it leaves: any device does. */
	if (settings.xdp_generic)
		return f->device_out == ctx->ingress_ifindex ? XDP_TX : XDP_REDIRECT;
	if (fits(ctx, f->returns))
		return XDP_TX;
	return fits(ctx, f->takes) ? XDP_REDIRECT : XDP_PASS;
}

static __always_inline bool is_for(struct context *ctx, const __u8 *mac)
{
	__u8 *frame = bytes_at(ctx, 0, ETH_HLEN);

	return frame && !((*(__u32 *)frame ^ *(__u32 *)mac) | (*(__u16 *)(frame + 4) ^ *(__u16 *)(mac + 4)));
}

/* Why a packet of a flow that the cache knows is left to tc. REASON_UNSPECIFIED: `f` is ready for send(). */
static __noinline enum reason why_not_here(struct context *ctx, const struct packet *p, struct flow *f)
{
	enum reason reason = REASON_UNSPECIFIED;
	enum xdp_action action;
	__u16 *check;

	if (!p || !f)
		return XDP_LEFT_DEVICE;
	/* Not the node's, but somebody's whose traffic the device only sees. */
	if (!is_for(ctx, f->mac_in))
		return STACK_OTHER_DEVICE;
	check = bytes_at(ctx, ETH_HLEN + transport_check(p), sizeof(*check));
	action = sending_action(ctx, f);
	if (action == XDP_PASS)
		reason = XDP_LEFT_DEVICE;
	else if (!check || lacks_checksum(p, *check))
		reason = XDP_LEFT_CHECKSUM;
	if (reason)
		count(reason);
	else if (action == XDP_TX)
		f->device_out = 0;
	return reason;
}

static __always_inline void count_left(enum reason reason __attribute__((unused)))
{
}

static __always_inline void count_sent(void)
{
	count(XDP_FLOW_HIT);
}

static __always_inline long store_bytes(struct context *ctx, __u32 offset, const void *from, __u32 length)
{
	void *to = bytes_at(ctx, offset, length);

	if (!to)
		return -1;
	__builtin_memcpy(to, from, length);
	return 0;
}

static __always_inline void update_whole_sum(struct context *ctx __attribute__((unused)),
					     __u32 change __attribute__((unused)))
{
}

/* The transport header's checksum is at `offset`. */
static __always_inline long update_transport_check(struct context *ctx, const struct packet *p, const struct flow *f,
						   __u32 offset)
{
	__u16 *check = bytes_at(ctx, offset, sizeof(*check));
	__u16 changed;

	if (!check)
		return -1;
	/* 0 says that there is no checksum. */
	if (p->protocol == UDP && !*check)
		return 0;
	changed = ~fold(add(add((__u16)~*check, f->address_sum), f->port_sum));
	*check = p->protocol == UDP && !changed ? 0xffff : changed;
	return 0;
}

/* `device_out` 0: back by the device that it came in by. */
static __noinline int send(struct context *ctx, const struct flow *f)
{
	__u8 *link;

	if (!f)
		return XDP_DROP;
	link = bytes_at(ctx, 0, ETH_HLEN);
	if (!link)
		return XDP_DROP;
	__builtin_memcpy(link, f->mac_to, sizeof(f->mac_to));
	__builtin_memcpy(link + sizeof(f->mac_to), f->mac_from, sizeof(f->mac_from));
	if (!f->device_out)
		return XDP_TX;
	return bpf_redirect(f->device_out, 0);
}

#endif
