/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* tc ingress: every packet that enters the node passes here once. See docs/data-plane.md. */
#include "ctx_skb.h"
#include "parse.h"
#include "serve.h"
#include "pods.h"
#include "bridge.h"
#include "fragments.h"
#include "icmp.h"
#include "observer.h"
#include "sweep.h"

/* The device as the IP layer sees it: for a bridge port, its bridge. */
static __always_inline __u32 ip_device(struct __sk_buff *skb)
{
	__u32 ifindex = skb->ifindex;
	struct node_device *port = port_of_bridge(ifindex);

	return port ? port->bridge : ifindex;
}

/*
 * The client's packet can create the conntrack entry by itself: conntrack picks up connections midstream, and the
 * endpoint is the same.  Any other packet is dropped once: the agent creates the entry before the sender retransmits.
 * Global for the same reason as judge_syn().
 */
__noinline int leave_to_netfilter(struct __sk_buff *skb, const struct packet *p, const struct flow_rewrite *a,
				  __u32 service, __u32 backend)
{
	union address source;

	if (!p || !a)
		return DROPPED;
	__builtin_memcpy(&source, a->source, 16);
	if (!backend || a->source_port != p->source_port || !same_address(&source, &p->source, p->ipv6)) {
		drop_until_promotion(p, receiving_device(skb), service);
		return DROPPED;
	}
	set_choice(skb, backend, false);
	/* The flow may have no entry from now on. Then only conntrack keeps the endpoint. */
	note_left(p, false);
	return LEFT;
}

/* A packet of a young flow that only the kernel can handle. */
static __always_inline int leave_young(struct __sk_buff *skb, const struct packet *p, struct flow_rewrite *a,
				       struct flow *f, __u32 service, __u32 backend, enum slow_path_reason reason)
{
	int verdict;

	if (reason == STACK_FRAGMENT) {
		verdict = send_first_fragment(skb, p, a);
		if (verdict != NOT_SENT) {
			if (f)
				note_sent(f, p, a, bpf_ktime_get_coarse_ns());
			return verdict;
		}
	}
	if (f) {
		request_promotion((const struct flow_key *)p, a, f);
		/* A stream from now on: it stays the kernel's, because such packets may follow. */
		if (p->protocol == UDP)
			f->packets += EXCHANGE_PACKETS + 1;
	}
	return leave_to_netfilter(skb, p, a, service, backend);
}

/* True, and `b` filled, if a scheduler chose this packet's endpoint in XDP, which left the rest to tc. */
static __noinline int take_over_from_xdp(const struct packet *p, const struct endpoint_selection *e, struct backend *b)
{
	struct xdp_choice *found, choice;

	if (!p || !e || !b)
		return 0;
	found = bpf_map_lookup_elem(&xdp_choices, p);
	if (!found)
		return 0;
	choice = *found;
	bpf_map_delete_elem(&xdp_choices, p);
	if (choice.service != e->service || !position_in_list(e, p->ipv6, choice.backend, 0))
		return 0;
	return load_backend(choice.backend, p->ipv6, b);
}

static __always_inline bool chosen_before(struct __sk_buff *skb, const struct packet *p, const struct endpoint_selection *e,
					  struct backend *b)
{
	return (settings.pod_sockets && take_over(skb, p, e, b)) ||
	       (settings.xdp && settings.scheduler != AT_RANDOM && take_over_from_xdp(p, e, b));
}

static __always_inline void note_handover(struct __sk_buff *skb, const struct packet *p, const struct endpoint_selection *e,
					  const struct backend *b)
{
	hand_over_open(skb, p, e, b, ip_device(skb));
}

static __always_inline bool is_in_conntrack(struct __sk_buff *skb, const struct packet *p, const struct frontend *f,
					    const struct service_config *config)
{
	/* At an address without NodePorts the flow is not of the service, which may only refuse it. */
	int found = flow_exists(skb, p, f->service, config->any_endpoints && f->kind != UNSERVED_NODE_PORT);

	if (found > 1)
		decided(skb, p, NULL, NULL, found);
	return found == 1;
}

/* Finds the configuration again: the caller's stack has no space to keep it. */
static __noinline int continues(struct __sk_buff *skb, const struct packet *p, const struct frontend *f)
{
	struct service_config *config;
	__u32 config_id;

	if (!p || !f)
		return 0;
	config = active_config(f->service, &config_id);
	return config && is_in_conntrack(skb, p, f, config);
}

static __always_inline int may_continue(struct __sk_buff *skb, const struct packet *p, const struct frontend *f)
{
	return continues(skb, p, f);
}

