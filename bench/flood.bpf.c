/* SPDX-License-Identifier: Apache-2.0 */
/* UDP frames at the maximum rate of one CPU, and their receiver. Loaded by flood.c. */
#include "vmlinux.h"
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "flood.h"

#define ETH_P_IP 0x0800
#define TC_ACT_UNSPEC (-1)
#define TC_ACT_SHOT 2

struct frame {
	struct ethhdr link;
	struct iphdr ip;
	struct udphdr udp;
	__u8 payload[FLOOD_PAYLOAD];
} __attribute__((packed));

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct flood);
} flood_settings SEC(".maps");

/* No per-CPU map: only one CPU generates frames and counts here. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct flood_made);
} made SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} received SEC(".maps");

/* One frame of this many is sent back; 0: none. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} echo_one_of SEC(".maps");

static __always_inline __u16 fold(__u32 sum)
{
	sum = (sum & 0xffff) + (sum >> 16);
	return (sum & 0xffff) + (sum >> 16);
}

/* Writes the whole header of each frame: the kernel recycles pages with their old content. */
SEC("xdp")
int generate(struct xdp_md *ctx)
{
	struct frame *f = (void *)(long)ctx->data;
	__u32 zero = 0, flow, source;
	struct flood *s = bpf_map_lookup_elem(&flood_settings, &zero);
	struct flood_made *m = bpf_map_lookup_elem(&made, &zero);

	if (!s || !m || (void *)(f + 1) > (void *)(long)ctx->data_end)
		return XDP_ABORTED;
	if (!(m->frames % FLOOD_CLOCK)) {
		m->last = bpf_ktime_get_ns();
		if (!m->frames)
			m->first = m->last;
	}
	/* New flows must differ from the repeated ones, and from those of earlier runs, which may still be in tables. */
	flow = s->flows ? m->frames % s->flows : s->begin + m->frames;
	m->frames++;
	source = bpf_htonl(s->source + flow / FLOOD_PORTS);
	__builtin_memcpy(f->link.h_dest, s->to, 6);
	__builtin_memcpy(f->link.h_source, s->from, 6);
	f->link.h_proto = bpf_htons(ETH_P_IP);
	__builtin_memset(&f->ip, 0, sizeof(f->ip));
	f->ip.version = 4;
	f->ip.ihl = 5;
	f->ip.tot_len = bpf_htons(sizeof(*f) - sizeof(f->link));
	f->ip.ttl = 64;
	f->ip.protocol = IPPROTO_UDP;
	f->ip.saddr = source;
	f->ip.daddr = s->destination;
	f->ip.check = ~fold(s->sum + (source & 0xffff) + (source >> 16));
	f->udp.source = bpf_htons(FLOOD_FIRST_PORT + flow % FLOOD_PORTS);
	f->udp.dest = s->port;
	f->udp.len = bpf_htons(sizeof(f->udp) + sizeof(f->payload));
	f->udp.check = 0;
	return bpf_redirect(s->device, 0);
}

static __always_inline struct frame *own_frame(__u32 data, __u32 data_end)
{
	struct frame *f = (void *)(long)data;

	if ((void *)(f + 1) > (void *)(long)data_end)
		return NULL;
	if (f->link.h_proto != bpf_htons(ETH_P_IP) || f->ip.protocol != IPPROTO_UDP)
		return NULL;
	return f;
}

static __always_inline void count_received(void)
{
	__u32 zero = 0;
	__u64 *count = bpf_map_lookup_elem(&received, &zero);

	if (count)
		*count += 1;
}

/* The minimum cost of forwarding: link addresses, no lookups. */
SEC("xdp")
int pass_on(struct xdp_md *ctx)
{
	struct frame *f = own_frame(ctx->data, ctx->data_end);
	__u32 zero = 0;
	struct flood *s = bpf_map_lookup_elem(&flood_settings, &zero);

	if (!f || !s)
		return XDP_PASS;
	__builtin_memcpy(f->link.h_source, f->link.h_dest, 6);
	__builtin_memcpy(f->link.h_dest, s->to, 6);
	return bpf_redirect(s->device, 0);
}

/* Counts the frame.  Returns true if it is to be sent back; then source and destination are already swapped. */
static __always_inline bool ends_here(struct frame *f)
{
	__u32 zero = 0, *one_of, address;
	__u8 link[6];
	__u16 port;

	count_received();
	one_of = bpf_map_lookup_elem(&echo_one_of, &zero);
	if (!one_of || !*one_of || bpf_get_prandom_u32() % *one_of)
		return false;
	/* Swapping does not change the checksums. */
	__builtin_memcpy(link, f->link.h_dest, 6);
	__builtin_memcpy(f->link.h_dest, f->link.h_source, 6);
	__builtin_memcpy(f->link.h_source, link, 6);
	address = f->ip.saddr;
	f->ip.saddr = f->ip.daddr;
	f->ip.daddr = address;
	port = f->udp.source;
	f->udp.source = f->udp.dest;
	f->udp.dest = port;
	return true;
}

/* The receiver in a pod without XDP, which is the usual case. */
SEC("tc")
int sink(struct __sk_buff *skb)
{
	struct frame *f = own_frame(skb->data, skb->data_end);

	if (!f)
		return TC_ACT_UNSPEC;
	return ends_here(f) ? bpf_redirect(skb->ifindex, 0) : TC_ACT_SHOT;
}

/* The receiver that runs before an sk_buff is allocated. */
SEC("xdp")
int sink_xdp(struct xdp_md *ctx)
{
	struct frame *f = own_frame(ctx->data, ctx->data_end);

	if (!f)
		return XDP_PASS;
	/* Not XDP_TX: it wakes the other end of a veth only if that also has an XDP program. */
	return ends_here(f) ? bpf_redirect(ctx->ingress_ifindex, 0) : XDP_DROP;
}

char LICENSE[] SEC("license") = "Apache-2.0";
