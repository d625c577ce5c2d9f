/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Included first by every program. */
#ifndef PEP_COMMON_H
#define PEP_COMMON_H

#include "vmlinux.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_core_read.h>

#include "maps.h"
#include "flow_maps.h"
#include "xdp_maps.h"
#include "trace_maps.h"
#include "settings.h"
#include "abilities.h"

/* libbpf's offsetof is not a constant expression for _Static_assert. */
#undef offsetof
#define offsetof(type, member) __builtin_offsetof(type, member)

#define ETH_P_IP 0x0800
#define ETH_P_IPV6 0x86DD
#define ETH_HLEN 14
#define AF_INET 2
#define AF_INET6 10
#define NANOSECONDS 1000000000ULL

/*
 * The compiler moves unlikely code behind the rest.  So the code of a packet of a known flow fills few cache lines, which
 * the kernel's own code has displaced since the packet before.
 */
#define likely(condition) __builtin_expect(!!(condition), 1)
#define unlikely(condition) __builtin_expect(!!(condition), 0)

/*
 * The context (ctx_*.h) must be read at a constant offset.  Otherwise the compiler merges such reads into one at
 * a computed offset, which the verifier rejects.
 */
#define CONTEXT_POINTER(ctx, field)                                                   \
	({                                                                            \
		void *pointer;                                                        \
		asm volatile("%0 = *(u32 *)(%1 + %2)"                                 \
			     : "=r"(pointer)                                          \
			     : "r"(ctx), "i"(offsetof(struct context, field)));              \
		pointer;                                                              \
	})

/* Puts the names into the BTF of the object, where the control plane reads them. */
const volatile struct reason_names {
	enum drop_reason drop;
	enum slow_path_reason slow_path;
	enum counter counter;
} reason_names SEC(".rodata") = {};

/* A UDP flow that was answered, and then idle for longer: conntrack has forgotten it. */
static __always_inline __u64 forgotten_udp_ns(void)
{
	return (settings.udp_stream_seconds + 60ULL) * NANOSECONDS;
}

/* Whether every program that opens flows looks them up in conntrack first. XDP cannot. */
static __always_inline bool conntrack_is_asked(void)
{
	return settings.conntrack_lookup && !settings.xdp;
}

/* `counter`: a value of one of the three enums in reason.h. */
static __always_inline void count(__u32 counter)
{
	__u64 *value = bpf_map_lookup_elem(&counters, &counter);

	if (likely(value))
		*value += 1;
}

#endif
