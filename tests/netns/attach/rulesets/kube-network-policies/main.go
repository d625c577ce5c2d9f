// SPDX-License-Identifier: Apache-2.0

// Writes the rules of NetworkPolicies by the controller of kube-network-policies, for record.sh, and stays. A fake of
// the API has a pod of this node and a policy for it. The settings are those of kindnetd.
package main

import (
	"context"
	"log"

	v1 "k8s.io/api/core/v1"
	networking "k8s.io/api/networking/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	"sigs.k8s.io/kube-network-policies/pkg/networkpolicy"
)

func main() {
	named := meta.ObjectMeta{Namespace: "default", Name: "web"}
	pod := &v1.Pod{ObjectMeta: named, Spec: v1.PodSpec{NodeName: "node"}}
	pod.Status = v1.PodStatus{Phase: v1.PodRunning, PodIPs: []v1.PodIP{{IP: "10.244.1.10"}, {IP: "fd00:10:244:1::10"}}}
	policy := &networking.NetworkPolicy{ObjectMeta: named}
	namespace := &v1.Namespace{ObjectMeta: meta.ObjectMeta{Name: "default"}}
	client := fake.NewClientset(namespace, pod, policy)
	all := informers.NewSharedInformerFactory(client, 0)
	controller, err := networkpolicy.NewController(
		client,
		all.Networking().V1().NetworkPolicies(),
		all.Core().V1().Namespaces(),
		all.Core().V1().Pods(),
		nil, nil, nil, nil,
		networkpolicy.Config{
			FailOpen:            true,
			QueueID:             101,
			NodeName:            "node",
			NetfilterBug1766Fix: true,
			NFTableName:         "kindnet-network-policies",
			NRIdisabled:         true,
		},
	)
	if err != nil {
		log.Fatal(err)
	}
	all.Start(context.Background().Done())
	log.Fatal(controller.Run(context.Background()))
}
