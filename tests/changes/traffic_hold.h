/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Long connections: CHUNK bytes every period, compared with the echo.  For UDP a request
 * every period, which the same server must answer each time.
 */
#ifndef TESTS_CHANGES_TRAFFIC_HOLD_H
#define TESTS_CHANGES_TRAFFIC_HOLD_H

#include "traffic_serve.h"

#define ROUND_TIMEOUT (60 * SECOND)	/* effectively never, on any machine */
#define DATAGRAM_TIMEOUT (10 * SECOND)	/* UDP does not retransmit */

static uint64_t period;

static void hold_status(void)
{
	uint32_t open = 0, least = UINT32_MAX;

	for (int fd = first; fd >= 0; fd = connections[fd].next) {
		struct connection *c = &connections[fd];

		if (!c->open)
			continue;
		open++;
		least = c->record.count < least ? c->record.count : least;
	}
	printf("%u %u\n", open, open ? least : 0);
}

static void fill(unsigned char *data, int fd, uint32_t round)
{
	for (int i = 0; i < CHUNK; i++)
		data[i] = fd * 131 + round * 31 + i * 7 + (i >> 8);
}

static void next_round(int fd, uint64_t present)
{
	struct connection *c = &connections[fd];
	unsigned char data[CHUNK];

	if (c->waiting || c->named < NAME) {
		end(fd, ETIMEDOUT, false);
		return;
	}
	if (c->udp) {
		int error = ask(fd);

		c->due = present + DATAGRAM_TIMEOUT;
		if (error)
			end(fd, error, false);
		return;
	}
	fill(data, fd, c->record.count);
	if (send(fd, data, CHUNK, MSG_NOSIGNAL) != CHUNK) {
		end(fd, errno, false);
		return;
	}
	c->waiting = true;
	c->back = 0;
	c->due = present + ROUND_TIMEOUT;
}

static void hold_event(int fd)
{
	struct connection *c = &connections[fd];
	unsigned char data[CHUNK], right[CHUNK];
	ssize_t n;

	if (!c->open)
		return;
	if (c->udp) {
		bool first_answer = !c->named;

		if (read_datagram(fd, false)) {
			c->record.count++;
			c->due = now() + (first_answer ? period * (fd % 16) / 16 : period);
		}
		return;
	}
	if (c->named < NAME) {
		if (read_name(fd, false))
			c->due = now() + period * (fd % 16) / 16;
		return;
	}
	while (c->back < CHUNK && (n = recv(fd, data, CHUNK - c->back, 0))) {
		if (n < 0 && errno == EAGAIN)
			return;
		if (n < 0) {
			end(fd, errno, false);
			return;
		}
		fill(right, fd, c->record.count);
		if (!c->waiting || memcmp(data, right + c->back, n)) {
			end(fd, EBADMSG, false);
			return;
		}
		c->back += n;
	}
	if (c->back < CHUNK) {
		end(fd, EPIPE, false);
		return;
	}
	c->record.count++;
	c->waiting = false;
	c->back = 0;
	c->due = now() + period;
}

/* Whether a datagram is not answered yet: the end waits for it, or its loss would go unnoticed. */
static bool datagrams_wait(void)
{
	for (int fd = first; fd >= 0; fd = connections[fd].next)
		if (connections[fd].udp && connections[fd].waiting)
			return true;
	return false;
}

static int hold(const char *path, int count)
{
	struct epoll_event events[EVENTS];

	for (int i = 0; i < count; i++) {
		uint64_t present = now();

		begin(i % target_count, false);
		if (last >= 0 && connections[last].record.begun >= present)
			connections[last].due = present + (connections[last].udp ? DATAGRAM_TIMEOUT : ROUND_TIMEOUT);
	}
	while (!stopping || datagrams_wait()) {
		uint64_t present = now();
		int n = wait_until(present + 5 * MILLISECOND, events);

		for (int i = 0; i < n; i++) {
			if (events[i].data.fd == STDIN_FILENO)
				answer_command(hold_status);
			else
				hold_event(events[i].data.fd);
		}
		for (int fd = first, next; fd >= 0; fd = next) {
			next = connections[fd].next;
			if (connections[fd].due <= present && (!stopping || connections[fd].waiting))
				next_round(fd, present);
		}
	}
	while (first >= 0)
		end(first, 0, false);
	write_records(path);
	return 0;
}

#endif
