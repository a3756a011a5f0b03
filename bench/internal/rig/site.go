package rig

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Site is dualcheck's own servers once more: an etcd, a Redis and a node that no other
// site has, so that nothing which one of them does is work for another's.
type Site struct {
	Name string // "": the usual one
	// Args are further arguments of its node.
	Args []string
	// Bare: without Redis.
	Bare bool
}

// At is the rig as those see it who use this site's servers. The rivals' are the same
// everywhere.
func (r *Rig) At(s Site) *Rig { return &Rig{core: r.core, site: s} }

// own is the name of one of the site's servers.
func (r *Rig) own(name string) string {
	if r.site.Name == "" {
		return name
	}
	return r.site.Name + "." + name
}

// CloseSite stops the servers of this site, the last first, and removes what they kept.
func (r *Rig) CloseSite() {
	for i := len(r.started) - 1; i >= 0; i-- {
		if name := r.started[i].name; strings.HasPrefix(name, r.own("")) && r.site.Name != "" {
			r.started[i].stop()
			r.started = slices.Delete(r.started, i, i+1)
			delete(r.servers, name)
			_ = os.RemoveAll(filepath.Join(r.dir, name)) // the directory goes with the rig at the latest
		}
	}
}
