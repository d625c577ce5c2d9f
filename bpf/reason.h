/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Why a packet or a socket call was treated as it was.  The same names, in
 * lower case, are used in metrics, status and trace.  New reasons are added
 * at the end of their group; the name is an interface, the number is not.
 */
#ifndef PEP_REASON_H
#define PEP_REASON_H

enum reason {
	REASON_UNSPECIFIED,
	/* a new flow: opened in the flow table, handed to netfilter, translated at its socket */
	NEW_FLOW_FAST,
	NEW_FLOW_NETFILTER,
	NEW_FLOW_SOCKET,
	/* flows that were replaced */
	CLOSING_FLOW_REPLACED,
	STALE_UDP_REPLACED,
	UNTRANSLATED_FLOW_REPLACED,
	/* bridge */
	BRIDGED_REPLY_REDIRECTED,
	/* refused */
	REJECT_NO_ENDPOINTS,
	REJECT_NO_ENDPOINTS_SOCKET,
	/* dropped */
	DROP_NO_LOCAL_ENDPOINTS,
	DROP_SOURCE_RANGE,
	DROP_NO_LOCAL_ENDPOINTS_SOCKET,
	DROP_SOURCE_RANGE_SOCKET,
	DROP_LOOPBACK_DESTINATION,
	DROP_REWRITE_FAILED,
	DROP_AWAITING_PROMOTION,
	/* counted, then passed */
	TABLE_MISSING,
	SOCKET_REVNAT_FULL,
	/* flow table: packet sent by it; kernel flow entered, confirmed, found changed, removed */
	FLOW_HIT,
	FLOW_LEARNED,
	FLOW_CONFIRMED,
	FLOW_CHANGED,
	FLOW_FORGOTTEN,
	/* young flows: a pair got its permit; the kernel has taken a flow over; a flow ended */
	PERMIT_GRANTED,
	FLOW_PROMOTED,
	YOUNG_ENDED,
	/* XDP: sent; left to tc: egress device takes no such frames, checksum left to a device, or a bulk stream */
	XDP_FLOW_HIT,
	XDP_LEFT_DEVICE,
	XDP_LEFT_CHECKSUM,
	XDP_LEFT_STREAM,
	/* why a new flow takes the slow path */
	SLOW_NO_PERMIT,
	SLOW_QUOTA,
	SLOW_TABLE_FULL,
	SLOW_NO_PORT,
	/* why a packet of a known flow, or a new flow, takes the slow path */
	STACK_NO_AGENT,
	STACK_DRAINING,
	STACK_RULES,
	STACK_POLICY_ROUTED,
	STACK_IPSEC,
	STACK_ENDING,
	STACK_NOT_CONFIRMED,
	STACK_FRAGMENT,
	STACK_OPTIONS,
	STACK_HOPS,
	STACK_TOO_BIG,
	STACK_OTHER_DEVICE,
	STACK_DEVICE,
	STACK_NOT_PLAIN,
	/* besides NEW_FLOW_SOCKET: of these, those to a NodePort on 127.0.0.0/8 */
	LOCALHOST_NODE_PORT,
	REASON_COUNT,
};

#endif
