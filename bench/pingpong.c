/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One byte there, one byte back, on one TCP connection, as often as it goes.
 *
 *	pingpong serve PORT
 *	pingpong load ADDRESS PORT SECONDS
 *
 * Scheduled before everything else, as `connections`.  `serve` prints a line
 * when it listens and ends when its standard input does; `load` prints one line of JSON.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static void die(const char *what)
{
	fprintf(stderr, "pingpong: %s: %s\n", what, strerror(errno));
	exit(1);
}

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

static void at_once(int fd)
{
	int on = 1;

	if (setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)))
		die("TCP_NODELAY");
}

static int serve(uint16_t port)
{
	struct sockaddr_in6 any = { .sin6_family = AF_INET6, .sin6_port = htons(port) };
	int listener = socket(AF_INET6, SOCK_STREAM, 0), on = 1;
	struct pollfd waiting[2] = { { .fd = STDIN_FILENO, .events = POLLIN }, { .events = POLLIN } };
	char byte;

	if (listener < 0 || setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) ||
	    bind(listener, (struct sockaddr *)&any, sizeof(any)) || listen(listener, 16))
		die("listen");
	printf("listening\n");
	fflush(stdout);
	waiting[1].fd = listener;
	for (;;) {
		int fd;

		if (poll(waiting, 2, -1) < 0)
			die("poll");
		if (waiting[0].revents)
			return 0;
		fd = accept(listener, NULL, NULL);
		if (fd < 0)
			die("accept");
		at_once(fd);
		while (recv(fd, &byte, 1, 0) == 1 && send(fd, &byte, 1, MSG_NOSIGNAL) == 1)
			;
		close(fd);
	}
}

static int load(const char *address, uint16_t port, double seconds)
{
	struct sockaddr_in6 to6 = { .sin6_family = AF_INET6, .sin6_port = htons(port) };
	struct sockaddr_in to4 = { .sin_family = AF_INET, .sin_port = htons(port) };
	int four = inet_pton(AF_INET, address, &to4.sin_addr) == 1, fd;
	unsigned long exchanges = 0;
	double begun, end;
	char byte = 'x';

	if (!four && inet_pton(AF_INET6, address, &to6.sin6_addr) != 1) {
		errno = EINVAL;
		die(address);
	}
	fd = socket(four ? AF_INET : AF_INET6, SOCK_STREAM, 0);
	if (fd < 0 || connect(fd, four ? (void *)&to4 : (void *)&to6, four ? sizeof(to4) : sizeof(to6)))
		die("connect");
	at_once(fd);
	begun = now();
	do {
		for (int i = 0; i < 32; i++, exchanges++)
			if (send(fd, &byte, 1, MSG_NOSIGNAL) != 1 || recv(fd, &byte, 1, 0) != 1)
				die("exchange");
		end = now();
	} while (end - begun < seconds);
	printf("{\"exchanges\": %lu, \"seconds\": %.6f, \"per_second\": %.1f}\n", exchanges, end - begun,
	       exchanges / (end - begun));
	return 0;
}

int main(int count, char **arguments)
{
	struct sched_param first = { .sched_priority = 1 };

	if (sched_setscheduler(0, SCHED_FIFO, &first))
		die("sched_setscheduler");
	if (count == 3 && !strcmp(arguments[1], "serve"))
		return serve(atoi(arguments[2]));
	if (count == 5 && !strcmp(arguments[1], "load"))
		return load(arguments[2], atoi(arguments[3]), atof(arguments[4]));
	fprintf(stderr, "usage: pingpong serve PORT | load ADDRESS PORT SECONDS\n");
	return 2;
}
