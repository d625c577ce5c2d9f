/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Requests of one byte on persistent connections, RATE per second, and the latency of
 * each reply.  The server is `connections serve`.
 *
 *	paced ADDRESS PORT CONNECTIONS RATE WARM_UP_SECONDS SECONDS
 *
 * Latency counts from when a request was due, not from when it was sent: a request that
 * waits for a slow reply is also slow.  RATE 0: each connection sends again as soon as it
 * has a reply, to find the maximum rate.  Prints one line of JSON.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <string.h>
#include <unistd.h>

#include "load.h"

#define CONNECTIONS 1024

static struct {
	struct sockaddr_storage to;
	socklen_t to_length;
	int poller;
	int idle[CONNECTIONS], idle_count;
	uint64_t due[CONNECTIONS + 64];		/* by descriptor: when the request in flight was due */
	double interval;			/* nanoseconds between two requests; 0: not paced */
	uint32_t *took;				/* latencies in nanoseconds */
	size_t answered, capacity;
	bool counting;
} load;

static void open_connection(void)
{
	struct linger reset = { .l_onoff = 1, .l_linger = 0 };
	int fd = socket(load.to.ss_family, SOCK_STREAM, 0), on = 1;

	if (fd < 0 || fd >= CONNECTIONS + 64 || connect(fd, (struct sockaddr *)&load.to, load.to_length))
		die("connect");
	setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
	watch(load.poller, fd, EPOLLIN);
	load.idle[load.idle_count++] = fd;
}

static void ask(uint64_t due)
{
	int fd = load.idle[--load.idle_count];
	char byte = 'x';

	load.due[fd] = due;
	if (send(fd, &byte, 1, MSG_NOSIGNAL) != 1)
		die("send");
}

static void take_answer(int fd)
{
	char byte;

	if (recv(fd, &byte, 1, 0) != 1)
		die("recv");
	load.idle[load.idle_count++] = fd;
	if (!load.counting)
		return;
	if (load.answered == load.capacity) {
		load.capacity = load.capacity ? 2 * load.capacity : 1 << 16;
		load.took = realloc(load.took, load.capacity * sizeof(*load.took));
		if (!load.took)
			die("realloc");
	}
	load.took[load.answered++] = now() - load.due[fd];
}

static void run_until(uint64_t end)
{
	struct epoll_event events[64];
	double due = now();
	uint64_t t;

	while ((t = now()) < end) {
		struct timespec wait = { .tv_nsec = 100000000 };
		int n;

		while (load.idle_count && (!load.interval || due <= t)) {
			ask(load.interval ? due : t);
			due += load.interval;
		}
		if (load.interval && load.idle_count)
			wait.tv_nsec = due > t ? due - t : 0;
		n = epoll_pwait2(load.poller, events, 64, &wait, NULL);
		if (n < 0)
			die("epoll_pwait2");
		for (int i = 0; i < n; i++)
			take_answer(events[i].data.fd);
	}
}

static int by_size(const void *a, const void *b)
{
	uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

	return x < y ? -1 : x > y;
}

/* The smallest latency that this many per mille do not exceed, in microseconds. */
static double permille(unsigned int share)
{
	size_t place = (load.answered * share + 999) / 1000;

	return load.took[place ? place - 1 : 0] / 1e3;
}

int main(int count, char **arguments)
{
	uint64_t begun;
	double rate;

	if (count != 7) {
		fprintf(stderr, "usage: paced ADDRESS PORT CONNECTIONS RATE WARM_UP_SECONDS SECONDS\n");
		return 2;
	}
	come_first();
	load.to_length = parse_address(arguments[1], atoi(arguments[2]), &load.to);
	load.poller = epoll_create1(0);
	for (int i = atoi(arguments[3]); i > 0 && load.idle_count < CONNECTIONS; i--)
		open_connection();
	rate = atof(arguments[4]);
	load.interval = rate > 0 ? SECOND / rate : 0;
	run_until(now() + atof(arguments[5]) * SECOND);
	load.counting = true;
	begun = now();
	run_until(begun + atof(arguments[6]) * SECOND);
	if (!load.answered)
		die("no answer");
	qsort(load.took, load.answered, sizeof(*load.took), by_size);
	printf("{\"answered\": %zu, \"per_second\": %.1f, \"p50_us\": %.3f, \"p99_us\": %.3f, \"p999_us\": %.3f, "
	       "\"longest_us\": %.3f}\n",
	       load.answered, load.answered / ((now() - begun) / 1e9), permille(500), permille(990), permille(999),
	       load.took[load.answered - 1] / 1e3);
	return 0;
}