static __always_inline int may_have_other_flow(struct __sk_buff *skb, const struct packet *p, const struct backend *b)
{
	/* Without the lookup clang passes no context to the function, and the verifier must not see that call. */
	return !settings.conntrack_lookup || conntrack_has_port(skb, p, b);
}

/* Not inline: the caller's stack has no space for the key. */
static __noinline int may_have_replies(struct __sk_buff *skb)
{
	struct flow_draft *d = flow_draft();
	struct flow_key straight;

	if (!d)
		return 1;
	if (settings.conntrack_lookup) {
		if (conntrack_has_replies(skb))
			return 1;
	} else {
		straight = d->key;
		__builtin_memcpy(straight.destination, d->there.rewrite.destination, 16);
		straight.source_port = d->there.rewrite.source_port;
		straight.destination_port = d->there.rewrite.destination_port;
		if (is_straight(&straight))
			return 1;
	}
	d->asked_port = d->there.rewrite.source_port;
	return 0;
}

/* `known`: the flow table has this flow as a kernel's flow. */
static __always_inline int serve(struct __sk_buff *skb, struct packet *p, const struct frontend *f,
				 struct place *original, bool known, bool fast)
{
	struct service_config *config;
	bool gone = false, unasked = false;
	__u32 config_id;

	config = active_config(f->service, &config_id);
	if (!config)
		return TC_ACT_UNSPEC;
	/* The kfunc cannot look up SCTP. An SCTP flow is opened by an INIT only. */
	if (settings.conntrack_lookup && p->protocol != SCTP) {
		unasked = fast && !known && !original && !settings.dry_run && is_untracked(p);
		if (!unasked && is_in_conntrack(skb, p, f, config)) {
			if (known)
				hand_over_confirm(skb, p, ip_device(skb));
			return TC_ACT_UNSPEC;
		}
		gone = known;
	}
	return open_flow(skb, p, f, config, config_id, original, known && !gone, fast && !known && !original,
			 unasked);
}

/*
 * True for a flow sent directly to an endpoint, from a port that also has a young flow to the endpoint's Service.
 * The replies of both look the same.  The kernel gives the second flow another port once it knows the first.
 */
static __always_inline bool clashes_with_young(struct __sk_buff *skb, const struct packet *p)
{
	if (!has_hinted_destination(p))
		return false;
	if (is_taken_by_young(p, &p->destination, p->destination_port, skb->ifindex))
		return true;
	/* From now on conntrack has this flow, and no young flow may have the same replies. */
	if (settings.conntrack_lookup)
		note_left(p, false);
	else
		note_straight((const struct flow_key *)p);
	return false;
}

/* A SYN-ACK shows which path replies take, also when the table knows the flow already. */
static __always_inline bool is_syn_ack(const struct packet *p)
{
	return p->protocol == TCP && (p->tcp_flags & (TCP_SYN | TCP_ACK)) == (TCP_SYN | TCP_ACK);
}

/* A reply from an endpoint, or a packet of no service: the last steps before the kernel gets it. */
static __always_inline int leave(struct __sk_buff *skb, const struct packet *p, bool bridge_port, bool fast,
				 int verdict)
{
	bool from_endpoint;

	if (fast && p->starts_flow && verdict == NOT_KNOWN && clashes_with_young(skb, p)) {
		drop_until_promotion(p, receiving_device(skb), 0);
		return DROPPED;
	}
	from_endpoint = fast && (verdict == NOT_KNOWN || is_syn_ack(p)) && comes_from_endpoint(p);
	/*
	 * A datagram keeps conntrack's entry, although the client sends nothing.  If its sender owns a frontend's address, as
	 * the host of an external IP does, the answer to it looks like a first packet for the Service.
	 */
	if (fast && verdict == NOT_KNOWN && p->protocol == UDP && has_hinted_source(p))
		note_left(p, true);
	if (bridge_port && p->starts_flow && settings.conntrack_lookup)
		note_bridged(skb, p);
	if (bridge_port && redirect_reply_to_bridge(skb, p))
		return TC_ACT_UNSPEC;
	if (!fast)
		return TC_ACT_UNSPEC;
	if (verdict == NOT_CONFIRMED)
		hand_over_confirm(skb, p, ip_device(skb));
	else if (from_endpoint && is_plain(skb))
		hand_over_reply(skb, p, ip_device(skb));
	return TC_ACT_UNSPEC;
}

/*
 * While the agent moves the program to the head of the chain, or during an upgrade, the program is briefly attached
 * twice.  The decision of the first run stands.  A sender cannot set the priority: the kernel zeroes it on ingress.
 */
static __always_inline bool is_decided(const struct __sk_buff *skb)
{
	__u32 tag = skb->priority & ~BACKEND_ID_MASK;

	return tag == PRIORITY_BACKEND || tag == PRIORITY_MASQUERADE || skb->priority == PRIORITY_REJECT ||
	       skb->priority == PRIORITY_MIDSTREAM;
}

