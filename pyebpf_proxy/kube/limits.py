# SPDX-License-Identifier: Apache-2.0
"""How much an object and a file may hold: more would take gigabytes of memory, or stop the agent for minutes."""

from __future__ import annotations

#: Maximum of values in one object, to bound memory and time. Useful objects have far fewer, but the API server accepts
#: more: etcd's limit is 1.5 MiB, and the shortest address takes 5 bytes.
MOST_VALUES = 200_000
#: Maximum of values in a file. Objects have about 20 bytes for each, so those of the largest file have fewer.
MOST_VALUES_OF_FILE = 4_000_000
#: Maximum of values in one YAML document, such as a list: until its end, each takes about 500 bytes.
MOST_VALUES_OF_DOCUMENT = 1_000_000
#: Maximum of documents in a YAML file.
MOST_DOCUMENTS = 200_000
TOO_MANY = f"one object has more than {MOST_VALUES} values"
_SPLIT = "split the file into several"
TOO_MANY_OF_FILE = f"the file has more than {MOST_VALUES_OF_FILE} values; {_SPLIT}"
TOO_MANY_OF_DOCUMENT = f"one YAML document has more than {MOST_VALUES_OF_DOCUMENT} values; {_SPLIT}, or write JSON"
TOO_MANY_DOCUMENTS = f"the file has more than {MOST_DOCUMENTS} documents; {_SPLIT}"


class UnreadableError(Exception):
    """The text is not YAML or JSON; the rest of it cannot be read. The message begins with the line if known."""
