/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Why a packet or a socket call was treated as it was.  The same names, in
 * lower case, are used in metrics, status and trace.  The three enums number
 * the elements of the map `counters`: a number belongs to one of them.  An
 * older agent's map is adopted, so a name keeps its number.
 *
 * A new name, of whichever enum, gets the number of COUNTERS_END, written out
 * and at the end of its enum; COUNTERS_END then grows by one.  README.md lists
 * the other places.
 */
#ifndef PEP_REASON_H
#define PEP_REASON_H

#define FIRST_DROP_REASON 8
#define FIRST_SLOW_PATH_REASON 28

/* Why a packet or a socket call was refused or dropped. */
enum drop_reason {
	NOT_DROPPED,
	/* refused */
	REJECT_NO_ENDPOINTS = FIRST_DROP_REASON,
	REJECT_NO_ENDPOINTS_SOCKET,
	/* dropped */
	DROP_NO_LOCAL_ENDPOINTS,
	DROP_SOURCE_RANGE,
	DROP_NO_LOCAL_ENDPOINTS_SOCKET,
	DROP_SOURCE_RANGE_SOCKET,
	DROP_LOOPBACK_DESTINATION,
	DROP_REWRITE_FAILED,
	DROP_AWAITING_PROMOTION,
	SERVICE_CONFIG_MISSING,
	DROP_REASONS_END,
};

/* Why a packet takes the slow path. */
enum slow_path_reason {
	NOT_SLOW,
	/* left to tc by XDP: egress device takes no such frames, checksum left to a device, or a bulk stream */
	XDP_LEFT_DEVICE = FIRST_SLOW_PATH_REASON,
	XDP_LEFT_CHECKSUM,
	XDP_LEFT_STREAM,
	/* a new flow */
	SLOW_NO_PERMIT,
	SLOW_QUOTA,
	SLOW_TABLE_FULL,
	SLOW_NO_PORT,
	/* a packet of a known flow, or a new flow */
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
	SLOW_PATH_REASONS_END,
	/* the observer: the packet left netfilter with a mark that may have chosen its route */
	STACK_ROUTE_MARK = 51,
};

/* What else is counted. */
enum counter {
	NOT_COUNTED,
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
	/* a socket's translation is not kept, so its replies are not translated back */
	SOCKET_REVNAT_FULL = DROP_REASONS_END,
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
	/* XDP: sent */
	XDP_FLOW_HIT,
	/* a subset of NEW_FLOW_SOCKET: those to a NodePort on 127.0.0.0/8 */
	LOCALHOST_NODE_PORT = SLOW_PATH_REASONS_END,
	/* a flow that was replaced: TCP, unanswered, to an endpoint that is gone */
	UNANSWERED_FLOW_REPLACED = 50,
	/* the first free number of all three enums */
	COUNTERS_END = 52,
};

_Static_assert(BRIDGED_REPLY_REDIRECTED < FIRST_DROP_REASON && DROP_REASONS_END == 18 &&
		       XDP_FLOW_HIT < FIRST_SLOW_PATH_REASON && SLOW_PATH_REASONS_END == 49 &&
		       (int)UNANSWERED_FLOW_REPLACED < (int)STACK_ROUTE_MARK && (int)STACK_ROUTE_MARK < (int)COUNTERS_END,
	       "a name keeps its number: a new one gets the number of COUNTERS_END");

#endif
