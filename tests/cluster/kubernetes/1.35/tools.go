// SPDX-License-Identifier: Apache-2.0

//go:build tools

// Package kubebuild exists for its go.mod: it pins what is built of Kubernetes, and by what checksums.
package kubebuild

import _ "k8s.io/kubernetes/cmd/kube-apiserver"
