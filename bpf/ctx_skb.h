/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Access to the packet in a tc program. ctx_xdp.h defines the same names for XDP. */
#ifndef PEP_CONTEXT_H
#define PEP_CONTEXT_H

#include "checksum.h"
/* Not a typedef: BTF would then have its name instead of the kernel's type. */
#define context __sk_buff
#define HOOK AT_TC

#include "rewrite.h"
#include "trace.h"

#define TC_ACT_UNSPEC (-1)
#define TC_ACT_SHOT 2
#define LEFT TC_ACT_UNSPEC	/* continue with the filters of other programs, then with the kernel */
#define DROPPED TC_ACT_SHOT
#define VLAN_ID_MASK 0x0fff
/* skb->priority: read by the proxy's nft table; the kernel resets it when it forwards. */
#define PRIORITY_BACKEND 0xEB000000
#define PRIORITY_MASQUERADE 0xED000000	/* a backend, and masquerade */
#define PRIORITY_REJECT 0xEC000001
#define PRIORITY_MIDSTREAM 0xEC000002	/* conntrack must not create a connection from this packet */
#define BACKEND_ID_MASK 0x00FFFFFF

/* ---- reading --------------------------------------------------------------------- */

/* A view of `length` bytes at `offset`, pulled into the linear part if needed; NULL if the packet is shorter. */
static __always_inline void *bytes_at(struct context *ctx, __u32 offset, __u32 length)
{
	void *data = CONTEXT_POINTER(ctx, data);
	void *end = CONTEXT_POINTER(ctx, data_end);

	if (likely(data + offset + length <= end))
		return data + offset;
	if (offset + length > ctx->len || bpf_skb_pull_data(ctx, offset + length))
		return NULL;
	data = CONTEXT_POINTER(ctx, data);
	end = CONTEXT_POINTER(ctx, data_end);
	if (data + offset + length > end)
		return NULL;
	return data + offset;
}

static __always_inline long load_bytes(struct context *ctx, __u32 offset, void *to, __u32 length)
{
	return bpf_skb_load_bytes(ctx, offset, to, length);
}

/* VLAN 0 is only a priority. With any other tag the frame belongs to the VLAN device above this one. */
static __always_inline bool belongs_to_vlan(struct context *ctx)
{
	return unlikely(ctx->vlan_present) && (ctx->vlan_tci & VLAN_ID_MASK);
}

/* EtherType; 0 if the packet belongs to a VLAN device, which has its own program. */
static __always_inline __be16 network_protocol(struct context *ctx)
{
	return belongs_to_vlan(ctx) ? 0 : ctx->protocol;
}

static __always_inline __u32 receiving_device(struct context *ctx)
{
	return ctx->ifindex;
}

/* Payload of each packet that this one will be segmented into; 0: it is one packet. */
static __always_inline __u32 segment_size(struct context *ctx)
{
	return ctx->gso_size;
}

static __always_inline __u32 whole_length(struct context *ctx)
{
	return ctx->len;
}

/*
 * With generic XDP the kernel (6.18) copies nearly every packet to get headroom, and loses the length of the
 * link header: such a packet arrives here starting with the IP header.
 */
static __noinline int has_lost_link_header(struct __sk_buff *skb)
{
	__u32 ifindex = skb->ifindex;
	struct xdp_device *device;
	__u8 *begin;
	int i;

	device = bpf_map_lookup_elem(&xdp_devices, &ifindex);
	begin = bytes_at(skb, 0, ETH_HLEN);
	if (!device || !begin)
		return 0;
	for (i = 0; i < 6; i++)
		if (begin[i] != device->mac[i])
			return begin[0] >> 4 == (skb->protocol == bpf_htons(ETH_P_IP) ? 4 : 6);
	return 0;
}

/* skb->pkt_type; include/uapi/linux/if_packet.h */
#define PACKET_HOST 0
#define PACKET_BROADCAST 1
#define PACKET_MULTICAST 2
#define PACKET_OTHERHOST 3

/*
 * True if the packet has no VLAN tag and no mark, and its frame is unicast.  A mark was set for the kernel's rules.
 * The kernel forwards no broadcast or multicast frame, whatever its IP address.
 */
