/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Checks before a pod's socket is translated. pods.h has what tc learns for them. */
#ifndef PEP_POD_SOCKETS_H
#define PEP_POD_SOCKETS_H

#include "backend.h"

/* After this time one socket is left to tc again, so that a changed address is noticed. */
#define POD_SOURCE_SECONDS 60

/* Leaves a socket to tc, which learns the namespace and the chosen backend with the socket's first packet. */
static __noinline int defer_to_tc(__u64 cookie, __u64 netns, __u32 service, __u32 backend)
{
	struct deferred_socket left = { .netns = netns, .service = service, .backend = backend };

	bpf_map_update_elem(&deferred_sockets, &cookie, &left, BPF_ANY);
	return 0;
}

enum pod_state {
	POD_UNKNOWN,
	POD_STALE,	/* learned too long ago */
	POD_LEFT,	/* left to tc */
	POD_SERVED,
};

static __always_inline bool is_same(const union address *a, const __u8 *address)
{
	const __u32 *b = (const void *)address;

	return a->words[0] == b[0] && a->words[1] == b[1] && a->words[2] == b[2] && a->words[3] == b[3];
}

/* What this socket's packets will look like to tc. Fills `device`, and `p->source` if the socket is unbound. */
static __noinline int pod_state(__u64 netns, struct packet *p, __u32 *device)
{
	struct pod_key key = { .netns = netns, .family = family_of(p->ipv6) };
	struct pod_source *source = bpf_map_lookup_elem(&pod_sources, &key);

	bool old;

	if (!source)
		return POD_UNKNOWN;
	old = bpf_ktime_get_ns() - source->learned > POD_SOURCE_SECONDS * NANOSECONDS;
	if (!source->served)
		return old ? POD_UNKNOWN : POD_LEFT;
	*device = source->device;
	if (!(p->source.words[0] | p->source.words[1] | p->source.words[2] | p->source.words[3]))
		__builtin_memcpy(&p->source, source->address, 16);
	else if (!is_same(&p->source, source->address))
		return POD_LEFT;	/* bound to an address that was not seen from there */
	return old ? POD_STALE : POD_SERVED;
}

/* ---- whether anything in a network namespace must see the packet as the application sent it ---- */

#define LOCAL_OUT 3		/* NF_INET_LOCAL_OUT */
/* NF_IP_PRI_SELINUX_FIRST: hooks of security modules. Every namespace has them, and they change nothing. */
#define SECURITY_PRIORITY (-225)
#define DEVICES_MAX 16
#define DEVICE_UP 1
#define DEVICE_LOOPBACK 8

/* Whether netfilter rules apply to what the namespace sends: a service mesh, for example, redirects it. */
static __noinline int has_rules(struct nf_hook_entries *hooks)
{
	struct nf_hook_ops *only = NULL;
	__u16 count = BPF_CORE_READ(hooks, num_hook_entries);

	if (!hooks || !count)
		return 0;
	if (count > 1)
		return 1;
	/* The entries are followed by pointers to the struct nf_hook_ops with which each was registered. */
	bpf_probe_read_kernel(&only, sizeof(only),
			      (void *)hooks + bpf_core_field_offset(struct nf_hook_entries, hooks) +
				      count * bpf_core_type_size(struct nf_hook_entry));
	return BPF_CORE_READ(only, priority) != SECURITY_PRIORITY;
}

struct walk {
	struct list_head *next;
	struct list_head *end;
	__u32 devices_up;
};

static long count_device_up(__u32 i __attribute__((unused)), struct walk *w)
{
	struct list_head *here = w->next;
	struct net_device *d = (void *)here - bpf_core_field_offset(struct net_device, dev_list);
	__u32 flags;

	if (here == w->end)
		return 1;
	flags = BPF_CORE_READ(d, flags);
	if ((flags & (DEVICE_UP | DEVICE_LOOPBACK)) == DEVICE_UP)
		w->devices_up++;
	w->next = BPF_CORE_READ(here, next);
	return 0;
}

/* Whether only one device of the namespace is up. With several, the source may depend on the destination. */
static __noinline int has_one_network(struct net *net)
{
	struct walk w = {
		.next = BPF_CORE_READ(net, dev_base_head.next),
		.end = (void *)net + bpf_core_field_offset(struct net, dev_base_head),
	};
	int i;

	if (abilities.loop)
		bpf_loop(DEVICES_MAX, count_device_up, &w, 0);
	else
		for (i = 0; i < DEVICES_MAX; i++)
			if (count_device_up(i, &w))
				break;
	return w.next == w.end && w.devices_up == 1;
}

/* Whether a packet leaves the calling process' network namespace unchanged, by its only device. */
static __noinline int leaves_unchanged(__u64 netns, bool ipv6)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	struct net *net = BPF_CORE_READ(task, nsproxy, net_ns);

	/* A socket of another namespace than its process is rare and cannot be checked from here. */
	if (BPF_CORE_READ(net, net_cookie) != netns)
		return 0;
	if (has_rules(ipv6 ? BPF_CORE_READ(net, nf.hooks_ipv6[LOCAL_OUT]) : BPF_CORE_READ(net, nf.hooks_ipv4[LOCAL_OUT])))
		return 0;
	return has_one_network(net);
}

#endif
