# SPDX-License-Identifier: Apache-2.0
"""Cases of configuration files (spec/configuration §1, §2): a name, then the fields after the usual header."""

# A table: one line for each case or series, however long.
# ruff: noqa: E501
# fmt: off
from __future__ import annotations

from tests.parity.case import HEADER, Case, with_fields, with_file

KUBEADM = """bindAddress: 0.0.0.0
bindAddressHardFail: false
clientConnection:
  acceptContentTypes: ""
  burst: 0
  contentType: ""
  kubeconfig: /var/lib/kube-proxy/kubeconfig.conf
  qps: 0
clusterCIDR: 10.244.0.0/16
configSyncPeriod: 0s
conntrack:
  maxPerCore: null
  min: null
  tcpBeLiberal: false
  tcpCloseWaitTimeout: null
  tcpEstablishedTimeout: null
  udpStreamTimeout: 0s
  udpTimeout: 0s
detectLocal: {bridgeInterface: "", interfaceNamePrefix: ""}
detectLocalMode: ""
enableProfiling: false
healthzBindAddress: ""
hostnameOverride: ""
iptables: {localhostNodePorts: null, masqueradeAll: false, masqueradeBit: null, minSyncPeriod: 0s, syncPeriod: 0s}
ipvs:
  excludeCIDRs: null
  minSyncPeriod: 0s
  scheduler: ""
  strictARP: false
  syncPeriod: 0s
  tcpFinTimeout: 0s
  tcpTimeout: 0s
  udpTimeout: 0s
logging: {flushFrequency: 0, options: {json: {infoBufferSize: "0"}, text: {infoBufferSize: "0"}}, verbosity: 0}
metricsBindAddress: ""
mode: ""
nftables: {masqueradeAll: false, masqueradeBit: null, minSyncPeriod: 0s, syncPeriod: 0s}
nodePortAddresses: null
oomScoreAdj: null
portRange: ""
showHiddenMetricsForVersion: ""
winkernel: {enableDSR: false, forwardHealthCheckVip: false, networkName: "", rootHnsEndpointName: "", sourceVip: ""}
"""

