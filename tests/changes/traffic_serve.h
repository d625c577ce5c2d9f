/* SPDX-License-Identifier: Apache-2.0 */
/* The server: sends its name and the port to each client, then echoes; with UDP both in one answer. */
#ifndef TESTS_CHANGES_TRAFFIC_SERVE_H
#define TESTS_CHANGES_TRAFFIC_SERVE_H

#include "traffic_clients.h"

#define CHUNK 4096

static uint16_t served[FILES];		/* by listener: its port; 0: a connection */

static uint16_t datagrams[FILES];	/* by UDP socket: its port */

static void serve_datagrams_on(uint16_t port)
{
	struct sockaddr_in6 any = { .sin6_family = AF_INET6, .sin6_port = htons(port) };
	int fd = socket(AF_INET6, SOCK_DGRAM | SOCK_NONBLOCK, 0), room = 16 << 20;

	if (fd < 0 || bind(fd, (struct sockaddr *)&any, sizeof(any)))
		die("bind");
	/* A server that does not run for a moment must not lose data. */
	setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &room, sizeof(room));
	datagrams[fd] = port;
	watch(poller, fd, EPOLLIN);
}

static void answer_datagrams(int fd, const char *name)
{
	char data[NAME + CHUNK] = "";
	struct sockaddr_storage from;
	socklen_t length = sizeof(from);
	ssize_t n;

	snprintf(data, NAME, "%s:%u", name, datagrams[fd]);
	while ((n = recvfrom(fd, data + NAME, CHUNK, 0, (struct sockaddr *)&from, &length)) >= 0) {
		sendto(fd, data, NAME + n, 0, (struct sockaddr *)&from, length);
		length = sizeof(from);
	}
}

static void serve_on(uint16_t port)
{
	struct sockaddr_in6 any = { .sin6_family = AF_INET6, .sin6_port = htons(port) };
	int fd = socket(AF_INET6, SOCK_STREAM | SOCK_NONBLOCK, 0), on = 1;

	if (fd < 0)
		die("socket");
	setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
	if (bind(fd, (struct sockaddr *)&any, sizeof(any)) || listen(fd, 4096))
		die("listen");
	served[fd] = port;
	watch(poller, fd, EPOLLIN);
}

static void greet(int listener, const char *name)
{
	char greeting[NAME] = "";
	int fd;

	snprintf(greeting, sizeof(greeting), "%s:%u", name, served[listener]);
	while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
		if (send(fd, greeting, sizeof(greeting), MSG_NOSIGNAL) == sizeof(greeting))
			watch(poller, fd, EPOLLIN);
		else
			close(fd);
	}
}

static void send_back(int fd)
{
	char data[CHUNK];
	ssize_t n = recv(fd, data, sizeof(data), 0);

	if (n < 0 && errno == EAGAIN)
		return;
	/* A client sends only one chunk at a time, which always fits. */
	if (n <= 0 || send(fd, data, n, MSG_NOSIGNAL) != n)
		close(fd);
}

static void serve(const char *name, char **ports)
{
	struct epoll_event events[EVENTS];

	for (; *ports; ports++) {
		serve_on(atoi(*ports));
		serve_datagrams_on(atoi(*ports));
	}
	printf("listening\n");
	fflush(stdout);
	for (;;) {
		int n = epoll_wait(poller, events, EVENTS, -1);

		for (int i = 0; i < n; i++) {
			int fd = events[i].data.fd;

			if (served[fd])
				greet(fd, name);
			else if (datagrams[fd])
				answer_datagrams(fd, name);
			else
				send_back(fd);
		}
	}
}

#endif
