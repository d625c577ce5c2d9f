# SPDX-License-Identifier: Apache-2.0
"""Matches and targets of iptables (xtables) by name: what each does to a packet. Pure.

The same extensions are in tables of iptables-legacy and, as ``match`` and ``target`` expressions, in those of
iptables-nft. Sources: include/uapi/linux/netfilter/xt_*.h, netfilter_ipv4/ipt_*.h, man iptables-extensions.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from dataclasses import replace

from pyebpf_proxy.datapath.rulesets.model import ACCOUNTING, Field, Kind, Part

_MATCHES = {
    "limit": Kind.COUNTS,
    "hashlimit": Kind.COUNTS,
    "connlimit": Kind.COUNTS,
    "connbytes": Kind.COUNTS,
    "quota": Kind.COUNTS,
    "quota2": Kind.COUNTS,
    "statistic": Kind.COUNTS,
    "random": Kind.COUNTS,
    "nth": Kind.COUNTS,
    "rateest": Kind.COUNTS,
    "recent": Kind.COUNTS,
    # What they compare differs among the packets of two hosts.
    "dscp": Kind.INSPECTS,
    "ecn": Kind.INSPECTS,
    "hl": Kind.INSPECTS,
    "length": Kind.INSPECTS,
    "osf": Kind.INSPECTS,
    "tcpmss": Kind.INSPECTS,
    "tos": Kind.INSPECTS,
    "ttl": Kind.INSPECTS,
    "string": Kind.INSPECTS,
    "u32": Kind.INSPECTS,
    "bpf": Kind.INSPECTS,
    "comment": Kind.IGNORED,
    "log": Kind.LOGS,  # log and nflog are of ebtables
    "nflog": Kind.LOGS,
}
#: Only conditions; the last line is of ebtables.
# fmt: off
_CONDITIONS = frozenset(
    {
        "addrtype", "ah", "cgroup", "cluster", "connlabel", "connmark", "conntrack", "cpu", "dccp", "devgroup",
        "dst", "esp", "eui64", "frag", "geoip", "hbh", "helper", "icmp", "icmp6", "ipcomp", "iprange",
        "ipv6header", "ipvs", "l2tp", "mac", "mark", "mh", "multiport", "owner", "physdev", "pkttype", "policy",
        "realm", "rpfilter", "rt", "sctp", "set", "socket", "srh", "state", "tcp", "time", "udp", "udplite",
        "802_3", "among", "arp", "ip", "ip6", "mark_m", "stp", "vlan",
    }
)
# fmt: on
#: Conditions that give the same result for all packets of a pair, as long as rules, devices and routes are the same.
_LASTING = frozenset(
    {
        *("addrtype", "connmark", "conntrack", "devgroup", "icmp", "icmp6", "iprange", "mac", "mark", "multiport"),
        *("physdev", "pkttype", "realm", "rpfilter", "sctp", "state", "tcp", "udp", "udplite"),
        *("802_3", "among", "arp", "ip", "ip6", "mark_m", "stp", "vlan"),
    }
)
_TARGETS = {
    "": Kind.IGNORED,
    "ACCEPT": Kind.ACCEPT,
    "DROP": Kind.DROP,
    "REJECT": Kind.DROP,
    "RETURN": Kind.RETURN,
    "LOG": Kind.LOGS,
    "NFLOG": Kind.LOGS,
    "ULOG": Kind.LOGS,
    "AUDIT": Kind.LOGS,
    "TRACE": Kind.LOGS,
    "LED": Kind.LOGS,
    "IDLETIMER": Kind.COUNTS,
    "RATEEST": Kind.COUNTS,
    "SET": Kind.INSPECTS,
    "NFQUEUE": Kind.TAKES,
    "QUEUE": Kind.TAKES,
    "TPROXY": Kind.TAKES,
    "TEE": Kind.TAKES,
    "SYNPROXY": Kind.TAKES,
    "TARPIT": Kind.TAKES,
    "FLOWOFFLOAD": Kind.TAKES,
    "TCPMSS": Kind.REWRITES,
    "TCPOPTSTRIP": Kind.REWRITES,
    "TOS": Kind.REWRITES,
    "DSCP": Kind.REWRITES,
    "ECN": Kind.REWRITES,
    "TTL": Kind.REWRITES,
    "HL": Kind.REWRITES,
    "CLASSIFY": Kind.REWRITES,
    "SECMARK": Kind.REWRITES,
    "CONNSECMARK": Kind.REWRITES,
    "NOTRACK": Kind.NOTRACK,
    # A flow translated by these leaves with a translation other than the proxy's, so the observer rejects it.
    "DNAT": Kind.IGNORED,
    "SNAT": Kind.IGNORED,
    "MASQUERADE": Kind.IGNORED,
    "REDIRECT": Kind.IGNORED,
    "NETMAP": Kind.IGNORED,
    # For checksums that the sender left to a device; the packets that the proxy sends have complete ones.
    "CHECKSUM": Kind.IGNORED,
    # Of ebtables; the observer sees the frame with its new link address.
    "snat": Kind.IGNORED,
    "dnat": Kind.IGNORED,
    "redirect": Kind.IGNORED,
    "arpreply": Kind.IGNORED,
}
#: By name, revision and data.
Decoder = Callable[[str, int, bytes], Part]
_ALL = 0xFFFFFFFF
_MARK = struct.Struct("=II")  # struct xt_mark_tginfo2: mark, mask
_CONNMARK = struct.Struct("=III")  # struct xt_connmark_tginfo1, tginfo2: ctmark, ctmask, nfmask
_CONNMARK_MODE = {1: 12, 2: 14}  # by revision
_CONNMARK_SET, _CONNMARK_SAVE = 0, 1  # XT_CONNMARK_SET, XT_CONNMARK_SAVE
_CT_NOTRACK = 1 | 2  # XT_CT_NOTRACK, XT_CT_NOTRACK_ALIAS
_CT = struct.Struct("=HHII16s32s")  # struct xt_ct_target_info_v1 (timeout since revision 1)
_MARK_MATCH = struct.Struct("=II")  # struct xt_mark_mtinfo1, xt_connmark_mtinfo1: mark, mask
_CONNLABEL = struct.Struct("=HH")  # struct xt_connlabel_mtinfo: bit, options
_CONNLABEL_SET = 2  # XT_CONNLABEL_OP_SET
_TCP = struct.Struct("=HHHHBBBB")  # struct xt_tcp: source ports, destination ports, option, flags, flags, inverted
_UDP = struct.Struct("=HH")  # struct xt_udp: source ports, ...
_ALL_PORTS = (0, 0xFFFF)
#: struct xt_nfacct_match_info: the name of an object of nfnetlink_acct. Whether it has a quota is not in the rule.
_NFACCT = struct.Struct("=32s")
#: The objects that kube-proxy makes, without a quota.
_WITHOUT_QUOTA = frozenset({"ct_state_invalid_dropped_pkts", "localhost_nps_accepted_pkts"})
_MULTIPORT_DESTINATION = 1  # XT_MULTIPORT_DESTINATION
_CONNTRACK = struct.Struct("=146xHHH")  # struct xt_conntrack_mtinfo2, mtinfo3: compared, inverted, states
_CONNTRACK_STATE = 1  # XT_CONNTRACK_STATE
#: XT_CONNTRACK_STATE_BIT(IP_CT_NEW); XT_CONNTRACK_STATE_SNAT, XT_CONNTRACK_STATE_DNAT
_STATE_NEW, _STATES_TRANSLATED = 1 << 3, 1 << 6 | 1 << 7
#: XT_CONNTRACK_ORIGSRC_PORT, XT_CONNTRACK_REPLDST_PORT
_CONNTRACK_SOURCE_PORTS = 1 << 8 | 1 << 11
_SET = struct.Struct("=HxB")  # struct xt_set_info: index, dim, flags
_SET_SOURCES = 1 << 1 | 1 << 2 | 1 << 3  # IPSET_DIM_ONE_SRC, IPSET_DIM_TWO_SRC, IPSET_DIM_THREE_SRC
#: Offsets in struct xt_set_info_match_v3 and _v4 of the operators that compare an element's counters.
_SET_OPERATORS = {3: (8, 24), 4: (16, 32)}


def match(name: str, revision: int, data: bytes) -> Part:
    """A match; ``data`` as in the kernel."""
    if name == "set" and any(data[at : at + 1] > b"\0" for at in _SET_OPERATORS.get(revision, ())):
        return Part(Kind.COUNTS, "a set's counters")
    if name == "tcp" and len(data) >= _TCP.size and _TCP.unpack_from(data)[4]:
        return Part(Kind.INSPECTS, "tcp --tcp-option")
    if name == "connlabel" and len(data) >= _CONNLABEL.size and _CONNLABEL.unpack_from(data)[1] & _CONNLABEL_SET:
        return Part(Kind.CONNMARK, "connlabel --set", field=Field.LABEL)
    if name == "nfacct":
        return _nfacct(data)
    if name in _CONDITIONS:
        part = _compared(name, revision, data)
        return replace(part, words=name, key=_key(name, revision, data), varies=name not in _LASTING)
    kind = _MATCHES.get(name, Kind.UNKNOWN)
    return Part(kind, name if kind is not Kind.UNKNOWN else f"unknown match {name}")


def _nfacct(data: bytes) -> Part:
    """It counts and always matches, or, if its object has a quota, only when that is used up."""
    (found,) = _NFACCT.unpack_from(data.ljust(_NFACCT.size, b"\0"))
    name = found.partition(b"\0")[0].decode(errors="replace")
    if name in _WITHOUT_QUOTA:
        return Part(Kind.IGNORED, "nfacct")
    return Part(Kind.COUNTS, f"{ACCOUNTING}{name}, which may have a quota")


def _compared(name: str, revision: int, data: bytes) -> Part:
    """A condition with its field, as far as the judge needs it."""
    field, bits = Field.OTHER, None
    if name in ("mark", "connmark"):
        field = Field.MARK if name == "mark" else Field.CONNMARK
        bits = _MARK_MATCH.unpack_from(data)[1] if revision == 1 and len(data) >= _MARK_MATCH.size else None
    elif name == "connlabel":
        field = Field.LABEL
    elif name == "conntrack" and revision in (2, 3) and len(data) >= _CONNTRACK.size:
        compared, inverted, states = _CONNTRACK.unpack_from(data)
        if compared & _CONNTRACK_STATE:
            field, bits = Field.STATE, ~states & 0xFFFF if inverted & _CONNTRACK_STATE else states
            if bits & _STATES_TRANSLATED:
                bits |= _STATE_NEW  # the packet has this state in addition to its own
        if compared & _CONNTRACK_SOURCE_PORTS and (bits is None or bits & _STATE_NEW):
            field, bits = Field.SOURCE_PORT, None
    elif name == "set" and revision and len(data) >= _SET.size:
        index, flags = _SET.unpack_from(data)
        if flags & _SET_SOURCES:
            field, bits = Field.IPSET, index | (flags & _SET_SOURCES) << 16
    elif name == "state":
        field, bits = Field.STATE, int.from_bytes(data[:4], sys.byteorder)
    elif name in ("tcp", "udp", "udplite"):
        field = Field.OTHER if _UDP.unpack_from(data.ljust(_UDP.size, b"\0")) == _ALL_PORTS else Field.SOURCE_PORT
    elif name == "multiport" and data[:1] != bytes([_MULTIPORT_DESTINATION]):
        field = Field.SOURCE_PORT
    return Part(Kind.CONDITION, field=field, number=bits)


def target(name: str, revision: int, data: bytes) -> Part:
    """A target; ``data`` as in the kernel. Not for the standard target, which is a verdict."""
    if name == "MARK":
        return _mark(revision, data)
    if name in ("HMARK", "mark"):
        return Part(Kind.MARK, name, number=_ALL)
    if name == "CONNMARK":
        return _connmark(revision, data)
    if name == "CT":
        return _ct(data)
    kind = _TARGETS.get(name, Kind.UNKNOWN)
    return Part(kind, name if kind is not Kind.UNKNOWN else f"unknown target {name}")


def _key(name: str, revision: int, data: bytes) -> bytes:
    return b"%s %d %s" % (name.encode(), revision, data)


def _mark(revision: int, data: bytes) -> Part:
    if revision != 2 or len(data) < _MARK.size:
        return Part(Kind.MARK, "MARK", number=_ALL)
    value, mask = _MARK.unpack_from(data)
    # The new mark is the old one without the bits of the mask, xor the value.
    return Part(Kind.MARK, "MARK", number=mask | value, value=value if not value & ~mask else None)


def _connmark(revision: int, data: bytes) -> Part:
    at = _CONNMARK_MODE.get(revision, len(data))
    if len(data) <= at:
        return Part(Kind.RESTORE, "CONNMARK", number=_ALL)
    mark, flow_mask, packet_mask = _CONNMARK.unpack_from(data)
    mode = data[at]
    if mode == _CONNMARK_SET:
        return Part(Kind.CONNMARK, "CONNMARK", number=flow_mask | mark)
    if mode == _CONNMARK_SAVE:
        return Part(Kind.CONNMARK, "CONNMARK", number=flow_mask)
    return Part(Kind.RESTORE, "CONNMARK --restore-mark", number=packet_mask)


def _ct(data: bytes) -> Part:
    if len(data) < _CT.size:
        return Part(Kind.TRACKS, "CT")
    flags, zone, _, _, helper, timeout = _CT.unpack_from(data)
    if flags & _CT_NOTRACK:
        return Part(Kind.NOTRACK, "CT --notrack")
    if zone or flags:
        return Part(Kind.TRACKS, "CT --zone")
    if helper.rstrip(b"\0"):
        return Part(Kind.TRACKS, "CT --helper")
    if timeout.rstrip(b"\0"):
        return Part(Kind.TRACKS, "CT --timeout")
    return Part(Kind.IGNORED, "CT")  # configures only which events are reported