# Texts with a value: (description, field with %s, values). One case each.
SERIES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("bind address", "bindAddress: %s", (
        '"::"', "::0", "1.2.3.4", "fd00::5", "'[::1]'", "localhost", "''", "1.2.3", "01.002.3.4", "'::ffff:1.2.3.4'",
        "'fe80::1%eth0'", "' 1.2.3.4'", "1.2.3.4:80",
    )),
    ("healthz address", "healthzBindAddress: %s", (
        "1.2.3.4", "fd00::5", "1.2.3.4:0", "1.2.3.4:65536", "1.2.3.4:080", "1.2.3.4:+80", "1.2.3.4:", "':80'",
        "foo:80", "'[::]:80'", "'[fd00::1]'", "'::1:80'", "1.2.3.4:x", "''", "null", "1.2.3.4:-1", "a:b:c",
    )),
    ("metrics address", "metricsBindAddress: %s", (
        "1.2.3.4", "fd00::5", "1.2.3.4:0", "1.2.3.4:65536", "foo", "foo:x", "'[::1]:1'", "''", "'[::1]x:1'", "'[::1:1'",
        "1.2.3.4:99999999999999999999",
    )),
    ("mode", "mode: %s", ("iptables", "ipvs", "nftables", "''", "userspace", "kernelspace", "IPTables", "null", "7")),
    ("detect local mode", "detectLocalMode: %s", (
        "ClusterCIDR", "NodeCIDR", "BridgeInterface", "InterfaceNamePrefix", "''", "clustercidr", "null",
    )),
    ("bridge interface", "detectLocalMode: BridgeInterface\ndetectLocal: {bridgeInterface: %s}", ("cbr0", "''", "n")),
    ("interface prefix", "detectLocalMode: InterfaceNamePrefix\ndetectLocal: {interfaceNamePrefix: %s}", ("veth", "''")),
    ("cluster CIDR", "clusterCIDR: %s", (
        "10.0.0.0/8", "fd00::/48", '"10.0.0.0/8,fd00::/48"', '"fd00::/48,10.0.0.0/8"', '"10.0.0.0/8,11.0.0.0/8"',
        '"10.0.0.0/8,fd00::/48,11.0.0.0/8"', "10.0.0.0", "10.0.0.0/33", '"10.0.0.0/8, fd00::/48"', '","', "'10.0.0.0/8,'",
        "010.0.0.0/08", "10.1.2.3/8", "10.0.0.0/-1", "10.0.0.0/+8", '"x,y"', '"::ffff:10.0.0.0/104"', "'10.0.0.0/8,x'",
    )),
    ("cluster CIDR that is not looked at", "detectLocalMode: NodeCIDR\nclusterCIDR: %s", ("nonsense", "'a,b,c'")),
    ("node port addresses", "nodePortAddresses: %s", (
        "[]", "null", "[primary]", "[primary, primary]", "[10.0.0.0/8, primary, x]", "[primary, 10.0.0.0/8]",
        "[10.0.0.0/8, fd00::/64]", "[10.0.0.0]", "[localhost]", "[all]", "[10.1.2.3/8]", "[010.0.0.0/8]", "['']",
        "[10.0.0.0/8, x, y]", "10.0.0.0/8", "[1]", "[null]", "[[a]]", "{a: b}",
    )),
    ("node port addresses of nftables", "mode: nftables\nnodePortAddresses: %s", ("[]", "[10.0.0.0/8]", "[primary]")),
    ("masquerade bit", "iptables: {masqueradeBit: %s}", (
        "0", "31", "32", "-1", "5.0", "1e1", "0x5", "0o7", "010", "0b11", "08", "1_0", "1.5", "'14'", "true", "null",
        "2147483647", "2147483648", "-2147483648", "9223372036854775808", "18446744073709551615", "1e30", "+5", "~",
        "1:20", ".5", "5.", ".inf", ".nan", "-0", "1e-1", "[1]", "{}", "1e20", "1e21", "2026-01-01", "!!str 5", "!!int '5'",
        "!!float 5", "!!int x",
    )),
    ("masquerade bit of nftables in its mode", "mode: nftables\nnftables: {masqueradeBit: %s}", ("0", "32", "-1", "null")),
    ("masquerade bit of nftables elsewhere", "nftables: {masqueradeBit: %s}", ("99", "x")),
    ("masquerade all", "iptables: {masqueradeAll: %s}", (
        "true", "yes", "Y", "on", "off", "'true'", "1", "null", "oN", "TRUE", "[]",
    )),
    ("localhost node ports", "iptables: {localhostNodePorts: %s}", ("false", "true", "null", "0")),
    ("sync period", "iptables: {syncPeriod: %s}", (
        "0s", "1s", "-1s", "30", "null", "''", "1h30m", "1.5s", "250ms", "1us", "1µs", "1ns", "1d", "1 s", "s", ".5s",
        "1.s", ".s", "+1m", "'0'", "'5'", "9223372036s", "9223372037s", "2562047h47m16.854775807s",
        "2562047h47m16.854775808s", "-2562047h47m16.854775808s", "1m1m", "1s1h", "1.0000000001s", "0.1ns", "1e3s", "[]",
        "true", "1h0m0.000000001s", "100000000000000000000000000ns", "'1\"s'", "1.9999999999999999999999s", "0.5",
    )),
    ("minimal sync period", "iptables: {minSyncPeriod: %s}", ("0s", "31s", "30s", "-1s", "5s", "null")),
    ("minimal sync period of nftables", "mode: nftables\nnftables: {minSyncPeriod: %s}", ("0s", "31s", "5s", "-1s")),
    ("sync period of ipvs", "mode: ipvs\nipvs: {syncPeriod: %s}", ("0s", "5s", "-1s")),
    ("minimal sync period of ipvs", "mode: ipvs\nipvs: {minSyncPeriod: %s}", ("0s", "5s", "31s", "-5s")),
    ("excluded CIDRs", "mode: ipvs\nipvs: {excludeCIDRs: %s}", ("[10.0.0.0/8]", "[x, 10.0.0.0/8, y]", "[]", "null")),
    ("excluded CIDRs out of ipvs", "ipvs: {excludeCIDRs: %s}", ("[x]",)),
    ("scheduler", "mode: ipvs\nipvs: {scheduler: %s}", ("rr", "nonsense", "mh", "''")),
    ("strict ARP", "ipvs: {strictARP: %s}", ("true", "1")),
    ("ipvs TCP timeout", "mode: ipvs\nipvs: {tcpTimeout: %s}", ("15m", "-1s", "null")),
    ("ipvs FIN timeout", "mode: ipvs\nipvs: {tcpFinTimeout: %s}", ("2m", "-1ms")),
    ("ipvs UDP timeout", "mode: ipvs\nipvs: {udpTimeout: %s}", ("5m", "-1ns")),
    ("ipvs timeout out of its mode", "ipvs: {tcpTimeout: %s}", ("-1s",)),
    ("out-of-memory score", "oomScoreAdj: %s", ("-1000", "1000", "1001", "-1001", "0", "null", "x")),
    ("conntrack per core", "conntrack: {maxPerCore: %s}", ("0", "-1", "1", "null", "2147483648")),
    ("conntrack minimum", "conntrack: {min: %s}", ("0", "-1", "1000000", "1.5")),
    ("conntrack established timeout", "conntrack: {tcpEstablishedTimeout: %s}", ("0s", "-1s", "48h", "null", "1d", "0")),
    ("conntrack close wait timeout", "conntrack: {tcpCloseWaitTimeout: %s}", ("0s", "-1s", "60s", "''")),
    ("conntrack UDP timeout", "conntrack: {udpTimeout: %s}", ("0s", "-1s", "10s", "null")),
    ("conntrack UDP stream timeout", "conntrack: {udpStreamTimeout: %s}", ("-1h", "10s")),
    ("liberal conntrack", "conntrack: {tcpBeLiberal: %s}", ("true", "'yes'")),
    ("configuration sync period", "configSyncPeriod: %s", ("0s", "-1s", "1h", "15", "null")),
    ("client rate", "clientConnection: {qps: %s}", (
        "0", "-1", "5.5", "0.1", "1e10", "1e38", "1e39", "'5'", "16777217", "1e21", "1e-7", "123456789", "3.4028235e38",
        "1e20", "0.000001", "null", ".inf", "33.333333333",
    )),
    ("client burst", "clientConnection: {burst: %s}", ("0", "-1", "10", "2147483648", "x")),
    ("content type", "clientConnection: {contentType: %s}", ("''", "application/json", "1")),
    ("host name", "hostnameOverride: %s", ("node-1", "' Node '", "NODE", "''", "'  '", "5", "0x10")),
    ("hidden metrics", "showHiddenMetricsForVersion: %s", ("'1.35'", "'1.34'", "'1.36'", "1.35", "x", "''", "'1.035'")),
    ("port range", "portRange: %s", ("''", "1-2", "nonsense", "5")),
    ("feature gates", "featureGates: %s", (
        "{}", "null", "{Foo: true}", "{NFTablesProxyMode: false}", "{NFTablesProxyMode: true}", "{AllAlpha: true}",
        "{AllBeta: true}", "{AllBeta: false}", "{LoggingAlphaOptions: true}", "{ContextualLogging: false}",
        "{ContextualLogging: 'true'}", "[a]", "{AllAlpha: false, AllBeta: true}", "{'': true}", "{AllAlpha: null}",
        "{StrictIPCIDRValidation: true}", "{CBORServingAndStorage: true, ClientsPreferCBOR: true}",
        "{KubeProxyIPVS: true}", "{AllAlpha: 1}",
    )),
    ("log format", "logging: {format: %s}", ("text", "json", "xml", "''", "TEXT")),
    ("flush frequency", "logging: {flushFrequency: %s}", (
        "0", "5s", "5000000000", "'0'", "-1s", "-1", "1.5", "true", "1", "null", "x", "[]", "''", "1e9", "9223372036854775808",
    )),
    ("verbosity", "logging: {verbosity: %s}", ("0", "2147483647", "2147483648", "4294967295", "4294967296", "-1", "x", "1.5")),
    ("vmodule", "logging: {vmodule: %s}", (
        "[]", "null", "[{filePattern: a, verbosity: 1}]", "[{filePattern: '', verbosity: 1}]", "[{filePattern: a=b}]",
        "[{filePattern: 'a,b', verbosity: 2147483648}]", "[{}]", "[{verbosity: x}]", "[null]", "[{filePattern: a, foo: 1}]",
        "{a: 1}", "[{filePattern: a, verbosity: 1}, {filePattern: b}]", "[a]",
    )),
    ("vmodule with JSON", "logging: {format: json, vmodule: %s}", ("[]", "[{filePattern: a, verbosity: 1}]")),
    ("split stream", "logging: {options: {text: {splitStream: %s}}}", ("true", "false", "1")),
    ("split stream of JSON", "logging: {format: json, options: {json: {splitStream: %s}}}", ("true",)),
    ("buffer size", "logging: {options: {text: {infoBufferSize: %s}}}", (
        "0", "'0'", "1", "1K", "null", "x", "''", "0Ki", "-0", "0.0", "1.5Gi", "'1 K'", "true", "[]", "'0m'", "'-1'",
    )),
    ("buffer size with the gate",
     "featureGates: {LoggingAlphaOptions: true}\nlogging: {options: {text: {infoBufferSize: %s}}}", (
        "0", "1", "1K", "1Ki", "1024", "2048", "1.5Gi", "1000m", "1e3", "1E3", "1E", "1n", "1u", "12345678901234567890",
        "0.5", "1500", "1500m", "-5", "+5", "0.0001", "1M", "1000K", "1000000", "1024Ki", "1023Ki", "100e-2", "1e30",
        "'.5'", "'5.'", "'.'", "1KI", "1k", "'0x10'", "1_000", "'1.0'", "1P", "9E", "10E", "8Ei", "3.1415926535897932", "1000E",
    )),
    ("buffer size of JSON with the gate",
     "featureGates: {LoggingAlphaOptions: true}\nlogging: {options: {json: {infoBufferSize: %s}}}", ("1Mi", "x")),
    ("split stream with the gate",
     "featureGates: {LoggingAlphaOptions: true}\nlogging: {options: {text: {splitStream: %s}}}", ("true",)),
    ("network name", "winkernel: {networkName: %s}", ("n", "net", "null", "''", "'n'", "yes", "No", "~", "NULL")),
    ("DSR", "winkernel: {enableDSR: %s, forwardHealthCheckVip: true, sourceVip: 1.2.3.4, rootHnsEndpointName: x}", ("true",)),
    ("Windows service", "windowsRunAsService: %s", ("true", "false", "1")),
)

