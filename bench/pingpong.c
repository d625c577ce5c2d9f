/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One byte each way on one TCP connection, at the maximum rate.
 *
 *	pingpong serve PORT
 *	pingpong load ADDRESS PORT
 *
 * Runs with real-time priority, like `connections`.  `serve` prints a line when it listens
 * and ends when its standard input is closed; it has a process for each connection.
 * `load` connects.  For each line on its standard input, a number of seconds, it prints
 * one line of JSON.  So one connection serves many rounds: like most real flows, the
 * measured flow is some seconds old.
 */
#define _GNU_SOURCE
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "load.h"

static void at_once(int fd)
{
	int on = 1;

	if (setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)))
		die("TCP_NODELAY");
}

static void __attribute__((noreturn)) converse(int fd)
{
	char byte;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	at_once(fd);
	while (recv(fd, &byte, 1, 0) == 1 && send(fd, &byte, 1, MSG_NOSIGNAL) == 1)
		;
	_exit(0);
}

static int serve(uint16_t port)
{
	int listener = listen_on(port, 0);
	struct pollfd waiting[2] = { { .fd = STDIN_FILENO, .events = POLLIN }, { .events = POLLIN } };

	signal(SIGCHLD, SIG_IGN);
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
		switch (fork()) {
		case -1:
			die("fork");
		case 0:
			converse(fd);
		}
		close(fd);
	}
}

static void exchange(int fd, double seconds)
{
	unsigned long exchanges = 0;
	uint64_t begun = now(), end;
	char byte = 'x';
	double took;

	do {
		for (int i = 0; i < 32; i++, exchanges++)
			if (send(fd, &byte, 1, MSG_NOSIGNAL) != 1 || recv(fd, &byte, 1, 0) != 1)
				die("exchange");
		end = now();
	} while (end - begun < seconds * SECOND);
	took = (end - begun) / 1e9;
	printf("{\"exchanges\": %lu, \"seconds\": %.6f, \"per_second\": %.1f}\n", exchanges, took,
	       exchanges / took);
	fflush(stdout);
}

static int load(const char *address, uint16_t port)
{
	struct sockaddr_storage to = {};
	socklen_t length = parse_address(address, port, &to);
	int fd = socket(to.ss_family, SOCK_STREAM, 0);
	char line[32];

	if (fd < 0 || connect(fd, (struct sockaddr *)&to, length))
		die("connect");
	at_once(fd);
	while (fgets(line, sizeof(line), stdin))
		exchange(fd, atof(line));
	return 0;
}

int main(int count, char **arguments)
{
	come_first();
	if (count == 3 && !strcmp(arguments[1], "serve"))
		return serve(atoi(arguments[2]));
	if (count == 4 && !strcmp(arguments[1], "load"))
		return load(arguments[2], atoi(arguments[3]));
	fprintf(stderr, "usage: pingpong serve PORT | load ADDRESS PORT\n");
	return 2;
}
