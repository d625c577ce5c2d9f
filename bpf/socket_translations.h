/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* State that the socket programs record for a socket (socket_storage.h), and lookups for an unconnected one. */
#ifndef PEP_SOCKET_TRANSLATIONS_H
#define PEP_SOCKET_TRANSLATIONS_H

#include "socket_storage.h"

/*
 * The verifier checks global functions once, for any argument.  Linux 6.1 does not accept an argument of a global
 * function as the key of a map.
 */

/* ---- maps that all sockets share ----------------------------------------------- */

/* Records the endpoint and the original destination of `t`.  A socket that keeps sending has the record already. */
static __noinline int share_peer(__u64 cookie, enum protocol protocol, const struct socket_translation *t)
{
	long failed;

	if (t->ipv6) {
		struct socket_revnat6_key key = { .cookie = cookie, .port = t->port, .protocol = protocol };
		struct socket_revnat6_value revnat = { .port = t->original_port }, *same;

		__builtin_memcpy(key.address, t->address, 16);
		__builtin_memcpy(revnat.address, t->original, 16);
		same = protocol == UDP ? bpf_map_lookup_elem(&socket_revnat6, &key) : NULL;
		if (same && !same->moved && same->port == revnat.port && is_at(same->address, (const void *)t->original))
			return 0;
		failed = bpf_map_update_elem(&socket_revnat6, &key, &revnat, BPF_ANY);
	} else {
		struct socket_revnat4_key key = { .cookie = cookie, .port = t->port, .protocol = protocol };
		struct socket_revnat4_value revnat = { .port = t->original_port }, *same;

		__builtin_memcpy(key.address, t->address, 4);
		__builtin_memcpy(revnat.address, t->original, 4);
		same = protocol == UDP ? bpf_map_lookup_elem(&socket_revnat4, &key) : NULL;
		if (same && !same->moved && same->port == revnat.port && *(__u32 *)same->address == *(__u32 *)t->original)
			return 0;
		failed = bpf_map_update_elem(&socket_revnat4, &key, &revnat, BPF_ANY);
	}
	if (failed)
		count(SOCKET_REVNAT_FULL);
	return 0;
}

/* As CONTEXT_POINTER of common.h. */
static __always_inline struct bpf_sock *socket_of(struct bpf_sock_addr *ctx)
{
	struct bpf_sock *sk;

	asm volatile("%0 = *(u64 *)(%1 + %2)" : "=r"(sk) : "r"(ctx), "i"(offsetof(struct bpf_sock_addr, sk)));
	return sk;
}

static __noinline int share_translation(const struct socket_flow_key *key, __u32 backend)
{
	struct socket_flow_key own = *key;
	__u64 now = bpf_ktime_get_ns();
	struct affinity value = { .last_used = now, .backend = backend, .position = beginning(now) };
	struct affinity *last = bpf_map_lookup_elem(&socket_flows, &own);

	/* Updated in place, which is cheaper. */
	if (last && last->backend == backend) {
		if (!is_alive(last->last_used, last->position, now))
			last->position = value.position;
		last->last_used = now;
		return 0;
	}
	bpf_map_update_elem(&socket_flows, &own, &value, BPF_ANY);
	return 0;
}

static __always_inline void set_places(struct socket_translation *t, const struct packet *p, const struct backend *b)
{
	__builtin_memcpy(t->address, &b->address, 16);
	__builtin_memcpy(t->original, &p->destination, 16);
	t->port = b->port;
	t->original_port = p->destination_port;
	t->ipv6 = p->ipv6;
}

static __noinline int share_places(__u64 cookie, const struct packet *p, const struct backend *b)
{
	struct socket_translation t = {};

	set_places(&t, p, b);
	return share_peer(cookie, p->protocol, &t);
}

/* ---- a connected socket -------------------------------------------------------- */