# Whole bodies after the header.
BODIES: tuple[tuple[str, str], ...] = (
    ("no field at all", ""),
    ("the file that kubeadm writes", KUBEADM),
    ("an unknown field", "foo: 1"),
    ("an unknown field in a section", "iptables: {foo: 1, masqueradeBit: 3}"),
    ("unknown fields at several places", "foo: 1\nbar: {a: b}\nipvs: {x: y}\nlogging: {options: {text: {z: 1}}}"),
    ("a section that is unknown", "userspace: {udpIdleTimeout: 250ms}"),
    ("the field of the userspace proxy", "udpIdleTimeout: 250ms"),
    ("a field in the wrong case", "clusterCidr: 10.0.0.0/8"),
    ("kind in the wrong case as well", "Kind: Other"),
    ("a duplicate field", "mode: nftables\nmode: iptables"),
    ("a duplicate field, the first one bad", "oomScoreAdj: x\noomScoreAdj: 5"),
    ("a duplicate field, the last one bad", "oomScoreAdj: 5\noomScoreAdj: x"),
    ("a duplicate in a section", "iptables:\n  masqueradeBit: 3\n  masqueradeAll: true\n  masqueradeBit: 4"),
    ("a duplicate section", "iptables: {masqueradeBit: 3}\niptables: {masqueradeAll: true}"),
    ("a duplicate whose value is empty", "iptables:\n  a: 1\n  a: {}\n  a: []"),
    ("a duplicate whose value is a block", "iptables:\n  masqueradeBit: 3\niptables:\n  masqueradeAll: true\nnodePortAddresses: []\n"
     "nodePortAddresses:\n- primary"),
    ("the same key thrice", "mode: a\nmode: b\nmode: ipvs"),
    ("a duplicate and an unknown field", "mode: x\nmode: iptables\nfoo: 1\niptables: {bar: 1, bar: 2}"),
    ("a duplicate and a bad value", "mode: x\nmode: iptables\noomScoreAdj: 2000"),
    ("a duplicate and a type error", "mode: x\nmode: iptables\noomScoreAdj: x"),
    ("duplicate numbers as keys", "featureGates: {1: true, 1: false}"),
    ("a number as key of the gates", "featureGates: {5: true}"),
    ("booleans as keys", "yes: 1\ntrue: 2"),
    ("null as key", "~: 1"),
    ("a float as key", "1.5: 1\n1e3: 2"),
    ("a list as key", "[a]: 1"),
    ("a map as key", "{a: b}: 1"),
    ("a complex key", "? a\n: 1\n? b\n: 2"),
    ("sections that are null", "iptables: null\nipvs: ~\nnftables:\nlogging:\nconntrack: null\ndetectLocal: ~"),
    ("sections that are lists", "iptables: []"),
    ("sections that are texts", "conntrack: text"),
    ("sections that are numbers", "ipvs: 5"),
    ("sections that are booleans", "nftables: true"),
    ("a list for a text", "clusterCIDR: [10.0.0.0/8]"),
    ("a map for a text", "mode: {a: b}"),
    ("a number for a text", "clusterCIDR: 5"),
    ("a boolean for a text", "hostnameOverride: yes"),
    ("a text for a boolean", "enableProfiling: 'yes'"),
    ("a number for a boolean", "bindAddressHardFail: 1"),
    ("a map for a list", "nodePortAddresses: {}"),
    ("a map for a number", "oomScoreAdj: {}"),
    ("a map for a duration", "configSyncPeriod: {}"),
    ("two type errors", "mode: 5\noomScoreAdj: x"),
    ("two type errors in sections", "iptables: {masqueradeBit: '14'}\nmode: 5\nconntrack: {min: 1.5}"),
    ("a bad duration after a type error", "conntrack: {min: x}\niptables: {syncPeriod: 1 day}"),
    ("a bad duration before a type error", "conntrack: {tcpCloseWaitTimeout: x}\noomScoreAdj: y"),
    ("type error in a list after a good entry", "nodePortAddresses: [10.0.0.0/8, 5]"),
    ("type error in vmodule", "logging: {vmodule: [{filePattern: a}, {filePattern: 5}]}"),
    ("a duration that is a map in a section", "iptables: {syncPeriod: {a: 1}}"),
    ("everything true", "bindAddressHardFail: true\nenableProfiling: true\nwindowsRunAsService: true"),
    ("sections of the other modes are written as zero", "iptables: {masqueradeAll: true, syncPeriod: 5s}\n"
     "ipvs: {syncPeriod: 6s, minSyncPeriod: 2s}\nnftables: {masqueradeAll: true, syncPeriod: 7s, minSyncPeriod: 3s}"),
    ("sections of the other modes in nftables", "mode: nftables\niptables: {masqueradeAll: true, syncPeriod: 5s}\n"
     "ipvs: {syncPeriod: 6s, minSyncPeriod: 2s}\nnftables: {masqueradeAll: true, syncPeriod: 7s, minSyncPeriod: 3s}"),
    ("sections of the other modes in ipvs", "mode: ipvs\niptables: {masqueradeAll: true, syncPeriod: 5s}\n"
     "ipvs: {syncPeriod: 6s, minSyncPeriod: 2s}\nnftables: {masqueradeAll: true, syncPeriod: 7s, minSyncPeriod: 3s}"),
    ("sections of the other modes in a mode that is none", "mode: x\niptables: {syncPeriod: -5s}\nipvs: {syncPeriod: -6s}"),
    ("bad periods in sections that are not in force", "nftables: {syncPeriod: -1s}\nipvs: {syncPeriod: -1s}"),
    ("negative periods everywhere", "iptables: {syncPeriod: -1s, minSyncPeriod: -2s}\nconfigSyncPeriod: -3s"),
    ("many errors at once", "mode: x\niptables: {masqueradeBit: 99, minSyncPeriod: 1h}\noomScoreAdj: 5000\n"
     "bindAddress: x\nhealthzBindAddress: y\nmetricsBindAddress: z:0\nclusterCIDR: 'a,b'\n"
     "nodePortAddresses: [x, primary]\nshowHiddenMetricsForVersion: '1.1'\nclientConnection: {burst: -1}\n"
     "conntrack: {maxPerCore: -1, min: -2, tcpEstablishedTimeout: -1s, tcpCloseWaitTimeout: -2s, udpTimeout: -3s,"
     " udpStreamTimeout: -4s}\ndetectLocalMode: ClusterCIDR\nconfigSyncPeriod: -1s"),
    ("many errors of ipvs", "mode: ipvs\niptables: {masqueradeBit: -5}\nipvs: {tcpTimeout: -1s, tcpFinTimeout: -1s,"
     " udpTimeout: -1s, excludeCIDRs: [a, b], syncPeriod: -1s, minSyncPeriod: -5s}\nnftables: {masqueradeBit: 77}"),
    ("many errors of nftables", "mode: nftables\niptables: {masqueradeBit: 40}\nnftables: {masqueradeBit: 41,"
     " syncPeriod: -1s, minSyncPeriod: -5s}\nipvs: {tcpTimeout: -1s}"),
    ("many errors of logging", "logging: {format: xml, flushFrequency: -1s, verbosity: 3000000000,"
     " vmodule: [{filePattern: ''}, {filePattern: 'a=b', verbosity: 3000000000}],"
     " options: {text: {infoBufferSize: 5, splitStream: true}, json: {infoBufferSize: 6, splitStream: true}}}"),
    ("logging errors come before the others", "oomScoreAdj: 5000\nlogging: {format: xml}"),
    ("a bad gate comes before the others", "oomScoreAdj: 5000\nlogging: {format: xml}\nfeatureGates: {Foo: true}"),
    ("a bridge without a name", "detectLocalMode: BridgeInterface\nclusterCIDR: nonsense"),
    ("a mode of detection that is none", "detectLocalMode: Foo\nclusterCIDR: nonsense"),
    ("IPv6 defaults", "bindAddress: fd00::1"),
    ("IPv6 defaults for nonsense", "bindAddress: nonsense"),
    ("IPv4 in IPv6 takes the IPv4 defaults", "bindAddress: '::ffff:1.2.3.4'"),
    ("an anchor and an alias", "bindAddress: &a 1.2.3.4\nhostnameOverride: *a"),
    ("a section by alias", "iptables: &a {masqueradeBit: 3}\nnftables: *a"),
    ("a merge key", "iptables: &a {masqueradeBit: 3, syncPeriod: 5s}\nnftables:\n  <<: *a\n  masqueradeBit: 4"),
    ("a merge key after the field", "iptables: &a {masqueradeBit: 3}\nnftables:\n  masqueradeBit: 4\n  <<: *a"),
    ("a merge of several", "iptables: &a {masqueradeBit: 3}\nipvs: &b {syncPeriod: 9s, scheduler: rr}\n"
     "nftables:\n  <<: [*a, *b]\n"),
    ("a merge of a text", "iptables: {<<: text}"),
    ("a merge of a mapping written out", "iptables: {<<: {masqueradeBit: 7}}"),
    ("an alias that is unknown", "bindAddress: *nope"),
    ("an anchor that holds itself", "iptables: &a {x: *a}"),
    ("anchors that explode", "a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\n"
     "c: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b]\nd: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c]\ne: [*d,*d,*d,*d,*d,*d,*d,*d,*d]"),
    ("anchors that double a little", "a: &a [x,x,x]\nb: [*a,*a,*a]"),
    ("a block text", "clusterCIDR: |\n  10.0.0.0/8\n"),
    ("a folded text", "hostnameOverride: >-\n  a\n  b"),
    ("a text over two lines", "hostnameOverride: a\n  b"),
    ("escapes in a text", 'hostnameOverride: "a\\tb\\x41\\u00e9"'),
    ("a comment at the end of a line", "mode: ipvs # the old one"),
    ("a hash inside a text", "hostnameOverride: a#b"),
    ("an explicit tag for binary", "hostnameOverride: !!binary YWJj"),
    ("a binary that is none", "hostnameOverride: !!binary '*'"),
    ("a tag of one's own", "hostnameOverride: !foo bar"),
    ("a tag of one's own at a number", "oomScoreAdj: !foo 5"),
    ("a timestamp for a text", "hostnameOverride: 2026-01-01"),
    ("a date with time for a text", "hostnameOverride: 2026-01-01T00:00:00Z"),
    ("a second document", "mode: ipvs\n---\nmode: nftables"),
    ("an end of document and rubbish", "mode: ipvs\n...\n{{{{"),
    ("a second document that is broken", "mode: ipvs\n---\n[1"),
    ("unquoted double colon", "bindAddress: ::"),
    ("an open list", "a: [1"),
    ("an open map", "a: {b: 1"),
    ("an open quote", 'a: "b'),
    ("a tab as indentation", "iptables:\n\tmasqueradeBit: 3"),
    ("wrong indentation", "iptables:\n  masqueradeBit: 3\n masqueradeAll: true"),
    ("a reserved character", "a: @b"),
    ("a backquote", "a: `b`"),
    ("a percent sign", "a: %b"),
    ("no space after the colon", "mode:ipvs"),
    ("a list in the mapping", "- a"),
    ("a bad escape", 'a: "\\z"'),
    ("a control character", "a: b\x01c"),
    ("a control character in quotes", 'hostnameOverride: "b\x01c"'),
    ("a NUL", "a: b\x00c"),
    ("a directive in the middle", "%YAML 1.1"),
    ("unicode", "hostnameOverride: ñandú-日本"),
    ("an emoji", "hostnameOverride: \U0001f600"),
    ("a next-line character", "hostnameOverride: a\x85b"),
    ("texts that look like other things", "hostnameOverride: 'null'\nclientConnection: {kubeconfig: 'true', contentType: '5',"
     " acceptContentTypes: '~'}\nipvs: {scheduler: '1e3'}\nwinkernel: {networkName: 'y', sourceVip: '0x10',"
     " rootHnsEndpointName: '2026-01-01'}"),
    ("texts that need quotes when written", "hostnameOverride: 'a: b'\nclientConnection: {kubeconfig: '- a', contentType: '# b',"
     " acceptContentTypes: ' c '}\nipvs: {scheduler: \"l1\\nl2\"}\nwinkernel: {networkName: '{x}', sourceVip: \"it's\","
     " rootHnsEndpointName: '\"q\"'}"),
    ("more texts that need quotes", "hostnameOverride: '*x'\nclientConnection: {kubeconfig: '&x', contentType: '!x',"
     " acceptContentTypes: '?'}\nipvs: {scheduler: '-'}\nwinkernel: {networkName: '@x', sourceVip: '`x',"
     " rootHnsEndpointName: '%x'}"),
    ("still more texts", "hostnameOverride: 'a:'\nclientConnection: {kubeconfig: ':a', contentType: 'a #b',"
     " acceptContentTypes: \"tab\\there\"}\nipvs: {scheduler: '1:20'}\nwinkernel: {networkName: '<<', sourceVip: '=',"
     " rootHnsEndpointName: '---'}"),
    ("texts with numbers of base sixty", "hostnameOverride: '190:20:30'\nclientConnection: {kubeconfig: '1_000',"
     " contentType: '0b1', acceptContentTypes: '.5'}\nipvs: {scheduler: '+1'}\nwinkernel: {networkName: '.inf',"
     " sourceVip: 'No', rootHnsEndpointName: '0o7'}"),
    ("a long text with spaces", "hostnameOverride: '" + "word " * 40 + "end'"),
    ("a long text without spaces", "hostnameOverride: '" + "word" * 60 + "'"),
    ("a text of several lines when written", 'hostnameOverride: "a\\nb\\n"\nipvs: {scheduler: "\\na"}\n'
     'winkernel: {networkName: " a\\nb", sourceVip: "a\\n\\nb", rootHnsEndpointName: "a \\nb"}'),
    ("unusual characters when written", 'hostnameOverride: "\\u0007\\u00a0\\u2028"\nipvs: {scheduler: "\\x85"}\n'
     'winkernel: {networkName: "\\ufeffx", sourceVip: "\\x7f", rootHnsEndpointName: "é\\n"}'),
    ("lists when written", "nodePortAddresses: [10.0.0.0/8, 'fd00::/64']\nmode: ipvs\nipvs: {excludeCIDRs: ['10.0.0.0/8', '::/0']}"),
    ("a CIDR pair with the same network twice", "clusterCIDR: '10.0.0.0/8,10.0.0.0/8'"),
    ("old release's fields together", "udpIdleTimeout: 250ms\nresourceContainer: /kube-proxy\nportRange: ''\nmode: ''"),
    ("a key with a colon and nothing else, in braces", "iptables: {masqueradeBit:}"),
    ("a key with a question mark, in braces", "iptables: {masqueradeBit?: 3}"),
    ("two mistakes of syntax", "[]:! 1"),
    ("an anchor inside itself and a mistake further down", "a: &a [x, *a]\nb: [1"),
    ("an anchor whose name is given again inside", "iptables: &a {&a masqueradeBit: 3}\nhostnameOverride: *a"),
    ("deep nesting in an unknown field", "a: " + "[" * 200 + "]" * 200),
)

