package childproc

import (
	"bufio"
	"errors"
	"io"
	"os"
	"syscall"
	"testing"
	"time"
)

func TestKilledParentTakesItsChildWithIt(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	cmd := as("parent")
	cmd.Stdout, cmd.Stderr = w, os.Stderr
	parent, err := Start(cmd)
	w.Close()
	if err != nil {
		t.Fatal(err)
	}
	defer parent.Kill()
	if err := r.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	// Only the child writes, and has the pipe open once its parent has gone.
	line, err := bufio.NewReader(r).ReadString('\n')
	if err != nil || line != "the child runs\n" {
		t.Fatalf("%q, %v", line, err)
	}
	parent.Kill()
	if _, err := r.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("the child is left: %v", err)
	}
}

func TestStoppedIsKilled(t *testing.T) {
	p := mustStart(t, Start, "child")
	if err := p.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	p.Kill()
	if p.Status() != "signal: killed" {
		t.Errorf("it ended with %q", p.Status())
	}
}

// What the terminal sends goes to a process's group.
func TestProcessGroups(t *testing.T) {
	with, apart := mustStart(t, Start, "child"), mustStart(t, StartApart, "child")
	if group, err := syscall.Getpgid(with.Pid()); err != nil || group != syscall.Getpgrp() {
		t.Errorf("Start: in group %d, %v", group, err)
	}
	if group, err := syscall.Getpgid(apart.Pid()); err != nil || group != apart.Pid() {
		t.Errorf("StartApart: process %d is in group %d, %v", apart.Pid(), group, err)
	}
}