/*
 * A TCP packet for a frontend, without SYN, of a connection that the table does not know, or that conntrack has to
 * confirm.  conntrack may have the connection.  If not, it would pick it up untranslated, and the next SYN from the same
 * port would match that entry.  An example is an ACK that arrives after the reset of a young flow.
 */
static __always_inline bool is_midstream(const struct packet *p)
{
	return p->protocol == TCP && !p->starts_flow && has_hinted_destination(p);
}

/* For a packet without hints, as most packets: only a NodePort, or a moved UDP socket of a pod, is possible. */
static __always_inline bool cannot_be_for_service(const struct packet *p)
{
	return !(p->starts_flow && may_be_node_port(p->destination_port)) &&
	       !(settings.pod_sockets && p->protocol == UDP);
}

#define LONGEST_LINK_HEADER 60
#define GRE_PROTOCOL 47

/*
 * The length of what precedes the IP header, on a device whose packets have no header of its own.  A packet may still
 * have one of a device below: that of Ethernet (IPsec by xfrm and vti devices), also with a VLAN tag, or an outer IP
 * header and GRE (a tunnel to any peer).  0: nothing, or it was not found.
 */
static __noinline int foreign_header(struct __sk_buff *skb)
{
	__u32 header[5], here[5], at;

	if (bpf_skb_load_bytes_relative(skb, 0, header, sizeof(header), BPF_HDR_START_NET))
		return 0;
	for (at = 0; at <= LONGEST_LINK_HEADER; at += 2) {
		if (bpf_skb_load_bytes(skb, at, here, sizeof(here)))
			return 0;
		if (!((header[0] ^ here[0]) | (header[1] ^ here[1]) | (header[2] ^ here[2]) | (header[3] ^ here[3]) |
		      (header[4] ^ here[4])))
			return at;
	}
	return 0;
}

/* False for what begins with an IP header of this packet's length, except for a GRE packet.  It saves the calls. */
static __always_inline bool may_have_foreign_header(struct __sk_buff *skb)
{
	struct ipv6hdr *ip6;
	struct iphdr *ip;

	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		ip = bytes_at(skb, 0, sizeof(*ip));
		return ip && (ip->version != 4 || ip->protocol == GRE_PROTOCOL || bpf_ntohs(ip->tot_len) != skb->len);
	}
	ip6 = bytes_at(skb, 0, sizeof(*ip6));
	return ip6 && (ip6->version != 6 || bpf_ntohs(ip6->payload_len) + sizeof(*ip6) != skb->len);
}

/* `link`: the length of the link header.  `layer3`: the device has none of its own. */
static __always_inline int ingress(struct __sk_buff *skb, __u32 link, bool bridge_port, bool layer3)
{
	int verdict = NOT_KNOWN;
	struct packet p = {};
	struct place original;
	struct frontend f;
	bool stale = false, midstream = false;
	bool parsed, ethernet, fast;

	if (unlikely(is_decided(skb)))
		return TC_ACT_UNSPEC;
	/* tc_index names a record of this CPU, so no other value may remain in it. */
	if (settings.fast_path && unlikely(skb->tc_index))
		skb->tc_index = 0;
	if (settings.xdp_generic && link && has_lost_link_header(skb))
		link = 0;
	/* The program sends only frames with an Ethernet header. */
	ethernet = !layer3 && link;
	fast = settings.fast_path && ethernet;
	parsed = parse_packet(skb, link, &p);
	if (unlikely(goes_to_loopback(&p)))
		return drop_packet(skb, &p, DROP_LOOPBACK_DESTINATION);
	if (unlikely(!parsed)) {
		if (fast) {
			verdict = send_later_fragment(skb);
			if (verdict != NOT_SENT)
				return verdict;
			promote_by_error(skb);
		}
		if (bridge_port)
			redirect_fragment_to_bridge(skb);
		return TC_ACT_UNSPEC;
	}
	/* Frames for another host are only observed. */
	if (!bridge_port && ethernet && unlikely(skb->pkt_type == PACKET_OTHERHOST))
		return TC_ACT_UNSPEC;
	if (fast && p.fragment)
		forget_fragments(skb);
	if (fast && likely(p.protocol != SCTP)) {
		if (may_be_known(&p)) {
			verdict = send_by_table(skb, &p, skb->ifindex);
			if (likely(verdict != NOT_SENT && verdict != NOT_KNOWN && verdict != NOT_CONFIRMED))
				return verdict;
			midstream = verdict != NOT_SENT && is_midstream(&p);
		} else if (cannot_be_for_service(&p)) {
			return TC_ACT_UNSPEC;
		}
	}
	if ((p.starts_flow || bridge_port || midstream) && find_frontend(&p, &f)) {
		if (midstream)
			skb->priority = PRIORITY_MIDSTREAM;
		if (!p.starts_flow)
			return leave(skb, &p, false, fast, verdict);
		if (bridge_port && settings.conntrack_lookup)
			forget_bridged(&p);
	} else if (settings.pod_sockets && p.protocol == UDP && is_stale(skb, &p, &f, &original)) {
		stale = true;
	} else {
		return leave(skb, &p, bridge_port, fast, verdict);
	}
	return serve(skb, &p, &f, stale ? &original : NULL, verdict != NOT_KNOWN, fast);
}

