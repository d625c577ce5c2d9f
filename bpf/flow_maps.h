/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The fast path: the flow table, permits for young flows, and the hand-over records of the ingress programs for the
 * observer at egress.  docs/fast-path.md explains the idea.  The rules of maps.h apply here, too.
 */
#ifndef PEP_FLOW_MAPS_H
#define PEP_FLOW_MAPS_H

#include "maps.h"

/* Addresses and ports of a packet as it comes in. Each direction of a flow has its own key. */
struct flow_key {
	__u8 source[16];	/* IPv4 in the first four bytes */
	__u8 destination[16];
	__u16 source_port;
	__u16 destination_port;
	enum protocol protocol;
	__u8 ipv6;
	__u8 zero[2];
};

/* Which XDP frames a device sends. */
enum xdp_frames {
	NO_FRAMES = 0,
	ONE_BUFFER = 1,
	ANY_FRAMES = 2,		/* also those of several buffers */
} __attribute__((packed));

/* How packets leave: learned from a packet that the kernel has sent. */
struct link {
	__u32 device;
	__u8 mac_to[6];
	__u8 mac_from[6];
	__u16 mtu;
	enum redirect_mode redirect;
	__u8 first_fragment;	/* in flow_fragments: when the first fragment was sent (fragments.h); else 0 */
};

/*
 * How a packet is rewritten.  All fields are written before the entry can be found.  The kernel may give the element to
 * another flow at any time, so a reader checks that `tag` and `tag_again` are both the tag of its key.
 */
struct flow_rewrite {
	__u32 tag;
	__u32 device_in;	/* the exact device: a bridge port, not the bridge */
	__u8 source[16];	/* the new source */
	__u8 destination[16];
	__u16 source_port;
	__u16 destination_port;
	__u32 address_sum;	/* how the new addresses and ports change a checksum */
	__u32 port_sum;
	struct link out;
	__u8 mac_in[6];		/* frames for another address are not for this node */
	__u16 fragment_sent;	/* in flow_fragments: when the newest fragment was sent (fragments.h) */
	__u32 tag_again;
};

enum agent_request {
	NO_REQUEST = 0,
	PROMOTION = 1,		/* promote the young flow */
	CLOSE = 2,		/* close the conntrack entry of a kernel flow that was reset */
	RESTORE = 3,		/* restore it: a FIN or RST that the other side ignores has shortened its timeout */
	RESTORING = 4,		/* the same; the agent has been asked once */
	SHORTEN = 5,		/* shorten its timeout: one side has vanished */
};

enum closing {
	CLOSING = 1,		/* a FIN or RST was seen; it may have been forged */
	CLOSING_IN_SEQUENCE = 2,	/* its sequence number was the expected one; for a kernel's flow: a RST */
	/* a young flow: a RST followed data that the other side had not acknowledged yet; a kernel's: a SYN followed a RST */
	CLOSING_BY_RESET = 3,
};

enum first_packet {
	LEFT_BY_XDP = 1,
	RENEWED = 2,		/* UDP: the first query after a pause (renew.h) */
};

/*
 * One direction of a flow.
 * A young flow is not in conntrack: only its entries can translate its packets.
 * Any other flow is a kernel's flow.  While it is confirmed, its packets are sent by this entry.  A packet that is not
 * sent goes through netfilter, which translates it in the same way.
 */
struct flow {
	struct flow_rewrite rewrite;
	__u32 generation;	/* of fast_path when the flow was confirmed or created */
	__u64 started;		/* bpf_ktime_get_coarse_ns(), as the next two */
	__u64 last_seen;
	__u64 confirmed_until;	/* kernel's flow: for 1 s after a packet has left netfilter as in `rewrite` */
	__u32 packets;		/* sent by this entry */
	__u32 acknowledged;	/* TCP: the sequence number that this side expects next */
	__u32 service;
	__u32 backend;		/* 0: not known */
	__u8 young;
	__u8 reply;		/* the direction from the endpoint to the client */
	__u8 closing;		/* enum closing: RST or FIN seen; 0 again if the flow continues */
	__u8 promote;		/* enum agent_request: what the agent has been asked to do */
	__u8 bulk;		/* XDP leaves this direction to tc */
	__u8 first_counted;	/* not 0: `packets` includes the first packet; enum first_packet */
	__u16 sent_until;	/* TCP: lower half of the sequence number after what this side sent last */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 131072);
	__type(key, struct flow_key);
	__type(value, struct flow);
} flows SEC(".maps");

