/* SPDX-License-Identifier: Apache-2.0 */
/*
 * New connections, one after the other, at a rate or as many as possible.  Each reads the
 * server's name, and sends `questions` more requests, one every `pause`.
 */
#ifndef TESTS_CHANGES_TRAFFIC_LOAD_H
#define TESTS_CHANGES_TRAFFIC_LOAD_H

#include "traffic_clients.h"

#define BURST 32
#define CLOSED_LOOP 32			/* connections at a time without a rate */
#define IN_FLIGHT 16			/* limit per target: without answers, or on a slow machine, they would accumulate */
#define LASTING_IN_FLIGHT 512		/* the same for connections with several requests */

static uint64_t pause_between;

static void load_status(void)
{
	printf("%lu %lu\n", made, answered);
}

/* True when the name, or the answer to the last request, is complete. */
static bool is_answered(int fd)
{
	struct connection *c = &connections[fd];

	if (c->udp)
		return read_datagram(fd, true);
	return c->named < NAME ? read_name(fd, true) : read_number(fd, true);
}

static void load_event(int fd, uint32_t events)
{
	struct connection *c = &connections[fd];

	if (!c->open)
		return;
	if (events & EPOLLERR) {
		int error = error_of(fd);

		end(fd, error ? error : EPROTO, true);
	} else if (is_answered(fd)) {
		if (!c->left)
			end(fd, 0, true);
		else
			c->due = now() + pause_between;
	}
}

/* Send the requests that are due. */
static void ask_more(uint64_t present)
{
	for (int fd = first, next; fd >= 0; fd = next) {
		struct connection *c = &connections[fd];
		int error;

		next = c->next;
		if (!c->due || c->due > present)
			continue;
		c->due = 0;
		c->left--;
		error = ask(fd);
		if (error)
			end(fd, error, true);
	}
}

static void begin_one(uint32_t *turn)
{
	for (int tries = 0; tries < target_count; tries++) {
		uint32_t target = (*turn)++ % target_count;

		if (targets[target].in_flight < (questions ? LASTING_IN_FLIGHT : IN_FLIGHT)) {
			begin(target, true);
			return;
		}
	}
}

static int put_under_load(const char *path, double rate, uint64_t timeout)
{
	uint64_t start = now(), begun = 0;
	struct epoll_event events[EVENTS];
	uint32_t turn = 0;

	while (!stopping || first >= 0) {
		uint64_t present = now(), wake = present + 5 * MILLISECOND;
		int n;

		while (first >= 0 && present - connections[first].record.begun > timeout)
			end(first, ETIMEDOUT, true);
		if (!stopping && rate > 0) {
			uint64_t due = (present - start) * rate / SECOND, next;

			/* Connections that were not started in time are skipped. */
			if (due > begun + BURST)
				begun = due - BURST;
			for (; begun < due; begun++)
				begin_one(&turn);
			next = start + (begun + 1) * SECOND / rate;
			wake = next < wake ? next : wake;
		} else if (!stopping) {
			while (made + CLOSED_LOOP > begun) {
				begin_one(&turn);
				begun++;
			}
		}
		if (questions)
			ask_more(present);
		n = wait_until(wake, events);
		for (int i = 0; i < n; i++) {
			if (events[i].data.fd == STDIN_FILENO)
				answer_command(load_status);
			else
				load_event(events[i].data.fd, events[i].events);
		}
	}
	write_records(path);
	return 0;
}

#endif