/* `share`: the agent must be able to read it. */
__noinline int note_connected(struct bpf_sock_addr *ctx, const struct packet *p, const struct backend *b, bool share)
{
	struct connected_revnat_value *revnat;

	if (!p || !b)
		return 0;
	revnat = connected_revnat_of(socket_of(ctx), BPF_SK_STORAGE_GET_F_CREATE);
	if (revnat) {
		bpf_spin_lock(&revnat->lock);
		__builtin_memcpy(revnat->address, &b->address, 16);
		__builtin_memcpy(revnat->original, &p->destination, 16);
		revnat->port = b->port;
		revnat->original_port = p->destination_port;
		revnat->ipv6 = p->ipv6;
		revnat->moved = 0;
		bpf_spin_unlock(&revnat->lock);
		if (!share)
			return 0;
	}
	return share_places(bpf_get_socket_cookie(ctx), p, b);
}

/*
 * The application addresses an endpoint itself: what the socket gets from there is no reply of a service any more.  A
 * message of a connected socket changes nothing, because the socket gets replies of its peer only.
 */
__noinline int forget_original(struct bpf_sock_addr *ctx, const struct packet *p, bool datagram)
{
	struct connected_revnat_value *revnat;
	struct bpf_sock *sk = socket_of(ctx);
	struct socket_translations *all;
	int i;

	if (!p || (datagram && sk && FIELD(sk->state) == BPF_TCP_ESTABLISHED))
		return 0;
	revnat = connected_revnat_of(sk, 0);
	if (revnat) {
		bpf_spin_lock(&revnat->lock);
		if (revnat->port == p->destination_port && revnat->ipv6 == p->ipv6 &&
		    is_at(revnat->address, &p->destination))
			revnat->port = 0;
		bpf_spin_unlock(&revnat->lock);
	}
	all = translations_of(sk, 0);
	if (all) {
		bpf_spin_lock(&all->lock);
		for (i = 0; i < SOCKET_PEERS; i++) {
			struct socket_translation *t = &all->translations[i];

			if (t->port == p->destination_port && t->ipv6 == p->ipv6 && is_at(t->address, &p->destination))
				t->port = 0;
		}
		bpf_spin_unlock(&all->lock);
	}
	if (p->ipv6) {
		struct socket_revnat6_key key = {
			.cookie = bpf_get_socket_cookie(ctx), .port = p->destination_port, .protocol = p->protocol
		};

		__builtin_memcpy(key.address, &p->destination, 16);
		bpf_map_delete_elem(&socket_revnat6, &key);
	} else {
		struct socket_revnat4_key key = {
			.cookie = bpf_get_socket_cookie(ctx), .port = p->destination_port, .protocol = p->protocol
		};

		__builtin_memcpy(key.address, &p->destination, 4);
		bpf_map_delete_elem(&socket_revnat4, &key);
	}
	return 0;
}

/* ---- an unconnected UDP socket ------------------------------------------------- */

/* The last translation of the socket for that service; false: none yet. */
__noinline int last_translation(struct bpf_sock_addr *ctx, const struct socket_flow_key *key, struct affinity *last)
{
	struct socket_flow_key own;
	struct socket_translations *all;
	struct affinity *shared;
	int i, found = 0;

	if (!key || !last)
		return 0;
	all = translations_of(socket_of(ctx), 0);
	if (all) {
		bpf_spin_lock(&all->lock);
		for (i = 0; i < SOCKET_PEERS; i++) {
			struct socket_translation *t = &all->translations[i];

			if (t->service == key->service && t->kind == key->kind) {
				last->last_used = t->last_used;
				last->backend = t->backend;
				last->position = t->began;
				found = 1;
			}
		}
		bpf_spin_unlock(&all->lock);
		if (found)
			return 1;
	}
	own = *key;
	shared = bpf_map_lookup_elem(&socket_flows, &own);
	if (!shared)
		return 0;
	*last = *shared;
	return 1;
}

