package rig

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"strconv"
)

// as is a command that runs as another user, for servers that refuse to be root's.
// setpriv and not the kernel's attributes of a child: to change its user makes a process
// forget whose death it dies with, and setpriv says it again afterwards.
func as(name, bin string, args []string) (string, []string, error) {
	if name == "" || os.Geteuid() != 0 {
		return bin, args, nil
	}
	setpriv, err := exec.LookPath("setpriv")
	if err != nil {
		return "", nil, fmt.Errorf("it does not run as root, and setpriv is not installed: %w", err)
	}
	return setpriv, append([]string{"--reuid", name, "--regid", groupOf(name), "--clear-groups", "--pdeathsig", "SIGKILL", "--", bin}, args...), nil
}

func groupOf(name string) string {
	if u, err := user.Lookup(name); err == nil {
		return u.Gid
	}
	return name
}

// unprivileged is the first of these users that there is, if this process is root.
func unprivileged(names ...string) (string, error) {
	if os.Geteuid() != 0 {
		return "", nil
	}
	for _, name := range append(names, "nobody") {
		if _, err := user.Lookup(name); err == nil {
			return name, nil
		}
	}
	return "", errors.New("it does not run as root, and there is no other user")
}

// give makes a directory that user's.
func give(dir, name string) error {
	if name == "" {
		return nil
	}
	u, err := user.Lookup(name)
	if err != nil {
		return err
	}
	uid, err := strconv.Atoi(u.Uid)
	if err != nil {
		return err
	}
	gid, err := strconv.Atoi(u.Gid)
	if err != nil {
		return err
	}
	return os.Chown(dir, uid, gid)
}