# Whole files, with their header.
WHOLE: tuple[tuple[str, str | bytes], ...] = (
    ("an empty file", ""),
    ("only white space", "  \n\n"),
    ("only a comment", "# nothing\n"),
    ("only a document start", "---\n"),
    ("a list", "[]"),
    ("a text", "hello"),
    ("a number", "5"),
    ("null", "null"),
    ("kind alone", "kind: KubeProxyConfiguration"),
    ("apiVersion alone", "apiVersion: kubeproxy.config.k8s.io/v1alpha1"),
    ("another kind", "apiVersion: v1\nkind: ConfigMap"),
    ("another kind of the group", "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: Foo"),
    ("another version", "apiVersion: kubeproxy.config.k8s.io/v1alpha2\nkind: KubeProxyConfiguration"),
    ("a version that is none", "apiVersion: a/b/c\nkind: KubeProxyConfiguration"),
    ("a version that is a number", "apiVersion: 1\nkind: KubeProxyConfiguration"),
    ("a kind that is a list", "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: [KubeProxyConfiguration]"),
    ("a kind that is null", "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: null"),
    ("kind and version in the wrong case", "ApiVersion: kubeproxy.config.k8s.io/v1alpha1\nKIND: KubeProxyConfiguration\nmode: ipvs"),
    ("kind last", "mode: ipvs\nkind: KubeProxyConfiguration\napiVersion: kubeproxy.config.k8s.io/v1alpha1\n"),
    ("kind twice", HEADER + "kind: KubeProxyConfiguration\n"),
    ("two kinds", HEADER + "kind: Other\n"),
    ("a byte order mark", "\ufeff" + HEADER + "mode: ipvs\n"),
    ("carriage returns", (HEADER + "mode: ipvs\n").replace("\n", "\r\n")),
    ("carriage returns alone", (HEADER + "mode: ipvs\n").replace("\n", "\r")),
    ("UTF-16", (HEADER + "mode: ipvs\n").encode("utf-16")),
    ("invalid UTF-8", HEADER.encode() + b"hostnameOverride: \xff\n"),
    ("invalid UTF-8 in a comment", HEADER.encode() + b"# \xff\nmode: ipvs\n"),
    ("a surrogate in UTF-8", HEADER.encode() + b"hostnameOverride: \xed\xa0\x80\n"),
    ("NUL bytes", b"\0\0\0"),
    ("no line end", HEADER + "mode: ipvs"),
    ("leading empty lines", "\n\n" + HEADER + "mode: ipvs\n"),
    ("a leading document start", "---\n" + HEADER + "mode: ipvs\n"),
    ("an empty first document", "---\n---\n" + HEADER),
    ("a directive", "%YAML 1.1\n---\n" + HEADER),
    ("a directive of another version", "%YAML 1.2\n---\n" + HEADER),
    ("indented as a whole", "".join("  " + line + "\n" for line in (HEADER + "mode: ipvs").splitlines())),
    ("JSON", '{"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration", "mode": "ipvs"}'),
    ("JSON with an unknown field", '{"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration",'
     ' "foo": 1, "iptables": {"bar": 2}}'),
    ("JSON with duplicates", '{"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration",'
     ' "mode": "x", "mode": "ipvs", "iptables": {"masqueradeBit": 1, "masqueradeBit": 2}}'),
    ("JSON with a duplicate section", '{"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration",'
     ' "iptables": {"masqueradeBit": 1}, "iptables": {"masqueradeAll": true}}'),
    ("JSON with a float", '{"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration",'
     ' "iptables": {"masqueradeBit": 5.0}}'),
    ("JSON with an exponent", '{"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration",'
     ' "iptables": {"masqueradeBit": 1e1}}'),
    ("JSON errors in the order of the file", '{"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind":'
     ' "KubeProxyConfiguration", "oomScoreAdj": "x", "conntrack": {"min": "y"}}'),
    ("JSON with a trailing comma", '{"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration",}'),
    ("JSON with a comment", '{"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", # c\n "kind": "KubeProxyConfiguration"}'),
    ("JSON with text after it", '{"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration"} x'),
    ("JSON with NaN", '{"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration", "a": NaN}'),
    ("JSON cut short", '{"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": '),
    ("JSON after white space", '\n\t {"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration"}\n\n'),
    ("JSON with a control character", '{"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration",'
     ' "hostnameOverride": "a\tb"}'),
    ("JSON with nulls", '{"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration", "mode": null,'
     ' "iptables": {"syncPeriod": null}}'),
    ("JSON with nulls that mean absent", '{"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration",'
     ' "mode": null, "iptables": {"masqueradeBit": null}, "conntrack": {"tcpEstablishedTimeout": null}}'),
    ("flow YAML that is no JSON", "{apiVersion: kubeproxy.config.k8s.io/v1alpha1, kind: KubeProxyConfiguration}"),
    ("JSON keys in the wrong case", '{"apiversion": "kubeproxy.config.k8s.io/v1alpha1", "Kind": "KubeProxyConfiguration"}'),
    ("JSON numbers that are no numbers", '{"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration",'
     ' "oomScoreAdj": 010}'),
    ("JSON with escapes", '{"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration",'
     ' "hostnameOverride": "\\u0041\\ud83d\\ude00\\ud83d"}'),
)


def cases() -> list[Case]:
    """Every file case, each with its own name."""
    found = []
    for name, template, values in SERIES:
        found += [with_fields(f"{name}: {value}", template % value) for value in values]
    found += [with_fields(name, body) for name, body in BODIES]
    found += [with_file(f"file: {name}", text) for name, text in WHOLE]
    return found