#define EXCHANGE_BUCKETS 3072
#define EXCHANGE_WAYS 4
#define EXCHANGES (EXCHANGE_BUCKETS * EXCHANGE_WAYS)

/*
 * The two directions of a young UDP flow of a few packets, as a query and its reply.  It lives in one element of an
 * array, because inserting two elements into a hash and deleting them takes longer than all the rest.  Client address
 * and port select a bucket, which has four elements.  A flow that needs more is moved to `flows` (exchange.h).
 */
struct exchange {
	struct flow_rewrite there;
	struct flow_rewrite reply;
	__u32 generation;	/* as in struct flow, as the next two */
	__u32 service;
	__u32 backend;
	__u8 ipv6;
	__u8 zero[11];		/* three cache lines */
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, EXCHANGES);
	__type(key, __u32);
	__type(value, struct exchange);
} exchanges SEC(".maps");

/* What tells whether a new flow may have an element. */
struct exchange_head {
	__u32 owner;		/* odd: the element is being written; the upper bits count how often it was */
	__u32 started;		/* as the next one: exchange_clock() */
	__u32 last_seen;
	__u8 queries;		/* as `packets` of struct flow */
	__u8 replies;
	__u8 first_counted;	/* as in struct flow */
	__u8 distant;		/* the client is on another machine */
};

/* Apart from the elements: what most packets need is one line of it. */
struct exchange_bucket {
	__u32 there[EXCHANGE_WAYS];	/* the tags of both keys of each element; 0: it is free */
	__u32 reply[EXCHANGE_WAYS];
	struct exchange_head way[EXCHANGE_WAYS];
	__u8 zero[32];		/* two cache lines */
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, EXCHANGE_BUCKETS);
	__type(key, __u32);
	__type(value, struct exchange_bucket);
} exchange_heads SEC(".maps");

#define FILTER_BYTES 16384	/* so few that they stay in the CPU's cache */

/*
 * Which clients' addresses and ports `flows` may have UDP flows of, by a hash: when an entry was inserted or was last
 * seen by the sweep (note_in_table()).  It saves most lookups of datagrams that the table does not have.
 */
struct udp_filter {
	__u8 noted[FILTER_BYTES];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct udp_filter);
} udp_filter SEC(".maps");

#define TRACKED_BYTES 65536

/*
 * Which clients' addresses and ports conntrack may have flows of, by a hash: when netfilter last got a SYN or a datagram
 * (note_tracked()).  It saves the lookup of new flows in conntrack.
 */
struct tracked_clients {
	__u32 complete;		/* settings.load of the programs for which the agent has noted what conntrack had */
	__u8 noted[TRACKED_BYTES];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct tracked_clients);
} tracked_clients SEC(".maps");

#define STRAIGHT_SLOTS 32768

/* A flow from a client straight to an endpoint, by the tag of its key: when the kernel last got a SYN or a datagram of it. */
struct straight_flow {
	__u32 tag;
	__u32 when;		/* filter_clock() */
};

/* Used without the conntrack lookup. A later flow with the same upper bits takes the place of an earlier one. */
struct straight_flows {
	struct straight_flow noted[STRAIGHT_SLOTS];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct straight_flows);
} straight_flows SEC(".maps");

/* New young UDP flows of this CPU, and those whose bucket was full, in the current and in the last window of 2^28 ns. */
struct exchange_rate {
	__u64 window;
	__u32 opened;
	__u32 opened_before;
	__u32 full;
	__u32 full_before;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct exchange_rate);
} exchange_rates SEC(".maps");