static __always_inline bool is_plain(struct context *ctx)
{
	return !ctx->vlan_present && !ctx->mark && ctx->pkt_type != PACKET_BROADCAST &&
	       ctx->pkt_type != PACKET_MULTICAST;
}

/* The frame is addressed to `mac`, an address of this node. */
static __always_inline bool is_for(struct context *ctx, const __u8 *mac)
{
	__u8 *frame = bytes_at(ctx, 0, ETH_HLEN);

	return frame && same_mac(frame, mac);
}

/* A bridge may have to forward the frame. Also true if the port has another address than its bridge. */
static __always_inline bool is_for_other_host(struct context *ctx)
{
	return ctx->pkt_type == PACKET_OTHERHOST;
}

/* The frame is addressed to the device by which it came in. */
static __always_inline bool is_for_host(struct context *ctx)
{
	return ctx->pkt_type == PACKET_HOST;
}

/* ---- handing over a choice ----------------------------------------------------------- */

/* The proxy's nft table reads the choice. */
static __always_inline void set_choice(struct context *ctx, __u32 backend, bool masquerade)
{
	ctx->priority = (masquerade ? PRIORITY_MASQUERADE : PRIORITY_BACKEND) | (backend & BACKEND_ID_MASK);
}

static __always_inline void hand_to_netfilter(struct context *ctx, const struct packet *p,
					      const struct endpoint_selection *e, const struct backend *b)
{
	set_choice(ctx, b->id, e->masquerade);
	decided(ctx, p, e, b, NEW_FLOW_NETFILTER);
}

static __always_inline void reject(struct context *ctx, const struct packet *p, const struct endpoint_selection *e)
{
	ctx->priority = PRIORITY_REJECT;
	remember_refused(p, receiving_device(ctx), e->service, REJECT_NO_ENDPOINTS);
	decided(ctx, p, e, NULL, REJECT_NO_ENDPOINTS);
}

/* ---- the fast path ----------------------------------------------------------------- */

/* Why this hook cannot send a packet of a known flow, whatever the flow and the packet. Always possible in tc. */
static __always_inline enum slow_path_reason why_not_here(struct context *ctx __attribute__((unused)),
							  const struct packet *p __attribute__((unused)),
							  const struct flow_rewrite *a __attribute__((unused)),
							  __u32 *way __attribute__((unused)))
{
	return NOT_SLOW;
}

/* Whether this packet may make its flow young: all that follow can then be sent by this hook or the next one. */
static __always_inline bool may_be_young(struct context *ctx __attribute__((unused)),
					 const struct packet *p __attribute__((unused)))
{
	return true;
}

static __always_inline bool is_bulk(struct context *ctx __attribute__((unused)),
				    const struct packet *p __attribute__((unused)),
				    struct flow *f __attribute__((unused)))
{
	return false;
}

/* Counts a packet that is left to the kernel. */
static __always_inline void count_left(enum slow_path_reason reason)
{
	count(reason);
}

static __always_inline void count_sent(void)
{
	count(FLOW_HIT);
}

/* With CHECKSUM_COMPLETE, the skb has the checksum of the whole packet: each change of the packet must update it. */
static __always_inline void update_whole_sum(struct context *ctx, __u32 change)
{
	bpf_csum_update(ctx, change);
}

/* The transport header's checksum is at `offset`. */
static __always_inline long update_transport_check(struct context *ctx, const struct packet *p,
						   const struct flow_rewrite *a, __u32 offset)
{
	/* UDP: 0 means that there is no checksum. */
	__u64 mangled = p->protocol == UDP ? BPF_F_MARK_MANGLED_0 : 0;
	long failed;

	failed = bpf_l4_csum_replace(ctx, offset, 0, a->address_sum, BPF_F_PSEUDO_HDR | mangled);
	if (a->port_sum)
		failed |= bpf_l4_csum_replace(ctx, offset, 0, a->port_sum, mangled);
	return failed;
}

/* The headers of a packet, copied from the frame, changed, and written by one call: each call costs a lot. */
struct headers {
	__u16 alignment;
	__u16 link[6];
	__be16 ether_type;
	union {
		struct iphdr ip4;
		struct ipv6hdr ip6;
	};
	__u32 transport[TCP_WORDS];	/* IPv4: it begins earlier */
};

