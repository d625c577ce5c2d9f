/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The endpoint that a translated socket uses, and the original destination of its application: stored in the socket
 * or, where that is not possible, in maps that all sockets share (socket_maps.h).  Several threads may use one socket
 * at the same time, hence the locks; no function may be called under them.
 */
#ifndef PEP_SOCKET_STORAGE_H
#define PEP_SOCKET_STORAGE_H

#include "backend.h"

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
 * From socket storage: fills `asked` and returns the `moved` flag, else NULL.  `at`: the endpoint; an IPv4 address is
 * followed by zeros.
 */
static __always_inline __u8 *stored_peer(struct bpf_sock *sk, const struct place *at, bool ipv6, struct place *asked)
{
	struct connected_revnat_value *peer = connected_revnat_of(sk, 0);
	struct socket_translations *all;
	__u64 newest = 0;
	__u32 found = 0;
	__u8 *moved = NULL;
	int i;

	if (peer) {
		bpf_spin_lock(&peer->lock);
		if (peer->port && peer->port == at->port && peer->ipv6 == ipv6 && is_at(peer->address, &at->address)) {
			__builtin_memcpy(&asked->address, peer->asked, 16);
			asked->port = peer->asked_port;
			moved = &peer->moved;
		}
		bpf_spin_unlock(&peer->lock);
		if (moved)
			return moved;
	}
	all = translations_of(sk, 0);
	if (!all)
		return NULL;
	bpf_spin_lock(&all->lock);
	for (i = 0; i < SOCKET_PEERS; i++) {
		struct socket_translation *t = &all->talks[i];

		/* An endpoint of two services: use the service that was used last. */
		if (t->backend && t->last_used > newest && t->port == at->port && t->ipv6 == ipv6 &&
		    is_at(t->address, &at->address)) {
			newest = t->last_used;
			found = i + 1;
		}
	}
	if (found) {
		struct socket_translation *t = &all->talks[(found - 1) % SOCKET_PEERS];

		__builtin_memcpy(&asked->address, t->asked, 16);
		asked->port = t->asked_port;
		moved = &t->moved;
	}
	bpf_spin_unlock(&all->lock);
	return moved;
}

static __always_inline __u8 *shared_peer(__u64 cookie, const struct place *at, enum protocol protocol, bool ipv6,
					 struct place *asked)
{
	if (ipv6) {
		struct socket_revnat6_key key = { .cookie = cookie, .port = at->port, .protocol = protocol };
		struct socket_revnat6_value *peer;

		__builtin_memcpy(key.address, &at->address, 16);
		peer = bpf_map_lookup_elem(&socket_revnat6, &key);
		if (!peer)
			return NULL;
		__builtin_memcpy(&asked->address, peer->address, 16);
		asked->port = peer->port;
		return &peer->moved;
	} else {
		struct socket_revnat4_key key = { .cookie = cookie, .port = at->port, .protocol = protocol };
		struct socket_revnat4_value *peer;

		__builtin_memcpy(key.address, &at->address, 4);
		peer = bpf_map_lookup_elem(&socket_revnat4, &key);
		if (!peer)
			return NULL;
		__builtin_memcpy(&asked->address, peer->address, 4);
		asked->port = peer->port;
		return &peer->moved;
	}
}

/* As stored_peer; `asked` must be zero before the call. */
static __always_inline __u8 *find_peer(struct bpf_sock *sk, __u64 cookie, const struct place *at,
				       enum protocol protocol, bool ipv6, struct place *asked)
{
	__u8 *moved = stored_peer(sk, at, ipv6, asked);

	return moved ? moved : shared_peer(cookie, at, protocol, ipv6, asked);
}

#endif