/* What the last sweep has found. */
struct exchange_sweep_result {
	__u32 used;		/* elements in use */
	__u32 when;		/* filter_clock(): it has noted all UDP flows of the table in udp_filter */
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct exchange_sweep_result);
} exchange_sweeps SEC(".maps");

/* Fragmented packets of young flows whose first fragment was sent: later fragments have no ports and follow it. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1024);
	__type(key, struct fragments);
	__type(value, struct flow_rewrite);
} flow_fragments SEC(".maps");

/* How many live young flows were opened by packets of a device (key: ifindex). */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, __u32);
} young_counts SEC(".maps");

#define RECENT_FLOWS 4096

/*
 * A ring of the young flows that this CPU opened last.  A new flow takes the slot of an old one.  If all datagrams of
 * the old flow have been answered, or both its sides have closed, the old flow is removed from the table.  So short
 * flows do not fill the table, however many there are.  The last two bytes of an entry, which are zero in a key, are
 * recent_stamp().
 */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, RECENT_FLOWS);
	__type(key, __u32);
	__type(value, struct flow_key);
} recent_flows SEC(".maps");

#define RECENT_ENDS 4096

/* Tags of young flows that have ended, by the tag's upper bits: their slots of recent_flows need no lookup. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, RECENT_ENDS);
	__type(key, __u32);
	__type(value, __u32);
} recent_ends SEC(".maps");

/*
 * [0]: the next slot of recent_flows; the upper bits count the source ports that were allocated.  [1]: the current
 * second, and how many flows without a permit were entered in it (young.h).
 */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 2);
	__type(key, __u32);
	__type(value, __u32);
} recent_next SEC(".maps");

/*
 * The coarse clock as this CPU has read it in this tick, in which it does not advance.  Reading it takes three function
 * calls; reading the number of the tick takes none.
 */
struct tick {
	__u64 number;		/* bpf_jiffies64() */
	__u64 now;		/* bpf_ktime_get_coarse_ns() */
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct tick);
} ticks SEC(".maps");

/* Keys (client to frontend) of flows for which the agent has something to do: enum agent_request. */
struct {
	__uint(type, BPF_MAP_TYPE_QUEUE);
	__uint(max_entries, 8192);
	__uint(key_size, 0);
	__uint(value_size, sizeof(struct flow_key));
} promotions SEC(".maps");

/* ---- permits ------------------------------------------------------------- */

/*
 * The pair whose new flows may be young: a client at a device, and an endpoint.  By each frontend separately, because
 * rules may deny one of them: they see its address before the translation, and conntrack knows it afterwards.
 */
struct permit_key {
	__u32 device;
	__u16 port;
	enum protocol protocol;
	__u8 ipv6;
	__u8 client[16];
	__u8 endpoint[16];
	__u32 frontend;		/* a hash of its address and port; the lowest bit: masqueraded */
};

struct permit {
	__u64 until;		/* bpf_ktime_get_coarse_ns(): 1 s after a new flow of the pair has passed netfilter */
	__u64 back_until;	/* the same for the link back to the client */
	__u32 generation;	/* permit_generation of fast_path */
	__u32 device_back;	/* where replies come in */
	struct link out;
	struct link back;
	__u8 mac_in_back[6];	/* the MAC address that replies are sent to */
	__u8 zero[2];
	__u8 snat[16];		/* masqueraded: the source address that netfilter chose */
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 8192);
	__type(key, struct permit_key);
	__type(value, struct permit);
} permits SEC(".maps");

#define SIGHTING_BITS 14

/*
 * Counts the packets of pairs and flows, by a hash: the tag in the upper half, a time in seconds and a count in the
 * lower half.  A spoofed source, or a flow that ends at once, is counted here but gets no permit and no entry in
 * `flows`.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1 << SIGHTING_BITS);
	__type(key, __u32);
	__type(value, __u64);
} flow_packet_counts SEC(".maps");

/* ---- what ingress hands over to the observer ------------------------------ */