/* Moves an evicted entry to the shared maps. */
static __noinline int move_out(__u64 cookie, struct socket_translations *all, __u32 at)
{
	struct socket_flow_key key = { .cookie = cookie };
	struct socket_translation was;

	bpf_spin_lock(&all->lock);
	was = all->translations[at % SOCKET_PEERS];
	bpf_spin_unlock(&all->lock);
	if (!was.last_used || bpf_ktime_get_ns() - was.last_used > forgotten_udp_ns())
		return 0;
	if (was.kind) {
		key.service = was.service;
		key.kind = was.kind;
		share_translation(&key, was.backend);
	}
	return was.backend && was.port ? share_peer(cookie, UDP, &was) : 0;
}

/*
 * The place for an entry: that of the same service and backend if there is one, else the
 * least recently used one, + SOCKET_PEERS.
 */
static __noinline int place_for(struct socket_translations *all, const struct socket_flow_key *key, __u32 backend)
{
	__u64 oldest = ~0ULL;
	__u32 at = 0, again = 0;
	int i;

	bpf_spin_lock(&all->lock);
	for (i = 0; i < SOCKET_PEERS; i++) {
		struct socket_translation *t = &all->translations[i];

		if (again)
			continue;
		if (t->last_used < oldest) {
			oldest = t->last_used;
			at = i;
		}
		if (t->service != key->service)
			continue;
		if (t->backend == backend && (!t->kind || t->kind == key->kind)) {
			again = 1;
			at = i;
		}
	}
	bpf_spin_unlock(&all->lock);
	return again ? at : at + SOCKET_PEERS;
}

/*
 * A socket that is no longer connected, but was, to the same endpoint by another service: a datagram from there now
 * belongs to the message.
 */
static __noinline int forget_connected(struct bpf_sock *sk, const struct packet *p, const struct backend *b)
{
	struct connected_revnat_value *revnat = connected_revnat_of(sk, 0);

	if (!revnat || FIELD(sk->state) == BPF_TCP_ESTABLISHED)
		return 0;
	bpf_spin_lock(&revnat->lock);
	if (revnat->port == b->port && revnat->ipv6 == p->ipv6 && is_at(revnat->address, &b->address))
		revnat->port = 0;
	bpf_spin_unlock(&revnat->lock);
	return 0;
}

/* Records that the socket uses this backend for that service from now on; b->id 0: tc chooses the backend. */
__noinline int note_translation(struct bpf_sock_addr *ctx, const struct socket_flow_key *key, const struct packet *p,
			 const struct backend *b)
{
	__u64 now = bpf_ktime_get_ns();
	struct socket_translations *all;
	struct socket_translation *t;
	__u32 at;
	int i;

	if (!key || !p || !b)
		return 0;
	all = translations_of(socket_of(ctx), BPF_SK_STORAGE_GET_F_CREATE);
	if (!all) {
		share_translation(key, b->id);
		return b->id ? share_places(key->cookie, p, b) : 0;
	}
	forget_connected(socket_of(ctx), p, b);
	at = place_for(all, key, b->id);
	if (at >= SOCKET_PEERS)
		move_out(key->cookie, all, at);
	bpf_spin_lock(&all->lock);
	/* Only one entry may name the socket's backend for that service, and there must always be one. */
	for (i = 0; i < SOCKET_PEERS; i++)
		if (all->translations[i].service == key->service && all->translations[i].kind == key->kind)
			all->translations[i].kind = 0;
	t = &all->translations[at % SOCKET_PEERS];
	if (at >= SOCKET_PEERS || !is_alive(t->last_used, t->began, now))
		t->began = beginning(now);
	t->last_used = now;
	t->service = key->service;
	t->kind = key->kind;
	t->backend = b->id;
	set_places(t, p, b);
	t->moved = 0;
	bpf_spin_unlock(&all->lock);
	return 0;
}

#endif
