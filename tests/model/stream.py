# SPDX-License-Identifier: Apache-2.0
"""A stream: random steps with one agent; after each step the kernel must match the model.

Every step has its own generator, seeded by the stream's seed and the step's number. So leaving out a step does not
change the others, and streams can be shrunk.
"""

from __future__ import annotations

import random
import signal
import struct
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from pyebpf_proxy.lab.cluster import Lab
from pyebpf_proxy.lab.namespace import LabError
from tests.model import events, expected, kernel
from tests.model.events import FILES, NAMESPACES, NODE_FILE, SERVICES, Folder, key_of
from tests.model.expected import Settings, World
from tests.model.kernel import Broken, Map
from tests.model.preloaded import Preloaded

#: Seconds until the kernel must match, after a change, a repair and a start. Generous: the machine may be busy.
CHANGE, REPAIR, START = 40.0, 120.0, 120.0
#: How often the agent checks its maps for foreign changes: as often as it can, for the steps that wait for it.
SYNC_PERIOD = "500ms"
MARKER_FILE = "zz.json"
MARKER_ADDRESS = "10.96.255.1"
#: The longest wait for the marker alone, in seconds: after it the comparison shows the reason.
WAIT = 5.0
#: So many streams in a row begin with the same settings: between them the agent goes on.
SAME_SETTINGS = 25
SIZES = {
    **dict.fromkeys(("frontends4", "frontends6", "services", "serviceNames", "serviceConfigs", "slots"), 2048),
    **dict.fromkeys(("backends4", "backends6", "endpoints4", "endpoints6", "sourceRanges4", "sourceRanges6"), 2048),
    **dict.fromkeys(("nodeAddresses4", "nodeAddresses6", "devices"), 256),
}
_DAMAGED = (
    *("frontends4", "frontends6", "services", "service_configs", "service_names", "slots", "backends4", "backends6"),
    *("endpoints4", "endpoints6", "source_ranges4", "source_ranges6", "node_addresses4", "node_addresses6", "devices"),
)


#: What is read again for each part of a comparison that differed: what it refers to, and itself.
_AGAIN = ((), (1,), (1, 2), (0, 3))
#: The expected service ports.
Wanted = dict[kernel.Name, kernel.Port]


class WrongError(AssertionError):
    """The kernel does not match the model: at which step, and the difference."""

    def __init__(self, step: int, what: str, text: str) -> None:
        super().__init__(f"step {step} ({what}): {text}")
        self.step = step


class Step(NamedTuple):
    """A step, and how long the kernel may take to match."""

    name: str
    weight: int
    seconds: float = CHANGE


STEPS = (
    Step("service", 24),
    Step("slice", 26),
    Step("delete", 8),
    Step("move", 3),
    Step("rename", 4),
    Step("spoil", 5),
    Step("garble", 1),
    Step("remove file", 1),
    Step("burst", 4),
    Step("node object", 3),
    Step("service CIDR", 2),
    Step("address", 6),
    Step("link", 6),
    Step("bridge", 3),
    Step("route", 2),
    Step("damage a map", 6, REPAIR),
    Step("damage the table", 2, REPAIR),
    Step("detach", 2, REPAIR),
    Step("kill", 2, START),
    Step("restart", 1, START),
)


