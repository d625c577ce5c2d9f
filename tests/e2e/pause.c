// SPDX-License-Identifier: Apache-2.0
/* The first process of a pod's sandbox and of a node's PID namespace: it waits, and reaps orphans. */
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

static void end(int signal)
{
	(void)signal;
	_exit(0);
}

static void reap(int signal)
{
	(void)signal;
	while (waitpid(-1, NULL, WNOHANG) > 0)
		;
}

int main(void)
{
	struct sigaction ending = {.sa_handler = end};
	struct sigaction reaping = {.sa_handler = reap, .sa_flags = SA_NOCLDSTOP};

	sigaction(SIGINT, &ending, NULL);
	sigaction(SIGTERM, &ending, NULL);
	sigaction(SIGCHLD, &reaping, NULL);
	for (;;)
		pause();
}