static __always_inline void copy_words(__u32 *to, const void *from, const __u32 words)
{
	__u32 i;

	for (i = 0; i < words; i++)
		to[i] = ((const __u32 *)from)[i];
}

/*
 * Writes the headers, with `words` words of the transport header.  With one, only the ports, its checksum was changed
 * before.
 */
static __always_inline long rewrite_headers(struct context *ctx, const struct packet *p, const struct flow_rewrite *a,
					    const bool ipv6, const __u32 words)
{
	const __u32 ip = ipv6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr), length = ETH_HLEN + ip + words * 4;
	struct headers h;
	__u32 *transport = (void *)&h.ip4 + ip;
	__u16 *check = words == TCP_WORDS ? (__u16 *)&transport[4] : (__u16 *)&transport[1] + 1;
	const __u8 *frame = bytes_at(ctx, 0, length);

	if (unlikely(!frame))
		return -1;
	h.ether_type = *(const __be16 *)(frame + 2 * 6);
	/* What precedes TTL or addresses. */
	copy_words((__u32 *)&h.ip4, frame + ETH_HLEN, 2);
	copy_words(transport + 1, frame + ETH_HLEN + ip + 4, words - 1);
	rewrite_link(h.link, &a->out);
	if (ipv6)
		rewrite_ip6(&h.ip6, p, a);
	else
		rewrite_ip4(&h.ip4, p, a);
	rewrite_ports((__be16 *)transport, a);
	if (words > 1) {
		*check = changed_check(p, a, *check);
		/* In IPv4, the header's checksum makes up for the addresses, and the transport's for the ports. */
		update_whole_sum(ctx, ipv6 ? hop_sum(p) : ~a->address_sum);
	}
	return bpf_skb_store_bytes(ctx, 0, h.link, length, 0);
}

/* True if a device may have to complete the checksum. A GSO packet has another sum, which excludes the length. */
static __always_inline bool may_be_partial(struct context *ctx, const struct packet *p)
{
	__u16 *check = bytes_at(ctx, ETH_HLEN + transport_check(p), sizeof(*check));

	return unlikely(ctx->gso_size) || unlikely(!check) || lacks_checksum(p, *check);
}

static __always_inline long rewrite_partial(struct context *ctx, const struct packet *p, const struct flow_rewrite *a,
					    const bool ipv6)
{
	/* The IPv6 header has no checksum, but CHECKSUM_COMPLETE covers the whole packet. */
	if (ipv6)
		update_whole_sum(ctx, add(a->address_sum, hop_sum(p)));
	return update_transport_check(ctx, p, a, ETH_HLEN + transport_check(p)) || rewrite_headers(ctx, p, a, ipv6, 1);
}

static __noinline int rewrite(struct context *ctx, const struct packet *p, const struct flow_rewrite *a)
{
	if (unlikely(!p || !a))
		return -1;
	if (may_be_partial(ctx, p))
		return p->ipv6 ? rewrite_partial(ctx, p, a, true) : rewrite_partial(ctx, p, a, false);
	if (p->protocol == TCP)
		return p->ipv6 ? rewrite_headers(ctx, p, a, true, TCP_WORDS) :
				 rewrite_headers(ctx, p, a, false, TCP_WORDS);
	return p->ipv6 ? rewrite_headers(ctx, p, a, true, UDP_WORDS) : rewrite_headers(ctx, p, a, false, UDP_WORDS);
}

static __always_inline int redirect(const struct flow_rewrite *a, __u32 way __attribute__((unused)))
{
	if (a->out.redirect == REDIRECT_PEER)
		return bpf_redirect_peer(a->out.device, 0);
	return bpf_redirect(a->out.device, 0);
}

static __noinline int send(struct context *ctx, const struct flow_rewrite *a)
{
	if (!a)
		return LEFT;
	if (bpf_skb_store_bytes(ctx, 0, a->out.mac_to, sizeof(a->out.mac_to) + sizeof(a->out.mac_from), 0))
		return DROPPED;
	return redirect(a, 0);
}

#endif
