/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The endpoint that a translated socket uses, and the original destination of its application: stored in the socket
 * or, where that is not possible, in maps that all sockets share (socket_maps.h).  Several threads may use one socket
 * at the same time, hence the locks; no function may be called under them.
 */
#ifndef PEP_SOCKET_STORAGE_H
#define PEP_SOCKET_STORAGE_H

#include "backend.h"

/*
 * The field `position` of a socket's flow, which has no position in a list: when the flow began, in units of 2^20 ns.
 * The lowest bit tells whether it was answered.
 */
#define ANSWERED 1U
#define STREAM_AGE (2 * NANOSECONDS >> 20)	/* conntrack: younger flows with replies get the shorter timeout */

static __always_inline __u32 beginning(__u64 now)
{
	return (__u32)(now >> 20) & ~ANSWERED;
}

/* Whether conntrack would still have a flow with this record. */
static __always_inline bool is_alive(__u64 last_used, __u32 began, __u64 now)
{
	__u32 age = beginning(last_used) - (began & ~ANSWERED);
	__u32 seconds = (began & ANSWERED) && age > STREAM_AGE ? settings.udp_stream_seconds : settings.udp_seconds;

	/* Another CPU may have written last_used since `now`. */
	return now < last_used + seconds * NANOSECONDS;
}

static __always_inline bool is_at(const __u8 *address, const union address *wanted)
{
	const __u32 *a = (const void *)address;

	return a[0] == wanted->words[0] && a[1] == wanted->words[1] && a[2] == wanted->words[2] &&
	       a[3] == wanted->words[3];
}

/*
 * Without translation of pods' sockets the shared maps are enough: only the node's own sockets are in them, and an
 * entry there makes a connect cheaper than storage, which has to be allocated.
 */
static __always_inline bool uses_storage(struct bpf_sock *sk)
{
	return settings.pod_sockets && abilities.socket_storage && sk;
}

static __always_inline struct connected_revnat_value *connected_revnat_of(struct bpf_sock *sk, __u64 flags)
{
	return uses_storage(sk) ? bpf_sk_storage_get(&connected_revnat, sk, NULL, flags) : NULL;
}

static __always_inline struct socket_translations *translations_of(struct bpf_sock *sk, __u64 flags)
{
	return uses_storage(sk) ? bpf_sk_storage_get(&socket_translations, sk, NULL, flags) : NULL;
}

/* ---- from an endpoint to the original destination ----------------------------- */

/*
 * From socket storage: fills `original` and returns the `moved` flag, else NULL.  `at`: the endpoint; an IPv4 address
 * is followed by zeros.  `reply`: when a reply came from there; 0: none, this is only a look.
 */
static __always_inline __u8 *stored_original(struct bpf_sock *sk, const struct place *at, bool ipv6,
					     struct place *original, __u64 reply)
{
	struct connected_revnat_value *revnat = connected_revnat_of(sk, 0);
	struct socket_translations *all;
	__u64 newest = 0;
	__u32 found = 0;
	__u8 *moved = NULL;
	int i;

	if (revnat) {
		bpf_spin_lock(&revnat->lock);
		if (revnat->port && revnat->port == at->port && revnat->ipv6 == ipv6 &&
		    is_at(revnat->address, &at->address)) {
			__builtin_memcpy(&original->address, revnat->original, 16);
			original->port = revnat->original_port;
			moved = &revnat->moved;
		}
		bpf_spin_unlock(&revnat->lock);
		if (moved)
			return moved;
	}
	all = translations_of(sk, 0);
	if (!all)
		return NULL;
	bpf_spin_lock(&all->lock);
	for (i = 0; i < SOCKET_PEERS; i++) {
		struct socket_translation *t = &all->translations[i];

		/* An endpoint of two services: use the service that was used last. */
		if (t->backend && t->last_used > newest && t->port == at->port && t->ipv6 == ipv6 &&
		    is_at(t->address, &at->address)) {
			newest = t->last_used;
			found = i + 1;
		}
	}
	if (found) {
		struct socket_translation *t = &all->translations[(found - 1) % SOCKET_PEERS];

		__builtin_memcpy(&original->address, t->original, 16);
		original->port = t->original_port;
		moved = &t->moved;
		if (reply) {
			t->last_used = reply;
			t->began |= ANSWERED;
		}
	}
	bpf_spin_unlock(&all->lock);
	return moved;
}

/* `answered`: receives where the entry has the time of the last reply. */
static __always_inline __u8 *shared_original(__u64 cookie, const struct place *at, enum protocol protocol, bool ipv6,
					     struct place *original, __u8 **answered)
{
	if (ipv6) {
		struct socket_revnat6_key key = { .cookie = cookie, .port = at->port, .protocol = protocol };
		struct socket_revnat6_value *revnat;

		__builtin_memcpy(key.address, &at->address, 16);
		revnat = bpf_map_lookup_elem(&socket_revnat6, &key);
		if (!revnat)
			return NULL;
		__builtin_memcpy(&original->address, revnat->address, 16);
		original->port = revnat->port;
		*answered = &revnat->answered;
		return &revnat->moved;
	} else {
		struct socket_revnat4_key key = { .cookie = cookie, .port = at->port, .protocol = protocol };
		struct socket_revnat4_value *revnat;

		__builtin_memcpy(key.address, &at->address, 4);
		revnat = bpf_map_lookup_elem(&socket_revnat4, &key);
		if (!revnat)
			return NULL;
		__builtin_memcpy(&original->address, revnat->address, 4);
		original->port = revnat->port;
		*answered = &revnat->answered;
		return &revnat->moved;
	}
}

/* As stored_original; `original` must be zero before the call. */
static __always_inline __u8 *find_original(struct bpf_sock *sk, __u64 cookie, const struct place *at,
					   enum protocol protocol, bool ipv6, struct place *original)
{
	__u8 *moved = stored_original(sk, at, ipv6, original, 0), *answered;

	return moved ? moved : shared_original(cookie, at, protocol, ipv6, original, &answered);
}

#endif