class Model:
    """One agent on one node of a lab, its folder of manifests, and the expected state. A context manager."""

    def __init__(self, lab: Lab, preloaded: bool = True) -> None:
        """``preloaded``: agents are forked (``Preloaded``)."""
        self.lab = lab
        self.node = lab.nodes[0]
        self.agent = self.node.agent
        #: Names of steps that are left out.
        self.without: Collection[str] = ()
        self.folder = Folder(lab.manifests)
        self.settings = Settings()
        self.checks = 0
        #: Shrinking waits less, because most of its streams fail.
        self.patience = 1.0
        #: A stream has begun and has not succeeded.
        self.broken = False
        self._marker = 0
        self._maps: kernel.Maps | None = None
        self._table = ""
        #: The last state of objects and settings, and what follows from it.
        self._computed: tuple[World, Wanted] | None = None
        #: What the present comparison has read.
        self._found: kernel.Services | None = None
        self._node: expected.NodeState | None = None
        self._preloaded = Preloaded(self.node.namespace) if preloaded else None
        if self._preloaded is not None:
            self.agent.launch = self._preloaded.start

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *what: object) -> None:
        self.agent.kill()
        if self._preloaded is not None:
            self._preloaded.close()
        if self._maps is not None:
            self._maps.close()

    # ---- the agent ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the agent with the current settings; it forgets earlier states of files."""
        settings = self.settings
        periods = {"minSyncPeriod": "10ms", "syncPeriod": SYNC_PERIOD}
        config: dict[str, Any] = {
            "mode": settings.mode,
            "hostnameOverride": settings.node,
            "nodePortAddresses": list(settings.node_port_addresses),
            "iptables": {"localhostNodePorts": False, **periods},
            "nftables": periods,
            "detectLocalMode": settings.detect,
        }
        if settings.detect == "InterfaceNamePrefix":
            config |= {"detectLocal": {"interfaceNamePrefix": "pod"}}
        own = {
            "fastPath": settings.fast_path,
            "externalIPs": settings.external_ips,
            "socketLB": settings.socket_lb,
            "fastPathEntries": 4096,
            "maps": SIZES,
        }
        self.folder.forget()
        # The maps may hold an earlier agent's marker: write a new one.
        self.mark()
        self.agent.start(config, own=own)

    def stop(self, number: int) -> None:
        """End the agent with a signal."""
        self.agent.signal(number)
        self.agent.wait_ended()

    def reset(self, settings: Settings) -> None:
        """An empty node: only the Nodes, the devices of the lab, an agent with these settings.

        After a successful stream the agent continues, or is restarted if its settings differ. After a finding it is
        replaced.
        """
        goes_on = self.agent.process is not None and self.settings == settings and not self.broken
        if not goes_on and self.agent.process is not None:
            self.agent.kill()
            if self.broken:
                self.agent.cleanup()
        for name in self.folder.files.keys() - {NODE_FILE, MARKER_FILE}:
            # Removed files would count as deleted a moment later.
            self.folder.write(name, [])
        self.settings = settings
        lines = [f"link del {name}" for name in ("x0", "x1", "pod8", "pod9", "br0")]
        for n in (50, 51, 52):
            lines += [f"addr del {text} dev eth0" for text in (f"192.0.2.{n}/24", f"2001:db8:1::{n}/64")]
            lines += [f"addr del {text} dev lo" for text in (f"192.0.2.{n}/24", f"2001:db8:1::{n}/64")]
            lines += [f"route del 198.18.{n}.0/24"]
        self.node.namespace.run("ip", "-force", "-batch", "-", check=False, stdin="\n".join(lines) + "\n")
        chance = random.Random(0)
        self.folder.write(NODE_FILE, [(events.node(chance, name), True) for name in ("node1", "node2")])
        if goes_on:
            self.mark()
        else:
            self.start()

    def mark(self) -> None:
        """Write the file that is read last: when its object is active, all files were read."""
        self._marker = self._marker % 60000 + 1
        marker = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"namespace": "marker", "name": "marker", "creationTimestamp": "2020-01-01T00:00:00Z"},
            "spec": {"clusterIP": MARKER_ADDRESS, "ports": [{"port": self._marker}]},
        }
        self.folder.write(MARKER_FILE, [(marker, True)])

    def _is_marked(self) -> bool:
        """Whether the object of the last file is active."""
        key = kernel.FRONTEND_KEY[4].pack(kernel.packed_of(MARKER_ADDRESS), self._marker, 6)
        try:
            return self.maps["frontends4"].get(key) is not None
        except (OSError, LabError):
            return False

    @property
    def maps(self) -> kernel.Maps:
        """The maps of the agent. LabError before its first start."""
        self._maps = self._maps or kernel.Maps(self.agent.pin("frontends4").parent)
        return self._maps

    # ---- the comparison -----------------------------------------------------------------------------------------

    def settle(self, step: int, what: str, seconds: float, thorough: bool = False) -> None:
        """Wait until the kernel matches the model. WrongError if it does not in time."""
        world = World(self.folder.objects(), self.settings)
        if self._computed is None or self._computed[0] != world:
            self._computed = world, expected.ports(world)
        wanted = self._computed[1]
        begun = time.monotonic()
        pause = 0.004
        # Reading all maps costs a hundred times as much as checking for the last file.
        while not self._is_marked() and time.monotonic() - begun < min(seconds * self.patience, WAIT):
            if self._has_ended():
                break
            time.sleep(pause)
            pause = min(0.02, pause * 1.2)
        parts = (self._service_differences, self._node_differences, self._program_differences, self._table_differences)
        differing = 0
        # A repair begins up to a SYNC_PERIOD later.
        pause = 0.03 if seconds == REPAIR else 0.004
        while True:
            if self._has_ended():
                status = self.agent.wait_ended()
                raise WrongError(step, what, f"the agent has ended with {status}:\n{self.agent.log()[-3000:]}")
            # First the part that differed: while it does, the others are not read. The end is one pass without any.
            for number in (*_AGAIN[differing], *range(len(parts))):
                try:
                    text = parts[number](world, wanted, thorough)
                except (Broken, OSError, LabError) as error:
                    text = f"{type(error).__name__}: {error}"
                if text:
                    differing = number
                    break
            self.checks += 1
            if not text:
                return
            if time.monotonic() - begun > seconds * self.patience:
                raise WrongError(step, what, f"after {seconds:.0f} s still: {text}")
            time.sleep(pause)
            pause = min(0.1, pause * 1.5)

    def _has_ended(self) -> bool:
        return self.agent.process is None or self.agent.process.poll() is not None

    def _service_differences(self, world: World, wanted: Wanted, thorough: bool) -> str:
        self._found = found = kernel.services(self.maps, 2048 if thorough else 0)
        for name in sorted({*wanted, *found.ports}):
            if wanted.get(name) != found.ports.get(name):
                return f"{name}: {_difference(wanted.get(name), found.ports.get(name))}"
        return f"entries that nothing refers to: {dict(found.garbage)}" if thorough and found.garbage else ""

    def _node_differences(self, world: World, wanted: Wanted, thorough: bool) -> str:
        self._node = node = expected.node_state(world, self.node.namespace.call(kernel.links))
        maps = kernel.node_maps(self.maps)
        if maps.addresses != node.addresses:
            return f"addresses of the node: {_difference(node.addresses, maps.addresses)}"
        devices = {index: device[:4] for index, device in maps.devices.items()}
        return f"devices: {_difference(node.devices, devices)}" if devices != node.devices else ""

    def _program_differences(self, world: World, wanted: Wanted, thorough: bool) -> str:
        assert self._node is not None
        chains = self.node.namespace.call(kernel.chains, list(self._node.programs))
        for index, (ingress, egress) in self._node.programs.items():
            if ("".join(chains[index][0][:1]), "".join(chains[index][1][-1:])) != (ingress, egress):
                return f"programs of device {index}: {chains[index]}, not {ingress, egress}"
            if len(chains[index][0]) > 1 or len(chains[index][1]) > 1:
                return f"several programs on device {index}: {chains[index]}"
        return ""

    def _table_differences(self, world: World, wanted: Wanted, thorough: bool) -> str:
        assert self._found is not None
        table = self.node.namespace.call(kernel.table, self._table or self._find_table())
        if table is None:
            return "there is no nftables table"
        backends = self._found.backends
        if table.backends != backends:
            return f"backends in nftables: {_difference(backends, table.backends)}"
        sets = expected.nft_sets(world)
        if {name: table.sets.get(name) for name in sets} != sets:
            return f"sets in nftables: {_difference(sets, table.sets)}"
        chains = {"reject_local", "translate", "masquerading", "clear_mark"}
        chains |= {"unknown_forwarded", "unknown_host"} if sets else set()
        chains |= {"source_ports"} if world.settings.fast_path else set()
        lacking = sorted(name for name in chains if not table.chains.get(name))
        return f"chains in nftables that are missing, or empty: {lacking}" if lacking else ""

    def _find_table(self) -> str:
        listed = self.node.namespace.run("nft", "list", "tables").split()
        self._table = next((name for name in listed if name.startswith("pyebpf-proxy")), "")
        return self._table

    # ---- steps --------------------------------------------------------------------------------------------------

    def step(self, number: int, chance: random.Random) -> tuple[Step, str]:
        """Do one step; returns which one it was, and what it did."""
        step = chance.choices(STEPS, [each.weight for each in STEPS])[0]
        if step.name in self.without:
            return step, "left out"
        return step, getattr(self, "_" + step.name.replace(" ", "_"))(chance)

    def _put(self, chance: random.Random, made: events.Object, valid: bool = True) -> str:
        """Write an object into its file, or into any file."""
        key = key_of(made)
        readable = [name for name in FILES if self.folder.files.get(name, ()) is not None]
        name = next((name for name in readable if any(key_of(o) == key for o, _ in self.folder.in_file(name))), "")
        name = name or chance.choice(readable or FILES)
        others = [each for each in self.folder.in_file(name) if key_of(each[0]) != key]
        self.folder.write(name, [*others, (made, valid)])
        self.mark()
        return f"{'/'.join(key)} in {name}"

    def _service(self, chance: random.Random) -> str:
        return self._put(chance, events.service(chance, chance.choice(NAMESPACES), chance.choice(SERVICES)))

    def _slice(self, chance: random.Random) -> str:
        name = f"e{chance.randrange(8)}"
        made = events.endpoint_slice(chance, chance.choice(NAMESPACES), name)
        served = [key for key in self.folder.objects() if key[0] == "Service" and key[1] != "marker"]
        if served and chance.random() < 0.8:
            key = chance.choice(sorted(served))
            made["metadata"]["namespace"] = key[1]
            if "kubernetes.io/service-name" in made["metadata"]["labels"]:
                made["metadata"]["labels"]["kubernetes.io/service-name"] = key[2]
        return self._put(chance, made)

    def _any(self, chance: random.Random) -> tuple[str, int] | None:
        there = [
            (name, at)
            for name in FILES
            for at, (made, _) in enumerate(self.folder.in_file(name))
            if made["kind"] in ("Service", "EndpointSlice")
        ]
        return chance.choice(there) if there else None

    def _delete(self, chance: random.Random) -> str:
        if (found := self._any(chance)) is None:
            return "nothing"
        name, at = found
        contents = self.folder.in_file(name)
        gone, _ = contents.pop(at)
        self.folder.write(name, contents)
        self.mark()
        return "/".join(key_of(gone))

    def _move(self, chance: random.Random) -> str:
        """An object moves to another file, which is written before or after the file that it leaves."""
        if (found := self._any(chance)) is None:
            return "nothing"
        name, at = found
        other = chance.choice([each for each in FILES if each != name])
        if self.folder.files.get(other, ()) is None:
            return "nothing"
        contents = self.folder.in_file(name)
        moved = contents.pop(at)
        target = [each for each in self.folder.in_file(other) if key_of(each[0]) != key_of(moved[0])]
        for where, what in chance.sample([(name, contents), (other, [*target, moved])], 2):
            self.folder.write(where, what)
        self.mark()
        return f"{'/'.join(key_of(moved[0]))} from {name} to {other}"

    def _rename(self, chance: random.Random) -> str:
        if (found := self._any(chance)) is None:
            return "nothing"
        name, at = found
        contents = self.folder.in_file(name)
        made, valid = contents.pop(at)
        names = SERVICES if made["kind"] == "Service" else [f"e{number}" for number in range(8)]
        new = made | {"metadata": made["metadata"] | {"name": chance.choice(names)}}
        contents = [each for each in contents if key_of(each[0]) != key_of(new)]
        self.folder.write(name, [*contents, (new, valid)])
        self.mark()
        return f"{'/'.join(key_of(made))} to {new['metadata']['name']}"

    def _spoil(self, chance: random.Random) -> str:
        if (found := self._any(chance)) is None:
            return "nothing"
        name, at = found
        contents = self.folder.in_file(name)
        bad = events.spoilt(chance, contents[at][0])
        contents[at] = bad, False
        self.folder.write(name, contents)
        self.mark()
        return "/".join(key_of(bad))

    def _garble(self, chance: random.Random) -> str:
        name = chance.choice(FILES)
        self.folder.garble(name)
        self.mark()
        return name

    def _remove_file(self, chance: random.Random) -> str:
        name = chance.choice(FILES)
        self.folder.remove(name)
        self.mark()
        return name

    def _burst(self, chance: random.Random) -> str:
        """Several changes without a pause."""
        changes = (self._service, self._slice, self._delete)
        return "; ".join(chance.choice(changes)(chance) for _ in range(chance.randint(2, 8)))

    def _node_object(self, chance: random.Random) -> str:
        name = chance.choice(("node1", "node1", "node2"))
        others = [each for each in self.folder.in_file(NODE_FILE) if each[0]["metadata"]["name"] != name]
        self.folder.write(NODE_FILE, [*others, (events.node(chance, name), True)])
        self.mark()
        return name

    def _service_CIDR(self, chance: random.Random) -> str:  # noqa: N802
        others = [each for each in self.folder.in_file(NODE_FILE) if each[0]["kind"] != "ServiceCIDR"]
        mine = [(events.service_cidr(chance), True)] if chance.random() < 0.7 else []
        self.folder.write(NODE_FILE, [*others, *mine])
        self.mark()
        return f"{len(mine)}"

    def _ip(self, *commands: str) -> str:
        for command in commands:
            self.node.namespace.run("ip", *command.split(), check=False)
        return "; ".join(commands)

    def _address(self, chance: random.Random) -> str:
        n = chance.choice((50, 51, 52))
        address = chance.choice((f"192.0.2.{n}/24", f"2001:db8:1::{n}/64"))
        what = chance.choice(("add", "add", "del"))
        device = chance.choice(("eth0", "eth0", "lo", "x0"))
        return self._ip(f"addr {what} {address} dev {device}{' nodad' if ':' in address and what == 'add' else ''}")

    def _link(self, chance: random.Random) -> str:
        name = chance.choice(("x0", "x1", "pod8", "pod9"))
        match chance.randrange(6):
            case 0 | 1:
                peer = self.lab.client.name
                return self._ip(f"link add {name} type veth peer name p{name} netns {peer}", f"link set {name} up")
            case 2:
                return self._ip(f"link del {name}")
            case 3:
                return self._ip(f"link set {name} {chance.choice(('up', 'down'))}")
            case 4:
                return self._ip(f"link set {name} mtu {chance.choice((1400, 1500, 9000))}")
            case _:
                return self._ip(f"link add {name} type dummy", f"link set {name} up")

    def _bridge(self, chance: random.Random) -> str:
        name = chance.choice(("x0", "x1", "pod8", "pod9"))
        match chance.randrange(5):
            case 0 | 1:
                return self._ip("link add br0 type bridge", f"link set br0 {chance.choice(('up', 'down'))}")
            case 2 | 3:
                return self._ip(f"link set {name} {chance.choice(('master br0', 'nomaster'))}")
            case _:
                return self._ip("link del br0")

    def _route(self, chance: random.Random) -> str:
        n = chance.choice((50, 51, 52))
        return self._ip(f"route {chance.choice(('replace', 'del'))} 198.18.{n}.0/24 via 192.0.2.1")

    def _damage_a_map(self, chance: random.Random) -> str:
        """Another process writes into a map of the agent, or deletes from it."""
        names = list(_DAMAGED)
        chance.shuffle(names)
        # Most of them are empty on a node with few Services.
        for name in names:
            each = self.maps[name]
            entries = sorted(each.items().items()) if name not in ("services", "slots") else [(b"", b"")]
            if entries:
                return self._damage(chance, each, entries)
        return "all maps are empty"

    @staticmethod
    def _damage(chance: random.Random, each: Map, entries: list[tuple[bytes, bytes]]) -> str:
        if each.name in ("services", "slots"):
            first = 1 if each.name == "services" else 0
            key = struct.pack("=I", chance.randrange(first, 16))
            value = struct.pack("=II", chance.choice((0, 1, 5, 4000000)), 0)
            each.put(key, value)
            return f"{each.name}[{key.hex()}] = {value.hex()}"
        key, value = chance.choice(entries)
        match chance.randrange(3):
            case 0:
                each.delete(key)
                return f"{each.name}: {key.hex()} deleted"
            case 1:
                at = chance.randrange(len(value))
                value = value[:at] + bytes([value[at] ^ 1 << chance.randrange(8)]) + value[at + 1 :]
            case _:
                at = chance.randrange(len(key))
                key = key[:at] + bytes([key[at] ^ 1 << chance.randrange(8)]) + key[at + 1 :]
        try:
            each.put(key, value)
        except OSError:
            return f"{each.name} refuses {key.hex()}"
        return f"{each.name}[{key.hex()}] = {value.hex()}"

    def _damage_the_table(self, chance: random.Random) -> str:
        name = self._table or self._find_table()
        match chance.randrange(4):
            case 0:
                text = "flush ruleset"
            case 1:
                text = f"delete table inet {name}"
            case 2:
                text = f"flush chain inet {name} translate"
            case _:
                text = f"flush map inet {name} backends{chance.choice('46')}"
        self.node.namespace.call(kernel.nft, text + "\n")
        return text

    def _detach(self, chance: random.Random) -> str:
        """Detach the program from a device, as detaching its link does."""
        folder = self.maps.folder.parent.parent / "tcx"
        links = sorted(path.name for path in folder.iterdir())
        if not links:
            return "nothing"
        name = chance.choice(links)
        kernel.detach(folder / name)
        return name

    def _kill(self, chance: random.Random) -> str:
        """SIGKILL, often while a change is written; before the next start, objects and the node may change."""
        done = []
        if chance.random() < 0.7:
            done.append(self._burst(chance))
            time.sleep(chance.random() * 0.03)
        self.agent.kill()
        if chance.random() < 0.5:
            done.append(chance.choice((self._burst, self._link, self._bridge, self._address))(chance))
        if chance.random() < 0.3:
            done.append(self._damage_a_map(chance))
        self.start()
        if chance.random() < 0.3:
            # Again, during its start.
            time.sleep(chance.random() * 2)
            self.agent.kill()
            self.start()
            done.append("killed again")
        return "; ".join(done)

    def _restart(self, chance: random.Random) -> str:
        """End it, and start it with another configuration."""
        self.stop(chance.choice((signal.SIGTERM, signal.SIGKILL)))
        self.settings = some_settings(chance)
        self.start()
        return str(self.settings)