/* The programs are loaded in this order: those that many packets pass come last (README.md, "Place in memory"). */

/* A device without a link header of its own: tun, ipip, wireguard. */
SEC("tc")
int tc_l3(struct __sk_buff *skb)
{
	__u32 link = unlikely(may_have_foreign_header(skb)) ? foreign_header(skb) : 0;

	return link <= LONGEST_LINK_HEADER ? ingress(skb, link, false, true) : TC_ACT_UNSPEC;
}

/* 0: an agent of an earlier version, which drains by the pinned program, gives fewer words. */
static __always_inline __u32 agent_word(struct __sk_buff *skb, const __u32 number)
{
	__u32 word = 0;

	return bpf_skb_load_bytes(skb, ETH_HLEN + number * sizeof(word), &word, sizeof(word)) ? 0 : word;
}

/*
 * The agent alone runs sweep_flows, promote_flow, end_flow and enter_flow.  Data of the first: a link header of zeros,
 * what the former run has returned, whether this is the agent's first run, and enum lasting.
 */
SEC("tc")
int sweep_flows(struct __sk_buff *skb)
{
	if (!settings.fast_path)
		return 0;
	return sweep(agent_word(skb, 0), agent_word(skb, 1), agent_word(skb, 2));
}

/* Data of the next two programs: a link header of zeros and a struct flow_read, or its key alone. */
static __always_inline bool read_flow(struct __sk_buff *skb, struct flow_read *read)
{
	if (!settings.fast_path)
		return false;
	if (!bpf_skb_load_bytes(skb, ETH_HLEN, read, sizeof(*read)))
		return true;
	__builtin_memset(read, 0, sizeof(*read));
	return !bpf_skb_load_bytes(skb, ETH_HLEN, &read->key, sizeof(read->key));
}

SEC("tc")
int promote_flow(struct __sk_buff *skb)
{
	struct flow_read read;

	return read_flow(skb, &read) ? promote(&read) : 0;
}

SEC("tc")
int end_flow(struct __sk_buff *skb)
{
	struct flow_read read;

	return read_flow(skb, &read) ? end(&read) : 0;
}

SEC("tc")
int enter_flow(struct __sk_buff *skb)
{
	struct tracked_flow tracked;

	if (!settings.fast_path || bpf_skb_load_bytes(skb, ETH_HLEN, &tracked, sizeof(tracked)))
		return 0;
	return enter_tracked(&tracked);
}

/*
 * Run by the agent with the client's end of each flow that conntrack has; then with zeros, which completes the filter.
 * Without the conntrack lookup: with the key of each flow straight to an endpoint.
 */
SEC("tc")
int note_tracked_flow(struct __sk_buff *skb)
{
	struct flow_key key __attribute__((aligned(8)));	/* its tag is computed by words */
	struct tracked_clients *t;

	if (!settings.fast_path || bpf_skb_load_bytes(skb, ETH_HLEN, &key, sizeof(key)))
		return 0;
	if (!settings.conntrack_lookup) {
		note_straight(&key);
		return 1;
	}
	t = tracked();
	if (!t)
		return 0;
	if (key.protocol)
		note_tracked(client_hash(&key, false), bpf_ktime_get_coarse_ns());
	else
		*(volatile __u32 *)&t->complete = settings.load;
	return 1;
}

/* Egress of every device that has tc_ethernet or tc_bridge_port: compares what left netfilter with what came in. */
SEC("tc")
int tc_egress(struct __sk_buff *skb)
{
	if (!settings.fast_path)
		return TC_ACT_UNSPEC;
	return observe(skb);
}

/* A port of a bridge. */
SEC("tc")
int tc_bridge_port(struct __sk_buff *skb)
{
	return ingress(skb, ETH_HLEN, true, false);
}

/* A device with Ethernet frames. */
SEC("tc")
int tc_ethernet(struct __sk_buff *skb)
{
	return ingress(skb, ETH_HLEN, false, false);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
