/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Short connections at the maximum rate: connect, one byte each way, reset.
 *
 *	connections serve PORT
 *	connections load ADDRESS PORT IN_FLIGHT WARM_UP_SECONDS SECONDS
 *
 * Each side is one thread on epoll with real-time priority, so that other work on the
 * machine does not distort the comparison.  `serve` prints a line when it listens and
 * ends when its standard input is closed.  `load` prints one line of JSON.  Connections
 * that fail, or that take longer than SLOW_NS, are counted: a rate that hides stalls is
 * worthless.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdbool.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "load.h"

#define EVENTS 256
#define FILES 65536
#define SLOW_NS (SECOND / 5)

static double cpu_seconds(void)
{
	struct rusage r;

	getrusage(RUSAGE_SELF, &r);
	return r.ru_utime.tv_sec + r.ru_stime.tv_sec + (r.ru_utime.tv_usec + r.ru_stime.tv_usec) / 1e6;
}

/* ---- the server ----------------------------------------------------------- */

static int serve(uint16_t port)
{
	struct epoll_event events[EVENTS];
	int poll = epoll_create1(0), listener = listen_on(port, SOCK_NONBLOCK);

	watch(poll, listener, EPOLLIN);
	watch(poll, STDIN_FILENO, EPOLLIN);
	printf("listening\n");
	fflush(stdout);
	for (;;) {
		int n = epoll_wait(poll, events, EVENTS, -1);

		for (int i = 0; i < n; i++) {
			int fd = events[i].data.fd;

			if (fd == STDIN_FILENO)
				return 0;
			if (fd != listener) {
				answer(fd);
				continue;
			}
			while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0)
				watch(poll, fd, EPOLLIN);
		}
	}
}

/* ---- the load -------------------------------------------------------------- */

static struct {
	struct sockaddr_storage to;
	socklen_t to_length;
	uint64_t begun[FILES];
	bool sent[FILES];
	bool counting;
	uint64_t connections, failed, slow, slowest;
	int poll;
} load;

static void begin(void)
{
	struct linger reset = { .l_onoff = 1, .l_linger = 0 };
	int fd = socket(load.to.ss_family, SOCK_STREAM | SOCK_NONBLOCK, 0);

	if (fd < 0 || fd >= FILES)
		die("socket");
	setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
	load.begun[fd] = now();
	load.sent[fd] = false;
	if (connect(fd, (struct sockaddr *)&load.to, load.to_length) && errno != EINPROGRESS)
		die("connect");
	watch(load.poll, fd, EPOLLIN | EPOLLOUT | EPOLLET);
}

static void end(int fd, bool good)
{
	uint64_t took = now() - load.begun[fd];

	close(fd);
	if (!load.counting)
		return;
	load.connections += good;
	load.failed += !good;
	load.slow += took > SLOW_NS;
	if (took > load.slowest)
		load.slowest = took;
}

/* Returns true if the connection has ended. */
static bool go_on(int fd, uint32_t events)
{
	char byte = 'x';
	ssize_t n;

	if (events & (EPOLLERR | EPOLLHUP)) {
		end(fd, false);
		return true;
	}
	if (!load.sent[fd] && events & EPOLLOUT) {
		if (send(fd, &byte, 1, MSG_NOSIGNAL) != 1) {
			end(fd, false);
			return true;
		}
		load.sent[fd] = true;
	}
	if (!(events & EPOLLIN))
		return false;
	n = recv(fd, &byte, 1, 0);
	if (n < 0 && errno == EAGAIN)
		return false;
	end(fd, n == 1);
	return true;
}

static void run_until(uint64_t deadline)
{
	struct epoll_event events[EVENTS];

	while (now() < deadline) {
		int n = epoll_wait(load.poll, events, EVENTS, 100);

		for (int i = 0; i < n; i++)
			if (go_on(events[i].data.fd, events[i].events))
				begin();
	}
}

static int put_under_load(char **arguments)
{
	int in_flight = atoi(arguments[2]);
	uint64_t warm_up = atof(arguments[3]) * SECOND, length = atof(arguments[4]) * SECOND, start;
	double cpu, seconds;

	load.to_length = parse_address(arguments[0], atoi(arguments[1]), &load.to);
	load.poll = epoll_create1(0);
	for (int i = 0; i < in_flight; i++)
		begin();
	run_until(now() + warm_up);
	load.counting = true;
	cpu = cpu_seconds();
	start = now();
	run_until(start + length);
	seconds = (now() - start) / 1e9;
	printf("{\"connections\": %lu, \"seconds\": %.6f, \"per_second\": %.1f, \"failed\": %lu, "
	       "\"slow\": %lu, \"slowest_ms\": %.3f, \"cpu_seconds\": %.3f}\n",
	       load.connections, seconds, load.connections / seconds, load.failed, load.slow,
	       load.slowest / 1e6, cpu_seconds() - cpu);
	return 0;
}

int main(int count, char **arguments)
{
	come_first();
	if (count == 3 && !strcmp(arguments[1], "serve"))
		return serve(atoi(arguments[2]));
	if (count == 7 && !strcmp(arguments[1], "load"))
		return put_under_load(arguments + 2);
	fprintf(stderr, "usage: connections serve PORT | load ADDRESS PORT IN_FLIGHT WARM_UP_SECONDS SECONDS\n");
	return 2;
}
