/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Why a packet or a socket call was treated as it was.  One enum; the same
 * names (lower case) are in metrics, status and trace.  New reasons are added
 * at the end of their group; the number is not an interface, the name is.
 */
#ifndef PEP_REASON_H
#define PEP_REASON_H

enum reason {
	REASON_UNSPECIFIED,
	/* a new flow, by lane */
	NEW_FLOW_DIRECT,
	NEW_FLOW_NETFILTER,
	NEW_FLOW_SOCKET,
	/* why a flow took the netfilter lane */
	LANE_SCTP,
	LANE_BACKEND_OUTSIDE,
	LANE_FORCED,
	LANE_NO_ROUTE,
	/* flows that were replaced */
	CLOSING_FLOW_REPLACED,
	STALE_UDP_REPLACED,
	UNTRANSLATED_FLOW_REPLACED,
	/* bridge */
	BRIDGED_REPLY_LIFTED,
	/* refused */
	REJECT_NO_ENDPOINTS,
	REJECT_NO_ENDPOINTS_SOCKET,
	/* dropped */
	DROP_NO_LOCAL_ENDPOINTS,
	DROP_SOURCE_RANGE,
	DROP_CONNTRACK_FULL,
	DROP_INSERT_FAILED,
	DROP_NAT_FAILED,
	DROP_NO_LOCAL_ENDPOINTS_SOCKET,
	DROP_SOURCE_RANGE_SOCKET,
	DROP_LOOPBACK_DESTINATION,
	DROP_REWRITE_FAILED,
	/* said, then passed */
	INSERT_RACE,
	TABLE_MISSING,
	SOCKET_PEER_FULL,
	/* the flow cache: sent by it; not in it; in it, asked again; a new entry; one taken out; nothing to enter yet */
	FLOW_HIT,
	FLOW_MISS,
	FLOW_STALE,
	FLOW_LEARNED,
	FLOW_FORGOTTEN,
	FLOW_NOT_YET,
	/* XDP: sent by it; packets that the cache knows left to tc: their way out takes no frames; the sender left the
	 * checksum to a device */
	XDP_FLOW_HIT,
	XDP_LEFT_DEVICE,
	XDP_LEFT_CHECKSUM,
	/* why a packet of a flow goes to the kernel and not by the cache */
	STACK_NO_AGENT,
	STACK_POLICY_ROUTED,
	STACK_IPSEC,
	STACK_NOT_TRANSLATED,
	STACK_SPECIAL_FLOW,
	STACK_ENDING,
	STACK_FRAGMENT,
	STACK_OPTIONS,
	STACK_HOPS,
	STACK_TOO_BIG,
	STACK_NO_ROUTE,
	STACK_NO_NEIGHBOUR,
	STACK_OTHER_DEVICE,
	STACK_DEVICE,
	STACK_NOT_PLAIN,
	REASON_COUNT,
};

#endif
