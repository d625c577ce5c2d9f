// SPDX-License-Identifier: Apache-2.0

// Prints what kube-proxy makes of changes of Services and EndpointSlices, before it writes any rule: for each line of
// standard input, which is a JSON object with the changes, a line with the service ports and the health check node ports.
package main

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"slices"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/kubernetes/pkg/proxy"
)

type change struct {
	Kind   string
	Key    string
	Object json.RawMessage
	// A sync follows.
	Sync bool
}

type question struct {
	Node    string
	Zone    string
	Changes []change
}

type port struct {
	ClusterIP     string   `json:"cluster_ip"`
	Port          int      `json:"port"`
	NodePort      int      `json:"node_port"`
	VIPs          []string `json:"vips"`
	ExternalIPs   []string `json:"external_ips"`
	Ranges        []string `json:"ranges"`
	ExternalLocal bool     `json:"external_local"`
	InternalLocal bool     `json:"internal_local"`
	Affinity      int      `json:"affinity"`
	Cluster       []string `json:"cluster"`
	Local         []string `json:"local"`
	Any           bool     `json:"any"`
}

type answer struct {
	Ports  map[string]port `json:"ports"`
	Health map[string]int  `json:"health"`
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

func texts[T any](values []T, text func(T) string) []string {
	found := []string{}
	for _, value := range values {
		found = append(found, text(value))
	}
	slices.Sort(found)
	return found
}

func (a *answer) add(family v1.IPFamily, q question) {
	serviceChanges := proxy.NewServiceChangeTracker(family, nil, nil)
	sliceChanges := proxy.NewEndpointsChangeTracker(family, q.Node, nil, nil)
	services, endpoints := proxy.ServicePortMap{}, proxy.EndpointsMap{}
	knownServices, knownSlices := map[string]*v1.Service{}, map[string]*discovery.EndpointSlice{}
	sync := func() {
		services.Update(serviceChanges)
		endpoints.Update(sliceChanges)
	}
	for _, c := range q.Changes {
		gone := string(c.Object) == "null"
		if c.Kind == "Service" {
			before := knownServices[c.Key]
			var now *v1.Service
			delete(knownServices, c.Key)
			if !gone {
				now = &v1.Service{}
				check(json.Unmarshal(c.Object, now))
				knownServices[c.Key] = now
			}
			serviceChanges.Update(before, now)
		} else if !gone {
			now := &discovery.EndpointSlice{}
			check(json.Unmarshal(c.Object, now))
			knownSlices[c.Key] = now
			sliceChanges.EndpointSliceUpdate(now, false)
		} else if before := knownSlices[c.Key]; before != nil {
			delete(knownSlices, c.Key)
			sliceChanges.EndpointSliceUpdate(before, true)
		}
		if c.Sync {
			sync()
		}
	}
	sync()
	local := endpoints.LocalReadyEndpoints()
	for name, number := range services.HealthCheckNodePorts() {
		a.Health[fmt.Sprintf("%s/%s:%d", name, family, number)] = local[name]
	}
	ip := func(ip net.IP) string { return ip.String() }
	endpoint := func(e proxy.Endpoint) string { return e.String() }
	labels := map[string]string{v1.LabelTopologyZone: q.Zone}
	for name, s := range services {
		cluster, local, _, any := proxy.CategorizeEndpoints(endpoints[name], s, q.Node, labels)
		a.Ports[fmt.Sprintf("%s:%s/%s/%s", name.NamespacedName, name.Port, name.Protocol, family)] = port{
			ClusterIP:     s.ClusterIP().String(),
			Port:          s.Port(),
			NodePort:      s.NodePort(),
			VIPs:          texts(s.LoadBalancerVIPs(), ip),
			ExternalIPs:   texts(s.ExternalIPs(), ip),
			Ranges:        texts(s.LoadBalancerSourceRanges(), func(n *net.IPNet) string { return n.String() }),
			ExternalLocal: s.ExternalPolicyLocal(),
			InternalLocal: s.InternalPolicyLocal(),
			Affinity:      s.StickyMaxAgeSeconds(),
			Cluster:       texts(cluster, endpoint),
			Local:         texts(local, endpoint),
			Any:           any,
		}
	}
}

func main() {
	in, out := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	for in.More() {
		q := question{}
		check(in.Decode(&q))
		a := answer{map[string]port{}, map[string]int{}}
		a.add(v1.IPv4Protocol, q)
		a.add(v1.IPv6Protocol, q)
		check(out.Encode(a))
	}
}