def some_settings(chance: random.Random) -> Settings:
    """A random configuration."""
    mode = chance.choice(("iptables", "nftables"))
    # Mode nftables has another default.
    primary: tuple[str, ...] = ("primary",)
    choices = (primary, ("192.0.2.0/24",), ("192.0.2.11/32", "2001:db8:1::/64"), ("127.0.0.0/8",))
    return Settings(
        chance.choice(("node1", "node1", "node2")),
        mode,
        chance.choice(choices) if mode == "nftables" else chance.choice(((), *choices)),
        chance.choice(("checked", "strict", "unchecked")),
        chance.random() < 0.7,
        chance.choice(("node", "all", "off")),
        chance.choice(("ClusterCIDR", "InterfaceNamePrefix")),
    )


def _difference(wanted: Any, found: Any) -> str:
    if isinstance(wanted, dict) and isinstance(found, dict):
        keys = [
            key for key in [*wanted, *(key for key in found if key not in wanted)] if wanted.get(key) != found.get(key)
        ]
        return "; ".join(f"{key}: {found.get(key)}, not {wanted.get(key)}" for key in keys[:4])
    if isinstance(wanted, tuple) and isinstance(found, tuple) and hasattr(wanted, "_fields"):
        return "; ".join(
            f"{field}: {actual}, not {expected}"
            for field, expected, actual in zip(wanted._fields, wanted, found, strict=True)
            if expected != actual
        )
    return f"{found}, not {wanted}"


