/* SPDX-License-Identifier: Apache-2.0 */
/* What flood.c tells its programs. */
#ifndef BENCH_FLOOD_H
#define BENCH_FLOOD_H

struct flood {
	__u32 device;			/* where frames leave */
	__u32 flows;			/* that take turns; 0: every frame is of another one */
	__u32 begin;			/* the number of the first of those others: another one in each run */
	__u32 source;			/* the first address, in host order; others follow */
	__u32 destination;		/* in network order */
	__u16 port;			/* in network order */
	__u8 to[6];
	__u8 from[6];
	__u16 sum;			/* of the IPv4 header without the source */
};

struct flood_made {
	__u64 frames;
	__u64 first, last;		/* CLOCK_MONOTONIC, nanoseconds; the last of FLOOD_CLOCK frames */
};

#define FLOOD_CLOCK 256
#define FLOOD_PAYLOAD 18		/* with 4 bytes of checksum that no virtual device has, 64 on the wire */
#define FLOOD_FIRST_PORT 10000
#define FLOOD_PORTS 0x4000		/* of each source address; more than flows that take turns */

#define FLOOD_SOURCES 100000		/* of 198.18.0.0/15, where new flows may begin */

#endif
