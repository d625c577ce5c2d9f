/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Counts every decision about a flow, and reports it to `pyebpf-proxy trace`.  Without a tracing process, the report
 * costs reading one word.
 */
#ifndef PEP_TRACE_H
#define PEP_TRACE_H

#include "ctx.h"
#include "slots.h"

#define ENOENT_ 2

static __always_inline __u32 receiving_device(struct context *ctx);

/* Compares one of the addresses of an event. */
static __always_inline bool same_bytes(const __u8 *a, const __u8 *b, bool ipv6)
{
	return same_address((const union address *)a, (const union address *)b, ipv6);
}

static __always_inline bool has_address(const struct tracing *t, const struct decision *event)
{
	bool ipv6 = event->ipv6;

	if (!t->family)
		return true;
	if (t->family != (ipv6 ? 6 : 4))
		return false;
	return same_bytes(t->address, event->source, ipv6) || same_bytes(t->address, event->destination, ipv6) ||
	       same_bytes(t->address, event->endpoint, ipv6);
}

static __always_inline bool has_port(const struct tracing *t, const struct decision *event)
{
	return !t->port || t->port == event->source_port || t->port == event->destination_port ||
	       t->port == event->endpoint_port;
}

/* A decision made before the service was looked up matches: the reader filters it. */
static __always_inline bool has_service(const struct tracing *t, const struct decision *event)
{
	__u32 i;

	if (!t->service_count || !event->service)
		return true;
	for (i = 0; i < TRACED_SERVICES; i++)
		if (i < t->service_count && t->services[i] == event->service)
			return true;
	return false;
}

static __always_inline bool is_wanted(const struct tracing *t, const struct decision *event)
{
	if (!(t->reasons >> (event->reason & 63) & 1) || (t->device && t->device != event->device))
		return false;
	if (t->protocol && t->protocol != event->protocol)
		return false;
	return has_address(t, event) && has_port(t, event) && has_service(t, event);
}

/* Global for the same reason as judge_syn(): nearly every verdict calls it. */
__noinline int emit_event(struct context *ctx, const struct packet *p, const struct endpoint_selection *e,
			  const struct backend *b, __u32 reason)
{
	struct decision event = { .when = bpf_ktime_get_boot_ns(), .reason = reason, .hook = HOOK };
	struct tracing *t;
	__u32 zero = 0;
	long failed;

	t = bpf_map_lookup_elem(&tracing, &zero);
	if (!t || !p)
		return 0;
	__builtin_memcpy(event.source, &p->source, 16);
	__builtin_memcpy(event.destination, &p->destination, 16);
	event.source_port = p->source_port;
	event.destination_port = p->destination_port;
	event.protocol = p->protocol;
	event.ipv6 = p->ipv6;
	event.device = receiving_device(ctx);
	if (e) {
		event.service = e->service;
		event.masquerade = e->masquerade;
		event.slow = e->slow;
	}
	if (b && b->id) {
		event.backend = b->id;
		event.endpoint_port = b->port;
		__builtin_memcpy(event.endpoint, &b->address, 16);
	}
	if (!is_wanted(t, &event))
		return 0;
	if (HOOK == AT_SOCKET) {
		event.process = bpf_get_current_pid_tgid() >> 32;
		bpf_get_current_comm(event.command, sizeof(event.command));
	}
	failed = bpf_perf_event_output(ctx, &decisions, BPF_F_CURRENT_CPU, &event, sizeof(event));
	if (failed == -ENOENT_)
		t->process = 0;	/* the reader and its rings are gone */
	else if (failed)
		__sync_fetch_and_add(&t->lost, 1);
	return 0;
}

/* `reason`: as in count(). `e` and `b` may be NULL: not known yet, or no endpoint was chosen. */
static __always_inline void decided(struct context *ctx, const struct packet *p, const struct endpoint_selection *e,
				    const struct backend *b, __u32 reason)
{
	struct tracing *t;
	__u32 zero = 0;

	count(reason);
	t = bpf_map_lookup_elem(&tracing, &zero);
	if (t && *(volatile __u32 *)&t->process)
		emit_event(ctx, p, e, b, reason);
}

_Static_assert(COUNTERS_END <= 64, "a bit of struct tracing for each reason");

#endif