def run(model: Model, seed: int, numbers: Iterable[int], say: Callable[[str], None] = lambda text: None) -> None:
    """One stream, from an empty node. WrongError at the first difference."""
    model.reset(some_settings(random.Random(f"settings of {seed // SAME_SETTINGS}")))
    model.broken = True
    model.settle(-1, "start", START)
    for number in numbers:
        chance = random.Random(f"{seed}/{number}")
        try:
            step, text = model.step(number, chance)
        except LabError as error:
            raise WrongError(number, "a step", str(error)) from error
        say(f"{number:3d} {step.name}: {text}")
        model.settle(number, f"{step.name}: {text}", step.seconds)
    model.settle(-2, "the end: nothing is left over", CHANGE, thorough=True)
    model.broken = False


def shrink(fails: Callable[[Sequence[int]], bool], numbers: Sequence[int], tries: int = 60) -> list[int]:
    """Fewer steps with which the stream still fails: halves, quarters and so on are left out."""
    kept = list(numbers)
    size = max(1, len(kept) // 2)
    while tries > 0:
        at = 0
        while at < len(kept) and tries > 0:
            fewer = kept[:at] + kept[at + size :]
            tries -= 1
            if fewer != kept and fails(fewer):
                kept = fewer
            else:
                at += size
        if size == 1:
            break
        size //= 2
    return kept