enum handover_kind {
	HANDOVER_OPEN = 1,	/* the first packet of a flow; a backend was chosen */
	HANDOVER_REPLY = 2,	/* an endpoint's packet of a flow that the table does not know */
	HANDOVER_CONFIRM = 3,	/* a packet of a kernel flow that must be confirmed */
} __attribute__((packed));

/*
 * skb->tc_index: the mark, and a record's number above five bits that stay 0.  They are flags of Cilium's programs, which
 * see the packet later: with the lowest one they skip the NetworkPolicy of the pod that receives it.
 */
#define HANDOVER_SLOTS 64
#define HANDOVER_MARK 0xA000
#define HANDOVER_NUMBER 0xFF
#define HANDOVER_SHIFT 5

/* A packet that is going through netfilter on this CPU; skb->tc_index names the record. */
struct handover {
	struct flow_key key;
	__u64 when;		/* bpf_ktime_get_coarse_ns() */
	__u32 number;		/* never 0 in skb->tc_index; 0: empty */
	__u32 device;		/* the device it came in by */
	__u32 ip_device;	/* the same as the IP layer sees it: for a bridge port, its bridge */
	__u32 service;
	__u32 backend;
	__u16 endpoint_port;
	enum handover_kind kind;
	__u8 masquerade;
	__u8 endpoint[16];
	__u8 mac_to[6];		/* of the frame as it came in */
	__u8 mac_from[6];
	__u8 learn;		/* HANDOVER_REPLY: also enter the flow */
	__u8 nonce[3];		/* HANDOVER_OPEN: skb->hash, from the lowest byte on */
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, HANDOVER_SLOTS);
	__type(key, __u32);
	__type(value, struct handover);
} handovers SEC(".maps");

/* Space to build entries that are too large for the stack. */
struct flow_draft {
	struct flow_key key;	/* a copy: Linux 6.1 does not accept an argument of a global function as a key */
	struct flow_key reply_key;
	struct flow there;
	struct flow reply;
	struct permit_key permit_key;
	struct permit permit;
	__u16 asked_port;	/* a source port that conntrack does not have for these replies; 0: the client's */
	__u16 source_port;	/* the one that is tried */
	__u32 zero;
};

/* A packet may arrive during a sweep. */
enum draft_user {
	FOR_PACKETS = 0,
	FOR_SWEEP = 1,
	DRAFT_USERS = 2,
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, DRAFT_USERS);
	__type(key, __u32);
	__type(value, struct flow_draft);
} flow_drafts SEC(".maps");

/* ---- the state of the agent --------------------------------------------------- */

/* One entry, written by the agent. */
struct fast_path {
	__u64 alive_until;	/* CLOCK_MONOTONIC, ns: until then the agent follows rules, routes and devices */
	__u32 generation;	/* changes with routes, devices, neighbours, UDP endpoints: voids confirmations */
	__u32 permit_generation;	/* changes with rulesets, routes, devices, neighbours: older permits are void */
	enum slow_path_reason closed4;	/* NOT_SLOW: IPv4 may take the fast path */
	enum slow_path_reason closed6;
	__u32 draining;		/* no new young flows; existing ones go to the kernel */
	__u16 snat_port_min;	/* source ports that only young flows take, while not draining; 0 and 0: none */
	__u16 snat_port_max;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct fast_path);
} fast_path SEC(".maps");

/*
 * By family (0: IPv4, 1: IPv6): the bits of packets' marks that rules restore from flows and that choose routes.  Written
 * by the agent.  conntrack has no mark for a flow that was promoted, so flows with one of these bits stay in netfilter.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 2);
	__type(key, __u32);
	__type(value, __u32);
} route_marks SEC(".maps");

/* What the last run of sweep_flows found. */
struct sweep_result {
	__u32 entries;
	__u32 young;		/* flows, not entries */
	__u32 ended;
	__u32 requested;	/* keys put into `promotions` */
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct sweep_result);
} sweep_results SEC(".maps");

#endif
