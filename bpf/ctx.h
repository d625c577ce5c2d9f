/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * For headers that are shared between contexts.  ctx_skb.h, ctx_xdp.h and
 * ctx_sock.h define `context`, HOOK and the functions that access a context;
 * a main program includes one of them first.
 */
#ifndef PEP_CONTEXT_H
#error "include ctx_skb.h, ctx_xdp.h or ctx_sock.h first"
#endif
